"""Defaults for your own data: what is filled in, what stays as given, and what is printed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from coadjoint.cli import build, build_task, flags, memory
from coadjoint.cli.schema import TrainingSection
from coadjoint.tasks.data import Data
from coadjoint.training import own_defaults, settings, validation

RNG = np.random.default_rng(19)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def write_labelled(n, steps, every=False, name="train.npz"):
    """n sequences of two classes."""
    u = RNG.normal(size=(n, steps, 2)).astype(np.float32)
    y = np.array(["a", "b"])[np.arange(n) % 2]
    np.savez(name, u=u, y=np.repeat(y[:, None], steps, 1) if every else y)
    return name


def write_series(n, steps, name="series.npz"):
    """n random walks of two features that are far from 0."""
    u = 100 + np.cumsum(RNG.normal(size=(n, steps, 2)), 1)
    np.savez(name, u=u.astype(np.float32))
    return name


def write_samples(n, name="samples.npz"):
    np.savez(name, x=RNG.normal(size=(n, 3)).astype(np.float32), y=np.array(["a", "b"] * (n // 2)))
    return name


def fill(path, kind="classify", **given):
    """What is filled in for a file and what was given, by section; the notes; the task."""
    given = {key: dict(section) for key, section in given.items()}
    given["data"] = {"train": path, "kind": kind} | given.get("data", {})
    config = build.resolve_dependent_keys(flags.resolve(None, given))
    task = build_task.task_of(config)
    filled = own_defaults.fill(config, given, task)
    return filled.values, filled.notes, task


def config_of(run):
    return settings.load(Path(run) / "config.yaml").values


def rows_of(run):
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# by the sort of data and its size


def test_one_answer_for_a_sequence():
    values, notes, task = fill(write_labelled(50, 8))
    assert values["network"] == {
        "cell": "gru", "hidden": 64, "bidirectional": True, "readout": "mean",
    }  # fmt: skip
    assert "task" not in values  # whole sequences
    # 40 sequences in training, 3 steps an epoch: 600 epochs are fewer than the least steps.
    assert len(task.sets["train"]) == 40
    training = values["training"]
    assert training == {"batch": 16, "clip": 1.0, "steps": 2001, "every": 51, "patience": 20}
    assert values["optimiser"] == {"lr": 1e-2, "schedule": "cosine", "warmup": 100}
    assert notes == [
        "defaults for your data: gru of 64 units, both directions, mean over steps, lr 0.01, "
        "cosine, batch 16, clip 1",
        "at most 667 epochs (2,001 steps); stops after 20 validations without improvement",
    ]


def test_every_step_and_the_next_one():
    labels, _, _ = fill(write_labelled(50, 8, every=True), data={"at": "every"})
    assert labels["network"] == {"cell": "gru", "hidden": 128}
    series, notes, _ = fill(write_series(50, 8), "next")
    wanted = {"cell": "gru", "hidden": 128, "skip": True, "persistence": True}
    assert series["network"] == wanted
    for values in (labels, series):
        assert values["training"]["batch"] == 32
        optimiser = values["optimiser"]
        assert (optimiser["name"], optimiser["weight_decay"], optimiser["lr"]) == (
            "adamw", 0.01, 3e-3,
        )  # fmt: skip
    assert "begins with the forecast that nothing changes" in notes[0]


@pytest.mark.parametrize(
    ("n", "steps", "chunk"),
    [
        (1, 200, 32),
        (1, 60, 14),
        (5, 40, 9),
        (1, 9, 2),
        (60, 200, None),
    ],
)
def test_few_long_series_are_cut_into_chunks(n, steps, chunk):
    split = {"split": [1.0, 0.0, 0.0]}
    values, notes, task = fill(write_series(n, steps), "next", data=split)
    assert values.get("task", {}).get("chunk") == chunk
    longest = int(task.sets["train"].steps().max())
    if chunk is None:
        assert (longest, "chunks" in notes[0]) == (steps - 1, False)
    else:
        assert (longest, f"in chunks of {chunk} steps" in notes[0]) == (chunk, True)
    # Windows are chunks already.
    if steps > 100:
        assert "task" not in fill(write_series(1, steps), "next", data={"window": 20} | split)[0]


def test_the_batch_and_the_length_of_a_run_go_by_the_size():
    """By numbers alone: the arrays of a large set would take long to write."""
    wanted = [
        # sequences, steps of each: batch, steps of training
        (12, 10, 16, 2000), (1600, 10, 16, 6000), (5000, 10, 64, 6004), (90_000, 2, 128, 7040),
        (1600, 2000, 16, 2000),
    ]  # fmt: skip
    config = flags.resolve(None, {"data": {"train": "x"}})
    for n, length, batch, steps in wanted:
        task = Sized(n, length)
        filled = own_defaults.Filled()
        own_defaults.fill_training(filled, own_defaults.ONE_ANSWER, config, {}, task)
        training = filled.values["training"]
        assert (training["batch"], training["steps"]) == (batch, steps)
        per_epoch = -(-n // batch)
        assert training["steps"] % per_epoch == training["every"] % per_epoch == 0
        assert training["steps"] >= own_defaults.LEAST_EPOCHS * per_epoch
        assert training["steps"] / training["every"] <= own_defaults.VALIDATIONS


def test_the_note_on_memory_counts_the_sequences_that_there_are(monkeypatch):
    """A text has one validation sequence; its training sequence is cut into chunks."""
    Path("book.txt").write_text("the cell of the river and the forest. " * 400)
    monkeypatch.setattr(memory, "MUCH_MEMORY", 1e6)
    given = {"data": {"train": "book.txt", "kind": "next"}, "network": {"hidden": 16}}
    job = build.build(flags.resolve(None, given))
    count = len(job.task.sets["train"])
    assert 100 < count < memory.MOST_AT_ONCE
    (note,) = [note for note in job.notes if "where it looks" in note]
    assert note.endswith(f"where it looks at {count} training sequences at once")
    sample = job.task.batch(0, 1, 0)
    looks = memory.looks_of(job.task, job.config.training, sample)
    assert looks[1:] == [memory.Look(1, 1519), memory.Look(1, 1519)]
    assert looks[1].text == "1 held-out sequence of 1,519 steps"


def test_the_help_has_the_numbers_of_the_defaults():
    """The lengths of runs, in the help of --steps and --every, are those of the code."""
    help_of = {key: field.description for key, field in TrainingSection.model_fields.items()}
    usual = own_defaults.EVERY_STEP
    others = (own_defaults.NEXT_STEP, own_defaults.DENSE_LAYERS, own_defaults.OTHER_CELL)
    for one in others:
        lengths = (one.epochs, one.least_steps, one.most_steps)
        assert lengths == (usual.epochs, usual.least_steps, usual.most_steps)
    lags = own_defaults.SHORT_SERIES
    answer = own_defaults.ONE_ANSWER
    wanted = (
        f"{usual.epochs} epochs within {usual.least_steps:,} to {usual.most_steps:,} steps",
        f"({lags.least_steps:,} to {lags.most_steps:,} with --lags)",
        f"{answer.epochs} epochs within {answer.least_steps:,} to {answer.most_steps:,}",
        f"at least {own_defaults.LEAST_EPOCHS} epochs",
    )
    for words in wanted:
        assert words in help_of["steps"]
    assert f"about {own_defaults.VALIDATIONS} validations" in help_of["every"]


class Sized:
    """As much of a set as `fill_training` reads."""

    splits = ("valid", "test")

    def __init__(self, n, length):
        self.n = n
        self.length = length
        self.sets = {"train": self}

    def __len__(self):
        return self.n

    def steps(self):
        return np.full(self.n, self.length)

    def steps_per_epoch(self, size):
        return -(-self.n // size)


def test_samples_without_time():
    values, notes, _ = fill(write_samples(40), network={"chain": "8x2"})
    assert values["network"] == {"activation": "relu", "dropout": 0.2}
    assert (values["optimiser"]["lr"], values["training"]["batch"]) == (1e-2, 16)
    assert notes[0].startswith("defaults for your data: activation relu, dropout 0.2, lr 0.01")
    given = {"network": {"chain": "8x2", "activation": "tanh"}}
    assert fill(write_samples(40), **given)[0]["network"] == {"dropout": 0.2}
    # Other layers than dense ones were not tried: they keep what they have.
    values, _, _ = fill(write_samples(40), network={"chain": "8, layernorm, 8"})
    assert values.get("network", {}) == {}
    assert "lr" not in values["optimiser"]


# what was given


def test_given_keys_win():
    given = {
        "network": {"hidden": 5, "readout": "attention"},
        "optimiser": {"lr": 0.5, "warmup": 7},
        "training": {"batch": 3, "patience": 2, "every": 4},
    }
    values, notes, _ = fill(write_labelled(50, 8), **given)
    for section, keys in given.items():
        assert not set(keys) & set(values.get(section, {}))
    assert values["network"] == {"cell": "gru", "bidirectional": True}
    assert notes[0].startswith("defaults for your data: gru of 5 units, both directions, cosine")


@pytest.mark.parametrize("length", own_defaults.LENGTHS)
def test_a_given_length_of_the_run_stays(length):
    values, notes, _ = fill(write_labelled(50, 8), training={length: 30})
    training = values["training"]
    assert not {"steps", "every", "patience"} & set(training)
    assert len(notes) == 1
    has_end = length in ("steps", "epochs")
    assert ("schedule" in values["optimiser"]) == has_end
    assert values["optimiser"].get("warmup") == {"steps": 2, "epochs": 4}.get(length)


@pytest.mark.parametrize(
    "network", [{"cell": "elman"}, {"cell": "gru", "deep": 4}, {"cell": "lipschitz", "beta": 0.6}]
)
def test_networks_that_were_not_tried_keep_their_own_settings(network):
    values, _, _ = fill(write_labelled(50, 8), network=network)
    assert values.get("network", {}) == {}
    assert "lr" not in values["optimiser"]


def test_gradient_methods_that_read_step_by_step_get_no_summary():
    values, _, _ = fill(write_labelled(50, 8), gradient={"method": "rtrl"})
    assert values.get("network", {}) == {}


def test_an_optimiser_of_ones_own_keeps_its_settings():
    values, _, _ = fill(write_labelled(50, 8), optimiser={"name": "sgd", "lr": 0.1})
    assert "optimiser" not in values
    assert "clip" not in values["training"]
    values, _, _ = fill(write_series(50, 8), "next", optimiser={"name": "adam"})
    assert "weight_decay" not in values["optimiser"]
    values, _, _ = fill(write_labelled(50, 8), optimiser={"schedule": "linear", "end": 0.1})
    assert set(values["optimiser"]) == {"lr"}


def test_no_patience_without_a_validation_set():
    values, notes, _ = fill(write_labelled(50, 8), data={"split": [1.0, 0.0, 0.0]})
    assert "patience" not in values["training"]
    assert notes[1] == "600 epochs (2,400 steps)"


def test_a_built_in_task_keeps_its_defaults(coadjoint):
    config = flags.resolve(None, {"task": {"name": "xor"}})
    task = build_task.task_of(config)
    assert build.resolve_own_defaults(config, {}, task) == (config, [])
    few = ("--hidden", "3", "--steps", "2", "--probes", "2", "--tests", "5", "--confirm", "5")
    code, out, _ = coadjoint("train", "xor", *few, "--out", "run")
    assert code == 0
    assert "defaults for your data" not in out
    config = config_of("run")
    assert config["network"]["cell"] == "elman"
    assert config["training"]["batch"] == 32
    assert not {"clip", "patience"} & set(config["training"])
    assert config["optimiser"] == {
        "name": "adam", "lr": 1e-3, "schedule": "constant", "warmup": 0,
    }  # fmt: skip


# the command


def test_defaults_are_printed_and_stored(coadjoint):
    path = write_labelled(20, 3)
    command = ("train", "--train", path, "--steps", "6", "--hidden", "3", "--probes", "2")
    code, out, err = coadjoint(*command, "--out", "run")
    assert (code, err) == (0, "")
    assert "defaults for your data: gru of 3 units, both directions, mean over steps" in out
    config = config_of("run")
    assert config["network"]["readout"] == "mean"
    assert config["network"]["bidirectional"] is True
    assert config["optimiser"]["schedule"] == "cosine"
    assert (config["training"]["batch"], config["training"]["clip"]) == (16, 1.0)
    # What is stored says all: a new run of it has nothing left to fill in.
    code, out, _ = coadjoint("train", "--config", "run/config.yaml", "--out", "again")
    assert code == 0
    assert "defaults for your data" not in out
    assert config_of("again") == config
    assert rows_of("again") == rows_of("run")


def test_an_untrained_network_forecasts_the_last_value(coadjoint):
    path = write_series(3, 30)
    command = ("train", "--train", path, "--kind", "next", "--steps", "1", "--probes", "2")
    code, out, _ = coadjoint(*command, "--hidden", "4", "--out", "run")
    assert code == 0
    assert "begins with the forecast that nothing changes" in out
    first = next(row for row in rows_of("run") if row["kind"] == "held-out" and row["step"] == 0)
    baselines = json.loads(Path("run/result.json").read_text())["baselines"]
    last = next(each for each in baselines if each["name"] == "last value")
    assert first["mse"] == pytest.approx(last["metrics"]["valid"]["mse"], rel=1e-6)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_persistence_repeats_standardised_inputs(cell):
    """In the units of the file: the forecast for the step after row t is row t."""
    given = {
        "data": {"train": write_series(2, 20), "kind": "next", "split": [0.5, 0.0, 0.5]},
        "network": {"cell": cell, "hidden": 4, "skip": True, "persistence": True},
        "training": {"steps": 1},
    }
    config = build.resolve_dependent_keys(flags.resolve(None, given))
    task = build_task.task_of(config)
    net = build.network_of(build.resolve_defaults(config, task, "cpu"), task, "cpu")
    batch = task.sets["test"].batch([0], every=True)
    assert float(batch.u.abs().max()) < 50  # standardised: the walks begin at 100
    torch.testing.assert_close(net(batch.u, batch.lengths).y_hat, batch.u, rtol=0, atol=0)
    changes = (batch.y - batch.u).double() * torch.from_numpy(task.description.target_scale()[1])
    found = validation.evaluate(net, task, "test", 0)["mse"]
    assert found == pytest.approx(float(changes.square().mean()), rel=1e-6)


def test_persistence_without_skip_is_refused_and_no_skip_goes_without_it(coadjoint):
    path = write_series(3, 30)
    command = ("train", "--train", path, "--kind", "next", "--steps", "1", "--hidden", "3")
    code, _, err = coadjoint(*command, "--persistence", "--no-skip", "--out", "run")
    assert code == 2
    assert "--skip" in err
    assert not Path("run").exists()
    assert "persistence" not in fill(path, "next", network={"skip": False})[0]["network"]


# --chunk


def test_chunks_cut_training_and_nothing_else(coadjoint):
    path = write_series(4, 50)
    command = ("train", "--train", path, "--kind", "next", "--steps", "2", "--probes", "2")
    code, _, err = coadjoint(*command, "--hidden", "3", "--chunk", "7", "--out", "run")
    assert (code, err) == (0, "")
    assert config_of("run")["task"]["chunk"] == 7
    code, _, err = coadjoint("resume", "run", "--steps", "3", "--quiet")
    assert (code, err) == (0, "")
    task = Data.read(path, kind="next")
    whole = {name: part.steps().tolist() for name, part in task.sets.items()}
    linear = task.baselines[0]
    task = Data.read(path, kind="next")
    task.cut_training(7)
    assert max(task.sets["train"].steps()) == 7
    assert sum(task.sets["train"].steps()) == sum(whole["train"])
    for name in ("valid", "test"):
        assert task.sets[name].steps().tolist() == whole[name]
    # The linear model reads further back than a chunk: it is fitted to the whole series.
    assert task.baselines[0] == linear


@pytest.mark.parametrize("words", [(), ("--chain", "4")])
def test_chunks_need_a_target_at_every_step(coadjoint, words):
    path = write_samples(20) if words else write_labelled(20, 8)
    code, _, err = coadjoint("train", "--train", path, *words, "--chunk", "4", "--out", "run")
    assert code == 2
    assert "--chunk cuts training sequences that have a target at every step" in err
    assert not Path("run").exists()


# runs that began before there were such defaults


@pytest.mark.parametrize("kind", ["classify", "next"])
def test_a_run_of_0_8_is_resumed_with_its_own_settings(coadjoint, monkeypatch, kind):
    path = write_series(3, 40) if kind == "next" else write_labelled(20, 4)
    command = ("train", "--train", path, "--kind", kind, "--probes", "2", "--quiet")
    with monkeypatch.context() as as_it_was:
        as_it_was.setattr(own_defaults, "fill", lambda *given: own_defaults.Filled())
        assert coadjoint(*command, "--steps", "2", "--every", "2", "--out", "old")[0] == 0
        assert coadjoint(*command, "--steps", "4", "--every", "2", "--out", "whole")[0] == 0
    stored = config_of("old")
    assert stored["network"]["cell"] == "elman"
    assert stored["training"]["batch"] == 32
    code, _, err = coadjoint("resume", "old", "--steps", "4", "--quiet")
    assert (code, err) == (0, "")
    assert rows_of("old") == rows_of("whole")
    assert config_of("old")["network"] == stored["network"]
    assert config_of("old")["optimiser"] == stored["optimiser"]
