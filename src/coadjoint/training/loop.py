"""Training: a loop over steps, each of them a function of (weights, optimiser, step, seed) and of nothing else.

Batches, held-out sequences and schedules are functions of the step, so a run that goes on from a checkpoint does what it
would have done. What depends on the past is kept in `Progress`, and saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from ..gradients.method import Method
from ..networks.interface import Net
from ..optimisers.hessian_free import HessianFree
from ..optimisers.recipes import Optimiser
from ..tasks.task import Task
from .curriculum import Easiest
from .display import Display, Row
from .plan import TrainingPlan
from .progress import Result
from .signals import Interrupted
from .step import StepResult
from .storage import Checkpoint
from .trainer import Training

__all__ = ["Interrupted", "Result", "recompute_step", "train"]


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
    display     True: a bar on a terminal, lines elsewhere; or any object with step, validation, say and close
    """
    plan = TrainingPlan(
        gradient=gradient,
        optimiser=optimiser,
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        clip=clip,
        clip_value=clip_value,
        clip_mean=clip_mean,
        weight_noise=weight_noise,
        easiest=easiest,
        gradients=gradients,
        seconds=seconds,
        seed=seed,
        every=every,
        tests=tests,
        confirm=confirm,
        probes=probes,
        patience=patience,
        stop_on_success=stop_on_success,
        nonfinite=nonfinite,
        folder=folder,
        checkpoint=checkpoint,
        keep=keep,
        display=display,
        loggers=loggers,
        description=description,
        command=command,
    )
    return carry_out(Training(net, task, plan), resume, fallback)


def carry_out(run: Training, resume: bool, fallback: bool) -> Result:
    """Step, look, save, until the run is over or a signal asks it to stop."""
    with closing(run.display), run.folder.open(run, resume, fallback) as stopped:
        if run.step == 0:
            run.validate()
        while not run.is_over:
            run.advance()
            if run.step % run.plan.every == 0 or run.is_over:
                run.validate()
            if stopped and not run.is_over:
                raise run.folder.save_interrupted(run, stopped[0])
            if run.checkpoint_due:
                run.save()
        return run.finish()


def recompute_step(
    net: Net, task: Task, saved: Checkpoint, arguments: dict[str, Any]
) -> StepResult:
    """The gradient of the step after a checkpoint, computed as the run did; NumericalError if it is not finite."""
    run = Training(net, task, TrainingPlan(**arguments))
    run.folder.check(run, saved)
    run.folder.restore(run, saved)
    return run.evaluator.evaluate_finite(saved.step)[0]
