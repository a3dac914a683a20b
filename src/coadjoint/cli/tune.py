"""`coadjoint tune`: search for settings on the validation set."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError
from . import build, schema
from . import flags as setting_flags
from .compare import count_jobs
from .flags import SectionValues, config_from_command, flag, with_setting_flags
from .program import (
    CONFIG,
    OUT,
    QUIET,
    app,
    command_line,
    next_free_folder,
    print_escaped,
    print_table,
    with_examples,
)
from .progress import ProgressReporter

if TYPE_CHECKING:
    from .search_space import Dimension
    from .study_record import SearchGoal

MOST_TRIALS = 100_000
SHOWN_TRIALS = 10  # in the table at the end


@app.command()
@with_setting_flags
@with_examples(
    "coadjoint tune --train data.csv --trials 40",
    "coadjoint tune --train data.csv --cell gru --vary 'lr=1e-3..1e-1 hidden=16..128'",
    "coadjoint tune --train table.csv --vary 'chain=64|64x2|128x2 dropout=0..0.5' --minutes 10",
    "coadjoint tune digits --trials 20 --steps 500",
)
def tune(
    task: Optional[str] = typer.Argument(
        None,
        metavar="TASK",
        help="a built-in task (`coadjoint tasks` lists them); or use --train FILE",
    ),
    trials: int = typer.Option(30, "--trials", help="settings to try"),
    minutes: Optional[float] = typer.Option(
        None, "--minutes", help="start no trial after this time, and prune those that still run"
    ),
    vary: Optional[str] = typer.Option(
        None,
        "--vary",
        help="what to search: 'key=low..high key=a|b'; 'none' leaves a setting out. By default "
        "step size, cell, width, clipping, dropout, and the penalty and its weight",
    ),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="number of parallel processes (default: one per CPU core)"
    ),
    config: Optional[Path] = CONFIG,
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    *,
    flags: SectionValues,
) -> None:
    """Search for settings on the validation set, then train with the best ones.

    Settings that you give stay as they are. The first trial has the defaults.
    The test set is used once, at the end. `coadjoint resume FOLDER` continues a search.
    """
    from . import search_space, study_record
    from .compared_runs import refuse_if_occupied

    check_limits(trials, minutes)
    count_jobs(jobs)
    study_record.import_optuna()
    base = setting_flags.given_by_user(config_from_command(task, config, flags))
    space = search_space.parse_space(vary) if vary else None
    job = build.build(first_config(base, space))
    if space is None:
        space = search_space.default_space(base, has_time=job.task.shape is None)
    refuse_if_fixed(space, base)
    goal = goal_of(job)
    name = job.config.task.name or Path(str(job.config.data.train)).stem
    folder = out or next_free_folder(f"tune-{name}")
    refuse_if_occupied(folder)
    first = search_space.parameters_of(space, job.config)
    plan = {
        "trials": trials,
        "minutes": minutes,
        "seed": job.config.training.seed,
        "command": command_line(),
    }
    study_record.lay_out(folder, base, space, goal, plan, first)
    if not quiet:
        print_escaped(f"search: {'  '.join(dimension.text() for dimension in space)}")
        print_escaped(f"goal: {goal.label}; at most {trials} trials; folder {folder}")
    run_study(folder, jobs, quiet)


def check_limits(trials: int | None, minutes: float | None) -> None:
    """Refuse numbers of trials and minutes that make no sense; None is not checked."""
    if trials is not None and not 1 <= trials <= MOST_TRIALS:
        raise ConfigError(f"--trials must be from 1 to {MOST_TRIALS:,}; got {trials}.")
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--minutes must be greater than 0; got {minutes:g}.")


def first_config(base: SectionValues, space: list[Dimension] | None) -> schema.Config:
    """The settings to begin with: the common ones, and the first choice of what must be there.

    Whether data is made of sequences or of samples follows from `chain`, so a search over chains
    begins with one.
    """
    from .search_space import Alternatives, merge

    values = base
    for dimension in space or []:
        if isinstance(dimension, Alternatives) and dimension.key in ("chain", "autoencoder"):
            text = dimension.texts[0]
            value = setting_flags.parse_flag(dimension.section, dimension.key, text)
            values = merge(values, {dimension.section: {dimension.key: value}})
    return setting_flags.resolve(None, values)


def refuse_if_fixed(space: list[Dimension], base: SectionValues) -> None:
    """Refuse a setting that is both given and varied."""
    for dimension in space:
        name = flag(dimension.section, dimension.key)
        if dimension.key in base.get(dimension.section, {}):
            raise ConfigError(f"{name} is given and in --vary: leave one of them out.")
    if not space:
        raise ConfigError("every setting of the default search is given: say what to --vary.")


def goal_of(job: build.Job) -> SearchGoal:
    """What to optimise: the metric that selects weights, on the set that does."""
    from .study_record import SearchGoal

    task = job.task
    if "valid" in task.splits:
        split = "valid"
    elif task.size is None:
        split = "test"  # sequences that are drawn anew each time
    else:
        raise ConfigError(
            "coadjoint tune needs a validation set: give --valid FILE, or a share of --split."
        )
    metric, lower = task.selector(job.config.training.select)
    return SearchGoal(metric, split, lower)


def run_study(folder: Path, jobs: int | None, quiet: bool) -> None:
    """Search, print the best trials, train with the best settings, write the page."""
    from ..training.lock import Lock
    from ..training.report import pages
    from .study import Study

    lock = Lock(folder)
    try:
        study = Study(folder)
        try:
            with ProgressReporter(quiet, "trials") as report:
                study.search(count_jobs(jobs), report)
        finally:
            pages.write(folder)
        best = study.best_values()
        if not quiet:
            print_trials(folder)
            print_escaped(f"best settings:\n  {train_command(best)}")
        retrain(folder, best, quiet)
        page = pages.write(folder)
    finally:
        lock.release()
    if not quiet:
        print_escaped(f"study:  {folder}\nreport: {page}")


def retrain(folder: Path, values: SectionValues, quiet: bool) -> None:
    """Train with the best settings in FOLDER/best: only now is the test set used.

    A run from before is kept if it has the same settings; else it makes way.
    """
    import shutil

    from ..training import files
    from ..training.run_folder import RunFolder
    from .train import run_training, settings_writer

    target = folder / "best"
    files.is_real_folder(target)  # refuses a link
    job = build.build(setting_flags.resolve(None, values))
    if (target / "config.yaml").exists():
        before = setting_flags.to_plain_dict(setting_flags.read_run_config(target))
        if before == setting_flags.to_plain_dict(job.config) and (target / "result.json").exists():
            return
    if target.exists():
        shutil.rmtree(target)
    if not quiet:
        print("training with the best settings:")
    run = RunFolder(target, settings_writer(job))
    with run.hold(new=True):
        run_training(job, run, quiet)


def resume_study(
    folder: Path, trials: int | None, minutes: float | None, jobs: int | None, quiet: bool
) -> None:
    """Continue a study, perhaps with more trials or more time."""
    from .study_record import change_plan, read_plan

    check_limits(trials, minutes)
    count_jobs(jobs)
    plan = read_plan(folder)
    change_plan(folder, trials=trials, minutes=minutes)
    if not quiet:
        total = trials or plan["trials"]
        print_escaped(f"Resuming {folder}, a search of {total} trials.")
    run_study(folder, jobs, quiet)


def print_trials(folder: Path) -> None:
    """Print the best trials as a table, and how much each setting mattered."""
    from ..training import schemas, study_schema
    from .study import format_parameter
    from .study_record import read_plan

    goal = read_plan(folder)["goal"]
    found = schemas.read(folder / "trials.json", study_schema.TrialsSchema)
    ranked = [trial for trial in found["trials"] if trial["value"] is not None]
    ranked.sort(key=lambda trial: trial["value"], reverse=not goal["lower"])
    names = list(dict.fromkeys(name for trial in ranked for name in trial["settings"]))
    rows = []
    for trial in ranked[:SHOWN_TRIALS]:
        cells = [format_parameter(trial["settings"].get(name, "")) for name in names]
        rows.append([str(trial["number"]), f"{trial['value']:.4g}", *cells])
    print_table(["trial", f"{goal['split']} {goal['metric']}", *names], rows)
    pruned = sum(trial["status"] == "pruned" for trial in found["trials"])
    failed = sum(trial["status"] == "failed" for trial in found["trials"])
    print(f"{len(ranked)} trials, {pruned} pruned, {failed} failed")
    if found["importances"]:
        shares = "  ".join(f"{name} {share:.2f}" for name, share in found["importances"].items())
        print_escaped(f"importance: {shares}")


def train_command(values: SectionValues) -> str:
    """The `coadjoint train` command line of settings."""
    words = ["coadjoint", "train"]
    name = values.get("task", {}).get("name")
    if name is not None:
        words.append(str(name))
    for section in schema.SECTIONS:
        for key, value in values.get(section, {}).items():
            if (section, key) == ("task", "name"):
                continue
            words += flag_words(section, key, value)
    return shlex.join(words)


def flag_words(section: str, key: str, value: object) -> list[str]:
    """A setting as words of a command line."""
    name = flag(section, key)
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [name, ",".join(map(str, value))]
    if isinstance(value, float):
        return [name, f"{value:.6g}"]
    return [name, str(value)]
