"""Users' data without time: tables, arrays and folders of images as a task, and predictions."""

import csv
import io
import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coadjoint.errors import CoadjointError, ConfigError, DataError, InputError, MissingError
from coadjoint.tasks import prediction as prediction_module
from coadjoint.tasks.data import Data
from coadjoint.tasks.description import Description, SampleDescription
from coadjoint.tasks.files.samples import rows_of_samples, samples_of_rows
from coadjoint.training.predict import write_predictions
from paths import put


def table(n=30, seed=0, extra=(), label=lambda x: "up" if x[0] > 0 else "down"):
    """A table with one row per sample: features a and b, and a label."""
    x = np.round(np.random.default_rng(seed).normal(size=(n, 2)), 4)
    lines = ["a,b,label", *(f"{row[0]},{row[1]},{label(row)}" for row in x), *extra]
    return x, "\n".join(lines) + "\n"


def read(path, **options):
    return Data.read(path, rows="samples", **options)


def arrays(tmp_path, name="d.npz", **content):
    np.savez(tmp_path / name, **content)
    return tmp_path / name


def by_id(data):
    """{id: (x, y)} of all splits."""
    found = {}
    for samples in data.sets.values():
        for i, name in enumerate(samples.ids):
            found[name] = (samples.x[i], samples.y[i])
    return found


def check_refusal(call, *words, error=DataError):
    with pytest.raises(error) as refusal:
        call()
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


