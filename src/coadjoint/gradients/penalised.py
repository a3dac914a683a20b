"""Gradient methods: net, batch, loss -> Evaluation. BPTT, Truncated, RTRL, Penalised.

All differentiate the mean over samples of per-sample values, so a gradient does not depend on how a batch is cut up.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, KindError, NumericalError, brief
from ..networks.network import Trajectory
from ..networks.readout import Net
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..objectives.penalties import log_decay, penalty
from ..objectives.schedules import Schedule
from ..objectives.weights import Steered
from ..sweeps.costates import Costates
from .evaluation import Evaluation, Gradient
from .method import Method, check_given, differentiate, in_segments, one_layer, replayed, trained
from .segments import Segmented, Segments, wanted

LARGE = 1e6  # a weight that is named where a derivative leaves its range: it may be the weight's doing


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
        self, G: Any, weight: float | Schedule | Steered = 1.0, segments: Segments = None, pretrain: int = 0
    ) -> None:
        self.penalty, self.weight, self.step, self.segments = penalty(G), weight, 0, wanted(segments)
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
            raise KindError(f"the schedule gave rho = {brief(given)} at step {step}; expected a number.") from None

    @property
    def share(self) -> float:
        """Of the loss in the present step's objective: none while the penalty is minimised alone."""
        return 0.0 if self.step < self.pretrain else 1.0

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        e = self.evaluate(net, batch, loss)
        self.step += 1
        return e

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_given(net, batch)
        self._turn()
        rho, share = self.rho(self.step), self.share
        if not math.isfinite(rho) or rho < 0:
            raise InputError(
                f"the schedule gave rho = {rho} at step {self.step}; expected a finite number, at least 0."
            )
        most = torch.finfo(net.V.dtype).max if hasattr(net, "V") else math.inf
        if rho > most:
            raise NumericalError(
                f"the penalty's weight rho = {rho:g} is outside the range of {str(net.V.dtype)[6:]}, at most {most:.2g}: "
                "lower the weight."
            )
        if rho == 0 and not share:
            raise InputError(
                f"pretraining minimises rho G alone, and rho is 0 at step {self.step}; expected a positive weight."
            )
        if self.segments is not None:
            trained(net)
            swept = Segmented(one_layer(net, "sweeps in segments"), batch, loss, self.segments)
            decays: list[Tensor] = []

            def checked(G: Any, lam: Costates, name: str) -> Tensor:
                decays.append(self._decay(lam))
                return check_penalty(G, lam, name)

            found = swept.penalised(self.penalty, self.penalty.name, rho, checked, share)
            self._steer(decays[0])
            return in_segments(net, batch, loss, found, rho, share)
        compute = functools.partial(self.compute, share=share)
        again = self.recordings(lambda *given: compute(*given)[:4], net, batch, loss, rho, share) if rho else None
        if again is not None:
            losses, (G, decay), gradient = again
            self._steer(decay)
            return replayed(net, batch, loss, (losses, G, gradient), rho, share)
        losses, (G, decay), gradient, run, lam = compute(net, batch, loss, rho)
        self._steer(decay)
        return Evaluation(
            net, batch, losses.detach(), G.detach(), rho, gradient, lambda: run, lambda _: lam.detach(), share, loss
        )

    @torch.no_grad()
    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        run = net(batch.u, batch.lengths, batch.x0)
        lam = run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        return float(batch.mean(self.share * lam.loss + self.rho(self.step) * self.penalty(lam)))

    def sweeps(self, net: Net, T: int) -> float:
        # the published Omega is differentiated by W alone: forward, and an adjoint each for the costates and the gradient
        return 10 if self.segments is not None else 3 if self.penalty.name == "omega-published" else 4

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, rho: Any, share: float = 1.0
    ) -> tuple[Tensor, Tensor, Gradient, Trajectory, Costates]:
        """-> losses, [penalties, decays] stacked, gradient, run, costates"""
        parameters = trained(net)
        with torch.enable_grad():
            run = net(batch.u, batch.lengths, batch.x0)
            lam = run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            G = check_penalty(self.penalty(lam), lam, self.penalty.name)
            objective = lam.loss if isinstance(rho, float) and rho == 0 else lam.loss + rho * G if share else rho * G
            try:
                gradient = differentiate(batch.mean(objective), parameters)
            except NumericalError as error:
                if not isinstance(rho, float) or rho < LARGE:
                    raise
                raise NumericalError(f"{error} The penalty's weight is rho = {rho:g}: lower it.") from None
            return lam.loss, torch.stack([G.detach(), self._decay(lam)]), gradient, run, lam

    def _decay(self, lam: Costates) -> Tensor:
        """What the weight is steered by, [B]; nothing is measured otherwise."""
        return log_decay(lam).to(lam.loss) if isinstance(self.weight, Steered) else torch.zeros_like(lam.loss)

    def _turn(self) -> None:
        """A new step takes the weight that follows from the decays of the one before; an earlier one begins again."""
        state = self.state
        if isinstance(self.weight, Steered) and self.step != state["step"]:
            measured = state["decay"] / state["samples"] if state["samples"] else math.nan
            rho = self.weight.next(state["rho"], measured) if self.step > state["step"] else self.weight.start
            state.update(step=self.step, rho=rho, decay=0.0, samples=0)

    def _steer(self, decays: Tensor) -> None:
        """Note the decays of a batch: a step may have several."""
        if isinstance(self.weight, Steered):
            known = decays.double()[~decays.isnan()]
            self.state["decay"] += float(known.sum())
            self.state["samples"] += len(known)


def check_penalty(G: Any, lam: Costates, name: str) -> Tensor:
    B = lam.loss.shape[0]
    if not isinstance(G, Tensor) or G.shape != (B,):
        got = ("a scalar" if G.dim() == 0 else f"shape {list(G.shape)}") if isinstance(G, Tensor) else type(G).__name__
        raise InputError(f"penalty '{name}' returned {got}; expected one value for each sample, shape [{B}].")
    if not G.requires_grad:
        raise InputError(
            f"penalty '{name}' does not depend on the costates it is given (nor on the states): its gradient is zero. Compute it from lam.lam, lam.norms() or lam.log_norms(), without detach()."
        )
    return G
