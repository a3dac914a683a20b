"""The page of a comparison: its tables, the runs of every seed, and figures for each task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from ..metric_names import metric_stem
from .comparison import (
    PAGE,
    Comparison,
    TaskRows,
    flatten_sections,
    success_share,
    successful_runs,
)
from .curves import Curve
from .depth_figures import depth_curves, depth_figures
from .figures import SEED_MARKS, Dot, LineChart, PageFigure, ValueAxis, dot_figure
from .page_parts import (
    Cell,
    Page,
    PageSection,
    Table,
    configuration_rows,
    flatten_settings,
    make_table,
)
from .read import as_mapping, folder_within, held_out_curve
from .text import (
    NO_VALUE,
    SHARE_METRICS,
    Row,
    clean,
    duration,
    finite_or_nan,
    finite_values,
    parse_goal,
    short_number,
    shown_metric,
)

MAX_COLOURS = 14  # curves that colours and dashes can tell apart
MAX_NOTICES = 20
MAX_CARDS = 12
MOST_OPEN = 40  # settings that a table shows without being opened
OVERVIEW_LEAD = (
    "Runs that succeeded, if the task has a goal, and the median of its metric, on the validation "
    "set if there is one."
)
MEDIAN_LEAD = "Median over the seeds, with the range in brackets where seeds differ."
SINGLE_LEAD = "One run in each row."
SUCCESS_LEAD = "Steps and time cover only the runs that succeeded."


def comparison_page(folder: Path) -> Page:
    """The page of a compare folder; several tasks have an overview before their sections."""
    faults: list[str] = []
    comparison = Comparison.read(folder, faults)
    tasks = comparison.tasks
    several = len(tasks) > 1
    sections = []
    if several:
        sections.append(
            PageSection("overview", "Overview", OVERVIEW_LEAD, tables=[overview(tasks)])
        )
    for task in tasks:
        sections += task_sections(folder, task, task.name if several else "", faults)
    sections += [
        PageSection("runs", "Runs", tables=run_tables(folder, comparison)),
        PageSection("setup", "Setup", tables=setup_tables(comparison), pairs=True),
        PageSection(
            "again",
            "Run it again",
            commands={"The command that made this comparison": command_of(comparison)},
        ),
    ]
    if several:
        title = " · ".join(task.short_name for task in tasks)
        cards = {card_name(task, task.name): task.score(task.runs) for task in tasks}
    else:
        only = tasks[0]
        title = only.name
        cards = {}
        for row in only.rows[:MAX_CARDS]:
            value = only.score(row.runs) if only.goal else only.median_metric(row.runs)
            cards[card_name(only, row.name)] = value
    return Page(
        kind="comparison",
        name=clean(folder.resolve().name),
        title=title,
        outcome=describe_successes(tasks),
        facts=goal_facts(tasks) | time_facts(comparison),
        notices=count_faults(faults),
        cards=cards,
        sections=sections,
    )


def card_name(task: TaskRows, name: str) -> str:
    """The name of a card: "plain: runs that succeeded"; without a goal, "plain: valid accuracy".

    The card of one of several tasks, which has its name, counts the runs.
    """
    if task.goal:
        return f"{name}: runs that succeeded"
    return f"{name}: runs" if name == task.name else f"{name}: {task.measure(shown_metric)}"


def command_of(comparison: Comparison) -> str:
    """The command line that made the comparison, or "not recorded"."""
    return clean(comparison.about.get("command") or "not recorded")


def describe_successes(tasks: list[TaskRows]) -> tuple[str, str, str]:
    """Tone, headline and details: the runs that succeeded, of those that have a goal.

    Where no task has a goal, the number of runs.
    """
    total = 0
    with_goal = 0
    successes = 0
    for task in tasks:
        total += len(task.runs)
        if task.goal:
            with_goal += len(task.runs)
            successes += len(successful_runs(task.runs))
    if not with_goal:
        return "calm", str(total), "runs"
    tone = "good" if successes else "calm"
    return tone, f"{successes} of {with_goal}", "runs succeeded"


def goal_facts(tasks: list[TaskRows]) -> dict[str, str]:
    """The goal of each task that has one."""
    facts = {}
    for task in tasks:
        if task.goal:
            name = f"goal of {task.short_name}" if len(tasks) > 1 else "goal"
            facts[name] = parse_goal(task.goal)[2]
    return facts


def time_facts(comparison: Comparison) -> dict[str, str]:
    """The time that the comparison took, if it was recorded."""
    seconds = finite_or_nan(comparison.about.get("seconds"))
    if math.isnan(seconds):
        return {}
    jobs = short_number(comparison.about.get("jobs"))
    runs = "run" if jobs == "1" else "runs"
    return {"took": f"{duration(seconds)}, {jobs} {runs} at a time"}


def count_faults(faults: list[str]) -> list[str]:
    """The most common faults, each with the number of runs that have it."""
    notices = []
    for fault, n in Counter(faults).most_common(MAX_NOTICES):
        notices.append(f"{fault} ({n} runs)" if n > 1 else fault)
    return notices


def overview(tasks: list[TaskRows]) -> Table:
    """A row for each method and a column for each task: successes and the median metric."""
    rows: dict[str, list[str]] = {}
    for task in tasks:
        for name in task.names:
            rows.setdefault(name, [name])
    heads = ["name"]
    for task in tasks:
        heads.append(task.short_name)
        for name, row in rows.items():
            row.append(task.summary_cell(name))
    return make_table("All tasks", heads, rows.values(), "No rows.", text=(0,))


def run_tables(folder: Path, comparison: Comparison) -> list[Table]:
    """The errors of runs, if there are any, and every run with a link to its page."""
    several = len(comparison.tasks) > 1
    rows: list[list[object]] = []
    errors: list[list[object]] = []
    for task in comparison.tasks:
        for k, run in task.numbered_runs:
            label = f"{task.rows[k].name}, seed {clean(run.get('seed'))}"
            if several:
                label = f"{task.name}: {label}"
            status = run.get("status")
            missed = task.goal and status == "finished" and run.get("success") is not True
            rows.append(
                [
                    link_to_run(folder, run, label),
                    "finished, goal not reached" if missed else status,
                    short_number(run.get("steps")),
                    duration(run.get("seconds")),
                    final_value(run),
                ]
            )
            if run.get("error") or status == "failed":
                errors.append([label, status, run.get("error") or "no reason was recorded"])
    heads = ["run", "outcome", "steps", "time", "final metric"]
    every = make_table("Every run", heads, rows, "No runs.", most=2000, folded=len(rows) > 12)
    if not errors:
        return [every]
    heads = ["run", "outcome", "reason"]
    return [make_table("Errors", heads, errors, "", text=range(3), most=200), every]


def final_value(run: Row) -> str:
    """The final metric of a run, with the set it was measured on: "0.98 (valid)"."""
    value = short_number(run.get("metric"))
    split = run.get("split")
    return f"{value} ({clean(split)})" if split and value != NO_VALUE else value


def link_to_run(folder: Path, run: Row, label: str) -> Cell:
    """The label, with a link if the run has a page within the folder."""
    path = folder_within(folder, run)
    if path is None:
        return label
    page = path / "report.html"
    if not page.is_file():
        return label
    return label, "./" + quote(page.relative_to(folder.resolve()).as_posix())


def setup_tables(comparison: Comparison) -> list[Table]:
    """The settings that all runs share, those in which rows differ, and the environment.

    Of a comparison that has not recorded them, those that were given to tasks and methods.
    """
    environment = flatten_settings(as_mapping(comparison.about.get("environment")))
    shared = flatten_sections(comparison.about.get("shared"))
    if shared:
        tables = [
            settings_table("Settings of all runs", configuration_rows(shared)),
            settings_table(
                "Settings that differ", differing_settings(comparison), "Only the seeds differ."
            ),
        ]
    else:
        tables = [settings_table("Settings", dict.fromkeys(chosen_settings(comparison)))]
    heads = ["what", "value"]
    return [*tables, make_table("Environment", heads, environment, "No environment was recorded.")]


def settings_table(
    caption: str, settings: Iterable[tuple[str, str]], none: str = "No settings were recorded."
) -> Table:
    """A table of settings and their values; none: the text in place of an empty one."""
    rows = list(settings)
    return make_table(caption, ["setting", "value"], rows, none, folded=len(rows) > MOST_OPEN)


def differing_settings(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """The settings in which rows differ, defaults too, as ("clipped.clip", "1")."""
    several = len(comparison.tasks) > 1
    for task in comparison.tasks:
        for row in task.rows:
            if row.others:
                name = f"{task.name}: {row.name}" if several else row.name
                yield from configuration_rows(row.others, name)


def chosen_settings(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """The settings of the tasks, then those of the methods, as ("addition.length", "100")."""
    for name, chosen in as_mapping(comparison.about.get("tasks")).items():
        if chosen:
            yield from flatten_settings(chosen, clean(name))
    for task in comparison.tasks:
        for row in task.rows:
            if row.settings:
                yield from flatten_settings(row.settings, row.name)


def task_sections(folder: Path, task: TaskRows, title: str, faults: list[str]) -> list[PageSection]:
    """The table of a task, and its figures, each as a section.

    title: of the first section; "" for the only task, whose name is the title of the page.
    """
    figures = TaskFigures(folder, task, faults)
    heads, rows = task.table(PAGE, figures.metric)
    table = make_table("Results", heads, rows, "This comparison holds no rows.", text=(0,))
    drawn = [figures.curves(), figures.final(), *figures.depth()]
    heading = "Curves"
    if task.goal:
        drawn = [figures.steps(), figures.success(), *drawn]
        heading = "Success"
    return [
        PageSection(
            f"results{task.id_suffix}", title or "Side by side", results_lead(task), tables=[table]
        ),
        PageSection(f"success{task.id_suffix}", "" if title else heading, figures=drawn),
    ]


def results_lead(task: TaskRows) -> str:
    """What the cells of the table of a task hold."""
    several_seeds = any(len(row.runs) > 1 for row in task.rows)
    leads = [MEDIAN_LEAD if several_seeds else SINGLE_LEAD]
    if task.goal:
        leads.append(SUCCESS_LEAD)
    leads.append(task.ranking_note(shown_metric))
    return " ".join(leads).strip()


class TaskFigures:
    """The figures of a task of a comparison.

    `metric` is that of the task or, if it names none, of the first run that has one.
    """

    def __init__(self, folder: Path, task: TaskRows, faults: list[str]) -> None:
        """Read the held-out curves of all runs within the compare folder.

        What cannot be read adds a sentence to `faults`.
        """
        self.task = task
        self.metric = task.metric
        self.names = task.names
        self.held_out: list[Curve] = []
        self.colours: list[int] = []
        self.costates: list[tuple[Curve, Curve]] = []  # of chains: by the first and last probe
        self.costate_colours: list[int] = []
        for k, run in task.numbered_runs:
            path = folder_within(folder, run)
            if path is not None:
                # a metric that is "" becomes that of the first run, and then that of all others
                self.metric, curve = held_out_curve(path, self.metric, faults)
                name = f"{self.names[k]}, seed {clean(run.get('seed'))}"
                self.held_out.append(curve._replace(name=name))
                self.colours.append(k)
                pair = depth_curves(path, name)
                if pair is not None:
                    self.costates.append(pair)
                    self.costate_colours.append(k)

    @property
    def _measure(self) -> str:
        """The metric in titles and labels, with the set it was measured on."""
        return self.task.measure(shown_metric, self.metric)

    @property
    def _curves_title(self) -> str:
        """The title of the figure of all runs: "Valid accuracy of every run"."""
        measure = self._measure if self.task.split else f"held-out {self._measure}"
        return f"{measure[:1].upper()}{measure[1:]} of every run"

    @property
    def _is_crowded(self) -> bool:
        """Whether there are more methods than colours."""
        return len(self.names) > MAX_COLOURS

    @property
    def _crowded(self) -> str:
        """What a crowded figure says in place of its curves."""
        return f"{len(self.names)} rows are too many to tell apart by colour: see each run's page."

    def _rules(self) -> Row:
        """A line at the goal, for the script; {} if the goal has no threshold."""
        _, threshold, goal = parse_goal(self.task.goal)
        if math.isnan(threshold):
            return {}
        # curves have the metric upwards (y), dots have it across (x)
        return {"rules": [{"x": threshold, "y": threshold, "label": f"goal: {goal}"}]}

    def steps(self) -> PageFigure:
        """Steps to success of every run; runs without success have a lane of their own."""
        dots = []
        for k, run in self.task.numbered_runs:
            succeeded = run.get("success") is True
            steps = finite_or_nan(run.get("steps")) if succeeded else math.nan
            dots.append(Dot(k, run, steps))
        return dot_figure(
            f"steps{self.task.id_suffix}",
            "Steps to success, seed by seed",
            "steps to success",
            self.names,
            dots,
            "no success",
        )

    def success(self) -> PageFigure:
        """For each method, the share of its seeds that have succeeded, over steps."""
        longest = max(finite_values(self.task.runs, "steps"), default=0.0)
        curves = []
        if not self._is_crowded:
            for row in self.task.rows:
                if row.runs:
                    curves.append(success_share(row.name, row.runs, longest))
        chart = LineChart(
            f"share{self.task.id_suffix}",
            "Success over steps",
            "share of seeds that have succeeded so far",
            ValueAxis("share of seeds", span=[0, 1]),
            curves,
            empty=self._crowded if self._is_crowded else "No runs.",
            extras={"stairs": True},
        )
        return chart.figure()

    def curves(self) -> PageFigure:
        """The held-out metric of every run, over steps."""
        if metric_stem(self.metric) in SHARE_METRICS:
            axis = ValueAxis(self._measure, span=[0, 1])
        else:
            axis = ValueAxis(self._measure, "auto")
        none = "The run folders hold no held-out values."
        chart = LineChart(
            f"curves{self.task.id_suffix}",
            self._curves_title,
            "coloured by row of the table",
            axis,
            [] if self._is_crowded else self.held_out,
            colours=self.colours,
            empty=self._crowded if self._is_crowded else none,
            extras={"rows": self.names, **self._rules()},
        )
        return chart.figure()

    def depth(self) -> list[PageFigure]:
        """The costates of every run of a chain over its layers; none without chains."""
        crowded = self._crowded if self._is_crowded else ""
        return depth_figures(
            self.task.id_suffix, self.names, self.costates, self.costate_colours, crowded
        )

    def final(self) -> PageFigure:
        """The final metric of every run; those without one have a lane of their own."""
        dots = []
        for k, run in self.task.numbered_runs:
            dots.append(Dot(k, run, finite_or_nan(run.get("metric"))))
        return dot_figure(
            f"final{self.task.id_suffix}",
            f"Final {self._measure}, seed by seed",
            f"final {self._measure}",
            self.names,
            dots,
            "no value",
            self._rules(),
            about=SEED_MARKS if self.task.goal else "one mark per seed",
        )
