"""A trial of a study: its run, what is read from it while it trains, and its names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..training import files, json_rows
from . import flags as setting_flags
from .flags import SectionValues
from .outcomes import read_result
from .search_space import merge
from .study_record import SearchGoal

if TYPE_CHECKING:
    import optuna


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


def trial_settings(values: SectionValues, goal: SearchGoal) -> SectionValues:
    """The settings of a trial, checked; its run never sees a test set that is kept for the end.

    A task that draws new sequences without end has no such set. Only what was given or searched is
    returned: defaults depend on the data, and the run finds them itself.
    """
    hidden = {} if goal.split == "test" else {"training": {"test_set": False}}
    chosen = merge(values, hidden)
    setting_flags.resolve(None, chosen)
    return chosen


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
    """The seconds that a trial took, by clocks that may have been set back since."""
    return None if trial.duration is None else max(round(trial.duration.total_seconds(), 1), 0.0)
