"""`coadjoint predict` and `coadjoint report`: what to do with a run folder."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any, Optional

import typer
from typer.core import TyperCommand

from ..errors import ConfigError, escape_controls
from .flags import SectionValues, given_values, resolve, with_setting_flags
from .outputs import FORCE, PRINTED, check_inputs, check_outputs, refuse_existing
from .program import app, print_escaped, warn, with_examples
from .schema import READING_KEYS

ALL_COLUMNS = "*"  # the value of --keep without names
# The help of flags that differs from that of `coadjoint train`.
READING_TEXTS = {
    ("data", "id"): "column that identifies the sequence, if it is called otherwise than in "
    "training; '' for none",
    ("data", "time"): "column that orders the time steps, if it is called otherwise than in "
    "training; '' for none",
}


class PredictCommand(TyperCommand):
    """The command predict, whose --keep may stand without names."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words of the command line; --keep at the end or before an option means all."""
        words = []
        for word, following in zip(args, [*args[1:], "-"], strict=True):
            words.append(word)
            if word == "--keep" and following.startswith("-"):
                words.append(ALL_COLUMNS)
        return super().parse_args(ctx, words)


@app.command(cls=PredictCommand)
@functools.partial(
    with_setting_flags,
    only={"data": READING_KEYS},
    texts=READING_TEXTS,
)
@with_examples(
    "coadjoint predict runs/waves new.csv --out predictions.parquet",
    "coadjoint predict runs/waves new.csv --keep --out -",
)
def predict(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ...,
        metavar="DATA",
        help="a file with the columns of the training file, a folder by coadjoint prepare, or a "
        "folder of images for a chain; the target may be missing",
    ),
    out: Path = typer.Option(
        Path("predictions.csv"),
        "--out",
        "-o",
        help="the file to write: .csv, .tsv (also .gz), .parquet, .feather, .arrow, .json or "
        ".jsonl; - prints CSV",
    ),
    keep: Optional[str] = typer.Option(
        None,
        "--keep",
        metavar="[A,B]",
        show_default=False,
        help="copy the columns of DATA beside the predictions: all, or those that are named",
    ),
    whole: bool = typer.Option(
        False,
        "--whole",
        help="trained with --at last and --window: predict once for each sequence, from all its "
        "rows, and not for each window",
    ),
    force: bool = FORCE,
    *,
    flags: SectionValues,
) -> None:
    """Predict new sequences or samples with a run that was trained on your own data.

    The column row says which row of DATA, counted from 0, a prediction belongs to.
    """
    from ..training.predict import predict_file
    from ..training.prediction_files import check_output_name, refuse_source

    check_output_name(out)
    refuse_source(out, data, "the data were", "the predictions")
    check_inputs(run, data)
    check_outputs({"--out": out}, force)
    reading = given_values(resolve(None, flags).data)
    names: list[str] | bool | None = None
    if keep is not None:
        names = keep == ALL_COLUMNS or [name.strip() for name in keep.split(",")]
    prediction = predict_file(run, data, out, warn, keep=names, whole=whole, **reading)
    if str(out) == PRINTED:  # standard output holds the table alone
        for note in prediction.notes:
            print(escape_controls(note), file=sys.stderr)
        return
    for note in prediction.notes:
        print_escaped(note)
    print_escaped(f"{prediction.summary} -> {out}")


@app.command()
def report(
    folder: Path = typer.Argument(..., metavar="FOLDER", help="a run folder or a comparison"),
    markdown: Optional[Path] = typer.Option(
        None, "--markdown", help="comparison: also write the tables to this file"
    ),
    force: bool = typer.Option(False, "--force", help="replace the file of --markdown"),
) -> None:
    """Write the report.html of a run or a comparison again, as one file that works offline."""
    from ..training import files
    from ..training.report import pages, summary

    if markdown is not None:
        if not os.path.lexists(folder / "compare.json"):
            raise ConfigError(f"--markdown is for comparisons, and {folder} is none: leave it out.")
        refuse_existing(markdown, force, "--markdown")
    print_escaped(pages.write(folder))
    if markdown is not None:
        files.replace(markdown, summary.markdown(folder))
        print_escaped(markdown)
