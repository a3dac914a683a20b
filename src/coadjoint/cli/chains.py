"""Networks without time: which configs ask for one, its defaults, and its task."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..training.network_section import RECURRENT_DEFAULTS
from .flags import KeyValues, flag, given_values
from .schema import Config

if TYPE_CHECKING:
    from ..tasks.task import Task

FEW_UNITS = 256  # up to which one thread is the fastest
SMALLEST_IMAGE = 4  # rows and columns that a convolution and a pool leave something of


def is_without_time(config: Config) -> bool:
    """Whether a config asks for a chain: by its layers, its task, or its data.

    Such data are inputs that are to be reconstructed, or a folder of images.
    """
    from ..networks.chain_factory import is_chain
    from ..tasks import TASKS

    if is_chain(given_values(config.network)):
        return True
    if config.task.name in TASKS:
        return not TASKS[config.task.name].has_time
    if config.data.kind == "reconstruct":
        return True
    return is_plain_folder(config.data.train)  # of images


def is_plain_folder(train: str | None) -> bool:
    """Whether the training data are a folder, and not one that `coadjoint prepare` wrote."""
    from ..tasks.prepared import is_prepared

    return train is not None and Path(train).is_dir() and not is_prepared(train)


def initial_options(config: Config) -> tuple[KeyValues, list[str]]:
    """What [network] is filled in with, and a complaint about each key that does nothing.

    In a complaint, $key stands for the flag.
    """
    from ..networks import chain_factory
    from ..networks import factory as networks

    network = config.network
    given = given_values(network)
    if not is_without_time(config):
        initial = networks.initialiser_options(
            network.cell or "elman", network.init, network.radius, network.inner, network.std
        )
        readout = network.readout or "last"
        complaints = networks.list_idle_options(given, initial["init"], readout)
        if network.gain is not None:
            complaints.append("$gain belongs to a $chain; a recurrent network has $radius.")
        return RECURRENT_DEFAULTS | given | initial, complaints
    noise = given.pop("noise", None)
    initial = chain_factory.start_options(network.init, network.gain)
    complaints = chain_factory.list_idle_options(given)
    if network.cell is not None and config.task.name and network.chain is None:
        complaints = [
            f"task '{config.task.name}' has no time steps, so $cell does nothing: leave it out, or "
            "give the layers of a $chain."
        ]
    if noise is not None and not restores_inputs(config):
        complaints.append("$noise does nothing in a $chain; it belongs to an $autoencoder.")
    if network.autoencoder is not None and config.data.kind not in (None, "reconstruct"):
        complaints.append(f"$kind {config.data.kind} does nothing with an $autoencoder.")
    return initial, complaints


def restores_inputs(config: Config) -> bool:
    """Whether the inputs are also the targets, so that there may be noise on them."""
    is_asked_for = config.network.autoencoder is not None or config.data.kind == "reconstruct"
    return is_asked_for or has_noise(config)


def has_noise(config: Config) -> bool:
    """Whether the task has noisy inputs by itself."""
    from ..tasks import TASKS, options

    return config.task.name in TASKS and "noise" in options(str(config.task.name))


def data_options(config: Config) -> KeyValues:
    """The options of `Data.read` that the network decides: none for a recurrent one."""
    if not is_without_time(config):
        return {}
    if config.data.kind == "next" and is_plain_folder(config.data.train):
        raise ConfigError(
            f"{config.data.train} is a folder; --kind next reads a file. Of many tables make one "
            f"set: coadjoint prepare {shlex.quote(str(config.data.train))} --out data.co"
        )
    options: KeyValues = {"rows": "samples"}
    if restores_inputs(config):
        options |= {"kind": "reconstruct", "noise": config.network.noise or 0.0}
    return options


def refuse_if_mismatched(config: Config, task: Task) -> None:
    """Refuse a chain for sequences, and settings of sequences for samples without time."""
    if is_without_time(config) and task.shape is None:
        key = "chain" if config.network.chain is not None else "autoencoder"
        raise ConfigError(
            f"{flag('network', key)} has no time steps, but task '{task.name}' is made of "
            "sequences: leave it out, or choose a task such as digits-flat."
        )
    if task.shape is not None and config.task.easiest_by == "length":
        raise ConfigError(
            f"--easiest-by length has no effect on task '{task.name}', which has no time steps."
        )


def default_layers(config: Config, task: Task) -> KeyValues:
    """The chain for a task without time if none is given, as keys of [network]."""
    from ..tasks.denoising import Denoising

    network = config.network
    if network.chain is not None or network.autoencoder is not None:
        return {}
    shape = task.shape or ()
    if isinstance(task, Denoising) or config.data.kind == "reconstruct":
        half = max(1, math.prod(shape) // 2)
        return {"autoencoder": [half, max(1, half // 4)]}
    if len(shape) == 3 and min(shape[1:]) >= SMALLEST_IMAGE:
        return {"chain": f"conv 8 3, {network.activation or 'tanh'}, pool 2, flatten, 64"}
    return {"chain": "64x2"}


def widest_layer(config: Config) -> int:
    """The largest number of units or channels in a layer of the network."""
    from ..networks.chain_text import parse_chain, widest

    network = config.network
    if network.chain is not None:
        return widest(parse_chain(network.chain))
    if network.autoencoder is not None:
        widths = network.autoencoder
        return max(widths) if isinstance(widths, list) else widths
    units = network.hidden or RECURRENT_DEFAULTS["hidden"]
    return max(units) if isinstance(units, list) else units


def restoring_task(config: Config, task: Task) -> Task:
    """The task of an autoencoder: to restore the samples of a built-in task from noisy copies.

    The user's own data is read as such a task.
    """
    from ..tasks.denoising import Denoising, denoise

    is_own = config.task.name is None
    if config.network.autoencoder is None or is_own or isinstance(task, Denoising):
        return task
    return denoise(task, config.network.noise or 0.0)
