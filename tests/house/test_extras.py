"""The options of co.nn that torch.nn does not have do what their equations say.

Recurrent dropout, zoneout, peepholes, layer normalisation and initialisers: outputs, gradients and
Hessian products are compared with the slow loops of tests/support/stacks.py, with the same masks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import gradgradcheck

import coadjoint as co
import emulated
import oracles
import stacks
from cases import MAKE
from coadjoint.errors import InputError, Unsupported
from coadjoint.sweeps.engines.cuda import engine as cuda_engine
from coadjoint.sweeps.rows import Rows
from problems import CELLS, Problem
from stacks import Truth, apart, called, loss_of

pytestmark = pytest.mark.slow

ENGINES = ("reference", "eager", "cpu", "autograd")
F32, F64 = torch.float32, torch.float64
NOISE = {
    "dropout": {"recurrent_dropout": 0.4},
    "zoneout": {"zoneout": 0.3},
    "both": {"recurrent_dropout": 0.3, "zoneout": 0.2},
}
EXTRAS = {  # (kind, extras)
    **{
        f"{kind} {name}": (kind, extras)
        for kind, (name, extras) in itertools.product(MAKE, NOISE.items())
    },
    "lstm zoneout h": ("lstm", {"zoneout": (0.4, 0.0)}),
    "lstm zoneout c": ("lstm", {"zoneout": (0.0, 0.4)}),
    "peephole": ("lstm", {"peephole": True}),
    "peephole both": ("lstm", {"peephole": True, "recurrent_dropout": 0.3, "zoneout": (0.2, 0.3)}),
    **{f"{kind} norm": (kind, {"layer_norm": True}) for kind in MAKE},
}
SHAPES = {  # (options, lengths, packed)
    "one layer": ({}, [3, 3], False),
    "packed": ({"num_layers": 2, "bidirectional": True, "dropout": 0.3}, [2, 4, 1], True),
    "no bias": ({"bias": False, "batch_first": True}, [1, 1, 1], False),
}


def made(name, engine="auto", seed=0, **options):
    kind, extras = EXTRAS[name]
    torch.manual_seed(seed)
    m = MAKE[kind](2, 3, **extras, **options, dtype=F64)
    with torch.no_grad():  # away from where everything is symmetric
        for n, p in m.named_parameters():
            if n.startswith(("gain", "shift")):
                p.add_(0.3 * torch.randn_like(p))
    m.engine = engine
    return m


class Pair:
    """A module in training (or not) and the truth, on the same leaves."""

    def __init__(self, module, lengths, packed, loss="all", seed=5):
        _, u, start = stacks.leaves(module, lengths, given=True)
        order = sorted(range(len(lengths)), key=lambda j: -lengths[j]) if packed else None
        self.truth = Truth(module, dict(module.named_parameters()), u, start, loss, order, seed)
        torch.manual_seed(seed)
        self.outputs, self.h_n, self.c_n = called(module, u, start, packed)
        self.loss = loss_of(loss, self.outputs, self.h_n, self.c_n)

    def same(self):
        """Outputs, last states, the gradient and a Hessian product by everything."""
        truth = self.truth
        for j, stack in enumerate(truth.stacks):
            assert apart(self.outputs[j], stack.output, 1e-6) < 1e-12
            assert apart(self.h_n[:, j], stack.h_n, 1e-6) < 1e-12
            assert apart(self.c_n[:, j], stack.c_n, 1e-6) < 1e-12
        v = oracles.directions(truth.leaves, 1)
        found = []
        for value in (self.loss.sum(), truth.loss.sum()):
            g = truth.gradient(value, create_graph=True)
            found.append((g, truth.gradient(oracles.dot(g, v, g))))
        for what, ours, true in zip(("gradient", "Hessian product"), *found, strict=True):
            for name, y in true.items():
                off = (ours[name] - y).abs().max() / y.abs().max().clamp_min(1e-6)
                assert off < 1e-10, f"{what} by {name}: off by {off:.1e}"


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sampled(2)
def test_options_follow_their_equations(name, shape):
    """In training, with the masks that are drawn, and in evaluation; engines in turn."""
    options, lengths, packed = SHAPES[shape]
    i = list(SHAPES).index(shape)
    turn = list(EXTRAS).index(name) + i
    some = ("auto",) if "norm" in name else (ENGINES[turn % 4], ENGINES[(turn + 2) % 4])
    for k, engine in enumerate(some):
        module = made(name, engine, **options)
        Pair(module, lengths, packed, ("all", "output", "h_n")[i]).same()
        if k == 0:
            Pair(module.eval(), lengths, packed, "all").same()


@pytest.mark.parametrize(
    "name",
    [
        "tanh both",
        "gru both",
        "lstm dropout",
        "lstm zoneout c",
        "peephole both",
        "gru norm",
        "lstm norm",
    ],
)
def test_second_derivatives_pass_finite_differences(name):
    """By finite differences, through inputs, initial states and weights at once."""
    kind, extras = EXTRAS[name]
    torch.manual_seed(0)
    m = MAKE[kind](1, 2, **extras, dtype=F64)
    w = dict(m.named_parameters())
    u, x0 = (
        torch.randn(2, 2, 1, dtype=F64),
        [torch.randn(1, 2, 2, dtype=F64) for _ in range(m.slots)],
    )

    def run(u, *more):
        start, weights = more[: m.slots], dict(zip(w, more[m.slots :], strict=True))
        torch.manual_seed(3)
        hx = tuple(start) if m.slots > 1 else start[0]
        return torch.func.functional_call(m, weights, (u, hx))[0]

    inputs = [y.detach().clone().requires_grad_() for y in (u, *x0, *w.values())]
    assert gradgradcheck(run, inputs, fast_mode=True)


def test_one_mask_is_used_at_all_steps():
    """h' = relu(m h): what a mask drops stays dropped, what it keeps grows by 1 / (1 - p) at every
    step.
    """
    m = co.nn.RNN(
        1, 400, nonlinearity="relu", recurrent_dropout=0.25, init="identity", bias=False, dtype=F64
    )
    torch.nn.init.ones_(m.weight_ih_l0)
    u = torch.zeros(5, 3, 1, dtype=F64)
    u[0] = 1
    y, _ = m(u)
    assert torch.equal(y[0], torch.ones(3, 400, dtype=F64))
    kept = y[1] > 0
    for t in range(1, 5):
        assert torch.equal(y[t] > 0, kept)
        assert torch.allclose(y[t][kept], torch.tensor((4 / 3) ** t, dtype=F64))
    assert not torch.equal(kept[0], kept[1])
    assert abs(kept.double().mean() - 0.75) < 0.05
    again, _ = m(u)
    assert not torch.equal(again, y)
    assert torch.equal(m.eval()(u)[0], torch.ones(5, 3, 400, dtype=F64))


def test_the_first_state_is_dropped_too():
    """h_0 is under the mask too."""
    m = co.nn.RNN(1, 300, nonlinearity="relu", recurrent_dropout=0.5, init="identity", bias=False)
    y, _ = m(torch.zeros(2, 1, 1), torch.ones(1, 1, 300))
    assert set(y[0].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(y[1], 2 * y[0])


def test_zoneout_keeps_units_as_they_were():
    """Where nothing is carried by W, a unit holds one of the inputs it has seen; in evaluation,
    their expectation.
    """
    p = 0.3
    m = co.nn.RNN(1, 500, nonlinearity="relu", zoneout=p, bias=False, dtype=F64)
    torch.nn.init.zeros_(m.weight_hh_l0)
    torch.nn.init.ones_(m.weight_ih_l0)
    u = torch.arange(1.0, 6.0, dtype=F64)[:, None, None].expand(5, 2, 1)
    y, _ = m(u)
    before = torch.cat([torch.zeros(1, 2, 500, dtype=F64), y[:-1]])
    kept = y == before
    assert torch.equal(torch.where(kept, before, u), y)
    assert (kept.double().mean((1, 2)) - p).abs().max() < 0.07
    assert not torch.equal(kept[1], kept[2])
    assert not torch.equal(kept[:, 0], kept[:, 1])
    mean, expected = torch.zeros(2, 500, dtype=F64), m.eval()(u)[0]
    for t in range(5):
        mean = p * mean + (1 - p) * u[t]
        assert torch.allclose(expected[t], mean)


def test_probabilities_of_zero_change_nothing():
    """Probabilities of zero draw nothing and change nothing."""
    torch.manual_seed(0)
    m = co.nn.LSTM(2, 3, 2, dtype=F64)
    other = co.nn.LSTM(
        2, 3, 2, recurrent_dropout=0.0, zoneout=(0.0, 0), layer_norm=False, dtype=F64
    )
    other.load_state_dict(m.state_dict())
    u = torch.randn(4, 2, 2, dtype=F64)
    state = torch.get_rng_state()
    assert torch.equal(m(u)[0], other(u)[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert other.extras == {}
    for name, quiet in (("recurrent_dropout", True), ("zoneout", False)):
        noisy = co.nn.LSTM(2, 3, 2, **{name: 0.5}, dtype=F64).eval()
        noisy.load_state_dict(m.state_dict())
        state = torch.get_rng_state()
        assert (
            torch.equal(noisy(u)[0], m(u)[0]) == quiet
        )  # zoneout has its expectation in evaluation
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", MAKE)
def test_initialisers_set_each_gate_of_W(kind):
    """Each gate of W_hh; again after reset_parameters.

    All else begins as torch.nn's does, from the same seed.
    """
    for init, options in itertools.product(
        ("orthogonal", "identity"), ({}, {"num_layers": 2, "bidirectional": True})
    ):
        torch.manual_seed(4)
        m = MAKE[kind](2, 5, init=init, **options)
        torch.manual_seed(4)
        theirs = MAKE[kind](2, 5, **options).to_torch()
        for _ in range(2):
            for name, p in m.named_parameters():
                if not name.startswith("weight_hh"):
                    continue
                for block in p.detach().split(5):
                    expected = torch.eye(5)
                    assert torch.allclose(
                        block @ block.T if init == "orthogonal" else block, expected, atol=1e-5
                    )
            blocks = m.weight_hh_l0.detach().split(5)
            if init == "orthogonal" and len(blocks) > 1:
                assert not torch.allclose(blocks[0], blocks[1])
            m.reset_parameters()
        torch.manual_seed(4)
        m.reset_parameters()
        for name, p in theirs.named_parameters():
            assert torch.equal(p, m.get_parameter(name)) == (not name.startswith("weight_hh"))
        assert f"init='{init}'" in repr(m)


def test_the_forget_bias_is_set():
    for options in ({}, {"num_layers": 2, "bidirectional": True, "proj_size": 2}):
        m = co.nn.LSTM(2, 5, forget_bias=1.5, **options)
        for _ in range(2):
            for suffix in m.suffixes:
                ih, hh = (m.get_parameter(n + suffix).detach() for n in ("bias_ih", "bias_hh"))
                assert ((ih + hh)[5:10] == 1.5).all()
                assert ((ih + hh)[:5] != 0).all()
                assert ((ih + hh)[10:] != 0).all()
            m.reset_parameters()
    torch.manual_seed(0)
    ours = co.nn.LSTM(2, 3)
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(2, 3)
    assert all(torch.equal(p, theirs.get_parameter(n)) for n, p in ours.named_parameters())
    assert "forget_bias=1.5" in repr(m)


def test_new_parameters_have_their_names_sizes_and_first_values():
    """Their names, sizes and first values; from a seed the shared weights are torch.nn's, whatever
    comes beside them.
    """
    for extras, sizes in (
        ({"peephole": True}, {"weight_pi": 5, "weight_pf": 5, "weight_po": 5}),
        ({"layer_norm": True}, {"gain_ih": 20, "gain_hh": 20, "gain_c": 5, "shift_c": 5}),
    ):
        torch.manual_seed(0)
        theirs = torch.nn.LSTM(2, 5, 2, bidirectional=True)
        torch.manual_seed(0)
        m = co.nn.LSTM(2, 5, 2, bidirectional=True, **extras)
        new = {n: p for n, p in m.named_parameters() if n not in dict(theirs.named_parameters())}
        assert {n: len(p) for n, p in new.items()} == {
            n + s: size for n, size in sizes.items() for s in m.suffixes
        }
        assert all(torch.equal(p, m.get_parameter(n)) for n, p in theirs.named_parameters())
        for _ in range(2):
            for n, p in new.items():
                if n.startswith("weight_p"):
                    assert 0 < p.abs().max() <= 5**-0.5
                else:
                    assert (p == float(n.startswith("gain"))).all()
            m.reset_parameters()
        other = co.nn.LSTM(2, 5, 2, bidirectional=True, **extras)
        other.load_state_dict(m.state_dict())
        u = torch.randn(3, 2, 2)
        assert torch.equal(other(u)[0], m(u)[0])
        loaded = co.nn.LSTM.from_torch(theirs, **extras)
        assert torch.equal(loaded.weight_hh_l1_reverse, theirs.weight_hh_l1_reverse)


REFUSED = {
    "peephole of a GRU": (lambda: co.nn.GRU(2, 3, peephole=True), InputError,
        "arguments of an LSTM"),
    "peephole of an RNN": (lambda: co.nn.RNN(2, 3, peephole=True), InputError,
        "arguments of an LSTM"),
    "forget bias of a GRU": (lambda: co.nn.GRU(2, 3, forget_bias=1.0), InputError,
        "no forget gate"),
    "forget bias": (lambda: co.nn.LSTM(2, 3, bias=False, forget_bias=1.0), Unsupported,
        "bias=False leaves out all biases. Leave out forget_bias"),
    "projection": (lambda: co.nn.LSTM(2, 3, proj_size=2, zoneout=0.1), Unsupported,
        "a projected state .* Leave out proj_size"),
    "projection, mask": (lambda: co.nn.LSTM(2, 3, proj_size=2, recurrent_dropout=0.1), Unsupported,
        "a projected state"),
    "norm, noise": (lambda: co.nn.GRU(2, 3, layer_norm=True, zoneout=0.1), Unsupported,
        "uses different equations. Leave out layer_norm"),
    "norm, peephole": (lambda: co.nn.LSTM(2, 3, layer_norm=True, peephole=True), Unsupported,
        "uses different equations"),
    "norm, projection": (lambda: co.nn.LSTM(2, 3, layer_norm=True, proj_size=2), Unsupported,
        "uses different equations"),
    "norm, engine": (lambda: co.nn.GRU(2, 3, layer_norm=True, engine="cpu"), Unsupported,
        "engine 'cpu' generates .*engine='autograd'"),
    "dropout": (lambda: co.nn.GRU(2, 3, recurrent_dropout=1.0), InputError,
        "recurrent_dropout must be a probability, 0 <= p < 1; got 1.0"),
    "dropout, kind": (lambda: co.nn.GRU(2, 3, recurrent_dropout=True), InputError,
        "must be a probability"),
    "zoneout": (lambda: co.nn.GRU(2, 3, zoneout=-0.1), InputError, "zoneout must be a probability"),
    "zoneout, two": (lambda: co.nn.GRU(2, 3, zoneout=(0.1, 0.2)), InputError,
        "one probability, or 1, one for each part of the state"),
    "zoneout, three": (lambda: co.nn.LSTM(2, 3, zoneout=(0.1, 0.2, 0.3)), InputError,
        "one probability, or 2, one"),
    "init": (lambda: co.nn.GRU(2, 3, init="orthogonl"), InputError, "did you mean 'orthogonal'"),
    "to torch, peephole": (lambda: co.nn.LSTM(2, 3, peephole=True).to_torch(), Unsupported,
        "torch.nn.LSTM has no peephole"),
    "to torch, noise": (
        lambda: co.nn.GRU(2, 3, recurrent_dropout=0.1, zoneout=0.2).to_torch(), Unsupported,
        "torch.nn.GRU has no recurrent_dropout, zoneout",
    ),
    "to torch, norm": (lambda: co.nn.RNN(2, 3, layer_norm=True).to_torch(), Unsupported,
        "torch.nn.RNN has no layer_norm"),
    "a network": (
        lambda: co.Network(
            co.cells.noisy(co.cells.lstm, True, True), inputs=2, hidden=3, outputs=1
        ),
        Unsupported,
        r"is given data at each step \(k_h, k_c, m\).* Use co.nn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_fit_are_refused(name):
    make, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        make()


def test_layer_norm_runs_on_engine_autograd():
    m = co.nn.LSTM(2, 3, layer_norm=True)
    assert (m.engine, m.engine.why) == ("autograd", "layer_norm=True is not elementwise over units")
    with pytest.raises(Unsupported, match="is not one"):
        m.engine = "eager"
    m.engine = "autograd"


def test_a_noisy_cell_keeps_what_W_reads_in_a_slot():
    """What W reads is a slot of its own; what is given comes after the gates that stand apart."""
    both = co.cells.noisy(co.cells.gru, True, True)
    assert (both.slots, both.gates, both.given, both.side) == (
        ("h", "r"),
        ("r", "u", "n"),
        ("k_h", "m"),
        ("n",),
    )
    assert (both.name, both.reads, dict(both.parameters)) == (
        "gru dropout zoneout",
        "r",
        {"b_n": 0.0},
    )
    assert co.cells.noisy(co.cells.gru, True, True) is both
    assert co.cells.noisy(co.cells.lstm, False, True).given == ("k_h", "k_c")
    assert co.cells.noisy(co.cells.lstm, False, True).slots == ("h", "c")
    torch.manual_seed(0)
    d, B = 3, 4
    cell = co.cells.noisy(co.cells.lstm, True, True)
    base, x, W = torch.randn(B, 4 * d), torch.randn(B, 3 * d), torch.randn(4 * d, d)
    side = torch.rand(B, 3 * d)
    h, c, r = x.chunk(3, 1)
    k_h, k_c, m = side.chunk(3, 1)
    i, f, g, o = (r @ W.T + base).chunk(4, 1)
    new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    new_h = k_h * h + (1 - k_h) * o.sigmoid() * new_c.tanh()
    expected = torch.cat([new_h, k_c * c + (1 - k_c) * new_c, m * new_h], 1)
    assert torch.allclose(cell.step(base, side, W, x, {}), expected, atol=1e-6)


def test_a_cell_of_the_user_may_be_given_data():
    """A user's cell may be given data, too; names must differ from those of the gates."""

    @co.cell(slots="h", gates="a", given="w")
    def weighted(z, v, x, p):
        return v.w * co.tanh(z.a + v.a) + (1 - v.w) * x.h

    assert weighted.given == ("w",)
    assert not weighted.anonymous
    with pytest.raises(Unsupported, match=r"is given data at each step \(w\)"):
        co.Network(weighted, inputs=1, hidden=2, outputs=1)
    with pytest.raises(InputError, match="different identifiers"):
        co.cell(slots="h", gates="a", given="a")


