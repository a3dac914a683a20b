"""A comparison: methods on tasks, and the runs of each, as compare.json has them. The page and the terminal print one table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import StorageError
from .curves import Curve
from .read import as_mapping, as_mappings, read_mapping
from .text import Row, clean, duration, finite_or_nan, finite_values, parse_goal, short_number

BUDGETS = {
    "gradients": "work",
    "seconds": "seconds",
}  # a setting of a run, and what it says of itself
ENDED_STATUSES = ("success", "finished", "early-stopped")


@dataclass(frozen=True)
class Wording:
    """How a table of results is worded: its heads, how numbers are told, and what stands where there is none."""

    name: str
    success: str
    seconds: str
    metric: str
    settings: bool  # a column for each setting in which the rows differ
    count: Callable[[float], str]
    time: Callable[[float], str]
    value: Callable[[float], str]
    to: str
    none: str

    def median_and_range(self, values: Sequence[float], tell: Callable[[float], str]) -> str:
        """Median (least to greatest)."""
        if not values:
            return self.none
        middle = tell(statistics.median(values))
        return (
            f"{middle} ({tell(min(values))}{self.to}{tell(max(values))})"
            if len(set(values)) > 1
            else middle
        )


PAGE = Wording(
    "name", "successes", "time to success", "final {}", True,
    count=short_number, time=duration, value=short_number, to=" to ", none="–",
)  # fmt: skip
TERMINAL = Wording(
    "method", "success", "seconds to success", "{}", False,
    count="{:,.0f}".format, time="{:,.0f}".format, value="{:.4g}".format, to=" - ", none="-",
)  # fmt: skip


def successful_runs(runs: Iterable[Row]) -> list[Row]:
    return [run for run in runs if run.get("success") is True]


@dataclass(frozen=True)
class MethodRows:
    """A row of a comparison: a method on a task, and the budgets of its runs."""

    name: str
    settings: Row
    runs: list[Row]
    budget: Row

    def successes_within(self, budget: str, most: float) -> int:
        """How many of its runs succeeded within a budget."""
        return sum(
            used <= most for used in finite_values(successful_runs(self.runs), BUDGETS[budget])
        )


@dataclass(frozen=True)
class TaskRows:
    """A task of a comparison and its rows. `tail` tells its figures from those of other tasks."""

    name: str
    goal: str
    metric: str
    rows: list[MethodRows]
    id_suffix: str

    @property
    def short_name(self) -> str:
        """ "addition" of "addition, 100 steps"."""
        return self.name.split(",")[0]

    @property
    def runs(self) -> list[tuple[int, Row]]:
        return [(k, run) for k, row in enumerate(self.rows) for run in row.runs]

    def score(self, runs: list[Row]) -> str:
        """ "2 of 3, 1 failed"; of a task that has no goal how many ended."""
        lost = sum(has_failed(run) for run in runs)
        ended = sum(run.get("status") in ENDED_STATUSES for run in runs)
        won = (
            f"{len(successful_runs(runs))} of {len(runs)}"
            if self.goal
            else f"no goal; {ended} of {len(runs)} ended"
        )
        return f"{won}, {lost} failed" if lost else won

    def summary_cell(self, name: str) -> str:
        """Success and median metric of a method, for the overview."""
        runs = [run for row in self.rows if row.name == name for run in row.runs]
        known = finite_values(runs, "metric")
        lost = sum(has_failed(run) for run in runs)
        score = self.score(runs) if self.goal else f"{lost} failed" if lost else ""
        return " · ".join(
            filter(None, (score, short_number(statistics.median(known)) if known else "–"))
        )

    def table(self, words: Wording, metric: str = "") -> tuple[list[str], list[list[str]]]:
        """Heads and rows: success, steps and time to success, the metric; median and range over seeds. Where runs had
        budgets, success is counted within each of them, and gradients stand beside the time."""
        known = (
            dict.fromkeys(key for row in self.rows for key in row.settings)
            if words.settings
            else {}
        )
        settings = [
            key for key in known if len({str(row.settings.get(key)) for row in self.rows}) > 1
        ][:8]
        given = [(key, finite_or_nan(row.budget.get(key))) for key in BUDGETS for row in self.rows]
        budgets = list(dict.fromkeys((key, most) for key, most in given if most == most))
        heads = [
            words.name,
            *settings,
            words.success,
            *(f"in {words.count(most)} {key}" for key, most in budgets),
        ]
        heads += ["steps to success", *(["gradients to success"] if budgets else []), words.seconds]
        heads += [words.metric.format(metric or self.metric or "metric")]
        return heads, [self._cells(row, words, settings, budgets) for row in self.rows]

    def _cells(
        self, row: MethodRows, words: Wording, settings: list[str], budgets: list[tuple[str, float]]
    ) -> list[str]:
        won = successful_runs(row.runs)
        cells = [
            row.name,
            *(clean(row.settings.get(key)) for key in settings),
            self.score(row.runs),
        ]
        for key, most in budgets:
            has_it = self.goal and finite_or_nan(row.budget.get(key)) == most
            cells.append(
                f"{row.successes_within(key, most)} of {len(row.runs)}" if has_it else words.none
            )
        cells.append(words.median_and_range(finite_values(won, "steps"), words.count))
        if budgets:
            used = finite_values(won, "work") if row.budget else []
            cells.append(words.median_and_range(used, words.count))
        cells.append(words.median_and_range(finite_values(won, "seconds"), words.time))
        cells.append(words.median_and_range(finite_values(row.runs, "metric"), words.value))
        return cells


def has_failed(run: Row) -> bool:
    """Whether a run failed, or its process ended without a word."""
    return run.get("status") == "failed" or (
        run.get("status") == "waiting" and bool(run.get("error"))
    )


@dataclass(frozen=True)
class Comparison:
    """What compare.json says (`about`), and its tasks."""

    about: Row
    tasks: list[TaskRows]

    @classmethod
    def of(cls, about: Row, name: str = "") -> Comparison:
        """From the content of compare.json, however damaged; `name` is that of a task that has none."""
        found: dict[str, TaskRows] = {}
        for entry in as_mappings(about.get("rows")) or [{}]:
            told = {
                key: entry.get(key, about.get(key)) for key in ("task", "goal", "metric")
            }  # of the row, or of all
            title = clean(told["task"] or name)
            metric = (
                told["metric"] if isinstance(told["metric"], str) else parse_goal(told["goal"])[0]
            )
            tail = f"-{len(found)}" if found else ""
            task = found.setdefault(
                title, TaskRows(title, str(told["goal"] or ""), metric, [], tail)
            )
            if entry:
                row = (
                    clean(entry.get("name") or "unnamed"),
                    as_mapping(entry.get("settings")),
                    as_mappings(entry.get("runs")),
                )
                task.rows.append(MethodRows(*row, as_mapping(entry.get("budget"))))
        return cls(about, list(found.values()))

    @classmethod
    def read(cls, folder: Path, faults: list[str]) -> Comparison:
        """That of a folder; what cannot be read adds a sentence to `faults`."""
        about = read_mapping(folder / "compare.json", faults)
        if not about:
            why = " ".join(faults)
            raise StorageError(
                f"'{folder / 'compare.json'}' holds no comparison. {why} Run `coadjoint compare` again."
            )
        return cls.of(about, folder.resolve().name)

    def tables(self, words: Wording) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Heads and rows for each task."""
        return {task.name: task.table(words) for task in self.tasks}


def success_share(name: str, runs: list[Row], longest: float) -> Curve:
    """Share of runs that have succeeded by a step: known as far as the row ran, or to the end if all have succeeded."""
    ends = sorted(finite_values(successful_runs(runs), "steps"))
    known = longest if len(ends) == len(runs) else max(finite_values(runs, "steps"), default=0.0)
    share = np.arange(len(ends) + 1) / max(1, len(runs))
    return name, np.array([0.0, *ends, known]), np.array([*share, share[-1]])
