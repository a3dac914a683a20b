"""Penalties on a part of the state, against loops in float64 written for these tests."""

import pickle

import pytest
import torch

import coadjoint as co
from coadjoint.errors import CoadjointError

D, T, B = 5, 7, 3
LENGTHS = torch.tensor([7, 4, 6])
NAMES = ("W", "R", "b", "V", "b_o", "x0")
RHO = 0.7


def norms(lam):
    return torch.stack([each.norm() for each in lam])


def variance(lam):
    return (norms(lam) - norms(lam).mean()).square().mean()


def variance_l1(lam):
    sizes = torch.stack([each.abs().sum() for each in lam])
    return (sizes - sizes.mean()).square().mean()


def log_ratio(lam):
    return norms(lam).log().diff().square().mean()


def ratio(lam):
    return (norms(lam)[:-1] / norms(lam)[1:] - 1).square().mean()


PENALTIES = {
    "variance": variance,
    "variance-l1": variance_l1,
    "log-ratio": log_ratio,
    "ratio": ratio,
}


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    net = co.Network("lstm", inputs=2, hidden=D, outputs=2, dtype=torch.float64, x0="learned")
    u = torch.randn(T, B, 2, dtype=torch.float64)
    y = torch.randn(B, 2, dtype=torch.float64)
    return net.state_dict(), u, y


def lstm_states(w, u):
    """The h and c of one sample after each step, x_0 first."""
    h, c = w["x0"].split(D)
    states = [(h, c)]
    for u_t in u:
        i, f, g, o = (w["W"] @ h + w["R"] @ u_t + w["b"]).split(D)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append((h, c))
    return states


def expected_gradient(problem, G, slot):
    """The gradient of the mean of L + rho G(dL/dslot), sample by sample."""
    held, u, y = problem
    w = {name: held[name].clone().requires_grad_() for name in NAMES}
    objective = 0.0
    for j, length in enumerate(LENGTHS):
        states = lstm_states(w, u[:length, j])
        loss = (w["V"] @ states[-1][0] + w["b_o"] - y[j]).square().sum()
        chosen = [state[slot] for state in states[1:]]
        lam = torch.autograd.grad(loss, chosen, create_graph=True)
        objective = objective + (loss + RHO * G(lam)) / B
    return dict(zip(NAMES, torch.autograd.grad(objective, list(w.values())), strict=True))


def our_lstm(problem, engine="auto"):
    options = {"inputs": 2, "hidden": D, "outputs": 2, "x0": "learned", "engine": engine}
    net = co.Network("lstm", **options, dtype=torch.float64)
    net.load_state_dict(problem[0])
    return net, co.Batch(problem[1], problem[2], lengths=LENGTHS)


def assert_close(got, expected):
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-12 * float(value.abs().max()))


@pytest.mark.parametrize("engine", ["cpu", "eager", "reference", "autograd"])
@pytest.mark.parametrize("name", PENALTIES)
def test_gradient_of_a_penalty_on_h_alone(problem, name, engine):
    net, batch = our_lstm(problem, engine)
    G = co.penalties.penalty(name).on(part="h")
    e = co.Penalised(G, RHO)(net, batch, "squared")
    assert_close(e.gradient, expected_gradient(problem, PENALTIES[name], 0))


@pytest.mark.parametrize("engine", ["cpu", "eager", "reference"])
@pytest.mark.parametrize("name", ["variance", "variance-l1", "log-ratio"])
def test_segments_have_the_bits_of_one_sweep(problem, name, engine):
    net, batch = our_lstm(problem, engine)
    G = 2 * co.penalties.penalty(name).on(part="h")
    once = co.Penalised(G, RHO)(net, batch, "squared")
    parts = co.Penalised(G, RHO, segments=3)(net, batch, "squared")
    assert torch.equal(once.penalties, parts.penalties)
    for key, value in once.gradient.items():
        assert torch.allclose(parts.gradient[key], value, rtol=1e-12, atol=1e-15), key


