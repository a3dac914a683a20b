"""Costates of a step function, one time step after the other, by torch.

    lam_T = s_T,    lam_t = J_{t+1}' lam_{t+1} + s_t    as mantissas times 2^k_t

A run with gradients on has recorded each step: its derivative comes from that graph (RunGraph).
Otherwise the step is called again (repeat_step). Either can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import Unsupported
from .engines.eager.scaled_adjoint import FIRST_BLOCK, LONGEST_BLOCK, RANGES
from .rows import NO_EXPONENT, SAFE_EXPONENT, Rows, exponent, next_exponent, scale
from .step_functions.linearised import StepFunction, is_repeated

EASY = 20  # mantissas within 2^-EASY .. 2^EASY keep their exponents from block to block

# pull(t, lam_{t+1} [n_t, n]) -> J_{t+1}' lam_{t+1}, a row for each x_t
Pull = Callable[[int, Tensor], Tensor]


class RunGraph(NamedTuple):
    """The states of a run, x_0 [B, n] and x_{t+1} [n_t, n], each with the graph of its step."""

    states: Sequence[Tensor]

    def holds(self, t: int) -> bool:
        """Whether step t is in the graph: it is not where nothing before it is differentiated."""
        return self.states[t].requires_grad and self.states[t + 1].requires_grad

    def pull(self, t: int, lam: Tensor) -> Tensor:
        """J_{t+1}' lam_{t+1}; RuntimeError if the graph has been freed."""
        return self.pull_block(t, t + 1, lam, [None])[0]

    def pull_block(
        self, lo: int, hi: int, lam: Tensor, sources: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """lam_lo, .., lam_{hi-1} from lam_hi and the sources of these states."""
        outputs = [self.states[hi]]
        seeds = [lam]
        for state, source in zip(self.states[lo:hi], sources, strict=True):
            if source is not None:
                outputs.append(state)
                seeds.append(source)
        states = self.states[lo:hi]
        grads = torch.autograd.grad(outputs, states, seeds, create_graph=True, allow_unused=True)
        pairs = zip(states, grads, strict=True)
        return [torch.zeros_like(state) if g is None else g for state, g in pairs]


class StepSources:
    """The sources of an adjoint sweep, by time step."""

    def __init__(
        self, rows: Rows, s: Tensor | None, s_last: Tensor | None, declared: Tensor | None
    ) -> None:
        """Split s [B + N, n] by steps, and declared [B + N]: where the loss reads the state.

        s_last: the source of each sample's last state. declared None: everywhere.
        """
        self.at: list[Tensor | None]  # s_0, ..., s_T; None for zeros
        if s is None and rows.uniform:
            self.at = [*[None] * rows.T, s_last]
        else:
            if s_last is not None:
                last = rows.last_transposed(s_last)
                s = last if s is None else s + last
            assert s is not None
            self.at = list(rows.states(s))
        self.read_at = None if declared is None else rows.states(declared)

    def in_unit(self, t: int, k: Tensor) -> Tensor | None:
        """s_t 2^-k: the source of x_t in the units 2^k of its costate, k [n_t].

        Where the loss does not read the state, the source is 0; if 2^-k is very large there, it is
        replaced by 0, so that a derivative through it is 0 and not out of range.
        """
        source = self.at[t]
        if source is None:
            return None
        shift = -k
        if self.read_at is not None:
            in_reach = self.read_at[t] | (k > -SAFE_EXPONENT[source.dtype])
            shift = torch.where(in_reach, shift, NO_EXPONENT)  # 2^NO_EXPONENT is 0
        return scale(source, shift[:, None])


class CostateSweep:
    """The adjoint loop over the steps of a run, from the last one.

    pull     pull(t, lam_{t+1} [n_t, n]) -> J_{t+1}' lam_{t+1}, a row for each x_t
    factors  what J_t' lam_t is multiplied by at each step; None for ones
    """

    def __init__(
        self, rows: Rows, pull: Pull, sources: StepSources, factors: Sequence[Tensor] | None
    ) -> None:
        """Begin at the last state, whose costate is its source."""
        last = sources.at[-1]
        assert last is not None
        nothing = last[:0].detach()  # no rows: no costate comes from a later step
        k = next_exponent(exponent(nothing), nothing, last.detach())
        mantissa = sources.in_unit(rows.T, k)
        assert mantissa is not None
        self.rows = rows
        self.pull = pull
        self.sources = sources
        self.factors = factors
        # From the last step to the first; turned round at the end.
        self.lam = [mantissa]
        self.exponents = [k]

    def run(self, graph: RunGraph | None) -> tuple[Tensor, Tensor]:
        """The mantissas [B + N, n] and exponents [B + N] of all states.

        graph: that of the steps, by which several are done at once if samples are equally long.
        """
        hi = self.rows.T
        if graph is not None and self.rows.uniform and self.factors is None:
            hi = self._run_blocks(graph)
        for t in reversed(range(hi)):
            self._run_step(t)
        return torch.cat(self.lam[::-1]), torch.cat(self.exponents[::-1])

    def _run_step(self, t: int) -> None:
        """lam_t from lam_{t+1}, with exponents of its own."""
        n = self.rows.sizes[t]
        k = self.exponents[-1]
        pulled = self.pull(t, self.lam[-1])  # in units of 2^k
        begun = len(pulled) - n  # samples whose last state is x_t
        if self.factors is not None:
            pulled = pad(pulled[:n] * self.factors[t], (0, 0, 0, begun))
        k_new = joined_exponent(k, pulled.detach()[:n], self.sources.at[t])
        pulled = scale(pulled, (pad(k, (0, begun)) - k_new)[:, None])
        source = self.sources.in_unit(t, k_new)
        self.lam.append(pulled if source is None else pulled + source)
        self.exponents.append(k_new)

    def _run_blocks(self, graph: RunGraph) -> int:
        """Blocks of steps with shared exponents, as in ScaledAdjoint; returns the step reached.

        A block whose mantissas leave the safe range is run again, half as long.
        """
        allowed = RANGES[self.lam[0].dtype]
        first = 0 if graph.holds(0) else 1
        size = FIRST_BLOCK
        hi = self.rows.T
        while hi > first:
            if size == 1:
                self._run_step(hi - 1)
                hi -= 1
                size = 2
                continue
            lo = max(first, hi - size)
            k, lam = self._near_one()
            sources = [self.sources.in_unit(t, k) for t in range(lo, hi)]
            found = graph.pull_block(lo, hi, lam, sources)
            tops = torch.stack([y.detach().abs().amax(1) for y in found])
            if all(source is None for source in sources):
                tops = tops[:, lam.detach().any(1)]  # a costate of zero stays zero
            least, most = (y.item() for y in tops.aminmax()) if tops.numel() else (1.0, 1.0)
            if not allowed.low < least <= most < allowed.high:
                size = (hi - lo) // 2 if hi - lo > 1 else 1
                continue
            self.lam += found[::-1]
            self.exponents += [k] * len(found)
            hi = lo
            if least > allowed.easy:
                size = min(2 * size, LONGEST_BLOCK)
        return hi

    def _near_one(self) -> tuple[Tensor, Tensor]:
        """The latest costate as exponents and mantissas of order one."""
        k = self.exponents[-1]
        lam = self.lam[-1]
        k_new = joined_exponent(k, lam.detach(), None)
        if int((k_new - k).abs().max()) <= EASY:
            return k, lam
        return k_new, scale(lam, (k - k_new)[:, None])


def joined_exponent(k: Tensor, pulled: Tensor, source: Tensor | None) -> Tensor:
    """The exponent of pulled 2^k + source, that of the larger term; source None for zeros."""
    if source is not None:
        return next_exponent(k, pulled, source.detach())
    e = exponent(pulled)
    return torch.where(e == NO_EXPONENT, k, k + e)


def repeat_step(
    step: StepFunction, drives: Sequence[Sequence[Tensor]], before: Sequence[Tensor], t: int
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """The state that step t leads to when called again, and lam -> its gradients by all inputs."""
    again, pull = torch.func.vjp(step, *drives[t], before[t])  # type: ignore[misc]
    return again, pull


def refuse_if_different(again: Tensor, state: Tensor, t: int) -> None:
    """Refuse a step t that led to `state` and, when it was repeated, to another, `again`."""
    if is_repeated(again, state):
        return
    raise Unsupported(
        f"the step function returned a different state when step {t} was repeated: it is random "
        "or has hidden state. Pass random values (a dropout mask, noise) as part of the input "
        "u, so that a step is a function of u and x."
    )
