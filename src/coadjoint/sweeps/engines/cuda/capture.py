"""CUDA graphs: operations recorded once and replayed as a whole.

On a GPU a gradient is a hundred small operations, and telling the device about each of them takes longer than doing it. One
GraphCache serves the gradients (gradients/captured.py) and the modules of co.nn (nn/captured.py).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ....errors import CoadjointError
from ...torch_internals import TorchDispatchMode

CALLS_BEFORE_RECORDING = 2  # operation by operation, before a gradient is recorded
MOST_RECORDINGS = 4  # recordings of a method
ATTEMPTS = 2  # at a recording: a failure may have come from elsewhere in the process
Captured = TypeVar("Captured")
# CUDA takes one recording at a time; a second thread that wants one waits.
_one_at_a_time = threading.Lock()


class Unrecordable(RuntimeError):
    """The operations depend on values, or leave the device: no recording can repeat them."""


class RefuseWaiting(TorchDispatchMode):
    """Inside, and in this thread alone (and autograd's on its behalf), an operation that waits for the device is refused.

    torch.cuda.set_sync_debug_mode would refuse it in every other thread of the process too."""

    WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.reads_values(func, args):
            raise Unrecordable(f"{func} needs values while the gradient is computed")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self.changes_device(args, result):
            raise Unrecordable(f"{func} moves data between the CPU and the GPU")
        return result

    @staticmethod
    def on_device(y: Any) -> bool:
        return isinstance(y, Tensor) and y.is_cuda

    def reads_values(self, func: Any, args: Sequence[Any]) -> bool:
        if not any(map(self.on_device, args)):
            return False
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            # An index of truth values has as many entries as there are true ones.
            return any(
                isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
            )
        return any(tag in func.tags for tag in self.WAITS)

    def changes_device(self, args: Sequence[Any], result: Tensor) -> bool:
        given = [y.is_cuda for y in args if isinstance(y, Tensor) and y.dim()]
        return bool(given) and result.dim() > 0 and any(cuda != result.is_cuda for cuda in given)


def prepare_stream(device: torch.device, rehearse: Callable[[], object]) -> torch.cuda.Stream:
    """A stream to record on, after two rehearsals: the first may load kernels, which waits for the device; what fails only
    while recording would leave the device in disorder."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        rehearse()
        with RefuseWaiting():
            rehearse()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    return stream


@contextlib.contextmanager
def capture_graph(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Iterator[None]:
    """Record what is launched on `stream` inside.

    No garbage is collected meanwhile: it may hold graphs of the past, and CUDA refuses to destroy one during a recording.
    Other threads may go on using the device (capture_error_mode)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


class GraphCache(Generic[Captured]):
    """The last MOST_RECORDINGS recordings, by key: made at the third call with one key, replayed from then on."""

    def __init__(self, what: str) -> None:
        self.what = what  # is recorded, for the warning
        self.entries: OrderedDict[Any, int | Captured | None] = (
            OrderedDict()
        )  # calls so far; None: cannot be recorded
        self.refusal = ""  # why, the last time
        self.warned = False

    def find(self, key: Any, build: Callable[[], Captured]) -> Captured | None:
        """The recording for this key; None if this call runs operation by operation."""
        known = self.entries.pop(key, 0)
        if isinstance(known, int):
            calls = known + 1
            # What is dropped here is destroyed before a recording begins, not while it goes on.
            while len(self.entries) >= MOST_RECORDINGS:
                self.entries.popitem(last=False)
            known = calls if calls <= CALLS_BEFORE_RECORDING else self.record(build)
        self.entries[key] = known
        return None if known is None or isinstance(known, int) else known

    def record(self, build: Callable[[], Captured]) -> Captured | None:
        for _ in range(ATTEMPTS):
            try:
                with _one_at_a_time:
                    return build()
            except CoadjointError:
                raise
            except Unrecordable as error:
                self.refusal = str(error)
                break
            except RuntimeError as error:
                self.refusal = str(error)
        if not self.warned:
            self.warned = True
            first_line = self.refusal.partition("\n")[0].rstrip(".")
            warnings.warn(
                f"{self.what} cannot be replayed as a CUDA graph ({first_line}). It runs operation by operation: "
                "the same numbers, but slower.",
                stacklevel=2,
            )
        return None
