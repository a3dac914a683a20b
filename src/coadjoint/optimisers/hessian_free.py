"""Hessian-free: each step minimises a quadratic model of the loss by conjugate gradients.

    q(d) = <g, d> + d'(G + damping (I + structural S)) d / 2        G, S as in co.curvature

The direction proposes: conjugate gradients from a share of the last solution, and among the iterates that they passed the
one with the lowest objective. The step rule judges: a backtracking line search along it, and the Levenberg-Marquardt rule
for the damping, by how much of what the model promised came true.

Martens, ICML (2010); Martens & Sutskever, ICML (2011). The objective may be penalised: its gradient then is that of
L + rho G, and the curvature that of L.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, NumericalError, real, whole_number
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Gradient
from ..gradients.method import Method
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .conjugate_gradients import conjugate_gradients
from .curvature import Curvature, refuse_if_no_curvature
from .step_rules import Armijo, Line

LINE_SEARCH = Armijo(c=1e-2, shrink=0.8, most=60)


@dataclass(frozen=True)
class HessianFreeReport:
    """What a step did."""

    before: float  # the objective
    after: float
    promised: float  # by the model
    damping: float  # of this step
    iterations: int  # of conjugate gradients
    rate: float  # of the line search; 0 if the step was refused
    norm: float  # of the gradient
    kept: float  # what came true of what was promised, by the whole step
    work: float  # gradients of a sample, by the curvature's sweeps


@dataclass
class HessianFree:
    """damping     lambda to begin with; the Levenberg-Marquardt rule moves it by 3/2 and 2/3, never below `least`
    structural  mu: how much the states' change counts beside the weights' own
    cg          conjugate gradient iterations of a step, at most
    progress    of the model, for each iteration, below which they end
    decay       share of the last solution that the next one begins with
    precondition  exponent of (diagonal of G + damping), the preconditioner, 3/4 in the paper; 0 for none, which is quicker on
                  the tasks of this library
    """

    damping: float = 1.0
    structural: float = 0.1
    cg: int = 100
    progress: float = 5e-4
    decay: float = 0.95
    precondition: float = 0.0
    least: float = 1e-8
    state: dict[str, Any] = field(default_factory=dict, repr=False)  # what the next step depends on

    def __post_init__(self) -> None:
        for name in ("damping", "structural", "progress", "decay", "precondition", "least"):
            real(f"hessian-free: {name}", getattr(self, name))
        whole_number("hessian-free: cg", self.cg)
        rules = {
            "damping": self.damping > 0, "structural": self.structural >= 0, "cg": isinstance(self.cg, int) and self.cg >= 1,
            "progress": 0 <= self.progress < 1, "decay": 0 <= self.decay <= 1, "precondition": 0 <= self.precondition <= 1,
            "least": self.least >= 0,
        }  # fmt: skip
        for name, holds in rules.items():
            value = getattr(self, name)
            if not holds or not math.isfinite(value):
                raise InputError(f"hessian-free: {name}={value!r} is out of its range.")
        self.state.setdefault("damping", float(self.damping))

    def step(
        self,
        net: Network,
        batch: Batch,
        loss: LossLike,
        curvature: Batch | None = None,
        method: Method | None = None,
    ) -> HessianFreeReport:
        """One step of the network's weights. batch: for the gradient and the objective; curvature: for the matrices, the same
        if not given; method: BPTT() or Penalised(...)."""
        refuse_if_no_curvature(net, loss)
        method = method or BPTT()
        e = method.evaluate(net, batch, loss)
        value = lambda: method.value(net, batch, loss)
        c = (
            Curvature(net, batch, loss, e.trajectory)
            if curvature is None
            else Curvature(net, curvature, loss)
        )
        return self.minimise(c, e.gradient, float(e.objective), value)

    def minimise(
        self, c: Curvature, gradient: Gradient, before: float, value: Callable[[], float]
    ) -> HessianFreeReport:
        """One step from where the objective is `before` and has this gradient. c: the curvature there; value(): the objective
        at the weights as they are."""
        g, damping = c.packing.pack(gradient), self.state["damping"]
        start = self.state.get("solution")
        start = self.decay * start.to(g) if start is not None and len(start) == len(g) else None
        scale = None
        if self.precondition:
            scale = (c.diagonal(seed=self.state.get("steps", 0)) + damping) ** self.precondition

        def model(v: Tensor) -> Tensor:
            return c.product(v, 1.0, damping * self.structural) + damping * v

        found = conjugate_gradients(model, -g, start, scale, self.cg, self.progress)
        theta = c.packing.pack({name: p.detach() for name, p in c.parameters.items()})
        d, promised, lowest = best_iterate(
            found.iterates, found.models, lambda d: self.at(c, theta + d, value)
        )
        seen = {0.0: before, 1.0: lowest}

        def along(a: float) -> float:
            seen[a] = seen[a] if a in seen else self.at(c, theta + a * d, value)
            return seen[a]

        rate = LINE_SEARCH(Line(float(d.norm()), before, float(g @ d), along))
        self.at(c, theta + rate * d, None)
        self.state["solution"] = found.iterates[-1]
        if not rate or found.models[-1] >= 0:
            del self.state[
                "solution"
            ]  # where it led nobody could go, or conjugate gradients did not come back from it
        self.state["steps"] = self.state.get("steps", 0) + 1
        # by the whole step, as the model promised it; of less than the objective can show, nothing is learned
        ratio = (lowest - before) / promised if promised < 0 else 0.0
        work = (
            found.products + 0.5 + 0.5 * bool(self.precondition)
        )  # the run itself, and the diagonal
        taken = HessianFreeReport(
            before,
            seen[rate],
            promised,
            damping,
            found.iterations,
            rate,
            float(g.norm()),
            ratio,
            work,
        )
        shown = abs(promised) > 8 * torch.finfo(g.dtype).eps * abs(before)
        factor = 2 / 3 if ratio > 0.75 or not shown else 1.0 if ratio >= 0.25 else 1.5
        self.state["damping"] = max(self.least, damping * factor)
        return taken

    @staticmethod
    def at(c: Curvature, theta: Tensor, value: Callable[[], float] | None) -> float:
        """Put the weights at theta; the objective there, infinite where it is not finite."""
        with torch.no_grad():
            for p, y in zip(c.parameters.values(), c.packing.unpack(theta).values(), strict=True):
                p.copy_(y)
        if value is None:
            return math.nan
        try:
            found = value()
        except NumericalError:
            return math.inf
        return found if math.isfinite(found) else math.inf


def best_iterate(
    iterates: list[Tensor], models: list[float], value: Callable[[Tensor], float]
) -> tuple[Tensor, float, float]:
    """From the last iterate back while the objective falls: (iterate, what the model promised, the objective there)."""
    best, lowest = len(iterates) - 1, value(iterates[-1])
    for i in reversed(range(len(iterates) - 1)):
        here = value(iterates[i])
        if here >= lowest:
            break
        best, lowest = i, here
    return iterates[best], models[best], lowest
