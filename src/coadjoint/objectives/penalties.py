"""Penalties: G(costates), one value for each sample.

Every penalty states its formula, whether it sums or averages, and its range of t. Norms are Euclidean over all slots of
the state, T is the sample's own length, and lam_0, the costate of the initial state, is left out unless said otherwise.
Logarithmic ones leave out costates that are exactly zero (count them with `costates.zeros()`).

Derivatives where something is exactly zero: squares of norms have their true ones, first and second. A norm that is not
squared has a kink there (`variance`, `end-points`, `share-variance`, `norm-stabiliser` beside a state that is not zero),
and so has |lam_i| (`variance-l1`): its first and second derivatives are taken as 0. What is left out has none.

Any callable that takes Costates and returns [B] values is a penalty; those here can also be added and multiplied by
numbers: `0.1 * log_ratio + variance`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cells.transport import Portable, remembers_origin
from ..errors import InputError, KindError, Unsupported, brief, choose, real, renamed_attributes
from ..sweeps.costates import BaseCostates, keep_where_zero, norm
from ..sweeps.layout import check_dense
from ..sweeps.rows import scale

# public as co.penalties.X
from .schedules import exponential as exponential
from .schedules import inverse_time as inverse_time
from .schedules import linear as linear
from .weights import Steered as Steered


@dataclass(frozen=True)
class Penalty(Portable):
    """A function of Costates that knows its name, adds and scales."""

    name: str
    value: Callable[[BaseCostates], Tensor]
    __doc__: str | None = None
    joint: bool = False  # does it take the costates of several layers as they are, and not one after the other

    def __call__(self, lam: BaseCostates | Sequence[BaseCostates]) -> Tensor:
        """[B]; of the costates of several layers (co.Stack, co.record), the mean of what it is for each."""
        if isinstance(lam, BaseCostates):
            return self.value(lam)
        layers = layers_of(lam)
        if layers is None:
            raise KindError(
                f"a penalty is one of Costates, or of those of several layers; got {brief(lam)}."
            )
        if not layers:
            raise InputError("there are no costates to penalise.")
        if self.joint:
            return self.value(lam)  # type: ignore[arg-type]
        return functools.reduce(torch.add, map(self.value, layers)) / len(layers)

    @property
    def _function(self) -> Callable[..., Any]:
        return self.value

    @remembers_origin
    def on(self, what: str | None = None, **where: Any) -> Penalty:
        """The same penalty of some of the costates: on(layer=0), on(direction="forward"), ...; on("top"), the last layer (of an
        encoder-decoder, the decoder); on("whole"), the states of all layers as one. Of a single layer all are that layer's."""
        if what is not None:
            choose("layers", what, ("top", "whole"))
        names = ", ".join([*([what] if what else []), *(f"{n}={v!r}" for n, v in where.items())])
        for name in where:
            choose("part of a stack", name, PARTS)

        def value(lam: Any) -> Tensor:
            if lam.layers[0] is lam:
                return self(lam)
            lam = lam.select(**where) if where else lam
            if what == "top":
                last = lam[-1].trajectory
                within = lam.select(module=last.module, call=last.call)
                lam = within.select(layer=max(one.trajectory.layer for one in within))
            return self(lam.joined() if what == "whole" else lam)

        return Penalty(f"{self.name} on {names}", value, joint=True)

    @remembers_origin
    def __add__(self, other: Penalty) -> Penalty:
        other = penalty(other)
        return Penalty(
            f"{self.name} + {other.name}", lambda lam: self(lam) + other(lam), joint=True
        )

    __radd__ = __add__

    @remembers_origin
    def __mul__(self, weight: float) -> Penalty:
        """A factor may be negative, in a difference of penalties; the weight of a Penalised may not."""
        if not isinstance(weight, Tensor) or weight.dim():
            real("a penalty's factor", weight)
        return Penalty(f"{weight:g} {self.name}", lambda lam: weight * self(lam), joint=True)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<penalty {self.name}>"


PENALTIES: dict[str, Penalty] = {}
PARTS = (
    "module",
    "call",
    "layer",
    "direction",
)  # by which costates of several layers are told apart


def register(name: str) -> Callable[[Callable[[BaseCostates], Tensor]], Penalty]:
    """Enter a penalty into the table."""

    def enter(value: Callable[[BaseCostates], Tensor]) -> Penalty:
        PENALTIES[name] = Penalty(name, value, value.__doc__)
        return PENALTIES[name]

    return enter


def penalty(G: Any) -> Penalty:
    """A penalty from a name, a Penalty or any callable of Costates."""
    if isinstance(G, Penalty):
        return G
    if isinstance(G, str):
        return PENALTIES[choose("penalty", G, PENALTIES)]
    if callable(G):
        return Penalty(getattr(G, "__name__", "penalty"), G)
    raise KindError(
        f"a penalty is a name, a Penalty or a function of Costates; got {type(G).__name__}."
    )


