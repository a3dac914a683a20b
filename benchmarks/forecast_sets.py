"""Short series to forecast: real ones that ship inside packages, and simulated ones.

    prepare(folder)   NAME.csv for each, with the columns time and value, and series.json

The packages are pmdarima, sktime, statsmodels and vega_datasets. Their files are read, they are not
imported, so `pip install --no-deps` is enough; nothing is downloaded. Half of the series are for
choosing and half for reporting: of the real ones by a draw, of each simulated process a seed each.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np

MONTHS = 12
Times = list[str]


def package_file(package: str, path: str) -> Path:
    """A file inside an installed package, which is not imported for it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"pip install --no-deps {package}"
    assert spec.origin is not None
    return Path(spec.origin).parent / path


def rows_of(package: str, path: str) -> list[list[str]]:
    """The rows of a csv file inside a package, without its head."""
    with package_file(package, path).open(encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def column(package: str, path: str, number: int) -> np.ndarray:
    """A column of a csv file inside a package, by its number."""
    return np.array([float(row[number]) for row in rows_of(package, path)])


def pmdarima_series(name: str) -> np.ndarray:
    """A series of pmdarima, from the list of numbers in its source; a missing end is cut off."""
    source = package_file("pmdarima", f"datasets/{name}.py").read_text(encoding="utf-8")
    lists = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.List)]
    longest = max(lists, key=lambda node: len(node.elts))
    numbers = [node.value for node in longest.elts if isinstance(node, ast.Constant)]
    return np.array([float(value) for value in numbers if isinstance(value, int | float)])


def months(start: str, count: int, step: int = 1) -> Times:
    """So many months from "1949-01" on, one in `step`."""
    first = np.datetime64(start, "M")
    return [str(first + step * i) for i in range(count)]


def years(start: int, count: int) -> Times:
    """So many years."""
    return [str(start + i) for i in range(count)]


def days(count: int) -> Times:
    """So many days from 2020-01-01 on."""
    return [(date(2020, 1, 1) + timedelta(days=i)).isoformat() for i in range(count)]


def hours(count: int, minutes: int = 60) -> Times:
    """So many hours, or steps of some minutes, from 2020-01-01 on."""
    first = datetime(2020, 1, 1)
    steps = [timedelta(minutes=minutes * i) for i in range(count)]
    return [(first + step).strftime("%Y-%m-%d %H:%M") for step in steps]


def co2() -> np.ndarray:
    """The mean CO2 of each month; months without a value are interpolated."""
    by_month: dict[str, list[float]] = {}
    for day, value in rows_of("statsmodels", "datasets/co2/co2.csv"):
        by_month.setdefault(day[:6], [])
        if value:
            by_month[day[:6]].append(float(value))
    means = np.array([np.mean(values) if values else np.nan for values in by_month.values()])
    places = np.arange(len(means))
    known = np.isfinite(means)
    return np.interp(places, places[known], means[known])


def elnino() -> np.ndarray:
    """Monthly sea temperatures, from a row for each year."""
    rows = rows_of("statsmodels", "datasets/elnino/elnino.csv")
    return np.array([[float(value) for value in row[1:]] for row in rows]).reshape(-1)


def microsoft() -> np.ndarray:
    """Monthly prices of a share."""
    rows = rows_of("vega_datasets", "_data/stocks.csv")
    return np.array([float(row[2]) for row in rows if row[0] == "MSFT"])


