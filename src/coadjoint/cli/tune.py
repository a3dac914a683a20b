"""`coadjoint tune`: search for settings on the validation set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError, StorageError, hide_passwords
from ..training import files
from ..training.json_types import JsonObject
from . import build, schema, study_show
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
    with_examples,
)
from .progress import ProgressReporter

if TYPE_CHECKING:
    from .search_space import Dimension
    from .study_record import SearchGoal
    from .study_storage import StoragePlace

MOST_TRIALS = 100_000
SLOWEST_HEARTBEAT = 86_400  # seconds
STORAGE_HELP = (
    "where trials are recorded: postgresql+psycopg://user@host/db for workers on many machines "
    "(password: PGPASSWORD or ~/.pgpass), journal:FILE, or by default SQLite in the folder"
)


@app.command()
@with_setting_flags
@with_examples(
    "coadjoint tune --train data.csv --trials 40",
    "coadjoint tune --train data.csv --cell gru --vary 'lr=1e-3..1e-1 hidden=16..128'",
    "coadjoint tune --train table.csv --vary 'chain=64|64x2|128x2 dropout=0..0.5' --minutes 10",
    "coadjoint tune digits --trials 20 --steps 500",
    "coadjoint tune temporal-order --study order --storage postgresql+psycopg://user@host/db",
    "coadjoint tune --show --study order --storage postgresql+psycopg://user@host/db",
)
def tune(
    task: Optional[str] = typer.Argument(
        None,
        metavar="TASK",
        help="a built-in task (`coadjoint tasks` lists them); or use --train FILE",
    ),
    trials: int = typer.Option(30, "--trials", help="settings to try, by all workers together"),
    minutes: Optional[float] = typer.Option(
        None, "--minutes", help="start no trial after this time, and prune those that still run"
    ),
    vary: Optional[list[str]] = typer.Option(
        None,
        "--vary",
        help="what to search: 'key=low..high key=a|b', also in several --vary; 'none' leaves a "
        "setting out. By default step size, cell, width, clipping, dropout, and the penalty and "
        "its weight",
    ),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="number of parallel processes (default: one per CPU core)"
    ),
    study: Optional[str] = typer.Option(
        None,
        "--study",
        help="name of the search, in the folder runs/NAME: the same line again, also on another "
        "machine that sees this folder, adds a worker",
    ),
    storage: Optional[str] = typer.Option(None, "--storage", help=STORAGE_HELP),
    heartbeat: int = typer.Option(
        10,
        "--heartbeat",
        help="on a server: seconds between two signs of life; a worker that misses six is taken "
        "for dead, and others continue its trials",
    ),
    show: bool = typer.Option(
        False, "--show", help="only print the trials of a search: of --study, --out or TASK"
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
    from . import search_space, study_record, study_show
    from .study_storage import import_optuna, parse_storage

    check_limits(trials, minutes, heartbeat)
    check_name(study)
    count_jobs(jobs)
    import_optuna()
    if show:
        study_show.show(out or named_folder(study) or Path(task or ""), study, storage)
        return
    refuse_if_unnamed(storage, study)
    base = setting_flags.given_by_user(config_from_command(task, config, flags))
    space = search_space.parse_space(" ".join(vary)) if vary else None
    job = build.build(first_config(base, space))
    if space is None:
        space = search_space.default_space(base, has_time=job.task.shape is None)
    refuse_if_fixed(space, base)
    goal = goal_of(job)
    name = job.config.task.name or Path(str(job.config.data.train)).stem
    folder = out or named_folder(study) or next_free_folder(f"tune-{name}")
    place = parse_storage(storage, folder)
    first = search_space.parameters_of(space, job.config)
    plan = {
        "trials": trials,
        "minutes": minutes,
        "seed": job.config.training.seed,
        "command": command_line(),
        "storage": None if storage is None else hide_passwords(storage),
        "study": study or study_record.STUDY_NAME,
        "heartbeat": heartbeat,
        "data": digests_of(job.task),
    }
    content = study_record.describe_plan(base, space, goal, plan, first)
    joined = begin_or_join(folder, content, place, is_named=study is not None)
    if not quiet:
        begun = study_record.read_plan(folder)
        how = "joining " if joined else ""
        print_escaped(f"search: {'  '.join(dimension.text() for dimension in space)}")
        print_escaped(f"goal: {goal.label}; at most {begun['trials']} trials; {how}folder {folder}")
        if trials > begun["trials"]:
            print_escaped(f"for more trials: coadjoint resume {folder} --trials {trials}")
    run_study(folder, jobs, quiet, place, minutes)


def named_folder(study: str | None) -> Path | None:
    """The folder of the study of a name."""
    return None if study is None else Path("runs") / study


def check_name(study: str | None) -> None:
    """Refuse the name of a study that cannot be that of a folder."""
    from ..training import files

    if study is not None and not files.is_portable_name(study):
        raise ConfigError(f"--study must be a name that a folder can have; got {study!r}.")


def refuse_if_unnamed(storage: str | None, study: str | None) -> None:
    """Refuse a storage for many studies without the name of this one."""
    if storage not in (None, "journal:") and study is None:
        raise ConfigError("--storage needs --study NAME: a storage may hold several studies.")


def digests_of(task: object) -> dict[str, object]:
    """The names and SHA-256 of the files of the user's own data; {} of a built-in task."""
    from ..tasks.data import Data

    return dict(task.description.files) if isinstance(task, Data) else {}


