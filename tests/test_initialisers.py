"""Initialisers: what W becomes, gate by gate, as a function of the seed alone."""

import pytest
import torch

import coadjoint as co
from coadjoint.errors import InputError
from coadjoint.initialisers import INITIALISERS, initialise


def network(cell="elman", hidden=31):
    return co.Network(cell, inputs=3, hidden=hidden, outputs=2, dtype=torch.float64)


def gates(net):
    return dict(net.named_parameters())["W"].detach().split(net.hidden)


ORACLES = {
    "spectral": lambda W, r: torch.linalg.eigvals(W).abs().max() - r,
    "orthogonal": lambda W, r: (W.T @ W - r**2 * torch.eye(len(W), dtype=W.dtype)).abs().max(),
    "identity": lambda W, r: (W - r * torch.eye(len(W), dtype=W.dtype)).abs().max(),
}


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("name", ORACLES)
def test_every_gate_is_scaled(name, cell):
    for W in gates(initialise(network(cell), name, radius=0.7)):
        assert abs(float(ORACLES[name](W, 0.7))) < 1e-12


@pytest.mark.parametrize("name", INITIALISERS)
def test_the_seed_decides(name):
    a, b, c = (initialise(network(), name, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["V"], c["V"])


def test_std_of_what_is_gaussian():
    net = initialise(network(hidden=300), "gaussian", std=0.02)
    for key in ("W", "R", "V"):
        assert float(net.state_dict()[key].std()) == pytest.approx(0.02, rel=0.15)
    assert not net.state_dict()["b"].any()


@pytest.mark.parametrize("wrong", [{"radius": 0.0}, {"radius": float("nan")}, {"std": -1.0}, {"name": "spectrl"}])
def test_refusals(wrong):
    with pytest.raises(InputError):
        initialise(network(), **{"name": "spectral", **wrong})
