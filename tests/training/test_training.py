"""The training loop records what it computes, and only finite numbers enter the weights."""

import functools
import json
import math
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import build
import coadjoint as co
from build import weights
from coadjoint.cli import program
from coadjoint.errors import CoadjointError, InputError, KindError, NumericalError
from coadjoint.optimisers import directions
from coadjoint.optimisers.recipes import OPTIMISERS
from coadjoint.optimisers.schedules import constant, cosine, exponential, linear, plateau
from coadjoint.tasks.task import Goal
from coadjoint.training import display, json_rows, loop, plan, storage, trainer, validation
from compare import equal

F64 = torch.float64
QUICK = {"batch": 4, "every": 5, "tests": 8, "confirm": 8, "probes": 4}


network = functools.partial(build.network, "elman", inputs=6, hidden=5, outputs=4, output="softmax")


def train(net=None, task=None, **options):
    return co.train(
        net or network(), task or co.tasks.TemporalOrder(10), **(QUICK | {"steps": 10} | options)
    )


def rows(result, kind):
    return [r for r in result.rows if r["kind"] == kind]


class Constant(co.tasks.Task):
    """Every batch is the same: y = the mean of the inputs' signs, so that a loss must fall.

    Its held-out losses are given.
    """

    name, inputs, outputs, splits = "constant", 2, 1, ("valid",)

    def __init__(self, losses=None, lower=True, goal=None):
        self.losses, self.lower, self.goal = losses, lower, goal
        self.metric = "given" if losses else "loss"
        g = torch.Generator().manual_seed(3)
        self.u, self.size = torch.randn(6, 24, 2, generator=g, dtype=F64), 24
        self.y = self.u[:, :, 0].mean(0)[:, None]
        self.looks = 0

    def batch(self, step, size, seed):
        k = (step * size) % 24
        return co.Batch(self.u[:, k : k + size], self.y[k : k + size])

    def held_out(self, split, seed, draw=0, n=1000):
        yield co.Batch(self.u[:, :n], self.y[:n])

    def score(self, a, batch):
        if not self.losses:
            return {}
        self.looks += 1
        return {"given": (self.losses[min(self.looks, len(self.losses)) - 1], 1.0)}


def regression(seed=0, **options):
    return network(seed, inputs=2, outputs=1, output="identity", **options)


# optimisers and schedules


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_lowers_the_loss(name):
    lr = {
        "sgd": 0.05,
        "momentum": 0.01,
        "nesterov": 0.01,
        "adagrad": 0.05,
        "adadelta": 1.0,
        "radam": 0.05,
    }.get(name, 0.01)
    result = train(
        regression(),
        Constant(),
        steps=60,
        batch=24,
        optimiser=co.optimisers.optimiser(name, lr),
        every=60,
    )
    losses = [r["loss"] for r in rows(result, "train")]
    assert losses[-1] < 0.7 * losses[0]


