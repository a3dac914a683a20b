"""Run folders: what a run writes, and how it survives.

    metrics.jsonl  clock.jsonl  result.json  environment.json  model.safetensors  checkpoints/step-00001000/

A checkpoint is written under another name, each file synced to the disk, a manifest of SHA-256 sums last, and renamed:
a folder called step-N is whole or damaged from outside, never half-written. The latest one is found by looking, not by a
pointer. Rows of metrics beyond a checkpoint are cut off when a run goes on from it, and computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .errors import MissingError, StorageError, said
from .files import (
    clear,
    inner,
    own,
    read_regular,
    replace,
    replacing,
    same,
    storing,
    sweep,
    sync_folder,
    write,
)  # fmt: skip

FORMAT = 1
MANIFEST = "manifest.sha256"
PART = 2**20  # bytes of a long file that are read at a time
HALF_WRITTEN = re.compile(r"step-[0-9]+\.(tmp|old)")  # a checkpoint on its way in or out
STATE = 50_000_000  # bytes of a state.json, and of a manifest
MOST = 8 << 30  # bytes of a file of tensors, where nothing else tells how many to expect
SEAL = b'\\"sha256\\": \\"%s\\"'  # how the sum of a model stands in its header: JSON within JSON


def plain(value: Any) -> Any:
    """The value in JSON's types: numbers that JSON lacks become the strings NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def dumps(value: Any, **options: Any) -> str:
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, **options)


