"""`coadjoint explain`: which steps and columns a prediction comes from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Optional

import typer

from ..errors import escape_controls
from .flags import SectionValues, given_values, resolve, with_setting_flags
from .outputs import FORCE, PRINTED, check_inputs, check_outputs
from .predict import READING_TEXTS
from .program import app, command_line, print_escaped, warn, with_examples
from .schema import READING_KEYS


@app.command()
@functools.partial(
    with_setting_flags,
    only={"data": READING_KEYS},
    texts=READING_TEXTS,
)
@with_examples(
    "coadjoint explain runs/waves new.csv",
    "coadjoint explain runs/waves new.csv --output up --quantity probability --baseline zero",
)
def explain(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ...,
        metavar="DATA",
        help="a file with the columns of the training file, or a folder of images for a chain",
    ),
    out: Path = typer.Option(
        Path("explanation.csv"),
        "--out",
        "-o",
        help="the table to write: .csv, .tsv (also .gz), .parquet, .feather, .arrow, .json or "
        ".jsonl; - prints CSV",
    ),
    page: Optional[Path] = typer.Option(
        None, "--page", help="the page to write (default: --out with .html; none with --out -)"
    ),
    method: str = typer.Option(
        "integrated-gradients", "--method", help="integrated-gradients or gradient-x-input"
    ),
    baseline: str = typer.Option(
        "mean",
        "--baseline",
        help="inputs without content: mean (of training), zero, or first (each sequence's first "
        "row)",
    ),
    output: Optional[str] = typer.Option(
        None,
        "--output",
        metavar="NAME",
        help="the class to explain (default: the predicted one), or one of several targets or "
        "features (default: the first)",
    ),
    quantity: Optional[str] = typer.Option(
        None,
        "--quantity",
        help="of a class: log-odds, log p / (1 - p) (default), probability or logit",
    ),
    step: Optional[int] = typer.Option(
        None,
        "--step",
        help="trained with --at every or --kind next: the step to explain, from 0, or from -1 "
        "backwards (default: the last)",
    ),
    limit: int = typer.Option(
        1000, "--limit", min=1, help="explain at most this many sequences or samples"
    ),
    tolerance: float = typer.Option(
        1e-4,
        "--tolerance",
        help="add points to integrated gradients until the gap is below this share of the "
        "attributions",
    ),
    whole: bool = typer.Option(
        False,
        "--whole",
        help="trained with --at last and --window: explain each sequence as a whole, and not each "
        "window",
    ),
    force: bool = FORCE,
    *,
    flags: SectionValues,
) -> None:
    """Explain predictions: which steps and columns they come from.

    Each value of DATA gets its share in the change of the output from a baseline to the input.
    """
    from ..models.explained_page import write_page
    from ..models.model import load
    from ..training.prediction_files import check_output_name, refuse_source, write_table

    check_output_name(out)
    reading = given_values(resolve(None, flags).data)
    is_printed = str(out) == PRINTED
    if page is None and not is_printed:
        page = out.with_name(f"{out.name.partition('.')[0] or out.name}.html")
    for path in (out, page or out):
        refuse_source(path, data, "the data were", "the explanation")
    check_inputs(run, data)
    check_outputs({"--out": out, "--page": page}, force)
    found = load(run, warn=warn).explain(
        data,
        method=method,
        baseline=baseline,
        output=output,
        quantity=quantity,
        step=step,
        limit=limit,
        tolerance=tolerance,
        whole=whole,
        **reading,
    )
    write_table(found.table(), out)
    if page is not None:
        write_page(found, page, command=command_line(), run=str(run))
    if is_printed:  # standard output holds the table alone
        for note in found.notes:
            print(escape_controls(note), file=sys.stderr)
        return
    for note in found.notes:
        print_escaped(note)
    print_escaped(found.summary())
    print_escaped(f"\ntable: {out}\npage:  {page}")
