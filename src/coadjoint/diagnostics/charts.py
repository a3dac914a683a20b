"""Charts: what a diagnostic has to draw, for matplotlib and for the page of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import MissingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as PlotFigure

Array = np.ndarray
Curve = tuple[str, Array, Array]  # name, x, y
# The colours of the report's page: of curves, of a map from low to high, of text and grid lines.
COLOURS = ("#005f9e", "#d55e00", "#1a8853", "#ab638c", "#6e4000", "#0a96e6", "#4c4849")
RAMP = ("#15143b", "#253a79", "#2a648f", "#35898f", "#62ae86", "#aecd7d", "#f5ecae")
INK = "#1d2126"
SOFT = "#5b636d"
LINE = "#ececea"
FEW_POINTS = 12  # up to here the points of curves are marked


@dataclass(frozen=True)
class Chart:
    """Curves, or the cells of a grid over x and y (`curves` then holds the two axes).

    title    of the chart
    about    how to read it
    x, y     labels of the axes
    curves   (name, x, y) each
    decades  whether y holds log10 of what its label says
    rules    horizontal lines: (y, label)
    share    whether y lies between 0 and 1
    cells    [x, y]: the values of a grid
    label    what the cells are
    alone    whether it is of one network: several are not drawn side by side
    """

    title: str
    about: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    decades: bool = False
    rules: tuple[tuple[float, str], ...] = ()
    share: bool = False
    cells: Array | None = None
    label: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Figure:
    """A number, its unit, and its meaning."""

    name: str
    value: float
    unit: str
    says: str = ""


def draw(chart: Chart) -> PlotFigure:
    """The chart as a matplotlib figure without a window or global state."""
    try:
        from matplotlib import figure
    except ImportError:
        raise MissingError("plots need matplotlib: pip install 'coadjoint[plot]'.") from None
    fig = figure.Figure(figsize=(7.2, 4.4), layout="constrained")
    ax = fig.subplots()
    if chart.cells is not None:
        draw_grid(fig, ax, chart)
    else:
        draw_curves(fig, ax, chart)
    ax.set_xlabel(chart.x, color=SOFT)
    ax.set_ylabel(chart.y, color=SOFT)
    fig.suptitle(chart.title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    ax.tick_params(colors=SOFT, length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return fig


def draw_curves(fig: PlotFigure, ax: Axes, chart: Chart) -> None:
    """Draw the curves, the horizontal lines and a legend; curves beyond the colours are dashed."""
    from matplotlib import ticker

    most_points = max((len(x) for _, x, _ in chart.curves), default=0)
    marker = "o" if most_points <= FEW_POINTS else None
    for i, (name, x, y) in enumerate(chart.curves):
        finite = np.where(np.isfinite(y), y, np.nan)
        style = "-" if i < len(COLOURS) else "--"
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(x, finite, style, color=colour, lw=1.6, label=name, marker=marker, ms=3.5)
    ax.grid(color=LINE)
    ax.set_axisbelow(True)
    for height, label in chart.rules:
        ax.axhline(height, color=SOFT, lw=1, ls=(0, (5, 4)))
        ax.annotate(
            label,
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            color=SOFT,
            fontsize=8.5,
        )
    if chart.share:
        ax.set_ylim(-0.02, 1.02)
    if chart.decades:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, min_n_ticks=2))
        ax.yaxis.set_major_formatter(format_power)
    if len(chart.curves) > 1:
        fig.legend(loc="outside right center", frameon=False, labelcolor=INK, fontsize=9)


def format_power(exponent: float, _: float) -> str:
    """The tick label of 10^exponent; matplotlib also passes the tick's number."""
    if exponent == round(exponent):
        return f"$10^{{{exponent:g}}}$"
    return f"{10**exponent:.2g}"


def draw_grid(fig: PlotFigure, ax: Axes, chart: Chart) -> None:
    """Draw the cells as a map with contour lines, and a mark at (0, 0)."""
    from matplotlib.colors import LinearSegmentedColormap

    _, x, y = chart.curves[0]
    cells = chart.cells
    assert cells is not None
    ramp = LinearSegmentedColormap.from_list("ramp", RAMP)
    values = np.ma.masked_invalid(cells.T)
    mesh = ax.pcolormesh(x, y, values, cmap=ramp, shading="nearest", rasterized=True)
    if np.isfinite(cells).all() and np.ptp(cells) > 0:
        ax.contour(x, y, cells.T, levels=12, colors="white", linewidths=0.6, alpha=0.6)
    ax.plot(0, 0, "o", mfc="none", mec="white", ms=7, mew=1.6)
    ax.set_aspect("equal")
    bar = fig.colorbar(mesh, ax=ax, label=chart.label)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=SOFT, length=0)
