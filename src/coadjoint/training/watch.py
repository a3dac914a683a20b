"""Validation along a run: held-out metrics, the best weights, and when the run may end."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..errors import InputError, NumericalError
from ..gradients.shared import unshared
from ..networks.interface import Net
from ..tasks.task import Task
from . import validation
from .advice import advise_on_decay
from .json_types import Row
from .plan import TrainingPlan
from .progress import Progress


class Watch:
    """Validates a run between its steps."""

    best_weights: dict[str, Tensor] | None = None  # those of `progress.best_step`
    end_status: str | None = None  # "success" or "early-stopped", once the run may end
    improved = False  # whether the latest validation is the best so far

    def __init__(
        self,
        net: Net,
        task: Task,
        plan: TrainingPlan,
        progress: Progress,
        log: Callable[[Row], None],
        say: Callable[[str], None],
    ) -> None:
        """progress: of the run, updated here. log takes rows of metrics, say lines to display."""
        self.net = net
        self.task = task
        self.plan = plan
        self.progress = progress
        self.log = log
        self.say = say
        # The split that chooses weights and ends runs. A finite task's test set must not: it has
        # "valid" for that. A generated task draws new test sequences each time, so it may.
        self.split: str | None = None
        if "valid" in task.splits:
            self.split = "valid"
        elif task.size is None:
            self.split = "test"
        self.metric, self.lower = task.selector(plan.select)  # what chooses
        for name in ("patience", "select"):
            if getattr(plan, name) is not None and self.split is None:
                raise InputError(f"{name} needs a validation set: add one, or leave {name} out.")

    def validate(self, step: int, seconds: Callable[[], float]) -> list[Row]:
        """Log held-out metrics and a probe of the gradient; update `best_weights` and `end_status`.

        seconds: returns the time of the run so far, for a success. Returns the rows to display.
        """
        self.improved = False
        splits = ("valid",) if self.split == "valid" else self.task.splits
        rows: list[Row] = []
        for split in splits:
            # step twice: a generated task draws new sequences for each validation, by its step
            values = self.measure(split, step, step, self.plan.tests)
            rows.append(self.log_held_out(split, step, values))
            if split == self.split and step > 0:  # the initial weights are never the best
                self.update_best(step, values, seconds)
        probe = self.probe(step)
        self.log(probe)
        if step == 0:
            self.advise(probe)
        return [*rows, probe]

    def advise(self, probe: Row) -> None:
        """Say it if the initial weights can hardly learn; probe: their row."""
        line = advise_on_decay(probe, self.net, unshared(self.plan.method))
        if line is not None:
            self.say(line)

    @property
    def selected_by(self) -> str | None:
        """The metric that chose the best weights; None if none were chosen."""
        return None if self.progress.best_step is None else self.metric

    def measure(self, split: str, step: int, draw: int | str, n: int) -> dict[str, float]:
        """Metrics on a held-out set; NaN if the states overflow there.

        That does not stop the run: only its own steps decide. step: for the message about it.
        draw, n: which sequences of a generated task, and how many; its generator is seeded by draw.
        """
        try:
            return validation.evaluate(
                self.net, self.task, split, self.plan.seed, draw, n, self.plan.looks
            )
        except NumericalError as error:
            self.say(f"step {step}, {split}: {error}")
            goal = self.task.goal.metric if self.task.goal else "loss"
            names = ("loss", self.task.metric, self.metric, goal)
            return {"sequences": 0, **dict.fromkeys(names, math.nan)}

    def log_held_out(self, split: str, step: int, values: dict[str, float]) -> Row:
        """Log metrics of a split, and return their row."""
        row = {"kind": "held-out", "split": split, "step": step, **values}
        self.log(row)
        return row

    def update_best(
        self, step: int, values: dict[str, float], seconds: Callable[[], float]
    ) -> None:
        """Keep the weights if they are the best so far; end the run on success or lost patience.

        values: the metrics on the split that chooses. seconds: returns the time so far.
        """
        plan = self.plan
        progress = self.progress
        value = values[self.metric]
        if math.isnan(value) and not math.isnan(values["loss"]):  # an overflow was reported
            self.say(f"step {step}: {self.metric} is not defined on {self.split}: it chooses none.")
        reached = self.meets_goal(values)
        # A few test sequences may be lucky ones: a success is confirmed on more of them.
        if reached and self.task.size is None and plan.confirm > plan.tests:
            split = str(self.split)
            values = self.measure(split, step, f"confirm {step}", plan.confirm)
            self.log_held_out(split, step, values)
            reached = self.meets_goal(values)
        # A success counts as the best even if lucky sequences gave an earlier step a better metric.
        if self.is_better(value, values["loss"]) or reached:
            progress.best = value
            progress.best_loss = values["loss"]
            progress.best_step = step
            progress.waited = 0
            self.improved = True
            weights = self.net.state_dict()
            self.best_weights = {name: p.detach().clone() for name, p in weights.items()}
        else:
            progress.waited += 1
        if plan.recipe.schedule.patience is not None:
            self.lower_rate_on_plateau(values["loss"], plan.recipe.schedule.patience)
        if reached and progress.success_step is None:
            progress.success_step = step
            progress.success_seconds = seconds()
            progress.success_work = progress.work
            if plan.stop_on_success:
                self.end_status = "success"
        waited_enough = plan.patience is not None and progress.waited >= plan.patience
        if waited_enough and self.end_status is None:
            self.end_status = "early-stopped"

    def is_better(self, value: float, loss: float) -> bool:
        """Whether a metric is better than the best so far; equal metrics are decided by the loss.

        An accuracy is often equal. A NaN is never better.
        """
        best = self.progress.best
        if best is None:
            best = math.inf if self.lower else -math.inf
        elif value == best:
            return loss < self.progress.best_loss
        return value < best if self.lower else value > best

    def meets_goal(self, values: dict[str, float]) -> bool:
        """Whether metrics (by name) reach the task's goal; never, for a task without one."""
        goal = self.task.goal
        return goal is not None and goal.is_met(values[goal.metric])

    def lower_rate_on_plateau(self, loss: float, patience: int) -> None:
        """Lower the factor of the step size after `patience` validations without a better loss.

        progress.plateau is the best loss so far, None before the first validation.
        """
        progress = self.progress
        best = math.inf if progress.plateau is None else progress.plateau
        if loss < best:
            progress.plateau = loss
            progress.plateau_waited = 0
            return
        progress.plateau_waited += 1
        if progress.plateau_waited >= patience:
            progress.factor *= self.plan.recipe.schedule.decay
            progress.plateau_waited = 0

    def probe(self, step: int) -> Row:
        """The gradient within held-out sequences, as a row: see `validation.probe_gradient`.

        A row without figures, with the "fault", if the network overflows on them.
        """
        split = self.split
        if split is None:  # a finite task without "valid": nothing is chosen by a probe
            split = self.task.splits[0] if self.task.splits else "train"
        batch = next(self.task.held_out(split, self.plan.seed, "probe", self.plan.probes))
        try:
            figures = validation.probe_gradient(
                self.net,
                self.net.move_batch(batch),
                self.task,
                segments=self.plan.method.segments,
            )
        except NumericalError as error:
            figures = {
                "t": [],
                "log10_costates": [],
                "temporal": None,
                "decay": None,
                "radius": None,
                "gradients": {},
                "fault": str(error),
            }
        return {"kind": "probe", "step": step, **figures}
