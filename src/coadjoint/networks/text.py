"""Networks in text: torch's, without modules that have nothing to show."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Sequence

import torch
from torch import nn

from ..cells.activations import activation_name
from ..cells.cell import Cell
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
    return f"output={value_text(output)}"


def value_text(value: object) -> str:
    """The value of an option: of a function its name, as a word."""
    return repr(activation_name(value) if callable(value) else value)


def option_texts(cell: Cell | None) -> list[str]:
    """The options of a cell: its activation, and others that differ from their defaults.

    [] for a step function, which holds its own, and for a cell that was made without options.
    Options that are part of the name, as in "scrn-learned", are left out.
    """
    if cell is None or cell._origin is None:
        return []
    make, args, given = cell._origin
    signature = inspect.signature(make)
    texts = []
    for key, value in signature.bind(*args, **given).arguments.items():
        is_known = value == signature.parameters[key].default or cell.name.endswith(f"-{key}")
        if key == "activation" or not is_known:
            texts.append(f"{key}={value_text(value)}")
    return texts


def layers_text(names: Sequence[str], cells: Sequence[Cell | None]) -> tuple[str, list[str]]:
    """The names of layers in brackets, and the options that all of them have.

    Options that differ stand behind the name of each layer: "[elman(activation='relu'), gru]".
    """
    options = [option_texts(cell) for cell in cells]
    if all(each == options[0] for each in options):
        return f"[{', '.join(names)}]", options[0]
    words = []
    for name, texts in zip(names, options, strict=True):
        words.append(f"{name}({', '.join(texts)})" if texts else name)
    return f"[{', '.join(words)}]", []


def dtype_texts(module: nn.Module) -> list[str]:
    """The type of a network's numbers, if it is not float32; [] for one without any."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            is_usual = tensor.dtype == torch.float32
            return [] if is_usual else [f"dtype={str(tensor.dtype).removeprefix('torch.')}"]
    return []
