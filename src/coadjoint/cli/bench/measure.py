"""Measurements: the time of each contender, and how much of the machine's capacity it uses."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .clock import (
    SAME_GRADIENT,
    finite_or_none,
    first_line,
    relative_difference,
    time_in_turns,
)
from .goals import GOAL_SIZES, GRADIENT, JAX_LIMIT, LARGEST_LIMITED, WARM_UP, GoalRow
from .limits import flops, formula_of, gemm_rate, layer_inputs, traffic
from .options import BenchOptions
from .problems import MODULES, OURS, PRODUCTS, Run, Size, size_text
from .subjects import SUBJECTS, Problem

Tick = Callable[[float, int, str | None], None]  # rows done, of how many, text to show
Times = dict[str, dict[str, float]]  # by kind of gradient and contender
DEVICE_NOTES = {
    "cpu": "Above 100%: faster than calls of torch.mm.",
    "cuda": (
        "of memory: the same for the arrays that a gradient must move. us/step: our time "
        "divided by steps and sweeps."
    ),
}
QUIET_SHARE = 0.9  # a process that had less of its core was disturbed


@dataclass(frozen=True)
class BenchRow:
    """One cell at one size."""

    cell: str
    size: Size
    engine: str
    peers: tuple[str, ...]
    ms: Times
    differs: Times  # of a peer's gradient from ours, relative
    failed: dict[str, str]  # the contenders that have no gradient, and why
    rate: float  # GFLOP/s of the recurrent product on a CPU, of a large one on a GPU
    memory: float  # GB/s of a large array, in and out

    @property
    def name(self) -> str:
        """Cell and size: "elman 100x20x50"."""
        return f"{self.cell} {size_text(self.size)}"

    @property
    def second_kind(self) -> str:
        """The gradient that is not plain: "penalised" or "double", always the last kind."""
        return list(self.ms)[-1]

    @property
    def cost(self) -> float:
        """The time of our penalised or double gradient divided by that of our plain one."""
        return self.ms[self.second_kind][OURS] / self.ms["plain"][OURS]

    def ratio(self, kind: str, peer: str) -> float | None:
        """The peer's time divided by ours: above 1, ours is faster.

        None if the peer has no gradient of this kind.
        """
        theirs = self.ms[kind].get(peer)
        return None if theirs is None else theirs / self.ms[kind][OURS]

    def ratio_to_plain(self, peer: str) -> float | None:
        """The time of the peer's plain gradient divided by that of our penalised or double one.

        None if the peer has no plain gradient.
        """
        theirs = self.ms["plain"].get(peer)
        return None if theirs is None else theirs / self.ms[self.second_kind][OURS]

    def gemm_share(self, kind: str) -> float:
        """The time of the products alone, divided by our time for this kind of gradient."""
        # 1e-6: operations at a rate in GFLOP/s, in milliseconds
        return 1e-6 * flops(self.cell, self.size, kind) / self.rate / self.ms[kind][OURS]

    def memory_share(self, kind: str) -> float:
        """The time to move the arrays alone, divided by our time for this kind of gradient."""
        # 1e-6: bytes at a rate in GB/s, in milliseconds
        return 1e-6 * traffic(self.cell, self.size, kind) / self.memory / self.ms[kind][OURS]

    def us_per_step(self, kind: str) -> float:
        """Microseconds of one time step of one sweep of our gradient."""
        # so many for each layer and direction
        sweeps = PRODUCTS[kind][0] * len(layer_inputs(self.cell, self.size))
        return 1e3 * self.ms[kind][OURS] / (sweeps * self.size[0])

    def goals(self, device: str) -> list[GoalRow]:
        """The gradients of a network against the peers that have a limit, or are named with them.

        On a GPU our plain and penalised gradients against cuDNN's plain one in float32, and without
        a limit against tf32 and FlashRNN. On a CPU those of a small elman against JAX's.
        """
        if self.cell not in MODULES:
            return []
        limit = 1.0 if self.size[2] <= LARGEST_LIMITED else None
        found = []
        for kind in self.ms:
            found.append(self._goal(kind, "cuDNN float32", "plain", limit))
            found.append(self._goal(kind, "cuDNN tf32", "plain", None))
        found.append(self._goal("plain", "FlashRNN bf16", "plain", None))
        if device == "cpu" and self.cell == "elman" and self.size in GOAL_SIZES[device]:
            for kind in self.ms:
                found.append(self._goal(kind, "JAX scan", kind, JAX_LIMIT))
        return [goal for goal in found if goal is not None]

    def _goal(self, kind: str, peer: str, peer_kind: str, limit: float | None) -> GoalRow | None:
        """Our gradient of one kind against a peer's of another; None if the peer has none here."""
        theirs = self.ms[peer_kind].get(peer)
        if theirs is None:
            return None
        name = f"{peer}, {peer_kind}"
        ours = self.ms[kind][OURS]
        return GoalRow(GRADIENT, self.cell, self.size, self.engine, kind, name, ours, theirs, limit)

    def describe_failures(self) -> list[str]:
        """Peers that failed, or whose gradient is not ours, in words."""
        lines = [f"{self.name}: {what} failed: {why}" for what, why in self.failed.items()]
        for kind, differences in self.differs.items():
            for peer, value in differences.items():
                if value >= SAME_GRADIENT or math.isnan(value):
                    which = f"the {kind} gradient of {peer}"
                    lines.append(f"{self.name}: {which} differs from ours by {value:.1e}")
        return lines

    def to_dict(self) -> dict[str, object]:
        """The row for JSON."""
        T, B, d = self.size
        differences = {}
        for kind, by_peer in self.differs.items():
            differences[kind] = {peer: finite_or_none(value) for peer, value in by_peer.items()}
        return {
            "cell": self.cell,
            "T": T,
            "B": B,
            "d": d,
            "engine": self.engine,
            f"{self.second_kind} in plain gradients": self.cost,
            "ours is faster by": {kind: self.known_ratios(kind) for kind in self.ms},
            f"ours {self.second_kind} is faster than plain by": self._known(self.ratio_to_plain),
            "ms": self.ms,
            "gradients differ by": differences,
            "failed": self.failed,
            "GEMM GFLOP/s": self.rate,
            "share of GEMM": {kind: self.gemm_share(kind) for kind in self.ms},
            "share of memory": {kind: self.memory_share(kind) for kind in self.ms},
            "us for a step of a sweep": {kind: self.us_per_step(kind) for kind in self.ms},
        }

    def known_ratios(self, kind: str) -> dict[str, float]:
        """{peer: its time divided by ours}, of the peers that have this kind of gradient."""
        return self._known(functools.partial(self.ratio, kind))

    def _known(self, ratio: Callable[[str], float | None]) -> dict[str, float]:
        """{peer: ratio(peer)}, without the peers for which it is None."""
        ratios = {}
        for peer in self.peers:
            value = ratio(peer)
            if value:
                ratios[peer] = value
        return ratios


