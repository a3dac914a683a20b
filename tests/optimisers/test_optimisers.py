"""Every optimiser, direction and step rule minimises three problems, and survives a resume.

The problems are a convex quadratic, Rosenbrock's function and a small network.
"""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import coadjoint as co
from coadjoint.optimisers.curvature import Packing
from coadjoint.optimisers.directions import temporal
from coadjoint.optimisers.hessian_free import HessianFree
from coadjoint.optimisers.recipes import OPTIMISERS, optimiser, recipe_of
from coadjoint.optimisers.schedules import SCHEDULES
from coadjoint.optimisers.step_rules import STEP_RULES, Armijo, Constant, Galvan, Wolfe
from coadjoint.optimisers.steppers import Point
from coadjoint.training import loop

F64 = torch.float64


class Residuals(nn.Module):
    """f(theta) = |r(theta)|^2 / 2, and its Gauss-Newton products as co.curvature gives them."""

    def __init__(self, start):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start, dtype=F64))

    def value(self):
        return self.r(self.theta).square().sum() / 2

    @property
    def parameters_by_name(self):
        return dict(self.named_parameters())

    @property
    def packing(self):
        return Packing.of(self.parameters_by_name)

    def product(self, v, outputs=1.0, states=0.0):
        J = torch.func.jacrev(self.r)(self.theta.detach())
        return outputs * (J.T @ (J @ v))

    def diagonal(self, seed=0):
        return torch.func.jacrev(self.r)(self.theta.detach()).square().sum(0)


class Quadratic(Residuals):
    """Axes of very different lengths, turned."""

    def __init__(self):
        super().__init__([1.0, -2.0, 0.5, 1.5, -1.0])
        turn = torch.linalg.qr(
            torch.randn(5, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
        )[0]
        self.A = torch.logspace(-0.75, 0.75, 5, dtype=F64)[:, None] * turn

    def r(self, theta):
        return self.A @ theta


class Rosenbrock(Residuals):
    """(1 - x)^2 / 2 + 100 (y - x^2)^2 / 2"""

    def __init__(self):
        super().__init__([-1.2, 1.0])

    def r(self, theta):
        x, y = theta
        return torch.stack([1 - x, 10 * (y - x * x)])


def evaluated(problem):
    value = problem.value()
    return float(value.detach()), {"theta": torch.autograd.grad(value, problem.theta)[0]}


def descend(problem, recipe, steps):
    """Steps as training takes them; the last value."""
    stepper = recipe.stepper(problem)
    for k in range(steps):
        value, gradient = evaluated(problem)
        rate = recipe.lr * recipe.schedule(k, steps)
        at = Point(
            problem,
            value,
            gradient,
            gradient,
            lambda: float(problem.value().detach()),
            lambda: evaluated(problem),
        )
        stepper.step(at, rate)
    return float(problem.value().detach())


# optimiser, options, step rule: step size and steps on the quadratic, on Rosenbrock's function;
# what is left of the first
# value at most
TABLE = [
    ("sgd", {}, Constant(), (0.03, 400), (4e-3, 2500), 1e-2),
    ("sgd", {}, Galvan(1.0), (0.1, 800), (5e-3, 2000), 0.06),
    ("sgd", {}, Armijo(), (1.0, 200), (1.0, 1500), 1e-2),
    ("sgd", {}, Wolfe(), (1.0, 200), (1.0, 800), 1e-2),
    ("momentum", {}, Constant(), (0.03, 300), (2e-3, 1500), 1e-3),
    ("nesterov", {}, Constant(), (0.03, 300), (2e-3, 1500), 1e-3),
    ("nesterov", {}, Armijo(), (0.03, 300), (2e-3, 1500), 1e-3),
    ("adagrad", {}, Constant(), (0.5, 400), (0.5, 2000), 1e-2),
    ("adadelta", {"eps": 1e-3}, Constant(), (0.3, 400), (0.1, 2000), 0.1),
    ("rmsprop", {}, Constant(), (0.01, 500), (3e-3, 2500), 1e-2),
    ("adam", {}, Constant(), (0.05, 400), (0.02, 1500), 1e-3),
    ("adam", {}, Armijo(), (0.05, 400), (0.05, 1500), 1e-2),
    ("adamw", {"weight_decay": 0.0}, Constant(), (0.05, 400), (0.02, 1500), 1e-3),
    ("adamax", {}, Constant(), (0.1, 600), (0.05, 2000), 1e-2),
    ("nadam", {}, Constant(), (0.05, 400), (0.02, 1500), 1e-3),
    ("radam", {}, Constant(), (0.05, 500), (0.01, 2000), 1e-2),
    ("lbfgs", {}, Constant(), (1.0, 2), (1.0, 4), 1e-10),
    ("lbfgs", {"max_iter": 1, "history_size": 5}, Constant(), (1.0, 60), (1.0, 100), 1e-10),
]
PROBLEMS = {"quadratic": Quadratic, "rosenbrock": Rosenbrock}


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    "row",
    TABLE,
    ids=lambda row: f"{row[0]}-{type(row[2]).__name__.lower()}{'-options' if row[1] else ''}",
)
@pytest.mark.sampled(2)
def test_a_function_falls(row, problem):
    name, options, rule, on_quadratic, on_rosenbrock, left = row
    lr, steps = on_quadratic if problem == "quadratic" else on_rosenbrock
    p = PROBLEMS[problem]()
    first = float(p.value().detach())
    assert descend(p, optimiser(name, lr, rule=rule, **options), steps) <= left * first


