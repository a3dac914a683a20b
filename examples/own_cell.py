"""A cell of your own is one formula in your own file.

    python examples/own_cell.py

This one is a leaky cell whose units adapt: a second slot follows the activity and is subtracted
from the drive. First and second derivatives follow from the formula, which runs on every engine.
The per-unit parameters are trained with the weights.
"""

import torch

import coadjoint as co


@co.cell(slots="h w", parameters={"leak": 0.3, "tau": 0.1, "gain": 0.5})
def adaptive(z, v, x, p):
    """h' = (1 - leak) h + leak tanh(W h + R u + b - gain w),  w' = w + tau (h' - w)"""
    h = (1 - p.leak) * x.h + p.leak * co.tanh(z + v - p.gain * x.w)
    return h, x.w + p.tau * (h - x.w)


def swish(a):
    """An activation is a function too: written with co's (or torch's) primitives."""
    return a * torch.sigmoid(a)


def main() -> None:
    torch.manual_seed(0)
    u = torch.randn(40, 16, 3, dtype=torch.float64)
    y = u[5].sum(-1, keepdim=True)  # remember step 6
    for net in (
        co.Network(adaptive, inputs=3, hidden=8, outputs=1, dtype=torch.float64),
        co.Network("elman", activation=swish, inputs=3, hidden=8, outputs=1, dtype=torch.float64),
    ):
        gradients = []
        for net.engine in ("cpu", "autograd"):
            lam = net(u).costates("squared", y)
            objective = (lam.loss + 0.1 * co.penalties.log_ratio(lam)).mean()
            gradients.append(torch.autograd.grad(objective, list(net.parameters())))
        apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(*gradients, strict=True))
        print(
            f"{net.cell.name:>8}: penalised gradients of the cpu and the autograd engine differ by "
            f"{apart:.0e}"
        )
        names = ", ".join(net.p) or "none"
        print(
            f"          parameters of the cell: {names}; log |lam_1| - log |lam_T| = "
            f"{lam.log_ratios()[1:].sum(0).mean():.1f}"
        )


if __name__ == "__main__":
    main()
