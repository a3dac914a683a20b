"""Cells compute what their equations say, those of torch and those of a user alike.

Also activations of a user, large arguments, and what is refused.
"""

import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import build
import cases
import coadjoint as co
import warm
from coadjoint.cells.activations import ACTIVATIONS
from coadjoint.cells.formula import held
from coadjoint.cells.library import CELLS
from compare import close, difference
from paths import EXAMPLES, ROOT
from sampling import one_in

F64 = torch.float64
ENGINES = ["cpu", "reference", "autograd"]
T, B, I, D = 6, 3, 2, 4
BUILT_IN = [(c, None) for c in CELLS if c not in ("elman", "leaky", "rate")] + [
    (c, a) for c in ("elman", "leaky", "rate") for a in ACTIVATIONS
]
OWN = {
    "gelu": lambda a: a * (1 + co.erf(a / math.sqrt(2))) / 2,
    "silu": lambda a: a * torch.sigmoid(a),
    "sine": torch.sin,
    "softsign": lambda a: a / (1 + co.abs(a)),
    "lecun": lambda a: 1.7159 * co.tanh(2 * a / 3),
    "atan": co.atan,
}


def inputs(seed=0, T=T, B=B, dtype=F64):
    return torch.randn(T, B, I, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def make(cell, engine="cpu", **options):
    return build.network(cell, inputs=I, hidden=D, engine=engine, **options)


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
    """Copy the weights of a torch RNN (or cell) into a network: b_ih + b_hh = b, but torch's b_hn
    is p.b_n.
    """
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
def test_cells_have_the_outputs_and_gradients_of_torch(cell, module, options, engine):
    torch.manual_seed(1)
    theirs = module(I, D, **options).to(F64)
    net = make(cell, engine, activation=options.get("nonlinearity"), readout="every")
    from_torch(net, theirs)
    u = inputs().requires_grad_()
    out, _ = theirs(u)
    run = net(u)
    close(run.x[1:, :, :D], out, 1e-12)
    weight = torch.randn(T, B, D, dtype=F64)
    truth = torch.autograd.grad((weight * out).sum(), [u, *theirs.parameters()])
    ours = torch.autograd.grad((weight * run.x[1:, :, :D]).sum(), [u, net.R, net.W, net.b])
    for name, found, expected in zip(("u", "R", "W", "b"), ours, truth, strict=False):
        close(found, expected, 1e-12, name)
    if cell == "gru":
        (of_bn,) = torch.autograd.grad((weight * net(u).x[1:]).sum(), net.p["b_n"])
        close(of_bn, truth[4][-D:], 1e-12)


@pytest.mark.parametrize(
    ("cell", "module"), [("elman", nn.RNNCell), ("lstm", nn.LSTMCell), ("gru", nn.GRUCell)]
)
def test_torch_cell_modules_agree_with_the_formulas(cell, module):
    torch.manual_seed(2)
    theirs = module(I, D).to(F64)
    formula, step = from_torch(make(cell), theirs, suffix=""), make(theirs, "auto")
    step.load_state_dict({"V": formula.V, "b_o": formula.b_o}, strict=False)
    (x, lam, g), (x2, lam2, g2) = penalised(formula, inputs()), penalised(step, inputs())
    close(x, x2, 1e-12)
    close(lam, lam2, 1e-12)
    for ours, torchs in {"W": "weight_hh", "R": "weight_ih", "b": "bias_ih"}.items():
        close(g[ours], g2[f"step.{torchs}"], 1e-11, ours)
    close(g["V"], g2["V"], 1e-11)


def test_step_function_agrees_with_the_formula():
    net = make("elman")
    step = make(lambda u, h: torch.tanh(u @ net.R.T + h @ net.W.T + net.b), "autograd")
    step.load_state_dict({"V": net.V, "b_o": net.b_o}, strict=False)
    (x, lam, g), (x2, lam2, g2) = penalised(net, inputs()), penalised(step, inputs())
    close(x, x2, 1e-12)
    close(lam, lam2, 1e-12)
    close(g["V"], g2["V"], 1e-11)
    run = step(inputs()).costates(lambda y: (y**2).sum(-1))
    (gW,) = torch.autograd.grad(
        (run.loss + 0.3 * co.penalties.log_ratio(run) + co.penalties.variance(run)).mean(), net.W
    )
    close(gW, g["W"], 1e-11)


def test_step_function_of_two_slots_returns_its_parts():
    net = make(
        lambda u, state: (state[1], u @ torch.ones(I, D, dtype=F64) - state[0]), "auto", slots=2
    )
    run = net(inputs())
    assert run.x.shape == (T + 1, B, 2 * D)
    assert torch.equal(run.x[2, :, :D], run.x[1, :, D:])


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_random_step_function_is_refused_for_costates(engine):
    torch.manual_seed(0)
    cell = nn.RNNCell(I, D).to(F64)
    net = make(lambda u, h: nn.functional.dropout(cell(u, h), 0.5), engine)
    run = net(inputs())
    with pytest.raises(co.Unsupported, match=r"random or has hidden state.*Pass random values"):
        run.costates(lambda y: y.sum(-1))


def test_a_step_function_that_returns_something_else_is_refused():
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
        close(x, found[2][0], 1e-12)
        close(lam, found[2][1], bar)
        for name, expected in found[2][2].items():
            close(g[name], expected, bar, name)
    return found[0][2]


def test_a_cell_can_be_defined_in_a_file_of_the_user(tmp_path):
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
    path = EXAMPLES / "own_cell.py"
    if not path.exists():
        pytest.skip("the examples are not part of this installation")
    load(path).main()
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", OWN)
def test_an_activation_of_the_user_can_be_used(name):
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


@pytest.mark.parametrize(
    "cell", [unread, diagonal, swapped, nonlinear, shifted, constant_slot], ids=lambda c: c.name
)
def test_W_may_read_any_or_none_of_the_slots(cell):
    engines_agree(cell)
    reads = {"unread": 0, "diagonal": 0, "swapped": 2, "nonlinear": 2}.get(cell.name, 1)
    W = make(cell).W
    assert (W is None) if reads == 0 else tuple(W.shape) == (D, reads * D)


def test_constant_inside_a_function_is_a_constant():
    @co.cell(slots="h")
    def half(z, v, x, p):
        return co.tanh(z + v) + co.sigmoid(0 * x.h)

    engines_agree(half)


@pytest.mark.parametrize(
    ("name", "parameter"), [("leaky", "leak"), ("rate", "tau"), ("gru", "b_n")]
)
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


def test_a_cell_knows_which_values_engines_keep():
    lstm, gru, elman = co.cells.lstm, co.cells.gru, co.cells.elman()
    assert (elman.saved_nodes, elman.needs_a, elman.side) == (
        (),
        False,
        (),
    )  # slopes of tanh from x itself
    assert sorted(n.op for n in lstm.saved_nodes) == ["sigmoid"] * 3 + ["tanh"] * 2
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
        (
            {},
            lambda z, v, x, p: torch.cumsum(z + v, 0),
            co.KindError,
            "torch's 'cumsum' is not one of the functions",
        ),
        (
            {},
            lambda z, v, x, p: x.c + z + v,
            co.InputError,
            r"this cell has no x.c; its x has: h\.",
        ),
        ({}, lambda z, v, x, p: p.tau * (z + v), co.InputError, r"no p.tau; its p has: none"),
        ({"gates": "i f"}, lambda z, v, x, p: z.o, co.InputError, r"no z.o; its z has: i, f\."),
        (
            {"slots": "h c"},
            lambda z, v, x, p: z + v,
            co.InputError,
            "has slots h c but its formula returns 1 value",
        ),
        ({}, lambda z, v, x, p: "h", co.CoadjointError, "str"),
        ({}, lambda z, v, x, p: None, co.CoadjointError, "NoneType"),
        ({}, lambda z, v, x, p: torch.ones(3) * (z + v), co.CoadjointError, "Tensor"),
        (
            {"slots": "h h"},
            lambda z, v, x, p: (z, v),
            co.InputError,
            "slots must be different identifiers",
        ),
        ({"slots": ""}, lambda z, v, x, p: (), co.InputError, "slots must be"),
        (
            {"gates": "1a"},
            lambda z, v, x, p: z,
            co.InputError,
            "gates must be different identifiers",
        ),
        ({"reads": "c"}, lambda z, v, x, p: z + v, co.InputError, "unknown slot 'c'"),
    ],
)
def test_formula_that_cannot_be_recorded_is_refused_where_it_is_written(
    arguments, formula, error, words
):
    with pytest.raises(error, match=words):
        co.cell(**arguments)(formula)


