"""Hessian-free: each step minimises a quadratic model of the loss by conjugate gradients.

    q(d) = <g, d> + d'(G + damping (I + structural S)) d / 2        G, S as in co.curvature

The direction proposes: conjugate gradients begin with a share of the last solution, and of the
iterates that they passed the one with the lowest objective is taken. The step rule judges: a
backtracking line search along it, and the Levenberg-Marquardt rule for the damping, by how much of
the decrease that the model predicted came true.

Martens, ICML (2010); Martens & Sutskever, ICML (2011). The objective may be penalised: its gradient
then is that of L + rho G, and the curvature that of L.
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
from ..networks.chain_run import ChainRun
from ..networks.interface import Net
from ..networks.trajectory import Trajectory
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .conjugate_gradients import CGSolution, conjugate_gradients
from .curvature import Curvature, refuse_if_no_curvature
from .step_rules import Armijo, Line

LINE_SEARCH = Armijo(c=1e-2, shrink=0.8, most=60)


@dataclass(frozen=True)
class HessianFreeReport:
    """What a step did."""

    before: float  # the objective
    after: float
    promised: float  # the change of the objective that the model predicted
    damping: float  # of this step
    iterations: int  # of conjugate gradients
    rate: float  # of the line search; 0 if the step was refused
    norm: float  # of the gradient
    kept: float  # the change of the objective by the whole step, as a share of `promised`
    work: float  # gradients of a sample, by the curvature's sweeps


@dataclass
class HessianFree:
    """Hessian-free optimisation, with structural damping.

    damping       lambda to begin with; the Levenberg-Marquardt rule multiplies it by 3/2 or 2/3,
                  and never lets it fall below `least`
    structural    mu: how much the states' change counts beside the weights' own
    cg            conjugate gradient iterations of a step, at most
    progress      relative decrease of the model per iteration, below which they end
    decay         share of the last solution that the next one begins with
    precondition  exponent of (diagonal of G + damping), the preconditioner: 3/4 in the paper, 0
                  for none, which is faster on the tasks of this library

    >>> HessianFree(damping=0.5).state
    {'damping': 0.5}
    """

    damping: float = 1.0
    structural: float = 0.1
    cg: int = 100
    progress: float = 5e-4
    decay: float = 0.95
    precondition: float = 0.0
    least: float = 1e-8
    # What the next step depends on: the damping, the last solution, and how many steps there were.
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("damping", "structural", "progress", "decay", "precondition", "least"):
            real(f"hessian-free: {name}", getattr(self, name))
        whole_number("hessian-free: cg", self.cg)
        in_range = {
            "damping": self.damping > 0,
            "structural": self.structural >= 0,
            "cg": isinstance(self.cg, int) and self.cg >= 1,
            "progress": 0 <= self.progress < 1,
            "decay": 0 <= self.decay <= 1,
            "precondition": 0 <= self.precondition <= 1,
            "least": self.least >= 0,
        }
        for name, holds in in_range.items():
            if not holds:
                raise InputError(f"hessian-free: {name}={getattr(self, name)!r} is out of range.")
        self.state.setdefault("damping", float(self.damping))

    def step(
        self,
        net: Net,
        batch: Batch,
        loss: LossLike,
        curvature: Batch | None = None,
        method: Method | None = None,
    ) -> HessianFreeReport:
        """Take one step of the network's weights.

        batch       for the gradient and the objective
        curvature   for the matrices; the same batch if not given
        method      BPTT() or Penalised(...)
        """
        refuse_if_no_curvature(net, loss)
        gradient_method = method or BPTT()
        e = gradient_method.evaluate(net, batch, loss)
        if curvature is None:
            run = e.trajectory
            assert isinstance(run, Trajectory | ChainRun)  # other networks are refused
            c = Curvature(net, batch, loss, run)  # the run of the gradient serves again
        else:
            c = Curvature(net, curvature, loss)

        def value() -> float:
            return gradient_method.value(net, batch, loss)

        return self.minimise(c, e.gradient, float(e.objective), value)

    def minimise(
        self, c: Curvature, gradient: Gradient, before: float, value: Callable[[], float]
    ) -> HessianFreeReport:
        """Take one step from weights where the objective is `before` and has this gradient.

        c         the curvature there
        value()   the objective at the current weights
        """
        g = c.packing.pack(gradient)
        damping = self.state["damping"]
        solved = self._solve(c, g, damping)
        weights = c.packing.pack({name: p.detach() for name, p in c.parameters.items()})

        def objective_at(weights: Tensor) -> float:
            return self.move_to(c, weights, value)

        d, promised, lowest = best_iterate(
            solved.iterates, solved.models, lambda d: objective_at(weights + d)
        )
        # The objective by the share a of d that is taken; no weights are evaluated twice.
        seen = {0.0: before, 1.0: lowest}

        def along(a: float) -> float:
            if a not in seen:
                seen[a] = objective_at(weights + a * d)
            return seen[a]

        rate = LINE_SEARCH(Line(float(d.norm()), before, float(g @ d), along))
        self.move_to(c, weights + rate * d, None)
        self._remember(solved, rate)
        # The whole step counts, as the model predicted that.
        ratio = (lowest - before) / promised if promised < 0 else 0.0
        self._adjust_damping(ratio, promised, before, torch.finfo(g.dtype).eps)
        work = solved.products + 0.5  # a forward sweep is half a gradient
        if self.precondition:
            work += 0.5  # the diagonal
        return HessianFreeReport(
            before=before,
            after=seen[rate],
            promised=promised,
            damping=damping,
            iterations=solved.iterations,
            rate=rate,
            norm=float(g.norm()),
            kept=ratio,
            work=work,
        )

    def _solve(self, c: Curvature, g: Tensor, damping: float) -> CGSolution:
        """Minimise <g, d> + d'(G + damping (I + structural S)) d / 2 by conjugate gradients.

        They begin with a share of the last step's solution, if there is one of this length.
        """
        last: Tensor | None = self.state.get("solution")
        start = None
        if last is not None and len(last) == len(g):
            start = self.decay * last.to(g)
        scale = None
        if self.precondition:
            # The number of the step is the seed: each step draws other signs.
            diagonal = c.diagonal(seed=self.state.get("steps", 0))
            scale = (diagonal + damping) ** self.precondition

        def multiply(v: Tensor) -> Tensor:
            return c.product(v, 1.0, damping * self.structural) + damping * v

        return conjugate_gradients(multiply, -g, start, scale, self.cg, self.progress)

    def _remember(self, solved: CGSolution, rate: float) -> None:
        """Keep the last iterate for the next step, if the step was taken and the model fell."""
        self.state["solution"] = solved.iterates[-1]
        if not rate or solved.models[-1] >= 0:
            del self.state["solution"]
        self.state["steps"] = self.state.get("steps", 0) + 1

    def _adjust_damping(self, ratio: float, promised: float, before: float, eps: float) -> None:
        """The Levenberg-Marquardt rule, by how much of the promised decrease came true.

        ratio: that share. Below 1/4 the damping grows, above 3/4 it shrinks (Martens' constants).
        eps: the rounding of the weights' dtype.
        """
        # A decrease that rounding hides says nothing against the model.
        is_visible = abs(promised) > 8 * eps * abs(before)
        factor = 1.5
        if ratio > 0.75 or not is_visible:
            factor = 2 / 3
        elif ratio >= 0.25:
            factor = 1.0
        self.state["damping"] = max(self.least, self.state["damping"] * factor)

    @staticmethod
    def move_to(c: Curvature, weights: Tensor, value: Callable[[], float] | None) -> float:
        """Set the weights; return the objective there, infinite where it is not finite.

        value: computes the objective; if it is None, nothing is computed and NaN is returned.
        """
        with torch.no_grad():
            parts = c.packing.unpack(weights).values()
            for p, y in zip(c.parameters.values(), parts, strict=True):
                p.copy_(y)
        if value is None:
            return math.nan
        try:
            objective = value()
        except NumericalError:
            return math.inf
        return objective if math.isfinite(objective) else math.inf


def best_iterate(
    iterates: list[Tensor], models: list[float], value: Callable[[Tensor], float]
) -> tuple[Tensor, float, float]:
    """The iterate reached by going back from the last one while the objective falls.

    models: the quadratic model's value at each iterate; value(d): the objective at d.
    Returns (iterate, value of the model there, the objective there).
    """
    best = len(iterates) - 1
    lowest = value(iterates[best])
    for i in reversed(range(best)):
        here = value(iterates[i])
        if here >= lowest:
            break
        best = i
        lowest = here
    return iterates[best], models[best], lowest
