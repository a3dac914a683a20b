"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, NumericalError, StorageError, choose
from .build_network import Shape, device_of, network_of, start
from .flags import flag, given, plain
from .models import outlined
from .schema import Config, GradientSection, OptimiserSection


# objects
@dataclass(frozen=True)
class Job:
    """What a Config means: a network, a task, and the arguments of co.train."""

    config: Config
    network: Any
    task: Any
    arguments: dict[str, Any]
    notes: tuple[str, ...] = ()


def build(config: Config, past: Any = None) -> Job:
    """Make the network, the task, the gradient method and the optimiser. past: a runs.Glimpse of a checkpoint to go on from; a
    config that does not belong to it is refused before anything is built of it."""
    import torch

    from ..networks.network import Network
    from ..optimisers.directions import DIRECTIONS
    from ..tasks.task import rng

    training = config.training
    idle(config)
    unchanged(config, past)
    device = device_of(training.device)
    set_threads(training.threads, config.network.hidden)
    task = task_of(config)
    finite(config, task)
    if config.network.cell is None:
        usual = "gru" if task.readout == "sequence" else "elman"
        config = config.model_copy(update={"network": config.network.model_copy(update={"cell": usual})})
    belongs(config, task, past)
    net = network_of(config, task, device)
    if config.gradient.penalty_on not in (None, "each") and isinstance(net, Network):
        raise ConfigError("--penalty-on chooses among layers, and there is one: give --layers or a list of cells.")
    per_epoch = task.steps_per_epoch(training.batch * training.accumulate) if task.size is not None else None
    budget = training.gradients or training.seconds
    endless = 2**31 - 1
    most = endless if budget else 10_000
    steps = training.steps or (training.epochs * per_epoch if training.epochs and per_epoch else most)
    by_share = [config.optimiser.schedule in ("linear", "cosine"), config.gradient.weight_schedule == "linear"]
    if steps == endless and any(by_share):
        raise ConfigError(
            "a linear or cosine schedule ends with the last step, and a budget does not say which: give --steps."
        )
    every = training.every or per_epoch or 100
    fresh = {} if per_epoch else {"tests": training.tests or 1000, "confirm": training.confirm or 10_000}
    resolved = config.model_copy(
        update={
            "network": config.network.model_copy(update=start(config)),
            "gradient": config.gradient.model_copy(update=method(config.gradient)),
            "optimiser": config.optimiser.model_copy(update={"lr": pace(config.optimiser)}),
            "training": training.model_copy(
                update={
                    "steps": steps,
                    "epochs": None,
                    **fresh,
                    "every": every,
                    "threads": torch.get_num_threads(),
                    "device": device,
                }
            ),
        }
    )
    arguments = {
        **{k: getattr(training, k) for k in (
            "batch", "accumulate", "clip", "clip_value", "clip_mean", "gradients", "seconds", "seed", "probes", "patience",
            "stop_on_success", "nonfinite", "checkpoint", "keep",
        )},
        "weight_noise": training.weight_noise or 0.0,
        "easiest": curriculum_of(config),
        **fresh,
        "steps": steps,
        "every": min(every, steps),
        "gradient": gradient_of(config, steps),
        "optimiser": optimiser_of(config),
        "description": describe(resolved, net, task),
    }  # fmt: skip
    # What an optimiser or a gradient method declines is declined before anything is written.
    b = task.batch(0, 1, training.seed).to(net.V.dtype, net.V.device)
    arguments["optimiser"].try_on(net, b, task.loss)
    with contextlib.suppress(NumericalError):
        e = arguments["gradient"].evaluate(net, b, task.loss)
        DIRECTIONS[arguments["optimiser"].direction](e, rng(training.seed))
    notes = (*getattr(task, "notes", ()), *memory_of(net, len(b.u), config, arguments["gradient"]))
    return Job(resolved, net, task, arguments, notes)


def unchanged(config: Config, past: Any) -> None:
    """Refuse a config in which a key has another value than in the description of the run's checkpoint: it is compared again,
    whole, when the run goes on, but by then it has been obeyed."""
    about = past.description if past is not None and isinstance(past.description, dict) else {}
    settings = about.get("settings")
    sections = {"network": about.get("network"), **(settings if isinstance(settings, dict) else {})}
    for name, section in plain(config).items():
        told = sections.get(name)
        then: dict[str, Any] = told if isinstance(told, dict) else {}
        for key, now in section.items():
            if key in then and then[key] != now and not (name == "training" and key in FREE):
                where = f"{'' if name == 'network' else 'settings.'}{name}.{key}"
                raise StorageError(
                    f"{past.source} cannot be gone on from: {where} ({then[key]!r} then, {now!r} now) has changed since "
                    "the run began. Restore it in config.yaml, or start a new run."
                )


