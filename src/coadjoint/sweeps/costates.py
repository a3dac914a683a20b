"""Costates: lam_i = dL/dx_i of each sample's own loss, as mantissas and powers of two.

BaseCostates   of any network whose states follow one another: by time steps, or by layers of different widths
Costates       of a recurrence: states of one width, lying in rows
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, Unsupported, brief
from .differentiable import is_transformed
from .layout import HasLayout, Layout, check_dense
from .memory import empty
from .pointwise import nestable_jvp, vmap_error, with_quick_apply
from .rows import scale
from .run import SweepRun


class Axis(NamedTuple):
    """Along what the states of a run follow one another, in words: for charts and messages."""

    symbol: str = "t"  # the number of one
    label: str = "time t"  # of a chart's axis
    step: str = "step"  # from one to the next
    place: str = "moment"  # one of them
    number: str = "time step"  # what `symbol` counts
    through: str = "through time"
    backwards: str = "towards the past"


TIME = Axis()


@dataclass(frozen=True, eq=False)
class RecurrenceRun(HasLayout):
    """One run of a recurrence over a batch.

    x [T+1, B, n], state [B, n] (each sample's last), lengths [B], mask [T+1, B]. Padding is zero. n is the number of units
    times the slots of the cell.
    """

    layout: Layout
    run: SweepRun
    hidden: int

    @functools.cached_property
    def x(self) -> Tensor:
        return self.layout.padded_states(self.run.x)

    @property
    def states(self) -> Tensor:
        """x_0, ..., x_T: [T + 1, B, n]"""
        return self.x

    @functools.cached_property
    def state(self) -> Tensor:
        return self.layout.unsort(self.run.last)

    @property
    def visible_states(self) -> Tensor:
        """The first slot of x, [T + 1, B, hidden]"""
        return self.x[..., : self.hidden]


@with_quick_apply
class _Norm(torch.autograd.Function):
    """||x||_2 over the last axis. Below the normal range of numbers its first and second derivatives are 0, by definition."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        n = torch.linalg.vector_norm(x, 2, -1)
        if x.is_cuda or not is_within_range(
            n, 0
        ):  # squares may have left the range where the norm has not
            k = torch.frexp(x.abs().amax(-1)).exponent
            n = scale(torch.linalg.vector_norm(scale(x, -k[..., None]), 2, -1), k)
        return n

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, n = ctx.saved_tensors
        tiny = torch.finfo(n.dtype).tiny
        if n.is_cuda or not is_within_range(n, tiny):
            n, g = torch.where(n >= tiny, n, 1), torch.where(n >= tiny, g, 0)
        size, g = n[..., None], g[..., None]
        if torch.is_grad_enabled() or is_transformed():
            return x / size * g
        return torch.div(x, size, out=empty(x.shape, x)).mul_(g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        x, n = ctx.saved_tensors
        on = n >= torch.finfo(n.dtype).tiny
        return torch.where(on, (x / torch.where(on, n, 1)[..., None] * dx).sum(-1), 0)

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise vmap_error()


def is_within_range(n: Tensor, low: float) -> bool:
    """Is all of n above `low` and finite? Not for a GPU, which would have to be waited for."""
    if not n.numel():
        return True
    least, most = n.detach().aminmax()  # torch 2.11 has no forward-mode derivative of it
    return least.item() > low and most.item() < math.inf


def norm(x: Tensor) -> Tensor:
    """||x||_2 over the last axis; value, first and second derivative are 0 at 0."""
    check_dense("x", x)
    return _Norm.apply(x)


def keep_where_zero(x: Tensor, size: Tensor) -> Tensor:
    """x where its norm `size` is 0, and so has no derivatives; the constant 0 elsewhere.

    A squared norm is smooth at 0, with the second derivative 2, which size^2 does not have there. The squares of this,
    added to it, give it back; they change neither its value nor its first derivative.
    """
    flat = size.detach() < torch.finfo(size.dtype).tiny
    return torch.where(flat[..., None], x, 0)


def check_power(p: Any) -> None:
    if p not in (1, 2) or isinstance(p, bool):
        raise InputError(f"norms are those of p = 1 or 2; got p = {brief(p)}.")


class BaseCostates(ABC):
    """lam_i = mantissa_i 2^{exponent_i}, i = 0..L, of each sample's own loss.

    Costates shrink or grow exponentially with L - i, so they are kept as a mantissa of order one and a power of two:
    log-norms and ratios are exact where lam itself would be 0 or inf. Exponents are constants under differentiation.

    A kind of network supplies loss, trajectory, exponent, mantissa_at(i) and detach(), and `pull_mantissas` if its maps can be
    asked for J' lam. All else follows.
    """

    loss: Tensor  # [B]
    trajectory: Any  # the run they belong to
    axis: Axis = TIME
    sweep: SweepRun | None = None  # the recurrence's run, where there is one

    @property
    @abstractmethod
    def exponent(self) -> Tensor:
        """[L + 1, B], integers"""

    @abstractmethod
    def mantissa_at(self, i: int) -> Tensor:
        """[B, ...]: the mantissa of lam_i, of any shape"""

    @abstractmethod
    def detach(self) -> BaseCostates:
        """The same costates without their graph."""

    def pull_mantissas(self) -> Tensor:
        """J_i' mantissa_i, i = 1..L, J_i = dx_i/dx_{i-1}: [L, B, n], filled up with zeros where widths differ."""
        raise Unsupported(
            "this penalty takes the Jacobians of single steps, which this network does not give."
        )

    def at(self, i: int) -> Tensor:
        """lam_i at true scale, [B, ...]: zero or inf where the type ends."""
        mantissa, k = self.mantissa_at(i), self.exponent[i]
        return scale(mantissa, k.reshape(-1, *(1,) * (mantissa.dim() - 1)))

    @property
    def layers(self) -> Sequence[BaseCostates]:
        """Those of each layer; of a network that is one, these."""
        return (self,)

    def forwards(self) -> BaseCostates:
        """Those of the layers that read forwards, as one."""
        return self

    @property
    def uniform(self) -> bool:
        """Does every sample have all of them?"""
        return True

    @property
    def mask(self) -> Tensor:
        """[L + 1, B]: does the costate exist"""
        return torch.ones(self.exponent.shape, dtype=torch.bool, device=self.loss.device)

    @property
    def last(self) -> Tensor:
        """[B]: the number of each sample's last costate"""
        L, B = len(self.exponent) - 1, self.exponent.shape[1]
        return torch.full((B,), L, device=self.loss.device)

    def last_mantissa(self) -> Tensor:
        """[B, n]: that of each sample's last costate"""
        return self.mantissa_at(len(self.exponent) - 1).flatten(1)

    @property
    def visible_states(self) -> Tensor:
        """What others read of the states, [L + 1, B, n], filled up with zeros where widths differ."""
        return stack_padded([x.flatten(1) for x in self.trajectory.states])

    @functools.cached_property
    def size(self) -> Tensor:
        """[L + 1, B] norms of the mantissas."""
        return torch.stack(
            [norm(self.mantissa_at(i).flatten(1)) for i in range(len(self.exponent))]
        )

    @functools.cached_property
    def complete(self) -> bool:
        """Are all costates there, and none zero? On a GPU nobody looks."""
        return self.uniform and not self.size.is_cuda and is_within_range(self.size.detach(), 0)

    @functools.cached_property
    def nonzero(self) -> Tensor:
        """[L + 1, B]: does the costate exist and differ from zero"""
        return self.mask & (self.size.detach() > 0)

    def zeros(self) -> Tensor:
        """[B]: how many costates of a sample are exactly zero; logarithmic penalties leave them out."""
        return (self.mask & ~self.nonzero).sum(0)

    @functools.cached_property
    def size_1(self) -> Tensor:
        """[L + 1, B] 1-norms of the mantissas."""
        return torch.stack(
            [self.mantissa_at(i).flatten(1).abs().sum(1) for i in range(len(self.exponent))]
        )

    def norms(self, p: int = 2) -> Tensor:
        """||lam_i||_p at true scale, p = 1 or 2, [L + 1, B]; 0 where there is no costate."""
        check_power(p)
        return scale(self.size if p == 2 else self.size_1, self.exponent)

    def squared_norms(self) -> Tensor:
        """||lam_i||^2 at true scale, [L + 1, B]; 0 where there is no costate. Smooth at a zero costate, which norms() are
        not."""
        value = self.norms().square()
        return value if self.complete else value + self.squares_at_zero()

    def squares_at_zero(self) -> Tensor:
        """[L + 1, B]: the squares of the costates whose norm is zero, for their second derivatives"""
        found = []
        for i in range(len(self.exponent)):
            flat = self.mantissa_at(i).flatten(1)
            zeros = scale(keep_where_zero(flat, self.size[i]), self.exponent[i][:, None])
            found.append(zeros.square().sum(-1))
        return torch.stack(found)

    def log_norms(self) -> Tensor:
        """log ||lam_i||, [L + 1, B] float64; -inf at a zero costate, NaN where there is none."""
        value = self._log_size() + self.exponent.double() * math.log(2)
        value = torch.where(self.nonzero, value, -math.inf)
        return torch.where(self.mask, value, math.nan)

    def log_ratios(self) -> Tensor:
        """log ||lam_i|| - log ||lam_{i+1}||, [L, B] float64, from mantissas and the difference of exponents, so that it
        keeps its digits at any L; NaN where one of the two is zero or missing."""
        log, k = self._log_size(), self.exponent
        value = torch.add(log[:-1] - log[1:], k[:-1] - k[1:], alpha=math.log(2))
        return (
            value
            if self.complete
            else torch.where(self.nonzero[:-1] & self.nonzero[1:], value, math.nan)
        )

    def _log_size(self) -> Tensor:
        return torch.log(
            (self.size if self.complete else torch.where(self.nonzero, self.size, 1)).double()
        )


def stack_padded(parts: Sequence[Tensor]) -> Tensor:
    """[B, n_i] each -> [L, B, n], n the largest of the n_i, filled up with zeros: their norms stay."""
    n = max(part.shape[1] for part in parts)
    return torch.stack([pad(part, (0, n - part.shape[1])) for part in parts])


@dataclass(frozen=True, eq=False)
class Costates(BaseCostates):
    """lam_t = mantissa_t 2^{exponent_t}, t = 0..T: of a recurrence, whose states have one width."""

    trajectory: RecurrenceRun
    rows: Tensor  # mantissas [B + N, n]
    powers: Tensor  # exponents [B + N]
    loss: Tensor  # [B]

    def __repr__(self) -> str:
        T, B, n = self.trajectory.layout.rows.T, self.trajectory.layout.rows.B, self.rows.shape[1]
        return f"<Costates of {B} samples, t = 0..{T}, {n} entries; mean loss {self.loss.mean().item():.4g}>"

    def detach(self) -> Costates:
        return Costates(self.trajectory, self.rows.detach(), self.powers, self.loss.detach())

    @property
    def sweep(self) -> SweepRun:  # type: ignore[override]
        return self.trajectory.run

    @functools.cached_property
    def mantissa(self) -> Tensor:
        """[T + 1, B, n]"""
        return self.trajectory.layout.padded_states(self.rows)

    def mantissa_at(self, i: int) -> Tensor:
        return self.mantissa[i]

    @functools.cached_property
    def exponent(self) -> Tensor:
        return self.trajectory.layout.padded_states(self.powers)

    @functools.cached_property
    def lam(self) -> Tensor:
        """[T + 1, B, n] at true scale: zero or inf where the type ends."""
        return scale(self.mantissa, self.exponent[..., None])

    @property
    def uniform(self) -> bool:
        return self.trajectory.layout.rows.uniform

    @property
    def mask(self) -> Tensor:
        rows = self.trajectory.layout.rows
        if rows.uniform:
            return torch.ones(rows.T + 1, rows.B, dtype=torch.bool, device=self.rows.device)
        return self.trajectory.mask.to(self.rows.device)

    @property
    def last(self) -> Tensor:
        return self.trajectory.lengths.to(self.loss.device)

    def last_mantissa(self) -> Tensor:
        at = self.last[None, :, None].expand(1, -1, self.mantissa.shape[2])
        return self.mantissa.gather(0, at)[0]

    @property
    def visible_states(self) -> Tensor:
        return self.trajectory.visible_states

    @functools.cached_property
    def size(self) -> Tensor:
        return norm(self.mantissa)

    @functools.cached_property
    def size_1(self) -> Tensor:
        return self.mantissa.abs().sum(-1)

    def squares_at_zero(self) -> Tensor:
        zeros = scale(keep_where_zero(self.mantissa, self.size), self.exponent[..., None])
        return zeros.square().sum(-1)

    def pull_mantissas(self) -> Tensor:
        return self.trajectory.layout.padded(self.trajectory.run.pull(self.rows))
