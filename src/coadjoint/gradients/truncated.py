"""Truncated: backpropagation through windows of k2 steps, one for every k1."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, brief, whole_number
from ..networks.interface import Net, check_net
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, entry_losses
from ..sweeps.layout import lay_out, tensor_of
from .evaluation import Evaluation, Gradient, later
from .method import (
    Method,
    check_arguments,
    check_streams,
    differentiate,
    one_layer,
    trained_parameters,
)
from .restoring import misfit
from .streams import answered, checked, target_of


class Truncated(Method):
    """Truncated backpropagation through time: every k1 steps, the losses of the last k1 steps are pulled back k2 steps.

    States are carried through the whole sequence (and out of it: give `trajectory.state` as the next batch's x0); only the
    gradient is cut. k1 = k2 cuts the sequence into pieces; k1 = 1 is the most exact; k2 >= T is BPTT. Each sample is cut
    from its own first step to its own last, so its gradient does not depend on the others.
    """

    def __init__(self, k1: int, k2: int) -> None:
        counts = all(isinstance(k, int) and not isinstance(k, bool) for k in (k1, k2))
        if not counts or not 1 <= k1 <= k2:
            raise InputError(
                f"Truncated takes whole numbers 1 <= k1 <= k2; got k1={brief(k1)}, k2={brief(k2)}."
            )
        whole_number("k2", k2)
        self.k1, self.k2 = k1, k2

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_arguments(net, batch)
        net = one_layer(net, "truncated backpropagation")
        layout, flat = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        u, lengths = layout.padded(flat), layout.lengths
        with torch.no_grad():
            run = net(u, None if layout.rows.uniform else lengths, batch.x0)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        total = {name: torch.zeros_like(p) for name, p in trained_parameters(net).items()}
        for end in range(1, layout.rows.T + 1):
            whole = (
                lengths > end if end % self.k1 == 0 else torch.zeros_like(lengths, dtype=torch.bool)
            )
            index = (
                whole | (lengths == end) if net.readout == "every" else lengths == end
            ).nonzero()[:, 0]
            if len(index):
                gradient = self._window(net, batch, loss, u, lengths, run.x, index, end)
                total = {name: total[name] + g for name, g in gradient.items()}
        return Evaluation(
            net,
            batch,
            losses,
            torch.zeros_like(losses),
            0.0,
            total,
            **later(net, batch, loss, lambda: run),
        )

    def sweeps(self, net: Net, T: int) -> float:
        pulled = min(self.k2, T)
        return 1 + 2 * pulled / (min(self.k1, T) if net.readout == "every" else T)

    def _window(
        self,
        net: Network,
        batch: Batch,
        loss: LossLike,
        u: Tensor,
        lengths: Tensor,
        x: Tensor,
        index: Tensor,
        end: int,
    ) -> Gradient:
        """The gradient of the samples' losses of the last k1 steps up to `end`, pulled back k2 steps."""
        begin, fresh = max(0, end - self.k2), end - ((end - 1) % self.k1 + 1)
        start = batch.x0 if batch.x0 is None or batch.x0.dim() == 1 else batch.x0[index]
        y = None if batch.y is None else tensor_of("the target y", batch.y)
        mask = None if batch.mask is None else tensor_of("the loss mask", batch.mask)
        weight = batch.weights(u)
        with torch.enable_grad():
            run = net(u[begin:end, index], x0=start if begin == 0 else x[begin, index].detach())
            if net.readout == "last":
                y, mask = None if y is None else y[index], None if mask is None else mask[index]
                values = run.loss(loss, y, mask=mask, reduce=batch.reduce)
            else:
                full = u.new_ones(u.shape[:2]) if mask is None else mask.to(u.dtype)
                window = full[begin:end, index].clone()
                window[: fresh - begin] = 0
                values = run.loss(loss, None if y is None else y[begin:end, index], mask=window)
                if batch.reduce == "mean":
                    on = (torch.arange(len(full))[:, None] < lengths).to(full.device)
                    count = torch.where(on, full, 0).sum(0)[index]
                    values = values / torch.where(count == 0, 1, count)
            return differentiate(
                (weight[index] * values).sum() / len(lengths), trained_parameters(net)
            )

    def stream(self, net: Net, batch: int = 1, x0: Tensor | None = None) -> Windows:
        """Learn from a stream that need not end: `s.take(u_t, y_t, loss)` gives a gradient every k1 steps."""
        return Windows(net, self.k1, self.k2, batch, x0)


class Windows:
    """Truncated backpropagation of streams: every k1 steps their losses are pulled back through the last k2 steps.

    Kept are k2 steps (x_{t-1}, u_t, y_t), however long the streams are. A window is swept with the weights of its end, from
    the state that was reached at its beginning; that state is not computed again."""

    def __init__(self, net: Net, k1: int, k2: int, batch: int, x0: Tensor | None = None) -> None:
        check_net(net)
        check_streams(batch)
        if net.readout != "every":
            raise InputError(
                f"a stream is answered at every step: use readout='every', not '{net.readout}'."
            )
        net.refuse_if_random("truncated backpropagation")
        self.net, self.k1, self.batch, self.given = (
            one_layer(net, "truncated backpropagation"),
            k1,
            batch,
            x0,
        )
        self.past: deque[tuple[Tensor, Tensor, Tensor | None]] = deque(maxlen=k2)
        self.kept = k2
        self.reset()

    def reset(self) -> None:
        """Start again from the initial state."""
        with torch.no_grad():
            self.x = self.net.initial_state(self.given, self.batch).clone()
        self.past.clear()
        self.t = self.fresh = 0  # steps, and those whose loss no gradient has seen

    def take(self, u: Tensor, y: Any, loss: LossLike) -> tuple[Tensor, Tensor, Gradient | None]:
        """Take u_t and y_t: a_t, the loss of each stream, and every k1 steps the gradient of the sum of their means."""
        u, y = checked(self, u), target_of(y, self.batch)
        self.past.append((self.x, u, y))
        with torch.no_grad():
            self.x = self.net.advance(u, self.x)
            a = answered(self.net, self.x, u)
            losses = entry_losses(loss, a, y, self.net.output)
        self.t, self.fresh = self.t + 1, self.fresh + 1
        return a, losses, self.rest(loss) if self.fresh == self.k1 else None

    def rest(self, loss: LossLike) -> Gradient | None:
        """The gradient of the losses that no gradient has seen, pulled back k2 steps; None if there are none."""
        if not self.fresh:
            return None
        (x, *_), k = self.past[0], len(self.past)
        u, ys = torch.stack([u for _, u, _ in self.past]), [y for *_, y in self.past]
        mask = u.new_zeros(k, self.batch)
        mask[k - self.fresh :] = 1
        self.fresh = 0
        with torch.enable_grad():
            run = self.net(u, x0=self.given if self.t == k else x)
            y = None if ys[0] is None else torch.stack(ys)  # type: ignore[arg-type]
            return differentiate(run.loss(loss, y, mask=mask).mean(), trained_parameters(self.net))

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on, beside the weights."""
        found = {"x": self.x, "fresh": torch.tensor(self.fresh)}
        for name, parts in zip(
            ("past.x", "past.u", "past.y"), zip(*self.past, strict=True), strict=False
        ):
            found |= {} if parts[0] is None else {name: torch.stack(parts)}
        return found

    def complaint(self, state: dict[str, Tensor]) -> str | None:
        """What is wrong with a state that was read from a file; None if it can be restored."""
        y = state.get("past.y")
        k = len(state["past.x"]) if "past.x" in state and state["past.x"].dim() else 0
        expected = {"x": self.x, "fresh": torch.tensor(0)}
        if any(name.startswith("past.") for name in state):
            u = self.x.new_empty(k, self.batch, self.net.inputs, device="meta")
            expected |= {"past.x": self.x.new_empty(k, *self.x.shape, device="meta"), "past.u": u}
        if y is not None:
            expected["past.y"] = y
        if wrong := misfit(expected, state):
            return wrong
        if y is not None and tuple(y.shape[:2]) != (k, self.batch):
            return f"'past.y' has shape {list(y.shape)}; expected [{k}, {self.batch}, ...]"
        most = self.kept
        if k > most or not 0 <= int(state["fresh"]) <= k:
            return f"it keeps {k} steps, {int(state['fresh'])} of them new; expected at most {most}, and no more new ones"
        return None

    def restore(self, state: dict[str, Tensor], t: int) -> None:
        self.reset()
        self.x, self.t, self.fresh = state["x"].to(self.x), t, int(state["fresh"])
        if "past.x" in state:
            x, u = (state[name].to(self.x) for name in ("past.x", "past.u"))
            y = state["past.y"].to(self.x.device) if "past.y" in state else [None] * len(x)
            self.past.extend(zip(x, u, y, strict=True))
