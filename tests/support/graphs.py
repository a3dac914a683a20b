"""CUDA graphs on a CPU: what is recorded is repeated operation by operation, into the same memory.

`install` makes the package record there. Below autograd every operation of torch is written down
with its arguments and results; a replay runs them again and copies new results over the old ones.
Memory that a graph has freed is not used again, unlike on a GPU.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from coadjoint.networks import captured_runs, network, recurrence
from coadjoint.nn import layers
from coadjoint.sweeps import checks, costates, layout, norms, plan
from coadjoint.sweeps.engines import eager
from coadjoint.sweeps.engines.c import per_sample, row_products
from coadjoint.sweeps.engines.cuda import captured_stages, repeatable
from coadjoint.sweeps.engines.eager import fused

capturing = []  # the recordings under way


class Graph:
    """What a torch.cuda.CUDAGraph does, on a CPU."""

    def __init__(self):
        self.operations = []
        self.replays = 0

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, results in self.operations:
                again = func(*tree_map(alias, args), **tree_map(alias, kwargs))
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)


def alias(y):
    """The same memory, whose changes autograd does not count."""
    return y.data if isinstance(y, torch.Tensor) else y


class Recorder(TorchDispatchMode):
    """Writes operations down as they run."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise AssertionError(f"{func} reads a value while a graph is recorded")
        results = func(*args, **kwargs)
        self.graph.operations.append((func, args, kwargs, results))
        return results


@contextlib.contextmanager
def capture_graph(graph, stream, pool=None):
    capturing.append(graph)
    try:
        with Recorder(graph):
            yield
    finally:
        capturing.pop()


class Seen(TorchDispatchMode):
    """As in a rehearsal, where the package's own C is not called either."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def prepare_stream(device, rehearse, stream=None):
    with Seen():
        rehearse()
        rehearse()
    return stream or object()


def install(monkeypatch):
    """Tensors on the CPU are taken for tensors on a GPU, by what records and by what checks.

    The package's own C, which no recording sees, does not run, and no branch depends on values.
    """
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(captured_stages, "capture_graph", capture_graph)
    monkeypatch.setattr(captured_stages, "prepare_stream", prepare_stream)
    monkeypatch.setattr(network, "CAPTURED_ENGINES", ("cpu", "eager", "reference", "scan"))
    for module in (checks, plan, layout, recurrence, captured_runs, layers, repeatable):
        monkeypatch.setattr(module, "answers_late", lambda y: True)
    for module in (norms, costates):
        monkeypatch.setattr(module, "is_within_range", lambda *_: False)
    for module in (per_sample, row_products):
        monkeypatch.setattr(module, "can_run", lambda *_: False)
    monkeypatch.setattr(eager, "loops_for", lambda like: fused)
