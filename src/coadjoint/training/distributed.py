"""One run on many processes: rank 0 owns the folder and decides, the others follow.

    torchrun --nproc-per-node 4 -m coadjoint train addition --cell lstm
    torchrun --nproc-per-node 4 script.py                   with co.train(..., distributed=True)

Every process draws the same batches and takes the same steps; co.Shared has each of them evaluate
its share. Rank 0 alone writes, shows and validates, and its word is broadcast: whether the run is
over, the best step, the random numbers. A signal to any process travels with the next gradient, so
that all stop after the same step.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..errors import CoadjointError, InputError, LostProcess, NumericalError
from ..gradients.method import Method
from ..gradients.processes import is_group_there, noticing_deaths
from ..gradients.shared import Shared
from ..networks.interface import Net
from ..tasks.task import Task
from . import launched
from .json_types import JsonObject, Row
from .meeting import MEETING_TIMEOUT, meet, noticing_absence
from .plan import TrainingPlan
from .progress import Result
from .restore import load_weights
from .signals import STOP_SIGNALS, Interrupted
from .storage import Checkpoint
from .trainer import Training

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

STEP_TIMEOUT = timedelta(minutes=30)  # processes are never further apart than a step
WORD_TIMEOUT = timedelta(days=1)  # rank 0 may validate, read or write for long
PATIENCE = 10.0  # seconds
SENT_APART = ("network", "row_source")  # of a Result


@dataclass
class Group:
    """The processes of a run."""

    rank: int
    size: int
    words: dist.ProcessGroup | None = None  # for rank 0's word, always on the CPU
    store: Store | None = None  # for last words; None in a process group of the user's

    def word(self, value: T) -> T:
        """Rank 0's value, on every process."""
        box = [value]
        with noticing_deaths():
            dist.broadcast_object_list(box, src=0, group=self.words)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, on every process."""
        values = [value] * self.size  # to be overwritten
        with noticing_deaths():
            dist.all_gather_object(values, value, group=self.words)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, an error of one process is raised by all at the end; rank 0's comes first."""
        error: CoadjointError | None = None
        try:
            yield
        except LostProcess:
            raise
        except CoadjointError as caught:
            error = caught
        said = None if error is None else (type(error).__name__, str(error))
        for rank, words in enumerate(self.gather(said)):
            if words is None:
                continue
            if rank == self.rank and error is not None:
                raise error
            kind = getattr(errors, words[0], CoadjointError)
            where = "" if rank == 0 else f"process {rank}: "
            raise kind.__new__(kind, where + words[1])

    def speaks(self, error: CoadjointError) -> bool:
        """Whether this process is the one to print an error: each is printed once.

        Errors that all processes raise are rank 0's to print. If a process is gone, the first to
        notice says so, with the last words of that process if it had any.
        """
        if self.store is None or not isinstance(error, LostProcess):
            if self.rank > 0:
                self._leave("note", f"process {self.rank}: {error}")
            return self.rank == 0
        note = self._find("note")
        if note is not None:
            error.args = (f"{note} {error}",)
        with contextlib.suppress(RuntimeError):
            return int(self.store.add("speakers", 1)) == 1 and self._find("spoken") is None
        return True  # nobody can tell

    def has_spoken(self) -> None:
        """Let the others end: torchrun ends all processes as soon as one has."""
        self._leave("spoken", "yes")

    def wait_for_speaker(self) -> None:
        """Wait until an error has been printed, at most PATIENCE seconds."""
        began = time.monotonic()
        while self._find("spoken") is None and time.monotonic() - began < PATIENCE:
            time.sleep(0.02)

    def _leave(self, key: str, text: str) -> None:
        """Leave a note for the other processes."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(key, text)

    def _find(self, key: str) -> str | None:
        """A note that a process has left; None if there is none, or nobody can tell any more."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                return bytes(self.store.get(key)).decode() if self.store.check([key]) else None
        return None

    def leave(self) -> None:
        """Close the connections, if `join` has opened them."""
        if self.store is not None and is_group_there():
            dist.destroy_process_group()