@pytest.mark.parametrize(
    ("cell", "activation", "error", "words"),
    [
        ("lstn", None, co.InputError, "unknown cell 'lstn'; did you mean 'lstm'"),
        ("elman", "tanhh", co.InputError, "unknown activation 'tanhh'; did you mean 'tanh'"),
        ("lstm", "relu", co.InputError, "fix its activations"),
        ("elman", 3, co.KindError, "activation must be a name"),
        ("elman", [1], co.KindError, "activation must be a name or a function; got list"),
        (co.cells.lstm, "tanh", co.InputError, "activation= belongs to a cell given by name"),
        (3, None, co.KindError, "cell must be a name"),
        ("elman", lambda a: 1 if a > 0 else 0, co.KindError, "cannot branch"),
        ("elman", torch.nn.functional.gelu, co.KindError, "gelu"),
    ],
)
def test_unknown_cells_and_activations_are_refused(cell, activation, error, words):
    with pytest.raises(error, match=words):
        make(cell, activation=activation)


# large arguments


LARGE = [
    (c, a, d) for c, a in BUILT_IN + [("elman", a) for a in OWN] for d in ("float32", "float64")
]
LARGE = [
    (c, a, d)
    for c, a, d in LARGE
    if d == "float64" or c in ("elman", "leaky", "rate", "lstm", "gru")
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("cell", "activation", "dtype"), LARGE)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_cells_stay_finite_at_arguments_of_ten_thousand(cell, activation, dtype, engine):
    """Saturated units of either sign, first and second order, all engines: finite, and zero
    costates are left out.
    """
    dtype = getattr(torch, dtype)
    u = torch.tensor([[1e4, 0], [-1e4, 0], [0, 1e4], [50, -50], [1e4, -1e4], [0, 0]], dtype=dtype)
    torch.manual_seed(0)
    net = co.Network(
        cell,
        inputs=2,
        hidden=3,
        outputs=1,
        activation=OWN.get(activation, activation),
        dtype=dtype,
        engine=engine,
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
    assert sorted(CELLS) == sorted(
        [
            "elman",
            "leaky",
            "rate",
            "lstm",
            "lstm-1997",
            "peephole",
            "gru",
            "scrn",
            "scrn-learned",
            "antisymmetric",
            "antisymmetric-gated",
            "exponential",
            "lipschitz",
            "cornn",
            "unicornn",
            "inverse",
            "mingru",
            "minlstm",
            "lru",
        ]
    )
    assert sorted(ACTIVATIONS) == ["identity", "relu", "sigmoid", "softplus", "tanh"]
    for name in CELLS:
        cell = make(name).cell
        assert cell.name == name
        assert cell.equations, name
        assert cell.paper or name == "inverse", name
        assert co.cells.named(name) is cell
        assert (name in co.cells.FIXED_ACTIVATION) == ("activation" not in co.cells.options(name))
    x = make("leaky")(inputs()).x
    net = make("leaky")
    np.testing.assert_allclose(net.p["leak"].detach(), 0.5)
    by_hand = 0.5 * x[0] + 0.5 * torch.tanh(x[0] @ net.W.T + inputs()[0] @ net.R.T + net.b)
    close(x[1], by_hand, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "tables"), [("cells.md", 5), ("engines.md", 1)])
