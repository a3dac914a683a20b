"""A study: a search for settings, whose trials are runs in processes of their own.

A study is a folder. tune.json says what is searched; study.db is Optuna's own record of the trials,
in SQLite (or it is a journal, or on a server: see study_storage); trials.json is the same for
people and pages; runs/trial-N are run folders like any other; best/ is the run with the best
settings, and the only one that sees the test set.

Any number of processes may search at the same time: see study_queue. A study can be resumed: a
trial whose process was stopped or killed goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_threads
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, StorageError
from ..training import files, json_rows, settings
from ..training.json_types import JsonObject
from ..training.signals import Interrupted, describe_interruption, handling_stop_signals
from .flags import SectionValues
from .outcomes import read_result
from .progress import Report
from .search_space import Dimension, label_of, merge, parse_space, suggest
from .study_queue import MOST_DEATHS, TrialQueue, Turn, WorkerMark, folder_of, wait_for_folder
from .study_record import SearchGoal, open_record, place_of, read_plan
from .study_storage import StoragePlace, import_optuna
from .study_trials import (
    TrialWatcher,
    duration_of,
    folder_number,
    format_parameter,
    mark_pruned,
    trial_name,
    trial_settings,
    trial_words,
)
from .workers import Worker, wait_for

if TYPE_CHECKING:
    import optuna

TRIALS_OF_IMPORTANCE = 10  # complete ones, before the importance of settings is told
LOOK = 0.2  # seconds between two looks at a trial
IDLE = 1.0  # seconds between two looks at the trials of other workers
IN_USE = "is in use by"  # of the message about a folder that another process writes to


class StopSearchError(Exception):
    """Ends a trial that was stopped before its end; it goes on when the study is resumed."""


class Study:
    """The search of one worker: it starts trials, prunes them and keeps the record."""

    def __init__(self, folder: Path, place: StoragePlace | None = None) -> None:
        """Open the study in a folder. place: of its record; by default the folder's own."""
        self.folder = folder
        self.plan = read_plan(folder)
        self.base: SectionValues = self.plan["base"]
        self.space: list[Dimension] = parse_space(self.plan["space"])
        self.goal = SearchGoal(**self.plan["goal"])
        self.place = place or place_of(folder, None)
        self.turn = Turn(folder)
        self.mark = WorkerMark(folder)
        has_company = bool(self.mark.others())
        self.study = open_record(folder, self.place, self.mark.token if has_company else None)
        self.queue = TrialQueue(folder, self.study, self.place, self.mark, self.turn)
        self.signals: list[int] = []
        self.is_over = False  # no more trials are to begin here
        self.deadline = math.inf
        self.mutex = threading.Lock()  # held while counts change
        self.own = 0  # trials that have ended here
        self.failures: list[str] = []

    # the search

    def search(self, jobs: int, report: Report) -> None:
        """Run the trials that are left, `jobs` at a time, until all are done or time is up.

        A stop signal makes every run save and end, and raises Interrupted.
        """
        if self.plan["minutes"] is not None:
            self.deadline = time.monotonic() + 60 * self.plan["minutes"]
        self.report = report
        with (
            self.place.errors(),
            silent_heartbeats(),
            handling_stop_signals(lambda number, _: self.signals.append(number)),
            ThreadPoolExecutor(jobs) as pool,
        ):
            threads = {pool.submit(self.work) for _ in range(jobs)}
            finish_threads(threads, self.stop)
        self.write_trials(with_importances=True)
        if self.signals:
            how = describe_interruption(signal.Signals(self.signals[0]).name)
            raise Interrupted(
                f"{how}; every trial was saved. Resume with: coadjoint resume "
                f"{shlex.quote(str(self.folder))}{self.storage_hint()}"
            )
        self.refuse_if_all_failed()

    def storage_hint(self) -> str:
        """The words that `coadjoint resume` needs to find the record, unless it finds it alone."""
        named = self.plan["storage"]
        return "" if named in (None, "journal:") else f" --storage {shlex.quote(named)}"

    def stop(self) -> None:
        """Start no more trials, and end those that run."""
        self.signals.append(signal.SIGTERM)

    def has_to_stop(self) -> bool:
        """Whether no trial is to begin any more."""
        return self.is_over or bool(self.signals) or time.monotonic() > self.deadline

    def work(self) -> None:
        """Run one trial after another, in a thread of the search."""
        while self.take_one():
            try:
                self.run_one()
            finally:
                self.turn.give()
            self.write_trials()

    def take_one(self) -> bool:
        """Wait until there is a trial to begin: then this thread has the turn. False at the end."""
        while self.turn.take(self.has_to_stop):
            answer = "done"
            try:
                answer = self.queue.look()
            finally:
                if answer != "begin":
                    self.turn.give()
            if answer == "begin":
                return True
            if answer == "done":
                return False
            self.pause()
        return False

    def pause(self) -> None:
        """Wait a moment for other workers; they may die, and leave their trials to us."""
        until = time.monotonic() + IDLE
        while time.monotonic() < until and not self.has_to_stop():
            time.sleep(LOOK)

    def run_one(self) -> None:
        """Run a trial. Optuna asks for its settings, sends heartbeats and records its end."""
        optuna = import_optuna()
        try:
            self.study.optimize(self.objective, n_trials=1, catch=(StopSearchError,))
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError) as error:
            # This worker was too slow to send heartbeats, and another one has taken the trial over.
            if isinstance(error, ValueError) and "Cannot tell a FAIL trial" not in str(error):
                raise

    def objective(self, trial: optuna.Trial) -> float:
        """Train with the settings of a trial; returns the metric of its best weights.

        Raises TrialPruned if the trial was pruned, or failed.
        """
        name = folder_of(trial)
        trial.set_user_attr("folder", name)
        trial.set_user_attr("where", self.mark.where)
        trial.set_user_attr("worker", self.mark.name)
        self.turn.give()
        left_out = trial.user_attrs.get("left out", [])
        space = [d for d in self.space if label_of(d) not in left_out]
        values = merge(self.base, suggest(space, trial, self.base))
        run = self.folder / "runs" / name
        config = self.folder / "configs" / f"{name}.yaml"
        watcher = TrialWatcher(trial, run, self.goal)
        wait_for_folder(run, lambda: bool(self.signals))
        complaint = None
        if not self.has_ended(run):
            settings.dump(trial_settings(values, self.goal), config)
            complaint = self.train(trial, watcher, run, config)
        if self.signals and not watcher.is_pruned and not self.has_ended(run):
            trial.set_user_attr("stopped", True)
            raise StopSearchError
        value = self.value_of(run)
        if value is not None:
            result = read_result(run) or {}
            trial.set_user_attr("loss", result["metrics"][self.goal.split]["loss"])
            self.tell(trial, f"{self.goal.label} {value:.4g}")
            return value
        if watcher.is_pruned or self.is_late(trial) or self.status_of(run) == "pruned":
            mark_pruned(run, trial.number)
            self.tell(trial, "pruned")
        else:
            reason = " ".join((complaint or "no value").split())
            trial.set_user_attr("error", reason)
            self.failures.append(reason)
            self.tell(trial, f"failed: {reason}")
        raise import_optuna().TrialPruned

    def train(
        self, trial: optuna.Trial, watcher: TrialWatcher, run: Path, config: Path
    ) -> str | None:
        """Run the process of a trial to its end; returns what it complained about, if it failed.

        A process that was killed, perhaps because memory was short, is started again and goes on
        from its checkpoint. The run of a worker that died may hold the folder for a moment: then it
        is tried again, too.
        """
        deaths = 0
        while True:
            worker = Worker(trial_words(run, config))
            try:
                while not worker.has_ended:
                    wait_for([worker], LOOK)
                    if watcher.look() or self.is_late(trial) or self.signals:
                        worker.stop()
                watcher.look()
                complaint = worker.complaint
            finally:
                worker.close()
            deaths += worker.was_killed
            is_in_use = complaint is not None and IN_USE in complaint
            is_to_restart = is_in_use or (worker.was_killed and deaths < MOST_DEATHS)
            if not is_to_restart or self.signals:
                return complaint
            wait_for_folder(run, lambda: bool(self.signals))

    def is_late(self, trial: optuna.Trial) -> bool:
        """Whether time is up and another trial has a value: this one need not go on."""
        if time.monotonic() <= self.deadline:
            return False
        complete = import_optuna().trial.TrialState.COMPLETE
        return any(t.state == complete for t in self.study.get_trials(deepcopy=False))

    def status_of(self, run: Path) -> str | None:
        """The status in a run's result.json; None if there is none."""
        result = read_result(run)
        return None if result is None else str(result["status"])

    def has_ended(self, run: Path) -> bool:
        """Whether a run has ended and is not to be resumed."""
        return self.status_of(run) not in (None, "interrupted")

    def value_of(self, run: Path) -> float | None:
        """The goal's metric of a run that has ended; None if it has none."""
        result = read_result(run)
        if result is None or result["status"] in ("interrupted", "failed", "pruned"):
            return None
        value = result["metrics"].get(self.goal.split, {}).get(self.goal.metric)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if is_number else None

    def tell(self, trial: optuna.Trial, outcome: str) -> None:
        """Report a line about a trial that has ended; trials of other workers are counted, too."""
        chosen = "  ".join(f"{k}={format_parameter(v)}" for k, v in trial.params.items())
        chosen = chosen or "default settings"  # of the first trial, where they are not searched
        with self.mutex:
            self.own += 1
            others = [t for t in self.ended_trials() if not self.is_mine(t)]
            done = self.own + len(others)
            total = read_plan(self.folder)["trials"]
            self.report(done, total, f"{trial_name(trial)}: {outcome}  {chosen}")

    def is_mine(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether this worker ran a trial."""
        return trial.user_attrs.get("worker") == self.mark.name

    def refuse_if_all_failed(self) -> None:
        """Refuse a search in which no trial has a value, with the reason of the first failure."""
        if self.failures and self.best() is None:
            raise ConfigError(f"no trial of {self.folder} has a value: {self.failures[0]}")

    # the record

    def ended_trials(self) -> list[optuna.trial.FrozenTrial]:
        """The trials that have a value or were pruned."""
        states = import_optuna().trial.TrialState
        ended = (states.COMPLETE, states.PRUNED)
        return self.study.get_trials(deepcopy=False, states=ended)

    def lost_trials(self) -> list[optuna.trial.FrozenTrial]:
        """The trials under which too many workers died."""
        failed = [trial for trial in self.queue.latest() if trial.state.name == "FAIL"]
        return [trial for trial in failed if self.queue.is_lost(trial)]

    def running_elsewhere(self) -> list[optuna.trial.FrozenTrial]:
        """The trials that other workers run."""
        running = import_optuna().trial.TrialState.RUNNING
        trials = self.study.get_trials(deepcopy=False, states=(running,))
        return [trial for trial in trials if not self.is_mine(trial)]

    def best(self) -> optuna.trial.FrozenTrial | None:
        """The best trial so far; None if none has a value."""
        return best_trial(self.study, self.goal)

    def best_values(self) -> SectionValues:
        """The settings of the best trial beside the common ones."""
        best = self.best()
        if best is None:
            raise StorageError(f"{self.folder} has no trial with a value yet.")
        return values_of(best, self.space, self.base)

    def write_trials(self, with_importances: bool = False) -> None:
        """Write trials.json: every trial with its settings, its value and its run folder.

        with_importances: at the end, since they take a while.
        """
        best = self.best()
        rows = [trial_row(trial) for trial in self.ended_trials()]
        rows += [trial_row(trial, lost=True) for trial in self.lost_trials()]
        content = {
            "best": folder_number(best) if best is not None else None,
            "importances": importances(self.study) if with_importances else {},
            "trials": rows,
        }
        with self.turn.taken():
            files.replace(self.folder / "trials.json", json_rows.dumps(content, indent=1))

    def close(self) -> None:
        """Say that this worker has ended."""
        self.mark.remove()


def best_trial(study: optuna.Study, goal: SearchGoal) -> optuna.trial.FrozenTrial | None:
    """The best trial of a study; None if none has a value.

    On a small validation set many trials have the same accuracy: the loss decides between them.
    """
    complete = import_optuna().trial.TrialState.COMPLETE
    trials = study.get_trials(deepcopy=False, states=(complete,))
    sign = 1 if goal.lower else -1

    def rank(trial: optuna.trial.FrozenTrial) -> tuple[float, float]:
        value = math.inf if trial.value is None else sign * trial.value
        return value, float(trial.user_attrs.get("loss", math.inf))

    return min(trials, key=rank, default=None)


def values_of(
    trial: optuna.trial.FrozenTrial, space: list[Dimension], base: SectionValues
) -> SectionValues:
    """The settings of a trial beside the common ones."""
    fixed = import_optuna().trial.FixedTrial(trial.params)
    chosen = [d for d in space if label_of(d) in trial.params]
    return merge(base, suggest(chosen, fixed, base))


def importances(study: optuna.Study) -> dict[str, float]:
    """The share of each setting in which trials are the best; {} if too few have ended."""
    complete = import_optuna().trial.TrialState.COMPLETE
    if len(study.get_trials(deepcopy=False, states=(complete,))) < TRIALS_OF_IMPORTANCE:
        return {}
    try:
        return dict(import_optuna().importance.get_param_importances(study))
    except (ImportError, RuntimeError, ValueError):
        return {}


def trial_row(trial: optuna.trial.FrozenTrial, lost: bool = False) -> JsonObject:
    """A trial as trials.json has it. lost: too many workers died under it."""
    status = {"FAIL": "stopped"}.get(trial.state.name, trial.state.name.lower())
    error = trial.user_attrs.get("error")
    if lost:
        error = "its process was killed again and again"
    return {
        "number": folder_number(trial),
        "folder": f"runs/{folder_of(trial)}",
        "status": "failed" if error is not None else status,
        "value": trial.value if trial.state.name == "COMPLETE" else None,
        "settings": trial.params,
        "seconds": duration_of(trial),
        "error": error,
        "where": trial.user_attrs.get("where"),
    }


@contextlib.contextmanager
def silent_heartbeats() -> Iterator[None]:
    """Inside, a heartbeat that cannot be sent prints nothing.

    It is sent in a thread of Optuna's. The next report of the same trial says what is wrong.
    """

    def say_nothing(_: threading.ExceptHookArgs) -> None:
        pass

    before = threading.excepthook
    threading.excepthook = say_nothing
    try:
        yield
    finally:
        threading.excepthook = before


def finish_threads(threads: set[Future[None]], stop: Callable[[], None]) -> None:
    """Wait for threads; if one fails, let the others end first, then raise its error.

    stop: called once in that case. The waits are short, so that signals are noticed.
    """
    error: BaseException | None = None
    pending = threads
    while pending:
        done, pending = wait_for_threads(pending, timeout=LOOK)
        for thread in done:
            fault = thread.exception()
            if fault is not None and error is None:
                error = fault
                stop()
    if error is not None:
        raise error
