"""Benchmark: the time of one training gradient, ours and the peers', and its share of what the machine can do.

    the gradient   of a network, elman, lstm or gru: cross-entropy at the last step, 6 inputs, 4 classes, float32; plain, or
                   penalised by the log-ratio
                   of a module, nn.RNN, nn.LSTM or nn.GRU: 2 layers, bidirectional, the sum of the squared outputs; plain, or
                   double: of the squared gradient by the inputs
    ours           BPTT, Penalised and co.nn through the public names, on the engine that "auto" picks
    torch          torch.nn.RNN, LSTM, GRU; on a GPU that is cuDNN, with tf32 and without, which has no double gradient: that
                   is torch.nn's without cuDNN
    autograd       a Python loop of torch's fused cells, differentiated twice (penalised)
    jax            a compiled scan, its gradient (plain) and the gradient of its gradient (penalised)
    hessian-free   one step of co.hessian_free beside what it cannot do without: for each iteration of conjugate gradients a
                   tangent, an adjoint and their two weight products, and the gradient; elman, on a CPU

Everyone starts from the same weights, drawn so that costates stay inside float32, where peers keep them; gradients are
compared before anything is timed. Contenders take turns, so that a busy machine disturbs all alike, and medians count.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from . import __version__, cells, files, sweeps
from . import nn as modules
from .batch import Batch
from .curvature import Curvature
from .errors import InputError, MissingError, StorageError, choose, said
from .gradients import BPTT, Penalised
from .hessian_free import HessianFree
from .initialisers import initialise
from .network import Network
from .sweeps.derivatives import affine, product

Size = tuple[int, int, int]  # T, B, d
Run = Callable[[], Mapping[str, Any]]  # one gradient, by parameter name
Tick = Callable[[float, int, str | None], None]  # rows done, of how many, what to say

INPUTS, OUTPUTS, RHO = 6, 4, 1.0
OURS = "ours"
METHODS = {"plain": BPTT(), "penalised": Penalised("log-ratio", RHO)}
PRODUCTS = {"plain": (2, 1), "penalised": (4, 2), "double": (4, 2)}  # sweeps and weight products of one gradient
PRODUCTS["plain tf32"] = PRODUCTS["plain"]
LAYERS, DIRECTIONS = 2, 2  # of a module
SIZES: dict[str, tuple[Size, ...]] = {
    "cpu": ((100, 20, 50), (200, 64, 128), (200, 64, 512)),
    "cuda": ((200, 64, 128), (200, 64, 256), (784, 128, 128), (200, 64, 512), (200, 64, 1024)),
}
MODULES: dict[str, Any] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
FUSED = {"elman": "rnn_tanh_cell", "lstm": "lstm_cell", "gru": "gru_cell"}
START = {
    "elman": (1.0, None),
    "lstm": (0.2, "f"),
    "gru": (0.2, "u"),
}  # the radius of W; the gate that keeps the state, open
TURN, TURNS = 50.0, 3000.0  # milliseconds: of one turn, and of all turns of a slow contender
MORE = {
    "cpu": "Above 100%: faster than calls of torch.mm.",
    "cuda": "of memory: the arrays it must move at the least, likewise. us/step: our time by steps and sweeps.",
}
QUIET = 0.9  # a process that had less of its core was disturbed
INSIDE = (True, False)  # JAX multiplies the inputs inside the scan, or before it
SAME = 0.05  # gradients further apart than this, tf32 or not, are of different functions


class Problem:
    """One cell at one size on one device: our network, the same weights in torch's module, a batch."""

    kinds: tuple[str, ...] = ("plain", "penalised")

    def __init__(self, cell: str, size: Size, device: str) -> None:
        self.cell, self.size, self.device = cell, size, device
        T, B, d = size
        draw = torch.Generator().manual_seed(0)
        self.net = Network(cell, inputs=INPUTS, hidden=d, outputs=OUTPUTS, output="softmax", dtype=torch.float32)
        radius, keeps = START[cell]
        initialise(self.net, "orthogonal", radius=radius, std=0.02)
        formula = cells.named(cell)
        if keeps is not None:
            with torch.no_grad():
                self.net.get_parameter("b").chunk(len(formula.gates))[formula.gates.index(keeps)].fill_(4.0)
        self.net.to(device)
        self.u = torch.randn(T, B, INPUTS, generator=draw).to(device)
        self.y = torch.randint(0, OUTPUTS, (B,), generator=draw).to(device)
        self.n = len(formula.slots) * d

    @property
    def engine(self) -> str:
        return str(self.net.engine)

    def contenders(self, peer: str) -> dict[str, dict[str, Run]]:
        return {OURS: ours, **PEERS}[peer](self)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.net.named_parameters()}

    def modules(self) -> tuple[nn.Module, nn.Linear, dict[str, Tensor]]:
        """torch's layer and readout with our weights, and their parameters under our names."""
        d, w = self.size[2], self.weights
        layer = MODULES[self.cell](INPUTS, d, device=self.device)
        head = nn.Linear(d, OUTPUTS, device=self.device)
        named = {
            "W": layer.weight_hh_l0, "R": layer.weight_ih_l0, "b": layer.bias_ih_l0, "V": head.weight, "b_o": head.bias,
        }  # fmt: skip
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(w[name])
            layer.bias_hh_l0.zero_()
            if "p.b_n" in w:
                layer.bias_hh_l0[2 * d :] = w["p.b_n"]
        return layer, head, named


