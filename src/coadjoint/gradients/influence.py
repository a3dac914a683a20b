"""Influence: S_t = dx_t/dtheta, carried forward in time, for real-time recurrent learning.

    a_t = W r(x_{t-1}) + R u_t + b,     x_t = f(a_t, v_t, x_{t-1}, p)
    S_t = J_t S_{t-1} + f_theta,        J_t = f_x + f_a W r'

f is elementwise over units, so f_a, f_v, f_x and f_p are diagonals that the formula's own derivatives give, and f_theta is
not zero where a parameter belongs to the unit itself: it is added onto a diagonal. What is left is one product J S.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cells.cell import Cell
from ..cells.formula import ONE, ZERO, Node, is_const, pull, torch_operation, walk
from ..networks.network import Network
from ..networks.recurrence import EffectiveWeights


class OperationList:
    """Expressions as a list of torch operations, in order: `run(values of the inputs)` -> values of the outputs."""

    def __init__(self, outputs: Sequence[Node], inputs: Sequence[Node]) -> None:
        given = frozenset(inputs)
        order = [*inputs, *(n for n in walk(outputs, given) if n not in given)]
        place = {n: i for i, n in enumerate(order)}
        self.fixed = [n.value if is_const(n) else None for n in order[len(inputs) :]]
        self.code = [
            (i, torch_operation(n), [place[a] for a in n.args])
            for i, n in enumerate(order)
            if i >= len(inputs) and not is_const(n)
        ]
        self.outputs = [place[o] for o in outputs]

    def run(self, values: Sequence[Tensor]) -> list[Any]:
        env: list[Any] = [*values, *self.fixed]
        for i, f, at in self.code:
            env[i] = f(env[at[0]], env[at[1]]) if len(at) == 2 else f(env[at[0]])
        return [env[i] for i in self.outputs]


class CellSlopes:
    """A cell's step and its diagonals: of each slot of x_t by the entries of a, v, x and p; of r by the slots of x."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        groups = (cell.a, cell.v, cell.x, cell.p)
        self.wrt = tuple(itertools.chain(*groups))
        blocks = [[n for out in cell.next for n in pull([out], [ONE], wrt)] for wrt in groups]
        blocks = [block if any(n is not ZERO for n in block) else [] for block in blocks]
        self.step = OperationList((*cell.next, *itertools.chain(*blocks)), self.wrt)
        self.sizes = [len(cell.next), *map(len, blocks)]
        turn = (
            []
            if cell.read_slot is not None
            else [n for r in cell.read for n in pull([r], [ONE], cell.x)]
        )
        self.read = OperationList((*cell.read, *turn), cell.x)

    def at(
        self, net: Network, u: Tensor, x: Tensor, taken: EffectiveWeights
    ) -> tuple[Tensor, list[Tensor | None]]:
        """x_t [B, s d]; r(x_{t-1}) [B, k d] and its slopes [B, k, s, d] where W reads more than a slot; the slopes of x_t by
        a, v, x and p, [B, s, entries, d] or None where all are zero."""
        cell, B, s, d = self.cell, x.shape[0], len(self.cell.slots), net.hidden
        slots = x.view(B, s, d).unbind(1)
        (base, side), W, r, turn = net.drive(u, taken.input_weights), taken.W, None, None
        assert base is not None
        if W is not None:
            found = self.read.run(slots)
            r, turn = (
                packed(part, x, d) for part in (found[: len(cell.read)], found[len(cell.read) :])
            )
            assert r is not None
            turn = None if turn is None else turn.view(B, len(cell.read), s, d)
            base = torch.addmm(base, r, W.t())
        sides = () if side is None else side.view(B, len(cell.v), d).unbind(1)
        p = [net.p[name].expand(B, d) for name in cell.parameters]
        found = self.step.run((*base.view(B, len(cell.a), d).unbind(1), *sides, *slots, *p))
        ends = itertools.pairwise(itertools.accumulate(self.sizes, initial=0))
        new, *blocks = (packed(found[i:j], x, d) for i, j in ends)
        assert new is not None
        return new, [r, turn, *(None if y is None else y.view(B, s, -1, d) for y in blocks)]


def packed(entries: Sequence[Any], like: Tensor, d: int) -> Tensor | None:
    """[B, d] arrays and numbers beside each other, [B, entries d]; None for no entries."""
    size = (like.shape[0], d)
    whole = [
        (e if isinstance(e, Tensor) else like.new_full((1, 1), e)).expand(size) for e in entries
    ]
    return torch.cat(whole, 1) if len(whole) > 1 else whole[0] if whole else None


