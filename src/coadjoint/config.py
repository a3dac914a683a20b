"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import CoadjointError, ConfigError, DataError, MissingError, NumericalError, StorageError
from .settings import Settings

Whole = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskSection(Section):
    """A built-in task."""

    name: str | None = Field(None, description="a built-in task; `coadjoint tasks` lists them")
    length: Whole | tuple[Whole, Whole] | None = Field(None, description="steps of a sequence, or low,high")
    ragged: bool | None = Field(None, description="each sequence of a batch has a length of its own")
    curriculum: tuple[Whole, Whole] | None = Field(
        None, description="start,steps: the length grows from start over so many steps"
    )
    rule: Literal["loose", "strict"] | None = Field(
        None, description="addition, multiplication; errors below 0.2 or 0.04 are right"
    )
    pixels: Literal[1, 8] | None = Field(None, description="digits; pixels read at a time")
    permuted: bool | None = Field(None, description="digits: pixels in a fixed random order")
    path: str | None = Field(None, description="music: the MATLAB file")
    values: Whole | None = Field(None, description="copy: letters of the alphabet")
    positions: Whole | None = Field(None, description="copy: letters to repeat")
    chunk: Whole | None = Field(None, description="music: cut training pieces into parts of so many steps")


class DataSection(Section):
    """Your own data."""

    train: str | None = Field(None, description="a .csv, .parquet, .npz, .npy or .ts file")
    valid: str | None = Field(None, description="a file of validation sequences; otherwise they are split off")
    test: str | None = Field(None, description="a file of test sequences; otherwise they are split off")
    split: tuple[Share, Share, Share] | None = Field(None, description="shares of sequences for train,valid,test")
    kind: Literal["classify", "regress", "next"] | None = Field(None, description="what to predict")
    at: Literal["last", "every"] | None = Field(None, description="one target for a sequence, or one for each step")
    id: str | None = Field(None, description="the column that names a sequence")
    time: str | None = Field(None, description="the column that orders its steps")
    target: str | list[str] | None = Field(None, description="the column(s) to predict, a,b,c")
    features: str | list[str] | None = Field(None, description="the columns to read, a,b,c; all others by default")
    window: Whole | None = Field(None, description="cut sequences into pieces of so many steps")
    standardise: bool | None = Field(None, description="inputs to mean 0 and variance 1 on the training set (default)")
    missing: Literal["refuse", "drop", "ffill", "mask"] | None = Field(None, description="what to do with empty cells")
    irregular: Literal["refuse", "allow"] | None = Field(None, description="steps of different duration")
    overlap: Literal["refuse", "allow"] | None = Field(None, description="sequences that stand in two files")
    sep: str | None = Field(None, description="separator of a text table")
    decimal: str | None = Field(None, description="decimal sign of a text table")
    thousands: str | None = Field(None, description="thousands sign of a text table")
    header: bool | None = Field(None, description="whether a text table begins with names (default)")


class NetworkSection(Section):
    """The network and where it begins."""

    cell: str = Field("elman", description="elman, lstm, gru, ...: `coadjoint cells` lists them")
    hidden: Whole = Field(64, description="units")
    activation: str | None = Field(None, description="tanh (default), sigmoid, relu, identity, softplus")
    x0: Literal["zero", "learned"] = Field("zero", description="the initial state")
    bias: bool = Field(True, description="b and b_o")
    engine: str = Field("auto", description="auto, cpu, eager, cuda, scan, triton, stepwise, reference, autograd")
    init: str | None = Field(
        None,
        description="torch, gaussian, spectral, sparse, orthogonal, identity, glorot, he, sigmoid, basic-tanh, smart-tanh; spectral if --radius is given",
    )
    radius: Positive | None = Field(None, description="spectral radius of W to begin with (gain of the others)")
    std: Positive | None = Field(None, description="standard deviation of R and V to begin with (0.1)")


