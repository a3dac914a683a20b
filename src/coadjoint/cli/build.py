"""Config -> objects: every section is handed to the `make` of its noun, which does the work.

Config -> settled -> task -> resolve_defaults
       -> networks.make, gradients.make, optimisers.make -> Job
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, MissingError, NumericalError, refuse_options
from ..training.network_section import Shape
from .flags import errors_name_flags, flag, given_values, to_plain_dict
from .past import MAY_CHANGE, refuse_if_changed, refuse_if_other_network
from .schema import Config

ENDLESS = 2**31 - 1  # steps of a run that a budget ends


@dataclass(frozen=True)
class Job:
    """What a Config means: a network, a task, and the arguments of co.train."""

    config: Config
    network: Any
    task: Any
    arguments: dict[str, Any]
    notes: tuple[str, ...] = ()


def build(config: Config, past: Any = None) -> Job:
    """Make the network, the task, the gradient method and the optimiser.

    past: a storage.CheckpointOutline of the checkpoint to go on from. A config that does not belong to it is
    refused before anything is built of it."""
    config = resolve_dependent_keys(config)
    refuse_if_changed(config, past)
    device = choose_device(config.training.device)
    set_threads(config.training.threads, config.network.hidden)
    task = task_of(config)
    check_size_settings(config, task)
    config = resolve_defaults(config, task, device)
    refuse_if_other_network(config, task, past)
    net = network_of(config, task, device)
    passed = train_arguments(config, net, task)
    first = net.move_batch(task.batch(0, 1, config.training.seed))
    try_out(net, first, task.loss, passed, config.training.seed)
    notes = (
        *getattr(task, "notes", ()),
        *memory_notes(net, len(first.u), config, passed["gradient"]),
    )
    return Job(config, net, task, passed, notes)


def replace_values(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with other values of some keys: changed(config, training={"steps": 5})."""
    update = {
        name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()
    }
    return config.model_copy(update=update)


def resolve_dependent_keys(config: Config) -> Config:
    """Fill in what follows from other keys: the start, the method and its weight.

    What would do nothing is refused: a setting without effect is a mistake or a misunderstanding."""
    from ..gradients import factory as gradients
    from ..networks import factory as networks
    from ..optimisers import factory as optimisers

    n, g, o, t = config.network, config.gradient, config.optimiser, config.training
    start = networks.initialiser_options(n.cell or "elman", n.init, n.radius, n.inner, n.std)
    method = gradients.defaults(g.method, g.penalty, g.weight)
    name = method["method"]
    beside = {"dropout": n.dropout, **given_values(t)}
    with errors_name_flags():
        refuse_options(
            [
                *networks.list_idle_options(given_values(n), start["init"], n.readout or "last"),
                *gradients.list_idle_options(name, given_values(g)),
                *optimisers.idle_complaints(o.name, given_values(o), o.schedule, o.warmup),
                *optimisers.clash_complaints(o.name, o.direction, name, beside),
            ]
        )
    return replace_values(config, network=start, gradient=method)


