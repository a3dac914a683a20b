"""Second-order MAML: initial weights of an RNN from which one gradient step fits a new sine wave.

    python examples/maml.py [cpu | cuda]

The loss after the step is differentiated by the weights before it: a second derivative through
time. On a GPU torch.nn refuses it: "Double backwards is not supported for CuDNN RNNs due to
limitations in the CuDNN API". Writing co.nn for torch.nn is the whole change.  Finn et al.,
Model-Agnostic Meta-Learning (2017)
"""

import sys

import torch
from torch.func import functional_call

import coadjoint as co

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"


class Wave(torch.nn.Module):
    """A value for each step from the time alone: the weights hold amplitude and phase."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = co.nn.RNN(1, 40), torch.nn.Linear(40, 1)

    def forward(self, t):
        return self.out(self.rnn(t)[0])


def task(T=20):
    """A random wave at two sets of times [T, 1, 1]: one to adapt to, one to be judged by."""
    amplitude, phase = 0.1 + 1.9 * torch.rand(1, device=DEVICE), 3.14 * torch.rand(1, device=DEVICE)
    times = 6 * torch.rand(2, T, 1, 1, device=DEVICE) - 3
    return [(t, amplitude * torch.sin(t + phase)) for t in times]


def judged(model, tasks, second_order=False):
    """The mean loss over tasks after one step of gradient descent on each."""
    weights, total = dict(model.named_parameters()), 0

    def loss(w, t, y):
        return (functional_call(model, w, (t,)) - y).square().mean()

    for support, query in tasks:
        before = loss(weights, *support)
        g = torch.autograd.grad(before, weights.values(), create_graph=second_order)
        moved = {name: w - 0.1 * dw for (name, w), dw in zip(weights.items(), g, strict=True)}
        total += loss(moved, *query)
    return total / len(tasks)


torch.manual_seed(0)
fresh = [task() for _ in range(100)]
for name, second_order, steps in (
    ("no meta-learning", False, 0),
    ("first order", False, 250),
    ("MAML", True, 250),
):
    torch.manual_seed(1)
    model = Wave().to(DEVICE)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        judged(model, [task() for _ in range(4)], second_order).backward()
        optimiser.step()
    print(f"{name}: squared error of new waves after one step {judged(model, fresh):.3f}")
