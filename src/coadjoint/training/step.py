"""One step: its batches, the objective and its gradient on them, clipping, and what the optimiser may ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..errors import NumericalError
from ..gradients.evaluation import Evaluation, Gradient
from ..gradients.method import trained_parameters
from ..gradients.penalised import Penalised
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..optimisers.directions import DIRECTIONS, norm
from ..optimisers.steppers import Point
from ..tasks.task import Task, rng
from . import validation
from .plan import TrainingPlan
from .progress import Progress


@dataclass(frozen=True)
class StepResult:
    """What a step begins with: means over the samples of its batches."""

    loss: float
    penalty: float
    rho: float
    objective: float
    gradient: Gradient
    direction: Gradient  # what is proposed in place of the gradient


class StepEvaluator:
    """Computes the steps of a run. What a step has drawn is kept until the next one, for its optimiser."""

    rng_state: torch.Tensor  # the state of torch's random numbers before the step
    batches: tuple[Batch, ...]
    suspect: Evaluation  # of a batch that is not finite, if there is one

    def __init__(self, net: Net, task: Task, plan: TrainingPlan, past: Progress) -> None:
        self.net = net
        self.task = task
        self.plan = plan
        self.progress = past
        self.method = plan.method
        self.recipe = plan.recipe

    def evaluate(self, step: int) -> StepResult:
        """What a step begins with."""
        if hasattr(self.method, "step"):
            self.method.step = step
        self.rng_state = torch.get_rng_state()
        self.batches = tuple(
            self.net.move_batch(self.draw_batch(step, k)) for k in range(self.plan.accumulate)
        )
        return self.differentiate(step)

    def evaluate_finite(self, step: int) -> tuple[StepResult, float]:
        """What a step begins with, and the norm of its gradient; NumericalError if it is not finite."""
        found = self.evaluate(step)
        size = norm(found.gradient)
        long = size if found.direction is found.gradient else norm(found.direction)
        if not (math.isfinite(found.loss) and math.isfinite(size) and math.isfinite(long)):
            raise NumericalError(self.describe_nonfinite(found))
        return found, size

    def draw_batch(self, step: int, k: int) -> Batch:
        """Batch k of a step."""
        plan = self.plan
        number = step * plan.accumulate + k
        if plan.easiest is None:
            return self.task.batch(number, plan.batch, plan.seed)
        drawn = round(plan.batch / plan.easiest.share(step))
        if plan.easiest.by == "loss" and drawn > plan.batch:
            self.count_work(drawn / 2)
        return plan.easiest.choose(self.net, self.task, step, plan.batch, plan.seed, number)

    def differentiate(self, step: int) -> StepResult:
        """The objective and its gradient on the batches of a step."""
        seed = self.plan.seed
        found: list[tuple[float, Evaluation, Gradient]] = []
        steepest = self.recipe.direction == "steepest"
        propose = DIRECTIONS[self.recipe.direction]
        with weight_noise(self.net, self.plan.weight_noise, seed, step):
            for k, b in enumerate(self.batches):
                # a direction of its own takes one more sweep, for its costates
                sweeps = self.method.sweeps(self.net, int(b.sizes.max())) + (not steepest)
                self.count_work(len(b.sizes) * sweeps / 2)
                e = self.method.evaluate(self.net, b, self.task.loss)
                d = e.gradient if steepest else propose(e, rng(seed, "direction", step, k))
                found.append((len(e.losses), e, d))
        finite = lambda e: all(torch.isfinite(v).all() for v in (e.losses, *e.gradient.values()))
        self.suspect = next((e for _, e, _ in found if len(found) > 1 and not finite(e)), e)
        total = sum(n for n, _, _ in found)
        mean = lambda of: (
            of(*found[0][1:]) if len(found) == 1 else sum(n / total * of(e, d) for n, e, d in found)
        )
        gradient = {name: mean(lambda e, d, name=name: e.gradient[name]) for name in e.gradient}
        direction = (
            gradient
            if steepest
            else {name: mean(lambda e, d, name=name: d[name]) for name in e.gradient}
        )
        loss = float(mean(lambda e, d: e.loss))
        penalty = float(mean(lambda e, d: e.penalty))
        objective = float(mean(lambda e, d: e.objective))
        return StepResult(loss, penalty, e.rho, objective, gradient, direction)

    def point(self, step: int, found: StepResult, direction: Gradient) -> Point:
        """What the optimiser may ask: on the batches of this step, with the random numbers that its gradient had."""

        @contextmanager
        def same() -> Iterator[None]:
            after = torch.get_rng_state()
            torch.set_rng_state(self.rng_state)
            try:
                yield
            finally:
                torch.set_rng_state(after)

        def value() -> float:
            with same(), weight_noise(self.net, self.plan.weight_noise, self.plan.seed, step):
                each = [self.method.value(self.net, b, self.task.loss) for b in self.batches]
            sizes = [len(b.sizes) for b in self.batches]
            self.count_work(sum(sizes) * (1.0 if isinstance(self.method, Penalised) else 0.5))
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
            self.count_work,
        )  # fmt: skip

    def count_work(self, work: float) -> None:
        self.progress.work += work

    def clip(self, d: Gradient, count: int) -> tuple[Gradient, bool]:
        """The direction with its entries and its norm cut, and whether they were. count: of the steps so far, with this one."""
        plan, past = self.plan, self.progress
        most = plan.clip_value
        cut = most is not None and any(bool((g.abs() > most).any()) for g in d.values())
        if cut and most is not None:
            d = {name: g.clamp(-most, most) for name, g in d.items()}
        if plan.clip is None and plan.clip_mean is None:
            return d, cut
        size = norm(d)
        bound = plan.clip or math.inf
        if plan.clip_mean is not None and past.norms > 0:
            bound = min(bound, plan.clip_mean * past.norms)
        if size > bound:
            d = {name: g * (bound / size) for name, g in d.items()}
            cut = True
        # over about the last 100 steps; an explosion counts no more than ten of them, so that the next ones do not pass
        known = min(size, 10 * past.norms) if past.norms > 0 else size
        past.norms += (known - past.norms) / min(count, 100)
        return d, cut

    def describe_nonfinite(self, found: StepResult) -> str:
        """Which tensor is not finite, and from which time step on."""
        bad = [
            f"the gradient of {name}"
            for name, g in found.gradient.items()
            if not torch.isfinite(g).all()
        ]
        if not math.isfinite(found.loss):
            bad.insert(0, f"the loss ({found.loss})")
        # with noise, the weights are not those it was found at
        where = "" if self.plan.weight_noise else validation.locate_nonfinite(self.suspect)
        return f"{', '.join(bad) or 'the norm of the gradient'} is not finite{where}"


@contextmanager
def weight_noise(net: Net, std: float, seed: int, step: int) -> Iterator[None]:
    """Inside, the trained weights have noise of a step added; after it they are what they were."""
    if not std:
        yield
        return
    draw = rng(seed, "weight-noise", step)
    before = {name: p.detach().clone() for name, p in trained_parameters(net).items()}
    with torch.no_grad():
        for p in trained_parameters(net).values():
            p.add_(torch.from_numpy(draw.standard_normal(p.shape)).to(p), alpha=std)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in trained_parameters(net).items():
                p.copy_(before[name])
