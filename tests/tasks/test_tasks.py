"""Every task draws sequences that obey its definition, checked one sequence at a time.

Scores, baselines, held-out sets and lengths are compared with simulation and enumeration.
"""

import itertools
import math
import os
import struct
import subprocess
import sys
import zlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint import tasks
from coadjoint.errors import DataError, InputError, MissingError
from coadjoint.networks.seq2seq import EncoderDecoder
from coadjoint.objectives import losses
from coadjoint.tasks import TASKS
from coadjoint.tasks import task as task_module
from coadjoint.tasks.digits import Digits, split_indices
from coadjoint.tasks.music import Music, read_variables
from coadjoint.tasks.synthetic import (
    XOR,
    Addition,
    Copy,
    Memorisation,
    Multiplication,
    TemporalOrder,
)
from coadjoint.tasks.transduction import Reversal, Sorting, Transduction
from paths import ROOT

GENERATED = [name for name in TASKS if "length" in tasks.options(name)]
RAGGED = {"length": (12, 47), "ragged": True}


def sequences(batch):
    """(u_j [T_j, inputs], y_j) of each sample, as lists of Python numbers."""
    T, B = batch.u.shape[:2]
    ends = [T] * B if batch.lengths is None else batch.lengths.tolist()
    every, answers = (
        batch.y.shape[:2] == (T, B),
        batch.y.shape == (T + 1, B),
    )  # an answer: the letters, and the end
    for j, end in enumerate(ends):
        y = batch.y[:end, j] if every else batch.y[: end + 1, j] if answers else batch.y[j]
        yield batch.u[:end, j].tolist(), y.tolist()


def symbol(row):
    assert sorted(row) == [0.0] * (len(row) - 1) + [1.0]
    return row.index(1.0)


def marks(u, channel):
    at = [t for t, row in enumerate(u) if row[channel] == 1]
    assert len(at) == 2
    assert all(row[channel] in (0, 1) for row in u)
    return at


def check_addition(u, y, answer=lambda a, b: (a + b) / 2):
    L = len(u)
    p, q = marks(u, 0)
    assert 0 <= p < math.floor(0.1 * L) <= q < math.floor(0.1 * L) + math.floor(0.4 * L)
    assert all(0 <= row[1] < 1 for row in u)
    assert y == pytest.approx(answer(u[p][1], u[q][1]), rel=1e-6)
    return p / L, q / L


def check_multiplication(u, y):
    return check_addition(u, y, lambda a, b: a * b)


def check_xor(u, y):
    L = len(u)
    p, q = marks(u, 1)
    assert p < math.floor(0.1 * L)
    assert math.floor(0.4 * L) <= q <= 0.5 * L
    assert all(row[0] in (0, 1) for row in u)
    assert y == (u[p][0] != u[q][0])
    return p / L, q / L, y


def check_order(u, y, starts=(0.1, 0.5)):
    L, s = len(u), [symbol(row) for row in u]
    at = [t for t, v in enumerate(s) if v < 2]
    assert len(at) == len(starts)
    assert {v for t, v in enumerate(s) if t not in at} <= {2, 3, 4, 5}
    for t, start in zip(at, starts, strict=True):
        begin = math.floor(start * L + 1e-9)
        assert begin <= t < begin + math.floor(0.1 * L)
    assert y == sum(2**i * s[t] for i, t in enumerate(at))
    return tuple(t / L for t in at) + (y, s[0])


def check_order_3(u, y):
    return check_order(u, y, (0.1, 0.3, 0.6))


def check_permutation(u, y):
    s = [symbol(row) for row in u]
    assert s[0] in (0, 1)
    assert all(2 <= v < 100 for v in s[1:])
    assert y == s[0]
    return (y, *s[1:3])


def check_recall(k, m, early):
    def check(u, y):
        L, s = len(u) - 2 * m, [symbol(row) for row in u]
        assert len(u[0]) == k + 2
        assert all(v < k for v in s[:m])
        assert [v for v in s[m:] if v != k] == [k + 1]
        assert s.index(k + 1) == L + m - early
        assert y == [k] * (L + m) + s[:m]
        return (s[0], s[m - 1])

    return check


def check_answer(order):
    def check(u, y):
        s = [symbol(row) for row in u]
        assert y == [*order(s), len(u[0])]
        return (s[0], s[-1])

    return check


CHECKS = {
    "addition": check_addition,
    "multiplication": check_multiplication,
    "xor": check_xor,
    "temporal-order": check_order,
    "temporal-order-3": check_order_3,
    "permutation": check_permutation,
    "memorisation-5": check_recall(2, 5, 0),
    "memorisation-20": check_recall(5, 10, 0),
    "copy": check_recall(8, 10, 1),
    "reversal": check_answer(lambda s: s[::-1]),
    "sorting": check_answer(sorted),
}


