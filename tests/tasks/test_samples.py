"""Tasks without time: digits as vectors and images, denoising, and sets of samples."""

import sys

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint import tasks
from coadjoint.errors import InputError, MissingError
from coadjoint.tasks import task as task_module
from coadjoint.tasks.denoising import Denoising
from coadjoint.tasks.digits import Digits, draw_rows
from coadjoint.tasks.task import Collection, Samples

NAMES = ("digits-flat", "digits-image", "digits-denoise")


class Own(Collection):
    name, inputs, outputs, shape = "own", 4, 2, (4,)


def own(n=5):
    samples = Samples(np.arange(4.0 * n).reshape(n, 4), np.arange(n), [f"s{i}" for i in range(n)])
    return Own({"train": samples, "test": samples})


def judge(task, a, batch):
    return {name: total / count for name, (total, count) in task.score(a, batch).items()}


class TestSamples:
    def test_a_batch_has_its_samples_along_axis_0(self):
        batch = own().sets["train"].batch([3, 1])
        assert batch.axis == 0
        assert batch.lengths is None
        assert torch.equal(batch.u, torch.tensor([[12.0, 13, 14, 15], [4, 5, 6, 7]]))
        assert batch.y.tolist() == [3, 1]
        assert batch.sizes.tolist() == [1, 1]

    def test_an_epoch_holds_each_sample_once(self):
        task = own()
        assert task.steps_per_epoch(2) == 3
        batches = [task.batch(step, 2, seed=1) for step in range(3)]
        assert [len(b.y) for b in batches] == [2, 2, 1]
        assert torch.cat([b.y for b in batches]).sort().values.tolist() == [0, 1, 2, 3, 4]
        again = task.batch(1, 2, seed=1)
        assert torch.equal(again.u, batches[1].u)

    def test_held_out_samples_keep_their_order(self):
        targets = [b.y.tolist() for b in own().held_out("test", seed=0, n=2)]
        assert targets == [[0, 1], [2, 3], [4]]

    def test_batches_of_large_samples_are_small(self, monkeypatch):
        monkeypatch.setattr(task_module, "LARGEST_BATCH", 6)
        x = np.zeros((5, 3, 10, 10), np.float32)  # 300 entries count as three steps
        task = Own({"train": Samples(x, np.zeros(5)), "test": Samples(x, np.zeros(5))})
        assert [len(b.u) for b in task.held_out("test", seed=0)] == [2, 2, 1]

    def test_samples_are_picked_with_their_targets_and_names(self):
        picked = own().sets["train"].pick([4, 0])
        assert picked.x[:, 0].tolist() == [16, 0]
        assert picked.y.tolist() == [4, 0]
        assert picked.ids == ["s4", "s0"]
        bare = Samples(np.zeros((3, 2))).pick([1])
        assert bare.y is None
        assert bare.ids is None
        assert Samples(np.zeros((3, 2))).batch([0]).y is None

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda: Samples(np.zeros((3, 2)), np.zeros(2)), "as many entries"),
            (lambda: Samples(np.zeros((3, 2)), ids=["a"]), "got [3, 1]"),
            (lambda: own().sets["train"].batch([0], every=True), "one target each"),
            (lambda: Own({}), "no training sequences"),
            (lambda: Own({"train": Samples(np.zeros((0, 4)))}), "no training sequences"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call, words):
        with pytest.raises(InputError) as refusal:
            call()
        assert words in str(refusal.value)


def test_sequence_tasks_have_no_shape():
    assert tasks.make("addition").shape is None


