"""The table of docs/own-data.md: baselines on the prepared sets, and all methods side by side.

linear(folder, out)    out/baselines.jsonl: what `coadjoint train` prints beside a network (linear,
                       majority or mean, last value), and MiniRocket of aeon
table(folder, out)     the Markdown of ours.jsonl, lstm.jsonl and baselines.jsonl, and what they say

Everything is fitted to the training part, by the same split for each seed as the networks.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import own_runs
from own_data import SEEDS, Row, read_meta, read_rows

from coadjoint.tasks.baselines import find_baselines

ROCKET_STEPS = 9  # the fewest that MiniRocket takes
POINTS = 0.02  # of accuracy, by which a network may be worse than a linear model
SHARE = 0.02  # of mse
SHOWN = ("ours", "lstm", "linear", "rocket", "constant", "last value")
HEADS = ("defaults", "LSTM", "linear", "MiniRocket", "constant", "last value")
CONSTANTS = ("majority", "mean")


# ------------------------------------------------------------------ baselines


def linear(folder: Path, out: Path, only: list[str]) -> None:
    """Fit the baselines that are not in the file yet, one after another."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "baselines.jsonl"
    done = {(row["set"], row["seed"], row["method"]) for row in read_rows(path)}
    names = [name for name in read_meta(folder) if not only or name in only]
    fits: dict[str, Callable[[own_runs.Prepared], list[Row]]] = {
        "linear": fit_baselines,
        "rocket": fit_rocket,
    }
    with path.open("a", encoding="utf-8") as file:
        for name, seed, method in [(n, s, m) for n in names for s in SEEDS for m in fits]:
            if (name, seed, method) in done:
                continue
            begin = time.perf_counter()
            prepared = own_runs.load(folder, name, seed)
            for row in fits[method](prepared):
                row |= {"set": name, "seed": seed, "kind": prepared.kind}
                file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{name}, seed {seed}, {method}: {time.perf_counter() - begin:.1f} s", flush=True)


def fit_baselines(prepared: own_runs.Prepared) -> list[Row]:
    """The baselines that `coadjoint train` prints, on the parts of this seed."""
    with tempfile.TemporaryDirectory() as place:
        _, task, _ = own_runs.read_task(prepared, Path(place) / "train.npz", {})
    rows = []
    for each in find_baselines(task):
        row: Row = {"method": each.name, "about": each.about}
        for split, metrics in each.metrics.items():
            row[split] = metrics[task.metric]
        rows.append(row)
    return rows


def fit_rocket(prepared: own_runs.Prepared) -> list[Row]:
    """MiniRocket, for one answer to a sequence of some length: ridge with its own strength.

    Shorter sequences are padded with zeros, and those longer than all of training are cut.
    """
    train, test = prepared.parts["train"], prepared.parts["test"]
    if prepared.at != "last" or train["u"].shape[1] < ROCKET_STEPS:
        return [{"method": "rocket", "about": "left out: no sequences, or short ones"}]
    from aeon.classification.convolution_based import MiniRocketClassifier
    from aeon.regression.convolution_based import MiniRocketRegressor

    steps = train["u"].shape[1]
    u = np.zeros((len(test["u"]), steps, train["u"].shape[2]), np.float32)
    common = min(steps, test["u"].shape[1])
    u[:, :common] = test["u"][:, :common]
    is_class = prepared.kind == "classify"
    model = (MiniRocketClassifier if is_class else MiniRocketRegressor)(random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(train["u"].transpose(0, 2, 1), train["y"])
        predicted = model.predict(u.transpose(0, 2, 1))
    right = predicted == test["y"] if is_class else (predicted - test["y"]) ** 2
    return [{"method": "rocket", "about": "MiniRocket", "test": float(np.mean(right))}]


# ------------------------------------------------------------------ the table


class Results:
    """Test metrics by set, method and seed, and the validation metrics that chose them.

    test, valid   {(set, method): {seed: metric}}
    """

    def __init__(self, out: Path) -> None:
        self.test: dict[tuple[str, str], dict[int, float]] = {}
        self.valid: dict[tuple[str, str], dict[int, float]] = {}
        for method in ("ours", "lstm"):
            for row in read_rows(out / f"{method}.jsonl"):
                chosen = own_runs.chosen_entry(row["course"], row["kind"] == "classify", "valid")
                self._put(row, method, chosen)
        for row in read_rows(out / "baselines.jsonl"):
            method = "constant" if row["method"] in CONSTANTS else row["method"]
            self._put(row, method, row)

    def _put(self, row: Row, method: str, measured: Row) -> None:
        key = (row["set"], method)
        for place, split in ((self.test, "test"), (self.valid, "valid")):
            if split in measured:
                place.setdefault(key, {})[row["seed"]] = measured[split]

    def mean(self, name: str, method: str) -> tuple[float, float]:
        """The mean over seeds of the test metric, and its standard error; NaN if there is none."""
        values = list(self.test.get((name, method), {}).values())
        if not values:
            return math.nan, math.nan
        if len(values) == 1:
            return values[0], math.nan
        return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))

    def worse_seeds(self, name: str, higher: bool) -> tuple[list[int], list[int]]:
        """The seeds at which the linear model is better on the test part by more than is allowed.

        Returns all of them, and those at which a baseline is also as good as the network on the
        validation part, where `coadjoint train` advises. At the others it says that a baseline is
        better on the test part.
        """
        worse = []
        seen = []
        for seed, value in self.test[name, "ours"].items():
            to_beat = self.test.get((name, "linear"), {}).get(seed, math.nan)
            if not is_much_worse(value, to_beat, higher):
                continue
            worse.append(seed)
            mine = self.valid[name, "ours"][seed]
            others = [self.valid.get((name, m), {}).get(seed, math.nan) for m in SHOWN[2:]]
            known = [v for v in others if not math.isnan(v)]
            is_beaten = max(known) >= mine if higher else min(known) <= mine
            is_perfect = mine == (1.0 if higher else 0.0)
            if is_beaten and not is_perfect:
                seen.append(seed)
        return worse, seen


