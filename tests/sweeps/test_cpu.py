"""The compiled loops equal the definition: every array, at odd sizes, unwritten outputs being NaN.

Also how they are compiled: the cache folder, the compiler, and machines that have none.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import cases
import coadjoint as co
from coadjoint.cells.formula import PRIMITIVES, Node, symbol
from coadjoint.sweeps import pointwise, slopes
from coadjoint.sweeps.engines import reference
from coadjoint.sweeps.engines.c import compiler
from coadjoint.sweeps.engines.c import engine as c_engine
from coadjoint.sweeps.engines.c import threads as c_threads
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.rows import Link, Rows, pow2
from compare import close

pytestmark = pytest.mark.skipif(
    c_engine.refusal("cpu") is not None, reason=f"engine 'cpu' {c_engine.refusal('cpu')}"
)


@co.cell(
    slots="h m", gates="a b", parameters={"k": 0.5, "s": 0.2}, reads=lambda x: co.tanh(x.h) * x.m
)
def mixed(z, v, x, p):
    """A user's cell: functions of parameters alone, a gate used apart, roots and quotients."""
    m = co.exp(-p.k) * x.m + co.sigmoid(p.s) * co.tanh(z.a + v.a)
    return co.sin(m) * co.sqrt(1 + x.h * x.h) / (2 + v.b * v.b + co.cos(z.b)), m


CELLS = {
    "elman": co.cells.elman(), "relu": co.cells.elman("relu"),
    "softplus": co.cells.elman("softplus"), "leaky": co.cells.leaky(),
    "rate": co.cells.rate(), "lstm": co.cells.lstm, "gru": co.cells.gru, "odd": cases.odd,
    "diagonal": cases.diagonal,
    "pair": cases.pair, "mixed": mixed,
}  # fmt: skip
SIZES = {  # (lengths by step, d)
    "one": ([1], 1),
    "one step": ([3], 5),
    "small": ([2] * 4, 3),
    "ragged": ([9, 9, 7, 4, 4, 1], 31),
    "33": ([5] * 3, 33),
    "17 samples": ([17] * 3, 8),
    "127": ([3, 2], 127),
    "500": ([2, 1], 500),
}
BARS = {torch.float32: 2e-5, torch.float64: 1e-13}


