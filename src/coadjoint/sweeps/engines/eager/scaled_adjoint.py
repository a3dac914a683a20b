"""The adjoint loop on mantissas: costates of any size, without one exponent per step.

The costate of sample b at state t is lam_t[b] 2^k[t, b]. A mantissa lam_t may be any number in
a safe range, so a block of steps can share one exponent per sample and needs no rescaling inside:

    begin a block   choose k from lam_hi and from the sources that enter in the block
    run it          lam_t <- J_t' lam_{t+1} + s_t 2^-k
    look at it      all mantissas in the safe range: keep the block, and try a longer one next;
                    otherwise run it again, half as long, down to an exponent for every step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...rows import NO_EXPONENT, Rows, exponent, pow2, scale
from .views import Views

FIRST_BLOCK = 8  # steps; the length of later ones follows from how far the mantissas drift
LONGEST_BLOCK = 64  # steps; a block that must be run again costs no more than these


class MantissaRange(NamedTuple):
    """Where the largest entry of each costate of a block must lie."""

    low: float
    high: float
    easy: float  # a block that stays above this may be followed by one twice as long


RANGES = {
    torch.float32: MantissaRange(2.0**-60, 2.0**60, 2.0**-20),
    torch.float64: MantissaRange(2.0**-400, 2.0**400, 2.0**-150),
}


class BackwardLoop(Protocol):
    """What is swept: the steps of an adjoint loop, such as linear_loop.AdjointLoop."""

    rows: Rows
    blocks: list[tuple[int, int]]
    lam: Views
    pulled: Views

    @property
    def step(self) -> Callable[[int], None]:
        """A function of t: lam_t <- J_t' lam_{t+1}, without sources and factors."""

    @property
    def compute_slopes(self) -> Callable[[int], None]:
        """A function of i: it computes what the steps of block i read."""


