"""Denoising: samples are restored from their noisy copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, real
from ..objectives.batch import Batch
from .task import Collection, Samples, Scores, Sequences, Task, rng


class Denoising(Collection):
    """Restore each sample x [inputs] from x + noise, for an autoencoder.

    name   of the task
    clean  the samples of each split, x [N, inputs]; their targets, if any, are not used
    noise  the standard deviation of the Gaussian noise on each entry; 0 for none

    A training step draws new noise, which depends on (seed, step) alone. That of held-out sets is
    fixed, so that their metrics can be compared between steps and runs. The loss is the squared
    error, summed over entries; the metric "mse" is its mean per entry.

    Example:
        >>> import numpy as np
        >>> import coadjoint as co
        >>> task = co.tasks.Denoising("ramps", {"train": co.tasks.Samples(np.eye(4))}, noise=0.1)
        >>> batch = task.batch(step=0, size=3, seed=1)
        >>> batch.u.shape, bool((batch.u - batch.y).abs().max() < 0.5)
        (torch.Size([3, 4]), True)
    """

    output = "identity"
    loss = "squared"
    metric = "mse"
    lower = True

    def __init__(self, name: str, clean: Mapping[str, Samples], noise: float = 0.2) -> None:
        self.name = name
        self.noise = float(real("noise", noise, least=0))
        sets = {}
        for split, samples in clean.items():
            x = samples.x
            if x.ndim != 2:
                raise InputError(
                    f"denoising takes samples [N, inputs]; got {list(x.shape)} for '{split}'."
                )
            sets[split] = noisy_copies(samples, self.noise, split)
        super().__init__(sets)
        self.inputs = sets["train"].x.shape[1]
        self.outputs = self.inputs
        self.shape = (self.inputs,)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Return training batch number `step` with the noise of this step."""
        return draw_noise(super().batch(step, size, seed), self.noise, step, seed)

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Return the squared error of all entries."""
        error = a.detach().double() - batch.y.to(a.device).double()
        return {"mse": (float(error.square().sum()), float(error.numel()))}

    def baseline(self) -> dict[str, float]:
        """Return the metrics of the mean of the training samples, on the last held-out set."""
        split = self.splits[-1] if self.splits else "train"
        mean = self._clean("train").mean(0, dtype=np.float64)
        mse = float(np.square(self._clean(split) - mean).mean())
        return {"loss": mse * self.inputs, "mse": mse}

    def _clean(self, split: str) -> np.ndarray:
        """Return the samples of a split without noise."""
        clean = self.sets[split].y
        assert isinstance(clean, np.ndarray)
        return clean


def denoise(task: Task, noise: float = 0.0) -> Denoising:
    """The task of restoring the samples of another task, as vectors, from noisy copies.

    A task may bring its own, by a method `denoising(noise)`. Sequences are refused.

    Example:
        >>> import coadjoint as co
        >>> co.tasks.denoise(co.tasks.make("digits-image"), noise=0.1).shape
        (64,)
    """
    if not isinstance(task, Collection) or task.shape is None:
        raise InputError(
            f"task '{task.name}' is made of sequences; an autoencoder restores samples without "
            "time, such as those of digits-flat."
        )
    if hasattr(task, "denoising"):
        own: Denoising = task.denoising(noise)
        return own
    clean = {}
    for split, samples in task.sets.items():
        assert isinstance(samples, Samples)  # what a task with a shape is made of
        clean[split] = Samples(samples.x.reshape(len(samples), -1), ids=samples.ids)
    restored = Denoising(task.name, clean, noise)
    restored.image_shape = task.image_shape or task.shape
    return restored


def noisy_copies(samples: Samples | Sequences, noise: float, split: str) -> Samples:
    """Return samples with fixed noise, that of a split, and with themselves as their targets."""
    assert isinstance(samples, Samples)
    clean = samples.x
    return Samples(add_noise(clean, noise, rng(0, "noise", split)), clean, samples.ids)


def draw_noise(batch: Batch, noise: float, step: int, seed: int) -> Batch:
    """Return the batch with its targets as inputs, plus the noise of this step."""
    noisy = add_noise(batch.y.numpy(), noise, rng(seed, "noise", step))
    return replace(batch, u=torch.from_numpy(noisy))


def add_noise(x: np.ndarray, noise: float, draw: np.random.Generator) -> np.ndarray:
    """Return x plus Gaussian noise of standard deviation `noise`, in the type of x."""
    noisy: np.ndarray = x + noise * draw.standard_normal(x.shape)
    return noisy.astype(x.dtype)
