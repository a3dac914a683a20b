"""Comparisons: rows from words, tables from results, and a stop that loses nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coadjoint import compare, settings
from coadjoint.errors import ConfigError


def test_alternatives_make_rows():
    rows = compare.variants("p clip=1 penalty=log-ratio weight=1|2 optimiser=sgd|adam")
    assert [row.name for row in rows] == [f"p weight={w} name={o}" for w in (1, 2) for o in ("sgd", "adam")]
    assert rows[3].values == {
        "training": {"clip": 1},
        "gradient": {"penalty": "log-ratio", "weight": 2},
        "optimiser": {"name": "adam"},
    }


@pytest.mark.parametrize(
    ("text", "why"), [("", "takes a name"), ("lr=1", "takes a name"), ("a lr", "key=value"), ("a lrr=1", "'lr'")]
)
def test_words_that_make_no_row(text, why):
    with pytest.raises(ConfigError, match=why):
        compare.variants(text)


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "-"), ([None], "-"), ([1200.0], "1,200"), ([1.0, None, 3.0], "2 (1 - 3)"), ([1.0, 2.0, 9.0], "2 (1 - 9)")],
)
def test_spread(values, text):
    assert compare.spread(values) == text


def test_a_stop_saves_every_run_and_a_resume_ends_it(tmp_path):
    """SIGINT to the comparison alone: its runs are told, saved and resumed."""
    folder = tmp_path / "cmp"
    base = {"task": {"name": "addition", "length": 20}, "network": {"hidden": 4}}
    few = {"steps": 500, "every": 250, "tests": 8, "confirm": 8, "probes": 4, "batch": 2}
    compare.start({**base, "training": few}, compare.variants("a"), [0, 1], folder)
    words = [sys.executable, "-m", "coadjoint", "resume", str(folder), "--jobs", "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        rows = [folder / r / "metrics.jsonl" for r in ("runs/a-seed-0", "runs/a-seed-1")]
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(p.exists() and p.stat().st_size for p in rows):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.count("\n") == 1
    assert f"coadjoint resume {folder}" in err
    found = settings.read_json(Path(folder / "compare.json"))
    assert {r["status"] for row in found["rows"] for r in row["runs"]} <= {"interrupted", "finished"}
    found = compare.run(folder, 2)
    assert [r["status"] for row in found["rows"] for r in row["runs"]] == ["finished", "finished"]
    assert compare.table(found)[1][0][1] == "0 of 2"
