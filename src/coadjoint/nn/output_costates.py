"""Costates of recorded outputs: lam_i = dL/dx_i of the outputs of any modules of any model.

Let x_0, ..., x_L be the recorded outputs in the order of the calls. x_j depends on earlier ones
along paths that lead through no other recorded output; D_ji is the derivative along these, and s_i
that of the loss. Then

    lam_i = s_i + sum over j > i of D_ji' lam_j

which is backpropagation, with skip connections as sums of several terms. Every D_ji' is applied to
a mantissa of order one, and the terms are added in a common unit, a power of two for each sample.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ..errors import InputError, NumericalError, Unsupported
from ..networks.stretches import normalise
from ..sweeps.costates import Axis, BaseCostates, stack_padded
from ..sweeps.rows import NO_EXPONENT, SAFE_EXPONENT, exponent, scale
from .marks import Switch, marks_below

CALLS = Axis(
    symbol="i",
    label="call i",
    step="call",
    place="call",
    number="call",
    through="through depth",
    backwards="towards the input",
)


class ScaledCostate(NamedTuple):
    """A costate, or a part of one: value 2^unit."""

    value: Tensor  # [B, ...]
    unit: Tensor  # [B], integers


@dataclass(frozen=True, eq=False)
class OutputCall:
    """One recorded output."""

    module: str  # its name in the model
    number: int  # of the call, among those of the module
    mark: int  # the number of its mark in the graph, among all recorded outputs
    before: Tensor  # as the module returned it
    state: Tensor  # the same values after the mark; the loss's gradient is taken here
    change_count: int  # how often it had been changed in place when it was recorded

    def describe(self) -> str:
        """The call in words, for messages."""
        name = repr(self.module) if self.module else "the model"
        return name if self.number == 0 else f"{name} (call {self.number})"


@dataclass(frozen=True, eq=False)
class OutputRun:
    """The recorded outputs of one or several calls of a model, for B samples along `axis`."""

    calls: Sequence[OutputCall]
    axis: int
    switch: Switch

    @property
    def states(self) -> Sequence[Tensor]:
        """x_0, ..., x_L, the recorded outputs with samples first, [B, ...]."""
        return [call.state.movedim(self.axis, 0) for call in self.calls]

    @functools.cached_property
    def names(self) -> list[str]:
        """Which submodule each output is of; several calls of one are numbered."""
        modules = [call.module for call in self.calls]
        names: list[str] = []
        for call in self.calls:
            number = f" (call {call.number})" if modules.count(call.module) > 1 else ""
            names.append(call.module + number)
        return names

    def pull(
        self, y: Tensor, w: Tensor, inputs: Sequence[OutputCall], again: bool
    ) -> list[Tensor | None]:
        """(dy/dx)' w for each output x of `inputs`, by paths through no other recorded output."""
        states = [call.state for call in inputs]
        try:
            with self.switch.closed(), torch.enable_grad():
                found = torch.autograd.grad(
                    y,
                    states,
                    w.to(y.dtype),
                    create_graph=again,
                    retain_graph=True,
                    allow_unused=True,
                )
        except CheckpointError as error:
            raise Unsupported(
                "a checkpoint has run its part of the model again and got other tensors, since "
                "attention runs on torch's math kernel only inside `with co.record(...)`: call "
                "costates, penalty and backward() inside the block too."
            ) from error
        return list(found)

    def pull_from_each(self, w: Sequence[Tensor]) -> Tensor:
        """J_i' w_i, i = 1..L, of directions w_i [B, ...]: [L, B, n], zero-padded to one width."""
        again = torch.is_grad_enabled()
        self._refuse_gaps(again)
        pulled: list[Tensor] = []
        for i, w_i in enumerate(w, start=1):
            direction = w_i.movedim(0, self.axis)
            (g,) = self.pull(self.calls[i].before, direction, [self.calls[i - 1]], again)
            state = self.states[i - 1]
            rows = torch.zeros_like(state) if g is None else g.movedim(self.axis, 0)
            pulled.append(rows.reshape(len(state), -1))
        return stack_padded(pulled)

    def _refuse_gaps(self, again: bool) -> None:
        """Refuse Jacobians between neighbours unless each output depends on the one before it."""
        if len(self.calls) < 2:
            raise InputError(
                "this penalty needs the Jacobian of one recorded output by the one before it, but "
                f"only {self.calls[0].describe()} was recorded: record a second one."
            )
        for i in range(1, len(self.calls)):
            marks = marks_below(self.calls[i].before, self.switch, again)
            if self.calls[i - 1].mark not in marks:
                raise Unsupported(
                    "this penalty needs the Jacobian of each recorded output by the one before it, "
                    f"but the output of {self.calls[i].describe()} does not depend on that of "
                    f"{self.calls[i - 1].describe()}: record modules that follow each other."
                )


