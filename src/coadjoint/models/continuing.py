"""A network along a series and beyond its end: outputs, states, and paths fed by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, InputError, NumericalError, one_line
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..tasks.ahead import ahead_of
from ..tasks.description import Description
from ..tasks.files.sheet import quote_names
from ..training.predict import STEPS_AT_ONCE

Shock = Callable[[int], np.ndarray]  # what is added to a block of predictions, [B, H, k]


class Trace(NamedTuple):
    """What a network makes of one series u_1..u_T.

    a      [T, outputs], the pre-outputs at every row: scaled predictions of the next rows
    state  [K, n], the states after K chosen rows, from which forecasts go on
    """

    a: np.ndarray
    state: Tensor


def trace_series(net: Net, u: np.ndarray, ends: Sequence[int]) -> Trace:
    """Run a network along one series, and keep its states after `ends` rows each.

    Args:
        net: A network that carries its state.
        u: The inputs, [T, inputs].
        ends: K ascending numbers of rows, from 1 to T.
    """
    cuts = sorted({*ends, *range(STEPS_AT_ONCE, len(u), STEPS_AT_ONCE), len(u)})
    state: Any = None
    outputs = []
    states = {}
    begin = 0
    with torch.no_grad():
        for end in cuts:
            part = torch.from_numpy(np.ascontiguousarray(u[begin:end]))[:, None]
            run: Any = net.run(net.move_batch(Batch(part, x0=state)))
            state = run.state
            outputs.append(run.a[:, 0].double().cpu().numpy())
            states[end] = state[0]
            begin = end
    return Trace(np.concatenate(outputs), torch.stack([states[end] for end in ends]))


def continue_paths(
    net: Net,
    a: np.ndarray,
    state: Tensor,
    steps: int,
    rows: FutureRows,
    lead: np.ndarray,
    past: np.ndarray,
    shock: Shock | None = None,
) -> np.ndarray:
    """Return what is predicted for the next `steps` steps, [B, steps, k], in scaled units.

    A network that predicts H steps at once is fed with these H, and predicts the H after them.

    Args:
        net: A network that carries its state.
        a: The pre-outputs at the last row, [B, outputs].
        state: The states there, [B, n].
        steps: How many steps.
        rows: Reads the outputs, and makes the inputs of rows from what is predicted for them.
        lead: The known inputs of the next F rows, [B, F, known inputs]; F >= `rows.reach(steps)`.
        past: The predicted columns in the last rows, [B, P, k], in scaled units; P is at least the
            longest lag.
        shock: Returns what is added to block number 0, 1, ... before it is fed back.
    """
    blocks: list[np.ndarray] = []
    done = 0
    with torch.no_grad():
        while True:
            block = rows.points(a)
            if shock is not None:
                block = block + shock(len(blocks))
            blocks.append(block)
            done += block.shape[1]
            if done >= steps:
                break
            made = rows.make(block, lead[:, done - block.shape[1] :], past)
            past = np.concatenate([past, block], 1)[:, block.shape[1] :]
            inputs = torch.from_numpy(made)
            run: Any = net.run(net.move_batch(Batch(inputs, x0=state)))
            state = run.state
            a = run.a[-1].double().cpu().numpy()
    values = np.concatenate(blocks, 1)[:, :steps]
    if not np.isfinite(values).all():
        raise NumericalError(
            "the forecast is not finite: fed by itself, the network diverges. Use fewer --steps, "
            "or train with a smaller --lr or --clip."
        )
    return values


class FutureRows:
    """The inputs of rows that are predicted: numbers, no value missing, the usual time step."""

    def __init__(self, description: Description) -> None:
        """Read a description; what is not predicted in it is refused by `refuse_unpredicted`."""
        d = description
        self.description = d
        self.ahead = ahead_of(d)
        self.known = d.known_places
        self.places = [d.numeric.index(name) for name in self.ahead.predicted]
        self.usual = np.zeros(d.inputs)
        if d.gap:  # one usual step: see tasks.encoding.encode_gap
            self.usual[d.own_width - 1] = (np.log(2.0) - d.gap["mean"]) / d.gap["std"]

    def points(self, a: np.ndarray) -> np.ndarray:
        """Return the predictions [B, H, k] of outputs [B, outputs]: of quantiles the median."""
        points: np.ndarray = self.ahead.arrange(a)[..., self.ahead.middle]
        return points

    def make(self, block: np.ndarray, lead: np.ndarray, past: np.ndarray) -> np.ndarray:
        """Return the inputs [H, B, inputs] of the H rows that have just been predicted.

        Args:
            block: What is predicted for them, [B, H, k], in scaled units.
            lead: The known inputs of these H rows and of the H after them, [B, 2H or more, known
                inputs]; a row reads those of the H rows after it.
            past: The predicted columns in the rows before, [B, P, k], which lags look up.
        """
        B, H, _ = block.shape
        inputs = np.tile(self.usual, (B, H, 1))
        inputs[..., self.places] = block
        if self.known:
            after = lead[:, np.arange(H)[:, None] + np.arange(1, H + 1)]  # [B, H, H, known]
            inputs[..., self.known] = after[:, :, 0]
            later = after[:, :, 1:].reshape(B, H, -1)
            own = self.description.own_width
            inputs[..., own : own + later.shape[-1]] = later
        if self.ahead.lags:
            values = np.concatenate([past, block], 1)
            now = np.arange(past.shape[1], values.shape[1])
            earlier = values[:, now[:, None] - np.array(self.ahead.lags)]  # [B, H, lags, k]
            inputs[..., -self.description.lagged_width :] = earlier.reshape(B, H, -1)
        return inputs.swapaxes(0, 1).astype(self.description.dtype)

    def past_of(self, u: np.ndarray, end: int) -> np.ndarray:
        """Return the predicted columns of the rows before row `end` of a series, [1, P, k].

        P is the longest lag; before the start of the series its first row stands. u: its inputs.
        """
        rows = np.maximum(np.arange(end - max(self.ahead.lags, default=0), end), 0)
        past: np.ndarray = u[rows][:, self.places].astype(np.float64)
        return past[None]

    def reach(self, steps: int) -> int:
        """Return how many rows of the future are read to predict `steps` steps.

        The network predicts H steps at once and reads as many rows ahead: whole blocks of H.
        """
        H = self.ahead.horizon
        return -(-steps // H) * H if self.known else steps

    def lead_of(self, future: np.ndarray, steps: int, series: str) -> np.ndarray:
        """Return the known inputs of the next rows, [1, reach, known inputs].

        future: those that the file has, [F, known inputs]; too few are refused.
        """
        if not self.known:
            return np.zeros((1, steps, 0))
        reach = self.reach(steps)
        if len(future) < reach:
            need = (
                "as many"
                if reach == steps
                else f"{reach}, as {self.ahead.horizon} are read at once"
            )
            raise DataError(
                f"series '{one_line(series)}' has {len(future)} rows of the future, with "
                f"{quote_names(self.ahead.known)} and empty cells for what is predicted; {steps} "
                f"steps need {need}. Add them to the end of the file, or lower --steps."
            )
        return future[None, :reach]

    def refuse_unpredicted(self, steps: int) -> None:
        """Refuse to go on where rows have inputs that are neither predicted nor known."""
        ahead = self.ahead
        given = {*ahead.predicted, *ahead.known}
        unknown = [name for name in self.description.features if name not in given]
        if steps > ahead.horizon and unknown:
            raise DataError(
                f"to forecast {steps} steps, rows of the future must be read, and their "
                f"{quote_names(unknown)} are not predicted. Forecast --steps {ahead.horizon}; or "
                "train with --strategy direct and a longer --horizon, with --known, or without "
                "these columns."
            )


def check_network(net: Net, description: Description) -> None:
    """Refuse networks that predict no next step, or carry no state beyond the last row."""
    if description.symbols:
        raise InputError("a model of symbols is continued by coadjoint sample, or model.sample.")
    if description.kind != "next":
        raise InputError(
            "forecasts need a model trained with --kind next; this one is of kind "
            f"'{description.kind}'."
        )
    if not net.carries_state:
        raise InputError(
            "this network reads sequences backwards or all steps at once, so there is no state to "
            "go on from. Train without --bidirectional, and with the plain readout."
        )
