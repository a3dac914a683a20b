"""Choose submodules of a model by patterns over their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from ..errors import InputError, KindError, Unsupported, brief, nearest
from ..sweeps.torch_internals import is_compiled

Place = str | nn.Module
Places = Place | Sequence[Place]

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called, so they have no outputs
WILDCARDS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
LONGEST_LIST = 12  # names that a message lists


def choose_submodules(model: nn.Module, at: Places) -> dict[nn.Module, str]:
    """The submodules of `model` that `at` chooses, with their names, in the order of the model.

    at: a pattern over names, a submodule, or a list of them. In a pattern `*` stands for any text
    without a dot, `**` for any text, `?` for one character but a dot. A ModuleList stands for what
    it holds. Refused: a pattern that matches nothing, and a module that is not in the model.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Tanh()))
        >>> list(choose_submodules(model, "*").values())
        ['0', '1']
        >>> list(choose_submodules(model, ["1.*", model[0]]).values())
        ['0', '1.0', '1.1']
    """
    by_name = dict(model.named_modules(remove_duplicate=False))
    chosen: set[nn.Module] = set()
    for place in list_places(at):
        if isinstance(place, str):
            chosen.update(match_pattern(model, by_name, place))
        else:
            chosen.update(find_module(model, place))
    names: dict[nn.Module, str] = {}
    for name, module in by_name.items():
        if module in chosen:
            names.setdefault(module, name)
    return names


def list_places(at: Places) -> list[Place]:
    """`at` as a list of patterns and modules."""
    places = [at] if isinstance(at, str | nn.Module) else at
    if not isinstance(places, list | tuple) or not places:
        raise KindError(
            "`at` is a pattern over names of submodules ('blocks.*'), a submodule, or a list of "
            f"them; got {brief(at)}."
        )
    for place in places:
        if not isinstance(place, str | nn.Module):
            raise KindError(f"`at` lists patterns and submodules; got {brief(place)} among them.")
    return list(places)


def match_pattern(model: nn.Module, by_name: dict[str, nn.Module], pattern: str) -> list[nn.Module]:
    """The modules whose names match the pattern; there is at least one."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    expression = "".join(WILDCARDS.get(part, re.escape(part)) for part in parts)
    matching: list[nn.Module] = []
    containers: list[str] = []
    for name, module in by_name.items():
        is_match = re.fullmatch(expression, name) is not None and (name or not pattern)
        if is_match and isinstance(module, CONTAINERS):
            containers.append(name)
        elif is_match:
            matching.append(module)
    if not matching and containers:
        raise InputError(
            f"{containers[0]!r} is a {type(by_name[containers[0]]).__name__}, which is never "
            f"called and has no output: use at='{containers[0]}.*' for what it holds."
        )
    if not matching:
        raise InputError(
            f"no submodule of {type(model).__name__} has a name like {pattern!r}; "
            f"{describe_names(by_name, pattern)}."
        )
    return matching


def find_module(model: nn.Module, given: nn.Module) -> list[nn.Module]:
    """The given submodule of the model; if it is a ModuleList, what it holds."""
    if not any(inner is given for inner in model.modules()):
        raise InputError(f"`at` has a {type(given).__name__} that is not in the recorded model.")
    if isinstance(given, CONTAINERS):
        return list(given.children())
    return [given]


def describe_names(by_name: dict[str, nn.Module], pattern: str) -> str:
    """The names of a model in words, the one most like the pattern first."""
    names = [name for name in by_name if name and not isinstance(by_name[name], CONTAINERS)]
    if not names:
        return "it has no submodules: use at='' for the model itself"
    listed = ", ".join(names[:LONGEST_LIST])
    if len(names) > LONGEST_LIST:
        listed += f", ... ({len(names)} in all)"
    near = nearest(pattern, names)
    hint = "" if near is None else f"did you mean {near!r}? "
    return f"{hint}it has {listed}"


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model with compiled parts, whose graph has only one derivative and no insides."""
    for name, inner in model.named_modules():
        if is_compiled(inner):
            what = f"submodule {name!r}" if name else "the model"
            raise Unsupported(
                f"{what} is compiled, so that nothing inside can be recorded: record and call the "
                "module that was given to torch.compile."
            )
