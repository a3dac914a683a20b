"""Gradient methods: net, batch, loss -> Evaluation. BPTT, Truncated, RTRL, Penalised.

All differentiate the mean over samples of per-sample values, so a gradient does not depend on how a batch is cut up.
"""

from __future__ import annotations

import copy
import functools
import math
import numbers
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Batch
from .costates import Costates
from .errors import InputError, KindError, NumericalError, Unsupported, brief, check_kind, whole
from .graphs import Recordings
from .influence import Influence
from .layout import Layout, check_like, dense, lay_out, tensor_of
from .losses import LossLike, entries, sloped
from .network import Network, Trajectory
from .penalties import Schedule, Steered, log_decay, penalty
from .readout import Net, check_net
from .runs import misfit
from .segments import Found, Segmented, Segments, wanted
from .sweeps import Swept, derivatives, scale

Gradient = dict[str, Tensor]
CHUNK = 256  # steps whose Gram matrices are held at a time
LARGE = 1e6  # a weight that is named where a derivative leaves its range: it may be the weight's doing


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
    trajectory         the run; costates  of the loss alone
    """

    network: Net
    batch: Batch
    losses: Tensor
    penalties: Tensor
    rho: float
    gradient: Gradient
    run: Callable[[], Trajectory]
    adjoint: Callable[[Trajectory], Costates]
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
        return (
            f"<Evaluation: loss {self.loss.item():.4g}, penalty {self.penalty.item():.4g}, |gradient| {self.norm:.3g}>"
        )

    @functools.cached_property
    def loss(self) -> Tensor:
        return self.batch.mean(self.losses)

    @functools.cached_property
    def penalty(self) -> Tensor:
        return self.batch.mean(self.penalties)

    @functools.cached_property
    def objective(self) -> Tensor:
        return self.share * self.loss + self.rho * self.penalty if self.share else self.rho * self.penalty

    @functools.cached_property
    def trajectory(self) -> Trajectory:
        return self.run()

    @functools.cached_property
    def costates(self) -> Costates:
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

    def temporal_components(self) -> Temporal:
        """The gradient of the loss by W, R and b, taken apart into the contributions of the time steps."""
        return Temporal.of(self)


@dataclass(frozen=True, eq=False)
class Temporal:
    """grad_t = sum over samples of delta_t r(x_{t-1})' for W, delta_t u_t' for R, delta_t for b; sum_t grad_t is the gradient
    by W, R and b as the formula takes them (a structured W, not its raw parameter).

    All of it is float64. Norms come from Gram matrices of the batch, ||sum_b d_b r_b'||^2 = sum_{b,c} (d_b . d_c)(r_b . r_c): no array of T matrices.
    """

    network: Network
    layout: Layout
    into_W: Tensor  # [N, g d], of the mean over samples
    into_v: Tensor  # [N, g d]
    r: Tensor | None  # [N, k d]
    u: Tensor  # [N, inputs]

    @staticmethod
    def of(e: Evaluation) -> Temporal:
        if not isinstance(e.network, Network):
            raise Unsupported("temporal components are those of one layer: use a co.Network.")
        lam = e.costates
        net, run, layout = e.network, lam.trajectory.run, lam.trajectory.layout
        if not isinstance(run, Swept):
            raise Unsupported(
                "temporal components need the cell's formula: use engine 'cpu' or 'reference', not a step function or engine 'autograd'."
            )
        cell, rows, tape = run.plan.cell, layout.rows, run.tape
        with torch.no_grad():
            mantissa, k = lam.rows[rows.B :], lam.powers[rows.B :, None]
            op = derivatives.next_of(cell).pulled(("x",), ("a", "v") if cell.beside else ("a",))
            back = op((tape.x[rows.B :], tape.q), tape.a, tape.v, rows.prev(tape.x), tape.p, mantissa)
            share = layout.sort(e.batch.weights(lam.mantissa))[rows.sample][:, None] / rows.B
            whole = lambda y: scale(y.double(), k) * share  # the past may lie far below what float32 can hold
            delta = whole(back["a"] if back["a"] is not None else torch.zeros_like(tape.a))
            side = back.get("v")
            into_v = net.heard(delta, None if side is None else whole(side))
            r = derivatives.read(cell, rows.prev(tape.x)) if run.W is not None else None
            arrays = (None if y is None else y.detach().double() for y in (delta, into_v, r, e.trajectory.inputs))
            return Temporal(net, layout, *arrays)  # type: ignore[arg-type]

    @staticmethod
    def near(e: Evaluation) -> tuple[Temporal, list[int]]:
        """The components in units of their own, grad_t 2^{-m_t} with m_t the largest exponent of a costate at step t, so that
        they hold at any scale; and m_1..m_T."""
        lam = e.costates
        parts = lam.trajectory.layout.rows.states(lam.powers)
        tops = [int(part.max()) for part in parts]
        unit = torch.cat([torch.full_like(part, m) for part, m in zip(parts, tops, strict=True)])
        near = Costates(lam.trajectory, lam.rows, lam.powers - unit, lam.loss)
        return Temporal.of(replace(e, run=lambda: e.trajectory, adjoint=lambda _: near)), tops[1:]

    def norms(self) -> dict[str, Tensor]:
        """||grad_t||, [T] float64, for W, R, b (those the network has) and for all of them jointly ("joint")."""
        squares: dict[str, list[Tensor]] = {}
        masked, T = self.network.mask is not None, self.layout.rows.T
        wide = [None if y is None else self.layout.padded(y) for y in (self.into_W, self.into_v, self.r, self.u)]
        for begin in range(0, T, CHUNK):
            dw, dv, r, u = (None if y is None else y[begin : begin + CHUNK] for y in wide)
            gram = lambda y: y @ y.transpose(1, 2)  # of the samples, at each step
            assert dw is not None and dv is not None and u is not None  # noqa: PT018
            each = gram(dv)
            found = {"R": (each * gram(u)).sum((1, 2))}
            if self.network.b is not None:
                found["b"] = each.sum((1, 2))
            if r is not None and masked:
                steps = range(begin + 1, begin + 1 + len(r))
                found["W"] = torch.stack([self.at(t)["W"].square().sum() for t in steps])
            elif r is not None:
                found["W"] = (gram(dw) * gram(r)).sum((1, 2))
            for name, value in found.items():
                squares.setdefault(name, []).append(value.clamp(min=0))
        out = {name: torch.cat(values) for name, values in squares.items()}
        out["joint"] = torch.stack(list(out.values())).sum(0)
        return {name: value.sqrt() for name, value in out.items()}

    def at(self, t: int) -> Gradient:
        """grad_t itself, for one step t in 1..T."""
        if not isinstance(t, int) or isinstance(t, bool) or not 1 <= t <= self.layout.rows.T:
            raise InputError(f"t must lie in 1..{self.layout.rows.T}; got {brief(t)}.")
        dw, dv, r, u = self._step(t)
        out = {"R": dv.T @ u}
        if self.network.b is not None:
            out["b"] = dv.sum(0)
        if r is not None:
            out["W"] = dw.T @ r if self.network.mask is None else (dw.T @ r) * self.network.mask.double()
        return out

    def weighted(self, w: Tensor) -> Gradient:
        """sum_t w_t grad_t, by W, R and b; w [T]."""
        rows = self.layout.rows
        if tuple(dense("w", w).shape) != (rows.T,):
            raise InputError(f"there is one weight for each of {rows.T} time steps; got shape {list(w.shape)}.")
        each = w.to(self.into_v)[rows.time.to(w.device) - 1][:, None]
        of_v = self.into_v * each
        out = {"R": of_v.T @ self.u}
        if self.network.b is not None:
            out["b"] = of_v.sum(0)
        if self.r is not None:
            W = (self.into_W * each).T @ self.r
            out["W"] = W if self.network.mask is None else W * self.network.mask
        return out

    def _step(self, t: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        rows = self.layout.rows
        here = slice(rows.starts[t - 1], rows.starts[t])
        return (
            self.into_W[here].double(),
            self.into_v[here].double(),
            None if self.r is None else self.r[here].double(),
            self.u[here].double(),
        )


def one_layer(net: Net, what: str) -> Network:
    """The network, for a method that takes sequences apart; others refuse it."""
    net.whole(what)
    assert isinstance(net, Network)
    return net


def unchanged(net: Net) -> Callable[[], None]:
    """A check, for what is computed when it is asked for, that the weights are still those of the evaluation."""
    before = [(name, p, p._version) for name, p in net.named_parameters()]

    def check() -> None:
        changed = [name for name, p, version in before if p._version != version]
        if changed:
            raise InputError(
                f"parameter {', '.join(changed)} has changed since this evaluation: ask for its trajectory, costates and "
                "curvature before the optimiser's step (Penalised keeps its costates)."
            )

    return check


def later(net: Net, batch: Batch, loss: LossLike, run: Callable[[], Trajectory]) -> dict[str, Any]:
    """An Evaluation's trajectory and costates, found when they are asked for."""
    check = unchanged(net)

    def adjoint(trajectory: Trajectory) -> Costates:
        check()
        with torch.no_grad():
            return trajectory.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)

    def checked() -> Trajectory:
        check()
        return run()

    return {"run": checked, "adjoint": adjoint, "criterion": loss}


