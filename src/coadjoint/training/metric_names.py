"""Names of metrics as people read them; files keep the short keys."""

from __future__ import annotations

import re

LABELS = {
    "right": "accuracy",
    "whole": "whole answers correct",
    "symbols": "symbols correct",
}
TOLERANCE = re.compile(r"_([\d.]+)$")  # the end of a key: "right_0.2"


def metric_stem(metric: str) -> str:
    """The metric without its tolerance: "right" of "right_0.2", which share one figure."""
    return TOLERANCE.sub("", metric)


def metric_label(metric: str) -> str:
    """The name to show: "accuracy" for "right", "accuracy (within 0.2)" for "right_0.2".

    A metric that is not among LABELS is shown by its key.
    """
    stem = metric_stem(metric)
    if stem not in LABELS:
        return metric
    tolerance = TOLERANCE.search(metric)
    return f"{LABELS[stem]} (within {tolerance[1]})" if tolerance else LABELS[stem]


def goal_label(goal: str) -> str:
    """A goal with the name of its metric to show: "accuracy >= 1" for "right >= 1"."""
    metric, space, rest = goal.partition(" ")
    return metric_label(metric) + space + rest
