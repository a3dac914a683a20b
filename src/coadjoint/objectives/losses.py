"""Losses: one value for each entry, from the pre-output a = V h + b_o and the target y.

An entry is a sample (readout at the last step) or a sample's time step (readout at every step).
Built-in losses contain the output function: softmax with cross-entropy and sigmoid with binary
cross-entropy are computed from a, and stay finite, with their first two derivatives, at a = +-1e4.
The slope of a nearly correct answer keeps its digits, however small it is: penalties that do not
depend on the size of costates depend on it as much as on any other slope. A user's loss receives
y_hat = phi(a) and y.

Example:
    >>> import torch
    >>> import coadjoint as co
    >>> y_hat = torch.tensor([[1.0, 2.0]])
    >>> co.losses.squared(y_hat, torch.zeros(1, 2), output="identity")
    tensor([5.])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cells.transport import Portable, remembers_origin
from ..errors import InputError, KindError, Unsupported, choose, real, renamed_attributes
from ..sweeps.checks import is_deferring_checks, require
from .cross_entropy import (
    balance,
    class_loss,
    class_point,
    class_slope,
    log_softmax,
    softmax_bend,
)

OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda a: a,
    "sigmoid": torch.sigmoid,
    "softmax": lambda a: torch.softmax(a, -1),
    "tanh": torch.tanh,
}
Output = str | Callable[[Tensor], Tensor]


def output_function(output: Output) -> Callable[[Tensor], Tensor]:
    """Phi in y_hat = phi(a): the function of that name, or the function itself."""
    if callable(output):
        return output
    return OUTPUTS[choose("output function", output, OUTPUTS)]


class LossPoint(Protocol):
    """A loss at one point: values and slopes of all entries, not to be differentiated."""

    @property
    def value(self) -> Tensor:
        """The loss of each entry, [entries]."""

    @property
    def slope(self) -> Tensor:
        """Its slope, [entries, outputs]."""

    def bend(self, change: Tensor) -> Tensor:
        """The change of the slope along a change of the point, both [entries, outputs]."""


@dataclass(frozen=True)
class Loss(Portable):
    """A loss, value(a or y_hat, y) -> [entries].

    name   how it is called in messages
    value  the loss of each entry
    folds  the output functions that `value` contains; it then receives a, else y_hat
    slope  d value / d (a or y_hat), [entries, outputs], where it is shorter than what autograd
           does; y has passed `value` before
    bend   the change of the slope along a change of (a or y_hat), (a or y_hat, y, change), likewise
    point  value, slope and bend at once, where they share their work: (a or y_hat, y) -> LossPoint,
           or None where there is no short cut
    """

    name: str
    value: Callable[[Tensor, Tensor], Tensor]
    folds: tuple[str, ...] = ()
    slope: Callable[[Tensor, Tensor], Tensor] | None = None
    bend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    point: Callable[[Tensor, Tensor], LossPoint | None] | None = None

    @property
    def _function(self) -> Callable[..., object]:
        """The function that the loss was made of; a pickle looks the loss up where it is."""
        return self.value

    def takes_a(self, output: Output) -> bool:
        """Whether `value` and `slope` are functions of a itself, with this output function."""
        return bool(self.folds) or output == "identity"

    def __call__(self, a: Tensor, y: Tensor | None, output: Output) -> Tensor:
        """The loss of each entry, [entries], of a [entries, outputs] and y.

        output  the network's output function phi: a loss that contains one must contain this one
        """
        if y is None:
            raise InputError(f"loss '{self.name}' compares with a target: pass y.")
        if not self.folds:
            return self.value(output_function(output)(a), y)
        if output not in self.folds:
            raise Unsupported(
                f"loss '{self.name}' contains its output function: it takes "
                f"output={' or '.join(map(repr, self.folds))}, but this network has "
                f"output={output!r}."
            )
        return self.value(a, y)


def same_shape(name: str, y_hat: Tensor, y: Tensor) -> Tensor:
    """The target y in the shape and dtype of y_hat; y may lack the axis of a single output.

    name  of the loss, for errors
    """
    if y.shape == y_hat.shape[:-1] and y_hat.shape[-1] == 1:
        y = y[..., None]
    if y.shape != y_hat.shape:
        raise InputError(
            f"loss '{name}': the output has shape {list(y_hat.shape)} and the target y "
            f"{list(y.shape)} on the entries that count; they must agree."
        )
    if y.is_complex():
        raise KindError(f"loss '{name}' takes real targets; got {y.dtype}.")
    return y.to(y_hat.dtype)


def _squared(y_hat: Tensor, y: Tensor) -> Tensor:
    """Sum over outputs of (y_hat - y)^2, [entries]."""
    return (y_hat - same_shape("squared", y_hat, y)).square().sum(-1)


def _half_squared(y_hat: Tensor, y: Tensor) -> Tensor:
    """Half the sum over outputs of (y_hat - y)^2, [entries]."""
    return 0.5 * (y_hat - same_shape("half-squared", y_hat, y)).square().sum(-1)


def _absolute(y_hat: Tensor, y: Tensor) -> Tensor:
    """Sum over outputs of |y_hat - y|, [entries]."""
    return (y_hat - same_shape("absolute", y_hat, y)).abs().sum(-1)


def _huber(delta: float, y_hat: Tensor, y: Tensor) -> Tensor:
    """Sum over outputs of e^2 / 2 where e = |y_hat - y| <= delta, else delta (e - delta / 2)."""
    e = (y_hat - same_shape("huber", y_hat, y)).abs()
    return torch.where(e <= delta, 0.5 * e.square(), delta * (e - 0.5 * delta)).sum(-1)


def _cross_entropy(a: Tensor, y: Tensor) -> Tensor:
    """-log softmax(a)_y of class numbers y [entries]; - y . log softmax(a) of probabilities y."""
    if y.is_floating_point():
        if y.shape == a.shape[:-1] and a.shape[-1] > 1:
            raise InputError(
                f"loss 'cross-entropy': y holds {y.dtype} {list(y.shape)}, but class numbers must "
                f"be integers: y.long(). Probabilities have shape {list(a.shape)}."
            )
        return -(same_shape("cross-entropy", a, y) * log_softmax(a)).sum(-1)
    return class_loss(a, check_classes(a, y))


def check_classes(a: Tensor, y: Tensor) -> Tensor:
    """The class numbers y of the rows of a; anything else is refused."""
    if y.shape != a.shape[:-1]:
        raise InputError(
            f"loss 'cross-entropy': the output has shape {list(a.shape)}, so y must hold class "
            f"numbers {list(a.shape[:-1])} or probabilities {list(a.shape)}; got {list(y.shape)}."
        )
    if y.dtype == torch.bool or y.is_complex():
        raise KindError(
            "loss 'cross-entropy' takes class numbers (integers) or probabilities (floats); "
            f"got {y.dtype}."
        )
    most = a.shape[-1] - 1
    return _check_range(y, 0, most, f"loss 'cross-entropy': class numbers must lie in 0..{most}")


@dataclass(frozen=True)
class SquaredPoint:
    """share sum over outputs of (y_hat - y)^2, with its slope; share: 1 or 1/2."""

    value: Tensor
    slope: Tensor
    share: float

    @staticmethod
    def of(name: str, share: float, y_hat: Tensor, y: Tensor) -> SquaredPoint:
        """The point of y_hat and y; name: of the loss, for errors."""
        error = y_hat - same_shape(name, y_hat, y)
        value = error.square().sum(-1)
        return SquaredPoint(share * value, 2 * share * error, share)

    def bend(self, change: Tensor) -> Tensor:
        """2 share change."""
        return change * (2 * self.share)


def _cross_entropy_point(a: Tensor, y: Tensor) -> LossPoint | None:
    """Value, slope and bend of class numbers y at once; None where there is no short cut."""
    return None if y.is_floating_point() else class_point(a, check_classes(a, y))


def _check_range(y: Tensor, low: float, high: float, expected: str) -> Tensor:
    """The target y; an error that begins with `expected` unless all of it lies in low..high.

    While a CUDA graph is recorded no value can be read: the check is then made afterwards.
    """
    if y.numel():
        least, most = y.aminmax()

        def make_error() -> InputError:
            return InputError(f"{expected}; got {least.item():g}..{most.item():g}.")

        if y.is_cuda or is_deferring_checks():
            # The comparison stays a tensor: it is read once, now or after the recording.
            require((least >= low) & (most <= high), make_error)
        elif not (low <= least.item() and most.item() <= high):  # NaN is refused, too
            raise make_error()
    # During a recording, a class out of range would stop the device before it is reported.
    return y.clamp(low, high) if is_deferring_checks() else y


def _binary_cross_entropy(a: Tensor, y: Tensor) -> Tensor:
    """Sum over outputs of -y log sigmoid(a) - (1 - y) log sigmoid(-a), y in 0..1.

    With w = 1 - y for a >= 0, else y, that is w |a| + log(1 + e^-|a|): no exponential overflows.
    """
    y = same_shape("binary-cross-entropy", a, y)
    y = _check_range(y, 0, 1, "loss 'binary-cross-entropy': targets must lie in 0..1")
    size = torch.where(a >= 0, a, -a)  # |a|, but with a slope at 0
    wrong = torch.where(a >= 0, 1 - y, y)  # w, how much of y is on the other side
    return (wrong * size + torch.log1p(torch.exp(-size))).sum(-1)


def match_output(y: Tensor, a: Tensor) -> Tensor:
    """The target y in the shape and dtype of a; it has as many entries as a."""
    return y.reshape(a.shape).to(a.dtype)


def _cross_entropy_slope(a: Tensor, y: Tensor) -> Tensor:
    """The slope p - y by a, p = softmax(a); y holds probabilities (floats) or class numbers."""
    if not y.is_floating_point():
        return class_slope(a, y)
    y = match_output(y, a)
    # A user's y need not sum to 1.
    return balance(a, torch.softmax(a, -1) * y.sum(-1, keepdim=True) - y)


def _cross_entropy_bend(a: Tensor, y: Tensor, change: Tensor) -> Tensor:
    """The change p (v - <p, v>) of the slope along a change v of a, p = softmax(a)."""
    bend = softmax_bend(a, change)
    return bend * match_output(y, a).sum(-1, keepdim=True) if y.is_floating_point() else bend


def _binary_cross_entropy_slope(a: Tensor, y: Tensor) -> Tensor:
    """The slope sigmoid(a) - y by a, as (1 - y) sigmoid(a) - y sigmoid(-a).

    For y = 0 and y = 1 that is no difference of nearly equal numbers.
    """
    y = match_output(y, a)
    return (1 - y) * torch.sigmoid(a) - y * torch.sigmoid(-a)


squared = Loss(
    "squared",
    _squared,
    (),
    lambda y_hat, y: 2 * (y_hat - match_output(y, y_hat)),
    lambda y_hat, y, change: 2 * change,
    functools.partial(SquaredPoint.of, "squared", 1.0),
)
# Caterini (2017), (3.6) and (5.5): the slope is y_hat - y itself
half_squared = Loss(
    "half-squared",
    _half_squared,
    (),
    lambda y_hat, y: y_hat - match_output(y, y_hat),
    lambda y_hat, y, change: change.clone(),
    functools.partial(SquaredPoint.of, "half-squared", 0.5),
)
absolute = Loss("absolute", _absolute)
cross_entropy = Loss(
    "cross-entropy",
    _cross_entropy,
    ("softmax", "identity"),
    _cross_entropy_slope,
    _cross_entropy_bend,
    _cross_entropy_point,
)
binary_cross_entropy = Loss(
    "binary-cross-entropy",
    _binary_cross_entropy,
    ("sigmoid", "identity"),
    _binary_cross_entropy_slope,
    lambda a, y, change: torch.sigmoid(a) * torch.sigmoid(-a) * change,
)


@remembers_origin
def huber(delta: float = 1.0) -> Loss:
    """e^2 / 2 for |e| <= delta, delta (|e| - delta / 2) beyond; e = y_hat - y, summed over outputs.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> co.losses.huber(1.0)(torch.tensor([[3.0]]), torch.tensor([[0.0]]), "identity")
        tensor([2.5000])
    """
    real("huber's delta", delta, 0, above=True)
    return Loss("huber", lambda y_hat, y: _huber(delta, y_hat, y))


@remembers_origin
def pinball(quantiles: Sequence[float]) -> Loss:
    """Sum over outputs of max(q e, (q - 1) e), e = y - y_hat, least on average at the quantile q.

    quantiles: their levels q, in (0, 1). Outputs are Q quantiles of one number, then of the next,
    ..., and y holds each number Q times. The slope by y_hat is -q where e > 0, 1 - q where e < 0,
    and 1/2 - q, half way between, at e = 0; the second derivative is 0.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> loss = co.losses.pinball([0.1, 0.9])
        >>> loss(torch.zeros(1, 2), torch.tensor([[2.0, 2.0]]), "identity")
        tensor([2.])
    """
    levels = [real("a level of pinball", q, 0, 1, above=True, below=True) for q in quantiles]
    if not levels:
        raise InputError("pinball needs at least one level, such as 0.5.")

    def tilt(y_hat: Tensor) -> Tensor:
        """Q - 1/2 of each output, [outputs]."""
        if y_hat.shape[-1] % len(levels):
            raise InputError(
                f"loss 'pinball' of {len(levels)} levels needs as many outputs for each number; "
                f"got {y_hat.shape[-1]} outputs."
            )
        one = torch.tensor(levels, dtype=y_hat.dtype, device=y_hat.device) - 0.5
        return one.repeat(y_hat.shape[-1] // len(levels))

    def value(y_hat: Tensor, y: Tensor) -> Tensor:
        e = same_shape("pinball", y_hat, y) - y_hat
        return (0.5 * e.abs() + tilt(y_hat) * e).sum(-1)

    def slope(y_hat: Tensor, y: Tensor) -> Tensor:
        e = match_output(y, y_hat) - y_hat
        return -0.5 * e.sign() - tilt(y_hat)

    return Loss("pinball", value, (), slope, lambda y_hat, y, change: torch.zeros_like(change))


LOSSES: dict[str, Loss] = {
    "squared": squared,  # sum over outputs of (y_hat - y)^2
    "half-squared": half_squared,  # half of it
    "absolute": absolute,  # sum over outputs of |y_hat - y|; slope 0 at 0
    "huber": huber(),
    # -log softmax(a)_y; output softmax, or identity with a as logits
    "cross-entropy": cross_entropy,
    # sum over outputs; output sigmoid, or identity with a as logits
    "binary-cross-entropy": binary_cross_entropy,
}
LossLike = str | Loss | Callable[..., Tensor]


def entry_losses(loss: LossLike, a: Tensor, y: Tensor | None, output: Output) -> Tensor:
    """The loss of each entry (a row of a), [len(a)].

    A user's function is called with y_hat = phi(a), phi being `output`, and with y unless that is
    None.
    """
    if isinstance(loss, str):
        loss = LOSSES[choose("loss", loss, LOSSES)]
    if isinstance(loss, Loss):
        return loss(a, y, output)
    if not callable(loss):
        raise KindError(
            f"a loss is a name ({', '.join(LOSSES)}), a Loss, a function of (y_hat, y) or a "
            f"tensor of one value for each sample; got {type(loss).__name__}."
        )
    y_hat = output_function(output)(a)
    value = loss(y_hat) if y is None else loss(y_hat, y)
    if not isinstance(value, Tensor):
        raise KindError(
            f"the loss function returned {type(value).__name__}; "
            f"expected a tensor of one value for each of {len(a)} entries."
        )
    if value.shape != a.shape[:1]:
        returned = "a scalar" if value.dim() == 0 else f"shape {list(value.shape)}"
        raise InputError(
            f"the loss function returned {returned}; expected one value for each of {len(a)} "
            f"entries, shape [{len(a)}]. coadjoint averages over samples itself: use "
            "reduction='none' and sum over outputs only."
        )
    return value


def losses_and_slopes(
    loss: LossLike, a: Tensor, y: Tensor | None, output: Output
) -> tuple[Tensor, Tensor]:
    """The loss of each entry, [len(a)], and its slope by that entry's a, [len(a), outputs].

    The slope is the loss's own formula if it has one, else autograd's. The result is not
    differentiable.
    """
    known = LOSSES.get(loss) if isinstance(loss, str) else loss
    if isinstance(known, Loss) and known.slope is not None and known.takes_a(output):
        value = known(a, y, output)
        assert y is not None
        return value, known.slope(a, y)
    with torch.enable_grad():  # `entry_losses` also refuses unknown names
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
