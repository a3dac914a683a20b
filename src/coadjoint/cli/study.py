"""A study: a search for settings, whose trials are runs in processes of their own.

A study is a folder. tune.json says what is searched; study.db is Optuna's own record of the trials,
in SQLite; trials.json is the same for people and pages; runs/trial-N are run folders like any
other; best/ is the run with the best settings, and the only one that sees the test set.

A study can be resumed: a trial whose process was stopped or killed goes on from its checkpoint.
"""

from __future__ import annotations

import json
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
from . import flags as setting_flags
from .flags import SectionValues
from .outcomes import read_result
from .progress import Report
from .schema import Config
from .search_space import Dimension, label_of, merge, parse_space, suggest
from .study_record import FIRST_TRIALS, SearchGoal, import_optuna, open_record, read_plan
from .workers import Worker, wait_for

if TYPE_CHECKING:
    import optuna

LOOK = 0.2  # seconds between two looks at a trial


class StopSearchError(Exception):
    """Ends a trial that was stopped before its end; it goes on when the study is resumed."""


class Study:
    """The search of one process: it starts trials, prunes them and keeps the record."""

    def __init__(self, folder: Path) -> None:
        """Open the study in a folder; the folder must be locked by the caller."""
        self.folder = folder
        self.plan = read_plan(folder)
        self.base: SectionValues = self.plan["base"]
        self.space: list[Dimension] = parse_space(self.plan["space"])
        self.goal = SearchGoal(**self.plan["goal"])
        self.study = open_record(folder, self.goal, self.plan["seed"])
        self.signals: list[int] = []
        self.deadline = math.inf
        self.mutex = threading.Lock()  # held while the record or the counts change
        self.left = 0  # trials still to start
        self.done = 0  # trials that have ended
        self.failures: list[str] = []

    # the search

    def search(self, jobs: int, report: Report) -> None:
        """Run the trials that are left, `jobs` at a time, until all are done or time is up.

        A stop signal makes every run save and end, and raises Interrupted.
        """
        self.requeue()
        total = self.plan["trials"]
        self.done = len(self.ended_trials())
        self.left = max(total - self.done, 0)
        if self.plan["minutes"] is not None:
            self.deadline = time.monotonic() + 60 * self.plan["minutes"]
        self.report = report
        with (
            handling_stop_signals(lambda number, _: self.signals.append(number)),
            ThreadPoolExecutor(jobs) as pool,
        ):
            threads = {pool.submit(self.work) for _ in range(jobs)}
            finish_threads(threads, self.stop)
        self.write_trials()
        if self.signals:
            how = describe_interruption(signal.Signals(self.signals[0]).name)
            raise Interrupted(
                f"{how}; every trial was saved. Resume with: coadjoint resume "
                f"{shlex.quote(str(self.folder))}"
            )
        self.refuse_if_all_failed()

    def stop(self) -> None:
        """Start no more trials, and end those that run."""
        self.left = 0
        self.signals.append(signal.SIGTERM)

    def work(self) -> None:
        """Run one trial after another, in a thread of the search."""
        states = import_optuna().trial.TrialState
        while self.take_one():
            with self.mutex:  # on SQLite two threads could take the same trial from the queue
                trial = self.study.ask()
            try:
                value = self.objective(trial)
            except StopSearchError:
                self.study.tell(trial, state=states.FAIL)
                continue
            if value is None:
                self.study.tell(trial, state=states.PRUNED)
            else:
                self.study.tell(trial, value)
            self.write_trials()

    def take_one(self) -> bool:
        """Whether there is a trial left to start; it is then counted as started."""
        with self.mutex:
            if self.left < 1 or self.signals or time.monotonic() > self.deadline:
                return False
            self.left -= 1
            return True

    def objective(self, trial: optuna.Trial) -> float | None:
        """Train with the settings of a trial; returns the metric of its best weights.

        None if the trial was pruned, or failed.
        """
        name = trial.user_attrs.get("folder") or f"trial-{trial.number}"
        trial.set_user_attr("folder", name)
        left_out = trial.user_attrs.get("left out", [])
        space = [d for d in self.space if label_of(d) not in left_out]
        values = merge(self.base, suggest(space, trial, self.base))
        run = self.folder / "runs" / name
        config = self.folder / "configs" / f"{name}.yaml"
        settings.dump(setting_flags.to_plain_dict(trial_config(values)), config)
        watcher = TrialWatcher(trial, run, self.goal)
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
        if self.signals and not watcher.is_pruned and not self.has_ended(run):
            trial.set_user_attr("stopped", True)
            raise StopSearchError
        value = self.value_of(run)
        if value is not None:
            result = read_result(run) or {}
            trial.set_user_attr("loss", result["metrics"][self.goal.split]["loss"])
            self.tell(trial, f"{self.goal.label} {value:.4g}")
            return value
        if watcher.is_pruned or self.is_late(trial):
            mark_pruned(run, trial.number)
            self.tell(trial, "pruned")
        else:
            reason = " ".join((complaint or "no value").split())
            trial.set_user_attr("error", reason)
            self.failures.append(reason)
            self.tell(trial, f"failed: {reason}")
        return None

    def is_late(self, trial: optuna.Trial) -> bool:
        """Whether time is up and another trial has a value: this one need not go on."""
        if time.monotonic() <= self.deadline:
            return False
        complete = import_optuna().trial.TrialState.COMPLETE
        return any(t.state == complete for t in self.study.get_trials(deepcopy=False))

    def has_ended(self, run: Path) -> bool:
        """Whether a run ended by itself."""
        result = read_result(run)
        return result is not None and result["status"] not in ("interrupted", "pruned")

    def value_of(self, run: Path) -> float | None:
        """The goal's metric of a run that has ended; None if it has none."""
        result = read_result(run)
        if result is None or result["status"] in ("interrupted", "failed", "pruned"):
            return None
        value = result["metrics"].get(self.goal.split, {}).get(self.goal.metric)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if is_number else None

    def tell(self, trial: optuna.Trial, outcome: str) -> None:
        """Report a line about a trial that has ended."""
        chosen = "  ".join(f"{k}={format_parameter(v)}" for k, v in trial.params.items())
        with self.mutex:
            self.done += 1
            self.report(self.done, self.plan["trials"], f"{trial_name(trial)}: {outcome}  {chosen}")

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

    def best(self) -> optuna.trial.FrozenTrial | None:
        """The best trial so far; None if none has a value.

        On a small validation set many trials have the same accuracy: the loss decides between them.
        """
        complete = import_optuna().trial.TrialState.COMPLETE
        trials = self.study.get_trials(deepcopy=False, states=(complete,))
        sign = 1 if self.goal.lower else -1

        def rank(trial: optuna.trial.FrozenTrial) -> tuple[float, float]:
            value = math.inf if trial.value is None else sign * trial.value
            return value, float(trial.user_attrs.get("loss", math.inf))

        return min(trials, key=rank, default=None)

    def requeue(self) -> None:
        """Put trials that were stopped or killed back into the queue, with their folders.

        Nobody else works on this study: its folder is locked. So a trial that seems to run is one
        whose process was killed.
        """
        states = import_optuna().trial.TrialState
        latest: dict[str, optuna.trial.FrozenTrial] = {}  # by run folder
        for trial in self.study.get_trials(deepcopy=False):
            latest[trial.user_attrs.get("folder") or f"trial-{trial.number}"] = trial
        for name, trial in latest.items():
            if trial.state == states.RUNNING:
                self.study.tell(trial.number, state=states.FAIL)
            was_stopped = trial.state == states.FAIL and trial.user_attrs.get("stopped")
            if trial.state == states.RUNNING or was_stopped:
                attributes = {"folder": name, "left out": trial.user_attrs.get("left out", [])}
                self.study.enqueue_trial(trial.params, user_attrs=attributes)

    def best_values(self) -> SectionValues:
        """The settings of the best trial beside the common ones."""
        best = self.best()
        if best is None:
            raise StorageError(f"{self.folder} has no trial with a value yet.")
        fixed = import_optuna().trial.FixedTrial(best.params)
        space = [d for d in self.space if label_of(d) in best.params]
        return merge(self.base, suggest(space, fixed, self.base))

    def importances(self) -> dict[str, float]:
        """The share of each setting in the differences between trials; {} if too few have ended."""
        complete = import_optuna().trial.TrialState.COMPLETE
        if len(self.study.get_trials(deepcopy=False, states=(complete,))) < 2 * FIRST_TRIALS:
            return {}
        try:
            return dict(import_optuna().importance.get_param_importances(self.study))
        except (ImportError, RuntimeError, ValueError):
            return {}

    def write_trials(self) -> None:
        """Write trials.json: every trial with its settings, its value and its run folder."""
        with self.mutex:
            best = self.best()
            rows: list[JsonObject] = []
            for trial in self.ended_trials():
                row = {
                    "number": folder_number(trial),
                    "folder": f"runs/{trial.user_attrs.get('folder')}",
                    "status": "failed" if "error" in trial.user_attrs else trial.state.name.lower(),
                    "value": trial.value if trial.state.name == "COMPLETE" else None,
                    "settings": trial.params,
                    "seconds": duration_of(trial),
                    "error": trial.user_attrs.get("error"),
                }
                rows.append(row)
            content = {
                "best": folder_number(best) if best is not None else None,
                "importances": self.importances(),
                "trials": rows,
            }
            files.replace(self.folder / "trials.json", json_rows.dumps(content, indent=1))