def resolve_defaults(config: Config, task: Any, device: str) -> Config:
    """Fill in what follows from the task, the optimiser and this machine: the cell, the step size,
    how many steps, how often to look at held-out sequences and at how many of them."""
    import torch

    from ..optimisers.factory import default_lr

    training = config.training
    cell = config.network.cell
    if cell is None:
        cell = "gru" if task.readout == "sequence" else "elman"
    per_epoch = (
        task.steps_per_epoch(training.batch * training.accumulate)
        if task.size is not None
        else None
    )
    steps = training.steps
    if steps is None and training.epochs and per_epoch:
        steps = training.epochs * per_epoch
    if steps is None:
        steps = ENDLESS if training.gradients or training.seconds else 10_000
    found: dict[str, Any] = {
        "steps": steps,
        "epochs": None,
        "every": training.every or per_epoch or 100,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if not per_epoch:
        found |= {"tests": training.tests or 1000, "confirm": training.confirm or 10_000}
    by_share = (
        config.optimiser.schedule in ("linear", "cosine")
        or config.gradient.weight_schedule == "linear"
    )
    if steps == ENDLESS and by_share:
        raise ConfigError(
            "a linear or cosine schedule ends with the last step, and a budget does not say which: give --steps."
        )
    lr = default_lr(config.optimiser.name, config.optimiser.lr)
    return replace_values(config, network={"cell": cell}, optimiser={"lr": lr}, training=found)


SAME_NAMES = (  # keys that co.train calls by the same name
    "batch", "accumulate", "clip", "clip_value", "clip_mean", "gradients", "seconds", "seed", "probes", "patience",
    "stop_on_success", "nonfinite", "checkpoint", "keep", "steps",
)  # fmt: skip


def train_arguments(config: Config, net: Any, task: Any) -> dict[str, Any]:
    """What co.train takes, of a config without gaps."""
    t = config.training
    held_out = {} if t.tests is None else {"tests": t.tests, "confirm": t.confirm}
    return {
        **{key: getattr(t, key) for key in SAME_NAMES},
        **held_out,
        "weight_noise": t.weight_noise or 0.0,
        "easiest": curriculum_of(config),
        "every": min(t.every or 100, t.steps or ENDLESS),
        "gradient": gradient_of(config),
        "optimiser": optimiser_of(config),
        "description": describe(config, net, task),
    }


def try_out(net: Any, batch: Any, loss: Any, passed: dict[str, Any], seed: int) -> None:
    """What an optimiser or a gradient method declines is declined before anything is written."""
    from ..optimisers.directions import DIRECTIONS
    from ..tasks.task import rng

    passed["optimiser"].refuse_if_unsuited(net, batch, loss)
    with contextlib.suppress(NumericalError):
        e = passed["gradient"].evaluate(net, batch, loss)
        DIRECTIONS[passed["optimiser"].direction](e, rng(seed))


def network_of(config: Config, task: Any, device: str) -> Any:
    """The network for a task, where it begins."""
    from .. import networks
    from ..training.model_schema import network_options

    with errors_name_flags():
        options = network_options(config.network, Shape.of(task), config.training.precision)
        net = networks.make(**options, seed=config.training.seed, device=device)
    if config.gradient.penalty_on not in (None, "each") and net.one_layer is not None:
        raise ConfigError(
            "--penalty-on chooses among layers, and there is one: give --layers or a list of cells."
        )
    return net


def gradient_of(config: Config) -> Any:
    from .. import gradients

    with errors_name_flags():
        return gradients.make(**given_values(config.gradient), steps=config.training.steps)


def optimiser_of(config: Config) -> Any:
    from .. import optimisers

    with errors_name_flags():
        return optimisers.make(**given_values(config.optimiser))


def memory_notes(net: Any, T: int, config: Config, method: Any) -> list[str]:
    """What the gradient of a step will take, where segments are asked for or would help."""
    from ..gradients import bptt, memory, penalised

    if net.cell is None or not isinstance(method, bptt.BPTT | penalised.Penalised):
        return []
    asked, batch, probes = method.segments, config.training.batch, config.training.probes
    counted = lambda m, B: memory.predict(net, T, B, m)
    whole = (
        penalised.Penalised(method.penalty)
        if isinstance(method, penalised.Penalised)
        else bptt.BPTT()
    )
    most, at_once = counted(method, batch), counted(whole, batch)
    if asked is None:
        return (
            [
                f"a gradient at T = {T:,} takes about {format_bytes(most)}; --segments auto would take less"
            ]
            if most > 1e9
            else []
        )
    memory.steady()
    lines = [
        f"a gradient at T = {T:,} takes about {format_bytes(most)} (without segments {format_bytes(at_once)})"
    ]
    look = 2 * counted(bptt.BPTT(), probes)  # with its costates
    if look > most:
        lines.append(
            f"a look at the costates of --probes {probes} sequences is not cut up: about {format_bytes(look)}"
        )
    return lines


def format_bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def describe(config: Config, net: Any, task: Any) -> dict[str, Any]:
    """What a model file says of itself: enough to build the network again, to read data for it, and to know its run."""
    settings = to_plain_dict(config)
    network = settings.pop("network", {})
    settings["training"] = {k: v for k, v in settings["training"].items() if k not in MAY_CHANGE}
    data = task.describe() if hasattr(task, "describe") else None
    about = {
        "network": network,
        "shape": Shape.of(net).model_dump(),
        "precision": config.training.precision,
        "data": data,
        "task": task.name,
    }
    return {**about, "settings": settings}


def set_threads(threads: int | None, hidden: int) -> None:
    """Small arrays are slower on several threads."""
    import torch

    if threads is not None or hidden <= 256:
        torch.set_num_threads(threads or 1)


def choose_device(name: str) -> str:
    import torch

    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        reason = (
            "this torch was built without CUDA"
            if not torch.backends.cuda.is_built()
            else "no GPU was found"
        )
        raise MissingError(f"--device cuda: {reason}. Use --device cpu.")
    return ("cuda" if cuda else "cpu") if name == "auto" else name


def task_of(config: Config) -> Any:
    from .. import tasks
    from ..tasks.data import Data

    name, options, data = config.task.name, given_values(config.task), given_values(config.data)
    for key in (
        "name",
        "easiest",
        "easiest_by",
    ):  # the last two are those of every task: curriculum_of
        options.pop(key, None)
    if (name is None) == ("train" not in data):
        raise ConfigError(
            "what to train on? Name a task (`coadjoint tasks` lists them) or give a file of your own: --train data.csv"
            if name is None
            else f"both task '{name}' and data '{data['train']}' are given: choose one."
        )
    if name is None:
        if options:
            raise ConfigError(
                f"{flag('task', next(iter(options)))} belongs to a built-in task, not to your own data."
            )
        dtype = "float64" if config.training.precision == 64 else "float32"
        return Data.read(data.pop("train"), seed=config.training.seed, dtype=dtype, **data)
    if data:
        raise ConfigError(
            f"{flag('data', next(iter(data)))} belongs to your own data (--train FILE), not to task '{name}'."
        )
    known = tasks.options(name)
    for key in options:
        if key not in known:
            raise ConfigError(
                f"{flag('task', key)} does nothing with task '{name}'; its options: {', '.join(known)}."
            )
    return tasks.make(name, **options)


def check_size_settings(config: Config, task: Any) -> None:
    """Refuse what does not go with the size of a task."""
    t = config.training
    if task.size is None:
        problems = {
            "--epochs counts passes over a finite set, and this task is generated without end: use --steps.": t.epochs
        }
    else:
        alone = "does nothing with a finite set: all its held-out sequences are looked at."
        problems = {
            "--steps and --epochs say the same thing twice: give one of them.": t.steps
            and t.epochs,
            f"--tests {alone}": t.tests,
            f"--confirm {alone}": t.confirm,
            "--patience needs a validation set: give --valid FILE, or a share of --split.": t.patience
            if "valid" not in task.splits
            else None,
        }
    if lines := [text for text, given in problems.items() if given is not None]:
        raise ConfigError("\n".join(lines))


def curriculum_of(config: Config) -> Any:
    """Which of the drawn sequences a step learns from; None if all."""
    from ..training.curriculum import Easiest

    t = config.task
    if t.easiest is None:
        if t.easiest_by is not None:
            raise ConfigError("--easiest-by says what is easy, and does nothing without --easiest.")
        return None
    return Easiest(*t.easiest, t.easiest_by or "loss")