@pytest.mark.parametrize(
    "chosen", [{"length": 40}, {"length": (12, 47)}, RAGGED], ids=["fixed", "range", "ragged"]
)
@pytest.mark.parametrize("name", GENERATED)
def test_every_sequence_obeys_the_definition(name, chosen):
    task = tasks.make(name, **chosen)
    assert task.name == name
    for batch in [task.batch(step, 16, seed=1) for step in range(12)] + list(
        task.held_out("test", seed=1, n=60)
    ):
        assert batch.u.dtype == torch.float32
        assert batch.u.shape[2] == task.inputs
        assert batch.reduce == task.reduce
        for u, y in sequences(batch):
            CHECKS[name](u, y)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("addition", (0, 0.1), (0.075, 0.475)),
        ("multiplication", (0, 0.1), (0.075, 0.475)),
        ("xor", (0, 0.4, 0), (0.075, 0.5, 1)),
        ("temporal-order", (0.1, 0.5, 0, 2), (0.175, 0.575, 3, 5)),
        ("temporal-order-3", (0.1, 0.3, 0.6, 0, 2), (0.175, 0.375, 0.675, 7, 5)),
        ("permutation", (0, 2, 2), (1, 99, 99)),
        ("memorisation-5", (0, 0), (1, 1)),
        ("memorisation-20", (0, 0), (4, 4)),
        ("copy", (0, 0), (7, 7)),
        ("reversal", (0, 0), (9, 9)),
        ("sorting", (0, 0), (9, 9)),
    ],
)
@pytest.mark.slow
def test_both_ends_of_every_window_are_reached(name, low, high):
    """At length 40; the windows of a real-valued or symbolic task are no narrower than they are
    said to be.
    """
    task = tasks.make(name, length=(40, 40))
    seen = np.array([CHECKS[name](u, y) for u, y in sequences(task.batch(0, 4000, seed=2))])
    assert np.allclose(seen.min(0), low)
    assert np.allclose(seen.max(0), high)


@pytest.mark.parametrize("name", GENERATED)
def test_every_answer_is_as_likely_as_it_should_be(name):
    task = tasks.make(name, length=20)
    y = task.batch(0, 8000, seed=3).y
    if name in ("addition", "multiplication"):
        mean, sd = {
            "addition": (1 / 2, math.sqrt(1 / 24)),
            "multiplication": (1 / 4, math.sqrt(7 / 144)),
        }[name]
        assert abs(float(y.mean()) - mean) < 5 * sd / math.sqrt(8000)
        return
    answers = y[-task.positions :].flatten() if isinstance(task, Memorisation) else y
    if isinstance(task, Transduction):
        assert (y[-1] == task.values).all()
        answers = y[:-1]
    counts = np.unique(answers.numpy(), return_counts=True)[1]
    share = task.baseline()["symbols" if "symbols" in task.baseline() else "right"]
    k = task.values if isinstance(task, Transduction) else round(1 / share)
    assert len(counts) == k
    assert np.abs(counts / counts.sum() - 1 / k).max() < 5 * math.sqrt(1 / k / counts.sum())


def same(a, b):
    pairs = [(a.u, b.u), (a.y, b.y), (a.lengths, b.lengths)]
    return all((p is None and q is None) or (p is not None and torch.equal(p, q)) for p, q in pairs)


