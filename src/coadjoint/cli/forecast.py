"""`coadjoint forecast`: the next steps of series, with intervals, and errors against the past."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError, escape_controls, real, whole_number
from .flags import SectionValues, given_values, resolve, with_setting_flags
from .outputs import FORCE, PRINTED, check_inputs, check_outputs
from .predict import READING_TEXTS
from .program import app, command_line, print_escaped, print_table, warn, with_examples
from .schema import READING_KEYS

if TYPE_CHECKING:
    from ..models.rolling import Rolling


@app.command()
@functools.partial(
    with_setting_flags,
    only={"data": READING_KEYS},
    texts=READING_TEXTS,
)
@with_examples(
    "coadjoint forecast runs/sales sales.csv --steps 12",
    "coadjoint forecast runs/sales sales.csv --steps 12 --rolling 24 --season 12 --page",
)
def forecast(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ..., metavar="DATA", help="a file with the columns of the training file"
    ),
    steps: Optional[int] = typer.Option(
        None,
        "--steps",
        help="how many steps to go on from each last row (default: --horizon of training, or 12)",
    ),
    level: float = typer.Option(
        0.9, "--level", help="the share of values that the intervals are to hold"
    ),
    out: Path = typer.Option(
        Path("forecast.csv"),
        "--out",
        "-o",
        help="the table to write: .csv, .tsv (also .gz), .parquet, .feather, .arrow, .json or "
        ".jsonl; - prints CSV",
    ),
    page: bool = typer.Option(False, "--page", help="write a page, too: --out with .html"),
    rolling: Optional[int] = typer.Option(
        None,
        "--rolling",
        metavar="K",
        help="also forecast from K rows of the past of each series, and compare with what came "
        "after, beside naive, seasonal naive, drift and AR forecasts",
    ),
    season: Optional[int] = typer.Option(
        None,
        "--season",
        help="the rows of a season, for --rolling (default: by dates or autocorrelation)",
    ),
    seed: int = typer.Option(0, "--seed", help="of the paths that make the intervals"),
    force: bool = FORCE,
    *,
    flags: SectionValues,
) -> None:
    """Forecast the next steps of each series with a run that was trained with --kind next.

    Each step is fed back to predict the one after it, from the state at the last row of DATA.
    """
    from ..models import load
    from ..models.continuing import check_network
    from ..models.forecast_page import write_forecast_page
    from ..training.prediction_files import check_output_name, refuse_source, write_table

    check_output_name(out)
    is_printed = str(out) == PRINTED
    if page and is_printed:
        raise ConfigError(
            "--page needs a name: pass --out forecast.csv, and the page is beside it."
        )
    if season is not None and rolling is None:
        raise ConfigError("--season belongs to --rolling, which compares with the season before.")
    refuse_source(out, data, "the data were", "the forecast")
    path = out.with_name(f"{out.name.partition('.')[0] or out.name}.html") if page else None
    check_inputs(run, data)
    check_numbers(steps, level, rolling, season)
    model = load(run, warn=warn)
    check_network(model.network, model.description)
    check_outputs({"--out": out, "--page": path}, force)
    reading = given_values(resolve(None, flags).data)
    found = model.forecast(data, steps, level, seed=seed, **reading)
    errors = None
    if rolling is not None:
        errors = model.roll(data, steps, rolling, level, season=season, seed=seed, **reading)
    write_table(found.table(), out)
    if is_printed:  # standard output holds the table alone
        for note in found.notes:
            print(escape_controls(note), file=sys.stderr)
        return
    for note in found.notes:
        print_escaped(note)
    if errors is not None:
        print_rolling(errors)
    print_escaped(f"{found.summary} -> {out}")
    if path is not None:
        print_escaped(write_forecast_page(found, errors, path, command_line(), str(run)))


def check_numbers(steps: int | None, level: float, rolling: int | None, season: int | None) -> None:
    """Refuse numbers that no forecast can have, before any output is refused."""
    from ..models.forecasting import MOST_STEPS
    from ..models.rolling import MOST_ORIGINS

    if steps is not None:
        whole_number("--steps", steps, most=MOST_STEPS)
    real("--level", level, 0, 1, above=True, below=True)
    if rolling is not None:
        whole_number("--rolling", rolling, most=MOST_ORIGINS)
    if season is not None:
        whole_number("--season", season)


def print_rolling(errors: Rolling) -> None:
    """Print the errors of all methods, and the coverage of the intervals."""
    from ..models.forecast_page import rolling_head, rolling_rows, show_share

    print_escaped(f"\nforecasts from {errors.origins} past rows of each series:")
    for note in errors.notes:
        print_escaped(note)
    print_table(rolling_head(errors), rolling_rows(errors))
    advice = errors.advice()
    if advice is not None:
        print_escaped(advice)
    share = show_share(float(errors.coverage.mean()))
    print_escaped(f"{share} of the true values lie in the {100 * errors.level:g}% intervals\n")
