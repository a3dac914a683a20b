"""A part of a table with one argument, where the marker `sampled` would keep every value."""

from collections.abc import Iterable

import pytest


def one_in(n: int, values: Iterable[object]) -> list[object]:
    """The first of every n values; the others run with --thorough alone."""
    return [y if i % n == 0 else later(y) for i, y in enumerate(values)]


def later(value: object) -> object:
    """One row of a table, or its one value."""
    row = value if isinstance(value, tuple) else (value,)
    return pytest.param(*row, marks=pytest.mark.thorough)
