"""The training batches of a run: drawn several at a time, or while a GPU is at work.

DrawnAhead   the batches of a generated task, drawn several at a time
MovedAhead   the same on the network's device; a GPU is sent the next ones while it works

To draw a small batch takes many short calls. Between two gradients their code has left the
processor's caches, and a batch takes about twice the time of one that is drawn right after another.
On a GPU it takes no time at all if the GPU has something else to do meanwhile, and a few batches
are sent together, because each sending takes as long as drawing a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_

import torch
from torch import Tensor

from ..networks.interface import Net
from ..objectives.batch import MOVED, Batch
from ..sweeps.checks import answers_late
from ..tasks.generated import Generated
from ..tasks.task import Task

MOST_BATCHES = 16  # drawn one after the other
MOST_BYTES = 2**20  # of their inputs together
MOST_STAGED_BYTES = 2**26  # of a batch's tensor that is copied to memory from which a GPU reads
MOST_TOGETHER = 4  # batches that are sent to a GPU together
MOST_TOGETHER_BYTES = 2**22  # of their inputs


class DrawnAhead:
    """Batch number 0, 1, ... of a task, the same as `task.batch` returns at its turn."""

    def __init__(self, task: Task, size: int, seed: int, end: int) -> None:
        """size, seed: of the batches. end: the number of batches of the run."""
        self.task = task
        self.size = size
        self.seed = seed
        self.end = end
        self.next = -1  # the number after that of the last batch
        self.waiting: dict[int, Batch] = {}
        self.settings: list[object] = []  # of the task, when those were drawn

    def batch(self, number: int) -> Batch:
        """The batch with this number."""
        if not draws_by_formula(self.task):
            return self.draw(number)
        if not self.has_same_settings():
            self.waiting.clear()
        batch = self.waiting.pop(number, None)
        if batch is None:
            self.waiting.clear()
            batch = self.draw(number)
            if number == self.next:  # the batches are asked for one after the other
                self.draw_after(number, batch)
        self.next = number + 1
        return batch

    def draw(self, number: int) -> Batch:
        """Draw the batch with this number now."""
        return self.task.batch(number, self.size, self.seed)

    def early(self, number: int) -> Batch | None:
        """The batch with this number before its turn; None if it must be drawn at its turn."""
        if number >= self.end or not draws_by_formula(self.task):
            return None
        if not self.has_same_settings():
            self.waiting.clear()
            self.settings = list(vars(self.task).values())
        batch = self.waiting.pop(number, None)
        return self.draw(number) if batch is None else batch

    def draw_after(self, number: int, batch: Batch) -> None:
        """Draw the batches after this one, as many as there is room for."""
        count = min(MOST_BATCHES, MOST_BYTES // max(1, batch.u.nbytes))
        self.settings = list(vars(self.task).values())
        for k in range(number + 1, min(number + count, self.end)):
            try:
                self.waiting[k] = self.draw(k)
            except Exception:  # it is raised again when this batch has its turn
                return

    def has_same_settings(self) -> bool:
        """Whether nobody has changed the task since the waiting batches were drawn."""
        settings = vars(self.task).values()
        return len(settings) == len(self.settings) and all(map(is_, settings, self.settings))


class MovedAhead:
    """The batches of a run in the network's type, on its device."""

    def __init__(self, net: Net, drawn: DrawnAhead) -> None:
        """drawn: where the batches come from."""
        self.net = net
        self.drawn = drawn
        self.is_late = False  # did the last batch go to a GPU, and is there room for another?
        self.ready: dict[int, Batch] = {}  # that have been sent to the device, by number
        self.place: tuple[torch.dtype, torch.device] | None = None  # the network's, at that time

    def batch(self, number: int) -> Batch:
        """The batch with this number."""
        batch = self.take(number)
        if batch is None:
            self.ready.clear()
            batch = self.send(self.drawn.batch(number))
        return batch

    def take(self, number: int) -> Batch | None:
        """The batch with this number, if it is ready and would still be the same."""
        if not self.holds(number):
            return None
        return self.ready.pop(number)

    def holds(self, number: int) -> bool:
        """Whether the batch is ready, and neither task nor network have been changed since."""
        if number not in self.ready or self.place != self.present_place:
            return False
        return self.drawn.has_same_settings()

    def prepare(self, number: int) -> None:
        """Draw this batch and a few after it, and send them to a GPU, while it is at work."""
        if self.is_late and self.holds(number):
            return
        self.ready.clear()
        if not self.is_late:
            return
        self.place = self.present_place
        try:
            drawn: list[Batch] = []
            while len(drawn) < MOST_TOGETHER and fits(drawn):
                batch = self.drawn.early(number + len(drawn))
                if batch is None:
                    break
                drawn.append(batch)
            self.ready = dict(enumerate(self.send_together(drawn), number))
        except Exception:  # it is raised again when this batch has its turn
            self.ready.clear()

    @property
    def present_place(self) -> tuple[torch.dtype, torch.device]:
        """The type and the device of the network."""
        like = self.net.like
        return like.dtype, like.device

    def send_together(self, batches: Sequence[Batch]) -> list[Batch]:
        """What net.move_batch returns for each; those of one shape are sent as one array."""
        if len(batches) < 2 or not are_alike(batches):
            return [self.send(batch) for batch in batches]
        u = torch.stack([batch.u for batch in batches])
        y = None
        if isinstance(batches[0].y, Tensor):
            y = torch.stack([batch.y for batch in batches])
        joined = self.staged(replace(batches[0], u=u, y=y))
        moved = []
        for i, batch in enumerate(batches):
            part = replace(batch, u=joined.u[i], y=None if joined.y is None else joined.y[i])
            moved.append(self.net.move_batch(part))
        return moved

    def send(self, batch: Batch) -> Batch:
        """What net.move_batch returns; a GPU is not waited for."""
        if self.is_late:
            batch = self.staged(batch)
        moved = self.net.move_batch(batch)
        is_small = isinstance(moved.u, Tensor) and moved.u.nbytes <= MOST_STAGED_BYTES
        # A `move_batch` of the user's own is given the batches as they are drawn.
        is_plain = type(self.net).move_batch is Net.move_batch
        self.is_late = is_small and is_plain and answers_late(moved.u)
        return moved

    def staged(self, batch: Batch) -> Batch:
        """The batch with its tensors on the device, copied by way of memory that a GPU reads."""
        dtype, device = self.present_place
        parts = {name: getattr(batch, name) for name in MOVED}
        for name, values in parts.items():
            is_small = isinstance(values, Tensor) and values.nbytes <= MOST_STAGED_BYTES
            if is_small and values.device.type == "cpu":
                typed = values.to(dtype) if values.is_floating_point() else values
                # torch keeps the staged memory until the device has read it.
                parts[name] = stage(typed).to(device, non_blocking=True)
        return replace(batch, **parts)


def fits(drawn: Sequence[Batch]) -> bool:
    """Whether one more batch of the size of those that were drawn may be sent with them."""
    if not drawn:
        return True
    together: int = (len(drawn) + 1) * drawn[0].u.nbytes
    return together <= MOST_TOGETHER_BYTES


def are_alike(batches: Sequence[Batch]) -> bool:
    """Whether batches consist of inputs and answers alone, of the same shapes and types."""
    shapes = set()
    for batch in batches:
        if any(getattr(batch, name) is not None for name in ("lengths", "mask", "weight", "x0")):
            return False
        y = batch.y
        shape_of_y = (y.shape, y.dtype) if isinstance(y, Tensor) else y
        shapes.add((batch.u.shape, batch.u.dtype, shape_of_y))
    return len(shapes) == 1


def stage(values: Tensor) -> Tensor:
    """A copy in memory from which a GPU reads by itself."""
    return values.pin_memory()


def draws_by_formula(task: Task) -> bool:
    """Whether its batches are drawn by `Generated`, and no `batch` of a subclass does more."""
    if not isinstance(task, Generated) or "batch" in vars(task):
        return False
    return type(task).batch is Generated.batch