def test_tables_of_the_pages_are_what_their_block_prints(page, tables, tmp_path):
    text = (ROOT / "docs" / page).read_text()
    block = next(b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "CELLS" in b)
    done = warm.run("-c", block, cwd=tmp_path)
    printed = done.stdout.strip().split("\n\n")
    assert len(printed) == tables, done.stderr[-2000:]
    for table in printed:
        assert table in text, f"docs/{page} has another table; the block prints:\n{table}"


# options


PUBLISHED = {  # constants of the papers
    "scrn": {"alpha": 0.95, "learned": False, "activation": "sigmoid"},
    "scrn-learned": {"alpha": 0.95, "activation": "sigmoid"},
    "antisymmetric": {"eps": 0.01, "gamma": 0.01, "gated": False, "activation": "tanh"},
    "antisymmetric-gated": {"eps": 0.01, "gamma": 0.01, "activation": "tanh"},
    "lipschitz": {"eps": 0.03, "beta": 0.75, "gamma": 0.001, "activation": "tanh"},
    "cornn": {"dt": 0.042, "gamma": 2.7, "eps": 4.7, "activation": "tanh"},
    "unicornn": {"eps": 0.03, "alpha": 0.9, "activation": "tanh"},
    "inverse": {"k": 1, "activation": "tanh"},
    "rate": {"activation": "tanh", "noise": 0.0},
    "lstm": {},
    "lstm-1997": {"truncated": False},
}


