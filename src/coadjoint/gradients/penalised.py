"""Penalised: penalised backpropagation, the gradient of the mean of L + rho G({lam_t})."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, KindError, NumericalError, brief
from ..networks.interface import Net, run_function
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..objectives.penalties import log_decay, penalty
from ..objectives.schedules import Schedule
from ..objectives.weights import Steered
from .captured import is_on_gpu
from .evaluation import Evaluation, GradientTuple, without_run
from .method import Method, by_name, check_arguments, one_layer, trained_parameters
from .segments import SegmentedGradient, Segments, parse_segments

LARGE = (
    1e6  # a weight that is named where a derivative leaves its range: it may be the weight's doing
)


class Penalised(Method):
    """Penalised backpropagation, mean of L + rho G({lam_t}): forward, adjoint, tangent, adjoint.

    G         a penalty's name, a Penalty, or any callable of Costates that returns [B] values
    weight    rho: a number, a schedule rho(step), or co.penalties.Steered; the step counts the calls of this object. It is
              never negative: what a penalty of negative weight would reward has no bound below
    segments  as in BPTT, for 10 sweeps instead of 4; G then may use norms, log-norms and log-ratios of costates
    pretrain  for so many steps rho G is minimised alone. The costates are those of L all the while: a network whose past
              fades is brought to life first, and then trained

    With a Steered weight, `state` holds the weight of the present step and the decays measured in it, of all its batches:
    their mean gives the weight of the next one.
    """

    def __init__(
        self,
        G: Any,
        weight: float | Schedule | Steered = 1.0,
        segments: Segments = None,
        pretrain: int = 0,
    ) -> None:
        self.penalty, self.weight, self.step, self.segments = (
            penalty(G),
            weight,
            0,
            parse_segments(segments),
        )
        number = isinstance(weight, numbers.Real) and math.isfinite(weight) and weight >= 0
        if not number and not callable(weight) and not isinstance(weight, Steered):
            raise InputError(
                f"weight must be a finite number, at least 0, or a function of the step; got {brief(weight)}."
            )
        if not isinstance(pretrain, int) or isinstance(pretrain, bool) or pretrain < 0:
            raise InputError(f"pretrain is a number of steps, at least 0; got {pretrain!r}.")
        self.pretrain = pretrain
        if isinstance(weight, Steered):
            self.state.update(step=0, rho=weight.start, decay=0.0, samples=0)

    def rho(self, step: int) -> float:
        if isinstance(self.weight, Steered):
            return self.state["rho"]
        if not callable(self.weight):
            return float(self.weight)
        given = self.weight(step)
        try:
            return float(given)
        except (TypeError, ValueError):
            raise KindError(
                f"the schedule gave rho = {brief(given)} at step {step}; expected a number."
            ) from None

    @property
    def share(self) -> float:
        """Of the loss in the present step's objective: none while the penalty is minimised alone."""
        return 0.0 if self.step < self.pretrain else 1.0

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        rho, share = self._weighed(net, batch)
        e = self._apart(net, batch, loss, rho, share)
        if e is None:
            e = self._kept(
                net, batch, loss, rho, share, *self.compute(net, batch, loss, rho, share)
            )
        self.step += 1
        return e

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """The same, without counting a step. (It does not stand between __call__ and `compute`: a shorter walk.)"""
        rho, share = self._weighed(net, batch)
        e = self._apart(net, batch, loss, rho, share)
        if e is None:
            e = self._kept(
                net, batch, loss, rho, share, *self.compute(net, batch, loss, rho, share)
            )
        return e

    def _weighed(self, net: Net, batch: Batch) -> tuple[float, float]:
        """rho and the loss's share in the present step, checked."""
        check_arguments(net, batch)
        self._turn()
        rho, share = self.rho(self.step), self.share
        if not math.isfinite(rho) or rho < 0:
            raise InputError(
                f"the schedule gave rho = {rho} at step {self.step}; expected a finite number, at least 0."
            )
        dtype = next(net.parameters()).dtype
        most = torch.finfo(dtype).max
        if rho > most:
            raise NumericalError(
                f"the penalty's weight rho = {rho:g} is outside the range of {str(dtype)[6:]}, at most {most:.2g}: "
                "lower the weight."
            )
        if rho == 0 and not share:
            raise InputError(
                f"pretraining minimises rho G alone, and rho is 0 at step {self.step}; expected a positive weight."
            )
        return rho, share

    def _apart(
        self, net: Net, batch: Batch, loss: LossLike, rho: float, share: float
    ) -> Evaluation | None:
        """The Evaluation in segments, or of a recorded gradient; None where neither is asked for or possible."""
        if self.segments is not None:
            found = self._in_segments(net, batch, loss, rho, share)
        elif rho and is_on_gpu(batch):
            compute = functools.partial(self.compute, share=share)
            again = self.captured(lambda *given: compute(*given)[:2], net, batch, loss, rho, share)
            if again is None:
                return None
            found = again
        else:
            return None
        self._steer(found.decays)
        return without_run(net, batch, loss, found, rho, share)

    def _in_segments(
        self, net: Net, batch: Batch, loss: LossLike, rho: float, share: float
    ) -> GradientTuple:
        trained_parameters(net)
        swept = SegmentedGradient(one_layer(net, "sweeps in segments"), batch, loss, self.segments)
        decays: list[Tensor | None] = []

        def checked(G: Any, lam: Any, name: str) -> Tensor:
            decays.append(self._decay(lam))
            return check_penalty(G, lam, name)

        found = swept.penalised_gradient(self.penalty, self.penalty.name, rho, checked, share)
        return found._replace(decays=decays[0])

    def _kept(
        self,
        net: Net,
        batch: Batch,
        loss: LossLike,
        rho: float,
        share: float,
        found: GradientTuple,
        run: Any,
        lam: Any,
    ) -> Evaluation:
        """The Evaluation of a gradient whose run and costates are at hand."""
        self._steer(found.decays)
        losses, penalties, gradient, _ = found
        return Evaluation(
            net, batch, losses, penalties, rho, gradient, lambda: run, lambda _: lam.detach(), share, loss
        )  # fmt: skip

    @torch.no_grad()
    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        check_arguments(net, batch)
        run = run_function(net)(batch)
        lam = run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        return float(batch.mean(self.share * lam.loss + self.rho(self.step) * self.penalty(lam)))

    def sweeps(self, net: Net, T: int) -> float:
        # the published Omega is differentiated by W alone: forward, and an adjoint each for the costates and the gradient
        return (
            10 if self.segments is not None else 3 if self.penalty.name == "omega-published" else 4
        )

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, rho: Any, share: float = 1.0
    ) -> tuple[GradientTuple, Any, Any]:
        """The gradient, the run and its costates."""
        parameters = trained_parameters(net)
        with torch.enable_grad():
            run = run_function(net)(batch)
            lam = run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            G = check_penalty(self.penalty(lam), lam, self.penalty.name)
            objective = (
                lam.loss
                if isinstance(rho, float) and rho == 0
                else lam.loss + rho * G
                if share
                else rho * G
            )
            try:
                grads = torch.autograd.grad(
                    batch.mean(objective), list(parameters.values()), allow_unused=True
                )
            except NumericalError as error:
                if not isinstance(rho, float) or rho < LARGE:
                    raise
                raise NumericalError(
                    f"{error} The penalty's weight is rho = {rho:g}: lower it."
                ) from None
            gradient = by_name(parameters, grads)
            return (
                GradientTuple(lam.loss.detach(), G.detach(), gradient, self._decay(lam)),
                run,
                lam,
            )

    def _decay(self, lam: Any) -> Tensor | None:
        """What the weight is steered by, [B]; nothing is measured otherwise."""
        return log_decay(lam).to(lam.loss) if isinstance(self.weight, Steered) else None

    def _turn(self) -> None:
        """A new step takes the weight that follows from the decays of the one before; an earlier one begins again."""
        state = self.state
        if isinstance(self.weight, Steered) and self.step != state["step"]:
            measured = state["decay"] / state["samples"] if state["samples"] else math.nan
            rho = (
                self.weight.next(state["rho"], measured)
                if self.step > state["step"]
                else self.weight.start
            )
            state.update(step=self.step, rho=rho, decay=0.0, samples=0)

    def _steer(self, decays: Tensor | None) -> None:
        """Note the decays of a batch: a step may have several."""
        if decays is not None:
            known = decays.double()[~decays.isnan()]
            self.state["decay"] += float(known.sum())
            self.state["samples"] += len(known)


def check_penalty(G: Any, lam: Any, name: str) -> Tensor:
    B = lam.loss.shape[0]
    if not isinstance(G, Tensor) or G.shape != (B,):
        got = (
            ("a scalar" if G.dim() == 0 else f"shape {list(G.shape)}")
            if isinstance(G, Tensor)
            else type(G).__name__
        )
        raise InputError(
            f"penalty '{name}' returned {got}; expected one value for each sample, shape [{B}]."
        )
    if not G.requires_grad:
        raise InputError(
            f"penalty '{name}' does not depend on the costates it is given (nor on the states): its gradient is zero. Compute it from lam.lam, lam.norms() or lam.log_norms(), without detach()."
        )
    return G
