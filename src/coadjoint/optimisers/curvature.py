"""Curvature: products of a vector with the Gauss-Newton matrix, the structural damping matrix and the Hessian.

With a = a(theta) the pre-outputs of a batch and x = x(theta) its states,

    J  v  = the change of (a, x) along a change v of the weights      one tangent sweep
    J' w  = the gradient of <w, a> + <s, x>                           one adjoint sweep
    G  v  = J_a' H J_a v / B,   H the Hessian of each sample's loss by its own a, positive where the loss is convex in a
    S  v  = J_x' J_x v / B      how much the states move, t = 1..T

Nothing is differentiated twice through time. The Hessian's own product (exact, perhaps indefinite) is beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..errors import InputError, Unsupported, check_seed, whole_number
from ..gradients.evaluation import Gradient, guard_weights
from ..gradients.method import check_arguments, trained_parameters
from ..networks.judge import Judge
from ..networks.network import Network, Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LOSSES, Loss, LossLike
from ..sweeps.affine import affine, plus
from ..sweeps.chunks import sum_products, sum_rows
from ..sweeps.differentiable import forward_gradient
from ..sweeps.layout import check_dense
from ..sweeps.memory import empty
from ..sweeps.slopes import read_values
from .conjugate_gradients import CGSolution as CGSolution
from .conjugate_gradients import conjugate_gradients as conjugate_gradients

CONVEX_LOSSES = {  # loss: the output functions with which it is convex in a
    "squared": ("identity",),
    "absolute": ("identity",),
    "huber": ("identity",),
    "cross-entropy": ("softmax", "identity"),
    "binary-cross-entropy": ("sigmoid", "identity"),
}


@dataclass(frozen=True)
class Packing:
    """Gradients as one vector, and back."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(parameters: dict[str, nn.Parameter]) -> Packing:
        return Packing(tuple(parameters), tuple(p.shape for p in parameters.values()))

    def pack(self, values: Gradient | Sequence[Tensor]) -> Tensor:
        each = [values[n] for n in self.names] if isinstance(values, dict) else values
        return torch.cat([y.reshape(-1) for y in each])

    def unpack(self, v: Tensor) -> Gradient:
        n = sum(s.numel() for s in self.shapes)
        if tuple(check_dense("a vector of the weights", v).shape) != (n,):
            raise InputError(f"a vector of the weights has shape [{n}]; got {list(v.shape)}.")
        parts = v.split([s.numel() for s in self.shapes])
        return {n: y.reshape(s) for n, s, y in zip(self.names, self.shapes, parts, strict=True)}