class GradientSection(Section):
    """The gradient method."""

    method: Literal["bptt", "penalised", "truncated", "rtrl"] | None = Field(
        None, description="penalised by default if --penalty is given, bptt otherwise"
    )
    penalty: str | None = Field(None, description="log-ratio, variance, omega, ...: a function of the costates")
    weight: NotNegative | None = Field(None, description="rho, the penalty's weight (1); 0 is plain backpropagation")
    weight_schedule: Literal["constant", "inverse-time", "exponential", "linear"] | None = Field(
        None, description="how the weight changes with the step"
    )
    weight_rate: Positive | None = Field(
        None, description="inverse-time: weight/(1 + rate step); exponential: weight rate^step"
    )
    weight_end: NotNegative | None = Field(None, description="linear: the weight after the last step (0)")
    k1: Whole | None = Field(None, description="truncated: steps between gradients")
    k2: Whole | None = Field(None, description="truncated: steps that losses are pulled back")
    segments: Whole | Literal["auto"] | None = Field(
        None,
        description="bptt, penalised: sweep in so many segments, auto for about sqrt(T): less memory, same gradient",
    )


class OptimiserSection(Section):
    """The optimiser and its step size."""

    name: str = Field("adam", description="sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, ...")
    lr: Annotated[float, Field(gt=0, le=1e38)] = Field(1e-3, description="step size")
    momentum: Share | None = Field(None, description="momentum, nesterov, rmsprop")
    betas: tuple[Share, Share] | None = Field(None, description="adam and its kin")
    weight_decay: NotNegative | None = Field(None, description="L2 term (adamw: decoupled)")
    schedule: Literal["constant", "exponential", "linear", "cosine", "plateau"] = Field(
        "constant", description="how the step size changes"
    )
    decay: Positive | None = Field(None, description="exponential: factor for each step; plateau: for each plateau")
    end: Share | None = Field(None, description="linear, cosine: the last step size, as a share of lr")
    plateau: Whole | None = Field(None, description="plateau: looks without a better loss before the step size falls")
    warmup: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="steps over which the step size grows to lr")


class TrainingSection(Section):
    """The run."""

    steps: Whole | None = Field(None, description="at most so many steps (10,000)")
    epochs: Whole | None = Field(None, description="at most so many passes over a finite set, instead of --steps")
    batch: Whole = Field(32, description="sequences of a step")
    accumulate: Whole = Field(1, description="batches averaged in a step")
    clip: Positive | None = Field(None, description="largest norm of a gradient")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="everything random follows from it")
    every: Whole | None = Field(
        None, description="steps between looks at held-out sequences (100; finite sets: an epoch)"
    )
    tests: Whole | None = Field(None, description="fresh sequences of a look (1,000); finite sets: all they have")
    confirm: Whole | None = Field(None, description="fresh sequences that confirm a success (10,000)")
    probes: Whole = Field(32, description="sequences whose costates are looked at")
    patience: Whole | None = Field(None, description="stop after so many looks without a better one")
    stop_on_success: bool = Field(True, description="stop when the task's goal is met")
    nonfinite: Literal["stop", "skip", "dump"] = Field("stop", description="what to do with a step that is not finite")
    checkpoint: Whole = Field(1000, description="steps between checkpoints")
    keep: Annotated[int, Field(ge=2, lt=2**31)] = Field(2, description="checkpoints that stay, beside the best")
    device: Literal["cpu", "cuda", "auto"] = Field("cpu", description="where to compute")
    precision: Literal[32, 64] = Field(32, description="bits of a number")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="CPU threads (1 for up to 256 units, torch's number beyond)"
    )
    tensorboard: bool = Field(False, description="also log for TensorBoard")


class Config(Section):
    """All sections of a run."""

    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    network: NetworkSection = NetworkSection()
    gradient: GradientSection = GradientSection()
    optimiser: OptimiserSection = OptimiserSection()
    training: TrainingSection = TrainingSection()


