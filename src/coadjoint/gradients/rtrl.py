"""RTRL: real-time recurrent learning, with the influence dx_t/dtheta carried forward in time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, Unsupported
from ..networks.interface import Net, check_net
from ..networks.network import Network
from ..networks.stack import Stack
from ..networks.trajectory import Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, losses_and_slopes
from ..sweeps.layout import lay_out, tensor_of
from .evaluation import Evaluation, Gradient, GradientTuple, make_evaluation
from .influence import Influence
from .method import (
    Method,
    check_arguments,
    check_stream_count,
    require_one_layer,
    trained_parameters,
)
from .restoring import misfit
from .streams import check_input, target_of

READOUT = ("V", "b_o")  # parameters that no state depends on: their gradient needs no influence


class RTRL(Method):
    """Real-time recurrent learning: the gradient of BPTT without storing the past.

    The influence S_t = dx_t/dtheta is carried forward, S_t = J_t S_{t-1} + f_theta, and the loss
    of step t adds lam_t' S_t with lam_t = V' dL_t/da. Memory does not grow with T: it is twice
    B x n x parameters. Any cell or step function works. For a cell, J_t and f_theta come from the
    derivatives of its formula (gradients/influence.py), for a step function from torch.func.

    Example: x_t = w x_{t-1} + u_t with u = (1, 0, 0), so x_3 = w^2, L = x_3^2 = w^4, dL/dw = 4 w^3.

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity")
        >>> for name, p in net.named_parameters():
        ...     _ = torch.nn.init.constant_(p, {"W": 0.5, "R": 1, "V": 1}.get(name, 0))
        >>> u = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1)
        >>> e = co.RTRL()(net, co.Batch(u, torch.zeros(1, 1)), "squared")
        >>> e.gradient["W"].item()
        0.5
    """

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient of the mean loss, forward in time."""
        check_arguments(net, batch)
        layer = steppable_layer(net)
        layout, u_rows = lay_out(batch.u, batch.lengths, layer.inputs, layer.V)
        u = layout.padded(u_rows)  # [T, B, inputs]
        lengths = layout.lengths  # computed at each access, so not inside the loop
        run_lengths = None if layout.rows.uniform else lengths

        def run() -> Trajectory:
            trajectory: Trajectory = layer(u, run_lengths, batch.x0)
            return trajectory

        with torch.no_grad():
            losses = run().loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        counted = CountedLosses(layer, batch, u, lengths)
        stream = Stream(layer, layout.rows.B, batch.x0)
        total = {name: torch.zeros_like(p) for name, p in trained_parameters(layer).items()}
        for t in range(layout.rows.T):  # from x_t to x_{t+1}
            running = lengths > t
            stream.advance(u[t], None if running.all() else running)
            counts = counted.at(t)
            if counts.any():
                target, weight = counted.target_and_weight(t)
                gradient, *_ = stream.gradient(target, loss, counts, weight)
                total = {name: total[name] + g for name, g in gradient.items()}
        result = GradientTuple(losses, torch.zeros_like(losses), total)
        return make_evaluation(layer, batch, loss, result, run)

    def sweeps(self, net: Net, T: int) -> float:
        """Return the cost of a gradient, as a multiple of one sweep over the sequence.

        Two forward sweeps, for the losses and for the states, and the product J_t S_{t-1}: it costs
        as much as a sweep for each column of S, a number in a recurrent parameter.
        """
        recurrent = [p for name, p in trained_parameters(net).items() if name not in READOUT]
        return 2 + sum(p.numel() for p in recurrent)

    def stream(self, net: Net, batch: int = 1, x0: Tensor | None = None) -> Stream:
        """Return a Stream s for online learning: `s.step(u_t, y_t, loss)` returns a gradient.

        Args:
            net: The network.
            batch: The number of streams that run in parallel, B.
            x0: Their initial state, [B, n] or [n]; the network's own if it is not given.
        """
        return Stream(net, batch, x0)


def steppable_layer(net: Net) -> Network:
    """Return `net` if it is one layer that can run step by step with a linear readout."""
    net.refuse_if_not_linear("real-time recurrent learning")
    net.refuse_if_random("real-time recurrent learning")
    if isinstance(net, Stack) and not net.layers.bidirectional:
        raise Unsupported(describe_cost(net))
    return require_one_layer(net, "one step at a time")


