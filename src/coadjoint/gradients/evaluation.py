"""Evaluation: losses, penalties and gradient of one batch; its run and costates on demand."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..errors import InputError, Unsupported, check_kind
from ..networks.interface import Net, NetRun, run_function
from ..networks.layers import Recorded
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.checks import answers_late
from ..sweeps.costates import BaseCostates
from ..sweeps.torch_internals import change_count, named_parameters
from .temporal import Temporal

Gradient = dict[str, Tensor]
RunCostates = BaseCostates | Recorded


class GradientTuple(NamedTuple):
    """A gradient, and the per-sample values [B] of the objective it belongs to."""

    losses: Tensor
    penalties: Tensor
    gradient: Gradient
    decays: Tensor | None = None  # [B], measured only where they steer the penalty's weight


def refuse_in_another_process(*_: object) -> NoReturn:
    """Raise an error in place of the run of an evaluation that was sent to another process."""
    raise Unsupported(
        "this evaluation was made in another process, and its run stayed there. Read trajectory "
        "and costates in the process that computed the gradient, and send their tensors."
    )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of a gradient method for one network and one batch.

    losses, penalties  [B] values of each sample; loss, penalty and objective are their means
    gradient           the gradient of the objective by parameter name, where
                       objective = mean over samples of weight_j (share loss_j + rho penalty_j)
    share              1, or 0 in steps that minimise the penalty alone
    trajectory         the run of the network over the batch
    costates           lam_t = dL/dx_t of the loss, without the penalty

    The run and the costates are stored, or computed when they are first read. If the parameters
    have changed by then, they can no longer be computed, and an InputError says so.

    Example: x_t = w x_{t-1} + u_t with u = (1, 0, 0), so x_3 = w^2, L = x_3^2 = w^4, dL/dw = 4 w^3.

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity")
        >>> for name, p in net.named_parameters():
        ...     _ = torch.nn.init.constant_(p, {"W": 0.5, "R": 1, "V": 1}.get(name, 0))
        >>> u = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1)
        >>> e = co.BPTT()(net, co.Batch(u, torch.zeros(1, 1)), "squared")
        >>> e.loss.item(), e.gradient["W"].item()
        (0.0625, 0.5)
        >>> e.costates.lam.flatten().tolist()  # lam_t = 2 x_3 w^(3 - t)
        [0.0625, 0.125, 0.25, 0.5]
    """

    network: Net
    batch: Batch
    losses: Tensor
    penalties: Tensor
    rho: float
    gradient: Gradient
    run: Callable[[], NetRun]
    adjoint: Callable[[NetRun], RunCostates]
    share: float = 1.0
    criterion: LossLike | None = None  # the loss as the caller gave it

    def __getstate__(self) -> dict[str, object]:
        """Return what is sent to another process: everything but the run, which cannot be."""
        state: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        state["run"] = refuse_in_another_process
        state["adjoint"] = refuse_in_another_process
        return state

    def __deepcopy__(self, memo: dict[int, object]) -> Evaluation:
        # Field by field, not by __getstate__: a copy in this process keeps its run.
        copies = {f.name: copy.deepcopy(getattr(self, f.name), memo) for f in fields(self)}
        return Evaluation(**copies)

    def __repr__(self) -> str:
        loss = self.loss.item()
        penalty = self.penalty.item()
        return f"<Evaluation: loss {loss:.4g}, penalty {penalty:.4g}, |gradient| {self.norm:.3g}>"

    @functools.cached_property
    def loss(self) -> Tensor:
        """The mean loss over the samples, a scalar."""
        return self.batch.mean(self.losses)

    @functools.cached_property
    def penalty(self) -> Tensor:
        """The mean penalty over the samples, a scalar; 0 for methods without one.

        NaN where its weight is 0 and it was not evaluated, see Penalised.
        """
        return self.batch.mean(self.penalties)

    @functools.cached_property
    def objective(self) -> Tensor:
        """What was differentiated: share loss + rho penalty, a scalar."""
        # 0 times an infinite or unknown value would be NaN.
        if not self.share:
            return self.rho * self.penalty
        if not self.rho:
            return self.loss if self.share == 1 else self.share * self.loss
        return self.share * self.loss + self.rho * self.penalty

    @functools.cached_property
    def trajectory(self) -> NetRun:
        """The run of the network over the batch: a co.Trajectory for a co.Network."""
        return self.run()

    @functools.cached_property
    def costates(self) -> RunCostates:
        """lam_t = dL/dx_t of each sample's loss; for a network of several layers, one for each."""
        return self.adjoint(self.trajectory)

    @functools.cached_property
    def norm(self) -> float:
        """The Euclidean norm of the gradient over all parameters."""
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.gradient.values()))

    def write_grad(self, net: Net) -> None:
        """Set `grad` of each parameter for a torch optimiser; None for those without a gradient."""
        check_kind("the network", net, nn.Module, "a module")
        parameters = dict(net.named_parameters())
        unknown = set(self.gradient) - set(parameters)
        if unknown:
            raise InputError(
                f"this network has no parameter {', '.join(sorted(unknown))}; "
                "the gradient belongs to another network."
            )
        for name, parameter in parameters.items():
            parameter.grad = None
            if name in self.gradient:
                parameter.grad = self.gradient[name].clone()

    def components(self) -> Temporal:
        """Split the gradient with respect to W, R and b into the contributions of time steps.

        A run of another kind of network may have its own method `components(evaluation)`, which is
        then called instead of `Temporal.of`.
        """
        components_of = getattr(self.trajectory, "components", Temporal.of)
        components: Temporal = components_of(self)
        return components

    temporal_components = components


