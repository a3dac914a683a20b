"""Formulas stay accurate where parameters and inputs saturate, vanish or overflow.

Values, slopes and bends of every cell, in both types and on the engines that run on any machine,
are compared with 50 digits. They must be as good as rounding lets them be, and never infinite or
NaN where the truth is not.
"""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import mpmath as mp
import pytest
import torch

import coadjoint as co
import precise
from coadjoint.cells import library
from coadjoint.cells.formula import ONE, Node, evaluate_nodes, pull, symbol
from coadjoint.networks import readout
from coadjoint.sweeps import pointwise
from coadjoint.sweeps.engines import eager, reference, scan
from coadjoint.sweeps.engines.c import engine as c_engine
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.rows import Rows
from coadjoint.sweeps.slopes import step_map

pytestmark = pytest.mark.slow

F32, F64 = torch.float32, torch.float64
TYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["f32", "f64"])
ROOM = 16  # how many times the error that each operation may make
POINTS = 12

INPUTS = (0.0, 0.001, -0.5, -12.0, 20.0, -20.0, 80.0, -80.0, 1e4, -1e4, 1e-30)  # and a denormal
STATES = (0.0, 0.5, -0.5, 0.001, -1e-30, 3.0, -80.0)
NU = (
    -1e4, -300.0, -150.0, -110.0, -80.0, -38.0, -37.0, -17.5, -16.5, -14.5, -3.0,
    0.5, 3.0, 5.0, 8.0, 50.0, 100.0, 1e4, 1e9,
)  # fmt: skip
BESIDE_A = {"nu": NU}  # values of a parameter that has extremes of its own


def points(cell, dtype):
    """[{(kind, name): number}]: every extreme of every input, in random company."""
    draw = random.Random(7)
    columns = {}
    kinds = {"a": cell.gates, "v": cell.side_entries, "x": cell.slots, "p": tuple(cell.parameters)}
    for kind, names in kinds.items():
        for name in names:
            denormal = torch.finfo(dtype).tiny / 8
            values = STATES if kind == "x" else BESIDE_A.get(name, (*INPUTS, denormal))
            count = max(POINTS, len(NU)) if "nu" in cell.parameters else POINTS
            column = list(itertools.islice(itertools.cycle(values), count))
            draw.shuffle(column)
            columns[kind, name] = [float(torch.tensor(y, dtype=dtype)) for y in column]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def arrays(rows, dtype):
    """The points as the units of one row: {"a": [1, gates d], ..., "p": [parameters d]}."""
    found = {}
    for kind in "avxp":
        columns = [[row[key] for row in rows] for key in rows[0] if key[0] == kind]
        if columns:
            flat = torch.tensor(columns, dtype=dtype).flatten()
            found[kind] = flat if kind == "p" else flat[None]
    return found


class Truth:
    """A cell at one point, in 50 digits; `seeds` weigh its slots where they are differentiated."""

    def __init__(self, name, point, seeds):
        self.f, self.point, self.seeds = precise.CELLS[name], point, seeds
        self.known = {}

    def slots(self, one, other):
        kinds = {kind: {} for kind in "avxp"}
        for key, value in self.point.items():
            parts = [precise.Rounded(y) for y in (value, key == one, key == other)]
            kinds[key[0]][key[1]] = precise.Number(*parts)
        return self.f(*kinds.values())

    def value(self, slot):
        return self.slots(None, None)[slot].parts[0]

    def derivative(self, *keys):
        """By one of the inputs, or by two."""
        if keys not in self.known:
            total = precise.Rounded(0)
            part = {1: 1, 2: 3}[len(keys)]
            slots = self.slots(*keys, *[None] * (2 - len(keys)))
            for seed, slot in zip(self.seeds, slots, strict=True):
                total += precise.Rounded(seed) * slot.parts[part]
            self.known[keys] = total
        return self.known[keys]


def flushed(point, dtype):
    """The point as an engine sees it that takes denormal numbers for zero."""
    return {key: 0.0 if abs(y) < torch.finfo(dtype).tiny else y for key, y in point.items()}


def close(found, truth, dtype):
    most = torch.finfo(dtype).max
    if abs(truth.value) > most:
        return not math.isfinite(found) or abs(found) > 0.9 * most
    allowed = ROOM * (truth.error + precise.Rounded.tiny)
    return math.isfinite(found) and abs(mp.mpf(found) - truth.value) <= allowed