@functools.cache
def cell_slopes(cell: Cell) -> CellSlopes:
    return CellSlopes(cell)


def made(net: Network) -> dict[str, Tensor]:
    """W, R and b as the formula takes them, of what is trained."""
    taken = net.effective_weights()
    found = {"W": taken.W, "R": taken.R, "b": taken.b}
    return {name: y for name, y in found.items() if y is not None}


class _Advance(nn.Module):
    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, u: Tensor, x: Tensor) -> Tensor:
        return self.net.advance(u[None], x[None])[0]


class Influence:
    """S [B, n, P] of the parameters by name, P their entries one after the other; `of` are views of S, [B, n, ...].

    There are two arrays, S_{t-1} and S_t in turn: nothing is allocated while time runs. Where W, R or b are functions of what
    is trained (a structure of W, the cell's own `weights`), S is that of W, R and b, and the gradient by them is pulled back
    through these functions, at the weights of its step."""

    def __init__(self, net: Network, names: Sequence[str], batch: int) -> None:
        self.net, self.trained = net, list(names)
        self.formula = None if net.cell is None else cell_slopes(net.cell)
        self.direct = net.cell is None or (
            net.cell.weights is None and not parametrize.is_parametrized(net)
        )
        arrays: dict[str, Tensor] = {name: net.get_parameter(name) for name in names}
        if not self.direct:
            arrays = made(net) | {
                name: p for name, p in arrays.items() if name == "x0" or name.startswith("p.")
            }
        self.names, self.shapes = list(arrays), [tuple(y.shape) for y in arrays.values()]
        self.sizes = [y.numel() for y in arrays.values()]
        self.arrays = [net.V.new_zeros(batch, net.n, sum(self.sizes)) for _ in range(2)]
        self.views = [self.seen(S) for S in self.arrays]
        self.diagonals = [self.own(of) for of in self.views]
        self.module, self.one = _Advance(net), self.S.new_ones(())
        self.mask = None
        if (
            net.mask is not None and net.cell is not None and self.direct
        ):  # [gates, inputs, d], as W's diagonal
            self.mask = net.mask.view(len(net.cell.a), net.hidden, -1).transpose(1, 2)

    @property
    def S(self) -> Tensor:
        return self.arrays[0]

    @property
    def of(self) -> dict[str, Tensor]:
        return self.views[0]

    def seen(self, S: Tensor) -> dict[str, Tensor]:
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return {
            name: S[:, :, a:b].unflatten(2, shape)
            for name, shape, (a, b) in zip(
                self.names, self.shapes, itertools.pairwise(ends), strict=True
            )
        }

    def begin(self, rows: Tensor, x0: bool) -> None:
        """x_0 depends on nothing, or on the learned x0 alone."""
        self.S[rows] = 0
        if x0 and "x0" in self.of:
            self.of["x0"][rows] = torch.eye(self.net.n, dtype=self.S.dtype, device=self.S.device)

    @torch.no_grad()
    def advance(self, u: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
        """S_t from S_{t-1}, for all streams or for some, and x_t from x_{t-1}."""
        if rows is None:
            x, J, into = self.step(u, x)
            torch.bmm(J, self.S, out=self.arrays[1])
            self.arrays.reverse()
            self.views.reverse()
            self.diagonals.reverse()
            self.add(self.diagonals[0], into)
            return x
        found, J, into = self.step(u[rows], x[rows])
        S = torch.bmm(J, self.S[rows])
        self.add(self.own(self.seen(S)), into)
        self.S[rows] = S
        return x.index_copy(0, rows, found)

    def step(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """x_t, J_t [B, n, n], and f_theta for each parameter: two factors, of the shape of its diagonal."""
        net, law = self.net, self.formula
        if law is None:
            return self.differentiated(u, x)
        B, s, d, taken = x.shape[0], len(law.cell.slots), net.hidden, net.effective_weights()
        W = taken.W
        new, (r, turn, f_a, f_v, f_x, f_p) = law.at(net, u, x, taken)
        J = x.new_zeros(B, s, d, s, d) if W is None or f_a is None else self.product(f_a, W, turn)
        if f_x is not None:
            J.diagonal(0, 2, 4).add_(f_x)
        into: dict[str, tuple[Tensor, Tensor]] = {}
        if r is not None and f_a is not None:
            right = r[:, None, None, :, None]
            into["W"] = (f_a[:, :, :, None], right if self.mask is None else right * self.mask)
        enters = self.entering(f_a, f_v, B)
        into["R"], into["b"] = (enters, u[:, None, None, :, None]), (enters, self.one)
        for j, name in enumerate(net.p):
            if f_p is not None:
                into[f"p.{name}"] = f_p[:, :, j, None, None], self.one
        return new, J.reshape(B, s * d, s * d), into

    def entering(self, f_a: Tensor | None, f_v: Tensor | None, B: int) -> Tensor:
        """The slopes by the rows of R and b, [B, slots, rows, 1, d]."""
        net, cell = self.net, self.formula.cell  # type: ignore[union-attr]
        s, d = len(cell.slots), net.hidden
        flat = lambda f, n: self.S.new_zeros(B * s, n * d) if f is None else f.reshape(B * s, n * d)
        side = flat(f_v, len(cell.v)) if cell.v else None
        return net.input_gradient_rows(flat(f_a, len(cell.a)), side).view(
            B, s, len(cell.driven_entries), 1, d
        )

    def product(self, f_a: Tensor, W: Tensor, turn: Tensor | None) -> Tensor:
        """f_a W r', [B, slots, d, slots, d]."""
        cell = self.formula.cell  # type: ignore[union-attr]
        B, s, g, d = f_a.shape
        each = W.view(g, d, -1)
        fW = f_a.view(B, s, d, 1) * each if g == 1 else torch.einsum("bsgi,gij->bsij", f_a, each)
        if turn is not None:
            return torch.einsum("bsikj,bkqj->bsiqj", fW.view(B, s, d, -1, d), turn)
        slot = cell.read_slot or 0
        wide = fW if s == 1 else nn.functional.pad(fW, (slot * d, (s - 1 - slot) * d))
        return wide.view(B, s, d, s, d)

    def own(self, of: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where a parameter of a unit meets that unit: [B, slots, rows, inputs, d] views of S."""
        if self.formula is None:
            return of
        s, d = self.net.slots, self.net.hidden
        rows = {name: shape[0] // d for name, shape in zip(self.names, self.shapes, strict=True)}
        cut = lambda S, m: S.view(S.shape[0], s, d, m, d, -1).diagonal(0, 2, 4)
        return {name: cut(S, rows[name]) for name, S in of.items() if name != "x0"}

    def add(self, where: dict[str, Tensor], into: dict[str, tuple[Tensor, Tensor]]) -> None:
        """S += f_theta."""
        for name, S in where.items():
            if name in into:
                S.addcmul_(*into[name])

    def differentiated(
        self, u: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The same of any step function, by torch."""
        parameters = {f"net.{name}": self.net.get_parameter(name).detach() for name in self.names}

        def step(theta: dict[str, Tensor], x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            out = torch.func.functional_call(self.module, theta, (u, x))
            return out, out

        both = torch.func.jacrev(step, argnums=(0, 1), has_aux=True)
        (of_theta, J), new = torch.func.vmap(both, in_dims=(None, 0, 0))(parameters, x, u)
        return new.detach(), J, {name: (of_theta[f"net.{name}"], self.one) for name in self.names}

    def pull(self, lam: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        """lam' S summed over the streams, by parameter: the gradient of a loss whose costate is lam [B, n]."""
        S = self.S if rows is None else self.S[rows]
        flat = lam.reshape(-1) @ S.flatten(0, 1)
        parts = flat.split(self.sizes) if self.sizes else ()
        found = {
            name: g.view(shape)
            for name, g, shape in zip(self.names, parts, self.shapes, strict=True)
        }
        return found if self.direct else self.back(found)

    def back(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient by what is trained, of that by W, R and b."""
        parameters = {name: self.net.get_parameter(name) for name in self.trained}
        with torch.enable_grad():
            those = {name: y for name, y in made(self.net).items() if y.requires_grad}
            out = {name: torch.zeros_like(p) for name, p in parameters.items()}
            if those:
                bars = [found[name] for name in those]
                grads = torch.autograd.grad(
                    list(those.values()), list(parameters.values()), bars, allow_unused=True
                )
                out |= {name: g for name, g in zip(parameters, grads, strict=True) if g is not None}
        return {
            name: g + found[name] if name == "x0" or name.startswith("p.") else g
            for name, g in out.items()
        }