def test_both_parts_are_the_state(problem):
    net, batch = our_lstm(problem)
    lam = net.run(batch).costates("squared", batch.y)
    for name in ("variance", "barrier", "omega", "isometry", "share-variance"):
        G = co.penalties.penalty(name)
        assert torch.equal(G.on(part=["c", "h"])(lam), G(lam)), name
    assert not torch.allclose(co.penalties.variance.on(part="c")(lam), co.penalties.variance(lam))


def test_omega_of_a_part_compares_parts_of_costates(problem):
    net, batch = our_lstm(problem)
    lam = net.run(batch).costates("squared", batch.y)
    h = lam.lam[..., :D].norm(dim=-1)  # [T + 1, B]; one loss at the end: J_t' lam_t = lam_{t-1}
    for j, length in enumerate(LENGTHS):
        expected = (h[:length, j] / h[1 : length + 1, j] - 1).square().sum()
        assert torch.allclose(co.penalties.omega_norms.on(part="h")(lam)[j], expected)


def test_states_of_a_part(problem):
    net, batch = our_lstm(problem)
    lam = net.run(batch).costates("squared", batch.y)
    G = co.penalties.penalty("norm-stabiliser")
    assert torch.equal(G.on(part="h")(lam), G(lam))  # by itself it reads the first slot
    assert not torch.allclose(G.on(part="c")(lam), G(lam))


def test_root_mean_squares_count_the_entries_of_the_part(problem):
    net, batch = our_lstm(problem)
    lam = net.run(batch).costates("squared", batch.y)
    G = co.penalties.variance
    of_h = G.on(part="h")(lam)
    assert torch.allclose(G.per("sqrt n").on(part="h")(lam), of_h / D)
    assert torch.allclose(G.on(part="h").per("sqrt n")(lam), of_h / D)


def test_outputs_of_a_part(problem):
    net, batch = our_lstm(problem)
    lam = net.run(batch).costates("squared", batch.y)
    inside = co.penalties.of_output(co.penalties.variance.on(part="h"))
    assert torch.allclose(co.penalties.of_output("variance").on(part="h")(lam), inside(lam))


def test_steered_weight_follows_the_part(problem):
    weight = co.penalties.Steered(1.0, 0.1)
    noted = []
    for segments in (None, 3):
        net, batch = our_lstm(problem)
        method = co.Penalised(co.penalties.log_ratio.on(part="h"), weight, segments=segments)
        method(net, batch, "squared")
        noted.append(method.state["decay"])
    lam = net.run(batch).costates("squared", batch.y)
    h = lam.lam[..., :D].norm(dim=-1).log()
    decays = [h[1:n, j].sub(h[2 : n + 1, j]).mean().abs() for j, n in enumerate(LENGTHS)]
    assert noted == pytest.approx([float(sum(decays).detach())] * 2)


def test_layers_of_a_stack_and_their_states_joined():
    torch.manual_seed(1)
    net = co.Stack(["lstm", "gru"], inputs=2, hidden=[3, 4], outputs=1, dtype=torch.float64)
    run = net(torch.randn(5, 2, 2, dtype=torch.float64))
    lam = run.costates("squared", torch.ones(2, 1, dtype=torch.float64))
    first = lam[0].lam[1:, :, :3]
    second = lam[1].lam[1:]

    def variances(x):
        return (x.norm(dim=-1) - x.norm(dim=-1).mean(0)).square().mean(0)

    G = co.penalties.variance
    each = (variances(first) + variances(second)) / 2
    assert torch.allclose(G.on(part="h")(lam), each)
    assert torch.allclose(G.on("top", part="h")(lam), variances(second))
    assert torch.allclose(G.on(layer=0, part="h")(lam), variances(first))
    together = variances(torch.cat([first, second], -1))
    assert torch.allclose(G.on("whole", part="h")(lam), together)
    assert torch.allclose(G.on("whole").on(part="h")(lam), together)
    assert torch.allclose(G.on(part="h").on("whole")(lam), together)
    assert torch.allclose(G.on(part="h").on(layer=0)(lam), variances(first))
    with pytest.raises(CoadjointError, match="no part 'c'; its parts: h"):
        G.on(part="c")(lam)


