"""The definition: three loops written as the formulas read, step by step, nothing precomputed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cells.formula import Node, evaluate_nodes, pull, push
from ..plan import Saved, SweepPlan
from ..rows import Link, next_exponent, scale
from ..weights import matrices
from .expressions import optional_steps, symbols

Values = dict[Node, Tensor]


def refusal(device: str) -> str | None:
    """None: it runs on any device."""
    return None


def values(nodes: tuple[Node, ...], y: Tensor | None) -> Values:
    """The values [., d] of the nodes that y [., m d] holds side by side."""
    if y is None:
        return {}
    return dict(zip(nodes, y.chunk(len(nodes), -1), strict=True))


def evaluate_packed(nodes: Sequence[Node], known: Values, like: Tensor, d: int) -> Tensor:
    """The values of m nodes side by side, [n, m d] with n the rows of `like`.

    known: the values of their inputs. A constant or a parameter is repeated for all rows.
    """
    columns = []
    for value in evaluate_nodes(nodes, known):
        column = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        columns.append(column.expand(len(like), d))
    return torch.cat(columns, -1)


def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    """The forward loop of Engine, as the formula reads. No values of nodes are saved: q is None."""
    cell = plan.cell
    rows = plan.rows
    d = x0.shape[1] // len(cell.slots)
    x = [x0]
    a = []
    bases = rows.steps(base)
    v_by_step = optional_steps(rows, v)
    W_steps = None if W is None else matrices(rows, W)
    for t, n in enumerate(rows.sizes):
        before = x[-1][:n]  # x_{t-1} of the n samples that take this step
        known = values(cell.x, before) | values(cell.p, p) | values(cell.v, v_by_step[t])
        a_t = bases[t]
        if W_steps is not None:
            a_t = a_t + evaluate_packed(cell.read, known, before, d) @ W_steps[t].T
        a.append(a_t)
        x.append(evaluate_packed(cell.next, known | values(cell.a, a_t), before, d))
    return torch.cat(x), torch.cat(a), None


def step_values(plan: SweepPlan, saved: Saved) -> list[Values]:
    """For each step, the values x_{t-1}, p, a_t, v_t at which f and r are differentiated."""
    cell = plan.cell
    rows = plan.rows
    p = values(cell.p, saved.p)
    steps = []
    v = optional_steps(rows, saved.v)
    for before, a_t, v_t in zip(rows.before(saved.x), rows.steps(saved.a), v, strict=True):
        known = values(cell.x, before) | p | values(cell.a, a_t) | values(cell.v, v_t)
        steps.append(known)
    return steps


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
    """The adjoint loop of Engine, as the formula reads. keep is not used: all of lam is kept."""
    cell = plan.cell
    rows = plan.rows
    d = saved.x.shape[1] // len(cell.slots)
    lam_nodes = symbols("lam", len(cell.slots))
    rbar = symbols("rbar", len(cell.read))
    into_a = pull(cell.next, lam_nodes, cell.a)
    into_x = pull(cell.next, lam_nodes, cell.x)
    through_read = pull(cell.read, rbar, cell.x)
    sources = rows.states(saved.x.new_zeros(saved.x.shape) if s is None else s)
    last = saved.x.new_zeros(rows.B, saved.x.shape[1]) if s_last is None else s_last
    if k_last is None:
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=last.device)
    k_begin = k_last  # of type Tensor: inside add_sources, k_last may still be None for mypy
    # Time runs backwards: entry 0 of each list is the latest one, for the earliest t so far.
    lam: list[Tensor] = []
    k: list[Tensor] = []
    delta: list[Tensor] = []

    def add_sources(t: int, pulled: Tensor, k_pulled: Tensor) -> None:
        """Insert lam_t = pulled 2^k_pulled + s_t, with its exponent k_t if scaled.

        Samples whose last state is x_t have no rows in `pulled`: they begin with s_last.
        """
        begin = slice(len(pulled), len(sources[t]))
        pulled = torch.cat([pulled, last[begin]])
        k_pulled = torch.cat([k_pulled, k_begin[begin]])
        if not scaled:
            lam.insert(0, pulled + sources[t])
            return
        k_t = next_exponent(k_pulled, pulled, sources[t])
        k.insert(0, k_t)
        lam.insert(0, scale(pulled, (k_pulled - k_t)[:, None]) + scale(sources[t], -k_t[:, None]))

    add_sources(rows.T, last[:0], k_begin[:0])  # nothing is pulled back to the last state
    point = step_values(plan, saved)
    W_steps = None if W is None else matrices(rows, W)
    for t in reversed(range(rows.T)):
        known = point[t] | values(lam_nodes, lam[0])
        delta_t = evaluate_packed(into_a, known, lam[0], d)
        if sa is not None:
            delta_t = delta_t + rows.steps(sa)[t]
        pulled = evaluate_packed(into_x, known, lam[0], d)
        if W_steps is not None:
            known |= values(rbar, delta_t @ W_steps[t])
            pulled = pulled + evaluate_packed(through_read, known, lam[0], d)
        if link is not None:
            pulled = pulled * rows.steps(link.factor)[t]
        # Unscaled costates have no exponents: any of the right length will do.
        add_sources(t, pulled, k[0] if scaled else k_begin[: len(pulled)])
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
    """The tangent loop of Engine, as the formula reads."""
    cell = plan.cell
    rows = plan.rows
    d = saved.x.shape[1] // len(cell.slots)
    m_nodes = symbols("mu", len(cell.slots))
    nu_nodes = symbols("nu", len(cell.a))
    along_x = dict(zip(cell.x, m_nodes, strict=True))
    along_a = dict(zip(cell.a, nu_nodes, strict=True))
    read_change = push(cell.read, along_x)
    next_change = push(cell.next, along_x | along_a)
    sources = rows.states(saved.x.new_zeros(saved.x.shape) if g is None else g)
    mu = [sources[0]]
    nu = []
    point = step_values(plan, saved)
    W_steps = None if W is None else matrices(rows, W)
    for t, n in enumerate(rows.sizes):
        m = mu[t][:n]
        if link is not None:
            m = m * rows.steps(link.factor)[t]
        known = point[t] | values(m_nodes, m)
        nu_t = m.new_zeros(n, saved.a.shape[1]) if ga is None else rows.steps(ga)[t]
        if W_steps is not None:
            nu_t = nu_t + evaluate_packed(read_change, known, m, d) @ W_steps[t].T
        change = evaluate_packed(next_change, known | values(nu_nodes, nu_t), m, d)
        mu.append(sources[t + 1] + change)
        nu.append(nu_t)
    return torch.cat(mu), torch.cat(nu)
