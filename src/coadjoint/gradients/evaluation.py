"""Evaluation: what a gradient method found at one point; its run and costates are computed when they are asked for."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError, Unsupported, check_kind
from ..networks.interface import Net, NetRun, run_function
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.torch_internals import change_count
from .temporal import Temporal

Gradient = dict[str, Tensor]


class GradientTuple(NamedTuple):
    """A gradient, and the values [B] of the objective it belongs to."""

    losses: Tensor
    penalties: Tensor
    gradient: Gradient
    decays: Tensor | None = None  # by which a penalty's weight is steered


def elsewhere(*_: Any) -> Any:
    raise Unsupported(
        "this evaluation was made in another process, and its run stayed there: ask for trajectory and costates where "
        "the gradient is taken, and send their tensors."
    )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a gradient method found at one point.

    losses, penalties  [B] per-sample values; loss, penalty, objective  their means
    gradient           by parameter name, of the objective = mean of weight_j (share loss_j + rho penalty_j); share is 1, or 0
                       where the penalty alone is minimised
    trajectory         the run (a NetRun); costates  of the loss alone
    """

    network: Net
    batch: Batch
    losses: Tensor
    penalties: Tensor
    rho: float
    gradient: Gradient
    run: Callable[[], NetRun]
    adjoint: Callable[[NetRun], Any]
    share: float = 1.0
    criterion: LossLike | None = None  # the loss that was asked for

    def __getstate__(self) -> dict[str, Any]:
        """For another process: all but the run, which stays where it was made."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return held | {"run": elsewhere, "adjoint": elsewhere}

    def __deepcopy__(self, memo: Any) -> Evaluation:
        held = {f.name: copy.deepcopy(getattr(self, f.name), memo) for f in fields(self)}
        return Evaluation(**held)

    def __repr__(self) -> str:
        return f"<Evaluation: loss {self.loss.item():.4g}, penalty {self.penalty.item():.4g}, |gradient| {self.norm:.3g}>"

    @functools.cached_property
    def loss(self) -> Tensor:
        return self.batch.mean(self.losses)

    @functools.cached_property
    def penalty(self) -> Tensor:
        return self.batch.mean(self.penalties)

    @functools.cached_property
    def objective(self) -> Tensor:
        return (
            self.share * self.loss + self.rho * self.penalty
            if self.share
            else self.rho * self.penalty
        )

    @functools.cached_property
    def trajectory(self) -> Any:
        return self.run()

    @functools.cached_property
    def costates(self) -> Any:
        """BaseCostates, or those of each layer (Recorded)."""
        return self.adjoint(self.trajectory)

    @functools.cached_property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.gradient.values()))

    def write_grad(self, net: Net) -> None:
        """Put the gradient where torch's optimisers look for it."""
        check_kind("the network", net, nn.Module, "a module")
        parameters = dict(net.named_parameters())
        unknown = set(self.gradient) - set(parameters)
        if unknown:
            raise InputError(
                f"this network has no parameter {', '.join(sorted(unknown))}; the gradient belongs to another one."
            )
        for name, parameter in parameters.items():
            parameter.grad = self.gradient[name].clone() if name in self.gradient else None

    def components(self) -> Any:
        """The gradient of the loss, taken apart into what each state adds to it: of a recurrence by W, R and b and by
        time steps (Temporal). A run of another kind may have `components(evaluation)`, and answers itself."""
        own = getattr(self.trajectory, "components", None)
        return Temporal.of(self) if own is None else own(self)

    temporal_components = components


def guard_weights(net: Net) -> Callable[[], None]:
    """A check, for what is computed when it is asked for, that the weights are still those of the evaluation."""
    before = [(name, p, change_count(p)) for name, p in net.named_parameters()]

    def check() -> None:
        changed = [name for name, p, count in before if change_count(p) != count]
        if changed:
            raise InputError(
                f"parameter {', '.join(changed)} has changed since this evaluation: ask for its trajectory, costates and "
                "curvature before the optimiser's step (Penalised keeps its costates)."
            )

    return check


def later(net: Net, batch: Batch, loss: LossLike, run: Callable[[], NetRun]) -> dict[str, Any]:
    """An Evaluation's trajectory and costates, found when they are asked for."""
    check = guard_weights(net)

    def adjoint(trajectory: NetRun) -> Any:
        check()
        with torch.no_grad():
            return trajectory.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)

    def checked() -> NetRun:
        check()
        return run()

    return {"run": checked, "adjoint": adjoint, "criterion": loss}


def without_run(
    net: Net,
    batch: Batch,
    loss: LossLike,
    found: GradientTuple,
    rho: float = 0.0,
    share: float = 1.0,
) -> Evaluation:
    """The Evaluation of a gradient whose run was not kept: run again, at once, if that is asked for."""
    asked = later(net, batch, loss, lambda: run_function(net)(batch))
    return Evaluation(
        net, batch, found.losses, found.penalties, rho, found.gradient, **asked, share=share
    )
