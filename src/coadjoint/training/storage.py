"""Checkpoints and their manifests.

A checkpoint is written under another name, each file synced to the disk, a manifest of SHA-256 sums last, and renamed:
a folder called step-N is whole or damaged from outside, never half-written. The latest one is found by looking, not by a
pointer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from ..errors import MissingError, StorageError, error_text
from . import schemas
from .files import is_real_folder, read_regular, remove, storage_errors, sync_folder, write_new
from .json_rows import dumps, to_json_types

FORMAT = 1
MANIFEST = "manifest.sha256"
HALF_WRITTEN = re.compile(r"step-[0-9]+\.(tmp|old)")  # a checkpoint on its way in or out
MAX_STATE_BYTES = 50_000_000  # bytes of a state.json, and of a manifest
MAX_TENSOR_BYTES = (
    8 << 30
)  # bytes of a file of tensors, where nothing else tells how many to expect
SUM_IN_HEADER = (
    b'\\"sha256\\": \\"%s\\"'  # how the sum of a model stands in its header: JSON within JSON
)


def import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingError(
            "run folders store tensors with safetensors: pip install safetensors."
        ) from None
    return safetensors.torch


def pack(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return bytes(import_safetensors().save(whole, metadata))


def pack_model(tensors: dict[str, Tensor], description: dict[str, Any]) -> bytes:
    """The file of a model: its tensors, what network they belong to, and the SHA-256 sum of the file, in which zeros stand
    for the sum itself."""
    zeros = "0" * 64
    about = json.dumps(to_json_types({**description, "sha256": zeros}))
    content = pack(tensors, {"coadjoint": about})
    found = hashlib.sha256(content).hexdigest()
    blank, sealed = SUM_IN_HEADER % zeros.encode(), SUM_IN_HEADER % found.encode()
    assert content.count(blank) == 1
    return content.replace(blank, sealed)


def is_model_intact(file: BinaryIO, stated: str) -> bool:
    """Whether the file of a model has the sum that its description states. It is read in pieces."""
    sealed, blank = SUM_IN_HEADER % stated.encode(), SUM_IN_HEADER % (b"0" * 64)
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    if header.count(sealed) != 1:
        return False
    found = hashlib.sha256(length + header.replace(sealed, blank))
    while part := file.read(1 << 20):
        found.update(part)
    return found.hexdigest() == stated


def unpack(content: bytes, path: Path) -> dict[str, Tensor]:
    tensors = import_safetensors()
    from safetensors import SafetensorError

    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise StorageError(
            f"{path} is not a file of tensors: its header does not fit into its {len(content):,} bytes."
        )
    schemas.parse_header(content[8 : 8 + length], len(content) - 8 - length, path)
    try:
        return dict(tensors.load(content))
    except (SafetensorError, RuntimeError) as error:
        raise StorageError(f"{path} is not a file of tensors: {error_text(error)}.") from None


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on: weights, the optimiser's tensors, and the rest as JSON."""

    step: int
    model: dict[str, Tensor]
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def make_manifest(files: dict[str, bytes]) -> bytes:
    """One line for each file, as sha256sum writes them, and the sum of these lines."""
    lines = "".join(
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)
    )
    return (lines + f"# {hashlib.sha256(lines.encode()).hexdigest()}\n").encode()


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def save(parent: Path, checkpoint: Checkpoint, description: dict[str, Any] | None = None) -> Path:
    """Write step-N into `parent`: another name, sync, manifest, sync, rename, sync, and read it back."""
    model = (
        pack(checkpoint.model) if description is None else pack_model(checkpoint.model, description)
    )
    files = {
        "model.safetensors": model,
        "state.safetensors": pack(checkpoint.tensors),
        "state.json": dumps(
            {"format": FORMAT, "step": checkpoint.step, **checkpoint.state}, indent=1
        ).encode(),
    }
    final = parent / folder_name(checkpoint.step)
    temporary = final.with_suffix(".tmp")
    if not is_real_folder(parent):
        raise StorageError(
            f"{parent} is missing, and checkpoints belong there: make it, or start another run."
        )
    with storage_errors(final):
        try:
            remove(temporary)
            temporary.mkdir()
            for name, content in [*files.items(), (MANIFEST, make_manifest(files))]:
                write_new(temporary / name, content)
            sync_folder(temporary)
            os.rename(temporary, final)  # refused if it exists: a checkpoint is never overwritten
            sync_folder(final.parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    read_contents(final, max(len(content) for content in files.values()))
    return final


def read_contents(path: Path, most: int = MAX_TENSOR_BYTES) -> dict[str, bytes]:
    """The bytes of a checkpoint's files, at most `most` of each, every one of them checked; a damaged one is named."""
    damaged = lambda what: StorageError(f"checkpoint {path} is damaged: {what}.")
    found: dict[str, bytes] = {}
    for name in ("model.safetensors", "state.safetensors", "state.json", MANIFEST):
        try:
            found[name] = read_regular(
                path / name, most if name.endswith(".safetensors") else MAX_STATE_BYTES
            )
        except StorageError as error:
            raise damaged(str(error).rstrip(".")) from None
    listed = found.pop(MANIFEST)
    extra = sorted(p.name for p in path.iterdir() if p.name not in found and p.name != MANIFEST)
    if extra:
        raise damaged(f"{extra[0]} does not belong to it")
    if listed != make_manifest(found):
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


def load(path: Path, most: int = MAX_TENSOR_BYTES) -> Checkpoint:
    """A checkpoint whose files have their sums, of this format and step. What a run needs of it, the run itself demands."""
    files = read_contents(path, most)
    state = schemas.parse_json(files["state.json"], str(path / "state.json"))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        state = state if isinstance(state, dict) else {}
        raise StorageError(
            f"checkpoint {path} has format {ascii(state.get('format'))[:60]}; "
            f"this version of coadjoint reads format {FORMAT}."
        )
    step = state.get("step")
    if type(step) is not int or path.name != folder_name(step):
        raise StorageError(
            f"checkpoint {path} is damaged: it holds step {schemas.describe_value(step)}, not what its name says."
        )
    tensors = {
        name: unpack(files[name], path / name)
        for name in ("model.safetensors", "state.safetensors")
    }
    return Checkpoint(step, tensors["model.safetensors"], tensors["state.safetensors"], state)


def list_checkpoints(folder: Path, kind: str = "checkpoints") -> list[Path]:
    """The checkpoints of a run (or its replays), oldest first; links are refused."""
    if not is_real_folder(folder / kind):
        return []
    found = [p for p in (folder / kind).glob("step-*") if p.name[5:].isdecimal()]
    return sorted((p for p in found if is_real_folder(p)), key=lambda p: int(p.name[5:]))


@dataclass(frozen=True)
class CheckpointOutline:
    """What a checkpoint says of itself: enough to see, before anything is built, that it belongs to another run."""

    source: str
    description: Any
    outline: dict[str, Tensor]  # of its network: types and shapes


def read_outline(folder: Path, kind: str = "checkpoints") -> CheckpointOutline | None:
    """A look at the latest checkpoint (or replay); None where there is none, or it cannot be read: `load_latest` says why."""
    for path in reversed(list_checkpoints(folder, kind)):
        try:
            state = schemas.read(path / "state.json", schemas.State)
            header = schemas.read_header(path / "model.safetensors")
        except StorageError:
            continue
        return CheckpointOutline(
            f"checkpoint {path.name} of {folder}", state.get("description"), header.outline
        )
    return None


def load_latest(
    folder: Path,
    fallback: bool = False,
    say: Any = print,
    check: Callable[[Checkpoint], None] = lambda saved: None,
    most: int = MAX_TENSOR_BYTES,
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

    paths = list_checkpoints(folder)
    while paths:
        path = paths.pop()
        try:
            return checked(path)
        except StorageError as error:
            good = next((p for p in reversed(paths) if usable(p)), None)
            if good is None:
                offer = "There is no older one that is whole: start the run again."
            else:
                offer = f"The one before it, {good.name}, is whole: coadjoint resume {shlex.quote(str(folder))} --fallback"
            if not fallback or good is None:
                raise StorageError(f"{error} {offer}") from None
            aside = path.with_suffix(".damaged")
            with storage_errors(aside):
                remove(aside)
                os.rename(path, aside)
            say(f"{error} Set aside as {aside.name}; going on from {good.name}.")
    return None


def is_intact(path: Path) -> bool:
    try:
        read_contents(path)
    except StorageError:
        return False
    return True


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all checkpoints but the last `keep` and the best one, and what a crash has left half-written."""
    paths = list_checkpoints(folder)
    spare = {p.name for p in paths[-keep:]} | ({folder_name(best)} if best is not None else set())
    with storage_errors(folder):
        for path in paths:
            if path.name not in spare:
                doomed = path.with_suffix(
                    ".old"
                )  # a name that is not a checkpoint's, before its files go one by one
                remove(doomed)
                os.rename(path, doomed)
                remove(doomed)
        for path in (folder / "checkpoints").glob("step-*.*"):
            if HALF_WRITTEN.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    remove(path)
