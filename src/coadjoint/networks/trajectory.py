"""Trajectory: the run of a Network over a batch, its outputs and its costates.

lam_t = dL/dx_t,  t = 0..T,  L the loss of each sample
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..objectives import losses
from ..objectives.losses import LossLike
from ..sweeps.costates import Costates, RecurrenceRun
from ..sweeps.layout import check_dense, tensor_of
from ..sweeps.torch_internals import forward_mode, forward_mode_is_on, innermost_transform
from .effective_weights import InputWeights, without_biases
from .interface import holds_source
from .judge import RunOutputs
from .readout import Extra

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .captured_runs import Recordings
    from .network import Network


class LossSources(NamedTuple):
    """The loss of each sample and its direct derivatives by the states: what an adjoint needs."""

    loss: Tensor  # [B]
    s: Tensor | None  # by all states, [B + N, n]
    s_last: Tensor | None  # by each sample's last state, [B, n]

    def held(self) -> LossSources:
        """The same with derivatives that are constants: without a graph, and without tangents."""
        s = None if self.s is None else self.s.detach()
        s_last = None if self.s_last is None else self.s_last.detach()
        return LossSources(self.loss, s, s_last)


def leaf_copy(h: Tensor) -> Tensor:
    """The values of h as a new leaf, at which a graph can begin.

    Under forward-mode differentiation it keeps the tangent of h.
    """
    if forward_mode_is_on():
        return h + torch.zeros_like(h).requires_grad_()  # detach() would drop the tangent
    return h.detach().requires_grad_()


@dataclass(frozen=True, eq=False)
class Trajectory(RecurrenceRun, RunOutputs):
    """One run of a Network over a batch.

    u        [T, B, inputs], after dropout
    x        [T + 1, B, n], the states from x_0 on; n is the number of units times slots of the cell
    a, y_hat [B, outputs], or [T, B, outputs] with readout "every"
    state    [B, n], each sample's last state, which the next call may take as x0
    lengths  [B]; mask [T + 1, B] is true where a state exists. Padding is zero.

    Example:
        A linear network with one unit, x_t = x_{t-1} / 2 + u_t, has lam_t = (1/2)^(T - t):

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity", bias=False)
        >>> net = net.requires_grad_(False)
        >>> _ = net.W.fill_(0.5), net.R.fill_(1.0), net.V.fill_(1.0)
        >>> run = net(torch.ones(3, 1, 1))
        >>> run.x.flatten().tolist()
        [0.0, 1.0, 1.5, 1.75]
        >>> run.costates(lambda y_hat, y: y_hat[:, 0], torch.zeros(1, 1)).lam.flatten().tolist()
        [0.125, 0.25, 0.5, 1.0]
    """

    network: Network
    u_rows: Tensor  # [N, inputs]
    a_rows: Tensor  # [B, outputs] in the order of the rows, or [N, outputs]
    V: Tensor  # the weights of this run, which stay as they are when the network is trained on
    b_o: Tensor | None
    extra: Extra
    input_weights: InputWeights | None  # of a replayed run without biases
    input_mask: Tensor | None = None  # the dropout mask of the inputs, [N, inputs]
    recordings: Recordings | None = None  # what may be captured of it and replayed

    def __repr__(self) -> str:
        rows = self.layout.rows
        entries = self.run.x.shape[1]
        return (
            f"<Trajectory of {rows.B} samples, T = {rows.T}, {entries} state entries, "
            f"readout {self.network.readout!r}>"
        )

    @property
    def readout_input(self) -> Tensor:
        """The visible states the readout reads, in rows: of all steps, or each sample's last."""
        return self.network.readout_input(self.layout.rows, self.run.x, self.run.last)

    def read_states(self, x: Tensor, last: Tensor) -> Tensor:
        """The pre-outputs a, in rows, of other states in place of this run's own."""
        return self.network.read_states(
            self.layout, x, last, self.V, self.b_o, self.u_rows, self.extra
        )

    def costates(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
        hold: str | None = None,
    ) -> Costates:
        """lam_t = dL/dx_t of each sample's own loss; arguments as in `loss`.

        The costates are differentiable, for penalties, if gradients or tangents are being taken.
        With hold="source", the loss's own derivative by each state that the readout reads is a
        constant in their derivatives. The loss of the costates, `lam.loss`, is differentiable as
        ever.
        """
        held = holds_source(hold)
        if self.recordings is not None and mask is None:
            replayed = self.recordings.replay_costates(self, loss, y, reduce, hold)
            if replayed is not None:
                return replayed
        is_given = isinstance(loss, Tensor)  # values [B], not a function of y_hat
        under_torch_func = innermost_transform() is not None
        has_graph = self.run.x.requires_grad or self.a_rows.requires_grad
        differentiable = (
            (torch.is_grad_enabled() and has_graph) or forward_mode_is_on() or under_torch_func
        )
        loss_of = functools.partial(self.loss_from_rows, loss, y, mask, reduce)
        if under_torch_func and not is_given:
            sources = self._sources_by_func(loss_of)
        else:
            reuse_graph = is_given or (differentiable and self.run.x.requires_grad)
            sources = self._sources_by_autograd(loss_of, reuse_graph, differentiable, held)
        if held:
            sources = sources.held()
        # A loss given as values may read any state; any other reads those of steps that count.
        states_with_loss = None
        if self.network.readout == "every" and sources.s is not None and not is_given:
            states_with_loss = self.states_with_loss(mask, sources.s)
        with torch.set_grad_enabled(differentiable):
            costate = self.run.costate(sources.s, sources.s_last, states_with_loss)
        value = sources.loss if differentiable else sources.loss.detach()
        replay = None if self.recordings is None else self.recordings.replay_penalty
        return Costates(self, costate.mantissa, costate.exponent, value, replay=replay)

    def _sources_by_func(self, loss_of: Callable[[Tensor], Tensor]) -> LossSources:
        """The sources inside a transform of torch.func, which does not allow leaves of our own.

        loss_of: pre-outputs in rows -> the loss of each sample, [B].
        """

        def loss_of_states(h: Tensor) -> Tensor:
            # The readout reads either all states or the last ones; h is in both places.
            return loss_of(self.read_states(h, h))

        if self.network.reads_all_steps:
            value, pull, *_ = torch.func.vjp(loss_of_states, self.run.x)
            return LossSources(value, pull(torch.ones_like(value))[0], None)
        value, pull, *_ = torch.func.vjp(loss_of_states, self.run.last)
        return LossSources(value, None, pull(torch.ones_like(value))[0])

    def _sources_by_autograd(
        self,
        loss_of: Callable[[Tensor], Tensor],
        reuse_graph: bool,
        differentiable: bool,
        held: bool,
    ) -> LossSources:
        """The sources by torch.autograd.

        loss_of         pre-outputs in rows -> the loss of each sample, [B]
        reuse_graph     differentiate through the graph of this run; otherwise the readout is
                        evaluated again from copies of the states, at which its graph begins
        differentiable  record the derivative, so that it can be differentiated again; or, if it
                        is held, keep the graph of the loss
        held            the derivative will be a constant
        """
        with torch.enable_grad():
            if reuse_graph:
                x = self.run.x
                last = self.run.last
                a_rows = self.a_rows
            else:
                x = leaf_copy(self.run.x)
                last = leaf_copy(self.run.last)
                a_rows = self.read_states(x, last)
            value = loss_of(a_rows)
            if not value.requires_grad or not x.requires_grad:
                raise InputError(
                    "the loss does not depend on the states of this trajectory, "
                    "so it has no costates."
                )
            s, s_last = torch.autograd.grad(
                value.sum(),
                [x, last],
                create_graph=differentiable and not held,
                retain_graph=differentiable,
                allow_unused=True,
            )
        if s is None and s_last is None:
            raise InputError(
                "the loss does not depend on the states of this trajectory but on other tensors. "
                "Compute it from this trajectory's y_hat, a or x."
            )
        return LossSources(value, s, s_last)

    def states_with_loss(self, mask: Tensor | None, like: Tensor) -> Tensor:
        """[B + N], true for the states that the loss reads: those of steps that count, not x_0.

        mask [T, B] is zero at the steps that do not count; None: all do. like: of the device.
        """
        rows = self.layout.rows
        counts = torch.ones(rows.N, dtype=torch.bool, device=like.device)
        if mask is not None:
            counts = self.layout.flat(tensor_of("the loss mask", mask, like)) != 0
        return torch.cat([counts.new_zeros(rows.B), counts])

    def push(self, du: Tensor) -> Tensor:
        """DF(u) du, the change of y_hat along a change du of the inputs, shaped like y_hat.

        Differentiable. du has the shape of u. It changes, one after the other, the states x, the
        readout's features z, its pre-outputs a = V z + D u + b_o and y_hat = phi(a).
        """
        if check_dense("the direction du", du).shape != self.u.shape:
            raise InputError(
                f"the direction du has shape {list(du.shape)}; expected the shape of u, "
                f"{list(self.u.shape)}."
            )
        net = self.network
        rows = self.layout.rows
        du_rows = self.layout.flat(du)
        if self.input_mask is not None:
            du_rows = du_rows * self.input_mask
        change_of_drive = net.drive(du_rows, without_biases(self.input_weights))
        dx = self.run.push(*change_of_drive)

        def features(x: Tensor) -> Tensor:
            """What V multiplies, from all states x [B + N, n]."""
            h = net.readout_input(rows, x, rows.last(x))
            return net.readout_features(rows, h, self.extra)

        if net.is_linear:  # then features(x + dx) = features(x) + features(dx)
            dz = features(dx)
        else:
            with forward_mode():
                dz = torch.func.jvp(features, (self.run.x,), (dx,))[1]
        da = dz @ self.V.T
        if "D" in self.extra:
            da = da + net.at_outputs(rows, du_rows) @ self.extra["D"].T
        phi = losses.output_function(net.output)
        with forward_mode():
            dy_hat = torch.func.jvp(phi, (self.a_rows,), (da,))[1]
        return self._from_rows(dy_hat)
