"""Network -> Trajectory -> Costates.

x_t   = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p)     t = 1..T
a     = V h + D u + b_o,  y_hat = phi(a)           h what the cell shows of x, at the last step, at every step or of all steps
lam_t = dL/dx_t                                    t = 0..T, each sample's own loss, positive
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import pad
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from . import cells, losses, parametrisations, sweeps
from .cells import Activation, Cell, Uniform
from .errors import InputError, KindError, Unsupported, choose, insist
from .losses import LossLike, Output
from .sweeps import Choice, Plan, Rows, Stepped, Swept, scale
from .sweeps.derivatives import affine, ensure, watched
from .sweeps.memory import empty
from .sweeps.pointwise import nested, no_vmap, quick
from .sweeps.rows import equal

DTYPES = (torch.float32, torch.float64)
HALF = "parameters are float32 or float64; got {}. Half precision loses what second derivatives live on."
Weights = tuple[Tensor, Tensor | None]
Entering = tuple[Weights, Weights | None]
Sequences = Tensor | PackedSequence | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Layout:
    """How samples of different lengths lie in flat rows (see sweeps.rows)."""

    rows: Rows
    order: np.ndarray | None  # the sample of each sorted position; None if nothing was moved

    @staticmethod
    def of(lengths: Sequence[int] | None, T: int, B: int) -> Layout:
        if lengths is None or min(lengths) == T:
            return Layout(equal(T, B), None)
        n = np.array(lengths)
        order = np.argsort(-n, kind="stable")
        return Layout(Rows((n > np.arange(T)[:, None]).sum(1).tolist()), order)

    @property
    def dense(self) -> bool:
        """Are rows [T, B, .] as they stand?"""
        return self.rows.uniform and self.order is None

    @property
    def sample(self) -> Tensor:
        """The user's sample of each row of a step array."""
        return self.rows.sample if self.order is None else torch.from_numpy(self.order[self.rows.index.sample])

    @functools.cached_property
    def inverse(self) -> np.ndarray | None:
        return None if self.order is None else np.argsort(self.order)

    def flat(self, y: Tensor) -> Tensor:
        """[T, B, ...] -> [N, ...]; what stands beyond a sample's length is not read."""
        if self.dense:
            return y.flatten(0, 1)
        return y[(self.rows.time - 1).to(y.device), self.sample.to(y.device)]

    def sort(self, y: Tensor) -> Tensor:
        """Samples [B, ...] into the order of the rows."""
        return y if self.order is None else y.index_select(0, torch.from_numpy(self.order).to(y.device))

    def unsort(self, y: Tensor) -> Tensor:
        return y if self.inverse is None else y.index_select(0, torch.from_numpy(self.inverse).to(y.device))

    def padded(self, y: Tensor, fill: float = 0) -> Tensor:
        """Step rows [N, ...] -> [T, B, ...]."""
        T, B = self.rows.T, self.rows.B
        if self.dense:
            return y.unflatten(0, (T, B))
        index = ((self.rows.time - 1) * B + self.sample).to(y.device)
        return y.new_full((T * B, *y.shape[1:]), fill).index_copy(0, index, y).unflatten(0, (T, B))

    def padded_states(self, x: Tensor, fill: float = 0) -> Tensor:
        """State rows [B + N, ...] -> [T + 1, B, ...]."""
        B = self.rows.B
        if self.dense:
            return x.unflatten(0, (self.rows.T + 1, B))
        return torch.cat([self.unsort(x[:B])[None], self.padded(x[B:], fill)])

    @property
    def lengths(self) -> Tensor:
        n = self.rows.lengths
        return n if self.inverse is None else n[torch.from_numpy(self.inverse)]

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: does the state exist"""
        return torch.arange(self.rows.T + 1)[:, None] <= self.lengths


@dataclass(frozen=True, eq=False)
class Judge:
    """A loss and what it compares with, in rows: those of the samples (readout "last") or of their steps ("every")."""

    network: Network
    layout: Layout
    loss: LossLike
    y: Tensor | None
    weight: Tensor | None  # of each row; those of weight zero are left out
    reduce: str

    @staticmethod
    def of(
        net: Network, layout: Layout, loss: LossLike, y: Any, mask: Tensor | None, reduce: str, like: Tensor
    ) -> Judge:
        """Arguments as in `Trajectory.loss`, checked; like: an array of the network's type."""
        every, B, T = net.readout == "every", layout.rows.B, layout.rows.T
        choose("reduce", reduce, ("sum", "mean"))
        lead = (T, B) if every else (B,)
        if y is not None:
            y = torch.as_tensor(y, device=like.device)
            if tuple(y.shape[: len(lead)]) != lead:
                raise InputError(
                    f"the target y has shape {list(y.shape)}; with readout='{net.readout}' it must begin with {list(lead)}"
                    + (" ([T, B, ...], time-major)." if every else " (one for each sample).")
                )
            y = layout.flat(y) if every else layout.sort(y)
        weight = None
        if mask is not None:
            mask = torch.as_tensor(mask, device=like.device)
            if tuple(mask.shape) != lead:
                raise InputError(f"the loss mask has shape {list(mask.shape)}; expected {list(lead)}.")
            weight = (layout.flat(mask) if every else layout.sort(mask)).to(like.dtype)
            if not torch.isfinite(weight).all():
                raise InputError("the loss mask holds NaN or inf; expected finite weights.")
        if y is not None and y.is_floating_point():
            counts = y if weight is None else y[weight != 0]
            wrong = (
                "the target y holds NaN or inf on entries that count; clean it, or leave those entries out with mask=."
            )
            insist(torch.isfinite(counts).all(), lambda: InputError(wrong))
        return Judge(net, layout, loss, y, weight, reduce)

    @property
    def every(self) -> bool:
        return self.network.readout == "every"

    def part(self, rows: Rows) -> Judge:
        """The same for some of the time steps (readout "every")."""
        begin = self.layout.rows.starts[rows.begin]
        cut = lambda y: None if y is None else y[begin : begin + rows.N]
        return replace(self, layout=Layout(rows, None), y=cut(self.y), weight=cut(self.weight))

    @functools.cached_property
    def kept(self) -> Tensor | None:
        """The rows that count; None if all do."""
        return None if self.weight is None else self.weight.nonzero()[:, 0]

    def counting(self, y: Tensor) -> Tensor:
        """y in the rows that count."""
        return y if self.kept is None else y[self.kept]

    def sample(self, device: torch.device) -> Tensor:
        """The sample of each row that counts, in the rows' order."""
        rows = self.layout.rows
        return self.counting(rows.sample.to(device) if self.every else torch.arange(rows.B, device=device))

    def values(self, pre: Tensor) -> Tensor:
        """The weighted loss of each row that counts, from a = pre."""
        rows, pre = self.layout.rows, self.counting(pre)
        y = None if self.y is None else self.counting(self.y)
        if not len(pre):
            return pre.sum(-1)
        if not self.every or len(rows.chunks) == 1 or (rows.uniform and self.weight is None):
            value = losses.entries(self.loss, pre, y, self.network.output)
        else:  # rows that are not a multiple of rows.LANES: torch's vectors end elsewhere unless each chunk is apart
            ends = torch.tensor([c.stop for c in rows.chunks])
            if self.kept is not None:
                ends = torch.searchsorted(self.kept.cpu(), ends)
            sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
            ys = [None] * len(sizes) if y is None else y.split(sizes)
            found = zip(pre.split(sizes), ys, sizes, strict=True)
            value = torch.cat([losses.entries(self.loss, a, b, self.network.output) for a, b, n in found if n])
        return value if self.weight is None else value * self.counting(self.weight)

    def losses(self, pre: Tensor) -> Tensor:
        """The loss of each sample, [B], in the user's order."""
        total = self.values(pre)
        if self.every or self.weight is not None:
            total = self.mean(self.summed(total))
        return self.layout.unsort(total)

    def summed(self, values: Tensor, onto: Tensor | None = None) -> Tensor:
        """The values of each sample added up, onto those of earlier steps."""
        onto = values.new_zeros(self.layout.rows.B) if onto is None else onto
        return onto.index_add(0, self.sample(values.device), values)

    def mean(self, total: Tensor) -> Tensor:
        """Divided by the weight of what counts, with reduce="mean"."""
        if self.reduce == "sum":
            return total
        rows = self.layout.rows
        if self.weight is None:
            count = rows.lengths.to(total) if self.every else torch.ones_like(total)
        else:
            count = self.summed(self.counting(self.weight))
        return total / torch.where(count == 0, 1, count)


