"""A stack of any mix of cells computes what a loop over single samples computes.

Compared are the outputs, the costates of every layer, and the first and the penalised gradients.
"""

import random
import warnings
from types import SimpleNamespace

import pytest
import torch

import cases
import coadjoint as co
import oracles
from compare import close
from sampling import one_in

torch.set_num_threads(1)
F64 = torch.float64
NAMES = [n for n in oracles.CELLS if n not in ("odd", "diagonal", "pair")]
KINDS = {n: (cases.CELLS | cases.MORE).get(n, n) for n in (*NAMES, "odd", "pair")}


def gru_before(theta, u, x):
    """One step of co.cells.steps.ResetBefore, by hand."""
    W, R, b, d = theta["step.W"], theta["step.R"], theta["step.b"], len(x)
    a = R @ u + b
    r = oracles.sigmoid(W[:d] @ x + a[:d])
    k = oracles.sigmoid(W[d : 2 * d] @ x + a[d : 2 * d])
    return (1 - k) * torch.tanh(W[2 * d :] @ (r * x) + a[2 * d :]) + k * x


class Direction(oracles.Sample):
    """One layer in one direction; x: t = 0..T in the order of its own time."""

    def __init__(self, name, theta, hidden, u, start):
        self.case, self.T, self.x = SimpleNamespace(H=hidden, switch=1e-5), len(u), [start]
        self.shows = oracles.SHOWS.get(name, 1) * hidden
        if name == "gru-before":
            for y in u:
                self.x.append(gru_before(theta, y, self.x[-1]))
            return
        step, read, _, _, reads, _ = oracles.CELLS[name]
        p = {n[2:]: value for n, value in theta.items() if n.startswith("p.")}
        trained = oracles.weight(name, theta, None)
        W, enter = oracles.slowed(name, trained, p), oracles.ENTER.get(name, lambda v, W, p, t: v)
        for t, y in enumerate(u):
            v, x = enter(theta["R"] @ y + theta.get("b", 0), trained, p, t + 1), self.x[-1]
            z = W @ read(x, torch.tanh) if reads else x.new_zeros(hidden)
            self.x.append(step(z, v, x, p, torch.tanh))

    def shown(self):
        return [x[: self.shows] for x in self.x[1:]]


class Whole(oracles.Sample):
    """Layers side by side."""

    def __init__(self, parts):
        self.lam, self.T = (
            [torch.cat(lam) for lam in zip(*(p.lam for p in parts), strict=True)],
            parts[0].T,
        )
        self.case, self.loss = parts[0].case, parts[0].loss


def above(case, theta, i, h, below):
    """y^l of layer l = i + 1 from h^l and y^{l-1}."""
    if i > 0 and case.get("dense"):
        return torch.cat([below, h])
    if i == 0 or not case["residual"]:
        return h
    if len(h) == len(below):
        return h + below
    D = 1 + case["bidirectional"]
    parts = zip(range(D), below.chunk(D), strict=True)
    return h + torch.cat([theta[f"layers.P.{i}.{k}.weight"] @ part for k, part in parts])


