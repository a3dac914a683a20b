"""What one segment of a sequence needs and leaves behind: states, costates and tangents at its boundaries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, Unsupported
from ..networks.judge import Judge
from ..networks.network import Network
from ..sweeps.costates import Costates, norm
from ..sweeps.layout import Layout
from ..sweeps.overflow import check_range
from ..sweeps.plan import Saved, SweepPlan, settle_checks
from ..sweeps.rows import Rows

if TYPE_CHECKING:
    from .segments import SegmentedGradient


class CostateNorms(Costates):
    """Costates of which only numbers of single steps are known: norms, log-norms, log-ratios, exponents."""

    name: str

    def __init__(self, trajectory: Any, name: str, at: AllSteps, loss: Tensor) -> None:
        known = {"trajectory": trajectory, "name": name, "loss": loss, **at._asdict()}
        self.__dict__.update(known)

    @property
    def rows(self) -> Tensor:
        raise unkept(self.name, "the entries of the costates (lam, mantissa)")

    powers = rows

    @property
    def mask(self) -> Tensor:
        return self.trajectory.mask.to(self.size.device)

    def squared_norms(self) -> Tensor:
        """By the norms alone: nobody takes a second derivative of these."""
        return self.norms().square()

    def __repr__(self) -> str:
        return f"<CostateNorms of costates, t = 0..{len(self.size) - 1}>"


class TrajectoryWithoutStates:
    """A trajectory whose states are not kept."""

    def __init__(self, net: Network, layout: Layout, u: Tensor, name: str) -> None:
        self.network, self.layout, self.inputs, self._name = net, layout, u, name
        self.lengths, self.mask = layout.lengths, layout.mask

    def __getattr__(self, attribute: str) -> Any:
        raise unkept(self._name, f"trajectory.{attribute}")


def unkept(name: str, what: str) -> Unsupported:
    return Unsupported(
        f"penalty '{name}' reads {what}, and with segments only numbers of single steps are known of all steps at once: "
        "norms(), squared_norms(), log_norms(), log_ratios(), exponent. States and costates would take the memory that segments save. "
        "Use a penalty of these (log-ratio, variance, ...), or leave out segments."
    )


class SegmentRun(NamedTuple):
    """One segment, forwards."""

    plan: SweepPlan
    saved: Saved
    u: Tensor  # step rows

    @property
    def rows(self) -> Rows:
        return self.plan.rows


class LossSource(NamedTuple):
    """What the loss says to the states of one segment, at every step."""

    judge: Judge
    pre: Tensor  # a = V h + b_o, a leaf
    value: Tensor  # of each row that counts
    of_pre: Tensor  # dL/da
    s: Tensor  # [B + N, n]


class SegmentCostates(NamedTuple):
    """A segment's costates."""

    lam: Tensor  # mantissas
    delta: Tensor
    k: Tensor


def verify(plan: SweepPlan, end: Tensor, what: str, states: Callable[[], Tensor]) -> None:
    """A segment is asked for its checks before it is gone."""
    check_range(plan, end, what, states)
    settle_checks(plan)


def detached(y: Any) -> Any:
    return None if y is None else y.detach()


class AllSteps(NamedTuple):
    """What is known of the costates of all steps."""

    size: Tensor  # [T + 1, B] norms of mantissas
    size_1: Tensor  # 1-norms
    exponent: Tensor


Crossing = list[
    Any
]  # (mantissa, exponent) of J' lam at the beginning of each segment; (None, None) past the last


class NormSlopes:
    """dObjective / d(norms of mantissas), [T + 1, B] each."""

    def __init__(self, layout: Layout, of_size: Tensor | None, of_size_1: Tensor | None) -> None:
        rows = lambda y: None if y is None else torch.cat([layout.sort(y[0]), layout.flat(y[1:])])
        self.of_size, self.of_size_1 = rows(of_size), rows(of_size_1)
        self.zero = of_size is None and of_size_1 is None

    def pull(self, lam: Tensor, rows: Rows, whole: Rows) -> Tensor:
        """-> dObjective / dmantissa of a segment; for the states it begins with only where they are x_0."""
        first = whole.starts[rows.begin]
        cut = lambda y: (
            pad(y[whole.B + first : whole.B + first + rows.N], (rows.B, 0))
            if first
            else y[: len(lam)]
        )
        with torch.enable_grad():
            leaf = lam.detach().requires_grad_()
            found = [(norm, self.of_size), (lambda y: y.abs().sum(-1), self.of_size_1)]
            pairs = [(size(leaf), cut(g)) for size, g in found if g is not None]
            (out,) = torch.autograd.grad([y for y, _ in pairs], leaf, [g for _, g in pairs])
        return out


class LastStates:
    """The readout at each sample's last state, for all samples at once; for readout "every" only the losses."""

    def __init__(self, of: SegmentedGradient, last: Tensor, total: Tensor | None) -> None:
        self.of, self.judge, net = of, of.judge, of.net
        self.last = last.requires_grad_(total is None)
        self.of_start: Tensor | None = None
        self.of_V: Tensor | None = None
        self.of_b_o: Tensor | None = None
        self.s: Tensor | None = None
        if total is not None:
            self.losses = of.layout.unsort(self.judge.apply_reduction(total))
            return
        with torch.enable_grad():
            self.V, self.b_o = (
                net.V.detach().requires_grad_(),
                None if net.b_o is None else net.b_o.detach().requires_grad_(),
            )
            self.losses = self.judge.sample_losses(
                net.read_states(of.layout, self.last, self.last, self.V, self.b_o)
            )
            if not self.losses.requires_grad:
                raise InputError(
                    "the loss does not depend on the states of this trajectory: it has no costates."
                )

    @functools.cached_property
    def source(self) -> Tensor | None:
        """dL/dx at the last state, with its graph; None for readout "every"."""
        if self.judge.every:
            return None
        with torch.enable_grad():
            return torch.autograd.grad(self.losses.sum(), self.last, create_graph=True)[0]

    @property
    def s_last(self) -> Tensor | None:
        return detached(self.source)

    def share(self, of_loss: Tensor) -> Tensor:
        """d/d(a sample's summed loss), in the rows' order."""
        return (
            self.judge.apply_reduction(self.judge.layout.sort(of_loss))
            if self.judge.every
            else of_loss
        )

    def pull(self, of_loss: Tensor, of_source: Tensor | None) -> Tensor | None:
        """The gradient by the last states; that by V and b_o is kept."""
        if self.judge.every:
            return None
        seeds = [(self.losses, of_loss)]
        if of_source is not None and self.source is not None and self.source.requires_grad:
            seeds.append((self.source, of_source))
        leaves = [y for y in (self.last, self.V, self.b_o) if y is not None]
        with torch.enable_grad():
            grads = torch.autograd.grad(
                [y for y, _ in seeds], leaves, [g for _, g in seeds], allow_unused=True
            )
        self.of_V, self.of_b_o = grads[1], grads[2] if self.b_o is not None else None
        return grads[0]
