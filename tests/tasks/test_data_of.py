"""Data.of: arrays, lists, tensors and frames are read as files of the same contents are."""

import csv
import datetime

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.tasks import Data
from coadjoint.tasks.files.index import UNNAMED
from coadjoint.tasks.frames import TypedColumn, columns_of, is_frame, is_missing

RNG = np.random.default_rng(7)
INPUTS = RNG.normal(size=(20, 6, 2)) * 3 + 1
LABELS = np.where(INPUTS.sum((1, 2)) > 12, "up", "down")


def long_columns():
    """The sequences INPUTS as a long table."""
    return {
        "id": np.repeat([f"s{i}" for i in range(20)], 6),
        "time": np.tile(np.arange(6), 20),
        "a": INPUTS[..., 0].reshape(-1),
        "b": INPUTS[..., 1].reshape(-1),
        "label": np.repeat(LABELS, 6),
    }


def write_csv(path, columns):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def assert_same(task, other, names=True):
    """The sets of two tasks have the same numbers, and their descriptions agree."""
    assert task.sets.keys() == other.sets.keys()
    for split in task.sets:
        index = range(len(other.sets[split]))
        batch = task.held_out_batch(split, index)
        expected = other.held_out_batch(split, index)
        torch.testing.assert_close(batch.u, expected.u)
        torch.testing.assert_close(batch.y, expected.y)
    left, right = task.describe(), other.describe()
    for description in (left, right):
        description.pop("files")
    if names:
        assert left == right
    else:
        assert left["mean"] == right["mean"]


def test_arrays_are_read_as_an_npz_is(tmp_path):
    np.savez(tmp_path / "d.npz", u=INPUTS, y=LABELS)
    assert_same(Data.of(INPUTS, LABELS), Data.read(tmp_path / "d.npz"))


@pytest.mark.parametrize(
    "inputs",
    [
        torch.tensor(INPUTS),
        INPUTS.tolist(),
        list(INPUTS),
        [torch.tensor(sequence) for sequence in INPUTS],
        np.array([*INPUTS, None], dtype=object)[:-1],
    ],
    ids=["tensor", "lists", "list of arrays", "list of tensors", "array of objects"],
)
def test_other_forms_of_arrays_are_the_same(inputs):
    assert_same(Data.of(inputs, LABELS), Data.of(INPUTS, LABELS))


@pytest.mark.parametrize(
    "labels",
    [LABELS.tolist(), LABELS.astype(object), tuple(LABELS), LABELS[:, None]],
    ids=["list", "objects", "tuple", "column"],
)
def test_labels_come_in_any_form(labels):
    assert Data.of(INPUTS, labels).description.labels == ["down", "up"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (LABELS == "up", ["False", "True"]),
        ((LABELS == "up").astype(int), ["0", "1"]),
        ((LABELS == "up").astype(float), ["0", "1"]),
        (torch.tensor(LABELS == "up").long(), ["0", "1"]),
        ([3 if label == "up" else 20 for label in LABELS], ["3", "20"]),
    ],
    ids=["truth", "whole", "real", "tensor", "ints"],
)
def test_classes_may_be_numbers(labels, names):
    assert Data.of(INPUTS, labels, kind="classify").description.labels == names


def test_ragged_sequences_and_targets_at_every_step(tmp_path):
    lengths = [3 + i % 4 for i in range(20)]
    inputs = [INPUTS[i, :T] for i, T in enumerate(lengths)]
    targets = [sequence.cumsum(0)[:, 0] for sequence in inputs]
    np.savez(
        tmp_path / "d.npz",
        u=np.concatenate(inputs),
        lengths=lengths,
        y=np.concatenate(targets),
    )
    options = {"kind": "regress", "at": "every"}
    expected = Data.read(tmp_path / "d.npz", **options)
    assert_same(Data.of(inputs, targets, **options), expected)
    padded = np.zeros((20, 6))
    for i, target in enumerate(targets):
        padded[i, : len(target)] = target
    assert_same(Data.of(INPUTS, padded, lengths=lengths, **options), expected)
    assert_same(Data.of(INPUTS, targets, lengths=lengths, **options), expected)


def test_one_feature_and_one_sequence():
    series = np.sin(np.arange(100) / 4)
    options = {"kind": "next", "window": 10}
    task = Data.of(series, **options)
    assert_same(Data.of(series[None], **options), task)
    assert_same(Data.of(series.tolist(), **options), task)
    two = np.stack([series, series**2], 1)
    named = Data.of(two, features=["x", "y"], **options)
    assert named.inputs == 2
    assert_same(named, Data.of(two[None], features=["x", "y"], **options))


