"""Online learning takes the gradients of BPTT and Truncated, in memory that does not grow.

A run that stops and is resumed ends in the same bits.
"""

import gzip
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import build
import coadjoint as co
import warm
from build import Step
from coadjoint.objectives import losses
from coadjoint.tasks.files import scaling
from coadjoint.training import learning, online, signals, storage
from compare import close
from paths import SUPPORT

pytestmark = pytest.mark.slow

F64 = torch.float64
I, D, O = 2, 5, 3
CELLS = {
    "elman": {},
    "elman relu, learned start": {"activation": "relu", "x0": "learned"},
    "elman without biases": {"bias": False},
    "leaky": {},
    "rate": {},  # W reads a function of the state
    "lstm": {"x0": "learned"},
    "lstm-1997": {},
    "peephole": {},
    "gru": {"x0": "learned"},  # z and v apart
    "cornn": {},
    "unicornn": {},  # no W
    "mingru": {},
    "minlstm": {},
    "lru": {},
    "scrn": {},  # from here on W, R or b is a function of what is trained
    "scrn-learned": {},
    "antisymmetric-gated": {},
    "lipschitz": {},
    "elman orthogonal": {"structure": "orthogonal", "x0": "learned"},
    "elman low-rank": {"structure": "low-rank"},
}


def make(name="elman", outputs=O, seed=3, **options):
    cell = name.split()[0] if isinstance(name, str) else name
    net = build.network(cell, seed, inputs=I, hidden=D, outputs=outputs, readout="every", **options)
    if isinstance(net.x0, nn.Parameter):
        with torch.no_grad():
            net.x0.copy_(torch.linspace(-0.5, 0.4, len(net.x0)))
    return net


def data(T, outputs=O, batch=1, seed=1):
    rng = torch.Generator().manual_seed(seed)
    u = torch.randn(T, batch, I, dtype=F64, generator=rng)
    return u, torch.randn(T, batch, outputs, dtype=F64, generator=rng)


def pairs(u, y):
    return list(zip(u, y, strict=True))


def held(net, stream, learner, loss="squared", **options):
    return online.learn(net, stream, loss, learner, held=True, **options)


# gradients


@pytest.mark.parametrize("name", CELLS)
def test_rtrl_of_held_weights_is_bptt_on_every_prefix(name):
    net = make(name, **CELLS[name])
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    u, y = data(23)
    for T in (1, 2, 7, 23):
        found = held(net, pairs(u[:T], y[:T]), co.RTRL())
        truth = co.BPTT()(net, co.Batch(u[:T], y[:T]), "squared")
        close(found.gradient, truth.gradient, 1e-10)
        assert math.isclose(found.so_far["loss"] * T, float(truth.loss), rel_tol=1e-12)
        assert (found.step, found.updates, found.status) == (T, 0, "ended")
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


@pytest.mark.parametrize(
    "case",
    [
        "mask",
        "frozen",
        "all frozen",
        "structured, frozen",
        "step",
        "batch",
        "classes",
        "own loss",
        "sigmoid",
        "long",
    ],
)
def test_rtrl_of_held_weights_is_bptt_for_other_options(case):
    T, B, outputs, loss, net = 11, 1, O, "squared", make("lstm", x0="learned")
    if case == "mask":
        net = make(
            "gru",
            mask=(torch.rand(3 * D, D, generator=torch.Generator().manual_seed(0)) < 0.6).double(),
        )
    elif case == "frozen":
        net.W.requires_grad_(False)
        net.b_o.requires_grad_(False)
    elif case == "all frozen":
        for parameter in (net.W, net.R, net.b, net.x0):
            parameter.requires_grad_(False)
    elif case == "structured, frozen":
        net = make("elman", structure="orthogonal", x0="learned")
        for parameter in (net.R, net.b, *net.parametrizations.parameters()):
            parameter.requires_grad_(False)
    elif case == "step":
        net = make(nn.LSTMCell(I, D).double())
    elif case == "batch":
        B = 4
    elif case == "long":
        T = 300
    elif case == "sigmoid":
        loss, net = "binary-cross-entropy", make("gru", output="sigmoid")
    elif case == "own loss":

        def loss(y_hat, y):
            return (y_hat - y).abs().pow(1.5).sum(-1)

    u, y = data(T, outputs, B)
    if case == "classes":
        loss, net, y = (
            "cross-entropy",
            make("elman", output="softmax"),
            torch.arange(T)[:, None] % O,
        )
    if case == "sigmoid":
        y = (y > 0).double()
    found = held(net, pairs(u, y), co.RTRL(), loss, batch=B)
    close(found.gradient, co.BPTT()(net, co.Batch(u, y), loss).gradient, 1e-10)


@pytest.mark.parametrize(("k1", "k2"), [(1, 1), (1, 4), (3, 3), (3, 7), (5, 8), (4, 40)])
@pytest.mark.parametrize("name", ["elman", "lstm", "scrn"])
def test_windows_of_held_weights_are_those_of_truncated(name, k1, k2):
    net, (u, y) = make(name, x0="learned"), data(22, batch=2)
    method = co.Truncated(k1, k2)
    for T in (1, 8, 22):
        found = held(net, pairs(u[:T], y[:T]), method, batch=2)
        truth = method(net, co.Batch(u[:T], y[:T]), "squared")
        close(found.gradient, truth.gradient, 1e-10)
        assert math.isclose(found.so_far["loss"] * T, float(truth.loss), rel_tol=1e-12)


