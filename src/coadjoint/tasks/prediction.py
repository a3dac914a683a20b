"""Prediction: new sequences for a network that was trained on others, and its answers as rows of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import InputError, NumericalError, escape_undecodable, one_line
from ..objectives.batch import Batch
from .description import Description
from .preparation import PreparedSheet
from .task import Sequences


@dataclass(frozen=True, eq=False)
class Prediction:
    """New sequences, scaled as those of training, in the order of their file."""

    description: Description
    source: Path
    cut: PreparedSheet
    u: np.ndarray  # [N, inputs]

    def __len__(self) -> int:
        return len(self.cut.pieces)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.cut.recording.notes + self.cut.notes

    @property
    def ids(self) -> list[str]:
        return [self.cut.name(i) for i in range(len(self))]

    def batches(self, n: int = 1000) -> Iterator[tuple[list[str], Batch]]:
        """(ids, batch) of at most n sequences, in the order of the file."""
        ids = self.ids
        for k in range(0, len(self), n):
            chosen = Sequences(
                [self.u[start:stop] for _, start, stop in self.cut.pieces[k : k + n]]
            )
            yield ids[k : k + n], chosen.batch(range(len(chosen)), self.description.at == "every")

    def rows(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[str]]:
        """The predictions as rows of text, the header first, from the pre-outputs a of each batch: [B, outputs], or
        [T, B, outputs] at every step.

        Columns: id, the time if there is one, prediction, and one probability for each class. With kind "next" a row
        predicts the step after it."""
        d, recording = self.description, self.cut.recording
        every, stamps = d.at == "every", recording.stamps
        many = d.features if d.kind == "next" else d.targets
        names = [f"prediction {n}" for n in many] if len(many) > 1 else ["prediction"]
        classes = [f"probability {label}" for label in d.labels]
        yield [spreadsheet_cell(c) for c in ("id", *(["time"] if stamps else []), *names, *classes)]
        piece = 0
        for a in outputs:
            a = np.asarray(a.detach().cpu() if isinstance(a, Tensor) else a, dtype=np.float64)
            width = len(d.labels) or len(d.target_std)
            if a.ndim != 2 + every or a.shape[-1] != width or piece + a.shape[every] > len(self):
                raise InputError(f"outputs have shape {list(a.shape)}; expected [{'T, ' if every else ''}B, {width}] for the batches of {len(self)} sequences, in their order.")  # fmt: skip
            for j in range(a.shape[every]):
                i, start, stop = self.cut.pieces[piece]
                values = a[: stop - start, j] if every else a[j : j + 1]
                if not np.isfinite(values).all() or len(values) < (stop - start if every else 1):
                    raise NumericalError(f"the outputs for sequence '{one_line(self.cut.name(piece))}' are not finite, or too few; nothing was written.")  # fmt: skip
                name = spreadsheet_cell(recording.ids[i] if every else self.cut.name(piece))
                for k, cells in enumerate(self._cells(values)):
                    row = start + k if every else stop - 1
                    yield [name, *([spreadsheet_cell(stamps[row])] if stamps else []), *cells]
                piece += 1
        if piece != len(self):
            raise InputError(f"outputs for {piece} sequences; expected {len(self)}.")

    def _cells(self, a: np.ndarray) -> Iterator[list[str]]:
        d = self.description
        if d.kind == "classify":
            p = np.exp(a - a.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            for row in p:
                yield [spreadsheet_cell(d.labels[int(row.argmax())]), *(f"{x:.9g}" for x in row)]
        else:
            for row in a * np.array(d.target_std) + np.array(d.target_mean):
                yield [f"{x:.9g}" for x in row]


def spreadsheet_cell(cell: str) -> str:
    """Text that a spreadsheet would run as a formula gets an apostrophe; numbers stay."""
    risky = cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not re.fullmatch(
        r"[+-][\d.:eE+-]*\d", cell
    )
    return f"'{cell}" if risky else escape_undecodable(cell)
