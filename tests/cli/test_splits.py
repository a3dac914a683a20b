"""The split on the command line: honoured, refused in one line, named, kept, and ranked by."""

import json
from pathlib import Path

import numpy as np
import pytest

from coadjoint.cli import build, outcomes
from coadjoint.tasks import shares
from coadjoint.training import settings
from coadjoint.training.report import pages
from coadjoint.training.report.comparison import PAGE, TERMINAL, Comparison

QUICK = ("--hidden", "3", "--batch", "8", "--probes", "2", "--epochs", "3")


def write_table(name, n, seed):
    """n sequences of four rows whose label is the sign of their drift."""
    rng = np.random.default_rng(seed)
    lines = ["id,a,label"]
    for i in range(n):
        drift = (-1) ** i
        lines += [f"s{i},{drift * t + rng.normal():.3f},{'du'[drift > 0]}" for t in range(4)]
    Path(name).write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for seed, (name, n) in enumerate((("train", 20), ("valid", 6), ("test", 8), ("few", 3))):
        write_table(f"{name}.csv", n, seed)


def config_of(run):
    return settings.load(Path(run) / "config.yaml").values


def rows_of(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_a_validation_share_is_split_off_beside_a_test_file(coadjoint):
    command = ("train", "--train", "train.csv", "--test", "test.csv", *QUICK, "--patience", "9")
    code, out, err = coadjoint(*command, "--out", "run")
    assert (code, err) == (0, "")
    assert config_of("run")["data"]["split"] == [0.8, 0.2]
    assert {row["split"] for row in rows_of("run") if row["kind"] == "held-out"} == {"valid"}
    result = json.loads(Path("run/result.json").read_text())
    assert set(result["metrics"]) == {"train", "valid", "test"}
    assert result["best_step"] is not None
    lines = out.splitlines()
    progress = [line for line in lines if line.startswith("train ") and "/" in line]
    assert progress
    assert all("  valid accuracy " in line for line in progress)
    assert f"at the best step ({result['best_step']}), by valid accuracy:" in lines
    for split in ("train", "valid", "test"):
        assert any(line.startswith(f"{split}: loss ") for line in lines)
    page = pages.write(Path("run")).read_text()
    for words in ("valid accuracy", "test accuracy", "Valid accuracy", "by valid accuracy"):
        assert words in page


def test_shares_beside_a_test_file_are_honoured(coadjoint):
    command = ("train", "--train", "train.csv", "--test", "test.csv", *QUICK, "--quiet")
    assert coadjoint(*command, "--split", "0.5,0.5", "--out", "run")[0] == 0
    assert config_of("run")["data"]["split"] == [0.5, 0.5]
    rows = [row for row in rows_of("run") if row["kind"] == "held-out"]
    assert {(row["split"], row["sequences"]) for row in rows} == {("valid", 10)}


REFUSED = [
    (("--test", "test.csv", "--split", "0.8,0.1,0.1"), "Pass --split 0.9,0.1,0, or leave --test"),
    (("--valid", "valid.csv", "--split", "0.7,0.2,0.1"), "Pass --split 0.9,0,0.1, or leave --val"),
    (("--test", "test.csv", "--valid", "valid.csv", "--split", "1,0,0"), "leave --split out."),
    (("--test", "test.csv", "--split", "1,0,0", "--patience", "3"),
        "--patience needs a validation set, and --split gives it no share: pass --split 0.8,0.2,"),
    (("--train", "few.csv", "--test", "test.csv", "--patience", "3"),
        "--patience needs a validation set, and few.csv is too small to split one off: give"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_a_contradiction_is_refused_in_one_line(coadjoint, words, line):
    code, _, err = coadjoint("train", "--train", "train.csv", *words, "--out", "run")
    assert code == 2
    assert line in err
    assert len(err.splitlines()) == 1
    assert not Path("run").exists()


def test_without_a_validation_set_the_last_step_and_the_test_set_are_named(coadjoint):
    command = ("train", "--train", "few.csv", "--test", "test.csv", *QUICK, "--out", "run")
    code, out, _ = coadjoint(*command)
    assert code == 0
    assert "few.csv has 3 sequences, too few to split a validation set off" in out
    assert "  test accuracy " in out
    assert "at the last step (3):" in out
    assert config_of("run")["data"]["split"] == [1.0, 0.0]
    assert "at the last step (3)" in Path("run/report.html").read_text()


@pytest.mark.parametrize("split", [None, (0.7, 0.3, 0.0)])
def test_a_run_of_0_8_is_resumed_without_a_validation_set(coadjoint, monkeypatch, split):
    """It used the whole training file beside a test file, whatever --split said."""
    command = [
        "train",
        "--train",
        "train.csv",
        "--test",
        "test.csv",
        "--quiet",
        "--schedule",
        "constant",
        *QUICK[:-1],
    ]
    with monkeypatch.context() as as_it_was:
        as_it_was.setattr(shares, "choose_shares", lambda *given: shares.WHOLE)
        as_it_was.setattr(build, "resolved_split", lambda task: split)
        assert coadjoint(*command, "2", "--out", "old")[0] == 0
        assert coadjoint(*command, "4", "--out", "whole")[0] == 0
    steps = config_of("whole")["training"]["steps"]
    code, _, err = coadjoint("resume", "old", "--steps", str(steps), "--quiet")
    assert (code, err) == (0, "")
    assert config_of("old")["data"].get("split") == (list(split) if split else None)
    assert rows_of("old") == rows_of("whole")
    assert coadjoint("diagnose", "old", "--only", "decay", "--quiet")[0] == 0


def test_a_run_with_a_share_is_resumed_with_it(coadjoint):
    command = (
        "train",
        "--train",
        "train.csv",
        "--test",
        "test.csv",
        "--quiet",
        "--schedule",
        "constant",
        *QUICK[:-1],
    )
    assert coadjoint(*command, "2", "--out", "run")[0] == 0
    assert coadjoint(*command, "4", "--out", "whole")[0] == 0
    steps = config_of("whole")["training"]["steps"]
    assert coadjoint("resume", "run", "--steps", str(steps), "--quiet")[0] == 0
    assert rows_of("run") == rows_of("whole")


def test_a_chain_has_a_validation_share_too(coadjoint):
    rows = [f"{k % 5},{k % 3},{'ud'[k % 2]}" for k in range(30)]
    Path("samples.csv").write_text("a,b,label\n" + "\n".join(rows[:20]) + "\n")
    Path("more.csv").write_text("a,b,label\n" + "\n".join(f"9{row}" for row in rows[20:]) + "\n")
    command = ("train", "--train", "samples.csv", "--test", "more.csv", "--chain", "4", "--quiet")
    assert coadjoint(*command, "--epochs", "2", "--out", "run")[0] == 0
    assert config_of("run")["data"]["split"] == [0.8, 0.2]


# comparisons


def compared(metrics, metric="accuracy"):
    """The rows of compare.json, from {name: the metrics of its runs by split}."""
    rows = []
    for name, runs in metrics.items():
        entries = []
        for k, by_split in enumerate(runs):
            result = {"status": "finished", "step": 3, "seconds": 1.0, "success": False}
            result |= {"metric": metric, "goal": None, "reason": None, "parameters": 9}
            result |= {"success_step": None, "success_seconds": None}
            result["metrics"] = {split: {metric: value} for split, value in by_split.items()}
            folder = Path(f"{name}-{k}")
            folder.mkdir()
            (folder / "result.json").write_text(json.dumps(result))
            entry = {"seed": k, "folder": folder.name}
            outcomes.record_outcome(folder, entry, metric)
            entries.append(entry)
        rows.append({"task": "t", "metric": metric, "goal": None, "name": name, "runs": entries})
    return Comparison.of({"rows": rows}).tasks[0]


@pytest.mark.parametrize(("metric", "order"), [("accuracy", "cab"), ("mse", "bac")])
def test_rows_are_ranked_by_validation_and_the_test_set_is_marked(metric, order):
    """b is the best on the test set, and the last on the validation set."""
    task = compared(
        {
            "a": [{"valid": 0.6, "test": 0.2}],
            "b": [{"valid": 0.1, "test": 0.9}, {"valid": 0.2, "test": 0.8}],
            "c": [{"valid": 0.7, "test": 0.1}],
        },
        metric,
    )
    heads, rows = task.table(TERMINAL)
    assert heads[-2:] == [f"valid {metric}", f"test {metric} (not used for ranking)"]
    assert "".join(row[0] for row in rows) == order
    by_name = {row[0]: row[-2:] for row in rows}
    assert by_name["b"] == ["0.15 (0.1 - 0.2)", "0.85 (0.8 - 0.9)"]
    assert task.ranking_note(str).startswith(f"Ranked by valid {metric}, best first;")
    assert task.table(PAGE)[0][-2] == f"final valid {metric}"


def test_tasks_without_a_validation_set_are_not_ranked_and_name_the_test_set():
    task = compared({"a": [{"test": 0.2}], "b": [{"test": 0.9}]})
    heads, rows = task.table(TERMINAL)
    assert heads[-1] == "test accuracy"
    assert [row[0] for row in rows] == ["a", "b"]
    assert task.ranking_note(str) == ""


def test_validation_and_test_are_not_ranked_together():
    task = compared({"a": [{"test": 0.2}], "b": [{"valid": 0.9, "test": 0.8}]})
    heads, rows = task.table(TERMINAL)
    assert heads[-2] == "accuracy (valid, or else test)"
    assert [row[0] for row in rows] == ["a", "b"]


def test_a_comparison_of_0_8_keeps_its_order_and_its_words():
    rows = []
    for name, value in (("a", 0.2), ("b", 0.9)):
        run = {"seed": 0, "folder": f"runs/{name}", "status": "finished", "metric": value}
        rows.append({"task": "t", "metric": "accuracy", "goal": None, "name": name, "runs": [run]})
    heads, cells = Comparison.of({"rows": rows}).tasks[0].table(TERMINAL)
    assert heads[-1] == "accuracy"
    assert [(row[0], row[-1]) for row in cells] == [("a", "0.2"), ("b", "0.9")]


def test_runs_on_own_data_are_ranked_by_validation(coadjoint):
    command = ("train", "--train", "train.csv", "--test", "test.csv", *QUICK, "--quiet")
    command = (*command, "--readout", "last", "--schedule", "constant")
    for name, lr in (("still", "1e-9"), ("good", "1e-1")):
        assert coadjoint(*command, "--lr", lr, "--out", name)[0] == 0
    code, out, _ = coadjoint("compare", "still", "good", "--out", "both")
    assert code == 0
    assert "Ranked by valid accuracy, best first" in out
    assert "test accuracy (not used for ranking)" in out
    assert out.index("\ngood ") < out.index("\nstill ")
    rows = json.loads(Path("both/compare.json").read_text())["rows"]
    (run,) = [row["runs"][0] for row in rows if row["name"] == "good"]
    metrics = json.loads(Path("good/result.json").read_text())["metrics"]
    found = (run["split"], run["metric"], run["test"])
    assert found == ("valid", metrics["valid"]["accuracy"], metrics["test"]["accuracy"])
    page = Path("both/report.html").read_text()
    assert "Valid accuracy of every run" in page
    assert "Ranked by valid accuracy" in page