def ours(p: Problem) -> dict[str, dict[str, Run]]:
    batch = Batch(p.u, p.y)
    take = lambda method: lambda: method(p.net, batch, "cross-entropy").gradient
    return {OURS: {kind: take(method) for kind, method in METHODS.items()}}


def torch_nn(p: Problem) -> dict[str, dict[str, Run]]:
    layer, head, named = p.modules()

    def plain() -> dict[str, Tensor]:
        loss = cross_entropy(head(layer(p.u)[0][-1]), p.y)
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    def with_tf32(on: bool) -> Run:
        def run() -> dict[str, Tensor]:
            torch.backends.cudnn.allow_tf32 = on
            return plain()

        return run

    if p.device == "cpu":
        return {"torch.nn": {"plain": plain}}
    return {"cuDNN tf32": {"plain": with_tf32(True)}, "cuDNN": {"plain": with_tf32(False)}}


def autograd_loop(p: Problem) -> dict[str, dict[str, Run]]:
    """The state is one node [h, c], so that lam^c is the costate and not the path through h."""
    layer, head, named = p.modules()
    d, step = p.size[2], getattr(torch._VF, FUSED[p.cell])
    weights: Any = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)

    def penalised() -> dict[str, Tensor]:
        x, states = p.u.new_zeros(len(p.y), p.n), []
        for u in p.u:
            x = torch.cat(step(u, x.split(d, 1), *weights), 1) if p.n > d else step(u, x, *weights)
            states.append(x)
        losses = cross_entropy(head(x[:, :d]), p.y, reduction="none")
        lam = torch.stack(torch.autograd.grad(losses.sum(), states, create_graph=True))
        norms = lam.norm(dim=2) + 1e-30
        penalty = (norms[:-1] / norms[1:]).log().square().mean(0)
        objective = (losses + RHO * penalty).mean()
        return dict(zip(named, torch.autograd.grad(objective, list(named.values())), strict=True))

    return {"autograd loop": {"penalised": penalised}}


def jax_scan(p: Problem) -> dict[str, dict[str, Run]]:
    """Costates are the gradient by a shift of each state. The inputs are multiplied inside the scan or before it: which
    is faster depends on the size, so both are tried and the faster one competes."""
    jax = load_jax(p.device)
    jnp, (T, B, d) = jax.numpy, p.size
    place = lambda y: jax.device_put(y.cpu().numpy(), jax.devices(p.device)[0])
    weights, u, y = {name: place(w) for name, w in p.weights.items()}, place(p.u), place(p.y)
    sigmoid, tanh = jax.nn.sigmoid, jnp.tanh

    def elman(w: Any, z: Any, v: Any, x: Any) -> Any:
        return tanh(z + v)

    def lstm(w: Any, z: Any, v: Any, x: Any) -> Any:
        i, f, g, o = jnp.split(z + v, 4, 1)
        c = sigmoid(f) * x[:, d:] + sigmoid(i) * tanh(g)
        return jnp.concatenate([sigmoid(o) * tanh(c), c], 1)

    def gru(w: Any, z: Any, v: Any, x: Any) -> Any:
        r, k = jnp.split(sigmoid(z[:, : 2 * d] + v[:, : 2 * d]), 2, 1)
        return (1 - k) * tanh(v[:, 2 * d :] + r * (z[:, 2 * d :] + w["p.b_n"])) + k * x

    f = {"elman": elman, "lstm": lstm, "gru": gru}[p.cell]

    def losses(w: Any, u: Any, y: Any, shift: Any, inside: bool) -> Any:
        drive = lambda u: u @ w["R"].T + w["b"]

        def step(x: Any, at: Any) -> tuple[Any, None]:
            x = f(w, x[:, :d] @ w["W"].T, drive(at[0]) if inside else at[0], x)
            return (x if at[1] is None else x + at[1]), None

        x, _ = jax.lax.scan(step, jnp.zeros((B, p.n), u.dtype), (u if inside else drive(u), shift))
        logs = jax.nn.log_softmax(x[:, :d] @ w["V"].T + w["b_o"])
        return -jnp.take_along_axis(logs, y[:, None], 1)[:, 0]

    def plain(w: Any, u: Any, y: Any, inside: bool) -> Any:
        return losses(w, u, y, None, inside).mean()

    def penalised(w: Any, u: Any, y: Any, inside: bool) -> Any:
        def total(shift: Any) -> tuple[Any, Any]:
            values = losses(w, u, y, shift, inside)
            return values.sum(), values

        lam, values = jax.grad(total, has_aux=True)(jnp.zeros((T, B, p.n), u.dtype))
        norms = jnp.sqrt((lam**2).sum(2)) + 1e-30
        return (values + RHO * (jnp.log(norms[:-1] / norms[1:]) ** 2).mean(0)).mean()

    def run(objective: Any, inside: bool) -> Run:
        gradient = jax.jit(jax.grad(functools.partial(objective, inside=inside)))
        return lambda: jax.block_until_ready(gradient(weights, u, y))

    fastest = lambda objective: min((run(objective, inside) for inside in INSIDE), key=lambda r: best(r, p.device, 1))
    return {"JAX scan": {"plain": fastest(plain), "penalised": fastest(penalised)}}


