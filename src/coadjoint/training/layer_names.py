"""The layers of a chain in words, for the page: "dense 64 tanh"."""

from __future__ import annotations

from torch import nn

from ..networks.chain import Chain


def name_layers(net: nn.Module) -> list[str]:
    """What leads to each layer 0..L of a chain, "input" to layer 0; [] for another network.

    Example:
        >>> from coadjoint.training.layer_names import name_layers
        >>> import coadjoint as co
        >>> name_layers(co.Chain(co.maps.Dense(3, 8), co.maps.Dense(8, 2, "identity")))
        ['input', 'dense 8 tanh', 'dense 2']
    """
    if not isinstance(net, Chain):
        return []
    return ["input", *map(name_map, net.maps)]


def name_map(module: nn.Module) -> str:
    """The kind of a map, its units or channels, and its activation, if it has any."""
    activation = getattr(module, "activation", "identity")
    kind = type(module).__name__.lower()
    if kind == "activation":
        return str(getattr(module, "name", kind))
    words = [kind]
    outputs = getattr(module, "outputs", None)
    if isinstance(outputs, int):
        words.append(str(outputs))
    if isinstance(activation, str) and activation != "identity":
        words.append(activation)
    return " ".join(words)
