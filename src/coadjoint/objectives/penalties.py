"""Penalties: G(costates), one value for each sample.

Every penalty states its formula, whether it sums or averages, and its range of t. Norms are
Euclidean over all slots of the state, T is the sample's own length, and lam_0, the costate of the
initial state, is left out unless the formula says otherwise (of outputs recorded by co.record(at=)
none is left out: their lam_0 is that of an output like the others). Logarithmic penalties leave out
costates that are exactly zero (count them with `costates.zeros()`).

Derivatives where something is exactly zero: squares of norms have their true derivatives, first and
second. A norm that is not squared has a kink there (`variance`, `end-points`, `share-variance`,
||J_t' lam_t|| in `omega-norms`, `norm-stabiliser` beside a state that is not zero), and so has
|lam_i| (`variance-l1`): the first and second derivatives are taken as 0. What is left out has none.

Any callable that takes Costates and returns [B] values is a penalty; those here can also be added
and multiplied by numbers.

Example:
    >>> import coadjoint as co
    >>> 0.1 * co.penalties.log_ratio + co.penalties.variance
    <penalty 0.1 log-ratio + variance>
"""
# ruff: noqa: D205, D403, D415  -- the docstrings of penalties are formulas; the pages print them

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cells.transport import remembers_origin
from ..errors import KindError, Unsupported, brief, check_seed, real, renamed_attributes
from ..sweeps.costates import TIME, BaseCostates, Costates, keep_where_zero, norm
from ..sweeps.rows import scale
from .draws import random_signs

# Public as co.penalties.X.
from .layered import PARTS as PARTS
from .layered import LayeredCostates
from .log_ratios import log_ratio_of_sizes, log_ratio_with_slope
from .penalty_type import PENALTIES as PENALTIES
from .penalty_type import Penalty as Penalty
from .penalty_type import PenaltyLike, layers_of, refuse_costates, register
from .penalty_type import penalty as penalty
from .schedules import exponential as exponential
from .schedules import inverse_time as inverse_time
from .schedules import linear as linear
from .schedules import pretrain as pretrain
from .state_parts import StatePart
from .tangents import output_change as output_change
from .tangents import shifts as shifts
from .tangents import tangent as tangent
from .tangents import tangent_loss as tangent_loss
from .weights import Steered as Steered


def existing_steps(lam: BaseCostates) -> Tensor | None:
    """Whether a sample has the costate lam_t, t = 1..T: [T, B] booleans; None if all do."""
    return None if lam.uniform else lam.mask[lam.first :]


def masked_mean(values: Tensor, on: Tensor | None) -> Tensor:
    """The mean over t of the values where `on` is true, [t, B] -> [B]; 0 if it is nowhere.

    The other values may be NaN. on = None takes all.
    """
    if on is None:
        return values.sum(0) / max(len(values), 1)
    return torch.where(on, values, 0).sum(0) / on.sum(0).clamp(min=1)


def masked_variance(values: Tensor, on: Tensor | None) -> Tensor:
    """mean over t of (value - mean)^2, of the values where `on` is true, [t, B] -> [B].

    on = None takes all. The second term would be 0 in exact arithmetic; it corrects the rounding
    of the mean.
    """
    if on is not None:
        values = torch.where(on, values, 0)
    off_mean = values - masked_mean(values, on)
    return masked_mean(off_mean.square(), on) - masked_mean(off_mean, on).square()


