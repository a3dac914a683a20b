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
    """tune.json: what is searched, and how long.

    storage    where the trials are recorded, without a password; None: study.db in the folder
    study      the name of the study there
    id         of this study: another one may have its name elsewhere; None before 0.11
    data       the names and SHA-256 of the files of data
    first      the parameters of the first trial
    heartbeat  seconds between two signs of life of a worker
    """

    advice: ClassVar[str] = "Restore it, or start a new study."
    base: dict[str, JsonObject]
    space: str
    goal: GoalSchema
    trials: Annotated[int, Field(ge=1, le=100_000)]
    minutes: NonNegative | None
    seed: Count
    command: str | None = None
    environment: JsonObject = {}
    storage: str | None = None
    study: str = "coadjoint"
    id: str | None = None
    data: JsonObject = {}
    first: JsonObject = {}
    heartbeat: Annotated[int, Field(ge=1, le=86_400)] = 10


# What a tune.json of an earlier version lacks.
PLAN_DEFAULTS: JsonObject = {
    "environment": {},
    "command": None,
    "storage": None,
    "study": "coadjoint",
    "id": None,
    "data": {},
    "first": {},
    "heartbeat": 10,
}


class TrialSchema(Schema):
    """A trial of a study. where: the machine and process that ran it; None before 0.11."""

    number: Count
    folder: Name
    status: str
    value: Number | None
    settings: dict[str, JsonValue]
    seconds: NonNegative | None
    error: str | None
    where: str | None = None


class TrialsSchema(Schema):
    """trials.json: the trials that have ended."""

    advice: ClassVar[str] = "Delete it: `coadjoint resume` writes it again."
    best: Count | None
    importances: dict[str, Number]
    trials: list[TrialSchema]
