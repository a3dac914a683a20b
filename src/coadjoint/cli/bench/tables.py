"""Tables: results of a benchmark as text, JSON and Markdown, with the machine they were measured on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import __version__
from ...cells import library
from ...errors import InputError, MissingError, StorageError, choose, error_text
from ...sweeps import engines
from ...training import files
from .clock import format_ms, tf32
from .measure import (
    DEVICE_NOTES,
    HESSIAN_FREE,
    QUIET_SHARE,
    BenchOptions,
    BenchRow,
    HessianFreeStep,
    Tick,
    measure_limits,
    measure_row,
    measure_step,
    pinned_threads,
)
from .problems import FORMULAS, OURS, RHO, SIZES, SUBJECTS, Size, load_jax


@dataclass(frozen=True)
class BenchResult:
    """All that was measured, and where."""

    options: BenchOptions
    machine: dict[str, Any]
    limits: dict[str, float]
    rows: tuple[BenchRow, ...]
    steps: tuple[HessianFreeStep, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)  # peers that are not here, and why
    interrupted: bool = False
    core_share: float = 1.0  # the share of the time that the one core worked for this process; 1 where there are more

    def json(self) -> str:
        data = {
            "command": self.options.command, "coadjoint": __version__, "device": self.options.device,
            "penalty": f"{RHO:g} log-ratio", "repeat": self.options.repeat,
            "machine": self.machine, "limits": self.limits, "missing": self.missing,
            "interrupted": self.interrupted, "share of its core": self.core_share, "rows": [row.to_dict() for row in self.rows],
            HESSIAN_FREE: [step.to_dict() for step in self.steps],
        }  # fmt: skip
        return json.dumps(data, indent=1) + "\n"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Ratios first, milliseconds beside, then the shares of the machine's limits."""
        peers = list(dict.fromkeys(peer for row in self.rows for peer in row.peers))
        Column = Callable[[BenchRow, str], str]
        versus: Callable[[str], Column] = lambda peer: lambda row, kind: ratio_text(row, kind, peer)
        times: Callable[[str], Column] = lambda name: (
            lambda row, kind: format_ms(row.ms[kind].get(name))
        )
        columns: dict[str, Column] = {
            "cell": lambda row, kind: row.cell,
            "T, B, d": lambda row, kind: ", ".join(map(str, row.size)),
            "gradient": lambda row, kind: kind,
            **{f"vs {peer}": versus(peer) for peer in peers},
            "costs": lambda row, kind: f"{row.cost:.2f} plain" if kind == row.second_kind else "",
            **{f"ms {name}": times(name) for name in (OURS, *peers)},
            "of GEMM": lambda row, kind: (
                f"{row.gemm_share(kind):.0%}" if "tf32" not in kind else ""
            ),
        }
        if self.options.device == "cuda":
            columns["of memory"] = lambda row, kind: f"{row.memory_share(kind):.0%}"
            columns["us/step"] = lambda row, kind: f"{row.us_per_step(kind):.1f}"
        columns["differs"] = lambda row, kind: (
            f"{max(found):.0e}" if (found := row.differs[kind].values()) else ""
        )
        columns["engine"] = lambda row, kind: row.engine
        return list(columns), [
            [cell(row, kind) for cell in columns.values()] for row in self.rows for kind in row.ms
        ]

    def notes(self) -> list[str]:
        """What the columns say, and what was left out."""
        gpu = self.options.device == "cuda"
        notes = [
            "vs: the peer's time by ours, above 1x ours is faster; * against the peer's plain gradient, for it has no other. "
            "costs: our penalised or double gradient in plain ones (arithmetic says 2).",
            "of GEMM: the products a gradient must do (plain: 2 sweeps and 1 weight product; penalised and double: 4 and 2; as many with the input weights of a second layer), at the rate of "
            + ("a large float32 torch.mm" if gpu else "torch.mm on [B, d] x [d, g d]")
            + f", by our time. {DEVICE_NOTES[self.options.device]}",
            "differs: the largest relative difference between our gradient and a peer's.",
        ]
        if gpu and any(row.cell in FORMULAS for row in self.rows):
            notes.append(
                "plain tf32: the products of both rounded to tf32, ours by torch.set_float32_matmul_precision('high')."
            )
        if gpu and "jax" in self.options.peers and "jax" not in self.missing:
            notes.append("JAX multiplies at its default precision: tf32, where a GPU has it.")
        if "jax" in self.options.peers and "jax" not in self.missing:
            notes.append(
                "JAX scan: the faster of two, the inputs multiplied inside the scan or before it."
            )
        if self.core_share < QUIET_SHARE:
            notes.append(
                f"The machine was busy: this process had {self.core_share:.0%} of its core, so times are too long and ratios uncertain. Measure again when it is quiet."
            )
        notes = (notes if self.rows else []) + [str(step) for step in self.steps]
        notes += [f"peer '{peer}' left out: {why}" for peer, why in self.missing.items()]
        return notes + [line for row in self.rows for line in row.describe_failures()]

    def machine_line(self) -> str:
        """The machine in one line."""
        m, s = self.machine, "s" if self.options.threads > 1 else ""
        parts = {
            "cpu": f"{m['cpu']}, {m['cores']} cores, {m['threads']} pinned thread{s}",
            "cuda": f"{m.get('gpu')}, CUDA {m.get('cuda')}",
        }
        tools = [f"{name} {m[name]}" for name in ("torch", "cuDNN", "jax", "compiler") if name in m]
        rates = [
            f"{name} {value:,.{0 if value >= 100 else 1}f}" for name, value in self.limits.items()
        ]
        return f"{', '.join([parts[self.options.device], *tools])}, float32. Measured here: {', '.join(rates)}"

    def markdown(self) -> str:
        """The section of this device in RESULTS.md."""
        heads, lines = self.table()
        row = lambda words: f"| {' | '.join(words)} |"
        return "\n".join(
            [
                f"## {'GPU' if self.options.device == 'cuda' else 'CPU'}", "", f"Written by `{self.options.command}`.", "",
                f"{self.machine_line()}.", "", *([row(heads), "|---" * len(heads) + "|", *map(row, lines), ""] if lines else []),
                *(f"- {note}" for note in self.notes()),
            ]
        )  # fmt: skip


