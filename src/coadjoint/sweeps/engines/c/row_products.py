"""Products over rows in C: y_i M' + b, and sums of y_i r_i', the gradients by weights.

A BLAS is made for large squares. Here one side is long and the others short, which takes a BLAS up
to twice the time. Entries depend neither on the number of threads nor on the rows or columns that
are computed beside them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...functions import is_transformed
from ...memory import empty
from ...pointers import PLAIN, is_traced, pointers, row_pointers
from ...rows import Bounds
from . import compiler
from .source import row_products_source
from .threads import thread_count

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float64)
MOST_SOURCES = 4  # as in row_products.h
NAMES = ("y", *["r"] * MOST_SOURCES)
PRODUCTS = ctypes.c_int64 * (8 + 4 * MOST_SOURCES)  # struct products
AFFINE = ctypes.c_int64 * 10  # struct affine
Call = Callable[[ctypes.Array[ctypes.c_int64]], int]  # returns 1 if there is no memory


class Compiled(NamedTuple):
    """The compiled functions."""

    add_products: Call
    join_products: Call
    affine_rows: Call


@functools.cache
def compiled(dtype: torch.dtype) -> Compiled:
    """Compile the functions, or load what was compiled before."""
    library = compiler.library(row_products_source(dtype))
    return Compiled(library.add_products, library.join_products, library.affine_rows)


def can_run(y: Tensor, others: Sequence[Tensor | None]) -> bool:
    """Whether these arrays can be read here, and nothing asks for derivatives of the results."""
    dtype = y.dtype
    if torch.is_grad_enabled() or dtype not in TYPES or len(others) > MOST_SOURCES:
        return False
    for r in (y, *others):
        if r is not None and (type(r) not in PLAIN or r.dtype is not dtype or not r.is_cpu):
            return False
    return not is_transformed() and not is_traced() and compiler.compiler_setup().refusal is None


def run(call: Call, fields: ctypes.Array[ctypes.c_int64]) -> None:
    """Call a compiled function."""
    if call(fields):
        raise MemoryError("not enough memory for products over rows.")


def sum_fields(
    bounds: Bounds, y: Tensor, arrays: Sequence[Tensor | None], width: int, sums: int
) -> tuple[list[int], list[Tensor]]:
    """The fields of struct products up to its sources, and the tensors that must live meanwhile."""
    given = [r for r in arrays if r is not None]
    held = row_pointers(NAMES[: 1 + len(given)], (y, *given), y.dtype, CPU)
    m = y.shape[1]
    threads = thread_count(2 * len(y) * width * m)
    fields = [m, width, threads, len(bounds) // 2, ctypes.addressof(bounds)]
    fields += [held.addresses[0], held.steps[0], sums]
    found = iter(zip(held.addresses[1:], held.steps[1:], strict=True))
    for r in arrays:
        fields += (0, 0, 1) if r is None else (*next(found), r.shape[1])
    return fields, held.owners


def add_products(bounds: Bounds, y: Tensor, r: Tensor | None, sums: Tensor) -> None:
    """Add the sums over rows of r_i y_i' to `sums`; r None: a column of ones.

    bounds  the first row of each part of the rows and the row after its last, one part after the
            other, in the order in which they are added
    y       [N, m]
    r       [N, n]
    sums    [n, m] in float64, contiguous
    """
    width, m = sums.shape
    into = pointers(("sums",), (sums,), (width * m,), (torch.float64,), CPU)
    # `owners` keeps the tensors alive as long as their addresses are used.
    fields, owners = sum_fields(bounds, y, (r,), width, into.addresses[0])
    run(compiled(y.dtype).add_products, PRODUCTS(*fields))
    del owners


def join_products(bounds: Bounds, y: Tensor, arrays: Sequence[Tensor | None]) -> list[Tensor]:
    """The sums over rows of y_i r_i', [m, n], for each r of `arrays`; of y_i, [m], for None.

    y is read once for all of them. At most MOST_SOURCES arrays; otherwise as in add_products.
    """
    m = y.shape[1]
    shapes = [(m,) if r is None else (m, r.shape[1]) for r in arrays]
    widths = [shape[-1] if len(shape) > 1 else 1 for shape in shapes]
    outs = [y.new_empty(shape) for shape in shapes]
    sizes = [m * width for width in widths]
    into = pointers(NAMES[1 : 1 + len(outs)], outs, sizes, [y.dtype] * len(outs), CPU)
    fields, owners = sum_fields(bounds, y, arrays, sum(widths), 0)
    fields += [0] * (8 + 3 * MOST_SOURCES - len(fields)) + into.addresses
    run(compiled(y.dtype).join_products, PRODUCTS(*fields))
    del owners
    return outs


def affine_rows(y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
    """y_i M' + b for each row y_i of y [N, n], with M [m, n]: [N, m]."""
    N, n = y.shape
    m = len(M)
    out = empty((N, m), y)
    held = row_pointers(("y",), (y,), y.dtype, CPU)
    transposed = not M.t().is_contiguous()  # M lies in memory as [m, n], and not as [n, m]
    matrix = M if transposed else M.t()
    names = ("M", "b", "out")
    sizes = (m * n, m, N * m)
    others = pointers(names, (matrix, b, out), sizes, [y.dtype] * 3, CPU)
    threads = thread_count(2 * N * n * m, N)
    fields = AFFINE(N, n, m, threads, transposed, held.steps[0], *held.addresses, *others.addresses)
    run(compiled(y.dtype).affine_rows, fields)
    return out
