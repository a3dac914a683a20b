"""The time of a Hessian-free step, compared with that of its unavoidable parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...gradients.bptt import BPTT
from ...objectives.batch import Batch
from ...optimisers.curvature import Curvature
from ...optimisers.hessian_free import HessianFree
from ...optimisers.weight_jacobian import WeightJacobian
from ...sweeps.affine import affine
from ...sweeps.chunks import sum_products
from .clock import format_ms, time_calls
from .problems import NetworkProblem, Size, size_text

HESSIAN_FREE = "hessian-free"
HESSIAN_FREE_SIZE: Size = (100, 200, 100)
ITERATIONS = 50  # of conjugate gradients
MOST_RATIO = 1.1  # a step may take this much longer than its parts


@dataclass(frozen=True)
class HessianFreeStep:
    """A Hessian-free step: its milliseconds, and those of its parts."""

    size: Size
    engine: str
    iterations: int  # of conjugate gradients; fewer than asked for if nothing is left to solve
    ms: float
    parts: float

    @property
    def ratio(self) -> float:
        """The time of the step divided by that of its parts."""
        return self.ms / self.parts

    def __str__(self) -> str:
        """The step in a sentence; the limit is set for one size only."""
        limit = ""
        if self.size == HESSIAN_FREE_SIZE:
            limit = f"; the limit is {MOST_RATIO:.2f}x"
        return (
            f"{HESSIAN_FREE} {size_text(self.size)}: a step of {self.iterations} iterations takes "
            f"{format_ms(self.ms)} ms, {self.ratio:.2f}x of {self.iterations} x (tangent + adjoint "
            f"+ their two weight products) + the gradient, {format_ms(self.parts)} ms{limit}."
        )

    def to_dict(self) -> dict[str, object]:
        """The step for JSON."""
        T, B, d = self.size
        return {
            "T": T,
            "B": B,
            "d": d,
            "engine": self.engine,
            "iterations": self.iterations,
            "ms": self.ms,
            "ms of its parts": self.parts,
            "ratio": self.ratio,
        }


def measure_step(size: Size, rounds: int) -> HessianFreeStep:
    """Time a Hessian-free step and its parts in turns, and take the least of each.

    The step begins at the last solution, as all steps but the first do, and each time at the same
    weights. Its parts are, for every iteration of conjugate gradients, a tangent, an adjoint and
    their two weight products, and one gradient.
    """
    problem = NetworkProblem("elman", size, "cpu")
    net = problem.net
    batch = Batch(problem.u, problem.y)
    begin = {name: weight.clone() for name, weight in problem.weights.items()}
    # progress 0: iterations do not end early because they gain little
    optimiser = HessianFree(cg=ITERATIONS, progress=0.0)
    optimiser.step(net, batch, "cross-entropy")  # the first step, whose solution the others have
    state = dict(optimiser.state)
    iterations: list[int] = []

    def step() -> None:
        """One step, from the same weights and the same last solution each time."""
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(begin[name])
        optimiser.state.clear()
        optimiser.state.update(state)
        iterations.append(optimiser.step(net, batch, "cross-entropy").iterations)

    _, B, d = size
    weights = Curvature(net, batch, "cross-entropy").weights
    assert isinstance(weights, WeightJacobian)
    plan = weights.swept.plan
    saved = weights.swept.saved
    W = problem.weights["W"]
    # numbers of an ordinary size: which they are does not matter to the time
    direction = torch.randn(d, weights.multiplied.shape[1]) / d
    lam_last = torch.randn(B, d)

    def parts() -> None:
        """What a step cannot avoid, for as many iterations as the last step made."""
        with torch.no_grad():
            for _ in range(iterations[-1]):
                ga = affine(weights.rows, weights.multiplied, direction, None)
                mu, _ = plan.engine.tangent(plan, saved, W, None, ga, None)
                # costates neither scaled nor kept: False, False
                _, delta, _ = plan.engine.adjoint(
                    plan, saved, W, mu, lam_last, None, None, False, False
                )
                sum_products(weights.rows, delta, weights.multiplied)
        BPTT()(net, batch, "cross-entropy")

    step_times = []
    parts_times = []
    for _ in range(rounds + 1):
        step_times.append(time_calls(step, 1, "cpu"))
        parts_times.append(time_calls(parts, 1, "cpu"))
    # the first round warms up
    fastest_step = min(step_times[1:])
    fastest_parts = min(parts_times[1:])
    return HessianFreeStep(size, problem.engine, iterations[-1], fastest_step, fastest_parts)
