"""Restoring: what a resumed run must agree on, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from ..errors import StorageError
from ..gradients import restoring
from ..networks.interface import Net


def describe_difference(a: Any, b: Any, name: str = "") -> str:
    """Where two nested values differ first; a file by its name."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.get("sha256") != b.get("sha256"):
            return f"the file {b.get('name')!r} (SHA-256 {str(a.get('sha256'))[:12]} then, {str(b.get('sha256'))[:12]} now)"
        for key in sorted(set(a) | set(b)):
            if a.get(key) != b.get(key):
                return describe_difference(a.get(key), b.get(key), f"{name}.{key}".lstrip("."))
    return f"{name or 'the description of the run'} ({a!r} then, {b!r} now)"


def parse_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: it comes back as its name."""
    return {
        name: float(value) if isinstance(value, str) else value for name, value in values.items()
    }


def select_part(of: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of {"optimiser.0.step": x, "rng": y} the part "optimiser", {"0.step": x}."""
    return {
        name[len(of) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{of}.")
    }


def refuse_if_foreign(tensors: Iterable[str], parts: Collection[str]) -> None:
    """Refuse a tensor that is of none of these parts."""
    for name in tensors:
        if name.partition(".")[0] not in parts:
            refuse_if_faulty(f"{name!a} does not belong to it")


def refuse_if_faulty(what: str | None, before: str = "") -> None:
    """Refuse a checkpoint, if there is something to complain about."""
    if what is not None:
        raise StorageError(f"{before}{what}.")


def load_weights(net: Net, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a network of the same shape, or say where they differ first."""
    compare_tensors(net.state_dict(), weights, source)
    net.load_state_dict(weights)


def compare_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    """Refuse tensors of other names, types or shapes than a network's own: say where they differ first."""
    for name in sorted(set(own) | set(given)):
        mine, theirs = own.get(name), given.get(name)
        if (
            mine is None
            or theirs is None
            or mine.shape != theirs.shape
            or mine.dtype != theirs.dtype
        ):
            tell = lambda tensor: "nothing" if tensor is None else restoring.describe_value(tensor)
            raise StorageError(
                f"{source} belongs to another network: for '{name}' it has {tell(theirs)} and the network {tell(mine)}."
            )
