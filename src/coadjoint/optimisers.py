"""Optimisers: torch's and our own by name, the schedule of their step size, and what takes a step with them.

    co.train(net, task, optimiser=co.optimisers.adam(3e-4, schedule=co.optimisers.cosine()))
    co.train(net, task, optimiser=co.optimisers.sgd(1e-2, direction="temporal", rule=co.directions.Galvan(1.0)))
    co.train(net, task, optimiser=co.optimisers.hessian_free(structural=0.1), batch=1000)

An Optimiser is a recipe. A Schedule is a factor on the step size: a function of the step alone (constant, exponential,
inverse-time, linear, cosine), or of what held-out losses have done (plateau). A Stepper moves the weights from a Point, of
which it may ask the objective's value, gradient and curvature around it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .batch import Batch
from .curvature import Curvature
from .directions import DIRECTIONS, Constant, Line, Rule, dot, norm
from .errors import InputError, NumericalError, brief, check_kind, choose, real, said, whole
from .gradients import Gradient
from .hessian_free import HessianFree
from .losses import LossLike
from .readout import Net
from .ridge import Ridge
from .runs import misfit
from .transport import Portable, remembered

_SGD = ("momentum", "dampening", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay")
_HF = tuple(f.name for f in fields(HessianFree) if f.name != "state")

OPTIMISERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {  # name: (class, its defaults here, options)
    "sgd": (torch.optim.SGD, {}, ("weight_decay",)),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, _SGD),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, ("momentum", "weight_decay")),
    "adagrad": (torch.optim.Adagrad, {}, ("lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
    "adadelta": (torch.optim.Adadelta, {}, ("rho", "eps", "weight_decay")),
    "rmsprop": (torch.optim.RMSprop, {}, ("alpha", "eps", "weight_decay", "momentum", "centered")),
    "adam": (torch.optim.Adam, {}, (*_ADAM, "amsgrad")),
    "adamw": (torch.optim.AdamW, {}, (*_ADAM, "amsgrad")),
    "adamax": (torch.optim.Adamax, {}, _ADAM),
    "nadam": (torch.optim.NAdam, {}, (*_ADAM, "momentum_decay")),
    "radam": (torch.optim.RAdam, {}, _ADAM),
    "lbfgs": (
        torch.optim.LBFGS,
        {"history_size": 10, "line_search_fn": "strong_wolfe"},
        ("max_iter", "history_size", "line_search_fn", "tolerance_grad", "tolerance_change"),
    ),
    "hessian-free": (HessianFree, {}, (*_HF, "curvature")),
    "ridge": (Ridge, {"ridge": 1e-6}, ("ridge",)),
}
OWN_PACE = ("lbfgs", "hessian-free", "ridge")  # find their way themselves: no direction, rule or clipping beside them
PACELESS = ("hessian-free", "ridge")  # have no step size


@dataclass(frozen=True)
class Schedule(Portable):
    """factor(progress, step): the step size as a share of lr; progress = step / steps in 0..1, step counts from 0.

    A schedule with a `patience` waits: after so many evaluations without a better held-out loss it multiplies by `decay`.
    """

    name: str
    factor: Callable[[float, int], float]
    decay: float = 1.0
    patience: int | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise InputError(f"warmup is a number of steps, at least 0; got {brief(self.warmup)}.")

    @property
    def _function(self) -> Callable[..., Any]:
        return self.factor

    def __call__(self, step: int, steps: int) -> float:
        ramp = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return ramp * self.factor(min(step / max(steps, 1), 1.0), step)


def _share(name: str, value: float, low: float = 0.0) -> float:
    if not isinstance(value, int | float) or not low <= value <= 1:
        raise InputError(f"{name} must lie in {low:g}..1; got {brief(value)}.")
    return value


@remembered
def constant(warmup: int = 0) -> Schedule:
    """lr"""
    return Schedule("constant", lambda progress, step: 1.0, warmup=warmup)


@remembered
def exponential(decay: float = 0.999, warmup: int = 0) -> Schedule:
    """lr decay^step"""
    _share("decay", decay)
    return Schedule("exponential", lambda progress, step: decay**step, warmup=warmup)


@remembered
def inverse_time(decay: float = 1e-3, warmup: int = 0) -> Schedule:
    """lr / (1 + decay step)"""
    real("decay", decay, 0)
    return Schedule("inverse-time", lambda progress, step: 1 / (1 + decay * step), warmup=warmup)


@remembered
def linear(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps"""
    _share("end", end)
    return Schedule("linear", lambda progress, step: 1 + (end - 1) * progress, warmup=warmup)


