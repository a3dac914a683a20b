"""Curvature: products with the Gauss-Newton matrix, the structural damping matrix, the Hessian.

With a = a(theta) the pre-outputs of a batch and x = x(theta) its states,

    J  v  = the change of (a, x) along a change v of the weights      one tangent sweep
    J' w  = the gradient of <w, a> + <s, x>                           one adjoint sweep
    G  v  = J_a' H J_a v / B    H: the Hessian of each sample's loss by its own a, positive
                                semidefinite where the loss is convex in a
    S  v  = J_x' J_x v / B      how much the states move, t = 1..T, or those of layers i = 1..L

Nothing is differentiated twice through time or depth. The product with the Hessian itself (exact,
perhaps indefinite) is beside them.

Example:
    >>> import torch
    >>> import coadjoint as co
    >>> net = co.Network("elman", inputs=1, hidden=2, outputs=1, dtype=torch.float64)
    >>> u = torch.ones(3, 4, 1, dtype=torch.float64)
    >>> c = co.curvature.Curvature(net, co.Batch(u, u[0]), "squared")
    >>> v = torch.ones(len(c.gradient()), dtype=torch.float64)
    >>> bool(v @ c.gauss_newton(v) >= 0)
    True
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError, Unsupported, check_seed, renamed_attributes, whole_number
from ..gradients.evaluation import Gradient, guard_weights
from ..gradients.method import check_arguments, trained_parameters
from ..networks.chain_run import ChainRun
from ..networks.interface import Net
from ..networks.trajectory import Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LOSSES, Loss, LossLike
from ..sweeps.layout import check_dense
from .chain_jacobian import ChainJacobian
from .conjugate_gradients import CGSolution as CGSolution
from .conjugate_gradients import conjugate_gradients as conjugate_gradients
from .weight_jacobian import WeightJacobian

FEW = 16  # outputs up to which their Hessian is kept, a block for each row
TINY = 1e-20  # float32 numbers are not divided by anything smaller
CONVEX_LOSSES = {  # loss: the output functions with which it is convex in a
    "squared": ("identity",),
    "half-squared": ("identity",),
    "absolute": ("identity",),
    "huber": ("identity",),
    "cross-entropy": ("softmax", "identity"),
    "binary-cross-entropy": ("sigmoid", "identity"),
}


@dataclass(frozen=True)
class Packing:
    """Gradients as one vector of all n numbers, and back: parameters one after the other."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(parameters: dict[str, nn.Parameter]) -> Packing:
        """The packing of gradients by these parameters, in their order."""
        return Packing(tuple(parameters), tuple(p.shape for p in parameters.values()))

    def pack(self, values: Gradient | Sequence[Tensor]) -> Tensor:
        """One vector [n] of a gradient, or of tensors in the order of `names`."""
        if isinstance(values, dict):
            values = [values[n] for n in self.names]
        return torch.cat([y.reshape(-1) for y in values])

    def unpack(self, v: Tensor) -> Gradient:
        """A vector [n] as tensors of the parameters' shapes, by name."""
        sizes = [shape.numel() for shape in self.shapes]
        n = sum(sizes)
        if tuple(check_dense("a vector of the weights", v).shape) != (n,):
            raise InputError(f"a vector of the weights has shape [{n}]; got {list(v.shape)}.")
        parts = {}
        for name, shape, part in zip(self.names, self.shapes, v.split(sizes), strict=True):
            parts[name] = part.reshape(shape)
        return parts


