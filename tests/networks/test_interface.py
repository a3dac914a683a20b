"""Everything that takes a network takes a class that implements the interface and nothing more.

The class here is a chain x_{i+1} = tanh(A_i x_i + c_i), i = 0..L-1, a = A_L x_L + c_L: layers of
different widths, indexed by depth. The package knows nothing about it. Gradients and penalties are
compared with torch's double backward in float64.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import coadjoint as co
import oracles
from build import weights
from coadjoint.networks.interface import Net, NetRun
from coadjoint.networks.readout import Readout
from coadjoint.objectives.losses import entry_losses, output_function
from coadjoint.optimisers.recipes import OPTIMISERS
from coadjoint.sweeps.costates import Axis, BaseCostates, stack_padded
from coadjoint.sweeps.rows import scale
from coadjoint.sweeps.torch_internals import has_hooks
from coadjoint.tasks.task import Task, count_right, rng
from compare import equal

F64 = torch.float64
WIDTHS = (5, 7, 4, 6, 3)
DEPTH = Axis("i", "layer i", "layer", "layer", "layer", "through depth", "towards the input")


class Chain(Net):
    """Dense layers of any widths."""

    readout, output, sample_axis = "last", "softmax", 0

    def __init__(self, widths=WIDTHS, output="softmax", seed=0, gain=1.0, dtype=F64):
        super().__init__()
        torch.manual_seed(seed)
        self.inputs, self.outputs, self.output = widths[0], widths[-1], output
        self.maps = nn.ModuleList(
            nn.Linear(n, m, dtype=dtype) for n, m in itertools.pairwise(widths)
        )
        with torch.no_grad():
            for f in self.maps:
                f.weight.mul_(gain)

    def run(self, batch):
        x = [batch.u.detach().requires_grad_() if torch.is_grad_enabled() else batch.u]
        for f in self.maps[:-1]:
            x.append(torch.tanh(f(x[-1])))
        return ChainRun(self, batch, x, self.maps[-1](x[-1]))


@dataclass(eq=False)
class ChainRun:
    network: Chain
    batch: co.Batch
    states: list[torch.Tensor]
    a: torch.Tensor

    def loss(self, loss, y=None, *, mask=None, reduce="sum"):
        values = entry_losses(loss, self.a, y, self.network.output)
        return values if mask is None else values * mask

    def costates(self, loss, y=None, *, mask=None, reduce="sum"):
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            run = self if self.a.requires_grad else self.network.run(self.batch)
            value = run.loss(loss, y, mask=mask)
            g = torch.autograd.grad(
                value.sum(), run.states[-1], create_graph=again, retain_graph=True
            )[0]
            found, powers = [], []
            for i in reversed(range(len(run.states))):
                k = torch.frexp(g.detach().abs().amax(1)).exponent
                found.insert(0, scale(g, -k[:, None]))
                powers.insert(0, k + powers[0] if powers else k)
                if i > 0:
                    g = run.pull(i, found[0], again)
        found = found if again else [m.detach() for m in found]
        return ChainCostates(run, found, torch.stack(powers), value if again else value.detach())

    def pull(self, i, bar, again=True):
        """J_i' bar"""
        x = self.states
        return torch.autograd.grad(x[i], x[i - 1], bar, create_graph=again, retain_graph=True)[0]

    @property
    def u(self):
        return self.batch.u

    def push(self, du):
        """DF(u) . du"""
        net = self.network

        def say(u):
            for f in net.maps[:-1]:
                u = torch.tanh(f(u))
            return output_function(net.output)(net.maps[-1](u))

        return torch.func.jvp(say, (self.batch.u,), (du,))[1]

    def components(self, e):
        return Layerwise(e.gradient)


@dataclass
class Layerwise:
    """The gradient of a chain is by layers already."""

    gradient: dict[str, torch.Tensor]

    def norms(self):
        squares = [self.gradient[f"maps.{i}.weight"].square().sum() for i in range(len(WIDTHS) - 1)]
        return {"joint": torch.stack(squares).sqrt()}


