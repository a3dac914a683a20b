"""Elementwise operations over all rows in C, made from their formulas."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....cells.formula import Node, evaluate_nodes
from ...memory import empty
from ...pointers import pointers
from ...pointwise import Pointwise
from ...rows import Rows
from ..expressions import input_groups
from . import compiler
from .source import pointwise_source
from .threads import thread_count

CPU = torch.device("cpu")


class CompiledPointwise(NamedTuple):
    """A compiled Pointwise: its loop, and the terms it is given beside its inputs."""

    run: Callable[..., None]  # (rows, d, threads, addresses)
    uniform_terms: tuple[Node, ...]


@functools.cache
def compiled_pointwise(
    op: Pointwise, present: tuple[bool, ...], dtype: torch.dtype
) -> CompiledPointwise:
    """Compile an operation, or load what was compiled before.

    present: for each array of op.known and op.inputs, whether it is given (input_groups).
    """
    source = pointwise_source(op, present, dtype)
    run = compiler.library(source.text).run
    run.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    run.restype = None
    return CompiledPointwise(run, source.uniform_terms)


def pointwise(
    op: Pointwise,
    rows: Rows | None,
    at_hand: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
) -> list[Tensor]:
    """Run `op` in C: its outputs [rows, m d] that are not identically zero, in their order.

    rows: not needed here; it belongs to the interface of engines.
    at_hand, tensors: the values of op.known and op.inputs, None where one is missing.
    """
    groups = []
    given = []
    for group, y in zip(input_groups(op), (*at_hand, *tensors), strict=True):
        if y is not None:
            groups.append(group)
            given.append(y)
    # The first input that has rows tells their number and that of the units.
    for (name, nodes), y in zip(groups, given, strict=True):
        if name is not None and name not in op.uniform:
            like = y
            d = y.shape[1] // len(nodes)
            break
    count = like.shape[0]
    present = tuple(y is not None for y in (*at_hand, *tensors))
    run, uniform_terms = compiled_pointwise(op, present, like.dtype)
    once = like.new_empty(0)  # terms that are the same for all rows, computed once
    if uniform_terms:
        known: dict[Node, Tensor] = {}
        for (name, nodes), y in zip(groups, given, strict=True):
            if name in op.uniform:
                known.update(zip(nodes, y.split(d), strict=True))
        once = _packed_values(uniform_terms, known, like, d)
    outputs = []
    for name, nodes in op.outputs:
        if name in op.nonzero_outputs:
            outputs.append(empty((count, d * len(nodes)), like))
    arrays = [*given, once, *outputs]
    entries = sum(y.shape[-1] for y in arrays) // d
    work = 20 * count * d * entries  # about 20 operations for each number read or written
    threads = thread_count(work, count)
    names, sizes = op.expected_sizes(groups, count, d)
    names.insert(len(given), "once")
    sizes.insert(len(given), len(uniform_terms) * d)
    # `held` keeps the tensors alive as long as their addresses are used.
    held = pointers(names, arrays, sizes, [like.dtype] * len(arrays), CPU)
    run(count, d, threads, address_array(len(arrays))(*held.addresses))
    return outputs


@functools.cache
def address_array(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    """The type of an array of addresses: making it takes longer than filling it."""
    return ctypes.c_void_p * count


def _packed_values(
    terms: Sequence[Node], known: dict[Node, Tensor], like: Tensor, d: int
) -> Tensor:
    """The values of terms side by side, [terms d]; known: the values [d] of their inputs."""
    values = evaluate_nodes(terms, known)
    return torch.cat([torch.as_tensor(y, dtype=like.dtype).expand(d) for y in values])
