"""Loggers: the rows of metrics.jsonl for TensorBoard, MLflow and Weights & Biases.

A logger is called with each row, as every function in `co.train(loggers=[...])` is; at the end of
a run, `close` is told how it ended.

loggers = make_loggers(["mlflow"], "runs/waves", settings)
with closed_at_the_end(loggers):
    co.train(net, task, folder="runs/waves", loggers=loggers, ...)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import (
    CoadjointError,
    ConfigError,
    MissingError,
    StorageError,
    error_text,
    nearest,
    one_line,
)
from . import files, json_rows
from .json_types import Row
from .signals import Interrupted

NAMES = ("tensorboard", "mlflow", "wandb")
IDS_FILE = "loggers.json"  # in the run folder: the ids under which MLflow and wandb know the run
MOST_ID_BYTES = 10_000
ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
ARTIFACTS = ("config.yaml", "report.html", "result.json", "model.safetensors")
LONGEST_VALUE = 500  # characters of a setting, which is MLflow's limit before 2.8
SECONDS_BETWEEN_WRITES = 1.0
MOST_AT_ONCE = 100  # settings or metrics in one call to MLflow
END_STATES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}  # of MLflow


Settings = Mapping[str, object]  # by section and key


class Logger(Protocol):
    """What `make_loggers` returns: a function of a row that is closed at the end of the run."""

    def __call__(self, row: Row) -> None:
        """Log a row of metrics.jsonl."""

    def close(self, ending: str = "finished") -> None:
        """Write what is left, and say how the run ended: finished, failed or interrupted."""


def logger_names(given: str | Sequence[str] | None, tensorboard: bool = False) -> list[str]:
    """The loggers that settings ask for, each once; unknown names are refused.

    given: --logger; tensorboard: --tensorboard, which means the logger of that name.
    """
    words = [given] if isinstance(given, str) else list(given or ())
    names = [word.strip() for word in words]
    if tensorboard:
        names.insert(0, "tensorboard")
    for name in names:
        if name not in NAMES:
            near = nearest(name, NAMES)
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"--logger {one_line(name)}: expected some of {', '.join(NAMES)}.{hint}"
            )
    return list(dict.fromkeys(names))


def make_loggers(
    names: Sequence[str],
    folder: str | Path,
    settings: Settings | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> list[Logger]:
    """The loggers of these names for a run folder.

    A package that is not installed is refused here. Nothing is written before the first row.

    Args:
        names: Some of NAMES.
        folder: The run folder.
        settings: Settings of the run by section, to show beside its metrics.
        warn: Called with a message if MLflow or wandb fails later on; the run goes on without it.
    """
    place = Path(folder)
    loggers: list[Logger] = []
    for name in logger_names(names):
        if name == "tensorboard":
            loggers.append(TensorBoardLogger(place))
        elif name == "mlflow":
            loggers.append(SteadyLogger(name, MlflowLogger(place, settings), warn))
        else:
            loggers.append(SteadyLogger(name, WandbLogger(place, settings), warn))
    return loggers


@contextlib.contextmanager
def closed_at_the_end(loggers: Sequence[Logger]) -> Iterator[None]:
    """Close loggers at the end of a block, with how it ended: finished, failed or interrupted."""
    ending = "failed"
    try:
        yield
        ending = "finished"
    except (Interrupted, KeyboardInterrupt):
        ending = "interrupted"
        raise
    finally:
        for logger in loggers:
            logger.close(ending)


class SteadyLogger:
    """A logger whose failure does not end the run: it is reported once, and no more is logged.

    A server may be away for a while. Errors at the beginning, such as a store that does not work,
    are raised.
    """

    def __init__(self, name: str, logger: Logger, warn: Callable[[str], None]) -> None:
        """name: of the logger, for the message that warn is called with."""
        self.name = name
        self.logger = logger
        self.warn = warn
        self.has_failed = False

    def __call__(self, row: Row) -> None:
        """Log a row, unless logging has failed before."""
        self._try(lambda: self.logger(row))

    def close(self, ending: str = "finished") -> None:
        """Close the logger, unless logging has failed before."""
        self._try(lambda: self.logger.close(ending))

    def _try(self, call: Callable[[], None]) -> None:
        """Call a function of the logger, and report its failure."""
        if self.has_failed:
            return
        try:
            call()
        except CoadjointError:
            raise
        except Exception as error:
            self.has_failed = True
            self.warn(f"{self.name} failed and is left out from here on: {error_text(error)}.")


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The real numbers of a row as (KIND/KEY, value).

    Held-out rows are grouped by their split; the norms of gradients are gradient/NAME.
    """
    kind = row.get("split", row["kind"])
    for key, value in row.items():
        if isinstance(value, float):
            yield f"{kind}/{key}", value
    for key, value in row.get("gradients", {}).items():
        yield f"gradient/{key}", value


