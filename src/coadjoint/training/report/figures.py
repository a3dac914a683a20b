"""Figures: rows of a table with kind ("lines", "heat", "dots"), title, axes and series. The page's script draws by kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .curves import MAX_FIGURE_POINTS, MAX_SERIES_POINTS, Curve, json_numbers, thinned_indices
from .read import RunRecord
from .text import (
    HEAT_COLUMNS,
    HEAT_ROWS,
    OPTIONAL_CURVES,
    SHARE_METRICS,
    Row,
    clean,
    finite_or_nan,
    metric_stem,
    parse_goal,
    plural,
)

# kind of row, key, title, what it shows, label of the axis, options of lines
TRAINING_FIGURES: list[tuple[str, str, str, str, str, Row]] = [
    ("train", "gradient", "Gradient norm", "of all parameters together, before clipping", "norm of the gradient", {"log": True, "smooth": True}),
    ("train", "penalty", "Penalty", "G, a function of the costates", "penalty G", {"log": None, "smooth": True, "none": "No penalty: plain backpropagation has none."}),
    ("train", "rho", "Penalty weight", "ρ in L + ρ G", "weight ρ", {"log": None, "none": "No penalty, and so no weight."}),
    ("train", "rate", "Step size", "of the optimiser", "step size", {"log": None}),
    ("train", "distance", "Distance of the direction from the gradient", "√(2 − 2 cos θ), θ the angle between them", "distance",
     {"rules": [{"y": 1, "label": "Galvan's condition for convergence needs less"}], "smooth": True}),
    ("train", "share", "Share of the move that was taken", "as the step rule or the line search judged it", "share", {"log": None}),
    ("train", "damping", "Damping", "of the model that conjugate gradients minimise", "damping", {"log": True}),
    ("train", "cg", "Conjugate gradient iterations", "of each step", "iterations", {}),
]  # fmt: skip
PROBE_FIGURES: list[tuple[str, str, str, str, str, Row]] = [
    ("probe", "decay", "Decay of the costates", "0: the signal arrives whole; below, it vanishes; above, it explodes",
     "log₁₀ ‖λ₀‖ / ‖λ_T‖", {"rules": [{"y": 0, "label": "neither vanishes nor explodes"}]}),
    ("probe", "radius", "Spectral radius", "the largest absolute eigenvalue of W", "spectral radius of W", {"rules": [{"y": 1, "label": "radius 1"}]}),
]  # fmt: skip


def _figure(
    kind: str,
    id: str,
    title: str,
    about: str,
    empty: str = "",
    notes: Iterable[str] = (),
    **rest: Any,
) -> Row:
    notes = [note for note in notes if note]
    return {
        "kind": kind,
        "id": id,
        "title": title,
        "about": about,
        "empty": empty,
        "notes": notes,
        **rest,
    }


def line_figure(
    id: str, title: str, about: str, label: str, curves: Sequence[Curve], log: bool | None = False, smooth: bool = False,
    colours: Sequence[int] = (), span: list[int] | None = None, none: str = "No values were recorded.", **rest: Any,
) -> Row:  # fmt: skip
    """Curves over steps. log=None: logarithmic if the values span three decades. smooth: long curves turn faint under their median."""
    every = np.concatenate([np.empty(0), *(y for _, _, y in curves)])
    finite = every[np.isfinite(every)]
    if not len(finite):
        return _figure("lines", id, title, about, none)
    low, high = finite.min(), finite.max()
    log = bool(high > 0 and (low > 0 and high / low > 1000 if log is None else log))
    drawn, series = 0, []
    for (name, step, value), colour in zip(curves, colours or itertools.count(), strict=False):
        value = np.where(value > 0, value, np.nan) if log else value
        at = thinned_indices(
            value, max(24, min(MAX_SERIES_POINTS, MAX_FIGURE_POINTS // len(curves)))
        )
        drawn += len(at)
        faint = smooth and len(value) > 400
        one = {
            "name": clean(name),
            "colour": colour,
            "x": json_numbers(step[at], 12),
            "y": json_numbers(value[at]),
        }
        series.append(one | {"faint": faint})
        if faint:
            parts = [
                p for p in np.array_split(np.arange(len(value)), 120) if np.isfinite(value[p]).any()
            ]
            x, y = (step[p[len(p) // 2]] for p in parts), (np.nanmedian(value[p]) for p in parts)
            middle = {"x": json_numbers(x, 12), "y": json_numbers(y)}
            series.append(one | middle | {"name": f"{clean(name)}, running median"})
    total, gaps, zeros = (
        len(every),
        len(every) - len(finite),
        int((finite <= 0).sum()) if log else 0,
    )
    notes = [
        f"{drawn:,} of {total:,} points drawn: the least and the greatest of each stretch."
        if drawn < total
        else "",
        f"{plural(gaps, 'value')} not finite, shown as gaps." if gaps else "",
        f"{plural(zeros, 'value')} not positive, left out of a logarithmic axis." if zeros else "",
    ]
    rest = {
        "x": "training step",
        "y": {"label": label, "log": log, "range": span},
        "series": series,
        **rest,
    }
    return _figure("lines", id, title, about, notes=notes, drawn=drawn, total=total, **rest)


def _heat_figure(
    probes: list[tuple[float, np.ndarray, np.ndarray]], id: str, title: str, about: str, label: str
) -> Row:
    """Values over time t (across) and training step (up); a cell of many values shows the greatest."""
    pairs = [(s, t[-n:], v[-n:]) for s, t, v in probes if (n := min(len(t), len(v)))]
    pairs = [(s, t[np.isfinite(t)], v[np.isfinite(t)]) for s, t, v in pairs]
    every = np.concatenate([np.empty(0), *(v for _, _, v in pairs)])
    if not np.isfinite(every).any():
        return _figure("heat", id, title, about, "No probes with these values were recorded.")
    times = np.unique(np.concatenate([t for _, t, _ in pairs]))
    starts = np.array([c[0] for c in np.array_split(times, min(HEAT_COLUMNS, len(times)))])
    bands = np.array_split(np.arange(len(pairs)), min(HEAT_ROWS, len(pairs)))
    cells = np.full((len(bands), len(starts)), -np.inf)
    for row, band in zip(cells, bands, strict=True):
        for _, t, v in (pairs[k] for k in band):
            good = np.isfinite(v)
            np.maximum.at(row, np.searchsorted(starts, t[good], side="right") - 1, v[good])
    gaps, few = int((~np.isfinite(every)).sum()), cells.size < len(every)
    notes = [
        f"{cells.size:,} cells drawn for {len(every):,} values: each shows its greatest."
        if few
        else "",
        f"{plural(gaps, 'value')} zero or not finite, left blank." if gaps else "",
    ]
    grid = {"t": json_numbers(starts), "steps": json_numbers((pairs[b[0]][0] for b in bands), 12)}
    span = json_numbers(np.quantile(cells[np.isfinite(cells)], (0.01, 0.99)), 3)
    rest: Row = {
        **grid,
        "cells": [json_numbers(row, 4) for row in cells],
        "span": span,
        "label": label,
    }
    return _figure(
        "heat", id, title, about, notes=notes, drawn=cells.size, total=len(every), **rest
    )


def run_figures(run: RunRecord) -> tuple[list[Row], list[Row]]:
    """Training curves, and what the probes saw."""
    metric, threshold, goal = parse_goal(run.result.get("goal"))
    done = finite_or_nan(run.result.get("success_step"))
    succeeded = run.result.get("success") is True and done == done
    common: Row = {"marks": [{"x": done, "label": "success"}] if succeeded else [], "clock": True}

    def draw(kind: str, key: str, title: str, about: str, label: str, options: Row) -> Row:
        return line_figure(
            key, title, about, label, [run.store.curve(kind, key)], **(common | options)
        )

    def idle(kind: str, key: str) -> bool:
        """A penalty that is none, or what this optimiser does not have."""
        if key in OPTIONAL_CURVES:
            return (kind, key) not in run.store
        return (
            key in ("penalty", "rho")
            and (kind, key) in run.store
            and not run.store.curve(kind, key)[2].any()
        )

    def held_out(k: int, stem: str) -> Row:
        options: Row = {"span": [0, 1]} if stem in SHARE_METRICS else {"log": None}
        if metric_stem(metric) == stem and threshold == threshold:
            options["rules"] = [{"y": threshold, "label": f"goal: {goal}"}]
        about, label = (
            "of sequences that are not trained on",
            clean(stem) + ", share of answers" * (stem in SHARE_METRICS),
        )
        title = f"Held-out {clean(stem)}"
        return line_figure(
            f"held-out-{k}", title, about, label, run.held_out(stem), **common, **options
        )

    def heat(k: int, id: str, title: str, about: str, label: str) -> Row:
        if run.axis:  # the states of this network follow one another by something else than time
            title, about = (
                f"{title.removesuffix(' through time')} by {run.axis}",
                about.replace("moment", "place"),
            )
        probes = [(s, run.probes[s][0], run.probes[s][k]) for s in sorted(run.probes)]
        return _heat_figure(probes, id, title, about, label) | (
            {"axis": run.axis} if run.axis else {}
        )

    stems = dict.fromkeys(metric_stem(key[2]) for key in run.store if key[0] == "held-out")
    metrics = sorted(stems.keys() - {"loss"}, key=lambda stem: (stem != metric_stem(metric), stem))[
        :12
    ]
    loss = [run.store.curve("train", "loss", name="training"), *run.held_out("loss")]
    norms = [run.store.curve(*key) for key in run.store if key[0] == "norm"]
    training = [
        line_figure("loss", "Loss", "of each training batch, and of held-out sequences", "loss per sequence", loss, log=None, smooth=True, **common),
        *(held_out(k, stem) for k, stem in enumerate(metrics)),
        *(draw(*figure) for figure in TRAINING_FIGURES if not idle(*figure[:2])),
    ]  # fmt: skip
    inside = [
        heat(1, "costates", "Costates through time", "how much of the error signal reaches each moment", "log₁₀ ‖λₜ‖"),
        heat(2, "temporal", "Temporal components", "what each moment adds to the gradient", "log₁₀ norm of the component at t"),
        *(draw(*figure) for figure in PROBE_FIGURES),
        line_figure("norms", "Gradient by parameter", "the norm for each of them", "norm of the gradient", norms, log=True, **common),
    ]  # fmt: skip
    return training, inside


def chart_figure(chart: Row, k: int) -> Row:
    """A figure of diagnostics.json: curves, or the cells of a grid."""
    id, title, about, x, y = (
        f"diagnostic-{k}",
        *(clean(chart.get(key) or "") for key in ("title", "about", "x", "y")),
    )
    rows = lambda key, n: [r for r in chart[key] if isinstance(r, list) and len(r) == n][:60] if isinstance(chart.get(key), list) else []  # fmt: skip
    vector = lambda v: np.array([finite_or_nan(one) for one in v] if isinstance(v, list) else [])
    curves: list[Curve] = []
    for name, *both in rows("curves", 3):
        across, up = map(vector, both)
        n = min(len(across), len(up))
        at = np.isfinite(across[:n])
        curves.append((clean(name), across[:n][at], up[:n][at]))
    if not isinstance(chart.get("cells"), list):
        label = f"log₁₀ of the {y}" if chart.get("decades") is True else y
        rest: Row = {"x": x, "span": [0, 1] if chart.get("share") is True else None}
        rules = [
            {"y": at, "label": clean(label)}
            for value, label in rows("rules", 2)
            if (at := finite_or_nan(value)) == at
        ]
        return line_figure(
            id, title, about, label, curves, **rest, **({"rules": rules} if rules else {})
        )  # type: ignore[arg-type]
    _, across, up = curves[0] if curves else ("", np.empty(0), np.empty(0))
    cells = [
        row[: len(up)] for row in map(vector, chart["cells"][:HEAT_ROWS]) if len(row) >= len(up)
    ][: len(across)]
    if not any(np.isfinite(row).any() for row in cells):
        return _figure("heat", id, title, about, "No values were recorded.")
    grid = np.array(cells).T
    ends = json_numbers(np.quantile(grid[np.isfinite(grid)], (0.01, 0.99)), 3)
    axes: Row = {
        "t": json_numbers(across[: len(cells)]),
        "steps": json_numbers(up),
        "x": x,
        "y": y,
        "label": clean(chart.get("label") or ""),
    }
    values = [json_numbers(row, 4) for row in grid]
    return _figure(
        "heat", id, title, about, cells=values, span=ends, drawn=grid.size, total=grid.size, **axes
    )


def dot_figure(id: str, title: str, label: str, rows: list[str], points: list[tuple[int, Row, float]], lane: str, **rest: Any) -> Row:  # fmt: skip
    """A mark for each seed; those without a value stand in a lane of their own."""
    marks = [
        {
            "row": row,
            "x": x,
            "label": f"seed {clean(run.get('seed'))}",
            "open": run.get("success") is not True,
        }
        for (row, run, _), x in zip(
            points, json_numbers(value for _, _, value in points), strict=True
        )
    ]
    rest = {
        "rows": rows,
        "points": marks[:4000],
        "lane": lane,
        "x": label,
        "drawn": len(marks[:4000]),
        "total": len(marks),
        **rest,
    }
    return _figure(
        "dots",
        id,
        title,
        "one mark for each seed; filled: it succeeded",
        "" if marks else "No runs.",
        **rest,
    )
