"""Training: a loop over steps.

Batches, held-out sequences and schedules are functions of the step and the seed alone. What depends
on the past is kept in `Progress` and saved. So a run resumed from a checkpoint takes the same steps
as one that was never interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing

from ..gradients.method import Method
from ..networks.interface import Net
from ..optimisers.hessian_free import HessianFree
from ..optimisers.recipes import Optimiser
from ..tasks.task import Task
from .curriculum import Easiest
from .display import Display
from .distributed import SharedTraining, carry_out_together, joined, shards_for
from .json_types import JsonObject, Row
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
    select: str | None = None,
    stop_on_success: bool = True,
    nonfinite: str = "stop",
    folder: str | os.PathLike[str] | None = None,
    checkpoint: int = 1000,
    keep: int = 2,
    resume: bool = False,
    fallback: bool = False,
    display: Display | bool = False,
    loggers: Sequence[Callable[[Row], None]] = (),
    description: JsonObject | None = None,
    command: str | None = None,
    distributed: bool = False,
    shards: int | None = None,
) -> Result:
    """Train a network on a task.

    >>> import coadjoint as co, torch
    >>> _ = torch.manual_seed(0)
    >>> net = co.Network("gru", inputs=6, hidden=16, outputs=4, output="softmax")
    >>> task = co.tasks.TemporalOrder(10)
    >>> result = co.train(net, task, optimiser=co.optimisers.adam(3e-2), steps=150, tests=200)
    >>> before, *_, after = [row["loss"] for row in result.rows if row["kind"] == "train"]
    >>> after < before / 2
    True

    Args:
        net: a Network, Stack or EncoderDecoder with the inputs and outputs of the task.
        task: one of co.tasks.
        gradient: BPTT() (the default), Penalised(G, weight), Truncated(k1, k2) or RTRL().
        optimiser: co.optimisers.adam(1e-3) by default.
        steps: the largest number of steps.
        batch: sequences in a batch.
        accumulate: batches in a step; their gradients are averaged.
        clip: the largest norm of a gradient; a longer one is scaled down.
        clip_value: the largest absolute entry of a gradient; larger ones are cut.
        clip_mean: the largest norm, as a multiple of the running mean of norms.
        weight_noise: standard deviation of noise added to the weights while a gradient is
            computed, drawn anew in each step.
        easiest: a curriculum by difficulty, co.training.curriculum.Easiest(start, steps).
        gradients: a budget of gradients of one sequence; other work counts by its sweeps, two for
            a gradient. With several budgets the run ends when all are used up.
        seconds: a budget of time.
        seed: determines batches, held-out sequences and dropout.
        every: steps between validations.
        tests: held-out sequences for a validation; of a finite task all are used.
        confirm: held-out sequences that confirm a success (generated tasks).
        probes: held-out sequences whose costates are examined.
        patience: stop after this many validations without a better metric.
        select: the held-out metric that chooses the best weights and that patience waits for:
            "loss" or one of the task's, by default task.metric.
        stop_on_success: end the run once the goal of the task is reached.
        nonfinite: what to do about a loss or gradient that is not finite. It never reaches the
            weights: "stop", "skip" the step, or skip it and "dump" what `coadjoint replay` needs.
        folder: where metrics, checkpoints and the model are written.
        checkpoint: steps between checkpoints.
        keep: how many checkpoints to keep, besides the best one.
        resume: continue the run in `folder`, bit for bit, given the same other arguments.
        fallback: resume from an older checkpoint if the latest one is damaged.
        display: True for a bar on a terminal and lines elsewhere, or any object with step,
            validation, say and close.
        loggers: functions called with each row of metrics.
        description: what the model file says about itself.
        command: the command line, for environment.json.
        distributed: train with all processes that torchrun has started; every one of them calls
            this function with the same arguments. Rank 0 writes, shows and decides.
        shards: into how many parts each batch is cut, whatever the number of processes, which must
            not be greater: the bits of a run are the same on any number of them. By default as many
            as there are processes. Give it when you resume a run on another number of processes.

    Returns:
        The Result, whose network has the best weights if a validation set chose them.

    Raises:
        NumericalError: something was not finite, with nonfinite="stop".
        Interrupted: a signal stopped the run; it was saved if there is a folder.
    """
    with joined(distributed) as group:
        if group.size > 1:
            shards = shards_for(group, shards, gradient)
        if group.rank > 0:  # rank 0 alone writes and shows
            folder = None
            display = False
            loggers = ()
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
            select=select,
            stop_on_success=stop_on_success,
            nonfinite=nonfinite,
            folder=folder,
            checkpoint=checkpoint,
            keep=keep,
            display=display,
            loggers=loggers,
            description=description,
            command=command,
            shards=shards,
        )
        if group.size > 1:
            return carry_out_together(SharedTraining(net, task, plan, group), resume, fallback)
        return carry_out(Training(net, task, plan), resume, fallback)


def carry_out(run: Training, resume: bool, fallback: bool) -> Result:
    """Step, validate and save until the run is over or a signal stops it.

    resume: continue the run in its folder. fallback: from an older checkpoint if need be.
    """
    # `stopped` receives the names of signals that ask the run to stop.
    with closing(run.display), run.folder.open(run, resume, fallback) as stopped:
        if run.step == 0:  # the metrics of the initial weights
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


def recompute_step(net: Net, task: Task, saved: Checkpoint, arguments: JsonObject) -> StepResult:
    """The gradient of the step after a checkpoint, computed as the run did.

    arguments: those of `train` that the run had, for its TrainingPlan. Raises NumericalError if
    the gradient is not finite.
    """
    run = Training(net, task, TrainingPlan(**arguments))
    run.folder.check(run, saved)
    run.folder.restore(run, saved)
    return run.evaluator.evaluate_finite(saved.step)[0]
