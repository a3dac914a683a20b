"""Step cells compute what loops over their equations compute.

The loops take one sample at a time, with vectors and sums, and are differentiated twice by
autograd.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coadjoint as co
import oracles
from coadjoint.cells import steps
from compare import close
from oracles import sigmoid

F64 = torch.float64


def gru_before(w, u, h):
    d = len(h)
    (Wr, Wk, Wn), (Rr, Rk, Rn) = w["W"].split(d), w["R"].split(d)
    br, bk, bn = w["b"].split(d) if "b" in w else (0, 0, 0)
    r, k = sigmoid(Wr @ h + Rr @ u + br), sigmoid(Wk @ h + Rk @ u + bk)
    return k * h + (1 - k) * torch.tanh(Rn @ u + Wn @ (r * h) + bn)


def lstm_mixed(w, u, state):
    """Perez Jensen (2024), section 5.1: x~ = [zeta, x]; G, F, H, V act on x~ and U on z."""
    d = len(state) // 2
    zeta, z = state.split(d)
    read = torch.cat([zeta, u])
    G, F, H, V = torch.cat([w["W"], w["R"]], 1).split(d)
    bias = w["b"].split(d) if "b" in w else (0, 0, 0, 0)  # the document has none
    z = sigmoid(F @ read + bias[1]) * z + sigmoid(G @ read + bias[0]) * torch.tanh(
        V @ read + bias[3]
    )
    return torch.cat([sigmoid(H @ read + bias[2]) * torch.tanh(w["U"] @ z), z])


def test_without_mixing_it_is_the_lstm():
    """U = 1; the cell's gates come in the order i, f, n, o of torch."""
    torch.manual_seed(0)
    sizes = {"inputs": 3, "hidden": 5, "outputs": 2, "dtype": F64}
    mixed, plain = co.Network("lstm-mixed", **sizes), co.Network("lstm", **sizes)
    with torch.no_grad():
        mixed.step.U.copy_(torch.eye(5))
        for name in ("W", "R", "b"):
            i, f, o, n = getattr(mixed.step, name).split(5)
            getattr(plain, name).copy_(torch.cat([i, f, n, o]))
        plain.V.copy_(mixed.V)
        plain.b_o.copy_(mixed.b_o)
    u = torch.randn(7, 2, 3, dtype=F64)
    close(mixed(u).y_hat, plain(u).y_hat, 1e-14, "y_hat")


def deep(phi):
    def step(w, u, h):
        y = phi(w["R"] @ u + w["W"] @ h + w.get("b", 0))
        depth = 1 + sum(name.endswith("weight") for name in w)
        for l in range(2, depth + 1):
            a = w[f"rest.{l - 2}.weight"] @ y + w.get(f"rest.{l - 2}.bias", 0)
            if l == depth and "S" in w:
                a = a + w["S"] @ h
            y = phi(a)
        return y

    return step


def feedback(unit, L):
    """Layers 1..L; the state is h_L, ..., h_1 (c_L, ..., c_1)."""

    def step(w, u, x):
        d = len(x) // (2 * L if unit == "lstm" else L)
        blocks = x.split(d)
        h = {j: blocks[L - j] for j in range(1, L + 1)}
        c = {j: blocks[2 * L - j] for j in range(1, L + 1)} if unit == "lstm" else {}
        everything = torch.cat([h[j] for j in range(L, 0, -1)])
        y, new, memory = u, {}, {}
        for j in range(1, L + 1):
            p = {
                name: w.get(f"levels.{j - 1}.{name}")
                for name in ("R", "b", "W", "U", "g_below", "g_states")
            }
            s = 0
            for i in range(1, L + 1):
                at = L - i
                g = sigmoid((p["g_below"][at] * y).sum() + (p["g_states"][at] * everything).sum())
                s = s + g * (p["U"][:, at * d : (at + 1) * d] @ h[i])
            v = (p["R"] @ y + (0 if p["b"] is None else p["b"])).split(d)
            if unit == "tanh":
                new[j] = torch.tanh(v[0] + s)
            elif unit == "gru":
                Wr, Wk = p["W"].split(d)
                r, k = sigmoid(v[0] + Wr @ h[j]), sigmoid(v[1] + Wk @ h[j])
                new[j] = k * h[j] + (1 - k) * torch.tanh(v[2] + r * s)
            else:
                i, f, o = (sigmoid(a + W @ h[j]) for a, W in zip(v, p["W"].split(d), strict=False))
                memory[j] = f * c[j] + i * torch.tanh(v[3] + s)
                new[j] = o * torch.tanh(memory[j])
            y = new[j]
        return torch.cat([part[j] for part in (new, memory) if part for j in range(L, 0, -1)])

    return step


