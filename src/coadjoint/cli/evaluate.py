"""`coadjoint evaluate`: all metrics of a run on labelled data, with confidence intervals."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import escape_controls
from .flags import (
    SectionValues,
    errors_name_flags,
    given_values,
    resolve,
    with_setting_flags,
)
from .outputs import FORCE, PRINTED, check_inputs, check_outputs
from .predict import READING_TEXTS
from .program import app, command_line, print_escaped, print_table, warn, with_examples
from .schema import READING_KEYS

if TYPE_CHECKING:
    from ..models.evaluating import Assessment, Estimate

PAGE = "evaluation.html"
MOST_ROWS = 30  # of a table by class or target; the page and the JSON file have all


@app.command()
@functools.partial(
    with_setting_flags,
    only={"data": ("target", *READING_KEYS)},
    texts={
        **READING_TEXTS,
        (
            "data",
            "target",
        ): "columns to compare with, if they are called otherwise than in training",
    },
)
@with_examples(
    "coadjoint evaluate runs/waves labelled.csv",
    "coadjoint evaluate runs/waves labelled.csv --level 0.9 --json figures.json",
)
def evaluate(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ...,
        metavar="DATA",
        help="a file like the training file, or a folder by coadjoint prepare, with targets",
    ),
    resamples: int = typer.Option(
        1000, "--resamples", min=0, help="resamples of the bootstrap; 0 leaves the intervals out"
    ),
    level: float = typer.Option(0.95, "--level", help="share of resamples that an interval holds"),
    seed: int = typer.Option(0, "--seed", help="seed of the resamples"),
    json_file: Optional[Path] = typer.Option(
        None, "--json", help="also write all figures to this file; - prints them"
    ),
    page: Optional[Path] = typer.Option(
        None, "--page", help=f"page to write (default: RUN/{PAGE}; none for a model.safetensors)"
    ),
    whole: bool = typer.Option(
        False,
        "--whole",
        help="trained with --at last and --window: judge one answer for each sequence, from all "
        "its rows, and not one for each window",
    ),
    force: bool = FORCE,
    *,
    flags: SectionValues,
) -> None:
    """Measure a run on labelled data: all metrics, by class too, with confidence intervals.

    Sequences are read as `coadjoint predict` reads them, with the state carried to their ends.
    """
    from ..models.evaluation_page import write_page
    from ..models.model import load
    from ..training import files
    from ..training.prediction_files import refuse_source

    for path in (json_file, page):
        if path is not None:
            refuse_source(path, data, "the data were", "the figures")
    check_inputs(run, data)
    check_outputs({"--json": json_file, "--page": page}, force)
    reading = given_values(resolve(None, flags).data)
    model = load(run, warn=warn)
    with errors_name_flags():
        found = model.evaluate(
            data, resamples=resamples, level=level, seed=seed, whole=whole, **reading
        )
    text = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n"
    prints_json = json_file is not None and str(json_file) == PRINTED
    if prints_json:
        for note in found.notes:
            print(escape_controls(note), file=sys.stderr)
        print(text, end="")
    else:
        print_assessment(found)
    if json_file is not None and not prints_json:
        files.replace(json_file, text.encode())
        print_escaped(f"figures {json_file}")
    if page is None and run.is_dir():
        page = run / PAGE
    if page is not None:
        write_page(found, page, run.resolve().name, data.name, command_line())
    if page is not None and not prints_json:
        print_escaped(f"page    {page}")


def print_assessment(found: Assessment) -> None:
    """Print the figures as tables."""
    from ..models.evaluating import share_text
    from ..models.evaluation_page import intervals_text, size_text

    for note in found.notes:
        print_escaped(note)
    print_escaped(size_text(found))
    print()
    others = list(found.baselines)
    heads = ["", "network", f"{share_text(found.level)} interval", *others]
    rows = []
    for name, estimate in found.metrics.items():
        beside = [figure(found.baselines[other].get(name)) for other in others]
        rows.append([name, figure(estimate.value), interval(estimate), *beside])
    print_table(heads, rows)
    by_name = found.by_class or found.by_target
    if by_name:
        print()
        print_figures(found)
    if found.resamples:
        print()
        print_escaped(intervals_text(found))


def print_figures(found: Assessment) -> None:
    """Print the figures of each class, or of each target."""
    by_name = found.by_class or found.by_target
    names = list(next(iter(by_name.values())))
    heads = ["class" if found.by_class else "target"]
    if found.support:
        heads.append("entries")
    rows = []
    for key, figures in list(by_name.items())[:MOST_ROWS]:
        counts = [str(found.support[key])] if found.support else []
        rows.append([key, *counts, *(with_interval(figures[name]) for name in names)])
    print_table([*heads, *names], rows)
    if len(by_name) > MOST_ROWS:
        print_escaped(f"The first {MOST_ROWS} of {len(by_name)}; --json has all.")


def figure(value: float | None) -> str:
    """A figure in four digits; "-" if there is none."""
    return "-" if value is None or value != value else f"{value:.4g}"


def interval(estimate: Estimate) -> str:
    """The interval of a figure; "" if it has none."""
    if estimate.low != estimate.low:
        return ""
    return f"{estimate.low:.4g} to {estimate.high:.4g}"


def with_interval(estimate: Estimate) -> str:
    """A figure in three digits with its interval in brackets."""
    if estimate.value != estimate.value:
        return "-"
    if estimate.low != estimate.low:
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} ({estimate.low:.3g} to {estimate.high:.3g})"
