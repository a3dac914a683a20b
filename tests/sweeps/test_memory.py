"""Large arrays are reused, but only when nobody else holds them."""

import gc

import pytest
import torch

import coadjoint as co
from coadjoint.sweeps import memory

SHAPE = (512, 512)


@pytest.fixture(autouse=True)
def fresh():
    memory.release()
    yield
    memory.release()


def test_a_free_array_is_handed_out_again():
    first = memory.empty(SHAPE, torch.ones(1))
    address = first.data_ptr()
    del first
    assert memory.empty(SHAPE, torch.ones(1)).data_ptr() == address


@pytest.mark.parametrize(
    "hold",
    [lambda y: y, lambda y: y[3:5], lambda y: y.T, lambda y: (y.requires_grad_() * 2).grad_fn],
)
def test_an_array_that_somebody_holds_is_not_reused(hold):
    first = memory.empty(SHAPE, torch.ones(1))
    address, held = first.data_ptr(), hold(first)
    del first
    assert memory.empty(SHAPE, torch.ones(1)).data_ptr() != address
    assert held is not None


def test_small_arrays_and_other_types_are_left_to_torch():
    memory.empty((3,), torch.ones(1))
    assert not memory._storages
    assert memory.empty(SHAPE, torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_sizes_no_longer_asked_for_are_dropped():
    memory.empty((1024, 512), torch.ones(1))
    for _ in range(memory.STALE + 1):
        memory.empty(SHAPE, torch.ones(1))
    kept = memory.empty(SHAPE, torch.ones(1)), memory.empty(SHAPE, torch.ones(1))
    assert len(kept) == 2
    assert set(memory._storages) == {4 * 512 * 512}


def test_ever_other_sizes_do_not_fill_the_memory(monkeypatch):
    """Idle arrays are dropped beyond twice what was in use, those requested last are kept."""
    monkeypatch.setattr(memory, "IDLE", 1 << 22)
    held = memory.empty((1024, 1024), torch.ones(1))  # 4 MiB
    address = held.data_ptr()
    for rows in range(1025, 1125):
        last = memory.empty((rows, 1024), torch.ones(1)).data_ptr()
        kept = sum(size * len(storages) for size, storages in memory._storages.items())
        assert kept < 8 << 22  # 4 MiB held, 4 of the present array, twice as much idle, and one
    assert memory.empty((1124, 1024), torch.ones(1)).data_ptr() == last
    assert held.data_ptr() == address
    again = memory.empty((1024, 1024), torch.ones(1))
    assert again.data_ptr() != address


def test_sizes_that_come_again_and_again_are_kept(monkeypatch):
    """A gradient, and then a look at other data, which has little in use beside what is idle."""
    monkeypatch.setattr(memory, "IDLE", 1 << 20)
    allocated = []

    def allocate(size):
        allocated.append(size)
        return torch.UntypedStorage(size)

    monkeypatch.setattr(memory, "UntypedStorage", allocate)

    def gradient_and_look():
        held = [memory.empty((rows, 1024), torch.ones(1)) for rows in (1024, 1100, 1200)]
        del held
        memory.empty((512, 1024), torch.ones(1))

    gradient_and_look()
    assert len(allocated) == 4
    gradient_and_look()
    assert len(allocated) == 4


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_training_does_not_grow(cell):
    """No sweep leaves an array behind: the number of storages settles after the first step, without
    the garbage collector.
    """
    net = co.Network(cell, inputs=2, hidden=64, outputs=1)
    batch = co.Batch(torch.randn(40, 32, 2), torch.randn(32, 1))
    gc.disable()
    try:
        counts = []
        for _ in range(6):
            co.Penalised("log-ratio", 0.1)(net, batch, "squared").write_grad(net)
            counts.append(sum(map(len, memory._storages.values())))
    finally:
        gc.enable()
    assert counts[1:] == counts[1:2] * 5


def test_results_kept_from_one_step_do_not_change_in_the_next():
    net = co.Network("elman", inputs=2, hidden=64, outputs=1, dtype=torch.float64)
    batch = co.Batch(
        torch.randn(40, 32, 2, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
    )
    e = co.Penalised("log-ratio", 0.1)(net, batch, "squared")
    before = [y.clone() for y in (e.trajectory.x, e.costates.mantissa, *e.gradient.values())]
    for _ in range(3):
        co.Penalised("variance", 0.1)(net, batch, "squared")
    after = (e.trajectory.x, e.costates.mantissa, *e.gradient.values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
