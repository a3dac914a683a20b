"""Rows: where the time steps of ragged sequences lie in flat arrays, and exact powers of two.

Samples are sorted by falling length, so that step t holds the first n_t of them:

    step arrays  [N, .]      N = n_1 + ... + n_T      u, v, a, delta, nu
    state arrays [B + N, .]  x_0 of all B samples first      x, lam, mu

Nothing is padded and nothing is masked: a step that does not exist has no row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Index(NamedTuple):
    """Indices are kept as numpy arrays: torch would tie them to the transform of torch.func under way, and they outlive it."""

    sample: np.ndarray  # [N], of each row of a step array
    time: np.ndarray  # [N], t = 1..T
    prev: np.ndarray  # [N], the row of x_{t-1} in a state array
    last: np.ndarray  # [B], the row of each sample's last state

    @staticmethod
    def of(sizes: Sequence[int]) -> Index:
        T, B, lengths = len(sizes), sizes[0], lengths_of(sizes)
        time = np.repeat(np.arange(1, T + 1), sizes)
        sample = np.arange(len(time)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        row = np.full((T + 1, B), -1)  # of (t, sample) in a state array
        row[0], row[time, sample] = np.arange(B), np.arange(B, B + len(time))
        return Index(sample, time, row[time - 1, sample], row[lengths, np.arange(B)])


def lengths_of(sizes: Sequence[int]) -> np.ndarray:
    """The length of each sample, [B]; sizes fall."""
    return np.searchsorted(-np.array(sizes), -np.arange(sizes[0]))


ROWS_PER_CHUNK = 2048  # rows, about, that are added up at once
VECTOR_ROWS = 32  # a chunk of equally long samples has a multiple of so many rows: vector instructions leave no remainder


def steps_per_chunk(B: int) -> int:
    """The time steps of a chunk."""
    unit = VECTOR_ROWS // math.gcd(B, VECTOR_ROWS)
    return max(1, round(ROWS_PER_CHUNK / (B * unit))) * unit


def split_range(rows: range, size: int) -> list[range]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


class Rows:
    """chunk_steps: sums over rows are taken over so many time steps at once, counted from the first step of the sequence.
    begin, end: these are the steps begin + 1 .. begin + T of a sequence of `end` steps."""

    def __init__(self, sizes: Sequence[int], of: Rows | None = None, begin: int = 0) -> None:
        self.sizes = list(sizes)
        self.chunk_steps: int = of.chunk_steps if of else steps_per_chunk(sizes[0])
        self.begin = begin
        self.end: int = of.end if of else len(sizes)
        self.T, self.B, self.N = len(self.sizes), self.sizes[0], sum(self.sizes)
        self.rows_in_full: int = of.rows_in_full if of else self.N  # rows of the whole sequence
        self.uniform = self.sizes[-1] == self.B
        self.starts = [0]  # of the steps in step arrays, and the end
        for n in self.sizes:
            self.starts.append(self.starts[-1] + n)

    def part(self, lo: int, hi: int) -> Rows:
        """The steps lo + 1 .. hi; lo is a multiple of the chunk."""
        return Rows(self.sizes[lo:hi], self, lo)

    @functools.cached_property
    def chunks(self) -> list[range]:
        """The rows of each chunk in step arrays."""
        ends = (
            self.starts[:: self.chunk_steps]
            if self.T % self.chunk_steps == 0
            else [*self.starts[:: self.chunk_steps], self.N]
        )
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    def steps(self, y: Tensor) -> tuple[Tensor, ...]:
        """A step array as T views [n_t, .]."""
        return y.split(self.sizes)

    def states(self, x: Tensor) -> tuple[Tensor, ...]:
        """A state array as T + 1 views."""
        return x.split([self.B, *self.sizes])

    def before(self, x: Tensor) -> list[Tensor]:
        """x_{t-1} for the samples that take step t, as T views."""
        states = self.states(x)
        return (
            list(states[:-1])
            if self.uniform
            else [y[:n] for y, n in zip(states, self.sizes, strict=False)]
        )

    def prev(self, x: Tensor) -> Tensor:
        """x_{t-1} for the samples that take step t, as one step array."""
        return (
            x[: self.N]
            if self.uniform
            else x.index_select(0, torch.from_numpy(self.index.prev).to(x.device))
        )

    def prev_transposed(self, y: Tensor) -> Tensor:
        """The transpose of prev: [N, .] -> [B + N, .]."""
        if self.uniform:
            return pad(y, (0, 0, 0, self.B))
        return y.new_zeros(self.B + self.N, y.shape[1]).index_copy(
            0, torch.from_numpy(self.index.prev).to(y.device), y
        )

    def reverse_time(self, y: Tensor) -> Tensor:
        """A step array with the time of each sample reversed; its own inverse."""
        if self.uniform:
            return y.unflatten(0, (self.T, self.B)).flip(0).flatten(0, 1)
        return y.index_select(0, torch.from_numpy(self.reversed_rows).to(y.device))

    @functools.cached_property
    def reversed_rows(self) -> np.ndarray:
        """Where each row of a step array comes from when time is reversed."""
        sample, time = self.index.sample, self.index.time
        return np.array(self.starts)[lengths_of(self.sizes)[sample] - time] + sample

    def last(self, x: Tensor) -> Tensor:
        """Each sample's state at its own last step, [B, .]."""
        return (
            x[self.N :]
            if self.uniform
            else x.index_select(0, torch.from_numpy(self.index.last).to(x.device))
        )

    def last_transposed(self, y: Tensor) -> Tensor:
        """The transpose of last: [B, .] -> [B + N, .]."""
        if self.uniform:
            return pad(y, (0, 0, self.N, 0))
        return y.new_zeros(self.B + self.N, y.shape[1]).index_copy(
            0, torch.from_numpy(self.index.last).to(y.device), y
        )

    @property
    def lengths(self) -> Tensor:
        return torch.from_numpy(lengths_of(self.sizes))

    @property
    def sample(self) -> Tensor:
        """The sample of each row of a step array."""
        return torch.from_numpy(self.index.sample)

    @property
    def time(self) -> Tensor:
        """The step t = 1..T of each row of a step array."""
        return torch.from_numpy(self.index.time)

    @functools.cached_property
    def index(self) -> Index:
        return Index.of(self.sizes)

    def flatten_states(self, dense: Tensor) -> Tensor:
        """[T + 1, B] -> [B + N]."""
        if self.uniform:
            return dense.reshape(-1)
        return torch.cat(
            [dense[0], dense[self.time.to(dense.device), self.sample.to(dense.device)]]
        )