class ChainCostates(BaseCostates):
    axis = DEPTH

    def __init__(self, trajectory, mantissas, exponents, loss):
        self.trajectory, self.mantissas, self.exponents, self.loss = (
            trajectory,
            mantissas,
            exponents,
            loss,
        )

    @property
    def exponent(self):
        return self.exponents

    def mantissa_at(self, i):
        return self.mantissas[i]

    def detach(self):
        return ChainCostates(
            self.trajectory,
            [m.detach() for m in self.mantissas],
            self.exponents,
            self.loss.detach(),
        )

    def pull_mantissas(self):
        return stack_padded(
            [self.trajectory.pull(i, m) for i, m in enumerate(self.mantissas) if i > 0]
        )

    def pull_directions(self, w):
        pulled = []
        for i, w_i in enumerate(w, 1):
            n = self.trajectory.states[i].shape[1]
            pulled.append(self.trajectory.pull(i, w_i[:, :n]))
        return stack_padded(pulled)


class Blobs(Task):
    """Three clouds of points."""

    shape = (5,)  # of one sample, which has no time
    name, inputs, outputs, output, loss, metric, lower = (
        "blobs",
        5,
        3,
        "softmax",
        "cross-entropy",
        "accuracy",
        False,
    )

    def drawn(self, n, seed, *keys):
        draw = rng(seed, *keys)
        y = draw.integers(3, size=n)
        u = draw.standard_normal((n, 5)) + 2 * np.eye(5)[y]
        return co.Batch(torch.from_numpy(u), torch.from_numpy(y), axis=0)

    def batch(self, step, size, seed):
        return self.drawn(size, seed, "train", step)

    def held_out(self, split, seed, draw=0, n=1000):
        yield self.drawn(n, seed, split, draw)

    def score(self, a, batch):
        return {"accuracy": count_right(a.argmax(-1) == batch.y)}


def batch(B=6, seed=0, **more):
    return replace(Blobs().batch(seed, B, 0), **more)


class Truth:
    """The same network by torch alone: losses, costates and any function of them, differentiated
    twice.
    """

    def __init__(self, net, u, y):
        self.x, self.parameters = [u.clone().requires_grad_()], dict(net.named_parameters())
        for f in net.maps[:-1]:
            self.x.append(torch.tanh(self.x[-1] @ f.weight.T + f.bias))
        a = self.x[-1] @ net.maps[-1].weight.T + net.maps[-1].bias
        self.y_hat = torch.softmax(a, 1)
        self.losses = -torch.log(self.y_hat[torch.arange(len(y)), y])
        self.lam = torch.autograd.grad(self.losses.sum(), self.x, create_graph=True)

    def norms(self, p=2, lam=None):
        return torch.stack([m.norm(p, dim=1) for m in lam or self.lam])

    def gradient(self, values):
        grads = torch.autograd.grad(
            values.mean(), list(self.parameters.values()), allow_unused=True
        )
        return {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(self.parameters.items(), grads, strict=True)
        }


def deviation(n):
    return (n - n.mean(0)).square().mean(0)


def omega(t):
    pairs = zip(t.x, t.x[1:], t.lam[1:], strict=False)
    back = [
        torch.autograd.grad(after, before, lam, create_graph=True)[0]
        for before, after, lam in pairs
    ]
    r = t.norms(lam=back).square() / t.norms()[1:].square()
    return (r - 1).square().mean(0)


def omega_norms(t):
    pairs = zip(t.x, t.x[1:], t.lam[1:], strict=False)
    back = [
        torch.autograd.grad(after, before, lam, create_graph=True)[0]
        for before, after, lam in pairs
    ]
    return (t.norms(lam=back) / t.norms()[1:] - 1).square().sum(0)


def output_variance(t):
    each = [torch.autograd.grad(t.y_hat[:, k].sum(), t.x, create_graph=True) for k in range(3)]
    return torch.stack([deviation(t.norms(lam=lam)[1:]) for lam in each]).mean(0)


def isometry(t):
    logs = []
    for i, (before, after) in enumerate(itertools.pairwise(t.x), 1):
        r = [oracles.drawn_signs(after.shape[1], i, j) for j in range(len(after))]
        (back,) = torch.autograd.grad(after, before, torch.tensor(r, dtype=F64), create_graph=True)
        logs.append(back.norm(dim=1).log() - math.log(after.shape[1]) / 2)
    return torch.stack(logs).square().mean(0)


def tangent(t):
    v = [oracles.drawn_signs(t.x[0].shape[1], 1, j) for j in range(len(t.x[0]))]
    along = [
        torch.autograd.grad(t.y_hat[:, k].sum(), t.x[0], create_graph=True)[0] for k in range(3)
    ]
    return sum((g * torch.tensor(v, dtype=F64)).sum(1).square() for g in along) / 2


