"""Recipes: optimisers by name, torch's and our own, with the schedule of their step size.

    co.train(net, task, optimiser=co.optimisers.adam(3e-4, schedule=co.optimisers.cosine()))
    co.train(net, task, optimiser=co.optimisers.sgd(1e-2, rule=co.optimisers.Galvan(1.0)))
    co.train(net, task, optimiser=co.optimisers.hessian_free(structural=0.1), batch=1000)

An Optimiser is a recipe: it makes a Stepper for the weights of one network.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import InputError, NumericalError, check_kind, choose, error_text
from ..networks.interface import Net
from ..networks.ridge import Ridge
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.checks import answers_late
from ..sweeps.torch_internals import optimisers_without_compiler
from .curvature import Curvature
from .directions import DIRECTIONS
from .hessian_free import HessianFree
from .schedules import Schedule, constant
from .step_rules import Constant, Rule
from .steppers import HessianFreeStepper, LBFGSStepper, RidgeStepper, Stepper, TorchStepper

Options = dict[str, Any]


class Recipe(NamedTuple):
    """What an optimiser's name stands for."""

    make: Callable[..., Any]
    defaults: Options  # that differ from those of `make`
    options: tuple[str, ...]  # that may be given


_SGD = ("momentum", "dampening", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay")
_ADAGRAD = ("lr_decay", "weight_decay", "initial_accumulator_value", "eps")
_RMSPROP = ("alpha", "eps", "weight_decay", "momentum", "centered")
_LBFGS = ("max_iter", "history_size", "line_search_fn", "tolerance_grad", "tolerance_change")
_HESSIAN_FREE = tuple(f.name for f in fields(HessianFree) if f.name != "state")

# fmt: off
OPTIMISERS: dict[str, Recipe] = {
    "sgd": Recipe(torch.optim.SGD, {}, ("weight_decay",)),
    "momentum": Recipe(torch.optim.SGD, {"momentum": 0.9}, _SGD),
    "nesterov": Recipe(
        torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, ("momentum", "weight_decay")
    ),
    "adagrad": Recipe(torch.optim.Adagrad, {}, _ADAGRAD),
    "adadelta": Recipe(torch.optim.Adadelta, {}, ("rho", "eps", "weight_decay")),
    "rmsprop": Recipe(torch.optim.RMSprop, {}, _RMSPROP),
    "adam": Recipe(torch.optim.Adam, {}, (*_ADAM, "amsgrad")),
    "adamw": Recipe(torch.optim.AdamW, {}, (*_ADAM, "amsgrad")),
    "adamax": Recipe(torch.optim.Adamax, {}, _ADAM),
    "nadam": Recipe(torch.optim.NAdam, {}, (*_ADAM, "momentum_decay")),
    "radam": Recipe(torch.optim.RAdam, {}, _ADAM),
    "lbfgs": Recipe(
        torch.optim.LBFGS, {"history_size": 10, "line_search_fn": "strong_wolfe"}, _LBFGS
    ),
    "hessian-free": Recipe(HessianFree, {}, (*_HESSIAN_FREE, "curvature")),
    "ridge": Recipe(Ridge, {"ridge": 1e-6}, ("ridge",)),
}
# fmt: on
# They choose direction and step themselves: no direction, step rule or clipping goes with them.
SELF_DIRECTED = ("lbfgs", "hessian-free", "ridge")
WITHOUT_STEP_SIZE = ("hessian-free", "ridge")
FUSED = ("adam", "adamw")  # torch has one kernel for all parameters; the state is the same


@dataclass(frozen=True)
class Optimiser:
    """An optimiser by name: a recipe that makes a Stepper for the weights of one network.

    lr         the step size
    options    torch's, or those of HessianFree
    schedule   of the step size
    direction  what the optimiser is given in place of the gradient, by its name in DIRECTIONS
    rule       how much of the optimiser's move is taken

    >>> Optimiser("momentum", 0.1).settings
    {'momentum': 0.9}
    """

    name: str
    lr: float
    options: Options = field(default_factory=dict)
    schedule: Schedule = field(default_factory=constant)
    direction: str = "steepest"
    rule: Rule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        known = OPTIMISERS[choose("optimiser", self.name, OPTIMISERS)].options
        if not (isinstance(self.lr, int | float) and 0 < self.lr < math.inf):
            raise InputError(f"lr must be a positive finite number; got {self.lr!r}.")
        check_kind("schedule", self.schedule, Schedule, "like co.optimisers.cosine()")
        check_kind("options", self.options, dict, "a dict")
        for option in self.options:
            choose(f"option of optimiser '{self.name}'", option, known)
        choose("direction", self.direction, DIRECTIONS)
        n = self.options.get("curvature")
        if n is not None and not (isinstance(n, int) and n >= 1):
            raise InputError(f"curvature must be a number of sequences, at least 1; got {n!r}.")
        if not callable(self.rule) or isinstance(self.rule, type):
            raise InputError(
                f"rule must be a step rule, co.optimisers.Armijo() for instance; got {self.rule!r}."
            )
        self._check_options()
        is_plain = self.direction == "steepest" and isinstance(self.rule, Constant)
        if self.name in SELF_DIRECTED and not is_plain:
            raise InputError(
                f"optimiser '{self.name}' chooses its own step: it takes no direction and no step "
                "rule."
            )

    def _check_options(self) -> None:
        """Refuse now what torch would refuse later, by making the optimiser for one number.

        Those without a step size are not torch's.
        """
        if self.name not in WITHOUT_STEP_SIZE:
            self.make([nn.Parameter(torch.zeros(1))])

    @property
    def settings(self) -> Options:
        """The options with their defaults, as torch takes them."""
        settings = {**OPTIMISERS[self.name].defaults, **self.options}
        if self.name == "lbfgs":
            # A line search takes up to 25 evaluations. torch allows 1.25 for each iteration, so
            # that with few iterations the first line search would be cut off.
            settings["max_eval"] = 25 * settings.get("max_iter", 20)
        return settings

    def make(
        self, parameters: Iterable[nn.Parameter], fused: bool = False
    ) -> torch.optim.Optimizer:
        """The torch optimiser for some parameters.

        fused: a step on all of them is one kernel of torch's, which FUSED optimisers have.
        """
        if self.name in WITHOUT_STEP_SIZE:
            raise InputError(
                f"optimiser '{self.name}' is not one of torch's. Pass it to co.train, which takes "
                "its steps."
            )
        settings = {**self.settings, "fused": True} if fused else self.settings
        try:
            with optimisers_without_compiler():
                torch_optimiser: torch.optim.Optimizer = OPTIMISERS[self.name].make(
                    parameters, lr=self.lr, **settings
                )
        except (ValueError, TypeError) as error:
            raise InputError(f"optimiser '{self.name}': {error_text(error)}.") from None
        return torch_optimiser

    def stepper(self, net: Net) -> Stepper:
        """The stepper that moves a network's weights with this optimiser."""
        options = self.settings
        if self.name == "hessian-free":
            options.pop("curvature", None)  # training draws the batches for it
            return HessianFreeStepper(HessianFree(**options))
        if self.name == "ridge":
            return RidgeStepper(Ridge(net, options["ridge"]))  # type: ignore[arg-type]
        trained = [p for p in net.parameters() if p.requires_grad]
        torch_optimiser = self.make(trained, self.name in FUSED and can_be_fused(trained))
        if self.name == "lbfgs":
            return LBFGSStepper(torch_optimiser)
        return TorchStepper(torch_optimiser, self.rule)

    def refuse_if_unsuited(self, net: Net, batch: Batch, loss: LossLike) -> None:
        """Refuse a network or loss that the optimiser cannot step, with the reason.

        The stepper and the curvature refuse it as they are made; numbers that overflow are no
        reason, and training reports them.
        """
        self.stepper(net)
        if self.name == "hessian-free":
            with contextlib.suppress(NumericalError):
                Curvature(net, batch, loss)


def can_be_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's kernel for all parameters at once can take the steps of these, on a GPU.

    It counts steps in float32, as torch does elsewhere if that is the default type: a state that
    was saved elsewhere can then be restored.
    """
    if not parameters or torch.get_default_dtype() is not torch.float32:
        return False
    for p in parameters:
        is_real = p.dtype in (torch.float32, torch.float64)
        if not is_real or not p.is_contiguous() or not answers_late(p):
            return False
    return True


def optimiser(
    name: str,
    lr: float | None = None,
    schedule: Schedule | None = None,
    *,
    direction: str = "steepest",
    rule: Rule | None = None,
    **options: Any,
) -> Optimiser:
    """An optimiser by its name in OPTIMISERS; options are torch's, or those of HessianFree.

    lr is 1e-3 if it is not given, and 1 for optimisers that choose their own step.

    >>> optimiser("sgd").lr, optimiser("lbfgs").lr
    (0.001, 1.0)
    """
    choose("optimiser", name, OPTIMISERS)
    if lr is None:
        lr = 1.0 if name in SELF_DIRECTED else 1e-3
    if schedule is None:
        schedule = constant()
    if rule is None:
        rule = Constant()
    return Optimiser(name, lr, options, schedule, direction, rule)


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
    """The Optimiser for what `train` may be given: an Optimiser itself, or a HessianFree."""
    if not isinstance(given, HessianFree):
        check_kind("optimiser", given, Optimiser, "like co.optimisers.adam(1e-3)")
        return given
    return optimiser("hessian-free", **{name: getattr(given, name) for name in _HESSIAN_FREE})
