"""Held-out metrics, example predictions, and probes of the gradient within sequences."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from ..errors import CoadjointError, NumericalError, Unsupported, check_kind
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation
from ..gradients.segment_looks import GradientDecay, SegmentedRun, decay_in_segments
from ..gradients.segments import Segments
from ..networks.interface import Net, NetRun, check_net
from ..networks.judge import evaluation_mode
from ..objectives.batch import Batch
from ..sweeps.costates import TIME
from ..tasks.judging import JudgedCollection
from ..tasks.task import Collection, Sequences, Task
from .json_types import JsonObject, Row
from .looks import AT_ONCE, Looks
from .pictures import make_pictures


def evaluate(
    net: Net,
    task: Task,
    split: str,
    seed: int = 0,
    draw: int | str = 0,
    n: int = 1000,
    looks: Looks = AT_ONCE,
) -> dict[str, float]:
    """The loss (mean over sequences) and the scores of a network on a held-out set.

    The same seed and `draw` draw the same sequences of a generated task, at most `n` of them; a
    finite task uses all of its sequences. looks: in segments, to save memory, or at once. With four
    classes, a network of zeros is correct one time in four, and its loss is log 4:

    >>> import coadjoint as co, torch
    >>> net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    >>> for p in net.parameters():
    ...     p = torch.nn.init.zeros_(p)
    >>> values = co.evaluate(net, co.tasks.TemporalOrder(20), "test", n=50)
    >>> values["sequences"], round(values["loss"], 4)
    (50, 1.3863)
    """
    check_net(net)
    check_kind("task", task, Task, "one of co.tasks")
    totals: dict[str, tuple[float, float]] = {}  # of each metric: its sum, and the weight of that
    count = 0
    tally = task.tally()  # of metrics that are no means over entries
    with torch.no_grad(), evaluation_mode(net):
        for batch in drawn_parts(net, looks, task.held_out(split, seed, draw, n)):
            run = looks.run(net, batch, task.loss)
            losses = run.loss(task.loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            count += len(losses)
            loss = (float(losses.double().sum()), float(len(losses)))
            # A score, too, is a sum over this batch and the weight to divide it by.
            for name, (total, weight) in {"loss": loss, **task.score(run.a, batch)}.items():
                total_before, weight_before = totals.get(name, (0.0, 0.0))
                totals[name] = (total_before + total, weight_before + weight)
            if tally is not None:
                tally.add(*task.counted_entries(run.a, batch))
            del batch, run, losses  # before the next batch is drawn
    values: dict[str, float] = {"sequences": count}
    for name, (total, weight) in totals.items():
        values[name] = total / weight if weight else math.nan
    return values if tally is None else values | tally.values()


def drawn_parts(net: Net, looks: Looks, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The parts of one batch after the other; a batch is let go before the next is drawn."""
    for drawn in batches:
        yield from looks.parts(net, drawn)
        del drawn


def run_examples(
    net: Net, task: Task, seed: int, k: int, segments: Segments = None
) -> tuple[Batch, NetRun | SegmentedRun, Tensor] | None:
    """A batch of at most `k` held-out sequences, the network's run over it, and its pre-outputs.

    None if the network overflows on them. segments: as in BPTT.
    """
    batch = net.move_batch(next(task.held_out(split_of_examples(task), seed, "examples", k)))
    try:
        with torch.no_grad(), evaluation_mode(net):
            run = Looks(segments).run(net, batch, task.loss)
            return batch, run, run.a
    except NumericalError:
        return None


def split_of_examples(task: Task) -> str:
    """The split that examples are taken from: the last one, which is the test set if there is one.

    "train" for a task without any.
    """
    return task.splits[-1] if task.splits else "train"


