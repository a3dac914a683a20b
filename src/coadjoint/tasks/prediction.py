"""Prediction: new sequences or samples for a trained network, and its outputs as rows of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import InputError, NumericalError, escape_undecodable, one_line
from ..objectives.batch import Batch
from .cutting import PreparedSheet
from .description import Description
from .encoding import notes_on_encodings
from .scaling import arrange_samples
from .task import LARGEST_BATCH, Samples, Sequences, steps_for_entries


@dataclass(frozen=True, eq=False)
class Prediction:
    """New sequences or samples, scaled like those of training, in the order of their file."""

    description: Description
    source: Path
    cut: PreparedSheet
    u: np.ndarray  # [N, inputs]

    def __len__(self) -> int:
        return len(self.cut.pieces)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen or left out when the file was read."""
        of_words = notes_on_encodings(self.cut.sheet, self.description)
        return (*self.cut.sheet.notes, *self.cut.notes, *of_words)

    @property
    def ids(self) -> list[str]:
        """The names of the sequences."""
        return [self.cut.name(i) for i in range(len(self))]

    def batches(self, n: int = 1000) -> Iterator[tuple[list[str], Batch]]:
        """Yield (ids, batch) of at most n sequences, in the order of the file.

        Of large samples, such as photographs, a batch holds fewer.
        """
        ids = self.ids
        if self.description.input_shape is not None:
            n = min(n, max(1, LARGEST_BATCH // steps_for_entries(self.description.inputs)))
        every = self.description.at == "every"
        for k in range(0, len(self), n):
            pieces = self.cut.pieces[k : k + n]
            chosen: Samples | Sequences
            if self.description.input_shape is None:
                chosen = Sequences([self.u[start:stop] for _, start, stop in pieces])
            else:
                chosen = Samples(arrange_samples(pieces, self.u, self.description))
            yield ids[k : k + n], chosen.batch(range(len(chosen)), every)

    def rows(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[str]]:
        """Yield the predictions as rows of text, the header first.

        The columns are id, the time if the file has one, prediction, and one probability for each
        class. With kind "next" a row predicts the step after it.

        Args:
            outputs: The pre-outputs a of each batch: [B, outputs], or [T, B, outputs] at every
                step.
        """
        every = self.description.at == "every"
        yield self._header()
        done = 0  # sequences
        for a in outputs:
            if isinstance(a, Tensor):
                a = a.detach().cpu()
            values = np.asarray(a, dtype=np.float64)
            self._check_shape(values, done)
            if not every:
                values = values[None]  # one step for each sequence
            for j in range(values.shape[1]):
                yield from self._rows_of(done, values[:, j])
                done += 1
        if done != len(self):
            raise InputError(f"got outputs for {done} {self.unit}s; expected {len(self)}.")

    @property
    def unit(self) -> str:
        """What is predicted for: "sequence" or "sample"."""
        return self.cut.sheet.unit

    def _header(self) -> list[str]:
        """Return the names of the columns."""
        d = self.description
        predicted = d.targets
        if d.kind == "next":
            predicted = d.numeric
        elif d.kind == "reconstruct":
            predicted = entry_names(d)
        names = ["id"]
        if self.cut.sheet.stamps:
            names.append("time")
        if len(predicted) > 1:
            names += [f"prediction {name}" for name in predicted]
        else:
            names.append("prediction")
        names += [f"probability {label}" for label in d.labels]
        return [spreadsheet_cell(name) for name in names]

    def _check_shape(self, a: np.ndarray, done: int) -> None:
        """Refuse outputs of another shape, or for more sequences than there are.

        done: how many sequences had outputs before these.
        """
        d = self.description
        every = d.at == "every"
        width = d.outputs
        axes = "T, B" if every else "B"
        samples_axis = 1 if every else 0
        has_shape = a.ndim == samples_axis + 2 and a.shape[-1] == width
        if not has_shape or done + a.shape[samples_axis] > len(self):
            raise InputError(
                f"outputs have shape {list(a.shape)}; expected [{axes}, {width}] for the batches "
                f"of {len(self)} {self.unit}s, in their order."
            )

    def _rows_of(self, piece: int, a: np.ndarray) -> Iterator[list[str]]:
        """Yield the rows of one sequence, from its outputs [T or more, outputs] or [1, outputs]."""
        sheet = self.cut.sheet
        sequence, start, stop = self.cut.pieces[piece]
        if self.description.at == "every":
            name = sheet.ids[sequence]
            sheet_rows = range(start, stop)
        else:
            name = self.cut.name(piece)
            sheet_rows = range(stop - 1, stop)
        values = a[: len(sheet_rows)]
        if not np.isfinite(values).all() or len(values) < len(sheet_rows):
            raise NumericalError(
                f"the outputs for {self.unit} '{one_line(self.cut.name(piece))}' are not finite, "
                "or too few; nothing was written."
            )
        for row, cells in zip(sheet_rows, self._cells(values), strict=True):
            line = [spreadsheet_cell(name)]
            if sheet.stamps:
                line.append(spreadsheet_cell(sheet.stamps[row]))
            yield line + cells

    def _cells(self, a: np.ndarray) -> Iterator[list[str]]:
        """Yield prediction and probabilities for each row of outputs."""
        d = self.description
        if d.kind == "classify":
            p = np.exp(a - a.max(-1, keepdims=True))  # softmax, without overflow
            p /= p.sum(-1, keepdims=True)
            for row in p:
                label = spreadsheet_cell(d.labels[int(row.argmax())])
                yield [label, *number_cells(row)]
        else:
            mean, std = d.target_scale()
            for row in a * std + mean:
                yield number_cells(row)


def entry_names(description: Description) -> list[str]:
    """Return the names of the entries of a sample: its features, or "red[0, 2]" for images."""
    shape = description.sample_shape or ()
    if len(shape) < 2:
        return description.features
    names = []
    for feature in description.features:
        names += [f"{feature}{list(index)}" for index in np.ndindex(shape[1:])]
    return names


def number_cells(row: np.ndarray) -> list[str]:
    """Return numbers as text with nine digits, from which a float32 is read back exactly."""
    return [f"{x:.9g}" for x in row]


def spreadsheet_cell(cell: str) -> str:
    """Put an apostrophe before text that a spreadsheet would run as a formula; numbers stay."""
    looks_like_formula = cell[:1] in ("=", "+", "-", "@", "\t", "\r")
    if looks_like_formula and not re.fullmatch(r"[+-][\d.:eE+-]*\d", cell):
        return f"'{cell}"
    return escape_undecodable(cell)