SECTIONS: dict[str, type[Section]] = {
    name: cast(type[Section], f.annotation) for name, f in Config.model_fields.items()
}
HOMES = {key: name for name, section in SECTIONS.items() for key in section.model_fields if key != "name"}


ELSEWHERE = {  # what other libraries call a key
    "learning_rate": "lr", "hidden_size": "hidden", "units": "hidden", "batch_size": "batch", "max_steps": "steps",
    "max_epochs": "epochs", "spectral_radius": "radius", "clip_norm": "clip", "random_state": "seed", "dtype": "precision",
}  # fmt: skip


def flag(section: str, key: str) -> str:
    """The flag of a key: its own name, or its section's for "name"."""
    return "--" + (section if key == "name" else key).replace("_", "-")


def types(kind: Any) -> list[Any]:
    """The alternatives of an annotation, None left out: Whole | tuple[Whole, Whole] | None -> [Whole, tuple[Whole, Whole]]."""
    union = get_args(kind) if get_origin(kind) not in (None, Annotated, Literal, tuple, list) else [kind]
    return [t for t in union if t is not NoneType]


KINDS: dict[tuple[str, str], list[Any]] = {
    (name, key): types(kind)
    for name, section in SECTIONS.items()
    for key, kind in get_type_hints(section, include_extras=True).items()
    if key in section.model_fields
}


def choices(kinds: list[Any]) -> list[Any]:
    """The values that may be chosen, where a key has a list of them."""
    return [value for t in kinds if get_origin(t) is Literal for value in get_args(t)]


def expected(kinds: list[Any]) -> str:
    """A key's type in words: "a number greater than 0", "loose or strict"."""
    found: list[str] = []
    for t in kinds:
        parts = get_args(t)
        if get_origin(t) is Literal:
            found += [" or ".join(filter(None, (", ".join(map(str, parts[:-1])), str(parts[-1]))))]
        elif get_origin(t) is tuple:
            each = "of them" if parts[0] in kinds else f"values, each {expected([parts[0]])}"
            found += [f"{'two' if len(parts) == 2 else 'three'} {each}"]
        elif get_origin(t) is Annotated:
            found += [("a whole number " if parts[0] is int else "a number ") + span(parts[1].metadata)]
        else:
            found += [{str: "text", bool: "true or false"}.get(t, "a list of texts")]
    return " or ".join(found)


def span(bounds: list[Any]) -> str:
    """Ge(1), Lt(10) -> "from 1 to 9"."""
    at = {name: getattr(b, name) for b in bounds for name in ("ge", "gt", "le", "lt") if hasattr(b, name)}
    if "gt" in at:
        return f"greater than {at['gt']}"
    most = at.get("le", at["lt"] - 1 if "lt" in at else None)
    return f"at least {at['ge']}" if most is None else f"from {at['ge']} to {most}"


def from_flag(section: str, key: str, text: str) -> Any:
    """A flag's text as a value: a number, or a list of them, where the key takes numbers."""
    from .settings import scalar

    kinds = KINDS[section, key]
    if str in kinds:
        return text.split(",") if len(kinds) > 1 and "," in text else text
    words = [value for value in choices(kinds) if isinstance(value, str)]
    if text in words or (words and len(kinds) == 1):
        return text
    try:
        parts = [scalar(part.strip()) if part.strip() else "" for part in text.split(",")]
    except ValueError:
        return text  # no number: the check says what is expected
    return parts if len(parts) > 1 else parts[0]


