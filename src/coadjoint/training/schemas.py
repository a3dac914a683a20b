"""Schemas: what each file of a run folder must hold.

`schema_checks` has the checks and `tensor_header` the headers of files of tensors; all of their
names are here, too, so that a reader of run folders needs one import.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ..errors import CoadjointError
from ..tasks.description import Description
from .held_out_schema import MAX_HELD_OUT_BYTES, HeldOutSchema
from .json_types import JsonObject, JsonValue
from .optional_pydantic import ConfigDict, Field, model_validator
from .picture_schema import Pictures
from .schema_checks import (
    Count,
    Finite,
    Labels,
    NonNegative,
    Number,
    Schema,
    Sha256,
    check,
    describe_value,
    parse_json,
    read,
    read_rows,
)
from .tensor_header import Header, ModelMetadata, parse_header, read_header, read_metadata

__all__ = [
    "MAX_HELD_OUT_BYTES",
    "ClockRow",
    "ComparisonSchema",
    "Header",
    "HeldOutSchema",
    "MetricsRow",
    "ModelMetadata",
    "OnlineSettings",
    "OnlineState",
    "Pictures",
    "ResultSchema",
    "Schema",
    "State",
    "StreamPlace",
    "TrainingResultSchema",
    "TrainingState",
    "check",
    "check_data",
    "describe_value",
    "parse_header",
    "parse_json",
    "read",
    "read_header",
    "read_metadata",
    "read_rows",
]


# result.json
class ResultSchema(Schema):
    """result.json of any run."""

    advice: ClassVar[str] = "Restore it, or delete it: `coadjoint resume` then writes it again."
    status: Literal["success", "finished", "early-stopped", "interrupted", "failed", "pruned"]
    step: Count
    seconds: NonNegative
    reason: str | None
    metric: str
    metrics: dict[str, dict[str, Number]]
    parameters: Count


class BaselineSchema(Schema):
    """A baseline, with its metrics by split."""

    name: str
    about: str
    metrics: dict[str, dict[str, Number]]


class TrainingResultSchema(ResultSchema):
    """result.json of a run of `coadjoint train`, which can be compared with others."""

    success: bool
    success_step: Count | None
    success_seconds: NonNegative | None
    success_work: NonNegative | None = None
    work: NonNegative | None = None
    goal: str | None
    pictures: Pictures | None = None
    selected_by: str | None = None
    baselines: list[BaselineSchema] = []

    @model_validator(mode="after")
    def a_success_has_a_time(self) -> TrainingResultSchema:
        """Refuse a success without the step and the time at which it was reached."""
        if self.success and (self.success_step is None or self.success_seconds is None):
            raise ValueError("a success should have a success_step and success_seconds")
        return self


# compare.json
class ComparedRun(Schema):
    """A run of a comparison."""

    seed: Count
    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    status: str | None = None
    success: bool | None = None
    steps: Count | None = None
    seconds: NonNegative | None = None
    work: NonNegative | None = None
    metric: Number | None = None
    split: str | None = None
    test: Number | None = None
    error: str | None = None


class ComparedRow(Schema):
    """A method on a task, with its runs."""

    task: str
    metric: str
    goal: str | None
    name: str
    settings: JsonObject = {}
    others: dict[str, JsonObject] = {}
    budget: dict[Literal["gradients", "seconds"], NonNegative] = {}
    pace: Finite = 0.0
    runs: list[ComparedRun]


class ComparisonSchema(Schema):
    """compare.json."""

    advice: ClassVar[str] = "Restore it, or run the comparison again."
    rows: list[ComparedRow]
    command: str | None = None
    tasks: JsonObject = {}
    shared: dict[str, JsonObject] = {}
    environment: JsonObject = {}
    seconds: NonNegative = 0.0
    jobs: Count = 1

    @model_validator(mode="before")
    @classmethod
    def copy_task_to_rows(cls, value: JsonValue) -> JsonValue:
        """Fill in the task of each row: old comparisons had one task, and named it only once."""
        rows = value.get("rows") if isinstance(value, dict) else None
        if not isinstance(rows, list):
            return value
        for row in rows:
            if isinstance(row, dict):
                for key in ("task", "metric", "goal"):
                    row.setdefault(key, value.get(key))
        return value


# online.json
class OnlineSettings(Schema):
    """online.json: the settings of `coadjoint online` that config.yaml has no place for."""

    advice: ClassVar[str] = "Restore it, or start a new run."
    classes: Labels | None
    window: Annotated[int, Field(ge=1, lt=2**31)]


# rows of metrics.jsonl and clock.jsonl
class MetricsRow(Schema):
    """A row of metrics.jsonl."""

    kind: Literal["train", "held-out", "probe"]
    step: Count
    split: str | None = None
    loss: Number | None = None
    gradient: Number | None = None
    distance: Number | None = None
    skipped: str | None = None


class ClockRow(Schema):
    """A row of clock.jsonl."""

    step: Count
    seconds: NonNegative


# state.json
class Position(Schema):
    """The length of a file of rows at the time of a checkpoint, and the sum of its bytes."""

    bytes: Count
    sha256: Sha256


class State(Schema):
    """state.json of any checkpoint."""

    format: Literal[1]
    step: Count


class RunState(State):
    """state.json of a run: what `train` and `online.learn` have in common."""

    optimiser: dict[str, Number]
    description: JsonObject | None
    threads: Count
    torch: str
    metrics: Position
    clock: Position


class ProgressSchema(Schema):
    """The fields of `progress.Progress`."""

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
    """state.json of `coadjoint train`, and of a replay."""

    progress: ProgressSchema
    over: bool
    status: Literal["success", "finished", "early-stopped"]
    method: dict[Literal["step", "rho", "decay", "samples"], Finite] = {}
    seed: int
    shards: Count | None = None  # of a run on many processes
    reason: str | None


class MeansSchema(Schema):
    """The numbers of a `stream_means.RunningMeans`; its arrays are in state.safetensors."""

    names: Labels
    t: Count
    looked: Count
    window: Annotated[int, Field(ge=1, lt=2**31)]


class OnlineState(RunState):
    """state.json of `coadjoint online`. The stream checks its own part, `stream`."""

    figures: MeansSchema
    norms: Annotated[tuple[NonNegative, Count], Field(strict=False)]  # JSON has only lists
    updates: Count
    items: Count
    t: Count
    rate: NonNegative
    seconds: NonNegative
    stream: JsonValue


class Scaling(Schema):
    """The running mean and variance by which a stream scales a column."""

    t: Count
    mean: list[Finite]
    M: list[NonNegative]


class StreamPlace(Schema):
    """The place of a stream in its file, and what its next row depends on."""

    rows: Count
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    id: str
    before: list[Finite] | None
    last: list[Finite] | None
    scale: Scaling
    target_scale: Scaling
    counts: list[NonNegative]


# model.safetensors
def check_data(value: JsonObject | None) -> JsonObject | None:
    """The description of data itself, or None; ValueError if `tasks.description` refuses it."""
    if value is not None:
        try:
            Description.of(value)
        except CoadjointError as error:
            fault = str(error).rpartition(": ")[2].rstrip(".")  # the caller adds its own beginning
            raise ValueError(f"is damaged: {fault}") from None
    return value