def check_given(net: Any, batch: Any) -> None:
    """What a gradient is taken of."""
    check_net(net)
    check_kind("the batch", batch, Batch, "a co.Batch(u, y)")


class Method:
    """A way to a gradient: `method(net, batch, loss)` returns an Evaluation."""

    segments: Segments = None

    @functools.cached_property
    def recordings(self) -> Recordings:
        """Gradients that repeat, on a GPU."""
        return Recordings()

    @functools.cached_property
    def state(self) -> dict[str, float]:
        """What the next gradient depends on beside its arguments and the step: to be saved with a run, and put back."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, here or in another process, begins with: recordings belong to this process and its networks."""
        return {name: value for name, value in self.__dict__.items() if name != "recordings"}

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        return self.evaluate(net, batch, loss)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        raise NotImplementedError

    @torch.no_grad()
    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        """The objective alone, without its gradient."""
        check_given(net, batch)
        run = net(batch.u, batch.lengths, batch.x0)
        return float(batch.mean(run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)))

    def sweeps(self, net: Net, T: int) -> float:
        """Sweeps over a sequence of T steps that its gradient takes."""
        return 2

    def per_sample(self, net: Net, batch: Batch, loss: LossLike) -> Gradient:
        """The gradient of each sample's own objective, stacked: by parameter name, [B, ...]. Their mean is the gradient.

        One evaluation for each sample: a method's own definition, at B small sweeps."""
        check_given(net, batch)
        net.still("gradients of single samples")
        B, before = lay_out(batch.u, batch.lengths, net.inputs, net.V)[0].rows.B, dict(self.state)
        found = [self.evaluate(net, batch.select([j], net.readout), loss).gradient for j in range(B)]
        self.state.update(before)
        return {name: torch.stack([g[name] for g in found]) for name in found[0]}


