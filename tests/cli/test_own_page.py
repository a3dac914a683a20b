"""The page of a run on the user's own data, from the command line."""

import json
import math

import pytest
from typer.testing import CliRunner

from coadjoint.cli import app

FEW = ["--steps", "2", "--every", "2", "--probes", "2", "-q"]


def train(folder, *flags):
    """The text of the page and the folder of a short run."""
    done = CliRunner().invoke(app, ["train", *flags, *FEW, "-o", str(folder)])
    assert done.exit_code == 0, done.output
    return (folder / "report.html").read_text(encoding="utf-8")


def write_table(path, rows):
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    return str(path)


@pytest.mark.slow
def test_classes_of_sequences(tmp_path):
    rows = [("id", "time", "x", "label")]
    for i in range(30):
        for t in range(4):
            rows.append((f"bird-{i}", t, math.sin(i * t), ("robin", "wren", "tit")[i % 3]))
    file = write_table(tmp_path / "birds.csv", rows)
    page = train(tmp_path / "run", "--train", file, "--hidden", "3", "--at", "last")
    for words in ("Confusion matrix, test", "balanced accuracy", "Surest mistakes, test", "bird-"):
        assert words in page, words
    for words in ("goal", "successes"):
        assert words not in page, words
    examples = json.loads((tmp_path / "run/result.json").read_text())["examples"]
    assert {row["id"].split("-")[0] for row in examples} == {"bird"}
    assert examples[0]["time"] == "3"
    # a folder of 0.8.0 has no such file
    (tmp_path / "run/held_out.json").unlink()
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Confusion matrix" not in page
    assert "Example predictions" in page


def test_numbers_of_samples(tmp_path):
    rows = [("name", "a", "b", "load")]
    rows += [(f"house {i}", math.sin(i), math.cos(i), i / 7) for i in range(40)]
    file = write_table(tmp_path / "houses.csv", rows)
    flags = ("--train", file, "--id", "name", "--target", "load", "--kind", "regress")
    page = train(tmp_path / "run", *flags, "--chain", "4")
    for words in ("Prediction against true value", "Residual over prediction", "Largest errors"):
        assert words in page, words
    assert "Layers: 0 input; 1 dense 4 relu; 2 dropout; 3 dense 1." in page
    assert "house " in page
    kept = json.loads((tmp_path / "run/held_out.json").read_text())["splits"]["test"]["kept"]
    truth = {name: load for name, _, _, load in rows[1:]}
    for name, load in zip(kept["ids"], kept["true"][0], strict=True):
        assert load == pytest.approx(truth[name], rel=1e-5)


def test_a_forecast_of_a_series(tmp_path):
    rows = [("date", "x")]
    for k in range(60):
        rows.append((f"2024-{1 + k // 28:02d}-{1 + k % 28:02d}", math.sin(k / 3)))
    file = write_table(tmp_path / "series.csv", rows)
    flags = ("--train", file, "--time", "date", "--kind", "next", "--irregular", "allow")
    page = train(tmp_path / "run", *flags, "--window", "10", "--hidden", "3")
    assert "The series and its forecasts" in page
    assert "2024-03-04" in page  # the last row
