"""With a matrix for each step, the three loops are those of a dense network over its layers.

The oracle is torch, which differentiates x_t = psi(W_t x_{t-1} + b_t) once and twice.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import coadjoint as co
from coadjoint.sweeps import FormulaRun, Rows, SweepPlan, load
from coadjoint.sweeps.engines.cuda import engine as cuda_engine
from coadjoint.sweeps.engines.eager import fused
from coadjoint.sweeps.norms import norm
from coadjoint.sweeps.rows import scale, uniform_rows
from last_digits import as_exact_as_float32_allows, nudged

pytestmark = pytest.mark.slow

ENGINES = ["cpu", "eager", "fused", "reference"]  # fused: what engine `cuda` runs for W by step
ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda a: a,
    "softplus": torch.nn.functional.softplus,
}
SIZES = [  # (T, B, d)
    (1, 1, 1),
    (1, 4, 3),
    (2, 7, 1),
    (3, 1, 8),
    (4, 5, 2),
    (5, 2, 13),
    (7, 6, 17),
    (9, 3, 5),
    (8, 7, 16),
    (3, 5, 64),
]
CASES = [(activation, size) for size in SIZES for activation in ACTIVATIONS]


def loops(engine):
    """The three loops of an engine, by name."""
    return fused if engine == "fused" else load(engine)


class Layers(NamedTuple):
    """A dense network of T layers, and where it is evaluated."""

    W: Tensor  # [T, d, d]
    b: Tensor  # [T, d]
    x0: Tensor  # [B, d]
    y: Tensor  # [B, d], the target

    @staticmethod
    def draw(T, B, d, dtype=torch.float64, gain=1.0, seed=0):
        """Weights of the given gain, and leaves that require gradients."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        W = gain * normal(T, d, d) / math.sqrt(d)
        made = (W, 0.3 * normal(T, d), normal(B, d), normal(B, d))
        return Layers(*(value.to(dtype) for value in made)).leaves()

    def leaves(self):
        """The same values as new leaves; the target is none."""
        W, b, x0, y = (value.detach().clone() for value in self)
        return Layers(W.requires_grad_(), b.requires_grad_(), x0.requires_grad_(), y)

    def run(self, activation, engine):
        """The run of these layers as a recurrence whose W has a matrix for each step."""
        T, d = self.b.shape
        B = len(self.x0)
        plan = SweepPlan(co.cells.elman(activation), uniform_rows(T, B), loops(engine))
        base = self.b[:, None].expand(T, B, d).reshape(T * B, d)
        return FormulaRun.run(plan, base, None, self.W, self.x0, None)

    def states(self, activation):
        """The states x_0 .. x_T by torch alone."""
        states = [self.x0]
        for W, b in zip(self.W, self.b, strict=True):
            states.append(ACTIVATIONS[activation](states[-1] @ W.T + b))
        return states


def loss(x, y):
    return (x - y).square().sum() / 2


def penalty(lam):
    """A smooth function of the costates [(T + 1) B, d], which is finite where they are zero."""
    return (1 + lam.square().sum(1)).log().sum() + lam.sin().sum()


def ours(layers, activation, engine):
    """States, costates, and the penalised objective, by the sweeps."""
    run = layers.run(activation, engine)
    costates = run.costate(None, run.last - layers.y, None)
    lam = scale(costates.mantissa, costates.exponent[:, None])
    return run.x, lam, loss(run.last, layers.y) + penalty(lam)


def expected(layers, activation):
    """The same by torch alone."""
    states = layers.states(activation)
    value = loss(states[-1], layers.y)
    lam = torch.cat(torch.autograd.grad(value, states, create_graph=True))
    return torch.cat(states), lam, value + penalty(lam)


def gradients(value, layers, **options):
    leaves = (layers.W, layers.b, layers.x0)
    return torch.autograd.grad(value, leaves, materialize_grads=True, **options)


def assert_close(found, right, tolerance=1e-10):
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("activation", "size"), CASES)
def test_states_costates_and_gradients_are_those_of_torch(activation, size, engine):
    layers = Layers.draw(*size)
    found = ours(layers, activation, engine)
    right = expected(layers, activation)
    assert_close(found, right)
    assert_close(gradients(found[2], layers), gradients(right[2], layers))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [(1, 1, 1), (4, 3, 5), (6, 2, 17)])