def images(n=8, shape=(5, 4), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def save(folder, name, pixels, **options):
    """An image file from pixels [H, W] or [H, W, 3]."""
    from PIL import Image

    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def pictures(tmp_path):
    """A folder of 20 images of 5 x 4 pixels in two classes."""
    pytest.importorskip("PIL")
    folder = tmp_path / "pics"
    for i, pixels in enumerate(images(20, (5, 4, 3))):
        save(folder, f"{'cat' if i % 2 else 'dog'}/{i:02}.png", pixels)
    return folder


class TestTables:
    def test_each_row_is_a_sample(self, tmp_path):
        x, text = table(40)
        data = read(put(tmp_path, "toy.csv", text))
        assert (data.name, data.shape, data.inputs, data.outputs) == ("toy", (2,), 2, 2)
        assert (data.readout, data.output, data.loss) == ("last", "softmax", "cross-entropy")
        assert [len(data.sets[s]) for s in ("train", "valid", "test")] == [32, 4, 4]
        found = by_id(data)
        assert sorted(found, key=int) == [str(i) for i in range(40)]
        mean, std = np.array(data.description.mean), np.array(data.description.std)
        for i, row in enumerate(x):
            scaled, label = found[str(i)]
            np.testing.assert_allclose(scaled, (row - mean) / std, rtol=1e-5, atol=1e-6)
            assert label == int(row[0] > 0)
        train = data.sets["train"].x
        assert train.dtype == np.float32
        np.testing.assert_allclose(train.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(train.std(0), 1, atol=1e-5)
        batch = data.batch(0, 8, seed=0)
        assert (batch.axis, batch.u.shape, batch.y.dtype) == (0, (8, 2), torch.int64)
        assert "sequence" not in " ".join(data.notes)

    def test_the_split_is_that_of_sequences(self, tmp_path):
        text = table(40)[1]
        rows = text.splitlines()
        long = [f"id,{rows[0]}", *(f"{i},{row}" for i, row in enumerate(rows[1:]))]
        sequences = Data.read(put(tmp_path, "long.csv", "\n".join(long) + "\n"), seed=3)
        samples = read(put(tmp_path, "toy.csv", text), seed=3)
        for split in ("train", "valid", "test"):
            assert samples.sets[split].ids == sequences.sets[split].ids
            assert samples.sets[split].y.tolist() == list(sequences.sets[split].y)
            stacked = np.concatenate(sequences.sets[split].u)
            assert np.array_equal(samples.sets[split].x, stacked)
        assert samples.description.mean == sequences.description.mean

    def test_an_id_column_names_the_samples(self, tmp_path):
        text = "id,a,label\n" + "".join(f"s{i},{i},{'xy'[i % 2]}\n" for i in range(10))
        data = read(put(tmp_path, "d.csv", text))
        assert sorted(by_id(data)) == sorted(f"s{i}" for i in range(10))
        assert data.shape == (1,)

    def test_a_column_of_times_is_a_feature(self, tmp_path):
        text = "time,a,label\n" + "".join(f"{i % 3},{i},{'xy'[i % 2]}\n" for i in range(10))
        assert read(put(tmp_path, "d.csv", text)).description.features == ["time", "a"]

    def test_several_targets_are_regressed_in_their_units(self, tmp_path):
        text = "a,p,q\n" + "".join(f"{i},{2 * i},{i * i}\n" for i in range(20))
        data = read(put(tmp_path, "d.csv", text), target=("p", "q"), kind="regress")
        assert (data.outputs, data.metric, data.loss) == (2, "mse", "squared")
        batch = next(data.held_out("test", seed=0))
        scores = data.score(batch.y + 1, batch)
        std = np.array(data.description.target_std)
        expected = float((std**2).mean())
        assert scores["mse"][0] / scores["mse"][1] == pytest.approx(expected)

    @pytest.mark.parametrize("kind", ["csv", "parquet"])
    def test_parquet_reads_as_text_does(self, tmp_path, kind):
        text = table(20)[1]
        path = put(tmp_path, "d.csv", text)
        if kind == "parquet":
            read_csv = pytest.importorskip("pyarrow.csv").read_csv
            write_table = pytest.importorskip("pyarrow.parquet").write_table

            write_table(read_csv(path), tmp_path / "d.parquet")
            path = tmp_path / "d.parquet"
        data = read(path)
        assert data.shape == (2,)
        assert len(by_id(data)) == 20

    def test_held_out_files(self, tmp_path):
        train = put(tmp_path, "train.csv", table(20, seed=0)[1])
        test = put(tmp_path, "test.csv", table(9, seed=1)[1])
        data = read(train, test=test)
        assert data.splits == ("valid", "test")
        assert [len(data.sets[s]) for s in ("train", "valid", "test")] == [16, 4, 9]
        again = put(tmp_path, "again.csv", table(20, seed=0)[1] + "1,2,up\n")
        check_refusal(lambda: read(train, test=again), "20 of its samples are in the train file")

    @pytest.mark.parametrize(
        ("missing", "shape", "count"), [("drop", (2,), 30), ("mask", (3,), 32)]
    )
    def test_missing_values(self, tmp_path, missing, shape, count):
        text = table(30, extra=(",1.5,up", "nan,2.5,down"))[1]
        data = read(put(tmp_path, "d.csv", text), missing=missing)
        assert data.shape == shape
        assert len(by_id(data)) == count
        if missing == "mask":
            assert data.description.masked == ["a"]
            np.testing.assert_array_equal(by_id(data)["30"][0][[0, 2]], [0, 1])
        else:
            assert "2 samples of" in " ".join(data.notes)

    def test_samples_without_a_target_are_left_out(self, tmp_path):
        path = put(tmp_path, "d.csv", table(30, extra=("1,1.5,",))[1])
        assert len(by_id(read(path, missing="drop"))) == 30
        check_refusal(lambda: read(path), "the target of sample '30' is missing")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"time": "a"}, ["--time a", "samples without time"]),
            ({"at": "every"}, ["--at every"]),
            ({"window": 5}, ["--window 5"]),
            ({"kind": "next"}, ["--kind next", "--kind classify, regress or reconstruct"]),
            ({"missing": "ffill"}, ["--missing ffill", "drop or --missing mask"]),
            ({"irregular": "allow"}, ["--irregular allow"]),
        ],
    )
    def test_options_of_time_are_refused(self, tmp_path, options, words):
        path = put(tmp_path, "d.csv", table()[1])
        check_refusal(lambda: read(path, **options), *words, error=ConfigError)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("id,a,label\nx,1,p\nx,2,q\n", ["d.csv:3", "id 'x' appears again", "--cell"]),
            ("id,a,label\nx,1,p\n,2,q\n", ["d.csv:3", "the id is missing"]),
            ("a,b\n1,2\n3,4\n", ["Pass --target NAME. Columns"]),
            ("a,label\n1,p\n", ["one class only"]),
            ("a,label\n1,p\n2,q\n", ["has 2 samples, too few", "or --split 1,0,0."]),
            ("a,label\n,p\n,q\n", ["every value is missing"]),
            ("a,label\n1,p\n,q\n", ["d.csv:3", "1 of 2 values are missing"]),
        ],
    )
    def test_refusals(self, tmp_path, text, words):
        check_refusal(lambda: read(put(tmp_path, "d.csv", text)), *words)

    def test_a_target_among_the_inputs_is_refused(self, tmp_path):
        text = "a,b,target\n" + "".join(f"{i},{2 * i},{i}\n" for i in range(20))
        path = put(tmp_path, "d.csv", text)
        check_refusal(lambda: read(path, kind="regress"), "equals input 'a'")

    def test_an_unknown_kind_is_refused(self, tmp_path):
        path = put(tmp_path, "d.csv", table()[1])
        check_refusal(lambda: read(path, kind="sort"), "--kind must be", error=ConfigError)

    def test_rows_are_steps_or_samples(self, tmp_path):
        path = put(tmp_path, "d.csv", table()[1])
        check_refusal(lambda: Data.read(path, rows="sample"), "steps or samples", error=ConfigError)

    def test_sequences_are_described_as_before(self, tmp_path):
        text = "id,a,label\n" + "".join(f"s{i},{i},{'xy'[i % 2]}\n" for i in range(10))
        data = Data.read(put(tmp_path, "d.csv", text))
        assert "shape" not in data.describe()
        assert data.shape is None


