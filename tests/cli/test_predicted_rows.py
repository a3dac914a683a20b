"""`coadjoint predict`: a prediction for each row of the input, under the input's own numbers."""

import csv
import gzip
import json
import math
import os
import shutil
import sys

import numpy as np
import pytest
import torch

from coadjoint.cli.schema import READING_KEYS, DataSection
from coadjoint.errors import MissingError
from coadjoint.tasks.description import PREDICTION_OPTIONS
from coadjoint.training import predict as predict_module
from coadjoint.training.predict import load_model

SMALL = "--hidden 4 --steps 2 --batch 4 --probes 2 --quiet --split 1,0,0"
EVERY = "--kind regress --at every --target load --time day --window 10"
LAST = "--kind regress --at last --target load --time day --id who --window 10 --features height"
CHAIN = "--kind regress --target load --id name --chain 4 --steps 2 --probes 2 --quiet --out run"


def write(path, text):
    with open(path, "w", newline="") as file:
        file.write(text)


def read(path, sep=","):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter=sep))


def series(n=30, names="day,height,load", ids=("",)):
    """Rows of names and of numbers that do not repeat; ids: a sequence of n rows for each."""
    lines = [names]
    for name in ids:
        before = f"{name}," if name else ""
        lines += [f"{before}{t},{math.sin(t):.4f},{math.cos(t):.4f}" for t in range(n)]
    return "\n".join(lines) + "\n"


