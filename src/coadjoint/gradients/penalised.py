"""Penalised: penalised backpropagation, the gradient of the mean of L + rho G({lam_t})."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError, KindError, Unsupported, brief
from ..networks.interface import Net, NetRun, holds_source, run_function
from ..objectives.batch import Batch
from ..objectives.draws import drawing
from ..objectives.losses import LossLike
from ..objectives.penalties import Penalty, log_decay, penalty
from ..objectives.penalty_type import layers_of
from ..objectives.schedules import Schedule
from ..objectives.state_parts import part_of_each
from ..objectives.weights import Steered
from ..sweeps.engines.cuda.repeatable import function_key
from .bptt import BPTT
from .by_hand import HandGradient
from .captured import is_on_gpu
from .evaluation import (
    Evaluation,
    GradientTuple,
    RunCostates,
    evaluation_without_run,
    name_gradients,
)
from .layer_by_hand import LayerGradient, ReadsRun
from .method import (
    Method,
    check_arguments,
    name_by_id,
    require_one_layer,
    trained_parameters,
)
from .penalty_weight import blaming_weight, refuse_if_out_of_range
from .segments import SegmentedGradient, Segments, parse_segments

PenaltyLike = str | Penalty | Callable[..., Tensor]


class Penalised(Method):
    """Penalised backpropagation: the gradient of the mean of L + rho G({lam_t}).

    It takes four sweeps: forward, adjoint, tangent, adjoint.

    Args:
        G: The name of a penalty, a Penalty, or any function of costates that returns [B] values.
        weight: rho: a number, a schedule rho(step), or co.penalties.Steered, where the step
            counts the calls of this object. It must not be negative, because the objective would
            have no lower bound.
        segments: As in BPTT, for 10 sweeps instead of 4. G may then use only norms, log-norms and
            log-ratios of costates, of the entire state or of one part of it.
        pretrain: The number of first steps that minimise rho G alone, so that costates no longer
            vanish when training begins. The costates are those of L in these steps too.
        hold: "source": the loss's own part of each costate, dL/dx_t by the readout, is a constant
            to the derivative of G. Then G gives no gradient to the readout, nor to states through
            the curvature of the loss; see docs/penalties.md. By default nothing is held.

    Where the weight of a schedule is 0, the gradient of a chain is that of the loss: the penalty is
    not evaluated, and reads NaN.

    With a Steered weight, `state` holds the weight of the present step and the decays measured in
    it, over all its batches. Their mean sets the weight of the next step.

    Example: x_t = w x_{t-1} + u_t with u = (1, 0, 0) and L = x_3^2 = w^4. All costates decay by the
    factor w, so the penalty log-ratio is G = (log w)^2, and its derivative is 2 log(w) / w.

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity")
        >>> for name, p in net.named_parameters():
        ...     _ = torch.nn.init.constant_(p, {"W": 0.5, "R": 1, "V": 1}.get(name, 0))
        >>> u = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1)
        >>> e = co.Penalised("log-ratio", 0.1)(net, co.Batch(u, torch.zeros(1, 1)), "squared")
        >>> print(f"{e.penalty.item():.4f} {e.gradient['W'].item():.4f}")  # 0.5 + 0.1 * -2.7726
        0.4805 0.2227
    """

    def __init__(
        self,
        G: PenaltyLike,
        weight: float | Schedule | Steered = 1.0,
        segments: Segments = None,
        pretrain: int = 0,
        hold: str | None = None,
    ) -> None:
        self.penalty = penalty(G)
        self.weight = weight
        self.step = 0
        self.segments = parse_segments(segments)
        self.hold = hold
        if holds_source(hold) and not self.penalty.reads_costates:
            raise InputError(
                f"hold='source' does nothing with penalty '{self.penalty.name}', which does not "
                "depend on the costates of the loss: leave it out."
            )
        is_weight = isinstance(weight, numbers.Real) and math.isfinite(weight) and weight >= 0
        if not is_weight and not callable(weight) and not isinstance(weight, Steered):
            raise InputError(
                "weight must be a finite number, at least 0, or a function of the step; "
                f"got {brief(weight)}."
            )
        if not isinstance(pretrain, int) or isinstance(pretrain, bool) or pretrain < 0:
            raise InputError(
                f"pretrain must be a number of training steps, at least 0; got {pretrain!r}."
            )
        self.pretrain = pretrain
        self._reads_run = False  # whether the penalty was seen to read more than costates
        if isinstance(weight, Steered):
            self.state.update(step=0, rho=weight.start, decay=0.0, samples=0)

    def rho(self, step: int) -> float:
        """Return the weight of the penalty at a step; a Steered one knows only the present step."""
        if isinstance(self.weight, Steered):
            return self.state["rho"]
        if not callable(self.weight):
            return float(self.weight)
        rho = self.weight(step)
        try:
            return float(rho)
        except (TypeError, ValueError):
            raise KindError(
                f"the schedule returned rho = {brief(rho)} at step {step}; expected a number."
            ) from None

    @property
    def summed_state(self) -> tuple[str, ...]:
        """Return the names of the sums from which a Steered weight is set."""
        return ("decay", "samples") if isinstance(self.weight, Steered) else ()

    def begin_step(self) -> None:
        """At a new step, set a Steered weight by what the last step measured."""
        self._update_steered_weight()

    @property
    def share(self) -> float:
        """The factor of the loss in the present objective: 0 while pretraining, then 1."""
        return 0.0 if self.step < self.pretrain else 1.0

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient of the present step's objective, and count the step."""
        batch = check_arguments(net, batch)
        rho = self._begin(net)
        evaluation = self._evaluate_without_run(net, batch, loss, rho)
        if evaluation is None:
            computed = self.compute(net, batch, loss, rho)
            evaluation = self._evaluate_with_run(net, batch, loss, rho, *computed)
        self.step += 1
        return evaluation

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the same as a call, without counting a step."""
        # __call__ repeats these lines, which spares it a Python call in every training step.
        batch = check_arguments(net, batch)
        rho = self._begin(net)
        evaluation = self._evaluate_without_run(net, batch, loss, rho)
        if evaluation is None:
            computed = self.compute(net, batch, loss, rho)
            evaluation = self._evaluate_with_run(net, batch, loss, rho, *computed)
        return evaluation

    def _begin(self, net: Net) -> float:
        """Return rho of the present step; one that the network's type cannot hold is refused."""
        self._update_steered_weight()
        rho = self.rho(self.step)
        if not math.isfinite(rho) or rho < 0:
            raise InputError(
                f"the schedule returned rho = {rho} at step {self.step}; expected a finite "
                "number, at least 0."
            )
        if rho > 1:  # which every type holds
            refuse_if_out_of_range(rho, next(net.parameters()).dtype)
        if rho == 0 and not self.share:
            raise InputError(
                f"pretraining minimises rho G alone, but rho is 0 at step {self.step}; expected "
                "a positive weight."
            )
        return rho

    def _evaluate_without_run(
        self, net: Net, batch: Batch, loss: LossLike, rho: float
    ) -> Evaluation | None:
        """Evaluate the loss alone, in segments or by a CUDA graph; None if none of them applies."""
        if self._leaves_out_penalty(net, rho):
            plain = BPTT().evaluate(net, batch, loss)
            return replace(plain, penalties=torch.full_like(plain.losses, math.nan))
        result: GradientTuple | None = None
        if self.segments is not None:
            result = self._in_segments(net, batch, loss, rho)
        elif rho and is_on_gpu(batch) and not self.penalty.draws:
            # A graph belongs to one `share`. It reads rho from a tensor, so it serves any
            # rho but 0, for which the objective is L alone (see _objective). A penalty that draws
            # at random would draw the same in every replay.
            penalty_key = function_key(self.penalty.value)
            if penalty_key is not None:
                kind = (self.share, self.hold, penalty_key)
                result = self.captured(self._compute_to_capture, net, batch, loss, rho, kind)
        if result is None:
            return None
        self._note_decays(result.decays)
        return evaluation_without_run(net, batch, loss, result, rho, self.share)

    def _leaves_out_penalty(self, net: Net, rho: float) -> bool:
        """Return whether the objective is the loss, so that the penalty is not evaluated.

        Of networks over time it is reported all the same.
        """
        return rho == 0 and getattr(net, "as_chain", None) is not None

    def _in_segments(self, net: Net, batch: Batch, loss: LossLike, rho: float) -> GradientTuple:
        """Compute the gradient in segments, and measure the decays on the way."""
        trained_parameters(net)  # refuses a network without any
        layer = require_one_layer(net, "sweeps in segments")
        segmented = SegmentedGradient(layer, batch, loss, self.segments)
        decays: list[Tensor | None] = []  # one entry, made by `check`

        def check(G: object, lam: RunCostates, name: str) -> Tensor:
            """Measure the decays, while the costates' norms are at hand, and check the penalty."""
            decays.append(self._measure_decay(lam))
            return check_penalty(G, lam, name)

        G = self.penalty
        held = holds_source(self.hold)
        result = segmented.penalised_gradient(G, rho, check, self.share, held)
        return result._replace(decays=decays[0])

    def _evaluate_with_run(
        self,
        net: Net,
        batch: Batch,
        loss: LossLike,
        rho: float,
        result: GradientTuple,
        run: NetRun,
        lam: RunCostates,
    ) -> Evaluation:
        """Return the Evaluation of a gradient whose run and costates are at hand."""
        self._note_decays(result.decays)
        return Evaluation(
            net,
            batch,
            result.losses,
            result.penalties,
            rho,
            result.gradient,
            lambda: run,
            lambda _: lam.detach(),
            self.share,
            loss,
        )

    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        """Compute the objective of the present step without its gradient."""
        batch = check_arguments(net, batch)
        if self._leaves_out_penalty(net, self.rho(self.step)):
            return super().value(net, batch, loss)
        # The costates of a single layer come from a separate sweep; those of other networks are
        # pulled through the graph of the run.
        needs_graph = getattr(net, "one_layer", None) is None
        with torch.set_grad_enabled(needs_graph):
            run = run_function(net)(batch)
        with torch.no_grad():
            lam = run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            with drawing(self.step):
                G = self.penalty(lam)
            return float(batch.mean(self.share * lam.loss + self.rho(self.step) * G))

    def sweeps(self, net: Net, T: int) -> float:
        """Return the cost of a gradient in sweeps over the sequence.

        It is 4, or 10 with segments, or 3 for the published Omega.
        """
        if self.segments is not None:
            # Each of the four passes repeats those before it in every segment: 1 + 2 + 3 + 4.
            return 10
        # The published Omega is differentiated by W alone: it needs a forward sweep and one
        # adjoint each for the costates and for the gradient.
        return 3 if self.penalty.name == "omega-published" else 4

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, rho: float | Tensor
    ) -> tuple[GradientTuple, NetRun, RunCostates]:
        """Return the gradient of the mean of share L + rho G, the run and its costates.

        While a CUDA graph is captured, rho is a tensor, to be filled in before each replay.
        """
        by_hand = None
        if self.penalty.reads_run_only:
            by_hand = HandGradient.of(net, batch, loss, twice=True)
        if by_hand is not None:
            return self._compute_by_hand(by_hand, rho)
        if self.penalty.reads_run_only and isinstance(rho, float) and not self._reads_run:
            layer = LayerGradient.of(net, batch, loss)
            try:
                if layer is not None:
                    return self._compute_layer(layer, rho)
            except ReadsRun:  # remembered: the next gradient goes through the graph at once
                self._reads_run = True
        parameters = trained_parameters(net)
        with torch.enable_grad():
            run = run_function(net)(batch)
            lam = self._costates(run, batch, loss)
            G = self._penalty_of(lam)
            objective = batch.mean(self._objective(lam.loss, G, rho))
            leaves = list(parameters.values())
            with blaming_weight(rho):
                grads = differentiate_by(leaves, objective)
            gradient = name_gradients(parameters, grads)
            decays = self._measure_decay(lam)
            return GradientTuple(lam.loss.detach(), G.detach(), gradient, decays), run, lam

    def _compute_layer(
        self, layer: LayerGradient, rho: float
    ) -> tuple[GradientTuple, NetRun, RunCostates]:
        """Return what `compute` does, without a graph of torch's over time."""
        with blaming_weight(rho):
            gradient, G, lam = layer.penalised_gradient(
                self._penalty_of,
                rho,
                self.share,
                holds_source(self.hold),
                self.penalty.with_slope,
            )
        decays = self._measure_decay(lam)
        return GradientTuple(lam.loss, G, gradient, decays), layer.run, lam

    def _compute_by_hand(
        self, by_hand: HandGradient, rho: float | Tensor
    ) -> tuple[GradientTuple, NetRun, RunCostates]:
        """Return what `compute` does, without a graph of torch's."""
        gradient, G, lam = by_hand.penalised_gradient(
            self._penalty_of, rho, self.share, self.penalty.with_slope, holds_source(self.hold)
        )
        named = name_by_id(by_hand.layers.trained, gradient)
        decays = self._measure_decay(lam)
        return GradientTuple(by_hand.losses, G, named, decays), by_hand.run, lam

    def _costates(self, run: NetRun, batch: Batch, loss: LossLike) -> RunCostates:
        """Return the costates, differentiable, with the sources held if that was asked for."""
        if self.hold is None:  # a run of one's own need not know `hold`
            return run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        if "hold" not in inspect.signature(run.costates).parameters:
            raise Unsupported(
                f"hold='{self.hold}' needs a run whose costates(...) takes hold=; that of "
                f"{type(run).__name__} does not. Leave it out, or use a network of coadjoint."
            )
        return run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce, hold=self.hold)

    def _penalty_of(self, lam: RunCostates) -> Tensor:
        """Return G of each sample, [B], as it is at the present step."""
        with drawing(self.step):
            return check_penalty(self.penalty(lam), lam, self.penalty.name)

    def _compute_to_capture(
        self, net: Net, batch: Batch, loss: LossLike, rho: Tensor
    ) -> tuple[GradientTuple, NetRun]:
        """Return what `compute` does without the costates, which no captured gradient has."""
        result, run, _ = self.compute(net, batch, loss, rho)
        return result, run

    def _objective(self, loss: Tensor, G: Tensor, rho: float | Tensor) -> Tensor:
        """Return share L + rho G of each sample, [B].

        Where rho is the number 0 this is L itself, bit for bit, even if G is infinite.
        """
        if isinstance(rho, float) and rho == 0:
            return loss
        if not self.share:
            return rho * G
        return loss + rho * G

    def _measure_decay(self, lam: RunCostates) -> Tensor | None:
        """Return each sample's decay of costates per step, [B], for a Steered weight; else None."""
        if not isinstance(self.weight, Steered):
            return None
        part = self.penalty.part  # what the penalty reads is what its weight is steered by
        return log_decay(part_of_each(lam, part) if part else lam).to(lam.loss)

    def _update_steered_weight(self) -> None:
        """At a new step, set a Steered weight by the mean decay of the last step.

        If `step` was set back since then, the weight starts over.
        """
        state = self.state
        if not isinstance(self.weight, Steered) or self.step == state["step"]:
            return
        rho = self.weight.start
        if self.step > state["step"]:
            samples = state["samples"]
            # A decay of NaN leaves the weight as it is.
            mean_decay = state["decay"] / samples if samples else math.nan
            rho = self.weight.next(state["rho"], mean_decay)
        state.update(step=self.step, rho=rho, decay=0.0, samples=0)

    def _note_decays(self, decays: Tensor | None) -> None:
        """Add the decays of a batch to those of the step, which may have several batches."""
        if decays is not None:
            known = decays.double()[~decays.isnan()]  # NaN: fewer than two nonzero costates
            self.state["decay"] += float(known.sum())
            self.state["samples"] += len(known)


