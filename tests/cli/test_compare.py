"""Comparisons: words make rows, results make tables, and stopping one loses nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coadjoint.cells import library, steps
from coadjoint.cli import compared_runs, existing_runs, outcomes, program, workers
from coadjoint.cli import flags as setting_flags
from coadjoint.errors import ConfigError
from coadjoint.training import settings, storage
from coadjoint.training.report import pages, summary
from coadjoint.training.report.comparison import TERMINAL, Comparison

FEW = {"steps": 3, "every": 3, "tests": 8, "confirm": 8, "probes": 2, "batch": 2}
SMALL = {"network": {"hidden": 4}, "training": FEW}
TASKS = [
    *compared_runs.parse_tasks("xor length=12"),
    *compared_runs.parse_tasks("addition length=20 steps=2 every=2"),
]


def test_alternatives_make_rows():
    rows = compared_runs.parse_variants("p clip=1 penalty=log-ratio weight=1|2 optimiser=sgd|adam")
    assert [row.name for row in rows] == [
        f"p weight={w} optimiser={o}" for w in (1, 2) for o in ("sgd", "adam")
    ]
    assert rows[3].values == {
        "training": {"clip": 1},
        "gradient": {"penalty": "log-ratio", "weight": 2},
        "optimiser": {"name": "adam"},
    }


def test_all_cells_become_rows():
    rows = compared_runs.parse_variants("p cell=all lr=1")
    assert [row.values["network"]["cell"] for row in rows] == [*library.CELLS, *steps.STEPS]
    assert rows[0].name == "p cell=elman"
    assert [row.name for row in compared_runs.parse_variants("p cell=lru|gru")] == [
        "p cell=lru",
        "p cell=gru",
    ]


def test_a_task_can_have_its_own_settings():
    (one,) = compared_runs.parse_tasks("addition length=100 steps=7")
    assert (one.name, one.values) == (
        "addition",
        {"task": {"length": 100, "name": "addition"}, "training": {"steps": 7}},
    )
    assert [task.name for task in compared_runs.parse_tasks("copy length=20|50")] == [
        "copy length=20",
        "copy length=50",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a task takes a name"),
        ("length=3", "a task takes a name"),
        ("xorr", "'xor'"),
        ("xor lrr=1", "'lr'"),
    ],
)
def test_words_that_make_no_task_are_refused(text, why):
    with pytest.raises(ConfigError if "xorr" not in text else Exception, match=why):
        compared_runs.parse_tasks(text)


@pytest.mark.parametrize(
    ("values", "name", "title"),
    [
        ({"task": {"name": "digits"}}, "digits", "digits"),
        (
            {"task": {"name": "copy", "length": 50, "curriculum": (10, 99)}},
            "copy",
            "copy, 50 steps, curriculum 10,99",
        ),
        ({"task": {"name": "xor", "length": (10, 20)}}, "xor length=10,20", "xor, 10 to 20 steps"),
        ({"task": {"name": "xor"}}, "xor steps=20", "xor, steps 20"),
        ({"data": {"train": "a.csv"}}, "", "a.csv"),
    ],
)
def test_tasks_are_titled_by_their_settings(values, name, title):
    assert compared_runs.task_title(setting_flags.resolve(None, values), name) == title


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "takes a name"),
        ("lr=1", "takes a name"),
        ("a lr", "key=value"),
        ("a lrr=1", "unknown setting 'lrr'; did you mean 'lr'"),
        ("a foo=1", r"unknown setting 'foo'\. Settings are the flags"),
    ],
)
def test_words_that_make_no_row_are_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        compared_runs.parse_variants(text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "-"),
        ([1200.0], "1,200"),
        ([5.0, 5.0], "5"),
        ([1.0, 3.0], "2 (1 - 3)"),
        ([1.0, 2.0, 9.0], "2 (1 - 9)"),
    ],
)
def test_a_range_is_shown_beside_its_median(values, text):
    assert TERMINAL.median_and_range(values, TERMINAL.count) == text


def tables(found):
    return Comparison.of(found).tables(TERMINAL)


# steps, so that no run ends before something happens to it, however busy the machine is
ENDLESS = 100_000_000


def shorten(path, steps):
    """Let an endless run end after so many steps."""
    text = path.read_text()
    assert text.count(f"steps: {ENDLESS}\n") == 1
    path.write_text(text.replace(f"steps: {ENDLESS}\n", f"steps: {steps}\n"))


@pytest.mark.slow
def test_a_stop_saves_every_run_and_a_resume_ends_it(tmp_path):
    """SIGINT to the comparison alone: its runs are told, saved and resumed."""
    folder = tmp_path / "cmp"
    base = {
        "task": {"name": "addition", "length": 20},
        "network": {"hidden": 4},
        "optimiser": {"lr": 1e-9},
    }
    few = {"steps": ENDLESS, "every": 250, "tests": 8, "confirm": 8, "probes": 4, "batch": 2}
    compared_runs.lay_out(
        {**base, "training": few}, compared_runs.parse_variants("a"), [0, 1], folder
    )
    words = [sys.executable, "-m", "coadjoint", "resume", str(folder), "--jobs", "2"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        rows = [folder / r / "metrics.jsonl" for r in ("runs/a-seed-0", "runs/a-seed-1")]
        end = time.monotonic() + 600
        while time.monotonic() < end and not all(p.exists() and p.stat().st_size for p in rows):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 75
    assert err.count("\n") == 1
    assert f"coadjoint resume {folder}" in err
    found = settings.read_json(Path(folder / "compare.json"))
    assert [r["status"] for row in found["rows"] for r in row["runs"]] == ["interrupted"] * 2
    for r in found["rows"][0]["runs"]:
        shorten(folder / r["folder"] / "config.yaml", r["steps"] + 5)
    found = compared_runs.run_all(folder, 2)
    assert [r["status"] for row in found["rows"] for r in row["runs"]] == ["finished", "finished"]
    assert tables(found)["addition, 20 steps"][1][0][1] == "0 of 2"


# several tasks

WILD = "wild lr=1e38 optimiser=sgd activation=relu"  # its second step is not finite


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two tasks under two methods, one of which fails: the folder, compare.json, and the runs in
    the order they ended.
    """
    folder = tmp_path_factory.mktemp("several") / "cmp"
    rows = [*compared_runs.parse_variants("plain"), *compared_runs.parse_variants(WILD)]
    compared_runs.lay_out(SMALL, rows, [0], folder, "coadjoint compare ...", TASKS)
    found, ended = compared_runs.read_comparison(folder), []
    for pace, row in zip((1, 4, 3, 2), found["rows"], strict=True):
        row["pace"] = pace
    (folder / "compare.json").write_text(json.dumps(found))

    def note(done, total, what):
        if what or not ended:  # not how far the runs are that have not ended
            ended.append((done, total, (what or "").partition(":")[0]))

    found = compared_runs.run_all(folder, 1, note)
    return folder, found, ended