def train(coadjoint, *words):
    words = [*words, *SMALL.split(), "--out", "run"]
    code, _, err = coadjoint("train", "--train", "train.csv", *words)
    assert (code, err) == (0, "")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of runs that several tests use, each trained by the first of them."""
    return tmp_path_factory.mktemp("trained")


def train_once(coadjoint, place, *words):
    if not place.exists():
        train(coadjoint, *words)
        shutil.copytree("run", place)
    elif not os.path.exists("run"):
        shutil.copytree(place, "run")


@pytest.fixture
def regression(here, trained, coadjoint):
    """A run that predicts `load` at every row, trained on windows of ten."""
    write("train.csv", series())
    train_once(coadjoint, trained / "every", *EVERY.split())


def predict(coadjoint, *words, out="p.csv"):
    code, said, err = coadjoint("predict", "run", *words, "--out", out, "--force")
    assert (code, err) == (0, "")
    return said


def gap(text, *rows):
    """The text of a table with the second column blank in these rows, from 0."""
    lines = text.splitlines()
    for row in rows:
        cells = lines[row + 1].split(",")
        lines[row + 1] = ",".join([cells[0], "", *cells[2:]])
    return "\n".join(lines) + "\n"


@pytest.mark.usefixtures("regression")
class TestRows:
    def test_each_row_has_its_number_and_gaps_are_empty(self, coadjoint):
        write("new.csv", gap(series(), 0, 7, 8, 29))
        said = predict(coadjoint, "new.csv", "--missing", "drop", "--irregular", "allow")
        assert "4 rows of new.csv lack a value: the network does not read them" in said
        assert said.splitlines()[-1] == (
            "26 rows of 1 sequence, and 4 rows without a prediction -> p.csv"
        )
        rows = read("p.csv")
        assert list(rows[0]) == ["row", "day", "prediction"]
        assert [row["row"] for row in rows] == list(map(str, range(30)))
        assert [row["day"] for row in rows] == list(map(str, range(30)))
        assert [i for i, row in enumerate(rows) if not row["prediction"]] == [0, 7, 8, 29]

    def test_rows_behind_a_gap_are_those_of_the_shorter_file(self, coadjoint):
        write("gap.csv", gap(series(), 7, 8))
        predict(coadjoint, "gap.csv", "--missing", "drop", "--irregular", "allow")
        lines = series().splitlines(keepends=True)
        write("short.csv", "".join(lines[:8] + lines[10:]))
        predict(coadjoint, "short.csv", "--irregular", "allow", out="short_p.csv")
        left = [row for row in read("p.csv") if row["prediction"]]
        short = read("short_p.csv")
        assert [row["prediction"] for row in left] == [row["prediction"] for row in short]
        assert [row["day"] for row in left] == [row["day"] for row in short]

    def test_gaps_are_filled_from_the_row_before_where_there_is_one(self, coadjoint):
        write("new.csv", gap(series(), 0, 1, 5))
        predict(coadjoint, "new.csv", "--missing", "ffill")
        assert [i for i, row in enumerate(read("p.csv")) if not row["prediction"]] == [0, 1]

    def test_columns_are_kept_and_the_tables_join(self, coadjoint):
        write("new.csv", "note," + gap(series(), 3).replace("\n", "\n=a b,", 30))
        words = ["new.csv", "--missing", "drop", "--irregular", "allow"]
        predict(coadjoint, *words, "--keep")
        kept = read("p.csv")
        assert list(kept[0]) == ["row", "note", "day", "height", "load", "prediction"]
        for row, given in zip(kept, read("new.csv"), strict=True):
            assert row["note"] == "'=a b"  # no spreadsheet runs it
            assert {name: row[name] for name in given if name != "note"} == {
                name: cell for name, cell in given.items() if name != "note"
            }
        predict(coadjoint, *words, "--keep", "load")
        assert list(read("p.csv")[0]) == ["row", "day", "load", "prediction"]
        code, _, err = coadjoint("predict", "run", *words, "--keep", "loda", "--out", "n.csv")
        assert code == 3
        assert "no column 'loda' for --keep. Did you mean 'load'?" in err
        predict(coadjoint, *words, "--keep", out="kept.csv")
        code, _, err = coadjoint(
            "predict", "run", "kept.csv", *words[1:], "--keep", "--out", "n.csv"
        )
        assert code == 3
        assert "columns 'row', 'prediction' are called like columns of the predictions" in err

    def test_the_state_is_carried_through_the_series(self, coadjoint, monkeypatch):
        predict(coadjoint, "train.csv")
        whole = [float(row["prediction"]) for row in read("p.csv")]
        net, description = load_model("run")
        d = description["data"]
        u = (np.array([[math.sin(t)] for t in range(30)]).round(4) - d["mean"]) / d["std"]
        a = net(torch.tensor(u, dtype=torch.float32)[:, None]).a[:, 0, 0].detach().double()
        expected = a.numpy() * d["target_std"][0] + d["target_mean"][0]
        np.testing.assert_allclose(whole, expected, rtol=1e-6)
        ran = []

        def run_in_short_parts(net, batch):
            ran.append(len(batch.u))
            return run_in_parts(net, batch, 8)

        run_in_parts = predict_module.run_in_parts
        monkeypatch.setattr(predict_module, "run_in_parts", run_in_short_parts)
        predict(coadjoint, "train.csv")
        parts = [float(row["prediction"]) for row in read("p.csv")]
        assert ran == [30]
        np.testing.assert_allclose(parts, whole, rtol=1e-6)

    def test_a_series_shorter_than_the_window_is_predicted(self, coadjoint):
        write("new.csv", series(3))
        predict(coadjoint, "new.csv")
        assert len(read("p.csv")) == 3

    def test_other_names_and_another_way_to_write(self, coadjoint):
        predict(coadjoint, "train.csv")
        text = series(names="tag,height,load").replace(",", ";").replace(".", ",")
        write("new.csv", text)
        predict(coadjoint, "new.csv", "--sep", ";", "--decimal", ",", "--time", "tag", out="q.csv")
        same = [row["prediction"] for row in read("p.csv")]
        assert [row["prediction"] for row in read("q.csv")] == same
        assert list(read("q.csv")[0]) == ["row", "tag", "prediction"]
        predict(coadjoint, "new.csv", "--sep", ";", "--decimal", ",", "--time", "", out="q.csv")
        assert list(read("q.csv")[0]) == ["row", "prediction"]

    def test_a_time_column_called_like_ours_goes_by_its_role(self, coadjoint):
        write("new.csv", series(names="row,height,load"))
        predict(coadjoint, "new.csv", "--time", "row")
        assert list(read("p.csv")[0]) == ["row", "time", "prediction"]

    @pytest.mark.parametrize("name", ["p.xlsx", "p", "p.csv.zip", "parquet"])
    def test_unknown_formats_are_refused_before_any_work(self, coadjoint, name, here):
        code, _, err = coadjoint("predict", "nowhere", "nothing.csv", "--out", name)
        assert code == 2
        assert "expected one of .csv, .tsv, .csv.gz" in err
        assert not (here / name).exists()

    def test_a_format_without_its_package_is_refused_before_any_work(self, coadjoint, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        code, _, err = coadjoint("predict", "nowhere", "nothing.csv", "--out", "p.parquet")
        assert code == MissingError.exit_code
        assert "needs pyarrow: pip install 'coadjoint[data]'" in err

    def test_formats_follow_the_name(self, coadjoint):
        write("new.csv", gap(series(), 4))
        words = ["new.csv", "--missing", "drop", "--irregular", "allow", "--keep", "load"]
        predict(coadjoint, *words)
        rows = read("p.csv")
        predict(coadjoint, *words, out="p.tsv")
        assert read("p.tsv", "\t") == rows
        predict(coadjoint, *words, out="p.csv.gz")
        with gzip.open("p.csv.gz", "rt", newline="") as file, open("p.csv", newline="") as plain:
            assert file.read() == plain.read()
        predict(coadjoint, *words, out="p.json")
        predict(coadjoint, *words, out="p.jsonl")
        with open("p.json") as file, open("p.jsonl") as lines:
            objects = json.load(file)
            assert [json.loads(line) for line in lines] == objects
        assert objects[4] | {"load": None} == {"row": 4, "day": 4, "load": None, "prediction": None}
        for row, values in zip(rows, objects, strict=True):
            assert list(row) == list(values)
            assert values["load"] == float(row["load"])
            assert values["prediction"] == pytest.approx(float(row["prediction"] or "nan"),
                rel=1e-8, nan_ok=True) or row["prediction"] == ""  # fmt: skip
        code, out, err = coadjoint("predict", "run", *words, "--out", "-")
        assert code == 0
        with open("p.csv", newline="") as plain:
            assert out == plain.read()
        assert "1 row of new.csv lacks a value: the network does not read it" in err

    def test_arrow_formats(self, coadjoint):
        parquet = pytest.importorskip("pyarrow.parquet")
        feather = pytest.importorskip("pyarrow.feather")
        write("new.csv", gap(series(), 4))
        words = ["--missing", "drop", "--irregular", "allow", "--keep"]
        predict(coadjoint, "new.csv", *words, out="p.parquet")
        with open("p.parquet", "rb") as file:
            assert file.read(4) == b"PAR1"
        table = parquet.read_table("p.parquet")
        types = {field.name: str(field.type) for field in table.schema}
        assert types == {
            "row": "int64", "day": "int64", "height": "double", "load": "double",
            "prediction": "double",
        }  # fmt: skip
        assert table.column("prediction").null_count == 1
        for name in ("p.feather", "p.arrow"):
            predict(coadjoint, "new.csv", *words, out=name)
            assert feather.read_table(name).equals(table)
        # Columns of a Parquet file are kept with their types, and read back alike.
        parquet.write_table(table.drop_columns(["row", "prediction"]), "new.parquet")
        predict(coadjoint, "new.parquet", *words, out="q.parquet")
        assert parquet.read_table("q.parquet").equals(table)
        feather.write_feather(table.drop_columns(["row", "prediction"]), "new.feather")
        predict(coadjoint, "new.feather", *words, out="q.feather")
        assert feather.read_table("q.feather").equals(table)


def test_flags_of_predict_are_the_options_of_the_reader():
    assert set(READING_KEYS) == PREDICTION_OPTIONS
    assert set(DataSection.model_fields) > PREDICTION_OPTIONS


@pytest.mark.usefixtures("regression")
def test_packed_tables_and_an_index_are_read_alike(coadjoint):
    predict(coadjoint, "train.csv", "--keep")
    lines = series().splitlines()
    indexed = [f",{lines[0]}", *(f"{k + 40},{line}" for k, line in enumerate(lines[1:]))]
    with gzip.open("new.csv.gz", "wt") as file:
        file.write("\n".join(indexed) + "\n")
    predict(coadjoint, "new.csv.gz", "--keep", out="q.csv")
    assert read("q.csv") == read("p.csv")
    predict(coadjoint, "new.csv.gz", "--keep", "Unnamed: 0", out="q.csv")
    rows = read("q.csv")
    assert [(row["row"], row["Unnamed: 0"]) for row in rows[:2]] == [("0", "40"), ("1", "41")]


def test_a_wide_table_has_a_row_for_each_sequence(here, coadjoint):
    header = "who,t0,t1,t2,label\n"
    lines = [f"{name},{i},{i * i},{'' if i == 3 else 1},{'ud'[i % 2]}" for i, name in
        enumerate("abcdefgh")]  # fmt: skip
    write("train.csv", header + "\n".join(lines) + "\n")
    train(coadjoint, "--wide", "--id", "who", "--kind", "classify", "--target", "label")
    predict(coadjoint, "train.csv", "--keep", "label")
    rows = read("p.csv")
    assert list(rows[0])[:4] == ["row", "who", "label", "prediction"]
    assert [row["row"] + row["who"] for row in rows[:3]] == ["0a", "1b", "2c"]


@pytest.mark.usefixtures("regression")
def test_shuffled_rows_are_predicted_in_their_order(coadjoint):
    predict(coadjoint, "train.csv")
    by_day = {row["day"]: row["prediction"] for row in read("p.csv")}
    header, *lines = series().splitlines(keepends=True)
    write("new.csv", header + "".join(lines[::2] + lines[1::2]))
    predict(coadjoint, "new.csv", out="q.csv")
    rows = read("q.csv")
    assert [row["row"] for row in rows] == list(map(str, range(30)))
    assert [row["day"] for row in rows] == [row["day"] for row in read("new.csv")]
    assert {row["day"]: row["prediction"] for row in rows} == by_day


def test_columns_of_words_and_gaps_in_time(here, coadjoint):
    lines = ["day,city,height,load"]
    for t in range(30):
        lines.append(f"{t + t % 3},{'Rome' if t % 4 else 'Oslo'},{math.sin(t):.4f},{t % 5}")
    write("train.csv", "\n".join(lines) + "\n")
    words = EVERY.replace("--target", "--categorical city --gaps --target").split()
    train(coadjoint, *words)
    said = predict(coadjoint, "train.csv", "--keep", "city")
    assert said.splitlines()[-1] == "30 rows of 1 sequence -> p.csv"
    rows = read("p.csv")
    assert list(rows[0]) == ["row", "day", "city", "prediction"]
    assert [row["city"] for row in rows] == [row["city"] for row in read("train.csv")]


def test_no_id_is_invented(here, coadjoint):
    write("train.csv", series(names="t,height,load"))
    train(coadjoint, "--kind", "next", "--features", "height", "--window", "10")
    predict(coadjoint, "train.csv")
    rows = read("p.csv")
    assert list(rows[0]) == ["row", "prediction"]
    assert len(rows) == 30


@pytest.fixture
def windows(here, trained, coadjoint):
    """A run that predicts `load` at the last row of windows of ten, of three sequences."""
    write("train.csv", series(names="who,day,height,load", ids=("a", "b", "c")))
    train_once(coadjoint, trained / "last", *LAST.split())


@pytest.mark.usefixtures("windows")
class TestWindows:
    def test_a_window_has_one_prediction_each_and_so_has_the_rest(self, coadjoint):
        write("new.csv", series(25, "who,day,height,load", ("x", "y")) + "z,0,0.5,1\n")
        said = predict(coadjoint, "new.csv")
        assert "a prediction for each window of 10 rows, as in training; --whole makes one" in said
        assert said.splitlines()[-1] == "7 windows of 3 sequences -> p.csv"
        rows = read("p.csv")
        assert [row["row"] for row in rows] == ["9", "19", "24", "34", "44", "49", "50"]
        assert [row["who"] for row in rows] == list("xxxyyyz")
        assert [row["day"] for row in rows] == ["9", "19", "24", "9", "19", "24", "0"]
        # The last window of ten ends with the sequence.
        lines = series(25, "who,day,height,load", ("x",)).splitlines(keepends=True)
        write("end.csv", "".join([lines[0], *lines[-10:]]))
        predict(coadjoint, "end.csv", out="end_p.csv")
        alone, beside_others = read("end_p.csv")[0], rows[2]
        expected = pytest.approx(float(beside_others["prediction"]), rel=1e-6)
        assert float(alone["prediction"]) == expected

    def test_a_whole_sequence_has_one(self, coadjoint):
        write("new.csv", series(25, "who,day,height,load", ("x", "y")))
        predict(coadjoint, "new.csv", "--whole")
        assert [(row["row"], row["who"]) for row in read("p.csv")] == [("24", "x"), ("49", "y")]

    def test_a_sequence_that_cannot_be_read_is_empty(self, coadjoint):
        lines = series(12, "who,day,height,load", ("x", "y")).splitlines(keepends=True)
        blank = "q,0,,1\nq,1,,1\n"
        write("new.csv", "".join(lines[:13]) + blank + "".join(lines[13:]))
        said = predict(coadjoint, "new.csv", "--missing", "drop", "--whole")
        assert "2 rows of new.csv lack a value: the network does not read them" in said
        assert "2 sequences, and 1 sequence without a prediction -> p.csv" in said
        rows = read("p.csv")
        assert [(row["row"], row["who"], row["prediction"] == "") for row in rows] == [
            ("11", "x", False),
            ("13", "q", True),
            ("25", "y", False),
        ]


def test_both_directions_are_read_at_once(here, coadjoint):
    write("train.csv", series())
    train(coadjoint, *EVERY.split(), "--bidirectional")
    said = predict(coadjoint, "train.csv")
    assert "it reads each sequence at once, not in the windows of 10 rows of training" in said
    assert len(read("p.csv")) == 30


def test_samples_have_their_rows_and_ids(here, coadjoint):
    write("train.csv", series(names="name,height,load"))
    code, _, err = coadjoint("train", "--train", "train.csv", *CHAIN.split())
    assert (code, err) == (0, "")
    write("new.csv", gap(series(names="name,height,load"), 2))
    said = predict(coadjoint, "new.csv", "--missing", "drop", "--keep", "load")
    assert "1 sample of new.csv lacks a value: the network does not read it" in said
    rows = read("p.csv")
    assert list(rows[0]) == ["row", "name", "load", "prediction"]
    assert (
        [row["row"] for row in rows] == [row["name"] for row in rows] == list(map(str, range(30)))
    )
    assert [i for i, row in enumerate(rows) if not row["prediction"]] == [2]
    code, _, err = coadjoint("predict", "run", "new.csv", "--missing", "ffill")
    assert code == 2
    assert "--missing ffill needs sequences of time steps" in err


def test_arrays_have_a_row_for_each_sequence_and_step(here, coadjoint):
    rng = np.random.default_rng(0)
    u = rng.normal(size=(6, 5, 2))
    lengths = np.array([5, 3, 5, 1, 4, 5])
    np.savez("train.npz", u=u, y=2 * u[:, :, :1], lengths=lengths)
    code, _, err = coadjoint("train", "--train", "train.npz", "--kind", "regress", "--at", "every",
        *SMALL.split(), "--out", "run")  # fmt: skip
    assert (code, err) == (0, "")
    predict(coadjoint, "train.npz")
    rows = read("p.csv")
    assert list(rows[0]) == ["row", "step", "prediction"]
    found = [(int(row["row"]), int(row["step"])) for row in rows]
    assert found == [(i, t) for i, T in enumerate(lengths) for t in range(T)]
    code, _, err = coadjoint("predict", "run", "train.npz", "--keep", "--out", "n.csv")
    assert code == 3
    assert "has no columns to keep" in err
