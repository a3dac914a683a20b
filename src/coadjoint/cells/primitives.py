"""The functions that a cell's formula may use, with their slopes.

Inside a formula torch's own functions record the same: `torch.tanh(z + v)` is `co.tanh(z + v)`.
Those defined here also take plain numbers, and `step` and `held` have no counterpart in torch.
Where a function has a kink (relu, abs, sign, step) its slope there is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .nodes import PRIMITIVES, ZERO, Node, Primitive, Value, apply_primitive


class PrimitiveFunction(functools.partial[object]):
    """A primitive as formulas call it. It is pickled by its name in this module."""

    def __reduce__(self) -> str:
        """The primitive's name: pickle takes a text for the name of a variable in this module."""
        return str(self.args[0])

    if TYPE_CHECKING:

        def __call__(self, a: Value) -> Value:
            """Apply the primitive to a node, a tensor or a number."""


DOCSTRING = """{sentence}

Takes an expression of a cell's formula, a tensor or a number.

Example:
    >>> import coadjoint as co
    >>> co.{name}({argument})
    {result}
"""


def define_primitive(
    name: str,
    run: Callable[..., Tensor],
    slope: Callable[[Node, Node], Node],
    sentence: str = "",
    example: tuple[float, float] = (0.0, 0.0),
) -> PrimitiveFunction:
    """Enter q = F(a) into PRIMITIVES, and return F as formulas call it.

    name      of the node that F records, and of the variable that holds F
    run       F on a tensor, or into the tensor `out`
    slope     (q, a) -> dF/da, as nodes
    sentence  what F is, for its docstring
    example   an argument and its value, for its docstring
    """
    PRIMITIVES[name] = Primitive(run, slope)
    function = PrimitiveFunction(apply_primitive, name)
    argument, result = example
    function.__doc__ = DOCSTRING.format(
        sentence=sentence, name=name, argument=argument, result=result
    )
    return function


def _relu(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    """max(a, 0), into `out` if that is given."""
    if out is None:
        return torch.relu(a)
    return torch.clamp_min(a, 0, out=out)  # torch.relu takes no `out`


SOFTPLUS_LINEAR = 40.0  # from here on e^-a is below the last digit of a double


def _softplus(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + e^a) (torch's beta is 1), a itself from SOFTPLUS_LINEAR on; into `out` if given."""
    if out is None:
        return functional.softplus(a, 1.0, SOFTPLUS_LINEAR)
    # torch takes `out`, but does not declare it
    return functional.softplus(a, 1.0, SOFTPLUS_LINEAR, out=out)  # type: ignore[call-arg]


def _step(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 where a > 0, else 0. It is detached, as torch has no slope for heaviside."""
    return torch.heaviside(a.detach(), a.new_zeros(()), out=out)


def _held(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The value of a as a constant, copied into `out` if that is given."""
    return a.detach() if out is None else out.copy_(a)


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number 1 as a tensor, for addcmul, which takes no numbers; it is made only once."""
    return torch.ones((), dtype=dtype, device=device)


def _tanh_slope(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The slope 1 - q^2 of q = tanh(a), in one operation."""
    return torch.addcmul(_one(q.dtype, q.device), q, q, value=-1, out=out)


def _sigmoid_slope(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The slope q - q^2 of q = sigmoid(a), in one operation."""
    return torch.addcmul(q, q, q, value=-1, out=out)


tanh = define_primitive(
    "tanh", torch.tanh, lambda q, a: Node("tanh_slope", (q,)), "The hyperbolic tangent."
)
sigmoid = define_primitive(
    "sigmoid",
    torch.sigmoid,
    lambda q, a: Node("sigmoid_slope", (q,)),
    "1 / (1 + e^-a).",
    (0.0, 0.5),
)
relu = define_primitive(
    "relu", _relu, lambda q, a: Node("step", (q,)), "The greater of a and 0.", (-2.0, 0.0)
)
softplus = define_primitive(
    "softplus", _softplus, lambda q, a: sigmoid(a), "log(1 + e^a), a smooth relu.", (50.0, 50.0)
)
exp = define_primitive("exp", torch.exp, lambda q, a: q, "e^a.", (0.0, 1.0))
expm1 = define_primitive(
    "expm1",
    torch.expm1,
    lambda q, a: exp(a),  # q + 1 would lose a small e^a
    "e^a - 1, exact for small a.",
)
log = define_primitive("log", torch.log, lambda q, a: 1 / a, "The natural logarithm.", (1.0, 0.0))
log1p = define_primitive(
    "log1p", torch.log1p, lambda q, a: 1 / (1 + a), "log(1 + a), exact for small a."
)
sqrt = define_primitive("sqrt", torch.sqrt, lambda q, a: 0.5 / q, "The square root.", (4.0, 2.0))
sin = define_primitive("sin", torch.sin, lambda q, a: Node("cos", (a,)), "The sine.")
cos = define_primitive("cos", torch.cos, lambda q, a: -sin(a), "The cosine.", (0.0, 1.0))
erf = define_primitive(
    "erf",
    torch.erf,
    lambda q, a: (2 / math.sqrt(math.pi)) * exp(-(a * a)),
    "The error function, 2/sqrt(pi) times the integral of e^-s^2 from 0 to a.",
)
atan = define_primitive(
    "atan", torch.atan, lambda q, a: 1 / (1 + a * a), "The inverse tangent, in -pi/2..pi/2."
)
abs = define_primitive(
    "abs", torch.abs, lambda q, a: Node("sign", (a,)), "The absolute value.", (-2.0, 2.0)
)
sign = define_primitive("sign", torch.sign, lambda q, a: ZERO, "-1, 0 or 1.", (-2.0, -1.0))
step = define_primitive("step", _step, lambda q, a: ZERO, "1 where a > 0, else 0.", (3.0, 1.0))
held = define_primitive(
    "held", _held, lambda q, a: ZERO, "The same value as a constant: torch's detach.", (2.0, 2.0)
)
define_primitive("tanh_slope", _tanh_slope, lambda q, a: -2 * a)
define_primitive("sigmoid_slope", _sigmoid_slope, lambda q, a: 1 - 2 * a)

FUNCTIONS = (
    tanh, sigmoid, relu, softplus, exp, expm1, log, log1p, sqrt, sin, cos, erf, atan, abs, sign,
    step, held,
)  # fmt: skip
# Doctest finds the examples of functions and classes by itself; these objects are neither.
__test__ = {function.args[0]: function.__doc__ for function in FUNCTIONS}
