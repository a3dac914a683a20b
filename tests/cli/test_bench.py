"""The benchmark measures what it says: its peers compute our gradient, and its figures are right.

Writing the results leaves the rest of the page alone.
"""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import coadjoint as co
from coadjoint.cli.bench import clock as clock_module
from coadjoint.cli.bench import goals, mlp, problems, tables
from coadjoint.cli.bench import hessian_free_step as step_module
from coadjoint.cli.bench import measure as measure_module
from coadjoint.cli.bench import options as options_module
from coadjoint.cli.bench.clock import relative_difference, time_in_turns
from coadjoint.optimisers.hessian_free import HessianFree
from coadjoint.sweeps import engines
from coadjoint.sweeps.engines.c import probe
from coadjoint.sweeps.engines.cuda.capture import CALLS_BEFORE_RECORDING
from paths import ROOT

pytestmark = pytest.mark.slow

JAX = importlib.util.find_spec("jax") is not None
TINY = ["--rows", "gradient", "--sizes", "4x3x5", "--repeat", "1"]
PEER_NAMES = {
    "torch": "torch.nn",
    "autograd": "autograd loop",
    **({"jax": "JAX scan"} if JAX else {}),
}


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clock_module, "TURN_MS", 0.01)
    monkeypatch.setattr(problems, "INSIDE", (True,))
    monkeypatch.setattr(
        tables, "measure_limits", lambda device: {"GEMM GFLOP/s": 50.0, "memory GB/s": 10.0}
    )


def row(**changes):
    values = {
        "cell": "elman", "size": (10, 2, 8), "engine": "cpu",
        "peers": ("torch.nn", "autograd loop"),
        "ms": {"plain": {"ours": 2.0, "torch.nn": 5.0},
            "penalised": {"ours": 4.0, "autograd loop": 6.0}},
        "differs": {"plain": {"torch.nn": 1e-6}, "penalised": {"autograd loop": 1e-5}},
        "failed": {}, "rate": 1.0, "memory": 1.0,
    }  # fmt: skip
    return measure_module.BenchRow(**{**values, **changes})


def result(device="cpu", *rows):
    options = options_module.BenchOptions(repeat=1, sizes=((10, 2, 8),))
    object.__setattr__(options, "device", device)  # as it would be where there is a GPU
    return tables.BenchResult(
        options,
        {"cpu": "C", "cores": 1, "threads": 1, "gpu": "G", "cuda": "13"},
        {},
        rows or (row(),),
    )


@pytest.mark.parametrize("peer", PEER_NAMES)
@pytest.mark.parametrize("cell", problems.MODULES)
def test_a_peer_computes_our_gradient(cell, peer):
    problem = problems.NetworkProblem(cell, (7, 3, 5), "cpu")
    ours = problems.ours(problem)[problems.OURS]
    for kinds in problems.PEERS[peer](problem).values():
        for kind, run in kinds.items():
            gradient = run()
            assert {"W", "R", "b", "V", "b_o"} <= set(gradient)
            assert relative_difference(ours[kind](), gradient) < 1e-4
    assert relative_difference(ours["plain"](), ours["penalised"]()) > 1e-2


def test_torch_has_the_gradient_of_our_deep_network():
    problem = mlp.MlpProblem("mlp", (7, 3, 5), "cpu")
    ours = problem.contenders(problems.OURS)[problems.OURS]
    plain = problem.contenders("torch")["torch.nn"]["plain"]()
    penalised = problem.contenders("autograd")["autograd loop"]["penalised"]()
    assert set(plain) == set(penalised) == set(ours["plain"]())
    assert relative_difference(ours["plain"](), plain) < 1e-4
    assert relative_difference(ours["penalised"](), penalised) < 1e-4
    assert relative_difference(plain, penalised) > 1e-2
    assert problem.contenders("jax") == {}


