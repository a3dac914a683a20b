"""Examinations: all diagnostics of an Evaluation, by name.

    e = co.BPTT()(net, batch, loss)
    found = co.diagnostics.decay(e)          # log-norms of costates, and their change per step
    co.diagnostics.plot(found)               # a matplotlib figure
    co.diagnostics.examine(e)                # all diagnostics that apply to this network

Arrays are numpy, in float64; logarithms are natural (charts show decades). Everything that shrinks
or grows with T is computed by mantissas and exponents, by sums of logarithms or by QR steps:
nothing under- or overflows. docs/diagnostics.md has the formulas and how to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import KindError, Unsupported, brief, check_kind, choose, whole_number
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation
from ..networks.interface import Net, check_net
from ..sweeps.costates import Axis
from ..tasks.task import Task
from .charts import Array, Chart, draw
from .costates import decay, paths, temporal
from .finding import Finding, check_evaluation, format_number
from .jacobians import lyapunov, singular_values
from .landscape import along, landscape, noise
from .outputs import sensitivity, stable_rank
from .units import saturation
from .weights import bounds, spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure as PlotFigure

DIAGNOSTICS: dict[str, Callable[[Evaluation], Finding]] = {
    "temporal": temporal,
    "decay": decay,
    "singular-values": singular_values,
    "lyapunov": lyapunov,
    "spectrum": spectrum,
    "bounds": bounds,
    "saturation": saturation,
    "paths": paths,
    "sensitivity": sensitivity,
    "stable-rank": stable_rank,
    "noise": noise,
    "along": along,
    "landscape": landscape,
}


@dataclass(frozen=True)
class Examination:
    """Several diagnostics of one network.

    found     their results, by name
    declined  why others do not apply, by name
    """

    found: dict[str, Finding]
    declined: dict[str, str]

    def charts(self) -> dict[str, Chart]:
        """The charts, by diagnostic."""
        return {name: finding.chart() for name, finding in self.found.items()}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The main figures as a table of text: (column heads, rows)."""
        rows = []
        for finding in self.found.values():
            for figure in finding.figures():
                rows.append([figure.name, format_number(figure.value), figure.unit, figure.says])
        return ["figure", "value", "unit", "meaning"], rows

    def arrays(self) -> dict[str, Array]:
        """All arrays by DIAGNOSTIC.FIELD; dictionaries and tuples are taken apart."""
        all_arrays: dict[str, Array] = {}
        for name, finding in self.found.items():
            all_arrays |= {f"{name}.{key}": array for key, array in arrays(finding).items()}
        return all_arrays


