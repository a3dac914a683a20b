"""Sobolev training: an LSTM learns a function of a sequence from its values and derivatives.

    python examples/sobolev.py [cpu | cuda]

The derivatives are part of the loss, so its gradient is a second derivative through time. On a GPU
torch.nn refuses it: "Double backwards is not supported for CuDNN RNNs due to limitations in the
CuDNN API". Writing co.nn for torch.nn is the whole change.  Czarnecki et al., Sobolev Training for
Neural Networks (2017)
"""

import sys

import torch

import coadjoint as co

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
T, N = 12, 48
# later steps count more
KERNEL = 0.8 ** torch.arange(T - 1, -1, -1.0, device=DEVICE)[:, None, None]


def function(u):
    """-> f = sin(sum_t k_t u_t) [B], df/du [T, B, 1]"""
    s = (KERNEL * u).sum((0, 2))
    return s.sin(), KERNEL * s.cos()[:, None]


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = co.nn.LSTM(1, 32), torch.nn.Linear(32, 1)

    def forward(self, u):
        return self.out(self.rnn(u)[0][-1])[:, 0]


def errors(model, u, create_graph=False):
    """Mean squared errors of values and of derivatives."""
    u = u.clone().requires_grad_()
    (f, df), y = function(u.detach()), model(u)
    dy = torch.autograd.grad(y.sum(), u, create_graph=create_graph)[0]
    return (y - f).square().mean(), (dy - df).square().mean()


for name, weight in (("values alone", 0.0), ("values and derivatives", 1.0)):
    torch.manual_seed(0)
    model = Reader().to(DEVICE)
    u, fresh = torch.randn(T, N, 1, device=DEVICE), torch.randn(T, 1000, 1, device=DEVICE)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        value, slope = errors(model, u, create_graph=True)
        optimiser.zero_grad()
        (value + weight * slope).backward()
        optimiser.step()
    value, slope = errors(model, fresh)
    print(
        f"{name}: on new sequences, squared error of values {value:.4f}, of derivatives {slope:.4f}"
    )
