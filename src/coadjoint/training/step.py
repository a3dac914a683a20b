"""One training step: its batches, the objective and its gradient on them, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NumericalError
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation, Gradient, LateNumbers
from ..gradients.method import trained_parameters
from ..gradients.penalised import Penalised
from ..gradients.shared import unshared
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..optimisers.directions import DIRECTIONS, norm, norms_of_parts
from ..optimisers.steppers import Point
from ..sweeps.checks import Check, answers_late, leave_replays, raise_error
from ..sweeps.torch_internals import copy_all, named_parameters, norms_of, scale_all
from ..tasks.task import Task, rng
from . import validation
from .ahead import DrawnAhead, MovedAhead
from .plan import TrainingPlan
from .progress import Progress

MEAN_STEPS = 100  # about how many steps the running mean of gradient norms covers
MAX_GROWTH = 10  # a norm enters that mean as at most this multiple of it


@dataclass(frozen=True)
class StepResult:
    """The objective and its gradient at the start of a step: means over all its samples."""

    loss: float
    penalty: float
    rho: float
    objective: float
    gradient: Gradient
    direction: Gradient  # what the optimiser follows: the gradient, or another direction


class Launched(NamedTuple):
    """The gradient of a step, launched; its figures are on their way from the device.

    numbers: loss, penalty and objective; then the norms of the parts of the gradient and, if it is
    another, of the direction, where they are needed; then whether the checks hold.
    """

    rho: float
    gradient: Gradient
    direction: Gradient
    numbers: LateNumbers
    checks: Sequence[Check]

    def wait(self) -> tuple[StepResult, list[float]]:
        """The result, and the norms; raises the error of a check that fails."""
        loss, penalty, objective, *rest = self.numbers.wait()
        count = len(rest) - len(self.checks)
        for check, holds in zip(self.checks, rest[count:], strict=True):
            if not holds:
                raise_error(check.make_error())
        result = StepResult(loss, penalty, self.rho, objective, self.gradient, self.direction)
        return result, rest[:count]


class StepEvaluator:
    """Draws the batches of each step and differentiates the objective on them.

    The batches of a step are kept until the next one: its optimiser may evaluate them again.
    """

    rng_state: Tensor  # of torch's generator, before the step
    batches: tuple[Batch, ...]
    suspect: Evaluation  # the first evaluation that is not finite, or else the last one

    def __init__(self, net: Net, task: Task, plan: TrainingPlan, progress: Progress) -> None:
        """progress: of the run; its `work` and `norms` are kept up to date here."""
        self.net = net
        self.task = task
        self.plan = plan
        self.progress = progress
        self.method = plan.method
        self.recipe = plan.recipe
        drawn = DrawnAhead(task, plan.batch, plan.seed, plan.steps * plan.accumulate)
        self.moved = MovedAhead(net, drawn)
        # Some gradients can be launched without an answer: one replay, whose checks are made before
        # anything else is computed from it.
        is_single = plan.accumulate == 1 and not plan.weight_noise
        is_plain = type(self.method) in (BPTT, Penalised) and self.recipe.direction == "steepest"
        self.leaves_checks = is_single and is_plain

    def evaluate(self, step: int) -> Launched:
        """Draw the batches of a step (counted from 0) and launch the gradient on them."""
        if hasattr(self.method, "step"):  # a penalty's weight may depend on it
            self.method.step = step
        self.rng_state = torch.get_rng_state()  # `_same_random_numbers` goes back to it
        self.batches = tuple(self.draw_batch(step, k) for k in range(self.plan.accumulate))
        if not self.leaves_checks:
            return self.launch(step, measured=True)
        with leave_replays() as checks:
            return self.launch(step, checks, measured=True)

    def evaluate_finite(
        self, step: int, meanwhile: Callable[[], None] | None = None
    ) -> tuple[StepResult, float, float]:
        """The result of `evaluate`, and the norms of its gradient and of its direction.

        Raises NumericalError if the loss, the gradient or the direction is not finite. meanwhile:
        is called while a GPU is at work.
        """
        launched = self.evaluate(step)
        if meanwhile is not None:
            meanwhile()
        if self.plan.easiest is None and self.plan.accumulate == 1:
            self.moved.prepare(step + 1)
        result, norms = launched.wait()
        count = len(result.gradient)
        gradient_norm = math.hypot(*norms[:count])
        direction_norm = gradient_norm
        if result.direction is not result.gradient:
            direction_norm = math.hypot(*norms[count:])
        if not all(map(math.isfinite, (result.loss, gradient_norm, direction_norm))):
            raise NumericalError(self.describe_nonfinite(result))
        return result, gradient_norm, direction_norm

    def draw_batch(self, step: int, k: int) -> Batch:
        """Batch k of the `accumulate` batches of a step, chosen by the curriculum if any.

        It is in the network's type, on its device.
        """
        plan = self.plan
        number = step * plan.accumulate + k  # the batches of all steps are counted through
        if plan.easiest is None:
            return self.moved.batch(number)
        candidates = round(plan.batch / plan.easiest.share(step))
        if plan.easiest.by == "loss" and candidates > plan.batch:
            self.count_work(candidates / 2)  # one forward sweep, half a gradient, for each
        easiest = plan.easiest.choose(self.net, self.task, step, plan.batch, plan.seed, number)
        return self.net.move_batch(easiest)

    def launch(self, step: int, checks: Sequence[Check] = (), measured: bool = False) -> Launched:
        """The objective and its gradient on the batches of this step, at the present weights.

        They are means over all samples. A direction other than "steepest" is computed as well.
        checks: where a replay leaves those to be made by `Launched.wait`. measured: the norms are
        needed, too.
        """
        seed = self.plan.seed
        steepest = self.recipe.direction == "steepest"
        propose = DIRECTIONS[self.recipe.direction]
        evaluations: list[Evaluation] = []
        directions: list[Gradient] = []
        sizes: list[int] = []  # samples in each batch
        with weight_noise(self.net, self.plan.weight_noise, seed, step):
            for k, batch in enumerate(self.batches):
                samples, longest = batch.extent
                sweeps = self.method.sweeps(self.net, longest)
                if not steepest:
                    sweeps += 1  # for the costates that the direction is made of
                self.count_work(samples * sweeps / 2)
                evaluation = self.method.evaluate(self.net, batch, self.task.loss)
                evaluations.append(evaluation)
                sizes.append(len(evaluation.losses))
                if not steepest:
                    # It may need costates, and those belong to the weights with their noise.
                    directions.append(propose(evaluation, rng(seed, "direction", step, k)))
        self.suspect = find_suspect(evaluations)
        total = sum(sizes)
        weights = [size / total for size in sizes]
        gradient = in_own_memory(mean_gradient(weights, [each.gradient for each in evaluations]))
        direction = gradient
        if not steepest:
            direction = in_own_memory(mean_gradient(weights, directions))
        scalars = [
            weighted_mean(weights, [each.loss for each in evaluations]),
            weighted_mean(weights, [each.penalty for each in evaluations]),
            weighted_mean(weights, [each.objective for each in evaluations]),
        ]
        if measured:
            scalars += norms_of_parts(gradient)
        if measured and not steepest:
            scalars += norms_of_parts(direction)
        for check in checks:
            assert isinstance(check.holds, Tensor)  # a replay of a gradient counts no failures
            scalars.append(check.holds)
        numbers = LateNumbers(scalars)
        return Launched(evaluations[-1].rho, gradient, direction, numbers, checks)

    def point(self, step: int, result: StepResult, direction: Gradient) -> Point:
        """What the optimiser steps from: the objective, its gradient, and the (clipped) direction.

        Line searches and second-order methods also need values, gradients and curvature at other
        weights; the functions in it use the batches and the random numbers of this step.
        """
        return Point(
            self.net,
            result.objective,
            result.gradient,
            direction,
            value=partial(self._objective, step),
            evaluate=partial(self._objective_and_gradient, step),
            loss=self.task.loss,
            batches=self.batches,
            curvature=self._curvature_batch,
            spend=self.count_work,
        )

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Inside, torch draws what it drew for this step's gradient: dropout is the same."""
        present = torch.get_rng_state()
        torch.set_rng_state(self.rng_state)
        try:
            yield
        finally:
            torch.set_rng_state(present)

    def _objective(self, step: int) -> float:
        """The objective at the present weights: the mean over the samples of this step."""
        noise = weight_noise(self.net, self.plan.weight_noise, self.plan.seed, step)
        with self._same_random_numbers(), noise:
            values = [self.method.value(self.net, b, self.task.loss) for b in self.batches]
        sizes = [len(batch.sizes) for batch in self.batches]
        is_penalised = isinstance(unshared(self.method), Penalised)
        sweeps = 2 if is_penalised else 1  # a penalty needs the costates too
        self.count_work(sum(sizes) * sweeps / 2)
        return sum(n * value for n, value in zip(sizes, values, strict=True)) / sum(sizes)

    def _objective_and_gradient(self, step: int) -> tuple[float, Gradient]:
        """The objective and its gradient at the present weights, those a line search tries."""
        # A method may measure something as it goes (a penalty's weight, say). That belongs to the
        # start of the step, not to the points that a line search tries.
        state = dict(self.method.state)
        try:
            with self._same_random_numbers():
                result, _ = self.launch(step).wait()
        finally:
            self.method.state.update(state)
        return result.objective, result.gradient

    def _curvature_batch(self) -> Batch:
        """The samples for curvature products: the first batch of this step.

        Only its first samples if the optimiser's option "curvature" sets their number.
        """
        batch = self.batches[0]
        most = self.recipe.options.get("curvature")
        if most is None or most >= len(batch.sizes):
            return batch
        return batch.select(range(most), self.task.readout)

    def count_work(self, work: float) -> None:
        """Add to the work done so far, in gradients of one sequence (two sweeps each)."""
        self.progress.work += work

    def clip(self, direction: Gradient, size: float, count: int) -> tuple[Gradient, bool]:
        """Clip the entries of a direction to clip_value, then its norm to clip and clip_mean.

        Returns the direction and whether anything was clipped. clip_mean is a multiple of the
        running mean of norms, which is updated. size: the norm of the direction. count: the steps
        so far, this one included.
        """
        plan = self.plan
        progress = self.progress
        clipped = False
        limit = plan.clip_value
        if limit is not None and any(bool((g.abs() > limit).any()) for g in direction.values()):
            direction = {name: g.clamp(-limit, limit) for name, g in direction.items()}
            size = norm(direction)
            clipped = True
        if plan.clip is None and plan.clip_mean is None:
            return direction, clipped
        bound = plan.clip or math.inf
        if plan.clip_mean is not None and progress.norms > 0:
            bound = min(bound, plan.clip_mean * progress.norms)
        if size > bound:
            direction = scaled(direction, bound / size)
            clipped = True
        # One explosion must not raise the running mean so far that the next one passes unclipped.
        counted = size
        if progress.norms > 0:
            counted = min(size, MAX_GROWTH * progress.norms)
        # the mean over all steps at first, later an exponential one
        progress.norms += (counted - progress.norms) / min(count, MEAN_STEPS)
        return direction, clipped

    def describe_nonfinite(self, result: StepResult) -> str:
        """Which quantities of a step are not finite and, if known, where a state first is not.

        The place is sought in `suspect`, the evaluation of the batch that went wrong.
        """
        faulty = []
        if not math.isfinite(result.loss):
            faulty.append(f"the loss ({result.loss})")
        for name, gradient in result.gradient.items():
            if not torch.isfinite(gradient).all():
                faulty.append(f"the gradient of {name}")
        where = ""
        # With weight noise, the run cannot be repeated: the weights it had are gone. In segments,
        # it is not repeated: all its states would take the memory that segments save.
        if not self.plan.weight_noise and self.plan.method.segments is None:
            where = validation.locate_nonfinite(self.suspect)
        # If every entry is finite, they are so large that the squares in the norm overflow.
        return f"{', '.join(faulty) or 'the norm of the gradient'} is not finite{where}"


