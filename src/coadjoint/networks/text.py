"""Networks in text: torch's, without modules that have nothing to show."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torch import nn

from ..objectives.losses import Output

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def compact_repr(module: nn.Module) -> str:
    """The text of a network: what `extra_repr` says, and its modules that say more.

    A network's own parts are in its `extra_repr`: its layers, its cells and their parameters.
    Modules of the user are shown.
    """
    head = module.extra_repr()
    lines = []
    for name, child in module.named_children():
        if has_content(child):
            lines.append(f"({name}): {child!r}")
    kind = type(module).__name__
    if not lines:
        return f"{kind}({head})"
    inside = textwrap.indent("\n".join(filter(None, [head, *lines])), "  ")
    return f"{kind}(\n{inside}\n)"


def has_content(module: nn.Module) -> bool:
    """Whether a module has anything to show that its parent does not say."""
    if isinstance(module, nn.ParameterDict):
        return False
    is_part = isinstance(module, CONTAINERS) or type(module).__repr__ is compact_repr
    if not is_part or module.extra_repr():
        return True
    return any(has_content(child) for child in module.children())


def sizes_text(inputs: int, hidden: Sequence[int], outputs: int) -> str:
    """The sizes of a network; those of its layers once if all are equal, else as a list."""
    units = str(hidden[0]) if len(set(hidden)) == 1 else str(list(hidden))
    return f"inputs={inputs}, hidden={units}, outputs={outputs}"


def output_text(output: Output) -> str:
    """What turns pre-outputs into outputs, by its name."""
    name = output if isinstance(output, str) else getattr(output, "__name__", "a function")
    return f"output={name!r}"
