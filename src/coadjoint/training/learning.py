"""A run that learns from a stream: its steps, metrics, checkpoints and result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import DataError, InputError, KindError, NumericalError, Unsupported, brief
from ..gradients import restoring
from ..gradients.evaluation import Gradient
from ..networks.interface import Net, check_net
from ..objectives.losses import LossLike
from ..optimisers.hessian_free import HessianFree
from ..optimisers.recipes import Optimiser, adam, recipe_of
from ..optimisers.step_rules import Constant
from ..optimisers.steppers import TorchStepper
from ..sweeps.layout import tensor_of
from . import schemas
from .display import make_display
from .json_types import JsonObject, Row
from .plan import LearningPlan
from .restore import parse_numbers, refuse_if_faulty, refuse_if_foreign, select_part
from .run_folder import RunFolder
from .storage import Checkpoint
from .stream_means import RunningMeans, check_scores

ROWS_IN_MEMORY = 1000  # the latest ones


@dataclass(frozen=True)
class Learned:
    """The result of `online.learn`.

    so_far and recent are means of the loss and of each score: over all steps, and over the last.
    """

    network: Net
    status: str  # "ended" with the stream, or "finished" after `steps` steps
    step: int
    updates: int
    seconds: float
    so_far: dict[str, float]
    recent: dict[str, float]
    gradient: Gradient | None  # of held weights: the sum of all gradients
    rows: list[Row] = field(repr=False)  # the latest of metrics.jsonl
    folder: Path | None = None


def as_pair(item: object, step: int) -> tuple[object, object]:
    """An item of a stream as (u_t, y_t); anything but a pair is refused, with its step."""
    if not isinstance(item, tuple | list):
        raise wrong_item(step, brief(item))
    if len(item) != 2:
        raise wrong_item(step, f"{len(item)} values")
    return item[0], item[1]


def wrong_item(step: int, got: str) -> KindError:
    """The error for an item of a stream that is not a pair."""
    return KindError(
        "a stream must yield pairs (u_t, y_t), or None to start a new sequence; "
        f"at step {step} it yielded {got}."
    )


def choose_optimiser(
    chosen: Optimiser | HessianFree | None, net: Net, steps: int | None
) -> tuple[Optimiser, TorchStepper]:
    """The optimiser and its stepper; refused unless one gradient at each step is all it needs.

    chosen: None is adam(1e-3). steps: those of the run, None if it ends with the stream.
    """
    recipe = recipe_of(adam(1e-3) if chosen is None else chosen)
    stepper = recipe.stepper(net)
    # Other rules and directions evaluate a step more than once.
    needs_more = not isinstance(recipe.rule, Constant) or recipe.direction != "steepest"
    if not isinstance(stepper, TorchStepper) or needs_more:
        raise Unsupported(
            "online learning sees each step once, so it needs an optimiser like sgd or adam, "
            "without a direction, step rule or line search."
        )
    schedule = recipe.schedule
    if schedule.patience is not None:
        raise Unsupported(
            "schedule 'plateau' needs held-out losses, but a stream has none: choose another."
        )
    if steps is None and schedule.name in ("linear", "cosine"):
        raise InputError(f"schedule '{schedule.name}' needs the number of steps: set steps.")
    return recipe, stepper


class Learning:
    """A network that learns from a stream. `online.learn` is the loop over its steps."""

    schema: type[schemas.Schema] = schemas.OnlineState

    def __init__(self, net: Net, stream: Iterable[object], plan: LearningPlan) -> None:
        """stream: yields (u_t, y_t), or None to start a new sequence.

        It may have attributes loss, score, metric and name, which serve where the plan has none,
        and state and restore, by which a resumed run finds its place in the stream.
        """
        check_net(net)
        if isinstance(stream, str | bytes | dict) or not isinstance(stream, Iterable):
            raise KindError(
                f"stream must be an iterable of (u_t, y_t); got {brief(stream)}. "
                "co.online.read(path) makes one from a file."
            )
        loss: LossLike | None = plan.loss
        if loss is None:
            loss = getattr(stream, "loss", None)
        if loss is None:
            raise InputError(
                "this stream does not define a loss: give one, such as loss='squared'."
            )
        self.net = net
        self.stream = stream
        self.plan = plan
        self.criterion: LossLike = loss
        self.score = plan.score or getattr(stream, "score", None)
        torch.manual_seed(plan.seed)
        self.carry = plan.method.stream(net, plan.batch)  # x_t, and what its gradients depend on
        self.recipe, self.stepper = choose_optimiser(plan.optimiser, net, plan.steps)
        self.trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.folder = RunFolder.of(plan.folder)
        self.step = 0
        self.updates = 0
        self.items = 0  # taken from the stream so far
        self.skip = 0  # items that were taken before the run was resumed
        self.norm = 0.0  # of the last gradient
        self.norms = [0.0, 0]  # of the gradients since the last row: their sum and number
        self.rate = 0.0  # the step size of the last update
        self.ended = False  # whether the stream ended before the run did
        self.seconds = 0.0
        self.figures = RunningMeans(plan.window)
        self.total: Gradient | None = None  # of held weights: the sum of all gradients
        if plan.held:
            self.total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.rows: deque[Row] = deque(maxlen=ROWS_IN_MEMORY)
        name = getattr(stream, "name", "stream")
        self.display = make_display(plan.display, name, plan.steps, self.metric, plan.every)

    # the steps

    @property
    def metric(self) -> str:
        """The name of the metric to display: that of the stream if it has one, else "loss"."""
        return str(getattr(self.stream, "metric", "loss"))

    def remaining_items(self) -> Iterator[object]:
        """The items of the stream that the run has not taken yet."""
        # A stream that can be restored resumes by itself; of others the first items are skipped.
        resumes = hasattr(self.stream, "restore")
        for item in self.read_stream():
            is_new = resumes or self.items >= self.skip
            self.items += 1
            if is_new:
                yield item
                if self.is_over:
                    return
        if self.is_over:  # a run that is resumed after its last step reads nothing
            return
        if self.items < self.skip and not resumes:
            raise DataError(
                f"this run has taken {self.skip:,} items from its stream, but the stream ends "
                f"after {self.items:,}."
            )
        self.ended = True

    @property
    def is_over(self) -> bool:
        """Whether the run has taken all its steps; never, if their number is not set."""
        return self.plan.steps is not None and self.step >= self.plan.steps

    def read_stream(self) -> Iterator[object]:
        """The items of the stream; the run is saved before an error of the stream is raised."""
        if self.is_over:
            return
        try:
            yield from self.stream
        except DataError as error:
            if self.folder.path is None or not self.step:  # nothing to save, or nowhere
                raise
            self.save()
            self.folder.write_result(self.result("failed", str(error)))
            hint = self.folder.resume_hint
            raise DataError(f"{error} The run was saved at step {self.step}. {hint}") from None

    def take_step(self, u: object, y: object) -> None:
        """Predict y_t (y) from u_t (u), record the loss and the scores, then learn from y_t."""
        self.step += 1
        u_t = tensor_of("u_t", u).to(self.net.like)
        # Truncated returns a gradient only every k1 steps, and None at the others.
        a, losses, gradient = self.carry.take(u_t, y, self.criterion)
        loss = float(losses.sum()) / self.plan.batch
        if not math.isfinite(loss):
            self.fail(f"the loss is {loss}")
        figures = {"loss": loss}
        if self.score is not None:
            figures |= check_scores(self.score(a))
        self.figures.add(figures)
        if gradient is not None:
            self.update(gradient)
        self.display.step(self.step, {"loss": loss, "gradient": self.norm})

    def update(self, gradient: Gradient) -> None:
        """Clip the gradient and take a step of the optimiser; with held weights, only add it up."""
        flat = torch.cat([g.reshape(-1) for g in gradient.values()])
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
        if not math.isfinite(norm):
            self.fail("the gradient is not finite")
        self.norm = norm
        self.norms = [self.norms[0] + norm, self.norms[1] + 1]
        # Schedules that depend on the number of steps were refused if it is not known.
        steps = self.plan.steps or 1
        self.rate = self.recipe.lr * self.recipe.schedule(self.step - 1, steps)
        if self.total is not None:
            self.total = {name: g + gradient[name] for name, g in self.total.items()}
            return
        scale = 1.0
        if self.plan.clip and norm > 0:
            scale = min(1.0, self.plan.clip / norm)
        if scale < 1:
            gradient = {name: g * scale for name, g in gradient.items()}
        self.stepper.move(self.trained, gradient, self.rate)
        self.updates += 1

    def finish_sequence(self) -> None:
        """After the end of a sequence, learn from those of its steps that no update has used."""
        gradient = self.carry.rest(self.criterion)
        if gradient is not None:
            self.update(gradient)

    def fail(self, what: str) -> NoReturn:
        """Write result.json and raise NumericalError. what: what is not finite, in words."""
        message = f"step {self.step}: {what}. Lower the step size, or clip the gradient"
        if self.folder.path is not None:
            self.folder.write_result(self.result("failed", message))
            saved = self.folder.saved_step
            last = f"the last checkpoint is at step {saved:,}"
            message += f"; {last if saved else 'there is no checkpoint'}"
        raise NumericalError(f"{message}.")

    def log_progress(self) -> None:
        """Log a "train" row, of means since the last one, and two "held-out" rows.

        Those are means over all steps and over the last `window`. Every step is predicted before
        it is learned from, so they count as held-out.
        """
        since = self.figures.since_last_call()
        norm_sum, norm_count = self.norms
        self.norms = [0.0, 0]
        row = {
            "kind": "train",
            "step": self.step,
            "loss": since.get("loss", math.nan),
            "gradient": norm_sum / norm_count if norm_count else 0.0,
            "rate": self.rate,
        }
        means: list[Row] = []
        for split, values in self.mean_metrics().items():
            means.append({"kind": "held-out", "split": split, "step": self.step, **values})
        for logged_row in (row, *means):
            self.rows.append(logged_row)
            self.folder.append(logged_row)
        self.seconds = self.folder.elapsed()
        self.folder.log_time(self.step, self.seconds)
        self.display.step(self.step, row)
        self.display.validation(self.step, means)

    def mean_metrics(self) -> dict[str, dict[str, float]]:
        """The mean loss and scores, over all steps ("so far") and over the last `window`."""
        return {"so far": self.figures.so_far, f"last {self.plan.window}": self.figures.recent}

    # checkpoints

    @property
    def bytes_needed(self) -> int:
        """A lower bound on what the run writes: four copies of the weights and the learner.

        They are those of the model and of a few checkpoints; 1 MiB is for all other files.
        """
        tensors = (*self.net.parameters(), *self.carry.state().values())
        return 4 * sum(t.numel() * t.element_size() for t in tensors) + 2**20

    @property
    def max_file_bytes(self) -> int:
        """A generous upper bound on a file of a checkpoint: larger ones are refused unread.

        It may hold up to eight numbers for each weight (the optimiser's, the sum of gradients),
        the learner's state, the steps (x, u, y) that Truncated keeps, and for each step of
        `window` up to 64 figures; 64 MiB are for what does not grow.
        """
        tensors = self.net.state_dict().values()
        weights: int = sum(t.numel() * max(8, t.element_size()) for t in tensors)
        learner = sum(t.numel() * t.element_size() for t in self.carry.state().values())
        width: int = self.carry.net.n + self.net.inputs + self.net.outputs
        window: int = 8 * self.carry.kept * self.plan.batch * width
        return 2**26 + 8 * weights + learner + window + 8 * 64 * self.plan.window

    def save(self) -> None:
        """Write a checkpoint, if there is a folder."""
        self.folder.save(self)

    def snapshot(self) -> Checkpoint:
        """Everything the next step depends on; its tensors are named PART.NAME."""
        if not all(torch.isfinite(p).all() for p in self.net.parameters()):
            self.fail("a weight is not finite")
        arrays, figures = self.figures.state()
        tensors: dict[str, Tensor] = {}
        numbers: JsonObject = {}
        for name, value in self.stepper.state.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{name}"] = value
            else:
                numbers[f"optimiser.{name}"] = value
        tensors |= {f"learner.{name}": v for name, v in self.carry.state().items()}
        tensors |= {f"figures.{name}": v for name, v in arrays.items()}
        tensors |= {f"held.{name}": v for name, v in (self.total or {}).items()}
        state = {
            "optimiser": numbers,
            "figures": figures,
            "norms": self.norms,
            "updates": self.updates,
            "items": self.items,
            "t": self.carry.t,
            "rate": self.rate,
            "seconds": self.folder.elapsed(),
            "stream": self.stream.state() if hasattr(self.stream, "state") else None,
            **self.folder.common_state(self.plan),
        }
        return Checkpoint(self.step, dict(self.net.state_dict()), tensors, state)

    def check(self, saved: Checkpoint) -> None:
        """Refuse a checkpoint that lacks something `restore` or the next step needs."""
        state = saved.state
        tensors = saved.tensors
        has_stepped = state["updates"] > 0  # only then does an optimiser have all its tensors
        fault = self.stepper.complaint(self.net, optimiser_state(saved), has_stepped)
        refuse_if_faulty(fault, "its optimiser: ")
        refuse_if_faulty(self.carry.complaint(select_part("learner", tensors)), "its learner: ")
        fault = self.figures.complaint(select_part("figures", tensors), state["figures"])
        refuse_if_faulty(fault, "its figures: ")
        fault = restoring.misfit(self.total or {}, select_part("held", tensors))
        refuse_if_faulty(fault, "its sum of gradients: ")
        refuse_if_foreign(tensors, ("optimiser", "learner", "figures", "held"))
        if hasattr(self.stream, "complaint"):
            place = schemas.check("its place in the file", state["stream"], schemas.StreamPlace)
            refuse_if_faulty(self.stream.complaint(place), "its stream: ")

    def restore(self, saved: Checkpoint) -> None:
        """Put everything but the weights back to where it was."""
        state = saved.state
        tensors = saved.tensors
        self.stepper.restore(optimiser_state(saved))
        self.carry.restore(select_part("learner", tensors), state["t"])
        self.figures.restore(select_part("figures", tensors), state["figures"])
        self.total = select_part("held", tensors) if self.plan.held else None
        self.norms = state["norms"]
        self.updates = state["updates"]
        self.skip = state["items"]
        self.rate = state["rate"]
        if hasattr(self.stream, "restore"):  # else `remaining_items` skips what was taken
            self.stream.restore(state["stream"])
            self.items = self.skip
        self.step = saved.step
        self.seconds = state["seconds"]
        self.folder.start_clock(self.seconds)

    def model_description(self) -> JsonObject:
        """What a model file says about itself: the run's description, and the data it has seen."""
        data = self.stream.describe() if hasattr(self.stream, "describe") else None
        return {**(self.plan.description or {}), "data": data}

    # the end

    def finish(self) -> Learned:
        """Learn from what is left of the last sequence, write the model, return the result."""
        if self.ended:
            self.finish_sequence()
        if not self.step:
            raise DataError(
                "the stream has too few rows to learn from: --kind next needs at least two, "
                "other kinds one."
            )
        if self.step % self.plan.every:  # there were steps since the last row
            self.log_progress()
        self.seconds = self.folder.elapsed()
        self.save()
        self.folder.write_model(self)
        self.folder.write_result(self.result("finished", None))
        return Learned(
            network=self.net,
            status="ended" if self.ended else "finished",
            step=self.step,
            updates=self.updates,
            seconds=self.seconds,
            so_far=self.figures.so_far,
            recent=self.figures.recent,
            gradient=self.total,
            rows=list(self.rows),
            folder=self.folder.path,
        )

    def result(self, status: str, reason: str | None) -> JsonObject:
        """The content of result.json. reason: why the run failed or stopped; None if it did not."""
        return {
            "status": status,
            "step": self.step,
            "updates": self.updates,
            "seconds": round(self.folder.elapsed(), 3),
            "reason": reason,
            "metric": self.metric,
            "metrics": self.mean_metrics(),
            "parameters": sum(p.numel() for p in self.net.parameters()),
        }


def optimiser_state(saved: Checkpoint) -> JsonObject:
    """The optimiser's tensors and numbers, all of them under "optimiser.NAME" in a checkpoint."""
    tensors = select_part("optimiser", saved.tensors)
    numbers = select_part("optimiser", parse_numbers(saved.state["optimiser"]))
    return {**tensors, **numbers}
