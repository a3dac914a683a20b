"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import CoadjointError, ConfigError, DataError, MissingError, StorageError
from .settings import Settings

Whole = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
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
    rule: Literal["loose", "strict"] | None = Field(None, description="addition, multiplication: |e| < 0.2 or < 0.04")
    pixels: Literal[1, 8] | None = Field(None, description="digits: pixels read at a time")
    permuted: bool | None = Field(None, description="digits: pixels in a fixed random order")
    path: str | None = Field(None, description="music: the MATLAB file")


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

    cell: str = Field("elman", description="elman, leaky, rate, lstm, gru")
    hidden: Whole = Field(64, description="units")
    activation: str | None = Field(None, description="tanh (default), sigmoid, relu, identity, softplus")
    x0: Literal["zero", "learned"] = Field("zero", description="the initial state")
    bias: bool = Field(True, description="b and b_o")
    engine: str = Field("auto", description="auto, cpu, reference, autograd")
    init: str | None = Field(
        None, description="torch, gaussian, spectral, orthogonal, identity; spectral if --radius is given"
    )
    radius: Positive | None = Field(None, description="spectral radius of W to begin with (gain of the others)")
    std: Positive | None = Field(None, description="standard deviation of R and V to begin with (0.1)")


class GradientSection(Section):
    """The gradient method."""

    method: Literal["bptt", "penalised", "truncated", "rtrl"] | None = Field(
        None, description="penalised if --penalty is given, bptt otherwise"
    )
    penalty: str | None = Field(None, description="log-ratio, variance, omega, ...: a function of the costates")
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="rho, the penalty's weight; 0 is plain backpropagation"
    )
    weight_schedule: Literal["constant", "inverse-time", "exponential", "linear"] = Field(
        "constant", description="how the weight changes with the step"
    )
    weight_rate: Positive | None = Field(
        None, description="inverse-time: weight/(1 + rate step); exponential: weight rate^step"
    )
    weight_end: Annotated[float, Field(ge=0)] = Field(0.0, description="linear: the weight after the last step")
    k1: Whole | None = Field(None, description="truncated: steps between gradients")
    k2: Whole | None = Field(None, description="truncated: steps that losses are pulled back")


class OptimiserSection(Section):
    """The optimiser and its step size."""

    name: str = Field("adam", description="sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, ...")
    lr: Positive = Field(1e-3, description="step size")
    momentum: Share | None = Field(None, description="momentum, nesterov, rmsprop")
    betas: tuple[Share, Share] | None = Field(None, description="adam and its kin")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(None, description="L2 term (adamw: decoupled)")
    schedule: Literal["constant", "exponential", "linear", "cosine", "plateau"] = Field(
        "constant", description="how the step size changes"
    )
    decay: Positive | None = Field(None, description="exponential: factor for each step; plateau: for each plateau")
    end: Share | None = Field(None, description="linear, cosine: the last step size, as a share of lr")
    plateau: Whole | None = Field(None, description="plateau: looks without a better loss before the step size falls")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps over which the step size grows to lr")


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
    tests: Whole = Field(1000, description="fresh sequences of a look")
    confirm: Whole = Field(10_000, description="fresh sequences that confirm a success")
    probes: Whole = Field(32, description="sequences whose costates are looked at")
    patience: Whole | None = Field(None, description="stop after so many looks without a better one")
    stop_on_success: bool = Field(True, description="stop when the task's goal is met")
    nonfinite: Literal["stop", "skip", "dump"] = Field("stop", description="what to do with a step that is not finite")
    checkpoint: Whole = Field(1000, description="steps between checkpoints")
    keep: Annotated[int, Field(ge=2)] = Field(2, description="checkpoints that stay, beside the best")
    device: Literal["cpu", "cuda", "auto"] = Field("cpu", description="cpu, cuda or auto")
    precision: Literal[32, 64] = Field(32, description="bits of a number")
    threads: Whole | None = Field(None, description="CPU threads (1 for up to 128 units, torch's number beyond)")
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


def flag(section: str, key: str) -> str:
    """The flag of a key: its own name, or its section's for "name"."""
    return "--" + (section if key == "name" else key).replace("_", "-")


def textual(section: str, key: str) -> bool:
    """Does the key take words, so that a flag's value is not read as a number?"""
    kind = str(SECTIONS[section].model_fields[key].annotation)
    return "str" in kind or ("Literal" in kind and "Literal[1" not in kind and "Literal[32" not in kind)


