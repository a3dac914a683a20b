"""A comparison: methods on tasks, and the runs of each, as compare.json has them.

The page, the terminal and Markdown show the same table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import StorageError
from ..metric_names import is_lower_better, metric_label
from .curves import Curve
from .read import as_mapping, as_mappings, read_mapping
from .text import (
    NO_VALUE,
    Row,
    clean,
    duration,
    finite_or_nan,
    finite_values,
    parse_goal,
    short_number,
    shown_metric,
)

# a budget among the settings of a run, and the key under which a run says how much it used
BUDGETS = {"gradients": "work", "seconds": "seconds"}
ENDED_STATUSES = ("success", "finished", "early-stopped")
MAX_SETTINGS = 8  # columns of settings in one table

TableText = tuple[list[str], list[list[str]]]  # heads, rows


@dataclass(frozen=True)
class Wording:
    """How a table of results is worded: its heads, its numbers, and the text for a missing one."""

    name: str
    success: str
    seconds: str
    total: str
    metric: str
    settings: bool  # a column for each setting in which the rows differ
    count: Callable[[float], str]
    time: Callable[[float], str]
    value: Callable[[float], str]
    label: Callable[[str], str]  # of a metric
    to: str
    none: str

    def median_and_range(self, values: Sequence[float], tell: Callable[[float], str]) -> str:
        """The median and, if values differ, their range: "3 (1 to 5)"; tell: a number as text."""
        if not values:
            return self.none
        median = tell(statistics.median(values))
        if len(set(values)) == 1:
            return median
        return f"{median} ({tell(min(values))}{self.to}{tell(max(values))})"


PAGE = Wording(
    "name", "successes", "time to success", "time", "final {}", True,
    count=short_number, time=duration, value=short_number, label=shown_metric, to=" to ",
    none=NO_VALUE,
)  # fmt: skip
TERMINAL = Wording(
    "method", "success", "seconds to success", "seconds", "{}", False,
    count="{:,.0f}".format, time="{:,.0f}".format, value="{:.4g}".format,
    label=metric_label, to=" - ", none="-",
)  # fmt: skip


def flatten_sections(value: object) -> Row:
    """Settings by section as settings by the names of their flags; {} if there are none."""
    flat: Row = {}
    for section, keys in as_mapping(value).items():
        for key, setting in as_mapping(keys).items():
            flat[section if key == "name" else key] = setting
    return flat


def successful_runs(runs: Iterable[Row]) -> list[Row]:
    """The runs that reached their goal."""
    return [run for run in runs if run.get("success") is True]


def has_failed(run: Row) -> bool:
    """Whether a run failed, or its process ended without a result.

    A run without a result has status "waiting"; only a process that has ended leaves an error.
    """
    if run.get("status") == "failed":
        return True
    return run.get("status") == "waiting" and bool(run.get("error"))


@dataclass(frozen=True)
class MethodRows:
    """A row of a comparison: a method on a task, and the budgets of its runs.

    settings: those that were given to the row. others: all in which its runs differ from those of
    other rows, defaults too; shared: those that all runs of the comparison have. The last two are
    empty in comparisons of version 0.12 and before.
    """

    name: str
    settings: Row
    runs: list[Row]
    budget: Row
    others: Row
    shared: Row

    def setting(self, key: str) -> object:
        """A setting of its runs: as it was given, or else the default; None if it is not known."""
        for known in (self.settings, self.others, self.shared):
            if key in known:
                return known[key]
        return None

    def successes_within(self, budget: str, most: float) -> int:
        """The number of runs that succeeded with at most `most` of a budget: a key of BUDGETS."""
        used = finite_values(successful_runs(self.runs), BUDGETS[budget])
        return sum(amount <= most for amount in used)


@dataclass(frozen=True)
class TaskRows:
    """A task of a comparison and its rows; `id_suffix` makes the ids of its figures unique."""

    name: str
    goal: str
    metric: str
    rows: list[MethodRows]
    id_suffix: str

    @property
    def short_name(self) -> str:
        """The task without its settings: "addition" of "addition, 100 steps"."""
        return self.name.split(",")[0]

    @property
    def names(self) -> list[str]:
        """The methods, row by row."""
        return [row.name for row in self.rows]

    @property
    def runs(self) -> list[Row]:
        """Every run, row by row."""
        return [run for row in self.rows for run in row.runs]

    @property
    def numbered_runs(self) -> list[tuple[int, Row]]:
        """Every run, with the number of its row."""
        return [(k, run) for k, row in enumerate(self.rows) for run in row.runs]

    @property
    def split(self) -> str:
        """The set that the metric of every run was measured on; "" if they differ or say nothing.

        Comparisons of version 0.8 and before do not say it.
        """
        # As text: the file may be a stranger's and hold anything.
        splits = {str(run.get("split")) for run in self.runs if run.get("metric") is not None}
        only = splits.pop() if len(splits) == 1 else None
        return only if only in ("valid", "test") else ""

    @property
    def is_ranked(self) -> bool:
        """Whether the rows of the table are ordered by the metric: there is one on "valid"."""
        return self.split == "valid" and len(self.rows) > 1

    def measure(self, label: Callable[[str], str], metric: str = "") -> str:
        """The metric with the set it was measured on: "valid accuracy".

        label: a metric in words. metric: its name, by default that of the task.
        """
        name = label(metric or self.metric or "metric")
        if self.split:
            return f"{self.split} {name}"
        splits = {str(run.get("split")) for run in self.runs}
        return f"{name} (valid, or else test)" if {"valid", "test"} <= splits else name

    def ranking_note(self, label: Callable[[str], str]) -> str:
        """A sentence on the order of the rows; "" if they are not ranked."""
        if not self.is_ranked:
            return ""
        return f"Ranked by {self.measure(label)}, best first; the test set is not used for it."

    def _ranked_rows(self) -> list[MethodRows]:
        """The rows, if they are ranked by the median of the metric, those without one last."""
        if not self.is_ranked:
            return self.rows
        is_lower = "<=" in self.goal or is_lower_better(self.metric)

        def place(row: MethodRows) -> float:
            values = finite_values(row.runs, "metric")
            if not values:
                return math.inf
            median = statistics.median(values)
            return median if is_lower else -median

        return sorted(self.rows, key=place)

    def score(self, runs: list[Row]) -> str:
        """The number of successes: "2 of 3, 1 failed"; without a goal, that of runs.

        Without a goal, "2 of 3 ended, 1 failed" if some did not end. Runs that a search pruned are
        neither: "1 of 3, 1 pruned".
        """
        failures = sum(map(has_failed, runs))
        if self.goal:
            text = f"{len(successful_runs(runs))} of {len(runs)}"
        else:
            ended = sum(run.get("status") in ENDED_STATUSES for run in runs)
            text = str(ended) if ended == len(runs) else f"{ended} of {len(runs)} ended"
        if failures:
            text += f", {failures} failed"
        pruned = sum(run.get("status") == "pruned" for run in runs)
        return f"{text}, {pruned} pruned" if pruned else text

    def median_metric(self, runs: list[Row]) -> str:
        """The median of the metric over runs, and how many failed, if any: "0.98, 1 failed"."""
        metrics = finite_values(runs, "metric")
        text = short_number(statistics.median(metrics)) if metrics else NO_VALUE
        failures = sum(map(has_failed, runs))
        return f"{text}, {failures} failed" if failures else text

    def summary_cell(self, name: str) -> str:
        """Success and median metric of the method `name`: "2 of 3, 1 failed · 0.98"."""
        runs = [run for row in self.rows if row.name == name for run in row.runs]
        failures = sum(map(has_failed, runs))
        parts = []
        if self.goal:
            parts.append(self.score(runs))
        elif failures:
            parts.append(f"{failures} failed")
        metrics = finite_values(runs, "metric")
        parts.append(short_number(statistics.median(metrics)) if metrics else NO_VALUE)
        return " · ".join(parts)

    def table(self, words: Wording, metric: str = "") -> TableText:
        """Heads and rows: success, steps and time to success, and the metric.

        Without a goal, the number of runs and their time in place of success. Each cell has the
        median and the range over seeds. If runs had budgets, success is also counted within each
        budget, and the gradients to success have a column. Where the metric is that of a validation
        set, rows are ranked by it, and the test set has a column of its own. metric: the name of
        the metric, by default that of the task.
        """
        settings = self._differing_settings() if words.settings else []
        budgets = self._budgets()
        heads = [words.name, *settings]
        heads += self._success_heads(words, budgets) if self.goal else ["runs", words.total]
        heads.append(words.metric.format(self.measure(words.label, metric)))
        rows = self._ranked_rows()
        cells = [self._cells(row, words, settings, budgets) for row in rows]
        if finite_values(self.runs, "test"):
            name = words.label(metric or self.metric or "metric")
            heads.append(words.metric.format(f"test {name} (not used for ranking)"))
            for row, texts in zip(rows, cells, strict=True):
                tested = finite_values(row.runs, "test")
                texts.append(words.median_and_range(tested, words.value))
        return heads, cells

    @staticmethod
    def _success_heads(words: Wording, budgets: list[tuple[str, float]]) -> list[str]:
        """The heads of the columns about success; budgets: (key, amount)."""
        heads = [words.success]
        heads += [f"in {words.count(most)} {key}" for key, most in budgets]
        heads.append("steps to success")
        if budgets:
            heads.append("gradients to success")
        return [*heads, words.seconds]

    def _differing_settings(self) -> list[str]:
        """The settings that were given and differ, in the order of their first appearance."""
        known: dict[str, set[str]] = {}
        for row in self.rows:
            for key in row.settings:
                known.setdefault(key, set())
        for key, values in known.items():
            values.update(str(row.setting(key)) for row in self.rows)
        return [key for key, values in known.items() if len(values) > 1][:MAX_SETTINGS]

    def _budgets(self) -> list[tuple[str, float]]:
        """The different budgets of the rows: (setting, amount)."""
        budgets = []
        for key in BUDGETS:
            for row in self.rows:
                most = finite_or_nan(row.budget.get(key))
                if not math.isnan(most) and (key, most) not in budgets:
                    budgets.append((key, most))
        return budgets

    def _cells(
        self, row: MethodRows, words: Wording, settings: list[str], budgets: list[tuple[str, float]]
    ) -> list[str]:
        """The cells of one row; settings: the keys that have a column, budgets: (key, amount)."""
        cells = [row.name]
        cells += [clean(row.setting(key)) for key in settings]
        cells.append(self.score(row.runs))
        if self.goal:
            cells += self._success_cells(row, words, budgets)
        else:
            cells.append(words.median_and_range(finite_values(row.runs, "seconds"), words.time))
        cells.append(words.median_and_range(finite_values(row.runs, "metric"), words.value))
        return cells

    @staticmethod
    def _success_cells(
        row: MethodRows, words: Wording, budgets: list[tuple[str, float]]
    ) -> list[str]:
        """Success within each budget, then steps, gradients and time to success."""
        successes = successful_runs(row.runs)
        cells = []
        for key, most in budgets:
            # rows may have different budgets; a column is about one of them
            if finite_or_nan(row.budget.get(key)) == most:
                cells.append(f"{row.successes_within(key, most)} of {len(row.runs)}")
            else:
                cells.append(words.none)
        cells.append(words.median_and_range(finite_values(successes, "steps"), words.count))
        if budgets:
            work = finite_values(successes, "work") if row.budget else []
            cells.append(words.median_and_range(work, words.count))
        cells.append(words.median_and_range(finite_values(successes, "seconds"), words.time))
        return cells


@dataclass(frozen=True)
class Comparison:
    """The content of compare.json (`about`), and its tasks."""

    about: Row
    tasks: list[TaskRows]

    @classmethod
    def of(cls, about: Row, name: str = "") -> Comparison:
        """From the content of compare.json, however damaged; `name` is for tasks without one."""
        tasks: dict[str, TaskRows] = {}
        shared = flatten_sections(about.get("shared"))
        # without any row there is still one task, for the page to show
        for entry in as_mappings(about.get("rows")) or [{}]:
            # each row says these, or else the comparison says them for all rows
            title = clean(entry.get("task", about.get("task")) or name)
            goal = entry.get("goal", about.get("goal"))
            metric = entry.get("metric", about.get("metric"))
            if title not in tasks:
                if not isinstance(metric, str):
                    metric = parse_goal(goal)[0]
                id_suffix = f"-{len(tasks)}" if tasks else ""
                tasks[title] = TaskRows(title, str(goal or ""), metric, [], id_suffix)
            if entry:
                method = MethodRows(
                    clean(entry.get("name") or "unnamed"),
                    as_mapping(entry.get("settings")),
                    as_mappings(entry.get("runs")),
                    as_mapping(entry.get("budget")),
                    flatten_sections(entry.get("others")),
                    shared,
                )
                tasks[title].rows.append(method)
        return cls(about, list(tasks.values()))

    @classmethod
    def read(cls, folder: Path, faults: list[str]) -> Comparison:
        """The comparison of a folder; each unreadable file adds a sentence to `faults`."""
        path = folder / "compare.json"
        about = read_mapping(path, faults)
        if not about:
            why = " ".join(faults)
            raise StorageError(
                f"'{path}' holds no comparison. {why} Run `coadjoint compare` again."
            )
        return cls.of(about, folder.resolve().name)

    def tables(self, words: Wording) -> dict[str, TableText]:
        """{task: heads and rows of its table}."""
        return {task.name: task.table(words) for task in self.tasks}


def success_share(name: str, runs: list[Row], longest: float) -> Curve:
    """The share of runs that have succeeded by each step, for a curve in stairs.

    It rises at each success. It is known as far as the runs went, or up to `longest`, the most
    steps of any run of the task, if all have succeeded.
    """
    successes = sorted(finite_values(successful_runs(runs), "steps"))
    if len(successes) == len(runs):
        end = longest
    else:
        end = max(finite_values(runs, "steps"), default=0.0)
    share = np.arange(len(successes) + 1) / max(1, len(runs))
    return Curve(name, np.array([0.0, *successes, end]), np.array([*share, share[-1]]))
