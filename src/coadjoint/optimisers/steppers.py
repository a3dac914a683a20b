"""Steppers: what moves the weights from a Point.

A Point is where the weights are, with the objective's value, gradient and curvature around it,
computed when a stepper needs them.

TorchStepper         torch's optimisers, with a step rule
LBFGSStepper         torch's L-BFGS
HessianFreeStepper   Hessian-free steps
RidgeStepper         a readout solved by ridge regression
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import NumericalError
from ..gradients.evaluation import Gradient
from ..gradients.restoring import misfit
from ..networks.interface import Net
from ..networks.ridge import Ridge
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.checks import answers_late
from ..sweeps.torch_internals import named_parameters, take_step
from .curvature import Curvature
from .directions import dot, norm
from .hessian_free import HessianFree
from .joined import JoinedStep, can_join
from .states import State, flatten_state, put_state, state_of
from .step_rules import Constant, Line, Rule

Figures = dict[str, float]  # of a step, for the record


def _count_nothing(work: float) -> None:
    """The default of Point.spend: the work is not counted."""


@dataclass
class Point:
    """Where a step begins: the weights, what is known there, and how to learn more.

    direction    the gradient as the optimiser is given it: after direction and clipping
    value()      the objective at the current weights, on the batch of this step
    evaluate()   the same with its gradient
    batches      the data of this step
    curvature()  the data on which the objective's curvature is taken, a part of `batches`
    spend(n)     counts the gradients of samples that an optimiser computes by itself
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
    spend: Callable[[float], None] = _count_nothing

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in named_parameters(self.net) if p.requires_grad}

    def put(self, weights: Gradient, move: Gradient | None = None, a: float = 0.0) -> None:
        """Set the weights: theta <- weights + a move."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                if move is None or a == 0:
                    p.copy_(weights[name])
                else:
                    p.copy_(weights[name] + a * move[name])

    def finite_value(self) -> float:
        """The objective, infinite where it is not finite: a line search turns back there."""
        try:
            value = self.value()
        except NumericalError:
            return math.inf
        return value if math.isfinite(value) else math.inf

    def line(self, weights: Gradient, move: Gradient, rate: float) -> Line:
        """The objective along `weights` + a move, a = 0..1; `weights` are those of this point.

        rate: the step size that the move contains as a factor. The size of the Line is that of the
        direction alone, ||move|| / rate.
        """

        def value(a: float) -> float:
            """The objective at `weights` + a move, where the weights are left."""
            self.put(weights, move, a)
            return self.finite_value()

        def tangent(a: float) -> tuple[float, float]:
            """The objective there and its derivative by a; (inf, nan) if one is not finite."""
            self.put(weights, move, a)
            try:
                value, gradient = self.evaluate()
            except NumericalError:
                return math.inf, math.nan
            slope = slope_along(gradient, move)
            if math.isfinite(value) and math.isfinite(slope):
                return value, slope
            return math.inf, math.nan

        slope = slope_along(self.gradient, move)
        return Line(norm(move) / rate, self.objective, slope, value, tangent)


def slope_along(gradient: Gradient, move: Gradient) -> float:
    """<gradient, move>, over the parameters that both have."""
    return dot({name: gradient[name] for name in move if name in gradient}, move)


class Stepper(Protocol):
    """What moves the weights of a Point's network."""

    def step(self, at: Point, rate: float) -> Figures:
        """Move the weights from the point `at`, with step size `rate`; return figures."""
        ...

    @property
    def state(self) -> State:
        """What the next step depends on beside the weights."""
        ...

    def complaint(self, net: Net, state: State, begun: bool) -> str | None:
        """What is wrong with a state that was read from a file; None if it can be restored.

        begun: at least one step was taken, so that nothing may be missing.
        """
        ...

    def restore(self, state: State) -> None:
        """Take over a state that has no complaint."""
        ...


def is_whole_number(value: Tensor | float, least: int = 0) -> bool:
    """Whether a number, or a tensor of one, is whole and not less than `least`.

    From 2^53 on every float is whole, so those do not count.
    """
    x = float(value)
    return least <= x < 2**53 and x == int(x)


def count_trained(net: Net) -> int:
    """How many numbers the trained parameters of a network hold."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def laid_out_like(p: Tensor, g: Tensor | None) -> Tensor | None:
    """A gradient on a GPU with the strides of its parameter, as torch's kernels for many need."""
    if g is None or not answers_late(g) or g.stride() == p.stride():
        return g
    return torch.empty_like(p, requires_grad=False).copy_(g)