def resolve(file: Settings | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """The file's settings with the flags on top, checked."""
    values: dict[str, Any] = {}
    for name, section in (file.values if file else {}).items():
        values[name] = dict(section) if isinstance(section, dict) else section
    given = {(name, key) for name, section in (flags or {}).items() for key in section}
    for name, section in (flags or {}).items():
        if isinstance(values.setdefault(name, {}), dict):
            values[name].update(section)
    try:
        return Config.model_validate({name: tupled(name, section) for name, section in values.items()})
    except ValidationError as error:
        lines = list(dict.fromkeys(explain(e["loc"], values, file, given) for e in error.errors()))
        more = [f"... and {len(lines) - 20} more."] if len(lines) > 20 else []
        raise ConfigError("\n".join(lines[:20] + more)) from None


def tupled(name: str, section: Any) -> Any:
    """Lists as tuples where pairs are expected: files know only lists."""
    if not isinstance(section, dict):
        return section
    pair = lambda key: any(get_origin(t) is tuple for t in KINDS.get((name, key), ()))
    return {k: tuple(v) if isinstance(v, list) and pair(k) else v for k, v in section.items()}


def explain(
    loc: tuple[str | int, ...], values: Mapping[str, Any], file: Settings | None, given: set[tuple[str, str]]
) -> str:
    """One line for a key: where, what was expected, what came."""
    name, *rest = (str(part) for part in loc[:2])
    address = (name, *rest)
    came = values[name] if not rest else values[name].get(rest[0])
    spelled = tuple(part if part.isprintable() else repr(part)[1:-1] for part in address)
    where = f"{file.where(address)}: {'.'.join(spelled)}" if file else ".".join(spelled)
    if rest and (name, rest[0]) in given:
        where = flag(name, rest[0])
    if name not in SECTIONS or (rest and (name, rest[0]) not in KINDS):
        return f"{where}: {nearest(spelled)}"
    if not rest:
        return f"{where}: a section of keys is expected; got {shown(came)}. Keys: {', '.join(SECTIONS[name].model_fields)}."
    kinds = KINDS[name, rest[0]]
    words = [str(value) for value in choices(kinds)]
    near = difflib.get_close_matches(str(came), words, 1, 0.5) if isinstance(came, str) else []
    hint = f" Did you mean '{near[0]}'?" if near else ""
    if str in kinds and isinstance(came, bool | int | float):
        hint = " Write it in quotes."
    return f"{where}: must be {expected(kinds)}; got {shown(came)}.{hint}"


def shown(value: Any) -> str:
    """A value as a file would have it, not too long."""
    text = (
        {True: "true", False: "false", None: "nothing"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(address: tuple[str, ...]) -> str:
    """What an unknown key may have been meant for."""
    key = address[-1]
    within = f", not [{address[0]}]" if len(address) > 1 else ""
    if key in HOMES:
        return f"'{key}' belongs in section [{HOMES[key]}]{within}."
    known = list(SECTIONS[address[0]].model_fields) if within else list(SECTIONS)
    other = difflib.get_close_matches(key, ELSEWHERE, 1, 0.8)
    near = [ELSEWHERE[word] for word in other] or difflib.get_close_matches(key, known, 1, 0.5)
    near = near or difflib.get_close_matches(key, HOMES, 1, 0.6)
    home = f" of section [{HOMES[near[0]]}]" if near and near[0] not in known else ""
    hint = f" did you mean '{near[0]}'{home}?" if near else ""
    return f"unknown {'key' if within else 'section'} '{key}';{hint} Known: {', '.join(known)}."


def given(section: Section) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in section if value is not None}


# objects


@dataclass(frozen=True)
class Job:
    """What a Config means: a network, a task, and the arguments of co.train."""

    config: Config
    network: Any
    task: Any
    arguments: dict[str, Any]
    notes: tuple[str, ...] = ()


def plain(config: Config) -> dict[str, Any]:
    """The config as a file holds it: the keys that have a value, by section."""
    out = {
        name: {k: list(v) if isinstance(v, tuple) else v for k, v in given(getattr(config, name)).items()}
        for name in SECTIONS
    }
    return {name: section for name, section in out.items() if section}


def build(config: Config) -> Job:
    """Make the network, the task, the gradient method and the optimiser."""
    import torch

    training = config.training
    idle(config)
    device = device_of(training.device)
    set_threads(training.threads, config.network.hidden)
    task = task_of(config)
    finite(config, task)
    net = network_of(config, task, device)
    per_epoch = task.steps_per_epoch(training.batch * training.accumulate) if task.size is not None else None
    steps = training.steps or (training.epochs * per_epoch if training.epochs and per_epoch else 10_000)
    every = training.every or per_epoch or 100
    fresh = {} if per_epoch else {"tests": training.tests or 1000, "confirm": training.confirm or 10_000}
    resolved = config.model_copy(
        update={
            "network": config.network.model_copy(update=start(config)),
            "gradient": config.gradient.model_copy(update=method(config.gradient)),
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
            "batch", "accumulate", "clip", "seed", "probes", "patience", "stop_on_success", "nonfinite", "checkpoint", "keep",
        )},
        **fresh,
        "steps": steps,
        "every": min(every, steps),
        "gradient": gradient_of(config, steps),
        "optimiser": optimiser_of(config),
        "description": describe(resolved, net, task),
    }  # fmt: skip
    # What torch or a gradient method declines is declined before anything is written.
    arguments["optimiser"].make(net.parameters())
    b = task.batch(0, 1, training.seed).to(net.V.dtype, net.V.device)
    with contextlib.suppress(NumericalError):
        arguments["gradient"].evaluate(net, b, task.loss)
    notes = (*getattr(task, "notes", ()), *memory_of(net, len(b.u), config, arguments["gradient"]))
    return Job(resolved, net, task, arguments, notes)


def memory_of(net: Any, T: int, config: Config, method: Any) -> list[str]:
    """What the gradient of a step will take, where segments are asked for or would help."""
    from . import gradients, segments

    if net.cell is None or not isinstance(method, gradients.BPTT | gradients.Penalised):
        return []
    asked, batch, probes = method.segments, config.training.batch, config.training.probes
    counted = lambda m, B: segments.predict(net, T, B, m)
    whole = gradients.Penalised(method.penalty) if isinstance(method, gradients.Penalised) else gradients.BPTT()
    most, at_once = counted(method, batch), counted(whole, batch)
    if asked is None:
        return (
            [f"a gradient at T = {T:,} takes about {shown_bytes(most)}; --segments auto would take less"]
            if most > 1e9
            else []
        )
    segments.steady()
    lines = [f"a gradient at T = {T:,} takes about {shown_bytes(most)} (without segments {shown_bytes(at_once)})"]
    look = 2 * counted(gradients.BPTT(), probes)  # with its costates
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
    shape = {k: getattr(net, k) for k in ("inputs", "outputs", "readout", "output")}
    data = task.describe() if hasattr(task, "describe") else None
    about = {
        "network": network,
        "shape": shape,
        "precision": config.training.precision,
        "data": data,
        "task": task.name,
    }
    return {**about, "settings": settings}


def device_of(name: str) -> str:
    import torch

    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        reason = "this torch was built without CUDA" if not torch.backends.cuda.is_built() else "no GPU was found"
        raise MissingError(f"--device cuda: {reason}. Use --device cpu.")
    return ("cuda" if cuda else "cpu") if name == "auto" else name


def set_threads(threads: int | None, hidden: int) -> None:
    """Small arrays are slower on several threads."""
    import torch

    if threads is not None or hidden <= 256:
        torch.set_num_threads(threads or 1)


def task_of(config: Config) -> Any:
    from . import tasks
    from .tasks.data import Data

    name, options, data = config.task.name, given(config.task), given(config.data)
    options.pop("name", None)
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


def start(config: Config) -> dict[str, Any]:
    """Where the weights begin, with the defaults of what applies."""
    n = config.network
    init = n.init or ("spectral" if n.radius is not None else "torch")
    begin = {"radius": n.radius or 1.0, "std": n.std or 0.1}
    return {"init": init, **{key: value for key, value in begin.items() if init in APPLIES["network", key][1]}}


def method(g: GradientSection) -> dict[str, Any]:
    """The gradient method, with the defaults of what applies."""
    name = g.method or ("penalised" if g.penalty is not None else "bptt")
    return {"method": name, **({"weight": 1.0 if g.weight is None else g.weight} if name == "penalised" else {})}


# Keys that mean something only where another key has one of these values.
_SCALED = ("spectral", "sparse", "orthogonal", "identity")
APPLIES: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("network", "radius"): ("init", _SCALED),
    ("network", "std"): ("init", ("gaussian", *_SCALED)),
    ("gradient", "penalty"): ("method", ("penalised",)),
    ("gradient", "weight"): ("method", ("penalised",)),
    ("gradient", "weight_schedule"): ("method", ("penalised",)),
    ("gradient", "weight_rate"): ("weight_schedule", ("inverse-time", "exponential")),
    ("gradient", "weight_end"): ("weight_schedule", ("linear",)),
    ("gradient", "k1"): ("method", ("truncated",)),
    ("gradient", "k2"): ("method", ("truncated",)),
    ("gradient", "segments"): ("method", ("bptt", "penalised")),
    ("optimiser", "decay"): ("schedule", ("exponential", "plateau")),
    ("optimiser", "end"): ("schedule", ("linear", "cosine")),
    ("optimiser", "plateau"): ("schedule", ("plateau",)),
}


