"""Online learning: a stream of steps (u_t, y_t), each predicted and then learned from, in memory that does not grow.

    a_t     = V x_t + b_o                       what the network says, before it has seen y_t
    L_t     = loss(a_t, y_t)                    its prequential loss: every step is a test first
    theta   <- theta - eta dL_t/dtheta          RTRL: at every step, dL_t/dtheta = lam_t' S_t, no past is kept
                                                Truncated(k1, k2): every k1 steps, through a window of the last k2

A run is a function of the stream, the weights it began with and the seed: saved and gone on with, it is the same, bit for bit.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import (
    DataError,
    InputError,
    KindError,
    NumericalError,
    StorageError,
    Unsupported,
    brief,
    check_seed,
    whole,
)
from ..gradients import restoring
from ..gradients.evaluation import Gradient
from ..gradients.rtrl import RTRL
from ..gradients.truncated import Truncated
from ..networks.interface import Net, check_net
from ..objectives.losses import LossLike
from ..optimisers.recipes import Optimiser, adam, recipe_of
from ..optimisers.step_rules import Constant
from ..optimisers.steppers import Judged
from ..sweeps.layout import tensor_of
from . import environment, files, json_rows, run_folder, storage
from .display import display as bar
from .loop import Display, Silent, check_run
from .restore import compare_tensors, complain, difference, fit, numbers, part
from .signals import Interrupted
from .validation import Row

ROWS = 1000  # of the latest rows, kept in memory


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


def pair_of(item: Any, step: int) -> tuple[Any, Any]:
    """(u_t, y_t) from what a stream gave."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} things" if isinstance(item, tuple | list) else brief(item)
        raise KindError(
            f"a stream gives pairs (u_t, y_t), or None before another sequence; at step {step} it gave {what}."
        )
    return item[0], item[1]


def scores_of(found: Any) -> dict[str, float]:
    """What a score function returned."""
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise KindError(f"score must return figures by name, {{'error': 0.1}}; it returned {brief(found)}.")
    return found