def trained(net: Net) -> dict[str, nn.Parameter]:
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError(
            "every parameter of this network is frozen (requires_grad=False): there is no gradient to take."
        )
    return parameters


def differentiate(objective: Tensor, parameters: dict[str, nn.Parameter], keep: bool = False) -> Gradient:
    """d objective / d parameters; zeros for parameters it does not reach. keep: the graph, for costates later."""
    grads = torch.autograd.grad(objective, list(parameters.values()), retain_graph=keep, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), grads, strict=True)
    }


def in_segments(
    net: Net, batch: Batch, loss: LossLike, found: Found, rho: float = 0.0, share: float = 1.0
) -> Evaluation:
    """The Evaluation of a gradient in segments; its trajectory and costates are computed, at once, if they are asked for."""
    later_ = later(net, batch, loss, lambda: net(batch.u, batch.lengths, batch.x0))
    return Evaluation(net, batch, found.losses, found.penalties, rho, found.gradient, **later_, share=share)


def replayed(
    net: Net, batch: Batch, loss: LossLike, found: tuple[Any, ...], rho: float = 0.0, share: float = 1.0
) -> Evaluation:
    """The Evaluation of a recorded gradient; its trajectory and costates are computed if they are asked for."""
    losses, penalties, gradient = found
    later_ = later(net, batch, loss, lambda: net(batch.u, batch.lengths, batch.x0))
    return Evaluation(net, batch, losses, penalties, rho, gradient, **later_, share=share)


