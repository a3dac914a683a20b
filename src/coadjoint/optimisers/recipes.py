"""Recipes: optimisers by name, torch's and our own, with the schedule of their step size.

    co.train(net, task, optimiser=co.optimisers.adam(3e-4, schedule=co.optimisers.cosine()))
    co.train(net, task, optimiser=co.optimisers.sgd(1e-2, direction="temporal", rule=co.optimisers.Galvan(1.0)))
    co.train(net, task, optimiser=co.optimisers.hessian_free(structural=0.1), batch=1000)

An Optimiser is a recipe: it makes a Stepper for the weights of one network.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from ..errors import InputError, NumericalError, check_kind, choose, error_text
from ..networks.interface import Net
from ..networks.ridge import Ridge
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .curvature import Curvature
from .directions import DIRECTIONS
from .hessian_free import HessianFree
from .schedules import Schedule, constant
from .step_rules import Constant, Rule
from .steppers import HessianFreeStepper, LBFGSStepper, RidgeStepper, Stepper, TorchStepper

_SGD = ("momentum", "dampening", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay")
_HF = tuple(f.name for f in fields(HessianFree) if f.name != "state")

OPTIMISERS: dict[
    str, tuple[Any, dict[str, Any], tuple[str, ...]]
] = {  # name: (class, its defaults here, options)
    "sgd": (torch.optim.SGD, {}, ("weight_decay",)),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, _SGD),
    "nesterov": (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
        ("momentum", "weight_decay"),
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {},
        ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    ),
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
SELF_DIRECTED = (
    "lbfgs",
    "hessian-free",
    "ridge",
)  # find their way themselves: no direction, rule or clipping beside them
WITHOUT_STEP_SIZE = ("hessian-free", "ridge")  # have no step size


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
            raise InputError(
                f"a step rule is one of co.directions, Armijo() for instance; got {self.rule!r}."
            )
        self._check_options()
        if self.name in SELF_DIRECTED and (
            self.direction != "steepest" or not isinstance(self.rule, Constant)
        ):
            raise InputError(
                f"optimiser '{self.name}' finds its own way: it takes no direction and no step rule."
            )

    def _check_options(self) -> None:
        """What torch would refuse later, on a weight that nobody has."""
        if self.name not in WITHOUT_STEP_SIZE:
            self.make([nn.Parameter(torch.zeros(1))])

    @property
    def settings(self) -> dict[str, Any]:
        found = {**OPTIMISERS[self.name][1], **self.options}
        if (
            self.name == "lbfgs"
        ):  # torch would leave a line search of few iterations without a single value
            found["max_eval"] = 25 * found.get("max_iter", 20)
        return found

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimiser."""
        of = OPTIMISERS[self.name][0]
        if self.name in WITHOUT_STEP_SIZE:
            raise InputError(
                f"optimiser '{self.name}' is none of torch's: co.train takes its steps."
            )
        try:
            return of(parameters, lr=self.lr, **self.settings)
        except (ValueError, TypeError) as error:
            raise InputError(f"optimiser '{self.name}': {error_text(error)}.") from None

    def stepper(self, net: Net) -> Stepper:
        """What takes steps with it."""
        options = self.settings
        if self.name == "hessian-free":
            options.pop("curvature", None)
            return HessianFreeStepper(HessianFree(**options))
        if self.name == "ridge":
            return RidgeStepper(Ridge(net, options["ridge"]))  # type: ignore[arg-type]
        torchs = self.make([p for p in net.parameters() if p.requires_grad])
        return LBFGSStepper(torchs) if self.name == "lbfgs" else TorchStepper(torchs, self.rule)

    def refuse_if_unsuited(self, net: Net, batch: Batch, loss: LossLike) -> None:
        """Refuse, with its reason, a network or loss that the optimiser cannot step."""
        self.stepper(net)
        if self.name == "hessian-free":
            with contextlib.suppress(NumericalError):
                Curvature(net, batch, loss)  # type: ignore[arg-type]


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
    lr = (1.0 if name in SELF_DIRECTED else 1e-3) if lr is None else lr
    return Optimiser(
        name,
        lr,
        options,
        constant() if schedule is None else schedule,
        direction,
        Constant() if rule is None else rule,
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