PEERS: dict[str, Callable[[Problem], dict[str, dict[str, Run]]]] = {
    "torch": torch_nn,
    "autograd": autograd_loop,
    "jax": jax_scan,
}


class Stack:
    """A module at one size on one device: ours, and torch's with the same weights. On a GPU cuDNN may round to tf32, by
    default, and torch.mm, of which ours are made, may not: both are measured both ways."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        T, B, d = size
        draw = torch.Generator().manual_seed(0)
        self.device, self.u = device, torch.randn(T, B, INPUTS, generator=draw).to(device).requires_grad_()
        make = getattr(nn, name.removeprefix("nn."))
        self.theirs = make(INPUTS, d, num_layers=LAYERS, bidirectional=DIRECTIONS == 2, device=device)
        self.ours = getattr(modules, make.__name__).from_torch(self.theirs)
        self.kinds = ("plain", "double") if device == "cpu" else ("plain", "plain tf32", "double")

    @property
    def engine(self) -> str:
        return str(self.ours.engine)

    def plain(self, module: nn.Module) -> dict[str, Tensor]:
        return self.gradient(module, module(self.u)[0].square().sum())

    def double(self, module: nn.Module) -> dict[str, Tensor]:
        by_u = torch.autograd.grad(module(self.u)[0].square().sum(), self.u, create_graph=True)[0]
        return self.gradient(module, by_u.square().sum())

    def gradient(self, module: nn.Module, value: Tensor) -> dict[str, Tensor]:
        named = {"u": self.u, **dict(module.named_parameters())}
        return dict(zip(named, torch.autograd.grad(value, list(named.values()), allow_unused=True), strict=True))

    def unfused(self) -> dict[str, Tensor]:
        """cuDNN and oneDNN have no second derivative."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oneDNN's switch speaks of other processors
            with torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False):
                return self.double(self.theirs)

    def rounded(self, module: nn.Module) -> dict[str, Tensor]:
        with tf32(True):
            return self.plain(module)

    def contenders(self, peer: str) -> dict[str, dict[str, Run]]:
        on_gpu = self.device == "cuda"
        if peer == OURS:
            ours, rounded, twice = (
                self.ours,
                copy.deepcopy(self.ours),
                copy.deepcopy(self.ours),
            )  # each is recorded apart
            found: dict[str, Run] = {"plain": lambda: self.plain(ours), "double": lambda: self.double(twice)}
            return {OURS: found | ({"plain tf32": lambda: self.rounded(rounded)} if on_gpu else {})}
        if peer != "torch":
            return {}
        plain: Run = lambda: self.plain(self.theirs)
        if not on_gpu:
            return {"torch.nn": {"plain": plain, "double": self.unfused}}
        less: Run = lambda: self.rounded(self.theirs)
        return {
            "cuDNN tf32": {"plain": less, "plain tf32": less},
            "cuDNN": {"plain": plain},
            "torch.nn without cuDNN": {"double": self.unfused},
        }


SUBJECTS: dict[str, type[Problem] | type[Stack]] = {
    **dict.fromkeys(MODULES, Problem),
    **dict.fromkeys(("nn.RNN", "nn.LSTM", "nn.GRU"), Stack),
}
FORMULAS = {"nn.RNN": "elman", "nn.LSTM": "lstm", "nn.GRU": "gru"}
STEP, STEP_SIZE, ITERATIONS, MOST = "hessian-free", (100, 200, 100), 50, 1.1  # a step, and how much it may cost


