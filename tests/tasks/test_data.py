"""Users' data as a task: splits, scaling, targets, gaps, windows, and predictions for new files."""

import csv
import gc
import json
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import build
import coadjoint as co
from coadjoint.errors import CoadjointError, ConfigError, DataError, NumericalError, StorageError
from coadjoint.tasks.data import Data
from coadjoint.training.predict import write_predictions
from coadjoint.training.validation import collect_examples
from paths import put


def table(n=20, T=5, seed=0, classes=("down", "up"), ragged=True, target=None, extra=""):
    """A long table of n sequences; labels by the sign of the first feature's mean unless target(i,
    t, row) gives them.
    """
    rng = np.random.default_rng(seed)
    lines = [f"id,time,a,b,target{extra}"]
    for i in range(n):
        u = np.round(rng.normal(size=(T + (i % 3 if ragged else 0), 2)) * [3, 0.5] + [10, -1], 4)
        for t, row in enumerate(u):
            y = classes[i % len(classes)] if target is None else target(i, t, row)
            lines.append(f"s{i},{t},{row[0]},{row[1]},{y}")
    return "\n".join(lines) + "\n"


def refused(words, error=DataError):
    class Check:
        def __enter__(self):
            self.raises = pytest.raises(error)
            self.caught = self.raises.__enter__()

        def __exit__(self, *of):
            done = self.raises.__exit__(*of)
            for word in words:
                assert word in str(self.caught.value), f"{word!r} not in {self.caught.value!s}"
            return done

    return Check()


def everything(data, split):
    return [
        (i, u, y)
        for i, u, y in zip(
            data.sets[split].ids, data.sets[split].u, data.sets[split].y, strict=True
        )
    ]


def test_a_table_with_labels_is_a_classification(tmp_path):
    data = Data.read(put(tmp_path, "toy.csv", table(30)))
    assert (data.name, data.inputs, data.outputs, data.readout, data.output, data.loss) == (
        "toy",
        2,
        2,
        "last",
        "softmax",
        "cross-entropy",
    )
    assert data.splits == ("valid", "test")
    assert [len(data.sets[s]) for s in ("train", "valid", "test")] == [24, 3, 3]
    ids = [i for s in data.sets for i in data.sets[s].ids]
    assert sorted(ids) == sorted(f"s{i}" for i in range(30))
    for i, _, y in everything(data, "train"):
        assert y == int(i[1:]) % 2
    assert "time column: 'time'" in data.notes
    assert data.metric == "accuracy"


def test_standardisation_is_numpys_on_the_training_set_alone(tmp_path):
    path = put(tmp_path, "toy.csv", table(30, target=lambda i, t, row: 100 + i))
    data = Data.read(path, kind="regress", dtype="float64")
    raw = {}
    with open(path) as f:
        for row in csv.DictReader(f):
            raw.setdefault(row["id"], []).append([float(row["a"]), float(row["b"])])
    train = np.concatenate([raw[i] for i in data.sets["train"].ids])
    d = data.describe()
    np.testing.assert_allclose(d["mean"], train.mean(0), rtol=1e-12)
    np.testing.assert_allclose(d["std"], train.std(0), rtol=1e-12)
    y = np.array([100.0 + int(i[1:]) for i in data.sets["train"].ids])
    np.testing.assert_allclose(
        [d["target_mean"][0], d["target_std"][0]], [y.mean(), y.std()], rtol=1e-12
    )
    for split in data.sets:
        for i, u, target in everything(data, split):
            np.testing.assert_allclose(
                u, (np.array(raw[i]) - train.mean(0)) / train.std(0), rtol=1e-9, atol=1e-12
            )
            np.testing.assert_allclose(target[0] * y.std() + y.mean(), 100 + int(i[1:]), rtol=1e-12)
    plain = Data.read(path, kind="regress", standardise=False, dtype="float64")
    assert np.array_equal(plain.sets["train"].u[0], raw[plain.sets["train"].ids[0]])