def join() -> Group:
    """The processes that torchrun has started, connected; without torchrun this one alone.

    gloo carries what lies on the CPU, nccl what lies on GPUs if every process has one of its own.
    """
    if is_group_there():
        with noticing_absence():
            words = dist.new_group(backend="gloo", timeout=WORD_TIMEOUT)
        return Group(dist.get_rank(), dist.get_world_size(), words)
    if not launched.is_launched():
        return Group(0, 1)
    backend = "gloo"
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(launched.local_rank() % gpus)
        if gpus >= launched.local_size():
            backend = "cpu:gloo,cuda:nccl"
    with noticing_absence():
        found = dist.rendezvous("env://", timeout=MEETING_TIMEOUT)  # type: ignore[attr-defined]
        store, rank, size = next(iter(found))
        word = meet(store, rank, size, MEETING_TIMEOUT)
        store = dist.PrefixStore(word, store)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT
        )
        words = dist.new_group(backend="gloo", timeout=WORD_TIMEOUT)
    notes = dist.PrefixStore("notes", store)  # type: ignore[attr-defined]
    return Group(rank, size, words, notes)


@contextlib.contextmanager
def joined(distributed: bool = True) -> Iterator[Group]:
    """Inside, the processes are connected: see `join`. Not `distributed`: this process alone."""
    group = join() if distributed else Group(rank=0, size=1)
    try:
        yield group
    finally:
        group.leave()


def shards_for(group: Group, shards: int | None, method: Method | None) -> int | None:
    """The number of shards of a run on these processes; fewer shards than processes are refused.

    shards: None for as many as there are processes; a method that is shared already has its own.
    """
    if isinstance(method, Shared):
        return shards
    count = shards or group.size
    if group.size > count:
        raise InputError(
            f"{group.size} processes cannot share {count} shard{'s' if count > 1 else ''}: start "
            f"at most {count}."
        )
    return count


class SharedTraining(Training):
    """A run on several processes. `carry_out_together` is the loop over its steps."""

    def __init__(self, net: Net, task: Task, plan: TrainingPlan, group: Group) -> None:
        """plan: without a folder, a display and loggers on all processes but rank 0."""
        super().__init__(net, task, plan)
        assert isinstance(plan.method, Shared)
        self.group = group
        self.shared = plan.method
        self.resume_hint = ""  # known to rank 0 alone until the folder is open

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0."""
        return self.group.rank == 0

    @contextlib.contextmanager
    def opened(self, resume: bool, fallback: bool) -> Iterator[list[str]]:
        """Open the folder on rank 0, and put the other processes where rank 0 is.

        Yields a list that receives the names of signals to this process.
        """
        with contextlib.ExitStack() as stack:
            with self.group.together():
                opening = self.folder.open(self, resume and self.leads, fallback)
                stopped = stack.enter_context(opening)
            saved = self.group.word(on_cpu(self.snapshot()) if self.leads else None)
            if not self.leads:
                assert saved is not None
                load_weights(self.net, saved.model, "the weights of rank 0")
                self.restore(saved)
            self.resume_hint = self.group.word(self.folder.resume_hint)
            self.follow()
            yield stopped

    def log(self, row: Row) -> None:
        """Log a row, on rank 0."""
        if self.leads:
            super().log(row)

    def end_step(self) -> None:
        """Note whether the run is over; where time is limited, by rank 0's clock."""
        super().end_step()
        if self.plan.seconds is not None:
            self.is_over = self.group.word(self.is_over)

    def validate(self) -> None:
        """Validate on rank 0; the others follow."""
        if self.leads:
            super().validate()
        self.follow()

    def follow(self) -> None:
        """Take over what rank 0 has decided; refuse to go on if the weights have parted."""
        decided = None
        if self.leads:
            decided = (
                asdict(self.progress),
                self.is_over,
                self.status,
                self.checkpoint_due,
                torch.get_rng_state(),
            )
        told = self.group.gather((fingerprint(self.net), decided))
        for rank, (mark, _) in enumerate(told):
            if mark != told[0][0]:
                raise NumericalError(
                    f"step {self.step}: the weights of process {rank} are not those of process 0, "
                    "although both took the same steps: use machines with the same processor and "
                    "the same torch"
                )
        decided = told[0][1]
        assert decided is not None
        progress, self.is_over, self.status, self.checkpoint_due, rng_state = decided
        vars(self.progress).update(progress)
        torch.set_rng_state(rng_state)

    def save(self) -> None:
        """Write a checkpoint, on rank 0."""
        self.checkpoint_due = False
        if self.leads:
            super().save()

    def stop(self, signal_name: str) -> Interrupted:
        """Save a run that a signal stopped; returns the error to raise."""
        text = ""
        if self.leads:
            text = str(self.folder.save_interrupted(self, signal_name))
        return Interrupted(self.group.word(text))

    def finish(self) -> Result:
        """Save the run on rank 0; every process returns its result, with the same weights."""
        sent = None
        if self.leads:
            result = super().finish()
            weights = {name: value.cpu() for name, value in self.net.state_dict().items()}
            sent = (fields_to_send(result), weights)
        received = self.group.word(sent)
        if self.leads:
            return result
        assert received is not None
        values, weights = received
        self.net.load_state_dict(weights)
        return Result(network=self.net, row_source=[], **values)


