"""The page of a search for settings: its trials, what each setting did, and the best run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np

from .. import schemas, study_schema
from ..json_types import JsonObject
from .curves import Curve, json_numbers
from .figures import Dot, LineChart, PageFigure, ValueAxis, dot_figure
from .page_parts import Cell, Page, PageSection, Table, flatten_settings, make_table
from .parallel_figure import NOT_SET, parallel_figure
from .read import as_mapping, folder_within, held_out_curve
from .text import clean, duration, finite_or_nan, short_number, shown_metric

MOST_CURVES = 12  # of trials, in one figure: more cannot be told apart by colour
BINS = 4  # of a setting that is a number
LEAD = "Trials are ranked on the {split} set."
SCORED_ONCE = " Only the best settings are scored on the test set."


def study_page(folder: Path) -> Page:
    """The page of the folder of a search."""
    plan = schemas.read(folder / "tune.json", study_schema.PlanSchema)
    trials = Trials(folder, plan)
    best = trials.best
    outcome = ("calm", "none", "no trial has a value yet")
    cards = {}
    if best is not None:
        outcome = ("good", short_number(best["value"]), f"best {trials.label}")
        cards = {clean(name): shown(value) for name, value in best["settings"].items()}
    status = Counter(trial["status"] for trial in trials.rows)
    facts = {
        "trials": f"{len(trials.rows)} of {plan['trials']}",
        "pruned": str(status["pruned"]),
        "failed": str(status["failed"]),
        **trials.test_facts(),
    }
    return Page(
        kind="search",
        name=clean(folder.resolve().name),
        title=f"Search for settings: {clean(trials.subject)}",
        outcome=outcome,
        facts=facts,
        notices=[],
        cards=cards,
        sections=[
            PageSection(
                "progress",
                "Progress",
                lead_of(plan["goal"]["split"]),
                figures=[trials.best_so_far(), trials.curves()],
            ),
            PageSection(
                "settings",
                "What each setting did",
                figures=[*trials.overall(), *trials.slices()],
            ),
            PageSection("trials", "Trials", tables=trials.tables()),
            PageSection("setup", "Setup", tables=setup_tables(plan), pairs=True),
            PageSection(
                "again",
                "Run it again",
                commands={"The command that began this search": clean(plan["command"] or "")},
            ),
        ],
    )


def lead_of(split: str) -> str:
    """How trials are ranked; a built-in task has no other set than the one they are tested on."""
    return LEAD.format(split=split) + ("" if split == "test" else SCORED_ONCE)


class Trials:
    """The trials of a search that have ended, and figures of them."""

    def __init__(self, folder: Path, plan: JsonObject) -> None:
        """Read trials.json; a search that has just begun has none."""
        self.folder = folder
        self.goal = plan["goal"]
        self.metric = str(self.goal["metric"])
        self.label = f"{clean(self.goal['split'])} {shown_metric(self.metric)}"
        base = plan["base"]
        task = as_mapping(base.get("task")).get("name")
        self.subject = str(task or as_mapping(base.get("data")).get("train") or "")
        self.rows: list[JsonObject] = []
        self.importances: JsonObject = {}
        number = None
        if (folder / "trials.json").is_file():
            found = schemas.read(folder / "trials.json", study_schema.TrialsSchema)
            self.rows = sorted(found["trials"], key=lambda trial: trial["number"])
            self.importances = found["importances"]
            number = found["best"]
        self.best = next((trial for trial in self.rows if trial["number"] == number), None)

    @property
    def complete(self) -> list[JsonObject]:
        """The trials that have a value, the best first."""
        rows = [trial for trial in self.rows if not math.isnan(finite_or_nan(trial["value"]))]
        return sorted(rows, key=lambda trial: trial["value"], reverse=not self.goal["lower"])

    def test_facts(self) -> dict[str, str]:
        """The metric of the best settings on the test set, once they were trained again."""
        path = self.folder / "best" / "result.json"
        if not path.is_file():
            return {}
        metrics = schemas.read(path, schemas.ResultSchema)["metrics"]
        value = as_mapping(metrics.get("test")).get(self.metric)
        if value is None:
            return {}
        return {f"test {shown_metric(self.metric)} of the best settings": short_number(value)}

    def best_so_far(self) -> PageFigure:
        """The value of every trial, and the best one up to each."""
        ordered = sorted(self.complete, key=lambda trial: trial["number"])
        numbers = np.array([trial["number"] for trial in ordered], dtype=float)
        values = np.array([trial["value"] for trial in ordered], dtype=float)
        fold = np.minimum if self.goal["lower"] else np.maximum
        curves = []
        if len(values):
            curves = [
                Curve("each trial", numbers, values),
                Curve("best so far", numbers, fold.accumulate(values)),
            ]
        chart = LineChart(
            "best",
            f"{self.label} by trial",
            "trials that were pruned have no value",
            ValueAxis(self.label, "auto"),
            curves,
            empty="No trial has a value yet.",
            extras={"x": "trial"},
        )
        return chart.figure()

    def curves(self) -> PageFigure:
        """The held-out metric of the best trials over their steps."""
        curves = []
        faults: list[str] = []
        for trial in self.complete[:MOST_CURVES]:
            path = folder_within(self.folder, trial)
            if path is not None:
                _, curve = held_out_curve(path, self.metric, faults)
                curves.append(curve._replace(name=f"trial {trial['number']}"))
        chart = LineChart(
            "curves",
            f"{self.label} during training",
            f"the best {len(curves)} trials",
            ValueAxis(self.label, "auto"),
            curves,
            empty="The run folders hold no held-out values.",
        )
        return chart.figure()

    @property
    def names(self) -> list[str]:
        """The settings that were searched, the most important first."""
        names = dict.fromkeys(name for trial in self.complete for name in trial["settings"])
        return sorted(names, key=lambda name: -finite_or_zero(self.importances.get(name)))

    def overall(self) -> list[PageFigure]:
        """How much each setting mattered, and all settings of all trials at once."""
        parallel = parallel_figure(self.complete, self.names, self.label)
        if not self.importances:
            return [parallel]
        names = [name for name in self.names if name in self.importances]
        shares = [finite_or_zero(self.importances[name]) for name in names]
        importance = PageFigure(
            "ranks",
            "importance",
            "Importance",
            "share of each setting in whether a trial is among the best (Optuna's PED-ANOVA)",
            data={
                "names": [clean(name) for name in names],
                "values": json_numbers(shares),
                "x": "share",
            },
        )
        return [importance, parallel]

    def slices(self) -> list[PageFigure]:
        """A figure for each setting: the values of trials by those of the setting."""
        return [self.slice(k, name) for k, name in enumerate(self.names)]

    def slice(self, k: int, name: str) -> PageFigure:
        """The values of trials by those of one setting; numbers are put into a few bins."""
        rows = [trial for trial in self.complete if name in trial["settings"]]
        values = [trial["settings"][name] for trial in rows]
        labels = bin_labels(values)
        lanes = sorted(dict.fromkeys(labels), key=labels_order(values, labels))
        others = [trial for trial in self.complete if name not in trial["settings"]]
        if others:
            lanes.append(NOT_SET)
            rows += others
            labels += [NOT_SET] * len(others)
        dots = []
        for trial, label in zip(rows, labels, strict=True):
            mark = {"seed": trial["number"], "success": trial is self.best}
            dots.append(Dot(lanes.index(label), mark, finite_or_nan(trial["value"])))
        share = self.importances.get(name)
        about = "one mark per trial; the best one is filled"
        if share is not None:
            about += f"; importance {short_number(share)}"
        return dot_figure(
            f"slice{k}",
            clean(name),
            self.label,
            [clean(lane) for lane in lanes],
            dots,
            "no value",
            about=about,
        )

    def tables(self) -> list[Table]:
        """Every trial with its settings, the best first, and why trials failed."""
        names = list(dict.fromkeys(name for trial in self.rows for name in trial["settings"]))
        ranked = self.complete
        others = [trial for trial in self.rows if trial not in ranked]
        rows: list[list[object]] = []
        errors: list[list[object]] = []
        if (self.folder / "best" / "report.html").is_file() and self.best is not None:
            chosen = [shown(self.best["settings"].get(name, "")) for name in names]
            link = ("best, trained again", "./best/report.html")
            rows.append([link, short_number(self.best["value"]), *chosen, "", ""])
        for trial in [*ranked, *others]:
            chosen = [shown(trial["settings"].get(name, "")) for name in names]
            label = f"trial {trial['number']}"
            value = short_number(trial["value"]) if trial in ranked else clean(trial["status"])
            seconds = duration(trial["seconds"])
            where = clean(trial.get("where") or "")
            rows.append([self.link(trial, label), value, *chosen, seconds, where])
            if trial["error"]:
                errors.append([label, trial["error"]])
        heads = ["trial", self.label, *names, "time", "where"]
        tables = [make_table("Every trial", heads, rows, "No trials yet.", text=(0,), most=2000)]
        if errors:
            tables.append(make_table("Failures", ["trial", "reason"], errors, ""))
        return tables

    def link(self, trial: JsonObject, label: str) -> Cell:
        """The label, with a link to the page of the trial's run if there is one."""
        path = folder_within(self.folder, trial)
        if path is None or not (path / "report.html").is_file():
            return label
        page = (path / "report.html").relative_to(self.folder.resolve())
        return label, "./" + quote(page.as_posix())


