"""Shares of the training file: what is split off from it, by default or as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ConfigError
from .cutting import (
    Part,
    Piece,
    PreparedSheet,
    check_split,
    count_held_out,
    split_pieces,
    target_of,
)

Shares = tuple[float, float, float]  # of train, valid and test
Parts = dict[str, Part]  # by split: train, valid, test

WHOLE: Shares = (1.0, 0.0, 0.0)
BY_DEFAULT: Shares = (0.8, 0.1, 0.1)  # without any held-out file
BESIDE_TEST: Shares = (0.8, 0.2, 0.0)  # with a test file and no validation file
FEWEST = 5  # sequences, or windows, of which one in five is split off by default
FEWEST_ROWS = 10  # of a held-out part that is the end of a sequence


@dataclass(frozen=True)
class Division:
    """The parts of the training file, their shares, and what there is to say about them.

    shares: (train, valid, test) without held-out files. Beside one such file two: train, and the
    part that has no file. None if both have a file.
    """

    parts: Parts
    shares: tuple[float, ...] | None
    notes: tuple[str, ...] = ()


def choose_shares(split: Sequence[float] | None, has_valid: bool, has_test: bool) -> Shares:
    """Return the shares of train, valid and test in the training file.

    split: as asked for, or None for the default. What has a file of its own has no share here; two
    numbers are those of train and of the part without a file.
    """
    if split is None:
        if has_valid:
            return WHOLE
        return BESIDE_TEST if has_test else BY_DEFAULT
    if has_valid and has_test:
        raise ConfigError(
            "--split divides the training file, but --valid and --test have their own files: "
            "leave --split out."
        )
    if len(split) == 2 and (has_valid or has_test):
        train, other = split
        split = (train, 0.0, other) if has_valid else (train, other, 0.0)
    check_split(split)
    train, valid, test = split
    given = ",".join(f"{share:g}" for share in split)
    if has_test and test:
        raise ConfigError(
            f"--split {given}: with a --test file its third share (test) must be 0. "
            f"Pass --split {train + test:g},{valid:g},0, or leave --test out."
        )
    if has_valid and valid:
        raise ConfigError(
            f"--split {given}: with a --valid file its second share (valid) must be 0. "
            f"Pass --split {train + valid:g},0,{test:g}, or leave --valid out."
        )
    return (float(train), float(valid), float(test))


def divide(
    cuts: dict[str, PreparedSheet],
    split: Sequence[float] | None,
    seed: int,
    stratify: bool,
    at: str,
) -> Division:
    """Return the parts of all files: what is split off from the training file, and other files.

    cuts: the files by split. split, seed: as in `Data.read`. stratify: spread the classes evenly.

    Sequences stay whole, and windows of one sequence stay together. A single sequence is split in
    order of time: the held-out parts are behind the training part. So are a few sequences that
    have a target at every row, each for itself.
    """
    shares = choose_shares(split, "valid" in cuts, "test" in cuts)
    train = cuts["train"]
    notes: tuple[str, ...] = ()
    parts: Parts | None = {"train": whole(train)}
    if shares != WHOLE:
        parts = split_off(train, shares, seed, stratify, at, is_default=split is None)
    if parts is None:
        notes = (describe_lack(train),)
        shares = WHOLE
        parts = {"train": whole(train)}
    for name, cut in cuts.items():
        if name != "train":
            parts[name] = whole(cut)
    order = [name for name in ("train", "valid", "test") if name in parts]
    return Division({name: parts[name] for name in order}, as_given(shares, cuts), notes)


def as_given(shares: Shares, cuts: dict[str, PreparedSheet]) -> tuple[float, ...] | None:
    """Return the shares as a `Division` has them."""
    train, valid, test = shares
    if "valid" in cuts and "test" in cuts:
        return None
    if "valid" in cuts:
        return (train, test)
    return (train, valid) if "test" in cuts else shares


def whole(cut: PreparedSheet) -> Part:
    """Return all pieces of a file as one part."""
    return Part(cut, list(range(len(cut.pieces))))


def split_off(
    cut: PreparedSheet, shares: Shares, seed: int, stratify: bool, at: str, is_default: bool
) -> Parts | None:
    """Return the parts of the training file; None if it is too small for the default beside a test.

    is_default: nobody asked for these shares.
    """
    sequences = len({piece.sequence for piece in cut.pieces})
    is_spare = is_default and shares == BESIDE_TEST
    units = sequences if sequences > 1 else len(cut.pieces)
    has_one_piece = len(cut.pieces) == 1
    if at == "every" and (has_one_piece or (is_spare and units < FEWEST)):
        parts = split_in_time(cut, shares)
        if parts is not None:
            return parts
    if is_spare and units < FEWEST:
        return None
    parts = split_pieces(cut, shares, seed, stratify)
    if is_spare and stratify and classes_of(parts["train"]) < classes_of(whole(cut)):
        return None
    return parts


def classes_of(part: Part) -> set[float]:
    """Return the class numbers of a part."""
    return {float(part.target(i, "last")[0]) for i in range(len(part.chosen))}


def split_in_time(cut: PreparedSheet, shares: Shares) -> Parts | None:
    """Split each sequence in order of time: its last rows, or windows, are held out.

    None if a sequence is too short for that. A sequence in one piece is cut at a row, one in
    windows between two of them.
    """
    pieces: list[Piece] = []
    chosen: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    for sequence in dict.fromkeys(piece.sequence for piece in cut.pieces):
        own = [piece for piece in cut.pieces if piece.sequence == sequence]
        if len(own) == 1:
            parts = cut_rows(own[0], shares)
        else:
            parts = deal_windows(own, shares)
        for name, part in parts.items():
            chosen[name] += range(len(pieces), len(pieces) + len(part))
            pieces += part
        needed = [name for name, share in zip(chosen, shares, strict=True) if share]
        if any(not parts[name] for name in needed):
            return None
    divided = replace(cut, pieces=pieces)
    if divided.sheet.y is not None:
        # Where gaps are masked, a part may have no target at all.
        for i in range(len(pieces)):
            if np.isnan(target_of(divided, i, "every")).all():
                return None
    return {name: Part(divided, numbers) for name, numbers in chosen.items()}


def cut_rows(piece: Piece, shares: Shares) -> dict[str, list[Piece]]:
    """Cut a piece at rows; a part is empty where it would be shorter than FEWEST_ROWS."""
    sequence, start, stop = piece
    rows = stop - start
    valid, test = (round(rows * share) for share in shares[1:])
    ends = {"train": stop - valid - test, "valid": stop - test, "test": stop}
    parts: dict[str, list[Piece]] = {}
    for name, end in ends.items():
        parts[name] = [Piece(sequence, start, end)] if end - start >= FEWEST_ROWS else []
        start = end
    return parts


def deal_windows(own: list[Piece], shares: Shares) -> dict[str, list[Piece]]:
    """Deal the windows of a sequence in order of time; all parts are empty if they are few."""
    if len(own) < FEWEST:
        return {"train": [], "valid": [], "test": []}
    valid, test = (count_held_out(len(own), share) for share in shares[1:])
    valid_end = len(own) - test
    train_end = valid_end - valid
    return {"train": own[:train_end], "valid": own[train_end:valid_end], "test": own[valid_end:]}


def describe_lack(cut: PreparedSheet) -> str:
    """Say that the training file has too little to split a validation set off."""
    sheet = cut.sheet
    n = len({piece.sequence for piece in cut.pieces})
    advice = "Give --valid FILE"
    if sheet.shape is None:
        advice += ", or --window to cut long sequences into pieces"
    return (
        f"{sheet.path} has {n} {sheet.unit}{'s' * (n != 1)}, too few to split a validation set "
        f"off: the last weights are kept. {advice}."
    )
