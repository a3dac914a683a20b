"""Penalties per sqrt n: root mean squares in place of norms, for states of different widths.

The oracles compute costates and pulls by torch's double backward, divide them by the roots of the
widths, and apply the formulas of the docstrings.
"""

import itertools
import math

import pytest
import torch

import build
import coadjoint as co
import oracles
from coadjoint.objectives.penalties import PENALTIES
from compare import close, same_bits

F64 = torch.float64
B = 4
WIDTHS = (5, 9, 3, 6, 2)
NAMES = [name for name in PENALTIES if name not in ("omega-published", "tangent")]
PAIRS = {"convolution": (1, 6, 6), "dense": (5,)}


def chain(kind):
    if kind == "dense":
        return co.Chain.mlp(5, WIDTHS[1:-1], 2, output="sigmoid", seed=1, gain=1.3, dtype=F64)
    return co.Chain.cnn((1, 6, 6), [3], 2, widths=[4], output="sigmoid", seed=1, dtype=F64)


class Truth:
    """The states, and costates of the loss, each divided by the root of its number of entries."""

    def __init__(self, net, x):
        self.x = [x.clone().requires_grad_()]
        for f in net.maps:
            self.x.append(f(self.x[-1]))
        self.roots = [math.sqrt(x[0].numel()) for x in self.x]
        self.y_hat = torch.sigmoid(self.x[-1])
        self.loss = loss(self.y_hat)
        self.lam = self.by_states(self.loss)

    def by_states(self, value):
        found = torch.autograd.grad(value.sum(), self.x, create_graph=True)
        return [lam.flatten(1) / root for lam, root in zip(found, self.roots, strict=True)]

    def norms(self, p=2, lam=None):
        return torch.stack([y.norm(p, dim=1) for y in lam or self.lam])[1:]

    def ratios(self, signs):
        """rms(Df_i' w_i) / rms(w_i), i = 1..L, w_i the costates or random signs."""
        found = []
        for i, (before, after) in enumerate(itertools.pairwise(self.x), 1):
            n = after[0].numel()
            w = self.lam[i] * self.roots[i]
            if signs:
                drawn = [oracles.drawn_signs(n, i, j) for j in range(len(after))]
                w = torch.tensor(drawn, dtype=F64)
            back = torch.autograd.grad(after, before, w.view(after.shape), create_graph=True)[0]
            size = back.flatten(1).norm(dim=1) / self.roots[i - 1]
            found.append(size / (w.norm(dim=1) / self.roots[i]))
        return torch.stack(found)

    def states(self):
        rms = [x.flatten(1).norm(dim=1) / r for x, r in zip(self.x, self.roots, strict=True)]
        return torch.stack(rms)


def loss(y_hat):
    return (y_hat**2 + 0.3 * y_hat).sum(-1)


def deviation(n):
    return (n - n.mean(0)).square().mean(0)


def output_variance(t):
    each = [deviation(t.norms(lam=t.by_states(t.y_hat[:, k]))) for k in range(2)]
    return sum(each) / 2


