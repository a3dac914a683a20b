"""Schemas: what each file of a run folder must hold, and the one door through which these files are read.

A run folder may come from a stranger, or from a disk that has lost a bit. Nothing is taken from its files before they were
looked at here: by their kind and size before they are read, by name, type and range afterwards. What does not hold is one
line that names the file and the key. Keys that a file has beyond these are left alone: a later version may have written them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from ..errors import CoadjointError, StorageError
from ..tasks.description import Description
from . import files, settings
from .optional_pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

MOST = 50_000_000  # bytes of a JSON file
HEADER = 32 << 20  # bytes of the header of a file of tensors
LINE = 4 << 20  # bytes of a row of metrics.jsonl or clock.jsonl
NAMES_OF_NUMBERS = ("NaN", "Infinity", "-Infinity")  # as runs.plain spells what JSON lacks


def is_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if value in NAMES_OF_NUMBERS:
        return value
    raise ValueError(f"should be a number, or one of {', '.join(NAMES_OF_NUMBERS)}")


def all_different(values: list[str] | None) -> list[str] | None:
    if values is not None and len(set(values)) < len(values):
        raise ValueError("should be different from each other")
    return values


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[Any, AfterValidator(is_number)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sum = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # SHA-256
Labels = Annotated[list[str], AfterValidator(all_different)]


class Checked(BaseModel):
    """What a file must hold. `advice` says what to do about one that does not."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    advice: ClassVar[str] = ""


# result.json
class Result(Checked):
    """result.json, of any run."""

    advice: ClassVar[str] = "Restore it, or delete it: `coadjoint resume` then writes it anew."
    status: Literal["success", "finished", "early-stopped", "interrupted", "failed"]
    step: Count
    seconds: NotNegative
    reason: str | None
    metric: str
    metrics: dict[str, dict[str, Number]]
    parameters: Count


class TrainingResult(Result):
    """result.json, of a run that can be compared with others."""

    success: bool
    success_step: Count | None
    success_seconds: NotNegative | None
    success_work: NotNegative | None = None
    work: NotNegative | None = None
    goal: str | None

    @model_validator(mode="after")
    def a_success_has_a_time(self) -> TrainingResult:
        if self.success and (self.success_step is None or self.success_seconds is None):
            raise ValueError("a success should have a success_step and success_seconds")
        return self


# compare.json
class ComparedRun(Checked):
    seed: Count
    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    status: str | None = None
    success: bool | None = None
    steps: Count | None = None
    seconds: NotNegative | None = None
    work: NotNegative | None = None
    metric: Number | None = None
    error: str | None = None


class ComparedRow(Checked):
    task: str
    metric: str
    goal: str | None
    name: str
    settings: dict[str, Any] = {}
    budget: dict[Literal["gradients", "seconds"], NotNegative] = {}
    pace: Finite = 0.0
    runs: list[ComparedRun]


class Comparison(Checked):
    """compare.json"""

    advice: ClassVar[str] = "Restore it, or run the comparison again."
    rows: list[ComparedRow]
    command: str | None = None
    tasks: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    seconds: NotNegative = 0.0
    jobs: Count = 1

    @model_validator(mode="before")
    @classmethod
    def one_task(cls, value: Any) -> Any:
        """Once, a comparison had one task, and said so once."""
        rows = value.get("rows") if isinstance(value, dict) else None
        for row in rows if isinstance(rows, list) else ():
            for key in ("task", "metric", "goal") if isinstance(row, dict) else ():
                row.setdefault(key, value.get(key))
        return value


# online.json
class OnlineSettings(Checked):
    """online.json: what `coadjoint online` was asked for beside its config."""

    advice: ClassVar[str] = "Restore it, or start a new run."
    classes: Labels | None
    window: Annotated[int, Field(ge=1, lt=2**31)]


# rows of metrics.jsonl and clock.jsonl
class MetricsRow(Checked):
    kind: Literal["train", "held-out", "probe"]
    step: Count
    split: str | None = None
    loss: Number | None = None
    gradient: Number | None = None
    distance: Number | None = None
    skipped: str | None = None


class ClockRow(Checked):
    step: Count
    seconds: NotNegative


