"""Cells: torch's own as oracles, cells and activations of a user, large arguments, what is refused."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import coadjoint as co
from coadjoint.cells import ACTIVATIONS, CELLS

F64 = torch.float64
ENGINES = ["cpu", "reference", "autograd"]
T, B, I, D = 6, 3, 2, 4
BUILT_IN = [("lstm", None), ("gru", None)] + [(c, a) for c in ("elman", "leaky", "rate") for a in ACTIVATIONS]
OWN = {
    "gelu": lambda a: a * (1 + co.erf(a / math.sqrt(2))) / 2,
    "silu": lambda a: a * torch.sigmoid(a),
    "sine": torch.sin,
    "softsign": lambda a: a / (1 + co.abs(a)),
    "lecun": lambda a: 1.7159 * co.tanh(2 * a / 3),
    "atan": co.atan,
}


def close(ours, truth, bar=1e-12):
    scale = max(float(truth.detach().norm()), 1e-300)
    return float((ours - truth).detach().norm()) <= bar * scale


def inputs(seed=0, T=T, B=B, dtype=F64):
    return torch.randn(T, B, I, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def make(cell, engine="cpu", seed=0, **options):
    torch.manual_seed(seed)
    return co.Network(cell, inputs=I, hidden=D, outputs=2, dtype=F64, engine=engine, **options)


def penalised(net, u, loss=lambda y: (y**2).sum(-1)):
    """states, costates, and the gradient of loss + penalty by name."""
    run = net(u)
    lam = run.costates(loss)
    objective = (lam.loss + 0.3 * co.penalties.log_ratio(lam) + co.penalties.variance(lam)).mean()
    names, parameters = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(objective, parameters)
    return run.x.detach(), lam.lam.detach(), dict(zip(names, grads, strict=True))


# torch.nn as oracle


def from_torch(net, module, suffix="_l0"):
    """Copy the weights of a torch RNN (or cell) into a network: b_ih + b_hh = b, but torch's b_hn is p.b_n."""
    w = {n.removesuffix(suffix): p.detach() for n, p in module.named_parameters()}
    with torch.no_grad():
        net.W.copy_(w["weight_hh"])
        net.R.copy_(w["weight_ih"])
        net.b.copy_(w["bias_ih"] + w["bias_hh"])
        if "b_n" in net.p:
            net.b[-D:] = w["bias_ih"][-D:]
            net.p["b_n"].copy_(w["bias_hh"][-D:])
    return net


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("cell", "module", "options"),
    [
        ("elman", nn.RNN, {}),
        ("elman", nn.RNN, {"nonlinearity": "relu"}),
        ("lstm", nn.LSTM, {}),
        ("gru", nn.GRU, {}),
    ],
)
def test_outputs_and_gradients_of_torch(cell, module, options, engine):
    torch.manual_seed(1)
    theirs = module(I, D, **options).to(F64)
    net = make(cell, engine, activation=options.get("nonlinearity"), readout="every")
    from_torch(net, theirs)
    u = inputs().requires_grad_()
    out, _ = theirs(u)
    run = net(u)
    assert close(run.x[1:, :, :D], out)
    weight = torch.randn(T, B, D, dtype=F64)
    truth = torch.autograd.grad((weight * out).sum(), [u, *theirs.parameters()])
    ours = torch.autograd.grad((weight * run.x[1:, :, :D]).sum(), [u, net.R, net.W, net.b])
    for name, found, expected in zip(("u", "R", "W", "b"), ours, truth, strict=False):
        assert close(found, expected), name
    if cell == "gru":
        (of_bn,) = torch.autograd.grad((weight * net(u).x[1:]).sum(), net.p["b_n"])
        assert close(of_bn, truth[4][-D:])