def test_the_gradient_without_a_graph_is_the_same(size, engine):
    layers = Layers.draw(*size)
    plain = gradients(loss(layers.run("tanh", engine).last, layers.y), layers)
    assert_close(plain, gradients(loss(layers.states("tanh")[-1], layers.y), layers))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_third_derivatives_are_those_of_torch(activation, engine):
    layers = Layers.draw(3, 2, 4)
    results = []
    for _, _, value in (ours(layers, activation, engine), expected(layers, activation)):
        first = gradients(value, layers, create_graph=True)
        results.append(gradients(sum(y.square().sum() for y in first), layers))
    assert_close(*results, tolerance=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(1, 1, 1), (4, 3, 5), (7, 2, 17)])
def test_push_forward_and_pull_back_are_those_of_torch(activation, size, engine):
    layers = Layers.draw(*size)
    T, B, d = size
    direction = Layers.draw(*size, seed=1)
    run = layers.run(activation, engine)
    dbase = direction.b[:, None].expand(T, B, d).reshape(T * B, d)
    pushed = run.push(dbase, None, direction.W, direction.x0, None)

    def states(W, b, x0):
        return torch.cat(Layers(W, b, x0, layers.y).states(activation))

    _, right = torch.func.jvp(states, tuple(layers[:3]), tuple(direction[:3]))
    assert_close([pushed], [right])
    w = torch.randn_like(run.x)
    pulled = run.pull(w)
    x = layers.states(activation)
    for t in range(T):
        (right,) = torch.autograd.grad(x[t + 1], x[t], w[(t + 1) * B : (t + 2) * B])
        assert_close([pulled[t * B : (t + 1) * B]], [right])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu"])
def test_forward_over_reverse_is_that_of_torch(activation, engine):
    layers = Layers.draw(4, 3, 5)
    direction = Layers.draw(4, 3, 5, seed=1)

    def ours_of(W, b, x0):
        return loss(Layers(W, b, x0, layers.y).run(activation, engine).last, layers.y)

    def expected_of(W, b, x0):
        return loss(Layers(W, b, x0, layers.y).states(activation)[-1], layers.y)

    results = []
    for f in (ours_of, expected_of):
        gradient = torch.func.grad(f, argnums=(0, 1, 2))
        results.append(torch.func.jvp(gradient, tuple(layers[:3]), tuple(direction[:3]))[1])
    assert_close(*results)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_penalised_objective_can_be_differentiated_forwards(engine):
    layers = Layers.draw(4, 3, 5)
    direction = Layers.draw(4, 3, 5, seed=1)

    def objective(W, b, x0):
        return ours(Layers(W, b, x0, layers.y), "tanh", engine)[2]

    _, change = torch.func.jvp(objective, tuple(layers[:3]), tuple(direction[:3]))
    by_leaves = gradients(expected(layers, "tanh")[2], layers)
    right = sum((g * v).sum() for g, v in zip(by_leaves, direction, strict=False))
    assert_close([change], [right])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["lstm_1997", "inverse", "rate", "scrn", "cornn"])
