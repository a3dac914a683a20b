"""The gradient of a network of one recurrent layer by hand: its sweeps without torch's graph.

    L            forward ->, adjoint <-
    L + rho G    forward ->, costates <-, tangents ->, adjoint <-

torch differentiates only what is small: the loss by the outputs, and G by the costates. The sweeps
and products are those of torch's graph, in its order, so that the bits are the same. What has no
place here goes through that graph (bptt.py, penalised.py): see `can_be_by_hand`, and penalties that
read more of a run than its costates, see `ReadsRun`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from ..networks.interface import Net
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LOSSES, LossLike
from ..sweeps.adjoint_tangent import AdjointInputs, AdjointState, adjoint_gradient
from ..sweeps.affine import affine, plus
from ..sweeps.chunks import sum_products, sum_rows
from ..sweeps.costates import Costates, slot_columns
from ..sweeps.differentiable import Adjoint, forward_gradient
from ..sweeps.functions import is_transformed
from ..sweeps.layout import HasLayout, Layout
from ..sweeps.rows import Link
from ..sweeps.run import FormulaRun
from ..sweeps.torch_internals import autocast_is_on, named_parameters

GradientById = dict[int, Tensor]


class ReadsRun(Exception):
    """A penalty reads the run of its costates, whose graph is not there."""


class RunWithoutStates(HasLayout):
    """The run of costates that are leaves of a graph: where they lie, and nothing else."""

    def __init__(self, run: Trajectory) -> None:
        self.layout: Layout = run.layout
        self.hidden = run.hidden
        self.slot_names = run.slot_names

    def slot_columns(self, names: tuple[str, ...]) -> list[slice]:
        """The entries of the slots with these names, as RecurrenceRun.slot_columns."""
        return slot_columns(self.slot_names, names, self.hidden)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise ReadsRun(attribute)


class LayerGradient:
    """The gradient of one recurrent layer for one batch, of L or of share L + rho G.

    run     of the network, without a graph
    a       its pre-outputs in rows, the leaf of the loss's graph
    losses  of each sample, [B], with that graph
    """

    def __init__(self, net: Network, batch: Batch, loss: LossLike) -> None:
        self.net = net
        self.batch = batch
        with torch.no_grad():
            self.run = net.run(batch)
        sweep = self.run.run
        assert isinstance(sweep, FormulaRun)
        self.sweep = sweep
        self.rows = sweep.plan.rows
        self.every = net.readout == "every"
        judge = self.run.judge(loss, batch.y, batch.mask, batch.reduce)
        with torch.enable_grad():
            self.a = self.run.a_rows.detach().requires_grad_()
            self.losses = judge.sample_losses(self.a)

    @staticmethod
    def of(net: Net, batch: Batch, loss: LossLike) -> LayerGradient | None:
        """The gradient of this network by hand; None if it must go through torch's graph."""
        if not isinstance(net, Network) or not can_be_by_hand(net, loss):
            return None
        return LayerGradient(net, batch, loss)

    def loss_gradient(self) -> GradientById:
        """The gradient of the mean loss, by the id of each parameter."""
        with torch.enable_grad():
            (of_a,) = torch.autograd.grad(self.batch.mean(self.losses), self.a)
        with torch.no_grad():
            return self._pull(of_a, NO_COSTATES)

    def penalised_gradient(
        self,
        G: Callable[[Costates], Tensor],
        objective: Callable[[Tensor, Tensor], Tensor],
        held: bool = False,
    ) -> tuple[GradientById, Tensor, Costates]:
        """The gradient of the mean of objective(L, G), the penalties [B], and the costates.

        held: the sources of the costates are constants to the derivative of G. A penalty that reads
        the run raises ReadsRun.
        """
        with torch.enable_grad():
            (of_a,) = torch.autograd.grad(
                self.losses.sum(), self.a, create_graph=not held, retain_graph=True
            )
        with torch.no_grad():
            state = self._costates(of_a.detach())
        assert state.k is not None
        with torch.enable_grad():
            rows = state.lam.detach().requires_grad_()
            leaves = Costates(RunWithoutStates(self.run), rows, state.k, self.losses)  # type: ignore[arg-type]
            penalties = G(leaves)
            mean = self.batch.mean(objective(self.losses, penalties))
            by_lam, by_loss = torch.autograd.grad(
                mean, [rows, self.losses], allow_unused=True, retain_graph=True
            )
        by_costates = NO_COSTATES
        by_source = None
        with torch.no_grad():
            if by_lam is not None:
                by_costates = self._pull_costates(state, by_lam, held)
                by_source = plus(by_costates.s, by_costates.s_last)
            gradient = self._pull(self._slope_by_a(of_a, by_loss, by_source), by_costates)
            if by_source is not None:
                gradient[id(self.net.V)] += self._source_by_V(of_a.detach(), by_source)
        lam = Costates(self.run, state.lam, state.k, self.losses.detach())
        return gradient, penalties.detach(), lam

    def _readout_states(self, y: Tensor) -> Tensor:
        """What the readout reads of states: rows of steps, [N, .], or of samples, [B, .].

        y: all states, [B + N, n], or the last ones, as the readout reads them
        """
        return self.net.visible_state(y[self.rows.B :] if self.every else y)

    def _onto_states(self, of_a: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """V' of_a as a slope by all states, [B + N, n], or by the last ones, [B, n]."""
        rows = self.rows if self.every else None
        V = self.net.V
        by_h = of_a @ V if rows is None else affine(rows, of_a, V.t(), None)
        by_x = self.net.visible_state_transpose(by_h)
        if self.every:
            return pad(by_x, (0, 0, self.rows.B, 0)), None
        return None, by_x

    def _costates(self, of_a: Tensor) -> AdjointState:
        """The costates of the loss whose slope by the pre-outputs is of_a."""
        sweep = self.sweep
        s, s_last = self._onto_states(of_a)
        declared = None
        if self.every:
            declared = self.run.states_with_loss(self.batch.mask, of_a)
        lam, delta, k = Adjoint.apply(
            sweep.plan, True, None, declared, s, s_last, None, sweep.W, *sweep.saved
        )
        link = Link.between(self.rows, k, lam.dtype)
        return AdjointState(link, declared, sweep.W, sweep.saved, lam, delta, k)

    def _pull_costates(
        self, state: AdjointState, by_lam: Tensor, held: bool
    ) -> AdjointInputs[Tensor | None]:
        """The objective's slopes by what the costates were computed from, by those by them."""
        cell = self.sweep.plan.cell
        need = AdjointInputs(
            plan=False,
            scaled=False,
            factor=False,
            declared=False,
            s=not held,
            s_last=not held,
            sa=False,
            W=True,
            a=True,
            v=bool(cell.v),
            x=True,
            p=bool(cell.p),
            q=False,
        )
        has_source = (self.every, not self.every, False)
        return adjoint_gradient(self.sweep.plan, state, by_lam, None, need, has_source)

    def _slope_by_a(
        self, of_a: Tensor, by_loss: Tensor | None, by_source: Tensor | None
    ) -> Tensor | None:
        """The objective's slope by the pre-outputs, from those by the losses and V' of_a."""
        values = []
        seeds = []
        if by_loss is not None:
            values.append(self.losses)
            seeds.append(by_loss)
        if by_source is not None and of_a.requires_grad:
            h = self._readout_states(by_source)
            rows = self.rows if self.every else None
            values.append(of_a)
            seeds.append(h @ self.net.V.t() if rows is None else affine(rows, h, self.net.V, None))
        if not values:
            return None
        (slope,) = torch.autograd.grad(values, self.a, seeds)
        return slope

    def _source_by_V(self, of_a: Tensor, by_source: Tensor) -> Tensor:
        """The slope by V of the costates' source V' of_a."""
        h = self._readout_states(by_source)
        if self.every:
            return sum_products(self.rows, h, of_a).t()
        return of_a.t() @ h

    def _pull(self, of_a: Tensor | None, more: AdjointInputs[Tensor | None]) -> GradientById:
        """The gradient by the id of each parameter.

        of_a  the objective's slope by the pre-outputs; None for zeros
        more  its slopes by what the costates were computed from
        """
        gradient: GradientById = {}
        net = self.net
        sweep = self.sweep
        by_x = None
        by_last = None
        if of_a is not None:
            by_x, by_last = self._onto_states(of_a)
            h = net.readout_input(self.rows, sweep.x, sweep.last)
            rows = self.rows if self.every else None
            gradient[id(net.V)] = of_a.t() @ h if rows is None else sum_products(rows, of_a, h)
            if net.b_o is not None:
                gradient[id(net.b_o)] = of_a.sum(0) if rows is None else sum_rows(rows, of_a)
        need = (True, sweep.saved.v is not None, True, False, True)
        delta, by_v, by_W, _, by_p = forward_gradient(
            sweep.plan, sweep.saved, sweep.W, plus(more.x, by_x), by_last, more.a, need
        )
        assert delta is not None
        total_by_W = plus(by_W, more.W)
        if net.W is not None and total_by_W is not None:
            gradient[id(net.W)] = total_by_W
        gradient |= self._input_weights(delta, plus(by_v, more.v))
        total_by_p = plus(by_p, more.p)
        if total_by_p is not None:
            values = net.p.values()
            for p, of_p in zip(values, total_by_p.chunk(len(net.p)), strict=True):
                gradient[id(p)] = of_p.clone()
        return gradient

    def _input_weights(self, delta: Tensor, by_v: Tensor | None) -> GradientById:
        """The gradients by R and b from those by what the inputs add to the steps."""
        net = self.net
        rows = self.rows
        u = self.run.u_rows
        cell = self.sweep.plan.cell
        by_R = sum_products(rows, delta, u)
        by_b = None if net.b is None else sum_rows(rows, delta)
        if cell.driven_entries != cell.gates or cell.side:
            side_by_R = None if by_v is None else sum_products(rows, by_v, u)
            side_by_b = None if by_v is None or net.b is None else sum_rows(rows, by_v)
            by_R = self._by_entry(by_R, side_by_R)
            by_b = None if by_b is None else self._by_entry(by_b, side_by_b)
        gradient = {id(net.R): by_R}
        if net.b is not None and by_b is not None:
            gradient[id(net.b)] = by_b
        return gradient

    def _by_entry(self, base: Tensor, side: Tensor | None) -> Tensor:
        """The blocks of R or b, from those of the gates and of the side entries."""
        cell = self.sweep.plan.cell
        blocks = dict(zip(cell.gates, base.split(self.net.hidden), strict=True))
        if side is not None:  # replaces gates that the inputs reach beside W r(x)
            blocks.update(zip(cell.side_entries, side.split(self.net.hidden), strict=True))
        return torch.cat([blocks[entry] for entry in cell.driven_entries])


def can_be_by_hand(net: Network, loss: LossLike) -> bool:
    """Whether sweeps and products are all there is between the parameters and the outputs.

    Not by hand are networks on a GPU (captured.py), step functions, weights that are masked,
    structured, frozen or made by the cell, a learned x0, cells that are given data, dropout,
    summaries, hidden layers and a skip in the readout. A loss of the user's own may read the
    weights. Hooks and transforms of torch's want its graph.
    """
    is_known = isinstance(loss, str) or any(loss is known for known in LOSSES.values())
    if not is_known or autocast_is_on() or is_transformed():
        return False
    cell = net.cell
    if cell is None or cell.weights is not None or cell.given or net.mask is not None:
        return False
    if type(net) is not Network or net.V.device.type != "cpu" or net.engine == "autograd":
        return False
    if not net.is_linear or hasattr(net, "D") or (net.dropout and net.training):
        return False
    raw = (net.W, net.R, net.b, net.V, net.b_o)
    if isinstance(net.x0, Parameter) or not all(y is None or type(y) is Parameter for y in raw):
        return False
    return not net.must_be_called() and all(p.requires_grad for _, p in named_parameters(net))


NO_COSTATES = AdjointInputs[Tensor | None](*[None] * len(AdjointInputs._fields))
