"""The summary of what was read: rows, features, classes, gaps and splits."""

import json

import numpy as np
import pytest

from coadjoint.tasks.data import Data
from coadjoint.tasks.overview import equal_steps, join_some
from paths import put


def table(rows, head="id,a,b,label"):
    return "\n".join([head, *(",".join(map(str, row)) for row in rows), ""])


def waves(lengths=(3, 4, 4, 5, 6, 6, 7, 8)):
    rows = []
    for i, T in enumerate(lengths):
        for t in range(T):
            rows.append((f"s{i}", np.sin(t + i), (t * 7 + i) % 5, "pq"[i % 2]))
    return rows


def test_counts_of_a_classification(tmp_path):
    data = Data.read(put(tmp_path, "w.csv", table(waves())), split=(0.5, 0.25, 0.25))
    overview = data.overview
    assert overview.files["train"].rows == 43
    assert overview.files["train"].lengths == [3, 5.5, 8]
    assert overview.classes == {"p": 4, "q": 4}
    pieces = {name: split.pieces for name, split in overview.splits.items()}
    assert pieces == {"train": 4, "valid": 2, "test": 2}
    assert sum(split.steps for split in overview.splits.values()) == 43
    text = data.summary()
    assert "data      w.csv: 43 rows in 8 sequences of 3 to 8 steps (median 5.5)" in text
    assert "inputs    2 features: a, b" in text
    assert "predicts  label, 2 classes: p (4), q (4)" in text
    assert "split     train 4 sequences (" in text
    assert "note      id column: 'id'\n          target column: 'label'" in text
    assert "missing" not in text
    plain = overview.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["lines"][0][0] == "data"
    assert all(len(line) <= 40 or " " not in line.strip() for line in data.summary(40).split("\n"))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("drop", "1 row with a missing input left out (--missing drop)"),
        ("ffill", "1 value filled from the row before (--missing ffill)"),
        ("mask", "1 value masked, in a; another input of the network marks them (--missing mask)"),
    ],
)
def test_what_was_missing(missing, words, tmp_path):
    rows = waves()
    rows[4] = ("s1", "", 3, "q")
    path = put(tmp_path, "w.csv", table(rows))
    data = Data.read(path, split=(1, 0, 0), missing=missing)
    assert f"missing   {words}" in data.summary(200)
    assert "left out" in " ".join(data.notes) or missing != "drop"  # notes stay for Python
    assert data.summary().count("left out") == (missing == "drop")
    whole = Data.read(put(tmp_path, "v.csv", table(waves())), split=(1, 0, 0), missing=missing)
    assert f"missing   no input is missing (--missing {missing})" in whole.summary()


def test_samples_with_a_missing_value(tmp_path):
    rows = [(i, i * i % 7, "" if i == 3 else i % 4, "pq"[i % 2]) for i in range(9)]
    path = put(tmp_path, "w.csv", table(rows))
    text = Data.read(path, rows="samples", missing="drop", split=(0.5, 0.25, 0.25)).summary()
    assert "data      w.csv: 9 samples\n" in text
    assert "missing   1 sample with a missing input left out (--missing drop)" in text
    assert "split     train 4 samples, valid 2, test 2" in text
    assert "steps" not in text


def test_counts_of_what_is_left_out_add_up(tmp_path):
    """Of five samples without a target, four lack an input, too, and are counted once."""
    rows = [(i, i * i % 7, "" if i < 6 else i % 4, "" if 2 <= i < 7 else i) for i in range(20)]
    path = put(tmp_path, "w.csv", table(rows))
    given = {"rows": "samples", "kind": "regress", "missing": "drop"}
    text = Data.read(path, split=(0.5, 0.25, 0.25), **given).summary(200)
    assert "6 samples with a missing input left out (--missing drop)" in text
    assert f"1 of 14 samples of {path} has no target and is left out" in text
    rows = [("s", i, "" if i < 6 else i % 4, "" if 4 <= i < 7 else i) for i in range(40)]
    path = put(tmp_path, "v.csv", table(rows))
    given = {"kind": "regress", "at": "every", "missing": "drop"}
    text = Data.read(path, split=(0.5, 0.25, 0.25), window=4, **given).summary(200)
    assert "7 rows with a missing input or target left out (--missing drop)" in text
    given |= {"at": "last", "split": (0.5, 0.25, 0.25), "window": 4}
    rows[9] = ("s", 9, 1, "")
    data = Data.read(put(tmp_path, "u.csv", table(rows)), **given)
    assert "6 rows with a missing input left out (--missing drop)" in data.summary(200)
    assert "1 of 8 windows of" in data.summary(200)