def idle(config: Config) -> None:
    """Refuse what would do nothing: a setting that is ignored is a mistake, or a misunderstanding."""
    from .errors import choose
    from .initialisers import INITIALISERS
    from .optimisers import OPTIMISERS

    g, o = config.gradient, config.optimiser
    init = choose("initialiser", start(config)["init"], INITIALISERS)
    choose("optimiser", o.name, OPTIMISERS)
    takes = lambda key: tuple(name for name, (_, _, options) in OPTIMISERS.items() if key in options)
    applies = APPLIES | {("optimiser", key): ("name", takes(key)) for key in ("momentum", "betas", "weight_decay")}
    chosen = {
        "init": init, "method": method(g)["method"], "weight_schedule": g.weight_schedule or "constant",
        "schedule": o.schedule, "name": o.name,
    }  # fmt: skip
    lines = [
        f"{flag(section, key)} does nothing with {flag(section, by)} {chosen[by]}: it belongs to {', '.join(values)}."
        for (section, key), (by, values) in applies.items()
        if getattr(getattr(config, section), key) is not None and chosen[by] not in values
    ]
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


def network_of(config: Config, task: Any, device: str) -> Any:
    import torch

    from .initialisers import initialise
    from .network import Network

    n, begin = config.network, start(config)
    dtype = torch.float64 if config.training.precision == 64 else torch.float32
    net = Network(
        n.cell, inputs=task.inputs, hidden=n.hidden, outputs=task.outputs, activation=n.activation, readout=task.readout,
        output=task.output, x0=n.x0, bias=n.bias, engine=n.engine, dtype=dtype,
    )  # fmt: skip
    initialise(net, begin.pop("init"), seed=config.training.seed, **begin)
    return net.to(device)


