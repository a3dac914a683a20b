"""What gradient methods, optimisers, diagnostics and training take: a network, and its run over a batch.

    net.run(batch) -> NetRun        run.loss(loss, y) -> [B]        run.costates(loss, y) -> lam_i = dL/dx_i

A new kind of network is a subclass of Net whose runs have what NetRun lists and whose costates are BaseCostates.
Nothing that takes a Net asks what kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..cells.cell import Cell
from ..cells.transport import PicklableModule
from ..errors import InputError, KindError, Unsupported, brief
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, Output
from ..sweeps.costates import BaseCostates
from ..sweeps.layout import Sequences, lay_out
from ..sweeps.torch_internals import has_hooks

if TYPE_CHECKING:
    from .layers import Recorded
    from .network import Network
    from .recurrence import Recurrence


class NetRun(Protocol):
    """One run of a network over a batch of B samples. A recurrent network's run has `lengths` [B], too."""

    @property
    def network(self) -> Net:
        """The network that made it."""

    @property
    def a(self) -> Tensor:
        """Pre-outputs, y_hat = phi(a): [B, outputs], or with readout "every" [T, B, outputs]."""

    @property
    def states(self) -> Sequence[Tensor] | Tensor:
        """x_0, x_1, ...: states[i] is [B, ...], by time steps or by layers."""

    def loss(
        self, loss: LossLike, y: Any = None, *, mask: Tensor | None = None, reduce: str = "sum"
    ) -> Tensor:
        """The loss of each sample, [B]."""

    def costates(
        self, loss: LossLike, y: Any = None, *, mask: Tensor | None = None, reduce: str = "sum"
    ) -> BaseCostates | Recorded:
        """lam_i = dL/dx_i of each sample's own loss. Differentiable, for penalties."""


class Net(PicklableModule, ABC):
    """A network, as gradient methods, optimisers, diagnostics and training see it.

    inputs, outputs  entries of what it reads and says
    readout          "last": one answer for each sample; "every": one for each step; "sequence": one with its own length
    output           phi in y_hat = phi(a)
    why_indivisible  why this network cannot be taken apart into steps, for the message of `refuse_if_indivisible`
    dropout          the share of entries that is dropped in training
    """

    inputs: int
    outputs: int
    readout: str
    output: Output
    why_indivisible = "this network is not one recurrent layer"
    dropout: float = 0.0

    @abstractmethod
    def run(self, batch: Batch) -> NetRun:
        """The run of this network over a batch. (Each kind has its own, with more than NetRun has.)"""

    @property
    def like(self) -> Tensor:
        """A tensor of the network's type, on its device: what batches are moved to."""
        return next(self.parameters())

    def move_batch(self, batch: Batch) -> Batch:
        """The batch in the network's type, on its device."""
        like = self.like
        return batch.to(like.dtype, like.device)

    @property
    def one_layer(self) -> Network | None:
        """This network, if it is a single recurrent layer with its readout; None otherwise."""
        return None

    @property
    def recurrences(self) -> Iterable[tuple[str, Recurrence]]:
        """Its recurrent layers, each with its place in words: ", layer 0, reverse"; none if it has none."""
        return ()

    @property
    def readout_width(self) -> int:
        """Entries of what the readout reads, by which a start draws its weights."""
        raise Unsupported(
            "this network has no readout V, by whose width weights are drawn. Use another initialiser."
        )

    def count_samples(self, batch: Batch) -> int:
        """How many samples a batch has."""
        return len(batch.sizes)

    def graph_key(self) -> Hashable | None:
        """What a CUDA graph of this network's gradient depends on beside weights and batch; None if there can be none."""
        return None

    def readout_extras(self) -> Iterable[str]:
        """What stands between this network and a = V h + b_o, in words; nothing if that is all."""
        return ("no linear readout",)

    def refuse_if_indivisible(self, what: str) -> None:
        """Refuse `what`, which takes a sequence apart, where that is not the same."""
        raise Unsupported(
            f"{what}: {self.why_indivisible}. Use BPTT or Penalised without segments."
        )

    def refuse_if_random(self, what: str) -> None:
        """Refuse `what`, which runs the network more than once, where each run drops something else."""
        if self.dropout and self.training:
            raise Unsupported(
                f"{what}: dropout={self.dropout:g} drops something else in every run, in training. Leave it out, "
                "call net.eval(), or use BPTT or Penalised without segments."
            )

    def refuse_if_not_linear(self, what: str) -> None:
        """Refuse `what`, which knows V and b_o alone."""


class SequenceNet(Net):
    """A network that reads sequences: net(u, lengths, x0)."""

    cell: Cell | None = None  # if there is one

    @abstractmethod
    def run(self, batch: Batch, called: bool = False) -> Any:
        """The run over a batch. called: by `forward`, so that torch's hooks, if there are any, have fired."""

    def forward(self, u: Sequences, lengths: Any = None, x0: Tensor | None = None) -> Any:
        """Run over u: [T, B, inputs], a list of [T_i, inputs], or a PackedSequence; x0 [B, n] or [n], of all layers."""
        return self.run(Batch(u, lengths=lengths, x0=x0), called=True)

    def count_samples(self, batch: Batch) -> int:
        return lay_out(batch.u, batch.lengths, self.inputs, self.like)[0].rows.B

    def _must_be_called(self, batch: Batch) -> bool:
        """Must `run` go through torch's __call__: for hooks, a compiled module, or a forward that is not ours?"""
        if batch.axis != 1:
            raise InputError(
                f"this network reads sequences [T, B, inputs], and the samples of the batch lie along axis {batch.axis}; "
                "expected axis=1."
            )
        return has_hooks(self) or getattr(self.forward, "__func__", None) is not SequenceNet.forward


def run_function(net: Any) -> Callable[[Batch], NetRun]:
    """net.run; of a module around a network (DistributedDataParallel, say), which is no Net, a call of that module."""
    if isinstance(net, Net):
        return net.run
    return lambda batch: net(batch.u, batch.lengths, batch.x0)


def check_net(net: Any) -> None:
    """A network, or a module around one."""
    if not hasattr(net, "readout") and not hasattr(getattr(net, "module", None), "readout"):
        raise KindError(
            f"the network must be a co.Network, co.Stack or co.EncoderDecoder; got {brief(net)}."
        )
