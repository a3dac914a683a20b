"""The page of an explanation: bars by column, curves over steps, heatmaps of single sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..training import files
from ..training.report.curves import Curve, json_grid, json_numbers
from ..training.report.figures import LineChart, PageFigure, ValueAxis
from ..training.report.page_parts import Page, PageSection, Table, make_table
from ..training.report.pages import render
from ..training.report.text import HEAT_COLUMNS, clean, plural, short_number
from .explanation import Explained, Explanation

MOST_BARS = 20
MOST_BANDS = 40  # columns of a heatmap of one sequence
MOST_SHOWN = 6  # sequences or images with a heatmap of their own
MOST_SAMPLES = 100  # in the heatmap of all samples
MOST_ROWS = 200  # of the table


def write_page(found: Explanation, path: str | Path, command: str = "", run: str = "") -> Path:
    """Write the page of an explanation as one file that works offline, and return its path.

    Args:
        found: The explanation.
        path: The file, such as explanation.html.
        command: The command line that made it, shown at the end.
        run: The name of the run, shown on top.
    """
    path = Path(path)
    files.replace(path, render(make_page(found, command, run)).encode())
    return path


def make_page(found: Explanation, command: str = "", run: str = "") -> Page:
    """The page of an explanation."""
    is_open = found.method == "integrated-gradients" and not found.is_complete
    sections = [overview_section(found)]
    if not found.by_layer:
        sections.append(steps_section(found))
    sections.append(samples_section(found))
    if command:
        commands = {"The command that made this page": clean(command)}
        sections.append(PageSection("again", "Run it again", commands=commands))
    notices = [clean(note) for note in found.notes]
    if is_open:
        notices.append("The attributions are not complete: " + clean(found.describe_gap()) + ".")
    return Page(
        kind="explanation",
        name=clean(found.source.name),
        title="What the predictions come from",
        outcome=("calm", clean(capitalised(found.describe_output())), ""),
        facts={
            "run": clean(run),
            "data": clean(found.source.name),
            "method": clean(found.describe_method()),
            "gap": clean(found.describe_gap()),
        },
        notices=notices,
        cards=cards(found),
        sections=sections,
    )


def capitalised(text: str) -> str:
    """The text with a capital letter in front."""
    return text[:1].upper() + text[1:]


def cards(found: Explanation) -> dict[str, str]:
    """The column and the step with the largest attributions, and their shares."""
    shown = {}
    k = int(np.argmax(found.by_column))
    shown["largest column"] = f"{clean(found.columns[k])}: {share_of(found.by_column, k)}"
    if len(found.by_step) > 1:
        s = int(np.argmax(found.by_step))
        shown["largest step"] = f"{found.step_names[s]}: {share_of(found.by_step, s)}"
    return shown


def share_of(sizes: np.ndarray, k: int) -> str:
    """Entry k as a percentage of the sum."""
    total = sizes.sum()
    return f"{100 * sizes[k] / total:.0f}%" if total > 0 else "0%"


def units(found: Explanation) -> str:
    """The units of attributions."""
    if found.quantity != "value":
        return found.quantity
    return f"units of {clean(found.samples[0].output)}"


def overview_section(found: Explanation) -> PageSection:
    """Mean sizes by column; by layer the costates of networks without time."""
    order = np.argsort(-found.by_column, kind="stable")
    shown = order[:MOST_BARS]
    places = "places" if found.by_layer else "steps"
    bars = PageFigure(
        "ranks",
        "by-column",
        "By column",
        f"mean over {found.unit}s of the sum over {places} of |attribution|",
        data={
            "names": [clean(found.columns[k]) for k in shown],
            "values": json_numbers(found.by_column[shown]),
            "x": f"mean |attribution|, {units(found)}",
        },
    )
    figures = [bars] if len(found.columns) > 1 else []
    if found.is_image:
        figures.append(mean_image(found))
    if found.by_layer:
        figures.append(layer_figure(found))
    total = found.by_column.sum()
    rows = []
    for k in order:
        share = 100 * found.by_column[k] / total if total > 0 else 0.0
        rows.append([found.columns[k], short_number(found.by_column[k]), f"{share:.1f}%"])
    heads = ["column", f"mean |attribution|, {units(found)}", "share"]
    table = make_table("All columns", heads, rows, "", text=(0,), folded=True)
    lead = (
        f"An attribution is the share of a value in the change of the output from the baseline "
        f"to the input ({found.describe_method()}). Inputs made from one column, such as its "
        "words and the mark of a missing value, are added up."
    )
    return PageSection("columns", "Columns", clean(lead), figures, [table])


def layer_figure(found: Explanation) -> PageFigure:
    """The mean log-norms of the costates of the output, by layer."""
    layers = np.arange(len(found.mean_costates))
    chart = LineChart(
        "costates",
        "Costates through depth",
        "log₁₀ of ||d output / d x|| at each layer, from the input (0) on; mean over samples",
        ValueAxis("log₁₀ of the norm of the costate"),
        [Curve("costates", layers, found.mean_costates)],
        empty="All costates are zero.",
        extras={"x": "layer i"},
    )
    return chart.figure()


def steps_section(found: Explanation) -> PageSection:
    """Mean sizes and costates by step, counted back from the last."""
    sizes = found.by_step
    logs = found.mean_costates
    axis = "step, counted back from the last (0)"
    by_step = LineChart(
        "by-step",
        "By step",
        "mean over sequences of the sum over columns of |attribution|",
        ValueAxis(f"mean |attribution|, {units(found)}"),
        [Curve("mean |attribution|", -np.arange(len(sizes))[::-1], sizes[::-1])],
        extras={"x": axis},
    )
    costates = LineChart(
        "costates",
        "Costates through time",
        "log₁₀ of ||d output / d x|| of the states after each step: how much of a change there "
        "reaches the output; mean over sequences",
        ValueAxis("log₁₀ of the norm of the costate"),
        [Curve("costates", -np.arange(len(logs))[::-1], logs[::-1])],
        empty="All costates are zero.",
        extras={"x": axis},
    )
    return PageSection("steps", "Steps", "", [by_step.figure(), costates.figure()])


def samples_section(found: Explanation) -> PageSection:
    """Heatmaps of single sequences or samples, and a table of all."""
    title = f"Single {found.unit}s"
    first = found.samples[:MOST_SHOWN]
    if found.is_image:
        figures = [image_figure(found, k, sample) for k, sample in enumerate(first)]
    elif found.by_layer and found.samples[0].attributions.ndim == 1:
        figures = [samples_figure(found)]
    else:
        figures = [sequence_figure(found, k, sample) for k, sample in enumerate(first)]
    lead = "Blue raises the output above its value at the baseline, orange lowers it."
    if len(figures) > 1 and len(found) > len(figures):
        lead += f" The first {len(figures)} of {plural(len(found), found.unit)}."
    return PageSection("single", title, lead, figures, [samples_table(found)])


def sample_title(sample: Explained) -> str:
    """The name of a sample and what it is explained for."""
    return clean(f"{sample.name}: {sample.output}")


def sample_text(sample: Explained) -> str:
    """The output of a sample at the input and at the baseline."""
    value = short_number(sample.value)
    return f"output {value}, at the baseline {short_number(sample.baseline)}"


def signed_heat(
    id: str, title: str, about: str, grid: np.ndarray, across: np.ndarray, bands: list[str], x: str
) -> PageFigure:
    """A heatmap of signed values, grid [bands, across], the first band on top."""
    finite = np.abs(grid[np.isfinite(grid)])
    largest = float(np.quantile(finite, 0.99)) if len(finite) else 0.0
    if largest == 0:  # the 99% quantile of a few values among many zeros
        largest = float(finite.max(initial=0.0))
    end = float(f"{largest:.2g}") or 1.0
    data = {
        "cells": json_grid(grid[::-1]),
        "span": [-end, end],
        "drawn": grid.size,
        "total": grid.size,
        "t": json_numbers(across, 12),
        "steps": list(range(len(bands))),
        "bands": [clean(band) for band in bands[::-1]],
        "signed": True,
        "x": x,
        "y": "column",
        "label": "attribution",
    }
    return PageFigure("heat", id, title, about, data=data)


def sequence_figure(found: Explanation, k: int, sample: Explained) -> PageFigure:
    """Steps across, columns up and down; long sequences share cells, whose values are added."""
    values = sample.attributions
    if found.by_layer:  # [columns, places]
        values = values.T
    shown = np.argsort(-found.by_column, kind="stable")[:MOST_BANDS]
    groups = np.array_split(np.arange(len(values)), min(HEAT_COLUMNS, len(values)))
    grid = np.array([values[group].sum(0) for group in groups]).T[shown]
    across = np.array([group[0] + sample.first_step for group in groups])
    about = sample_text(sample)
    if len(groups) < len(values):
        about += "; the attributions of neighbouring steps are added up"
    if len(shown) < len(found.columns):
        about += f"; {MOST_BANDS} of {len(found.columns)} columns"
    names = [found.columns[j] for j in shown]
    x = "place" if found.by_layer else "step"
    return signed_heat(f"sample-{k}", sample_title(sample), about, grid, across, names, x)


def samples_figure(found: Explanation) -> PageFigure:
    """All samples across, features up and down."""
    shown = np.argsort(-found.by_column, kind="stable")[:MOST_BANDS]
    values = np.array(found.attributions[:MOST_SAMPLES])
    about = f"the first {plural(len(values), 'sample')}, in the order of the file"
    names = [found.columns[j] for j in shown]
    across = np.arange(len(values))
    return signed_heat(
        "samples", "By sample", about, values[:, shown].T, across, names, "sample number"
    )


def image_heat(id: str, title: str, about: str, pixels: np.ndarray) -> PageFigure:
    """A heatmap of an image's pixels [height, width]."""
    rows = [str(j) for j in range(len(pixels))]
    across = np.arange(pixels.shape[1])
    figure = signed_heat(id, title, about, pixels, across, rows, "column of pixels")
    figure.data.update(square=True, y="row of pixels")
    return figure