class BPTT(Method):
    """Backpropagation through time: forward, adjoint.

    segments  sweep the sequence in so many segments, "auto" for about sqrt(T): the same gradient in O(sqrt T) memory, for
              3 sweeps instead of 2 (co.segments). `trajectory` and `costates` of its Evaluation then are not kept: asking
              for them sweeps again and takes the full memory.
    """

    def __init__(self, segments: Segments = None) -> None:
        self.segments = wanted(segments)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_given(net, batch)
        if self.segments is not None:
            trained(net)
            swept = Segmented(one_layer(net, "sweeps in segments"), batch, loss, self.segments)
            return in_segments(net, batch, loss, swept.plain())
        found = self.recordings(self.compute, net, batch, loss, 0.0)
        if found is not None:
            return replayed(net, batch, loss, found)
        losses, none, gradient, run = self.compute(net, batch, loss)
        return Evaluation(net, batch, losses.detach(), none, 0.0, gradient, **later(net, batch, loss, lambda: run))

    def sweeps(self, net: Net, T: int) -> float:
        return 2 if self.segments is None else 3

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, _: Any = None
    ) -> tuple[Tensor, Tensor, Gradient, Trajectory]:
        with torch.enable_grad():
            run = net(batch.u, batch.lengths, batch.x0)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            keep = not isinstance(
                net, Network
            )  # the costates of several layers are pulled through what lies between them
            return losses, torch.zeros_like(losses), differentiate(batch.mean(losses), trained(net), keep), run


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


