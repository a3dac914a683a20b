"""Training: a loop over steps, each of them a function of (weights, optimiser, step, seed) and of nothing else.

Batches, held-out sequences and schedules are functions of the step, so a run that goes on from a checkpoint does what it
would have done. What depends on the past is kept in `Progress`, and saved.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import (
    CoadjointError,
    InputError,
    KindError,
    NumericalError,
    StorageError,
    brief,
    check_kind,
    check_path,
    choose,
    whole,
)
from ..gradients import restoring
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation, Gradient
from ..gradients.method import Method, trained
from ..gradients.penalised import Penalised
from ..gradients.truncated import Truncated
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..optimisers.directions import DIRECTIONS, distance, norm
from ..optimisers.hessian_free import HessianFree
from ..optimisers.recipes import OWN_PACE, PACELESS, Optimiser, adam, recipe_of
from ..optimisers.steppers import Point
from ..tasks.task import Task, rng
from . import environment, files, json_rows, run_folder, storage
from .curriculum import Easiest
from .display import display as bar
from .restore import compare_tensors, complain, difference, fit, numbers, part
from .signals import Interrupted, interruptible
from .validation import Row, evaluate, examples, first_fault, look_inside

POLICIES = ("stop", "skip", "dump")


class Display(Protocol):
    """What shows a run while it goes on."""

    def step(self, step: int, row: Row) -> None: ...
    def look(self, step: int, rows: Sequence[Row]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silent:
    def step(self, step: int, row: Row) -> None: ...
    def look(self, step: int, rows: Sequence[Row]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


def check_run(folder: Any, display: Any, description: Any, command: Any) -> None:
    """What `train` and `online.learn` are both given, beside what is learned."""
    if folder is not None:
        check_path("folder", folder)
    shows = all(callable(getattr(display, word, None)) for word in ("step", "look", "say", "close"))
    if not isinstance(display, bool) and not shows:
        raise KindError(
            f"display must be True, False or an object with step, look, say and close; got {brief(display)}."
        )
    check_kind("description", description, (dict, type(None)), "a dict")
    check_kind("command", command, (str, type(None)), "a text")


@dataclass(frozen=True)
class Result:
    """What came of a run. `metrics` are those of the final weights, by split."""

    network: Net
    status: str  # "success", "finished" or "early-stopped"
    step: int
    seconds: float
    success: bool
    success_step: int | None
    success_seconds: float | None
    success_work: float | None
    best_step: int | None
    skipped: int  # steps that were not finite and left out
    work: float  # gradients of a sequence that were computed, or as much as that
    metrics: dict[str, dict[str, float]]
    told: Sequence[Row] | json_rows.Written = field(repr=False)  # where `rows` come from
    folder: Path | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """What the run has logged, row by row: the lines of metrics.jsonl, read from there when they are
        first asked for. A run without a folder has kept them in memory."""
        return list(self.told)


@dataclass
class Progress:
    """What a run remembers of its past, beside weights and optimiser."""

    best: float | None = None
    best_loss: float = math.inf
    best_step: int | None = None
    waited: int = 0  # evaluations since the best
    factor: float = 1.0  # of the step size, after plateaus
    plateau: float | None = None  # the loss that a plateau's patience counts from
    plateau_waited: int = 0
    skipped: int = 0
    seconds: float = 0.0
    work: float = 0.0  # gradients of a sequence, two sweeps each
    norms: float = 0.0  # running mean of the norms of gradients
    success_step: int | None = None
    success_seconds: float | None = None
    success_work: float | None = None


@dataclass(frozen=True)
class Found:
    """What a step begins with: means over the samples of its batches. direction: what is proposed in place of the gradient."""

    loss: float
    penalty: float
    rho: float
    objective: float
    gradient: Gradient
    direction: Gradient


def train(
    net: Net,
    task: Task,
    *,
    gradient: Method | None = None,
    optimiser: Optimiser | HessianFree | None = None,
    steps: int = 10_000,
    batch: int = 32,
    accumulate: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    clip_mean: float | None = None,
    weight_noise: float = 0.0,
    easiest: Easiest | None = None,
    gradients: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    every: int = 100,
    tests: int = 1000,
    confirm: int = 10_000,
    probes: int = 32,
    patience: int | None = None,
    stop_on_success: bool = True,
    nonfinite: str = "stop",
    folder: str | os.PathLike[str] | None = None,
    checkpoint: int = 1000,
    keep: int = 2,
    resume: bool = False,
    fallback: bool = False,
    display: Display | bool = False,
    loggers: Sequence[Callable[[Row], None]] = (),
    description: dict[str, Any] | None = None,
    command: str | None = None,
) -> Result:
    """Train a network on a task.

    gradient    BPTT() (default), Penalised(G, weight), Truncated(k1, k2), RTRL()
    optimiser   co.optimisers.adam(1e-3) by default
    steps       at most so many; batch: sequences of a step, drawn `accumulate` times and averaged
    clip        the largest norm of a gradient; a larger one is scaled down. clip_value: the largest entry, others are cut;
                clip_mean: the largest norm as a multiple of the running mean of norms
    weight_noise  standard deviation of what is added to the weights while a gradient is computed, new in each step
    easiest     a curriculum by difficulty, co.training.curriculum.Easiest(start, steps)
    gradients, seconds   budgets: the run ends when those that are given are spent, all of them. A gradient is that of one
                sequence by backpropagation, two sweeps; other work counts by its sweeps
    every       steps between looks: held-out metrics on `tests` sequences (finite tasks: all), costates on `probes` of them
    confirm     sequences that confirm a success (generated tasks)
    patience    stop after so many looks without a better held-out metric
    nonfinite   a loss or gradient that is not finite never enters the weights: "stop", "skip" it, or skip and "dump" a replay
    folder      where to write metrics, checkpoints (every `checkpoint` steps; the last `keep` and the best stay) and the model;
                with resume=True the run in that folder goes on, bit for bit, given the same arguments
    display     True: a bar on a terminal, lines elsewhere; or any object with step, look, say and close
    """
    t = Training(**{name: value for name, value in locals().items() if name not in ("resume", "fallback")})
    with closing(t.show), t.writing(resume, fallback), interruptible(t.go_on) as stopped:
        if t.step == 0:
            t.look()
        while not t.over:
            t.advance()
            if t.step % every == 0 or t.over:
                t.look()
            if stopped and not t.over:
                t.save()
                raise t.interrupted(stopped[0])
            if t.due:
                t.save()
        return t.finish()


@dataclass
class Training:
    """A run in progress: the arguments of `train`, and what they have become."""

    net: Net
    task: Task
    gradient: Method | None
    optimiser: Optimiser | HessianFree | None
    steps: int
    batch: int
    accumulate: int
    clip: float | None
    clip_value: float | None
    clip_mean: float | None
    weight_noise: float
    easiest: Easiest | None
    gradients: int | None
    seconds: float | None
    seed: int
    every: int
    tests: int
    confirm: int
    probes: int
    patience: int | None
    stop_on_success: bool
    nonfinite: str
    folder: Any
    checkpoint: int
    keep: int
    display: Display | bool
    loggers: Sequence[Callable[[Row], None]]
    description: dict[str, Any] | None
    command: str | None

    def __post_init__(self) -> None:
        net, task = self.net, self.task
        if not isinstance(net, Net) or not isinstance(task, Task):
            raise KindError(
                f"train takes a Network (or a Stack, an EncoderDecoder) and a Task; got {type(net).__name__} and {type(task).__name__}."
            )
        for what, ours, theirs in (
            ("inputs", net.inputs, task.inputs),
            ("outputs", net.outputs, task.outputs),
            ("readout", net.readout, task.readout),
            ("output", net.output, task.output),
        ):
            if ours != theirs:
                raise InputError(f"task '{task.name}' needs a network with {what}={theirs!r}; this one has {ours!r}.")
        for name in ("steps", "batch", "accumulate", "every", "tests", "confirm", "probes", "checkpoint", "keep"):
            setattr(self, name, whole(name, getattr(self, name)))
        if self.patience is not None:
            whole("patience", self.patience)
        check_run(self.folder, self.display, self.description, self.command)
        if not isinstance(self.loggers, Sequence) or not all(callable(log) for log in self.loggers):
            raise KindError(f"loggers must be a list of functions of a row; got {brief(self.loggers)}.")
        for name in ("clip", "clip_value", "clip_mean", "gradients", "seconds"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InputError(f"{name} must be a positive number; got {value!r}.")
        if not (isinstance(self.weight_noise, int | float) and 0 <= self.weight_noise < math.inf):
            raise InputError(f"weight_noise must be a finite number, at least 0; got {self.weight_noise!r}.")
        choose("nonfinite policy", self.nonfinite, POLICIES)
        rng(self.seed)
        # Finite tasks are watched on "valid" alone; fresh sequences of a generated one tell nothing about later ones.
        self.watched = "valid" if "valid" in task.splits else "test" if task.size is None else None
        if self.patience is not None and self.watched is None:
            raise InputError("patience needs a validation set: give one, or leave patience out.")
        self.method = self.gradient or BPTT()
        for name, kind, example in (
            ("gradient", Method, "co.BPTT()"),
            ("optimiser", Optimiser | HessianFree, "co.optimisers.adam(1e-3)"),
            ("easiest", Easiest, "co.training.curriculum.Easiest(0.5, 1000)"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise KindError(f"{name} must be like {example}; got {value!r}.")
        self.recipe = recipe_of(self.optimiser or adam(1e-3))
        if self.recipe.name in OWN_PACE and (self.clip or self.clip_value or self.clip_mean):
            raise InputError(f"optimiser '{self.recipe.name}' finds its own way: it takes no clipping.")
        if self.recipe.name in PACELESS and self.weight_noise:
            raise InputError(f"optimiser '{self.recipe.name}' takes the weights as they are: it takes no weight_noise.")
        if self.recipe.direction != "steepest" and isinstance(self.method, Truncated):
            raise InputError("the temporal direction takes the whole gradient apart: use BPTT, not Truncated.")
        self.stepper = self.recipe.stepper(net)
        if isinstance(self.display, bool):
            self.show: Display = bar(task.name, self.steps, task.metric) if self.display else Silent()
        else:
            self.show = self.display
        self.folder = None if self.folder is None else Path(self.folder)
        self.step, self.past, self.over, self.due = 0, Progress(), False, False
        self.kept: int | None = None  # the step of the last checkpoint
        self.status = "finished"
        self.rows: list[Row] = []  # of a run without a folder; others have theirs on the disk alone
        self.best_weights: dict[str, Tensor] | None = None
        self.storage: run_folder.Held | None = None
        self.metrics: json_rows.Rows | None = None
        self.clock: json_rows.Rows | None = None
        self.started = time.monotonic()
        torch.manual_seed(self.seed)

    # one step

    def advance(self) -> None:
        """theta <- theta + (the optimiser's step), or not at all if something is not finite."""
        self.step += 1
        try:
            found = self.evaluate(self.step - 1)
            size = norm(found.gradient)
            long = size if found.direction is found.gradient else norm(found.direction)
            if not (math.isfinite(found.loss) and math.isfinite(size) and math.isfinite(long)):
                raise NumericalError(self.blame(found.loss, found.gradient))
        except NumericalError as error:
            return self.reject(str(error))
        direction, clipped = self.clipped(found.direction)
        rate = self.recipe.lr * self.recipe.schedule(self.step - 1, self.steps) * self.past.factor
        parameters = dict(self.net.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            told = self.stepper.step(self.point(found, direction), rate)
        except NumericalError as error:
            self.net.load_state_dict(before, strict=False)
            return self.reject(str(error))
        bad = [name for name, p in parameters.items() if not torch.isfinite(p).all()]
        if bad:
            return self.undo(before, f"{', '.join(bad)} is not finite after the optimiser's step: lower the step size")
        row = {"kind": "train", "step": self.step, "loss": found.loss, "penalty": found.penalty, "rho": found.rho}
        paced = {} if self.recipe.name in PACELESS else {"rate": rate}
        row |= {"gradient": size, **paced} | ({"clipped": True} if clipped else {}) | told
        if self.recipe.direction != "steepest":
            row["distance"] = distance(found.direction, found.gradient)
        self.log(row)
        self.show.step(self.step, row)
        self.due = self.due or self.step % self.checkpoint == 0
        self.over = self.step >= self.steps or self.spent
        return None

    def evaluate(self, step: int) -> Found:
        """What a step begins with. Its batches and random numbers are kept, for what its optimiser asks later."""
        if hasattr(self.method, "step"):
            self.method.step = step
        self.random = torch.get_rng_state()
        self.batches = tuple(self.move(self.draw(step, k)) for k in range(self.accumulate))
        return self.differentiate(step)

    def draw(self, step: int, k: int) -> Batch:
        """Batch k of a step."""
        number = step * self.accumulate + k
        if self.easiest is None:
            return self.task.batch(number, self.batch, self.seed)
        drawn = round(self.batch / self.easiest.share(step))
        if self.easiest.by == "loss" and drawn > self.batch:
            self.spend(drawn / 2)
        return self.easiest.choose(self.net, self.task, step, self.batch, self.seed, number)

    def differentiate(self, step: int) -> Found:
        """The objective and its gradient on the batches of a step."""
        found: list[tuple[float, Evaluation, Gradient]] = []
        steepest, propose = self.recipe.direction == "steepest", DIRECTIONS[self.recipe.direction]
        with perturbed(self.net, self.weight_noise, self.seed, step):
            for k, b in enumerate(self.batches):
                sweeps = self.method.sweeps(self.net, int(b.sizes.max())) + (not steepest)  # one more for its costates
                self.spend(len(b.sizes) * sweeps / 2)
                e = self.method.evaluate(self.net, b, self.task.loss)
                d = e.gradient if steepest else propose(e, rng(self.seed, "direction", step, k))
                found.append((len(e.losses), e, d))
        finite = lambda e: all(torch.isfinite(v).all() for v in (e.losses, *e.gradient.values()))
        self.latest = next((e for _, e, _ in found if len(found) > 1 and not finite(e)), e)
        total = sum(n for n, _, _ in found)
        mean = lambda of: of(*found[0][1:]) if len(found) == 1 else sum(n / total * of(e, d) for n, e, d in found)
        gradient = {name: mean(lambda e, d, name=name: e.gradient[name]) for name in e.gradient}
        direction = gradient if steepest else {name: mean(lambda e, d, name=name: d[name]) for name in e.gradient}
        figures = (float(mean(of)) for of in (lambda e, d: e.loss, lambda e, d: e.penalty, lambda e, d: e.objective))
        loss, penalty, whole = figures
        return Found(loss, penalty, e.rho, whole, gradient, direction)

    def point(self, found: Found, direction: Gradient) -> Point:
        """What the optimiser may ask: on the batches of this step, with the random numbers that its gradient had."""
        step = self.step - 1

        @contextmanager
        def same() -> Iterator[None]:
            after = torch.get_rng_state()
            torch.set_rng_state(self.random)
            try:
                yield
            finally:
                torch.set_rng_state(after)

        def value() -> float:
            with same(), perturbed(self.net, self.weight_noise, self.seed, step):
                each = [self.method.value(self.net, b, self.task.loss) for b in self.batches]
            sizes = [len(b.sizes) for b in self.batches]
            self.spend(sum(sizes) * (1.0 if isinstance(self.method, Penalised) else 0.5))
            return sum(n * v for n, v in zip(sizes, each, strict=True)) / sum(sizes)

        def evaluate() -> tuple[float, Gradient]:
            state = dict(self.method.state)  # what a step measures, it measures where it begins
            try:
                with same():
                    here = self.differentiate(step)
            finally:
                self.method.state.update(state)
            return here.objective, here.gradient

        def curvature() -> Batch:
            b, n = self.batches[0], self.recipe.options.get("curvature")
            return b if n is None or n >= len(b.sizes) else b.select(range(n), self.task.readout)

        return Point(
            self.net, found.objective, found.gradient, direction, value, evaluate, self.task.loss, self.batches, curvature,
            self.spend,
        )  # fmt: skip

    def spend(self, work: float) -> None:
        self.past.work += work

    def clipped(self, d: Gradient) -> tuple[Gradient, bool]:
        """The direction with its entries and its norm cut, and whether they were."""
        most, past = self.clip_value, self.past
        cut = most is not None and any(bool((g.abs() > most).any()) for g in d.values())
        d = {name: g.clamp(-most, most) for name, g in d.items()} if cut and most is not None else d
        if self.clip is None and self.clip_mean is None:
            return d, cut
        size, bound = norm(d), self.clip or math.inf
        if self.clip_mean is not None and past.norms > 0:
            bound = min(bound, self.clip_mean * past.norms)
        if size > bound:
            d, cut = {name: g * (bound / size) for name, g in d.items()}, True
        # over about the last 100 steps; an explosion counts no more than ten of them, so that the next ones do not pass
        known = min(size, 10 * past.norms) if past.norms > 0 else size
        past.norms += (known - past.norms) / min(self.step, 100)
        return d, cut

    @property
    def spent(self) -> bool:
        """Are all budgets that were given used up?"""
        given = [(self.gradients, self.past.work), (self.seconds, self.elapsed())]
        left = [used < most for most, used in given if most is not None]
        return bool(left) and not any(left)

    def move(self, b: Batch) -> Batch:
        return self.net.moved(b)

    def blame(self, loss: float, gradient: Gradient) -> str:
        """Which tensor is not finite, and from which time step on."""
        bad = [f"the gradient of {name}" for name, g in gradient.items() if not torch.isfinite(g).all()]
        what = ", ".join(([f"the loss ({loss})"] if not math.isfinite(loss) else []) + bad)
        where = "" if self.weight_noise else first_fault(self.latest)  # the weights are not those it was found at
        return f"{what or 'the norm of the gradient'} is not finite{where}"

    def reject(self, reason: str) -> None:
        """Leave weights, optimiser and random numbers as they were before this step."""
        words = f"step {self.step}: {reason.rstrip('.')}"
        torch.set_rng_state(self.random)
        self.past.skipped += 1
        if self.folder is not None and self.nonfinite != "skip":
            before = self.step - 1
            parent = self.folder / "replay"
            if not files.inner(parent):
                with files.storing(parent):
                    parent.mkdir()
            if not files.inner(parent / storage.name_of(before)):
                storage.save(parent, self.snapshot(before, reason))
            words += f". See it again: coadjoint replay {shlex.quote(str(self.folder))}"
        if self.nonfinite == "stop":
            self.step -= 1
            self.past.skipped -= 1
            if self.folder is not None:
                self.save()
                self.write_result("failed", words)
            raise NumericalError(f"{words}. The weights are those before this step.")
        self.log({"kind": "train", "step": self.step, "skipped": reason})
        self.show.say(words)
        self.due = self.due or self.step % self.checkpoint == 0
        self.over = self.step >= self.steps or self.spent

    def undo(self, weights: dict[str, Tensor], reason: str) -> None:
        """Put the weights back after a step of the optimiser that left the range of their type, and stop: its own state is lost."""
        self.net.load_state_dict(weights, strict=False)
        self.step -= 1
        words = f"step {self.step + 1}: {reason}"
        if self.folder is not None:
            self.write_result("failed", words)
        raise NumericalError(f"{words}. The weights are those before this step.")

    # a look around

    def look(self) -> None:
        """Held-out metrics, costates, success, patience."""
        shown: list[Row] = []
        for split in self.task.splits if self.watched != "valid" else ("valid",):
            values = self.judge(split, self.step, self.tests)
            shown.append(self.held_out(split, values))
            if split == self.watched and self.step > 0:
                self.watch(values)
        self.log(probe := self.probe())
        self.past.seconds = self.elapsed()
        if self.clock is not None:
            self.clock.append({"step": self.step, "seconds": round(self.past.seconds, 3)})
        if self.metrics is not None:
            self.metrics.flush()
        self.show.look(self.step, [*shown, probe])

    def judge(self, split: str, draw: int | str, n: int) -> dict[str, float]:
        """Metrics of a held-out set; NaN where states leave their range: whether the run stops is for its own steps to say."""
        try:
            return evaluate(self.net, self.task, split, self.seed, draw, n)
        except NumericalError as error:
            self.show.say(f"step {self.step}, {split}: {error}")
            goal = self.task.goal.metric if self.task.goal else "loss"
            return {"sequences": 0, **dict.fromkeys(("loss", self.task.metric, goal), math.nan)}

    def held_out(self, split: str, values: dict[str, float]) -> Row:
        row = {"kind": "held-out", "split": split, "step": self.step, **values}
        self.log(row)
        return row

    def watch(self, values: dict[str, float]) -> None:
        task, past, value = self.task, self.past, values[self.task.metric]
        goal = task.goal is not None and task.goal.met(values[task.goal.metric])
        if goal and task.size is None and self.confirm > self.tests:
            split = str(self.watched)
            values = self.judge(split, f"confirm {self.step}", self.confirm)
            self.held_out(split, values)
            goal = task.goal is not None and task.goal.met(values[task.goal.metric])
        worst = math.inf if task.lower else -math.inf
        best = worst if past.best is None else past.best
        better = value < best if task.lower else value > best  # never, of a NaN
        equal = value == past.best and values["loss"] < past.best_loss  # an accuracy has many equals: the loss decides
        if better or equal or goal:
            past.best, past.best_step, past.waited, self.due = value, self.step, 0, True
            past.best_loss = values["loss"]
            self.best_weights = {name: p.detach().clone() for name, p in self.net.state_dict().items()}
        else:
            past.waited += 1
        if self.recipe.schedule.patience is not None:
            self.wait_for_loss(values["loss"])
        if goal and past.success_step is None:
            past.success_step, past.success_seconds, past.success_work = self.step, self.elapsed(), past.work
            if self.stop_on_success:
                self.status, self.over = "success", True
        if self.patience is not None and past.waited >= self.patience and not self.over:
            self.status, self.over = "early-stopped", True

    def wait_for_loss(self, loss: float) -> None:
        """The plateau schedule: count looks without a better loss, and lower the step size."""
        past, schedule = self.past, self.recipe.schedule
        if loss < (math.inf if past.plateau is None else past.plateau):
            past.plateau, past.plateau_waited = loss, 0
            return
        past.plateau_waited += 1
        assert schedule.patience is not None
        if past.plateau_waited >= schedule.patience:
            past.factor, past.plateau_waited = past.factor * schedule.decay, 0

    def probe(self) -> Row:
        """What the gradient does inside the sequence: costates, temporal components, W's spectral radius."""
        split = self.watched or (self.task.splits[0] if self.task.splits else "train")
        b = self.move(next(self.task.held_out(split, self.seed, "probe", self.probes)))
        try:
            found = look_inside(self.net, b, self.task)
        except NumericalError as error:
            found = {"t": [], "log10_costates": [], "temporal": None, "decay": None, "radius": None, "gradients": {}}
            found["fault"] = str(error)
        return {"kind": "probe", "step": self.step, **found}

    # storage

    def log(self, row: Row) -> None:
        if self.metrics is not None:
            self.metrics.append(row)
        else:
            self.rows.append(row)
        for logger in self.loggers:
            logger(row)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @contextmanager
    def writing(self, resume: bool, fallback: bool) -> Iterator[None]:
        """Hold the run folder: one writer, files open, the past read back if the run goes on."""
        if self.folder is None:
            if resume:
                raise InputError("resume=True needs the folder of the run.")
            yield
            return
        need = 4 * sum(p.numel() * p.element_size() for p in self.net.parameters()) + 2**20
        about = lambda: environment.environment(self.seed, str(next(self.net.parameters()).device), self.command)
        call = (self.folder, resume, fallback, need, about, self.check, self.restore, self.show.say, self.most)
        with run_folder.held(*call) as opened:
            self.storage, self.metrics, self.clock = opened, opened.metrics, opened.clock
            if opened.past:
                self.check_rows()
            yield

    def check_rows(self) -> None:
        """The rows before a checkpoint are those of a run: every line has the form that `log` writes."""
        assert self.folder is not None
        door = storage.schemas()
        for name, schema in (("metrics.jsonl", door.MetricsRow), ("clock.jsonl", door.ClockRow)):
            for _ in door.read_rows(self.folder / name, schema):
                pass

    @property
    def most(self) -> int:
        """Bytes that no file of a checkpoint of this run exceeds: weights, the best ones, and what optimisers keep of each
        weight; L-BFGS keeps two numbers of it for each step it remembers."""
        weights = sum(t.numel() * max(8, t.element_size()) for t in self.net.state_dict().values())
        return 2**26 + weights * (8 + 2 * self.recipe.settings.get("history_size", 0))

    def snapshot(self, step: int, reason: str | None = None) -> storage.Checkpoint:
        """Everything the next step depends on."""
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        numbers: dict[str, Any] = {}
        for name, value in self.stepper.state.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{name}"] = value
            else:
                numbers[name] = value
        if self.best_weights is not None and self.past.best_step != step:
            tensors |= {f"best.{name}": value for name, value in self.best_weights.items()}
        state = {
            "progress": asdict(self.past),
            "over": self.over,
            "status": self.status,
            "optimiser": numbers,
            "method": dict(self.method.state),
            "seed": self.seed,
            "description": json_rows.plain(self.description),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "metrics": self.metrics.position if self.metrics else None,
            "clock": self.clock.position if self.clock else None,
            "reason": reason,
        }
        return storage.Checkpoint(step, dict(self.net.state_dict()), tensors, state)

    def save(self) -> None:
        self.due = False
        if self.folder is None:
            return
        assert self.storage is not None
        self.storage.sync()
        if self.kept != self.step:
            self.past.seconds = self.elapsed()
            storage.save(self.folder / "checkpoints", self.snapshot(self.step), self.description or {})
            self.kept = self.step
        storage.prune(self.folder, self.keep, self.past.best_step)

    def check(self, saved: storage.Checkpoint) -> None:
        """Refuse a checkpoint that lacks something of what `restore` and the next step need, by its name, type or shape."""
        door = storage.schemas()
        state = door.check("state.json", saved.state, door.TrainingState)
        if state["description"] != json.loads(json_rows.dumps(self.description)):
            return  # another run's: `restore` says what has changed
        compare_tensors(self.net.state_dict(), saved.model, "its model.safetensors")
        past, tensors = state["progress"], saved.tensors
        parts = {"optimiser", "rng"}
        if past["best_step"] not in (None, saved.step):
            parts.add("best")
            complain(
                restoring.misfit(self.net.state_dict(), part("best", tensors)), "state.safetensors, best weights: "
            )
        complain(restoring.misfit({"rng": torch.get_rng_state()}, {k: v for k, v in tensors.items() if k == "rng"}))
        for name in tensors:
            if name.partition(".")[0] not in parts:
                complain(f"{name!a} does not belong to it")
        # A replay was saved after the step that it shows had been counted as skipped.
        skipped = past["skipped"] - (state["reason"] is not None)
        whole = {**part("optimiser", tensors), **numbers(state["optimiser"])}
        complain(self.stepper.complaint(self.net, whole, saved.step > skipped), "its optimiser: ")
        kept = state.get("method", {})
        if set(kept) != set(self.method.state):
            names = ", ".join(sorted(self.method.state)) or "nothing"
            complain(f"'method' should hold {names}", "state.json: ")

    def restore(self, saved: storage.Checkpoint) -> None:
        state = saved.state
        if state["description"] != json.loads(json_rows.dumps(self.description)):
            what = difference(state["description"], json.loads(json_rows.dumps(self.description)))
            raise StorageError(
                f"{self.folder} cannot go on: {what} has changed since it began. Restore it, or start a new run."
            )
        fit(self.net, saved.model, f"checkpoint {storage.name_of(saved.step)} of {self.folder}")
        self.stepper.restore({**part("optimiser", saved.tensors), **numbers(state["optimiser"])})
        self.method.state.update(state.get("method", {}))
        try:
            torch.set_rng_state(saved.tensors["rng"])
        except RuntimeError:
            complain("its random numbers are damaged ('rng' of state.safetensors)", f"{self.folder} cannot go on: ")
        past = numbers(state["progress"])
        self.step, self.kept, self.past, self.status = saved.step, saved.step, Progress(**past), state["status"]
        self.over = self.step >= self.steps or (state["over"] and self.status != "finished")
        self.started = time.monotonic() - self.past.seconds
        self.over = self.over or self.spent
        if self.past.best_step is not None:
            last = self.past.best_step == saved.step
            self.best_weights = saved.model if last else part("best", saved.tensors)
        for what, here in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
            if state[what] != here:
                self.show.say(
                    f"{what} was {state[what]} and is {here}: the run goes on, but not necessarily in the same bits."
                )

    @property
    def go_on(self) -> str:
        if self.folder is None:
            return "Nothing is saved without a run folder."
        return f"Go on with: coadjoint resume {shlex.quote(str(self.folder))}"

    def interrupted(self, name: str) -> CoadjointError:
        if self.folder is None:
            return Interrupted(f"{name} at step {self.step}: nothing is saved without a run folder.")
        self.write_result("interrupted", f"{name} at step {self.step}")
        return Interrupted(f"{name}: saved at step {self.step}. {self.go_on}")

    # the end

    def finish(self) -> Result:
        """The best weights where a held-out set chose them, the last ones otherwise; their metrics on every split."""
        self.save()
        if self.best_weights is not None:
            self.net.load_state_dict(self.best_weights)
        splits = ("train", *self.task.splits) if self.task.size is not None else self.task.splits
        n = self.confirm if self.task.size is None else self.tests
        metrics = {s: self.judge(s, "final", n) for s in splits}
        for values in metrics.values():
            values.pop("sequences")
        p = self.past
        told = (
            self.rows if self.metrics is None else json_rows.Written(self.metrics.path.absolute(), self.metrics.bytes)
        )
        result = Result(
            self.net, self.status, self.step, p.seconds, p.success_step is not None, p.success_step, p.success_seconds,
            p.success_work, p.best_step, p.skipped, p.work, metrics, told, self.folder,
        )  # fmt: skip
        if self.folder is not None:
            model = storage.pack_model(dict(self.net.state_dict()), self.description or {})
            files.replace(self.folder / "model.safetensors", model)
            self.write_result(self.status, None, metrics)
        return result

    def distances(self) -> dict[str, float] | None:
        """Of a direction that is not the gradient: how far from it, on the unit sphere; below 1 Galvan's condition for
        convergence can hold."""
        if self.recipe.direction == "steepest":
            return None
        count, below, most = 0, 0, -math.inf

        def counted() -> Iterator[float]:
            nonlocal count, below, most
            for far in self.far():
                count += 1
                below += far < 1
                most = max(most, far)
                yield far

        total = sum(counted())
        return {"mean": total / count, "most": most, "below_one": below / count} if count else None

    def far(self) -> Iterator[float]:
        """The distances of all steps so far that are finite, those before a resume too."""
        rows: Iterable[Row] = self.rows
        if self.metrics is not None:
            path = self.metrics.path
            rows = (json_rows.row(line, path) for line in self.metrics.lines() if b'"distance":' in line)
        for row in rows:
            far = row.get("distance")
            if isinstance(far, float) and math.isfinite(far):
                yield far

    def write_result(self, status: str, reason: str | None, metrics: Any = None) -> None:
        p = self.past
        found = {
            "status": status,
            "step": self.step,
            "seconds": round(self.elapsed(), 3),
            "reason": reason,
            "success": p.success_step is not None,
            "success_step": p.success_step,
            "success_seconds": p.success_seconds,
            "success_work": p.success_work,
            "work": p.work,
            "distance": self.distances(),
            "goal": str(self.task.goal) if self.task.goal else None,
            "metric": self.task.metric,
            "best_step": p.best_step,
            "skipped": p.skipped,
            "metrics": metrics or {},
            "parameters": sum(q.numel() for q in self.net.parameters()),
            "examples": examples(self.net, self.task, self.seed) if metrics else [],
        }
        files.replace(self.folder / "result.json", json_rows.dumps(found, indent=1))


def again(net: Net, task: Task, saved: storage.Checkpoint, arguments: dict[str, Any]) -> Found:
    """The gradient of the step after a checkpoint, computed as the run did; NumericalError if it is not finite."""
    nothing: dict[str, Any] = dict.fromkeys(Training.__dataclass_fields__)
    usual = {"loggers": (), "display": False, "weight_noise": 0.0}
    t = Training(**nothing | usual | arguments | {"net": net, "task": task})
    t.check(saved)
    t.restore(saved)
    found = t.evaluate(saved.step)
    if not (math.isfinite(found.loss) and all(torch.isfinite(g).all() for g in found.gradient.values())):
        raise NumericalError(t.blame(found.loss, found.gradient))
    return found


@contextmanager
def perturbed(net: Net, std: float, seed: int, step: int) -> Iterator[None]:
    """Inside, the trained weights have noise of a step added; after it they are what they were."""
    if not std:
        yield
        return
    draw, before = rng(seed, "weight-noise", step), {name: p.detach().clone() for name, p in trained(net).items()}
    with torch.no_grad():
        for p in trained(net).values():
            p.add_(torch.from_numpy(draw.standard_normal(p.shape)).to(p), alpha=std)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in trained(net).items():
                p.copy_(before[name])
