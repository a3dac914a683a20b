"""The start of forecasts of named columns (--kind next --target): nothing changes."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import coadjoint as co
from coadjoint import networks
from coadjoint.cli import build, flags
from coadjoint.errors import InputError
from coadjoint.tasks.ahead import present_inputs
from coadjoint.tasks.data import Data
from coadjoint.training import own_defaults, settings
from coadjoint.training.linear_start import repeated_inputs

START = "begins with the forecast that nothing changes"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def write_table(name="table.csv", sequences=6, steps=40, gaps=()):
    """Random walks of very different scales, with words between them.

    gaps: the columns in which every seventh value is missing.
    """
    rng = np.random.default_rng(11)
    parts = []
    for i in range(sequences):
        columns = {
            "series": i,
            "t": np.arange(steps),
            "a": 1e4 + 30 * rng.normal(size=steps).cumsum(),
            "word": rng.choice(["red", "green", "blue"], steps),
            "b": -0.5 + 1e-3 * rng.normal(size=steps).cumsum(),
            "c": rng.normal(size=steps).cumsum(),
            "d": 5 + 0.1 * rng.normal(size=steps).cumsum(),
        }
        part = pd.DataFrame(columns)
        for column in gaps:
            part.loc[part.index % 7 == 3, column] = np.nan
        parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    table.to_csv(name, index=False)
    return table


def write_settings(precision=64, network=None, **data):
    """The settings of a new run on the table, by section."""
    table = {"train": "table.csv", "kind": "next", "id": "series", "time": "t", "gaps": False}
    return {
        "data": table | {"categorical": ["word"]} | data,
        "network": {"hidden": 4} | (network or {}),
        "training": {"precision": precision, "steps": 1},
    }


def make_job(**given):
    """The job of a new run, whose network is not trained."""
    return build.build(flags.resolve(None, write_settings(**given)))


def answers_of(job, table):
    """The predictions of the untrained network in the units of the table, [rows, outputs]."""
    answers = np.asarray(co.Model(job.network, job.task).predict(table))
    return answers.reshape(len(table), -1)


@pytest.mark.parametrize(
    ("data", "repeats"),
    [
        ({"target": "d"}, ["d"]),
        ({"target": ["c", "a"]}, ["c", "a"]),
        ({"target": ["d", "c", "b", "a"]}, ["d", "c", "b", "a"]),
        ({"target": ["b", "d"], "standardise": False}, ["b", "d"]),
        ({"target": "b", "features": ["c", "word"], "categorical": ["word"]}, ["b"]),
        ({"target": "b", "features": ["d", "c", "b"], "categorical": None}, ["b"]),
        ({"target": "c", "known": ["a", "word"]}, ["c"]),
        ({"target": ["d", "b"], "window": 9}, ["d", "b"]),
        ({"target": ["d", "b"], "horizon": 3, "strategy": "direct"}, ["d", "b"] * 3),
        ({"target": "c", "horizon": 9, "strategy": "direct", "known": ["b"]}, ["c"] * 9),
        ({"target": "c", "horizon": 5, "strategy": "recursive"}, ["c"]),
        (
            {"target": ["d", "a"], "quantiles": [0.1, 0.5, 0.9], "horizon": 2},
            ["d"] * 3 + ["a"] * 3 + ["d"] * 3 + ["a"] * 3,
        ),
        ({"target": "b", "quantiles": [0.1, 0.5, 0.9], "lags": [1, 2]}, ["b"] * 3),
        ({"target": "d", "gaps": True}, ["d"]),
    ],
)
def test_the_untrained_network_repeats_the_named_columns(data, repeats):
    table = write_table()
    job = make_job(**data)
    assert START in job.default_notes[0]
    np.testing.assert_allclose(answers_of(job, table), table[repeats], rtol=1e-12, atol=1e-12)
    # Outputs have the scale of the inputs that they repeat.
    d = job.task.description
    mean, std = d.target_scale()
    columns = [d.features.index(d.input_columns[place]) for place in present_inputs(d)]
    np.testing.assert_array_equal(mean, np.array(d.mean)[columns])
    np.testing.assert_array_equal(std, np.array(d.std)[columns])


@pytest.mark.parametrize("network", [{"cell": "lstm"}, {"layers": 2}, {"bias": False}])
def test_other_networks_repeat_them_too(network):
    table = write_table()
    asked = {"skip": True, "persistence": True}
    job = make_job(target="d", network=network | asked)
    np.testing.assert_allclose(answers_of(job, table), table[["d"]], rtol=1e-12)


@pytest.mark.parametrize("missing", ["mask", "ffill"])
def test_missing_values(missing):
    """A mask adds inputs behind the numbers; in a row without the value the mean stands for it."""
    table = write_table(gaps=("a", "d"))
    job = make_job(target=["d", "b"], missing=missing)
    answers = answers_of(job, table)
    known = table["d"].notna().to_numpy()
    np.testing.assert_allclose(answers[known, 0], table["d"][known], rtol=1e-12)
    np.testing.assert_allclose(answers[:, 1], table["b"], rtol=1e-12)
    expected = table.groupby("series")["d"].ffill()
    if missing == "mask":
        expected = table["d"].fillna(job.task.description.target_mean[0])
    np.testing.assert_allclose(answers[:, 0], expected, rtol=1e-12)


def test_a_prepared_set_and_data_in_memory(coadjoint):
    table = write_table()
    words = ("--kind", "next", "--id", "series", "--time", "t", "--categorical", "word")
    assert coadjoint("prepare", "table.csv", *words, "--out", "table.co", "--quiet")[0] == 0
    own = {"id": None, "time": None, "categorical": None}
    job = make_job(train="table.co", target=["d", "b"], **own)
    np.testing.assert_allclose(answers_of(job, table), table[["d", "b"]], rtol=1e-12)
    given = {"kind": "next", "id": "series", "categorical": "word", "dtype": "float64"}
    task = Data.of(table, target=["c", "a"], time="t", **given)
    net = networks.make(
        "lstm", inputs=task.inputs, outputs=task.outputs, hidden=3, readout="every", skip=True,
        persistence=repeated_inputs(task, has_target=True), dtype=torch.float64,
    )  # fmt: skip
    answers = np.asarray(co.Model(net, task).predict(table))
    np.testing.assert_allclose(answers, table[["c", "a"]], rtol=1e-12)


def test_a_run_begins_with_the_baseline_and_resumes_with_the_same_bits(coadjoint):
    table = write_table()
    words = ("--train", "table.csv", "--kind", "next", "--id", "series", "--time", "t")
    words += ("--target", "d", "--categorical", "word", "--hidden", "4", "--probes", "1")
    words += ("--schedule", "constant")
    code, out, err = coadjoint("train", *words, "--steps", "6", "--out", "whole")
    assert (code, err) == (0, "")
    assert START in out
    lines = Path("whole/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first = next(row for row in rows if row["kind"] == "held-out" and row["step"] == 0)
    result = json.loads(Path("whole/result.json").read_text())
    last = next(each for each in result["baselines"] if each["name"] == "last value")
    assert first["mse"] == pytest.approx(last["metrics"]["valid"]["mse"], rel=1e-6)
    network = settings.load(Path("whole/config.yaml")).values["network"]
    assert (network["skip"], network["persistence"]) == (True, True)
    # A run that is resumed from its checkpoint, and one from a config that says it all.
    assert coadjoint("train", *words, "--steps", "3", "--out", "part", "--quiet")[0] == 0
    code, _, err = coadjoint("resume", "part", "--steps", "6", "--quiet")
    assert (code, err) == (0, "")
    again = ("train", "--config", "whole/config.yaml", "--out", "again", "--quiet")
    assert coadjoint(*again)[0] == 0
    outputs = {}
    for run in ("whole", "part", "again"):
        outputs[run] = np.asarray(co.load(run).predict(table))
    np.testing.assert_array_equal(outputs["part"], outputs["whole"])
    np.testing.assert_array_equal(outputs["again"], outputs["whole"])


def test_the_untrained_network_continues_series_with_their_last_value():
    table = write_table()
    job = make_job(target=["d", "b"], horizon=3, strategy="direct")
    forecast = co.Model(job.network, job.task).forecast(table)
    last = table.groupby("series")[["d", "b"]].last().to_numpy()
    assert forecast.names == ["d", "b"]
    np.testing.assert_allclose(forecast.values, last[:, None].repeat(3, 1), rtol=1e-12)


@pytest.mark.slow
def test_compare_and_tune_begin_so_too(coadjoint):
    write_table()
    words = ("--train", "table.csv", "--kind", "next", "--id", "series", "--time", "t")
    words += ("--target", "d", "--categorical", "word", "--hidden", "3", "--steps", "1")
    code, _, err = coadjoint("compare", *words, "-m", "plain", "--seeds", "1", "--out", "cmp")
    assert code == 0, err
    code, _, err = coadjoint("tune", *words, "--vary", "lr=1e-4..1e-3", "--trials", "1",
                             "--out", "study")  # fmt: skip
    assert code == 0, err
    for path in ("cmp/runs/plain-seed-0/config.yaml", "study/runs/trial-0/config.yaml"):
        network = settings.load(Path(path)).values["network"]
        assert (network["skip"], network["persistence"]) == (True, True)


def test_only_named_columns_change_the_start():
    """Without --target, runs begin as they always did."""
    write_table()
    for data in ({"horizon": 3}, {"known": ["a"]}, {"quantiles": [0.5, 0.9]}):
        job = make_job(**data)
        assert START not in job.default_notes[0]
        assert job.config.network.skip is None
    every = make_job()
    assert START in every.default_notes[0]
    assert repeated_inputs(every.task, has_target=False) is True
    np.testing.assert_array_equal(every.network.D.detach(), np.eye(4, every.task.inputs))
    # The columns in the order of the file are the same start, to the bit.
    named = make_job(target=["a", "b", "c", "d"])
    for key, weight in every.network.state_dict().items():
        torch.testing.assert_close(named.network.state_dict()[key], weight, rtol=0, atol=0)


def test_what_was_given_takes_precedence():
    write_table()
    for network in ({"skip": False}, {"persistence": False}, {"cell": "elman"}):
        job = make_job(target="d", network=network)
        assert not job.config.network.persistence
        assert START not in job.default_notes[0]


def test_classes_and_numbers_of_other_kinds_have_no_start():
    write_table()
    given = write_settings(kind="regress", target="d", at="every")
    config = build.resolve_dependent_keys(flags.resolve(None, given))
    task = build.build(config).task
    assert own_defaults.choose_defaults(config, given, task) is (own_defaults.EVERY_STEP)
    assert repeated_inputs(task, has_target=True) is True
    labelled = write_settings(kind="classify", target="word", at="every", categorical=None)
    job = build.build(flags.resolve(None, labelled))
    assert not job.config.network.persistence


@pytest.mark.parametrize("named", [{}, {"target": ["d", "a"]}])
def test_lags_with_many_steps_at_once_begin_with_the_line(named):
    """More outputs than inputs: this was refused for a --persistence that nobody gave."""
    write_table()
    job = make_job(lags=[1], horizon=9, strategy="direct", **named)
    assert job.task.outputs > job.task.inputs
    assert "begins with the forecast of a linear regression" in job.default_notes[0]
    assert float(job.network.D.detach().abs().min()) > 0


@pytest.mark.parametrize("repeated", [[0], [0, 1, 2], [0, 3], [-1, 0], []])
def test_repeated_inputs_that_the_network_lacks_are_refused(repeated):
    options = {"inputs": 3, "outputs": 2, "hidden": 2, "readout": "every", "skip": True}
    with pytest.raises(InputError, match="the input that each of 2 outputs repeats, 0 to 2"):
        networks.make("gru", persistence=repeated, **options)
