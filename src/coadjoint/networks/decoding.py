"""Decoding: what a network says when it hears itself. Greedy and beam search are one loop over sets of hypotheses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .interface import check_positive

# step(previous tokens [m], states [m, n], their samples [m]) -> states, pre-outputs [m, end + 1], alignments [m, T]
Say = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Decoded(NamedTuple):
    """What was said. tokens hold the end where it was said, then -1; a and alignment are zero after it."""

    tokens: Tensor  # [U, B]
    log_probability: Tensor  # [B], of the tokens
    a: Tensor  # [U, B, outputs], the pre-outputs they were chosen from
    alignment: Tensor  # [U, B, T], where the network looked; no columns without attention


def decode(
    say: Say, x: Tensor, end: int, most: Tensor, beam: int = 1, normalise: float = 0.0
) -> Decoded:
    """The best that a beam search finds from states x [B, n], for each sample.

    A hypothesis is a sequence of tokens that has ended, has `most` [B] tokens, or goes on. After every step `beam` of them
    are kept for each sample, those of the largest sum of log p / length^normalise; of equal ones those that stood before,
    and of those the lower token. What has ended stays as it is, and is kept as long as it is among the best.
    """
    check_positive(beam=beam)
    if not (isinstance(normalise, int | float) and 0 <= normalise < math.inf):
        raise InputError(
            f"normalise is the power of the length to divide by, at least 0; got {normalise!r}."
        )
    B, device = len(x), x.device
    sample = torch.arange(B, device=device)[:, None].expand(B, beam)
    x, token = x.repeat_interleave(beam, 0), torch.full((B * beam,), end, device=device)
    first = torch.arange(beam, device=device).expand(B, beam) == 0
    score = torch.where(first, x.new_zeros(()), -math.inf)  # the others are not there yet
    count, live = torch.zeros_like(sample), first
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    while live.any():
        on = live.flatten().nonzero()[:, 0]
        new, a, alpha = say(token[on], x[on], sample.flatten()[on])
        x = x.index_copy(0, on, new)
        spread = lambda y, on=on: y.new_zeros(B * beam, y.shape[1]).index_copy(0, on, y)
        longer = torch.log_softmax(a, -1).double()
        same = torch.where(
            torch.arange(end + 1, device=device) == 0, longer.new_zeros(()), -math.inf
        )  # as one candidate
        total = score[..., None] + same.expand(B * beam, -1).index_copy(0, on, longer).unflatten(
            0, (B, beam)
        )
        reach = (count + live)[..., None].expand_as(total)
        rank = (total / reach.clamp(min=1).double() ** normalise).flatten(1)
        best = rank.sort(dim=1, descending=True, stable=True).indices[:, :beam]
        parent, said = best // (end + 1), best % (end + 1)
        said = torch.where(live.gather(1, parent), said, -1)
        score, count = total.flatten(1).gather(1, best), reach.flatten(1).gather(1, best)
        live = (said >= 0) & (said < end) & (count < most[:, None]) & (score > -math.inf)
        rows = (sample * beam + parent).flatten()
        x, token = x[rows], said.flatten().clamp(min=0)
        steps.append((rows, said.flatten(), spread(a), spread(alpha)))
    return traced(steps, torch.arange(B, device=device) * beam, score[:, 0])


def traced(
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]], row: Tensor, score: Tensor
) -> Decoded:
    """The way back from the rows of the last step to the first."""
    found = []
    for rows, said, a, alpha in reversed(steps):
        token, row = said[row], rows[row]
        found.append((token, a[row], alpha[row]))
    tokens, a, alpha = (torch.stack(part[::-1]) for part in zip(*found, strict=True))
    U = int((tokens >= 0).any(1).sum())  # others were longer on the way
    return Decoded(tokens[:U], score, a[:U], alpha[:U])
