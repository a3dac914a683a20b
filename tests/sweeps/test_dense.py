"""Tangents and weight gradients of dense layers: engine `cpu` against torch's own operations."""

import pytest
import torch

from coadjoint.cells.classic import elman
from coadjoint.sweeps import engines
from coadjoint.sweeps.dense import dense_tangent, layer_gradients
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.rows import uniform_rows

T = 4
B = 5
SIZES = (1, 3, 16, 37, 64)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_plan(engine, activation="tanh"):
    return SweepPlan(elman(activation), uniform_rows(T, B), engines.load(engine), checked=False)


@pytest.fixture(autouse=True)
def needs_a_compiler():
    if engines.device_refusal("cpu", "cpu") is not None:
        pytest.skip("no compiler")
    torch.manual_seed(0)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("activation", ["tanh", "identity", "sigmoid", "softplus"])
@pytest.mark.parametrize("given", ["first", "entries", "rates", "all"])
def test_tangents_and_bend_equal_those_of_torch(n, activation, given):
    W = draw(T, n, n) / n**0.5
    first = draw(B, n) if given in ("first", "all") else None
    entries = draw(B * (T + 1), n) if given in ("entries", "all") else None
    rates = draw(B * (T + 1)) if given in ("rates", "all") else None
    lam = draw(B * (T + 1), n)
    k = torch.randint(-30, 30, (B * (T + 1),), dtype=torch.int32)
    biases = draw(T, n)
    results = []
    for engine in ("cpu", "eager"):
        plan = make_plan(engine, activation)
        base = biases if engine == "cpu" else biases.repeat_interleave(B, 0)
        torch.manual_seed(1)
        x, a, q = plan.engine.forward(plan, base, None, W, draw(B, n), None)
        saved = Saved(a, None, x, None, q)
        results.append((x, *dense_tangent(plan, saved, W, lam, k, first, entries, rates)))
    for ours, expected in zip(*results, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("with_penalty", [False, True])
def test_weight_gradients_equal_those_of_torch(n, with_penalty):
    delta, x, lam_delta, m = (draw(T * B, n) for _ in range(4))
    pair = (lam_delta, m) if with_penalty else (None, None)
    ours = layer_gradients(make_plan("cpu"), delta, x, *pair)
    expected = layer_gradients(make_plan("eager"), delta, x, *pair)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