def belongs(config: Config, task: Any, past: Any) -> None:
    """Refuse a config whose network is not that of the run's checkpoint, before there is memory for it."""
    from ..training.restore import compare_tensors

    if past is not None:
        shape = Shape(**{key: getattr(task, key) for key in Shape.model_fields})
        compare_tensors(outlined(config.network, shape, config.training.precision), past.outline, past.source)


def memory_of(net: Any, T: int, config: Config, method: Any) -> list[str]:
    """What the gradient of a step will take, where segments are asked for or would help."""
    from ..gradients import bptt, memory, penalised

    if net.cell is None or not isinstance(method, bptt.BPTT | penalised.Penalised):
        return []
    asked, batch, probes = method.segments, config.training.batch, config.training.probes
    counted = lambda m, B: memory.predict(net, T, B, m)
    whole = penalised.Penalised(method.penalty) if isinstance(method, penalised.Penalised) else bptt.BPTT()
    most, at_once = counted(method, batch), counted(whole, batch)
    if asked is None:
        return (
            [f"a gradient at T = {T:,} takes about {shown_bytes(most)}; --segments auto would take less"]
            if most > 1e9
            else []
        )
    memory.steady()
    lines = [f"a gradient at T = {T:,} takes about {shown_bytes(most)} (without segments {shown_bytes(at_once)})"]
    look = 2 * counted(bptt.BPTT(), probes)  # with its costates
    if look > most:
        lines.append(f"a look at the costates of --probes {probes} sequences is not cut up: about {shown_bytes(look)}")
    return lines


def shown_bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


FREE = ("steps", "patience", "checkpoint", "keep", "threads", "tensorboard", "device")  # may change when a run goes on


def describe(config: Config, net: Any, task: Any) -> dict[str, Any]:
    """What a model file says of itself: enough to build the network again, to read data for it, and to know its run."""
    settings = plain(config)
    network = settings.pop("network", {})
    settings["training"] = {k: v for k, v in settings["training"].items() if k not in FREE}
    shape = {k: getattr(net, k) for k in Shape.model_fields}
    data = task.describe() if hasattr(task, "describe") else None
    about = {
        "network": network,
        "shape": shape,
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


def task_of(config: Config) -> Any:
    from .. import tasks
    from ..tasks.data import Data

    name, options, data = config.task.name, given(config.task), given(config.data)
    for key in ("name", "easiest", "easiest_by"):  # the last two are those of every task: curriculum_of
        options.pop(key, None)
    if (name is None) == ("train" not in data):
        raise ConfigError(
            "what to train on? Name a task (`coadjoint tasks` lists them) or give a file of your own: --train data.csv"
            if name is None
            else f"both task '{name}' and data '{data['train']}' are given: choose one."
        )
    if name is None:
        if options:
            raise ConfigError(f"{flag('task', next(iter(options)))} belongs to a built-in task, not to your own data.")
        dtype = "float64" if config.training.precision == 64 else "float32"
        return Data.read(data.pop("train"), seed=config.training.seed, dtype=dtype, **data)
    if data:
        raise ConfigError(
            f"{flag('data', next(iter(data)))} belongs to your own data (--train FILE), not to task '{name}'."
        )
    known = tasks.options(name)
    for key in options:
        if key not in known:
            raise ConfigError(f"{flag('task', key)} does nothing with task '{name}'; its options: {', '.join(known)}.")
    return tasks.make(name, **options)


def method(g: GradientSection) -> dict[str, Any]:
    """The gradient method, with the defaults of what applies."""
    name = g.method or ("penalised" if g.penalty is not None else "bptt")
    return {"method": name, **({"weight": 1.0 if g.weight is None else g.weight} if name == "penalised" else {})}


def weight_schedule(g: GradientSection) -> str:
    return g.weight_schedule or ("constant" if g.weight_target is None else "steered")


# Keys that mean something only where another key has one of these values.
APPLIES: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("network", "attention_steps"): ("readout", ("attention",)),
    ("gradient", "penalty"): ("method", ("penalised",)),
    ("gradient", "penalty_on"): ("method", ("penalised",)),
    ("gradient", "weight"): ("method", ("penalised",)),
    ("gradient", "weight_schedule"): ("method", ("penalised",)),
    ("gradient", "weight_rate"): ("weight_schedule", ("inverse-time", "exponential")),
    ("gradient", "weight_end"): ("weight_schedule", ("linear",)),
    ("gradient", "weight_target"): ("method", ("penalised",)),
    ("gradient", "weight_gain"): ("weight_schedule", ("steered",)),
    ("gradient", "pretrain"): ("method", ("penalised",)),
    ("gradient", "k1"): ("method", ("truncated",)),
    ("gradient", "k2"): ("method", ("truncated",)),
    ("gradient", "segments"): ("method", ("bptt", "penalised")),
    ("optimiser", "threshold"): ("step_rule", ("galvan",)),
    ("optimiser", "decay"): ("schedule", ("exponential", "inverse-time", "plateau")),
    ("optimiser", "end"): ("schedule", ("linear", "cosine")),
    ("optimiser", "plateau"): ("schedule", ("plateau",)),
}


