"""Words, True and False, and gaps in time as inputs."""

import csv
import json
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coadjoint.errors import ConfigError, DataError
from coadjoint.tasks import encoding
from coadjoint.tasks.data import Data
from coadjoint.tasks.description import Description
from coadjoint.tasks.files import Options, read
from coadjoint.tasks.files.words import canonical_word
from paths import put

ALL = {"split": (1, 0, 0), "standardise": True}


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return path


def samples(tmp_path, words, name="d.csv"):
    rows = [(k % 3, k, word, "up" if k % 2 else "down") for k, word in enumerate(words)]
    return write(tmp_path / name, "on,a,city,target", rows)


def test_a_word_is_an_input_of_its_own(tmp_path):
    words = ["Rome", "Oslo", "Rome", "Rome"]
    data = Data.read(samples(tmp_path, words), rows="samples", categorical="city", **ALL)
    d = data.description
    assert d.input_names == ["on", "a", "city = Oslo", "city = Rome"]
    assert d.input_columns == ["on", "a", "city", "city"]
    assert data.inputs == 4
    x = np.array(data.sets["train"].x)
    np.testing.assert_allclose(x[:, 2:], [[-0.25, 0.25], [0.75, -0.75]] + [[-0.25, 0.25]] * 2)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-7)


def test_without_scaling_words_are_0_and_1(tmp_path):
    data = Data.read(
        samples(tmp_path, ["Rome", "Oslo"] * 3),
        rows="samples",
        categorical="city",
        split=(1, 0, 0),
        standardise=False,
    )
    np.testing.assert_array_equal(np.array(data.sets["train"].x)[:2, 2:], [[0, 1], [1, 0]])


def test_an_unknown_word_is_the_mean_of_those_known(tmp_path):
    data = Data.read(
        samples(tmp_path, ["Rome", "Oslo"] * 3), rows="samples", categorical="city", **ALL
    )
    stored = json.loads(json.dumps(data.describe()))
    new = samples(tmp_path, ["Bonn", "Rome", "Oslo"], "new.csv")
    prediction = Data.for_prediction(stored, new)
    np.testing.assert_allclose(prediction.u[:, 2:], [[0, 0], [-0.5, 0.5], [0.5, -0.5]])
    assert any("'Bonn'" in note and "'city'" in note for note in prediction.notes)


def test_words_beyond_the_most_frequent_share_an_input(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "MOST_WORDS", 3)
    path = samples(tmp_path, [*"aaabbbccdde"])
    data = Data.read(path, rows="samples", categorical="city", **ALL)
    assert data.description.input_names[2:] == ["city = a", "city = b", "city (other)"]
    np.testing.assert_allclose(data.description.shares["city"], [3 / 11, 3 / 11, 5 / 11])
    prediction = Data.for_prediction(data.describe(), samples(tmp_path, ["c", "x"], "new.csv"))
    np.testing.assert_allclose(prediction.u[0, 2:], [-3 / 11, -3 / 11, 6 / 11], atol=1e-7)
    np.testing.assert_array_equal(prediction.u[1, 2:], prediction.u[0, 2:])


@pytest.mark.parametrize(
    ("missing", "count", "expected"),
    [
        ("drop", 3, [-1 / 3, 1 / 3]),
        ("mask", 4, [-1 / 3, 1 / 3]),
    ],
)
def test_missing_words(tmp_path, missing, count, expected):
    path = samples(tmp_path, ["Rome", "Oslo", "", "Rome"])
    with pytest.raises(DataError, match="column 'city': 1 of 4 values are missing"):
        Data.read(path, rows="samples", categorical="city", **ALL)
    data = Data.read(path, rows="samples", categorical="city", missing=missing, **ALL)
    x = np.array(data.sets["train"].x)
    assert len(x) == count
    np.testing.assert_allclose(x[0, -2:], expected, atol=1e-7)
    if missing == "mask":
        assert data.description.input_names[2] == "city (missing)"
        np.testing.assert_allclose(x[2, 2:], [1, 0, 0])


def sequences(tmp_path, name="d.csv", **columns):
    """Three sequences of four rows with times 0, 1, 2, 5, and further columns."""
    rows = []
    for i in range(12):
        given = [cells[i % len(cells)] for cells in columns.values()]
        rows.append((f"s{i // 4}", (0, 1, 2, 5)[i % 4], i * i % 7, *given))
    return write(tmp_path / name, ",".join(["id", "time", "a", *columns]), rows)