def seattle_weeks() -> np.ndarray:
    """The mean of the highest temperatures of a day, by week: 208 weeks."""
    of_days = column("vega_datasets", "_data/seattle-weather.csv", 2)
    return of_days[: len(of_days) // 7 * 7].reshape(-1, 7).mean(1)


def solar() -> np.ndarray:
    """Solar power by half hours, six days."""
    return column("sktime", "datasets/data/solar/solar.csv", 1)[:288]


def macro(number: int) -> np.ndarray:
    """A column of statsmodels' quarterly figures of the United States."""
    return column("statsmodels", "datasets/macrodata/macrodata.csv", number)


def quarters(start: str) -> Callable[[int], Times]:
    """So many quarters."""
    return lambda count: months(start, count, 3)


def monthly(start: str) -> Callable[[int], Times]:
    """So many months."""
    return lambda count: months(start, count)


def yearly(start: int) -> Callable[[int], Times]:
    """So many years."""
    return lambda count: years(start, count)


def weeks(count: int) -> Times:
    """So many weeks from 2012-01-01 on."""
    return [(date(2012, 1, 1) + timedelta(weeks=i)).isoformat() for i in range(count)]


REAL: dict[str, tuple[Callable[[], np.ndarray], Callable[[int], Times]]] = {
    "airline": (
        lambda: column("sktime", "datasets/data/Airline/Airline.csv", 1),
        monthly("1949-01"),
    ),
    "wine": (lambda: pmdarima_series("wineind"), monthly("1980-01")),
    "beer": (lambda: pmdarima_series("ausbeer"), quarters("1956-01")),
    "yarn": (lambda: pmdarima_series("woolyrnq"), quarters("1965-01")),
    "residents": (lambda: pmdarima_series("austres"), quarters("1971-04")),
    "lynx": (lambda: pmdarima_series("lynx"), yearly(1821)),
    "nile": (lambda: column("statsmodels", "datasets/nile/nile.csv", 1), yearly(1871)),
    "sunspots": (lambda: column("statsmodels", "datasets/sunspots/sunspots.csv", 1), yearly(1700)),
    "elnino": (elnino, monthly("1950-01")),
    "co2": (co2, monthly("1958-03")),
    "equipment": (
        lambda: column("statsmodels", "datasets/elec_equip/elec_equip.csv", 1),
        monthly("1995-01"),
    ),
    "seatbelts": (
        lambda: column("sktime", "datasets/data/seatbelts/seatbelts.csv", 1),
        monthly("1969-01"),
    ),
    "gdp": (lambda: macro(2), quarters("1959-01")),
    "unemployment": (lambda: macro(10), quarters("1959-01")),
    "microsoft": (microsoft, monthly("2000-01")),
    "seattle": (seattle_weeks, weeks),
    "san francisco": (lambda: column("vega_datasets", "_data/sf-temps.csv", 0)[:504], hours),
    "solar": (solar, lambda count: hours(count, 30)),
}


def autoregression(
    rng: np.random.Generator, T: int, coefficients: tuple[float, ...], scale: float = 1.0
) -> np.ndarray:
    """T steps of a stationary autoregression, after 100 to forget its start."""
    path = [0.0] * len(coefficients)
    for _ in range(T + 100):
        before = path[: -len(coefficients) - 1 : -1]
        path.append(float(np.dot(coefficients, before) + scale * rng.normal()))
    return np.array(path[-T:])


def profile(rng: np.random.Generator, season: int) -> np.ndarray:
    """A season of two harmonics with amplitudes drawn at random."""
    phase = 2 * np.pi * np.arange(season) / season
    first = rng.uniform(0.7, 1.3) * np.sin(phase + rng.uniform(0, 6))
    return first + rng.uniform(0.2, 0.6) * np.sin(2 * phase + rng.uniform(0, 6))


def trend_season(rng: np.random.Generator) -> np.ndarray:
    """20 years of months: a line, a season and noise."""
    t = np.arange(240)
    season = 10 * np.resize(profile(rng, MONTHS), 240)
    return 50 + rng.uniform(0.1, 0.4) * t + season + 3 * rng.normal(size=240)


def growth_season(rng: np.random.Generator) -> np.ndarray:
    """15 years of months: growth by a share, a season that grows with it, noise that does too."""
    t = np.arange(180)
    season = 0.2 * np.resize(profile(rng, MONTHS), 180)
    return 100 * np.exp(rng.uniform(0.003, 0.008) * t + season + 0.04 * rng.normal(size=180))


def week_season(rng: np.random.Generator) -> np.ndarray:
    """300 days: a week, and an autoregression around it."""
    return 20 + 4 * np.resize(profile(rng, 7), 300) + 1.5 * autoregression(rng, 300, (0.7,))


def cycle(rng: np.random.Generator) -> np.ndarray:
    """200 years: an autoregression with a cycle of about 10 years that is not a season."""
    return 5 + autoregression(rng, 200, (2 * 0.95 * np.cos(2 * np.pi / 10), -0.9))


def random_walk(rng: np.random.Generator) -> np.ndarray:
    """150 months: steps drawn at random, with a drift."""
    return 100 + np.cumsum(rng.uniform(0.1, 0.4) + rng.normal(size=150))


SIMULATED: dict[str, tuple[Callable[[np.random.Generator], np.ndarray], Callable[[int], Times]]] = {
    "trend and season": (trend_season, monthly("2000-01")),
    "growth and season": (growth_season, monthly("2000-01")),
    "week": (week_season, days),
    "cycle": (cycle, yearly(1800)),
    "random walk": (random_walk, monthly("2000-01")),
}


def roles_of_real() -> dict[str, str]:
    """The role of each real series, "choose" or "report": half of them each, drawn with seed 0."""
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(REAL))
    names = sorted(REAL)
    chosen = {names[i] for i in order[: len(REAL) // 2]}
    return {name: "choose" if name in chosen else "report" for name in REAL}


def prepare(folder: Path) -> None:
    """Write every series as NAME.csv, and series.json with the role of each."""
    folder.mkdir(parents=True, exist_ok=True)
    roles = {}
    for name, role in roles_of_real().items():
        read, times = REAL[name]
        roles[name] = role
        values = read()
        write(folder / f"{name}.csv", times(len(values)), values)
    for name, (simulate, times) in SIMULATED.items():
        for seed, role in ((1, "choose"), (2, "report")):
            values = simulate(np.random.Generator(np.random.PCG64(seed)))
            roles[f"{name} {seed}"] = role
            write(folder / f"{name} {seed}.csv", times(len(values)), values)
    (folder / "series.json").write_text(json.dumps(roles, indent=1) + "\n", encoding="utf-8")


def write(path: Path, times: Times, values: np.ndarray) -> None:
    """Write a series as a table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "value"])
        writer.writerows(zip(times, [f"{value:.8g}" for value in values], strict=True))
