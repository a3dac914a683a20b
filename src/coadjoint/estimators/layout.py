"""Sequences in the forms that they may be given in, as [n, T, C] or a list of [T_i, C]."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array  # type: ignore[import-untyped]

from ..errors import InputError, brief

Sequences = np.ndarray | list[np.ndarray]
Given = Any  # arrays, lists, frames: what scikit-learn takes
AXES = "[n, T, features], [n, T], or a list of [T_i, features]"


def read_sequences(
    X: Given, channels_first: bool, allows_gaps: bool, estimator: Given, fewest: int = 1
) -> Sequences:
    """Return sequences as one array [n, T, C] or, if their lengths differ, a list of [T_i, C].

    Args:
        X: [n, T, C], [n, T] for one feature, or a list of [T_i, C] or [T_i].
        channels_first: Whether features come before steps, as in aeon: [n, C, T], [C, T_i].
        allows_gaps: Whether values may be NaN.
        estimator: For messages.
        fewest: How many sequences there must be.
    """
    parts = list_parts(X)
    finite: bool | str = "allow-nan" if allows_gaps else True
    checks = {"dtype": np.float64, "ensure_all_finite": finite, "estimator": estimator}
    if parts is None:
        with advising_on_gaps():
            array = check_array(X, allow_nd=True, ensure_min_samples=fewest, **checks)
        if array.ndim > 3:
            raise InputError(f"X has shape {list(array.shape)}; expected {AXES}.")
        return with_features_last(array, channels_first)
    rows: list[np.ndarray] = []
    for i, part in enumerate(parts):
        with advising_on_gaps():
            one = check_array(part, ensure_2d=False, input_name=f"X[{i}]", **checks)
        if one.ndim not in (1, 2):
            raise InputError(f"X[{i}] has shape {list(one.shape)}; expected [T_i, features].")
        rows.append(with_features_last(one[None], channels_first)[0])
    widths = [part.shape[1] for part in rows]
    other = next((i for i, width in enumerate(widths) if width != widths[0]), None)
    if other is not None:
        raise InputError(
            f"X[{other}] has {widths[other]} features and X[0] has {widths[0]}; expected the same."
        )
    return rows


@contextlib.contextmanager
def advising_on_gaps() -> Iterator[None]:
    """Inside, scikit-learn's error about NaN becomes one that says how estimators take gaps."""
    try:
        yield
    except ValueError as error:
        text = str(error).partition("\n")[0].rstrip(".")
        if "NaN" not in text:
            raise
        raise InputError(
            f"{text}. Fill the gaps, or pass missing='mask', 'ffill' or 'drop'."
        ) from None


def with_features_last(array: np.ndarray, channels_first: bool) -> np.ndarray:
    """Return [n, T] or [n, T, C] (with channels_first [n, C, T]) as [n, T, C]."""
    if array.ndim == 2:
        return array[..., None]
    return array.swapaxes(1, 2) if channels_first else array


def list_parts(X: Given) -> list[Any] | None:
    """Return a list of arrays whose shapes differ; None if X is, or can be, one array."""
    is_objects = isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1
    if not is_objects and not isinstance(X, list | tuple):
        return None
    shapes = {np.shape(part) if hasattr(part, "shape") else size_of(part) for part in X}
    return list(X) if len(shapes) > 1 and () not in shapes else None


def size_of(part: Given) -> tuple[int, ...]:
    """Return the shape of a list of numbers, or of lists; () for a number or a word."""
    if not isinstance(part, list | tuple):
        return ()
    return (len(part), *size_of(part[0])) if part else (0,)


def count_features(X: Sequences) -> int:
    """Return the features of a step."""
    return int(X[0].shape[-1])


def refuse_other_width(X: Sequences, expected: int, name: str) -> None:
    """Refuse sequences with another number of features than those of `fit`."""
    found = count_features(X)
    if found != expected:
        raise InputError(
            f"X has {found} features, but {name} is expecting {expected} features as input: those "
            "of a time step."
        )


def random_seed(seed: Any, random_state: Any) -> int:
    """Return the seed of `seed` or of `random_state`, which is a number or draws one; 0 of None."""
    if seed is not None and random_state is not None:
        raise InputError(
            f"seed ({brief(seed)}) and random_state ({brief(random_state)}) are the same setting: "
            "give one of them."
        )
    chosen = random_state if seed is None else seed
    if isinstance(chosen, np.random.RandomState):
        return int(chosen.randint(2**31 - 1))
    if isinstance(chosen, np.random.Generator):
        return int(chosen.integers(2**31 - 1))
    return 0 if chosen is None else int(chosen)
