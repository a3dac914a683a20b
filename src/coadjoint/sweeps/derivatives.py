"""The three loops as differentiable operations, closed under differentiation.

With a_t = base_t + W r(x_{t-1}) and x_t = f(a_t, v_t, x_{t-1}, p), the loops are

    forward  ->  a_t, x_t
    tangent  ->  nu_t  = ga_t + W r' m_t           mu_t    = g_t + f_x m_t + f_a nu_t        m_t = link_t mu_{t-1}
    adjoint  <-  del_t = sa_t + f_a' lam_t         lam_t-1 = s_t-1 + link_t (f_x' lam_t + r' W' del_t)

tangent and adjoint are transposes: <lam, g> + <del, ga> = <s, mu> + <sa, nu>. Each is linear in its sources; by
everything else its derivative is the bend, a pointwise term, so

    d forward = adjoint (reverse) or tangent (forward),   d adjoint = tangent + bend,   d tangent = adjoint + bend

and no derivative of any order needs a fourth loop. docs/derivation.md has the algebra.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn.functional import pad

from ..cells import Cell
from ..errors import NumericalError, Unsupported
from .checks import Doubt, ask, is_deferred
from .chunks import pieces, product, total
from .memory import empty
from .pointwise import Pointwise, asked, nested, no_vmap, quick
from .rows import ROOM, Link, Rows, scale


class Tape(NamedTuple):
    """What a forward sweep leaves behind: where slopes and bends are taken."""

    a: Tensor  # [N, g d]; without values where the engine found that no derivative reads it
    v: Tensor | None  # [N, side d]
    x: Tensor  # [B + N, s d]
    p: Tensor | None  # [parameters d]
    q: Tensor | None  # [N, kept d]: the values of cell.kept, if the engine keeps them

    def wanted(self, need: Sequence[bool]) -> tuple[str, ...]:
        """Which of a, v, x, p are there and need a gradient."""
        return tuple(n for n, y, wanted in zip("avxp", self, need, strict=False) if y is not None and wanted)


class Engine(Protocol):
    """Three loops over flat arrays; no derivatives, no losses."""

    def refusal(self, device: str) -> str | None: ...  # why it cannot run here, as the end of a sentence

    def forward(
        self, plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def adjoint(
        self,
        plan: Plan,
        tape: Tape,
        W: Tensor | None,
        s: Tensor | None,
        s_last: Tensor | None,
        sa: Tensor | None,
        link: Link | None,
        scaled: bool,
        keep: bool,
        k_last: Tensor | None = None,  # [B]: s_last is given as s_last 2^k_last, beside s or alone (scaled sweeps)
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def tangent(
        self, plan: Plan, tape: Tape, W: Tensor | None, g: Tensor | None, ga: Tensor | None, link: Link | None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Plan:
    """Which cell, over which rows, by which engine.

    checked: what leaves the range of its type is an error that names the step; otherwise inf and NaN go through, as in
    torch, where a GradScaler and the like wait for them.
    deferred: the plan is made while its gradient is recorded. It is noted here because the backward runs in a thread of
    autograd's, which does not know what its caller is doing."""

    cell: Cell
    rows: Rows
    engine: Engine
    doubts: list[Doubt] = field(default_factory=list)
    checked: bool = True
    deferred: bool = field(default_factory=is_deferred)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported(
            "a run of a network, and the costates on it, belong to the process that made them and cannot be copied or "
            "pickled: take their tensors, trajectory.x.detach() or costates.lam.detach()."
        )


def ensure(plan: Plan, y: Tensor, wrong: Callable[[], Exception | None]) -> None:
    """y must be finite: at once on a CPU, and on a GPU when `settle` is called."""
    if not plan.checked:
        return
    if y.is_cuda:
        plan.doubts.append(Doubt(y.detach().sum().isfinite(), wrong))
    elif not math.isfinite(y.sum().item()) and (error := wrong()) is not None:
        raise error


def settle(plan: Plan) -> None:
    """Raise what is wrong, if anything is."""
    if plan.deferred:
        return  # graphs.py asks after each replay
    doubts = plan.doubts[:]
    plan.doubts.clear()
    if doubts and not torch.stack([d.holds for d in doubts]).all().item():
        ask(doubts)


@functools.cache
def next_of(cell: Cell) -> Pointwise:
    """x_t = f(a, v, x, p)"""
    inputs = (("a", cell.a), ("v", cell.v), ("x", cell.x), ("p", cell.p))
    return Pointwise(inputs, (("x", cell.next),), (cell.next, cell.kept), frozenset({"p"}))


