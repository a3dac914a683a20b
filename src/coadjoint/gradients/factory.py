"""Gradient methods by name and plain options.

    gradients.make("bptt", segments="auto")
    gradients.make("truncated", k1=10, k2=50)
    gradients.make("penalised", penalty="log-ratio", weight=2.0)
    gradients.make("penalised", penalty="omega", weight_schedule="linear", steps=1000)

Every keyword has the name of the key in a settings file and of the command line's flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AppliesTable, OptionError, choose, idle_options, refuse_options
from ..objectives import schedules, tangents, weights
from ..objectives.penalties import PENALTIES, Penalty
from ..objectives.penalties import penalty as penalty_of
from ..objectives.schedules import Schedule
from ..objectives.tangents import NAMED_DIRECTIONS
from .bptt import BPTT
from .method import Method
from .penalised import Penalised, PenaltyLike
from .rtrl import RTRL
from .segments import Segments
from .truncated import Truncated

OptionValues = Mapping[str, Any]
METHODS = ("bptt", "penalised", "truncated", "rtrl")
WEIGHT_SCHEDULES = ("constant", "inverse-time", "exponential", "linear", "pretrain", "steered")

# Options that have an effect only with some values of another option.
APPLIES: AppliesTable = {
    "penalty": ("method", ("penalised",)),
    "penalty_on": ("method", ("penalised",)),
    "penalty_part": ("method", ("penalised",)),
    "penalty_per": ("method", ("penalised",)),
    "tangent": ("penalty", ("tangent",)),
    "tangent_directions": ("penalty", ("tangent",)),
    "weight": ("method", ("penalised",)),
    "weight_schedule": ("method", ("penalised",)),
    "weight_rate": ("weight_schedule", ("inverse-time", "exponential")),
    "weight_end": ("weight_schedule", ("linear",)),
    "weight_target": ("method", ("penalised",)),
    "weight_gain": ("weight_schedule", ("steered",)),
    "pretrain": ("method", ("penalised",)),
    "hold": ("method", ("penalised",)),
    "k1": ("method", ("truncated",)),
    "k2": ("method", ("truncated",)),
    "segments": ("method", ("bptt", "penalised")),
}


def make(
    method: str | None = None,
    *,
    penalty: PenaltyLike | None = None,
    penalty_on: str | None = None,
    penalty_part: str | Sequence[str] | None = None,
    penalty_per: str | None = None,
    tangent: str | None = None,
    tangent_directions: int | None = None,
    weight: float | None = None,
    weight_schedule: str | None = None,
    weight_rate: float | None = None,
    weight_end: float | None = None,
    weight_target: float | None = None,
    weight_gain: float | None = None,
    pretrain: int | None = None,
    hold: str | None = None,
    k1: int | None = None,
    k2: int | None = None,
    segments: Segments = None,
    steps: int | None = None,
) -> Method:
    """Make a gradient method; options that have no effect on it are refused.

    Args:
        method: "bptt", "penalised", "truncated" or "rtrl". The default is "penalised" if a
            penalty is given and "bptt" if not.
        penalty: A name in `penalties.PENALTIES`, a Penalty, or a function of Costates.
        penalty_on: For several layers: "each" (the default), "top" or "whole", as in `Penalty.on`.
        penalty_part: The slots of the state that it takes, "h" of an lstm, as in `Penalty.on`.
        penalty_per: "sqrt-n": root mean squares in place of norms, as in `Penalty.per`.
        tangent: For the penalty "tangent": the directions of the input, "random" signs (the
            default) or "shifts" of images.
        tangent_directions: For "random" ones: how many are drawn at each step, 1 by default.
        weight: rho, 1 by default. With a constant weight of 0 the method is plain BPTT.
        weight_schedule: "constant", "inverse-time" and "exponential" (with weight_rate), "linear"
            (to weight_end over `steps`), "pretrain" (0 after the steps of pretrain), or "steered"
            (to weight_target, by weight_gain), which is the default if a weight_target is given.
        weight_rate: The rate of the schedules "inverse-time" and "exponential".
        weight_end: The last weight of the schedule "linear", 0 by default.
        weight_target: The decay of costates per step that "steered" aims at.
        weight_gain: How fast "steered" changes the weight.
        pretrain: For "penalised": the number of first steps that minimise the penalty alone.
        hold: "source": the loss's own part of costates is a constant to the penalty, as in
            `Penalised`.
        k1: For "truncated": the steps between gradients.
        k2: For "truncated": the steps to backpropagate each loss, k1 by default.
        segments: For "bptt" and "penalised": as in `BPTT`.
        steps: The number of training steps, for the schedule "linear".
    """
    name = method_name(method, penalty)
    options: OptionValues = {
        "penalty": penalty,
        "penalty_on": penalty_on,
        "penalty_part": penalty_part,
        "penalty_per": penalty_per,
        "tangent": tangent,
        "tangent_directions": tangent_directions,
        "weight": weight,
        "weight_schedule": weight_schedule,
        "weight_rate": weight_rate,
        "weight_end": weight_end,
        "weight_target": weight_target,
        "weight_gain": weight_gain,
        "pretrain": pretrain,
        "hold": hold,
        "k1": k1,
        "k2": k2,
        "segments": segments,
    }
    refuse_options(list_idle_options(name, options))
    if name == "truncated":
        if k1 is None:
            raise OptionError(
                "$method truncated needs $k1; also $k2, to backpropagate further than $k1 steps."
            )
        return Truncated(k1, k2 or k1)
    if name == "rtrl":
        return RTRL()
    if name == "bptt":
        return BPTT(segments)
    if penalty is None:
        raise OptionError(f"$method penalised needs a $penalty: {', '.join(PENALTIES)}.")
    G = penalty_of(penalty)
    if penalty == "tangent":
        G = _make_tangent(tangent or "random", tangent_directions)
    if penalty_per is not None:
        choose("unit of norms", penalty_per, ("sqrt-n",))
        G = G.per("sqrt n")
    layers = None if penalty_on == "each" else penalty_on
    if layers is not None or penalty_part is not None:
        G = G.on(layers, part=penalty_part)
    if hold is not None and not G.reads_costates:
        raise OptionError(
            f"$hold does nothing with $penalty {G.name}, which does not depend on the costates of "
            "the loss."
        )
    rho = _make_weight(options, steps)
    if rho != 0:
        return Penalised(G, rho, segments, pretrain or 0, hold)
    if pretrain:
        raise OptionError(
            "$pretrain minimises the penalty alone, but $weight 0 turns the penalty off."
        )
    return BPTT(segments)


def _make_tangent(directions: str, K: int | None) -> Penalty:
    """Return the tangent loss along directions of the input given by name."""
    v = NAMED_DIRECTIONS[choose("direction of the tangent loss", directions, NAMED_DIRECTIONS)]
    if v is None:
        return tangents.tangent(K=K or 1)
    if K is not None:
        raise OptionError(
            f"$tangent_directions does nothing with $tangent {directions}: it belongs to random."
        )
    return tangents.tangent(v)


def method_name(method: str | None, penalty: object) -> str:
    """Return the name of the method; by default it follows from whether a penalty is given."""
    if method is None:
        return "bptt" if penalty is None else "penalised"
    return choose("method", method, METHODS)


def defaults(method: str | None, penalty: object, weight: float | None) -> dict[str, Any]:
    """Return the method and, for "penalised", its weight, with their defaults filled in."""
    name = method_name(method, penalty)
    if name != "penalised":
        return {"method": name}
    return {"method": name, "weight": 1.0 if weight is None else weight}


def list_idle_options(method: str, options: OptionValues) -> list[str]:
    """Return a line for a message about each option that has no effect with this method."""
    penalty = options.get("penalty") or "none"
    chosen = {
        "method": method,
        "penalty": penalty if isinstance(penalty, str) else "of your own",
        "weight_schedule": _schedule_name(options),
    }
    return idle_options(APPLIES, options, chosen)


def _schedule_name(options: OptionValues) -> str:
    """Return the weight's schedule: the one named, else "steered" with a target or "constant"."""
    name = options.get("weight_schedule")
    if name is not None:
        return choose("schedule of the weight", name, WEIGHT_SCHEDULES)
    return "constant" if options.get("weight_target") is None else "steered"


