"""Rows with a limit: our time divided by a peer's, and the largest ratio that is wanted.

gradient           plain and penalised gradients against cuDNN's plain one (a GPU) and JAX (a CPU)
own-loop           costates, a penalty and backward() in a user's own loop, against co.Penalised
gradient-penalty   the gradient of ||dL/du|| through co.nn, against our own plain gradient
one-step           modules and cells called step by step, against torch.nn's
training-step      a step of `coadjoint train`, against a gradient and a step of Adam alone
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from .clock import (
    SAME_GRADIENT,
    fastest_fifth,
    finite_or_none,
    first_line,
    format_ms,
    ignore_progress,
    relative_difference,
    time_in_turns,
)
from .problems import FORMULAS, MODULES, SIZES, Run, Size, size_text

GRADIENT = "gradient"
OWN_LOOP = "own-loop"
GRADIENT_PENALTY = "gradient-penalty"
ONE_STEP = "one-step"
TRAINING_STEP = "training-step"
ROWS = (GRADIENT, OWN_LOOP, GRADIENT_PENALTY, ONE_STEP, TRAINING_STEP)
# the names of --cells that have such a row
CELLS_OF_ROW: dict[str, tuple[str, ...]] = {
    OWN_LOOP: tuple(MODULES),
    GRADIENT_PENALTY: tuple(FORMULAS),
    ONE_STEP: tuple(FORMULAS),
    TRAINING_STEP: tuple(MODULES),
}
GOAL_SIZES: dict[str, tuple[Size, ...]] = {"cpu": SIZES["cpu"][:2], "cuda": SIZES["cuda"]}
ONE_STEP_SIZES: dict[str, tuple[Size, ...]] = {
    "cpu": ((1, 1, 128), (1, 16, 128), (1, 1, 512)),
    "cuda": ((1, 1, 128), (1, 64, 512)),
}
LIMITS = {OWN_LOOP: 1.5, GRADIENT_PENALTY: 2.5, ONE_STEP: 1.1, TRAINING_STEP: 1.15}
JAX_LIMIT = 0.67  # JAX should take 1.5 times as long
LARGEST_LIMITED = 1024  # units of a gradient that is to be as fast as cuDNN's
WARM_UP = 6  # calls: on a GPU the first ones are captured, those with second derivatives last
TURNS = 5  # of a contender in each round: short ones, of which the fastest fifth counts
SHORT_TURN_MS = 10.0
ALL_SHORT_TURNS_MS = 1500.0

GOAL_NOTE = (
    "ratio: our time divided by the peer's; limit: the largest ratio that is wanted. gradient: "
    "the medians of the table above. The other rows have turns of 10 ms, of which the fastest "
    "fifth counts. own-loop: costates, a penalty and backward() as in a user's own loop, against "
    "co.Penalised. gradient-penalty: of a critic with one layer of co.nn, against the gradient of "
    "its mean score; torch.nn's is without cuDNN and oneDNN, which have no second derivative. "
    "one-step: calls with T = 1. training-step: batch, gradient, clipping, Adam and metrics of "
    "`coadjoint train`, the mean of 16 steps, against gradient and Adam alone."
)


@dataclass(frozen=True)
class Pair:
    """Two runs that are compared, by their names: `ours` may take `limit` times `peer`'s time."""

    ours: str
    peer: str
    limit: float | None = None  # None: compared without a limit
    same: bool = False  # whether both compute the same gradient


@dataclass(frozen=True)
class Contest:
    """Runs that are timed in turns, and the pairs among them that are compared."""

    cell: str
    size: Size
    engine: str
    runs: Mapping[str, Run]
    pairs: tuple[Pair, ...]
    steps: int = 1  # of one run: its time is that of one of them


# one after the other: each may hold files open as long as it is measured
Contests = Generator[Contest, None, None]


