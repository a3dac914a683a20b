"""What is split off from the training file, by default and beside held-out files."""

import numpy as np
import pytest

from coadjoint.errors import ConfigError, DataError
from coadjoint.tasks.data import Data
from paths import put


def table(n, T=4, seed=0, classes=("down", "up")):
    """A long table of n sequences with a label each."""
    rng = np.random.default_rng(seed)
    lines = ["id,a,label"]
    for i in range(n):
        lines += [f"s{i},{rng.normal():.4f},{classes[i % len(classes)]}" for _ in range(T)]
    return "\n".join(lines) + "\n"


def series(T, seed=0):
    """A table of one column: one sequence."""
    values = np.random.default_rng(seed).normal(size=T)
    return "x\n" + "\n".join(f"{value:.5f}" for value in values) + "\n"


def sizes(data):
    """The number of sequences in train, valid and test."""
    return [len(data.sets.get(split, ())) for split in ("train", "valid", "test")]


@pytest.fixture
def files(tmp_path):
    """Training, validation and test file, with 30, 10 and 12 sequences."""
    return {
        "train": put(tmp_path, "train.csv", table(30)),
        "valid": put(tmp_path, "valid.csv", table(10, seed=1)),
        "test": put(tmp_path, "test.csv", table(12, seed=2)),
    }


CASES = {
    "nothing given": ((), None, [24, 3, 3], (0.8, 0.1, 0.1)),
    "three shares": ((), (0.5, 0, 0.5), [15, 0, 15], (0.5, 0.0, 0.5)),
    "all for training": ((), (1, 0, 0), [30, 0, 0], (1.0, 0.0, 0.0)),
    "a test file": (("test",), None, [24, 6, 12], (0.8, 0.2)),
    "a test file and shares": (("test",), (0.5, 0.5, 0), [15, 15, 12], (0.5, 0.5)),
    "a test file and two shares": (("test",), (0.9, 0.1), [27, 3, 12], (0.9, 0.1)),
    "a test file and no share": (("test",), (1, 0, 0), [30, 0, 12], (1.0, 0.0)),
    "a validation file": (("valid",), None, [30, 10, 0], (1.0, 0.0)),
    "a validation file and shares": (("valid",), (0.8, 0, 0.2), [24, 10, 6], (0.8, 0.2)),
    "a validation file and two shares": (("valid",), (0.8, 0.2), [24, 10, 6], (0.8, 0.2)),
    "both files": (("valid", "test"), None, [30, 10, 12], None),
}


@pytest.mark.parametrize("case", CASES)
def test_each_part_has_its_share_or_its_file(files, case):
    given, split, expected, shares = CASES[case]
    data = Data.read(files["train"], **{name: files[name] for name in given}, split=split)
    assert (sizes(data), data.shares) == (expected, shares)
    again = Data.read(files["train"], **{name: files[name] for name in given}, split=shares)
    assert all(again.sets[name].ids == data.sets[name].ids for name in data.sets)


