"""Polyphonic music: piano rolls of 88 notes, predicted one step ahead."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, check_path, error_text, whole_number
from ..objectives import losses
from ..objectives.batch import Batch
from .task import Collection, Scores, Sequences

NOTES = 88
KEYS = {"train": "traindata", "valid": "validdata", "test": "testdata"}


class Music(Collection):
    """Which of 88 notes sound at step t, from the notes at 1..t-1: u_1 = 0, u_t = y_{t-1}.

    path  a MATLAB file of the piano rolls of Boulanger-Lewandowski, Bengio and Vincent (2012): Piano-midi.de, Nottingham,
          MuseData or JSB chorales. Cell arrays `traindata`, `validdata` and `testdata` of pieces [T, 88] of 0 and 1.
    chunk cut training pieces into parts of at most so many steps, each begun in the initial state; held-out pieces, and
          training pieces when they are judged, stay whole

    88 Bernoulli outputs at every step, binary cross-entropy summed over notes and steps. Metric "nll": nats for each step,
    pooled over all steps of all pieces, the first of each piece included; less is better.
    """

    name = "music"
    inputs = outputs = NOTES
    readout = "every"
    output, loss = "sigmoid", "binary-cross-entropy"
    metric = "nll"

    def __init__(self, path: str | Path, chunk: int | None = None) -> None:
        if chunk is not None:
            whole_number("chunk", chunk)
        check_path("path", path)
        self.path, self.chunk = str(path), chunk
        pieces = {
            name: Sequences([r[:-1] for r in of], [r[1:] for r in of])
            for name, of in read(Path(path)).items()
        }
        super().__init__(
            pieces
            if chunk is None
            else {**pieces, "whole": pieces["train"], "train": cut(pieces["train"], chunk)}
        )

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        return super().held_out(
            "whole" if split == "train" and self.chunk else split, seed, draw, n
        )

    def _of(self, split: str, index: Sequence[int] | np.ndarray) -> Batch:
        batch = super()._of(split, index)
        return replace(batch, u=batch.u.float(), y=batch.y.float())

    def score(self, a: Tensor, batch: Batch) -> Scores:
        steps = torch.arange(len(a), device=a.device)[:, None] < torch.as_tensor(
            batch.lengths, device=a.device
        )
        nll = losses.entry_losses(self.loss, a.detach()[steps], batch.y[steps], self.output)
        return {"nll": (float(nll.sum()), float(nll.numel()))}

    def baseline(self) -> dict[str, float]:
        """The test NLL of independent notes, each as likely as in training: (times it sounds + 1) / (steps + 2).

        The one is for notes that the training pieces never use. The four sets give 11.05 (Piano-midi.de), 10.25
        (Nottingham), 11.51 (MuseData) and 11.06 (JSB chorales), the figures published for this model.
        """
        train, test = (np.concatenate([*self.sets[split].y]) for split in ("train", "test"))  # type: ignore[misc]
        p = (train.sum(0, dtype=np.float64) + 1) / (len(train) + 2)
        q = test.mean(0, dtype=np.float64)
        return {"nll": float(-(q * np.log(p) + (1 - q) * np.log1p(-p)).sum())}


def cut(pieces: Sequences, chunk: int) -> Sequences:
    """Parts of at most `chunk` steps."""
    assert pieces.y is not None
    parts = lambda arrays: [a[k : k + chunk] for a in arrays for k in range(0, len(a), chunk)]
    return Sequences(parts(pieces.u), parts(pieces.y))


def read(path: Path) -> dict[str, list[np.ndarray]]:
    """The pieces of each split, uint8 [1 + T, 88]: a step of silence goes before the first."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; music is read from a .mat file of piano rolls.")
    try:
        found = dict(read_variables(path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error_text(error)}.") from error
    except (ValueError, struct.error, zlib.error) as error:
        raise DataError(
            f"{path.name} is not a whole MATLAB file of version 5 to 7.2: {error_text(error)}."
        ) from error
    if missing := [key for key in KEYS.values() if key not in found]:
        raise DataError(
            f"{path.name} has no {' or '.join(missing)}; expected cell arrays {', '.join(KEYS.values())}, "
            f"and it holds {', '.join(map(repr, [*found][:8])) or 'nothing'}."
        )
    return {split: pieces(path.name, key, found[key]) for split, key in KEYS.items()}


def pieces(file: str, key: str, values: Value) -> list[np.ndarray]:
    if not isinstance(values, list) or not values:
        raise DataError(
            f"{file}: {key} is {kind_of(values)}; expected a cell array of pieces, at least one."
        )
    return [roll(f"{file}: piece {k + 1} of {key}", x) for k, x in enumerate(values)]


def roll(where: str, x: Value) -> np.ndarray:
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != NOTES or not len(x):
        raise DataError(
            f"{where} is {kind_of(x)}; expected numbers [T, {NOTES}], one row for each step."
        )
    if (bad := np.argwhere((x != 0) & (x != 1))).size:
        t, note = bad[0]
        raise DataError(
            f"{where} holds {x[t, note]} at row {t + 1}, column {note + 1}; expected 0 or 1."
        )
    return np.concatenate([np.zeros((1, NOTES), np.uint8), x.astype(np.uint8)])


Value = (
    list | np.ndarray | str
)  # of a MATLAB variable: a cell array, numbers, or the name of something else
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
CELL, NUMBERS = 1, range(6, 16)
OTHERS = {
    1: "a nested cell array",
    2: "a struct",
    3: "an object",
    4: "text",
    5: "a sparse matrix",
    16: "a function",
}
LARGEST = 2**30  # bytes of one variable, unpacked


def kind_of(x: Value) -> str:
    if isinstance(x, np.ndarray):
        return f"an array {list(x.shape)} of {x.dtype.name}"
    return x if isinstance(x, str) else f"a cell array of {len(x)}"


def read_variables(data: bytes) -> Iterator[tuple[str, Value]]:
    """The variables of a MATLAB file of version 5, by name: numbers and cell arrays of numbers.

    A reader of our own, for files from strangers: every size is checked against the bytes there are, so that a damaged
    file is refused and nothing in it is run. (scipy.io.loadmat can crash the interpreter on one.)
    """
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order is None or struct.unpack_from(order + "H", data, 124)[0] != 0x0100:
        raise ValueError("its header says otherwise")
    for kind, content in elements(memoryview(data)[128:], order):
        if kind == COMPRESSED:
            ((kind, content),) = elements(memoryview(unpack(content)), order)
        if kind == MATRIX:
            yield matrix(content, order)


def unpack(data: memoryview) -> bytes:
    stream = zlib.decompressobj()
    unpacked = stream.decompress(data, LARGEST)
    if not stream.eof:
        raise ValueError("a compressed variable is incomplete, or too large")
    return unpacked


def elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The data elements that follow one another: type and content."""
    at = 0
    while at < len(data):
        word, size = struct.unpack_from(order + "II", data, at)
        short = word >> 16  # size, where type and size share a word and up to four bytes follow
        kind, size, begin = (word & 0xFFFF, short, at + 4) if short else (word, size, at + 8)
        end = begin + size
        if end > (at + 8 if short else len(data)):
            raise ValueError(f"an element of {size} bytes does not fit where it stands")
        yield kind, data[begin:end]
        at = end if kind == COMPRESSED else end + (at - end) % 8


def matrix(data: memoryview, order: str, nested: bool = False) -> tuple[str, Value]:
    """Name and value of a matrix element: flags, sizes, name, then its numbers by columns, or its cells."""
    if not data:
        return "", np.zeros((0, 0))
    flags, sizes, name, *content = elements(data, order)
    word = int(numbers(flags, order)[0])
    shape, kind = numbers(sizes, order).tolist(), word & 0xFF
    title = bytes(name[1]).decode("latin-1")
    if kind == CELL and not nested:
        if any(k != MATRIX for k, _ in content) or len(content) != math.prod(shape):
            raise ValueError(f"the cells of {title!r} are not all there")
        return title, [matrix(cell, order, nested=True)[1] for _, cell in content]
    if kind not in NUMBERS:
        return title, OTHERS.get(kind, "something unknown")
    if len(content) != 1:
        return title, "complex numbers"
    values = numbers(content[0], order)
    if min(shape, default=0) < 0 or values.size != math.prod(shape):
        raise ValueError(f"an array of sizes {shape} has {values.size} numbers")
    return title, values.reshape(shape, order="F")


def numbers(element: tuple[int, memoryview], order: str) -> np.ndarray:
    kind, content = element
    if kind not in TYPES:
        raise ValueError(f"numbers of unknown type {kind}")
    values = np.frombuffer(content, order + TYPES[kind])
    return values.astype(values.dtype.newbyteorder("="))
