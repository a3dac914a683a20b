"""Searches by several workers: where trials are recorded, who runs which, and no password kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from coadjoint.cli import search_space, study_queue, study_record, study_storage, workers
from coadjoint.cli.study import Study
from coadjoint.errors import ConfigError, MissingError, hide_passwords
from coadjoint.training.report import pages, read

optuna = pytest.importorskip("optuna")
SMALL = "--length 10 --cell elman --hidden 3 --batch 4 --steps 4 --tests 8 --vary lr=1e-4..1e-2"
TASK = ["temporal-order", *SMALL.split()]
GOAL = study_record.SearchGoal("right", "test", lower=False)
BASE = {
    "task": {"name": "temporal-order", "length": 10},
    "network": {"cell": "elman", "hidden": 3},
    "training": {"batch": 4, "steps": 4, "tests": 8},
}
PLAN = {"trials": 4, "minutes": None, "seed": 0, "command": None}


def lay_out(folder, storage=None, steps=4, **changes):
    """A study of very short runs."""
    plan = {**PLAN, "storage": storage, **changes}
    training = {**BASE["training"], "steps": steps, "every": 100, "checkpoint": 10}
    base = {**BASE, "training": training}
    space = search_space.parse_space("lr=1e-4..1e-2")
    folder.mkdir()
    content = study_record.describe_plan(base, space, GOAL, plan, {"lr": 1e-3})
    study_record.lay_out(folder, content)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "kind", "url"),
    [
        (None, "sqlite", "sqlite:///s/study.db"),
        ("journal:", "journal", "s/study.journal"),
        ("journal:/shared/j", "journal", "/shared/j"),
        ("sqlite:///other.db", "sqlite", "sqlite:///other.db"),
        ("postgresql+psycopg://a@h/d", "server", "postgresql+psycopg://a@h/d"),
        ("postgresql://a:b@h:1/d", "server", "postgresql+psycopg://a:b@h:1/d"),
    ],
)
def test_a_storage_is_a_file_or_a_server(text, kind, url):
    place = study_storage.parse_storage(text, Path("s"))
    assert (place.kind, place.url) == (kind, url)
    assert "b@" not in place.shown


@pytest.mark.parametrize(
    "text",
    [
        "mysql://me:hidden@host/db",
        "me:hidden@host",
        "postgresql://me:hidden@host",
        "postgresql://me:hidden@host:port/db",
        "postgresql://me:hidden word@host/db",
        "postgresql://me:hid/den@ho:st/db",
        "sqlite:///",
        "",
    ],
)
def test_a_storage_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--storage must") as fault:
        study_storage.parse_storage(text, Path("s"))
    assert "hid" not in str(fault.value)


def test_passwords_are_hidden():
    text = "--storage postgresql://me:pass@word@host/db?sslpassword=x&password=y --lr 1"
    shown = "--storage postgresql://me:***@host/db?sslpassword=***&password=*** --lr 1"
    assert hide_passwords(text) == shown
    same = "--on tcp://head:8786 --storage postgresql+psycopg://me@host:5432/db"
    assert hide_passwords(same) == same


def test_a_server_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    place = study_storage.parse_storage("postgresql://me@host/db", Path("s"))
    with pytest.raises(MissingError, match=r"pip install 'coadjoint\[tune\]'"):
        place.open(1)


def test_refusals_leave_nothing_behind(here, coadjoint):
    for words, message in (
        (["--storage", "journal:j"], "--storage needs --study NAME"),
        (["--study", "a/b"], "--study must be a name"),
        (["--heartbeat", "0"], "--heartbeat must be from 1"),
        (["--show"], "--show needs the search"),
        (["--show", "--study", "s"], "runs/s holds no study"),
        (["--show", "--study", "s", "--storage", "journal:j"], "j does not exist"),
    ):
        code, out, err = coadjoint("tune", *words)
        assert code != 0
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
    assert list(here.iterdir()) == []


def test_the_storage_that_a_folder_names_is_not_trusted(here, coadjoint):
    lay_out(here / "s", "journal:j", trials=1)
    code, _, err = coadjoint("resume", "s")
    assert code != 0
    assert "the trials of s are recorded in journal:j: give it as --storage" in err


@pytest.mark.parametrize(
    ("storage", "planned", "wanted", "message"),
    [
        (
            None,
            4,
            9,
            "my study already holds a study of 4 trials. Go on with it: coadjoint resume "
            "'my study'; for more trials: coadjoint resume 'my study' --trials 9; or choose "
            "another --out.",
        ),
        ("journal:", 1, 1, "a study of 1 trial. Go on with it: coadjoint resume 'my study'; "),
        (None, 4, 2, "coadjoint resume 'my study' --trials 8; or"),
        ("journal:j", 4, 4, "coadjoint resume 'my study' --storage journal:j; for more trials: "),
    ],
)
def test_a_folder_with_a_study_says_how_to_go_on(
    here, coadjoint, storage, planned, wanted, message
):
    lay_out(here / "my study", storage, trials=planned)
    words = ["tune", *TASK, "--trials", str(wanted), "--out", "my study"]
    code, out, err = coadjoint(*words)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert message in err


def test_a_wrong_file_of_trials_is_told_from_a_lost_one(here, coadjoint):
    lay_out(here / "s", "sqlite:///t.db", trials=1)
    (here / "t.db").unlink()
    for name, words in (
        ("other.db", "other.db does not exist; the trials of s are recorded in sqlite:///t.db."),
        ("t.db", "t.db, the record of s, is missing: restore it."),
    ):
        code, out, err = coadjoint("tune", "--show", "s", "--storage", f"sqlite:///{name}")
        assert (code, out, err.count("\n")) == (4, "", 1)
        assert words in err
    assert [path.name for path in here.iterdir()] == ["s"]


def test_a_turn_is_had_by_one_at_a_time(tmp_path):
    turns = [study_queue.Turn(tmp_path) for _ in range(3)]
    inside, most = [], []

    def work(turn):
        for _ in range(20):
            with turn.taken():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in turns for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 120
    assert not turns[0].take(lambda: True)


def test_a_trial_that_kills_its_workers_is_given_up(tmp_path):
    lay_out(tmp_path / "s", trials=1)
    study = Study(tmp_path / "s")
    for death in range(study_queue.MOST_DEATHS):
        assert study.queue.look() == "begin"
        trial = study.study.ask()
        trial.set_user_attr("folder", "trial-0")
        trial.set_user_attr("worker", f"gone-{death}")
    assert study.queue.look() == "done"
    study.write_trials()
    found = json.loads((tmp_path / "s" / "trials.json").read_text())["trials"]
    assert [(row["status"], row["folder"]) for row in found] == [("failed", "runs/trial-0")]
    assert "killed" in found[0]["error"]
    study.close()


def test_the_queue_waits_for_workers_that_live(tmp_path):
    lay_out(tmp_path / "s", "journal:", trials=1)
    first, second = Study(tmp_path / "s"), Study(tmp_path / "s")
    assert first.queue.look() == "begin"
    trial = first.study.ask()
    trial.set_user_attr("folder", "trial-0")
    trial.set_user_attr("worker", first.mark.name)
    assert second.queue.look() == "wait"
    assert first.queue.look() == "done"  # the thread that has the trial is one of its own
    first.close()  # as if it had been killed
    assert second.queue.look() == "begin"
    assert [t.state.name for t in second.study.get_trials()] == ["FAIL", "WAITING"]
    again = second.study.ask()
    assert again.user_attrs["folder"] == "trial-0"
    second.close()


@pytest.mark.slow
def test_three_workers_try_as_many_as_were_asked_for(tmp_path):
    """Each has two threads; the record is SQLite. A dead worker has left a trial behind."""
    folder = tmp_path / "s"
    lay_out(folder)
    dead = study_record.open_record(folder).ask()
    dead.suggest_float("lr", 1e-4, 1e-2, log=True)
    dead.set_user_attr("folder", "trial-0")
    dead.set_user_attr("worker", "elsewhere-1-x")
    studies = [Study(folder) for _ in range(3)]
    for study in studies:
        study.report = lambda *_: None
    threads = [threading.Thread(target=study.work) for study in studies for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for study in studies:
        study.close()
    trials = study_record.open_record(folder).trials
    assert [t.state.name for t in trials].count("FAIL") == 1
    ended = [t for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert len(ended) == 4
    assert len(trials) == 5
    assert all("error" not in t.user_attrs for t in ended)
    assert len(list((folder / "runs").iterdir())) == 4
    assert len({t.params["lr"] for t in ended}) == 4  # workers do not draw the same numbers
    assert list((folder / "workers").iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path):
    """As the system does when memory is short; the worker lives."""
    folder = tmp_path / "s"
    lay_out(folder, trials=1, steps=600)
    run, killed = folder / "runs" / "trial-0", []

    def kill(study):
        while not study.is_over and not killed:
            if list(run.glob("checkpoints/step-*[1-9]*")):
                killed.append(int((run / "lock").read_text().split()[1]))
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.002)

    study = Study(folder)
    study.report = lambda *_: None
    killer = threading.Thread(target=kill, args=(study,))
    killer.start()
    study.work()
    study.is_over = True
    killer.join()
    study.close()
    assert killed
    assert [t.state.name for t in study.study.trials] == ["COMPLETE"]
    rows = [json.loads(line) for line in (run / "clock.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(0, 601, 100))
    assert json.loads((run / "result.json").read_text())["step"] == 600


@pytest.mark.slow
def test_the_same_line_adds_a_worker(here, coadjoint):
    """Two processes share a journal."""
    words = ["tune", *TASK, "--trials", "3", "--jobs", "1", "--study", "s", "--storage"]
    words.append("journal:")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen(
        [sys.executable, "-m", "coadjoint", *words], stdout=subprocess.PIPE, env=environment
    )
    try:
        code, out, err = coadjoint(*words)
        told, _ = other.communicate()
    finally:
        other.kill()
    assert (code, err, other.returncode) == (0, "", 0)
    both = out + told.decode()
    assert both.count("joining folder runs/s") == 1
    assert "3 of 3: trial" in both
    assert len(list(Path("runs/s/runs").iterdir())) == 3
    assert json.loads(Path("runs/s/best/result.json").read_text())["status"] == "finished"
    code, out, err = coadjoint("tune", "--show", "--study", "s")
    assert (code, err) == (0, "")
    assert "3 of 3 trials: 3 complete" in out
    assert ", pid " in out
    assert "best settings:\n  coadjoint train temporal-order --length 10" in out
    assert coadjoint("tune", "--show", "runs/s")[1] == out
    code, out, _ = coadjoint(*words, "--trials", "5")
    assert code == 0
    assert "at most 3 trials; joining folder runs/s" in out
    assert "for more trials: coadjoint resume runs/s --trials 5" in out
    # Other settings under the same name are refused, and so is a lost record.
    code, _, err = coadjoint(*words, "--batch", "5")
    assert (code, err.count("\n")) == (4, 1)
    assert "runs/s is a study of other settings or data: --batch was 4 and is 5." in err
    Path("runs/s/study.journal").unlink()
    code, _, err = coadjoint("resume", "runs/s")
    assert code == 4
    assert "holds no study 's', but runs/s has runs of one" in err


@pytest.mark.slow
def test_a_pruned_run_is_resumed_by_force_alone(here, coadjoint):
    words = [word for word in TASK if not word.startswith(("--vary", "lr="))]
    assert coadjoint("train", *words, "--out", "run", "--quiet")[0] == 0
    path = here / "run" / "result.json"
    result = json.loads(path.read_text())
    result.update(status="pruned", reason="trial 7 was pruned: others were better at this step")
    path.write_text(json.dumps(result))
    code, _, err = coadjoint("resume", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "run was pruned by `coadjoint tune`" in err
    assert err.endswith("coadjoint resume run --force\n")
    assert read.describe_outcome(result, 4)[:2] == ("calm", "Pruned")
    assert "Pruned" in pages.write(here / "run").read_text()
    code, out, _ = coadjoint("compare", "run", "--out", "c")
    assert (code, "pruned" in out) == (0, True)
    code, _, err = coadjoint("resume", "run", "--force", "--steps", "6", "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(path.read_text())["status"] == "finished"
    assert json.loads(path.read_text())["step"] == 6
    shutil.rmtree(here / "c")


def test_threads_do_not_take_a_process_that_ended_for_a_crash():
    """They look at each other's processes when they start one; its end is told once."""
    codes = []

    class Process:
        def start(self):
            codes.append(workers.LOOKING.locked())

    workers.start_process(Process())
    assert codes == [True]