def test_the_peephole_cell_of_a_network_is_that_of_the_module():
    """The cell by its name in co.Network, and the module."""
    torch.manual_seed(0)
    net = co.Network("peephole", inputs=2, hidden=3, outputs=1, dtype=F64)
    m = co.nn.LSTM(2, 3, peephole=True, dtype=F64)
    with torch.no_grad():
        for name, p in (("weight_hh", net.W), ("weight_ih", net.R), ("bias_ih", net.b)):
            m.get_parameter(f"{name}_l0").copy_(p)
        m.bias_hh_l0.zero_()
        for name in ("pi", "pf", "po"):
            net.p[name].copy_(m.get_parameter(f"weight_{name}_l0"))
    u = torch.randn(5, 2, 2, dtype=F64)
    assert apart(net(u).x[1:, :, :3], m(u)[0]) < 1e-14


def given(name="noisy", sizes=(3, 3, 2), d=5, dtype=F64):
    """A sweep's problem of a cell that is given masks."""
    CELLS["noisy"] = co.cells.noisy(co.cells.lstm, True, True)
    problem = Problem(name, list(sizes), d, dtype)
    g = torch.Generator().manual_seed(1)
    m = torch.rand(problem.rows.N, len(problem.cell.given) * d, generator=g, dtype=F64)
    problem.v = m.round().to(dtype)
    return problem


SOME = {"adjoint": ("s sa", "s_last link", "s s_last k_last scaled"), "tangent": ("g ga link",)}


@pytest.fixture
def another(monkeypatch):
    """What `given` enters is taken out."""
    monkeypatch.setitem(CELLS, "noisy", None)


@pytest.mark.skipif(
    emulated.COMPILER is None, reason="no C++ compiler (c++, g++ or $CXX) was found"
)
def test_given_data_reaches_the_cuda_loops(monkeypatch, another):
    """The kernels' own source, on threads of the CPU."""
    emulated.install(monkeypatch, emulated.Mode())
    try:
        given(dtype=F32).against(cuda_engine, **SOME)
    finally:
        monkeypatch.undo()
        emulated.forget()


def test_reversed_time_is_its_own_inverse():
    """Reversed time of ragged rows is its own inverse, and what the direction "reverse" reads."""
    rows = Rows([3, 2, 2, 1])
    y = torch.arange(8)[:, None]
    assert torch.equal(rows.reverse_time(rows.reverse_time(y)), y)
    assert rows.reverse_time(y)[:, 0].tolist() == [7, 6, 2, 5, 4, 3, 1, 0]