def ratio_text(row: BenchRow, kind: str, peer: str) -> str:
    """The ratio to the peer's gradient of that kind; with a star, to its plain one, where it has no other."""
    ratio, star = row.ratio(kind, peer), ""
    if ratio is None and kind == row.second_kind:
        ratio, star = row.ratio_to_plain(peer), "*"
    return "" if ratio is None else f"{ratio:.2f}x{star}"


def run_bench(options: BenchOptions, tick: Tick = lambda done, total, text: None) -> BenchResult:
    """Measure all cells at all sizes. Ctrl-C ends it with what was measured so far."""
    rows: list[BenchRow] = []
    missing: dict[str, str] = {}
    found: dict[str, float] = {}
    told: dict[str, Any] = {}
    interrupted = False
    grid = [
        (cell, size) for cell in options.cells if cell != HESSIAN_FREE for size in options.sizes
    ]
    total, steps = len(grid) + len(options.steps), []
    began, worked = time.perf_counter(), time.process_time()
    with pinned_threads(options), tf32(False):
        try:
            present, missing = drop_missing_peers(options)
            told = describe_machine(options.device)
            for peer, why in missing.items():
                tick(0, total, f"peer '{peer}' left out: {why}")
            found = measure_limits(options.device)
            for cell, size in grid:
                row = measure_row(
                    cell, size, present, found, lambda share: tick(len(rows) + share, total, None)
                )
                rows.append(row)
                tick(len(rows), total, "; ".join([summarise_row(row), *row.describe_failures()]))
            for size in options.steps:
                steps.append(measure_step(size, options.repeat))
                tick(len(rows) + len(steps), total, str(steps[-1]))
        except KeyboardInterrupt:
            interrupted = True
            told = told or describe_machine(options.device)
    busy = (time.process_time() - worked) / (time.perf_counter() - began)
    attention = min(1.0, busy) if (options.device, options.threads) == ("cpu", 1) else 1.0
    return BenchResult(
        options, told, found, tuple(rows), tuple(steps), missing, interrupted, attention
    )