class TorchStepper:
    """A torch optimiser proposes a move, a step rule says how much of it is taken."""

    def __init__(self, optimiser: torch.optim.Optimizer, rule: Rule) -> None:
        self._optimiser = optimiser
        self._joined: JoinedStep | None = None  # what has the optimiser's state, if anything has
        self.rule = rule

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """The torch optimiser, with its state."""
        if self._joined is not None:
            self._joined.separate()
            self._joined = None
        return self._optimiser

    def step(self, at: Point, rate: float) -> Figures:
        """Move the weights; the figure is the share of the move that was taken."""
        parameters = at.parameters
        if isinstance(self.rule, Constant):
            self.move(parameters, at.direction, rate)
            return {}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        self.move(parameters, at.direction, rate)
        move = {name: p.detach() - before[name] for name, p in parameters.items()}
        if not all(torch.isfinite(m).all() for m in move.values()):
            return {}  # no share of it would help; training refuses weights that are not finite
        share = self.rule(at.line(before, move, rate))
        at.put(before, move, share)
        return {"share": share}

    def move(
        self, parameters: Mapping[str, nn.Parameter], direction: Gradient, rate: float
    ) -> None:
        """Take the torch optimiser's step against a direction, with step size `rate`."""
        for name, p in parameters.items():
            p.grad = laid_out_like(p, direction.get(name))
        moved = list(parameters.values())
        if self._joined is None and can_join(self._optimiser, moved):
            self._joined = JoinedStep(self._optimiser, moved)
        if self._joined is not None and self._joined.fits(moved):
            self._joined.step(rate)
            return
        optimiser = self.optimiser
        for group in optimiser.param_groups:
            group["lr"] = rate
        take_step(optimiser)

    @property
    def state(self) -> State:
        """The torch optimiser's state."""
        return flatten_state(state_of(self.optimiser))

    def after_a_step(self) -> State:
        """The state after a first step, which a copy of the optimiser takes with zero gradients.

        Its names, types and shapes are those of all later states.
        """
        copy = deepcopy(self.optimiser)
        for group in copy.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        take_step(copy)
        return flatten_state(state_of(copy))

    def complaint(self, net: Net, state: State, begun: bool) -> str | None:
        """What is wrong with a state; None if nothing is.

        Without a step it may be that of a new optimiser; else it must look as after a step.
        begun: at least one step was taken.
        """
        expected = self.state
        if begun or set(state) != set(expected):
            expected = self.after_a_step()
        wrong = misfit(expected, state)
        if wrong:
            return wrong
        for name, value in state.items():
            slot = name.rpartition(".")[2]
            if slot == "step" and not is_whole_number(value, int(begun)):
                return f"{name} is {float(value)!r}; expected a number of steps"
            # NAdam's product of its momenta so far
            if slot == "mu_product" and not 0 < float(value) < 1:
                return f"{name} is {float(value)!r}; expected a product of numbers between 0 and 1"
        return None

    def restore(self, state: State) -> None:
        """Take over a state that has no complaint."""
        slots: dict[int, State] = {}  # by the number of the parameter
        for name, value in state.items():
            i, key = name.split(".", 1)
            slots.setdefault(int(i), {})[key] = value
        put_state(self.optimiser, slots)


