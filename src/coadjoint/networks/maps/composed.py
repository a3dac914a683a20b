"""Composed: several maps, one after the other, as one map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...errors import InputError, KindError, brief
from ...sweeps.torch_internals import child_modules
from . import products
from .by_torch import Gradients
from .checks import check_cotangent
from .map import Map


class Composed(Map):
    """f_L o ... o f_1 as one map, such as the layer of the thesis's CNN, (4.28).

    maps  modules, the first one first

    Its parameters are those of the maps, by the names "0.W", "0.b", "1.W", ... One that two maps
    share has one name, and its gradients are the sums over both. The products are the recursions of
    Algorithms 3.2.1 and 3.3.1 over the products of the maps.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> f = co.maps.Composed(co.maps.Conv(1, 4, 3, activation="tanh"), co.maps.MaxPool(2))
        >>> f(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 4, 3, 3])
    """

    def __init__(self, *maps: nn.Module) -> None:
        super().__init__()
        check_maps(maps)
        for i, f in enumerate(maps):
            self.add_module(str(i), f)

    @property
    def maps(self) -> list[nn.Module]:
        """The maps, the first one first."""
        return [f for _, f in child_modules(self) if f is not None]

    def forward(self, x: Tensor) -> Tensor:
        """f_L(... f_1(x))."""
        for f in self.maps:
            x = f(x)
        return x

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """Df(x).v = Df_L(x_L) ... Df_1(x_1).v (Lemma 3.3.2)."""
        for f in self.maps:
            v = products.push(f, x, v)
            x = f(x)
        return v

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """D*f(x).w = D*f_1(x_1) ... D*f_L(x_L).w, (3.11)."""
        states = self._states(x)
        check_cotangent(states.pop(), w)
        for f, state in zip(reversed(self.maps), reversed(states), strict=True):
            w = products.pull(f, state, w)
        return w

    def pull_parameters(self, x: Tensor, w: Tensor) -> Gradients:
        """nabla*_i f(x).w = nabla*f_i(x_i).e_i, (3.5), e_i the costate at f_i(x_i)."""
        states = self._states(x)
        check_cotangent(states.pop(), w)
        found: Gradients = {}
        for f, state in zip(reversed(self.maps), reversed(states), strict=True):
            add_gradients(found, self, f, products.pull_parameters(f, state, w))
            w = products.pull(f, state, w)
        return found

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(v _| D^2 f(x))*.w by tangent backpropagation, (3.16)."""
        bent, _ = self._bend(x, v, w, parameters=False)
        return bent

    def bend_parameters(self, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
        """(v _| D nabla f(x))*.w by tangent backpropagation, (3.21)."""
        _, found = self._bend(x, v, w, parameters=True)
        return found

    def _states(self, x: Tensor) -> list[Tensor]:
        """x_1, ..., x_{L+1}."""
        states = [x]
        for f in self.maps:
            states.append(f(states[-1]))
        return states

    def _bend(self, x: Tensor, v: Tensor, w: Tensor, parameters: bool) -> tuple[Tensor, Gradients]:
        """Lines 4 to 18 of Algorithm 3.3.1: by x and, where asked for, by the parameters.

        e_v and e_t are the low-order and the high-order tangent error.
        """
        states = self._states(x)
        tangents = [v]
        for f, state in zip(self.maps, states[:-1], strict=True):
            tangents.append(products.push(f, state, tangents[-1]))
        check_cotangent(states[-1], w)
        e_v = w
        e_t = torch.zeros_like(w)
        found: Gradients = {}
        for i, f in reversed(list(enumerate(self.maps))):
            if parameters:
                add_gradients(found, self, f, products.pull_parameters(f, states[i], e_t))
                bent = products.bend_parameters(f, states[i], tangents[i], e_v)
                add_gradients(found, self, f, bent)
            pulled = products.pull(f, states[i], e_t)
            e_t = pulled + products.bend(f, states[i], tangents[i], e_v)
            e_v = products.pull(f, states[i], e_v)
        return e_t, found


def check_maps(maps: Sequence[object]) -> None:
    """Refuse anything but modules, and none at all."""
    if not maps:
        raise InputError("at least one map is needed; got none.")
    for f in maps:
        if not isinstance(f, nn.Module):
            raise KindError(
                f"a map is a module, such as co.maps.Dense(3, 2) or nn.Tanh(); got {brief(f)}."
            )


def add_gradients(
    total: Gradients, whole: nn.Module, part: nn.Module, found: Mapping[str, Tensor]
) -> None:
    """Add the gradients of a part to those of the whole, by the whole's names of the parameters."""
    names = {id(value): name for name, value in whole.named_parameters()}
    own = dict(part.named_parameters())
    for own_name, gradient in found.items():
        name = names[id(own[own_name])]
        total[name] = total[name] + gradient if name in total else gradient
