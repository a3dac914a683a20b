"""What a run predicts for its held-out data, as held_out.json has it, ready to be drawn."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ...errors import MissingError, StorageError
from .. import schemas
from .text import Row, clean, plural

EVALUATION = "evaluation"  # the one set of the page of an evaluation, which needs no name
SHOWN_FIRST = ("test", "valid")  # splits in the order in which the page shows them
MIDNIGHT = re.compile(r"[T ]00:00(:00(\.0+)?)?$")


@dataclass(frozen=True)
class SplitAnswers:
    """The answers to one held-out set; `data` is its part of held_out.json, as the schema says.

    true, predicted: by output, the targets of one sequence after another.
    """

    name: str
    data: Row

    @property
    def kept(self) -> Row:
        """The targets that the file keeps, with the names of their sequences."""
        kept: Row = self.data["kept"]
        return kept

    @cached_property
    def true(self) -> list[np.ndarray]:
        """The targets, NaN where there is none."""
        return [np.array(column, dtype=np.float64) for column in self.kept["true"]]

    @cached_property
    def predicted(self) -> list[np.ndarray]:
        """The predictions; classes as their numbers."""
        return [np.array(column, dtype=np.float64) for column in self.kept["predicted"]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of targets of each sequence that is kept."""
        return np.array(self.kept["lengths"], dtype=np.int64)

    @cached_property
    def ids(self) -> list[str]:
        """The name of the sequence of each target."""
        ids = list(map(clean, self.kept["ids"]))
        return [ids[i] for i in np.repeat(np.arange(len(ids)), self.lengths)]

    @cached_property
    def times(self) -> list[str]:
        """The time of each target as its file has it; [] if the file has none.

        Where all are midnights, only the dates.
        """
        times = list(map(clean, self.kept["times"]))
        if times and all(MIDNIGHT.search(time) for time in times):
            return [MIDNIGHT.sub("", time) for time in times]
        return times

    @cached_property
    def rows(self) -> np.ndarray:
        """The row of each target in its series, from 0; its place in the sequence if unknown."""
        first = self.kept["first"] or [0] * len(self.lengths)
        places = [np.arange(T) + start for T, start in zip(self.lengths, first, strict=True)]
        return np.concatenate([np.empty(0, dtype=np.int64), *places])

    @cached_property
    def series(self) -> list[str]:
        """The name of the series of each target: a sequence may be a window of one."""
        names = list(map(clean, self.kept["series"])) or list(map(clean, self.kept["ids"]))
        return [names[i] for i in np.repeat(np.arange(len(names)), self.lengths)]

    @property
    def note(self) -> str:
        """A sentence about targets that are not kept; "" if all are."""
        kept = int(np.isfinite(np.array(self.kept["true"], dtype=np.float64)).any(0).sum())
        total = self.data["targets"]
        if kept >= total:
            return ""
        return f"{self.name}: {kept:,} of {plural(total, 'target')} drawn; the tables count all."

    def title(self, text: str) -> str:
        """The title of a table, with the name of the set unless it is the only one there can be."""
        return text if self.name == EVALUATION else f"{text}, {self.name}"


@dataclass(frozen=True)
class Answers:
    """The content of held_out.json."""

    data: Row
    splits: list[SplitAnswers]  # the first one is the one that counts

    @property
    def kind(self) -> str:
        """What was learned: "classify", "regress", "next" or "reconstruct"."""
        return str(self.data["kind"])

    @property
    def is_every(self) -> bool:
        """Whether every step of a sequence has a target."""
        return bool(self.data["at"] == "every")

    @property
    def labels(self) -> list[str]:
        """The classes."""
        return list(map(clean, self.data["labels"]))

    @property
    def outputs(self) -> list[str]:
        """The names of the numbers that are predicted."""
        return list(map(clean, self.data["outputs"]))


def read_answers(folder: Path, faults: list[str]) -> Answers | None:
    """The answers of a run folder; None for a run without them, or if they are damaged.

    Damage adds a sentence to `faults`.
    """
    path = folder / "held_out.json"
    if not os.path.lexists(path):
        return None
    try:
        data = schemas.read(path, schemas.HeldOutSchema, schemas.MAX_HELD_OUT_BYTES)
    except StorageError as error:
        fault = clean(error).removeprefix(str(path)).lstrip(": ")
        faults.append(f"held_out.json {fault}")
        return None
    except MissingError:  # without the package that checks it, it is not used
        return None
    names = [name for name in SHOWN_FIRST if name in data["splits"]]
    names += [name for name in data["splits"] if name not in SHOWN_FIRST]
    splits = [SplitAnswers(clean(name), data["splits"][name]) for name in names]
    with_targets = [split for split in splits if split.data["targets"]]
    return Answers(data, with_targets) if with_targets else None
