"""Marks in torch's graph, at which a gradient can be stopped.

A recorded output passes through a mark: the identity, with a node of its own in torch's graph. As
long as the tape's switch is open, gradients pass it as if it were not there. While the switch is
closed they end at the marks. What reaches a mark then came by paths that lead through no other
mark, so that the model falls into pieces between marks, without its graph being cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import Unsupported

NAMES_WITHOUT_DERIVATIVE = {
    "CheckpointFunctionBackward": (
        "reentrant checkpointing has no derivative by inner outputs: call torch's checkpoint with "
        "use_reentrant=False."
    ),
    "CompiledFunctionBackward": (
        "the model has a part that torch.compile has compiled, which has only one derivative: "
        "call it without torch.compile."
    ),
}
FUSED_ATTENTION = "ScaledDotProduct"  # how the names of the nodes of torch's kernels begin


class Switch:
    """Whether gradients pass the marks of a tape."""

    def __init__(self) -> None:
        self.is_closed = False

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let no gradient pass inside the `with` block."""
        self.is_closed = True
        try:
            yield
        finally:
            self.is_closed = False


class Mark(torch.autograd.Function):
    """The identity, with a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, switch: Switch, number: int) -> Tensor:
        """The same values; number: of the recorded output."""
        ctx.set_materialize_grads(False)
        ctx.switch = switch
        ctx.number = number
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, None]:
        """The gradient as it came; nothing while the switch is closed."""
        return (None if ctx.switch.is_closed else g), None, None


def marks_below(y: Tensor, switch: Switch, again: bool) -> list[int]:
    """The numbers of the marks that a gradient at y meets first, in increasing order.

    switch: whose marks count. again: the gradient will be differentiated; a node without a second
    derivative is refused.
    """
    found: set[int] = set()
    top = y.grad_fn
    seen: set[Node] = set()
    waiting = [] if top is None else [top]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "switch", None) is switch:
            found.add(node.number)  # type: ignore[attr-defined]
            continue
        refuse_node(node, again)
        waiting += [below for below, _ in node.next_functions if below is not None]
    return sorted(found)


def refuse_node(node: Node, again: bool) -> None:
    """Refuse a node of the graph without the derivatives that costates need."""
    name = node.name()
    reason = NAMES_WITHOUT_DERIVATIVE.get(name)
    if reason is not None:
        raise Unsupported(reason)
    if again and name.startswith(FUSED_ATTENTION):
        raise Unsupported(
            "the loss depends on attention by a fused kernel, which has no second derivative: "
            "call all of the model inside `with co.record(...)`, where torch's math kernel is "
            "chosen, or run under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