class Sample:
    def __init__(self, case, net, batch, j, masks=None):
        theta, self.layers = dict(net.named_parameters()), []
        n = int(batch.lengths[j]) if batch.lengths is not None else len(batch.u)
        u = [batch.u[t, j] for t in range(n)]

        def drop(i, values):
            return (
                values if masks is None else [m * v for m, v in zip(masks[i], values, strict=True)]
            )

        u = drop(0, u)
        starts = (
            iter(batch.x0[j].split([layer.n for layer in net.layers]))
            if batch.x0 is not None
            else None
        )
        y, ends = u, None
        for i, (name, d) in enumerate(zip(case["cells"], case["hidden"], strict=True)):
            given = y if i == 0 else drop(i, y)
            if i > 0 and case.get("dense"):
                given = [torch.cat(both) for both in zip(u, given, strict=True)]
            heads, lasts = [], []
            for k in range(1 + case["bidirectional"]):
                own = {
                    p.removeprefix(f"layers.levels.{i}.{k}."): v
                    for p, v in theta.items()
                    if f"levels.{i}.{k}." in p
                }
                size = net.layers.levels[i][k].n
                start = next(starts) if starts else own.get("x0", torch.zeros(size, dtype=F64))
                start = start if start.requires_grad else start.clone().requires_grad_()
                one = Direction(name, own, d, given[::-1] if k else given, start)
                self.layers.append(one)
                heads.append(one.shown()[::-1] if k else one.shown())
                lasts.append(one.shown()[-1])
            out = [torch.cat(h) for h in zip(*heads, strict=True)]
            y = [above(case, theta, i, h, b) for h, b in zip(out, y, strict=True)]
            ends = above(case, theta, i, torch.cat(lasts), ends)
        if case["readout"] == "every":
            seen = drop(-1, y)
        elif case["readout"] == "last":
            seen = drop(-1, [ends])
        else:
            seen = [
                oracles.SUMMARIES[case["readout"]](drop(-1, y), theta, SimpleNamespace(tilt=0.7))
            ]
        for k in range(len(case["deep"])):
            seen = [
                torch.tanh(theta[f"deep.{k}.weight"] @ h + theta[f"deep.{k}.bias"]) for h in seen
            ]
        self.a = [theta["V"] @ h + theta["b_o"] for h in seen]
        if "D" in theta:
            at = u if case["readout"] == "every" else [u[-1]]
            self.a = [a + theta["D"] @ v for a, v in zip(self.a, at, strict=True)]
        target = [batch.y[t, j] for t in range(n)] if case["readout"] == "every" else [batch.y[j]]
        self.loss = sum(((a - b) ** 2).sum() for a, b in zip(self.a, target, strict=True))
        for one in self.layers:
            one.loss = self.loss
            one.lam = one.by_states(self.loss)


def random_case(seed):
    r = random.Random(seed)
    L = r.choice([1, 2, 2, 3])
    readout = r.choice(["last", "every", "every", "last", "tilted", "attention"])
    residual = L > 1 and r.random() < 0.5
    pool = [*KINDS, "gru-before"]
    alike = residual and seed % 2 == 0  # layers hand on equally many entries, or not
    if alike:
        two = r.random() < 0.2
        pool = [n for n in pool if (oracles.SHOWS.get(n, 1) == 2) == two]
    cells = [r.choice(pool) for _ in range(L)]
    hidden = [r.choice([2, 3, 5])] * L if alike else [r.choice([2, 3, 5]) for _ in range(L)]
    dense = L > 1 and not residual and seed % 2 == 1
    return {
        "cells": cells,
        "hidden": hidden,
        "bidirectional": r.random() < 0.4,
        "residual": residual,
        "dense": dense,
        "readout": readout,
        "skip": r.random() < 0.3,
        "deep": r.choice([(), (), (4,), (3, 5)]),
        "x0": r.choice(["zero", "learned", "given"]),
        "ragged": r.random() < 0.5,
        "engine": r.choice(["reference", "cpu", "eager", "autograd", "auto"]),
        "penalty": r.choice(["log-ratio", "variance", "squared-norm", "omega", "log-variance"]),
        "on": r.choice([None, None, "whole", "top", 0]),
        "B": r.choice([1, 3, 4]),
        "T": r.choice([2, 5, 7]),
        "seed": seed,
    }


