"""Thirty tanh layers on the digits, revived from a start in which the gradient vanishes; a plot.

    python examples/depth.py [--depth 30] [--gain 0.5] [--out demo]

The same network is trained twice from Gaussian weights of gain 0.5: plainly, and plainly after 300
steps that minimise the penalty `isometry` alone. At the start the costate of the input is 10^-9 of
that of the output, so that plain training stays at chance. An orthogonal start needs no penalty at
all: it is the default of co.Chain.mlp.
"""

import argparse
import math
from pathlib import Path

import torch

import coadjoint as co


def log_norms(net, task):
    """The mean over samples of log10 ||lam_i||, i = 0..L."""
    batch = net.move_batch(next(task.held_out("valid", seed=0)))
    lam = net(batch.u).costates(task.loss, batch.y)
    return lam.log_norms().detach().mean(1) / math.log(10)


def step(net, task, method, optimiser, number):
    """One training step."""
    batch = net.move_batch(task.batch(number, 64, 0))
    method(net, batch, task.loss).write_grad(net)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimiser.step()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=30, help="hidden layers")
    parser.add_argument("--gain", type=float, default=0.5, help="of the Gaussian start")
    parser.add_argument("--pretrain", type=int, default=300, help="steps of the penalty alone")
    parser.add_argument("--steps", type=int, default=1200, help="plain steps")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot")
    args = parser.parse_args()
    torch.set_num_threads(1)  # arrays this small are slower on several
    task = co.tasks.make("digits-flat")
    curves = {}
    for name, pretrain in (("plain", 0), ("isometry, then plain", args.pretrain)):
        net = co.Chain.mlp(
            64,
            [64] * args.depth,
            10,
            output="softmax",
            start="gaussian",
            gain=args.gain,
            seed=0,
        )
        curves.setdefault("before training", log_norms(net, task))
        adam = torch.optim.Adam(net.parameters(), 3e-3)
        isometry = co.Penalised("isometry", 1.0, pretrain=pretrain)
        for number in range(pretrain):
            step(net, task, isometry, adam, number)
        adam = torch.optim.Adam(net.parameters(), 1e-3)
        for number in range(pretrain, pretrain + args.steps):
            step(net, task, co.BP(), adam, number)
        accuracy = co.evaluate(net, task, "test")["accuracy"]
        print(f"{name}: test accuracy {accuracy:.3f}", flush=True)
        curves[f"after {name}"] = log_norms(net, task)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(curves, args.out / "depth.png")
    print(f"plot: {args.out / 'depth.png'}")


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    styles = (("0.6", "--"), ("#b2182b", "-"), ("#2166ac", "-"))
    for (name, curve), (colour, line) in zip(curves.items(), styles, strict=True):
        axes.plot(curve, color=colour, linestyle=line, label=name)
    axes.set(
        xlabel="layer i",
        ylabel=r"mean over samples of $\log_{10}\|\lambda_i\|$",
        title="How far down the gradient reaches",
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
