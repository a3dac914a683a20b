"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import shlex
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import CoadjointError, ConfigError, DataError, MissingError, NumericalError, StorageError, choose
from .errors import nearest as nearest_name
from .settings import SURROGATE, Settings

Whole = Annotated[int, Field(ge=1, lt=2**31)]
Few = Annotated[int, Field(ge=1, le=1000)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, le=1)]


OPTIONS = "Options of single cells"


def option(text: str) -> Any:
    """A key that belongs to some cells: `coadjoint cells` says to which, and what it is if it is not given."""
    return Field(None, description=text, json_schema_extra={"panel": OPTIONS})


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
    easiest: tuple[Part, Whole] | None = Field(
        None,
        description="start,steps: learn from the easiest share of what is drawn, from start to all over so many steps",
    )
    easiest_by: Literal["loss", "length"] | None = Field(
        None, description="what is easy: a small loss under the present weights (default), or few steps"
    )
    rule: Literal["loose", "strict"] | None = Field(
        None, description="addition, multiplication; errors below 0.2 or 0.04 are right"
    )
    pixels: Literal[1, 8] | None = Field(None, description="digits; pixels read at a time")
    permuted: bool | None = Field(None, description="digits: pixels in a fixed random order")
    path: str | None = Field(None, description="music: the MATLAB file")
    values: Whole | None = Field(None, description="copy, reversal, sorting: letters of the alphabet")
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

    cell: str | list[str] | None = Field(
        None,
        description="elman (default; gru where the answer is a sequence), lstm, ...: `coadjoint cells` lists them; lstm,gru: a layer of each; reservoir: fixed, only the readout is trained",
    )
    hidden: Whole = Field(64, description="units, of each layer")
    layers: Few | None = Field(None, description="so many layers of the cell (1; gated-feedback: of its own, 2)")
    bidirectional: bool | None = Field(None, description="each layer reads a sequence in both directions")
    residual: bool | None = Field(None, description="a layer adds to what it receives, from the second on")
    dropout: Share | None = Field(
        None, description="share of what is dropped in training: of inputs, between layers, before the readout (0)"
    )
    activation: str | None = Field(
        None, description="tanh, sigmoid, relu, identity, softplus, where a cell leaves it open"
    )
    structure: str | None = Field(
        None, description="of W: antisymmetric, orthogonal, cayley, diagonal, low-rank, dale; some cells have their own"
    )
    x0: Literal["zero", "learned"] = Field("zero", description="the initial state")
    bias: bool = Field(True, description="b and b_o")
    readout: str | None = Field(
        None,
        description="tilted, tilted-tanh, attention: read all steps, where a task asks for one answer; the last if not given",
    )
    attention_steps: Whole | None = Field(None, description="attention: so many steps have a bias of their own (1)")
    deep: Whole | list[Whole] | None = Field(
        None, description="hidden layers of the readout, by their widths: 32 or 64,32"
    )
    skip: bool | None = Field(None, description="add D u to the readout")
    decoder: str | None = Field(None, description="sequences: the decoder's cell; the encoder's last if not given")
    attend: bool | None = Field(None, description="sequences: the decoder looks at all steps of the input (default)")
    embedding: Whole | None = Field(None, description="sequences: entries of a token's embedding (the units)")
    freeze: str | list[str] | None = Field(None, description="parameters that are not trained: W,R,b,V,b_o,x0, ...")
    engine: str = Field("auto", description="auto, cpu, eager, cuda, scan, triton, stepwise, reference, autograd")
    init: str | None = Field(
        None,
        description="torch, gaussian, spectral, sparse, orthogonal, identity, glorot, he, sigmoid, basic-tanh, smart-tanh, ring; spectral if --radius is given",
    )
    radius: Positive | None = Field(
        None,
        description="spectral radius of W to begin with (1); orthogonal, identity: its gain; ring: the largest |L|",
    )
    inner: NotNegative | None = Field(None, description="ring: the smallest |L| to begin with (0)")
    std: Positive | None = Field(None, description="standard deviation of R and V to begin with (0.1)")
    eps: Positive | None = option("antisymmetric, lipschitz, unicornn: size of a step; cornn: damping")
    gamma: NotNegative | None = option(
        "antisymmetric, lipschitz: what is taken off the diagonal of W; cornn: stiffness"
    )
    dt: Positive | None = option("cornn: size of a step")
    alpha: NotNegative | None = option("scrn: decay of the slow state; unicornn: stiffness")
    beta: Number | None = option("lipschitz: share of the skew part of W; with --readout tilted its sharpness instead")
    k: Whole | None = option("inverse: steps with W^-1, then as many with W")
    noise: NotNegative | None = option("rate: standard deviation of the noise of a step, in training")
    truncated: bool | None = option("lstm-1997: the truncated gradient of the paper")
    unit: str | None = option("gated-feedback: tanh, gru, lstm")
    depth: Few | None = option("deep-transition: layers between one state and the next")
    width: Whole | None = option("deep-transition: units of those layers")
    shortcut: bool | None = option("deep-transition: the last layer also sees the state")