def test_the_page_draws_all_settings_at_once():
    from coadjoint.training.report.parallel_figure import make_axis, parallel_figure

    trials = []
    for number, rate in enumerate((1e-4, 1e-3, 1e-2)):
        settings = {"lr": rate, "cell": "gru" if number else "lstm"}
        trials.append({"number": number, "value": 1.0 - number, "settings": settings})
    trials[0]["settings"]["weight"] = 0.5
    figure = parallel_figure(trials, ["lr", "cell", "weight"], "valid loss")
    places = [axis["places"] for axis in figure.data["axes"]]
    np.testing.assert_allclose(places[0], [0, 0.5, 1])  # logarithmic
    assert places[1] == [0, 1, 1]
    # The trials that do not set it have a place of their own: their lines pass through it.
    assert places[2] == [0.5, 0, 0]
    assert figure.data["axes"][2]["marks"] == [[0, "not set"], [0.5, "0.5"]]
    assert figure.data["trials"][1]["lines"][2] == ["weight", "not set"]
    assert make_axis("x", [None, None]).marks == [(0.5, "not set")]
    assert make_axis("x", ["gru", None, "lstm"]).places.tolist() == [0.5, 0, 1]
    numbers = make_axis("x", [1.0, None, 2.0, 3.0])
    np.testing.assert_allclose(numbers.places, [0.2, 0, 0.6, 1])
    assert [place for place, _ in numbers.marks] == [0, 0.2, 1]
    assert parallel_figure(trials[:1], ["lr"], "x").empty


def test_the_advice_is_that_of_the_fault():
    failed = study_storage.explain(OSError('password authentication failed for user "me"'))
    assert "Check the user and the password" in failed
    missing = study_storage.explain(OSError("fe_sendauth: no password supplied"))
    assert "Give it in the URL" in missing
