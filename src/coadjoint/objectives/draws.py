"""Random signs for penalties, each a function of its place alone.

A penalty that draws directions must draw the same ones when a run is resumed, when a line search
evaluates an objective again, and when a sample is evaluated by itself. So nothing is drawn in
order: the sign of entry k of state i of sample j at training step s is one bit of a hash of
(seed, s, j, i, k). It does not depend on the device, nor on the size of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

BITS = 64  # signs from one hash
MASK = (1 << 64) - 1
# The multipliers and shifts of splitmix64 (Steele, Lea & Flood 2014).
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


class Place(NamedTuple):
    """What the present draws belong to."""

    step: int = 0  # the training step
    sample: int = 0  # the number of the first sample, where samples are evaluated one by one
    samples: tuple[int, ...] | None = None  # of all samples, where they do not follow each other


OUTSIDE = Place()  # of any training
PRESENT: ContextVar[Place] = ContextVar("coadjoint_draws", default=OUTSIDE)


@contextlib.contextmanager
def drawing(
    step: int | None = None, sample: int | None = None, samples: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Inside a `with` block, draw what belongs to this training step and these samples.

    sample   the number of the first one; the others follow it
    samples  the numbers of all of them
    None keeps the present one.
    """
    place = PRESENT.get()
    if step is not None:
        place = place._replace(step=step)
    if sample is not None:
        place = place._replace(sample=sample, samples=None)
    if samples is not None:
        place = place._replace(samples=samples)
    token = PRESENT.set(place)
    try:
        yield
    finally:
        PRESENT.reset(token)


def random_signs(seed: int, states: int, B: int, n: int, like: Tensor) -> Tensor:
    """Signs +-1 for the entries of states 1..`states` of B samples, [states, B, n].

    like  of their dtype and device

    Example:
        >>> import torch
        >>> signs = random_signs(0, 2, 3, 5, torch.zeros(()))
        >>> signs.shape, signs.abs().unique().tolist()
        (torch.Size([2, 3, 5]), [1.0])
        >>> torch.equal(random_signs(0, 2, 2, 4, torch.zeros(())), signs[:, :2, :4])
        True
    """
    place = PRESENT.get()
    device = like.device
    start = mix_number(mix_number(seed) + place.step)
    sample = sample_numbers(place, B).to(device)[None, :, None]
    state = torch.arange(1, states + 1, device=device)[:, None, None]
    words = -(-n // BITS)
    word = torch.arange(words, device=device)[None, None]
    hashed = mix(mix(mix(sample + signed(start)) + state) + word)  # [states, B, words]
    bit = torch.arange(BITS, device=device)
    bits = (hashed[..., None] >> bit) & 1
    chosen = bits.flatten(-2)[..., :n]
    return chosen.to(like.dtype) * 2 - 1


def sample_numbers(place: Place, B: int) -> Tensor:
    """The numbers of the present B samples, [B]."""
    if place.samples is None:
        return torch.arange(place.sample, place.sample + B)
    assert len(place.samples) == B
    return torch.tensor(place.samples)


def mix(z: Tensor) -> Tensor:
    """A hash of each 64-bit integer: every bit of z changes about half of the result's bits."""
    z = z + signed(INCREMENT)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = (z ^ shift_right(z, shift)) * signed(multiplier)
    return z ^ shift_right(z, SHIFTS[-1])


def shift_right(z: Tensor, count: int) -> Tensor:
    """Shift the bits of z right and fill with zeros; torch's >> would repeat the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def mix_number(z: int) -> int:
    """The same hash of one Python number."""
    return int(mix(torch.tensor(signed(z & MASK)))) & MASK


def signed(z: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits, as torch counts."""
    return z - (1 << 64) if z >> 63 else z