def flat_settings(settings: Settings, before: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (SECTION.KEY, text); those that are None are left out."""
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{name}.")
        elif value is not None:
            yield name, one_line(value, LONGEST_VALUE)


def read_id(folder: Path, name: str) -> str | None:
    """The id under which a logger knows the run, from its folder; None if there is none."""
    path = folder / IDS_FILE
    if not os.path.lexists(path):
        return None
    try:
        found = json.loads(files.read_regular(path, MOST_ID_BYTES))
    except ValueError:
        raise StorageError(f"{path} is damaged: it holds no JSON. Remove it.") from None
    id = found.get(name) if isinstance(found, dict) else None
    return id if isinstance(id, str) and ID.fullmatch(id) else None


def write_id(folder: Path, name: str, id: str) -> None:
    """Keep the id under which a logger knows the run, for the day it is resumed."""
    ids = {each: read_id(folder, each) for each in NAMES}
    ids[name] = id
    known = {each: value for each, value in ids.items() if value is not None}
    files.replace(folder / IDS_FILE, json_rows.dumps(known, indent=1) + "\n")


class TensorBoardLogger:
    """Writes rows for TensorBoard, into the folder `tensorboard` inside the run folder."""

    def __init__(self, folder: Path) -> None:
        """folder: the run folder."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingError(
                "--tensorboard needs the tensorboard package: pip install 'coadjoint[tensorboard]'."
            ) from None
        self.folder = folder / "tensorboard"
        self.make_writer = SummaryWriter
        self.writer: Any = None

    def __call__(self, row: Row) -> None:
        """Write the numbers of a row of metrics.jsonl as KIND/KEY."""
        if (
            self.writer is None
        ):  # only now is the first step known, after which old logs are dropped
            files.is_real_folder(self.folder)  # refuses a link
            self.writer = self.make_writer(str(self.folder), purge_step=row["step"])
        for name, value in scalars(row):
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()

    def close(self, ending: str = "finished") -> None:
        """Close the file of logs."""
        if self.writer is not None:
            self.writer.close()


class MlflowLogger:
    """Logs a run to MLflow: settings as parameters, metrics by step, and its files as artifacts.

    The store is that of MLFLOW_TRACKING_URI; by default `mlflow.db` (SQLite) beside the run folder,
    with artifacts in `mlartifacts`. The experiment is that of MLFLOW_EXPERIMENT_NAME, by default
    "coadjoint". A resumed run goes on in the same run of MLflow, whose id is in loggers.json of the
    run folder; MLFLOW_RUN_ID names another.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        """settings: of the run by section, for its parameters."""
        mlflow = import_optional("mlflow")
        self.folder = folder
        self.settings = dict(settings or {})
        self.make_client = mlflow.MlflowClient
        self.entities = mlflow.entities
        self.client: Any = None
        self.run_id = ""
        self.waiting: list[Any] = []  # metrics that are not written yet
        self.written = 0.0  # when some were

    @property
    def uri(self) -> str:
        """Where MLflow keeps its runs."""
        store = self.folder.resolve().parent / "mlflow.db"
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store}"

    def __call__(self, row: Row) -> None:
        """Log the numbers of a row of metrics.jsonl as KIND/KEY."""
        if self.client is None:
            self.open()
        now = int(time.time() * 1000)
        for name, value in scalars(row):
            metric = self.entities.Metric(plain_name(name), value, now, int(row["step"]))
            self.waiting.append(metric)
        if time.monotonic() - self.written > SECONDS_BETWEEN_WRITES:
            self.flush()

    def open(self) -> None:
        """Begin a run of MLflow, or go on with that of a resumed one."""
        quieten("mlflow", "alembic")
        try:
            self.client = self.make_client(tracking_uri=self.uri)
            experiment = self.find_experiment()
            self.run_id = self.find_run() or self.create_run(experiment)
            self.log_settings()
        except ImportError as error:
            raise MissingError(
                f"--logger mlflow: {error_text(error)}. The store {self.uri} needs more packages: "
                "pip install 'coadjoint[mlflow]'."
            ) from None
        except StorageError:
            raise
        except Exception as error:
            raise ConfigError(
                f"--logger mlflow: the store {self.uri} does not work: {error_text(error)}. Set "
                "MLFLOW_TRACKING_URI to another, or leave mlflow out."
            ) from error

    def find_experiment(self) -> str:
        """The id of the experiment, which is created if it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "coadjoint"
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            place = (self.folder.resolve().parent / "mlartifacts").as_uri()
        return str(self.client.create_experiment(name, artifact_location=place))

    def find_run(self) -> str | None:
        """The id of the run to go on with, marked as running again; None if there is none."""
        id = os.environ.get("MLFLOW_RUN_ID") or read_id(self.folder, "mlflow")
        if id is None:
            return None
        try:
            self.client.get_run(id)
        except Exception:  # another store than that of the run's first part
            return None
        self.client.update_run(id, status="RUNNING")
        return id

    def create_run(self, experiment: str) -> str:
        """Begin a new run and keep its id in the run folder."""
        run = self.client.create_run(
            experiment,
            run_name=self.folder.resolve().name,
            tags={"coadjoint.folder": str(self.folder.resolve())},
        )
        id = str(run.info.run_id)
        write_id(self.folder, "mlflow", id)
        return id

    def log_settings(self) -> None:
        """Log settings as parameters; those of a resumed run that have changed, as tags.

        MLflow does not change a parameter.
        """
        known = self.client.get_run(self.run_id).data.params
        params = []
        for name, value in flat_settings(self.settings):
            if name not in known:
                params.append(self.entities.Param(plain_name(name), value))
            elif known[name] != value:
                self.client.set_tag(self.run_id, f"resumed.{plain_name(name)}", value)
        for first in range(0, len(params), MOST_AT_ONCE):
            self.client.log_batch(self.run_id, params=params[first : first + MOST_AT_ONCE])

    def flush(self) -> None:
        """Write the metrics that wait."""
        for first in range(0, len(self.waiting), MOST_AT_ONCE):
            self.client.log_batch(self.run_id, metrics=self.waiting[first : first + MOST_AT_ONCE])
        self.waiting = []
        self.written = time.monotonic()

    def close(self, ending: str = "finished") -> None:
        """Write what is left, the report and the model, and end the run of MLflow."""
        if self.client is None or not self.run_id:
            return
        self.flush()
        for name in ARTIFACTS:
            if (self.folder / name).is_file():
                self.client.log_artifact(self.run_id, str(self.folder / name))
        self.client.set_terminated(self.run_id, END_STATES.get(ending, "FINISHED"))


