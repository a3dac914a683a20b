"""Gradients and runs that processes share: the cases of tests/gradients/test_shared.py and
tests/training/test_distributed.py, as functions that any number of processes may call.
"""

from __future__ import annotations

import hashlib
import itertools
import signal
from typing import Any

import torch
from torch import nn

import coadjoint as co
from coadjoint.gradients import processes
from coadjoint.optimisers import Armijo, adam, lbfgs, sgd
from coadjoint.training.curriculum import Easiest

T = 12
SHARDS = 6
LOSS = "cross-entropy"
MIXING = ("omega-published",)


def network(cell="elman", readout="last", **options):
    torch.manual_seed(1)
    return co.Network(
        cell, inputs=3, hidden=5, outputs=4, output="softmax", readout=readout, **options
    ).double()


def batch(B=7, readout="last", weighted=False, seed=2):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (B,), generator=generator)
    lengths[0] = T
    shape = (B,) if readout == "last" else (T, B)
    return co.Batch(
        torch.randn(T, B, 3, generator=generator).double(),
        torch.randint(0, 4, shape, generator=generator),
        lengths=lengths,
        weight=torch.rand(B, generator=generator).double() * 3 if weighted else None,
        reduce="sum" if readout == "last" else "mean",
    )


def gradient_cases() -> dict[str, tuple[Any, Any, Any]]:
    """name -> a function that makes the method, the network, the batch."""
    cases: dict[str, tuple[Any, Any, Any]] = {}
    kinds = (("elman", "last"), ("lstm", "every"), ("gru", "last"))
    for (cell, readout), B, weighted in itertools.product(kinds, (7, 2), (False, True)):
        given = network(cell, readout), batch(B, readout, weighted)
        name = f"{cell} {readout} B={B}{' weighted' * weighted}"
        cases[f"{name} bptt"] = (co.BPTT, *given)
        cases[f"{name} log-ratio"] = (lambda: co.Penalised("log-ratio", 0.3), *given)
    given = network(), batch()
    cases["one sample"] = (lambda: co.Penalised("log-ratio", 0.3), network(), batch(1))
    for name in sorted(set(co.penalties.PENALTIES) - set(MIXING)):
        cases[f"penalty {name}"] = (lambda name=name: co.Penalised(name, 0.3), *given)
    sum_of_two = 0.5 * co.penalties.penalty("variance") + "isometry"
    cases["a sum of penalties"] = (lambda: co.Penalised(sum_of_two, 0.3), *given)
    cases["a penalty of one's own"] = (lambda: co.Penalised(own_penalty, 0.3), *given)
    cases["pretraining"] = (lambda: co.Penalised("log-ratio", 0.3, pretrain=3), *given)
    cases["held"] = (lambda: co.Penalised("log-ratio", 0.3, hold="source"), *given)
    cases["weight 0"] = (lambda: co.Penalised("log-ratio", lambda step: 0.0), *given)
    steered = co.penalties.Steered(1.0, 0.01, gain=0.5)
    cases["steered"] = (lambda: co.Penalised("log-ratio", steered), *given)
    cases["segments"] = (lambda: co.BPTT(segments=2), *given)
    cases["penalised segments"] = (lambda: co.Penalised("log-ratio", 0.3, segments=2), *given)
    cases["rtrl"] = (co.RTRL, *given)
    cases["truncated"] = (lambda: co.Truncated(3, 5), *given)
    torch.manual_seed(3)
    sizes = {"inputs": 3, "hidden": 4, "outputs": 4, "output": "softmax"}
    stack = co.Stack(["gru", "elman"], bidirectional=True, **sizes).double()
    cases["stack"] = (lambda: co.Penalised("log-ratio", 0.3), stack, batch())
    task = co.tasks.Reversal(5)
    answers = co.EncoderDecoder("gru", inputs=task.inputs, hidden=4, outputs=task.outputs).double()
    pairs = answers.move_batch(task.batch(0, 7, 0))
    cases["encoder-decoder"] = (lambda: co.Penalised("log-ratio", 0.3), answers, pairs)
    torch.manual_seed(3)
    pictures = co.Batch(torch.randn(7, 4).double(), torch.randint(0, 3, (7,)))
    maps = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    deep = co.Chain(*maps, output="softmax").double()
    cases["chain"] = (co.BPTT, deep, pictures)
    cases["chain penalised"] = (lambda: co.Penalised("log-ratio", 0.3), deep, pictures)
    off = (lambda: co.Penalised("log-ratio", lambda step: 0.0), deep, pictures)
    cases["chain, weight 0"] = off
    return cases


def own_penalty(lam):
    return lam.norms()[1:].square().sum(0)


def mixing_penalty(lam):
    norms = lam.norms().sum(0)
    return norms - norms.mean()


def largest_difference(case: tuple[Any, Any, Any], shards: int | None, steps: int = 1) -> float:
    """Between the method on this process and the shared one: gradient, losses, value, state."""
    make, net, given = case
    alone = make()
    shared = co.Shared(make(), shards)
    worst = 0.0
    for _ in range(steps):
        a = alone(net, given, LOSS)
        b = shared(net, given, LOSS)
        scale = max(float(g.abs().max()) for g in a.gradient.values())
        pairs = [(a.gradient[name], b.gradient[name]) for name in a.gradient]
        found = [float((x - y).abs().max()) / (scale or 1.0) for x, y in pairs]
        for name in ("losses", "penalties", "loss", "penalty", "objective"):
            x, y = getattr(a, name), getattr(b, name)
            assert torch.equal(x.isnan(), y.isnan())
            found.append(float((x - y).nan_to_num().abs().max()))
        found.append(abs(alone.value(net, given, LOSS) - shared.value(net, given, LOSS)))
        found += [abs(alone.state[name] - shared.state[name]) for name in alone.state]
        assert (a.rho, a.share) == (b.rho, b.share)
        worst = max(worst, *found)
    return worst


