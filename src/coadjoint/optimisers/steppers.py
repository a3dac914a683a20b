"""Steppers: what moves the weights from a Point.

A Point is where the weights are, with the objective's value, gradient and curvature around it, computed when a stepper asks.
TorchStepper takes torch's optimisers with a step rule, LBFGSStepper is L-BFGS, HessianFreeStepper Hessian-free, RidgeStepper ridge regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import NumericalError
from ..gradients.evaluation import Gradient
from ..gradients.restoring import misfit
from ..networks.interface import Net
from ..networks.ridge import Ridge
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .curvature import Curvature
from .directions import dot, norm
from .hessian_free import HessianFree
from .step_rules import Constant, Line, Rule


@dataclass
class Point:
    """Where a step begins: the weights, what was found there, and what may be asked about.

    direction  what is given to the optimiser: the gradient, or what a direction and clipping have made of it
    value      () -> the objective at the weights as they are now, on the batch of this step
    evaluate   () -> the same with its gradient
    batches    the data of this step; curvature: () -> those for its curvature
    spend      (samples' gradients) counts what an optimiser does by itself
    """

    net: Net
    objective: float
    gradient: Gradient
    direction: Gradient
    value: Callable[[], float]
    evaluate: Callable[[], tuple[float, Gradient]]
    loss: LossLike = "squared"
    batches: tuple[Batch, ...] = ()
    curvature: Callable[[], Batch] | None = None
    spend: Callable[[float], None] = lambda work: None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def put(self, weights: Gradient, move: Gradient | None = None, a: float = 0.0) -> None:
        """theta <- weights + a move"""
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(weights[name] if move is None or a == 0 else weights[name] + a * move[name])

    def finite_value(self) -> float:
        """The objective, infinite where it is not finite: a line search turns back there."""
        try:
            found = self.value()
        except NumericalError:
            return math.inf
        return found if math.isfinite(found) else math.inf

    def line(self, weights: Gradient, move: Gradient, rate: float) -> Line:
        """The objective along a move from the weights at which the point was found."""

        def value(a: float) -> float:
            self.put(weights, move, a)
            return self.finite_value()

        def tangent(a: float) -> tuple[float, float]:
            self.put(weights, move, a)
            try:
                found, gradient = self.evaluate()
            except NumericalError:
                return math.inf, math.nan
            slope = dot({n: gradient[n] for n in move if n in gradient}, move)
            return (
                (found, slope)
                if math.isfinite(found) and math.isfinite(slope)
                else (math.inf, math.nan)
            )

        slope = dot({n: self.gradient[n] for n in move if n in self.gradient}, move)
        return Line(norm(move) / rate, self.objective, slope, value, tangent)


class Stepper(Protocol):
    """What moves the weights of a Point's network. `state` is flat, tensors and numbers by name: what its next step depends
    on beside the weights."""

    def step(self, at: Point, rate: float) -> dict[str, Any]:
        """Move the weights; figures for the record."""

    @property
    def state(self) -> dict[str, Any]: ...

    def complaint(self, net: Net, state: dict[str, Any], begun: bool) -> str | None:
        """What is wrong with a state that was read from a file, for this network; None if it can be restored. begun: at least
        one step was taken, so that nothing may be missing."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def is_whole_number(value: Any, least: int = 0) -> bool:
    """Whether a number, or a tensor of one, is whole and not less than `least`."""
    x = float(value)
    return least <= x < 2**53 and x == int(x)


def count_trained(net: Net) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def flatten_state(values: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts and lists by dotted names: {0: {"d": [x, y]}} -> {"0.d.0": x, "0.d.1": y}. Nothing is left out but None."""
    items = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else None
    )
    if items is None:
        return {} if values is None else {name: values}
    return {
        k: v
        for key, value in items
        for k, v in flatten_state(value, f"{name}.{key}".lstrip(".")).items()
    }


class TorchStepper:
    """A torch optimiser proposes a move, a step rule says how much of it is taken."""

    def __init__(self, optimiser: torch.optim.Optimizer, rule: Rule) -> None:
        self.optimiser, self.rule = optimiser, rule

    def step(self, at: Point, rate: float) -> dict[str, Any]:
        for name, p in at.parameters.items():
            p.grad = at.direction.get(name)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if isinstance(self.rule, Constant):
            self.optimiser.step()
            return {}
        before = {name: p.detach().clone() for name, p in at.parameters.items()}
        self.optimiser.step()
        move = {name: p.detach() - before[name] for name, p in at.parameters.items()}
        if not all(torch.isfinite(m).all() for m in move.values()):
            return {}
        share = self.rule(at.line(before, move, rate))
        at.put(before, move, share)
        return {"share": share}

    @property
    def state(self) -> dict[str, Any]:
        return flatten_state(self.optimiser.state_dict()["state"])

    def after_a_step(self) -> dict[str, Any]:
        """The state that a first step leaves, found by taking one with a copy: its names, types and shapes are those of all
        later ones."""
        copy = deepcopy(self.optimiser)
        for group in copy.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        copy.step()
        return flatten_state(copy.state_dict()["state"])

    def complaint(self, net: Net, state: dict[str, Any], begun: bool) -> str | None:
        expected = (
            self.state if not begun and set(state) == set(self.state) else self.after_a_step()
        )
        if wrong := misfit(expected, state):
            return wrong
        for name, value in state.items():
            slot = name.rpartition(".")[2]
            if slot == "step" and not is_whole_number(value, int(begun)):
                return f"{name} is {float(value)!r}; expected a number of steps"
            if slot == "mu_product" and not 0 < float(value) < 1:
                return f"{name} is {float(value)!r}; expected a product of numbers between 0 and 1"
        return None

    def restore(self, state: dict[str, Any]) -> None:
        slots: dict[int, dict[str, Any]] = {}
        for name, value in state.items():
            i, key = name.split(".", 1)
            slots.setdefault(int(i), {})[key] = value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": slots})


class LBFGSStepper:
    """torch's L-BFGS: it asks for the objective and its gradient as often as its line search wants them."""

    LISTS = ("old_dirs", "old_stps", "ro")

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser

    def step(self, at: Point, rate: float) -> dict[str, Any]:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        first, asked = (at.objective, at.gradient), 0

        def closure() -> float:
            nonlocal asked
            try:
                value, gradient = at.evaluate() if asked else first
            except NumericalError:
                value, gradient = math.inf, at.gradient
            asked += 1
            for name, p in at.parameters.items():
                p.grad = gradient.get(name)
            return value if math.isfinite(value) else math.inf

        self.optimiser.step(closure)
        return {"evaluations": asked}

    @property
    def state(self) -> dict[str, Any]:
        found = self.optimiser.state_dict()["state"].get(0, {})
        return flatten_state(
            {key: value for key, value in found.items() if key != "al"}
        )  # room to compute in

    def complaint(self, net: Net, state: dict[str, Any], begun: bool) -> str | None:
        if not state and not begun:
            return None
        counts = ("func_evals", "n_iter")
        for name in counts:
            if not isinstance(state.get(name), int) or state[name] < 0:
                return f"{name} should be a number of evaluations or iterations; got {state.get(name)!r}"
        if set(state) == set(counts):  # where the gradient is as good as zero, it stops there
            return None
        like = self.optimiser.param_groups[0]["params"][0]
        vector = like.new_empty(count_trained(net), device="meta")
        one = like.new_empty((), device="meta")
        expected: dict[str, Any] = dict.fromkeys(("d", "prev_flat_grad"), vector)
        remembered = sum(name.startswith("old_dirs.") for name in state)
        if remembered > self.optimiser.param_groups[0]["history_size"]:
            return f"it remembers {remembered} steps; expected at most history_size"
        for i in range(remembered):
            expected |= {f"old_dirs.{i}": vector, f"old_stps.{i}": vector, f"ro.{i}": one}
        rest = {name: value for name, value in state.items() if name not in counts}
        for name in ("t", "H_diag", "prev_loss"):  # numbers, or tensors of one
            value = rest.pop(name, None)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = float(value)
            if not isinstance(value, int | float):
                return f"{name} should be a number; got {value!r}"
        return misfit(expected, rest)

    def restore(self, state: dict[str, Any]) -> None:
        slot: dict[str, Any] = {key: value for key, value in state.items() if "." not in key}
        if slot:
            for key in self.LISTS:
                found = {
                    int(k.split(".")[1]): v for k, v in state.items() if k.startswith(f"{key}.")
                }
                slot[key] = [found[i] for i in sorted(found)]
        self.optimiser.load_state_dict(
            {**self.optimiser.state_dict(), "state": {0: slot} if slot else {}}
        )


class HessianFreeStepper:
    """Hessian-free steps."""

    def __init__(self, way: HessianFree) -> None:
        self.way = way

    def step(self, at: Point, rate: float) -> dict[str, Any]:
        assert at.curvature is not None
        batch = at.curvature()
        c = Curvature(at.net, batch, at.loss)  # type: ignore[arg-type]
        taken = self.way.minimise(c, at.gradient, at.objective, at.value)
        at.spend(taken.work * len(batch.sizes))
        return {
            "cg": taken.iterations,
            "damping": taken.damping,
            "share": taken.rate,
            "kept": taken.kept,
        }

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.way.state)

    def complaint(self, net: Net, state: dict[str, Any], begun: bool) -> str | None:
        damping, steps = state.get("damping"), state.get("steps", None if begun else 0)
        if not isinstance(damping, int | float) or not 0 < damping < math.inf:
            return f"damping should be a positive number; got {damping!r}"
        if not isinstance(steps, int) or steps < int(begun):
            return f"steps should be a number of steps; got {steps!r}"
        rest = {name: value for name, value in state.items() if name not in ("damping", "steps")}
        like = next(p for p in net.parameters() if p.requires_grad)
        solution = like.new_empty(count_trained(net), device="meta")
        return misfit({"solution": solution} if rest else {}, rest)

    def restore(self, state: dict[str, Any]) -> None:
        self.way.state.clear()
        self.way.state.update(state)


class RidgeStepper:
    """A readout solved by ridge regression on all batches so far."""

    def __init__(self, way: Ridge) -> None:
        self.way = way

    def step(self, at: Point, rate: float) -> dict[str, Any]:
        for b in at.batches:
            self.way.add(b)
            at.spend(len(b.sizes) / 2)
        self.way.solve()
        return {}

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.way.state)

    def complaint(self, net: Net, state: dict[str, Any], begun: bool) -> str | None:
        if not state and not begun:
            return None
        own = self.way.net
        wide = own.V.shape[1] + own.outputs + (own.b_o is not None)
        return misfit(
            {"factor": torch.empty(wide, wide, dtype=torch.float64, device="meta")}, state
        )

    def restore(self, state: dict[str, Any]) -> None:
        self.way.state.update(state)
