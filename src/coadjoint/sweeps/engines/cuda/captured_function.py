"""Functions that repeat, as CUDA graphs in torch's graph: they can be differentiated like others.

On a GPU a call is a hundred small operations, and launching each of them takes longer than running
it. A function that is called again and again with data of one shape is captured once and replayed
from then on, and so are its derivatives (captured_stages.py). A backward whose stage is not
captured, or finds that a later call has overwritten what it reads, computes operation by operation.

Replays read no values. Where the function makes checks, each replay counts their failures on the
device and notes in a Ledger where. If the count has grown when it is read, the operations are
repeated one by one to find out why; or that all is well, and the failure was that of another call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from ...checks import Check, defer_checks, raise_failures, settle
from ...functions import Context, Gradients, is_transformed, needed_inputs
from ...torch_internals import unwrap_dead_wrappers
from .capture import GraphCache, recording_turn
from .captured_stages import Map, Pattern, Results, Stage, Use, capture_function
from .repeatable import may_record

MOST_AT_ONCE = 3  # recordings of one function, for calls whose backward is yet to come


class Ledger(NamedTuple):
    """Where the checks of replays are kept until somebody waits for the device."""

    checks: list[Check]
    settles: bool  # are they made at the end of each backward?


class CapturedCall(NamedTuple):
    """One call of a captured function, or of a gradient of it."""

    stage: Stage
    root: Stage  # stage 0, which keeps all others alive
    f: Map  # for what must be computed operation by operation
    ledger: Ledger | None
    use: Use

    def note(self, stage: Stage, tensors: Sequence[Tensor]) -> None:
        """Keep the check of a replay of a stage with these tensors, which is about to be made."""
        if self.ledger is None or stage.failures is None:
            return
        # Without their graphs, whose nodes may hold the ledger.
        values = [y if y.is_leaf else y.detach() for y in tensors]
        again = functools.partial(check_again, self.root, stage, self.f, values)
        self.ledger.checks.append(Check(stage.failures.last_seen(), again))

    def settle(self) -> None:
        """Make the checks, if it is for this call to do so."""
        if self.ledger is not None and self.ledger.settles:
            settle(self.ledger.checks)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, what is computed operation by operation adds its checks to the ledger."""
        if self.ledger is None:
            yield
            return
        with defer_checks(self.ledger.checks):
            yield


def check_again(root: Stage, stage: Stage, f: Map, values: Sequence[Tensor]) -> None:
    """Compute a stage operation by operation, and raise the error of the check that fails.

    root: keeps the stage. values: those of its tensors, as constants.
    """
    leaves = []
    for y, is_trained in zip(values, stage.is_trained, strict=True):
        leaves.append(y.detach().requires_grad_(is_trained))
    with torch.enable_grad(), defer_checks() as checks:
        stage.compute(f, leaves)
    raise_failures(checks)


class ReplayContext(Context):
    """What a forward leaves for its backward, in torch's `ctx`."""

    call: CapturedCall
    turns: tuple[int, ...]  # of the stage and those before it, after this forward