# state.json
class Position(Checked):
    """How far a file of rows had come, and the sum of its bytes until there."""

    bytes: Count
    sha256: Sum


class State(Checked):
    """state.json, of any checkpoint."""

    format: Literal[1]
    step: Count


class RunState(State):
    """What both kinds of runs keep."""

    optimiser: dict[str, Number]
    description: dict[str, Any] | None
    threads: Count
    torch: str
    metrics: Position
    clock: Position


class Past(Checked):
    """training.Progress"""

    model_config = ConfigDict(extra="forbid")
    best: Number | None
    best_loss: Number
    best_step: Count | None
    waited: Count
    factor: NotNegative
    plateau: Number | None
    plateau_waited: Count
    skipped: Count
    seconds: NotNegative
    work: NotNegative
    norms: NotNegative
    success_step: Count | None
    success_seconds: NotNegative | None
    success_work: NotNegative | None


class TrainingState(RunState):
    """state.json of `coadjoint train`, also of a replay."""

    progress: Past
    over: bool
    status: Literal["success", "finished", "early-stopped"]
    method: dict[Literal["step", "rho", "decay", "samples"], Finite] = {}
    seed: int
    reason: str | None


class Figures(Checked):
    """online.Running, beside its arrays."""

    names: Labels
    t: Count
    looked: Count
    window: Annotated[int, Field(ge=1, lt=2**31)]


class StreamState(RunState):
    """state.json of `coadjoint online`. `stream` is that of the stream itself, which looks at it."""

    figures: Figures
    norms: Annotated[tuple[NotNegative, Count], Field(strict=False)]  # JSON knows only lists
    updates: Count
    items: Count
    t: Count
    rate: NotNegative
    seconds: NotNegative
    stream: Any


class Scaling(Checked):
    t: Count
    mean: list[Finite]
    M: list[NotNegative]


class Place(Checked):
    """streams.File: where in the file it is, and what the next row depends on."""

    rows: Count
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    id: str
    before: list[Finite] | None
    last: list[Finite] | None
    scale: Scaling
    target_scale: Scaling
    counts: list[NotNegative]


# model.safetensors
def of_data(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The description of data, looked at where it is made."""
    if value is not None:
        try:
            Description.of(value)
        except CoadjointError as error:
            raise ValueError(f"is damaged: {str(error).rpartition(': ')[2].rstrip('.')}") from None
    return value


class Sealed(Checked):
    """What every model.safetensors says of itself, in JSON, under the name `coadjoint` of its metadata."""

    advice: ClassVar[str] = (
        "Restore the file; or delete it, and `coadjoint resume` of its run writes it anew."
    )
    sha256: Sum | None = None


# the door
def read(path: Path, schema: type[Checked], most: int = MOST) -> dict[str, Any]:
    """The mapping in a JSON file, checked."""
    return check(str(path), parsed(files.read_regular(path, most), str(path)), schema)


def read_rows(path: Path, schema: type[Checked]) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, checked, one after the other."""
    for number, line in enumerate(files.read_lines(path, LINE), 1):
        name = f"{path}:{number}"
        yield check(name, parsed(line, name, LINE), schema)


def parsed(content: bytes | str, name: str, most: int = MOST) -> Any:
    """The value of JSON text that errors call `name`."""
    try:
        return settings.read_json(content, most, StorageError, name)
    except StorageError as error:
        raise StorageError(str(error).partition("\n")[0]) from None


def check(name: str, value: Any, schema: type[Checked]) -> dict[str, Any]:
    """The value, if it is what the schema says; otherwise a line that begins with `name`."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        advice = f" {schema.advice}" if schema.advice else ""
        raise StorageError(f"{name} is damaged: {complaint(error, value)}.{advice}") from None
    return dict(value)


def complaint(error: ValidationError, value: Any) -> str:
    """The first thing that is wrong: which key, what it should be, what it is."""
    first = error.errors(include_url=False, include_context=False)[0]
    missing = first["type"] == "missing"
    parts: list[str] = []
    for part in first["loc"]:
        if holds(value, part):
            value = value[part]
        elif not missing:
            continue  # the name of an alternative of the key, which is no key
        parts.append(str(part))
    key = ascii(".".join(parts))
    words = first["msg"].removeprefix("Value error, ")
    words = words[:1].lower() + words[1:]
    words = words.removeprefix("input ")
    if missing:
        return f"{key} is missing"
    if first["type"] == "extra_forbidden":
        return f"{key} does not belong to it"
    where = f"{key} " if parts else "its content "
    if first["type"] == "value_error" and isinstance(value, dict | list):
        return f"{where if parts else ''}{words}"  # a sentence of ours, that tells enough
    return f"{where}{words}; got {shown(value)}"


def holds(value: Any, part: Any) -> bool:
    """Whether a mapping has this key, or a list this index."""
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def shown(value: Any) -> str:
    """A value on one line, not too long."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = ascii(value) if value is not None else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


# files of tensors
TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
Kind = tuple[torch.dtype, tuple[int, ...]]


class Entry(Checked):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Count]
    data_offsets: Annotated[tuple[Count, Count], Field(strict=False)]  # JSON knows only lists