class TestArrays:
    @pytest.mark.parametrize("shape", [(5,), (3, 4, 2), (2, 3, 4, 2), (1, 1, 1)])
    def test_samples_of_any_shape_keep_it(self, tmp_path, shape):
        x = np.random.default_rng(0).normal(size=(20, *shape)) * 3 + 1
        y = np.arange(20) % 2
        data = read(arrays(tmp_path, x=x, y=y), kind="classify", dtype="float64")
        assert data.shape == shape
        assert data.inputs == np.prod(shape)
        d = data.description
        assert (len(d.mean), d.shape) == (shape[0], list(shape))
        along_first = (-1, *[1] * (len(shape) - 1))
        mean, std = (np.reshape(v, along_first) for v in (d.mean, d.std))
        for name, (scaled, label) in by_id(data).items():
            np.testing.assert_allclose(scaled, (x[int(name)] - mean) / std, rtol=1e-12)
            assert label == y[int(name)]
        inner = tuple(k for k in range(len(shape) + 1) if k != 1)
        np.testing.assert_allclose(data.sets["train"].x.mean(inner), 0, atol=1e-12)

    def test_each_feature_and_each_channel_has_one_scale(self, tmp_path):
        x = images(20, (3, 5, 4)).astype(np.uint8)
        data = read(arrays(tmp_path, x=x, y=np.arange(20) % 2), kind="classify")
        chosen = [int(i) for i in data.sets["train"].ids]
        np.testing.assert_allclose(data.description.mean, x[chosen].mean((0, 2, 3)))
        np.testing.assert_allclose(data.description.std, x[chosen].std((0, 2, 3)))

    def test_images_without_channels_get_one(self, tmp_path):
        x = images(20, (6, 5))
        data = read(arrays(tmp_path, x=x, y=np.arange(20) % 2), kind="classify", standardise=False)
        assert data.shape == (1, 6, 5)
        assert "samples of shape [6, 5] are read as [1, 6, 5]" in data.notes
        assert np.array_equal(by_id(data)["7"][0], x[None, 7])

    def test_channels_last_are_noticed(self, tmp_path):
        path = arrays(tmp_path, x=images(20, (6, 5, 3)), y=np.arange(20) % 2)
        data = read(path, kind="classify")
        assert data.shape == (6, 5, 3)
        assert "x.transpose(0, 3, 1, 2)" in " ".join(data.notes)
        path = arrays(tmp_path, "e.npz", x=images(20, (3, 6, 5)), y=np.arange(20) % 2)
        assert read(path, kind="classify").notes == ()

    @pytest.mark.parametrize("outputs", [None, 1, 3])
    def test_targets_are_numbers(self, tmp_path, outputs):
        x = np.random.default_rng(0).normal(size=(20, 4))
        y = x[:, 0] * 2 if outputs is None else np.outer(x[:, 1], np.arange(1, outputs + 1))
        data = read(arrays(tmp_path, x=x, y=y), kind="regress")
        assert data.outputs == (outputs or 1)
        assert data.batch(0, 5, seed=0).y.shape == (5, outputs or 1)

    def test_names_and_labels(self, tmp_path):
        ids = [f"p{i}" for i in range(20)]
        data = read(arrays(tmp_path, x=np.eye(20), y=np.array(["no", "yes"] * 10), ids=ids))
        assert data.description.labels == ["no", "yes"]
        assert sorted(by_id(data)) == sorted(ids)

    def test_notes_on_constant_features_are_short(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(20, 9)) * ([1.0] + [0.0] * 8)
        data = read(arrays(tmp_path, x=x, y=np.arange(20) % 2), kind="classify")
        assert data.notes == ("8 features are constant in training: 'x1', 'x2', 'x3' and 5 more",)

    @pytest.mark.parametrize("missing", ["drop", "mask"])
    def test_an_image_with_a_gap_is_dropped_or_masked(self, tmp_path, missing):
        x = np.random.default_rng(0).normal(size=(20, 2, 3, 3))
        x[4, 1, 2, 0] = np.nan
        data = read(arrays(tmp_path, x=x, y=np.arange(20) % 2), kind="classify", missing=missing)
        if missing == "drop":
            assert data.shape == (2, 3, 3)
            assert sorted(map(int, by_id(data))) == [i for i in range(20) if i != 4]
        else:
            assert (data.shape, data.inputs) == ((3, 3, 3), 27)
            marks = by_id(data)["4"][0][2]
            assert marks[2, 0] == 1
            assert marks.sum() == 1

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({"u": np.zeros((4, 2)), "y": np.zeros(4)}, ["holds u, y; expected an array x (n,"]),
            ({"x": np.zeros(4), "y": np.zeros(4)}, ["1 dimensions", "(n, features)"]),
            ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, ["'y' has shape (3,)", "begin with 4"]),
            ({"x": np.zeros((4, 2))}, ["no array 'y'"]),
            ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, ["is empty"]),
            ({"x": np.array([["a"]]), "y": np.zeros(1)}, ["dtype"]),
            ({"x": np.zeros((4, 2)), "y": np.zeros((4, 2, 2))}, ["expected (n,) or (n, k)"]),
            (
                {"x": np.array([[[[1.0, np.inf]]]] * 4), "y": np.zeros(4)},
                ["4 problems"],
            ),
            ({"x": np.array([[[1.0, np.nan]]] * 4), "y": np.zeros(4)}, ["x[0, 0, 1]", "missing"]),
            ({"x": np.array([[2**60 + 1, 0]]), "y": np.zeros(1)}, ["x[0, 0]", "exactly"]),
            ({"x": np.zeros((4, 2)), "y": np.zeros(4), "ids": [1, 1, 2, 3]}, ["3 of them diff"]),
        ],
    )
    def test_refusals(self, tmp_path, content, words):
        path = arrays(tmp_path, **content)
        with pytest.raises(DataError) as refusal:
            read(path, kind="regress")
        for word in words:
            assert word in str(refusal.value)

    def test_nothing_is_unpickled(self, tmp_path):
        path = arrays(tmp_path, x=np.array([[{}]], dtype=object), y=np.zeros(1))
        check_refusal(lambda: read(path, kind="regress"), "contains Python objects")

    def test_held_out_samples_have_the_same_shape(self, tmp_path):
        train = arrays(tmp_path, "a.npz", x=images(9, (1, 4, 4)), y=np.arange(9) % 2)
        test = arrays(tmp_path, "b.npz", x=images(9, (1, 4, 5), 1), y=np.arange(9) % 2)
        check_refusal(
            lambda: read(train, test=test, kind="classify"), "[1, 4, 5]", "[1, 4, 4]", "the same"
        )

    def test_npy_needs_targets(self, tmp_path):
        np.save(tmp_path / "x.npy", np.zeros((4, 2)))
        check_refusal(lambda: read(tmp_path / "x.npy"), "holds inputs only", "numpy.savez")

    def test_a_file_of_sequences_is_refused(self, tmp_path):
        path = put(tmp_path, "d.ts", "@data\n")
        check_refusal(lambda: read(path), ".ts files hold sequences", "a folder of images")
        path = put(tmp_path, "d.dat", "1")
        check_refusal(lambda: read(path), "cannot read files named '.dat'")
        with pytest.raises(DataError, match="For a text of characters, pass --kind next --text"):
            Data.read(str(path), kind="regress")

    @given(
        st.integers(1, 3),
        st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    )
    @settings(max_examples=30, deadline=None)
    def test_rows_and_samples_are_two_views(self, n, shape):
        x = np.arange(n * int(np.prod(shape)), dtype=float).reshape(n, *shape)
        rows = rows_of_samples(x)
        assert rows.shape == (n * int(np.prod(shape[1:])), shape[0])
        assert np.array_equal(samples_of_rows(rows, shape), x)


