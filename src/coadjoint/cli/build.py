"""Config -> objects. Each section goes to the `make` function of its package, which does the work.

config                the keys that were given
  resolve_dependent_keys    + what follows from these keys alone
  task_of                   the task, or your own data
  resolve_defaults          + what follows from the task, the optimiser and this machine
  network_of, gradient_of, optimiser_of
Job                   the network, the task and the arguments of co.train
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError, MissingError, NumericalError, refuse_options
from ..training import launched
from ..training.network_section import Shape
from ..training.pace import ENDLESS
from . import chains
from .build_task import (
    check_size_settings,
    curriculum_of,
    cut_as_given,
    hide_test_set,
    refuse_if_answers_are_read,
    steps_per_epoch,
    task_of,
)
from .flags import (
    KeyValues,
    SectionValues,
    errors_name_flags,
    flag,
    given_by_user,
    given_values,
    to_plain_dict,
)
from .key_types import LARGEST_NUMBER
from .memory import memory_notes
from .past import MAY_CHANGE, refuse_if_changed, refuse_if_other_network
from .schema import Config
from .splits import resolved_split

if TYPE_CHECKING:
    from ..gradients.method import Method
    from ..networks.chain import Chain
    from ..networks.network import Network
    from ..networks.seq2seq import EncoderDecoder
    from ..networks.stack import Stack
    from ..objectives.batch import Batch
    from ..objectives.losses import LossLike
    from ..optimisers.recipes import Optimiser
    from ..tasks.files.stream import File
    from ..tasks.task import Task
    from ..training.storage import CheckpointOutline

    AnyNetwork = Network | Stack | EncoderDecoder | Chain

DEFAULT_BATCH = 32  # of built-in tasks


@dataclass(frozen=True)
class Job:
    """What a Config describes: a network, a task, and the arguments of co.train."""

    config: Config
    network: AnyNetwork
    task: Task
    arguments: KeyValues
    notes: tuple[str, ...] = ()
    default_notes: tuple[str, ...] = ()  # those of the notes that tell of defaults for own data


def build(config: Config, past: CheckpointOutline | None = None, has_begun: bool = False) -> Job:
    """Make the network, the task, the gradient method and the optimiser of a config.

    past: the outline of the checkpoint to resume from, None without one. A config that does not
    match it is refused before anything is built. has_begun: the config is that of a run folder.
    """
    from ..training.linear_start import begin_linear_

    given = given_by_user(config)
    config = resolve_dependent_keys(config)
    refuse_if_changed(config, past)
    if not has_begun:
        refuse_out_of_range(config)
    device = choose_device(config.training.device)
    with errors_name_flags():
        set_threads(config.training.threads, chains.widest_layer(config))
    task = task_of(config, has_begun)
    if config.training.test_set is False:
        hide_test_set(task)
    check_size_settings(config, task)
    refuse_if_answers_are_read(config, task)
    if not has_begun:
        config = replace_values(config, data={"split": resolved_split(task)})
    config, default_notes = resolve_own_defaults(config, None if has_begun else given, task)
    config = resolve_defaults(config, task, device)
    refuse_if_other_network(config, task, past)
    net = network_of(config, task, device)
    if config.network.persistence and not has_begun:
        begin_linear_(net, task)
    arguments = train_arguments(config, net, task)
    refuse_if_not_shareable(arguments)
    # One sequence of the first step is enough to see what is refused, and how long sequences are.
    sample = net.move_batch(task.batch(0, 1, config.training.seed))
    try_out(net, sample, task.loss, arguments, config.training.seed)
    # The user's own data has notes on how it was read, a chain on what its text left out.
    notes = [*getattr(task, "notes", ()), *getattr(net, "notes", ()), *default_notes]
    if config.training.reduce is not None:
        notes.append(f"loss: the {config.training.reduce} over the time steps of a sequence")
    notes += memory_notes(net, sample, config.training, arguments["gradient"], task)
    return Job(config, net, task, arguments, tuple(notes), tuple(default_notes))


def refuse_out_of_range(config: Config) -> None:
    """Refuse numbers of the network and of the gradient method that its precision cannot hold."""
    if config.training.precision == 64:
        return
    for name in ("network", "gradient"):
        for key, value in given_by_user(config).get(name, {}).items():
            if isinstance(value, float) and abs(value) > LARGEST_NUMBER:
                raise ConfigError(
                    f"{flag(name, key)} {value:g} is too large for float32: lower it, or pass "
                    "--precision 64."
                )


def replace_values(config: Config, **sections: KeyValues) -> Config:
    """The config with other values for some keys, by section: training={"steps": 5}."""
    update = {}
    for name, keys in sections.items():
        update[name] = getattr(config, name).model_copy(update=keys)
    return config.model_copy(update=update)


def resolve_dependent_keys(config: Config) -> Config:
    """Fill in what follows from other keys: the initialiser, the method and its weight.

    A setting that would have no effect is refused: it is a mistake or a misunderstanding.
    """
    from ..gradients import factory as gradients
    from ..optimisers import factory as optimisers

    gradient = config.gradient
    optimiser = config.optimiser
    initial, network_complaints = chains.initial_options(config)
    method = gradients.defaults(gradient.method, gradient.penalty, gradient.weight)
    method_name = gradients.method_name(gradient.method, gradient.penalty)
    # Settings of other sections with which some optimisers cannot work.
    beside = {"dropout": config.network.dropout, **given_values(config.training)}
    complaints = [
        *network_complaints,
        *gradients.list_idle_options(method_name, given_values(gradient)),
        *optimisers.idle_complaints(
            optimiser.name,
            {"pretrain_lr": gradient.pretrain_lr, **given_values(optimiser)},
            optimiser.schedule,
            optimiser.warmup,
        ),
        *optimisers.clash_complaints(optimiser.name, optimiser.direction, method_name, beside),
    ]
    with errors_name_flags():
        refuse_options(complaints)
    return replace_values(config, network=initial, gradient=method)


def resolve_own_defaults(
    config: Config, given: SectionValues | None, task: Task
) -> tuple[Config, list[str]]:
    """Fill in the defaults for your own data, and what to say about them.

    given: the keys that were given, None for a run that has begun. Training sequences are cut into
    chunks.
    """
    from ..tasks.data import Data
    from ..training import own_defaults

    if config.task.name is not None or not isinstance(task, Data):
        return config, []
    cut_as_given(config, task)
    if given is None:
        return config, []
    filled = own_defaults.fill(config, given, task)
    return replace_values(config, **filled.values), filled.notes


def resolve_defaults(config: Config, task: Task, device: str) -> Config:
    """Fill in what follows from the task, the optimiser and this machine.

    That is the cell, the step size, the number of steps, and how often and on how many sequences
    to validate. device: the one that was chosen for --device auto.
    """
    import torch

    from ..optimisers.factory import default_lr

    training = config.training
    network: KeyValues = chains.default_layers(config, task) if task.shape else {}
    if task.shape is None and config.network.cell is None:
        network = {"cell": "gru" if task.readout == "sequence" else "elman"}
    batch = training.batch or DEFAULT_BATCH
    per_epoch = steps_per_epoch(task, batch * training.accumulate)
    steps = training.steps
    if steps is None and training.epochs and per_epoch:
        steps = training.epochs * per_epoch
    if steps is None:
        steps = ENDLESS if training.gradients or training.seconds else 10_000
    if steps == ENDLESS:
        refuse_if_schedule_needs_steps(config)
    resolved: KeyValues = {
        "steps": steps,
        "epochs": None,  # now given by the steps
        "batch": batch,
        "every": training.every or per_epoch or 100,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if not per_epoch:  # a finite task validates on all of its held-out sequences
        resolved["tests"] = training.tests or 1000
        resolved["confirm"] = training.confirm or 10_000
    lr = default_lr(config.optimiser.name, config.optimiser.lr)
    return replace_values(config, network=network, optimiser={"lr": lr}, training=resolved)


def refuse_if_schedule_needs_steps(config: Config) -> None:
    """Refuse schedules that end with the last step, where only a budget ends the run."""
    decays_lr = config.optimiser.schedule in ("linear", "cosine")
    decays_weight = config.gradient.weight_schedule == "linear"
    if decays_lr or decays_weight:
        raise ConfigError(
            "a linear or cosine schedule needs to know the last step, which a budget "
            "(--gradients, --seconds) does not determine: give --steps."
        )


# Keys that co.train calls by the same name.
SAME_NAMES = (
    "batch",
    "accumulate",
    "clip",
    "clip_value",
    "clip_mean",
    "gradients",
    "seconds",
    "seed",
    "probes",
    "patience",
    "select",
    "stop_on_success",
    "nonfinite",
    "checkpoint",
    "keep",
    "steps",
)


def train_arguments(config: Config, net: AnyNetwork, task: Task) -> KeyValues:
    """The keyword arguments of co.train, from a config whose defaults are resolved."""
    training = config.training
    arguments: KeyValues = {key: getattr(training, key) for key in SAME_NAMES}
    if training.tests is not None:  # None for finite tasks, which use all held-out sequences
        arguments["tests"] = training.tests
        arguments["confirm"] = training.confirm
    if training.shards is not None:
        arguments["shards"] = training.shards
    return arguments | {
        "weight_noise": training.weight_noise or 0.0,
        "easiest": curriculum_of(config),
        # A run shorter than the interval is validated at its end.
        "every": min(training.every or 100, training.steps or ENDLESS),
        "gradient": gradient_of(config),
        "optimiser": optimiser_of(config),
        "description": describe(config, net, task),
    }


def refuse_if_not_shareable(arguments: KeyValues) -> None:
    """Refuse a gradient method or an optimiser that cannot share the samples of a step."""
    from ..training.plan import TrainingPlan

    if arguments.get("shards") is not None:
        TrainingPlan(**arguments)


def try_out(net: AnyNetwork, batch: Batch, loss: LossLike, arguments: KeyValues, seed: int) -> None:
    """Let the optimiser and the gradient method refuse the network before anything is written.

    arguments: those of co.train. A direction may refuse the gradient method as well.
    """
    from ..optimisers.directions import DIRECTIONS
    from ..tasks.task import rng

    optimiser = arguments["optimiser"]
    optimiser.refuse_if_unsuited(net, batch, loss)
    # Overflow of the initial weights is for the run to report.
    with contextlib.suppress(NumericalError):
        evaluation = arguments["gradient"].evaluate(net, batch, loss)
        DIRECTIONS[optimiser.direction](evaluation, rng(seed))


def network_of(config: Config, task: Task | File, device: str) -> AnyNetwork:
    """The network for a task or a stream, with its initial weights."""
    from .. import networks
    from ..training.linear_start import repeated_inputs
    from ..training.model_schema import network_options

    with errors_name_flags():
        options = network_options(config.network, Shape.of(task), config.training.precision)
        if config.network.persistence:
            options["persistence"] = repeated_inputs(task, config.data.target is not None)
        net = networks.make(**options, seed=config.training.seed, device=device)
    # "each" averages over the layers, which is harmless where there is one.
    chooses_layers = config.gradient.penalty_on not in (None, "each")
    if chooses_layers and isinstance(net, networks.Chain):
        raise ConfigError(
            "--penalty-on chooses among recurrent layers; in a chain the penalty is on all of its "
            "layers: leave it out."
        )
    if chooses_layers and net.one_layer is not None:
        raise ConfigError(
            "--penalty-on chooses among layers, but this network has only one: give --layers, "
            "or a list of cells."
        )
    return net


def gradient_of(config: Config) -> Method:
    """The gradient method of a config; a linear schedule of its weight ends at the last step."""
    from .. import gradients

    options = given_values(config.gradient)
    options.pop("pretrain_lr", None)  # the optimiser's
    with errors_name_flags():
        return gradients.make(**options, steps=config.training.steps)


def optimiser_of(config: Config) -> Optimiser:
    """The optimiser of a config."""
    from .. import optimisers

    pretraining = config.gradient.model_dump(include={"pretrain", "pretrain_lr"})
    with errors_name_flags():
        return optimisers.make(**given_values(config.optimiser), **pretraining)


def describe(config: Config, net: AnyNetwork, task: Task) -> KeyValues:
    """The description in a model file.

    It suffices to build the network again, to read data for it, and to recognise its run. Settings
    that may change when a run is resumed are left out.
    """
    settings = to_plain_dict(config)
    network = settings.pop("network", {})
    training = settings["training"]
    settings["training"] = {k: v for k, v in training.items() if k not in MAY_CHANGE}
    return {
        "network": network,
        "shape": Shape.of(net).to_dict(),
        "precision": config.training.precision,
        "data": task.describe() if hasattr(task, "describe") else None,
        "task": task.name,
        "settings": settings,
    }


def set_threads(threads: int | None, units: int) -> None:
    """Set torch's CPU threads; by default one for small networks, which are slower on several.

    units: of the widest layer; a network of more than 256 keeps torch's own choice. Under torchrun
    that would be one thread, so each process gets its share of the cores.
    """
    import torch

    if threads is not None or units <= chains.FEW_UNITS:
        torch.set_num_threads(threads or 1)
    elif launched.is_launched():
        torch.set_num_threads(max(1, available_cores() // launched.local_size()))


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_device(name: str) -> str:
    """The device of a --device flag: cpu or cuda; auto takes a GPU if there is one."""
    import torch

    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if name == "cuda" and not available:
        built = torch.backends.cuda.is_built()
        reason = "no GPU was found" if built else "this torch was built without CUDA"
        raise MissingError(f"--device cuda: {reason}. Use --device cpu.")
    return name