@dataclass(frozen=True)
class Header:
    """What a file of tensors says of itself, before any tensor is read."""

    tensors: dict[str, Kind]
    metadata: dict[str, str]
    numbers: int  # of all tensors together
    size: int  # bytes of the file

    @property
    def outline(self) -> dict[str, torch.Tensor]:
        """The tensors with no memory behind them."""
        return {
            name: torch.empty(shape, dtype=kind, device="meta")
            for name, (kind, shape) in self.tensors.items()
        }


def read_header(path: Path) -> Header:
    """The header of a safetensors file: the names, types and shapes in it account for every byte that follows."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise StorageError(
                f"{path} is not a file of tensors: its header does not fit into its {size:,} bytes."
            )
        if length > HEADER:
            raise StorageError(f"{path} is not a file of tensors: its header has {length:,} bytes.")
        content = file.read(length)
    return header_of(content, size - 8 - length, path)


def header_of(content: bytes, rest: int, path: Path) -> Header:
    """The header in these bytes, of tensors that take `rest` bytes."""
    found = parsed(content, f"{path}, its header", HEADER)
    if not isinstance(found, dict):
        raise StorageError(f"{path} is not a file of tensors: its header is {shown(found)}.")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise StorageError(f"{path} is not a file of tensors: its metadata are not texts.")
    tensors: dict[str, Kind] = {}
    numbers = end = 0
    for name, entry in found.items():
        check(f"{path}, its header, tensor {name!a}", entry, Entry)
    in_order = sorted(found.items(), key=lambda item: tuple(item[1]["data_offsets"]))
    for name, entry in in_order:
        kind = TYPES.get(entry["dtype"])
        if kind is None:
            raise StorageError(
                f"{path}: tensor {name!a} is of type {shown(entry['dtype'])}; expected one of torch's."
            )
        # An empty tensor may have any shape as far as its bytes go; torch counts strides, and they must be in range.
        if math.prod(max(n, 1) for n in entry["shape"]) * kind.itemsize >= 2**62:
            raise StorageError(f"{path}: tensor {name!a} has a shape that no tensor can have.")
        count = math.prod(entry["shape"])
        begin, after = entry["data_offsets"]
        if begin != end or after - begin != count * kind.itemsize:
            raise StorageError(
                f"{path} is not a file of tensors: {name!a} does not lie where its header says."
            )
        tensors[name] = kind, tuple(entry["shape"])
        numbers, end = numbers + count, after
    if end != rest:
        raise StorageError(
            f"{path} is not a file of tensors: {rest:,} bytes follow its header, which speaks of {end:,}."
        )
    return Header(tensors, metadata, numbers, 8 + len(content) + rest)


def description_of(path: Path, header: Header) -> dict[str, Any]:
    """What a model file says of itself, not yet checked but for its sum."""
    about = header.metadata.get("coadjoint")
    if about is None:
        raise StorageError(
            f"{path} was not written by coadjoint: it does not say what network it belongs to."
        )
    name = f"{path}: its description"
    return check(name, parsed(about, name), Sealed)
