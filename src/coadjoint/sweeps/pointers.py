"""The one way by which an array leaves Python: its address, handed to compiled code.

Compiled code believes what it is told. So an address is given away only if the tensor is an ordinary one, of the type,
device and number of values that the loop will read, with that much memory behind it. All other tensors are refused here:
what torch only imagines (FakeTensorMode, the meta device), what is spread over processes (DTensor), what lies otherwise
(sparse, nested), what a transform of torch.func has wrapped, and what has lost its memory.
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
    "DTensor": "Take .to_local() or .full_tensor() of it first.",
    "FakeTensor": "Use tensors that have values; the modules of co.nn work on fake ones too.",
}


class Pointers(NamedTuple):
    """Addresses, and the tensors that own them: these must live until the loop has run."""

    addresses: list[int]
    owners: list[Tensor | None]


def pointers(
    names: Sequence[str],
    arrays: Sequence[Tensor | None],
    entries: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Pointers:
    """The addresses of arrays whose values lie row after row; 0 for one that is not there. entries, dtypes: how many values
    of which type the loop takes each of them for."""
    addresses: list[int] = []
    owners: list[Tensor | None] = []
    for name, array, count, dtype in zip(names, arrays, entries, dtypes, strict=True):
        if array is None:
            addresses.append(0)
            owners.append(None)
            continue
        y = array
        if type(y) not in PLAIN:
            if not is_ordinary(type(y)):
                raise refusal_error(name, array, count, dtype, device)
            y = y.as_subclass(Tensor)
        try:
            if not y.is_contiguous():
                y = contiguous_copy(y)
            if y.is_neg():  # torch has only marked it as the negative of what is stored
                y = y.resolve_neg()
            room = y.untyped_storage().nbytes()
            address = y.data_ptr()
        except RuntimeError:  # a wrapper of torch.func or a sparse tensor: neither has memory of its own; or no memory
            raise refusal_error(name, array, count, dtype, device) from None
        size = dtype.itemsize
        enough = room >= (y.storage_offset() + count) * size
        if not enough or y.nbytes != count * size or y.dtype is not dtype or y.device != device:
            raise refusal_error(name, array, count, dtype, device)
        if address == 0 and count > 0:
            if not is_zero_everywhere(y):
                raise refusal_error(name, array, count, dtype, device)
            y = torch.zeros_like(y)  # what forward mode calls zero is stored nowhere
            address = y.data_ptr()
        addresses.append(address)
        owners.append(y)
    return Pointers(addresses, owners)


def is_short_of_memory(y: Tensor) -> bool:
    """Does the storage of a plain tensor end before its last value? It was freed, or made smaller."""
    if not y.numel():
        return False
    last = sum((n - 1) * stride for n, stride in zip(y.shape, y.stride(), strict=True))
    needed = (y.storage_offset() + last + 1) * y.element_size()
    return y.untyped_storage().nbytes() < needed


def has_lost_memory(y: Tensor) -> bool:
    """Has a plain tensor lost its values? Of others, which keep them elsewhere or have none, nothing is known here."""
    if type(y) not in PLAIN or y.is_meta or is_wrapped(y):
        return False
    return is_short_of_memory(y)


def contiguous_copy(y: Tensor) -> Tensor:
    """y row after row. torch itself would read beyond the end of memory that is too small."""
    if is_short_of_memory(y):
        raise RuntimeError("too little memory")
    return y.contiguous()


@functools.cache
def is_ordinary(kind: type) -> bool:
    """Are operations on tensors of this class torch's own? A subclass may have other methods, but not other memory."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def refusal_error(
    name: str, y: Tensor, count: int, dtype: torch.dtype, device: torch.device
) -> CoadjointError:
    """What to say of a tensor whose address cannot be given away."""
    odd = unusual_kind(y)
    if is_wrapped(y):
        odd = (
            "wrapped by a transform of torch.func",
            "Put the transform around the whole call of the network or module.",
        )
    if odd is not None:
        return Unsupported(
            f"{name} is {odd[0]}; sweeps read memory, and need an ordinary dense tensor. {odd[1]}"
        )
    if y.dtype is not dtype:
        return KindError(
            f"{name} is {str(y.dtype)[6:]}; expected {str(dtype)[6:]}. Convert it with .to({dtype})."
        )
    if y.device != device:
        return InputError(
            f"{name} is on {y.device}; expected it on {device}. Move it with .to('{device}')."
        )
    if y.numel() != count:
        return InputError(
            f"{name} has {y.numel()} values, shape {list(y.shape)}; expected {count}."
        )
    return InputError(
        f"{name} has shape {list(y.shape)}, but its memory was freed or is too small for that. Load its values again; a "
        "module whose weights are sharded or offloaded must be called in the way that brings them back."
    )


def unusual_kind(y: Tensor) -> tuple[str, str] | None:
    """(what kind of tensor it is, the way out), of one without memory of its own; None for an ordinary one."""
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
            "Give it values on a real device, with .to_empty().",
        )
    return None


def refuse_if_without_values(name: str, y: Tensor) -> None:
    """Refuse a tensor whose values cannot be looked at."""
    odd = unusual_kind(y)
    if odd is None and fake_mode_is_on():
        odd = (
            "used under FakeTensorMode, where tensors have no values",
            "Leave that mode; co.nn's modules work in it.",
        )
    if odd is not None:
        raise Unsupported(f"{name} is {odd[0]}; expected an ordinary dense tensor. {odd[1]}")


def refuse_if_without_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors of a class that keeps its values elsewhere, like DTensor; not fake ones, whose operations torch knows."""
    for name, y in tensors:
        if type(y) not in PLAIN and not is_ordinary(type(y)) and not is_fake(y):
            kind, way_out = unusual_kind(y) or ("", "")
            raise Unsupported(
                f"{name} is {kind}; sweeps read memory, and need an ordinary dense tensor. {way_out}"
            )


def is_traced(*tensors: Tensor) -> bool:
    """Does torch write operations down, or only find out their shapes? Then a sweep must be one operator that it knows."""
    if fake_mode_is_on() or proxy_mode_is_on():
        return True
    return any(not is_ordinary(type(y)) and is_fake(y) for y in tensors)
