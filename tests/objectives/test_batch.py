"""A batch knows its extent in every form of its inputs, and moves only what has to be moved."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import coadjoint as co

SAMPLES = [torch.zeros(length, 2) for length in (4, 7, 1)]
FORMS = {
    "sequences": co.Batch(torch.zeros(5, 3, 2)),
    "lengths": co.Batch(torch.zeros(9, 3, 2), lengths=[4, 7, 1]),
    "list": co.Batch(SAMPLES),
    "packed": co.Batch(pack_sequence(SAMPLES, enforce_sorted=False)),
    "without time": co.Batch(torch.zeros(5, 3, 2), axis=0),
}
EXTENTS = {
    "sequences": (3, 5),
    "lengths": (3, 7),
    "list": (3, 7),
    "packed": (3, 7),
    "without time": (5, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_extent_is_the_number_of_samples_and_the_longest(form):
    batch = FORMS[form]
    assert batch.extent == EXTENTS[form]
    assert batch.extent == (len(batch.sizes), int(batch.sizes.max()))


def test_only_what_differs_is_moved():
    u = torch.zeros(5, 3, 2)
    y = torch.tensor([0, 1, 0])
    batch = co.Batch(u, y, mask=torch.ones(3, dtype=torch.float64))
    assert batch.to(torch.float32, "cpu").u is u
    moved = batch.to(torch.float64, "cpu")
    assert (moved.u.dtype, moved.y, moved.mask) == (torch.float64, y, batch.mask)
    same = co.Batch(u, y)
    assert same.to(torch.float32, "cpu") is same
