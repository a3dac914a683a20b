"""Measurements: the time of each contender, and how much of what the machine can do it uses."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...cells import library
from ...errors import InputError, MissingError, choose
from ...gradients.bptt import BPTT
from ...objectives.batch import Batch
from ...optimisers.curvature import Curvature
from ...optimisers.hessian_free import HessianFree
from ...sweeps.affine import affine
from ...sweeps.chunks import sum_products
from .clock import (
    best_time,
    finite_or_none,
    first_line,
    format_ms,
    relative_difference,
    tf32,
    time_calls,
    time_in_turns,
)
from .problems import (
    DIRECTIONS,
    FORMULAS,
    LAYERS,
    OURS,
    PEERS,
    PRODUCTS,
    SIZES,
    SUBJECTS,
    NetworkProblem,
    Size,
)

Tick = Callable[[float, int, str | None], None]  # rows done, of how many, what to say
DEVICE_NOTES = {
    "cpu": "Above 100%: faster than calls of torch.mm.",
    "cuda": "of memory: the arrays it must move at the least, likewise. us/step: our time by steps and sweeps.",
}
QUIET_SHARE = 0.9  # a process that had less of its core was disturbed
SAME_GRADIENT = 0.05  # gradients further apart than this, tf32 or not, are of different functions
HESSIAN_FREE, HESSIAN_FREE_SIZE, ITERATIONS, MOST_RATIO = (
    "hessian-free",
    (100, 200, 100),
    50,
    1.1,
)  # a step, and how much it may cost


def gemm_rate(rows: int, inner: int, columns: int, device: str) -> float:
    """GFLOP/s of one float32 product."""
    a, b = torch.randn(rows, inner, device=device), torch.randn(inner, columns, device=device)
    out = torch.empty(rows, columns, device=device)
    return 2e-6 * rows * inner * columns / best_time(lambda: torch.mm(a, b, out=out), device)


def measure_limits(device: str) -> dict[str, float]:
    """What this machine can do: large float32 products, memory, and on a GPU the launch of a kernel."""
    if device == "cpu":
        return {
            "GEMM GFLOP/s": gemm_rate(1024, 1024, 1024, device),
            "memory GB/s": memory_bandwidth(2**25, device),
        }
    found = {}
    for name, on in (("GEMM GFLOP/s", False), ("GEMM GFLOP/s with tf32", True)):
        with tf32(on):
            found[name] = gemm_rate(8192, 8192, 8192, device)
    one = torch.zeros(1, device=device)
    return found | {
        "memory GB/s": memory_bandwidth(2**28, device),
        "kernel launch us": 1e3 * best_time(lambda: one.add_(1.0), device),
    }


def memory_bandwidth(entries: int, device: str) -> float:
    """GB/s of a large array, read and written."""
    y = torch.zeros(entries, device=device)
    return 2e-6 * y.nbytes / best_time(lambda: y.add_(1.0), device)


def layer_inputs(cell: str, size: Size) -> list[int]:
    """The inputs of each sweep's layer that are as many as units, or none where they are few."""
    d = size[2]
    return (
        [width for width in (0, DIRECTIONS * d)[:LAYERS] for _ in range(DIRECTIONS)]
        if cell in FORMULAS
        else [0]
    )


def flops(cell: str, size: Size, kind: str) -> float:
    """What a gradient must multiply and add: every sweep and every weight product is T B rows times W, [g d, d], and as
    many products with the input weights of a layer that reads another."""
    (T, B, d), g = size, len(library.named(FORMULAS.get(cell, cell)).gates)
    return sum(
        sum(PRODUCTS[kind]) * 2.0 * T * B * g * d * (d + inputs)
        for inputs in layer_inputs(cell, size)
    )


