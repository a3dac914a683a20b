"""Plans: the settings of a run, checked once, when a plan is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..errors import (
    InputError,
    KindError,
    brief,
    check_kind,
    check_path,
    check_seed,
    choose,
    real,
    whole_number,
)
from ..gradients.bptt import BPTT
from ..gradients.method import Method
from ..gradients.processes import process_count
from ..gradients.rtrl import RTRL
from ..gradients.shared import Shared
from ..gradients.truncated import Truncated
from ..objectives.losses import LossLike
from ..optimisers.hessian_free import HessianFree
from ..optimisers.recipes import SELF_DIRECTED, WITHOUT_STEP_SIZE, Optimiser, adam, recipe_of
from .curriculum import Easiest
from .display import Display, accept_old_display
from .json_types import JsonObject, Row
from .looks import Looks

NONFINITE_POLICIES = ("stop", "skip", "dump")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings that `train` and `online.learn` share."""

    # the settings that must be whole numbers, at least 1
    counts: ClassVar[tuple[str, ...]] = ("batch", "every", "checkpoint", "keep")

    optimiser: Optimiser | HessianFree | None = None
    clip: float | None = None
    batch: int
    seed: int = 0
    every: int
    folder: str | os.PathLike[str] | None = None
    checkpoint: int
    keep: int = 2
    display: Display | bool = False
    description: JsonObject | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        """Check the settings; counts become ints, and a display of the old kind is adapted."""
        for name in self.counts:
            self._set(name, whole_number(name, getattr(self, name)))
        self._check_positive("clip")
        check_seed(self.seed)
        if self.folder is not None:
            check_path("folder", self.folder)
        self._set("display", accept_old_display(self.display))
        methods = ("step", "validation", "say", "close")
        is_display = all(callable(getattr(self.display, name, None)) for name in methods)
        if not isinstance(self.display, bool) and not is_display:
            raise KindError(
                "display must be True, False or an object with step, validation, say and close; "
                f"got {brief(self.display)}."
            )
        check_kind("description", self.description, (dict, type(None)), "a dict")
        check_kind("command", self.command, (str, type(None)), "a string")

    @property
    def sharing(self) -> JsonObject:
        """The numbers of processes and shards, if the run is shared at all."""
        return {}

    def _set(self, name: str, value: object) -> None:
        """Change a setting, which a frozen dataclass allows only like this."""
        object.__setattr__(self, name, value)

    def _check_positive(self, *names: str) -> None:
        """Refuse a setting among these that is neither None nor a number above 0."""
        for name in names:
            value = getattr(self, name)
            if value is not None:
                real(name, value, 0, above=True)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Plan):
    """The settings of `train`; its docstring explains them."""

    counts: ClassVar[tuple[str, ...]] = (
        *Plan.counts,
        "steps",
        "accumulate",
        "tests",
        "confirm",
        "probes",
    )

    gradient: Method | None = None
    steps: int = 10_000
    batch: int = 32
    accumulate: int = 1
    clip_value: float | None = None
    clip_mean: float | None = None
    weight_noise: float = 0.0
    easiest: Easiest | None = None
    gradients: int | None = None
    seconds: float | None = None
    every: int = 100
    tests: int = 1000
    confirm: int = 10_000
    probes: int = 32
    patience: int | None = None
    select: str | None = None
    stop_on_success: bool = True
    nonfinite: str = "stop"
    checkpoint: int = 1000
    loggers: Sequence[Callable[[Row], None]] = ()
    shards: int | None = None
    method: Method = field(init=False)  # `gradient`, or its default; shared if there are shards
    recipe: Optimiser = field(init=False)  # `optimiser`, or its default

    def __post_init__(self) -> None:
        """Check the settings, and fill in `method` and `recipe`."""
        super().__post_init__()
        if self.patience is not None:
            whole_number("patience", self.patience)
        check_kind("select", self.select, (str, type(None)), "the name of a metric")
        self._check_positive("clip_value", "clip_mean", "gradients", "seconds")
        real("weight_noise", self.weight_noise, 0)
        choose("nonfinite policy", self.nonfinite, NONFINITE_POLICIES)
        if not isinstance(self.loggers, Sequence) or not all(callable(log) for log in self.loggers):
            raise KindError(
                f"loggers must be a list of functions of a row; got {brief(self.loggers)}."
            )
        for name, kind, example in (
            ("gradient", Method, "co.BPTT()"),
            ("optimiser", Optimiser | HessianFree, "co.optimisers.adam(1e-3)"),
            ("easiest", Easiest, "co.training.curriculum.Easiest(0.5, 1000)"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise KindError(f"{name} must be like {example}; got {brief(value)}.")
        method = self.gradient or BPTT()
        if self.shards is not None:
            self._set("shards", whole_number("shards", self.shards))
        if self.shards is not None and (self.shards > 1 or isinstance(method, Shared)):
            method = Shared(method, self.shards)  # refuses one that is shared already
        self._set("method", method)
        self._set("recipe", recipe_of(self.optimiser or adam(1e-3)))
        self._check_recipe()
        if isinstance(method, Shared):
            self._check_sharing()

    @property
    def shard_count(self) -> int | None:
        """The number of shards, 1 if nothing is shared; None if it is that of the processes."""
        return self.method.shards if isinstance(self.method, Shared) else 1

    @property
    def sharing(self) -> JsonObject:
        """The numbers of processes and shards, if the run is shared at all."""
        if not isinstance(self.method, Shared):
            return {}
        processes = process_count()
        return {"processes": processes, "shards": self.method.shards or processes}

    def _check_sharing(self) -> None:
        """Refuse what needs the samples of a step in one process."""
        recipe = self.recipe
        if recipe.name in WITHOUT_STEP_SIZE:
            raise InputError(
                f"optimiser '{recipe.name}' needs all samples of a step in one process, so it "
                "takes no shards: train with one process, or use another optimiser."
            )
        if recipe.direction != "steepest":
            raise InputError(
                f"direction '{recipe.direction}' needs the costates of all samples in one process, "
                "so it takes no shards: train with one process, or use direction 'steepest'."
            )

    @property
    def looks(self) -> Looks:
        """How looks at held-out data save memory: in segments if gradients are computed in them."""
        return Looks(self.method.segments, self.batch)

    def _check_recipe(self) -> None:
        """Refuse settings that have no effect with this optimiser, or make no sense with it."""
        name = self.recipe.name
        if name in SELF_DIRECTED and (self.clip or self.clip_value or self.clip_mean):
            raise InputError(
                f"optimiser '{name}' chooses its own step, so clipping has no effect: "
                "leave out clip, clip_value and clip_mean."
            )
        # Their steps depend on more than the gradient, and the rest is computed without noise.
        if name in WITHOUT_STEP_SIZE and self.weight_noise:
            raise InputError(
                f"optimiser '{name}' does not support noise on the weights: leave out weight_noise."
            )
        if self.recipe.direction != "steepest" and isinstance(self.method, Truncated):
            raise InputError(
                "the temporal direction needs the complete gradient: use BPTT, not Truncated."
            )


@dataclass(frozen=True, kw_only=True)
class LearningPlan(Plan):
    """The settings of `online.learn`; its docstring explains them."""

    counts: ClassVar[tuple[str, ...]] = (*Plan.counts, "window")

    loss: LossLike | None = None
    learner: RTRL | Truncated | None = None
    held: bool = False
    steps: int | None = None
    batch: int = 1
    every: int = 1000
    window: int = 1000
    score: Callable[[Tensor], dict[str, float]] | None = None
    checkpoint: int = 10_000
    method: RTRL | Truncated = field(init=False)  # `learner`, or its default

    def __post_init__(self) -> None:
        """Check the settings, and fill in `method`."""
        super().__post_init__()
        if self.steps is not None:
            self._set("steps", whole_number("steps", self.steps))
        if self.score is not None and not callable(self.score):
            raise KindError(f"score must be a function of a_t; got {brief(self.score)}.")
        method = RTRL() if self.learner is None else self.learner
        if not isinstance(method, RTRL | Truncated):
            raise InputError(
                f"learner must be RTRL() or Truncated(k1, k2); got {type(method).__name__}."
            )
        self._set("method", method)