class GradientSection(Section):
    """The gradient method."""

    method: Literal["bptt", "penalised", "truncated", "rtrl"] | None = Field(
        None, description="penalised by default if --penalty is given, bptt otherwise"
    )
    penalty: str | None = Field(None, description="log-ratio, variance, omega, ...: a function of the costates")
    penalty_on: Literal["each", "top", "whole"] | None = Field(
        None, description="several layers: the mean over each (default), the last, or the states of all as one"
    )
    weight: NotNegative | None = Field(None, description="rho, the penalty's weight (1); 0 is plain backpropagation")
    weight_schedule: Literal["constant", "inverse-time", "exponential", "linear", "steered"] | None = Field(
        None, description="how the weight changes with the step; steered if --weight-target is given"
    )
    weight_rate: Positive | None = Field(
        None, description="inverse-time: weight/(1 + rate step); exponential: weight rate^step"
    )
    weight_end: NotNegative | None = Field(None, description="linear: the weight after the last step (0)")
    weight_target: Positive | None = Field(
        None, description="steered: the |log-decay| of costates per step that the weight is turned up or down for"
    )
    weight_gain: Positive | None = Field(None, description="steered: by how much at most a step turns it (0.01)")
    pretrain: Whole | None = Field(None, description="penalised: minimise the penalty alone for so many steps first")
    k1: Whole | None = Field(None, description="truncated: steps between gradients")
    k2: Whole | None = Field(None, description="truncated: steps that losses are pulled back")
    segments: Whole | Literal["auto"] | None = Field(
        None,
        description="bptt, penalised: sweep in so many segments, auto for about sqrt(T): less memory, same gradient",
    )


class OptimiserSection(Section):
    """The optimiser and its step size."""

    name: str = Field(
        "adam", description="sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, lbfgs, hessian-free, ridge, ..."
    )
    lr: Annotated[float, Field(gt=0, le=1e38)] | None = Field(None, description="step size (1e-3; lbfgs: 1)")
    direction: Literal["steepest", "temporal"] | None = Field(
        None, description="the gradient (default), or its temporal components mixed at random"
    )
    step_rule: Literal["constant", "galvan", "armijo", "wolfe"] | None = Field(
        None, description="how much of a move is taken: all of it (default), or what a rule or line search says"
    )
    threshold: Positive | None = Field(
        None, description="galvan: directions longer than this are brought to norm 1 (1)"
    )
    momentum: Share | None = Field(None, description="momentum, nesterov, rmsprop")
    betas: tuple[Share, Share] | None = Field(None, description="adam and its kin")
    weight_decay: NotNegative | None = Field(None, description="L2 term (adamw: decoupled)")
    history: Whole | None = Field(None, description="lbfgs: steps that it remembers (10)")
    iterations: Whole | None = Field(None, description="lbfgs: of its own within a step (20)")
    cg: Whole | None = Field(None, description="hessian-free: conjugate gradient iterations of a step, at most")
    damping: Positive | None = Field(None, description="hessian-free: to begin with")
    structural: NotNegative | None = Field(None, description="hessian-free: how much a change of the states counts")
    curvature: Whole | None = Field(None, description="hessian-free: so many of the batch for the curvature (all)")
    ridge: NotNegative | None = Field(
        None, description="ridge: the weight of |V|^2 beside the sum of squared errors (1e-6)"
    )
    schedule: Literal["constant", "exponential", "inverse-time", "linear", "cosine", "plateau"] = Field(
        "constant", description="how the step size changes"
    )
    decay: Positive | None = Field(
        None,
        description="exponential: factor for each step; inverse-time: lr/(1 + decay step); plateau: for each plateau",
    )
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
    clip_value: Positive | None = Field(None, description="largest entry of a gradient")
    clip_mean: Positive | None = Field(None, description="largest norm, as a multiple of the running mean of norms")
    weight_noise: NotNegative | None = Field(
        None, description="standard deviation of noise on the weights while a gradient is computed (0)"
    )
    gradients: Whole | None = Field(
        None, description="budget: gradients of a sequence, of two sweeps; other work counts by its sweeps"
    )
    seconds: Positive | None = Field(None, description="budget; a run ends when all that are given are spent")
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
        elif get_origin(t) is tuple and len(set(parts)) > 1:
            found += [f"{'two' if len(parts) == 2 else 'three'} values, {' and '.join(expected([p]) for p in parts)}"]
        elif get_origin(t) is tuple:
            each = "of them" if parts[0] in kinds else f"values, each {expected([parts[0]])}"
            found += [f"{'two' if len(parts) == 2 else 'three'} {each}"]
        elif get_origin(t) is Annotated:
            found += [
                " ".join(filter(None, ("a whole number" if parts[0] is int else "a number", span(parts[1].metadata))))
            ]
        elif get_origin(t) is list and parts[0] in kinds and parts[0] is not str:
            found += ["a list of them"]
        else:
            found += [{str: "text", bool: "true or false"}.get(t, "a list of texts")]
    return " or ".join(found)