def test_cells_have_their_published_options():
    for name, expected in PUBLISHED.items():
        assert co.cells.options(name) == expected, name
    assert make("antisymmetric", eps=0.05).cell is co.cells.antisymmetric(0.05)
    assert make("lipschitz", beta=0.5).cell is co.cells.lipschitz(beta=0.5)
    assert make("antisymmetric-gated", gamma=0.2).cell is co.cells.antisymmetric(0.01, 0.2, True)
    assert co.cells.elman() is co.cells.elman("tanh") is co.cells.named("elman", "tanh")
    tilted = make(co.cells.lipschitz(beta=0.5), readout="tilted", beta=3)
    assert tilted.beta == 3
    for wrong, error, words in (
        (
            lambda: make("elman", eps=0.1),
            co.KindError,
            "cell 'elman' has no option eps; its options: none",
        ),
        (
            lambda: co.Network("lstm", inputs=2, hidden=3, outputs=1, layers=2),
            co.KindError,
            r"its options: none\. For several layers: co\.Stack\(\['lstm', 'lstm'\], \.\.\.\)\.",
        ),
        (
            lambda: make("cornn", alpha=1),
            co.KindError,
            "no option alpha; its options: dt, gamma, eps",
        ),
        (lambda: make("antisymmetric-gated", gated=False), co.KindError, "no option gated"),
        (lambda: make(co.cells.lstm, eps=1), co.InputError, "eps= belongs to a cell given by name"),
        (lambda: make("elman", hiden=3), co.KindError, "no option hiden"),
        (lambda: make("inverse", k=0), co.InputError, "k must be a number of steps"),
        (lambda: make("scrn", alpha=1.0), co.InputError, "alpha must lie between 0 and 1"),
        (
            lambda: make("elman", readout="tilted", beta=0),
            co.InputError,
            "beta must be a finite number",
        ),
        (
            lambda: make("elman", readout="last", steps=3),
            co.InputError,
            "steps is the number of biases b_t",
        ),
        (
            lambda: make("elman", readout="attention", steps=0),
            co.InputError,
            "steps is the number of biases b_t",
        ),
    ):
        with pytest.raises(error, match=words):
            wrong()


# equations that the table of cases takes in parts, or with constants of its own


def test_scrn_is_computed_as_it_is_written():
    """s first, then h of the new s, with fixed and learned decay."""
    for name in ("scrn", "scrn-learned"):
        net, x = make(name), torch.randn(B, 2 * D, dtype=F64)
        with torch.no_grad():
            for p in net.p.values():
                p.copy_(torch.randn(D, dtype=F64))
        u = inputs()
        alpha = torch.sigmoid(net.p["beta"]) if "beta" in net.p else 0.95
        (A, Bs), (b_h, b_s), (W, P) = net.R.split(D), net.b.split(D), net.W.split(D, 1)
        h, s = x.split(D, 1)
        for u_t in u:
            s = alpha * s + (1 - alpha) * (u_t @ Bs.T + b_s)
            h = torch.sigmoid(s @ P.T + h @ W.T + u_t @ A.T + b_h)
        run = net(u, x0=x)
        close(run.state, torch.cat([h, s], 1), 1e-12)
        close(run.y_hat, torch.cat([h, s], 1) @ net.V.T + net.b_o, 1e-12)


