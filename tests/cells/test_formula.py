"""Formulas are differentiated, shared and compiled correctly, and refuse what they cannot record.

Derivatives are compared with autograd.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coadjoint as co
from coadjoint.cells.formula import (
    ONE,
    PRIMITIVES,
    ZERO,
    Node,
    evaluate_nodes,
    held,
    loop_invariants,
    pull,
    push,
    substitute,
    symbol,
)
from coadjoint.cells.program import Program

A, B = symbol("a"), symbol("b")
POINTS = torch.tensor([-2.7, -1.0, -0.3, 0.4, 1.0, 1.9], dtype=torch.float64)
POSITIVE = ("log", "log1p", "sqrt")
ORDERS = 3

EXPRESSIONS = {
    "sum": lambda a, b: a + b + 1,
    "difference": lambda a, b: 2 - a - (-b),
    "product": lambda a, b: 3 * a * b * 0.5,
    "quotient": lambda a, b: a / (2 + b * b),
    "reciprocal": lambda a, b: 1 / (b + 4) - a / 2,
    "square": lambda a, b: (a + b) * (a + b),
    "cube": lambda a, b: (a - b) ** 3,
    "seventh": lambda a, b: (0.5 * a) ** 7 * b,
    "root": lambda a, b: (a * a + 1) ** 0.5 * b,
    "inverse power": lambda a, b: (b * b + 1) ** -2 * a,
    "negative": lambda a, b: -(-a) * -b + -a,  # noqa: B002
    "nested": lambda a, b: co.tanh(co.sigmoid(a) * b + co.sin(a * b)),
    "gate": lambda a, b: (1 - co.sigmoid(b)) * co.tanh(a) + co.sigmoid(b) * a,
    "gelu": lambda a, b: a * (1 + co.erf(a / math.sqrt(2))) / 2 + 0 * b,
    "softplus": lambda a, b: co.softplus(a) * co.exp(-b * b),
    "held": lambda a, b: held(co.tanh(a) * b) * a * b + held(b) ** 2,
    "alone": lambda a, b: b,
}


def full(value, like):
    return torch.as_tensor(value, dtype=like.dtype).expand_as(like)


def autograd_ladder(y, x, orders):
    """y, y', y'', ... elementwise."""
    out = [y]
    for _ in range(orders):
        y = (
            torch.autograd.grad(y.sum(), x, create_graph=True, allow_unused=True)[0]
            if y.requires_grad
            else None
        )
        y = torch.zeros_like(x) if y is None else y
        out.append(y)
    return [o.detach() + 0.0 for o in out]


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives_and_their_derivatives_are_those_of_autograd(name):
    x = (POINTS.abs() if name in POSITIVE else POINTS).clone().requires_grad_()
    truth = autograd_ladder(PRIMITIVES[name].run(x), x, ORDERS)
    by_pull = by_push = Node(name, (A,))
    for order, expected in enumerate(truth):
        for expression in (by_pull, by_push):
            ours = full(evaluate_nodes([expression], {A: x.detach()})[0], expected)
            np.testing.assert_allclose(
                ours, expected, rtol=1e-12, atol=1e-14, err_msg=f"{name}, order {order}"
            )
        by_pull, by_push = pull([by_pull], [ONE], [A])[0], push([by_push], {A: ONE})[0]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_and_their_mixed_derivatives_are_those_of_autograd(name):
    """Every word of three letters a, b: differentiated in that order, by pull, push and
    autograd.
    """
    f = EXPRESSIONS[name]
    a, b = POINTS.clone().requires_grad_(), POINTS.flip(0).clone().requires_grad_()
    at = {A: a.detach(), B: b.detach()}
    for word in range(2**ORDERS):
        y, node = f(a, b), f(A, B)
        for i in range(ORDERS):
            leaf, letter = (a, A) if word >> i & 1 else (b, B)
            y = (
                torch.autograd.grad(y.sum(), leaf, create_graph=True, allow_unused=True)[0]
                if y.requires_grad
                else None
            )
            y = torch.zeros_like(a) if y is None else y
            pulled, pushed = pull([node], [ONE], [letter])[0], push([node], {letter: ONE})[0]
            for derivative in (pulled, pushed):
                ours = full(evaluate_nodes([derivative], at)[0], y)
                np.testing.assert_allclose(
                    ours, y.detach(), rtol=1e-11, atol=1e-13, err_msg=f"{name} {word:03b} {i}"
                )
            node = pulled if i % 2 else pushed


def test_pull_takes_several_outputs_and_seeds():
    s = symbol("s")
    (gradient,) = pull([A * B, co.tanh(A)], [s, 2 * s], [A])
    a, b, k = (torch.tensor([v], dtype=torch.float64) for v in (0.3, -1.2, 0.7))
    value = evaluate_nodes([gradient], {A: a, B: b, s: k})[0]
    assert torch.allclose(value, k * b + 2 * k * (1 - a.tanh() ** 2))
    assert pull([A], [s], [B]) == [ZERO]


def test_equal_expressions_are_one_object():
    assert A + B is B + A
    assert A * B is B * A
    assert co.tanh(A + B) is co.tanh(B + A)
    assert A - B is not B - A


