"""The record of a study: the files of its folder, and Optuna's study in them."""

from __future__ import annotations

import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingError, StorageError
from ..training import files, json_rows, schemas, study_schema
from ..training.json_types import JsonObject
from ..training.metric_names import metric_label
from .flags import SectionValues
from .search_space import Dimension, label_of

if TYPE_CHECKING:
    import optuna

STUDY_NAME = "coadjoint"
FIRST_TRIALS = 5  # that are never pruned: there is nothing to compare them with


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


def import_optuna() -> Any:
    """The package optuna, quiet; MissingError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise MissingError(
            "coadjoint tune needs the package optuna: pip install 'coadjoint[tune]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def lay_out(
    folder: Path,
    base: SectionValues,
    space: list[Dimension],
    goal: SearchGoal,
    plan: JsonObject,
    first: dict[str, Any],
) -> None:
    """Write the folder of a new study. Nothing runs yet.

    base: the settings that all trials share. plan: trials, minutes, seed and command. first: the
    parameters of the first trial, the defaults; what is not in it is left out there.
    """
    from ..training import environment

    with files.storage_errors(folder):
        (folder / "runs").mkdir(parents=True)
        (folder / "configs").mkdir()
    content = {
        "base": base,
        "space": " ".join(shlex.quote(dimension.text()) for dimension in space),
        "goal": {"metric": goal.metric, "split": goal.split, "lower": goal.lower},
        **plan,
        "environment": environment.describe_environment(plan["seed"], "cpu", plan["command"]),
    }
    files.replace(folder / "tune.json", json_rows.dumps(content, indent=1))
    study = open_record(folder, goal, plan["seed"])
    left_out = [label_of(dimension) for dimension in space if label_of(dimension) not in first]
    study.enqueue_trial(first, user_attrs={"left out": left_out})


def read_plan(folder: Path) -> JsonObject:
    """The content of tune.json, checked."""
    path = folder / "tune.json"
    if not path.exists():
        raise StorageError(f"{folder} holds no study (tune.json is missing).")
    for name in ("runs", "configs"):
        files.is_real_folder(folder / name)  # refuses a link
    return schemas.read(path, study_schema.PlanSchema)


def change_plan(folder: Path, **changes: object) -> None:
    """Write other values, such as a larger number of trials, into tune.json."""
    plan = read_plan(folder)
    plan.update({key: value for key, value in changes.items() if value is not None})
    files.replace(folder / "tune.json", json_rows.dumps(plan, indent=1))


def open_record(folder: Path, goal: SearchGoal, seed: int) -> optuna.Study:
    """Optuna's study in study.db, created if it is not there.

    The sampler is seeded by the number of trials as well: a resumed study must not draw the
    numbers of its beginning again.
    """
    optuna = import_optuna()
    path = folder / "study.db"
    if path.is_symlink():
        raise StorageError(f"{path} is {files.LINK_REFUSED}")
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name=STUDY_NAME,
            direction=goal.direction,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=1),
            load_if_exists=True,
        )
        count = len(study.get_trials(deepcopy=False))
    except Exception as error:  # of SQLAlchemy, which is not imported here
        raise StorageError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    study.sampler = optuna.samplers.TPESampler(
        seed=(seed + count) % 2**32, multivariate=True, group=True, constant_liar=True
    )
    return study  # type: ignore[no-any-return]  # optuna is imported when it is needed
