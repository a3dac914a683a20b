"""Online learning: a stream of steps (u_t, y_t), each predicted and then learned from, in memory that does not grow.

    a_t     = V x_t + b_o                       what the network says, before it has seen y_t
    L_t     = loss(a_t, y_t)                    its prequential loss: every step is a test first
    theta   <- theta - eta dL_t/dtheta          RTRL: at every step, dL_t/dtheta = lam_t' S_t, no past is kept
                                                Truncated(k1, k2): every k1 steps, through a window of the last k2

A run is a function of the stream, the weights it began with and the seed: saved and gone on with, it is the same, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from torch import Tensor

from ..gradients.rtrl import RTRL
from ..gradients.truncated import Truncated
from ..networks.interface import Net
from ..objectives.losses import LossLike
from ..optimisers.recipes import Optimiser
from ..tasks.files.stream import File
from .display import Display
from .learning import Learned, Learning, as_pair
from .plan import LearningPlan

read = File


def learn(
    net: Net,
    stream: Iterable[Any],
    loss: LossLike | None = None,
    learner: RTRL | Truncated | None = None,
    optimiser: Optimiser | None = None,
    *,
    clip: float | None = None,
    held: bool = False,
    steps: int | None = None,
    batch: int = 1,
    every: int = 1000,
    window: int = 1000,
    score: Callable[[Tensor], dict[str, float]] | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    checkpoint: int = 10_000,
    keep: int = 2,
    resume: bool = False,
    fallback: bool = False,
    display: Display | bool = False,
    description: dict[str, Any] | None = None,
    command: str | None = None,
) -> Learned:
    """Learn from a stream, one step after the other.

    stream      any iterable of (u_t, y_t), u_t [inputs] or [batch, inputs]; None among them begins another sequence, from the
                initial state. online.read(path) makes one of a file
    loss        by name or as a function; that of the stream if it has one
    learner     RTRL() (default): an update at every step; Truncated(k1, k2): one every k1 steps, by the sum of their losses
    clip        the largest norm of a gradient; a larger one is scaled down
    held        the weights stay as they are: nothing is learned, and `gradient` is the sum of all gradients
    steps       at most so many; without it, to the end of the stream
    every       steps between rows of figures; window: how many of the last steps `recent` is the mean of
    score       a_t -> figures of the latest step; that of the stream if it has one
    folder      where to write metrics, checkpoints (every `checkpoint` steps; the last `keep` stay) and the model; with
                resume=True the run in that folder goes on. The stream is read again from its beginning, and the steps that
                were taken are passed over
    display     True: a bar on a terminal, lines elsewhere; or any object with step, validation, say and close
    """
    plan = LearningPlan(
        loss=loss,
        learner=learner,
        optimiser=optimiser,
        clip=clip,
        held=held,
        steps=steps,
        batch=batch,
        every=every,
        window=window,
        score=score,
        seed=seed,
        folder=folder,
        checkpoint=checkpoint,
        keep=keep,
        display=display,
        description=description,
        command=command,
    )
    return carry_out(Learning(net, stream, plan), resume, fallback)


def carry_out(run: Learning, resume: bool, fallback: bool) -> Learned:
    """Predict, learn, save, until the stream or the run ends, or a signal asks it to stop."""
    with closing(run.display), run.folder.open(run, resume, fallback) as stopped:
        for pair in run.remaining_items():
            if pair is None:
                run.finish_sequence()
                run.carry.reset()
                continue
            run.take_step(*as_pair(pair, run.step + 1))
            if run.step % run.plan.every == 0:
                run.log_progress()
            if stopped:
                raise run.folder.save_interrupted(run, stopped[0])
            if run.step % run.plan.checkpoint == 0:
                run.save()
        if stopped:  # a pipe often ends by the same signal
            raise run.folder.save_interrupted(run, stopped[0])
        return run.finish()