@pytest.mark.parametrize(
    ("ours", "simple"),
    [
        (A + 0, A),
        (0 * A, ZERO),
        (1 * A, A),
        (A - A, ZERO),
        (A / 1, A),
        (-(-A), A),  # noqa: B002
        (A**0, ONE),
        (A**1, A),
        (A**2, A * A),
        (2 * (3 * A), 6 * A),
        (A + -B, A - B),
        (-A * B, -(A * B)),
        (0 - A, -A),
        (A - 0, A),
        (ZERO / A, ZERO),
    ],
    ids=str,
)
def test_expressions_are_simplified(ours, simple):
    assert ours is simple


def test_substitute_replaces_and_apart_finds_what_is_fixed():
    y = co.tanh(A + B) * A
    (replaced,) = substitute([y], {A + B: symbol("c")})
    assert replaced is co.tanh(symbol("c")) * A
    fixed = loop_invariants([co.exp(A) * B + co.sin(A)], [B])
    assert set(fixed) == {co.exp(A), co.sin(A)}


def run_program(outputs, values, blocks=2):
    """Through Program.bind, whose scratch is poisoned: an unwritten or re-used buffer
    would show.
    """
    n = len(next(iter(values.values())))
    size = n // blocks

    def scratch():
        return [torch.full((size,), math.nan, dtype=torch.float64) for _ in range(blocks)]

    targets = [scratch() for _ in outputs]
    columns = {k: list(v.split(size)) for k, v in values.items()}
    run = Program(outputs, frozenset(columns)).bind(columns, targets, scratch)
    for i in range(blocks):
        run(i)
    return [torch.cat(t) for t in targets]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_program_computes_what_evaluate_computes(name):
    y = EXPRESSIONS[name](A, B)
    outputs = [y, A, *pull([y], [B], [A, B]), y]
    values = {A: POINTS, B: POINTS.flip(0)}
    for ours, plain in zip(
        run_program(outputs, values), evaluate_nodes(outputs, values), strict=True
    ):
        np.testing.assert_allclose(ours, full(plain, ours), rtol=1e-13, atol=1e-15)


leaf = st.sampled_from([A, B]) | st.floats(-2, 2, width=16).map(lambda v: ONE * v)
tree = st.recursive(
    leaf,
    lambda t: st.one_of(
        st.tuples(t, t).map(lambda p: p[0] + p[1]),
        st.tuples(t, t).map(lambda p: p[0] - p[1]),
        st.tuples(t, t).map(lambda p: p[0] * p[1]),
        t.map(lambda y: -y),
        t.map(co.tanh),
        t.map(co.sigmoid),
        t.map(co.sin),
        t.map(lambda y: 1 / (2 + co.tanh(y))),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree)
def test_random_expressions_program_pull_and_autograd_agree(y):
    a, b = POINTS.clone().requires_grad_(), POINTS.flip(0).clone().requires_grad_()
    value = full(evaluate_nodes([y], {A: a, B: b})[0], a)
    truth = [torch.zeros_like(a), torch.zeros_like(a)]
    if value.requires_grad:
        grads = torch.autograd.grad(value.sum(), [a, b], allow_unused=True)
        truth = [t if g is None else g for t, g in zip(truth, grads, strict=True)]
    ours = run_program([y, *pull([y], [ONE], [A, B])], {A: a.detach(), B: b.detach()})
    for found, expected in zip(ours, [value.detach(), *truth], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if "_" not in n])
def test_functions_take_nodes_tensors_and_numbers(name):
    f, point = getattr(co, name), 0.7
    assert isinstance(f(A), Node)
    assert f(torch.tensor(point, dtype=torch.float64)).item() == pytest.approx(f(point), rel=1e-15)
    assert name in f.__doc__


@pytest.mark.parametrize(
    "name",
    [
        "tanh",
        "sigmoid",
        "relu",
        "exp",
        "expm1",
        "sin",
        "abs",
        "erf",
        "atan",
        "log",
        "log1p",
        "sqrt",
        "sign",
    ],
)
def test_torch_functions_record_the_same_node(name):
    assert getattr(torch, name)(A) is getattr(co, name)(A)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda: 1 if A > 0 else 0, "cannot branch on a value"),
        (lambda: bool(A), "Use relu, step, sign or abs"),
        (lambda: max(A, B), "cannot branch"),
        (lambda: torch.cumsum(A, 0), "torch's 'cumsum' is not one of the functions"),
        (lambda: torch.gamma if False else torch.lgamma(A), "tanh"),
        (lambda: A + "b", "takes numbers and its own z, v, x, p; got str"),
        (lambda: A * True, "got bool"),
        (lambda: A**B, "exponent must be a finite number"),
        (lambda: A**math.inf, "exponent must be a finite number"),
        (lambda: evaluate_nodes([A + B], {A: POINTS}), "the value of 'b' is missing"),
    ],
)
def test_operations_that_no_formula_may_use_are_refused(write, words):
    with pytest.raises(co.KindError, match=words):
        write()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize(
    "name", ["tanh", "sigmoid", "relu", "softplus", "sin", "cos", "erf", "atan", "abs"]
)
def test_primitives_and_three_derivatives_are_finite_at_large_arguments(name, dtype):
    x = torch.tensor([-1e4, -100.0, -50.0, 0.0, 50.0, 100.0, 1e4], dtype=dtype)
    y = Node(name, (A,))
    for _ in range(4):
        assert torch.isfinite(full(evaluate_nodes([y], {A: x})[0], x)).all()
        (y,) = pull([y], [ONE], [A])
