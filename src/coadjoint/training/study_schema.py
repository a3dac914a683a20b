"""What the files of a study must hold: tune.json and trials.json."""

from __future__ import annotations

from typing import Annotated, ClassVar

from .json_types import JsonObject, JsonValue
from .optional_pydantic import Field
from .schema_checks import Count, NonNegative, Number, Schema

Name = Annotated[str, Field(pattern="^runs/trial-[0-9]{1,9}$")]


class GoalSchema(Schema):
    """What a study optimises."""

    metric: str
    split: str
    lower: bool


class PlanSchema(Schema):
    """tune.json: what is searched, and how long."""

    advice: ClassVar[str] = "Restore it, or start a new study."
    base: dict[str, JsonObject]
    space: str
    goal: GoalSchema
    trials: Annotated[int, Field(ge=1, le=100_000)]
    minutes: NonNegative | None
    seed: Count
    command: str | None = None
    environment: JsonObject = {}


class TrialSchema(Schema):
    """A trial of a study."""

    number: Count
    folder: Name
    status: str
    value: Number | None
    settings: dict[str, JsonValue]
    seconds: NonNegative | None
    error: str | None


class TrialsSchema(Schema):
    """trials.json: the trials that have ended."""

    advice: ClassVar[str] = "Delete it: `coadjoint resume` writes it again."
    best: Count | None
    importances: dict[str, Number]
    trials: list[TrialSchema]