def test_a_missing_package_is_named_with_the_task(monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in NAMES:
        with pytest.raises(MissingError, match=rf"task '{name}' needs scikit-learn"):
            tasks.make(name)


class TestDigitsAtOnce:
    @pytest.fixture(autouse=True)
    def sklearn(self):
        pytest.importorskip("sklearn")

    @pytest.mark.parametrize(("name", "shape"), [(NAMES[0], (64,)), (NAMES[1], (1, 8, 8))])
    def test_images_split_and_metric_are_those_of_the_digits_read_by_step(self, name, shape):
        task, by_step = tasks.make(name), Digits(pixels=8)
        assert task.name == name
        assert (task.shape, task.inputs, task.outputs) == (shape, 64, 10)
        for key in ("output", "loss", "metric", "lower", "size", "splits", "readout"):
            assert getattr(task, key) == getattr(by_step, key)
        assert task.baseline() == by_step.baseline()
        for split, samples in task.sets.items():
            assert samples.x.shape[1:] == shape
            images = np.stack(by_step.sets[split].u)
            assert np.array_equal(samples.x.reshape(images.shape), images)
            assert np.array_equal(samples.y, by_step.sets[split].y)
        here, there = task.batch(5, 32, seed=3), by_step.batch(5, 32, seed=3)
        assert torch.equal(here.y, there.y)
        assert torch.equal(here.u.reshape(32, 8, 8), there.u.transpose(0, 1))
        assert here.axis == 0

    def test_they_are_scored_by_accuracy(self):
        task = tasks.make("digits-flat")
        batch = task.batch(0, 40, seed=0)
        assert judge(task, torch.eye(10)[batch.y], batch) == {"accuracy": 1.0}
        test = next(task.held_out("test", seed=0))
        zero = torch.eye(10)[torch.zeros(300, dtype=torch.long)]
        assert judge(task, zero, test)["accuracy"] == pytest.approx(0.1)

    def test_noise_belongs_to_seed_and_step(self):
        task, other = tasks.make("digits-denoise"), tasks.make("digits-denoise", noise=0.2)
        first = task.batch(3, 16, seed=1)
        other.batch(0, 16, seed=5)
        again = other.batch(3, 16, seed=1)
        assert torch.equal(first.u, again.u)
        assert first.u.dtype == first.y.dtype == torch.float32
        epoch = task.steps_per_epoch(1197)
        assert epoch == 1
        drawn = {}
        for step, seed in ((0, 0), (1, 0), (0, 1)):
            batch = task.batch(step, 1197, seed)
            noise = (batch.u - batch.y)[batch.y.sum(1).argsort()]
            assert float(noise.std()) == pytest.approx(0.2, rel=0.02)
            assert abs(float(noise.mean())) < 0.005
            drawn[step, seed] = noise
        assert not torch.equal(drawn[0, 0], drawn[1, 0])
        assert not torch.equal(drawn[0, 0], drawn[0, 1])

    def test_held_out_noise_is_fixed(self):
        task = tasks.make("digits-denoise", noise=0.5)
        first = next(task.held_out("valid", seed=0, draw=0))
        again = next(tasks.make("digits-denoise", noise=0.5).held_out("valid", seed=7, draw=9))
        assert torch.equal(first.u, again.u)
        assert float((first.u - first.y).std()) == pytest.approx(0.5, rel=0.02)
        test = next(task.held_out("test", seed=0))
        assert not torch.equal(first.u - first.y, test.u - test.y)

    def test_targets_are_the_clean_digits(self):
        noisy, clean = tasks.make("digits-denoise"), tasks.make("digits-flat")
        assert torch.equal(noisy.batch(4, 20, seed=2).y, clean.batch(4, 20, seed=2).u)
        none = tasks.make("digits-denoise", noise=0)
        batch = none.batch(4, 20, seed=2)
        assert torch.equal(batch.u, batch.y)
        assert (noisy.loss, noisy.metric, noisy.lower, noisy.output) == (
            "squared",
            "mse",
            True,
            "identity",
        )
        assert (noisy.inputs, noisy.outputs, noisy.shape) == (64, 64, (64,))

    def test_the_score_is_the_squared_error_per_pixel(self):
        task = tasks.make("digits-denoise", noise=0.3)
        batch = next(task.held_out("test", seed=0))
        assert judge(task, batch.y, batch) == {"mse": 0.0}
        assert judge(task, batch.y + 0.5, batch)["mse"] == pytest.approx(0.25)
        assert judge(task, batch.u, batch)["mse"] == pytest.approx(0.09, rel=0.02)

    def test_the_baseline_is_the_mean_image(self):
        task = tasks.make("digits-denoise")
        batch = next(task.held_out("test", seed=0))
        mean = tasks.make("digits-flat").sets["train"].x.mean(0, dtype=np.float64)
        guess = torch.from_numpy(mean).expand(300, 64)
        claimed = task.baseline()
        assert claimed["mse"] == pytest.approx(judge(task, guess, batch)["mse"])
        assert claimed["loss"] == pytest.approx(64 * claimed["mse"])

    def test_examples_are_rows_of_figures(self):
        image = torch.zeros(64)
        image[0], image[9], image[63] = 1.0, 0.5, 7.0
        assert draw_rows(image) == " ".join(["90000000", "04000000", *5 * ["0" * 8], "00000009"])
        task = tasks.make("digits-denoise")
        target, guess = task.show(torch.full((1, 64), torch.nan), image[None])[0]
        assert (target, set(guess)) == (draw_rows(image), {"0", " "})

    @pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf"), "much", True])
    def test_noise_is_a_standard_deviation(self, noise):
        with pytest.raises(InputError, match="noise must be a finite number, at least 0"):
            tasks.make("digits-denoise", noise=noise)

    def test_options_are_few(self):
        assert tasks.options("digits-flat") == {}
        assert tasks.options("digits-image") == {}
        assert tasks.options("digits-denoise") == {"noise": 0.2}


def test_denoising_takes_vectors():
    with pytest.raises(InputError, match=r"takes samples \[N, inputs\]; got \[3, 2, 2\]"):
        Denoising("own", {"train": Samples(np.zeros((3, 2, 2)))})
    assert co.tasks.Denoising is Denoising
    alone = Denoising("own", {"train": Samples(np.eye(3))})
    assert alone.baseline()["mse"] == pytest.approx(2 / 9)