@pytest.mark.parametrize("options", [{"skip": True}, {"deep": [4, 3]}], ids=["skip", "deep"])
def test_windows_read_out_what_the_network_does(options):
    net, (u, y) = make("gru", **options), data(9)
    found = held(net, pairs(u, y), co.Truncated(2, 5))
    truth = co.Truncated(2, 5)(net, co.Batch(u, y), "squared")
    close(found.gradient, truth.gradient, 1e-10)
    assert math.isclose(found.so_far["loss"] * 9, float(truth.loss), rel_tol=1e-12)
    with pytest.raises(co.Unsupported, match="real-time recurrent learning does not support"):
        held(net, pairs(u, y), co.RTRL())


@pytest.mark.parametrize("learner", [co.RTRL(), co.Truncated(3, 6)], ids=["rtrl", "truncated"])
def test_none_begins_another_sequence(learner):
    net, (u, y) = make("gru", x0="learned"), data(13)
    found = held(net, [*pairs(u[:5], y[:5]), None, *pairs(u[5:], y[5:])], learner)
    parts = [
        learner(net, co.Batch(u[cut], y[cut]), "squared").gradient
        for cut in (slice(5), slice(5, None))
    ]
    close(found.gradient, {name: parts[0][name] + parts[1][name] for name in parts[0]}, 1e-10)


@pytest.mark.parametrize(
    "loss",
    ["squared", "half-squared", "cross-entropy", "binary-cross-entropy", "absolute", "huber"],
)
@pytest.mark.parametrize("output", ["identity", "softmax", "sigmoid", "tanh"])
def test_slopes_of_losses_are_their_derivatives(loss, output):
    if output not in (losses.LOSSES[loss].folds or (output,)):
        pytest.skip("this loss contains another output function")
    a, y = torch.randn(6, 3, dtype=F64), torch.rand(6, 3, dtype=F64)
    targets = [y, y.float()] + ([torch.arange(6) % 3] if loss == "cross-entropy" else [])
    targets += [(y > 0.5).long()] if loss != "cross-entropy" else []
    for target in targets:
        value, slope = losses.losses_and_slopes(loss, a, target, output)
        leaf = a.clone().requires_grad_()
        truth = losses.entry_losses(loss, leaf, target, output)
        close(value, truth.detach(), 1e-14)
        close(slope, torch.autograd.grad(truth.sum(), leaf)[0], 1e-13)
        assert slope.dtype == F64


def test_updates_at_every_step_are_the_definition():
    """dL_t/dtheta = lam_t' S_t with S_t = J_t S_{t-1} + f_theta, all of it by torch, and theta
    moving all the while.
    """
    ours, (u, y) = make("gru"), data(12)
    found = online.learn(ours, pairs(u, y), "squared", optimiser=co.optimisers.sgd(0.05), clip=1.5)
    net, rate, values = make("gru"), 0.05, []
    names = [n for n, _ in net.named_parameters() if n not in ("V", "b_o")]
    x, S = (
        torch.zeros(1, D, dtype=F64),
        {n: torch.zeros(D, net.get_parameter(n).numel(), dtype=F64) for n in names},
    )
    for t in range(12):
        theta = {n: p.detach().clone() for n, p in net.named_parameters()}

        def step(x, *p, t=t):
            return torch.func.functional_call(
                Step(net), dict(zip([f"net.{n}" for n in names], p, strict=True)), (u[t], x)
            )[0]

        J, *of = torch.autograd.functional.jacobian(step, (x, *(theta[n] for n in names)))
        S = {n: J[:, 0] @ S[n] + f.reshape(D, -1) for n, f in zip(names, of, strict=True)}
        x = step(x, *(theta[n] for n in names)).detach()[None]
        h, V, b_o = (v.clone().requires_grad_() for v in (x, theta["V"], theta["b_o"]))
        loss = (h @ V.T + b_o - y[t]).square().sum()
        lam, gV, gb = torch.autograd.grad(loss, [h, V, b_o])
        values.append(loss.item())
        g = {n: (lam @ S[n]).reshape(theta[n].shape) for n in names} | {"V": gV, "b_o": gb}
        norm = math.sqrt(sum(float(v.square().sum()) for v in g.values()))
        with torch.no_grad():
            for n, p in net.named_parameters():
                p -= rate * min(1.0, 1.5 / norm) * g[n]
    assert math.isclose(found.so_far["loss"], sum(values) / 12, rel_tol=1e-12)
    assert found.updates == 12
    close(dict(ours.named_parameters()), dict(net.named_parameters()), 1e-11)


def test_a_window_is_swept_with_the_weights_of_its_end():
    """k1 = k2: the pieces of the sequence one after the other, each from the state the one before
    has left.
    """
    ours, net, (u, y) = make("lstm"), make("lstm"), data(12)
    found = online.learn(
        ours, pairs(u, y), "squared", co.Truncated(4, 4), co.optimisers.momentum(0.03)
    )
    optimiser, x = torch.optim.SGD(net.parameters(), 0.03, momentum=0.9), None
    for cut in (slice(0, 4), slice(4, 8), slice(8, 12)):
        e = co.BPTT()(net, co.Batch(u[cut], y[cut], x0=x), "squared")
        x = e.trajectory.state.detach()
        e.write_grad(net)
        optimiser.step()
    assert found.updates == 3
    close(dict(ours.named_parameters()), dict(net.named_parameters()), 1e-12)


# figures