class Compared:
    """What engines found at all points, beside the truth."""

    def __init__(self, name, dtype):
        self.name, self.dtype, self.cell = name, dtype, library.named(name)
        self.points = points(self.cell, dtype)
        self.keys = list(self.points[0])
        self.seeds = [1.0, 0.75][: len(self.cell.slots)]
        self.given = arrays(self.points, dtype)
        self.truths = [Truth(name, point, self.seeds) for point in self.points]
        self.lam = torch.tensor(self.seeds, dtype=dtype).repeat_interleave(len(self.points))[None]

    def same(self, what, found, of):
        """found [points]: as the truth has it, or as it is where denormal numbers are zero."""
        for y, at in zip(found.tolist(), self.truths, strict=True):
            truth = of(at)
            near = close(y, truth, self.dtype)
            if not near:
                zeros = Truth(self.name, flushed(at.point, self.dtype), self.seeds)
                near = zeros.point != at.point and close(y, of(zeros), self.dtype)
            true = f"{mp.nstr(truth.value, 8)} +- {mp.nstr(truth.error, 2)}"
            assert near, f"{what}: {y:.8g}, and the truth is {true}, at {at.point}"

    def by_key(self, group, found):
        """[(key, [points])] of an array that packs the inputs of one kind."""
        keys = [key for key in self.keys if key[0] == group]
        return zip(keys, found.reshape(len(keys), -1), strict=True)

    def sweeps(self, engine):
        """One step forward and one back."""
        cell, given = self.cell, self.given
        plan, d = SweepPlan(cell, Rows([1]), engine), len(self.points)
        W = None
        if cell.read:
            W = torch.zeros(len(cell.gates) * d, len(cell.read) * d, dtype=self.dtype)
        a, v, x, p = (given.get(kind) for kind in "avxp")
        states, kept_a, q = engine.forward(plan, a, v, W, x, p)
        what = f"{engine.__name__.rpartition('.')[2]}, {self.name}"
        for i, found in enumerate(states[1].reshape(len(cell.slots), -1)):
            self.same(f"{what}, {cell.slots[i]}", found, lambda truth, i=i: truth.value(i))
        tape = Saved(kept_a, v, states, p, q)
        lam, delta, _ = engine.adjoint(plan, tape, W, None, self.lam, None, None, False, True)
        for group, found in (("x", lam[0]), ("a", delta[0])):
            for key, column in self.by_key(group, found):
                self.same(f"{what}, by {key}", column, lambda truth, key=key: truth.derivative(key))

    def derivatives(self, run):
        """The gradient by everything, and all second derivatives."""
        kinds = tuple(self.given)
        op = step_map(self.cell)
        inputs = [self.given.get(kind) for kind, _ in op.inputs]
        self.gradient(op.pulled(("x",), kinds), run, (*inputs, self.lam), "by", ())
        bend = op.pushed(kinds).pulled(("x",), kinds)
        for key in self.keys:
            dots = [self.direction(kind, key) for kind in kinds]
            self.gradient(bend, run, (*inputs, *dots, self.lam), f"by {key} and", (key,))

    def gradient(self, op, run, inputs, what, keys):
        found = dict(
            zip(op.nonzero_outputs, run(op.rowwise, None, (None, None), inputs), strict=True)
        )
        for group in self.given:
            columns = found.get(group)
            columns = torch.zeros_like(self.given[group]) if columns is None else columns
            for key, column in self.by_key(group, columns):
                seen = keys and self.keys.index(key) < self.keys.index(keys[0])
                if not seen:  # the other half of the Hessian is the same

                    def of(truth, key=key):
                        return truth.derivative(*keys, key)

                    self.same(f"{run.__module__}, {self.name}, {what} {key}", column, of)

    def direction(self, kind, key):
        """One in this input of every point."""
        keys = [k for k in self.keys if k[0] == kind]
        columns = [[float(k == key)] * len(self.points) for k in keys]
        flat = torch.tensor(columns, dtype=self.dtype).flatten()
        return flat if kind == "p" else flat[None]


def test_every_cell_is_here():
    assert list(precise.CELLS) == list(library.CELLS)


@TYPES
@pytest.mark.parametrize("name", precise.CELLS)
@pytest.mark.sampled(2)
def test_cells_are_accurate_at_the_extremes(name, dtype):
    """Values and slopes on each engine, and all first and second derivatives."""
    with precise.precision(dtype):
        compared = Compared(name, dtype)
        for engine in (reference, eager, c_engine, scan):
            if engine is not scan or scan.cell_refusal(compared.cell) is None:
                compared.sweeps(engine)
        compared.derivatives(pointwise.Pointwise.run_by_torch)


@TYPES
@pytest.mark.parametrize("name", ["lstm", "scrn-learned", "minlstm", "lru"])
@pytest.mark.sampled(2)
def test_compiled_derivatives_are_accurate_at_the_extremes(name, dtype):
    with precise.precision(dtype):
        Compared(name, dtype).derivatives(c_engine.pointwise)


# parameters of the lru, as a network has them


