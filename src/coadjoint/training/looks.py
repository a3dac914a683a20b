"""How a run looks at held-out data: all at once, or in the little memory of its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..gradients.segment_looks import SegmentedRun, run_in_segments
from ..gradients.segments import Segments
from ..networks.interface import Net, NetRun
from ..objectives.batch import Batch
from ..objectives.losses import LossLike


@dataclass(frozen=True)
class Looks:
    """How looks at held-out data save memory: as the gradients of the run do.

    segments  sequences are swept in so many segments; None: at once, and a look is not cut
    samples   the most sequences that are looked at at once, with segments
    """

    segments: Segments = None
    samples: int | None = None

    def parts(self, net: Net, batch: Batch) -> Iterator[Batch]:
        """The batch in parts of at most `samples` sequences, on the network's device."""
        count = len(batch.sizes)
        if self.segments is None or self.samples is None or count <= self.samples:
            yield net.move_batch(batch)
            return
        for begin in range(0, count, self.samples):
            index = range(begin, min(begin + self.samples, count))
            yield net.move_batch(batch.select(index, net.readout))

    def run(self, net: Net, batch: Batch, loss: LossLike) -> NetRun | SegmentedRun:
        """The run over a part: its outputs and losses."""
        if self.segments is None:
            return net.run(batch)
        return run_in_segments(net, batch, loss, self.segments)


AT_ONCE = Looks()