class LBFGSStepper:
    """torch's L-BFGS, whose line search evaluates the objective and its gradient as it needs."""

    LISTS = ("old_dirs", "old_stps", "ro")
    COUNTS = ("func_evals", "n_iter")
    NUMBERS = ("t", "H_diag", "prev_loss")  # or tensors of one number

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser

    def step(self, at: Point, rate: float) -> Figures:
        """Move the weights; the figure is how often the objective was evaluated."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        evaluations = 0

        def closure() -> float:
            """What torch's L-BFGS calls: return the objective, and leave its gradient in p.grad."""
            nonlocal evaluations
            value = at.objective
            gradient = at.gradient
            if evaluations:  # the first is what the point knows already
                try:
                    value, gradient = at.evaluate()
                except NumericalError:
                    value = math.inf
            evaluations += 1
            for name, p in at.parameters.items():
                p.grad = gradient.get(name)
            return value if math.isfinite(value) else math.inf

        take_step(self.optimiser, closure)
        return {"evaluations": evaluations}

    @property
    def state(self) -> State:
        """The torch optimiser's state, without `al`, which is room to compute in."""
        state = state_of(self.optimiser).get(0, {})
        return flatten_state({key: value for key, value in state.items() if key != "al"})

    def complaint(self, net: Net, state: State, begun: bool) -> str | None:
        """What is wrong with a state; None if nothing is.

        begun: at least one step was taken, so that the state may not be empty.
        """
        if not state and not begun:
            return None
        for name in self.COUNTS:
            count = state.get(name)
            if not isinstance(count, int) or count < 0:
                return f"{name} should be a number of evaluations or iterations; got {count!r}"
        if set(state) == set(self.COUNTS):
            return None  # where the gradient is nearly zero, torch counts and stores no more
        group = self.optimiser.param_groups[0]
        like = group["params"][0]
        vector = like.new_empty(count_trained(net), device="meta")
        number = like.new_empty((), device="meta")
        remembered = sum(name.startswith("old_dirs.") for name in state)
        if remembered > group["history_size"]:
            return f"it remembers {remembered} steps; expected at most history_size"
        expected: State = {"d": vector, "prev_flat_grad": vector}
        for i in range(remembered):
            expected |= {f"old_dirs.{i}": vector, f"old_stps.{i}": vector, f"ro.{i}": number}
        rest = {name: value for name, value in state.items() if name not in self.COUNTS}
        for name in self.NUMBERS:
            value = rest.pop(name, None)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = float(value)
            if not isinstance(value, int | float):
                return f"{name} should be a number; got {value!r}"
        return misfit(expected, rest)

    def restore(self, state: State) -> None:
        """Take over a state that has no complaint."""
        slot: State = {key: value for key, value in state.items() if "." not in key}
        slots = {}
        if slot:
            for key in self.LISTS:
                slot[key] = self._restored_list(state, f"{key}.")
            slots[0] = slot
        put_state(self.optimiser, slots)

    @staticmethod
    def _restored_list(state: State, prefix: str) -> list[Tensor]:
        """The entries of a state that are named prefix0, prefix1, ..., in this order."""
        entries = {}
        for name, value in state.items():
            if name.startswith(prefix):
                entries[int(name.removeprefix(prefix))] = value
        return [entries[i] for i in sorted(entries)]


class HessianFreeStepper:
    """Hessian-free steps."""

    def __init__(self, optimiser: HessianFree) -> None:
        self.optimiser = optimiser

    def step(self, at: Point, rate: float) -> Figures:
        """Move the weights; the figures are those of the step's report. `rate` is not used."""
        assert at.curvature is not None
        batch = at.curvature()
        c = Curvature(at.net, batch, at.loss)
        report = self.optimiser.minimise(c, at.gradient, at.objective, at.value)
        at.spend(report.work * len(batch.sizes))
        return {
            "cg": report.iterations,
            "damping": report.damping,
            "share": report.rate,
            "kept": report.kept,
        }

    @property
    def state(self) -> State:
        """The damping, the last solution, and how many steps there were."""
        return dict(self.optimiser.state)

    def complaint(self, net: Net, state: State, begun: bool) -> str | None:
        """What is wrong with a state; None if nothing is.

        begun: at least one step was taken. The last solution may be missing even then.
        """
        damping = state.get("damping")
        if not isinstance(damping, int | float) or not 0 < damping < math.inf:
            return f"damping should be a positive number; got {damping!r}"
        steps = state.get("steps", None if begun else 0)
        if not isinstance(steps, int) or steps < int(begun):
            return f"steps should be a number of steps; got {steps!r}"
        rest = {name: value for name, value in state.items() if name not in ("damping", "steps")}
        expected: State = {}
        if rest:
            like = next(p for p in net.parameters() if p.requires_grad)
            expected["solution"] = like.new_empty(count_trained(net), device="meta")
        return misfit(expected, rest)

    def restore(self, state: State) -> None:
        """Take over a state that has no complaint."""
        self.optimiser.state.clear()
        self.optimiser.state.update(state)


class RidgeStepper:
    """A readout solved by ridge regression on all batches so far."""

    def __init__(self, ridge: Ridge) -> None:
        self.ridge = ridge

    def step(self, at: Point, rate: float) -> Figures:
        """Add the batches, and solve for the readout. `rate` is not used."""
        for batch in at.batches:
            self.ridge.add(batch)
            at.spend(len(batch.sizes) / 2)  # a forward sweep is half a gradient
        self.ridge.solve()
        return {}

    @property
    def state(self) -> State:
        """The factor of the normal equations."""
        return dict(self.ridge.state)

    def complaint(self, net: Net, state: State, begun: bool) -> str | None:
        """What is wrong with a state; None if nothing is.

        begun: at least one step was taken, so that the state may not be empty.
        """
        if not state and not begun:
            return None
        ridge_net = self.ridge.net
        # The factor has a column for each state read, each target, and b_o.
        width = ridge_net.V.shape[1] + ridge_net.outputs + (ridge_net.b_o is not None)
        factor = torch.empty(width, width, dtype=torch.float64, device="meta")
        return misfit({"factor": factor}, state)

    def restore(self, state: State) -> None:
        """Take over a state that has no complaint."""
        self.ridge.state.update(state)
