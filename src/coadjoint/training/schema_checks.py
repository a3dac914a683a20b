"""The base of all schemas, and the checks by which files of run folders are read.

A run folder may come from a stranger, or from a disk that has lost a bit. So each file is checked
before it is used: its kind and size before it is read, its names, types and ranges afterwards. An
error is one line that names the file and the key. Keys that a schema does not know are ignored: a
later version may have written them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from ..errors import StorageError
from . import files, settings
from .json_types import JsonObject, JsonValue
from .optional_pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

MAX_JSON_BYTES = 50_000_000  # of a JSON file
MAX_LINE_BYTES = 4 << 20  # of a row of metrics.jsonl or clock.jsonl
NAMES_OF_NUMBERS = ("NaN", "Infinity", "-Infinity")  # what json_rows.to_json_types makes of them


def check_number(value: object) -> object:
    """The value, if it is a number or the name of one that JSON lacks."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if value in NAMES_OF_NUMBERS:
        return value
    raise ValueError(f"should be a number, or one of {', '.join(NAMES_OF_NUMBERS)}")


def check_unique(values: list[str] | None) -> list[str] | None:
    """The values, if no two of them are equal."""
    if values is not None and len(set(values)) < len(values):
        raise ValueError("should be different from each other")
    return values


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[JsonValue, AfterValidator(check_number)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Labels = Annotated[list[str], AfterValidator(check_unique)]


class Schema(BaseModel):
    """What a file must hold. `advice` says what to do if it does not."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    advice: ClassVar[str] = ""


def read(path: Path, schema: type[Schema], most: int = MAX_JSON_BYTES) -> JsonObject:
    """The object in a JSON file of at most `most` bytes, checked by the schema."""
    return check(str(path), parse_json(files.read_regular(path, most), str(path)), schema)


def read_rows(path: Path, schema: type[Schema]) -> Iterator[JsonObject]:
    """The rows of a file of JSON lines, read and checked by the schema one at a time."""
    for number, line in enumerate(files.read_lines(path, MAX_LINE_BYTES), 1):
        name = f"{path}:{number}"
        yield check(name, parse_json(line, name, MAX_LINE_BYTES), schema)


def parse_json(content: bytes | str, name: str, most: int = MAX_JSON_BYTES) -> JsonValue:
    """The value of JSON text of at most `most` bytes; errors call the text `name`."""
    try:
        return settings.read_json(content, most, StorageError, name)
    except StorageError as error:
        first_problem = str(error).partition("\n")[0]  # read_json lists one on each line
        raise StorageError(first_problem) from None


def check(name: str, value: JsonValue, schema: type[Schema]) -> JsonObject:
    """The value, if it fits the schema; otherwise a StorageError that begins with `name`."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        advice = f" {schema.advice}" if schema.advice else ""
        raise StorageError(f"{name} is damaged: {describe_error(error, value)}.{advice}") from None
    return dict(value)


def describe_error(error: ValidationError, value: JsonValue) -> str:
    """The first fault pydantic found in `value`: the key, what it should be, and what it is."""
    first = error.errors(include_url=False, include_context=False)[0]
    is_missing = first["type"] == "missing"
    keys: list[str] = []  # those that lead to the fault
    for key in first["loc"]:
        if has_part(value, key):
            value = value[key]
        elif not is_missing:
            continue  # pydantic's name of an alternative of the last key, not a key itself
        keys.append(str(key))
    path = ascii(".".join(keys))
    if is_missing:
        return f"{path} is missing"
    if first["type"] == "extra_forbidden":
        return f"{path} does not belong to it"
    fault = first["msg"].removeprefix("Value error, ")
    fault = fault[:1].lower() + fault[1:]
    fault = fault.removeprefix("input ")
    if first["type"] == "value_error" and isinstance(value, dict | list):
        # A validator of ours raised it, and said enough.
        return f"{path} {fault}" if keys else fault
    where = path if keys else "its content"
    return f"{where} {fault}; got {describe_value(value)}"


def has_part(value: object, key: object) -> bool:
    """Whether an object has this key, or a list this index."""
    if isinstance(value, list):
        return isinstance(key, int) and key < len(value)
    return isinstance(value, dict) and key in value


def describe_value(value: object) -> str:
    """A value on one line of at most 60 characters; of an object or a list only its kind."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
