"""A figure of many trials at once: one line per trial, across an axis for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..json_types import JsonObject
from .curves import json_numbers
from .figures import PageFigure
from .text import Row, clean, finite_or_nan, short_number

MOST_LINES = 200  # the best trials; more cannot be told apart
NOT_SET = "not set"  # a setting that a trial leaves at its default, as the first trial does
LOWEST = 0.2  # the place of the least number on an axis where some trials have none
LOG_RATIO = 10  # an axis whose ends have at least this ratio is logarithmic, as a search has it


@dataclass(frozen=True)
class SettingAxis:
    """The axis of one setting. places: of each trial, from 0 (bottom) to 1."""

    name: str
    marks: list[tuple[float, str]]  # places and their labels
    places: np.ndarray

    def script_data(self) -> Row:
        """The axis as JSON for the page's script."""
        return {
            "name": clean(self.name),
            "marks": [[place, clean(label)] for place, label in self.marks],
            "places": json_numbers(self.places),
        }


def make_axis(name: str, values: Sequence[object]) -> SettingAxis:
    """The axis of a setting: numbers by their size, words at equal distances.

    Trials that do not set it (None) are at the bottom.
    """
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, int | float) for value in given):
        return number_axis(name, np.array([finite_or_nan(value) for value in values]))
    ordered = sorted(values, key=lambda value: value is not None)  # the others keep their order
    words = list(dict.fromkeys(map(word_for, ordered)))
    step = 1 / max(len(words) - 1, 1)
    place_of = {word: step * k if len(words) > 1 else 0.5 for k, word in enumerate(words)}
    places = [place_of[word_for(value)] for value in values]
    return SettingAxis(name, [(place, word) for word, place in place_of.items()], np.array(places))


def word_for(value: object) -> str:
    """A setting as a word."""
    return NOT_SET if value is None else str(value)


def number_axis(name: str, values: np.ndarray) -> SettingAxis:
    """The axis of numbers, logarithmic if they span a decade or more; NaN is at the bottom."""
    is_given = np.isfinite(values)
    if not is_given.any():
        return SettingAxis(name, [(0.5, NOT_SET)], np.full(len(values), 0.5))
    low = float(values[is_given].min())
    high = float(values[is_given].max())
    lowest = 0.0 if is_given.all() else LOWEST
    marks = [] if is_given.all() else [(0.0, NOT_SET)]
    if low == high:
        places = np.full(len(values), 0.5)
        marks.append((0.5, short_number(low)))
    else:
        scaled = np.log(values) if low > 0 and high / low >= LOG_RATIO else values
        least = np.nanmin(scaled)
        shares = (scaled - least) / (np.nanmax(scaled) - least)
        places = lowest + (1 - lowest) * shares
        marks += [(lowest, short_number(low)), (1.0, short_number(high))]
    return SettingAxis(name, marks, np.where(is_given, places, 0.0))


def parallel_figure(ranked: list[JsonObject], names: list[str], label: str) -> PageFigure:
    """The figure of trials that have a value, the best first; label: of that value."""
    title = "Settings together"
    about = "one line per trial, from its settings to its value; dark lines are the best"
    shown = ranked[:MOST_LINES]
    if len(shown) < 2 or not names:
        return PageFigure("parallel", "parallel", title, about, "Fewer than two trials to compare.")
    axes = [make_axis(name, [trial["settings"].get(name) for trial in shown]) for name in names]
    axes.append(make_axis(label, [trial["value"] for trial in shown]))
    data = {
        "axes": [axis.script_data() for axis in axes],
        "trials": [describe_trial(trial, names, label) for trial in shown],
        "drawn": len(shown),
        "total": len(ranked),
    }
    notes = []
    if len(shown) < len(ranked):
        notes.append(f"The best {len(shown)} of {len(ranked):,} trials.")
    return PageFigure("parallel", "parallel", title, about, notes=tuple(notes), data=data)


def describe_trial(trial: JsonObject, names: list[str], label: str) -> Row:
    """What the figure tells about a trial that is pointed at."""
    lines = []
    for name in names:
        value = trial["settings"].get(name, NOT_SET)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        lines.append([clean(name), short_number(value) if is_number else clean(value)])
    lines.append([label, short_number(trial["value"])])
    return {"head": f"trial {trial['number']}", "lines": lines}
