"""What the autograd Functions of the sweeps share: a quick way in, and derivatives of derivatives.

A Function here has four static methods. `forward` computes, `setup_context` keeps what derivatives
need, `backward` and `jvp` are made of Functions again, so that they can be differentiated too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import Node

from ..errors import Unsupported
from .torch_internals import (
    autocast_is_on,
    forward_mode_is_on,
    forward_mode_within_jvp,
    innermost_transform,
    transforms_are_on,
    unwrap_dead_wrappers,
    will_run,
)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
FunctionType = TypeVar("FunctionType", bound=type[Function])
Inputs = tuple[Any, ...]  # the arguments of `apply`, tensors and others, by position
Gradients = Sequence[Tensor | None]  # one for each argument of `apply`


class Context(Protocol):
    """The `ctx` that torch hands to the methods of a Function; each Function adds fields."""

    saved_tensors: tuple[Any, ...]  # tensors and None, in the order in which they were saved
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[Node | None, int], ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `backward`."""

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `jvp`."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Declare outputs that have no derivative."""

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether a missing gradient arrives as zeros (True) or as None."""


class SweepFunction(Function):
    """A Function that owns the batch axis, so that torch.vmap cannot add another."""

    @staticmethod
    def vmap(*_: object) -> None:
        """Refuse torch.vmap."""
        raise vmap_error()


def vmap_error() -> Unsupported:
    """The error for a recurrence under torch.vmap."""
    return Unsupported(
        "torch.vmap over a recurrence is not supported: the sweeps own the batch axis. "
        "Put the mapped axis into the batch, dimension 1 of u."
    )


def with_quick_apply(function: FunctionType) -> FunctionType:
    """Decorate a Function so that `apply` does nothing it need not do.

    torch binds the arguments of `forward` by its signature at every call, which takes longer than
    a small operation. Ours are always given by position, so that only the transforms of torch.func
    need torch's own `apply`; and where nothing is differentiated, nothing need be kept.

    `forward` runs outside torch.autocast. A `backward` that computes matrix products itself begins
    by asking whether autocast is on: a wrapper around it would add a call on the way to every loop.
    """
    usual = function.apply
    # torch.autograd.Function.apply without the binding: that of its C base class.
    direct = super(Function, function).apply  # type: ignore[misc]

    def apply(*args: object) -> object:
        if autocast_is_on():
            return without_autocast(apply, *args)
        if transforms_are_on():
            return usual(*args)
        args = unwrap_dead_wrappers(args)  # those of transforms that have ended
        if torch.is_grad_enabled() or forward_mode_is_on():
            return direct(*args)
        return function.forward(*args)

    function.apply = apply  # type: ignore[method-assign]
    return function


def without_autocast(compute: Callable[..., Result], *args: object) -> Result:
    """compute(*args) with torch.autocast off, which would round products to half precision."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return compute(*args)


def without_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function with torch.no_grad(), which takes time, and only if gradients are on."""
    quiet = torch.no_grad()(function)

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.is_grad_enabled():
            return quiet(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped


class PrimalContext:
    """A context whose saved tensors have lost the directions of the jvp that is under way."""

    def __init__(self, ctx: Context) -> None:
        """Take the tensors of `ctx` without their directions."""
        self.ctx = ctx
        self.saved_tensors = tuple(map(primal_value, ctx.saved_tensors))

    def __getattr__(self, name: str) -> object:
        """Everything else is that of the context."""
        return getattr(self.ctx, name)


def primal_value(y: Tensor | None) -> Tensor | None:
    """`y` without its direction at the outermost level of forward mode."""
    if y is None:
        return None
    primal: Tensor = unpack_dual(y, level=0).primal
    return primal


def nestable_jvp(jvp: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a `jvp` so that it can itself be differentiated in forward mode.

    torch runs a jvp with forward mode switched off, and a jvp of a jvp would silently lose its
    outer direction. So forward mode is switched on again; the jvp must then not see the inner
    direction a second time, and is given primal values. torch.autocast is off inside.
    """

    @functools.wraps(jvp)
    def wrapped(ctx: Context, *directions: Tensor | None) -> Result:
        with forward_mode_within_jvp():
            primal_ctx = PrimalContext(ctx)  # without the inner direction
            if autocast_is_on():
                return without_autocast(jvp, primal_ctx, *directions)
            return jvp(primal_ctx, *directions)

    return wrapped


def needed_inputs(ctx: Context) -> tuple[bool, ...]:
    """For each input: does the backward pass under way need its gradient?

    ctx.needs_input_grad tells what can be differentiated. Of those inputs, only the ones on the way
    to a tensor whose gradient is being computed are needed.
    """
    # An input that cannot be differentiated has no node: the others have theirs, in order.
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([need and _is_needed(next(nodes)) for need in ctx.needs_input_grad])


def _is_needed(node: Node) -> bool:
    """Does the backward pass under way go on to this node, from which an input came?"""
    try:
        return will_run(node)
    except RuntimeError:  # a leaf among the inputs of torch.autograd.grad
        return True


def is_transformed() -> bool:
    """Is forward-mode differentiation or a transform of torch.func under way?"""
    return forward_mode_is_on() or innermost_transform() is not None
