"""Where the samples of a batch lie in the result of each operation of torch.

A step acts on samples one by one if each of its operations does. Then a single call with the rows
of all time steps computes what one call for each of them would. An operation that is not known
here, or that would mix rows, is refused, and the step is differentiated one time step at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class MixesRows(Exception):
    """An operation is not known to act on rows one by one; the text names it."""


class RowAxis(NamedTuple):
    """Where rows lie in a tensor: along axis `axis`, `each` entries for every row."""

    axis: int
    each: int = 1

    def moved(self, axis: int) -> RowAxis:
        """The same along another axis."""
        return RowAxis(axis, self.each)


Place = RowAxis | None  # None: the tensor does not depend on rows, as a weight


class Operand(NamedTuple):
    """A tensor among the arguments of an operation, and where its rows lie."""

    shape: tuple[int, ...]
    place: Place


Argument = object  # an Operand, a list of them, a number, a list of numbers, a type, ...
Rule = Callable[[Sequence[Argument], Sequence[tuple[int, ...]], int], list[Place]]

NAMES = """abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or ceil celu clamp clamp_max clamp_min clone copysign cos cosh deg2rad
    detach div elu elu_backward eq erf erfc exp exp2 expm1 fill floor fmod ge gelu gelu_backward
    gt hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    heaviside hypot isfinite isinf isnan le leaky_relu leaky_relu_backward lerp lift_fresh log
    log10 log1p log2 log_sigmoid_backward logaddexp logical_and logical_not logical_or logit lt
    masked_fill maximum minimum mish mish_backward mul ne neg nan_to_num ones_like pow reciprocal
    relu remainder round rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin sinc sinh
    softplus softplus_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward
    true_divide trunc where xlogy zeros_like full_like _to_copy"""
ELEMENTWISE = frozenset(NAMES.split())


def operands(arguments: Sequence[Argument]) -> list[Operand]:
    """The tensors among the arguments, also those in lists."""
    found: list[Operand] = []
    for argument in arguments:
        if isinstance(argument, Operand):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += [entry for entry in argument if isinstance(entry, Operand)]
    return found


def elementwise(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Rows at one axis of all operands, counted from the last one, as broadcasting counts."""
    tensors = operands(arguments)
    from_end = {(len(y.shape) - y.place.axis, y.place.each) for y in tensors if y.place is not None}
    if len(from_end) != 1:
        raise MixesRows("operands with rows along different axes")
    place, each = from_end.pop()
    for y in tensors:
        if y.place is None and len(y.shape) >= place and y.shape[-place] != 1:
            raise MixesRows("an operand with as many entries as there are rows")
    return [RowAxis(len(shape) - place, each) for shape in shapes]


def place_of(argument: Argument) -> RowAxis:
    """Where the rows of an operand lie; refused for one without."""
    if not isinstance(argument, Operand) or argument.place is None:
        raise MixesRows("an operand without rows")
    return argument.place


def axis_of(number: object, dims: int) -> int:
    """An axis as a number from 0."""
    assert isinstance(number, int)
    return number % dims


def dims_of(argument: Argument) -> int:
    """The number of axes of an operand."""
    assert isinstance(argument, Operand)
    return len(argument.shape)


