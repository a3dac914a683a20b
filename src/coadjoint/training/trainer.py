"""A training run in progress: its steps, its looks, what it saves and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, KindError, NumericalError
from ..gradients import restoring
from ..networks.interface import Net
from ..optimisers.directions import distance
from ..optimisers.recipes import WITHOUT_STEP_SIZE
from ..tasks.task import Task
from . import json_rows, schemas
from .display import Row, make_display
from .plan import TrainingPlan
from .progress import Progress, Result, summarise_distances
from .restore import parse_numbers, refuse_if_faulty, refuse_if_foreign, select_part
from .run_folder import RunFolder
from .step import StepEvaluator
from .storage import Checkpoint
from .validation import collect_examples
from .watch import Watch


class Training:
    """The training of a network on a task. `train` is the loop over its steps."""

    schema: type[schemas.Schema] = schemas.TrainingState

    def __init__(self, net: Net, task: Task, plan: TrainingPlan) -> None:
        refuse_if_mismatched(net, task)
        self.net = net
        self.task = task
        self.plan = plan
        self.stepper = plan.recipe.stepper(net)
        self.folder = RunFolder.of(plan.folder)
        self.step = 0
        self.progress = Progress()
        self.is_over = False
        self.checkpoint_due = False  # for a checkpoint
        self.status = "finished"
        self.rows: list[Row] = []  # of a run without a folder; others have theirs on the disk alone
        self.evaluator = StepEvaluator(net, task, plan, self.progress)
        self.watch = Watch(
            net, task, plan, self.progress, self.log, lambda text: self.display.say(text)
        )
        self.display = make_display(plan.display, task.name, plan.steps, task.metric)
        torch.manual_seed(plan.seed)

    # one step

    def advance(self) -> None:
        """theta <- theta + (the optimiser's step), or not at all if something is not finite."""
        self.step += 1
        recipe = self.plan.recipe
        try:
            found, size = self.evaluator.evaluate_finite(self.step - 1)
        except NumericalError as error:
            return self.reject_step(str(error))
        direction, clipped = self.evaluator.clip(found.direction, self.step)
        rate = recipe.lr * recipe.schedule(self.step - 1, self.plan.steps) * self.progress.factor
        parameters = dict(self.net.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            told = self.stepper.step(self.evaluator.point(self.step - 1, found, direction), rate)
        except NumericalError as error:
            self.net.load_state_dict(before, strict=False)
            return self.reject_step(str(error))
        bad = [name for name, p in parameters.items() if not torch.isfinite(p).all()]
        if bad:
            return self.undo_step(
                before,
                f"{', '.join(bad)} is not finite after the optimiser's step: lower the step size",
            )
        row = {
            "kind": "train",
            "step": self.step,
            "loss": found.loss,
            "penalty": found.penalty,
            "rho": found.rho,
        }
        paced = {} if recipe.name in WITHOUT_STEP_SIZE else {"rate": rate}
        row |= {"gradient": size, **paced} | ({"clipped": True} if clipped else {}) | told
        if recipe.direction != "steepest":
            row["distance"] = distance(found.direction, found.gradient)
        self.log(row)
        self.display.step(self.step, row)
        return self.end_step()

    def end_step(self) -> None:
        """A step has ended: is it time for a checkpoint, or for the end?"""
        self.checkpoint_due = self.checkpoint_due or self.step % self.plan.checkpoint == 0
        self.is_over = self.step >= self.plan.steps or self.is_budget_spent

    @property
    def is_budget_spent(self) -> bool:
        """Are all budgets that were given used up?"""
        given = [(self.plan.gradients, self.progress.work), (self.plan.seconds, self.elapsed())]
        left = [used < most for most, used in given if most is not None]
        return bool(left) and not any(left)

    def elapsed(self) -> float:
        return self.folder.elapsed()

    def reject_step(self, reason: str) -> None:
        """Leave weights, optimiser and random numbers as they were before this step."""
        words = f"step {self.step}: {reason.rstrip('.')}"
        torch.set_rng_state(self.evaluator.rng_state)
        self.progress.skipped += 1
        if self.folder.path is not None and self.plan.nonfinite != "skip":
            self.folder.save_replay(self.snapshot(reason))
            words += f". See it again: coadjoint replay {self.folder.quoted_path}"
        if self.plan.nonfinite == "stop":
            self.step -= 1
            self.progress.skipped -= 1
            self.save()
            self.folder.write_result(self.result("failed", words))
            raise NumericalError(f"{words}. The weights are those before this step.")
        self.log({"kind": "train", "step": self.step, "skipped": reason})
        self.display.say(words)
        self.end_step()

    def undo_step(self, weights: dict[str, Tensor], reason: str) -> None:
        """Put the weights back after a step of the optimiser that left the range of their type, and stop: its own state is lost."""
        self.net.load_state_dict(weights, strict=False)
        self.step -= 1
        words = f"step {self.step + 1}: {reason}"
        self.folder.write_result(self.result("failed", words))
        raise NumericalError(f"{words}. The weights are those before this step.")

    # between steps

    def validate(self) -> None:
        """Held-out metrics, costates, success, patience."""
        shown = self.watch.validate(self.step, self.elapsed)
        self.checkpoint_due = self.checkpoint_due or self.watch.improved
        ended = self.watch.end_status
        if ended == "success" or (ended is not None and not self.is_over):
            self.status = ended
            self.is_over = True
        self.progress.seconds = self.elapsed()
        self.folder.log_time(self.step, self.progress.seconds)
        self.display.validation(self.step, shown)

    def log(self, row: Row) -> None:
        if self.folder.path is None:
            self.rows.append(row)
        self.folder.append(row)
        for logger in self.plan.loggers:
            logger(row)

    # what is saved

    @property
    def bytes_needed(self) -> int:
        return 4 * sum(p.numel() * p.element_size() for p in self.net.parameters()) + 2**20

    @property
    def max_file_bytes(self) -> int:
        """Weights, the best ones, and what optimisers keep of each weight; L-BFGS keeps two numbers of it for each step it
        remembers."""
        weights = sum(t.numel() * max(8, t.element_size()) for t in self.net.state_dict().values())
        return 2**26 + weights * (8 + 2 * self.plan.recipe.settings.get("history_size", 0))

    def save(self) -> None:
        self.checkpoint_due = False
        if self.folder.path is not None and self.folder.saved_step != self.step:
            self.progress.seconds = self.elapsed()
        self.folder.save(self, self.progress.best_step)

    def model_description(self) -> dict[str, Any]:
        return self.plan.description or {}

    def snapshot(self, reason: str | None = None) -> Checkpoint:
        """Everything the next step depends on. reason: why the step that has begun was refused."""
        step = self.step if reason is None else self.step - 1
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        numbers: dict[str, Any] = {}
        for name, value in self.stepper.state.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{name}"] = value
            else:
                numbers[name] = value
        best = self.watch.best_weights
        if best is not None and self.progress.best_step != step:
            tensors |= {f"best.{name}": value for name, value in best.items()}
        state = {
            "progress": asdict(self.progress),
            "over": self.is_over,
            "status": self.status,
            "optimiser": numbers,
            "method": dict(self.plan.method.state),
            "seed": self.plan.seed,
            **self.folder.common_state(self.plan),
            "reason": reason,
        }
        return Checkpoint(step, dict(self.net.state_dict()), tensors, state)

    def check(self, saved: Checkpoint) -> None:
        state, tensors = saved.state, saved.tensors
        past = state["progress"]
        parts = {"optimiser", "rng"}
        if past["best_step"] not in (None, saved.step):
            parts.add("best")
            wrong = restoring.misfit(self.net.state_dict(), select_part("best", tensors))
            refuse_if_faulty(wrong, "state.safetensors, best weights: ")
        refuse_if_faulty(
            restoring.misfit(
                {"rng": torch.get_rng_state()}, {k: v for k, v in tensors.items() if k == "rng"}
            )
        )
        refuse_if_foreign(tensors, parts)
        # A replay was saved after the step that it shows had been counted as skipped.
        skipped = past["skipped"] - (state["reason"] is not None)
        whole = {**select_part("optimiser", tensors), **parse_numbers(state["optimiser"])}
        refuse_if_faulty(
            self.stepper.complaint(self.net, whole, saved.step > skipped), "its optimiser: "
        )
        own = self.plan.method.state
        if set(state.get("method", {})) != set(own):
            names = ", ".join(sorted(own)) or "nothing"
            refuse_if_faulty(f"'method' should hold {names}", "state.json: ")

    def restore(self, saved: Checkpoint) -> None:
        state, tensors = saved.state, saved.tensors
        self.stepper.restore(
            {**select_part("optimiser", tensors), **parse_numbers(state["optimiser"])}
        )
        self.plan.method.state.update(state.get("method", {}))
        try:
            torch.set_rng_state(tensors["rng"])
        except RuntimeError:
            refuse_if_faulty(
                "its random numbers are damaged ('rng' of state.safetensors)",
                f"{self.folder.path} cannot go on: ",
            )
        vars(self.progress).update(parse_numbers(state["progress"]))
        self.step = saved.step
        self.status = state["status"]
        self.folder.start_clock(self.progress.seconds)
        ended = state["over"] and self.status != "finished"
        self.is_over = self.step >= self.plan.steps or ended or self.is_budget_spent
        if self.progress.best_step is not None:
            last = self.progress.best_step == saved.step
            self.watch.best_weights = saved.model if last else select_part("best", tensors)

    # the end

    def finish(self) -> Result:
        """The best weights where a held-out set chose them, the last ones otherwise; their metrics on every split."""
        self.save()
        if self.watch.best_weights is not None:
            self.net.load_state_dict(self.watch.best_weights)
        metrics = self.final_metrics()
        if self.folder.path is not None:
            self.folder.write_model(self)
            self.folder.write_result(self.result(self.status, None, metrics))
        p = self.progress
        return Result(
            self.net, self.status, self.step, p.seconds, p.success_step is not None, p.success_step, p.success_seconds,
            p.success_work, p.best_step, p.skipped, p.work, metrics, self.logged_rows(), self.folder.path,
        )  # fmt: skip

    def final_metrics(self) -> dict[str, dict[str, float]]:
        """Of the weights as they are now, by split."""
        finite = self.task.size is not None
        n = self.plan.tests if finite else self.plan.confirm
        metrics = {}
        for split in ("train", *self.task.splits) if finite else self.task.splits:
            values = self.watch.measure(split, self.step, "final", n)
            values.pop("sequences")
            metrics[split] = values
        return metrics

    def logged_rows(self) -> list[Row] | json_rows.StoredRows:
        """The rows so far, or where they are."""
        rows = self.folder.metrics
        return self.rows if rows is None else json_rows.StoredRows(rows.path.absolute(), rows.bytes)

    def result(self, status: str, reason: str | None, metrics: Any = None) -> dict[str, Any]:
        p = self.progress
        return {
            "status": status,
            "step": self.step,
            "seconds": round(self.elapsed(), 3),
            "reason": reason,
            "success": p.success_step is not None,
            "success_step": p.success_step,
            "success_seconds": p.success_seconds,
            "success_work": p.success_work,
            "work": p.work,
            "distance": None
            if self.plan.recipe.direction == "steepest"
            else summarise_distances(self.distance_rows()),
            "goal": str(self.task.goal) if self.task.goal else None,
            "metric": self.task.metric,
            "best_step": p.best_step,
            "skipped": p.skipped,
            "metrics": metrics or {},
            "parameters": sum(q.numel() for q in self.net.parameters()),
            "examples": collect_examples(self.net, self.task, self.plan.seed) if metrics else [],
        }

    def distance_rows(self) -> Iterable[Row]:
        """The rows that tell the distance between a step's direction and its gradient, those before a resume too."""
        written = self.folder.metrics
        if written is None:
            return self.rows
        return (
            json_rows.parse_row(line, written.path)
            for line in written.lines()
            if b'"distance":' in line
        )


def refuse_if_mismatched(net: Any, task: Any) -> None:
    """Be sure that the network is made for the task."""
    if not isinstance(net, Net) or not isinstance(task, Task):
        raise KindError(
            "train takes a Network (or a Stack, an EncoderDecoder) and a Task; "
            f"got {type(net).__name__} and {type(task).__name__}."
        )
    for what in ("inputs", "outputs", "readout", "output"):
        ours, theirs = getattr(net, what), getattr(task, what)
        if ours != theirs:
            raise InputError(
                f"task '{task.name}' needs a network with {what}={theirs!r}; this one has {ours!r}."
            )
