"""Temporal: the gradient of the loss by W, R and b, taken apart into the contributions of the time steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError, Unsupported, brief
from ..networks.network import Network
from ..sweeps import slopes
from ..sweeps.costates import Costates
from ..sweeps.layout import Layout, check_dense
from ..sweeps.rows import scale

if TYPE_CHECKING:
    from .evaluation import Evaluation, Gradient

CHUNK = 256  # steps whose Gram matrices are held at a time


@dataclass(frozen=True, eq=False)
class Temporal:
    """grad_t = sum over samples of delta_t r(x_{t-1})' for W, delta_t u_t' for R, delta_t for b; sum_t grad_t is the gradient
    by W, R and b as the formula takes them (a structured W, not its raw parameter).

    All of it is float64. Norms come from Gram matrices of the batch, ||sum_b d_b r_b'||^2 = sum_{b,c} (d_b . d_c)(r_b . r_c): no array of T matrices.
    """

    network: Network
    layout: Layout
    into_W: Tensor  # [N, g d], of the mean over samples
    into_v: Tensor  # [N, g d]
    r: Tensor | None  # [N, k d]
    u: Tensor  # [N, inputs]

    @staticmethod
    def of(e: Evaluation) -> Temporal:
        net = layer_of(e)
        lam = e.costates
        run, layout = lam.trajectory.run.formula, lam.trajectory.layout
        if run is None:
            raise Unsupported(
                "temporal components need the cell's formula: use engine 'cpu' or 'reference', not a step function or engine 'autograd'."
            )
        cell, rows, saved = run.plan.cell, layout.rows, run.saved
        with torch.no_grad():
            mantissa, k = lam.rows[rows.B :], lam.powers[rows.B :, None]
            op = slopes.step_map(cell).pulled(("x",), ("a", "v") if cell.side_entries else ("a",))
            back = op(
                (saved.x[rows.B :], saved.q),
                saved.a,
                saved.v,
                rows.prev(saved.x),
                saved.p,
                mantissa,
            )
            share = layout.sort(e.batch.weights(lam.mantissa))[rows.sample][:, None] / rows.B
            true_scale = lambda y: (
                scale(y.double(), k) * share
            )  # the past may lie far below what float32 can hold
            delta = true_scale(back["a"] if back["a"] is not None else torch.zeros_like(saved.a))
            side = back.get("v")
            into_v = net.input_gradient_rows(delta, None if side is None else true_scale(side))
            r = slopes.read_values(cell, rows.prev(saved.x)) if run.W is not None else None
            arrays = (
                None if y is None else y.detach().double()
                for y in (delta, into_v, r, e.trajectory.u_rows)
            )
            return Temporal(net, layout, *arrays)  # type: ignore[arg-type]

    @staticmethod
    def with_exponents(e: Evaluation) -> tuple[Temporal, list[int]]:
        """The components in units of their own, grad_t 2^{-m_t} with m_t the largest exponent of a costate at step t, so that
        they hold at any scale; and m_1..m_T."""
        layer_of(e)  # refuses several
        lam = e.costates
        parts = lam.trajectory.layout.rows.states(lam.powers)
        tops = [int(part.max()) for part in parts]
        unit = torch.cat([torch.full_like(part, m) for part, m in zip(parts, tops, strict=True)])
        near = Costates(lam.trajectory, lam.rows, lam.powers - unit, lam.loss)
        return Temporal.of(replace(e, run=lambda: e.trajectory, adjoint=lambda _: near)), tops[1:]

    def norms(self) -> dict[str, Tensor]:
        """||grad_t||, [T] float64, for W, R, b (those the network has) and for all of them jointly ("joint")."""
        squares: dict[str, list[Tensor]] = {}
        masked, T = self.network.mask is not None, self.layout.rows.T
        wide = [
            None if y is None else self.layout.padded(y)
            for y in (self.into_W, self.into_v, self.r, self.u)
        ]
        for begin in range(0, T, CHUNK):
            dw, dv, r, u = (None if y is None else y[begin : begin + CHUNK] for y in wide)
            gram = lambda y: y @ y.transpose(1, 2)  # of the samples, at each step
            assert dw is not None and dv is not None and u is not None  # noqa: PT018
            each = gram(dv)
            found = {"R": (each * gram(u)).sum((1, 2))}
            if self.network.b is not None:
                found["b"] = each.sum((1, 2))
            if r is not None and masked:
                steps = range(begin + 1, begin + 1 + len(r))
                found["W"] = torch.stack([self.at(t)["W"].square().sum() for t in steps])
            elif r is not None:
                found["W"] = (gram(dw) * gram(r)).sum((1, 2))
            for name, value in found.items():
                squares.setdefault(name, []).append(value.clamp(min=0))
        out = {name: torch.cat(values) for name, values in squares.items()}
        out["joint"] = torch.stack(list(out.values())).sum(0)
        return {name: value.sqrt() for name, value in out.items()}

    def at(self, t: int) -> Gradient:
        """grad_t itself, for one step t in 1..T."""
        if not isinstance(t, int) or isinstance(t, bool) or not 1 <= t <= self.layout.rows.T:
            raise InputError(f"t must lie in 1..{self.layout.rows.T}; got {brief(t)}.")
        dw, dv, r, u = self._step(t)
        out = {"R": dv.T @ u}
        if self.network.b is not None:
            out["b"] = dv.sum(0)
        if r is not None:
            out["W"] = (
                dw.T @ r if self.network.mask is None else (dw.T @ r) * self.network.mask.double()
            )
        return out

    def weighted(self, w: Tensor) -> Gradient:
        """sum_t w_t grad_t, by W, R and b; w [T]."""
        rows = self.layout.rows
        if tuple(check_dense("w", w).shape) != (rows.T,):
            raise InputError(
                f"there is one weight for each of {rows.T} time steps; got shape {list(w.shape)}."
            )
        each = w.to(self.into_v)[rows.time.to(w.device) - 1][:, None]
        of_v = self.into_v * each
        out = {"R": of_v.T @ self.u}
        if self.network.b is not None:
            out["b"] = of_v.sum(0)
        if self.r is not None:
            W = (self.into_W * each).T @ self.r
            out["W"] = W if self.network.mask is None else W * self.network.mask
        return out

    def _step(self, t: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        rows = self.layout.rows
        here = slice(rows.starts[t - 1], rows.starts[t])
        return (
            self.into_W[here].double(),
            self.into_v[here].double(),
            None if self.r is None else self.r[here].double(),
            self.u[here].double(),
        )


def layer_of(e: Evaluation) -> Network:
    """The one layer whose gradient is taken apart; several are refused."""
    layer = e.network.one_layer
    if layer is None:
        raise Unsupported("temporal components are those of one layer: use a co.Network.")
    return layer
