"""Tables: results of a benchmark as text, JSON and Markdown, and the machine they belong to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ... import __version__
from ...errors import InputError, MissingError, StorageError, choose, error_text
from ...sweeps import engines
from ...sweeps.engines.c import probe
from ...training import files
from .clock import format_ms, tf32
from .flashrnn_kernels import FLASHRNN, explain_flashrnn, load_flashrnn
from .goals import (
    GRADIENT_PENALTY,
    ONE_STEP,
    OWN_LOOP,
    TRAINING_STEP,
    Contests,
    GoalRow,
    goal_notes,
    goal_table,
    measure_goals,
)
from .hessian_free_step import HESSIAN_FREE, HessianFreeStep, measure_step
from .limits import formula_of, measure_limits
from .measure import (
    DEVICE_NOTES,
    QUIET_SHARE,
    BenchRow,
    Tick,
    measure_row,
)
from .one_step import one_step
from .options import BenchOptions, pinned_threads
from .problems import FORMULAS, OURS, RHO, SIZES, Size, load_jax
from .subjects import SUBJECTS
from .training_step import training_step
from .user_loops import gradient_penalty, own_loop

# the contests of a row: of a cell at a size on a device, with the peers that take part
CONTESTS: dict[str, Callable[[str, Size, str, tuple[str, ...]], Contests]] = {
    OWN_LOOP: own_loop,
    GRADIENT_PENALTY: gradient_penalty,
    ONE_STEP: one_step,
    TRAINING_STEP: training_step,
}

RATIO_NOTE = (
    "vs: the peer's time divided by ours; above 1x ours is faster. * compares with the peer's "
    "plain gradient, because it has no other. costs: the time of our penalised or double "
    "gradient, in plain gradients (2 by counting operations)."
)
GEMM_NOTE = (
    "of GEMM: the time of the products that a gradient must do (plain: 2 sweeps and 1 weight "
    "product; penalised and double: 4 and 2; as many with the input weights of a second layer), "
    "at the rate of {rate}, divided by our time. {more}"
)
GEMM_RATES = {"cpu": "torch.mm on [B, d] x [d, g d]", "cuda": "a large float32 torch.mm"}
DIFFERENCE_NOTE = "differs: the largest relative difference between our gradient and a peer's."
TF32_NOTE = (
    "plain tf32: the products of both are rounded to tf32, ours by "
    "torch.set_float32_matmul_precision('high')."
)
JAX_TF32_NOTE = "JAX multiplies at its default precision, which is tf32 on a GPU that has it."
JAX_NOTE = (
    "JAX scan: the faster of two ways, with the inputs multiplied inside the scan or before it."
)
BUSY_NOTE = (
    "The machine was busy: this process had {share:.0%} of its core, so times are too long and "
    "ratios uncertain. Measure again when it is quiet."
)
TOOLS = ("torch", "cuDNN", "jax", "compiler")
EXPLAINED = {
    "cpu": ("cpu", "cores", "threads", "compiler", "torch"),
    "cuda": ("gpu", "cuda", "torch"),
}
HEADER = """# Benchmarks

