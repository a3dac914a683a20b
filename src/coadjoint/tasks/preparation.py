"""From recordings to sequences that a network can read: labels coded, gaps filled, cut, split and scaled."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, one_line
from .description import ColumnNames, Description, PathLike
from .files import read
from .files.sheet import Options, Problems, Sheet, quote_names
from .task import Sequences, rng

REAL_LABEL = re.compile(
    r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?|[+-]?(nan|inf)", re.ASCII
)
WHOLE_LABEL = re.compile(r"[+-]?\d{1,300}", re.ASCII)


@dataclass(frozen=True, eq=False)
class PreparedSheet:
    """A recording whose gaps are dealt with, and its pieces: (sequence, first row, row after the last)."""

    recording: Sheet
    pieces: list[tuple[int, int, int]]
    notes: tuple[str, ...] = ()

    def name(self, piece: int) -> str:
        i, start, stop = self.pieces[piece]
        begin = start - int(self.recording.starts[i])
        whole = stop - start == self.recording.lengths[i]
        return (
            self.recording.ids[i]
            if whole
            else f"{self.recording.ids[i]}[{begin}:{begin + stop - start}]"
        )


def column_names(names: ColumnNames) -> tuple[str, ...] | None:
    return None if names is None else (names,) if isinstance(names, str) else tuple(names)


def read_all(paths: dict[str, PathLike | None], options: Options) -> dict[str, Sheet]:
    """Each split's file; held-out files must have the columns of the training file, and be other files."""
    recordings: dict[str, Sheet] = {}
    for split, path in paths.items():
        if path is None:
            continue
        if recordings:
            first = recordings["train"]
            options = replace(options, kind=options.kind or kind_of(first))
            if first.has_names:
                options = replace(options, id=first.columns["id"], time=first.columns["time"], target=first.targets, features=first.features)  # fmt: skip
        new = read(path, options)
        for other, old in recordings.items():
            if old.sha256 == new.sha256:
                raise DataError(f"{new.path} ({split}) and {old.path} ({other}) hold the same bytes (SHA-256 {new.sha256[:12]}...): held-out data must be other data.")  # fmt: skip
            if len(old.features) != len(new.features):
                raise DataError(f"{new.path} ({split}) has {len(new.features)} features and {old.path} ({other}) has {len(old.features)}; expected the same.")  # fmt: skip
            if (
                old.y_per != new.y_per
                or (old.y is None) != (new.y is None)
                or len(old.targets) != len(new.targets)
            ):
                raise DataError(f"{new.path} ({split}) has {len(new.targets)} targets and {old.path} ({other}) has {len(old.targets)}; expected the same.")  # fmt: skip
        recordings[split] = new
    return recordings


def kind_of(recording: Sheet) -> str:
    return "regress" if recording.y is not None and recording.y.dtype.kind == "f" else "classify"


def labels_in(recording: Sheet) -> list[str]:
    assert recording.y is not None
    return labels_of(
        recording.y.tolist(), f"{recording.path} column '{one_line(recording.targets[0])}'"
    )


def labels_of(words: Iterable[str], where: str) -> list[str]:
    """The classes among labels ("" is none): sorted, as numbers if all of them are whole numbers. where: their column."""
    found = sorted({word for word in words if word})
    real = [word for word in found if REAL_LABEL.fullmatch(word)]
    if real:
        raise DataError(
            f'{where}: "{one_line(real[0])}" is a real number, and classes are words or whole numbers. '
            "Pass --kind regress, or write the labels without a decimal point."
        )
    if len(found) < 2:
        what = (
            f"one class only, '{one_line(found[0])}'"
            if found
            else "no labels: every one is missing"
        )
        raise DataError(f"{where}: there is {what}; expected at least two classes.")
    return sorted(found, key=int) if all(WHOLE_LABEL.fullmatch(word) for word in found) else found


def coded(recording: Sheet, labels: list[str]) -> Sheet:
    """Labels as class numbers [., 1], NaN where missing; a label that training has not is refused."""
    assert recording.y is not None
    index = {w: float(k) for k, w in enumerate(labels)} | {"": math.nan}
    problems = Problems(recording.path)
    first: dict[str, int] = {}
    for at, w in enumerate(recording.y.tolist()):
        first.setdefault(w, at)
    for w, at in first.items():
        if w in index:
            continue
        row = at if recording.y_per == "step" else int(recording.starts[at])
        problems.add(f"{recording.place(row, recording.targets[0])}: label '{one_line(w)}' does not occur in the training file, whose labels are {quote_names(labels)}.", "unseen")  # fmt: skip
    problems.raise_if_any()
    return replace(recording, y=np.array([index[w] for w in recording.y.tolist()])[:, None])