def layers_of(lam: Any) -> Sequence[BaseCostates] | None:
    """The costates of each layer, from those of one or of several; None of anything else."""
    layers = lam if isinstance(lam, list | tuple) else getattr(lam, "layers", None)
    if layers is None or not all(isinstance(one, BaseCostates) for one in layers):
        return None
    return layers


def existing_steps(lam: BaseCostates) -> Tensor | None:
    """[T, B]: does lam_t exist, t = 1..T; None if all do."""
    return None if lam.uniform else lam.mask[1:]


def masked_mean(values: Tensor, on: Tensor | None) -> Tensor:
    """The mean over t of the entries that are on, [t, B] -> [B]; 0 if there are none. Others are not touched, NaN or not."""
    if on is None:
        return values.sum(0) / max(len(values), 1)
    return torch.where(on, values, 0).sum(0) / on.sum(0).clamp(min=1)


def masked_variance(values: Tensor, on: Tensor | None) -> Tensor:
    """mean over t of (value - mean)^2, in two passes; the second term is what the rounding of the mean has left."""
    values = values if on is None else torch.where(on, values, 0)
    d = values - masked_mean(values, on)
    return masked_mean(d.square(), on) - masked_mean(d, on).square()


@register("squared-norm")
def squared_norm(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of ||lam_t||^2"""
    return masked_mean(lam.squared_norms()[1:], existing_steps(lam))


@register("variance")
def variance(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||lam_t|| - mean_s ||lam_s||)^2.  Johnston & Patel (2021); their published code sums over t."""
    return masked_variance(lam.norms()[1:], existing_steps(lam))


@register("variance-l1")
def variance_l1(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||lam_t||_1 - mean_s ||lam_s||_1)^2.  Johnston & Patel (2021)"""
    return masked_variance(lam.norms(1)[1:], existing_steps(lam))


@register("log-ratio")
def log_ratio(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T-1 of (log ||lam_t|| - log ||lam_{t+1}||)^2, natural logarithm; 0 if T < 2"""
    r = lam.log_ratios()[1:]
    return masked_mean(r.square(), None if lam.complete else ~r.isnan()).to(lam.loss.dtype)


@register("ratio")
def ratio(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T-1 of (||lam_t|| / ||lam_{t+1}|| - 1)^2; pairs with a zero norm are left out.
    The published code of Johnston & Patel calls it Pascanu's; Pascanu's own is `omega`."""
    r = lam.log_ratios()[1:]
    on = ~r.isnan()
    return masked_mean((torch.where(on, r, 0).exp() - 1).square(), on).to(lam.loss.dtype)


@register("log-variance")
def log_variance(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (log ||lam_t|| - mean_s log ||lam_s||)^2"""
    return masked_variance(lam.log_norms()[1:], lam.nonzero[1:]).to(lam.loss.dtype)


@register("end-points")
def end_points(lam: BaseCostates) -> Tensor:
    """(||lam_1|| - ||lam_T||)^2.  Johnston & Patel's code"""
    n = lam.norms()
    return (n[1] - n.gather(0, lam.last[None])[0]).square()


@register("share-variance")
def share_variance(lam: BaseCostates) -> Tensor:
    """sum over t = 1..T of (||lam_t|| / sum_s ||lam_s|| - 1/T)^2, from log-norms, so that it holds at any scale; 0 if all are zero"""
    on = lam.nonzero[1:]
    logs = torch.where(on, lam.log_norms()[1:], -math.inf)
    any_on = on.any(0)
    share = torch.softmax(torch.where(any_on, logs, 0), 0)
    even = 1 / lam.last
    off = torch.where(lam.mask[1:], (share - even).square(), 0)
    return torch.where(any_on, off.sum(0), 0).to(lam.loss.dtype)


@remembers_origin
def barrier(switch: float = 1e-5) -> Penalty:
    """sum over units i of phi(lam_{T,i}), phi(v) = log(|v| / switch)^2 below the switch and 0 above: keeps the last costate
    away from zero. phi has a continuous slope; units whose costate is exactly zero are left out.
    After the log barrier of Johnston & Patel's code, switched at 1e-5."""
    real("the barrier's switch", switch, 0, above=True)

    def value(lam: BaseCostates) -> Tensor:
        size = lam.last_mantissa().double().abs()
        k = lam.exponent.gather(0, lam.last[None])[0].double()
        log = (
            torch.log(torch.where(size > 0, size, 1)) + k[:, None] * math.log(2) - math.log(switch)
        )
        return torch.where((size > 0) & (log < 0), log, 0).square().sum(1).to(lam.loss.dtype)

    return Penalty("barrier", value, barrier.__doc__)


PENALTIES["barrier"] = barrier()


@register("omega")
def omega(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||J_t' lam_t||^2 / ||lam_t||^2 - 1)^2, J_t = dx_t/dx_{t-1}, with its exact gradient: through the
    states, the costates and every parameter.  The regulariser of Pascanu et al. (2013), eq. 10; zero costates are left out."""
    back = lam.pull_mantissas()
    before = norm(back)
    on = lam.nonzero[1:]
    size = torch.where(on, lam.size[1:], 1)
    r = before / size
    # Where J_t' lam_t is zero the ratio has a kink, but its square is smooth.
    zeros = keep_where_zero(back, before) / size[..., None]
    return masked_mean((r.square() + zeros.square().sum(-1) - 1).square(), on)


@register("omega-published")
def omega_published(lam: BaseCostates) -> Tensor:
    """The same ratio as in the published code of Pascanu et al. (2013): only the immediate derivative by W (states and costates
    are constants, other parameters get nothing); steps with ||lam_t / B||^2 < 1e-20 are left out; the sum over steps and
    samples is divided by the number of steps left: one value for the batch, given to every sample."""
    run = None if lam.sweep is None else lam.sweep.formula
    if run is None or run.W is None:
        raise Unsupported(
            "penalty 'omega-published' differentiates by W alone, and a step function hides its W (or this cell has none). Use 'omega', or a cell that is a formula on engine 'cpu' or 'reference'."
        )
    rows = run.plan.rows
    own: Any = lam  # a recurrence's costates lie in rows
    mantissa, k = own.rows.detach(), own.powers
    back = run.pull(mantissa, frozen=True)
    size = norm(mantissa)[rows.B :]
    on = (scale(size, k[rows.B :]) / rows.B).square() >= 1e-20
    size = torch.where(on, size, 1)
    before = norm(back)
    r = before / size
    zeros = keep_where_zero(back, before) / size[:, None]  # as in omega
    terms = (r.square() + zeros.square().sum(-1) - 1).square()
    value = torch.where(on, terms, 0).sum() / on.sum().clamp(min=1)
    return value.expand(rows.B)


@register("norm-stabiliser")
def norm_stabiliser(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||h_t|| - ||h_{t-1}||)^2 on the states themselves (the first slot).  Krueger & Memisevic (2015)"""
    shown = lam.visible_states
    n = norm(shown)
    change = (n[1:] - n[:-1]).square()
    # After a state of zeros the change is ||h_t||^2, which is smooth where h_t is zero too.
    zeros = keep_where_zero(shown, n)[1:].square().sum(-1)
    return masked_mean(change + torch.where(n[:-1] == 0, zeros, 0), existing_steps(lam))


def network_run(lam: BaseCostates, name: str) -> Any:
    """The run of a whole network, which can be asked for its outputs: it has `push`, the change of y_hat along a direction."""
    run = lam.trajectory
    if not hasattr(run, "push"):
        raise Unsupported(
            f"penalty '{name}' asks a network for its outputs, and a recorded layer has none of its own. Use co.Network."
        )
    return run


@remembers_origin
def tangent(v: Tensor, beta: Tensor | float = 0.0) -> Penalty:
    """sum over outputs (and steps) of (DF(u) v - beta)^2: the change of y_hat along the input direction v [T, B, inputs] is
    asked to be beta.  The tangent loss of Simard et al. (1992), as in Caterini's framework (section 3)."""
    check_dense("the direction v", v)

    def value(lam: BaseCostates) -> Tensor:
        change = network_run(lam, "tangent").push(v) - beta
        axes = [i for i in range(change.dim()) if i != change.dim() - 2]
        if change.dim() == 3:
            change = torch.where(lam.mask[1:, :, None], change, 0)
        return change.square().sum(axes)

    return Penalty("tangent", value, tangent.__doc__)


@remembers_origin
def of_output(G: Any = "variance") -> Penalty:
    """mean over outputs k of G applied to d y_hat_k / dx_t instead of dL/dx_t; y_hat is that of the sample's last step."""
    inner = penalty(G)

    def value(lam: BaseCostates) -> Tensor:
        run = network_run(lam, "of_output")
        outputs, at_end = run.network.outputs, None
        if run.network.readout != "last":
            at_end = torch.arange(1, len(lam.exponent))[:, None] == run.lengths
        values = [
            inner(run.costates(lambda y_hat, k=k: y_hat[:, k], mask=at_end)) for k in range(outputs)
        ]
        return functools.reduce(torch.add, values) / outputs

    return Penalty(f"{inner.name} of the output", value, of_output.__doc__)


PENALTIES["output-variance"] = of_output("variance")


def log_decay(lam: BaseCostates | Sequence[BaseCostates]) -> Tensor:
    """|mean over t = 1..T-1 of (log ||lam_t|| - log ||lam_{t+1}||)|, [B] float64: the logarithm of the factor by which a
    costate changes in one step, in geometric mean, vanishing or exploding. NaN for a sample without two costates that differ
    from zero; of several layers, the mean. No gradient."""
    layers = layers_of(lam)
    if not layers:
        raise KindError(
            f"log_decay is that of Costates, or of those of several layers; got {brief(lam)}."
        )
    found = []
    for one in layers:
        r = one.log_ratios()[1:].detach()
        on = ~r.isnan()
        found.append(torch.where(on.any(0), masked_mean(r, on).abs(), math.nan))
    return found[0] if len(found) == 1 else torch.stack(found).nanmean(0)


__getattr__ = renamed_attributes(
    __name__,
    {
        "variance_of": "masked_variance",
    },
)