SCHEDULES = {
    "constant": (constant(), lambda s, n: 1.0),
    "exponential": (exponential(0.9), lambda s, n: 0.9**s),
    "linear": (linear(0.1), lambda s, n: 1 - 0.9 * s / n),
    "cosine": (cosine(0.2), lambda s, n: 0.2 + 0.4 * (1 + math.cos(math.pi * s / n))),
    "warm constant": (constant(warmup=4), lambda s, n: min(1, (s + 1) / 4)),
    "warm linear": (linear(warmup=3), lambda s, n: min(1, (s + 1) / 3) * (1 - s / n)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_step_size_follows_its_schedule_and_is_what_the_optimiser_used(name):
    schedule, formula = SCHEDULES[name]
    net = network()
    before, seen = weights(net), []

    class Watch(display.Silent):
        def step(self, step, row):
            seen.append(weights(net))

    result = train(
        net,
        optimiser=co.optimisers.sgd(0.5, schedule=schedule),
        display=Watch(),
        stop_on_success=False,
    )
    found = rows(result, "train")
    assert [r["rate"] for r in found] == pytest.approx(
        [0.5 * formula(s, 10) for s in range(10)], rel=1e-15
    )
    for row, after in zip(found, seen, strict=True):  # |theta' - theta| = rate |g|
        moved = math.sqrt(sum(float((after[k] - before[k]).square().sum()) for k in after))
        assert moved == pytest.approx(row["rate"] * row["gradient"], rel=1e-9)
        before = after


def test_a_plateau_lowers_the_step_size_when_its_patience_ends(monkeypatch):
    losses = iter(
        [9.0, 5.0, 6.0, 5.0, 4.0, 4.5, 4.6, 4.7, 4.8]
    )  # at step 0 and after each of 8 looks
    look = validation.evaluate
    monkeypatch.setattr(validation, "evaluate", lambda *a: look(*a) | {"loss": next(losses, 1.0)})
    recipe = co.optimisers.sgd(0.1, schedule=plateau(decay=0.5, patience=2))
    result = train(steps=9, every=1, optimiser=recipe, stop_on_success=False)
    expected = [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert [r["rate"] for r in rows(result, "train")] == pytest.approx([0.1 * f for f in expected])


@pytest.mark.parametrize("clip", [1e-3, 0.3, 1e6])
def test_clipping_shortens_a_step_to_the_norm_it_allows(clip):
    net = network()
    before = weights(net)
    result = train(net, steps=1, clip=clip, optimiser=co.optimisers.sgd(1.0), every=1, tests=2)
    row = rows(result, "train")[0]
    moved = math.sqrt(
        sum(float((p.detach() - before[k]).square().sum()) for k, p in net.named_parameters())
    )
    assert moved == pytest.approx(min(clip, row["gradient"]), rel=1e-9)
    assert row.get("clipped", False) == (row["gradient"] > clip)


# accumulation, penalties


@pytest.mark.parametrize(
    "method", [co.BPTT(), co.Penalised("log-ratio", 0.7)], ids=["bptt", "penalised"]
)
@pytest.mark.parametrize(("k", "size"), [(2, 12), (3, 8), (5, 5)])
def test_k_batches_are_one_batch_of_k_times_the_size(method, k, size):
    """Also where the last batch is smaller: means over samples, not over batches."""
    ours = network_and_rows(method, k, size)
    truth = network_and_rows(method, 1, 24)
    for name in truth[0]:
        torch.testing.assert_close(ours[0][name], truth[0][name], rtol=1e-11, atol=1e-13)
    for key in ("loss", "penalty", "gradient"):
        assert ours[1][key] == pytest.approx(truth[1][key], rel=1e-11)


def network_and_rows(method, k, size):
    net = regression()
    task = Constant()
    result = train(
        net,
        task,
        steps=1,
        batch=size,
        accumulate=k,
        gradient=method,
        optimiser=co.optimisers.sgd(0.1),
        every=1,
    )
    return weights(net), rows(result, "train")[0]


@pytest.mark.parametrize("penalty", ["log-ratio", "isometry", "tangent"])
def test_the_weight_of_the_penalty_follows_the_step_across_a_resume(tmp_path, penalty):
    """And so do the directions that a penalty draws."""
    schedule = co.penalties.exponential(2.0, 0.8)
    options = {
        "gradient": co.Penalised(penalty, schedule),
        "steps": 9,
        "stop_on_success": False,
        "optimiser": co.optimisers.adam(),
    }
    whole = train(folder=tmp_path / "whole", **options)
    assert [r["rho"] for r in rows(whole, "train")] == [schedule(s) for s in range(9)]

    class Stop(display.Silent):
        def step(self, step, row):
            if step == 4:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(co.Interrupted):
        train(folder=tmp_path / "run", display=Stop(), **options)
    again = train(
        folder=tmp_path / "run",
        resume=True,
        **options | {"gradient": co.Penalised(penalty, schedule)},
    )
    assert again.rows == whole.rows
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()
    assert equal(weights(again.network), weights(whole.network))


# when it ends


@pytest.mark.parametrize("lower", [True, False])
def test_early_stopping_keeps_the_best_weights(lower):
    given = [9, 3, 2, 4, 5, 6, 1]  # step 0, then each look; the third look is never beaten within 3
    given = given if lower else [-v for v in given]
    net, seen = regression(), {}

    class Watch(display.Silent):
        def validation(self, step, rows):
            seen[step] = weights(net)

    task = Constant(given, lower)
    result = train(net, task, steps=100, every=2, patience=3, display=Watch())
    assert (result.status, result.step, result.best_step) == ("early-stopped", 10, 4)
    assert equal(weights(result.network), seen[4])
    assert not equal(seen[4], seen[10])


def test_without_patience_the_best_weights_are_chosen_all_the_same():
    task = Constant([9, 3, 2, 4, 5, 6, 7])
    result = train(regression(), task, steps=10, every=2)
    assert (result.status, result.step, result.best_step) == ("finished", 10, 4)


@pytest.mark.parametrize(("confirmed", "step"), [([], 4), ([0.9], 6)])
def test_success_must_be_confirmed_on_more_sequences(monkeypatch, confirmed, step):
    """right is 1 from step 4 on; the first confirmation may fail."""
    look, asked = validation.evaluate, []

    def scripted(net, task, split, seed=0, draw=0, n=1000, *more):
        found = look(net, task, split, seed, draw, 4, *more)
        asked.append((draw, n))
        if str(draw).startswith("confirm"):
            return found | {"right": confirmed.pop(0) if confirmed else 1.0}
        return found | {"right": 1.0 if draw != "final" and draw >= 4 else 0.5}

    monkeypatch.setattr(validation, "evaluate", scripted)
    result = train(steps=20, every=2, tests=8, confirm=50)
    assert (result.status, result.success, result.success_step, result.step) == (
        "success",
        True,
        step,
        step,
    )
    assert ("confirm 4", 50) in asked
    assert next(r["right"] for r in rows(result, "held-out") if r["step"] == 4) == 1.0
    assert sum(r["step"] == step for r in rows(result, "held-out")) == 2


def test_a_run_may_continue_after_its_success():
    task = Constant([9, 0.5, 0.4, 0.3, 0.2], goal=Goal("given", 1.0, most=True))
    result = train(regression(), task, steps=8, every=2, stop_on_success=False)
    assert (result.status, result.step, result.success, result.success_step) == (
        "finished",
        8,
        True,
        2,
    )
    assert train(regression(), Constant([9, 0.5], goal=task.goal), steps=8, every=2).step == 2


# what is not finite


class Poison(co.BPTT):
    """A gradient that is not finite at chosen steps."""

    def __init__(self, *at, name="W", value=math.nan):
        self.at, self.name, self.value, self.step = at, name, value, 0

    def evaluate(self, net, batch, loss):
        e = super().evaluate(net, batch, loss)
        if self.step + 1 not in self.at:
            return e
        bad = e.gradient[self.name].clone()
        bad.view(-1)[-1] = self.value
        return replace(e, gradient=e.gradient | {self.name: bad})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_stop_leaves_everything_as_it_was_before_the_step(tmp_path, value):
    good, net = train(steps=3, stop_on_success=False).network, network()
    optimiser = co.optimisers.adam()
    with pytest.raises(NumericalError) as caught:
        train(
            net,
            gradient=Poison(4, value=value),
            folder=tmp_path / "run",
            optimiser=optimiser,
            stop_on_success=False,
        )
    text = str(caught.value)
    assert text.startswith(
        "step 4: the gradient of W is not finite; states and costates are finite at every time step"
    )
    assert f"coadjoint replay {tmp_path / 'run'}" in text
    assert "The weights are those from before this step." in text
    assert equal(weights(net), last_weights(steps=3))
    assert good is not net
    last = storage.load(storage.list_checkpoints(tmp_path / "run")[-1])
    assert last.step == 3
    assert equal({k: last.model[k] for k in weights(net)}, weights(net))
    replayed = storage.load(storage.list_checkpoints(tmp_path / "run", "replay")[-1])
    assert (replayed.step, equal(replayed.model, last.model)) == (3, True)
    assert "the gradient of W" in replayed.state["reason"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["step"]) == ("failed", 3)
    logged = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [r["step"] for r in logged if r["kind"] == "train"] == [1, 2, 3]


def last_weights(**options):
    """The weights after the last step, not the best ones."""
    net, seen = network(), []

    class Watch(display.Silent):
        def step(self, step, row):
            seen.append(weights(net))

    train(net, display=Watch(), stop_on_success=False, **options)
    return seen[-1]


def test_a_stopped_run_can_be_resumed_when_the_cause_is_gone(tmp_path):
    whole = train(folder=tmp_path / "whole", stop_on_success=False)
    with pytest.raises(NumericalError):
        train(folder=tmp_path / "run", gradient=Poison(4), stop_on_success=False)
    again = train(folder=tmp_path / "run", resume=True, stop_on_success=False)
    assert again.rows == whole.rows
    assert equal(weights(again.network), weights(whole.network))


@pytest.mark.parametrize("policy", ["skip", "dump"])
def test_skipped_steps_change_nothing_and_are_said(tmp_path, policy):
    net, seen, said = network(), {}, []

    class Watch(display.Silent):
        def step(self, step, row):
            seen[step] = weights(net)

        def say(self, text):
            said.append((text, weights(net)))

    result = train(
        net,
        gradient=Poison(4, 6),
        nonfinite=policy,
        folder=tmp_path / "run",
        display=Watch(),
        stop_on_success=False,
    )
    assert (result.status, result.step) == ("finished", 10)
    assert sorted(seen) == [1, 2, 3, 5, 7, 8, 9, 10]
    assert [text.split(":")[0] for text, _ in said] == ["step 4", "step 6"]
    assert equal(said[0][1], seen[3])
    assert equal(said[1][1], seen[5])
    skipped = [r for r in rows(result, "train") if "skipped" in r]
    assert [r["step"] for r in skipped] == [4, 6]
    assert all("the gradient of W is not finite" in r["skipped"] for r in skipped)
    replays = [p.name for p in storage.list_checkpoints(tmp_path / "run", "replay")]
    assert replays == ([storage.folder_name(3), storage.folder_name(5)] if policy == "dump" else [])
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped"] == 2


def test_the_replay_holds_the_bad_batch_of_several(monkeypatch):
    looked = []
    monkeypatch.setattr(validation, "locate_nonfinite", lambda e: looked.append(e) or "")

    class First(Poison):
        count = 0

        def evaluate(self, net, batch, loss):
            self.step, self.count = 0, self.count + 1
            self.at = (1,) if self.count == 1 else ()
            return super().evaluate(net, batch, loss)

    with pytest.raises(NumericalError):
        train(gradient=First(), accumulate=3)
    assert not torch.isfinite(looked[0].gradient["W"]).all()


def exploding():
    net = network(hidden=3, activation="identity", dtype=torch.float32)
    with torch.no_grad():
        net.W.copy_(1e6 * torch.eye(3))
    return net


@pytest.mark.parametrize("policy", plan.NONFINITE_POLICIES)
def test_a_network_that_really_explodes_is_stopped_or_skipped(tmp_path, policy):
    net = exploding()
    before = weights(net)
    task = co.tasks.TemporalOrder(20)
    if policy == "stop":
        with pytest.raises(
            NumericalError,
            match=r"^step 1: the state is outside the range of float32 at t = 8 of 20",
        ):
            train(net, task, folder=tmp_path / "run")
    else:
        result = train(net, task, folder=tmp_path / "run", nonfinite=policy, steps=3)
        assert [("skipped" in r) for r in rows(result, "train")] == [True] * 3
        assert "outside the range of float32" in rows(result, "probe")[0]["fault"]
    assert equal(weights(net), before)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_a_replay_shows_the_failure_again(tmp_path, monkeypatch, capsys):
    """Through the command line: a linear network whose W is a million times an orthogonal one."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["coadjoint", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            program.main()
        return end.value.code or 0, "".join(capsys.readouterr())

    words = (
        "temporal-order --length 20 --hidden 4 --activation identity --init orthogonal "
        "--radius 1e6 --steps 5 --batch 2 --tests 4 --confirm 4"
    )
    code, output = command("train", *words.split(), "--out", tmp_path / "run")
    assert code == 5, output
    assert "step 1: " in output
    fault = output[output.index("step 1: ") :].split(". Replay it with")[0]
    code, again = command("replay", tmp_path / "run")
    assert code == 5
    assert fault.split(";")[0].rstrip(".") in again
    code, output = command("replay", tmp_path)
    assert code == 4


@pytest.mark.parametrize("policy", plan.NONFINITE_POLICIES)
def test_a_step_size_that_throws_the_weights_out_of_range_is_noticed(tmp_path, policy):
    net = network(dtype=torch.float32)
    before = weights(net)
    with pytest.raises(
        NumericalError,
        match=r"^step 1: .*W.* not finite after the optimiser's step: lower the step size",
    ):
        train(
            net,
            optimiser=co.optimisers.sgd(1e30),
            gradient=Poison(1, value=1e10),
            folder=tmp_path / "run",
            nonfinite=policy,
        )
    assert equal(weights(net), before)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


# rows are what was computed


def test_train_rows_are_what_they_say():
    net, task, seen = (
        network(),
        co.tasks.TemporalOrder((10, 14), ragged=True),
        {0: weights(network())},
    )

    class Watch(display.Silent):
        def step(self, step, row):
            seen[step] = weights(net)

    method = co.Penalised("variance", 0.3)
    result = train(net, task, gradient=method, display=Watch(), seed=5, stop_on_success=False)
    for row in rows(result, "train")[::3]:
        other = network()
        other.load_state_dict(seen[row["step"] - 1])
        e = co.Penalised("variance", 0.3)(
            other, task.batch(row["step"] - 1, 4, 5).to(F64, "cpu"), "cross-entropy"
        )
        assert row["loss"] == float(e.loss)
        assert row["penalty"] == float(e.penalty)
        assert row["gradient"] == pytest.approx(e.norm, rel=1e-14)
        assert row["rho"] == 0.3


def test_held_out_rows_are_what_they_say():
    net, task, seen = network(), co.tasks.TemporalOrder(10), {}

    class Watch(display.Silent):
        def validation(self, step, rows):
            seen[step] = weights(net)

    result = train(net, task, display=Watch(), tests=37, confirm=37, stop_on_success=False)
    assert [r["step"] for r in rows(result, "held-out")] == [0, 5, 10]
    for row in rows(result, "held-out"):
        other = network()
        other.load_state_dict(seen[row["step"]])
        (b,) = task.held_out("test", 0, row["step"], 37)
        logits = other(b.u.to(F64)).a.detach()
        assert row["sequences"] == 37
        assert row["loss"] == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, b.y)), rel=1e-12
        )
        assert row["right"] == pytest.approx(
            float((logits.argmax(1) == b.y).double().mean()), rel=1e-12
        )


def test_probes_agree_with_direct_computation():
    net, task = network(), co.tasks.TemporalOrder(10)
    row = rows(train(network(), task, steps=1, every=1), "probe")[0]
    (b,) = task.held_out("test", 0, "probe", 4)
    run = net(b.u.to(F64))
    lam = run.costates("cross-entropy", b.y).lam.detach()
    norms = lam.norm(dim=-1)
    assert row["t"] == list(range(11))
    assert row["log10_costates"] == pytest.approx(norms.log10().mean(1).tolist(), rel=1e-10)
    assert row["decay"] == pytest.approx(float((norms[0] / norms[-1]).log10().mean()), rel=1e-10)
    assert row["radius"] == pytest.approx(
        float(torch.linalg.eigvals(net.W.detach()).abs().max()), rel=1e-12
    )
    loss = torch.nn.functional.cross_entropy(run.a, b.y)
    names = [name for name, _ in net.named_parameters()]
    for name, g in zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True):
        assert row["gradients"][name] == pytest.approx(float(g.norm()), rel=1e-10)
    x, u = run.x.detach(), b.u.to(F64)
    delta = lam[1:] / 4 * (1 - x[1:] ** 2)  # tanh, and the mean over 4 samples
    for t in range(1, 11):
        parts = (delta[t - 1].T @ x[t - 1], delta[t - 1].T @ u[t - 1], delta[t - 1].sum(0))
        joint = math.sqrt(sum(float(p.square().sum()) for p in parts))
        assert row["temporal"][t - 1] == pytest.approx(math.log10(joint), rel=1e-9)
    assert len(row["temporal"]) == 10


def test_rows_on_disk_are_the_rows_of_the_result(tmp_path):
    logged = []
    result = train(folder=tmp_path / "run", loggers=[logged.append])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json_rows.dumps(result.rows))
    assert logged == result.rows


def test_the_rows_of_a_run_with_a_folder_stay_on_the_disk(tmp_path, monkeypatch):
    """Nothing grows with the number of steps; the result reads them when it is asked."""
    held, finish = [], loop.Training.finish

    def finishing(run):
        held.append(len(run.rows))
        return finish(run)

    monkeypatch.setattr(loop.Training, "finish", finishing)
    free = train()
    kept = train(folder=tmp_path / "run")
    train(folder=tmp_path / "half", steps=5)
    again = train(folder=tmp_path / "half", resume=True)
    assert held == [len(free.rows), 0, 0, 0]
    assert "rows" not in vars(kept), "read too early"
    assert kept.rows is kept.rows
    assert kept.rows == again.rows == free.rows
    (tmp_path / "half" / "metrics.jsonl").unlink()
    assert again.rows == free.rows, "they were read before"


def test_rows_that_are_gone_are_said_to_be(tmp_path):
    result = train(folder=tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(co.StorageError, match=r"metrics.jsonl cannot be read: No such file"):
        _ = result.rows


def test_rows_are_found_from_another_folder_and_are_those_of_this_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(folder="run")
    longer = train(folder="run", steps=15, resume=True)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert len(longer.rows) > len(result.rows)
    assert result.rows == longer.rows[: len(result.rows)]


def test_numbers_that_json_lacks_are_numbers_again(tmp_path, monkeypatch):
    look = validation.evaluate

    def strange(*words, **options):
        return look(*words, **options) | {"right": math.nan, "least": -math.inf, "most": math.inf}

    monkeypatch.setattr(validation, "evaluate", strange)
    for row in rows(train(folder=tmp_path / "run"), "held-out"):
        assert math.isnan(row["right"])
        assert (row["least"], row["most"]) == (-math.inf, math.inf)


@pytest.mark.parametrize("fault", [None, math.nan])
def test_distances_are_those_of_all_steps_before_and_after_a_resume(tmp_path, monkeypatch, fault):
    measure, met = directions.distance, []

    def measured(d, g):
        met.append(measure(d, g))
        return met[-1] if fault is None or len(met) != 4 else fault

    monkeypatch.setattr(trainer, "distance", measured)

    def told(name):
        return json.loads((tmp_path / name / "result.json").read_text())["distance"]

    def recipe():
        return {"optimiser": co.optimisers.optimiser("sgd", 0.1, direction="temporal")}

    free = train(steps=9, **recipe())
    far = [row["distance"] for row in rows(free, "train") if math.isfinite(row["distance"])]
    assert len(far) == (9 if fault is None else 8)
    expected = {
        "mean": sum(far) / len(far),
        "most": max(far),
        "below_one": sum(d < 1 for d in far) / len(far),
    }
    met.clear()
    train(steps=9, folder=tmp_path / "whole", **recipe())
    met.clear()
    train(steps=5, folder=tmp_path / "half", **recipe())
    train(steps=9, folder=tmp_path / "half", resume=True, **recipe())
    assert told("whole") == told("half") == expected
    assert train(folder=tmp_path / "plain").folder is not None
    assert told("plain") is None


# without display, without folder


def test_nothing_is_printed_without_a_display(capfd, tmp_path):
    train(folder=tmp_path / "run")
    train(gradient=Poison(2), nonfinite="skip")
    assert capfd.readouterr() == ("", "")


def test_without_a_folder_nothing_is_written_and_the_result_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    free = train()
    assert list(tmp_path.iterdir()) == []
    kept = train(folder=tmp_path / "run")
    assert free.rows == kept.rows
    assert equal(weights(free.network), weights(kept.network))
    assert free.folder is None
    assert free.metrics == kept.metrics


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_without_a_folder(number):
    class Stop(display.Silent):
        def step(self, step, row):
            if step == 3:
                os.kill(os.getpid(), number)

    net = network()
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    with pytest.raises(co.Interrupted, match=f"Interrupted{by} at step 3. Nothing is saved"):
        train(net, display=Stop())
    assert equal(weights(net), last_weights(steps=3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps must be a whole number"),
        ({"batch": True}, "batch must be"),
        ({"keep": 0}, "keep must be"),
        ({"clip": 0.0}, "clip must be a finite number, above 0"),
        ({"clip": math.inf}, "clip must be a finite number, above 0"),
        ({"nonfinite": "stopp"}, "did you mean 'stop'"),
        ({"seed": -1}, "seed must be"),
        ({"resume": True}, "needs the folder"),
        ({"net": network(inputs=3)}, "needs a network with inputs=6; this one has inputs=3"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options, said):
    with pytest.raises(CoadjointError, match=said):
        train(**options)


def test_kinds_that_cannot_be_used_are_refused():
    with pytest.raises(KindError, match="and a Task; got Linear"):
        co.train(torch.nn.Linear(1, 1), co.tasks.TemporalOrder(10))


@pytest.mark.parametrize("given", [{"patience": 2}, {"select": "loss"}])
def test_patience_and_selection_need_something_to_watch(given):
    task = Constant()
    task.splits = ()
    with pytest.raises(InputError, match=f"{next(iter(given))} needs a validation set"):
        train(regression(), task, **given)


def test_the_loss_may_choose_the_weights_in_place_of_the_metric(monkeypatch):
    look = validation.evaluate
    losses = {2: 0.5, 4: 0.7, 6: 0.2, 8: 0.3, 10: 0.4}

    def scripted(net, task, split, seed=0, draw=0, n=1000, *more):
        return look(net, task, split, seed, draw, n, *more) | {"loss": losses.get(draw, 9.0)}

    monkeypatch.setattr(validation, "evaluate", scripted)
    given = [9, 3, 2, 4, 5, 6, 7]
    by_metric = train(regression(), Constant(given), steps=20, every=2, patience=2)
    assert (by_metric.best_step, by_metric.step, by_metric.selected_by) == (4, 8, "given")
    by_loss = train(regression(), Constant(given), steps=20, every=2, patience=2, select="loss")
    assert (by_loss.best_step, by_loss.step, by_loss.selected_by) == (6, 10, "loss")
    with pytest.raises(InputError, match="unknown metric 'lost'; did you mean 'loss'"):
        train(regression(), Constant(given), select="lost")


class Steady(co.tasks.Collection):
    """A finite task whose accuracy never changes: only the loss tells weights apart."""

    name, inputs, outputs, output, loss = "steady", 2, 3, "softmax", "cross-entropy"
    metric, lower = "accuracy", False

    def __init__(self):
        draw = np.random.default_rng(0)

        def some(n):
            return co.tasks.Sequences(
                [draw.normal(size=(4, 2)) for _ in range(n)], draw.integers(0, 3, n)
            )

        super().__init__({"train": some(20), "valid": some(10)})

    def score(self, a, batch):
        return {"accuracy": (0.5 * len(a), float(len(a)))}


def test_among_equal_accuracies_the_loss_decides():
    net = co.Network("elman", inputs=2, hidden=4, outputs=3, output="softmax")
    co.initialisers.initialise(net, "torch", seed=0)
    result = co.train(net, Steady(), optimiser=co.optimisers.sgd(2.0), steps=40, every=1, batch=5)
    losses = {
        r["step"]: r["loss"] for r in result.rows if r["kind"] == "held-out" and r["step"] > 0
    }
    best = min(losses, key=losses.get)
    assert 1 < best < 40
    assert result.best_step == best
    assert result.metrics["valid"]["loss"] == losses[best]


def printed_steps(capsys, steps, every, last):
    """The steps of the lines that a run of `steps` prints which ends at step `last`."""
    lines = display.Lines("xor", steps, "right")
    for step in range(0, last + 1, every):
        lines.step(step, {"loss": 1.0, "gradient": 1.0})
        lines.validation(step, [{"kind": "held-out", "right": 0.5}])
    lines.close()
    out = capsys.readouterr().out
    assert "accuracy 0.5" in out
    words = [line.replace("step ", "").split() for line in out.splitlines()]
    return [int(word[1].partition("/")[0]) for word in words]


@pytest.mark.parametrize("last", [1000, 990, 470])
def test_a_file_gets_few_lines_and_the_last(capsys, last):
    steps = printed_steps(capsys, 1000, 10, last)
    assert steps[:2] == [0, 10]
    assert steps[-1] == last
    assert len(steps) <= display.MOST_LINES + 1
    assert max(np.diff(steps)) <= 60


def test_lines_of_an_endless_run_grow_rare(capsys):
    steps = printed_steps(capsys, None, 10, 100_000)
    assert steps[-1] == 100_000
    assert len(steps) < 60