def target_at(recording: Sheet, kind: str, at: str | None) -> str:
    """Where the target is: asked for, or the only possibility."""
    if kind == "next":
        if at == "last":
            raise ConfigError("--kind next predicts at every step; leave --at out.")
        return "every"
    if recording.y_per == "sequence":
        if at == "every":
            raise DataError(
                f"{recording.path} has one target for each sequence; --at every needs one for each step."
            )
        return "last"
    if at:
        return at
    assert recording.y is not None
    low, high = (
        np.fmin.reduceat(recording.y, recording.starts),
        np.fmax.reduceat(recording.y, recording.starts),
    )
    alike = bool((np.isnan(low) | (low == high)).all())
    if alike and len(recording.lengths) > 1:
        return "last"
    why = "there is one sequence" if alike else "the target changes within sequences"
    raise DataError(f"{recording.path}: {why}. Pass --at every to predict it at each row, --at last to predict that of the last row.")  # fmt: skip


def judge_target(recording: Sheet, kind: str, labels: list[str]) -> None:
    """A target that is all missing, or is one of the inputs, is refused."""
    if kind == "next":
        return
    y = recording.y
    assert y is not None
    if labels and all(WHOLE_LABEL.fullmatch(w) for w in labels):
        y = np.append([float(w) for w in labels], np.nan)[
            np.nan_to_num(y, nan=len(labels)).astype(int)
        ]
    for k, name in enumerate(recording.targets):
        if np.isnan(y[:, k]).all():
            raise DataError(f"{recording.path} column '{one_line(name)}': every target is missing.")
        for j, feature in enumerate(recording.features):
            if recording.y_per == "step" and np.array_equal(
                y[:, k], recording.u[:, j], equal_nan=True
            ):
                raise DataError(f"{recording.path}: target '{one_line(name)}' equals input '{one_line(feature)}' in every row. Leave the input out with --features.")  # fmt: skip


def filled(recording: Sheet, kind: str, at: str, missing: str, irregular: str) -> Sheet:
    """The recording with rows dropped or filled as asked, at regular times."""
    notes = list(recording.notes)
    gaps = np.isnan(recording.u)
    if missing == "drop":
        lost = gaps.any(1)
        if kind in ("classify", "regress") and at == "every" and recording.y_per == "step":
            lost |= np.isnan(recording.y).any(1)  # type: ignore[arg-type]
        if lost.any():
            ids = recording.ids
            recording = recording.take(~lost)
            empty = [ids[i] for i in np.flatnonzero(recording.lengths == 0)]
            if empty:
                raise DataError(f"{recording.path}: without the rows that miss a value, sequences {quote_names(empty)} have length 0. Remove them, or pass --missing mask.")  # fmt: skip
            notes.append(
                f"{int(lost.sum())} rows of {recording.path} miss a value and are left out"
            )
    if missing == "ffill" and gaps.any():
        row = np.arange(len(gaps))[:, None]
        latest = np.maximum.accumulate(np.where(gaps, -1, row), 0)
        first = np.repeat(recording.starts, recording.lengths)[:, None]
        problems = Problems(recording.path)
        for r, j in np.argwhere(latest < first):
            problems.add(f"{recording.place(r, recording.features[j])}: the value is missing and the sequence has none before it, so --missing ffill cannot fill it. Fix it, or pass --missing drop|mask.", ("ffill", j))  # fmt: skip
        problems.raise_if_any()
        recording = replace(recording, u=np.take_along_axis(recording.u, latest, 0))
        notes.append(f"{int(gaps.sum())} values of {recording.path} are those of the row before")
    if irregular == "refuse" and (text := recording.describe_uneven_step()):
        raise DataError(text)
    return replace(recording, notes=tuple(notes))