def softplus(a):
    return torch.log1p(torch.exp(a))


TABLE = {  # name of the case: class, options, equations
    "gru-before": (steps.ResetBefore, {}, gru_before),
    "gru-before, no bias": (steps.ResetBefore, {"bias": False}, gru_before),
    "lstm-mixed": (steps.MixedLSTM, {}, lstm_mixed),
    "lstm-mixed, no bias": (steps.MixedLSTM, {"bias": False}, lstm_mixed),
    "deep 1": (steps.DeepTransition, {"depth": 1}, deep(torch.tanh)),
    "deep 2, wide": (steps.DeepTransition, {"width": 5}, deep(torch.tanh)),
    "deep 3, shortcut": (
        steps.DeepTransition,
        {"depth": 3, "width": 2, "shortcut": True},
        deep(torch.tanh),
    ),
    "deep 2, softplus, no bias": (
        steps.DeepTransition,
        {"activation": "softplus", "shortcut": True, "bias": False},
        deep(softplus),
    ),
    "feedback tanh 2": (steps.GatedFeedback, {}, feedback("tanh", 2)),
    "feedback tanh 1": (steps.GatedFeedback, {"layers": 1}, feedback("tanh", 1)),
    "feedback gru 3": (steps.GatedFeedback, {"layers": 3, "unit": "gru"}, feedback("gru", 3)),
    "feedback lstm 2": (steps.GatedFeedback, {"unit": "lstm"}, feedback("lstm", 2)),
    "feedback lstm 1, no bias": (
        steps.GatedFeedback,
        {"layers": 1, "unit": "lstm", "bias": False},
        feedback("lstm", 1),
    ),
}
SETTINGS = [  # sizes, readout, lengths
    {"B": 3, "T": 4, "D": 2, "H": 3, "readout": "every", "lengths": [2, 4, 1]},
    {"B": 2, "T": 5, "D": 1, "H": 2, "readout": "last", "lengths": [5, 3]},
    {"B": 1, "T": 1, "D": 3, "H": 1, "readout": "every", "lengths": None},
]


class Run(oracles.Sample):
    """One sample: x t = 0..T, y_hat, its loss sum |y_hat - y|^2 and costates."""

    def __init__(self, equations, theta, u, x0, y, readout, d, direction):
        self.case = SimpleNamespace(H=d, switch=2.0, beta=0.3)
        self.data, self.j = SimpleNamespace(direction=direction[:, None]), 0
        own = {name[5:]: value for name, value in theta.items() if name.startswith("step.")}
        self.u, self.x, self.T = list(u), [x0], len(u)
        for u_t in self.u:
            self.x.append(equations(own, u_t, self.x[-1]))
        read = self.x[1:] if readout == "every" else self.x[-1:]
        self.y_hat = [theta["V"] @ x[:d] + theta["b_o"] for x in read]
        self.loss = sum(((a - b) ** 2).sum() for a, b in zip(self.y_hat, y, strict=True))
        self.lam = self.by_states(self.loss)


