"""RNN, LSTM and GRU with torch.nn's arguments, outputs and weights, and `replace`, which puts them into a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import InputError, KindError, choose
from ..sweeps.torch_internals import child_modules
from .layers import NORMS, RNNModule


class RNN(RNNModule):
    """torch.nn.RNN, twice differentiable on every device.

    h' = tanh(W_ih u + b_ih + W_hh h + b_hh), or relu. Arguments, inputs, outputs and parameters are torch.nn.RNN's; what it
    has beyond them: engine, recurrent_dropout, zoneout, layer_norm, init (see RNNModule)."""

    torch_class = nn.RNN
    arguments = (*RNNModule.arguments, "nonlinearity")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if "proj_size" in kwargs:
            raise InputError("proj_size argument is only supported for LSTM, not RNN or GRU")
        self.nonlinearity = choose("nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(
            f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, *args, **kwargs
        )


class LSTM(RNNModule):
    """torch.nn.LSTM, twice differentiable on every device.

    c' = f c + i g, h' = o tanh(c') (W_hr of it, with proj_size). Arguments, inputs, outputs and parameters are
    torch.nn.LSTM's; what it has beyond them: engine, recurrent_dropout, zoneout, layer_norm, init (see RNNModule), and

    peephole           the gates see c: parameters weight_pi, weight_pf, weight_po, one value for each unit
    forget_bias        the forget gate's bias at the start; 1 is a common choice, torch.nn draws it around 0"""

    torch_class = nn.LSTM
    arguments = (*RNNModule.arguments, "proj_size")
    slots = 2
    norms = NORMS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)


class GRU(RNNModule):
    """torch.nn.GRU, twice differentiable on every device.

    h' = (1 - z) n + z h, n = tanh(W_in u + b_in + r (W_hn h + b_hn)). Arguments, inputs, outputs and parameters are
    torch.nn.GRU's; what it has beyond them: engine, recurrent_dropout, zoneout, layer_norm, init (see RNNModule)."""

    torch_class = nn.GRU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "proj_size" in kwargs:
            raise InputError("proj_size argument is only supported for LSTM, not RNN or GRU")
        super().__init__("GRU", *args, **kwargs)


def replace(model: nn.Module, **extras: Any) -> nn.Module:
    """Every torch.nn.RNN, LSTM and GRU inside `model`, replaced by ours with the same weights; the model itself is returned,
    or, if it is one of these, its replacement. Parameters and hooks are taken over as they are: an optimiser and tied weights
    stay valid. Subclasses are left alone. extras: engine=, recurrent_dropout=, zoneout=, ..."""
    if not isinstance(model, nn.Module):
        raise KindError(f"replace expects a torch.nn.Module; got {type(model).__name__}.")
    kinds = [
        (m, ours)
        for m in model.modules()
        for ours in (RNN, LSTM, GRU)
        if type(m) is ours.torch_class
    ]
    made: dict[nn.Module | None, nn.Module] = {m: ours.from_torch(m, **extras) for m, ours in kinds}
    for m, _ in kinds:
        for name, parameter in m.named_parameters():
            setattr(made[m], name, parameter)
        made[m].__dict__.update(
            {name: held for name, held in m.__dict__.items() if "_hooks" in name}
        )
    for parent in list(model.modules()):
        for name, child in child_modules(parent):
            if child in made:
                setattr(parent, name, made[child])
    return made.get(model, model)
