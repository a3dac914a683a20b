"""A function of tensors and its derivatives of every order, each as one CUDA graph.

    stage 0    y = f(data, weights)       the function itself
    stage 1    g = (dy/dz)' y_bar         its gradient by z, some of the data and weights
    stage 2    (dg/d(z, y_bar))' g_bar    the gradient of that: a second derivative

and so on. A stage reads what the stages before it have left in memory, so that nothing is computed
twice. It reads copies of the data and of its bars (the gradients that come from outside), and the
weights where they lie. `turn` counts its replays, each of which overwrites what later stages read.
captured_function.py puts stages into torch's graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import Check, FailureCounts, FailurePlace, all_hold, defer_checks
from ...torch_internals import copy_all
from .capture import LastStream, capture_graph, prepare_stream

# What a function returns: new tensors, its own arguments, and None; the last two at every replay.
Results = Sequence[Tensor | None]
Map = Callable[[Sequence[Tensor], Sequence[Tensor]], Results]  # (data, weights) -> results
MOST_GRADIENTS = 4  # of one stage
_failures: dict[torch.device, FailureCounts] = {}  # the tables that have places left


class Pattern(NamedTuple):
    """Which gradient of a stage is computed."""

    has_bar: tuple[bool, ...]  # for each output: does the gradient come through it?
    wanted: tuple[bool, ...]  # for each tensor: is the gradient by it needed?
    again: bool  # will the gradient itself be differentiated?


class ArraysByType:
    """Arrays with the same types at every call, copied with one launch for each type.

    torch copies several arrays at once only if they are all of one type.
    """

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        places: dict[torch.dtype, list[int]] = {}
        for i, y in enumerate(arrays):
            places.setdefault(y.dtype, []).append(i)
        self.groups = list(places.values())

    def copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Copy each source to its target."""
        if len(self.groups) == 1 and len(sources) > 1:
            copy_all(sources, targets)
            return
        for group in self.groups:
            if len(group) == 1:
                targets[group[0]].copy_(sources[group[0]])
            else:
                copy_all([sources[i] for i in group], [targets[i] for i in group])


def take_place(device: torch.device) -> FailurePlace:
    """A place where the failures of a stage are counted; called by one recording at a time."""
    table = _failures.get(device)
    if table is None or table.taken == table.PLACES:
        table = _failures[device] = FailureCounts(device)
    return table.take_place()


class Use:
    """The use of a recording by one call, which torch's graph of that call keeps alive."""

    is_over = False  # has a backward read what the call left?