class LateNumbers:
    """The values of scalars on their way from a GPU: asked for now, waited for by `wait`.

    What is launched in between does not have to be waited for. On a CPU the values are read at
    once.
    """

    def __init__(self, scalars: Sequence[Tensor]) -> None:
        self.values: list[float] = []
        self.copy: Tensor | None = None  # on the CPU, filled when the GPU comes to it
        self.copied: torch.cuda.Event | None = None  # None: by a stand-in of the tests
        if not any(map(answers_late, scalars)):
            self.values = [float(y) for y in scalars]
            return
        together = torch.stack([y.detach().double() for y in scalars])
        self.copy = together.to("cpu", non_blocking=True)
        if together.is_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(together.device))

    def wait(self) -> list[float]:
        """Return the values, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.copy is not None:
            self.values = self.copy.tolist()
            self.copy = None
        return self.values


def read_numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of scalars, read together from a GPU: each reading waits for the device."""
    return LateNumbers(scalars).wait()


def name_gradients(parameters: dict[str, nn.Parameter], grads: Sequence[Tensor | None]) -> Gradient:
    """Return `grads` under the names of their parameters, with zeros in place of None."""
    gradient = {}
    for (name, parameter), g in zip(parameters.items(), grads, strict=True):
        gradient[name] = torch.zeros_like(parameter) if g is None else g
    return gradient


def guard_weights(net: Net) -> Callable[[], None]:
    """Return a check that raises an InputError if a parameter of `net` has changed since now."""
    versions = [(name, p, change_count(p)) for name, p in named_parameters(net)]

    def check() -> None:
        changed = [name for name, p, count in versions if change_count(p) != count]
        if changed:
            raise InputError(
                f"parameter {', '.join(changed)} has changed since this evaluation. Read its "
                "trajectory, costates and curvature before the optimiser's step (Penalised "
                "stores its costates)."
            )

    return check


def make_evaluation(
    net: Net,
    batch: Batch,
    loss: LossLike,
    result: GradientTuple,
    run: Callable[[], NetRun],
    rho: float = 0.0,
    share: float = 1.0,
) -> Evaluation:
    """Return an Evaluation that calls `run` and computes the costates when they are first read.

    Args:
        net: The network.
        batch: The batch.
        loss: The loss as the caller gave it.
        result: The gradient with the losses and penalties of the samples.
        run: Returns the run of the network over the batch, stored or computed.
        rho: The weight of the penalty in the objective.
        share: The factor of the loss in the objective, 1 or 0.
    """
    check = guard_weights(net)

    def checked_run() -> NetRun:
        check()
        return run()

    def adjoint(trajectory: NetRun) -> RunCostates:
        check()
        with torch.no_grad():
            return trajectory.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)

    return Evaluation(
        net,
        batch,
        result.losses,
        result.penalties,
        rho,
        result.gradient,
        checked_run,
        adjoint,
        share,
        loss,
    )


def evaluation_without_run(
    net: Net,
    batch: Batch,
    loss: LossLike,
    result: GradientTuple,
    rho: float = 0.0,
    share: float = 1.0,
) -> Evaluation:
    """Return the Evaluation of a gradient whose run was not kept: reading it runs the net again.

    The arguments are those of `make_evaluation`.
    """
    return make_evaluation(net, batch, loss, result, lambda: run_function(net)(batch), rho, share)