def digest(tensors) -> str:
    content = b"".join(x.detach().contiguous().numpy().tobytes() for x in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def gradient_bits(name: str) -> str:
    """The bits of a gradient by SHARDS shards."""
    make, net, given = gradient_cases()[name]
    return digest(co.Shared(make(), SHARDS)(net, given, LOSS).gradient.values())


def refusal(run) -> str:
    """What an error says; its class comes first."""
    try:
        run()
    except co.CoadjointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def overflow() -> str:
    """One sample overflows: all processes must say so."""
    net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity").double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.fill_({"W": 3.0, "R": 1.0, "V": 1.0}.get(name, 0.0))
    u = torch.zeros(12, 6, 1).double()
    u[:, 2] = 1e307
    given = co.Batch(u, torch.zeros(6, 1).double())
    return refusal(lambda: co.Shared(co.BPTT(), SHARDS)(net, given, "squared"))


def different_batches(shards: int | None) -> str:
    """The last process is given another batch than the others: all must say so."""
    is_last = processes.process_number() == processes.process_count() - 1
    given = batch(seed=3 if is_last else 2)
    return refusal(lambda: co.Shared(co.BPTT(), shards)(network(), given, LOSS))


def exchange_errors() -> list[str]:
    """The cases in which rows by segments are not, to the bit, the sum of the rows in order.

    Rows span many orders of magnitude, so that another order would give other bits.
    """
    P = processes.process_count()
    wrong = []
    cases = itertools.product(
        (torch.float32, torch.float64), (1, 2, 3, 4, 5, 64, 1001), sorted({P, P + 1, 2 * P, 7})
    )
    for dtype, width, count in cases:
        generator = torch.Generator().manual_seed(width)
        rows = torch.randn(count, width, generator=generator, dtype=dtype)
        rows *= 10.0 ** torch.randint(-8, 8, (count, width), generator=generator)
        own = rows[list(processes.own_shards(count))]
        notes = min(width, 3)
        expected = rows[0].clone()
        for row in rows[1:]:
            expected += row
        for exchange in (processes.gather_and_sum, processes.sum_by_segments):
            total, told = exchange(own, count, notes)
            if not torch.equal(total, expected) or not torch.equal(told, rows[:, -notes:]):
                wrong.append(f"{exchange.__name__} {dtype} width {width} count {count}")
    return wrong


# runs


class Stopping(co.tasks.TemporalOrder):
    """A task that asks a process to stop, by a signal, as it draws the batch of a step."""

    at = (-1, -1)  # rank, step

    def batch(self, step, *arguments):
        if (processes.process_number(), step) == self.at:
            signal.raise_signal(signal.SIGTERM)
        return super().batch(step, *arguments)


def run_cases() -> dict[str, dict[str, Any]]:
    """name -> the arguments of co.train that are special about it."""
    steered = co.penalties.Steered(1.0, 0.01, gain=0.5)
    return {
        "adam": {"clip": 1.0, "gradient": co.Penalised("log-ratio", 0.1)},
        "steered, accumulated": {
            "gradient": co.Penalised("log-ratio", steered),
            "accumulate": 2,
            "weight_noise": 0.01,
        },
        "lbfgs": {"optimiser": lbfgs(max_iter=2)},
        "armijo": {"optimiser": sgd(0.5, rule=Armijo())},
        "easiest": {"easiest": Easiest(0.5, 10), "clip_mean": 2.0},
        "plateau": {
            "optimiser": adam(1e-2, schedule=co.optimisers.plateau(1)),
            "patience": 3,
            "seconds": 1e6,
        },
        "dropout": {"gradient": co.Penalised("isometry", 0.1)},
        "nonfinite": {"nonfinite": "skip", "optimiser": sgd(1e-2)},
    }


def train(name: str, steps: int = 12, **arguments: Any) -> tuple[co.Result, Any]:
    """Train one of the cases -> the result and the network."""
    special = run_cases()[name]
    task = arguments.pop("task", None) or co.tasks.TemporalOrder(10)
    torch.manual_seed(5)
    if name == "dropout":
        net: Any = co.Stack(
            ["elman", "elman"], inputs=6, hidden=3, outputs=4, output="softmax", dropout=0.3
        )
    else:
        activation = "identity" if name == "nonfinite" else "tanh"
        sizes = {"inputs": 6, "hidden": 4, "outputs": 4}
        net = co.Network("elman", activation=activation, output="softmax", **sizes)
    if name == "nonfinite":
        task = Exploding(10)
    else:
        net = net.double()
    settings: dict[str, Any] = {
        "steps": steps,
        "batch": 7,
        "every": 4,
        "checkpoint": 5,
        "tests": 20,
        "confirm": 30,
        "probes": 4,
        "shards": SHARDS,
        **special,
        **arguments,
    }
    return co.train(net, task, **settings), net


class Exploding(co.tasks.TemporalOrder):
    """A task with one sample, at step 3, that no number can hold."""

    def batch(self, step, *arguments):
        drawn = super().batch(step, *arguments)
        if step == 3:
            drawn.u[:, 2] = 3e38
        return drawn


def outcome(name: str, **arguments: Any) -> list[Any]:
    """What a run ends in: status, step, best step, metrics and the bits of its weights."""
    result, net = train(name, **arguments)
    return [
        result.status,
        result.step,
        result.best_step,
        result.skipped,
        result.metrics,
        digest(net.state_dict().values()),
    ]
