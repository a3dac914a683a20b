"""The record of a study: the files of its folder, and Optuna's study in them or on a server."""

from __future__ import annotations

import binascii
import os
import shlex
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StorageError
from ..training import files, json_rows, restore, schemas, study_schema
from ..training.json_types import JsonObject
from ..training.metric_names import metric_label
from .flags import SectionValues, flag
from .search_space import Dimension, label_of
from .study_storage import StoragePlace, import_optuna, parse_storage

if TYPE_CHECKING:
    import optuna

STUDY_NAME = "coadjoint"
FIRST_TRIALS = 5  # that are never pruned: there is nothing to compare them with
SAME = ("base", "space", "goal", "seed", "data")  # keys of tune.json that all workers share
IN_FOLDER = (None, "journal:")  # storages that lie in the folder of their study


@dataclass(frozen=True)
class SearchGoal:
    """What a study optimises: a held-out metric of the best weights of a run."""

    metric: str
    split: str
    lower: bool

    @property
    def label(self) -> str:
        """The goal in words: "valid accuracy"."""
        return f"{self.split} {metric_label(self.metric)}"

    @property
    def direction(self) -> str:
        """The goal as Optuna says it."""
        return "minimize" if self.lower else "maximize"


# tune.json


def describe_plan(
    base: SectionValues,
    space: list[Dimension],
    goal: SearchGoal,
    plan: JsonObject,
    first: JsonObject,
) -> JsonObject:
    """The content of tune.json.

    base: the settings that all trials share. plan: trials, minutes, seed and command, and where the
    trials are recorded. first: the parameters of the first trial, the defaults; what is not in it
    is left out there.
    """
    from ..training import environment

    return {
        **study_schema.PLAN_DEFAULTS,
        "base": base,
        "space": " ".join(shlex.quote(dimension.text()) for dimension in space),
        "goal": {"metric": goal.metric, "split": goal.split, "lower": goal.lower},
        "id": uuid.uuid4().hex,
        "first": {
            "settings": first,
            "left out": [label_of(d) for d in space if label_of(d) not in first],
        },
        **plan,
        "environment": environment.describe_environment(plan["seed"], "cpu", plan["command"]),
    }


def lay_out(folder: Path, content: JsonObject, place: StoragePlace | None = None) -> None:
    """Write the folder of a new study, and create its record. Nothing runs yet.

    content: that of tune.json. place: of the record; by default study.db in the folder.
    """
    with files.storage_errors(folder):
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        (folder / "configs").mkdir(exist_ok=True)
    files.replace(folder / "tune.json", json_rows.dumps(content, indent=1))
    begin_record(folder, place or parse_storage(content["storage"], folder))


def read_plan(folder: Path) -> JsonObject:
    """The content of tune.json, checked, with defaults for what an earlier version lacks."""
    path = folder / "tune.json"
    if not path.exists():
        raise StorageError(f"{folder} holds no study (tune.json is missing).")
    for name in ("runs", "configs", "workers"):
        files.is_real_folder(folder / name)  # refuses a link
    return study_schema.PLAN_DEFAULTS | schemas.read(path, study_schema.PlanSchema)


def change_plan(folder: Path, **changes: object) -> None:
    """Write other values, such as a larger number of trials, into tune.json."""
    plan = read_plan(folder)
    plan.update({key: value for key, value in changes.items() if value is not None})
    files.replace(folder / "tune.json", json_rows.dumps(plan, indent=1))


def refuse_if_other(then: JsonObject, now: JsonObject, name: str) -> None:
    """Refuse settings or data other than those a study began with; name: the study, in words."""
    before = json_rows.to_json_types({key: then.get(key) for key in SAME})
    after = json_rows.to_json_types({key: now.get(key) for key in SAME})
    if before != after:
        change = changed_flag(before.get("base"), after.get("base"))
        if change is None:
            change = f"{restore.describe_difference(before, after)} has changed"
        raise StorageError(
            f"{name} is a study of other settings or data: {change}. Give what it began with, or "
            "choose another --study."
        )


def changed_flag(then: object, now: object) -> str | None:
    """The first setting that differs, named by its flag; None if all are the same.

    then, now: settings by section, as in "base" of tune.json
    """
    if not isinstance(then, dict) or not isinstance(now, dict):
        return None
    for section in sorted({*then, *now}):
        keys_then = then.get(section) or {}
        keys_now = now.get(section) or {}
        for key in sorted({*keys_then, *keys_now}):
            was = keys_then.get(key)
            is_now = keys_now.get(key)
            if was != is_now:
                return f"{flag(section, key)} was {in_words(was)} and is {in_words(is_now)}"
    return None


def in_words(value: object) -> str:
    """A setting's value for a message."""
    return "not given" if value is None else repr(value)


def place_of(folder: Path, storage: str | None) -> StoragePlace:
    """Where the trials of an existing study are recorded.

    A folder may come from a stranger, so the storage that it names is used only if it lies in the
    folder; else it must be given. storage: the value of --storage; None if it was not given.
    """
    named = read_plan(folder)["storage"]
    if storage is None and named not in IN_FOLDER:
        raise StorageError(f"the trials of {folder} are recorded in {named}: give it as --storage.")
    return parse_storage(storage or named, folder)


