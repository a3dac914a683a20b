"""A network along a series and beyond its end: outputs, states, and paths fed by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, InputError, NumericalError
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..tasks.description import Description
from ..tasks.files.sheet import quote_names
from ..training.predict import STEPS_AT_ONCE

Shock = Callable[[int], np.ndarray]  # what is added to the outputs at a step, [B, outputs]


class Trace(NamedTuple):
    """A network along one series u_1..u_T.

    a      [T, outputs], the pre-outputs at every row
    state  [K, n], the states after K chosen rows
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
    net: Net, a: np.ndarray, state: Tensor, steps: int, inputs: InputRows, shock: Shock | None
) -> np.ndarray:
    """Return the outputs of `steps` steps, [B, steps, outputs], each fed by the one before.

    Args:
        net: A network that carries its state.
        a: The pre-outputs at the last row, [B, outputs]: the first step.
        state: The states there, [B, n].
        steps: How many steps.
        inputs: Makes the inputs of a row from the values predicted for it.
        shock: Returns what is added to a step, counted from 0, before it is fed back.
    """
    path = []
    with torch.no_grad():
        for h in range(steps):
            value = a if shock is None else a + shock(h)
            path.append(value)
            if h == steps - 1:
                break
            row = torch.from_numpy(inputs.make(value))[None]
            run: Any = net.run(net.move_batch(Batch(row, x0=state)))
            state = run.state
            a = run.a[0].double().cpu().numpy()
    values = np.stack(path, 1)
    if not np.isfinite(values).all():
        raise NumericalError(
            "the forecast is not finite: fed by itself, the network diverges. Use fewer --steps, "
            "or train with a smaller --lr or --clip."
        )
    return values


class InputRows:
    """The inputs of rows that are predicted: numbers, no value missing, the usual time step."""

    def __init__(self, description: Description) -> None:
        """Refuse descriptions with inputs whose future is not predicted."""
        if description.categories:
            raise DataError(
                f"columns {quote_names(list(description.categories))} hold words, which are not "
                "predicted, so no further step can be read. Train without --categorical."
            )
        self.dtype = description.dtype
        rest = [0.0] * len(description.masked)
        gap = description.gap
        if gap:  # one usual step: see tasks.encoding.encode_gap
            rest.append((np.log(2.0) - gap["mean"]) / gap["std"])
        self.rest = np.array(rest)

    def make(self, values: np.ndarray) -> np.ndarray:
        """Return inputs [B, inputs] of predicted values [B, outputs], in their units after scaling."""
        rest = np.broadcast_to(self.rest, (len(values), len(self.rest)))
        return np.concatenate([values, rest], 1).astype(self.dtype)


def check_network(net: Net, description: Description) -> None:
    """Refuse networks that predict no next step, or carry no state beyond the last row."""
    if description.kind != "next":
        raise InputError(
            f"only a model of kind 'next' can be forecast with; this one is of kind "
            f"'{description.kind}'. Train with --kind next."
        )
    if not net.carries_state:
        raise InputError(
            "this network reads sequences backwards or all steps at once, so there is no state to "
            "go on from. Train without --bidirectional, and with the plain readout."
        )