def name_examples(task: Task, k: int) -> list[Row]:
    """The id, and the time if there is one, of each of the `k` sequences of `run_examples`.

    Those of a task without names are numbered.
    """
    names: list[Row] = [{"id": str(i)} for i in range(k)]
    if not isinstance(task, Collection):
        return names
    split = split_of_examples(task)
    chosen = task.sets[split]
    index = next(task.held_out_indices(split, k))
    for name, i in zip(names, index, strict=False):  # there may be fewer than k
        if chosen.ids is not None:
            name["id"] = chosen.ids[i]
        if isinstance(chosen, Sequences) and chosen.origins is not None:
            times = chosen.origins[i].times
            name |= {"time": times[-1]} if times else {}
    return names


def collect_examples(
    net: Net, task: Task, seed: int, k: int = 8, segments: Segments = None
) -> list[Row]:
    """Targets and predictions of at most `k` held-out sequences, as text, in a row for each.

    With readout "every" those at the last step; of a task with sequences as answers the whole
    answer. An empty list if the network overflows on them. segments: as in BPTT.
    """
    ran = run_examples(net, task, seed, k, segments)
    if ran is None:
        return []
    batch, run, outputs = ran
    targets = batch.y
    lengths = getattr(run, "lengths", None)  # only the run of a recurrent network has them
    if task.readout == "every":
        assert lengths is not None
        samples = torch.arange(len(lengths))
        outputs = outputs[lengths - 1, samples]  # [T, B, outputs] -> [B, outputs]
        targets = targets[lengths - 1, samples]
    if task.readout == "sequence":  # samples first, to take k of them
        outputs = outputs.transpose(0, 1)
        targets = targets.T
    examples: list[Row] = []
    names = name_examples(task, k)
    for i, (target, prediction) in enumerate(task.show(outputs[:k].cpu(), targets[:k].cpu())):
        example: Row = {**names[i], "target": target, "prediction": prediction}
        if task.output != "identity":  # real numbers are near or far, not right or wrong
            example["right"] = target == prediction
        if lengths is not None:
            example["note"] = f"{int(lengths[i])} steps"
        examples.append(example)
    return examples


def collect_pictures(net: Net, task: Task, seed: int, k: int = 8) -> JsonObject | None:
    """The samples of `collect_examples` as pictures, if they are images: see `make_pictures`.

    None if they are not, or if the network overflows on them.
    """
    if task.shape is None:  # sequences
        return None
    ran = run_examples(net, task, seed, k)
    if ran is None:
        return None
    batch, _, outputs = ran
    return make_pictures(task, batch, outputs, k)


def collect_findings(net: Net, task: Task, seed: int, segments: Segments = None) -> JsonObject:
    """What result.json says besides metrics: examples, and pictures and baselines if any.

    segments: as in BPTT.
    """
    findings: JsonObject = {"examples": collect_examples(net, task, seed, segments=segments)}
    pictures = collect_pictures(net, task, seed)
    if pictures is not None:
        findings["pictures"] = pictures
    if isinstance(task, JudgedCollection) and task.baselines:
        findings["baselines"] = [asdict(each) for each in task.baselines]
    return findings


def locate_nonfinite(e: Evaluation) -> str:
    """The end of an error message: where a state or costate of e first is not finite.

    States are searched forwards in time and costates backwards, in the order they are computed
    in; each from the lowest layer up.
    """
    try:
        layers = e.costates.layers
    except CoadjointError as error:
        return f": {error}"
    place = layers[0].axis.number  # what the states are numbered by: time steps
    for lam in layers:
        for i, x in enumerate(lam.trajectory.states):
            sample = first_nonfinite_sample(x)
            if sample is not None:
                return describe_fault("state", sample, f"{place} {i}")
    for lam in layers:
        for i in reversed(range(len(lam.exponent))):
            sample = first_nonfinite_sample(lam.mantissa_at(i))  # lam_i = mantissa 2^exponent
            if sample is not None:
                return describe_fault("costate", sample, f"{place} {i}")
    return f"; states and costates are finite at every {place}"