def load_jax(device: str) -> Any:
    """JAX for one device: on a CPU with one thread (these words count before its first import), on a GPU without taking
    all memory."""
    if device == "cpu" and torch.get_num_threads() == 1:
        single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        if single not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
    except ImportError:
        raise MissingError("jax is not installed: pip install 'coadjoint[bench]'.") from None
    try:
        jax.devices(device)
    except RuntimeError:
        raise MissingError(f"jax {jax.__version__} finds no device '{device}'.") from None
    return jax


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Whether cuDNN and cuBLAS may round products of float32 to tf32; afterwards as before."""
    backends: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch has a second name for the same switch
        before = [b.allow_tf32 for b in backends]
        for b in backends:
            b.allow_tf32 = on
        try:
            yield
        finally:
            for b, value in zip(backends, before, strict=True):
                b.allow_tf32 = value


def apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The largest relative difference of two gradients, over the parameters they share."""
    found = 0.0
    for name in set(a) & set(b):
        x, y = (np.asarray(g.cpu() if isinstance(g, Tensor) else g, dtype=np.float64) for g in (a[name], b[name]))
        difference, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
        found = max(found, difference / size if size > 0 else difference)
        if not np.isfinite(difference):
            return float("inf")
    return found


def clock(run: Callable[[], object], calls: int, device: str) -> float:
    """Milliseconds of one call, from `calls` in a row; on a GPU between two events."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return 1e3 * (time.perf_counter() - began) / calls


def interleaved(
    runs: Mapping[Any, Callable[[], object]],
    rounds: int,
    device: str,
    tick: Callable[[float], None] = lambda share: None,
) -> dict[Any, list[float]]:
    """Milliseconds of a call, for each turn of each contender. In every round each has one turn, of as many calls as
    fill it; one that is slow sits out the later rounds."""
    one = {key: max(clock(run, 1, device), 1e-3) for key, run in runs.items()}
    calls = {key: max(1, min(20, int(TURN / ms))) for key, ms in one.items()}
    turns = {key: min(rounds, max(3, int(TURNS / ms))) for key, ms in one.items()}
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for i in range(rounds):
        for key, run in runs.items():
            if i < turns[key]:
                times[key].append(clock(run, calls[key], device))
        tick((i + 1) / rounds)
    return times


def best(run: Callable[[], object], device: str, turns: int = 5) -> float:
    """Milliseconds of a call in its best turn: what the machine can do."""
    run()
    calls = max(1, min(1000, int(TURN / max(clock(run, 1, device), 1e-4))))
    return min(clock(run, calls, device) for _ in range(turns))


def gemm(rows: int, inner: int, columns: int, device: str) -> float:
    """GFLOP/s of one float32 product."""
    a, b = torch.randn(rows, inner, device=device), torch.randn(inner, columns, device=device)
    out = torch.empty(rows, columns, device=device)
    return 2e-6 * rows * inner * columns / best(lambda: torch.mm(a, b, out=out), device)


def limits(device: str) -> dict[str, float]:
    """What this machine can do: large float32 products, memory, and on a GPU the launch of a kernel."""
    if device == "cpu":
        return {"GEMM GFLOP/s": gemm(1024, 1024, 1024, device), "memory GB/s": bandwidth(2**25, device)}
    found = {}
    for name, on in (("GEMM GFLOP/s", False), ("GEMM GFLOP/s with tf32", True)):
        with tf32(on):
            found[name] = gemm(8192, 8192, 8192, device)
    one = torch.zeros(1, device=device)
    return found | {
        "memory GB/s": bandwidth(2**28, device),
        "kernel launch us": 1e3 * best(lambda: one.add_(1.0), device),
    }


def bandwidth(entries: int, device: str) -> float:
    """GB/s of a large array, read and written."""
    y = torch.zeros(entries, device=device)
    return 2e-6 * y.nbytes / best(lambda: y.add_(1.0), device)


def layers(cell: str, size: Size) -> list[int]:
    """The inputs of each sweep's layer that are as many as units, or none where they are few."""
    d = size[2]
    return [width for width in (0, DIRECTIONS * d)[:LAYERS] for _ in range(DIRECTIONS)] if cell in FORMULAS else [0]


def flops(cell: str, size: Size, kind: str) -> float:
    """What a gradient must multiply and add: every sweep and every weight product is T B rows times W, [g d, d], and as
    many products with the input weights of a layer that reads another."""
    (T, B, d), g = size, len(cells.named(FORMULAS.get(cell, cell)).gates)
    return sum(sum(PRODUCTS[kind]) * 2.0 * T * B * g * d * (d + inputs) for inputs in layers(cell, size))


