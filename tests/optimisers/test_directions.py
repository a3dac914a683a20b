"""Directions, step rules and the objective along a step are what their formulas say."""

import math

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.optimisers.directions import distance, dot, norm, steepest, temporal
from coadjoint.optimisers.step_rules import Armijo, Constant, Galvan, Line, Wolfe, cubic_minimum

F64 = torch.float64


def evaluation(every=False, ragged=True, cell="elman"):
    torch.manual_seed(0)
    net = co.Network(
        cell, inputs=2, hidden=4, outputs=2, readout="every" if every else "last", dtype=F64
    )
    y = torch.randn(7, 5, 2, dtype=F64) if every else torch.randn(5, 2, dtype=F64)
    lengths = torch.tensor([7, 3, 5, 6, 2]) if ragged else None
    return co.BPTT()(net, co.Batch(torch.randn(7, 5, 2, dtype=F64), y, lengths), "squared")


@pytest.mark.parametrize("cell", ["elman", "lstm", "scrn", "lru"])
def test_weighted_components_are_weighted_sums(cell):
    parts = evaluation(True, cell=cell).temporal_components()
    w = torch.randn(7, dtype=F64)
    found = parts.weighted(w)
    for name in found:
        each = sum(w[t - 1] * parts.at(t)[name] for t in range(1, 8))
        assert torch.allclose(found[name], each, rtol=1e-12, atol=1e-14), name
    with pytest.raises(co.InputError, match="one weight for each"):
        parts.weighted(w[:3])


def test_the_temporal_direction_equals_its_definition():
    e = evaluation(ragged=False)
    d = temporal(e, np.random.default_rng(3))

    def joint(g):
        return {n: g[n] for n in ("W", "R", "b")}

    assert norm(joint(d)) == pytest.approx(norm(joint(e.gradient)), rel=1e-12)
    assert torch.equal(d["V"], e.gradient["V"])
    parts, beta = e.temporal_components(), np.random.default_rng(3).dirichlet(np.ones(7))
    size = [
        math.sqrt(sum(float(v.square().sum()) for v in parts.at(t).values())) for t in range(1, 8)
    ]
    mixed = {
        n: sum(beta[t - 1] / size[t - 1] * parts.at(t)[n] for t in range(1, 8))
        for n in ("W", "R", "b")
    }
    factor = norm(joint(e.gradient)) / norm(mixed)
    for name, g in mixed.items():
        assert torch.allclose(d[name], factor * g, rtol=1e-10, atol=1e-13)
    again = temporal(e, np.random.default_rng(3))
    assert all(torch.equal(d[n], again[n]) for n in d)
    assert distance(d, e.gradient) == pytest.approx(
        math.sqrt(2 - 2 * dot(d, e.gradient) / (norm(d) * norm(e.gradient))), rel=1e-12
    )
    assert distance(steepest(e, np.random.default_rng()), e.gradient) == pytest.approx(0, abs=1e-7)
    structured = co.Network("elman", inputs=2, hidden=4, outputs=1, structure="orthogonal")
    with pytest.raises(co.Unsupported, match="needs W as a parameter"):
        temporal(
            co.BPTT()(structured, co.Batch(torch.randn(3, 2, 2), torch.randn(2, 1)), "squared"),
            np.random.default_rng(),
        )


def test_the_temporal_direction_is_that_of_one_layer():
    stack = co.Stack(["elman", "elman"], inputs=2, hidden=4, outputs=1)
    e = co.BPTT()(stack, co.Batch(torch.randn(3, 2, 2), torch.randn(2, 1)), "squared")
    with pytest.raises(co.Unsupported, match="temporal components need a network of one"):
        temporal(e, np.random.default_rng())


CURVES = {  # value and slope along a, a minimum at some a > 0
    "parabola": (lambda a: (a - 0.1) ** 2, lambda a: 2 * (a - 0.1)),
    "far away": (lambda a: (a - 37.0) ** 2, lambda a: 2 * (a - 37.0)),
    "steep wall": (lambda a: -a + (1e3 * a) ** 4, lambda a: -1 + 4e3 * (1e3 * a) ** 3),
    "wavy": (
        lambda a: 0.2 * a * a - a - 0.3 * math.sin(9 * a),
        lambda a: 0.4 * a - 1 - 2.7 * math.cos(9 * a),
    ),
    "ends in a cliff": (
        lambda a: -a if a < 0.01 else math.inf,
        lambda a: -1.0 if a < 0.01 else math.nan,
    ),
}


def line(name):
    value, slope = CURVES[name]
    return Line(5.0, value(0.0), slope(0.0), value, lambda a: (value(a), slope(a)))


def test_galvans_rule_equals_its_definition():
    assert Constant()(line("parabola")) == 1.0
    assert Galvan(c=5.0)(line("parabola")) == 1.0
    assert Galvan(c=4.9)(line("parabola")) == pytest.approx(1 / 5)
    with pytest.raises(co.InputError, match="c must be"):
        Galvan(c=0.0)


@pytest.mark.parametrize("name", CURVES)
def test_armijo_finds_a_step_of_sufficient_decrease(name):
    value, slope = CURVES[name]
    a, along = Armijo()(line(name)), slope(0.0)
    assert 0 < a <= 1
    assert value(a) <= value(0) + 1e-4 * a * along
    assert a == 1 or value(2 * a) > value(0) + 1e-4 * 2 * a * along


@pytest.mark.parametrize("name", [name for name in CURVES if "cliff" not in name])
@pytest.mark.parametrize("c2", [0.9, 0.1])
def test_wolfe_finds_a_step_that_meets_both_conditions(name, c2):
    value, slope = CURVES[name]
    a, along = Wolfe(c2=c2)(line(name)), slope(0.0)
    assert value(a) <= value(0) + 1e-4 * a * along
    assert abs(slope(a)) <= c2 * abs(along)


def test_line_searches_end_where_there_is_no_minimum():
    a = Wolfe()(line("ends in a cliff"))
    assert 0 < a < 0.01  # enough of a decrease, on the finite side
    up = Line(1.0, 0.0, 0.2, lambda a: a, lambda a: (a, 0.2))
    assert Armijo()(up) == Wolfe()(up) == 0.0
    lie = Line(
        1.0, 0.0, -1.0, lambda a: 1.0, lambda a: (1.0, 0.0)
    )  # never as low as the slope says
    assert Armijo()(lie) == Wolfe()(lie) == 0.0


@pytest.mark.parametrize(
    ("low", "high", "lowest", "found"),
    [
        (1.0, 3.0, 2.2, 2.2),
        (3.0, 1.0, 2.2, 2.2),
        (1.0, 3.0, 2.95, 2.8),
        (3.0, 1.0, 2.95, 2.8),
        (1.0, 3.0, 1.05, 1.2),
        (3.0, 1.0, 1.05, 1.2),
    ],
)
def test_an_interval_is_cut_at_the_minimum_but_a_tenth_off_its_ends(low, high, lowest, found):
    """Of a parabola, which the cubic is; the interval does not begin at 0."""

    def point(a):
        return (a, (a - lowest) ** 2, 2 * (a - lowest))

    assert cubic_minimum(point(low), point(high)) == pytest.approx(found, rel=1e-12)