class Curvature:
    """The curvature of the mean loss of a batch, at the weights that the network has now.

    Vectors are flat, in the order of `packing`; weights of samples count as in the objective. run: the batch's trajectory, if
    there is one at these weights."""

    def __init__(
        self, net: Network, batch: Batch, loss: LossLike, run: Trajectory | None = None
    ) -> None:
        check_arguments(net, batch)
        refuse_if_no_curvature(net, loss)
        self._check = guard_weights(net)
        self.net, self.batch, self.loss = net, batch, loss
        self.parameters = trained_parameters(net)
        self.packing = Packing.of(self.parameters)
        with torch.no_grad():
            self.run = net.run(batch) if run is None else run
        rows, layout = self.run.layout.rows, self.run.layout
        self.judge = Judge.of(net, layout, loss, batch.y, batch.mask, batch.reduce, self.run.a_rows)
        with torch.enable_grad():
            self.pre = self.run.a_rows.detach().requires_grad_()
            self.losses = self.judge.sample_losses(self.pre)
            mean = batch.mean(self.losses)
            (self.by_a,) = torch.autograd.grad(mean, self.pre, create_graph=True)
        self.value = float(mean.detach())
        share = layout.sort(batch.weights(self.losses[None])) / rows.B  # of each sample in the mean
        self.of_states = (
            None if batch.weight is None else share[rows.sample.to(share.device)][:, None]
        )

    @functools.cached_property
    def weights(self) -> WeightJacobian:
        return WeightJacobian(self.run, self.parameters, self.batch.x0 is None)

    def gradient(self) -> Tensor:
        """The gradient of the mean loss."""
        self._check()
        return self.pull(self.by_a.detach(), None)

    def gauss_newton(self, v: Tensor) -> Tensor:
        """G v"""
        return self.product(v, 1.0, 0.0)

    def structural(self, v: Tensor) -> Tensor:
        """S v"""
        return self.product(v, 0.0, 1.0)

    def product(self, v: Tensor, outputs: float = 1.0, states: float = 0.0) -> Tensor:
        """(outputs G + states S) v, in one tangent and one adjoint sweep."""
        self._check()
        da, dx = self.push(v)
        of_a = outputs * self._hessian_by_a(da) if outputs else None
        if not states:
            return torch.zeros_like(v) if of_a is None else self.pull(of_a, None)
        B = self.run.layout.rows.B
        dx[:B] = 0
        unit = states / B
        if (
            self.of_states is None and unit > TINY
        ):  # a sweep is linear: dx itself is its source, without a pass over it
            return unit * self.pull(None if of_a is None else of_a / unit, dx)
        dx[B:] *= unit if self.of_states is None else states * self.of_states
        return self.pull(of_a, dx)

    def diagonal(self, probes: int = 1, seed: int = 0) -> Tensor:
        """An estimate of the diagonal of G from random signs, without bias: one adjoint sweep for each probe."""
        self._check()
        whole_number("probes", probes)
        generator = torch.Generator().manual_seed(check_seed(seed))
        total = torch.zeros(
            sum(s.numel() for s in self.packing.shapes),
            dtype=self.pre.dtype,
            device=self.pre.device,
        )
        for _ in range(probes):
            signs = torch.randint(0, 2, self.pre.shape, generator=generator).to(self.pre) * 2 - 1
            total += self.pull(self._root_by_a(signs), None).square()
        return total / probes

    def hessian(self, v: Tensor) -> Tensor:
        """The exact Hessian of the mean loss times v: four sweeps."""
        self._check()
        with torch.enable_grad():
            run = self.net.run(self.batch)
            mean = self.batch.mean(
                run.loss(self.loss, self.batch.y, mask=self.batch.mask, reduce=self.batch.reduce)
            )
            ps = list(self.parameters.values())
            g = torch.autograd.grad(mean, ps, create_graph=True, allow_unused=True)
            along = sum(
                (y * d).sum()
                for y, d in zip(g, self.packing.unpack(v).values(), strict=True)
                if y is not None
            )
            found = torch.autograd.grad(along, ps, allow_unused=True)  # type: ignore[arg-type]
        return self.packing.pack(
            [torch.zeros_like(p) if y is None else y for p, y in zip(ps, found, strict=True)]
        )

    def push(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """J v = (da, dx): the change of the pre-outputs and of the states along a change v of the weights, in rows."""
        return self.weights.push(list(self.packing.unpack(v).values()))

    def pull(self, of_a: Tensor | None, of_x: Tensor | None) -> Tensor:
        """J' (of_a, of_x): the gradient of <of_a, a> + <of_x, x>, in rows; None for zero."""
        return self.packing.pack(self.weights.pull(of_a, of_x))

    def _hessian_by_a(self, da: Tensor) -> Tensor:
        """H da, of the mean over samples."""
        if da.shape[-1] <= FEW:
            return (self._blocks @ da.unsqueeze(-1)).squeeze(-1)
        return self._turned(da)

    def _turned(self, da: Tensor) -> Tensor:
        """The same from the graph of the loss, whose second derivative may not be there: it is zero then."""
        if not self.by_a.requires_grad:
            return torch.zeros_like(da)
        return torch.autograd.grad(self.by_a, self.pre, da, retain_graph=True)[0]

    @functools.cached_property
    def _blocks(self) -> Tensor:
        """The small Hessian of each row, [rows, k, k]."""
        k = self.pre.shape[-1]
        return torch.stack(
            [self._turned(torch.eye(k).to(self.pre)[i].expand_as(self.pre)) for i in range(k)], -1
        )

    def _root_by_a(self, y: Tensor) -> Tensor:
        """A matrix M with M M' = H, times y: by the eigenvectors of the small Hessian of each row."""
        value, vector = torch.linalg.eigh(self._blocks)
        return (vector @ (value.clamp(min=0).sqrt() * y).unsqueeze(-1)).squeeze(-1)


def refuse_if_no_curvature(net: Any, loss: LossLike) -> None:
    """Refuse what has no curvature here."""
    if getattr(net, "one_layer", None) is None:
        raise Unsupported(
            f"curvature is that of a co.Network; got {type(net).__name__}. Use another optimiser."
        )
    refuse_if_not_convex(loss, net.output)
    net.refuse_if_random("curvature")
    if net.training and net.cell is not None and net.cell.given and net.cell.name != "inverse":
        raise Unsupported(
            f"cell '{net.cell.name}' draws noise, and curvature is that of one function: call net.eval()."
        )


def refuse_if_not_convex(loss: LossLike, output: Any) -> None:
    """Refuse a loss whose Hessian by a may be indefinite."""
    found = LOSSES.get(loss) if isinstance(loss, str) else loss
    outputs = CONVEX_LOSSES.get(found.name, ()) if isinstance(found, Loss) else ()
    if output not in outputs:
        pairs = "; ".join(
            f"'{name}' with output {' or '.join(map(repr, o))}" for name, o in CONVEX_LOSSES.items()
        )
        raise Unsupported(
            f"a Gauss-Newton matrix needs a loss that is convex in the pre-output: {pairs}; got {getattr(found, 'name', loss)!r} "
            f"with output={output!r}."
        )


class Jacobian:
    """J, the derivative of a function at one point, forwards and backwards, from a graph that is made once; None for zero.

    J' w is linear in w: its derivative by w, transposed, is J. An output that is an input itself needs no graph."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        at = {id(y): j for j, y in enumerate(inputs)}
        self.same = [(i, at[id(y)]) for i, y in enumerate(outputs) if id(y) in at]
        self.places = [i for i, y in enumerate(outputs) if y.requires_grad and id(y) not in at]
        self.inputs, self.count, self.outputs = (
            list(inputs),
            len(outputs),
            [outputs[i] for i in self.places],
        )
        self.dual = [torch.zeros_like(y, requires_grad=True) for y in self.outputs]
        self.back = vector_products(self.outputs, self.inputs, self.dual, create_graph=True)

    def push(self, dots: Sequence[Tensor | None]) -> list[Tensor | None]:
        """J dots"""
        found: list[Tensor | None] = [None] * self.count
        for i, y in zip(self.places, vector_products(self.back, self.dual, dots), strict=True):
            found[i] = y
        for i, j in self.same:
            found[i] = dots[j]
        return found

    def pull(self, bars: Sequence[Tensor | None]) -> list[Tensor | None]:
        """J' bars"""
        found = vector_products(self.outputs, self.inputs, [bars[i] for i in self.places])
        for i, j in self.same:
            found[j] = plus(found[j], bars[i])
        return found


def vector_products(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    bars: Sequence[Tensor | None],
    create_graph: bool = False,
) -> list[Tensor | None]:
    """The gradient of the sum of <bar, output>; None for zero."""
    ends = [
        (y, bar) for y, bar in zip(outputs, bars, strict=True) if y is not None and bar is not None
    ]
    if not ends:
        return [None] * len(inputs)
    of, at = ([pair[i] for pair in ends] for i in (0, 1))
    return list(
        torch.autograd.grad(
            of, inputs, at, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    )


class ReadoutJacobian:
    """The derivative of a = V h + b_o by (h, V, b_o) in closed form, where there is one a for each sample."""

    def __init__(self, h: Tensor, V: Tensor) -> None:
        self.h, self.V = h, V

    @torch.no_grad()
    def push(self, dots: Sequence[Tensor | None]) -> list[Tensor | None]:
        dh, dV, *db = dots
        terms = (None if dh is None else dh @ self.V.T, None if dV is None else self.h @ dV.T, *db)
        return [plus(*terms)]

    @torch.no_grad()
    def pull(self, bars: Sequence[Tensor | None]) -> list[Tensor | None]:
        (bar,) = bars
        return [None] * 3 if bar is None else [bar @ self.V, bar.T @ self.h, bar.sum(0)]


LANES = 16  # columns: a BLAS is fastest at multiples of them
FEW = 16  # outputs: their Hessian is kept in blocks
TINY = 1e-20  # what nothing should be divided by in float32


class WeightJacobian:
    """J of a trajectory: how its pre-outputs and states change with its network's parameters.

        da_t = dW r(x_{t-1}) + dR u_t + db        one product with (r, u, 1) beside each other, one sweep
        (dW, dR, db)' = sum_t delta_t (r, u, 1)   likewise, backwards

    parameters: those that change; learned_x0: it began at the network's own x0."""

    def __init__(
        self, run: Trajectory, parameters: dict[str, nn.Parameter], learned_x0: bool
    ) -> None:
        swept = run.run.formula
        if swept is None:
            raise Unsupported(
                "a change of the weights is pushed through a cell's formula: use engine 'cpu' or 'reference', not a step function "
                "or engine 'autograd'."
            )
        net, self.rows, self.u, self.swept = run.network, run.layout.rows, run.u_rows, swept
        assert net.cell is not None
        cell, rows, x = net.cell, self.rows, swept.x
        with torch.enable_grad():
            taken = effective_weights(net, learned_x0)
            self.names = list(taken)
            self.made = Jacobian(list(taken.values()), list(parameters.values()))
            self.readers = [name for name in taken if name in ("V", "b_o", *net.extra_weights())]
            at = {name: taken[name].detach().requires_grad_() for name in self.readers}
            self.all = net.reads_all_steps
            seen = (x if self.all else run.run.last).detach().requires_grad_()
            self.reads: Jacobian | ReadoutJacobian
            if (
                net.is_linear
                and not self.all
                and set(self.readers) <= {"V", "b_o"}
                and net.visible_slots == list(range(net.slots))
            ):
                self.reads = ReadoutJacobian(seen.detach(), at["V"].detach())
            else:
                a = net.read_states(run.layout, seen, seen, at["V"], at.get("b_o"), self.u, at)
                self.reads = Jacobian([a], [seen, *at.values()])
        self.given, self.beside = len(cell.given) * net.hidden, len(taken.get("R_v", ()))
        with torch.no_grad():
            parts = {"W": read_values(cell, rows.prev(x), rows)} if "W" in taken else {}
            parts["R"] = self.u
            parts |= {"b": self.u.new_ones(rows.N, 1)} if "b" in taken else {}
            wide = sum(y.shape[1] for y in parts.values())
            parts[""] = self.u.new_zeros(rows.N, -wide % LANES)
            self.known = empty((rows.N, sum(y.shape[1] for y in parts.values())), x)
            torch.cat(list(parts.values()), 1, out=self.known)
        self.entering, self.wide = list(parts), [y.shape[1] for y in parts.values()]

    def push(self, direction: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(da, dx), in rows"""
        rows, swept = self.rows, self.swept
        dot = dict(zip(self.names, self.made.push(direction), strict=True))
        with torch.no_grad():
            M = self.known.new_zeros(swept.saved.a.shape[1], self.known.shape[1])
            for name, into in zip(self.entering, M.split(self.wide, 1), strict=True):
                if (d := dot.get(name)) is not None:
                    into.copy_(d.reshape(into.shape))
            base = affine(rows, self.known, M, None)
            side = None
            if "R_v" in dot:
                R_v = (
                    self.u.new_zeros(self.beside, self.u.shape[1])
                    if dot["R_v"] is None
                    else dot["R_v"]
                )
                side = pad(affine(rows, self.u, R_v, dot.get("b_v")), (0, self.given))
            dx0 = dot.get("x0")
            dx = swept.push(
                base, side, None, None if dx0 is None else dx0.expand(rows.B, -1), dot.get("p")
            )
        da = self.reads.push(
            [dx if self.all else rows.last(dx), *(dot[name] for name in self.readers)]
        )[0]
        assert da is not None
        return da, dx

    def pull(self, of_a: Tensor | None, of_x: Tensor | None) -> list[Tensor]:
        """The gradient of <of_a, a> + <of_x, x> by each parameter; of_x may be overwritten."""
        rows, swept = self.rows, self.swept
        of_seen, *rest = self.reads.pull([of_a])
        found = dict(zip(self.readers, rest, strict=False))
        s, s_last = (of_seen, None) if self.all else (None, of_seen)
        if of_x is not None:
            s = of_x if s is None else of_x.add_(s)
        with torch.no_grad():
            if s is not None or s_last is not None:
                need = (True, "R_v" in self.names, False, "x0" in self.names, "p" in self.names)
                delta, of_v, _, of_x0, of_p = forward_gradient(
                    swept.plan, swept.saved, swept.W, s, s_last, None, need
                )
                assert delta is not None
                joint = sum_products(rows, delta, self.known).split(self.wide, 1)
                found |= {
                    name: y if name != "b" else y[:, 0]
                    for name, y in zip(self.entering, joint, strict=True)
                }
                if of_v is not None and "R_v" in self.names:
                    of_v = of_v[:, : of_v.shape[1] - self.given]
                    found["R_v"] = sum_products(rows, of_v, self.u)
                    found["b_v"] = sum_rows(rows, of_v)
                found |= {"p": of_p} | ({} if of_x0 is None else {"x0": of_x0.sum(0)})
        by = self.made.pull([found.get(name) for name in self.names])
        return [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(self.made.inputs, by, strict=True)
        ]


def effective_weights(net: Network, learned_x0: bool) -> dict[str, Tensor]:
    """The weights as a sweep and a readout take them, of a network's own parameters: W with its structure and mask, ..."""
    taken = net.effective_weights()
    (R, b), side = taken.input_weights
    found = {"W": taken.W, "R": R, "b": b, "V": net.V, "b_o": net.b_o, **net.extra_weights()}
    found |= {} if side is None else {"R_v": side[0], "b_v": side[1]}
    found["p"] = taken.p
    found |= {"x0": taken.x0} if learned_x0 and isinstance(taken.x0, nn.Parameter) else {}
    return {name: y for name, y in found.items() if y is not None}
