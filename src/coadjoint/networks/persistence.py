"""A start for forecasts: the untrained network predicts that everything stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from ..errors import InputError, OptionError, brief
from .initialisers import identity_
from .interface import Net

AnyNet = TypeVar("AnyNet", bound=Net)


def persist_(net: AnyNet, repeated: Sequence[int] | None = None) -> AnyNet:
    """D of zeros and ones, V = 0 and b_o = 0: the untrained network answers with its last input.

    That is the forecast "everything stays as it is", from which the network learns the changes.

    repeated  the input that each output repeats, [outputs]: D_ij = 1 for j = repeated[i]. By
              default D = [1 0], which repeats the first inputs.

    Refused are networks without D (skip) or with an output function, without `repeated` also those
    with fewer inputs than outputs.

    >>> import torch, coadjoint as co
    >>> from coadjoint.networks.persistence import persist_
    >>> net = co.Network("gru", inputs=1, hidden=4, outputs=1, readout="every", skip=True)
    >>> persist_(net)(torch.tensor([3.0, 5.0])[:, None, None]).y_hat.flatten()
    tensor([3., 5.], grad_fn=<ViewBackward0>)
    >>> net = co.Network("gru", inputs=3, hidden=4, outputs=2, readout="every", skip=True)
    >>> persist_(net, [2, 0])(torch.tensor([[[3.0, 5.0, 7.0]]])).y_hat.flatten()
    tensor([7., 3.], grad_fn=<ViewBackward0>)
    """
    D = getattr(net, "D", None)
    if not isinstance(D, nn.Parameter):
        raise OptionError("$persistence begins with D u in the readout: give $skip too.")
    outputs, inputs = D.shape
    is_too_wide = repeated is None and outputs > inputs
    if is_too_wide or getattr(net, "output", None) != "identity":
        raise OptionError(
            "$persistence repeats the last input, so it is for tasks whose answers are their next "
            "inputs: leave it out."
        )
    if repeated is not None:
        _check(repeated, outputs, inputs)
    with torch.no_grad():
        if repeated is None:
            identity_(D)
        else:
            D.zero_()
            D[torch.arange(outputs), list(repeated)] = 1.0
        for name in ("V", "b_o"):
            weight = getattr(net, name)
            if weight is not None:
                weight.zero_()
    return net


def _check(repeated: Sequence[int], outputs: int, inputs: int) -> None:
    """Refuse anything but the number of an input for each output."""
    are_inputs = all(j in range(inputs) for j in repeated)
    if len(repeated) != outputs or not are_inputs:
        raise InputError(
            f"persistence must name the input that each of {outputs} outputs repeats, 0 to "
            f"{inputs - 1}; got {brief(list(repeated))}."
        )