class Curvature:
    """The curvature of the mean loss of a batch, at the network's current weights.

    Vectors are flat, in the order of `packing`; weights of samples count as in the objective.
    net: a co.Network, or a co.Chain; others are refused.
    run: the batch's run at these weights, if there is one already.

    >>> import coadjoint as co
    >>> net = co.Network("elman", inputs=1, hidden=2, outputs=1)
    >>> c = Curvature(net, co.Batch(torch.ones(3, 4, 1), torch.ones(4, 1)), "squared")
    >>> g = c.gradient()
    >>> bool(g @ c.gauss_newton(g) > 0)
    True
    """

    def __init__(
        self, net: Net, batch: Batch, loss: LossLike, run: Trajectory | ChainRun | None = None
    ) -> None:
        batch = check_arguments(net, batch)
        refuse_if_no_curvature(net, loss)
        self._check = guard_weights(net)  # refuses once the weights have changed
        self.net = net
        self.batch = batch
        self.loss = loss
        self.parameters = trained_parameters(net)
        self.packing = Packing.of(self.parameters)
        with torch.no_grad():
            known = net.run(batch) if run is None else run
        assert isinstance(known, Trajectory | ChainRun)  # those of networks that are not refused
        self.run = known
        layout = self.run.layout
        rows = layout.rows
        self.judge = self.run.judge(loss, batch.y, batch.mask, batch.reduce)
        with torch.enable_grad():
            # The gradient by the pre-outputs keeps its graph, for products with their Hessian.
            self.pre = self.run.a_rows.detach().requires_grad_()
            self.losses = self.judge.sample_losses(self.pre)
            mean = batch.mean(self.losses)
            (self.by_a,) = torch.autograd.grad(mean, self.pre, create_graph=True)
        self.value = float(mean.detach())
        # The share of each state row's sample in the mean, [N, 1]; None if it is 1 / B for all.
        self.state_shares: Tensor | None = None
        if batch.weight is not None:
            shares = layout.sort(batch.weights(self.losses[None])) / rows.B
            self.state_shares = shares[rows.sample.to(shares.device)][:, None]

    @functools.cached_property
    def weights(self) -> WeightJacobian | ChainJacobian:
        """J, how pre-outputs and states change with the weights; made when it is first needed."""
        if isinstance(self.run, ChainRun):
            return ChainJacobian(self.run, self.parameters)
        return WeightJacobian(self.run, self.parameters, self.batch.x0 is None)

    def gradient(self) -> Tensor:
        """The gradient of the mean loss, as a vector [n]."""
        self._check()
        return self.pull(self.by_a.detach(), None)

    def gauss_newton(self, v: Tensor) -> Tensor:
        """The Gauss-Newton product G v: G = J_a' H J_a / B, H the Hessian of the losses by a."""
        return self.product(v, outputs=1.0, states=0.0)

    def structural(self, v: Tensor) -> Tensor:
        """The structural damping product S v: S = J_x' J_x / B, how much the states move."""
        return self.product(v, outputs=0.0, states=1.0)

    def product(self, v: Tensor, outputs: float = 1.0, states: float = 0.0) -> Tensor:
        """(outputs G + states S) v, in one tangent and one adjoint sweep.

        G is the Gauss-Newton matrix and S the structural damping matrix; `outputs` and `states` are
        numbers.
        """
        self._check()
        da, dx = self.push(v)
        of_a = outputs * self._hessian_by_a(da) if outputs else None
        if not states and of_a is None:
            return torch.zeros_like(v)
        if not states:
            return self.pull(of_a, None)
        first = self.weights.first
        dx[:first] = 0  # S counts the states from t = 1 on
        unit = states / self.run.layout.rows.B  # the factor of dx, if all samples count alike
        if self.state_shares is not None:
            dx[first:] *= states * self.state_shares
            return self.pull(of_a, dx)
        if unit > TINY:
            # A sweep is linear: dx itself can be its source, which saves a pass over dx.
            return unit * self.pull(None if of_a is None else of_a / unit, dx)
        dx[first:] *= unit  # of_a / unit could overflow
        return self.pull(of_a, dx)

    def diagonal(self, probes: int = 1, seed: int = 0) -> Tensor:
        """An unbiased estimate of the diagonal of G by random signs: one adjoint sweep a probe.

        With M M' = H and random signs s, the mean of (J' M s)^2 is the diagonal of J' M M' J = G.
        """
        self._check()
        whole_number("probes", probes)
        generator = torch.Generator().manual_seed(check_seed(seed))
        n = sum(shape.numel() for shape in self.packing.shapes)
        total = torch.zeros(n, dtype=self.pre.dtype, device=self.pre.device)
        for _ in range(probes):
            signs = torch.randint(0, 2, self.pre.shape, generator=generator).to(self.pre) * 2 - 1
            total += self.pull(self._root_by_a(signs), None).square()
        return total / probes

    def hessian(self, v: Tensor) -> Tensor:
        """The exact Hessian of the mean loss times v, as the gradient of <gradient, v>.

        It takes four sweeps: those of a gradient, and as many to differentiate it.
        """
        self._check()
        batch = self.batch
        parameters = list(self.parameters.values())
        directions = self.packing.unpack(v).values()
        with torch.enable_grad():
            run = self.net.run(batch)
            losses = run.loss(self.loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            g = torch.autograd.grad(
                batch.mean(losses), parameters, create_graph=True, allow_unused=True
            )
            slope = torch.zeros((), dtype=losses.dtype, device=losses.device)
            for y, d in zip(g, directions, strict=True):
                if y is not None:  # None: the loss does not depend on this parameter
                    slope = slope + (y * d).sum()
            products = torch.autograd.grad(slope, parameters, allow_unused=True)
        filled = []
        for p, y in zip(parameters, products, strict=True):
            filled.append(torch.zeros_like(p) if y is None else y)
        return self.packing.pack(filled)

    def push(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """J v = (da, dx), in rows: the change of pre-outputs and states along v.

        dx has the rows of all states, the B initial ones first. For a chain it has a row for each
        sample, with the entries of x_1, ..., x_L side by side.
        """
        return self.weights.push(list(self.packing.unpack(v).values()))

    def pull(self, of_a: Tensor | None, of_x: Tensor | None) -> Tensor:
        """J' (of_a, of_x): the gradient [n] of <of_a, a> + <of_x, x> by the weights.

        of_a and of_x have the rows of the pre-outputs a and of the states x; None for zero.
        """
        return self.packing.pack(self.weights.pull(of_a, of_x))

    def _hessian_by_a(self, da: Tensor) -> Tensor:
        """H da / B, H the Hessian of each sample's loss by its own pre-outputs.

        For few outputs by H itself, which is computed once; else by the graph at every call.
        """
        if da.shape[-1] <= FEW:
            product: Tensor = (self._blocks @ da.unsqueeze(-1)).squeeze(-1)
            return product
        return self._hessian_by_graph(da)

    def _hessian_by_graph(self, da: Tensor) -> Tensor:
        """The same H da from the loss's graph; zero if the loss has no second derivative."""
        if not self.by_a.requires_grad:
            return torch.zeros_like(da)
        return torch.autograd.grad(self.by_a, self.pre, da, retain_graph=True)[0]

    @functools.cached_property
    def _blocks(self) -> Tensor:
        """The Hessian of the mean loss by each row of k pre-outputs, [rows, k, k].

        A row's loss depends on that row alone, so one product gives a column of all blocks.
        """
        k = self.pre.shape[-1]
        units = torch.eye(k).to(self.pre)
        columns = [self._hessian_by_graph(unit.expand_as(self.pre)) for unit in units]
        return torch.stack(columns, -1)

    def _root_by_a(self, y: Tensor) -> Tensor:
        """M y with M M' = H, by the eigenvectors of the Hessian of each row.

        Eigenvalues below zero are rounding: the loss is convex.
        """
        value, vector = torch.linalg.eigh(self._blocks)
        root: Tensor = (vector @ (value.clamp(min=0).sqrt() * y).unsqueeze(-1)).squeeze(-1)
        return root


def refuse_if_no_curvature(net: Net, loss: LossLike) -> None:
    """Refuse networks and losses that have no curvature here."""
    layer = getattr(net, "one_layer", None)
    if layer is None and getattr(net, "as_chain", None) is None:
        raise Unsupported(
            f"curvature is that of a co.Network or a co.Chain; got {type(net).__name__}. Use "
            "another optimiser."
        )
    refuse_if_not_convex(loss, net.output)
    net.refuse_if_random("curvature")
    if layer is None:
        return
    cell = layer.cell
    # What a cell is given at each step is noise; for "inverse" it is a mask that never changes.
    if layer.training and cell is not None and cell.given and cell.name != "inverse":
        raise Unsupported(
            f"cell '{cell.name}' draws noise, and curvature is that of one function: call "
            "net.eval()."
        )


def refuse_if_not_convex(loss: LossLike, output: object) -> None:
    """Refuse a loss whose Hessian by a may be indefinite. output: the output function's name."""
    known = LOSSES.get(loss) if isinstance(loss, str) else loss
    if isinstance(known, Loss) and output in CONVEX_LOSSES.get(known.name, ()):
        return
    pairs = []
    for name, outputs in CONVEX_LOSSES.items():
        pairs.append(f"'{name}' with output {' or '.join(map(repr, outputs))}")
    got = getattr(known, "name", loss)
    raise Unsupported(
        "a Gauss-Newton matrix needs a loss that is convex in the pre-output: "
        f"{'; '.join(pairs)}; got {got!r} with output={output!r}."
    )


__getattr__ = renamed_attributes(__name__, {"Solved": "CGSolution"})
