"""Batches that are drawn several at a time are those of the task, each at its turn."""

import pytest
import torch

import coadjoint as co
from coadjoint.training import ahead
from coadjoint.training.ahead import DrawnAhead


class Counted(co.tasks.TemporalOrder):
    """Notes each draw."""

    def draw(self, rng, L):
        self.draws.append(int(L[0]))
        if len(self.draws) == self.fails_at:
            raise co.DataError("no more")
        return super().draw(rng, L)


def counted(length=20, fails_at=None, **options):
    task = Counted(length, **options)
    task.draws = []
    task.fails_at = fails_at
    return task


def same(a, b):
    return torch.equal(a.u, b.u) and torch.equal(a.y, b.y)


def test_the_batches_are_those_of_the_task():
    task = counted((12, 30), curriculum=(12, 40))
    plain = co.tasks.TemporalOrder((12, 30), curriculum=(12, 40))
    drawn = DrawnAhead(task, 3, 5, 60)
    order = [*range(40), 7, 8, 9, 59, 50, 51]
    for number in order:
        assert same(drawn.batch(number), plain.batch(number, 3, 5))


def test_several_are_drawn_at_a_time_but_none_beyond_the_end():
    task = counted()
    drawn = DrawnAhead(task, 3, 5, 30)
    sizes = []
    for number in range(30):
        drawn.batch(number)
        sizes.append(len(task.draws))
    assert sizes == [1] + [17] * 16 + [30] * 13


def test_large_batches_are_drawn_one_by_one(monkeypatch):
    monkeypatch.setattr(ahead, "MOST_BYTES", 4 * 20 * 3 * 6)  # one batch
    task = counted()
    drawn = DrawnAhead(task, 3, 5, 30)
    for number in range(5):
        drawn.batch(number)
        assert len(task.draws) == number + 1


def test_a_task_that_is_changed_draws_anew():
    task = counted(20)
    drawn = DrawnAhead(task, 3, 5, 30)
    drawn.batch(0)
    drawn.batch(1)
    task.span = (11, 11)
    assert len(drawn.batch(2).u) == 11


def test_an_error_is_raised_at_its_turn():
    task = counted(fails_at=4)
    drawn = DrawnAhead(task, 3, 5, 30)
    for number in range(3):
        drawn.batch(number)
    task.draws = [0, 0, 0]
    with pytest.raises(co.DataError, match="no more"):
        drawn.batch(3)


def test_a_batch_of_a_users_own_is_drawn_at_its_turn():
    class Own(co.tasks.TemporalOrder):
        def batch(self, step, size, seed):
            asked.append(step)
            return super().batch(step, size, seed)

    asked = []
    for task in (Own(20), co.tasks.TemporalOrder(20)):
        if not isinstance(task, Own):
            task.batch = Own(20).batch
        asked.clear()
        drawn = DrawnAhead(task, 3, 5, 30)
        for number in range(4):
            drawn.batch(number)
        assert asked == [0, 1, 2, 3]
