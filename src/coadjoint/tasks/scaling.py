"""From pieces to sequences of numbers that a network can read: scaled inputs and targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import DataError, one_line
from .ahead import ahead_of
from .blocks import block_slices
from .cutting import Part, Piece, PreparedSheet
from .description import Description
from .encoding import encode_categories, encode_gap
from .files.room import give_back, map_under
from .files.samples import samples_of_rows
from .files.sheet import Sheet, quote_names
from .prepared import gaps_in
from .row_blocks import Moments, chosen_inputs, chosen_targets
from .task import Origin, Samples, Sequences

OTHER_SCALES = ", leave --standardise on, or train in float64"


def features_with_gaps(first: Sheet, cuts: dict[str, PreparedSheet]) -> list[str]:
    """Return the features that miss a value in any file; first: the sheet of the training file."""
    has_gap = np.zeros(len(first.features), bool)
    for cut in cuts.values():
        has_gap |= gaps_in(cut.sheet) > 0
    return names_where(first.features, has_gap)


def names_where(names: Sequence[str], chosen: np.ndarray) -> list[str]:
    """Return the names where `chosen` is true."""
    return [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]


class Scale(NamedTuple):
    """Mean and standard deviation of inputs and targets in training."""

    mean: list[float]
    std: list[float]
    target_mean: list[float]
    target_std: list[float]
    constant: list[str]  # features


def measure_scale(first: Sheet, part: Part, kind: str, at: str, standardise: bool) -> Scale:
    """Measure the scale of inputs and real targets in the training pieces.

    first: the sheet of the training file, for names and messages; part: the pieces. Refused are
    features without any value, a constant target, and constant features alone if the next step is
    to be predicted.
    """
    moments = Moments(chosen_inputs(part), standardise)
    of_words = np.isin(first.features, list(first.categories))
    absent = names_where(first.features, moments.count == 0)
    if absent:
        raise DataError(
            f"{first.path}: in the training {first.unit}s every value of {quote_names(absent)} is "
            "missing. Leave the column out with --features."
        )
    mean = np.where(of_words, 0.0, moments.mean)  # the numbers of words are not scaled
    std = np.where(of_words, 1.0, moments.std)
    constant = names_where(first.features, moments.is_constant)
    if kind == "classify":
        return Scale(mean.tolist(), std.tolist(), [], [], constant)
    if kind in ("next", "reconstruct"):
        if set(constant) | set(first.categories) == set(first.features):
            what = "no next step" if kind == "next" else "nothing"
            raise DataError(
                f"{first.path}: every feature is constant, so there is {what} to learn."
            )
        t_mean = mean[~of_words]  # words are inputs only
        t_std = std[~of_words]
        return Scale(mean.tolist(), std.tolist(), t_mean.tolist(), t_std.tolist(), constant)
    of_targets = Moments(chosen_targets(part, at), standardise)
    if of_targets.is_constant.any():
        name = first.targets[int(np.flatnonzero(of_targets.is_constant)[0])]
        raise DataError(
            f"{first.path} column '{one_line(name)}': the target is constant in the training "
            f"{first.unit}s, so there is nothing to learn."
        )
    t_mean = of_targets.mean
    t_std = of_targets.std
    return Scale(mean.tolist(), std.tolist(), t_mean.tolist(), t_std.tolist(), constant)


def inputs_of(
    sheet: Sheet,
    description: Description,
    otherwise: str = OTHER_SCALES,
    future: Sequence[np.ndarray] = (),
    overwrite: bool = False,
) -> np.ndarray:
    """Return the inputs of all rows, [N, inputs].

    They are (u - mean) / std, zero where missing, for each masked feature an input that is 1 where
    it is missing, those of words and gaps in time, and of columns that are known in advance: see
    `Description.list_inputs`.

    Args:
        sheet: The rows.
        description: How they are scaled.
        otherwise: Ends the advice on values that are too large.
        future: As in `lead_known`.
        overwrite: Whether inputs may take the place of sheet.u, which is not needed any more.
    """
    own = own_inputs_of(sheet, description, otherwise, overwrite)
    led = lead_known(own, sheet, description, future)
    if not description.lagged_width:
        return led
    return np.concatenate([led, lagged(own, sheet, description)], 1)


def own_inputs_of(
    sheet: Sheet, description: Description, otherwise: str, overwrite: bool = False
) -> np.ndarray:
    """Return the inputs of all rows that are made of one row each, as in `inputs_of`."""
    gap_inputs = encode_gap(sheet, description)
    shape = (len(sheet.u), description.own_width)
    room = map_under(sheet.u) if overwrite else None
    size = shape[0] * shape[1] * np.dtype(description.dtype).itemsize
    if room is not None and size <= sheet.u.nbytes:
        inputs = np.frombuffer(room, description.dtype, shape[0] * shape[1]).reshape(shape)
    else:
        room = None
        inputs = np.empty(shape, description.dtype)
    # Row by row the inputs take no more room than the numbers they are made of, so those of a
    # block never overwrite the numbers of a later one.
    for block in block_slices(shape[0], max(shape[1], len(sheet.features))):
        inputs[block] = inputs_of_block(sheet, block, description, gap_inputs, otherwise)
    if room is not None:
        give_back(room, size)
    return inputs


def inputs_of_block(
    sheet: Sheet,
    block: slice,
    description: Description,
    gap_inputs: list[np.ndarray],
    otherwise: str,
) -> np.ndarray:
    """Return the inputs of some rows that are made of one row each, [n, own inputs].

    gap_inputs: those of all rows for gaps in time, if there are any.
    """
    values = sheet.u[block]
    gaps = np.isnan(values)
    for j in np.flatnonzero(gaps.any(0)):
        if sheet.features[j] not in description.masked:
            row = block.start + int(np.flatnonzero(gaps[:, j])[0])
            raise DataError(
                f"{sheet.place(row, sheet.features[j])}: the value is missing. No value of "
                "this feature was missing in training, so the network has no input that marks "
                "it. Fill it in, or pass --missing drop."
            )
    scaled = (values - np.array(description.mean)) / np.array(description.std)

    def place(row: int, j: int) -> str:
        return sheet.place(block.start + row, sheet.features[j])

    u = cast(scaled, description.dtype, place, otherwise)
    masked_columns = [sheet.features.index(name) for name in description.masked]
    is_missing = gaps[:, masked_columns].astype(u.dtype)
    numbers = np.where(gaps, 0, u)
    if description.categories:
        numbers = numbers[:, [sheet.features.index(name) for name in description.numeric]]
    of_words = encode_categories(sheet, values, description)
    of_gaps = [inputs[block] for inputs in gap_inputs]
    return np.concatenate([numbers, is_missing, *of_words, *of_gaps], 1)


def lead_known(
    own: np.ndarray, sheet: Sheet, description: Description, future: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Return inputs [N, inputs] in which columns known in advance are those of the next H rows.

    Args:
        own: The inputs that are made of one row each, [N, own inputs].
        sheet: The rows.
        description: Says which columns are known, and H, the steps that are predicted at once.
        future: Of each sequence the known inputs of the rows after its end, [F, known inputs]; none
            by default. Where a row's H next ones go beyond them, the last is repeated.
    """
    known = description.known_places
    if not known:
        return own
    horizon = description.ahead["horizon"]
    width = description.width - description.lagged_width
    led = np.zeros((len(own), width), own.dtype)
    led[:, : own.shape[1]] = own
    for i, (start, T) in enumerate(zip(sheet.starts, sheet.lengths, strict=True)):
        rows = own[start : start + T, known]
        if len(future):
            rows = np.concatenate([rows, future[i]])
        ahead = np.minimum(np.arange(T)[:, None] + np.arange(1, horizon + 1), len(rows) - 1)
        led[start : start + T, known] = rows[ahead[:, 0]]
        led[start : start + T, own.shape[1] :] = rows[ahead[:, 1:]].reshape(T, -1)
    return led