class ScaledAdjoint:
    """One scaled sweep over an adjoint loop.

    Invariant: once the loop has reached state t, the costates of the states t .. T are
    lam 2^k with lam = loop.lam and k [T + 1, B].

    s         sources of all states, or None
    s_last    source of each sample's last state, given as s_last 2^k_last
    factors   what J_t' lam_{t+1} is multiplied by, for the steps where it is not one
    """

    def __init__(
        self,
        loop: BackwardLoop,
        s: Tensor | None,
        s_last: Tensor | None,
        k_last: Tensor | None,
        factors: Mapping[int, Tensor],
    ) -> None:
        """Find the exponents of all sources, and with them those of the last states."""
        rows = loop.rows
        if k_last is None:
            k_last = torch.zeros(rows.B, dtype=torch.int32)
        self.loop = loop
        self.rows = rows
        self.sources = None if s is None else rows.states(s)
        self.s_last = s_last
        self.k_last = k_last
        self.factors = factors
        self.dtype = loop.lam[0].dtype
        self.range = RANGES[self.dtype]
        # Sources at x_T alone: a block of earlier steps takes its exponent from lam_hi.
        self.enters_at_end_only = s is None and rows.uniform
        self.k_sources = source_exponents(rows, s, s_last, k_last)
        # lam_T equals its source and takes its exponent, or k_last where the source is zero
        # (NO_EXPONENT). The exponents of earlier states are set as the loop reaches them.
        k_at_end = self.k_sources[rows.T]
        self.k = k_last.expand(rows.T + 1, rows.B).clone()
        self.k[rows.T] = torch.where(k_at_end == NO_EXPONENT, k_last, k_at_end)

    def run(self) -> Tensor:
        """Fill loop.lam with mantissas; return the exponents of the state rows, [B + N].

        A block of steps is run with shared exponents and kept if its mantissas stay in the safe
        range; otherwise it is run again, half as long. A single step is always kept.
        """
        loop = self.loop
        self._start_samples(self.rows.T, self.k[self.rows.T])
        top = loop.lam[self.rows.T].abs().amax(1)  # largest entry of each sample at state hi
        size = FIRST_BLOCK
        for i, (lo, hi) in reversed(list(enumerate(loop.blocks))):
            loop.compute_slopes(i)
            while hi > lo:
                begin = max(lo, hi - size)
                single = hi - begin == 1
                k_block = self._run_step(begin) if single else self._run_block(begin, hi, top)
                tops = self._largest_entries(begin, hi)  # of each costate of the block
                smallest, largest = tops.aminmax()
                least = smallest.item()
                safe = self.range.low < least and largest.item() < self.range.high
                if not safe and not single:
                    size = (hi - begin) // 2
                    continue
                # A block cut short by the end of a block of slopes tells as much as a full one.
                if least > self.range.easy and (hi - begin == size or begin == lo):
                    size = min(2 * size, LONGEST_BLOCK)
                self.k[begin:hi] = k_block
                hi = begin
                top = tops[: len(loop.lam[begin])]  # those of lam_begin come first
        return self.rows.flatten_states(self.k)

    def _pull(self, t: int) -> None:
        """lam_t <- factor_t J_t' lam_{t+1}, in units of 2^k_{t+1}; J_t: Jacobian of step t."""
        self.loop.step(t)
        if t in self.factors:
            self.loop.pulled[t].mul_(self.factors[t])

    def _start_samples(self, t: int, k_t: Tensor) -> None:
        """Set lam_t of the samples whose last state is x_t to their sources, in units of 2^k_t."""
        lam = self.loop.lam[t]
        going_on = self.rows.sizes[t] if t < self.rows.T else 0  # samples with a state x_{t+1}
        if going_on >= len(lam):
            return
        ending = slice(going_on, len(lam))
        if self.s_last is None:
            lam[ending] = 0
        else:
            lam[ending] = scale(self.s_last[ending], (self.k_last - k_t)[ending, None])
        if self.sources is not None:
            lam[ending] += scale(self.sources[t][ending], -k_t[ending, None])

    def _run_step(self, t: int) -> Tensor:
        """lam_t from lam_{t+1}; returns k_t [B], exponents for this state alone."""
        self._pull(t)
        pulled = self.loop.pulled[t]
        n = len(pulled)
        k_later = self.k[t + 1]
        e = exponent(pulled)
        k_pulled = torch.where(e == NO_EXPONENT, NO_EXPONENT, k_later[:n] + e)
        # The exponent of the larger term, pulled or source; where both are zero, it stays.
        k_new = self.k_sources[t].clone()
        k_new[:n] = torch.maximum(k_pulled, k_new[:n])
        k_new = torch.where(k_new == NO_EXPONENT, k_later, k_new)
        pulled.mul_(pow2((k_later - k_new)[:n, None], self.dtype))
        if self.sources is not None:
            pulled.addcmul_(self.sources[t][:n], pow2(-k_new[:, None], self.dtype)[:n])
        self._start_samples(t, k_new)
        return k_new

    def _run_block(self, lo: int, hi: int, top: Tensor) -> Tensor:
        """lam_{hi-1} .. lam_lo from lam_hi; returns k [B], exponents that these states share.

        top: the largest entry of lam_hi, for each sample that has a state x_hi.
        """
        pulled = self.loop.pulled
        k_new, factor = self._shared_exponents(lo, hi, top)
        to_mantissa: Tensor | None = None  # 2^-k, by which sources are multiplied
        if self.sources is not None:
            to_mantissa = pow2(-k_new[:, None], self.dtype)
        for t in reversed(range(lo, hi)):
            self._pull(t)
            n = self.rows.sizes[t]
            # The loop is linear: rescaling the first step rescales all that follow.
            if t == hi - 1:
                pulled[t].mul_(factor[:n])
            if self.sources is not None and to_mantissa is not None:
                pulled[t].addcmul_(self.sources[t][:n], to_mantissa[:n])
            if not self.rows.uniform:
                self._start_samples(t, k_new)
        return k_new

    def _shared_exponents(self, lo: int, hi: int, top: Tensor) -> tuple[Tensor, Tensor]:
        """The exponents k [B] of the block lo .. hi - 1, and the factor 2^(k_hi - k) [n, 1].

        The factor brings the n samples of lam_hi to the new units. top: the largest entry of each.
        """
        mantissa, e = torch.frexp(top)
        k_later = self.k[hi]
        if self.enters_at_end_only:
            # mantissa / top is 2^-e, which brings lam_hi near one; 0 / 0 is a row of zeros,
            # whose exponent stays because frexp(0) = (0, 0).
            return k_later + e, (mantissa / top).nan_to_num_(1.0)[:, None]
        # Sources enter in the block: the largest exponent among them and lam_hi.
        n = len(top)
        k_pulled = torch.full((self.rows.B,), NO_EXPONENT, dtype=torch.int32)
        k_pulled[:n] = torch.where(top > 0, k_later[:n] + e, NO_EXPONENT)
        k_new = torch.maximum(k_pulled, self.k_sources[lo:hi].amax(0))
        k_new = torch.where(k_new == NO_EXPONENT, k_later, k_new)
        return k_new, pow2((k_later - k_new)[:n, None], self.dtype)

    def _largest_entries(self, lo: int, hi: int) -> Tensor:
        """The largest |entry| of each costate: those of lam_lo, then lam_{lo+1}, .., lam_{hi-1}."""
        lam = self.loop.lam
        if not self.rows.uniform:
            return torch.cat([lam[t].abs().amax(1) for t in range(lo, hi)])
        # Equally long samples: the costates of the block lie one below the other.
        shape = ((hi - lo) * self.rows.B, lam[lo].shape[1])
        return lam[lo].as_strided(shape, lam[lo].stride()).abs().amax(1)


def source_exponents(rows: Rows, s: Tensor | None, s_last: Tensor | None, k_last: Tensor) -> Tensor:
    """The exponents e of the sources of all states, [T + 1, B]: 2^(e-1) <= max |source| < 2^e.

    NO_EXPONENT where a state has no source, or zeros. s: the sources of all states;
    s_last 2^k_last: that of each sample's last state; where both are there, the larger exponent.
    """
    k_sources = torch.full((rows.T + 1, rows.B), NO_EXPONENT, dtype=torch.int32)
    if s is not None:
        e = exponent(s)
        k_sources[0] = e[: rows.B]
        k_sources[rows.time, rows.sample] = e[rows.B :]
    if s_last is not None:
        e = exponent(s_last)
        # Where the last states are in [T + 1, B].
        at_end = rows.T if rows.uniform else (rows.lengths, torch.arange(rows.B))
        k_last_states = torch.where(e == NO_EXPONENT, NO_EXPONENT, e + k_last)
        k_sources[at_end] = torch.maximum(k_sources[at_end], k_last_states)
    return k_sources
