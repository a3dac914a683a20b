"""J, how the pre-outputs and states of a run change with the weights: J v and J' w.

Three derivatives in a row, each of them pushed forwards and pulled backwards:

    parameters -> effective weights      Jacobian: W with its structure and mask, ...
    effective weights -> states          a tangent or an adjoint sweep
    states, V, b_o, ... -> pre-outputs   Jacobian, or ReadoutJacobian: the readout
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..errors import Unsupported
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..sweeps.affine import affine, plus
from ..sweeps.chunks import sum_products, sum_rows
from ..sweeps.differentiable import forward_gradient
from ..sweeps.memory import empty
from ..sweeps.slopes import read_values

LANES = 16  # columns: a BLAS is fastest at multiples of them


class Jacobian:
    """The derivative J of a function at one point, from a graph that is made once; None for zero.

    J' w is linear in w, so its derivative by w, transposed, is J. An output that is an input itself
    needs no graph.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        input_places = {id(y): j for j, y in enumerate(inputs)}
        self.inputs = list(inputs)
        self.count = len(outputs)
        self.copied: list[tuple[int, int]] = []  # (output, input) that are one tensor
        self.places: list[int] = []  # of the outputs that have a graph
        for i, y in enumerate(outputs):
            if id(y) in input_places:
                self.copied.append((i, input_places[id(y)]))
            elif y.requires_grad:
                self.places.append(i)
        self.outputs = [outputs[i] for i in self.places]
        # J' w as a function of w, at w = 0: its derivative by w gives J.
        self.dual = [torch.zeros_like(y, requires_grad=True) for y in self.outputs]
        self.pulled = vector_products(self.outputs, self.inputs, self.dual, create_graph=True)

    def push(self, dots: Sequence[Tensor | None]) -> list[Tensor | None]:
        """J dots, by output. dots: a change of each input, None for zero."""
        pushed: list[Tensor | None] = [None] * self.count
        for i, y in zip(self.places, vector_products(self.pulled, self.dual, dots), strict=True):
            pushed[i] = y
        for i, j in self.copied:
            pushed[i] = dots[j]
        return pushed

    def pull(self, bars: Sequence[Tensor | None]) -> list[Tensor | None]:
        """J' bars, by input. bars: what multiplies each output, None for zero."""
        pulled = vector_products(self.outputs, self.inputs, [bars[i] for i in self.places])
        for i, j in self.copied:
            pulled[j] = plus(pulled[j], bars[i])
        return pulled


def vector_products(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    bars: Sequence[Tensor | None],
    create_graph: bool = False,
) -> list[Tensor | None]:
    """The gradient of the sum of <bar, output> by each input; None for zero."""
    used_outputs: list[Tensor] = []
    used_bars: list[Tensor] = []
    for y, bar in zip(outputs, bars, strict=True):
        if y is not None and bar is not None:
            used_outputs.append(y)
            used_bars.append(bar)
    if not used_outputs:
        return [None] * len(inputs)
    gradients = torch.autograd.grad(
        used_outputs,
        inputs,
        used_bars,
        retain_graph=True,  # the graph is made once, and serves for many products
        create_graph=create_graph,
        allow_unused=True,
    )
    return list(gradients)