@remembered
def cosine(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps, along half a cosine"""
    _share("end", end)
    return Schedule("cosine", lambda p, step: end + (1 - end) * (1 + math.cos(math.pi * p)) / 2, warmup=warmup)


@remembered
def plateau(decay: float = 0.5, patience: int = 5, warmup: int = 0) -> Schedule:
    """lr times `decay` whenever `patience` evaluations have brought no better held-out loss"""
    _share("decay", decay)
    whole("patience", patience)
    return Schedule("plateau", lambda progress, step: 1.0, decay, patience, warmup)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "exponential": exponential,
    "inverse-time": inverse_time,
    "linear": linear,
    "cosine": cosine,
    "plateau": plateau,
}


@dataclass(frozen=True)
class Optimiser:
    """An optimiser by name, its step size lr, its options and the schedule of lr; the direction it is given in place of the
    gradient, and the rule that judges its moves."""

    name: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=constant)
    direction: str = "steepest"
    rule: Rule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        known = OPTIMISERS[choose("optimiser", self.name, OPTIMISERS)][2]
        if not (isinstance(self.lr, int | float) and 0 < self.lr < math.inf):
            raise InputError(f"lr must be a positive finite number; got {self.lr!r}.")
        check_kind("schedule", self.schedule, Schedule, "like co.optimisers.cosine()")
        check_kind("options", self.options, dict, "a dict")
        for option in self.options:
            choose(f"option of optimiser '{self.name}'", option, known)
        choose("direction", self.direction, DIRECTIONS)
        n = self.options.get("curvature")
        if n is not None and not (isinstance(n, int) and n >= 1):
            raise InputError(f"curvature is a number of sequences, at least 1; got {n!r}.")
        if not callable(self.rule) or isinstance(self.rule, type):
            raise InputError(f"a step rule is one of co.directions, Armijo() for instance; got {self.rule!r}.")
        self._check_options()
        if self.name in OWN_PACE and (self.direction != "steepest" or not isinstance(self.rule, Constant)):
            raise InputError(f"optimiser '{self.name}' finds its own way: it takes no direction and no step rule.")

    def _check_options(self) -> None:
        """What torch would refuse later, on a weight that nobody has."""
        if self.name not in PACELESS:
            self.make([nn.Parameter(torch.zeros(1))])

    @property
    def settings(self) -> dict[str, Any]:
        found = {**OPTIMISERS[self.name][1], **self.options}
        if self.name == "lbfgs":  # torch would leave a line search of few iterations without a single value
            found["max_eval"] = 25 * found.get("max_iter", 20)
        return found

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimiser."""
        of = OPTIMISERS[self.name][0]
        if self.name in PACELESS:
            raise InputError(f"optimiser '{self.name}' is none of torch's: co.train takes its steps.")
        try:
            return of(parameters, lr=self.lr, **self.settings)
        except (ValueError, TypeError) as error:
            raise InputError(f"optimiser '{self.name}': {said(error)}.") from None

    def stepper(self, net: Net) -> Stepper:
        """What takes steps with it."""
        options = self.settings
        if self.name == "hessian-free":
            options.pop("curvature", None)
            return Curved(HessianFree(**options))
        if self.name == "ridge":
            return Regressed(Ridge(net, options["ridge"]))
        torchs = self.make([p for p in net.parameters() if p.requires_grad])
        return Quasi(torchs) if self.name == "lbfgs" else Judged(torchs, self.rule)

    def try_on(self, net: Net, batch: Batch, loss: LossLike) -> None:
        """Refuse, with its reason, a network or loss that the optimiser cannot step."""
        self.stepper(net)
        if self.name == "hessian-free":
            with contextlib.suppress(NumericalError):
                Curvature(net, batch, loss)  # type: ignore[arg-type]


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
            return (found, slope) if math.isfinite(found) and math.isfinite(slope) else (math.inf, math.nan)

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


def whole_number(value: Any, least: int = 0) -> bool:
    """Whether a number, or a tensor of one, is whole and not less than `least`."""
    x = float(value)
    return least <= x < 2**53 and x == int(x)


def numbers_of(net: Net) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts and lists by dotted names: {0: {"d": [x, y]}} -> {"0.d.0": x, "0.d.1": y}. Nothing is left out but None."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    if items is None:
        return {} if values is None else {name: values}
    return {k: v for key, value in items for k, v in flat(value, f"{name}.{key}".lstrip(".")).items()}


class Judged:
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
        return flat(self.optimiser.state_dict()["state"])

    def after_a_step(self) -> dict[str, Any]:
        """The state that a first step leaves, found by taking one with a copy: its names, types and shapes are those of all
        later ones."""
        copy = deepcopy(self.optimiser)
        for group in copy.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        copy.step()
        return flat(copy.state_dict()["state"])

    def complaint(self, net: Net, state: dict[str, Any], begun: bool) -> str | None:
        expected = self.state if not begun and set(state) == set(self.state) else self.after_a_step()
        if wrong := misfit(expected, state):
            return wrong
        for name, value in state.items():
            slot = name.rpartition(".")[2]
            if slot == "step" and not whole_number(value, int(begun)):
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


class Quasi:
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
        return flat({key: value for key, value in found.items() if key != "al"})  # room to compute in

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
        vector = like.new_empty(numbers_of(net), device="meta")
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
                found = {int(k.split(".")[1]): v for k, v in state.items() if k.startswith(f"{key}.")}
                slot[key] = [found[i] for i in sorted(found)]
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": {0: slot} if slot else {}})


class Curved:
    """Hessian-free steps."""

    def __init__(self, way: HessianFree) -> None:
        self.way = way

    def step(self, at: Point, rate: float) -> dict[str, Any]:
        assert at.curvature is not None
        batch = at.curvature()
        c: Any = Curvature(at.net, batch, at.loss)  # type: ignore[arg-type]
        taken = self.way.minimise(c, at.gradient, at.objective, at.value)
        at.spend(taken.work * len(batch.sizes))
        return {"cg": taken.iterations, "damping": taken.damping, "share": taken.rate, "kept": taken.kept}

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
        solution = like.new_empty(numbers_of(net), device="meta")
        return misfit({"solution": solution} if rest else {}, rest)

    def restore(self, state: dict[str, Any]) -> None:
        self.way.state.clear()
        self.way.state.update(state)


class Regressed:
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
        wide = net.V.shape[1] + net.outputs + (net.b_o is not None)
        return misfit({"factor": torch.empty(wide, wide, dtype=torch.float64, device="meta")}, state)

    def restore(self, state: dict[str, Any]) -> None:
        self.way.state.update(state)


def optimiser(
    name: str,
    lr: float | None = None,
    schedule: Schedule | None = None,
    *,
    direction: str = "steepest",
    rule: Rule | None = None,
    **options: Any,
) -> Optimiser:
    """An optimiser by its name in OPTIMISERS; options are torch's, or those of co.hessian_free."""
    choose("optimiser", name, OPTIMISERS)
    lr = (1.0 if name in OWN_PACE else 1e-3) if lr is None else lr
    return Optimiser(
        name, lr, options, constant() if schedule is None else schedule, direction, Constant() if rule is None else rule
    )


sgd = functools.partial(optimiser, "sgd")
momentum = functools.partial(optimiser, "momentum")
nesterov = functools.partial(optimiser, "nesterov")
adagrad = functools.partial(optimiser, "adagrad")
rmsprop = functools.partial(optimiser, "rmsprop")
adam = functools.partial(optimiser, "adam")
adamw = functools.partial(optimiser, "adamw")
lbfgs = functools.partial(optimiser, "lbfgs")
ridge = functools.partial(optimiser, "ridge")
hessian_free = HessianFree  # co.train takes it as it is


def recipe_of(given: Optimiser | HessianFree) -> Optimiser:
    """An Optimiser, of what `train` may be given."""
    if not isinstance(given, HessianFree):
        check_kind("optimiser", given, Optimiser, "like co.optimisers.adam(1e-3)")
        return given
    return optimiser("hessian-free", **{name: getattr(given, name) for name in _HF})