def _make_weight(options: OptionValues, steps: int | None) -> float | Schedule | weights.Steered:
    """Return rho: a number, a function of the step, or Steered.

    `steps`, the number of training steps, is needed for the schedule "linear" alone.
    """
    rho: float = 1.0 if options["weight"] is None else options["weight"]
    schedule = _schedule_name(options)
    if schedule == "steered":
        return _make_steered(rho, options)
    # A target given alone chooses "steered", so there is another schedule named beside it here.
    if options["weight_target"] is not None:
        raise OptionError(
            f"$weight_target does nothing with $weight_schedule {schedule}: it belongs to steered."
        )
    if schedule == "constant":
        return rho
    if schedule == "linear":
        if steps is None:
            raise OptionError("$weight_schedule linear needs $steps.")
        return schedules.linear(rho, options["weight_end"] or 0.0, steps)
    if schedule == "pretrain":
        return _make_pretraining(rho, options["pretrain"])
    rate = options["weight_rate"]
    if rate is None:
        raise OptionError(f"$weight_schedule {schedule} needs $weight_rate.")
    if schedule == "inverse-time":
        return schedules.inverse_time(rho, rate)
    if rate > 1:  # rho rate^step would grow without bound
        raise OptionError(
            f"$weight_schedule exponential needs a $weight_rate of at most 1; got {rate}."
        )
    return schedules.exponential(rho, rate)


def _make_pretraining(rho: float, pretrain: int | None) -> Schedule:
    """Return a weight that is rho while pretraining, and 0 afterwards."""
    if pretrain is None:
        raise OptionError("$weight_schedule pretrain needs $pretrain, its number of steps.")
    if rho == 0:
        raise OptionError(
            "$pretrain minimises the penalty alone, but $weight 0 turns the penalty off."
        )
    return schedules.pretrain(rho, pretrain)


def _make_steered(rho: float, options: OptionValues) -> weights.Steered:
    """Return a weight that begins with rho and is steered to the option weight_target."""
    target = options["weight_target"]
    if target is None:
        raise OptionError("$weight_schedule steered needs $weight_target.")
    if options["weight_gain"] is None:  # the default gain is known to Steered alone
        return weights.Steered(rho, target)
    return weights.Steered(rho, target, options["weight_gain"])
