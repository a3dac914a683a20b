"""Writer: the operations that a network is translated into, for one format or another.

A translation calls a writer once for each operation, and never asks for its format. Arrays over
time are [T, B, .], states [B, .], samples without time [B, ...].
"""

from __future__ import annotations

import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...networks.recurrence import Recurrence


@dataclass(frozen=True)
class Value:
    """A tensor of the exported network, by its name there.

    dtype: "float32", "float64", "int64" or "bool".
    """

    name: str
    dtype: str


Argument = Value | float
# (writer, the slices of the sequences at one step, the slots of the state) -> the new slots
Body = Callable[["Writer", Sequence[Value], Sequence[Value]], Sequence[Value]]


class Writer(ABC):
    """Writes operations one after the other.

    dtype         the type that the network computes in, "float32" or "float64"
    folds_constants  whether what depends on weights alone is computed before it is written
    """

    dtype: str
    folds_constants = False

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def unique(self, hint: str) -> str:
        """A new name that begins like `hint` and is an identifier, whatever the hint holds."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", hint) or "y"
        if not base[0].isalpha() or keyword.iskeyword(base):
            base = f"y_{base}"
        name = base
        number = 1
        while name in self.taken:
            name = f"{base}_{number}"
            number += 1
        self.taken.add(name)
        return name

    @abstractmethod
    def constant(self, value: Tensor, name: str, as_it_is: bool = False) -> Value:
        """A tensor that is stored with the network, in the type that this computes in.

        as_it_is: in its own type.
        """

    @abstractmethod
    def apply(
        self, op: str, *arguments: Argument, name: str = "", dtype: str = "", **attributes: object
    ) -> Value:
        """The result of an operation; dtype: its type, if it is not that of the first argument."""

    @abstractmethod
    def affine(self, x: Value, W: Tensor, b: Tensor | None, name: str) -> Value:
        """W x + b along the last axis of x."""

    @abstractmethod
    def first_state(self, x0: Tensor, u: Value, name: str) -> Value:
        """The vector x0 [d] for each sample of u [T, B, .], [B, d]."""

    @abstractmethod
    def reverse(self, y: Value, lengths: Value) -> Value:
        """Each sample's own steps of y [T, B, .] in reverse order."""

    @abstractmethod
    def last(self, y: Value, lengths: Value) -> Value:
        """Each sample's last step of y [T, B, .], [B, .]."""

    @abstractmethod
    def scan(
        self,
        name: str,
        sequences: Sequence[Value],
        starts: Sequence[Value],
        slots: Sequence[str],
        alive: Value,
        body: Body,
    ) -> tuple[list[Value], list[Value]]:
        """Run a step function over time.

        sequences  what a step reads, [T, B, .] each
        starts     the first state of each slot, [B, d]; slots: their names
        alive      [T, B, 1], where a sample has a step; elsewhere its state stays
        Returns each slot at all steps, [T, B, d], and each slot after the last one, [B, d].
        """

    @abstractmethod
    def built_in(
        self, kind: str, name: str, layer: Recurrence, u: Value, lengths: Value, reverse: bool
    ) -> tuple[Value, Value]:
        """A layer by the format's own elman, lstm or gru: h [T, B, d], and its last [B, d].

        kind     "tanh" or "relu" for elman, "lstm", "gru"
        reverse  the layer reads each sequence from its end; h is in the order of the sequence
        """

    def concat(self, parts: Sequence[Value], name: str = "") -> Value:
        """The parts side by side along the last axis."""
        return parts[0] if len(parts) == 1 else self.apply("concat", *parts, name=name)

    def split(self, y: Value, size: int, names: Sequence[str]) -> list[Value]:
        """Parts of `size` entries along the last axis, one for each name."""
        if len(names) == 1:
            return [y]
        parts = []
        for i, name in enumerate(names):
            part = self.apply("part", y, name=name, start=i * size, stop=(i + 1) * size)
            parts.append(part)
        return parts
