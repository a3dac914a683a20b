"""||x||_2 with first and second derivatives that are 0 at 0, and no overflow of the squares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .engines.c import per_sample
from .functions import Context, SweepFunction, nestable_jvp, with_quick_apply
from .layout import check_dense
from .rows import scale


@with_quick_apply
class _Norm(SweepFunction):
    """||x||_2 over the last axis; below the normal range of numbers its derivatives are 0."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """||x||_2 of [..., n], also where the squares of x underflow or overflow: [...]."""
        in_c = per_sample.row_norms(x)
        if in_c is not None:
            return in_c
        size: Tensor = torch.linalg.vector_norm(x, 2, -1)
        # The squares may have left the range where the norm has not: scale by the largest entry.
        # On a GPU always, since the answer whether it is so would have to be waited for.
        if x.is_cuda or not is_within_range(size, 0):
            k = torch.frexp(x.abs().amax(-1)).exponent
            size = scale(torch.linalg.vector_norm(scale(x, -k[..., None]), 2, -1), k)
        return size

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep x and its norm."""
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        """The gradient g x / ||x||; 0 where the norm is below the normal range of numbers."""
        x, size = ctx.saved_tensors
        return norm_gradient(x, size, g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Context, dx: Tensor) -> Tensor:
        """<x, dx> / ||x||; 0 where the norm is below the normal range of numbers."""
        x, size = ctx.saved_tensors
        is_normal = size >= torch.finfo(size.dtype).tiny
        unit = x / torch.where(is_normal, size, 1)[..., None]
        return torch.where(is_normal, (unit * dx).sum(-1), 0)


def norm_gradient(x: Tensor, size: Tensor, g: Tensor) -> Tensor:
    """The gradient g x / ||x|| by x [..., n], from g by its norm `size`, both [...].

    It is 0 where the norm is below the normal range of numbers.
    """
    in_c = per_sample.norm_gradient(x, size, g)
    if in_c is not None:
        return in_c
    tiny = torch.finfo(size.dtype).tiny
    if size.is_cuda or not is_within_range(size, tiny):
        is_normal = size >= tiny
        size = torch.where(is_normal, size, 1)
        g = torch.where(is_normal, g, 0)
    return x / size[..., None] * g[..., None]


def norm_rates(size: Tensor, g: Tensor) -> Tensor:
    """The factors g / ||x|| of x in the gradient by x, from g by its norm `size`.

    They are 0 where the norm is below the normal range of numbers, as the gradient of `norm` is.
    """
    return torch.where(size >= torch.finfo(size.dtype).tiny, g / size, 0)


def is_within_range(size: Tensor, low: float, high: float = math.inf) -> bool:
    """Is every entry above `low` and below `high`? On a CPU only: a GPU would be waited for."""
    if not size.numel():
        return True
    least, most = size.detach().aminmax()  # torch 2.11 has no forward-mode derivative of it
    return least.item() > low and most.item() < high


def norm(x: Tensor) -> Tensor:
    """||x||_2 over the last axis; value, first and second derivative are 0 at 0.

    torch.linalg.vector_norm has a second derivative of NaN at 0.

    >>> import torch
    >>> import coadjoint as co
    >>> co.norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([5., 0.])
    >>> zero = torch.zeros(2, requires_grad=True)
    >>> (g,) = torch.autograd.grad(co.norm(zero), zero, create_graph=True)
    >>> torch.autograd.grad(g.sum(), zero)
    (tensor([0., 0.]),)
    """
    check_dense("x", x)
    size: Tensor = _Norm.apply(x)
    return size


def keep_where_zero(x: Tensor, size: Tensor) -> Tensor:
    """`x` where its norm `size` is 0, or below the normal range; the constant 0 elsewhere.

    At x = 0 the squared norm has the second derivative 2, but size^2 has 0, since the derivatives
    of `norm` are 0 there. The squares of what this returns, added to size^2, restore the 2; they
    change neither the value nor the gradient.
    """
    is_zero = size.detach() < torch.finfo(size.dtype).tiny
    return torch.where(is_zero[..., None], x, 0)