def carry_out_together(run: SharedTraining, resume: bool, fallback: bool) -> Result:
    """Step, validate and save, all processes at once, until the run is over or stopped.

    resume: continue the run in rank 0's folder. fallback: from an older checkpoint if need be.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(saying_how_to_resume(run))
        stack.enter_context(closing(run.display))
        stopped = stack.enter_context(run.opened(resume, fallback))
        if run.step == 0:  # the metrics of the initial weights
            run.validate()
        run.shared.read_signal = partial(signal_number, stopped)
        while not run.is_over:
            run.advance()
            if run.step % run.plan.every == 0 or run.is_over:
                run.validate()
            if run.shared.heard and not run.is_over:
                raise run.stop(STOP_SIGNALS[run.shared.heard - 1].name)
            if run.checkpoint_due:
                run.save()
        return run.finish()


@contextlib.contextmanager
def saying_how_to_resume(run: SharedTraining) -> Iterator[None]:
    """Inside, the error about a process that died says how the run can be resumed."""
    try:
        yield
    except LostProcess as error:
        error.args = (f"{error} {run.resume_hint}".rstrip(),)
        raise


def signal_number(stopped: list[str]) -> int:
    """The first signal that this process received, as a number from 1; 0 for none."""
    if not stopped:
        return 0
    return 1 + [s.name for s in STOP_SIGNALS].index(stopped[0])


def on_cpu(saved: Checkpoint) -> Checkpoint:
    """A checkpoint that can be sent: its tensors on the CPU."""
    model = {name: value.cpu() for name, value in saved.model.items()}
    tensors = {name: value.cpu() for name, value in saved.tensors.items()}
    return Checkpoint(saved.step, model, tensors, saved.state)


def fields_to_send(result: Result) -> JsonObject:
    """The fields of a Result, but for the network and the rows, which stay with their process."""
    names = [f.name for f in fields(result) if f.name not in SENT_APART]
    return {name: getattr(result, name) for name in names}


def fingerprint(net: Net) -> int:
    """A checksum of the weights."""
    total = 0
    for p in net.parameters():
        total = zlib.crc32(bytes_of(p), total)
    return total


def bytes_of(values: Tensor) -> bytes:
    """The bytes of a tensor."""
    return values.detach().cpu().contiguous().numpy().tobytes()
