"""Checks before a run is restored: its settings, and the names, types and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from ..errors import StorageError
from ..gradients import restoring
from ..networks.interface import Net
from .json_types import JsonObject

T = TypeVar("T")


def describe_difference(then: object, now: object, name: str = "") -> str:
    """Where two nested descriptions first differ, in words. name: the key of the values, "a.b".

    A mapping with a key "sha256" describes a file of data, which is called by its own name.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        sum_then = then.get("sha256")
        sum_now = now.get("sha256")
        if sum_then != sum_now:
            sums = f"SHA-256 {str(sum_then)[:12]} then, {str(sum_now)[:12]} now"
            return f"the file {now.get('name')!r} ({sums})"
        for key in sorted(set(then) | set(now)):
            if then.get(key) != now.get(key):
                inner = f"{name}.{key}".lstrip(".")
                return describe_difference(then.get(key), now.get(key), inner)
    return f"{name or 'the description of the run'} ({then!r} then, {now!r} now)"


def parse_numbers(values: JsonObject) -> JsonObject:
    """The values as numbers: JSON has none for NaN and infinities, so files hold their names."""
    return {name: float(v) if isinstance(v, str) else v for name, v in values.items()}


def select_part(part: str, values: Mapping[str, T]) -> dict[str, T]:
    """The values whose names begin with "PART.", under their names without it.

    >>> select_part("optimiser", {"optimiser.0.step": 1, "rng": 2})
    {'0.step': 1}
    """
    prefix = f"{part}."
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values[name] for name in names}


def refuse_if_foreign(names: Iterable[str], parts: Collection[str]) -> None:
    """Refuse a tensor whose name begins with none of these parts."""
    for name in names:
        if name.partition(".")[0] not in parts:
            refuse_if_faulty(f"{name!a} does not belong to it")


def refuse_if_faulty(fault: str | None, prefix: str = "") -> None:
    """Raise StorageError with this fault; nothing happens if it is None."""
    if fault is not None:
        raise StorageError(f"{prefix}{fault}.")


def load_weights(net: Net, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a network; refuse those of another network. `source` is for the error."""
    compare_tensors(net.state_dict(), weights, source)
    net.load_state_dict(weights)


def compare_tensors(
    expected: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str
) -> None:
    """Refuse tensors that have other names, types or shapes than `expected`, a network's.

    source: the file or checkpoint they are from, for the error.
    """
    for name in sorted(set(expected) | set(given)):
        mine = describe_tensor(expected.get(name))
        theirs = describe_tensor(given.get(name))
        if mine != theirs:
            raise StorageError(
                f"{source} belongs to another network: its '{name}' is {theirs}, "
                f"but this network's is {mine}."
            )


def describe_tensor(tensor: Tensor | None) -> str:
    """A tensor's type and shape: "float32 [3, 4]"; "missing" for None."""
    return "missing" if tensor is None else restoring.describe_value(tensor)