def begin_or_join(folder: Path, content: JsonObject, place: StoragePlace, is_named: bool) -> bool:
    """Lay a new study out, or join one that has begun in the folder; returns whether it has.

    content: that of tune.json. is_named: without a name, a study is never joined. Workers that
    begin at the same time wait for each other here, so that one of them creates the study.
    """
    from . import study_record
    from .compared_runs import refuse_if_occupied
    from .study_queue import Turn

    if not is_named:
        study_record.refuse_if_study(folder, content["trials"])
        refuse_if_occupied(folder)
    if not (folder / "tune.json").exists():
        study_record.find_elsewhere(place, content["study"], content, folder)
    with files.storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with Turn(folder).taken():
        has_begun = (folder / "tune.json").exists()
        if has_begun:
            study_record.refuse_if_other(study_record.read_plan(folder), content, str(folder))
            study_record.begin_record(folder, place)
            return True
        if any(path.name != ".turn" for path in folder.iterdir()):
            raise StorageError(f"{folder} exists and is not empty: choose another --out.")
        study_record.lay_out(folder, content, place)
    return False


def check_limits(trials: int | None, minutes: float | None, heartbeat: int = 10) -> None:
    """Refuse numbers of trials and minutes that make no sense; None is not checked."""
    if trials is not None and not 1 <= trials <= MOST_TRIALS:
        raise ConfigError(f"--trials must be from 1 to {MOST_TRIALS:,}; got {trials}.")
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--minutes must be greater than 0; got {minutes:g}.")
    if not 1 <= heartbeat <= SLOWEST_HEARTBEAT:
        raise ConfigError(f"--heartbeat must be from 1 to {SLOWEST_HEARTBEAT}; got {heartbeat}.")


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


def run_study(
    folder: Path,
    jobs: int | None,
    quiet: bool,
    place: StoragePlace | None = None,
    minutes: float | None = None,
) -> None:
    """Search, print the best trials, train with the best settings, write the page.

    place: of the record; by default the folder's own. minutes: of this worker, if not the plan's.
    """
    from ..training.report import pages
    from .study import Study

    study = Study(folder, place)
    try:
        if minutes is not None:
            study.plan["minutes"] = minutes
        try:
            with ProgressReporter(quiet, "trials") as report:
                study.search(count_jobs(jobs), report)
        finally:
            with study.turn.taken():
                pages.write(folder)
        best = study.best_values()
        others = len(study.running_elsewhere())
    finally:
        study.close()
    if not quiet:
        study_show.print_ended(folder)
        study_show.print_best(best, is_over=not others)
    if others:
        say(quiet, f"{others} of the trials still run elsewhere; study: {folder}")
        return
    finish_study(folder, best, quiet)


def finish_study(folder: Path, best: SectionValues, quiet: bool) -> None:
    """Train with the best settings and write the page, unless another worker does so already."""
    from ..training.lock import Lock
    from ..training.report import pages

    try:
        lock = Lock(folder)
    except StorageError:
        say(quiet, f"another worker trains with the best settings; study: {folder}")
        return
    try:
        retrain(folder, best, quiet)
        page = pages.write(folder)
    finally:
        lock.release()
    say(quiet, f"study:  {folder}\nreport: {page}")


def say(quiet: bool, text: str) -> None:
    """Print a text, unless the command is to be quiet."""
    if not quiet:
        print_escaped(text)


def retrain(folder: Path, values: SectionValues, quiet: bool) -> None:
    """Train with the best settings in FOLDER/best: only now is the test set used.

    A run from before is kept if it has the same settings; else it makes way.
    """
    import shutil

    from ..training import files
    from ..training.advice import Search
    from ..training.run_folder import RunFolder
    from . import search_space, study_record
    from .train import run_training, settings_writer

    plan = study_record.read_plan(folder)
    keys = frozenset(dimension.key for dimension in search_space.parse_space(plan["space"]))
    longer = study_record.resume_command(folder, plan, 2 * plan["trials"])
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
        run_training(job, run, quiet, search=Search(keys, longer))


def resume_study(
    folder: Path,
    trials: int | None,
    minutes: float | None,
    jobs: int | None,
    quiet: bool,
    storage: str | None = None,
) -> None:
    """Continue a study, perhaps with more trials or more time; others may work on it, too."""
    from .study_queue import Turn
    from .study_record import begin_record, change_plan, place_of, read_plan
    from .study_storage import import_optuna

    check_limits(trials, minutes)
    count_jobs(jobs)
    import_optuna()
    plan = read_plan(folder)
    place = place_of(folder, storage)
    with Turn(folder).taken():
        begin_record(folder, place)
        change_plan(folder, trials=trials, minutes=minutes)
    total = trials or plan["trials"]
    say(quiet, f"Resuming {folder}, a search of {total} trials.")
    run_study(folder, jobs, quiet, place)
