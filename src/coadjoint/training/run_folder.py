"""Run folders: the files of a run, its checkpoints, and how it is resumed.

    config.yaml  metrics.jsonl  clock.jsonl  result.json  environment.json  model.safetensors
    data.json (of the user's own data)
    checkpoints/step-00001000/  replay/step-00001234/  lock

`train` and `online.learn` share the class RunFolder. A folder has one writer at a time. Rows are
appended to metrics.jsonl and clock.jsonl; when a run is resumed, the rows after its checkpoint are
cut off and computed again.
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
from typing import Protocol

import torch

from ..errors import InputError, StorageError
from ..networks.interface import Net
from ..tasks.overview import Overview
from . import schemas, storage
from .display import Display
from .environment import describe_environment
from .files import is_real_folder, is_same_file, remove_leftovers, replace, storage_errors
from .json_rows import JsonRows, dumps, join_numbers, to_json_types
from .json_types import JsonObject, Row
from .lock import Lock
from .pace import ENDLESS
from .plan import Plan
from .restore import compare_tensors, describe_difference, load_weights
from .signals import Interrupted, describe_interruption, interruptible
from .storage import Checkpoint

# what may be in the folder before a run begins
ALLOWED_BEFORE = ("lock", ".lock", "checkpoints", "config.yaml", "online.json")


class Run(Protocol):
    """What a folder needs from its run, a `Training` or a `Learning`."""

    net: Net
    step: int
    display: Display
    schema: type[schemas.Schema]  # of its state.json

    @property
    def plan(self) -> Plan:
        """The settings of the run."""

    @property
    def bytes_needed(self) -> int:
        """A lower bound on what the run writes: a new run is refused without so much room."""

    @property
    def max_file_bytes(self) -> int:
        """An upper bound on a file of a checkpoint: a larger one is refused unread."""

    def save(self) -> None:
        """Write a checkpoint, if there is a folder."""

    def snapshot(self) -> Checkpoint:
        """Everything the next step depends on."""

    def model_description(self) -> JsonObject:
        """What a model file says about itself."""

    def check(self, saved: Checkpoint) -> None:
        """Refuse a checkpoint that lacks something `restore` or the next step needs."""

    def restore(self, saved: Checkpoint) -> None:
        """Put everything but the weights back to where it was."""

    def result(self, status: str, reason: str | None) -> JsonObject:
        """The content of result.json. reason: why the run failed or stopped, if it did."""


class RunFolder:
    """The folder of a run, for its one writer. Nothing is written or saved if its path is None."""

    def __init__(
        self, path: Path | None = None, write_settings: Callable[[Path], None] | None = None
    ) -> None:
        """path: None for a run without a folder.

        write_settings: writes config.yaml, into a new folder or into one whose run is resumed.
        """
        self.path = path
        self.write_settings = write_settings
        self.lock: Lock | None = None
        self.metrics: JsonRows | None = None
        self.clock: JsonRows | None = None
        self.saved_step: int | None = None  # that of the last checkpoint
        self.start_clock()

    @staticmethod
    def of(folder: str | os.PathLike[str] | None) -> RunFolder:
        """The RunFolder for the `folder` argument of `train` and `learn`."""
        if isinstance(folder, RunFolder):
            return folder
        return RunFolder(None if folder is None else Path(folder))

    def __fspath__(self) -> str:
        """The path, so that a RunFolder can be given wherever a path can."""
        return str(self.path)

    @property
    def quoted_path(self) -> str:
        """The path as a word of a command line."""
        return shlex.quote(str(self.path))

    @property
    def resume_hint(self) -> str:
        """A sentence that tells how to resume the run."""
        if self.path is None:
            return "Nothing is saved without a run folder."
        return f"Resume with: coadjoint resume {self.quoted_path}"

    def start_clock(self, seconds: float = 0.0) -> None:
        """Start to count time; `seconds` is the time before the run was resumed."""
        self.started = time.monotonic() - seconds

    def elapsed(self) -> float:
        """Seconds of the run so far, including those before it was resumed."""
        return time.monotonic() - self.started

    # one writer

    @contextlib.contextmanager
    def hold(self, new: bool) -> Iterator[None]:
        """Inside, the folder is locked; if it is new, it is created and its settings written.

        A lock that this object already holds stays.
        """
        if self.path is None or self.lock is not None:
            yield
            return
        storage.import_safetensors()  # refused here rather than at the first checkpoint
        if new:
            create_run_folder(self.path)
        elif not is_real_folder(self.path / "checkpoints"):
            raise StorageError(f"{self.path} holds no run to resume (checkpoints is missing).")
        self.lock = Lock(self.path)
        try:
            if new:
                refuse_if_occupied(self.path)  # another run may have begun before we had the lock
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
        """Hold the folder during a run, with its files open and, if resumed, its past restored.

        Yields a list that receives the names of signals that ask the run to stop.

        fallback: resume from an older checkpoint if the latest one is damaged.
        """
        self.start_clock()
        if self.path is None:
            if resume:
                raise InputError("resume=True needs the folder of the run: give folder.")
            with interruptible(self.resume_hint) as stopped:
                yield stopped
            return
        with self.hold(new=not resume), contextlib.ExitStack() as stack:
            saved = self._restore_latest(run, fallback) if resume else None
            if saved is None:  # a new run, or one that was stopped before its first checkpoint
                if not resume:
                    self.check_room(run.bytes_needed)
                self.write_environment(run)
                self.write_data_overview(run)
            self.metrics = self._open_rows("metrics", saved, stack)
            self.clock = self._open_rows("clock", saved, stack)
            if saved is not None:
                self.check_rows()
            if resume and self.write_settings is not None:  # `hold` wrote those of a new run
                self.write_settings(self.path)
            with interruptible(self.resume_hint) as stopped:
                yield stopped

    def _restore_latest(self, run: Run, fallback: bool) -> Checkpoint | None:
        """Restore the latest checkpoint and return it; None if there is none yet."""
        assert self.path is not None

        def check(saved: Checkpoint) -> None:
            self.check(run, saved)

        saved = storage.load_latest(self.path, fallback, run.display.say, check, run.max_file_bytes)
        if saved is None:
            run.display.say("No checkpoint yet: starting again at step 0.")
        else:
            self.restore(run, saved)
            steps = getattr(run.plan, "steps", None)  # unknown of a stream
            total = "" if steps in (None, ENDLESS) else f" of {steps:,}"
            run.display.say(f"Resuming {self.path} at step {run.step:,}{total}.")
        return saved

    def _open_rows(
        self, name: str, saved: Checkpoint | None, stack: contextlib.ExitStack
    ) -> JsonRows:
        """Open NAME.jsonl at the place that the checkpoint `saved` recorded; `stack` closes it.

        saved: None for a run that begins, whose file is emptied.
        """
        assert self.path is not None
        rows = JsonRows(self.path / f"{name}.jsonl", None if saved is None else saved.state[name])
        stack.callback(rows.close)
        return rows

    def check_room(self, needed: int) -> None:
        """Refuse a run that needs more bytes than the disk has, before anything is computed."""
        assert self.path is not None
        with storage_errors(self.path):
            free = shutil.disk_usage(self.path).free
        if free < needed:
            raise StorageError(
                f"{self.path} has {free:,} bytes free and this run needs about {needed:,}: "
                "make room, or choose another --out."
            )

    # rows

    def append(self, row: Row) -> None:
        """Append a row to metrics.jsonl, if there is a folder."""
        if self.metrics is not None:
            self.metrics.append(row)

    def log_time(self, step: int, seconds: float) -> None:
        """Append a row to clock.jsonl, and let other processes read metrics.jsonl so far.

        Times are in a file of their own, so that metrics.jsonl is the same for the same seed.
        """
        if self.metrics is not None and self.clock is not None:
            self.clock.append({"step": step, "seconds": round(seconds, 3)})
            self.metrics.flush()

    def check_rows(self) -> None:
        """Refuse a run to resume if a row before its checkpoint is damaged."""
        assert self.path is not None
        files: list[tuple[str, type[schemas.Schema]]] = [
            ("metrics.jsonl", schemas.MetricsRow),
            ("clock.jsonl", schemas.ClockRow),
        ]
        for name, schema in files:
            for _ in schemas.read_rows(self.path / name, schema):
                pass  # reading a row checks it

    # checkpoints

    def common_state(self, plan: Plan) -> JsonObject:
        """What every state.json holds: settings, versions, and where the files of rows end.

        metrics, clock: None without a folder.
        """
        return {
            "description": to_json_types(plan.description),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "metrics": self.metrics.position if self.metrics else None,
            "clock": self.clock.position if self.clock else None,
        }

    def save(self, run: Run, best: int | None = None) -> None:
        """Write a checkpoint, unless this step has one; remove all but the last few and the best.

        best: the step of the best weights, if a validation has chosen some.
        """
        if self.path is None:
            return
        self.sync()
        if self.saved_step != run.step:
            storage.save(self.path / "checkpoints", run.snapshot(), run.model_description())
            self.saved_step = run.step
        storage.prune(self.path, run.plan.keep, best)

    def sync(self) -> None:
        """Before a checkpoint: check that all files are still there, and flush the rows to disk.

        Otherwise a run whose files were deleted would write into nothing and end as if all were
        well.
        """
        assert self.path is not None
        assert self.lock is not None
        assert self.metrics is not None
        assert self.clock is not None
        resume = f"coadjoint resume {self.quoted_path}"
        if not is_real_folder(self.path / "checkpoints"):
            raise StorageError(
                f"{self.path} (or checkpoints in it) was deleted or moved during the run: nothing "
                "more can be saved. Put it back and resume from its last checkpoint: "
                f"{resume}; or start a new run."
            )
        if not self.lock.is_held:
            raise StorageError(
                f"{self.lock.path} was deleted or replaced during the run: another process may be "
                "writing there. Make sure that none is, and resume from the last checkpoint: "
                f"{resume}"
            )
        faults = []  # rows that were deleted or replaced, and where they were put
        for rows in (self.metrics, self.clock):
            if not is_same_file(rows.file.fileno(), rows.path):
                faults.append(rows.rescue())
        if faults:
            raise StorageError(
                f"{self.path}: {'; '.join(faults)}. Resume from the last checkpoint: {resume}"
            )
        self.metrics.sync()
        self.clock.sync()

    def save_replay(self, checkpoint: Checkpoint) -> None:
        """Keep the state before a step that was not finite, for `coadjoint replay`."""
        assert self.path is not None
        parent = self.path / "replay"
        if not is_real_folder(parent):
            with storage_errors(parent):
                parent.mkdir()
        if not is_real_folder(parent / storage.folder_name(checkpoint.step)):
            storage.save(parent, checkpoint)

    def check(self, run: Run, saved: Checkpoint) -> None:
        """Refuse a checkpoint that lacks something the run needs, by name, type or shape."""
        state = schemas.check("state.json", saved.state, run.schema)
        if state["description"] != description_as_json(run.plan):
            return  # the settings have changed: `restore` says how
        compare_tensors(run.net.state_dict(), saved.model, "its model.safetensors")
        run.check(saved)

    def restore(self, run: Run, saved: Checkpoint) -> None:
        """Put a run back to where it was when the checkpoint was saved."""
        state = saved.state
        description = description_as_json(run.plan)
        if state["description"] != description:
            change = describe_difference(state["description"], description)
            raise StorageError(
                f"{self.path} cannot be resumed: {change} has changed since the run began. "
                "Change it back, or start a new run."
            )
        source = f"checkpoint {storage.folder_name(saved.step)} of {self.path}"
        load_weights(run.net, saved.model, source)
        run.restore(saved)
        self.saved_step = saved.step
        present = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        for name, value in present.items():
            if state[name] != value:
                run.display.say(
                    f"{name} was {state[name]} and is now {value}: "
                    "the run continues, but the last bits of its results may differ."
                )

    # the end

    def save_interrupted(self, run: Run, signal_name: str) -> Interrupted:
        """Save a run that a signal stopped; returns the error to raise, which says how to go on."""
        how = describe_interruption(signal_name)
        if self.path is None:
            return Interrupted(f"{how} at step {run.step:,}. {self.resume_hint}")
        run.save()
        self.write_result(run.result("interrupted", f"{signal_name} at step {run.step}"))
        return Interrupted(f"{how}; saved at step {run.step:,}. {self.resume_hint}")

    def write_result(self, result: JsonObject) -> None:
        """Write result.json."""
        if self.path is not None:
            replace(self.path / "result.json", join_numbers(dumps(result, indent=1)))

    def write_model(self, run: Run) -> None:
        """Write model.safetensors: the present weights, and the description of the run."""
        if self.path is not None:
            model = storage.pack_model(dict(run.net.state_dict()), run.model_description())
            replace(self.path / "model.safetensors", model)

    def write_environment(self, run: Run) -> None:
        """Write environment.json."""
        assert self.path is not None
        device = str(run.net.like.device)
        environment = describe_environment(run.plan.seed, device, run.plan.command)
        environment |= run.plan.sharing
        replace(self.path / "environment.json", dumps(environment, indent=1))

    def write_data_overview(self, run: Run) -> None:
        """Write data.json: what was read from the user's own files. Other tasks have none."""
        overview = getattr(getattr(run, "task", None), "overview", None)
        if self.path is not None and isinstance(overview, Overview):
            replace(self.path / "data.json", dumps(overview.to_dict(), indent=1))


