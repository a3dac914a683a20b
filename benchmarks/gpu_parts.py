"""Where the time of a penalised gradient goes on a GPU: its loops, its products, and all the rest.

    PYTHONPATH=src python benchmarks/gpu_parts.py
    PYTHONPATH=src python benchmarks/gpu_parts.py --cells lstm --sizes 200x64x128,1000x16x64

The kernels of replayed gradients are timed by torch's profiler. Those called at every step belong
to a loop: an adjoint with one product per step is made of many. "products" are the other matrix
products, those of weights and inputs. "rest" is the sum of all others, and "idle" what the GPU
does nothing in. cuDNN's plain gradient in float32 stands beside them: a penalised one has twice its
loops and products. It needs torch and numpy alone.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from coadjoint.cli.bench.clock import format_ms, time_calls
from coadjoint.cli.bench.options import parse_sizes
from coadjoint.cli.bench.problems import OURS, Size, size_text
from coadjoint.cli.bench.subjects import SUBJECTS
from coadjoint.cli.bench.tables import markdown_row
from coadjoint.errors import CoadjointError

SIZES = (
    "200x64x128,200x64x256,784x128x128,200x64x512,200x64x1024,100x256x512,150x64x768,1000x16x64,"
    "64x512x256"
)
LOOPS = ("forward", "adjoint", "tangent")
PRODUCT = re.compile("gemm|splitK|cutlass", re.IGNORECASE)
CALLS = 5
TURNS = 5
WARM_UP = 6
COLUMNS = ("cell", "T, B, d", "ms", "forward", "tangent", "adjoints", "products", "rest", "idle")
Kernels = dict[str, tuple[float, float]]  # by name: milliseconds and calls of a gradient


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="elman,lstm,gru")
    parser.add_argument("--sizes", default=SIZES)
    return parser.parse_args()


def profile_kernels(run: Callable[[], object]) -> Kernels:
    """The kernels of one call of `run`, by name."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    found: Kernels = {}
    for event in recorded.key_averages():
        if event.device_type == DeviceType.CUDA:
            found[event.key] = (1e-3 * event.self_device_time_total / CALLS, event.count / CALLS)
    return found


def sort_kernels(kernels: Kernels, steps: int) -> dict[str, float]:
    """Milliseconds of each part; kernels called at every step are those of the adjoints."""
    parts = dict.fromkeys((*LOOPS, "products", "rest"), 0.0)
    for name, (ms, calls) in kernels.items():
        if name in LOOPS:
            part = name
        elif calls >= steps:
            part = "adjoint"
        else:
            part = "products" if PRODUCT.search(name) else "rest"
        parts[part] += ms
    return parts


def time_median(run: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    for _ in range(WARM_UP):
        run()
    return statistics.median(time_calls(run, CALLS, "cuda") for _ in range(TURNS))


def measure(cell: str, size: Size) -> list[str]:
    """A line of the table."""
    problem = SUBJECTS[cell](cell, size, "cuda")
    ours = problem.contenders(OURS)[OURS]["penalised"]
    peers = problem.contenders("torch")
    (plain,) = [runs["plain"] for name, runs in peers.items() if "float32" in name]
    total = time_median(ours)
    cudnn = time_median(plain)
    parts = sort_kernels(profile_kernels(ours), size[0])
    idle = max(0.0, total - sum(parts.values()))
    loops = (parts["forward"], parts["tangent"], parts["adjoint"])
    figures = (total, *loops, parts["products"], parts["rest"], idle, cudnn)
    return [cell, size_text(size).replace("x", ", "), *map(format_ms, figures)]


def main() -> None:
    asked = parse_arguments()
    try:
        sizes = parse_sizes(asked.sizes)
    except CoadjointError as error:
        raise SystemExit(str(error)) from None
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here, and this benchmark is for one.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32, milliseconds\n")
    print(markdown_row([*COLUMNS, "cuDNN plain"]))
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)
    for cell in asked.cells.split(","):
        for size in sizes:
            print(markdown_row(measure(cell, size)), flush=True)


if __name__ == "__main__":
    main()
