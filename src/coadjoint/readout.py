"""Readout: from states to outputs, and from outputs to the loss of each sample.

a = V h + D u + b_o,  y_hat = phi(a)     h what is seen of the states: at the last step, at every step or of all steps
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from . import losses
from .cells import Cell
from .errors import MOST, InputError, KindError, Unsupported, brief, choose, real, whole
from .layout import Laid, Layout, dense, parameter, tensor_of
from .losses import LossLike, Output
from .sweeps import Rows
from .sweeps.checks import insist
from .sweeps.derivatives import affine
from .transport import Structured


def tilted(net: Readout, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
    """(1/beta) log mean_t exp(beta h_t) over each sample's own steps"""
    return log_mean_exp(rows, net.beta * h) / net.beta


def tilted_tanh(net: Readout, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
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


def attention(net: Readout, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
    """sum_t a_t h_t, a = softmax over each sample's own steps of tanh(w . h_t + b_t)"""
    sample, b = rows.sample.to(h.device), more["b_a"]
    at = (rows.time - 1).clamp(max=len(b) - 1).to(h.device)
    e = torch.exp(torch.tanh(h @ more["w_a"] + b[at]))  # between 1/e and e: nothing overflows
    total = e.new_zeros(rows.B).index_add(0, sample, e)
    return h.new_zeros(rows.B, h.shape[1]).index_add(0, sample, (e / total[sample])[:, None] * h)


SUMMARIES: dict[str, Callable[..., Tensor]] = {"tilted": tilted, "tilted-tanh": tilted_tanh, "attention": attention}
MORE = ("D", "w_a", "b_a")  # parameters of a readout beside V and b_o
DROPPED = "dropped"  # the mask of what it reads, among what else a run of it has


def drawn(p: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p): on every device from the CPU's generator, whose state is saved
    with a run."""
    return nn.functional.dropout(torch.ones(*shape, dtype=like.dtype), p).to(like.device)


def check_dropout(p: Any, of: str) -> float:
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        raise InputError(f"dropout is the share of {of} that is dropped in training, from 0 to below 1; got {p!r}.")
    return float(p)


class Readout(Structured):
    """V, b_o and what else a readout has; of a Network and of a Stack.

    readout  "last", "every", or a summary of all steps (then self.readout is "last", and self.summary says which)
    deep     hidden layers between h and V: h <- tanh(O h + c), as many as there are widths
    dropout  the share of the inputs and of h that is dropped, in training
    """

    inputs: int
    outputs: int
    cell: Cell | None = None  # if there is one
    apart = "this network reads whole sequences"  # why `whole` refuses
    dropout: float = 0.0

    def _make_readout(
        self, wide: int, *, readout: str, output: Output, bias: bool, skip: bool, beta: float | None, steps: int | None,
        deep: int | Sequence[int], make: dict[str, Any],
    ) -> None:  # fmt: skip
        """Parameters for an h of `wide` entries, not drawn yet."""
        choose("readout", readout, ("last", "every", *SUMMARIES))
        self.readout = "every" if readout == "every" else "last"
        self.summary = readout if readout in SUMMARIES else None
        if readout.startswith("tilted"):
            self.beta = 1.0 if beta is None else float(real("beta", beta))
            if self.beta == 0:
                raise InputError(f"beta must be a finite number and not 0; got {beta!r}.")
        if steps is not None and (readout != "attention" or not isinstance(steps, int) or steps < 1):
            raise InputError(f"steps is how many b_t readout='attention' has, at least 1; got {steps!r}, {readout=}.")
        if steps is not None:
            whole("steps", steps)
        losses.output_function(output)
        self.output = output
        widths = tuple(deep) if isinstance(deep, list | tuple) else (deep,)
        if not all(isinstance(m, int) and not isinstance(m, bool) and 0 < m <= MOST for m in widths):
            raise InputError(
                f"deep is the widths of the readout's hidden layers, positive integers; got {brief(deep)}."
            )
        self.V = parameter(self.outputs, [wide, *widths][-1], **make)
        self.b_o = parameter(self.outputs, **make) if bias else None
        if skip:
            self.D = parameter(self.outputs, self.inputs, **make)
        if readout == "attention":
            self.w_a, self.b_a = parameter(wide, **make), parameter(steps or 1, **make)
        self.deep = nn.ModuleList(nn.Linear(n, m, bias, **make) for n, m in itertools.pairwise((wide, *widths)))

    def _draw_readout(self, bound: float) -> None:
        """Uniform in +-bound; a deep output's layers by their own width, as torch.nn does."""
        with torch.no_grad():
            for name in ("V", "b_o", *MORE):
                if isinstance(getattr(self, name, None), nn.Parameter):
                    getattr(self, name).uniform_(-bound, bound)
        for layer in self.deep:
            layer.reset_parameters()  # type: ignore[operator]

    def whole(self, what: str) -> None:
        """Refuse `what`, which takes a sequence apart, where that is not the same."""
        raise Unsupported(f"{what}: {self.apart}. Use BPTT or Penalised without segments.")

    def still(self, what: str) -> None:
        """Refuse `what`, which runs the network more than once, where each run drops something else."""
        if self.dropout and self.training:
            raise Unsupported(
                f"{what}: dropout={self.dropout:g} drops something else in every run, in training. Leave it out, call net.eval(), or "
                "use BPTT or Penalised without segments."
            )

    def dropping(self, rows: int, wide: int) -> Tensor | None:
        """The mask of an array [rows, wide]; None where nothing is dropped."""
        return drawn(self.dropout, (rows, wide), self.V) if self.dropout and self.training else None

    @property
    def linear(self) -> bool:
        """Is what V reads linear in the states?"""
        return self.summary is None and not len(self.deep)

    def plain(self, what: str) -> None:
        """Refuse `what`, which knows V and b_o alone."""
        for name, has in (("skip=True", hasattr(self, "D")), ("deep=", len(self.deep) > 0)):
            if has:
                raise Unsupported(f"{what} has no {name}. Use BPTT or Penalised without segments.")

    def held(self) -> dict[str, Tensor]:
        """The readout's weights beside V and b_o, as they are now."""
        more = {name: getattr(self, name) for name in MORE if hasattr(self, name)}
        return more | {f"deep.{name}": p for name, p in self.deep.named_parameters()}

    @property
    def by_steps(self) -> bool:
        """Does the readout see all steps, and not each sample's last one alone?"""
        return self.readout == "every" or self.summary is not None

    def seen(self, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
        """What V reads, in rows: of step rows if `by_steps`, else of each sample's last one."""
        if DROPPED in more:
            h = h * more[DROPPED]
        if self.summary is not None:
            h = SUMMARIES[self.summary](self, rows, h, more)
        for i in range(len(self.deep)):
            h = torch.tanh(affine(self.beside(rows), h, more[f"deep.{i}.weight"], more.get(f"deep.{i}.bias")))
        return h

    def beside(self, rows: Rows) -> Rows | None:
        """The rows that outputs stand in; None if there is one output for each sample."""
        return rows if self.readout == "every" else None

    def read_at(self, rows: Rows, u: Tensor) -> Tensor:
        """The rows of a step array that stand beside those of the readout."""
        return u if self.readout == "every" else rows.last(pad(u, (0, 0, rows.B, 0)))

    def answer(
        self, rows: Rows, h: Tensor, V: Tensor, b_o: Tensor | None, u: Tensor | None = None, more: Any = None
    ) -> Tensor:
        """a = V h + D u + b_o, in rows."""
        more = more or {}
        a = affine(self.beside(rows), self.seen(rows, h, more), V, b_o)
        if "D" not in more:
            return a
        assert u is not None
        return a + affine(self.beside(rows), self.read_at(rows, u), more["D"], None)


@dataclass(frozen=True, eq=False)
class Judge:
    """A loss and what it compares with, in rows: those of the samples (readout "last") or of their steps ("every")."""

    network: Readout
    layout: Layout
    loss: LossLike
    y: Tensor | None
    weight: Tensor | None  # of each row; those of weight zero are left out
    reduce: str

    @staticmethod
    def of(
        net: Readout, layout: Layout, loss: LossLike, y: Any, mask: Tensor | None, reduce: str, like: Tensor
    ) -> Judge:
        """Arguments as in `Trajectory.loss`, checked; like: an array of the network's type."""
        every, B, T = net.readout == "every", layout.rows.B, layout.rows.T
        choose("reduce", reduce, ("sum", "mean"))
        lead = (T, B) if every else (B,)
        if y is not None:
            y = tensor_of("the target y", y, like)
            if tuple(y.shape[: len(lead)]) != lead:
                raise InputError(
                    f"the target y has shape {list(y.shape)}; with readout='{net.readout}' it must begin with {list(lead)}"
                    + (" ([T, B, ...], time-major)." if every else " (one for each sample).")
                )
            y = layout.flat(y) if every else layout.sort(y)
        weight = None
        if mask is not None:
            mask = tensor_of("the loss mask", mask, like)
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


class Answers(Laid):
    """What a run of a network says of its outputs: u, a, y_hat, loss."""

    layout: Layout
    network: Any
    inputs: Tensor  # step rows
    pre: Tensor  # a, in rows: [B, outputs] in the rows' order or [N, outputs]

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
            if dense("the loss", loss).shape != (B,):
                what = "a scalar" if loss.dim() == 0 else f"shape {list(loss.shape)}"
                raise InputError(
                    f"the loss is {what}; expected one value for each sample, shape [{B}]. coadjoint averages over samples itself."
                )
            return loss
        return Judge.of(self.network, self.layout, loss, y, mask, reduce, pre).losses(pre)


@contextlib.contextmanager
def judged(net: Readout) -> Iterator[None]:
    """Without dropout and noise."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


def check_net(net: Any) -> None:
    """A network, or a module around one."""
    if not hasattr(net, "readout") and not hasattr(getattr(net, "module", None), "readout"):
        raise KindError(f"the network must be a co.Network, co.Stack or co.EncoderDecoder; got {brief(net)}.")


Net = Readout  # what gradient methods and training take: a Network, a Stack, an EncoderDecoder