def test_any_cell_takes_a_matrix_for_each_step(name, engine):
    """One matrix, repeated: the gradients by the matrices of the steps add up to that by W."""
    cell = getattr(co.cells, name)()
    T, B, d = 4, 3, 5
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        value = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
        return value.requires_grad_()

    gates = len(cell.gates) * d
    W = normal(gates, len(cell.read) * d)
    base = normal(T * B, gates)
    x0 = normal(B, len(cell.slots) * d)
    p = normal(len(cell.p) * d) if cell.p else None
    v = normal(T * B, len(cell.v) * d) if cell.v else None
    plan = SweepPlan(cell, uniform_rows(T, B), loops(engine))
    results = []
    for weights in (W, W.expand(T, *W.shape)):
        run = FormulaRun.run(plan, base, v, weights, x0, p)
        lam = run.costate(run.x.detach(), None, None)
        value = penalty(scale(lam.mantissa, lam.exponent[:, None])) + run.x.square().sum()
        pushed = run.push(base.detach(), None, 2 * weights.detach(), x0.detach(), None)
        grads = torch.autograd.grad(value, (W, base, x0))
        results.append((run.x, lam.mantissa, run.pull(lam.mantissa), pushed, *grads))
    assert_close(*results)


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_matrices_give_the_bits_of_one(engine):
    layers = Layers.draw(5, 6, 17, torch.float32)
    W = layers.W.detach()[0]
    plan = SweepPlan(co.cells.elman("tanh"), uniform_rows(5, 6), loops(engine))
    base = torch.randn(30, 17)
    runs = []
    for weights in (W, W.expand(5, 17, 17)):
        run = FormulaRun.run(plan, base, None, weights, layers.x0.detach(), None)
        lam = run.costate(None, run.last, None)
        runs.append((run.x, lam.mantissa, lam.exponent, run.push(base)))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def log_ratio_gradient(layers, engine):
    """log-norms [T + 1, B] in float64, and the gradients of the log-ratio penalty."""
    run = layers.run("tanh", engine)
    T, B = len(layers.W), len(layers.x0)
    costates = run.costate(None, run.last - layers.y, None)
    logs = norm(costates.mantissa).double().log().view(T + 1, B)
    k = costates.exponent.view(T + 1, B)
    ratios = torch.add(logs[:-1] - logs[1:], k[:-1] - k[1:], alpha=math.log(2))
    value = ratios.square().mean(0).sum() + loss(run.last, layers.y)
    return logs.detach() + k * math.log(2), gradients(value, layers)


@pytest.mark.parametrize("engine", ENGINES)
def test_costates_that_vanish_through_600_layers_keep_their_digits(engine):
    wide = Layers.draw(600, 3, 16)
    shrinking = 0.3 * torch.linalg.qr(wide.W.detach())[0]
    narrow = Layers(*(y.float() for y in wide._replace(W=shrinking))).leaves()
    logs, by_leaves = log_ratio_gradient(narrow, engine)

    def in_float64(draw):
        """Of the rounded weights, or with other last digits."""
        return log_ratio_gradient(Layers(*(nudged(y, draw) for y in narrow)).leaves(), engine)

    right_logs, _ = in_float64(0)
    assert right_logs[0].max() < -600
    torch.testing.assert_close(logs, right_logs, rtol=1e-6, atol=1e-6)
    as_exact_as_float32_allows(by_leaves, lambda draw: in_float64(draw)[1])


@pytest.mark.parametrize("engine", ["cpu", "eager"])
@pytest.mark.parametrize("threads", [1, 4])
def test_any_number_of_threads_gives_the_same(engine, threads):
    before = torch.get_num_threads()
    layers = Layers.draw(24, 64, 96, torch.float32)
    exact = Layers(*(y.double() for y in layers)).leaves()
    torch.set_num_threads(threads)
    try:
        logs, by_leaves = log_ratio_gradient(layers, engine)
    finally:
        torch.set_num_threads(before)
    right_logs, right = log_ratio_gradient(exact, "reference")
    torch.testing.assert_close(logs, right_logs, rtol=1e-5, atol=1e-5)
    for found, true in zip(by_leaves, right, strict=True):
        assert norm((found - true).flatten()) <= 1e-5 * norm(true.flatten())


def test_no_kernel_is_made_for_a_matrix_for_each_step():
    plan = SweepPlan(co.cells.elman("tanh"), uniform_rows(3, 2), cuda_engine)
    for sweep in ("forward", "adjoint", "tangent"):
        launch = cuda_engine.make_launch(sweep, plan, torch.zeros(3, 1, 1), torch.zeros(6, 1), 1)
        assert launch is None


def test_the_right_number_of_matrices_is_required():
    plan = SweepPlan(co.cells.elman("tanh"), uniform_rows(3, 2), load("reference"))
    with pytest.raises(co.errors.InputError, match="has 2 matrices; expected one for each of 3"):
        FormulaRun.run(plan, torch.zeros(6, 1), None, torch.zeros(2, 1, 1), torch.zeros(2, 1), None)


def test_samples_of_different_lengths_are_refused():
    plan = SweepPlan(co.cells.elman("tanh"), Rows([2, 1]), load("reference"))
    with pytest.raises(co.errors.InputError, match="needs samples of equal length"):
        FormulaRun.run(plan, torch.zeros(3, 1), None, torch.zeros(2, 1, 1), torch.zeros(2, 1), None)
