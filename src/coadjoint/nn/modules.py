"""RNN, LSTM and GRU with torch.nn's arguments, outputs and weights, and `replace`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import InputError, KindError, choose
from ..sweeps.torch_internals import child_modules
from .frame import NORMS
from .rnn_module import RNNModule


class RNN(RNNModule):
    """torch.nn.RNN, twice differentiable on every device.

    h' = tanh(W_ih u + b_ih + W_hh h + b_hh), or relu. Arguments, inputs, outputs and parameters are
    those of torch.nn.RNN. Further arguments: engine, recurrent_dropout, zoneout, layer_norm, init
    (see RNNModule).

    >>> import torch
    >>> import coadjoint as co
    >>> module = co.nn.RNN(3, 4, num_layers=2)
    >>> output, h_n = module(torch.randn(5, 2, 3))  # [T, B, inputs]
    >>> output.shape, h_n.shape
    (torch.Size([5, 2, 4]), torch.Size([2, 2, 4]))
    """

    torch_class = nn.RNN
    arguments = (*RNNModule.arguments, "nonlinearity")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: object,
        **kwargs: Any,
    ) -> None:
        # `nonlinearity` is the fourth argument, as in torch.nn.RNN; *args are those after it.
        refuse_projection(kwargs)
        self.nonlinearity = choose("nonlinearity", nonlinearity, ("tanh", "relu"))
        mode = f"RNN_{nonlinearity.upper()}"
        super().__init__(mode, input_size, hidden_size, num_layers, *args, **kwargs)


class LSTM(RNNModule):
    """torch.nn.LSTM, twice differentiable on every device.

    c' = f c + i g, h' = o tanh(c') (with proj_size: W_hr of that). Arguments, inputs, outputs and
    parameters are those of torch.nn.LSTM. Further arguments: engine, recurrent_dropout, zoneout,
    layer_norm, init (see RNNModule), and

    peephole           the gates read c: parameters weight_pi, weight_pf, weight_po, one per unit
    forget_bias        the forget gate's bias at the start; 1 is a common choice, torch.nn draws it
                       around 0

    A gradient penalty needs a second derivative, which cuDNN does not have:

    >>> import torch
    >>> import coadjoint as co
    >>> module = co.nn.LSTM(3, 4)
    >>> u = torch.randn(5, 2, 3, requires_grad=True)
    >>> output, (h_n, c_n) = module(u)
    >>> (g,) = torch.autograd.grad(output.sum(), u, create_graph=True)
    >>> g.square().sum().backward()
    >>> module.weight_hh_l0.grad.shape
    torch.Size([16, 4])
    """

    torch_class = nn.LSTM
    arguments = (*RNNModule.arguments, "proj_size")
    slots = 2
    norms = NORMS

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)


class GRU(RNNModule):
    """torch.nn.GRU, twice differentiable on every device.

    h' = (1 - z) n + z h, n = tanh(W_in u + b_in + r (W_hn h + b_hn)). Arguments, inputs, outputs
    and parameters are those of torch.nn.GRU. Further arguments: engine, recurrent_dropout, zoneout,
    layer_norm, init (see RNNModule).

    >>> import torch
    >>> import coadjoint as co
    >>> torch_module = torch.nn.GRU(3, 4)
    >>> module = co.nn.GRU.from_torch(torch_module)
    >>> u = torch.randn(5, 2, 3)
    >>> torch.allclose(module(u)[0], torch_module(u)[0], atol=1e-6)
    True
    """

    torch_class = nn.GRU

    def __init__(self, *args: object, **kwargs: Any) -> None:
        refuse_projection(kwargs)
        super().__init__("GRU", *args, **kwargs)


def refuse_projection(arguments: Mapping[str, object]) -> None:
    """Refuse proj_size among the arguments of an RNN or GRU, in torch's words."""
    if "proj_size" in arguments:
        raise InputError("proj_size argument is only supported for LSTM, not RNN or GRU")


def replace(model: nn.Module, **extras: object) -> nn.Module:
    """Replace every torch.nn.RNN, LSTM and GRU inside `model` by ours, with the same weights.

    The model itself is returned or, if it is one of these, its replacement. Parameters and hooks
    are kept: an optimiser and tied weights stay valid. Subclasses are left alone.
    extras: the arguments that torch.nn does not have, engine=, recurrent_dropout=, zoneout=, ...

    >>> import torch
    >>> import coadjoint as co
    >>> model = torch.nn.Sequential(torch.nn.LSTM(3, 4))
    >>> _ = co.nn.replace(model)
    >>> type(model[0]) is co.nn.LSTM
    True
    """
    if not isinstance(model, nn.Module):
        raise KindError(f"replace expects a torch.nn.Module; got {type(model).__name__}.")
    replacements: dict[nn.Module, nn.Module] = {}
    # All replacements are made before any is put in: an error leaves the model as it was.
    for module in model.modules():
        for our_class in (RNN, LSTM, GRU):
            if type(module) is our_class.torch_class:
                replacements[module] = our_class.from_torch(module, **extras)
    for module, replacement in replacements.items():
        take_over(module, replacement)
    for parent in list(model.modules()):
        for name, child in child_modules(parent):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
    return replacements.get(model, model)


def take_over(module: nn.Module, replacement: nn.Module) -> None:
    """Give the replacement the parameters and hooks of the module: the same objects, no copies."""
    for name, parameter in module.named_parameters():
        setattr(replacement, name, parameter)
    for name, value in module.__dict__.items():
        if "_hooks" in name:  # as torch names its dictionaries of hooks
            replacement.__dict__[name] = value
