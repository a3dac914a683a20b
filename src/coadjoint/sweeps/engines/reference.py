"""The definition: three loops written as the formulas read, one row block after another, nothing precomputed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...cells.formula import Node, evaluate_nodes, pull, push, symbol
from ..plan import Saved, SweepPlan
from ..rows import Link, next_exponent, scale


def refusal(device: str) -> str | None:
    return None


def values(nodes: tuple[Node, ...], y: Tensor | None) -> dict[Node, Tensor]:
    return {} if y is None else dict(zip(nodes, y.chunk(len(nodes), -1), strict=True))


def packed(entries: list[Tensor | float], like: Tensor, d: int) -> Tensor:
    return torch.cat(
        [
            torch.as_tensor(e, dtype=like.dtype, device=like.device).expand(len(like), d)
            for e in entries
        ],
        -1,
    )


@functools.cache
def symbols(kind: str, count: int) -> tuple[Node, ...]:
    return tuple(symbol(f"{kind}.{i}") for i in range(count))


def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    cell, rows = plan.cell, plan.rows
    d = x0.shape[1] // len(cell.slots)
    x, a = [x0], []
    bases, sides = rows.steps(base), [None] * rows.T if v is None else rows.steps(v)
    for t in range(rows.T):
        before = x[t][: rows.sizes[t]]
        env = values(cell.x, before) | values(cell.p, p) | values(cell.v, sides[t])
        a_t = bases[t]
        if W is not None:
            a_t = a_t + packed(evaluate_nodes(cell.read, env), before, d) @ W.T
        a.append(a_t)
        x.append(packed(evaluate_nodes(cell.next, env | values(cell.a, a_t)), before, d))
    return torch.cat(x), torch.cat(a), None


def points(plan: SweepPlan, saved: Saved) -> list[dict[Node, Tensor]]:
    """The values at which each step is differentiated."""
    cell, rows = plan.cell, plan.rows
    sides = [None] * rows.T if saved.v is None else rows.steps(saved.v)
    return [
        values(cell.x, before) | values(cell.p, saved.p) | values(cell.a, a_t) | values(cell.v, v_t)
        for before, a_t, v_t in zip(rows.before(saved.x), rows.steps(saved.a), sides, strict=True)
    ]


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
    cell, rows = plan.cell, plan.rows
    d = saved.x.shape[1] // len(cell.slots)
    bar, rbar = symbols("lam", len(cell.slots)), symbols("rbar", len(cell.read))
    sources = rows.states(saved.x.new_zeros(saved.x.shape) if s is None else s)
    first = saved.x.new_zeros(rows.B, saved.x.shape[1]) if s_last is None else s_last
    k_first = (
        torch.zeros(rows.B, dtype=torch.int32, device=first.device) if k_last is None else k_last
    )
    lam: list[Tensor] = []
    k: list[Tensor] = []
    delta: list[Tensor] = []

    def join(t: int, out: Tensor, k_out: Tensor) -> None:
        """lam_t = J' lam_{t+1} + s_t; samples whose last state is x_t begin with s_last."""
        going, n = len(out), len(sources[t])
        out, k_out = torch.cat([out, first[going:n]]), torch.cat([k_out, k_first[going:n]])
        if not scaled:
            lam.insert(0, out + sources[t])
            return
        k.insert(0, next_exponent(k_out, out, sources[t]))
        lam.insert(0, scale(out, (k_out - k[0])[:, None]) + scale(sources[t], -k[0][:, None]))

    join(rows.T, first[:0], k_first[:0])
    at = points(plan, saved)
    for t in reversed(range(rows.T)):
        env = at[t] | values(bar, lam[0])
        delta_t = packed(evaluate_nodes(pull(cell.next, bar, cell.a), env), lam[0], d)
        if sa is not None:
            delta_t = delta_t + rows.steps(sa)[t]
        out = packed(evaluate_nodes(pull(cell.next, bar, cell.x), env), lam[0], d)
        if W is not None:
            env |= values(rbar, delta_t @ W)
            out = out + packed(evaluate_nodes(pull(cell.read, rbar, cell.x), env), lam[0], d)
        if link is not None:
            out = out * rows.steps(link.factor)[t]
        join(t, out, k[0] if scaled else k_first[: len(out)])
        delta.insert(0, delta_t)
    return torch.cat(lam), torch.cat(delta), torch.cat(k) if scaled else None


def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    cell, rows = plan.cell, plan.rows
    d = saved.x.shape[1] // len(cell.slots)
    dot, into = symbols("mu", len(cell.slots)), symbols("nu", len(cell.a))
    along = dict(zip(cell.x, dot, strict=True))
    sources = rows.states(saved.x.new_zeros(saved.x.shape) if g is None else g)
    mu, nu = [sources[0]], []
    at = points(plan, saved)
    for t in range(rows.T):
        m = mu[t][: rows.sizes[t]]
        if link is not None:
            m = m * rows.steps(link.factor)[t]
        env = at[t] | values(dot, m)
        nu_t = m.new_zeros(len(m), saved.a.shape[1]) if ga is None else rows.steps(ga)[t]
        if W is not None:
            nu_t = nu_t + packed(evaluate_nodes(push(cell.read, along), env), m, d) @ W.T
        out = push(cell.next, along | dict(zip(cell.a, into, strict=True)))
        mu.append(sources[t + 1] + packed(evaluate_nodes(out, env | values(into, nu_t)), m, d))
        nu.append(nu_t)
    return torch.cat(mu), torch.cat(nu)
