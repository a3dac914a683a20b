"""Map: a module x_{i+1} = f(x_i; theta) with its products as methods; FixedMap: no theta."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import by_torch
from .by_torch import Gradients
from .checks import check_cotangent, check_tangent

PRODUCTS = ("push", "pull", "pull_parameters", "bend", "bend_parameters")


class Map(nn.Module):
    """A map f between spaces of states, samples along axis 0, with the products of its derivatives.

    A subclass defines `forward(x)`. The products are by torch unless the subclass defines them too.
    A subclass of Dense, say, with another `forward` and no products gets all of them by torch, not
    those of Dense.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> class Cube(co.maps.Map):
        ...     def forward(self, x):
        ...         return x**3
        >>> x, v = torch.full((1, 1), 2.0), torch.ones(1, 1)
        >>> Cube().push(x, v).item(), Cube().bend(x, v, v).item()
        (12.0, 12.0)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a subclass with its own `forward`, and no product of its own, those by torch."""
        super().__init_subclass__(**options)
        if "forward" not in vars(cls) or any(name in vars(cls) for name in PRODUCTS):
            return
        for name in PRODUCTS:
            setattr(cls, name, vars(Map)[name])

    def forward(self, x: Tensor) -> Tensor:
        """f(x)."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(x).")

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """Df(x).v, (2.2): the change of f(x) along a change v of x."""
        return by_torch.push(self, x, v)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """D*f(x).w: a costate at f(x) becomes one at x, (3.11)."""
        return by_torch.pull(self, x, w)

    def pull_parameters(self, x: Tensor, w: Tensor) -> Gradients:
        """nabla*f(x).w, (3.5): a costate at f(x) becomes gradients, summed over the samples.

        They come by name, for the parameters that require gradients.
        """
        return by_torch.pull_parameters(self, x, w)

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(v _| D^2 f(x))*.w = grad_x <w, Df(x).v>, as in (3.16)."""
        return by_torch.bend(self, x, v, w)

    def bend_parameters(self, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
        """(v _| D nabla f(x))*.w = grad_theta <w, Df(x).v>, as in (3.21), summed over the samples.

        They come by name, for the parameters that require gradients.
        """
        return by_torch.bend_parameters(self, x, v, w)


class FixedMap(Map):
    """A map without parameters: its products by them are empty."""

    def pull_parameters(self, x: Tensor, w: Tensor) -> Gradients:
        """Nothing: there are no parameters."""
        check_cotangent(self(x), w)
        return {}

    def bend_parameters(self, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
        """Nothing: there are no parameters."""
        value = self(x)
        check_tangent(x, v)
        check_cotangent(value, w)
        return {}
