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


def test_sparse_has_so_many_links_into_each_unit():
    for W in gates(initialise(network("gru"), "sparse", radius=0.8)):
        assert ((W != 0).sum(1) == 15).all()
        assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(0.8, rel=1e-12)
    few = initialise(network(hidden=9), "sparse", radius=0.8)
    assert (gates(few)[0] != 0).all()


def test_recipes_have_their_own_numbers():
    """Standard deviations of R and V, and what W is."""
    stds = {"sigmoid": 0.01, "basic-tanh": 0.1, "smart-tanh": 0.01}
    for name, std in stds.items():
        held = initialise(network(hidden=300), name).state_dict()
        for key in ("R", "V") if name == "smart-tanh" else ("W", "R", "V"):
            assert float(held[key].std()) == pytest.approx(std, rel=0.15), (name, key)
        assert not held["b"].any()
    W = gates(initialise(network(), "smart-tanh"))[0]
    assert ((W != 0).sum(1) == 15).all()
    assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(0.95, rel=1e-12)
    with pytest.raises(InputError, match="initialiser 'smart-tanh' takes no options; got radius"):
        initialise(network(), "smart-tanh", radius=0.5)


@pytest.mark.parametrize(("name", "variance"), [("glorot", 2 / 600), ("he", 2 / 300)])
def test_fans(name, variance):
    W = gates(initialise(network(hidden=300), name))[0]
    assert float(W.var()) == pytest.approx(variance, rel=0.05)
