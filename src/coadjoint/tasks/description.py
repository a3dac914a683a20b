"""Description: what a network must know about the data it was trained on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from ..errors import MAX_COUNT, DataError
from .files.sheet import KINDS

ColumnNames = str | Sequence[str] | None
PathLike = str | os.PathLike[str]
JsonDict = dict[str, Any]  # values of plain JSON types
Option = Any  # the value of an option that is checked where it is used

SAMPLE_KINDS = ("classify", "regress", "reconstruct")  # of samples without time
MOST_AXES = 7  # of a sample without time
FORMAT_OPTIONS = ("sep", "decimal", "thousands", "header", "dates")  # of tables
READING_OPTIONS = {*FORMAT_OPTIONS, "missing", "irregular"}
# What may differ in a file to predict from: where its columns are, and how it is read.
PREDICTION_OPTIONS = READING_OPTIONS | {"id", "time", "max_bytes"}
WIDE_OPTIONS = {"wide", "steps"}  # of a wide table: that it is one, and the columns of its steps
KINDS_OF_READING = {
    "header": bool,
    "sep": str | None,
    "dates": str | None,
    "wide": bool,
    "steps": list,
}
MOST_LAG = 10_000  # rows
SYMBOLS = ("character", "symbol")  # what symbols are called
AHEAD_KEYS = {"predicted", "horizon", "known", "quantiles", "steps"}
Gap = dict[str, float]  # usual, mean, std and dates (0 or 1): see `encoding`


@dataclass(frozen=True)
class Description:
    """What a network must know about its training data, in plain JSON types.

    It is stored with a model. `Data.for_prediction` reads new files by it.
    """

    kind: str
    at: str
    features: list[str]
    targets: list[str]
    labels: list[str]
    mean: list[float]
    std: list[float]
    target_mean: list[float]
    target_std: list[float]
    masked: list[str]  # features with a second input that is 1 where the value is missing
    named: bool  # whether features are matched by name rather than by position
    columns: dict[str, str]
    window: int | None
    dtype: str
    reading: JsonDict  # the READING_OPTIONS, and of a wide table the WIDE_OPTIONS
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)  # the words of such features
    # The share of each word in training; of one more that stands for all other words, if they
    # share an input.
    shares: dict[str, list[float]] = field(default_factory=dict)
    gap: Gap = field(default_factory=dict)  # {} without an input for the time since the row before
    ahead: JsonDict = field(default_factory=dict)  # kind "next": see `ahead`; {}: the next numbers
    # What a symbol is called, "character" or "symbol", if classes are the next ones of sequences of
    # symbols: see `symbols`.
    symbols: str = ""
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """The shape of a sample without time in its file; None for sequences."""
        return None

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of a sample as the network reads it, with a feature more for each masked one.

        None for sequences.
        """
        shape = self.sample_shape
        if shape is None:
            return None
        with_masks = (self.width, *shape[1:])
        # An autoencoder reads and writes vectors.
        return (math.prod(with_masks),) if self.kind == "reconstruct" else with_masks

    @property
    def inputs(self) -> int:
        """The inputs of a network: those of a time step, or the entries of a sample."""
        return math.prod(self.input_shape or (self.width,))

    @property
    def width(self) -> int:
        """The inputs of a step, or the channels of a sample."""
        of_known = len(self.known_places) * (int(self.ahead.get("horizon", 1)) - 1)
        return self.own_width + of_known + self.lagged_width

    @property
    def lagged_width(self) -> int:
        """The last inputs of a step: the predicted columns in earlier rows."""
        return len(self.ahead.get("lags", ())) * len(self.ahead.get("predicted", ()))

    @property
    def own_width(self) -> int:
        """The inputs of a step without those of columns that are known several steps ahead."""
        of_words = sum(map(len, self.shares.values()))
        numbers = len(self.features) - len(self.categories)
        return numbers + len(self.masked) + of_words + bool(self.gap)

    @property
    def known_places(self) -> list[int]:
        """The inputs, among the first `own_width`, of columns that are known in advance."""
        known = self.ahead.get("known", ())
        if not known:
            return []
        return [place for place, (_, name) in enumerate(self.list_own_inputs()) if name in known]

    @property
    def numeric(self) -> list[str]:
        """The features that are numbers."""
        return [name for name in self.features if name not in self.categories]

    @property
    def input_names(self) -> list[str]:
        """A name for each input of a step, or for each channel of a sample: "city = Rome"."""
        return [name for name, _ in self.list_inputs()]

    @property
    def input_columns(self) -> list[str]:
        """The column of the file that each input of a step is made from."""
        return [column for _, column in self.list_inputs()]

    def list_inputs(self) -> list[tuple[str, str]]:
        """Return (name, column) of each input of a step, in order.

        They are those of `list_own_inputs`; if H steps are predicted at once, then those of columns
        that are known in advance 2, 3, ..., H steps later: "price +2". (One step later is their
        place among the first.) The last are the predicted columns in earlier rows: "sales -11".
        """
        own = self.list_own_inputs()
        inputs = list(own)
        for later in range(2, self.ahead.get("horizon", 1) + 1):
            for place in self.known_places:
                name, column = own[place]
                inputs.append((f"{name} +{later}", column))
        for lag in self.ahead.get("lags", ()):
            inputs += [(f"{name} -{lag}", name) for name in self.ahead["predicted"]]
        return inputs

    def list_own_inputs(self) -> list[tuple[str, str]]:
        """Return (name, column) of each input of a step that is made of one row, in order.

        They are the numbers, marks of missing values, words, and the time since the row before.
        """
        inputs = [(name, name) for name in self.numeric]
        inputs += [(f"{name} (missing)", name) for name in self.masked]
        for name, words in self.categories.items():
            inputs += [(f"{name} = {word}", name) for word in words]
            if len(self.shares[name]) > len(words):
                inputs.append((f"{name} (other)", name))
        if self.gap:
            time = self.columns["time"]
            inputs.append((f"{time} (gap)", time))
        return inputs

    @property
    def outputs(self) -> int:
        """The outputs of a network: classes, targets, or the entries of a sample."""
        if self.kind == "reconstruct":
            return self.inputs
        return len(self.labels) or len(self.target_std)

    def target_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each real output, [outputs] both."""
        mean = np.array(self.target_mean, dtype=np.float64)
        std = np.array(self.target_std, dtype=np.float64)
        if self.kind == "reconstruct":  # the places of a channel share its scale
            places = self.outputs // len(std)
            return mean.repeat(places), std.repeat(places)
        return mean, std

    @staticmethod
    def of(given: JsonDict) -> Description:
        """Check a description that came with a model, perhaps from a stranger, and return it.

        One with a shape is that of samples without time.
        """
        is_of_samples = isinstance(given, dict) and "shape" in given
        cls = SampleDescription if is_of_samples else Description
        known = {f.name for f in fields(cls)}
        optional = {"categories", "shares", "gap", "ahead", "symbols"}  # since 0.9.0
        if not isinstance(given, dict) or known - optional != set(given) - optional:
            raise DataError(
                "the model's description of its data is damaged: its keys are not those expected."
            )
        description = cls(**given)
        for name, is_valid in description.check_fields():
            if not is_valid:
                raise DataError(
                    f"the model's description of its data is damaged: '{name}' is not valid."
                )
        return description

    def check_fields(self) -> Iterator[tuple[str, bool]]:
        """Yield each field and whether it is valid.

        Later checks rely on earlier ones, so the caller must stop at the first that fails.
        """
        yield "kind", isinstance(self.kind, str) and self.kind in self.kinds
        yield "at", self.at in ("last", "every")
        yield "features", are_different_words(self.features) and len(self.features) > 0
        yield "mean", are_finite(self.mean) and len(self.mean) == len(self.features)
        yield "std", are_finite(self.std) and len(self.std) == len(self.features)
        yield "std", min(self.std) > 0
        yield "targets", are_different_words(self.targets)
        yield "labels", are_different_words(self.labels)
        yield "labels", (len(self.labels) > 1) == (self.kind == "classify")
        yield "target_mean", are_finite(self.target_mean)
        yield "target_std", are_finite(self.target_std) and min(self.target_std, default=1) > 0
        yield "target_std", len(self.target_mean) == len(self.target_std)
        yield "masked", are_different_words(self.masked)
        yield "masked", set(self.masked) <= set(self.features)
        yield "named", isinstance(self.named, bool)
        columns = self.columns if isinstance(self.columns, dict) else {}
        yield "columns", set(columns) == {"id", "time"} and are_words(list(columns.values()))
        yield "window", self.window is None or (type(self.window) is int and self.window > 0)
        yield "dtype", self.dtype in ("float32", "float64")
        yield from self.check_encodings()
        yield from self.check_ahead()
        yield "symbols", isinstance(self.symbols, str) and self.symbols in ("", *SYMBOLS)
        if self.symbols:
            yield "symbols", self.kind == "classify" and self.at == "every"
            yield "symbols", self.categories == {self.features[0]: self.labels}
            yield "symbols", len(self.features) == 1 and self.width == len(self.labels)
        yield (
            "reading",
            isinstance(self.reading, dict) and set(self.reading) <= READING_OPTIONS | WIDE_OPTIONS,
        )
        for name, value in self.reading.items():
            kinds = KINDS_OF_READING.get(name, str)
            yield f"reading.{name}", isinstance(value, kinds)
        yield "reading.steps", are_different_words(self.reading.get("steps", []))

    def check_ahead(self) -> Iterator[tuple[str, bool]]:
        """Yield whether what is predicted is valid, as `check_fields` does."""
        ahead = self.ahead
        yield "ahead", isinstance(ahead, dict)
        keys = set(ahead) - {"lags"}  # since 0.11.0
        yield "ahead", not ahead or (keys == AHEAD_KEYS and self.kind == "next")
        if not ahead:
            return
        lags = ahead.get("lags", [])
        yield "ahead", isinstance(lags, list) and all(type(lag) is int for lag in lags)
        yield "ahead", lags == sorted(set(lags)) and all(0 < lag <= MOST_LAG for lag in lags)
        predicted = ahead["predicted"]
        yield "ahead", are_different_words(predicted) and len(predicted) > 0
        yield "ahead", set(predicted) <= set(self.numeric)
        known = ahead["known"]
        yield "ahead", are_different_words(known) and set(known) <= set(self.features)
        yield "ahead", not set(known) & set(predicted)
        for count in (ahead["horizon"], ahead["steps"] or 1):
            yield "ahead", type(count) is int and 0 < count <= MAX_COUNT
        levels = ahead["quantiles"]
        yield "ahead", are_finite(levels) and levels == sorted(set(levels))
        yield "ahead", all(0 < level < 1 for level in levels)
        width = len(predicted) * ahead["horizon"] * max(1, len(levels))
        yield "target_std", len(self.target_std) == width

    def check_encodings(self) -> Iterator[tuple[str, bool]]:
        """Yield each field on words and gaps and whether it is valid, as `check_fields` does."""
        yield "categories", isinstance(self.categories, dict)
        yield "categories", set(self.categories) <= set(self.features)
        yield "categories", all(map(are_different_words, self.categories.values()))
        yield "shares", isinstance(self.shares, dict)
        yield "shares", set(self.shares) == set(self.categories)
        for name, words in self.categories.items():
            shares = self.shares[name]
            yield "shares", are_finite(shares) and len(shares) - len(words) in (0, 1)
            yield "shares", 0 < len(shares) <= MAX_COUNT
        yield "gap", isinstance(self.gap, dict)
        yield "gap", set(self.gap) in (set(), {"usual", "mean", "std", "dates"})
        if self.gap:
            yield "gap", are_finite(list(self.gap.values()))
            yield "gap", self.gap["usual"] > 0 and self.gap["std"] > 0


@dataclass(frozen=True)
class SampleDescription(Description):
    """What a network must know about training data without time.

    shape   of a sample, its features (or channels) along the first axis; each has one mean and
            one standard deviation
    """

    shape: list[int] = field(default_factory=list)
    kinds: ClassVar[tuple[str, ...]] = SAMPLE_KINDS

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a sample in its file."""
        return tuple(self.shape)

    def check_fields(self) -> Iterator[tuple[str, bool]]:
        """Yield each field and whether it is valid, as `Description.check_fields` does."""
        yield from super().check_fields()
        yield "shape", isinstance(self.shape, list) and 0 < len(self.shape) <= MOST_AXES
        yield "shape", all(type(length) is int and length > 0 for length in self.shape)
        yield "shape", math.prod(self.shape) <= MAX_COUNT
        yield "shape", self.shape[0] == len(self.features)
        yield "at", self.at == "last"
        yield "window", self.window is None
        if self.kind == "reconstruct":
            yield "masked", not self.masked and not self.categories
            yield "target_std", len(self.target_std) == len(self.features)


def are_words(value: object) -> bool:
    """Tell whether `value` is a list of strings."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def are_different_words(value: list[str]) -> bool:
    """Tell whether `value` is a list of strings without repetition."""
    return are_words(value) and len(set(value)) == len(value)


def are_finite(value: object) -> bool:
    """Tell whether `value` is a list of finite numbers."""
    if not isinstance(value, list):
        return False
    return all(type(x) in (int, float) and math.isfinite(x) for x in value)
