"""Rows of the benchmark with a limit: both sides compute the same, and a miss is shown as such."""

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import coadjoint as co
from coadjoint.cli.bench import clock, flashrnn_kernels, goals, one_step, problems, tables
from coadjoint.cli.bench import training_step as training
from coadjoint.cli.bench.measure import BenchRow
from coadjoint.cli.bench.options import BenchOptions
from sampling import one_in

TINY = ["--sizes", "4x3x5", "--repeat", "1"]
SIZE = (4, 3, 5)
FIELDS = {
    "row", "cell", "T", "B", "d", "engine", "measured", "ms", "peer", "peer ms", "ratio", "limit",
    "met", "gradients differ by", "failed",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clock, "TURN_MS", 0.01)
    monkeypatch.setattr(goals, "SHORT_TURN_MS", 0.01)
    monkeypatch.setattr(goals, "TURNS", 1)
    monkeypatch.setattr(one_step, "STEPS", 3)
    monkeypatch.setattr(training, "STEPS", 2)
    monkeypatch.setattr(
        tables, "measure_limits", lambda device: {"GEMM GFLOP/s": 50.0, "memory GB/s": 10.0}
    )


def goal(**changes):
    values = {
        "row": "own-loop", "cell": "lstm", "size": SIZE, "engine": "cpu", "measured": "own loop",
        "peer": "co.Penalised", "ms": 3.0, "peer_ms": 2.0, "limit": 1.5,
    }  # fmt: skip
    return goals.GoalRow(**{**values, **changes})


CASES = [(row, cell) for row, cells in goals.CELLS_OF_ROW.items() for cell in cells]


@pytest.mark.parametrize(("row", "cell"), one_in(2, CASES))
def test_both_sides_compute_the_same(row, cell):
    contests = tables.CONTESTS[row](cell, SIZE, "cpu", ("torch",))
    found = goals.measure_goals(row, contests, 1, "cpu")
    limits = [each.limit for each in found]
    assert goals.LIMITS[row] in limits
    assert not [line for each in found for line in each.faults()]
    compared = [each.differs for each in found if each.differs is not None]
    if row != "training-step":
        assert compared
        assert max(compared) < 1e-4


def test_a_gradient_penalty_is_not_the_plain_gradient():
    (contest,) = tables.CONTESTS["gradient-penalty"]("nn.GRU", SIZE, "cpu", ("torch",))
    penalty, plain, theirs = (run() for run in contest.runs.values())
    assert set(penalty) == set(theirs) == set(plain) - {"head.bias"}
    assert clock.relative_difference(penalty, plain) > 1e-2


def test_a_training_step_trains_and_logs(monkeypatch):
    monkeypatch.setattr(training, "RATE", 1e-2)
    contests = training.training_step("elman", (4, 3, 5), "cpu", ())
    contest = next(contests)
    assert contest.size == (10, 3, 5)  # the task has at least ten steps
    step = contest.runs["plain step"]
    inside = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    run = inside["training"].cell_contents
    before = run.net.get_parameter("W").detach().clone()
    step()
    step()
    assert (run.step, contest.steps) == (4, 2)
    assert not torch.equal(before, run.net.get_parameter("W"))
    run.folder.metrics.flush()
    rows = (run.folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in rows] == [1, 2, 3, 4]
    contests.close()
    assert not run.folder.path.exists()


def test_ctrl_c_ends_a_training_row():
    contests = training.training_step("elman", SIZE, "cpu", ())
    step = next(contests).runs["plain step"]
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        step()
    contests.close()


def test_without_safetensors_a_training_row_has_no_folder(monkeypatch):
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    contests = training.training_step("elman", SIZE, "cpu", ())
    next(contests).runs["plain step"]()
    contests.close()


def test_steps_are_compared_with_torch_alone():
    assert list(tables.CONTESTS["one-step"]("nn.LSTM", SIZE, "cpu", ("jax",))) == []
    kinds = [c.cell for c in tables.CONTESTS["one-step"]("nn.LSTM", SIZE, "cpu", ("torch",))]
    assert kinds == ["nn.LSTM"] * 2 + ["nn.LSTMCell"] * 2


def test_a_limit_is_met_or_missed():
    assert (goal().ratio, goal().is_met) == (1.5, True)
    assert str(goal()) == (
        "own-loop lstm 4x3x5: own loop 3.00 ms, 1.50x co.Penalised (limit 1.50x: met)"
    )
    assert goal(ms=3.009).is_met  # shown as 1.50x
    missed = goal(ms=3.1)
    assert missed.is_met is False
    assert missed.cells()["met"] == "no"
    assert "(limit 1.50x: missed)" in str(missed)
    assert missed.to_dict()["met"] is False
    free = goal(limit=None)
    assert free.is_met is None
    assert (free.cells()["limit"], free.cells()["met"]) == ("", "")
    assert "limit" not in str(free)
    notes = goals.goal_notes([goal(), missed, free])
    assert notes == [goals.GOAL_NOTE, "1 of 2 limits are met."]
    assert goals.goal_notes([]) == []
    assert goals.goal_table([]) == ([], [])
    assert goals.goal_notes([goal(differs=0.5)])[-1] == (
        "own-loop lstm 4x3x5: the gradient of co.Penalised differs from ours by 5.0e-01"
    )