The time of one training gradient, ours and the peers', measured in one run;
`coadjoint bench --help` lists the options. Each section was written by the command it names, on the
machine it names, and is replaced by the next run on a device of that kind. The row `mlp` is a deep
network, with layers for T: 30 tanh layers of 64 units, penalised over depth. Two ratios of it have
a goal on a CPU: it costs at most 2.3 plain gradients, and autograd takes at least twice as long.
Rows with a limit say whether our time, divided by the peer's, is at most that.
"""


@dataclass(frozen=True)
class BenchResult:
    """All that was measured, and where."""

    options: BenchOptions
    machine: dict[str, object]
    limits: dict[str, float]
    rows: tuple[BenchRow, ...]
    steps: tuple[HessianFreeStep, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)  # peers that are not here, and why
    interrupted: bool = False
    core_share: float = 1.0  # of its one core that this process had; 1 if there are more
    goals: tuple[GoalRow, ...] = ()  # the rows with a limit

    def json(self) -> str:
        """All results as JSON."""
        data = {
            "command": self.options.command,
            "coadjoint": __version__,
            "device": self.options.device,
            "penalty": f"{RHO:g} log-ratio",
            "repeat": self.options.repeat,
            "machine": self.machine,
            "limits": self.limits,
            "missing": self.missing,
            "interrupted": self.interrupted,
            "share of its core": self.core_share,
            "rows": [row.to_dict() for row in self.rows],
            HESSIAN_FREE: [step.to_dict() for step in self.steps],
            "rows with limits": [goal.to_dict() for goal in self.goals],
        }
        return json.dumps(data, indent=1) + "\n"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and lines: ratios, then milliseconds, then shares of the machine's limits.

        Each kind of gradient of each row has a line. All lines have the same heads.
        """
        peers = list(dict.fromkeys(peer for row in self.rows for peer in row.peers))
        heads: list[str] = []
        lines = []
        for row in self.rows:
            for kind in row.ms:
                cells = self._cells(row, kind, peers)
                heads = list(cells)
                lines.append(list(cells.values()))
        return heads, lines

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """The tables of gradients and of rows with a limit, without one that is empty."""
        return [table for table in (self.table(), goal_table(self.goals)) if table[1]]

    def _cells(self, row: BenchRow, kind: str, peers: list[str]) -> dict[str, str]:
        """The cells of one line, {head: text}; kind: of gradient, peers: of the whole table."""
        cells = {"cell": row.cell, "T, B, d": ", ".join(map(str, row.size)), "gradient": kind}
        for peer in peers:
            cells[f"vs {peer}"] = ratio_text(row, kind, peer)
        cells["costs"] = f"{row.cost:.2f} plain" if kind == row.second_kind else ""
        for name in (OURS, *peers):
            cells[f"ms {name}"] = format_ms(row.ms[kind].get(name))
        # the limit is that of float32 products, which tf32 may exceed
        cells["of GEMM"] = "" if "tf32" in kind else f"{row.gemm_share(kind):.0%}"
        if self.options.device == "cuda":
            cells["of memory"] = f"{row.memory_share(kind):.0%}"
            cells["us/step"] = f"{row.us_per_step(kind):.1f}"
        differences = row.differs[kind].values()
        cells["differs"] = f"{max(differences):.0e}" if differences else ""
        cells["engine"] = row.engine
        return cells

    def notes(self) -> list[str]:
        """What the columns mean, and what was left out."""
        notes = self._column_notes() if self.rows else []
        notes += map(str, self.steps)
        for peer, why in self.missing.items():
            notes.append(f"peer '{peer}' left out: {why}")
        for row in self.rows:
            notes += row.describe_failures()
        notes += goal_notes(self.goals)
        if self.core_share < QUIET_SHARE:
            notes.append(BUSY_NOTE.format(share=self.core_share))
        return notes

    def _column_notes(self) -> list[str]:
        """What the columns of the gradients mean on this device."""
        device = self.options.device
        gemm = GEMM_NOTE.format(rate=GEMM_RATES[device], more=DEVICE_NOTES[device])
        notes = [RATIO_NOTE, gemm, DIFFERENCE_NOTE]
        has_modules = any(row.cell in FORMULAS for row in self.rows)
        if device == "cuda" and has_modules:
            notes.append(TF32_NOTE)
        if any("JAX scan" in row.peers for row in self.rows):
            if device == "cuda":
                notes.append(JAX_TF32_NOTE)
            notes.append(JAX_NOTE)
        return notes

    def machine_line(self) -> str:
        """The machine in one line."""
        machine = self.machine
        if self.options.device == "cuda":
            parts = [f"{machine.get('gpu')}, CUDA {machine.get('cuda')}"]
        else:
            threads = "thread" if self.options.threads == 1 else "threads"
            parts = [
                f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} pinned {threads}"
            ]
        parts += [f"{name} {machine[name]}" for name in TOOLS if name in machine]
        rates = []
        for name, value in self.limits.items():
            decimals = 0 if value >= 100 else 1  # three digits are enough
            rates.append(f"{name} {value:,.{decimals}f}")
        return f"{', '.join(parts)}, float32. Measured here: {', '.join(rates)}"

    def markdown(self) -> str:
        """The section of this device in RESULTS.md."""
        title = "GPU" if self.options.device == "cuda" else "CPU"
        if self.options.section:
            title += f": {self.options.section}"
        written = f"Written by `{self.options.command}` of version {__version__}."
        text = [f"## {title}", "", written, ""]
        text += [f"{self.machine_line()}.", ""]
        for heads, lines in self.tables():
            text += [markdown_row(heads), "|---" * len(heads) + "|"]
            text += [*map(markdown_row, lines), ""]
        text += [f"- {note}" for note in self.notes()]
        return "\n".join(text)


