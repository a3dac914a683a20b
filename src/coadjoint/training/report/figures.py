"""Figures of the page: lines over steps, heatmaps over time and steps, and dots per seed.

A chart says what is to be drawn; its `figure()` is what the template shows and the page's script
draws, by kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .curves import (
    MAX_FIGURE_POINTS,
    MAX_SERIES_POINTS,
    Curve,
    json_grid,
    json_numbers,
    thinned_indices,
)
from .text import HEAT_COLUMNS, HEAT_ROWS, Row, clean, plural

Scale = Literal["linear", "log", "auto"]  # auto: logarithmic if the values span three decades

MAX_DOTS = 4000
SMOOTHED = 400  # longer curves are drawn faintly under their running median
MEDIANS = 120  # points of a running median
FEWEST_POINTS = 24  # drawn of each curve, however many curves share a figure
NO_VALUES = "No values were recorded."
SEED_MARKS = "one mark per seed; filled marks succeeded"


@dataclass(frozen=True)
class PageFigure:
    """A figure as the template shows it; `data` is for the script that draws it."""

    kind: Literal["lines", "heat", "dots", "pictures", "scatter", "bars", "ranks", "parallel"]
    id: str
    title: str
    about: str
    empty: str = ""  # why there is nothing to draw
    notes: tuple[str, ...] = ()
    data: Row = field(default_factory=dict)

    def script_data(self) -> Row:
        """The figure as JSON for the page's script."""
        head = {
            "kind": self.kind,
            "id": self.id,
            "title": self.title,
            "about": self.about,
            "empty": self.empty,
            "notes": list(self.notes),
        }
        return head | self.data


@dataclass(frozen=True)
class ValueAxis:
    """The vertical axis of lines."""

    label: str
    scale: Scale = "linear"
    span: list[int] | None = None  # fixed ends

    def is_logarithmic(self, finite: np.ndarray) -> bool:
        """Whether these values are drawn on a logarithmic axis.

        With scale "auto" they are if all are positive and span three decades.
        """
        low = finite.min()
        high = finite.max()
        if self.scale == "linear" or high <= 0:
            return False
        if self.scale == "log":
            return True
        return bool(low > 0 and high / low > 1000)

    def script_data(self, log: bool) -> Row:
        """The axis as JSON for the page's script; log: it is logarithmic."""
        return {"label": self.label, "log": log, "range": self.span}


@dataclass(frozen=True)
class LineChart:
    """Curves over steps."""

    id: str
    title: str
    about: str
    axis: ValueAxis
    curves: Sequence[Curve]
    smooth: bool = False  # long curves turn faint under their running median
    colours: Sequence[int] = ()  # of the curves; by default each has the next
    empty: str = NO_VALUES
    extras: Row = field(default_factory=dict)  # rules, marks and more, for the script

    def figure(self) -> PageFigure:
        """The figure, or why it is empty."""
        values = np.concatenate([np.empty(0), *(curve.values for curve in self.curves)])
        finite = values[np.isfinite(values)]
        if not len(finite):
            return PageFigure("lines", self.id, self.title, self.about, self.empty)
        log = self.axis.is_logarithmic(finite)
        series: list[Row] = []
        drawn = 0
        # count() has no end, so the shorter of the two, the curves, decides
        for curve, colour in zip(self.curves, self.colours or itertools.count(), strict=False):
            points = self._positive(curve) if log else curve
            fair_share = MAX_FIGURE_POINTS // len(self.curves)
            most = max(FEWEST_POINTS, min(MAX_SERIES_POINTS, fair_share))
            indices = thinned_indices(points.values, most)
            drawn += len(indices)
            series += self._series(points, colour, indices)
        nonpositive = int((finite <= 0).sum()) if log else 0
        data = {
            "drawn": drawn,
            "total": len(values),
            "x": "training step",
            "y": self.axis.script_data(log),
            "series": series,
        }
        notes = line_notes(drawn, len(values), len(values) - len(finite), nonpositive)
        return PageFigure(
            "lines", self.id, self.title, self.about, notes=notes, data=data | self.extras
        )

    @staticmethod
    def _positive(curve: Curve) -> Curve:
        """The curve with gaps where a logarithm does not exist."""
        return curve._replace(values=np.where(curve.values > 0, curve.values, np.nan))

    def _series(self, curve: Curve, colour: int, at: np.ndarray) -> list[Row]:
        """The curve at the indices `at`; if long and to be smoothed, also its running median."""
        faint = self.smooth and len(curve.values) > SMOOTHED
        # with 12 digits, no step is rounded
        thinned = {
            "name": clean(curve.name),
            "colour": colour,
            "x": json_numbers(curve.steps[at], 12),
            "y": json_numbers(curve.values[at]),
            "faint": faint,
        }
        if not faint:
            return [thinned]
        median = running_median(curve)
        smoothed = {
            "name": f"{clean(curve.name)}, running median",
            "colour": colour,
            "x": json_numbers(median.steps, 12),
            "y": json_numbers(median.values),
        }
        return [thinned, smoothed]


def line_notes(drawn: int, total: int, gaps: int, nonpositive: int) -> tuple[str, ...]:
    """Sentences about the points that a line chart does not show.

    drawn, total: points; gaps: values that are not finite; nonpositive: values without a logarithm.
    """
    notes = []
    if drawn < total:
        notes.append(
            f"{drawn:,} of {total:,} points drawn: the minimum and maximum of each interval."
        )
    if gaps:
        notes.append(f"{plural(gaps, 'value')} not finite, shown as gaps.")
    if nonpositive:
        notes.append(
            f"{plural(nonpositive, 'value')} not positive, left out of a logarithmic axis."
        )
    return tuple(notes)