class Truncated(Method):
    """Truncated backpropagation through time: every k1 steps, the losses of the last k1 steps are pulled back k2 steps.

    States are carried through the whole sequence (and out of it: give `trajectory.state` as the next batch's x0); only the
    gradient is cut. k1 = k2 cuts the sequence into pieces; k1 = 1 is the most exact; k2 >= T is BPTT. Each sample is cut
    from its own first step to its own last, so its gradient does not depend on the others.
    """

    def __init__(self, k1: int, k2: int) -> None:
        counts = all(isinstance(k, int) and not isinstance(k, bool) for k in (k1, k2))
        if not counts or not 1 <= k1 <= k2:
            raise InputError(f"Truncated takes whole numbers 1 <= k1 <= k2; got k1={brief(k1)}, k2={brief(k2)}.")
        whole("k2", k2)
        self.k1, self.k2 = k1, k2

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_given(net, batch)
        net.whole("truncated backpropagation")
        layout, flat = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        u, lengths = layout.padded(flat), layout.lengths
        with torch.no_grad():
            run = net(u, None if layout.rows.uniform else lengths, batch.x0)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        total = {name: torch.zeros_like(p) for name, p in trained(net).items()}
        for end in range(1, layout.rows.T + 1):
            whole = lengths > end if end % self.k1 == 0 else torch.zeros_like(lengths, dtype=torch.bool)
            index = (whole | (lengths == end) if net.readout == "every" else lengths == end).nonzero()[:, 0]
            if len(index):
                gradient = self._window(net, batch, loss, u, lengths, run.x, index, end)
                total = {name: total[name] + g for name, g in gradient.items()}
        return Evaluation(
            net, batch, losses, torch.zeros_like(losses), 0.0, total, **later(net, batch, loss, lambda: run)
        )

    def sweeps(self, net: Net, T: int) -> float:
        pulled = min(self.k2, T)
        return 1 + 2 * pulled / (min(self.k1, T) if net.readout == "every" else T)

    def _window(
        self, net: Net, batch: Batch, loss: LossLike, u: Tensor, lengths: Tensor, x: Tensor, index: Tensor, end: int
    ) -> Gradient:
        """The gradient of the samples' losses of the last k1 steps up to `end`, pulled back k2 steps."""
        begin, fresh = max(0, end - self.k2), end - ((end - 1) % self.k1 + 1)
        start = batch.x0 if batch.x0 is None or batch.x0.dim() == 1 else batch.x0[index]
        y = None if batch.y is None else tensor_of("the target y", batch.y)
        mask = None if batch.mask is None else tensor_of("the loss mask", batch.mask)
        weight = batch.weights(u)
        with torch.enable_grad():
            run = net(u[begin:end, index], x0=start if begin == 0 else x[begin, index].detach())
            if net.readout == "last":
                y, mask = None if y is None else y[index], None if mask is None else mask[index]
                values = run.loss(loss, y, mask=mask, reduce=batch.reduce)
            else:
                full = u.new_ones(u.shape[:2]) if mask is None else mask.to(u.dtype)
                window = full[begin:end, index].clone()
                window[: fresh - begin] = 0
                values = run.loss(loss, None if y is None else y[begin:end, index], mask=window)
                if batch.reduce == "mean":
                    on = (torch.arange(len(full))[:, None] < lengths).to(full.device)
                    count = torch.where(on, full, 0).sum(0)[index]
                    values = values / torch.where(count == 0, 1, count)
            return differentiate((weight[index] * values).sum() / len(lengths), trained(net))

    def stream(self, net: Net, batch: int = 1, x0: Tensor | None = None) -> Windows:
        """Learn from a stream that need not end: `s.take(u_t, y_t, loss)` gives a gradient every k1 steps."""
        return Windows(net, self.k1, self.k2, batch, x0)


class RTRL(Method):
    """Real-time recurrent learning: the influence S_t = dx_t/dtheta is carried forward, S_t = J_t S_{t-1} + f_theta.

    The gradient of BPTT, without the past: memory does not grow with T, but is twice B x n x parameters. Any cell or step
    function; of a formula its own slopes make J_t and f_theta (co.influence), of others torch.func.
    """

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_given(net, batch)
        layout, flat = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        rows = layout.rows
        T, B, every = rows.T, rows.B, net.readout == "every"
        u, lengths = layout.padded(flat), layout.lengths
        run_lengths = None if rows.uniform else lengths
        y = None if batch.y is None else tensor_of("the target y", batch.y)
        weight = batch.weights(u)
        with torch.no_grad():
            losses = net(u, run_lengths, batch.x0).loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
        if every:
            mask = flat.new_ones(T, B) if batch.mask is None else tensor_of("the loss mask", batch.mask).to(flat)
            mask = torch.where((torch.arange(T)[:, None] < lengths).to(mask.device), mask, 0)
            count = mask.sum(0)
            factor = 1 / torch.where(count == 0, 1, count) if batch.reduce == "mean" else flat.new_ones(B)
        else:
            mask = flat.new_ones(B) if batch.mask is None else tensor_of("the loss mask", batch.mask).to(flat)
            factor = mask if batch.reduce == "sum" else (mask != 0).to(flat.dtype)
        there = (mask != 0).cpu()  # as lengths are
        stream = Stream(net, B, batch.x0)
        total = {name: torch.zeros_like(p) for name, p in trained(net).items()}
        for t in range(T):
            going = lengths > t
            stream.advance(u[t], None if going.all() else going)
            counts = going & there[t] if every else (lengths == t + 1) & there
            if counts.any():
                target = None if y is None else (y[t] if every else y)
                w = weight * factor * (mask[t] if every else 1.0)
                g, *_ = stream.gradient(target, loss, counts, w)
                total = {name: total[name] + v for name, v in g.items()}
        run = lambda: net(u, run_lengths, batch.x0)
        return Evaluation(net, batch, losses, torch.zeros_like(losses), 0.0, total, **later(net, batch, loss, run))

    def sweeps(self, net: Net, T: int) -> float:
        return 2 + sum(p.numel() for name, p in trained(net).items() if name not in ("V", "b_o"))

    def stream(self, net: Net, batch: int = 1, x0: Tensor | None = None) -> Stream:
        """Learn online: `s.step(u_t, y_t, loss)` gives one gradient for each arriving step."""
        return Stream(net, batch, x0)


