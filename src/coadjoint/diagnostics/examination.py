"""Diagnostics: what the gradient does inside a sequence. Each takes an Evaluation and returns arrays.

    e = co.BPTT()(net, batch, loss)
    found = co.diagnostics.decay(e)          # costates: their log-norms, and what a step towards the past adds to them
    co.diagnostics.plot(found)               # a matplotlib figure
    co.diagnostics.examine(e)                # all of them that this network has

Arrays are numpy, in float64; logarithms are natural (charts show decades). Everything that shrinks or grows with T is made
of mantissas and exponents, of sums of logarithms or of QR steps: nothing under- or overflows. docs/diagnostics.md has the
formulas and how to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..errors import KindError, Unsupported, brief, check_kind, choose, whole_number
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation
from ..networks.interface import Net, check_net
from ..sweeps.costates import Axis
from ..tasks.task import Task
from .charts import Array, Chart, draw
from .costates import decay, paths, sensitivity, temporal
from .finding import Finding, check_evaluation, format_number
from .jacobians import lyapunov, singular_values
from .landscape import along, landscape, noise
from .units import saturation
from .weights import bounds, spectrum

# all of them
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
    "noise": noise,
    "along": along,
    "landscape": landscape,
}


@dataclass(frozen=True)
class Examination:
    """What was found, by name, and why others were declined."""

    found: dict[str, Finding]
    declined: dict[str, str]

    def charts(self) -> dict[str, Chart]:
        return {name: one.chart() for name, one in self.found.items()}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The main figures, for people: heads and rows."""
        every = [f for one in self.found.values() for f in one.figures()]
        return ["figure", "value", "unit", "what it says"], [
            [f.name, format_number(f.value), f.unit, f.says] for f in every
        ]

    def arrays(self) -> dict[str, Array]:
        """Everything, by NAME.FIELD: dictionaries and tuples taken apart."""
        return {
            f"{name}.{key}": y for name, one in self.found.items() for key, y in arrays(one).items()
        }


@dataclass(frozen=True)
class Compared:
    """Examinations of several networks, side by side."""

    each: dict[str, Examination]

    @property
    def declined(self) -> dict[str, str]:
        told = {name: why for one in self.each.values() for name, why in one.declined.items()}
        alone = {
            k for one in self.each.values() for k, chart in one.charts().items() if chart.alone
        }
        return told | {
            kind: f"{kind}: its picture is of one network; the arrays of all are kept."
            for kind in sorted(alone)
        }

    def charts(self) -> dict[str, Chart]:
        """The first curve of each network's chart, in one; and the horizontal lines that they share."""
        out: dict[str, Chart] = {}
        every = {name: one.charts() for name, one in self.each.items()}
        for kind in DIAGNOSTICS:
            charts = {name: found[kind] for name, found in every.items() if kind in found}
            first = next(iter(charts.values()), None)
            if first is None or first.alone:
                continue
            title = f"{first.title}: {first.curves[0][0]}" if len(first.curves) > 1 else first.title
            rules = first.rules if len({c.rules for c in charts.values()}) == 1 else ()
            curves = tuple((name, *c.curves[0][1:]) for name, c in charts.items())
            out[kind] = replace(first, title=title, rules=rules, curves=curves)
        return out

    def table(self) -> tuple[list[str], list[list[str]]]:
        values: dict[tuple[str, str], dict[str, str]] = {}
        for name, one in self.each.items():
            for f in (f for found in one.found.values() for f in found.figures()):
                values.setdefault((f.name, f.unit), {})[name] = format_number(f.value)
        rows = [
            [what, *(found.get(name, "") for name in self.each), unit]
            for (what, unit), found in values.items()
        ]
        return ["figure", *self.each, "unit"], rows

    def arrays(self) -> dict[str, Array]:
        return {
            f"{name}.{key}": y for name, one in self.each.items() for key, y in one.arrays().items()
        }


def examine(e: Evaluation, names: Iterable[str] | None = None) -> Examination:
    """All diagnostics, or those of `names`."""
    check_evaluation(e)
    found: dict[str, Finding] = {}
    declined: dict[str, str] = {}
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise KindError(f"names must be a list of diagnostics; got {brief(names)}.")
    for name in (
        DIAGNOSTICS if names is None else [choose("diagnostic", n, DIAGNOSTICS) for n in names]
    ):
        try:
            found[name] = DIAGNOSTICS[name](e)
        except Unsupported as error:
            declined[name] = str(error)
    return Examination(found, declined)


def evaluate(net: Net, task: Task, samples: int = 100, seed: int = 0) -> Evaluation:
    """The plain gradient on held-out sequences, for an examination; of a finite set, sequences of medium length. Without dropout
    and noise: the network is left in eval mode."""
    check_net(net)
    check_kind("task", task, Task, "one of co.tasks")
    whole_number("samples", samples)
    split = task.splits[-1] if task.splits else "train"
    batches = list(task.held_out(split, seed, "diagnose", samples))
    most = max(len(b.sizes) for b in batches)
    full = [b for b in batches if len(b.sizes) == most]
    net.eval()
    return BPTT().evaluate(net, net.move_batch(full[len(full) // 2]), task.loss)


def arrays(found: Finding) -> dict[str, Array]:
    """The fields as arrays by name: dictionaries and tuples taken apart, FIELD.KEY."""
    out: dict[str, Array] = {}
    for f in fields(found):  # type: ignore[arg-type]
        value = getattr(found, f.name)
        if isinstance(value, Axis):
            continue  # words, for the chart
        parts = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, tuple)
            else None
        )
        out |= (
            {f.name: np.asarray(value)}
            if parts is None
            else {f"{f.name}.{k}": np.asarray(v) for k, v in parts}
        )
    return out


def plot(found: Finding | Chart) -> Any:
    """A matplotlib figure of what a diagnostic has found, or of a chart."""
    if not isinstance(found, Chart) and not hasattr(found, "chart"):
        raise KindError(f"plot draws what a diagnostic has found, or a chart; got {brief(found)}.")
    return draw(found if isinstance(found, Chart) else found.chart())