def make(case):
    torch.manual_seed(case["seed"])
    mixed = any(c == "gru-before" for c in case["cells"])
    net = co.Stack(
        [KINDS.get(c, c) for c in case["cells"]],
        inputs=2,
        hidden=case["hidden"],
        outputs=2,
        bidirectional=case["bidirectional"],
        residual=case["residual"],
        dense=case.get("dense", False),
        readout=case["readout"],
        skip=case["skip"],
        deep=case["deep"],
        x0="learned" if case["x0"] == "learned" else "zero",
        dropout=case.get("dropout", 0.0),
        beta=0.7 if case["readout"] == "tilted" else None,
        steps=3 if case["readout"] == "attention" else None,
        engine="auto" if mixed else case["engine"],
        dtype=F64,
    )
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("x0"):
                p.normal_(0, 0.5)
    T, B = case["T"], case["B"]
    lengths = None
    if case["ragged"]:
        lengths = torch.randint(1, T + 1, (B,))
        lengths[torch.randint(B, ())] = T
    y = (
        torch.randn(T, B, 2, dtype=F64)
        if case["readout"] == "every"
        else torch.randn(B, 2, dtype=F64)
    )
    x0 = 0.5 * torch.randn(B, net.layers.n, dtype=F64) if case["x0"] == "given" else None
    return net, co.Batch(torch.randn(T, B, 2, dtype=F64), y, lengths, x0=x0)


def wanted_penalty(case, s):
    of = oracles.PENALTIES[case["penalty"]]
    L, D = len(case["cells"]), 1 + case["bidirectional"]
    match case["on"]:
        case "whole":
            return of(Whole(s.layers))
        case "top":
            parts = s.layers[(L - 1) * D :]
        case 0:
            parts = s.layers[:D]
        case _:
            parts = s.layers
    return sum(of(one) for one in parts) / len(parts)


def compare(case):
    net, batch = make(case)
    B, D = case["B"], 1 + case["bidirectional"]
    samples = [Sample(case, net, batch, j, case.get("masks")) for j in range(B)]
    run = net(batch.u, batch.lengths, batch.x0)
    lam = run.costates("squared", batch.y)
    assert len(lam) == len(case["cells"]) * D
    for j, s in enumerate(samples):
        close(run.loss("squared", batch.y)[j], s.loss, 1e-10, "loss")
        if case["readout"] == "every":
            close(run.a[: len(s.a), j], torch.stack(s.a), 1e-10, "a")
        else:
            close(run.a[j], s.a[0], 1e-10, "a")
        for i, (one, ours) in enumerate(zip(s.layers, lam, strict=True)):
            assert (ours.trajectory.layer, ours.trajectory.direction) == (
                i // D,
                ("forward", "reverse")[i % D],
            )
            close(ours.trajectory.x[: one.T + 1, j], torch.stack(one.x), 1e-10, "x")
            close(ours.lam[: one.T + 1, j], torch.stack(one.lam), 1e-10, "costates")
    names = list(dict(net.named_parameters()))

    def gradient(value):
        return torch.autograd.grad(
            value, list(net.parameters()), retain_graph=True, allow_unused=True
        )

    first = co.BPTT()(net, batch, "squared").gradient
    for name, theirs in zip(names, gradient(sum(s.loss for s in samples) / B), strict=True):
        close(first[name], torch.zeros_like(first[name]) if theirs is None else theirs, 1e-10, name)
    G = co.penalties.penalty(case["penalty"])
    where = {"layer": 0} if case["on"] == 0 else {}
    G = (
        G.on(case["on"] if isinstance(case["on"], str) else None, **where)
        if case["on"] is not None
        else G
    )
    e = co.Penalised(G, 0.3)(net, batch, "squared")
    total = sum(s.loss + 0.3 * wanted_penalty(case, s) for s in samples) / B
    close(e.objective, total, 1e-9, "objective")
    size = max(float(g.abs().max()) for g in gradient(total) if g is not None)
    for name, theirs in zip(names, gradient(total), strict=True):
        ours = e.gradient[name]
        close(
            ours / size,
            (torch.zeros_like(ours) if theirs is None else theirs) / size,
            1e-9,
            f"penalised {name}",
        )