class Stream:
    """`batch` streams in parallel: their states x [B, n] and influences S_t = dx_t/dtheta, {parameter: [B, n, ...]}."""

    def __init__(self, net: Net, batch: int, x0: Tensor | None = None) -> None:
        check_net(net)
        check_streams(batch)
        net.plain("real-time recurrent learning")
        net.still("real-time recurrent learning")
        self.net, self.batch, self.given = one_layer(net, "one step at a time"), batch, x0
        self.names = [n for n in trained(net) if n not in ("V", "b_o")]
        self.shown = {name: p for name, p in trained(net).items() if name in ("V", "b_o")}
        self.carried = Influence(self.net, self.names, batch)
        self.t = 0
        self.kept = 0  # steps of the past
        self.reset()

    @property
    def influence(self) -> dict[str, Tensor]:
        return self.carried.of

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Start again from the initial state, all streams or the given ones."""
        index = torch.arange(self.batch) if rows is None else tensor_of("rows", rows)
        if index.is_floating_point() or index.is_complex():
            raise KindError(f"rows must be whole numbers; got {index.dtype}.")
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.batch):
            raise InputError(f"rows must lie in 0..{self.batch - 1}; got {index.tolist()}.")
        with torch.no_grad():
            start = self.net.start(self.given, self.batch).clone()
            if rows is None:
                self.x = start
            self.x[index] = start[index]
            self.carried.begin(index, self.given is None)

    def advance(self, u: Tensor, going: Tensor | None = None) -> None:
        """One step of the streams that are `going`."""
        self.x = self.carried.advance(u, self.x, None if going is None else going.nonzero()[:, 0])
        self.t += 1

    def gradient(
        self, y: Tensor | None, loss: LossLike, counts: Tensor | None = None, weight: Tensor | None = None
    ) -> tuple[Gradient, Tensor, Tensor]:
        """The gradient of (1 / B) sum of weight_j L_j over the streams that count, at their present states; the L_j, and a.

        lam_t = V' dL/da is the costate of this step's loss alone: dL/dtheta = lam_t' S_t."""
        net, index = self.net, None if counts is None else counts.nonzero()[:, 0]
        x, y = (self.x, y) if index is None else (self.x[index], None if y is None else y[index])
        with torch.no_grad():
            h = net.shown(x)
            a = nn.functional.linear(h, net.V, net.b_o)
            values, by_a = sloped(loss, a, y, net.output)
            if weight is not None:
                by_a = by_a * (weight if index is None else weight[index])[:, None]
            by_a = by_a / self.batch if self.batch > 1 else by_a
            gradient = self.carried.pull(unshown(net, by_a @ net.V), index)
            if "V" in self.shown:
                gradient["V"] = by_a.t() @ h
            if "b_o" in self.shown:
                gradient["b_o"] = by_a.sum(0)
        return gradient, values, a

    def take(self, u: Tensor, y: Any, loss: LossLike) -> tuple[Tensor, Tensor, Gradient]:
        """Take u_t [B, inputs] and y_t: what the network says, a_t [B, outputs], before it learns; the loss of each stream;
        the gradient of their mean."""
        self.advance(checked(self, u))
        gradient, losses, a = self.gradient(target_of(y, self.batch), loss)
        return a, losses, gradient

    def rest(self, loss: LossLike) -> None:
        """What a sequence that ends here has still to learn: nothing."""

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on, beside the weights."""
        return {"x": self.x, "S": self.carried.S}

    def complaint(self, state: dict[str, Tensor]) -> str | None:
        """What is wrong with a state that was read from a file; None if it can be restored."""
        return misfit(self.state(), state)

    def restore(self, state: dict[str, Tensor], t: int) -> None:
        self.x, self.t = state["x"].to(self.x), t
        self.carried.S.copy_(state["S"])

    def step(self, u: Tensor, y: Any, loss: LossLike) -> Evaluation:
        """Take u_t [B, inputs] (or [inputs] for one stream) and y_t; the gradient of this step's mean loss by all parameters."""
        u, x0 = checked(self, u), self.x.clone()
        _, losses, gradient = self.take(u, y, loss)
        y = target_of(y, self.batch)
        target = y if y is None or self.net.readout == "last" else y[None]
        batch = Batch(u[None], target, x0=x0)
        run = later(self.net, batch, loss, lambda: self.net(u[None], x0=x0))
        return Evaluation(self.net, batch, losses, torch.zeros_like(losses), 0.0, gradient, **run)