def test_every_step_is_predicted_before_it_is_learned():
    net, (u, y) = make(), data(40)
    seen, scores = [], iter(range(40))
    with torch.no_grad():
        first = float((net(u[:1]).a[0] - y[0]).square().sum())

    def score(a):
        seen.append(a.clone())
        return {"place": float(next(scores))}

    found = online.learn(net, pairs(u, y), "squared", every=15, window=7, score=score)
    each = [float((a - b).square().sum()) for a, b in zip(seen, y, strict=True)]
    assert math.isclose(each[0], first, rel_tol=1e-12)
    assert math.isclose(found.so_far["loss"], np.mean(each), rel_tol=1e-12)
    assert math.isclose(found.recent["loss"], np.mean(each[-7:]), rel_tol=1e-12)
    assert found.recent["place"] == 36.0
    train = [row for row in found.rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == [15, 30, 40]
    assert np.allclose(
        [row["loss"] for row in train],
        [np.mean(each[:15]), np.mean(each[15:30]), np.mean(each[30:])],
    )
    looks = [row for row in found.rows if row.get("split") == "last 7"]
    assert [row["place"] for row in looks] == [11.0, 26.0, 36.0]


def test_it_learns_to_remember():
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    u = torch.randn(600, 1, generator=rng)
    for learner in (co.RTRL(), co.Truncated(1, 3)):
        net = co.Network("elman", inputs=1, hidden=16, outputs=1, readout="every")
        stream = ((u[t], u[max(t - 1, 0)]) for t in range(600))
        found = online.learn(net, stream, "squared", learner, co.optimisers.sgd(0.01), window=200)
        assert found.recent["loss"] < 0.2, learner  # remembering nothing gives the variance, 1


def test_steps_end_a_stream_that_does_not():
    def endless():
        t = 0
        while True:
            t += 1
            yield torch.full((I,), math.sin(t), dtype=F64), torch.zeros(O, dtype=F64)

    found = online.learn(make(), endless(), "squared", steps=25, every=10)
    assert (found.step, found.status, found.updates) == (25, "finished", 25)


# Optimisers load torch's compiler only to be left alone by it. Without it there is half as much
# to weigh.
APART = """
import json, sys, types
import torch
torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *given, **more: function
torch._dynamo.graph_break = lambda *given, **more: None
sys.path[:0] = sys.argv[1:3]
import test_online
print(json.dumps(getattr(test_online, sys.argv[3])(*sys.argv[4:])))
"""
STEPS = 600  # between two weighings


def apart(function, *words):
    """What a function of this file returns in a process of its own, where nobody else leaves
    anything behind.
    """
    command = [
        sys.executable,
        "-c",
        APART,
        SUPPORT,
        Path(__file__).parent,
        function.__name__,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def growth_of_learners(folder):
    """What STEPS steps add to all that is alive, by each learner: objects, bytes, nodes
    of graphs.
    """
    from alive import alive

    torch.set_num_threads(1)
    learning.ROWS_IN_MEMORY = (
        5  # rows are kept up to a limit, which is reached before the first weighing
    )
    u, y = data(64)
    found = {}
    alive()  # the first time leaves something behind itself

    def watched(weights):
        for t in range(201 + STEPS):
            if t in (200, 200 + STEPS):
                weights.append(alive())
            yield u[t % 64], y[t % 64]

    for learner, method in LEARNERS.items():
        weights = []
        online.learn(
            make("lstm"),
            watched(weights),
            "squared",
            method,
            co.optimisers.adam(1e-3),
            folder=Path(folder) / learner,
            score=lambda a: {"size": float(a.norm())},
            every=10,
            window=50,
            checkpoint=100,
        )
        before, after = weights
        found[learner] = after.more_than(before)
    return found


def grows(objects, size, nodes):
    """One object in twenty steps, eight bytes in each or a single node: less than anything that is
    kept for each step.
    """
    return objects > STEPS // 20, size > 8 * STEPS, nodes > 0


def test_memory_does_not_grow(tmp_path):
    found = apart(growth_of_learners, tmp_path)
    assert list(found) == list(LEARNERS)
    for learner, growth in found.items():
        assert grows(*growth) == (False, False, False), (learner, growth)


def growth_of_hoards():
    """The same of what is kept on purpose: a number, some text, a state or an operation for each
    step.
    """
    from alive import alive

    kept, found = (
        {"numbers": [], "text": "", "states": [], "graph": torch.ones(1, requires_grad=True)},
        {},
    )

    def keep(what, t):
        if what == "numbers":
            kept[what].append(1.5 * t)
        elif what == "text":
            kept[what] += "one more step"
        elif what == "states":
            kept[what].append(torch.zeros(4))
        else:
            kept[what] = kept[what] + 1

    alive()
    before = alive()
    for what in kept:
        for t in range(STEPS):
            keep(what, t)
        after = alive()
        found[what] = after.more_than(before)
        before = after
    return found


@pytest.mark.thorough
def test_memory_that_grows_is_noticed():
    found = {what: grows(*growth) for what, growth in apart(growth_of_hoards).items()}
    assert found == {
        "numbers": (True, True, False),
        "text": (False, True, False),
        "states": (True, True, False),
        "graph": (False, False, True),
    }


# files


def csv_row(t):
    y = math.sin(t)
    state = "up" if y > 0 else "down"
    return f"{t},{10 + 3 * math.sin(7 * t):.9g},{-200 + 50 * math.cos(t * t):.9g},{y:.9g},{state}\n"


CSV = "time,a,b,y,state\n" + "".join(csv_row(t) for t in range(60))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("COADJOINT_DEBUG", raising=False)
    (tmp_path / "d.csv").write_text(CSV)
    return tmp_path


def table():
    rows = [line.split(",") for line in CSV.split()[1:]]
    return np.array([[float(c) for c in row[1:4]] for row in rows]), [row[4] for row in rows]


def read(path="d.csv", **options):
    return online.read(path, dtype=F64, **({"target": "y", "features": ["a", "b"]} | options))


def test_numbers_are_standardised_by_the_rows_before(here):
    values, _ = table()
    got = list(read())
    for t, (u, y) in enumerate(got):
        before, now = values[:t], np.concatenate([u.numpy(), y.numpy()])
        if t < 2:
            assert (now == 0).all()
            continue
        z = (values[t] - before.mean(0)) / before.std(0)
        assert np.allclose(now, np.clip(z, -math.sqrt(t), math.sqrt(t)), rtol=1e-11)
    plain = np.array([np.concatenate([u.numpy(), y.numpy()]) for u, y in read(standardise=False)])
    assert np.array_equal(plain, values)


def test_a_stream_is_called_after_its_file(here, monkeypatch):
    (here / "deep.down.csv").write_text(CSV)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CSV.encode())))
    assert [read(path).name for path in ("d.csv", here / "deep.down.csv", "-")] == [
        "d",
        "deep",
        "stream",
    ]