def fitting(case):
    """Penalties that a case has: the whole is of one direction, and omega is each layer's own;
    logarithms need two steps.
    """
    if case["on"] == "whole" and (case["bidirectional"] or case["penalty"] == "omega"):
        return {**case, "on": None}
    return case


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        seed if seed % 6 == 0 else pytest.param(seed, marks=pytest.mark.thorough)
        for seed in range(140)
    ],
)
def test_a_stack_equals_one_sample_at_a_time(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(fitting(random_case(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*one_in(3, NAMES), "gru-before"])
def test_every_cell_works_below_and_above_another(name):
    base = random_case(7) | {
        "bidirectional": True,
        "residual": False,
        "readout": "every",
        "ragged": True,
        "x0": "given",
        "engine": "auto",
        "penalty": "log-ratio",
        "on": None,
        "B": 3,
        "T": 5,
        "deep": (3,),
        "skip": True,
    }
    compare(base | {"cells": [name, "gru", name], "hidden": [3, 2, 5]})


@pytest.mark.parametrize("engine", ["reference", "cpu", "eager"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("cells", [["gru"], ["lstm", "gru"]], ids="-".join)
def test_the_mean_over_steps_equals_one_sample_at_a_time(cells, ragged, engine):
    """The readout that own data gets by default: costates, gradient and penalised gradient."""
    base = random_case(7) | {
        "bidirectional": True,
        "residual": False,
        "readout": "mean",
        "ragged": ragged,
        "x0": "learned",
        "engine": engine,
        "penalty": "log-ratio",
        "on": None,
        "B": 3,
        "T": 5,
        "deep": (),
        "skip": True,
    }
    compare(base | {"cells": cells, "hidden": [3] * len(cells)})


SHORTCUTS = {
    "none": {"hidden": [4, 4, 4], "residual": False, "dense": False},
    "residual": {"hidden": [4, 4, 4], "residual": True, "dense": False},
    "projected": {"hidden": [5, 3, 3], "residual": True, "dense": False},
    "dense": {"hidden": [3, 5, 2], "residual": False, "dense": True},
}


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("shortcut", SHORTCUTS)
@pytest.mark.parametrize("readout", ["every", "last", "tilted"])
@pytest.mark.sampled(2)
def test_dropout_is_on_every_connection_that_is_not_recurrent(bidirectional, shortcut, readout):
    case = random_case(3) | {
        "cells": ["lstm", "elman", "gru"],
        **SHORTCUTS[shortcut],
        "bidirectional": bidirectional,
        "readout": readout,
        "ragged": False,
        "x0": "zero",
        "engine": "cpu",
        "dropout": 0.4,
        "B": 3,
        "T": 6,
        "deep": (3,),
        "skip": True,
    }
    net, batch = make(case)
    T, B = case["T"], case["B"]
    torch.manual_seed(11)
    first, second, third = net.layers.widths
    sizes = [(T, 2), (T, first), (T, second), (1 if readout == "last" else T, third)]
    masks = [
        torch.nn.functional.dropout(torch.ones(t * B, n, dtype=F64), 0.4).reshape(t, B, n)
        for t, n in sizes
    ]
    torch.manual_seed(11)
    e = co.Penalised("log-ratio", 0.5)(net, batch, "squared")
    each = [[m[:, j] for m in masks] for j in range(B)]
    samples = [Sample(case, net, batch, j, each[j]) for j in range(B)]
    of = oracles.PENALTIES["log-ratio"]
    total = (
        sum(s.loss + 0.5 * sum(of(one) for one in s.layers) / len(s.layers) for s in samples) / B
    )
    close(e.objective, total, 1e-10, "objective")
    names, parameters = zip(*net.named_parameters(), strict=True)
    for name, theirs in zip(names, torch.autograd.grad(total, parameters), strict=True):
        close(e.gradient[name], theirs, 1e-9, name)
    assert all(float((m == 0).double().mean()) > 0.1 for m in masks)
    net.eval()
    assert torch.equal(net(batch.u).a, net(batch.u).a)


def test_one_layer_is_a_network():
    torch.manual_seed(0)
    for name in ("lstm", "gru", "lru", "scrn"):
        stack = co.Stack([name], inputs=3, hidden=5, outputs=2, dtype=F64)
        net = co.Network(name, inputs=3, hidden=5, outputs=2, dtype=F64)
        net.load_state_dict(
            {n.removeprefix("layers.levels.0.0."): v for n, v in stack.state_dict().items()}
        )
        b = co.Batch(torch.randn(6, 4, 3, dtype=F64), torch.randn(4, 2, dtype=F64))
        one, other = (co.Penalised("variance", 2.0)(m, b, "squared") for m in (net, stack))
        for key, g in one.gradient.items():
            close(
                other.gradient[key if key in other.gradient else f"layers.levels.0.0.{key}"],
                g,
                1e-12,
                key,
            )


@pytest.mark.parametrize("shortcut", SHORTCUTS)
def test_costates_of_all_layers_may_leave_the_range_of_numbers(shortcut):
    torch.manual_seed(0)
    options = {"inputs": 2, "outputs": 1, **SHORTCUTS[shortcut]}
    net = co.Stack(["elman", "leaky", "elman"], **options)
    with torch.no_grad():
        for layer in net.layers:
            layer.W.mul_(0.05)
    b = co.Batch(torch.randn(400, 3, 2), torch.randn(3, 1))
    lam = net(b.u).costates("squared", b.y)
    exact = net.double()(b.u.double()).costates("squared", b.y.double())
    assert float(lam.joined().log_norms()[1].max()) < -200
    worst = (lam.joined().log_norms() - exact.joined().log_norms())[1:].abs().max()
    assert float(worst) < 5e-3
    parts = torch.stack([one.log_norms() for one in exact])
    assert torch.allclose(exact.joined().log_norms(), torch.logsumexp(2 * parts, 0) / 2)


def test_a_stack_is_trained_like_a_network(tmp_path):
    torch.manual_seed(0)
    task = co.tasks.make("xor", length=(10, 12))
    net = co.Stack(
        ["gru", "lstm"],
        inputs=task.inputs,
        hidden=12,
        outputs=task.outputs,
        readout=task.readout,
        output=task.output,
        residual=True,
        dropout=0.1,
    )
    args = {
        "steps": 6,
        "every": 3,
        "tests": 20,
        "confirm": 20,
        "probes": 4,
        "batch": 8,
        "checkpoint": 3,
    }
    whole = co.train(
        net, task, gradient=co.Penalised("log-ratio", 0.1), folder=tmp_path / "a", **args
    )
    assert whole.step == 6
    rows = [r for r in whole.rows if r["kind"] == "probe"]
    assert rows
    assert rows[-1]["log10_costates"][0] is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cells": "lstm"}, "a list of cells"),
        ({"cells": []}, "a list of cells"),
        ({"hidden": [3]}, "one for each layer"),
        ({"dense": True, "residual": True}, "choose one"),
        ({"dense": 1}, "dense must be True or False; got 1"),
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"eps": 0.1}, "no layer of this stack has an option eps"),
        ({"cells": ["lstm", "gruu"]}, "did you mean 'gru'"),
        ({"cells": ["gru", torch.nn.GRUCell(3, 3)], "bidirectional": True}, "one set of weights"),
    ],
)
def test_bad_stacks_are_refused(change, words):
    given = {"cells": ["lstm", "gru"], "inputs": 2, "hidden": 3, "outputs": 1} | change
    with pytest.raises(co.CoadjointError, match=words):
        co.Stack(given.pop("cells"), **given)


