"""Engine `scan`: linear recurrences in about 2 log2 T operations instead of T, on any device.

For a cell without W whose step is affine in its state, x_t = A_t x_{t-1} + b_t with a matrix
A_t [m, m] over the m slots of each unit, the three loops are scans (parallel_scan):

    forward, tangent   y_t <- y_t + A_t y_{t-1}
    adjoint            y_t <- y_t + A_{t+1}' y_{t+1}

y [T + 1, B, m, d] and the links S [T, B, m, m, d], or [1, 1, m, m, d] where they are the same at
all steps. Samples that end early are filled up with zeros: links of zeros let nothing pass.

Products of many links leave the range of floating point long before their results do. Where that
is usual (costates with exponents, links with factors) the scan computes with exponents. Elsewhere
a product that is too small has nothing to add, and one that is too large is reported as if the
state were.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...cells.cell import Cell
from ...cells.formula import (
    ZERO,
    Node,
    dependent_nodes,
    evaluate_nodes,
    neg,
    push,
    substitute,
    walk,
)
from ..affine import plus
from ..plan import Saved, SweepPlan
from ..pointwise import Pointwise
from ..rows import Link, Rows, scale
from ..slopes import step_map
from .denormals import flush_denormals
from .expressions import nonzero_outputs, output_or_zeros
from .parallel_scan import REAL, exponent_by_row, scan, scan_with_exponents


def refusal(device: str) -> str | None:
    """None: it runs on any device."""
    return None


@functools.cache
def cell_refusal(cell: Cell) -> str | None:
    """Why it cannot run a cell, as the end of a sentence; None if it can.

    It runs cells without W (their r has no entries) whose step is affine in the state.
    """
    if cell.read:
        return f"is for recurrences without W, but cell '{cell.name}' has one. Use engine='auto'."
    if not is_affine(cell):
        return (
            f"is for steps that are linear in the state, but that of cell '{cell.name}' is not. "
            "Use engine='auto'."
        )
    return None


def is_affine(cell: Cell) -> bool:
    """Whether f(a, v, x, p) = A x + b, with A and b free of x, as the formula is written.

    So it is if each operation is linear in those of its arguments that depend on x.
    """
    moving = dependent_nodes(cell.next, cell.x)

    def is_linear(n: Node) -> bool:
        """Whether the operation of node n is linear in its arguments that depend on x."""
        depends = [a in moving for a in n.args]
        if n.op == "mul":
            return not all(depends)
        if n.op == "div":
            return not depends[1]
        return n.op in ("add", "sub", "neg")

    return all(is_linear(n) for n in walk(cell.next) if n in moving and n.args)


class AffineStep(NamedTuple):
    """The step of a cell, taken apart into A and b."""

    A: tuple[Node, ...]  # the m m entries, row by row
    shared: bool  # A is made of p alone
    has_modulus: bool  # A is a number, or a complex number: |A y| = |A| |y|
    step: Pointwise  # (a, v, p) -> A, b and the values that the cell saves
    links: Pointwise  # (a, v, p) and the saved values -> A


@functools.cache
def affine_step(cell: Cell) -> AffineStep:
    """The step x_t = A x_{t-1} + b of a cell for which is_affine holds, as expressions."""
    columns = []
    for y in cell.x:  # column j of A is the change along slot j
        unit = {x: Node("const", (), float(x is y)) for x in cell.x}
        columns.append(push(cell.next, unit))
    A = tuple(n for row in zip(*columns, strict=True) for n in row)
    b = tuple(substitute(cell.next, dict.fromkeys(cell.x, ZERO)))
    shared = not dependent_nodes(A, (*cell.a, *cell.v)) & set(A)
    # A complex number re + i im as a matrix is [[re, -im], [im, re]].
    is_complex = len(A) == 4 and A[0] is A[3] and A[1] is neg(A[2])
    inputs = (("a", cell.a), ("v", cell.v), ("p", cell.p))
    uniform = frozenset({"p"})
    outputs = [("b", b)]
    if not shared:  # otherwise A is the same at all steps, and computed once (shared_link)
        outputs.insert(0, ("A", A))
    if cell.saved_nodes:
        outputs.append(("q", cell.saved_nodes))
    step = Pointwise(inputs, tuple(outputs), (), uniform)
    links = Pointwise(inputs, (("A", A),), (cell.saved_nodes,), uniform)
    return AffineStep(A, shared, len(A) == 1 or is_complex, step, links)


def split_slots(cell: Cell, y: Tensor) -> Tensor:
    """An array [., m d] of the cell's m slots side by side as [., m, d]."""
    split: Tensor = y.unflatten(1, (len(cell.slots), -1))
    return split