@pytest.mark.parametrize(("cell", "module"), [("elman", nn.RNNCell), ("lstm", nn.LSTMCell), ("gru", nn.GRUCell)])
def test_torch_cell_modules_agree_with_the_formulas(cell, module):
    torch.manual_seed(2)
    theirs = module(I, D).to(F64)
    formula, step = from_torch(make(cell), theirs, suffix=""), make(theirs, "auto")
    step.load_state_dict({"V": formula.V, "b_o": formula.b_o}, strict=False)
    (x, lam, g), (x2, lam2, g2) = penalised(formula, inputs()), penalised(step, inputs())
    assert close(x, x2)
    assert close(lam, lam2)
    for ours, torchs in {"W": "weight_hh", "R": "weight_ih", "b": "bias_ih"}.items():
        assert close(g[ours], g2[f"step.{torchs}"], 1e-11), ours
    assert close(g["V"], g2["V"], 1e-11)


def test_step_function_agrees_with_the_formula():
    net = make("elman")
    step = make(lambda u, h: torch.tanh(u @ net.R.T + h @ net.W.T + net.b), "autograd")
    step.load_state_dict({"V": net.V, "b_o": net.b_o}, strict=False)
    (x, lam, g), (x2, lam2, g2) = penalised(net, inputs()), penalised(step, inputs())
    assert close(x, x2)
    assert close(lam, lam2)
    assert close(g["V"], g2["V"], 1e-11)
    run = step(inputs()).costates(lambda y: (y**2).sum(-1))
    (gW,) = torch.autograd.grad(
        (run.loss + 0.3 * co.penalties.log_ratio(run) + co.penalties.variance(run)).mean(), net.W
    )
    assert close(gW, g["W"], 1e-11)


def test_step_function_of_two_slots_returns_its_parts():
    net = make(lambda u, state: (state[1], u @ torch.ones(I, D, dtype=F64) - state[0]), "auto", slots=2)
    run = net(inputs())
    assert run.x.shape == (T + 1, B, 2 * D)
    assert torch.equal(run.x[2, :, :D], run.x[1, :, D:])


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_random_step_function_is_refused_for_costates(engine):
    torch.manual_seed(0)
    cell = nn.RNNCell(I, D).to(F64)
    net = make(lambda u, h: nn.functional.dropout(cell(u, h), 0.5), engine)
    run = net(inputs())
    with pytest.raises(co.Unsupported, match=r"random or keeps a memory.*Pass what is drawn"):
        run.costates(lambda y: y.sum(-1))


def test_step_function_that_returns_something_else():
    for step, words in (
        (lambda u, h: h[:, :1], r"the step function returned \[3, 1\]"),
        (lambda u, h: None, "NoneType"),
    ):
        with pytest.raises(co.InputError, match=words):
            make(step, "auto")(inputs())


# cells and activations of a user


SOURCE = '''
"""A cell in a file of its own."""
import coadjoint as co

@co.cell(slots="h s", gates="a b", parameters={"kappa": 0.8}, reads="h s")
def resonant(z, v, x, p):
    """s' = kappa s + tanh(z_a + v_a), h' = s' sigmoid(z_b v_b)"""
    s = p.kappa * x.s + co.tanh(z.a + v.a)
    return s * co.sigmoid(z.b * v.b), s
'''


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engines_agree(cell, bar=1e-11, **options):
    found = []
    for engine in ENGINES:
        net = make(cell, engine, **options)
        found.append(penalised(net, inputs()))
    for x, lam, g in found[:2]:
        assert close(x, found[2][0])
        assert close(lam, found[2][1], bar)
        for name, expected in found[2][2].items():
            assert close(g[name], expected, bar), name
    return found[0][2]


def test_cell_in_a_file_of_its_own(tmp_path):
    path = tmp_path / "resonant.py"
    path.write_text(SOURCE)
    cell = load(path).resonant
    assert cell.name == "resonant"
    assert "h' = s' sigmoid" in cell.equations
    assert cell.side == ("b",)
    gradient = engines_agree(cell)
    assert float(gradient["p.kappa"].norm()) > 0
    assert make(cell).W.shape == (2 * D, 2 * D)


def test_the_example_of_an_own_cell_runs(capsys):
    path = Path(__file__).parents[1] / "examples" / "own_cell.py"
    if not path.exists():
        pytest.skip("the examples are not part of this installation")
    load(path).main()
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", OWN)
def test_activation_written_by_the_user(name):
    engines_agree("elman", activation=OWN[name])