REFUSED = {
    "a test share beside its file": (("test",), (0.8, 0.1, 0.1),
        "with a --test file its third share (test) must be 0. Pass --split 0.9,0.1,0,"),
    "a validation share beside its file": (("valid",), (0.7, 0.3, 0),
        "with a --valid file its second share (valid) must be 0. Pass --split 1,0,0,"),
    "shares beside both files": (("valid", "test"), (0.8, 0.2), "leave --split out"),
    "two shares beside no file": ((), (0.8, 0.2), "three shares (train, valid, test)"),
    "shares that do not add up": (("test",), (0.8, 0.3), "add up to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_shares_that_contradict_files_are_refused_with_the_way_out(files, case):
    given, split, words = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        Data.read(files["train"], **{name: files[name] for name in given}, split=split)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_classes_have_their_shares_and_sequences_stay_together(tmp_path, files):
    rare = put(tmp_path, "rare.csv", table(40, T=6, classes=("a", "a", "a", "b")))
    test = put(tmp_path, "t.csv", table(8, T=6, seed=3, classes=("a", "b")))
    data = Data.read(rare, test=test, window=2, at="last")
    owners = {name: {i.split("[")[0] for i in data.sets[name].ids} for name in ("train", "valid")}
    assert not owners["train"] & owners["valid"]
    assert sizes(data)[:2] == [96, 24]
    assert sorted(data.sets["valid"].y) == [0] * 18 + [1] * 6


@pytest.mark.parametrize("window", [None, 10])
def test_one_series_is_split_in_order_of_time(tmp_path, window):
    train = put(tmp_path, "train.csv", series(100))
    test = put(tmp_path, "test.csv", series(30, seed=1))
    data = Data.read(train, test=test, kind="next", window=window)
    assert sum(len(u) + 1 for u in data.sets["train"].u) == 80
    assert sum(len(u) + 1 for u in data.sets["valid"].u) == 20
    if window is None:
        assert (data.sets["train"].ids, data.sets["valid"].ids) == (["all[0:80]"], ["all[80:100]"])
    else:
        assert data.sets["valid"].ids == ["all[80:90]", "all[90:100]"]
    # the scale is that of the training rows alone
    values = [float(word) for word in train.read_text().split()[1:81]]
    np.testing.assert_allclose(data.description.mean[0], np.mean(values))
    without_files = Data.read(train, kind="next", window=window)
    assert without_files.sets["test"].ids[-1] == "all[90:100]"


def test_each_of_a_few_series_is_split_in_order_of_time(tmp_path):
    rows = [f"{name},{k % 7}" for name in "ab" for k in range(50)]
    train = put(tmp_path, "train.csv", "id,x\n" + "\n".join(rows) + "\n")
    test = put(tmp_path, "test.csv", series(20).replace("x\n", "id,x\n").replace("\n", "\nc,")[:-2])
    data = Data.read(train, test=test, kind="next")
    assert data.sets["train"].ids == ["a[0:40]", "b[0:40]"]
    assert data.sets["valid"].ids == ["a[40:50]", "b[40:50]"]
    windows = Data.read(train, test=test, kind="next", window=5)
    assert windows.sets["valid"].ids == ["a[40:45]", "a[45:50]", "b[40:45]", "b[45:50]"]


FEW = {
    "four sequences": (table(4), {}),
    "a class for each": (table(6, classes="abcdef"), {}),
    "a short series": (series(30), {"kind": "next"}),
    "few windows": (series(30), {"kind": "next", "window": 10}),
}


@pytest.mark.parametrize("case", FEW)
def test_a_set_too_small_to_spare_a_share_is_noted(tmp_path, case):
    text, options = FEW[case]
    other = text.replace("0.", "1.").replace(",1.", ",2.")
    train = put(tmp_path, "train.csv", text)
    test = put(tmp_path, "test.csv", other)
    data = Data.read(train, test=test, **options)
    assert (data.splits, data.shares) == (("test",), (1.0, 0.0))
    (note,) = [note for note in data.notes if "too few to split a validation set off" in note]
    assert "train.csv" in note
    assert "--valid FILE" in note


def test_a_share_that_was_asked_for_is_refused_where_there_is_too_little(tmp_path):
    train = put(tmp_path, "train.csv", series(15))
    test = put(tmp_path, "test.csv", series(20, seed=1))
    with pytest.raises(DataError, match=r"1 sequence, too few to split into 2 sets\. Pass a --val"):
        Data.read(train, test=test, kind="next", split=(0.8, 0.2))


def test_samples_without_time_have_a_validation_share(tmp_path):
    rows = [f"{k % 5},{k},{'ud'[k % 2]}" for k in range(20)]
    train = put(tmp_path, "train.csv", "a,b,label\n" + "\n".join(rows) + "\n")
    test = put(tmp_path, "test.csv", "a,b,label\n9,9,u\n8,9,d\n")
    data = Data.read(train, test=test, rows="samples")
    assert sizes(data) == [16, 4, 2]
    assert sorted(data.sets["valid"].y.tolist()) == [0, 0, 1, 1]


def test_a_part_without_any_target_is_not_split_off(tmp_path):
    rows = [f"{k % 7},{'' if k >= 40 else k}" for k in range(50)]
    train = put(tmp_path, "train.csv", "x,y\n" + "\n".join(rows) + "\n")
    test = put(tmp_path, "test.csv", "x,y\n1,2\n3,4\n")
    options = {"target": "y", "kind": "regress", "at": "every", "missing": "mask"}
    data = Data.read(train, test=test, **options)
    assert data.splits == ("test",)
