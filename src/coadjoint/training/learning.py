"""A run that learns from a stream: its steps, its figures, what it saves and what comes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from .display import Row, make_display
from .plan import LearningPlan
from .restore import parse_numbers, refuse_if_faulty, refuse_if_foreign, select_part
from .run_folder import RunFolder
from .storage import Checkpoint
from .stream_means import RunningMeans, check_scores

ROWS_IN_MEMORY = 1000  # of the latest rows, kept in memory


@dataclass(frozen=True)
class Learned:
    """What came of a stream. so_far and recent: means over all steps and over the last ones of the loss and of each score."""

    network: Net
    status: str  # "ended": the stream did; "finished": `steps` were taken
    step: int
    updates: int
    seconds: float
    so_far: dict[str, float]
    recent: dict[str, float]
    gradient: Gradient | None  # held weights: the sum of all gradients
    rows: list[Row] = field(repr=False)  # the latest of metrics.jsonl
    folder: Path | None = None


def as_pair(item: Any, step: int) -> tuple[Any, Any]:
    """(u_t, y_t) from what a stream gave."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} things" if isinstance(item, tuple | list) else brief(item)
        raise KindError(
            f"a stream gives pairs (u_t, y_t), or None before another sequence; at step {step} it gave {what}."
        )
    return item[0], item[1]


def choose_optimiser(
    given: Optimiser | HessianFree | None, net: Net, steps: int | None
) -> tuple[Optimiser, TorchStepper]:
    """The optimiser, if a single step of a stream is enough for it."""
    recipe = recipe_of(adam(1e-3) if given is None else given)
    stepper = recipe.stepper(net)
    if (
        not isinstance(stepper, TorchStepper)
        or not isinstance(recipe.rule, Constant)
        or recipe.direction != "steepest"
    ):
        raise Unsupported(
            "online learning sees a step once: it takes sgd, adam and their kin, without a direction, step rule or line search."
        )
    if recipe.schedule.patience is not None:
        raise Unsupported(
            "schedule 'plateau' waits for held-out losses, and a stream has none: choose another."
        )
    if steps is None and recipe.schedule.name in ("linear", "cosine"):
        raise InputError(
            f"schedule '{recipe.schedule.name}' needs to know how many steps there will be: give steps."
        )
    return recipe, stepper