def test_examples_speak_the_files_language(tmp_path):
    data = Data.read(
        put(tmp_path, "toy.csv", table(30, target=lambda i, t, row: 100 + i)), kind="regress"
    )
    batch = next(data.held_out("train", seed=0))
    d = data.describe()
    y = batch.y[:2].reshape(2, 1).double()
    expected = [f"{v * d['target_std'][0] + d['target_mean'][0]:.4g}" for v in y[:, 0].tolist()]
    assert data.show(y, batch.y[:2].double()) == [(t, t) for t in expected]
    assert all(100 <= float(t) < 130 for t in expected)
    named = Data.read(put(tmp_path, "named.csv", table(30)))
    a = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    assert named.show(a, torch.tensor([1, 1])) == [("up", "down"), ("up", "up")]
    net = co.Network("elman", inputs=2, hidden=3, outputs=1)
    assert all("right" not in example for example in collect_examples(net, data, 0))


def test_values_too_large_to_square_are_standardised(tmp_path):
    text = "id,a,target\n" + "".join(f"s{i},{(i + 1) * 1e300!r},{'ud'[i % 2]}\n" for i in range(10))
    data = Data.read(put(tmp_path, "d.csv", text))
    assert abs(np.concatenate(data.sets["train"].u)).max() < 5
    with refused(["d.csv:2 column 'a'", "not finite in float32", "--standardise"]):
        Data.read(tmp_path / "d.csv", standardise=False)
    Data.read(tmp_path / "d.csv", standardise=False, dtype="float64")


def test_constant_features_are_noted(tmp_path):
    data = Data.read(
        put(
            tmp_path,
            "d.csv",
            "id,a,c,target\n" + "".join(f"s{i},{i},0.1,{'ud'[i % 2]}\n" for i in range(10)),
        )
    )
    assert data.describe()["std"][1] == 1
    assert np.abs(np.concatenate(data.sets["train"].u)[:, 1]).max() < 1e-12
    assert "feature 'c' is constant in training" in data.notes


def test_splits_depend_on_the_seed_and_keep_classes_together(tmp_path):
    path = put(tmp_path, "d.csv", table(60, classes=("a", "b", "c", "a", "a", "b")))
    first, again, other = (Data.read(path, seed=s) for s in (0, 0, 1))
    assert first.sets["test"].ids == again.sets["test"].ids
    assert first.sets["test"].ids != other.sets["test"].ids
    assert sorted(first.sets["valid"].y) == [0, 0, 0, 1, 1, 2]
    assert len(Data.read(path, split=(0.5, 0, 0.5)).sets["test"]) == 30
    assert Data.read(path, split=(1, 0, 0)).splits == ()


def test_a_rare_class_is_in_training(tmp_path):
    path = put(
        tmp_path, "d.csv", table(40, target=lambda i, t, row: "rare" if i == 7 else "common")
    )
    for seed in range(5):
        data = Data.read(path, seed=seed)
        assert data.description.labels == ["common", "rare"]
        assert "s7" in data.sets["train"].ids


def test_quantities_do_not_change_the_split(tmp_path):
    """Classes are spread evenly over the sets; quantities are not, whatever their sign."""

    def split(target):
        return Data.read(
            put(tmp_path, "d.csv", table(20, target=target)), kind="regress", at="last"
        ).sets

    first, other = split(lambda i, t, row: 1.5 * i), split(lambda i, t, row: -(i % 3))
    assert [s.ids for s in first.values()] == [s.ids for s in other.values()]


def test_labels_are_sorted_as_numbers(tmp_path):
    data = Data.read(put(tmp_path, "d.csv", table(30, classes=("10", "9", "-1"))), kind="classify")
    assert data.description.labels == ["-1", "9", "10"]


