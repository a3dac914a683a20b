"""Costates through depth in a comparison: a curve over layers for every run of a chain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .curves import Curve
from .figures import LineChart, PageFigure, ValueAxis
from .read import as_vector, is_of_layers, scan_rows
from .text import Row
from .wording import DEPTH_WORDS


def depth_curves(path: Path, name: str) -> tuple[Curve, Curve] | None:
    """The costates of a run over its layers: by its first probe, and by its last.

    path: the run's folder. name: of the curves. None for a run whose probes are not those of a
    chain, or that has none.
    """
    first: Row | None = None
    last: Row = {}
    if os.path.lexists(path / "metrics.jsonl"):
        # Only probes of chains have the word, so that no other line is parsed. What cannot be read
        # was noted with the held-out curves.
        for row in scan_rows(path / "metrics.jsonl", [], '"axis"'):
            if row.get("kind") == "probe" and is_of_layers(row):
                first = first or row
                last = row
    if first is None:
        return None
    return _curve(first, name), _curve(last, name)


def _curve(probe: Row, name: str) -> Curve:
    """log10 |lam_i| over layers i, of a row of kind "probe"."""
    layers = as_vector(probe.get("t"))
    logs = as_vector(probe.get("log10_costates"))
    n = min(len(layers), len(logs))
    known = np.isfinite(layers[:n])
    return Curve(name, layers[:n][known], logs[:n][known])


def depth_figures(
    id_suffix: str,
    rows: Sequence[str],
    pairs: Sequence[tuple[Curve, Curve]],
    colours: Sequence[int],
    crowded: str,
) -> list[PageFigure]:
    """A figure of the first probes of all runs, and one of the last.

    rows: names of the methods. pairs, colours: the curves of each run, and the number of its row.
    crowded: what a figure says in place of its curves; "" if they can be told apart. No figures
    without any curves.
    """
    if not pairs:
        return []
    title, _, label = DEPTH_WORDS.costates
    figures = []
    for k, (id, when) in enumerate((("before", "at the start"), ("after", "at the end"))):
        chart = LineChart(
            f"depth-{id}{id_suffix}",
            f"{title} {when}",
            f"mean over held-out samples {when} of each run. Level: the error signal reaches "
            "the input, layer 0, unchanged; rising: it vanishes on its way there",
            ValueAxis(label),
            [] if crowded else [pair[k] for pair in pairs],
            colours=colours,
            empty=crowded or "The probes hold no costates.",
            extras={"rows": list(rows), "x": DEPTH_WORDS.axis},
        )
        figures.append(chart.figure())
    return figures