def describe_cost(net: Stack) -> str:
    """Return why a stack is refused: what its influence dx_t/dtheta would cost, and a way out."""
    n = sum(layer.slots * layer.hidden for layer in net.layers)
    recurrent = [p for name, p in trained_parameters(net).items() if name not in READOUT]
    P = sum(p.numel() for p in recurrent)
    return (
        f"one step at a time: {net.why_indivisible}. RTRL would carry the influence of all "
        f"parameters on all layers, {n} x {P:,} = {n * P:,} numbers for each sample, and multiply "
        f"it by a Jacobian of {n} x {n} at every step. Use {net.whole_methods}, or write the step "
        "of all layers as one function: docs/online.md shows how."
    )


class CountedLosses:
    """The losses of a batch by time step: which samples have one, their targets and weights."""

    def __init__(self, net: Network, batch: Batch, u: Tensor, lengths: Tensor) -> None:
        """From the padded inputs u [T, B, inputs] and the length of each sample, [B]."""
        T, B = u.shape[:2]
        self.every = net.readout == "every"  # or one loss for each sample, at its last step
        self.lengths = lengths
        self.y = None if batch.y is None else tensor_of("the target y", batch.y)
        if batch.mask is not None:
            mask = tensor_of("the loss mask", batch.mask).to(u)
        else:
            mask = u.new_ones((T, B) if self.every else (B,))
        if self.every:
            exists = (torch.arange(T)[:, None] < lengths).to(mask.device)
            mask = torch.where(exists, mask, 0)
        self.mask = mask
        self.counts = (mask != 0).cpu()  # on the CPU, as lengths are
        self.weight = batch.weights(u) * self._factor(batch.reduce)

    def _factor(self, reduce: str) -> Tensor:
        """Return the factor [B] of each sample's losses that follows from "sum" or "mean"."""
        if self.every and reduce == "mean":
            count = self.mask.sum(0)
            return 1 / torch.where(count == 0, 1, count)  # 1 for a sample without losses
        if self.every:  # the mask itself is applied step by step
            return self.mask.new_ones(self.mask.shape[1])
        if reduce == "sum":
            return self.mask  # the weight of the sample's one loss
        # The mean over one loss cancels its weight.
        return (self.mask != 0).to(self.mask.dtype)

    def at(self, t: int) -> Tensor:
        """Return which samples have a loss after step t + 1, [B] booleans."""
        if self.every:
            return (self.lengths > t) & self.counts[t]
        return (self.lengths == t + 1) & self.counts

    def target_and_weight(self, t: int) -> tuple[Tensor | None, Tensor]:
        """Return the targets and the weights [B] of all samples at step t + 1."""
        if not self.every:
            return self.y, self.weight
        y = None if self.y is None else self.y[t]
        return y, self.weight * self.mask[t]


