"""Online learning: each step (u_t, y_t) of a stream is predicted first and learned from afterwards.

    a_t     = V x_t + b_o                   the prediction, before y_t is seen
    L_t     = loss(a_t, y_t)                the prequential loss: every step is a test first
    theta   <- theta - eta dL_t/dtheta      RTRL: at every step, dL_t/dtheta = lam_t' S_t
                                            Truncated(k1, k2): every k1 steps, through the last k2

Memory does not grow with the stream. A run is a function of the stream, the initial weights and the
seed: one that is saved and resumed is the same, bit for bit.

>>> import coadjoint as co
>>> net = co.Network("elman", inputs=1, hidden=4, outputs=1, readout="every")
>>> co.online.learn(net, [([0.1], [0.2])] * 5, "squared").status
'ended'
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing

from torch import Tensor

from ..gradients.rtrl import RTRL
from ..gradients.truncated import Truncated
from ..networks.interface import Net
from ..objectives.losses import LossLike
from ..optimisers.recipes import Optimiser
from ..tasks.files.stream import File
from .display import Display
from .json_types import JsonObject
from .learning import Learned, Learning, as_pair
from .plan import LearningPlan

read = File


def learn(
    net: Net,
    stream: Iterable[object],
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
    description: JsonObject | None = None,
    command: str | None = None,
) -> Learned:
    """Learn from a stream, one step at a time.

    >>> import coadjoint as co, torch
    >>> _ = torch.manual_seed(0)
    >>> net = co.Network("elman", inputs=1, hidden=8, outputs=1, readout="every")
    >>> stream = [([1.0 if t % 3 else 0.0], [1.0 if (t + 1) % 3 else 0.0]) for t in range(600)]
    >>> adam = co.optimisers.adam(1e-2)
    >>> learned = co.online.learn(net, stream, "squared", optimiser=adam, window=50)
    >>> learned.step, learned.recent["loss"] < learned.so_far["loss"] / 10
    (600, True)

    Args:
        net: a Network with a readout at every step.
        stream: any iterable of (u_t, y_t), with u_t [inputs] or [batch, inputs]; None starts a new
            sequence, from the initial state. online.read(path) makes a stream from a file.
        loss: by name or as a function; by default the loss of the stream, if it has one.
        learner: RTRL() (the default), an update at every step; or Truncated(k1, k2), an update
            every k1 steps by the sum of their losses.
        optimiser: co.optimisers.adam(1e-3) by default.
        clip: the largest norm of a gradient; a longer one is scaled down.
        held: keep the weights as they are: nothing is learned, and the result's `gradient` is the
            sum of all gradients.
        steps: the largest number of steps; by default the whole stream.
        batch: sequences that run side by side.
        every: steps between rows of metrics.
        window: how many of the last steps `recent` is the mean of.
        score: a_t -> scores of the latest step by name; by default that of the stream, if any.
        seed: determines dropout.
        folder: where metrics, checkpoints and the model are written.
        checkpoint: steps between checkpoints.
        keep: how many checkpoints to keep.
        resume: continue the run in `folder`. The stream is read from its beginning, and the steps
            already taken are skipped.
        fallback: resume from an older checkpoint if the latest one is damaged.
        display: True for a bar on a terminal and lines elsewhere, or any object with step,
            validation, say and close.
        description: what the model file says about itself.
        command: the command line, for environment.json.

    Returns:
        The network, the mean losses and scores, and how the run ended.
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
    """Predict, learn and save until the stream or the run ends, or a signal stops it.

    resume: continue the run in its folder. fallback: from an older checkpoint if need be.
    """
    # `stopped` receives the names of signals that ask the run to stop.
    with closing(run.display), run.folder.open(run, resume, fallback) as stopped:
        for pair in run.remaining_items():
            if pair is None:  # a new sequence begins
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
        if stopped:  # the signal that stops a run often ends its pipe, too
            raise run.folder.save_interrupted(run, stopped[0])
        return run.finish()
