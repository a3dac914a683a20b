"""One small RNN, trained twice from the same vanishing start: by plain and by penalised backpropagation.

    python examples/temporal_order.py [--length 50] [--radius 0.5] [--weight 2] [--seed 0] [--out demo]

Temporal order (Hochreiter & Schmidhuber, 1997; generator as in Pascanu et al., 2013): in a sequence of distractors, one
of two symbols stands in the second tenth and another after the middle; the network names the pair, in order, at the end.
With a spectral radius of 0.5 the gradient of the first symbol is a million-millionth of that of the last step: plain
backpropagation has nothing to go by. The penalty asks that costates keep their size from step to step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import coadjoint as co

console = Console()


def temporal_order(length: int, batch: int, generator: torch.Generator) -> co.Batch:
    """6 one-hot symbols (2 that matter, 4 distractors), 4 classes v0 + 2 v1."""
    draw = lambda low, high, *size: torch.randint(low, high, size, generator=generator)
    symbols, rows = draw(2, 6, length, batch), torch.arange(batch)
    v0, v1 = draw(0, 2, batch), draw(0, 2, batch)
    symbols[draw(length // 10, length // 5, batch), rows] = v0
    symbols[draw(length // 2, 6 * length // 10, batch), rows] = v1
    return co.Batch(torch.nn.functional.one_hot(symbols, 6).float(), v0 + 2 * v1)


def network(units: int, radius: float, seed: int) -> co.Network:
    torch.manual_seed(seed)
    net = co.Network("elman", inputs=6, hidden=units, outputs=4, activation="tanh", output="softmax")
    co.initialisers.spectral_(net.W, radius)
    for weight in (net.R, net.V):
        co.initialisers.gaussian_(weight, 0.1)
    with torch.no_grad():
        net.b.zero_()
        net.b_o.zero_()
    return net


def accuracy(net: co.Network, length: int, generator: torch.Generator, samples: int = 2000) -> float:
    batch = temporal_order(length, samples, generator)
    with torch.no_grad():
        return (net(batch.u).a.argmax(-1) == batch.y).float().mean().item()


def log_norms(net: co.Network, length: int) -> torch.Tensor:
    """The mean over samples of log10 ||lam_t||, t = 0..T."""
    batch = temporal_order(length, 256, torch.Generator().manual_seed(1234))
    with torch.no_grad():
        lam = net(batch.u).costates("cross-entropy", batch.y)
    return lam.log_norms().mean(1) / torch.log(torch.tensor(10.0))


def train(name: str, gradient, args: argparse.Namespace) -> dict:
    net, data = network(args.units, args.radius, args.seed), torch.Generator().manual_seed(args.seed)
    fresh = torch.Generator().manual_seed(args.seed + 1)
    optimiser = torch.optim.Adam(net.parameters(), args.rate)
    start, score, step = time.perf_counter(), 0.0, 0
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=args.steps, note="")
        for step in range(1, args.steps + 1):
            e = gradient(net, temporal_order(args.length, args.batch, data), "cross-entropy")
            e.write_grad(net)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            if step % 100 == 0:
                score = accuracy(net, args.length, fresh)
                note = f"loss {e.loss.item():.3f}  right {score:6.1%}  |grad| {e.norm:.1e}"
                progress.update(task, completed=step, note=note)
                if not console.is_terminal and step % 500 == 0:
                    print(f"{name:>9} {step:5d}/{args.steps}  {note}", flush=True)
                if score >= 0.999:
                    break
    return {"net": net, "right": score, "steps": step, "seconds": time.perf_counter() - start}


def plot(before: torch.Tensor, after: dict[str, torch.Tensor], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    axes.plot(before, color="0.6", linestyle="--", label="before training")
    for (name, curve), colour in zip(after.items(), ("#b2182b", "#2166ac"), strict=True):
        axes.plot(curve, color=colour, label=f"after {name} backpropagation")
    axes.set(
        xlabel="time step t",
        ylabel=r"mean over samples of $\log_{10}\|\lambda_t\|$",
        title="How far back the gradient reaches",
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=50, help="steps of a sequence, at least 10")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--radius", type=float, default=0.5, help="spectral radius of W to begin with")
    parser.add_argument("--weight", type=float, default=2.0, help="rho, the weight of the penalty")
    parser.add_argument("--penalty", default="log-ratio")
    parser.add_argument("--rate", type=float, default=2e-3, help="Adam's step size")
    parser.add_argument("--steps", type=int, default=4000, help="at most so many steps for each method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot")
    args = parser.parse_args()
    if args.length < 10:
        parser.error(f"--length must be at least 10, so that each symbol has its window; got {args.length}")
    try:
        methods = {"plain": co.BPTT(), "penalised": co.Penalised(args.penalty, args.weight)}
        start = network(args.units, args.radius, args.seed)
        args.out.mkdir(parents=True, exist_ok=True)
    except (co.CoadjointError, OSError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)  # arrays this small are slower on several
    console.print(
        f"Temporal order, {args.length} steps: {args.units} tanh units, spectral radius {args.radius}, seed {args.seed}"
    )
    before = log_norms(start, args.length)
    runs = {name: train(name, method, args) for name, method in methods.items()}
    after = {name: log_norms(run["net"], args.length) for name, run in runs.items()}
    table = Table("backpropagation", "right", "steps", "seconds", "log10 |lam_1|/|lam_T|")
    for name, run in runs.items():
        decay = (after[name][1] - after[name][-1]).item()
        table.add_row(name, f"{run['right']:.1%}", f"{run['steps']}", f"{run['seconds']:.0f}", f"{decay:.1f}")
    console.print(table)
    plot(before, after, args.out / "costates.png")
    console.print(
        f"Before training log10 |lam_1|/|lam_T| was {(before[1] - before[-1]).item():.1f}. Plot: {args.out / 'costates.png'}"
    )


if __name__ == "__main__":
    main()
