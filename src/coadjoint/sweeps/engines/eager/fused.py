"""Engine `eager` on a GPU: one product and one fused pointwise operation for each step.

Engine `cuda` runs these loops too where W is too large to stay on the chip: a library's matrix
product is then the fastest way. No value is read on the way, so a whole gradient can be recorded
(cuda/capture.py). Costates share an exponent for STEPS_PER_EXPONENT steps where no source enters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....cells.cell import Cell
from ...plan import Saved, SweepPlan
from ...pointwise import Pointwise
from ...rows import NO_EXPONENT, Link, Rows, exponent, next_exponent, pow2, scale
from ...slopes import pick_read_slot, read_map, read_push, read_values, step_map
from ...weights import matrices
from ..expressions import (
    adjoint_step,
    nonzero_outputs,
    optional_steps,
    output_or_zeros,
    tangent_step,
)

# Few steps, so that mantissas do not leave the range of their type before they are rescaled.
STEPS_PER_EXPONENT = 4
STEPS_PER_COPY = 16  # of a sweep, which are copied into its arrays at once


def refusal(device: str) -> str | None:
    """None: it runs on any device."""
    return None


@functools.cache
def step_operation(cell: Cell) -> Pointwise:
    """The operation (a_t, v_t, x_{t-1}, p) -> x_t, and the values q_t that the cell saves."""
    inputs = (("a", cell.a), ("v", cell.v), ("x", cell.x), ("p", cell.p))
    outputs = [("x", cell.next)]
    if cell.saved_nodes:
        outputs.append(("q", cell.saved_nodes))
    return Pointwise(inputs, tuple(outputs), (), frozenset({"p"}))


class JoinedSteps:
    """The rows of all steps in one array, which is filled as the steps are made.

    Steps are copied into it STEPS_PER_COPY at a time, and freed: joined only at the end, they would
    take the memory twice.
    """

    def __init__(self, rows: int, backwards: bool = False) -> None:
        """rows: of all steps. backwards: the last step is made first."""
        self.rows = rows
        self.backwards = backwards
        self.array: Tensor | None = None
        self.waiting: list[Tensor] = []
        self.copied = 0  # rows

    def add(self, y: Tensor) -> None:
        """Add the rows of the next step."""
        self.waiting.append(y)
        if len(self.waiting) == STEPS_PER_COPY:
            self._copy()

    def _copy(self) -> None:
        """Copy the steps that wait into the array."""
        steps = self.waiting
        if self.array is None:
            self.array = steps[0].new_empty(self.rows, *steps[0].shape[1:])
        if self.backwards:
            steps.reverse()
        count = sum(len(y) for y in steps)
        begin = self.copied
        if self.backwards:
            begin = self.rows - self.copied - count
        torch.cat(steps, out=self.array[begin : begin + count])
        self.copied += count
        self.waiting = []

    def joined(self) -> Tensor:
        """The array, once all steps have been added."""
        if self.waiting and self.array is None:  # a few steps
            return torch.cat(self.waiting[::-1] if self.backwards else self.waiting)
        if self.waiting:
            self._copy()
        assert self.array is not None
        return self.array


class SavedSteps(NamedTuple):
    """What a forward sweep saved, step by step: where each step is differentiated."""

    a: Sequence[Tensor]
    v: Sequence[Tensor | None]
    before: Sequence[Tensor]  # x_{t-1}
    after: Sequence[Tensor]  # x_t
    q: Sequence[Tensor | None]

    @staticmethod
    def of(rows: Rows, saved: Saved) -> SavedSteps:
        """The arrays as views of their steps t = 1..T, each with the samples that take it."""
        return SavedSteps(
            rows.steps(saved.a),
            optional_steps(rows, saved.v),
            rows.before(saved.x),
            rows.states(saved.x)[1:],
            optional_steps(rows, saved.q),
        )


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop of Engine: each step is a product with W and one fused operation."""
    cell = plan.cell
    rows = plan.rows
    op = step_operation(cell)
    x_t = x0.contiguous()
    x = JoinedSteps(rows.B + rows.N)
    a = JoinedSteps(rows.N)
    q = JoinedSteps(rows.N)
    x.add(x_t)
    bases = rows.steps(base)
    v_by_step = optional_steps(rows, v)
    W_steps = None if W is None else matrices(rows, W)
    for t, n in enumerate(rows.sizes):
        before = x_t[:n]  # x_{t-1} of the n samples that take this step
        a_t = bases[t]
        if W_steps is not None:
            a_t = torch.addmm(a_t, read_values(cell, before), W_steps[t].t())
        outputs = nonzero_outputs(op, None, (), (a_t, v_by_step[t], before, p))
        x_t = output_or_zeros(outputs, "x", before)
        x.add(x_t)
        a.add(a_t)
        if cell.saved_nodes:
            q.add(outputs["q"])
    return x.joined(), a.joined(), q.joined() if cell.saved_nodes else None