def idle(config: Config) -> None:
    """Refuse what would do nothing: a setting that is ignored is a mistake, or a misunderstanding."""
    from ..networks.initialisers import INITIALISERS
    from ..optimisers.recipes import OPTIMISERS, OWN_PACE, PACELESS

    n, g, o = config.network, config.gradient, config.optimiser
    choose("optimiser", o.name, OPTIMISERS)
    takes = lambda key: tuple(name for name, (_, _, options) in OPTIMISERS.items() if key in options)
    begins = lambda key: tuple(name for name, row in INITIALISERS.items() if key in row.options)
    applies = {("network", key): ("init", begins(key)) for key in ("radius", "inner", "std")} | APPLIES
    applies |= {("optimiser", key): ("name", takes(own)) for key, own in OPTIMISER_OPTIONS.items()}
    pliant = tuple(name for name in OPTIMISERS if name not in OWN_PACE)
    applies |= {("optimiser", key): ("name", pliant) for key in ("direction", "step_rule")}
    applies["optimiser", "lr"] = ("name", tuple(name for name in OPTIMISERS if name not in PACELESS))
    chosen = {
        "init": start(config)["init"], "readout": n.readout or "last", "method": method(g)["method"], "weight_schedule": weight_schedule(g),
        "schedule": o.schedule, "name": o.name, "step_rule": o.step_rule or "constant",
    }  # fmt: skip
    lines = [
        f"{flag(section, key)} does nothing with {flag(section, by)} {chosen[by]}: it belongs to {', '.join(values)}."
        for (section, key), (by, values) in applies.items()
        if getattr(getattr(config, section), key) is not None and chosen[by] not in values
    ]
    for key in ("clip", "clip_value", "clip_mean"):
        if getattr(config.training, key) is not None and o.name in OWN_PACE:
            lines.append(f"{flag('training', key)} does nothing with --optimiser {o.name}: it finds its own way.")
    if o.name in PACELESS and config.training.weight_noise:
        lines.append(f"--weight-noise does nothing with --optimiser {o.name}: it takes the weights as they are.")
    if o.name == "ridge" and chosen["method"] != "bptt":
        lines.append(f"--method {chosen['method']} does nothing with --optimiser ridge: it solves for the readout.")
    if o.direction == "temporal" and chosen["method"] not in ("bptt", "rtrl"):
        lines.append(
            f"--direction temporal takes the gradient of the loss apart: leave out --method {chosen['method']} and --penalty."
        )
    if o.name == "hessian-free" and n.dropout:
        lines.append(
            "--dropout makes every sweep another function, and --optimiser hessian-free needs one: use another optimiser."
        )
    if o.name in PACELESS and (o.schedule != "constant" or o.warmup):
        lines.append(f"--schedule and --warmup do nothing with --optimiser {o.name}: it has no step size.")
    if lines:
        raise ConfigError("\n".join(lines))


def finite(config: Config, task: Any) -> None:
    """Refuse what does not go with the size of a task."""
    t = config.training
    if task.size is None:
        problems = {
            "--epochs counts passes over a finite set, and this task is generated without end: use --steps.": t.epochs
        }
    else:
        alone = "does nothing with a finite set: all its held-out sequences are looked at."
        problems = {
            "--steps and --epochs say the same thing twice: give one of them.": t.steps and t.epochs,
            f"--tests {alone}": t.tests,
            f"--confirm {alone}": t.confirm,
            "--patience needs a validation set: give --valid FILE, or a share of --split.": t.patience
            if "valid" not in task.splits
            else None,
        }
    if lines := [text for text, given in problems.items() if given is not None]:
        raise ConfigError("\n".join(lines))