def cut_up(recording: Sheet, kind: str, at: str, window: int | None, missing: str) -> PreparedSheet:
    """Sequences or windows of them, with those left out that have no target."""
    pieces: list[tuple[int, int, int]] = []
    problems, left = Problems(recording.path), 0
    least = 2 if kind == "next" else 1
    for i, (start, T) in enumerate(
        zip(recording.starts.tolist(), recording.lengths.tolist(), strict=True)
    ):
        need = max(window or 0, least)
        if need > T:
            rule = f"--window {window}" if window else "--kind next"
            problems.add(f"{recording.place(start, recording.columns.get('id') or 'id')}: sequence '{one_line(recording.ids[i])}' has length {T}; {rule} needs at least {need}.", "short")  # fmt: skip
            continue
        for k in range(0, T, window or T):
            stop = min(k + (window or T), T)
            if stop - k < least or (window and at == "last" and stop - k < window):
                left += stop - k
            else:
                pieces.append((i, start + k, start + stop))
    problems.raise_if_any()
    notes = [f"{left} rows of {recording.path} at the ends of sequences do not fill a window and are left out"] if left else []  # fmt: skip
    cut = PreparedSheet(recording, pieces)
    if kind in ("classify", "regress"):
        gaps = [np.isnan(target_of(cut, i, at)) for i in range(len(pieces))]
        lacking = [g.all() if missing == "mask" and at == "every" else g.any() for g in gaps]
        if any(lacking) and missing not in ("drop", "mask"):
            for i in np.flatnonzero(lacking).tolist():
                row = (
                    pieces[i][1] + int(np.argwhere(gaps[i])[0][0])
                    if at == "every"
                    else pieces[i][2] - 1
                )
                problems.add(f"{recording.place(row, recording.targets[0])}: the target of sequence '{one_line(cut.name(i))}' is missing. Fill it in, or pass --missing drop|mask.", "target")  # fmt: skip
            problems.raise_if_any()
        if any(lacking):
            notes.append(
                f"{sum(lacking)} sequences of {recording.path} have no target and are left out"
            )
            cut = replace(cut, pieces=[p for p, g in zip(pieces, lacking, strict=True) if not g])
    return replace(cut, notes=tuple(notes))


def target_of(cut: PreparedSheet, piece: int, at: str) -> np.ndarray:
    """The target of a piece in its own units: [k] at the last row, [T, k] at every row; NaN where missing."""
    i, start, stop = cut.pieces[piece]
    y = cut.recording.y
    assert y is not None
    if cut.recording.y_per == "sequence":
        return y[i]
    if at == "every":
        return y[start:stop]
    last, rows = y[stop - 1], y[start:stop]
    if np.isnan(last).any():  # a label that is written once stands for the whole sequence
        low, high = np.fmin.reduce(rows), np.fmax.reduce(rows)
        return np.where(np.isnan(last) & (low == high), low, last)
    return last


def _contents(cut: PreparedSheet, piece: int) -> bytes:
    _, start, stop = cut.pieces[piece]
    return hashlib.blake2b(
        np.ascontiguousarray(cut.recording.u[start:stop]).tobytes(), digest_size=16
    ).digest()


def refuse_overlap(cuts: dict[str, PreparedSheet]) -> None:
    """A sequence whose inputs stand in two files."""
    met: dict[bytes, tuple[str, str]] = {}
    for split, cut in cuts.items():
        new = {_contents(cut, i): (split, cut.name(i)) for i in range(len(cut.pieces))}
        both = [h for h in new if h in met]
        if both:
            other, name = met[both[0]]
            raise DataError(
                f"{cut.recording.path} ({split}): {len(both)} of its sequences stand in the {other} file too, the first is '{one_line(new[both[0]][1])}', there '{one_line(name)}'. "
                "Remove them, or pass --overlap allow."
            )
        met |= new


def count_copies(parts: dict[str, tuple[PreparedSheet, list[int]]]) -> int:
    seen = {_contents(parts["train"][0], i) for i in parts["train"][1]}
    return sum(
        _contents(cut, i) in seen
        for s, (cut, index) in parts.items()
        if s != "train"
        for i in index
    )


def split_up(
    cut: PreparedSheet, split: Sequence[float], seed: int, stratify: bool
) -> dict[str, tuple[PreparedSheet, list[int]]]:
    """Sequences dealt to train, valid and test; windows of one sequence stay together.

    The order is random, with each class spread evenly over it; windows of a single sequence keep the order of time.
    """
    if len(split) != 3 or not all(isinstance(s, int | float) and 0 <= s <= 1 for s in split) or abs(sum(split) - 1) > 1e-9 or split[0] == 0:  # fmt: skip
        raise ConfigError(
            f"--split must be three shares (train, valid, test) that add up to 1; got {list(split)}."
        )
    owner = np.array([i for i, _, _ in cut.pieces])
    units = np.unique(owner)
    if len(units) == 1:
        owner = units = np.arange(len(cut.pieces))
        order = units
    else:
        order = rng(seed, "split").permutation(units)
        if stratify:
            of = {owner[p]: int(target_of(cut, p, "last")[0]) for p in range(len(owner))}
            classes = np.array([of[u] for u in order])
            order = order[
                np.argsort((_ranks(classes) + 0.5) / np.bincount(classes)[classes], kind="stable")
            ]
    n = len(units)
    held = [max(1, round(n * s)) if s else 0 for s in split[1:]]
    if n - sum(held) < 1:
        raise DataError(
            f"{cut.recording.path} has {n} sequence{'s' * (n != 1)}, too few to split into {1 + sum(h > 0 for h in held)} sets. "
            "Pass --valid and --test files, --split 1,0,0, or --window to cut one long sequence into pieces."
        )
    bounds = {
        "train": (0, n - sum(held)),
        "valid": (n - sum(held), n - held[1]),
        "test": (n - held[1], n),
    }
    chosen = {s: set(order[a:b].tolist()) for s, (a, b) in bounds.items()}
    return {
        s: (cut, [p for p, o in enumerate(owner.tolist()) if o in own]) for s, own in chosen.items()
    }


