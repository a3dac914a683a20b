"""Forecasts of named columns, with and without their start (docs/own-data.md): one step ahead.

    pip install statsmodels vega_datasets
    python benchmarks/target_start.py run OUT.jsonl     trains; a row for each run
    python benchmarks/target_start.py table OUT.jsonl   test mse in shares of the last value's

`run` does for each set, sort of forecast, length and seed what a user does:

    coadjoint train --train SET.csv --kind next --target COLUMN [--no-skip]

With --no-skip the network has no D, and so no start, as before version 0.13.0. On the sets of
CHOOSE it was decided to have the start for all three sorts; those of REPORT served for nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from own_sets import package_file

from coadjoint.cli import app

CHOOSE = {"employment": ("employment", "nonfarm"), "weather": ("weather", "temp_max")}
REPORT = {
    "unemployment": ("macrodata", "unemp"),
    "consumption": ("macrodata", "realcons"),
    "stocks": ("stocks", "MSFT"),
    "grunfeld": ("grunfeld", "invest"),
}
OPTIONS = {
    "weather": ["--categorical", "weather"],
    "grunfeld": ["--id", "firm", "--time", "year"],
}
SORTS = {
    "one step": [],
    "4 steps": ["--horizon", "4", "--strategy", "direct"],
    "quantiles": ["--quantiles", "0.1,0.5,0.9"],
}
LENGTHS = {"5 epochs": ["--epochs", "5"], "40 epochs": ["--epochs", "40"], "default": []}
SEEDS = 3


def write_tables() -> None:
    """Write the sets into this folder, as the packages have them."""
    of_statsmodels = {"macrodata": ["year", "quarter"], "grunfeld": []}
    for name, left_out in of_statsmodels.items():
        table = pd.read_csv(package_file("statsmodels", f"datasets/{name}/{name}.csv"))
        table.drop(columns=left_out).to_csv(f"{name}.csv", index=False)
    months = pd.read_csv(package_file("vega_datasets", "_data/us-employment.csv"))
    months.drop(columns=["month"]).to_csv("employment.csv", index=False)
    days = pd.read_csv(package_file("vega_datasets", "_data/seattle-weather.csv"))
    days.drop(columns=["date"]).to_csv("weather.csv", index=False)
    prices = pd.read_csv(package_file("vega_datasets", "_data/stocks.csv"))
    prices["date"] = pd.to_datetime(prices["date"])
    wide = prices.pivot(index="date", columns="symbol", values="price")
    wide.dropna(axis=1).to_csv("stocks.csv", index=False)


def train(name: str, sort: str, length: str, seed: int, has_start: bool) -> dict[str, Any]:
    """The row of one run."""
    table, target = (CHOOSE | REPORT)[name]
    folder = Path(tempfile.mkdtemp(), "run")
    words = ["train", "--train", f"{table}.csv", "--kind", "next", "--target", target, "--quiet"]
    words += [*OPTIONS.get(table, []), *SORTS[sort], *LENGTHS[length], "--seed", str(seed)]
    words += ["--out", str(folder), *([] if has_start else ["--no-skip"])]
    app(words, standalone_mode=False)
    result = json.loads((folder / "result.json").read_text())
    last = next(each for each in result["baselines"] if each["name"] == "last value")
    return {
        "set": name,
        "sort": sort,
        "length": length,
        "seed": seed,
        "start": has_start,
        "mse": result["metrics"]["test"]["mse"],
        "last": last["metrics"]["test"]["mse"],
    }


def run(out: Path, names: list[str]) -> None:
    """Train on these sets."""
    out = out.resolve()
    os.chdir(tempfile.mkdtemp())
    write_tables()
    every = itertools.product(names, SORTS, LENGTHS, range(SEEDS), (False, True))
    with out.open("a") as file:
        for case in every:
            file.write(json.dumps(train(*case)) + "\n")
            file.flush()


def table(path: Path) -> None:
    """Print the geometric mean over seeds of mse / mse of the last value, without / with start."""
    rows = pd.read_json(path, lines=True)
    rows["share"] = np.log(rows["mse"] / rows["last"])
    shares = np.exp(rows.groupby(["sort", "length", "set", "start"])["share"].mean())
    print(f"| forecast | length | {' | '.join(CHOOSE | REPORT)} |")
    print("|---|---|" + "---|" * len(CHOOSE | REPORT))
    for sort, length in itertools.product(SORTS, LENGTHS):
        cells = []
        for name in CHOOSE | REPORT:
            without, with_start = (shares[sort, length, name, start] for start in (False, True))
            cells.append(f"{without:.3g}, {with_start:.3g}")
        print(f"| {sort} | {length} | {' | '.join(cells)} |")


def main() -> None:
    """Run a command of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(CHOOSE | REPORT))
    given = parser.parse_args()
    if given.command == "run":
        run(given.path, given.sets)
    else:
        table(given.path)


if __name__ == "__main__":
    main()