def is_much_worse(value: float, to_beat: float, higher: bool) -> bool:
    """Whether a metric is worse by more than 2 points of accuracy or 2% of mse."""
    if higher:
        return to_beat - value > POINTS
    return value > to_beat * (1 + SHARE)


def format_metric(mean: float, error: float, higher: bool) -> str:
    """A mean with its standard error: accuracies in per cent, errors with three digits."""
    if math.isnan(mean):
        return ""
    if higher:
        text = f"{100 * mean:.1f}"
        return text if math.isnan(error) or error == 0 else f"{text} ± {100 * error:.1f}"
    text = format_number(mean)
    return text if math.isnan(error) or error == 0 else f"{text} ± {format_number(error, 2)}"


def format_number(value: float, digits: int = 3) -> str:
    """Three digits, without an exponent where the number is not very large or small."""
    if 1e-4 <= value < 1e4:
        places = max(0, digits - 1 - math.floor(math.log10(value)))
        return f"{value:.{places}f}"
    return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")


def size_of(meta: Row) -> str:
    """The training part: sequences × steps × features, or samples × features."""
    size = meta["sizes"].get("train_u") or meta["sizes"]["train_x"]
    return " × ".join(str(n) for n in size)


KINDS = {"classify": "accuracy, %", "regress": "mse", "next": "mse, next step"}


def table(folder: Path, out: Path, only: list[str]) -> None:
    """Print the table and what it says."""
    meta = read_meta(folder)
    results = Results(out)
    for role, title in (("report", "Sets to report on"), ("choose", "Sets to choose on")):
        names = [n for n in meta if meta[n]["role"] == role and (not only or n in only)]
        print(f"\n{title}\n")
        print(f"| set | size | metric | {' | '.join(HEADS)} |")
        print("|---|---|---|" + "---|" * len(HEADS))
        for name in names:
            print(row_of(results, name, meta[name]))
        print()
        print(count_against_lstm(results, names, meta))
        print(count_against_simple(results, names, meta))
        for line in count_against_linear(results, names, meta):
            print(line)


def row_of(results: Results, name: str, meta: Row) -> str:
    """A row of the table: * where the loop is better by a standard error, † the linear model."""
    higher = meta["kind"] == "classify"
    cells = []
    for method in SHOWN:
        cells.append(format_metric(*results.mean(name, method), higher))
    if not math.isnan(results.mean(name, "lstm")[0]) and not holds(results, name, higher):
        cells[0] += " *"
    if is_much_worse(results.mean(name, "ours")[0], results.mean(name, "linear")[0], higher):
        cells[0] += " †"
    metric = KINDS[meta["kind"]] + (", every step" if meta["at"] == "every" and higher else "")
    return f"| {name} | {size_of(meta)} | {metric} | {' | '.join(cells)} |"


def holds(results: Results, name: str, higher: bool) -> bool:
    """Whether the defaults are at least as good as the loop of torch, within a standard error.

    The standard error is that of the difference of the two means.
    """
    ours, error = results.mean(name, "ours")
    theirs, their_error = results.mean(name, "lstm")
    lead = ours - theirs if higher else theirs - ours
    return lead >= -math.hypot(error, their_error)


def count_against_lstm(results: Results, names: list[str], meta: dict[str, Row]) -> str:
    """On how many sets the defaults are at least as good as the loop, and where not."""
    compared = [n for n in names if not math.isnan(results.mean(n, "lstm")[0])]
    lost = [n for n in compared if not holds(results, n, meta[n]["kind"] == "classify")]
    count = len(compared) - len(lost)
    return f"At least as good as the LSTM on {count} of {len(compared)}; not on: {', '.join(lost)}."


def count_against_linear(results: Results, names: list[str], meta: dict[str, Row]) -> list[str]:
    """Where the linear model is better by more than is allowed, and where validation shows it."""
    lines = []
    for name in names:
        higher = meta[name]["kind"] == "classify"
        worse, seen = results.worse_seeds(name, higher)
        if not worse:
            continue
        ours, to_beat = results.mean(name, "ours")[0], results.mean(name, "linear")[0]
        verdict = "worse" if is_much_worse(ours, to_beat, higher) else "not worse"
        lines.append(
            f"{name}: {verdict} than the linear model in the mean; worse at {len(worse)} of "
            f"{len(results.test[name, 'ours'])} seeds, on the validation part too at {len(seen)}"
        )
    return lines


def count_against_simple(results: Results, names: list[str], meta: dict[str, Row]) -> str:
    """Where a constant or the last value is better than the defaults by more than is allowed."""
    found = []
    for name in names:
        higher = meta[name]["kind"] == "classify"
        ours = results.mean(name, "ours")[0]
        others = [results.mean(name, method)[0] for method in ("constant", "last value")]
        if any(is_much_worse(ours, other, higher) for other in others):
            found.append(name)
    return f"Worse than a constant or the last value: {', '.join(found) or 'nowhere'}."