def test_scores_are_in_the_targets_own_units(here):
    values, _ = table()
    stream = read()
    a = torch.tensor([[0.7]], dtype=F64)
    for t, _ in enumerate(stream):
        mean, std = (values[:t, 2].mean(), values[:t, 2].std()) if t else (0.0, 0.0)
        e = mean + std * 0.7 - values[t, 2]
        found = stream.score(a)
        assert math.isclose(found["mse"], e * e, rel_tol=1e-9, abs_tol=1e-15)
        assert math.isclose(found["mae"], abs(e), rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(
            found["baseline"], (mean - values[t, 2]) ** 2, rel_tol=1e-9, abs_tol=1e-15
        )


def test_classes_are_given_or_found_in_a_first_pass(here):
    _, words = table()
    found = read(target="state")
    assert (found.kind, found.labels, found.outputs) == ("classify", ["down", "up"], 2)
    assert any("found in a first pass" in note for note in found.notes)
    got = [int(y) for _, y in found]
    assert got == [["down", "up"].index(w) for w in words]
    given = read(target="state", classes=["up", "down"])
    usual, right = [0, 0], []
    for (_, y), w in zip(given, words, strict=True):
        assert ["up", "down"][int(y)] == w
        right.append(given.score(torch.tensor([[1.0, 0.0]]))["baseline"])
        assert right[-1] == float(any(usual) and usual.index(max(usual)) == int(y))
        usual[int(y)] += 1
    assert 0 < sum(right) < 60


def test_the_next_row_is_the_target_and_ids_begin_sequences(here):
    values, _ = table()
    got = list(read(kind="next", target=None, features=["a", "b", "y"], standardise=False))
    assert len(got) == 59
    assert np.array_equal([u.tolist() for u, _ in got], values[:-1])
    assert np.array_equal([y.tolist() for _, y in got], values[1:])
    (here / "id.csv").write_text(
        "id,a,y\n" + "".join(f"{'pq'[t // 3]},{t},{-t}\n" for t in range(6))
    )
    with_id = list(online.read("id.csv", kind="next", standardise=False))
    assert [None if p is None else p[1].tolist() for p in with_id] == [
        [1, -1],
        [2, -2],
        None,
        [4, -4],
        [5, -5],
    ]
    regress = list(online.read("id.csv", target="y", standardise=False))
    assert [None if p is None else p[0].item() for p in regress] == [0, 1, 2, None, 3, 4, 5]


def test_all_kinds_of_files_hold_the_same_stream(here, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    values, words = table()
    (here / "d.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    (here / "d.tsv").write_text(CSV.replace(",", "\t"))
    (here / "german.txt").write_text(CSV.replace(",", ";").replace(".", ","))
    np.save("d.npy", values)
    columns = {"a": values[:, 0], "b": values[:, 1], "y": values[:, 2], "state": words}
    pq.write_table(pa.table(columns), "d.parquet", row_group_size=7)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CSV.encode())))
    truth = [torch.cat(pair) for pair in read()]
    others = {
        "d.csv.gz": {}, "d.tsv": {}, "german.txt": {"sep": ";", "decimal": ","}, "-": {},
        "d.parquet": {},
        "d.npy": {"features": ["c1", "c2"], "target": "c3"},
    }  # fmt: skip
    for path, options in others.items():
        got = [torch.cat(pair) for pair in read(path, **options)]
        assert len(got) == 60, path
        assert torch.equal(torch.stack(got), torch.stack(truth)), path
    assert [int(y) for _, y in read("d.parquet", target="state")] == [
        ["down", "up"].index(w) for w in words
    ]


def test_blank_cells_are_filled_from_the_row_before(here):
    (here / "gaps.csv").write_text("a,b,y\n1,2,3\n,5,6\n7,NA,9\n")
    got = [
        u.tolist()
        for u, _ in online.read("gaps.csv", target="y", missing="ffill", standardise=False)
    ]
    assert got == [[1, 2], [1, 5], [7, 5]]


