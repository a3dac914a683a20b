"""Checkpoints and their manifests.

A checkpoint is written under another name: each file is synced to disk, a manifest of SHA-256
checksums comes last, and then the folder is renamed. So a folder called step-N is never
half-written; if it is not intact, something else has damaged it. The latest checkpoint is found by
listing the folder, not by a pointer.
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
from types import ModuleType
from typing import BinaryIO

from torch import Tensor

from ..errors import MissingError, StorageError, error_text
from . import schemas
from .files import is_real_folder, read_regular, remove, storage_errors, sync_folder, write_new
from .json_rows import dumps, to_json_types
from .json_types import JsonObject

FORMAT = 1
MANIFEST = "manifest.sha256"
TENSOR_FILES = ("model.safetensors", "state.safetensors")
HALF_WRITTEN = re.compile(r"step-[0-9]+\.(tmp|old)")  # being written, or being removed
MAX_STATE_BYTES = 50_000_000  # of a state.json, and of a manifest
MAX_TENSOR_BYTES = 8 << 30  # of a file of tensors whose size is not known beforehand
SUM_IN_HEADER = b'\\"sha256\\": \\"%s\\"'  # the sum in the header of a model: JSON within JSON
ZEROS = b"0" * 64  # in place of the sum while it is computed


def import_safetensors() -> ModuleType:
    """The module safetensors.torch; MissingError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise MissingError(
            "run folders store tensors with safetensors: pip install safetensors."
        ) from None
    return safetensors.torch


