"""`coadjoint predict` and `coadjoint report`: what to do with a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from .program import app, print_escaped, warn


@app.command()
def predict(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ...,
        metavar="DATA",
        help="a file with the columns of the training file; the target may be missing",
    ),
    out: Path = typer.Option(Path("predictions.csv"), "--out", "-o", help="the file to write"),
) -> None:
    """Predict new sequences with a run that was trained on your own data."""
    from ..training.predict import predict as predict_file

    count, notes = predict_file(run, data, out, warn)
    for note in notes:
        print_escaped(note)
    print_escaped(f"{count} sequences -> {out}")


@app.command()
def report(
    folder: Path = typer.Argument(..., metavar="FOLDER", help="a run folder or a comparison"),
    markdown: Optional[Path] = typer.Option(
        None, "--markdown", help="comparison: also write the tables to this file"
    ),
) -> None:
    """Write the report.html of a run or a comparison again, as one file that works offline."""
    from ..training import files
    from ..training.report import pages, summary

    print_escaped(pages.write(folder))
    if markdown is not None:
        files.replace(markdown, summary.markdown(folder))
        print_escaped(markdown)