class TestImages:
    def test_a_folder_has_a_class_in_each_sub_folder(self, pictures):
        put(pictures / "cat", "notes.txt", "x")
        put(pictures, ".DS_Store", "x")
        data = read(pictures, standardise=False)
        assert (data.name, data.shape, data.inputs, data.outputs) == ("pics", (3, 5, 4), 60, 2)
        assert data.description.labels == ["cat", "dog"]
        pixels = images(20, (5, 4, 3))
        found = by_id(data)
        assert len(found) == 20
        for i, image in enumerate(pixels):
            x, y = found[f"{'cat' if i % 2 else 'dog'}/{i:02}.png"]
            np.testing.assert_allclose(x, image.transpose(2, 0, 1) / 255, rtol=1e-6)
            assert y == (i + 1) % 2
        assert any("'.DS_Store', 'cat/notes.txt'" in note for note in data.notes)
        scaled = read(pictures)
        np.testing.assert_allclose(scaled.sets["train"].x.mean((0, 2, 3)), 0, atol=1e-6)
        np.testing.assert_allclose(scaled.sets["train"].x.std((0, 2, 3)), 1, atol=1e-5)

    def test_grey_images_have_one_channel(self, tmp_path):
        pytest.importorskip("PIL")
        for i, pixels in enumerate(images(10)):
            save(tmp_path / "g", f"{i % 2}/{i}.png", pixels)
        data = read(tmp_path / "g", standardise=False)
        assert data.shape == (1, 5, 4)
        assert data.description.features == ["grey"]
        np.testing.assert_allclose(by_id(data)["0/4.png"][0][0], images(10)[4] / 255, rtol=1e-6)

    def test_grey_among_colours_is_read_as_colour(self, pictures):
        save(pictures, "cat/grey.png", images(1)[0])
        data = read(pictures, standardise=False)
        assert data.shape == (3, 5, 4)
        x = by_id(data)["cat/grey.png"][0]
        assert np.array_equal(x[0], x[2])
        assert any("1 grey images" in note for note in data.notes)

    def test_other_modes(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        folder = tmp_path / "m"
        grey = images(8)
        save(folder, "a/16.png", grey[0].astype(np.uint16) * 257)
        save(folder, "a/la.png", np.stack([grey[1], np.full_like(grey[1], 255)], -1))
        image.fromarray(np.uint8(grey[2] > 127) * 255).convert("1").save(folder / "a/1.png")
        for i in range(3, 8):
            save(folder, f"b/{i}.jpg", grey[i], quality=100)
        data = read(folder, standardise=False)
        assert data.shape == (1, 5, 4)
        found = by_id(data)
        np.testing.assert_allclose(found["a/16.png"][0][0], grey[0] / 255, rtol=1e-6)
        np.testing.assert_allclose(found["a/la.png"][0][0], grey[1] / 255, rtol=1e-6)
        assert np.array_equal(found["a/1.png"][0][0], grey[2] > 127)
        assert np.abs(found["b/5.jpg"][0][0] * 255 - grey[5]).max() < 30

    def test_a_palette_is_resolved(self, pictures):
        image = pytest.importorskip("PIL.Image")
        pixels = np.zeros((5, 4, 3), np.uint8)
        pixels[2, 1] = [255, 0, 255]
        image.fromarray(pixels).convert("P").save(pictures / "cat/p.png")
        x = by_id(read(pictures, standardise=False))["cat/p.png"][0]
        assert x[:, 2, 1].tolist() == [1, 0, 1]

    def test_photographs_are_turned_upright(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        folder = tmp_path / "photos"
        for i in range(8):
            save(folder, f"{i % 2}/{i}.jpg", np.full((6, 8, 3), 9 * i, np.uint8))
        sideways = np.zeros((8, 6, 3), np.uint8)
        sideways[:, 3:] = 255  # its right half is white
        exif = image.Exif()
        exif[0x0112] = 6  # turned by 90 degrees to be seen
        save(folder, "0/turned.jpg", sideways, exif=exif, quality=100)
        data = read(folder, standardise=False)
        assert data.shape == (3, 6, 8)
        x = by_id(data)["0/turned.jpg"][0]
        assert x[:, :2].max() < 0.2
        assert x[:, 4:].min() > 0.8

    def test_another_size_is_refused_by_name(self, pictures):
        save(pictures, "dog/zz.png", images(1, (5, 6, 3))[0])
        check_refusal(lambda: read(pictures), "zz.png has 6 x 5 pixels", "4 x 5", "one size")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", ["bad.png: the file is empty"]),
            (b"not an image", ["bad.png is not a PNG or JPEG image"]),
            (b"GIF89a" + bytes(40), ["bad.png is not a PNG or JPEG image"]),
            (None, ["bad.png is damaged"]),  # cut off
        ],
    )
    def test_damaged_files_are_refused_by_name(self, pictures, content, words):
        if content is None:
            whole = (pictures / "cat/01.png").read_bytes()
            content = whole[: len(whole) - 40]
        put(pictures / "cat", "bad.png", content)
        check_refusal(lambda: read(pictures), *words)

    def test_any_flipped_byte_is_read_or_refused(self, pictures):
        path = pictures / "cat/01.png"
        whole = path.read_bytes()
        refused = 0
        for k in range(0, len(whole), 3):
            broken = bytearray(whole)
            broken[k] ^= 0x55
            path.write_bytes(broken)
            try:
                read(pictures)
            except DataError:
                refused += 1
        assert refused > 0.8 * len(whole) / 3

    def test_huge_images_are_not_unpacked(self, pictures):
        image = pytest.importorskip("PIL.Image")
        huge = io.BytesIO()
        image.new("1", (10000, 10000)).save(huge, "PNG")
        put(pictures / "cat", "00.png", huge.getvalue())
        check_refusal(lambda: read(pictures), "00.png")
        check_refusal(lambda: read(pictures, max_bytes=1000), "--max-bytes")

    def test_links_are_not_followed(self, pictures, tmp_path):
        outside = save(tmp_path, "outside.png", images(1, (5, 4, 3))[0])
        link = pictures / "cat" / "link.png"
        os.symlink(outside, link)
        check_refusal(lambda: read(pictures), "'link.png' is a link", "nothing outside")
        link.unlink()
        (tmp_path / "bird").mkdir()
        os.symlink(tmp_path / "bird", pictures / "bird")
        check_refusal(lambda: read(pictures), "'bird' is a link")

    def test_a_link_that_appears_late_is_not_followed(self, pictures, tmp_path):
        from coadjoint.tasks.files.source import load_file

        outside = put(tmp_path, "secret.png", b"secret")
        os.symlink(outside, pictures / "cat" / "late.png")
        check_refusal(
            lambda: load_file(pictures / "cat" / "late.png", 1000, follow_links=False), "late.png"
        )
        assert load_file(pictures / "cat" / "late.png", 1000).data == b"secret"

    def test_pipes_are_refused(self, pictures):
        os.mkfifo(pictures / "cat" / "pipe.png")
        check_refusal(lambda: read(pictures), "pipe.png is a pipe or a device")

    def test_where_images_may_be(self, pictures, tmp_path):
        save(pictures, "top.png", images(1, (5, 4, 3))[0])
        check_refusal(lambda: read(pictures), "'top.png' is in no sub-folder")
        (pictures / "top.png").unlink()
        (pictures / "cat" / "deeper").mkdir()
        check_refusal(lambda: read(pictures), "'cat/deeper' is a folder within a class")
        (tmp_path / "empty").mkdir()
        check_refusal(lambda: read(tmp_path / "empty"), "holds no images (.png, .jpg, .jpeg)")
        save(tmp_path / "one", "a/0.png", images(1)[0])
        check_refusal(lambda: read(tmp_path / "one"), "one class only, 'a'")

    def test_classes_alone_are_learned(self, pictures):
        check_refusal(lambda: read(pictures, kind="regress"), "--kind regress needs numbers")
        check_refusal(lambda: read(pictures, features="green"), "channels 'red', 'green', 'blue'")
        assert read(pictures, kind="classify").outputs == 2

    @pytest.mark.parametrize("mode", ["RGBA", "LA"])
    def test_transparency_is_refused(self, pictures, mode):
        image = pytest.importorskip("PIL.Image")
        image.new(mode, (4, 5)).save(pictures / "cat" / "clear.png")
        check_refusal(lambda: read(pictures), "clear.png is transparent in places")

    def test_opaque_alpha_is_no_transparency(self, pictures):
        pixels = np.full((5, 4, 4), 255, np.uint8)
        save(pictures, "cat/solid.png", pixels)
        assert len(by_id(read(pictures))) == 21

    def test_several_frames_are_refused(self, pictures):
        image = pytest.importorskip("PIL.Image")
        frames = [image.fromarray(pixels) for pixels in images(2, (5, 4, 3))]
        frames[0].save(
            pictures / "cat" / "film.png", save_all=True, append_images=frames[1:], duration=9
        )
        check_refusal(lambda: read(pictures), "film.png has 2 frames")

    def test_a_class_name_outside_unicode_is_refused(self, pictures):
        try:
            os.mkdir(os.fsencode(pictures) + b"/\xff")
        except OSError:
            pytest.skip("the file system keeps names in Unicode")
        check_refusal(lambda: read(pictures), "is not Unicode")

    def test_splits_have_folders_of_their_own(self, pictures, tmp_path):
        for i, pixels in enumerate(images(6, (5, 4), seed=2)):  # grey, read as those of training
            save(tmp_path / "held", f"{'cat' if i % 2 else 'dog'}/{i}.png", pixels)
        data = read(pictures, test=tmp_path / "held")
        assert data.sets["test"].x.shape == (6, 3, 5, 4)
        save(tmp_path / "held", "bird/9.png", images(1, (5, 4))[0])
        check_refusal(lambda: read(pictures, test=tmp_path / "held"), "label 'bird'")

    def test_pillow_is_named_if_it_is_missing(self, pictures, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingError, match=r"pip install 'coadjoint\[images\]'"):
            read(pictures)

    def test_a_folder_holds_no_sequences(self, pictures):
        check_refusal(lambda: Data.read(pictures), "is a directory; expected a file", "--chain")

    def test_the_digest_is_of_names_and_bytes(self, pictures):
        def digest():
            return read(pictures).description.files["train"]["sha256"]

        first = digest()
        assert first == digest()
        (pictures / "cat/01.png").rename(pictures / "cat/xx.png")
        renamed = digest()
        assert renamed != first
        save(pictures, "cat/xx.png", images(1, (5, 4, 3), seed=5)[0])
        assert digest() not in (first, renamed)