def span(bounds: list[Any]) -> str:
    """Ge(1), Lt(10) -> "from 1 to 9"; nothing without bounds."""
    at = {name: getattr(b, name) for b in bounds for name in ("ge", "gt", "le", "lt") if hasattr(b, name)}
    if not at:
        return ""
    if "gt" in at:
        return f"greater than {at['gt']}" + (f" and at most {at['le']}" if at.get("le", 1e38) < 1e38 else "")
    most = at.get("le", at["lt"] - 1 if "lt" in at else None)
    return f"at least {at['ge']}" if most is None else f"from {at['ge']} to {most}"


def from_flag(section: str, key: str, text: str) -> Any:
    """A flag's text as a value: a number, or a list of them, where the key takes numbers."""
    from .settings import scalar

    kinds = KINDS[section, key]
    if str in kinds:
        return [part.strip() for part in text.split(",") if part.strip()] if len(kinds) > 1 and "," in text else text
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
    for name, key in given:
        refuse_bytes(flag(name, key), values[name].get(key) if isinstance(values[name], dict) else None)
    try:
        return Config.model_validate({name: tupled(name, section) for name, section in values.items()})
    except ValidationError as error:
        lines = list(dict.fromkeys(explain(e["loc"], values, file, given) for e in error.errors()))
        more = [f"... and {len(lines) - 20} more."] if len(lines) > 20 else []
        raise ConfigError("\n".join(lines[:20] + more)) from None


def refuse_bytes(where: str, value: Any) -> None:
    """A run folder holds text: a name from the command line that is not UTF-8 could not be written there."""
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, str) and not part.isascii() and SURROGATE.search(part):
            what = repr(os.fsencode(part))[1:]
            raise ConfigError(f"{where}: {what} is not text in UTF-8, and a run's settings are. Rename it.")


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
    near = nearest_name(came, words) if isinstance(came, str) else None
    hint = f" Did you mean '{near}'?" if near else ""
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
    other = nearest_name(key, ELSEWHERE, 0.8)
    near = ELSEWHERE[other] if other else nearest_name(key, known) or nearest_name(key, HOMES, 0.6)
    home = f" of section [{HOMES[near]}]" if near and near not in known else ""
    hint = f" did you mean '{near}'{home}?" if near else ""
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


