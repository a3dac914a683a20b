"""`coadjoint prepare`, and training on what it writes."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from coadjoint.cli import main

SHORT = ["--cell", "gru", "--hidden", "3", "--batch", "4", "--every", "6", "--quiet"]
SHORT += ["--schedule", "constant", "--patience", "50"]


def run(*words):
    """The exit code of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["coadjoint", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    return 0


def write_table(path, n=15, T=7, seed=0):
    draw = np.random.default_rng(seed)
    rows = ["id,time,a,b,label"]
    for i in range(n):
        for t in range(T):
            a, b = draw.normal(size=2).round(3)
            rows.append(f"{path.stem}{i},{t},{a},{b},{'up' if i % 2 else 'down'}")
    path.write_text("\n".join(rows) + "\n")
    return path


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_training_on_a_prepared_set_has_the_weights_of_the_table(tmp_path, capsys):
    table = write_table(tmp_path / "d.csv")
    test = write_table(tmp_path / "e.csv", 6, seed=1)
    for path in (table, test):
        out = path.with_suffix(".co")
        assert run("prepare", path, "--kind", "classify", "--out", out, "--quiet") == 0
    assert run("train", "--train", table, "--test", test, "--kind", "classify", "--steps", 12,
               "--out", tmp_path / "table", *SHORT) == 0  # fmt: skip
    sets = ["--train", tmp_path / "d.co", "--test", tmp_path / "e.co"]
    assert run("train", *sets, "--steps", 12, "--out", tmp_path / "set", *SHORT) == 0
    expected = weights(tmp_path / "table")
    found = weights(tmp_path / "set")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    # A run that goes on has the weights of one that was not interrupted.
    assert run("train", *sets, "--steps", 6, "--out", tmp_path / "half", *SHORT) == 0
    assert run("resume", tmp_path / "half", "--steps", 12, "--quiet") == 0
    going_on = weights(tmp_path / "half")
    assert all(np.array_equal(going_on[name], expected[name]) for name in expected)
    capsys.readouterr()
    for data in ("e.csv", "e.co"):
        out = tmp_path / f"{data}.predictions.csv"
        assert run("predict", tmp_path / "set", tmp_path / data, "--out", out) == 0
        page = tmp_path / f"{data}.html"
        assert run("evaluate", tmp_path / "set", tmp_path / data, "--page", page) == 0
    one, other = (tmp_path / f"{name}.predictions.csv" for name in ("e.csv", "e.co"))
    assert one.read_text() == other.read_text()


@pytest.mark.slow
def test_compare_and_tune_take_a_prepared_set(tmp_path):
    pytest.importorskip("optuna")
    table = write_table(tmp_path / "d.csv", 30)
    out = tmp_path / "d.co"
    assert run("prepare", table, "--kind", "classify", "--out", out, "--quiet") == 0
    given = ["--train", out, "--steps", 2, "--jobs", 1, *SHORT]
    assert run("compare", "-m", "plain", "--seeds", 1, "--out", tmp_path / "c", *given) == 0
    assert run("tune", "--trials", 1, "--out", tmp_path / "t", *given) == 0
    assert (tmp_path / "t" / "best" / "model.safetensors").exists()


def test_progress_moves_within_a_file(tmp_path, monkeypatch):
    from coadjoint.tasks import chunks
    from coadjoint.tasks.files import text
    from coadjoint.tasks.files.sheet import Options
    from coadjoint.tasks.preparing import prepare

    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 2000)
    monkeypatch.setattr(text, "ROWS_PER_BLOCK", 2000)
    table = write_table(tmp_path / "d.csv", 3000, 30)  # larger than what is read at once
    out = tmp_path / "d.co"
    out.mkdir()
    shares = []
    prepare([table], out, Options(kind="classify"), progress=lambda k, share: shares.append(share))
    assert 0 < shares[0] < 0.7
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_what_is_refused(tmp_path, capsys):
    table = write_table(tmp_path / "d.csv")
    out = tmp_path / "d.co"
    cases = {
        ("--wide", "--time", "time"): "a row is a whole sequence. Leave it out",
        ("--wide", "--categorical", "a"): "are the steps of one feature",
        ("--window", "5"): "coadjoint train",
    }
    for flags, words in cases.items():
        assert run("prepare", table, "--kind", "classify", "--out", out, *flags) == 2
        assert words in capsys.readouterr().err
    assert run("prepare", tmp_path / "no*.csv", "--kind", "classify", "--out", out) == 3
    assert run("prepare", table, "--kind", "classify") == 2
    assert run("prepare", table, "--kind", "classify", "--out", table / "x.co") == 3
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "u.ts").write_text("@data\n")
    assert run("prepare", tmp_path / "u.ts", "--kind", "next", "--out", out) == 2
    assert "is read as a whole: pass it to train" in capsys.readouterr().err
    assert not out.exists()
    assert not list(tmp_path.glob(".d.co*"))


def test_existing_folders_stay_unless_forced(tmp_path, capsys):
    table = write_table(tmp_path / "d.csv")
    out = tmp_path / "d.co"
    words = ["prepare", table, "--kind", "classify", "--out", out, "--quiet"]
    assert run(*words) == 0
    assert run(*words) == 2
    assert "--force" in capsys.readouterr().err
    assert run(*words, "--force") == 0
    assert run("prepare", out, "--check") == 0
    (tmp_path / "other").mkdir()
    assert run("prepare", table, "--kind", "classify", "--out", tmp_path / "other", "--force") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.co", "d.csv", "other"]


def test_patterns_and_folders_are_tables(tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    for name in ("a", "b"):
        write_table(tmp_path / "parts" / f"{name}.csv", 4)
    for k, given in enumerate(("parts", "parts/*.csv")):
        out = tmp_path / f"{k}.co"
        assert run("prepare", tmp_path / given, "--kind", "classify", "--out", out) == 0
        assert "56 rows in 8 sequences" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_looks_whole(tmp_path):
    table = tmp_path / "d.csv"
    write_table(table, 3000, 20)
    command = [sys.executable, "-m", "coadjoint", "prepare", str(table), "--kind", "classify"]
    child = subprocess.Popen([*command, "--out", str(tmp_path / "d.co")])
    while not list(tmp_path.glob(".d.co.*/u.npy")):  # it has begun to write
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "d.co").exists()
    assert not list(tmp_path.glob(".d.co.*/description.json"))
