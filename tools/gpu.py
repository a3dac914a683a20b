"""`make test-gpu`: the engines on a GPU are compared with the definition in float64 on the CPU.

Some checks need a GPU: a hundred calls must return equal bits, and recorded gradients must be the
same. Only torch and numpy are needed. Each group of checks prints one line.

    python tools/gpu.py                    all groups
    python tools/gpu.py sweeps recorded    some of them
    python tools/gpu.py --dry              the same functions on the CPU, to try out this file
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import cases
import coadjoint as co
import poison
from cases import Case, Data
from coadjoint.gradients import captured
from coadjoint.sweeps.engines import cell_refusal, load
from coadjoint.sweeps.engines.cuda import capture, driver, geometry
from coadjoint.training import ahead, display, step
from coadjoint.training.plan import TrainingPlan
from coadjoint.training.trainer import Training
from problems import ADJOINT, CELLS, NEWER, ONE, SCALED, TANGENT, Problem

poison.install()
F32, F64 = torch.float32, torch.float64
BARS = {F32: 1e-5, F64: 1e-11}
ROWS = {F32: 3e-5, F64: 1e-11}  # of the worst row of an array, at its own scale
SOME = {"adjoint": ("s sa", "s_last link", "s s_last k_last scaled"), "tangent": ("g ga link",)}
EVERY = {"adjoint": (*ADJOINT, *SCALED), "tangent": TANGENT}
REPEATS = 100
THREADS = 8  # kernels are compiled side by side
COMPILED = ("cuda", "cpu")  # the engines that compile; cpu for a dry run


class Setting:
    """Where and by which engines; the first of them is the one that records."""

    def __init__(self, dry):
        self.device = "cpu" if dry else "cuda"
        self.engines = ("cpu", "eager", "reference") if dry else ("cuda", "eager", "reference")
        self.dry, self.best = dry, self.engines[0]
        self.engines = [e for e in self.engines if load(e).refusal(self.device) is None]


def together(engine, function, table):
    """function(row) for each row of the table -> what it returned; side by side where that is
    compiling, mostly. The package takes care that tangents of several threads stay apart.
    """
    threads = THREADS if engine in COMPILED else 1
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, table))


# the three loops


SIZES = {  # (samples of each step, d)
    "one": ([1], 1),
    "three": ([4] * 3, 3),
    "ragged": ([6, 5, 5, 2, 1], 31),
    "33": ([5] * 3, 33),
    "127": ([3, 2], 127),
    "500": ([3, 3, 1], 500),
    "many": ([1100] * 2, 24),  # more samples than the multiprocessors take at once
    "both": ([900, 500], 200),
    "several": ([9, 8, 8, 4, 2], 260),  # more units than one multiprocessor holds
    "long": ([3] * 150 + [2] * 83, 6),
    "wide": ([64] * 4 + [40, 9], 512),  # tensor cores, one item a step and several
    "odd": ([70, 70, 30], 510),
    "batch": ([256, 256, 130], 512),
    "1024": ([64] * 3, 1024),
}
WIDE = [  # (cell, size, dtype, sources)
    *((name, size, F32 if (i + j) % 2 else F64, SOME)
      for i, name in enumerate(CELLS) for j, size in enumerate(("one", "ragged", "33"))),
    *(("lstm", size, F32, SOME) for size in ("three", "127", "500", "many")),
    *(("elman", size, F64, SOME) for size in ("127", "500", "many")),
    ("gru", "several", F32, SOME), ("gru", "both", F32, SOME), ("pair", "several", F64, SOME),
    ("odd", "127", F32, SOME),
    ("lstm", "wide", F32, SOME), ("gru", "odd", F32, SOME), ("gru", "batch", F32, SOME),
    ("elman", "1024", F32, SOME), ("mixed", "wide", F32, SOME), ("lstm", "1024", F32, SOME),
    ("lstm", "batch", F32, EVERY),
    ("lstm", "ragged", F32, EVERY), ("elman", "several", F32, EVERY), ("pair", "many", F32, EVERY),
]  # fmt: skip
NARROW = [  # where each kernel takes seconds to compile
    ("elman", "ragged", F32, SOME),
    ("lstm", "33", F32, SOME),
    ("pair", "three", F64, SOME),
    ("gru", "several", F32, SOME),
]


def swept(setting, engine, table):
    def check(row):
        name, size, dtype, given = row
        try:
            Problem(name, *SIZES[size], dtype, setting.device).against(
                load(engine), **given, bar=ROWS[dtype]
            )
        except Exception as error:  # named with its case
            return f"{engine}: {name}, {size}, {str(dtype)[6:]}: {type(error).__name__} {error}"
        return None

    return engine, len(table), [e for e in together(engine, check, table) if e], "loops"


def sweeps(setting):
    for engine in setting.engines:
        yield swept(setting, engine, WIDE)


# whole gradients


SHAPES = (
    {"H": 1, "B": 1, "T": 1, "dtype": F64},
    {"H": 3, "B": 5, "T": 6, "ragged": True, "readout": "every", "dtype": F64},
    {"H": 31, "B": 3, "T": 4, "x0": "learned"},
    {"H": 33, "B": 4, "T": 5, "ragged": True, "reduce": "mean"},
    {"H": 127, "B": 2, "T": 3, "readout": "every", "x0": "given"},
    {"H": 500, "B": 3, "T": 3, "ragged": True},
)
TABLE = [
    Case(
        cell,
        loss=("squared", "cross-entropy")[(i + j) % 2],
        penalty=("log-ratio", "variance")[i % 2],
        u_grad=False,
        seed=50 * i + j,
        **{"dtype": (F32, F64)[(i + j) % 2]} | shape,
    )
    for i, cell in enumerate(("elman", "leaky", "rate", "lstm", "gru", "odd", "diagonal", "pair"))
    for j, shape in enumerate(SHAPES)
]
DRAWN = [replace(c, u_grad=False) for c in map(cases.drawn, range(60)) if c.loss != "values"]
LINEAR = (
    ("one", SOME),
    ("ragged", EVERY),
    ("33", SOME),
    ("many", SOME),
    ("long", SOME),
)  # for the scan
OTHER_ROWS = [
    (name, ("ragged", "33")[i % 2], (F32, F64)[i // 2 % 2], ONE) for i, name in enumerate(NEWER)
]
OTHER_CASES = [
    Case(
        cell,
        loss=("squared", "cross-entropy")[i % 2],
        penalty=("variance", "log-ratio")[i % 2],
        u_grad=False,
        seed=900 + i,
        **{"dtype": (F32, F64)[i % 2]} | SHAPES[(3, 1)[i // 2 % 2]],
    )
    for i, cell in enumerate(NEWER)
]


def moved(u, device, dtype):
    if isinstance(u, list | tuple) and not isinstance(u, PackedSequence):
        return [y.to(device, dtype) for y in u]
    return u.to(device=device, dtype=dtype)


def evaluated(case, device="cpu", engine="reference", dtype=F64, nudge=0):
    """States, costates, log-norms, a tangent, losses and gradients of a case, by name,
    in float64.
    """
    data = Data.of(case, F64, oracle=False, nudge=nudge)
    net = cases.network(replace(case, engine="reference", dtype=F64), data).to(
        device=device, dtype=dtype
    )
    net.engine = engine
    batch = cases.batch(case, data)
    batch = replace(batch.to(dtype, device), u=moved(batch.u, device, dtype))
    data = replace(data, direction=data.direction.to(device, dtype))
    loss = cases.LOSSES.get(case.loss, case.loss)
    plain = co.BPTT()(net, batch, loss)
    e = co.Penalised(cases.penalty(case, data), case.rho)(net, batch, loss)
    mask = plain.trajectory.mask[1:].to(device)[..., None]
    push = plain.trajectory.push(torch.where(mask, data.direction, 0))
    found = {
        "x": e.trajectory.x,
        "lam": e.costates.lam,
        "log-norms": e.costates.log_norms(),
        "tangent": push,
    }
    found |= {"loss": e.losses, "penalty": e.penalties}
    for kind, g in (("L", plain.gradient), ("F", e.gradient)):
        found |= {f"d{kind}/{name}": y for name, y in g.items()}
    return {
        name: y.detach().cpu().double().nan_to_num(nan=0.0, neginf=-1e3)
        for name, y in found.items()
    }


def errors(truth, found):
    assert truth.keys() == found.keys()
    return {
        n: float((found[n] - y).norm() / y.norm().clamp_min(1e-300))
        if bool((found[n] != y).any())
        else 0.0
        for n, y in truth.items()
    }


def disagreements(case, device, engine):
    """(what is wrong, is the case ill conditioned: a change of the last digits of its numbers
    matters as much)
    """
    truth, bar = evaluated(case), BARS[case.dtype]
    wrong = {
        n: e
        for n, e in errors(truth, evaluated(case, device, engine, case.dtype)).items()
        if not e <= bar
    }
    if wrong:
        own = [errors(truth, evaluated(case, nudge=k)) for k in (1, 2)]
        if all(
            max(y[n] for y in own) > bar / 10 and e < 100 * max(y[n] for y in own)
            for n, e in wrong.items()
        ):
            return {}, True
    return wrong, False


def differentiated(setting, engine, table):
    def check(case):
        try:
            wrong, ill = disagreements(case, setting.device, engine)
        except Exception as error:  # named with its case
            return f"{engine}: {case}: {type(error).__name__} {error}", False
        return (
            f"{engine}: {case}: " + ", ".join(f"{n} {e:.1e}" for n, e in wrong.items())
            if wrong
            else None
        ), ill

    found = together(engine, check, table)
    ill = sum(ill for _, ill in found)
    return engine, len(table), [e for e, _ in found if e], f"gradients, {ill} ill conditioned"


def gradients(setting):
    for engine in setting.engines:
        most = [*TABLE, *DRAWN] if engine == setting.best else [*TABLE[::3], *DRAWN[::4]]
        yield differentiated(setting, engine, most)


# the other cells, and the scan


def others(setting):
    for engine in dict.fromkeys((*setting.engines, "scan")):
        table = [c for c in OTHER_CASES if cell_refusal(engine, NEWER[c.cell]) is None]
        rows = [r for r in OTHER_ROWS if cell_refusal(engine, NEWER[r[0]]) is None]
        if engine == "scan":
            rows = [
                (r[0], size, dtype, given)
                for r in rows
                for size, given in LINEAR
                for dtype in (F32, F64)
            ]
        yield swept(setting, engine, rows)
        yield differentiated(setting, engine, table)


def large(setting):
    """d = 1024, where W is spread over the whole chip or does not fit it."""
    shape = {
        "H": 1024,
        "B": 3,
        "T": 4,
        "D": 2,
        "O": 2,
        "penalty": "log-ratio",
        "u_grad": False,
        "dtype": F32,
    }
    failures = []
    for cell in ("elman", "lstm", "gru"):
        wrong, _ = disagreements(Case(cell, **shape), setting.device, setting.best)
        failures += [f"{cell}: {n} {e:.1e}" for n, e in wrong.items()]
    yield setting.best, 3, failures, ""


# equal bits


REPEATED = [  # (cell, samples of each step, d, what the geometry shows)
    ("elman", [64] * 20, 128, lambda g: g.parts == g.blocks == 1),
    ("elman", [1100] * 4, 64, lambda g: g.parts == 1 < g.blocks),
    ("lstm", [8] * 10, 300, lambda g: g.parts > 1),
    ("gru", [900, 900, 500, 7], 200, lambda g: g.parts > 1 and g.blocks > 1),
    ("lstm", [64] * 10 + [50, 9], 512, lambda g: g.tensor and g.blocks == 1),
    ("gru", [256] * 4, 512, lambda g: g.tensor and g.blocks > 1),
]


def determinism(setting):
    engine, failures = load(setting.best), []

    def all_sweeps(problem):
        tape = problem.tape(engine)
        found = [
            tape.x,
            *problem.adjoint(engine, tape, "s s_last sa scaled"),
            *problem.tangent(engine, tape, "g ga link"),
        ]
        return [y for y in (*found, tape.q) if y is not None]

    for name, sizes, d, holds in REPEATED:
        problem = Problem(name, sizes, d, F32, setting.device)
        if not setting.dry:
            device = problem.base.get_device()
            chip = driver.processor_count(device), driver.shared_memory_limit(device)
            clusters = driver.cluster_counts(device)
            g = geometry.choose_geometry(problem.cell, d, problem.rows.B, 4, *chip, False, clusters)
            if g is None or not holds(g):
                failures.append(f"{name}, d = {d}: the network lies otherwise on this chip, {g}")
        first = all_sweeps(problem)
        differ = sum(
            not all(torch.equal(y, z) for y, z in zip(first, all_sweeps(problem), strict=True))
            for _ in range(REPEATS)
        )
        failures += [f"{name}, d = {d}: {differ} of {REPEATS} repeats differ"] if differ else []
    yield setting.best, len(REPEATED) * REPEATS, failures, ""


# recorded gradients


def raised(function):
    try:
        function()
    except co.InputError as error:
        return str(error)
    return "nothing"


def equal(e, other):
    pairs = [(e.losses, other.losses), (e.penalties, other.penalties)]
    pairs += [(e.gradient[n], other.gradient[n]) for n in other.gradient]
    return e.gradient.keys() == other.gradient.keys() and all(torch.equal(a, b) for a, b in pairs)


METHODS = {
    "BPTT": co.BPTT,
    "Penalised": lambda: co.Penalised("log-ratio", 0.3),
    "variance": lambda: co.Penalised("variance", 0.1),
    "pretraining": lambda: co.Penalised("log-ratio", 0.3, pretrain=1000),
    "held": lambda: co.Penalised("log-ratio", 0.3, hold="source"),
    "steered": lambda: co.Penalised("log-ratio", co.penalties.Steered(0.3, 0.1, low=0.3, high=0.3)),
}


RECORDED = (  # cell, units, engine if it is not the best
    ("elman", 33, None), ("lstm", 64, None), ("gru", 260, None), (cases.diagonal, 7, None),
    ("lru", 16, "scan"),
    ("minlstm", 21, "scan"), ("exponential", 12, None), ("inverse", 9, None),
    (NEWER["lstm-1997-truncated"], 30, None),
)  # fmt: skip
EITHER = (
    "exponential",
    "inverse",
)  # their W, or what they are given, may need the CPU: not recorded then


def recorded(setting):
    """The same bits as operation by operation; and what is wrong with a batch is still said."""
    T, B, classes, failures, count = 12, 5, 4, [], 0
    for (cell, hidden, engine), (name, method) in itertools.product(RECORDED, METHODS.items()):
        torch.manual_seed(hidden)
        engine = engine or setting.best
        net = co.Network(
            cell, inputs=3, hidden=hidden, outputs=classes, device=setting.device, engine=engine
        )
        where, again = f"{net.cell.name}, {name}", method()

        def drawn(steps=T):
            y = torch.randint(classes, (B,), device=setting.device)
            return co.Batch(torch.randn(steps, B, 3, device=setting.device), y)

        def same(what, batch, again=again, net=net, method=method, where=where):
            if not equal(again(net, batch, "cross-entropy"), method()(net, batch, "cross-entropy")):
                failures.append(f"{where}: {what}: not the same bits")

        for _ in range(capture.CALLS_BEFORE_RECORDING + 3):
            same("another batch", drawn())
        kinds = [type(y).__name__ for y in again.captured.cache.entries.values()]
        if not setting.dry and cell not in EITHER and kinds != ["CapturedGradient"]:
            failures.append(
                f"{where}: {kinds}, expected a recording: {again.captured.cache.refusal}"
            )
        good = drawn()
        bad = replace(
            good, u=good.u.index_fill(0, torch.tensor([1], device=setting.device), torch.nan)
        )
        said = raised(lambda again=again, net=net, bad=bad: again(net, bad, "cross-entropy"))
        if "`u` holds NaN or inf, first at step 2 of sample 0" not in said:
            failures.append(f"{where}: of NaN in the inputs: {said}")
        bad = replace(good, y=good.y + classes)
        said = raised(lambda again=again, net=net, bad=bad: again(net, bad, "cross-entropy"))
        if "class numbers must lie in 0..3" not in said:
            failures.append(f"{where}: of classes out of range: {said}")
        same("after a wrong batch", good)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
        same("with changed weights", good)
        for _ in range(capture.CALLS_BEFORE_RECORDING + 2):
            same("of another length", drawn(T + 3))
        same("of the first length", good)
        moved_net = copy.deepcopy(net)
        if not equal(
            again(moved_net, good, "cross-entropy"), method()(moved_net, good, "cross-entropy")
        ):
            failures.append(f"{where}: another network: not the same bits")
        count += 2 * capture.CALLS_BEFORE_RECORDING + 11
    again, net = (
        co.BPTT(),
        co.Network("rate", inputs=3, hidden=9, outputs=classes, noise=0.3, device=setting.device),
    )
    batch = drawn()
    if (
        len(
            {
                tuple(again(net, batch, "cross-entropy").losses.tolist())
                for _ in range(capture.CALLS_BEFORE_RECORDING + 3)
            }
        )
        < capture.CALLS_BEFORE_RECORDING + 3
    ):
        failures.append("rate with noise: the same noise twice")
    count += capture.CALLS_BEFORE_RECORDING + 3
    again = co.BPTT()
    for activation in (
        "tanh",
        "relu",
        "sin",
    ):  # each takes the place of the one before: its name and its memory
        net = co.Network(
            "elman",
            inputs=3,
            hidden=33,
            outputs=classes,
            activation=cases.ACTIVATIONS.get(activation, activation),
            device=setting.device,
            engine=setting.best,
        )
        batch = drawn()
        for _ in range(capture.CALLS_BEFORE_RECORDING + 2):
            if not equal(
                again(net, batch, "cross-entropy"), co.BPTT()(net, batch, "cross-entropy")
            ):
                failures.append(
                    f"elman, {activation}, BPTT: in the place of another network: not the same bits"
                )
        del net
        count += capture.CALLS_BEFORE_RECORDING + 2
    yield setting.best, count, failures, ""


# loops of users' own


WIDTHS = (
    ("elman", 128, "last"), ("lstm", 128, "every"), ("gru", 128, "last"), ("lstm", 512, "last"),
)  # fmt: skip
OWN_CALLS = 8  # until everything is recorded that will be


def own_gradient(net, u, y, G, loss="cross-entropy"):
    """Of a loop that users write themselves: loss, penalty and gradient, in float64 on the CPU."""
    lam = net(u).costates(loss, y)
    value = G(lam)
    grads = torch.autograd.grad((lam.loss + 0.3 * value).mean(), list(net.parameters()))
    return [z.detach() for z in (lam.loss, value, *grads)]


def own_second_derivative(net, u, y):
    """The derivative of the squared size of a penalised gradient."""
    lam = net(u).costates("cross-entropy", y)
    objective = (lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean()
    by = torch.autograd.grad(objective, [net.W, net.V], create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in by), [net.W, net.V, net.R]))


def worst(found, truth):
    pairs = zip(found, truth, strict=True)
    return max(float((y.cpu().double() - z).norm() / z.norm().clamp_min(1e-300)) for y, z in pairs)


def stage_counts(recordings):
    """Of runs, costates and penalties: how many are recorded, and with how many gradients."""
    counts = []
    for kind in (recordings.runs, recordings.costates, recordings.penalties):
        made = [e for e in kind.cache.entries.values() if type(e).__name__ == "Stage"]
        gradients = [g for e in made for g in e.gradients.values() if g is not None]
        counts.append((len(made), len(gradients), kind.cache.refusal))
    return counts


def check_repeats(setting, where, compute, truth, dtype):
    """What is wrong with a computation that is called until it is recorded, and then again."""
    bar, failures = BARS[dtype], []
    for i in range(OWN_CALLS):
        found = compute()
        if not (off := worst(found, truth)) < bar:
            failures.append(f"{where}: call {i}: {off:.1e}")
    repeats = 3 if setting.dry else REPEATS
    differ = 0
    for _ in range(repeats):
        again = compute()
        differ += not all(torch.equal(y, z) for y, z in zip(found, again, strict=True))
    if differ:
        failures.append(f"{where}: {differ} of {repeats} repeats differ")
    return failures


def own_loops(setting):
    """Replayed runs, costates and penalties against the CPU in float64, and with equal bits."""
    failures, count = [], 0
    for (cell, d, readout), dtype in itertools.product(WIDTHS, (F32, F64)):
        if setting.dry and d > 128:
            continue
        torch.manual_seed(0)
        plain = co.Network(
            cell,
            inputs=4,
            hidden=d,
            outputs=5,
            readout=readout,
            engine="reference",
            dtype=F64,
        )
        u, y = torch.randn(20, 8, 4, dtype=F64), torch.randint(5, (8,))
        if readout == "every":
            y = torch.randint(5, (20, 8))
        there, classes = u.to(setting.device, dtype), y.to(setting.device)
        for name in ("log-ratio", "variance", "end-points"):
            G = co.penalties.PENALTIES[name]
            where = f"{cell}, d = {d}, {str(dtype)[6:]}, {name}"
            net = copy.deepcopy(plain).to(setting.device, dtype)
            net.engine = setting.best
            truth = own_gradient(plain, u, y, G)
            failures += check_repeats(
                setting,
                where,
                lambda net=net, G=G, u=there, y=classes: own_gradient(net, u, y, G),
                truth,
                dtype,
            )
            count += REPEATS + OWN_CALLS
            if not setting.dry:
                counts = stage_counts(net.recordings)
                if any(made != 1 or gradients != 1 for made, gradients, _ in counts):
                    failures.append(f"{where}: recorded {counts}")
        failures += own_edges(f"{cell}, d = {d}, {dtype}", net, there, classes)
        failures += own_surroundings(f"{cell}, d = {d}, {dtype}", net, there, classes)
        net = copy.deepcopy(plain).to(setting.device, dtype)
        net.engine = setting.best
        failures += check_repeats(
            setting,
            f"{cell}, d = {d}, {str(dtype)[6:]}, second derivatives",
            lambda net=net, u=there, y=classes: own_second_derivative(net, u, y),
            own_second_derivative(plain, u, y),
            dtype,
        )
        count += REPEATS + OWN_CALLS + 8
    yield setting.best, count, failures, ""


def never_replayed(net):
    """A copy of a network whose runs are computed operation by operation."""
    plain = copy.deepcopy(net)
    kinds = plain.recordings
    kinds.runs.records = kinds.costates.records = kinds.penalties.records = False
    return plain


def compare_with_plain(net, where, failures):
    """A function same(what, compute), which notes where compute(net) is not that of a network
    that is never replayed; and that network.
    """
    plain = never_replayed(net)

    def same(what, compute):
        truth = [y.cpu().double() for y in compute(plain)]
        if not (off := worst(compute(net), truth)) < BARS[net.W.dtype]:
            failures.append(f"{where}: {what}: {off:.1e}")

    return same, plain


def own_edges(where, net, u, y):
    """Of a network that is recorded: other values, other weights, calls in another order, NaN."""
    failures, G = [], co.penalties.PENALTIES["end-points"]
    same, plain = compare_with_plain(net, where, failures)

    def two_runs(net):
        one, two = net(u).costates("cross-entropy", y), net(2 * u).costates("cross-entropy", y)
        value = (one.loss + G(one) - 2 * G(two)).mean()
        return torch.autograd.grad(value, list(net.parameters()))

    def in_turns(net):
        lam = net(u).costates("cross-entropy", y)
        value = (lam.loss + G(lam)).mean()
        early = torch.autograd.grad(value, list(net.parameters()), retain_graph=True)
        own_gradient(net, 3 * u, y, G)
        return [*early, *torch.autograd.grad(value, list(net.parameters()))]

    same("other inputs", lambda net: own_gradient(net, -u, y, G))
    for _ in range(OWN_CALLS):
        same("two runs", two_runs)
        same("a backward after another run", in_turns)
    with torch.no_grad():
        for each in (net, plain):
            for p in each.parameters():
                p.mul_(0.9)
    same("other weights", lambda net: own_gradient(net, u, y, G))
    same("another length", lambda net: own_gradient(net, u[:-1], y[:-1] if y.dim() == 2 else y, G))
    bad = u.clone()
    bad[1, 0] = torch.nan
    said = raised(lambda: own_gradient(net, bad, y, G))
    if "`u` holds NaN or inf, first at step 2 of sample 0" not in said:
        failures.append(f"{where}: of NaN in the inputs: {said}")
    said = raised(lambda: own_gradient(net, u, y + 5, G))
    if "class numbers must lie in 0..4" not in said:
        failures.append(f"{where}: of classes out of range: {said}")
    same("after a wrong batch", lambda net: own_gradient(net, u, y, G))
    with torch.no_grad():
        for T in range(1, 71):  # what is kept for each shape is kept for this one, too
            net(u[:1].expand(T, *u.shape[1:]).contiguous())
    _ = [torch.full((64,), 77, dtype=torch.int32, device=u.device) for _ in range(500)]
    same("after many other shapes", lambda net: own_gradient(net, u, y, G))
    return failures


def own_surroundings(where, net, u, y):
    """Of a network that is recorded: a loss of the user's, checkpoints, and a second stream."""
    failures, G = [], co.penalties.PENALTIES["end-points"]
    same, _ = compare_with_plain(net, where, failures)

    def loss(y_hat, y):
        right = torch.nn.functional.one_hot(y, y_hat.shape[-1])
        return (y_hat - right).square().sum(-1)

    def checkpointed(net):
        inputs = u.clone().requires_grad_()
        out = checkpoint(lambda u: net(u).y_hat, inputs, use_reentrant=False)
        return torch.autograd.grad(out.square().sum(), [inputs, *net.parameters()])

    def on_two_streams(net):
        """Two gradients, of which neither waits for the other."""
        found = []
        here = torch.cuda.current_stream(u.device)
        streams = [torch.cuda.Stream(u.device) for _ in range(2)]
        for factor, stream in enumerate(streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found += own_gradient(net, (1 + factor) * u, y, G)
        for stream in streams:
            here.wait_stream(stream)
        return found

    for _ in range(OWN_CALLS):
        same("a loss of the user's", lambda net: own_gradient(net, u, y, G, loss))
        same("checkpoints", checkpointed)
        if u.is_cuda:
            same("two streams", on_two_streams)
    return failures


class Critic(torch.nn.Module):
    """A layer of co.nn, and a score of its last output."""

    def __init__(self, kind, d):
        super().__init__()
        torch.manual_seed(0)
        self.layer = getattr(co.nn, kind)(4, d, dtype=F64)
        self.head = torch.nn.Linear(d, 1, dtype=F64)

    def forward(self, u):
        return self.head(self.layer(u)[0][-1])


def slope_penalty(critic, u):
    """Of (||d score / du|| - 1)^2, as in WGAN-GP: the gradient by weights and inputs."""
    x = u.clone().requires_grad_()
    slope = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
    value = (slope.norm(dim=(0, 2)) - 1).square().mean() + critic(u).mean()
    named = {name: p for name, p in critic.named_parameters() if name != "head.bias"}
    return [slope.detach(), *torch.autograd.grad(value, [x, *named.values()])]


def gradient_penalties(setting):
    """Replayed second derivatives of co.nn against the CPU in float64, and with equal bits."""
    failures, count = [], 0
    kinds = (("RNN", 128), ("LSTM", 128), ("GRU", 128), ("LSTM", 512))
    for (kind, d), dtype in itertools.product(kinds, (F32, F64)):
        if setting.dry and d > 128:
            continue
        where = f"{kind}, d = {d}, {str(dtype)[6:]}"
        plain = Critic(kind, d)
        critic = copy.deepcopy(plain).to(setting.device, dtype)
        u = torch.randn(20, 8, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
        there = u.to(setting.device, dtype)
        failures += check_repeats(
            setting,
            where,
            lambda critic=critic, u=there: slope_penalty(critic, u),
            slope_penalty(plain, u),
            dtype,
        )
        cache = critic.layer.recordings.cache
        made = [e for e in cache.entries.values() if type(e).__name__ == "Stage"]
        deep = [g for e in made for h in e.gradients.values() if h for g in h.gradients.values()]
        if not setting.dry and (len(made) != 2 or not any(deep)):
            failures.append(f"{where}: {len(made)} recordings, {len(deep)} second: {cache.refusal}")
        count += REPEATS + OWN_CALLS
    yield "co.nn", count, failures, ""


def captures(setting):
    """Every shape is recorded, however often garbage is collected and whatever other threads do
    meanwhile.
    """
    failures = []
    shapes = [(T, B, hidden) for T in (5, 9, 14) for B in (3, 8) for hidden in (7, 33, 64)]
    found = garbage_between(setting, shapes)
    failures += [f"with garbage of old graphs: {f}" for f in found]
    failures += [f"beside another thread: {f}" for f in beside_a_thread(setting, shapes[:6])]
    yield setting.best, 2 * len(shapes) + 6, failures, "shapes"


def record_one(setting, method, shape):
    """Call the method until it records -> None, or why there is no recording."""
    T, B, hidden = shape
    net = co.Network(
        "elman", inputs=3, hidden=hidden, outputs=4, device=setting.device, engine=setting.best
    )
    y = torch.randint(4, (B,), device=setting.device)
    batch = co.Batch(torch.randn(T, B, 3, device=setting.device), y)
    for _ in range(capture.CALLS_BEFORE_RECORDING + 2):
        method(net, batch, "cross-entropy")
    kinds = [type(y).__name__ for y in method.captured.cache.entries.values()]
    if setting.dry or kinds == ["CapturedGradient"]:
        return None
    return f"{shape}: {kinds} instead of a recording: {method.captured.cache.refusal}"


def garbage_between(setting, shapes):
    """Old graphs become garbage in the middle of a recording, and the collector runs at every
    opportunity.
    """
    old = []
    capture_graph = captured.capture_graph

    @contextlib.contextmanager
    def with_garbage(*args):
        with capture_graph(*args):
            old.clear()
            _ = [[] for _ in range(100)]  # containers: with a low threshold the collector runs
            yield

    before, found = gc.get_threshold(), []
    gc.set_threshold(1, 1, 1)
    captured.capture_graph = with_garbage
    try:
        for shape in shapes:
            for method in (co.BPTT(), co.Penalised("log-ratio", 0.3)):
                found.append(record_one(setting, method, shape))
                method.itself = method  # a cycle: only the collector destroys its graphs
                old.append(method)
    finally:
        gc.set_threshold(*before)
        captured.capture_graph = capture_graph
    return [f for f in found if f]


def beside_a_thread(setting, shapes):
    """A second thread waits for the device and gives wrong targets; it is told so, and the first
    one records.
    """
    over, wrong = threading.Event(), []

    def other():
        net = co.Network(
            "elman", inputs=3, hidden=5, outputs=3, device=setting.device, engine="reference"
        )
        u = torch.randn(4, 2, 3, device=setting.device)
        y = torch.tensor([0, 99], device=setting.device)
        while not over.is_set():
            try:
                u.sum().item()
                said = raised(lambda: net(u).loss("cross-entropy", y))
            except Exception as error:
                said = f"{type(error).__name__} {error}"
            if "class numbers must lie in 0..2" not in said:
                wrong.append(said)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        found = [record_one(setting, co.BPTT(), shape) for shape in shapes]
    finally:
        over.set()
        thread.join()
    return [*(f for f in found if f), *(f"the other thread: {w}" for w in wrong[:3])]


# the command line


def train(setting):
    missing = [
        n
        for n in ("pydantic", "typer", "rich", "yaml", "safetensors", "jinja2")
        if importlib.util.find_spec(n) is None
    ]
    if missing:
        yield "train", 0, [], f"skipped: {', '.join(missing)} missing"
        return
    failures = []
    with tempfile.TemporaryDirectory() as place:
        for more in (
            ["--cell", "lstm"],
            ["--penalty", "log-ratio", "--ragged", "--length", "10,20"],
        ):
            out = Path(place, f"run{len(more)}")
            command = [
                sys.executable,
                "-m",
                "coadjoint",
                "train",
                "temporal-order",
                "--length",
                "20",
                *more,
            ]
            command += ["--steps", "20", "--device", setting.device, "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not list(out.iterdir()):
                failures.append(f"{' '.join(command[3:])}: {(done.stderr or done.stdout)[-500:]}")
    yield "train", 2, failures, ""


# steps of training


STEPS = 14  # gradients are recorded at the third


def run_of(setting, method, cell, folder=None, resume=False, stop=None, **options):
    """The rows and weights of a run; stop: the step after which it is interrupted."""
    torch.manual_seed(0)
    net = co.Network(cell, inputs=6, hidden=32, outputs=4, output="softmax", device=setting.device)

    class Stop(display.Silent):
        def step(self, step, row):
            if step == stop:
                os.kill(os.getpid(), signal.SIGINT)

    task = co.tasks.TemporalOrder((20, 20))
    few = {"batch": 8, "every": 100, "tests": 8, "confirm": 8, "probes": 2, "checkpoint": 100}
    with contextlib.suppress(co.Interrupted):
        result = co.train(
            net, task, gradient=METHODS[method](), steps=STEPS, clip=0.05, display=Stop(),
            folder=folder, resume=resume, **few, **options,
        )  # fmt: skip
        rows = [row for row in result.rows if row["kind"] == "train"]
        return rows, [p.detach().clone() for p in net.parameters()]
    return None


def waiting():
    """A context in which each step waits for its gradient, and for its batch."""
    stack = contextlib.ExitStack()
    at_once = mock.Mock(side_effect=lambda: contextlib.nullcontext([]))
    stack.enter_context(mock.patch.object(step, "leave_replays", at_once))
    stack.enter_context(mock.patch.object(ahead.MovedAhead, "prepare"))
    return stack


def has_run_folders():
    """Whether the libraries are here that a run in a folder needs."""
    return all(importlib.util.find_spec(name) for name in ("pydantic", "safetensors"))


def steps(setting):
    """A run has the same bits however its steps wait; once recorded, they wait for events alone."""
    failures, count = [], 0
    chosen = itertools.product(("elman", "lstm"), ("BPTT", "Penalised", "steered"))
    for cell, method in chosen:
        for optimiser in (co.optimisers.adam(1e-2), co.optimisers.sgd(1e-1)):
            where = f"{cell}, {method}, {optimiser.name}"
            rows, weights = run_of(setting, method, cell, optimiser=optimiser)
            with waiting():
                others = run_of(setting, method, cell, optimiser=optimiser)
            found = {"waiting": others}
            if has_run_folders():
                with tempfile.TemporaryDirectory() as place:
                    folder = Path(place, "run")
                    run_of(setting, method, cell, folder, stop=7, optimiser=optimiser)
                    found["resumed"] = run_of(
                        setting, method, cell, folder, True, optimiser=optimiser
                    )
            for what, run in found.items():
                if run is None or run[0] != rows or not all(map(torch.equal, run[1], weights)):
                    failures.append(f"{where}, {what}: not the same bits")
                count += 1
    for method in ("BPTT", "Penalised") if not setting.dry else ():
        net = co.Network("elman", inputs=6, hidden=32, outputs=4, output="softmax", device="cuda")
        plan = TrainingPlan(gradient=METHODS[method](), batch=8, every=99, checkpoint=99, clip=0.01)
        training = Training(net, co.tasks.TemporalOrder(20), plan)
        with training.folder.open(training):
            for _ in range(6):
                training.advance()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    training.advance()
            except RuntimeError as error:
                failures.append(f"{method}: a step waits: {error}")
            finally:
                torch.cuda.set_sync_debug_mode("default")
        count += 3
    yield "waits", count, failures, ""


# the modules of co.nn

OPTIONS = (
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
    {"bidirectional": True, "hidden_size": 130},
    {"zoneout": 0.3},
)


def module_of(kind, options, dtype, device):
    torch.manual_seed(0)
    made = getattr(co.nn, kind)(5, **{"hidden_size": 37, **options}, dtype=F64)
    return made.to(dtype).to(device).eval()


def packed_of(u, batch_first):
    return torch.nn.utils.rnn.pack_padded_sequence(
        u, [3, 9, 7, 9], batch_first, enforce_sorted=False
    )


def answers(module, u, packed):
    """Outputs, first and second derivatives, and a penalised gradient."""
    u, mine = u.detach().requires_grad_(), list(module.parameters())
    fed = packed_of(u, module.batch_first) if packed else u
    first, last = module(fed)
    out = first.data if packed else first
    last = last if isinstance(last, tuple) else (last,)
    value = out.square().sum() + sum(y.sin().sum() for y in last)
    by = torch.autograd.grad(value, [u, *mine], create_graph=True)
    again = torch.autograd.grad(by[0].square().sum() + by[2].square().sum(), [u, *mine])
    with co.record(module) as tape:
        last = module(packed_of(u, module.batch_first) if packed else u)[1]
        loss = (last[0] if isinstance(last, tuple) else last).square().sum((0, 2))
    penalised = torch.autograd.grad(
        (loss + 0.1 * tape.penalty("log-ratio", loss)).mean(), [u, *mine]
    )
    return [y.detach().cpu().double() for y in (out, *by, *again, *penalised)]


def replayed(kind, device):
    """Training steps by recordings and without them: equal bits, whatever the order of calls."""
    one = module_of(kind, {"num_layers": 2, "bidirectional": True}, F32, device)
    other = copy.deepcopy(one)
    other.recordings.records = False
    found = []
    for i in range(6):
        u = (
            torch.randn(20, 8, 5, generator=torch.Generator().manual_seed(i))
            .to(device)
            .requires_grad_()
        )
        both = []
        for module in (one, other):
            out = module(u)[0]
            value = out.square().sum() if i % 2 else out[-1].sin().sum()
            twice = torch.autograd.grad(value, u, retain_graph=True)
            if i == 5:  # another call before the backward
                value = value + module(2 * u)[0].sum()
            gradient = torch.autograd.grad(value, [u, *module.parameters()])
            with torch.no_grad():
                both.append([out.clone(), *twice, *gradient, module(u)[0]])
                for p, g in zip(module.parameters(), gradient[1:], strict=True):
                    p -= 0.01 * g
        if not all(torch.equal(y, z) for y, z in zip(*both, strict=True)):
            found.append(f"{kind}: call {i} differs from one that was not recorded")
    kinds = [type(k).__name__ for k in one.recordings.cache.entries.values()]
    if device == "cuda" and kinds.count("Stage") != 2:  # with gradients, and without
        found.append(f"{kind}: {kinds} instead of recordings: {one.recordings.cache.refusal}")
    return found


def compiled(kind, device):
    module = module_of(kind, {"num_layers": 2, "bidirectional": True}, F32, device)
    u = torch.randn(9, 4, 5, device=device, requires_grad=True)

    def take(f):
        return torch.autograd.grad(f(u)[0].square().sum(), [u, *module.parameters()])

    pairs = zip(
        take(module), take(torch.compile(module, fullgraph=True, backend="aot_eager")), strict=True
    )
    return (
        [f"{kind}: compiled gradients differ"]
        if any((y - z).norm() > 1e-5 * y.norm() for y, z in pairs)
        else []
    )


def modules(setting):
    failures, count = [], 0
    for kind in ("RNN", "LSTM", "GRU"):
        for options in (
            *OPTIONS,
            *([{"proj_size": 11}, {"peephole": True}] if kind == "LSTM" else []),
        ):
            shape = (4, 9, 5) if options.get("batch_first") else (9, 4, 5)
            u = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=F64)
            for packed in (False, True):
                truth = answers(module_of(kind, options, F64, "cpu"), u, packed)
                for dtype in (F32, F64):
                    found = answers(
                        module_of(kind, options, dtype, setting.device),
                        u.to(dtype).to(setting.device),
                        packed,
                    )
                    off = worst(found, truth)
                    count += 1
                    if not off < BARS[dtype]:
                        failures.append(f"{kind} {options} packed={packed} {dtype}: {off:.1e}")
    yield "answers", count, failures, ""
    yield (
        "replayed",
        3,
        [line for kind in ("RNN", "LSTM", "GRU") for line in replayed(kind, setting.device)],
        "",
    )
    yield (
        "compiled",
        3,
        [line for kind in ("RNN", "LSTM", "GRU") for line in compiled(kind, setting.device)],
        "",
    )


# calls of one step


STEPPED = (
    *(("RNN", {}), ("LSTM", {}), ("GRU", {"bias": False}), ("RNN", {"nonlinearity": "relu"})),
    *((kind, {"num_layers": 2, "bidirectional": True}) for kind in ("RNN", "LSTM", "GRU")),
    *(("RNNCell", {}), ("LSTMCell", {}), ("LSTMCell", {"bias": False}), ("GRUCell", {})),
)


def stepped(kind, options, dtype, device, edited):
    """Outputs of three calls of one step, first and second derivatives by inputs and weights.

    edited: the last outputs are changed in place before the backward.
    """
    torch.manual_seed(0)
    module = getattr(co.nn, kind)(5, 37, **options, dtype=F64).to(dtype).to(device)
    is_cell = kind.endswith("Cell")
    u = torch.randn(3, *(() if is_cell else (1,)), 33, 5, dtype=F64).to(dtype).to(device)
    u.requires_grad_()
    state, total = None, 0.0
    for one in u:
        out = module(one, state)
        state = out if is_cell else out[1]
        outputs = list(out) if isinstance(out, tuple) else [out]
        if isinstance(outputs[-1], tuple):
            outputs[-1:] = outputs[-1]
        total = total + sum((i + 1) * (y**3).sum() for i, y in enumerate(outputs))
    found = [y.detach().clone() for y in outputs]
    if edited:
        with torch.no_grad():
            for y in outputs:
                y.fill_(7)
        total = sum((i + 1) * (y * 2).sum() for i, y in enumerate(outputs))
    mine = [u, *module.parameters()]
    by = torch.autograd.grad(total, mine, create_graph=not edited)
    if not edited:
        found += torch.autograd.grad(sum(g.square().sum() for g in by), mine)
    return [y.detach().cpu().double() for y in (*found, *by)]


def one_step(setting):
    """Calls of one step against the CPU in float64, by torch's own cells."""
    failures, count = [], 0
    sweep = co.nn.layers.run_sweep
    for (kind, options), edited in itertools.product(STEPPED, (False, True)):
        truth = stepped(kind, options, F64, "cpu", edited)
        for dtype in (F32, F64):
            count += 1
            where = f"{kind} {options}, {dtype}, edited={edited}"
            try:
                for module in (co.nn.layers, co.nn.cells):
                    module.run_sweep = None  # not called
                off = worst(stepped(kind, options, dtype, setting.device, edited), truth)
                if not off < BARS[dtype]:
                    failures.append(f"{where}: {off:.1e}")
            except Exception as error:
                failures.append(f"{where}: {type(error).__name__} {error}")
            finally:
                for module in (co.nn.layers, co.nn.cells):
                    module.run_sweep = sweep
    yield "steps", count, failures, ""


# networks of several layers, decoders, curvature


LAYERED = {
    "stack": lambda make: co.Stack(
        ["lstm", "gru", "elman"], inputs=3, hidden=7, outputs=2, residual=True, deep=(5,), **make
    ),
    "both directions": lambda make: co.Stack(
        ["cornn", "gru-before", "lru"],
        inputs=3,
        hidden=7,
        outputs=2,
        bidirectional=True,
        readout="every",
        **make,
    ),
    "encoder-decoder": lambda make: co.EncoderDecoder(
        ["gru", "lstm"], inputs=3, hidden=7, outputs=4, bidirectional=True, residual=True, **make
    ),
}


def shapes(setting):
    """Penalised gradients of each shape, and products of curvature, against the CPU in float64."""
    wrong, count = [], 0
    for name, shape in LAYERED.items():
        torch.manual_seed(0)
        plain = shape({"dtype": F64})
        u, lengths = torch.randn(12, 5, 3, dtype=F64), torch.tensor([12, 7, 9, 12, 3])
        y = {
            "stack": torch.randn(5, 2, dtype=F64),
            "both directions": torch.randn(12, 5, 2, dtype=F64),
            "encoder-decoder": torch.tensor([[0, 1, 2, 0, 1], [3, 2, 1, 3, 0], [-1, 3, 3, -1, 3]]),
        }[name]
        loss = "cross-entropy" if name == "encoder-decoder" else "squared"
        truth = co.Penalised("log-ratio", 0.3)(plain, co.Batch(u, y, lengths), loss)
        for dtype in (F64, F32):
            net = copy.deepcopy(plain).to(setting.device, dtype)
            b = co.Batch(u, y, lengths).to(dtype, setting.device)
            found = co.Penalised("log-ratio", 0.3)(net, b, loss)
            size = max(float(g.abs().max()) for g in truth.gradient.values())
            largest = max(
                float((found.gradient[n].cpu().double() - g).abs().max())
                for n, g in truth.gradient.items()
            )
            count += 1
            if not largest < (1e-10 if dtype == F64 else 1e-4) * size:
                wrong.append(f"{name}, {dtype}: {largest / size:.1e}")
            if name == "encoder-decoder":
                tokens = net(b.u, b.lengths).decode(beam=3).tokens.cpu()
                count += 1
                if dtype == F64 and not torch.equal(
                    tokens, plain(u, lengths).decode(beam=3).tokens
                ):
                    wrong.append("beams differ")
    for cell in ("elman", "lstm", "lru"):
        torch.manual_seed(0)
        plain = co.Network(cell, inputs=3, hidden=7, outputs=2, dtype=F64)
        b = co.Batch(torch.randn(12, 5, 3, dtype=F64), torch.randn(5, 2, dtype=F64))
        there = co.curvature.Curvature(
            copy.deepcopy(plain).to(setting.device), b.to(F64, setting.device), "squared"
        )
        here = co.curvature.Curvature(plain, b, "squared")
        v = torch.randn(sum(p.numel() for p in plain.parameters()), dtype=F64)
        off = (
            (there.product(v.to(setting.device), 1.0, 0.5).cpu() - here.product(v, 1.0, 0.5))
            .abs()
            .max()
        )
        count += 1
        if not off < 1e-10:
            wrong.append(f"curvature of {cell}: {off:.1e}")
    yield "shapes", count, wrong, ""


GROUPS = {
    f.__name__: f
    for f in (
        sweeps,
        gradients,
        others,
        large,
        determinism,
        recorded,
        own_loops,
        gradient_penalties,
        captures,
        modules,
        one_step,
        shapes,
        train,
        steps,
    )
}


def main():
    parser = argparse.ArgumentParser(description="The engines on a GPU against the definition.")
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, to try the functions of this file"
    )
    given = parser.parse_args()
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(f"unknown group {', '.join(unknown)}; known: {', '.join(GROUPS)}")
    if not given.dry and not torch.cuda.is_available():
        print(
            "skipped: torch finds no CUDA device here (torch.cuda.is_available() is False). Try "
            "--dry on a CPU."
        )
        return 0
    setting, failed = Setting(given.dry), False
    torch.backends.cuda.matmul.allow_tf32 = False
    print(
        f"engines {', '.join(setting.engines)} on "
        f"{'the CPU' if given.dry else torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    for name in given.groups or GROUPS:
        begin = time.perf_counter()
        try:
            for what, count, failures, remark in GROUPS[name](setting):
                took, begin = time.perf_counter() - begin, time.perf_counter()
                verdict = f"{len(failures)} FAILED" if failures else "ok"
                print(
                    f"{name:12} {what:10} {count:5} checks  {verdict}  {remark}  {took:.1f} s",
                    flush=True,
                )
                print(
                    *(f"    {f}" for f in failures[:8]),
                    sep="\n",
                    end="\n" if failures else "",
                    flush=True,
                )
                failed |= bool(failures)
        except Exception as error:  # the other groups still run
            print(f"{name:12} {type(error).__name__}: {error}", flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