def bin_labels(values: list[object]) -> list[str]:
    """The lane of each value: itself, or one of a few ranges if there are many numbers."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(set(numbers)) <= BINS:
        return [shown(value) for value in values]
    array = np.array(numbers, dtype=float)
    edges = np.quantile(array, np.linspace(0, 1, BINS + 1))
    place = np.clip(np.searchsorted(edges, array, side="right") - 1, 0, BINS - 1)
    return [f"{shown(edges[k])} to {shown(edges[k + 1])}" for k in place]


def labels_order(values: list[object], labels: list[str]) -> Callable[[str], float]:
    """A key that sorts lanes by the least value in each; words keep their order."""
    least: dict[str, float] = {}
    for value, label in zip(values, labels, strict=True):
        number = float(value) if isinstance(value, int | float) else 0.0
        least[label] = min(least.get(label, math.inf), number)
    return least.__getitem__


def finite_or_zero(value: object) -> float:
    """A number as it is; 0 for anything else."""
    number = finite_or_nan(value)
    return 0.0 if math.isnan(number) else number


def shown(value: object) -> str:
    """A setting as text; numbers with a few digits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return short_number(value) if is_number else clean(value)


def setup_tables(plan: JsonObject) -> list[Table]:
    """What was searched, what was fixed, and the environment."""
    space = [word.split("=", 1) for word in plan["space"].split()]
    varied = [[name.strip("'"), values[0].strip("'") if values else ""] for name, *values in space]
    fixed = flatten_settings(plan["base"])
    environment = flatten_settings(plan["environment"])
    return [
        make_table("Varied", ["setting", "values"], varied, "Nothing was varied."),
        make_table("Fixed", ["setting", "value"], fixed, "Nothing was fixed."),
        make_table("Environment", ["what", "value"], environment, "Not recorded."),
    ]