@dataclass(frozen=True)
class Compared:
    """Examinations of several networks, side by side, by the names of the networks."""

    each: dict[str, Examination]

    @property
    def declined(self) -> dict[str, str]:
        """Why diagnostics are missing from the charts, by diagnostic."""
        reasons: dict[str, str] = {}
        alone: set[str] = set()  # diagnostics whose charts show one network
        for examination in self.each.values():
            reasons |= examination.declined
            alone |= {kind for kind, chart in examination.charts().items() if chart.alone}
        for kind in sorted(alone):
            reasons[kind] = f"{kind}: the chart shows one network; the arrays of all are stored."
        return reasons

    def charts(self) -> dict[str, Chart]:
        """One chart for each diagnostic: the first curve of each network's chart.

        Horizontal lines are drawn where all networks share them.
        """
        by_network = {name: examination.charts() for name, examination in self.each.items()}
        joint: dict[str, Chart] = {}
        for kind in DIAGNOSTICS:
            charts = {name: drawn[kind] for name, drawn in by_network.items() if kind in drawn}
            first = next(iter(charts.values()), None)
            if first is not None and not first.alone:
                joint[kind] = first_curves(first, charts)
        return joint

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The main figures, a column for each network: (column heads, rows)."""
        values: dict[tuple[str, str], dict[str, str]] = {}
        for network, examination in self.each.items():
            for finding in examination.found.values():
                for figure in finding.figures():
                    row = values.setdefault((figure.name, figure.unit), {})
                    row[network] = format_number(figure.value)
        rows = []
        for (figure_name, unit), row in values.items():
            rows.append([figure_name, *(row.get(network, "") for network in self.each), unit])
        return ["figure", *self.each, "unit"], rows

    def arrays(self) -> dict[str, Array]:
        """All arrays by NETWORK.DIAGNOSTIC.FIELD."""
        all_arrays: dict[str, Array] = {}
        for name, examination in self.each.items():
            all_arrays |= {f"{name}.{key}": array for key, array in examination.arrays().items()}
        return all_arrays


def first_curves(first: Chart, charts: dict[str, Chart]) -> Chart:
    """The chart `first` with the first curve of each network's chart, under the network's name.

    charts: those of one diagnostic, by network; `first` is one of them.
    """
    title = first.title
    if len(first.curves) > 1:
        title += f": {first.curves[0][0]}"
    # Horizontal lines stay if they are the same for all networks.
    all_rules = {chart.rules for chart in charts.values()}
    rules = first.rules if len(all_rules) == 1 else ()
    curves = tuple((name, *chart.curves[0][1:]) for name, chart in charts.items())
    return replace(first, title=title, rules=rules, curves=curves)


def examine(e: Evaluation, names: Iterable[str] | None = None) -> Examination:
    """All diagnostics that apply to the network, or those of `names` that do.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> net = co.Network("gru", inputs=1, hidden=2, outputs=1)
        >>> batch = co.Batch(torch.ones(5, 3, 1), torch.ones(3, 1))
        >>> e = co.BPTT()(net, batch, "squared")
        >>> found = co.diagnostics.examine(e, ["decay", "bounds"])
        >>> list(found.found), list(found.declined)
        (['decay'], ['bounds'])
    """
    check_evaluation(e)
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise KindError(f"names must be a list of diagnostics; got {brief(names)}.")
    chosen = list(DIAGNOSTICS)
    if names is not None:
        chosen = [choose("diagnostic", name, DIAGNOSTICS) for name in names]
    found: dict[str, Finding] = {}
    declined: dict[str, str] = {}
    for name in chosen:
        try:
            found[name] = DIAGNOSTICS[name](e)
        except Unsupported as error:
            declined[name] = str(error)
    return Examination(found, declined)


def evaluate(net: Net, task: Task, samples: int = 100, seed: int = 0) -> Evaluation:
    """The plain gradient on held-out sequences, to be examined.

    From a finite data set, sequences of medium length are taken. Dropout and noise are off: the
    network is left in eval mode.
    """
    check_net(net)
    check_kind("task", task, Task, "one of co.tasks")
    whole_number("samples", samples)
    split = task.splits[-1] if task.splits else "train"
    batches = list(task.held_out(split, seed, "diagnose", samples))
    largest = max(len(batch.sizes) for batch in batches)
    # Batches of a data set are sorted by length, and the last one may be small.
    full = [batch for batch in batches if len(batch.sizes) == largest]
    net.eval()
    return BPTT().evaluate(net, net.move_batch(full[len(full) // 2]), task.loss)


def arrays(found: Finding) -> dict[str, Array]:
    """The fields of a finding as arrays by name; entries of dictionaries, tuples by FIELD.KEY."""
    by_name: dict[str, Array] = {}
    for field in fields(found):  # type: ignore[arg-type]
        value = getattr(found, field.name)
        if isinstance(value, Axis):
            continue  # words for the chart
        if isinstance(value, tuple):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            by_name |= {f"{field.name}.{key}": np.asarray(part) for key, part in value.items()}
        else:
            by_name[field.name] = np.asarray(value)
    return by_name


def plot(found: Finding | Chart) -> PlotFigure:
    """A matplotlib figure of a diagnostic's result, or of a chart."""
    if not isinstance(found, Chart) and not hasattr(found, "chart"):
        raise KindError(f"plot draws the result of a diagnostic, or a chart; got {brief(found)}.")
    return draw(found if isinstance(found, Chart) else found.chart())
