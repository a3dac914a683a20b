"""The diagnostics of a network: a section of a run's page, or a page by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import StorageError
from .curves import Curve, json_grid, json_numbers
from .figures import NO_VALUES, LineChart, PageFigure, ValueAxis, colour_span
from .page_parts import Page, PageSection, Table, describe_settings, make_table
from .read import as_mapping, as_mappings, as_vector, layers_in, read_mapping
from .text import HEAT_ROWS, Row, clean, finite_or_nan
from .wording import DEPTH_WORDS, list_layers

MAX_CHARTS = 40
MAX_CARDS = 8
MAX_ENTRIES = 60  # of a list in a chart or a table
WORD_COLUMNS = ("figure", "unit", "meaning", "what it says")  # the last: before 0.7.1


@dataclass(frozen=True)
class Diagnosis:
    """The content of diagnostics.json, and the section that shows it."""

    about: Row
    table: Table
    section: PageSection


def read_diagnosis(folder: Path, faults: list[str]) -> Diagnosis | None:
    """The diagnosis in a folder; None without a diagnostics.json that can be read.

    What cannot be read adds a sentence to `faults`.
    """
    found = read_mapping(folder / "diagnostics.json", faults)
    if not found:
        return None
    about = as_mapping(found.get("about"))
    table = diagnosis_table(as_mapping(found.get("table")))
    tables = [table]
    declined = list(as_mapping(found.get("declined")).items())
    if declined:
        heads = ["diagnostic", "why"]
        tables.append(
            make_table("Not applicable to this network", heads, declined, "", folded=True)
        )
    lead = "; ".join(clean(about[key]) for key in ("weights", "sequences") if about.get(key))
    charts = as_mappings(found.get("charts"))[:MAX_CHARTS]
    layers = layers_in(about)
    figures = [chart_figure(chart, k, layers) for k, chart in enumerate(charts)]
    lead = ". ".join(part for part in (lead, list_layers(layers)) if part)
    return Diagnosis(about, table, PageSection("diagnostics", "Diagnostics", lead, figures, tables))


def diagnosis_table(table: Row) -> Table:
    """The figures of a diagnosis, from {"heads": [...], "rows": [[...], ...]}.

    Rows that do not fit the heads are left out.
    """
    heads = _texts(table.get("heads"))
    rows = []
    if heads:
        for entry in table.get("rows") or ():
            row = _texts(entry)
            if len(row) == len(heads):
                rows.append(row)
    text_columns = [i for i, head in enumerate(heads) if head in WORD_COLUMNS]
    return make_table("Figures", heads, rows, "No figures were recorded.", text=text_columns)


def _texts(value: object) -> list[str]:
    """The entries of a list as safe text, at most MAX_ENTRIES; [] if the value is no list."""
    if not isinstance(value, list):
        return []
    return list(map(clean, value[:MAX_ENTRIES]))


def diagnosis_page(folder: Path) -> Page:
    """A page of diagnostics alone."""
    faults: list[str] = []
    diagnosis = read_diagnosis(folder, faults)
    if diagnosis is None:
        why = " ".join(faults)
        path = folder / "diagnostics.json"
        raise StorageError(f"'{path}' holds no diagnostics. {why} Run `coadjoint diagnose` again.")
    about = diagnosis.about
    name = clean(folder.resolve().name)
    outcome = clean(about.get("sequences") or "Diagnostics"), clean(about.get("weights") or "")
    command = clean(about.get("command") or "not recorded")
    again = PageSection(
        "again", "Run it again", commands={"The command that made this page": command}
    )
    return Page(
        kind="diagnosis",
        name=name,
        title=describe_settings(about.get("task")) or name,
        outcome=("calm", *outcome),
        facts={
            "network": describe_settings(about.get("network")),
            "seed": clean(about.get("seed")),
        },
        notices=faults,
        cards=cards(diagnosis.table),
        sections=[diagnosis.section, again],
    )


def cards(table: Table) -> dict[str, str]:
    """The first figures of one network, {figure: value and unit}, for the top of the page.

    A comparison of several networks has a column for each, and no cards.
    """
    if table.head[:3] != ["figure", "value", "unit"]:
        return {}
    texts = {}
    for figure, value, unit, *_ in table.rows[:MAX_CARDS]:
        texts[str(figure)] = f"{value} {unit}"
    return texts


def chart_figure(chart: Row, k: int, layers: Sequence[str] = ()) -> PageFigure:
    """The k-th chart of diagnostics.json: curves, or the cells of a grid.

    layers: the names of the layers of a chain, for charts over them.
    """
    if isinstance(chart.get("cells"), list):
        return _grid_figure(chart, k)
    return _lines_figure(chart, k, layers)


def _lines_figure(chart: Row, k: int, layers: Sequence[str]) -> PageFigure:
    """The k-th chart as curves, with horizontal rules where it has some.

    "decades": its values are logarithms already; "share": they lie between 0 and 1.
    """
    texts = _chart_texts(chart)
    label = texts["y"]
    if chart.get("decades") is True:
        label = f"log₁₀ of the {label}"
    span = [0, 1] if chart.get("share") is True else None
    rules = []
    for value, name in _entries(chart, "rules", 2):
        y = finite_or_nan(value)
        if not math.isnan(y):
            rules.append({"y": y, "label": clean(name)})
    extras: Row = {"x": texts["x"]}
    if layers and texts["x"].startswith(DEPTH_WORDS.axis):
        extras["names"] = list(layers)
    if rules:
        extras["rules"] = rules
    drawn = LineChart(
        f"diagnostic-{k}",
        texts["title"],
        texts["about"],
        ValueAxis(label, span=span),
        _chart_curves(chart),
        extras=extras,
    )
    return drawn.figure()


def _grid_figure(chart: Row, k: int) -> PageFigure:
    """The k-th chart as a heatmap: cells[i][j] lies at place i across and j up.

    The places are the abscissae and the ordinates of the first curve. Columns that are too short,
    and cells without a place, are left out.
    """
    texts = _chart_texts(chart)
    id = f"diagnostic-{k}"
    curves = _chart_curves(chart)
    across = curves[0].steps if curves else np.empty(0)
    up = curves[0].values if curves else np.empty(0)
    columns = []
    for column in map(as_vector, chart["cells"][:HEAT_ROWS]):
        if len(column) >= len(up):
            columns.append(column[: len(up)])
    columns = columns[: len(across)]
    if not np.isfinite(np.array(columns)).any():
        return PageFigure("heat", id, texts["title"], texts["about"], NO_VALUES)
    grid = np.array(columns).T  # the page draws rows
    data = {
        "cells": json_grid(grid),
        "span": colour_span(grid),
        "drawn": grid.size,
        "total": grid.size,
        "t": json_numbers(across[: len(columns)]),
        "steps": json_numbers(up),
        "x": texts["x"],
        "y": texts["y"],
        "label": clean(chart.get("label") or ""),
    }
    return PageFigure("heat", id, texts["title"], texts["about"], data=data)


def _chart_texts(chart: Row) -> Mapping[str, str]:
    """The title of a chart, what it is about, and the labels of its axes, as safe text."""
    return {key: clean(chart.get(key) or "") for key in ("title", "about", "x", "y")}


def _entries(chart: Row, key: str, size: int) -> list[list[object]]:
    """The lists of `size` values under a key; anything else is left out."""
    values = chart.get(key)
    if not isinstance(values, list):
        return []
    entries = [entry for entry in values if isinstance(entry, list) and len(entry) == size]
    return entries[:MAX_ENTRIES]


def _chart_curves(chart: Row) -> list[Curve]:
    """The curves [name, abscissae, ordinates] of a chart, at the abscissae that are finite."""
    curves = []
    for name, across, up in _entries(chart, "curves", 3):
        x = as_vector(across)
        y = as_vector(up)
        n = min(len(x), len(y))
        known = np.isfinite(x[:n])
        curves.append(Curve(clean(name), x[:n][known], y[:n][known]))
    return curves