def describe_fault(what: str, sample: int, place: str) -> str:
    """The end of an error message: which state or costate is the first that is not finite.

    what: "state" or "costate". place: "time step 12".
    """
    return f"; the first non-finite {what} is that of sample {sample} at {place}"


def first_nonfinite_sample(x: Tensor) -> int | None:
    """The first sample of x [B, ...] with an entry that is not finite; None if all are finite."""
    faulty = ~torch.isfinite(x.flatten(1)).all(1)
    return int(faulty.nonzero()[0, 0]) if faulty.any() else None


def probe_gradient(
    net: Net, batch: Batch, task: Task, most: int = 200, segments: Segments = None
) -> Row:
    """How the gradient decays within the sequences of a batch, for the report.

    "log10_costates" are means over samples of log10 |lam_t| and "temporal" log10 norms of the
    gradient's temporal components, both at up to `most` time steps "t". "decay" is the mean of
    log10 |lam_0| / |lam_T|, "radius" the spectral radius of W, "gradients" the norm for each
    parameter. For a stack, the layers that read forwards are treated as a single state. segments:
    as in BPTT.
    """
    with evaluation_mode(net):
        if segments is None:
            seen = observe(BPTT().evaluate(net, batch, task.loss))
        else:
            seen = decay_in_segments(net, batch, task.loss, segments)
    with torch.no_grad():
        lam = seen.costates
        log_norms = lam.log_norms() / math.log(10)  # [T + 1, B]
        nonzero = lam.nonzero  # a zero costate has no logarithm, and counts in no mean
        count = nonzero.sum(1)
        curve = torch.where(nonzero, log_norms, 0).sum(1) / count
        T = len(log_norms) - 1
        intervals = min(T, most - 1)
        t = sorted({round(k * T / intervals) for k in range(intervals + 1)})  # evenly spaced
        probe: Row = {}
        if lam.axis != TIME:  # reports take the axis for time if nothing is said
            probe["axis"] = lam.axis.label
        probe["t"] = t
        probe["log10_costates"] = [float(curve[s]) if count[s] else None for s in t]
        probe["temporal"] = log_component_norms(seen.component_norms, [s for s in t if s > 0])
        last = lam.last[None]  # [1, B]: the step of each sample's last costate
        both_nonzero = nonzero[0] & nonzero.gather(0, last)[0]
        decays = log_norms[0] - log_norms.gather(0, last)[0]
        probe["decay"] = float(decays[both_nonzero].mean()) if both_nonzero.any() else None
        probe["radius"] = spectral_radius(net)
        probe["gradients"] = {}
        for name, g in seen.gradient.items():
            probe["gradients"][name] = float(g.double().square().sum().sqrt())
    return probe


def observe(e: Evaluation) -> GradientDecay:
    """The costates and the components of an evaluation; a chain's maps are called once more.

    Of a network whose gradient has no components, their norms are None.
    """
    with torch.no_grad():
        norms = None
        with contextlib.suppress(Unsupported):
            norms = e.components().norms()["joint"]
        return GradientDecay(e.gradient, e.costates.forwards(), norms)


def log_component_norms(norms: Tensor | None, steps: list[int]) -> list[float | None] | None:
    """log10 |grad_s| for each s in `steps`, which count from 1; None for a zero norm.

    grad_s is the temporal component of the gradient: what step s adds to that of W, R and b. norms:
    of steps 1 .. T; None, and then None instead of a list, if the gradient has no such components.
    """
    if norms is None:
        return None
    values = norms.tolist()
    chosen = [values[s - 1] for s in steps]
    return [math.log10(size) if size > 0 else None for size in chosen]


def spectral_radius(net: Net) -> float | None:
    """The largest absolute eigenvalue of W; None for a network without a square W."""
    W = getattr(net, "W", None)
    if W is None or W.dim() != 2 or W.shape[0] != W.shape[1]:
        return None
    return float(torch.linalg.eigvals(W.double()).abs().max())
