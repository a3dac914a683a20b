"""Polyphonic music: piano rolls of 88 notes, predicted one step ahead."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, check_path, error_text, whole_number
from ..objectives import losses
from ..objectives.batch import Batch
from .task import Collection, Index, Scores, Sequences

NOTES = 88
KEYS = {"train": "traindata", "valid": "validdata", "test": "testdata"}


class Music(Collection):
    """Which of 88 notes sound at step t, from the notes at 1..t-1: u_1 = 0, u_t = y_{t-1}.

    path   a MATLAB file of the piano rolls of Boulanger-Lewandowski, Bengio and Vincent (2012):
           Piano-midi.de, Nottingham, MuseData or JSB chorales. It holds cell arrays `traindata`,
           `validdata` and `testdata` of pieces [T, 88] of 0 and 1.
    chunk  the most steps of a part that training pieces are cut into. Each part begins in the
           initial state. Held-out pieces, and training pieces when they are judged, are not cut.

    88 Bernoulli outputs at every step, binary cross-entropy summed over notes and steps. Metric
    "nll": nats per step, pooled over all steps of all pieces, the first of each piece included;
    less is better.
    """

    name = "music"
    inputs = NOTES
    outputs = NOTES
    readout = "every"
    output = "sigmoid"
    loss = "binary-cross-entropy"
    metric = "nll"

    def __init__(self, path: str | Path, chunk: int | None = None) -> None:
        if chunk is not None:
            whole_number("chunk", chunk)
        check_path("path", path)
        self.path = str(path)
        self.chunk = chunk
        sets = {}
        for split, rolls in read_rolls(Path(path)).items():
            sets[split] = Sequences([roll[:-1] for roll in rolls], [roll[1:] for roll in rolls])
        if chunk is not None:
            sets["whole"] = sets["train"]
            sets["train"] = cut_pieces(sets["train"], chunk)
        super().__init__(sets)

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        """Yield all pieces of a split in batches, without cutting any."""
        if split == "train" and self.chunk:
            split = "whole"
        return super().held_out(split, seed, draw, n)

    def _batch_of(self, split: str, index: Index) -> Batch:
        """Return the pieces as a batch of floats; they are stored as single bytes."""
        batch = super()._batch_of(split, index)
        return replace(batch, u=batch.u.float(), y=batch.y.float())

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Sum the negative log-likelihood over the steps that are not padding."""
        lengths = torch.as_tensor(batch.lengths, device=a.device)
        exists = torch.arange(len(a), device=a.device)[:, None] < lengths
        nll = losses.entry_losses(self.loss, a.detach()[exists], batch.y[exists], self.output)
        return {"nll": (float(nll.sum()), float(nll.numel()))}

    def baseline(self) -> dict[str, float]:
        """Return the test NLL of independent notes, each as likely as in training.

        The probability of a note is (times it sounds + 1) / (steps + 2), so that notes the training
        pieces never use have one too. The values for the four sets, 11.05 (Piano-midi.de), 10.25
        (Nottingham), 11.51 (MuseData) and 11.06 (JSB chorales), are those published for this model.
        """
        train = self._all_steps("train")
        test = self._all_steps("test")
        p = (train.sum(0, dtype=np.float64) + 1) / (len(train) + 2)
        q = test.mean(0, dtype=np.float64)  # how often each note sounds in the test pieces
        return {"nll": float(-(q * np.log(p) + (1 - q) * np.log1p(-p)).sum())}

    def _all_steps(self, split: str) -> np.ndarray:
        """Return the targets of all pieces of a split, one after the other."""
        targets = self.sets[split].y
        assert targets is not None
        return np.concatenate([*targets])


def cut_pieces(pieces: Sequences, chunk: int) -> Sequences:
    """Cut pieces into parts of at most `chunk` steps."""
    assert pieces.y is not None
    return Sequences(cut_arrays(pieces.u, chunk), cut_arrays(map(np.asarray, pieces.y), chunk))


def cut_arrays(arrays: Iterable[np.ndarray], chunk: int) -> list[np.ndarray]:
    """Cut each array along its first axis into parts of at most `chunk`."""
    return [a[k : k + chunk] for a in arrays for k in range(0, len(a), chunk)]