def test_the_next_step_is_predicted_for_numbers_or_for_one_column_of_words(tmp_path):
    path = sequences(tmp_path, sky=["sun", "rain"])
    options = {"kind": "next", "irregular": "allow", **ALL}
    data = Data.read(path, categorical="auto", **options)
    assert (data.inputs, data.outputs) == (3, 1)
    u = np.array(data.sets["train"].u[0])
    np.testing.assert_allclose(np.array(data.sets["train"].y[0])[:-1, 0], u[1:, 0])
    prediction = Data.for_prediction(data.describe(), path)
    header = next(prediction.rows([]))
    assert header[-1] == "prediction"
    words = Data.read(path, categorical="sky", features="sky", **options)
    assert (words.description.symbols, words.description.labels) == ("symbol", ["rain", "sun"])


def test_words_of_held_out_files_have_the_numbers_of_training(tmp_path):
    train = samples(tmp_path, ["Rome", "Oslo", "Rome", "Bonn"])
    test = samples(tmp_path, ["Oslo", "Rome", "Paris"], "test.csv")
    data = Data.read(
        train, test=test, split=(1, 0, 0), rows="samples", categorical="city", overlap="allow"
    )
    assert data.description.input_names[2:] == ["city = Bonn", "city = Oslo", "city = Rome"]
    x = np.array(data.sets["test"].x)[:, 2:]
    np.testing.assert_allclose(x[:2], np.array(data.sets["train"].x)[[1, 0], 2:])
    np.testing.assert_array_equal(x[2], 0)
    # Rows are compared by their words, not by the numbers these happen to have in each file.
    again = [(0, 0, "Rome", "up"), (1, 1, "Oslo", "up")]
    twice = write(tmp_path / "e.csv", "on,a,city,target", again)
    with pytest.raises(DataError, match="2 of its samples are in the train file too"):
        Data.read(train, test=twice, split=(1, 0, 0), rows="samples", categorical="city")


def test_auto_leaves_out_dates_and_names(tmp_path):
    rows = [(f"name {k}", "ab"[k % 2], f"2024-01-{k % 28 + 1:02d}", k) for k in range(30)]
    path = write(tmp_path / "d.csv", "who,kind,born,target", rows)
    options = {"rows": "samples", "kind": "regress", **ALL}
    data = Data.read(path, categorical="auto", **options)
    assert data.description.features == ["kind"]
    text = "\n".join(data.notes)
    for words in ("'who' holds 30 different words in 30", "'born' holds dates", "'kind'"):
        assert words in text
    with pytest.raises(DataError, match="30 different words in 30 training rows recur too rarely"):
        Data.read(path, categorical="who", features="who", **options)


def test_words_of_a_parquet_file_read_as_those_of_a_table(tmp_path):
    path = samples(tmp_path, ["Rome", "Oslo", "Rome", "Rome"])
    columns = {"on": [0, 1, 2, 0], "a": [0, 1, 2, 3], "city": ["Rome", "Oslo", "Rome", "Rome"]}
    columns["city"] = pa.array(columns["city"]).dictionary_encode()
    columns["target"] = ["down", "up"] * 2
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    options = {"rows": "samples", "categorical": "auto", **ALL}
    ours = Data.read(tmp_path / "d.parquet", **options)
    theirs = Data.read(path, **options)
    np.testing.assert_array_equal(ours.sets["train"].x, theirs.sets["train"].x)
    with pytest.raises(DataError, match=r"column 'city'.*--categorical city.*--features on,a"):
        Data.read(tmp_path / "d.parquet", rows="samples", **ALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"categorical": "sky"}, "--categorical 'sky': there is no such column"),
        ({"categorical": "target", "target": "target"}, "it is the target column"),
        ({"categorical": "city", "kind": "reconstruct"}, "cannot be reconstructed"),
        ({"categorical": "city", "gaps": True}, "--gaps needs sequences of time steps"),
    ],
)
def test_what_is_refused_for_samples(tmp_path, options, words):
    path = samples(tmp_path, ["Rome", "Oslo"] * 3)
    with pytest.raises((ConfigError, DataError), match=words):
        Data.read(path, rows="samples", **options)


def test_arrays_have_no_words(tmp_path):
    np.savez(tmp_path / "d.npz", u=np.ones((3, 4, 2)), y=np.arange(3))
    with pytest.raises(DataError, match="is no table: --categorical"):
        Data.read(tmp_path / "d.npz", kind="regress", categorical="u0")


@pytest.mark.parametrize(
    ("cell", "word"),
    [(" Rome ", "Rome"), ("1.0", "1"), ("1.5", "1.5"), ("TRUE", "true"), ("NA", ""), ("", "")],
)
def test_words_are_compared_as_they_are_meant(cell, word):
    assert canonical_word(cell) == word


