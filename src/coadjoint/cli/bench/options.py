"""Options of the benchmark: what is measured, where and how, and the words that ask for it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...errors import InputError, MissingError, choose
from .goals import CELLS_OF_ROW, GOAL_SIZES, GRADIENT, ONE_STEP, ONE_STEP_SIZES, ROWS
from .hessian_free_step import HESSIAN_FREE, HESSIAN_FREE_SIZE
from .mlp import MLP, MLP_SIZES
from .problems import FORMULAS, PEERS, SIZES, Size, size_text
from .subjects import SUBJECTS


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; `sizes` () are the device's own, `threads` are those of a CPU."""

    device: str = "cpu"
    cells: tuple[str, ...] = (*SUBJECTS, HESSIAN_FREE)
    sizes: tuple[Size, ...] = ()
    peers: tuple[str, ...] = tuple(PEERS)
    repeat: int = 9
    threads: int = 1
    rows: tuple[str, ...] = ROWS
    section: str = ""  # of the page that --write changes; "" is that of the device

    def __post_init__(self) -> None:
        """Refuse what cannot be measured, and fill in the sizes of the device."""
        choose("device", self.device, SIZES)
        for name in self.cells:
            choose("cell", name, (*SUBJECTS, HESSIAN_FREE))
        for name in self.peers:
            choose("peer", name, PEERS)
        if not self.cells:
            known = ", ".join((*SUBJECTS, HESSIAN_FREE))
            raise InputError(f"no cell to measure; choose from {known}.")
        if self.cells == (HESSIAN_FREE,) and self.device != "cpu":
            raise InputError(f"'{HESSIAN_FREE}' is measured on a CPU; got device '{self.device}'.")
        if not self.sizes:
            object.__setattr__(self, "sizes", SIZES[self.device])
        for row in self.rows:
            choose("row", row, ROWS)
        if not self.grid and not self.steps and not self.goals:
            raise InputError(
                f"nothing to measure: {' and '.join(self.cells)} has no row "
                f"{' or '.join(self.rows) or 'at all'}. Rows are {', '.join(ROWS)}."
            )
        if not re.fullmatch(r"[\w ,.()+-]*", self.section) or "--" in self.section:
            raise InputError(
                "a section is named by letters, digits, spaces and , . ( ) + - alone; "
                f"got '{self.section}'."
            )
        if self.repeat < 1:
            raise InputError(f"repeat must be at least 1; got {self.repeat}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise MissingError("device 'cuda': torch finds no GPU here. Use device 'cpu'.")
        most = len(available_cores())
        if self.device == "cpu" and not 1 <= self.threads <= most:
            raise InputError(
                f"threads must lie in 1..{most}, the cores of this process; got {self.threads}."
            )

    @property
    def steps(self) -> tuple[Size, ...]:
        """The sizes of Hessian-free steps: one of their own, unless sizes were asked for."""
        if HESSIAN_FREE not in self.cells or self.device != "cpu" or GRADIENT not in self.rows:
            return ()
        return self.sizes if self.has_own_sizes else (HESSIAN_FREE_SIZE,)

    @property
    def has_own_sizes(self) -> bool:
        """Whether sizes were asked for."""
        return self.sizes != SIZES[self.device]

    def sizes_of(self, cell: str) -> tuple[Size, ...]:
        """The sizes of one cell, unless sizes were asked for.

        A deep network has its own. A module on a CPU would take minutes at the largest.
        """
        if self.has_own_sizes:
            return self.sizes
        if cell == MLP:
            return MLP_SIZES
        return GOAL_SIZES[self.device] if cell in FORMULAS else self.sizes

    @property
    def grid(self) -> list[tuple[str, Size]]:
        """The gradients to measure, by cell and size."""
        if GRADIENT not in self.rows:
            return []
        cells = [cell for cell in self.cells if cell != HESSIAN_FREE]
        return [(cell, size) for cell in cells for size in self.sizes_of(cell)]

    @property
    def goals(self) -> list[tuple[str, str, Size]]:
        """The other rows to measure, by row, cell and size."""
        found = []
        for row in self.rows:
            for cell in self.cells:
                if cell in CELLS_OF_ROW.get(row, ()):
                    found += [(row, cell, size) for size in self.goal_sizes(row)]
        return found

    def goal_sizes(self, row: str) -> tuple[Size, ...]:
        """The sizes of a row with a limit: calls of one step have T = 1, whatever was asked for."""
        if row != ONE_STEP:
            return self.sizes if self.has_own_sizes else GOAL_SIZES[self.device]
        if not self.has_own_sizes:
            return ONE_STEP_SIZES[self.device]
        return tuple(dict.fromkeys((1, B, d) for _, B, d in self.sizes))

    @property
    def command(self) -> str:
        """The command line that asks for these options; defaults are left out."""
        words = [f"coadjoint bench --device {self.device}"]
        if self.has_own_sizes:
            words.append("--sizes " + ",".join(map(size_text, self.sizes)))
        if self.rows != ROWS:
            words.append(f"--rows {','.join(self.rows)}")
        if self.cells != BenchOptions.cells:
            words.append(f"--cells {','.join(self.cells) or 'none'}")
        if self.peers != BenchOptions.peers:
            words.append(f"--peers {','.join(self.peers) or 'none'}")
        if self.repeat != BenchOptions.repeat:
            words.append(f"--repeat {self.repeat}")
        if self.threads != BenchOptions.threads:
            words.append(f"--threads {self.threads}")
        if self.section:
            words.append(f"--section {shlex.quote(self.section)}")
        return " ".join(words)


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes of the command line: '100x20x50,200x64x128' gives ((100, 20, 50), (200, 64, 128))."""
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})\s*", word)
        T, B, d = map(int, match.groups()) if match else (0, 0, 0)  # zeros are refused below
        if T < 2 or B < 1 or d < 1:
            raise InputError(
                "a size is TxBxd (steps, at least 2; samples; units), "
                f"as in 100x20x50,200x64x128; got '{word}'."
            )
        sizes.append((T, B, d))
    return tuple(sizes)


def parse_names(text: str) -> tuple[str, ...]:
    """Names of the command line: 'elman,gru' gives ('elman', 'gru'), 'none' gives ()."""
    if text.strip() in ("", "none"):
        return ()
    names = [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(names))


def available_cores() -> set[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


@contextlib.contextmanager
def pinned_threads(options: BenchOptions) -> Iterator[None]:
    """Run with the threads asked for, each on its own core; afterwards as before.

    On a GPU nothing is pinned. Cores are taken from the last one down: the first one often serves
    the system.
    """
    if options.device != "cpu":
        yield
        return
    threads_before = torch.get_num_threads()
    cores = available_cores()
    torch.set_num_threads(options.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(cores)[-options.threads :]))
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
