"""Prepared sets: the same numbers as from the tables, and nothing taken for granted."""

import json
import shutil

import numpy as np
import pytest

from coadjoint.errors import ConfigError, DataError
from coadjoint.tasks import chunks, stored_gaps
from coadjoint.tasks.data import Data
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.prepared import open_prepared
from coadjoint.tasks.preparing import prepare
from same_sets import assert_same


def table(n=12, T=9, seed=0, ids=None, gaps=(), words=False):
    """Rows of a table with an id, a time, two features and a label that belongs to the sequence."""
    draw = np.random.default_rng(seed)
    rows = ["id,time,a,b,c,label" if words else "id,time,a,b,label"]
    for i in range(n):
        name = ids[i] if ids else f"s{i}"
        for t in range(T + i % 3):
            a, b = draw.normal(size=2).round(4)
            cells = [name, t, "" if (i, t) in gaps else a, b]
            if words:
                cells.append(("sun", "rain", "fog")[draw.integers(3)])
            rows.append(",".join(map(str, [*cells, "up" if i % 2 else "down"])))
    return "\n".join(rows) + "\n"


def without_label(text, *lines):
    """The table without the labels of some lines, from 1."""
    rows = text.split("\n")
    for line in lines:
        rows[line - 1] = rows[line - 1].rpartition(",")[0] + ","
    return "\n".join(rows)


