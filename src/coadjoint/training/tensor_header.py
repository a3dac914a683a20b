"""The headers of safetensors files, checked before any tensor is read."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch

from ..errors import StorageError
from . import files
from .json_types import JsonObject
from .optional_pydantic import Field
from .schema_checks import Count, Schema, Sha256, check, describe_value, parse_json

MAX_HEADER_BYTES = 32 << 20
STRIDE_LIMIT = 2**62  # bytes that torch can count
# fmt: off
TORCH_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}
# fmt: on
TensorKind = tuple[torch.dtype, tuple[int, ...]]


class ModelMetadata(Schema):
    """What every model.safetensors says about itself: JSON, under `coadjoint` in its metadata."""

    advice: ClassVar[str] = (
        "Restore the file; or delete it, and `coadjoint resume` writes it again from its run."
    )
    sha256: Sha256 | None = None


class TensorEntry(Schema):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Count]
    data_offsets: Annotated[tuple[Count, Count], Field(strict=False)]  # JSON has only lists


@dataclass(frozen=True)
class Header:
    """The names, types and shapes in a file of tensors, known before any of them is read."""

    tensors: dict[str, TensorKind]
    metadata: dict[str, str]
    element_count: int  # numbers in all tensors together
    file_bytes: int

    @property
    def outline(self) -> dict[str, torch.Tensor]:
        """The tensors by name, with types and shapes but without memory, on the meta device."""
        outline = {}
        for name, (dtype, shape) in self.tensors.items():
            outline[name] = torch.empty(shape, dtype=dtype, device="meta")
        return outline


def read_header(path: Path) -> Header:
    """The header of a safetensors file, if it accounts for every byte that follows it."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # The file is 8 bytes with the length of its header, the header, and the tensors.
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise no_tensors(path, f"its header does not fit into its {size:,} bytes")
        if length > MAX_HEADER_BYTES:
            raise no_tensors(path, f"its header has {length:,} bytes")
        content = file.read(length)
    return parse_header(content, size - 8 - length, path)


def parse_header(content: bytes, rest: int, path: Path) -> Header:
    """The header in these bytes of JSON, checked. rest: bytes that follow it in the file.

    The tensors must fill these bytes exactly. `path` is for errors.
    """
    entries = parse_json(content, f"{path}, its header", MAX_HEADER_BYTES)
    if not isinstance(entries, dict):
        raise no_tensors(path, f"its header is {describe_value(entries)}")
    metadata = entries.pop("__metadata__", {})
    is_object = isinstance(metadata, dict)
    if not is_object or not all(isinstance(text, str) for text in metadata.values()):
        raise no_tensors(path, "its metadata is not text")
    for name, entry in entries.items():
        check(f"{path}, its header, tensor {name!a}", entry, TensorEntry)
    tensors: dict[str, TensorKind] = {}
    element_count = 0
    end = 0  # of the tensors so far: there must be no gap between them and no overlap
    for name, entry in sorted(entries.items(), key=data_offsets):
        kind = tensor_kind(name, entry, path)
        dtype, shape = kind
        count = math.prod(shape)
        begin, stop = entry["data_offsets"]
        if begin != end or stop - begin != count * dtype.itemsize:
            raise no_tensors(path, f"{name!a} is not where its header says")
        tensors[name] = kind
        element_count += count
        end = stop
    if end != rest:
        raise no_tensors(
            path, f"{rest:,} bytes follow its header, which accounts for {end:,} bytes"
        )
    return Header(tensors, metadata, element_count, 8 + len(content) + rest)


def data_offsets(item: tuple[str, JsonObject]) -> tuple[int, ...]:
    """A sort key for the header's (name, entry): the bytes at which the tensor begins and ends."""
    return tuple(item[1]["data_offsets"])


def tensor_kind(name: str, entry: JsonObject, path: Path) -> TensorKind:
    """The type and shape of a tensor; refused if torch cannot have such a tensor."""
    dtype = TORCH_TYPES.get(entry["dtype"])
    if dtype is None:
        type_name = describe_value(entry["dtype"])
        raise StorageError(
            f"{path}: tensor {name!a} is of type {type_name}; expected one of "
            f"{', '.join(TORCH_TYPES)}."
        )
    # A tensor without entries may claim any shape; torch computes strides, which must not overflow.
    shape = tuple(entry["shape"])
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= STRIDE_LIMIT:
        raise StorageError(f"{path}: tensor {name!a} has a shape that no tensor can have.")
    return dtype, shape


def no_tensors(path: Path, fault: str) -> StorageError:
    """The error for a file that is not in the safetensors format. fault: why, in words."""
    return StorageError(f"{path} is not a file of tensors: {fault}.")


def read_metadata(path: Path, header: Header) -> JsonObject:
    """What a model file says about itself in its header, as JSON.

    Only the form of its key sha256 is checked here.
    """
    about = header.metadata.get("coadjoint")
    if about is None:
        raise StorageError(
            f"{path} was not written by coadjoint: it does not say which network it belongs to."
        )
    name = f"{path}: its description"
    return check(name, parse_json(about, name), ModelMetadata)