def test_methods_that_take_sequences_apart_refuse_it():
    net = co.Stack(["elman", "elman"], inputs=2, hidden=3, outputs=1)
    b = co.Batch(torch.randn(5, 2, 2), torch.randn(2, 1))
    for method in (
        co.BPTT(segments=2),
        co.Penalised("variance", segments=2),
        co.Truncated(1, 2),
        co.RTRL(),
    ):
        with pytest.raises(co.Unsupported, match="layer by layer"):
            method(net, b, "squared")
    with pytest.raises(co.InputError, match="x0 has shape"):
        net(b.u, x0=torch.zeros(2, 3))
    with pytest.raises(co.Unsupported, match="one direction"):
        co.Stack(["elman"], inputs=2, hidden=3, outputs=1, bidirectional=True)(b.u).costates(
            "squared", b.y
        ).joined()


def test_rtrl_says_what_a_stack_would_cost():
    """An LSTM's state has two slots; the readout has no influence on states."""
    net = co.Stack(["elman", "lstm"], inputs=2, hidden=[3, 5], outputs=1)
    sizes = [3 * (3 + 2 + 1), 20 * (5 + 3 + 1)]
    recurrent = [p.numel() for name, p in net.named_parameters() if name not in ("V", "b_o")]
    assert sum(recurrent) == sum(sizes) == 198
    b = co.Batch(torch.randn(5, 2, 2), torch.randn(2, 1))
    words = r"layer by layer.*13 x 198 = 2,574 numbers .* 13 x 13 .* docs/online\.md"
    with pytest.raises(co.Unsupported, match=words):
        co.RTRL()(net, b, "squared")
    with pytest.raises(co.Unsupported, match=words):
        co.RTRL().stream(net)
    both = co.Stack(["elman"], inputs=2, hidden=3, outputs=1, bidirectional=True)
    with pytest.raises(co.Unsupported, match=r"layer by layer over entire sequences\. Use BPTT"):
        co.RTRL()(both, b, "squared")


