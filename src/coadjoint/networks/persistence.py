"""A start for forecasts: the untrained network predicts that everything stays as it is."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from ..errors import OptionError
from .initialisers import identity_
from .interface import Net

AnyNet = TypeVar("AnyNet", bound=Net)


def persist_(net: AnyNet) -> AnyNet:
    """D = [1 0], V = 0 and b_o = 0: the answer a = D u of the untrained network is its last input.

    That is the forecast "everything stays as it is", from which the network learns the changes.
    With more inputs than outputs, the first ones are repeated. Refused are networks without D
    (skip), with fewer inputs than outputs, or with an output function.

    >>> import torch, coadjoint as co
    >>> from coadjoint.networks.persistence import persist_
    >>> net = co.Network("gru", inputs=1, hidden=4, outputs=1, readout="every", skip=True)
    >>> persist_(net)(torch.tensor([3.0, 5.0])[:, None, None]).y_hat.flatten()
    tensor([3., 5.], grad_fn=<ViewBackward0>)
    """
    D = getattr(net, "D", None)
    if not isinstance(D, nn.Parameter):
        raise OptionError("$persistence begins with D u in the readout: give $skip too.")
    if len(D) > D.shape[1] or getattr(net, "output", None) != "identity":
        raise OptionError(
            "$persistence repeats the last input, so it is for tasks whose answers are their next "
            "inputs: leave it out."
        )
    with torch.no_grad():
        identity_(D)
        for name in ("V", "b_o"):
            weight = getattr(net, name)
            if weight is not None:
                weight.zero_()
    return net