class WandbLogger:
    """Logs a run to Weights & Biases: settings, metrics by step, and its files.

    WANDB_MODE, WANDB_PROJECT (by default "coadjoint"), WANDB_ENTITY, WANDB_DIR (by default the run
    folder) and all other variables of wandb count. A resumed run has the same id, which is in
    loggers.json of the run folder.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        """settings: of the run by section, for its config."""
        self.folder = folder
        self.settings = dict(settings or {})
        self.wandb = import_optional("wandb")
        self.run: Any = None

    def __call__(self, row: Row) -> None:
        """Log the numbers of a row of metrics.jsonl as KIND/KEY."""
        if self.run is None:
            self.open()
        values = dict(scalars(row))
        if values:
            self.run.log({"step": int(row["step"]), **values})

    def open(self) -> None:
        """Begin a run, or go on with that of a resumed one."""
        id = os.environ.get("WANDB_RUN_ID") or read_id(self.folder, "wandb")
        if id is None:
            id = secrets.token_hex(4)
            write_id(self.folder, "wandb", id)
        place = os.environ.get("WANDB_DIR")
        if place is None:
            files.is_real_folder(self.folder / "wandb")  # refuses a link
            place = str(self.folder)
        try:
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "coadjoint",
                name=os.environ.get("WANDB_NAME") or self.folder.resolve().name,
                id=id,
                resume="allow",
                dir=place,
                config=self.settings,
                settings=self.wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:
            raise ConfigError(
                f"--logger wandb: {error_text(error)}. Log in with `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from error
        # Steps of a resumed run may come twice, which wandb's own counter does not allow.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def close(self, ending: str = "finished") -> None:
        """Keep the report and the model, and end the run."""
        if self.run is None:
            return
        for name in ARTIFACTS:
            if (self.folder / name).is_file():
                shutil.copy(self.folder / name, self.run.dir)  # what lies there is kept
        self.run.finish(exit_code=0 if ending == "finished" else 1)


def import_optional(name: str) -> Any:
    """The module of a logger, which may not be installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingError(
            f"--logger {name} needs the {name} package: pip install 'coadjoint[{name}]'."
        ) from None


def plain_name(name: str) -> str:
    """A name that MLflow takes: letters, digits and some signs."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def quieten(*packages: str) -> None:
    """Let packages log warnings alone, unless MLFLOW_LOGGING_LEVEL says otherwise."""
    if "MLFLOW_LOGGING_LEVEL" in os.environ:
        return
    for package in packages:
        logging.getLogger(package).setLevel(logging.WARNING)
