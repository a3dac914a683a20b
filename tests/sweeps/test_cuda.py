"""The CUDA loops equal the definition, and each network is laid out on the chip as intended.

The CUDA source runs on threads of the CPU (tests/support/emulated.py): every cell, every layout,
odd sizes, unwritten outputs being NaN.
"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings

import pytest
import torch

import coadjoint as co
import emulated
from coadjoint.cells.formula import PRIMITIVES, Node, symbol
from coadjoint.errors import Unsupported
from coadjoint.gradients import captured
from coadjoint.sweeps import checks, pointwise, slopes
from coadjoint.sweeps.engines import resolve
from coadjoint.sweeps.engines.cuda import capture, driver, geometry, source
from coadjoint.sweeps.engines.cuda import engine as cuda_engine
from coadjoint.sweeps.engines.cuda.geometry import Geometry
from coadjoint.sweeps.engines.eager import fused
from coadjoint.sweeps.plan import settle_checks
from compare import close
from emulated import Mode
from problems import ADJOINT, CELLS, NEWER, ONE, SCALED, TANGENT, Problem
from sampling import one_in

pytestmark = pytest.mark.slow

F32, F64 = torch.float32, torch.float64
compiles = pytest.mark.skipif(
    emulated.COMPILER is None, reason="no C++ compiler (c++, g++ or $CXX) was found"
)
SIZES = {  # (samples of each step, d)
    "one": ([1], 1),
    "one step": ([3], 7),
    "three": ([4] * 3, 3),
    "small": ([3, 2, 1], 13),
    "ragged": ([6, 5, 5, 2, 1], 13),
    "twelve": ([7, 7, 7, 3], 12),  # four float32 at a time
    "31": ([5, 4, 2], 31),
    "33": ([3] * 3, 33),
    "groups": ([19, 18, 9], 20),
    "32": ([5] * 3, 32),
    "16": ([19, 18, 18, 9], 16),
}
SOME = {"adjoint": ("s sa", "s_last link", "s s_last k_last scaled"), "tangent": ("g ga link",)}
EVERY = {"adjoint": (*ADJOINT, *SCALED), "tangent": TANGENT}


def tight(cell, d, size, parts=3, **more):
    """A chip whose threads hold no more of W than a part needs."""
    G, NR, U = len(cell.gates), len(cell.read), -(-d // parts)

    def fits(n):
        return geometry.cheapest_tile(NR * d, G * U, 4, 1, n) and geometry.cheapest_tile(
            G * d, NR * U, 4, 1, n
        )

    return Mode(
        weights=next(size * n for n in itertools.count(4, 4) if fits(n)),
        shared=0,
        processors=parts,
        **more,
    )


MODES = {  # of (cell, d, size of a number): a chip, and what the geometry must then be
    "on chip": (lambda *_: Mode(), lambda g: g.parts == g.blocks == 1),
    "two warps": (lambda *_: Mode(warps=2, rows=2), lambda g: g.parts == g.blocks == 1),
    "blocks": (lambda *_: Mode(rows=1, processors=1), lambda g: g.parts == 1 < g.blocks),
    "shared": (lambda c, d, size: Mode(weights=32 * size), lambda g: g.parts == g.blocks == 1),
    "parts": (lambda *given: tight(*given, rows=8), lambda g: g.blocks == 1 < g.parts),
    "parts, blocks": (lambda *given: tight(*given, rows=1), lambda g: g.parts > 1 and g.blocks > 1),
    "too large": (lambda *_: Mode(weights=16, shared=0, processors=1), lambda g: g is None),
    "too busy": (lambda *given: tight(*given, traffic=0), lambda g: g is None),
    "tensor": (lambda *_: Mode(layout=Geometry(33, 1, 1, 8, 1, 4, 288)), lambda g: g.tensor),
    "tensor, shared": (
        lambda *_: Mode(layout=Geometry(11, 3, 1, 8, 1, 1, 96)),  # units that fill no tile
        lambda g: g.tensor and g.parts == 3,
    ),
    "tensor, blocks": (
        lambda *_: Mode(layout=Geometry(10, 2, 2, 8, 2, 4, 256, columns=2)),
        lambda g: g.tensor and g.blocks == 2,
    ),
    "tensor, 16": (
        lambda *_: Mode(layout=Geometry(7, 3, 2, 16, 1, 2, 256)),
        lambda g: g.tensor and g.rows == 16,
    ),
    "cluster": (
        lambda *_: Mode(layout=Geometry(8, 4, 1, 8, 1, 1, 288, cluster=2)),
        lambda g: g.cluster == 2,
    ),
    "cluster, blocks": (  # of the last block's units, some do not exist
        lambda *_: Mode(layout=Geometry(5, 4, 2, 8, 2, 2, 256, cluster=4, columns=2)),
        lambda g: g.cluster == 4 and g.blocks == 2,
    ),
    "clusters, one by one": (  # values are not read four at a time
        lambda *_: Mode(layout=Geometry(6, 4, 1, 24, 1, 2, 128, cluster=2)),
        lambda g: g.cluster == 2 and g.rows == 24,
    ),
}
CASES = [  # (cell, mode, size, dtype): every cell, mode, size and type; the rest is in MORE
    ("elman", "on chip", "one", F32),
    ("lstm", "two warps", "33", F64), ("lstm", "shared", "31", F32),
    ("gru", "parts, blocks", "ragged", F32),
    ("leaky", "on chip", "one step", F64),
    ("rate", "blocks", "twelve", F32),
    ("odd", "two warps", "ragged", F32),
    ("pair", "parts", "twelve", F32),
    ("diagonal", "on chip", "three", F64),
    ("mixed", "parts, blocks", "ragged", F64),
    ("lstm-1997-truncated", "parts", "small", F32),
    *((name, "too large", "31", F64) for name in CELLS if name != "diagonal"),
    ("lstm", "too busy", "33", F32),
    ("lstm", "tensor", "33", F32), ("gru", "tensor, shared", "33", F32),
    ("mixed", "tensor, blocks", "groups", F32), ("elman", "tensor, 16", "groups", F32),
    ("lstm", "cluster", "32", F32), ("gru", "cluster, blocks", "16", F32),
    ("pair", "clusters, one by one", "groups", F32),
]  # fmt: skip
MORE = [
    ("elman", "parts", "33", F64), ("lstm", "blocks", "twelve", F32),
    ("gru", "on chip", "three", F64), ("leaky", "parts", "ragged", F64),
    ("odd", "parts", "one step", F32), ("pair", "on chip", "ragged", F64),
    ("diagonal", "two warps", "ragged", F32), ("diagonal", "on chip", "one", F64),
    ("elman", "parts, blocks", "twelve", F32),
    ("lstm", "parts", "ragged", F32), ("lstm", "parts, blocks", "ragged", F64),
    ("gru", "shared", "31", F32),
    ("leaky", "blocks", "ragged", F32),
    ("rate", "on chip", "three", F32), ("rate", "parts", "ragged", F64),
    ("odd", "parts, blocks", "twelve", F64), ("odd", "blocks", "twelve", F32),
    ("pair", "blocks", "three", F64),
    ("diagonal", "on chip", "31", F64),
    ("mixed", "on chip", "three", F32),
    ("gru", "tensor", "33", F32), ("pair", "tensor, shared", "33", F32),
    ("lstm", "tensor, 16", "groups", F32), ("odd", "tensor, blocks", "groups", F32),
    ("gru", "cluster", "32", F32), ("mixed", "cluster", "32", F32),
    ("elman", "cluster, blocks", "16", F32), ("odd", "cluster, blocks", "16", F32),
    ("lstm", "clusters, one by one", "groups", F32),
]  # fmt: skip
CASES += [pytest.param(*case, marks=pytest.mark.thorough) for case in MORE]
ALL = [
    ("lstm", "on chip", "ragged", F32),
    pytest.param("pair", "parts, blocks", "twelve", F32, marks=pytest.mark.thorough),
    ("gru", "too large", "31", F64),
]


@pytest.fixture
def chip(monkeypatch):
    """Engine `cuda` on such a chip."""
    yield lambda mode: emulated.install(monkeypatch, mode)
    monkeypatch.undo()
    emulated.forget()


def swept(chip, name, mode, size, dtype, **given):
    make, holds = MODES[mode]
    problem, d = Problem(name, *SIZES[size], dtype), SIZES[size][1]
    chip(make(problem.cell, d, dtype.itemsize))
    assert holds(
        g := geometry.choose_geometry(
            problem.cell, d, problem.rows.B, dtype.itemsize, driver.processor_count(-1)
        )
    ), g
    problem.against(cuda_engine, **given)


@compiles
@pytest.mark.parametrize(("name", "mode", "size", "dtype"), CASES)
def test_cuda_loops_equal_the_definition(name, mode, size, dtype, chip):
    swept(chip, name, mode, size, dtype, **SOME)


@compiles
@pytest.mark.parametrize(("name", "mode", "size", "dtype"), ALL)
def test_every_source_is_swept_as_by_the_definition(name, mode, size, dtype, chip):
    swept(chip, name, mode, size, dtype, **EVERY)


@compiles
@pytest.mark.parametrize("name", one_in(3, NEWER))
def test_the_other_cells_equal_the_definition(name, chip):
    """The ways to lie on a chip in turn, for those that have a W to lay there."""
    i = list(NEWER).index(name)
    mode = ("on chip", "parts", "blocks", "parts, blocks")[i % 4] if NEWER[name].read else "on chip"
    swept(chip, name, mode, "small", (F32, F64)[i // 4 % 2], **ONE)


@compiles
def test_weights_are_kept_in_shared_memory(chip):
    """The case that says so does keep a part of W there."""
    chip(MODES["shared"][0](co.cells.lstm, 31, 4))
    for name, options in (("forward", ()), ("adjoint", (True,) * 5), ("tangent", (True,) * 3)):
        g = geometry.choose_geometry(co.cells.lstm, 31, 5, 4, 4)
        text, _ = source.kernel_source(name, co.cells.lstm, g, 31, F32, False, *options)
        defined = dict(
            line.split()[1:3]
            for line in text.splitlines()
            if line.startswith(("#define KC", "#define KEEP"))
        )
        assert 0 < int(defined["KEEP"]) < int(defined["KC"])


@compiles
def test_a_scaled_sweep_continues_one_begun_elsewhere(chip):
    """Costates far below the smallest number: scaled sweeps keep them, and may be handed on with
    their exponent.
    """
    chip(Mode())
    problem = Problem("elman", [2] * 40, 5, F32)
    problem.W *= 1e-3
    problem.base *= (
        0.3  # away from where tanh is flat: there a last digit of x is many of its slope
    )
    lam, _, k = problem.adjoint(cuda_engine, problem.tape(cuda_engine), "s_last scaled")
    assert int(k[0]) < -300
    assert (lam[: problem.rows.B].abs().amax(1) > 1e-6).all()
    problem.against(cuda_engine, ("s_last scaled", "s_last k_last scaled"), ())


@compiles
@pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(CELLS, (F64, F32)), *((name, F64) for name in NEWER)]
)
@pytest.mark.sampled(2)
def test_slopes_and_bends_of_a_kernel_equal_torchs(name, dtype, chip):
    """Slopes and bends by a kernel and by torch's operations."""
    chip(Mode())
    problem = Problem(name, [5, 5, 2], 21, dtype)
    tape, rows, cell = problem.tape(fused), problem.rows, problem.cell
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
                for run in (cuda_engine.pointwise, pointwise.Pointwise.run_by_torch)
            )
            for y, z, group in zip(found, true, one.nonzero_outputs, strict=True):
                close(y, z.double(), {F32: 2e-4, F64: 1e-12}[dtype], f"by {group}", rows=True)