class Learning:
    """A network that learns from a stream. `online.learn` is the loop over its steps."""

    schema: type[schemas.Schema] = schemas.StreamState

    def __init__(self, net: Net, stream: Iterable[Any], plan: LearningPlan) -> None:
        check_net(net)
        if isinstance(stream, str | bytes | dict) or not isinstance(stream, Iterable):
            raise KindError(
                f"a stream is an iterable of (u_t, y_t); got {brief(stream)}. co.online.read(path) makes one of a file."
            )
        of_stream = getattr(stream, "loss", None)
        if plan.loss is None and of_stream is None:
            raise InputError("this stream names no loss: give one, loss='squared' for instance.")
        self.net = net
        self.stream = stream
        self.plan = plan
        self.criterion: LossLike = of_stream if plan.loss is None else plan.loss  # type: ignore[assignment]
        self.score = plan.score or getattr(stream, "score", None)
        torch.manual_seed(plan.seed)
        self.carry = plan.method.stream(net, plan.batch)
        self.recipe, self.stepper = choose_optimiser(plan.optimiser, net, plan.steps)
        self.trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.folder = RunFolder.of(plan.folder)
        self.step = 0
        self.updates = 0
        self.items = 0  # of the stream, so far
        self.skip = 0  # items that were taken before the run was resumed
        self.norm = 0.0  # of the last gradient
        self.norms = [0.0, 0]  # of the gradients since the last look: the sum, and how many
        self.rate = 0.0
        self.ended = False  # the stream, before the run
        self.seconds = 0.0
        self.figures = RunningMeans(plan.window)
        self.total: Gradient | None = None
        if plan.held:
            self.total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.rows: deque[Row] = deque(maxlen=ROWS_IN_MEMORY)
        name, metric = getattr(stream, "name", "stream"), getattr(stream, "metric", "loss")
        self.display = make_display(plan.display, name, plan.steps, metric)

    # the steps

    def remaining_items(self) -> Iterator[Any]:
        """The items of the stream that are still to be taken."""
        own = hasattr(self.stream, "restore")  # it goes on by itself
        for item in self.read_stream():
            if own or self.items >= self.skip:
                self.items += 1
                yield item
                if self.is_over:
                    return
            else:
                self.items += 1
        if self.is_over:
            return
        if self.items < self.skip and not own:
            raise DataError(
                f"this run has taken {self.skip:,} items of its stream, and the stream ends after {self.items:,}."
            )
        self.ended = True

    @property
    def is_over(self) -> bool:
        return self.plan.steps is not None and self.step >= self.plan.steps

    def read_stream(self) -> Iterator[Any]:
        if self.is_over:
            return
        try:
            yield from self.stream
        except DataError as error:
            if self.folder.path is None or not self.step:
                raise
            self.save()
            self.folder.write_result(self.result("failed", str(error)))
            raise DataError(
                f"{error} What came before it is saved, at step {self.step}. {self.folder.resume_hint}"
            ) from None

    def take_step(self, u: Any, y: Any) -> None:
        """Predict, then learn."""
        self.step += 1
        a, losses, gradient = self.carry.take(
            tensor_of("u_t", u).to(self.net.like), y, self.criterion
        )
        loss = float(losses.sum()) / self.plan.batch
        if not math.isfinite(loss):
            self.fail(f"the loss is {loss}")
        self.figures.add(
            {"loss": loss} if self.score is None else {"loss": loss, **check_scores(self.score(a))}
        )
        if gradient is not None:
            self.update(gradient)
        self.display.step(self.step, {"loss": loss, "gradient": self.norm})

    def update(self, gradient: Gradient) -> None:
        """theta <- theta - (optimiser's step along the gradient)"""
        flat = torch.cat([g.reshape(-1) for g in gradient.values()])
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
        if not math.isfinite(norm):
            self.fail("the gradient is not finite")
        self.norm, self.norms = norm, [self.norms[0] + norm, self.norms[1] + 1]
        self.rate = self.recipe.lr * self.recipe.schedule(self.step - 1, self.plan.steps or 1)
        if self.total is not None:
            self.total = {name: g + gradient[name] for name, g in self.total.items()}
            return
        clip = self.plan.clip
        share = min(1.0, clip / norm) if clip and norm > 0 else 1.0
        for name, p in self.trained.items():
            p.grad = gradient[name] * share if share < 1 else gradient[name]
        for group in self.stepper.optimiser.param_groups:
            group["lr"] = self.rate
        self.stepper.optimiser.step()
        self.updates += 1

    def finish_sequence(self) -> None:
        """A sequence has ended: learn what it has left."""
        gradient = self.carry.rest(self.criterion)
        if gradient is not None:
            self.update(gradient)

    def fail(self, what: str) -> None:
        words = f"step {self.step}: {what}. Lower the step size, or clip the gradient"
        if self.folder.path is not None:
            self.folder.write_result(self.result("failed", words))
            kept = self.folder.saved_step
            words += f"; the last checkpoint is {f'that of step {kept:,}' if kept else 'none'}"
        raise NumericalError(f"{words}.")

    def log_progress(self) -> None:
        """The figures since the last look, over all steps and over the latest."""
        since = self.figures.since_last_call()
        norm = self.norms[0] / self.norms[1] if self.norms[1] else 0.0
        self.norms = [0.0, 0]
        row = {
            "kind": "train",
            "step": self.step,
            "loss": since.get("loss", math.nan),
            "gradient": norm,
            "rate": self.rate,
        }
        told = {"so far": self.figures.so_far, f"last {self.plan.window}": self.figures.recent}
        looks = [
            {"kind": "held-out", "split": split, "step": self.step, **values}
            for split, values in told.items()
        ]
        for each in (row, *looks):
            self.rows.append(each)
            self.folder.append(each)
        self.seconds = self.folder.elapsed()
        self.folder.log_time(self.step, self.seconds)
        self.display.step(self.step, row)
        self.display.validation(self.step, looks)

    # what is saved

    @property
    def bytes_needed(self) -> int:
        tensors = (*self.net.parameters(), *self.carry.state().values())
        return 4 * sum(t.numel() * t.element_size() for t in tensors) + 2**20

    @property
    def max_file_bytes(self) -> int:
        weights = sum(t.numel() * max(8, t.element_size()) for t in self.net.state_dict().values())
        learner = sum(t.numel() * t.element_size() for t in self.carry.state().values())
        window = (
            8
            * self.carry.kept
            * self.plan.batch
            * (self.carry.net.n + self.net.inputs + self.net.outputs)
        )
        return 2**26 + 8 * weights + learner + window + 8 * 64 * self.plan.window

    def save(self) -> None:
        self.folder.save(self)

    def snapshot(self) -> Checkpoint:
        """Everything the next step depends on."""
        if not all(torch.isfinite(p).all() for p in self.net.parameters()):
            self.fail("a weight is not finite")
        arrays, figures = self.figures.state()
        steps = {f"optimiser.{name}": v for name, v in self.stepper.state.items()}
        tensors = {name: v for name, v in steps.items() if isinstance(v, Tensor)}
        tensors |= {f"learner.{name}": v for name, v in self.carry.state().items()}
        tensors |= {f"figures.{name}": v for name, v in arrays.items()}
        tensors |= {f"held.{name}": v for name, v in (self.total or {}).items()}
        state = {
            "optimiser": {name: v for name, v in steps.items() if not isinstance(v, Tensor)},
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
        state, tensors = saved.state, saved.tensors
        steps = select_part("optimiser", tensors) | select_part(
            "optimiser", parse_numbers(state["optimiser"])
        )
        refuse_if_faulty(
            self.stepper.complaint(self.net, steps, state["updates"] > 0), "its optimiser: "
        )
        refuse_if_faulty(self.carry.complaint(select_part("learner", tensors)), "its learner: ")
        refuse_if_faulty(
            self.figures.complaint(select_part("figures", tensors), state["figures"]),
            "its figures: ",
        )
        refuse_if_faulty(
            restoring.misfit(self.total or {}, select_part("held", tensors)),
            "its sum of gradients: ",
        )
        refuse_if_foreign(tensors, ("optimiser", "learner", "figures", "held"))
        if hasattr(self.stream, "complaint"):
            place = schemas.check("its place in the file", state["stream"], schemas.StreamPlace)
            refuse_if_faulty(self.stream.complaint(place), "its stream: ")

    def restore(self, saved: Checkpoint) -> None:
        state, tensors = saved.state, saved.tensors
        self.stepper.restore(
            select_part("optimiser", tensors)
            | select_part("optimiser", parse_numbers(state["optimiser"]))
        )
        self.carry.restore(select_part("learner", tensors), state["t"])
        self.figures.restore(select_part("figures", tensors), state["figures"])
        self.total = select_part("held", tensors) if self.plan.held else None
        self.norms = state["norms"]
        self.updates = state["updates"]
        self.skip = state["items"]
        self.rate = state["rate"]
        if hasattr(self.stream, "restore"):
            self.stream.restore(state["stream"])
            self.items = self.skip
        self.step = saved.step
        self.seconds = state["seconds"]
        self.folder.start_clock(self.seconds)

    def model_description(self) -> dict[str, Any]:
        """What a model says of itself: the run's description, and what the stream has been so far."""
        data = self.stream.describe() if hasattr(self.stream, "describe") else None
        return {**(self.plan.description or {}), "data": data}

    # the end

    def finish(self) -> Learned:
        """At the end of the stream, learn what is left; then write the model."""
        if self.ended:
            self.finish_sequence()
        if not self.step:
            raise DataError(
                "the stream held no step to learn from: --kind next needs two rows, others one."
            )
        if self.step % self.plan.every:
            self.log_progress()
        self.seconds = self.folder.elapsed()
        status = "ended" if self.ended else "finished"
        self.save()
        self.folder.write_model(self)
        self.folder.write_result(self.result("finished", None))
        return Learned(
            self.net, status, self.step, self.updates, self.seconds, self.figures.so_far, self.figures.recent,
            self.total, list(self.rows), self.folder.path,
        )  # fmt: skip

    def result(self, status: str, reason: str | None) -> dict[str, Any]:
        return {
            "status": status,
            "step": self.step,
            "updates": self.updates,
            "seconds": round(self.folder.elapsed(), 3),
            "reason": reason,
            "metric": getattr(self.stream, "metric", "loss"),
            "metrics": {
                "so far": self.figures.so_far,
                f"last {self.plan.window}": self.figures.recent,
            },
            "parameters": sum(q.numel() for q in self.net.parameters()),
        }
