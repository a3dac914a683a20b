"""Curvature: products of a vector with the Gauss-Newton matrix, the structural damping matrix and the Hessian.

With a = a(theta) the pre-outputs of a batch and x = x(theta) its states,

    J  v  = the change of (a, x) along a change v of the weights      one tangent sweep
    J' w  = the gradient of <w, a> + <s, x>                           one adjoint sweep
    G  v  = J_a' H J_a v / B,   H the Hessian of each sample's loss by its own a, positive where the loss is convex in a
    S  v  = J_x' J_x v / B      how much the states move, t = 1..T

Nothing is differentiated twice through time. The Hessian's own product (exact, perhaps indefinite) is beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Batch
from .errors import InputError, Unsupported
from .gradients import Gradient, trained, unchanged
from .losses import LOSSES, Loss, LossLike
from .network import Network, Trajectory
from .readout import Judge
from .sweeps import Swept

CONVEX = {  # loss: the output functions with which it is convex in a
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
        if tuple(v.shape) != (n,):
            raise InputError(f"a vector of the weights has shape [{n}]; got {list(v.shape)}.")
        parts = v.split([s.numel() for s in self.shapes])
        return {n: y.reshape(s) for n, s, y in zip(self.names, self.shapes, parts, strict=True)}


class Curvature:
    """The curvature of the mean loss of a batch, at the weights that the network has now.

    Vectors are flat, in the order of `packing`; weights of samples count as in the objective."""

    def __init__(self, net: Network, batch: Batch, loss: LossLike) -> None:
        if not isinstance(net, Network):
            raise Unsupported(f"curvature is that of a co.Network; got {type(net).__name__}.")
        convex(loss, net.output)
        if net.training and net.cell is not None and net.cell.given and net.cell.name != "inverse":
            raise Unsupported(
                f"cell '{net.cell.name}' draws noise, and curvature is that of one function: call net.eval()."
            )
        self._check = unchanged(net)
        self.net, self.batch, self.loss = net, batch, loss
        self.parameters = trained(net)
        self.packing = Packing.of(self.parameters)
        with torch.enable_grad():
            self.run: Trajectory = net(batch.u, batch.lengths, batch.x0)
            self.judge = Judge.of(net, self.run.layout, loss, batch.y, batch.mask, batch.reduce, self.run.pre)
            self.pre = self.run.pre.detach().requires_grad_()
            self.losses = self.judge.losses(self.pre)
            rows = self.run.layout.rows
            share = self.run.layout.sort(batch.weights(self.losses[None])) / rows.B  # of each sample in the mean
            self.share = share[rows.sample.to(share.device)] if net.readout == "every" else share
            self.of_states = share[rows.sample.to(share.device)][:, None]
            mean = batch.mean(self.losses)
            (self.by_a,) = torch.autograd.grad(mean, self.pre, create_graph=True)
        self.value = float(mean.detach())

    def gradient(self) -> Tensor:
        """The gradient of the mean loss."""
        self._check()
        return self._pull([self.run.pre], [self.by_a.detach()])

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
        ends: list[Tensor] = []
        sources: list[Tensor] = []
        if outputs:
            ends.append(self.run.pre)
            sources.append(outputs * self._hessian_by_a(da))
        if states:
            rows = self.run.layout.rows
            moved = torch.cat([torch.zeros_like(dx[: rows.B]), dx[rows.B :] * self.of_states])
            ends.append(self.run.run.x)
            sources.append(states * moved)
        return self._pull(ends, sources) if ends else torch.zeros_like(v)

    def diagonal(self, probes: int = 1, seed: int = 0) -> Tensor:
        """An estimate of the diagonal of G from random signs, without bias: one adjoint sweep for each probe."""
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(sum(s.numel() for s in self.packing.shapes), dtype=self.pre.dtype, device=self.pre.device)
        for _ in range(probes):
            signs = torch.randint(0, 2, self.pre.shape, generator=generator).to(self.pre) * 2 - 1
            half = self._root_by_a(signs)
            total += self._pull([self.run.pre], [half]).square()
        return total / probes

    def hessian(self, v: Tensor) -> Tensor:
        """The exact Hessian of the mean loss times v: four sweeps."""
        self._check()
        with torch.enable_grad():
            run = self.net(self.batch.u, self.batch.lengths, self.batch.x0)
            mean = self.batch.mean(run.loss(self.loss, self.batch.y, mask=self.batch.mask, reduce=self.batch.reduce))
            ps = list(self.parameters.values())
            g = torch.autograd.grad(mean, ps, create_graph=True, allow_unused=True)
            along = sum((y * d).sum() for y, d in zip(g, self.packing.unpack(v).values(), strict=True) if y is not None)
            found = torch.autograd.grad(along, ps, allow_unused=True)  # type: ignore[arg-type]
        return self.packing.pack([torch.zeros_like(p) if y is None else y for p, y in zip(ps, found, strict=True)])

    def push(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """(da, dx): the change of the pre-outputs and of the states along a change v of the weights, in rows."""
        with torch.no_grad():
            return pushed(self.run, self.packing.unpack(v), self.batch.x0 is None)

    def _pull(self, ends: list[Tensor], sources: list[Tensor]) -> Tensor:
        ps = list(self.parameters.values())
        found = torch.autograd.grad(ends, ps, sources, retain_graph=True, allow_unused=True)
        return self.packing.pack([torch.zeros_like(p) if g is None else g for p, g in zip(ps, found, strict=True)])

    def _hessian_by_a(self, da: Tensor) -> Tensor:
        """H da, of the mean over samples."""
        if not self.by_a.requires_grad:  # linear in a
            return torch.zeros_like(da)
        return torch.autograd.grad(self.by_a, self.pre, da, retain_graph=True)[0]

    def _root_by_a(self, y: Tensor) -> Tensor:
        """A matrix M with M M' = H, times y: by the eigenvectors of the small Hessian of each row."""
        k = y.shape[-1]
        columns = [self._hessian_by_a(torch.eye(k).to(y)[i].expand_as(y)) for i in range(k)]
        value, vector = torch.linalg.eigh(torch.stack(columns, -1))
        return (vector @ (value.clamp(min=0).sqrt() * y).unsqueeze(-1)).squeeze(-1)


