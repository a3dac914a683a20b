"""One row at a time, as it arrives: the state of a network is carried from row to row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, InputError, Unsupported, brief, one_line
from ..networks.interface import Net
from ..networks.readout import Readout
from ..objectives.batch import Batch
from ..tasks.description import Description
from ..tasks.files.columns import TableColumns
from ..tasks.files.sheet import Options, Problems, Sheet, quote_names
from ..tasks.files.words import canonical_word
from ..tasks.frames import Given, TypedColumn, is_missing, read_times
from ..tasks.scaling import own_inputs_of
from .answers import decide, probabilities

PATH = "argument row"  # in messages
Row = Mapping[str, Given] | Sequence[Given] | np.ndarray | Tensor


@dataclass(frozen=True, eq=False)
class StepState:
    """What is carried from one row of a sequence to the next.

    network  the states of the network, [1, n]
    count    the rows so far
    total    the sum of what a mean readout reads, [1, n]; None for other readouts
    values   the last value of each feature that was not missing; None where there was none
    time     of the last row, a number or microseconds since 1970; None without times
    past     the predicted columns in the last rows, [P, k], in scaled units, as many as the longest
             lag; None for a network without lags
    """

    network: Tensor
    count: int
    total: Tensor | None
    values: tuple[Given, ...]
    time: float | None
    past: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class StepAnswer:
    """The answer to the rows so far.

    value          a label, a number, or an array of several numbers; None for a row that is left
                   out, because it lacks a value
    probabilities  of the classes, in the order of `Model.labels`; None without classes
    """

    value: Given
    probabilities: np.ndarray | None = None


def refuse_if_not_stepwise(net: Net, description: Description) -> None:
    """Refuse networks whose answer cannot be carried from row to row."""
    why = ""
    if description.sample_shape is not None:
        why = "this network reads samples without time"
    elif description.ahead.get("known"):
        known = quote_names(description.ahead["known"])
        why = f"{known}, known in advance, would have to come with the row before theirs"
    elif getattr(getattr(net, "layers", None), "bidirectional", False):
        why = "this network reads sequences in both directions, so it must see the last row first"
    elif getattr(net, "summary", None) not in (None, "mean"):
        why = f"the readout '{net.summary}' reads all rows at once"
    elif not (net.carries_state or carries_mean(net)):
        why = "this network cannot carry its state from row to row"
    if why:
        raise Unsupported(f"step: {why}. Use predict.")


def carries_mean(net: Net) -> bool:
    """Tell whether a network reads the mean of its states, which can be carried."""
    of_time = any(layer.cell is not None and layer.cell.given for _, layer in net.recurrences)
    return getattr(net, "summary", None) == "mean" and not of_time


def step(
    net: Net, description: Description, row: Row, state: StepState | None, time: Given = None
) -> tuple[StepAnswer, StepState | None]:
    """Return (the answer to the rows so far, the state after this one); see `Model.step`."""
    refuse_if_not_stepwise(net, description)
    d = description
    values, time = read_row(row, d, time)
    before = None if state is None else state.values
    is_lost = [value is None for value in values]
    missing = d.reading.get("missing", "refuse")
    if any(is_lost) and missing == "ffill" and before is not None:
        values = [old if new is None else new for new, old in zip(values, before, strict=True)]
    still_lost = [name for name, value in zip(d.features, values, strict=True) if value is None]
    if still_lost and missing in ("drop", "ffill"):
        return StepAnswer(None), state
    if still_lost and missing == "refuse":
        raise DataError(
            f"{PATH}: the value of {quote_names(still_lost)} is missing. Fill it in: the model was "
            "trained without missing values."
        )
    now = None if time is None else read_time(time, d)
    sheet = sheet_of_rows(values, now, state, d)
    own = own_inputs_of(sheet, d, "")[-1:]
    of_lags, past = read_lags(own, None if state is None else state.past, d)
    u = torch.from_numpy(np.concatenate([own, of_lags], 1))[:, None]  # [1, 1, inputs]
    known = values
    if before is not None:
        known = [old if new is None else new for new, old in zip(values, before, strict=True)]
    with torch.no_grad():
        a, after = advance(net, u, state)
    after = replace(after, values=tuple(known), time=now, past=past)
    outputs = a.double().cpu().numpy().reshape(1, -1)
    shares = probabilities(outputs)[0] if d.labels else None
    answer = decide(outputs, d)[0]
    return StepAnswer(answer.item() if np.ndim(answer) == 0 else answer, shares), after


def read_lags(
    own: np.ndarray, past: np.ndarray | None, description: Description
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (the inputs of a row that are earlier rows, [1, lags k]; the past of the next row).

    They are those of `tasks.scaling.lagged`: before the first row it stands for those before it.

    Args:
        own: The inputs that are made of the row itself, [1, own inputs].
        past: As in `StepState`; None before the first row.
        description: Says which columns are predicted, and the lags.
    """
    lags = description.ahead.get("lags", [])
    if not lags:
        return own[:, :0], None
    places = [description.numeric.index(name) for name in description.ahead["predicted"]]
    row = own[:, places]
    values = row if past is None else np.concatenate([past, row])
    earlier = np.maximum(len(values) - 1 - np.array(lags), 0)
    return values[earlier].reshape(1, -1), values[-lags[-1] :]


