"""Comparisons: tasks trained with several settings and seeds, each run in its own process.

A comparison is a folder of run folders and `compare.json`, whose rows are methods on tasks. It can
be resumed: runs that have ended are not repeated, the others continue.
"""

from __future__ import annotations

import itertools
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import CoadjointError, ConfigError, StorageError, choose
from ..training import files, settings
from ..training.report.comparison import BUDGETS
from ..training.signals import Interrupted, describe_interruption, handling_stop_signals
from . import build, common_settings, schema
from . import flags as setting_flags
from .flags import KeyValues, SectionValues
from .outcomes import (
    describe_end,
    read_comparison,
    read_status,
    record_outcome,
    refuse_if_outside,
)
from .pool import ENDED, LocalPool, Outcome, RunPool
from .progress import Report, RunsReporter, Show, report_nothing, show_nothing
from .task_section import TaskSection
from .words import split_words

MOST_RUNS = 10_000  # in one comparison


class Setting(NamedTuple):
    """One key of the config and its value."""

    section: str
    key: str
    value: object

    @property
    def label(self) -> str:
        """The key as the command line has it: optimiser=adam, not name=adam."""
        return self.section if self.key == "name" else self.key


@dataclass(frozen=True)
class Variant:
    """A method or a task: a name, and what it changes in the common config."""

    name: str
    values: SectionValues
    shown: KeyValues = field(default_factory=dict)  # its settings, as tables show them


BASE_TASK = Variant("", {})  # the task of the common config


def parse_variants(
    text: str, what: str = "--method", example: str = "clipped clip=1 lr=1e-2|1e-3"
) -> list[Variant]:
    """The variants of a text: 'clipped clip=1 lr=1e-2|1e-3' is two, 'plain cell=all' one per cell.

    what, example: what the text is for and how it should look, in an error.
    """
    words = split_words(text, what)  # a name, then key=value or key=a|b
    if not words or "=" in words[0]:
        raise ConfigError(f"{what} takes a name and settings, such as {example!r}; got {text!r}.")
    name = words[0]
    choices = [parse_alternatives(word, f"{what} {name}") for word in words[1:]]
    # Keys with alternatives, which tell the variants apart.
    varied = {alternatives[0].key for alternatives in choices if len(alternatives) > 1}
    return [make_variant(name, chosen, varied) for chosen in itertools.product(*choices)]


def parse_alternatives(word: str, where: str) -> list[Setting]:
    """The settings to choose from in 'key=a|b'; `where` begins an error."""
    name, sign, text = word.partition("=")
    if not sign:
        raise ConfigError(f"{where}: {word!r} is not key=value.")
    key = name.replace("-", "_")
    section = schema.SECTION_OF.get(key)
    if name == "optimiser":  # whose key in the config is [optimiser] name
        section = "optimiser"
        key = "name"
    if section is None:
        raise ConfigError(f"{where}: {setting_flags.explain_unknown_setting(key)}")
    parsed = []
    for alternative in text.split("|"):
        values = cell_names() if (key, alternative) == ("cell", "all") else [alternative]
        for value in values:
            parsed.append(Setting(section, key, setting_flags.parse_flag(section, key, value)))
    return parsed


def make_variant(name: str, chosen: Sequence[Setting], varied: set[str]) -> Variant:
    """A variant of these settings; its name is followed by those whose keys are in `varied`."""
    values: SectionValues = {}
    shown: KeyValues = {}
    for setting in chosen:
        values.setdefault(setting.section, {})[setting.key] = setting.value
        shown[setting.label] = setting.value
        if setting.key in varied:
            name += f" {setting.label}={format_value(setting.value)}"
    return Variant(name, values, shown)


