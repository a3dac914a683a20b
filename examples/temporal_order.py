"""One small RNN, trained twice from the same start, in which the gradient vanishes; and a plot.

    python examples/temporal_order.py [--length 50] [--radius 0.5] [--weight 2]
                                      [--seed 0] [--out demo]

This does in Python what `coadjoint demo` does on the command line: it trains the network by plain
and by penalised backpropagation. With a spectral radius of 0.5 the gradient of the first symbol is
10^-12 times that of the last step, so plain backpropagation has nothing to learn from. The penalty
keeps the costates at the same size from step to step.
"""

import argparse
import math
from pathlib import Path

import torch

import coadjoint as co


def log_norms(net, task):
    """The mean over sequences of log10 ||lam_t||, t = 0..T."""
    batch = next(task.held_out("test", seed=1, n=256))
    with torch.no_grad():
        lam = net(batch.u).costates(task.loss, batch.y)
    return lam.log_norms().mean(1) / math.log(10)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=50, help="steps of a sequence, at least 10")
    parser.add_argument(
        "--radius", type=float, default=0.5, help="spectral radius of W to begin with"
    )
    parser.add_argument("--weight", type=float, default=2.0, help="rho, the weight of the penalty")
    parser.add_argument("--steps", type=int, default=4000, help="at most so many for each method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot")
    args = parser.parse_args()
    torch.set_num_threads(1)  # arrays this small are slower on several
    curves = {}
    try:
        task = co.tasks.TemporalOrder(args.length)
        for name, gradient in (
            ("plain", co.BPTT()),
            ("penalised", co.Penalised("log-ratio", args.weight)),
        ):
            net = co.Network(
                "elman", inputs=task.inputs, hidden=64, outputs=task.outputs, output=task.output
            )
            co.initialisers.initialise(net, "spectral", radius=args.radius, seed=args.seed)
            curves.setdefault("before training", log_norms(net, task))
            optimiser = co.optimisers.adam(2e-3)
            run = co.train(
                net,
                task,
                gradient=gradient,
                optimiser=optimiser,
                steps=args.steps,
                clip=1.0,
                seed=args.seed,
            )
            curves[f"after {name} backpropagation"] = log_norms(run.network, task)
            right = run.metrics["test"]["right"]
            print(
                f"{name:>9}: {right:.1%} correct after {run.step} steps, {run.seconds:.0f} s",
                flush=True,
            )
        args.out.mkdir(parents=True, exist_ok=True)
        plot(curves, args.out / "costates.png")
    except (co.CoadjointError, OSError) as error:
        parser.error(str(error))
    print(f"plot: {args.out / 'costates.png'}")


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for (name, curve), (colour, line) in zip(
        curves.items(), (("0.6", "--"), ("#b2182b", "-"), ("#2166ac", "-")), strict=True
    ):
        axes.plot(curve, color=colour, linestyle=line, label=name)
    axes.set(
        xlabel="time step t",
        ylabel=r"mean over sequences of $\log_{10}\|\lambda_t\|$",
        title="How far back the gradient reaches",
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