def test_samples_without_time(tmp_path):
    x = RNG.normal(size=(30, 1, 5, 5))
    y = np.arange(30) % 3
    np.savez(tmp_path / "d.npz", x=x, y=y)
    options = {"kind": "classify", "rows": "samples"}
    assert_same(Data.of(x, y, **options), Data.read(tmp_path / "d.npz", **options))
    assert Data.of(x[:, 0, 0], y, features=list("abcde"), **options).description.features == [
        *"abcde"
    ]


@pytest.mark.parametrize(
    "options", [{}, {"split": (0.5, 0.25, 0.25)}, {"standardise": False}, {"dtype": "float64"}]
)
def test_a_dictionary_of_columns_is_read_as_a_table_is(tmp_path, options):
    columns = long_columns()
    expected = Data.read(write_csv(tmp_path / "d.csv", columns), **options)
    assert_same(Data.of(columns, **options), expected)


def frame_with_troubles():
    """Rows out of order, missing values, words and dates."""
    columns = long_columns()
    columns["a"] = columns["a"].copy()
    columns["a"][5::17] = np.nan
    columns["sky"] = np.array(["sun", "rain", "fog"])[np.arange(120) % 3]
    days = np.datetime64("2024-01-01") + columns.pop("time") * 2
    columns["day"] = days
    order = RNG.permutation(120)
    return {name: np.asarray(values)[order] for name, values in columns.items()}


@pytest.mark.parametrize("missing", ["mask", "drop"])
def test_troubles_are_dealt_with_as_in_files(tmp_path, missing):
    columns = frame_with_troubles()
    options = {
        "missing": missing,
        "categorical": "auto",
        "gaps": True,
        "time": "day",
        "kind": "classify",
    }
    text = columns | {"a": ["" if np.isnan(x) else x for x in columns["a"]]}
    expected = Data.read(write_csv(tmp_path / "d.csv", text), **options)
    task = Data.of(columns, **options)
    assert_same(task, expected)
    assert [note for note in task.notes if "argument inputs" not in note] == [
        note for note in expected.notes if str(tmp_path) not in note
    ]


def test_a_wide_table():
    columns = {f"t{t}": INPUTS[:, t, 0] for t in range(6)} | {"label": LABELS}
    assert_same(Data.of(columns, wide=True), Data.of(INPUTS[..., 0], LABELS), names=False)


def test_targets_beside_a_frame_are_a_column():
    columns = {"a": INPUTS[:, 0, 0], "b": INPUTS[:, 0, 1]}
    task = Data.of(columns, LABELS, rows="samples")
    assert task.description.targets == ["target"]
    assert_same(task, Data.of(INPUTS[:, 0], LABELS, rows="samples"), names=False)


def test_held_out_data():
    task = Data.of(INPUTS[:10], LABELS[:10], valid=(INPUTS[10:15], LABELS[10:15]))
    assert task.size == 10
    assert len(task.sets["valid"]) == 5
    with pytest.raises(co.DataError, match=r"argument valid .* hold the same bytes"):
        Data.of(INPUTS, LABELS, valid=(INPUTS, LABELS))


