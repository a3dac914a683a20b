"""Optimisers by plain options: the schedule and the step rule by name, too.

    optimisers.make("adam", lr=3e-4, schedule="cosine", warmup=100)
    optimisers.make("sgd", lr=1e-2, direction="temporal", step_rule="galvan", threshold=1.0)
    optimisers.make("hessian-free", cg=50, structural=0.1)

Every keyword has the name of the key in a settings file and of the flag. `optimiser` takes objects
in their place, and the options under torch's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AppliesTable, OptionError, choose, idle_options, refuse_options
from .recipes import OPTIMISERS, SELF_DIRECTED, WITHOUT_STEP_SIZE, Optimiser, optimiser
from .schedules import SCHEDULES, pretraining
from .step_rules import STEP_RULES

OPTIONS = {  # options that only some optimisers have, and their names there
    "momentum": "momentum",
    "betas": "betas",
    "weight_decay": "weight_decay",
    "history": "history_size",
    "iterations": "max_iter",
    "cg": "cg",
    "damping": "damping",
    "structural": "structural",
    "curvature": "curvature",
    "ridge": "ridge",
}


def _optimisers_taking(option: str) -> tuple[str, ...]:
    """The names of the optimisers that have an option, under the name it has there."""
    return tuple(name for name, recipe in OPTIMISERS.items() if option in recipe.options)


def _optimisers_except(without: tuple[str, ...]) -> tuple[str, ...]:
    """The names of all optimisers but these."""
    return tuple(name for name in OPTIMISERS if name not in without)


# Options that have an effect only with some values of another option: option -> (other, values).
APPLIES: AppliesTable = {
    "threshold": ("step_rule", ("galvan",)),
    "decay": ("schedule", ("exponential", "inverse-time", "plateau")),
    "end": ("schedule", ("linear", "cosine")),
    "plateau": ("schedule", ("plateau",)),
    **{key: ("optimiser", _optimisers_taking(option)) for key, option in OPTIONS.items()},
    "direction": ("optimiser", _optimisers_except(SELF_DIRECTED)),
    "step_rule": ("optimiser", _optimisers_except(SELF_DIRECTED)),
    "lr": ("optimiser", _optimisers_except(WITHOUT_STEP_SIZE)),
    "pretrain_lr": ("optimiser", _optimisers_except(WITHOUT_STEP_SIZE)),
}


@dataclass(frozen=True)
class Clash:
    """Optimisers that ignore an option of something else, or cannot be combined with it."""

    option: str
    optimisers: tuple[str, ...]
    words: str  # the complaint; {optimiser} and {value} are filled in


CLASHES = (
    Clash(
        "clip",
        SELF_DIRECTED,
        "$clip does nothing with $optimiser {optimiser}: it chooses its own step.",
    ),
    Clash(
        "clip_value",
        SELF_DIRECTED,
        "$clip_value does nothing with $optimiser {optimiser}: it chooses its own step.",
    ),
    Clash(
        "clip_mean",
        SELF_DIRECTED,
        "$clip_mean does nothing with $optimiser {optimiser}: it chooses its own step.",
    ),
    Clash(
        "weight_noise",
        WITHOUT_STEP_SIZE,
        "$weight_noise does nothing with $optimiser {optimiser}: it takes the weights as they are.",
    ),
    Clash(
        "method",
        ("ridge",),
        "$method {value} does nothing with $optimiser ridge: it solves for the readout.",
    ),
    Clash(
        "dropout",
        ("hessian-free",),
        "$optimiser hessian-free needs the same function at every evaluation, and $dropout makes "
        "each one different: use another optimiser.",
    ),
)


def make(
    name: str = "adam",
    *,
    lr: float | None = None,
    direction: str | None = None,
    step_rule: str | None = None,
    threshold: float | None = None,
    schedule: str = "constant",
    decay: float | None = None,
    end: float | None = None,
    plateau: int | None = None,
    warmup: int = 0,
    pretrain: int | None = None,
    pretrain_lr: float | None = None,
    **options: Any,
) -> Optimiser:
    """Make an optimiser from plain options; an option that has no effect is refused.

    name       one of OPTIMISERS
    lr         1e-3 if not given, 1 for lbfgs
    direction  one of DIRECTIONS
    step_rule  one of STEP_RULES; threshold: that of "galvan"
    schedule   one of SCHEDULES, with its options: decay, end, plateau (its patience), warmup
    pretrain   the number of first steps with the step size pretrain_lr
    options    those of single optimisers, by the keys of OPTIONS; None means not given

    >>> make("momentum", lr=0.1, momentum=0.5, schedule="linear", end=0.1).settings
    {'momentum': 0.5}
    """
    for option in options:
        choose("option of an optimiser", option, OPTIONS)
    given = {
        "lr": lr,
        "direction": direction,
        "step_rule": step_rule,
        "threshold": threshold,
        "decay": decay,
        "end": end,
        "plateau": plateau,
        "pretrain_lr": pretrain_lr,
        **options,
    }
    refuse_options(idle_complaints(name, given, schedule, warmup))
    schedule_options: dict[str, float] = {"warmup": warmup}
    for key, value in (("decay", decay), ("end", end), ("patience", plateau)):
        if value is not None:
            schedule_options[key] = value
    lr_schedule = SCHEDULES[schedule](**schedule_options)
    if pretrain_lr is not None:
        if pretrain is None:
            raise OptionError("$pretrain_lr needs $pretrain, its number of steps.")
        lr = default_lr(name, lr) or 1.0
        lr_schedule = pretraining(pretrain_lr / lr, pretrain, lr_schedule)
    rule_options = {} if threshold is None else {"c": threshold}
    own_options = {OPTIONS[key]: value for key, value in options.items() if value is not None}
    return optimiser(
        name,
        lr,
        lr_schedule,
        direction=direction or "steepest",
        rule=STEP_RULES[step_rule or "constant"](**rule_options),
        **own_options,
    )


def default_lr(name: str, lr: float | None) -> float | None:
    """The step size lr, or the default of this optimiser; None if it has no step size."""
    if name in WITHOUT_STEP_SIZE:
        return None
    return optimiser(name, lr).lr


def idle_complaints(
    name: str, given: Mapping[str, object], schedule: str = "constant", warmup: int = 0
) -> list[str]:
    """A complaint about each option that has no effect with this optimiser.

    given: values by option, None where not given. $option in a complaint stands for the option's
    name where the user wrote it.
    """
    chosen = {
        "optimiser": choose("optimiser", name, OPTIMISERS),
        "schedule": choose("schedule", schedule, SCHEDULES),
        "step_rule": choose("step rule", given.get("step_rule") or "constant", STEP_RULES),
    }
    lines = idle_options(APPLIES, given, chosen)
    if name in WITHOUT_STEP_SIZE and (schedule != "constant" or warmup):
        lines.append(
            f"$schedule and $warmup do nothing with $optimiser {name}: it has no step size."
        )
    return lines


def clash_complaints(
    name: str, direction: str | None, method: str, given: Mapping[str, object]
) -> list[str]:
    """A complaint about each option of something else that does not go with this optimiser.

    given: values by option, None where not given. $option in a complaint stands for the option's
    name where the user wrote it.
    """
    # "bptt" is the default: it counts as not given.
    values = {**given, "method": None if method == "bptt" else method}
    lines = []
    for clash in CLASHES:
        value = values.get(clash.option)
        if name in clash.optimisers and value:
            lines.append(clash.words.format(optimiser=name, value=value))
    if direction in ("temporal", "layerwise") and method not in ("bptt", "rtrl"):
        lines.append(
            f"$direction {direction} decomposes the gradient of the loss: leave out $method "
            f"{method} and $penalty."
        )
    return lines