def gradient_of(config: Config, steps: int) -> Any:
    from ..gradients import bptt, penalised, rtrl, truncated
    from ..objectives import penalties

    g = config.gradient
    name = method(g)["method"]
    if name == "penalised":
        if g.penalty is None:
            raise ConfigError(f"--method penalised needs a --penalty: {', '.join(penalties.PENALTIES)}.")
        G = penalties.penalty(g.penalty)
        G = G if g.penalty_on in (None, "each") else G.on(g.penalty_on)
        weight = weight_of(g, steps)
        if weight != 0:
            return penalised.Penalised(G, weight, g.segments, g.pretrain or 0)
        if g.pretrain:
            raise ConfigError("--pretrain minimises the penalty alone, and --weight 0 leaves nothing of it.")
        return bptt.BPTT(g.segments)
    if name == "truncated":
        if g.k1 is None:
            raise ConfigError("--method truncated needs --k1, and --k2 if losses are pulled back further.")
        return truncated.Truncated(g.k1, g.k2 or g.k1)
    return rtrl.RTRL() if name == "rtrl" else bptt.BPTT(g.segments)


def weight_of(g: GradientSection, steps: int) -> Any:
    """rho, or its schedule."""
    from ..objectives import schedules, weights

    rho, schedule = 1.0 if g.weight is None else g.weight, weight_schedule(g)
    if g.weight_target is not None and schedule != "steered":
        raise ConfigError(f"--weight-target does nothing with --weight-schedule {schedule}: it belongs to steered.")
    if schedule == "constant":
        return rho
    if schedule == "linear":
        return schedules.linear(rho, g.weight_end or 0.0, steps)
    if schedule == "steered":
        if g.weight_target is None:
            raise ConfigError("--weight-schedule steered needs --weight-target.")
        gain = {} if g.weight_gain is None else {"gain": g.weight_gain}
        return weights.Steered(rho, g.weight_target, **gain)
    if g.weight_rate is None:
        raise ConfigError(f"--weight-schedule {schedule} needs --weight-rate.")
    if schedule == "inverse-time":
        return schedules.inverse_time(rho, g.weight_rate)
    if g.weight_rate > 1:
        raise ConfigError(
            f"--weight-schedule exponential grows without end for --weight-rate {g.weight_rate}: at most 1."
        )
    return schedules.exponential(rho, g.weight_rate)


OPTIMISER_OPTIONS = {  # key: what the optimiser calls it
    "momentum": "momentum", "betas": "betas", "weight_decay": "weight_decay", "history": "history_size", "iterations": "max_iter",
    "cg": "cg", "damping": "damping", "structural": "structural", "curvature": "curvature",
    "ridge": "ridge",
}  # fmt: skip


def pace(o: OptimiserSection) -> float | None:
    """The step size, with the default of the optimiser; None where it has none."""
    from ..optimisers.recipes import PACELESS, optimiser

    return None if o.name in PACELESS else optimiser(o.name, o.lr).lr


def curriculum_of(config: Config) -> Any:
    """Which of the drawn sequences a step learns from; None if all."""
    from ..training.curriculum import Easiest

    t = config.task
    if t.easiest is None:
        if t.easiest_by is not None:
            raise ConfigError("--easiest-by says what is easy, and does nothing without --easiest.")
        return None
    return Easiest(*t.easiest, t.easiest_by or "loss")


def optimiser_of(config: Config) -> Any:
    from ..optimisers import recipes, schedules, step_rules

    o = config.optimiser
    shape = {"decay": o.decay, "end": o.end, "patience": o.plateau}
    schedule = schedules.SCHEDULES[o.schedule](warmup=o.warmup, **{k: v for k, v in shape.items() if v is not None})
    options = {own: getattr(o, key) for key, own in OPTIMISER_OPTIONS.items() if getattr(o, key) is not None}
    rule = step_rules.STEP_RULES[o.step_rule or "constant"](**({} if o.threshold is None else {"c": o.threshold}))
    direction = o.direction or "steepest"
    return recipes.optimiser(o.name, o.lr, schedule, direction=direction, rule=rule, **options)