class Problem:
    """One cell at one size, with values for every array a sweep may be given."""

    def __init__(self, name, sizes, d, dtype=torch.float64):
        cell, rows = CELLS[name], Rows(sizes)
        g = torch.Generator().manual_seed(7)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        G, S, B, N = len(cell.gates), len(cell.slots), rows.B, rows.N
        self.cell, self.rows, self.dtype = cell, rows, dtype
        self.W = randn(G * d, len(cell.read) * d) * 0.8 / d**0.5 if cell.read else None
        self.base, self.v = randn(N, G * d), randn(N, len(cell.side) * d) if cell.side else None
        self.x0, self.p = (
            randn(B, S * d),
            (0.3 + 0.4 * randn(len(cell.p) * d).abs()) if cell.p else None,
        )
        self.s, self.s_last, self.sa = randn(B + N, S * d), randn(B, S * d), randn(N, G * d)
        self.link = Link(
            rows, torch.tensor([1.0, 0.5, 0.0, 4.0], dtype=dtype)[torch.arange(N) % 4][:, None]
        )

    def plan(self, engine):
        return SweepPlan(self.cell, self.rows, engine)

    def tape(self, engine):
        x, a, q = engine.forward(self.plan(engine), self.base, self.v, self.W, self.x0, self.p)
        return Saved(a, self.v, x, self.p, q)

    def adjoint(
        self, engine, tape, s=None, s_last=None, sa=None, link=None, scaled=False, keep=True, **more
    ):
        return engine.adjoint(
            self.plan(engine), tape, self.W, s, s_last, sa, link, scaled, keep, **more
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.sampled(4)
def test_compiled_loops_equal_the_definition(name, size, dtype):
    problem, bar = Problem(name, *SIZES[size], dtype), BARS[dtype]
    ours, true = problem.tape(c_engine), problem.tape(reference)
    close(ours.x, true.x, bar, "x", rows=True)
    if problem.cell.needs_a:
        close(ours.a, true.a, bar, "a", rows=True)
    for has_s, has_last, has_a, has_link, scaled in itertools.product((0, 1), repeat=5):
        if not has_s and not has_last:
            continue
        given = {
            "s": problem.s if has_s else None,
            "s_last": problem.s_last if has_last else None,
            "sa": problem.sa if has_a else None,
            "link": problem.link if has_link else None,
            "scaled": bool(scaled),
        }
        lam, delta, k = problem.adjoint(reference, true, **given)
        found, into, exponents = problem.adjoint(c_engine, ours, **given)
        what = f"{[n for n, y in given.items() if y is not None and y is not False]}"
        if scaled:
            assert ((exponents - k).abs() <= 1).all(), what  # a last digit may carry
            shift = pow2((exponents - k)[:, None], dtype)
            found, into = found * shift, into * shift[problem.rows.B :]
        close(found, lam, bar, f"lam {what}", rows=True)
        close(into, delta, bar, f"delta {what}", rows=True)
        if not scaled:
            short, again, _ = problem.adjoint(c_engine, ours, **given, keep=False)
            assert torch.equal(short[: problem.rows.B], found[: problem.rows.B]), what
            assert torch.equal(again, into), what
    for g, ga, link in itertools.product(
        (None, problem.s), (None, problem.sa), (None, problem.link)
    ):
        mu, nu = reference.tangent(problem.plan(reference), true, problem.W, g, ga, link)
        found, into = c_engine.tangent(problem.plan(c_engine), ours, problem.W, g, ga, link)
        close(found, mu, bar, f"mu {g is None} {ga is None} {link is None}", rows=True)
        close(into, nu, bar, f"nu {g is None} {ga is None} {link is None}", rows=True)


@pytest.mark.parametrize("name", ["lstm", "pair"])
def test_threads_and_batches_change_no_number_of_a_sample(name, monkeypatch):
    """A sample's numbers do not depend on the threads, nor on its place in a batch, nor on the
    batch.
    """
    sizes, d = [21] * 2 + [13] * 3 + [5], 19
    whole, B = Problem(name, sizes, d, torch.float32), 21

    def swept(problem):
        tape = problem.tape(c_engine)
        lam, delta, k = problem.adjoint(
            c_engine, tape, problem.s, problem.s_last, problem.sa, problem.link, True
        )
        mu, nu = c_engine.tangent(
            problem.plan(c_engine), tape, problem.W, problem.s, problem.sa, problem.link
        )
        return [tape.x, lam, k[:, None], mu, tape.q, delta, nu]

    expected = swept(whole)
    monkeypatch.setattr(c_threads, "WORK_PER_THREAD", 1)
    monkeypatch.setattr(c_threads, "WORK_PER_THREAD_BY_STEP", 1)
    for threads in (2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        for found, true in zip(swept(whole), expected, strict=True):
            assert torch.equal(found, true)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    states, steps = whole.rows.index, whole.rows
    for sample in (0, 7, 20):
        T = int(steps.lengths[sample])
        mine = torch.from_numpy(states.sample == sample)
        every = torch.cat([torch.arange(B) == sample, mine])
        one = Problem(name, [1] * T, d, torch.float32)
        one.W, one.p, one.x0, one.s_last = (
            whole.W,
            whole.p,
            whole.x0[[sample]],
            whole.s_last[[sample]],
        )
        one.base, one.sa, one.s = whole.base[mine], whole.sa[mine], whole.s[every]
        one.v = None if whole.v is None else whole.v[mine]
        one.link = Link(one.rows, whole.link.factor[mine])
        for i, (found, true) in enumerate(zip(swept(one), expected, strict=True)):
            if true is not None:
                assert torch.equal(found, true[every if i < 4 else mine]), (
                    f"array {i} of sample {sample} of {steps.B}"
                )


@pytest.mark.parametrize("name", ["elman", "lstm"])
def test_a_sweep_continues_one_begun_elsewhere(name):
    """A scaled sweep over the last steps, handed on by s_last 2^k_last, continues as one sweep
    does.
    """
    problem = Problem(name, [4] * 9, 5, torch.float32)
    tape = problem.tape(c_engine)
    W = problem.W * 0.05  # far below one: exponents matter
    lam, _, k = c_engine.adjoint(
        problem.plan(c_engine), tape, W, None, problem.s_last, None, None, True, True
    )
    cut, B = 5, 4
    n = B * cut
    late = (
        SweepPlan(problem.cell, Rows([4] * 4), c_engine),
        Saved(tape.a[n:], None, tape.x[n:], None, None if tape.q is None else tape.q[n:]),
    )
    after, _, k_after = c_engine.adjoint(*late, W, None, problem.s_last, None, None, True, True)
    early = (
        SweepPlan(problem.cell, Rows([4] * cut), c_engine),
        Saved(tape.a[:n], None, tape.x[: n + B], None, None if tape.q is None else tape.q[:n]),
    )
    before, _, k_before = c_engine.adjoint(
        *early, W, None, after[:B], None, None, True, True, k_last=k_after[:B]
    )
    assert torch.equal(after, lam[n:])
    assert torch.equal(k_after, k[n:])
    assert torch.equal(before[:n], lam[:n])
    assert torch.equal(k_before[:n], k[:n])
    assert int(k.min()) < -5


def points_of(function, a):
    """A function of the formulas, by the compiled loop."""
    x = symbol("x.0")
    op = pointwise.Pointwise((("x", (x,)),), (("y", (function(x),)),), (), frozenset())
    return c_engine.pointwise(op, None, (), (a,))[0]


EXACT = {
    "tanh_slope": lambda q: (1 - q) * (1 + q),
    "sigmoid_slope": lambda q: q * (1 - q),
}  # where torch loses digits
ULPS = {"sigmoid": 4, "softplus": 4, "tanh": 4, "exp": 3, "log": 3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
@pytest.mark.sampled(2)
def test_compiled_functions_are_accurate_to_a_few_units(name, dtype):
    """Each function of the formulas within a few units in the last place, and where numbers end as
    torch does.
    """
    spread = torch.logspace(-9, 3, 4001, dtype=torch.float64)
    a = torch.cat(
        [-spread, spread, torch.linspace(-90, 90, 9001, dtype=torch.float64), torch.zeros(1)]
    ).to(dtype)
    run = EXACT.get(name, PRIMITIVES[name].run)
    expected = run(a.double()).to(dtype) if dtype == torch.float32 else run(a)
    found = points_of(lambda x: Node(name, (x,)), a[:, None])[:, 0]
    assert torch.equal(found.isnan(), expected.isnan())
    normal = expected.isfinite() & (expected.abs() > 2 * torch.finfo(dtype).tiny)
    apart = ((found.double() - expected.double()).abs() / expected.double().abs())[
        normal & (expected != 0)
    ]
    assert apart.max() <= ULPS.get(name, 2) * torch.finfo(dtype).eps
    assert torch.equal(
        found[~expected.isfinite() & ~expected.isnan()],
        expected[~expected.isfinite() & ~expected.isnan()],
    )
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=dtype)
    assert torch.equal(
        points_of(lambda x: Node(name, (x,)), ends[:, None])[:, 0].nan_to_num(nan=77.0),
        run(ends).nan_to_num(nan=77.0),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.sampled(2)
def test_compiled_slopes_and_bends_equal_torchs(name, dtype):
    """Slopes and bends by the compiled loop and by torch's operations."""
    problem = Problem(name, [5, 5, 2], 21, dtype)
    tape, rows, cell = problem.tape(c_engine), problem.rows, problem.cell
    op = slopes.step_map(cell)
    wrt = tuple(n for n, y in zip("avxp", (1, cell.v, 1, cell.p), strict=True) if y)
    lam, m, nu = problem.s[rows.B :], problem.s[: rows.N], problem.sa
    hand, inputs = (tape.x[rows.B :], tape.q), (tape.a, tape.v, rows.prev(tape.x), tape.p)
    for one, more in (
        (op.pulled(("x",), wrt), (lam,)),
        (op.pushed(("a", "x")).pulled(("x",), wrt), (nu, m, lam)),
    ):
        if one.nonzero_outputs:
            found, true = (
                run(one, rows, hand, (*inputs, *more))
                for run in (c_engine.pointwise, pointwise.Pointwise.run_by_torch)
            )
            for y, z, group in zip(found, true, one.nonzero_outputs, strict=True):
                close(y, z, 10 * BARS[dtype], f"by {group}", rows=True)


def test_large_arrays_are_run_by_the_compiled_loop(monkeypatch):
    """Large arrays are run by the compiled loop, all segments of a large one too, small ones by
    torch.
    """
    assert pointwise.compiled_runner("cpu", pointwise.COMPILED_FROM) is c_engine.pointwise
    assert pointwise.compiled_runner("cpu", pointwise.COMPILED_FROM - 1) is None
    assert pointwise.compiled_runner("meta", pointwise.COMPILED_FROM) is None
    rows = Rows([4] * 1000)
    assert rows.part(0, 512).rows_in_full == rows.N
    monkeypatch.setattr(c_engine, "refusal", lambda device: "is missing.")
    assert pointwise.compiled_runner("cpu", pointwise.COMPILED_FROM) is None


def test_denormals_are_left_alone():
    """Flushed inside, the caller's setting restored."""
    problem = Problem("elman", [2] * 4, 3)
    torch.set_flush_denormal(False)
    tape = problem.tape(c_engine)
    tiny = torch.full((2, 3), 1e-310, dtype=torch.float64)
    lam, _, _ = problem.adjoint(c_engine, tape, s_last=tiny * 1.0)
    assert (tiny * 1.0 != 0).all()
    assert (lam[: problem.rows.B] == 0).all()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A compiler and a cache of the test's own."""
    monkeypatch.setenv("COADJOINT_CACHE", str(tmp_path / "cache"))
    caches = (compiler.compiler_setup, compiler.cache_folder)
    for c in caches:
        c.cache_clear()
    yield tmp_path / "cache"
    for c in caches:
        c.cache_clear()


SOURCE = "int number(void) { return 5; }\n"


def test_the_cache_is_private_and_never_loads_what_is_damaged(fresh, monkeypatch):
    """Compiled once; private; what is damaged or not ours is never loaded."""
    assert compiler.library(SOURCE).number() == 5
    assert fresh.stat().st_mode & 0o777 == 0o700
    [path] = [p for p in fresh.glob("*.so") if b"number" in p.read_bytes()]
    calls = []
    run = compiler._run
    monkeypatch.setattr(compiler, "_run", lambda command: calls.append(command) or run(command))
    assert compiler.library(SOURCE).number() == 5
    assert not calls
    damaged = path.read_bytes()[:-100]
    path.unlink()  # the file itself is mapped
    path.write_bytes(damaged)
    path.chmod(0o700)
    assert compiler.library(SOURCE).number() == 5
    assert len(calls) == 1
    path.chmod(0o777)
    assert compiler.library(SOURCE).number() == 5
    assert len(calls) == 2
    compiler.library(SOURCE.replace("5", "6"))
    assert len(calls) == 3
    assert not [p for p in fresh.iterdir() if p.suffix != ".so"]  # nothing half made is left
    monkeypatch.setattr(compiler, "processor", lambda: "another")
    compiler.library(SOURCE)
    assert len(calls) == 4


def test_a_folder_of_another_is_not_used(fresh):
    fresh.mkdir(mode=0o777)
    fresh.chmod(0o777)
    assert compiler.cache_folder() != fresh
    assert compiler.library(SOURCE).number() == 5
    assert not list(fresh.iterdir())


@pytest.mark.parametrize(
    ("mode", "accepted"), [(0o755, True), (0o1777, True), (0o777, False), (0o757, False)]
)
@pytest.mark.parametrize("above", [1, 2])
def test_folders_above_the_cache_are_judged(fresh, monkeypatch, mode, accepted, above):
    """Who can rename a folder above it can put another cache in its place."""
    cache = fresh / "a" / "b"
    cache.mkdir(parents=True, mode=0o700)
    cache.parents[above - 1].chmod(mode)
    monkeypatch.setenv("COADJOINT_CACHE", str(cache))
    assert (compiler.cache_folder() == cache) == accepted


@pytest.mark.parametrize(("alone", "accepted"), [(True, True), (False, False)])
def test_folders_above_the_cache_that_a_group_may_write_are_judged(
    fresh, monkeypatch, alone, accepted
):
    fresh.mkdir(mode=0o700)
    fresh.chmod(0o775)
    monkeypatch.setenv("COADJOINT_CACHE", str(fresh / "cache"))
    monkeypatch.setattr(compiler, "is_private_group", lambda gid: alone)
    assert (compiler.cache_folder() == fresh / "cache") == accepted


def test_a_cache_behind_a_link_is_judged_where_it_is(fresh, monkeypatch):
    (fresh / "open").mkdir(parents=True)
    (fresh / "open" / "cache").mkdir(mode=0o700)
    (fresh / "open").chmod(0o777)
    (fresh / "link").symlink_to(fresh / "open" / "cache")
    monkeypatch.setenv("COADJOINT_CACHE", str(fresh / "link"))
    assert compiler.cache_folder() != fresh / "open" / "cache"
    assert not compiler.cache_folder().is_relative_to(fresh)


@pytest.mark.skipif(os.name != "posix", reason="users and groups")
def test_folders_above_the_cache_of_another_user_are_refused(tmp_path):
    class Other:
        st_mode, st_uid, st_gid = 0o40755, os.getuid() + 1, 0

    class Place:
        def lstat(self):
            return Other

    assert not compiler.is_safe_parent(Place())
    Other.st_uid = 0
    assert compiler.is_safe_parent(Place())


def test_folders_made_for_the_cache_are_private(fresh, monkeypatch):
    monkeypatch.setenv("COADJOINT_CACHE", str(fresh / "a" / "b"))
    before = os.umask(0)
    try:
        assert compiler.cache_folder() == fresh / "a" / "b"
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (fresh, fresh / "a", fresh / "a" / "b")] == [
        0o700
    ] * 3


KILLED = """
import os, signal
from coadjoint.sweeps.engines.c import compiler
def build(out):
    out.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
compiler.cached_file("recipe", ".so", build)
"""


@pytest.mark.slow
def test_leftovers_of_a_killed_compiler_are_removed_by_the_next(fresh):
    done = subprocess.run([sys.executable, "-c", KILLED], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    [left] = fresh.iterdir()
    assert left.is_dir()
    old, young, other = fresh / "tmpabcd_123", fresh / "tmpabcd_124", fresh / "notes"
    for path in (old, young, other):
        path.mkdir()
        (path / "cell.c").write_text("")
    os.utime(old, (1e9, 1e9))
    assert compiler.library(SOURCE).number() == 5
    assert not left.exists()
    assert not old.exists()
    assert young.exists()
    assert other.exists()


def test_files_that_others_are_making_are_left_alone(fresh):
    """Two at once: the second removes nothing of the first."""
    met = []

    def slowly(out):
        out.write_text("first")
        compiler.cached_file("second", ".so", lambda inner: inner.write_text("second"))
        met.append(out.exists())

    assert compiler.cached_file("first", ".so", slowly).read_text() == "first"
    assert met == [True]
    assert {p.read_text() for p in fresh.iterdir()} == {"first", "second"}


@pytest.mark.parametrize(
    ("CC", "said"),
    [
        (
            "no-such-compiler",
            "needs a C compiler, but none was found (tried no-such-compiler). Install",
        ),
        ("'gcc", "needs a C compiler, but none was found (tried 'gcc)"),
        (
            "/bin/false",
            "needs a C compiler, but /bin/false does not work: it ended with 1. Install",
        ),
        ("{cc} -include missing.h", "missing.h"),
    ],
)
def test_without_a_compiler_the_reason_is_one_line(CC, said, fresh, monkeypatch):
    """The reason is one line, and 'auto' takes the eager engine."""
    monkeypatch.setenv("CC", CC.format(cc=shutil.which("cc") or shutil.which("gcc")))
    found = c_engine.refusal("cpu")
    assert said in found
    assert "\n" not in found
    assert found.endswith("use engine='eager'.")


@pytest.mark.slow
def test_without_a_compiler_auto_runs_the_eager_engine(tmp_path):
    """In a process of its own: the eager engine runs and one line says so."""
    code = (
        "import coadjoint as co, torch\n"
        "net = co.Network('elman', inputs=1, hidden=2, outputs=1)\n"
        "for _ in range(2): net(torch.zeros(3, 1, 1))\n"
        "print(net.engine)\n"
    )
    env = os.environ | {"CC": "/bin/false", "COADJOINT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "eager\n"
    assert done.stderr.count("using engine 'eager': engine 'cpu' needs a C compiler") == 1
    assert len(done.stderr.splitlines()) == 1
