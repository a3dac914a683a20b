"""Truncated: backpropagation through windows of k2 steps, one for every k1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import InputError, brief, whole_number
from ..networks.interface import Net, check_net
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, entry_losses
from ..sweeps.layout import lay_out, tensor_of
from .evaluation import Evaluation, Gradient, GradientTuple, make_evaluation
from .method import (
    Method,
    check_arguments,
    check_stream_count,
    differentiate,
    require_one_layer,
    trained_parameters,
)
from .restoring import misfit
from .streams import check_input, pre_outputs, target_of


class Truncated(Method):
    """Truncated backpropagation through time.

    Every k1 steps, the losses of the last k1 steps are backpropagated through the last k2 steps.
    States are carried through the whole sequence, and beyond it if `trajectory.state` is passed as
    x0 of the next batch. Only the gradient is cut. k1 = k2 cuts the sequence into separate windows,
    k1 = 1 is the most exact choice, and k2 >= T is BPTT. The windows of a sample are counted from
    its own first step and end at its own last, so its gradient does not depend on other samples.

    Example: x_t = w x_{t-1} + u_t with u = (1, 0, 0) and L = x_3^2. One step back, x_2 = w is a
    constant, and the gradient is 2 x_3 x_2 = 2 w^3 instead of 4 w^3.

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity")
        >>> for name, p in net.named_parameters():
        ...     _ = torch.nn.init.constant_(p, {"W": 0.5, "R": 1, "V": 1}.get(name, 0))
        >>> u = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1)
        >>> batch = co.Batch(u, torch.zeros(1, 1))
        >>> [co.Truncated(1, k2)(net, batch, "squared").gradient["W"].item() for k2 in (1, 3)]
        [0.25, 0.5]
    """

    def __init__(self, k1: int, k2: int) -> None:
        are_counts = all(isinstance(k, int) and not isinstance(k, bool) for k in (k1, k2))
        if not are_counts or not 1 <= k1 <= k2:
            raise InputError(
                f"Truncated takes whole numbers 1 <= k1 <= k2; got k1={brief(k1)}, k2={brief(k2)}."
            )
        whole_number("k2", k2)
        self.k1 = k1
        self.k2 = k2

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the sum of the gradients of all windows."""
        check_arguments(net, batch)
        layer = require_one_layer(net, "truncated backpropagation")
        layout, u_rows = lay_out(batch.u, batch.lengths, layer.inputs, layer.V)
        u = layout.padded(u_rows)  # [T, B, inputs]
        lengths = layout.lengths
        with torch.no_grad():
            run = layer(u, None if layout.rows.uniform else lengths, batch.x0)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        total = {name: torch.zeros_like(p) for name, p in trained_parameters(layer).items()}
        for end in range(1, layout.rows.T + 1):  # the step that a window ends with
            ends_here = lengths == end
            window_ends = ends_here
            if layer.readout == "every" and end % self.k1 == 0:
                window_ends = ends_here | (lengths > end)  # every k1 steps, and at its own end
            samples = window_ends.nonzero()[:, 0]
            if len(samples):
                window = Window(end, self.k1, self.k2, samples)
                gradient = window.gradient(layer, batch, loss, u, lengths, run.x)
                total = {name: total[name] + g for name, g in gradient.items()}
        result = GradientTuple(losses, torch.zeros_like(losses), total)
        return make_evaluation(layer, batch, loss, result, lambda: run)

    def sweeps(self, net: Net, T: int) -> float:
        """Return the cost of a gradient, as a multiple of one sweep over T steps.

        One forward sweep for the states, and for each window a forward and an adjoint sweep over
        its k2 steps. A window ends every k1 steps, or at T alone with readout "last".
        """
        window = min(self.k2, T)
        between_windows = min(self.k1, T) if net.readout == "every" else T
        return 1 + 2 * window / between_windows

    def stream(self, net: Net, batch: int = 1, x0: Tensor | None = None) -> Windows:
        """Return Windows s for online learning: `s.take(u_t, y_t, loss)` gives gradients.

        There is one every k1 steps.

        Args:
            net: The network.
            batch: The number of streams that run in parallel, B.
            x0: Their initial state, [B, n] or [n]; the network's own if it is not given.
        """
        return Windows(net, self.k1, self.k2, batch, x0)