def lagged(own: np.ndarray, sheet: Sheet, description: Description) -> np.ndarray:
    """Return the predicted columns in earlier rows, [N, lags x columns], as inputs.

    Before the start of a sequence its first row stands. own: as in `lead_known`.
    """
    lags = description.ahead.get("lags", [])
    if not lags:
        return own[:, :0]
    places = [description.numeric.index(name) for name in description.ahead["predicted"]]
    starts = np.repeat(sheet.starts, sheet.lengths)
    order = np.concatenate(
        [np.arange(a, a + T) for a, T in zip(sheet.starts, sheet.lengths, strict=True)]
    )
    parts = []
    for lag in lags:
        part = np.zeros((len(own), len(places)), own.dtype)
        part[order] = own[np.maximum(order - lag, starts)][:, places]
        parts.append(part)
    return np.concatenate(parts, 1)


def cast(
    values: np.ndarray,
    dtype: str,
    place: Callable[[int, int], str],
    otherwise: str = OTHER_SCALES,
) -> np.ndarray:
    """Return values in the type of training; a value outside its range is refused.

    Args:
        values: An array of rows and columns.
        dtype: The name of the type.
        place: Returns where a row and a column are in the file, for the message.
        otherwise: Ends the advice on a value that is too large.
    """
    too_large = np.argwhere(np.abs(values) > np.finfo(dtype).max)
    if len(too_large):
        row, j = map(int, too_large[0])
        raise DataError(
            f"{place(row, j)}: {values[row, j]:g} is not finite in {dtype}. Scale the column"
            f"{otherwise}."
        )
    return values.astype(dtype)


