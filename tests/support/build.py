"""A small network and a batch for it, for tests in which neither sizes nor numbers matter."""

import torch
from torch import nn

import coadjoint as co

SIZES = {"inputs": 3, "hidden": 5, "outputs": 2, "dtype": torch.float64}


def network(cell="elman", seed=0, **options):
    """co.Network with the sizes above, drawn from `seed`; options change sizes and anything else.

    seed: None draws from where torch's generator is."""
    if seed is not None:
        torch.manual_seed(seed)
    return co.Network(cell, **(SIZES | options))


def batch(net, lengths=None, T=7, B=4, seed=1, **more):
    """Normal inputs and targets in the network's shapes and type; more: what else
    co.Batch takes.
    """
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=net.V.dtype, generator=rng)

    steps = (T, B) if net.readout == "every" else (B,)
    return co.Batch(randn(T, B, net.inputs), randn(*steps, net.outputs), lengths, **more)


def weights(net):
    """A copy of the network's parameters, by name."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}


class Step(nn.Module):
    """One step of a network as a module, which torch.func can call with other weights."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, u, x):
        return self.net.advance(u, x)
