"""Linearised: the derivatives of a step at all states of a run, which are known by then.

    out_t  = step(u_t, x_{t-1})              one call with the rows of many t, beside the run
    pull   lam_t    -> J_t' lam_t            J_t = d out_t / d x_{t-1}, one step at a time
    push   mu_{t-1} -> J_t mu_{t-1}          likewise
    bend   the derivative of lam_t' J_t m_t by the states, what drives the steps, and the tensors
           that the step has found, many steps at once

torch differentiates; the two linear maps are then cut into steps (linear_code).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ..affine import plus
from ..rows import SAFE_EXPONENT, Rows
from ..torch_internals import change_count, forward_mode, nothing_intervenes
from .linear_code import LinearCode
from .lines import SharedConstants
from .products import row_products
from .row_rules import MixesRows, RowAxis
from .tape import Found, Replay, StepTape

StepFunction = Callable[..., Tensor]  # step(*drive_t, x_{t-1}) -> x_t, all [n_t, .]

FEW = 3  # rows of a call that shows which operations a derivative takes
BLOCK_ELEMENTS = 1 << 18  # entries of the states whose derivatives are computed at once
SHORT = 4  # steps; shorter runs are differentiated sooner than written down


class FewRows(NamedTuple):
    """A call of the step with a few rows, which tells its operations."""

    inputs: list[Tensor]
    tape: StepTape
    found: Found
    out: Tensor

    @staticmethod
    def of(step: StepFunction, inputs: Sequence[Tensor]) -> FewRows:
        """Call the step with the first rows of its inputs."""
        few = [y.detach()[:FEW].clone().requires_grad_() for y in inputs]
        tape, found, out = written_down(step, few)
        if tape.values[tape.number_of(out)].place != RowAxis(0):
            raise MixesRows("a result without rows")
        refuse_if_elsewhere(out, [*few, *found.copies])
        return FewRows(few, tape, found, out)

    def states(self, rows: Rows, drive: Sequence[Tensor], x0: Tensor) -> Tensor:
        """The states [B + N, n] of a run, by code: what does not depend on them first, at once."""
        number = self.tape.number_of
        given = number(self.inputs[-1])
        code = LinearCode(self.tape, given, number(self.out), SharedConstants(), linear=False)
        with torch.no_grad():
            slopes = code.slopes(Replay(self.tape, drive), rows.sizes)
            states = [x0.contiguous()]
            for n, constants in zip(rows.sizes, slopes, strict=True):
                states.append(code.step(states[-1][:n], constants, n))
            return torch.cat(states)


class StepGraph(NamedTuple):
    """A call of the step with the rows of several time steps, which torch can differentiate."""

    inputs: list[Tensor]  # what drives the steps, and x_{t-1}: leaves
    out: Tensor


class Linearised:
    """The derivatives of a step along a run.

    inputs   what drives the steps and x_{t-1}, [N, .] each, without a history
    tensors  those that the step found, such as parameters
    copies   what stands for them in derivatives by them
    blocks   the steps lo .. hi - 1 (from 0) whose derivatives are computed at once: as many as stay
             in cache. Those of a single block are kept, otherwise each is computed when needed
    """

    def __init__(
        self,
        step: StepFunction,
        rows: Rows,
        drive: Sequence[Tensor],
        x: Tensor,
        few: FewRows | None = None,
    ) -> None:
        """x: the states [B + N, n]. MixesRows, or any error of the step, if it cannot be done.

        few: a call with the first rows, if there has been one.
        """
        self.step = step
        self.rows = rows
        self.inputs = [y.detach() for y in (*drive, rows.prev(x))]
        self._few = FewRows.of(step, self.inputs) if few is None else few
        self._tape = self._few.tape
        found = self._few.found
        self.tensors = found.tensors
        self.copies = found.copies
        self._versions = list(map(change_count, self.tensors))
        self._stand_ins = dict(zip(map(id, self.tensors), self.copies, strict=True))
        size = max(1, BLOCK_ELEMENTS // (rows.B * x.shape[1]))
        self.blocks = [(lo, min(lo + size, rows.T)) for lo in range(0, rows.T, size)]
        self._graph: StepGraph | None = None
        self._values: Replay | None = None
        if len(self.blocks) == 1:
            self._keep_block()
        self._pull: LinearCode | None = None
        self._push: LinearCode | None = None
        self.is_twice = False  # has the code of `push` been asked for?
        self._kept: dict[int, list[tuple[Tensor, ...]]] = {}  # slopes of `push`, by block
        self._kept_pull: list[tuple[Tensor, ...]] | None = None  # those of `pull`, of one block
        after = x.detach()[rows.B :]
        for i in range(len(self.blocks)):
            graph = self.graph(i)
            refuse_if_elsewhere(graph.out, [*graph.inputs, *self.copies])
            if not is_repeated(graph.out, after[self._rows_of(i)]):
                raise MixesRows("a state that differs from that of the run")

    def _keep_block(self) -> None:
        """Call the step with all rows, and keep what it computes, for derivatives and slopes."""
        inputs = [y.detach().requires_grad_() for y in self.inputs]
        with row_products(inputs[-1]):
            tape, found, out = written_down(self.step, inputs)
        if tape.operators() != self._tape.operators():
            raise MixesRows("operations that depend on the number of rows")
        self._graph = StepGraph(inputs, out)
        self.copies = found.copies
        self._values = Replay(self._tape, [value.tensor.detach() for value in tape.values])

    @staticmethod
    def of(
        step: StepFunction,
        rows: Rows,
        drive: Sequence[Tensor],
        x: Tensor,
    ) -> Linearised | None:
        """The step linearised along a run; None where that must be done one step at a time."""
        try:
            return Linearised(step, rows, drive, x)
        except Exception:
            # The step is called with more rows than it has been written for, and may do anything.
            # One step at a time, it shows what is wrong, if something is.
            return None

    @staticmethod
    def with_states(
        step: StepFunction, rows: Rows, drive: Sequence[Tensor], x0: Tensor
    ) -> tuple[Linearised, Tensor] | None:
        """Likewise, with the states of the run, which is made by code; None as above."""
        try:
            few = FewRows.of(step, [*(y[: rows.B] for y in drive), x0])
            x = few.states(rows, [y.detach() for y in drive], x0.detach())
            return Linearised(step, rows, drive, x, few), x
        except Exception:
            return None

    def prepare(self, twice: bool) -> bool:
        """Write the code of `pull`, and of `push` if `twice`; False where that cannot be done.

        Nor can it if a tensor that the step found has been changed since.
        """
        if self._versions != list(map(change_count, self.tensors)):
            return False
        if self._pull is not None and (self.is_twice or not twice):
            return True
        try:
            self._pull, self._push = self._write_code(twice)
            self._kept_pull = None
            self.is_twice = twice
        except Exception:  # as in `of`: an operation that is not linear, or has no derivative
            return False
        return True

    def _write_code(self, twice: bool) -> tuple[LinearCode, LinearCode | None]:
        """`pull` and, if `twice`, `push`: from the derivatives of a call with a few rows.

        `push` is None if it cannot be written.
        """
        tape = self._tape
        x = self._few.inputs[-1]
        out = self._few.out
        lam = torch.ones_like(out).requires_grad_()
        mu = torch.ones_like(x)
        tape.note(lam, RowAxis(0))
        tape.note(mu, RowAxis(0))
        known = SharedConstants()
        with torch.enable_grad(), tape:
            (pulled,) = torch.autograd.grad(out, x, lam, create_graph=True)
        pull = LinearCode(tape, tape.number_of(lam), tape.number_of(pulled), known)
        if not twice:
            return pull, None
        try:
            with tape:
                (pushed,) = torch.autograd.grad(pulled, lam, mu, retain_graph=True)
            return pull, LinearCode(tape, tape.number_of(mu), tape.number_of(pushed), known)
        except MixesRows:
            return pull, None

    def _rows_of(self, i: int) -> slice:
        """The rows of block i in step arrays."""
        lo, hi = self.blocks[i]
        return slice(self.rows.starts[lo], self.rows.starts[hi])

    @property
    def pull(self) -> LinearCode | SingleSteps:
        """lam_t -> J_t' lam_t."""
        return self._pull or SingleSteps(self.step, len(self.inputs), pull_step)

    @property
    def push(self) -> LinearCode | SingleSteps:
        """mu_{t-1} -> J_t mu_{t-1}."""
        return self._push or SingleSteps(self.step, len(self.inputs), push_step)

    def pull_slopes(self, i: int) -> list[tuple[Tensor, ...]]:
        """What the code of `pull` reads at each step of block i.

        What that of `push` reads comes from the same values: it is kept for later.
        """
        if i == 0 and self._kept_pull is not None:
            return self._kept_pull
        values = self._values_of(i)
        if self._push is not None:
            self._kept[i] = self._slopes(self._push, values, i)
        slopes = self._slopes(self.pull, values, i)
        if self._pull is not None and len(self.blocks) == 1:
            self._kept_pull = slopes
        return slopes

    def push_slopes(self, i: int) -> list[tuple[Tensor, ...]]:
        """What the code of `push` reads at each step of block i."""
        if i in self._kept:
            return self._kept[i]
        return self._slopes(self.push, self._values_of(i), i)

    def _values_of(self, i: int) -> Replay:
        """The values of the step with the rows of block i."""
        if self._values is not None:
            return self._values
        at = self._rows_of(i)
        return Replay(self._tape, [y[at] for y in self.inputs])

    def _slopes(
        self, code: LinearCode | SingleSteps, values: Replay, i: int
    ) -> list[tuple[Tensor, ...]]:
        """What a code reads at each step of block i."""
        lo, hi = self.blocks[i]
        with torch.no_grad():
            return code.slopes(values, self.rows.sizes[lo:hi])

    def graph(self, i: int) -> StepGraph:
        """The step with the rows of block i."""
        if self._graph is not None:
            return self._graph
        at = self._rows_of(i)
        inputs = [y[at].detach().requires_grad_() for y in self.inputs]
        found = Found([*inputs, *self.copies], self._stand_ins)
        with torch.enable_grad(), row_products(inputs[-1]), found:
            return StepGraph(inputs, self.step(*inputs))

    def gradient(self, lam: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The derivatives of sum lam_t out_t by drive and tensors, as values; lam [N, n].

        needed: by which of them; the others are None.
        """

        def of_block(i: int, graph: StepGraph) -> list[Tensor | None]:
            wrt = [*graph.inputs[:-1], *self.copies]
            return gradients_by(wrt, graph.out, lam[self._rows_of(i)], needed, False)

        return self._summed(len(self.inputs) - 1, of_block)

    def bend(self, lam: Tensor, m: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The derivatives of sum lam_t J_t m_t by x_{t-1}, drive and tensors, as values."""

        def of_block(i: int, graph: StepGraph) -> list[Tensor | None]:
            at = self._rows_of(i)
            *drive, x = graph.inputs
            with torch.enable_grad():
                (pulled,) = torch.autograd.grad(graph.out, x, lam[at], create_graph=True)
            return gradients_by([x, *drive, *self.copies], pulled, m[at], needed, False)

        return self._summed(len(self.inputs), of_block)

    def _summed(
        self, arrays: int, of_block: Callable[[int, StepGraph], list[Tensor | None]]
    ) -> list[Tensor | None]:
        """Derivatives of all blocks: the first, step arrays, one below the other, others summed."""
        by_block = []
        sums: list[Tensor | None] = []
        for i in range(len(self.blocks)):
            graph = self.graph(i)
            with row_products(graph.inputs[-1]):
                found = of_block(i, graph)
            by_block.append(found[:arrays])
            sums = list(map(plus, sums, found[arrays:])) if i else found[arrays:]
        joined: list[Tensor | None] = []
        for parts in zip(*by_block, strict=True):
            present = [part for part in parts if part is not None]
            joined.append(torch.cat(present) if len(present) == len(parts) else None)
        return [*joined, *sums]

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
        inputs: int,
        apply: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor],
    ) -> None:
        # `inputs`: how many arguments the step has, the state being the last.
        self.function = step
        self.inputs = inputs
        self.apply = apply

    def slopes(self, values: Replay, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """What drives each step, and the state before it."""
        by_step = [values.tensor(i).split(list(sizes)) for i in range(self.inputs)]
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


def written_down(step: StepFunction, inputs: Sequence[Tensor]) -> tuple[StepTape, Found, Tensor]:
    """A call of the step: its operations, the tensors that it found, and its result."""
    tape = StepTape(len(inputs[0]))
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
    values = (again.detach(), state.detach())
    if again.shape != state.shape:
        return False
    if not again.numel() or bool((values[0] - values[1]).abs_().max() <= tolerance):
        return True  # as allclose would say, sooner; it is asked about large values, inf and nan
    return torch.allclose(*values, tolerance, tolerance, equal_nan=True)


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
