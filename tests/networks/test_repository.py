"""docs/from-the-repository.md: ours against a transcription of Johnston and Patel's repository."""

from __future__ import annotations

import pytest
import torch

import coadjoint as co
import johnston_patel as repository
from coadjoint import networks
from johnston_patel import LAYERS, PENALTIES, STEPS, UNITS, Layer

BATCH = 3
WEIGHTS = (0.8, 0.3)  # of the loss and of the penalty, there
ENGINES = ("cpu", "eager", "reference", "autograd")


def problem(layer: Layer) -> tuple[repository.Weights, torch.Tensor, torch.Tensor]:
    """Weights as the repository stores them, inputs [B, T, p] and classes."""
    generator = torch.Generator().manual_seed(7)
    w = layer.draw(generator)
    u = torch.randn(BATCH, STEPS, repository.INPUTS, dtype=torch.float64, generator=generator)
    y = torch.randint(0, repository.OUTPUTS, (BATCH,), generator=generator)
    return w, u, y


def our_network(layer: Layer, w: repository.Weights, engine: str = "auto"):
    """Our network with the repository's weights."""
    net = networks.make(
        **layer.ours,
        inputs=repository.INPUTS,
        outputs=repository.OUTPUTS,
        hidden=UNITS,
        output="softmax",
        engine=engine,
        init="keras",
        dtype=torch.float64,
    )
    with torch.no_grad():
        for name, value in layer.converted(w).items():
            net.get_parameter(name).copy_(value)
    return net


def their_gradient(layer, w, u, y, penalty):
    """The gradient of w1 L + w2 G, one loss for the batch, by weight."""
    loss, states = layer.loss(w, u, y)
    adjoints = torch.autograd.grad(loss, states[:STEPS], create_graph=True)
    value = PENALTIES[penalty][0](list(adjoints))
    objective = WEIGHTS[0] * loss + WEIGHTS[1] * value
    return torch.autograd.grad(objective, list(w.values()))


def our_gradient(layer, w, u, y, penalty, engine):
    """The same, by our method with the converted weight, pulled back to their weights."""
    net = our_network(layer, w, engine)
    _, name, factor = PENALTIES[penalty]
    rho = WEIGHTS[1] / WEIGHTS[0] * factor(STEPS, BATCH)
    G = co.penalties.penalty(name)
    G = G if layer.part is None else G.on(part=layer.part)
    batch = co.Batch(u.transpose(0, 1).contiguous(), y)
    gradient = co.Penalised(G, rho)(net, batch, "cross-entropy").gradient
    ours = layer.converted(w)
    assert set(gradient) == set(ours)
    terms = [(ours[key] * gradient[key]).sum() for key in ours]
    return torch.autograd.grad(WEIGHTS[0] * torch.stack(terms).sum(), list(w.values()))


def compare(name: str, penalty: str, engine: str) -> None:
    """Both gradients agree to float64's digits."""
    layer = LAYERS[name]
    w, u, y = problem(layer)
    theirs = their_gradient(layer, w, u, y, penalty)
    ours = our_gradient(layer, w, u, y, penalty, engine)
    for key, expected, got in zip(w, theirs, ours, strict=True):
        scale = max(float(expected.abs().max()), 1e-6)
        assert float((got - expected).abs().max()) < 1e-10 * scale, (key, penalty, engine)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_has_the_states_and_the_loss_of_the_repository(name):
    layer = LAYERS[name]
    w, u, y = problem(layer)
    loss, states = layer.loss(w, u, y)
    run = our_network(layer, w)(u.transpose(0, 1))
    width = states[0].shape[1]
    assert torch.allclose(run.x[1:, :, :width], torch.stack(states[:STEPS]), atol=1e-13)
    assert torch.allclose(run.loss("cross-entropy", y).mean(), loss, rtol=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_that_of_the_repository(name, penalty):
    compare(name, penalty, "auto")


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "unicornn"])
def test_every_engine_has_the_gradient_of_the_repository(name, engine):
    for penalty in PENALTIES:
        compare(name, penalty, engine)


def test_tilted_layer_counts_one_more_adjoint():
    # The page says so: the summary is in the list of states, so there are T + 1 adjoints.
    layer = LAYERS["tiltedrnn"]
    w, u, y = problem(layer)
    assert len(layer.loss(w, u, y)[1]) == STEPS + 1
