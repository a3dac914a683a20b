"""Run folders of earlier versions stay usable.

tests/data holds a folder of each kind, as that version wrote it. Each can be resumed, reported and
predicted from, and gives the numbers that its own version gave.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from paths import DATA

VERSIONS = sorted(path.name.removeprefix("folders-") for path in DATA.glob("folders-*"))


@pytest.fixture(params=VERSIONS)
def folders(request, tmp_path):
    """The folders of a version, copied, so that they can be written to."""
    return Path(shutil.copytree(DATA / f"folders-{request.param}", tmp_path / "folders"))


def test_there_are_folders_of_version_0_6_1():
    assert "0.6.1" in VERSIONS


def test_a_run_is_resumed(folders, coadjoint):
    """Twenty steps more: the losses are those that the version itself would have gone on with, to
    rounding.
    """
    assert coadjoint("resume", str(folders / "run"), "--steps", "40", "--quiet")[0] == 0
    rows = [
        json.loads(line) for line in (folders / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    found = {str(row["step"]): row["loss"] for row in rows if row["kind"] == "train"}
    expected = json.loads((folders / "resumed.json").read_text())["losses of the steps after 20"]
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-4)
    assert json.loads((folders / "run" / "result.json").read_text())["status"] == "finished"


def test_a_run_is_reported(folders, coadjoint):
    for name in ("run", "data"):
        assert coadjoint("report", str(folders / name))[0] == 0
        assert (folders / name / "report.html").stat().st_size > 10_000


def test_a_model_predicts(folders, coadjoint):
    out = folders / "now.csv"
    assert (
        coadjoint(
            "predict", *map(str, (folders / "data", folders / "train.csv")), "--out", str(out)
        )[0]
        == 0
    )
    then, now = (list(csv.DictReader(path.open())) for path in (folders / "predictions.csv", out))
    assert [row["id"] for row in now] == [row["id"] for row in then]
    assert [row["prediction"] for row in now] == [row["prediction"] for row in then]
    for column in ("probability down", "probability up"):
        assert [float(row[column]) for row in now] == pytest.approx(
            [float(row[column]) for row in then], abs=1e-5
        )
