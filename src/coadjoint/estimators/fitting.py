"""Fitting: settings and data -> a trained network, as `coadjoint train` does it, without a folder.

Trained   a Model, its description in plain types, and how it was trained
train     makes and trains a network
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import gradients, networks, optimisers
from ..errors import MissingError, choose, whole_number
from ..models.model import Model
from ..networks.chain_text import parse_chain, widest
from ..networks.interface import Net
from ..tasks.data import Data
from ..tasks.description import JsonDict
from ..training import loop, storage
from ..training.linear_start import begin_linear_
from ..training.model_schema import build_network, network_options
from ..training.network_section import NetworkSection, Shape
from ..training.own_defaults import SectionValues
from ..training.progress import Result
from ..training.restore import load_weights
from .sections import complete, network_section

FEW_UNITS = 256  # up to which one thread is the fastest


@dataclass(frozen=True)
class Trained:
    """A trained network.

    network      in evaluation mode
    description  that of a model file, in plain types
    result       of the training loop
    """

    network: Net
    description: JsonDict
    result: Result


def train(
    task: Data,
    given: SectionValues,
    seed: int,
    precision: int,
    device: str,
    threads: int | None,
    verbose: bool,
) -> Trained:
    """Make a network for a task and train it.

    Args:
        task: The data.
        given: The settings that were given, by section: see `sections.group`.
        seed: Of the weights, batches and dropout.
        precision: 32 or 64 bits.
        device: "cpu", "cuda" or "auto".
        threads: Of the CPU while training; by default one for small networks.
        verbose: Print what was chosen, and the progress.
    """
    device = choose_device(device)
    sections, notes = complete(given, task)
    section = network_section(sections["network"])
    options = network_options(section, Shape.of(task), precision)
    net = networks.make(**options, seed=seed, device=device)
    if section.persistence:
        begin_linear_(net, task)
    if verbose:
        print("\n".join([*task.notes, *notes, net.extra_repr()]))
    training = sections["training"]
    of_optimiser: dict[str, Any] = {"pretrain": sections["gradient"].get("pretrain")}
    of_optimiser |= sections["optimiser"]
    with threads_for(section, threads):
        result = loop.train(
            net,
            task,
            gradient=gradients.make(**sections["gradient"], steps=training["steps"]),
            optimiser=optimisers.make(**of_optimiser),
            seed=seed,
            display=verbose,
            **training,
        )
    trained = result.network.eval()
    description = {
        "network": section.model_dump(exclude_none=True),
        "shape": Shape.of(trained).to_dict(),
        "precision": precision,
        "data": task.describe(),
        "task": task.name,
        "settings": {name: keys for name, keys in sections.items() if name != "network"},
    }
    return Trained(trained, description, result)


def choose_device(name: str) -> str:
    """Return cpu or cuda; auto takes a GPU if there is one."""
    choose("device", name, ("cpu", "cuda", "auto"))
    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if name == "cuda" and not available:
        raise MissingError("device cuda: no GPU was found. Use device 'cpu'.")
    return name


@contextlib.contextmanager
def threads_for(section: NetworkSection, threads: int | None) -> Iterator[None]:
    """Set torch's CPU threads, by default one for small networks, and set them back afterwards."""
    widths = section.hidden or 64
    units = max(widths) if isinstance(widths, list) else widths
    if section.chain is not None:
        units = widest(parse_chain(section.chain))
    before = torch.get_num_threads()
    if threads is not None or units <= FEW_UNITS:
        torch.set_num_threads(1 if threads is None else whole_number("threads", threads, most=1024))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_model(network: Net, description: JsonDict) -> Model:
    """Return the Model of a network and the description of its model file."""
    return Model(network, description["data"], description["settings"])


def to_bytes(network: Net, description: JsonDict) -> bytes:
    """Return a model file, model.safetensors, which `co.load` reads."""
    return storage.pack_model(network.state_dict(), description)


def from_bytes(content: bytes, description: JsonDict) -> Model:
    """Return the Model whose file is `content`; nothing in it is executed."""
    section = network_section(description["network"])
    shape = Shape.model_validate(description["shape"])
    network = build_network(section, shape, description["precision"])
    load_weights(network, storage.unpack(content, Path("estimator")), "the estimator")
    return make_model(network.eval(), description)


def history_of(result: Result) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [dict(row) for row in result.rows]