def from_flag(section: str, key: str, text: str) -> Any:
    """A flag's text as a value: a number, or a list of them, where the key takes numbers."""
    from .settings import scalar

    if textual(section, key):
        lists = "list" in str(SECTIONS[section].model_fields[key].annotation)
        return text.split(",") if lists and "," in text else text
    try:
        parts = [scalar(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag(section, key)}: {text!r}: {error}") from None
    return parts if len(parts) > 1 else parts[0]


def resolve(file: Settings | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """The file's settings with the flags on top, checked."""
    values: dict[str, Any] = {}
    for name, section in (file.values if file else {}).items():
        values[name] = dict(section) if isinstance(section, dict) else section
    given = {(name, key) for name, section in (flags or {}).items() for key in section}
    for name, section in (flags or {}).items():
        if not isinstance(values.get(name, {}), dict):
            continue
        values.setdefault(name, {}).update(section)
    try:
        return Config.model_validate(tupled(values))
    except ValidationError as error:
        lines = list(dict.fromkeys(explain(e, file, given) for e in error.errors()))
        raise ConfigError("\n".join(lines[:20])) from None


def tupled(value: Any) -> Any:
    """Lists as tuples where pairs are expected: files know only lists."""
    if isinstance(value, dict):
        return {k: tupled(v) for k, v in value.items()}
    return tuple(value) if isinstance(value, list) and all(type(v) in (int, float) for v in value) else value


def explain(e: Any, file: Settings | None, given: set[tuple[str, str]]) -> str:
    """One line: where, what was expected, what came."""
    address = tuple(str(p) for p in e["loc"][:2])
    flagged = len(address) == 2 and (address[0], address[1]) in given
    where = (
        flag(address[0], address[1]) if flagged else f"{file.where(address) if file else 'config'}: {'.'.join(address)}"
    )
    came = e.get("input")
    if e["type"] == "extra_forbidden":
        return f"{where}: {nearest(address)}"
    if e["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: a section of keys is expected; got {came!r}. Sections: {', '.join(SECTIONS)}."
    if isinstance(came, bool) and e["type"] in ("string_type", "literal_error"):
        return f"{where}: a word is expected; got the boolean {str(came).lower()}. Write it in quotes."
    about = "; ".join([e["msg"].replace("Input should be", "must be").replace("Input", "the value")])
    return f"{where}: {about}; got {came!r}."


def nearest(address: tuple[str, ...]) -> str:
    """What an unknown key may have been meant for."""
    key = address[-1]
    if len(address) == 1:
        if key in HOMES:
            return f"'{key}' belongs in section [{HOMES[key]}]."
        near = difflib.get_close_matches(key, [*SECTIONS, *HOMES], 1, 0.5)
        home = f" (in section [{HOMES[near[0]]}])" if near and near[0] in HOMES else ""
        return (
            f"unknown section '{key}'; "
            + (f"did you mean '{near[0]}'{home}? " if near else "")
            + f"Sections: {', '.join(SECTIONS)}."
        )
    known = list(SECTIONS[address[0]].model_fields)
    if key in HOMES:
        return f"'{key}' belongs in section [{HOMES[key]}], not [{address[0]}]."
    near = difflib.get_close_matches(key, known, 1, 0.5) or difflib.get_close_matches(key, HOMES, 1, 0.6)
    home = f" of section [{HOMES[near[0]]}]" if near and near[0] not in known else ""
    return (
        f"unknown key '{key}'; " + (f"did you mean '{near[0]}'{home}? " if near else "") + f"Known: {', '.join(known)}."
    )


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
    device = device_of(training.device)
    set_threads(training.threads, config.network.hidden)
    task = task_of(config)
    net = network_of(config, task, device)
    steps, every = training.steps, training.every
    per_epoch = task.steps_per_epoch(training.batch * training.accumulate) if task.size is not None else None
    if training.epochs is not None:
        if per_epoch is None:
            raise ConfigError(
                "--epochs counts passes over a finite set, and this task is generated without end: use --steps."
            )
        if steps is not None:
            raise ConfigError("--steps and --epochs say the same thing twice: give one of them.")
        steps = training.epochs * per_epoch
    steps = steps or 10_000
    every = every or per_epoch or 100
    resolved = config.model_copy(
        update={
            "network": config.network.model_copy(update=start(config)),
            "gradient": config.gradient.model_copy(update={"method": method_of(config.gradient)}),
            "training": training.model_copy(
                update={
                    "steps": steps,
                    "epochs": None,
                    "every": every,
                    "threads": torch.get_num_threads(),
                    "device": device,
                }
            ),
        }
    )
    arguments = {
        **{k: getattr(training, k) for k in (
            "batch", "accumulate", "clip", "seed", "tests", "confirm", "probes", "patience", "stop_on_success", "nonfinite",
            "checkpoint", "keep",
        )},
        "steps": steps,
        "every": min(every, steps),
        "gradient": gradient_of(config, steps),
        "optimiser": optimiser_of(config),
        "description": describe(resolved, net, task),
    }  # fmt: skip
    return Job(resolved, net, task, arguments, tuple(getattr(task, "notes", ())))


def describe(config: Config, net: Any, task: Any) -> dict[str, Any]:
    """What a model file says of itself: enough to build the network again and to read data for it."""
    network = plain(config).get("network", {})
    shape = {k: getattr(net, k) for k in ("inputs", "outputs", "readout", "output")}
    data = task.describe() if hasattr(task, "describe") else None
    return {"network": network, "shape": shape, "precision": config.training.precision, "data": data, "task": task.name}


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

    if threads is not None or hidden <= 128:
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
            raise ConfigError(
                f"{flag('task', next(iter(options)))} belongs to a built-in task; your own data has none."
            )
        dtype = "float64" if config.training.precision == 64 else "float32"
        return Data.read(data.pop("train"), seed=config.training.seed, dtype=dtype, **data)
    if data:
        raise ConfigError(
            f"{flag('data', next(iter(data)))} belongs to your own data (--train FILE), not to task '{name}'."
        )
    return tasks.make(name, **options)


def start(config: Config) -> dict[str, Any]:
    n = config.network
    init = n.init or ("spectral" if n.radius is not None else "torch")
    takes = {"torch": (), "gaussian": ("std",)}.get(init, ("radius", "std"))
    for key in ("radius", "std"):
        if getattr(n, key) is not None and key not in takes:
            raise ConfigError(f"--{key} does nothing with init '{init}'. Leave it out, or use --init spectral.")
    defaults = {"radius": 1.0, "std": 0.1}
    return {"init": init, **{k: getattr(n, k) or defaults[k] for k in takes}}


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


def method_of(g: GradientSection) -> str:
    return g.method or ("penalised" if g.penalty is not None else "bptt")


def gradient_of(config: Config, steps: int) -> Any:
    from . import gradients, penalties

    g = config.gradient
    method = method_of(g)
    if g.penalty is not None and method != "penalised":
        raise ConfigError(f"--penalty belongs to method 'penalised', not '{method}'.")
    if (g.k1 is not None or g.k2 is not None) and method != "truncated":
        raise ConfigError(f"--k1 and --k2 belong to method 'truncated', not '{method}'.")
    if method == "penalised":
        if g.penalty is None:
            raise ConfigError(f"method 'penalised' needs a --penalty: {', '.join(penalties.PENALTIES)}.")
        if g.weight == 0:
            penalties.penalty(g.penalty)
            return gradients.BPTT()
        return gradients.Penalised(g.penalty, weight_of(g, steps))
    if method == "truncated":
        if g.k1 is None:
            raise ConfigError("method 'truncated' needs --k1, and --k2 if losses are pulled back further.")
        return gradients.Truncated(g.k1, g.k2 or g.k1)
    return gradients.RTRL() if method == "rtrl" else gradients.BPTT()


def weight_of(g: GradientSection, steps: int) -> Any:
    from . import penalties

    if g.weight_schedule in ("inverse-time", "exponential") and g.weight_rate is None:
        raise ConfigError(f"weight schedule '{g.weight_schedule}' needs --weight-rate.")
    rate = g.weight_rate or 1.0
    if g.weight_schedule == "inverse-time":
        return penalties.inverse_time(g.weight, rate)
    if g.weight_schedule == "exponential":
        return penalties.exponential(g.weight, rate)
    if g.weight_schedule == "linear":
        return penalties.linear(g.weight, g.weight_end, steps)
    return g.weight


def optimiser_of(config: Config) -> Any:
    from . import optimisers

    o = config.optimiser
    named = {"exponential": {"decay": o.decay}, "linear": {"end": o.end}, "cosine": {"end": o.end}, "plateau": {"decay": o.decay, "patience": o.plateau}}  # fmt: skip
    takes = named.get(o.schedule, {})
    for key, name in (("decay", "decay"), ("end", "end"), ("plateau", "patience")):
        if getattr(o, key) is not None and name not in takes:
            raise ConfigError(f"--{key} does nothing with schedule '{o.schedule}'.")
    schedule = optimisers.SCHEDULES[o.schedule](warmup=o.warmup, **{k: v for k, v in takes.items() if v is not None})
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
    if not path.exists():
        raise StorageError(f"{path} is missing: the run has not finished. Go on with: coadjoint resume {run}")
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
