"""Own loops replayed as CUDA graphs have the values and derivatives of those that are not.

A CPU stands in for the GPU (tests/support/graphs.py).
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

import coadjoint as co
import graphs
from coadjoint.sweeps.engines.cuda.captured_stages import Stage

F64 = torch.float64


@pytest.fixture
def gpu(monkeypatch):
    """The CPU is taken for a GPU."""
    graphs.install(monkeypatch)


def make_net(cell="elman", **options):
    torch.manual_seed(0)
    made = {"inputs": 3, "hidden": 5, "outputs": 4, "engine": "eager", "dtype": F64, **options}
    return co.Network(cell, **made)


def never_replayed(net):
    """A copy whose runs are computed operation by operation."""
    other = copy.deepcopy(net)
    recordings = other.recordings
    recordings.runs.records = recordings.costates.records = recordings.penalties.records = False
    return other


def draw(i, T=6, B=3, classes=4):
    generator = torch.Generator().manual_seed(i)
    u = torch.randn(T, B, 3, generator=generator, dtype=F64)
    return u, torch.randint(classes, (B,), generator=generator)


def penalised(net, u, y, G=co.penalties.log_ratio, loss="cross-entropy", **options):
    """The gradient of an own loop, by name, and the objective."""
    lam = net(u).costates(loss, y, **options)
    objective = (lam.loss + 0.3 * G(lam)).mean()
    grads = torch.autograd.grad(objective, list(net.parameters()), allow_unused=True)
    return [objective.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def assert_same(found, expected):
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-14)


def stages(recordings):
    """How many functions were captured, of runs, costates and penalties."""
    kinds = recordings.runs, recordings.costates, recordings.penalties
    return [sum(isinstance(e, Stage) for e in kind.cache.entries.values()) for kind in kinds]


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_own_loop(cell, gpu):
    net = make_net(cell)
    plain = never_replayed(net)
    for i in range(8):
        u, y = draw(i)
        assert_same(penalised(net, u, y), penalised(plain, u, y))
    assert stages(net.recordings) == [1, 1, 1]