@functools.lru_cache(maxsize=4)
def uniform_rows(T: int, B: int) -> Rows:
    """The rows of B samples of T steps: the same object again for batch after batch of one shape."""
    return Rows([B] * T)


def pow2(k: Tensor, dtype: torch.dtype) -> Tensor:
    """2^k exactly, from its bits; 0 below the normal range, the largest power above it."""
    bias, shift, bits = (
        (1023, 52, torch.int64) if dtype == torch.float64 else (127, 23, torch.int32)
    )
    e = k.clamp(-bias, bias).to(bits) + bias
    return (e << shift).view(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def scale(y: Tensor, k: Tensor) -> Tensor:
    """y 2^k, in two factors so that 2^k may lie outside the range when y 2^k does not."""
    half = k >> 1
    return y * pow2(half, y.dtype) * pow2(k - half, y.dtype)


NO_EXPONENT = -(1 << 28)  # the exponent of nothing
SAFE_EXPONENT = {
    torch.float32: 40,
    torch.float64: 400,
}  # 2^ROOM stays in range when it is multiplied a few times


def exponent(y: Tensor) -> Tensor:
    """e with 2^(e-1) <= max |y| < 2^e for each row; NONE for a row of zeros."""
    top = y.abs().amax(1)
    return torch.where(top > 0, torch.frexp(top).exponent, NO_EXPONENT)


def next_exponent(k: Tensor, pulled: Tensor, source: Tensor) -> Tensor:
    """The exponent for lam_{t-1} = J' lam_t + source_{t-1}: of the larger of the two, J' lam_t being `pulled` 2^k.

    Rows of `source` past those of `pulled` begin here; a row of zeros keeps the exponent it had."""
    begun = len(source) - len(pulled)
    e = exponent(pulled)
    mine = pad(torch.where(e == NO_EXPONENT, NO_EXPONENT, k + e), (0, begun), value=NO_EXPONENT)
    new = torch.maximum(mine, exponent(source))
    return torch.where(new == NO_EXPONENT, pad(k, (0, begun)), new)


@dataclass(frozen=True, eq=False)
class Link:
    """Factors on the connection between steps t - 1 and t: lam_{t-1} = s_{t-1} + factor_t J_t' lam_t.

    Powers of two keep costates in range, zeros cut a sequence (truncated backpropagation)."""

    rows: Rows
    factor: Tensor  # [N, 1]

    @functools.cached_property
    def active(self) -> list[bool]:
        """For each step: is any factor of it not 1?"""
        changed = self.factor[:, 0] != 1
        if self.rows.uniform:
            return changed.view(self.rows.T, self.rows.B).any(1).tolist()
        return [bool(c.any()) for c in self.rows.steps(changed)]

    @staticmethod
    def between(rows: Rows, k: Tensor, dtype: torch.dtype) -> Link:
        """2^(k_t - k_{t-1}) for exponents k of the state rows."""
        return Link(rows, pow2(k[rows.B :] - rows.prev(k), dtype)[:, None])
