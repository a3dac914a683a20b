"""`coadjoint predict` and `coadjoint report`: what a run folder is good for."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from ..errors import escape_controls
from .program import app, warn


@app.command()
def predict(
    run: Path = typer.Argument(..., help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ...,
        help="a file of sequences, shaped like the training file; a target column is not needed",
    ),
    out: Path = typer.Option(Path("predictions.csv"), "--out", "-o", help="the file to write"),
) -> None:
    """Predict for new sequences with a run that was trained on your own data."""
    from ..training.predict import predict as predict_file

    count, notes = predict_file(run, data, out, warn)
    for note in notes:
        print(escape_controls(note))
    print(escape_controls(f"{count} sequences -> {out}"))


@app.command()
def report(
    folder: Path = typer.Argument(..., help="a run folder or a comparison"),
    markdown: Optional[Path] = typer.Option(
        None, "--markdown", help="also write a comparison's tables to this file"
    ),
) -> None:
    """Write report.html of a run or a comparison anew: one file, to look at offline."""
    from ..training import files
    from ..training.report import pages, summary

    print(escape_controls(pages.write(folder)))
    if markdown is not None:
        files.replace(markdown, summary.markdown(folder))
        print(escape_controls(markdown))