class Stream:
    """Streams in parallel, with their states x [B, n] and influences S_t = dx_t/dtheta.

    Args:
        net: A co.Network with a linear readout.
        batch: The number of streams, B.
        x0: Their initial state, [B, n] or [n]; the network's own if it is not given.

    Example: x_t = w x_{t-1} + u_t from x_0 = 0. The loss of the second step is x_2^2 = w^2.

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity", readout="every")
        >>> for name, p in net.named_parameters():
        ...     _ = torch.nn.init.constant_(p, {"W": 0.5, "R": 1, "V": 1}.get(name, 0))
        >>> stream = co.Stream(net, batch=1)
        >>> for u in (1.0, 0.0):
        ...     e = stream.step(torch.tensor([u]), torch.zeros(1), "squared")
        >>> e.loss.item(), e.gradient["W"].item()
        (0.25, 1.0)
        >>> stream.influence["W"].item()  # dx_2/dw
        1.0
    """

    def __init__(self, net: Net, batch: int, x0: Tensor | None = None) -> None:
        check_net(net)
        check_stream_count(batch)
        self.net = steppable_layer(net)
        self.batch = batch
        self.x0 = x0
        parameters = trained_parameters(net)
        self.names = [name for name in parameters if name not in READOUT]
        self.trained_readout = [name for name in READOUT if name in parameters]
        self.carried = Influence(self.net, self.names, batch)
        self.t = 0
        self.kept = 0  # steps of the past that are stored: none, unlike in Windows
        self.reset()

    @property
    def influence(self) -> dict[str, Tensor]:
        """S_t = dx_t/dtheta by parameter name, [B, n, ...]."""
        return self.carried.by_name

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Return all streams to the initial state, or those with the numbers `rows`."""
        index = torch.arange(self.batch) if rows is None else tensor_of("rows", rows)
        if index.is_floating_point() or index.is_complex():
            raise KindError(f"rows must be whole numbers; got {index.dtype}.")
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.batch):
            raise InputError(f"rows must lie in 0..{self.batch - 1}; got {index.tolist()}.")
        with torch.no_grad():
            start = self.net.initial_state(self.x0, self.batch).clone()
            if rows is None:  # there may be no states yet
                self.x = start
            self.x[index] = start[index]
            self.carried.begin(index, self.x0 is None)

    def advance(self, u: Tensor, going: Tensor | None = None) -> None:
        """Take one step of all streams, or of those still `going` ([B] booleans)."""
        rows = None if going is None else going.nonzero()[:, 0]
        self.x = self.carried.advance(u, self.x, rows)
        self.t += 1

    def gradient(
        self,
        y: Tensor | None,
        loss: LossLike,
        counts: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Gradient, Tensor, Tensor]:
        """Compute the gradient of (1 / B) sum_j weight_j L_j at the present states.

        The costate of this step's loss is lam = V' dL/da, and dL/dtheta = lam' S_t.

        Args:
            y: The targets of all streams, [B, ...].
            loss: The loss.
            counts: The streams that the sum is over, [B] booleans; all if it is not given.
            weight: The weight of each stream, [B]; 1 if it is not given.

        Returns:
            The gradient by parameter name, the losses L_j and the pre-outputs a of these streams.
        """
        net = self.net
        x = self.x
        rows = None  # all streams
        if counts is not None:
            rows = counts.nonzero()[:, 0]
            x = x[rows]
            if y is not None:
                y = y[rows]
            if weight is not None:
                weight = weight[rows]
        with torch.no_grad():
            h = net.visible_state(x)
            a = nn.functional.linear(h, net.V, net.b_o)
            values, of_a = losses_and_slopes(loss, a, y, net.output)  # L_j and dL_j/da
            if weight is not None:
                of_a = of_a * weight[:, None]
            if self.batch > 1:
                of_a = of_a / self.batch
            # The influence is pulled by lam = V' dL/da; no state depends on the readout.
            gradient = self.carried.pull(net.visible_state_transpose(of_a @ net.V), rows)
            if "V" in self.trained_readout:
                gradient["V"] = of_a.t() @ h
            if "b_o" in self.trained_readout:
                gradient["b_o"] = of_a.sum(0)
        return gradient, values, a

    def take(self, u: Tensor, y: object, loss: LossLike) -> tuple[Tensor, Tensor, Gradient]:
        """Take u_t [B, inputs] and y_t; return a_t, the losses and the gradient of their mean.

        a_t [B, outputs] is the network's output before it learns from y_t.
        """
        self.advance(check_input(self, u))
        gradient, losses, a = self.gradient(target_of(y, self.batch), loss)
        return a, losses, gradient

    def rest(self, loss: LossLike) -> None:
        """Return no gradient at the end of a sequence: every step has had its own.

        Windows, which can take the place of a Stream, has steps left over here.
        """

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on besides the weights."""
        return {"x": self.x, "S": self.carried.S}

    def complaint(self, state: dict[str, Tensor]) -> str | None:
        """Say what is wrong with a state read from a file; None if it can be restored."""
        return misfit(self.state(), state)

    def restore(self, state: dict[str, Tensor], t: int) -> None:
        """Continue from a state that `complaint` accepts, after t steps."""
        self.x = state["x"].to(self.x)
        self.t = t
        self.carried.S.copy_(state["S"])

    def step(self, u: Tensor, y: object, loss: LossLike) -> Evaluation:
        """Take u_t [B, inputs] and y_t; return the Evaluation of this step's mean loss.

        One stream may leave out the first dimension of both.
        """
        u = check_input(self, u)
        x_before = self.x.clone()  # the run of the Evaluation is this one step
        _, losses, gradient = self.take(u, y, loss)
        target = target_of(y, self.batch)
        if target is not None and self.net.readout != "last":
            target = target[None]  # [T, B, ...] with T = 1
        batch = Batch(u[None], target, x0=x_before)
        result = GradientTuple(losses, torch.zeros_like(losses), gradient)
        return make_evaluation(self.net, batch, loss, result, lambda: self.net.run(batch))