def test_the_table_has_every_optimiser():
    assert {row[0] for row in TABLE} == set(OPTIMISERS) - {"hessian-free", "ridge"}
    assert {type(row[2]) for row in TABLE} == set(STEP_RULES.values())


def newton(problem, hf, steps):
    problem.parameters = problem.parameters_by_name  # as a Curvature has them
    for _ in range(steps):
        value, gradient = evaluated(problem)
        taken = hf.minimise(problem, gradient, value, lambda: float(problem.value().detach()))
    return taken, float(problem.value().detach())


def test_hessian_free_solves_a_quadratic_in_one_step():
    taken, left = newton(
        Quadratic(), HessianFree(damping=1e-14, structural=0.0, cg=50, progress=0.0), 1
    )
    assert taken.rate == 1
    assert left < 1e-20 * taken.before


def test_hessian_free_minimises_rosenbrocks_function():
    assert newton(Rosenbrock(), HessianFree(damping=0.1, structural=0.0, cg=10), 60)[1] < 1e-8


# a network


class Recall(co.tasks.task.Task):
    """The first of a few numbers, from one batch that is always the same."""

    name, inputs, outputs = "recall", 1, 1

    def batch(self, step, size, seed):
        u = torch.rand(6, size, 1, dtype=F64, generator=torch.Generator().manual_seed(1))
        return co.Batch(u, u[0])

    def held_out(self, split, seed, draw=0, n=1000):
        yield self.batch(0, 20, 0)

    def score(self, a, batch):
        return {}


def network(radius=0.7):
    net = co.Network("elman", inputs=1, hidden=7, outputs=1, dtype=F64)
    return co.initialisers.initialise(net, "spectral", seed=3, radius=radius, std=0.5) or net


def trained(**arguments):
    net = network()
    steps = arguments.pop("steps", 60)
    return co.train(
        net, Recall(), batch=20, steps=steps, every=10**6, tests=1, probes=2, **arguments
    )