class ReplayedFunction(Function):
    """apply(call, *tensors) -> the outputs of the call's stage."""

    @staticmethod
    def forward(ctx: ReplayContext, call: CapturedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay the stage, and save the tensors in case its gradient must be computed."""
        stage = call.stage
        call.note(stage, tensors)
        stage.replay(tensors[stage.own])
        outputs = stage.copy_outputs()
        ctx.call = call
        ctx.turns = stage.turns
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[outputs[i] for i in stage.constants])
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: ReplayContext, *bars: Tensor | None) -> Gradients:
        """The gradient by all tensors; bars: of the outputs, None where it does not come through.

        It is replayed if it has been captured, and if what it reads is still there.
        """
        call = ctx.call
        stage = call.stage
        # What a replay reads lies elsewhere, but torch has its errors here: the graph was freed by
        # a backward before, or a tensor was changed in place since.
        saved = ctx.saved_tensors
        again = torch.is_grad_enabled()
        needed = needed_inputs(ctx)[1:]  # without that of `call`
        wanted = tuple(a and b for a, b in zip(needed, stage.is_trained, strict=True))
        pattern = Pattern(tuple(bar is not None for bar in bars), wanted, again)
        given = [bar for bar in bars if bar is not None]
        if not given or not any(wanted):
            return (None,) * (1 + len(wanted))
        captured = stage.find_gradient(pattern) if can_be_replayed(ctx) else None
        # The gradient of a replayed gradient will read the recording again.
        call.use.is_over |= captured is None or not again
        grads: Results
        if captured is None:
            tensors = tuple(cut_off(y, again) for y in saved)
            with call.collecting():
                grads = stage.compute_gradient(call.f, tensors, pattern, given, again)
        elif again:
            tensors = (*saved, *given)
            outputs = apply_replayed(call._replace(stage=captured), *tensors)
            grads = captured.assemble(tensors, outputs)
        else:
            tensors = (*saved, *given)
            call.note(captured, tensors)
            captured.replay(given)
            grads = captured.assemble(tensors, captured.copy_outputs())
        call.settle()
        return None, *fill_in(grads, wanted)


def can_be_replayed(ctx: ReplayContext) -> bool:
    """Is what a captured gradient reads as it was after the forward, in an ordinary backward?"""
    if ctx.turns != ctx.call.stage.turns or is_transformed():
        return False
    return not torch.cuda.is_current_stream_capturing()


def cut_off(y: Tensor, again: bool) -> Tensor:
    """`y` for a partial derivative by it: what it was computed from is not seen beyond it.

    again: the derivative will be differentiated, and is then that of `y` as it was computed.
    """
    if again:
        return y.view_as(y)
    return y.detach().requires_grad_(y.requires_grad)


def is_in_use(stage: Stage) -> bool:
    """Has the last call of a recording a graph through which no backward has gone yet?"""
    use = None if stage.use is None else stage.use()
    return use is not None and not use.is_over


def fill_in(values: Results, places: Sequence[bool]) -> list[Tensor | None]:
    """The values, one after the other, where `places` is true; None elsewhere."""
    remaining = iter(values)
    filled: list[Tensor | None] = []
    for has_value in places:
        filled.append(next(remaining) if has_value else None)
    return filled


def is_parameter(y: object) -> bool:
    """isinstance(y, nn.Parameter), without the long look that torch takes at other tensors."""
    kind = type(y)
    return kind is Parameter or (kind is not Tensor and isinstance(y, Parameter))


def data_key(y: Tensor) -> Hashable:
    """What must not change of an input for a graph to be replayed; its values are copied in."""
    return (y.shape, y.stride(), y.dtype, y.device, y.requires_grad)


def weight_key(w: Tensor) -> Hashable:
    """What must not change of a weight for a graph to be replayed; it is read where it lies."""
    return (w.data_ptr(), w.shape, w.stride(), w.dtype, w.requires_grad)


# torch.autograd.Function.apply without looking for transforms of torch.func: there are none.
apply_replayed = super(Function, ReplayedFunction).apply


class CapturedFunctions:
    """The captured functions of one object, by what they depend on.

    what     in the warning if something cannot be captured, "this module" for instance
    records  False: nothing is captured or replayed any more
    """

    def __init__(self, what: str = "this function", records: bool = True) -> None:
        self.what = what
        self.records = records
        self.cache: GraphCache[Stage] = GraphCache(what)
        self._lock = threading.Lock()  # held while a call takes a recording for itself

    def __deepcopy__(self, memo: object) -> CapturedFunctions:
        # Without graphs: a copied object has its weights elsewhere.
        return type(self)(self.what, self.records)

    def __reduce__(self) -> tuple[type[CapturedFunctions], tuple[str, bool]]:
        # Pickled without graphs, which belong to this process.
        return type(self), (self.what, self.records)

    def replay(
        self,
        key: Hashable,
        f: Map,
        data: Sequence[Tensor],
        weights: Sequence[Tensor],
        ledger: Ledger | None = None,
    ) -> Results | None:
        """f(data, weights), by a CUDA graph from the third call with tensors of these shapes on.

        None: the caller must compute it. data are copied; weights are read where they lie, and must
        be leaves. f must be a function of both that makes the same operations each time.

        key     what else f depends on
        ledger  for the checks that f makes; None if it makes none
        """
        if not self.records or not may_record():
            return None
        full_key = (
            key,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),  # its tensors cannot be filled outside of it
            torch.get_float32_matmul_precision(),
            *map(data_key, data),
            *map(weight_key, weights),
        )
        use = Use()
        stage = self._take_recording(full_key, lambda: capture_function(f, data, weights), use)
        if stage is None:
            return None
        tensors = (*unwrap_dead_wrappers(tuple(data)), *weights)
        outputs = apply_replayed(CapturedCall(stage, stage, f, ledger, use), *tensors)
        return stage.assemble(tensors, outputs)

    def _take_recording(self, key: Hashable, build: Callable[[], Stage], use: Use) -> Stage | None:
        """A recording for this use of it, made by build() if there is none; None: compute.

        A recording is left alone while a backward will read it: another one is made, or used.
        """
        for number in range(MOST_AT_ONCE):
            numbered = (number, key)
            stage = self.cache.find(numbered, build)
            if stage is None or not self._capture_waiting(numbered, stage):
                return None
            with self._lock:  # another thread may want the same one
                if not is_in_use(stage):
                    stage.use = weakref.ref(use)
                    return stage
        return None

    def _capture_waiting(self, key: Hashable, root: Stage) -> bool:
        """Capture the gradients that were needed since the last call; False: not this time."""
        while root.waiting:
            with recording_turn() as is_free:
                if not is_free:
                    return False
                if not self._capture_gradient(root, root.waiting.pop(0)):
                    # What computes a gradient computes its function again: better without graphs.
                    self.cache.give_up(key)
                    return False
        return True

    def _capture_gradient(self, root: Stage, path: Sequence[Pattern]) -> bool:
        """Capture the gradient at the end of a path from stage 0; False if it cannot be."""

        def capture() -> Stage:
            root.capture_along(path)
            return root

        return self.cache.record(capture) is not None