def test_recorded_modules_have_parts():
    torch.manual_seed(2)
    model = co.nn.LSTM(2, 3, recurrent_dropout=0.3)
    with co.record(model) as tape:
        y, _ = model(torch.randn(5, 2, 2))
    lam = tape.costates(y[-1].square().sum(-1))
    expected = lam[0].lam[1:, :, :3].norm(dim=-1)
    expected = (expected - expected.mean(0)).square().mean(0)
    assert torch.allclose(co.penalties.variance.on(part="h")(lam), expected)


def test_parts_of_steps_have_names():
    net = co.Network("gated-feedback", inputs=1, hidden=2, outputs=1, layers=2, unit="lstm")
    assert net.slot_names == ("h2", "h1", "c2", "c1")
    assert co.Network(torch.nn.LSTMCell(1, 2), inputs=1, hidden=2, outputs=1).slot_names == (
        "h",
        "c",
    )


def test_parts_of_an_lstm_that_mixes_its_memory():
    """h and c, as of an LSTM, against a loop in which dL/dc does not count."""
    torch.manual_seed(3)
    net = co.Network("lstm-mixed", inputs=2, hidden=D, outputs=2, dtype=torch.float64)
    u = torch.randn(T, 1, 2, dtype=torch.float64)
    y = torch.randn(1, 2, dtype=torch.float64)
    assert net.slot_names == ("h", "c")
    w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    state = (torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64))
    states = []
    for u_t in u[:, 0]:
        h, c = state
        a = w["step.W"] @ h + w["step.R"] @ u_t + w["step.b"]
        i, f, o, n = a.split(D)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
        state = (torch.sigmoid(o) * torch.tanh(w["step.U"] @ c), c)
        states.append(state[0])
    loss = (w["V"] @ state[0] + w["b_o"] - y[0]).square().sum()
    G = log_ratio(torch.autograd.grad(loss, states, create_graph=True))
    expected = torch.autograd.grad(loss + RHO * G, list(w.values()))
    method = co.Penalised(co.penalties.log_ratio.on(part="h"), RHO)
    assert_close(
        method(net, co.Batch(u, y), "squared").gradient, dict(zip(w, expected, strict=True))
    )


def test_penalty_on_a_part_can_be_pickled():
    G = pickle.loads(pickle.dumps(0.5 * co.penalties.log_ratio.on(part="h")))
    assert G.name == "0.5 log-ratio on h"
    assert G.part == ("h",)


def test_what_is_refused(problem):
    net, batch = our_lstm(problem)
    G = co.penalties.variance
    with pytest.raises(CoadjointError, match="this state has no part 'm'; its parts: h, c"):
        co.Penalised(G.on(part="m"))(net, batch, "squared")
    with pytest.raises(CoadjointError, match="omega-published' cannot be taken of a part"):
        co.penalties.omega_published.on(part="h")
    with pytest.raises(CoadjointError, match="part must be the name of a slot"):
        G.on(part=3)
    with pytest.raises(CoadjointError, match="part names 'h' twice: name each slot once"):
        G.on(part=["h", "c", "h"])
    with pytest.raises(CoadjointError, match="is on a part of the state already"):
        G.on(part="h").on(part="c")
    mixed = G.on(part="h") + co.penalties.log_ratio
    with pytest.raises(CoadjointError, match="more than one part of the state"):
        co.Penalised(mixed, segments=2)(net, batch, "squared")
    chain = co.Chain.mlp(3, [4, 4], 2)
    samples = co.Batch(torch.ones(2, 3), torch.zeros(2, 2), axis=0)
    with pytest.raises(CoadjointError, match="only the state of a recurrent cell has parts"):
        co.Penalised(G.on(part="h"))(chain, samples, "squared")


def test_options_of_make(problem):
    net, batch = our_lstm(problem)
    method = co.gradients.make(penalty="variance", penalty_part="h", weight=RHO)
    assert method.penalty.part == ("h",)
    expected = co.Penalised(co.penalties.variance.on(part="h"), RHO)(net, batch, "squared")
    got = method(net, batch, "squared")
    assert torch.equal(got.gradient["W"], expected.gradient["W"])
    with pytest.raises(CoadjointError, match="penalty_part does nothing with method bptt"):
        co.gradients.make(penalty_part="h")
