"""The tangent loss: the outputs should change by beta along a direction v of the input.

    R(x) = 1/(2K) sum_k ||DF(x) v_k - beta_k||^2       Caterini (2017), (3.12) and (3.14)

tangent        the penalty, for every network whose run can `push` a change of its input
output_change  DF(x) v of any model, by torch's double backward; tangent_loss makes values [B] of it
shifts         directions v: the change of an image that is moved
"""
# ruff: noqa: D205  -- the docstring of a penalty is its formula; the pages print it

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells.transport import remembers_origin
from ..errors import InputError, KindError, Unsupported, brief, check_seed, whole_number
from ..sweeps.costates import BaseCostates
from ..sweeps.layout import check_dense, tensor_of
from .draws import random_signs
from .layered import LayeredCostates
from .penalty_type import PENALTIES, Penalty, refuse_costates

Directions = Tensor | Callable[[Tensor], Tensor] | None
Changes = Tensor | float | Callable[[Tensor], Tensor]


@remembers_origin
def tangent(v: Directions = None, beta: Changes = 0.0, K: int = 1, seed: int = 0) -> Penalty:
    """1/2 ||DF(u) v - beta||^2, the sum over outputs (and steps, if each has outputs): the change
    of y_hat along the direction v of the input should be beta. Of K directions, the mean.
    v: a tensor shaped like the input, or [K, ...]; a function of the input, such as `shifts`; or
    None: K directions of random signs, drawn by `seed` anew at each training step, whose mean is
    half the squared Frobenius norm of DF(u) if beta is 0. beta: a number, a tensor shaped like
    y_hat, or [K, ...], or a function of the input.  The tangent loss of Simard et al. (1992), as in
    Caterini (2017), (3.12) and (3.14); before version 0.8 it lacked the factor 1/2.
    """
    refuse_costates("tangent", v)
    whole_number("K", K)
    check_seed(seed)
    if v is not None and not callable(v):
        check_dense("the direction v", v)
    if v is not None and K != 1:
        raise InputError(
            f"K = {K} is the number of directions to draw, but v gives its own: leave out K."
        )
    if not callable(beta) and not isinstance(beta, Tensor | float | int):
        raise KindError(
            f"beta must be a number, a tensor or a function of the input; got {brief(beta)}."
        )

    def value(lam: BaseCostates | LayeredCostates) -> Tensor:
        """The mean over directions of 1/2 ||DF(u) v - beta||^2, [B]."""
        run = run_with_push(lam)
        # A user's own kind of run need not have u, unless v or beta follow from it.
        is_read = v is None or callable(v) or callable(beta)
        u: Any = getattr(run, "u", None)
        if is_read and u is None:
            raise Unsupported(
                "penalty 'tangent' reads the input of a run as run.u, which this network's run "
                "does not have: give v and beta as tensors."
            )
        directions = list_directions(v, K, seed, run, u)
        target = beta(u) if callable(beta) else beta
        values: list[Tensor] = []
        for k, direction in enumerate(directions):
            change = run.push(direction)
            off = change - target_of_direction(target, k, len(directions), change)
            values.append(tangent_loss(existing_outputs(run, off), axis=output_axis(run)))
        return functools.reduce(torch.add, values) / len(values)

    is_given = not callable(v) and not callable(beta)  # a function may read anything
    return Penalty(
        "tangent",
        value,
        tangent.__doc__,
        joint=True,
        draws=v is None,
        reads_run_only=is_given,
        reads_costates=False,
    )


PENALTIES["tangent"] = tangent()


def run_with_push(lam: BaseCostates | LayeredCostates) -> Any:
    """The run of the whole network, which has `push`; what has none is refused by name."""
    per = getattr(lam, "per", None)
    if per is not None:
        raise Unsupported(f"penalty 'tangent' has no norms of states to be taken per {per}.")
    run = lam.trajectory if isinstance(lam, BaseCostates) else getattr(lam, "run", None)
    if hasattr(run, "push"):
        return run
    network = type(getattr(run, "network", None)).__name__
    if network == "EncoderDecoder":
        raise Unsupported(
            "penalty 'tangent' needs the change of the outputs along a change of the inputs, which "
            "an EncoderDecoder does not compute. Use co.Network, co.Stack or co.Chain."
        )
    raise Unsupported(
        "penalty 'tangent' needs the outputs of a network, but a recorded layer has none. Use "
        "co.penalties.output_change(y, u, v) and co.penalties.tangent_loss, or co.Network."
    )


def list_directions(v: Directions, K: int, seed: int, run: Any, u: Any) -> list[Tensor]:
    """The directions v_1, ..., v_K, each shaped like the input u; K counts those to draw."""
    if v is None:
        return draw_directions(seed, K, u, run.network.sample_axis)
    if callable(v):
        v = check_dense("what the function v returned", v(u))
    if u is None or v.dim() <= u.dim():
        return [v]
    if not len(v):
        raise InputError("v holds no direction: its first axis has length 0.")
    return list(v)


def draw_directions(seed: int, K: int, u: Tensor, axis: int) -> list[Tensor]:
    """K directions of random signs, shaped like u, whose axis `axis` is that of the samples.

    A sample's signs do not depend on the other samples, nor on how long they are.
    """
    by_sample = u.movedim(axis, 0)
    B = len(by_sample)
    signs = random_signs(seed, K, B, math.prod(by_sample.shape[1:]), u)
    return [each.view(by_sample.shape).movedim(0, axis) for each in signs]