class Sources:
    """The sources of an adjoint sweep, and where samples begin.

    s [B + N, .] or None: sources of all states. s_last 2^k_last: source of each sample's last
    state, zero for None. like: a state array. scaled: costates are lam 2^k, with exponents k.
    """

    def __init__(
        self,
        plan: SweepPlan,
        like: Tensor,
        s: Tensor | None,
        s_last: Tensor | None,
        k_last: Tensor | None,
        scaled: bool,
    ) -> None:
        """Set zeros for s_last and k_last where they are None; s stays None."""
        rows = plan.rows
        self.rows = rows
        self.scaled = scaled
        self.s = None if s is None else rows.states(s)
        if s_last is None:
            s_last = torch.zeros_like(rows.last(like))
        self.s_last = s_last
        if k_last is None:
            k_last = torch.zeros(rows.B, dtype=torch.int32, device=self.s_last.device)
        self.k_last = k_last.int()

    def count(self, t: int) -> int:
        """How many samples have a state x_t."""
        if t == 0:
            return self.rows.B
        return self.rows.sizes[t - 1]

    def source(self, t: int, samples: slice) -> Tensor | None:
        """The source s_t of some samples; None if states have no sources."""
        if self.s is None:
            return None
        return self.s[t][samples]

    def begin(self, t: int, going_on: int) -> tuple[Tensor, Tensor]:
        """(lam, k) of the samples whose last state is x_t: s_last 2^k_last + s_t.

        They are those after the first `going_on`, which take another step.
        """
        beginning = slice(going_on, self.count(t))
        lam = self.s_last[beginning]
        k = self.k_last[beginning]
        source = self.source(t, beginning)
        if not self.scaled:
            if source is not None:
                lam = lam + source
            return lam, k
        # The new exponent is that of the larger term; where both are zero, it stays k_last.
        e = exponent(lam)
        k_new = torch.where(e == NO_EXPONENT, NO_EXPONENT, e + k)  # of zeros: none
        if source is not None:
            k_new = torch.maximum(k_new, exponent(source))
        k_new = torch.where(k_new == NO_EXPONENT, k, k_new).int()
        lam = scale(lam, (k - k_new)[:, None])
        if source is not None:
            lam = lam + scale(source, -k_new[:, None])
        return lam, k_new

    def join(self, t: int, pulled: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(lam_t, k_t) from `pulled`, what is pulled back from lam_{t+1}, in units of 2^k.

        Sources are added, and the samples whose last state is x_t are appended. A new exponent is
        chosen where a source enters, which may be of any size, and every STEPS_PER_EXPONENT steps.
        """
        n = len(pulled)  # the samples that go on to x_{t+1}
        source = self.source(t, slice(n))
        if self.scaled and (source is not None or t % STEPS_PER_EXPONENT == 0):
            k_new = exponent_of(k, pulled) if source is None else next_exponent(k, pulled, source)
            pulled = pulled * pow2((k - k_new)[:, None], pulled.dtype)
            k = k_new.int()
        if source is not None and self.scaled:
            source = scale(source, -k[:, None])
        if source is not None:
            pulled = pulled + source
        if self.count(t) > n:  # some samples have x_t as their last state
            lam, k_begin = self.begin(t, n)
            return torch.cat([pulled, lam]), torch.cat([k, k_begin])
        return pulled, k


@torch.no_grad()
def adjoint(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None,
    scaled: bool,
    keep: bool,
    k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adjoint loop of Engine; exponents are shared by up to STEPS_PER_EXPONENT steps.

    keep is not used: all of lam is kept.
    """
    cell = plan.cell
    rows = plan.rows
    if not adjoint_step(cell).uses_W:  # what W reads is constant: nothing comes back through it
        W = None
    pull_step = step_map(cell).pulled(("x",), ("a", "x"))
    sources = Sources(plan, saved.x, s, s_last, k_last, scaled)
    steps = SavedSteps.of(rows, saved)
    step_sources = optional_steps(rows, sa)
    factors = None if link is None else rows.steps(link.factor)
    W_steps = None if W is None else matrices(rows, W)
    lam_t, k_t = sources.begin(rows.T, 0)
    lam = JoinedSteps(rows.B + rows.N, backwards=True)
    k = JoinedSteps(rows.B + rows.N, backwards=True)
    delta = JoinedSteps(rows.N, backwards=True)
    lam.add(lam_t)
    k.add(k_t)
    # Step t takes x_t to x_{t+1}: until `join`, lam_t and k_t are still those of x_{t+1}.
    for t in reversed(range(rows.T)):
        inputs = (steps.a[t], steps.v[t], steps.before[t], saved.p, lam_t)
        outputs = nonzero_outputs(pull_step, None, (steps.after[t], steps.q[t]), inputs)
        delta_t = output_or_zeros(outputs, "a", steps.a[t])
        source = step_sources[t]
        if source is not None:
            delta_t = delta_t + source
        pulled = output_or_zeros(outputs, "x", lam_t)
        if W_steps is not None and cell.read_slot is not None:  # r(x) is a slot, and r' picks it
            pick_read_slot(cell, pulled).addmm_(delta_t, W_steps[t])
        elif W_steps is not None:
            pull_read = read_map(cell).pulled(("r",), ("x",))
            through_W = nonzero_outputs(
                pull_read, None, (), (steps.before[t], delta_t @ W_steps[t])
            )
            pulled = pulled + through_W["x"]
        if factors is not None:
            pulled = pulled * factors[t]
        lam_t, k_t = sources.join(t, pulled, k_t)
        lam.add(lam_t)
        k.add(k_t)
        delta.add(delta_t)
    return lam.joined(), delta.joined(), k.joined().int() if scaled else None


def exponent_of(k: Tensor, y: Tensor) -> Tensor:
    """The exponent of each row of y 2^k; that of a row of zeros stays k."""
    e = exponent(y)
    return torch.where(e == NO_EXPONENT, k, k + e)


@torch.no_grad()
def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop of Engine: each step is a product with W and one fused operation."""
    cell = plan.cell
    rows = plan.rows
    if not tangent_step(cell).uses_W:  # what W reads is constant: no direction goes through it
        W = None
    push_step = step_map(cell).pushed(("a", "x"))
    steps = SavedSteps.of(rows, saved)
    sources = None if g is None else rows.states(g)
    step_sources = optional_steps(rows, ga)
    factors = None if link is None else rows.steps(link.factor)
    W_steps = None if W is None else matrices(rows, W)
    mu_t = torch.zeros_like(saved.x[: rows.B]) if sources is None else sources[0].contiguous()
    mu = JoinedSteps(rows.B + rows.N)
    nu = JoinedSteps(rows.N)
    mu.add(mu_t)
    for t, n in enumerate(rows.sizes):
        m = mu_t[:n]  # of the samples that take this step, from x_t to x_{t+1}
        if factors is not None:
            m = m * factors[t]
        source = step_sources[t]
        nu_t = torch.zeros_like(steps.a[t]) if source is None else source
        if W_steps is not None:
            nu_t = torch.addmm(nu_t, read_push(cell, steps.before[t], m), W_steps[t].t())
        inputs = (steps.a[t], steps.v[t], steps.before[t], saved.p, nu_t, m)
        outputs = nonzero_outputs(push_step, None, (steps.after[t], steps.q[t]), inputs)
        mu_t = output_or_zeros(outputs, "x", m)
        if sources is not None:
            mu_t = mu_t + sources[t + 1]
        mu.add(mu_t)
        nu.add(nu_t)
    return mu.joined(), nu.joined()


def may_overlap(cell: Cell, d: int, B: int, like: Tensor) -> bool:
    """Whether two sweeps may run at once on the device: always, as no operation waits for another.

    The arguments belong to the interface of engines.
    """
    return True
