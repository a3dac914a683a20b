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
from ..torch_internals import nothing_intervenes
from .linear_code import LinearCode
from .row_rules import MixesRows, RowAxis
from .tape import Found, Tape

StepFunction = Callable[..., Tensor]  # step(*drive_t, x_{t-1}) -> x_t, all [n_t, .]

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
        with torch.enable_grad():
            tape = Tape(rows.N)
            for y in self.inputs:
                tape.note(y, RowAxis(0))
            found = Found(self.inputs)
            with tape, found:
                self.out = step(*self.inputs)
        self.tensors = found.tensors
        self.copies = found.copies
        refuse_if_elsewhere(self.out, [*self.inputs, *self.copies])
        if tape.values[tape.number_of(self.out)].place != RowAxis(0):
            raise MixesRows("a result without rows")
        after = x[rows.B :].detach()
        if self.out.shape != after.shape or not is_repeated(self.out, after):
            raise MixesRows("a state that differs from that of the run")
        self._tape: Tape | None = tape
        self._pull: LinearCode | None = None
        self._push: LinearCode | None = None

    @staticmethod
    def of(
        step: StepFunction, rows: Rows, drive: Sequence[Tensor], x: Tensor
    ) -> Linearised | None:
        """The step linearised along a run; None where that must be done one step at a time."""
        try:
            return Linearised(step, rows, drive, x)
        except Exception:
            # The step is called with more rows than it has been written for, and may do anything.
            # One step at a time, it shows what is wrong, if something is.
            return None

    def prepare(self, twice: bool) -> bool:
        """Write down `pull`, and `push` too if `twice`; False where that cannot be done."""
        if self._pull is not None and (self._push is not None or not twice):
            return True
        tape = self._tape
        if tape is None:
            return False
        x = self.inputs[-1]
        lam = torch.ones_like(self.out).requires_grad_()
        mu = torch.ones_like(x)
        tape.note(lam, RowAxis(0))
        tape.note(mu, RowAxis(0))
        try:
            with torch.enable_grad(), tape:
                (pulled,) = torch.autograd.grad(self.out, x, lam, create_graph=True)
                self._pull = LinearCode(tape, tape.number_of(lam), tape.number_of(pulled))
                if twice:
                    (pushed,) = torch.autograd.grad(pulled, lam, mu, retain_graph=True)
                    self._push = LinearCode(tape, tape.number_of(mu), tape.number_of(pushed))
        except Exception:  # as in `of`: an operation that is not linear, or has no derivative
            return False
        finally:
            self._tape = None  # it keeps every intermediate value
        return True

    @property
    def pull(self) -> LinearCode:
        """The code of lam_t -> J_t' lam_t."""
        assert self._pull is not None  # `prepare` was called
        return self._pull

    @property
    def push(self) -> LinearCode:
        """The code of mu_{t-1} -> J_t mu_{t-1}."""
        assert self._push is not None  # `prepare` was called
        return self._push

    def gradient(self, lam: Tensor) -> list[Tensor | None]:
        """The derivatives of sum lam_t out_t by drive and tensors, as values; lam [N, n]."""
        wrt = [*self.inputs[:-1], *self.copies]
        if not wrt:
            return []
        return list(
            torch.autograd.grad(self.out, wrt, lam, retain_graph=True, allow_unused=True)
        )

    def bend(self, lam: Tensor, m: Tensor) -> list[Tensor | None]:
        """The derivatives of sum lam_t J_t m_t by x_{t-1}, drive and tensors, as values."""
        x = self.inputs[-1]
        with torch.enable_grad():
            (pulled,) = torch.autograd.grad(self.out, x, lam, create_graph=True)
            if not pulled.requires_grad:  # a linear step, of data alone
                return [None] * (len(self.inputs) + len(self.copies))
            wrt = [x, *self.inputs[:-1], *self.copies]
            return list(
                torch.autograd.grad(pulled, wrt, m, retain_graph=True, allow_unused=True)
            )

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


def differentiable_copy(y: Tensor) -> Tensor:
    """The values of y in a tensor that can be differentiated by, with the history of y."""
    return y.view_as(y) if y.requires_grad else y.detach().requires_grad_()


def is_usual(rows: Rows, tensors: Sequence[Tensor]) -> bool:
    """Is it worth while to try: a long run on a CPU, in a type of the sweeps, outside transforms?"""
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
