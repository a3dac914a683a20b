"""From sheets to pieces: sequences or windows of them, split into train, valid and test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, DataError, one_line, whole_number
from .files.sheet import Problems, Sheet
from .task import Sequences, rng


class Piece(NamedTuple):
    """Rows start, ..., stop - 1 of a sheet, all of them in one sequence."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class PreparedSheet:
    """A sheet whose gaps have been dealt with, and the pieces it is cut into."""

    sheet: Sheet
    pieces: list[Piece]
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What a piece is: a "sequence", a "window" of one, or a "sample"."""
        lengths = self.sheet.lengths
        is_whole = all(stop - start == lengths[i] for i, start, stop in self.pieces)
        return self.sheet.unit if is_whole else "window"

    def name(self, i: int) -> str:
        """Return the name of piece i: that of its sequence, with the rows if it is only a part."""
        sequence, start, stop = self.pieces[i]
        name = self.sheet.ids[sequence]
        if stop - start == self.sheet.lengths[sequence]:
            return name
        begin = start - int(self.sheet.starts[sequence])
        return f"{name}[{begin}:{begin + stop - start}]"


class Part(NamedTuple):
    """Some pieces of a sheet: those of one split."""

    cut: PreparedSheet
    chosen: list[int]  # numbers of pieces

    @property
    def pieces(self) -> list[Piece]:
        """The pieces themselves."""
        return [self.cut.pieces[i] for i in self.chosen]

    @property
    def names(self) -> list[str]:
        """The names of the pieces."""
        return [self.cut.name(i) for i in self.chosen]

    def target(self, i: int, at: str) -> np.ndarray:
        """Return the target of piece i of the part: see `targets`."""
        return target_of(self.cut, self.chosen[i], at)

    def targets(self, at: str) -> list[np.ndarray]:
        """Return the target of each piece, NaN where missing: [k] at "last", [T, k] at "every"."""
        return [target_of(self.cut, i, at) for i in self.chosen]


def cut_into_pieces(
    sheet: Sheet, kind: str, at: str, window: int | None, missing: str, ahead: int = 1
) -> PreparedSheet:
    """Cut sequences into windows, or leave them whole, and leave out those without a target.

    A window is at most `window` rows (None: the whole sequence); with one target for each, at
    "last", exactly as many. `missing` says what to do with pieces without a target. ahead: the rows
    that kind "next" predicts at once.
    """
    pieces: list[Piece] = []
    problems = Problems(sheet.path)
    rows_left_out = 0
    least = 1 + ahead if kind == "next" else 1  # rows of a piece: those to predict must be there
    shortest = max(window or 0, least)  # rows of a sequence
    for i, (start, T) in enumerate(zip(sheet.starts.tolist(), sheet.lengths.tolist(), strict=True)):
        if shortest > T:
            rule = f"--window {window}" if window else "--kind next"
            place = sheet.place(start, sheet.columns.get("id") or "id")
            problems.add(
                f"{place}: sequence '{one_line(sheet.ids[i])}' has length {T}; {rule} needs at "
                f"least {shortest}.",
                "short",
            )
            continue
        for begin in range(0, T, window or T):
            end = min(begin + (window or T), T)
            is_full = window is None or end - begin == window
            if end - begin < least or (at == "last" and not is_full):
                rows_left_out += end - begin
            else:
                pieces.append(Piece(i, start + begin, start + end))
    problems.raise_if_any()
    notes = []
    if rows_left_out:
        notes.append(
            f"{rows_left_out} rows of {sheet.path} at the ends of sequences do not fill a window "
            "and are left out"
        )
    cut = PreparedSheet(sheet, pieces, tuple(notes))
    if kind in ("classify", "regress"):
        return drop_pieces_without_target(cut, at, missing)
    return cut


def slide_windows(part: Part, window: int | None, stride: int | None) -> Part:
    """Return training windows that begin every `stride` rows, where they lay side by side before.

    Rows of held-out windows stay out of them. With `stride` None nothing changes.
    """
    if stride is None or window is None:
        return part
    stretches: list[Piece] = []
    for piece in part.pieces:
        last = stretches[-1] if stretches else None
        if last is not None and (last.sequence, last.stop) == (piece.sequence, piece.start):
            stretches[-1] = last._replace(stop=piece.stop)
        else:
            stretches.append(piece)
    pieces = []
    for sequence, start, stop in stretches:
        ends = [*range(start + window, stop, stride), stop]
        pieces += [Piece(sequence, max(start, end - window), end) for end in ends]
    return Part(replace(part.cut, pieces=pieces), list(range(len(pieces))))


def cut_for_prediction(sheet: Sheet, at: str, window: int | None) -> PreparedSheet:
    """Cut sequences into what one prediction, or one run of a network, is made from.

    At every row that is the whole sequence, whatever the windows of training: the state is carried
    through it. At "last" it is a window of `window` rows, as in training (None: the whole
    sequence). Windows end at rows window, 2 window, ... of a sequence; one more ends with the
    sequence, and reads the rows of the window before it that it needs to be full. A sequence that
    is shorter than a window is one piece.
    """
    pieces: list[Piece] = []
    for i, (start, T) in enumerate(zip(sheet.starts.tolist(), sheet.lengths.tolist(), strict=True)):
        width = T if at == "every" or window is None else min(window, T)
        for end in range(width, T, width):
            pieces.append(Piece(i, start + end - width, start + end))
        pieces.append(Piece(i, start + T - width, start + T))
    if len(pieces) == len(sheet.lengths):
        return PreparedSheet(sheet, pieces)
    note = (
        f"a prediction for each window of {window} rows, as in training; --whole makes one for "
        "each sequence"
    )
    return PreparedSheet(sheet, pieces, (note,))


def drop_pieces_without_target(cut: PreparedSheet, at: str, missing: str) -> PreparedSheet:
    """Leave out pieces without a target, or refuse them unless `missing` is "drop" or "mask".

    A piece with a target at every row lacks it if any is missing; with "mask", if all are, because
    single rows are masked in the loss.
    """
    sheet = cut.sheet
    can_mask_steps = missing == "mask" and at == "every"
    gaps: dict[int, int] = {}  # the first step without a target, of pieces that lack one
    lacking = []
    for i in range(len(cut.pieces)):
        gap = np.isnan(target_of(cut, i, at))
        lacking.append(bool(gap.all() if can_mask_steps else gap.any()))
        if lacking[-1]:
            gaps[i] = int(np.argwhere(gap)[0][0])
    if not any(lacking):
        return cut
    if missing not in ("drop", "mask"):
        problems = Problems(sheet.path)
        for i in np.flatnonzero(lacking).tolist():
            row = cut.pieces[i].stop - 1
            if at == "every":
                row = cut.pieces[i].start + gaps[i]
            problems.add(
                f"{sheet.place(row, sheet.targets[0])}: the target of {sheet.unit} "
                f"'{one_line(cut.name(i))}' is missing. Fill it in, or pass --missing drop|mask.",
                "target",
            )
        problems.raise_if_any()
    # Those that gaps in the inputs have cost already are not among them.
    have = "has no target and is" if sum(lacking) == 1 else "have no target and are"
    which = f"{sum(lacking):,} of {len(lacking):,} {cut.unit}s of {sheet.path}"
    note = f"{which} {have} left out"
    with_target = [piece for piece, lacks in zip(cut.pieces, lacking, strict=True) if not lacks]
    return replace(cut, pieces=with_target, notes=(*cut.notes, note))


def target_of(cut: PreparedSheet, i: int, at: str) -> np.ndarray:
    """Return the target of piece i in its own units, NaN where missing.

    It is [k] at the last row, and [T, k] at every row. A label that is written in one row of a
    sequence and missing in its last row holds for the sequence.
    """
    sequence, start, stop = cut.pieces[i]
    y = cut.sheet.y
    assert y is not None
    if cut.sheet.y_per == "sequence":
        of_sequence: np.ndarray = y[sequence]
        return of_sequence
    rows: np.ndarray = y[start:stop]
    if at == "every":
        return rows
    last: np.ndarray = rows[-1]
    if not np.isnan(last).any():
        return last
    low = np.fmin.reduce(rows)  # of the values that are not NaN
    high = np.fmax.reduce(rows)
    return np.where(np.isnan(last) & (low == high), low, last)


def hash_inputs(cut: PreparedSheet, i: int) -> bytes:
    """Return a hash of the inputs of piece i, equal for pieces with equal inputs."""
    sequence, start, stop = cut.pieces[i]
    hashes: np.ndarray | None = getattr(cut.sheet, "hashes", None)
    if hashes is None:
        inputs = np.ascontiguousarray(cut.sheet.u[start:stop]).tobytes()
        return hashlib.blake2b(inputs, digest_size=16).digest()
    # Rows on disk are not read again: windows are told apart by their sequence and their place.
    of_sequence: bytes = hashes[sequence].astype(np.uint8).tobytes()
    if stop - start == cut.sheet.lengths[sequence]:
        return of_sequence
    begin = start - int(cut.sheet.starts[sequence])
    window = f"{begin} {stop - start}".encode()
    return hashlib.blake2b(of_sequence + window, digest_size=16).digest()


def refuse_overlap(cuts: dict[str, PreparedSheet]) -> None:
    """Refuse sequences whose inputs are in two files; cuts: the file of each split."""
    known: dict[bytes, tuple[str, str]] = {}  # (split, name) by the hash of the inputs
    for split, cut in cuts.items():
        new = {hash_inputs(cut, i): (split, cut.name(i)) for i in range(len(cut.pieces))}
        repeated = [key for key in new if key in known]
        if repeated:
            _, name = new[repeated[0]]
            other_split, other_name = known[repeated[0]]
            raise DataError(
                f"{cut.sheet.path} ({split}): {len(repeated)} of its {cut.sheet.unit}s are in the "
                f"{other_split} file too; the first is '{one_line(name)}', there "
                f"'{one_line(other_name)}'. Remove them, or pass --overlap allow."
            )
        known |= new


def count_copies(parts: dict[str, Part]) -> int:
    """Return how many pieces that were split off have the inputs of a training piece.

    Held-out files are left to `refuse_overlap`.
    """
    train = parts["train"]
    trained = {hash_inputs(train.cut, i) for i in train.chosen}
    copies = 0
    for split, part in parts.items():
        if split != "train" and part.cut is train.cut:
            copies += sum(hash_inputs(part.cut, i) in trained for i in part.chosen)
    return copies


def split_pieces(
    cut: PreparedSheet, split: Sequence[float], seed: int, stratify: bool
) -> dict[str, Part]:
    """Deal sequences to train, valid and test; windows of one sequence stay together.

    The order is random, and with `stratify` each class is spread evenly over it. Windows of a
    single sequence are dealt in order of time.
    """
    check_split(split)
    # A unit is what stays together: a sequence, or a window if there is a single sequence.
    owner = np.array([piece.sequence for piece in cut.pieces])  # the unit of each piece
    units = np.unique(owner)
    if len(units) == 1:
        units = np.arange(len(cut.pieces))
        owner = units
        order = units
    else:
        order = rng(seed, "split").permutation(units)
        if stratify:
            class_of = np.zeros(owner.max() + 1, int)  # by sequence: that of its last piece
            for i, sequence in enumerate(owner):
                class_of[sequence] = int(target_of(cut, i, "last")[0])
            order = spread_classes(order, class_of[order])
    n = len(units)
    valid = count_held_out(n, split[1])
    test = count_held_out(n, split[2])
    train_end = n - valid - test
    if train_end < 1:
        sets = 1 + (valid > 0) + (test > 0)
        advice = "--split 1,0,0, or --window to cut one long sequence into pieces"
        if cut.sheet.shape is not None:
            advice = "or --split 1,0,0"
        elif cut.sheet.may_hold_samples:
            advice += "; if each row is a sample of its own, pass --chain 64x2"
        wanted = "--valid and --test files"
        if sets == 2:
            wanted = "a --valid file" if valid else "a --test file"
        raise DataError(
            f"{cut.sheet.path} has {n} {cut.sheet.unit}{'s' * (n != 1)}, too few to split into "
            f"{sets} sets. Pass {wanted}, {advice}."
        )
    valid_end = n - test
    units_of = {
        "train": order[:train_end],
        "valid": order[train_end:valid_end],
        "test": order[valid_end:],
    }
    parts = {}
    for name, chosen in units_of.items():
        parts[name] = Part(cut, np.flatnonzero(np.isin(owner, chosen)).tolist())
    return parts


def count_held_out(n: int, share: float) -> int:
    """Return how many of n sequences are this share: at least one, unless the share is 0."""
    return max(1, round(n * share)) if share else 0


def check_split(split: Sequence[float]) -> None:
    """Refuse anything but three shares that add up to 1, the first above 0."""
    are_shares = len(split) == 3 and all(isinstance(s, int | float) and 0 <= s <= 1 for s in split)
    if not are_shares or abs(sum(split) - 1) > 1e-9 or split[0] == 0:
        raise ConfigError(
            "--split must be three shares (train, valid, test) that add up to 1, or two beside a "
            f"--test or --valid file; got {list(split)}."
        )


def spread_classes(order: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Reorder units so that each class is spread evenly over all places.

    classes: the class of each unit of `order`. Within a class the order stays. The r-th of m units
    of a class goes to (r + 0.5) / m of the way, r = 0..m-1.
    """
    position = (rank_within_class(classes) + 0.5) / np.bincount(classes)[classes]
    spread: np.ndarray = order[np.argsort(position, kind="stable")]
    return spread


def rank_within_class(classes: np.ndarray) -> np.ndarray:
    """Return how many entries of the same class come before each entry."""
    by_class = np.argsort(classes, kind="stable")
    first = np.searchsorted(classes[by_class], classes[by_class])  # where its class begins
    ranks = np.empty(len(classes), int)
    ranks[by_class] = np.arange(len(classes)) - first
    return ranks


def cut_into_chunks(train: Sequences, chunk: int) -> Sequences:
    """Return sequences with a target at every step, cut into pieces of at most `chunk` steps.

    Where gaps are masked, a piece may have no target at all: it is left out.
    """
    chunk = whole_number("chunk", chunk)
    u: list[np.ndarray] = []
    y: list[Any] = []
    assert train.y is not None
    for inputs, targets in zip(train.u, train.y, strict=True):
        for begin in range(0, len(inputs), chunk):
            piece = np.asarray(targets)[begin : begin + chunk]
            if not np.isnan(piece).all():
                u.append(inputs[begin : begin + chunk])
                y.append(piece)
    return Sequences(u, y)