def test_times_of_arrays_order_gaps():
    times = np.cumsum(RNG.integers(1, 4, (20, 6)), 1)
    options = {"kind": "classify", "gaps": True}
    task = Data.of(INPUTS, LABELS, times=times, **options)
    assert task.inputs == 3
    as_list = Data.of(list(INPUTS), LABELS, times=list(times), **options)
    assert_same(as_list, task)
    dates = np.datetime64("2024-03-01") + times[0]
    assert Data.of(INPUTS, LABELS, times=dates, **options).description.gap["dates"] == 1
    with pytest.raises(co.DataError, match="not later"):
        Data.of(INPUTS, LABELS, times=times[:, ::-1], **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Data.of(INPUTS, LABELS[:5]), "argument targets has 5 entries, .* 20 sequences"),
        (lambda: Data.of(INPUTS * np.nan, LABELS), "argument inputs column 'u0': every value"),
        (lambda: Data.of(INPUTS / 0, LABELS), r"argument inputs \[0, 0, 0\] .* infinite"),
        (lambda: Data.of([INPUTS[0], INPUTS[1][:, :1]], [0, 1]), "has 1 features"),
        (lambda: Data.of(INPUTS, RNG.normal(size=20)), "Pass --kind classify"),
        (lambda: Data.of(3), "must be a path, an array"),
        (lambda: Data.of(INPUTS, LABELS, features=["a"]), "has 2 features, and 1 feature"),
        (lambda: Data.of(np.array([["a"]]), [0]), "expected numbers"),
        (lambda: Data.of(np.zeros((0, 3, 2)), []), "empty"),
        (lambda: Data.of(INPUTS[None], LABELS), r"expected \[n, T, C\]"),
        (lambda: Data.of(long_columns(), ids=[1]), "name the columns"),
        (lambda: Data.of("d.csv", LABELS), "of the file d.csv name the columns"),
        (lambda: Data.of({"a": [1.0], "b": []}, kind="next"), "'b' has 0 rows"),
        (lambda: Data.of({"a": [1, 2], "label": [None, None]}), "argument inputs"),
        (lambda: Data.of({"a": [object()] * 4, "label": [*"xyxy"]}), "type object cannot be used"),
        (lambda: Data.of(INPUTS, LABELS, times=[1, 2]), "a time for each"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_what_cannot_be_read_is_refused(call, message):
    with pytest.raises(co.CoadjointError, match=message):
        call()


def test_missing_values_are_known_in_all_their_forms():
    class NAType:
        pass

    class NaTType:
        pass

    for value in (None, float("nan"), np.float32("nan"), NAType(), NaTType()):
        assert is_missing(value)
    for value in (0, "", False, np.datetime64("2024-01-01")):
        assert not is_missing(value)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2], "whole"),
        ([1, None], "whole"),
        ([1.5, None], "number"),
        ([True, None], "bool"),
        (["a", None], "words"),
        (["a", 1], "words"),
        ([datetime.date(2024, 1, 1), None], "time"),
        ([datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)], "time"),
        ([None, None], "number"),
        ([{}, 1], "other"),
    ],
)
def test_the_kind_of_a_column(values, kind):
    assert TypedColumn.of(values, "here").kind == kind


def test_dates_with_a_zone_are_in_utc():
    zone = datetime.timezone(datetime.timedelta(hours=2))
    column = TypedColumn.of([datetime.datetime(2024, 1, 1, 12, tzinfo=zone), None], "here")
    assert str(column.dates()[0]) == "2024-01-01T10:00:00.000000"
    assert np.isnat(column.dates()[1])


class TestPandas:
    """Frames of pandas, where it is installed."""

    def test_a_frame_is_read_as_a_file_is(self, tmp_path):
        pd = pytest.importorskip("pandas")
        columns = long_columns()
        expected = Data.read(write_csv(tmp_path / "d.csv", columns))
        frame = pd.DataFrame(columns)
        assert is_frame(frame)
        assert_same(Data.of(frame), expected)
        assert_same(Data.of(frame.astype({"label": "category", "id": "string"})), expected)
        assert_same(Data.of(frame.set_index(["id", "time"])), expected)

    def test_an_index_of_dates_is_the_time(self):
        pd = pytest.importorskip("pandas")
        days = pd.date_range("2024-01-01", periods=50)
        frame = pd.DataFrame({"x": np.sin(np.arange(50.0))}, index=days)
        assert columns_of(frame).keys() == {UNNAMED, "x"}
        task = Data.of(frame, kind="next", window=10)
        assert task.description.features == ["x"]
        assert task.description.columns["time"] == UNNAMED

    def test_nullable_columns(self):
        pd = pytest.importorskip("pandas")
        frame = pd.DataFrame({"x": [1, None, 3, 4] * 5, "label": ["a", "b"] * 10})
        frame = frame.astype({"x": "Int64"})
        task = Data.of(frame, rows="samples", missing="mask")
        assert task.description.masked == ["x"]


def test_a_polars_frame_is_read_as_a_file_is(tmp_path):
    pl = pytest.importorskip("polars")
    columns = long_columns()
    expected = Data.read(write_csv(tmp_path / "d.csv", columns))
    assert_same(Data.of(pl.DataFrame(columns)), expected)
    assert_same(Data.of(pl.LazyFrame(columns)), expected)


def test_a_pyarrow_table_is_read_as_a_file_is(tmp_path):
    pa = pytest.importorskip("pyarrow")
    columns = long_columns()
    expected = Data.read(write_csv(tmp_path / "d.csv", columns))
    assert_same(Data.of(pa.table({k: list(v) for k, v in columns.items()})), expected)
