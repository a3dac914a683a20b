"""The network beside the baselines of the user's own data, as a table."""

from __future__ import annotations

from .page_parts import Table, make_table
from .read import RunRecord, as_mapping, as_mappings
from .text import Row, clean, short_number, shown_metric


def baseline_tables(run: RunRecord) -> list[Table]:
    """A row for the network and each baseline, a column for each held-out set; none without any.

    The metric is the one that chose the weights, or that of the task if the baselines lack it.
    """
    baselines = [each for each in as_mappings(run.result.get("baselines")) if each.get("metrics")]
    if not baselines:
        return []
    splits = list(as_mapping(baselines[0].get("metrics")))
    metric = str(run.result.get("selected_by"))
    if not all(metric in metrics_on(each, splits[0]) for each in baselines):
        metric = str(run.result.get("metric"))
    named = {"name": "network", "about": "this run", "metrics": run.result.get("metrics")}
    rows = []
    for each in (named, *baselines):
        values = [short_number(metrics_on(each, split).get(metric)) for split in splits]
        rows.append([clean(each.get("name")), *values, clean(each.get("about"))])
    heads = ["", *(f"{clean(split)} {shown_metric(metric)}" for split in splits), "what it is"]
    return [make_table("Baselines", heads, rows, "", text=(0, len(heads) - 1))]


def metrics_on(entry: Row, split: str) -> Row:
    """The metrics on a split, of an entry with metrics by split."""
    return as_mapping(as_mapping(entry.get("metrics")).get(split))
