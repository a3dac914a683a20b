"""What a study has found, on the terminal: its trials, what mattered, and the best command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, StorageError
from ..training.json_types import JsonObject
from . import schema
from .flags import SectionValues, flag
from .program import print_escaped, print_table

if TYPE_CHECKING:
    import optuna

SHOWN_TRIALS = 10  # in the table at the end
UNNAMED = "--show needs the search: give --study NAME (and its --storage), or its folder as --out."


def show(folder: Path, study: str | None, storage: str | None) -> None:
    """Print all trials of a study, the importance of settings, and the best command line.

    folder: that of the study; on a machine that does not see it, --study and --storage do.
    """
    from .search_space import parse_space
    from .study import best_trial, importances, values_of
    from .study_record import SearchGoal

    record, plan = find(folder, study, storage)
    goal = SearchGoal(**plan["goal"])
    rows = list(latest_rows(record))
    print_rows(rows, goal.label, goal.lower, with_all=True)
    counts = count_statuses(rows)
    print(f"{len(rows)} of {plan['trials']} trials{counts}")
    print_importances(importances(record), sum(row["status"] == "complete" for row in rows))
    best = best_trial(record, goal)
    if best is not None:
        values = values_of(best, parse_space(plan["space"]), plan["base"])
        ended = sum(row["status"] not in ("running", "waiting") for row in rows)
        print_best(values, is_over=ended == len(rows) and ended >= plan["trials"])


def print_best(values: SectionValues, is_over: bool) -> None:
    """Print the command line of the best settings; is_over: whether no trial is left."""
    when = "" if is_over else " so far"
    print_escaped(f"best settings{when}:\n  {train_command(values)}")


def find(folder: Path, study: str | None, storage: str | None) -> tuple[optuna.Study, JsonObject]:
    """Optuna's study and the content of its tune.json, from the folder or from the storage."""
    from .study_record import load, open_record, place_of, read_plan
    from .study_storage import parse_storage

    if (folder / "tune.json").exists():
        return open_record(folder, place_of(folder, storage)), read_plan(folder)
    if storage is None or study is None:
        if study is None and folder == Path():
            raise ConfigError(UNNAMED)
        raise StorageError(f"{folder} holds no study (tune.json is missing). {UNNAMED}")
    place = parse_storage(storage, folder)
    if place.path is not None and not place.path.exists():
        raise StorageError(f"{place.path} does not exist.")
    record = load(place, study, 10)
    if record is None or "plan" not in record.user_attrs:
        raise StorageError(f"{place.shown} holds no study '{study}' of coadjoint.")
    return record, record.user_attrs["plan"]


def latest_rows(record: optuna.Study) -> Iterable[JsonObject]:
    """The last trial of each run folder, as trials.json has it; also those that run or wait."""
    from .study import trial_row
    from .study_queue import folder_of, is_lost

    trials = record.get_trials(deepcopy=False)
    by_folder = {folder_of(trial): trial for trial in trials}
    for trial in by_folder.values():
        has_failed = trial.state.name == "FAIL"
        yield trial_row(trial, lost=has_failed and is_lost(trial, trials))


def print_ended(folder: Path) -> None:
    """Print the best trials of a folder as a table, and how much each setting mattered."""
    from ..training import schemas, study_schema
    from .study_record import SearchGoal, read_plan

    goal = SearchGoal(**read_plan(folder)["goal"])
    found = schemas.read(folder / "trials.json", study_schema.TrialsSchema)
    ranked = [trial for trial in found["trials"] if trial["value"] is not None]
    print_rows(ranked, goal.label, goal.lower, with_all=False)
    pruned = sum(trial["status"] == "pruned" for trial in found["trials"])
    failed = sum(trial["status"] == "failed" for trial in found["trials"])
    print(f"{len(ranked)} trials, {pruned} pruned, {failed} failed")
    print_importances(found["importances"], len(ranked))


def print_rows(rows: list[JsonObject], label: str, lower: bool, with_all: bool) -> None:
    """Print trials as a table, the best first.

    with_all: all of them, with status, place and time; else the best SHOWN_TRIALS.
    """
    from .study_trials import format_parameter

    ranked = [row for row in rows if row["value"] is not None]
    ranked.sort(key=lambda row: row["value"], reverse=not lower)
    others = [row for row in rows if row["value"] is None]
    names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    table = []
    for row in [*ranked, *others] if with_all else ranked[:SHOWN_TRIALS]:
        value = "" if row["value"] is None else f"{row['value']:.4g}"
        settings = [format_parameter(row["settings"].get(name, "")) for name in names]
        about = [row["status"], row["where"] or ""] if with_all else []
        table.append([str(row["number"]), value, *about[:1], *settings, *about[1:]])
    status = ["status"] if with_all else []
    where = ["where"] if with_all else []
    print_table(["trial", label, *status, *names, *where], table)


def count_statuses(rows: list[JsonObject]) -> str:
    """The numbers of trials by status, in words: ": 3 complete, 1 running"."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    words = [f"{count} {status}" for status, count in counts.items()]
    return f": {', '.join(words)}" if words else ""


def print_importances(shares: Mapping[str, object], complete: int) -> None:
    """Print the share of each setting in which trials are the best, or when it will be known.

    complete: the number of complete trials.
    """
    from .study import TRIALS_OF_IMPORTANCE

    if shares:
        words = "  ".join(f"{name} {share:.2f}" for name, share in shares.items())
        print_escaped(f"importance: {words}")
    elif complete < TRIALS_OF_IMPORTANCE:
        print(f"importance: from {TRIALS_OF_IMPORTANCE} complete trials on")


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
