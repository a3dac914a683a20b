"""Metrics of own data by name, and the figures of a network beside those of baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .program import print_escaped, print_table

if TYPE_CHECKING:
    from ..training.advice import Search
    from ..training.progress import Result
    from .build import Job
    from .schema import Config


def asked_metrics(config: Config) -> list[str]:
    """The metrics that --metrics and --select name; "loss" is there without being asked for."""
    asked = config.data.metrics or []
    names = [asked] if isinstance(asked, str) else list(asked)
    if config.training.select not in (None, "loss"):
        names.append(str(config.training.select))
    return names


def print_baselines(result: Result, job: Job, search: Search | None = None) -> None:
    """Print the metric of the network and of the baselines on each held-out set, and advice.

    search: the one that found the settings of the run, if there was one.
    """
    from ..tasks.judging import JudgedCollection
    from ..training import advice
    from ..training.metric_names import metric_label

    task = job.task
    if not isinstance(task, JudgedCollection) or not task.baselines:
        return
    computed = [each for each in task.baselines if each.metrics]
    metric = advice.shown_metric(result.selected_by, task, computed)
    heads = ["", *(f"{split} {metric_label(metric)}" for split in task.splits)]
    rows = [["network", *(f"{result.metrics[split][metric]:.4g}" for split in task.splits)]]
    for each in computed:
        values = (each.metrics[split][metric] for split in task.splits)
        rows.append([each.name, *(f"{value:.4g}" for value in values)])
    print()
    print_table(heads, rows)
    for each in task.baselines:
        if each.name in ("linear", "seasonal naive"):
            print_escaped(f"{each.name}: {each.about}")
    method = job.arguments["gradient"]
    line = advice.advise_on_baseline(
        job.network, task, computed, result.metrics, metric, method, search
    )
    if line is not None:
        print_escaped(line)
    print()
