"""Readout: from states to outputs (networks/judge.py goes on to the loss of each sample).

a = V h + D u + b_o,  y_hat = phi(a)     h what is seen of the states: at the last step, at every step or of all steps
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells.parameters import parameter
from ..errors import MAX_COUNT, InputError, Unsupported, brief, choose, real, whole_number
from ..objectives import losses
from ..objectives.losses import Output
from ..sweeps.affine import affine
from ..sweeps.rows import Rows
from ..sweeps.torch_internals import has_parameter
from .interface import SequenceNet


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
    near = torch.where(
        log < 0, torch.log(torch.tanh(small)), torch.log1p(-2 * torch.sigmoid(-2 * large))
    )
    return torch.where(log < -20, log, near) / net.beta


def log_mean_exp(rows: Rows, y: Tensor) -> Tensor:
    """[N, n] -> [B, n]"""
    sample, top = rows.sample.to(y.device), y.new_full((rows.B, y.shape[1]), -math.inf)
    top = top.scatter_reduce(
        0, sample[:, None].expand_as(y), y.detach(), "amax"
    )  # a shift that cancels: no derivative
    total = y.new_zeros(rows.B, y.shape[1]).index_add(0, sample, torch.exp(y - top[sample]))
    return top + torch.log(total / rows.lengths.to(y)[:, None])


def attention(net: Readout, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
    """sum_t a_t h_t, a = softmax over each sample's own steps of tanh(w . h_t + b_t)"""
    sample, b = rows.sample.to(h.device), more["b_a"]
    at = (rows.time - 1).clamp(max=len(b) - 1).to(h.device)
    e = torch.exp(torch.tanh(h @ more["w_a"] + b[at]))  # between 1/e and e: nothing overflows
    total = e.new_zeros(rows.B).index_add(0, sample, e)
    return h.new_zeros(rows.B, h.shape[1]).index_add(0, sample, (e / total[sample])[:, None] * h)


SUMMARIES: dict[str, Callable[..., Tensor]] = {
    "tilted": tilted,
    "tilted-tanh": tilted_tanh,
    "attention": attention,
}
EXTRA_PARAMETERS = ("D", "w_a", "b_a")  # parameters of a readout beside V and b_o
DROPOUT_MASK = "dropped"  # the mask of what it reads, among what else a run of it has


