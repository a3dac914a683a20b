"""Prediction: new sequences or samples for a trained network, and its outputs as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import DataError, InputError, NumericalError, escape_undecodable, one_line
from ..objectives.batch import Batch
from .ahead import ahead_of
from .asked import AskedRows
from .cutting import Piece, PreparedSheet
from .description import Description
from .encoding import notes_on_words
from .files.kept import Column, with_types
from .files.sheet import quote_names
from .scaling import arrange_samples
from .task import LARGEST_BATCH, Samples, Sequences, steps_for_entries


@dataclass(frozen=True, eq=False)
class Prediction:
    """New sequences or samples, scaled like those of training, in the order of their file.

    asked  the rows of the file that get a prediction, or an empty one
    kept   columns of the file to copy beside the predictions
    """

    description: Description
    source: Path
    cut: PreparedSheet
    u: np.ndarray  # [N, inputs]; of rows on disk, `StoredInputs`
    asked: AskedRows
    kept: Sequence[Column] = ()
    future: Sequence[np.ndarray] = ()  # [F, known inputs] of each series, if columns are known

    def __len__(self) -> int:
        return len(self.cut.pieces)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen or left out when the file was read."""
        of_words: list[str] = []
        if not self.description.symbols:  # of symbols the reader says it
            of_words = notes_on_words(self.cut.sheet, self.description)
        return (*self.cut.sheet.notes, *self.cut.notes, *of_words)

    @property
    def ids(self) -> list[str]:
        """The names of the sequences."""
        return [self.cut.name(i) for i in range(len(self))]

    @property
    def unit(self) -> str:
        """What is predicted for: "sequence" or "sample"."""
        return self.cut.sheet.unit

    @property
    def row_count(self) -> int:
        """The number of rows that get a prediction."""
        return len(self.asked.place)

    @property
    def summary(self) -> str:
        """How much was predicted, in words: "240 rows of 40 sequences".

        Rows (samples, sequences) that cannot be predicted are counted apart: they are in the table.
        """
        sequences = len(self.cut.sheet.lengths)
        text = f"{sequences} {self.unit}{'s' * (sequences != 1)}"
        noun = self.unit
        if self.description.at == "every":
            noun = "row"
            text = f"{self.row_count} rows of {text}"
        elif len(self) > sequences:
            text = f"{len(self)} windows of {text}"
        empty = len(self.asked.row) - len(self.asked.place)
        if not empty:
            return text
        return f"{text}, and {empty} {noun}{'s' * (empty != 1)} without a prediction"

    def batches(self, n: int = 1000) -> Iterator[tuple[list[str], Batch]]:
        """Yield (ids, batch) of at most n sequences, in the order of the file.

        A batch ends before its padded steps exceed LARGEST_BATCH; a longer sequence is one of its
        own. Large samples, such as photographs, count as several steps.
        """
        begin = 0
        while begin < len(self):
            end = begin + self._count_for_batch(begin, n)
            yield [self.cut.name(i) for i in range(begin, end)], self._batch(begin, end)
            begin = end

    def _batch(self, begin: int, end: int) -> Batch:
        """Return pieces begin, ..., end - 1 as a batch."""
        pieces = self.cut.pieces[begin:end]
        chosen: Samples | Sequences
        if self.description.input_shape is None:
            chosen = Sequences([self.u[start:stop] for _, start, stop in pieces])
        else:
            chosen = Samples(arrange_samples(pieces, self.u, self.description))
        return chosen.batch(range(len(chosen)), self.description.at == "every")

    def _count_for_batch(self, begin: int, n: int) -> int:
        """Return how many pieces from number `begin` on make a batch, at most n."""
        count = 0
        longest = 0
        for piece in self.cut.pieces[begin : begin + n]:
            longest = max(longest, self._steps(piece))
            if count and (count + 1) * longest > LARGEST_BATCH:
                break
            count += 1
        return count

    def _steps(self, piece: Piece) -> int:
        """Return the time steps of a piece, or those that a sample counts as."""
        if self.description.input_shape is None:
            return piece.stop - piece.start
        return steps_for_entries(self.description.inputs)

    def rows(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[str]]:
        """Yield the predictions as rows of text, the header first; arguments as in `table`.

        A prediction that cannot be made is an empty cell.
        """
        yield [spreadsheet_cell(name) for name in self._names()]
        for columns in self.tables(outputs):
            cells = [text_cells(column) for column in columns]
            yield from map(list, zip(*cells, strict=True))
            del columns, cells  # before the next part is made

    def tables(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[Column]]:
        """Yield the table in parts, one below the other; here it is one part."""
        yield self.table(outputs)

    def typed_tables(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[Column]]:
        """Yield the parts of the table, with numbers in place of texts that are all numbers."""
        for columns in self.tables(outputs):
            yield [with_types(column) for column in columns]

    def table(self, outputs: Iterable[Tensor | np.ndarray]) -> list[Column]:
        """Return the predictions as columns, one row for each row of the file that is asked for.

        The columns are row; step, if a row of the file is a whole sequence; id and time, if the
        file has them, under its names for them; those that are kept; prediction, or one for each of
        several targets; and one probability for each class. With kind "next" a row predicts the
        step after it. Numbers are NaN, and labels None, where no prediction can be made.

        Args:
            outputs: The pre-outputs a of each batch: [B, outputs], or [T, B, outputs] at every
                step.
        """
        d = self.description
        a = self.spread(self.collect(outputs))
        predicted: list[Sequence[str | None] | np.ndarray] = []
        if d.kind == "classify":
            p = softmax(a)
            is_empty = np.isnan(a[:, 0])
            numbers = np.where(is_empty[:, None], 0, a).argmax(-1)
            pairs = zip(numbers.tolist(), is_empty.tolist(), strict=True)
            predicted = [[None if empty else d.labels[k] for k, empty in pairs], *p.T]
        else:
            mean, std = d.target_scale()
            if d.kind == "next":
                a = ahead_of(d).repair(a)
            predicted = [*(a * std + mean).T]
        pairs_by_name = zip(self._predicted_names(), predicted, strict=True)
        return [*self._beside(), *(Column(name, values) for name, values in pairs_by_name)]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return outputs [K, outputs], by `collect`, at the M rows asked for, NaN where empty."""
        a = np.full((len(self.asked.row), self.description.outputs), np.nan)
        a[self.asked.place] = values
        return a

    def _names(self) -> list[str]:
        """Return the names of the columns."""
        return [*(column.name for column in self._beside()), *self._predicted_names()]

    def _beside(self) -> list[Column]:
        """Return the columns before the predictions: what says which row of the file it is."""
        asked = self.asked
        columns = [Column("row", asked.row)]
        if asked.step is not None:
            columns.append(Column("step", asked.step))
        taken = {column.name for column in columns}.union(self._predicted_names())
        sheet = self.cut.sheet
        taken_and_kept = taken | {column.name for column in self.kept}
        own = (
            ("id", sheet.id_column, asked.ids),
            ("time", sheet.columns.get("time", ""), asked.stamps),
        )
        for role, name, values in own:
            if values is None or name in taken_and_kept - taken:
                continue
            # A column of the file that is called like one of ours goes by its role.
            texts = list(map(escape_undecodable, values))
            columns.append(Column(role if name in taken else name, texts))
        return [*columns, *self.kept]

    def _predicted_names(self) -> list[str]:
        """Return the names of the columns of predictions."""
        d = self.description
        predicted = d.targets
        if d.kind == "next":
            predicted = ahead_of(d).output_names
        elif d.kind == "reconstruct":
            predicted = entry_names(d)
        names = ["prediction"]
        if len(predicted) > 1:
            names = [f"prediction {name}" for name in predicted]
        return names + [f"probability {label}" for label in d.labels]

    def with_columns(self, columns: Sequence[Column]) -> Prediction:
        """Return the predictions beside which these columns of the file are kept.

        Columns that are called like those of the predictions are refused.
        """
        ours = {"row", *self._predicted_names()}
        if self.asked.step is not None:
            ours.add("step")
        clash = [column.name for column in columns if column.name in ours]
        if clash:
            raise DataError(
                f"{one_line(self.source, 4096)}: columns {quote_names(clash)} are called like "
                "columns of the predictions. Rename them, or name those to keep: --keep a,b."
            )
        return replace(self, kept=[column.take(self.asked.row) for column in columns])

    def with_note(self, note: str) -> Prediction:
        """Return the predictions with one more note."""
        return replace(self, cut=replace(self.cut, notes=(*self.cut.notes, note)))

    def collect(self, outputs: Iterable[Tensor | np.ndarray]) -> np.ndarray:
        """Return the outputs of all pieces one after the other, [K, outputs]."""
        every = self.description.at == "every"
        parts = [np.zeros((0, self.description.outputs))]
        done = 0  # sequences
        for a in outputs:
            if isinstance(a, Tensor):
                a = a.detach().cpu()
            values = np.asarray(a, dtype=np.float64)
            self._check_shape(values, done)
            if not every:
                values = values[None]  # one step for each sequence
            for j in range(values.shape[1]):
                parts.append(self._outputs_of(done, values[:, j]))
                done += 1
        if done != len(self):
            raise InputError(f"got outputs for {done} {self.unit}s; expected {len(self)}.")
        return np.concatenate(parts)

    def _check_shape(self, a: Tensor | np.ndarray, done: int) -> None:
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

    def _outputs_of(self, piece: int, a: np.ndarray) -> np.ndarray:
        """Return the outputs of one piece, a row for each prediction.

        a: [T or more, outputs], or [1, outputs]. Outputs that are not finite are refused.
        """
        _, start, stop = self.cut.pieces[piece]
        count = stop - start if self.description.at == "every" else 1
        values = a[:count]
        if not np.isfinite(values).all() or len(values) < count:
            raise NumericalError(
                f"the outputs for {self.unit} '{one_line(self.cut.name(piece))}' are not finite, "
                "or too few; nothing was written."
            )
        return values


def softmax(a: np.ndarray) -> np.ndarray:
    """Return exp(a_k) / sum_j exp(a_j) along the last axis, without overflow."""
    p = np.exp(a - a.max(-1, keepdims=True))
    return np.asarray(p / p.sum(-1, keepdims=True))


def entry_names(description: Description) -> list[str]:
    """Return the names of the entries of a sample: its features, or "red[0, 2]" for images."""
    shape = description.sample_shape or ()
    if len(shape) < 2:
        return description.features
    names = []
    for feature in description.features:
        names += [f"{feature}{list(index)}" for index in np.ndindex(shape[1:])]
    return names


def text_cells(column: Column) -> Iterator[str]:
    """Yield the values of a column as text, "" where missing.

    Real numbers have nine digits, from which a float32 is read back exactly.
    """
    for value in column.values:
        if value is None or value != value:  # NaN
            yield ""
        elif isinstance(value, np.floating):
            yield f"{value:.9g}"
        else:
            yield spreadsheet_cell(str(value))


def spreadsheet_cell(cell: str) -> str:
    """Put an apostrophe before text that a spreadsheet would run as a formula; numbers stay."""
    looks_like_formula = cell[:1] in ("=", "+", "-", "@", "\t", "\r")
    if looks_like_formula and not re.fullmatch(r"[+-][\d.:eE+-]*\d", cell):
        return f"'{cell}"
    return escape_undecodable(cell)
