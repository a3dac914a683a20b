"""Config: every choice of a run as one typed value.

The sections hold all settings: the command line takes its flags from them, a file its keys. No two
sections share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked
up in the library's tables.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field, NonNegativeInt

from ..training.network_section import (
    NetworkSection,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    UnitFloat,
)
from .task_section import TaskSection


class DataSection(Section):
    """Your own data."""

    train: str | None = Field(
        None,
        description="training data: .csv, .csv.gz, .csv.zst, .parquet, .arrow, .npz, .npy or .ts; "
        "a text as .txt with --kind next; a folder name.co by coadjoint prepare; for a --chain "
        "also a folder of images",
    )
    valid: str | None = Field(
        None,
        description="validation data, a file or a prepared folder; split off from the training "
        "data by default",
    )
    test: str | None = Field(
        None,
        description="test data, a file or a prepared folder; split off from the training data if "
        "--valid is not given either",
    )
    split: tuple[UnitFloat, UnitFloat, UnitFloat] | tuple[UnitFloat, UnitFloat] | None = Field(
        None,
        description="train,valid,test: share of the training data for each (0.8,0.1,0.1 by "
        "default); beside --test: train,valid (0.8,0.2)",
    )
    kind: Literal["classify", "regress", "next", "reconstruct"] | None = Field(
        None,
        description="predict a label, a number, the next time step, or (without time) the inputs",
    )
    at: Literal["last", "every"] | None = Field(
        None, description="one target per sequence, or one per time step"
    )
    id: str | None = Field(None, description="column that identifies the sequence")
    time: str | None = Field(None, description="column that orders the time steps of a sequence")
    target: str | list[str] | None = Field(None, description="column(s) to predict: a,b,c")
    features: str | list[str] | None = Field(
        None, description="input columns: a,b,c (default: all other columns)"
    )
    text: bool | None = Field(
        None,
        description="--kind next: the file is a text, whose next character is predicted (default "
        "for a .txt that holds no table)",
    )
    wide: bool | None = Field(
        None,
        description="the table has one row per sequence; its columns are the time steps of one "
        "feature",
    )
    window: PositiveInt | None = Field(
        None, description="cut sequences into windows of this many time steps"
    )
    stride: PositiveInt | None = Field(None, description="steps between training windows")
    horizon: PositiveInt | None = Field(None, description="--kind next: time steps to forecast")
    strategy: Literal["recursive", "direct"] | None = Field(
        None, description="feed one step back, or learn --horizon steps at once (default)"
    )
    known: str | list[str] | None = Field(None, description="--kind next: columns known in advance")
    lags: NonNegativeInt | list[NonNegativeInt] | None = Field(
        None, description="--kind next: earlier rows to read beside each: 1,11,12; 0 for none"
    )
    quantiles: UnitFloat | list[UnitFloat] | None = Field(
        None, description="--kind next: learn quantiles at these levels: 0.1,0.5,0.9"
    )
    standardise: bool | None = Field(
        None, description="scale inputs to mean 0 and variance 1 on the training set (default)"
    )
    missing: Literal["refuse", "drop", "ffill", "mask"] | None = Field(
        None, description="how to handle missing values"
    )
    irregular: Literal["refuse", "allow"] | None = Field(
        None, description="how to handle uneven time steps"
    )
    categorical: str | list[str] | None = Field(
        None,
        description="input columns that hold words: a,b,c, or auto for all that do; each word "
        "becomes an input",
    )
    gaps: bool | None = Field(
        None,
        description="make the time since the row before an input (allows uneven time steps)",
    )
    dates: Literal["day-first", "month-first"] | None = Field(
        None, description="how to read dates such as 01/02/2024, if the column does not tell"
    )
    overlap: Literal["refuse", "allow"] | None = Field(
        None, description="how to handle sequences that appear in more than one file"
    )
    metrics: str | list[str] | None = Field(
        None,
        description="metrics to report besides the default ones: auc,log-loss for classes, mape "
        "for numbers",
    )
    class_weight: str | None = Field(
        None,
        description="weights of the classes in the loss of training: balanced, or a=2,b=1",
    )
    sep: str | None = Field(None, description="column separator of a text table")
    decimal: str | None = Field(None, description="decimal separator of a text table")
    thousands: str | None = Field(None, description="thousands separator of a text table")
    header: bool | None = Field(
        None, description="the first row of a text table holds the column names (default)"
    )
    max_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = Field(
        None, description="largest size of a file in bytes, unpacked (default 4 GiB)"
    )


# How a file is read, which may differ between the training file and one to predict from.
READING_KEYS = (
    "id",
    "time",
    "missing",
    "irregular",
    "sep",
    "decimal",
    "thousands",
    "header",
    "dates",
    "max_bytes",
)


class GradientSection(Section):
    """The gradient method."""

    method: Literal["bptt", "penalised", "truncated", "rtrl"] | None = Field(
        None,
        description="how to compute gradients; default bptt, or penalised if --penalty is given",
    )
    penalty: str | None = Field(
        None, description="penalty on the costates: log-ratio, variance, omega, ..."
    )
    penalty_on: Literal["each", "top", "whole"] | None = Field(
        None,
        description="stacks: average the penalty over the layers (default), take the top layer, "
        "or treat all layers as one state",
    )
    penalty_part: str | list[str] | None = Field(
        None,
        description="parts of the state whose costates are penalised: h for dL/dh alone of an "
        "lstm; `coadjoint cells` lists the slots (default: all)",
    )
    penalty_per: Literal["sqrt-n"] | None = Field(
        None,
        description="root mean squares of costates in place of norms, for layers whose widths "
        "differ",
    )
    tangent: Literal["random", "shifts"] | None = Field(
        None,
        description="tangent: directions of the input, random signs (default) or shifts of images",
    )
    tangent_directions: PositiveInt | None = Field(
        None, description="tangent: random directions drawn at each training step (default 1)"
    )
    weight: NonNegativeFloat | None = Field(
        None, description="weight rho of the penalty (default 1); 0 is plain backpropagation"
    )
    weight_schedule: (
        Literal["constant", "inverse-time", "exponential", "linear", "pretrain", "steered"] | None
    ) = Field(
        None,
        description="how the weight changes during training; pretrain: 0 after --pretrain; "
        "steered if --weight-target is given",
    )
    weight_rate: PositiveFloat | None = Field(
        None, description="inverse-time: weight/(1 + rate step); exponential: weight rate^step"
    )
    weight_end: NonNegativeFloat | None = Field(
        None, description="linear: weight after the last training step (default 0)"
    )
    weight_target: PositiveFloat | None = Field(
        None,
        description=(
            "steered: adjust the weight until the costates decay by this |log| per time step or "
            "layer"
        ),
    )
    weight_gain: PositiveFloat | None = Field(
        None,
        description=(
            "steered: largest relative change of the weight per training step (default 0.01)"
        ),
    )
    pretrain: PositiveInt | None = Field(
        None,
        description=("penalised: minimise only the penalty for this many training steps first"),
    )
    pretrain_lr: PositiveFloat | None = Field(
        None, description="step size during --pretrain (default: --lr)"
    )
    hold: Literal["source"] | None = Field(
        None,
        description="penalised: the penalty's gradient takes this part of the costates for a "
        "constant; source: the loss's own derivative by the states that the readout reads",
    )
    k1: PositiveInt | None = Field(None, description="truncated: time steps between gradients")
    k2: PositiveInt | None = Field(
        None, description=("truncated: time steps to backpropagate each loss")
    )
    segments: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="bptt, penalised: compute in this many segments (auto: about sqrt(T)), for "
        "the same gradient in less memory",
    )


class OptimiserSection(Section):
    """The optimiser and its step size."""

    name: str = Field(
        "adam",
        description="sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, lbfgs, "
        "hessian-free, ridge, ...",
    )
    lr: Annotated[float, Field(gt=0, le=1e38)] | None = Field(
        None, description="step size (default 1e-3; lbfgs: 1)"
    )
    direction: Literal["steepest", "temporal", "layerwise"] | None = Field(
        None,
        description="step along the gradient (default), or a random mix of its components by time "
        "step or, for a chain, by layer: temporal and layerwise are one direction",
    )
    step_rule: Literal["constant", "galvan", "armijo", "wolfe"] | None = Field(
        None, description="take the full step (default), or let a rule or line search shorten it"
    )
    threshold: PositiveFloat | None = Field(
        None, description="galvan: rescale longer directions to norm 1 (default 1)"
    )
    momentum: UnitFloat | None = Field(
        None, description="coefficient of momentum, nesterov and rmsprop"
    )
    betas: tuple[UnitFloat, UnitFloat] | None = Field(
        None, description="beta1,beta2 of adam and its variants"
    )
    weight_decay: NonNegativeFloat | None = Field(
        None, description="L2 regularisation (adamw: decoupled)"
    )
    history: PositiveInt | None = Field(
        None, description="lbfgs: number of past steps to keep (default 10)"
    )
    iterations: PositiveInt | None = Field(
        None, description="lbfgs: inner iterations per step (default 20)"
    )
    cg: PositiveInt | None = Field(
        None, description="hessian-free: maximum number of conjugate gradient iterations per step"
    )
    damping: PositiveFloat | None = Field(None, description="hessian-free: initial damping")
    structural: NonNegativeFloat | None = Field(
        None, description="hessian-free: weight of structural damping (changes of the states)"
    )
    curvature: PositiveInt | None = Field(
        None, description="hessian-free: sequences per batch for the curvature (default: all)"
    )
    ridge: NonNegativeFloat | None = Field(
        None, description="ridge: weight of |V|^2 against the sum of squared errors (default 1e-6)"
    )
    schedule: Literal["constant", "exponential", "inverse-time", "linear", "cosine", "plateau"] = (
        Field("constant", description="how the step size changes during training")
    )
    decay: PositiveFloat | None = Field(
        None,
        description="exponential: factor per step; inverse-time: lr/(1 + decay step); "
        "plateau: factor per plateau",
    )
    end: UnitFloat | None = Field(
        None, description="linear, cosine: final step size as a fraction of --lr"
    )
    plateau: PositiveInt | None = Field(
        None,
        description="plateau: lower the step size after this many validations without improvement",
    )
    warmup: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="number of training steps over which the step size grows to --lr"
    )


class TrainingSection(Section):
    """The run."""

    steps: PositiveInt | None = Field(
        None,
        description="maximum number of training steps (default 10,000; your own data: 200 epochs "
        "within 800 to 2,000 steps (300 to 2,000 with --lags), for one answer per sequence 600 "
        "epochs within 2,000 to 6,000; at least 10 epochs)",
    )
    epochs: PositiveInt | None = Field(
        None, description="finite data: passes over the training set, instead of --steps"
    )
    batch: PositiveInt | None = Field(
        None, description="sequences per batch (default 32; your own data: by its size, from 16)"
    )
    accumulate: PositiveInt = Field(1, description="batches averaged per training step")
    reduce: Literal["mean", "sum"] | None = Field(
        None,
        description="a target at every time step: the loss of a sequence is the mean or the sum "
        "over its steps (default: mean; music: sum)",
    )
    clip: PositiveFloat | None = Field(None, description="clip the gradient to this norm")
    clip_value: PositiveFloat | None = Field(
        None, description="clip each entry of the gradient to this size"
    )
    clip_mean: PositiveFloat | None = Field(
        None, description="clip the norm to this multiple of its running mean"
    )
    weight_noise: NonNegativeFloat | None = Field(
        None,
        description="standard deviation of noise added to the weights for each gradient "
        "(default 0)",
    )
    gradients: PositiveInt | None = Field(
        None,
        description=(
            "budget in single-sequence gradients (two sweeps each; other work counts by its sweeps)"
        ),
    )
    seconds: PositiveFloat | None = Field(
        None, description="budget in seconds; the run ends once every given budget is spent"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="random seed")
    every: PositiveInt | None = Field(
        None,
        description="training steps between validations (default 100; finite data: one epoch; "
        "your own data without --steps, --epochs and budgets: whole epochs, about 40 validations "
        "in all)",
    )
    tests: PositiveInt | None = Field(
        None,
        description=("fresh sequences per validation (default 1,000); finite data: all sequences"),
    )
    confirm: PositiveInt | None = Field(
        None, description="fresh sequences that must confirm a success (default 10,000)"
    )
    probes: PositiveInt = Field(32, description="sequences whose costates each validation records")
    patience: PositiveInt | None = Field(
        None, description="stop after this many validations without improvement"
    )
    select: str | None = Field(
        None,
        description="held-out metric that chooses the best weights and that --patience waits for: "
        "loss, or a metric of the task (default: accuracy, mse, ...)",
    )
    stop_on_success: bool = Field(True, description="stop once the task's goal is reached")
    nonfinite: Literal["stop", "skip", "dump"] = Field(
        "stop",
        description="if a loss or gradient is not finite: stop, skip the step, or also "
        "save a replay",
    )
    checkpoint: PositiveInt = Field(1000, description="training steps between checkpoints")
    keep: Annotated[int, Field(ge=2, lt=2**31)] = Field(
        2, description="checkpoints to keep besides the best"
    )
    device: Literal["cpu", "cuda", "auto"] = Field("cpu", description="device to run on")
    precision: Literal[32, 64] = Field(32, description="bits per floating-point number")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="CPU threads (default: 1 up to 256 units, beyond that torch's choice)"
    )
    shards: PositiveInt | None = Field(None, description="parts of a batch that processes share")
    logger: str | list[str] | None = Field(None, description="also log to tensorboard,mlflow,wandb")
    tensorboard: bool = Field(False, description="the same as --logger tensorboard")
    test_set: bool | None = Field(
        None, description="finite data: score the test set at the end (default), or leave it alone"
    )


class Config(Section):
    """All settings of a run, by section."""

    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    network: NetworkSection = NetworkSection()
    gradient: GradientSection = GradientSection()
    optimiser: OptimiserSection = OptimiserSection()
    training: TrainingSection = TrainingSection()


def find_sections() -> dict[str, type[Section]]:
    """{name of a section: its class}."""
    sections = {}
    for name, field in Config.model_fields.items():
        sections[name] = cast(type[Section], field.annotation)
    return sections


def sections_by_key() -> dict[str, str]:
    """{key: name of its section}. "name" is left out: [task] and [optimiser] both have it."""
    section_of = {}
    for name, section in SECTIONS.items():
        for key in section.model_fields:
            if key != "name":
                section_of[key] = name
    return section_of


SECTIONS = find_sections()
SECTION_OF = sections_by_key()

# What other libraries call a key.
NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "hidden_size": "hidden",
    "units": "hidden",
    "batch_size": "batch",
    "max_steps": "steps",
    "max_epochs": "epochs",
    "spectral_radius": "radius",
    "clip_norm": "clip",
    "random_state": "seed",
    "dtype": "precision",
}