@pytest.mark.slow
def test_the_longest_run_is_started_first(several):
    names = (
        "",
        "xor-wild-seed-0",
        "addition-plain-seed-0",
        "addition-wild-seed-0",
        "xor-plain-seed-0",
    )
    assert several[2] == [(k, 4, name) for k, name in enumerate(names)]


@pytest.mark.slow
def test_each_row_has_its_task(several):
    folder, found, _ = several
    told = [(row["task"], row["metric"], row["goal"], row["name"]) for row in found["rows"]]
    xor, addition = (
        ("xor, 12 steps", "right", "right >= 1"),
        ("addition, 20 steps", "right_0.2", "right_0.2 >= 0.99"),
    )
    assert told == [(*task, name) for task in (xor, addition) for name in ("plain", "wild")]
    plain = settings.load(folder / "configs/addition-plain-seed-0.yaml").values
    assert (plain["training"]["steps"], plain["task"]) == (2, {"name": "addition", "length": 20})
    assert found == settings.read_json(folder / "compare.json")
    assert found["seconds"] > 0


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_of_its_task(several):
    folder, found, _ = several
    status = {Path(r["folder"]).name: r["status"] for row in found["rows"] for r in row["runs"]}
    assert status["xor-plain-seed-0"] in ("finished", "success")
    assert status["addition-wild-seed-0"] == "failed"
    heads, rows = tables(found)["addition, 20 steps"]
    assert heads[-1] == "test accuracy (within 0.2)"
    assert [row[:2] for row in rows][1] == ["wild", "0 of 1, 1 failed"]
    text = summary.markdown(folder)
    assert "| name | xor | addition |" in text
    assert "| wild | 0 of 1, 1 failed · – | 0 of 1, 1 failed · – |" in text