@pytest.mark.parametrize("engine", ["reference", "eager", "cpu", "scan", "autograd"])
@pytest.mark.parametrize(
    ("dtype", "nu"),
    [
        (F32, -80.0),
        (F32, -17.5),
        (F32, -14.5),
        (F32, 100.0),
        (F64, -400.0),
        (F64, -38.0),
        (F64, 800.0),
    ],
)
def test_lru_learns_at_any_nu(engine, nu, dtype):
    """What enters at the first step is sqrt(1 - |L|^2) u, with its slope by nu; a penalised
    gradient is finite."""
    net = co.Network("lru", inputs=1, hidden=2, outputs=1, dtype=dtype, engine=engine)
    with torch.no_grad():
        net.p["nu"].fill_(nu)
        net.R.fill_(1.0)
        net.b.zero_()
    with precise.precision(dtype):
        exact = precise.exp(precise.Number(precise.Rounded(nu), precise.Rounded(1)))
        exact = precise.sqrt(precise.one_minus_exp(-2 * exact))
        (value, slope), least = (float(y.value) for y in exact.parts[:2]), torch.finfo(dtype).tiny
    bar = 1e-4 if dtype == F32 else 1e-12
    run = net(torch.ones(1, 1, 1, dtype=dtype))
    enters = run.x[1, 0, 0]
    assert enters.item() == pytest.approx(value, rel=bar)
    (g,) = torch.autograd.grad(enters, net.p["nu"])
    assert g[0].item() == pytest.approx(slope, rel=bar, abs=least)
    lam = net(torch.ones(4, 1, 1, dtype=dtype)).costates(lambda y: (y**2).sum(-1))
    value = (lam.loss + co.penalties.PENALTIES["log-ratio"](lam)).mean()
    grads = torch.autograd.grad(value, [net.p["nu"], net.R, net.p["theta"]])
    assert all(torch.isfinite(g).all() for g in grads)


# the functions that formulas are made of


A = symbol("a")
NEAR_ZERO = (1e-30, -1e-30, 1e-9, -1e-9, 1e-4, -0.01, 0.3, -0.3, 0.7, -0.7)
FUNCTIONS = {  # f and three derivatives, where they may cancel
    "expm1": (
        (mp.expm1, mp.exp, mp.exp, mp.exp),
        (*NEAR_ZERO, 2.5, -2.5, -20.0, -40.0, -80.0, 80.0, -1e4),
    ),
    "log1p": (
        (mp.log1p, lambda a: 1 / (1 + a), lambda a: -1 / (1 + a) ** 2, lambda a: 2 / (1 + a) ** 3),
        (*NEAR_ZERO, -0.99, -1 + 2**-20, 3.0, 80.0, 1e4, 1e9),
    ),
}


@TYPES
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate_near_zero_and_far_out(name, compiled, dtype):
    """To the last digits, and so are three derivatives."""
    truths, at = FUNCTIONS[name]
    a = torch.tensor(at, dtype=dtype)
    y = Node(name, (A,))
    for order, truth in enumerate(truths):
        if compiled:
            op = pointwise.Pointwise((("x", (A,)),), (("y", (y,)),), (), frozenset())
            found = c_engine.pointwise(op, None, (), (a[:, None],))[0][:, 0]
        else:
            found = evaluate_nodes([y], {A: a})[0]
        with mp.workdps(50):
            expected = torch.tensor([float(truth(mp.mpf(v))) for v in a.tolist()], dtype=F64)
        apart = (found.double() - expected).abs()
        allowed = 8 * torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).tiny
        assert (apart <= allowed).all(), f"order {order}: {found.tolist()}"
        (y,) = pull([y], [ONE], [A])


@pytest.mark.parametrize("nu", [-60.0, -38.0, -20.0, -3.0, 1.0, 6.0, 20.0])
def test_three_derivatives_of_what_enters_an_lru_are_accurate(nu):
    """In float32, where a root of what is nearly zero is steep: third derivatives stay in range."""
    y, at = (
        co.cells.input_gain(co.cells.at_most(co.cells.FADES_AT_ONCE, A)),
        torch.tensor([nu], dtype=F32),
    )
    with mp.workdps(50):
        truth = mp.taylor(lambda x: mp.sqrt(-mp.expm1(-2 * mp.exp(x))), nu, 3)
    for order in range(4):
        true = truth[order] * mp.factorial(order)
        found = torch.as_tensor(evaluate_nodes([y], {A: at})[0]).item()
        assert found == pytest.approx(float(true), rel=1e-4, abs=1e-37), f"order {order}"
        (y,) = pull([y], [ONE], [A])


# losses and readouts