class ReadoutJacobian:
    """The derivative of a = V h + b_o by (h, V, b_o), where there is one a for each sample."""

    def __init__(self, h: Tensor, V: Tensor) -> None:
        self.h = h
        self.V = V

    @torch.no_grad()
    def push(self, dots: Sequence[Tensor | None]) -> list[Tensor | None]:
        """[da] for the changes (dh, dV, db_o); db_o may be missing, None is zero."""
        dh, dV, *db_o = dots
        by_h = None if dh is None else dh @ self.V.T
        by_V = None if dV is None else self.h @ dV.T
        return [plus(by_h, by_V, *db_o)]

    @torch.no_grad()
    def pull(self, bars: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of <bar, a> by h, V and b_o, for bars = [bar]."""
        (bar,) = bars
        if bar is None:
            return [None] * 3
        return [bar @ self.V, bar.T @ self.h, bar.sum(0)]


class WeightJacobian:
    """J of a trajectory: how its pre-outputs and states change with its network's parameters.

        da_t = dW r(x_{t-1}) + dR u_t + db        one product with (r, u, 1), then one sweep
        (dW, dR, db)' = sum_t delta_t (r, u, 1)   likewise, backwards

    parameters   those that change
    learned_x0   the run began at the network's own x0
    """

    def __init__(
        self, run: Trajectory, parameters: dict[str, nn.Parameter], learned_x0: bool
    ) -> None:
        swept = run.run.formula
        if swept is None:
            raise Unsupported(
                "curvature needs a cell's formula: use engine 'cpu' or 'reference', not a step "
                "function or engine 'autograd'."
            )
        net = run.network
        assert net.cell is not None  # a run with a formula has a cell
        self.net = net
        self.rows = run.layout.rows
        self.first = self.rows.B  # rows of dx before those of x_1
        self.u = run.u_rows
        self.swept = swept
        self.given_width = len(net.cell.given) * net.hidden  # of data that no weight multiplies
        # The derivatives of the effective weights by the parameters, and of the readout.
        with torch.enable_grad():
            weights = effective_weights(net, learned_x0)
            self.names = list(weights)
            self.to_weights = Jacobian(list(weights.values()), list(parameters.values()))
            self.readout_names = [n for n in weights if n in ("V", "b_o", *net.extra_weights())]
            readout_weights = {n: weights[n].detach().requires_grad_() for n in self.readout_names}
            self.to_outputs = self._readout(run, readout_weights)
        self.side_rows = len(weights.get("R_v", ()))  # of R_v, which makes side of u
        # What W, R and b multiply, side by side in one matrix [N, columns].
        with torch.no_grad():
            columns = self._multiplied_columns(weights)
            self.column_names = list(columns)
            self.column_widths = [y.shape[1] for y in columns.values()]
            self.multiplied = empty((self.rows.N, sum(self.column_widths)), swept.x)
            torch.cat(list(columns.values()), 1, out=self.multiplied)

    def _readout(self, run: Trajectory, weights: dict[str, Tensor]) -> Jacobian | ReadoutJacobian:
        """The derivative of the pre-outputs by the states and the readout's weights.

        The states are all of them if the readout reads all steps, else each sample's last. By
        formula for a plain a = V x_T + b_o, which is the usual case; else from a graph.
        """
        net = self.net
        states = self.swept.x if net.reads_all_steps else run.run.last
        states = states.detach().requires_grad_()
        reads_all_slots = net.visible_slots == list(range(net.slots))
        has_no_more_weights = set(weights) <= {"V", "b_o"}
        is_formula = net.is_linear and not net.reads_all_steps
        if is_formula and has_no_more_weights and reads_all_slots:
            return ReadoutJacobian(states.detach(), weights["V"].detach())
        # `states` twice: read_states reads all states or the last ones, whichever they are here.
        a = net.read_states(
            run.layout, states, states, weights["V"], weights.get("b_o"), self.u, weights
        )
        return Jacobian([a], [states, *weights.values()])

    def _multiplied_columns(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What W, R and b multiply, in rows: r(x_{t-1}), u_t and 1, by the weight's name.

        Under "" there are zeros, which fill the columns up to a multiple of LANES.
        """
        assert self.net.cell is not None
        columns = {}
        if "W" in weights:
            before = self.rows.prev(self.swept.x)
            columns["W"] = read_values(self.net.cell, before, self.rows)
        columns["R"] = self.u
        if "b" in weights:
            columns["b"] = self.u.new_ones(self.rows.N, 1)
        width = sum(y.shape[1] for y in columns.values())
        columns[""] = self.u.new_zeros(self.rows.N, -width % LANES)
        return columns

    def push(self, direction: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """J direction = (da, dx): the changes of pre-outputs and states, in rows.

        direction: a change of each parameter, in the order of `parameters`.
        """
        rows = self.rows
        # The change of each effective weight, by name; None for zero.
        dots = dict(zip(self.names, self.to_weights.push(direction), strict=True))
        with torch.no_grad():
            # M = (dW, dR, db, 0), so that one product gives the change of all pre-activations.
            M = self.multiplied.new_zeros(self.swept.saved.a.shape[1], self.multiplied.shape[1])
            for name, block in zip(self.column_names, M.split(self.column_widths, 1), strict=True):
                dot = dots.get(name)
                if dot is not None:
                    block.copy_(dot.reshape(block.shape))
            base = affine(rows, self.multiplied, M, None)
            side = None
            if "R_v" in dots:
                dR_v = dots["R_v"]
                if dR_v is None:
                    dR_v = self.u.new_zeros(self.side_rows, self.u.shape[1])
                side = pad(affine(rows, self.u, dR_v, dots.get("b_v")), (0, self.given_width))
            dx0 = dots.get("x0")
            if dx0 is not None:
                dx0 = dx0.expand(rows.B, -1)
            # None: the change by dW is in base already.
            dx = self.swept.push(base, side, None, dx0, dots.get("p"))
        read = dx if self.net.reads_all_steps else rows.last(dx)
        da = self.to_outputs.push([read, *(dots[name] for name in self.readout_names)])[0]
        assert da is not None
        return da, dx

    def pull(self, of_a: Tensor | None, of_x: Tensor | None) -> list[Tensor]:
        """The gradient of <of_a, a> + <of_x, x> by each parameter; of_x may be overwritten.

        s and s_last are the sources of the adjoint sweep, at all states and at the last ones.
        """
        of_states, *of_readout = self.to_outputs.pull([of_a])
        # Not strict: ReadoutJacobian has a gradient by b_o even if the network has no b_o.
        bars = dict(zip(self.readout_names, of_readout, strict=False))
        s = s_last = None
        if self.net.reads_all_steps:
            s = of_states
        else:
            s_last = of_states
        if of_x is not None:
            s = of_x if s is None else of_x.add_(s)
        if s is not None or s_last is not None:
            with torch.no_grad():
                bars |= self._pull_sweep(s, s_last)
        pulled = self.to_weights.pull([bars.get(name) for name in self.names])
        gradients = []
        for p, g in zip(self.to_weights.inputs, pulled, strict=True):
            gradients.append(torch.zeros_like(p) if g is None else g)
        return gradients

    def _pull_sweep(self, s: Tensor | None, s_last: Tensor | None) -> dict[str, Tensor | None]:
        """The gradients by the effective weights of <s, x> + <s_last, last states>, by name."""
        rows = self.rows
        swept = self.swept
        # Of base, v, W, x0 and p, whose gradients are wanted; that by W follows from delta below.
        needed = (True, "R_v" in self.names, False, "x0" in self.names, "p" in self.names)
        delta, of_v, _, of_x0, of_p = forward_gradient(
            swept.plan, swept.saved, swept.W, s, s_last, None, needed
        )
        assert delta is not None
        blocks = sum_products(rows, delta, self.multiplied).split(self.column_widths, 1)
        bars: dict[str, Tensor | None] = dict(zip(self.column_names, blocks, strict=True))
        if "b" in bars:
            bars["b"] = blocks[self.column_names.index("b")][:, 0]
        if of_v is not None and "R_v" in self.names:
            of_v = of_v[:, : of_v.shape[1] - self.given_width]  # without the data, which come last
            bars["R_v"] = sum_products(rows, of_v, self.u)
            bars["b_v"] = sum_rows(rows, of_v)
        bars["p"] = of_p
        if of_x0 is not None:
            bars["x0"] = of_x0.sum(0)
        return bars


def effective_weights(net: Network, learned_x0: bool) -> dict[str, Tensor]:
    """The weights that sweep and readout use, by name: W with its structure and mask, ...

    learned_x0: whether the run began at the network's own x0; else x0 is no weight.
    """
    recurrent = net.effective_weights()
    (R, b), side = recurrent.input_weights
    weights = {"W": recurrent.W, "R": R, "b": b, "V": net.V, "b_o": net.b_o}
    weights |= net.extra_weights()
    if side is not None:
        weights["R_v"], weights["b_v"] = side
    weights["p"] = recurrent.p
    if learned_x0 and isinstance(recurrent.x0, nn.Parameter):
        weights["x0"] = recurrent.x0
    return {name: y for name, y in weights.items() if y is not None}
