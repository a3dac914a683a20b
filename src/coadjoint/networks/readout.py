"""Readout: from states to pre-outputs (networks/judge.py continues to the loss of each sample).

The chain from the inputs u and the states x to the pre-outputs a, one name for each link:

    drive            base_t = R u_t + b, side_t likewise       Recurrence.drive, by `input_weights`
    sweep            x_t = f(W r(x_{t-1}), base_t, side_t, x_{t-1}, p)        Recurrence.sweep
    visible_state    h_t = the slots of x_t that others read   Recurrence.visible_state
    readout_input    h_t of all steps, or of each last step    Network.readout_input
    readout_features z = deep(summary(mask * h))               Readout.readout_features
    pre_outputs      a = V z + D u + b_o                       Readout.pre_outputs
    outputs          y_hat = phi(a)                            RunOutputs.y_hat

`read_states` goes from states to a in one call. The way back, for gradients:

    visible_state_transpose   dL/dx_t from dL/dh_t             Recurrence.visible_state_transpose
    input_gradient_rows       dL/d(R u_t + b)                  Recurrence.input_gradient_rows

Arrays are in rows (see sweeps/rows.py): [N, .] for all steps of all samples, [B, .] for samples.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells.parameters import parameter
from ..errors import MAX_COUNT, InputError, Unsupported, brief, choose, real, whole_number
from ..objectives import losses
from ..objectives.batch import Batch
from ..objectives.losses import Output
from ..sweeps.affine import affine
from ..sweeps.layout import Layout
from ..sweeps.rows import Rows
from ..sweeps.torch_internals import named_parameters, own_parameters
from .interface import NetRun, SequenceNet

Extra = Mapping[str, Tensor]  # weights of a readout other than V and b_o, and its dropout mask


class ReadoutRun(NetRun, Protocol):
    """A run of a network with a readout."""

    @property
    def layout(self) -> Layout:
        """How the samples lie in rows."""

    @property
    def readout_input(self) -> Tensor:
        """What the readout reads, in rows: of all steps, or one row for each sample."""


class TensorOptions(TypedDict):
    """The type and the device of new parameters."""

    dtype: torch.dtype
    device: torch.device | str | None


def mean(net: Readout, rows: Rows, h: Tensor, extra: Extra) -> Tensor:
    """(1/T) sum_t h_t over each sample's own steps: [N, n] -> [B, n].

    net, extra: not used; all summaries take the same arguments.
    """
    sample = rows.sample_on(h.device)
    total = h.new_zeros(rows.B, h.shape[1]).index_add(0, sample, h)
    return total / rows.lengths_like(h)[:, None]


def tilted(net: Readout, rows: Rows, h: Tensor, extra: Extra) -> Tensor:
    """(1/beta) log mean_t exp(beta h_t) over each sample's own steps: [N, n] -> [B, n].

    extra: not used; all summaries take the same arguments.
    """
    return log_mean_exp(rows, net.beta * h) / net.beta


def tilted_tanh(net: Readout, rows: Rows, h: Tensor, extra: Extra) -> Tensor:
    """(1/beta) log tanh(m), m = mean_t exp(beta h_t) over a sample's own steps: [N, n] -> [B, n].

    extra: not used; all summaries take the same arguments.
    """
    log_m = log_mean_exp(rows, net.beta * h)
    # log tanh(m) is log m for tiny m (to the last digit below log m = -20, where m^2 / 3 is
    # lost in rounding), and log(1 - 2 / (e^2m + 1)) for large m, where tanh(m)
    # rounds to 1. Each formula is evaluated on clamped arguments, so that the branch that is
    # not taken cannot overflow; past log m = 5.8 the result is less than 1e-286 away from 0.
    small = torch.exp(log_m.clamp(-20, 0))
    large = torch.exp(log_m.clamp(0, 5.8))
    of_small = torch.log(torch.tanh(small))
    of_large = torch.log1p(-2 * torch.sigmoid(-2 * large))
    log_tanh = torch.where(log_m < 0, of_small, of_large)
    return torch.where(log_m < -20, log_m, log_tanh) / net.beta


def log_mean_exp(rows: Rows, y: Tensor) -> Tensor:
    """The logarithm of mean_t exp(y_t) over each sample's own steps: [N, n] -> [B, n]."""
    sample = rows.sample_on(y.device)
    lowest = y.new_full((rows.B, y.shape[1]), -math.inf)
    # The largest y_t is subtracted before exp() and added afterwards. It cancels, so it is a
    # constant for derivatives.
    largest = lowest.scatter_reduce(0, sample[:, None].expand_as(y), y.detach(), "amax")
    total = y.new_zeros(rows.B, y.shape[1]).index_add(0, sample, torch.exp(y - largest[sample]))
    return largest + torch.log(total / rows.lengths_like(y)[:, None])


