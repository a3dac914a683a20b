"""Two tasks of one's own data that must be the same to the bit."""

import torch

from coadjoint.tasks.data import Data


def assert_same(a: Data, b: Data) -> None:
    """Both tasks have the same description, batches and held-out sets, to the bit."""
    for key in ("mean", "std", "target_mean", "target_std", "labels", "masked", "categories", "at"):
        assert getattr(a.description, key) == getattr(b.description, key), key
    assert a.splits == b.splits
    for step in range(5):
        one, other = a.batch(step, 4, 3), b.batch(step, 4, 3)
        assert torch.equal(one.u, other.u)
        assert torch.equal(one.y, other.y)
    for split in a.splits:
        pairs = zip(a.held_out(split, 0), b.held_out(split, 0), strict=True)
        assert all(torch.equal(p.u, q.u) and torch.equal(p.y, q.y) for p, q in pairs)
        assert list(a.sets[split].ids) == list(b.sets[split].ids)
        assert [o.times for o in a.sets[split].origins] == [o.times for o in b.sets[split].origins]
