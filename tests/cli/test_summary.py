"""What `coadjoint train` says about the user's own data, and the files that pandas writes."""

import gzip
import json

import numpy as np
import pytest

SMALL = ["--steps", "2", "--every", "2", "--probes", "2", "--batch", "4", "--hidden", "3"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def sunspots(here, gap=""):
    rows = [f"{1700 + i},{gap if i == 7 and gap is not None else i * i % 11}" for i in range(60)]
    path = here / "sunspots.csv"
    path.write_text("\n".join(["YEAR,SUNACTIVITY", *rows, ""]))
    return path


def test_a_year_that_is_predicted_is_pointed_out(coadjoint, here):
    sunspots(here, gap=None)
    words = ["--train", "sunspots.csv", "--kind", "next", "--window", "10"]
    code, out, err = coadjoint("train", *words, *SMALL)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "data sunspots.csv: 60 rows in 1 sequence of 60 steps" in text
    assert "predicts the next step of every feature: YEAR, SUNACTIVITY" in text
    assert "YEAR, which is predicted too, increases by 1" in text
    assert "pass --time YEAR or --features SUNACTIVITY" in text
    assert out.index("inputs ") < out.index("parameters")  # before training
    assert out.count("no time column") == 1
    page = (here / "runs" / "sunspots-1" / "report.html").read_text()
    assert "What was read" in page
    assert "the next step of every feature: YEAR, SUNACTIVITY" in page
    overview = json.loads((here / "runs" / "sunspots-1" / "data.json").read_text())
    assert overview["features"] == ["YEAR", "SUNACTIVITY"]


@pytest.mark.parametrize(
    ("missing", "words"),
    [("drop", "1 row with a missing"), ("ffill", "1 value filled"), ("mask", "1 value masked")],
)
def test_what_was_missing_is_said(missing, words, coadjoint, here):
    sunspots(here)
    rest = ["--kind", "next", "--window", "10", "--missing", missing, "--features", "SUNACTIVITY"]
    code, out, _ = coadjoint("train", "--train", "sunspots.csv", *rest, *SMALL)
    assert code == 0
    assert words in out
    assert f"(--missing {missing})" in out


def test_quiet_says_nothing(coadjoint, here):
    sunspots(here, gap=None)
    rest = ["--kind", "next", "--window", "10", "--quiet"]
    assert coadjoint("train", "--train", "sunspots.csv", *rest, *SMALL) == (0, "", "")


def test_a_chain_says_it_too(coadjoint, here):
    sunspots(here, gap=None)
    rest = ["--kind", "reconstruct", *SMALL[:-2]]
    code, out, _ = coadjoint("train", "--train", "sunspots.csv", *rest)
    assert code == 0
    assert "data      sunspots.csv: 60 samples" in out
    assert "predicts  the inputs themselves" in out
    assert "pass --id YEAR or --features SUNACTIVITY" in " ".join(out.split())


def test_a_compressed_frame_with_its_index(coadjoint, here):
    rows = [f"{i},{i * i % 7},{i * 3 % 5}" for i in range(40)]
    text = "\n".join([",a,b", *rows, ""])
    (here / "frame.csv.gz").write_bytes(gzip.compress(text.encode()))
    rest = ["--kind", "next", "--window", "8"]
    code, out, _ = coadjoint("train", "--train", "frame.csv.gz", *rest, *SMALL)
    assert code == 0
    assert "inputs    2 features: a, b" in out
    assert "like an index: it is left out" in out
    code, out, _ = coadjoint("predict", "runs/frame-1", "frame.csv.gz", "--out", "p.csv")
    assert code == 0
    assert (here / "p.csv").exists()


@pytest.mark.slow
def test_one_series_and_X_with_y(coadjoint, here):
    np.save("series.npy", np.sin(np.arange(60)))
    rest = ["--kind", "next", "--window", "10"]
    code, out, _ = coadjoint("train", "--train", "series.npy", *rest, *SMALL)
    assert code == 0
    assert "[60]: the steps of one sequence" in out
    r = np.random.default_rng(0)
    np.savez("xy.npz", X=r.normal(size=(20, 5)), y=np.arange(20) % 2)
    code, out, _ = coadjoint("train", "--train", "xy.npz", "--kind", "classify", *SMALL)
    assert code == 0
    assert "X [20, 5]: sequences, steps of one feature" in out
    code, out, _ = coadjoint(
        "train", "--train", "xy.npz", "--kind", "classify", "--chain", "3", *SMALL[:-2]
    )
    assert code == 0
    assert "X [20, 5]: samples, features" in out


def test_a_wide_table_is_trained_on_resumed_and_predicted_from(coadjoint, here):
    rows = [f"s{i},{i % 3},{i % 5},{'' if i % 4 else i % 7},{'pq'[i % 2]}" for i in range(20)]
    (here / "wide.csv").write_text("\n".join(["id,t0,t1,t2,label", *rows, ""]))
    code, out, _ = coadjoint("train", "--train", "wide.csv", "--wide", *SMALL)
    assert code == 0
    assert "20 sequences of 2 to 3 steps (median 2)" in out
    assert "its steps in columns t0 to t2" in " ".join(out.split())
    assert coadjoint("resume", "runs/wide-1", "--steps", "4", "--quiet")[0] == 0
    (here / "new.csv").write_text("id,t0,t1\nu,1,2\nv,3,4\n")
    code, out, _ = coadjoint("predict", "runs/wide-1", "new.csv", "--out", "p.csv")
    assert code == 0
    lines = (here / "p.csv").read_text().splitlines()
    assert len(lines) == 3
    assert "u" in lines[1].split(",")
    code, _, err = coadjoint("train", "--train", "wide.csv", "--wide", "--chain", "3")
    assert code == 2
    assert err.count("\n") == 1
