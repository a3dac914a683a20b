"""A step of `coadjoint train`, compared with its gradient and a step of Adam alone."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ...gradients.method import Method
from ...networks.network import Network
from ...optimisers.recipes import adam
from ...tasks.synthetic import TemporalOrder
from ...training.ahead import MOST_BATCHES
from ...training.plan import TrainingPlan
from ...training.trainer import Training
from .goals import LIMITS, TRAINING_STEP, Contest, Contests, Pair
from .problems import METHODS, NetworkProblem, Run, Size

RATE = 1e-6  # so small that thousands of steps leave the weights where they are
CLIP = 1.0
STEPS = MOST_BATCHES  # of a run that is timed: a training run draws so many batches at a time
MANY = 10**9  # steps: the run neither ends nor saves while it is measured


def training_step(cell: str, size: Size, device: str, peers: tuple[str, ...]) -> Contests:
    """Temporal order, plain and penalised: the whole step against gradient and Adam.

    The sequences have at least the ten steps that the task needs. peers: not needed, both runs are
    ours.
    """
    T, B, d = size
    task = TemporalOrder(max(T, TemporalOrder.shortest))
    size = (max(T, TemporalOrder.shortest), B, d)
    for kind, method in METHODS.items():
        problem = NetworkProblem(cell, size, device)
        alone = gradient_and_adam(copy.deepcopy(problem.net), task, method, B)
        ours = f"{kind} step"
        peer = f"{kind} gradient, Adam"
        pair = Pair(ours, peer, LIMITS[TRAINING_STEP])
        with whole_step(problem.net, task, method, B) as step:
            runs: dict[str, Run] = {ours: step, peer: alone}
            yield Contest(cell, size, problem.engine, runs, (pair,), STEPS)


def gradient_and_adam(net: Network, task: TemporalOrder, method: Method, samples: int) -> Run:
    """Gradients on one and the same batch, written to the parameters, each with a step of Adam."""
    batch = net.move_batch(task.batch(0, samples, 0))
    optimiser = torch.optim.Adam(net.parameters(), RATE)

    def run() -> dict[str, object]:
        for _ in range(STEPS):
            method(net, batch, task.loss).write_grad(net)
            optimiser.step()
        return {}

    return run


@contextlib.contextmanager
def whole_step(net: Network, task: TemporalOrder, method: Method, samples: int) -> Iterator[Run]:
    """Steps of a training run: each draws its batch, clips, checks and logs as any step does.

    The run has a folder for its metrics, unless safetensors is missing, which folders need.
    """
    with tempfile.TemporaryDirectory() as place:
        has_folder = importlib.util.find_spec("safetensors") is not None
        plan = TrainingPlan(
            gradient=copy.deepcopy(method),
            optimiser=adam(RATE),
            clip=CLIP,
            batch=samples,
            steps=MANY,
            every=MANY,
            checkpoint=MANY,
            folder=Path(place, "run") if has_folder else None,
        )
        training = Training(net, task, plan)

        def run() -> dict[str, object]:
            for _ in range(STEPS):
                training.advance()
            if stopped:  # by Ctrl-C, which a run only takes note of
                raise KeyboardInterrupt
            return {}

        with training.folder.open(training) as stopped:
            yield run
