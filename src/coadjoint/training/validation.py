"""Validation: held-out metrics, examples, and what costates and weights do along a run."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from ..errors import CoadjointError, NumericalError, Unsupported, check_kind
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation
from ..networks.interface import Net, check_net
from ..networks.judge import evaluation_mode
from ..objectives.batch import Batch
from ..sweeps.costates import TIME
from ..tasks.task import Task

Row = dict[str, Any]


def evaluate(
    net: Net, task: Task, split: str, seed: int = 0, draw: int | str = 0, n: int = 1000
) -> dict[str, float]:
    """The loss (mean over sequences) and the scores of a network on a held-out set."""
    check_net(net)
    check_kind("task", task, Task, "one of co.tasks")
    totals: dict[str, tuple[float, float]] = {}
    count = 0
    with torch.no_grad(), evaluation_mode(net):
        for b in task.held_out(split, seed, draw, n):
            b = net.move_batch(b)
            run = net.run(b)
            losses = run.loss(task.loss, b.y, mask=b.mask, reduce=b.reduce)
            found = {
                "loss": (float(losses.double().sum()), float(len(losses))),
                **task.score(run.a, b),
            }
            count += len(losses)
            for name, (total, weight) in found.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + total, before[1] + weight
    return {
        "sequences": count,
        **{
            name: total / weight if weight else math.nan for name, (total, weight) in totals.items()
        },
    }


def collect_examples(net: Net, task: Task, seed: int, k: int = 8) -> list[Row]:
    """A few held-out sequences: what was asked, what the network said (for readout "every", at the last step; a sequence
    whole)."""
    split = task.splits[-1] if task.splits else "train"
    b = net.move_batch(next(task.held_out(split, seed, "examples", k)))
    try:
        with torch.no_grad(), evaluation_mode(net):
            run = net.run(b)
            a, y = run.a, b.y
    except NumericalError:
        return []
    n = getattr(run, "lengths", None)  # a recurrent network's run has them
    if task.readout == "every":
        assert n is not None
        index = torch.arange(len(n))
        a, y = a[n - 1, index], y[n - 1, index]
    if task.readout == "sequence":
        a, y = a.transpose(0, 1), y.T
    shown = task.show(a[:k].cpu(), y[:k].cpu())
    note = lambda i: {} if n is None else {"note": f"{int(n[i])} steps"}
    right = lambda t, p: (
        {} if task.output == "identity" else {"right": t == p}
    )  # numbers are near or far, not right
    return [
        {"id": str(i), "target": t, "prediction": p, **right(t, p), **note(i)}
        for i, (t, p) in enumerate(shown)
    ]


def locate_nonfinite(e: Evaluation) -> str:
    """Where numbers first leave their range: the earliest state, or the costate nearest to the end; of the lowest layer
    where that happens."""
    try:
        layers = e.costates.layers
    except CoadjointError as error:
        return f": {error}"
    where = layers[0].axis.number
    for lam in layers:
        for i, x in enumerate(lam.trajectory.states):
            if (sample := first_nonfinite_sample(x)) is not None:
                return f"; the state of sample {sample} at {where} {i} is the first that is not"
    for lam in layers:
        for i in reversed(range(len(lam.exponent))):
            if (sample := first_nonfinite_sample(lam.mantissa_at(i))) is not None:
                return f"; the costate of sample {sample} at {where} {i} is the first that is not"
    return f"; states and costates are finite at every {where}"


def first_nonfinite_sample(x: Tensor) -> int | None:
    """The first sample of x [B, ...] with an entry that is not finite; None if there is none."""
    bad = ~torch.isfinite(x.flatten(1)).all(1)
    return int(bad.nonzero()[0, 0]) if bad.any() else None


def probe_gradient(net: Net, b: Batch, task: Task, most: int = 200) -> Row:
    """Means over samples of log10 ||lam_t|| and of log10 ||temporal component||, at up to `most` time steps. Of several layers
    those that read forwards are looked at as one."""
    with evaluation_mode(net):
        e = BPTT().evaluate(net, b, task.loss)
    with torch.no_grad():
        lam = e.costates.forwards()
        logs = lam.log_norms() / math.log(10)
        on = lam.nonzero
        count = on.sum(1)
        curve = torch.where(on, logs, 0).sum(1) / count
        T = len(logs) - 1
        t = sorted({round(k * T / min(T, most - 1)) for k in range(min(T, most - 1) + 1)})
        last = lam.last[None]
        ends = torch.stack([logs[0], logs.gather(0, last)[0]])
        both = on[0] & on.gather(0, last)[0]
        decay = float((ends[0] - ends[1])[both].mean()) if both.any() else None
        temporal = None
        with contextlib.suppress(Unsupported):
            norms = e.components().norms()["joint"].tolist()
            temporal = [math.log10(norms[s - 1]) if norms[s - 1] > 0 else None for s in t if s > 0]
        radius = None
        W = getattr(net, "W", None)
        if W is not None and W.dim() == 2 and W.shape[0] == W.shape[1]:
            radius = float(torch.linalg.eigvals(W.double()).abs().max())
        words = (
            {} if lam.axis == TIME else {"axis": lam.axis.label}
        )  # a report's axis is time if nothing is said
        return {
            **words,
            "t": t,
            "log10_costates": [float(curve[s]) if count[s] else None for s in t],
            "temporal": temporal,
            "decay": decay,
            "radius": radius,
            "gradients": {
                name: float(g.double().square().sum().sqrt()) for name, g in e.gradient.items()
            },
        }