class Compared:
    """A network of a step, its data in float64 and the samples of its oracle."""

    def __init__(self, name, setting, dtype=F64, seed=3):
        torch.manual_seed(seed)
        kind, options, equations = TABLE[name]
        B, T, D, H, self.readout, lengths = setting.values()
        step = kind(D, H, dtype=dtype, **options)
        self.net = co.Network(
            step, inputs=D, hidden=H, outputs=2, readout=self.readout, slots=step.slots, dtype=dtype
        )
        with torch.no_grad():  # larger than at the start, so that nothing is nearly linear
            for p in self.net.parameters():
                p.copy_(
                    torch.randn(p.shape, dtype=F64)
                    * (0.9 if p.dim() == 1 else 1.1 / p.shape[1] ** 0.5)
                )
        self.lengths = lengths
        of_all = [T] * B if lengths is None else lengths
        beyond = torch.arange(T)[:, None] >= torch.tensor(of_all)
        u = torch.randn(T, B, D, dtype=F64).masked_fill(
            beyond[..., None], torch.nan
        )  # padding is not read
        x0 = 0.7 * torch.randn(B, step.slots * H, dtype=F64)
        self.y = torch.randn(*((T, B) if self.readout == "every" else (B,)), 2, dtype=F64)
        self.direction = torch.randn(T, B, D, dtype=F64)
        self.ours = dict(self.net.named_parameters())
        self.ours |= {"u": u.to(dtype).requires_grad_(), "x0": x0.to(dtype).requires_grad_()}
        self.theirs = {
            n: y.detach().double().clone().requires_grad_() for n, y in self.ours.items()
        }

        def targets(j, n):
            return self.y[:n, j] if self.readout == "every" else self.y[j : j + 1]

        self.samples = [
            Run(
                equations,
                self.theirs,
                self.theirs["u"][:n, j],
                self.theirs["x0"][j],
                targets(j, n),
                self.readout,
                H,
                self.direction[:n, j],
            )
            for j, n in enumerate(of_all)
        ]
        for j, sample in enumerate(self.samples):
            sample.number = j
        self.loss = torch.stack([s.loss for s in self.samples])

    def run(self):
        return self.net(self.ours["u"], self.lengths, self.ours["x0"])

    def costates(self):
        return self.run().costates("squared", self.y.to(self.ours["u"].dtype))

    def penalty(self, name):
        if name == "tangent":
            return co.penalties.tangent(self.direction.to(self.ours["u"].dtype), 0.3)
        if name == "barrier":
            return co.penalties.barrier(2.0)
        return co.penalties.penalty(user if name == "user" else name)


def user(lam):
    return (lam.lam**2 + lam.lam**3 + lam.trajectory.x * lam.lam).sum((0, 2))


PENALTIES = [name for name in oracles.PENALTIES if name != "none"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=["ragged", "last", "one step"])
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sampled(3)
def test_states_costates_and_penalised_gradients_equal_the_loops(name, setting):
    case = Compared(name, setting)
    T, lam = setting["T"], case.costates()

    def stacked(what):
        return oracles.padded([torch.stack(what(s)) for s in case.samples], T + 1)

    close(
        {"x": lam.trajectory.x, "lam": lam.lam, "loss": lam.loss},
        {"x": stacked(lambda s: s.x), "lam": stacked(lambda s: s.lam), "loss": case.loss},
        1e-12,
    )
    for G in PENALTIES:
        ours, theirs = (
            case.penalty(G)(lam),
            torch.stack([oracles.PENALTIES[G](s).to(F64) for s in case.samples]),
        )
        close({G: ours}, {G: theirs}, 1e-10)
        of_ours = oracles.gradient((lam.loss + 0.3 * ours).mean(), case.ours)
        of_theirs = oracles.gradient((case.loss + 0.3 * theirs).mean(), case.theirs)
        close(of_ours, of_theirs, 1e-10)


