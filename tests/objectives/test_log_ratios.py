"""The penalty log-ratio of sizes in C: its derivatives against torch's, in float64."""

import math

import pytest
import torch

from coadjoint.objectives.log_ratios import log_ratio_of_sizes
from coadjoint.sweeps import engines

F64 = torch.float64


def by_definition(size, k, first):
    log = size.log() + k.double() * math.log(2)
    return (log[:-1] - log[1:])[first:].square().mean(0)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("L", [2, 3, 12])
def test_three_derivatives(L, first):
    if engines.device_refusal("cpu", "cpu") is not None:
        pytest.skip("no compiler")
    torch.manual_seed(0)
    size = (torch.rand(L + 1, 5, dtype=F64) + 0.3).requires_grad_()
    k = torch.randint(-200, 200, (L + 1, 5), dtype=torch.int32)
    g = torch.randn(5, dtype=F64)
    v = torch.randn(2, L + 1, 5, dtype=F64)

    def derivatives(value):
        (slope,) = torch.autograd.grad(value, size, g, create_graph=True)
        (bend,) = torch.autograd.grad(slope, size, v[0], create_graph=True)
        (third,) = torch.autograd.grad(bend, size, v[1])
        return value, slope, bend, third

    found = derivatives(log_ratio_of_sizes(size, k, first))
    for f, e in zip(found, derivatives(by_definition(size, k, first)), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-11 * max(1.0, e.abs().max().item()))


def test_there_is_no_penalty_of_one_step():
    size = torch.rand(2, 3, requires_grad=True)
    value = log_ratio_of_sizes(size, torch.zeros(2, 3, dtype=torch.int32), 1)
    assert value.tolist() == [0, 0, 0]
    (slope,) = torch.autograd.grad(value.sum(), size)
    assert not slope.any()
