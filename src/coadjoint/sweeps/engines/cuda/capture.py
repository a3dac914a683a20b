"""CUDA graphs: operations recorded once and replayed as a whole.

On a GPU a gradient is a hundred small operations, and launching each of them takes longer than
running it. GraphCache serves the gradients (gradients/captured.py) and functions with derivatives
(captured_function.py).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ....errors import CoadjointError
from ...torch_internals import TorchDispatchMode, current_stream_address, tree_leaves

CALLS_BEFORE_RECORDING = 2  # they run operation by operation
MOST_RECORDINGS = 4  # that a cache keeps
ATTEMPTS = 2  # at a recording: a failure may have come from elsewhere in the process
Captured = TypeVar("Captured")
_recording_lock = threading.Lock()  # CUDA takes one recording at a time


class Unrecordable(RuntimeError):
    """The operations depend on values, or leave the device: no recording can repeat them."""


def is_recording() -> bool:
    """Is a recording being made, by this thread or by another one?"""
    return _recording_lock.locked()


@contextlib.contextmanager
def recording_turn() -> Iterator[bool]:
    """Inside, this thread may make a recording, if True is given: no other one is under way.

    Nobody waits for a turn. The recording under way may have called us: it rehearses a loss that
    calls a module, say. Or it waits for a thread of autograd that is busy with our backward.
    """
    is_free = _recording_lock.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            _recording_lock.release()


class LastStream:
    """The stream on which some memory was used last: the next user waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.address: int | None = None  # CUDA's name of the stream

    def wait(self) -> None:
        """Let the current stream wait for what was launched on the last one, if that is another."""
        if self.device.type != "cuda":  # a stand-in of the tests
            return
        address = current_stream_address(self.device)
        if address == self.address:
            return
        current = torch.cuda.current_stream(self.device)
        if self.stream is not None:
            current.wait_stream(self.stream)
        self.stream = current
        self.address = address


class RefuseWaiting(TorchDispatchMode):
    """Refuse operations that wait for the device, in this thread and in autograd's for it.

    torch.cuda.set_sync_debug_mode would refuse them in every other thread of the process too.
    """

    WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation of torch, unless no recording can repeat it: then Unrecordable."""
        if self.reads_values(func, args):
            raise Unrecordable(f"{func} needs values while the gradient is computed")
        result: object = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self.changes_device(args, result):
            raise Unrecordable(f"{func} moves data between the CPU and the GPU")
        return result

    @staticmethod
    def on_device(y: object) -> bool:
        """Whether an argument is a tensor on a GPU."""
        return isinstance(y, Tensor) and y.is_cuda

    def reads_values(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether an operation must know values on the device to know its result's shape."""
        if not any(map(self.on_device, args)):
            return False
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            # An index of truth values has as many entries as there are true ones.
            truth_values = (torch.bool, torch.uint8)
            return any(isinstance(i, Tensor) and i.dtype in truth_values for i in args[1])
        return any(tag in func.tags for tag in self.WAITS)

    def changes_device(self, args: Sequence[object], result: Tensor) -> bool:
        """Whether a result lies on another device than an argument.

        Tensors of no axes are left out: torch takes them from the CPU as plain numbers.
        """
        if result.dim() == 0:
            return False
        arrays = [y for y in tree_leaves(args) if isinstance(y, Tensor) and y.dim()]
        return any(y.is_cuda != result.is_cuda for y in arrays)


def prepare_stream(
    device: torch.device,
    rehearse: Callable[[], object],
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.Stream:
    """A stream to record on, after two rehearsals: calls of what is to be recorded.

    The first may load kernels, which waits for the device. The second finds what cannot be
    recorded: an operation that fails while recording would leave the device in disorder.
    stream: the one to record on; None for a new one.
    """
    if stream is None:
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
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    pool: Any = None,  # torch's handle of a memory pool
) -> Iterator[None]:
    """Record what is launched on `stream` inside, into `graph`; pool: where its memory comes from.

    No garbage is collected meanwhile: it may hold old graphs, and CUDA refuses to destroy one
    during a recording. Other threads may go on using the device (capture_error_mode).
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if was_collecting:
            gc.enable()


class GraphCache(Generic[Captured]):
    """The last MOST_RECORDINGS recordings, by key; a key is recorded at its third call.

    what: the subject of the warning, "this gradient" for instance.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        # By key: how many calls there were so far, the recording, or None if none can be made.
        self.entries: OrderedDict[Hashable, int | Captured | None] = OrderedDict()
        # The key and the recording that were found last: to compare keys is quicker than to hash.
        self._latest: tuple[Hashable, Captured] | None = None
        self.refusal = ""  # of the last recording that failed
        self.warned = False

    def find(self, key: Hashable, build: Callable[[], Captured]) -> Captured | None:
        """The recording for this key; None if this call is to run operation by operation.

        So do the first CALLS_BEFORE_RECORDING calls, those during another recording, and all calls
        if no recording can be made. build: makes the recording.
        """
        latest = self._latest
        if latest is not None and latest[0] == key:
            return latest[1]
        entry = self.entries.pop(key, 0)
        if isinstance(entry, int):
            calls = entry + 1
            # What is dropped here is destroyed before a recording begins, not while it goes on.
            while len(self.entries) >= MOST_RECORDINGS:
                self.drop_one()
            entry = min(calls, CALLS_BEFORE_RECORDING)
            if calls > CALLS_BEFORE_RECORDING:
                with recording_turn() as is_free:
                    if is_free:
                        entry = self.record(build)
        self.entries[key] = entry  # at the end: the one used last is dropped last
        if entry is None or isinstance(entry, int):
            self._latest = None
            return None
        self._latest = key, entry
        return entry

    def give_up(self, key: Hashable) -> None:
        """Forget the recording for this key, and make no other."""
        self._latest = None
        self.entries[key] = None

    def drop_one(self) -> None:
        """Drop the oldest count, or else the oldest recording.

        So keys that are never met again, such as a function made anew for each call, do not drive
        out recordings.
        """
        counts = [key for key, entry in self.entries.items() if isinstance(entry, int)]
        del self.entries[counts[0] if counts else next(iter(self.entries))]

    def record(self, build: Callable[[], Captured]) -> Captured | None:
        """Make a recording, in a recording_turn(); None if it cannot be made, and a warning.

        Errors of the package itself are raised. Unrecordable operations are not tried again; other
        failures are, since they may have come from elsewhere in the process.
        """
        for _ in range(ATTEMPTS):
            try:
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
                f"{self.what} cannot be replayed as a CUDA graph ({first_line}). It runs operation "
                "by operation: the same numbers, but slower.",
                stacklevel=2,
            )
        return None