def build(config: Config, past: Any = None) -> Job:
    """Make the network, the task, the gradient method and the optimiser. past: a runs.Glimpse of a checkpoint to go on from; a
    config that does not belong to it is refused before anything is built of it."""
    import torch

    from .directions import DIRECTIONS
    from .network import Network
    from .tasks import rng

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
    from .training import compare_tensors

    if past is not None:
        shape = Shape(**{key: getattr(task, key) for key in Shape.model_fields})
        compare_tensors(outlined(config.network, shape, config.training.precision), past.outline, past.source)


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
    from .initialisers import INITIALISERS

    n = config.network
    own = RESERVOIR.start if is_reservoir(n) else {"init": "torch" if n.radius is None else "spectral"}
    init = choose("initialiser", n.init or own["init"], INITIALISERS)
    given = {key: getattr(n, key) for key in INITIALISERS[init].options}
    defaults = {**INITIALISERS[init].options, **{key: own[key] for key in given if key in own}}
    return {"init": init, **{key: defaults[key] if value is None else value for key, value in given.items()}}


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
    from .initialisers import INITIALISERS
    from .optimisers import OPTIMISERS, OWN_PACE, PACELESS

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


class Shape(Section):
    """What a task asks of a network."""

    inputs: Whole
    outputs: Whole
    readout: Literal["last", "every", "sequence"]
    output: str


def network_of(config: Config, task: Any, device: str) -> Any:
    from .initialisers import initialise

    begin = start(config)
    net = construct(
        config.network, Shape(**{k: getattr(task, k) for k in Shape.model_fields}), config.training.precision
    )
    initialise(net, begin.pop("init"), seed=config.training.seed, **begin)
    return net.to(device)


def construct(n: NetworkSection, shape: Shape, precision: int) -> Any:
    """The network of a section, for the inputs and answers of a task; its weights are not yet set."""
    import torch

    from . import cells
    from .network import Network
    from .readout import SUMMARIES
    from .seq2seq import EncoderDecoder
    from .stack import Stack

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
        if n.structure is not None and kind in cells.CELLS and cells.named(kind).structure is not None:
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
    from . import cells, steps

    choose("cell", cell, cell_names())
    return (
        steps.options(cell) if cell in steps.STEPS else cells.options(RESERVOIR.cell if cell == "reservoir" else cell)
    )


@dataclass(frozen=True)
class About:
    """What there is to know of a cell."""

    equations: str
    paper: str
    options: dict[str, Any]  # with what they are if they are not given
    parameters: dict[str, tuple[int, ...]]  # their shapes
    engines: dict[str, str | None]  # why one declines, or None
    state: str  # entries of the state for each unit
    starts: list[str]  # the initialisers that can begin it


def cell_names() -> list[str]:
    """The names that `cell` takes."""
    from .cells import CELLS
    from .steps import STEPS

    return [*CELLS, *STEPS, "reservoir"]


def about(name: str, hidden: int = 8, inputs: int = 1) -> About:
    """A cell in words and sizes, taken from a network of it."""
    from .initialisers import INITIALISERS, initialise
    from .steps import STEPS
    from .sweeps import ENGINES, declined

    shape = Shape(inputs=inputs, outputs=1, readout="last", output="identity")
    net = construct(NetworkSection(cell=name, hidden=hidden), shape, 32)
    cell, parameters, starts = net.cell, visible(net), []
    for init in INITIALISERS:
        with contextlib.suppress(CoadjointError):
            initialise(net, init)
            starts.append(init)
    if cell is None:
        equations, _, paper = inspect.cleandoc(STEPS[name].__doc__ or "").rpartition("\n\n")
        state = net.step.state
    else:
        equations, paper, state = cell.equations, cell.paper, str(len(cell.slots))
    if name == "reservoir":
        equations, paper = f"{equations}\n{RESERVOIR.text}", RESERVOIR.paper
    none = "take their code from a formula, and this is a step function"
    return About(
        equations, paper, {key: value for key, value in known_options(name).items() if key in NetworkSection.model_fields},
        {key: tuple(p.shape) for key, p in parameters.items() if key not in ("V", "b_o")},
        {e: (None if e == "autograd" else none) if cell is None else declined(e, cell) for e in ENGINES}, state, starts,
    )  # fmt: skip


def panel(key: Any) -> str | None:
    """The panel of the help that a key stands in, if not that of its section."""
    return (key.json_schema_extra or {}).get("panel")


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


