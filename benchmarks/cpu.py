"""One table, one run, one thread: plain and penalised gradients on a CPU, ours and torch's.

    python benchmarks/cpu.py [--cells elman lstm gru] [--rounds 7] [--json results.json] [--quick]

Contenders, all from the same weights, for cross-entropy at the last step (and variance of the costate norms):

    torch.nn   plain      torch.nn.RNN / LSTM / GRU, forward and backward
    loop       penalised  torch's fused cell in a Python loop, autograd of autograd (create_graph)
    ours       plain      forward, adjoint
    ours       penalised  forward, adjoint (scale-free), tangent, adjoint

Contenders take turns in every round, some calls in a row, and the best call of each counts: a busy machine disturbs all
alike.
Denormals are flushed for everyone; the last table repeats the largest Elman network with torch's default, under which
vanishing costates become denormal. Gradients are compared before anything is timed. Memory is the peak of a fresh
process above its level before, in units of one array [T, B, n] of states.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import coadjoint as co

SIZES = ((100, 20, 50), (200, 64, 128), (200, 64, 512))
INPUTS, OUTPUTS, RHO = 6, 4, 1e4
MODULES = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
FUSED = {"elman": torch._VF.rnn_tanh_cell, "lstm": torch._VF.lstm_cell, "gru": torch._VF.gru_cell}
console = Console(width=160)


def variance(norms: Tensor) -> Tensor:
    return (norms - norms.mean(0)).square().mean(0)


class Problem:
    """One cell at one size, in our network and in torch's module, with the same weights."""

    def __init__(self, cell: str, T: int, B: int, d: int) -> None:
        torch.manual_seed(0)
        self.cell, self.T, self.B, self.d = cell, T, B, d
        self.module = MODULES[cell](INPUTS, d)
        self.head = nn.Linear(d, OUTPUTS)
        self.u, self.y = torch.randn(T, B, INPUTS), torch.randint(0, OUTPUTS, (B,))
        self.net = co.Network(cell, inputs=INPUTS, hidden=d, outputs=OUTPUTS, output="softmax")
        with torch.no_grad():
            bias, recurrent = self.module.bias_ih_l0 + self.module.bias_hh_l0, self.module.bias_hh_l0
            if cell == "gru":
                bias = torch.cat([bias[: 2 * d], self.module.bias_ih_l0[2 * d :]])
                self.net.p["b_n"].copy_(recurrent[2 * d :])
            for ours, theirs in (("W", self.module.weight_hh_l0), ("R", self.module.weight_ih_l0), ("b", bias)):
                getattr(self.net, ours).copy_(theirs)
            self.net.V.copy_(self.head.weight)
            self.net.b_o.copy_(self.head.bias)

    @property
    def contenders(self) -> dict[str, Callable[[], None]]:
        return {
            "torch.nn plain": self.torch_plain,
            "ours plain": self.plain,
            "loop penalised": self.loop,
            "ours penalised": self.penalised,
        }

    def torch_plain(self) -> None:
        self.module.zero_grad()
        self.head.zero_grad()
        out, _ = self.module(self.u)
        nn.functional.cross_entropy(self.head(out[-1]), self.y).backward()

    def plain(self) -> None:
        self.net.zero_grad()
        self.net(self.u).loss("cross-entropy", self.y).mean().backward()

    def loop(self) -> None:
        """The state is one node [h, c], so that lam^c is the costate and not the path through h."""
        self.module.zero_grad()
        self.head.zero_grad()
        m, d = self.module, self.d
        weights = (m.weight_ih_l0, m.weight_hh_l0, m.bias_ih_l0, m.bias_hh_l0)
        x = torch.zeros(self.B, 2 * d if self.cell == "lstm" else d)
        states = []
        for u in self.u:
            x = (
                torch.cat(FUSED["lstm"](u, (x[:, :d], x[:, d:]), *weights), 1)
                if self.cell == "lstm"
                else FUSED[self.cell](u, x, *weights)
            )
            states.append(x)
        loss = nn.functional.cross_entropy(self.head(x[:, :d]), self.y, reduction="none")
        lam = torch.stack(torch.autograd.grad(loss.sum(), states, create_graph=True))
        (loss + RHO * variance(lam.norm(dim=2))).mean().backward()

    def penalised(self) -> None:
        self.net.zero_grad()
        lam = self.net(self.u).costates("cross-entropy", self.y)
        (lam.loss + RHO * co.penalties.variance(lam)).mean().backward()

    def check(self) -> float:
        """The relative difference of the two penalised (and plain) gradients by W."""
        worst = 0.0
        for theirs, ours in ((self.torch_plain, self.plain), (self.loop, self.penalised)):
            theirs()
            ours()
            expected = self.module.weight_hh_l0.grad
            worst = max(worst, ((self.net.W.grad - expected).norm() / expected.norm()).item())
        return worst