class AllLayers(torch.nn.Module):
    """The step of a stack of two elman layers as one function of x = [x_1, x_2]."""

    def __init__(self, stack):
        super().__init__()
        self.layers = torch.nn.ModuleList(stack.layers)

    def forward(self, u, x):
        below, above = x.split([layer.hidden for layer in self.layers], -1)
        below = self.layers[0].advance(u, below)
        return torch.cat([below, self.layers[1].advance(below, above)], -1)


def test_a_stack_as_one_step_function_has_the_gradient_of_the_stack_by_rtrl():
    torch.manual_seed(0)
    stack = co.Stack(["elman", "elman"], inputs=2, hidden=[3, 5], outputs=1, dtype=F64)
    step = co.Network(AllLayers(stack), inputs=2, hidden=8, outputs=1, dtype=F64)
    with torch.no_grad():
        step.V.zero_()
        step.V[:, 3:] = stack.V
        step.b_o.copy_(stack.b_o)
    b = co.Batch(torch.randn(7, 4, 2, dtype=F64), torch.randn(4, 1, dtype=F64))
    truth = co.BPTT()(stack, b, "squared").gradient
    found = co.RTRL()(step, b, "squared").gradient
    assert torch.allclose(found["V"][:, 3:], truth["V"], rtol=1e-11)
    theirs = sorted(float(g.norm()) for name, g in truth.items() if name not in ("V", "b_o"))
    ours = sorted(float(g.norm()) for name, g in found.items() if name not in ("V", "b_o"))
    assert ours == pytest.approx(theirs, rel=1e-11)


def test_the_final_state_can_be_carried_into_the_next_call():
    torch.manual_seed(0)
    net = co.Stack(["lstm", "gru"], inputs=2, hidden=3, outputs=1, dtype=F64)
    u = torch.randn(8, 4, 2, dtype=F64)
    first = net(u[:5])
    assert torch.allclose(net(u[5:], x0=first.state).a, net(u).a, rtol=0, atol=1e-14)


def joint_norms(parts):
    return torch.sqrt(sum(n.square() for n in parts))


@pytest.mark.parametrize(
    "name", ["log-ratio", "variance", "squared-norm", "log-variance", "norm-stabiliser"]
)
def test_penalties_of_some_layers_scale_and_add(name):
    torch.manual_seed(0)
    net = co.Stack(["gru", "lstm", "elman"], inputs=2, hidden=4, outputs=1, dtype=F64)
    lam = net(torch.randn(6, 3, 2, dtype=F64)).costates("squared", torch.randn(3, 1, dtype=F64))
    G = co.penalties.penalty(name)
    each = torch.stack([G(one) for one in lam])
    assert torch.allclose(G(lam), each.mean(0))
    assert torch.equal(G.on("top")(lam), each[2])
    assert torch.equal(G.on(layer=1)(lam), each[1])
    whole = G.on("whole")(lam)
    assert torch.equal(whole, G(lam.joined()))
    assert not torch.allclose(whole, each.mean(0))
    assert torch.allclose((2 * G.on("whole"))(lam), 2 * whole)
    assert torch.allclose((G.on("whole") + 0.5 * G.on(layer=0))(lam), whole + 0.5 * each[0])
    assert torch.allclose((G + G)(lam), 2 * each.mean(0))
    with pytest.raises(co.InputError, match="unknown part of a stack"):
        G.on(depth=1)