@pytest.mark.parametrize("chosen", [{"length": 30}, RAGGED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("name", GENERATED)
def test_numbers_belong_to_seed_and_step_alone(name, chosen):
    task, other = tasks.make(name, **chosen), tasks.make(name, **chosen)
    first = task.batch(7, 5, seed=0)
    other.batch(3, 5, seed=9)
    assert same(first, other.batch(7, 5, seed=0))
    for step, seed in ((8, 0), (7, 1), (0, 7)):
        assert not same(first, task.batch(step, 5, seed=seed))

    def test(seed, draw):
        return next(task.held_out("test", seed=seed, draw=draw, n=5))

    assert same(test(0, 7), test(0, 7))
    assert not same(test(0, 7), first)
    assert not same(test(0, 7), test(0, 8))
    assert not same(test(0, 7), test(1, 7))


def test_the_batches_of_a_held_out_set_differ():
    first, second = islice(Addition((30, 60)).held_out("test", seed=0, n=200), 2)
    assert not torch.equal(first.u[:30], second.u[:30])


@pytest.mark.parametrize("chosen", [{"length": 20}, {"length": (20, 25)}, RAGGED])
@pytest.mark.parametrize("n", [1, 99, 1050])
def test_a_held_out_set_has_n_sequences(chosen, n):
    assert sum(b.u.shape[1] for b in TemporalOrder(**chosen).held_out("test", seed=0, n=n)) == n


@pytest.mark.parametrize(
    ("n", "most", "sizes"),
    [
        (2, 100, [[1, 2], [2, 3], [3]]),  # as many as are asked for
        (100, 6, [[1, 2, 2], [3, 3]]),  # as many steps as there may be, padding included
        (100, 5, [[1, 2], [2], [3], [3]]),
        (100, 1, [[1], [2], [2], [3], [3]]),  # a sequence is never cut
        (100, 100, [[1, 2, 2, 3, 3]]),
    ],
)
def test_held_out_batches_have_a_bounded_size(n, most, sizes, monkeypatch):
    class Own(task_module.Collection):
        name, inputs, outputs, readout, reduce = "own", 1, 1, "last", "sum"

    monkeypatch.setattr(task_module, "LARGEST_BATCH", most)
    given = task_module.Sequences(
        [np.zeros((T, 1), np.float32) for T in (3, 2, 1, 3, 2)], [0.0] * 5
    )
    batches = Own({"train": given, "test": given}).held_out("test", seed=0, n=n)
    assert [b.lengths.tolist() for b in batches] == sizes


def lengths(task, steps):
    """The lengths, in the task's own sense, of training batches."""
    found = []
    for step in steps:
        b = task.batch(step, 8, seed=4)
        found.append([len(b.u)] * 8 if b.lengths is None else b.lengths.tolist())
    return np.array(found) - task.extra


@pytest.mark.parametrize(
    ("task", "low", "high"),
    [
        (TemporalOrder(30), 30, 30),
        (TemporalOrder((10, 15)), 10, 15),
        (TemporalOrder([10, 15]), 10, 15),
        (Addition(30), 30, 32),
        (Addition(10), 10, 10),
        (Multiplication(50), 50, 54),
        (Addition((30, 33)), 30, 33),
        (XOR(30), 30, 33),
        (Memorisation((1, 4)), 1, 4),
        (Copy((1, 4)), 1, 4),
    ],
)
def test_lengths_fill_their_range_one_for_each_batch(task, low, high):
    found = lengths(task, range(200))
    assert (found == found[:, :1]).all()
    assert sorted(set(found[:, 0])) == list(range(low, high + 1))
    of_tests = {len(b.u) - task.extra for b in task.held_out("test", seed=0, n=8000)}
    assert of_tests <= set(range(low, high + 1))
    assert len(of_tests) == high - low + 1


@pytest.mark.parametrize("name", GENERATED)
def test_ragged_sequences_have_their_own_lengths_and_silent_padding(name):
    task = tasks.make(name, **RAGGED)
    found = lengths(task, range(60))
    assert (found.min(), found.max()) == (12, 47)
    assert all(len(set(row)) > 1 for row in found)
    b = task.batch(0, 8, seed=0)
    assert len(b.u) == max(b.lengths)
    beyond = torch.arange(len(b.u))[:, None] >= b.lengths
    assert not b.u[beyond].any()
    if task.readout == "every":
        assert not b.y[beyond].any()
    if task.readout == "sequence":
        assert torch.equal(b.y == -1, torch.arange(len(b.y))[:, None] > b.lengths)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"length": 50},
            {0: (10, 10), 1: (10, 10), 5: (12, 12), 50: (30, 30), 99: (49, 49), 100: (50, 50),
                900: (50, 50)}),
        ({"length": (20, 50)},
            {0: (10, 10), 25: (20, 20), 50: (20, 30), 100: (20, 50), 900: (20, 50)}),
    ],
)  # fmt: skip
def test_the_curriculum_moves_the_upper_length(chosen, expected):
    task = TemporalOrder(**chosen, curriculum=(10, 100))
    assert {step: task.reach(step) for step in expected} == expected
    assert all(
        task.reach(s)[0] <= len(task.batch(s, 2, seed=0).u) <= task.reach(s)[1]
        for s in range(0, 130, 7)
    )
    longest = max(len(b.u) for b in task.held_out("test", seed=0, n=5000))
    assert longest > 45


def perfect(task, y):
    """Pre-outputs that say y."""
    if task.loss == "cross-entropy":
        return 50 * torch.nn.functional.one_hot(y.clamp(min=0), task.outputs).float()
    return (y if task.loss == "squared" else 50 * (2 * y - 1))[..., None]


def judge(task, a, batch):
    return {name: total / count for name, (total, count) in task.score(a, batch).items()}


