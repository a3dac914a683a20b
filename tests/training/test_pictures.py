"""Pictures of held-out samples that are images: what a run records of them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coadjoint as co
from coadjoint.tasks.data import Data
from coadjoint.training import json_rows, schemas
from coadjoint.training.pictures import make_pictures, scale_down, value_range
from coadjoint.training.validation import collect_pictures


class Pixels(co.tasks.Collection):
    """Images and their classes, made of given arrays."""

    name = "pixels"
    output = "softmax"
    loss = "cross-entropy"
    outputs = 2

    def __init__(self, x, shape):
        self.shape = shape
        self.inputs = int(np.prod(shape))
        samples = co.tasks.Samples(x.astype(np.float32), np.arange(len(x)) % 2)
        super().__init__({"train": samples, "test": samples})

    def score(self, a, batch):
        return {}


def pictures_of(task, k=8):
    batch = next(task.held_out(task.splits[-1], 0, "examples", k))
    outputs = torch.zeros(len(batch.u), task.outputs)
    found = make_pictures(task, batch, outputs, k)
    if found is not None:
        schemas.check("pictures", json.loads(json.dumps(found)), schemas.Pictures)
    return found


@pytest.mark.parametrize("name", ["digits-flat", "digits-image"])
def test_digits_are_drawn_as_they_are(name):
    task = co.tasks.make(name)
    found = pictures_of(task)
    assert found["size"] == [1, 8, 8]
    assert found["range"] == [0, 1]
    (row,) = found["rows"]
    assert row["label"] == "input"
    images = np.array(row["images"]).reshape(8, 64)
    expected = task.sets["test"].x[:8].reshape(8, 64)
    assert np.abs(images / 255 - expected).max() <= 0.5 / 255 + 1e-9


def test_an_autoencoder_has_noisy_input_reconstruction_and_target():
    task = co.tasks.make("digits-denoise", noise=0.3)
    net = co.Chain.autoencoder(64, [8])
    found = collect_pictures(net, task, seed=0, k=3)
    labels = [row["label"] for row in found["rows"]]
    assert labels == ["noisy input", "reconstruction", "clean target"]
    batch = next(task.held_out("test", 0, "examples", 3))
    with torch.no_grad():
        outputs = net(batch.u).y_hat
    for row, values in zip(found["rows"], (batch.u, outputs, batch.y), strict=True):
        drawn = torch.tensor(row["images"]) / 255
        assert (drawn - values.clamp(0, 1)).abs().max() <= 0.5 / 255 + 1e-6


def test_an_autoencoder_without_noise_has_no_third_row():
    found = pictures_of(co.tasks.denoise(co.tasks.make("digits-image"), noise=0))
    assert [row["label"] for row in found["rows"]] == ["input", "reconstruction"]


def test_denoising_keeps_the_shape_of_images():
    x = np.random.default_rng(0).random((6, 3, 4, 5))
    task = co.tasks.denoise(Pixels(x, (3, 4, 5)), noise=0.1)
    found = pictures_of(task)
    assert found["size"] == [3, 4, 5]
    low, high = found["range"]
    target = np.array(found["rows"][2]["images"]) / 255 * (high - low) + low
    assert target == pytest.approx(x.reshape(6, -1), abs=0.003)


def test_vectors_and_sequences_have_no_pictures():
    assert pictures_of(Pixels(np.ones((4, 7)), (7,))) is None
    net = co.Network("elman", inputs=8, hidden=3, outputs=10, output="softmax")
    assert collect_pictures(net, co.tasks.Digits(8), seed=0) is None


def test_large_images_are_averaged_over_areas():
    x = np.zeros((2, 1, 96, 48))
    x[:, :, 48:] = 1
    found = pictures_of(Pixels(x, (1, 96, 48)))
    assert found["size"] == [1, 32, 16]
    assert found["scaled_from"] == [96, 48]
    image = np.array(found["rows"][0]["images"][0]).reshape(32, 16)
    assert set(image[:16].flat) == {0}
    assert set(image[16:].flat) == {255}


def test_channels_other_than_colours_are_averaged():
    pixels = torch.arange(2.0)[None, :, None, None].expand(1, 2, 3, 3)
    assert scale_down(pixels).tolist() == torch.full((1, 1, 3, 3), 0.5).tolist()


def test_equal_values_have_a_range():
    assert value_range(torch.full((2, 1, 2, 2), 3.0)) == (3, 4)


def test_outputs_that_are_not_finite_are_drawn():
    task = co.tasks.make("digits-denoise")
    batch = next(task.held_out("test", 0, "examples", 2))
    outputs = torch.full((2, 64), torch.nan)
    outputs[1] = torch.inf
    found = make_pictures(task, batch, outputs, 2)
    assert set(found["rows"][1]["images"][0]) == {0}
    assert set(found["rows"][1]["images"][1]) == {255}


def test_files_of_images_are_drawn_in_their_own_units(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 5, 4))
    x[..., 0, 0] = 0
    x[..., 0, 1] = 255
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(40) % 2)
    task = Data.read(tmp_path / "images.npz", rows="samples", kind="classify")
    found = pictures_of(task)
    assert found["size"] == [3, 5, 4]
    assert found["range"] == pytest.approx([0, 255], abs=1e-3)
    drawn = {tuple(image) for image in found["rows"][0]["images"]}
    assert drawn <= {tuple(image) for image in x.reshape(40, -1).tolist()}


def test_result_json_holds_an_image_on_one_line(tmp_path):
    torch.manual_seed(0)
    net = co.Chain.mlp(64, [4], 10, output="softmax")
    co.train(net, co.tasks.make("digits-flat"), steps=2, every=2, folder=tmp_path)
    text = (tmp_path / "result.json").read_text()
    assert len(text.splitlines()) < 120
    result = schemas.read(tmp_path / "result.json", schemas.TrainingResultSchema)
    assert len(result["pictures"]["rows"][0]["images"]) == len(result["examples"]) == 8


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    NUMBERS | st.booleans() | st.none() | st.text('[] \\n,1-9.e"\\\\'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("[\\n1,"), inner),
)


@given(VALUES)
def test_joined_numbers_are_the_same_json(value):
    text = json_rows.dumps(value, indent=1)
    assert json.loads(json_rows.join_numbers(text)) == json.loads(text)


@given(st.lists(NUMBERS, min_size=1))
def test_a_list_of_numbers_is_one_line(numbers):
    assert "\n" not in json_rows.join_numbers(json.dumps(numbers, indent=1))