def running_median(curve: Curve) -> Curve:
    """The medians of MEDIANS equal stretches of a curve, at their middle steps.

    Values that are not finite are passed over.
    """
    steps = []
    medians = []
    for stretch in np.array_split(np.arange(len(curve.values)), MEDIANS):
        values = curve.values[stretch]
        if np.isfinite(values).any():
            steps.append(curve.steps[stretch[len(stretch) // 2]])
            medians.append(np.nanmedian(values))
    return Curve(curve.name, np.array(steps), np.array(medians))


@dataclass(frozen=True)
class Probe:
    """Values over time t, as probed at one training step."""

    step: float
    t: np.ndarray
    values: np.ndarray

    def aligned(self) -> Probe:
        """The probe with as many times as values, and without times that are not finite.

        If there are more of one, its first are dropped: the ends belong together.
        """
        n = min(len(self.t), len(self.values))
        t = self.t[len(self.t) - n :]
        values = self.values[len(self.values) - n :]
        known = np.isfinite(t)
        return Probe(self.step, t[known], values[known])


@dataclass(frozen=True)
class HeatMap:
    """Values over time t (across) and training step (up)."""

    id: str
    title: str
    about: str
    label: str
    probes: Sequence[Probe]
    extras: Row = field(default_factory=dict)
    blank: str = "zero or not finite"  # what a cell without a colour is
    columns: Sequence[float] = ()  # times that have a column even if no probe has them

    def figure(self) -> PageFigure:
        """The figure, or why it is empty.

        Long sequences and many probes share cells: times are grouped into at most HEAT_COLUMNS
        columns, probes into at most HEAT_ROWS bands. A cell shows the greatest of its values.
        """
        aligned = [probe.aligned() for probe in self.probes if len(probe.t) and len(probe.values)]
        values = np.concatenate([np.empty(0), *(probe.values for probe in aligned)])
        if not np.isfinite(values).any():
            empty = "No probes with these values were recorded."
            return PageFigure("heat", self.id, self.title, self.about, empty, data=self.extras)
        times = np.unique(np.concatenate([np.array(self.columns), *(p.t for p in aligned)]))
        columns = np.array_split(times, min(HEAT_COLUMNS, len(times)))
        starts = np.array([column[0] for column in columns])
        bands = np.array_split(np.arange(len(aligned)), min(HEAT_ROWS, len(aligned)))
        cells = np.full((len(bands), len(starts)), -np.inf)  # stays so, and blank, without values
        steps = []  # the first of each band
        for row, band in zip(cells, bands, strict=True):
            steps.append(aligned[band[0]].step)
            for k in band:
                probe = aligned[k]
                finite = np.isfinite(probe.values)
                column_of = np.searchsorted(starts, probe.t[finite], side="right") - 1
                np.maximum.at(row, column_of, probe.values[finite])
        data = {
            "drawn": cells.size,
            "total": len(values),
            "t": json_numbers(starts),
            "steps": json_numbers(steps, 12),
            "last": json_numbers([aligned[-1].step], 12)[0],
            "cells": json_grid(cells),
            "span": colour_span(cells),
            "label": self.label,
            "blank": self.blank,
        }
        notes = heat_notes(cells.size, values, self.blank)
        return PageFigure(
            "heat", self.id, self.title, self.about, notes=notes, data=data | self.extras
        )


def heat_notes(cells: int, values: np.ndarray, blank: str) -> tuple[str, ...]:
    """Sentences about the values that a heatmap does not show; cells: how many it has.

    Values are logarithms, so that one of 0 is not finite. blank: what such values are, in words.
    """
    notes = []
    gaps = int((~np.isfinite(values)).sum())
    if cells < len(values):
        notes.append(f"{cells:,} cells drawn for {len(values):,} values: each shows its maximum.")
    if gaps:
        notes.append(f"{plural(gaps, 'value')} {blank}, left blank.")
    return tuple(notes)


def colour_span(cells: np.ndarray) -> list[float | None]:
    """The ends of the colour scale: the 1% and 99% quantiles.

    Single cells beyond them do not wash out the rest.
    """
    finite = cells[np.isfinite(cells)]
    return json_numbers(np.quantile(finite, (0.01, 0.99)), digits=3)


@dataclass(frozen=True)
class Dot:
    """The mark of one run in the row of its method; NaN if it has no value."""

    row: int
    run: Row
    value: float


def dot_figure(
    id: str,
    title: str,
    label: str,
    rows: list[str],
    dots: Iterable[Dot],
    lane: str,
    extras: Row | None = None,
    about: str = SEED_MARKS,
) -> PageFigure:
    """A mark for each seed, filled if it succeeded.

    label: of the axis; rows: names of the methods; lane: title of the separate column for marks
    without a value; extras: rules and more, for the script.
    """
    dots = list(dots)
    values = json_numbers(dot.value for dot in dots)
    marks = []
    for dot, x in zip(dots, values, strict=True):
        seed = f"seed {clean(dot.run.get('seed'))}"
        is_open = dot.run.get("success") is not True
        marks.append({"row": dot.row, "x": x, "label": seed, "open": is_open})
    shown = marks[:MAX_DOTS]
    data = {
        "rows": rows,
        "points": shown,
        "lane": lane,
        "x": label,
        "drawn": len(shown),
        "total": len(marks),
    }
    empty = "" if marks else "No runs."
    return PageFigure("dots", id, title, about, empty, data=data | (extras or {}))