BAD = [
    ("a,y\n1,2\n3\n", {}, r"bad.csv:3: expected 2 fields, got 1"),
    ("a,y\n1,2\n\n3,4\n", {}, r"bad.csv:3: the line is blank"),
    ("a,y\n1,2\nx,4\n", {}, r"bad.csv:3 column 'a': \"x\" is not a number. .*--missing ffill"),
    ("a,y\n1,2\n3,x\n", {}, r"bad.csv:3 column 'y': \"x\" is not a number"),
    (
        "a,y\n1,2\n,4\n",
        {},
        r"bad.csv:3 column 'a': the value is missing. Fill it in, or pass --missing ffill",
    ),
    (
        "a,y\n1,2\n3,\n",
        {"missing": "ffill"},
        r"bad.csv:3 column 'y': the value is missing. Targets are never filled in",
    ),
    (
        "a,y\n,2\n3,4\n",
        {"missing": "ffill"},
        r"bad.csv:2 column 'a': the value is missing. There is no row before it",
    ),
    ("a,y\n1,2\ninf,4\n", {}, r"bad.csv:3 column 'a': \"inf\" is not finite"),
    ('a,y\n1,2\n"3,4\n', {}, r"bad.csv:3: the quotes"),
    ("a,y\n1,2\n3,\x00\n", {}, r"bad.csv:3: a NUL byte"),
    ("a;y\n1;2\n", {}, r"looks ;-separated. Pass --sep ';'"),
    ("1,2\n3,4\n", {}, r"the first row looks like data"),
    ("a,y\n", {}, "has a header but no rows"),
    ("", {}, "the file holds no text"),
    ("a,a\n1,2\n", {}, "column names appear more than once: 'a'"),
    ("a,y\n1,2\n", {"target": "yy"}, r"there is no column 'yy' for --target. Did you mean 'y'"),
    (
        "a,y\n1,p\n2,q\n3,r\n",
        {"classes": ["p", "q"]},
        r"bad.csv:4 column 'y': 'r' is not one of the classes 'p', 'q'",
    ),
    ("a,y\n1,p\n2,p\n", {}, "there is one class only"),
    (
        "a,y\n1,p\n",
        {"classes": ["p", "p"]},
        "--classes must be at least two different labels; got p,p",
    ),
    (
        "a,y\n1,2\n",
        {"kind": "regress", "classes": ["1", "2"]},
        "--classes applies to --kind classify",
    ),
    (
        "a,y\n1,2\n",
        {"missing": "mask"},
        "--missing must be refuse or ffill for a stream; got 'mask'",
    ),
    ("PAR1xxxx\n1\n", {}, "it holds Parquet"),
    ("a,y\n1,2.5\n2,3\n", {"kind": "classify"}, '"2.5" is a real number'),
]


@pytest.mark.parametrize(("text", "options", "words"), BAD, ids=range(len(BAD)))
def test_a_row_that_cannot_be_read_is_refused_with_its_place(here, text, options, words):
    (here / "bad.csv").write_text(text)
    with pytest.raises(co.InputError, match=words) as error:
        list(online.read("bad.csv", **({"target": "y"} | options)))
    assert "\n" not in str(error.value)


def test_other_files_that_cannot_be_read_are_refused(here):
    (here / "latin.csv").write_bytes(b"a,y\n1,2\n3,\xe4\n")
    (here / "cut.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 50)[:-9])
    (here / "long.csv").write_bytes(b"a,y\n" + b"1" * (2 << 20) + b"\n")
    np.save("words.npy", np.array(["a", "b"]))
    (here / "d.parquet").write_bytes(b"PAR1 no")
    (here / "d.npy").write_bytes(b"\x93NUMPY no")
    (here / "d.xlsx").write_bytes(b"PK")
    for path, words in {
        "latin.csv": "latin.csv:3: byte 0xe4 is not UTF-8",
        "cut.csv.gz": r"cut.csv.gz:\d+: cannot be read further",
        "long.csv": "a line of 1,048,576 bytes",
        "words.npy": "expected float, integer or boolean numbers",
        "d.parquet": "is incomplete or damaged",
        "d.npy": "is not a NumPy array",
        "d.xlsx": "cannot stream files named '.xlsx'",
        "none.csv": "none.csv does not exist",
        ".": "cannot stream files named",
    }.items():
        with pytest.raises(co.DataError, match=words):
            list(read(path, target=None, features=None, kind="next"))


# refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"learner": co.BPTT()}, co.InputError, "learner must be RTRL"),
        ({"loss": None}, co.InputError, "does not define a loss"),
        ({"every": 0}, co.InputError, "every must be a whole number, at least 1; got 0"),
        ({"clip": -1.0}, co.InputError, "clip must be a finite number, above 0"),
        ({"optimiser": co.optimisers.lbfgs()}, co.Unsupported, "sees each step once"),
        ({"optimiser": co.optimisers.hessian_free()}, co.Unsupported, "sees each step once"),
        (
            {"optimiser": co.optimisers.sgd(1e-2, rule=co.optimisers.Armijo())},
            co.Unsupported,
            "sees each step once",
        ),
        (
            {"optimiser": co.optimisers.sgd(1e-2, co.optimisers.plateau())},
            co.Unsupported,
            "plateau",
        ),
        (
            {"optimiser": co.optimisers.sgd(1e-2, co.optimisers.cosine())},
            co.InputError,
            "needs the number of steps",
        ),
        ({"batch": 0}, co.InputError, "batch must be a whole number"),
        ({"resume": True}, co.InputError, "needs the folder"),
    ],
)
def test_settings_that_do_not_fit_a_stream_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        online.learn(make(), pairs(*data(3)), **({"loss": "squared"} | options))


@pytest.mark.parametrize(("item", "words"), [((1, 2, 3), "3 values"), (5, "5")])
def test_an_item_that_is_no_pair_is_named_by_its_step(item, words):
    stream = [*pairs(*data(2)), item]
    with pytest.raises(co.KindError, match=f"at step 3 it yielded {words}"):
        online.learn(make(), stream, "squared")


def test_networks_that_read_whole_sequences_are_refused():
    u, y = data(3)
    stack = co.Stack(["elman", "elman"], inputs=I, hidden=D, outputs=O, readout="every", dtype=F64)
    for learner in (co.RTRL(), co.Truncated(1, 2)):
        with pytest.raises(co.Unsupported):
            online.learn(stack, pairs(u, y), "squared", learner)
    last = co.Network("elman", inputs=I, hidden=D, outputs=O, dtype=F64)
    with pytest.raises(co.InputError, match="an output at every step"):
        online.learn(last, pairs(u, y), "squared", co.Truncated(1, 2))


