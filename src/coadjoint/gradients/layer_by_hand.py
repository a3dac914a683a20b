"""The gradient of a network of one recurrent layer by hand: its sweeps without torch's graph.

    L            forward ->, adjoint <-
    L + rho G    forward ->, costates <-, tangents ->, adjoint <-

torch differentiates only what is small: the loss by the outputs, and G by the costates. The sweeps
and products are those of torch's graph, in its order, so that the bits are the same. What has no
place here goes through that graph (bptt.py, penalised.py): see `can_be_by_hand`, and penalties that
read more of a run than its costates, see `ReadsRun`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..networks.chain_loss import slope_formula
from ..networks.interface import Net
from ..networks.judge import Judge
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LOSSES, LossLike, LossPoint
from ..sweeps import engines
from ..sweeps.adjoint_tangent import AdjointInputs, AdjointState, adjoint_gradient
from ..sweeps.affine import affine, compiled_affine, plus
from ..sweeps.checks import is_deferring_checks
from ..sweeps.chunks import sum_joined, sum_products, sum_rows
from ..sweeps.costates import BaseCostates, Costates, slot_columns
from ..sweeps.differentiable import Adjoint, forward_gradient
from ..sweeps.functions import is_transformed
from ..sweeps.layout import HasLayout, Layout, lay_out
from ..sweeps.norms import norm_gradient
from ..sweeps.overflow import check_range, constant
from ..sweeps.plan import Saved, SweepPlan
from ..sweeps.rows import Link
from ..sweeps.run import FormulaRun
from ..sweeps.slopes import read_values
from ..sweeps.torch_internals import autocast_is_on, is_plain_parameter, own_parameters
from .evaluation import Gradient, name_gradients

GradientById = dict[int, Tensor]
PLAIN = {"W", "R", "b", "V", "b_o"}  # no skip D, no attention, no learned x0


class ReadsRun(Exception):
    """A penalty reads the run of its costates, whose graph is not there."""


class RunWithoutStates(HasLayout):
    """The run of costates that are leaves of a graph: where they lie, and nothing else."""

    def __init__(self, layout: Layout, net: Network) -> None:
        self.layout = layout
        self.hidden = net.hidden
        self.slot_names = net.slot_names

    def slot_columns(self, names: tuple[str, ...]) -> list[slice]:
        """The entries of the slots with these names, as RecurrenceRun.slot_columns."""
        return slot_columns(self.slot_names, names, self.hidden)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise ReadsRun(attribute)


class LayerGradient:
    """The gradient of one recurrent layer for one batch, of L or of share L + rho G.

    sweep   the run over time, without a graph
    a       the pre-outputs in rows, the leaf of the loss's graph
    point   the loss at a, if it has slopes without a graph
    losses  of each sample, [B]
    """

    def __init__(self, net: Network, batch: Batch, loss: LossLike) -> None:
        # What Network.run does, without what such a network has not: see can_be_by_hand.
        cell = net.cell
        engine = engines.load(net.engine)
        own = own_parameters(net)
        V = own["V"]
        assert cell is not None
        assert engine is not None
        assert V is not None
        self.net = net
        self.batch = batch
        self.V: Tensor = V
        self.b_o: Tensor | None = own.get("b_o")
        self.layout, self.u = lay_out(batch.u, batch.lengths, net.inputs, V)
        self.rows = self.layout.rows
        self.every = net.readout == "every"
        with torch.no_grad():
            weights = net.effective_weights()
            self.input_weights = weights.input_weights
            x0 = self.layout.sort(net.initial_state(batch.x0, self.rows.B))
            plan = SweepPlan(cell, self.rows, engine)
            p = weights.p
            side, (x, a, q) = self._forward(plan, x0, weights.W, p)
            last = self.rows.last(x)
            check_range(plan, last, "the state", constant(x))
            self.sweep = FormulaRun(plan, Saved(a, side, x, p, q), weights.W, last)
            self.h = net.readout_input(self.rows, x, last)
            self.a = affine(self.rows if self.every else None, self.h, V, self.b_o)
            judge = Judge.of(net, self.layout, loss, batch.y, batch.mask, batch.reduce, V)
            self.point: LossPoint | None = None
            formula = None if self.every else slope_formula(judge)
            if formula is not None:
                self.point = formula.point(self.a, net.output)
        if self.point is not None:
            self.losses = self.layout.unsort(self.point.value)
            return
        with torch.enable_grad():
            self.losses = judge.sample_losses(self.a.requires_grad_())

    def _forward(
        self, plan: SweepPlan, x0: Tensor, W: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor | None]]:
        """What the inputs add beside W, and the forward sweep (x, a, q)."""
        from_inputs = getattr(plan.engine, "forward_from_inputs", None)
        rows = self.rows
        assert self.input_weights is not None
        (R, b), side_weights = self.input_weights
        if from_inputs is None or not compiled_affine(rows, self.u, R, b):
            base, side = self.net.drive(self.u, self.input_weights, rows)
            assert base is not None
            return side, plan.engine.forward(plan, base, side, W, x0, p)
        side = None if side_weights is None else affine(rows, self.u, *side_weights)
        return side, from_inputs(plan, self.u, R, b, side, W, x0, p)

    @functools.cached_property
    def run(self) -> Trajectory:
        """The run of the network over the batch."""
        net = self.net
        return Trajectory(
            layout=self.layout,
            run=self.sweep,
            hidden=net.hidden,
            slot_names=net.slot_names,
            network=net,
            u_rows=self.u,
            a_rows=self.a.detach(),
            V=self.V,
            b_o=self.b_o,
            extra={},
            input_weights=self.input_weights,
        )

    @staticmethod
    def of(net: Net, batch: Batch, loss: LossLike) -> LayerGradient | None:
        """The gradient of this network by hand; None if it must go through torch's graph."""
        if not isinstance(net, Network) or not can_be_by_hand(net, loss):
            return None
        return LayerGradient(net, batch, loss)

    @torch.no_grad()
    def loss_gradient(self) -> Gradient:
        """The gradient of the mean loss."""
        return self._named(self._pull(self._loss_slope(self._sample_shares()), NO_COSTATES))

    @torch.no_grad()
    def penalised_gradient(
        self,
        G: Callable[[Costates], Tensor],
        rho: float,
        share: float = 1.0,
        held: bool = False,
        with_slope: Callable[[BaseCostates], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Gradient, Tensor, Costates]:
        """The gradient of the mean of share L + rho G, the penalties [B], and the costates.

        share: 1, or 0 to leave out the loss. held: the sources of the costates are constants to the
        derivative of G. with_slope: G with its slope by norms, if there is a formula; see
        Penalty. A penalty that reads the run raises ReadsRun.
        """
        of_a = self._loss_slope(torch.ones_like(self.losses), twice=not held)
        state = self._costates(of_a.detach())
        shares = self._sample_shares()
        assert state.k is not None
        lam = Costates(self.run, state.lam, state.k, self.losses.detach())
        by_lam: Tensor | None
        by_loss: Tensor | None = None
        if with_slope is not None and lam.complete:
            penalties, slope = with_slope(lam)
            by_size = rho * shares * slope
            # All samples have the same length, and rows lie as in [T + 1, B].
            by_lam = norm_gradient(state.lam, lam.size.flatten(), by_size.flatten())
        else:
            penalties, by_lam, by_loss = self._slopes_of_penalty(G, state, rho * shares)
        by_loss = plus(shares if share else None, by_loss)
        by_costates = NO_COSTATES
        by_source = None
        if by_lam is not None and rho:
            has_source = (self.every, not self.every, False)
            by_costates = adjoint_gradient(
                self.sweep.plan, state, by_lam, None, self._moved_by_costates(held), has_source
            )
            by_source = plus(by_costates.s, by_costates.s_last)
        gradient = self._pull(self._slope_by_a(of_a, by_loss, by_source), by_costates)
        if by_source is not None:
            of_V = self._source_by_V(of_a.detach(), by_source)
            gradient[id(self.V)] = of_V + gradient.get(id(self.V), 0)
        return self._named(gradient), penalties, lam

    def _named(self, gradient: GradientById) -> Gradient:
        """The gradient by parameter name; zeros for what is missing."""
        net = self.net
        parameters = {name: p for name, p in own_parameters(net).items() if p is not None}
        for name, p in net.p.items():
            parameters[f"p.{name}"] = p
        return name_gradients(parameters, [gradient.get(id(p)) for p in parameters.values()])

    def _sample_shares(self) -> Tensor:
        """The share of each sample in the mean over samples, [B]."""
        losses = self.losses.detach()
        shares = torch.ones_like(losses) / len(losses)
        if self.batch.weight is None:
            return shares
        return shares * self.batch.weights(losses[None])

    def _loss_slope(self, seeds: Tensor, twice: bool = False) -> Tensor:
        """The slope of sum_j seeds_j L_j by the pre-outputs, in rows. twice: keep its graph."""
        if self.point is not None:
            return self.layout.sort(seeds)[:, None] * self.point.slope
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(
                self.losses, self.a, seeds, create_graph=twice, retain_graph=True
            )
        return slope

    def _slopes_of_penalty(
        self, G: Callable[[Costates], Tensor], state: AdjointState, weights: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The penalties [B], and the slopes of sum_j weights_j G_j by costates and losses."""
        assert state.k is not None
        run = RunWithoutStates(self.layout, self.net)
        with torch.enable_grad():
            rows = state.lam.detach().requires_grad_()
            losses = self.losses.detach().requires_grad_()
            penalties = G(Costates(run, rows, state.k, losses))  # type: ignore[arg-type]
            by_lam: Tensor | None
            by_loss: Tensor | None
            by_lam, by_loss = torch.autograd.grad(
                penalties, [rows, losses], weights, allow_unused=True
            )
        return penalties.detach(), by_lam, by_loss

    def _readout_states(self, y: Tensor) -> Tensor:
        """What the readout reads of states: rows of steps, [N, .], or of samples, [B, .].

        y: all states, [B + N, n], or the last ones, as the readout reads them
        """
        return self.net.visible_state(y[self.rows.B :] if self.every else y)

    def _onto_states(self, of_a: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """V' of_a as a slope by all states, [B + N, n], or by the last ones, [B, n]."""
        rows = self.rows if self.every else None
        by_h = of_a @ self.V if rows is None else affine(rows, of_a, self.V.t(), None)
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

    def _moved_by_costates(self, held: bool) -> AdjointInputs[bool]:
        """What the costates are to be differentiated by: by their sources unless these are held."""
        cell = self.sweep.plan.cell
        moved = AdjointInputs(*[False] * len(AdjointInputs._fields))
        return moved._replace(
            s=not held, s_last=not held, W=True, a=True, v=bool(cell.v), x=True, p=bool(cell.p)
        )

    def _slope_by_a(
        self, of_a: Tensor, by_loss: Tensor | None, by_source: Tensor | None
    ) -> Tensor | None:
        """The objective's slope by the pre-outputs, from those by the losses and V' of_a."""
        if by_source is None:
            return None if by_loss is None else self._loss_slope(by_loss)
        h = self._readout_states(by_source)
        change = affine(self.rows, h, self.V, None) if self.every else h @ self.V.t()
        if self.point is not None:
            bend = self.point.bend(change)
            return bend if by_loss is None else bend + self._loss_slope(by_loss)
        values = []
        seeds = []
        if by_loss is not None:
            values.append(self.losses)
            seeds.append(by_loss)
        if of_a.requires_grad:  # otherwise the loss is made of straight lines
            values.append(of_a)
            seeds.append(change)
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
            h = self.h
            rows = self.rows if self.every else None
            gradient[id(self.V)] = of_a.t() @ h if rows is None else sum_products(rows, of_a, h)
            if self.b_o is not None:
                gradient[id(self.b_o)] = of_a.sum(0) if rows is None else sum_rows(rows, of_a)
        need = (True, sweep.saved.v is not None, False, False, True)  # W: see _weights
        delta, by_v, _, _, by_p = forward_gradient(
            sweep.plan, sweep.saved, sweep.W, plus(more.x, by_x), by_last, more.a, need
        )
        assert delta is not None
        gradient |= self._weights(delta, plus(by_v, more.v), more.W)
        total_by_p = plus(by_p, more.p)
        if total_by_p is not None:
            values = net.p.values()
            for p, of_p in zip(values, total_by_p.chunk(len(net.p)), strict=True):
                gradient[id(p)] = of_p.clone()
        return gradient

    def _weights(
        self, delta: Tensor, by_v: Tensor | None, more_by_W: Tensor | None
    ) -> GradientById:
        """The gradients by W, R and b, all sums over rows.

        delta      the gradient by what W, R and b add up to, in rows
        by_v       that by what the inputs add beside W
        more_by_W  a gradient by W that comes from the costates
        """
        net = self.net
        rows = self.rows
        u = self.u
        cell = self.sweep.plan.cell
        factors: list[Tensor | None] = [u]
        if net.W is not None:
            factors.append(read_values(cell, rows.prev(self.sweep.saved.x), rows))
        if net.b is not None:
            factors.append(None)
        sums = iter(sum_joined(rows, delta, factors))
        by_R = next(sums)
        gradient: GradientById = {}
        if net.W is not None:
            by_W = plus(next(sums), more_by_W)
            assert by_W is not None
            gradient[id(net.W)] = by_W
        by_b = next(sums, None)
        if cell.driven_entries != cell.gates or cell.side:
            side_by_R = None if by_v is None else sum_products(rows, by_v, u)
            side_by_b = None if by_v is None or net.b is None else sum_rows(rows, by_v)
            by_R = self._by_entry(by_R, side_by_R)
            by_b = None if by_b is None else self._by_entry(by_b, side_by_b)
        gradient[id(net.R)] = by_R
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
    if not is_known or autocast_is_on() or is_transformed() or is_deferring_checks():
        return False
    cell = net.cell
    # torch makes another class of a network with structured weights.
    if type(net) is not Network or cell is None or cell.weights is not None or cell.given:
        return False
    own = own_parameters(net)
    if not own.keys() <= PLAIN or not net.is_linear or (net.dropout and net.training):
        return False
    if net.mask is not None or net.must_be_called() or net.engine == "autograd":
        return False
    used = [p for p in (*own.values(), *own_parameters(net.p).values()) if p is not None]
    if used[0].device.type != "cpu":
        return False
    return all(is_plain_parameter(p) and p.requires_grad for p in used)


NO_COSTATES = AdjointInputs[Tensor | None](*[None] * len(AdjointInputs._fields))