def test_gaps_in_time_are_an_input(tmp_path):
    path = sequences(tmp_path)
    options = {"kind": "next", **ALL}
    with pytest.raises(DataError, match="or pass --irregular allow or --gaps"):
        Data.read(path, **options)
    data = Data.read(path, gaps=True, **options)
    assert data.description.input_names == ["a", "time (gap)"]
    assert data.description.input_columns == ["a", "time"]
    logs = np.log1p([1, 1, 3])
    expected = (logs - logs.mean()) / logs.std()
    np.testing.assert_allclose(
        np.array(data.sets["train"].u[1])[:, 1], [0, *expected[:2]], atol=1e-6
    )
    prediction = Data.for_prediction(json.loads(json.dumps(data.describe())), path)
    np.testing.assert_allclose(prediction.u[4:8, 1], [0, *expected], atol=1e-6)


def test_a_dropped_row_makes_a_gap(tmp_path):
    rows = [(k, "" if k == 3 else k) for k in range(8)]
    path = write(tmp_path / "d.csv", "time,a", rows)
    data = Data.read(path, kind="next", gaps=True, missing="drop", **ALL)
    gap = np.array(data.sets["train"].u[0])[:, 1]
    assert gap.argmax() == 3
    even = write(tmp_path / "e.csv", "time,a", [(k, k * k) for k in range(8)])
    notes = Data.read(even, kind="next", gaps=True, **ALL).notes
    assert any("--gaps adds nothing" in note for note in notes)


def test_gaps_need_times_of_the_same_kind(tmp_path):
    path = write(tmp_path / "d.csv", "a", [(k * k,) for k in range(8)])
    with pytest.raises(DataError, match="--gaps needs a time column"):
        Data.read(path, kind="next", gaps=True, **ALL)
    numbers = write(tmp_path / "n.csv", "time,a", [(k * k, k) for k in range(8)])
    stored = Data.read(numbers, kind="next", gaps=True, **ALL).describe()
    dates = write(tmp_path / "t.csv", "time,a", [(f"2024-01-0{k}", k) for k in range(1, 9)])
    with pytest.raises(DataError, match="times are dates and were numbers in training"):
        Data.for_prediction(stored, dates)


def test_the_order_of_day_and_month_is_that_of_training(tmp_path):
    rows = [(f"{k + 1:02d}.02.2024", k * k) for k in range(20)]
    data = Data.read(write(tmp_path / "d.csv", "date,a", rows), kind="next", **ALL)
    new = write(tmp_path / "new.csv", "date,a", rows[:5])
    prediction = Data.for_prediction(data.describe(), new)
    assert np.diff(prediction.cut.sheet.time).tolist() == [86_400_000_000] * 4
    with pytest.raises(DataError, match="is the day first or the month"):
        Data.read(new, kind="next", **ALL)


def test_true_and_false_are_1_and_0(tmp_path):
    text = "a,b\n" + "True,1\nFALSE,2\nfalse,\n" * 3
    sheet = read(put(tmp_path, "d.csv", text), Options(kind="next", missing="mask"))
    assert sheet.u[:3, 0].tolist() == [1, 0, 0]
    words = read(put(tmp_path, "e.csv", "a,target\n1,True\n2,False\n"), Options())
    assert words.y.tolist() == ["True", "False"]  # as labels they are words


def test_labels_of_a_data_frame_are_whole_numbers(tmp_path):
    rows = [(f"s{k}", k, f"{k % 2}.0") for k in range(9)]
    data = Data.read(write(tmp_path / "d.csv", "id,a,target", rows), kind="classify")
    assert data.description.labels == ["0", "1"]
    assert any("every sequence" in note and "--chain" in note for note in data.notes)


def test_a_description_of_0_8_0_is_read(tmp_path):
    stored = Data.read(sequences(tmp_path), kind="next", irregular="allow", **ALL).describe()
    old = {k: v for k, v in stored.items() if k not in ("categories", "shares", "gap")}
    old["reading"] = {k: v for k, v in old["reading"].items() if k != "dates"}
    assert Description.of(old).input_names == ["a"]
    assert len(Data.for_prediction(old, tmp_path / "d.csv")) == 3