@pytest.mark.parametrize("name", TABLE)
def test_second_and_third_derivatives_equal_the_loops(name):
    case = Compared(name, {"B": 2, "T": 3, "D": 2, "H": 2, "readout": "every", "lengths": [3, 2]})
    theirs = (
        case.loss + 0.3 * torch.stack([oracles.PENALTIES["log-ratio"](s) for s in case.samples])
    ).mean()
    lam = case.costates()
    ours = (lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean()
    close(oracles.higher(ours, case.ours, False), oracles.higher(theirs, case.theirs, False), 1e-10)
    ours, theirs = lam.loss.mean(), case.loss.mean()
    close(oracles.higher(ours, case.ours, True), oracles.higher(theirs, case.theirs, True), 1e-10)


@pytest.mark.parametrize("name", TABLE)
def test_single_precision_agrees_with_the_loops(name):
    case = Compared(name, SETTINGS[0], torch.float32)
    lam = case.costates()
    assert lam.lam.dtype == torch.float32
    theirs = torch.stack([oracles.PENALTIES["log-ratio"](s) for s in case.samples])
    value = (lam.loss + 0.3 * co.penalties.log_ratio(lam).float()).mean()
    of_theirs = oracles.gradient((case.loss + 0.3 * theirs).mean(), case.theirs)
    close(oracles.gradient(value, case.ours), of_theirs, 2e-5)


@pytest.mark.parametrize("name", TABLE)
def test_every_parameter_matters_and_begins_like_torch(name):
    kind, options, _ = TABLE[name]
    torch.manual_seed(0)
    step = kind(3, 16, **options)
    drawn = torch.cat([p.flatten() for p in step.state_dict().values()])
    assert drawn.abs().max() <= 0.25
    assert drawn.abs().mean() == pytest.approx(0.125, rel=0.05)  # uniform on +-1/4
    net = co.Network(step, inputs=3, hidden=16, outputs=2, slots=step.slots)
    assert [str(net.engine), net.slots] == ["autograd", step.slots]
    found = co.Penalised("log-ratio", 0.1)(
        net, co.Batch(torch.randn(4, 2, 3), torch.randn(2, 2)), "squared"
    ).gradient
    assert set(found) == {n for n, _ in net.named_parameters()}
    assert all(g.norm() > 0 for g in found.values())


def test_depth_one_is_the_elman_cell_and_one_gate_of_one_layer_scales_its_product():
    torch.manual_seed(1)
    u, x = torch.randn(2, 3, dtype=F64), torch.randn(2, 4, dtype=F64)
    deep = steps.DeepTransition(3, 4, depth=1, dtype=F64)
    torch_cell = nn.RNNCell(3, 4, dtype=F64)
    torch_cell.load_state_dict(
        {"weight_ih": deep.R, "weight_hh": deep.W, "bias_ih": deep.b, "bias_hh": 0 * deep.b}
    )
    assert torch.allclose(deep(u, x), torch_cell(u, x), rtol=1e-14, atol=1e-15)
    one = steps.GatedFeedback(3, 4, layers=1, dtype=F64)
    with torch.no_grad():
        level = one.levels[0]
        for zero in (level.g_below, level.g_states):
            zero.zero_()
        torch_cell.load_state_dict(
            {
                "weight_ih": level.R,
                "weight_hh": level.U / 2,
                "bias_ih": level.b,
                "bias_hh": 0 * level.b,
            }
        )
    assert torch.allclose(one(u, x), torch_cell(u, x), rtol=1e-14, atol=1e-15)


def test_reset_before_and_after_the_product_differ():
    torch.manual_seed(1)
    before = co.Network(
        steps.ResetBefore(2, 3, dtype=F64), inputs=2, hidden=3, outputs=1, dtype=F64
    )
    after = co.Network("gru", inputs=2, hidden=3, outputs=1, dtype=F64)
    with torch.no_grad():
        for name in ("W", "R", "b"):
            getattr(after, name).copy_(getattr(before.step, name))
    u = torch.randn(3, 2, 2, dtype=F64)
    assert torch.allclose(
        before(u).x[1], after(u).x[1], rtol=1e-14
    )  # from x0 = 0 there is nothing to reset
    assert not torch.allclose(before(u).x[2], after(u).x[2], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("gru-before", "deep 3, shortcut", "feedback tanh 2", "feedback lstm 2"),
        pytest.param("feedback gru 3", marks=pytest.mark.thorough),
    ],
)
def test_it_learns_to_remember_its_first_input(name):
    """The sign of one number of the first step, four noisy steps later, of a hundred sequences; log
    2 is chance.
    """
    torch.manual_seed(1)
    kind, options, _ = TABLE[name]
    step = kind(2, 12, **(options | ({"width": 12} if "width" in options else {})))
    net = co.Network(step, inputs=2, hidden=12, outputs=1, slots=step.slots, output="sigmoid")
    optimiser, method = torch.optim.Adam(net.parameters(), 0.02), co.Penalised("log-ratio", 0.01)
    u, losses = torch.randn(5, 100, 2), []
    for _ in range(50):
        e = method(net, co.Batch(u, (u[0, :, :1] > 0).float()), "binary-cross-entropy")
        e.write_grad(net)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        losses.append(float(e.loss))
    assert losses[0] > 0.65
    assert losses[-1] < 0.2, losses[::10]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: steps.ResetBefore(0, 3), "inputs must be a positive integer; got 0"),
        (lambda: steps.DeepTransition(2, 3, depth=0), "depth must be a positive integer; got 0"),
        (lambda: steps.DeepTransition(2, 3, width=-1), "width must be a positive integer; got -1"),
        (lambda: steps.DeepTransition(2, 3, depth=1, shortcut=True), "depth=1 has none"),
        (lambda: steps.DeepTransition(2, 3, activation="thanh"), "did you mean 'tanh'"),
        (
            lambda: steps.GatedFeedback(2, 3, layers=True),
            "layers must be a positive integer; got True",
        ),
        (lambda: steps.GatedFeedback(2, 3, unit="ltsm"), "did you mean 'lstm'"),
        (lambda: steps.named("gru-befor", 2, 3), "did you mean 'gru-before'"),
    ],
)
def test_bad_step_cells_are_refused(make, words):
    with pytest.raises(co.InputError, match=words):
        make()