def test_a_run_that_fails_has_no_ratio():
    def fail():
        raise RuntimeError("out of memory\nmore")

    pairs = (goals.Pair("ours", "peer", 1.5, same=True),)
    contest = goals.Contest("lstm", SIZE, "cpu", {"ours": dict, "peer": fail}, pairs)
    (found,) = goals.measure_contest("own-loop", contest, 1, "cpu")
    assert (found.peer_ms, found.ratio, found.is_met) == (None, None, False)
    assert found.ms > 0
    assert found.faults() == ["own-loop lstm 4x3x5: peer failed: out of memory"]
    assert str(found) == found.faults()[0]
    assert found.to_dict()["ratio"] is None


def test_the_time_is_that_of_a_step_and_of_the_fastest_fifth(monkeypatch):
    assert clock.fastest_fifth([5.0, 1.0, 2.0, 3.0, 4.0]) == 2.0
    assert clock.fastest_fifth([7.0, 6.0]) == 6.0
    times = {"ours": [10.0, 20.0, 30.0], "peer": [5.0, 5.0, 5.0]}
    monkeypatch.setattr(goals, "time_in_turns", lambda *given: times)
    pairs = (goals.Pair("ours", "peer", 1.1),)
    contest = goals.Contest("nn.LSTM", SIZE, "cpu", {"ours": dict, "peer": dict}, pairs, 100)
    (found,) = goals.measure_contest("one-step", contest, 1, "cpu")
    assert (found.ms, found.peer_ms, found.is_met) == (0.1, 0.05, False)


def test_gradients_have_limits_against_cudnn_and_jax():
    def goals_of(device, cell="lstm", size=(200, 64, 512), **plain):
        ms = {"plain": {"ours": 4.0, **plain}, "penalised": {"ours": 9.0, "JAX scan": 12.0}}
        row = BenchRow(cell, size, device, tuple(plain), ms, {}, {}, 1.0, 1.0)
        return [(g.measured, g.peer, g.ratio, g.limit, g.is_met) for g in row.goals(device)]

    cudnn = {"cuDNN float32": 8.0, "cuDNN tf32": 5.0, "FlashRNN bf16": 2.0}
    assert goals_of("cuda", **cudnn) == [
        ("plain", "cuDNN float32, plain", 0.5, 1.0, True),
        ("plain", "cuDNN tf32, plain", 0.8, None, None),
        ("penalised", "cuDNN float32, plain", 1.125, 1.0, False),
        ("penalised", "cuDNN tf32, plain", 1.8, None, None),
        ("plain", "FlashRNN bf16, plain", 2.0, None, None),
    ]
    assert goals_of("cuda", size=(200, 64, 2048), **cudnn)[2][3:] == (None, None)
    assert goals_of("cuda", cell="nn.LSTM", **cudnn) == []
    assert goals_of("cpu", "elman", (100, 20, 50), **{"JAX scan": 8.0}) == [
        ("plain", "JAX scan, plain", 0.5, 0.67, True),
        ("penalised", "JAX scan, penalised", 0.75, 0.67, False),
    ]
    assert goals_of("cpu", "elman", **{"JAX scan": 8.0}) == []


def test_rows_cells_and_sizes_choose():
    every = BenchOptions()
    assert {row for row, _, _ in every.goals} == set(goals.ROWS) - {"gradient"}
    assert every.goal_sizes("own-loop") == ((100, 20, 50), (200, 64, 128))
    assert every.sizes_of("nn.LSTM") == ((100, 20, 50), (200, 64, 128))
    assert ("one-step", "nn.LSTM", (1, 1, 128)) in every.goals
    some = BenchOptions(
        rows=("one-step", "own-loop"), cells=("lstm", "nn.LSTM"), sizes=((9, 3, 5), (8, 3, 5))
    )
    assert some.goals == [
        ("one-step", "nn.LSTM", (1, 3, 5)),
        ("own-loop", "lstm", (9, 3, 5)),
        ("own-loop", "lstm", (8, 3, 5)),
    ]
    assert some.grid == []
    assert some.steps == ()
    assert "--sizes 9x3x5,8x3x5 --rows one-step,own-loop --cells lstm,nn.LSTM" in some.command
    assert BenchOptions(section="Intel Xeon").command.endswith("--section 'Intel Xeon'")


