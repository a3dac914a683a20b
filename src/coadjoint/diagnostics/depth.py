"""Depth: what diagnostics compute on a chain x_{i+1} = f_i(x_i), map by map.

Maps are evaluated again at the states of the run, in float64: small singular values of a product
survive only if all of its rows are multiplied by the same Jacobians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError, brief
from ..gradients.evaluation import Evaluation
from ..networks.chain import Chain
from ..networks.chain_calls import attention_with_derivatives
from ..networks.chain_run import ChainRun
from ..networks.maps.bilinear import BilinearMap
from ..networks.maps.elementwise import Activation
from .charts import Array
from .finding import to_numpy

ROWS = 64  # directions of a sample that pass through a map at a time
# torch's own elementwise functions, one entry of the state at a time.
ELEMENTWISE_MODULES = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)


def chain_of(e: Evaluation, what: str) -> Chain | None:
    """The evaluation's network if it is a chain whose maps can be evaluated again, else None.

    A chain with dropout in training mode is refused; `what` begins the refusal.
    """
    chain = e.network.as_chain
    if chain is not None:
        chain.refuse_if_random(what)
    return chain


def chain_run_of(e: Evaluation) -> ChainRun:
    """The run of an evaluation whose network is a chain."""
    run = e.trajectory
    assert isinstance(run, ChainRun)
    return run


def last_layer(chain: Chain, end: object) -> int:
    """The layer `end` at which products of Jacobians end; None for the last one."""
    L = len(chain.maps)
    if end is None:
        return L
    if not isinstance(end, int) or isinstance(end, bool) or not 1 <= end <= L:
        raise InputError(f"end must be a layer of the chain, 1..{L}; got {brief(end)}.")
    return end


def refuse_end(end: object) -> None:
    """Refuse `end` for a network over time, whose products go to each sample's last step."""
    if end is not None:
        raise InputError(f"end is a layer of a co.Chain; got {brief(end)} for another network.")


def first_states(run: ChainRun, samples: int) -> list[Tensor]:
    """The states of the first samples, in float64."""
    return [x[:samples].detach().double() for x in run.x]


def call_in_float64(module: nn.Module, x: Tensor) -> Tensor:
    """A map at a state in float64, with its weights as float64 numbers."""
    values: dict[str, Tensor] = {}
    for named in (module.named_parameters(), module.named_buffers()):
        for name, value in named:
            if value.is_floating_point():
                values[name] = value.detach().double()
    y: Tensor = torch.func.functional_call(module, values, (x,))
    return y


def repeat_samples(x: Tensor, count: int) -> Tensor:
    """Each sample `count` times in a row, [S count, ...], as a leaf for derivatives."""
    return x.repeat_interleave(count, 0).detach().requires_grad_()


