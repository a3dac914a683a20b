"""The benchmark's sections for a GPU or a CPU, one after the other, within a given time.

    PYTHONPATH=src python benchmarks/sections.py --seconds 300 --out figures
    PYTHONPATH=src python benchmarks/sections.py --sections "own loop" --write benchmarks/RESULTS.md
    PYTHONPATH=src python benchmarks/sections.py --device cpu --prefix Intel --write RESULTS.md

Each section is what the `coadjoint bench` that it names would write, but needs torch and numpy
alone. A GPU's kernels are compiled first, by several processes at once: that is not timed. Nothing
else may run meanwhile, on the CPU either, since a GPU waits for the processor that launches its
work. A section that is not finished when the time is over is not written.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from coadjoint.cli.bench.options import BenchOptions, parse_sizes
from coadjoint.cli.bench.problems import FORMULAS, MODULES, OURS, Size, size_text
from coadjoint.cli.bench.subjects import SUBJECTS
from coadjoint.cli.bench.tables import run_bench, write_section
from coadjoint.cli.bench.user_loops import own_loop
from coadjoint.errors import CoadjointError

NETWORKS = tuple(MODULES)
LAYERS = tuple(FORMULAS)
GATED = ("lstm", "gru")
WIDE = parse_sizes("100x256x512,150x64x768,1000x16x64,64x512x256")
SMALL = parse_sizes("100x20x50,200x64x128")
# in the order of their importance, since the time may end
SECTIONS: dict[str, dict[str, dict[str, object]]] = {
    "cuda": {
        "networks": {"rows": ("gradient",), "cells": NETWORKS, "peers": ("torch",), "repeat": 5},
        "own loop": {"rows": ("own-loop",), "cells": NETWORKS, "peers": (), "repeat": 5},
        "gradient penalty": {
            "rows": ("gradient-penalty",),
            "cells": LAYERS,
            "peers": (),
            "repeat": 3,
        },
        "other sizes": {
            "rows": ("gradient", "own-loop"),
            "cells": GATED,
            "peers": ("torch",),
            "sizes": WIDE,
            "repeat": 5,
        },
        "one step": {"rows": ("one-step",), "cells": LAYERS, "peers": ("torch",), "repeat": 3},
        "training step": {
            "rows": ("training-step",),
            "cells": NETWORKS,
            "peers": (),
            "repeat": 1,
        },
        "modules": {"rows": ("gradient",), "cells": LAYERS, "peers": ("torch",), "repeat": 3},
        "second derivatives": {
            "rows": ("gradient",),
            "cells": LAYERS,
            "peers": ("autograd",),
            "repeat": 1,
        },
        "loops by hand": {
            "rows": ("gradient",),
            "cells": NETWORKS,
            "peers": ("autograd",),
            "repeat": 3,
        },
    },
    "cpu": {
        "networks": {
            "rows": ("gradient",),
            "cells": NETWORKS,
            "peers": ("torch", "jax"),
            "sizes": SMALL,
            "repeat": 5,
        },
        "rows with a limit": {
            "rows": ("own-loop", "gradient-penalty", "one-step", "training-step"),
            "cells": (*NETWORKS, *LAYERS),
            "peers": ("torch",),
            "repeat": 5,
        },
        "modules": {
            "rows": ("gradient",),
            "cells": LAYERS,
            "peers": ("torch",),
            "sizes": SMALL,
            "repeat": 3,
        },
    },
}
SHORT = 12  # steps: kernels depend on samples and units, not on steps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything")
    parser.add_argument("--sections", help="some of those of the device; all by default")
    parser.add_argument("--sizes", help="instead of the sections' own: 200x64x128,200x64x512")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace sections of a page")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the figures as JSON")
    parser.add_argument("--device", default="cuda", choices=tuple(SECTIONS))
    parser.add_argument("--prefix", default="", help="of the sections' names: AMD or Intel, say")
    parser.add_argument("--compile", metavar="CELL", help=argparse.SUPPRESS)
    return parser.parse_args()


def options_of(asked: argparse.Namespace) -> dict[str, BenchOptions]:
    """The sections that were asked for, and what each measures."""
    known = SECTIONS[asked.device]
    names = list(known) if asked.sections is None else asked.sections.split(",")
    found = {}
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no section '{name}'; choose from {', '.join(known)}.")
        title = f"{asked.prefix}, {name}" if asked.prefix else name
        options = BenchOptions(device=asked.device, section=title, **known[name])
        if asked.sizes:
            options = replace(options, sizes=parse_sizes(asked.sizes))
        found[name] = options
    return found


def shapes_of(sections: dict[str, BenchOptions]) -> dict[str, list[Size]]:
    """{cell: its sizes}, each with few steps and once."""
    found: dict[str, dict[Size, None]] = {}
    for options in sections.values():
        for cell in options.cells:
            for _, B, d in options.sizes:
                found.setdefault(cell, {})[SHORT, B, d] = None
    return {cell: list(sizes) for cell, sizes in found.items()}


def compile_kernels(cell: str, size: Size, device: str) -> None:
    """Call what will be timed once, with few steps: its kernels are then in the cache."""
    runs = list(SUBJECTS[cell](cell, size, device).contenders(OURS)[OURS].values())
    if cell in MODULES:
        for contest in own_loop(cell, size, device, ()):
            runs += contest.runs.values()
    for run in runs:
        run()


def compile_at_once(asked: argparse.Namespace, sections: dict[str, BenchOptions]) -> None:
    """Compile the kernels of every cell and size, each cell by a process of its own."""
    workers = []
    for cell, sizes in shapes_of(sections).items():
        texts = ",".join(map(size_text, sizes))
        command = [sys.executable, __file__, "--compile", cell, "--sizes", texts]
        workers.append(subprocess.Popen([*command, "--device", asked.device]))
    for worker in workers:
        worker.wait()


def end_of_time(*_: object) -> None:
    raise KeyboardInterrupt


def measure(asked: argparse.Namespace, options: BenchOptions, seconds: float) -> bool:
    """Measure a section and write it down; False: the time was over before it was complete."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        result = run_bench(options, print_progress)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if asked.out is not None:
        name = options.section.replace(",", "").replace(" ", "-")
        (asked.out / f"{name}.json").write_text(result.json())
    if result.interrupted:
        return False
    if asked.write is not None:
        write_section(asked.write, result)
    else:
        print(f"\n{result.markdown()}\n", flush=True)
    return True


def print_progress(done: float, total: int, text: str | None) -> None:
    if text:
        print(f"{int(done)} of {total}: {text}", flush=True)


def main() -> None:
    asked = parse_arguments()
    if asked.compile:
        for size in parse_sizes(asked.sizes):
            compile_kernels(asked.compile, size, asked.device)
        return
    begin = time.perf_counter()
    try:
        sections = options_of(asked)
    except CoadjointError as error:
        raise SystemExit(str(error)) from None
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, end_of_time)
    if asked.device == "cuda":
        compile_at_once(asked, sections)
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{where}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
    for name, options in sections.items():
        left = asked.seconds - (time.perf_counter() - begin)
        if left <= 0 or not measure(asked, options, left):
            print(f"the time was over before '{name}' was complete: give more --seconds.")
            raise SystemExit(1)
    print(f"everything measured in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
