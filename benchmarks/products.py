"""Products over rows, compiled and by torch's BLAS: time, rate and error.

    python benchmarks/products.py               one thread, float32
    python benchmarks/products.py --threads 2 --dtype float64

sum     the sum over N rows of y_i r_i', a gradient by weights: y [N, n], r [N, m]
affine  M y_i + b for N rows, what inputs add to each step: y [N, n], M [m, n]

Contenders take turns; the time is the tenth least of a hundred. The error is the largest one of an
entry, divided by the sum of the sizes of its terms. It is found in float64 for float32, and in
extended precision for float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from coadjoint.sweeps.engines.c import row_products
from coadjoint.sweeps.rows import row_bounds

SHAPES = (
    ("sum", 2000, 50, 50),
    ("sum", 2000, 200, 50),
    ("sum", 12800, 128, 128),
    ("sum", 12800, 512, 128),
    ("sum", 12800, 512, 6),
    ("sum", 12800, 2048, 512),
    ("affine", 2000, 6, 50),
    ("affine", 12800, 6, 512),
    ("affine", 12800, 128, 512),
    ("affine", 12800, 512, 2048),
)
TURNS = 100
SECONDS = 4.0  # at most for one shape


def contenders(
    kind: str, y: Tensor, other: Tensor, b: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Ours, and torch's."""
    if kind == "affine":
        return lambda: row_products.affine_rows(y, other, b), lambda: torch.addmm(b, y, other.t())
    bounds = row_bounds([range(len(y))])
    narrow_first = other.shape[1] < y.shape[1]  # a BLAS is faster so, up to ten times
    return (
        lambda: row_products.join_products(bounds, y, (other,))[0],
        lambda: torch.mm(other.t(), y).t() if narrow_first else torch.mm(y.t(), other),
    )


def best_times(run: tuple[Callable[[], Tensor], Callable[[], Tensor]]) -> list[float]:
    """Seconds of each contender, who take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    while len(times[0]) < TURNS and (time.perf_counter() < end or len(times[0]) < 5):
        for function, found in zip(run, times, strict=True):
            begin = time.perf_counter()
            function()
            found.append(time.perf_counter() - begin)
    return [sorted(found)[len(found) // 10] for found in times]


def error(kind: str, found: Tensor, y: Tensor, other: Tensor, b: Tensor) -> float:
    """The largest error of an entry, divided by the sizes of its terms."""
    few = slice(0, 16)  # columns: extended precision is slow
    wide = np.longdouble if found.dtype == torch.float64 else np.float64
    left, right, bias = (part.numpy().astype(wide) for part in (y, other[few], b[few]))
    if kind == "affine":
        exact = left @ right.T + bias
        size = np.abs(left) @ np.abs(right.T) + np.abs(bias)
    else:
        right = other[:, few].numpy().astype(wide)
        exact = left.T @ right
        size = np.abs(left.T) @ np.abs(right)
    return float((np.abs(found[:, few].numpy() - exact) / size).max())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.dtype}")
    print("| product | N, n, m | ms ours | ms torch | torch / ours | GFLOP/s | error, torch's |")
    print("|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for kind, N, n, m in SHAPES:
            y = torch.randn(N, n, dtype=dtype)
            other = torch.randn(*((m, n) if kind == "affine" else (N, m)), dtype=dtype)
            b = torch.randn(m, dtype=dtype)
            run = contenders(kind, y, other, b)
            errors = [error(kind, function(), y, other, b) for function in run]
            ours, torchs = best_times(run)
            rate = 2 * N * n * m / ours / 1e9
            print(
                f"| {kind} | {N}, {n}, {m} | {ours * 1e3:.3g} | {torchs * 1e3:.3g} "
                f"| {torchs / ours:.2f}x | {rate:.0f} | {errors[0]:.0e}, {errors[1]:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