RUNS = {
    "sgd": optimiser("sgd", 0.1),
    "sgd temporal": optimiser("sgd", 0.1, direction="temporal"),
    "sgd temporal galvan": optimiser("sgd", 0.1, direction="temporal", rule=Galvan(0.5)),
    "sgd armijo": optimiser("sgd", 1.0, rule=Armijo()),
    "sgd wolfe": optimiser("sgd", 1.0, rule=Wolfe()),
    "nesterov inverse-time": optimiser("nesterov", 0.03, SCHEDULES["inverse-time"](0.01)),
    "adam": optimiser("adam", 0.01),
    "adam temporal armijo": optimiser("adam", 0.01, direction="temporal", rule=Armijo()),
    "lbfgs": optimiser("lbfgs", max_iter=3),
    "hessian-free": optimiser("hessian-free", damping=0.1, cg=20, curvature=11),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_network_learns(name):
    result = trained(optimiser=RUNS[name], steps=20 if name in ("lbfgs", "hessian-free") else 60)
    losses = [row["loss"] for row in result.rows if row["kind"] == "train"]
    assert losses[-1] < 0.75 * losses[0]


def test_a_penalised_objective_is_searched_and_its_curvature_is_that_of_the_loss():
    for recipe in (
        optimiser("sgd", 1.0, rule=Wolfe()),
        optimiser("hessian-free", cg=10),
        optimiser("lbfgs"),
    ):
        rows = trained(gradient=co.Penalised("log-ratio", 0.3), optimiser=recipe, steps=6).rows
        whole = [row["loss"] + 0.3 * row["penalty"] for row in rows if row["kind"] == "train"]
        assert whole == sorted(whole, reverse=True)
        assert whole[-1] < whole[0]


def weights(folder, kind="checkpoints"):
    return (sorted((folder / kind).iterdir())[-1] / "model.safetensors").read_bytes()


GOES_ON = {
    **RUNS,
    "clip mean": optimiser("sgd", 0.1),
    "weight noise": optimiser("momentum", 0.05),
    "ridge": optimiser("ridge"),
}
MORE = {"clip mean": {"clip_mean": 0.9}, "weight noise": {"weight_noise": 0.05}}


@pytest.mark.parametrize("name", GOES_ON)
@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(name, tmp_path):
    """Ten steps at once, and four and then the rest: the same bytes."""
    more = {"batch": 20, "every": 5, "tests": 1, "probes": 2, "checkpoint": 4, **MORE.get(name, {})}
    run = functools.partial(co.train, task=Recall(), optimiser=GOES_ON[name], **more)
    run(network(), folder=tmp_path / "whole", steps=10)
    run(network(), folder=tmp_path / "parts", steps=4)
    run(network(), folder=tmp_path / "parts", steps=10, resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


def test_clipping_bounds_the_step():
    def one(**more):
        return [
            r for r in trained(optimiser=optimiser("sgd", 0.1), **more).rows if r["kind"] == "train"
        ]

    plain = one(steps=30)
    norms = [row["gradient"] for row in plain]
    assert not any("clipped" in row for row in plain)

    def moved(**more):
        """The change of the weights in the first step, by 0.1."""
        net, before = network(), network()
        co.train(
            net,
            Recall(),
            batch=20,
            steps=1,
            tests=1,
            probes=2,
            optimiser=optimiser("sgd", 0.1),
            **more,
        )
        before = dict(before.named_parameters())
        return {n: (before[n] - p).detach() / 0.1 for n, p in net.named_parameters()}

    g = co.BPTT()(network(), Recall().batch(0, 20, 0), "squared").gradient
    for name, cut in moved(clip_value=0.05).items():
        assert torch.allclose(cut, g[name].clamp(-0.05, 0.05), atol=1e-14)
    length = math.sqrt(sum(float(v.square().sum()) for v in moved(clip=norms[0] / 3).values()))
    assert length == pytest.approx(norms[0] / 3, rel=1e-10)
    # the threshold follows the mean of norms, which an oracle computes again
    rows, mean = one(clip_mean=0.05, steps=30), 0.0
    for k, row in enumerate(rows):
        bound = 0.05 * mean if k else math.inf
        assert row.get("clipped", False) == (row["gradient"] > bound)
        mean += ((min(row["gradient"], 10 * mean) if k else row["gradient"]) - mean) / min(
            k + 1, 100
        )
    assert any("clipped" in row for row in rows)
    assert (
        mean > 0.9 * sum(row["gradient"] for row in rows) / 30
    )  # what is cut off counts: the threshold does not fall with it


def test_weight_noise_is_on_the_gradient_alone():
    std, net, clean = 0.3, network(), network()
    co.train(
        net,
        Recall(),
        batch=20,
        steps=1,
        tests=1,
        probes=2,
        weight_noise=std,
        optimiser=optimiser("sgd", 0.1),
    )
    draw = co.tasks.rng(0, "weight-noise", 0)
    noisy = network()
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.from_numpy(draw.standard_normal(p.shape)), alpha=std)
    g = co.BPTT()(noisy, Recall().batch(0, 20, 0), "squared").gradient
    for name, p in clean.named_parameters():
        assert torch.allclose(
            dict(net.named_parameters())[name], p - 0.1 * g[name], rtol=1e-12, atol=1e-14
        )


def test_budgets_end_a_run(monkeypatch):
    def spent(**more):
        return trained(optimiser=optimiser("sgd", 0.01), steps=10**6, **more)

    assert spent(gradients=101).step == 6  # of 20 sequences
    assert spent(gradients=101, gradient=co.Penalised("log-ratio")).step == 3
    monkeypatch.setattr(
        loop.Training, "elapsed", lambda run: 0.125 * run.step
    )  # a clock that ticks with the steps
    timed = spent(seconds=0.3)
    assert (timed.step, timed.seconds, timed.work) == (3, 0.375, 60)
    both = spent(seconds=0.3, gradients=40)  # both are used up
    assert (both.step, both.work) == (3, 60)
    both = spent(seconds=0.3, gradients=101)
    assert (both.step, both.work) == (6, 120)


def test_step_sizes_that_are_not_given_have_defaults():
    """1 for those that find their own pace, 1e-3 for all others."""
    own = {name: optimiser(name).lr for name in ("lbfgs", "hessian-free", "ridge")}
    assert set(own.values()) == {1.0}
    assert {optimiser(name).lr for name in OPTIMISERS if name not in own} == {1e-3}


def test_the_distance_to_the_gradient_is_kept(tmp_path):
    rows = trained(optimiser=RUNS["sgd temporal"], steps=5).rows
    far = [row["distance"] for row in rows if row["kind"] == "train"]
    assert len(far) == 5
    assert all(0 < d < 2 for d in far)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optimiser("lbfgs", rule=Armijo()), "chooses its own step"),
        (lambda: optimiser("hessian-free", direction="temporal"), "chooses its own step"),
        (lambda: optimiser("sgd", direction="sideways"), "direction"),
        (lambda: optimiser("sgd", rule="armijo"), "step rule"),
        (lambda: optimiser("hessian-free", damping=-1.0).stepper(network()), "damping"),
        (lambda: optimiser("hessian-free").make([]), "not one of torch's"),
        (lambda: trained(optimiser=optimiser("lbfgs"), clip=1.0), "so clipping has no effect"),
        (lambda: trained(clip_mean=0.0), "clip_mean must be"),
        (lambda: trained(seconds=-1.0), "seconds must be"),
        (lambda: trained(weight_noise=math.nan), "weight_noise must be"),
        (lambda: SCHEDULES["inverse-time"](-1.0), "decay must be"),
        (
            lambda: SCHEDULES["constant"](warmup=-1),
            "warmup must be a whole number, at least 0; got -1",
        ),
        (lambda: optimiser("hessian-free", curvature=0.5), "curvature must be a number"),
        (lambda: optimiser("sgd", rule=Armijo), "step rule"),
        (
            lambda: Armijo(shrink=2.0),
            "shrink must be a finite number, above 0 and below 1; got 2.0",
        ),
        (lambda: Wolfe(c1=0.9, c2=0.1), "c1 < c2"),
        (lambda: trained(optimiser="adam"), "optimiser must be like co.optimisers"),
        (
            lambda: recipe_of("adam"),
            r"optimiser must be like co\.optimisers\.adam\(1e-3\); got 'adam'",
        ),
        (lambda: trained(easiest=(0.5, 10)), "easiest must be like co.training.curriculum"),
        (lambda: trained(clip="1"), "clip must be"),
        (
            lambda: trained(optimiser=RUNS["hessian-free"], weight_noise=0.1),
            "leave out weight_noise",
        ),
    ],
)
def test_bad_optimisers_are_refused(make, words):
    with pytest.raises(co.CoadjointError, match=words):
        make()