@pytest.mark.parametrize("chosen", [{"length": 30}, RAGGED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("name", GENERATED)
def test_perfect_wrong_and_undefined_outputs_are_scored(name, chosen):
    task = tasks.make(name, **chosen)
    batch = task.batch(0, 40, seed=5)
    a = perfect(task, batch.y)
    assert set(judge(task, a, batch).values()) == {1.0}
    assert task.goal.is_met(judge(task, a, batch)[task.metric])
    assert set(judge(task, a + float("nan"), batch).values()) == {0.0}
    wrong = a + 1 if task.loss == "squared" else -a
    assert set(judge(task, wrong, batch).values()) == {0.0}
    one = a.clone()
    one[..., 3, :] = wrong[..., 3, :]
    of_sequences = "whole" if isinstance(task, Transduction) else task.metric
    assert judge(task, one, batch)[of_sequences] == pytest.approx(39 / 40)
    assert task.score(a, batch)[of_sequences][1] == 40.0


@pytest.mark.parametrize("kind", [Memorisation, Copy])
@pytest.mark.parametrize("chosen", [{"length": 6}, {"length": (3, 9), "ragged": True}])
def test_one_wrong_step_spoils_a_sequence(kind, chosen):
    """Anywhere in memorisation, in the last steps of copy; padding is not read."""
    task = kind(**chosen)
    batch = task.batch(0, 4, seed=0)
    T, m = len(batch.u), task.positions
    for j in range(4):
        end = T if batch.lengths is None else int(batch.lengths[j])
        for t in range(T):
            a = perfect(task, batch.y)
            a[t, j] = -a[t, j]
            recalled, spoils = (
                end - m <= t < end,
                t < end and (kind is Memorisation or t >= end - m),
            )
            assert task.score(a, batch)["right"] == (4 - spoils, 4)
            assert task.score(a, batch)["symbols"] == (4 * m - recalled, 4 * m)


@pytest.mark.parametrize(("a", "says"), [(0.0, 0), (-1e-30, 0), (1e-30, 1)])
def test_an_xor_of_one_half_says_zero(a, says):
    """Three sequences whose bits are equal, and one whose bits differ."""
    batch = co.Batch(torch.zeros(1, 4, 2), torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert XOR(20).score(torch.full((4, 1), a), batch) == {"right": (1 if says else 3, 4)}


@pytest.mark.parametrize("kind", [Addition, Multiplication])
@pytest.mark.parametrize(("rule", "metric"), [("loose", "right_0.2"), ("strict", "right_0.04")])
def test_real_valued_tasks_follow_their_rules(kind, rule, metric):
    task = kind(20, rule=rule)
    assert (
        task.goal.metric,
        task.goal.threshold,
        task.goal.is_met(0.99),
        task.goal.is_met(0.989),
    ) == (
        metric,
        0.99,
        True,
        False,
    )
    batch = task.batch(0, 6, seed=0)
    e = torch.tensor([0.0, 0.039, -0.039, 0.041, -0.199, 0.201])
    assert task.score((batch.y + e)[:, None], batch) == {"right_0.2": (5, 6), "right_0.04": (3, 6)}


def constant(task, y):
    """The answer that knows everything but the past."""
    if task.loss == "squared":
        return torch.full((*y.shape, 1), {"addition": 0.5, "multiplication": 0.25}[task.name])
    if task.loss == "binary-cross-entropy":
        return torch.zeros(*y.shape, 1)
    a = torch.zeros(*y.shape, task.outputs)
    if task.name == "permutation":
        a[..., 2:] = -math.inf
    if isinstance(task, Memorisation):
        a[..., -1] = -math.inf
        blank = torch.full((task.outputs,), -math.inf).index_fill(
            0, torch.tensor(task.outputs - 1), 0.0
        )
        a[: -task.positions] = blank
    return a


@pytest.mark.parametrize(
    "name", [name for name in GENERATED if TASKS[name].build not in (Reversal, Sorting)]
)
def test_baselines_agree_with_simulation(name):
    task = tasks.make(name, length=30)
    batch = task.batch(0, 20000, seed=6)
    a, claimed = constant(task, batch.y), task.baseline()
    value = losses.entry_losses(task.loss, a.flatten(0, -2), batch.y.flatten(), task.output)
    assert float(value.mean()) == pytest.approx(claimed.pop("loss"), rel=0.02)
    found = judge(task, a, batch)
    if name == "multiplication":  # each metric has a best constant of its own
        found = {
            m: max(judge(task, torch.full_like(a, c), batch)[m] for c in np.arange(0, 1, 0.02))
            for m in found
        }
        assert 1 - judge(task, a, batch)["right_0.04"] == pytest.approx(0.889, abs=0.01)
    assert found.keys() == claimed.keys()
    for metric, share in claimed.items():
        assert found[metric] == pytest.approx(share, abs=4 * math.sqrt(share / 20000) + 1e-9)


@pytest.mark.parametrize("kind", [Reversal, Sorting])
def test_baselines_of_answers_agree_with_enumeration(kind):
    """Of all sequences of up to 4 of 3 letters: the entropy of answers, the best letter of each
    place, the likeliest answer.
    """
    entropy, letters, whole = [], [], []
    for L in range(1, 5):
        inputs = list(itertools.product(range(3), repeat=L))
        answers = [tuple(reversed(s)) if kind is Reversal else tuple(sorted(s)) for s in inputs]
        shares = [answers.count(a) / len(answers) for a in set(answers)]
        entropy.append(-sum(p * math.log(p) for p in shares) / (L + 1))
        letters.append(
            sum(max(np.bincount(place)) for place in zip(*answers, strict=True)) / len(answers)
        )
        whole.append(max(shares))
        claimed = kind(L, values=3).baseline()
        expected = {"loss": entropy[-1], "right": (letters[-1] + 1) / (L + 1), "whole": whole[-1]}
        assert claimed == pytest.approx(expected, rel=1e-12)
    expected = {
        "loss": np.mean(entropy),
        "right": (np.mean(letters) + 1) / 3.5,
        "whole": np.mean(whole),
    }
    assert kind((1, 4), values=3).baseline() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("said", "right", "whole"),
    [
        ([1, 2, 0, 3], (4, 4), 1),  # as it should be
        ([1, 2, 0, 3, 1, 3, 0], (4, 4), 1),  # nothing is said after the end
        ([1, 2, 0, 1, 3], (3, 5), 0),  # one too many, and the end too late
        ([1, 2, 0], (3, 4), 0),  # cut off before the end
        ([1, 2, 3], (2, 4), 0),  # ended too early: a letter and the end are missing
        ([1, 1, 0, 3], (3, 4), 0),
        ([3], (0, 4), 0),
        ([0, 0, 1, 0, 1, 0, 1], (0, 7), 0),
    ],
)
def test_missing_and_extra_tokens_are_wrong(said, right, whole):
    task = Reversal(3, values=3)
    batch = co.Batch(None, torch.tensor([[1], [2], [0], [3]]))
    a = torch.nn.functional.one_hot(torch.tensor(said), 4).float()[:, None]
    assert task.score(a, batch) == {"right": right, "whole": (whole, 1)}
    letters = " ".join(map(str, itertools.takewhile(lambda v: v != 3, said))) or "nothing"
    assert task.show(a.transpose(0, 1), batch.y.T) == [("1 2 0", letters)]
    a[0, 0, 2] = float("nan")
    found = task.score(a, batch)
    assert found["whole"] == (0, 1)
    assert found["right"][0] <= right[0]


def test_baselines_have_their_known_values():
    def wrong(task):
        return [round(100 * (1 - task.baseline()[f"right_{d}"]), 1) for d in (0.2, 0.04)]

    assert wrong(Addition()) == [36.0, 84.6]
    assert wrong(Multiplication()) == [23.3, 71.8]
    assert Copy(1000).baseline()["loss"] == pytest.approx(0.02039, abs=5e-6)
    assert Memorisation((3, 4), values=5, positions=10).baseline()["loss"] == pytest.approx(
        5 * math.log(5) * (1 / 23 + 1 / 24)
    )


@pytest.mark.parametrize(
    "chosen", [{"length": 14}, {"length": (12, 17), "ragged": True}], ids=["fixed", "ragged"]
)
@pytest.mark.parametrize("name", GENERATED)
def test_a_network_takes_every_task(name, chosen):
    task = tasks.make(name, **chosen)
    make = EncoderDecoder
    if task.readout != "sequence":

        def make(*cell, **sizes):
            return co.Network(*cell, readout=task.readout, output=task.output, **sizes)

    net = make("elman", inputs=task.inputs, hidden=4, outputs=task.outputs)
    assert (net.readout, net.output) == (task.readout, task.output)
    b = task.batch(0, 5, seed=0)
    run = net(b.u, lengths=b.lengths)
    value = run.loss(task.loss, b.y, reduce=task.reduce)
    assert value.shape == (5,)
    assert torch.isfinite(value).all()
    assert 0 <= judge(task, run.a, b)[task.metric] <= 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TemporalOrder(9), "at least 10; got 9"),
        (lambda: Addition((5, 20)), "at least 10; got 5"),
        (lambda: XOR(2.5), "whole number"),
        (lambda: XOR(True), "whole number"),
        (lambda: tasks.make("permutation", length=1), "at least 2; got 1"),
        (lambda: Copy(0), "at least 1; got 0"),
        (lambda: TemporalOrder((30, 20)), "low <= high"),
        (lambda: TemporalOrder((30, 40, 50)), "pair"),
        (lambda: TemporalOrder(30, ragged=True), "range of lengths"),
        (lambda: TemporalOrder(30, curriculum=(5, 10)), "at least 10; got 5"),
        (lambda: TemporalOrder(30, curriculum=(31, 10)), "expected at most 30, the longest"),
        (lambda: TemporalOrder(30, curriculum=(10, 0)), "at least 1; got 0"),
        (lambda: TemporalOrder(30, curriculum=10), "pair"),
        (lambda: TemporalOrder(30, symbols=4), "symbols=2 or 3"),
        (lambda: Addition(30, rule="strikt"), "did you mean 'strict'"),
        (lambda: Memorisation(30, values=1), "at least 2"),
        (lambda: Memorisation(30, positions=0), "at least 1"),
        (lambda: Reversal(0), "at least 1; got 0"),
        (lambda: Sorting(values=1), "at least 2; got 1"),
        (lambda: TemporalOrder(30).batch(0, 0, seed=0), "number of sequences"),
        (lambda: next(TemporalOrder(30).held_out("tset", seed=0)), "did you mean 'test'"),
        (lambda: tasks.make("temporal-ordr"), "did you mean 'temporal-order'"),
        (
            lambda: tasks.make("copy", lenght=3),
            "option of task 'copy' 'lenght'; did you mean 'length'",
        ),
        (lambda: tasks.make("memorisation-5", values=3), "unknown option"),
        (lambda: tasks.make("music"), "needs path"),
        (lambda: Digits(pixels=2), "1 or 8 pixels"),
    ],
)
def test_refusals_name_the_way_out(call, words):
    with pytest.raises(InputError) as refusal:
        call()
    assert words in str(refusal.value)