@dataclass(frozen=True, eq=False)
class Passage:
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
    def lengths(self) -> Tensor:
        return self.layout.lengths

    @property
    def mask(self) -> Tensor:
        return self.layout.mask


@dataclass(frozen=True, eq=False)
class Trajectory(Passage):
    """One run of a network over a batch.

    u [T, B, inputs], x [T+1, B, n], a and y_hat [B, outputs] or [T, B, outputs], state [B, n] (each sample's last, for
    the next call), lengths [B], mask [T+1, B]. Padding is zero. n is the number of units times the slots of the cell.
    """

    network: Network
    inputs: Tensor  # step rows
    pre: Tensor  # a, in rows: [B, outputs] in the rows' order or [N, outputs]
    V: Tensor  # the readout and input weights of this run, whatever the network holds later
    b_o: Tensor | None
    more: dict[str, Tensor]  # what else the readout has
    entering: Entering | None

    def __repr__(self) -> str:
        T, B, n = self.layout.rows.T, self.layout.rows.B, self.run.x.shape[1]
        return f"<Trajectory of {B} samples, T = {T}, {n} state entries, readout {self.network.readout!r}>"

    def read_out(self, x: Tensor, last: Tensor) -> Tensor:
        return self.network.read_out(self.layout, x, last, self.V, self.b_o, self.inputs, self.more)

    @functools.cached_property
    def u(self) -> Tensor:
        return self.layout.padded(self.inputs)

    @functools.cached_property
    def a(self) -> Tensor:
        return self._outward(self.pre)

    @functools.cached_property
    def y_hat(self) -> Tensor:
        return self._outward(losses.output_function(self.network.output)(self.pre))

    def _outward(self, y: Tensor) -> Tensor:
        return self.layout.unsort(y) if self.network.readout == "last" else self.layout.padded(y)

    def loss(
        self, loss: LossLike | Tensor, y: Any = None, *, mask: Tensor | None = None, reduce: str = "sum"
    ) -> Tensor:
        """The loss of each sample, [B].

        loss    a name, a Loss, a function of (y_hat, y) on the entries that count, or [B] values made from this trajectory
        y       [B, ...] (readout "last") or [T, B, ...] (readout "every"); padding is not read
        mask    [T, B] (or [B]) weights of the entries; zero leaves one out, whatever y holds there
        reduce  "sum" or "mean" over a sample's own steps that count
        """
        return self._loss(loss, y, mask, reduce, self.pre)

    def _loss(self, loss: LossLike | Tensor, y: Any, mask: Tensor | None, reduce: str, pre: Tensor) -> Tensor:
        B = self.layout.rows.B
        if isinstance(loss, Tensor):
            if loss.shape != (B,):
                what = "a scalar" if loss.dim() == 0 else f"shape {list(loss.shape)}"
                raise InputError(
                    f"the loss is {what}; expected one value for each sample, shape [{B}]. coadjoint averages over samples itself."
                )
            return loss
        return Judge.of(self.network, self.layout, loss, y, mask, reduce, pre).losses(pre)

    def costates(
        self, loss: LossLike | Tensor, y: Any = None, *, mask: Tensor | None = None, reduce: str = "sum"
    ) -> Costates:
        """lam_t = dL/dx_t of each sample's own loss; arguments as in `loss`. Differentiable, for penalties."""
        run, every = self.run, self.network.readout == "every"
        by_x = every or self.network.summary is not None
        x, last, pre, attached = run.x, run.last, self.pre, run.x.requires_grad
        dual, mapped = forward_ad._current_level >= 0, torch._C._functorch.peek_interpreter_stack() is not None
        recorded = (torch.is_grad_enabled() and (attached or self.pre.requires_grad)) or dual or mapped
        s, s_last = None, None
        if mapped and not isinstance(loss, Tensor):  # torch.func allows no leaves of our own
            of = lambda h: self._loss(loss, y, mask, reduce, self.read_out(h, h))
            value, pull, *_ = torch.func.vjp(of, x if by_x else last)
            source = pull(torch.ones_like(value))[0]
            s, s_last = (source, None) if by_x else (None, source)
        else:
            with torch.enable_grad():
                if not (attached and recorded) and not isinstance(loss, Tensor):
                    leaf = lambda h: h + torch.zeros_like(h).requires_grad_() if dual else h.detach().requires_grad_()
                    x, last = leaf(run.x), leaf(run.last)
                    pre = self.read_out(x, last)
                value = self._loss(loss, y, mask, reduce, pre)
                if not value.requires_grad or not x.requires_grad:
                    raise InputError("the loss does not depend on the states of this trajectory: it has no costates.")
                s, s_last = torch.autograd.grad(value.sum(), [x, last], create_graph=recorded, allow_unused=True)
            if s is None and s_last is None:
                raise InputError("the loss does not depend on the states of this trajectory, but on something else.")
        declared = None
        if every and s is not None and not isinstance(loss, Tensor):
            counts = torch.ones(self.layout.rows.N, dtype=torch.bool, device=s.device)
            if mask is not None:
                counts = self.layout.flat(torch.as_tensor(mask, device=s.device)) != 0
            declared = torch.cat([counts.new_zeros(self.layout.rows.B), counts])
        with torch.set_grad_enabled(recorded):
            found = run.costate(s, s_last, declared)
        return Costates(self, found.mantissa, found.exponent, value if recorded else value.detach())

    def push(self, du: Tensor) -> Tensor:
        """The change of y_hat along a change du of the inputs: DF(u) . du, shaped like y_hat. Differentiable."""
        if du.shape != self.u.shape:
            raise InputError(f"the direction du has shape {list(du.shape)}; expected that of u, {list(self.u.shape)}.")
        net, rows, flat = self.network, self.layout.rows, self.layout.flat(du)
        mu = self.run.push(*net.drive(flat, changes(self.entering)))
        if net.summary is None:
            h = net.seen(self.layout, mu, rows.last(mu), {})
        else:
            of = lambda x: net.seen(self.layout, x, None, self.more)
            h = torch.func.jvp(of, (self.run.x,), (mu,))[1]
        da = h @ self.V.T
        if "D" in self.more:
            da = da + net.read_at(rows, flat) @ self.more["D"].T
        phi = losses.output_function(net.output)
        return self._outward(torch.func.jvp(phi, (self.pre,), (da,))[1])


