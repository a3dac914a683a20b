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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from ..cells.cell import Cell
from .affine import _raise
from .memory import empty
from .pointwise import nested, no_vmap, quick
from .rows import Rows
from .slopes import _of


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
