"""What gradient methods, optimisers, diagnostics and training take: a network and its run.

    net.run(batch) -> NetRun
    run.loss(loss, y) -> [B]
    run.costates(loss, y) -> lam_i = dL/dx_i

A new kind of network is a subclass of Net whose runs have the members of NetRun and whose costates
are BaseCostates. Code that takes a Net never tests for its kind.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor, nn

from ..cells.cell import Cell
from ..cells.transport import PicklableModule
from ..errors import MAX_COUNT, InputError, KindError, Unsupported, brief, choose
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, Output
from ..sweeps.costates import BaseCostates
from ..sweeps.layout import Sequences, lay_out
from ..sweeps.torch_internals import has_hooks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .chain import Chain
    from .layers import Recorded
    from .network import Network
    from .recurrence import Recurrence

Lengths: TypeAlias = "ArrayLike"  # the steps of each sample, [B] whole numbers
HELD = ("source",)  # what `costates` can hold constant


class NetRun(Protocol):
    """One run of a network over B samples. A recurrent network's run has `lengths` [B], too."""

    @property
    def network(self) -> Net:
        """The network that made this run."""

    @property
    def a(self) -> Tensor:
        """The pre-outputs, [B, outputs], or with readout "every" [T, B, outputs]."""

    @property
    def states(self) -> Sequence[Tensor] | Tensor:
        """The states x_0, x_1, ... by time steps or by layers: states[i] is [B, ...]."""

    def loss(
        self,
        loss: LossLike,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor:
        """The loss of each sample, [B]."""

    def costates(
        self,
        loss: LossLike,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
        hold: str | None = None,
    ) -> BaseCostates | Recorded:
        """lam_i = dL/dx_i of each sample's own loss, differentiable for penalties.

        hold  "source": what the loss itself adds to a costate, its direct derivative by the states
              that the readout reads, is a constant to derivatives of the costates
        """


class Net(PicklableModule, ABC):
    """A network, as gradient methods, optimisers, diagnostics and training see it.

    inputs, outputs  the number of entries of u_t and of y_hat
    readout          "last": one output for each sample; "every": one for each step; "sequence":
                     one sequence for each sample, with its own length
    output           phi in y_hat = phi(a)
    sample_axis      the axis of a batch's inputs along which this network has its samples: 1 for
                     sequences [T, B, inputs], 0 for inputs [B, ...]
    why_indivisible  why this network cannot run one part of a sequence after the other, for the
                     message of `refuse_if_indivisible`
    whole_methods    the gradient methods that run it at once, in words for the same message
    dropout          the share of entries that is dropped during training
    """

    inputs: int
    outputs: int
    readout: str
    output: Output
    sample_axis = 1
    why_indivisible = "this network is not one recurrent layer"
    whole_methods = "BPTT or Penalised without segments"
    dropout: float = 0.0

    @abstractmethod
    def run(self, batch: Batch) -> NetRun:
        """The run over a batch. Each kind of network returns its own, with more than NetRun has."""

    @property
    def like(self) -> Tensor:
        """A tensor of the network's type, on its device."""
        return next(self.parameters())

    def move_batch(self, batch: Batch) -> Batch:
        """The batch in the network's type, on its device."""
        like = self.like
        return self.read_batch(batch).to(like.dtype, like.device)

    def read_batch(self, batch: Batch) -> Batch:
        """The batch with the axis of its samples filled in; another axis is refused."""
        if batch.axis == self.sample_axis:
            return batch
        if batch.axis is None:
            # Sequences lie along axis 1 unless something else is said: nothing to fill in.
            return batch if self.sample_axis == 1 else replace(batch, axis=self.sample_axis)
        reads = "inputs [B, ...]" if self.sample_axis == 0 else "sequences [T, B, inputs]"
        raise InputError(
            f"this network reads {reads}, so samples must lie along axis {self.sample_axis}; "
            f"got a batch with axis={batch.axis}."
        )

    @property
    def one_layer(self) -> Network | None:
        """This network if it is a single recurrent layer with a readout; None otherwise."""
        return None

    @property
    def as_chain(self) -> Chain | None:
        """This network if it is a chain of maps; None otherwise."""
        return None

    @property
    def recurrences(self) -> Iterable[tuple[str, Recurrence]]:
        """The recurrent layers, each with its place in words (", layer 0, reverse"); here none."""
        return ()

    @property
    def carries_state(self) -> bool:
        """Whether a sequence may be run in parts, the last state of one as x0 of the next.

        The outputs are then those of one run. Not so for networks that read sequences backwards,
        or all steps at once.
        """
        return False

    @property
    def readout_width(self) -> int:
        """The number of entries that V reads, by which initialisers scale the readout."""
        raise Unsupported(
            "this network has no readout V, whose width this initialiser needs. "
            "Use another initialiser."
        )

    def count_samples(self, batch: Batch) -> int:
        """The number of samples in a batch."""
        return len(batch.sizes)

    def graph_key(self) -> Hashable | None:
        """A key for CUDA graphs of this network's gradient; None if it cannot be captured.

        It changes with everything a graph depends on other than the weights and the batch.
        """
        return None

    def readout_extras(self) -> Iterable[str]:
        """What makes the readout of this network more than a = V h + b_o, in words."""
        return ("no linear readout",)

    def refuse_if_indivisible(self, what: str) -> None:
        """Refuse the method `what`, which runs one part of a sequence after the other.

        A network that can do so has its own version, which refuses less.
        """
        raise Unsupported(f"{what}: {self.why_indivisible}. Use {self.whole_methods}.")

    def refuse_if_random(self, what: str) -> None:
        """Refuse the method `what`, which repeats runs, if dropout makes each run different."""
        if self.dropout and self.training:
            raise Unsupported(
                f"{what}: with dropout={self.dropout:g} every run in training mode is different. "
                f"Leave dropout out, call net.eval(), or use {self.whole_methods}."
            )

    def refuse_if_not_linear(self, what: str) -> None:
        """Refuse the method `what`, which knows only V and b_o, if the readout has more.

        Nothing is refused here; networks with a Readout have their own version.
        """


class SequenceNet(Net):
    """A network that reads sequences: net(u, lengths, x0)."""

    cell: Cell | None = None

    @abstractmethod
    def run(self, batch: Batch, called: bool = False) -> NetRun:
        """The run over a batch. called: by `forward`, so that torch's hooks have fired already."""

    def forward(
        self, u: Sequences, lengths: Lengths | None = None, x0: Tensor | None = None
    ) -> NetRun:
        """Run over sequences.

        u        [T, B, inputs], a list of [T_i, inputs], or a PackedSequence
        lengths  [B], the steps of each sample in a padded u
        x0       the first states of all layers, [B, n] or [n]
        """
        return self.run(Batch(u, lengths=lengths, x0=x0), called=True)

    def count_samples(self, batch: Batch) -> int:
        """The number of samples in a batch of sequences."""
        return lay_out(batch.u, batch.lengths, self.inputs, self.like)[0].rows.B

    def _must_be_called(self, batch: Batch) -> bool:
        """Whether `run` must go through torch's __call__, `net(u, lengths, x0)`.

        It must if there are hooks, or if torch.compile or the user has replaced `forward`. A batch
        whose samples do not lie along axis 1 is refused.
        """
        self.read_batch(batch)
        return self.must_be_called()

    def must_be_called(self) -> bool:
        """Whether there are hooks, or another `forward` in the place of this package's."""
        forward = getattr(self.forward, "__func__", None)  # the function behind the bound method
        return has_hooks(self) or forward is not SequenceNet.forward


def run_function(net: Net | nn.Module) -> Callable[[Batch], NetRun]:
    """The function batch -> run of a network.

    A wrapper such as DistributedDataParallel is not a Net; it is called like the network inside.
    """
    if isinstance(net, Net):
        return net.run

    def call_wrapper(batch: Batch) -> NetRun:
        arguments = (batch.u,) if batch.axis == 0 else (batch.u, batch.lengths, batch.x0)
        run: NetRun = net(*arguments)
        return run

    return call_wrapper


def holds_source(hold: str | None) -> bool:
    """Whether the sources of costates are constants to their derivatives; see NetRun.costates."""
    return hold is not None and choose("part of costates to hold", hold, HELD) == "source"


def check_positive(**sizes: object) -> None:
    """Refuse sizes, given by name, that are not positive integers."""
    for name, value in sizes.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < 1:
            raise InputError(f"{name} must be a positive integer; got {brief(value)}.")
        if int(value) > MAX_COUNT:
            raise InputError(f"{name} must be at most {MAX_COUNT:,}; got {brief(value)}.")


def check_net(net: object) -> None:
    """Refuse anything but a network, known by its `readout`, or a module around one.

    A wrapper such as DistributedDataParallel holds the network as its `module`.
    """
    if not hasattr(net, "readout") and not hasattr(getattr(net, "module", None), "readout"):
        raise KindError(
            "the network must be a co.Network, co.Stack, co.EncoderDecoder or co.Chain; got "
            f"{brief(net)}."
        )