@compiles
@pytest.mark.parametrize("dtype", [F64, F32])
def test_functions_of_a_kernel_equal_torchs(dtype, chip):
    """Each function of the formulas as torch has it, also where numbers end."""
    chip(Mode())
    x, names = symbol("x.0"), sorted(PRIMITIVES)
    op = pointwise.Pointwise(
        (("x", (x,)),), (("y", tuple(Node(n, (x,)) for n in names)),), (), frozenset()
    )
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=dtype)
    a = torch.cat([torch.linspace(-30, 30, 2001, dtype=dtype), ends])[:, None]
    [found] = cuda_engine.pointwise(op, None, (), (a,))
    for i, name in enumerate(names):
        expected, eps = PRIMITIVES[name].run(a[:, 0]), torch.finfo(dtype).eps
        atol = 2 * eps if name.endswith("_slope") else 0  # of a value q: 1 - q q, q - q q
        if name in ("sign", "step"):  # torch has 0 for NaN; a NaN that stays is as good
            expected = torch.where(a[:, 0].isnan(), a[:, 0], expected)
        torch.testing.assert_close(
            found[:, i],
            expected,
            rtol=8 * eps,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


# how a network lies on the chip


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_every_entry_of_W_belongs_to_one_thread(warps):
    """Every entry of W belongs to one thread, and no thread has more than it may."""
    for n, m, weights in itertools.product(
        (1, 3, 31, 33, 64, 127), (1, 3, 32, 33, 100), (4, 16, 64, 128)
    ):
        t = geometry.cheapest_tile(n, m, 4, warps, weights)
        if t is None:
            assert n * m > 32 * warps * weights / 6, (
                n,
                m,
            )  # given up only where rounding up takes the room
            continue
        assert t.LC * t.LK == 32
        assert warps == t.WC * t.WK
        assert weights >= t.KC * t.CC
        thread, i, j = torch.meshgrid(
            torch.arange(32 * warps), torch.arange(t.KC), torch.arange(t.CC), indexing="ij"
        )
        warp, lane = thread // 32, thread % 32
        inner = (warp // t.WC * (t.KC // 4) * t.LK + i // 4 * t.LK + lane // t.LC) * 4 + i % 4
        outer = warp % t.WC * t.LC * t.CC + lane % t.LC + j * t.LC
        own = (inner < n) & (outer < m)
        assert torch.equal((inner * m + outer)[own].sort().values, torch.arange(n * m)), (n, m, t)


CLUSTERS = {8: (), 132: ((2, 66), (4, 30), (8, 15))}  # for which there is room
CHIP = 227 << 10  # bytes of shared memory that a block may take on the devices this is made for
KERNELS = {"forward": (), "adjoint": (True,) * 5, "tangent": (True,) * 3}  # and all their options


@pytest.mark.parametrize("name", CELLS)
def test_every_unit_of_every_sample_has_one_place(name):
    """Every unit of every sample has its place, once; blocks that wait for each other are on the
    chip together.
    """
    cell = CELLS[name]
    for d, B, dtype, processors in itertools.product(
        (1, 2, 3, 31, 33, 127, 128, 500, 512, 1024), (1, 3, 64, 1000), (F32, F64), (8, 132)
    ):
        for kernel, options in KERNELS.items():
            backwards = kernel == "adjoint"
            chip = (dtype.itemsize, processors, CHIP)
            clusters = CLUSTERS[processors]
            g = geometry.choose_geometry(cell, d, B, *chip, backwards, clusters)
            if g is None:
                g = geometry.choose_plain(cell, d, B, *chip)
                if g is None:
                    entries = d * d * len(cell.gates) * len(cell.read)
                    held = processors * geometry.WARPS * 32 * geometry.WEIGHTS
                    assert entries * dtype.itemsize > held / 4
                    continue
                # the blocks would read too much, or wait for each other in items
                busy = geometry.traffic(cell, d, B, g, dtype.itemsize, backwards)
                assert busy > geometry.TRAFFIC or min(g.parts, g.blocks) > 1
            assert (g.parts - 1) * g.units < d <= g.parts * g.units
            assert (g.groups - 1) * g.rows * g.blocks < B <= g.groups * g.rows * g.blocks
            assert g.parts == 1 or g.groups * g.parts <= processors
            if g.cluster > 1:
                assert g.parts % g.cluster == 0
                assert g.groups * g.parts <= g.cluster * dict(clusters)[g.cluster]
            _, shared = source.kernel_source(kernel, cell, g, d, dtype, True, *options)
            assert shared <= CHIP, (kernel, d, B, g)


H200 = (132, CHIP)


def test_tensor_cores_multiply_where_a_step_would_wait_in_several_items():
    """By the cases that were measured on an H200; float64 has no tensor cores here."""

    def choose(name, d, B, size=4, backwards=False):
        return geometry.choose_geometry(co.cells.named(name), d, B, size, *H200, backwards)

    for name, d, B in (
        ("lstm", 512, 64),
        ("gru", 512, 64),
        ("elman", 1024, 64),
        ("lstm", 256, 512),
    ):
        assert choose(name, d, B).tensor, (name, d, B)
        assert choose(name, d, B, backwards=True).tensor, (name, d, B)
    for name, d, B in (("lstm", 128, 64), ("lstm", 256, 64), ("gru", 256, 64), ("elman", 512, 64)):
        assert not choose(name, d, B).tensor, (name, d, B)
    for name, d, B in (("lstm", 1024, 64), ("gru", 1024, 64), ("lstm", 512, 256)):
        assert choose(name, d, B).tensor, (name, d, B)
        assert choose(name, d, B, backwards=True) is None  # a product by the library is faster
    assert not choose("elman", 512, 64, size=8).tensor


def test_clusters_read_less_where_reading_takes_longest():
    """By the cases that were measured on an H200."""

    def choose(name, d, B):
        cell = co.cells.named(name)
        return geometry.choose_geometry(cell, d, B, 4, *H200, True, CLUSTERS[132])

    for name, d, B in (("lstm", 512, 64), ("lstm", 768, 64), ("gru", 768, 64), ("gru", 512, 256)):
        assert choose(name, d, B).cluster > 1, (name, d, B)
    assert choose("lstm", 128, 64).cluster == 1  # a block reads no others
    # Where no four values of a block lie side by side, there are no clusters.
    given = (co.cells.gru, 510, 64, *H200, True, CLUSTERS[132])
    sizes = {g.cluster for g in geometry.tensor_geometries(*given)}
    assert sizes == {1}


@pytest.mark.parametrize("kernel", ["forward", "adjoint"])
def test_many_samples_fit_the_chip(kernel):
    g = geometry.choose_geometry(co.cells.lstm, 88, 1056, 8, 132)
    assert (
        source.kernel_source(
            kernel, co.cells.lstm, g, 88, F64, True, *((True,) * 5 if kernel == "adjoint" else ())
        )[1]
        <= CHIP
    )


# where there is no GPU


def test_what_the_engine_cannot_run_is_refused(monkeypatch):
    assert cuda_engine.refusal("cpu").startswith(
        "runs on an NVIDIA GPU, but the data is on cpu. Use engine='auto'"
    )
    with pytest.raises(
        Unsupported, match="engine 'cuda' runs on an NVIDIA GPU, but the data is on cpu"
    ):
        resolve("cuda", co.cells.lstm, "cpu")
    with pytest.raises(Unsupported, match="engine 'cuda' runs on an NVIDIA GPU"):
        co.Network("elman", inputs=1, hidden=2, outputs=1, engine="cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (
        cuda_engine.refusal("cuda")
        == "needs an NVIDIA GPU and torch built for CUDA. Use engine='auto'."
    )
    monkeypatch.setattr(torch.version, "cuda", "999.0")  # of which there is no library

    def missing(name):
        return (_ for _ in ()).throw(OSError(name))

    monkeypatch.setattr(cuda_engine.ctypes, "CDLL", missing)
    driver.nvrtc.cache_clear()
    assert cuda_engine.refusal("cuda").startswith(
        "needs NVRTC, CUDA's run-time compiler, but it was not found."
    )


def test_nothing_is_recorded_on_a_cpu():
    """Neither kept nor counted: every call runs operation by operation."""
    net = co.Network("elman", inputs=2, hidden=3, outputs=2)
    batch = co.Batch(torch.randn(4, 3, 2), torch.randn(3, 2))

    def never(*_):
        return pytest.fail("there is nothing to record")

    recordings = captured.CapturedGradients()
    assert recordings.key(net, batch, "squared") is None
    for _ in range(capture.CALLS_BEFORE_RECORDING + 2):
        assert recordings(never, net, batch, "squared", 0.0) is None
    assert not recordings.cache.entries
    for method in (co.BPTT(), co.Penalised("log-ratio", 0.1)):
        found = [
            method(net, batch, "squared").gradient
            for _ in range(capture.CALLS_BEFORE_RECORDING + 2)
        ]
        assert not method.captured.cache.entries
        assert all(torch.equal(found[-1][n], g) for n, g in found[0].items())


def test_a_recording_in_one_thread_does_not_silence_checks_in_another():
    """A class out of range is collected where a gradient is recorded, and refused at once in any
    other thread.
    """
    net = co.Network("elman", inputs=2, hidden=3, outputs=3)
    u, y = torch.randn(4, 2, 2), torch.tensor([0, 99])
    said = []

    def other():
        try:
            said.append(net(u).loss("cross-entropy", y))
        except co.InputError as error:
            said.append(str(error))

    with checks.defer_checks() as doubts:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not doubts
        net(u).loss("cross-entropy", y)  # clamped: the doubt is asked after the replay
    assert said == ["loss 'cross-entropy': class numbers must lie in 0..2; got 0..99."]
    assert len(doubts) == 1
    with pytest.raises(co.InputError, match="class numbers"):
        net(u).loss("cross-entropy", y)


def test_recordings_inside_each_other_keep_their_own_doubts():
    with checks.defer_checks() as outer:
        checks.require(torch.tensor(False), lambda: None)
        with checks.defer_checks() as inner:
            checks.require(torch.tensor(False), lambda: None)
            checks.require(torch.tensor(False), lambda: None)
        checks.require(torch.tensor(False), lambda: None)
    assert (len(outer), len(inner)) == (2, 2)
    assert not checks.is_deferring_checks()


def test_a_plan_knows_that_it_is_recorded_in_whichever_thread_it_is_settled():
    """autograd runs a backward on a GPU in a thread of its own, where the context of its caller is
    unknown.
    """
    with checks.defer_checks():
        run = co.Network("elman", inputs=2, hidden=3, outputs=3)(torch.randn(4, 2, 2))
    plan = run.run.plan
    plan.checks.append(
        checks.Check(torch.tensor(False), lambda: pytest.fail("asked while recording"))
    )
    thread = threading.Thread(target=settle_checks, args=(plan,))
    thread.start()
    thread.join()
    assert len(plan.checks) == 1


def test_a_recording_that_fails_is_tried_once_more_and_then_said_once():
    built, tries = object(), []

    def fails_once():
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return built

    cache = capture.GraphCache("this gradient")
    for _ in range(capture.CALLS_BEFORE_RECORDING):
        assert cache.find("a", fails_once) is None
    assert not tries
    assert cache.find("a", fails_once) is built
    assert cache.find("a", pytest.fail) is built

    def never():
        raise RuntimeError("no room\nmore lines")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for key in "bc":
            for _ in range(capture.CALLS_BEFORE_RECORDING + 2):
                assert cache.find(key, never) is None
    assert [str(w.message) for w in said] == [
        "this gradient cannot be replayed as a CUDA graph (no room). It runs operation by "
        "operation: the same numbers, "
        "but slower."
    ]


def test_old_recordings_go_before_a_new_one_begins():
    class Old:
        def __del__(self):
            gone.append(1)

    gone, cache = [], capture.GraphCache("this gradient")
    for key in range(capture.MOST_RECORDINGS):
        for _ in range(capture.CALLS_BEFORE_RECORDING + 1):
            cache.find(key, Old)
    assert not gone
    seen = []
    for _ in range(capture.CALLS_BEFORE_RECORDING + 1):
        cache.find("new", lambda: seen.append(len(gone)) or Old())
    assert seen == [1]
    assert len(cache.entries) == capture.MOST_RECORDINGS


def test_no_garbage_is_collected_during_a_recording(monkeypatch):
    collecting = []

    class Graph:
        def __init__(self, *_, **options):
            assert options["capture_error_mode"] == "thread_local"

        def __enter__(self):
            collecting.append(gc.isenabled())

        def __exit__(self, *_):
            collecting.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "graph", Graph)
    with capture.capture_graph(None, None):
        collecting.append(gc.isenabled())
    with pytest.raises(ZeroDivisionError), capture.capture_graph(None, None):
        _ = 1 / 0
    assert collecting == [False, False, False, False, False]
    assert gc.isenabled()


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_an_index_on_the_cpu_is_refused_in_the_rehearsal():
    """It is copied to the device, which no recording can do; it stands inside a list."""
    mode = capture.RefuseWaiting()
    y = torch.randn(4).as_subclass(OnDevice)
    assert mode.changes_device((y, [torch.tensor([0, 1])]), y)
    assert not mode.changes_device((y, [torch.tensor([0, 1]).as_subclass(OnDevice)]), y)
    assert not mode.changes_device((y, [torch.tensor(1)]), y)


@pytest.mark.parametrize(
    ("compute", "reads"),
    [
        (lambda y: y.sum().item(), True),
        (lambda y: y[y > 0], True),
        (lambda y: torch.nonzero(y), True),
        (lambda y: y.masked_select(y > 0), True),
        (lambda y: torch.where(y > 0, y, 0).sum(), False),
        (lambda y: y[torch.tensor([0, 1])], False),
        (lambda y: torch.cat([y, y]), False),
    ],
)
def test_code_that_depends_on_values_is_refused_in_the_rehearsal(compute, reads):
    """Seen on the CPU by calling everything a tensor of the device."""
    mode = capture.RefuseWaiting()
    mode.on_device = lambda y: isinstance(y, torch.Tensor)
    y = torch.randn(4)
    if reads:
        with pytest.raises(capture.Unrecordable), mode:
            compute(y)
    else:
        with mode:
            compute(y)
