"""WrittenLayers: what one walk over the maps of a chain finds, if all of them are written down.

A gradient by hand reads hooks, weights, biases and names of every layer. It walks over the chain
once and passes on what it has found. Nothing is kept for the next gradient, so that a module or a
parameter that has been replaced by then is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..sweeps.torch_internals import (
    child_modules,
    has_global_hooks,
    has_own_hooks,
    is_plain_parameter,
    named_parameters,
    own_parameters,
)
from .maps import Dense, Tied

WRITTEN_DOWN = (Dense, Tied, nn.Linear)


class WrittenLayers(NamedTuple):
    """The maps of a chain that are all written down, and their parameters."""

    maps: Sequence[nn.Module]
    weights: Sequence[nn.Parameter]  # of each map
    biases: Sequence[nn.Parameter | None]  # of each map
    trained: dict[str, nn.Parameter]  # those of the chain that require a gradient, by name

    def matrices_and_biases(self, begin: int, end: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The matrices of the dense layers begin, ..., end - 1, and their biases or None."""
        matrices: list[Tensor] = list(self.weights[begin:end])
        for i, layer in enumerate(self.maps[begin:end]):
            if type(layer) is Tied:
                matrices[i] = layer.matrix()
        return matrices, list(self.biases[begin:end])


def written_layers(chain: nn.Module, maps: Sequence[nn.Module]) -> WrittenLayers | None:
    """What the maps of a chain hold, if the gradients of all are written down; None otherwise.

    They are not where something else happens in a map: hooks of the modules or of their parameters,
    another `forward`, and weights that are no parameters of the maps' own.
    """
    if has_global_hooks():
        return None
    weights: list[nn.Parameter] = []
    biases: list[nn.Parameter | None] = []
    trained: dict[str, nn.Parameter] = {}
    seen: set[int] = set()  # a parameter that two maps share has its first name
    for prefix, module in zip(name_prefixes(len(maps)), maps, strict=True):
        if type(module) not in WRITTEN_DOWN or has_own_hooks(module) or "forward" in vars(module):
            return None
        parameters = own_parameters(module)
        W_name, b_name = ("weight", "bias") if type(module) is nn.Linear else ("W", "b")
        W = parameters.get(W_name)
        b = parameters.get(b_name)
        # A Dense or Tied without a bias has None as an ordinary attribute.
        has_other_bias = b is None and getattr(module, b_name) is not None
        if W is None or has_other_bias or not is_plain_parameter(W) or not is_plain_parameter(b):
            return None
        weights.append(W)
        biases.append(b)
        for name, p in parameters.items():
            if p is not None and p.requires_grad and id(p) not in seen:
                trained[prefix + name] = p
                seen.add(id(p))
    if own_parameters(chain) or len(child_modules(chain)) != 1:  # it holds more than its maps
        trained = {name: p for name, p in named_parameters(chain) if p.requires_grad}
    return WrittenLayers(maps, weights, biases, trained)


@functools.cache
def name_prefixes(count: int) -> tuple[str, ...]:
    """What the names of the parameters of `count` maps of a chain begin with."""
    return tuple(f"maps.{i}." for i in range(count))