class Lock:
    """One writer for one run folder: flock on the file `lock`, which names the owner. The kernel frees it with the process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        with storing(folder):
            self.file = own(self.path)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = self.file.read(200).decode(errors="replace").strip() or "another process"
            self.file.close()
            raise StorageError(
                f"run folder {folder} is in use by {owner}. Wait for it to end, or choose another --out."
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with storing(folder):
            self.file.truncate(0)
            self.file.write(f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            self.file.flush()
        if not same(self.file.fileno(), self.path):
            # removed before it was locked: the next process would make a file and lock that
            self.file.close()
            raise StorageError(f"{self.path} was removed while it was locked: let one process at a time use {folder}.")

    def release(self) -> None:
        self.file.close()


class Rows:
    """An append-only file of JSON lines that knows its length and its SHA-256."""

    def __init__(self, path: Path, at: dict[str, Any] | None = None) -> None:
        """Begin a new file, or go on after the first at["bytes"] bytes, whose sum must be at["sha256"]."""
        self.path = path
        self.file: BinaryIO
        self.bytes, self.sum = 0, hashlib.sha256()
        if at is not None and not os.path.lexists(path):
            raise StorageError(f"{path} is missing: the run cannot go on without the rows before its checkpoint.")
        with storing(path):
            self.file = own(path)
            try:
                if at is not None:
                    self.pass_over(at)
                self.file.truncate(self.bytes)
                self.file.seek(self.bytes)
            except BaseException:
                self.file.close()
                raise

    def pass_over(self, at: dict[str, Any]) -> None:
        """Take the rows that a checkpoint has recorded as they are; they must be those."""
        while self.bytes < at["bytes"] and (part := self.file.read(min(PART, at["bytes"] - self.bytes))):
            self.bytes += len(part)
            self.sum.update(part)
        if self.position != at:
            raise StorageError(
                f"{self.path} does not begin with the {at['bytes']:,} bytes its checkpoint recorded: it was "
                "changed or cut. Restore it, or start the run again."
            )

    @property
    def position(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sum.hexdigest()}

    def append(self, row: dict[str, Any]) -> None:
        line = (dumps(row, separators=(",", ":")) + "\n").encode()
        with storing(self.path):
            self.file.write(line)
        self.bytes += len(line)
        self.sum.update(line)

    def flush(self) -> None:
        with storing(self.path):
            self.file.flush()

    def sync(self) -> None:
        self.flush()
        with storing(self.path):
            os.fsync(self.file.fileno())

    def parts(self) -> Iterator[bytes]:
        """What was written so far, whatever has become of the path since."""
        self.flush()
        at = 0
        while at < self.bytes and (part := os.pread(self.file.fileno(), min(PART, self.bytes - at), at)):
            yield part
            at += len(part)

    def lines(self) -> Iterator[bytes]:
        rest = b""
        for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            yield from whole

    def rescue(self) -> str:
        """The path is not this file any more: write the rows once more, and say where. What stands there
        now is left alone."""
        to = self.path
        number = 0
        while os.path.lexists(to):
            number += 1
            to = self.path.with_name(f"{self.path.name}.kept-{number}")
        with replacing(to) as file:
            for part in self.parts():
                file.write(part)
        if to == self.path:
            return f"{self.path.name} was deleted while the run went on; its rows were put back"
        back = f"mv {shlex.quote(str(to))} {shlex.quote(str(self.path))}"
        return (
            f"{self.path.name} was replaced while the run went on; its rows are in {to.name}, and belong back: {back}"
        )

    def close(self) -> None:
        with storing(self.path):
            self.file.close()


@dataclass(frozen=True)
class Written:
    """The rows that a run has written, to be read when they are asked for: a long run has more than fit in memory."""

    path: Path
    bytes: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as files:
            try:
                file = files.enter_context(open(self.path, "rb"))
            except OSError as error:
                raise StorageError(
                    f"{self.path} cannot be read: {error.strerror}. The rows of a run stay there: put it back."
                ) from None
            left = self.bytes
            while left > 0 and (line := file.readline(left)):
                left -= len(line)
                yield revived(row(line, self.path))


def row(line: bytes, path: Path) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise StorageError(f"{path} holds a line that is not a row of metrics: {line[:60]!r}. Restore it.")
    return value


def revived(value: Any) -> Any:
    """What `plain` has made strings of, as numbers again."""
    if isinstance(value, dict):
        return {key: revived(v) for key, v in value.items()}
    if isinstance(value, list):
        return [revived(v) for v in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingError("run folders store tensors with safetensors: pip install safetensors.") from None
    return safetensors.torch


def schemas() -> Any:
    """The module that looks at what is read; what is written needs none."""
    try:
        from . import schemas
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        raise MissingError("reading a run folder needs pydantic: pip install pydantic.") from None
    return schemas


def pack(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return bytes(safetensors().save(whole, metadata))


def pack_model(tensors: dict[str, Tensor], description: dict[str, Any]) -> bytes:
    """The file of a model: its tensors, what network they belong to, and the SHA-256 sum of the file, in which zeros stand
    for the sum itself."""
    zeros = "0" * 64
    about = json.dumps(plain({**description, "sha256": zeros}))
    content = pack(tensors, {"coadjoint": about})
    found = hashlib.sha256(content).hexdigest()
    blank, sealed = SEAL % zeros.encode(), SEAL % found.encode()
    assert content.count(blank) == 1
    return content.replace(blank, sealed)


def unbroken(file: BinaryIO, stated: str) -> bool:
    """Whether the file of a model has the sum that its description states. It is read in pieces."""
    sealed, blank = SEAL % stated.encode(), SEAL % (b"0" * 64)
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    if header.count(sealed) != 1:
        return False
    found = hashlib.sha256(length + header.replace(sealed, blank))
    while part := file.read(1 << 20):
        found.update(part)
    return found.hexdigest() == stated


def misfit(expected: Mapping[str, Tensor], found: Mapping[str, Any]) -> str | None:
    """How tensors differ from those that are expected, by name, type and shape; None if they do not."""
    missing = sorted(set(expected) - set(found))
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        return f"it lacks {', '.join(missing[:6])}{more}"
    for name, given in sorted(found.items()):
        if name not in expected:
            return f"{name!a} does not belong to it"
        mine = expected[name]
        if not isinstance(given, Tensor) or given.dtype != mine.dtype or given.shape != mine.shape:
            return f"{name!a} is {told(given)}; expected {told(mine)}"
    return None


def told(value: Any) -> str:
    """A tensor in words: "float32 [3, 4]"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"the value {value!r}"


