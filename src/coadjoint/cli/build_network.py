"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, MissingError, choose
from .flags import flag, panel
from .schema import OPTIONS, Config, NetworkSection, Section, Whole


def device_of(name: str) -> str:
    import torch

    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        reason = "this torch was built without CUDA" if not torch.backends.cuda.is_built() else "no GPU was found"
        raise MissingError(f"--device cuda: {reason}. Use --device cpu.")
    return ("cuda" if cuda else "cpu") if name == "auto" else name


@dataclass(frozen=True)
class Reservoir:
    """Cell "reservoir": another one whose parameters stay where they begin."""

    cell: str = "leaky"
    start: Mapping[str, Any] = field(default_factory=lambda: {"init": "sparse", "radius": 0.9})
    frozen: tuple[str, ...] = ("W", "R", "b", "p.leak")
    text: str = (
        "W, R, b and leak are fixed: W sparse, of spectral radius 0.9 if nothing else is asked for. Only the readout is\n"
        "trained: by the gradient, or in closed form with --optimiser ridge."
    )
    paper: str = "Jaeger, GMD report 148 (2001)"


RESERVOIR = Reservoir()


def names_of(n: NetworkSection) -> list[str]:
    return n.cell if isinstance(n.cell, list) else [n.cell or "elman"]


def is_reservoir(n: NetworkSection) -> bool:
    return names_of(n) == ["reservoir"]


def start(config: Config) -> dict[str, Any]:
    """Where the weights begin, with the defaults of what applies."""
    from ..networks.initialisers import INITIALISERS

    n = config.network
    own = RESERVOIR.start if is_reservoir(n) else {"init": "torch" if n.radius is None else "spectral"}
    init = choose("initialiser", n.init or own["init"], INITIALISERS)
    given = {key: getattr(n, key) for key in INITIALISERS[init].options}
    defaults = {**INITIALISERS[init].options, **{key: own[key] for key in given if key in own}}
    return {"init": init, **{key: defaults[key] if value is None else value for key, value in given.items()}}


class Shape(Section):
    """What a task asks of a network."""

    inputs: Whole
    outputs: Whole
    readout: Literal["last", "every", "sequence"]
    output: str


def network_of(config: Config, task: Any, device: str) -> Any:
    from ..networks.initialisers import initialise

    begin = start(config)
    net = construct(
        config.network, Shape(**{k: getattr(task, k) for k in Shape.model_fields}), config.training.precision
    )
    initialise(net, begin.pop("init"), seed=config.training.seed, **begin)
    return net.to(device)


def construct(n: NetworkSection, shape: Shape, precision: int) -> Any:
    """The network of a section, for the inputs and answers of a task; its weights are not yet set."""
    import torch

    from ..cells import library
    from ..networks.network import Network
    from ..networks.readout import SUMMARIES
    from ..networks.seq2seq import EncoderDecoder
    from ..networks.stack import Stack

    kinds, options, sequence = layers_of(n), options_of(n), shape.readout == "sequence"
    if n.readout is not None:
        choose("readout", n.readout, SUMMARIES)
        if shape.readout != "last":
            raise ConfigError(
                f"--readout {n.readout} gives one answer for a sequence, and here "
                + ("a sequence is asked for." if sequence else "one is asked for at every step.")
            )
    for key in ("skip",) if sequence else ("decoder", "attend", "embedding"):
        if getattr(n, key) is not None:
            answer = "a sequence" if sequence else "no sequence"
            raise ConfigError(f"{flag('network', key)} does nothing where the answer is {answer}.")
    if sequence and is_reservoir(n):
        raise ConfigError(
            "a reservoir is fixed, and a decoder has to learn: choose another --cell where the answer is a sequence."
        )
    if sequence and "layers" in options:
        raise ConfigError("gated-feedback has its own two layers in an encoder: leave out --layers.")
    for kind in kinds:
        if n.structure is not None and kind in library.CELLS and library.named(kind).structure is not None:
            raise ConfigError(f"--structure does nothing with cell '{kind}': its equations say what W is.")
    if sequence and n.dropout and len(kinds) == 1:
        raise ConfigError(
            "--dropout acts between the layers of the encoder where the answer is a sequence, and there is one: give --layers."
        )
    more: dict[str, Any] = {"structure": n.structure, "deep": n.deep, "dropout": n.dropout}
    make: Any = functools.partial(Network, kinds[0])
    if len(kinds) > 1 or n.bidirectional or sequence:
        more |= {key: getattr(n, key) for key in ("bidirectional", "residual")}
        make = functools.partial(Stack, kinds)
    if sequence:
        more |= {"decoder": n.decoder, "attention": n.attend, "embedding": n.embedding}
        make = functools.partial(EncoderDecoder, kinds)
    else:
        more |= {"steps": n.attention_steps, "skip": n.skip, "beta": n.beta}
        more |= {"readout": n.readout or shape.readout, "output": shape.output}
    net = make(
        hidden=n.hidden, inputs=shape.inputs, outputs=shape.outputs, x0=n.x0, bias=n.bias, engine=n.engine,
        dtype=torch.float64 if precision == 64 else torch.float32, **options,
        **{key: value for key, value in more.items() if value is not None and key not in options},
    )  # fmt: skip
    freeze(net, n)
    return net