class Stage:
    """One graph, results = compute() of the leaves `tensors`, and the stages of its gradients.

    Stage 0 has copies of the data first, then the weights. A later stage has the tensors of its
    parent first, then its own bars. Results that are neither None nor one of the tensors are
    outputs.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        own: slice,
        compute: Callable[[], Results],
        rehearse: Callable[[], object],
        checks: list[Check],
        parent: Stage | None = None,
        pattern: Pattern | None = None,
    ) -> None:
        """Capture compute().

        own       the tensors that are copied in before each replay
        rehearse  calls what is to be captured, and what will be needed of it
        checks    the list to which the captured operations add their checks
        pattern   of the parent's gradient that this is; None for stage 0
        """
        self.tensors = list(tensors)
        self.own = own
        self.checks = checks
        self.pattern = pattern
        # .data: an alias whose changes are counted apart. What autograd has saved of a leaf must
        # not seem to be out of date after new data were copied into it.
        self.copies = [y.data for y in self.tensors[own]]
        self.is_trained = [y.requires_grad for y in self.tensors]
        self.turn = 0
        self.last_stream = LastStream(self.tensors[0].device)  # of the last replay
        self.use: weakref.ref[Use] | None = None  # of stage 0: by the last call
        self.gradients: dict[Pattern, Stage | None] = {}  # None: met, but not captured
        # Stages refer to their gradients, and only weakly back: no cycle keeps graphs alive.
        self._parent = None if parent is None else weakref.ref(parent)
        if parent is None or pattern is None:
            self.path: tuple[Pattern, ...] = ()  # from stage 0 to this one
            self.waiting: list[tuple[Pattern, ...]] = []  # paths of stages to be captured
            self.weight_slice = slice(own.stop, len(self.tensors))
            self.stream = prepare_stream(self.tensors[0].device, rehearse)
        else:
            self.path = (*parent.path, pattern)
            self.waiting = parent.waiting
            self.weight_slice = parent.weight_slice
            # Autograd has tied the operations of the parent to its stream.
            self.stream = prepare_stream(self.tensors[0].device, rehearse, parent.stream)
        keeps_graph = pattern is None or pattern.again
        # Memory that one graph of a pool frees is used by those that are captured after it. A stage
        # that keeps something for its gradients therefore has a pool of its own: the stages before
        # it are replayed in between. The results of any other stage are copied at once.
        shares_pool = parent is not None and not keeps_graph
        self.pool: object = (
            parent.pool if parent and shares_pool else torch.cuda.graph_pool_handle()
        )
        self.graph = torch.cuda.CUDAGraph()
        # Taken before the recording, if the rehearsals have made checks.
        place = take_place(self.tensors[0].device) if self.checks else None
        self.checks.clear()
        with capture_graph(self.graph, self.stream, self.pool):
            results = compute()
            self.failures = place if self.checks else None  # where those of replays are counted
            if self.failures is not None:
                self.failures.add(all_hold(self.checks).logical_not())
        self.checks.clear()
        self.is_none = [y is None for y in results]
        self.places = [place_of(y, self.tensors) for y in results]
        outputs = new_results(results, self.tensors)
        self.outputs = [y.detach() for y in outputs]
        self.constants = [i for i, y in enumerate(outputs) if not y.requires_grad]
        self._copies_by_type = ArraysByType(self.copies)
        self._outputs_by_type = ArraysByType(self.outputs)
        # Their history holds what the gradients read, which may be replayed more than once.
        self.graph_outputs = outputs if keeps_graph else self.outputs

    @property
    def parent(self) -> Stage | None:
        """The stage whose gradient this is; None for stage 0."""
        if self._parent is None:
            return None
        parent = self._parent()
        assert parent is not None  # whoever uses a stage holds stage 0, which holds all others
        return parent

    @property
    def turns(self) -> tuple[int, ...]:
        """The turns of this stage and of those before it, whose memory its gradients read."""
        parent = self.parent
        before = () if parent is None else parent.turns
        return (*before, self.turn)

    @property
    def returns_arguments(self) -> bool:
        """Is one of the results one of the tensors itself?"""
        return any(place is not None for place in self.places)

    def replay(self, values: Sequence[Tensor]) -> None:
        """Copy the values in and replay. The results are in `outputs` until the next replay."""
        self.last_stream.wait()
        self._copies_by_type.copy(list(values), self.copies)
        self.turn += 1
        self.graph.replay()

    def copy_outputs(self) -> list[Tensor]:
        """Copies of the outputs, which the next replay overwrites."""
        # Each has memory of its own: it may be changed in place, or kept when others are not.
        results = [torch.empty_like(y) for y in self.outputs]
        self._outputs_by_type.copy(self.outputs, results)
        return results

    def assemble(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The results of a replay: its outputs, some of the tensors, and None.

        tensors, outputs: in the place of the leaves and of the outputs of the graph.
        """
        if len(outputs) == len(self.places):
            return list(outputs)
        remaining = iter(outputs)
        results: list[Tensor | None] = []
        for is_none, place in zip(self.is_none, self.places, strict=True):
            if is_none:
                results.append(None)
            else:
                results.append(next(remaining) if place is None else tensors[place])
        return results

    def compute(self, f: Map, tensors: Sequence[Tensor]) -> Results:
        """The results operation by operation, with a graph of torch's; f is that of stage 0."""
        parent = self.parent
        if parent is None or self.pattern is None:
            return f(tensors[self.own], tensors[self.weight_slice])
        before = tensors[: len(parent.tensors)]
        bars = tensors[len(before) :]
        return parent.compute_gradient(f, before, self.pattern, bars, create_graph=True)

    def compute_gradient(
        self,
        f: Map,
        tensors: Sequence[Tensor],
        pattern: Pattern,
        bars: Sequence[Tensor],
        create_graph: bool,
    ) -> Results:
        """The gradient by the wanted tensors, operation by operation; bars: of the outputs."""
        with torch.enable_grad():
            outputs = new_results(self.compute(f, tensors), tensors)
        used: list[Tensor] = []
        used_bars: list[Tensor] = []
        for y, bar in zip(itertools.compress(outputs, pattern.has_bar), bars, strict=True):
            if y.requires_grad:
                used.append(y)
                used_bars.append(bar)
        wanted = list(itertools.compress(tensors, pattern.wanted))
        if not used:
            return [None] * len(wanted)
        return torch.autograd.grad(
            used, wanted, used_bars, create_graph=create_graph, allow_unused=True
        )

    def find_gradient(self, pattern: Pattern) -> Stage | None:
        """The stage of this gradient; None if there is none."""
        # A gradient that is needed for the first time is computed, and captured before the next
        # call: not here, in a thread of autograd and in the middle of a backward.
        is_new = pattern not in self.gradients
        if is_new and len(self.gradients) < MOST_GRADIENTS:
            self.gradients[pattern] = None
            self.waiting.append((*self.path, pattern))
        return self.gradients.get(pattern)

    def capture_along(self, path: Sequence[Pattern]) -> None:
        """Capture the last of the stages on a path from this one; the others are there."""
        pattern, *further = path
        if not further:
            self.gradients[pattern] = self._capture_gradient(pattern)
            return
        next_stage = self.gradients[pattern]
        assert next_stage is not None
        next_stage.capture_along(further)

    def _capture_gradient(self, pattern: Pattern) -> Stage:
        """Capture the gradient through the outputs that have a bar, by the wanted tensors."""
        used = list(itertools.compress(self.graph_outputs, pattern.has_bar))
        wanted = list(itertools.compress(self.tensors, pattern.wanted))
        bars = [torch.zeros_like(y.detach()).requires_grad_(pattern.again) for y in used]

        def compute() -> Results:
            # retain_graph: a replay reads again what the stages before it have left, so that this
            # memory must not be freed and used for something else.
            return torch.autograd.grad(
                used, wanted, bars, create_graph=pattern.again, retain_graph=True, allow_unused=True
            )

        own = slice(len(self.tensors), len(self.tensors) + len(bars))
        return Stage([*self.tensors, *bars], own, compute, compute, self.checks, self, pattern)


