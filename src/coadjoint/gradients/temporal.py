"""Temporal: the gradient by time step: the contributions of single steps to that of W, R and b."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cells.cell import Cell
from ..errors import InputError, Unsupported, brief
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..sweeps import slopes
from ..sweeps.costates import Costates
from ..sweeps.layout import Layout, check_dense
from ..sweeps.plan import Saved
from ..sweeps.rows import scale

if TYPE_CHECKING:
    from .evaluation import Evaluation, Gradient

CHUNK = 256  # steps whose Gram matrices are held at a time


@dataclass(frozen=True, eq=False)
class Temporal:
    """The terms grad_t of the gradient with respect to W, R and b, for t = 1..T, in float64.

        W:  sum over samples of delta_t r(x_{t-1})'
        R:  sum over samples of delta_t u_t'
        b:  sum over samples of delta_t

    The sum of grad_t over t is the gradient with respect to W, R and b as the formula uses them: to
    a structured W itself, not to its raw parameter.

    Norms come from Gram matrices over the samples of a step,
    ||sum_b d_b r_b'||^2 = sum_{b,c} (d_b . d_c) (r_b . r_c), so no array of T matrices is made.
    """

    network: Network
    layout: Layout
    into_W: Tensor  # delta [N, gates d], of the mean over samples
    into_v: Tensor  # delta at the rows of R and b [N, entries d]
    r: Tensor | None  # r(x_{t-1}) [N, reads d]; None if the cell has no W
    u: Tensor  # [N, inputs]

    @staticmethod
    def of(e: Evaluation) -> Temporal:
        """Return the components of an evaluation of one recurrent layer with a formula."""
        net = layer_of(e)
        trajectory, lam = run_and_costates(e)
        run = trajectory.run.formula
        layout = trajectory.layout
        if run is None:
            raise Unsupported(
                "temporal components need the cell's formula: use engine 'cpu' or 'reference', "
                "not a step function or engine 'autograd'."
            )
        rows = layout.rows
        weights = layout.sort(e.batch.weights(lam.mantissa))
        return Temporal.of_rows(
            net,
            layout,
            run.plan.cell,
            run.saved,
            run.W is not None,
            trajectory.u_rows,
            lam.rows[rows.B :],
            lam.powers[rows.B :],
            weights / rows.B,
        )

    @staticmethod
    @torch.no_grad()
    def of_rows(
        net: Network,
        layout: Layout,
        cell: Cell,
        saved: Saved,
        has_W: bool,
        u: Tensor,
        mantissa: Tensor,
        powers: Tensor,
        weights: Tensor,
    ) -> Temporal:
        """Return the components of a sequence, or of a segment of it, from its step rows.

        Args:
            net: The network.
            layout: Of the rows.
            cell: The formula that was swept.
            saved: What the forward sweep has saved.
            has_W: Whether the cell has a W.
            u: The inputs, [N, inputs].
            mantissa: Of the costates lam_1 .. lam_T, [N, n].
            powers: Their exponents, [N].
            weights: What each sample's loss counts in the mean, [B] in the rows' order.
        """
        rows = layout.rows
        x_before = rows.prev(saved.x)
        wrt = ("a", "v") if cell.side_entries else ("a",)
        pull = slopes.step_map(cell).pulled(("x",), wrt)
        known_values = (saved.x[rows.B :], saved.q)  # of the step, not to be computed again
        # lam_t pulled back to a_t and v_t, as mantissas.
        pulled = pull(known_values, saved.a, saved.v, x_before, saved.p, mantissa)
        weight_of_row = weights[rows.sample][:, None]

        def at_true_scale(y: Tensor) -> Tensor:
            # y 2^powers, weighted as in the gradient of the mean loss. In float64: the distant
            # past may lie far below what float32 can hold.
            return scale(y.double(), powers[:, None]) * weight_of_row

        of_a = pulled["a"]
        if of_a is None:  # no step depends on a
            of_a = torch.zeros_like(saved.a)
        delta = at_true_scale(of_a)
        of_v = pulled.get("v")
        side = None if of_v is None else at_true_scale(of_v)
        into_v = net.input_gradient_rows(delta, side)
        r = None
        if has_W:
            r = slopes.read_values(cell, x_before).detach().double()
        return Temporal(
            net, layout, delta.detach().double(), into_v.detach().double(), r, u.detach().double()
        )

    @staticmethod
    def with_exponents(e: Evaluation) -> tuple[Temporal, list[int]]:
        """Return grad_t 2^{-m_t} and m_1..m_T, m_t the largest exponent of a costate at step t.

        The costates lam_t = mantissa 2^power are replaced by lam_t 2^{-m_t}. The scaled components
        neither underflow nor overflow, however far the costates decay.
        """
        layer_of(e)  # refuses several layers
        trajectory, lam = run_and_costates(e)
        powers_by_step = trajectory.layout.rows.states(lam.powers)
        largest = [int(powers.max()) for powers in powers_by_step]
        largest_of_row = []
        for powers, m in zip(powers_by_step, largest, strict=True):
            largest_of_row.append(torch.full_like(powers, m))
        scaled_powers = lam.powers - torch.cat(largest_of_row)
        scaled = Costates(lam.trajectory, lam.rows, scaled_powers, lam.loss)
        scaled_evaluation = replace(e, run=lambda: e.trajectory, adjoint=lambda _: scaled)
        return Temporal.of(scaled_evaluation), largest[1:]  # without that of lam_0

    def norms(self) -> dict[str, Tensor]:
        """Compute ||grad_t||, [T], for each of W, R, b and for all jointly, under "joint"."""
        padded = self.layout.padded  # rows -> [T, B, .]
        into_W = padded(self.into_W)
        into_v = padded(self.into_v)
        r = None if self.r is None else padded(self.r)
        u = padded(self.u)
        squares: dict[str, list[Tensor]] = {"R": []}
        if self.network.b is not None:
            squares["b"] = []
        if r is not None:
            squares["W"] = []
        for begin in range(0, len(u), CHUNK):
            here = slice(begin, begin + CHUNK)
            gram_v = gram(into_v[here])
            squares["R"].append((gram_v * gram(u[here])).sum((1, 2)))
            if self.network.b is not None:
                squares["b"].append(gram_v.sum((1, 2)))
            if r is not None and self.network.mask is None:
                squares["W"].append((gram(into_W[here]) * gram(r[here])).sum((1, 2)))
            elif r is not None:
                # A mask does not pass through Gram matrices, so each matrix is made.
                steps = range(begin + 1, begin + 1 + len(r[here]))
                of_W = [self.at(t)["W"].square().sum() for t in steps]
                squares["W"].append(torch.stack(of_W))
        # Rounding may leave a small negative number.
        totals = {name: torch.cat(values).clamp(min=0) for name, values in squares.items()}
        totals["joint"] = torch.stack(list(totals.values())).sum(0)
        return {name: value.sqrt() for name, value in totals.items()}

    def at(self, t: int) -> Gradient:
        """Compute grad_t by W, R and b for one step t in 1..T."""
        T = self.layout.rows.T
        if not isinstance(t, int) or isinstance(t, bool) or not 1 <= t <= T:
            raise InputError(f"t must lie in 1..{T}; got {brief(t)}.")
        starts = self.layout.rows.starts
        here = slice(starts[t - 1], starts[t])
        return self._products(self.into_W[here], self.into_v[here], here)

    def weighted(self, w: Tensor) -> Gradient:
        """Compute sum_t w_t grad_t by W, R and b, with weights w [T]."""
        rows = self.layout.rows
        if tuple(check_dense("w", w).shape) != (rows.T,):
            raise InputError(
                f"w has shape {list(w.shape)}; expected one weight for each step, [{rows.T}]."
            )
        weight_of_row = w.to(self.into_v)[rows.time.to(w.device) - 1][:, None]
        everywhere = slice(None)
        return self._products(self.into_W * weight_of_row, self.into_v * weight_of_row, everywhere)

    def _products(self, into_W: Tensor, into_v: Tensor, here: slice) -> Gradient:
        """Return the sums over rows that make up the gradient: delta r', delta u' and delta.

        Args:
            into_W: delta of these rows, by which r(x_{t-1}) is multiplied.
            into_v: delta of these rows at the rows of R and b.
            here: Where these rows are in `r` and `u`.
        """
        gradient = {"R": into_v.T @ self.u[here]}
        if self.network.b is not None:
            gradient["b"] = into_v.sum(0)
        if self.r is not None:
            of_W = into_W.T @ self.r[here]
            mask = self.network.mask
            gradient["W"] = of_W if mask is None else of_W * mask.double()
        return gradient


def gram(y: Tensor) -> Tensor:
    """Return the inner products of the samples at each step, [T, B, k] -> [T, B, B]."""
    return y @ y.transpose(1, 2)


def layer_of(e: Evaluation) -> Network:
    """Return the one recurrent layer of an evaluation; networks of several are refused."""
    layer = e.network.one_layer
    if layer is None:
        raise Unsupported(
            "temporal components need a network of one recurrent layer: use a co.Network."
        )
    return layer


def run_and_costates(e: Evaluation) -> tuple[Trajectory, Costates]:
    """Return the run and the costates of an evaluation of one recurrent layer."""
    trajectory = e.trajectory
    lam = e.costates
    assert isinstance(trajectory, Trajectory)
    assert isinstance(lam, Costates)
    return trajectory, lam
