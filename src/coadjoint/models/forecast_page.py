"""The page of a forecast: series with forecast and interval, errors by horizon, methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..training import files
from ..training.report.curves import Curve, json_numbers
from ..training.report.figures import LineChart, PageFigure, ValueAxis
from ..training.report.page_parts import Page, PageSection, Table, make_table
from ..training.report.pages import render
from ..training.report.text import Row, clean, short_number
from .forecast import Forecast
from .rolling import NETWORK, Rolling

MOST_SERIES = 6  # drawn
MOST_COLUMNS = 4  # drawn of each
PAST = 4  # times as many rows of the past as steps are drawn,
FEWEST_PAST = 60  # and at least so many
MOST_PAST = 600
MOST_ROWS = 400  # of the table


def write_forecast_page(
    found: Forecast, rolling: Rolling | None, path: str | Path, command: str = "", run: str = ""
) -> Path:
    """Write the page of a forecast as one file that works offline, and return its path.

    Args:
        found: The forecast.
        rolling: Forecasts from past rows; None leaves their section out.
        path: The file, such as forecast.html.
        command: The command line that made it, shown at the end.
        run: The name of the run, shown on top.
    """
    path = Path(path)
    files.replace(path, render(make_forecast_page(found, rolling, command, run)).encode())
    return path


def make_forecast_page(
    found: Forecast, rolling: Rolling | None, command: str = "", run: str = ""
) -> Page:
    """The page of a forecast."""
    sections = [series_section(found)]
    cards = {"steps": str(found.steps), "series": str(len(found.ids))}
    details = ""
    if rolling is not None:
        sections.append(rolling_section(rolling))
        cards |= rolling_cards(rolling)
        details = clean(rolling.season.reason)
    if command:
        commands = {"The command that made this page": clean(command)}
        sections.append(PageSection("again", "Run it again", commands=commands))
    notes = list(found.notes)
    if rolling is not None:
        of_past = [note for note in rolling.notes if note not in notes]
        if of_past:
            notes.append(f"against the past: {'; '.join(of_past)}")
    return Page(
        kind="forecast",
        name=clean(found.source.name),
        title="Forecast",
        outcome=("calm", clean(f"Forecast of {found.summary}"), details),
        facts={"run": clean(run), "data": clean(found.source.name), "level": f"{found.level:g}"},
        notices=[clean(note) for note in notes],
        cards=cards,
        sections=sections,
    )


def rolling_cards(rolling: Rolling) -> dict[str, str]:
    """The error of the network and of the best other method, and the coverage."""
    own = float(np.mean(rolling.overall(NETWORK)[0]))
    others = {}
    for name in rolling.methods:
        error = float(np.mean(rolling.overall(name)[0]))
        if name != NETWORK and np.isfinite(error):
            others[name] = error
    best = min(others, key=lambda name: others[name])
    return {
        "MAE of the network": short_number(own),
        f"MAE of {best}": short_number(others[best]),
        f"in the {100 * rolling.level:g}% intervals": show_share(float(rolling.coverage.mean())),
    }


def show_share(share: float) -> str:
    """A share as a percentage; a dash if it is not known."""
    return f"{100 * share:.0f}%" if np.isfinite(share) else "–"


def series_section(found: Forecast) -> PageSection:
    """The ends of the series with forecasts and intervals, and all numbers in a table."""
    figures = []
    for i in range(min(len(found.ids), MOST_SERIES)):
        for k in range(min(len(found.names), MOST_COLUMNS)):
            figures.append(series_figure(found, i, k))
    lead = ""
    if len(figures) < len(found.ids) * len(found.names):
        lead = f"The first {len(figures)} of {len(found.ids) * len(found.names)} series are drawn."
    return PageSection(
        "forecast", "Series and forecast", lead, figures, tables=[forecast_table(found)]
    )


def series_figure(found: Forecast, i: int, k: int) -> PageFigure:
    """Column k of series i: its last rows, the forecast, and its interval as a band."""
    past = found.history[i][:, k]
    shown = min(len(past), max(FEWEST_PAST, PAST * found.steps), MOST_PAST)
    first = len(past) - shown
    rows = np.arange(first, len(past))
    ahead = np.arange(len(past), len(past) + found.steps)
    joined = np.concatenate([ahead[:1] - 1, ahead])  # the forecast goes on from the last row
    values = np.concatenate([past[-1:], found.values[i, :, k]])
    low = found.lower[i, :, k]
    high = found.upper[i, :, k]
    extras: Row = {"x": "row of the series"}
    interval = ""
    if np.isfinite(low).all():
        band = {"x": ahead.tolist(), "low": json_numbers(low), "high": json_numbers(high)}
        extras["bands"] = [{"name": "interval", "colour": 1, **band}]
        interval = f", with intervals that are to hold {100 * found.level:g}% of the values"
    if found.times is not None and found.past_times is not None:
        stamps = [*found.past_times[i][first:], *found.times[i]]
        extras |= {"stamps": list(map(clean, stamps)), "stamps_from": first, "x": "time"}
    name = clean(found.names[k])
    of = f" of {clean(found.ids[i])}" if len(found.ids) > 1 else ""
    chart = LineChart(
        f"series-{i}-{k}",
        f"{name}{of}",
        f"the last {shown} rows and {found.steps} steps ahead{interval}",
        ValueAxis(name),
        [Curve("series", rows, past[first:]), Curve("forecast", joined, values)],
        extras=extras,
    )
    return chart.figure()


def forecast_table(found: Forecast) -> Table:
    """The table of the forecast, as the file has it."""
    columns = found.table()
    rows = []
    for cells in zip(*(column.values for column in columns), strict=True):
        rows.append([show_cell(cell) for cell in cells])
    text = [j for j, column in enumerate(columns) if not isinstance(column.values, np.ndarray)]
    head = [column.name for column in columns]
    return make_table("Forecast", head, rows, "No steps.", text, MOST_ROWS, folded=True)


def show_cell(cell: object) -> object:
    """A cell of the table: numbers with few digits."""
    if isinstance(cell, np.floating):
        return short_number(float(cell)) if np.isfinite(cell) else "–"
    return cell


def rolling_section(rolling: Rolling) -> PageSection:
    """Errors of all methods by horizon step, the coverage of intervals, and a table."""
    steps = np.arange(1, len(rolling.coverage) + 1)
    figures = []
    for k, name in enumerate(rolling.names[:MOST_COLUMNS]):
        of = f": {clean(name)}" if len(rolling.names) > 1 else ""
        curves = [Curve(method, steps, rolling.mae(method)[:, k]) for method in rolling.methods]
        errors = LineChart(
            f"horizon-{k}",
            f"Error by horizon{of}",
            "mean absolute error, by how many steps ahead",
            ValueAxis("mean absolute error"),
            [curve for curve in curves if np.isfinite(curve.values).any()],
            extras={"x": "steps ahead"},
        )
        covered = LineChart(
            f"coverage-{k}",
            f"Coverage by horizon{of}",
            "share of true values that lie in the interval",
            ValueAxis("share in the interval", span=[0, 1]),
            [Curve("coverage", steps, rolling.coverage[:, k])],
            extras={
                "x": "steps ahead",
                "rules": [{"y": rolling.level, "label": f"target: {100 * rolling.level:g}%"}],
            },
        )
        figures += [errors.figure(), covered.figure()]
    table = make_table("Methods", rolling_head(rolling), rolling_rows(rolling), "No methods.", (0,))
    lead = (
        f"Forecasts from {rolling.origins} rows of the past of each series. No forecast reads "
        "what comes after its row."
    )
    advice = rolling.advice()
    if advice is not None:
        lead = f"{lead} {clean(advice)}"
    return PageSection("rolling", "Against the past", lead, figures, tables=[table])


def rolling_head(rolling: Rolling) -> list[str]:
    """The head of the table of methods."""
    head = ["method"]
    for name in rolling.names:
        of = f" {name}" if len(rolling.names) > 1 else ""
        head += [f"MAE{of}", f"RMSE{of}"]
    return [*head, "MAE 1 step ahead", f"MAE {len(rolling.coverage)} ahead"]


def rolling_rows(rolling: Rolling) -> list[list[str]]:
    """The rows of the table of methods; errors at single steps are means over columns."""
    rows = []
    for method in rolling.methods:
        cells = [method]
        for pair in zip(*rolling.overall(method), strict=True):
            cells += [short_number(float(error)) for error in pair]
        by_step = rolling.mae(method).mean(1)
        rows.append([*cells, short_number(float(by_step[0])), short_number(float(by_step[-1]))])
    return rows