class TrialWatcher:
    """Reads the validations of a trial's run as they are written, and asks whether to prune it."""

    def __init__(self, trial: optuna.Trial, run: Path, goal: SearchGoal) -> None:
        """trial: the one to report to. run: its folder."""
        self.trial = trial
        self.path = run / "metrics.jsonl"
        self.goal = goal
        self.offset = 0
        self.reported: set[int] = set()
        self.is_pruned = False

    def look(self) -> bool:
        """Report new validations; True if the trial is to be pruned."""
        for step, value in self.new_values():
            if step in self.reported:
                continue
            self.reported.add(step)
            self.trial.report(value, step)
            self.is_pruned = self.is_pruned or self.trial.should_prune()
        return self.is_pruned

    def new_values(self) -> Iterator[tuple[int, float]]:
        """The steps and values of the rows that were written since the last look."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self.offset:  # a resumed run cut off its last rows
                self.offset = 0
            file.seek(self.offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            if b'"held-out"' not in line:  # most rows are those of steps
                continue
            row = json.loads(line)
            value = row.get(self.goal.metric)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if row.get("split") == self.goal.split and row["step"] > 0 and is_number:
                yield row["step"], float(value)


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


def trial_config(values: SectionValues) -> Config:
    """The settings of a trial, checked; its run never sees the test set."""
    return setting_flags.resolve(None, merge(values, {"training": {"test_set": False}}))


def trial_words(run: Path, config: Path) -> list[str]:
    """The command line, without "coadjoint", that starts or continues the run of a trial."""
    if (run / "config.yaml").exists():
        return ["resume", str(run), "--fallback", "--quiet"]
    return ["train", "--config", str(config), "--out", str(run), "--quiet"]


def mark_pruned(run: Path, number: int) -> None:
    """Write into result.json that a run was pruned, so that it is not resumed by accident."""
    result = read_result(run)
    if result is None:
        return
    result["status"] = "pruned"
    result["reason"] = f"trial {number} was pruned: others were better at this step"
    files.replace(run / "result.json", json_rows.dumps(result, indent=1))


def trial_name(trial: optuna.Trial) -> str:
    """The name of a trial's run folder, in words: "trial 3"."""
    return str(trial.user_attrs.get("folder", f"trial-{trial.number}")).replace("-", " ")


def folder_number(trial: optuna.trial.FrozenTrial) -> int:
    """The number of a trial's run folder; a trial that was resumed has a later number itself."""
    name = str(trial.user_attrs.get("folder", trial.number))
    return int(name.rpartition("-")[2])


def format_parameter(value: object) -> str:
    """A parameter of a trial as text; numbers with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def duration_of(trial: optuna.trial.FrozenTrial) -> float | None:
    """The seconds that a trial took."""
    return None if trial.duration is None else round(trial.duration.total_seconds(), 1)
