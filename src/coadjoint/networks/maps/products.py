"""The products of any module f, samples along axis 0: a Map's own where it has them, else by torch.

    push(f, x, v)                Df(x).v                           of the shape of f(x)
    pull(f, x, w)                D*f(x).w                          of the shape of x
    pull_parameters(f, x, w)     nabla*f(x).w                      by name, summed over samples
    bend(f, x, v, w)             (v _| D^2 f(x))*.w                of the shape of x
    bend_parameters(f, x, v, w)  (v _| D nabla f(x))*.w            by name, summed over samples

v has the shape of x and w that of f(x). The last two are the gradients by x and by the parameters
of <w, Df(x).v>. v and w are constants in all of them; what is returned can be differentiated again.
Refused: a v or w of another shape, a module that returns anything but one tensor, and one that
changes its input in place.

Example:
    >>> import torch
    >>> import coadjoint as co
    >>> f = torch.nn.Linear(3, 2)
    >>> x, v, w = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 2)
    >>> left, right = co.maps.pull(f, x, w) * v, w * co.maps.push(f, x, v)
    >>> torch.allclose(left.sum(), right.sum(), atol=1e-5)
    True
"""

from __future__ import annotations

from torch import Tensor, nn

from ...sweeps.torch_internals import has_hooks
from . import by_torch
from .by_torch import Gradients
from .map import Map


def push(f: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Df(x).v, (2.2): the change of f(x) along a change v of x."""
    own = own_products(f)
    return by_torch.push(f, x, v) if own is None else own.push(x, v)


def pull(f: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    """D*f(x).w: a costate at f(x) becomes one at x, (3.11)."""
    own = own_products(f)
    return by_torch.pull(f, x, w) if own is None else own.pull(x, w)


def pull_parameters(f: nn.Module, x: Tensor, w: Tensor) -> Gradients:
    """nabla*f(x).w, (3.5), summed over samples, for the parameters that require gradients."""
    own = own_products(f)
    return by_torch.pull_parameters(f, x, w) if own is None else own.pull_parameters(x, w)


def bend(f: nn.Module, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """(v _| D^2 f(x))*.w = grad_x <w, Df(x).v>, as in (3.16)."""
    own = own_products(f)
    return by_torch.bend(f, x, v, w) if own is None else own.bend(x, v, w)


def bend_parameters(f: nn.Module, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
    """(v _| D nabla f(x))*.w = grad_theta <w, Df(x).v>, as in (3.21), summed over samples."""
    own = own_products(f)
    return by_torch.bend_parameters(f, x, v, w) if own is None else own.bend_parameters(x, v, w)


def own_products(f: nn.Module) -> Map | None:
    """The map f if its own products are those of calling it; None if torch must find them.

    Hooks may change what a call returns, and the formulas of a Map know nothing of them.
    """
    if isinstance(f, Map) and not has_hooks(f):
        return f
    return None
