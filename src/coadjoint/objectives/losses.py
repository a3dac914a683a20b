"""Losses: one value for each entry, from the pre-output a = V h + b_o and the target y.

An entry is a sample (readout at the last step) or a sample's time step (readout at every step). Built-in losses fold
the output function in, so that softmax with cross-entropy and sigmoid with binary cross-entropy are computed from a
and stay finite, with their first two derivatives, at a = +-1e4. The slope of an answer that is nearly right keeps its
digits, however small it is: penalties that do not depend on the size of costates hear it as well as any other. A user's
loss receives y_hat = phi(a) and y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cells.transport import Portable, remembers_origin
from ..errors import InputError, KindError, Unsupported, choose, real, renamed_attributes
from ..sweeps.checks import is_deferring_checks, require

OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda a: a,
    "sigmoid": torch.sigmoid,
    "softmax": lambda a: torch.softmax(a, -1),
    "tanh": torch.tanh,
}
Output = str | Callable[[Tensor], Tensor]


def output_function(output: Output) -> Callable[[Tensor], Tensor]:
    return output if callable(output) else OUTPUTS[choose("output function", output, OUTPUTS)]


@dataclass(frozen=True)
class Loss(Portable):
    """value(a or y_hat, y) -> [entries]. `folds`: the output functions that `value` contains; it then receives a.

    slope: d value / d (a or y_hat), [entries, outputs], where it is shorter than what autograd does; y has passed `value`."""

    name: str
    value: Callable[[Tensor, Tensor], Tensor]
    folds: tuple[str, ...] = ()
    slope: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def _function(self) -> Callable[..., Any]:
        return self.value

    def __call__(self, a: Tensor, y: Tensor | None, output: Output) -> Tensor:
        if y is None:
            raise InputError(f"loss '{self.name}' compares with a target: pass y.")
        if not self.folds:
            return self.value(output_function(output)(a), y)
        if output not in self.folds:
            raise Unsupported(
                f"loss '{self.name}' contains its output function: it takes output={' or '.join(map(repr, self.folds))}, "
                f"and this network has output={output!r}."
            )
        return self.value(a, y)


def _same_shape(name: str, y_hat: Tensor, y: Tensor) -> Tensor:
    if y.shape == y_hat.shape[:-1] and y_hat.shape[-1] == 1:
        y = y[..., None]
    if y.shape != y_hat.shape:
        raise InputError(
            f"loss '{name}': the network gives {list(y_hat.shape)} and the target y has {list(y.shape)} on the entries that count; they must agree."
        )
    if y.is_complex():
        raise KindError(f"loss '{name}' takes real targets; got {y.dtype}.")
    return y.to(y_hat.dtype)


def _squared(y_hat: Tensor, y: Tensor) -> Tensor:
    return (y_hat - _same_shape("squared", y_hat, y)).square().sum(-1)


def _absolute(y_hat: Tensor, y: Tensor) -> Tensor:
    return (y_hat - _same_shape("absolute", y_hat, y)).abs().sum(-1)


def _huber(delta: float, y_hat: Tensor, y: Tensor) -> Tensor:
    e = (y_hat - _same_shape("huber", y_hat, y)).abs()
    return torch.where(e <= delta, 0.5 * e.square(), delta * (e - 0.5 * delta)).sum(-1)


def log_softmax(a: Tensor) -> Tensor:
    """log p. The greatest p is 1 less the sum of the others: its logarithm is made of those, and so
    are its slopes, which torch's own takes as a difference from 1."""
    top = a.argmax(-1, keepdim=True)
    behind = (a - a.gather(-1, top)).scatter(-1, top, 0.0)  # 0, without a slope, at the top
    others = torch.exp(behind).scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return behind - torch.log1p(others)


