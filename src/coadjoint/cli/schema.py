"""Config: every choice of a run as one typed value.

The sections are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections share a
key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field

from ..training.network_section import (
    NetworkSection,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveUnitFloat,
    Section,
    UnitFloat,
)


class TaskSection(Section):
    """A built-in task."""

    name: str | None = Field(None, description="a built-in task; `coadjoint tasks` lists them")
    length: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="steps of a sequence, or low,high"
    )
    ragged: bool | None = Field(
        None, description="each sequence of a batch has a length of its own"
    )
    curriculum: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="start,steps: the length grows from start over so many steps"
    )
    easiest: tuple[PositiveUnitFloat, PositiveInt] | None = Field(
        None,
        description="start,steps: learn from the easiest share of what is drawn, from start to all over so many steps",
    )
    easiest_by: Literal["loss", "length"] | None = Field(
        None,
        description="what is easy: a small loss under the present weights (default), or few steps",
    )
    rule: Literal["loose", "strict"] | None = Field(
        None, description="addition, multiplication; errors below 0.2 or 0.04 are right"
    )
    pixels: Literal[1, 8] | None = Field(None, description="digits; pixels read at a time")
    permuted: bool | None = Field(None, description="digits: pixels in a fixed random order")
    path: str | None = Field(None, description="music: the MATLAB file")
    values: PositiveInt | None = Field(
        None, description="copy, reversal, sorting: letters of the alphabet"
    )
    positions: PositiveInt | None = Field(None, description="copy: letters to repeat")
    chunk: PositiveInt | None = Field(
        None, description="music: cut training pieces into parts of so many steps"
    )


class DataSection(Section):
    """Your own data."""

    train: str | None = Field(None, description="a .csv, .parquet, .npz, .npy or .ts file")
    valid: str | None = Field(
        None, description="a file of validation sequences; otherwise they are split off"
    )
    test: str | None = Field(
        None, description="a file of test sequences; otherwise they are split off"
    )
    split: tuple[UnitFloat, UnitFloat, UnitFloat] | None = Field(
        None, description="shares of sequences for train,valid,test"
    )
    kind: Literal["classify", "regress", "next"] | None = Field(None, description="what to predict")
    at: Literal["last", "every"] | None = Field(
        None, description="one target for a sequence, or one for each step"
    )
    id: str | None = Field(None, description="the column that names a sequence")
    time: str | None = Field(None, description="the column that orders its steps")
    target: str | list[str] | None = Field(None, description="the column(s) to predict, a,b,c")
    features: str | list[str] | None = Field(
        None, description="the columns to read, a,b,c; all others by default"
    )
    window: PositiveInt | None = Field(
        None, description="cut sequences into pieces of so many steps"
    )
    standardise: bool | None = Field(
        None, description="inputs to mean 0 and variance 1 on the training set (default)"
    )
    missing: Literal["refuse", "drop", "ffill", "mask"] | None = Field(
        None, description="what to do with empty cells"
    )
    irregular: Literal["refuse", "allow"] | None = Field(
        None, description="steps of different duration"
    )
    overlap: Literal["refuse", "allow"] | None = Field(
        None, description="sequences that stand in two files"
    )
    sep: str | None = Field(None, description="separator of a text table")
    decimal: str | None = Field(None, description="decimal sign of a text table")
    thousands: str | None = Field(None, description="thousands sign of a text table")
    header: bool | None = Field(
        None, description="whether a text table begins with names (default)"
    )


class GradientSection(Section):
    """The gradient method."""

    method: Literal["bptt", "penalised", "truncated", "rtrl"] | None = Field(
        None, description="penalised by default if --penalty is given, bptt otherwise"
    )
    penalty: str | None = Field(
        None, description="log-ratio, variance, omega, ...: a function of the costates"
    )
    penalty_on: Literal["each", "top", "whole"] | None = Field(
        None,
        description="several layers: the mean over each (default), the last, or the states of all as one",
    )
    weight: NonNegativeFloat | None = Field(
        None, description="rho, the penalty's weight (1); 0 is plain backpropagation"
    )
    weight_schedule: (
        Literal["constant", "inverse-time", "exponential", "linear", "steered"] | None
    ) = Field(
        None,
        description="how the weight changes with the step; steered if --weight-target is given",
    )
    weight_rate: PositiveFloat | None = Field(
        None, description="inverse-time: weight/(1 + rate step); exponential: weight rate^step"
    )
    weight_end: NonNegativeFloat | None = Field(
        None, description="linear: the weight after the last step (0)"
    )
    weight_target: PositiveFloat | None = Field(
        None,
        description="steered: the |log-decay| of costates per step that the weight is turned up or down for",
    )
    weight_gain: PositiveFloat | None = Field(
        None, description="steered: by how much at most a step turns it (0.01)"
    )
    pretrain: PositiveInt | None = Field(
        None, description="penalised: minimise the penalty alone for so many steps first"
    )
    k1: PositiveInt | None = Field(None, description="truncated: steps between gradients")
    k2: PositiveInt | None = Field(None, description="truncated: steps that losses are pulled back")
    segments: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="bptt, penalised: sweep in so many segments, auto for about sqrt(T): less memory, same gradient",
    )


class OptimiserSection(Section):
    """The optimiser and its step size."""

    name: str = Field(
        "adam",
        description="sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, lbfgs, hessian-free, ridge, ...",
    )
    lr: Annotated[float, Field(gt=0, le=1e38)] | None = Field(
        None, description="step size (1e-3; lbfgs: 1)"
    )
    direction: Literal["steepest", "temporal"] | None = Field(
        None, description="the gradient (default), or its temporal components mixed at random"
    )
    step_rule: Literal["constant", "galvan", "armijo", "wolfe"] | None = Field(
        None,
        description="how much of a move is taken: all of it (default), or what a rule or line search says",
    )
    threshold: PositiveFloat | None = Field(
        None, description="galvan: directions longer than this are brought to norm 1 (1)"
    )
    momentum: UnitFloat | None = Field(None, description="momentum, nesterov, rmsprop")
    betas: tuple[UnitFloat, UnitFloat] | None = Field(None, description="adam and its kin")
    weight_decay: NonNegativeFloat | None = Field(None, description="L2 term (adamw: decoupled)")
    history: PositiveInt | None = Field(None, description="lbfgs: steps that it remembers (10)")
    iterations: PositiveInt | None = Field(None, description="lbfgs: of its own within a step (20)")
    cg: PositiveInt | None = Field(
        None, description="hessian-free: conjugate gradient iterations of a step, at most"
    )
    damping: PositiveFloat | None = Field(None, description="hessian-free: to begin with")
    structural: NonNegativeFloat | None = Field(
        None, description="hessian-free: how much a change of the states counts"
    )
    curvature: PositiveInt | None = Field(
        None, description="hessian-free: so many of the batch for the curvature (all)"
    )
    ridge: NonNegativeFloat | None = Field(
        None, description="ridge: the weight of |V|^2 beside the sum of squared errors (1e-6)"
    )
    schedule: Literal["constant", "exponential", "inverse-time", "linear", "cosine", "plateau"] = (
        Field("constant", description="how the step size changes")
    )
    decay: PositiveFloat | None = Field(
        None,
        description="exponential: factor for each step; inverse-time: lr/(1 + decay step); plateau: for each plateau",
    )
    end: UnitFloat | None = Field(
        None, description="linear, cosine: the last step size, as a share of lr"
    )
    plateau: PositiveInt | None = Field(
        None, description="plateau: looks without a better loss before the step size falls"
    )
    warmup: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="steps over which the step size grows to lr"
    )


class TrainingSection(Section):
    """The run."""

    steps: PositiveInt | None = Field(None, description="at most so many steps (10,000)")
    epochs: PositiveInt | None = Field(
        None, description="at most so many passes over a finite set, instead of --steps"
    )
    batch: PositiveInt = Field(32, description="sequences of a step")
    accumulate: PositiveInt = Field(1, description="batches averaged in a step")
    clip: PositiveFloat | None = Field(None, description="largest norm of a gradient")
    clip_value: PositiveFloat | None = Field(None, description="largest entry of a gradient")
    clip_mean: PositiveFloat | None = Field(
        None, description="largest norm, as a multiple of the running mean of norms"
    )
    weight_noise: NonNegativeFloat | None = Field(
        None,
        description="standard deviation of noise on the weights while a gradient is computed (0)",
    )
    gradients: PositiveInt | None = Field(
        None,
        description="budget: gradients of a sequence, of two sweeps; other work counts by its sweeps",
    )
    seconds: PositiveFloat | None = Field(
        None, description="budget; a run ends when all that are given are spent"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="everything random follows from it"
    )
    every: PositiveInt | None = Field(
        None, description="steps between looks at held-out sequences (100; finite sets: an epoch)"
    )
    tests: PositiveInt | None = Field(
        None, description="fresh sequences of a look (1,000); finite sets: all they have"
    )
    confirm: PositiveInt | None = Field(
        None, description="fresh sequences that confirm a success (10,000)"
    )
    probes: PositiveInt = Field(32, description="sequences whose costates are looked at")
    patience: PositiveInt | None = Field(
        None, description="stop after so many looks without a better one"
    )
    stop_on_success: bool = Field(True, description="stop when the task's goal is met")
    nonfinite: Literal["stop", "skip", "dump"] = Field(
        "stop", description="what to do with a step that is not finite"
    )
    checkpoint: PositiveInt = Field(1000, description="steps between checkpoints")
    keep: Annotated[int, Field(ge=2, lt=2**31)] = Field(
        2, description="checkpoints that stay, beside the best"
    )
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
SECTION_OF = {
    key: name for name, section in SECTIONS.items() for key in section.model_fields if key != "name"
}

NAMES_ELSEWHERE = {  # what other libraries call a key
    "learning_rate": "lr", "hidden_size": "hidden", "units": "hidden", "batch_size": "batch", "max_steps": "steps",
    "max_epochs": "epochs", "spectral_radius": "radius", "clip_norm": "clip", "random_state": "seed", "dtype": "precision",
}  # fmt: skip