def layers_of(n: NetworkSection) -> list[str]:
    """The cell of each layer, as the library calls it."""
    names = names_of(n)
    for name in names:
        choose("cell", name, cell_names())
    own = names == ["gated-feedback"]  # its layers are inside
    if not names:
        raise ConfigError("--cell names no cell: `coadjoint cells` lists them.")
    if isinstance(n.cell, list) and n.layers is not None:
        raise ConfigError(f"--cell {','.join(names)} has a layer for each name: leave out --layers, or name one cell.")
    if "reservoir" in names and len(names) > 1:
        raise ConfigError("a reservoir is not mixed with other cells; --layers 2 makes two of it.")
    kinds = [RESERVOIR.cell if name == "reservoir" else name for name in names] * (1 if own else n.layers or 1)
    if n.residual and len(kinds) == 1:
        raise ConfigError("--residual acts between layers, and there is one: give --layers or a list of cells.")
    return kinds


def options_of(n: NetworkSection) -> dict[str, Any]:
    """The options of cells among the keys; what no cell has is refused."""
    names = [*names_of(n), *([n.decoder] if n.decoder else [])]
    known = {key: None for name in names for key in known_options(name)}
    elsewhere = {"beta"} if (n.readout or "").startswith("tilted") else set()  # the readout's
    elsewhere |= set() if "layers" in known else {"layers"}  # the stack's
    keys = ["activation", "layers", *(k for k, f in NetworkSection.model_fields.items() if panel(f) == OPTIONS)]
    found = {key: getattr(n, key) for key in keys if getattr(n, key) is not None and key not in elsewhere}
    for key in found:
        if key not in known:
            has = ", ".join(k for k in keys if k in known) or "none"
            whose = f"cell '{names[0]}'; its" if len(names) == 1 else f"cells {', '.join(names)}; their"
            raise ConfigError(f"{flag('network', key)} does nothing with {whose} options: {has}.")
    return found


def known_options(cell: str) -> dict[str, Any]:
    """The options of a cell and what they are if they are not given."""
    from ..cells import library, steps

    choose("cell", cell, cell_names())
    return (
        steps.options(cell) if cell in steps.STEPS else library.options(RESERVOIR.cell if cell == "reservoir" else cell)
    )


def cell_names() -> list[str]:
    """The names that `cell` takes."""
    from ..cells.library import CELLS
    from ..cells.steps import STEPS

    return [*CELLS, *STEPS, "reservoir"]


def visible(net: Any) -> dict[str, Any]:
    """The parameters by the names that they are spoken of, W first: of a structured W, its raw matrix."""
    plain = lambda key: key.replace("parametrizations.", "").partition(".original")[0]
    found = {plain(key): p for key, p in net.named_parameters()}
    return dict(sorted(found.items(), key=lambda item: item[0] != "W"))


def freeze(net: Any, n: NetworkSection) -> None:
    """Take parameters out of training, by their names or parts of them: W, p.leak, step."""
    chosen = [n.freeze] if isinstance(n.freeze, str) else n.freeze or []
    for name in (*chosen, *(RESERVOIR.frozen if is_reservoir(n) else ())):
        found = [p for key, p in net.named_parameters() if f".{name}." in f".{key}."]
        if not found and name in chosen:
            raise ConfigError(f"--freeze: this network has no parameter '{name}'; it has {', '.join(visible(net))}.")
        for p in found:
            p.requires_grad_(False)