@pytest.mark.slow
def test_runs_of_two_tasks_compare_in_two_tables(several, tmp_path):
    folder, *_ = several
    found = existing_runs.compare_existing(
        sorted((folder / "runs").iterdir()), tmp_path / "both", None
    )
    assert {task: [row[0] for row in rows] for task, (_, rows) in tables(found).items()} == {
        task: [f"{task}-plain-seed-0", f"{task}-wild-seed-0"] for task in ("addition", "xor")
    }
    assert found["rows"][0]["settings"].keys() == {"lr", "name", "activation"}


def complain(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coadjoint", "compare", *words])
    with pytest.raises(SystemExit) as end:
        program.main()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return end.value.code, err


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(several, tmp_path, monkeypatch, capsys):
    folder, *_ = several
    monkeypatch.chdir(tmp_path)

    def told(*words):
        return complain(words, monkeypatch, capsys)

    code, err = told(str(folder / "runs/xor-plain-seed-0"), "xor", "-m", "a")
    assert (
        code,
        "is a folder, but 'xor' is not: give tasks or the folders of runs, not both" in err,
    ) == (4, True)
    code, err = told("xor length=12", "digits", "--hidden", "4", "--tests", "5", "-m", "a")
    assert (code, "task digits, --method a: --tests has no effect" in err) == (2, True)
    code, err = told(
        "xor length=12", "digits", "--hidden", "4", "-m", "a", "-m", "b cell=lru activation=relu"
    )
    assert (code, "task xor, --method b: " in err) == (2, True)
    code, err = told("xor length=12", "xor length=20", "-m", "a")
    assert (code, "two tasks share the name 'xor'" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_of_an_earlier_version_is_read(tmp_path):
    """compare.json once named task, metric and goal for all rows together."""
    one = {"task": "xor", "metric": "right", "goal": None, "rows": [{"name": "a", "runs": []}]}
    (tmp_path / "compare.json").write_text(json.dumps(one))
    found = compared_runs.read_comparison(tmp_path)
    assert found["rows"][0] == {
        "name": "a",
        "runs": [],
        "task": "xor",
        "metric": "right",
        "goal": None,
    }
    assert tables(found)["xor"][1] == [["a", "0", "-", "-"]]


def test_a_metric_that_is_not_finite_counts_for_nothing(tmp_path):
    result = {
        "status": "finished",
        "step": 3,
        "seconds": 1,
        "success": False,
        "metrics": {"test": {"right": "NaN"}},
    }
    result |= {
        "metric": "right",
        "goal": None,
        "reason": None,
        "success_step": None,
        "success_seconds": None,
        "parameters": 9,
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    r = {}
    outcomes.record_outcome(tmp_path, r, "right")
    assert (r["status"], r["metric"]) == ("finished", None)


def kill(folder, done):
    """SIGKILL to the first run; of the second, to the server that it was forked from as well."""
    killed = set()
    while not done.is_set() and len(killed) < 2:
        for lock in (folder / "runs").glob("*/lock"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(lock.read_text().split()[1])
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if pid in killed or not (lock.parent / "metrics.jsonl").exists():
                    continue
                if killed:
                    os.kill(parent, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.01)


@pytest.mark.slow
def test_runs_that_are_killed_leave_the_others_alone(tmp_path):
    folder, done = tmp_path / "cmp", threading.Event()
    base = {**SMALL, "training": {**FEW, "steps": ENDLESS, "every": 300}, "optimiser": {"lr": 1e-9}}
    compared_runs.lay_out(
        base, compared_runs.parse_variants("a"), [0, 1, 2], folder, None, TASKS[:1]
    )
    *killed, left = sorted((folder / "configs").iterdir())
    shorten(left, 300)
    killer = threading.Thread(target=kill, args=(folder, done))
    killer.start()
    try:
        found = compared_runs.run_all(folder, 1)
    finally:
        done.set()
        killer.join()
    told = [(r["status"], r["error"]) for r in found["rows"][0]["runs"]]
    lost = 255  # the code of a run whose server is gone, too
    assert told[:2] == [
        ("waiting", f"ended without an error message (exit code {code})") for code in (-9, lost)
    ]
    assert told[2] in (("finished", None), ("success", None))
    assert tables(found)["xor, 12 steps"][1][0][1].endswith("2 failed")
    for config_ in killed:
        shorten(folder / "runs" / config_.stem / "config.yaml", 300)
    found = compared_runs.run_all(folder, 1)
    assert {r["status"] for r in found["rows"][0]["runs"]} <= {"finished", "success"}


def test_a_server_that_is_just_dying_is_asked_again(monkeypatch):
    refusals = [ConnectionRefusedError(), BrokenPipeError(), EOFError()]

    class Late:
        def start(self):
            if refusals:
                raise refusals.pop()

    monkeypatch.setattr(time, "sleep", lambda _: None)
    workers.start_process(Late())
    assert refusals == []
    refusals += [ConnectionRefusedError()] * 3
    with pytest.raises(ConnectionRefusedError):
        workers.start_process(Late(), 3)


def test_success_is_counted_within_each_budget():
    """Counted within each budget of a row, with gradients beside the seconds; without budgets
    nothing is added.
    """

    def run(success, work, seconds):
        return {
            "status": "finished",
            "success": success,
            "steps": 5,
            "work": work,
            "seconds": seconds,
            "metric": 0.5,
        }

    runs = [run(True, 900, 70.0), run(True, 1100, 20.0), run(False, 5000, 99.0)]
    about = {"task": "xor", "metric": "right", "goal": "right >= 1", "settings": {}, "runs": runs}
    found = {
        "rows": [
            {**about, "name": "a", "budget": {"gradients": 1000, "seconds": 60.0}},
            {**about, "name": "b"},
        ]
    }
    heads, (a, b) = tables(found)["xor"]

    def at(row, head):
        return row[heads.index(head)]

    assert [at(a, h) for h in ("success", "in 1,000 gradients", "in 60 seconds")] == [
        "2 of 3",
        "1 of 3",
        "1 of 3",
    ]
    assert at(a, "gradients to success") == "1,000 (900 - 1,100)"
    assert [at(b, h) for h in ("success", "in 1,000 gradients", "gradients to success")] == [
        "2 of 3",
        "-",
        "-",
    ]
    plain = tables({"rows": [{**about, "name": "b"}]})["xor"][0]
    assert plain == ["method", "success", "steps to success", "seconds to success", "accuracy"]


@pytest.mark.slow
def test_a_comparison_can_have_budgets(tmp_path):
    rows = compared_runs.parse_variants("plain") + compared_runs.parse_variants(
        "penalised penalty=log-ratio"
    )
    base = {
        "task": {"name": "xor", "length": 10},
        "training": {"gradients": 200, "batch": 10, "tests": 10, "confirm": 10},
    }
    compared_runs.lay_out(base, rows, [0], tmp_path / "c")
    found = compared_runs.run_all(tmp_path / "c", 2)
    assert [row["runs"][0]["work"] for row in found["rows"]] == [200, 200]
    assert [row["runs"][0]["steps"] for row in found["rows"]] == [20, 10]
    page = pages.write(tmp_path / "c").read_text()
    assert "in 200 gradients" in page
    assert "gradients to success" in page


def owner(run):
    """The process that holds, or held, a run folder."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((run / "lock").read_text().split()[1])
    return None


def gone(pid):
    """Has a process ended? One that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def eventually(condition, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    "victim", ["comparison", pytest.param("worker", marks=pytest.mark.thorough)]
)
def test_runs_save_and_end_when_what_began_them_is_killed(tmp_path, victim):
    """SIGKILL to the comparison, or to the process between it and a run; the run would
    take hours.
    """
    folder = tmp_path / "cmp"
    long = {
        **SMALL,
        "training": {**FEW, "steps": 10_000_000, "every": 100_000, "checkpoint": 1_000_000},
    }
    compared_runs.lay_out(long, compared_runs.parse_variants("a"), [0], folder, None, TASKS[:1])
    words = [sys.executable, "-m", "coadjoint", "resume", str(folder), "--jobs", "1"]
    run, pid = folder / "runs" / "a-seed-0", None
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def begun():
            return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size

        assert eventually(begun), "the run never began"
        pid = owner(run)
        assert not gone(pid)
        if victim == "comparison":
            process.kill()
        else:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert parent != process.pid
            os.kill(parent, signal.SIGKILL)
        assert eventually(lambda: gone(pid)), "the run goes on alone"
        process.wait(300)
    finally:
        process.kill()
        process.wait()
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["reason"]) == (
        "interrupted",
        f"SIGTERM at step {result['step']}",
    )
    assert storage.load_latest(run).step == result["step"] > 0
