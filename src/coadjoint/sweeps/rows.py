"""Rows: where the time steps of ragged sequences lie in flat arrays, and exact powers of two.

Samples are sorted by falling length, so that step t holds the first n_t of them:

    step arrays  [N, .]      N = n_1 + ... + n_T      u, v, a, delta, nu
    state arrays [B + N, .]  x_0 of all B samples first      x, lam, mu

Nothing is padded and nothing is masked: a step that does not exist has no row.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Bounds: TypeAlias = "ctypes.Array[ctypes.c_int64]"
Indices: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.intp]]"


class Index(NamedTuple):
    """Row numbers, as numpy arrays.

    torch would tie tensors to the transform of torch.func under way, and they outlive it.
    """

    sample: Indices  # [N], of each row of a step array
    time: Indices  # [N], t = 1..T
    prev: Indices  # [N], the row of x_{t-1} in a state array
    last: Indices  # [B], the row of each sample's last state

    @staticmethod
    def of(sizes: Sequence[int]) -> Index:
        """From the number of samples at each step, which falls."""
        T = len(sizes)
        B = sizes[0]
        lengths = lengths_of(sizes)
        time = np.repeat(np.arange(1, T + 1), sizes)
        step_starts = np.cumsum(sizes) - sizes  # the first row of each step
        sample = np.arange(len(time)) - np.repeat(step_starts, sizes)
        row = np.full((T + 1, B), -1)  # of (t, sample) in a state array; -1: there is no such state
        row[0] = np.arange(B)
        row[time, sample] = np.arange(B, B + len(time))
        return Index(sample, time, row[time - 1, sample], row[lengths, np.arange(B)])


def lengths_of(sizes: Sequence[int]) -> Indices:
    """The length of each sample, [B], from the number of samples at each step, which falls."""
    # Sample i takes the steps whose size is above i. searchsorted counts them; it needs rising
    # numbers, hence the signs.
    return np.searchsorted(-np.array(sizes), -np.arange(sizes[0]))


ROWS_PER_CHUNK = 2048  # about; these are summed at once
# A chunk of equally long samples has a multiple of this many rows. Another number would cut sums
# elsewhere, and change their last bits.
VECTOR_ROWS = 32


def steps_per_chunk(B: int) -> int:
    """How many time steps of B samples make a chunk of about ROWS_PER_CHUNK rows; at least one."""
    unit = VECTOR_ROWS // math.gcd(B, VECTOR_ROWS)  # the fewest with a multiple of VECTOR_ROWS rows
    return max(1, round(ROWS_PER_CHUNK / (B * unit))) * unit


def split_range(rows: range, size: int) -> list[range]:
    """The range in parts of `size`, the last one shorter where it does not divide."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def row_bounds(ranges: Iterable[range]) -> Bounds:
    """The first row of each range and the row after its last, as compiled code reads them."""
    bounds = [bound for part in ranges for bound in (part.start, part.stop)]
    return (ctypes.c_int64 * len(bounds))(*bounds)