def drop_missing_peers(options: BenchOptions) -> tuple[BenchOptions, dict[str, str]]:
    """The options without the peers that this machine lacks, and why it lacks them."""
    missing = {}
    if "jax" in options.peers:
        try:
            load_jax(options.device)
        except MissingError as error:
            missing["jax"] = str(error)
    present = tuple(peer for peer in options.peers if peer not in missing)
    return BenchOptions(
        options.device, options.cells, options.sizes, present, options.repeat, options.threads
    ), missing


def summarise_row(row: BenchRow) -> str:
    parts = []
    for kind, ms in row.ms.items():
        against = ", ".join(
            f"{r:.2f}x {peer}" for peer in row.peers if (r := row.ratio(kind, peer))
        )
        parts.append(f"{kind} {format_ms(ms[OURS])} ms" + (f" ({against})" if against else ""))
    return f"{row.name}: " + "; ".join(parts)


def describe_machine(device: str) -> dict[str, Any]:
    """This machine and its software: no name of it, no paths."""
    found: dict[str, Any] = {
        "cpu": cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.system(),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
    }  # fmt: skip
    if sys.modules.get("jax") is not None:
        found["jax"] = sys.modules["jax"].__version__
    describe = getattr(engines.load("cpu"), "describe", None)
    if describe is not None:
        found["compiler"] = str(describe())
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
        }
    return found


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def explain_engines(
    devices: Sequence[str], names: Sequence[str], sizes: Sequence[Size] = ()
) -> list[str]:
    """Which engine "auto" picks for each cell on each device, why, and how it would be launched; nothing is timed."""
    lines = []
    for name in names:
        choose("cell", name, SUBJECTS)
    for device in devices:
        choose("device", device, SIZES)
        if device == "cuda" and not torch.cuda.is_available():
            lines.append("cuda: torch finds no GPU here.")
            continue
        about = describe_machine(device)
        keys = (
            ("gpu", "cuda", "torch")
            if device == "cuda"
            else ("cpu", "cores", "threads", "compiler", "torch")
        )
        lines.append(
            f"{device}: " + ", ".join(f"{key} {about.get(key, 'not found')}" for key in keys)
        )
        for name in names:
            cell = library.named(FORMULAS.get(name, name))
            choice = engines.resolve("auto", cell, device)
            lines.append(f"  {name}: engine '{choice}': {choice.why}")
            geometry: Any = getattr(engines.load(choice), "explain", None)
            for _, B, d in (
                dict.fromkeys((0, B, d) for _, B, d in sizes or SIZES[device]) if geometry else ()
            ):
                lines.append(f"    B {B}, d {d}: {geometry(cell, d, B, torch.float32)}")
    return lines


HEADER = """# Benchmarks

One training gradient, ours and the peers', in one run; `coadjoint bench --help` says how to ask for it. Each section is
written by the command it names, on the machine it names, and replaced by the next run on such a device.
"""


def write_section(path: Path, result: BenchResult) -> None:
    """Put the result's section into the page in place of the device's old one; everything else stays as it is."""
    begin, end = (f"<!-- {word}bench {result.options.device} -->" for word in ("", "end of "))
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else HEADER
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error_text(error)}.") from None
    section = f"{begin}\n{result.markdown()}\n{end}"
    if (begin in text) != (end in text):
        raise InputError(
            f"{path} holds only one of the marks '{begin}' and '{end}'; put the other one back."
        )
    if begin in text:
        head, rest = text.split(begin, 1)
        text = head + section + rest.split(end, 1)[-1]
    else:
        text = text.rstrip("\n") + f"\n\n{section}\n"
    files.replace(path, text)