def unshown(net: Network, bar: Tensor) -> Tensor:
    """The costate of a state of which the slots `shows` are read: the transpose of `shown`."""
    if net.slots == 1:
        return bar
    parts = dict(zip(net.shows, bar.split(net.hidden, -1), strict=True))
    none = torch.zeros_like(parts[net.shows[0]])
    return torch.cat([parts.get(i, none) for i in range(net.slots)], -1)


def check_streams(batch: Any) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise InputError(f"a stream needs at least one sample; got batch={brief(batch)}.")
    whole("batch", batch)


def checked(stream: Stream | Windows, u: Tensor) -> Tensor:
    """u_t as [B, inputs], finite."""
    check_like("u_t", u, stream.net.V)
    u = u[None] if u.dim() == 1 and stream.batch == 1 else u
    if tuple(u.shape) != (stream.batch, stream.net.inputs):
        raise InputError(f"u_t has shape {list(u.shape)}; expected [{stream.batch}, {stream.net.inputs}].")
    if not math.isfinite(u.sum().item()) and not torch.isfinite(u).all():
        raise InputError(f"u_t holds NaN or inf at step {stream.t + 1} of the stream.")
    return u


def target_of(y: Any, batch: int) -> Tensor | None:
    """y_t as [B, ...]; of one stream, also without the first dimension."""
    y = None if y is None else tensor_of("y_t", y)
    return y[None] if y is not None and batch == 1 and (y.dim() == 0 or len(y) != 1) else y


