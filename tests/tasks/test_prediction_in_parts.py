"""Predictions from a prepared set whose rows stay on disk: those of the table, to the bit."""

import numpy as np
import pytest
import torch

from coadjoint.errors import CoadjointError, DataError
from coadjoint.tasks import stored_prediction
from coadjoint.tasks.data import Data
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.new_data import read_new, targets_of
from coadjoint.tasks.preparing import prepare
from coadjoint.tasks.stored_prediction import StoredPrediction
from coadjoint.tasks.stored_sets import StoredInputs
from coadjoint.training import prediction_files


def put(folder, name, n=12, T=9, seed=0, late=()):
    """A table with later times in the rows `late`, (sequence, step)."""
    draw = np.random.default_rng(seed)
    rows = ["id,time,a,b,c,label"]
    for i in range(n):
        for t in range(T + i % 3):
            a, b = draw.normal(size=2).round(4)
            word = ("sun", "rain", "fog")[draw.integers(3)]
            time = t + 5 * ((i, t) in late)
            rows.append(f"{name}{i},{time},{a},{b},{word},{'up' if i % 2 else 'down'}")
    path = folder / f"{name}.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def prepared(path, irregular="refuse", **options):
    out = path.with_suffix(".co")
    out.mkdir()
    prepare([path], out, Options(**options), irregular)
    return out


NEXT = {"kind": "next", "features": ("a", "b")}
REGRESS = {"kind": "regress", "target": ("b",), "features": ("a",)}
CASES = [
    ({"kind": "classify", "features": ("a", "b")}, {}),
    ({"kind": "classify", "features": ("a", "b", "c"), "categorical": ("c",)}, {"window": 4}),
    (NEXT, {}),
    (NEXT, {"window": 5, "lags": [2, 4]}),
    (NEXT, {"known": "b", "target": "a"}),
    (REGRESS, {"at": "every"}),
    (REGRESS, {"at": "last"}),
]


@pytest.mark.parametrize(("reading", "training"), CASES)
def test_inputs_and_targets_are_those_of_the_table(tmp_path, reading, training):
    description = Data.read(put(tmp_path, "d"), **reading | training).describe()
    table = put(tmp_path, "e", n=7, seed=1)
    folder = prepared(table, **reading)
    labelled = reading["kind"] != "next"
    one = read_new(description, table, labelled=labelled)
    other = read_new(description, folder, labelled=labelled, in_parts=True)
    assert isinstance(other.u, StoredInputs) == ("known" not in training)
    assert one.ids == other.ids
    asked = other.part(0, len(other)).asked if isinstance(other, StoredPrediction) else other.asked
    assert isinstance(other, StoredPrediction) == (not labelled and "known" not in training)
    assert np.array_equal(one.asked.row, asked.row)
    assert one.asked.ids == asked.ids
    assert one.asked.stamps == asked.stamps
    for (_, a), (_, b) in zip(one.batches(3), other.batches(3), strict=True):
        assert torch.equal(a.u, b.u)
    assert np.array_equal(targets_of(one), targets_of(other), equal_nan=True)


def answers(prediction, n):
    """Outputs that depend on the inputs of a batch alone."""
    for _, batch in prediction.batches(n):
        a = batch.u.mean(-1, keepdim=True) * torch.arange(1, prediction.description.outputs + 1)
        yield a if prediction.description.at == "every" else a[-1]


@pytest.mark.parametrize("suffix", [".csv", ".tsv.gz", ".json", ".jsonl", ".parquet", ".feather"])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[5]], ids=["last", "next", "every"])
@pytest.mark.parametrize("prefix", ["e", "1"])  # ids that are words, or numbers
def test_what_is_written_in_parts_is_the_table(tmp_path, case, suffix, prefix, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(prediction_files, "ROWS_OF_A_PART", 20)
    monkeypatch.setattr(stored_prediction, "ROWS_OF_A_TABLE", 9)
    reading, training = case
    description = Data.read(put(tmp_path, "d"), **reading | training).describe()
    table = put(tmp_path, prefix, n=7, seed=1)
    stored = read_new(description, prepared(table, **reading), in_parts=True)
    assert isinstance(stored, StoredPrediction)
    assert stored.summary == read_new(description, table).summary
    files = []
    for name, prediction in (("table", read_new(description, table)), ("set", stored)):
        files.append(tmp_path / f"{name}{suffix}")
        prediction_files.write_predictions(prediction, files[-1], answers(prediction, 3))
    if suffix in (".parquet", ".feather"):
        from pyarrow import feather, parquet

        read = parquet.read_table if suffix == ".parquet" else feather.read_table
        one, other = (read(str(path)).combine_chunks() for path in files)
        assert one.equals(other)
        assert one.schema == other.schema
    else:
        assert files[0].read_bytes() == files[1].read_bytes()


def test_parts_that_do_not_fit_are_refused_and_nothing_is_printed(tmp_path, capsys):
    reading, training = CASES[0]
    description = Data.read(put(tmp_path, "d"), **reading | training).describe()
    stored = read_new(description, prepared(put(tmp_path, "e", n=7), **reading), in_parts=True)
    some = [torch.zeros(3, 2), torch.zeros(3, 2)]
    cases = {
        "outputs for 6 sequences; expected 7": some,
        "expected \\[B, 2\\]": [*some, torch.zeros(2, 2)],
        "not finite": [*some, torch.full((1, 2), torch.nan)],
    }
    for match, outputs in cases.items():
        with pytest.raises(CoadjointError, match=match):
            prediction_files.write_predictions(stored, "-", outputs)
        assert capsys.readouterr().out == ""
    prediction_files.write_predictions(stored, "-", [*some, torch.zeros(1, 2)])
    assert capsys.readouterr().out.count("\n") == 8
    assert len(stored.table([torch.zeros(7, 2)])[0].values) == 7


def test_uneven_steps_are_refused_unless_allowed(tmp_path):
    reading = {"kind": "classify", "features": ("a", "b")}
    description = Data.read(put(tmp_path, "d"), **reading).describe()
    folder = prepared(put(tmp_path, "e", late={(0, 8)}), "allow", **reading)
    with pytest.raises(DataError, match="time step is 6"):
        read_new(description, folder)
    assert len(read_new(description, folder, irregular="allow")) == 12