def test_tasks_are_found_by_name_with_their_options():
    assert tasks.options("temporal-order-3") == {
        "length": 100,
        "ragged": False,
        "curriculum": None,
        "variant": "pascanu",
    }
    assert tasks.options("addition")["rule"] is None  # that of the variant
    assert tasks.options("addition")["variant"] == "pascanu"
    assert tasks.options("sorting") == {
        "length": (5, 10),
        "ragged": True,
        "curriculum": None,
        "values": 10,
    }
    assert [
        Sorting(**chosen).ragged
        for chosen in ({}, {"length": 7}, {"length": (3, 3)}, {"ragged": False})
    ] == [
        True,
        False,
        False,
        False,
    ]
    assert tasks.options("music") == {"path": ..., "chunk": None}
    assert tasks.options("digits") == {"pixels": 1, "permuted": False}
    assert all(TASKS[name].about for name in TASKS)
    assert tasks.make("temporal-order-3").outputs == 8
    assert (tasks.make("memorisation-20").values, tasks.make("memorisation-20").positions) == (
        5,
        10,
    )


@pytest.mark.slow
def test_import_needs_torch_and_numpy_alone():
    code = (
        "import sys, coadjoint.tasks; print([m for m in ('scipy', 'sklearn', 'pyarrow', "
        "'yaml') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_missing_package_is_named(monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingError, match=r"pip install 'coadjoint\[data\]'"):
        Digits()


class TestDigits:
    @pytest.fixture(autouse=True)
    def data(self):
        return pytest.importorskip("sklearn.datasets").load_digits()

    @pytest.mark.parametrize(("pixels", "T"), [(1, 64), (8, 8)])
    @pytest.mark.parametrize("permuted", [False, True])
    def test_images_are_split_into_three_sets(self, data, pixels, T, permuted):
        task = Digits(pixels=pixels, permuted=permuted)
        assert (task.size, task.splits, task.inputs, task.metric) == (
            1197,
            ("valid", "test"),
            pixels,
            "accuracy",
        )
        images = []
        for split, of in task.sets.items():
            assert of.u[0].shape == (T, pixels)
            counts = np.bincount(of.y, minlength=10)
            assert split == "train" or (counts == 30).all()
            images += [
                (u.tobytes() if not permuted else np.sort(u.ravel()).tobytes(), int(y))
                for u, y in zip(of.u, of.y, strict=True)
            ]
        original = (data.data / 16).astype(np.float32)
        original = np.sort(original, 1) if permuted else original
        assert sorted(images) == sorted(
            (u.tobytes(), int(y)) for u, y in zip(original, data.target, strict=True)
        )

    def test_one_order_of_pixels_is_used_for_all_images(self):
        plain, permuted = Digits(), Digits(permuted=True)
        at = np.lexsort(np.stack([u[:, 0] for u in plain.sets["train"].u]))
        to = np.lexsort(np.stack([u[:, 0] for u in permuted.sets["train"].u]))
        a, b = (np.stack([u[:, 0] for u in t.sets["train"].u]) for t in (plain, permuted))
        assert not np.array_equal(a, b)
        assert np.array_equal(a[:, at], b[:, to])

    def test_the_split_is_the_same_for_every_seed_and_run(self, data):
        assert split_indices(data.target)["test"][:5].tolist() == [4, 8, 12, 31, 34]
        a, b = (next(Digits().held_out("test", seed=seed)) for seed in (0, 1))
        assert torch.equal(a.u, b.u)
        assert torch.equal(a.y, b.y)

    def test_digits_are_scored_by_accuracy(self):
        task = Digits(pixels=8)
        batch = task.batch(0, 32, seed=0)
        assert judge(task, perfect(task, batch.y), batch) == {"accuracy": 1.0}
        test = next(task.held_out("test", seed=0))
        assert judge(task, torch.eye(10)[torch.zeros(300, dtype=torch.long)], test)[
            "accuracy"
        ] == pytest.approx(task.baseline()["accuracy"])


PIECES = {"train": [5, 3, 9], "valid": [4], "test": [6, 2]}


def cell(pieces):
    array = np.empty((1, len(pieces)), object)
    array[0, :] = pieces
    return array


def write(path, compressed=False, **changes):
    """A small file of piano rolls; `changes` replaces or removes (None) a key."""
    from scipy.io import savemat

    r = np.random.default_rng(0)

    def of(lengths):
        return cell([r.integers(0, 2, (T, 88)).astype(np.uint8) for T in lengths])

    content = {f"{split}data": of(T) for split, T in PIECES.items()} | changes
    savemat(
        path,
        {key: value for key, value in content.items() if value is not None},
        do_compression=compressed,
    )
    return path


class TestMusic:
    @pytest.fixture(autouse=True)
    def scipy(self):
        return pytest.importorskip("scipy.io")

    def test_inputs_are_the_notes_of_the_step_before(self, tmp_path, scipy):
        task = Music(write(tmp_path / "a.mat"))
        assert (task.size, task.splits, task.metric, task.goal) == (
            3,
            ("valid", "test"),
            "nll",
            None,
        )
        rolls = scipy.loadmat(tmp_path / "a.mat")
        for split in PIECES:
            pieces = {len(x): x for x in rolls[f"{split}data"].ravel()}
            batches = (
                [task.batch(0, 8, seed=0)]
                if split == "train"
                else list(task.held_out(split, seed=0))
            )
            assert sum(len(b.lengths) for b in batches) == len(pieces)
            for b in batches:
                assert b.u.dtype == b.y.dtype == torch.float32
                for j, T in enumerate(b.lengths.tolist()):
                    assert np.array_equal(b.y[:T, j].numpy(), pieces[T])
                    assert not b.u[0, j].any()
                    assert np.array_equal(b.u[1:T, j].numpy(), pieces[T][:-1])

    def test_chunks_are_for_training_alone(self, tmp_path):
        whole, cut = Music(write(tmp_path / "a.mat")), Music(tmp_path / "a.mat", chunk=2)
        assert cut.size == sum(-(-len(y) // 2) for y in whole.sets["train"].y)
        b = cut.batch(0, 100, seed=0)
        assert sorted(set(b.lengths.tolist())) <= [1, 2]
        assert b.lengths.sum() == sum(len(y) for y in whole.sets["train"].y)
        parts = {
            y.tobytes()
            for piece in whole.sets["train"].y
            for y in (piece[k : k + 2] for k in range(0, len(piece), 2))
        }
        assert all(
            b.y[:n, j].numpy().astype(np.uint8).tobytes() in parts
            for j, n in enumerate(b.lengths.tolist())
        )
        for split in ("train", "valid", "test"):
            one, other = next(whole.held_out(split, 0)), next(cut.held_out(split, 0))
            assert torch.equal(one.u, other.u)
            assert torch.equal(one.lengths, other.lengths)
        with pytest.raises(co.InputError, match="chunk must be a whole number, at least 1; got 0"):
            Music(tmp_path / "a.mat", chunk=0)

    def test_nll_is_pooled_over_all_steps(self, tmp_path):
        task = Music(write(tmp_path / "a.mat"))
        (b,) = task.held_out("test", seed=0)
        a = torch.full(b.y.shape, math.log(0.25 / 0.75))
        a[b.lengths.min() :, b.lengths.argmin()] = float("nan")
        total, steps = task.score(a, b)["nll"]
        notes = sum(int(y.sum()) for y in task.sets["test"].y)
        assert steps == 8
        assert total == pytest.approx(
            -notes * math.log(0.25) - (8 * 88 - notes) * math.log(0.75), rel=1e-5
        )
        net = co.Network(
            "elman", inputs=88, hidden=4, outputs=88, readout="every", output="sigmoid"
        )
        run = net(b.u, lengths=b.lengths)
        assert task.score(run.a, b)["nll"][0] == pytest.approx(
            float(run.loss(task.loss, b.y).sum().detach()), rel=1e-5
        )

    def test_the_baseline_equals_one_by_hand(self, tmp_path):
        silent, loud = np.zeros((2, 88), np.uint8), np.ones((4, 88), np.uint8)
        task = Music(
            write(
                tmp_path / "a.mat",
                traindata=cell([silent, loud]),
                testdata=cell([silent, loud[:1]]),
            )
        )
        p = 5 / 8
        assert task.baseline()["nll"] == pytest.approx(
            -88 * (math.log(p) + 2 * math.log(1 - p)) / 3
        )

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"testdata": None},
                "has no testdata; expected cell arrays traindata, validdata, testdata; the "
                "file holds 'traindata', 'validdata'."),
            ({"traindata": np.zeros((4, 88))},
                "traindata is an array [4, 88] of float64; expected a cell array"),
            ({"traindata": np.empty((1, 0), object)},
                "traindata is a cell array of 0; expected a cell array of pieces, at least one"),
            ({"traindata": {"a": 1}}, "traindata is a struct; expected a cell array"),
            ({"validdata": cell([np.zeros((4, 87), np.uint8)])},
                "piece 1 of validdata is an array [4, 87] of uint8; expected numbers [T, 88]"),
            ({"validdata": cell([np.zeros((0, 88), np.uint8)])}, "expected numbers [T, 88]"),
            ({"validdata": cell([np.zeros((2, 2, 88))])}, "an array [2, 2, 88]"),
            ({"testdata": cell([np.eye(3, 88), 2 * np.eye(3, 88)])},
                "piece 2 of testdata holds 2.0 at row 1, column 1"),
            ({"testdata": cell([np.full((3, 88), np.nan)])}, "holds nan"),
            ({"testdata": cell(["abc"])}, "piece 1 of testdata is text"),
            ({"testdata": cell([{"a": 1}])}, "is a struct"),
            ({"testdata": cell([cell([np.eye(3, 88)])])}, "is a nested cell array"),
            ({"testdata": cell([1j * np.eye(3, 88)])}, "is complex numbers"),
        ],
    )  # fmt: skip
    def test_wrong_content_is_refused(self, tmp_path, changes, words):
        with pytest.raises(DataError) as refusal:
            Music(write(tmp_path / "a.mat", **changes))
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("compressed", [False, True])
    @pytest.mark.parametrize(
        "dtype", ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", ">f8", ">i2"]
    )
    def test_the_reader_agrees_with_scipy(self, tmp_path, scipy, dtype, compressed):
        r = np.random.default_rng(0)
        content = {
            "a": cell(
                [
                    r.integers(0, 2, shape).astype(dtype)
                    for shape in ((3, 5), (1, 1), (2, 3, 4), (0, 2))
                ]
            ).T
        }
        content |= {
            "b": r.integers(0, 100, (4, 3)).astype(dtype),
            "a_much_longer_name": np.ones((1, 2), dtype),
        }
        scipy.savemat(tmp_path / "a.mat", content, do_compression=compressed)
        expected, found = (
            scipy.loadmat(tmp_path / "a.mat"),
            dict(read_variables((tmp_path / "a.mat").read_bytes())),
        )
        assert list(found) == list(content)
        for key in ("b", "a_much_longer_name"):
            assert np.array_equal(found[key], expected[key])
        for x, y in zip(found["a"], expected["a"].ravel(), strict=True):
            assert x.shape == y.shape
            assert np.array_equal(x, y)

    def test_the_other_byte_order_is_read(self):
        def element(kind, data):
            return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

        content = element(6, struct.pack(">II", 6, 0)) + element(5, struct.pack(">ii", 1, 2))
        content += (
            struct.pack(">HH", 1, 1) + b"x" + bytes(3) + element(9, struct.pack(">dd", 1.5, -2.0))
        )
        found = dict(read_variables(bytes(124) + b"\x01\x00MI" + element(14, content)))
        assert found["x"].tolist() == [[1.5, -2.0]]

    @pytest.mark.parametrize(
        "content",
        [b"", b"abc", bytes(128), b"MATLAB 7.3 MAT-file" + bytes(105) + b"\x00\x02IM" + bytes(400)],
        ids=["empty", "text", "zeros", "version 7.3"],
    )
    def test_other_files_are_refused(self, tmp_path, content):
        (tmp_path / "a.mat").write_bytes(content)
        with pytest.raises(
            DataError, match=r"^a\.mat is not a complete MATLAB file of version 5 to 7\.2: "
        ):
            Music(tmp_path / "a.mat")

    def test_a_bomb_is_not_unpacked(self, tmp_path, monkeypatch):
        monkeypatch.setattr("coadjoint.tasks.music.LARGEST", 10_000)
        data = zlib.compress(bytes(10_001))
        header = write(tmp_path / "a.mat").read_bytes()[:128]
        (tmp_path / "a.mat").write_bytes(header + struct.pack("<II", 15, len(data)) + data)
        with pytest.raises(DataError, match="too large"):
            Music(tmp_path / "a.mat")

    @pytest.mark.parametrize("compressed", [False, True])
    def test_a_damaged_file_is_read_or_refused(self, tmp_path, compressed):
        """Bytes changed, or the end cut off: never another error."""
        whole, r = write(tmp_path / "a.mat", compressed).read_bytes(), np.random.default_rng(1)
        refusals = []
        for k in range(400):
            data = bytearray(whole)
            for i in r.integers(0, len(data) if k % 2 else 300, 3):
                data[i] = r.integers(256)
            (tmp_path / "a.mat").write_bytes(data if k % 3 else data[: r.integers(len(data))])
            try:
                Music(tmp_path / "a.mat")
            except DataError as refusal:
                refusals.append(str(refusal))
        assert len(refusals) > 200
        assert not any("\n" in text for text in refusals)

    def test_a_missing_file_is_refused(self, tmp_path):
        for path in (tmp_path / "none.mat", tmp_path):
            with pytest.raises(DataError, match="there is no file"):
                Music(path)

    @pytest.mark.parametrize(
        ("file", "sizes", "steps", "nll"),
        [
            ("Piano_midi", (87, 12, 25), 75911, 11.05),
            ("Nottingham", (694, 173, 170), 176561, 10.25),
            ("MuseData", (524, 135, 124), 245202, 11.51),
            ("JSB_Chorales", (229, 76, 77), 13807, 11.06),
        ],
    )
    def test_published_sets_have_their_known_sizes(self, file, sizes, steps, nll):
        folder = os.environ.get("COADJOINT_MUSIC") or ROOT.parent / "shared" / "data" / "music"
        path = Path(folder) / f"{file}.mat"
        if not path.is_file():
            pytest.skip("set COADJOINT_MUSIC to the folder of the piano rolls")
        task = Music(path)
        assert tuple(len(task.sets[split]) for split in ("train", "valid", "test")) == sizes
        assert sum(map(len, task.sets["train"].u)) == steps
        assert round(task.baseline()["nll"], 2) == nll