def test_a_deep_network_is_measured_at_its_own_size(coadjoint):
    options = options_module.BenchOptions()
    assert options.sizes_of("mlp") == ((30, 64, 64),)
    assert options.sizes_of("elman") == problems.SIZES["cpu"]
    assert options_module.BenchOptions(sizes=((4, 3, 5),)).sizes_of("mlp") == ((4, 3, 5),)
    code, out, err = coadjoint("bench", *TINY, "--cells", "mlp", "--json", "m.json")
    assert code == 0, err
    assert "autograd loop" in out
    (found,) = json.loads(Path("m.json").read_text())["rows"]
    assert (found["cell"], found["T"], found["B"], found["d"]) == ("mlp", 4, 3, 5)
    assert found["penalised in plain gradients"] > 0
    assert set(found["ours is faster by"]["penalised"]) == {"autograd loop"}
    assert max(found["gradients differ by"]["penalised"].values()) < 1e-4
    assert not found["failed"]


@pytest.mark.parametrize("name", problems.FORMULAS)
def test_a_module_has_the_gradient_of_torchs(name):
    stack = problems.ModuleProblem(name, (7, 3, 5), "cpu")
    ours, theirs = (
        stack.contenders(problems.OURS)[problems.OURS],
        stack.contenders("torch")["torch.nn"],
    )
    for kind in stack.kinds:
        found = theirs[kind]()
        assert set(found) == {"u", *dict(stack.torch_module.named_parameters())}
        assert relative_difference(ours[kind](), found) < 1e-4
    assert relative_difference(ours["plain"](), ours["double"]()) > 1e-2
    assert stack.contenders("jax") == {}