PENALTIES = {
    "squared-norm": lambda t: t.norms()[1:].square().mean(0),
    "variance": lambda t: deviation(t.norms()[1:]),
    "variance-l1": lambda t: deviation(t.norms(1)[1:]),
    "log-ratio": lambda t: t.norms()[1:].log().diff(dim=0).square().mean(0),
    "ratio": lambda t: (t.norms()[1:-1] / t.norms()[2:] - 1).square().mean(0),
    "log-variance": lambda t: deviation(t.norms()[1:].log()),
    "end-points": lambda t: (t.norms()[1] - t.norms()[-1]).square(),
    "share-variance": lambda t: (t.norms()[1:] / t.norms()[1:].sum(0) - 1 / 3).square().sum(0),
    "barrier": lambda t: (t.lam[-1].abs() / 1e-5).log().clamp(max=0).square().sum(1),
    "omega": omega,
    "omega-norms": omega_norms,
    "isometry": isometry,
    "tangent": tangent,
    "norm-stabiliser": lambda t: (
        torch.stack([x.norm(dim=1) for x in t.x]).diff(dim=0).square().mean(0)
    ),
    "output-variance": output_variance,
}


def close(ours, truth, tolerance=1e-12):
    assert ours.keys() == truth.keys()
    size = max(float(g.abs().max()) for g in truth.values())
    for name, g in truth.items():
        assert float((ours[name] - g).abs().max()) <= tolerance * size, name


# gradients


def test_backpropagation_is_torchs():
    net, b = Chain(), batch()
    e = co.BPTT()(net, b, "cross-entropy")
    truth = Truth(net, b.u, b.y)
    close(e.gradient, truth.gradient(truth.losses))
    assert torch.allclose(e.losses, truth.losses, rtol=1e-13)
    assert [list(e.costates.at(i).shape) for i in range(4)] == [[6, n] for n in WIDTHS[:-1]]
    for i, lam in enumerate(truth.lam):
        assert torch.allclose(e.costates.at(i), lam, rtol=1e-12)
    assert torch.allclose(e.costates.log_norms(), truth.norms().log(), rtol=1e-12)
    assert not e.costates.at(0).requires_grad


@pytest.mark.parametrize("name", sorted(co.penalties.PENALTIES.keys() - {"omega-published"}))
def test_every_penalty_is_differentiated_as_torch_does(name):
    net, b = Chain(), batch()
    e = co.Penalised(name, 0.7)(net, b, "cross-entropy")
    truth = Truth(net, b.u, b.y)
    G = PENALTIES[name](truth)
    assert torch.allclose(e.penalties, G, rtol=1e-12)
    close(e.gradient, truth.gradient(truth.losses + 0.7 * G))


def test_the_tangent_loss_is_differentiated_as_torch_does():
    net, b = Chain(), batch()
    v = torch.randn(6, 5, dtype=F64)
    e = co.Penalised(co.penalties.tangent(v), 0.3)(net, b, "cross-entropy")
    truth = Truth(net, b.u, b.y)
    along = [
        torch.autograd.grad(truth.y_hat[:, k].sum(), truth.x[0], create_graph=True)[0]
        for k in range(3)
    ]
    G = torch.stack([(g * v).sum(1) for g in along], 1).square().sum(1) / 2
    close(e.gradient, truth.gradient(truth.losses + 0.3 * G))


def test_sums_pretraining_and_steered_weights_work():
    net, b = Chain(), batch()
    truth = Truth(net, b.u, b.y)
    both = 0.5 * co.penalties.log_ratio + co.penalties.variance
    G = 0.5 * PENALTIES["log-ratio"](truth) + PENALTIES["variance"](truth)
    close(
        co.Penalised(both, 2.0, pretrain=1)(net, b, "cross-entropy").gradient,
        truth.gradient(2.0 * G),
    )
    steered = co.Penalised("log-ratio", co.penalties.Steered(0.1, target=1e-4))
    steered(net, b, "cross-entropy")
    assert steered(net, b, "cross-entropy").rho == pytest.approx(0.1 * math.exp(0.01))


def test_a_deep_chain_that_forgets_keeps_its_digits_in_float32():
    """Costates fall below float32's range; their log-ratios are those of float64."""
    widths = (5, *(4, 6) * 60, 3)
    found = {}
    for dtype in (torch.float32, F64):
        net = Chain(widths, gain=0.2).to(dtype)
        lam = co.Penalised("log-ratio", 1.0)(
            net, batch().to(dtype, "cpu"), "cross-entropy"
        ).costates
        found[dtype] = lam.log_norms()
    assert found[F64].min() < math.log(torch.finfo(torch.float32).tiny)
    assert torch.allclose(found[torch.float32], found[F64], atol=1e-4)