def place_of(y: Tensor | None, tensors: Sequence[Tensor]) -> int | None:
    """The place of y itself among the tensors; None if it is not one of them."""
    return next((i for i, known in enumerate(tensors) if known is y), None)


def new_results(results: Results, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results that are neither None nor one of the tensors."""
    return [y for y in results if y is not None and place_of(y, tensors) is None]


def capture_function(f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]) -> Stage:
    """Capture results = f(data, weights)."""
    copies = [y.detach().clone().requires_grad_(y.requires_grad) for y in data]
    # Autograd ties a leaf to the stream it is first used on: the graph has leaves of its own.
    leaves = [y.data.requires_grad_(y.requires_grad) for y in weights]
    tensors = [*copies, *leaves]
    trained = [y for y in tensors if y.requires_grad]

    def compute() -> Results:
        return f(copies, leaves)

    def rehearse() -> None:
        """Run f and its gradient, which will be needed and may be what cannot be captured."""
        outputs = [y for y in new_results(compute(), tensors) if y.requires_grad]
        if outputs and trained:
            bars = list(map(torch.zeros_like, outputs))
            torch.autograd.grad(outputs, trained, bars, allow_unused=True)

    with defer_checks() as checks:
        return Stage(tensors, slice(0, len(copies)), compute, rehearse, checks)