def traffic(cell: str, size: Size, kind: str) -> float:
    """Bytes a gradient must move at the least: a sweep reads one array of gates and writes one of states, or the other
    way round; a weight product reads one of each; a product with input weights has both."""
    (T, B, d), formula = size, cells.named(FORMULAS.get(cell, cell))
    sweep, product = len(formula.gates) + len(formula.slots), len(formula.gates) + 1
    count = PRODUCTS[kind]
    own = d * (count[0] * sweep + count[1] * product)
    read = [sum(count) * (inputs + len(formula.gates) * d) if inputs else 0 for inputs in layers(cell, size)]
    return 4.0 * T * B * sum(own + more for more in read)


@dataclass(frozen=True)
class Row:
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
    def other(self) -> str:
        """The gradient that is not plain: "penalised" or "double"."""
        return list(self.ms)[-1]

    def to_plain(self, peer: str) -> float | None:
        """The peer's plain gradient by our other one."""
        theirs = self.ms["plain"].get(peer)
        return None if theirs is None else theirs / self.ms[self.other][OURS]

    @property
    def cost(self) -> float:
        """The other gradient in plain ones."""
        return self.ms[self.other][OURS] / self.ms["plain"][OURS]

    def share(self, kind: str) -> float:
        """The time of the products alone, by our time."""
        return 1e-6 * flops(self.cell, self.size, kind) / self.rate / self.ms[kind][OURS]

    def memory_share(self, kind: str) -> float:
        return 1e-6 * traffic(self.cell, self.size, kind) / self.memory / self.ms[kind][OURS]

    def step(self, kind: str) -> float:
        """Microseconds of one step of one sweep."""
        return 1e3 * self.ms[kind][OURS] / (PRODUCTS[kind][0] * self.size[0] * len(layers(self.cell, self.size)))

    def strange(self) -> list[str]:
        """Peers that failed, or whose gradient is not ours, in words."""
        return [f"{self.name}: {what} failed: {why}" for what, why in self.failed.items()] + [
            f"{self.name}: the {kind} gradient of {peer} differs from ours by {value:.1e}"
            for kind, found in self.differs.items() for peer, value in found.items() if not value < SAME
        ]  # fmt: skip

    def plain_data(self) -> dict[str, Any]:
        T, B, d = self.size
        return {
            "cell": self.cell, "T": T, "B": B, "d": d, "engine": self.engine,
            f"{self.other} in plain gradients": self.cost,
            "ours is faster by": {k: {q: r for q in self.peers if (r := self.ratio(k, q))} for k in self.ms},
            f"ours {self.other} is faster than plain by": {q: r for q in self.peers if (r := self.to_plain(q))},
            "ms": self.ms,
            "gradients differ by": {k: {q: finite(v) for q, v in found.items()} for k, found in self.differs.items()},
            "failed": self.failed, "GEMM GFLOP/s": self.rate,
            "share of GEMM": {k: self.share(k) for k in self.ms},
            "share of memory": {k: self.memory_share(k) for k in self.ms},
            "us for a step of a sweep": {k: self.step(k) for k in self.ms},
        }  # fmt: skip


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def measure(cell: str, size: Size, options: Options, found: Mapping[str, float], tick: Callable[[float], None]) -> Row:
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
            differs[kind][name] = apart(gradients[kind, OURS], gradient)
    runs = {key: runs[key] for key in gradients}
    del gradients
    for (kind, name), times in interleaved(runs, options.repeat, device, tick).items():
        ms[kind][name] = statistics.median(times)
    (_, B, d), gates = size, len(cells.named(FORMULAS.get(cell, cell)).gates)
    rate = gemm(B, d, gates * d, device) if device == "cpu" else found["GEMM GFLOP/s"]
    peers = tuple(name for name in contenders if name != OURS)
    return Row(cell, size, problem.engine, peers, ms, differs, failed, rate, found["memory GB/s"])


@dataclass(frozen=True)
class Step:
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
        limit = f"; at most {MOST:.2f}x is asked for" if self.size == STEP_SIZE else ""
        return (
            f"{STEP} {'x'.join(map(str, self.size))}: a step of {self.iterations} iterations takes {figure(self.ms)} ms, {self.ratio:.2f}x of "
            f"{self.iterations} x (tangent + adjoint + their two weight products) + the gradient, {figure(self.parts)} ms{limit}."
        )

    def plain_data(self) -> dict[str, Any]:
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