def test_numbers_that_leave_their_range_stop_the_run(tmp_path):
    net, (u, y) = make("elman", activation="identity"), data(2000)
    with torch.no_grad():
        net.W.mul_(20)
    with pytest.raises(
        co.NumericalError,
        match=r"step \d+: the (loss|gradient) is .* the last checkpoint is at step 60",
    ):
        online.learn(net, pairs(u, y), "squared", folder=tmp_path / "run", checkpoint=20, held=True)
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed"
    bad = u.clone()
    bad[4] = math.nan
    with pytest.raises(co.InputError, match="NaN or inf at step 5 of the stream"):
        online.learn(make(), pairs(bad, y), "squared")


# runs


class Crash(Exception):
    pass


LEARNERS = {"rtrl": co.RTRL(), "truncated": co.Truncated(3, 8)}
GO = {"every": 9, "window": 11, "checkpoint": 10}


def begun(name, learner, folder, stop=None, stream=None, **options):
    def crash(a):
        if stop is not None and next(count) == stop:
            raise Crash
        return {"size": float(a.norm())}

    count = itertools.count(1)
    torch.manual_seed(5)
    net = make(name, x0="learned")
    return online.learn(
        net,
        stream or pairs(*data(47)),
        "squared",
        LEARNERS[learner],
        co.optimisers.adam(1e-2),
        folder=folder,
        score=crash,
        **GO,
        **options,
    )


def whole(folder):
    """What must be the same bit for bit."""
    names = ("model.safetensors", "metrics.jsonl")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("learner", LEARNERS)
def test_too_little_room_is_said_before_anything_is_learned(learner, tmp_path, monkeypatch):
    """Room for several copies of the weights, and of what the learner keeps."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    net = make("elman", x0="learned")
    with pytest.raises(
        co.StorageError, match="has 1,000 bytes free and this run needs about"
    ) as refused:
        begun("elman", learner, tmp_path / "run")
    need = int(re.search(r"needs about ([\d,]+)", str(refused.value))[1].replace(",", ""))
    numbers = {name: p.numel() for name, p in net.named_parameters()}
    weights = sum(numbers.values())
    within = weights - numbers["V"] - numbers["b_o"]
    influence = net.n * within if learner == "rtrl" else 0
    assert need >= 4 * 8 * (weights + influence) + 2**20


@pytest.mark.parametrize("at", [5, 25, 45])
def test_rows_deleted_during_a_stream_stop_it(tmp_path, at):
    """The run ends at its next save, with its rows put back; 45 comes after the last one but that
    of the end.
    """
    folder = tmp_path / "two"

    def stream():
        for t, pair in enumerate(pairs(*data(47)), 1):
            if t == at:
                (folder / "metrics.jsonl").unlink()
            yield pair

    begun("elman", "rtrl", tmp_path / "one")
    with pytest.raises(
        co.StorageError,
        match=r"metrics.jsonl was deleted during the run; its rows were put back",
    ):
        begun("elman", "rtrl", folder, stream=stream())
    begun("elman", "rtrl", folder, resume=True)
    assert whole(folder) == whole(tmp_path / "one")


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("name", ["elman", "lstm"])
def test_a_crashed_run_is_resumed_bit_for_bit(name, learner, tmp_path):
    straight = begun(name, learner, tmp_path / "one")
    with pytest.raises(Crash):
        begun(name, learner, tmp_path / "two", stop=34)
    assert [p.name for p in storage.list_checkpoints(tmp_path / "two")] == [
        "step-00000020",
        "step-00000030",
    ]
    again = begun(name, learner, tmp_path / "two", resume=True)
    assert whole(tmp_path / "one") == whole(tmp_path / "two")
    assert (again.so_far, again.recent, again.updates) == (
        straight.so_far,
        straight.recent,
        straight.updates,
    )


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_signal_saves_and_says_how_to_resume(learner, tmp_path):
    straight, folder = begun("gru", learner, tmp_path / "one"), tmp_path / "two"

    def until(n):
        for t, pair in enumerate(pairs(*data(47))):
            if t == n:
                os.kill(os.getpid(), signal.SIGINT)
            yield pair

    with pytest.raises(
        signals.Interrupted, match=r"Interrupted; saved at step 24. Resume with: coadjoint resume"
    ):
        begun("gru", learner, folder, stream=until(23))
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    again = begun("gru", learner, folder, resume=True)
    assert again.so_far == straight.so_far
    assert whole(folder) == whole(tmp_path / "one")


def test_a_signal_that_also_ends_the_stream_does_not_end_the_run(tmp_path):
    def cut():
        yield from pairs(*data(47))[:20]
        os.kill(os.getpid(), signal.SIGINT)

    begun("gru", "truncated", tmp_path / "one")
    with pytest.raises(signals.Interrupted, match="saved at step 20"):
        begun("gru", "truncated", tmp_path / "two", stream=cut())
    begun("gru", "truncated", tmp_path / "two", resume=True)
    assert whole(tmp_path / "one") == whole(tmp_path / "two")


def test_steps_in_two_parts_are_those_in_one(tmp_path):
    for learner in LEARNERS:
        begun("elman", learner, tmp_path / f"{learner} one", steps=40)
        begun("elman", learner, tmp_path / f"{learner} two", steps=25)
        found = begun("elman", learner, tmp_path / f"{learner} two", steps=40, resume=True)
        assert found.step == 40
        one, two = (
            storage.load(storage.list_checkpoints(tmp_path / f"{learner} {n}")[-1])
            for n in ("one", "two")
        )
        assert all(torch.equal(v, two.model[name]) for name, v in one.model.items())
        assert all(
            torch.equal(v, two.tensors[name])
            for name, v in one.tensors.items()
            if "figures" not in name
        )
        assert one.state["updates"] == two.state["updates"]


def test_a_run_that_does_not_fit_is_not_resumed(tmp_path):
    with pytest.raises(Crash):
        begun("elman", "rtrl", tmp_path / "run", stop=25)
    with pytest.raises(co.StorageError, match="description of the run"):
        begun("elman", "rtrl", tmp_path / "run", resume=True, description={"other": 1})
    with pytest.raises(
        co.DataError, match="has taken 20 items from its stream, but the stream ends after 7"
    ):
        begun("elman", "rtrl", tmp_path / "run", resume=True, stream=pairs(*data(7)))
    with pytest.raises(co.StorageError, match="already holds a run"):
        begun("elman", "rtrl", tmp_path / "run")


def file_run(folder, path="d.csv", score=None, **options):
    torch.manual_seed(2)
    kinds = {"target": "y", "features": ["a", "b"]} | {
        k: options.pop(k) for k in ("kind", "target", "features", "classes") if k in options
    }
    stream = online.read(path, dtype=F64, **kinds)
    net = co.Network(
        "gru",
        inputs=stream.inputs,
        hidden=D,
        outputs=stream.outputs,
        readout="every",
        output=stream.output,
        dtype=F64,
    )
    return online.learn(net, stream, score=score, folder=folder, **GO, **options)


@pytest.mark.parametrize(
    "kinds",
    [{}, {"target": "state"}, {"kind": "next", "target": None, "features": ["a", "b", "y"]}],
    ids=["regress", "classify", "next"],
)
def test_a_stream_from_a_file_is_resumed_bit_for_bit(kinds, here):
    file_run(here / "one", **kinds)
    file_run(here / "two", steps=33, **kinds)
    file_run(here / "two", resume=True, **kinds)
    ours, truth = ((here / n / "model.safetensors").read_bytes() for n in ("two", "one"))
    assert ours == truth
    ours, truth = (
        json.loads((here / n / "result.json").read_text())["metrics"] for n in ("two", "one")
    )
    assert ours == truth


def test_a_file_that_has_changed_is_refused_and_one_that_has_grown_is_not(here):
    file_run(here / "run", steps=33)
    good = (here / "d.csv").read_text()
    (here / "d.csv").write_text(good.replace("\n7,", "\n7,9"))
    with pytest.raises(
        co.StorageError, match="its first 33 rows differ from those that this run has learned from"
    ):
        file_run(here / "run", resume=True)
    (here / "d.csv").write_text("\n".join(good.split()[:20]))
    with pytest.raises(co.StorageError, match="its first 33 rows differ from those"):
        file_run(here / "run", resume=True)
    (here / "d.csv").write_text(good + "60,1,2,3,up\n61,3,2,1,up\n")
    assert file_run(here / "run", resume=True).step == 62


def test_a_bad_row_is_refused_saved_before_and_gone_on_with_when_it_is_mended(here):
    file_run(here / "one")
    lines = CSV.split()
    (here / "d.csv").write_text("\n".join([*lines[:38], "37,x,1,1,up", *lines[39:]]))
    with pytest.raises(
        co.DataError,
        match=r"d.csv:39 column 'a': \"x\" is not a number.* saved at step 37. Resume with:",
    ):
        file_run(here / "two")
    (here / "d.csv").write_text(CSV)
    file_run(here / "two", resume=True)
    assert (here / "two/model.safetensors").read_bytes() == (
        here / "one/model.safetensors"
    ).read_bytes()


KILLED = """
import os, signal, sys, torch, coadjoint as co
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1:3]
import test_online
scored = []
def score(a):
    scored.append(a)
    if len(scored) > 44:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"x": 0.0}