class TestReconstruction:
    """Samples that are their own targets, for autoencoders."""

    def make(self, tmp_path, shape=(2, 3, 2), **options):
        x = np.random.default_rng(0).normal(size=(20, *shape)) * 3 + 1
        np.save(tmp_path / "x.npy", x)
        return x, read(tmp_path / "x.npy", kind="reconstruct", **options)

    def test_samples_are_vectors_and_their_own_targets(self, tmp_path):
        x, data = self.make(tmp_path)
        assert (data.shape, data.inputs, data.outputs) == ((12,), 12, 12)
        assert (data.output, data.loss, data.metric, data.lower) == (
            "identity",
            "squared",
            "mse",
            True,
        )
        batch = data.batch(0, 8, seed=0)
        assert torch.equal(batch.u, batch.y)
        mean, std = data.description.target_scale()
        for name, (scaled, target) in by_id(data).items():
            np.testing.assert_allclose(scaled * std + mean, x[int(name)].ravel(), rtol=1e-5)
            assert np.array_equal(scaled, target)

    def test_the_error_is_in_the_units_of_the_data(self, tmp_path):
        _, data = self.make(tmp_path)
        batch = next(data.held_out("test", seed=0))
        _, std = data.description.target_scale()
        scores = data.score(batch.y + 1, batch)
        assert scores["mse"][0] / scores["mse"][1] == pytest.approx(float((std**2).mean()))
        assert data.show(batch.y, batch.y)[0][0] == data.show(batch.y, batch.y)[0][1]

    def test_noise_is_drawn_by_seed_and_step(self, tmp_path):
        _, data = self.make(tmp_path, (200,), noise=0.3)
        first, again = data.batch(5, 16, seed=1), data.batch(5, 16, seed=1)
        assert torch.equal(first.u, again.u)
        assert float((first.u - first.y).std()) == pytest.approx(0.3, rel=0.05)
        other = data.batch(5, 16, seed=2)
        assert not torch.equal((first.u - first.y), (other.u - other.y))
        valid = [next(data.held_out("valid", seed=seed, draw=seed)) for seed in (0, 1)]
        assert torch.equal(valid[0].u, valid[1].u)
        assert float((valid[0].u - valid[0].y).std()) == pytest.approx(0.3, rel=0.2)

    def test_tables_and_folders_need_no_target(self, tmp_path, pictures):
        text = "a,b,label\n" + "".join(f"{i},{i * i},{'xy'[i % 2]}\n" for i in range(20))
        data = read(put(tmp_path, "d.csv", text), kind="reconstruct", target="label")
        assert data.shape == (2,)
        data = read(pictures, kind="reconstruct")
        assert (data.shape, data.inputs) == ((60,), 60)
        for i, pixels in enumerate(images(6, seed=3)):
            save(tmp_path / "flat", f"{i}.png", pixels)
        assert read(tmp_path / "flat", kind="reconstruct").shape == (20,)

    def test_entries_are_predicted_by_name(self, tmp_path):
        x, data = self.make(tmp_path)
        description = json.loads(json.dumps(data.describe()))
        prediction = Data.for_prediction(description, tmp_path / "x.npy")
        batches = [batch.u for _, batch in prediction.batches(6)]
        rows = list(prediction.rows(batches))
        assert rows[0][:3] == ["row", "prediction x0[0, 0]", "prediction x0[0, 1]"]
        assert rows[0][-1] == "prediction x1[2, 1]"
        values = np.array([row[1:] for row in rows[1:]], dtype=float)
        np.testing.assert_allclose(values, x.reshape(20, 12), rtol=1e-4, atol=1e-5)
        table_data = read(put(tmp_path, "d.csv", table()[1]), kind="reconstruct", target="label")
        new = put(tmp_path, "new.csv", "a,b\n1,2\n3,4\n")
        prediction = Data.for_prediction(table_data.describe(), new)
        assert next(prediction.rows([])) == ["row", "prediction a", "prediction b"]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"missing": "mask"}, "--missing mask adds inputs"),
            ({"noise": -1}, "noise must be"),
            ({"noise": float("nan")}, "noise must be"),
            ({"kind": "regress", "noise": 0.1}, "--noise 0.1 is on inputs"),
            ({"rows": "steps"}, "--kind must be"),
        ],
    )
    def test_refusals(self, tmp_path, options, words):
        path = arrays(tmp_path, x=np.eye(20), y=np.arange(20))
        chosen = {"kind": "reconstruct", "rows": "samples"} | options
        check_refusal(lambda: Data.read(path, **chosen), words, error=InputError)

    def test_constants_alone_are_refused(self, tmp_path):
        path = arrays(tmp_path, x=np.ones((20, 3)))
        check_refusal(lambda: read(path, kind="reconstruct"), "there is nothing to learn")

    @pytest.mark.parametrize(
        ("changes", "named"),
        [({"masked": ["x0"]}, "masked"), ({"target_std": [1.0], "target_mean": [0.0]}, "target_")],
    )
    def test_a_description_from_a_stranger_is_checked(self, tmp_path, changes, named):
        described = self.make(tmp_path)[1].describe()
        assert Description.of(described).outputs == 12
        with pytest.raises(DataError, match=rf"damaged: '{named}"):
            Description.of(described | changes)
        sequences = {key: value for key, value in described.items() if key != "shape"}
        with pytest.raises(DataError, match="'kind' is not valid"):
            Description.of(sequences)