@pytest.mark.parametrize("engine", ["reference", "eager", "cpu", "autograd"])
def test_lstm_1997_has_the_truncated_gradient_of_its_paper(engine):
    """By the paper's own recursions, forwards in time: W of the cell inputs and input gates learns
    from the sum of what each step put into the memory, W of the output gates from the last step
    alone.
    """
    net = make("lstm-1997", engine, truncated=True)
    full = make("lstm-1997", engine)
    full.load_state_dict(net.state_dict())
    batch = co.Batch(inputs(), torch.randn(B, 2, dtype=F64))
    e, exact = (co.BPTT()(n, batch, "squared") for n in (net, full))

    def squash(a):
        return 2 * torch.sigmoid(a) - 1

    h, c = torch.zeros(2, B, D, dtype=F64)
    into_i = into_g = torch.zeros(B, D, D, dtype=F64)
    with torch.no_grad():
        for u_t in batch.u:
            i, g, o = (h @ net.W.T + u_t @ net.R.T + net.b).chunk(3, 1)
            i, o, slope = torch.sigmoid(i), torch.sigmoid(o), (1 - squash(g) ** 2)
            into_i = into_i + (i * (1 - i) * 2 * squash(g))[:, :, None] * h[:, None]
            into_g = into_g + (i * slope)[:, :, None] * h[:, None]
            before, c = h, c + i * 2 * squash(g)
            h = o * squash(c)
        error = 2 * (h @ net.V.T + net.b_o - batch.y) @ net.V / B
        into_c = error * o * (1 - squash(c) ** 2) / 2
        into_o = (error * squash(c) * o * (1 - o)).T @ before
        truth = torch.cat([(into_c[:, :, None] * y).sum(0) for y in (into_i, into_g)] + [into_o])
    close(e.gradient["W"], truth, 1e-12)
    assert difference(e.gradient["W"], exact.gradient["W"]) > 0.01
    close(e.gradient["V"], exact.gradient["V"], 1e-12)
    lam = e.costates.lam
    assert not lam[
        :T, :, :D
    ].any()  # h is read by W and by the readout: nothing comes back to the h before the last
    assert lam[:T, :, D:].abs().amin() > 0
    net = make("lstm-1997", engine, truncated=True, readout="every")
    batch = co.Batch(inputs(), torch.randn(T, B, 2, dtype=F64), [6, 2, 5])
    truth = co.BPTT()(net, batch, "squared").gradient
    for method in (co.RTRL(), co.Truncated(2, T), *([co.BPTT(2)] if engine != "autograd" else [])):
        for name, g in method(net, batch, "squared").gradient.items():
            close(g, truth[name], 1e-11, str((type(method).__name__, name)))


def test_held_reads_are_not_scanned():
    """Linear as it is written, but what is held is no part of its derivative."""

    @co.cell(slots="h", parameters={"w": 0.5}, reads=None)
    def half(z, v, x, p):
        return p.w * x.h + 0.3 * held(x.h) + (z + v)

    with pytest.raises(
        co.Unsupported, match="engine 'scan' is for steps that are linear in the state"
    ):
        make(half, "scan")
    truth = penalised(make(half, "autograd"), inputs())
    for engine in ("reference", "eager", "cpu"):
        x, lam, grads = penalised(make(half, engine), inputs())
        close(x, truth[0], 1e-12)
        close(lam, truth[1], 1e-12)
        close(grads, truth[2], 1e-11)
    close(lam[-2], 0.5 * lam[-1], 1e-12)


def test_inverse_goes_back_where_it_came_from():
    """Linear, without an input: k steps with the inverse and k with W end where they began."""
    net = make("inverse", k=3, activation="identity", bias=False)
    x0 = torch.randn(B, D, dtype=F64)
    x = net(torch.zeros(8, B, I, dtype=F64), x0=x0).x
    close(x[6], x0, 1e-13)
    close(x[1] @ net.W[:D].T, x0, 1e-13)
    close(x[3], x[1] @ torch.linalg.matrix_power(net.W[D:], 2).T, 1e-13)
    close(x[8], x[2], 1e-12)