def differentiate_by(leaves: Sequence[Tensor], objective: Tensor) -> Sequence[Tensor | None]:
    """Return the derivatives of the objective; None where it does not depend on a leaf."""
    if not objective.requires_grad:  # pretraining, where all costates are sources that are held
        return [None] * len(leaves)
    return torch.autograd.grad(objective, leaves, allow_unused=True)


def are_constant(lam: RunCostates) -> bool:
    """Return whether no parameter moves the costates: they are sources that are held."""
    return not any(layer.size.requires_grad for layer in layers_of(lam) or ())


def check_penalty(G: object, lam: RunCostates, name: str) -> Tensor:
    """Return G if it is a tensor [B] that depends on the costates; refuse anything else."""
    B = lam.loss.shape[0]
    if not isinstance(G, Tensor) or G.shape != (B,):
        got = type(G).__name__
        if isinstance(G, Tensor):
            got = "a scalar" if G.dim() == 0 else f"shape {list(G.shape)}"
        raise InputError(
            f"penalty '{name}' returned {got}; expected one value for each sample, shape [{B}]."
        )
    if not G.requires_grad and not are_constant(lam):
        raise InputError(
            f"penalty '{name}' does not depend on the costates it is given (nor on the states), "
            "so its gradient is zero. Compute it from lam.lam, lam.norms() or lam.log_norms(), "
            "without detach()."
        )
    return G
