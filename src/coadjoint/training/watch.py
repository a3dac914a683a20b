"""Watching a run: held-out metrics along the way, the best weights, and when the run may end."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..errors import InputError, NumericalError
from ..networks.interface import Net
from ..tasks.task import Task
from . import validation
from .display import Row
from .plan import TrainingPlan
from .progress import Progress


class Watch:
    """Looks at a run between its steps."""

    best_weights: dict[str, Tensor] | None = None  # of `progress.best_step`
    end_status: str | None = None  # "success" or "early-stopped", when the run may end
    improved = False  # was the latest look the best so far?

    def __init__(
        self,
        net: Net,
        task: Task,
        plan: TrainingPlan,
        past: Progress,
        log: Callable[[Row], None],
        say: Callable[[str], None],
    ) -> None:
        self.net = net
        self.task = task
        self.plan = plan
        self.progress = past
        self.log = log
        self.say = say
        # Finite tasks are watched on "valid" alone; fresh sequences of a generated one tell nothing about later ones.
        self.split = "valid" if "valid" in task.splits else "test" if task.size is None else None
        if plan.patience is not None and self.split is None:
            raise InputError("patience needs a validation set: give one, or leave patience out.")

    def validate(self, step: int, seconds: Callable[[], float]) -> list[Row]:
        """Held-out metrics, costates, success, patience. The rows to be shown; all of them are logged."""
        self.improved = False
        shown: list[Row] = []
        for split in self.task.splits if self.split != "valid" else ("valid",):
            values = self.measure(split, step, step, self.plan.tests)
            shown.append(self.log_held_out(split, step, values))
            if split == self.split and step > 0:
                self.update_best(step, values, seconds)
        probe = self.probe(step)
        self.log(probe)
        return [*shown, probe]

    def measure(self, split: str, step: int, draw: int | str, n: int) -> dict[str, float]:
        """Metrics of a held-out set; NaN where states leave their range: whether the run stops is for its own steps to say."""
        try:
            return validation.evaluate(self.net, self.task, split, self.plan.seed, draw, n)
        except NumericalError as error:
            self.say(f"step {step}, {split}: {error}")
            goal = self.task.goal.metric if self.task.goal else "loss"
            return {"sequences": 0, **dict.fromkeys(("loss", self.task.metric, goal), math.nan)}

    def log_held_out(self, split: str, step: int, values: dict[str, float]) -> Row:
        row = {"kind": "held-out", "split": split, "step": step, **values}
        self.log(row)
        return row

    def update_best(
        self, step: int, values: dict[str, float], seconds: Callable[[], float]
    ) -> None:
        """Is this the best look so far? Has the run reached its goal, or waited for too long?"""
        task, past, plan = self.task, self.progress, self.plan
        value = values[task.metric]
        goal = self.meets_goal(values)
        if goal and task.size is None and plan.confirm > plan.tests:
            split = str(self.split)
            values = self.measure(split, step, f"confirm {step}", plan.confirm)
            self.log_held_out(split, step, values)
            goal = self.meets_goal(values)
        worst = math.inf if task.lower else -math.inf
        best = worst if past.best is None else past.best
        better = value < best if task.lower else value > best  # never, of a NaN
        equal = (
            value == past.best and values["loss"] < past.best_loss
        )  # an accuracy has many equals: the loss decides
        if better or equal or goal:
            past.best, past.best_step, past.waited = value, step, 0
            past.best_loss = values["loss"]
            self.improved = True
            self.best_weights = {
                name: p.detach().clone() for name, p in self.net.state_dict().items()
            }
        else:
            past.waited += 1
        if plan.recipe.schedule.patience is not None:
            self.lower_rate_on_plateau(values["loss"])
        if goal and past.success_step is None:
            past.success_step, past.success_seconds, past.success_work = step, seconds(), past.work
            if plan.stop_on_success:
                self.end_status = "success"
        if plan.patience is not None and past.waited >= plan.patience and self.end_status is None:
            self.end_status = "early-stopped"

    def meets_goal(self, values: dict[str, float]) -> bool:
        goal = self.task.goal
        return goal is not None and goal.is_met(values[goal.metric])

    def lower_rate_on_plateau(self, loss: float) -> None:
        """The plateau schedule: count looks without a better loss, and lower the step size."""
        past, schedule = self.progress, self.plan.recipe.schedule
        if loss < (math.inf if past.plateau is None else past.plateau):
            past.plateau, past.plateau_waited = loss, 0
            return
        past.plateau_waited += 1
        assert schedule.patience is not None
        if past.plateau_waited >= schedule.patience:
            past.factor, past.plateau_waited = past.factor * schedule.decay, 0

    def probe(self, step: int) -> Row:
        """What the gradient does inside the sequence: costates, temporal components, W's spectral radius."""
        split = self.split or (self.task.splits[0] if self.task.splits else "train")
        b = self.net.move_batch(
            next(self.task.held_out(split, self.plan.seed, "probe", self.plan.probes))
        )
        try:
            found = validation.probe_gradient(self.net, b, self.task)
        except NumericalError as error:
            found = {
                "t": [],
                "log10_costates": [],
                "temporal": None,
                "decay": None,
                "radius": None,
                "gradients": {},
            }
            found["fault"] = str(error)
        return {"kind": "probe", "step": step, **found}
