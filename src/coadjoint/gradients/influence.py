"""Influence: S_t = dx_t/dtheta, carried forward in time, for real-time recurrent learning.

    a_t = W r(x_{t-1}) + R u_t + b,     x_t = f(a_t, v_t, x_{t-1}, p)
    S_t = J_t S_{t-1} + f_theta,        J_t = f_x + f_a W r'

f acts on each unit by itself, so f_a, f_v, f_x and f_p are diagonal, and their entries are formulas
derived from the cell's. f_theta is zero unless a parameter belongs to the unit, so it is added onto
a diagonal of S. What remains is one matrix product J S for each step.

Letters of the shapes: B streams, n = s d state entries of s slots and d units, g gates, k entries
of r, P parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cells.cell import Cell
from ..cells.formula import ONE, ZERO, Node, is_const, pull, torch_operation, walk
from ..networks.effective_weights import EffectiveWeights
from ..networks.network import Network

Value = Tensor | float
# f_theta by parameter name: two factors that broadcast to the diagonal of S they are added to.
DirectTerms = dict[str, tuple[Tensor, Tensor]]


class Operation(NamedTuple):
    """values[place] = function(values[i] for i in arguments)."""

    place: int
    function: Callable[..., Value]
    arguments: list[int]


class OperationList:
    """Expressions as torch operations in the order in which they are computed.

    All values lie in one list: the inputs, then the constants and the results of operations.
    """

    def __init__(self, outputs: Sequence[Node], inputs: Sequence[Node]) -> None:
        """From the expressions to be computed, and the symbols whose values will be given."""
        known = frozenset(inputs)
        computed = [node for node in walk(outputs, known) if node not in known]
        place = {node: i for i, node in enumerate([*inputs, *computed])}
        self.constants: list[float] = []  # with NaN in the place of each operation's result
        self.operations: list[Operation] = []
        for node in computed:
            if is_const(node):
                self.constants.append(node.value)
            else:
                self.constants.append(math.nan)
                arguments = [place[argument] for argument in node.args]
                self.operations.append(Operation(place[node], torch_operation(node), arguments))
        self.outputs = [place[node] for node in outputs]

    def run(self, inputs: Sequence[Tensor]) -> list[Value]:
        """Return the values of the outputs; a constant output is a number."""
        values: list[Value] = [*inputs, *self.constants]
        # Every operation has one or two arguments.
        for place, function, arguments in self.operations:
            if len(arguments) == 2:
                values[place] = function(values[arguments[0]], values[arguments[1]])
            else:
                values[place] = function(values[arguments[0]])
        return [values[i] for i in self.outputs]


class StepSlopes(NamedTuple):
    """The derivatives of one step, for s slots, d units, g gates and k entries of r.

    None where all entries are zero.
    """

    r: Tensor | None  # r(x_{t-1}) [B, k d]
    r_x: Tensor | None  # r' [B, k, s, d]; None where r is one slot of x
    f_a: Tensor | None  # [B, s, g, d]
    f_v: Tensor | None  # [B, s, entries of v, d]
    f_x: Tensor | None  # [B, s, s, d]
    f_p: Tensor | None  # [B, s, parameters of the cell, d]


class CellSlopes:
    """The step of a cell and its derivatives: of x_t by a, v, x and p, and of r by x."""

    def __init__(self, cell: Cell) -> None:
        """Derive the formulas f_a, f_v, f_x, f_p and r' of a cell."""
        self.cell = cell
        groups = (cell.a, cell.v, cell.x, cell.p)
        blocks: list[list[Node]] = []  # the derivatives by each group; none if all are zero
        for wrt in groups:
            block = derivatives(cell.next, wrt)
            has_slope = any(node is not ZERO for node in block)
            blocks.append(block if has_slope else [])
        self.step = OperationList(
            (*cell.next, *itertools.chain(*blocks)), tuple(itertools.chain(*groups))
        )
        self.sizes = [len(cell.next), *map(len, blocks)]  # of x_t and of each block
        # Where r is one slot of x, its derivative is an identity and needs no formula.
        read_slopes = derivatives(cell.read, cell.x) if cell.read_slot is None else []
        self.read = OperationList((*cell.read, *read_slopes), cell.x)

    def evaluate(
        self, net: Network, u: Tensor, x: Tensor, weights: EffectiveWeights
    ) -> tuple[Tensor, StepSlopes]:
        """Return x_t [B, s d] and the derivatives of the step from x_{t-1} with input u_t.

        Args:
            net: The network, with s slots and d units.
            u: u_t, [B, inputs].
            x: x_{t-1}, [B, s d].
            weights: W, R and b as the formula takes them.
        """
        cell = self.cell
        B = x.shape[0]
        s = len(cell.slots)
        d = net.hidden
        slots = x.view(B, s, d).unbind(1)
        # What the inputs add to the gates, and what the formula reads of them apart, v.
        base, side = net.drive(u, weights.input_weights)
        assert base is not None
        r = None
        r_x = None
        if weights.W is not None:
            values = self.read.run(slots)  # r, then the entries of r'
            k = len(cell.read)
            r = pack_entries(values[:k], x, d)
            assert r is not None
            r_x = pack_entries(values[k:], x, d)
            if r_x is not None:
                r_x = r_x.view(B, k, s, d)
            base = torch.addmm(base, r, weights.W.t())
        gates = base.view(B, len(cell.a), d).unbind(1)
        sides = () if side is None else side.view(B, len(cell.v), d).unbind(1)
        p = [net.p[name].expand(B, d) for name in cell.parameters]
        values = self.step.run((*gates, *sides, *slots, *p))  # x_t, then f_a, f_v, f_x and f_p
        bounds = itertools.pairwise(itertools.accumulate(self.sizes, initial=0))
        x_next, *blocks = (pack_entries(values[i:j], x, d) for i, j in bounds)
        assert x_next is not None
        by_slot = [None if y is None else y.view(B, s, -1, d) for y in blocks]
        return x_next, StepSlopes(r, r_x, *by_slot)


