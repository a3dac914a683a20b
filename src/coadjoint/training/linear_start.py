"""Starts for forecasts, which D of the readout makes: the network learns from there.

repeated_inputs   nothing changes: each output repeats the present value of its column
begin_linear_     for short series: the linear forecast of what the network reads
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import nn

from ..networks.interface import Net
from ..tasks.ahead import present_inputs
from ..tasks.data import Data
from ..tasks.linear import LinearModel, ridge_path
from ..tasks.task import Sequences, Task

HELD_OUT = 5  # the last of so many parts of the rows chooses the strength of the penalty


def repeated_inputs(task: object, has_target: bool) -> Literal[True] | list[int]:
    """Return the option `persistence` of `networks.make` for a task: what its outputs repeat.

    For kind "next" that is the input with the present value of each predicted column, in the scale
    of the output. True, the first inputs in their order, is for all other tasks, and for runs whose
    columns nobody named as long as the network has no more outputs than inputs.

    has_target: whether the columns to predict were named.
    """
    if not isinstance(task, Data) or task.description.kind != "next":
        return True
    columns = present_inputs(task.description)
    return columns if has_target or len(columns) > task.inputs else True


def begin_linear_(net: Net, task: Task) -> bool:
    """Make the untrained network, a = D u + b_o, the ridge regression of targets on inputs.

    V = 0, so it learns from there what a line does not say. Return whether that was done:
    only networks with D are changed, for tasks of kind "next" whose inputs hold earlier rows, and
    only with targets that are numbers, not quantiles.
    """
    D = getattr(net, "D", None)
    if not isinstance(task, Data) or not isinstance(D, nn.Parameter):
        return False
    ahead = task.description.ahead
    train = task.sets["train"] if task.uncut is None else task.uncut
    if not ahead.get("lags") or ahead["quantiles"] or not isinstance(train, Sequences):
        return False
    fitted = fit_line(train, max(ahead["lags"]))
    with torch.no_grad():
        D.copy_(torch.from_numpy(fitted.A.T))
        for name, values in (("b_o", torch.from_numpy(fitted.c)), ("V", torch.zeros(()))):
            weight = getattr(net, name)
            if weight is not None:
                weight.copy_(values)
    return True


def fit_line(train: Sequences, first: int) -> LinearModel:
    """Return the ridge regression of targets on inputs, rows before `first` of a sequence aside.

    Its strength is the best on the last rows; it is then fitted to all.
    """
    assert train.y is not None
    # Before row `first`, lags are not those of training: the first row stands for them.
    X = np.concatenate([u[min(first, len(u) // 2) :] for u in train.u]).astype(np.float64)
    targets = [np.asarray(y) for y in train.y]
    Y = np.concatenate([y[min(first, len(y) // 2) :] for y in targets]).astype(np.float64)
    is_known = np.isfinite(Y).all(1)
    X = X[is_known]
    Y = Y[is_known]
    n = len(X) - max(1, len(X) // HELD_OUT)
    errors = []
    for model in ridge_path(X[:n], Y[:n]):
        errors.append(float(np.square(model.predict(X[n:]) - Y[n:]).mean()))
    return list(ridge_path(X, Y))[int(np.argmin(errors))]
