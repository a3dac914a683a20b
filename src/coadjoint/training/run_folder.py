"""Run folders: what a run writes, and how it survives.

    config.yaml  metrics.jsonl  clock.jsonl  result.json  environment.json  model.safetensors
    checkpoints/step-00001000/  replay/step-00001234/  lock

One class keeps them, for `train` and for `online.learn`: one writer, rows that are appended, checkpoints, going on from
the latest of them, signals, the result. Rows beyond a checkpoint are cut off when a run goes on from it, and computed
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import InputError, StorageError
from ..networks.interface import Net
from . import schemas, storage
from .display import Display, Row
from .environment import describe_environment
from .files import is_real_folder, is_same_file, remove_leftovers, replace, storage_errors
from .json_rows import JsonRows, dumps, to_json_types
from .lock import Lock
from .plan import Plan
from .restore import compare_tensors, describe_difference, load_weights
from .signals import Interrupted, interruptible
from .storage import Checkpoint

ALLOWED_BEFORE = (
    "lock",
    ".lock",
    "checkpoints",
    "config.yaml",
    "online.json",
)  # what is there before a run begins


class Run(Protocol):
    """What a folder asks of the run that it keeps: `Training` and `Learning` are such runs."""

    net: Net
    step: int
    display: Display
    schema: type[schemas.Schema]  # of its state.json

    @property
    def plan(self) -> Plan: ...

    @property
    def bytes_needed(self) -> int:
        """Bytes that the run will take, at least."""

    @property
    def max_file_bytes(self) -> int:
        """Bytes that no file of a checkpoint of this run exceeds."""

    def save(self) -> None:
        """Write a checkpoint, if there is a folder."""

    def snapshot(self) -> Checkpoint:
        """Everything the next step depends on."""

    def model_description(self) -> dict[str, Any]:
        """What a model file says of itself."""

    def check(self, saved: Checkpoint) -> None:
        """Refuse a checkpoint that lacks something of what `restore` and the next step need."""

    def restore(self, saved: Checkpoint) -> None:
        """Put everything but the weights back to where it was."""

    def result(self, status: str, reason: str | None) -> dict[str, Any]:
        """What result.json is to hold."""


class RunFolder:
    """The folder of a run in the hands of its one writer. A run without a folder has one whose path is None: nothing is
    written, nothing is saved."""

    def __init__(
        self, path: Path | None = None, write_settings: Callable[[Path], None] | None = None
    ) -> None:
        """write_settings: writes config.yaml into the folder, when a run begins there, or has been found fit to go on."""
        self.path = path
        self.write_settings = write_settings
        self.lock: Lock | None = None
        self.metrics: JsonRows | None = None
        self.clock: JsonRows | None = None
        self.saved_step: int | None = None  # the step of the last checkpoint
        self.start_clock()

    @staticmethod
    def of(folder: str | os.PathLike[str] | None) -> RunFolder:
        """What `train` and `learn` are given."""
        if isinstance(folder, RunFolder):
            return folder
        return RunFolder(None if folder is None else Path(folder))

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def quoted_path(self) -> str:
        """As it stands in a command line."""
        return shlex.quote(str(self.path))

    @property
    def resume_hint(self) -> str:
        if self.path is None:
            return "Nothing is saved without a run folder."
        return f"Go on with: coadjoint resume {self.quoted_path}"

    def start_clock(self, seconds: float = 0.0) -> None:
        """The run begins now, or goes on after so many seconds."""
        self.started = time.monotonic() - seconds

    def elapsed(self) -> float:
        """Seconds of the run so far, those before it was resumed too."""
        return time.monotonic() - self.started

    # one writer

    @contextlib.contextmanager
    def hold(self, new: bool) -> Iterator[None]:
        """Hold the folder, made if it is new. Where it is held already, nothing happens."""
        if self.path is None or self.lock is not None:
            yield
            return
        storage.import_safetensors()
        if new:
            create_run_folder(self.path)
        elif not is_real_folder(self.path / "checkpoints"):
            raise StorageError(f"{self.path} holds no run to go on with (checkpoints is missing).")
        self.lock = Lock(self.path)
        try:
            if new:
                refuse_if_occupied(
                    self.path
                )  # another run may have come and gone before the lock was ours
            remove_leftovers(self.path)
            if new and self.write_settings is not None:
                if os.path.lexists(self.path / "config.yaml"):
                    raise occupied_error(self.path)
                self.write_settings(self.path)
            yield
        finally:
            self.lock.release()
            self.lock = None

    @contextlib.contextmanager
    def open(self, run: Run, resume: bool = False, fallback: bool = False) -> Iterator[list[str]]:
        """Hold the folder while a run goes on: rows open, the past put back if there is one. The list names the signals that
        have asked the run to stop.

        fallback: go on from an older checkpoint if the latest one is damaged."""
        self.start_clock()
        if self.path is None:
            if resume:
                raise InputError("resume=True needs the folder of the run.")
            with interruptible(self.resume_hint) as stopped:
                yield stopped
            return
        with self.hold(new=not resume), contextlib.ExitStack() as rows:
            saved = None
            if resume:
                check = lambda found: self.check(run, found)
                saved = storage.load_latest(
                    self.path, fallback, run.display.say, check, run.max_file_bytes
                )
            if saved is not None:
                self.restore(run, saved)
            else:
                if resume:
                    run.display.say("There is no checkpoint yet: the run begins again at step 0.")
                else:
                    self.check_room(run.bytes_needed)
                self.write_environment(run)
            self.metrics = self._open_rows("metrics", saved, rows)
            self.clock = self._open_rows("clock", saved, rows)
            if saved is not None:
                self.check_rows()
            if resume and self.write_settings is not None:
                self.write_settings(self.path)
            with interruptible(self.resume_hint) as stopped:
                yield stopped

    def _open_rows(
        self, name: str, saved: Checkpoint | None, stack: contextlib.ExitStack
    ) -> JsonRows:
        assert self.path is not None
        rows = JsonRows(self.path / f"{name}.jsonl", None if saved is None else saved.state[name])
        stack.callback(rows.close)
        return rows

    def check_room(self, need: int) -> None:
        """Be sure that a new run has room, before anything is computed."""
        assert self.path is not None
        with storage_errors(self.path):
            free = shutil.disk_usage(self.path).free
        if free < need:
            raise StorageError(
                f"{self.path} has {free:,} bytes free and this run needs about {need:,}: "
                "make room, or choose another --out."
            )

    # rows

    def append(self, row: Row) -> None:
        """A row of metrics.jsonl."""
        if self.metrics is not None:
            self.metrics.append(row)

    def log_time(self, step: int, seconds: float) -> None:
        """A row of clock.jsonl; with it, all rows so far can be read by others."""
        if self.metrics is not None and self.clock is not None:
            self.clock.append({"step": step, "seconds": round(seconds, 3)})
            self.metrics.flush()

    def check_rows(self) -> None:
        """The rows before a checkpoint are those of a run: every line has its form."""
        assert self.path is not None
        for name, schema in (
            ("metrics.jsonl", schemas.MetricsRow),
            ("clock.jsonl", schemas.ClockRow),
        ):
            for _ in schemas.read_rows(self.path / name, schema):
                pass

    # checkpoints

    def common_state(self, plan: Plan) -> dict[str, Any]:
        """What every state.json says: whose it is, what its bits depend on, and how far the rows go."""
        return {
            "description": to_json_types(plan.description),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "metrics": self.metrics.position if self.metrics else None,
            "clock": self.clock.position if self.clock else None,
        }

    def save(self, run: Run, best: int | None = None) -> None:
        """Write a checkpoint, unless that of this step is there, and remove all but the last few and the best."""
        if self.path is None:
            return
        self.sync()
        if self.saved_step != run.step:
            storage.save(self.path / "checkpoints", run.snapshot(), run.model_description())
            self.saved_step = run.step
        storage.prune(self.path, run.plan.keep, best)

    def sync(self) -> None:
        """Be sure, before every checkpoint, that all files are where they were, and the rows on the disk.

        Without this, a run whose files were deleted would write into nothing and end as if all were
        well."""
        assert self.path is not None
        assert self.lock is not None
        assert self.metrics is not None
        assert self.clock is not None
        resume = f"coadjoint resume {self.quoted_path}"
        if not is_real_folder(self.path / "checkpoints"):
            raise StorageError(
                f"{self.path} (or checkpoints in it) was deleted or moved while the run went on: nothing "
                f"more can be saved. Put it back and go on from its last checkpoint: {resume}; or start the "
                "run again."
            )
        if not self.lock.is_held:
            raise StorageError(
                f"{self.lock.path} was deleted or replaced while the run went on: another process may be "
                f"writing there. Be sure that none does, and go on from the last checkpoint: {resume}"
            )
        said = []
        for rows in (self.metrics, self.clock):
            if not is_same_file(rows.file.fileno(), rows.path):
                said.append(rows.rescue())
        if said:
            raise StorageError(
                f"{self.path}: {'; '.join(said)}. Go on from the last checkpoint: {resume}"
            )
        self.metrics.sync()
        self.clock.sync()

    def save_replay(self, checkpoint: Checkpoint) -> None:
        """Keep what a step began with that was not finite, to be looked at later."""
        assert self.path is not None
        parent = self.path / "replay"
        if not is_real_folder(parent):
            with storage_errors(parent):
                parent.mkdir()
        if not is_real_folder(parent / storage.folder_name(checkpoint.step)):
            storage.save(parent, checkpoint)

    def check(self, run: Run, saved: Checkpoint) -> None:
        """Refuse a checkpoint that lacks something of what the run needs, by its name, type or shape."""
        state = schemas.check("state.json", saved.state, run.schema)
        if state["description"] != description_as_json(run.plan):
            return  # another run's: `restore` says what has changed
        compare_tensors(run.net.state_dict(), saved.model, "its model.safetensors")
        run.check(saved)

    def restore(self, run: Run, saved: Checkpoint) -> None:
        """Put a run back to where it was when the checkpoint was saved."""
        state = saved.state
        if state["description"] != description_as_json(run.plan):
            what = describe_difference(state["description"], description_as_json(run.plan))
            raise StorageError(
                f"{self.path} cannot go on: {what} has changed since it began. Restore it, or start a new run."
            )
        load_weights(
            run.net, saved.model, f"checkpoint {storage.folder_name(saved.step)} of {self.path}"
        )
        run.restore(saved)
        self.saved_step = saved.step
        for what, here in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
            if state[what] != here:
                run.display.say(
                    f"{what} was {state[what]} and is {here}: the run goes on, but not necessarily in the same bits."
                )

    # the end

    def save_interrupted(self, run: Run, name: str) -> Interrupted:
        """Save the run, and say how to go on with it."""
        at = f"{name} at step {run.step}"
        if self.path is None:
            return Interrupted(f"{at}: nothing is saved without a run folder.")
        run.save()
        self.write_result(run.result("interrupted", at))
        return Interrupted(f"{name}: saved at step {run.step}. {self.resume_hint}")

    def write_result(self, result: dict[str, Any]) -> None:
        if self.path is not None:
            replace(self.path / "result.json", dumps(result, indent=1))

    def write_model(self, run: Run) -> None:
        if self.path is not None:
            model = storage.pack_model(dict(run.net.state_dict()), run.model_description())
            replace(self.path / "model.safetensors", model)

    def write_environment(self, run: Run) -> None:
        assert self.path is not None
        device = str(run.net.like.device)
        about = describe_environment(run.plan.seed, device, run.plan.command)
        replace(self.path / "environment.json", dumps(about, indent=1))


def description_as_json(plan: Plan) -> Any:
    """The description of a run as a file gives it back."""
    return json.loads(dumps(plan.description))


def create_run_folder(folder: Path) -> None:
    """Make a new run folder, where none is."""
    if len(str(folder.name)) > 200 or any(ord(c) < 32 for c in str(folder)):
        raise StorageError(
            f"run folder {str(folder)!r}: a name has at most 200 characters and no control characters."
        )
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    refuse_if_occupied(folder)
    with storage_errors(folder):
        if not is_real_folder(folder / "checkpoints"):
            (folder / "checkpoints").mkdir(
                parents=True, exist_ok=True
            )  # another process may have been quicker


def refuse_if_occupied(folder: Path) -> None:
    """Be sure that no run has begun here: nothing but what comes before it, and what a crash then has left half-written."""
    here = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if all(
        name in ALLOWED_BEFORE or (name.startswith(".") and name.endswith(".tmp")) for name in here
    ):
        return
    if here & {"metrics.jsonl", "environment.json"} and "checkpoints" in here:
        raise occupied_error(folder)
    raise StorageError(f"{folder} exists and is not empty: choose another --out.")


def occupied_error(folder: Path) -> StorageError:
    return StorageError(
        f"{folder} already holds a run. Go on with it: coadjoint resume {shlex.quote(str(folder))}; "
        "or choose another --out."
    )