def unpack(content: bytes, path: Path) -> dict[str, Tensor]:
    tensors = safetensors()
    from safetensors import SafetensorError

    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise StorageError(f"{path} is not a file of tensors: its header does not fit into its {len(content):,} bytes.")
    schemas().header_of(content[8 : 8 + length], len(content) - 8 - length, path)
    try:
        return dict(tensors.load(content))
    except (SafetensorError, RuntimeError) as error:
        raise StorageError(f"{path} is not a file of tensors: {said(error)}.") from None


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on: weights, the optimiser's tensors, and the rest as JSON."""

    step: int
    model: dict[str, Tensor]
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def manifest(files: dict[str, bytes]) -> bytes:
    """One line for each file, as sha256sum writes them, and the sum of these lines."""
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return (lines + f"# {hashlib.sha256(lines.encode()).hexdigest()}\n").encode()


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def save(parent: Path, checkpoint: Checkpoint, description: dict[str, Any] | None = None) -> Path:
    """Write step-N into `parent`: another name, sync, manifest, sync, rename, sync, and read it back."""
    model = pack(checkpoint.model) if description is None else pack_model(checkpoint.model, description)
    files = {
        "model.safetensors": model,
        "state.safetensors": pack(checkpoint.tensors),
        "state.json": dumps({"format": FORMAT, "step": checkpoint.step, **checkpoint.state}, indent=1).encode(),
    }
    final = parent / name_of(checkpoint.step)
    temporary = final.with_suffix(".tmp")
    if not inner(parent):
        raise StorageError(f"{parent} is missing, and checkpoints belong there: make it, or start another run.")
    with storing(final):
        try:
            clear(temporary)
            temporary.mkdir()
            for name, content in [*files.items(), (MANIFEST, manifest(files))]:
                write(temporary / name, content)
            sync_folder(temporary)
            os.rename(temporary, final)  # refused if it exists: a checkpoint is never overwritten
            sync_folder(final.parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    contents(final, max(len(content) for content in files.values()))
    return final


def contents(path: Path, most: int = MOST) -> dict[str, bytes]:
    """The bytes of a checkpoint's files, at most `most` of each, every one of them checked; a damaged one is named."""
    damaged = lambda what: StorageError(f"checkpoint {path} is damaged: {what}.")
    found: dict[str, bytes] = {}
    for name in ("model.safetensors", "state.safetensors", "state.json", MANIFEST):
        try:
            found[name] = read_regular(path / name, most if name.endswith(".safetensors") else STATE)
        except StorageError as error:
            raise damaged(str(error).rstrip(".")) from None
    listed = found.pop(MANIFEST)
    extra = sorted(p.name for p in path.iterdir() if p.name not in found and p.name != MANIFEST)
    if extra:
        raise damaged(f"{extra[0]} does not belong to it")
    if listed != manifest(found):
        for name, content in found.items():
            if f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode() not in listed:
                whose = name if listed.startswith(manifest_head(listed)) else MANIFEST
                raise damaged(f"{whose} does not have the SHA-256 sum that {MANIFEST} gives")
        raise damaged(f"{MANIFEST} does not have its own SHA-256 sum")
    return found


def manifest_head(listed: bytes) -> bytes:
    """The manifest as it would be if its own sum were right; b"\\0" if it is not, so that nothing starts with it."""
    body, mark, end = listed.rpartition(b"# ")
    return listed if mark and hashlib.sha256(body).hexdigest().encode() + b"\n" == end else b"\0"


def load(path: Path, most: int = MOST) -> Checkpoint:
    """A checkpoint whose files have their sums, of this format and step. What a run needs of it, the run itself demands."""
    door = schemas()
    files = contents(path, most)
    state = door.parsed(files["state.json"], str(path / "state.json"))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        state = state if isinstance(state, dict) else {}
        raise StorageError(
            f"checkpoint {path} has format {ascii(state.get('format'))[:60]}; "
            f"this version of coadjoint reads format {FORMAT}."
        )
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or path.name != name_of(step):
        raise StorageError(f"checkpoint {path} is damaged: it holds step {door.shown(step)}, not what its name says.")
    tensors = {name: unpack(files[name], path / name) for name in ("model.safetensors", "state.safetensors")}
    return Checkpoint(step, tensors["model.safetensors"], tensors["state.safetensors"], state)


def saved(folder: Path, kind: str = "checkpoints") -> list[Path]:
    """The checkpoints of a run (or its replays), oldest first; links are refused."""
    if not inner(folder / kind):
        return []
    found = [p for p in (folder / kind).glob("step-*") if p.name[5:].isdecimal()]
    return sorted((p for p in found if inner(p)), key=lambda p: int(p.name[5:]))


@dataclass(frozen=True)
class Glimpse:
    """What a checkpoint says of itself: enough to see, before anything is built, that it belongs to another run."""

    source: str
    description: Any
    outline: dict[str, Tensor]  # of its network: types and shapes


def glimpse(folder: Path, kind: str = "checkpoints") -> Glimpse | None:
    """A look at the latest checkpoint (or replay); None where there is none, or it cannot be read: `latest` says why."""
    door = schemas()
    for path in reversed(saved(folder, kind)):
        try:
            state = door.read(path / "state.json", door.State)
            header = door.read_header(path / "model.safetensors")
        except StorageError:
            continue
        return Glimpse(f"checkpoint {path.name} of {folder}", state.get("description"), header.outline)
    return None


def latest(
    folder: Path,
    fallback: bool = False,
    say: Any = print,
    check: Callable[[Checkpoint], None] = lambda saved: None,
    most: int = MOST,
) -> Checkpoint | None:
    """The latest checkpoint; None if there is none yet. One that is damaged, or lacks what `check` demands, is refused by
    name, or set aside with `fallback`."""

    def checked(path: Path) -> Checkpoint:
        found = load(path, most)
        try:
            check(found)
        except StorageError as error:
            raise StorageError(f"checkpoint {path} does not fit this run: {error}") from None
        return found

    def usable(path: Path) -> bool:
        try:
            checked(path)
        except StorageError:
            return False
        return True

    paths = saved(folder)
    while paths:
        path = paths.pop()
        try:
            return checked(path)
        except StorageError as error:
            good = next((p for p in reversed(paths) if usable(p)), None)
            if good is None:
                offer = "There is no older one that is whole: start the run again."
            else:
                offer = (
                    f"The one before it, {good.name}, is whole: coadjoint resume {shlex.quote(str(folder))} --fallback"
                )
            if not fallback or good is None:
                raise StorageError(f"{error} {offer}") from None
            aside = path.with_suffix(".damaged")
            with storing(aside):
                clear(aside)
                os.rename(path, aside)
            say(f"{error} Set aside as {aside.name}; going on from {good.name}.")
    return None


def whole(path: Path) -> bool:
    try:
        contents(path)
    except StorageError:
        return False
    return True


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all checkpoints but the last `keep` and the best one, and what a crash has left half-written."""
    paths = saved(folder)
    spare = {p.name for p in paths[-keep:]} | ({name_of(best)} if best is not None else set())
    with storing(folder):
        for path in paths:
            if path.name not in spare:
                doomed = path.with_suffix(".old")  # a name that is not a checkpoint's, before its files go one by one
                clear(doomed)
                os.rename(path, doomed)
                clear(doomed)
        for path in (folder / "checkpoints").glob("step-*.*"):
            if HALF_WRITTEN.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    clear(path)


def create(folder: Path, need: int) -> None:
    """Make a new run folder, and be sure that it can be written and has room, before anything is computed."""
    if len(str(folder.name)) > 200 or any(ord(c) < 32 for c in str(folder)):
        raise StorageError(f"run folder {str(folder)!r}: a name has at most 200 characters and no control characters.")
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    vacant(folder)
    with storing(folder):
        if not inner(folder / "checkpoints"):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)  # another process may have been quicker
        free = shutil.disk_usage(folder).free
    if free < need:
        raise StorageError(
            f"{folder} has {free:,} bytes free and this run needs about {need:,}: make room, or choose another --out."
        )


def vacant(folder: Path) -> None:
    """Be sure that no run has begun here: nothing but what comes before it, and what a crash then has left half-written."""
    before = ("lock", "checkpoints", "config.yaml", "online.json")
    here = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if all(name in before or (name.startswith(".") and name.endswith(".tmp")) for name in here):
        return
    if here & {"metrics.jsonl", "environment.json"} and "checkpoints" in here:
        raise StorageError(
            f"{folder} already holds a run. Go on with it: coadjoint resume {shlex.quote(str(folder))}; or choose another --out."
        )
    raise StorageError(f"{folder} exists and is not empty: choose another --out.")


@dataclass(frozen=True)
class Held:
    """A run folder in the hands of its one writer. past: whether a checkpoint was there to go on from."""

    folder: Path
    lock: Lock
    metrics: Rows
    clock: Rows
    past: bool

    def sync(self) -> None:
        """Be sure, before every checkpoint, that all files are where they were, and the rows on the disk.

        Without this, a run whose files were deleted would write into nothing and end as if all were
        well."""
        resume = f"coadjoint resume {shlex.quote(str(self.folder))}"
        if not inner(self.folder / "checkpoints"):
            raise StorageError(
                f"{self.folder} (or checkpoints in it) was deleted or moved while the run went on: nothing "
                f"more can be saved. Put it back and go on from its last checkpoint: {resume}; or start the "
                "run again."
            )
        if not same(self.lock.file.fileno(), self.lock.path):
            raise StorageError(
                f"{self.lock.path} was deleted or replaced while the run went on: another process may be "
                f"writing there. Be sure that none does, and go on from the last checkpoint: {resume}"
            )
        said = []
        for rows in (self.metrics, self.clock):
            if not same(rows.file.fileno(), rows.path):
                said.append(rows.rescue())
        if said:
            raise StorageError(f"{self.folder}: {'; '.join(said)}. Go on from the last checkpoint: {resume}")
        self.metrics.sync()
        self.clock.sync()


@contextlib.contextmanager
def held(
    folder: Path,
    resume: bool,
    fallback: bool,
    need: int,
    about: Callable[[], dict[str, Any]],
    check: Callable[[Checkpoint], None],
    restore: Callable[[Checkpoint], None],
    say: Callable[[str], None],
    most: int = MOST,
) -> Iterator[Held]:
    """Hold a run folder, new (it will take `need` bytes) or one to go on with: one writer, metrics and clock open, and the
    past, if there is one, found to be whole by `check` and put back by `restore`. A file of its checkpoints has at most
    `most` bytes."""
    safetensors()
    if not resume:
        create(folder, need)
    elif not inner(folder / "checkpoints"):
        raise StorageError(f"{folder} holds no run to go on with (checkpoints is missing).")
    lock = Lock(folder)
    try:
        if not resume:
            vacant(folder)  # another run may have come and gone before the lock was ours
        sweep(folder)
        saved = latest(folder, fallback, say, check, most) if resume else None
        if saved is not None:
            restore(saved)
        else:
            if resume:
                say("There is no checkpoint yet: the run begins again at step 0.")
            replace(folder / "environment.json", dumps(about(), indent=1))
        at = saved.state if saved else {"metrics": None, "clock": None}
        with contextlib.ExitStack() as files:
            metrics = Rows(folder / "metrics.jsonl", at["metrics"])
            files.callback(metrics.close)
            clock = Rows(folder / "clock.jsonl", at["clock"])
            files.callback(clock.close)
            yield Held(folder, lock, metrics, clock, saved is not None)
    finally:
        lock.release()


def environment(seed: int, device: str, command: str | None = None) -> dict[str, Any]:
    """Where and with what a run was made."""
    from . import __version__

    command = command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "coadjoint": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "seed": seed,
        "revision": revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command.encode(errors="backslashreplace").decode(),  # names of files need not be UTF-8
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def revision() -> str | None:
    """The git revision of this package's source, with a plus sign if it was changed; None if it is not in a repository."""
    here = Path(__file__).parent
    git = lambda *words: subprocess.run(
        ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=5, check=True
    ).stdout.strip()
    try:
        if not git("ls-files", "--", "runs.py"):
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