def sequences_of(part: Part, u: np.ndarray, description: Description) -> Sequences:
    """Return the pieces of one split with their targets.

    With kind "next" the inputs are all rows but the last, the targets all but the first; if H steps
    are predicted at once, all rows but the last H, and the H rows after each.

    Args:
        part: The pieces.
        u: The inputs of all rows of their sheet, by `inputs_of`.
        description: How the data are scaled.
    """
    if description.kind == "next":
        ahead = ahead_of(description)
        next_u = predicted_columns(u, description)
        before = []
        after = []
        for _, start, stop in part.pieces:
            before.append(u[start : stop - ahead.horizon])
            after.append(ahead.targets_of(next_u[start:stop]))
        return Sequences(before, after, part.names, origins_of(part, description))
    if description.kind == "classify":
        targets = class_targets(part, description.at)
    else:
        targets = real_targets(part, description)
    inputs = [u[start:stop] for _, start, stop in part.pieces]
    return Sequences(inputs, targets, part.names, origins_of(part, description))


def predicted_columns(u: np.ndarray, description: Description) -> np.ndarray:
    """Return the columns of inputs u [N, inputs] that kind "next" predicts, NaN where missing.

    A missing value, 0 as an input, is NaN as a target, which then has no weight in the loss.
    """
    numbers = description.numeric  # they come first, then the marks of missing values
    predicted = ahead_of(description).predicted
    if list(predicted) == numbers and not description.masked:
        return u[:, : len(numbers)]
    columns = u[:, [numbers.index(name) for name in predicted]]
    for k, name in enumerate(predicted):
        if name in description.masked:
            mark = len(numbers) + description.masked.index(name)
            columns[u[:, mark] != 0, k] = np.nan
    return columns


def origins_of(part: Part, description: Description) -> list[Origin]:
    """Return where the targets of each piece stand in the file: rows of its series, and times."""
    sheet = part.cut.sheet
    origins = []
    for sequence, start, stop in part.pieces:
        first = start
        if description.kind == "next":  # the first row is no target
            first = start + 1
            stop -= ahead_of(description).horizon - 1
        elif description.symbols:  # nor is the first symbol
            first = start + 1
        elif description.at == "last":
            first = stop - 1
        times = () if sheet.stamps is None else sheet.stamps[first:stop]
        origins.append(Origin(sheet.ids[sequence], first - int(sheet.starts[sequence]), times))
    return origins


def samples_of(part: Part, u: np.ndarray, description: Description) -> Samples:
    """Return the samples of one split, [N, ...], with their targets.

    The arguments are those of `sequences_of`. With kind "reconstruct" the targets are the inputs.
    """
    x = arrange_samples(part.pieces, u, description)
    if description.kind == "reconstruct":
        return Samples(x, x, part.names)
    if description.kind == "classify":
        targets = class_targets(part, "last")
    else:
        targets = real_targets(part, description)
    return Samples(x, np.array(targets), part.names)


def arrange_samples(pieces: list[Piece], u: np.ndarray, description: Description) -> np.ndarray:
    """Return the inputs [N, ...] of samples. pieces: their rows in u [rows, features]."""
    assert description.sample_shape is not None
    shape = (u.shape[1], *description.sample_shape[1:])
    places = np.arange(math.prod(shape[1:]))
    starts = np.array([piece.start for piece in pieces])
    rows = (starts[:, None] + places).reshape(-1)
    return samples_of_rows(u[rows], shape).reshape(-1, *description.input_shape or ())


def class_targets(part: Part, at: str) -> list[np.ndarray | float]:
    """Return the class number of each piece (at "last"), or of each of its steps ("every").

    -1 where missing.
    """
    targets: list[np.ndarray | float] = []
    for target in part.targets(at):
        numbers = np.nan_to_num(target[..., 0], nan=-1).astype(np.int64)
        targets.append(numbers if at == "every" else int(numbers))
    return targets


def real_targets(part: Part, description: Description) -> list[np.ndarray | float]:
    """Return the targets of each piece as (target - mean) / std, by their scale in training.

    [T, k] at every row, [k] at the last.
    """
    sheet = part.cut.sheet
    mean = np.array(description.target_mean)
    std = np.array(description.target_std)

    def place(_row: int, k: int) -> str:
        return f"{sheet.path} column '{one_line(sheet.targets[k])}'"

    targets: list[np.ndarray | float] = []
    for target in part.targets(description.at):
        scaled = (target - mean) / std
        rows = cast(np.atleast_2d(scaled), description.dtype, place)
        targets.append(rows if description.at == "every" else rows[0])
    return targets


def notes_on_constants(constant: list[str], first: Sheet) -> list[str]:
    """Return notes on the features that are constant in training, one on all those of samples.

    Images have pixels that are always white, perhaps hundreds; first: the training file's sheet.
    """
    if first.shape is not None and len(constant) > 1:
        return [f"{len(constant)} features are constant in training: {quote_names(constant, 3)}"]
    return [f"feature '{one_line(name)}' is constant in training" for name in constant]