def attention(net: Readout, rows: Rows, h: Tensor, extra: Extra) -> Tensor:
    """sum_t alpha_t h_t: [N, n] -> [B, n].

    alpha is the softmax of tanh(w_a . h_t + b_t) over each sample's own steps. extra holds w_a and
    the biases b_a = (b_1, b_2, ...).
    """
    sample = rows.sample_on(h.device)
    b_a = extra["b_a"]
    # late steps share the last b_t
    step = (rows.time_on(h.device) - 1).clamp(max=len(b_a) - 1)
    # The exponent is a tanh: it lies between -1 and 1, and nothing can overflow.
    weight = torch.exp(torch.tanh(h @ extra["w_a"] + b_a[step]))
    total = weight.new_zeros(rows.B).index_add(0, sample, weight)
    alpha = weight / total[sample]
    return h.new_zeros(rows.B, h.shape[1]).index_add(0, sample, alpha[:, None] * h)


SUMMARIES: dict[str, Callable[[Readout, Rows, Tensor, Extra], Tensor]] = {
    "mean": mean,
    "tilted": tilted,
    "tilted-tanh": tilted_tanh,
    "attention": attention,
}
EXTRA_PARAMETERS = ("D", "w_a", "b_a")  # parameters of a readout other than V and b_o
DROPOUT_MASK = "dropped"  # the key of the dropout mask of `readout_input` in Extra