def find_suspect(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The first evaluation with a value that is not finite; the last one if there is none."""
    if len(evaluations) > 1:  # a single one needs no search, and so no reading from the device
        for evaluation in evaluations:
            values = (evaluation.losses, *evaluation.gradient.values())
            if not all(torch.isfinite(value).all() for value in values):
                return evaluation
    return evaluations[-1]


def weighted_mean(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """sum_i weights_i values_i; a single value as it is, bit for bit."""
    if len(values) == 1:
        return values[0]
    mean = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        mean = mean + weight * value
    return mean


def scaled(g: Gradient, factor: float) -> Gradient:
    """A gradient times a factor."""
    if not all(map(answers_late, g.values())):
        return {name: y * factor for name, y in g.items()}
    return dict(zip(g, scale_all(list(g.values()), factor), strict=True))


def in_own_memory(g: Gradient) -> Gradient:
    """A gradient on a GPU as arrays in memory of their own; on a CPU as it is.

    What a GPU sums up, and in which order, depends on how an array lies in memory. A gradient that
    is replayed and one that is computed operation by operation must have the same norm.
    """
    if not all(map(answers_late, g.values())):
        return g
    own = {}
    for name, y in g.items():
        is_own = y.is_contiguous() and y.storage_offset() == 0
        own[name] = y if is_own else y.clone(memory_format=torch.contiguous_format)
    return own


def nonfinite_names(parameters: Mapping[str, Tensor]) -> list[str]:
    """The names of the parameters that have an entry which is not finite."""
    return look_for_nonfinite(parameters)()


@torch.no_grad()
def look_for_nonfinite(parameters: Mapping[str, Tensor]) -> Callable[[], list[str]]:
    """Launch what finds `nonfinite_names`; returns a function that waits for them."""
    values = list(parameters.values())
    # A sum or a norm is finite only if all of its terms are. It may overflow where they are finite.
    if all(map(answers_late, values)):
        numbers = LateNumbers(norms_of(values))
    else:
        numbers = LateNumbers([p.sum() for p in values])

    def names() -> list[str]:
        if all(map(math.isfinite, numbers.wait())):
            return []
        return [name for name, p in parameters.items() if not torch.isfinite(p).all()]

    return names


class WeightsBefore:
    """The weights as they were before the present step, in memory that is kept for the run."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.parameters: dict[str, nn.Parameter] = {}
        self.copies: dict[str, Tensor] = {}

    def take(self) -> None:
        """Copy the present weights."""
        parameters = dict(named_parameters(self.net))
        self.parameters = parameters
        if not self.fits(parameters):
            self.copies = {name: torch.empty_like(p) for name, p in parameters.items()}
        with torch.no_grad():
            copy_all(list(parameters.values()), list(self.copies.values()))

    def put_back(self) -> None:
        """Give the network these weights again; its buffers are left alone."""
        self.net.load_state_dict(self.copies, strict=False)

    def fits(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the copies have the names, types and shapes of the parameters."""
        if self.copies.keys() != parameters.keys():
            return False
        for copy, p in zip(self.copies.values(), parameters.values(), strict=True):
            if copy.dtype is not p.dtype or copy.shape != p.shape or copy.device != p.device:
                return False
        return True


def mean_gradient(weights: Sequence[float], gradients: Sequence[Gradient]) -> Gradient:
    """The weighted mean of gradients, parameter by parameter; a single one as it is."""
    if len(gradients) == 1:
        return gradients[0]
    return {name: weighted_mean(weights, [g[name] for g in gradients]) for name in gradients[-1]}


@contextmanager
def weight_noise(net: Net, std: float, seed: int, step: int) -> Iterator[None]:
    """Inside, Gaussian noise is added to the trained weights; afterwards they are as before.

    It has standard deviation `std` and is a function of the seed and the step.
    """
    if not std:
        yield
        return
    generator = rng(seed, "weight-noise", step)
    before = {name: p.detach().clone() for name, p in trained_parameters(net).items()}
    with torch.no_grad():
        for p in trained_parameters(net).values():
            p.add_(torch.from_numpy(generator.standard_normal(p.shape)).to(p), alpha=std)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in trained_parameters(net).items():
                p.copy_(before[name])