def traffic(cell: str, size: Size, kind: str) -> float:
    """Bytes a gradient must move at the least: a sweep reads one array of gates and writes one of states, or the other
    way round; a weight product reads one of each; a product with input weights has both."""
    (T, B, d), formula = size, library.named(FORMULAS.get(cell, cell))
    sweep, product = len(formula.gates) + len(formula.slots), len(formula.gates) + 1
    count = PRODUCTS[kind]
    own = d * (count[0] * sweep + count[1] * product)
    read = [
        sum(count) * (inputs + len(formula.gates) * d) if inputs else 0
        for inputs in layer_inputs(cell, size)
    ]
    return 4.0 * T * B * sum(own + more for more in read)


@dataclass(frozen=True)
class BenchRow:
    """One cell at one size. `ms` and `differs` by kind of gradient and contender."""

    cell: str
    size: Size
    engine: str
    peers: tuple[str, ...]
    ms: dict[str, dict[str, float]]
    differs: dict[str, dict[str, float]]  # of a peer's gradient from ours, relative
    failed: dict[str, str]  # what gave no gradient, and why
    rate: float  # GFLOP/s of the recurrent product on a CPU, of a large one on a GPU
    memory: float  # GB/s of a large array, in and out

    @property
    def name(self) -> str:
        return f"{self.cell} {'x'.join(map(str, self.size))}"

    def ratio(self, kind: str, peer: str) -> float | None:
        """The peer's time by ours: above 1, ours is faster."""
        theirs = self.ms[kind].get(peer)
        return None if theirs is None else theirs / self.ms[kind][OURS]

    @property
    def second_kind(self) -> str:
        """The gradient that is not plain: "penalised" or "double"."""
        return list(self.ms)[-1]

    def ratio_to_plain(self, peer: str) -> float | None:
        """The peer's plain gradient by our other one."""
        theirs = self.ms["plain"].get(peer)
        return None if theirs is None else theirs / self.ms[self.second_kind][OURS]

    @property
    def cost(self) -> float:
        """The other gradient in plain ones."""
        return self.ms[self.second_kind][OURS] / self.ms["plain"][OURS]

    def gemm_share(self, kind: str) -> float:
        """The time of the products alone, by our time."""
        return 1e-6 * flops(self.cell, self.size, kind) / self.rate / self.ms[kind][OURS]

    def memory_share(self, kind: str) -> float:
        return 1e-6 * traffic(self.cell, self.size, kind) / self.memory / self.ms[kind][OURS]

    def us_per_step(self, kind: str) -> float:
        """Microseconds of one step of one sweep."""
        return (
            1e3
            * self.ms[kind][OURS]
            / (PRODUCTS[kind][0] * self.size[0] * len(layer_inputs(self.cell, self.size)))
        )

    def describe_failures(self) -> list[str]:
        """Peers that failed, or whose gradient is not ours, in words."""
        return [f"{self.name}: {what} failed: {why}" for what, why in self.failed.items()] + [
            f"{self.name}: the {kind} gradient of {peer} differs from ours by {value:.1e}"
            for kind, found in self.differs.items() for peer, value in found.items() if not value < SAME_GRADIENT
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        T, B, d = self.size
        return {
            "cell": self.cell, "T": T, "B": B, "d": d, "engine": self.engine,
            f"{self.second_kind} in plain gradients": self.cost,
            "ours is faster by": {k: {q: r for q in self.peers if (r := self.ratio(k, q))} for k in self.ms},
            f"ours {self.second_kind} is faster than plain by": {q: r for q in self.peers if (r := self.ratio_to_plain(q))},
            "ms": self.ms,
            "gradients differ by": {k: {q: finite_or_none(v) for q, v in found.items()} for k, found in self.differs.items()},
            "failed": self.failed, "GEMM GFLOP/s": self.rate,
            "share of GEMM": {k: self.gemm_share(k) for k in self.ms},
            "share of memory": {k: self.memory_share(k) for k in self.ms},
            "us for a step of a sweep": {k: self.us_per_step(k) for k in self.ms},
        }  # fmt: skip


def measure_row(
    cell: str,
    size: Size,
    options: BenchOptions,
    found: Mapping[str, float],
    tick: Callable[[float], None],
) -> BenchRow:
    """Compare gradients, then time everyone."""
    device, problem = options.device, SUBJECTS[cell](cell, size, options.device)
    contenders, failed = problem.contenders(OURS), {}
    for peer in options.peers:
        try:
            contenders |= problem.contenders(peer)
        except RuntimeError as error:  # out of memory, say: that peer has no figure here
            failed[peer] = first_line(error)
    runs = {(kind, name): run for name, kinds in contenders.items() for kind, run in kinds.items()}
    gradients = {}
    for (kind, name), run in runs.items():
        try:
            gradients[kind, name] = run()
        except RuntimeError as error:
            if name == OURS:
                raise
            failed[f"{kind} {name}"] = first_line(error)
    ms: dict[str, dict[str, float]] = {kind: {} for kind in problem.kinds}
    differs: dict[str, dict[str, float]] = {kind: {} for kind in problem.kinds}
    for (kind, name), gradient in gradients.items():
        if name != OURS:
            differs[kind][name] = relative_difference(gradients[kind, OURS], gradient)
    runs = {key: runs[key] for key in gradients}
    del gradients
    for (kind, name), times in time_in_turns(runs, options.repeat, device, tick).items():
        ms[kind][name] = statistics.median(times)
    (_, B, d), gates = size, len(library.named(FORMULAS.get(cell, cell)).gates)
    rate = gemm_rate(B, d, gates * d, device) if device == "cpu" else found["GEMM GFLOP/s"]
    peers = tuple(name for name in contenders if name != OURS)
    return BenchRow(
        cell, size, problem.engine, peers, ms, differs, failed, rate, found["memory GB/s"]
    )


@dataclass(frozen=True)
class HessianFreeStep:
    """A Hessian-free step: milliseconds, and those of its parts."""

    size: Size
    engine: str
    iterations: int  # of conjugate gradients; fewer than asked for where nothing is left to solve
    ms: float
    parts: float

    @property
    def ratio(self) -> float:
        return self.ms / self.parts

    def __str__(self) -> str:
        limit = (
            f"; at most {MOST_RATIO:.2f}x is asked for" if self.size == HESSIAN_FREE_SIZE else ""
        )
        return (
            f"{HESSIAN_FREE} {'x'.join(map(str, self.size))}: a step of {self.iterations} iterations takes {format_ms(self.ms)} ms, {self.ratio:.2f}x of "
            f"{self.iterations} x (tangent + adjoint + their two weight products) + the gradient, {format_ms(self.parts)} ms{limit}."
        )

    def to_dict(self) -> dict[str, Any]:
        T, B, d = self.size
        return {
            "T": T,
            "B": B,
            "d": d,
            "engine": self.engine,
            "iterations": self.iterations,
            "ms": self.ms,
            "ms of its parts": self.parts,
            "ratio": self.ratio,
        }


def measure_step(size: Size, rounds: int) -> HessianFreeStep:
    """Both in turns, the least of each: a step begun at the last solution, as all but the first are."""
    p = NetworkProblem("elman", size, "cpu")
    batch, way = Batch(p.u, p.y), HessianFree(cg=ITERATIONS, progress=0.0)
    begin = {name: y.clone() for name, y in p.weights.items()}
    way.step(p.net, batch, "cross-entropy")
    state, taken = dict(way.state), []
    (_, B, d), w = size, Curvature(p.net, batch, "cross-entropy").weights
    plan, saved, W = w.swept.plan, w.swept.saved, p.weights["W"]
    direction, of_last = torch.randn(d, w.known.shape[1]) / d, torch.randn(B, d)

    def step() -> None:
        with torch.no_grad():
            for name, y in p.net.named_parameters():
                y.copy_(begin[name])
        way.state.clear()
        way.state.update(state)
        taken.append(way.step(p.net, batch, "cross-entropy").iterations)

    def parts() -> None:
        with torch.no_grad():
            for _ in range(taken[-1]):
                ga = affine(w.rows, w.known, direction, None)
                mu, _ = plan.engine.tangent(plan, saved, W, None, ga, None)
                _, delta, _ = plan.engine.adjoint(
                    plan, saved, W, mu, of_last, None, None, False, False
                )
                sum_products(w.rows, delta, w.known)
        BPTT()(p.net, batch, "cross-entropy")

    times = [(time_calls(step, 1, "cpu"), time_calls(parts, 1, "cpu")) for _ in range(rounds + 1)][
        1:
    ]  # the first warms up
    return HessianFreeStep(
        size, p.engine, taken[-1], *(min(each) for each in zip(*times, strict=True))
    )


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. `sizes` (): the device's own; `threads` of a CPU."""

    device: str = "cpu"
    cells: tuple[str, ...] = (*SUBJECTS, HESSIAN_FREE)
    sizes: tuple[Size, ...] = ()
    peers: tuple[str, ...] = tuple(PEERS)
    repeat: int = 9
    threads: int = 1

    def __post_init__(self) -> None:
        choose("device", self.device, SIZES)
        for kind, names, known in (
            ("cell", self.cells, (*SUBJECTS, HESSIAN_FREE)),
            ("peer", self.peers, PEERS),
        ):
            for name in names:
                choose(kind, name, known)
        if not self.cells:
            raise InputError(
                f"no cell to measure; name some of {', '.join((*SUBJECTS, HESSIAN_FREE))}."
            )
        if self.cells == (HESSIAN_FREE,) and self.device != "cpu":
            raise InputError(f"'{HESSIAN_FREE}' is measured on a CPU; got device '{self.device}'.")
        if not self.sizes:
            object.__setattr__(self, "sizes", SIZES[self.device])
        if self.repeat < 1:
            raise InputError(f"repeat must be at least 1; got {self.repeat}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise MissingError("device 'cuda': torch finds no GPU here. Use device 'cpu'.")
        if self.device == "cpu" and not 1 <= self.threads <= len(available_cores()):
            raise InputError(
                f"threads must lie in 1..{len(available_cores())}, the cores of this process; got {self.threads}."
            )

    @property
    def steps(self) -> tuple[Size, ...]:
        """The sizes of Hessian-free steps."""
        if HESSIAN_FREE not in self.cells or self.device != "cpu":
            return ()
        return (HESSIAN_FREE_SIZE,) if self.sizes == SIZES[self.device] else self.sizes

    @property
    def command(self) -> str:
        """The command line that asks for this."""
        words = [f"coadjoint bench --device {self.device}"]
        if self.sizes != SIZES[self.device]:
            words.append("--sizes " + ",".join("x".join(map(str, size)) for size in self.sizes))
        for flag in ("cells", "peers"):
            if getattr(self, flag) != BenchOptions.__dataclass_fields__[flag].default:
                words.append(f"--{flag} {','.join(getattr(self, flag)) or 'none'}")
        for flag in ("repeat", "threads"):
            if getattr(self, flag) != BenchOptions.__dataclass_fields__[flag].default:
                words.append(f"--{flag} {getattr(self, flag)}")
        return " ".join(words)


def parse_sizes(text: str) -> tuple[Size, ...]:
    """'100x20x50,200x64x128' -> ((100, 20, 50), (200, 64, 128))"""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})\s*", word)
        size = tuple(map(int, match.groups())) if match else (0, 0, 0)
        if size[0] < 2 or min(size) < 1:
            raise InputError(
                f"a size is TxBxd (steps, at least 2; samples; units), as in 100x20x50,200x64x128; got '{word}'."
            )
        found.append((size[0], size[1], size[2]))
    return tuple(found)


def parse_names(text: str) -> tuple[str, ...]:
    """'elman,gru' -> ('elman', 'gru'); 'none' -> ()"""
    return (
        ()
        if text.strip() in ("", "none")
        else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    )


def available_cores() -> set[int]:
    """The cores this process may use."""
    return (
        set(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


@contextlib.contextmanager
def pinned_threads(options: BenchOptions) -> Iterator[None]:
    """As many threads as asked for, each with a core; afterwards as before. A GPU's host code is left alone."""
    if options.device != "cpu":
        yield
        return
    before, allowed = torch.get_num_threads(), available_cores()
    torch.set_num_threads(options.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(allowed)[-options.threads :]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, allowed)