def test_a_time_among_the_features_is_pointed_out(tmp_path):
    rows = [(1700 + i, np.sin(i)) for i in range(40)]
    path = put(tmp_path, "sun.csv", table(rows, "YEAR,SPOTS"))
    text = " ".join(Data.read(path, kind="next", window=5).summary().split())
    assert "the next step of every feature: YEAR, SPOTS" in text
    assert "YEAR, which is predicted too, increases by 1 from row to row" in text
    assert "pass --time YEAR or --features SPOTS." in text
    assert "windows of at most 5 steps" in text
    timed = Data.read(path, kind="next", window=5, time="YEAR")
    assert timed.overview.hints == []
    samples = Data.read(path, kind="regress", target="SPOTS", rows="samples")
    like_time = "YEAR increases by 1 from row to row, like a time or an index. If it is one, "
    assert samples.overview.hints == [like_time + "there is no other feature to learn from."]
    samples = Data.read(path, kind="reconstruct", rows="samples")
    assert samples.overview.hints == [like_time + "pass --id YEAR or --features SPOTS."]
    np.savez(tmp_path / "sun.npz", u=np.array(rows)[None])
    arrays = Data.read(tmp_path / "sun.npz", kind="next", split=(1, 0, 0))
    assert "leave it out of the array" in arrays.overview.hints[0]


@pytest.mark.parametrize("columns", [[0.1, 0.2, 0.3], [1, 2, 3, 4, 6], [5, 4, 3, 2, 1, 0], [2] * 9])
def test_what_is_no_time(columns, tmp_path):
    """Too few rows, unequal steps, decreasing or constant values."""
    path = put(tmp_path, "d.csv", table([(x, i % 3) for i, x in enumerate(columns)], "a,b"))
    assert Data.read(path, kind="next", split=(1, 0, 0)).overview.hints == []


def test_times_that_are_rounded_are_found(tmp_path):
    rows = [("s", 1e6 + 0.1 * i, i % 3, "p") for i in range(9)]
    rows += [("r", 5 + 0.1 * i, i % 4, "q") for i in range(7)]
    data = Data.read(put(tmp_path, "d.csv", table(rows)), split=(1, 0, 0))
    assert [hint.split()[0] for hint in data.overview.hints] == ["a"]


def test_equal_steps_are_equal_in_every_sequence(tmp_path):
    rows = [("s", i, i % 3, "p") for i in range(6)] + [("r", 2 * i, i % 4, "q") for i in range(6)]
    from coadjoint.tasks.files import read

    assert equal_steps(read(put(tmp_path, "d.csv", table(rows)))) == {}


def test_words_are_no_times(tmp_path):
    rows = [(f"w{i}", i % 3, i * i % 7) for i in range(9)]
    path = put(tmp_path, "d.csv", table(rows, "word,a,target"))
    data = Data.read(path, kind="regress", at="every", categorical="word", split=(1, 0, 0))
    assert data.overview.hints == []
    assert "inputs    2 features: word, a" in data.summary()


def test_many_names_are_shortened(tmp_path):
    assert join_some(list("abc")) == "a, b, c"
    assert join_some([str(i) for i in range(90)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..., 89"
    x = np.random.default_rng(0).normal(size=(40, 4, 4))
    np.savez(tmp_path / "d.npz", X=x, y=np.arange(40) % 20)
    data = Data.read(tmp_path / "d.npz", kind="classify", rows="samples", split=(1, 0, 0))
    assert "inputs    samples of shape [1, 4, 4]" in data.summary()
    assert "20 classes: 0 (2), 1 (2)" in data.summary()
    assert "..., 19 (2)" in " ".join(data.summary().split())


def test_targets_at_every_step_are_counted_by_steps(tmp_path):
    rows = [("s", i % 3, i % 4, "pq"[i % 2]) for i in range(9)]
    data = Data.read(put(tmp_path, "d.csv", table(rows)), at="every", split=(1, 0, 0))
    assert data.overview.classes == {"p": 5, "q": 4}
    assert "label at every step, 2 classes" in data.summary()


def test_held_out_files_have_lines_of_their_own(tmp_path):
    train = put(tmp_path, "w.csv", table(waves()))
    test = put(tmp_path, "v.csv", table([("z", 9.5, 1, "p"), ("z", 9, 2, "p")]))
    text = Data.read(train, test=test, split=(1, 0, 0)).summary()
    assert "train     w.csv: 43 rows" in text
    assert "test      v.csv: 2 rows in 1 sequence of 2 steps" in text


def test_a_column_that_is_predicted_alone_is_named(tmp_path):
    rows = [f"{t},{t % 5},{t % 3}" for t in range(60)]
    (tmp_path / "d.csv").write_text("\n".join(["time,sales,price", *rows]) + "\n")
    options = {"kind": "next", "time": "time", "target": ("sales",), "split": (1, 0, 0)}
    text = Data.read(tmp_path / "d.csv", **options).summary()
    assert "the next step of sales" in text
    assert "every feature" not in text
