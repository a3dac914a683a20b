"""Forward mode in several threads at once: torch has one stack of its levels for all threads."""

import sys
import threading

import pytest
import torch
from torch.autograd import forward_ad

import build
from coadjoint.sweeps import torch_internals as internals

THREADS = 6
PUSHES = 20


@pytest.fixture
def threads_take_turns_often():
    """The interpreter changes threads every few operations, not every few milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work):
    """work(i) in THREADS threads that begin together -> the errors they raised."""
    begin = threading.Barrier(THREADS)
    errors = []

    def begin_and_work(i):
        begin.wait()
        try:
            work(i)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=begin_and_work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def pushed_and_pulled(net, u, du):
    """The change of the outputs along du, and its derivative by the weights, as one array."""
    change = net(u).push(du)
    by_weights = torch.autograd.grad(change.square().sum(), net.parameters(), allow_unused=True)
    return torch.cat([change.flatten(), *(g.flatten() for g in by_weights if g is not None)])


@pytest.mark.parametrize("engine", ["reference", "autograd"])
@pytest.mark.usefixtures("threads_take_turns_often")
def test_threads_push_as_one_alone(engine):
    nets = []
    for i in range(THREADS):
        nets.append(build.network("gru", seed=i, engine=engine, output="sigmoid"))
    u, du = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    alone = [pushed_and_pulled(net, u, du) for net in nets]
    wrong = []

    def push_many(i):
        for _ in range(PUSHES):
            if not torch.equal(pushed_and_pulled(nets[i], u, du), alone[i]):
                wrong.append(i)

    assert in_threads(push_many) == []
    assert wrong == []


def test_a_level_of_another_thread_is_not_ours():
    """Costates without gradients stay so while another thread pushes."""
    is_open = threading.Event()
    may_close = threading.Event()
    inside = []

    def open_a_level():
        with internals.forward_mode(), forward_ad.dual_level():
            with internals.forward_mode():  # nested
                pass
            inside.append(internals.forward_mode_is_on())
            is_open.set()
            may_close.wait()

    thread = threading.Thread(target=open_a_level)
    thread.start()
    is_open.wait()
    outside = internals.forward_mode_is_on()
    may_close.set()
    thread.join()
    assert inside == [True]
    assert not outside
    with forward_ad.dual_level():
        assert internals.forward_mode_is_on()
