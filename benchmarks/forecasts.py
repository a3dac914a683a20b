"""Recursive forecasts of short series by the defaults, beside forecasts without a network.

    python benchmarks/forecasts.py prepare SETS           the series of forecast_sets.py
    python benchmarks/forecasts.py run SETS OUT.jsonl     train, forecast, a row for each series
    python benchmarks/forecasts.py table OUT.jsonl        what docs/forecasting.md shows

`run` does for each series what a user does, with the last fifth held out:

    coadjoint train --train NAME.csv --kind next --split 0.68,0.12,0.2
    coadjoint forecast RUN NAME.csv --steps H --rolling K

H is half the test rows, at most 24, and K so large that all forecasts lie in the test rows. Half of
the series served to choose the defaults (--role choose); those of the table did not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import forecast_sets
import numpy as np

import coadjoint as co
from coadjoint.cli import app

SPLIT = "0.68,0.12,0.2"
TEST_SHARE = 0.2
MOST_STEPS = 24
METHODS = ("network", "naive", "seasonal naive", "drift", "AR")
Row = dict[str, Any]


def evaluate(path: Path, settings: list[str], seed: int) -> Row:
    """Train on one series and forecast its test rows: the MAE of each method."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        fixed = ["--kind", "next", "--split", SPLIT, "--seed", str(seed), "--threads", "1"]
        command = ["train", "--train", str(path), *fixed, "--out", run, *settings]
        app(command, standalone_mode=False)
        model = co.load(run)
    T = len(path.read_text(encoding="utf-8").splitlines()) - 1
    test = round(TEST_SHARE * T)
    steps = min(MOST_STEPS, test // 2)
    rolled = model.roll(path, steps, test - steps + 1)
    errors = {name: float(rolled.overall(name)[0][0]) for name in METHODS}
    coverage = float(np.nanmean(rolled.coverage))
    return {"rows": T, "steps": steps, "season": rolled.season.rows, "coverage": coverage, **errors}


def run(folder: Path, out: Path, role: str, settings: list[str], seed: int) -> None:
    """Evaluate all series of a role; those that `out` holds already are left out."""
    roles = json.loads((folder / "series.json").read_text(encoding="utf-8"))
    done = {row["name"] for row in read_rows(out)} if out.exists() else set()
    for name, its_role in roles.items():
        if its_role != role or name in done:
            continue
        row = {"name": name, **evaluate(folder / f"{name}.csv", settings, seed)}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def print_table(paths: list[Path]) -> None:
    """Print a table in Markdown; of further files the MAE of the network alone, as columns.

    The last line is the geometric mean of the MAE, in shares of that of the seasonal naive.
    """
    rows = read_rows(paths[0])
    others = [{row["name"]: row["network"] for row in read_rows(path)} for path in paths[1:]]
    heads = ["series", "rows", "season", "steps", *METHODS, *(path.stem for path in paths[1:])]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    shares: list[list[float]] = []
    for row in rows:
        errors = [row[name] for name in METHODS]
        errors += [other.get(row["name"], np.nan) for other in others]
        shares.append([error / row["seasonal naive"] for error in errors])
        cells = [row["name"], str(row["rows"]), str(row["season"]), str(row["steps"])]
        print(f"| {' | '.join(cells + [f'{error:.3g}' for error in errors])} |")
    means = np.exp(np.nanmean(np.log(np.array(shares)), 0))
    print(f"| geometric mean of shares | | | | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    losses = [sum(row["network"] > row[name] for row in rows) for name in METHODS[1:]]
    for name, count in zip(METHODS[1:], losses, strict=True):
        print(f"the network is worse than {name} on {count} of {len(rows)}")
    print(f"90% intervals hold {np.mean([row['coverage'] for row in rows]):.0%}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prepare", "run", "table"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--role", choices=("choose", "report"), default="report")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", default="", help='of training, such as "--lags 0"')
    given = parser.parse_args()
    if given.what == "prepare":
        forecast_sets.prepare(given.paths[0])
    elif given.what == "run":
        run(*given.paths, given.role, given.settings.split(), given.seed)
    else:
        print_table(given.paths)


if __name__ == "__main__":
    main()
