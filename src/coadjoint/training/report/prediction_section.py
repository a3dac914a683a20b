"""The section of a run's page on its held-out data: what was predicted, and how wrong it was."""

from __future__ import annotations

import numpy as np

from .answers import Answers, SplitAnswers
from .confusion import MOST_MATRIX_CLASSES, Confusion
from .figures import PageFigure
from .page_parts import Matrix, PageSection, Table, make_table
from .prediction_figures import (
    MOST_DRAWN_OUTPUTS,
    number_figures,
    step_accuracy_figure,
    what_is_predicted,
)
from .text import plural, short_number

MOST_MISTAKES = 10


def prediction_section(answers: Answers | None, unit: str) -> list[PageSection]:
    """The section, in a list; [] for a run that kept no predictions.

    unit: what the network reads one of, "sequence" or "sample".
    """
    if answers is None:
        return []
    lead = describe_sets(answers, unit)
    matrices: list[Matrix] = []
    figures: list[PageFigure] = []
    if answers.labels:
        matrices = confusion_matrices(answers)
        tables = class_tables(answers)
        if answers.is_every:
            figures = step_accuracy_figure(answers)
        if len(answers.labels) > MOST_MATRIX_CLASSES:
            lead += f" {len(answers.labels)} classes are too many for a confusion matrix."
    else:
        figures = number_figures(answers)
        tables = [error_table(answers)]
        if len(answers.outputs) > MOST_DRAWN_OUTPUTS:
            lead += f" The first {MOST_DRAWN_OUTPUTS} of {len(answers.outputs)} outputs are drawn."
    tables.append(mistake_table(answers))
    section = PageSection(
        "predictions",
        "Held-out predictions",
        lead,
        figures,
        tables,
        pairs=bool(answers.labels),
        matrices=matrices,
    )
    return [section]


def describe_sets(answers: Answers, unit: str) -> str:
    """Which weights and which sets the section is about."""
    sets = []
    for split in answers.splits:
        text = f"{split.name}, {plural(split.data['sequences'], unit)}"
        if answers.is_every:
            text += f" with {plural(split.data['targets'], 'target')}"
        sets.append(text)
    step = short_number(answers.data["step"])
    return f"What the weights of step {step} say about data they were not trained on: " + (
        f"{'; '.join(sets)}."
    )


def prediction_cards(answers: Answers | None) -> dict[str, str]:
    """The balanced accuracy of the set that counts; {} for other tasks."""
    if answers is None or not answers.labels:
        return {}
    split = answers.splits[0]
    value = Confusion.of(answers.labels, split).balanced_accuracy
    return {f"{split.name} balanced accuracy": short_number(value)}


def _counted(answers: Answers) -> str:
    """What the counts of a matrix are counts of, if it is not plain."""
    return ", counted step by step" if answers.is_every else ""


def confusion_matrices(answers: Answers) -> list[Matrix]:
    """A confusion matrix for each set; those after the first are folded."""
    matrices = []
    for k, split in enumerate(answers.splits):
        caption = split.title("Confusion matrix") + _counted(answers)
        matrix = Confusion.of(answers.labels, split).matrix(caption, folded=k > 0)
        if matrix is not None:
            matrices.append(matrix)
    return matrices


def class_tables(answers: Answers) -> list[Table]:
    """The most common confusions and the figures of each class, on the set that counts."""
    split = answers.splits[0]
    confusion = Confusion.of(answers.labels, split)
    tables = []
    worst = confusion.worst_table(split.title("Most common confusions"))
    if worst is not None:
        tables.append(worst)
    tables.append(confusion.class_table(split.title("Classes")))
    return tables


def error_table(answers: Answers) -> Table:
    """The errors of each output on each set, in the units of the data."""
    rows = []
    for k, name in enumerate(answers.outputs):
        for split in answers.splits:
            errors = split.data["errors"][k]
            values = [short_number(errors.get(key)) for key in ("rmse", "mae", "mean", "r2")]
            rows.append([name, split.name, short_number(errors["count"]), *values])
    what = "feature" if answers.kind in ("next", "reconstruct") else "target"
    heads = [what, "set", "count", "rmse", "mae", "mean residual", "R²"]
    return make_table("Errors in the units of the data", heads, rows, "No outputs.", (0, 1))


def mistake_table(answers: Answers) -> Table:
    """The wrong classes that the network was surest of, or the largest errors."""
    split = answers.splits[0]
    heads = ["id"]
    if split.times:
        heads.append("time")
    elif answers.is_every:
        heads.append("row")
    if answers.labels:
        return wrong_classes(answers, split, heads)
    return largest_errors(answers, split, heads)


def _place(split: SplitAnswers, i: int, heads: list[str]) -> list[str]:
    """The id of target i, and its time or its row, as `heads` say."""
    cells = [split.ids[i]]
    if "time" in heads:
        cells.append(split.times[i])
    elif "row" in heads:
        cells.append(f"{split.rows[i]:,}")
    return cells


def wrong_classes(answers: Answers, split: SplitAnswers, heads: list[str]) -> Table:
    """The wrong classes that the network was surest of."""
    labels = answers.labels
    true = split.true[0]
    predicted = split.predicted[0]
    sure = np.array(split.kept["probability"] or np.zeros(len(true)))
    wrong = np.flatnonzero(np.isfinite(true) & (true != predicted))
    rows = []
    for i in wrong[np.argsort(-sure[wrong], kind="stable")][:MOST_MISTAKES]:
        guess = [labels[int(true[i])], labels[int(predicted[i])], short_number(float(sure[i]), 3)]
        rows.append([*_place(split, i, heads), *guess])
    caption = split.title("Surest mistakes")
    none = "None: every answer is right."
    text = range(len(heads) + 2)
    heads = [*heads, "true class", "prediction", "probability"]
    return make_table(caption, heads, rows, none, text)


def largest_errors(answers: Answers, split: SplitAnswers, heads: list[str]) -> Table:
    """The targets furthest from their predictions, in standard deviations of their output."""
    word = what_is_predicted(answers)
    found = []
    for k, name in enumerate(answers.outputs):
        error = split.true[k] - split.predicted[k]
        known = np.isfinite(error)
        deviation = float(split.true[k][known].std()) if known.any() else 0.0
        size = np.where(known, np.abs(error), 0) / (deviation or 1.0)
        for i in np.argsort(-size, kind="stable")[:MOST_MISTAKES]:
            if size[i]:
                found.append((size[i], i, k, name))
    found.sort(key=lambda one: -one[0])
    is_single = len(answers.outputs) == 1
    rows = []
    for _, i, k, name in found[:MOST_MISTAKES]:
        true = split.true[k][i]
        predicted = split.predicted[k][i]
        numbers = [short_number(float(x)) for x in (true, predicted, true - predicted)]
        rows.append([*_place(split, i, heads), *([] if is_single else [name]), *numbers])
    text = range(len(heads) + (not is_single))
    what = "feature" if answers.kind in ("next", "reconstruct") else "target"
    heads = [*heads, *([] if is_single else [what]), "true value", word, "residual"]
    return make_table(split.title("Largest errors"), heads, rows, "None.", text)
