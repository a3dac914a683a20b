"""Gradient methods by plain options.

    gradients.make("bptt", segments="auto")
    gradients.make("truncated", k1=10, k2=50)
    gradients.make("penalised", penalty="log-ratio", weight=2.0)
    gradients.make("penalised", penalty="omega", weight_schedule="linear", steps=1000)

Every keyword has the name of the key in a settings file and of the flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import AppliesTable, OptionError, choose, idle_options, refuse_options
from ..objectives import schedules, weights
from ..objectives.penalties import PENALTIES
from ..objectives.penalties import penalty as penalty_of
from .bptt import BPTT
from .method import Method
from .penalised import Penalised
from .rtrl import RTRL
from .segments import Segments
from .truncated import Truncated

METHODS = ("bptt", "penalised", "truncated", "rtrl")
WEIGHT_SCHEDULES = ("constant", "inverse-time", "exponential", "linear", "steered")

# Options that do something with some values of another option alone.
APPLIES: AppliesTable = {
    "penalty": ("method", ("penalised",)),
    "penalty_on": ("method", ("penalised",)),
    "weight": ("method", ("penalised",)),
    "weight_schedule": ("method", ("penalised",)),
    "weight_rate": ("weight_schedule", ("inverse-time", "exponential")),
    "weight_end": ("weight_schedule", ("linear",)),
    "weight_target": ("method", ("penalised",)),
    "weight_gain": ("weight_schedule", ("steered",)),
    "pretrain": ("method", ("penalised",)),
    "k1": ("method", ("truncated",)),
    "k2": ("method", ("truncated",)),
    "segments": ("method", ("bptt", "penalised")),
}


def make(
    method: str | None = None,
    *,
    penalty: Any = None,
    penalty_on: str | None = None,
    weight: float | None = None,
    weight_schedule: str | None = None,
    weight_rate: float | None = None,
    weight_end: float | None = None,
    weight_target: float | None = None,
    weight_gain: float | None = None,
    pretrain: int | None = None,
    k1: int | None = None,
    k2: int | None = None,
    segments: Segments = None,
    steps: int | None = None,
) -> Method:
    """A gradient method by plain options; those that do nothing with it are refused.

    method           "bptt", "penalised", "truncated" or "rtrl"; if not given, "penalised" with a
                     penalty and "bptt" without
    penalty          a name of `penalties.PENALTIES`, a Penalty, or a function of Costates
    penalty_on       several layers: "each" (default), "top" or "whole", as in `Penalty.on`
    weight           rho, 1 if not given; of 0 that stays 0, plain BPTT is left
    weight_schedule  "constant", "inverse-time" and "exponential" (with weight_rate), "linear" (to
                     weight_end over `steps`), "steered" (to weight_target, by weight_gain), which
                     is the default with a weight_target
    pretrain         penalised: so many steps of the penalty alone first
    k1, k2           truncated: steps between gradients, and steps that losses are pulled back,
                     k1 if not given
    segments         bptt, penalised: as in `BPTT`
    """
    name = method_name(method, penalty)
    given: dict[str, Any] = {
        "penalty": penalty,
        "penalty_on": penalty_on,
        "weight": weight,
        "weight_schedule": weight_schedule,
        "weight_rate": weight_rate,
        "weight_end": weight_end,
        "weight_target": weight_target,
        "weight_gain": weight_gain,
        "pretrain": pretrain,
        "k1": k1,
        "k2": k2,
        "segments": segments,
    }
    refuse_options(list_idle_options(name, given))
    if name == "truncated":
        if k1 is None:
            raise OptionError(
                "$method truncated needs $k1, and $k2 if losses are pulled back further."
            )
        return Truncated(k1, k2 or k1)
    if name == "rtrl":
        return RTRL()
    if name == "bptt":
        return BPTT(segments)
    if penalty is None:
        raise OptionError(f"$method penalised needs a $penalty: {', '.join(PENALTIES)}.")
    G = penalty_of(penalty)
    if penalty_on not in (None, "each"):
        G = G.on(penalty_on)
    rho = _weight(given, steps)
    if rho != 0:
        return Penalised(G, rho, segments, pretrain or 0)
    if pretrain:
        raise OptionError(
            "$pretrain minimises the penalty alone, and $weight 0 leaves nothing of it."
        )
    return BPTT(segments)


def method_name(method: str | None, penalty: Any) -> str:
    """The method, or the one that is meant where none is named."""
    if method is None:
        return "bptt" if penalty is None else "penalised"
    return choose("method", method, METHODS)


def defaults(method: str | None, penalty: Any, weight: float | None) -> dict[str, Any]:
    """The method and, if it has one, its weight: what they are if they are not given."""
    name = method_name(method, penalty)
    if name != "penalised":
        return {"method": name}
    return {"method": name, "weight": 1.0 if weight is None else weight}


def list_idle_options(method: str, given: Mapping[str, Any]) -> list[str]:
    """A line for each option that does nothing with this method."""
    return idle_options(APPLIES, given, {"method": method, "weight_schedule": _schedule(given)})


def _schedule(given: Mapping[str, Any]) -> str:
    if given.get("weight_schedule") is not None:
        return choose("schedule of the weight", given["weight_schedule"], WEIGHT_SCHEDULES)
    return "constant" if given.get("weight_target") is None else "steered"


def _weight(given: Mapping[str, Any], steps: int | None) -> Any:
    """rho: a number, a function of the step, or Steered."""
    rho = 1.0 if given["weight"] is None else given["weight"]
    schedule, target, rate = _schedule(given), given["weight_target"], given["weight_rate"]
    if target is not None and schedule != "steered":
        raise OptionError(
            f"$weight_target does nothing with $weight_schedule {schedule}: it belongs to steered."
        )
    if schedule == "constant":
        return rho
    if schedule == "linear":
        if steps is None:
            raise OptionError("$weight_schedule linear needs $steps.")
        return schedules.linear(rho, given["weight_end"] or 0.0, steps)
    if schedule == "steered":
        if target is None:
            raise OptionError("$weight_schedule steered needs $weight_target.")
        gain = {} if given["weight_gain"] is None else {"gain": given["weight_gain"]}
        return weights.Steered(rho, target, **gain)
    if rate is None:
        raise OptionError(f"$weight_schedule {schedule} needs $weight_rate.")
    if schedule == "inverse-time":
        return schedules.inverse_time(rho, rate)
    if rate > 1:
        raise OptionError(
            f"$weight_schedule exponential grows without end for $weight_rate {rate}: at most 1."
        )
    return schedules.exponential(rho, rate)
