"""Linear recurrences by a parallel scan: about 2 log2 T operations one after the other instead of T, on any device.

For a cell without W whose step is affine in its state, x_t = A_t x_{t-1} + b_t with a matrix A_t [m, m] over the m slots
of each unit, two steps are again such a step. So neighbours are joined in pairs, the pairs are solved in the same way,
and those in between follow; in place, with about twice the work of the loop:

    forward, tangent   y_t <- y_t + A_t y_{t-1}
    adjoint            y_t <- y_t + A_{t+1}' y_{t+1}

y [T + 1, B, m, d] and the links S [T, B, m, m, d], or [1, 1, m, m, d] where they are the same at all steps. Samples that
end early are filled up with zeros: a link of zeros lets nothing of them pass.

Products of many links leave the range of floating point long before their results do. Where that is usual (costates
with exponents, links with factors) numbers carry exponents of their own: see `solve_with_exponents`. Elsewhere a product that is too
small has nothing to add, and one that is too large is reported as if the state were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
from ..rows import NO_EXPONENT, Link, Rows, pow2, scale
from ..slopes import step_map
from .denormals import flush_denormals

Values = tuple[Tensor, ...]  # the tensors that a number of an algebra is made of
Wide = tuple[Tensor, Tensor]  # y 2^e, with an exponent for each entry or row


def refusal(device: str) -> str | None:
    return None


@functools.cache
def cell_refusal(cell: Cell) -> str | None:
    """Why it cannot run a cell, as the end of a sentence; None if it can."""
    if cell.read:
        return f"is for recurrences without W, and cell '{cell.name}' has one. Use engine='auto'."
    if not is_affine(cell):
        return f"is for steps that are linear in the state, and that of cell '{cell.name}' is not. Use engine='auto'."
    return None


def is_affine(cell: Cell) -> bool:
    """Is f(a, v, x, p) = A x + b, with A and b free of x, as it is written?"""
    moving = dependent_nodes(cell.next, cell.x)

    def keeps(n: Node) -> bool:
        moved = [a in moving for a in n.args]
        return (
            n.op in ("add", "sub", "neg")
            or (n.op == "mul" and not all(moved))
            or (n.op == "div" and not moved[1])
        )

    return all(keeps(n) for n in walk(cell.next) if n in moving and n.args)


class AffineStep(NamedTuple):
    """The step of a cell taken apart."""

    A: tuple[Node, ...]  # [m m], row by row
    shared: bool  # A is made of p alone
    turns: bool  # A is a number, or a complex number: |A y| = |A| |y|
    step: Pointwise  # (a, v, p) -> A, b and the values kept
    links: Pointwise  # (a, v, p), the values kept -> A


@functools.cache
def affine_step(cell: Cell) -> AffineStep:
    columns = [
        push(cell.next, {x: Node("const", (), float(x is y)) for x in cell.x}) for y in cell.x
    ]
    A = tuple(n for row in zip(*columns, strict=True) for n in row)
    b = tuple(substitute(cell.next, dict.fromkeys(cell.x, ZERO)))
    shared = not dependent_nodes(A, (*cell.a, *cell.v)) & set(A)
    turns = len(A) == 1 or (len(A) == 4 and A[0] is A[3] and A[1] is neg(A[2]))
    inputs, p = (("a", cell.a), ("v", cell.v), ("p", cell.p)), frozenset({"p"})
    outputs = (
        *(() if shared else (("A", A),)),
        ("b", b),
        *((("q", cell.saved_nodes),) if cell.saved_nodes else ()),
    )
    return AffineStep(
        A,
        shared,
        turns,
        Pointwise(inputs, outputs, (), p),
        Pointwise(inputs, (("A", A),), (cell.saved_nodes,), p),
    )


def nonzero_outputs(
    op: Pointwise, rows: Rows, at_hand: Sequence[Tensor | None], given: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """The outputs of a pointwise operation that are not identically zero."""
    live = [name for name, _ in op.outputs if name in op.nonzero_outputs]
    return dict(zip(live, op.run(rows, at_hand, given), strict=True)) if live else {}


def split_slots(cell: Cell, y: Tensor) -> Tensor:
    """[., m d] -> [., m, d]"""
    return y.unflatten(1, (len(cell.slots), -1))


def to_dense(rows: Rows, y: Tensor) -> Tensor:
    """A step array as [T, B, .], a state array as [T + 1, B, .], zero where a sample has ended."""
    states = len(y) > rows.N
    shape = (rows.T + states, rows.B)
    if not rows.uniform:
        y = y.new_zeros(shape[0] * rows.B, *y.shape[1:]).index_copy_(
            0, dense_positions(rows, states, y), y
        )
    return y.unflatten(0, shape)


def from_dense(rows: Rows, y: Tensor) -> Tensor:
    """The transpose of dense, of states."""
    whole = y.flatten(0, 1)
    return whole if rows.uniform else whole.index_select(0, dense_positions(rows, True, y))


def dense_positions(rows: Rows, states: bool, like: Tensor) -> Tensor:
    """Where the rows of a step or state array lie in a dense one."""
    steps = (rows.time - 1 + states) * rows.B + rows.sample
    return (torch.cat([torch.arange(rows.B), steps]) if states else steps).to(like.device)


def link_matrices(
    plan: SweepPlan, A: Tensor | None, p: Tensor | None, link: Link | None, like: Tensor
) -> Tensor:
    """The links S [T or 1, B or 1, m, m, d]; A [N, m m d], None if p gives it or it is zero."""
    cell, rows, m = plan.cell, plan.rows, len(plan.cell.slots)
    d = like.shape[1] // m
    if A is not None:
        S = to_dense(rows, A.unflatten(1, (m, m, d)))
    else:
        known = {} if p is None else dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
        entries = evaluate_nodes(affine_step(cell).A, known)
        S = torch.stack(
            [e.expand(d) if isinstance(e, Tensor) else like.new_full((d,), e) for e in entries]
        )
        S = S.view(1, 1, m, m, d)
        if not rows.uniform:
            S = to_dense(rows, S[0].expand(rows.N, m, m, d))
    return S if link is None else S * to_dense(rows, link.factor[:, :, None, None])


def saved_link_matrices(plan: SweepPlan, saved: Saved, link: Link | None) -> Tensor:
    """The links of a tape."""
    p = affine_step(plan.cell)
    A = (
        None
        if p.shared
        else nonzero_outputs(p.links, plan.rows, (saved.q,), (saved.a, saved.v, saved.p)).get("A")
    )
    return link_matrices(plan, A, saved.p, link, saved.x)


class Algebra(NamedTuple):
    """What a scan is made of; S are matrices over the slots, y and z vectors."""

    join: Callable[[Values, Values, Values], None]  # y <- y + S z
    after: Callable[[Values, Values], Values]  # S R


def scan(algebra: Algebra, S: Values, y: Values, back: bool) -> None:
    """y_t <- y_t + S_t y_{t-1} for t = 1, 2, ..., in place; back: y_t <- y_t + S_{t+1} y_{t+1} for t = T - 1, ..., 0."""
    n = len(y[0])
    if n == 1:
        return
    half, rest = n // 2, (n - 1) // 2
    seconds = every_second(y, 1, half, back)
    algebra.join(seconds, every_second(S, 0, half, back), every_second(y, 0, half, back))
    if half > 1:
        pairs = algebra.after(
            every_second(S, 2, half - 1, back), every_second(S, 1, half - 1, back)
        )
        scan(algebra, pairs, seconds, back)
    if rest:
        algebra.join(
            every_second(y, 2, rest, back),
            every_second(S, 1, rest, back),
            every_second(y, 1, rest, back),
        )


def every_second(values: Values, start: int, count: int, back: bool) -> Values:
    """`count` of the values, from `start` on, counted from the end if `back`; one value alone stands for all."""
    n = len(values[0])
    if n == 1:
        return values
    first = n + 1 - start - 2 * count if back else start
    return tuple(v[first : first + 2 * count - 1 : 2] for v in values)


def slot_range(S: Values) -> range:
    return range(S[0].shape[-2])


def _join(y: Values, S: Values, z: Values) -> None:
    for j in slot_range(S):
        y[0].addcmul_(S[0][..., j, :], z[0][..., j, None, :])


def _after(S: Values, R: Values) -> Values:
    first, *rest = ((S[0][..., j, None, :], R[0][..., None, j, :, :]) for j in slot_range(S))
    out = first[0] * first[1]
    for s, r in rest:
        out.addcmul_(s, r)
    return (out,)


def _largest(y: Values, S: Values, z: Values) -> None:
    torch.maximum(y[0], S[0] + z[0], out=y[0])


def wide_sum(*terms: Wide) -> Wide:
    """The sum of numbers with exponents."""
    top = functools.reduce(torch.maximum, (e for _, e in terms))
    return to_wide(functools.reduce(torch.add, (y * pow2(e - top, y.dtype) for y, e in terms)), top)


def to_wide(y: Tensor, e: Tensor | int = 0) -> Wide:
    """y 2^e as numbers with exponents of their own: mantissas of order one; zeros have the exponent NONE."""
    mantissa, own = torch.frexp(y)
    return mantissa, torch.where(mantissa == 0, NO_EXPONENT, own + e)


def _wide_join(y: Values, S: Values, z: Values) -> None:
    terms = [
        (S[0][..., j, :] * z[0][..., j, None, :], S[1][..., j, :] + z[1][..., j, None, :])
        for j in slot_range(S)
    ]
    for old, new in zip(y, wide_sum((y[0], y[1]), *terms), strict=True):
        old.copy_(new)


def _wide_after(S: Values, R: Values) -> Values:
    pairs = [
        [(s[..., j, None, :], r[..., None, j, :, :]) for s, r in zip(S, R, strict=True)]
        for j in slot_range(S)
    ]
    return wide_sum(*((s * r, e_s + e_r) for (s, r), (e_s, e_r) in pairs))


PLAIN = Algebra(_join, _after)
LARGEST = Algebra(
    _largest, lambda S, R: (S[0] + R[0],)
)  # sum is product and max is sum: the size of a result
WIDE = Algebra(_wide_join, _wide_after)


def solve_with_exponents(
    S: Tensor, sources: Sequence[tuple[Tensor, Tensor | int]], back: bool, turns: bool
) -> Wide:
    """The solution with an exponent for each entry, for sources y 2^k: nothing overflows, and what is lost is too small
    to be seen beside what it is added to.

    The size of a number, real or complex, is multiplied by that of each link. So the same scan over logarithms, where
    the largest term stands for the sum, gives exponents E: in units of 2^E no product of links is larger than about
    one, and one that vanishes has nothing to add. Matrices have no such size: there every entry carries its exponent
    through the scan."""
    if not turns:
        entries = wide_sum(*(to_wide(y, k) for y, k in sources))
        scan(WIDE, to_wide(S), entries, back)
        return entries
    E = functools.reduce(torch.maximum, (log_size(y) + k for y, k in sources))
    scan(LARGEST, (log_size(S[:, :, :, 0]),), (E,), back)
    E = E.ceil().clamp_min(NO_EXPONENT).int()
    ahead, behind = (E[:-1], E[1:]) if back else (E[1:], E[:-1])
    change = torch.where(
        behind == NO_EXPONENT, NO_EXPONENT, behind - ahead
    )  # nothing comes from zeros, however links grow
    y = functools.reduce(torch.add, (scale(y, k - E) for y, k in sources))
    scan(PLAIN, (scale(S, change[:, :, None]),), (y,), back)
    return y, E


def log_size(y: Tensor) -> Tensor:
    """log2 |y| over the slots, [., ., m, d] -> [., ., 1, d]"""
    return functools.reduce(torch.hypot, y.split(1, 2)).abs().log2()


def exponent_by_row(y: Tensor, e: Tensor, k_first: Tensor) -> Wide:
    """Entries y 2^e -> mantissas and one exponent [T + 1, B] for each row; a row of zeros keeps that of the step after."""
    k = (y.abs().log2() + e).amax((2, 3)).floor().add(1).clamp_min(NO_EXPONENT).int()
    known = torch.cat([k_first[None], k.flip(0)]).t().contiguous()
    at = (
        torch.where(known == NO_EXPONENT, 0, torch.arange(known.shape[1], device=k.device))
        .cummax(1)
        .values
    )
    k = known.gather(1, at)[:, 1:].t().flip(0)
    return scale(y, e - k[:, :, None, None]), k


def solve(plan: SweepPlan, S: Tensor, y: Tensor, back: bool, linked: bool) -> Tensor:
    """The solution, as a state array, for sources y [T + 1, B, m, d], which it may overwrite. linked: with factors on the
    links, whose products may leave the range where the solution does not."""
    if linked:
        y = scale(*solve_with_exponents(S, [(y, 0)], back, affine_step(plan.cell).turns))
    else:
        scan(PLAIN, (S,), (y,), back)
    if plan.checked:
        carry_nonfinite_to_end(plan.rows, y, back)
    return from_dense(plan.rows, y).flatten(1)


def carry_nonfinite_to_end(rows: Rows, y: Tensor, back: bool) -> None:
    """What is not finite anywhere is not finite at the end: a scan reaches the end by other ways than the loop."""
    bad = (y - y).sum(0)
    if back or rows.uniform:
        y[0 if back else -1] += bad
    else:
        y[rows.lengths.to(y.device), torch.arange(rows.B, device=y.device)] += bad


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows = plan.cell, plan.rows
    with flush_denormals():
        made = nonzero_outputs(affine_step(cell).step, rows, (), (base, v, p))
        b = made["b"] if "b" in made else x0.new_zeros(rows.N, x0.shape[1])
        sources = to_dense(rows, split_slots(cell, torch.cat([x0, b])))
        x = solve(plan, link_matrices(plan, made.get("A"), p, None, x0), sources, False, False)
    return x, base.clone(), made.get("q")


@torch.no_grad()
def adjoint(
    plan: SweepPlan, saved: Saved, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    cell, rows, turns, k = plan.cell, plan.rows, affine_step(plan.cell).turns, None
    if s is None and s_last is None:
        s = torch.zeros_like(saved.x)
    sources = None if s is None else to_dense(rows, split_slots(cell, s))
    last = (
        None if s_last is None else to_dense(rows, split_slots(cell, rows.last_transposed(s_last)))
    )
    with flush_denormals():
        S = saved_link_matrices(plan, saved, link).transpose(2, 3)
        if scaled:
            k_first = (
                torch.zeros(rows.B, dtype=torch.int32, device=saved.x.device)
                if k_last is None
                else k_last.int()
            )
            given = [
                (y, e) for y, e in ((sources, 0), (last, k_first[:, None, None])) if y is not None
            ]
            lam, k = exponent_by_row(*solve_with_exponents(S, given, True, turns), k_first)
            lam, k = from_dense(rows, lam).flatten(1), from_dense(rows, k)
        else:
            y = plus(sources, last)
            assert y is not None
            lam = solve(plan, S, y.clone() if s_last is None else y, True, link is not None)
        op = step_map(cell).pulled(("x",), ("a",))
        inputs = (saved.a, saved.v, rows.prev(saved.x), saved.p, lam[rows.B :])
        delta = nonzero_outputs(op, rows, (saved.x[rows.B :], saved.q), inputs).get("a")
    delta = torch.zeros_like(saved.a) if delta is None else delta
    return lam, delta if sa is None else delta + sa, k


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
    y = torch.zeros_like(saved.x) if g is None else g.clone()
    with flush_denormals():
        if ga is not None:
            op = step_map(cell).pushed(("a",))
            given = (saved.a, saved.v, rows.prev(saved.x), saved.p, ga)
            into = nonzero_outputs(op, rows, (saved.x[rows.B :], saved.q), given).get("x")
            if into is not None:
                y[rows.B :] += into
        y = to_dense(rows, split_slots(cell, y))
        mu = solve(plan, saved_link_matrices(plan, saved, link), y, False, link is not None)
    return mu, torch.zeros_like(saved.a) if ga is None else ga.clone()