@pytest.mark.parametrize("kind", ["plain", "double"])
@pytest.mark.parametrize("name", problems.FORMULAS)
def test_flops_of_a_module_are_those_torch_counts(name, kind):
    """Of torch's own products as they go by, but for the sums over few inputs, which
    are left out.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket in flop_registry:
                self.total += flop_registry[func.overloadpacket](
                    *args, **(kwargs or {}), out_val=out
                )
            return out

    size = (4, 8, 64)
    stack = problems.ModuleProblem(name, size, "cpu")
    stack.torch_module.double()
    stack.u = stack.u.detach().double().requires_grad_()
    with Counter() as counter:
        stack.contenders("torch")["torch.nn"][kind]()
    assert measure_module.flops(name, size, kind) == pytest.approx(counter.total, rel=0.12)


@pytest.mark.skipif(not JAX, reason="jax is not installed")
def test_the_faster_scan_competes(monkeypatch):
    """Both are tried, both are right, and the faster one is taken."""
    problem, tried = problems.NetworkProblem("elman", (7, 3, 5), "cpu"), []
    monkeypatch.setattr(problems, "INSIDE", (True, False))
    monkeypatch.setattr(problems, "best_time", lambda run, *_: (tried.append(run), -len(tried))[1])
    taken = problems.jax_scan(problem)["JAX scan"]
    assert len(tried) == 4
    assert list(taken.values()) == [tried[1], tried[3]]
    assert relative_difference(problems.ours(problem)["ours"]["plain"](), taken["plain"]()) < 1e-4


@pytest.mark.parametrize("cell", problems.MODULES)
def test_costates_stay_inside_float32(cell):
    """Peers square them as they are."""
    problem = problems.NetworkProblem(cell, (784, 2, 32), "cpu")
    logs = problem.net(problem.u).costates("cross-entropy", problem.y).log_norms()[1:].detach()
    assert logs.min() > torch.tensor(1e-17).log()
    assert logs.max() < torch.tensor(1e6).log()


def test_the_difference_of_gradients_is_relative():
    a = {"W": torch.tensor([3.0, 4.0]), "b": torch.ones(2), "p.b_n": torch.ones(1)}
    assert relative_difference(a, {"W": a["W"] * 1.1, "b": a["b"]}) == pytest.approx(
        0.1 / 1.1, rel=1e-6
    )
    assert relative_difference({"b": a["b"]}, {"b": torch.zeros(2)}) > 1
    assert relative_difference(a, {"b": torch.tensor([1.0, float("nan")])}) == float("inf")


def test_contenders_take_turns(monkeypatch):
    """One call of each first, then rounds; the slow one sits out after three."""
    cost, calls = {"fast": 0.02, "slow": 2000.0}, []
    monkeypatch.setattr(clock_module, "TURN_MS", 0.07)
    monkeypatch.setattr(
        clock_module,
        "time_calls",
        lambda run, count, device: (calls.append((run(), count)), cost[run()])[1],
    )
    shares = []
    times = time_in_turns({name: lambda name=name: name for name in cost}, 4, "cpu", shares.append)
    once = [("fast", 3), ("slow", 1)]
    assert calls == [("fast", 1), ("slow", 1), *once * 3, ("fast", 3)]
    assert times == {"fast": [0.02] * 4, "slow": [2000.0] * 3}
    assert shares == [0.25, 0.5, 0.75, 1]


def test_clock_is_of_one_call(monkeypatch):
    count = []
    monkeypatch.setattr(
        clock_module, "time", SimpleNamespace(perf_counter=lambda: 7 + 0.002 * len(count))
    )
    ms = clock_module.time_calls(lambda: count.append(1), 5, "cpu")
    assert len(count) == 5
    assert ms == pytest.approx(2)


@pytest.mark.parametrize(
    ("cell", "gates", "slots"), [("elman", 1, 1), ("lstm", 4, 2), ("gru", 3, 1)]
)
def test_the_work_of_a_gradient_is_counted(cell, gates, slots):
    product = 2 * 10 * 2 * 8 * 8 * gates
    assert measure_module.flops(cell, (10, 2, 8), "plain") == 3 * product
    assert measure_module.flops(cell, (10, 2, 8), "penalised") == 6 * product
    assert measure_module.traffic(cell, (10, 2, 8), "plain") == 4 * 160 * (
        2 * (gates + slots) + gates + 1
    )
    assert measure_module.traffic(cell, (10, 2, 8), "penalised") == 2 * measure_module.traffic(
        cell, (10, 2, 8), "plain"
    )


def test_a_row_says_ratios_and_shares():
    r = row()
    assert r.ratio("plain", "torch.nn") == 2.5
    assert r.ratio("penalised", "autograd loop") == 1.5
    assert r.ratio("plain", "autograd loop") is None
    assert r.ratio_to_plain("torch.nn") == 1.25
    assert r.cost == 2
    assert r.gemm_share("plain") == pytest.approx(
        measure_module.flops("elman", (10, 2, 8), "plain") / 1e9 / 2e-3
    )
    assert r.memory_share("plain") == pytest.approx(
        measure_module.traffic("elman", (10, 2, 8), "plain") / 1e9 / 2e-3
    )
    assert r.us_per_step("penalised") == pytest.approx(100.0)
    assert r.describe_failures() == []


def test_the_table_shows_ratios_and_costs():
    heads, lines = result().table()
    plain, penalised = (dict(zip(heads, line, strict=True)) for line in lines)
    assert heads[:6] == ["cell", "T, B, d", "gradient", "vs torch.nn", "vs autograd loop", "costs"]
    assert (plain["vs torch.nn"], plain["vs autograd loop"], plain["costs"]) == ("2.50x", "", "")
    assert (penalised["vs torch.nn"], penalised["vs autograd loop"]) == ("1.25x*", "1.50x")
    assert (penalised["costs"], penalised["ms ours"], penalised["ms torch.nn"]) == (
        "2.00 plain",
        "4.00",
        "",
    )
    assert (penalised["differs"], penalised["engine"]) == ("1e-05", "cpu")
    gpu = dict(zip(*[result("cuda").table()[0], result("cuda").table()[1][1]], strict=True))
    assert gpu["us/step"] == "100.0"


def test_a_wrong_or_failing_peer_is_noticed(monkeypatch):
    def wrong(problem):
        return {
            "wrong": {
                "plain": lambda: {
                    n: 2 * w for n, w in problems.ours(problem)["ours"]["plain"]().items()
                }
            }
        }

    def failing(problem):
        def run():
            raise RuntimeError("out of memory\nmore")

        return {"failing": {"plain": run}}

    monkeypatch.setitem(problems.PEERS, "torch", wrong)
    monkeypatch.setitem(problems.PEERS, "autograd", failing)
    found = tables.run_bench(
        options_module.BenchOptions(
            cells=("elman",),
            sizes=((4, 3, 5),),
            peers=("torch", "autograd"),
            repeat=1,
            rows=("gradient",),
        )
    )
    notes = found.notes()
    assert "elman 4x3x5: the plain gradient of wrong differs from ours by 5.0e-01" in notes
    assert "elman 4x3x5: plain failing failed: out of memory" in notes
    assert "failing" not in found.rows[0].ms["plain"]
    assert "wrong" in found.rows[0].ms["plain"]


def test_the_page_of_results_explains_its_columns_as_the_code_does():
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    marked = re.findall(
        r"<!-- bench (cpu|cuda)(.*?) -->(.*?)<!-- end of bench \1\2 -->", page, re.S
    )
    assert {device for device, _, _ in marked} == {"cpu", "cuda"}
    assert page.count("<!-- bench ") == page.count("<!-- end of bench ") == len(marked)
    for device, _, section in marked:
        rate, more = tables.GEMM_RATES[device], measure_module.DEVICE_NOTES[device]
        gemm = tables.GEMM_NOTE.format(rate=rate, more=more)
        notes = [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]
        if "| gradient | vs " in section:
            assert notes[:3] == [tables.RATIO_NOTE, gemm, tables.DIFFERENCE_NOTE]
        if "| ratio | limit | met |" in section:
            assert goals.GOAL_NOTE in notes
            assert any(note.endswith(" limits are met.") for note in notes)


def test_json_holds_every_row(coadjoint):
    code, out, err = coadjoint("bench", *TINY, "--cells", "elman", "--json", "-", "--quiet")
    assert code == 0, err
    found = json.loads(out)
    assert [r["cell"] for r in found["rows"]] == ["elman"]
    for r in found["rows"]:
        assert (r["T"], r["B"], r["d"]) == (4, 3, 5)
        assert r["engine"] == co.Network(r["cell"], inputs=1, hidden=1, outputs=1).engine
        plain, penalised = r["ms"]["plain"], r["ms"]["penalised"]
        assert set(plain) == {"ours", "torch.nn"} | ({"JAX scan"} if JAX else set())
        assert set(penalised) == {"ours", "autograd loop"} | ({"JAX scan"} if JAX else set())
        assert all(ms > 0 for ms in (*plain.values(), *penalised.values()))
        assert r["ours is faster by"]["plain"]["torch.nn"] == plain["torch.nn"] / plain["ours"]
        assert max(v for k in r["gradients differ by"].values() for v in k.values()) < 1e-4
    assert (
        found["command"]
        == "coadjoint bench --device cpu --sizes 4x3x5 --rows gradient --cells elman --repeat 1"
    )
    assert found["machine"]["torch"] == torch.__version__
    assert found["missing"] == (
        {} if JAX else {"jax": "jax is not installed: pip install 'coadjoint[bench]'."}
    )
    assert tables.platform.node() not in out.split('"')
    assert str(Path.home()) not in out


def test_a_hessian_free_step_is_measured(coadjoint):
    code, out, err = coadjoint("bench", *TINY, "--cells", "hessian-free", "--json", "s.json")
    assert code == 0, err
    (line,) = [
        line for line in out.splitlines() if line.startswith("hessian-free 4x3x5: a step of ")
    ]
    assert " x (tangent + adjoint + their two weight products) + the gradient" in line
    assert "the limit is" not in line  # of another size
    assert "1 of 1: hessian-free 4x3x5" in err
    (found,) = json.loads(Path("s.json").read_text())["hessian-free"]
    assert (found["T"], found["B"], found["d"], found["engine"]) == (
        4,
        3,
        5,
        co.Network(inputs=1, hidden=1, outputs=1).engine,
    )
    assert found["ratio"] == found["ms"] / found["ms of its parts"] > 0
    limited = str(step_module.HessianFreeStep((100, 200, 100), "cpu", 50, 1050.0, 1000.0))
    assert "a step of 50 iterations takes 1050 ms, 1.05x of 50 x" in limited
    assert limited.endswith("1000 ms; the limit is 1.10x.")
    assert options_module.BenchOptions(sizes=((4, 3, 5),)).steps == ((4, 3, 5),)
    assert options_module.BenchOptions().steps == ((100, 200, 100),)
    assert options_module.BenchOptions(cells=("elman",)).steps == ()


def test_a_step_begins_where_the_others_did(monkeypatch):
    taken, step = [], HessianFree.step
    monkeypatch.setattr(HessianFree, "step", lambda *given: taken.append(step(*given)) or taken[-1])
    found = step_module.measure_step((12, 30, 20), 2)
    assert len(taken) == 4  # one for the last solution, one to warm up
    assert len({t.before for t in taken}) == 1
    assert found.iterations == taken[-1].iterations == taken[-2].iterations


def test_only_the_rows_and_columns_asked_for_are_measured(coadjoint):
    code, out, err = coadjoint(
        "bench", *TINY, "--cells", "gru,elman", "--peers", "autograd", "--json", "all.json"
    )
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in problems.MODULES] == [
        "gru",
        "gru",
        "elman",
        "elman",
    ]
    assert "vs autograd loop" in out
    assert "vs torch.nn" not in out
    assert "2 of 2: elman 4x3x5: plain" in err
    assert [r["cell"] for r in json.loads(Path("all.json").read_text())["rows"]] == ["gru", "elman"]


def test_a_missing_peer_is_named(coadjoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    code, out, err = coadjoint("bench", *TINY, "--cells", "elman", "--peers", "jax")
    line = "peer 'jax' left out: jax is not installed: pip install 'coadjoint[bench]'."
    assert code == 0
    assert line in err
    assert line in out.splitlines()
    assert "vs JAX" not in out


REFUSED = [
    ("--device cuda --cells hessian-free", 2, "is measured on a CPU"),
    ("--sizes 100x20", 2, "a size is TxBxd"),
    ("--sizes 1x20x5", 2, "steps, at least 2"),
    ("--sizes 10x0x5", 2, "got '10x0x5'"),
    ("--sizes 10x2x5,", 2, "got ''"),
    ("--sizes 10x2x-5", 2, "got '10x2x-5'"),
    ("--cells lstmm", 2, "did you mean 'lstm'?"),
    ("--cells none", 2, "no cell to measure"),
    ("--rows own-lop", 2, "did you mean 'own-loop'?"),
    ("--rows own-loop --cells nn.LSTM", 2, "nothing to measure: nn.LSTM has no row own-loop"),
    ("--rows none", 2, "nothing to measure"),
    ("--section x-->", 2, "a section is named by letters"),
    ("--peers jaxx", 2, "did you mean 'jax'?"),
    ("--device gpu", 2, "unknown device 'gpu'"),
    ("--device gpu --quick", 2, "unknown device 'gpu'"),
    ("--device gpu --explain", 2, "unknown device 'gpu'"),
    ("--repeat 0", 2, "repeat must be at least 1; got 0"),
    ("--threads 0", 2, "threads must lie in 1.."),
    ("--device cuda --threads 1", 2, "--threads applies to --device cpu"),
    ("--explain --cells lstmm", 2, "did you mean 'lstm'?"),
    ("--json nowhere/x.json", 4, "its folder does not exist"),
    ("--write nowhere/x.md", 4, "its folder does not exist"),
]


@pytest.mark.parametrize(("words", "code", "text"), REFUSED, ids=[r[0] for r in REFUSED])
def test_a_wrong_word_gets_one_line_before_anything_is_measured(
    coadjoint, monkeypatch, words, code, text
):
    monkeypatch.setattr(tables, "run_bench", lambda *_: pytest.fail("measured"))
    got, out, err = coadjoint("bench", *words.split())
    assert (got, out) == (code, "")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_cuda_is_refused(coadjoint):
    code, out, err = coadjoint("bench", "--device", "cuda")
    assert (code, out) == (7, "")
    assert err == "coadjoint: error: device 'cuda': torch finds no GPU here. Use device 'cpu'.\n"
    assert coadjoint("bench", "--explain")[1].splitlines()[-1] == "cuda: torch finds no GPU here."


def test_explain_measures_nothing(coadjoint, monkeypatch):
    monkeypatch.setattr(clock_module, "time_calls", lambda *_: pytest.fail("timed"))
    engine = engines.load(co.Network("gru", inputs=1, hidden=1, outputs=1).engine)

    def shape(cell, hidden, batch, dtype):
        return f"{cell.name} on {batch} rows of {hidden}, {dtype}"

    monkeypatch.setattr(engine, "explain", shape, raising=False)
    code, out, _ = coadjoint(
        "bench", "--explain", "--device", "cpu", "--cells", "gru", "--sizes", "9x3x5,8x3x5"
    )
    choice = co.Network("gru", inputs=1, hidden=1, outputs=1).engine
    assert code == 0
    first, *rest = out.splitlines()
    assert tables.cpu_model() in first
    speed = probe.describe(torch.float32)  # which was measured before, or cannot be here
    assert rest == [
        *([] if speed is None else [f"  compiled loops, a small case: {speed}"]),
        f"  gru: engine '{choice}': {choice.why}",
        "    B 3, d 5: gru on 3 rows of 5, torch.float32",
    ]


def test_our_gradients_are_recorded_before_they_are_timed():
    calls = Counter()
    runs = {
        ("plain", problems.OURS): lambda: calls.update(["plain"]),
        ("penalised", problems.OURS): lambda: calls.update(["penalised"]),
        ("plain", "cuDNN tf32"): lambda: calls.update(["cuDNN"]),
    }
    measure_module.record_ours(runs)
    most = CALLS_BEFORE_RECORDING + 1
    assert calls["plain"] == calls["penalised"] >= most
    assert "cuDNN" not in calls


def test_interrupted_it_shows_what_it_has(coadjoint, monkeypatch):
    measure = measure_module.measure_row

    def once(cell, *rest):
        if cell == "gru":
            raise KeyboardInterrupt
        return measure(cell, *rest)

    monkeypatch.setattr(tables, "measure_row", once)
    words = ["bench", *TINY, "--peers", "none", "--json", "part.json", "--write", "R.md"]
    code, out, err = coadjoint(*words)
    assert code == 130
    assert "lstm" in out
    assert err.endswith("interrupted.\n")
    found = json.loads(Path("part.json").read_text())
    assert found["interrupted"] is True
    assert [r["cell"] for r in found["rows"]] == ["elman", "lstm"]
    assert not Path("R.md").exists()


def test_a_section_is_replaced_and_the_rest_kept(coadjoint):
    page = Path("R.md")
    tables.write_section(page, result("cpu"))
    tables.write_section(page, result("cuda"))
    page.write_text(page.read_text().replace("# Benchmarks", "# Mine") + "\n## By hand\n\nkept\n")
    before = page.read_text()
    begin, end = before.index("<!-- bench cpu -->"), before.index("<!-- end of bench cpu -->")
    assert (
        coadjoint("bench", *TINY, "--cells", "lstm", "--peers", "none", "--write", "R.md")[0] == 0
    )
    after = page.read_text()
    assert after.startswith(before[:begin])
    assert after.endswith(before[end:])
    section = after[begin : after.index("<!-- end of bench cpu -->")]
    assert "| lstm | 4, 3, 5 | penalised |" in section
    assert "elman" not in section
    options = "--device cpu --sizes 4x3x5 --rows gradient --cells lstm --peers none --repeat 1"
    assert f"`coadjoint bench {options}`" in section


def test_a_busy_machine_is_named(monkeypatch):
    options = options_module.BenchOptions(
        cells=("elman",), sizes=((4, 3, 5),), peers=(), repeat=1, rows=("gradient",)
    )
    clock = SimpleNamespace(now=0.0, worked=0.0)
    clocks = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.worked)

    def measure(*_):
        clock.now, clock.worked = clock.now + 8, clock.worked + 2
        return row()

    monkeypatch.setattr(tables, "time", clocks)
    monkeypatch.setattr(tables, "measure_limits", lambda device: {})
    monkeypatch.setattr(tables, "measure_row", measure)
    found = tables.run_bench(options)
    assert found.core_share == 0.25
    assert any(
        note.startswith("The machine was busy: this process had 25%") for note in found.notes()
    )
    assert not any("busy" in note for note in result().notes())


def test_a_page_with_half_a_section_is_left_alone():
    page = Path("R.md")
    page.write_text("<!-- bench cpu -->\nhalf")
    with pytest.raises(co.InputError, match="only one of the marks"):
        tables.write_section(page, result())
    assert page.read_text() == "<!-- bench cpu -->\nhalf"


def test_threads_and_cores_are_as_before(monkeypatch):
    before = torch.get_num_threads(), options_module.available_cores()
    seen = []
    monkeypatch.setattr(
        tables,
        "measure_limits",
        lambda device: (
            seen.append((torch.get_num_threads(), len(options_module.available_cores())))
            or {"memory GB/s": 1.0}
        ),
    )
    tables.run_bench(
        options_module.BenchOptions(
            cells=("elman",), sizes=((4, 3, 5),), peers=(), repeat=1, rows=("gradient",)
        )
    )
    assert seen == [(1, 1 if hasattr(os, "sched_setaffinity") else before[1])]
    assert (torch.get_num_threads(), options_module.available_cores()) == before


LACKING = """
import sys