BAD = {
    "one class": (table(9, classes=("up",)), {}, ["column 'target'", "one class only, 'up'"]),
    "float labels": (table(9, classes=("0.5", "1")), {"kind": "classify"},
        ["column 'target'", '"0.5" is a real number', "--kind regress"]),
    "constant target": (table(9, classes=("7",)), {"kind": "regress"},
        ["column 'target'", "constant"]),
    "target equals an input": (table(9, target=lambda i, t, row: row[1]),
        {"kind": "regress", "at": "every"}, ["target 'target' equals input 'b'", "--features"]),
    "no targets": (table(9, classes=("",)), {"kind": "classify"},
        ["column 'target'", "every one is missing"]),
    "no quantities": (table(9, classes=("",)), {"kind": "regress"},
        ["column 'target'", "every target is missing"]),
    "a target missing": (table(9, classes=("u", "d", "")), {},
        ["d.csv:19 column 'target'", "'s2' is missing", "--missing drop|mask"]),
    "changing target": (table(9, target=lambda i, t, row: "ud"[t % 2]), {},
        ["changes within sequences", "--at every", "--at last"]),
    "one sequence": (table(1), {"at": "last", "target": "target", "kind": "classify"},
        ["one class only"]),
    "one sequence to split": (table(1, T=9, target=lambda i, t, row: t),
        {"kind": "regress", "at": "every"}, ["1 sequence,", "--valid", "--window"]),
    "few sequences": (table(2), {}, ["2 sequences, too few to split into 3"]),
    "short for the window": (table(9), {"window": 6},
        ["d.csv:2 column 'id'", "'s0' has length 5", "needs at least 6"]),
    "short for next": ("id,a\nx,1\nx,2\ny,1\n", {"kind": "next"},
        ["d.csv:4", "'y' has length 1", "--kind next needs at least 2"]),
    "uneven": (table(9).replace("s1,3,", "s1,3.5,"), {},
        ["d.csv:10 column 'time'", "--irregular allow"]),
    "nothing to fill from": ("id,a,target\nx,,u\nx,1,u\ny,2,d\n", {"missing": "ffill"},
        ["d.csv:2 column 'a'", "none before it"]),
    "a feature of gaps": (table(9).replace(",b,", ",b,target,").replace(",target,target",
        ",c,target").replace(",up", ",,up").replace(",down", ",NA,down"), {"missing": "mask"},
        ["every value of 'c' is missing"]),
    "emptied": ("id,a,target\nx,,u\ny,1,d\n", {"missing": "drop"}, ["'x'", "length 0"]),
    "nothing of its own to fill from": ("id,a,target\nx,1,u\nx,1,u\ny,,d\n", {"missing": "ffill"},
        ["d.csv:4 column 'a'", "1 of 2 sequences has no value at all ('y')", "--features"]),
    "nothing next": ("id,a\nx,1\nx,1\ny,1\ny,1\nz,1\nz,1\n", {"kind": "next"}, ["constant"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_with_its_place(case, tmp_path):
    text, options, words = BAD[case]
    with refused(["d.csv", *words]):
        Data.read(put(tmp_path, "d.csv", text), **options)


@pytest.mark.parametrize(
    "options",
    [{"split": (0.5, 0.5)}, {"split": (0, 0.5, 0.5)}, {"split": (0.9, 0.9, 0.1)},
        {"irregular": "maybe"}, {"overlap": "yes"}, {"window": 0}, {"window": 1, "kind": "next"},
        {"dtype": "float16"}, {"kind": "next", "at": "last", "features": "a"}],
)  # fmt: skip
def test_bad_settings_are_refused(options, tmp_path):
    with pytest.raises(ConfigError):
        Data.read(put(tmp_path, "d.csv", table(9)), **options)


def test_held_out_files_must_match_and_share_nothing(tmp_path):
    train, valid, test = (
        put(tmp_path, f"{s}.csv", table(9, seed=k))
        for k, s in enumerate(("train", "valid", "test"))
    )
    data = Data.read(train, valid=valid, test=test)
    assert [len(data.sets[s]) for s in data.sets] == [9, 9, 9]
    assert data.describe()["files"]["valid"]["name"] == "valid.csv"
    assert Data.read(train, test=test, split=(1, 0)).splits == ("test",)
    with refused(["train.csv (test)", "train.csv (train)", "same bytes"]):
        Data.read(train, test=train)
    with refused(["same bytes"]):
        Data.read(train, test=put(tmp_path, "copy.csv", train.read_text()))
    shared = put(
        tmp_path,
        "shared.csv",
        test.read_text()
        + "".join(
            ln.replace("s4", "again", 1) + "\n"
            for ln in train.read_text().split("\n")
            if ln.startswith("s4,")
        ),
    )
    with refused(["shared.csv (test): 1 of its sequences", "'again'", "'s4'", "--overlap allow"]):
        Data.read(train, test=shared)
    assert len(Data.read(train, test=shared, overlap="allow").sets["test"]) == 10
    with refused(["left.csv:13 column 'target'", "label 'left'", "'down', 'up'"]):
        Data.read(
            train, valid=put(tmp_path, "left.csv", table(9, seed=5, classes=("up", "down", "left")))
        )
    with refused(["column 'b' is missing. The model needs: 'a', 'b'.", "Not needed: 'bb'."]):
        Data.read(train, valid=put(tmp_path, "other.csv", valid.read_text().replace(",b,", ",bb,")))
    moved = put(
        tmp_path,
        "moved.csv",
        "".join(",".join(ln.split(",")[::-1]) + "\n" for ln in valid.read_text().split()),
    )
    ours, theirs = Data.read(train, valid=valid), Data.read(train, valid=moved)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(ours.sets["valid"].u, theirs.sets["valid"].u, strict=True)
    )


def test_copies_within_a_file_are_noted(tmp_path):
    text = "id,a,target\n" + "".join(
        f"s{i},1,{'ud'[i % 2]}\ns{i},2,{'ud'[i % 2]}\n" for i in range(10)
    )
    assert any(
        "same inputs as a training sequence" in note
        for note in Data.read(put(tmp_path, "d.csv", text)).notes
    )


def test_targets_can_be_at_every_step(tmp_path):
    path = put(tmp_path, "d.csv", table(20, target=lambda i, t, row: i + 10 * t))
    data = Data.read(path, kind="regress", at="every", dtype="float64")
    assert (data.readout, data.reduce, data.loss) == ("every", "mean", "squared")
    batch = data.batch(0, 8, seed=0)
    T = int(batch.lengths.max())
    assert batch.u.shape == (T, 8, 2)
    assert batch.y.shape == (T, 8, 1)
    d = data.description
    i, _, y = everything(data, "train")[0]
    np.testing.assert_allclose(
        y[:, 0] * d.target_std[0] + d.target_mean[0], [int(i[1:]) + 10 * t for t in range(len(y))]
    )
    data = Data.read(
        put(tmp_path, "e.csv", table(20, target=lambda i, t, row: "abc"[t % 3])), at="every"
    )
    batch = data.batch(0, 4, seed=0)
    assert batch.y.dtype == torch.int64
    assert batch.y[:4, 0].tolist() == [0, 1, 2, 0]


def test_the_last_rows_target_is_taken(tmp_path):
    path = put(tmp_path, "d.csv", table(20, target=lambda i, t, row: i + 10 * t))
    data = Data.read(path, kind="regress", at="last", standardise=False)
    for i, u, y in everything(data, "train"):
        assert y == int(i[1:]) + 10 * (len(u) - 1)
    once = put(tmp_path, "e.csv", table(20, target=lambda i, t, row: "ud"[i % 2] if t == 0 else ""))
    assert [y for _, _, y in everything(Data.read(once), "train")] == [
        1 - int(i[1:]) % 2 for i in Data.read(once).sets["train"].ids
    ]


def test_the_next_step_can_be_the_target(tmp_path):
    np.save(tmp_path / "d.npy", np.random.default_rng(0).normal(size=(12, 7, 3)))
    with refused(["--kind next"]):
        Data.read(tmp_path / "d.npy")
    data = Data.read(tmp_path / "d.npy", kind="next", dtype="float64")
    assert (data.inputs, data.outputs, data.readout, data.loss) == (3, 3, "every", "squared")
    raw = np.load(tmp_path / "d.npy")
    for i, u, y in everything(data, "train"):
        np.testing.assert_allclose(
            u * data.description.std + data.description.mean, raw[int(i), :-1]
        )
        np.testing.assert_allclose(
            y * data.description.std + data.description.mean, raw[int(i), 1:]
        )


def test_gaps_can_be_dropped_or_filled(tmp_path):
    text = "id,a,b,target\n" + "".join(
        f"s{i},{i},{i},{'ud'[i % 2]}\ns{i},,{i},{'ud'[i % 2]}\ns{i},{i + 5},{i},{'ud'[i % 2]}\n"
        for i in range(10)
    )
    path = put(tmp_path, "d.csv", text)
    with refused(
        ["d.csv:3 column 'a'", "10 of 30 values are missing", "--missing drop|ffill|mask"]
    ):
        Data.read(path)

    def of(how):
        return {
            i: u[:, 0].tolist()
            for i, u, _ in everything(Data.read(path, missing=how, standardise=False), "train")
        }

    assert all(u == [int(i[1:]), int(i[1:]) + 5] for i, u in of("drop").items())
    assert all(u == [int(i[1:]), int(i[1:]), int(i[1:]) + 5] for i, u in of("ffill").items())
    timed = "id,time,a,target\n" + "".join(
        f"s{i},{t},{'' if t == 2 else i + t},{'ud'[i % 2]}\n" for i in range(9) for t in range(6)
    )
    with refused(["--irregular allow"]):
        Data.read(put(tmp_path, "e.csv", timed), missing="drop")
    assert (
        len(Data.read(tmp_path / "e.csv", missing="drop", irregular="allow").sets["train"].u[0])
        == 5
    )


def test_gaps_can_be_masked(tmp_path):
    text = "id,a,b,target\n" + "".join(
        f"s{i},{'' if (i + t) % 3 == 0 else i + t},{t * i},{'' if t == 1 else i * t}\n"
        for i in range(10)
        for t in range(4)
    )
    data = Data.read(put(tmp_path, "d.csv", text), kind="regress", at="every", missing="mask")
    assert data.inputs == 3
    assert data.describe()["masked"] == ["a"]
    for i, u, _ in everything(data, "train"):
        gaps = [(int(i[1:]) + t) % 3 == 0 for t in range(4)]
        assert u[:, 2].tolist() == gaps
        assert (u[gaps, 0] == 0).all()
    batch = data.batch(0, 4, seed=0)
    assert batch.mask.tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4, [1.0] * 4]
    assert torch.isfinite(batch.y).all()
    a = torch.zeros(4, 4, 1)
    total, count = data.score(a, batch)["mse"]
    assert count == 12
    known = batch.y[[0, 2, 3], :, 0].double() * data.description.target_std[0]
    assert total == pytest.approx(float(known.square().sum()), rel=1e-6)
    net = co.Network("elman", inputs=3, hidden=4, outputs=1, readout="every")
    lam = net(batch.u, lengths=batch.lengths).costates(
        "squared", batch.y, mask=batch.mask, reduce="mean"
    )
    expected = ((net(batch.u).y_hat - batch.y)[[0, 2, 3], :, 0] ** 2).mean(0)
    torch.testing.assert_close(lam.loss, expected)


def test_labels_may_be_missing_at_some_steps(tmp_path):
    text = table(20, target=lambda i, t, row: "" if t == 2 else "ud"[(i + t) % 2])
    data = Data.read(put(tmp_path, "d.csv", text), at="every", missing="mask")
    batch = data.batch(0, 4, seed=0)
    assert batch.mask[2].tolist() == [0.0] * 4
    assert (batch.y >= 0).all()
    perfect = torch.nn.functional.one_hot(batch.y, 2).float()
    total, count = data.score(perfect, batch)["accuracy"]
    assert total == count == int(batch.lengths.sum()) - 4


def test_scores_ignore_padding_and_use_the_targets_units(tmp_path):
    data = Data.read(
        put(tmp_path, "d.csv", table(20, target=lambda i, t, row: 1000 * i + t)),
        kind="regress",
        at="every",
    )
    batch = data.batch(0, 6, seed=0)
    a = batch.y + 1 / data.description.target_std[0]  # off by one unit everywhere
    scores = data.score(a, batch)
    n = float(batch.lengths.sum())
    assert scores["mse"][1] == scores["mae"][1] == n
    assert scores["mae"][0] == pytest.approx(n, rel=1e-3)
    assert scores["mse"][0] == pytest.approx(n, rel=1e-3)


def test_a_long_sequence_is_cut_into_windows(tmp_path):
    rows = "".join(f"{t},{np.sin(t):.6f},{t * t}\n" for t in range(103))
    path = put(tmp_path, "d.csv", "time,a,target\n" + rows)
    data = Data.read(path, kind="regress", at="last", window=10, standardise=False)
    assert data.sets["train"].ids == [f"all[{k}:{k + 10}]" for k in range(0, 80, 10)]
    assert data.sets["test"].ids == ["all[90:100]"]
    assert [float(y[0]) for y in data.sets["train"].y] == [(k + 9) ** 2 for k in range(0, 80, 10)]
    assert any("3 rows" in note for note in data.notes)
    data = Data.read(path, kind="regress", at="every", window=10)
    assert len(data.sets["test"].u[-1]) == 3
    many = Data.read(put(tmp_path, "e.csv", table(20, T=12, ragged=False)), window=4)
    owner = {s: {i.split("[")[0] for i in many.sets[s].ids} for s in many.sets}
    assert not owner["train"] & owner["test"]
    assert sum(len(many.sets[s]) for s in many.sets) == 60


def test_array_and_ts_files_are_read(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "d.npz",
        u=rng.normal(size=(12, 5, 2)),
        y=np.arange(12) % 2,
        lengths=np.arange(12) % 4 + 2,
    )
    data = Data.read(tmp_path / "d.npz", kind="classify")
    assert (data.description.labels, data.description.named) == (["0", "1"], False)
    assert all(len(u) == int(i) % 4 + 2 for i, u, _ in everything(data, "train"))
    cases = "".join(f"{i},{i + 1},2:5,6,{i}:{'ud'[i % 2]}\n" for i in range(12))
    data = Data.read(
        put(
            tmp_path, "d.ts", "@problemName x\n@dimensions 2\n@classLabel true u d\n@data\n" + cases
        )
    )
    assert (data.inputs, data.description.labels) == (2, ["d", "u"])
    text = "@problemName x\n@targetLabel true\n@data\n" + "".join(
        f"{i},1:{i / 2}\n" for i in range(12)
    )
    assert Data.read(put(tmp_path, "e.ts", text)).description.kind == "regress"


def predicted(prediction, net, path, n=3):
    outputs = [net(b.u, lengths=b.lengths).a for _, b in prediction.batches(n)]
    write_predictions(prediction, path, outputs)
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def network(data):
    return build.network(
        inputs=data.inputs, outputs=data.outputs, readout=data.readout, dtype=torch.float32
    )


def test_predictions_do_not_depend_on_the_order_of_columns(tmp_path):
    text = table(7)
    data = Data.read(put(tmp_path, "train.csv", table(20, seed=1)))
    described = json.loads(json.dumps(data.describe()))
    net = network(data)
    order = [2, 4, 1, 0, 3]
    moved = "".join(",".join(ln.split(",")[k] for k in order) + "\n" for ln in text.split())
    unlabelled = "".join(ln.rsplit(",", 1)[0] + "\n" for ln in text.split())
    rows = [
        predicted(
            Data.for_prediction(described, put(tmp_path, f"{k}.csv", t)),
            net,
            tmp_path / f"out{k}.csv",
            n,
        )
        for k, (t, n) in enumerate([(text, 3), (moved, 3), (unlabelled, 3), (text, 1)])
    ]
    assert rows[0] == rows[1] == rows[2]
    assert [r["id"] for r in rows[0]] == [f"s{i}" for i in range(7)]
    names = ["row", "id", "time", "prediction", "probability down", "probability up"]
    assert list(rows[0][0]) == names
    for a, b in zip(rows[0], rows[3], strict=True):
        p = {k: float(a[f"probability {k}"]) for k in ("down", "up")}
        assert a["prediction"] == b["prediction"] == max(p, key=p.get)
        assert sum(p.values()) == pytest.approx(1, abs=1e-7)
        assert p["up"] == pytest.approx(float(b["probability up"]), rel=1e-4)


def test_predictions_are_those_of_the_task_in_its_units(tmp_path):
    path = put(tmp_path, "train.csv", table(20, target=lambda i, t, row: 1000 + i * t))
    data = Data.read(path, kind="regress", at="every", split=(1, 0, 0))
    net = network(data)
    rows = predicted(Data.for_prediction(data.describe(), path), net, tmp_path / "out.csv")
    assert len(rows) == sum(len(u) for u in data.sets["train"].u)
    d, k = data.description, 0
    for u in data.sets["train"].u:
        a = net(torch.from_numpy(u)[:, None]).a[:, 0, 0].detach().double().numpy()
        got = [float(r["prediction"]) for r in rows[k : k + len(u)]]
        np.testing.assert_allclose(got, a * d.target_std[0] + d.target_mean[0], rtol=1e-6)
        k += len(u)


def test_next_step_predictions_reach_beyond_the_end(tmp_path):
    rows = "".join(f"x,{t},{np.sin(t):.4f},{t}\n" for t in range(40))
    path = put(tmp_path, "d.csv", "id,time,a,b\n" + rows)
    data = Data.read(path, kind="next", window=8)
    out = predicted(Data.for_prediction(data.describe(), path), network(data), tmp_path / "out.csv")
    assert [r["time"] for r in out] == [str(t) for t in range(40)]
    assert list(out[0]) == ["row", "id", "time", "prediction a", "prediction b"]


def test_files_that_do_not_suit_the_network_are_refused(tmp_path):
    data = Data.read(put(tmp_path, "train.csv", table(20)))
    d = data.describe()
    with refused(["column 'b' is missing", "Not needed: 'bb'.", "Should 'bb' be called 'b'?"]):
        Data.for_prediction(d, put(tmp_path, "a.csv", table(3).replace(",b,", ",bb,")))
    with refused(["no column 'id', which the training file has: pass --id NAME if it is"]):
        Data.for_prediction(d, put(tmp_path, "b.csv", "a,b,time\n1,2,3\n"))
    np.save(tmp_path / "c.npy", np.zeros((2, 3, 2)))
    with refused(["no column names", "'a', 'b'"]):
        Data.for_prediction(d, tmp_path / "c.npy")
    np.savez(
        tmp_path / "t.npz", u=np.random.default_rng(0).normal(size=(9, 4, 3)), y=np.arange(9) % 2
    )
    arrays = Data.read(tmp_path / "t.npz", kind="classify").describe()
    with refused(["2 features", "trained on 3"]):
        Data.for_prediction(arrays, tmp_path / "c.npy")
    masked = Data.read(
        put(
            tmp_path,
            "m.csv",
            "id,a,b,target\n" + "".join(f"s{i},{i or ''},{i},{'ud'[i % 2]}\n" for i in range(9)),
        ),
        missing="mask",
    )
    assert (
        len(Data.for_prediction(masked.describe(), put(tmp_path, "n.csv", "id,a,b\nx,,1\n"))) == 1
    )
    with refused(["o.csv:2 column 'b'", "No value of this feature was missing in training"]):
        Data.for_prediction(masked.describe(), put(tmp_path, "o.csv", "id,a,b\nx,1,\nx,1,1\n"))


@pytest.mark.parametrize(
    "change",
    [{"kind": "guess"}, {"std": [1.0]}, {"std": [0.0, 1.0]}, {"mean": ["a", "b"]},
        {"mean": [float("nan"), 0.0]}, {"labels": ["a"]}, {"masked": ["z"]}, {"features": "ab"},
        {"columns": {}}, {"window": -1}, {"dtype": "object"}, {"reading": {"plugin": "x"}},
        {"reading": None}, {"reading": []}, {"more": 1}],
)  # fmt: skip
def test_a_damaged_description_is_refused(change, tmp_path):
    data = Data.read(put(tmp_path, "train.csv", table(20)))
    with refused(["description of its data is damaged"]):
        Data.for_prediction(data.describe() | change, tmp_path / "train.csv")


def test_cells_that_a_spreadsheet_would_run_are_written_as_text(tmp_path):
    labels = ("=cmd()", "+1", "-x", "@sum")
    data = Data.read(put(tmp_path, "d.csv", table(20, classes=labels)), kind="classify")
    path = put(
        tmp_path, "new.csv", table(4).replace("s1,", "=1+1,").replace("s2,", '"say ""hi"", now",')
    )
    prediction = Data.for_prediction(data.describe(), path)
    a = torch.eye(4) * 5
    write_predictions(prediction, tmp_path / "out.csv", [a])
    with open(tmp_path / "out.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [r["id"] for r in rows] == ["s0", "'=1+1", 'say "hi", now', "s3"]
    assert sorted(r["prediction"] for r in rows) == sorted(["'=cmd()", "+1", "'-x", "'@sum"])


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    data = Data.read(put(tmp_path, "d.csv", table(20)))
    prediction = Data.for_prediction(data.describe(), tmp_path / "d.csv")
    before, files = (tmp_path / "d.csv").read_text(), sorted(os.listdir(tmp_path))
    good = torch.zeros(20, 2)
    with refused(["is the file the sequences were read from"], StorageError):
        write_predictions(prediction, tmp_path / "d.csv", [good])
    os.link(tmp_path / "d.csv", tmp_path / "link.csv")
    with refused(["is the file the sequences were read from"], StorageError):
        write_predictions(prediction, tmp_path / "link.csv", [good])
    (tmp_path / "link.csv").unlink()
    with refused(["cannot be written"], StorageError):
        write_predictions(prediction, tmp_path / "nowhere" / "out.csv", [good])
    with refused(["'s3'", "not finite"], NumericalError):
        write_predictions(
            prediction, tmp_path / "out.csv", [good.index_fill(0, torch.tensor([3]), float("nan"))]
        )
    for wrong in (good[:5], torch.zeros(20, 3), torch.zeros(21, 2)):
        with refused(["outputs", "expected"], CoadjointError):
            write_predictions(prediction, tmp_path / "out.csv", [wrong])
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with refused(["No space left"], StorageError):
        write_predictions(prediction, tmp_path / "out.csv", [good])
    assert sorted(os.listdir(tmp_path)) == files
    assert (tmp_path / "d.csv").read_text() == before


def test_the_description_is_plain_json(tmp_path):
    for name, text, options in (
        ("a.csv", table(20), {}),
        ("b.csv", table(20, target=lambda i, t, row: i), {"kind": "regress"}),
        ("c.csv", table(20), {"kind": "next", "features": ["a", "b"], "missing": "mask"}),
    ):
        described = Data.read(put(tmp_path, name, text), **options).describe()
        assert json.loads(json.dumps(described, allow_nan=False)) == described
        assert len(described["files"]["train"]["sha256"]) == 64


cells = st.sampled_from(["0", "1", "2", "2.5", "1e39", "-7", "", "NA", "up", "down", "x"])


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    st.lists(st.tuples(st.sampled_from("xyz"), cells, cells, cells), min_size=1,
        max_size=12).map(lambda rows: sorted(rows, key=lambda r: r[0])),
    st.sampled_from([None, "classify", "regress", "next"]),
    st.sampled_from([None, "last", "every"]),
    st.sampled_from(["drop", "ffill", "mask"]),
    st.sampled_from([None, 2]),
)  # fmt: skip
def test_small_tables_give_batches_or_our_errors(tmp_path, rows, kind, at, missing, window):
    path = put(tmp_path, "d.csv", "id,a,b,target\n" + "".join(",".join(r) + "\n" for r in rows))
    try:
        data = Data.read(
            path,
            kind=kind,
            at=at,
            missing=missing,
            window=window,
            features=["a", "b"],
            split=(1, 0, 0),
        )
    except CoadjointError:
        return
    batch = data.batch(0, 100, seed=0)
    assert torch.isfinite(batch.u).all()
    assert torch.isfinite(batch.y).all()
    assert batch.u.shape[-1] == data.inputs
    net = network(data)
    loss = (
        net(batch.u, lengths=batch.lengths)
        .costates(data.loss, batch.y, mask=batch.mask, reduce=data.reduce)
        .loss
    )
    assert torch.isfinite(loss).all()
    again = Data.for_prediction(json.loads(json.dumps(data.describe())), path)
    write_predictions(
        again, tmp_path / "out.csv", [net(b.u, lengths=b.lengths).a for _, b in again.batches(2)]
    )


def test_a_network_learns_from_a_file(tmp_path):
    text = table(40, target=lambda i, t, row: round(2 * row[0] - row[1], 4))
    data = Data.read(put(tmp_path, "d.csv", text), kind="regress", at="every")
    net = network(data)
    optimiser = torch.optim.Adam(net.parameters(), 0.05)

    def value():
        return sum(
            t
            for b in data.held_out("valid", 0)
            for t in [data.score(net(b.u, lengths=b.lengths).a, b)["mse"][0]]
        )

    before = value()
    for step in range(60):
        batch = data.batch(step, 8, seed=0)
        co.BPTT()(net, batch, data.loss).write_grad(net)
        optimiser.step()
    assert value() < 0.2 * before


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": "lod"}, "no column 'lod' for --target. Did you mean 'load'?"),
        ({"target": "lod", "features": "heat"}, "no column 'lod' for --target. Did you mean"),
        ({"target": ["load", "lod"], "features": ["heat"]}, "no column 'lod' for --target."),
        ({"target": "load", "features": "heta"}, "no column 'heta' for --features"),
        ({"target": "load", "known": "heta"}, "no column 'heta' for --known. Did you mean 'heat'?"),
    ],
)
def test_a_column_to_predict_that_is_not_there_is_named_first(tmp_path, asked, said):
    """By its own option, and not after what is wrong with columns that are not asked for."""
    rows = [f"{t},{t * t},word" for t in range(30)]
    path = tmp_path / "s.csv"
    path.write_text("load,heat,sky\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError) as raised:
        Data.read(path, kind="next", **asked)
    assert said in str(raised.value)
    assert str(raised.value).count("lod'") <= 1


def test_a_file_that_was_read_is_closed_without_a_warning(tmp_path, monkeypatch):
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: complaints.append(said.exc_value))
    path = tmp_path / "s.csv"
    path.write_text("load\n" + "\n".join(map(str, range(30))) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        assert Data.read(path, kind="next", split=(1, 0, 0)).inputs == 1
        gc.collect()
    assert complaints == []
