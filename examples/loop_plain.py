"""Penalised backpropagation in your own training loop: two more lines.

    python examples/loop_plain.py [steps]

The task: which symbols came at two marked times, and in which order? With small recurrent weights
the gradient of the first symbol has vanished before it gets there. The penalty keeps the costates
at the same size from step to step.
"""

import sys

import torch
from torch.nn.functional import cross_entropy

import coadjoint as co

TASK = co.tasks.TemporalOrder(30)


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = co.nn.RNN(TASK.inputs, 32), torch.nn.Linear(32, TASK.outputs)
        co.initialisers.spectral_(self.rnn.weight_hh_l0, 0.4)

    def forward(self, u):
        return self.out(self.rnn(u)[0][-1])


def batch(step):
    """u [T, B, 6], y [B]: what a loader would give."""
    drawn = TASK.batch(step, 20, seed=0)
    return drawn.u, drawn.y


def train(steps, weight):
    torch.manual_seed(0)
    model = Reader()
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        u, y = batch(step)
        with co.record(model) as tape:  # one line
            loss = cross_entropy(model(u), y, reduction="none")
        loss = loss + weight * tape.penalty("log-ratio", loss)  # and another
        optimiser.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model


def told(model):
    """What a model has learned, on sequences it has not seen."""
    held_out = next(TASK.held_out("test", seed=1, n=500))
    with co.record(model) as tape:
        outputs = model(held_out.u)
    lam = tape.costates(cross_entropy(outputs, held_out.y, reduction="none"))[0]
    right, log = (outputs.argmax(1) == held_out.y).float().mean(), lam.log_norms().mean(1)
    return (
        f"{right:.0%} correct, costates at the first step 10^{(log[1] - log[-1]) / 2.302585:.1f} "
        "of those at the last"
    )


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for name, weight in (("plain", 0.0), ("penalised", 2.0)):
        print(f"{name}: {told(train(steps, weight))}")