def convex(loss: LossLike, output: Any) -> None:
    """Refuse a loss whose Hessian by a may be indefinite."""
    found = LOSSES.get(loss) if isinstance(loss, str) else loss
    outputs = CONVEX.get(found.name, ()) if isinstance(found, Loss) else ()
    if output not in outputs:
        pairs = "; ".join(f"'{name}' with output {' or '.join(map(repr, o))}" for name, o in CONVEX.items())
        raise Unsupported(
            f"a Gauss-Newton matrix needs a loss that is convex in the pre-output: {pairs}; got {getattr(found, 'name', loss)!r} "
            f"with output={output!r}."
        )


class Effective(nn.Module):
    """The weights as a sweep and a readout take them, of a network's own parameters: W with its structure and mask, ..."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net, self.learned = net, isinstance(net.x0, nn.Parameter)

    def forward(self) -> dict[str, Tensor]:
        net = self.net
        (R, b), side = net.entering(net.R, net.b)
        found = {"W": net.recurrent(), "R": R, "b": b, "V": net.V, "b_o": net.b_o, **net.held()}
        found |= {} if side is None else {"R_v": side[0], "b_v": side[1]}
        found |= {"p": torch.cat(list(net.p.values()))} if len(net.p) else {}
        found |= {"x0": net.x0} if self.learned else {}
        return {name: y for name, y in found.items() if y is not None}

    def along(self, direction: Gradient) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """These weights, and their change along a change of the parameters."""
        theta = {f"net.{name}": p.detach() for name, p in self.net.named_parameters()}
        dots = {f"net.{name}": direction.get(name, torch.zeros_like(p)) for name, p in self.net.named_parameters()}
        of = lambda theta: torch.func.functional_call(self, theta, ())
        now, dot, *_ = torch.func.jvp(of, (theta,), (dots,))
        return now, dot


def pushed(run: Trajectory, direction: Gradient, learned_x0: bool = True) -> tuple[Tensor, Tensor]:
    """(da, dx) of a trajectory along a change of its network's weights, in rows. learned_x0: it began at the network's x0."""
    net, rows, u = run.network, run.layout.rows, run.inputs
    if not isinstance(run.run, Swept):
        raise Unsupported(
            "a change of the weights is pushed through a cell's formula: use engine 'cpu' or 'reference', not a step function "
            "or engine 'autograd'."
        )
    now, dot = Effective(net).along(direction)
    dbase, dside = net.drive(
        u, ((dot["R"], dot.get("b")), (dot["R_v"], dot.get("b_v")) if "R_v" in dot else None), rows
    )
    dx0 = dot["x0"].expand(rows.B, -1) if "x0" in dot and learned_x0 else None
    dx = run.run.push(dbase, dside, dot.get("W"), dx0, dot.get("p"))

    def read(x: Tensor, last: Tensor, w: dict[str, Tensor]) -> Tensor:
        return net.read_out(run.layout, x, last, w["V"], w.get("b_o"), u, w)

    primal = (run.run.x.detach(), run.run.last.detach(), now)
    return torch.func.jvp(read, primal, (dx, rows.last(dx), dot))[1], dx


@dataclass(frozen=True)
class Solved:
    """What conjugate gradients found: some of the iterates, the last of them the best model's, and what the model says of each."""

    iterates: list[Tensor]
    models: list[float]  # x'Ax / 2 - b'x
    iterations: int


