"""Predictions from a prepared set whose rows stay on disk: those of the table, to the bit."""

import numpy as np
import pytest
import torch

from coadjoint.errors import DataError
from coadjoint.tasks.data import Data
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.new_data import read_new, targets_of
from coadjoint.tasks.preparing import prepare
from coadjoint.tasks.stored_prediction import StoredPrediction
from coadjoint.tasks.stored_sets import StoredInputs


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


def test_uneven_steps_are_refused_unless_allowed(tmp_path):
    reading = {"kind": "classify", "features": ("a", "b")}
    description = Data.read(put(tmp_path, "d"), **reading).describe()
    folder = prepared(put(tmp_path, "e", late={(0, 8)}), "allow", **reading)
    with pytest.raises(DataError, match="time step is 6"):
        read_new(description, folder)
    assert len(read_new(description, folder, irregular="allow")) == 12
