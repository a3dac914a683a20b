"""benchmarks/hold.py: its table is the one of docs/results.md, its gradients those of a loop."""

import sys
import time

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import hold

ROWS = hold.read_rows(ROOT / "benchmarks" / "hold.jsonl")


def test_the_page_has_the_table_of_the_kept_rows(capsys):
    hold.print_table(ROWS)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page


def test_every_method_has_the_same_settings_seeds_and_budget():
    by_method = {}
    for row in ROWS:
        length, lr, method, seed, steps = hold.key(row)
        by_method.setdefault(method, set()).add((length, lr, seed, steps))
        assert row["success"] == (row["done"] < steps or row["curve"][-1] >= hold.GOAL)
        assert not row["error"]
    wanted = {(T, lr, seed, 12_000) for T, lr in hold.SETTINGS for seed in hold.SEEDS}
    assert by_method == dict.fromkeys(hold.METHODS, wanted)
    assert len(ROWS) == 45


def test_its_gradients_are_those_of_a_loop(capsys):
    hold.check("cpu")
    lines = capsys.readouterr().out.splitlines()
    differences = [float(line.split()[-1]) for line in lines]
    assert len(differences) == 4  # exact and held, in float32
    assert max(differences) < 1e-4


@pytest.mark.parametrize("method", hold.METHODS)
def test_a_small_run_becomes_a_row(method):
    run = hold.Run(10, 1e-3, method, 100, 2)
    row = hold.train(run, "cpu", time.time() + 600)
    assert hold.key(row) == (10, 1e-3, method, 100, 2)
    assert (row["done"], row["success"], row["cut"], row["error"]) == (2, False, False, "")
    assert row["weight"] == (0.0 if method == "plain" else 4.0)
    assert 0 < row["accuracy"] < 1
    late = hold.train(run, "cpu", time.time() - 1)  # no time left
    assert late["cut"]
