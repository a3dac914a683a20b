"""A training run in progress: its steps, validations, checkpoints and result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import NumericalError
from ..gradients import restoring
from ..gradients.shared import Shared
from ..networks.interface import Net
from ..optimisers.directions import distance
from ..optimisers.recipes import WITHOUT_STEP_SIZE
from ..tasks.data import Data
from ..tasks.task import Task
from . import json_rows, schemas
from .display import make_display
from .generation import write_samples
from .held_out import write_held_out
from .json_types import JsonObject, Row
from .layer_names import name_layers
from .matching import refuse_if_mismatched
from .pace import Budget, budgets_given
from .plan import TrainingPlan
from .progress import Progress, Result, summarise_distances
from .restore import parse_numbers, refuse_if_faulty, refuse_if_foreign, select_part
from .run_folder import RunFolder
from .step import StepEvaluator, StepResult, WeightsBefore, look_for_nonfinite
from .storage import Checkpoint
from .validation import collect_findings
from .watch import Watch

Metrics = dict[str, dict[str, float]]  # by split, then by name


class Training:
    """The training of a network on a task. `train` is the loop over its steps."""

    schema: type[schemas.Schema] = schemas.TrainingState

    def __init__(self, net: Net, task: Task, plan: TrainingPlan) -> None:
        """Prepare a run; `RunFolder.open` locks its folder and, if it is resumed, restores it."""
        refuse_if_mismatched(net, task)
        self.net = net
        self.task = task
        self.plan = plan
        self.stepper = plan.recipe.stepper(net)
        self.folder = RunFolder.of(plan.folder)
        self.step = 0
        self.progress = Progress()
        self.is_over = False
        self.checkpoint_due = False
        self.status = "finished"
        self.rows: list[Row] = []  # only of a run without a folder: others keep theirs on disk
        self.evaluator = StepEvaluator(net, task, plan, self.progress)
        self.before = WeightsBefore(net)
        self.watch = Watch(net, task, plan, self.progress, self.log, self.say)
        # A display may take over the terminal: nothing is refused any more once it is there.
        self.display = make_display(
            plan.display, task.name, plan.steps, self.watch.metric, plan.every, self.budgets
        )
        torch.manual_seed(plan.seed)

    # one step

    def advance(self) -> None:
        """Take one step of the optimiser, and log its row of metrics.

        If something is not finite, the step is skipped or the run stops, as plan.nonfinite says.
        """
        self.step += 1
        recipe = self.plan.recipe
        evaluate = self.evaluator.evaluate_finite
        try:
            result, gradient_norm, size = evaluate(self.step - 1, meanwhile=self.before.take)
        except NumericalError as error:
            self.reject_step(str(error))
            return
        direction, clipped = self.evaluator.clip(result.direction, size, self.step)
        rate = recipe.lr * recipe.schedule(self.step - 1, self.plan.steps) * self.progress.factor
        point = self.evaluator.point(self.step - 1, result, direction)
        try:
            figures = self.stepper.step(point, rate)
        except NumericalError as error:
            self.before.put_back()
            self.reject_step(str(error))
            return
        faulty_names = look_for_nonfinite(self.before.parameters)  # a GPU looks during what follows
        row = self.step_row(result, gradient_norm)
        if recipe.name not in WITHOUT_STEP_SIZE:
            row["rate"] = rate
        if clipped:
            row["clipped"] = True
        row |= figures
        if recipe.direction != "steepest":
            row["distance"] = distance(result.direction, result.gradient)
        faulty = faulty_names()
        if faulty:  # cannot be skipped: the optimiser's state is lost, too
            names = ", ".join(faulty)
            self.undo_step(f"{names} is not finite after the optimiser's step: lower the step size")
        self.log(row)
        self.display.step(self.step, row)
        self.end_step()

    def step_row(self, result: StepResult, gradient_norm: float) -> Row:
        """The row of metrics.jsonl for the present step: the figures of its start."""
        return {
            "kind": "train",
            "step": self.step,
            "loss": result.loss,
            "penalty": result.penalty,
            "rho": result.rho,
            "gradient": gradient_norm,
        }

    def end_step(self) -> None:
        """Note whether a checkpoint is due, and whether the run is over."""
        self.checkpoint_due = self.checkpoint_due or self.step % self.plan.checkpoint == 0
        self.is_over = self.step >= self.plan.steps or self.is_budget_spent

    @property
    def is_budget_spent(self) -> bool:
        """Whether there are budgets and all of them are used up."""
        return bool(self.budgets) and all(budget.used() >= budget.limit for budget in self.budgets)

    @cached_property
    def budgets(self) -> list[Budget]:
        """The budgets that were given."""
        return budgets_given(
            gradients=(self.plan.gradients, lambda: self.progress.work),
            seconds=(self.plan.seconds, self.elapsed),
        )

    def elapsed(self) -> float:
        """Seconds of training so far, including those before a resume."""
        return self.folder.elapsed()

    def reject_step(self, reason: str) -> None:
        """Leave weights, optimiser and random numbers as they were before this step.

        plan.nonfinite: "stop" and "dump" save a replay of the step, if there is a folder; "stop"
        then saves the run and raises NumericalError. reason: what is not finite.
        """
        message = f"step {self.step}: {reason.rstrip('.')}"
        torch.set_rng_state(self.evaluator.rng_state)
        self.progress.skipped += 1
        if self.folder.path is not None and self.plan.nonfinite != "skip":
            self.folder.save_replay(self.snapshot(reason))
            message += f". Replay it with: coadjoint replay {self.folder.quoted_path}"
        if self.plan.nonfinite == "stop":  # the run is saved as if the step had not begun
            self.step -= 1
            self.progress.skipped -= 1
            self.save()
            self.fail(message)
        self.log({"kind": "train", "step": self.step, "skipped": reason})
        self.display.say(message)
        self.end_step()

    def undo_step(self, reason: str) -> NoReturn:
        """Put the weights from before the step back, and stop.

        No checkpoint is saved: the step overflowed, and the optimiser's state with it.
        """
        self.before.put_back()
        self.step -= 1
        self.fail(f"step {self.step + 1}: {reason}")

    def fail(self, message: str) -> NoReturn:
        """Write result.json with this message as its reason, and raise NumericalError."""
        self.folder.write_result(self.result("failed", message))
        raise NumericalError(f"{message}. The weights are those from before this step.")

    # between steps

    def validate(self) -> None:
        """Measure the held-out metrics, probe the gradient, and see whether the run may end."""
        rows = self.watch.validate(self.step, self.elapsed)
        self.checkpoint_due = self.checkpoint_due or self.watch.improved
        status = self.watch.end_status
        # After its last step a run is over anyway: it may still succeed, but not stop early.
        if status == "success" or (status is not None and not self.is_over):
            self.status = status
            self.is_over = True
        self.progress.seconds = self.elapsed()
        self.folder.log_time(self.step, self.progress.seconds)
        self.display.validation(self.step, rows)

    def say(self, text: str) -> None:
        """Show a line of text on the display."""
        self.display.say(text)

    def log(self, row: Row) -> None:
        """Write a row to metrics.jsonl, or keep it in memory, and hand it to the loggers."""
        if self.folder.path is None:
            self.rows.append(row)
        self.folder.append(row)
        for logger in self.plan.loggers:
            logger(row)

    # checkpoints

    @property
    def bytes_needed(self) -> int:
        """A lower bound on what the run writes: four copies of the weights.

        They are those of the model and of a few checkpoints; 1 MiB is for all other files.
        """
        return 4 * sum(p.numel() * p.element_size() for p in self.net.parameters()) + 2**20

    @property
    def max_file_bytes(self) -> int:
        """A generous upper bound on a file of a checkpoint: larger ones are refused unread.

        For each weight it may hold up to eight numbers of up to 8 bytes: the weight, the best one,
        and what the optimiser keeps. L-BFGS keeps two more for each step it remembers.
        """
        tensors = self.net.state_dict().values()
        bytes_of_weights: int = sum(t.numel() * max(8, t.element_size()) for t in tensors)
        history = int(self.plan.recipe.settings.get("history_size", 0))
        copies = 8 + 2 * history
        return 2**26 + bytes_of_weights * copies  # 64 MiB for what does not grow with the weights

    def save(self) -> None:
        """Write a checkpoint, if there is a folder."""
        self.checkpoint_due = False
        # The time must stay that of the checkpoint if this step has one already.
        if self.folder.path is not None and self.folder.saved_step != self.step:
            self.progress.seconds = self.elapsed()
        self.folder.save(self, self.progress.best_step)

    def model_description(self) -> JsonObject:
        """What a model file says about itself: at least how its data are read, if they are own."""
        if self.plan.description is None and isinstance(self.task, Data):
            return {"data": self.task.describe()}
        return self.plan.description or {}

    def snapshot(self, reason: str | None = None) -> Checkpoint:
        """Everything the next step depends on.

        reason: why the step that has begun was rejected, for a replay of it.
        """
        step = self.step if reason is None else self.step - 1
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        numbers: JsonObject = {}
        for name, value in self.stepper.state.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{name}"] = value
            else:
                numbers[name] = value
        best = self.watch.best_weights
        # The best weights are stored once more unless they are those of this step.
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
        if isinstance(self.plan.method, Shared):
            state["shards"] = self.plan.shard_count
        return Checkpoint(step, dict(self.net.state_dict()), tensors, state)

    def check(self, saved: Checkpoint) -> None:
        """Refuse a checkpoint that lacks something `restore` or the next step needs."""
        state = saved.state
        tensors = saved.tensors
        progress = state["progress"]
        parts = {"optimiser", "rng"}  # the first words of the tensors' names
        # The best weights are there if they exist and are not those of this step.
        if progress["best_step"] not in (None, saved.step):
            parts.add("best")
            fault = restoring.misfit(self.net.state_dict(), select_part("best", tensors))
            refuse_if_faulty(fault, "state.safetensors, best weights: ")
        rng_state = {name: value for name, value in tensors.items() if name == "rng"}
        refuse_if_faulty(restoring.misfit({"rng": torch.get_rng_state()}, rng_state))
        refuse_if_foreign(tensors, parts)
        # A replay was saved after its own step had been counted as skipped.
        skipped = progress["skipped"] - (state["reason"] is not None)
        has_stepped = saved.step > skipped  # only then has an optimiser all its tensors
        fault = self.stepper.complaint(self.net, optimiser_state(saved), has_stepped)
        refuse_if_faulty(fault, "its optimiser: ")
        shards = state.get("shards", 1)
        if shards != self.plan.shard_count:
            refuse_if_faulty(
                f"it was trained with shards={shards}; got shards={self.plan.shard_count}"
            )
        expected = self.plan.method.state
        if set(state.get("method", {})) != set(expected):
            names = ", ".join(sorted(expected)) or "nothing"
            refuse_if_faulty(f"'method' should hold {names}", "state.json: ")

    def restore(self, saved: Checkpoint) -> None:
        """Put everything but the weights back to where it was."""
        state = saved.state
        self.stepper.restore(optimiser_state(saved))
        self.plan.method.state.update(state.get("method", {}))
        try:
            torch.set_rng_state(saved.tensors["rng"])
        except RuntimeError:
            refuse_if_faulty(
                "its random numbers are damaged ('rng' in state.safetensors)",
                f"{self.folder.path} cannot be resumed: ",
            )
        # In place: the evaluator and the watch hold the same object.
        vars(self.progress).update(parse_numbers(state["progress"]))
        self.step = saved.step
        self.status = state["status"]
        self.folder.start_clock(self.progress.seconds)
        # A run that took all its steps goes on if it is given more of them; others ended for good.
        ended = state["over"] and self.status != "finished"
        self.is_over = self.step >= self.plan.steps or ended or self.is_budget_spent
        if self.progress.best_step == saved.step:
            self.watch.best_weights = saved.model
        elif self.progress.best_step is not None:
            self.watch.best_weights = select_part("best", saved.tensors)

    # the end

    def finish(self) -> Result:
        """Save the run, write model.safetensors and result.json, and return the result.

        The network gets the best weights if a held-out set chose them, else it keeps the last.
        """
        self.save()
        if self.watch.best_weights is not None:
            self.net.load_state_dict(self.watch.best_weights)
        metrics = self.final_metrics()
        if self.folder.path is not None:
            self.folder.write_model(self)
            weights_step = self.progress.best_step or self.step
            write_held_out(
                self.folder.path,
                self.net,
                self.task,
                weights_step,
                self.plan.tests,
                self.plan.looks,
            )
            write_samples(self.folder.path, self.net, self.task)
            self.folder.write_result(self.result(self.status, None, metrics))
        progress = self.progress
        return Result(
            network=self.net,
            status=self.status,
            step=self.step,
            seconds=progress.seconds,
            success=progress.success_step is not None,
            success_step=progress.success_step,
            success_seconds=progress.success_seconds,
            success_work=progress.success_work,
            best_step=progress.best_step,
            skipped=progress.skipped,
            work=progress.work,
            metrics=metrics,
            selected_by=self.watch.selected_by,
            row_source=self.logged_rows(),
            folder=self.folder.path,
        )

    def final_metrics(self) -> Metrics:
        """Metrics of the present weights on every split; of a finite task also on "train"."""
        splits = tuple(self.task.splits)
        sequences = self.plan.confirm  # a generated task draws as many
        if self.task.size is not None:  # a finite task uses all it has, in batches of this size
            splits = ("train", *splits)
            sequences = self.plan.tests
        metrics = {}
        for split in splits:
            values = self.watch.measure(split, self.step, "final", sequences)
            values.pop("sequences")
            metrics[split] = values
        return metrics

    def logged_rows(self) -> list[Row] | json_rows.StoredRows:
        """The rows of metrics so far: a list without a folder, else where on disk they are."""
        rows = self.folder.metrics
        if rows is None:
            return self.rows
        return json_rows.StoredRows(rows.path.absolute(), rows.byte_count)

    def result(self, status: str, reason: str | None, metrics: Metrics | None = None) -> JsonObject:
        """The content of result.json.

        reason: why the run failed or was interrupted. metrics: the final ones by split; None, and
        then there are no examples either, for a run that failed or was interrupted.
        """
        progress = self.progress
        distances = None
        if self.plan.recipe.direction != "steepest":
            distances = summarise_distances(self.distance_rows())
        result: JsonObject = {
            "status": status,
            "step": self.step,
            "seconds": round(self.elapsed(), 3),
            "reason": reason,
            "success": progress.success_step is not None,
            "success_step": progress.success_step,
            "success_seconds": progress.success_seconds,
            "success_work": progress.success_work,
            "work": progress.work,
            "distance": distances,
            "goal": str(self.task.goal) if self.task.goal else None,
            "metric": self.task.metric,
            "selected_by": self.watch.selected_by,
            "best_step": progress.best_step,
            "skipped": progress.skipped,
            "metrics": metrics or {},
            "parameters": sum(p.numel() for p in self.net.parameters()),
            "examples": [],
        }
        result |= self.plan.sharing
        layers = name_layers(self.net)
        if layers:
            result["layers"] = layers
        if metrics:
            result |= collect_findings(
                self.net, self.task, self.plan.seed, self.plan.method.segments
            )
        return result

    def distance_rows(self) -> Iterable[Row]:
        """The rows of the whole run that may hold the distance of a direction from the gradient."""
        written = self.folder.metrics
        if written is None:
            return self.rows
        # Other lines are not even parsed: there may be millions.
        lines = (line for line in written.lines() if b'"distance":' in line)
        return (json_rows.parse_row(line, written.path) for line in lines)


def optimiser_state(saved: Checkpoint) -> JsonObject:
    """The optimiser's tensors and numbers, which a checkpoint keeps in two files."""
    tensors = select_part("optimiser", saved.tensors)
    return {**tensors, **parse_numbers(saved.state["optimiser"])}
