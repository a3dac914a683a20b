"""An echo state network continues a chaotic series by itself.

    python examples/reservoir.py

A fixed random network of 300 units reads the Mackey-Glass series. Its readout predicts the next
value and is solved in closed form. Then the prediction is fed back as the input, and the network
runs freely. The costates show how far back the loss at the last step reaches, though nothing in the
network was trained.
"""

import math

import torch

import coadjoint as co
from coadjoint.networks.reservoir import Reservoir


def mackey_glass(T, tau=17, inner=10):
    """dx/dt = 0.2 x(t - tau) / (1 + x(t - tau)^10) - 0.1 x by Euler's steps of 1/inner; [T, 1, 1],
    less its mean.
    """
    x = [1.2] * (tau * inner + 1)
    for _ in range((T + 200) * inner):
        late = x[-1 - tau * inner]
        x.append(x[-1] + (0.2 * late / (1 + late**10) - 0.1 * x[-1]) / inner)
    series = torch.tensor(x[(tau + 200) * inner :: inner][:T], dtype=torch.float64)
    return (series - series.mean())[:, None, None]


def main():
    x = mackey_glass(3000)
    past, future = x[:2000], x[2000:]
    reservoir = Reservoir(
        1,
        300,
        1,
        radius=0.95,
        leak=0.7,
        density=0.05,
        bias_scale=0.2,
        washout=100,
        ridge=1e-9,
        dtype=torch.float64,
    )
    reservoir.fit(past[:-1], past[1:])
    one_step = math.sqrt(1 - reservoir.score(future[:-1], future[1:]))
    print(f"one step ahead: normalised error {one_step:.0e}")
    free = reservoir.generate(past, 1000)
    for steps in (84, 300, 1000):
        error = (free[:steps] - future[:steps]).square().mean().sqrt() / x.std()
        print(f"running free for {steps:>4} steps: normalised error {error:.3f}")
    last = torch.zeros(200, 1)
    last[-1] = 1  # the loss counts at the last step alone
    lam = reservoir(past[:200]).costates("squared", past[1:201], mask=last)
    reach = co.norm(lam.lam)[:, 0].flip(0) / co.norm(lam.lam[-1])[0]
    print(
        "reach of the loss, |lam_{T-k}| / |lam_T|: "
        + ", ".join(f"{reach[k]:.0e} at k = {k}" for k in (10, 50, 100))
    )


if __name__ == "__main__":
    main()