def test_the_command_prints_ratio_and_limit(coadjoint, monkeypatch):
    monkeypatch.setitem(goals.LIMITS, "own-loop", 1e-9)  # missed by any machine
    words = ["bench", *TINY, "--rows", "own-loop", "--cells", "elman", "--json", "g.json"]
    code, out, err = coadjoint(*words, "--write", "R.md", "--section", "AMD")
    assert code == 0, err
    assert "1 of 1: own-loop elman 4x3x5: penalised, own loop" in err
    assert "jax" not in err  # no gradient, so it is not missed
    (line,) = [line.split() for line in out.splitlines() if line.startswith("own-loop")]
    assert line[-2:] == ["no", co.Network(inputs=1, hidden=1, outputs=1).engine]
    found = json.loads(Path("g.json").read_text())
    assert found["rows"] == []
    (row,) = found["rows with limits"]
    assert set(row) == FIELDS
    assert (row["cell"], row["T"], row["B"], row["d"]) == ("elman", *SIZE)
    assert row["ratio"] == row["ms"] / row["peer ms"]
    assert (row["limit"], row["met"], row["failed"]) == (1e-9, False, "")
    page = Path("R.md").read_text()
    assert "<!-- bench cpu AMD -->\n## CPU: AMD\n" in page
    assert "| row | cell | T, B, d | measured | ms ours | peer | ms peer | ratio | limit |" in page
    assert "| own-loop | elman | 4, 3, 5 | penalised, own loop |" in page
    assert "| 0.00x | no | " in page
    assert "- 0 of 1 limits are met." in page


def vanilla(inputs, W, b, *, function, backend, dtype):
    """FlashRNN's function, step by step: its shapes and the order of its gates."""
    assert (backend, dtype) == ("cuda_fused", "bfloat16")
    B, T, _, _, d = inputs.shape
    h, c, states = inputs.new_zeros(B, d), inputs.new_zeros(B, d), []
    for t in range(T):
        x = inputs[:, t, :, 0].unbind(1)
        r = [h @ w[0].T for w in W]
        a = b[:, 0]
        if function == "gru":
            keep = torch.sigmoid(x[1] + r[2] + a[2])
            new = torch.tanh(x[2] + a[3] + torch.sigmoid(x[0] + r[1] + a[1]) * (r[0] + a[0]))
            h = keep * h + (1 - keep) * new
        elif function == "lstm":
            i, f, z, o = (x[k] + r[k] + a[k] for k in range(4))
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
            h = torch.sigmoid(o) * torch.tanh(c)
        else:
            h = torch.tanh(x[0] + r[0] + a[0])
        states.append(h)
    out = torch.stack(states, 1)[None, :, :, None]  # [states, B, T, heads, d]
    return out, out[:, :, -1:]


@pytest.mark.parametrize("cell", problems.MODULES)
def test_flashrnn_gets_our_weights(cell, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashrnn", SimpleNamespace(flashrnn=vanilla))
    problem = problems.NetworkProblem(cell, (7, 3, 5), "cpu")
    if cell == "gru":
        with torch.no_grad():
            problem.net.get_parameter("p.b_n").fill_(0.3)
    ours = problems.ours(problem)["ours"]["plain"]()
    problem.device = "cuda"  # its arrays stay on the CPU
    theirs = problems.flashrnn(problem)["FlashRNN bf16"]["plain"]()
    assert set(theirs) == set(ours)
    assert clock.relative_difference(ours, theirs) < 0.2  # eight bits
    w = {name: weight.clone().requires_grad_() for name, weight in problem.weights.items()}

    def exact(*given, dtype, **options):
        return vanilla(*given, dtype="bfloat16", **options)

    h = flashrnn_kernels.last_output(exact, cell, problem.u, w, dtype=torch.float32)
    loss = cross_entropy(h @ w["V"].T + w["b_o"], problem.y)
    gradient = problems.gradient_by_name(loss, w)
    assert clock.relative_difference(ours, gradient) < 1e-4


def test_flashrnn_is_left_out_in_silence_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashrnn", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    present, missing = tables.drop_missing_peers(BenchOptions())
    assert present.peers == ("torch", "autograd")
    assert set(missing) == {"jax"}
    assert tables.drop_missing_peers(BenchOptions(peers=("flashrnn",)))[1] == {
        "flashrnn": "flashrnn runs on a GPU only: --device cuda."
    }
    why = flashrnn_kernels.explain_flashrnn("cuda")
    assert why.startswith("peer 'flashrnn' takes no part: flashrnn cannot be imported")
    assert why.endswith("pip install flashrnn.")
    monkeypatch.setitem(sys.modules, "flashrnn", SimpleNamespace(flashrnn=vanilla))
    assert "takes part" in flashrnn_kernels.explain_flashrnn("cuda")


def test_a_kernel_that_does_not_compile_is_a_peer_that_failed():
    problem = problems.NetworkProblem("elman", SIZE, "cpu")

    def kernel(*given, **options):
        raise ValueError("no nvcc\nmore")

    with pytest.raises(RuntimeError, match=r"^no nvcc$"):
        flashrnn_kernels.last_output(kernel, "elman", problem.u, problem.weights)
