"""How much memory a gradient takes, as notes at the beginning of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schema import TrainingSection

if TYPE_CHECKING:
    from ..gradients.method import Method
    from ..networks.interface import Net
    from ..objectives.batch import Batch

MUCH_MEMORY = 1e9  # bytes of one gradient beyond which a note says so
COPIES_OF_STATES = 4  # states, costates, and the changes of both


def memory_notes(net: Net, sample: Batch, training: TrainingSection, method: Method) -> list[str]:
    """How much memory one gradient takes, where it is much or segments are used.

    sample: a batch of one. Only chains, and networks of one layer with a formula, can be predicted.
    """
    if net.sample_axis == 0:
        return notes_on_depth(net, sample, training.batch or 1)  # resolved by now
    return notes_on_time(net, len(sample.u), training, method)


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


def notes_on_time(net: Net, T: int, training: TrainingSection, method: Method) -> list[str]:
    """What `memory_notes` says about sequences of T time steps."""
    from ..gradients import memory
    from ..gradients.bptt import BPTT
    from ..gradients.penalised import Penalised
    from ..tasks.task import LARGEST_BATCH

    layer = net.one_layer
    if layer is None or layer.cell is None or not isinstance(method, BPTT | Penalised):
        return []
    batch = training.batch or 1  # resolved by now
    probes = training.probes
    needed = memory.predict(layer, T, batch, method)
    gradient = f"a gradient at T = {T:,} takes about {format_bytes(needed)}"
    # A finite task looks at all of its held-out sequences, some at once.
    tests = training.tests or max(1, LARGEST_BATCH // T)
    run = memory.predict_run(layer, T, method, batch, probes, tests)
    if method.segments is None:
        notes = []
        if needed > MUCH_MEMORY:
            notes.append(f"{gradient} of memory; --segments auto would take less")
        if run.peak > MUCH_MEMORY and run.peak > 2 * needed:
            notes.append(
                f"the run takes up to {format_bytes(run.peak)} on {net.like.device.type}, where it "
                f"looks at {tests:,} held-out sequences at once"
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