def pack(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors. metadata: texts for its header."""
    # copies, because safetensors refuses tensors that share memory
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return bytes(import_safetensors().save(copies, metadata))


def pack_model(tensors: dict[str, Tensor], description: JsonObject) -> bytes:
    """The bytes of a model file: tensors, description, and the SHA-256 sum of the file itself.

    The sum is computed with zeros in its place.
    """
    with_zeros = json.dumps(to_json_types({**description, "sha256": ZEROS.decode()}))
    content = pack(tensors, {"coadjoint": with_zeros})
    digest = hashlib.sha256(content).hexdigest()
    blank = SUM_IN_HEADER % ZEROS
    assert content.count(blank) == 1
    return content.replace(blank, SUM_IN_HEADER % digest.encode())


def is_model_intact(file: BinaryIO, stated: str) -> bool:
    """Whether a model file has the SHA-256 sum `stated` in its own header.

    The sum was computed with zeros in its place, so they are put back. A file may be larger than
    memory: it is read in blocks.
    """
    entry = SUM_IN_HEADER % stated.encode()
    length = file.read(8)  # a file is 8 bytes with the header's length, the header, the tensors
    header = file.read(int.from_bytes(length, "little"))
    if header.count(entry) != 1:
        return False
    blank = SUM_IN_HEADER % ZEROS
    digest = hashlib.sha256(length + header.replace(entry, blank))
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest() == stated


def unpack(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file; `path` is for errors."""
    safetensors = import_safetensors()
    from safetensors import SafetensorError

    length = int.from_bytes(content[:8], "little")  # of the header, which follows these 8 bytes
    if len(content) < 8 or length > len(content) - 8:
        raise StorageError(
            f"{path} is not a file of tensors: its header does not fit into its "
            f"{len(content):,} bytes."
        )
    schemas.parse_header(content[8 : 8 + length], len(content) - 8 - length, path)
    try:
        return dict(safetensors.load(content))
    except (SafetensorError, RuntimeError) as error:
        raise StorageError(f"{path} is not a file of tensors: {error_text(error)}.") from None


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to resume: weights, the optimiser's tensors, and the rest as JSON."""

    step: int
    model: dict[str, Tensor]
    tensors: dict[str, Tensor]
    state: JsonObject


def manifest_line(name: str, content: bytes) -> str:
    """A file's line in a manifest, as sha256sum writes it."""
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n"


def make_manifest(files: dict[str, bytes]) -> bytes:
    """A line with the SHA-256 sum of each file, and then "# " with the sum of these lines."""
    lines = "".join(manifest_line(name, files[name]) for name in sorted(files))
    return (lines + f"# {hashlib.sha256(lines.encode()).hexdigest()}\n").encode()


def is_manifest_intact(manifest: bytes) -> bool:
    """Whether a manifest ends with the sum of its own lines."""
    lines, mark, stated = manifest.rpartition(b"# ")
    return bool(mark) and hashlib.sha256(lines).hexdigest().encode() + b"\n" == stated


def folder_name(step: int) -> str:
    """The name of a checkpoint's folder: step-00001000."""
    return f"step-{step:08d}"


def save(parent: Path, checkpoint: Checkpoint, description: JsonObject | None = None) -> Path:
    """Write a folder step-N into `parent`, read it back to check it, and return its path.

    It is written under another name and renamed at the end, so that it is never half-written.
    description: what model.safetensors says about itself; without it the file has no sum either.
    """
    if description is None:
        model = pack(checkpoint.model)
    else:
        model = pack_model(checkpoint.model, description)
    state = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state}
    files = {
        "model.safetensors": model,
        "state.safetensors": pack(checkpoint.tensors),
        "state.json": dumps(state, indent=1).encode(),
    }
    final = parent / folder_name(checkpoint.step)
    temporary = final.with_suffix(".tmp")
    if not is_real_folder(parent):
        raise StorageError(
            f"{parent} is missing, but checkpoints are stored there: create it, or start a new run."
        )
    with storage_errors(final):
        try:
            remove(temporary)
            temporary.mkdir()
            for name, content in files.items():
                write_new(temporary / name, content)
            write_new(temporary / MANIFEST, make_manifest(files))
            sync_folder(temporary)
            os.rename(temporary, final)  # fails if it exists: a checkpoint is never overwritten
            sync_folder(final.parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    read_contents(final, max(len(content) for content in files.values()))
    return final


def read_contents(path: Path, most: int = MAX_TENSOR_BYTES) -> dict[str, bytes]:
    """The bytes of a checkpoint's files, checked against the manifest.

    A damaged or foreign file is named in the error; one of more than `most` bytes is refused.
    """
    contents: dict[str, bytes] = {}
    for name in (*TENSOR_FILES, "state.json", MANIFEST):
        limit = most if name in TENSOR_FILES else MAX_STATE_BYTES
        try:
            contents[name] = read_regular(path / name, limit)
        except StorageError as error:
            raise damaged(path, str(error).rstrip(".")) from None
    foreign = sorted(p.name for p in path.iterdir() if p.name not in contents)
    if foreign:
        raise damaged(path, f"{foreign[0]} does not belong to it")
    manifest = contents.pop(MANIFEST)
    if manifest == make_manifest(contents):
        return contents
    for name, content in contents.items():
        if manifest_line(name, content).encode() not in manifest:
            # With a damaged manifest it is not known which of the two is wrong.
            culprit = name if is_manifest_intact(manifest) else MANIFEST
            raise damaged(path, f"{culprit} does not match its SHA-256 checksum in {MANIFEST}")
    raise damaged(path, f"{MANIFEST} does not match its own SHA-256 checksum")


def damaged(path: Path, fault: str) -> StorageError:
    """The error for a damaged checkpoint. fault: what is wrong, in words."""
    return StorageError(f"checkpoint {path} is damaged: {fault}.")


def load(path: Path, most: int = MAX_TENSOR_BYTES) -> Checkpoint:
    """The checkpoint at a path; one that is damaged or of another format is refused.

    most: bytes of a file of tensors. The run itself checks that it finds what it needs.
    """
    files = read_contents(path, most)
    state = schemas.parse_json(files["state.json"], str(path / "state.json"))
    if not isinstance(state, dict):
        state = {}  # has no format, and is refused for that
    if state.get("format") != FORMAT:
        raise StorageError(
            f"checkpoint {path} has format {ascii(state.get('format'))[:60]}; "
            f"this version of coadjoint reads format {FORMAT}."
        )
    step = state.get("step")
    if type(step) is not int or path.name != folder_name(step):
        step_text = schemas.describe_value(step)
        raise damaged(path, f"it holds step {step_text}, which does not match its name")
    model = unpack(files["model.safetensors"], path / "model.safetensors")
    tensors = unpack(files["state.safetensors"], path / "state.safetensors")
    return Checkpoint(step, model, tensors, state)


def list_checkpoints(folder: Path, kind: str = "checkpoints") -> list[Path]:
    """The checkpoints of a run (or its replays, kind "replay"), oldest first; links are refused.

    step-N.tmp, step-N.old and step-N.damaged are no checkpoints.
    """
    if not is_real_folder(folder / kind):
        return []
    # name[5:] is what follows "step-"
    numbered = [p for p in (folder / kind).glob("step-*") if p.name[5:].isdecimal()]
    return sorted((p for p in numbered if is_real_folder(p)), key=lambda p: int(p.name[5:]))


@dataclass(frozen=True)
class CheckpointOutline:
    """A checkpoint's description and shapes: enough to see that it belongs to another run."""

    source: str
    description: object
    outline: dict[str, Tensor]  # of its network: types and shapes


def read_outline(folder: Path, kind: str = "checkpoints") -> CheckpointOutline | None:
    """The outline of the latest checkpoint that can be read (of the latest replay: kind "replay").

    None without one: `load_latest` says why.
    """
    for path in reversed(list_checkpoints(folder, kind)):
        try:
            state = schemas.read(path / "state.json", schemas.State)
            header = schemas.read_header(path / "model.safetensors")
        except StorageError:
            continue
        source = f"checkpoint {path.name} of {folder}"
        return CheckpointOutline(source, state.get("description"), header.outline)
    return None


def accept_any(saved: Checkpoint) -> None:
    """Refuse nothing: a `check` for any checkpoint."""


def load_latest(
    folder: Path,
    fallback: bool = False,
    say: Callable[[str], object] = print,
    check: Callable[[Checkpoint], None] = accept_any,
    most: int = MAX_TENSOR_BYTES,
) -> Checkpoint | None:
    """The latest checkpoint; None if there is none yet.

    One that is damaged, or that `check` refuses, raises an error that names it; with `fallback` it
    is renamed step-N.damaged, which `say` tells, if an older one can be used. most: bytes of a
    file of tensors.
    """
    paths = list_checkpoints(folder)
    while paths:
        path = paths.pop()
        try:
            return load_checked(path, check, most)
        except StorageError as error:
            usable = (p for p in reversed(paths) if is_usable(p, check, most))
            older = next(usable, None)
            if older is None:
                raise StorageError(
                    f"{error} No older checkpoint is intact: start a new run."
                ) from None
            if not fallback:
                command = f"coadjoint resume {shlex.quote(str(folder))} --fallback"
                raise StorageError(
                    f"{error} The previous checkpoint, {older.name}, is intact. Resume from it "
                    f"with: {command}"
                ) from None
            aside = path.with_suffix(".damaged")
            with storage_errors(aside):
                remove(aside)
                os.rename(path, aside)
            say(f"{error} Set aside as {aside.name}; resuming from {older.name}.")
    return None


def load_checked(path: Path, check: Callable[[Checkpoint], None], most: int) -> Checkpoint:
    """A checkpoint that is intact and passes `check`."""
    checkpoint = load(path, most)
    try:
        check(checkpoint)
    except StorageError as error:
        raise StorageError(f"checkpoint {path} does not fit this run: {error}") from None
    return checkpoint


def is_usable(path: Path, check: Callable[[Checkpoint], None], most: int) -> bool:
    """Whether a checkpoint is intact and passes `check`."""
    try:
        load_checked(path, check, most)
    except StorageError:
        return False
    return True


def is_intact(path: Path) -> bool:
    """Whether the files of a checkpoint have the sums in its manifest."""
    try:
        read_contents(path)
    except StorageError:
        return False
    return True


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all checkpoints but the last `keep` and the best one, and what crashes left behind.

    best: the step of the best one, if there is one.
    """
    paths = list_checkpoints(folder)
    names_to_keep = {p.name for p in paths[-keep:]}
    if best is not None:
        names_to_keep.add(folder_name(best))
    with storage_errors(folder):
        for path in paths:
            if path.name not in names_to_keep:
                # Renamed first: a crash between two files must not leave half a checkpoint.
                doomed = path.with_suffix(".old")
                remove(doomed)
                os.rename(path, doomed)
                remove(doomed)
        for path in (folder / "checkpoints").glob("step-*.*"):
            if HALF_WRITTEN.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    remove(path)