def image_figure(found: Explanation, k: int, sample: Explained) -> PageFigure:
    """The pixels of one image; the attributions of its channels are added up."""
    pixels = sample.attributions.sum(0)
    return image_heat(f"sample-{k}", sample_title(sample), sample_text(sample), pixels)


def mean_image(found: Explanation) -> PageFigure:
    """Means over images of the sum over channels of |attribution|."""
    sizes = np.mean([np.abs(values).sum(0) for values in found.attributions], 0)
    about = "mean over images of the sum over channels of |attribution|"
    figure = image_heat("by-pixel", "By pixel", about, sizes)
    figure.data.update(signed=False, span=[0, figure.data["span"][1]], label="mean |attribution|")
    return figure


def samples_table(found: Explanation) -> Table:
    """A row for each sequence or sample: its output, the baseline's, the gap, and what counts."""
    heads = [found.unit, "output", "value", "at the baseline", "gap", "points", "largest column"]
    if not found.by_layer:
        heads.append("largest step")
    rows = []
    axis = 0 if found.by_layer else 1
    for sample in found.samples[: MOST_ROWS + 1]:
        sizes = np.moveaxis(np.abs(sample.attributions), axis, 0).reshape(len(found.columns), -1)
        largest = found.columns[int(np.argmax(sizes.sum(1)))]
        row = [
            sample.name,
            sample.output,
            short_number(sample.value),
            short_number(sample.baseline),
            short_number(sample.gap, 2),
            str(sample.nodes),
            largest,
        ]
        if not found.by_layer:
            row.append(str(int(np.argmax(sizes.sum(0))) + sample.first_step))
        rows.append(row)
    caption = f"Each {found.unit}"
    return make_table(caption, heads, rows, "", text=(0, 1, 6), most=MOST_ROWS, folded=True)