def gradient_of(config: Config, steps: int) -> Any:
    from . import gradients, penalties

    g = config.gradient
    name = method(g)["method"]
    if name == "penalised":
        if g.penalty is None:
            raise ConfigError(f"--method penalised needs a --penalty: {', '.join(penalties.PENALTIES)}.")
        penalties.penalty(g.penalty)
        weight = weight_of(g, steps)
        return gradients.BPTT(g.segments) if weight == 0 else gradients.Penalised(g.penalty, weight, g.segments)
    if name == "truncated":
        if g.k1 is None:
            raise ConfigError("--method truncated needs --k1, and --k2 if losses are pulled back further.")
        return gradients.Truncated(g.k1, g.k2 or g.k1)
    return gradients.RTRL() if name == "rtrl" else gradients.BPTT(g.segments)


def weight_of(g: GradientSection, steps: int) -> Any:
    """rho, or its schedule."""
    from . import penalties

    rho, schedule = 1.0 if g.weight is None else g.weight, g.weight_schedule or "constant"
    if schedule == "constant":
        return rho
    if schedule == "linear":
        return penalties.linear(rho, g.weight_end or 0.0, steps)
    if g.weight_rate is None:
        raise ConfigError(f"--weight-schedule {schedule} needs --weight-rate.")
    if schedule == "inverse-time":
        return penalties.inverse_time(rho, g.weight_rate)
    if g.weight_rate > 1:
        raise ConfigError(
            f"--weight-schedule exponential grows without end for --weight-rate {g.weight_rate}: at most 1."
        )
    return penalties.exponential(rho, g.weight_rate)