def put(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def prepared(folder, *paths, name="d.co", irregular="refuse", **options):
    out = folder / name
    out.mkdir()
    prepare(paths, out, Options(**options), irregular)
    return out


@pytest.fixture(params=[7, 1000], ids=["small chunks", "one chunk"])
def rows_per_chunk(request, monkeypatch):
    """Sequences that go on in the next chunk, or not."""
    from coadjoint.tasks.files import text

    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", request.param)
    monkeypatch.setattr(text, "ROWS_PER_BLOCK", request.param)


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize(
    ("reading", "training"),
    [
        ({}, {}),
        ({"kind": "next", "features": ("a", "b")}, {}),
        ({"kind": "next", "features": ("a", "b")}, {"window": 4, "stride": 2}),
        ({"kind": "next", "features": ("a", "b")}, {"known": "b", "target": "a"}),
        ({"kind": "next", "features": ("a", "b")}, {"window": 5, "lags": [2, 4]}),
        ({"kind": "regress", "target": ("b",), "features": ("a",)}, {"at": "every"}),
        ({}, {"window": 4, "class_weight": "balanced"}),
        ({}, {"features": "b"}),
        ({}, {"standardise": False, "dtype": "float64"}),
    ],
)
def test_a_prepared_set_has_the_bits_of_its_table(tmp_path, reading, training):
    path = put(tmp_path, "d.csv", table())
    given = {"kind": "classify", **reading}
    out = prepared(tmp_path, path, **given)
    from_file = {**given, **training}
    names = {"target": "a"} if training.get("known") else {}
    a = Data.read(path, **from_file | names)
    b = Data.read(out, **training | names)
    assert_same(a, b)
    assert [(x.about, x.metrics) for x in a.baselines] == [
        (x.about, x.metrics) for x in b.baselines
    ]
    assert a.overview.splits == b.overview.splits
    assert a.overview.hints == b.overview.hints


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("missing", ["drop", "ffill", "mask"])
def test_gaps_are_dealt_with_as_in_a_table(tmp_path, missing):
    text = table(gaps={(0, 3), (0, 4), (2, 8), (5, 6)})
    path = put(tmp_path, "d.csv", text)
    irregular = "allow" if missing == "drop" else "refuse"
    given = {"kind": "classify", "missing": missing}
    out = prepared(tmp_path, path, irregular=irregular, **given)
    assert_same(Data.read(path, irregular=irregular, **given), Data.read(out))


def test_rows_that_a_set_lacks_are_told(tmp_path):
    path = put(tmp_path, "d.csv", table(gaps={(0, 3)}))
    given = {"kind": "classify", "missing": "drop"}
    with pytest.raises(DataError, match="--missing drop left out 1 row, which may make gaps"):
        prepared(tmp_path, path, **given)
    out = prepared(tmp_path, path, name="e.co", irregular="allow", **given)
    notes = json.loads((out / "description.json").read_text())["notes"]
    assert "1 row with a missing input left out (--missing drop)" in notes
    read = Data.read(out, split=(1, 0, 0)).summary(200)
    assert "no input is missing after `coadjoint prepare` (--missing drop)" in read
    path = put(tmp_path, "f.csv", table(gaps={(0, 0)}))
    with pytest.raises(DataError, match="and sequence 's0' has none before it"):
        prepared(tmp_path, path, name="f.co", kind="classify", missing="ffill")


def test_a_set_with_an_empty_column_is_not_filled(tmp_path):
    lines = [f"{i},{t}.5,,p" for i in range(3) for t in range(4)]
    path = put(tmp_path, "d.csv", "\n".join(["id,a,b,label", *lines, ""]))
    with pytest.raises(DataError, match=r"'b': every value is missing\. Leave the column out with"):
        prepared(tmp_path, path, kind="classify", missing="ffill")
    path = put(tmp_path, "e.csv", "\n".join(["id,a,b,label", *lines, "3,1,2,p", ""]))
    with pytest.raises(DataError, match=r"e\.csv:2 column 'b': the value is missing and sequence"):
        prepared(tmp_path, path, name="e.co", kind="classify", missing="ffill")


@pytest.mark.usefixtures("rows_per_chunk")
def test_words_have_the_same_inputs(tmp_path):
    path = put(tmp_path, "d.csv", table(words=True))
    other = put(tmp_path, "e.csv", table(n=6, seed=1, words=True, ids=[f"t{i}" for i in range(6)]))
    given = {"kind": "classify", "categorical": ("c",)}
    out = prepared(tmp_path, path, **given)
    held = prepared(tmp_path, other, name="e.co", **given)
    assert_same(Data.read(path, test=other, **given), Data.read(out, test=held))


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_of_words_are_found(tmp_path, suffix):
    """Those of the first file; a column of names is left out, as from the table."""
    rows = [f"{line},n{i}" for i, line in enumerate(table(words=True).splitlines())]
    path = put(tmp_path, "d.csv", "\n".join([rows[0][:-1] + "ame", *rows[1:]]) + "\n")
    if suffix == ".parquet":
        path = as_parquet(path)
    given = {"kind": "classify", "target": ("label",), "categorical": ("auto",)}
    out = prepared(tmp_path, path, **given)
    a = Data.read(path, **given)
    assert_same(a, Data.read(out))
    assert_same(a, Data.read(out, categorical="auto"))
    assert list(a.description.categories) == ["c"]
    about = open_prepared(out).about
    assert about["features"] == ["a", "b", "c"]
    assert any("'name' holds" in note and "left out" in note for note in about["notes"])


def as_parquet(path):
    csv = pytest.importorskip("pyarrow.csv")
    from pyarrow import parquet

    parquet.write_table(csv.read_csv(path), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def uneven_table(dates=False):
    """Time steps of all lengths, or dates with days left out."""
    draw = np.random.default_rng(3)
    lines = []
    for line in table().splitlines()[1:]:
        name, time, *rest = line.split(",")
        step = int(time) * 3 + int(draw.integers(3))
        written = np.datetime64("2024-01-01") + step if dates else f"{step / 4:g}"
        lines.append(",".join([name, str(written), *rest]))
    return "\n".join(["id,time,a,b,label", *lines]) + "\n"


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("dates", [False, True])
@pytest.mark.parametrize(
    ("reading", "training"),
    [
        ({"kind": "classify"}, {}),
        ({"kind": "classify"}, {"window": 4, "standardise": False}),
        ({"kind": "next", "features": ("a", "b")}, {"window": 5, "lags": [2]}),
        ({"kind": "regress", "target": ("b",), "features": ("a",)}, {"at": "every"}),
    ],
)
def test_the_time_since_the_row_before_is_an_input(tmp_path, reading, training, dates):
    path = put(tmp_path, "d.csv", uneven_table(dates))
    out = prepared(tmp_path, path, irregular="allow", **reading)
    a = Data.read(path, gaps=True, **reading, **training)
    b = Data.read(out, gaps=True, **training)
    assert a.description.gap == b.description.gap
    assert_same(a, b)
    assert not any("adds nothing" in note for note in b.notes)
    if training.get("at") == "every":  # pieces that begin within a sequence
        a.cut_training(3)
        b.cut_training(3)
        assert_same(a, b)


def test_gaps_need_times_and_say_when_they_are_even(tmp_path):
    even = prepared(tmp_path, put(tmp_path, "d.csv", table()), kind="classify")
    notes = Data.read(even, gaps=True).notes
    assert any("are even: --gaps adds nothing" in note for note in notes)
    lines = [line.split(",") for line in table().splitlines()]
    untimed = "\n".join(",".join([row[0], *row[2:]]) for row in lines) + "\n"
    out = prepared(tmp_path, put(tmp_path, "e.csv", untimed), name="e.co", kind="classify")
    with pytest.raises(DataError, match="prepared without one"):
        Data.read(out, gaps=True)
    single = "\n".join(
        ["id,time,a,b,label", *(row for row in table(n=30).splitlines() if ",0," in row)]
    )
    out = prepared(tmp_path, put(tmp_path, "f.csv", single), name="f.co", kind="classify")
    with pytest.raises(DataError, match="sequences of two rows or more"):
        Data.read(out, gaps=True)


def test_many_times_have_a_median_of_the_first(tmp_path, monkeypatch):
    path = put(tmp_path, "d.csv", uneven_table())
    out = prepared(tmp_path, path, irregular="allow", kind="classify")
    exact = Data.read(path, kind="classify", gaps=True).description.gap
    usual = []
    for count in (1, 2, 3, 1000):
        monkeypatch.setattr(stored_gaps, "STEPS_LOOKED_AT", count)
        usual.append(Data.read(out, gaps=True).description.gap["usual"])
    assert usual[-1] == exact["usual"]
    assert len(set(usual)) > 1


def wide_table(n=12, seed=0, id=True, steps=9):
    """A row for each sequence, whose length differs."""
    draw = np.random.default_rng(seed)
    rows = [("name," if id else "") + ",".join(f"t{t}" for t in range(steps)) + ",label"]
    for i in range(n):
        cells = [f"w{seed}{i}"] if id else []
        values = draw.normal(size=steps).round(4)
        cells += [str(x) if t < steps - i % 3 else "" for t, x in enumerate(values)]
        rows.append(",".join([*cells, "up" if i % 2 else "down"]))
    return "\n".join(rows) + "\n"


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("id", [True, False])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_row_may_be_a_sequence(tmp_path, suffix, id):
    given = {"wide": True, "id": "name" if id else "", "target": ("label",)}
    path = put(tmp_path, "d.csv", wide_table(id=id))
    test = put(tmp_path, "e.csv", wide_table(5, 1, id, steps=11))
    if suffix == ".parquet":
        path, test = map(as_parquet, (path, test))
    out = prepared(tmp_path, path, **given)
    held = prepared(tmp_path, test, name="e.co", **given)
    a = Data.read(path, test=test, **given)
    for b in (Data.read(out, test=held), Data.read(out, wide=True, test=held)):
        assert_same(a, b)
        assert a.description.reading == b.description.reading
        assert a.overview.files["train"].layout == b.overview.files["train"].layout
    with pytest.raises(DataError, match="Prepare both files, or neither"):
        Data.read(out, test=test)
    with pytest.raises(ConfigError, match="--wide reads tables"):
        Data.read(prepared(tmp_path, put(tmp_path, "l.csv", table()), name="l.co"), wide=True)


def test_several_wide_tables_are_one_set(tmp_path):
    given = {"wide": True, "target": ("label",)}
    one = put(tmp_path, "d.csv", wide_table(id=False))
    other = put(tmp_path, "e.csv", wide_table(5, 1, id=False, steps=11))
    out = prepared(tmp_path, one, other, **given)
    about = open_prepared(out).about
    assert about["sequences"] == 17
    long = np.load(out / "starts.npy")
    assert np.diff(long).tolist() == [9 - i % 3 for i in range(12)] + [11 - i % 3 for i in range(5)]
    assert {*Data.read(out).sets["train"].ids} < {*map(str, range(17))}


def test_chunks_of_training_are_the_same(tmp_path):
    path = put(tmp_path, "d.csv", table())
    a = Data.read(path, kind="next", features=("a", "b"))
    b = Data.read(prepared(tmp_path, path, kind="next", features=("a", "b")))
    a.cut_training(3)
    b.cut_training(3)
    assert_same(a, b)


def test_typed_tables_keep_32_bits(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    draw = np.random.default_rng(0)
    columns = {
        "id": np.repeat(np.arange(20), 6),
        "time": np.tile(np.arange(6), 20),
        "a": draw.normal(size=120).astype(np.float32),
        "b": draw.normal(size=120).astype(np.float32),
        "label": np.repeat(np.arange(20) % 2, 6),
    }
    rows = arrow.table(columns)
    pyarrow.parquet.write_table(rows, tmp_path / "d.parquet", row_group_size=50)
    pyarrow.feather.write_feather(rows, tmp_path / "d.arrow")
    for name in ("d.parquet", "d.arrow"):
        given = {"kind": "classify", "target": ("label",)}
        out = prepared(tmp_path, tmp_path / name, name=f"{name}.co", **given)
        assert np.load(out / "u.npy").dtype == np.float32
        assert_same(Data.read(tmp_path / name, **given), Data.read(out))


def test_several_files_are_one_set(tmp_path):
    one = put(tmp_path, "a.csv", table(n=6))
    two = put(tmp_path, "b.csv", table(n=6, seed=1, ids=[f"t{i}" for i in range(6)]))
    both = put(tmp_path, "c.csv", one.read_text() + two.read_text().split("\n", 1)[1])
    out = prepared(tmp_path, one, two, kind="classify")
    assert_same(Data.read(both, kind="classify"), Data.read(out))
    about = json.loads((out / "description.json").read_text())
    assert [source["name"] for source in about["sources"]] == ["a.csv", "b.csv"]
    assert about["moments"]["mean"] == pytest.approx(np.load(out / "u.npy").mean(0))
    assert about["moments"]["std"] == pytest.approx(np.load(out / "u.npy").std(0))


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([table(ids=["x", "y", "x"], n=3)], ["a.csv:21", "'x' appears again"]),
        ([table(n=3), table(n=1)], ["b.csv:2", "'s0' appears again", "one file"]),
        (
            [table(n=2).replace("s0,8,", "s0,7.5,").replace("s0,7,", "s0,9,")],
            ["a.csv:10", "before"],
        ),
        ([table(n=2).replace("s0,8,", "s0,7,")], ["a.csv:10", "same"]),
        ([table(n=2).replace("s0,8,", "s0,11,")], ["a.csv row 9", "time step is 4"]),
        ([table(n=2, gaps={(1, 2)})], ["a.csv:13", "missing"]),
        ([table(n=2).replace("s1,3,", "s1,3,x")], ["a.csv:14", "not a number"]),
        (
            [table(n=2), table(n=1, ids=["x"], words=True)],
            ["b.csv column 'c'", "a.csv, the first table", "--features a,b"],
        ),
        (
            [without_label(table(n=2), 6)],
            ["a.csv:6 column 'label'", "8 other rows of sequence 's0'", "--missing drop|mask"],
        ),
        ([without_label(table(n=2), 12, 13)], ["a.csv:12", "8 other rows of sequence 's1'"]),
    ],
)
def test_what_one_pass_cannot_take_is_refused_by_its_place(tmp_path, texts, words):
    paths = [put(tmp_path, f"{'ab'[k]}.csv", text) for k, text in enumerate(texts)]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, *paths, kind="classify")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("rows_per_chunk")