def gradient_of(config: Config, steps: int) -> Any:
    from . import gradients, penalties

    g = config.gradient
    name = method(g)["method"]
    if name == "penalised":
        if g.penalty is None:
            raise ConfigError(f"--method penalised needs a --penalty: {', '.join(penalties.PENALTIES)}.")
        G = penalties.penalty(g.penalty)
        G = G if g.penalty_on in (None, "each") else G.on(g.penalty_on)
        weight = weight_of(g, steps)
        if weight != 0:
            return gradients.Penalised(G, weight, g.segments, g.pretrain or 0)
        if g.pretrain:
            raise ConfigError("--pretrain minimises the penalty alone, and --weight 0 leaves nothing of it.")
        return gradients.BPTT(g.segments)
    if name == "truncated":
        if g.k1 is None:
            raise ConfigError("--method truncated needs --k1, and --k2 if losses are pulled back further.")
        return gradients.Truncated(g.k1, g.k2 or g.k1)
    return gradients.RTRL() if name == "rtrl" else gradients.BPTT(g.segments)


def weight_of(g: GradientSection, steps: int) -> Any:
    """rho, or its schedule."""
    from . import penalties

    rho, schedule = 1.0 if g.weight is None else g.weight, weight_schedule(g)
    if g.weight_target is not None and schedule != "steered":
        raise ConfigError(f"--weight-target does nothing with --weight-schedule {schedule}: it belongs to steered.")
    if schedule == "constant":
        return rho
    if schedule == "linear":
        return penalties.linear(rho, g.weight_end or 0.0, steps)
    if schedule == "steered":
        if g.weight_target is None:
            raise ConfigError("--weight-schedule steered needs --weight-target.")
        gain = {} if g.weight_gain is None else {"gain": g.weight_gain}
        return penalties.Steered(rho, g.weight_target, **gain)
    if g.weight_rate is None:
        raise ConfigError(f"--weight-schedule {schedule} needs --weight-rate.")
    if schedule == "inverse-time":
        return penalties.inverse_time(rho, g.weight_rate)
    if g.weight_rate > 1:
        raise ConfigError(
            f"--weight-schedule exponential grows without end for --weight-rate {g.weight_rate}: at most 1."
        )
    return penalties.exponential(rho, g.weight_rate)


OPTIMISER_OPTIONS = {  # key: what the optimiser calls it
    "momentum": "momentum", "betas": "betas", "weight_decay": "weight_decay", "history": "history_size", "iterations": "max_iter",
    "cg": "cg", "damping": "damping", "structural": "structural", "curvature": "curvature",
    "ridge": "ridge",
}  # fmt: skip


def pace(o: OptimiserSection) -> float | None:
    """The step size, with the default of the optimiser; None where it has none."""
    from .optimisers import PACELESS, optimiser

    return None if o.name in PACELESS else optimiser(o.name, o.lr).lr


def curriculum_of(config: Config) -> Any:
    """Which of the drawn sequences a step learns from; None if all."""
    from .curriculum import Easiest

    t = config.task
    if t.easiest is None:
        if t.easiest_by is not None:
            raise ConfigError("--easiest-by says what is easy, and does nothing without --easiest.")
        return None
    return Easiest(*t.easiest, t.easiest_by or "loss")


def optimiser_of(config: Config) -> Any:
    from . import directions, optimisers

    o = config.optimiser
    shape = {"decay": o.decay, "end": o.end, "patience": o.plateau}
    schedule = optimisers.SCHEDULES[o.schedule](warmup=o.warmup, **{k: v for k, v in shape.items() if v is not None})
    options = {own: getattr(o, key) for key, own in OPTIMISER_OPTIONS.items() if getattr(o, key) is not None}
    rule = directions.STEP_RULES[o.step_rule or "constant"](**({} if o.threshold is None else {"c": o.threshold}))
    direction = o.direction or "steepest"
    return optimisers.optimiser(o.name, o.lr, schedule, direction=direction, rule=rule, **options)


# streams