def optimiser_of(config: Config) -> Any:
    from . import optimisers

    o = config.optimiser
    shape = {"decay": o.decay, "end": o.end, "patience": o.plateau}
    schedule = optimisers.SCHEDULES[o.schedule](warmup=o.warmup, **{k: v for k, v in shape.items() if v is not None})
    options = {k: getattr(o, k) for k in ("momentum", "betas", "weight_decay") if getattr(o, k) is not None}
    return optimisers.optimiser(o.name, o.lr, schedule, **options)


# runs that exist


def read(folder: Path) -> Config:
    """The config a run was started with."""
    from . import settings

    path = folder / "config.yaml"
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a run folder{' (no such folder)' if not folder.exists() else ''}.")
    if not path.exists():
        raise StorageError(f"{folder} holds no config.yaml: it is not a run made by `coadjoint train`.")
    return resolve(settings.load(path))


def load_model(path: Path) -> tuple[Any, dict[str, Any]]:
    """The network of a model.safetensors file, and its description. The file is a stranger's: nothing in it is run."""
    import torch

    from . import runs, settings
    from .network import Network
    from .training import fit

    runs.safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = (file.metadata() or {}).get("coadjoint")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} is not a model file: {error}.") from None
    if about is None:
        raise StorageError(f"{path} was not written by coadjoint: it does not say what network it belongs to.")
    description = settings.read_json(about, error=StorageError)
    try:
        n = NetworkSection.model_validate(description["network"])
        shape = description["shape"]
        dtype = torch.float64 if description["precision"] == 64 else torch.float32
        net = Network(
            n.cell,
            hidden=n.hidden,
            activation=n.activation,
            x0=n.x0,
            bias=n.bias,
            engine=n.engine,
            dtype=dtype,
            **shape,
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise StorageError(f"{path}: its description of the network is damaged ({type(error).__name__}).") from None
    fit(net, weights, str(path))
    return net, description


def predict(run: Path, data: Path, out: Path, **reading: Any) -> tuple[int, tuple[str, ...]]:
    """Predictions of a trained run for the sequences of a file; how many, and what there is to say of them."""
    import torch

    from .tasks.data import Data

    path = run / "model.safetensors" if run.is_dir() else run
    if not run.exists():
        raise StorageError(f"{run} does not exist. Name a run folder, or a model.safetensors.")
    if not path.exists():
        config = run / "config.yaml"
        raise StorageError(
            f"{run} has not finished: there is no model yet. Go on with: coadjoint resume {shlex.quote(str(run))}"
            if config.exists()
            else f"{run} is not a run folder: it holds no model.safetensors."
        )
    net, description = load_model(path)
    if description.get("data") is None:
        raise DataError(
            f"{run} was trained on task '{description.get('task')}', not on files: there is nothing to predict for a file."
        )
    new = Data.for_prediction(description["data"], data, **reading)

    def outputs() -> Any:
        with torch.no_grad():
            for _, b in new.batches():
                b = b.to(net.V.dtype, net.V.device)
                yield net(b.u, b.lengths, b.x0).a

    new.write(out, outputs())
    return len(new), new.notes


__all__ = ["CoadjointError", "Config", "Job", "build", "load_model", "predict", "read", "resolve"]