def draw_dropout_mask(p: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p): on every device from the CPU's generator, whose state is saved
    with a run."""
    return nn.functional.dropout(torch.ones(*shape, dtype=like.dtype), p).to(like.device)


def check_dropout(p: Any, of: str) -> float:
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        raise InputError(
            f"dropout is the share of {of} that is dropped in training, from 0 to below 1; got {p!r}."
        )
    return float(p)


class Readout(SequenceNet):
    """V, b_o and what else a readout has: what a Network and a Stack share.

    readout  "last", "every", or a summary of all steps (then self.readout is "last", and self.summary says which)
    deep     hidden layers between h and V: h <- tanh(O h + c), as many as there are widths
    dropout  the share of the inputs and of h that is dropped, in training
    """

    why_indivisible = "this network reads whole sequences"

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
        if steps is not None and (
            readout != "attention" or not isinstance(steps, int) or steps < 1
        ):
            raise InputError(
                f"steps is how many b_t readout='attention' has, at least 1; got {steps!r}, {readout=}."
            )
        if steps is not None:
            whole_number("steps", steps)
        losses.output_function(output)
        self.output = output
        widths = tuple(deep) if isinstance(deep, list | tuple) else (deep,)
        if not all(
            isinstance(m, int) and not isinstance(m, bool) and 0 < m <= MAX_COUNT for m in widths
        ):
            raise InputError(
                f"deep is the widths of the readout's hidden layers, positive integers; got {brief(deep)}."
            )
        self.V = parameter(self.outputs, [wide, *widths][-1], **make)
        self.b_o = parameter(self.outputs, **make) if bias else None
        if skip:
            self.D = parameter(self.outputs, self.inputs, **make)
        if readout == "attention":
            self.w_a, self.b_a = parameter(wide, **make), parameter(steps or 1, **make)
        self.deep = nn.ModuleList(
            nn.Linear(n, m, bias, **make) for n, m in itertools.pairwise((wide, *widths))
        )

    def _draw_readout(self, bound: float) -> None:
        """Uniform in +-bound; a deep output's layers by their own width, as torch.nn does."""
        with torch.no_grad():
            for name in ("V", "b_o", *EXTRA_PARAMETERS):
                if isinstance(getattr(self, name, None), nn.Parameter):
                    getattr(self, name).uniform_(-bound, bound)
        for layer in self.deep:
            layer.reset_parameters()  # type: ignore[operator]

    @property
    def like(self) -> Tensor:
        return self.V

    def dropout_mask(self, rows: int, wide: int) -> Tensor | None:
        """The mask of an array [rows, wide]; None where nothing is dropped."""
        return (
            draw_dropout_mask(self.dropout, (rows, wide), self.V)
            if self.dropout and self.training
            else None
        )

    @property
    def is_linear(self) -> bool:
        """Is what V reads linear in the states?"""
        return self.summary is None and not len(self.deep)

    def readout_extras(self) -> Iterator[str]:
        for name, has in (
            ("skip=True", hasattr(self, "D")),
            ("deep=", len(self.deep) > 0),
            ("readout='attention'", hasattr(self, "w_a")),
            ("a parametrised V", not has_parameter(self, "V")),
        ):
            if has:
                yield name

    def refuse_if_not_linear(self, what: str) -> None:
        for name, has in (("skip=True", hasattr(self, "D")), ("deep=", len(self.deep) > 0)):
            if has:
                raise Unsupported(f"{what} has no {name}. Use BPTT or Penalised without segments.")

    def extra_weights(self) -> dict[str, Tensor]:
        """The readout's weights beside V and b_o, as they are now."""
        more = {name: getattr(self, name) for name in EXTRA_PARAMETERS if hasattr(self, name)}
        return more | {f"deep.{name}": p for name, p in self.deep.named_parameters()}

    @property
    def reads_all_steps(self) -> bool:
        """Does the readout see all steps, and not each sample's last one alone?"""
        return self.readout == "every" or self.summary is not None

    def readout_features(self, rows: Rows, h: Tensor, more: dict[str, Tensor]) -> Tensor:
        """What V reads, in rows: of step rows if `reads_all_steps`, else of each sample's last one."""
        if DROPOUT_MASK in more:
            h = h * more[DROPOUT_MASK]
        if self.summary is not None:
            h = SUMMARIES[self.summary](self, rows, h, more)
        for i in range(len(self.deep)):
            h = torch.tanh(
                affine(
                    self.output_rows(rows), h, more[f"deep.{i}.weight"], more.get(f"deep.{i}.bias")
                )
            )
        return h

    def output_rows(self, rows: Rows) -> Rows | None:
        """The rows that outputs stand in; None if there is one output for each sample."""
        return rows if self.readout == "every" else None

    def at_outputs(self, rows: Rows, u: Tensor) -> Tensor:
        """The rows of a step array that stand beside those of the readout."""
        return u if self.readout == "every" else rows.last(pad(u, (0, 0, rows.B, 0)))

    def pre_outputs(
        self,
        rows: Rows,
        h: Tensor,
        V: Tensor,
        b_o: Tensor | None,
        u: Tensor | None = None,
        more: Any = None,
    ) -> Tensor:
        """a = V h + D u + b_o, in rows."""
        more = more or {}
        a = affine(self.output_rows(rows), self.readout_features(rows, h, more), V, b_o)
        if "D" not in more:
            return a
        assert u is not None
        return a + affine(self.output_rows(rows), self.at_outputs(rows, u), more["D"], None)
