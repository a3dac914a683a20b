"""`coadjoint evaluate`: tables, JSON and a page of metrics on labelled data."""

import json
import math
import re

import pytest

SMALL = "--hidden 4 --steps 3 --batch 8 --probes 2 --quiet --out run"


def write_waves(path, labels=("slow", "fast")):
    lines = ["id,time,x,label"]
    for i in range(24):
        for t in range(6):
            lines.append(f"s{i},{t},{math.sin(t * (1 + i % 2)) + i / 50:.4f},{labels[i % 2]}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def here(tmp_path, monkeypatch, coadjoint):
    monkeypatch.chdir(tmp_path)
    write_waves(tmp_path / "waves.csv")
    assert coadjoint("train", "--train", "waves.csv", *SMALL.split())[0] == 0
    return tmp_path


def test_tables_json_and_page(here, coadjoint):
    code, out, err = coadjoint(
        "evaluate", "run", "waves.csv", "--resamples", "40", "--json", "figures.json"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    too_good = "20 of 24 sequences were used for training: these figures are too good."
    assert lines[:2] == [too_good, "24 sequences"]
    assert re.search(r"^ +network +95% interval +majority$", out, re.MULTILINE)
    assert re.search(r"^accuracy +[\d.]+ +[\d.]+ to [\d.]+ +0\.5$", out, re.MULTILINE)
    assert re.search(r"^slow +12 ", out, re.MULTILINE)
    assert "Intervals hold 95% of 40 resamples of 24 sequences (bootstrap, seed 0)." in lines
    figures = json.loads((here / "figures.json").read_text())
    accuracy = figures["metrics"]["accuracy"]
    assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]
    assert figures["notes"] == [too_good]
    assert figures["support"] == {"fast": 12, "slow": 12}
    assert sum(map(sum, figures["confusion"])) == 24
    page = (here / "run" / "evaluation.html").read_text()
    assert "run on waves.csv" in page
    assert too_good in page
    assert "Confusion matrix" in page
    assert ", evaluation" not in page
    assert "Run it again" in page
    assert "evaluate run waves.csv --resamples 40" in page
    assert "95% interval" in page


def test_the_seed_decides_the_intervals(here, coadjoint):
    options = ("evaluate", "run", "waves.csv", "--resamples", "30", "--json", "-")
    first, again, other = (
        json.loads(coadjoint(*options, "--seed", seed)[1]) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first["metrics"] != other["metrics"]


def test_unknown_labels_and_lacking_targets_are_named(here, coadjoint):
    write_waves(here / "other.csv", ("slow", "fastest"))
    code, _, err = coadjoint("evaluate", "run", "other.csv")
    assert code != 0
    assert "label 'fastest' does not occur in the training file, whose labels are" in err
    (here / "bare.csv").write_text("id,time,x\na,0,1\na,1,2\n")
    code, _, err = coadjoint("evaluate", "run", "bare.csv")
    assert code != 0
    assert "there is no column 'label' for --target" in err


def test_a_target_may_be_called_otherwise(here, coadjoint):
    text = (here / "waves.csv").read_text().replace("label", "speed", 1)
    (here / "other.csv").write_text(text)
    code, out, _ = coadjoint(
        "evaluate", "run", "other.csv", "--target", "speed", "--resamples", "0", "--page", "p.html"
    )
    assert code == 0
    assert "Intervals" not in out
    assert (here / "p.html").exists()


def test_numbers_at_every_row(here, coadjoint):
    rows = [f"{t},{math.sin(t / 3):.4f},{math.cos(t / 3) + 9:.4f}" for t in range(60)]
    (here / "s.csv").write_text("\n".join(["day,x,y", *rows]) + "\n")
    words = "--kind next --window 10 --time day --hidden 4 --steps 2 --batch 4 --probes 2 --quiet"
    assert coadjoint("train", "--train", "s.csv", *words.split(), "--out", "next")[0] == 0
    code, out, _ = coadjoint("evaluate", "next", "s.csv", "--resamples", "20", "--level", "0.8")
    assert code == 0
    assert "1 sequence, 59 targets" in out
    assert "last value" in out
    assert "blocks of 8 rows" in out
    assert re.search(r"^y +[\d.]+ \(", out, re.MULTILINE)


def test_a_run_that_has_not_finished_is_used_with_its_best_weights(here, coadjoint):
    (here / "run" / "model.safetensors").unlink()
    code, _, err = coadjoint("predict", "run", "waves.csv")
    assert code == 0
    assert "run has not finished: it is used with its best weights so far" in err
    assert "coadjoint resume run" in err
    assert coadjoint("evaluate", "run", "waves.csv", "--resamples", "0")[0] == 0


def test_errors_about_data_name_flags(here, coadjoint):
    text = (here / "waves.csv").read_text().replace("id", "name", 1)
    (here / "other.csv").write_text(text)
    code, _, err = coadjoint("evaluate", "run", "other.csv")
    assert code == 3
    assert "no column 'id', which the training file has: pass --id NAME if it is called" in err