def draw_dropout_mask(p: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """Entries 0 with probability p and 1 / (1 - p) otherwise, on the device of `like`.

    They are drawn on the CPU, whose generator is saved with a run: a resumed run continues the
    same random numbers on every device.
    """
    return nn.functional.dropout(torch.ones(*shape, dtype=like.dtype), p).to(like.device)


def check_dropout(p: object, what: str) -> float:
    """The probability p as a float; refused unless 0 <= p < 1. what: the entries it drops."""
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        raise InputError(
            f"dropout is the share of {what} to drop during training: expected a number from 0 "
            f"to below 1; got {p!r}."
        )
    return float(p)


def check_widths(deep: object) -> tuple[int, ...]:
    """The widths of the readout's hidden layers as a tuple; deep is one width or several.

    Anything but positive integers is refused.
    """
    widths = tuple(deep) if isinstance(deep, list | tuple) else (deep,)
    for width in widths:
        is_integer = isinstance(width, int) and not isinstance(width, bool)
        if not is_integer or not 0 < width <= MAX_COUNT:
            raise InputError(
                "deep holds the widths of the readout's hidden layers, positive integers; "
                f"got {brief(deep)}."
            )
    return widths


class Readout(SequenceNet):
    """A linear readout and its extensions, shared by Network and Stack.

    readout  "last" (one output per sample) or "every" (one per step); with a summary of all
             steps it is "last"
    summary  the name of that summary in SUMMARIES, or None
    deep     hidden layers between h and V: h <- tanh(O h + c), one for each width
    dropout  the share of the inputs and of `readout_input` that is dropped during training
    """

    why_indivisible = "this network reads entire sequences"
    V: nn.Parameter
    b_o: nn.Parameter | None
    summary: str | None
    beta: float

    @abstractmethod
    def run(self, batch: Batch, called: bool = False) -> ReadoutRun:
        """The run over a batch; see SequenceNet."""

    def _make_readout(
        self,
        width: int,
        *,
        readout: str,
        output: Output,
        bias: bool,
        skip: bool,
        beta: float | None,
        steps: int | None,
        deep: int | Sequence[int],
        make: TensorOptions,
    ) -> None:
        """Create the parameters for an h of `width` entries; `_draw_readout` fills them.

        make: the type and the device of the parameters. Other arguments as in Network.
        """
        choose("readout", readout, ("last", "every", *SUMMARIES))
        self.readout = "every" if readout == "every" else "last"
        self.summary = readout if readout in SUMMARIES else None
        if readout.startswith("tilted"):
            self.beta = 1.0 if beta is None else float(real("beta", beta))
            if self.beta == 0:
                raise InputError(f"beta must be a finite number other than 0; got {beta!r}.")
        if steps is not None:
            is_count = isinstance(steps, int) and steps >= 1
            if readout != "attention" or not is_count:
                raise InputError(
                    "steps is the number of biases b_t of readout='attention', at least 1; "
                    f"got {steps!r}, {readout=}."
                )
            whole_number("steps", steps)  # refuses True, and numbers that are too large
        losses.output_function(output)  # refuses an unknown output
        self.output = output
        widths = (width, *check_widths(deep))
        self.V = parameter(self.outputs, widths[-1], **make)
        self.b_o = parameter(self.outputs, **make) if bias else None
        if skip:
            self.D = parameter(self.outputs, self.inputs, **make)
        if readout == "attention":
            self.w_a = parameter(width, **make)
            self.b_a = parameter(steps or 1, **make)
        self.deep = nn.ModuleList()
        for below, above in itertools.pairwise(widths):
            self.deep.append(nn.Linear(below, above, bias, **make))

    def _draw_readout(self, bound: float) -> None:
        """Draw the readout uniformly from +-bound, and its hidden layers as torch.nn does."""
        with torch.no_grad():
            for name in ("V", "b_o", *EXTRA_PARAMETERS):
                value = getattr(self, name, None)
                if isinstance(value, nn.Parameter):
                    value.uniform_(-bound, bound)
        for layer in self.deep:
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()

    @property
    def like(self) -> Tensor:
        """V, whose type and device are the network's."""
        return self.V

    def dropout_mask(self, rows: int, width: int) -> Tensor | None:
        """A dropout mask [rows, width]; None where nothing is dropped."""
        if not self.dropout or not self.training:
            return None
        return draw_dropout_mask(self.dropout, (rows, width), self.V)

    @property
    def is_linear(self) -> bool:
        """Whether the readout's features are linear in the states: no summary, no hidden layer."""
        return self.summary is None and not len(self.deep)

    def readout_extras(self) -> Iterator[str]:
        """The options that make this readout more than V h + b_o."""
        yield from self._additions_to_V()
        if hasattr(self, "w_a"):
            yield "readout='attention'"
        if not isinstance(own_parameters(self).get("V"), nn.Parameter):  # it is computed
            yield "a parametrised V"

    def _additions_to_V(self) -> Iterator[str]:
        """The options that add weights beside V: a skip D, hidden layers."""
        if hasattr(self, "D"):
            yield "skip=True"
        if len(self.deep) > 0:
            yield "deep="

    def refuse_if_not_linear(self, what: str) -> None:
        """Refuse the method `what`, which knows only V and b_o, if there is D or a hidden layer."""
        for addition in self._additions_to_V():  # the first one, if any, is the reason
            raise Unsupported(
                f"{what} does not support {addition}. Use BPTT or Penalised without segments."
            )

    def extra_weights(self) -> dict[str, Tensor]:
        """The readout's current weights other than V and b_o, by name."""
        extra: dict[str, Tensor] = {}
        own = own_parameters(self)
        for name in EXTRA_PARAMETERS:
            # hasattr takes long where there is none; a computed one is a property of the class.
            if name in own or name in vars(self) or hasattr(type(self), name):
                extra[name] = getattr(self, name)
        if len(self.deep):
            for name, weight in named_parameters(self.deep):
                extra[f"deep.{name}"] = weight
        return extra

    @property
    def reads_all_steps(self) -> bool:
        """Whether the readout reads the states of all steps, not each sample's last one alone."""
        return self.readout == "every" or self.summary is not None

    def readout_features(self, rows: Rows | None, h: Tensor, extra: Extra) -> Tensor:
        """What V multiplies: deep(summary(mask * h)).

        h      `readout_input`: step rows if `reads_all_steps`, else one row for each sample
        extra  the readout's weights other than V and b_o, and its dropout mask
        """
        if DROPOUT_MASK in extra:
            h = h * extra[DROPOUT_MASK]
        if self.summary is not None:
            assert rows is not None
            h = SUMMARIES[self.summary](self, rows, h, extra)
        for i in range(len(self.deep)):
            weight = extra[f"deep.{i}.weight"]
            bias = extra.get(f"deep.{i}.bias")
            h = torch.tanh(affine(self.output_rows(rows), h, weight, bias))
        return h

    def output_rows(self, rows: Rows | None) -> Rows | None:
        """The rows of the outputs, as `affine` takes them: None if there is one for each sample."""
        return rows if self.readout == "every" else None

    def at_outputs(self, rows: Rows, u: Tensor) -> Tensor:
        """The rows of a step array [N, .] at the steps that have an output."""
        if self.readout == "every":
            return u
        # rows.last() takes state rows, which begin with the B rows of x_0.
        return rows.last(pad(u, (0, 0, rows.B, 0)))

    def pre_outputs(
        self,
        rows: Rows | None,
        h: Tensor,
        V: Tensor,
        b_o: Tensor | None,
        u: Tensor | None = None,
        extra: Extra | None = None,
    ) -> Tensor:
        """The pre-outputs a = V z + D u + b_o in rows, z the features of the readout's input h.

        rows may be None where single steps are read: readout "every" without D. u is in step rows,
        read if there is a D; extra as in `readout_features`.
        """
        extra = extra or {}
        a = affine(self.output_rows(rows), self.readout_features(rows, h, extra), V, b_o)
        if "D" not in extra:
            return a
        assert u is not None
        assert rows is not None
        return a + affine(self.output_rows(rows), self.at_outputs(rows, u), extra["D"], None)