def format_value(value: object) -> str:
    """A value as the command line has it: a list of names as a,b,c."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return str(value)


def cell_names() -> list[str]:
    """Every cell that can be trained: those defined by a formula, then those that are modules."""
    from ..cells.library import CELLS
    from ..cells.steps import STEPS

    return [*CELLS, *STEPS]


def parse_tasks(text: str) -> list[Variant]:
    """The tasks of a text: 'addition length=50|100' is two."""
    from ..tasks import TASKS

    variants = parse_variants(text, "a task", "addition length=100")
    name = choose("task", text.split()[0], TASKS)
    for variant in variants:
        variant.values.setdefault("task", {})["name"] = name
    return variants


def task_title(config: schema.Config, name: str = "") -> str:
    """A task in words: "addition, 100 steps, curriculum 20,2000".

    name: that of its variant, whose settings outside [task] are added.
    """

    def join(value: object, separator: str) -> str:
        return separator.join(map(str, value)) if isinstance(value, tuple) else str(value)

    given = setting_flags.given_values(config.task)
    parts = [given.pop("name", str(config.data.train))]  # own data has the name of its file
    length = given.pop("length", None)
    if length is not None:
        parts.append(f"{join(length, ' to ')} steps")
    for key, value in given.items():
        parts.append(key if value is True else f"{key} {join(value, ',')}")
    for word in name.split()[1:]:
        if word.partition("=")[0] not in TaskSection.model_fields:
            parts.append(word.replace("=", " "))
    return ", ".join(parts)


def folder_name(name: str) -> str:
    """The name with "-" for everything but letters, digits and . _ -."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def refuse_if_occupied(folder: Path) -> None:
    """Refuse a folder in which no comparison can begin."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    if (folder / "compare.json").exists():
        raise StorageError(
            f"{folder} already holds a comparison. Resume it with: coadjoint resume "
            f"{shlex.quote(str(folder))}; or choose another --out."
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise StorageError(f"{folder} exists and is not empty: choose another --out.")


def lay_out(
    base: SectionValues,
    rows: Sequence[Variant],
    seeds: Sequence[int],
    folder: Path,
    command: str | None = None,
    tasks: Sequence[Variant] = (BASE_TASK,),
    go_on: bool = False,
) -> list[str]:
    """Check the config of every row, task and seed, and write the folder. Nothing runs yet.

    Returns lines on what the defaults for your own data chose.
    base: the settings that were given for all of them; what nobody gave is resolved by each run,
    so no defaults belong there. rows: the methods. command: the command line.
    go_on: a folder that holds this comparison already is left as it is.
    """
    from ..training import environment, json_rows

    refuse_if_names_clash("methods", rows, "give each its own name")
    refuse_if_names_clash(
        "tasks", tasks, "write 'addition length=50|100' for one task with two settings"
    )
    if len(tasks) * len(rows) * len(seeds) > MOST_RUNS:
        by_task = f"{len(tasks)} tasks x " if len(tasks) > 1 else ""
        raise ConfigError(
            f"{by_task}{len(rows)} methods x {len(seeds)} seeds are more than {MOST_RUNS:,} runs: "
            "compare fewer."
        )
    has_begun = go_on and (folder / "compare.json").exists()
    if not has_begun:
        refuse_if_occupied(folder)
    table = []
    configs = {}
    resolved = []
    notes = {}
    for task, row in itertools.product(tasks, rows):
        try:
            entry, row_configs, job = plan_row(base, task, row, seeds, len(tasks) > 1)
        except CoadjointError as error:
            where = f"task {task.name}, " if len(tasks) > 1 else ""
            error.args = (f"{where}--method {row.name}: {' '.join(str(error).split())}",)
            raise
        table.append(entry)
        configs.update(row_configs)
        resolved.append(common_settings.resolved_settings(job.config))
        notes[row.name] = job.default_notes
    if has_begun:
        refuse_if_other(folder, configs)
        return []
    with files.storage_errors(folder):
        (folder / "runs").mkdir(parents=True)
        (folder / "configs").mkdir()
    for name, config in configs.items():
        # What nobody gave is resolved by the run, for your own data by what it reads.
        settings.dump(setting_flags.given_by_user(config), folder / "configs" / f"{name}.yaml")
    # The table has all rows of the first task, then those of the second, ...
    titles = [entry["task"] for entry in table[:: len(rows)]]
    content = {
        "command": command,
        "tasks": {title: task.shown for title, task in zip(titles, tasks, strict=True)},
        "rows": table,
        "environment": environment.describe_environment(seeds[0], "cpu", command),
    }
    common_settings.put_settings(content, resolved)
    files.replace(folder / "compare.json", json_rows.dumps(content, indent=1))
    return common_settings.describe_defaults(notes)


def refuse_if_other(folder: Path, configs: Mapping[str, schema.Config]) -> None:
    """Refuse to go on in a folder whose comparison has other runs, or runs with other settings.

    configs: those that are asked for, by the names of their runs.
    """
    found = read_comparison(folder)
    names = {Path(run["folder"]).name for row in found["rows"] for run in row["runs"]}
    for name in sorted(names.symmetric_difference(configs)):
        which = "also has" if name in names else "lacks"
        raise StorageError(
            f"{folder} holds another comparison: it {which} the run {name}. Choose another --out."
        )
    for name, config in configs.items():
        path = folder / "configs" / f"{name}.yaml"
        stored = files.read_regular(path, settings.MAX_BYTES)
        if not common_settings.is_stored_config(stored, config):
            raise StorageError(
                f"{folder} holds another comparison: {path.name} has other settings. Choose "
                "another --out."
            )


def refuse_if_names_clash(what: str, variants: Sequence[Variant], advice: str) -> None:
    """Refuse variants whose runs would have the same folder.

    what: "methods" or "tasks"; advice: how to tell them apart, the end of the error.
    """
    names = [folder_name(variant.name) for variant in variants]
    for variant, name in zip(variants, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(
                f"two {what} share the name '{variant.name}', or would share a folder: {advice}."
            )


def plan_row(
    base: SectionValues, task: Variant, row: Variant, seeds: Sequence[int], several_tasks: bool
) -> tuple[KeyValues, dict[str, schema.Config], build.Job]:
    """A row of compare.json for a method on a task, the configs of its runs by folder name, a job.

    The job is that of its last run. base: the common settings, over which go those of the task and
    then those of the method (`row`).
    """
    began = time.perf_counter()
    name = row.name
    if several_tasks and task.name:
        name = f"{task.name} {row.name}"
    if not files.is_portable_name(f"{folder_name(name)}-seed-{max(seeds)}.yaml"):
        raise ConfigError(
            "its name cannot be used for a folder: choose a shorter one that is not a device name."
        )
    merged: SectionValues = {}
    for section in schema.SECTIONS:
        merged[section] = {}
        for values in (base, task.values, row.values):
            merged[section].update(values.get(section, {}))
    configs = {}
    runs = []
    for seed in seeds:
        merged["training"]["seed"] = seed
        run = f"{folder_name(name)}-seed-{seed}"
        config = setting_flags.resolve(None, merged)
        configs[run] = config
        runs.append({"seed": seed, "folder": f"runs/{run}", "status": "waiting"})
    # The last config stands for all, as they differ in the seed alone. It is built to see whether
    # anything refuses it; its network is not used.
    job = build.build(config)
    budget = {key: getattr(config.training, key) for key in BUDGETS}
    entry = {
        "task": task_title(config, task.name),
        # what all rows are ranked by: the metric that chooses their weights, if they have one
        "metric": base.get("training", {}).get("select") or job.task.metric,
        "goal": str(job.task.goal) if job.task.goal else None,
        "name": row.name,
        "settings": row.shown,
        "budget": {key: value for key, value in budget.items() if value is not None},
        # A guess at how long a run takes, for the order of the runs: what is slow to set up (the
        # lines above) is taken to be slow in each step as well.
        "pace": round((time.perf_counter() - began) * job.arguments["steps"]),
        "runs": runs,
    }
    return entry, configs, job


def run_all(
    folder: Path,
    pool: RunPool | int,
    report: Report = report_nothing,
    in_order: bool = False,
    show: Show = show_nothing,
) -> KeyValues:
    """Run what has not ended yet, and collect the results.

    Returns the new content of compare.json. A stop signal makes every run save and end. in_order:
    start and report the runs in the order of the table; a line about a run waits for those before.
    pool: where runs are trained, or the number of processes on this machine. It is closed at the
    end. show: takes what runs where, if runs are elsewhere.
    """
    content = read_comparison(folder)
    began = time.monotonic()
    pairs = [(row, run) for row in content["rows"] for run in row["runs"]]
    refuse_if_outside(folder, [run.get("folder") for _, run in pairs])
    files.remove_leftovers(folder)
    waiting = [pair for pair in pairs if read_status(folder / pair[1]["folder"]) not in ENDED]
    if not in_order:  # the longest first, so that no core is idle while the last run ends
        waiting.sort(key=lambda pair: -pair[0].get("pace", 0))
    folders = [folder / run["folder"] for _, run in waiting]
    reporter = RunsReporter(report, len(pairs), folders, in_order, show)
    if isinstance(pool, int):
        pool = LocalPool(pool)
    under_way: dict[Future[Outcome], tuple[KeyValues, KeyValues]] = {}
    signals: list[int] = []
    try:
        with handling_stop_signals(lambda number, _: signals.append(number)):
            while (waiting and not is_over(pool, signals)) or under_way:
                while waiting and not is_over(pool, signals) and len(under_way) < pool.size():
                    row, run = waiting.pop(0)
                    under_way[pool.start(folder, run["folder"])] = (row, run)
                # seconds: a signal is noticed as soon as that
                wait(under_way, timeout=0.1, return_when=FIRST_COMPLETED)
                reporter.look(
                    [folder / run["folder"] for _, run in under_way.values()], pool.places
                )
                for future in [future for future in under_way if future.done()]:
                    row, run = under_way.pop(future)
                    run["error"] = None if signals else pool.complaint(future)
                    record_outcome(folder / run["folder"], run, row["metric"])
                    reporter.end(folder / run["folder"], describe_end(run))
                if is_over(pool, signals):
                    pool.stop(at_once=len(signals) > 1)
    finally:
        pool.close()
    content["seconds"] = round(content.get("seconds", 0) + time.monotonic() - began, 1)
    content["jobs"] = pool.most
    collect(folder, content)
    if is_over(pool, signals):
        end = f"{pool.failure}."
        if pool.failure is None:
            how = describe_interruption(signal.Signals(signals[0]).name)
            end = f"{how}; every run was saved."
        words = f"coadjoint resume {shlex.quote(str(folder))}{pool.flags}"
        raise Interrupted(f"{end} Resume with: {words}")
    return content


def is_over(pool: RunPool, signals: Sequence[int]) -> bool:
    """Whether no more runs are to start: a signal came, or the pool can go on no longer."""
    return bool(signals) or pool.failure is not None


def collect(folder: Path, found: KeyValues) -> None:
    """Put the outcome of every run into compare.json; found: what it holds so far."""
    from ..training import json_rows

    for row in found["rows"]:
        for run in row["runs"]:
            record_outcome(folder / run["folder"], run, row["metric"])
    files.replace(folder / "compare.json", json_rows.dumps(found, indent=1))
