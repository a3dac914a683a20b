"""From the user's columns to the inputs of a network, and from its outputs to the user's units.

The columns of an exported network are those of the training file that are features, in the order
of `Description.features`: numbers, NaN where missing; of a column of words the place of the word
in its list, from 0. With --gaps one more column is the time since the row before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...errors import Unsupported
from ...tasks.ahead import ahead_of
from ...tasks.description import Description
from ...tasks.files.sheet import quote_names
from .writer import Value, Writer


def column_names(d: Description) -> list[str]:
    """The columns that an exported network reads, in order."""
    gap = [f"{d.columns['time']} (gap)"] if d.gap else []
    return [*d.features, *gap]


def write_inputs(writer: Writer, d: Description, x: Value) -> Value:
    """The inputs of the network from columns x along the last axis, as `inputs_of` makes them.

    x is float64, [B, T, columns]; or [B, ...] in the shape of a sample in its file.
    """
    shape = d.sample_shape
    if shape is None or len(shape) == 1:
        return write_cast(writer, d, write_columns(writer, d, x))
    # The channels lie along the first axis of a sample: they become columns, and channels again.
    places = math.prod(shape[1:])
    rows = writer.apply("reshape", x, shape=(-1, shape[0], places), name="rows")
    rows = writer.apply("transpose", rows, order=(0, 2, 1), name="rows")
    u = write_columns(writer, d, rows)
    u = writer.apply("transpose", u, order=(0, 2, 1), name="u")
    assert d.input_shape is not None
    u = writer.apply("reshape", u, shape=(-1, *d.input_shape), name="u")
    return write_cast(writer, d, u)


def write_cast(writer: Writer, d: Description, u: Value) -> Value:
    """Inputs in the type of the network, by way of the type in which files are read."""
    if d.dtype != u.dtype:
        u = writer.apply("cast", u, name="u", dtype=d.dtype)
    if writer.dtype != u.dtype:
        u = writer.apply("cast", u, name="u", dtype=writer.dtype)
    return u


def target_names(d: Description) -> list[str]:
    """The names of the numbers that are predicted, or of the targets."""
    return ahead_of(d).output_names if d.kind == "next" else d.targets or d.numeric


def write_columns(writer: Writer, d: Description, x: Value) -> Value:
    """The inputs in float64: numbers, marks of missing values, words, the gap, earlier rows.

    Columns that are known in advance are refused: a row would have to hold those of later rows.
    """
    if d.ahead.get("known"):
        raise Unsupported(
            f"the network reads {quote_names(d.ahead['known'])} ahead of the others, which is not "
            "exported. Train without --known."
        )
    numeric = [d.features.index(name) for name in d.numeric]
    parts: list[Value] = []
    if numeric:
        parts.append(write_numbers(writer, d, x, numeric))
    if d.masked:
        chosen = [d.features.index(name) for name in d.masked]
        values = choose_columns(writer, x, chosen, "masked")
        is_missing = writer.apply("is_nan", values, name="is_missing", dtype="bool")
        parts.append(writer.apply("cast", is_missing, name="marks", dtype="float64"))
    for number, name in enumerate(d.categories):
        parts.append(write_words(writer, d, name, x, f"words{number}"))
    if d.gap:
        parts.append(write_gap(writer, d, x))
    own = writer.concat(parts, "u")
    return writer.concat([own, *write_lags(writer, d, own)], "u")


def write_lags(writer: Writer, d: Description, own: Value) -> list[Value]:
    """The predicted columns in earlier rows, one part for each lag, as `scaling.lagged` makes them.

    own: the inputs that are made of one row each, [B, T, own inputs]; the numbers come first.
    """
    lags = d.ahead.get("lags", [])
    if not lags:
        return []
    places = [d.numeric.index(name) for name in d.ahead["predicted"]]
    predicted = choose_columns(writer, own, places, "predicted")
    return [writer.apply("earlier", predicted, lag=lag, name=f"lag{lag}") for lag in lags]


def choose_columns(writer: Writer, x: Value, chosen: list[int], name: str) -> Value:
    """These columns of x."""
    if chosen == list(range(chosen[0], chosen[-1] + 1)):
        return writer.apply("part", x, name=name, start=chosen[0], stop=chosen[-1] + 1)
    return writer.apply("columns", x, name=name, chosen=chosen)


def write_numbers(writer: Writer, d: Description, x: Value, numeric: list[int]) -> Value:
    """(x - mean) / std; 0 where a masked feature is missing."""
    values = choose_columns(writer, x, numeric, "numbers")
    mean = doubles(writer, [d.mean[j] for j in numeric], "mean")
    std = doubles(writer, [d.std[j] for j in numeric], "std")
    scaled = writer.apply("div", writer.apply("sub", values, mean), std, name="scaled")
    is_masked = torch.tensor([d.features[j] in d.masked for j in numeric])
    if not is_masked.any():
        return scaled
    is_missing = writer.apply("is_nan", values, name="is_missing", dtype="bool")
    can_be = writer.constant(is_masked, "is_masked", as_it_is=True)
    filled = writer.apply("and", is_missing, can_be, name="filled", dtype="bool")
    return writer.apply("where", filled, 0.0, scaled, name="scaled", dtype="float64")


def write_words(writer: Writer, d: Description, name: str, x: Value, prefix: str) -> Value:
    """The inputs of a column of words: 1 for its word, less the shares of all; 0 if missing."""
    column = d.features.index(name)
    words = len(d.categories[name])
    shares = d.shares[name]
    code = writer.apply("part", x, name=prefix, start=column, stop=column + 1)
    numbers = doubles(writer, list(range(words)), f"{prefix}_numbers")
    is_word = writer.apply("equal", code, numbers, name="is_word", dtype="bool")
    block = writer.apply("cast", is_word, name="block", dtype="float64")
    known = writer.apply("sum", block, axis=-1, keep=True, name="known")
    if len(shares) > words:  # a word that is not listed is one of the rare ones
        is_missing = writer.apply("is_nan", code, name="is_missing", dtype="bool")
        missing = writer.apply("cast", is_missing, name="missing", dtype="float64")
        present = writer.apply("sub", 1.0, missing, name="present", dtype="float64")
        block = writer.concat([block, writer.apply("sub", present, known)], "block")
        known = present
    subtracted = doubles(writer, shares, f"{prefix}_shares")
    return writer.apply("sub", block, writer.apply("mul", known, subtracted), name=prefix)


def write_gap(writer: Writer, d: Description, x: Value) -> Value:
    """(log(1 + d / usual) - mean) / std of the time d since the row before; 0 where it is NaN."""
    column = len(d.features)
    since = writer.apply("part", x, name="since", start=column, stop=column + 1)
    log = writer.apply("log1p", writer.apply("div", since, float(d.gap["usual"])), name="log")
    scaled = writer.apply("sub", log, float(d.gap["mean"]))
    scaled = writer.apply("div", scaled, float(d.gap["std"]), name="gap")
    is_first = writer.apply("is_nan", since, name="is_first", dtype="bool")
    return writer.apply("where", is_first, 0.0, scaled, name="gap", dtype="float64")


def write_outputs(writer: Writer, d: Description, a: Value) -> Value:
    """Probabilities, or numbers in the units of the targets, from pre-outputs; in float64."""
    a = writer.apply("cast", a, name="a", dtype="float64")
    if d.kind == "classify":
        return writer.apply("softmax", a, axis=-1, name="probabilities")
    mean, std = d.target_scale()
    scaled = writer.apply("mul", a, doubles(writer, std.tolist(), "target_std"))
    shift = doubles(writer, mean.tolist(), "target_mean")
    return writer.apply("add", scaled, shift, name="prediction")


def read_outputs(d: Description, a: np.ndarray) -> np.ndarray:
    """What `write_outputs` writes, in numpy, as `Prediction.table` does."""
    if d.kind == "classify":
        p = np.exp(a - a.max(-1, keepdims=True))
        shares: np.ndarray = p / p.sum(-1, keepdims=True)
        return shares
    mean, std = d.target_scale()
    numbers: np.ndarray = a * std + mean
    return numbers


def doubles(writer: Writer, values: Sequence[float], name: str) -> Value:
    """Numbers that are stored in float64, whatever the network computes in."""
    return writer.constant(torch.tensor(values, dtype=torch.float64), name, as_it_is=True)