def target_of_direction(beta: object, k: int, K: int, change: Tensor) -> Tensor | float:
    """Beta of direction k: a number, or a tensor that fits the change of y_hat."""
    if not isinstance(beta, Tensor):
        if isinstance(beta, float | int):
            return beta
        beta = tensor_of("beta", beta)
    beta = beta.to(change.device)
    if beta.dim() > change.dim():
        if len(beta) != K:
            raise InputError(f"beta is given for {len(beta)} directions; v has {K}.")
        beta = beta[k]
    try:
        fits = torch.broadcast_shapes(beta.shape, change.shape) == change.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(
            f"beta has shape {list(beta.shape)}; expected that of y_hat, {list(change.shape)}."
        )
    return beta


def has_outputs_at_steps(run: Any) -> bool:
    """Whether y_hat is [T, B, outputs]."""
    return getattr(run.network, "readout", None) == "every"


def output_axis(run: Any) -> int:
    """The axis of y_hat along which the samples lie."""
    return 1 if has_outputs_at_steps(run) else 0


def existing_outputs(run: Any, change: Tensor) -> Tensor:
    """The change of y_hat, with zeros at steps after a sample's end."""
    if not has_outputs_at_steps(run):
        return change
    exists = run.mask[1:, :, None].to(change.device)
    return torch.where(exists, change, 0)


def tangent_loss(change: Tensor, beta: Tensor | float = 0.0, axis: int = 0) -> Tensor:
    """1/2 ||change - beta||^2 of each sample, [B].

    change  DF(u) v, as `output_change` returns it
    axis    that of the samples: 0 of outputs [B, ...], 1 of outputs [T, B, ...]

    Example:
        >>> import torch, coadjoint as co
        >>> co.penalties.tangent_loss(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist()
        [12.5, 2.0]
    """
    off = check_dense("the change", change) - beta
    if not off.dim():
        raise InputError("the change is a scalar; expected the changes of B samples, [B, ...].")
    by_sample = off.movedim(axis, 0)
    return by_sample.reshape(len(by_sample), -1).square().sum(1) / 2


def output_change(y: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """(dy/du) v, the change of any output y along a change v of u, shaped like y; differentiable.

    y must come from u by differentiable operations, with u.requires_grad. torch computes it by
    double backward: the product (dy/du)' w is linear in w, and its derivative by w along v is
    (dy/du) v.

    Example:
        For y = u^2 it is 2 u v:

        >>> import torch, coadjoint as co
        >>> u = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> co.penalties.output_change(u**2, u, torch.ones(2)).tolist()
        [2.0, 4.0]
    """
    for name, given in (("y", y), ("u", u), ("the direction v", v)):
        check_dense(name, given)
    if v.shape != u.shape:
        raise InputError(
            f"the direction v has shape {list(v.shape)}; expected that of u, {list(u.shape)}."
        )
    create_graph = torch.is_grad_enabled()
    if not y.requires_grad or not u.requires_grad:
        raise InputError(
            "y must be computed from u with gradients on: call u.requires_grad_() before the model."
        )
    with torch.enable_grad():
        w = torch.zeros_like(y).requires_grad_()
        (pulled,) = torch.autograd.grad(y, u, w, create_graph=True, allow_unused=True)
        if pulled is None:
            raise InputError("y does not depend on u, so it has no change along v.")
        if not pulled.requires_grad:  # dy/du is zero
            return torch.zeros_like(y)
        (change,) = torch.autograd.grad(pulled, w, v, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(y) if change is None else change


def shifts(x: Tensor) -> Tensor:
    """The changes of images that are moved down and to the right, by one pixel: [2, B, ...].

    x  [B, C, H, W], or flat square images [B, n n]

    They are central differences, (x_{i-1} - x_{i+1}) / 2 along either axis; what lies beyond the
    edge counts as equal to the edge. As `tangent(shifts)`, outputs should not depend on where in
    the image something is.

    Example:
        >>> import torch, coadjoint as co
        >>> x = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])  # a dot
        >>> down, right = co.penalties.shifts(x).view(2, 3, 3).tolist()
        >>> down
        [[0.0, -0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.5, 0.0]]
        >>> right
        [[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    """
    check_dense("x", x)
    image = x
    if x.dim() == 2:
        n = math.isqrt(x.shape[1])
        if n * n != x.shape[1]:
            raise InputError(
                f"shifts of flat images needs square ones, [B, n n]; got {list(x.shape)}."
            )
        image = x.view(-1, 1, n, n)
    if image.dim() != 4:
        raise InputError(
            f"shifts takes images [B, C, H, W], or flat ones [B, n n]; got {list(x.shape)}."
        )
    moved = [difference(image, axis).reshape(x.shape) for axis in (2, 3)]
    return torch.stack(moved)


def difference(image: Tensor, axis: int) -> Tensor:
    """(x_{i-1} - x_{i+1}) / 2 along an axis; beyond the edge, x is as at the edge."""
    first = image.narrow(axis, 0, 1)
    last = image.narrow(axis, image.shape[axis] - 1, 1)
    before = torch.cat([first, image.narrow(axis, 0, image.shape[axis] - 1)], axis)
    after = torch.cat([image.narrow(axis, 1, image.shape[axis] - 1), last], axis)
    return (before - after) / 2


# What --tangent names.
NAMED_DIRECTIONS: dict[str, Directions] = {"random": None, "shifts": shifts}