@functools.cache
def read_of(cell: Cell) -> Pointwise:
    """r(x)"""
    return Pointwise((("x", cell.x),), (("r", cell.read),), (), frozenset())


def picked(cell: Cell, x: Tensor) -> Tensor:
    d = x.shape[-1] // len(cell.slots)
    slot = cell.read_slot or 0
    return x if len(cell.slots) == 1 else x[:, slot * d : (slot + 1) * d]


def read(cell: Cell, x: Tensor, rows: Rows | None = None) -> Tensor:
    return picked(cell, x) if cell.read_slot is not None else _of(read_of(cell)((), x, rows=rows)["r"])


def read_push(cell: Cell, x: Tensor, m: Tensor, rows: Rows | None = None) -> Tensor:
    """r'(x) m"""
    if cell.read_slot is not None:
        return picked(cell, m)
    found = read_of(cell).pushed(("x",))((), x, m, rows=rows)["r"]
    return x.new_zeros(len(x), x.shape[1] // len(cell.slots) * len(cell.read)) if found is None else found


def read_pull(cell: Cell, x: Tensor, rbar: Tensor) -> Tensor:
    """r'(x)' rbar"""
    if cell.read_slot is None:
        found = read_of(cell).pulled(("r",), ("x",))((), x, rbar)["x"]
        return torch.zeros_like(x) if found is None else found
    d, after = rbar.shape[1], len(cell.slots) - 1 - cell.read_slot
    return pad(rbar, (cell.read_slot * d, after * d))


def _of(y: Tensor | None) -> Tensor:
    assert y is not None
    return y


def directions(**dots: Tensor | None) -> list[tuple[str, Tensor]]:
    return [(name, dot) for name, dot in dots.items() if dot is not None]


def plus(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that are there; None stands for zero."""
    found = [t for t in terms if t is not None]
    return functools.reduce(torch.add, found) if found else None


def bend(
    plan: Plan, tape: Tape, W: Tensor | None, lam: Tensor, delta: Tensor, m: Tensor, nu: Tensor, wrt: tuple[str, ...],
    rowwise: bool = False,
) -> dict[str, Tensor | None]:  # fmt: skip
    """The gradient of sum_t <lam_t, f_x m_t + f_a nu_t> + <W' delta_t, r' m_t> by the tape: a, v, x (a state array), p.
    rowwise: that by p is not summed over rows."""
    cell, rows = plan.cell, plan.rows
    xprev, y = rows.prev(tape.x), (tape.x[rows.B :], tape.q)
    op = next_of(cell).pushed(("a", "x")).pulled(("x",), wrt)
    op = op.rowwise if rowwise else op
    grads = op(y, tape.a, tape.v, xprev, tape.p, nu, m, lam[rows.B :], rows=rows)
    if "x" in wrt:
        of_x = grads["x"]
        if W is not None and cell.read_slot is None:
            turn = read_of(cell).pushed(("x",)).pulled(("r",), ("x",))
            of_x = plus(of_x, turn((), xprev, m, affine(rows, delta, W.t(), None), rows=rows)["x"])
        grads["x"] = None if of_x is None else rows.prev_back(of_x)
    return grads


@quick
class Forward(Function):
    @staticmethod
    def forward(
        plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x, a, q = plan.engine.forward(plan, base, v, W, x0, p)
        last = plan.rows.last(x).clone()
        check(plan, last, "the state", lambda: x)
        return x, a, last, q

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.plan, _, v, W, _, p = inputs
        x, a, _, q = output
        ctx.set_materialize_grads(False)
        if q is not None:
            ctx.mark_non_differentiable(q)
        ctx.save_for_backward(v, W, p, x, a, q)
        ctx.save_for_forward(v, W, p, x, a, q)

    @staticmethod
    def backward(ctx: Any, gx: Tensor | None, ga: Tensor | None, glast: Tensor | None, _q: Any) -> Any:
        v, W, p, x, a, q = ctx.saved_tensors
        plan, need = ctx.plan, asked(ctx)
        if gx is None and ga is None and glast is None:
            return (None,) * 6
        return None, *back(plan, Tape(a, v, x, p, q), W, gx, glast, ga, need[1:])

    @staticmethod
    @nested
    def jvp(
        ctx: Any,
        _plan: Any,
        dbase: Tensor | None,
        dv: Tensor | None,
        dW: Tensor | None,
        dx0: Tensor | None,
        dp: Tensor | None,
    ) -> Any:
        v, W, p, x, a, q = ctx.saved_tensors
        plan, rows = ctx.plan, ctx.plan.rows
        mu, nu = push(plan, Tape(a, v, x, p, q), W, dbase, dv, dW, dx0, dp)
        return mu, nu, rows.last(mu), None

    vmap = staticmethod(lambda *_: _raise(no_vmap()))


def push(
    plan: Plan, tape: Tape, W: Tensor | None, dbase: Tensor | None, dv: Tensor | None = None, dW: Tensor | None = None,
    dx0: Tensor | None = None, dp: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tangents (mu, nu) of a forward sweep along a change of what went into it."""
    rows, (a, v, x, p, q) = plan.rows, tape
    xprev, along = rows.prev(x), directions(v=dv, p=dp)
    g = None
    if along:
        op = next_of(plan.cell).pushed(tuple(n for n, _ in along))
        g = op((x[rows.B :], q), a, v, xprev, p, *(t for _, t in along))["x"]
        g = None if g is None else pad(g, (0, 0, rows.B, 0))
    g = plus(g, None if dx0 is None else pad(dx0, (0, 0, 0, rows.N)))
    ga = plus(dbase, None if dW is None else read(plan.cell, xprev) @ dW.T)
    return tangent(plan, tape, W, g, ga)


def back(
    plan: Plan, tape: Tape, W: Tensor | None, gx: Tensor | None, glast: Tensor | None, ga: Tensor | None,
    need: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradient of a forward sweep by (base, v, W, x0, p), of those that need one."""
    rows, (a, v, x, p, q) = plan.rows, tape
    wrt = tuple(n for n, t, i in (("v", v, 1), ("p", p, 4)) if t is not None and need[i])
    if torch.is_grad_enabled() or wrt or watched():
        lam, delta = adjoint(plan, tape, W, gx, glast, ga)
    else:  # nobody will differentiate this sweep: lam need not be kept
        sweep = functools.partial(plan.engine.adjoint, plan, tape, W, gx, glast, ga, None, False)
        lam, delta, _ = sweep(False)
        check(plan, lam[: rows.B], "the gradient by the state", lambda: sweep(True)[0])
    side: dict[str, Tensor | None] = {}
    if wrt:
        op = next_of(plan.cell).pulled(("x",), wrt)
        side = op((x[rows.B :], q), a, v, rows.prev(x), p, lam[rows.B :], rows=rows)
    gW = product(rows, delta, read(plan.cell, rows.prev(x), rows)) if W is not None and need[2] else None
    settle(plan)
    return delta, side.get("v"), gW, lam[: rows.B] if need[3] else None, side.get("p")


@quick
class Adjoint(Function):
    """scaled: the sweep chooses exponents k and returns mantissas, lam_t = mantissa_t 2^{k_t}."""

    @staticmethod
    def forward(
        plan: Plan, scaled: bool, factor: Tensor | None, declared: Tensor | None,
        s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
        W: Tensor | None, a: Tensor, v: Tensor | None, x: Tensor, p: Tensor | None, q: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        link = None if factor is None else Link(plan.rows, factor)
        lam, delta, k = plan.engine.adjoint(plan, Tape(a, v, x, p, q), W, s, s_last, sa, link, scaled, True)
        check(plan, lam[: plan.rows.B], "the costate" if scaled else "the gradient by the state", lambda: lam)
        return lam, delta, k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.plan, ctx.scaled, factor, declared, s, s_last, sa, W, a, v, x, p, q = inputs
        lam, delta, k = output
        ctx.has = (s is not None, s_last is not None, sa is not None)
        ctx.set_materialize_grads(False)
        if k is not None:
            ctx.mark_non_differentiable(k)
        ctx.save_for_backward(factor, declared, W, a, v, x, p, q, lam, delta, k)
        ctx.save_for_forward(factor, declared, W, a, v, x, p, q, lam, delta, k)

    @staticmethod
    def saved(ctx: Any) -> tuple[Link | None, Tensor | None, Tensor | None, Tape, Tensor, Tensor, Tensor | None]:
        factor, declared, W, a, v, x, p, q, lam, delta, k = ctx.saved_tensors
        link = Link(ctx.plan.rows, factor) if factor is not None else None
        if k is not None:
            between = Link.between(ctx.plan.rows, k, lam.dtype)
            link = between if link is None else Link(ctx.plan.rows, between.factor * link.factor)
        return link, declared, W, Tape(a, v, x, p, q), lam, delta, k

    @staticmethod
    def backward(ctx: Any, glam: Tensor | None, gdelta: Tensor | None, _k: Any) -> Any:
        link, declared, W, tape, lam, delta, k = Adjoint.saved(ctx)
        plan, rows, need = ctx.plan, ctx.plan.rows, asked(ctx)
        if glam is None and gdelta is None:
            return (None,) * 13
        try:
            mu, nu = tangent(plan, tape, W, glam, gdelta, link)
        except NumericalError as error:
            raise blamed(rows, glam, error) from None
        m = linked(rows, mu, link)
        wrt = tape.wanted(need[8:])
        bends = bend(plan, tape, W, lam, delta, m, nu, wrt) if wrt else {}
        gW = (
            product(rows, delta, read_push(plan.cell, rows.prev(tape.x), m, rows))
            if W is not None and need[7]
            else None
        )
        has_s, has_last, has_a = ctx.has
        gs = unscaled(plan, mu, k, declared) if has_s and need[4] else None
        glast = None
        if has_last and need[5]:
            glast = unscaled(plan, rows.last(mu), None if k is None else rows.last(k), None)
        return (
            None,
            None,
            None,
            None,
            gs,
            glast,
            nu if has_a and need[6] else None,
            gW,
            bends.get("a"),
            bends.get("v"),
            bends.get("x"),
            bends.get("p"),
            None,
        )

    @staticmethod
    @nested
    def jvp(ctx: Any, _plan: Any, _scaled: Any, _factor: Any, _declared: Any, *dots: Tensor | None) -> Any:
        link, _, W, tape, lam, delta, k = Adjoint.saved(ctx)
        ds, dlast, dsa, dW, da, dv, dx, dp, _ = dots
        plan, cell, rows = ctx.plan, ctx.plan.cell, ctx.plan.rows
        xprev = rows.prev(tape.x)
        along = directions(a=da, v=dv, x=None if dx is None else rows.prev(dx), p=dp)
        into_a, into_x = None, None
        if along:
            op = next_of(cell).pulled(("x",), ("a", "x")).pushed(tuple(n for n, _ in along))
            turned = op(
                (tape.x[rows.B :], tape.q), tape.a, tape.v, xprev, tape.p, lam[rows.B :], *(t for _, t in along)
            )
            into_a, into_x = turned["a"], turned["x"]
        if W is not None and dW is not None:
            into_x = plus(into_x, read_pull(cell, xprev, delta @ dW))
        if W is not None and dx is not None and cell.read_slot is None:
            op = read_of(cell).pulled(("r",), ("x",)).pushed(("x",))
            into_x = plus(into_x, op((), xprev, delta @ W, rows.prev(dx))["x"])
        if into_x is not None:
            into_x = rows.prev_back(into_x if link is None else into_x * link.factor)
        if k is not None:
            ds = None if ds is None else scale(ds, -k[:, None])
            dlast = None if dlast is None else scale(dlast, -rows.last(k[:, None]))
        dlam, ddelta = adjoint(plan, tape, W, plus(ds, into_x), dlast, plus(dsa, into_a), link)
        return dlam, ddelta, None

    vmap = staticmethod(lambda *_: _raise(no_vmap()))


@quick
class Tangent(Function):
    @staticmethod
    def forward(
        plan: Plan, factor: Tensor | None, g: Tensor | None, ga: Tensor | None,
        W: Tensor | None, a: Tensor, v: Tensor | None, x: Tensor, p: Tensor | None, q: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        link = None if factor is None else Link(plan.rows, factor)
        mu, nu = plan.engine.tangent(plan, Tape(a, v, x, p, q), W, g, ga, link)
        check(plan, plan.rows.last(mu), "the tangent", lambda: mu)
        return mu, nu

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.plan, factor, g, ga, W, a, v, x, p, q = inputs
        ctx.has = (g is not None, ga is not None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(factor, W, a, v, x, p, q, *output)
        ctx.save_for_forward(factor, W, a, v, x, p, q, *output)

    @staticmethod
    def saved(ctx: Any) -> tuple[Link | None, Tensor | None, Tape, Tensor, Tensor]:
        factor, W, a, v, x, p, q, mu, nu = ctx.saved_tensors
        return None if factor is None else Link(ctx.plan.rows, factor), W, Tape(a, v, x, p, q), mu, nu

    @staticmethod
    def backward(ctx: Any, gmu: Tensor | None, gnu: Tensor | None) -> Any:
        link, W, tape, mu, nu = Tangent.saved(ctx)
        plan, rows, need = ctx.plan, ctx.plan.rows, asked(ctx)
        if gmu is None and gnu is None:
            return (None,) * 10
        lam, delta = adjoint(plan, tape, W, gmu, None, gnu, link)
        m = linked(rows, mu, link)
        wrt = tape.wanted(need[5:])
        bends = bend(plan, tape, W, lam, delta, m, nu, wrt) if wrt else {}
        gW = (
            product(rows, delta, read_push(plan.cell, rows.prev(tape.x), m, rows))
            if W is not None and need[4]
            else None
        )
        return (
            None,
            None,
            lam if ctx.has[0] else None,
            delta if ctx.has[1] else None,
            gW,
            bends.get("a"),
            bends.get("v"),
            bends.get("x"),
            bends.get("p"),
            None,
        )

    @staticmethod
    @nested
    def jvp(ctx: Any, _plan: Any, _factor: Any, *dots: Tensor | None) -> Any:
        link, W, tape, mu, nu = Tangent.saved(ctx)
        dg, dga, dW, da, dv, dx, dp, _ = dots
        plan, cell, rows = ctx.plan, ctx.plan.cell, ctx.plan.rows
        xprev, m = rows.prev(tape.x), linked(rows, mu, link)
        along = directions(a=da, v=dv, x=None if dx is None else rows.prev(dx), p=dp)
        if along:
            op = next_of(cell).pushed(("a", "x")).pushed(tuple(n for n, _ in along))
            turned = op((tape.x[rows.B :], tape.q), tape.a, tape.v, xprev, tape.p, nu, m, *(t for _, t in along))["x"]
            dg = plus(dg, None if turned is None else pad(turned, (0, 0, rows.B, 0)))
        if dW is not None:
            dga = plus(dga, read_push(cell, xprev, m) @ dW.T)
        if W is not None and dx is not None and cell.read_slot is None:
            op = read_of(cell).pushed(("x",)).pushed(("x",))
            turned = op((), xprev, m, rows.prev(dx))["r"]
            dga = plus(dga, None if turned is None else turned @ W.T)
        return tangent(plan, tape, W, dg, dga, link)

    vmap = staticmethod(lambda *_: _raise(no_vmap()))


@quick
class Affine(Function):
    """y_i M' + b for step rows, by chunks."""

    @staticmethod
    def forward(rows: Rows, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
        out = empty((len(y), len(M)), y)
        Mt = (
            M.contiguous() if 8 * len(M) <= M.shape[1] else M
        ).t()  # a BLAS is slow at few columns that lie side by side
        for part, into in pieces(rows, y, out):
            part = aligned(part)
            torch.mm(part, Mt, out=into) if b is None else torch.addmm(b, part, Mt, out=into)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows, y, M, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, M)
        ctx.save_for_forward(y, M)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        (y, M), rows, need = ctx.saved_tensors, ctx.rows, asked(ctx)
        if g is None:
            return (None,) * 4
        gy = affine(rows, g, M.t(), None) if need[1] else None
        return None, gy, product(rows, g, y) if need[2] else None, total(rows, g) if need[3] else None

    @staticmethod
    @nested
    def jvp(ctx: Any, _rows: Any, dy: Tensor | None, dM: Tensor | None, db: Tensor | None) -> Any:
        y, M = ctx.saved_tensors
        out = plus(None if dy is None else affine(ctx.rows, dy, M, None), None if dM is None else y @ dM.t(), db)
        return None if out is None else out.expand(len(y), len(M))

    vmap = staticmethod(lambda *_: _raise(no_vmap()))


class Block(NamedTuple):
    """The N rows of an array from `row` on, in the columns `left` .. `left + width`."""

    array: int
    row: int
    left: int
    width: int

    def of(self, arrays: Sequence[Tensor], N: int) -> Tensor:
        return arrays[self.array][self.row : self.row + N, self.left : self.left + self.width]


@dataclass(frozen=True, eq=False)
class Moves:
    """Blocks of some arrays put into others, which are zero elsewhere; turned: with the time of each sample reversed.
    No block is put into two places, so that the transpose puts them back."""

    rows: Rows
    sources: tuple[tuple[int, ...], ...]  # shapes
    targets: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[Block, Block, bool], ...]

    @property
    def back(self) -> Moves:
        return Moves(self.rows, self.targets, self.sources, tuple((to, at, turned) for at, to, turned in self.blocks))


@quick
class Moved(Function):
    """Blocks put into other places in one pass, where torch's slices, flips and concatenations take several."""

    @staticmethod
    def forward(moves: Moves, *arrays: Tensor | None) -> tuple[Tensor, ...]:
        rows, found = moves.rows, [y is not None for y in arrays]
        like = _of(next(y for y in arrays if y is not None))
        targets = tuple(empty(shape, like) for shape in moves.targets)
        for i, target in enumerate(targets):
            _clear(target, [to for at, to, _ in moves.blocks if to.array == i and found[at.array]], rows.N)
        for at, to, turned in moves.blocks:
            if found[at.array]:
                part, into = at.of(arrays, rows.N), to.of(targets, rows.N)  # type: ignore[arg-type]
                rows.turned_into(into, part) if turned else into.copy_(part)
        return targets

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.moves = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Any:
        moves = ctx.moves
        return None, *((None,) * len(moves.sources) if all(y is None for y in g) else Moved.apply(moves.back, *g))

    @staticmethod
    @nested
    def jvp(ctx: Any, _moves: Any, *dots: Tensor | None) -> Any:
        return Moved.apply(ctx.moves, *dots)

    vmap = staticmethod(lambda *_: _raise(no_vmap()))


def _clear(target: Tensor, blocks: Sequence[Block], N: int) -> None:
    """Zeros wherever there is no block; those of an array begin in the same row and come from left to right."""
    row, right = blocks[0].row if blocks else len(target), 0
    between = target[row : row + N]
    for block in blocks:
        between[:, right : block.left].zero_()
        right = block.left + block.width
    for rest in (target[:row], between[:, right:], target[row + N :]):
        rest.zero_()


def turned(rows: Rows, y: Tensor) -> Tensor:
    """A step array with the time of each sample reversed; its own inverse."""
    shape, whole = tuple(y.shape), Block(0, 0, 0, y.shape[1])
    return Moved.apply(Moves(rows, (shape,), (shape,), ((whole, whole, True),)), y)[0]


def side_by_side(rows: Rows, ys: Sequence[Tensor], d: int) -> Tensor:
    """The first d columns of step arrays, or of the states after the first, [N, D d]; the second with time reversed."""
    blocks = tuple((Block(i, len(y) - rows.N, 0, d), Block(0, 0, i * d, d), i == 1) for i, y in enumerate(ys))
    return Moved.apply(Moves(rows, tuple(tuple(y.shape) for y in ys), ((rows.N, d * len(ys)),), blocks), *ys)[0]


def parted(rows: Rows, cell: Cell, v: Tensor) -> tuple[Tensor, Tensor]:
    """(base, side) of v: a gate that the cell reads apart from z has nothing in base."""
    d, blocks, i = v.shape[1] // len(cell.gates), [], 0
    for apart, run in itertools.groupby(cell.gates, lambda g: g in cell.side):
        gates = list(run)
        at = Block(0, 0, i * d, len(gates) * d)
        blocks.append((at, at._replace(array=1, left=cell.side.index(gates[0]) * d) if apart else at, False))
        i += len(gates)
    return Moved.apply(Moves(rows, (tuple(v.shape),), (tuple(v.shape), (len(v), d * len(cell.side))), tuple(blocks)), v)


def affine(rows: Rows | None, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
    """y_i M' + b; rows: those of a step array, None for any others."""
    return torch.nn.functional.linear(y, M, b) if rows is None else Affine.apply(rows, y, M, b)


def aligned(y: Tensor) -> Tensor:
    """A BLAS may add up in another order where an array does not begin at a multiple of 64 bytes."""
    return y if y.data_ptr() % 64 == 0 else y.clone(memory_format=torch.contiguous_format)


def forward(
    plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tape, Tensor]:
    """-> (tape, x of each sample at its own last step)"""
    x, a, last, q = Forward.apply(plan, base, v, W, x0, p)
    if not torch.is_grad_enabled():
        settle(plan)
    return Tape(a, v, x, p, q), last


def adjoint(
    plan: Plan,
    tape: Tape,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (lam [B + N, n], delta [N, g d])"""
    lam, delta, _ = Adjoint.apply(plan, False, None if link is None else link.factor, None, s, s_last, sa, W, *tape)
    return lam, delta


def costate(
    plan: Plan,
    tape: Tape,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    declared: Tensor | None,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale-free adjoint -> (mantissa [B + N, n], delta in the same units, exponent [B + N]).

    declared [B + N]: the state rows where the loss reads the state; at the others the source is zero, and where costates
    are far below one its derivative is taken for zero too.
    unit [B + N]: sources are given as s 2^unit, and s_last as s_last 2^(unit of the last state).
    """
    if unit is None:
        return Adjoint.apply(plan, True, None, declared, s, s_last, None, W, *tape)
    factor = Link.between(plan.rows, unit, tape.x.dtype).factor  # a sweep in these units is one with links between them
    mantissa, delta, k = Adjoint.apply(plan, True, factor, declared, s, s_last, None, W, *tape)
    return mantissa, delta, k + unit


def tangent(
    plan: Plan, tape: Tape, W: Tensor | None, g: Tensor | None, ga: Tensor | None, link: Link | None = None
) -> tuple[Tensor, Tensor]:
    """-> (mu [B + N, n], nu [N, g d])"""
    return Tangent.apply(plan, None if link is None else link.factor, g, ga, W, *tape)


def linked(rows: Rows, mu: Tensor, link: Link | None) -> Tensor:
    """m_t = link_t mu_{t-1}"""
    if link is None:
        return rows.prev(mu)
    if torch.is_grad_enabled() or watched():
        return rows.prev(mu) * link.factor
    return torch.mul(rows.prev(mu), link.factor, out=empty((rows.N, mu.shape[1]), mu))


def unscaled(plan: Plan, mu: Tensor, k: Tensor | None, declared: Tensor | None) -> Tensor:
    """mu at its true scale, where a loss is declared: the change of the source that the penalty asks for."""
    if k is None:
        return mu
    rows, true = plan.rows, scale(mu, -k[:, None])
    if declared is not None:
        true = torch.where((declared | (k > -ROOM[mu.dtype]))[:, None], true, 0)

    def wrong() -> NumericalError | None:
        rows_bad = (~torch.isfinite(true).all(1)).nonzero()
        if not len(rows_bad):
            return None
        bad = int(rows_bad[0, 0])
        t = _time(rows, bad) if len(mu) == rows.B + rows.N else rows.begin + int(rows.lengths[bad])
        return NumericalError(
            f"the second adjoint is outside the range of {str(mu.dtype)[6:]} at t = {t}: the penalty's derivative by the loss's "
            f"gradient there is 2^{-int(k[bad])} times a number of order one. Use float64, a shorter sequence or a smaller gain; "
            "if the loss gives that step no weight, say so with mask=."
        )

    ensure(plan, true, wrong)
    return true


def check(plan: Plan, end: Tensor, what: str, states: Callable[[], Tensor]) -> None:
    """Whatever leaves the range of its type on the way is not finite at the end of the sweep."""

    def wrong() -> NumericalError | None:
        if torch.isfinite(end).all():
            return None
        bad = (~torch.isfinite(states()).all(1)).nonzero()[:, 0].tolist()
        times = [_time(plan.rows, row) for row in bad]
        t = min(times) if what in ("the state", "the tangent") else max(times)
        return NumericalError(
            f"{what} is outside the range of {str(end.dtype)[6:]} at t = {t} of {plan.rows.end}. "
            "Use float64, a shorter sequence, or weights of a smaller gain (spectral radius)."
        )

    ensure(plan, end, wrong)


def blamed(rows: Rows, glam: Tensor | None, error: NumericalError) -> NumericalError:
    """The error of a tangent sweep, or that of the penalty it came from."""
    bad = [] if glam is None else (~torch.isfinite(glam).all(1)).nonzero()[:, 0].tolist()
    if not bad:
        return error
    return NumericalError(
        f"the penalty's derivative by the costate is not finite at t = {_time(rows, bad[0])}: "
        "look for a logarithm, a root or a quotient of something that is zero there."
    )


def watched() -> bool:
    """Is forward-mode differentiation or a transform of torch.func under way?"""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _time(rows: Rows, row: int) -> int:
    return rows.begin + (0 if row < rows.B else int(rows.time[row - rows.B]))


def _raise(error: Exception) -> None:
    raise error
