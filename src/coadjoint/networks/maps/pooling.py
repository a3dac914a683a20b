"""MaxPool and AvgPool: one number for each of disjoint regions of an image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import InputError, choose
from .checks import check_cotangent, check_numbers, check_tangent
from .convolution import Pair, pair
from .map import FixedMap

TIES = ("first", "average")


class Pool(FixedMap):
    """A map of images [B, channels, rows, columns] whose second derivatives are zero.

    size  of the regions, which do not overlap; a number, or one for rows and one for columns

    Rows and columns left over at the end belong to no region: nothing reads them.
    """

    def __init__(self, size: int | Pair) -> None:
        super().__init__()
        self.size = pair("size", size)

    def extra_repr(self) -> str:
        """The size of the regions."""
        return f"size={self.size}"

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """Zero: within the regions where the derivative exists, it is constant."""
        value = self(x)
        check_tangent(x, v)
        check_cotangent(value, w)
        return torch.zeros_like(x)

    def check_image(self, x: Tensor) -> None:
        """Refuse an x that is no image, or smaller than one region."""
        check_numbers("x", x)
        if x.dim() != 4 or x.shape[2] < self.size[0] or x.shape[3] < self.size[1]:
            raise InputError(
                f"{type(self).__name__} reads x [B, channels, rows, columns] of at least "
                f"{self.size[0]} x {self.size[1]} places; got {list(x.shape)}."
            )

    def regions(self, x: Tensor) -> Tensor:
        """The entries of each region: [B, channels, rows // p, columns // q, p q]."""
        p, q = self.size
        return x.unfold(2, p, p).unfold(3, q, q).flatten(4)

    def embed(self, y: Tensor, x: Tensor) -> Tensor:
        """The adjoint of `regions`: entries of regions at their places, zero where none is.

        y: [B, channels, n, l, p q]. The result has the shape of x.
        """
        p, q = self.size
        n, l = y.shape[2:4]
        by_rows = y.unflatten(4, (p, q)).transpose(3, 4)  # [B, channels, n, p, l, q]
        image = by_rows.flatten(4, 5).flatten(2, 3)
        rows_left, columns_left = x.shape[2] - n * p, x.shape[3] - l * q
        return functional.pad(image, (0, columns_left, 0, rows_left))


class MaxPool(Pool):
    """The largest entry of each region, (4.18).

    size  of the regions, which do not overlap; a number, or one for rows and one for columns
    ties  whose the derivative is where several entries of a region are the largest: "first", the
          first of them row by row, as in torch's max_pool2d; "average", all of them in equal parts,
          as in torch's amax (Remark 4.2.5)

    Rows and columns left over at the end belong to no region, as in torch.

        push  the entry of v where x is largest                                   (4.24)
        pull  w where x is largest, zero elsewhere                        (4.26), (4.27)
        bend  zero

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> x, w = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1)
        >>> co.maps.MaxPool(2).pull(x, w).tolist()
        [[[[1.0, 0.0], [0.0, 0.0]]]]
        >>> co.maps.MaxPool(2, ties="average").pull(x, w).tolist()
        [[[[0.25, 0.25], [0.25, 0.25]]]]
    """

    def __init__(self, size: int | Pair, ties: str = "first") -> None:
        super().__init__(size)
        self.ties = choose("rule for ties", ties, TIES)

    def extra_repr(self) -> str:
        """The size of the regions and the rule for ties."""
        return f"size={self.size}, ties='{self.ties}'"

    def forward(self, x: Tensor) -> Tensor:
        """The largest entry of each region, (4.19)."""
        self.check_image(x)
        if self.ties == "first":
            return functional.max_pool2d(x, self.size)
        return self.regions(x).amax(-1)

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """The entry of v where x is largest, (4.24)."""
        share = self.share(x)
        check_tangent(x, v)
        return (share * self.regions(v)).sum(-1)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """The entries of w where x is largest, zero elsewhere, (4.26)."""
        share = self.share(x)
        check_cotangent(share[..., 0], w)
        return self.embed(share * w[..., None], x)

    def share(self, x: Tensor) -> Tensor:
        """The part of each entry in the derivative of its region's maximum, shaped like regions."""
        self.check_image(x)
        regions = self.regions(x.detach())
        largest = regions == regions.amax(-1, keepdim=True)
        if self.ties == "first":
            largest = largest & (largest.cumsum(-1) == 1)
        chosen = largest.to(x.dtype)
        return chosen / chosen.sum(-1, keepdim=True)


class AvgPool(Pool):
    """The mean of each region.

    size  of the regions, which do not overlap; a number, or one for rows and one for columns

    Rows and columns left over at the end belong to no region, as in torch. The map is linear: its
    push is itself, its pull divides w evenly among the entries of a region, its bend is zero.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> co.maps.AvgPool(2)(torch.ones(1, 3, 5, 4)).shape
        torch.Size([1, 3, 2, 2])
    """

    def forward(self, x: Tensor) -> Tensor:
        """The mean of each region."""
        self.check_image(x)
        return functional.avg_pool2d(x, self.size)

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """The mean of v over each region: the map is linear."""
        self.check_image(x)
        check_tangent(x, v)
        return functional.avg_pool2d(v, self.size)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """The entries of w, each divided evenly among the entries of its region."""
        check_cotangent(self(x), w)
        entries = self.size[0] * self.size[1]
        share = (w / entries)[..., None]
        return self.embed(share.expand(*w.shape, entries), x)