def derivatives(outputs: Iterable[Node], wrt: Sequence[Node]) -> list[Node]:
    """Return formulas of the derivative of each output by each of `wrt`, output by output."""
    return [slope for output in outputs for slope in pull([output], [ONE], wrt)]


def pack_entries(entries: Sequence[Value], like: Tensor, d: int) -> Tensor | None:
    """Return entries side by side, [B, entries d]; None for no entries.

    An entry is an array [B, d], or a number that stands for a constant array. `like` [B, ...] has
    the number of samples, the type and the device.
    """
    if not entries:
        return None
    shape = (like.shape[0], d)
    arrays = [y if isinstance(y, Tensor) else like.new_full((1, 1), y) for y in entries]
    arrays = [y.expand(shape) for y in arrays]
    return arrays[0] if len(arrays) == 1 else torch.cat(arrays, 1)


@functools.cache
def cell_slopes(cell: Cell) -> CellSlopes:
    """Return the derivatives of a cell's step, made once for each cell."""
    return CellSlopes(cell)


def effective_weights(net: Network) -> dict[str, Tensor]:
    """Return W, R and b as the formula takes them, without those that are None."""
    weights = net.effective_weights()
    by_name = {"W": weights.W, "R": weights.R, "b": weights.b}
    return {name: y for name, y in by_name.items() if y is not None}


def is_taken_as_stored(name: str) -> bool:
    """Tell whether the formula takes the parameter `name` as it is stored.

    It does so for x0 and for the cell's own parameters p. W, R and b may be functions of what is
    stored.
    """
    return name == "x0" or name.startswith("p.")