def conjugate_gradients(
    A: Callable[[Tensor], Tensor],
    b: Tensor,
    start: Tensor | None = None,
    scale: Tensor | None = None,
    most: int = 250,
    progress: float = 5e-4,
    keep: float = 1.3,
) -> Solved:
    """Minimise x'Ax / 2 - b'x for a positive A, preconditioned by the diagonal `scale`.

    It ends after `most` products, or when the model has fallen by less than `progress` of itself for each of the last k
    iterations, k = max(10, a tenth of all), or when nothing is left of the residual. Kept are the iterates ceil(keep^j).
    Martens, Deep learning via Hessian-free optimization, ICML (2010)."""
    x = torch.zeros_like(b) if start is None else start.clone()
    r = b - A(x) if start is not None else b.clone()
    apply = (lambda y: y) if scale is None else (lambda y: y / scale)
    z = apply(r)
    d, size = z.clone(), float(r @ z)
    past = [-0.5 * float((r + b) @ x)]
    iterates, models, due = [], [], 1.0
    i = 0
    while i < most and size > 0:
        Ad = A(d)
        bent = float(d @ Ad)
        if not bent > 0:
            break  # flat along d, or rounding: nothing is gained
        i += 1
        x = x.add(d, alpha=size / bent)
        r = r.sub(Ad, alpha=size / bent)
        past.append(-0.5 * float((r + b) @ x))
        k = max(10, i // 10)
        little = i > k and past[-1] < 0 and (past[-1] - past[-1 - k]) / past[-1] < k * progress
        done = i == most or (progress > 0 and little)
        z = apply(r)
        before, size = size, float(r @ z)
        done = done or not size > torch.finfo(b.dtype).eps ** 2 * float(b @ apply(b))
        if i >= due or done:
            iterates.append(x)
            models.append(past[-1])
            while due <= i:
                due = math.ceil(due * keep)
        if done:
            break
        d = z.add(d, alpha=size / before)
    if not iterates:
        iterates, models = [x], [past[-1]]
    return Solved(iterates, models, i)
