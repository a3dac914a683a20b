"""Uneven time steps of a prepared set, found in its array of times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .description import JsonDict
from .files.dates import months_of
from .files.sheet import DAY, Sheet
from .prepared import place_in_source, slices


def describe_uneven(folder: Path, first: Sheet | None, sources: list[JsonDict], most: int) -> str:
    """Return a sentence on the first time step that is off the usual one by more than 1%; or "".

    most: time steps whose median is the usual one.
    """
    assert first is not None
    times = np.load(folder / "time.npy", mmap_mode="r", allow_pickle=False)
    starts = np.load(folder / "starts.npy", allow_pickle=False)
    usual: float | None = None
    in_months = False
    for block in slices(len(times), most):
        begin = max(block.start - 1, 0)
        time = np.array(times[begin : block.stop])
        if usual is None and first.has_dates:
            in_months = months_of(time) is not None
        months = months_of(time) if in_months else None
        if months is not None:  # even in months, if not in days
            time = months
        inside = np.ones(len(time), bool)
        inside[0] = False
        of_block = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, block.stop)]
        inside[of_block - begin] = False
        rows = np.flatnonzero(inside)
        if not len(rows):
            continue
        steps = (time[rows] - time[rows - 1]).astype(np.float64)
        if usual is None:
            usual = float(np.median(steps))
        rounding = 8 * np.finfo(np.float64).eps * float(np.abs(time.astype(np.float64)).max())
        odd = np.flatnonzero(np.abs(steps - usual) > 0.01 * usual + rounding)
        if len(odd):
            row = begin + int(rows[odd[0]])
            size, unit = unit_of(usual, first.has_dates, in_months)
            place = place_in_source(sources, row, first.columns["time"])
            return (
                f"{place}: the time step is {steps[odd[0]] / size:g}{unit} and the usual one is "
                f"{usual / size:g}{unit}. Resample to a regular step, or pass --irregular allow."
            )
    return ""


def unit_of(usual: float, has_dates: bool, in_months: bool) -> tuple[float, str]:
    """Return the unit of time steps: its size, and its name after a number."""
    if in_months:
        return 1.0, " months"
    if not has_dates:
        return 1.0, ""
    return (DAY, " d") if usual >= DAY else (1e6, " s")