class Window:
    """One window of some samples: steps begin + 1, ..., end, with new losses after `fresh`.

    begin    the step whose state the window starts from, k2 before its end
    fresh    the last step whose loss an earlier window has counted
    samples  the numbers of the samples, [b]
    """

    def __init__(self, end: int, k1: int, k2: int, samples: Tensor) -> None:
        self.begin = max(0, end - k2)
        # The last multiple of k1 before `end`, since windows end at multiples of k1. Only the last
        # window of a sample may end between them.
        self.fresh = end - ((end - 1) % k1 + 1)
        self.end = end
        self.samples = samples

    def gradient(
        self, net: Network, batch: Batch, loss: LossLike, u: Tensor, lengths: Tensor, x: Tensor
    ) -> Gradient:
        """Compute the gradient of this window's part of the mean loss.

        Args:
            net: The network.
            batch: All samples, for their targets, masks and weights.
            loss: The loss.
            u: The inputs [T, B, inputs], padded.
            lengths: The length of each sample, [B].
            x: The states [T + 1, B, n].
        """
        weight = batch.weights(u)[self.samples]
        steps = slice(self.begin, self.end)
        with torch.enable_grad():
            run = net.run(Batch(u[steps, self.samples], x0=self._start(batch, x)))
            if net.readout == "last":
                values = self._last_losses(run, batch, loss)
            else:
                values = self._step_losses(run, batch, loss, u, lengths)
            objective = (weight * values).sum() / len(lengths)
            return differentiate(objective, trained_parameters(net))

    def _start(self, batch: Batch, x: Tensor) -> Tensor | None:
        """Return the state that the window begins with; a learned x0 stays in the graph."""
        if self.begin > 0:
            return x[self.begin, self.samples].detach()
        if batch.x0 is None or batch.x0.dim() == 1:
            return batch.x0
        return batch.x0[self.samples]

    def _last_losses(self, run: Trajectory, batch: Batch, loss: LossLike) -> Tensor:
        """Return the losses [b] with readout "last"."""
        y = None if batch.y is None else tensor_of("the target y", batch.y)[self.samples]
        mask = None
        if batch.mask is not None:
            mask = tensor_of("the loss mask", batch.mask)[self.samples]
        return run.loss(loss, y, mask=mask, reduce=batch.reduce)

    def _step_losses(
        self, run: Trajectory, batch: Batch, loss: LossLike, u: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return the losses [b] of the steps after `fresh`, with readout "every"."""
        steps = slice(self.begin, self.end)
        y = None
        if batch.y is not None:
            y = tensor_of("the target y", batch.y)[steps, self.samples]
        mask = u.new_ones(u.shape[:2])
        if batch.mask is not None:
            mask = tensor_of("the loss mask", batch.mask).to(u.dtype)
        window_mask = mask[steps, self.samples].clone()
        window_mask[: self.fresh - self.begin] = 0  # losses that an earlier window has counted
        values = run.loss(loss, y, mask=window_mask)
        if batch.reduce == "mean":
            # The mean is over all steps of a sample, not over those of this window.
            exists = (torch.arange(len(mask))[:, None] < lengths).to(mask.device)
            count = torch.where(exists, mask, 0).sum(0)[self.samples]
            values = values / torch.where(count == 0, 1, count)  # 0 / 1 without any losses
        return values


class Windows:
    """Truncated backpropagation of endless streams.

    Every k1 steps, the losses of these steps are backpropagated through the last k2 steps. Only k2
    steps (x_{t-1}, u_t, y_t) are kept, however long the streams are. A window is swept with the
    present weights, from the state that was reached at its beginning with the weights of that time.

    Args:
        net: A network of one layer with readout "every".
        k1: The steps between gradients.
        k2: The steps to backpropagate each loss.
        batch: The number of streams that run in parallel, B.
        x0: Their initial state, [B, n] or [n]; the network's own if it is not given.
    """

    def __init__(self, net: Net, k1: int, k2: int, batch: int, x0: Tensor | None = None) -> None:
        check_net(net)
        check_stream_count(batch)
        if net.readout != "every":
            raise InputError(
                f"a stream has an output at every step: use readout='every', not '{net.readout}'."
            )
        net.refuse_if_random("truncated backpropagation")
        self.net = require_one_layer(net, "truncated backpropagation")
        self.k1 = k1
        self.batch = batch
        self.x0 = x0
        self.past: deque[tuple[Tensor, Tensor, Tensor | None]] = deque(maxlen=k2)
        self.kept = k2  # the most steps of the past that are stored
        self.reset()

    def reset(self) -> None:
        """Return all streams to the initial state and forget the past."""
        with torch.no_grad():
            self.x = self.net.initial_state(self.x0, self.batch).clone()
        self.past.clear()
        self.t = 0
        self.fresh = 0  # steps whose loss no gradient has counted yet

    def take(self, u: Tensor, y: object, loss: LossLike) -> tuple[Tensor, Tensor, Gradient | None]:
        """Take u_t and y_t; return a_t, the loss of each stream and, every k1 steps, a gradient.

        The gradient is that of the sum over the k1 steps of the mean loss of the streams.
        """
        u = check_input(self, u)
        target = target_of(y, self.batch)
        self.past.append((self.x, u, target))
        with torch.no_grad():
            self.x = self.net.advance(u, self.x)
            a = pre_outputs(self.net, self.x, u)
            losses = entry_losses(loss, a, target, self.net.output)
        self.t += 1
        self.fresh += 1
        gradient = self.rest(loss) if self.fresh == self.k1 else None
        return a, losses, gradient

    def rest(self, loss: LossLike) -> Gradient | None:
        """Return the gradient of the losses not counted so far; None if there are none.

        They are backpropagated through all stored steps, at most k2.
        """
        if not self.fresh:
            return None
        steps = len(self.past)
        x, _, first_y = self.past[0]
        u = torch.stack([u for _, u, _ in self.past])
        y = None
        if first_y is not None:
            y = torch.stack([y for _, _, y in self.past if y is not None])
        mask = u.new_zeros(steps, self.batch)
        mask[steps - self.fresh :] = 1
        self.fresh = 0
        # As long as the window reaches back to the first step, a learned x0 has a gradient: it is
        # in the graph if the network is given x0, not the state that was stored.
        start = self.x0 if self.t == steps else x
        with torch.enable_grad():
            run = self.net.run(Batch(u, x0=start))
            objective = run.loss(loss, y, mask=mask).mean()
            return differentiate(objective, trained_parameters(self.net))

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on besides the weights."""
        tensors = {"x": self.x, "fresh": torch.tensor(self.fresh)}
        if self.past:
            xs, us, ys = zip(*self.past, strict=True)
            tensors["past.x"] = torch.stack(xs)
            tensors["past.u"] = torch.stack(us)
            if ys[0] is not None:
                tensors["past.y"] = torch.stack(ys)
        return tensors

    def complaint(self, state: dict[str, Tensor]) -> str | None:
        """Say what is wrong with a state read from a file; None if it can be restored."""
        y = state.get("past.y")
        steps = 0  # of the past that it holds
        if "past.x" in state and state["past.x"].dim():
            steps = len(state["past.x"])
        expected = {"x": self.x, "fresh": torch.tensor(0)}
        if any(name.startswith("past.") for name in state):  # device "meta": shapes without memory
            expected["past.x"] = self.x.new_empty(steps, *self.x.shape, device="meta")
            shape = (steps, self.batch, self.net.inputs)
            expected["past.u"] = self.x.new_empty(shape, device="meta")
        if y is not None:  # a target may have any type, and its shape is checked below
            expected["past.y"] = y
        if wrong := misfit(expected, state):
            return wrong
        if y is not None and tuple(y.shape[:2]) != (steps, self.batch):
            return f"'past.y' has shape {list(y.shape)}; expected [{steps}, {self.batch}, ...]"
        fresh = int(state["fresh"])
        if steps > self.kept or not 0 <= fresh <= steps:
            return (
                f"it holds {steps} steps, {fresh} of them new; expected at most {self.kept} "
                f"steps, 0 to {steps} of them new"
            )
        return None

    def restore(self, state: dict[str, Tensor], t: int) -> None:
        """Continue from a state that `complaint` accepts, after t steps."""
        self.reset()
        self.x = state["x"].to(self.x)
        self.t = t
        self.fresh = int(state["fresh"])
        if "past.x" not in state:
            return
        xs = state["past.x"].to(self.x)
        us = state["past.u"].to(self.x)
        ys: Iterable[Tensor | None] = [None] * len(xs)
        if "past.y" in state:
            ys = state["past.y"].to(self.x.device)
        self.past.extend(zip(xs, us, ys, strict=True))