@co.cell(slots="h", reads=None)
def unread(z, v, x, p):
    return co.tanh(0.5 * x.h + z + v)


@co.cell(slots="h", reads=None, parameters={"w": 0.7})
def diagonal(z, v, x, p):
    return torch.tanh(p.w * x.h + v)


@co.cell(slots="a b", reads="b a")
def swapped(z, v, x, p):
    return co.tanh(z + v) + 0.1 * x.b, 0.5 * x.a


@co.cell(slots="a b", reads=lambda x: (co.tanh(x.a) * x.b, x.b))
def nonlinear(z, v, x, p):
    return co.softplus(z + v), co.sin(x.a) - 0.3 * x.b


@co.cell(slots="h", reads=lambda x: co.relu(x.h) + 1, parameters={"tau": 0.3})
def shifted(z, v, x, p):
    return x.h + p.tau * (-x.h + z + v)


@co.cell(slots="h k")
def constant_slot(z, v, x, p):
    return co.tanh(z + v) * x.k, 1.0 + 0 * x.k


@pytest.mark.parametrize("cell", [unread, diagonal, swapped, nonlinear, shifted, constant_slot], ids=lambda c: c.name)
def test_reads_of_every_kind(cell):
    engines_agree(cell)
    reads = {"unread": 0, "diagonal": 0, "swapped": 2, "nonlinear": 2}.get(cell.name, 1)
    W = make(cell).W
    assert (W is None) if reads == 0 else tuple(W.shape) == (D, reads * D)


def test_constant_inside_a_function_is_a_constant():
    @co.cell(slots="h")
    def half(z, v, x, p):
        return co.tanh(z + v) + co.sigmoid(0 * x.h)

    engines_agree(half)


@pytest.mark.parametrize(("name", "parameter"), [("leaky", "leak"), ("rate", "tau"), ("gru", "b_n")])
def test_per_unit_parameters_are_trained(name, parameter):
    net = make(name)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.p[parameter].detach().clone()
    y = torch.randn(B, 2, dtype=F64)
    e = co.Penalised("log-ratio", 0.1)(net, co.Batch(inputs(), y), "squared")
    e.write_grad(net)
    optimiser.step()
    assert (e.gradient[f"p.{parameter}"] != 0).all()
    assert (net.p[parameter] != before).all()


# what follows from a formula


def test_what_engines_may_keep():
    lstm, gru, elman = co.cells.lstm, co.cells.gru, co.cells.elman()
    assert (elman.kept, elman.needs_a, elman.side) == ((), False, ())  # slopes of tanh from x itself
    assert sorted(n.op for n in lstm.kept) == ["sigmoid"] * 3 + ["tanh"] * 2
    assert not lstm.needs_a
    assert gru.side == ("n",)
    assert gru.needs_a  # r's slope multiplies z_n + b_n
    assert not co.cells.elman("relu").needs_a
    assert co.cells.elman("softplus").needs_a
    assert co.cells.elman(torch.sin).needs_a
    assert lstm.read_slot == 0
    assert nonlinear.read_slot is None
    assert co.cells.elman("tanh") is co.cells.elman("tanh")
    assert "h c" in repr(lstm)


