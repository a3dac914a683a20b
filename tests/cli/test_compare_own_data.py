"""Comparisons on your own data: runs have the defaults of train, and the page says which."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from coadjoint.cli import compare, compared_runs, program
from coadjoint.cli import flags as setting_flags
from coadjoint.errors import StorageError
from coadjoint.training import settings
from coadjoint.training.report import pages

RNG = np.random.default_rng(7)
GRU = "defaults for your data: gru of 64 units, both directions, mean over steps, lr 0.01, "


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    u = RNG.normal(size=(40, 6, 2)).astype(np.float32)
    np.savez("waves.npz", u=u, y=np.array(["a", "b"])[np.arange(40) % 2])


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["coadjoint", *words])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert not end.value.code


def lay_out(monkeypatch, *words):
    """The folder of a comparison whose runs do not start."""
    monkeypatch.setattr(compare, "run_in", lambda *_: None)
    run(monkeypatch, "compare", "--train", "waves.npz", "--out", "cmp", *words)
    return Path("cmp")


def config_of(folder):
    return settings.load(Path(folder) / "config.yaml").values


@pytest.mark.slow
def test_a_run_has_the_settings_of_train(monkeypatch, capsys):
    words = ["--train", "waves.npz", "--epochs", "1", "--quiet"]
    run(monkeypatch, "compare", *words, "-m", "plain", "--seeds", "1", "--out", "cmp")
    run(monkeypatch, "train", *words, "--out", "alone")
    alone = config_of("alone")
    assert config_of("cmp/runs/plain-seed-0") == alone
    assert alone["network"]["bidirectional"] is True
    assert (alone["optimiser"]["lr"], alone["optimiser"]["schedule"]) == (0.01, "cosine")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["classify", "next"])
def test_only_what_was_given_is_stored(monkeypatch, kind):
    words = ["--kind", kind, "--epochs", "1", "--seeds", "1", "-m", "plain cell=gru"]
    folder = lay_out(monkeypatch, *words)
    stored = settings.load(folder / "configs/plain-seed-0.yaml").values
    assert stored == {
        "data": {"train": "waves.npz", "kind": kind},
        "network": {"cell": "gru"},
        "training": {"epochs": 1, "seed": 0},
    }


def test_what_the_defaults_chose_is_printed_once(monkeypatch, capsys):
    words = ["--epochs", "1", "--seeds", "2", "-m", "a", "-m", "b lr=0.01|0.02"]
    lay_out(monkeypatch, *words)
    lines = capsys.readouterr().out.splitlines()
    other = GRU.replace("lr 0.01, ", "")
    assert lines == [
        f"a: {GRU}cosine, batch 16, clip 1",
        f"b lr=0.01, b lr=0.02: {other}cosine, batch 16, clip 1",
    ]


def test_the_page_lists_the_settings_of_all_runs_and_those_that_differ(monkeypatch):
    folder = lay_out(monkeypatch, "--epochs", "1", "--seeds", "1", "-m", "a", "-m", "b cell=elman")
    found = compared_runs.read_comparison(folder)
    assert found["shared"]["training"]["steps"] == 2
    assert found["shared"]["network"]["hidden"] == 64
    assert "seed" not in found["shared"]["training"]
    assert [row["others"]["network"]["cell"] for row in found["rows"]] == ["gru", "elman"]
    assert [row["others"]["optimiser"]["lr"] for row in found["rows"]] == [0.01, 0.001]
    html = pages.write(folder).read_text(encoding="utf-8")
    for text in ("Settings of all runs", "Settings that differ", "a.cell", "b.lr"):
        assert text in html
    heads, rows = compared_runs_table(found)
    assert heads[:2] == ["name", "cell"]
    assert [row[:2] for row in rows] == [["a", "gru"], ["b", "elman"]]


def compared_runs_table(found):
    from coadjoint.training.report.comparison import PAGE, Comparison

    (task,) = Comparison.of(found).tasks
    return task.table(PAGE)


def test_a_comparison_without_these_settings_has_the_page_it_had(monkeypatch):
    folder = lay_out(monkeypatch, "--epochs", "1", "--seeds", "1", "-m", "a", "-m", "b cell=elman")
    found = compared_runs.read_comparison(folder)
    found.pop("shared")
    for row in found["rows"]:
        row.pop("others")
    (folder / "compare.json").write_text(json.dumps(found))
    html = pages.write(folder).read_text(encoding="utf-8")
    assert "Settings of all runs" not in html
    assert "b.cell" in html


def test_a_comparison_of_an_earlier_version_goes_on_with_the_settings_it_has(monkeypatch):
    """Its files also hold the defaults of all keys, which count as given for its runs."""
    words = ["--epochs", "1", "--seeds", "1", "-m", "a"]
    path = lay_out(monkeypatch, *words) / "configs/a-seed-0.yaml"
    config = setting_flags.resolve(settings.load(path))
    settings.dump(setting_flags.to_plain_dict(config), path)
    before = path.read_bytes()
    lay_out(monkeypatch, *words, "--continue")
    assert path.read_bytes() == before
    base = {"data": {"train": "waves.npz"}, "training": {"epochs": 2}}
    rows = compared_runs.parse_variants("a")
    with pytest.raises(StorageError, match="has other settings"):
        compared_runs.lay_out(base, rows, [0], Path("cmp"), go_on=True)