class OutputCostates(BaseCostates):
    """lam_i = mantissa_i 2^{exponent_i} of the recorded outputs x_0, ..., x_L of a model.

    `tape.costates(loss)` of `co.record(model, at=...)` returns one; a penalty takes one.

    names        which submodule each output is of, in the order of the calls
    at(i)        lam_i at true scale, shaped like the i-th output
    log_norms()  log ||lam_i||, [outputs, B]; norms are over all entries of a sample
    loss         [B]

    lam_i is the derivative by the i-th output along all paths to the loss: through later outputs
    and around them. If outputs lie on parallel branches, each has the costate of its own branch,
    and log_ratios() compares neighbours in the order of calls, though none depends on the other.
    """

    axis = CALLS
    first = 0  # there is no input among the states: every costate counts

    def __init__(self, run: OutputRun, parts: Sequence[ScaledCostate], loss: Tensor) -> None:
        self.trajectory: OutputRun = run
        self.parts = parts
        self.loss = loss

    def __repr__(self) -> str:
        L, B = self.exponent.shape
        return f"<OutputCostates of {L} outputs, {B} samples; mean loss {self.loss.mean():.4g}>"

    @property
    def names(self) -> list[str]:
        """Which submodule each output is of; several calls of one are numbered."""
        return self.trajectory.names

    def detach(self) -> OutputCostates:
        """The same costates without their graph."""
        parts = [ScaledCostate(part.value.detach(), part.unit) for part in self.parts]
        return OutputCostates(self.trajectory, parts, self.loss.detach())

    @functools.cached_property
    def exponent(self) -> Tensor:
        """The powers of two, [outputs, B], integers."""
        return torch.stack([part.unit.to(self.loss.device) for part in self.parts])

    def mantissa_at(self, i: int) -> Tensor:
        """The mantissa of lam_i, [B, ...], samples first."""
        return self.parts[i].value

    def at(self, i: int) -> Tensor:
        """lam_i at true scale, shaped like the i-th output: 0 or inf where it leaves the range."""
        return super().at(i).movedim(0, self.trajectory.axis)

    def _mantissas(self) -> list[Tensor]:
        """mantissa_i [B, n_i], on the device and of the type of the loss."""
        return [rows_of(part.value).to(self.loss) for part in self.parts]

    def last_mantissa(self) -> Tensor:
        """[B, n]: the mantissa of the last output's costate."""
        return self._mantissas()[-1]

    @property
    def visible_states(self) -> Tensor:
        """The outputs, [outputs, B, n], zero-padded to one width."""
        return stack_padded([rows_of(x).to(self.loss) for x in self.trajectory.states])

    def pull_mantissas(self) -> Tensor:
        """J_i' mantissa_i, i = 1..L, J_i = dx_i/dx_{i-1}: [L, B, n], zero-padded to one width."""
        return self.trajectory.pull_from_each([part.value for part in self.parts[1:]])

    def pull_directions(self, w: Tensor) -> Tensor:
        """J_i' w_i, i = 1..L, of any directions w [L, B, n] of the outputs: [L, B, n]."""
        directions: list[Tensor] = []
        for x, w_i, n in zip(self.trajectory.states[1:], w, self.entry_counts[1:], strict=True):
            directions.append(w_i[:, :n].reshape(x.shape))
        return self.trajectory.pull_from_each(directions)


def rows_of(y: Tensor) -> Tensor:
    """[B, ...] -> [B, n]; a number for each sample, [B], becomes [B, 1]."""
    return y.reshape(len(y), -1)


