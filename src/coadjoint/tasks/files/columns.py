"""The columns of a table: their roles, and their contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Roles:
    """Which column is what; "" for none. `notes` say what was chosen.

    categorical   the features that hold words
    """

    id: str
    time: str
    targets: tuple[str, ...]
    features: tuple[str, ...]
    notes: tuple[str, ...]
    categorical: tuple[str, ...] = ()


@dataclass
class TableColumns:
    """The columns of a table that have a role.

    numbers    [N] by name;  words [N] by name
    inputs     [N, C], the features in their order, if `numbers` are columns of it; else None
    time       [N], and `stamps` as they are written, or None; `has_dates`: they are dates, with
               their day or month first if `date_order` says so
    lines      [N] the line of the file for each row
    """

    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, Sequence[str]] = field(default_factory=dict)
    time: np.ndarray | None = None
    stamps: Sequence[str] | None = None
    has_dates: bool = False
    date_order: str = ""
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    inputs: np.ndarray | None = None

    def all_inputs(self, features: Sequence[str]) -> np.ndarray:
        """The features [N, C], without a copy if they lie side by side already."""
        if self.inputs is not None:
            return self.inputs
        return np.stack([self.numbers[name] for name in features], 1)