def markdown_row(cells: list[str]) -> str:
    """One row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def ratio_text(row: BenchRow, kind: str, peer: str) -> str:
    """The peer's time for that kind of gradient divided by ours: "1.50x"; "" if it has none.

    A star marks the ratio to the peer's plain gradient, where our penalised or double gradient has
    no other to be compared with.
    """
    ratio = row.ratio(kind, peer)
    if ratio is not None:
        return f"{ratio:.2f}x"
    ratio = row.ratio_to_plain(peer) if kind == row.second_kind else None
    return "" if ratio is None else f"{ratio:.2f}x*"


def ignore_progress(done: float, total: int, text: str | None) -> None:
    """Report nothing about `done` of `total` measurements."""


def run_bench(options: BenchOptions, tick: Tick = ignore_progress) -> BenchResult:
    """Measure all cells at all sizes; Ctrl-C ends it with the results so far.

    tick: told how many measurements are done, of how many, and a line about the latest.
    """
    rows: list[BenchRow] = []
    steps: list[HessianFreeStep] = []
    missing: dict[str, str] = {}
    limits: dict[str, float] = {}
    about: dict[str, object] = {}
    interrupted = False
    goals: list[GoalRow] = []
    done = 0
    total = len(options.grid) + len(options.steps) + len(options.goals)

    def tick_share(share: float) -> None:
        tick(done + share, total, None)

    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    with pinned_threads(options), tf32(False):
        try:
            present, missing = drop_missing_peers(options)
            about = describe_machine(options.device)
            for peer, why in missing.items():
                tick(0, total, f"peer '{peer}' left out: {why}")
            limits = measure_limits(options.device)
            for cell, size in options.grid:
                row = measure_row(cell, size, present, limits, tick_share)
                rows.append(row)
                goals += row.goals(options.device)
                done += 1
                tick(done, total, "; ".join([summarise_row(row), *row.describe_failures()]))
            for size in options.steps:
                steps.append(measure_step(size, options.repeat))
                done += 1
                tick(done, total, str(steps[-1]))
            for name, cell, size in options.goals:
                contests = CONTESTS[name](cell, size, options.device, present.peers)
                found = measure_goals(name, contests, options.repeat, options.device, tick_share)
                goals += found
                done += 1
                for goal in found:
                    tick(done, total, str(goal))
        except KeyboardInterrupt:
            interrupted = True
            about = about or describe_machine(options.device)  # Ctrl-C may come before it is known
    # One thread that works all the time has all of its core, unless another process takes some.
    core_share = 1.0
    if options.device == "cpu" and options.threads == 1:
        busy = (time.process_time() - cpu_start) / (time.perf_counter() - wall_start)
        core_share = min(1.0, busy)
    return BenchResult(
        options,
        about,
        limits,
        tuple(rows),
        tuple(steps),
        missing,
        interrupted,
        core_share,
        tuple(goals),
    )


def drop_missing_peers(options: BenchOptions) -> tuple[BenchOptions, dict[str, str]]:
    """The options without the peers that this machine lacks, and {peer: why it lacks them}.

    The other peers are made of torch, which is always here. FlashRNN is rarely here, so its absence
    is told only if it was asked for. Without rows of gradients neither it nor JAX is needed.
    """
    missing = {}
    for peer, load in (("jax", load_jax), (FLASHRNN, load_flashrnn)):
        if peer in options.peers and options.grid:
            try:
                load(options.device)
            except MissingError as error:
                missing[peer] = str(error)
    present = tuple(peer for peer in options.peers if peer not in missing)
    if options.peers == BenchOptions.peers:
        missing.pop(FLASHRNN, None)
    return dataclasses.replace(options, peers=present), missing


def summarise_row(row: BenchRow) -> str:
    """The times of a row and their ratios to the peers, in one line."""
    parts = []
    for kind, ms in row.ms.items():
        part = f"{kind} {format_ms(ms[OURS])} ms"
        ratios = row.known_ratios(kind)
        if ratios:
            texts = [f"{ratio:.2f}x {peer}" for peer, ratio in ratios.items()]
            part += f" ({', '.join(texts)})"
        parts.append(part)
    return f"{row.name}: " + "; ".join(parts)


def describe_machine(device: str) -> dict[str, object]:
    """The processor and the versions of this machine; neither its name nor paths."""
    about: dict[str, object] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    jax = sys.modules.get("jax")  # only if it takes part: importing it takes long
    if jax is not None:
        about["jax"] = jax.__version__
    # Engines need not describe themselves; this one names its compiler and the flags.
    describe = getattr(engines.load("cpu"), "describe", None)
    if describe is not None:
        about["compiler"] = str(describe())
    if device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
        about["cuda"] = torch.version.cuda
        about["cuDNN"] = torch.backends.cudnn.version()
    return about


def cpu_model() -> str:
    """The model of the processor, as Linux or Python names it."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def explain_engines(
    devices: Sequence[str], names: Sequence[str], sizes: Sequence[Size] = ()
) -> list[str]:
    """Which engine "auto" picks for each cell on each device, why, and how it would be launched.

    devices: "cpu", "cuda"; names: of cells; sizes: () for the device's own. Nothing is timed,
    but the compiled loops if they never were (engines.c.probe).
    """
    for name in names:
        choose("cell", name, SUBJECTS)
    lines = []
    for device in devices:
        choose("device", device, SIZES)
        if device == "cuda" and not torch.cuda.is_available():
            lines.append("cuda: torch finds no GPU here.")
            continue
        about = describe_machine(device)
        facts = [f"{key} {about.get(key, 'not found')}" for key in EXPLAINED[device]]
        lines.append(f"{device}: " + ", ".join(facts))
        speed = probe.describe(torch.float32) if device == "cpu" else None
        if speed is not None:
            lines.append(f"  compiled loops, a small case: {speed}")
        for name in names:
            lines += explain_engine(device, name, sizes or SIZES[device])
        if device == "cuda":
            lines.append(f"  {explain_flashrnn(device)}")
    return lines


def explain_engine(device: str, name: str, sizes: Sequence[Size]) -> list[str]:
    """The engine of one cell on one device, and its launch at each size if it has a choice."""
    cell = formula_of(name)
    choice = engines.resolve("auto", cell, device)
    lines = [f"  {name}: engine '{choice}': {choice.why}"]
    explain = getattr(engines.load(choice), "explain", None)
    if explain is not None:
        # A launch does not depend on the number of steps: equal (B, d) are explained once.
        shapes = dict.fromkeys((B, d) for _, B, d in sizes)
        for B, d in shapes:
            lines.append(f"    B {B}, d {d}: {explain(cell, d, B, torch.float32)}")
    return lines


def write_section(path: Path, result: BenchResult) -> None:
    """Replace one section of a Markdown page by the result; the rest stays as it is.

    A section lies between two marks; a page without them gets it at its end.
    """
    name = f"{result.options.device} {result.options.section}".strip()
    begin = f"<!-- bench {name} -->"
    end = f"<!-- end of bench {name} -->"
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
