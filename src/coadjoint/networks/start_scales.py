"""Scales of the initial weights, one for each kind of matrix, and the start of Keras.

std_in, std_rec, std_out   R, W and V drawn anew from N(0, std^2), whatever the initialiser drew
forget_bias                the initial bias of forget gates
keras_                     how Keras begins
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import OptionError, real
from .interface import Net
from .recurrence import Recurrence

Recurrences = Iterable[Recurrence]


def check_scales(scales: Mapping[str, float | None]) -> dict[str, float]:
    """The scales that are given, None counting as not given; anything but numbers is refused."""
    given: dict[str, float] = {}
    for name, value in scales.items():
        if value is not None:
            least = float("-inf") if name == "forget_bias" else 0.0
            given[name] = real(name, value, least)
    return given


def scale_(
    net: Net,
    recurrences: Recurrences,
    given: Mapping[str, float],
    generator: torch.Generator,
) -> None:
    """Draw R, W and V anew with the given scales, in this order, and set the forget bias.

    Weights outside the range of their dtype are refused, those that were drawn before as well.
    """
    layers = list(recurrences)
    if "std_in" in given:
        for R in parameters_named(net, "R"):
            R.normal_(0.0, given["std_in"], generator=generator)
    if "std_rec" in given:
        for matrix in recurrent_matrices(layers):
            matrix.normal_(0.0, given["std_rec"], generator=generator)
    if "std_out" in given:
        for V in parameters_named(net, "V"):
            V.normal_(0.0, given["std_out"], generator=generator)
    if "forget_bias" in given:
        set_forget_bias(layers, given["forget_bias"])
    scales = [f"${name}" for name in given if name != "forget_bias"] or ["$std", "$radius"]
    refuse_infinite(net, " or ".join(scales))


def refuse_infinite(net: nn.Module, scales: str) -> None:
    """Refuse matrices that were drawn with a scale beyond the range of their dtype.

    scales: the options that make weights smaller, for the message.
    """
    for key, parameter in net.named_parameters():
        if parameter.dim() >= 2 and not parameter.isfinite().all():
            raise OptionError(
                f"the initial weights {key} are outside the range of {str(parameter.dtype)[6:]}: "
                f"give a smaller {scales}."
            )


def parameters_named(net: Net, name: str) -> list[Tensor]:
    """The parameters of a network, or of a layer or a step in it, that have this name."""
    return [p for key, p in net.named_parameters() if key.rpartition(".")[2] == name]


def recurrent_matrices(layers: Recurrences) -> list[Tensor]:
    """W of each layer, or the raw matrices of a structured one; a layer without W is refused."""
    matrices: list[Tensor] = []
    for layer in layers:
        found: list[Tensor] = []
        if layer.cell is None:
            list_blocks = getattr(layer.step, "blocks", None)  # steps of this package have it
            found = [] if list_blocks is None else list_blocks()
        elif parametrize.is_parametrized(layer, "W"):
            structure = layer.get_submodule("parametrizations.W")
            found = list(structure.parameters(recurse=False))
        elif layer.W is not None:
            found = [layer.W]
        if not found:
            raise OptionError(f"$std_rec draws W, but cell '{layer.name}' has no W: leave it out.")
        matrices += found
    return matrices


def set_forget_bias(layers: Recurrences, value: float) -> None:
    """Set b of every forget gate; a network without one is refused, and numbers out of range."""
    biases = [b for layer in layers if (b := forget_bias_of(layer)) is not None]
    if not biases:
        raise OptionError(
            "$forget_bias sets the initial bias of the forget gates of cells lstm, peephole and "
            "minlstm, but this network has none of these with biases: leave it out."
        )
    for b in biases:
        if abs(value) > torch.finfo(b.dtype).max:
            dtype = str(b.dtype).removeprefix("torch.")
            raise OptionError(f"$forget_bias {value:g} is outside the range of {dtype}.")
        b.fill_(value)


def forget_bias_of(layer: Recurrence) -> Tensor | None:
    """The entries of b that belong to the forget gate, as a view; None without such a gate."""
    if layer.cell is None or layer.b is None or "f" not in layer.cell.driven_entries:
        return None
    place = list(layer.cell.driven_entries).index("f")
    return layer.b[place * layer.hidden : (place + 1) * layer.hidden]


def glorot_uniform_(W: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Entries uniform on +-sqrt(6 / (rows + columns))."""
    bound = (6 / sum(W.shape)) ** 0.5
    with torch.no_grad():
        return W.uniform_(-bound, bound, generator=generator)


def keras_(net: Net, recurrences: Recurrences, generator: torch.Generator) -> None:
    """What Keras draws otherwise than by `glorot_uniform_`, which has filled all matrices.

    W is orthogonal over all gates at once, W' W = I for [gates d, d]; a structured W stays as its
    structure draws it, and a step with a rule of its own begins by that. The forget gate of cells
    with a memory c has the bias 1. Embeddings are uniform on +-0.05, attention's w_a N(0, 0.05^2).
    """
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            module.weight.uniform_(-0.05, 0.05, generator=generator)
    for w_a in parameters_named(net, "w_a"):
        w_a.normal_(0.0, 0.05, generator=generator)
    for layer in recurrences:
        if layer.cell is None:
            begin_step(layer.step, generator)
        elif layer.W is not None and not parametrize.is_parametrized(layer, "W"):
            nn.init.orthogonal_(layer.W, generator=generator)
        b = forget_bias_of(layer)
        if b is not None and layer.cell is not None and "c" in layer.cell.slots:
            b.fill_(1.0)


def begin_step(step: object, generator: torch.Generator) -> None:
    """Draw a step of this package: by a rule of its own, or its recurrent matrices orthogonal."""
    begin = getattr(step, "begin_as_published", None)
    if begin is not None:
        begin(generator)
        return
    list_blocks = getattr(step, "blocks", None)
    for block in [] if list_blocks is None else list_blocks():
        nn.init.orthogonal_(block, generator=generator)
