"""The one way by which an array leaves Python: its address, handed to compiled code.

Compiled code believes what it is told. So an address is handed out only if the tensor is an
ordinary one, with the type, device and number of values that the loop will read, and memory enough
for them. All other tensors are refused here: those without values (FakeTensorMode, the meta
device), spread over processes (DTensor), stored in another way (sparse, nested), wrapped by a
transform of torch.func, or whose memory was freed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import CoadjointError, InputError, KindError, Unsupported
from .torch_internals import (
    fake_mode_is_on,
    is_fake,
    is_wrapped,
    is_zero_everywhere,
    proxy_mode_is_on,
)

PLAIN = (Tensor, Parameter)
WAYS_OUT = {
    "DTensor": (
        "Take .to_local() or .full_tensor() of it first; of a module that fully_shard has sharded, "
        "call the sharded module, and put co.record and the penalty inside its forward."
    ),
    "FakeTensor": "Use tensors that have values; the modules of co.nn work on fake ones too.",
}


class Pointers(NamedTuple):
    """Addresses, and the tensors that own them: these must live until the loop has run."""

    addresses: list[int]
    owners: list[Tensor | None]


class RowPointers(NamedTuple):
    """Addresses of arrays whose rows may lie apart, and the tensors that own them."""

    addresses: list[int]
    steps: list[int]  # values from one row to the next
    owners: list[Tensor]


class Expected(NamedTuple):
    """What a loop takes an array for."""

    name: str
    values: int
    dtype: torch.dtype
    device: torch.device


def pointers(
    names: Sequence[str],
    arrays: Sequence[Tensor | None],
    entries: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Pointers:
    """The addresses of arrays whose values lie row after row; 0 for None.

    entries, dtypes: how many values of which type the loop takes each array for. An array that does
    not lie so is copied; one that is not what the loop expects is refused. names: for the message.
    """
    addresses = [0] * len(arrays)
    owners: list[Tensor | None] = [None] * len(arrays)
    for i, array in enumerate(arrays):
        if array is None:
            continue
        dtype = dtypes[i]
        values = entries[i]
        y = array
        if type(y) not in PLAIN:
            y = plain_part(array, Expected(names[i], values, dtype, device))
        try:
            if not y.is_contiguous():
                y = contiguous_copy(y)
            if y.is_neg():  # torch has only marked it as the negative of what is stored
                y = y.resolve_neg()
            room = y.untyped_storage().nbytes()  # in bytes, from the start of the storage
            address = y.data_ptr()
        except RuntimeError:  # a wrapper of torch.func, a sparse tensor, or too little memory
            raise refusal_error(array, Expected(names[i], values, dtype, device)) from None
        size = values * dtype.itemsize
        enough = room >= y.storage_offset() * dtype.itemsize + size
        if not enough or y.nbytes != size or y.dtype is not dtype or y.device != device:
            raise refusal_error(array, Expected(names[i], values, dtype, device))
        if address == 0 and values > 0:
            y = stored_zeros(y, Expected(names[i], values, dtype, device))
            address = y.data_ptr()
        addresses[i] = address
        owners[i] = y
    return Pointers(addresses, owners)


def row_pointers(
    names: Sequence[str], arrays: Sequence[Tensor], dtype: torch.dtype, device: torch.device
) -> RowPointers:
    """The addresses of arrays [N, n] whose rows may lie apart, such as some columns of another.

    An array whose columns do not lie side by side is copied; one that is not what the loop expects
    is refused, as in `pointers`.
    """
    addresses: list[int] = []
    steps: list[int] = []
    owners: list[Tensor] = []
    for name, array in zip(names, arrays, strict=True):
        rows, columns = array.shape
        expected = Expected(name, rows * columns, dtype, device)
        y = array if type(array) in PLAIN else plain_part(array, expected)
        try:
            if columns > 1 and y.stride(1) != 1:
                y = contiguous_copy(y)
            if y.is_neg():
                y = y.resolve_neg()
            step = y.stride(0)
            room = y.untyped_storage().nbytes()
            address = y.data_ptr()
        except RuntimeError:
            raise refusal_error(array, expected) from None
        end = y.storage_offset() + (rows - 1) * step + columns if expected.values else 0
        if room < end * dtype.itemsize or y.dtype is not dtype or y.device != device:
            raise refusal_error(array, expected)
        if address == 0 and expected.values > 0:
            y = stored_zeros(y, expected)
            step = columns
            address = y.data_ptr()
        addresses.append(address)
        steps.append(step)
        owners.append(y)
    return RowPointers(addresses, steps, owners)


def plain_part(y: Tensor, expected: Expected) -> Tensor:
    """A tensor of an ordinary class without the methods of that class; others are refused."""
    if not is_ordinary(type(y)):
        raise refusal_error(y, expected)
    return y.as_subclass(Tensor)


def stored_zeros(y: Tensor, expected: Expected) -> Tensor:
    """Zeros in memory for a tensor without an address, which must be a direction known to be 0."""
    if not is_zero_everywhere(y):
        raise refusal_error(y, expected)
    return torch.zeros_like(y)


def is_short_of_memory(y: Tensor) -> bool:
    """Does the storage of a plain tensor end before its last value? It was freed or shrunk."""
    if not y.numel():
        return False
    last = sum((n - 1) * stride for n, stride in zip(y.shape, y.stride(), strict=True))
    needed_bytes = (y.storage_offset() + last + 1) * y.element_size()
    return y.untyped_storage().nbytes() < needed_bytes


def has_memory(y: Tensor) -> bool:
    """Does a plain tensor lie in memory, up to its last value? Quick if it lies dense."""
    try:
        room = y.untyped_storage().nbytes()
    except RuntimeError:  # stored in another way, as a sparse tensor, or wrapped by torch.func
        return False
    # 8: no type of ours is longer, so that the offset is not underestimated.
    if y.is_contiguous() and room >= y.nbytes + 8 * y.storage_offset():
        return True
    return not is_short_of_memory(y)


def has_lost_memory(y: Tensor) -> bool:
    """Has a plain tensor lost its values? Other tensors may keep them elsewhere: False."""
    if type(y) not in PLAIN or y.is_meta or is_wrapped(y):
        return False
    if y.is_contiguous() and y.untyped_storage().nbytes() >= y.nbytes + 8 * y.storage_offset():
        return False  # as in has_memory
    return is_short_of_memory(y)


def contiguous_copy(y: Tensor) -> Tensor:
    """A copy of `y` whose values lie row after row; a RuntimeError if its memory is too small.

    torch itself would read beyond the end of such memory.
    """
    if is_short_of_memory(y):
        raise RuntimeError("too little memory")
    return y.contiguous()


@functools.cache
def is_ordinary(kind: type) -> bool:
    """Does this class of tensors use torch's own operations?

    One that does may have methods of its own, but its memory is ordinary.
    """
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def refusal_error(y: Tensor, expected: Expected) -> CoadjointError:
    """The error for a tensor whose address cannot be handed out."""
    name = expected.name
    unusual = unusual_kind(y)
    if is_wrapped(y):
        unusual = (
            "wrapped by a transform of torch.func",
            "Put the transform around the whole call of the network or module.",
        )
    if unusual is not None:
        return unusual_error(name, *unusual)
    if y.dtype is not expected.dtype:
        return KindError(
            f"{name} is {str(y.dtype)[6:]}; expected {str(expected.dtype)[6:]}. Convert it with "
            f".to({expected.dtype})."
        )
    if y.device != expected.device:
        return InputError(
            f"{name} is on {y.device}; expected it on {expected.device}. Move it with "
            f".to('{expected.device}')."
        )
    if y.numel() != expected.values:
        return InputError(
            f"{name} has {y.numel()} values, shape {list(y.shape)}; expected {expected.values}."
        )
    return InputError(
        f"{name} has shape {list(y.shape)}, but its memory was freed or is too small for that. "
        "Load its values again; a module whose weights are sharded or offloaded must be called "
        "in the way that brings them back."
    )


def unusual_error(name: str, kind: str, way_out: str) -> Unsupported:
    """The error for a tensor of an unusual kind, as `unusual_kind` describes it."""
    return Unsupported(
        f"{name} is {kind}; sweeps read memory and need an ordinary dense tensor. {way_out}"
    )


def unusual_kind(y: Tensor) -> tuple[str, str] | None:
    """(the kind of tensor, a way out) for one without ordinary memory; None for an ordinary one."""
    if not is_ordinary(type(y)):
        kind = type(y).__name__
        return f"a {kind}", WAYS_OUT.get(kind, "Take the tensor inside it.")
    if y.is_nested:
        return "a nested tensor", "Use a PackedSequence or a list of tensors."
    if y.layout is not torch.strided:
        return f"a tensor of layout {str(y.layout)[6:]}", "Take .to_dense() of it first."
    if y.is_meta:
        return (
            "on the device meta, where tensors have no values",
            "Put values on a real device, with .to_empty().",
        )
    return None


def refuse_if_without_values(name: str, y: Tensor) -> None:
    """Refuse a tensor whose values cannot be read."""
    unusual = unusual_kind(y)
    if unusual is None and fake_mode_is_on():
        unusual = (
            "used under FakeTensorMode, where tensors have no values",
            "Leave that mode; the modules of co.nn work in it.",
        )
    if unusual is not None:
        kind, way_out = unusual
        raise Unsupported(f"{name} is {kind}; expected an ordinary dense tensor. {way_out}")


def refuse_if_without_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors of a class that keeps its values elsewhere, such as DTensor.

    Fake tensors pass: torch knows the shapes of their operations.
    """
    for name, y in tensors:
        if type(y) not in PLAIN and not is_ordinary(type(y)) and not is_fake(y):
            unusual = unusual_kind(y)
            assert unusual is not None
            raise unusual_error(name, *unusual)


def is_traced(*tensors: Tensor) -> bool:
    """Does torch only write operations down or infer shapes, everywhere or for these tensors?

    Then a sweep must be one operator that torch knows.
    """
    if fake_mode_is_on() or proxy_mode_is_on():
        return True
    return any(not is_ordinary(type(y)) and is_fake(y) for y in tensors)