class Rows:
    """Where the steps of B samples lie; sizes: the number of samples at each step.

    chunk_steps: how many time steps are summed at once, counted from the first of the sequence.
    of, begin: these are the steps begin + 1 .. begin + T of a longer sequence, whose rows are `of`.
    end, rows_in_full: the number of steps and of step rows of that sequence, or else of this one.
    """

    def __init__(self, sizes: Sequence[int], of: Rows | None = None, begin: int = 0) -> None:
        """Rows of `sizes` samples at each step; of: those of the whole, if these are a part."""
        self.sizes = list(sizes)
        self.T = len(self.sizes)
        self.B = self.sizes[0]
        self.N = sum(self.sizes)
        self.begin = begin
        if of is None:
            self.chunk_steps = steps_per_chunk(self.B)
            self.end = self.T
            self.rows_in_full = self.N
        else:
            self.chunk_steps = of.chunk_steps
            self.end = of.end
            self.rows_in_full = of.rows_in_full
        self.uniform = self.sizes[-1] == self.B
        self.starts = [0, *itertools.accumulate(self.sizes)]  # of the steps, and the end

    def part(self, lo: int, hi: int) -> Rows:
        """The steps lo + 1 .. hi; lo is a multiple of chunk_steps, so that chunks stay the same."""
        return Rows(self.sizes[lo:hi], self, lo)

    @functools.cached_property
    def chunks(self) -> list[range]:
        """The rows of each chunk of chunk_steps time steps in step arrays."""
        bounds = self.starts[:: self.chunk_steps]
        if self.T % self.chunk_steps != 0:  # the last chunk is shorter
            bounds.append(self.N)
        return [range(begin, end) for begin, end in itertools.pairwise(bounds)]

    @functools.cached_property
    def bounds_from_last(self) -> Bounds:
        """The first row of each chunk and the row after its last, (first, end, ...), last first."""
        return row_bounds(reversed(self.chunks))

    def steps(self, y: Tensor) -> tuple[Tensor, ...]:
        """A step array [N, .] as T views [n_t, .], n_t the samples that take step t."""
        views: tuple[Tensor, ...] = y.split(self.sizes)
        return views

    def states(self, x: Tensor) -> tuple[Tensor, ...]:
        """A state array [B + N, .] as T + 1 views: x_0 of all B samples, then x_1 .. x_T."""
        views: tuple[Tensor, ...] = x.split([self.B, *self.sizes])
        return views

    def before(self, x: Tensor) -> list[Tensor]:
        """x_{t-1} for the samples that take step t, as T views."""
        states = self.states(x)
        if self.uniform:
            return list(states[:-1])
        return [y[:n] for y, n in zip(states, self.sizes, strict=False)]  # all states but x_T

    def prev(self, x: Tensor) -> Tensor:
        """x_{t-1} for the samples that take step t, as one step array."""
        if self.uniform:
            return x[: self.N]
        return x.index_select(0, torch.from_numpy(self.index.prev).to(x.device))

    def prev_transposed(self, y: Tensor) -> Tensor:
        """The transpose of prev: a step array [N, .] at the rows of x_{t-1} in [B + N, .]."""
        if self.uniform:
            return pad(y, (0, 0, 0, self.B))
        return self._scatter(y, self.index.prev)

    def last(self, x: Tensor) -> Tensor:
        """Each sample's state at its own last step, [B, .]."""
        if self.uniform:
            return x[self.N :]
        return x.index_select(0, torch.from_numpy(self.index.last).to(x.device))

    def last_transposed(self, y: Tensor) -> Tensor:
        """The transpose of last: [B, .] at the rows of the last states in [B + N, .]."""
        if self.uniform:
            return pad(y, (0, 0, self.N, 0))
        return self._scatter(y, self.index.last)

    def _scatter(self, y: Tensor, at: Indices) -> Tensor:
        """A state array [B + N, .] with the rows of y at these row numbers, zero elsewhere."""
        zeros = y.new_zeros(self.B + self.N, y.shape[1])
        return zeros.index_copy(0, torch.from_numpy(at).to(y.device), y)

    def reverse_time(self, y: Tensor) -> Tensor:
        """A step array with the time of each sample reversed; its own inverse."""
        if self.uniform:
            reversed_y: Tensor = y.unflatten(0, (self.T, self.B)).flip(0).flatten(0, 1)
            return reversed_y
        return y.index_select(0, torch.from_numpy(self.reversed_rows).to(y.device))

    @functools.cached_property
    def reversed_rows(self) -> Indices:
        """Where each row of a step array comes from when time is reversed, [N]."""
        sample = self.index.sample
        # Step t is taken from step length + 1 - t; `starts` counts steps from 0.
        reversed_time = lengths_of(self.sizes)[sample] - self.index.time
        rows: Indices = np.array(self.starts)[reversed_time] + sample
        return rows

    @property
    def lengths(self) -> Tensor:
        """The number of steps of each sample, [B]."""
        return torch.from_numpy(lengths_of(self.sizes))

    @property
    def sample(self) -> Tensor:
        """The sample of each row of a step array, [N]."""
        return torch.from_numpy(self.index.sample)

    @property
    def time(self) -> Tensor:
        """The step t = 1..T of each row of a step array, [N]."""
        return torch.from_numpy(self.index.time)

    def sample_on(self, device: torch.device) -> Tensor:
        """`sample` on a device. Of samples of one length it is made there: nothing is copied."""
        if device.type == "cpu" or not self.uniform:
            return self.sample.to(device)
        return torch.arange(self.B, device=device).repeat(self.T)

    def time_on(self, device: torch.device) -> Tensor:
        """`time` on a device, in the same way."""
        if device.type == "cpu" or not self.uniform:
            return self.time.to(device)
        steps = torch.arange(1, self.T + 1, device=device)
        return steps[:, None].expand(self.T, self.B).flatten()

    def lengths_like(self, y: Tensor) -> Tensor:
        """`lengths` in the type of y and on its device, in the same way."""
        if y.device.type == "cpu" or not self.uniform:
            return self.lengths.to(y)
        return y.new_full((self.B,), self.T)

    @functools.cached_property
    def index(self) -> Index:
        """The samples, times and neighbours of the rows, found when first needed."""
        return Index.of(self.sizes)

    def flatten_states(self, padded: Tensor) -> Tensor:
        """[T + 1, B] -> state rows [B + N]; entries of steps that do not exist are left out."""
        if self.uniform:
            return padded.reshape(-1)
        steps = padded[self.time.to(padded.device), self.sample.to(padded.device)]
        return torch.cat([padded[0], steps])


