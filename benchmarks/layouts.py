"""How long a step of a loop takes in each layout of a network on a GPU, measured and estimated.

    PYTHONPATH=src python benchmarks/layouts.py
    PYTHONPATH=src python benchmarks/layouts.py --cells lstm --sizes 40x64x512 --best 5

For tensor cores, with clusters of each size and without: the layouts that `tensor_time` of
geometry.py takes for the fastest, whose constants were fitted to such times. "forward" is the
forward loop, "adjoint" the scaled one. The last line of each is one product per step, operation by
operation: recorded, it is much faster. It needs torch and numpy alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import Tensor

import coadjoint as co
from coadjoint.cells.cell import Cell
from coadjoint.cli.bench.clock import time_calls
from coadjoint.cli.bench.options import parse_sizes
from coadjoint.cli.bench.problems import Size, size_text
from coadjoint.cli.bench.tables import markdown_row
from coadjoint.errors import CoadjointError
from coadjoint.sweeps.engines.cuda import driver, engine
from coadjoint.sweeps.engines.cuda.geometry import Geometry, tensor_geometries, tensor_time
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.rows import Rows

SIZES = "40x64x512,30x64x768,30x64x1024,30x256x512,30x512x256"
THREADS = 8  # kernels are compiled side by side
CALLS = 6
TURNS = 3
COLUMNS = ("cell", "T, B, d", "loop", "us", "estimated", "cluster", "layout")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="lstm,gru", help="without parameters but W, R and b")
    parser.add_argument("--sizes", default=SIZES, help="steps x samples x units")
    parser.add_argument("--best", type=int, default=2, help="layouts of each size of clusters")
    return parser.parse_args()


class Loops:
    """The loops of one cell over random numbers."""

    def __init__(self, cell: Cell, size: Size) -> None:
        T, B, d = size
        self.plan = SweepPlan(cell, Rows([B] * T), engine)
        torch.manual_seed(0)

        def randn(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device="cuda")

        self.W = randn(len(cell.gates) * d, len(cell.read) * d) * 0.8 / d**0.5
        self.base = randn(T * B, len(cell.gates) * d)
        self.x0 = randn(B, len(cell.slots) * d)
        self.source = randn(B, len(cell.slots) * d)
        self.saved = self.forward()

    def forward(self) -> Saved:
        """The forward loop."""
        x, a, q = engine.forward(self.plan, self.base, None, self.W, self.x0, None)
        return Saved(a, None, x, None, q)

    def adjoint(self) -> object:
        """The scaled adjoint loop, from sources of the last states."""
        saved = self.saved
        return engine.adjoint(
            self.plan, saved, self.W, None, self.source, None, None, scaled=True, keep=True
        )


def fastest_layouts(cell: Cell, size: Size, backwards: bool, best: int) -> Iterator[Geometry]:
    """For each size of clusters, the layouts that are estimated to be fastest."""
    _, B, d = size
    processors = driver.processor_count(0)
    limit = driver.shared_memory_limit(0)
    clusters = driver.cluster_counts(0)
    by_cluster: dict[int, dict[tuple[int, ...], Geometry]] = {}

    def estimate(g: Geometry) -> float:
        return tensor_time(cell, d, B, backwards, g)

    for g in tensor_geometries(cell, d, B, processors, limit, backwards, clusters):
        # Layouts that keep more or less of W in registers count as one.
        shape = (g.parts, g.groups, g.rows, g.blocks, g.columns)
        known = by_cluster.setdefault(g.cluster, {})
        if shape not in known or estimate(g) < estimate(known[shape]):
            known[shape] = g
    for known in by_cluster.values():
        yield from sorted(known.values(), key=estimate)[:best]


def time_step(run: Callable[[], object], steps: int) -> float:
    """Microseconds of a step, the least of several turns."""
    run()
    return 1e3 * min(time_calls(run, CALLS, "cuda") for _ in range(TURNS)) / steps


def measure(name: str, size: Size, best: int) -> None:
    """Print the lines of one cell and size."""
    cell = co.cells.named(name)
    T, B, d = size
    with mock.patch.object(engine, "choose_geometry", return_value=None):
        loops = Loops(cell, size)
        by_product = {loop: time_step(getattr(loops, loop), T) for loop in ("forward", "adjoint")}
    for loop, product in by_product.items():
        backwards = loop == "adjoint"
        run = getattr(loops, loop)
        layouts = list(fastest_layouts(cell, size, backwards, best))

        def compile_kernel(g: Geometry, loop: str = loop, scaled: bool = backwards) -> None:
            options = (False, True, False, False, True) if scaled else ()
            driver.load_kernel(loop, cell, g, d, torch.float32, True, 0, *options)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(compile_kernel, layouts))
        for g in layouts:
            with mock.patch.object(engine, "choose_geometry", return_value=g):
                us = time_step(run, T)
            estimated = tensor_time(cell, d, B, backwards, g)
            print_line(name, size, loop, f"{us:.1f}", f"{estimated:.1f}", str(g.cluster), str(g))
        print_line(name, size, loop, f"{product:.1f}", "", "", "one product per step")


def print_line(name: str, size: Size, *texts: str) -> None:
    """Print a line of the table."""
    print(markdown_row([name, size_text(size).replace("x", ", "), *texts]), flush=True)


def main() -> None:
    asked = parse_arguments()
    try:
        sizes = parse_sizes(asked.sizes)
    except CoadjointError as error:
        raise SystemExit(str(error)) from None
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here, and this benchmark is for one.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32\n")
    print(f"clusters (size, how many at once): {driver.cluster_counts(0)}\n")
    print(markdown_row(list(COLUMNS)))
    print("|---" * len(COLUMNS) + "|", flush=True)
    for name in asked.cells.split(","):
        for size in sizes:
            measure(name, size, asked.best)


if __name__ == "__main__":
    main()