class Windows:
    """Truncated backpropagation of streams: every k1 steps their losses are pulled back through the last k2 steps.

    Kept are k2 steps (x_{t-1}, u_t, y_t), however long the streams are. A window is swept with the weights of its end, from
    the state that was reached at its beginning; that state is not computed again."""

    def __init__(self, net: Net, k1: int, k2: int, batch: int, x0: Tensor | None = None) -> None:
        check_net(net)
        check_streams(batch)
        if net.readout != "every":
            raise InputError(f"a stream is answered at every step: use readout='every', not '{net.readout}'.")
        net.still("truncated backpropagation")
        self.net, self.k1, self.batch, self.given = one_layer(net, "truncated backpropagation"), k1, batch, x0
        self.past: deque[tuple[Tensor, Tensor, Tensor | None]] = deque(maxlen=k2)
        self.kept = k2
        self.reset()

    def reset(self) -> None:
        """Start again from the initial state."""
        with torch.no_grad():
            self.x = self.net.start(self.given, self.batch).clone()
        self.past.clear()
        self.t = self.fresh = 0  # steps, and those whose loss no gradient has seen

    def take(self, u: Tensor, y: Any, loss: LossLike) -> tuple[Tensor, Tensor, Gradient | None]:
        """Take u_t and y_t: a_t, the loss of each stream, and every k1 steps the gradient of the sum of their means."""
        u, y = checked(self, u), target_of(y, self.batch)
        self.past.append((self.x, u, y))
        with torch.no_grad():
            self.x = self.net.advance(u, self.x)
            a = answered(self.net, self.x, u)
            losses = entries(loss, a, y, self.net.output)
        self.t, self.fresh = self.t + 1, self.fresh + 1
        return a, losses, self.rest(loss) if self.fresh == self.k1 else None

    def rest(self, loss: LossLike) -> Gradient | None:
        """The gradient of the losses that no gradient has seen, pulled back k2 steps; None if there are none."""
        if not self.fresh:
            return None
        (x, *_), k = self.past[0], len(self.past)
        u, ys = torch.stack([u for _, u, _ in self.past]), [y for *_, y in self.past]
        mask = u.new_zeros(k, self.batch)
        mask[k - self.fresh :] = 1
        self.fresh = 0
        with torch.enable_grad():
            run = self.net(u, x0=self.given if self.t == k else x)
            y = None if ys[0] is None else torch.stack(ys)  # type: ignore[arg-type]
            return differentiate(run.loss(loss, y, mask=mask).mean(), trained(self.net))

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on, beside the weights."""
        found = {"x": self.x, "fresh": torch.tensor(self.fresh)}
        for name, parts in zip(("past.x", "past.u", "past.y"), zip(*self.past, strict=True), strict=False):
            found |= {} if parts[0] is None else {name: torch.stack(parts)}
        return found

    def complaint(self, state: dict[str, Tensor]) -> str | None:
        """What is wrong with a state that was read from a file; None if it can be restored."""
        y = state.get("past.y")
        k = len(state["past.x"]) if "past.x" in state and state["past.x"].dim() else 0
        expected = {"x": self.x, "fresh": torch.tensor(0)}
        if any(name.startswith("past.") for name in state):
            u = self.x.new_empty(k, self.batch, self.net.inputs, device="meta")
            expected |= {"past.x": self.x.new_empty(k, *self.x.shape, device="meta"), "past.u": u}
        if y is not None:
            expected["past.y"] = y
        if wrong := misfit(expected, state):
            return wrong
        if y is not None and tuple(y.shape[:2]) != (k, self.batch):
            return f"'past.y' has shape {list(y.shape)}; expected [{k}, {self.batch}, ...]"
        most = self.kept
        if k > most or not 0 <= int(state["fresh"]) <= k:
            return (
                f"it keeps {k} steps, {int(state['fresh'])} of them new; expected at most {most}, and no more new ones"
            )
        return None

    def restore(self, state: dict[str, Tensor], t: int) -> None:
        self.reset()
        self.x, self.t, self.fresh = state["x"].to(self.x), t, int(state["fresh"])
        if "past.x" in state:
            x, u = (state[name].to(self.x) for name in ("past.x", "past.u"))
            y = state["past.y"].to(self.x.device) if "past.y" in state else [None] * len(x)
            self.past.extend(zip(x, u, y, strict=True))


def answered(net: Network, x: Tensor, u: Tensor) -> Tensor:
    """a = V h + D u + b_o of one step, h through the layers of a deep readout."""
    h = net.shown(x)
    for layer in net.deep:
        h = torch.tanh(layer(h))
    a = nn.functional.linear(h, net.V, net.b_o)
    return a + nn.functional.linear(u, net.D) if hasattr(net, "D") else a
