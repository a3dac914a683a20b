"""Costates: lam_t = dL/dx_t of each sample's own loss, as mantissas and powers of two."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, brief
from .differentiable import watched
from .layout import Laid, Layout, dense
from .memory import empty
from .pointwise import nested, no_vmap, quick
from .rows import scale
from .run import Stepped, Swept


@dataclass(frozen=True, eq=False)
class Passage(Laid):
    """One run of a recurrence over a batch.

    x [T+1, B, n], state [B, n] (each sample's last), lengths [B], mask [T+1, B]. Padding is zero. n is the number of units
    times the slots of the cell.
    """

    layout: Layout
    run: Swept | Stepped
    hidden: int

    @functools.cached_property
    def x(self) -> Tensor:
        return self.layout.padded_states(self.run.x)

    @functools.cached_property
    def state(self) -> Tensor:
        return self.layout.unsort(self.run.last)

    @property
    def shown(self) -> Tensor:
        """The first slot of x, [T + 1, B, hidden]"""
        return self.x[..., : self.hidden]


@quick
class _Norm(torch.autograd.Function):
    """||x||_2 over the last axis. Below the normal range of numbers its first and second derivatives are 0, by definition."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        n = torch.linalg.vector_norm(x, 2, -1)
        if x.is_cuda or not within(n, 0):  # squares may have left the range where the norm has not
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
        if n.is_cuda or not within(n, tiny):
            n, g = torch.where(n >= tiny, n, 1), torch.where(n >= tiny, g, 0)
        size, g = n[..., None], g[..., None]
        if torch.is_grad_enabled() or watched():
            return x / size * g
        return torch.div(x, size, out=empty(x.shape, x)).mul_(g)

    @staticmethod
    @nested
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        x, n = ctx.saved_tensors
        on = n >= torch.finfo(n.dtype).tiny
        return torch.where(on, (x / torch.where(on, n, 1)[..., None] * dx).sum(-1), 0)

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise no_vmap()


def within(n: Tensor, low: float) -> bool:
    """Is all of n above `low` and finite? Not for a GPU, which would have to be waited for."""
    if not n.numel():
        return True
    least, most = n.detach().aminmax()  # torch 2.11 has no forward-mode derivative of it
    return least.item() > low and most.item() < math.inf


def norm(x: Tensor) -> Tensor:
    """||x||_2 over the last axis; value, first and second derivative are 0 at 0."""
    dense("x", x)
    return _Norm.apply(x)


def at_zero(x: Tensor, size: Tensor) -> Tensor:
    """x where its norm `size` is 0, and so has no derivatives; the constant 0 elsewhere.

    A squared norm is smooth at 0, with the second derivative 2, which size^2 does not have there. The squares of this,
    added to it, give it back; they change neither its value nor its first derivative.
    """
    flat = size.detach() < torch.finfo(size.dtype).tiny
    return torch.where(flat[..., None], x, 0)


def check_power(p: Any) -> None:
    if p not in (1, 2) or isinstance(p, bool):
        raise InputError(f"norms are those of p = 1 or 2; got p = {brief(p)}.")


@dataclass(frozen=True, eq=False)
class Costates:
    """lam_t = mantissa_t 2^{exponent_t}, t = 0..T, of each sample's own loss.

    Costates shrink or grow exponentially with T - t, so they are kept as a mantissa of order one and a power of two:
    log-norms and ratios are exact where lam itself would be 0 or inf. Exponents are constants under differentiation.
    """

    trajectory: Passage
    rows: Tensor  # mantissas [B + N, n]
    powers: Tensor  # exponents [B + N]
    loss: Tensor  # [B]

    def __repr__(self) -> str:
        T, B, n = self.trajectory.layout.rows.T, self.trajectory.layout.rows.B, self.rows.shape[1]
        return f"<Costates of {B} samples, t = 0..{T}, {n} entries; mean loss {self.loss.mean().item():.4g}>"

    def detach(self) -> Costates:
        """The same costates without their graph."""
        return Costates(self.trajectory, self.rows.detach(), self.powers, self.loss.detach())

    @functools.cached_property
    def mantissa(self) -> Tensor:
        """[T + 1, B, n]"""
        return self.trajectory.layout.padded_states(self.rows)

    @functools.cached_property
    def exponent(self) -> Tensor:
        """[T + 1, B], integers"""
        return self.trajectory.layout.padded_states(self.powers)

    @functools.cached_property
    def lam(self) -> Tensor:
        """[T + 1, B, n] at true scale: zero or inf where the type ends."""
        return scale(self.mantissa, self.exponent[..., None])

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: does the costate exist"""
        rows = self.trajectory.layout.rows
        if rows.uniform:
            return torch.ones(rows.T + 1, rows.B, dtype=torch.bool, device=self.rows.device)
        return self.trajectory.mask.to(self.rows.device)

    @functools.cached_property
    def size(self) -> Tensor:
        """[T + 1, B] norms of the mantissas."""
        return norm(self.mantissa)

    @functools.cached_property
    def whole(self) -> bool:
        """Are all costates there, and none zero? On a GPU nobody looks."""
        rows = self.trajectory.layout.rows
        return rows.uniform and not self.size.is_cuda and within(self.size.detach(), 0)

    @functools.cached_property
    def nonzero(self) -> Tensor:
        """[T + 1, B]: does the costate exist and differ from zero"""
        return self.mask & (self.size.detach() > 0)

    def zeros(self) -> Tensor:
        """[B]: how many costates of a sample are exactly zero; logarithmic penalties leave them out."""
        return (self.mask & ~self.nonzero).sum(0)

    def norms(self, p: int = 2) -> Tensor:
        """||lam_t||_p at true scale, p = 1 or 2, [T + 1, B]; 0 where there is no costate."""
        check_power(p)
        size = self.size if p == 2 else self.mantissa.abs().sum(-1)
        return scale(size, self.exponent)

    def squared_norms(self) -> Tensor:
        """||lam_t||^2 at true scale, [T + 1, B]; 0 where there is no costate. Smooth at a zero costate, which norms() are not."""
        value = self.norms().square()
        if self.whole:
            return value
        zeros = scale(at_zero(self.mantissa, self.size), self.exponent[..., None])
        return value + zeros.square().sum(-1)

    def log_norms(self) -> Tensor:
        """log ||lam_t||, [T + 1, B] float64; -inf at a zero costate, NaN where there is none."""
        value = self._log_size() + self.exponent.double() * math.log(2)
        value = torch.where(self.nonzero, value, -math.inf)
        return torch.where(self.mask, value, math.nan)

    def log_ratios(self) -> Tensor:
        """log ||lam_t|| - log ||lam_{t+1}||, [T, B] float64, from mantissas and the difference of exponents, so that it
        keeps its digits at any T; NaN where one of the two is zero or missing."""
        log, k = self._log_size(), self.exponent
        value = torch.add(log[:-1] - log[1:], k[:-1] - k[1:], alpha=math.log(2))
        return value if self.whole else torch.where(self.nonzero[:-1] & self.nonzero[1:], value, math.nan)

    def _log_size(self) -> Tensor:
        return torch.log((self.size if self.whole else torch.where(self.nonzero, self.size, 1)).double())