class TestPrediction:
    def outputs(self, prediction, width, n=7):
        return [torch.randn(len(batch.u), width) for _, batch in prediction.batches(n)]

    def stored(self, data):
        """The description as a model file holds it."""
        return json.loads(json.dumps(data.describe()))

    def test_new_rows_are_read_by_name(self, tmp_path):
        text = table(30)[1]
        data = read(put(tmp_path, "d.csv", text))
        new = put(tmp_path, "new.csv", "b,other,a\n2,9,1\n4,9,3\n")
        prediction = Data.for_prediction(self.stored(data), new)
        ((ids, batch),) = prediction.batches()
        assert (ids, batch.axis, batch.y) == (["0", "1"], 0, None)
        mean, std = np.array(data.description.mean), np.array(data.description.std)
        np.testing.assert_allclose(batch.u, ([[1, 2], [3, 4]] - mean) / std, rtol=1e-5)
        rows = list(prediction.rows([torch.tensor([[0.0, 2.0], [1.0, 0.0]])]))
        assert rows[0] == ["row", "prediction", "probability down", "probability up"]
        assert [row[:2] for row in rows[1:]] == [["0", "up"], ["1", "down"]]

    def test_what_was_trained_on_is_read_again_alike(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(20, 2, 3, 4))
        path = arrays(tmp_path, x=x, y=np.arange(20) % 2)
        data = read(path, kind="classify")
        np.save(tmp_path / "x.npy", x)
        for source in (path, tmp_path / "x.npy"):
            prediction = Data.for_prediction(self.stored(data), source)
            again = torch.cat([batch.u for _, batch in prediction.batches(6)])
            for name, (expected, _) in by_id(data).items():
                assert np.array_equal(again[int(name)], expected)

    def test_predictions_are_written(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(20, 3))
        data = read(arrays(tmp_path, x=x, y=x[:, :2] * 3 + 1), kind="regress")
        prediction = Data.for_prediction(self.stored(data), tmp_path / "d.npz")
        write_predictions(prediction, tmp_path / "out.csv", self.outputs(prediction, 2))
        with open(tmp_path / "out.csv") as file:
            rows = list(csv.reader(file))
        assert rows[0] == ["row", "prediction y0", "prediction y1"]
        assert [row[0] for row in rows[1:]] == [str(i) for i in range(20)]

    def test_batches_of_large_samples_are_small(self, tmp_path, monkeypatch):
        monkeypatch.setattr(prediction_module, "LARGEST_BATCH", 6)
        x = np.random.default_rng(0).normal(size=(20, 3, 10, 10))  # each counts as three steps
        data = read(arrays(tmp_path, x=x, y=np.arange(20) % 2), kind="classify")
        prediction = Data.for_prediction(self.stored(data), tmp_path / "d.npz")
        assert [len(ids) for ids, _ in prediction.batches(50)] == [2] * 10
        assert len(list(prediction.rows(self.outputs(prediction, 2)))) == 21

    def test_images_need_no_class_to_be_predicted(self, pictures, tmp_path):
        data = read(pictures)
        flat = tmp_path / "new"
        for i, pixels in enumerate(images(3, (5, 4, 3), seed=4)):
            save(flat, f"{i}.png", pixels)
        save(flat, "grey.png", images(1)[0])
        prediction = Data.for_prediction(self.stored(data), flat)
        assert prediction.ids == ["0.png", "1.png", "2.png", "grey.png"]
        assert next(prediction.batches())[1].u.shape == (4, 3, 5, 4)
        again = Data.for_prediction(self.stored(data), pictures)
        u = torch.cat([batch.u for _, batch in again.batches()])
        for name, (expected, _) in by_id(data).items():
            assert np.array_equal(u[again.ids.index(name)], expected)

    def test_other_images_are_refused(self, pictures, tmp_path):
        description = self.stored(read(pictures))
        save(tmp_path / "new", "0.png", images(1, (6, 4, 3))[0])
        check_refusal(
            lambda: Data.for_prediction(description, tmp_path / "new"),
            "samples of shape [3, 6, 4]",
            "trained on [3, 5, 4]",
        )
        for i, pixels in enumerate(images(6)):
            save(tmp_path / "grey", f"{i % 2}/{i}.png", pixels)
        grey = self.stored(read(tmp_path / "grey"))
        check_refusal(lambda: Data.for_prediction(grey, pictures), "in colour; expected a grey")

    def test_samples_of_another_shape_are_refused(self, tmp_path):
        path = arrays(tmp_path, x=images(9, (1, 4, 4)), y=np.arange(9) % 2)
        description = self.stored(read(path, kind="classify"))
        np.save(tmp_path / "x.npy", images(2, (1, 4, 5)))
        check_refusal(
            lambda: Data.for_prediction(description, tmp_path / "x.npy"), "[1, 4, 5]", "[1, 4, 4]"
        )

    def test_gaps_of_new_samples(self, tmp_path):
        description = self.stored(read(put(tmp_path, "d.csv", table()[1])))
        new = put(tmp_path, "new.csv", "a,b\n1,2\n,4\n")
        check_refusal(lambda: Data.for_prediction(description, new), "values are missing")
        dropped = Data.for_prediction(description, new, missing="drop")
        assert dropped.ids == ["0"]
        assert "1 sample of" in " ".join(dropped.notes)
        check_refusal(
            lambda: Data.for_prediction(description, new, missing="ffill"),
            "--missing drop",
            error=ConfigError,
        )
        none = put(tmp_path, "none.csv", "a,b\n1,\n,4\n")
        check_refusal(
            lambda: Data.for_prediction(description, none, missing="drop"), "none is left"
        )

    def test_messages_speak_of_samples(self, tmp_path):
        description = self.stored(read(put(tmp_path, "d.csv", table()[1])))
        new = put(tmp_path, "new.csv", "a,b\n1,2\n3,4\n")
        prediction = Data.for_prediction(description, new)
        with pytest.raises(InputError, match="of 2 samples, in their order"):
            list(prediction.rows([torch.zeros(3, 2)]))
        with pytest.raises(InputError, match="outputs for 1 samples; expected 2"):
            list(prediction.rows([torch.zeros(1, 2)]))
        with pytest.raises(CoadjointError, match="outputs for sample '1' are not finite"):
            list(prediction.rows([torch.tensor([[0.0, 0], [np.nan, 0]])]))