def test_gradients_of_single_samples_average_to_the_weighted_one():
    net, b = Chain(), batch(weight=torch.linspace(0.5, 2.0, 6, dtype=F64))
    for method in (co.BPTT(), co.Penalised("log-ratio", 0.3)):
        each = method.per_sample(net, b, "cross-entropy")
        close({n: g.mean(0) for n, g in each.items()}, method(net, b, "cross-entropy").gradient)


def test_samples_along_the_first_axis_are_chosen():
    b = batch(weight=torch.arange(6.0), mask=torch.ones(6))
    chosen = b.select([4, 1])
    for name in ("u", "y", "weight", "mask"):
        assert torch.equal(getattr(chosen, name), getattr(b, name)[[4, 1]])
    assert (chosen.axis, len(b.sizes), len(chosen.sizes)) == (0, 6, 2)
    with pytest.raises(co.InputError, match="axis is that of the samples in u, 0 or 1; got 2"):
        co.Batch(b.u, axis=2)


REFUSED = {
    "truncated": (lambda n, b: co.Truncated(2, 4)(n, b, "cross-entropy"),
        "truncated backpropagation: this network is not"),
    "rtrl": (lambda n, b: co.RTRL()(n, b, "cross-entropy"),
        "one step at a time: this network is not one recurrent layer"),
    "stream": (lambda n, b: co.RTRL().stream(n),
        "one step at a time: this network is not one recurrent layer"),
    "segments": (lambda n, b: co.BPTT(segments=2)(n, b, "cross-entropy"),
        "sweeps in segments: this network is not"),
    "penalised": (lambda n, b: co.Penalised("variance", 1.0, 2)(n, b, "cross-entropy"),
        "sweeps in segments: this network"),
    "omega-published": (lambda n, b: co.Penalised("omega-published")(n, b, "cross-entropy"),
        "differentiates with respect to one W shared by all steps"),
    "curvature": (lambda n, b: co.curvature.Curvature(n, b, "cross-entropy"),
        "curvature is that of a co.Network or a co.Chain; got Chain"),
    "ridge": (lambda n, b: co.optimisers.ridge().stepper(n), "this network has no linear readout"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_take_it_refuse_in_one_line(name):
    call, said = REFUSED[name]
    with pytest.raises(co.Unsupported, match=said) as caught:
        call(Chain(), batch())
    assert "\n" not in str(caught.value)


def test_a_recurrent_network_refuses_samples_along_the_first_axis():
    net = co.Network("elman", inputs=5, hidden=4, outputs=3, dtype=F64)
    with pytest.raises(
        co.InputError,
        match=r"reads sequences \[T, B, inputs\], .* along axis 1; got a batch with axis=0",
    ):
        co.BPTT()(net, batch(), "cross-entropy")


# diagnostics


def test_decay_is_by_layer():
    net, b = Chain(), batch()
    e = co.BPTT()(net, b, "cross-entropy")
    found = co.diagnostics.decay(e)
    truth = Truth(net, b.u, b.y).norms().log().detach().numpy()
    assert found.log_norms == pytest.approx(truth.mean(1), rel=1e-12)
    assert (found.chart().title, found.chart().x) == ("Costates through depth", "layer i")
    assert [f.name for f in found.figures()] == ["costates, towards the input"]


def test_components_are_the_runs_own_where_it_has_them():
    e = co.BPTT()(Chain(), batch(), "cross-entropy")
    norms = e.components().norms()["joint"]
    assert norms.tolist() == pytest.approx(
        [float(e.gradient[f"maps.{i}.weight"].norm()) for i in range(4)]
    )
    net, b, loss = recurrent("network")
    e = co.BPTT()(net, b, loss)
    assert torch.equal(e.components().norms()["joint"], e.temporal_components().norms()["joint"])


def test_an_examination_holds_what_applies_and_says_why_not_of_the_rest():
    found = co.diagnostics.examine(co.BPTT()(Chain(), batch(), "cross-entropy"))
    assert set(found.found) == {"decay", "noise", "along", "landscape"}
    assert set(found.declined) == set(co.diagnostics.DIAGNOSTICS) - set(found.found)
    assert all("\n" not in why for why in found.declined.values())


# training


def train(net=None, **options):
    quick = {
        "steps": 9,
        "batch": 8,
        "every": 3,
        "tests": 50,
        "confirm": 50,
        "probes": 8,
        "checkpoint": 4,
    }
    return co.train(net or Chain(), Blobs(), **(quick | {"stop_on_success": False} | options))


TAKEN = sorted(OPTIMISERS.keys() - {"hessian-free", "ridge"})


@pytest.mark.parametrize("name", TAKEN)
def test_optimisers_step_it(name):
    # L-BFGS goes to the minimum of a batch: it gets a large one, a few times
    options = {"steps": 3, "batch": 400} if name == "lbfgs" else {"steps": 30}
    lr = 1.0 if name in ("lbfgs", "adadelta") else 0.05
    result = train(optimiser=co.optimisers.optimiser(name, lr), every=30, **options)
    losses = [r["loss"] for r in result.rows if r["kind"] == "train"]
    few = len(losses) // 3
    assert np.mean(losses[-few:]) < np.mean(losses[:few])


class Stop:
    """A display that interrupts the run at its fifth step."""

    def step(self, step, row):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    def validation(self, step, rows): ...
    def say(self, text): ...
    def close(self): ...


@pytest.mark.parametrize(
    "gradient", [co.BPTT, lambda: co.Penalised("log-ratio", 0.1)], ids=["plain", "penalised"]
)
def test_an_interrupted_run_is_resumed_bit_for_bit(tmp_path, gradient):
    whole = train(folder=tmp_path / "whole", gradient=gradient())
    with pytest.raises(co.Interrupted, match="saved at step 5"):
        train(folder=tmp_path / "cut", gradient=gradient(), display=Stop())
    again = train(folder=tmp_path / "cut", gradient=gradient(), resume=True)
    assert equal(weights(whole.network), weights(again.network))
    rows = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert rows[0] == rows[1]
    assert whole.metrics == again.metrics


def test_the_report_is_by_layer(tmp_path):
    result = train(folder=tmp_path / "run")
    probes = [r for r in result.rows if r["kind"] == "probe"]
    assert [r["axis"] for r in probes] == ["layer i"] * len(probes)
    assert [len(r["log10_costates"]) for r in probes] == [4] * len(probes)
    assert probes[0]["temporal"] is not None
    assert probes[0]["radius"] is None
    page = co.report.write(tmp_path / "run").read_text(encoding="utf-8")
    assert "reaches each layer" in page
    assert "each time step" not in page
    assert "Costates through depth" in page
    assert "through time" not in page
    said = json.loads((tmp_path / "run" / "result.json").read_text())["examples"]
    assert said
    assert all(
        "note" not in one for one in said
    )  # a recurrent network's says how many steps there were


def test_a_number_that_is_not_finite_is_found_by_layer():
    net = Chain()
    with torch.no_grad():
        net.maps[1].bias[2] = math.nan
    with pytest.raises(
        co.NumericalError, match="the first non-finite state is that of sample 0 at layer 2"
    ):
        train(net)


# the interface itself


def test_a_network_without_a_required_member_is_refused():
    class Half(Net):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Half()
    assert issubclass(co.Network, Readout)
    assert issubclass(co.Stack, Readout)
    assert issubclass(co.EncoderDecoder, Net)
    assert not issubclass(co.EncoderDecoder, Readout)
    with pytest.raises(
        co.KindError,
        match=r"the network must be a co\.Network, co\.Stack, co\.EncoderDecoder or co\.Chain",
    ):
        co.BPTT()(nn.Linear(2, 2), batch(), "squared")


def recurrent(kind):
    sizes = {"inputs": 5, "hidden": 4, "outputs": 3, "dtype": F64}
    u = torch.randn(7, 2, 5, dtype=F64)
    if kind == "translation":
        return (
            co.EncoderDecoder("gru", **sizes),
            co.Batch(u, torch.tensor([[0, 1], [2, 2]])),
            "cross-entropy",
        )
    net = co.Network("lstm", **sizes) if kind == "network" else co.Stack(["gru", "elman"], **sizes)
    return net, co.Batch(u, torch.randn(2, 3, dtype=F64)), "squared"


@pytest.mark.parametrize("kind", ["network", "stack", "translation"])
def test_a_run_has_the_members_of_the_interface(kind):
    net, b, _ = recurrent(kind)
    run: NetRun = net.run(b)
    assert run.network is net
    assert len(run.lengths) == 2
    assert tuple(run.states.shape[:2]) == (8, 2)
    assert run.a.shape[-1] == 3


@pytest.mark.parametrize("kind", ["network", "stack", "translation"])
@pytest.mark.parametrize(
    "method", [co.BPTT, lambda: co.Penalised("log-ratio", 0.1)], ids=["plain", "penalised"]
)
def test_hooks_fire_once_for_each_run(kind, method):
    net, b, loss = recurrent(kind)
    seen = []
    handles = [
        net.register_forward_pre_hook(lambda module, given: seen.append("before")),
        net.register_forward_hook(lambda module, given, run: seen.append(type(run).__name__)),
    ]
    e = method()(net, b, loss)
    assert seen == ["before", type(e.trajectory).__name__]
    for handle in handles:
        handle.remove()
    assert not has_hooks(net)


def test_without_hooks_a_run_does_not_pass_through_torchs_call(monkeypatch):
    net, b, loss = recurrent("network")
    monkeypatch.setattr(co.Network, "__call__", lambda *given: pytest.fail("called"))
    co.Penalised("log-ratio", 0.1)(net, b, loss)


def test_a_module_around_a_network_is_called_as_itself():
    net, b, loss = recurrent("network")

    class Around(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *given):
            self.calls += 1
            return self.module(*given)

    around = Around(net)
    for method in (co.BPTT(), co.Penalised("log-ratio", 0.1)):
        found = method(around, b, loss).gradient
        close(
            {n.removeprefix("module."): g for n, g in found.items()},
            method(net, b, loss).gradient,
            0,
        )
    assert around.calls == 2


# runs and weights of recurrences


def test_a_part_of_a_run_is_read_and_not_swept_again():
    net, b, loss = recurrent("stack")
    whole = net.run(b).costates(loss, b.y).joined().trajectory.run
    assert tuple(whole.x.shape) == (16, 8)
    assert whole.formula is None
    calls = (
        lambda: whole.push(None),
        lambda: whole.costate(None, None, None),
        lambda: whole.jacobians(None, 1),
        whole.with_checks,
    )
    for call in calls:
        with pytest.raises(co.Unsupported, match="this run shows only a part of its state"):
            call()


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_costates_by_number_are_those_by_time(engine):
    net = co.Network("lstm", inputs=5, hidden=4, outputs=3, dtype=F64, engine=engine)
    lam = net.run(co.Batch(torch.randn(7, 2, 5, dtype=F64), lengths=[7, 4])).costates(
        lambda y_hat: y_hat.sum(1)
    )
    assert all(torch.equal(lam.at(t), lam.lam[t]) for t in range(8))
    assert torch.equal(lam.last, torch.tensor([7, 4]))
    assert torch.equal(lam.last_mantissa(), torch.stack([lam.mantissa[7, 0], lam.mantissa[4, 1]]))
    assert lam.layers == (lam,)
    assert lam.forwards() is lam


@pytest.mark.parametrize("cell", ["elman", "lstm", "scrn", "lru"])
def test_pulling_back_the_readout_input_is_its_transpose(cell):
    net = co.Network(cell, inputs=2, hidden=3, outputs=1, dtype=F64)
    x, bar = torch.randn(4, net.n, dtype=F64), torch.randn(4, net.visible_width, dtype=F64)
    assert torch.allclose(
        (net.visible_state(x) * bar).sum(), (x * net.visible_state_transpose(bar)).sum(), rtol=1e-14
    )


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "elman", "masked": True},
        {"cell": "scrn"},
        {"cell": "antisymmetric"},
        {"cell": "gru"},
    ],
)
def test_effective_weights_make_the_step(options):
    """x_1 from the weights as the formula takes them, by torch's operations, is that of
    the sweep.
    """
    masked = options.pop("masked", False)
    mask = torch.tensor([[1.0, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=F64) if masked else None
    net = co.Network(**options, inputs=2, hidden=3, outputs=1, dtype=F64, mask=mask)
    u = torch.randn(1, 4, 2, dtype=F64)
    taken, x0 = net.effective_weights(), torch.randn(4, net.n, dtype=F64)
    drive = [u[0] @ part[0].T + part[1] for part in taken.input_weights if part is not None]
    assert torch.allclose(taken.step_function()(*drive, x0), net(u, x0=x0).x[1], rtol=1e-12)
    assert torch.allclose(net.advance(u[0], x0), net(u, x0=x0).x[1], rtol=1e-12)
    if masked:
        assert torch.equal(taken.W, net.W * mask)
    assert taken.x0 is net.x0
