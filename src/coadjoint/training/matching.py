"""A network and a task that fit each other: checked before a run begins."""

from __future__ import annotations

from ..errors import InputError, KindError
from ..networks.interface import Net
from ..tasks.task import Task


def refuse_if_mismatched(net: object, task: object) -> None:
    """Refuse a network that does not have the inputs, outputs and readout of the task."""
    if not isinstance(net, Net) or not isinstance(task, Task):
        raise KindError(
            "train takes a Network (or a Stack, an EncoderDecoder, a Chain) and a Task; "
            f"got {type(net).__name__} and {type(task).__name__}."
        )
    refuse_if_time_differs(net, task)
    for name in ("inputs", "outputs", "readout", "output"):
        expected = getattr(task, name)
        given = getattr(net, name)
        if net.sample_axis == 0 and given == 0:  # a chain whose maps do not say
            continue
        if given != expected:
            raise InputError(
                f"task '{task.name}' needs a network with {name}={expected!r}; "
                f"this one has {name}={given!r}."
            )


def refuse_if_time_differs(net: Net, task: Task) -> None:
    """Refuse a chain for sequences, a recurrent network for samples, and a chain's other shape."""
    is_chain = net.sample_axis == 0
    if is_chain and task.shape is None:
        raise InputError(
            f"task '{task.name}' is made of sequences (its `shape` is None), but a Chain has no "
            "time steps: use a Network, or a task such as digits-flat."
        )
    if not is_chain and task.shape is not None:
        raise InputError(
            f"task '{task.name}' has samples without time, of shape {list(task.shape)}: use a "
            "co.Chain."
        )
    shape = getattr(net, "shape", None)
    if shape is not None and tuple(shape) != task.shape:
        raise InputError(
            f"task '{task.name}' has samples of shape {list(task.shape or ())}; this chain reads "
            f"{list(shape)}."
        )
