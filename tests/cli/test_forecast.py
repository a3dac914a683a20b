"""`coadjoint forecast`: from a table to a forecast, its page, and its errors against the past."""

import csv
import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from coadjoint.cli import app


def run(*words):
    """The result of a command line."""
    return CliRunner().invoke(app, [str(word) for word in words])


def write_months(path, T=360, seed=0):
    """A seasonal series with noise that is correlated from month to month."""
    rng = np.random.default_rng(seed)
    noise = np.zeros(T)
    for t in range(1, T):
        noise[t] = 0.5 * noise[t - 1] + rng.normal()
    values = 20 + 4 * np.sin(2 * np.pi * np.arange(T) / 12) + noise
    months = np.datetime64("1990-01") + np.arange(T)
    rows = [f"{month},{value:.4f}" for month, value in zip(months, values, strict=True)]
    path.write_text("\n".join(["date,sales", *rows]) + "\n")


def train(folder, *flags, epochs=2):
    """A run on months.csv of this folder."""
    write_months(folder / "months.csv")
    words = ("train", "--train", folder / "months.csv", "--kind", "next", "--window", 60)
    result = run(
        *words, "--hidden", 16, "--epochs", epochs, "--out", folder / "run", "--quiet", *flags
    )
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_table_and_a_page_are_written(tmp_path):
    train(tmp_path, "--horizon", 6, "--quantiles", "0.05,0.5,0.95", "--stride", 30)
    out = tmp_path / "f.csv"
    words = ("forecast", tmp_path / "run", tmp_path / "months.csv", "--out", out)
    result = run(*words, "--rolling", 6, "--page")
    assert result.exit_code == 0, result.output
    for text in ("seasonal naive", "season 12, by the step of the dates", "quantiles", "f.html"):
        assert text in result.output
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["date"] for row in rows] == [f"2020-0{m}" for m in range(1, 7)]
    assert list(rows[0]) == ["step", "date", "prediction", "lower", "upper"]
    for row in rows:
        assert float(row["lower"]) <= float(row["prediction"]) <= float(row["upper"])
    page = (tmp_path / "f.html").read_text()
    assert "against the past: season 12, by the step of the dates" in page
    assert "target: 90%" in page
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    figures = json.loads(found.group(1))["figures"]
    assert {"series-0-0", "horizon-0", "coverage-0"} <= set(figures)
    assert len(figures["series-0-0"]["bands"][0]["low"]) == 6
    assert len(figures["horizon-0"]["series"]) == 5
    longer = run(*words, "--steps", 8, "--rolling", 3, "--page", "--force")
    assert longer.exit_code == 0, longer.output
    page = (tmp_path / "f.html").read_text()
    assert "against the past: season 12, by the step of the dates; intervals estimated" in page
    assert page.count("against the past:") == 1
    assert re.search(r"intervals estimated from \d+ errors in ", longer.output)


def test_what_does_not_fit_is_refused(tmp_path):
    train(tmp_path)
    words = ("forecast", tmp_path / "run", tmp_path / "months.csv")
    for flags, text in (
        (("--out", "-", "--page"), "--page"),
        (("--season", 12), "--rolling"),
        (("--level", 2), "level"),
        (("--out", tmp_path / "months.csv"), "another file"),
        (("--rolling", 400), "Lower --rolling"),
    ):
        result = run(*words, *flags)
        assert result.exit_code != 0
        assert text in str(result.exception or "") + result.output


@pytest.mark.slow
def test_the_forecast_beats_the_seasonal_naive(tmp_path):
    train(tmp_path, "--stride", 12, "--lr", 0.01, epochs=60)
    import coadjoint as co

    found = co.load(tmp_path / "run").roll(tmp_path / "months.csv", 12, 24)
    network, naive = (float(found.overall(name)[0][0]) for name in ("network", "seasonal naive"))
    assert network < naive
    assert 0.75 < float(found.coverage.mean()) <= 1


def test_the_model_is_looked_at_before_an_output_that_exists(tmp_path, monkeypatch):
    """A run that cannot forecast is named, and not the file that a forecast would replace."""
    monkeypatch.chdir(tmp_path)
    rows = [f"s{i},{t},{np.sin(i + t):.3f},{'ab'[i % 2]}" for i in range(20) for t in range(6)]
    (tmp_path / "d.csv").write_text("\n".join(["id,time,x,label", *rows]) + "\n")
    words = ("train", "--train", "d.csv", "--hidden", 4, "--steps", 4, "--out", "run", "--quiet")
    assert run(*words).exit_code == 0
    (tmp_path / "forecast.csv").write_text("mine")
    result = run("forecast", "run", "d.csv")
    assert result.exit_code != 0
    assert "of kind 'classify'" in str(result.exception)
    assert (tmp_path / "forecast.csv").read_text() == "mine"
