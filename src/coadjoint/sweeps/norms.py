"""||x||_2 with first and second derivatives that are 0 at 0, and no overflow of the squares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .functions import Context, SweepFunction, is_transformed, nestable_jvp, with_quick_apply
from .layout import check_dense
from .memory import empty
from .rows import scale


@with_quick_apply
class _Norm(SweepFunction):
    """||x||_2 over the last axis; below the normal range of numbers its derivatives are 0."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(x, 2, -1)
        # The squares may have left the range where the norm has not: scale by the largest entry.
        if x.is_cuda or not is_within_range(size, 0):
            k = torch.frexp(x.abs().amax(-1)).exponent
            size = scale(torch.linalg.vector_norm(scale(x, -k[..., None]), 2, -1), k)
        return size

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        """The gradient g x / ||x||; 0 where the norm is below the normal range of numbers."""
        x, size = ctx.saved_tensors
        tiny = torch.finfo(size.dtype).tiny
        if size.is_cuda or not is_within_range(size, tiny):
            is_normal = size >= tiny
            size = torch.where(is_normal, size, 1)
            g = torch.where(is_normal, g, 0)
        size = size[..., None]
        g = g[..., None]
        if torch.is_grad_enabled() or is_transformed():
            scaled: Tensor = x / size * g
            return scaled
        quotient: Tensor = torch.div(x, size, out=empty(x.shape, x))
        return quotient.mul_(g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Context, dx: Tensor) -> Tensor:
        """<x, dx> / ||x||; 0 where the norm is below the normal range of numbers."""
        x, size = ctx.saved_tensors
        is_normal = size >= torch.finfo(size.dtype).tiny
        unit = x / torch.where(is_normal, size, 1)[..., None]
        return torch.where(is_normal, (unit * dx).sum(-1), 0)


def is_within_range(size: Tensor, low: float) -> bool:
    """Is every entry above `low` and finite? Not for a GPU, which would have to be waited for."""
    if not size.numel():
        return True
    least, most = size.detach().aminmax()  # torch 2.11 has no forward-mode derivative of it
    return least.item() > low and most.item() < math.inf


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
    """Keep x where its norm `size` is 0, and so has no derivatives; the constant 0 elsewhere.

    A squared norm is smooth at 0, with second derivative 2, which size^2 does not have there. The
    squares of this, added to it, give it back; they change neither the value nor the gradient.
    """
    is_zero = size.detach() < torch.finfo(size.dtype).tiny
    return torch.where(is_zero[..., None], x, 0)
