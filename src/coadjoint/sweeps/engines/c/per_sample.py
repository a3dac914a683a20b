"""What a gradient computes once for each sample or row, in C: a call of torch takes as long.

Each function returns None where C cannot do it: on a GPU, for other types of numbers, without a
compiler, and where something is to be differentiated. The caller then has a formula of its own.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...functions import is_transformed
from ...memory import empty
from ...pointers import PLAIN, is_traced, pointers
from . import compiler
from .source import per_sample_source

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float64)


@functools.cache
def compiled(dtype: torch.dtype) -> ctypes.CDLL:
    """Compile the functions of per_sample.h, or load those that were compiled before."""
    lib = compiler.library(per_sample_source(dtype))
    arrays = {
        "cross_entropy": 5,
        "cross_entropy_bend": 3,
        "log_ratios": 4,
        "row_norms": 2,
        "norm_gradient": 4,
        "scale_rows": 3,
    }
    numbers = {"log_ratios": 3}
    for name, count in arrays.items():
        function = getattr(lib, name)
        function.argtypes = [ctypes.c_int64] * numbers.get(name, 2) + [ctypes.c_void_p] * count
        function.restype = None
    return lib


def can_run(*tensors: Tensor) -> bool:
    """Whether these tensors can be read here, and nothing asks for their derivatives."""
    like = tensors[0]
    if not like.is_cpu or like.dtype not in TYPES or torch.is_grad_enabled():
        return False
    if any(type(y) not in PLAIN for y in tensors) or is_transformed() or is_traced():
        return False
    return compiler.compiler_setup().refusal is None


class SoftmaxPoint(NamedTuple):
    """The cross-entropy of softmax(a), and its slope by a."""

    value: Tensor  # [n]
    slope: Tensor  # [n, c]
    p: Tensor  # [n, c], softmax(a)

    def bend(self, change: Tensor) -> Tensor:
        """The change p (v - <p, v>) of the slope along a change v of a, [n, c]."""
        p = self.p
        n, c = p.shape
        out = torch.empty_like(p)
        held = pointers(("p", "change", "bend"), (p, change, out), [n * c] * 3, [p.dtype] * 3, CPU)
        compiled(p.dtype).cross_entropy_bend(n, c, *held.addresses)
        return out


def cross_entropy(a: Tensor, y: Tensor) -> SoftmaxPoint | None:
    """-log softmax(a)_y of a [n, c] and class numbers y [n], which must lie in 0..c - 1."""
    if not can_run(a, y):
        return None
    n, c = a.shape
    value = a.new_empty(n)
    slope = torch.empty_like(a, memory_format=torch.contiguous_format)
    p = torch.empty_like(slope)
    names = ("a", "y", "value", "slope", "p")
    sizes = (n * c, n, n, n * c, n * c)
    dtypes = (a.dtype, torch.int64, a.dtype, a.dtype, a.dtype)
    held = pointers(names, (a, y.long(), value, slope, p), sizes, dtypes, CPU)
    compiled(a.dtype).cross_entropy(n, c, *held.addresses)
    return SoftmaxPoint(value, slope, p)


def row_norms(y: Tensor) -> Tensor | None:
    """||y|| over the last axis of y [..., n], also where squares leave the range: [...]."""
    if not y.dim() or not y.numel() or not can_run(y):
        return None
    out = y.new_empty(y.shape[:-1])
    held = pointers(("y", "norms"), (y, out), (y.numel(), out.numel()), [y.dtype] * 2, CPU)
    compiled(y.dtype).row_norms(out.numel(), y.shape[-1], *held.addresses)
    return out


def norm_gradient(y: Tensor, size: Tensor, g: Tensor) -> Tensor | None:
    """The gradient g y / size by y [..., n], from g [...] by its norm `size` [...].

    It is 0 where the norm is below the normal range of numbers.
    """
    if not y.dim() or not y.numel() or not can_run(y, size, g):
        return None
    out = empty(y.shape, y)
    count = size.numel()
    names = ("y", "size", "g", "out")
    sizes = (y.numel(), count, count, y.numel())
    held = pointers(names, (y, size, g, out), sizes, [y.dtype] * 4, CPU)
    compiled(y.dtype).norm_gradient(count, y.shape[-1], *held.addresses)
    return out


def scale_rows(y: Tensor, k: Tensor) -> Tensor | None:
    """The rows y_i 2^(k_i) of y [rows, n] and exponents k [rows]."""
    if y.dim() != 2 or not y.numel() or not can_run(y, k):
        return None
    out = y.new_empty(y.shape)
    rows, n = y.shape
    names = ("y", "exponent", "out")
    dtypes = (y.dtype, torch.int32, y.dtype)
    held = pointers(names, (y, k.int(), out), (rows * n, rows, rows * n), dtypes, CPU)
    compiled(y.dtype).scale_rows(rows, n, *held.addresses)
    return out


def log_ratios(size: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
    """The mean of r_i^2 [B], and its slope by size_i [T + 1, B].

    r_i = log size_i - log size_{i+1} + (k_i - k_{i+1}) log 2, i = first..T-1. size, k: [T + 1, B],
    of which no size may be zero.
    """
    if not can_run(size, k):
        return None
    T = len(size) - 1
    B = size.shape[1]
    value = size.new_empty(B)
    slope = size.new_empty(size.shape)
    names = ("size", "exponent", "value", "slope")
    sizes = ((T + 1) * B, (T + 1) * B, B, (T + 1) * B)
    dtypes = (size.dtype, torch.int32, size.dtype, size.dtype)
    held = pointers(names, (size, k.int(), value, slope), sizes, dtypes, CPU)
    compiled(size.dtype).log_ratios(T, B, first, *held.addresses)
    return value, slope