def resume_command(folder: Path, plan: JsonObject, trials: int | None = None) -> str:
    """The command that goes on with a study, perhaps with more trials in all.

    The record of a study may lie elsewhere, so that `coadjoint resume` needs its --storage.
    """
    words = ["coadjoint", "resume", str(folder)]
    if plan["storage"] not in IN_FOLDER:
        words += ["--storage", plan["storage"]]
    if trials is not None:
        words += ["--trials", str(trials)]
    return shlex.join(words)


def refuse_if_study(folder: Path, trials: int) -> None:
    """Refuse a folder that holds a study, and say how to go on with it.

    trials: the number that is wanted, which may be larger than that of the study.
    """
    if not (folder / "tune.json").exists():
        return
    plan = read_plan(folder)
    more = trials if trials > plan["trials"] else 2 * plan["trials"]
    count = "1 trial" if plan["trials"] == 1 else f"{plan['trials']} trials"
    raise StorageError(
        f"{folder} already holds a study of {count}. Go on with it: {resume_command(folder, plan)}"
        f"; for more trials: {resume_command(folder, plan, more)}; or choose another --out."
    )


# Optuna's study


def begin_record(folder: Path, place: StoragePlace) -> None:
    """Create the study of a folder in its storage, if it is not there yet.

    The caller has the turn (see study_queue.Turn). A study of this name that belongs to another
    folder is refused.
    """
    optuna = import_optuna()
    plan = read_plan(folder)
    storage = place.open(plan["heartbeat"])
    with place.errors():
        names = optuna.get_all_study_names(storage)
        if plan["study"] not in names and any((folder / "runs").iterdir()):
            raise StorageError(
                f"{place.shown} holds no study '{plan['study']}', but {folder} has runs of one: "
                "give the --storage that it began with, or start a new study."
            )
        if plan["study"] not in names:
            direction = SearchGoal(**plan["goal"]).direction
            optuna.create_study(storage=storage, study_name=plan["study"], direction=direction)
        study = optuna.load_study(storage=storage, study_name=plan["study"])
        if "id" not in study.user_attrs and not study.get_trials(deepcopy=False):
            first = plan["first"]
            attributes = {"left out": first.get("left out", [])}
            study.set_user_attr("plan", {**plan, "environment": {}})
            study.set_user_attr("began", f"{socket.gethostname()}:{folder.resolve()}")
            study.enqueue_trial(first.get("settings", {}), user_attrs=attributes)
            study.set_user_attr("id", plan["id"])  # last: the record is complete with it
        refuse_if_foreign(study, plan, place, folder)


def refuse_if_foreign(
    study: optuna.Study, plan: JsonObject, place: StoragePlace, folder: Path
) -> None:
    """Refuse a study that has the name of ours and belongs to another folder."""
    if plan["id"] is None or study.user_attrs.get("id") == plan["id"]:
        return
    name = f"'{plan['study']}' in {place.shown}"
    refuse_if_other(study.user_attrs.get("plan", {}), plan, name)
    began = study.user_attrs.get("began", "another program")
    raise StorageError(
        f"{name} belongs to another folder than {folder} (begun in {began}). All workers must see "
        "one folder: give its --out; or choose another --study."
    )


def find_elsewhere(place: StoragePlace, name: str, now: JsonObject, folder: Path) -> None:
    """Refuse a new study whose name is taken on a server or in a file outside of the folder."""
    path = place.path
    if path is not None and (not path.exists() or folder in path.parents):
        return
    study = load(place, name, now["heartbeat"])
    if study is not None and (study.user_attrs or study.get_trials(deepcopy=False)):
        refuse_if_foreign(study, now, place, folder)


def load(place: StoragePlace, name: str, heartbeat: int) -> optuna.Study | None:
    """The study of this name; None if there is none."""
    optuna = import_optuna()
    storage = place.open(heartbeat)
    with place.errors():
        if name not in optuna.get_all_study_names(storage):
            return None
        return optuna.load_study(storage=storage, study_name=name)  # type: ignore[no-any-return]


def open_record(
    folder: Path, place: StoragePlace | None = None, token: str | None = None
) -> optuna.Study:
    """Optuna's study of a folder, with its sampler and pruner.

    The sampler is seeded by the number of trials as well: a resumed study must not draw the numbers
    of its beginning again. token: of a worker beside others, which must not draw theirs.
    """
    optuna = import_optuna()
    plan = read_plan(folder)
    place = place or parse_storage(plan["storage"], folder)
    if place.path is not None and not os.path.lexists(place.path):
        recorded = parse_storage(plan["storage"], folder)
        if place.shown != recorded.shown:
            raise StorageError(
                f"{place.path} does not exist; the trials of {folder} are recorded in "
                f"{recorded.shown}."
            )
        raise StorageError(f"{place.path}, the record of {folder}, is missing: restore it.")
    study = load(place, plan["study"], plan["heartbeat"])
    if study is None:
        raise StorageError(f"{place.shown} holds no study '{plan['study']}'.")
    with place.errors():
        refuse_if_foreign(study, plan, place, folder)
        count = len(study.get_trials(deepcopy=False))
    own = 0 if token is None else binascii.crc32(token.encode())
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=1)
    study.sampler = optuna.samplers.TPESampler(
        seed=(plan["seed"] + count + own) % 2**32, multivariate=True, group=True, constant_liar=True
    )
    return study
