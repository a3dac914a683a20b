"""Flatten and Residual: maps that change the shape of a state, or go around other maps."""

from __future__ import annotations

from torch import Tensor, nn

from ...errors import InputError, KindError, brief, choose
from . import products
from .by_torch import Gradients
from .checks import check_cotangent, check_numbers, check_tangent
from .composed import Composed, add_gradients
from .dense import Dense
from .map import FixedMap, Map


class Flatten(FixedMap):
    """All entries of a sample in one row: [B, ...] -> [B, n].

    It keeps inner products, so that its pull is its inverse; its bend is zero.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> co.maps.Flatten()(torch.zeros(5, 2, 3, 3)).shape
        torch.Size([5, 18])
    """

    def forward(self, x: Tensor) -> Tensor:
        """The entries of each sample in one row."""
        check_numbers("x", x)
        if x.dim() < 2:
            raise InputError(f"Flatten reads x [B, ...]; got {list(x.shape)}.")
        return x.flatten(1)

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """The entries of v in one row: the map is linear."""
        self(x)  # refuses an x without axes to flatten
        check_tangent(x, v)
        return v.flatten(1)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """The entries of w in the shape of x."""
        check_cotangent(self(x), w)
        return w.reshape(x.shape)

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """Zero: the map is linear."""
        value = self(x)
        check_tangent(x, v)
        check_cotangent(value, w)
        return x.new_zeros(x.shape)


class Residual(Map):
    """A way around maps: x -> x + f(x), or P(x) + f(x).

    maps             modules whose composition is f
    projection       None: x itself; "linear": a matrix P [outputs, inputs], on [B, inputs]; or a
                     module
    inputs, outputs  the widths of a "linear" projection

    The parameters are those of the maps, by the names "f.0.W", ..., and of the projection,
    "projection.W". Every product is the sum of those of f and of the projection. Refused: an f(x)
    that has not the shape of x, or of P(x).

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> block = co.maps.Residual(co.maps.Dense(4, 8), co.maps.Dense(8, 4, "identity"))
        >>> block(torch.zeros(5, 4)).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        *maps: nn.Module,
        projection: str | nn.Module | None = None,
        inputs: int | None = None,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.f = Composed(*maps)
        self.projection = make_projection(projection, inputs, outputs)
        like = next(self.f.parameters(), None)
        if projection == "linear" and like is not None:
            assert self.projection is not None
            self.projection.to(like)

    def forward(self, x: Tensor) -> Tensor:
        """The sum x + f(x), or P(x) + f(x)."""
        value: Tensor = self.f(x)
        kept: Tensor = x if self.projection is None else self.projection(x)
        if kept.shape != value.shape:
            what = "x" if self.projection is None else "projection(x)"
            raise InputError(
                f"Residual adds f(x), {list(value.shape)}, to {what}, {list(kept.shape)}: the "
                "shapes must be the same. A projection= can change that of x."
            )
        return kept + value

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """The sum v + Df(x).v, or DP(x).v + Df(x).v."""
        self(x)  # refuses what does not fit
        pushed = self.f.push(x, v)
        if self.projection is None:
            return v + pushed
        return products.push(self.projection, x, v) + pushed

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """The sum w + D*f(x).w, or D*P(x).w + D*f(x).w."""
        self(x)  # refuses what does not fit
        pulled = self.f.pull(x, w)
        if self.projection is None:
            return w + pulled
        return products.pull(self.projection, x, w) + pulled

    def pull_parameters(self, x: Tensor, w: Tensor) -> Gradients:
        """nabla*f(x).w and nabla*P(x).w, by name."""
        self(x)  # refuses what does not fit
        found: Gradients = {}
        add_gradients(found, self, self.f, self.f.pull_parameters(x, w))
        if self.projection is not None:
            of_projection = products.pull_parameters(self.projection, x, w)
            add_gradients(found, self, self.projection, of_projection)
        return found

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """That of f; and that of P, which is zero for a linear one."""
        self(x)  # refuses what does not fit
        bent = self.f.bend(x, v, w)
        if self.projection is None:
            return bent
        return bent + products.bend(self.projection, x, v, w)

    def bend_parameters(self, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
        """Those of f and of P, by name."""
        self(x)  # refuses what does not fit
        found: Gradients = {}
        add_gradients(found, self, self.f, self.f.bend_parameters(x, v, w))
        if self.projection is not None:
            of_projection = products.bend_parameters(self.projection, x, v, w)
            add_gradients(found, self, self.projection, of_projection)
        return found


def make_projection(
    projection: object, inputs: int | None, outputs: int | None
) -> nn.Module | None:
    """The projection as a module, or None for the identity; anything else is refused."""
    if projection is None or isinstance(projection, nn.Module):
        if inputs is not None or outputs is not None:
            raise InputError("inputs and outputs are the widths of projection='linear'.")
        return projection
    if not isinstance(projection, str):
        raise KindError(f"projection must be None, 'linear' or a module; got {brief(projection)}.")
    choose("projection", projection, ("linear",))
    if inputs is None or outputs is None:
        raise InputError("projection='linear' needs inputs= and outputs=, its widths.")
    return Dense(inputs, outputs, "identity", bias=False)