def test_a_state_of_another_size_and_other_engines_are_refused():
    def make(step, **options):
        return co.Network(step, inputs=2, hidden=3, outputs=1, **options)

    with pytest.raises(co.InputError, match="has 3 parts; expected 2: pass"):
        make(steps.GatedFeedback(2, 3), slots=3)(torch.randn(4, 2, 2))
    with pytest.raises(co.Unsupported, match="generates its code from a cell's formula"):
        make(steps.ResetBefore(2, 3), engine="cpu")


def test_steps_are_found_by_name():
    assert [type(steps.named(name, 2, 3)).__name__ for name in steps.STEPS] == [
        "ResetBefore",
        "MixedLSTM",
        "GatedFeedback",
        "DeepTransition",
        "UnICORNNLayers",
    ]
    assert steps.named("gated-feedback", 2, 3, layers=3, unit="lstm").slots == 6
    assert "layers=3, unit='lstm'" in repr(
        steps.named("gated-feedback", 2, 3, layers=3, unit="lstm")
    )


def test_a_network_takes_them_by_name():
    for name, step in co.cells.steps.STEPS.items():
        net = co.Network(name, inputs=2, hidden=3, outputs=1)
        assert isinstance(net.step, step)
        assert net.slots == net.step.slots
        assert net.extra_repr().startswith(step.__name__)
        for wrong in ({"gamma": 0.1}, {"nonsense": 1}):
            with pytest.raises(
                co.KindError, match=f"cell '{name}' has no option {next(iter(wrong))}; its options"
            ):
                co.Network(name, inputs=2, hidden=3, outputs=1, **wrong)
    assert (
        co.Network("gated-feedback", inputs=2, hidden=3, outputs=1, layers=4, unit="lstm").slots
        == 8
    )
    with pytest.raises(co.InputError, match="did you mean 'gru-before'"):
        co.Network("gru-befor", inputs=2, hidden=3, outputs=1)


@pytest.mark.parametrize("name", steps.STEPS)
def test_without_a_bias_there_is_none(name):
    """The equations above take the biases that are there, so that they would not notice."""

    def of(**options):
        return [n for n, _ in steps.named(name, 2, 3, **options).named_parameters()]

    biases = [n for n in of() if n.rsplit(".", 1)[-1] in ("b", "bias")]
    assert biases
    assert of(bias=False) == [n for n in of() if n not in biases]
