"""Linearised: the derivatives of a step at all states of a run, which are known by then.

    out_t  = step(u_t, x_{t-1})              one call with the rows of all t, beside the run
    pull   lam_t    -> J_t' lam_t            J_t = d out_t / d x_{t-1}, one step at a time
    push   mu_{t-1} -> J_t mu_{t-1}          likewise
    bend   the derivative of lam_t' J_t m_t by the states, what drives the steps, and the tensors
           that the step has found, all steps at once

torch differentiates; the two linear maps are then cut into steps (linear_code).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ..rows import SAFE_EXPONENT, Rows
from ..torch_internals import change_count, forward_mode, nothing_intervenes
from .linear_code import LinearCode
from .lines import SharedConstants
from .row_rules import MixesRows, RowAxis
from .tape import FewRows, Found, Tape

StepFunction = Callable[..., Tensor]  # step(*drive_t, x_{t-1}) -> x_t, all [n_t, .]

FEW = 3  # rows of a call that shows which operations a derivative takes
SHORT = 4  # steps; shorter runs are differentiated sooner than written down


class Linearised:
    """One call of a step with the rows of all time steps.

    inputs   what drives the steps and x_{t-1}, [N, .] each: copies without a history
    tensors  those that the step found, such as parameters
    copies   what stood for them
    """

    def __init__(self, step: StepFunction, rows: Rows, drive: Sequence[Tensor], x: Tensor) -> None:
        """x: the states [B + N, n]. MixesRows, or any error of the step, if it cannot be done."""
        self.step = step
        self.rows = rows
        self.inputs = [y.detach().requires_grad_() for y in (*drive, rows.prev(x))]
        tape, found, self.out = written_down(step, self.inputs)
        self.tensors = found.tensors
        self.copies = found.copies
        self._versions = list(map(change_count, self.tensors))
        refuse_if_elsewhere(self.out, [*self.inputs, *self.copies])
        if tape.values[tape.number_of(self.out)].place != RowAxis(0):
            raise MixesRows("a result without rows")
        after = x[rows.B :].detach()
        if self.out.shape != after.shape or not is_repeated(self.out, after):
            raise MixesRows("a state that differs from that of the run")
        self.is_twice = False  # has the code of `push` been asked for?
        self._tape: Tape | None = tape
        self._pull: LinearCode | None = None
        self._push: LinearCode | None = None

    @staticmethod
    def of(step: StepFunction, rows: Rows, drive: Sequence[Tensor], x: Tensor) -> Linearised | None:
        """The step linearised along a run; None where that must be done one step at a time."""
        try:
            return Linearised(step, rows, drive, x)
        except Exception:
            # The step is called with more rows than it has been written for, and may do anything.
            # One step at a time, it shows what is wrong, if something is.
            return None

    def prepare(self, twice: bool) -> bool:
        """Write the code of `pull`, and of `push` if `twice`; False where that cannot be done.

        Nor can it if a tensor that the step found has been changed since.
        """
        if self._versions != list(map(change_count, self.tensors)):
            return False
        if self._pull is not None and (self.is_twice or not twice):
            return True
        tape = self._tape
        if tape is None:
            return False
        try:
            self._pull, self._push = self._write_code(tape, twice)
            self.is_twice = twice
        except Exception:  # as in `of`: an operation that is not linear, or has no derivative
            return False
        finally:
            self._tape = None  # it keeps every intermediate value
        return True

    def _write_code(self, all_rows: Tape, twice: bool) -> tuple[LinearCode, LinearCode | None]:
        """`pull` and, if `twice`, `push`: from the derivatives of a call with a few rows.

        `push` is None if it cannot be written: some derivatives of derivatives change their arrays.
        """
        inputs = [y.detach()[:FEW].requires_grad_() for y in self.inputs]
        tape, _, out = written_down(self.step, inputs)
        source = FewRows(tape, all_rows)
        lam = torch.ones_like(out).requires_grad_()
        mu = torch.ones_like(inputs[-1])
        tape.note(lam, RowAxis(0))
        tape.note(mu, RowAxis(0))
        known = SharedConstants()
        with torch.enable_grad(), tape:
            (pulled,) = torch.autograd.grad(out, inputs[-1], lam, create_graph=True)
        pull = LinearCode(source, tape.number_of(lam), tape.number_of(pulled), known)
        if not twice:
            return pull, None
        try:
            with tape:
                (pushed,) = torch.autograd.grad(pulled, lam, mu)
            return pull, LinearCode(source, tape.number_of(mu), tape.number_of(pushed), known)
        except MixesRows:
            return pull, None

    @property
    def pull(self) -> LinearCode | SingleSteps:
        """lam_t -> J_t' lam_t."""
        return self._pull or SingleSteps(self.step, self.inputs, pull_step)

    @property
    def push(self) -> LinearCode | SingleSteps:
        """mu_{t-1} -> J_t mu_{t-1}."""
        return self._push or SingleSteps(self.step, self.inputs, push_step)

    def gradient(self, lam: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The derivatives of sum lam_t out_t by drive and tensors, as values; lam [N, n].

        needed: by which of them; the others are None.
        """
        return gradients_by([*self.inputs[:-1], *self.copies], self.out, lam, needed, False)

    def bend(self, lam: Tensor, m: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The derivatives of sum lam_t J_t m_t by x_{t-1}, drive and tensors, as values."""
        x = self.inputs[-1]
        with torch.enable_grad():
            (pulled,) = torch.autograd.grad(self.out, x, lam, create_graph=True)
        return gradients_by([x, *self.inputs[:-1], *self.copies], pulled, m, needed, False)

    def again(
        self, x: Tensor, drive: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same call at tensors with a history: out, and the copies of the arguments it read.

        x [B + N, n], and what drives the steps and the step found. Derivatives of `out` by the
        copies (of x_{t-1}, then the rest) can be differentiated by the arguments.
        """
        copies = [differentiable_copy(y) for y in (self.rows.prev(x), *drive, *tensors)]
        count = len(drive) + 1
        stand_ins = {id(y): copy for y, copy in zip(self.tensors, copies[count:], strict=True)}
        with Found(copies, stand_ins):
            out = self.step(*copies[1:count], copies[0])
        return out, copies


def gradients_by(
    wrt: Sequence[Tensor], y: Tensor, along: Tensor, needed: Sequence[bool], create_graph: bool
) -> list[Tensor | None]:
    """The derivatives of sum along y by those that are needed; None for the others.

    create_graph: they can be differentiated again.
    """
    places = [i for i, need in enumerate(needed) if need and wrt[i].requires_grad]
    found: list[Tensor | None] = [None] * len(wrt)
    if not places or not y.requires_grad:
        return found
    grads = torch.autograd.grad(
        y,
        [wrt[i] for i in places],
        along,
        create_graph=create_graph,
        retain_graph=True,
        allow_unused=True,
    )
    for i, g in zip(places, grads, strict=True):
        found[i] = g
    return found


class SingleSteps:
    """The same maps as those of LinearCode, by torch: where no code could be written."""

    def __init__(
        self,
        step: StepFunction,
        inputs: Sequence[Tensor],
        apply: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor],
    ) -> None:
        self.function = step
        self.inputs = inputs
        self.apply = apply

    def slices(self, rows: Rows) -> list[tuple[Tensor, ...]]:
        """What drives each step, and the state before it."""
        by_step = [y.detach().split(rows.sizes) for y in self.inputs]
        return list(zip(*by_step, strict=True))

    def step(self, y: Tensor, constants: tuple[Tensor, ...], rows: int) -> Tensor:
        """The map at one step, applied to y."""
        *drive, x = constants
        return self.apply(lambda state: self.function(*drive, state), x, y)


def pull_step(step: Callable[[Tensor], Tensor], x: Tensor, lam: Tensor) -> Tensor:
    """J' lam, J the derivative of a step at x."""
    _, pull = torch.func.vjp(step, x)  # type: ignore[misc]
    pulled: Tensor = pull(lam)[0]
    return pulled


def push_step(step: Callable[[Tensor], Tensor], x: Tensor, mu: Tensor) -> Tensor:
    """J mu, J the derivative of a step at x."""
    with forward_mode():
        pushed: Tensor = torch.func.jvp(step, (x,), (mu,))[1]
    return pushed


def written_down(step: StepFunction, inputs: Sequence[Tensor]) -> tuple[Tape, Found, Tensor]:
    """A call of the step: its operations, the tensors that it found, and its result."""
    tape = Tape(len(inputs[0]))
    for y in inputs:
        tape.note(y, RowAxis(0))
    found = Found(inputs)
    with torch.enable_grad(), tape, found:
        out = step(*inputs)
    return tape, found, out


def differentiable_copy(y: Tensor) -> Tensor:
    """The values of y in a tensor that can be differentiated by, with the history of y."""
    return y.view_as(y) if y.requires_grad else y.detach().requires_grad_()


def is_usual(rows: Rows, tensors: Sequence[Tensor]) -> bool:
    """Is it worth trying: a long run on a CPU, in a type of the sweeps, outside transforms?"""
    usual = all(y.device.type == "cpu" and y.dtype in SAFE_EXPONENT for y in tensors)
    return rows.T >= SHORT and usual and nothing_intervenes()


def is_repeated(again: Tensor, state: Tensor) -> bool:
    """Is `again` the state that the step led to before?"""
    # Rounding may differ from call to call; a state that is drawn anew differs far more. Three
    # quarters of the digits must agree.
    tolerance = torch.finfo(state.dtype).eps ** 0.75
    return torch.allclose(again.detach(), state.detach(), tolerance, tolerance, equal_nan=True)


def refuse_if_elsewhere(out: Tensor, leaves: Sequence[Tensor]) -> None:
    """Refuse a result that depends on tensors other than `leaves`, or on a Function of the user's.

    The backward of such a Function need not be linear, nor treat samples one by one.
    """
    known = {id(y) for y in leaves}
    seen: set[Node] = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            raise MixesRows(f"Function {node.name()}")
        variable = getattr(node, "variable", None)  # of a leaf
        if variable is not None and id(variable) not in known:
            raise MixesRows("a tensor that was not found")
        waiting += [before for before, _ in node.next_functions]