def description_as_json(plan: Plan) -> object:
    """The description of a run as it comes back from a JSON file, to compare with one that did."""
    return json.loads(dumps(plan.description))


def create_run_folder(folder: Path) -> None:
    """Create a run folder with its `checkpoints`; one that holds a run or files is refused.

    A name has at most 255 bytes on most systems; 200 characters leave room for what is added.
    """
    if len(str(folder.name)) > 200 or any(ord(c) < 32 for c in str(folder)):
        raise StorageError(
            f"run folder {str(folder)!r}: a name may have at most 200 characters and no control "
            "characters."
        )
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    refuse_if_occupied(folder)
    with storage_errors(folder):
        if not is_real_folder(folder / "checkpoints"):
            # another process may create it at the same moment: the lock decides between the two
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)


def refuse_if_occupied(folder: Path) -> None:
    """Refuse a folder with a run, or with any files but those that may be there before one.

    These are ALLOWED_BEFORE, and the temporary files of a process that was killed.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    leftovers = {name for name in names if name.startswith(".") and name.endswith(".tmp")}
    if not names - leftovers - set(ALLOWED_BEFORE):
        return
    if names & {"metrics.jsonl", "environment.json"} and "checkpoints" in names:
        raise occupied_error(folder)
    raise StorageError(f"{folder} exists and is not empty: choose another --out.")


def occupied_error(folder: Path) -> StorageError:
    """The error for a folder that holds a run: of the command line, or of Python."""
    if not os.path.lexists(folder / "config.yaml"):
        return StorageError(
            f"{folder} already holds a run, of co.train. Continue it there with resume=True; or "
            "choose another folder."
        )
    return StorageError(
        f"{folder} already holds a run. Resume it with: coadjoint resume "
        f"{shlex.quote(str(folder))}; or choose another --out."
    )