class TestDescription:
    @pytest.fixture
    def described(self, tmp_path):
        x = images(9, (1, 4, 4))
        return read(arrays(tmp_path, x=x, y=np.arange(9) % 2), kind="classify").describe()

    def test_a_shape_makes_it_one_of_samples(self, described):
        description = Description.of(described)
        assert isinstance(description, SampleDescription)
        assert (description.sample_shape, description.inputs) == ((1, 4, 4), 16)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"shape": []}, "shape"),
            ({"shape": "144"}, "shape"),
            ({"shape": [1, 4, 4.0]}, "shape"),
            ({"shape": [1, True, 4]}, "shape"),
            ({"shape": [1, 0, 4]}, "shape"),
            ({"shape": [2, 4, 4]}, "shape"),
            ({"shape": [1, 2**40, 2**40]}, "shape"),
            ({"shape": [1] * 8}, "shape"),
            ({"shape": None}, "shape"),
            ({"at": "every"}, "at"),
            ({"window": 3}, "window"),
            ({"kind": "next", "labels": []}, "kind"),
            ({"kind": []}, "kind"),
        ],
    )
    def test_one_from_a_stranger_is_checked(self, described, changes, named):
        with pytest.raises(DataError, match=rf"damaged: '{named}' is not valid"):
            Description.of(described | changes)

    def test_keys_are_checked(self, described):
        for damaged in (described | {"more": 1}, {"shape": [1]}, [], "shape"):
            with pytest.raises(DataError, match="keys"):
                Description.of(damaged)
