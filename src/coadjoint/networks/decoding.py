"""Decoding: the tokens that a decoder writes when it reads its own output.

Greedy decoding and beam search are one loop over sets of hypotheses; `draw_tokens` samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .interface import check_positive
from .sampling import Sampling, TokenDraws

# (previous tokens [m], states [m, n], their samples [m])
#     -> states [m, n], pre-outputs [m, end + 1], alignments [m, T]
DecoderStep = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Decoded(NamedTuple):
    """Decoded tokens: up to the end, then -1. a and alignment are zero after the end."""

    tokens: Tensor  # [U, B]
    log_probability: Tensor  # of the tokens, [B]
    a: Tensor  # the pre-outputs they were chosen from, [U, B, outputs]
    alignment: Tensor  # the attention at each token, [U, B, T]; no columns without attention


class BeamStep(NamedTuple):
    """One step of a search: a row for each of the B * beam hypotheses."""

    parents: Tensor  # the row, one step earlier, that each hypothesis continues
    tokens: Tensor  # -1 for hypotheses that had ended before
    a: Tensor  # pre-outputs by row of the step before; 0 for hypotheses that had ended
    alignment: Tensor


def decode(
    step: DecoderStep, x: Tensor, end: int, limits: Tensor, beam: int = 1, normalise: float = 0.0
) -> Decoded:
    """The best token sequence for each sample that a beam search finds from states x [B, n].

    A hypothesis is a sequence of tokens that has ended, has reached its limit, or goes on. After
    every step, `beam` of them are kept for each sample: those with the largest sum of log p /
    length^normalise, and among equals those that came first, then those with the lower token.
    A hypothesis that has ended is kept as long as it is among the best.

    step    (previous tokens, states, their samples) -> states, pre-outputs, alignments
    end     the number of the end token, larger than all others
    limits  the largest number of tokens for each sample, [B]
    """
    check_positive(beam=beam)
    if not (isinstance(normalise, int | float) and 0 <= normalise < math.inf):
        raise InputError(
            "normalise is the power of the length to divide by, a number of at least 0; "
            f"got {normalise!r}."
        )
    B = len(x)
    device = x.device
    token_count = end + 1
    sample = torch.arange(B, device=device)[:, None].expand(B, beam)
    x = x.repeat_interleave(beam, 0)
    token = torch.full((B * beam,), end, device=device)  # a decoder begins as if after an end
    # Each sample begins with one hypothesis; the other places of its beam are empty.
    live = torch.arange(beam, device=device).expand(B, beam) == 0
    score = torch.where(live, x.new_zeros(()), -math.inf)
    length = torch.zeros_like(sample)
    # An ended hypothesis competes as one candidate, under token 0.
    is_token_0 = torch.arange(token_count, device=device) == 0
    steps: list[BeamStep] = []
    while live.any():
        # Only hypotheses that go on take a step; arrays have a row for each of the B * beam.
        live_rows = live.flatten().nonzero()[:, 0]
        new_x, a, alignment = step(token[live_rows], x[live_rows], sample.flatten()[live_rows])
        x = x.index_copy(0, live_rows, new_x)
        # In double: sums over many tokens are compared with each other.
        log_p = torch.log_softmax(a, -1).double()
        unchanged = torch.where(is_token_0, log_p.new_zeros(()), -math.inf)
        gain = unchanged.expand(B * beam, -1).index_copy(0, live_rows, log_p)
        # Of each hypothesis continued by each token: [B, beam, token_count].
        total = score[..., None] + gain.unflatten(0, (B, beam))
        new_length = (length + live)[..., None].expand_as(total)
        rank = (total / new_length.clamp(min=1).double() ** normalise).flatten(1)
        # A stable sort prefers hypotheses that came first, then lower tokens, among equals.
        best = rank.sort(dim=1, descending=True, stable=True).indices[:, :beam]
        # Candidate number = place of the parent in the beam * token_count + token.
        parent = best // token_count
        written = torch.where(live.gather(1, parent), best % token_count, -1)
        score = total.flatten(1).gather(1, best)
        length = new_length.flatten(1).gather(1, best)
        live = (written >= 0) & (written < end) & (length < limits[:, None]) & (score > -math.inf)
        parent_rows = (sample * beam + parent).flatten()
        x = x[parent_rows]
        token = written.flatten().clamp(min=0)  # the -1 of ended ones are never read
        a_rows = a.new_zeros(B * beam, a.shape[1]).index_copy(0, live_rows, a)
        alignment_rows = alignment.new_zeros(B * beam, alignment.shape[1])
        alignment_rows = alignment_rows.index_copy(0, live_rows, alignment)
        steps.append(BeamStep(parent_rows, written.flatten(), a_rows, alignment_rows))
    best_rows = torch.arange(B, device=device) * beam  # each beam is sorted, the best first
    return trace_back(steps, best_rows, score[:, 0])


def trace_back(steps: list[BeamStep], row: Tensor, score: Tensor) -> Decoded:
    """The hypotheses that end in these rows of the last step, followed back to their first tokens.

    row, score  of each sample's hypothesis, [B]: its row in the last step, its log-probability
    """
    tokens: list[Tensor] = []
    a: list[Tensor] = []
    alignment: list[Tensor] = []
    for step in reversed(steps):
        tokens.append(step.tokens[row])
        row = step.parents[row]  # a and alignment lie in the rows of the step before
        a.append(step.a[row])
        alignment.append(step.alignment[row])
    all_tokens = torch.stack(tokens[::-1])
    # Other hypotheses were longer during the search: the last steps may hold no token but -1.
    U = int((all_tokens >= 0).any(1).sum())
    return Decoded(
        all_tokens[:U], score, torch.stack(a[::-1])[:U], torch.stack(alignment[::-1])[:U]
    )


def draw_tokens(
    step: DecoderStep, x: Tensor, end: int, limits: Tensor, sampling: Sampling, seed: int
) -> Decoded:
    """A token sequence for each sample, drawn token by token from states x [B, n].

    step, end, limits  as in `decode`
    sampling, seed     how tokens are drawn: see `networks.sampling`

    log_probability is that of the tokens under softmax(a), whatever the sampling.
    """
    B = len(x)
    draws = TokenDraws(sampling, seed, B)
    token = torch.full((B,), end, device=x.device)  # a decoder begins as if after an end
    score = x.new_zeros(B, dtype=torch.float64)
    live = limits > 0
    tokens: list[Tensor] = []
    of_a: list[Tensor] = []
    alignments: list[Tensor] = []
    while live.any():
        rows = live.nonzero()[:, 0]
        new_x, a, alignment = step(token[rows], x[rows], rows)
        x = x.index_copy(0, rows, new_x)
        drawn = draws.draw(a, rows)
        log_p = torch.log_softmax(a, -1).double().gather(-1, drawn[:, None])[:, 0]
        score = score.index_add(0, rows, log_p)
        token = token.index_copy(0, rows, drawn)
        tokens.append(torch.full_like(token, -1).index_copy(0, rows, drawn))
        of_a.append(a.new_zeros(B, a.shape[1]).index_copy(0, rows, a))
        no_alignment = alignment.new_zeros(B, alignment.shape[1])
        alignments.append(no_alignment.index_copy(0, rows, alignment))
        live = live & (token != end) & (len(tokens) < limits)
    return Decoded(torch.stack(tokens), score, torch.stack(of_a), torch.stack(alignments))
