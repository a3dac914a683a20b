"""Engine `eager` where it is not on a CPU: one product and one fused pointwise operation for each step.

Engine `cuda` does the same where W is too large to stay on the chip: the library's own matrix product is then the best
there is. Nothing looks at a value, so that a whole gradient can be recorded (cuda/capture.py). Costates share an exponent for SHARED
steps where no source enters.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....cells.cell import Cell
from ...plan import Saved, SweepPlan
from ...pointwise import Pointwise
from ...rows import NO_EXPONENT, Link, exponent, next_exponent, pow2, scale
from ...slopes import pick_read_slot, read_map, read_push, read_values, step_map
from ..expressions import adjoint_step, tangent_step

SHARED = 4


@functools.cache
def step_operation(cell: Cell) -> Pointwise:
    """x_t and the values kept, from a, v, x_{t-1} and p."""
    inputs = (("a", cell.a), ("v", cell.v), ("x", cell.x), ("p", cell.p))
    outputs = (
        (("x", cell.next), ("q", cell.saved_nodes)) if cell.saved_nodes else (("x", cell.next),)
    )
    return Pointwise(inputs, outputs, (), frozenset({"p"}))


def nonzero_outputs(
    op: Pointwise, at_hand: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
) -> dict[str, Tensor]:
    """The outputs of a pointwise operation that are not identically zero."""
    live = [name for name, _ in op.outputs if name in op.nonzero_outputs]
    return dict(zip(live, op.run(None, at_hand, given), strict=True)) if live else {}


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows, op = plan.cell, plan.rows, step_operation(plan.cell)
    sides = [None] * rows.T if v is None else rows.steps(v)
    x, a, q = [x0.contiguous()], list[Tensor](), list[Tensor]()
    for n, base_t, v_t in zip(rows.sizes, rows.steps(base), sides, strict=True):
        before = x[-1][:n]
        a_t = base_t if W is None else torch.addmm(base_t, read_values(cell, before), W.t())
        found = nonzero_outputs(op, (), (a_t, v_t, before, p))
        x.append(found["x"] if "x" in found else torch.zeros_like(before))
        a.append(a_t)
        q += [found["q"]] if cell.saved_nodes else []
    return torch.cat(x), torch.cat(a), torch.cat(q) if cell.saved_nodes else None


@torch.no_grad()
def adjoint(
    plan: SweepPlan, saved: Saved, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    cell, rows = plan.cell, plan.rows
    op, W = step_map(cell).pulled(("x",), ("a", "x")), W if adjoint_step(cell).through else None
    sources = None if s is None else rows.states(s)
    first = torch.zeros_like(rows.last(saved.x)) if s_last is None else s_last
    k_first = (
        torch.zeros(rows.B, dtype=torch.int32, device=first.device)
        if k_last is None
        else k_last.int()
    )
    befores, afters = rows.before(saved.x), rows.states(saved.x)[1:]
    args, sides = rows.steps(saved.a), [None] * rows.T if saved.v is None else rows.steps(saved.v)
    kept = [None] * rows.T if saved.q is None else rows.steps(saved.q)
    factors, into = (
        None if link is None else rows.steps(link.factor),
        None if sa is None else rows.steps(sa),
    )

    def begun(t: int, going: int) -> tuple[Tensor, Tensor]:
        """The samples whose last state is x_t: their costate is their source."""
        here = slice(going, rows.sizes[t - 1] if t else rows.B)
        own, k = first[here], k_first[here]
        if not scaled:
            return own if sources is None else own + sources[t][here], k
        e = exponent(own)
        new = torch.where(e == NO_EXPONENT, NO_EXPONENT, e + k)
        if sources is not None:
            new = torch.maximum(new, exponent(sources[t][here]))
        new = torch.where(new == NO_EXPONENT, k, new).int()
        own = scale(own, (k - new)[:, None])
        return own if sources is None else own + scale(sources[t][here], -new[:, None]), new

    lam_t, k_t = begun(rows.T, 0)
    lam, ks, delta = [lam_t], [k_t], list[Tensor]()
    for t in reversed(range(rows.T)):
        found = nonzero_outputs(
            op, (afters[t], kept[t]), (args[t], sides[t], befores[t], saved.p, lam_t)
        )
        delta_t = found["a"] if "a" in found else torch.zeros_like(args[t])
        if into is not None:
            delta_t = delta_t + into[t]
        out = found["x"] if "x" in found else torch.zeros_like(lam_t)
        if W is not None and cell.read_slot is not None:
            pick_read_slot(cell, out).addmm_(delta_t, W)
        elif W is not None:
            out = (
                out
                + nonzero_outputs(
                    read_map(cell).pulled(("r",), ("x",)), (), (befores[t], delta_t @ W)
                )["x"]
            )
        if factors is not None:
            out = out * factors[t]
        n, source = len(out), None if sources is None else sources[t]
        if scaled and (source is not None or t % SHARED == 0):
            new = exponent_of(k_t, out) if source is None else next_exponent(k_t, out, source[:n])
            out, k_t = out * pow2((k_t - new)[:, None], out.dtype), new.int()
        if source is not None:
            out = out + (scale(source[:n], -k_t[:, None]) if scaled else source[:n])
        if (rows.sizes[t - 1] if t else rows.B) > n:
            more, k_more = begun(t, n)
            out, k_t = torch.cat([out, more]), torch.cat([k_t, k_more])
        lam_t = out
        lam.insert(0, lam_t)
        ks.insert(0, k_t)
        delta.insert(0, delta_t)
    return torch.cat(lam), torch.cat(delta), torch.cat(ks).int() if scaled else None


def exponent_of(k: Tensor, out: Tensor) -> Tensor:
    """The exponent of out 2^k itself; that of a row of zeros stays."""
    e = exponent(out)
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
    cell, rows = plan.cell, plan.rows
    op, W = step_map(cell).pushed(("a", "x")), W if tangent_step(cell).through else None
    sources = None if g is None else rows.states(g)
    befores, afters = rows.before(saved.x), rows.states(saved.x)[1:]
    args, sides = rows.steps(saved.a), [None] * rows.T if saved.v is None else rows.steps(saved.v)
    kept = [None] * rows.T if saved.q is None else rows.steps(saved.q)
    factors, into = (
        None if link is None else rows.steps(link.factor),
        None if ga is None else rows.steps(ga),
    )
    mu = [torch.zeros_like(saved.x[: rows.B]) if sources is None else sources[0].contiguous()]
    nu = []
    for t, n in enumerate(rows.sizes):
        m = mu[-1][:n] if factors is None else mu[-1][:n] * factors[t]
        nu_t = torch.zeros_like(args[t]) if into is None else into[t]
        if W is not None:
            nu_t = torch.addmm(nu_t, read_push(cell, befores[t], m), W.t())
        found = nonzero_outputs(
            op, (afters[t], kept[t]), (args[t], sides[t], befores[t], saved.p, nu_t, m)
        )
        out = found["x"] if "x" in found else torch.zeros_like(m)
        mu.append(out if sources is None else out + sources[t + 1])
        nu.append(nu_t)
    return torch.cat(mu), torch.cat(nu)


def may_overlap(cell: Cell, d: int, B: int, like: Tensor) -> bool:
    """May two such sweeps run at once?"""
    return True