def reshaped(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Rows stay the outermost part of an axis with as many entries before it."""
    place = place_of(arguments[0])
    assert isinstance(arguments[0], Operand)
    before = math.prod(arguments[0].shape[: place.axis])
    (shape,) = shapes
    for axis, size in enumerate(shape):
        if math.prod(shape[:axis]) == before and size % rows == 0 and size:
            return [RowAxis(axis, size // rows)]
    raise MixesRows("a shape in which the rows are not an axis")


def transposed(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Two axes change places: the two given, or those of a matrix."""
    place = place_of(arguments[0])
    dims = dims_of(arguments[0])
    pair = [axis_of(axis, dims) for axis in arguments[1:3]] or [0, dims - 1]
    if place.axis not in pair:
        return [place]
    return [place.moved(pair[1 - pair.index(place.axis)])]


def permuted(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Axes in a given order."""
    place = place_of(arguments[0])
    dims = dims_of(arguments[0])
    assert isinstance(arguments[1], list | tuple)
    order = [axis_of(axis, dims) for axis in arguments[1]]
    return [place.moved(order.index(place.axis))]


def unsqueezed(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """A new axis of one entry."""
    place = place_of(arguments[0])
    new = axis_of(arguments[1], dims_of(arguments[0]) + 1)
    return [place.moved(place.axis + (new <= place.axis))]


def along_other_axis(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Something along one axis, argument 1 (0 if not given), which rows do not lie along."""
    place = place_of(arguments[0])
    axis = axis_of(arguments[1] if len(arguments) > 1 else 0, dims_of(arguments[0]))
    if axis == place.axis:
        raise MixesRows("an operation along the rows")
    return [place] * len(shapes)


def split(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Parts along the axis of argument 2 (0 if not given)."""
    return along_other_axis([arguments[0], *arguments[2:3]], shapes, rows)


def cut(arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int) -> list[Place]:
    """A part along one axis, argument 1 (0 if not given); of the rows, only all of them."""
    assert isinstance(arguments[0], Operand)
    if shapes[0] == arguments[0].shape:
        return [arguments[0].place]
    return along_other_axis(arguments, shapes, rows)


def squeezed(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Axes of one entry (argument 1) left out; others stay."""
    assert isinstance(arguments[0], Operand)
    if shapes[0] == arguments[0].shape:
        return [arguments[0].place]
    return reduced(arguments[:2], shapes, rows)


def without_axis(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """One entry along an axis, argument 1 (0 if not given), or all of them one by one."""
    place = along_other_axis(arguments[:2], shapes[:1], rows)[0]
    assert place is not None
    axis = axis_of(arguments[1] if len(arguments) > 1 else 0, dims_of(arguments[0]))
    return [place.moved(place.axis - (axis < place.axis))] * len(shapes)


def joined(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Tensors that all have rows, one after the other along another axis."""
    assert isinstance(arguments[0], list | tuple)
    places = {place_of(part) for part in arguments[0]}
    if len(places) != 1:
        raise MixesRows("operands with rows along different axes")
    return along_other_axis([arguments[0][0], *arguments[1:2]], shapes, rows)


def stacked(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Tensors that all have rows, along a new axis."""
    assert isinstance(arguments[0], list | tuple)
    places = {place_of(part) for part in arguments[0]}
    if len(places) != 1:
        raise MixesRows("operands with rows along different axes")
    new = arguments[1] if len(arguments) > 1 else 0
    return unsqueezed([arguments[0][0], new], shapes, rows)


def product(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """A product of matrices, one of which has rows along an axis that is not summed over."""
    left, right = arguments[:2]
    assert isinstance(left, Operand)
    assert isinstance(right, Operand)
    if right.place is None and left.place is not None and left.place.axis == 0:
        return [left.place]
    if left.place is None and right.place is not None and right.place.axis == 1:
        return [right.place]
    raise MixesRows("a product over the rows")


def product_and_sum(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """A product of matrices, added to the first argument."""
    (place,) = product(arguments[1:3], shapes, rows)
    added = arguments[0]
    assert isinstance(added, Operand)
    return elementwise([added, Operand(shapes[0], place)], shapes, rows)


def batched_product(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Products of matrices, one for each row; or the rows of the left ones with the same right."""
    left, right = arguments[:2]
    assert isinstance(left, Operand)
    assert isinstance(right, Operand)
    if left.place is not None and left.place == right.place and left.place.axis == 0:
        return [left.place]
    if right.place is None and left.place is not None and left.place.axis == 1:
        return [left.place]
    raise MixesRows("a product over the rows")


def reduced(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """A sum or the like over axes (argument 1), kept with one entry (argument 2 True) or not."""
    place = place_of(arguments[0])
    dims = dims_of(arguments[0])
    given = arguments[1] if len(arguments) > 1 else None
    if isinstance(given, int):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        raise MixesRows("a reduction over all entries")
    axes = {axis_of(axis, dims) for axis in given}
    if place.axis in axes:
        raise MixesRows("a reduction over the rows")
    if len(arguments) > 2 and arguments[2] is True:
        return [place] * len(shapes)
    return [place.moved(place.axis - sum(axis < place.axis for axis in axes))] * len(shapes)


def normalised(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """native_layer_norm: the values, means and deviations of all but the last axes."""
    place = place_of(arguments[0])
    assert isinstance(arguments[1], list | tuple)
    if place.axis >= dims_of(arguments[0]) - len(arguments[1]):
        raise MixesRows("a mean over the rows")
    return [place] * len(shapes)


def normalised_backward(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """The gradient by the values; those by the weights, sums over rows, must not be asked for."""
    places = normalised([arguments[0], arguments[2]], shapes[:1], rows)
    wanted = arguments[7]
    if wanted not in ([True, False, False], (True, False, False)):
        raise MixesRows("a gradient by weights")
    return places


def along_third(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """The gradient of an operation along one axis, argument 2: of a softmax, or of a slice."""
    return along_other_axis([arguments[0], arguments[2]], shapes, rows)


def entry_in_zeros(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """select_backward: one entry along an axis (argument 2) of an array of zeros."""
    return unsqueezed([arguments[0], arguments[2]], shapes, rows)


def padded(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """constant_pad_nd: some of the last axes grow, not that of the rows."""
    place = place_of(arguments[0])
    assert isinstance(arguments[1], list | tuple)
    from_end = dims_of(arguments[0]) - 1 - place.axis
    if any(arguments[1][2 * from_end : 2 * from_end + 2]):
        raise MixesRows("rows that are added or left out")
    return [place]


def filled(
    arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """An array of one value: if its first axis is as long as there are rows, it has rows."""
    (shape,) = shapes
    return [RowAxis(0) if shape and shape[0] == rows else None]


FILLS = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")

RULES: dict[str, Rule] = {
    "_log_softmax": along_other_axis,
    "_log_softmax_backward_data": along_third,
    "_softmax": along_other_axis,
    "_softmax_backward_data": along_third,
    "_unsafe_view": reshaped,
    "addmm": product_and_sum,
    "amax": reduced,
    "amin": reduced,
    "bmm": batched_product,
    "cat": joined,
    "constant_pad_nd": padded,
    "cumsum": along_other_axis,
    "expand": elementwise,
    "linalg_vector_norm": lambda arguments, shapes, rows: reduced(
        [arguments[0], *arguments[2:]], shapes, rows
    ),
    "logsumexp": reduced,
    "mean": reduced,
    "mm": product,
    "native_layer_norm": normalised,
    "native_layer_norm_backward": normalised_backward,
    "permute": permuted,
    "prod": reduced,
    "select": without_axis,
    "select_backward": entry_in_zeros,
    "slice": cut,
    "slice_backward": along_third,
    "split": split,
    "split_with_sizes": split,
    "squeeze": squeezed,
    "stack": stacked,
    "sum": reduced,
    "t": transposed,
    "transpose": transposed,
    "unbind": without_axis,
    "unsafe_split": split,
    "unsafe_split_with_sizes": split,
    "unsqueeze": unsqueezed,
    "view": reshaped,
}

# Operations with a shape as an argument, at this place: rows in it are those of the result.
SHAPED = {
    "_unsafe_view": 1,
    "expand": 1,
    "full": 0,
    "new_full": 1,
    "new_ones": 1,
    "new_zeros": 1,
    "ones": 0,
    "select_backward": 1,
    "slice_backward": 1,
    "view": 1,
    "zeros": 0,
}


def places_of_results(
    name: str, arguments: Sequence[Argument], shapes: Sequence[tuple[int, ...]], rows: int
) -> list[Place]:
    """Where rows lie in the results of an operation with these arguments.

    name    of the operation, such as "mul"
    shapes  of its results
    rows    how many rows the tensors hold
    """
    if name in FILLS:
        return filled(arguments, shapes, rows)
    if all(y.place is None for y in operands(arguments)):
        return [None] * len(shapes)
    if name in ELEMENTWISE:
        return elementwise(arguments, shapes, rows)
    rule = RULES.get(name)
    if rule is None:
        raise MixesRows(f"operation {name}")
    return rule(arguments, shapes, rows)