def changes(entering: Entering | None) -> Entering | None:
    """The same weights without their biases: what a change of the input says."""
    return None if entering is None else (entering[0][:1] + (None,), entering[1] and (entering[1][0], None))


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
    least, most = n.aminmax()
    return least.item() > low and most.item() < math.inf


def norm(x: Tensor) -> Tensor:
    """||x||_2 over the last axis; value, first and second derivative are 0 at 0."""
    return _Norm.apply(x)


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
        """||lam_t||_p at true scale, [T + 1, B]; 0 where there is no costate."""
        size = self.size if p == 2 else self.mantissa.abs().sum(-1)
        return scale(size, self.exponent)

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


def tilted(net: Network, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
    """(1/beta) log mean_t exp(beta h_t) over each sample's own steps"""
    return log_mean_exp(rows, net.beta * h) / net.beta


def tilted_tanh(net: Network, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
    """(1/beta) log tanh(mean_t exp(beta h_t)): log tanh(m) is log m where m is tiny, and log(1 - 2/(e^2m + 1)) where it is not"""
    log = log_mean_exp(rows, net.beta * h)
    small, large = (
        torch.exp(log.clamp(-20, 0)),
        torch.exp(log.clamp(0, 5.8)),
    )  # past that the last digit of 0 is reached
    near = torch.where(log < 0, torch.log(torch.tanh(small)), torch.log1p(-2 * torch.sigmoid(-2 * large)))
    return torch.where(log < -20, log, near) / net.beta


def log_mean_exp(rows: Rows, y: Tensor) -> Tensor:
    """[N, n] -> [B, n]"""
    sample, top = rows.sample.to(y.device), y.new_full((rows.B, y.shape[1]), -math.inf)
    top = top.scatter_reduce(0, sample[:, None].expand_as(y), y.detach(), "amax")  # a shift that cancels: no derivative
    total = y.new_zeros(rows.B, y.shape[1]).index_add(0, sample, torch.exp(y - top[sample]))
    return top + torch.log(total / rows.lengths.to(y)[:, None])


def attention(net: Network, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
    """sum_t a_t h_t, a = softmax over each sample's own steps of tanh(w . h_t + b_t)"""
    sample, b = rows.sample.to(h.device), more["b_a"]
    at = (rows.time - 1).clamp(max=len(b) - 1).to(h.device)
    e = torch.exp(torch.tanh(h @ more["w_a"] + b[at]))  # between 1/e and e: nothing overflows
    total = e.new_zeros(rows.B).index_add(0, sample, e)
    return h.new_zeros(rows.B, h.shape[1]).index_add(0, sample, (e / total[sample])[:, None] * h)


SUMMARIES: dict[str, Callable[..., Tensor]] = {"tilted": tilted, "tilted-tanh": tilted_tanh, "attention": attention}
READOUT = ("D", "w_a", "b_a")  # parameters of a readout beside V and b_o


class Network(nn.Module):
    """A recurrent layer and a linear readout.

    cell        a name ("elman", "lstm", "gru", ...; co.cells.CELLS has them all), a cell made with @co.cell, a torch cell
                module (RNNCell, LSTMCell, GRUCell) or any step function (u_t, x) -> x; the last two run on the autograd engine
    activation  "tanh", "sigmoid", "relu", "identity", "softplus" or a function written with co.tanh, co.exp, ...
    readout     "last": y_hat at each sample's last step; "every": at every step; or one y_hat for each sample of all its steps:
                "tilted" reads (1/beta) log mean_t exp(beta h_t), "tilted-tanh" the same with a tanh around the mean,
                "attention" sum_t a_t h_t, a = softmax over its own steps of tanh(w . h_t + b_t). `net.readout` then is
                "last", where y_hat goes, and `net.summary` says which
    beta        of the tilted readouts, 1 if not given
    steps       of "attention": how many b_t there are, 1 if not given; later steps take the last of them
    skip        add D u to the readout, u of the steps that it reads
    output      phi: "identity", "sigmoid", "softmax", "tanh" or a function
    x0          "zero", "learned", or a tensor [n]; a call may give its own
    mask        a fixed mask on W, shaped like W: zeros are absent connections
    structure   of W: "antisymmetric", "orthogonal", "cayley", "diagonal", "low-rank", "dale" or a torch parametrisation
                (co.parametrisations); some cells bring their own
    engine      "auto", "cpu", "eager", "cuda", "triton", "stepwise", "reference", "autograd"; `net.engine` says which runs,
                `net.engine.why` why
    slots       for a step function: how many parts of size `hidden` its state has
    options     of a cell given by name: eps=0.05, ...

    Parameters: W (recurrent), R (input), b, V (readout), b_o, D if skip, w_a and b_a of an attention, x0 if learned, and the
    cell's own under `p`. All are drawn uniformly from +-1/sqrt(hidden), as torch.nn does, but a structured W begins where
    its structure says (its raw parameter is parametrizations.W.original); see co.initialisers for others.
    """

    W: nn.Parameter | None
    R: nn.Parameter
    b: nn.Parameter | None
    x0: Tensor
    mask: Tensor | None

    def __init__(
        self,
        cell: str | Cell | nn.Module | Callable[..., Any] = "elman",
        *,
        inputs: int,
        hidden: int,
        outputs: int,
        activation: Activation | None = None,
        readout: str = "last",
        output: Output = "identity",
        x0: str | Tensor = "zero",
        bias: bool = True,
        mask: Tensor | None = None,
        structure: str | nn.Module | None = None,
        skip: bool = False,
        beta: float | None = None,
        steps: int | None = None,
        engine: str = "auto",
        slots: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in (("inputs", inputs), ("hidden", hidden), ("outputs", outputs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} must be a positive integer; got {value!r}.")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in DTYPES:
            raise Unsupported(HALF.format(dtype))
        self.inputs, self.hidden, self.outputs = inputs, hidden, outputs
        choose("readout", readout, ("last", "every", *SUMMARIES))
        self.readout = "every" if readout == "every" else "last"
        self.summary = readout if readout in SUMMARIES else None
        if readout.startswith("tilted"):
            self.beta = 1.0 if beta is None else float(beta)
            if not math.isfinite(self.beta) or self.beta == 0:
                raise InputError(f"beta must be a finite number and not 0; got {beta!r}.")
        elif beta is not None:
            options["beta"] = beta  # some cells have one too
        if steps is not None and (readout != "attention" or not isinstance(steps, int) or steps < 1):
            raise InputError(f"steps is how many b_t readout='attention' has, at least 1; got {steps!r}, {readout=}.")
        losses.output_function(output)
        self.output = output
        make: dict[str, Any] = {"dtype": dtype, "device": device}
        self.cell: Cell | None = None
        self.step: Any = None
        if isinstance(cell, str):
            self.cell = cells.named(cell, activation, **options)
        elif isinstance(cell, Cell):
            self.cell = cell
            if cell.given and cell.data is None:
                raise Unsupported(
                    f"cell '{cell.name}' is given data at each step ({', '.join(cell.given)}), and a Network has only inputs. Use co.nn, or make it a gate that reads an input."
                )
        elif callable(cell):
            self.step = cell
        else:
            raise KindError(
                f"cell must be a name, a cell made with @co.cell, a torch cell module or a step function; got {type(cell).__name__}."
            )
        if not isinstance(cell, str) and (activation is not None or options):
            names = ", ".join((["activation"] if activation is not None else []) + [*options])
            raise InputError(f"{names}= belongs to a cell given by name; a formula or a step function has its own.")
        self.engine = engine
        self.p = nn.ParameterDict()
        if self.cell is None:
            self.slots = slots or getattr(cell, "slots", None) or (2 if isinstance(cell, nn.LSTMCell) else 1)
            if mask is not None or structure is not None:
                what = "mask" if mask is not None else "structure"
                raise InputError(f"{what}= acts on W; a step function holds its own weights.")
        else:
            if slots is not None:
                raise InputError(
                    f"slots= belongs to a step function; cell '{self.cell.name}' has {len(self.cell.slots)}."
                )
            self.slots = len(self.cell.slots)
            gates, reads, enters = len(self.cell.gates), len(self.cell.read), len(self.cell.enters)
            self.W = nn.Parameter(torch.empty(gates * hidden, reads * hidden, **make)) if reads else None
            self.R = nn.Parameter(torch.empty(enters * hidden, inputs, **make))
            self.b = nn.Parameter(torch.empty(enters * hidden, **make)) if bias else None
            for name in self.cell.parameters:
                self.p[name] = nn.Parameter(torch.empty(hidden, **make))
            if mask is not None:
                if self.W is None or tuple(mask.shape) != tuple(self.W.shape):
                    raise InputError(
                        f"mask has shape {list(mask.shape)}; expected that of W, {list(self.W.shape) if self.W is not None else 'none: this cell has no W'}."
                    )
                mask = mask.to(**make)
        self.register_buffer("mask", mask)
        self.shows = [self.cell.slots.index(s) for s in self.cell.shows] if self.cell and self.cell.shows else [0]
        wide = len(self.shows) * hidden
        self.V = nn.Parameter(torch.empty(outputs, wide, **make))
        self.b_o = nn.Parameter(torch.empty(outputs, **make)) if bias else None
        if skip:
            self.D = nn.Parameter(torch.empty(outputs, inputs, **make))
        if readout == "attention":
            self.w_a, self.b_a = nn.Parameter(torch.empty(wide, **make)), nn.Parameter(torch.empty(steps or 1, **make))
        n = self.slots * hidden
        if isinstance(x0, Tensor):
            if tuple(x0.shape) != (n,):
                raise InputError(f"x0 has shape {list(x0.shape)}; expected [{n}] (hidden x slots).")
            self.register_buffer("x0", x0.detach().clone().to(**make))
        elif choose("x0", x0, ("zero", "learned")) == "learned":
            self.x0 = nn.Parameter(torch.empty(n, **make))
        else:
            self.register_buffer("x0", torch.zeros(n, **make), persistent=False)
        if self.cell is not None and (structure is not None or self.cell.structure is not None):
            self._structure(structure)
        self.reset_parameters()
        sweeps.resolve(self._engine, self.cell, self.V.device.type)

    @property
    def engine(self) -> Choice:
        """The engine that runs this network where it is now; `.why` says why. Assign a name to ask for another."""
        return sweeps.resolve(self._engine, self.cell, self.V.device.type)

    @engine.setter
    def engine(self, name: str) -> None:
        self._engine = choose("engine", name, [*sweeps.ENGINES, "auto"])

    def _structure(self, given: str | nn.Module | None) -> None:
        """Give W its structure: the one that is asked for, or the cell's own."""
        assert self.cell is not None
        if self.W is None:
            raise InputError(f"structure= acts on W, and cell '{self.cell.name}' has none.")
        with torch.no_grad():  # the identity has every structure, or nearly
            self.W.copy_(torch.eye(self.hidden).repeat(*(n // self.hidden for n in self.W.shape)))
        if given is None:
            assert self.cell.structure is not None
            module = self.cell.structure(units=self.hidden)
        else:
            module = parametrisations.structure(given, self.hidden)
        parametrize.register_parametrization(self, "W", module.to(self.V.device))

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden); a structured W and the cell's own parameters begin where their definition says, x0 at
        zero."""
        bound = 1 / math.sqrt(self.hidden)
        with torch.no_grad():
            for name in ("W", "R", "b", "V", "b_o", *READOUT):
                if isinstance(getattr(self, name, None), nn.Parameter):
                    getattr(self, name).uniform_(-bound, bound)
            for name, initial in self.cell.parameters.items() if self.cell is not None else ():
                if not isinstance(initial, Uniform):
                    self.p[name].fill_(initial)
            if isinstance(self.x0, nn.Parameter):
                self.x0.zero_()
            if self.mask is not None and isinstance(self.W, nn.Parameter):
                self.W.mul_(self.mask)
        self.begin()

    def begin(self, generator: torch.Generator | None = None) -> None:
        """Draw what a structure of W and the cell's own parameters draw: their raw parameters, where the definition says."""
        with torch.no_grad():
            if parametrize.is_parametrized(self, "W"):
                structure: Any = self.parametrizations["W"]  # type: ignore[index]
                raw, bound = list(structure.parameters(recurse=False)), 1 / math.sqrt(self.hidden)
                if hasattr(structure[0], "begin"):
                    structure[0].begin(*raw, generator=generator)
                else:
                    for M in raw:
                        M.uniform_(-bound, bound, generator=generator)
            for name, initial in self.cell.parameters.items() if self.cell is not None else ():
                if isinstance(initial, Uniform):
                    self.p[name].copy_(initial(self.hidden, generator))

    def extra_repr(self) -> str:
        name = self.cell.name if self.cell is not None else "step"
        return f"{name}, inputs={self.inputs}, hidden={self.hidden}, outputs={self.outputs}, readout={self.summary or self.readout!r}, engine={self._engine!r}"

    def whole(self, what: str) -> None:
        """Refuse `what`, which takes a sequence apart, where that is not the same."""
        why = None
        if self.summary is not None:
            why = f"readout='{self.summary}' reads all steps of a sequence at once"
        elif self.cell is not None and self.cell.given:
            why = (
                f"cell '{self.cell.name}' is given data by the steps of a whole sequence ({', '.join(self.cell.given)})"
            )
        if why is not None:
            raise Unsupported(f"{what}: {why}. Use BPTT or Penalised without segments.")

    def shown(self, x: Tensor) -> Tensor:
        """The slots that the readout reads."""
        if self.shows == list(range(self.slots)):
            return x
        return torch.cat([x[..., i * self.hidden : (i + 1) * self.hidden] for i in self.shows], -1)

    def seen(self, layout: Layout, x: Tensor, last: Tensor | None, more: dict[str, Tensor]) -> Tensor:
        """h, what V reads, in rows; last: each sample's last state, for readout "last"."""
        if self.summary is not None:
            return SUMMARIES[self.summary](self, layout.rows, self.shown(x[layout.rows.B :]), more)
        if self.readout == "last":
            assert last is not None
            return self.shown(last)
        return self.shown(x[layout.rows.B :])

    def read_at(self, rows: Rows, u: Tensor) -> Tensor:
        """The rows of a step array that stand beside those of the readout."""
        return u if self.readout == "every" else rows.last(pad(u, (0, 0, rows.B, 0)))

    def read_out(
        self, layout: Layout, x: Tensor, last: Tensor, V: Tensor, b_o: Tensor | None,
        u: Tensor | None = None, more: dict[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """a = V h + D u + b_o, in rows."""
        more, rows = more or {}, layout.rows if self.readout == "every" else None
        a = affine(rows, self.seen(layout, x, last, more), V, b_o)
        if "D" not in more:
            return a
        assert u is not None
        return a + affine(rows, self.read_at(layout.rows, u), more["D"], None)

    def recurrent(self) -> Tensor | None:
        """W with its mask, as the formula takes it."""
        W = self.W if self.mask is None or self.W is None else self.W * self.mask
        if W is None or self.cell is None or self.cell.weights is None:
            return W
        return self.cell.weights(W, self.R, self.b, dict(self.p.items()))[0]

    def drive(
        self, u: Tensor, entering: Entering | None, rows: Rows | None = None, given: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """What the inputs say to each step: (base, side) for a formula, (u,) for a step function. given: the data that the
        cell is given at each step, nothing for a change of the input."""
        if entering is None:
            return (u,)
        base, side = (None if w is None else affine(rows, u, *w) for w in entering)
        assert self.cell is not None
        if self.cell.given:
            given = u.new_zeros(len(u), len(self.cell.given) * self.hidden) if given is None else given
            side = given if side is None else torch.cat([side, given], 1)
        return base, side

    def into(self, R: Tensor, b: Tensor | None) -> Entering:
        """The weights and biases that make (base, side) of the inputs of a part of a sequence."""
        self.whole("sweeps in segments")
        for what, has in (("skip=True", hasattr(self, "D")), ("a readout of several slots", self.shows != [0])):
            if has:
                raise Unsupported(f"sweeps in segments have no {what}. Use BPTT or Penalised without segments.")
        return self.entering(R, b)

    def entering(self, R: Tensor, b: Tensor | None) -> Entering:
        """The weights and biases that make (base, side) of the inputs."""
        cell, d = self.cell, self.hidden
        assert cell is not None
        if cell.weights is not None:
            W = self.W if self.mask is None or self.W is None else self.W * self.mask
            assert W is not None
            _, R, b = cell.weights(W, R, b, dict(self.p.items()))
        if cell.enters == cell.gates and not cell.side:
            return (R, b), None
        place = {name: i * d for i, name in enumerate(cell.enters)}

        def of(y: Tensor, names: Sequence[str | None]) -> Tensor:
            none = y.new_zeros(d, *y.shape[1:])
            return torch.cat([none if n is None else y[place[n] : place[n] + d] for n in names])

        pick = lambda names: (of(R, names), None if b is None else of(b, names))
        together = [g if g in place and g not in cell.side else None for g in cell.gates]
        apart = [*cell.side, *cell.inputs]
        return pick(together), pick(apart) if apart else None

    def heard(self, delta: Tensor, side: Tensor | None) -> Tensor:
        """What reaches the rows of R and b: columns of delta [N, gates d], and of v's own [N, beside d]."""
        cell, d = self.cell, self.hidden
        assert cell is not None
        if cell.enters == cell.gates and not cell.side:
            return delta
        assert side is not None or not cell.beside
        found = {g: delta[:, i * d : (i + 1) * d] for i, g in enumerate(cell.gates)}
        found |= {n: side[:, i * d : (i + 1) * d] for i, n in enumerate(cell.beside) if side is not None}
        return torch.cat([found[n] for n in cell.enters], 1)

    def advance(self, u: Tensor, x: Tensor) -> Tensor:
        """One step from u [B, inputs] and x [B, n], by torch's own operations."""
        self.whole("one step at a time")
        if hasattr(self, "D"):
            raise Unsupported("real-time recurrent learning has no skip=True. Use BPTT or Penalised.")
        if self.cell is None:
            return self._call_step(u, x)
        drive = self.drive(u, self.entering(self.R, self.b))
        p = torch.cat(list(self.p.values())) if len(self.p) else None
        return formula_step(self.cell, self.recurrent(), p)(*(d for d in drive if d is not None), x)

    def forward(self, u: Sequences, lengths: Any = None, x0: Tensor | None = None) -> Trajectory:
        """Run over u: [T, B, inputs], a list of [T_i, inputs], or a PackedSequence; x0 [B, n] or [n]."""
        if isinstance(u, Tensor) and torch._C._functorch.is_batchedtensor(u):
            raise no_vmap()
        if self.V.dtype not in DTYPES:
            raise Unsupported(HALF.format(self.V.dtype))
        layout, rows_u = self._layout(u, lengths)
        B = layout.rows.B
        start = self._start(x0, B, rows_u)
        V, b_o = self.V, self.b_o
        entering, given = None, None
        if self.cell is not None:
            entering = self.entering(self.R, self.b)
            if self.cell.data is not None:
                given = self.cell.data(layout.rows.time, self.hidden, self.training).to(rows_u)
        drive = self.drive(rows_u, entering, layout.rows, given)
        run: Swept | Stepped
        if self.cell is None:
            run = Stepped.run(self._call_step, layout.rows, drive, layout.sort(start))  # type: ignore[arg-type]
        else:
            base, side = drive
            assert base is not None
            p = torch.cat(list(self.p.values())) if len(self.p) else None
            W, engine = self.recurrent(), sweeps.load(self.engine)
            if engine is None:
                run = Stepped.run(
                    formula_step(self.cell, W, p),
                    layout.rows,
                    (base,) if side is None else (base, side),
                    layout.sort(start),
                )
            else:
                plan = Plan(self.cell, layout.rows, engine)
                if rows_u.is_cuda:
                    ensure(plan, rows_u, lambda: _not_finite(layout, rows_u))
                run = Swept.run(plan, base, side, W, layout.sort(start), p)
        more = {name: getattr(self, name) for name in READOUT if hasattr(self, name)}
        pre = self.read_out(layout, run.x, run.last, V, b_o, rows_u, more)
        return Trajectory(layout, run, self.hidden, self, rows_u, pre, V, b_o, more, entering)

    def _call_step(self, u: Tensor, x: Tensor) -> Tensor:
        state = tuple(x.split(self.hidden, -1)) if self.slots > 1 else x
        out = self.step(u, state)
        out = torch.cat(tuple(out), -1) if isinstance(out, tuple | list) else out
        if not isinstance(out, Tensor) or out.shape != x.shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(
                f"the step function returned {got}; expected a state shaped like the one it received, {list(x.shape)} (or its {self.slots} parts)."
            )
        return out

    def _start(self, x0: Tensor | None, B: int, u: Tensor) -> Tensor:
        n = self.slots * self.hidden
        if x0 is None:
            return self.x0.expand(B, n)
        _check_like("x0", x0, self.V)
        if tuple(x0.shape) not in ((n,), (B, n)):
            raise InputError(f"x0 has shape {list(x0.shape)}; expected [{B}, {n}] or [{n}] (B, hidden x slots).")
        if not torch.isfinite(x0).all():
            raise InputError("x0 holds NaN or inf.")
        return x0.expand(B, n)

    def _layout(self, u: Any, lengths: Any) -> tuple[Layout, Tensor]:
        if isinstance(u, PackedSequence):
            if lengths is not None:
                raise InputError("a PackedSequence knows its lengths; leave out lengths=.")
            _check_like("u", u.data, self.V)
            rows, order, flat = Rows(u.batch_sizes.tolist()), u.sorted_indices, u.data
            if rows.uniform and u.unsorted_indices is not None:  # of equal length, yet not in the order they came
                flat, order = flat.unflatten(0, (rows.T, rows.B))[:, u.unsorted_indices].flatten(0, 1), None
            layout = Layout(rows, None if order is None else np.array(order.tolist()))
        elif isinstance(u, Tensor):
            _check_like("u", u, self.V)
            if u.dim() != 3 or u.shape[2] != self.inputs:
                hint = ""
                if u.dim() == 3:
                    hint = f" but this network reads {self.inputs} inputs"
                raise InputError(
                    f"`u` has shape {tuple(u.shape)}{hint}; expected [T, B, {self.inputs}]. coadjoint is time-major: for batch-first data pass `u.transpose(0, 1)`."
                )
            T, B = u.shape[:2]
            if T == 0 or B == 0:
                raise InputError(
                    f"`u` has shape {tuple(u.shape)}: {'no time steps' if T == 0 else 'an empty batch'}; expected at least one step and one sample."
                )
            layout = Layout.of(_lengths(lengths, T, B), T, B)
            flat = layout.flat(u)
        elif isinstance(u, list | tuple):
            if lengths is not None:
                raise InputError("a list of sequences knows its lengths; leave out lengths=.")
            if not u:
                raise InputError("`u` is an empty list; expected at least one sequence [T_i, inputs].")
            for i, s in enumerate(u):
                if not isinstance(s, Tensor) or s.dim() != 2 or s.shape[1] != self.inputs or not len(s):
                    got = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
                    raise InputError(
                        f"sequence {i} of `u` has shape {got}; expected [T_i, {self.inputs}] with T_i >= 1."
                    )
                _check_like(f"sequence {i} of `u`", s, self.V)
            n = [len(s) for s in u]
            layout = Layout.of(n, max(n), len(u))
            begins = torch.from_numpy(np.cumsum(n) - n)
            flat = torch.cat(list(u))[begins[layout.sample] + layout.rows.time - 1]
        else:
            raise KindError(
                f"`u` must be a tensor [T, B, {self.inputs}], a list of tensors or a PackedSequence; got {type(u).__name__}."
            )
        if flat.shape[-1] != self.inputs:
            raise InputError(f"the PackedSequence holds {flat.shape[-1]} inputs but this network reads {self.inputs}.")
        if not flat.is_cuda and not math.isfinite(flat.sum().item()) and (error := _not_finite(layout, flat)):
            raise error
        return layout, flat


def _not_finite(layout: Layout, u: Tensor) -> InputError | None:
    """What to say of inputs that hold NaN or inf, if they do."""
    bad = (~torch.isfinite(u)).any(1).nonzero()
    if not len(bad):
        return None
    row = int(bad[0, 0])
    return InputError(
        f"`u` holds NaN or inf, first at step {int(layout.rows.time[row])} of sample {int(layout.sample[row])} (counting steps from 1); clean the data, or shorten that sample with lengths=."
    )


def formula_step(cell: Cell, W: Tensor | None, p: Tensor | None) -> Callable[..., Tensor]:
    parameters = dict(zip(cell.parameters, p.chunk(len(cell.parameters)), strict=True)) if p is not None else {}

    def step(base: Tensor, *rest: Tensor) -> Tensor:
        *side, x = rest
        return cell.step(base, side[0] if side else None, W, x, parameters)

    return step


def _lengths(lengths: Any, T: int, B: int) -> list[int] | None:
    if lengths is None:
        return None
    try:
        n = torch.as_tensor(lengths).cpu()
    except (TypeError, ValueError, RuntimeError) as e:
        raise KindError(f"lengths must be integers, one for each sample; got {type(lengths).__name__}.") from e
    if n.is_floating_point() or n.is_complex() or n.dtype == torch.bool:
        raise KindError(f"lengths must be integers; got {n.dtype}.")
    if tuple(n.shape) != (B,):
        raise InputError(f"lengths has shape {list(n.shape)}; expected one length for each of {B} samples.")
    if int(n.min()) < 1 or int(n.max()) > T:
        b = int(((n < 1) | (n > T)).nonzero()[0, 0])
        raise InputError(f"lengths must lie in 1..{T} (the number of steps of `u`); sample {b} has {int(n[b])}.")
    if int(n.max()) < T:
        raise InputError(
            f"the longest sample has {int(n.max())} steps but `u` has {T}; pass `u[:{int(n.max())}]`, so that T is the length of the longest."
        )
    return n.tolist()


def _check_like(name: str, y: Tensor, like: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise KindError(f"{name} must be a tensor; got {type(y).__name__}.")
    if y.device != like.device:
        raise InputError(f"{name} is on {y.device} but the network is on {like.device}; move one of them with .to().")
    if y.dtype != like.dtype:
        raise KindError(
            f"{name} is {str(y.dtype)[6:]} but the network is {str(like.dtype)[6:]}; convert it with {name.split()[0].strip('`')}.to({like.dtype})."
        )