def advance(net: Net, u: Tensor, state: StepState | None) -> tuple[Tensor, StepState]:
    """Return (the pre-outputs, the state) after the inputs u [1, 1, inputs] of one row."""
    x0 = None if state is None else state.network
    run: Given = net.run(net.move_batch(Batch(u, x0=x0)))
    count = 1 if state is None else state.count + 1
    if getattr(net, "summary", None) is None:
        return run.a, StepState(run.state, count, None, (), None)
    assert isinstance(net, Readout)
    total = run.readout_input if state is None else state.total + run.readout_input
    inputs = net.move_batch(Batch(u)).u[0]
    # The summary of one row, the mean so far, is that row.
    a = net.pre_outputs(run.layout.rows, total / count, net.V, net.b_o, inputs, net.extra_weights())
    return a, StepState(run.state, count, total, (), None)


def read_row(row: Row, description: Description, time: Given) -> tuple[list[Given], Given]:
    """Return (the value of each feature, None where missing; the time) of a row.

    A dictionary, or a row of a frame, is read by name, and anything else by position.
    """
    d = description
    if hasattr(row, "to_dict"):  # a row of a pandas frame
        row = row.to_dict()
    if isinstance(row, Tensor):
        row = row.detach().cpu().numpy()
    if isinstance(row, Mapping):
        lacking = [name for name in d.features if name not in row]
        if lacking:
            raise InputError(
                f"{PATH} lacks {quote_names(lacking)}. The model needs: {quote_names(d.features)}."
            )
        given = [row[name] for name in d.features]
        if time is None and d.columns["time"]:
            time = row.get(d.columns["time"])
    elif np.ndim(row) == 1 and len(row) == len(d.features):
        given = list(row)
    elif np.ndim(row) == 0 and len(d.features) == 1:
        given = [row]
    else:
        raise InputError(
            f"row must hold {len(d.features)} values, of {quote_names(d.features)}, or be a "
            f"dictionary of them; got {brief(row)}."
        )
    values: list[Given] = []
    for name, value in zip(d.features, given, strict=True):
        if d.symbols == "character":  # a blank is a character, too
            values.append(str(value))
        else:
            values.append(read_word(value) if name in d.categories else read_number(value, name))
    return values, time


def read_word(value: Given) -> str | None:
    """Return a word as training compares it; None if it is missing."""
    return None if is_missing(value) else canonical_word(str(value)) or None


def read_number(value: Given, name: str) -> float | None:
    """Return a number; None if it is missing. name: that of the feature."""
    if is_missing(value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(
            f"{PATH}: '{one_line(name)}' is {brief(value)}; expected a number."
        ) from None
    if isinstance(value, str) or not np.isfinite(number):
        raise DataError(f"{PATH}: '{one_line(name)}' is {brief(value)}; expected a finite number.")
    return number


def read_time(time: Given, description: Description) -> float:
    """Return a time as a number, or a date in microseconds since 1970."""
    problems = Problems(PATH)
    columns = TableColumns()
    values = np.empty(1, object)
    values[0] = time
    options = Options(dates=description.reading.get("dates"))
    read_times(TypedColumn.of(values, PATH), columns, options, problems, lambda row: PATH)
    problems.raise_if_any()
    assert columns.time is not None
    return float(columns.time[0])


def sheet_of_rows(
    values: list[Given], time: float | None, state: StepState | None, description: Description
) -> Sheet:
    """Return a sheet of the row, behind the row before if there is one and both have times."""
    d = description
    categories: dict[str, tuple[str, ...]] = {}
    codes = []
    for name, value in zip(d.features, values, strict=True):
        if name in d.categories:
            categories[name] = () if value is None else (value,)
            codes.append(np.nan if value is None else 0.0)
        else:
            codes.append(np.nan if value is None else value)
    rows = [codes]
    times = [time]
    columns = {"id": "", "time": d.columns["time"]}
    if d.gap and time is not None:
        if d.gap["dates"]:
            columns["stamps"] = "1"
        if state is not None and state.time is not None:
            rows = [codes, codes]  # of the row before only the time is read
            times = [state.time, time]
            if time <= state.time:
                raise DataError(f"{PATH}: its time is not later than that of the row before.")
    return Sheet(
        PATH,
        "",
        tuple(d.features),
        np.array(rows, dtype=np.float64),
        np.array([len(rows)]),
        ["row"],
        lambda row, column: f"{PATH} '{one_line(column)}'",
        np.arange(len(rows)),
        time=None if time is None else np.array(times, dtype=np.float64),
        columns=columns,
        categories=categories,
    )