@pytest.mark.parametrize(
    ("arguments", "formula", "error", "words"),
    [
        ({}, lambda z, v, x, p: z if z > 0 else v, co.KindError, "cannot branch on a value"),
        ({}, lambda z, v, x, p: torch.cumsum(z + v, 0), co.KindError, "torch's 'cumsum' is not one of the functions"),
        ({}, lambda z, v, x, p: x.c + z + v, co.InputError, r"this cell has no x.c; its x has: h\."),
        ({}, lambda z, v, x, p: p.tau * (z + v), co.InputError, r"no p.tau; its p has: none"),
        ({"gates": "i f"}, lambda z, v, x, p: z.o, co.InputError, r"no z.o; its z has: i, f\."),
        ({"slots": "h c"}, lambda z, v, x, p: z + v, co.InputError, "has slots h c but its formula returns 1 value"),
        ({}, lambda z, v, x, p: "h", co.CoadjointError, "str"),
        ({}, lambda z, v, x, p: None, co.CoadjointError, "NoneType"),
        ({}, lambda z, v, x, p: torch.ones(3) * (z + v), co.CoadjointError, "Tensor"),
        ({"slots": "h h"}, lambda z, v, x, p: (z, v), co.InputError, "slots must be different identifiers"),
        ({"slots": ""}, lambda z, v, x, p: (), co.InputError, "slots must be"),
        ({"gates": "1a"}, lambda z, v, x, p: z, co.InputError, "gates must be different identifiers"),
        ({"reads": "c"}, lambda z, v, x, p: z + v, co.InputError, "unknown slot 'c'"),
    ],
)
def test_formula_that_cannot_be_recorded_is_refused_where_it_is_written(arguments, formula, error, words):
    with pytest.raises(error, match=words):
        co.cell(**arguments)(formula)


@pytest.mark.parametrize(
    ("cell", "activation", "error", "words"),
    [
        ("lstn", None, co.InputError, "unknown cell 'lstn'; did you mean 'lstm'"),
        ("elman", "tanhh", co.InputError, "unknown activation 'tanhh'; did you mean 'tanh'"),
        ("lstm", "relu", co.InputError, "fixes its activations"),
        ("elman", 3, co.KindError, "activation must be a name"),
        ("elman", [1], co.KindError, "activation must be a name or a function; got list"),
        (co.cells.lstm, "tanh", co.InputError, "activation= belongs to a cell given by name"),
        (3, None, co.KindError, "cell must be a name"),
        ("elman", lambda a: 1 if a > 0 else 0, co.KindError, "cannot branch"),
        ("elman", torch.nn.functional.gelu, co.KindError, "gelu"),
    ],
)
def test_unknown_cells_and_activations(cell, activation, error, words):
    with pytest.raises(error, match=words):
        make(cell, activation=activation)


# large arguments


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["f32", "f64"])
@pytest.mark.parametrize(("cell", "activation"), BUILT_IN + [("elman", a) for a in OWN])
def test_finite_at_arguments_of_ten_thousand(cell, activation, dtype):
    """Saturated units of either sign, first and second order, all engines: finite, and zero costates are left out."""
    u = torch.tensor([[1e4, 0], [-1e4, 0], [0, 1e4], [50, -50], [1e4, -1e4], [0, 0]], dtype=dtype)
    for engine in ENGINES:
        torch.manual_seed(0)
        net = co.Network(
            cell, inputs=2, hidden=3, outputs=1, activation=OWN.get(activation, activation), dtype=dtype, engine=engine
        )
        with torch.no_grad():
            net.R.copy_(torch.cat([torch.tensor([[1, 0.0], [0, 1], [-1, 1]])] * (len(net.R) // 3)))
        lam = net(torch.stack([u, u.flip(0), -u])).costates(lambda y: (y**2).sum(-1))
        for name in ("log-ratio", "log-variance", "omega"):
            objective = (lam.loss + co.penalties.PENALTIES[name](lam)).mean()
            grads = torch.autograd.grad(objective, list(net.parameters()), retain_graph=True)
            assert all(torch.isfinite(g).all() for g in grads), (engine, name)
        assert torch.isfinite(lam.rows).all()


def test_tables_hold_what_the_names_promise():
    assert sorted(CELLS) == ["elman", "gru", "leaky", "lstm", "peephole", "rate"]
    assert sorted(ACTIVATIONS) == ["identity", "relu", "sigmoid", "softplus", "tanh"]
    for name in CELLS:
        assert make(name).cell.equations, name
    x = make("leaky")(inputs()).x
    net = make("leaky")
    np.testing.assert_allclose(net.p["leak"].detach(), 0.5)
    by_hand = 0.5 * x[0] + 0.5 * torch.tanh(x[0] @ net.W.T + inputs()[0] @ net.R.T + net.b)
    assert close(x[1], by_hand)