def test_columns_and_labels_that_are_meant_are_taken(tmp_path):
    one = put(tmp_path, "a.csv", table(n=6))
    two = put(tmp_path, "b.csv", table(n=6, words=True, ids=[f"t{i}" for i in range(6)]))
    prepared(tmp_path, one, two, name="named.co", kind="classify", features=("a", "b"))
    # A label in a single row is that of the sequence; gaps may be asked for.
    single = put(tmp_path, "c.csv", without_label(table(n=6), *range(3, 11)))
    out = prepared(tmp_path, single, name="single.co", kind="classify")
    assert_same(Data.read(single, kind="classify", at="last"), Data.read(out, at="last"))
    lacking = put(tmp_path, "d.csv", without_label(table(n=6), 6))
    for missing in ("drop", "mask"):
        name = f"{missing}.co"
        prepared(tmp_path, lacking, name=name, kind="classify", missing=missing)
    with pytest.raises(DataError, match="'label': the target is missing"):
        prepared(tmp_path, lacking, name="ffill.co", kind="classify", missing="ffill")


def test_options_of_reading_are_settled(tmp_path):
    out = prepared(tmp_path, put(tmp_path, "d.csv", table()), kind="classify")
    for wrong in ({"target": "a"}, {"kind": "regress"}, {"missing": "drop"}):
        with pytest.raises(ConfigError):
            Data.read(out, **wrong)
    with pytest.raises(ConfigError, match="--chain"):
        Data.read(out, rows="samples")
    with pytest.raises(DataError, match="'z'"):
        Data.read(out, features=("a", "z"))