def read_rolls(path: Path) -> dict[str, list[np.ndarray]]:
    """Return the pieces of each split, uint8 [1 + T, 88], with a step of silence before each."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; expected a .mat file of piano rolls.")
    try:
        variables = dict(read_variables(path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error_text(error)}.") from error
    except (ValueError, struct.error, zlib.error) as error:
        raise DataError(
            f"{path.name} is not a complete MATLAB file of version 5 to 7.2: {error_text(error)}."
        ) from error
    missing = [key for key in KEYS.values() if key not in variables]
    if missing:
        held = ", ".join(map(repr, [*variables][:8])) or "nothing"
        raise DataError(
            f"{path.name} has no {' or '.join(missing)}; expected cell arrays "
            f"{', '.join(KEYS.values())}; the file holds {held}."
        )
    return {split: check_pieces(path.name, key, variables[key]) for split, key in KEYS.items()}


def check_pieces(file: str, key: str, values: Value) -> list[np.ndarray]:
    """Return the piano rolls of one split; anything but a cell array of them is refused.

    file, key: the names of the file and of the variable, for messages; values: the variable.
    """
    if not isinstance(values, list) or not values:
        raise DataError(
            f"{file}: {key} is {describe(values)}; expected a cell array of pieces, at least one."
        )
    return [check_roll(f"{file}: piece {k + 1} of {key}", x) for k, x in enumerate(values)]


def check_roll(where: str, x: Value) -> np.ndarray:
    """Return the piano roll x [T, 88] after a step of silence, [1 + T, 88].

    Values other than 0 and 1 are refused; `where` names the piece in messages.
    """
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != NOTES or not len(x):
        raise DataError(
            f"{where} is {describe(x)}; expected numbers [T, {NOTES}], one row for each step."
        )
    if (bad := np.argwhere((x != 0) & (x != 1))).size:
        t, note = bad[0]
        raise DataError(
            f"{where} holds {x[t, note]} at row {t + 1}, column {note + 1}; expected 0 or 1."
        )
    return np.concatenate([np.zeros((1, NOTES), np.uint8), x.astype(np.uint8)])


# The value of a MATLAB variable: a cell array, numbers, or the name of something else.
Value = list["Value"] | np.ndarray | str

# Types of data elements in the file.
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX = 14
COMPRESSED = 15

# Classes of arrays in the file.
CELL = 1
NUMBERS = range(6, 16)
OTHERS = {
    1: "a nested cell array",
    2: "a struct",
    3: "an object",
    4: "text",
    5: "a sparse matrix",
    16: "a function",
}
LARGEST = 2**30  # bytes of one variable, unpacked


def describe(x: Value) -> str:
    """Describe a MATLAB value for a message."""
    if isinstance(x, np.ndarray):
        return f"an array {list(x.shape)} of {x.dtype.name}"
    return x if isinstance(x, str) else f"a cell array of {len(x)}"


def read_variables(data: bytes) -> Iterator[tuple[str, Value]]:
    """Yield the variables of a MATLAB file of version 5: numbers and cell arrays of numbers.

    The file may come from a stranger. Every size is checked against the bytes that follow, so that
    a damaged file is refused and nothing in it is executed. (scipy.io.loadmat can crash the
    interpreter on one.)
    """
    # The header has 128 bytes, the last four of them the version and a mark of the byte order.
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order is None or struct.unpack_from(order + "H", data, 124)[0] != 0x0100:
        raise ValueError("its header names another version")
    for kind, content in elements(memoryview(data)[128:], order):
        if kind == COMPRESSED:
            ((kind, content),) = elements(memoryview(unpack(content)), order)
        if kind == MATRIX:
            yield matrix(content, order)


def unpack(data: memoryview) -> bytes:
    """Decompress a variable, of at most LARGEST bytes."""
    stream = zlib.decompressobj()
    unpacked = stream.decompress(data, LARGEST)
    if not stream.eof:
        raise ValueError("a compressed variable is incomplete, or too large")
    return unpacked


def elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield type and content of the data elements that follow one another.

    order: the byte order, "<" or ">". An element is its type, its size and as many bytes.
    """
    position = 0
    while position < len(data):
        kind, size = struct.unpack_from(order + "II", data, position)
        begin = position + 8
        limit = len(data)
        if kind >> 16:  # a short element: type and size share a word, and up to four bytes follow
            size = kind >> 16
            kind &= 0xFFFF
            begin = position + 4
            limit = position + 8
        end = begin + size
        if end > limit:
            raise ValueError(f"an element of {size} bytes does not fit into its place")
        yield kind, data[begin:end]
        # Elements take multiples of eight bytes, except for compressed ones.
        padding = 0 if kind == COMPRESSED else (position - end) % 8
        position = end + padding


def matrix(data: memoryview, order: str, nested: bool = False) -> tuple[str, Value]:
    """Return name and value of a matrix element.

    It holds flags, sizes and a name, then its numbers column by column, or its cells. The value of
    anything else, such as a cell array within another (`nested`), is a description of it.
    """
    if not data:
        return "", np.zeros((0, 0))
    flags, sizes, name, *content = elements(data, order)
    kind = int(numbers(flags, order)[0]) & 0xFF
    shape = numbers(sizes, order).tolist()
    title = bytes(name[1]).decode("latin-1")
    if kind == CELL and not nested:
        if any(k != MATRIX for k, _ in content) or len(content) != math.prod(shape):
            raise ValueError(f"the cells of {title!r} are incomplete")
        return title, [matrix(cell, order, nested=True)[1] for _, cell in content]
    if kind not in NUMBERS:
        return title, OTHERS.get(kind, "something unknown")
    if len(content) != 1:  # a real and an imaginary part
        return title, "complex numbers"
    values = numbers(content[0], order)
    if min(shape, default=0) < 0 or values.size != math.prod(shape):
        raise ValueError(f"an array of shape {shape} has {values.size} numbers")
    return title, values.reshape(shape, order="F")


def numbers(element: tuple[int, memoryview], order: str) -> np.ndarray:
    """Return the numbers of a data element (type, bytes), in this machine's byte order.

    order: that of the file, "<" or ">".
    """
    kind, content = element
    if kind not in TYPES:
        raise ValueError(f"numbers of unknown type {kind}")
    values = np.frombuffer(content, order + TYPES[kind])
    return values.astype(values.dtype.newbyteorder("="))