class Lacking:
    def find_spec(self, name, *_):
        if name == "coadjoint.cli.schema":
            raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

sys.meta_path.insert(0, Lacking())
from coadjoint.cli import main
main()
"""


def test_it_runs_without_pydantic():
    """As with those versions of typer that do not need it."""

    def run(*words):
        return subprocess.run(
            [sys.executable, "-c", LACKING, *words], capture_output=True, text=True
        )

    done = run("bench", "--explain", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "elman: engine" in done.stdout
    refused = run("train", "xor")
    assert refused.returncode == 7
    assert (
        "this command needs pydantic, which is not installed: pip install pydantic."
        in refused.stderr
    )
    assert refused.stderr.count("\n") == 1


def test_a_turn_begins_when_the_threads_of_the_one_before_are_idle(monkeypatch):
    """Their work would be counted to the next contender; work without an end is not waited for."""
    worked = iter([0.0, 0.002, 0.002, 0.004, 0.004, 0.0041])
    naps = []
    monkeypatch.setattr(clock_module.time, "process_time", lambda: next(worked))
    monkeypatch.setattr(clock_module.time, "sleep", naps.append)
    clock_module.wait_until_idle()
    assert naps == [clock_module.WAIT_SECONDS] * 3
    monkeypatch.setattr(clock_module.time, "process_time", itertools.count().__next__)
    clock_module.wait_until_idle()
    assert len(naps) == 3 + clock_module.MOST_WAITS