def _ranks(classes: np.ndarray) -> np.ndarray:
    """How many entries of the same class stand before each."""
    by = np.argsort(classes, kind="stable")
    first = np.searchsorted(classes[by], classes[by])
    ranks = np.empty(len(classes), int)
    ranks[by] = np.arange(len(classes)) - first
    return ranks


def constant(values: np.ndarray) -> np.ndarray:
    return np.fmin.reduce(values) == np.fmax.reduce(values)


def scale_of(values: np.ndarray, standardise: bool) -> tuple[np.ndarray, np.ndarray]:
    """(mean, standard deviation) of each column, gaps aside; 1 for a constant one. Large values do not overflow."""
    if not standardise:
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    size = np.nan_to_num(np.fmax.reduce(np.abs(values)), nan=1.0)
    size = np.where(size == 0, 1.0, size)
    mean, std = np.nanmean(values / size, 0) * size, np.nanstd(values / size, 0) * size
    return mean, np.where(constant(values) | (std == 0), 1.0, std)


def inputs_of(recording: Sheet, d: Description) -> np.ndarray:
    """[N, inputs]: (u - mean) / std, zero where missing, then the inputs that say what is missing."""
    gaps = np.isnan(recording.u)
    for j in np.flatnonzero(gaps.any(0)):
        if recording.features[j] not in d.masked:
            row = int(np.flatnonzero(gaps[:, j])[0])
            raise DataError(f"{recording.place(row, recording.features[j])}: the value is missing, and no value of this feature was missing in training: the network has no input for that. Fill it in.")  # fmt: skip
    u = _cast((recording.u - np.array(d.mean)) / np.array(d.std), d.dtype, lambda r, j: recording.place(r, recording.features[j]))  # fmt: skip
    flags = gaps[:, [recording.features.index(f) for f in d.masked]]
    return np.concatenate([np.where(gaps, 0, u), flags.astype(u.dtype)], 1)


def _cast(values: np.ndarray, dtype: str, place: Any) -> np.ndarray:
    """Values in the type of training; one that is too large for it is refused."""
    large = np.argwhere(np.abs(values) > np.finfo(dtype).max)
    if len(large):
        r, j = map(int, large[0])
        raise DataError(f"{place(r, j)}: {values[r, j]:g} is not finite in {dtype}. Scale the column, leave --standardise on, or train in float64.")  # fmt: skip
    return values.astype(dtype)


def sequences_of(cut: PreparedSheet, index: list[int], u: np.ndarray, d: Description) -> Sequences:
    """Pieces with their targets: class numbers (-1 where missing), or numbers in units of the training deviation."""
    pieces, names = [cut.pieces[i] for i in index], [cut.name(i) for i in index]
    if d.kind == "next":
        v = np.where(np.isnan(cut.recording.u), np.nan, u[:, : len(d.features)]).astype(d.dtype)
        return Sequences(
            [u[a : b - 1] for _, a, b in pieces], [v[a + 1 : b] for _, a, b in pieces], names
        )
    raw = [target_of(cut, i, d.at) for i in index]
    if d.kind == "classify":
        whole = [np.nan_to_num(y[..., 0], nan=-1).astype(np.int64) for y in raw]
        y: Sequence[Any] = whole if d.at == "every" else [int(w) for w in whole]
    else:
        place = lambda row, k: f"{cut.recording.path} column '{one_line(cut.recording.targets[k])}'"
        y = [
            _cast(
                np.atleast_2d((y - np.array(d.target_mean)) / np.array(d.target_std)),
                d.dtype,
                place,
            )
            for y in raw
        ]
        y = y if d.at == "every" else [v[0] for v in y]
    return Sequences([u[a:b] for _, a, b in pieces], y, names)


def as_trained(recording: Sheet, d: Description) -> Sheet:
    """A file's features are those of training: by name where they have names, else by number."""
    if d.named and not recording.has_names:
        raise DataError(f"{recording.path} has no column names, and the network reads {quote_names(d.features)} by name. Give a table (.csv or .parquet).")  # fmt: skip
    if len(recording.features) != len(d.features):
        raise DataError(f"{recording.path} has {len(recording.features)} features and the network was trained on {len(d.features)}.")  # fmt: skip
    return replace(recording, features=tuple(d.features))