class OneStep(nn.Module):
    """One step of a network for one sample: the module that torch.func differentiates."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, u: Tensor, x: Tensor) -> Tensor:
        """Return x_t [n] from u_t [inputs] and x_{t-1} [n]."""
        return self.net.advance(u[None], x[None])[0]


class Influence:
    """S_t = dx_t/dtheta, [B, n, P], where P counts the entries of all parameters in `names`.

    `batch` is the number of streams, B. The parameters in `names` are those that states depend on.

    S_{t-1} and S_t take turns in two arrays, so nothing of their size is allocated at a step.
    Where W, R or b are functions of the trained parameters (a structured W, or a cell that makes
    its own weights), S is that of W, R and b, and the gradient by them is pulled back through
    these functions at the weights of its step.
    """

    def __init__(self, net: Network, names: Sequence[str], batch: int) -> None:
        self.net = net
        self.trained = list(names)
        self.formula = None if net.cell is None else cell_slopes(net.cell)
        # Whether S is by the trained parameters themselves, or by W, R and b made from them.
        self.direct = net.cell is None or (
            net.cell.weights is None and not parametrize.is_parametrized(net)
        )
        arrays: dict[str, Tensor] = {name: net.get_parameter(name) for name in names}
        if not self.direct:
            stored = {name: p for name, p in arrays.items() if is_taken_as_stored(name)}
            arrays = effective_weights(net) | stored
        self.names = list(arrays)
        self.shapes = [tuple(y.shape) for y in arrays.values()]
        self.sizes = [y.numel() for y in arrays.values()]
        # S_{t-1} and S_t with their views; the first of each pair is the present one.
        self.arrays = [net.V.new_zeros(batch, net.n, sum(self.sizes)) for _ in range(2)]
        self.views = [self.views_of(S) for S in self.arrays]
        self.diagonals = [self.unit_diagonals(views) for views in self.views]
        self.module = OneStep(net)
        self.one = self.S.new_ones(())  # the second factor of terms that have only one
        self.mask = None
        if net.mask is not None and net.cell is not None and self.direct:
            # [gates, inputs, d], as the diagonal of W in S
            self.mask = net.mask.view(len(net.cell.a), net.hidden, -1).transpose(1, 2)

    @property
    def S(self) -> Tensor:
        """S_t, [B, n, P]."""
        return self.arrays[0]

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Views of S_t by parameter name, [B, n, ...]."""
        return self.views[0]

    def views_of(self, S: Tensor) -> dict[str, Tensor]:
        """Return the part of S [B, n, P] that belongs to each parameter, [B, n, ...]."""
        views = {}
        end = 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            begin = end
            end = begin + size
            views[name] = S[:, :, begin:end].unflatten(2, shape)
        return views

    def unit_diagonals(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of S that f_theta is added to: views, [B, s, rows, inputs, d].

        They are the derivatives of a unit by the parameters of the same unit. A step function may
        mix units: its f_theta is added to all of S.
        """
        if self.formula is None:
            return views
        s = self.net.slots
        d = self.net.hidden
        diagonals = {}
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name != "x0":  # f_theta is zero for x0, which no step reads itself
                view = views[name]
                # [B, s, unit of x, rows / d, unit of the parameter, inputs]
                by_unit = view.view(len(view), s, d, shape[0] // d, d, -1)
                diagonals[name] = by_unit.diagonal(0, 2, 4)
        return diagonals

    def begin(self, rows: Tensor, x0: bool) -> None:
        """Set S_0 = dx_0/dtheta of the streams with the numbers `rows`.

        It is 0, except for a learned initial state of the network: if they begin with that (`x0`),
        the derivative by it is the identity.
        """
        self.S[rows] = 0
        if x0 and "x0" in self.by_name:
            identity = torch.eye(self.net.n, dtype=self.S.dtype, device=self.S.device)
            self.by_name["x0"][rows] = identity

    @torch.no_grad()
    def advance(self, u: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
        """Replace S_{t-1} by S_t and return x_t, for all streams or for those in `rows`."""
        if rows is None:  # the two arrays of S change places, and nothing is copied
            x_next, J, direct_terms = self.step(u, x)
            torch.bmm(J, self.S, out=self.arrays[1])
            self.arrays.reverse()
            self.views.reverse()
            self.diagonals.reverse()
            self.add(self.diagonals[0], direct_terms)
            return x_next
        x_some, J, direct_terms = self.step(u[rows], x[rows])
        S = torch.bmm(J, self.S[rows])
        self.add(self.unit_diagonals(self.views_of(S)), direct_terms)
        self.S[rows] = S
        return x.index_copy(0, rows, x_some)

    def step(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor, DirectTerms]:
        """Return x_t, J_t = f_x + f_a W r' [B, n, n] and f_theta, for n = s slots of d units."""
        net = self.net
        if self.formula is None:
            return self.step_by_torch(u, x)
        B = x.shape[0]
        s = len(self.formula.cell.slots)
        d = net.hidden
        weights = net.effective_weights()
        x_next, slopes = self.formula.evaluate(net, u, x, weights)
        if weights.W is None or slopes.f_a is None:
            J = x.new_zeros(B, s, d, s, d)  # nothing passes through W
        else:
            J = self.jacobian_through_W(slopes.f_a, weights.W, slopes.r_x)
        if slopes.f_x is not None:
            J.diagonal(0, 2, 4).add_(slopes.f_x)
        # f_theta: factors of shape [B, s, rows, inputs, d], with 1 for what they do not depend on.
        terms: DirectTerms = {}
        if slopes.r is not None and slopes.f_a is not None:
            r = slopes.r[:, None, None, :, None]
            if self.mask is not None:
                r = r * self.mask
            terms["W"] = (slopes.f_a[:, :, :, None], r)
        f_input = self.slopes_by_input(slopes.f_a, slopes.f_v, B)
        terms["R"] = (f_input, u[:, None, None, :, None])
        terms["b"] = (f_input, self.one)
        if slopes.f_p is not None:
            for j, name in enumerate(net.p):
                terms[f"p.{name}"] = (slopes.f_p[:, :, j, None, None], self.one)
        return x_next, J.reshape(B, s * d, s * d), terms

    def slopes_by_input(self, f_a: Tensor | None, f_v: Tensor | None, B: int) -> Tensor:
        """Return the derivatives of x_t by the rows of R u_t + b, [B, s, rows, 1, d].

        They are those by the gates (f_a) and by the side entries v (f_v), in the order of the rows
        of R.
        """
        assert self.formula is not None
        cell = self.formula.cell
        s = len(cell.slots)
        d = self.net.hidden

        def flat(slope: Tensor | None, entries: int) -> Tensor:
            # The network sorts rows [., entries d]: here one for each sample and slot.
            if slope is None:
                return self.S.new_zeros(B * s, entries * d)
            return slope.reshape(B * s, entries * d)

        side = flat(f_v, len(cell.v)) if cell.v else None
        rows = self.net.input_gradient_rows(flat(f_a, len(cell.a)), side)
        return rows.view(B, s, len(cell.driven_entries), 1, d)

    def jacobian_through_W(self, f_a: Tensor, W: Tensor, r_x: Tensor | None) -> Tensor:
        """Return f_a W r', [B, s, d, s, d]: the part of J_t that passes through W.

        Args:
            f_a: The derivatives of s slots of d units by g gates, [B, s, g, d].
            W: [g d, k d], for k entries of r.
            r_x: r' [B, k, s, d]; None where r is one slot of x.
        """
        assert self.formula is not None
        B, s, g, d = f_a.shape
        W_by_gate = W.view(g, d, -1)
        if g == 1:  # no sum over gates
            f_a_W = f_a.view(B, s, d, 1) * W_by_gate
        else:
            f_a_W = torch.einsum("bsgi,gij->bsij", f_a, W_by_gate)
        if r_x is not None:  # sum over the entries k of r, for each unit j that r is read from
            return torch.einsum("bsikj,bkqj->bsiqj", f_a_W.view(B, s, d, -1, d), r_x)
        # W reads one slot: the columns of all others are zero.
        slot = self.formula.cell.read_slot or 0
        if s > 1:
            f_a_W = nn.functional.pad(f_a_W, (slot * d, (s - 1 - slot) * d))
        return f_a_W.view(B, s, d, s, d)

    def add(self, diagonals: dict[str, Tensor], terms: DirectTerms) -> None:
        """Add f_theta, as products of two factors, onto the diagonals of S."""
        for name, diagonal in diagonals.items():
            if name in terms:
                diagonal.addcmul_(*terms[name])

    def step_by_torch(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor, DirectTerms]:
        """Return x_t, J_t [B, n, n] and f_theta for a step function, by torch.func."""
        parameters = {f"net.{name}": self.net.get_parameter(name).detach() for name in self.names}

        def step(theta: dict[str, Tensor], x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            x_next = torch.func.functional_call(self.module, theta, (u, x))
            return x_next, x_next  # to be differentiated, and to be returned as it is

        jacobians = torch.func.jacrev(step, argnums=(0, 1), has_aux=True)  # by theta and by x
        of_samples = torch.func.vmap(jacobians, in_dims=(None, 0, 0))
        (by_theta, J), x_next = of_samples(parameters, x, u)
        terms = {name: (by_theta[f"net.{name}"], self.one) for name in self.names}
        return x_next.detach(), J, terms

    def pull(self, lam: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return the sum over streams of lam' S_t, by parameter name.

        Args:
            lam: The derivative of each stream's loss by its state x_t, [B, n].
            rows: The numbers of the streams that `lam` belongs to; None for all.
        """
        S = self.S if rows is None else self.S[rows]
        flat = lam.reshape(-1) @ S.flatten(0, 1)
        parts = flat.split(self.sizes) if self.sizes else ()
        gradient = {}
        for name, part, shape in zip(self.names, parts, self.shapes, strict=True):
            gradient[name] = part.view(shape)
        return gradient if self.direct else self.pull_to_trained(gradient)

    def pull_to_trained(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient by the trained parameters, from that by W, R, b and stored ones."""
        parameters = {name: self.net.get_parameter(name) for name in self.trained}
        result = {name: torch.zeros_like(p) for name, p in parameters.items()}
        with torch.enable_grad():
            weights = effective_weights(self.net)  # with the graph that made them
            trained = {name: y for name, y in weights.items() if y.requires_grad}
            if trained:
                grads = torch.autograd.grad(
                    list(trained.values()),
                    list(parameters.values()),
                    [gradient[name] for name in trained],
                    allow_unused=True,
                )
                for name, g in zip(parameters, grads, strict=True):
                    if g is not None:
                        result[name] = g
        for name in result:
            # W, R and b may depend on such a parameter too, hence a sum.
            if is_taken_as_stored(name):
                result[name] = result[name] + gradient[name]
        return result