class Running:
    """Means over all steps, over those since the last look, and over the last `window`: sums and a ring, nothing that grows."""

    def __init__(self, window: int) -> None:
        self.window, self.names, self.t, self.looked = window, list[str](), 0, 0
        self.total = self.marked = np.zeros(0)
        self.ring = np.zeros((window, 0))

    def add(self, figures: dict[str, float]) -> None:
        if not self.names:
            self.names = list(figures)
            self.total, self.marked = np.zeros(len(figures)), np.zeros(len(figures))
            self.ring = np.zeros((self.window, len(figures)))
        if list(figures) != self.names:
            raise StorageError(f"this run has the figures {', '.join(self.names)}; now there are {', '.join(figures)}.")
        row = np.fromiter(figures.values(), float, len(figures))
        self.ring[self.t % self.window] = row
        self.total = self.total + row
        self.t += 1

    def named(self, values: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    @property
    def so_far(self) -> dict[str, float]:
        return self.named(self.total / max(self.t, 1))

    @property
    def recent(self) -> dict[str, float]:
        return self.named(self.ring[: min(self.t, self.window)].mean(0)) if self.t else {}

    def since(self) -> dict[str, float]:
        """The means since the last time this was asked."""
        found = (self.total - self.marked) / max(self.t - self.looked, 1)
        self.marked, self.looked = self.total, self.t
        return self.named(found)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = {"total": self.total, "marked": self.marked, "ring": self.ring}
        rest = {"names": self.names, "t": self.t, "looked": self.looked, "window": self.window}
        return {name: torch.from_numpy(y) for name, y in arrays.items()}, rest

    def complaint(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> str | None:
        """What is wrong with arrays that were read from a file; None if they can be restored."""
        many, window = len(rest["names"]), rest["window"]
        shapes = {"total": (many,), "marked": (many,), "ring": (window, many)}
        expected = {name: torch.empty(s, dtype=torch.float64, device="meta") for name, s in shapes.items()}
        return restoring.misfit(expected, tensors)

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        self.total, self.marked, self.ring = (tensors[name].numpy() for name in ("total", "marked", "ring"))
        self.names, self.t, self.looked = rest["names"], rest["t"], rest["looked"]
        if len(self.ring) != self.window:
            raise StorageError(f"this run has window={len(self.ring)}; got {self.window}. Start a new run for another.")


def chosen(given: Optimiser | None, net: Net, steps: int | None) -> tuple[Optimiser, Judged]:
    """The optimiser, if a single step of a stream is enough for it."""
    recipe = recipe_of(adam(1e-3) if given is None else given)
    stepper = recipe.stepper(net)
    if not isinstance(stepper, Judged) or not isinstance(recipe.rule, Constant) or recipe.direction != "steepest":
        raise Unsupported(
            "online learning sees a step once: it takes sgd, adam and their kin, without a direction, step rule or line search."
        )
    if recipe.schedule.patience is not None:
        raise Unsupported("schedule 'plateau' waits for held-out losses, and a stream has none: choose another.")
    if steps is None and recipe.schedule.name in ("linear", "cosine"):
        raise InputError(f"schedule '{recipe.schedule.name}' needs to know how many steps there will be: give steps.")
    return recipe, stepper


@dataclass
class Learning:
    """A run in progress: the arguments of `learn`, and what they have become."""

    net: Net
    stream: Iterable[Any]
    loss: LossLike | None
    learner: RTRL | Truncated | None
    optimiser: Optimiser | None
    clip: float | None
    held: bool
    steps: int | None
    batch: int
    every: int
    window: int
    score: Callable[[Tensor], dict[str, float]] | None
    seed: int
    folder: Any
    checkpoint: int
    keep: int
    display: Display | bool
    description: dict[str, Any] | None
    command: str | None

    def __post_init__(self) -> None:
        for name in ("batch", "every", "window", "checkpoint", "keep", *(() if self.steps is None else ("steps",))):
            setattr(self, name, whole(name, getattr(self, name)))
        check_net(self.net)
        check_run(self.folder, self.display, self.description, self.command)
        if self.clip is not None and not (isinstance(self.clip, int | float) and 0 < self.clip < math.inf):
            raise InputError(f"clip must be a positive number; got {brief(self.clip)}.")
        if self.score is not None and not callable(self.score):
            raise KindError(f"score must be a function of a_t; got {brief(self.score)}.")
        if isinstance(self.stream, str | bytes | dict) or not isinstance(self.stream, Iterable):
            raise KindError(
                f"a stream is an iterable of (u_t, y_t); got {brief(self.stream)}. co.online.read(path) makes one of a file."
            )
        method = RTRL() if self.learner is None else self.learner
        if not isinstance(method, RTRL | Truncated):
            raise InputError(f"a stream is learned by RTRL() or Truncated(k1, k2); got {type(method).__name__}.")
        of_stream = getattr(self.stream, "loss", None)
        if self.loss is None and of_stream is None:
            raise InputError("this stream names no loss: give one, loss='squared' for instance.")
        self.criterion: LossLike = of_stream if self.loss is None else self.loss  # type: ignore[assignment]
        self.judge = self.score or getattr(self.stream, "score", None)
        torch.manual_seed(check_seed(self.seed))
        self.carry = method.stream(self.net, self.batch)
        self.recipe, self.stepper = chosen(self.optimiser, self.net, self.steps)
        self.trained = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        metric, name = getattr(self.stream, "metric", "loss"), getattr(self.stream, "name", "stream")
        if isinstance(self.display, bool):
            self.show: Display = bar(name, self.steps, metric) if self.display else Silent()
        else:
            self.show = self.display
        self.folder = None if self.folder is None else Path(self.folder)
        self.step = self.updates = self.items = self.skip = 0
        self.norm, self.norms = (
            0.0,
            [0.0, 0],
        )  # of the last gradient; of those since the last look the sum, and how many
        self.figures = Running(self.window)
        self.total: Gradient | None = (
            {name: torch.zeros_like(p) for name, p in self.trained.items()} if self.held else None
        )
        self.rows: deque[Row] = deque(maxlen=ROWS)
        self.kept: int | None = None
        self.storage: run_folder.Held | None = None
        self.metrics: json_rows.Rows | None = None
        self.clock: json_rows.Rows | None = None
        self.rate, self.ended, self.seconds, self.started = 0.0, False, 0.0, time.monotonic()

    # the steps

    def coming(self) -> Iterator[Any]:
        """The items of the stream that are still to be taken."""
        own = hasattr(self.stream, "restore")  # it goes on by itself
        for item in self.read():
            if own or self.items >= self.skip:
                self.items += 1
                yield item
                if self.over:
                    return
            else:
                self.items += 1
        if self.over:
            return
        if self.items < self.skip and not own:
            raise DataError(f"this run has taken {self.skip:,} items of its stream, and the stream ends after {self.items:,}.")  # fmt: skip
        self.ended = True

    @property
    def over(self) -> bool:
        return self.steps is not None and self.step >= self.steps

    def read(self) -> Iterator[Any]:
        if self.over:
            return
        try:
            yield from self.stream
        except DataError as error:
            if self.folder is None or not self.step:
                raise
            self.save()
            self.write_result("failed", str(error))
            raise DataError(f"{error} What came before it is saved, at step {self.step}. {self.go_on}") from None

    def take(self, u: Any, y: Any) -> None:
        """Predict, then learn."""
        self.step += 1
        a, losses, gradient = self.carry.take(tensor_of("u_t", u).to(self.net.like), y, self.criterion)
        loss = float(losses.sum()) / self.batch
        if not math.isfinite(loss):
            self.fail(f"the loss is {loss}")
        self.figures.add({"loss": loss} if self.judge is None else {"loss": loss, **scores_of(self.judge(a))})
        if gradient is not None:
            self.update(gradient)
        self.show.step(self.step, {"loss": loss, "gradient": self.norm})

    def update(self, gradient: Gradient) -> None:
        """theta <- theta - (optimiser's step along the gradient)"""
        flat = torch.cat([g.reshape(-1) for g in gradient.values()])
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
        if not math.isfinite(norm):
            self.fail("the gradient is not finite")
        self.norm, self.norms = norm, [self.norms[0] + norm, self.norms[1] + 1]
        self.rate = self.recipe.lr * self.recipe.schedule(self.step - 1, self.steps or 1)
        if self.total is not None:
            self.total = {name: g + gradient[name] for name, g in self.total.items()}
            return
        share = min(1.0, self.clip / norm) if self.clip and norm > 0 else 1.0
        for name, p in self.trained.items():
            p.grad = gradient[name] * share if share < 1 else gradient[name]
        for group in self.stepper.optimiser.param_groups:
            group["lr"] = self.rate
        self.stepper.optimiser.step()
        self.updates += 1

    def rest(self) -> None:
        """A sequence has ended: learn what it has left."""
        gradient = self.carry.rest(self.criterion)
        if gradient is not None:
            self.update(gradient)

    def fail(self, what: str) -> None:
        words = f"step {self.step}: {what}. Lower the step size, or clip the gradient"
        if self.folder is not None:
            self.write_result("failed", words)
            words += f"; the last checkpoint is {'that of step ' + format(self.kept, ',') if self.kept else 'none'}"
        raise NumericalError(f"{words}.")

    # figures

    def look(self) -> None:
        since = self.figures.since()
        norm, self.norms = self.norms[0] / self.norms[1] if self.norms[1] else 0.0, [0.0, 0]
        row = {
            "kind": "train",
            "step": self.step,
            "loss": since.get("loss", math.nan),
            "gradient": norm,
            "rate": self.rate,
        }
        last = f"last {self.window}"
        told = {"so far": self.figures.so_far, last: self.figures.recent}
        looks = [{"kind": "held-out", "split": split, "step": self.step, **values} for split, values in told.items()]
        for each in (row, *looks):
            self.rows.append(each)
            if self.metrics is not None:
                self.metrics.append(each)
        self.seconds = self.elapsed()
        if self.clock is not None and self.metrics is not None:
            self.clock.append({"step": self.step, "seconds": round(self.seconds, 3)})
            self.metrics.flush()
        self.show.step(self.step, row)
        self.show.look(self.step, looks)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    # storage

    @contextmanager
    def writing(self, resume: bool, fallback: bool) -> Iterator[None]:
        """Hold the run folder: one writer, files open, the past read back if the run goes on."""
        if self.folder is None:
            if resume:
                raise InputError("resume=True needs the folder of the run.")
            yield
            return
        weights = sum(t.numel() * t.element_size() for t in (*self.net.parameters(), *self.carry.state().values()))
        about = lambda: environment.environment(self.seed, str(self.net.like.device), self.command)
        need = 4 * weights + 2**20
        call = (self.folder, resume, fallback, need, about, self.check, self.restore, self.show.say, self.most)
        with run_folder.held(*call) as opened:
            self.storage, self.metrics, self.clock = opened, opened.metrics, opened.clock
            yield

    @property
    def most(self) -> int:
        """Bytes that no file of a checkpoint of this run exceeds."""
        weights = sum(t.numel() * max(8, t.element_size()) for t in self.net.state_dict().values())
        learner = sum(t.numel() * t.element_size() for t in self.carry.state().values())
        window = 8 * self.carry.kept * self.batch * (self.carry.net.n + self.net.inputs + self.net.outputs)
        return 2**26 + 8 * weights + learner + window + 8 * 64 * self.window

    def save(self) -> None:
        if self.folder is None:
            return
        assert self.storage is not None
        self.storage.sync()
        if self.kept == self.step:
            return
        if not all(torch.isfinite(p).all() for p in self.net.parameters()):
            self.fail("a weight is not finite")
        assert self.metrics is not None
        assert self.clock is not None
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
            "seconds": self.elapsed(),
            "stream": self.stream.state() if hasattr(self.stream, "state") else None,
            "description": json_rows.plain(self.description),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "metrics": self.metrics.position,
            "clock": self.clock.position,
        }
        found = storage.Checkpoint(self.step, dict(self.net.state_dict()), tensors, state)
        storage.save(self.folder / "checkpoints", found, self.about())
        self.kept = self.step
        storage.prune(self.folder, self.keep, None)

    def check(self, saved: storage.Checkpoint) -> None:
        """Refuse a checkpoint that lacks something of what `restore` and the next step need, by its name, type or shape."""
        door = storage.schemas()
        state, tensors = door.check("state.json", saved.state, door.StreamState), saved.tensors
        if state["description"] != json.loads(json_rows.dumps(self.description)):
            return  # another run's: `restore` says what has changed
        compare_tensors(self.net.state_dict(), saved.model, "its model.safetensors")
        steps = part("optimiser", tensors) | part("optimiser", numbers(state["optimiser"]))
        complain(self.stepper.complaint(self.net, steps, state["updates"] > 0), "its optimiser: ")
        complain(self.carry.complaint(part("learner", tensors)), "its learner: ")
        complain(self.figures.complaint(part("figures", tensors), state["figures"]), "its figures: ")
        complain(restoring.misfit(self.total or {}, part("held", tensors)), "its sum of gradients: ")
        for name in tensors:
            if name.partition(".")[0] not in ("optimiser", "learner", "figures", "held"):
                complain(f"{name!a} does not belong to it")
        if hasattr(self.stream, "complaint"):
            place = door.check("its place in the stream", state["stream"], door.Place)
            complain(self.stream.complaint(place), "its stream: ")

    def restore(self, saved: storage.Checkpoint) -> None:
        state, here = saved.state, json.loads(json_rows.dumps(self.description))
        if state["description"] != here:
            what = difference(state["description"], here)
            raise StorageError(f"{self.folder} cannot go on: {what} has changed since it began. Restore it, or start a new run.")  # fmt: skip
        fit(self.net, saved.model, f"checkpoint {storage.name_of(saved.step)} of {self.folder}")
        tensors = saved.tensors
        self.stepper.restore(part("optimiser", tensors) | part("optimiser", numbers(state["optimiser"])))
        self.carry.restore(part("learner", tensors), state["t"])
        self.figures.restore(part("figures", tensors), state["figures"])
        self.total = part("held", tensors) if self.held else None
        self.norms, self.updates, self.skip, self.rate = (state[k] for k in ("norms", "updates", "items", "rate"))
        if hasattr(self.stream, "restore"):
            self.stream.restore(state["stream"])
            self.items = self.skip
        self.step = self.kept = saved.step
        self.seconds, self.started = state["seconds"], time.monotonic() - state["seconds"]
        for what, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
            if state[what] != now:
                self.show.say(f"{what} was {state[what]} and is {now}: the run goes on, but not necessarily in the same bits.")  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What a model says of itself: the run's description, and what the stream has been so far."""
        data = self.stream.describe() if hasattr(self.stream, "describe") else None
        return {**(self.description or {}), "data": data}

    @property
    def go_on(self) -> str:
        if self.folder is None:
            return "Nothing is saved without a run folder."
        return f"Go on with: coadjoint resume {shlex.quote(str(self.folder))}"

    def interrupted(self, name: str) -> Interrupted:
        if self.folder is None:
            return Interrupted(f"{name} at step {self.step}: nothing is saved without a run folder.")
        self.save()
        self.write_result("interrupted", f"{name} at step {self.step}")
        return Interrupted(f"{name}: saved at step {self.step}. {self.go_on}")

    def finish(self) -> Learned:
        """At the end of the stream, learn what is left; then write the model."""
        if self.ended:
            self.rest()
        if not self.step:
            raise DataError("the stream held no step to learn from: --kind next needs two rows, others one.")
        if self.step % self.every:
            self.look()
        self.seconds = self.elapsed()
        status = "ended" if self.ended else "finished"
        if self.folder is not None:
            self.save()
            model = storage.pack_model(dict(self.net.state_dict()), self.about())
            files.replace(self.folder / "model.safetensors", model)
            self.write_result("finished", None)
        return Learned(
            self.net, status, self.step, self.updates, self.seconds, self.figures.so_far, self.figures.recent,
            self.total, list(self.rows), self.folder,
        )  # fmt: skip

    def write_result(self, status: str, reason: str | None) -> None:
        found = {
            "status": status,
            "step": self.step,
            "updates": self.updates,
            "seconds": round(self.elapsed(), 3),
            "reason": reason,
            "metric": getattr(self.stream, "metric", "loss"),
            "metrics": {"so far": self.figures.so_far, f"last {self.window}": self.figures.recent},
            "parameters": sum(q.numel() for q in self.net.parameters()),
        }
        files.replace(self.folder / "result.json", json_rows.dumps(found, indent=1))
