"""Few calls of the package lie between a user's call and a loop in C.

Each costs time and a reader's patience.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import coadjoint as co
from coadjoint.sweeps.engines.c import engine as c_engine

pytestmark = pytest.mark.skipif(
    c_engine.refusal("cpu") is not None, reason="engine 'cpu' has no compiler here"
)

# One of them is `functions.without_graph`, which stands where torch's own wrapper of no_grad was.
MOST_OF_A_MODULE = 10
MOST_OF_A_GRADIENT = 10
MOST_OF_A_BACKWARD = 7  # of these the sweeps' own
PACKAGE = str(Path(co.__file__).parent)


@pytest.fixture
def walks(monkeypatch):
    """The functions of the package on the stack at each call of a loop, the outermost first, the
    call itself last.
    """
    found = []
    run = c_engine.run

    def counted(*args):
        frame, names = sys._getframe(1), ["run"]
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.insert(0, f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
            frame = frame.f_back
        found.append(names)
        return run(*args)

    monkeypatch.setattr(c_engine, "run", counted)
    return found


def longest(walks):
    assert walks
    return max(walks, key=len)


def test_a_module_reaches_the_loop(walks):
    module = co.nn.LSTM(2, 3, engine="cpu")
    u = torch.randn(4, 2, 2, requires_grad=True)
    y, _ = module(u)
    walk = longest(walks)
    assert len(walk) <= MOST_OF_A_MODULE, walk
    walks.clear()
    (g,) = torch.autograd.grad(y.sum(), u, create_graph=True)
    g.square().sum().backward()
    walk = longest(walks)
    assert len(walk) <= MOST_OF_A_BACKWARD, walk


def test_a_penalised_gradient_reaches_the_loop(walks):
    net = co.Network("elman", inputs=2, hidden=5, outputs=2, engine="cpu")
    batch = co.Batch(torch.randn(6, 3, 2), torch.randn(3, 2))
    co.Penalised("log-ratio", 0.1)(net, batch, "squared")
    walk = longest(walks)
    assert len(walk) <= MOST_OF_A_GRADIENT, walk
