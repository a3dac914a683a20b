"""The pinball loss: values, slopes and second derivatives by hand, and where its mean is least."""

import pickle

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.objectives.losses import losses_and_slopes

LEVELS = (0.1, 0.5, 0.8)


def draw():
    """Outputs [4, 6] of two numbers at three levels each, and targets."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(4, 2, generator=generator, dtype=torch.float64).repeat_interleave(3, -1)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64), y


def test_values_and_slopes_are_those_by_hand():
    a, y = draw()
    q = np.tile(LEVELS, 2)
    e = (y - a).numpy()
    expected = np.maximum(q * e, (q - 1) * e).sum(-1)
    slopes = np.where(e > 0, -q, 1 - q)
    loss = co.losses.pinball(LEVELS)
    value, slope = losses_and_slopes(loss, a, y, "identity")
    np.testing.assert_allclose(value, expected)
    np.testing.assert_allclose(slope, slopes)
    a.requires_grad_()
    np.testing.assert_allclose(torch.autograd.grad(loss(a, y, "identity").sum(), a)[0], slopes)
    assert not loss.bend(a, y, torch.ones_like(a)).any()


def test_at_the_target_the_slope_is_half_way():
    _, y = draw()
    loss = co.losses.pinball(LEVELS)
    a = y.clone().requires_grad_()
    expected = (0.5 - torch.tensor(LEVELS, dtype=torch.float64)).repeat(2).expand(4, -1)
    torch.testing.assert_close(loss.slope(a, y), expected)
    torch.testing.assert_close(torch.autograd.grad(loss(a, y, "identity").sum(), a)[0], expected)


def test_its_mean_is_least_at_the_quantiles():
    y = torch.from_numpy(np.random.default_rng(0).exponential(size=2001))
    grid = torch.linspace(0, 4, 4001, dtype=torch.float64)
    for level in LEVELS:
        loss = co.losses.pinball([level])
        means = [float(loss(v.expand(len(y), 1), y[:, None], "identity").mean()) for v in grid[::8]]
        best = float(grid[::8][int(np.argmin(means))])
        assert best == pytest.approx(float(torch.quantile(y, level)), abs=0.02)


def test_gradients_of_a_network_agree_with_finite_differences():
    torch.manual_seed(0)
    net = co.Network("gru", inputs=2, hidden=3, outputs=3, readout="every").double()
    u = torch.randn(5, 2, 2, dtype=torch.float64)
    y = torch.randn(5, 2, 1, dtype=torch.float64).repeat_interleave(3, -1)
    loss = co.losses.pinball(LEVELS)
    run = net(u)
    run.loss(loss, y).sum().backward()
    by_autograd = {name: p.grad.clone() for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        change = torch.randn_like(parameter)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(change, alpha=sign * 1e-6)
                values.append(float(net(u).loss(loss, y).sum()))
                parameter.sub_(change, alpha=sign * 1e-6)
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(float((by_autograd[name] * change).sum()), rel=1e-5, abs=1e-8)


def test_it_is_pickled_and_refuses_what_does_not_fit():
    a, y = draw()
    loss = pickle.loads(pickle.dumps(co.losses.pinball(LEVELS)))
    torch.testing.assert_close(loss(a, y, "identity"), co.losses.pinball(LEVELS)(a, y, "identity"))
    with pytest.raises(co.InputError, match="level"):
        co.losses.pinball([0.5, 1.0])
    with pytest.raises(co.InputError, match="at least one"):
        co.losses.pinball([])
    with pytest.raises(co.InputError, match="as many outputs"):
        loss(a[:, :4], y[:, :4], "identity")