Contender = tuple[str, str]  # kind of gradient, name


def measure_row(
    cell: str,
    size: Size,
    options: BenchOptions,
    limits: Mapping[str, float],
    tick: Callable[[float], None],
) -> BenchRow:
    """Compare the gradients of all contenders, then time them.

    limits: the rates of this machine. tick: told the share of the rounds that are done.
    """
    problem = SUBJECTS[cell](cell, size, options.device)
    failed: dict[str, str] = {}
    runs = collect_runs(problem, options.peers, failed)
    peers = tuple(dict.fromkeys(name for _, name in runs if name != OURS))
    differs = compare_gradients(problem.kinds, runs, failed)
    if options.device == "cuda":
        record_ours(runs)
    ms: Times = {kind: {} for kind in problem.kinds}
    times = time_in_turns(runs, options.repeat, options.device, tick)
    for (kind, name), turns in times.items():
        ms[kind][name] = statistics.median(turns)
    # On a CPU the limit is a product of the size that one time step has. A GPU would be mostly idle
    # in it, so there the limit is a large product.
    if options.device == "cpu":
        _, B, d = size
        rate = gemm_rate(B, d, len(formula_of(cell).gates) * d, options.device)
    else:
        rate = limits["GEMM GFLOP/s"]
    memory = limits["memory GB/s"]
    return BenchRow(cell, size, problem.engine, peers, ms, differs, failed, rate, memory)


def record_ours(runs: Mapping[Contender, Run]) -> None:
    """Call our runs until they are replayed: the call that makes a recording takes long.

    A peer has no recordings: it is warm after its gradient was compared.
    """
    for (_, name), run in runs.items():
        if name == OURS:
            for _ in range(WARM_UP):
                run()


def collect_runs(
    problem: Problem, peers: tuple[str, ...], failed: dict[str, str]
) -> dict[Contender, Run]:
    """The runs of ours and of all peers; a peer that cannot be set up is added to `failed`."""
    contenders = problem.contenders(OURS)
    for peer in peers:
        try:
            contenders |= problem.contenders(peer)
        except RuntimeError as error:  # out of memory, say: the peer has no figure here
            failed[peer] = first_line(error)
    runs = {}
    for name, kinds in contenders.items():
        for kind, run in kinds.items():
            runs[kind, name] = run
    return runs


def compare_gradients(
    kinds: tuple[str, ...], runs: dict[Contender, Run], failed: dict[str, str]
) -> Times:
    """The relative differences of the peers' gradients from ours, by kind and peer.

    Runs that fail are taken out of `runs` and added to `failed`.
    """
    gradients = {}
    for (kind, name), run in list(runs.items()):
        try:
            gradients[kind, name] = run()
        except RuntimeError as error:
            if name == OURS:
                raise
            failed[f"{kind} {name}"] = first_line(error)
            del runs[kind, name]
    differs: Times = {kind: {} for kind in kinds}
    for (kind, name), gradient in gradients.items():
        if name != OURS:
            differs[kind][name] = relative_difference(gradients[kind, OURS], gradient)
    return differs