@register("squared-norm")
def squared_norm(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of ||lam_t||^2"""
    return masked_mean(lam.squared_norms()[lam.first :], existing_steps(lam))


@register("variance")
def variance(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||lam_t|| - mean_s ||lam_s||)^2.  Johnston & Patel (2021); their
    published code sums over t.
    """
    return masked_variance(lam.norms()[lam.first :], existing_steps(lam))


@register("variance-l1")
def variance_l1(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||lam_t||_1 - mean_s ||lam_s||_1)^2.  Johnston & Patel (2021)"""
    return masked_variance(lam.norms(1)[lam.first :], existing_steps(lam))


@register("log-ratio")
def log_ratio(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T-1 of (log ||lam_t|| - log ||lam_{t+1}||)^2, natural logarithm; 0 if
    T < 2
    """
    if lam.complete:
        value = log_ratio_of_sizes(lam.size, lam.exponent, lam.first)
        if value is not None:
            return value
    r = lam.log_ratios()[lam.first :]  # float64; NaN where one of the two is zero or missing
    on = None if lam.complete else ~r.isnan()  # complete: there is no NaN to look for
    return masked_mean(r.square(), on).to(lam.loss.dtype)


PENALTIES["log-ratio"] = log_ratio = replace(log_ratio, with_slope=log_ratio_with_slope)


@register("ratio")
def ratio(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T-1 of (||lam_t|| / ||lam_{t+1}|| - 1)^2; pairs with a zero norm are left
    out. The published code of Johnston & Patel calls it Pascanu's; Pascanu's own is `omega`.
    """
    r = lam.log_ratios()[lam.first :]  # float64; NaN where one of the two is zero or missing
    on = ~r.isnan()
    off_one = torch.where(on, r, 0).exp() - 1
    return masked_mean(off_one.square(), on).to(lam.loss.dtype)


@register("log-variance")
def log_variance(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (log ||lam_t|| - mean_s log ||lam_s||)^2"""
    is_nonzero = lam.nonzero[lam.first :]
    return masked_variance(lam.log_norms()[lam.first :], is_nonzero).to(lam.loss.dtype)


@register("end-points")
def end_points(lam: BaseCostates) -> Tensor:
    """(||lam_1|| - ||lam_T||)^2.  Johnston & Patel's code"""
    norms = lam.norms()
    at_end = norms.gather(0, lam.last[None])[0]  # at each sample's own T
    return (norms[lam.first] - at_end).square()


@register("share-variance")
def share_variance(lam: BaseCostates) -> Tensor:
    """sum over t = 1..T of (||lam_t|| / sum_s ||lam_s|| - 1/T)^2, from log-norms, so that it holds
    at any scale; 0 if all are zero
    """
    is_nonzero = lam.nonzero[lam.first :]
    logs = torch.where(is_nonzero, lam.log_norms()[lam.first :], -math.inf)  # -inf: a share of 0
    any_nonzero = is_nonzero.any(0)
    # A column of -inf alone would make softmax NaN, and its slopes with it.
    share = torch.softmax(torch.where(any_nonzero, logs, 0), 0)  # ||lam_t|| / sum_s ||lam_s||
    # 1/T, T being the sample's own. In float64: a number by integers would be a float32 here.
    even = 1 / (lam.last + 1 - lam.first).double()
    squares = torch.where(lam.mask[lam.first :], (share - even).square(), 0)
    return torch.where(any_nonzero, squares.sum(0), 0).to(lam.loss.dtype)


@remembers_origin
def barrier(switch: float = 1e-5) -> Penalty:
    """sum over units i of phi(lam_{T,i}), phi(v) = log(|v| / switch)^2 below the switch and 0
    above: keeps the last costate away from zero. phi has a continuous slope; units whose costate
    is exactly zero are left out. After the log barrier of Johnston & Patel's code, switched at
    1e-5.
    """
    refuse_costates("barrier", switch)
    real("the barrier's switch", switch, 0, above=True)

    def value(lam: BaseCostates) -> Tensor:
        """Sum over units of log(|lam_T| / switch)^2 below the switch, [B].

        lam_T is a mantissa times 2^k, and may be too small for a float; its logarithm is not.
        """
        size = lam.last_mantissa().double().abs()
        k = lam.exponent.gather(0, lam.last[None])[0].double()
        log_size = torch.log(torch.where(size > 0, size, 1))
        log_ratio_to_switch = log_size + k[:, None] * math.log(2) - math.log(switch)
        is_below = (size > 0) & (log_ratio_to_switch < 0)
        return torch.where(is_below, log_ratio_to_switch, 0).square().sum(1).to(lam.loss.dtype)

    return Penalty(
        "barrier", value, barrier.__doc__, reads_run_only=True, reads_mantissas_only=True
    )


PENALTIES["barrier"] = barrier()


@register("omega", reads_mantissas_only=False)
def omega(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||J_t' lam_t||^2 / ||lam_t||^2 - 1)^2, J_t = dx_t/dx_{t-1}, with its
    exact gradient: through the states, the costates and every parameter.  The regulariser of
    Pascanu et al. (2013), eq. 10; zero costates are left out.
    """
    pulled, size, is_nonzero = _pulled_costates(lam)
    return masked_mean(_omega_terms(pulled, norm(pulled), size), is_nonzero)


@register("omega-norms", reads_mantissas_only=False)
def omega_norms(lam: BaseCostates) -> Tensor:
    """sum over t = 1..T of (||J_t' lam_t|| / ||lam_t|| - 1)^2, J_t = dx_t/dx_{t-1}, with its exact
    gradient: the regulariser of `omega` as printed, without squares inside and without a mean.
    Pascanu et al. (2013), eq. 9; Galvan (2016), eq. 2.18; zero costates are left out.
    """
    pulled, size, is_nonzero = _pulled_costates(lam)
    off_one = norm(pulled) / size - 1
    return torch.where(is_nonzero, off_one, 0).square().sum(0)


def _pulled_costates(lam: BaseCostates) -> tuple[Tensor, Tensor, Tensor]:
    """J_t' m_t of the mantissas m_t of lam_t, their norms ||m_t||, and where they are not zero.

    The powers of two of lam_t cancel in ||J_t' lam_t|| / ||lam_t||. A norm of 0 is given as 1,
    since it is divided by.
    """
    is_nonzero = lam.nonzero[1:]
    return lam.pull_mantissas(), torch.where(is_nonzero, lam.size[1:], 1), is_nonzero


def _omega_terms(pulled: Tensor, pulled_size: Tensor, size: Tensor) -> Tensor:
    """(||J' lam||^2 / ||lam||^2 - 1)^2, one value for each costate.

    pulled       J' lam, [..., n]
    pulled_size  its norm, [...]
    size         the norm of lam, [...]
    """
    ratio = pulled_size / size
    # Where J' lam is zero the ratio has a kink, but its square is smooth: `zeros` has the value 0
    # there, and the second derivative of the square.
    zeros = keep_where_zero(pulled, pulled_size) / size[..., None]
    return (ratio.square() + zeros.square().sum(-1) - 1).square()


@register("omega-published", reads_mantissas_only=False)
def omega_published(lam: BaseCostates) -> Tensor:
    """The same ratio as in the published code of Pascanu et al. (2013): only the immediate
    derivative with respect to W (states and costates are constants, other parameters get no
    gradient); steps with ||lam_t / B||^2 < 1e-20 are left out; the sum over steps and samples is
    divided by the number of steps left: one value for the batch, given to every sample.
    """
    is_changed = hasattr(lam, "per") or isinstance(lam, StatePart)
    if lam.axis is not TIME or is_changed:
        raise Unsupported(
            "penalty 'omega-published' is that of published code: it differentiates with respect "
            f"to one W shared by all steps {TIME.through}. Use 'omega'."
        )
    # the run of a cell that is a formula; a step function has none
    run = None if lam.sweep is None else lam.sweep.formula
    if run is None or run.W is None or not isinstance(lam, Costates):
        raise Unsupported(
            "penalty 'omega-published' differentiates with respect to W alone, but a step "
            "function hides its W (or this cell has none). Use 'omega', or a cell that is a "
            "formula on engine 'cpu' or 'reference'."
        )
    # lam_t = mantissa 2^power, one row for each sample at each step; the first B rows are lam_0.
    B = run.plan.rows.B
    mantissa = lam.rows.detach()
    pulled = run.pull(mantissa, frozen=True)  # J_t' mantissa_t, a function of W alone
    size = norm(mantissa)[B:]
    # The published code differentiates the mean loss of the batch, so its costates are lam_t / B.
    counts = (scale(size, lam.powers[B:]) / B).square() >= 1e-20
    size = torch.where(counts, size, 1)  # it is divided by
    terms = _omega_terms(pulled, norm(pulled), size)
    value = torch.where(counts, terms, 0).sum() / counts.sum().clamp(min=1)
    return value.expand(B)


# The costates are constants in it.
PENALTIES["omega-published"] = omega_published = replace(
    omega_published, mixes_samples=True, reads_costates=False
)


@remembers_origin
def isometry(seed: int = 0) -> Penalty:
    """mean over t = 1..T of (log ||J_t' r_t|| - log ||r_t||)^2, J_t = dx_t/dx_{t-1}, for random
    signs r_t of every state, drawn anew at each training step: every step (or layer) should keep
    the length of any costate, not only of those that the loss sends. It needs no recursion: one
    pull more for each step. Steps where J_t' r_t is zero are left out.
    """
    refuse_costates("isometry", seed)
    check_seed(seed)

    def value(lam: BaseCostates) -> Tensor:
        """The mean over steps of (log ||J' r|| - log ||r||)^2, [B]."""
        widths = lam.entry_counts[1:]
        counts = torch.tensor(widths, device=lam.loss.device)
        L, B = lam.exponent[1:].shape
        r = random_signs(seed, L, B, max(widths, default=1), lam.loss)
        size = norm(lam.pull_directions(r))  # [L, B]
        on = lam.mask[1:] & (size.detach() > 0)
        log_size = torch.log(torch.where(on, size, 1).double())
        log_growth = log_size - 0.5 * torch.log(counts.double())[:, None]  # ||r||^2 = n
        return masked_mean(log_growth.square(), on).to(lam.loss.dtype)

    return Penalty(
        "isometry",
        value,
        isometry.__doc__,
        draws=True,
        reads_run_only=True,
        reads_costates=False,
    )


PENALTIES["isometry"] = isometry()


@register("norm-stabiliser", reads_mantissas_only=False)
def norm_stabiliser(lam: BaseCostates) -> Tensor:
    """mean over t = 1..T of (||h_t|| - ||h_{t-1}||)^2 on the states themselves (the first slot).
    Krueger & Memisevic (2015)
    """
    h = lam.visible_states
    norms = norm(h)
    change = (norms[1:] - norms[:-1]).square()
    # After a state of zeros the change is ||h_t||^2, which is smooth where h_t is zero too.
    # `zeros` adds its second derivative: the norm has none at zero.
    zeros = keep_where_zero(h, norms)[1:].square().sum(-1)
    change = change + torch.where(norms[:-1] == 0, zeros, 0)
    return masked_mean(change, existing_steps(lam))


PENALTIES["norm-stabiliser"] = norm_stabiliser = replace(norm_stabiliser, reads_costates=False)


def network_run(lam: BaseCostates, name: str) -> Any:
    """The run that the costates belong to, if it is one of a whole network, which has outputs.

    Such a run has a method `push`, the change of y_hat along a direction; others are refused.
    name  of the penalty that needs it, for the error
    """
    run = lam.trajectory
    if not hasattr(run, "push"):
        raise Unsupported(
            f"penalty '{name}' needs the outputs of a network, but a recorded layer has none. "
            "Use co.Network."
        )
    return run


@remembers_origin
def of_output(G: PenaltyLike = "variance") -> Penalty:
    """mean over outputs k of G applied to d y_hat_k / dx_t instead of dL/dx_t; y_hat is that of the
    sample's last step.
    """
    refuse_costates("of_output", G)
    inner = penalty(G)

    def value(lam: BaseCostates) -> Tensor:
        """The mean of `inner` over the costates of each output y_hat_k, taken as the loss."""
        run = network_run(lam, "of_output")
        outputs: int = run.network.outputs
        at_end = None  # [T, B]: the step is the sample's last
        if run.network.readout != "last":
            T = len(lam.exponent) - 1  # it has an entry for each of x_0 .. x_T
            at_end = torch.arange(1, T + 1)[:, None] == run.lengths
        values = []
        for k in range(outputs):
            of_output_k = run.costates(lambda y_hat, k=k: y_hat[:, k], mask=at_end)
            values.append(inner(lam.of(of_output_k)))
        return functools.reduce(torch.add, values) / outputs

    name = f"{inner.name} of the output"
    return Penalty(
        name,
        value,
        of_output.__doc__,
        reads_run_only=inner.reads_run_only,
        mixes_samples=inner.mixes_samples,
        reads_costates=False,  # of the loss: those that it reads are the outputs'
    )


PENALTIES["output-variance"] = of_output("variance")


def log_decay(lam: BaseCostates | Sequence[BaseCostates] | LayeredCostates) -> Tensor:
    """|mean over t = 1..T-1 of (log ||lam_t|| - log ||lam_{t+1}||)|, [B] float64, no gradient.

    The logarithm of the factor by which a costate changes in one step, in geometric mean, be it
    vanishing or exploding. NaN for a sample without two costates that differ from zero; for several
    layers, the mean.
    """
    layers = layers_of(lam)
    if not layers:
        raise KindError(f"log_decay takes Costates, or those of several layers; got {brief(lam)}.")
    decays = []
    for layer in layers:
        # NaN where one of the two is zero or missing
        r = layer.log_ratios()[layer.first :].detach()
        on = ~r.isnan()
        decays.append(torch.where(on.any(0), masked_mean(r, on).abs(), math.nan))
    return decays[0] if len(decays) == 1 else torch.stack(decays).nanmean(0)


__getattr__ = renamed_attributes(__name__, {"variance_of": "masked_variance"})