def test_the_temporal_direction_sees_a_fading_past():
    """In float32, where the components of the first steps lie far below its range: finite, and the
    first step has its say.
    """
    task = co.tasks.make("temporal-order", length=300)
    net = co.Network(
        "elman", inputs=task.inputs, hidden=16, outputs=task.outputs, output=task.output
    )
    co.initialisers.initialise(net, "spectral", radius=0.4, seed=0)
    double = co.Network(
        "elman", inputs=task.inputs, hidden=16, outputs=task.outputs, output=task.output, dtype=F64
    )
    double.load_state_dict({name: p.double() for name, p in net.state_dict().items()})
    batch = task.batch(0, 5, 0)
    found = []
    for one in (net, double):
        e = co.BPTT()(one, batch.to(one.V.dtype, "cpu"), task.loss)
        found.append(temporal(e, np.random.default_rng(1)))
    assert float(torch.as_tensor(e.temporal_components().norms()["joint"][0])) < 1e-60
    for name, d in found[0].items():
        assert torch.isfinite(d).all()
        assert torch.allclose(
            d.double(), found[1][name], rtol=1e-3, atol=1e-5 * float(found[1][name].abs().max())
        ), name


def test_the_temporal_direction_takes_no_penalty():
    net, batch = network(), Recall().batch(0, 20, 0)
    for method in (co.Penalised("log-ratio", 0.1), co.Penalised("log-ratio", 0.1, pretrain=5)):
        with pytest.raises(co.Unsupported, match="not of a penalty"):
            temporal(method(net, batch, "squared"), np.random.default_rng(0))
    with pytest.raises(co.InputError, match="not Truncated"):
        trained(optimiser=RUNS["sgd temporal"], gradient=co.Truncated(2, 3))