FORMULAS = {
    "squared-norm": lambda t: t.norms().square().mean(0),
    "variance": lambda t: deviation(t.norms()),
    "variance-l1": lambda t: deviation(t.norms(1)),
    "log-ratio": lambda t: t.norms().log().diff(dim=0).square().mean(0),
    "ratio": lambda t: (t.norms()[:-1] / t.norms()[1:] - 1).square().mean(0),
    "log-variance": lambda t: deviation(t.norms().log()),
    "end-points": lambda t: (t.norms()[0] - t.norms()[-1]).square(),
    "share-variance": lambda t: (t.norms() / t.norms().sum(0) - 1 / len(t.norms())).square().sum(0),
    "barrier": lambda t: (t.lam[-1].abs() / 1e-5).log().clamp(max=0).square().sum(1),
    "omega": lambda t: (t.ratios(signs=False).square() - 1).square().mean(0),
    "omega-norms": lambda t: (t.ratios(signs=False) - 1).square().sum(0),
    "isometry": lambda t: t.ratios(signs=True).log().square().mean(0),
    "norm-stabiliser": lambda t: t.states().diff(dim=0).square().mean(0),
    "output-variance": output_variance,
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_every_penalty_over_depth_equals_its_formula_on_root_mean_squares(name, kind):
    net = chain(kind)
    torch.manual_seed(2)
    x = torch.randn(B, *PAIRS[kind], dtype=F64)
    G = PENALTIES[name].per("sqrt n")
    e = co.Penalised(G, 0.7)(net, co.Batch(x, axis=0), loss)
    truth = Truth(net, x)
    expected = FORMULAS[name](truth)
    close(e.penalties, expected, 1e-12)
    objective = (truth.loss + 0.7 * expected).mean()
    close(e.gradient, oracles.gradient(objective, dict(net.named_parameters())), 1e-12)
    assert G.name == f"{PENALTIES[name].name} per sqrt n"
    # the same without `per` is something else, unless it is zero
    assert name == "barrier" or not torch.allclose(e.penalties, penalty_of(net, x, name))


def penalty_of(net, x, name):
    return PENALTIES[name](net(x).costates(loss)).detach()


def test_the_barrier_acts_on_entries_per_root():
    net = chain("dense")
    x = torch.randn(B, 5, dtype=F64)
    lam = net(x).costates(lambda y_hat: 1e-7 * loss(y_hat))
    entries = lam.at(-1) / math.sqrt(2)
    truth = torch.log(entries.abs() / 1e-5).square().sum(1)
    close(co.penalties.barrier().per("sqrt n")(lam), truth.detach(), 1e-12)


# All states over time have n entries: what a penalty becomes by it.
OVER_TIME = {
    **dict.fromkeys(("squared-norm", "variance", "variance-l1", "end-points"), lambda n: 1 / n),
    "output-variance": lambda n: 1 / n,
    "norm-stabiliser": lambda n: 2 / n,  # of the visible half of an LSTM's state
    **dict.fromkeys(("log-ratio", "ratio", "log-variance", "share-variance"), lambda n: 1.0),
    **dict.fromkeys(("omega", "omega-norms", "isometry", "barrier"), lambda n: 1.0),
}


@pytest.mark.parametrize("name", NAMES)
def test_over_time_only_constants_change(name):
    net = build.network("lstm", readout="every")
    batch = build.batch(net, lengths=[7, 3, 5, 1])
    lam = net(batch.u, batch.lengths).costates("squared", batch.y)
    factor = OVER_TIME[name](10)
    G = PENALTIES[name]
    ours, expected = G.per("sqrt n")(lam), factor * G(lam)
    close(ours, expected, 1e-12)
    parameters = dict(net.named_parameters())
    found, truth = (oracles.gradient(y.mean(), parameters) for y in (ours, expected))
    close(found, truth, 1e-12, least=1e-3)


@pytest.mark.parametrize("on", ["each", "top", "whole"])
def test_layers_are_chosen_before_and_after(on):
    torch.manual_seed(0)
    net = co.Stack(["elman", "lstm"], **(build.SIZES | {"hidden": [3, 5]}))
    batch = build.batch(net)
    lam = net(batch.u).costates("squared", batch.y)
    G = co.penalties.variance
    parts = {"each": [*lam], "top": [lam[1]], "whole": [lam.joined()]}[on]
    truth = sum(G(part) / part.rows.shape[1] for part in parts) / len(parts)
    if on == "each":
        same_bits(G.per("sqrt n")(lam).detach(), G.per("sqrt n")(list(lam)).detach())
        close(G.per("sqrt n")(lam), truth, 1e-12)
        close((2 * G + "variance").per("sqrt n")(lam), 3 * truth, 1e-12)
        return
    close(G.per("sqrt n").on(on)(lam), truth, 1e-12)
    close(G.on(on).per("sqrt n")(lam), truth, 1e-12)


def test_a_users_own_penalty_sees_the_costates_divided():
    net = build.network()
    batch = build.batch(net, lengths=[7, 3, 5, 1])
    lam = net(batch.u, batch.lengths).costates("squared", batch.y)
    seen = []

    def own(lam):
        seen.append(lam)
        return lam.lam.square().sum((0, 2))

    root = math.sqrt(5)
    close(co.penalties.penalty(own).per("sqrt n")(lam), lam.lam.square().sum((0, 2)) / 5, 1e-12)
    view = seen[0]
    assert "per sqrt n" in repr(view)
    close(view.at(2), lam.at(2) / root, 1e-12)
    close(view.mantissa, lam.mantissa / root, 1e-12)
    close(view.last_mantissa(), lam.last_mantissa() / root, 1e-12)
    close(view.log_norms()[:2], lam.log_norms()[:2] - math.log(root), 1e-12)
    assert torch.equal(view.mask, lam.mask)
    assert view.axis is lam.axis
    assert view.sweep is lam.sweep
    assert not view.detach().at(1).requires_grad


@pytest.mark.parametrize("name", ["log-ratio", "variance", "variance-l1", "squared-norm"])
def test_segments_give_the_same_gradient(name):
    net = build.network("lstm", engine="reference")
    batch = build.batch(net, T=21, lengths=[21, 3, 15, 1])
    G = PENALTIES[name].per("sqrt n")
    whole, cut = (co.Penalised(G, 0.5, k)(net, batch, "squared") for k in (None, 3))
    close(cut.penalties, whole.penalties, 1e-13)
    close(cut.gradient, whole.gradient, 1e-13)


def test_zero_costates_are_left_out_as_without():
    net = build.network(readout="every")
    batch = build.batch(net)
    mask = torch.ones(7, B, dtype=F64)
    mask[:, 1] = 0
    lam = net(batch.u).costates("squared", batch.y, mask=mask)
    for name in ("log-ratio", "squared-norm", "omega"):
        G = PENALTIES[name].per("sqrt n")(lam)
        assert G[1].item() == 0
        assert torch.isfinite(torch.autograd.grad(G.sum(), net.W, retain_graph=True)[0]).all()


def test_what_makes_no_sense_is_refused_by_name():
    net = chain("dense")
    lam = net(torch.zeros(B, 5, dtype=F64)).costates(loss)
    with pytest.raises(co.InputError, match="unknown unit 'n'"):
        co.penalties.variance.per("n")
    for name in ("omega-published", "tangent"):
        with pytest.raises(co.Unsupported, match=f"penalty '{name}' cannot be taken per sqrt n"):
            PENALTIES[name].per("sqrt n")
    with pytest.raises(co.Unsupported, match="'tangent' has no norms of states to be taken per"):
        (co.penalties.variance + "tangent").per("sqrt n")(lam)
    with pytest.raises(co.Unsupported, match=r"'omega-published' .* one W shared by all steps"):
        PENALTIES["omega-published"](lam)
    over_time = build.network()
    batch = build.batch(over_time)
    lam = over_time(batch.u).costates("squared", batch.y)
    with pytest.raises(co.Unsupported, match=r"'omega-published' .* one W shared by all steps"):
        (2 * PENALTIES["omega-published"]).per("sqrt n")(lam)
    with pytest.raises(co.Unsupported, match="segments"):
        co.Penalised("log-ratio", 0.1, segments=2)(
            net, co.Batch(torch.zeros(B, 5, dtype=F64), axis=0), loss
        )