def test_lru_is_complex():
    net = make("lru", readout="every", skip=True)
    nu, theta = net.p["nu"], net.p["theta"]
    L = torch.exp(torch.complex(-torch.exp(nu), theta))
    R, b = torch.complex(*net.R.split(D)), torch.complex(*net.b.split(D))
    C = torch.complex(net.V[:, :D], -net.V[:, D:])
    x, u = torch.zeros(B, D, dtype=torch.complex128), inputs()
    for t in range(T):
        x = L * x + torch.sqrt(1 - L.abs() ** 2) * (u[t].to(x.dtype) @ R.T + b)
        close(net(u).y_hat[t], (x @ C.T).real + u[t] @ net.D.T + net.b_o, 1e-13)
    big = co.Network("lru", inputs=1, hidden=4000, outputs=1, dtype=F64)
    area = torch.exp(-2 * torch.exp(big.p["nu"].detach()))
    assert abs(float(area.mean()) - 0.5) < 0.02  # uniform in area
    assert abs(float((area < 0.25).double().mean()) - 0.25) < 0.03


def test_weights_hold_what_the_formula_uses():
    def shape(name):
        return tuple(
            None if y is None else tuple(n // D for n in y.shape)
            for y in (make(name).W, make(name).R[:, :1])
        )

    rows = {name: (shape(name)[0], len(make(name).R) // D) for name in CELLS}
    assert rows["lipschitz"] == ((2, 1), 1)  # A has no input
    assert rows["antisymmetric-gated"] == ((1, 1), 2)  # one product for both
    assert rows["inverse"] == ((2, 1), 1)
    assert rows["scrn"] == ((1, 2), 2)
    assert rows["cornn"] == ((1, 2), 1)
    assert all(rows[name][0] is None for name in ("unicornn", "mingru", "minlstm", "lru"))
    for name in CELLS:  # nothing is trained in vain
        net = make(name, readout="every")
        y = torch.randn(T, B, 2, dtype=F64)
        gradient = co.BPTT()(net, co.Batch(inputs(), y), "squared").gradient
        for parameter, g in gradient.items():
            dead = g == 0
            if parameter.startswith("parametrizations"):
                dead = dead & ~torch.eye(D, dtype=torch.bool).repeat(
                    len(g) // D, 1
                )  # the diagonal of a skew matrix
            assert not dead.any() or name == "exponential", (name, parameter)


def test_process_noise_is_drawn_from_the_seed():
    net = make("rate", noise=0.3)

    def run(seed):
        return (torch.manual_seed(seed), net(inputs()))[1]

    assert torch.equal(run(1).x, run(1).x)
    assert not torch.equal(run(1).x, run(2).x)
    quiet = make("rate")
    quiet.load_state_dict(net.state_dict())
    close(quiet(inputs()).x, net.eval()(inputs()).x, 1e-12)
    net.train()
    wide = co.Network("rate", inputs=1, hidden=50, outputs=1, noise=0.3, dtype=F64)
    x = wide(torch.zeros(1, 400, 1, dtype=F64)).x[1].detach()
    assert float(x.std(0).mean()) == pytest.approx(0.3, rel=0.02)

    # the same noise as so many more inputs: first and second order
    torch.manual_seed(5)
    noise = (0.3 * torch.randn(T * B, D)).to(F64)

    @co.cell(slots="x", gates="x n", parameters={"tau": 0.1}, reads=lambda x: co.tanh(x.x))
    def written(z, v, x, p):
        return (1 - p.tau) * x.x + p.tau * (z.x + v.x) + (v.n + 0 * z.n)

    other = co.Network(written, inputs=I + D, hidden=D, outputs=2, dtype=F64, engine="reference")
    with torch.no_grad():
        for n, p in net.named_parameters():
            here = other.get_parameter(n)[: len(p)]
            (here[:, : p.shape[1]] if p.dim() == 2 else here).copy_(p)
        other.R[:, I:], other.R[D:, :I], other.b[D:] = 0, 0, 0
        other.R[D:, I:] = torch.eye(D)
    torch.manual_seed(5)
    _, lam, ours = penalised(net, inputs())
    _, lam_, truth = penalised(other, torch.cat([inputs(), noise.view(T, B, D)], 2))
    close(lam, lam_, 1e-12)
    close(ours["W"], truth["W"][:D], 1e-11)
    close(ours["R"], truth["R"][:D, :I], 1e-11)
    close(ours["p.tau"], truth["p.tau"], 1e-11)


# readouts


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["f32", "f64"])
@pytest.mark.parametrize("readout", ["tilted", "tilted-tanh"])
@pytest.mark.parametrize("beta", [1e4, 1.0, -1e4])
def test_tilted_readouts_are_stable(readout, beta, dtype):
    """States of a thousand, and a beta of ten thousand: values and derivatives are finite, and a
    large beta takes the greatest (or the least) of all steps.
    """
    net = co.Network(
        "elman",
        inputs=1,
        hidden=2,
        outputs=1,
        activation="identity",
        readout=readout,
        beta=beta,
        dtype=dtype,
    )
    u = 1000 * torch.randn(7, 3, 1, dtype=dtype)
    lam = net(u).costates(lambda y: (y**2).sum(-1))
    value = (lam.loss + 1e-6 * co.penalties.squared_norm(lam)).mean()
    grads = torch.autograd.grad(value, list(net.parameters()), allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in grads)
    assert torch.isfinite(lam.lam).all()
    if readout == "tilted" and beta > 1:
        close(net(u).y_hat, net(u).x[1:].amax(0) @ net.V.T + net.b_o, 1e-5)
    if readout == "tilted" and beta < 0:
        close(net(u).y_hat, net(u).x[1:].amin(0) @ net.V.T + net.b_o, 1e-5)


def test_attention_readouts_equal_a_loop_by_hand():
    """One b for all steps, and one for each; later steps take the last."""
    for steps in (None, 3):
        net = make("gru", readout="attention", steps=steps)
        run = net(inputs(), [6, 2, 5])
        assert tuple(net.b_a.shape) == (steps or 1,)
        for j, n in enumerate((6, 2, 5)):
            x = run.x[1 : n + 1, j]
            b = net.b_a[torch.arange(n).clamp(max=len(net.b_a) - 1)]
            a = torch.softmax(torch.tanh(x @ net.w_a + b), 0)
            close(run.y_hat[j], net.V @ (a @ x) + net.b_o, 1e-12)


def test_mean_readouts_equal_a_loop_by_hand():
    net = make("gru", readout="mean")
    run = net(inputs(), [6, 2, 5])
    lam = run.costates(lambda y: (y**2).sum(-1))
    for j, n in enumerate((6, 2, 5)):
        x = run.x[1 : n + 1, j]
        close(run.y_hat[j], net.V @ (sum(x) / n) + net.b_o, 1e-12)
        # Behind the last step only the readout is left: (1/n) V^T dl/da.
        close(lam.lam[n, j], net.V.T @ (2 * run.y_hat[j]) / n, 1e-12)
    # Padding is not read.
    longer = inputs()
    longer[2:, 1] = 1e3
    close(net(longer, [6, 2, 5]).y_hat[1], run.y_hat[1], 0)


@pytest.mark.parametrize("readout", ["mean", "tilted", "tilted-tanh", "attention"])
def test_summaries_need_the_whole_sequence(readout):
    net, batch = make("elman", readout=readout), co.Batch(inputs(), torch.zeros(B, 2, dtype=F64))
    assert (net.readout, net.summary) == ("last", readout)
    assert readout in repr(net)
    for method in (co.BPTT(2), co.Penalised("log-ratio", 1.0, 2), co.RTRL(), co.Truncated(2, 2)):
        with pytest.raises(co.Unsupported, match=f"readout='{readout}' reads all steps"):
            method(net, batch, "squared")


@pytest.mark.parametrize(
    ("cell", "readout"),
    [
        ("elman", "mean"),
        ("elman", "tilted"),
        ("elman", "tilted-tanh"),
        ("elman", "attention"),
        ("exponential", "last"),
        ("scrn-learned", "every"),
    ],
)
def test_transforms_of_torch_work_on_every_cell(cell, readout):
    """torch.func.grad through costates and a change of the input, at parameters that are not those
    of the network.
    """
    net, u = make(cell, readout=readout, skip=True), inputs()
    theta = {n: (p + 0.1).detach().requires_grad_() for n, p in net.named_parameters()}

    def value(theta):
        run = torch.func.functional_call(net, theta, (u, [6, 2, 5]))
        lam = run.costates(lambda y: (y**2).sum(-1))
        return (lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean() + run.push(
            u.flip(0)
        ).square().sum()

    ours, truth = (
        torch.func.grad(value)(theta),
        torch.autograd.grad(value(theta), list(theta.values())),
    )
    for (name, g), expected in zip(ours.items(), truth, strict=True):
        close(g, expected, 1e-11, name)
    there = value(theta)
    with torch.no_grad():
        for n, p in net.named_parameters():
            p.copy_(theta[n])
    run = net(u, [6, 2, 5])
    lam = run.costates(lambda y: (y**2).sum(-1))
    again = (lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean() + run.push(
        u.flip(0)
    ).square().sum()
    close(there, again, 1e-12)


def test_segments_and_rtrl_refuse_what_they_do_not_have():
    y = torch.zeros(B, 2, dtype=F64)
    for net, words in (
        (make("elman", skip=True), "skip=True"),
        (make("lru"), "readout of several slots"),
        (make("inverse"), "cell 'inverse' is given data"),
        (make("rate", noise=0.1), "cell 'rate' is given data"),
    ):
        with pytest.raises(co.Unsupported, match=words):
            co.BPTT(2)(net, co.Batch(inputs(), y), "squared")
    for net in (make("elman", skip=True), make("inverse")):
        with pytest.raises(co.Unsupported, match=r"skip=True|is given data"):
            co.RTRL()(net, co.Batch(inputs(), y), "squared")
    for name in (
        "scrn",
        "exponential",
        "antisymmetric-gated",
        "lipschitz",
        "lru",
    ):  # the others it has
        net = make(name)
        ours = co.RTRL()(net, co.Batch(inputs(), y), "squared").gradient
        for n, expected in co.BPTT()(net, co.Batch(inputs(), y), "squared").gradient.items():
            close(ours[n], expected, 1e-11, str((name, n)))


@pytest.mark.parametrize("name", CELLS)
def test_temporal_components_of_every_cell_add_up_to_the_gradient(name):
    """They add up to the gradient by R and b, and by W where it has no structure."""
    net, y = make(name, readout="every"), torch.randn(T, B, 2, dtype=F64)
    e = co.BPTT()(net, co.Batch(inputs(), y, [6, 2, 5]), "squared")
    parts = e.temporal_components()
    assert torch.isfinite(parts.norms()["joint"]).all()
    for key in parts.at(1):
        total = sum(parts.at(t)[key] for t in range(1, T + 1))
        if key in e.gradient and net.cell.weights is None:
            close(total, e.gradient[key], 1e-13, key)


TRAINED = [
    *one_in(3, ((name, "last") for name in (*CELLS, "lstm-1997-truncated"))),
    *(("elman", r) for r in ("mean", "tilted", "tilted-tanh", "attention")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "readout"), TRAINED, ids=lambda x: x)
def test_every_cell_learns(name, readout):
    """The sum of 8 inputs, scaled to variance one, on inputs it has not seen.

    The readout stays as it began, so that all there is to learn is learned by the recurrence; and
    the last input alone explains an eighth. Plain, then penalised.
    """
    torch.manual_seed(0)
    net = co.Network(
        cases.MORE.get(name, name), inputs=1, hidden=12, outputs=1, readout=readout, dtype=F64
    )
    for parameter in ("V", "b_o", "w_a", "b_a"):
        if getattr(net, parameter, None) is not None:
            getattr(net, parameter).requires_grad_(False)
    u, fresh = torch.randn(8, 64, 1, dtype=F64), torch.randn(8, 512, 1, dtype=F64)

    def error():
        return float((net(fresh).y_hat - fresh.sum(0) / 8**0.5).detach().square().mean())

    optimiser = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.05)
    before = error()
    for method in [co.BPTT()] * 80 + [co.Penalised("log-ratio", 1e-3)] * 3:
        method(net, co.Batch(u, u.sum(0) / 8**0.5), "squared").write_grad(net)
        optimiser.step()
    assert before > 0.8
    assert error() < 0.5