test_online.file_run(test_online.Path("two"), score=score)
"""


def test_a_killed_process_is_resumed_bit_for_bit(here):
    file_run(here / "one", score=lambda a: {"x": 0.0})
    done = warm.run("-c", KILLED, SUPPORT, Path(__file__).parent, cwd=here)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert storage.list_checkpoints(here / "two")[-1].name == "step-00000040"
    file_run(here / "two", score=lambda a: {"x": 0.0}, resume=True)
    assert whole(here / "one") == whole(here / "two")


# the command line


@pytest.fixture
def coadjoint(coadjoint, here):
    return coadjoint


SMALL = [
    "--hidden",
    "4",
    "--every",
    "20",
    "--window",
    "30",
    "--checkpoint",
    "20",
    "--precision",
    "64",
]


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "y", "--features", "a,b"],
        [
            "--target",
            "state",
            "--features",
            "a,b",
            "--k1",
            "3",
            "--k2",
            "7",
            "--cell",
            "gru",
            "--optimiser",
            "sgd",
        ],
        [
            "--kind",
            "next",
            "--features",
            "a,b,y",
            "--learner",
            "rtrl",
            "--cell",
            "lstm",
            "--clip",
            "1",
        ],
    ],
    ids=["regress", "classify", "next"],
)
def test_the_command_learns_resumes_and_leaves_a_model(words, here, coadjoint):
    code, out, err = coadjoint("online", "d.csv", *words, *SMALL, "--out", "one")
    steps = 59 if "next" in words else 60
    assert (code, err) == (0, "")
    assert f"the stream ended at step {steps}" in out
    assert "last 30 steps: loss" in out
    files = {p.name for p in (here / "one").iterdir()}
    assert {
        "model.safetensors",
        "metrics.jsonl",
        "result.json",
        "config.yaml",
        "online.json",
        "report.html",
    } <= files
    rows = [json.loads(line) for line in (here / "one/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["kind"] == "train"] == [20, 40, steps]
    code, out, _ = coadjoint(
        "online", "d.csv", *words, *SMALL, "--out", "two", "--steps", "31", "--quiet"
    )
    assert (code, out) == (0, "")
    code, out, _ = coadjoint("resume", "two", "--steps", "1000")
    assert code == 0
    assert f"the stream ended at step {steps}" in out
    first, second = (
        storage.unpack((here / n / "model.safetensors").read_bytes(), here) for n in ("one", "two")
    )
    assert all(torch.equal(v, second[name]) for name, v in first.items())
    code, out, _ = coadjoint("resume", "one")
    assert code == 0
    assert "one has already ended" in out
    code, out, _ = coadjoint("predict", "one", "d.csv")
    assert code == 0, out
    assert "rows of 1 sequence -> predictions.csv" in out
    assert len((here / "predictions.csv").read_text().splitlines()) == 61


def test_a_stream_can_be_piped_in(here, coadjoint, monkeypatch):
    def pipe():
        return monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CSV.encode())))

    words = ["--target", "state", "--features", "a,b", "--classes", "up,down", *SMALL, "-q"]
    assert coadjoint("online", "d.csv", *words, "--out", "one")[0] == 0
    pipe()
    assert coadjoint("online", "-", *words, "--out", "two", "--steps", "25")[0] == 0
    pipe()
    assert coadjoint("resume", "two", "--steps", "60", "-q")[0] == 0
    first, second = (
        storage.unpack((here / n / "model.safetensors").read_bytes(), here) for n in ("one", "two")
    )
    assert all(torch.equal(v, second[name]) for name, v in first.items())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.csv", "--target", "y"], 3, "none.csv does not exist"),
        (["d.csv"], 3, "there is no column called target, label or class"),
        (["d.csv", "--target", "yy"], 3, "there is no column 'yy' for --target. Did you mean 'y'?"),
        (["d.csv", "--target", "y"], 3, "d.csv:2 column 'state': \"down\" is not a number"),
        (["d.csv", "--target", "y", "--learner", "bptt"], 2,
            "unknown learner 'bptt'. Known: rtrl, truncated"),
        (["d.csv", "--target", "y", "--config", "b.toml"], 2,
            "--learner must be rtrl or truncated; got 'bptt'"),
        (["d.csv", "--target", "y", "--learner", "truncated"], 2, "--learner truncated needs --k1"),
        (["d.csv", "--target", "y", "--learner", "rtrl", "--k1", "3"], 2,
            "--k1 and --k2 apply to --learner truncated"),
        (["d.csv", "--target", "y", "--k1", "3", "--k2", "2"], 2, "1 <= k1 <= k2"),
        (["d.csv", "--target", "y", "--hidden", "0"], 2, "--hidden: must be a positive"),
        (["d.csv", "--target", "y", "--cell", "elm"], 2, "did you mean 'elman'?"),
        (["d.csv", "--target", "y", "--lr", "-1"], 2, "--lr: must be"),
        (["d.csv", "--target", "y", "--schedule", "cosine"], 2, "needs the number of steps"),
        (["d.csv", "--target", "y", "--optimiser", "lbfgs"], 2, "sees each step once"),
        (["d.csv", "--target", "y", "--window", "0"], 2, "Invalid value for '--window'"),
        (["d.csv", "--target", "y", "--skip"], 2,
            "real-time recurrent learning does not support skip=True"),
        (["d.csv", "--target", "y", "--batch", "3"], 2, "No such option: --batch"),
        (["d.csv", "--target", "y", "--config", "c.toml"], 2,
            "--batch has no effect when learning from a stream"),
        (["d.csv", "--target", "y", "--missing", "mask"], 2,
            "--missing must be refuse or ffill for a stream"),
    ],
)  # fmt: skip
def test_wrong_words_get_one_line_and_leave_nothing(words, code, said, here, coadjoint):
    (here / "c.toml").write_text("[training]\nbatch = 3\n")
    (here / "b.toml").write_text('[gradient]\nmethod = "bptt"\n')
    before = {p.name for p in here.iterdir()}
    features = [] if "column 'state'" in said else ["--features", "a,b"]
    got, out, err = coadjoint("online", *words, *features, "--out", "run", "--quiet")
    assert (got, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1
    assert {p.name for p in here.iterdir()} == before


def test_a_folder_that_holds_a_run_is_refused(here, coadjoint):
    words = ["online", "d.csv", "--target", "y", "--features", "a,b", *SMALL, "--out", "run", "-q"]
    assert coadjoint(*words)[0] == 0
    before = whole(here / "run")
    code, _, err = coadjoint(*words)
    assert code == 4
    assert "already holds a run. Resume it with: coadjoint resume run" in err
    assert whole(here / "run") == before


def test_scale_is_that_of_all_rows_before():
    values = np.random.default_rng(0).normal(size=(500, 3)) * [1e-3, 1, 1e6] + [0, 1e4, -1e6]
    scale = scaling.RunningScale(3, True)
    for x in values:
        scale.add(x)
    assert np.allclose(scale.mean, values.mean(0), rtol=1e-12)
    assert np.allclose(scale.std, values.std(0), rtol=1e-9)


def test_a_stream_without_a_step_is_refused(coadjoint, here):
    (here / "one.csv").write_text("a,b\n1,2\n")
    code, _, err = coadjoint("online", "one.csv", "--kind", "next", "--out", "r")
    assert (code, err.count("\n")) == (3, 1)
    assert "too few rows to learn from" in err
    assert not (here / "r" / "model.safetensors").exists()
    (here / "one.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    assert coadjoint("resume", "r")[0] == 0
    assert (here / "r" / "model.safetensors").exists()