ONLINE: dict[str, tuple[str, ...]] = {  # the keys that mean something where a stream is learned, by section
    "data": ("target", "features", "kind", "id", "time", "standardise", "missing", "sep", "decimal", "thousands", "header"),
    "network": (
        "cell", "hidden", "activation", "structure", "x0", "bias", "deep", "skip", "freeze", "engine", "init", "radius", "inner", "std",
        *(key for key, field in NetworkSection.model_fields.items() if panel(field) == OPTIONS),
    ),
    "gradient": ("method", "k1", "k2"),
    "optimiser": ("name", "lr", "momentum", "betas", "weight_decay", "schedule", "decay", "end", "warmup"),
    "training": ("steps", "clip", "seed", "every", "checkpoint", "keep", "precision", "threads"),
}  # fmt: skip


ONLINE_TEXTS = {  # keys that say something else where a stream is learned
    ("data", "standardise"): "each column by the mean and variance of the rows before (default)",
    ("data", "missing"): "what to do with empty cells: refuse (default), ffill",
    ("network", "cell"): "elman (default), lstm, ...: `coadjoint cells` lists them",
    ("optimiser", "name"): "sgd, momentum, nesterov, adagrad, rmsprop, adam (default), adamw, ...",
    (
        "optimiser",
        "schedule",
    ): "how the step size changes: constant (default), exponential, inverse-time, linear, cosine",
    ("training", "steps"): "at most so many steps (to the end of the stream)",
    ("training", "every"): "steps between rows of metrics.jsonl (1,000)",
    ("training", "checkpoint"): "steps between checkpoints (10,000)",
    ("training", "keep"): "checkpoints that stay (2)",
}


@dataclass(frozen=True)
class Online:
    """What a Config means for a stream: a network, the stream, and the arguments of co.online.learn."""

    config: Config
    network: Any
    stream: Any
    arguments: dict[str, Any]

    @property
    def plain(self) -> dict[str, Any]:
        """The config as a file holds it: the keys that mean something here."""
        keys = ONLINE | {"data": ("train", *ONLINE["data"])}
        kept = {
            name: {k: v for k, v in section.items() if k in keys.get(name, ())}
            for name, section in plain(self.config).items()
        }
        return {name: section for name, section in kept.items() if section}


def streamed(config: Config, classes: list[str] | None, window: int, past: Any = None) -> Online:
    """Make the stream, the network, the learner and the optimiser; what one of them declines is declined here. past: as in
    `build`."""
    import torch

    from . import online

    for name in SECTIONS:
        allowed = (*ONLINE.get(name, ()), *(("train",) if name == "data" else ()))
        for key in sorted(getattr(config, name).model_fields_set):
            if key not in allowed:
                raise ConfigError(f"{flag(name, key)} does nothing where a stream is learned.")
    t, g, data = config.training, config.gradient, given(config.data)
    if g.method not in (None, "rtrl", "truncated"):
        raise ConfigError(f"--learner must be rtrl or truncated; got {g.method!r}.")
    if "checkpoint" not in t.model_fields_set:
        t = t.model_copy(update={"checkpoint": 10_000})  # single steps are quick
    learner = g.method or ("rtrl" if g.k1 is None and g.k2 is None else "truncated")
    if learner == "truncated" and g.k1 is None:
        raise ConfigError("--learner truncated needs --k1, and --k2 if losses are pulled back further.")
    if learner == "rtrl" and (g.k1 is not None or g.k2 is not None):
        raise ConfigError("--k1 and --k2 belong to --learner truncated: rtrl learns at every step.")
    update: dict[str, Any] = {"gradient": g.model_copy(update={"method": learner}), "training": t}
    if config.network.cell is None:
        update["network"] = config.network.model_copy(update={"cell": "elman"})
    config = config.model_copy(update=update)
    idle(config)
    unchanged(config, past)
    set_threads(t.threads, config.network.hidden)
    dtype = torch.float64 if t.precision == 64 else torch.float32
    stream = online.read(data.pop("train"), classes=classes, dtype=dtype, **data)
    belongs(config, stream, past)
    net = network_of(config, stream, "cpu")
    config = config.model_copy(
        update={
            "network": config.network.model_copy(update=start(config)),
            "training": t.model_copy(update={"threads": torch.get_num_threads()}),
        }
    )
    method, optimiser = gradient_of(config, t.steps or 1), optimiser_of(config)
    method.stream(net)
    online.chosen(optimiser, net, t.steps)
    told = Online(config, net, stream, {})
    settings = {**told.plain, "training": {k: v for k, v in told.plain["training"].items() if k not in FREE}}
    shape = {k: getattr(net, k) for k in Shape.model_fields}
    about = {"network": settings.pop("network"), "shape": shape, "precision": t.precision, "task": stream.name}
    return replace(
        told,
        arguments={
            **{k: getattr(t, k) for k in ("clip", "steps", "seed", "checkpoint", "keep")},
            "learner": method,
            "optimiser": optimiser,
            "every": t.every or 1000,
            "window": window,
            "description": {**about, "settings": settings, "classes": classes, "window": window},
        },
    )


