"""DrawnAhead: the training batches of a generated task, drawn several at a time.

To draw a small batch takes many short calls. Between two gradients their code has left the
processor's caches, and a batch takes about twice the time of one that is drawn right after another.
"""

from __future__ import annotations

from operator import is_

from ..objectives.batch import Batch
from ..tasks.generated import Generated
from ..tasks.task import Task

MOST_BATCHES = 16  # drawn one after the other
MOST_BYTES = 2**20  # of their inputs together


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


def draws_by_formula(task: Task) -> bool:
    """Whether its batches are drawn by `Generated`, and no `batch` of a subclass does more."""
    if not isinstance(task, Generated) or "batch" in vars(task):
        return False
    return type(task).batch is Generated.batch
