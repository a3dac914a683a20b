"""The time of one data-parallel step, predicted from a few measured numbers.

    t(P) = busy(P) (c(B / P) + 2 (P - 1) (latency + bytes / (P bandwidth)))
    busy(P) = max(1, P / cores) (1 + (crowding - 1) min(P - 1, cores - 1) / (cores - 1))

P processes take B / P samples each; c(n) is the time of one gradient of n samples in one process
with one thread. The second term is a ring all-reduce: 2 (P - 1) messages, one after the other, each
a P-th part of the vector. Processes beyond the number of cores take turns. `crowding` is how much
slower a gradient is while all cores compute one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Machine:
    """What was measured of a machine, or is assumed of several."""

    cores: int
    latency: float  # seconds of a message
    bandwidth: float  # bytes in a second, from one process to the next
    crowding: float = 1.0

    def busy(self, P: int) -> float:
        """By how much P processes at once slow each other down."""
        spread = 0.0
        if self.cores > 1:
            spread = min(P - 1, self.cores - 1) / (self.cores - 1)
        return max(1.0, P / self.cores) * (1 + (self.crowding - 1) * spread)


def allreduce_seconds(machine: Machine, size: float, P: int) -> float:
    """A ring all-reduce of `size` bytes over P processes that have a core each."""
    if P == 1:
        return 0.0
    return 2 * (P - 1) * (machine.latency + size / (P * machine.bandwidth))


def gradient_seconds(measured: Mapping[int, float], samples: int) -> float:
    """c(samples): measured, or on the line through the two nearest sizes.

    measured: seconds by the number of samples, for two sizes at least.
    """
    if samples in measured:
        return measured[samples]
    sizes = sorted(measured, key=lambda size: abs(size - samples))[:2]
    low, high = sorted(sizes)
    slope = (measured[high] - measured[low]) / (high - low)
    return max(measured[low] + slope * (samples - low), 0.0)


@dataclass(frozen=True)
class Prediction:
    """The parts of a step, in seconds."""

    compute: float
    communicate: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.communicate


def predict(
    machine: Machine, measured: Mapping[int, float], samples: int, parameters: int, P: int
) -> Prediction:
    """The step of P processes that share `samples` samples of a model with so many parameters."""
    busy = machine.busy(P)
    compute = busy * gradient_seconds(measured, math.ceil(samples / P))
    communicate = busy * allreduce_seconds(machine, ITEM * parameters, P)
    return Prediction(compute, communicate)


def fit(times: Mapping[int, float]) -> tuple[float, float]:
    """(latency, bandwidth) from the seconds of all-reduces of two processes, by bytes.

    Two processes take 2 latency + bytes / bandwidth: the smallest vector gives the one, the largest
    the other.
    """
    small = min(times)
    large = max(times)
    latency = times[small] / 2
    return latency, large / max(times[large] - times[small], 1e-9)


def break_even(
    machine: Machine, measured: Mapping[int, float], samples: int, parameters: int
) -> tuple[int, int]:
    """(the fastest number of processes, the largest at 50% efficiency or more), a core each.

    Powers of two up to one sample for each process are tried.
    """
    alone = predict(machine, measured, samples, parameters, 1).step
    best = (alone, 1)
    efficient = 1
    P = 2
    while samples >= P:
        roomy = Machine(max(P, machine.cores), machine.latency, machine.bandwidth)
        step = predict(roomy, measured, samples, parameters, P).step
        best = min(best, (step, P))
        if alone / step >= 0.5 * P and efficient == P // 2:
            efficient = P
        P *= 2
    return best[1], efficient