# runs that exist


def read(folder: Path) -> Config:
    """The config a run was started with."""
    from . import files, settings

    path = folder / "config.yaml"
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a run folder{' (no such folder)' if not folder.exists() else ''}.")
    if not os.path.lexists(path):
        raise StorageError(f"{folder} holds no config.yaml: it is not a run made by `coadjoint train`.")
    return resolve(settings.load(path, files.read_regular(path, settings.BYTES)))


def outlined(n: NetworkSection, shape: Shape, precision: int) -> dict[str, Any]:
    """The tensors of the network of a section, by name: types and shapes without any memory behind them."""
    import torch

    with torch.device("meta"):
        return dict(construct(n, shape, precision).state_dict())


def within(n: NetworkSection, shape: Shape, header: Any) -> None:
    """Refuse a network of more parts or units than a file of tensors has tensors or numbers: it need not be laid out."""
    deep = n.deep if isinstance(n.deep, list) else [n.deep]
    sizes = (n.hidden, n.layers, n.depth, n.width, n.attention_steps, n.embedding, *deep, shape.inputs, shape.outputs)
    parts = max(len(names_of(n)), len(deep) if n.deep else 0)
    if max(size or 1 for size in sizes) > header.numbers or parts > len(header.tensors):
        raise ConfigError("it is larger than the file")


def load_model(path: Path, warn: Callable[[str], None] = warnings.warn) -> tuple[Any, dict[str, Any]]:
    """The network of a model.safetensors file, and its description. The file is a stranger's: nothing in it is run, and no
    memory is taken before its header was compared with the network that it describes. `warn` hears of a model that carries
    no SHA-256 sum."""
    from . import files, runs, schemas
    from .training import compare_tensors, fit

    runs.safetensors()
    path = Path(path)
    header = schemas.read_header(path)
    description = schemas.described(path, header)
    n = NetworkSection.model_validate(description["network"])
    shape = Shape.model_validate(description["shape"])
    try:
        within(n, shape, header)
        outline = outlined(n, shape, description["precision"])
    except (CoadjointError, RuntimeError, MemoryError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise StorageError(f"{path}: the network it describes cannot be built: {words[:200]}.") from None
    compare_tensors(outline, header.outline, str(path))
    if description.get("sha256") is None:
        warn(f"{path} carries no SHA-256 sum, as models before 0.6.1 do not: a flipped bit in it would not be noticed.")
    content = files.read_regular(path, header.size)
    if description.get("sha256") is not None and not runs.unbroken(io.BytesIO(content), description["sha256"]):
        raise StorageError(
            f"{path} is damaged: its bytes do not have the SHA-256 sum that it carries. {schemas.Model.advice}"
        )
    net = construct(n, shape, description["precision"])
    fit(net, runs.unpack(content, path), str(path))
    return net.eval(), description


def predict(
    run: Path, data: Path, out: Path, warn: Callable[[str], None] = warnings.warn, **reading: Any
) -> tuple[int, tuple[str, ...]]:
    """Predictions of a trained run for the sequences of a file; how many, and what there is to say of them."""
    import torch

    from .tasks.data import Data

    path = run / "model.safetensors" if run.is_dir() else run.resolve()  # a link that was named is followed
    if not run.exists():
        raise StorageError(f"{run} does not exist. Name a run folder, or a model.safetensors.")
    if not os.path.lexists(path):
        config = run / "config.yaml"
        raise StorageError(
            f"{run} has not finished: there is no model yet. Go on with: coadjoint resume {shlex.quote(str(run))}"
            if config.exists()
            else f"{run} is not a run folder: it holds no model.safetensors."
        )
    net, description = load_model(path, warn)
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
