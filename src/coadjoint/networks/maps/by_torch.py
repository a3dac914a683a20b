"""The products of any module, by torch.

    pull             D*f(x).w                  one backward pass
    push             Df(x).v                   the adjoint of pull, which is linear in w
    bend             grad_x <w, Df(x).v>       two backward passes, as <w, Df(x).v> = <D*f(x).w, v>
    pull_parameters, bend_parameters           the same by the parameters

Only the map's own dependence on its input and its parameters counts: where w or v were computed
from x or from the parameters, as costates are, they are constants. Everything returned can be
differentiated again, also through w and v. A module that draws random numbers draws them anew for
each product; it must be in eval mode, or its products belong to different maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...errors import KindError, Unsupported
from ...sweeps.torch_internals import change_count, innermost_transform
from .checks import check_cotangent, check_numbers, check_tangent

Gradients = dict[str, Tensor]  # by the names of a module's parameters


def push(f: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Df(x).v, (2.2), of the shape of f(x)."""
    check_point(f, x)
    check_tangent(x, v)
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_copy(x)
        value = call(f, own)
        any_w = torch.zeros_like(value).requires_grad_()
        pulled = gradients(value, [own], any_w, True)
        # pulled = D*f(x).w is linear in w: its adjoint, applied to v, is Df(x).v for every w
        [pushed] = gradients(pulled[0], [any_w], v, differentiable)
    return pushed


def pull(f: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    """D*f(x).w, of the shape of x: <D*f(x).w, v> = <w, Df(x).v> for every v."""
    check_point(f, x)
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_copy(x)
        value = call(f, own)
        check_cotangent(value, w)
        [pulled] = gradients(value, [own], w, differentiable)
    return pulled


def pull_parameters(f: nn.Module, x: Tensor, w: Tensor) -> Gradients:
    """nabla*f(x).w, summed over the samples, for each parameter that requires gradients."""
    check_point(f, x)
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        theta = own_parameters(f)
        value = call(f, x.clone(), theta)
        check_cotangent(value, w)
        found = gradients(value, list(theta.values()), w, differentiable)
    return dict(zip(theta, found, strict=True))


def bend(f: nn.Module, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """(v _| D^2 f(x))*.w = grad_x <w, Df(x).v>, of the shape of x (Lemma 2.2.2)."""
    check_point(f, x)
    check_tangent(x, v)
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_copy(x)
        value = call(f, own)
        check_cotangent(value, w)
        [pulled] = gradients(value, [own], w, True)
        [bent] = gradients(pulled, [own], v, differentiable)
    return bent


def bend_parameters(f: nn.Module, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
    """(v _| D nabla f(x))*.w = grad_theta <w, Df(x).v>, summed over the samples (Lemma 2.3.2)."""
    check_point(f, x)
    check_tangent(x, v)
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_copy(x)
        theta = own_parameters(f)
        value = call(f, own, theta)
        check_cotangent(value, w)
        [pulled] = gradients(value, [own], w, True)
        found = gradients(pulled, list(theta.values()), v, differentiable)
    return dict(zip(theta, found, strict=True))


def check_point(f: nn.Module, x: object) -> None:
    """Refuse an x that holds no real numbers, and products inside torch.func's transforms."""
    check_numbers("x", x)
    if innermost_transform() is not None:
        raise Unsupported(
            f"the products of {type(f).__name__} are computed by torch.autograd, which "
            "torch.func's transforms cannot see. Call them outside, or use a map of co.maps."
        )


def own_copy(x: Tensor) -> Tensor:
    """A copy of x, a node of its own: what else was computed from x does not lead through it."""
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    return x.clone()


def own_parameters(f: nn.Module) -> Gradients:
    """The parameters that require gradients, each as a node of its own, by name."""
    named = f.named_parameters()
    return {name: value.clone() for name, value in named if value.requires_grad}


def call(f: nn.Module, x: Tensor, theta: Mapping[str, Tensor] | None = None) -> Tensor:
    """f(x), or f(x) with the parameters theta. A map that is none is refused."""
    what = type(f).__name__
    changes = change_count(x)
    value: object = f(x) if theta is None else torch.func.functional_call(f, dict(theta), (x,))
    if not isinstance(value, Tensor):
        raise KindError(
            f"a map returns one tensor; {what} returned {type(value).__name__}. Wrap it in a "
            "module that returns the part you mean."
        )
    if change_count(x) != changes:
        raise Unsupported(
            f"{what} changes its input in place, so that its derivatives at that input are lost. "
            "Make it with inplace=False."
        )
    return value


def gradients(
    value: Tensor, by: Sequence[Tensor], weights: Tensor, differentiable: bool
) -> tuple[Tensor, ...]:
    """The gradients of <weights, value>, weights a constant; zeros by what it does not depend on.

    differentiable: whether the result is to be differentiated again.
    """
    if not value.requires_grad or not by:
        return tuple(torch.zeros_like(y) for y in by)
    return torch.autograd.grad(
        value, by, weights, create_graph=differentiable, materialize_grads=True
    )
