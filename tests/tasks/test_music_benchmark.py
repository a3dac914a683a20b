"""benchmarks/music.py: which runs are listed and begun, one small run, and what rows become."""

import json
import sys
import time
from dataclasses import asdict, replace

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import music
import music_table


def row_of(run, valid, seconds=100.0, status="finished"):
    nll = {"train": valid - 0.5, "valid": valid, "test": valid + 0.1}
    by_piece = {split: value - 1 for split, value in nll.items()}
    curve = {"train": [9.0, 8.0], "valid": [9.5, valid], "valid by piece": [9.0, valid - 1]}
    return {
        "run": asdict(run),
        "status": status,
        "epochs": 50.0,
        "best epoch": 2.0,
        "seconds": seconds,
        "nll": nll,
        "nll by piece": by_piece,
        "curve": curve,
    }


def test_runs_with_a_row_are_not_listed_again():
    first, *others = music.table_runs()
    assert music.listed_runs(["table"], [row_of(first, 8.0)]) == others
    assert {(run.units, run.rate) for run in music.table_runs()} == {
        (units, rate) for units in music.UNITS for rate in music_table.RATES
    }


def test_the_best_validation_is_chosen_and_gets_other_seeds():
    base, larger = music.Run("tune", "JSB", 200), music.Run("tune", "JSB", 300)
    rows = [row_of(base, 8.6), row_of(larger, 8.4)]
    runs = music.final_runs(rows)
    assert [run.seed for run in runs] == list(music.FINAL_SEEDS)
    assert {replace(run, seed=0) for run in runs} == {replace(larger, part="final")}


def test_a_run_is_begun_only_if_it_can_end():
    long = music.Run("tune", "MuseData", 300, epochs=1000)
    short = music.Run("tune", "JSB", 100, epochs=10)
    pending = [long, short]
    assert music.next_run(pending, 60.0) == short
    assert pending == [long]
    assert music.next_run(pending, 60.0) is None
    assert music.next_run(pending, 1e6) == long


@pytest.mark.parametrize("penalty", [None, "log-ratio"])
def test_a_run_leaves_one_row_of_json(monkeypatch, tmp_path, penalty):
    import numpy as np

    from coadjoint.tasks import music as reading

    rng = np.random.default_rng(0)
    rolls = {}
    for split in reading.KEYS:
        pieces = [rng.integers(0, 2, (steps, reading.NOTES)) for steps in (7, 5, 12)]
        rolls[split] = [piece.astype(np.uint8) for piece in pieces]
    monkeypatch.setattr(reading, "read_rolls", lambda path: rolls)
    music.load.cache_clear()
    run = music.Run("tune", "JSB", 3, epochs=2, batch=2, chunk=6, penalty=penalty, weight=1.0)
    row = json.loads(json.dumps(music.train(run, str(tmp_path), time.time() + 100)))
    music.load.cache_clear()
    assert music.run_of(row) == run
    assert (row["status"], row["epochs"]) == ("finished", 2.0)
    assert [*row["nll"]] == [*row["nll by piece"]] == ["train", "valid", "test"]
    assert {len(values) for values in row["curve"].values()} == {2}


PARTS_OF_PAGE = ("means", "published", "final", "methods", "tuning")


def kept_rows():
    rows = [row_of(run, 7.0 + k / 10) for k, run in enumerate(music.table_runs())]
    penalised = replace(music.Run("tune", "JSB", 200), penalty="omega", weight=1.0)
    rows += [row_of(music.Run("tune", "JSB", 200), 8.6), row_of(penalised, 8.7, status="time")]
    rows += [row_of(run, 8.5 + run.seed / 100) for run in music.final_runs(rows)]
    return rows


def test_the_tables_hold_published_figures_beside_ours(tmp_path):
    marks = [f"<!-- music: {name} -->\nold\n<!-- music: end -->" for name in PARTS_OF_PAGE]
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", *marks, "after"]))
    music_table.write(kept_rows(), page)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert "| 200 | published |  | 6.58 | 6.03 |  |  |" in lines
    row = "| 300 | step size 1e-3, as printed | 50 (2) | 5.50 | 6.00 | 6.10 | 6.50, 7.00, 7.10 |"
    assert row in lines
    plain = "| JSB | plain | 200 units, 0.002"
    assert f"{plain} | 0 | 50 | 8.10 | 8.60 | 8.70 | none |" in lines
    assert any(line.startswith(f"{plain} | 10 to 12 | 50 | 8.11 (8.10 - 8.12) |") for line in lines)
    assert (
        "| JSB | penalised | 200 units, 0.002, `omega` 1 | 0 | 50* | 8.20 | 8.70 | 8.80 | none |"
        in lines
    )
    above = "| JSB | plain | 1 | 2, 2, 2 of 60 | 8.6000 | 8.6000 - 8.6200 | 8.7000 - 8.7200 |"
    assert above in lines
    assert "| MuseData | 8 | 1.00 to 1.00 |" in lines
    assert "| MuseData | penalised | not run |  |  |  |  |  | 6.97 |" in lines
    assert any(
        line.startswith("| 200 units, 0.002, `omega` 1 |") and "8.70*" in line for line in lines
    )


def test_the_page_has_the_tables_of_the_kept_rows():
    """Every run of the lists has one row, and all rows are of runs that came to their end."""
    rows = music.read_rows(ROOT / "benchmarks" / "music.jsonl")
    keys = [music.run_of(row).key for row in rows]
    assert len(set(keys)) == len(keys)
    listed = {run.key for run in music.table_runs() + music.tuning_runs() + music.final_runs(rows)}
    assert listed <= set(keys)
    assert {row["status"] for row in rows} == {"finished"}
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name, table in music_table.tables(rows).items():
        assert f"<!-- music: {name} -->\n{table}\n<!-- music: end -->" in page


def test_the_run_from_the_command_line_is_the_kept_one():
    kept = json.loads((ROOT / "benchmarks" / "music_command.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert kept["command"] in page.replace(" \\\n    ", " ")
    nll = [f"{kept['metrics'][split]['nll']:.2f}" for split in ("train", "valid", "test")]
    (row,) = [line for line in page.splitlines() if "music_command.json" in line]
    assert row.endswith(f"| {' | '.join(nll)} |")
    assert f"({kept['step']:,} steps), {kept['seconds']:.0f} s" in row


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="has no <!-- music: means -->"):
        music_table.write(kept_rows(), page)
    assert page.read_text() == "nothing"


@pytest.mark.parametrize("words", [["table", "--write", "page.md"], ["figure"]])
def test_a_file_that_is_not_there_is_refused(words, tmp_path, monkeypatch, capsys):
    """A name with a slip does not empty the tables of a page."""
    monkeypatch.chdir(tmp_path)
    marks = [f"<!-- music: {name} -->\nold\n<!-- music: end -->" for name in PARTS_OF_PAGE]
    page = tmp_path / "page.md"
    page.write_text("\n".join(marks))
    places = ["typo.jsonl", "a.svg"] if words == ["figure"] else ["typo.jsonl"]
    monkeypatch.setattr(sys, "argv", ["music.py", words[0], *places, *words[1:]])
    with pytest.raises(SystemExit) as end:
        music.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("error: typo.jsonl does not exist.\n")
    assert page.read_text() == "\n".join(marks)
    assert [*tmp_path.iterdir()] == [page]


@pytest.mark.slow
def test_the_figure_names_its_panels(tmp_path):
    pytest.importorskip("matplotlib")
    music_table.draw(kept_rows(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(f"{units} units" in text for units in music.UNITS)
    assert not any(line.endswith(" ") for line in text.splitlines())