@dataclass(frozen=True)
class GoalRow:
    """Our time and a peer's, and the largest ratio that is wanted."""

    row: str  # one of ROWS
    cell: str
    size: Size
    engine: str
    measured: str
    peer: str
    ms: float | None  # None: it failed
    peer_ms: float | None
    limit: float | None = None
    differs: float | None = None  # the relative difference of the gradients, if they are the same
    failed: str = ""  # which of the two failed, and why

    @property
    def ratio(self) -> float | None:
        """Our time divided by the peer's; None if one of them failed."""
        if self.ms is None or self.peer_ms is None:
            return None
        return self.ms / self.peer_ms

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio, in the two decimals that are shown, is at most the limit.

        None without a limit, False without a ratio.
        """
        if self.limit is None:
            return None
        return self.ratio is not None and round(self.ratio, 2) <= self.limit

    @property
    def name(self) -> str:
        """Row, cell and size: "own-loop elman 100x20x50"."""
        return f"{self.row} {self.cell} {size_text(self.size)}"

    def __str__(self) -> str:
        """The row in a line: "... 3.00 ms, 1.20x co.Penalised (limit 1.50x: met)"."""
        if self.ratio is None:
            return f"{self.name}: {self.failed}"
        text = (
            f"{self.name}: {self.measured} {format_ms(self.ms)} ms, {self.ratio:.2f}x {self.peer}"
        )
        if self.limit is not None:
            text += f" (limit {self.limit:.2f}x: {'met' if self.is_met else 'missed'})"
        return text

    def cells(self) -> dict[str, str]:
        """The cells of its line in the table, {head: text}."""
        return {
            "row": self.row,
            "cell": self.cell,
            "T, B, d": ", ".join(map(str, self.size)),
            "measured": self.measured,
            "ms ours": format_ms(self.ms),
            "peer": self.peer,
            "ms peer": format_ms(self.peer_ms),
            "ratio": "" if self.ratio is None else f"{self.ratio:.2f}x",
            "limit": "" if self.limit is None else f"{self.limit:.2f}x",
            "met": {None: "", True: "yes", False: "no"}[self.is_met],
            "engine": self.engine,
        }

    def to_dict(self) -> dict[str, object]:
        """The row for JSON."""
        T, B, d = self.size
        return {
            "row": self.row,
            "cell": self.cell,
            "T": T,
            "B": B,
            "d": d,
            "engine": self.engine,
            "measured": self.measured,
            "ms": self.ms,
            "peer": self.peer,
            "peer ms": self.peer_ms,
            "ratio": self.ratio,
            "limit": self.limit,
            "met": self.is_met,
            "gradients differ by": None if self.differs is None else finite_or_none(self.differs),
            "failed": self.failed,
        }

    def faults(self) -> list[str]:
        """What failed, and a gradient that is not the peer's, in words."""
        lines = [f"{self.name}: {self.failed}"] if self.failed else []
        if self.differs is not None and not self.differs < SAME_GRADIENT:
            lines.append(
                f"{self.name}: the gradient of {self.peer} differs from ours by {self.differs:.1e}"
            )
        return lines


def goal_table(goals: Sequence[GoalRow]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines: a line for each row."""
    lines = [goal.cells() for goal in goals]
    heads = list(lines[0]) if lines else []
    return heads, [list(line.values()) for line in lines]


def goal_notes(goals: Sequence[GoalRow]) -> list[str]:
    """What the columns mean, the limits that are missed, and what failed; nothing without rows."""
    if not goals:
        return []
    notes = [GOAL_NOTE]
    limited = [goal for goal in goals if goal.limit is not None]
    missed = [goal for goal in limited if not goal.is_met]
    if limited:
        notes.append(f"{len(limited) - len(missed)} of {len(limited)} limits are met.")
    for goal in goals:
        notes += goal.faults()
    return notes


def measure_goals(
    row: str,
    contests: Contests,
    rounds: int,
    device: str,
    tick: Callable[[float], None] = ignore_progress,
) -> list[GoalRow]:
    """Measure the contests of a row one after the other.

    A contest is made when the one before it is done, so that only one has its memory. tick: told
    the share of the rounds of each contest that are done.
    """
    goals: list[GoalRow] = []
    with closing(contests):
        for contest in contests:
            goals += measure_contest(row, contest, rounds, device, tick)
    return goals


def measure_contest(
    row: str,
    contest: Contest,
    rounds: int,
    device: str,
    tick: Callable[[float], None] = ignore_progress,
) -> list[GoalRow]:
    """Warm up the runs of a contest, time them in turns, and compare its pairs.

    A run that fails, out of memory say, leaves its rows without a ratio.
    """
    failed: dict[str, str] = {}
    gradients: dict[str, Mapping[str, object]] = {}
    runs = dict(contest.runs)
    for name, run in contest.runs.items():
        try:
            for _ in range(WARM_UP):
                gradients[name] = run()
        except RuntimeError as error:
            failed[name] = f"{name} failed: {first_line(error)}"
            del runs[name]
    times = time_in_turns(runs, TURNS * rounds, device, tick, SHORT_TURN_MS, ALL_SHORT_TURNS_MS)
    ms = {name: fastest_fifth(turns) / contest.steps for name, turns in times.items()}
    goals = []
    for pair in contest.pairs:
        why = failed.get(pair.ours) or failed.get(pair.peer) or ""
        differs = None
        if pair.same and not why:
            differs = relative_difference(gradients[pair.ours], gradients[pair.peer])
        goals.append(
            GoalRow(
                row,
                contest.cell,
                contest.size,
                contest.engine,
                pair.ours,
                pair.peer,
                ms.get(pair.ours),
                ms.get(pair.peer),
                pair.limit,
                differs,
                why,
            )
        )
    return goals