def output_costates(run: OutputRun, loss: Tensor, again: bool) -> OutputCostates:
    """The costates of all recorded outputs that the loss depends on.

    run: of all recorded outputs, so that the mark of an output is its place among them.
    loss: of each sample, [B]. again: the costates will be differentiated.
    """
    B = loss.numel()
    terms: list[list[ScaledCostate]] = [[] for _ in run.calls]

    def send(y: Tensor, w: Tensor, unit: Tensor) -> None:
        """Add (dy/dx)' w 2^unit to the terms of all outputs x that y depends on directly."""
        marks = marks_below(y, run.switch, again)
        if not marks:
            return
        inputs = [run.calls[mark] for mark in marks]
        for call in inputs:
            refuse_other_samples(run, call, B)
        for mark, g in zip(marks, run.pull(y, w, inputs, again), strict=True):
            if g is not None:
                value = in_working_type(g.movedim(run.axis, 0))
                terms[mark].append(ScaledCostate(value, unit.to(g.device)))

    send(loss, torch.ones_like(loss), torch.zeros(B, dtype=torch.int32, device=loss.device))
    # Backwards in the order of the calls: an output can only depend on earlier ones.
    parts: list[ScaledCostate] = []
    calls: list[OutputCall] = []
    for call in reversed(run.calls):
        if terms[call.mark]:
            part = add_terms(terms[call.mark])
            parts.append(part)
            calls.append(call)
            send(call.before, part.value.movedim(0, run.axis), part.unit)
    if not calls:
        raise InputError("the loss does not depend on the recorded outputs: there are no costates.")
    reached = OutputRun(calls[::-1], run.axis, run.switch)
    lam = OutputCostates(reached, parts[::-1], loss)
    refuse_not_finite(lam)
    return lam if again else lam.detach()


def in_working_type(g: Tensor) -> Tensor:
    """G in a type of at least 32 bits, whose exponents reach far enough."""
    return g if g.dtype in SAFE_EXPONENT else g.float()


def add_terms(terms: Sequence[ScaledCostate]) -> ScaledCostate:
    """The sum of one or more terms, as a mantissa of order one and a unit."""
    first = terms[0].value
    if len(terms) == 1:
        mantissa, k = normalise(rows_of(first))
        return ScaledCostate(mantissa.view(first.shape), k + terms[0].unit)
    exponents = [exponent(rows_of(term.value.detach())) for term in terms]
    sizes: list[Tensor] = []
    for term, e in zip(terms, exponents, strict=True):
        sizes.append(torch.where(e == NO_EXPONENT, NO_EXPONENT, e + term.unit))
    size = functools.reduce(torch.maximum, sizes)
    largest_unit = functools.reduce(torch.maximum, [term.unit for term in terms])
    size = torch.where(size == NO_EXPONENT, largest_unit, size)
    total: Tensor | None = None
    for term, e in zip(terms, exponents, strict=True):
        shift = term.unit - size
        # Zeros stay zeros in any unit; scaled by a huge power they would become NaN.
        is_lost = (e == NO_EXPONENT) & (shift > SAFE_EXPONENT[first.dtype])
        shift = torch.where(is_lost, NO_EXPONENT, shift)
        scaled = scale(rows_of(term.value), shift[:, None])
        total = scaled if total is None else total + scaled
    assert total is not None
    mantissa, k = normalise(total)
    return ScaledCostate(mantissa.view(first.shape), k + size)


def refuse_other_samples(run: OutputRun, call: OutputCall, B: int) -> None:
    """Refuse an output whose axis of samples does not have one entry for each loss."""
    shape = list(call.state.shape)
    if shape[run.axis] != B:
        raise InputError(
            f"the output of {call.describe()} has shape {shape}, but the loss has {B} values: axis "
            f"{run.axis} must be that of the samples. Give axis=1 for time-major models."
        )


def refuse_not_finite(lam: OutputCostates) -> None:
    """Refuse costates that are not finite, by the name of the output nearest to the loss."""
    is_finite = lam.size.detach().isfinite().all(1).tolist()
    if all(is_finite):
        return
    last = max(i for i, is_good in enumerate(is_finite) if not is_good)
    raise NumericalError(
        f"the costate of the output of {lam.trajectory.calls[last].describe()} is not finite: the "
        "loss, or the model after this output, has a derivative of inf or NaN."
    )
