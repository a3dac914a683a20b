"""Galvan's forms of addition, multiplication and temporal order (2016, section 4.1).

Every number is checked by the definition as it is printed, in exact fractions of L.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from coadjoint import tasks
from coadjoint.errors import InputError
from coadjoint.tasks.marked import Addition, Multiplication
from coadjoint.tasks.synthetic import TemporalOrder, draw_times

MARKED = ["addition", "multiplication"]
ANSWERS = {"addition": lambda a, b: (a + b) / 2, "multiplication": lambda a, b: a * b}
LEAST = {"addition": -1, "multiplication": 0}


def galvan(name, **chosen):
    return tasks.make(name, variant="galvan", **chosen)


def samples(batch):
    """(u [L, inputs], y) of each sequence, at its own length, in float64."""
    ends = [len(batch.u)] * len(batch.y) if batch.lengths is None else batch.lengths.tolist()
    for j, end in enumerate(ends):
        yield batch.u[:end, j].double().numpy(), batch.y[j].item()


@pytest.mark.parametrize(
    "chosen",
    [{"length": 40}, {"length": 13}, {"length": (11, 47), "ragged": True}],
    ids=["even", "odd", "ragged"],
)
@pytest.mark.parametrize("name", MARKED)
def test_marked_numbers_are_as_printed(name, chosen):
    task = galvan(name, **chosen)
    batches = [task.batch(step, 9, seed=1) for step in range(8)]
    for u, y in itertools.chain.from_iterable(map(samples, batches)):
        L = len(u)
        number, marker = u.T
        assert set(marker) <= {0.0, 1.0}
        p, q = np.flatnonzero(marker)
        assert p < Fraction(L, 10)
        assert Fraction(4 * L, 10) <= q <= Fraction(5 * L, 10)
        assert (LEAST[name] <= number).all()
        assert (number <= 1).all()
        assert y == pytest.approx(ANSWERS[name](number[p], number[q]), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("L", [10, 23, 40])
@pytest.mark.parametrize("name", MARKED)
def test_both_ends_of_the_windows_are_reached(name, L):
    batch = galvan(name, length=(L, L)).batch(0, 600, seed=2)
    first, last = batch.u[..., 1].T.nonzero()[:, 1].view(-1, 2).T.tolist()
    assert set(first) == {t for t in range(L) if t < L // 10}
    assert set(last) == {t for t in range(L) if 4 * L <= 10 * t <= 5 * L}


@pytest.mark.parametrize("name", MARKED)
def test_the_numbers_fill_their_interval_evenly(name):
    """Mean, variance and both ends of a uniform density on [-1, 1] or [0, 1]."""
    x = galvan(name, length=(50, 50)).batch(0, 400, seed=3).u[..., 0].double()
    low, width = LEAST[name], 1 - LEAST[name]
    assert float(x.min()) == pytest.approx(low, abs=1e-3 * width)
    assert float(x.max()) == pytest.approx(1, abs=1e-3 * width)
    assert float(x.mean()) == pytest.approx(low + width / 2, abs=5 * width / math.sqrt(12 * 20000))
    assert float(x.var()) == pytest.approx(width**2 / 12, rel=0.03)


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize(("T", "longest"), [(10, 11), (30, 33), (57, 62)])
def test_lengths_run_from_t_to_a_tenth_more_inclusive(name, T, longest):
    task = galvan(name, length=T)
    found = {len(task.batch(step, 1, seed=4).u) for step in range(40 * (longest - T + 1))}
    assert found == set(range(T, longest + 1))
    assert longest == math.floor(T + Fraction(T, 10))


@pytest.mark.parametrize("name", MARKED)
def test_answers_are_judged_by_the_strict_rule(name):
    task = galvan(name, length=20)
    assert (task.rule, task.metric, task.goal.metric) == ("strict", "right_0.04", "right_0.04")
    batch = task.batch(0, 5, seed=0)
    e = torch.tensor([0.0, 0.0399, -0.0399, 0.0401, -0.0401])
    assert task.score((batch.y + e)[:, None], batch)["right_0.04"] == (3, 5)
    assert galvan(name, length=20, rule="loose").metric == "right_0.2"
    assert tasks.make(name, length=20).rule == "loose"


@pytest.mark.parametrize("name", MARKED)
def test_the_best_constant_is_as_good_as_it_is_said_to_be(name):
    task = galvan(name, length=10)
    y = task.batch(0, 20000, seed=5).y.double()
    claimed = task.baseline()
    assert float(y.var()) == pytest.approx(claimed["loss"], rel=0.03)
    for d in (0.2, 0.04):
        shares = [float(((y - c).abs() < d).double().mean()) for c in np.arange(-0.3, 0.6, 0.02)]
        assert max(shares) == pytest.approx(claimed[f"right_{d}"], abs=0.015)


def test_the_best_constants_have_their_known_values():
    wrong = [100 * (1 - Addition(variant="galvan").baseline()[f"right_{d}"]) for d in (0.2, 0.04)]
    assert wrong == pytest.approx([64.0, 92.16])
    assert Addition(variant="galvan").baseline()["loss"] == pytest.approx(1 / 6)
    assert Multiplication(variant="galvan").baseline() == Multiplication().baseline()


@pytest.mark.parametrize("symbols", [2, 3])
@pytest.mark.parametrize(
    "chosen", [{"length": 11}, {"length": (10, 23), "ragged": True}], ids=["fixed", "ragged"]
)
def test_special_symbols_stand_anywhere(symbols, chosen):
    task = TemporalOrder(symbols=symbols, variant="galvan", **chosen)
    for step in range(12):
        for u, y in samples(task.batch(step, 9, seed=1)):
            assert (u.sum(1) == 1).all()
            s = u.argmax(1)
            special = s[s < 2]
            assert len(special) == symbols
            assert y == sum(2**i * v for i, v in enumerate(special))


def test_every_set_of_times_is_as_likely():
    """Of short and long sequences in one draw; 45 and 10 pairs."""
    n = 20000
    L = np.repeat([10, 5], n)
    p = draw_times(np.random.default_rng(6), L, 2)
    assert (p[0] < p[1]).all()
    for length, part in ((10, p[:, :n]), (5, p[:, n:])):
        pairs, counts = np.unique(part, axis=1, return_counts=True)
        expected = list(itertools.combinations(range(length), 2))
        assert [tuple(pair) for pair in pairs.T] == expected
        share = 1 / len(expected)
        assert np.abs(counts / n - share).max() < 5 * math.sqrt(share / n)


def test_every_symbol_is_as_likely_and_the_length_is_the_given_one():
    batch = galvan("temporal-order", length=20).batch(0, 4000, seed=7)
    assert len(batch.u) == 20
    counts = batch.u.sum((0, 1)).double()
    assert counts[:2].sum() == 2 * 4000
    assert (counts[:2] / 8000 - 1 / 2).abs().max() < 5 * math.sqrt(1 / 4 / 8000)
    assert (counts[2:] / 72000 - 1 / 4).abs().max() < 5 * math.sqrt(3 / 16 / 72000)
    shares = torch.bincount(batch.y).double() / 4000
    assert (shares - 1 / 4).abs().max() < 5 * math.sqrt(3 / 16 / 4000)


@pytest.mark.parametrize("name", [*MARKED, "temporal-order", "temporal-order-3"])
def test_numbers_belong_to_seed_and_step_and_variant(name):
    batch = galvan(name, length=30).batch(7, 5, seed=0)
    again = galvan(name, length=30).batch(7, 5, seed=0)
    assert torch.equal(batch.u, again.u)
    assert torch.equal(batch.y, again.y)
    for other in (galvan(name, length=30).batch(8, 5, seed=0), tasks.make(name).batch(7, 5, 0)):
        assert batch.u.shape != other.u.shape or not torch.equal(batch.u, other.u)
    named = tasks.make(name, length=30, variant="pascanu").batch(7, 5, seed=0)
    assert torch.equal(named.u, tasks.make(name, length=30).batch(7, 5, seed=0).u)


@pytest.mark.parametrize("name", [*MARKED, "temporal-order"])
def test_an_unknown_variant_is_refused(name):
    with pytest.raises(InputError, match="did you mean 'galvan'"):
        tasks.make(name, variant="galvn")
    with pytest.raises(InputError, match="option of task 'xor'"):
        tasks.make("xor", variant="galvan")