def test_the_stabiliser_of_all_layers_takes_all_units():
    torch.manual_seed(0)
    net = co.Stack(["lstm", "gru"], inputs=2, hidden=[4, 3], outputs=1, dtype=F64)
    run = net(torch.randn(6, 3, 2, dtype=F64))
    lam = run.costates("squared", torch.randn(3, 1, dtype=F64))
    h = [
        layer["forward"].x[..., :d].norm(dim=-1)
        for layer, d in zip(run.layers, (4, 3), strict=True)
    ]
    n = joint_norms(h)
    expected = (n[1:] - n[:-1]).square().mean(0)
    assert torch.allclose(co.penalties.norm_stabiliser.on("whole")(lam), expected)


def test_costates_of_a_penalised_evaluation_are_the_plain_ones():
    net = co.Stack(["gru", "elman"], inputs=2, hidden=3, outputs=1, dtype=F64)
    batch = co.Batch(torch.randn(5, 2, 2, dtype=F64), torch.randn(2, 1, dtype=F64))
    e = co.Penalised("log-ratio", 0.1)(net, batch, "squared")
    plain = co.BPTT()(net, batch, "squared")
    for one, other in zip(e.costates, plain.costates, strict=True):
        assert not one.lam.requires_grad
        assert torch.allclose(one.lam, other.lam)


def test_parameters_are_drawn_again_as_those_of_a_new_stack():
    def make():
        return co.Stack(["gru", "elman"], inputs=2, hidden=3, outputs=2, skip=True, x0="learned")

    torch.manual_seed(1)
    new = make()
    net = make()
    torch.manual_seed(1)
    net.reset_parameters()
    for name, p in net.named_parameters():
        assert torch.equal(p, new.state_dict()[name]), name


def test_costates_exist_where_nothing_is_trained():
    net = co.Stack(["gru", "elman"], inputs=2, hidden=3, outputs=1, dtype=F64)
    u, y = torch.randn(5, 2, 2, dtype=F64), torch.randn(2, 1, dtype=F64)
    expected = net(u).costates("squared", y)
    net.requires_grad_(False)
    for one, other in zip(net(u).costates("squared", y), expected, strict=True):
        assert torch.equal(one.lam.detach(), other.lam.detach())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: co.Stack([3], inputs=2, hidden=3, outputs=1), "a layer is a cell's name"),
        (lambda: co.Stack(["gru"], inputs=2, hidden=2.5, outputs=1),
            "hidden must be an integer or a list"),
        (lambda: co.Stack(["gru"], inputs=2, hidden=3, outputs=1, bidirectional="yes"),
            "True or False"),
        (lambda: co.Stack(["gru"], inputs=2, hidden=3, outputs=1)(torch.zeros(4, 5, 2),
            x0=[0.0] * 3), "must be a tensor"),
        (lambda: co.Stack(["gru", "gru"], inputs=2, hidden=3, outputs=1)(torch.zeros(4, 5, 2),
            x0=torch.zeros(4, 6)), r"\[5, 6\]"),
        (lambda: co.Stack(["gru"], inputs=2, hidden=3,
            outputs=1)(torch.zeros(4, 5, 2)).costates("squared", torch.zeros(5, 1))[:0].joined(),
            "no costates to join"),
        (lambda: co.EncoderDecoder([], inputs=2, hidden=3, outputs=3), "got an empty list"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused_in_clear_words(make, words):
    with pytest.raises(co.CoadjointError, match=words):
        make()