def best(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of each contender's best call; a turn is some calls in a row, about 0.2 s, as training makes them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, run in contenders.items():
            for _ in range(1 if i == 0 else max(1, min(20, int(200 / times[name][0])))):
                start = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(ms[1:]) for name, ms in times.items()}


def memory(cell: str, size: tuple[int, int, int], name: str) -> float:
    """The peak of `name` in a fresh process, in arrays [T, B, n]."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cpu; print(cpu.peak({cell!r}, {size!r}, {name!r}))"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def peak(cell: str, size: tuple[int, int, int], name: str) -> float:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    Problem(cell, 5, 2, 3).contenders[name]()
    run = Problem(cell, *size).contenders[name]
    lines = lambda: Path("/proc/self/status").read_text().splitlines()
    status = lambda key: next(int(line.split()[1]) for line in lines() if line.startswith(key)) * 1024
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    T, B, d = size
    return (status("VmHWM") - before) / (4 * T * B * d * (2 if cell == "lstm" else 1))


def gemm_rate(B: int, d: int) -> float:
    """GFLOP/s of one recurrent product [B, d] x [d, d]: the limit of every sweep."""
    x, W, out = torch.randn(B, d), torch.randn(d, d), torch.empty(B, d)
    ms = best({"mm": lambda: [torch.mm(x, W, out=out) for _ in range(50)] and None}, 5)["mm"] / 50
    return 2e-6 * B * d * d / ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--quick", action="store_true", help="the smallest size only, without memory")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    sizes = SIZES[:1] if args.quick else SIZES
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one pinned thread, float32; best of {args.rounds} rounds"
    )
    rows = []
    table = Table(
        "cell",
        "T, B, d",
        "plain: ours vs torch.nn",
        "penalised: ours vs loop",
        "penalised vs plain",
        "ms torch.nn",
        "ms ours",
        "ms loop",
        "ms ours pen.",
        "share of GEMM limit",
    )
    for cell in args.cells:
        for size in sizes:
            problem = Problem(cell, *size)
            apart = problem.check()
            assert apart < 1e-3, f"{cell} {size}: gradients differ by {apart:.1e}"
            ms = best(problem.contenders, args.rounds if size[2] < 512 else max(3, args.rounds // 2))
            T, B, d = size
            gates = {"elman": 1, "lstm": 4, "gru": 3}[cell]
            limit = 6 * 2e-6 * T * B * d * d * gates / gemm_rate(B, d)
            row = {"cell": cell, "size": size, "ms": ms, "gradients differ by": apart, "limit ms": limit}
            rows.append(row)
            a, b, c, e = (ms[k] for k in ("torch.nn plain", "ours plain", "loop penalised", "ours penalised"))
            table.add_row(
                cell,
                f"{T}, {B}, {d}",
                f"{a / b:.2f}x",
                f"{c / e:.2f}x",
                f"{e / b:.2f}x",
                f"{a:.1f}",
                f"{b:.1f}",
                f"{c:.1f}",
                f"{e:.1f}",
                f"{limit / e:.0%}",
            )
    console.print(table)
    console.print(
        "share of GEMM limit: the time of four sweeps and two weight products at the speed of torch.mm alone, over ours penalised."
    )
    result: dict = {"rows": rows}
    if not args.quick:
        result["memory"] = show_memory(args.cells)
        if "elman" in args.cells:
            result["defaults"] = show_defaults()
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str))


def show_memory(cells: list[str]) -> dict:
    names = list(Problem("elman", 2, 1, 1).contenders)
    table = Table("peak memory, arrays [T, B, n]", *names)
    found = {cell: {name: memory(cell, SIZES[-1], name) for name in names} for cell in cells}
    for cell, peaks in found.items():
        table.add_row(f"{cell} {SIZES[-1]}", *(f"{v:.1f}" for v in peaks.values()))
    console.print(table)
    return found


def show_defaults() -> dict:
    """Denormals as torch leaves them: switched on."""
    torch.set_flush_denormal(False)
    problem = Problem("elman", *SIZES[-1])
    ms = best({k: v for k, v in problem.contenders.items() if "loop" not in k}, 1)
    torch.set_flush_denormal(True)
    table = Table("torch's defaults, elman " + str(SIZES[-1]), *ms, "plain: ours vs torch.nn")
    table.add_row("ms", *(f"{v:.0f}" for v in ms.values()), f"{ms['torch.nn plain'] / ms['ours plain']:.1f}x")
    console.print(table)
    return ms


if __name__ == "__main__":
    main()
