"""The description of a prepared set, which may be a stranger's: what it must hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from .description import JsonDict, are_different_words, are_finite, are_words
from .files.numpy_files import ExpectedArray
from .files.sheet import KINDS, MISSING

FORMAT = 1
KEYS = {
    "format", "rows", "sequences", "features", "targets", "kind", "columns", "categories",
    "labels", "reading", "arrays", "sources", "moments", "target_changes", "equal_steps", "uneven",
    "notes",
}  # fmt: skip
OPTIONAL_KEYS = {"sha256", "array"}  # array: of a set of arrays, whose columns have no names
MOMENTS = {"mean", "std", "least", "largest", "missing"}
EXPECTED = {
    "u": ExpectedArray("f", (2,), "[rows, features]"),
    "y": ExpectedArray("f", (2,), "[rows, targets]"),
    "time": ExpectedArray("f", (1,), "[rows]"),
    "starts": ExpectedArray("i", (1,), "[sequences + 1]"),
    "ids": ExpectedArray("i", (1,), "[bytes]"),
    "id_ends": ExpectedArray("i", (1,), "[sequences]"),
    "hashes": ExpectedArray("i", (2,), "[sequences, 16]"),
}


def digest_of(about: JsonDict) -> str:
    """Return the SHA-256 sum of a description, without its own entry for it."""
    rest = {key: value for key, value in about.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def first_wrong(about: JsonDict) -> str:
    """Return the first key of a description that is not valid; "" if all are."""
    if not isinstance(about, dict) or set(about) - OPTIONAL_KEYS != KEYS:
        return "keys"
    if about["format"] != FORMAT:
        return "format"
    counts = (about["rows"], about["sequences"])
    if any(type(count) is not int or count < 1 for count in counts):
        return "rows"
    for key, is_valid in checks(about):
        if not is_valid:
            return key
    return ""


def checks(about: JsonDict) -> Iterator[tuple[str, bool]]:
    """Yield each key and whether it is valid; later checks rely on earlier ones."""
    features = about["features"]
    yield "features", are_different_words(features) and len(features) > 0
    yield "targets", are_different_words(about["targets"])
    yield "kind", about["kind"] in KINDS
    columns = about["columns"]
    yield "columns", isinstance(columns, dict) and are_words(list(columns.values()))
    yield "columns", {"id", "time"} <= set(columns) <= {"id", "time", "stamps", "dates"}
    categories = about["categories"]
    yield "categories", isinstance(categories, dict) and set(categories) <= set(features)
    yield "categories", all(map(are_different_words, categories.values()))
    yield "labels", are_different_words(about["labels"])
    reading = about["reading"]
    yield "reading", isinstance(reading, dict)
    yield "reading", reading.get("missing") in MISSING
    yield "reading", reading.get("irregular") in ("refuse", "allow")
    steps = reading.get("steps", [])  # of a wide table
    yield "reading", are_different_words(steps) and ("steps" in reading) == bool(steps)
    yield "reading", reading.get("wide", False) is bool(steps)
    arrays = about["arrays"]
    yield "arrays", isinstance(arrays, dict) and set(arrays) <= set(EXPECTED)
    needed = {"u", "starts", "ids", "id_ends", "hashes"}
    yield "arrays", needed <= set(arrays)
    yield "arrays", ("y" in arrays) == (about["kind"] != "next" and bool(about["targets"]))
    for entry in arrays.values():
        yield "arrays", isinstance(entry, dict) and set(entry) == {"shape", "sha256"}
        shape = entry["shape"]
        yield "arrays", isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        yield "arrays", isinstance(entry["sha256"], str)
    n = about["sequences"]
    yield "arrays", arrays["u"]["shape"] == [about["rows"], len(features)]
    yield "arrays", arrays["starts"]["shape"] == [n + 1]
    yield "arrays", arrays["id_ends"]["shape"] == [n]
    yield "arrays", arrays["hashes"]["shape"] == [n, 16]
    if "y" in arrays:
        yield "arrays", arrays["y"]["shape"] == [about["rows"], len(about["targets"])]
    if "time" in arrays:
        yield "arrays", arrays["time"]["shape"] == [about["rows"]]
    yield "sources", isinstance(about["sources"], list) and len(about["sources"]) > 0
    for source in about["sources"]:
        yield "sources", isinstance(source, dict)
        yield "sources", set(source) == {"name", "first", "sha256", "bytes"}
        yield "sources", isinstance(source["name"], str) and type(source["first"]) is int
    moments = about["moments"]
    yield "moments", isinstance(moments, dict) and set(moments) == MOMENTS
    yield "moments", all(isinstance(v, list) for v in moments.values())
    yield "moments", all(len(v) == len(features) and are_finite(v) for v in moments.values())
    equal = about["equal_steps"]
    yield "equal_steps", isinstance(equal, dict) and are_finite(list(equal.values()))
    yield "target_changes", isinstance(about["target_changes"], bool)
    yield "uneven", isinstance(about["uneven"], str)
    yield "notes", are_words(about["notes"])
    array = about.get("array", {"has_ids": False, "layout": ""})
    yield "array", isinstance(array, dict) and set(array) == {"has_ids", "layout"}
    yield "array", isinstance(array["has_ids"], bool) and isinstance(array["layout"], str)
