"""RTRL: real-time recurrent learning. The influence dx_t/dtheta is carried forward in time; nothing is kept of the past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError
from ..networks.interface import Net, check_net
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, losses_and_slopes
from ..sweeps.layout import lay_out, tensor_of
from .evaluation import Evaluation, Gradient, later
from .influence import Influence
from .method import Method, check_arguments, check_streams, one_layer, trained_parameters
from .restoring import misfit
from .streams import checked, target_of


class RTRL(Method):
    """Real-time recurrent learning: the influence S_t = dx_t/dtheta is carried forward, S_t = J_t S_{t-1} + f_theta.

    The gradient of BPTT, without the past: memory does not grow with T, but is twice B x n x parameters. Any cell or step
    function; of a formula its own slopes make J_t and f_theta (co.influence), of others torch.func.
    """

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_arguments(net, batch)
        net = by_steps(net)
        layout, flat = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        rows = layout.rows
        T, B, every = rows.T, rows.B, net.readout == "every"
        u, lengths = layout.padded(flat), layout.lengths
        run_lengths = None if rows.uniform else lengths
        y = None if batch.y is None else tensor_of("the target y", batch.y)
        weight = batch.weights(u)
        with torch.no_grad():
            losses = net(u, run_lengths, batch.x0).loss(
                loss, batch.y, mask=batch.mask, reduce=batch.reduce
            )
        if every:
            mask = (
                flat.new_ones(T, B)
                if batch.mask is None
                else tensor_of("the loss mask", batch.mask).to(flat)
            )
            mask = torch.where((torch.arange(T)[:, None] < lengths).to(mask.device), mask, 0)
            count = mask.sum(0)
            factor = (
                1 / torch.where(count == 0, 1, count)
                if batch.reduce == "mean"
                else flat.new_ones(B)
            )
        else:
            mask = (
                flat.new_ones(B)
                if batch.mask is None
                else tensor_of("the loss mask", batch.mask).to(flat)
            )
            factor = mask if batch.reduce == "sum" else (mask != 0).to(flat.dtype)
        there = (mask != 0).cpu()  # as lengths are
        stream = Stream(net, B, batch.x0)
        total = {name: torch.zeros_like(p) for name, p in trained_parameters(net).items()}
        for t in range(T):
            going = lengths > t
            stream.advance(u[t], None if going.all() else going)
            counts = going & there[t] if every else (lengths == t + 1) & there
            if counts.any():
                target = None if y is None else (y[t] if every else y)
                w = weight * factor * (mask[t] if every else 1.0)
                g, *_ = stream.gradient(target, loss, counts, w)
                total = {name: total[name] + v for name, v in g.items()}
        run = lambda: net(u, run_lengths, batch.x0)
        return Evaluation(
            net, batch, losses, torch.zeros_like(losses), 0.0, total, **later(net, batch, loss, run)
        )

    def sweeps(self, net: Net, T: int) -> float:
        return 2 + sum(
            p.numel() for name, p in trained_parameters(net).items() if name not in ("V", "b_o")
        )

    def stream(self, net: Net, batch: int = 1, x0: Tensor | None = None) -> Stream:
        """Learn online: `s.step(u_t, y_t, loss)` gives one gradient for each arriving step."""
        return Stream(net, batch, x0)


def by_steps(net: Net) -> Network:
    """The network, if it can be taken one step at a time and has a linear readout; others are refused."""
    net.refuse_if_not_linear("real-time recurrent learning")
    net.refuse_if_random("real-time recurrent learning")
    return one_layer(net, "one step at a time")


class Stream:
    """`batch` streams in parallel: their states x [B, n] and influences S_t = dx_t/dtheta, {parameter: [B, n, ...]}."""

    def __init__(self, net: Net, batch: int, x0: Tensor | None = None) -> None:
        check_net(net)
        check_streams(batch)
        self.net, self.batch, self.given = by_steps(net), batch, x0
        self.names = [n for n in trained_parameters(net) if n not in ("V", "b_o")]
        self.shown = {
            name: p for name, p in trained_parameters(net).items() if name in ("V", "b_o")
        }
        self.carried = Influence(self.net, self.names, batch)
        self.t = 0
        self.kept = 0  # steps of the past
        self.reset()

    @property
    def influence(self) -> dict[str, Tensor]:
        return self.carried.of

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Start again from the initial state, all streams or the given ones."""
        index = torch.arange(self.batch) if rows is None else tensor_of("rows", rows)
        if index.is_floating_point() or index.is_complex():
            raise KindError(f"rows must be whole numbers; got {index.dtype}.")
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.batch):
            raise InputError(f"rows must lie in 0..{self.batch - 1}; got {index.tolist()}.")
        with torch.no_grad():
            start = self.net.initial_state(self.given, self.batch).clone()
            if rows is None:
                self.x = start
            self.x[index] = start[index]
            self.carried.begin(index, self.given is None)

    def advance(self, u: Tensor, going: Tensor | None = None) -> None:
        """One step of the streams that are `going`."""
        self.x = self.carried.advance(u, self.x, None if going is None else going.nonzero()[:, 0])
        self.t += 1

    def gradient(
        self,
        y: Tensor | None,
        loss: LossLike,
        counts: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Gradient, Tensor, Tensor]:
        """The gradient of (1 / B) sum of weight_j L_j over the streams that count, at their present states; the L_j, and a.

        lam_t = V' dL/da is the costate of this step's loss alone: dL/dtheta = lam_t' S_t."""
        net, index = self.net, None if counts is None else counts.nonzero()[:, 0]
        x, y = (self.x, y) if index is None else (self.x[index], None if y is None else y[index])
        with torch.no_grad():
            h = net.visible_state(x)
            a = nn.functional.linear(h, net.V, net.b_o)
            values, by_a = losses_and_slopes(loss, a, y, net.output)
            if weight is not None:
                by_a = by_a * (weight if index is None else weight[index])[:, None]
            by_a = by_a / self.batch if self.batch > 1 else by_a
            gradient = self.carried.pull(net.visible_state_transpose(by_a @ net.V), index)
            if "V" in self.shown:
                gradient["V"] = by_a.t() @ h
            if "b_o" in self.shown:
                gradient["b_o"] = by_a.sum(0)
        return gradient, values, a

    def take(self, u: Tensor, y: Any, loss: LossLike) -> tuple[Tensor, Tensor, Gradient]:
        """Take u_t [B, inputs] and y_t: what the network says, a_t [B, outputs], before it learns; the loss of each stream;
        the gradient of their mean."""
        self.advance(checked(self, u))
        gradient, losses, a = self.gradient(target_of(y, self.batch), loss)
        return a, losses, gradient

    def rest(self, loss: LossLike) -> None:
        """What a sequence that ends here has still to learn: nothing."""

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on, beside the weights."""
        return {"x": self.x, "S": self.carried.S}

    def complaint(self, state: dict[str, Tensor]) -> str | None:
        """What is wrong with a state that was read from a file; None if it can be restored."""
        return misfit(self.state(), state)

    def restore(self, state: dict[str, Tensor], t: int) -> None:
        self.x, self.t = state["x"].to(self.x), t
        self.carried.S.copy_(state["S"])

    def step(self, u: Tensor, y: Any, loss: LossLike) -> Evaluation:
        """Take u_t [B, inputs] (or [inputs] for one stream) and y_t; the gradient of this step's mean loss by all parameters."""
        u, x0 = checked(self, u), self.x.clone()
        _, losses, gradient = self.take(u, y, loss)
        y = target_of(y, self.batch)
        target = y if y is None or self.net.readout == "last" else y[None]
        batch = Batch(u[None], target, x0=x0)
        run = later(self.net, batch, loss, lambda: self.net(u[None], x0=x0))
        return Evaluation(self.net, batch, losses, torch.zeros_like(losses), 0.0, gradient, **run)
