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

MAX_JSON_BYTES = 50_000_000  # bytes of a JSON file
MAX_HEADER_BYTES = 32 << 20  # bytes of the header of a file of tensors
MAX_LINE_BYTES = 4 << 20  # bytes of a row of metrics.jsonl or clock.jsonl
NAMES_OF_NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
)  # as json_rows.to_json_types writes what JSON lacks


def check_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if value in NAMES_OF_NUMBERS:
        return value
    raise ValueError(f"should be a number, or one of {', '.join(NAMES_OF_NUMBERS)}")


def check_unique(values: list[str] | None) -> list[str] | None:
    if values is not None and len(set(values)) < len(values):
        raise ValueError("should be different from each other")
    return values


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[Any, AfterValidator(check_number)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # SHA-256
Labels = Annotated[list[str], AfterValidator(check_unique)]


class Schema(BaseModel):
    """What a file must hold. `advice` says what to do about one that does not."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    advice: ClassVar[str] = ""


# result.json
class ResultSchema(Schema):
    """result.json, of any run."""

    advice: ClassVar[str] = "Restore it, or delete it: `coadjoint resume` then writes it anew."
    status: Literal["success", "finished", "early-stopped", "interrupted", "failed"]
    step: Count
    seconds: NonNegative
    reason: str | None
    metric: str
    metrics: dict[str, dict[str, Number]]
    parameters: Count


class TrainingResultSchema(ResultSchema):
    """result.json, of a run that can be compared with others."""

    success: bool
    success_step: Count | None
    success_seconds: NonNegative | None
    success_work: NonNegative | None = None
    work: NonNegative | None = None
    goal: str | None

    @model_validator(mode="after")
    def a_success_has_a_time(self) -> TrainingResultSchema:
        if self.success and (self.success_step is None or self.success_seconds is None):
            raise ValueError("a success should have a success_step and success_seconds")
        return self


# compare.json
class ComparedRun(Schema):
    seed: Count
    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    status: str | None = None
    success: bool | None = None
    steps: Count | None = None
    seconds: NonNegative | None = None
    work: NonNegative | None = None
    metric: Number | None = None
    error: str | None = None


class ComparedRow(Schema):
    task: str
    metric: str
    goal: str | None
    name: str
    settings: dict[str, Any] = {}
    budget: dict[Literal["gradients", "seconds"], NonNegative] = {}
    pace: Finite = 0.0
    runs: list[ComparedRun]


class ComparisonSchema(Schema):
    """compare.json"""

    advice: ClassVar[str] = "Restore it, or run the comparison again."
    rows: list[ComparedRow]
    command: str | None = None
    tasks: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    seconds: NonNegative = 0.0
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
class OnlineSettings(Schema):
    """online.json: what `coadjoint online` was asked for beside its config."""

    advice: ClassVar[str] = "Restore it, or start a new run."
    classes: Labels | None
    window: Annotated[int, Field(ge=1, lt=2**31)]


# rows of metrics.jsonl and clock.jsonl
class MetricsRow(Schema):
    kind: Literal["train", "held-out", "probe"]
    step: Count
    split: str | None = None
    loss: Number | None = None
    gradient: Number | None = None
    distance: Number | None = None
    skipped: str | None = None


class ClockRow(Schema):
    step: Count
    seconds: NonNegative


# state.json
class Position(Schema):
    """How far a file of rows had come, and the sum of its bytes until there."""

    bytes: Count
    sha256: Sha256


class State(Schema):
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


class ProgressSchema(Schema):
    """training.Progress"""

    model_config = ConfigDict(extra="forbid")
    best: Number | None
    best_loss: Number
    best_step: Count | None
    waited: Count
    factor: NonNegative
    plateau: Number | None
    plateau_waited: Count
    skipped: Count
    seconds: NonNegative
    work: NonNegative
    norms: NonNegative
    success_step: Count | None
    success_seconds: NonNegative | None
    success_work: NonNegative | None


class TrainingState(RunState):
    """state.json of `coadjoint train`, also of a replay."""

    progress: ProgressSchema
    over: bool
    status: Literal["success", "finished", "early-stopped"]
    method: dict[Literal["step", "rho", "decay", "samples"], Finite] = {}
    seed: int
    reason: str | None


class MeansSchema(Schema):
    """stream_means.RunningMeans, beside its arrays."""

    names: Labels
    t: Count
    looked: Count
    window: Annotated[int, Field(ge=1, lt=2**31)]


class StreamState(RunState):
    """state.json of `coadjoint online`. `stream` is that of the stream itself, which looks at it."""

    figures: MeansSchema
    norms: Annotated[tuple[NonNegative, Count], Field(strict=False)]  # JSON knows only lists
    updates: Count
    items: Count
    t: Count
    rate: NonNegative
    seconds: NonNegative
    stream: Any


class Scaling(Schema):
    t: Count
    mean: list[Finite]
    M: list[NonNegative]


class StreamPlace(Schema):
    """tasks.files.stream.File: where in the file it is, and what the next row depends on."""

    rows: Count
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    id: str
    before: list[Finite] | None
    last: list[Finite] | None
    scale: Scaling
    target_scale: Scaling
    counts: list[NonNegative]


# model.safetensors
def check_data(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The description of data, looked at where it is made."""
    if value is not None:
        try:
            Description.of(value)
        except CoadjointError as error:
            raise ValueError(f"is damaged: {str(error).rpartition(': ')[2].rstrip('.')}") from None
    return value


class ModelMetadata(Schema):
    """What every model.safetensors says of itself, in JSON, under the name `coadjoint` of its metadata."""

    advice: ClassVar[str] = (
        "Restore the file; or delete it, and `coadjoint resume` of its run writes it anew."
    )
    sha256: Sha256 | None = None


# the door
def read(path: Path, schema: type[Schema], most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The mapping in a JSON file, checked."""
    return check(str(path), parse_json(files.read_regular(path, most), str(path)), schema)


def read_rows(path: Path, schema: type[Schema]) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, checked, one after the other."""
    for number, line in enumerate(files.read_lines(path, MAX_LINE_BYTES), 1):
        name = f"{path}:{number}"
        yield check(name, parse_json(line, name, MAX_LINE_BYTES), schema)


def parse_json(content: bytes | str, name: str, most: int = MAX_JSON_BYTES) -> Any:
    """The value of JSON text that errors call `name`."""
    try:
        return settings.read_json(content, most, StorageError, name)
    except StorageError as error:
        raise StorageError(str(error).partition("\n")[0]) from None


def check(name: str, value: Any, schema: type[Schema]) -> dict[str, Any]:
    """The value, if it is what the schema says; otherwise a line that begins with `name`."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        advice = f" {schema.advice}" if schema.advice else ""
        raise StorageError(f"{name} is damaged: {describe_error(error, value)}.{advice}") from None
    return dict(value)


def describe_error(error: ValidationError, value: Any) -> str:
    """The first thing that is wrong: which key, what it should be, what it is."""
    first = error.errors(include_url=False, include_context=False)[0]
    missing = first["type"] == "missing"
    parts: list[str] = []
    for part in first["loc"]:
        if has_part(value, part):
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
    return f"{where}{words}; got {describe_value(value)}"


def has_part(value: Any, part: Any) -> bool:
    """Whether a mapping has this key, or a list this index."""
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def describe_value(value: Any) -> str:
    """A value on one line, not too long."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = ascii(value) if value is not None else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


# files of tensors
TORCH_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
TensorKind = tuple[torch.dtype, tuple[int, ...]]


class TensorEntry(Schema):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Count]
    data_offsets: Annotated[tuple[Count, Count], Field(strict=False)]  # JSON knows only lists


@dataclass(frozen=True)
class Header:
    """What a file of tensors says of itself, before any tensor is read."""

    tensors: dict[str, TensorKind]
    metadata: dict[str, str]
    element_count: int  # of all tensors together
    file_bytes: int  # bytes of the file

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
        if length > MAX_HEADER_BYTES:
            raise StorageError(f"{path} is not a file of tensors: its header has {length:,} bytes.")
        content = file.read(length)
    return parse_header(content, size - 8 - length, path)


def parse_header(content: bytes, rest: int, path: Path) -> Header:
    """The header in these bytes, of tensors that take `rest` bytes."""
    found = parse_json(content, f"{path}, its header", MAX_HEADER_BYTES)
    if not isinstance(found, dict):
        raise StorageError(
            f"{path} is not a file of tensors: its header is {describe_value(found)}."
        )
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise StorageError(f"{path} is not a file of tensors: its metadata are not texts.")
    tensors: dict[str, TensorKind] = {}
    numbers = end = 0
    for name, entry in found.items():
        check(f"{path}, its header, tensor {name!a}", entry, TensorEntry)
    in_order = sorted(found.items(), key=lambda item: tuple(item[1]["data_offsets"]))
    for name, entry in in_order:
        kind = TORCH_TYPES.get(entry["dtype"])
        if kind is None:
            raise StorageError(
                f"{path}: tensor {name!a} is of type {describe_value(entry['dtype'])}; expected one of torch's."
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


def read_metadata(path: Path, header: Header) -> dict[str, Any]:
    """What a model file says of itself, not yet checked but for its sum."""
    about = header.metadata.get("coadjoint")
    if about is None:
        raise StorageError(
            f"{path} was not written by coadjoint: it does not say what network it belongs to."
        )
    name = f"{path}: its description"
    return check(name, parse_json(about, name), ModelMetadata)