def test_a_damaged_folder_is_refused(tmp_path):
    out = prepared(tmp_path, put(tmp_path, "d.csv", table()), kind="classify")
    about = json.loads((out / "description.json").read_text())

    def refused(match):
        with pytest.raises(DataError, match=match):
            Data.read(tmp_path / "bad.co").batch(0, 4, 0)
        shutil.rmtree(tmp_path / "bad.co")
        shutil.copytree(out, tmp_path / "bad.co")

    shutil.copytree(out, tmp_path / "bad.co")
    for key, value in (
        ("rows", 10**12),
        ("rows", -1),
        ("features", ["a", "a"]),
        ("arrays", {}),
        ("labels", [1]),
        ("moments", {}),
        ("moments", dict.fromkeys(about["moments"], 5)),
        ("kind", "other"),
        ("sources", [{}]),
    ):
        text = json.dumps({**about, key: value})
        (tmp_path / "bad.co" / "description.json").write_text(text)
        refused("not valid")
    for changed in ({"features": ["b", "a"]}, {"notes": ["other"]}):
        text = json.dumps(about | changed)
        (tmp_path / "bad.co" / "description.json").write_text(text)
        refused("was changed")
    (tmp_path / "bad.co" / "description.json").unlink()
    refused("description.json does not exist")
    (tmp_path / "bad.co" / "starts.npy").unlink()
    refused("starts.npy is missing. Prepare the folder again")
    numbers = np.load(out / "y.npy")
    numbers[7] = 9
    np.save(tmp_path / "bad.co" / "y.npy", numbers)
    refused("no word has")
    (tmp_path / "bad.co" / "description.json").write_text("[" * 10**5)
    refused("not JSON|not valid")
    values = (out / "u.npy").read_bytes()
    (tmp_path / "bad.co" / "u.npy").write_bytes(values[:-8])
    refused("cut off")
    np.save(tmp_path / "bad.co" / "u.npy", np.array([[object()]]), allow_pickle=True)
    refused("Python objects")
    starts = np.load(out / "starts.npy")
    np.save(tmp_path / "bad.co" / "starts.npy", starts[::-1].copy())
    refused("starts.npy")
    np.save(tmp_path / "bad.co" / "id_ends.npy", np.zeros(len(starts) - 1, np.int64))
    refused("ids.npy")


def test_digests_tell_changed_values(tmp_path):
    out = prepared(tmp_path, put(tmp_path, "d.csv", table()), kind="classify")
    open_prepared(out).check_digests()
    values = bytearray((out / "u.npy").read_bytes())
    values[-1] ^= 1
    (out / "u.npy").write_bytes(values)
    with pytest.raises(DataError, match="SHA-256"):
        open_prepared(out).check_digests()


def test_a_file_that_shrinks_while_it_is_read_ends_in_an_error(tmp_path):
    out = prepared(tmp_path, put(tmp_path, "d.csv", table()), kind="classify")
    data = Data.read(out)
    with open(out / "u.npy", "r+b") as file:
        file.truncate(200)
    with pytest.raises(DataError, match="cut off"):
        data.batch(0, len(data.sets["train"]), 0)