def _cross_entropy(a: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return -(_same_shape("cross-entropy", a, y) * log_softmax(a)).sum(-1)
    if y.shape != a.shape[:-1]:
        raise InputError(
            f"loss 'cross-entropy': the network gives {list(a.shape)}, so y must hold class numbers {list(a.shape[:-1])} or probabilities {list(a.shape)}; got {list(y.shape)}."
        )
    if y.dtype == torch.bool or y.is_complex():
        raise KindError(
            f"loss 'cross-entropy' takes class numbers (integers) or probabilities (floats); got {y.dtype}."
        )
    most = a.shape[-1] - 1
    y = _check_range(y, 0, most, f"loss 'cross-entropy': class numbers must lie in 0..{most}")
    return F.nll_loss(log_softmax(a), y.long(), reduction="none")


def _check_range(y: Tensor, low: float, high: float, what: str) -> Tensor:
    """y, if all of it lies in low..high."""
    if y.numel():
        least, most = y.aminmax()
        wrong = lambda: InputError(f"{what}; got {least.item():g}..{most.item():g}.")
        require(
            (least >= low) & (most <= high)
            if y.is_cuda
            else low <= least.item() and most.item() <= high,
            wrong,
        )
    # While recording, a class out of range would stop the device before it is reported.
    return y.clamp(low, high) if is_deferring_checks() else y


def _binary_cross_entropy(a: Tensor, y: Tensor) -> Tensor:
    y = _same_shape("binary-cross-entropy", a, y)
    y = _check_range(y, 0, 1, "loss 'binary-cross-entropy': targets must lie in 0..1")
    size = torch.where(a >= 0, a, -a)  # |a|, but with a slope at 0
    wrong = torch.where(a >= 0, 1 - y, y)  # how much of y is on the other side
    return (wrong * size + torch.log1p(torch.exp(-size))).sum(-1)


def match_output(y: Tensor, a: Tensor) -> Tensor:
    return y.reshape(a.shape).to(a.dtype)


def _cross_entropy_slope(a: Tensor, y: Tensor) -> Tensor:
    """p - y, of which the greatest entry of p takes what makes the sum zero: it may be near 1."""
    p, top = torch.softmax(a, -1), a.argmax(-1, keepdim=True)
    if y.is_floating_point():
        y = match_output(y, a)
        slope = p * y.sum(-1, keepdim=True) - y
    else:
        slope = p.scatter_add(-1, y.long()[..., None], p.new_full((*y.shape, 1), -1.0))
    others = slope.scatter(-1, top, 0.0)
    return others.scatter(-1, top, -others.sum(-1, keepdim=True))


def _binary_cross_entropy_slope(a: Tensor, y: Tensor) -> Tensor:
    """sigmoid(a) - y"""
    y = match_output(y, a)
    return (1 - y) * torch.sigmoid(a) - y * torch.sigmoid(-a)


squared = Loss("squared", _squared, (), lambda y_hat, y: 2 * (y_hat - match_output(y, y_hat)))
absolute = Loss("absolute", _absolute)
cross_entropy = Loss("cross-entropy", _cross_entropy, ("softmax", "identity"), _cross_entropy_slope)
binary_cross_entropy = Loss(
    "binary-cross-entropy",
    _binary_cross_entropy,
    ("sigmoid", "identity"),
    _binary_cross_entropy_slope,
)


@remembers_origin
def huber(delta: float = 1.0) -> Loss:
    """e^2 / 2 for |e| <= delta, delta (|e| - delta / 2) beyond, summed over outputs."""
    real("huber's delta", delta, 0, above=True)
    return Loss("huber", lambda y_hat, y: _huber(delta, y_hat, y))


LOSSES: dict[str, Loss] = {
    "squared": squared,  # sum over outputs of (y_hat - y)^2
    "absolute": absolute,  # sum over outputs of |y_hat - y|; slope 0 at 0
    "huber": huber(),
    "cross-entropy": cross_entropy,  # -log softmax(a)_y; output softmax, or identity with a as logits
    "binary-cross-entropy": binary_cross_entropy,  # sum over outputs; output sigmoid, or identity with a as logits
}
LossLike = str | Loss | Callable[..., Any]


def entry_losses(loss: LossLike, a: Tensor, y: Tensor | None, output: Output) -> Tensor:
    """The loss of each entry, [len(a)]."""
    if isinstance(loss, str):
        loss = LOSSES[choose("loss", loss, LOSSES)]
    if isinstance(loss, Loss):
        return loss(a, y, output)
    if not callable(loss):
        raise KindError(
            f"a loss is a name ({', '.join(LOSSES)}), a Loss, a function of (y_hat, y) or a tensor of one value for each sample; got {type(loss).__name__}."
        )
    y_hat = output_function(output)(a)
    value = loss(y_hat) if y is None else loss(y_hat, y)
    if not isinstance(value, Tensor):
        raise KindError(
            f"the loss function returned {type(value).__name__}; expected a tensor of one value for each of {len(a)} entries."
        )
    if value.shape != a.shape[:1]:
        what = "a scalar" if value.dim() == 0 else f"shape {list(value.shape)}"
        raise InputError(
            f"the loss function returned {what}; expected one value for each of {len(a)} entries, shape [{len(a)}]. "
            "coadjoint averages over samples itself: use reduction='none' and sum over outputs only."
        )
    return value


def losses_and_slopes(
    loss: LossLike, a: Tensor, y: Tensor | None, output: Output
) -> tuple[Tensor, Tensor]:
    """The loss of each entry and its slope by that entry's own a: [len(a)] and [len(a), outputs]. Not differentiable."""
    named = LOSSES.get(loss) if isinstance(loss, str) else loss
    if (
        isinstance(named, Loss)
        and named.slope is not None
        and (named.folds or output == "identity")
    ):
        value = named(a, y, output)
        assert y is not None
        return value, named.slope(a, y)
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        value = entry_losses(loss, a, y, output)
        return value.detach(), torch.autograd.grad(value.sum(), a)[0]


__getattr__ = renamed_attributes(
    __name__,
    {
        "entries": "entry_losses",
        "sloped": "losses_and_slopes",
    },
)
