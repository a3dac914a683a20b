"""Optimisers by plain options: the schedule and the step rule by name, too.

    optimisers.make("adam", lr=3e-4, schedule="cosine", warmup=100)
    optimisers.make("sgd", lr=1e-2, direction="temporal", step_rule="galvan", threshold=1.0)
    optimisers.make("hessian-free", cg=50, structural=0.1)

Every keyword has the name of the key in a settings file and of the flag. `optimiser` takes objects
in their place, and the options as torch calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AppliesTable, choose, idle_options, refuse_options
from .recipes import OPTIMISERS, SELF_DIRECTED, WITHOUT_STEP_SIZE, Optimiser, optimiser
from .schedules import SCHEDULES
from .step_rules import STEP_RULES

OPTIONS = {  # the options of single optimisers, and what the optimiser calls them
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
    return tuple(name for name, (_, _, options) in OPTIMISERS.items() if option in options)


def _optimisers_except(without: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in OPTIMISERS if name not in without)


# Options that do something with some values of another option alone.
APPLIES: AppliesTable = {
    "threshold": ("step_rule", ("galvan",)),
    "decay": ("schedule", ("exponential", "inverse-time", "plateau")),
    "end": ("schedule", ("linear", "cosine")),
    "plateau": ("schedule", ("plateau",)),
    **{option: ("optimiser", _optimisers_taking(own)) for option, own in OPTIONS.items()},
    "direction": ("optimiser", _optimisers_except(SELF_DIRECTED)),
    "step_rule": ("optimiser", _optimisers_except(SELF_DIRECTED)),
    "lr": ("optimiser", _optimisers_except(WITHOUT_STEP_SIZE)),
}


@dataclass(frozen=True)
class Clash:
    """Optimisers that leave an option of something else without effect, or cannot do with it."""

    option: str
    optimisers: tuple[str, ...]
    words: str  # what is said of it; {optimiser} and {value} are filled in


CLASHES = (
    Clash(
        "clip",
        SELF_DIRECTED,
        "$clip does nothing with $optimiser {optimiser}: it finds its own way.",
    ),
    Clash(
        "clip_value",
        SELF_DIRECTED,
        "$clip_value does nothing with $optimiser {optimiser}: it finds its own way.",
    ),
    Clash(
        "clip_mean",
        SELF_DIRECTED,
        "$clip_mean does nothing with $optimiser {optimiser}: it finds its own way.",
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
        "$dropout makes every sweep another function, and $optimiser hessian-free needs one: use another optimiser.",
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
    **options: Any,
) -> Optimiser:
    """An optimiser by plain options; those that do nothing with it are refused.

    name       of OPTIMISERS; lr: 1e-3 if not given, 1 for lbfgs
    direction  of DIRECTIONS; step_rule: of STEP_RULES, threshold: that of "galvan"
    schedule   of SCHEDULES, with its options: decay, end, plateau (its patience), warmup
    options    of some optimisers: the keys of OPTIONS. Those that are None are not given

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
        **options,
    }
    refuse_options(idle_complaints(name, given, schedule, warmup))
    shape = {"decay": decay, "end": end, "patience": plateau}
    shape = {key: value for key, value in shape.items() if value is not None}
    course = SCHEDULES[schedule](warmup=warmup, **shape)
    rule = STEP_RULES[step_rule or "constant"](**({} if threshold is None else {"c": threshold}))
    own = {OPTIONS[key]: value for key, value in options.items() if value is not None}
    return optimiser(name, lr, course, direction=direction or "steepest", rule=rule, **own)


def default_lr(name: str, lr: float | None) -> float | None:
    """The step size: that of the optimiser if it is not given, None where it has none."""
    return None if name in WITHOUT_STEP_SIZE else optimiser(name, lr).lr


def idle_complaints(
    name: str, given: Mapping[str, Any], schedule: str = "constant", warmup: int = 0
) -> list[str]:
    """A line for each option that does nothing with this optimiser."""
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
    name: str, direction: str | None, method: str, given: Mapping[str, Any]
) -> list[str]:
    """A line for each option of something else that does not go with this optimiser."""
    asked = {**given, "method": None if method == "bptt" else method}
    lines = [
        row.words.format(optimiser=name, value=asked[row.option])
        for row in CLASHES
        if name in row.optimisers and asked.get(row.option)
    ]
    if direction == "temporal" and method not in ("bptt", "rtrl"):
        lines.append(
            f"$direction temporal takes the gradient of the loss apart: leave out $method {method} and $penalty."
        )
    return lines