def pull_directions(module: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    """Df(x)' w of several w for each sample: w [S, m, n_after] -> [S, m, n_before]."""
    S, m = w.shape[:2]
    with torch.enable_grad(), attention_with_derivatives(module):
        before = repeat_samples(x, m)
        after = call_in_float64(module, before.clone())  # a copy, which a map may overwrite
        if not after.requires_grad:  # a map that does not depend on its state
            return x.new_zeros(S, m, x[0].numel())
        (pulled,) = torch.autograd.grad(after, before, w.reshape(after.shape))
    return pulled.reshape(S, m, -1)


def push_directions(module: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Df(x) v of several v for each sample: v [S, m, n_before] -> [S, m, n_after].

    It is the derivative by w of <Df(x)' w, v>, which is linear in w.
    """
    S, m = v.shape[:2]
    with torch.enable_grad(), attention_with_derivatives(module):
        before = repeat_samples(x, m)
        after = call_in_float64(module, before.clone())
        w = torch.zeros_like(after).requires_grad_()
        if not after.requires_grad:
            return w.detach().reshape(S, m, -1)
        (pulled,) = torch.autograd.grad(after, before, w, create_graph=True)
        if not pulled.requires_grad:
            return w.detach().reshape(S, m, -1)
        (pushed,) = torch.autograd.grad(pulled, w, v.reshape(before.shape))
    return pushed.reshape(S, m, -1)


def by_parts(
    product: Callable[[nn.Module, Tensor, Tensor], Tensor],
    module: nn.Module,
    x: Tensor,
    directions: Array,
) -> Array:
    """A product with a map's Jacobian for directions [S, m, n], ROWS of them at a time."""
    w = torch.from_numpy(directions).to(x.device)
    parts = [product(module, x, part) for part in w.split(ROWS, 1)]
    return to_numpy(torch.cat(parts, 1))


def jacobian_products(chain: Chain, x: list[Tensor], end: int) -> Iterator[tuple[Array, Array]]:
    """dx_end / dx_{end - s} for s = 1, 2, ..., end as mantissas [S, n_end, n] and logs [S].

    The product is mantissa exp(log): the largest entry of a mantissa is 1.
    """
    S = len(x[0])
    n = x[end][0].numel()
    P = np.broadcast_to(np.eye(n), (S, n, n)).copy()
    log_size = np.zeros(S)
    for i in reversed(range(end)):
        P = by_parts(pull_directions, chain.maps[i], x[i], P)
        largest = np.abs(P).max((1, 2))
        with np.errstate(divide="ignore"):
            log_size = log_size + np.log(largest)
        P = P / np.where(largest > 0, largest, 1)[:, None, None]
        yield P, log_size


def stretch_logs(chain: Chain, x: list[Tensor], end: int) -> Array:
    """The logs of |diag R_i|, Q_i R_i = J_i Q_{i-1}, summed over layers 1..end: [S, k].

    k is the smallest width on the way: a narrower layer maps all further directions to zero. Q_0 is
    the identity, or, where k is below the width of the input, k random orthonormal directions.
    """
    S = len(x[0])
    n = x[0][0].numel()
    k = min(y[0].numel() for y in x[: end + 1])
    start = np.eye(n)
    if k < n:
        start = np.linalg.qr(np.random.default_rng(0).standard_normal((n, k)))[0]
    Q = np.broadcast_to(start.T, (S, k, n)).copy()  # a direction is a row here
    total = np.zeros((S, k))
    for i in range(end):
        moved = by_parts(push_directions, chain.maps[i], x[i], Q)
        columns, R = np.linalg.qr(moved.transpose(0, 2, 1))
        Q = np.ascontiguousarray(columns.transpose(0, 2, 1))
        stretch = np.abs(np.diagonal(R, axis1=1, axis2=2))
        # A direction that J_i maps to zero has a diagonal entry of rounding errors alone.
        rounding = k * np.finfo(float).eps * np.linalg.norm(R, axis=(1, 2))[:, None]
        with np.errstate(divide="ignore"):
            total += np.log(np.where(stretch < rounding, 0, stretch))
    return total


def relative_slopes(run: ChainRun) -> Iterator[tuple[int, Array]]:
    """For each layer i with an activation: i, and |psi'(z)| as a share of that at rest, [B, n].

    At rest z is 0 or 1, whichever is steeper. Activations are those of dense layers, of
    convolutions, and elementwise maps by themselves; the identity is none.
    """
    maps: Iterable[nn.Module] = run.network.maps
    for i, module in enumerate(maps, start=1):
        slope = slope_function(module)
        if slope is None:
            continue
        x = run.x[i - 1].detach()
        with torch.no_grad():
            z = module.pre_activation(x) if isinstance(module, BilinearMap) else x
        at_rest = slope(torch.tensor([[0.0], [1.0]], dtype=z.dtype, device=z.device)).abs().max()
        yield i, to_numpy((slope(z).abs() / at_rest).flatten(1))


def slope_function(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The slope psi' of a map's activation as a function of its argument; None if there is none."""
    if isinstance(module, BilinearMap):
        return None if module.activation == "identity" else module.slope
    is_psi = isinstance(module, Activation) and module.name != "identity"
    if not is_psi and not isinstance(module, ELEMENTWISE_MODULES):
        return None

    def slope(z: Tensor) -> Tensor:
        """The derivative of each entry by its own argument."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            y = module(z.clone())
            (found,) = torch.autograd.grad(y, z, torch.ones_like(y))
        return found

    return slope