@pytest.mark.parametrize(
    "damage",
    [
        {"categories": {"no": ["a"]}, "shares": {"no": [1.0]}},
        {"categories": {"sky": ["a", "a"]}, "shares": {"sky": [0.5, 0.5]}},
        {"categories": {"sky": ["a"]}, "shares": {"sky": [0.1, 0.2, 0.7]}},
        {"categories": {"sky": ["a"]}, "shares": {}},
        {"categories": {"sky": ["a"]}, "shares": {"sky": ["x"]}},
        {"categories": []},
        {"gap": {"usual": 0.0, "mean": 0.0, "std": 1.0, "dates": 0.0}},
        {"gap": {"usual": 1.0}},
        {"gap": None},
    ],
)
def test_a_damaged_description_is_refused(tmp_path, damage):
    path = sequences(tmp_path, sky=["sun", "rain"])
    data = Data.read(path, kind="next", categorical="sky", gaps=True, **ALL)
    with pytest.raises(DataError, match="description of its data is damaged"):
        Description.of(asdict(data.description) | damage)


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        (["Paris"], "1 word is rare or not in the training rows and counts as the mean of"),
        (["Paris", "Bonn"], "2 words are rare or not in the training rows and count as the mean"),
    ],
)
def test_words_that_training_lacked_are_counted(tmp_path, unknown, words):
    path = samples(tmp_path, ["Rome", "Oslo"] * 3)
    data = Data.read(path, rows="samples", categorical="city", **ALL)
    new = samples(tmp_path, ["Rome", *unknown], "new.csv")
    notes = Data.for_prediction(data.describe(), new).notes
    assert words in " ".join(notes)


def days(left_out=(), blank=()):
    """Two sequences of ten days, sorted by day and not by sequence."""
    lines = ["id,day,a,b"]
    for t in range(10):
        lines += [f"{name},{t},{'' if (name, t) in blank else t % 3},1.{t}" for name in "qp"]
    return "\n".join(line for line in lines if tuple(line.split(",")[:2]) not in left_out) + "\n"


def test_gaps_that_drop_makes_are_told_with_their_cause(tmp_path):
    path = put(tmp_path, "d.csv", days(blank=[("p", 4), ("p", 7)]))
    options = {"kind": "next", "id": "id", "time": "day", "split": (1, 0, 0)}
    with pytest.raises(DataError) as caught:
        Data.read(path, missing="drop", **options)
    text = str(caught.value)
    assert "the usual one is 1 (2 of 16 steps differ). --missing drop left out 2 rows" in text
    assert "that lack a value, which makes gaps. Pass --missing mask or ffill" in text
    assert "Resample" not in text
    for missing in ("mask", "ffill"):
        Data.read(path, missing=missing, **options)
    # Steps that are uneven in the file have that cause, too.
    uneven = put(tmp_path, "e.csv", days(blank=[("p", 4)], left_out=[("p", "8")]))
    with pytest.raises(DataError, match="Resample to a regular step") as caught:
        Data.read(uneven, missing="drop", **options)
    assert "Some gaps may come from --missing drop, which left out 1 row that" in str(caught.value)


def test_what_ffill_cannot_fill_is_listed_by_row_with_its_sequence(tmp_path):
    path = put(tmp_path, "d.csv", days(blank=[("p", 0), ("p", 1), ("q", 0)]))
    with pytest.raises(DataError) as caught:
        Data.read(path, kind="next", time="day", missing="ffill")
    lines = str(caught.value).split("\n")[1:]
    places = [line.split("d.csv:")[1].split(", so")[0] for line in lines]
    complaint = "column 'a': the value is missing and sequence '{}' has none before it"
    expected = [(2, "q"), (3, "p"), (5, "p")]
    assert places == [f"{line} {complaint.format(name)}" for line, name in expected]


def test_a_column_that_is_empty_in_sequences_takes_one_line(tmp_path):
    blank = [("p", t) for t in range(10)]
    path = put(tmp_path, "d.csv", days(blank=blank))
    with pytest.raises(DataError) as caught:
        Data.read(path, kind="next", time="day", missing="ffill")
    assert str(caught.value) == (
        f"{path}:3 column 'a': 1 of 2 sequences has no value at all ('p'), so --missing ffill has "
        "nothing to fill from. Leave the column out with --features, remove these sequences, or "
        "pass --missing mask."
    )
    # A gap at the beginning of another sequence is still listed by its row.
    path = put(tmp_path, "e.csv", days(blank=[*blank, ("q", 0)]))
    with pytest.raises(DataError) as caught:
        Data.read(path, kind="next", time="day", missing="ffill")
    lines = str(caught.value).split("\n")
    assert [line.split(",")[0] for line in lines[1:]] == [
        f"{path}:3 column 'a': 1 of 2 sequences has no value at all ('p')",
        f"{path}:2 column 'a': the value is missing and sequence 'q' has none before it",
    ]


def test_one_row_is_not_rows(tmp_path):
    options = {"kind": "next", "time": "day", "irregular": "allow", "split": (1, 0, 0)}
    path = put(tmp_path, "d.csv", days(blank=[("p", 4)]))
    said = " ".join(Data.read(path, missing="drop", **options).notes)
    assert f"1 row of {path} lacks a value and is left out" in said
    said = " ".join(Data.read(path, missing="ffill", **options).notes)
    assert f"1 missing value of {path} is filled from the row before" in said
