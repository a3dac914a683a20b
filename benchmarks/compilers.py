"""Gradients of engine cpu by every C compiler here and by other flags, beside engine eager.

    python benchmarks/compilers.py                   every compiler of this machine
    python benchmarks/compilers.py gcc-12 clang-16   some of them
    python benchmarks/compilers.py --cells lstm --sizes 200x64x128

Each compiler is used with the package's own flags and with those of VARIANTS, which come last and
so prevail; AVX2 is code for Haswell, run by the same processor. Every variant is a process of its
own with one pinned thread and a cache of its own; the processes take turns in several rounds, and
the least time counts. "of best" divides the time of the package's flags by the least of the same
compiler's variants for the same instructions; "of eager" by that of engine eager, for which torch
and its BLAS are told to use AVX2, too. A second table has the largest ratios of each compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from coadjoint.cli.bench.clock import fastest_fifth, format_ms, time_in_turns
from coadjoint.cli.bench.options import BenchOptions, parse_sizes, pinned_threads
from coadjoint.cli.bench.problems import METHODS, NetworkProblem, ours, size_text
from coadjoint.cli.bench.tables import markdown_row

NAMES = (*(f"gcc-{n}" for n in range(11, 17)), *(f"clang-{n}" for n in range(14, 24)))
AVX2 = ("-march=haswell",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "own flags": (),
    "-O2": ("-O2",),
    "512-bit vectors": ("-mprefer-vector-width=512",),
    "-O2, 512-bit vectors": ("-O2", "-mprefer-vector-width=512"),
    "AVX2, own flags": AVX2,
    "AVX2, -O2": (*AVX2, "-O2"),
}
EAGER = "eager"
EAGER_AVX2 = "eager, AVX2"
TORCH_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
RATIOS = ("of best", "of best, AVX2", "of eager", "of eager, AVX2")
TURNS = 15  # of 10 ms, at most
ALL_TURNS_MS = 500.0  # of all turns of one gradient
WARM_UP = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("compilers", nargs="*", help="by default all that are found")
    parser.add_argument("--cells", default="elman,lstm")
    parser.add_argument("--sizes", default="100x20x50,200x64x128")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", choices=("cpu", EAGER), help=argparse.SUPPRESS)
    return parser.parse_args()


def time_gradients(asked: argparse.Namespace) -> dict[str, float]:
    """{"cell size kind": milliseconds} of this process, with its compiler."""
    found = {}
    for cell in asked.cells.split(","):
        for size in parse_sizes(asked.sizes):
            problem = NetworkProblem(cell, size, "cpu")
            problem.net.engine = asked.worker
            ((_, runs),) = ours(problem).items()
            for run in runs.values():
                for _ in range(WARM_UP):
                    run()
            times = time_in_turns(runs, TURNS, "cpu", turn_ms=10.0, all_turns_ms=ALL_TURNS_MS)
            for kind in METHODS:
                found[f"{cell} {size_text(size)} {kind}"] = fastest_fifth(times[kind])
    return found


def write_compiler(place: Path, name: str, flags: tuple[str, ...]) -> Path:
    """A command that calls the compiler with flags of our own after those that it is given."""
    script = place / f"{name}-{len(list(place.iterdir()))}"
    script.write_text(f'#!/bin/sh\nexec {name} "$@" {" ".join(flags)}\n')
    script.chmod(0o700)
    return script


def run_worker(
    asked: argparse.Namespace, engine: str, compiler: Path, more: dict[str, str]
) -> dict[str, float]:
    """The times of a process with this compiler, a cache beside it, and more in its environment."""
    cache = compiler.with_suffix(".cache")
    cache.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, __file__, "--worker", engine]
    command += ["--cells", asked.cells, "--sizes", asked.sizes]
    environment = {**os.environ, **more, "CC": str(compiler), "COADJOINT_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def version_of(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def measure(asked: argparse.Namespace, compilers: list[str]) -> dict[tuple[str, str], dict]:
    """{(compiler, variant): {row: least milliseconds}}; that of engine eager is ""."""
    least: dict[tuple[str, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        any_compiler = write_compiler(place, compilers[0], ())
        contenders = [("", EAGER, EAGER, any_compiler, {})]
        contenders.append(("", EAGER_AVX2, EAGER, any_compiler, TORCH_AVX2))
        for compiler in compilers:
            for variant, flags in VARIANTS.items():
                script = write_compiler(place, compiler, flags)
                contenders.append((compiler, variant, "cpu", script, {}))
        for i in range(asked.rounds):
            for compiler, variant, engine, script, more in contenders:
                found = run_worker(asked, engine, script, more)
                times = least.setdefault((compiler, variant), found)
                for row, ms in found.items():
                    times[row] = min(times[row], ms)
            print(f"round {i + 1} of {asked.rounds}", file=sys.stderr, flush=True)
    return least


def print_tables(least: dict[tuple[str, str], dict], compilers: list[str]) -> None:
    """The times of every variant, and then the largest ratios of each compiler."""
    eager = least["", EAGER]
    eager_avx2 = least["", EAGER_AVX2]
    print_line(["compiler", "gradient", EAGER, *VARIANTS, EAGER_AVX2, *RATIOS], is_head=True)
    ratios: dict[str, list[tuple[float, ...]]] = {compiler: [] for compiler in compilers}
    for compiler in compilers:
        for row, ms in eager.items():
            times = {variant: least[compiler, variant][row] for variant in VARIANTS}
            wide = [ms for variant, ms in times.items() if not variant.startswith("AVX2")]
            narrow = [ms for variant, ms in times.items() if variant.startswith("AVX2")]
            found = (
                wide[0] / min(wide),
                narrow[0] / min(narrow),
                wide[0] / ms,
                narrow[0] / eager_avx2[row],
            )
            ratios[compiler].append(found)
            texts = [format_ms(time) for time in (ms, *times.values(), eager_avx2[row])]
            print_line([compiler, row, *texts, *map(ratio_text, found)])
    print()
    print_line(["largest ratio of", *RATIOS], is_head=True)
    for compiler in compilers:
        largest = map(max, zip(*ratios[compiler], strict=True))
        print_line([compiler, *map(ratio_text, largest)])


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}x"


def print_line(cells: list[str], is_head: bool = False) -> None:
    print(markdown_row(cells), flush=True)
    if is_head:
        print("|---" * len(cells) + "|")


def main() -> None:
    asked = parse_arguments()
    if asked.worker:
        with pinned_threads(BenchOptions(cells=tuple(asked.cells.split(",")))):
            print(json.dumps(time_gradients(asked)))
        return
    compilers = asked.compilers or [name for name in NAMES if shutil.which(name)]
    for compiler in compilers:
        print(f"{compiler}: {version_of(compiler)}")
    print(flush=True)
    print_tables(measure(asked, compilers), compilers)


if __name__ == "__main__":
    main()
