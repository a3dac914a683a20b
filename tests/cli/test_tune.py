"""Searches for settings: what varies, what a trial sees, and stopping one loses nothing."""

import json
import warnings

import numpy as np
import pytest

from coadjoint.cli import flags as setting_flags
from coadjoint.cli import program, search_space, study_record, study_show, study_trials
from coadjoint.cli.search_space import Alternatives, Range
from coadjoint.errors import ConfigError, StorageError
from coadjoint.training import schemas
from coadjoint.training.report import pages

optuna = pytest.importorskip("optuna")


class Middle:
    """A trial that takes the middle of each range and the last of each choice."""

    def __init__(self):
        self.params = {}

    def suggest_categorical(self, name, choices):
        return self.params.setdefault(name, choices[-1])

    def suggest_float(self, name, low, high, *, log=False):
        return self.params.setdefault(name, (low * high) ** 0.5 if log else (low + high) / 2)

    def suggest_int(self, name, low, high, *, log=False):
        return round(self.suggest_float(name, low, high, log=log))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of 40 short sequences of two classes, in the present folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["id,time,x,target"]
    for i in range(40):
        for t in range(5):
            label = ["low", "high"][i % 2]
            lines.append(f"{i},{t},{rng.normal() + i % 2:.3f},{label}")
    (tmp_path / "data.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_space_is_read_from_words():
    space = search_space.parse_space("lr=1e-4..1e-1 hidden=8..16 cell=gru|lstm penalty=none|omega")
    assert space == [
        Range("optimiser", "lr", 1e-4, 1e-1),
        Range("network", "hidden", 8, 16, is_whole=True),
        Alternatives("network", "cell", ("gru", "lstm")),
        Alternatives("gradient", "penalty", ("none", "omega")),
    ]
    assert [d.is_log for d in space[:2]] == [True, False]
    # What is stored in the folder is read back the same.
    assert search_space.parse_space(" ".join(d.text() for d in space)) == space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=1..0.1", "the first number must be the smaller one"),
        ("lr=a..b", "a range has two numbers"),
        ("lr=-1..1", "--lr: must be a number greater than 0"),
        ("lr", "give its values"),
        ("width=1..2 width=3..4", "twice"),
        ("learning_rate=1..2", "did you mean 'lr'"),
        ("kind=a|b", "--kind: must be"),
        ("", "takes settings and their values"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        search_space.parse_space(text)


def test_a_weight_is_searched_only_where_there_is_a_penalty():
    space = search_space.parse_space("weight=1e-3..10 penalty=log-ratio|none")
    assert search_space.suggest(space, Middle(), {}) == {}
    given = {"gradient": {"penalty": "log-ratio"}}
    values = search_space.suggest(space[:1], Middle(), given)
    assert values == {"gradient": {"weight": pytest.approx(0.1)}}


def test_given_settings_are_not_searched():
    given = {"network": {"cell": "gru"}, "optimiser": {"lr": 1e-2}}
    names = [d.key for d in search_space.default_space(given, has_time=True)]
    assert names == ["hidden", "clip", "dropout", "penalty", "weight"]
    names = [d.key for d in search_space.default_space({}, has_time=False)]
    assert names == ["lr", "clip", "dropout", "penalty", "weight"]


def test_only_what_the_user_gave_is_kept():
    config = setting_flags.resolve(None, {"training": {"batch": 32}, "optimiser": {"lr": 1e-2}})
    assert setting_flags.given_by_user(config) == {
        "training": {"batch": 32},
        "optimiser": {"lr": 1e-2},
    }


def test_the_best_settings_are_a_command():
    values = {
        "data": {"train": "my data.csv", "split": [0.8, 0.2, 0.0]},
        "network": {"cell": "gru", "bidirectional": True, "bias": False},
        "optimiser": {"name": "adamw", "lr": 0.001234},
    }
    assert study_show.train_command(values) == (
        "coadjoint train --train 'my data.csv' --split 0.8,0.2,0.0 --cell gru --bidirectional "
        "--no-bias --optimiser adamw --lr 0.001234"
    )


@pytest.mark.slow
def test_a_search_ranks_by_validation_and_sees_the_test_set_once(table, coadjoint):
    words = ["tune", "--train", "data.csv", "--vary", "lr=1e-3..1e-1", "--vary", "hidden=2..4"]
    words += ["--epochs", "2"]
    code, out, err = coadjoint(*words, "--trials", "2", "--jobs", "1", "--out", "s")
    assert (code, err) == (0, "")
    assert "goal: valid accuracy; at most 2 trials" in out
    assert "2 of 2: trial 1: valid accuracy" in out
    assert "best settings:\n  coadjoint train --train data.csv" in out
    assert "importance: from 10 complete trials on" in out
    for name in ("trial-0", "trial-1"):
        folder = table / "s" / "runs" / name
        assert set(json.loads((folder / "result.json").read_text())["metrics"]) == {
            "train",
            "valid",
        }
        assert '"split":"test"' not in (folder / "metrics.jsonl").read_text()
    result = json.loads((table / "s" / "best" / "result.json").read_text())
    assert set(result["metrics"]) == {"train", "valid", "test"}
    found = json.loads((table / "s" / "trials.json").read_text())
    best = max(found["trials"], key=lambda trial: trial["value"])
    assert found["trials"][found["best"]]["value"] == best["value"]
    assert result["metrics"]["valid"]["accuracy"] == best["value"]
    page = (table / "s" / "report.html").read_text()
    assert "What each setting did" in page
    assert "runs/trial-0/report.html" in page
    # Nothing is left to do.
    before = (table / "s" / "study.db").read_bytes()
    code, out, err = coadjoint("resume", "s", "--quiet")
    assert (code, out, err) == (0, "", "")
    assert (table / "s" / "study.db").read_bytes() == before


@pytest.mark.slow
def test_a_search_without_success_is_not_advised_to_search_anew(table, coadjoint):
    words = ["--vary", "lr=1e-9..1e-8", "--cell", "gru", "--hidden", "2", "--epochs", "1"]
    words += ["--trials", "1", "--jobs", "1", "--out", "s"]
    code, out, err = coadjoint("tune", "--train", "data.csv", *words)
    assert (code, err) == (0, "")
    assert (
        "What may help: more --epochs, --penalty log-ratio or a longer search (coadjoint resume s "
        "--trials 2)." in out
    )


def test_the_importance_of_settings_is_shown_without_warnings(tmp_path, coadjoint):
    goal = study_record.SearchGoal("accuracy", "valid", lower=False)
    space = search_space.parse_space("lr=1e-3..1e-1 dropout=0..0.5")
    base = {"data": {"train": "data.csv"}}
    plan = {"trials": 12, "minutes": None, "seed": 0, "command": None}
    study_record.lay_out(tmp_path / "s", study_record.describe_plan(base, space, goal, plan, {}))
    record = study_record.open_record(tmp_path / "s")
    ranges = {
        "lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True),
        "dropout": optuna.distributions.FloatDistribution(0.0, 0.5),
    }
    for number in range(12):
        values = {"lr": 1e-3 * (number + 1), "dropout": (5 * number % 12) / 24}
        if number == 11:  # optuna warns of a setting that few trials have
            values = {"lr": values["lr"]}
        chosen = {name: ranges[name] for name in values}
        score = number / 12
        trial = optuna.trial.create_trial(params=values, distributions=chosen, value=score)
        record.add_trial(trial)
        if number == 8:
            _, out, err = coadjoint("tune", "--show", "--out", str(tmp_path / "s"))
            assert ("importance: from 10 complete trials on" in out, err) == (True, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        code, out, err = coadjoint("tune", "--show", "--out", str(tmp_path / "s"))
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("importance: ")]
    assert line.startswith("importance: lr ")
    assert "dropout 0." in line


@pytest.mark.slow
def test_a_trial_that_was_killed_goes_on_in_its_folder(table, coadjoint):
    goal = study_record.SearchGoal("accuracy", "valid", lower=False)
    base = {"data": {"train": "data.csv"}, "training": {"epochs": 1}}
    plan = {"trials": 1, "minutes": None, "seed": 0, "command": None}
    folder = table / "s"
    space = search_space.parse_space("hidden=2..4")
    content = study_record.describe_plan(base, space, goal, plan, {"hidden": 3})
    study_record.lay_out(folder, content)
    killed = study_record.open_record(folder).ask()  # and never told
    killed.suggest_int("hidden", 2, 4)
    code, out, err = coadjoint("resume", "s", "--jobs", "1")
    assert (code, err) == (0, "")
    assert "1 of 1: trial 0: valid accuracy" in out
    assert [path.name for path in (folder / "runs").iterdir()] == ["trial-0"]
    record = optuna.load_study(study_name="coadjoint", storage=f"sqlite:///{folder}/study.db")
    states = [trial.state.name for trial in record.trials]
    assert states == ["FAIL", "COMPLETE"]
    assert record.best_trial.params == {"hidden": 3}


def test_a_pruned_run_is_not_resumed_by_accident(tmp_path):
    result = {
        "status": "interrupted",
        "step": 5,
        "seconds": 1.0,
        "reason": "SIGTERM at step 5",
        "metric": "accuracy",
        "metrics": {},
        "parameters": 3,
        "success": False,
        "success_step": None,
        "success_seconds": None,
        "goal": None,
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert program.final_status(tmp_path, 10) is None
    study_trials.mark_pruned(tmp_path, 7)
    assert program.final_status(tmp_path, 10) == "pruned"
    assert schemas.read(tmp_path / "result.json", schemas.ResultSchema)["status"] == "pruned"


def test_a_bad_trial_is_pruned_and_a_good_one_is_not(tmp_path):
    record = optuna.create_study(
        direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
    )
    for _ in range(2):
        trial = record.ask()
        for step in (10, 20):
            trial.report(0.8, step)
        record.tell(trial, 0.8)
    goal = study_record.SearchGoal("accuracy", "valid", lower=False)
    rows = [
        {"kind": "train", "step": 10, "loss": 1.0},
        {"kind": "held-out", "split": "test", "step": 10, "accuracy": 1.0},
        {"kind": "held-out", "split": "valid", "step": 0, "accuracy": 1.0},
        {"kind": "held-out", "split": "valid", "step": 10, "accuracy": None},
    ]
    for value, is_pruned in ((0.1, True), (0.9, False)):
        run_folder = tmp_path / str(value)
        run_folder.mkdir()
        watcher = study_trials.TrialWatcher(record.ask(), run_folder, goal)
        assert not watcher.look()  # nothing is written yet
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        last = {"kind": "held-out", "split": "valid", "step": 20, "accuracy": value}
        path = run_folder / "metrics.jsonl"
        path.write_text(lines + json.dumps(last)[:-3])
        assert not watcher.look()  # the last row is not complete
        path.write_text(lines + json.dumps(last) + "\n")
        assert watcher.look() == is_pruned


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "0"], "--trials must be from 1"),
        (["--minutes", "0"], "--minutes must be greater than 0"),
        (["--vary", "lr=1e-3..1", "--lr", "1"], "--lr is given and in --vary"),
        (["--split", "1,0,0"], "needs a validation set"),
        (["--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_a_search_that_cannot_work_is_refused(table, coadjoint, words, message):
    code, _, err = coadjoint("tune", "--train", "data.csv", *words)
    assert code == 2
    assert message in err
    assert not (table / "runs").exists()


def test_resume_says_what_applies_to_a_search(table, coadjoint):
    code, _, err = coadjoint("resume", "x", "--trials", "3")
    assert code == 2
    assert "apply to a search" in err
    (table / "s").mkdir()
    (table / "s" / "tune.json").write_text("{}")
    code, _, err = coadjoint("resume", "s")
    assert code != 0
    assert "tune.json" in err
    code, _, err = coadjoint("resume", "s", "--steps", "3")
    assert "apply to a run, not to a search" in err


def test_a_study_from_a_stranger_stays_in_its_folder(tmp_path):
    goal = study_record.SearchGoal("accuracy", "valid", lower=False)
    plan = {"trials": 1, "minutes": None, "seed": 0, "command": None}
    base = {"data": {"train": "data.csv"}}
    folder = tmp_path / "s"
    space = search_space.parse_space("hidden=2..4")
    study_record.lay_out(folder, study_record.describe_plan(base, space, goal, plan, {}))
    trial = {
        "number": 0,
        "folder": "../outside",
        "status": "complete",
        "value": 1.0,
        "settings": {},
        "seconds": 1.0,
        "error": None,
    }
    trials = {"best": 0, "importances": {}, "trials": [trial]}
    (folder / "trials.json").write_text(json.dumps(trials))
    with pytest.raises(StorageError, match="folder"):
        pages.write(folder)
    (folder / "study.db").rename(tmp_path / "other.db")
    (folder / "study.db").symlink_to(tmp_path / "other.db")
    with pytest.raises(StorageError, match="link"):
        study_record.open_record(folder)