def same(found, expected, dtype):
    """Each row at its own scale."""
    expected = torch.tensor(expected, dtype=F64)
    size = expected.abs().amax(-1, keepdim=True)
    bar = 16 * torch.finfo(dtype).eps * size + 4 * torch.finfo(dtype).tiny
    apart = (found.detach().double() - expected).abs()
    assert (apart <= bar).all(), f"{found.tolist()}, expected {expected.tolist()}"


def checked(loss, output, a, y, value, slope, bend, dtype):
    """One entry: its value, its slope by both ways, its Hessian."""
    a = torch.tensor([a], dtype=dtype, requires_grad=True)
    found = co.losses.entry_losses(loss, a, y, output)
    (g,) = torch.autograd.grad(found.sum(), a, create_graph=True)
    rows = [torch.autograd.grad(g[0, i], a, retain_graph=True)[0][0] for i in range(a.shape[1])]
    quick, its_slope = co.losses.losses_and_slopes(loss, a.detach(), y, output)
    for ours in (found, quick):
        same(ours, [value], dtype)
    for ours in (g[0], its_slope[0]):
        same(ours, slope, dtype)
    same(torch.stack(rows).flatten(), [h for row in bend for h in row], dtype)


LOGITS = (
    (12.0, 0.0, -1.0), (20.0, 0.0, -3.0), (30.0, 29.0, 0.0), (80.0, 0.0, 0.0), (0.0, 80.0, 40.0),
    (1e4, -1e4, 0.0), (0.0, 0.0, 0.0), (1e-30, 0.0, 17.0),
)  # fmt: skip


@TYPES
@pytest.mark.parametrize("kind", ["class", "one-hot"])
@pytest.mark.parametrize("right", range(3))
def test_cross_entropy_is_accurate_where_answers_are_nearly_right(right, kind, dtype):
    """Where the answer is right the slope is minus the sum of the other p, however small."""
    y = torch.tensor([right]) if kind == "class" else torch.eye(3, dtype=dtype)[[right]]
    for a in LOGITS:
        a = torch.tensor(a, dtype=dtype).tolist()
        with mp.workdps(50):
            e = [mp.exp(mp.mpf(v) - mp.mpf(a[right])) for v in a]
            total = mp.fsum(e)
            p = [v / total for v in e]
            rest = [mp.fsum(v for j, v in enumerate(p) if j != k) for k in range(3)]  # 1 - p_k
            value = float(mp.log1p(mp.fsum(v for j, v in enumerate(e) if j != right)))
            slope = [float(-rest[k] if k == right else p[k]) for k in range(3)]
            bend = [[float(-p[j] * p[k]) for k in range(3)] for j in range(3)]
            for j in range(3):
                bend[j][j] = float(p[j] * rest[j])
        checked("cross-entropy", "softmax", a, y, value, slope, bend, dtype)


@TYPES
@pytest.mark.parametrize("y", [0.0, 1.0])
@pytest.mark.parametrize("a", [-1e4, -80.0, -20.0, -12.0, -1e-30, 0.0, 0.5, 12.0, 20.0, 80.0, 1e4])
def test_binary_cross_entropy_is_accurate_where_answers_are_nearly_right(a, y, dtype):
    with mp.workdps(50):
        x = mp.mpf(float(torch.tensor(a, dtype=dtype)) * (1 - 2 * y))  # how wrong it is
        value, slope = float(mp.log1p(mp.exp(x))), float((1 - 2 * y) * precise.logistic(x))
        bend = float(precise.logistic(x) * precise.logistic(-x))
    target = torch.tensor([[y]], dtype=dtype)
    checked("binary-cross-entropy", "sigmoid", [a], target, value, [slope], [[bend]], dtype)


@TYPES
@pytest.mark.parametrize("h", [-1e4, -80.0, -21.0, -19.0, -3.0, 0.0, 0.5, 2.0, 3.5, 80.0, 1e4])
def test_log_tanh_of_a_mean_is_accurate(h, dtype):
    """What "tilted-tanh" reads of one step: log tanh(m), m = e^h; its slope is 2 m / sinh(2 m)."""
    at = torch.tensor([[h]], dtype=dtype, requires_grad=True)
    read = readout.tilted_tanh(SimpleNamespace(beta=1.0), Rows([1]), at, {})
    (slope,) = torch.autograd.grad(read.sum(), at, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), at)
    with mp.workdps(50):
        m = mp.exp(min(mp.mpf(at.item()), 10))  # further up all of it is zero
        value, steep = mp.log(mp.tanh(m)), 2 * m / mp.sinh(2 * m)
        bent = steep * (1 - 2 * m * mp.coth(2 * m))
    eps = torch.finfo(dtype).eps
    least = max(torch.finfo(dtype).tiny, 1e-280, 8 * eps * float(steep))
    for found, true in zip((read, slope, bend), (value, steep, bent), strict=True):
        assert found.item() == pytest.approx(float(true), rel=200 * eps, abs=least)
