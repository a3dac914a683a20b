"""Names of metrics as people read them; files keep the short keys."""

from __future__ import annotations

import re

LABELS = {
    "right": "accuracy",
    "balanced-accuracy": "balanced accuracy",
    "whole": "whole answers correct",
    "symbols": "symbols correct",
}
# metrics of which less is better; of others more is
LOWER = ("loss", "mse", "mae", "rmse", "mape", "nll", "log-loss", "log_loss", "error", "perplexity")
LOWER_BEGINNINGS = ("bits-per-", "nats-per-")
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


def split_metric(split: object, metric: str) -> str:
    """A metric with the set it was measured on: "valid accuracy"; split: None if not known."""
    label = metric_label(metric)
    return f"{split} {label}" if split else label


def is_lower_better(metric: str) -> bool:
    """Whether less of a metric is better, by its name: errors and losses."""
    return metric_stem(metric) in LOWER or metric.startswith(LOWER_BEGINNINGS)


def goal_label(goal: str) -> str:
    """A goal with the name of its metric to show: "accuracy >= 1" for "right >= 1"."""
    metric, space, rest = goal.partition(" ")
    return metric_label(metric) + space + rest
