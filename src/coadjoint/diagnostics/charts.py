"""Charts: what a diagnostic has to draw, for matplotlib here and for the page of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import MissingError

Array = np.ndarray
Curve = tuple[str, Array, Array]  # name, x, y
# those of the page
COLOURS = ("#005f9e", "#d55e00", "#1a8853", "#ab638c", "#6e4000", "#0a96e6", "#4c4849")
RAMP = ("#15143b", "#253a79", "#2a648f", "#35898f", "#62ae86", "#aecd7d", "#f5ecae")
INK, SOFT, LINE = "#1d2126", "#5b636d", "#ececea"


@dataclass(frozen=True)
class Chart:
    """What there is to draw: curves, or the cells of a grid over x and y (then curves hold the two axes)."""

    title: str
    about: str  # how to read it
    x: str
    y: str
    curves: tuple[Curve, ...]
    decades: bool = False  # y holds log10 of what its label says
    rules: tuple[tuple[float, str], ...] = ()  # horizontal lines
    share: bool = False  # y lies between 0 and 1
    cells: Array | None = None
    label: str = ""  # what the cells are
    alone: bool = False  # of one network: several are not drawn side by side


@dataclass(frozen=True)
class Figure:
    """A number, its unit, and what it says."""

    name: str
    value: float
    unit: str
    says: str = ""


def draw(chart: Chart) -> Any:
    """The chart as a matplotlib figure, which no window or global state knows of."""
    try:
        from matplotlib import figure
    except ImportError:
        raise MissingError("plots need matplotlib: pip install 'coadjoint[plot]'.") from None
    fig = figure.Figure(figsize=(7.2, 4.4), layout="constrained")
    ax = fig.subplots()
    (draw_grid if chart.cells is not None else draw_curves)(fig, ax, chart)
    ax.set_xlabel(chart.x, color=SOFT)
    ax.set_ylabel(chart.y, color=SOFT)
    fig.suptitle(chart.title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    ax.tick_params(colors=SOFT, length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return fig


def draw_curves(fig: Any, ax: Any, chart: Chart) -> None:
    from matplotlib import ticker

    few = max((len(x) for _, x, _ in chart.curves), default=0) <= 12
    for i, (name, x, y) in enumerate(chart.curves):
        y = np.where(np.isfinite(y), y, np.nan)
        style = "-" if i < len(COLOURS) else "--"
        ax.plot(
            x,
            y,
            style,
            color=COLOURS[i % len(COLOURS)],
            lw=1.6,
            label=name,
            marker="o" if few else None,
            ms=3.5,
        )
    ax.grid(color=LINE)
    ax.set_axisbelow(True)
    for at, label in chart.rules:
        ax.axhline(at, color=SOFT, lw=1, ls=(0, (5, 4)))
        place = {
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "ha": "right",
        }
        ax.annotate(label, (1, at), xytext=(-2, 3), color=SOFT, fontsize=8.5, **place)
    if chart.share:
        ax.set_ylim(-0.02, 1.02)
    if chart.decades:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, min_n_ticks=2))
        ax.yaxis.set_major_formatter(
            lambda v, _: f"$10^{{{v:g}}}$" if v == round(v) else f"{10**v:.2g}"
        )
    if len(chart.curves) > 1:
        fig.legend(loc="outside right center", frameon=False, labelcolor=INK, fontsize=9)


def draw_grid(fig: Any, ax: Any, chart: Chart) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    (_, x, y), cells = chart.curves[0], chart.cells
    assert cells is not None
    ramp = LinearSegmentedColormap.from_list("ramp", RAMP)
    mesh = ax.pcolormesh(
        x, y, np.ma.masked_invalid(cells.T), cmap=ramp, shading="nearest", rasterized=True
    )
    if np.isfinite(cells).all() and np.ptp(cells) > 0:
        ax.contour(x, y, cells.T, levels=12, colors="white", linewidths=0.6, alpha=0.6)
    ax.plot(0, 0, "o", mfc="none", mec="white", ms=7, mew=1.6)
    ax.set_aspect("equal")
    bar = fig.colorbar(mesh, ax=ax, label=chart.label)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=SOFT, length=0)
