"""Advice to the user: what may help where training has little chance, or where it gained little."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..gradients.method import Method
from ..gradients.penalised import Penalised
from ..networks.interface import Net
from ..networks.stack import Stack
from ..tasks.baselines import Baseline
from ..tasks.judging import JudgedCollection
from ..tasks.task import Task
from .json_types import Row

FAINT = -6.0  # log10 of the decay of costates from which on advice is given
GATED = ("gru", "lstm", "peephole", "mingru", "lru")  # cells that need no advice to be gated
BASELINES = {
    "linear": "the linear model",
    "majority": "the largest class",
    "mean": "the mean",
    "last value": "the last value",
    "unigram": "unigram counts",
    "bigram": "bigram counts",
    "trigram": "trigram counts",
    "seasonal naive": "the seasonal naive forecast",
}
ROLLING = "`coadjoint forecast RUN FILE --rolling 24` compares forecasts of several steps."


class Search(NamedTuple):
    """A search for settings by which those of a network were found.

    keys: of the settings that it varied. longer: the command that tries more of them.
    """

    keys: frozenset[str]
    longer: str


def is_gated(net: Net) -> bool:
    """Whether a network has a cell with gates; a stack has one if all its layers do."""
    names = [name_of(net)]
    if isinstance(net, Stack):
        names = [name_of(directions[0]) for directions in net.layers.by_layer]
    return all(name in GATED for name in names)


def name_of(part: object) -> str:
    """The name of the cell of a network or a layer; "" without one."""
    return str(getattr(part, "name", ""))


def advise_on_decay(probe: Row, net: Net, method: Method) -> str | None:
    """A line about costates that decay by more than 1e-6 before training; None if they do not.

    probe: the "probe" row of the initial weights, whose "decay" is log10 of the ratio of the
    first costate and the last. method: that of the run, which may have a penalty already.
    """
    decay = probe["decay"]
    if decay is None or not decay < FAINT:
        return None
    has_penalty = isinstance(method, Penalised)
    if net.sample_axis == 0:
        place = "from output to input; its first layers will hardly learn"
        remedies = ["--init orthogonal"]
        penalty = "--penalty isometry"
    else:
        place = "from end to start; early time steps will hardly be learned from"
        remedies = [] if is_gated(net) else ["--cell gru"]
        remedies.append("--init orthogonal")
        if net.readout == "last" and getattr(net, "summary", None) is None:
            remedies.append("--readout attention")
        penalty = "--penalty log-ratio"
    if not has_penalty:
        remedies.append(penalty)
    return (
        f"The gradient of the initial weights shrinks to 1e{decay:.0f} {place}. What may help: "
        f"{list_words(remedies)}."
    )


def list_words(words: Sequence[str]) -> str:
    """Words as a list: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def shown_metric(selected_by: str | None, task: Task, baselines: Sequence[Baseline]) -> str:
    """The metric by which a network and baselines are compared: the one that chose the weights.

    The task's own, if the baselines do not have that one, such as the loss.
    """
    values = [values for each in baselines for values in each.metrics.values()]
    has_it = bool(values) and all(selected_by in each for each in values)
    return str(selected_by) if has_it else task.metric


def best_baseline(
    baselines: Sequence[Baseline], split: str, metric: str, lower: bool
) -> tuple[Baseline, float] | None:
    """The best of the baselines on a split, with its value; None if no baseline has one."""
    found = []
    for each in baselines:
        value = each.metrics.get(split, {}).get(metric, math.nan)
        if not math.isnan(value):
            found.append((value if lower else -value, each, value))
    if not found:
        return None
    _, best, value = min(found, key=lambda entry: entry[0])
    return best, value


def advise_on_baseline(
    net: Net,
    task: Task,
    baselines: Sequence[Baseline],
    metrics: Mapping[str, Mapping[str, float]],
    metric: str,
    method: Method,
    search: Search | None = None,
) -> str | None:
    """A line for a network that does not beat the best baseline; None if it does.

    metrics: of the network, by split. They are compared on the validation set, or on the test set
    if there is no other. A network whose metric cannot be better than it is needs no advice. One
    that is better on the validation set and worse on the test set is told so, without advice:
    settings are not to be chosen by the test set. search: the one that found the settings, whose
    keys are not advised again.
    """
    split = "valid" if "valid" in task.splits else task.splits[-1]
    lower = task.selector(metric)[1]
    best = best_baseline(baselines, split, metric, lower)
    value = metrics.get(split, {}).get(metric, math.nan)
    if best is None:
        return None
    baseline, to_beat = best
    is_better = value < to_beat if lower else value > to_beat
    is_perfect = value == (0.0 if lower else 1.0)
    if is_better or is_perfect:
        return compare_on_test(task, baselines, metrics, metric)
    name = BASELINES.get(baseline.name, baseline.name)
    remedies = list_words(remedies_for(net, task, method, search))
    line = f"The network does not beat {name} on {split}. What may help: {remedies}."
    return f"{line} {ROLLING}" if is_forecast(task) else line


def is_forecast(task: Task) -> bool:
    """Tell whether a task is to predict the next steps of the user's own series."""
    return isinstance(task, JudgedCollection) and task.description.kind == "next"


def remedies_for(net: Net, task: Task, method: Method, search: Search | None) -> list[str]:
    """What may help a network that does not beat a baseline."""
    remedies = {"epochs": "more --epochs", "lr": "another --lr"}
    if isinstance(task, JudgedCollection) and task.description.kind == "next":
        remedies = remedies_for_forecasts(task)
    if net.sample_axis == 1 and not is_gated(net):
        remedies["cell"] = "--cell gru or lstm"
    if not isinstance(method, Penalised) and not is_forecast(task):
        penalty = "isometry" if net.sample_axis == 0 else "log-ratio"
        remedies["penalty"] = f"--penalty {penalty}"
    if search is None:
        return [*remedies.values(), "a search for settings (coadjoint tune)"]
    untried = [text for key, text in remedies.items() if key not in search.keys]
    return [*untried, f"a longer search ({search.longer})"]


def remedies_for_forecasts(task: JudgedCollection) -> dict[str, str]:
    """What may help a network that is to predict next steps, by key, besides what was tried."""
    ahead = task.description.ahead
    if ahead.get("lags"):
        # Longer training made forecasts of short series worse: see docs/forecasting.md.
        remedies = {"seed": "another --seed", "lags": "other --lags"}
    else:
        remedies = {
            "epochs": "more --epochs",
            "lr": "another --lr",
            "lags": "--lags (1 and one season back)",
        }
    if ahead.get("horizon", 1) == 1:
        remedies["horizon"] = "--horizon for several steps at once"
    return remedies


def compare_on_test(
    task: Task,
    baselines: Sequence[Baseline],
    metrics: Mapping[str, Mapping[str, float]],
    metric: str,
) -> str | None:
    """A line for a network that is worse than a baseline on the test set alone; else None."""
    lower = task.selector(metric)[1]
    best = best_baseline(baselines, "test", metric, lower)
    value = metrics.get("test", {}).get(metric, math.nan)
    if best is None or "valid" not in task.splits:
        return None
    baseline, to_beat = best
    is_worse = value > to_beat if lower else value < to_beat
    if not is_worse:
        return None
    name = BASELINES.get(baseline.name, baseline.name)
    return (
        f"On test the network is worse than {name}, though not on valid: the validation set may be "
        "too small to tell them apart (--split gives it a larger share)."
    )
