"""Figures of predicted numbers: against their targets, their errors, and over a series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .answers import EVALUATION, Answers, SplitAnswers
from .curves import Curve, json_numbers
from .figures import LineChart, PageFigure, ValueAxis
from .text import Row, plural

MOST_POINTS = 1500  # of a split in one figure
MOST_DRAWN_OUTPUTS = 4
MOST_BINS = 40
STRETCH = 240  # rows of a series that are drawn
FEWEST_ROWS = 12  # of a series that is worth drawing
FEWEST_STEPS = 2  # for a curve over the steps of sequences


def number_figures(answers: Answers) -> list[PageFigure]:
    """For each output the series and its forecast, targets against predictions, and errors."""
    figures = []
    for k, name in enumerate(answers.outputs[:MOST_DRAWN_OUTPUTS]):
        if answers.is_every:
            figures.append(series_figure(answers, k, name))
        figures += [
            against_figure(answers, k, name),
            error_figure(answers, k, name),
            histogram_figure(answers, k, name),
        ]
    return figures


def what_is_predicted(answers: Answers) -> str:
    """The word for a prediction: of the next step it is a forecast."""
    return "forecast" if answers.kind == "next" else "prediction"


def _title(answers: Answers, title: str, name: str) -> str:
    """The title of a figure, with the name of the output if there are several."""
    return f"{title}: {name}" if len(answers.outputs) > 1 else title


def _known(split: SplitAnswers, k: int) -> np.ndarray:
    """The numbers of up to MOST_POINTS targets of output k with a value, evenly spaced."""
    known = np.flatnonzero(np.isfinite(split.true[k]) & np.isfinite(split.predicted[k]))
    if len(known) <= MOST_POINTS:
        return known
    spaced: np.ndarray = known[np.linspace(0, len(known) - 1, MOST_POINTS).astype(int)]
    return spaced


def _point_names(split: SplitAnswers, at: np.ndarray) -> list[str]:
    """The names of targets: of their sequence, and their time, or their row."""
    ids = split.ids
    times = split.times
    rows = split.rows
    is_long = bool((split.lengths > 1).any())
    names = []
    for i in at:
        name = ids[i]
        if times:
            name += f" · {times[i]}"
        elif is_long:
            name += f" · row {rows[i]}"
        names.append(name)
    return names


def scatter_figure(
    id: str,
    title: str,
    about: str,
    labels: tuple[str, str],
    points: Sequence[tuple[str, np.ndarray, np.ndarray, list[str]]],
    extras: Row,
    notes: tuple[str, ...],
) -> PageFigure:
    """Points of several splits: (name, across, up, names of the points)."""
    series = []
    for colour, (name, x, y, names) in enumerate(points):
        columns = {"x": json_numbers(x), "y": json_numbers(y), "names": names}
        series.append({"name": name, "colour": colour, **columns})
    drawn = sum(len(x) for _, x, _, _ in points)
    across, up = labels
    data: Row = {
        "drawn": drawn,
        "total": drawn,
        "x": across,
        "y": {"label": up, "log": False, "range": None},
        "series": series,
    }
    empty = "" if drawn else "There are no targets with a value."
    return PageFigure("scatter", id, title, about, empty, notes, data | extras)


def cut_notes(answers: Answers) -> tuple[str, ...]:
    """Sentences about targets that are not drawn."""
    notes = [split.note for split in answers.splits if split.note]
    return tuple(notes)


def against_figure(answers: Answers, k: int, name: str) -> PageFigure:
    """Output k: predictions over targets, which lie on the diagonal if they are right."""
    word = what_is_predicted(answers)
    points = []
    for split in answers.splits:
        at = _known(split, k)
        x = split.true[k][at]
        points.append((split.name, x, split.predicted[k][at], _point_names(split, at)))
    return scatter_figure(
        f"against-{k}",
        _title(answers, f"{word.capitalize()} against true value", name),
        "a point for each target; on the line they agree",
        (f"true {name}", f"{word} of {name}"),
        points,
        {"diagonal": True},
        cut_notes(answers),
    )


def error_figure(answers: Answers, k: int, name: str) -> PageFigure:
    """Output k: residuals over predictions."""
    word = what_is_predicted(answers)
    points = []
    for split in answers.splits:
        at = _known(split, k)
        predicted = split.predicted[k][at]
        residual = split.true[k][at] - predicted
        points.append((split.name, predicted, residual, _point_names(split, at)))
    return scatter_figure(
        f"residuals-{k}",
        _title(answers, f"Residual over {word}", name),
        f"true value − {word}; a pattern here is something that was not learned",
        (f"{word} of {name}", f"residual of {name}"),
        points,
        {"rules": [{"y": 0, "label": "no error"}]},
        (),
    )


def histogram_figure(answers: Answers, k: int, name: str) -> PageFigure:
    """Output k: how the residuals of each split are distributed."""
    word = what_is_predicted(answers)
    residuals = {}
    for split in answers.splits:
        residual = split.true[k] - split.predicted[k]
        residuals[split.name] = residual[np.isfinite(residual)]
    together = np.concatenate([np.empty(0), *residuals.values()])
    title = _title(answers, "Residuals", name)
    about = f"true value − {word}, as a share of the targets of each set"
    if not len(together):
        empty = "There are no targets with a value."
        return PageFigure("bars", f"histogram-{k}", title, about, empty)
    edges = histogram_edges(together)
    series = []
    for colour, (split_name, values) in enumerate(residuals.items()):
        counts, _ = np.histogram(values, edges)
        shares = counts / max(1, len(values))
        columns = {"y": json_numbers(shares), "counts": counts.tolist()}
        series.append({"name": split_name, "colour": colour, **columns})
    data: Row = {
        "drawn": len(together),
        "total": len(together),
        "edges": json_numbers(edges, 6),
        "x": f"residual of {name}",
        "y": {"label": "share of the targets", "log": False, "range": None},
        "series": series,
    }
    return PageFigure("bars", f"histogram-{k}", title, about, data=data)


def histogram_edges(values: np.ndarray) -> np.ndarray:
    """The edges of bins by the rule of Freedman and Diaconis, at most MOST_BINS of them.

    Values that are all equal have one bin around them.
    """
    low = float(values.min())
    high = float(values.max())
    if not high > low:
        margin = abs(low) * 0.05 or 0.5
        return np.array([low - margin, low + margin])
    quartiles = np.quantile(values, (0.25, 0.75))
    width = 2 * float(quartiles[1] - quartiles[0]) / len(values) ** (1 / 3)
    bins = int(np.ceil((high - low) / width)) if width > (high - low) / MOST_BINS else MOST_BINS
    return np.linspace(low, high, max(4, min(bins, MOST_BINS)) + 1)


def longest_series(split: SplitAnswers) -> tuple[str, int]:
    """The series of a set with the most targets, and how many it has."""
    return Counter(split.series).most_common(1)[0]


def split_to_draw(answers: Answers) -> SplitAnswers:
    """The first set with a series of some length; the one with the longest if none has."""
    for split in answers.splits:
        if longest_series(split)[1] >= FEWEST_ROWS:
            return split
    return max(answers.splits, key=lambda split: longest_series(split)[1])


def series_figure(answers: Answers, k: int, name: str) -> PageFigure:
    """Output k: the last rows of the longest held-out series, with the predictions over it."""
    word = what_is_predicted(answers)
    split = split_to_draw(answers)
    longest, _ = longest_series(split)
    at = np.flatnonzero(np.array(split.series) == longest)
    rows = split.rows[at]
    at = at[rows > rows.max() - STRETCH]
    rows = split.rows[at]
    grid = np.arange(rows.min(), rows.max() + 1)
    true = np.full(len(grid), np.nan)
    predicted = np.full(len(grid), np.nan)
    true[rows - grid[0]] = split.true[k][at]
    predicted[rows - grid[0]] = split.predicted[k][at]
    extras: Row = {"x": f"row of the series {longest}" if longest != "all" else "row of the file"}
    if split.times:
        stamps = [""] * len(grid)
        for row, i in zip(rows, at, strict=True):
            stamps[row - grid[0]] = split.times[i]
        extras |= {"stamps": stamps, "stamps_from": int(grid[0]), "x": "time"}
    step = ", one step ahead" if answers.kind == "next" else ""
    which = "it" if longest == "all" else longest
    of_set = "" if split.name == EVALUATION else f" in the {split.name} set"
    about = f"the last {plural(len(at), 'row')} of {which}{of_set}{step}"
    chart = LineChart(
        f"series-{k}",
        _title(answers, f"The series and its {word}s", name),
        about,
        ValueAxis(name),
        [Curve("true", grid, true), Curve(word, grid, predicted)],
        extras=extras,
    )
    figure = chart.figure()
    notes = cut_notes(answers)
    if len(grid) > len(at):
        notes = (*notes, f"Gaps: rows without a {word}, such as the first of each window.")
    return PageFigure("lines", figure.id, figure.title, about, figure.empty, notes, figure.data)


def step_accuracy_figure(answers: Answers) -> list[PageFigure]:
    """The share of right classes at each step of the sequences; none if they have one step."""
    curves = []
    for split in answers.splits:
        places = np.concatenate([np.arange(T) for T in split.lengths])
        known = np.isfinite(split.true[0])
        right = split.true[0][known] == split.predicted[0][known]
        counts = np.bincount(places[known])
        hits = np.bincount(places[known], weights=right)
        steps = np.flatnonzero(counts)
        curves.append(Curve(split.name, steps, hits[steps] / counts[steps]))
    if max(len(curve.steps) for curve in curves) < FEWEST_STEPS:
        return []
    chart = LineChart(
        "step-accuracy",
        "Accuracy over the sequence",
        "the share of sequences whose class at a step is right",
        ValueAxis("accuracy", span=[0, 1]),
        curves,
        extras={"x": "step of the sequence"},
    )
    return [chart.figure()]
