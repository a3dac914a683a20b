"""How much memory a gradient takes, as notes at the beginning of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .schema import TrainingSection

if TYPE_CHECKING:
    from ..gradients.memory import RunMemory
    from ..gradients.method import Method
    from ..networks.interface import Net
    from ..networks.network import Network
    from ..objectives.batch import Batch
    from ..tasks.task import Task

MUCH_MEMORY = 1e9  # bytes of one gradient beyond which a note says so
MOST_AT_ONCE = 1000  # held-out sequences of a finite task: see `Collection.held_out`
COPIES_OF_STATES = 4  # states, costates, and the changes of both


class Look(NamedTuple):
    """Sequences that are run at once, without derivatives."""

    number: int
    steps: int  # of the longest
    what: str = "held-out"

    @property
    def text(self) -> str:
        """The sequences in words: "1,000 held-out sequences at once", "1 held-out sequence"."""
        if self.number == 1:
            return f"1 {self.what} sequence of {self.steps:,} steps"
        return f"{self.number:,} {self.what} sequences at once"


def memory_notes(
    net: Net, sample: Batch, training: TrainingSection, method: Method, task: Task
) -> list[str]:
    """How much memory one gradient takes, where it is much or segments are used.

    sample: a batch of one. Only chains, and networks of one layer with a formula, can be predicted.
    """
    if net.sample_axis == 0:
        return notes_on_depth(net, sample, training.batch or 1)  # resolved by now
    return notes_on_time(net, len(sample.u), training, method, looks_of(task, training, sample))


def notes_on_depth(net: Net, sample: Batch, batch: int) -> list[str]:
    """A note if the states of a chain, over a batch, take much memory."""
    import torch

    with torch.no_grad():
        states = net.run(sample).states
    entries = sum(x.numel() for x in states)
    needed = COPIES_OF_STATES * entries * batch * net.like.element_size()
    if needed <= MUCH_MEMORY:
        return []
    return [
        f"a gradient takes about {format_bytes(needed)} of memory; a smaller --batch takes less"
    ]


def looks_of(task: Task, training: TrainingSection, sample: Batch) -> list[Look]:
    """The largest look at each set of a task, by the sequences that there are.

    A finite task looks at all sequences of a set, some at once, and at the end of a run also at
    those of its training set. Others draw as many as --tests.
    """
    from ..tasks.task import LARGEST_BATCH, Collection

    if not isinstance(task, Collection):
        return [Look(training.tests or 1000, len(sample.u))]
    looks = []
    for split, sequences in task.sets.items():
        lengths = sequences.steps()
        if not len(lengths):
            continue
        longest = max(1, int(lengths.max()))
        count = min(MOST_AT_ONCE, len(lengths), max(1, LARGEST_BATCH // longest))
        looks.append(Look(count, longest, "training" if split == "train" else "held-out"))
    return looks


def largest_run(
    layer: Network, T: int, training: TrainingSection, method: Method, looks: Sequence[Look]
) -> tuple[RunMemory, Look]:
    """The memory of a run on sequences of T steps, and the look that takes most of it."""
    from ..gradients import memory

    batch = training.batch or 1  # resolved by now
    steps = memory.predict_run(layer, T, method, batch, training.probes, tests=1)
    part = 1 if method.segments is None else batch  # in segments, a look has as many at once
    found = []
    for look in looks:
        looked = memory.predict_run(layer, look.steps, method, part, 1, look.number)
        standing = max(steps.standing, looked.standing)
        found.append((steps._replace(standing=standing, look=looked.look), look))
    return max(found, key=lambda pair: pair[0].peak)


def notes_on_time(
    net: Net, T: int, training: TrainingSection, method: Method, looks: Sequence[Look]
) -> list[str]:
    """What `memory_notes` says about sequences of T time steps."""
    from ..gradients import memory
    from ..gradients.bptt import BPTT
    from ..gradients.penalised import Penalised

    layer = net.one_layer
    if layer is None or layer.cell is None or not isinstance(method, BPTT | Penalised):
        return []
    batch = training.batch or 1  # resolved by now
    needed = memory.predict(layer, T, batch, method)
    gradient = f"a gradient at T = {T:,} takes about {format_bytes(needed)}"
    run, look = largest_run(layer, T, training, method, looks)
    if method.segments is None:
        notes = []
        if needed > MUCH_MEMORY:
            notes.append(f"{gradient} of memory; --segments auto would take less")
        if run.peak > MUCH_MEMORY and run.peak > 2 * needed:
            notes.append(
                f"the run takes up to {format_bytes(run.peak)} on {net.like.device.type}, where it "
                f"looks at {look.text}"
            )
        return notes
    memory.steady()  # keeps freed segments from leaving holes in the heap
    unsegmented: Method = BPTT()
    if isinstance(method, Penalised):
        unsegmented = Penalised(method.penalty)
    in_one = memory.predict(layer, T, batch, unsegmented)
    return [
        f"{gradient} of memory ({format_bytes(in_one)} without segments)",
        f"the run takes up to {format_bytes(run.peak)} on {net.like.device.type}, with its looks "
        "at held-out sequences",
    ]


def format_bytes(count: float) -> str:
    """A number of bytes in GB or MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
