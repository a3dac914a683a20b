"""Steps of docs/conventions.md, as the documents print them, beside those of the optimisers."""

import pytest
import torch
from torch import nn

import coadjoint as co

F64 = torch.float64
A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)
START = torch.tensor([1.0, -2.0], dtype=F64)
STEPS = 6


def slope(theta):
    return A @ theta + theta**3


def ours(optimiser):
    """The weights before each step."""
    theta = nn.Parameter(START.clone())
    made = optimiser.make([theta])
    seen = []
    for _ in range(STEPS):
        seen.append(theta.detach().clone())
        theta.grad = slope(theta.detach())
        made.step()
    return torch.stack(seen)


def test_momentum_is_that_of_both_documents():
    """Galvan (2.29) with the minus of descent, and Perez Jensen's heavy ball."""
    theta, v = START, torch.zeros(2, dtype=F64)
    before = other = START
    seen, balls = [], []
    for _ in range(STEPS):
        seen.append(theta)
        balls.append(other)
        v = 0.9 * v - 0.05 * slope(theta)
        theta = theta + v
        before, other = other, other - 0.05 * slope(other) + 0.9 * (other - before)
    found = ours(co.optimisers.optimiser("momentum", 0.05))
    torch.testing.assert_close(found, torch.stack(seen), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, torch.stack(balls), rtol=1e-12, atol=0)


def test_the_weights_of_nesterov_are_where_the_documents_take_the_slope():
    theta, v = START, torch.zeros(2, dtype=F64)
    ahead = []
    for _ in range(STEPS):
        ahead.append(theta + 0.9 * v)
        v = 0.9 * v - 0.05 * slope(theta + 0.9 * v)
        theta = theta + v
    found = ours(co.optimisers.optimiser("nesterov", 0.05))
    torch.testing.assert_close(found, torch.stack(ahead), rtol=1e-12, atol=0)


def test_adagrad_is_that_of_the_notes():
    theta, squares = START, torch.zeros(2, dtype=F64)
    seen = []
    for _ in range(STEPS):
        seen.append(theta)
        g = slope(theta)
        squares = squares + g**2
        theta = theta - 0.1 * g / (squares.sqrt() + 1e-10)
    found = ours(co.optimisers.optimiser("adagrad", 0.1))
    torch.testing.assert_close(found, torch.stack(seen), rtol=1e-12, atol=0)


@pytest.mark.parametrize("corrected", [False, True])
def test_adam_of_the_notes_lacks_a_step_size_and_the_corrections(corrected):
    """With both of them put in, it is ours."""
    theta = START
    g, squares = torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64)
    seen = []
    for t in range(1, STEPS + 1):
        seen.append(theta)
        g = 0.9 * g + 0.1 * slope(theta)
        squares = 0.999 * squares + 0.001 * slope(theta) ** 2
        if corrected:
            root = (squares / (1 - 0.999**t)).sqrt()
            theta = theta - 0.05 * (g / (1 - 0.9**t)) / (root + 1e-8)
        else:
            theta = theta - g / (squares.sqrt() + 1e-8)
    found = ours(co.optimisers.optimiser("adam", 0.05))
    is_same = torch.allclose(found, torch.stack(seen), rtol=1e-12, atol=0)
    assert is_same == corrected