def to_dense(rows: Rows, y: Tensor) -> Tensor:
    """A step array as [T, B, .], a state array as [T + 1, B, .], zero where a sample has ended."""
    is_states = len(y) > rows.N  # B + N rows, not N
    length = rows.T + is_states
    if not rows.uniform:
        zeros = y.new_zeros(length * rows.B, *y.shape[1:])
        y = zeros.index_copy_(0, dense_positions(rows, is_states, y), y)
    dense: Tensor = y.unflatten(0, (length, rows.B))
    return dense


def from_dense(rows: Rows, y: Tensor) -> Tensor:
    """[T + 1, B, .] as a state array [B + N, .]: the inverse of to_dense."""
    all_rows = y.flatten(0, 1)
    if rows.uniform:
        return all_rows
    return all_rows.index_select(0, dense_positions(rows, True, y))


def dense_positions(rows: Rows, is_states: bool, like: Tensor) -> Tensor:
    """Where the rows of a step or state array lie in [T, B] or [T + 1, B], flattened.

    like: a tensor on the device where the positions are needed.
    """
    # Step t = 1..T is row t - 1 of [T, B] and, as the state x_t, row t of [T + 1, B].
    positions = (rows.time - 1 + is_states) * rows.B + rows.sample
    if is_states:
        positions = torch.cat([torch.arange(rows.B), positions])
    return positions.to(like.device)


def link_matrices(
    plan: SweepPlan, A: Tensor | None, p: Tensor | None, link: Link | None, like: Tensor
) -> Tensor:
    """The links S [T or 1, B or 1, m, m, d]: the matrices A_t times the factors of `link`.

    A [N, m m d] are their values; None where p alone determines them, or they are zero.
    like: a state array, for its width, type and device.
    """
    rows = plan.rows
    m = len(plan.cell.slots)
    d = like.shape[1] // m
    if A is not None:
        S = to_dense(rows, A.unflatten(1, (m, m, d)))
    else:
        S = shared_link(plan.cell, p, like, d)
        if not rows.uniform:  # steps that do not exist need links of zeros
            S = to_dense(rows, S[0].expand(rows.N, m, m, d))
    if link is not None:
        S = S * to_dense(rows, link.factor[:, :, None, None])
    return S


def shared_link(cell: Cell, p: Tensor | None, like: Tensor, d: int) -> Tensor:
    """A [1, 1, m, m, d] of a cell whose A is made of p alone."""
    known = {} if p is None else dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
    entries = []
    for entry in evaluate_nodes(affine_step(cell).A, known):  # a constant entry is a number
        is_tensor = isinstance(entry, Tensor)
        entries.append(entry.expand(d) if is_tensor else like.new_full((d,), entry))
    m = len(cell.slots)
    return torch.stack(entries).view(1, 1, m, m, d)


def saved_link_matrices(plan: SweepPlan, saved: Saved, link: Link | None) -> Tensor:
    """The links S of link_matrices, at the values that a forward sweep saved."""
    parts = affine_step(plan.cell)
    A = None
    if not parts.shared:
        inputs = (saved.a, saved.v, saved.p)
        A = nonzero_outputs(parts.links, plan.rows, (saved.q,), inputs).get("A")
    return link_matrices(plan, A, saved.p, link, saved.x)


def solve(plan: SweepPlan, S: Tensor, y: Tensor, back: bool, has_factors: bool) -> Tensor:
    """Solve y_t <- y_t + S_t y_{t-1}, or backwards, for sources y [T + 1, B, m, d].

    Returns a state array [B + N, m d]; y may be overwritten. has_factors: the links have factors,
    whose products may leave the range of floating point though the solution does not.
    """
    if has_factors:
        has_modulus = affine_step(plan.cell).has_modulus
        y = scale(*scan_with_exponents(S, [(y, 0)], back, has_modulus))
    else:
        scan(REAL, (S,), (y,), back)
    if plan.checked:
        carry_nonfinite_to_end(plan.rows, y, back)
    return from_dense(plan.rows, y).flatten(1)