def test_a_budget_that_is_spent_stays_spent(tmp_path):
    run = functools.partial(
        co.train, task=Recall(), batch=20, tests=1, probes=2, gradients=100, folder=tmp_path / "r"
    )
    assert run(network()).step == 5
    before = weights(tmp_path / "r")
    assert run(network(), resume=True).step == 5
    assert weights(tmp_path / "r") == before


def test_steps_that_are_refused_spend_their_budget():
    net = network()
    with torch.no_grad():
        net.V.fill_(1e200)
    run = co.train(
        net, Recall(), batch=20, steps=1000, tests=1, probes=2, gradients=100, nonfinite="skip"
    )
    assert run.step == run.skipped == 5


WORK = [  # gradients of a sequence for each sequence, T = 6
    (co.BPTT(), {}, 1.0),
    (co.BPTT(2), {}, 1.5),
    (co.Penalised("log-ratio"), {}, 2.0),
    (co.Penalised("omega-published"), {}, 1.5),
    (co.Truncated(2, 3), {}, 1.0),  # one answer: one window of three steps
    (co.BPTT(), {"optimiser": RUNS["sgd temporal"]}, 1.5),
]


@pytest.mark.parametrize(("method", "more", "work"), WORK)
def test_the_work_of_a_gradient_is_counted(method, more, work):
    more = {"optimiser": optimiser("sgd", 0.01), **more}
    assert trained(gradient=method, steps=3, **more).work == pytest.approx(3 * 20 * work)


def test_the_work_of_hessian_free_is_counted(monkeypatch):
    """A gradient and values of the batch; a run and products of the curvature, the first step's
    without a start.
    """
    from coadjoint.optimisers import curvature

    products = []
    plain = curvature.Curvature.product
    monkeypatch.setattr(
        curvature.Curvature, "product", lambda *given: products.append(1) or plain(*given)
    )
    values = []
    method = co.BPTT()
    value = method.value
    method.value = lambda *given: values.append(1) or value(*given)
    run = trained(gradient=method, steps=3, optimiser=optimiser("hessian-free", cg=4, curvature=11))
    assert run.work == 3 * 20 + 10 * len(values) + 11 * (len(products) + 1.5)


def test_a_refused_step_gives_its_random_numbers_back():
    net = co.Network("elman", inputs=1, hidden=7, outputs=1, dropout=0.5, dtype=F64)
    with torch.no_grad():
        net.V.fill_(1e200)
    co.train(net, Recall(), batch=20, steps=3, tests=1, probes=2, nonfinite="skip", seed=5)
    now = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(now, torch.get_rng_state())


@pytest.mark.parametrize(
    "recipe", [optimiser("sgd", 0.05), optimiser("sgd", 1.0, rule=Wolfe())], ids=["plain", "wolfe"]
)
def test_a_steered_weight_follows_where_steps_begin(recipe):
    """However often a step is evaluated, and in however many parts."""

    def rho(**more):
        return [
            row["rho"]
            for row in trained(
                gradient=co.Penalised("log-ratio", co.penalties.Steered(0.1, 0.2, gain=0.5)),
                optimiser=recipe,
                steps=2,
                **more,
            ).rows
            if row["kind"] == "train"
        ]

    once = co.Penalised("log-ratio", co.penalties.Steered(0.1, 0.2, gain=0.5))
    once(network(), Recall().batch(0, 20, 0), "squared")
    assert rho()[1] == once(network(), Recall().batch(0, 20, 0), "squared").rho != 0.1