def measure_step(size: Size, rounds: int) -> Step:
    """Both in turns, the least of each: a step begun at the last solution, as all but the first are."""
    p = Problem("elman", size, "cpu")
    batch, way = Batch(p.u, p.y), HessianFree(cg=ITERATIONS, progress=0.0)
    begin = {name: y.clone() for name, y in p.weights.items()}
    way.step(p.net, batch, "cross-entropy")
    state, taken = dict(way.state), []
    (_, B, d), w = size, Curvature(p.net, batch, "cross-entropy").weights
    plan, tape, W = w.swept.plan, w.swept.tape, p.weights["W"]
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
                mu, _ = plan.engine.tangent(plan, tape, W, None, ga, None)
                _, delta, _ = plan.engine.adjoint(plan, tape, W, mu, of_last, None, None, False, False)
                product(w.rows, delta, w.known)
        BPTT()(p.net, batch, "cross-entropy")

    times = [(clock(step, 1, "cpu"), clock(parts, 1, "cpu")) for _ in range(rounds + 1)][1:]  # the first warms up
    return Step(size, p.engine, taken[-1], *(min(each) for each in zip(*times, strict=True)))


@dataclass(frozen=True)
class Options:
    """What to measure. `sizes` (): the device's own; `threads` of a CPU."""

    device: str = "cpu"
    cells: tuple[str, ...] = (*SUBJECTS, STEP)
    sizes: tuple[Size, ...] = ()
    peers: tuple[str, ...] = tuple(PEERS)
    repeat: int = 9
    threads: int = 1

    def __post_init__(self) -> None:
        choose("device", self.device, SIZES)
        for kind, names, known in (("cell", self.cells, (*SUBJECTS, STEP)), ("peer", self.peers, PEERS)):
            for name in names:
                choose(kind, name, known)
        if not self.cells:
            raise InputError(f"no cell to measure; name some of {', '.join((*SUBJECTS, STEP))}.")
        if self.cells == (STEP,) and self.device != "cpu":
            raise InputError(f"'{STEP}' is measured on a CPU; got device '{self.device}'.")
        if not self.sizes:
            object.__setattr__(self, "sizes", SIZES[self.device])
        if self.repeat < 1:
            raise InputError(f"repeat must be at least 1; got {self.repeat}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise MissingError("device 'cuda': torch finds no GPU here. Use device 'cpu'.")
        if self.device == "cpu" and not 1 <= self.threads <= len(cores()):
            raise InputError(f"threads must lie in 1..{len(cores())}, the cores of this process; got {self.threads}.")

    @property
    def steps(self) -> tuple[Size, ...]:
        """The sizes of Hessian-free steps."""
        if STEP not in self.cells or self.device != "cpu":
            return ()
        return (STEP_SIZE,) if self.sizes == SIZES[self.device] else self.sizes

    @property
    def command(self) -> str:
        """The command line that asks for this."""
        words = [f"coadjoint bench --device {self.device}"]
        if self.sizes != SIZES[self.device]:
            words.append("--sizes " + ",".join("x".join(map(str, size)) for size in self.sizes))
        for flag in ("cells", "peers"):
            if getattr(self, flag) != Options.__dataclass_fields__[flag].default:
                words.append(f"--{flag} {','.join(getattr(self, flag)) or 'none'}")
        for flag in ("repeat", "threads"):
            if getattr(self, flag) != Options.__dataclass_fields__[flag].default:
                words.append(f"--{flag} {getattr(self, flag)}")
        return " ".join(words)


def read_sizes(text: str) -> tuple[Size, ...]:
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


def read_names(text: str) -> tuple[str, ...]:
    """'elman,gru' -> ('elman', 'gru'); 'none' -> ()"""
    return () if text.strip() in ("", "none") else tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def cores() -> set[int]:
    """The cores this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@contextlib.contextmanager
def pinned(options: Options) -> Iterator[None]:
    """As many threads as asked for, each with a core; afterwards as before. A GPU's host code is left alone."""
    if options.device != "cpu":
        yield
        return
    before, allowed = torch.get_num_threads(), cores()
    torch.set_num_threads(options.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(allowed)[-options.threads :]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class Result:
    """All that was measured, and where."""

    options: Options
    machine: dict[str, Any]
    limits: dict[str, float]
    rows: tuple[Row, ...]
    steps: tuple[Step, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)  # peers that are not here, and why
    interrupted: bool = False
    attention: float = 1.0  # the share of the time that the one core worked for this process; 1 where there are more

    def json(self) -> str:
        data = {
            "command": self.options.command, "coadjoint": __version__, "device": self.options.device,
            "penalty": f"{RHO:g} log-ratio", "repeat": self.options.repeat,
            "machine": self.machine, "limits": self.limits, "missing": self.missing,
            "interrupted": self.interrupted, "share of its core": self.attention, "rows": [row.plain_data() for row in self.rows],
            STEP: [step.plain_data() for step in self.steps],
        }  # fmt: skip
        return json.dumps(data, indent=1) + "\n"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Ratios first, milliseconds beside, then the shares of the machine's limits."""
        peers = list(dict.fromkeys(peer for row in self.rows for peer in row.peers))
        Column = Callable[[Row, str], str]
        versus: Callable[[str], Column] = lambda peer: lambda row, kind: against(row, kind, peer)
        times: Callable[[str], Column] = lambda name: lambda row, kind: figure(row.ms[kind].get(name))
        columns: dict[str, Column] = {
            "cell": lambda row, kind: row.cell,
            "T, B, d": lambda row, kind: ", ".join(map(str, row.size)),
            "gradient": lambda row, kind: kind,
            **{f"vs {peer}": versus(peer) for peer in peers},
            "costs": lambda row, kind: f"{row.cost:.2f} plain" if kind == row.other else "",
            **{f"ms {name}": times(name) for name in (OURS, *peers)},
            "of GEMM": lambda row, kind: f"{row.share(kind):.0%}" if "tf32" not in kind else "",
        }
        if self.options.device == "cuda":
            columns["of memory"] = lambda row, kind: f"{row.memory_share(kind):.0%}"
            columns["us/step"] = lambda row, kind: f"{row.step(kind):.1f}"
        columns["differs"] = lambda row, kind: f"{max(found):.0e}" if (found := row.differs[kind].values()) else ""
        columns["engine"] = lambda row, kind: row.engine
        return list(columns), [[cell(row, kind) for cell in columns.values()] for row in self.rows for kind in row.ms]

    def notes(self) -> list[str]:
        """What the columns say, and what was left out."""
        gpu = self.options.device == "cuda"
        notes = [
            "vs: the peer's time by ours, above 1x ours is faster; * against the peer's plain gradient, for it has no other. "
            "costs: our penalised or double gradient in plain ones (arithmetic says 2).",
            "of GEMM: the products a gradient must do (plain: 2 sweeps and 1 weight product; penalised and double: 4 and 2; as many with the input weights of a second layer), at the rate of "
            + ("a large float32 torch.mm" if gpu else "torch.mm on [B, d] x [d, g d]")
            + f", by our time. {MORE[self.options.device]}",
            "differs: the largest relative difference between our gradient and a peer's.",
        ]
        if gpu and any(row.cell in FORMULAS for row in self.rows):
            notes.append(
                "plain tf32: the products of both rounded to tf32, ours by torch.set_float32_matmul_precision('high')."
            )
        if gpu and "jax" in self.options.peers and "jax" not in self.missing:
            notes.append("JAX multiplies at its default precision: tf32, where a GPU has it.")
        if "jax" in self.options.peers and "jax" not in self.missing:
            notes.append("JAX scan: the faster of two, the inputs multiplied inside the scan or before it.")
        if self.attention < QUIET:
            notes.append(
                f"The machine was busy: this process had {self.attention:.0%} of its core, so times are too long and ratios uncertain. Measure again when it is quiet."
            )
        notes = (notes if self.rows else []) + [str(step) for step in self.steps]
        notes += [f"peer '{peer}' left out: {why}" for peer, why in self.missing.items()]
        return notes + [line for row in self.rows for line in row.strange()]

    def where(self) -> str:
        """The machine in one line."""
        m, s = self.machine, "s" if self.options.threads > 1 else ""
        parts = {
            "cpu": f"{m['cpu']}, {m['cores']} cores, {m['threads']} pinned thread{s}",
            "cuda": f"{m.get('gpu')}, CUDA {m.get('cuda')}",
        }
        tools = [f"{name} {m[name]}" for name in ("torch", "cuDNN", "jax", "triton", "compiler") if name in m]
        rates = [f"{name} {value:,.{0 if value >= 100 else 1}f}" for name, value in self.limits.items()]
        return f"{', '.join([parts[self.options.device], *tools])}, float32. Measured here: {', '.join(rates)}"

    def markdown(self) -> str:
        """The section of this device in RESULTS.md."""
        heads, lines = self.table()
        row = lambda words: f"| {' | '.join(words)} |"
        return "\n".join(
            [
                f"## {'GPU' if self.options.device == 'cuda' else 'CPU'}", "", f"Written by `{self.options.command}`.", "",
                f"{self.where()}.", "", *([row(heads), "|---" * len(heads) + "|", *map(row, lines), ""] if lines else []),
                *(f"- {note}" for note in self.notes()),
            ]
        )  # fmt: skip


def figure(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def against(row: Row, kind: str, peer: str) -> str:
    """The ratio to the peer's gradient of that kind; with a star, to its plain one, where it has no other."""
    ratio, star = row.ratio(kind, peer), ""
    if ratio is None and kind == row.other:
        ratio, star = row.to_plain(peer), "*"
    return "" if ratio is None else f"{ratio:.2f}x{star}"


def run(options: Options, tick: Tick = lambda done, total, text: None) -> Result:
    """Measure all cells at all sizes. Ctrl-C ends it with what was measured so far."""
    rows: list[Row] = []
    missing: dict[str, str] = {}
    found: dict[str, float] = {}
    told: dict[str, Any] = {}
    interrupted = False
    grid = [(cell, size) for cell in options.cells if cell != STEP for size in options.sizes]
    total, steps = len(grid) + len(options.steps), []
    began, worked = time.perf_counter(), time.process_time()
    with pinned(options), tf32(False):
        try:
            present, missing = here(options)
            told = machine(options.device)
            for peer, why in missing.items():
                tick(0, total, f"peer '{peer}' left out: {why}")
            found = limits(options.device)
            for cell, size in grid:
                row = measure(cell, size, present, found, lambda share: tick(len(rows) + share, total, None))
                rows.append(row)
                tick(len(rows), total, "; ".join([summary(row), *row.strange()]))
            for size in options.steps:
                steps.append(measure_step(size, options.repeat))
                tick(len(rows) + len(steps), total, str(steps[-1]))
        except KeyboardInterrupt:
            interrupted = True
            told = told or machine(options.device)
    busy = (time.process_time() - worked) / (time.perf_counter() - began)
    attention = min(1.0, busy) if (options.device, options.threads) == ("cpu", 1) else 1.0
    return Result(options, told, found, tuple(rows), tuple(steps), missing, interrupted, attention)


def here(options: Options) -> tuple[Options, dict[str, str]]:
    """The options without the peers that this machine lacks, and why it lacks them."""
    missing = {}
    if "jax" in options.peers:
        try:
            load_jax(options.device)
        except MissingError as error:
            missing["jax"] = str(error)
    present = tuple(peer for peer in options.peers if peer not in missing)
    return Options(options.device, options.cells, options.sizes, present, options.repeat, options.threads), missing


def summary(row: Row) -> str:
    parts = []
    for kind, ms in row.ms.items():
        against = ", ".join(f"{r:.2f}x {peer}" for peer in row.peers if (r := row.ratio(kind, peer)))
        parts.append(f"{kind} {figure(ms[OURS])} ms" + (f" ({against})" if against else ""))
    return f"{row.name}: " + "; ".join(parts)


def machine(device: str) -> dict[str, Any]:
    """This machine and its software: no name of it, no paths."""
    found: dict[str, Any] = {
        "cpu": cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.system(),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
    }  # fmt: skip
    if sys.modules.get("jax") is not None:
        found["jax"] = sys.modules["jax"].__version__
    with contextlib.suppress(ImportError):
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

        found["triton"] = triton.__version__
    describe = getattr(sweeps.load("cpu"), "describe", None)
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


def explain(devices: Sequence[str], names: Sequence[str], sizes: Sequence[Size] = ()) -> list[str]:
    """Which engine "auto" picks for each cell on each device, why, and how it would be launched; nothing is timed."""
    lines = []
    for name in names:
        choose("cell", name, SUBJECTS)
    for device in devices:
        choose("device", device, SIZES)
        if device == "cuda" and not torch.cuda.is_available():
            lines.append("cuda: torch finds no GPU here.")
            continue
        about = machine(device)
        keys = (
            ("gpu", "cuda", "triton", "torch") if device == "cuda" else ("cpu", "cores", "threads", "compiler", "torch")
        )
        lines.append(f"{device}: " + ", ".join(f"{key} {about.get(key, 'not found')}" for key in keys))
        for name in names:
            cell = cells.named(FORMULAS.get(name, name))
            choice = sweeps.resolve("auto", cell, device)
            lines.append(f"  {name}: engine '{choice}': {choice.why}")
            geometry: Any = getattr(sweeps.load(choice), "explain", None)
            for _, B, d in dict.fromkeys((0, B, d) for _, B, d in sizes or SIZES[device]) if geometry else ():
                lines.append(f"    B {B}, d {d}: {geometry(cell, d, B, torch.float32)}")
    return lines


HEADER = """# Benchmarks

One training gradient, ours and the peers', in one run; `coadjoint bench --help` says how to ask for it. Each section is
written by the command it names, on the machine it names, and replaced by the next run on such a device.
"""


def write(path: Path, result: Result) -> None:
    """Put the result's section into the page in place of the device's old one; everything else stays as it is."""
    begin, end = (f"<!-- {word}bench {result.options.device} -->" for word in ("", "end of "))
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else HEADER
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {said(error)}.") from None
    section = f"{begin}\n{result.markdown()}\n{end}"
    if (begin in text) != (end in text):
        raise InputError(f"{path} holds only one of the marks '{begin}' and '{end}'; put the other one back.")
    if begin in text:
        head, rest = text.split(begin, 1)
        text = head + section + rest.split(end, 1)[-1]
    else:
        text = text.rstrip("\n") + f"\n\n{section}\n"
    files.replace(path, text)