def carry_nonfinite_to_end(rows: Rows, y: Tensor, back: bool) -> None:
    """Make the last state reached, x_0 if back, non-finite where any state y_t of the sample is.

    A loop passes inf and NaN on to its end, and only there are they looked for. A scan adds up
    in another order, so one of them may not reach the end.
    """
    bad = (y - y).sum(0)  # zero, and NaN where something is not finite: inf - inf is NaN
    if back:
        y[0] += bad
    elif rows.uniform:
        y[-1] += bad
    else:
        y[rows.lengths.to(y.device), torch.arange(rows.B, device=y.device)] += bad


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop of Engine as a scan of x_t = A_t x_{t-1} + b_t, with a_t = base_t.

    W is not used: see cell_refusal.
    """
    cell = plan.cell
    rows = plan.rows
    with flush_denormals():
        outputs = nonzero_outputs(affine_step(cell).step, rows, (), (base, v, p))
        b = outputs["b"] if "b" in outputs else x0.new_zeros(rows.N, x0.shape[1])
        sources = to_dense(rows, split_slots(cell, torch.cat([x0, b])))
        S = link_matrices(plan, outputs.get("A"), p, None, x0)
        x = solve(plan, S, sources, back=False, has_factors=False)
    return x, base.clone(), outputs.get("q")


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
    """The adjoint loop of Engine as a scan: lam_{t-1} = s_{t-1} + link_t A_t' lam_t.

    W is not used: see cell_refusal. keep is not used: all of lam is computed.
    """
    cell = plan.cell
    rows = plan.rows
    if s is None and s_last is None:
        s = torch.zeros_like(saved.x)
    # Both as [T + 1, B, m, d]: the sources of all states, and those of the last states.
    sources = None if s is None else to_dense(rows, split_slots(cell, s))
    last = None
    if s_last is not None:
        last = to_dense(rows, split_slots(cell, rows.last_transposed(s_last)))
    k = None
    with flush_denormals():
        S = saved_link_matrices(plan, saved, link).transpose(2, 3)
        if scaled:
            # s and s_last have different exponents, and are added inside.
            lam, k = scaled_costates(plan, S, sources, last, k_last)
        else:
            y = plus(sources, last)
            assert y is not None
            if s_last is None:
                y = y.clone()  # it may be the caller's s, and is overwritten
            lam = solve(plan, S, y, back=True, has_factors=link is not None)
        pull_a = step_map(cell).pulled(("x",), ("a",))
        inputs = (saved.a, saved.v, rows.prev(saved.x), saved.p, lam[rows.B :])
        outputs = nonzero_outputs(pull_a, rows, (saved.x[rows.B :], saved.q), inputs)
    delta = output_or_zeros(outputs, "a", saved.a)
    if sa is not None:
        delta = delta + sa
    return lam, delta, k


def scaled_costates(
    plan: SweepPlan, S: Tensor, sources: Tensor | None, last: Tensor | None, k_last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(lam, k) as state arrays; the costates lam 2^k solve the recurrence backwards.

    sources, last 2^k_last: both [T + 1, B, m, d] or None, the sources of all states and those of
    the samples' last states. S: the transposed links.
    """
    rows = plan.rows
    if k_last is None:
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=S.device)
    k_last = k_last.int()
    terms: list[tuple[Tensor, Tensor | int]] = []
    if sources is not None:
        terms.append((sources, 0))
    if last is not None:
        terms.append((last, k_last[:, None, None]))
    y, e = scan_with_exponents(S, terms, True, affine_step(plan.cell).has_modulus)
    lam, k = exponent_by_row(y, e, k_last)
    return from_dense(rows, lam).flatten(1), from_dense(rows, k)


@torch.no_grad()
def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop of Engine as a scan: nu_t = ga_t, mu_t = g_t + A_t m_t + f_a ga_t.

    W is not used: see cell_refusal.
    """
    cell = plan.cell
    rows = plan.rows
    y = torch.zeros_like(saved.x) if g is None else g.clone()
    with flush_denormals():
        if ga is not None:
            push_a = step_map(cell).pushed(("a",))
            inputs = (saved.a, saved.v, rows.prev(saved.x), saved.p, ga)
            outputs = nonzero_outputs(push_a, rows, (saved.x[rows.B :], saved.q), inputs)
            if "x" in outputs:  # f_a ga enters like a source of the state
                y[rows.B :] += outputs["x"]
        sources = to_dense(rows, split_slots(cell, y))
        S = saved_link_matrices(plan, saved, link)
        mu = solve(plan, S, sources, back=False, has_factors=link is not None)
    return mu, torch.zeros_like(saved.a) if ga is None else ga.clone()