@functools.lru_cache(maxsize=4)
def uniform_rows(T: int, B: int) -> Rows:
    """The rows of B samples of T steps: the same object for every batch of one shape."""
    return Rows([B] * T)


def pow2(k: Tensor, dtype: torch.dtype) -> Tensor:
    """2^k exactly, from its bits; 0 below the normal range, the largest power above it."""
    # The exponent bits lie above the 52 (or 23) bits of the fraction, and hold k + 1023 (k + 127).
    if dtype == torch.float64:
        exponent_bits = k.clamp(-1023, 1023).to(torch.int64) + 1023
        return (exponent_bits << 52).view(torch.float64)
    exponent_bits = k.clamp(-127, 127).to(torch.int32) + 127
    return (exponent_bits << 23).view(torch.float32).to(dtype)


def scale(y: Tensor, k: Tensor) -> Tensor:
    """Return y 2^k, in two factors, since 2^k may lie outside the range where y 2^k does not."""
    half = k >> 1
    return y * pow2(half, y.dtype) * pow2(k - half, y.dtype)


NO_EXPONENT = -(1 << 28)  # of a row of zeros
# 2^SAFE_EXPONENT stays in range when it is multiplied a few times.
SAFE_EXPONENT = {torch.float32: 40, torch.float64: 400}


def exponent(y: Tensor) -> Tensor:
    """The exponent e with 2^(e-1) <= max |y| < 2^e for each row; NO_EXPONENT for a row of zeros."""
    largest = y.abs().amax(1)
    return torch.where(largest > 0, torch.frexp(largest).exponent, NO_EXPONENT)


def next_exponent(k: Tensor, pulled: Tensor, source: Tensor) -> Tensor:
    """The exponent for lam_{t-1} = J' lam_t + source_{t-1}: the larger one of the two terms.

    J' lam_t is `pulled` 2^k. Rows of `source` past those of `pulled` are of samples that end at
    t - 1: their costates begin here. A row of zeros keeps the exponent it had.
    """
    begun = len(source) - len(pulled)
    of_mantissa = exponent(pulled)
    of_pulled = torch.where(of_mantissa == NO_EXPONENT, NO_EXPONENT, k + of_mantissa)
    of_pulled = pad(of_pulled, (0, begun), value=NO_EXPONENT)
    new = torch.maximum(of_pulled, exponent(source))
    return torch.where(new == NO_EXPONENT, pad(k, (0, begun)), new)


@dataclass(frozen=True, eq=False)
class Link:
    """Factors between steps t - 1 and t: lam_{t-1} = s_{t-1} + factor_t J_t' lam_t.

    Powers of two keep costates in range, zeros cut a sequence (truncated backpropagation).
    """

    rows: Rows
    factor: Tensor  # [N, 1]

    @functools.cached_property
    def active(self) -> list[bool]:
        """For each step: is any of its factors not 1?"""
        changed = self.factor[:, 0] != 1
        if self.rows.uniform:
            by_step: list[bool] = changed.view(self.rows.T, self.rows.B).any(1).tolist()
            return by_step
        return [bool(step.any()) for step in self.rows.steps(changed)]

    @staticmethod
    def between(rows: Rows, k: Tensor, dtype: torch.dtype) -> Link:
        """2^(k_t - k_{t-1}) for exponents k [B + N] of the state rows.

        It links mantissas, where each lam_t is mantissa_t 2^(k_t).
        """
        return Link(rows, pow2(k[rows.B :] - rows.prev(k), dtype)[:, None])
