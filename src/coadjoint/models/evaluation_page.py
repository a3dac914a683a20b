"""The page of an evaluation: its figures with intervals, confusions or errors, and mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import one_line
from ..tasks.ahead import ahead_of
from ..tasks.metrics import metrics_of
from ..tasks.new_data import targets_of
from ..tasks.prediction import softmax
from ..tasks.task import Origin
from ..training import files
from ..training.held_out import Answer, TargetNames, describe_split
from ..training.held_out_schema import MOST_CLASSES, MOST_OUTPUTS, MOST_TEXT
from ..training.metric_names import metric_label
from ..training.report.answers import EVALUATION, Answers, SplitAnswers
from ..training.report.page_parts import Page, PageSection, Table, make_table
from ..training.report.pages import render
from ..training.report.prediction_section import prediction_section
from ..training.report.text import clean, plural, short_number
from .evaluating import Assessment, Estimate, share_text, target_names

CLASS_FIGURES = ("precision", "recall", "f1", "auc")


def write_page(found: Assessment, path: str | Path, run: str, data: str, command: str = "") -> Path:
    """Write the page of an evaluation, one file that works offline.

    Args:
        found: The evaluation.
        path: The file, such as evaluation.html.
        run: The name of the run.
        data: The name of the data.
        command: The command line that made it, shown at the end.
    """
    path = Path(path)
    files.replace(path, render(evaluation_page(found, run, data, command)).encode())
    return path


def interval_text(estimate: Estimate) -> str:
    """Return an interval in words: "0.81 to 0.94"; "" if there is none."""
    if np.isnan(estimate.low):
        return ""
    return f"{short_number(estimate.low)} to {short_number(estimate.high)}"


def intervals_text(found: Assessment) -> str:
    """Return how the intervals were made, in a sentence; "" if there are none."""
    if not found.resamples:
        return ""
    return (
        f"Intervals hold {share_text(found.level)} of {plural(found.resamples, 'resample')} of "
        f"{found.drawn} (bootstrap, seed {found.seed})."
    )


def size_text(found: Assessment) -> str:
    """Return how much was judged, in words: "40 sequences, 460 targets"."""
    text = plural(found.sequences, found.unit)
    if found.entries != found.sequences:
        text += f", {plural(found.entries, 'target')}"
    return text


def evaluation_page(found: Assessment, run: str, data: str, command: str = "") -> Page:
    """Return the page; arguments as in `write_page`."""
    main = next(iter(found.metrics))
    estimate = found.metrics[main]
    interval = interval_text(estimate)
    headline = f"{metric_label(main)} {short_number(estimate.value)}"
    details = f"{share_text(found.level)} interval {interval}" if interval else ""
    cards = {}
    for name, figure in found.metrics.items():
        cards[metric_label(name)] = short_number(figure.value)
    section = PageSection(
        "figures", "Figures", intervals_text(found), (), [*metric_tables(found)], pairs=False
    )
    sections = [section, *answer_sections(found)]
    if command:
        commands = {"The command that made this page": clean(command)}
        sections.append(PageSection("again", "Run it again", commands=commands))
    return Page(
        kind="evaluation",
        name=clean(run),
        title=f"{clean(run)} on {clean(data)}",
        outcome=("calm", headline, details),
        facts={"data": f"{clean(data)}: {size_text(found)}", "kind": found.kind},
        notices=list(map(clean, found.notes)),
        cards=cards,
        sections=sections,
    )


def metric_tables(found: Assessment) -> list[Table]:
    """Return the tables of metrics: all, by class, and by target."""
    symbols = "" if found.prediction is None else found.prediction.description.symbols
    known = metrics_of(bool(found.labels), symbols)
    interval = f"{share_text(found.level)} interval"
    others = list(found.baselines)
    rows = []
    for name, estimate in found.metrics.items():
        beside = [short_number(found.baselines[other].get(name)) for other in others]
        better = "less" if known[name].lower else "more"
        cells = [metric_label(name), short_number(estimate.value), interval_text(estimate)]
        rows.append([*cells, *beside, better])
    heads = ["metric", "network", interval, *others, "better is"]
    tables = [make_table("Metrics", heads, rows, "", text=(0, 2, len(heads) - 1))]
    if found.by_class:
        tables.append(figure_table(found, "Classes", "class", CLASS_FIGURES))
    if found.by_target:
        tables.append(figure_table(found, "Targets", "target", tuple(known)))
    return tables


def figure_table(found: Assessment, caption: str, what: str, names: tuple[str, ...]) -> Table:
    """Return a table of the figures of each class or target, each with its interval."""
    heads = [what]
    if found.support:
        heads.append("support")
    heads += map(metric_label, names)
    rows = []
    for key, figures in (found.by_class or found.by_target).items():
        cells = [key]
        if found.support:
            cells.append(short_number(found.support[key]))
        cells += [with_interval(figures[name]) for name in names]
        rows.append(cells)
    return make_table(caption, heads, rows, "", text=(0,))


def with_interval(estimate: Estimate) -> str:
    """Return a figure with its interval in brackets: "0.87 (0.81 to 0.94)"."""
    text = short_number(estimate.value, 3)
    if np.isnan(estimate.low) or np.isnan(estimate.value):
        return text
    return f"{text} ({short_number(estimate.low, 3)} to {short_number(estimate.high, 3)})"


def answer_sections(found: Assessment) -> list[PageSection]:
    """Return the section of confusions, errors and mistakes, as on the page of a run."""
    answers = collect_answers(found)
    if answers is None:
        return []
    lead = f"What the network says about {size_text(found)}."
    sections = []
    for section in prediction_section(answers, found.unit):
        # The figures of classes stand above, with their intervals.
        tables = [table for table in section.tables if not table.caption.startswith("Classes")]
        sections.append(replace(section, title="Predictions", lead=lead, tables=tables))
    return sections


def collect_answers(found: Assessment) -> Answers | None:
    """Return targets and predictions as the report's figures take them; None for samples' entries.

    The last rows of a sequence with kind "next", whose next ones are not known, are left out.
    """
    prediction = found.prediction
    assert prediction is not None
    assert found.outputs is not None
    d = prediction.description
    outputs = [one_line(name, MOST_TEXT) for name in target_names(d)]
    labels = [one_line(name, MOST_TEXT) for name in d.labels]
    if max(len(labels), 0) > MOST_CLASSES or len(outputs) > MOST_OUTPUTS:
        return None
    if not labels and len(outputs) != d.outputs:
        return None
    names = TargetNames(d.kind, labels, [] if labels else outputs)
    true = targets_of(prediction)
    shares = np.zeros((len(true), 0))
    if labels:
        predicted = found.outputs.argmax(-1)[:, None].astype(np.float64)
        shares = softmax(found.outputs).max(-1, keepdims=True)
    else:
        mean, std = d.target_scale()
        predicted = found.outputs * std + mean
    sheet = prediction.cut.sheet
    is_every = d.at == "every"
    horizon = ahead_of(d).horizon if d.kind == "next" else 0
    answers = []
    origins = []
    done = 0
    for number, (sequence, start, stop) in enumerate(prediction.cut.pieces):
        count = stop - start if is_every else 1
        shown = max(0, count - horizon)
        rows = slice(done, done + shown)
        done += count
        first = stop - count + (d.kind == "next")
        answers.append(Answer(number, true[rows], predicted[rows], shares[rows].reshape(-1)))
        times = () if sheet.stamps is None else sheet.stamps[first : first + shown]
        place = first - int(sheet.starts[sequence])
        origins.append(Origin(sheet.ids[sequence], place, times))
    split = describe_split(names, answers, is_every, prediction.ids, origins)
    data = {
        "format": 1,
        "step": 0,
        "kind": d.kind,
        "at": d.at,
        "labels": names.labels,
        "outputs": names.outputs,
        "splits": {EVALUATION: split},
    }
    return Answers(data, [SplitAnswers(EVALUATION, split)])
