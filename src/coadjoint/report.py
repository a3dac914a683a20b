"""Report: a run folder, a folder of compared runs or of diagnostics -> one page of HTML that needs nothing else.

A figure is a row of a table: kind ("lines", "heat", "dots"), title, axes, series. The page's script draws by kind.
Everything in a folder is a stranger's text: made visible on its way in, escaped on its way into the page.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from . import files, runs, settings
from .errors import CoadjointError, MissingError, StorageError, check_path

Row = dict[str, Any]
Curve = tuple[str, np.ndarray, np.ndarray]  # name, steps, values

FIGURE, SERIES = 24_000, 1500  # points drawn
ROWS, COLUMNS = 120, 200  # cells of a heatmap
TEXT = 2000  # characters of one field
MOST, LINE = 200_000_000, 4 << 20  # bytes of a file that is read whole; of a line of one that is read line by line
APART = 14  # curves that colours and dashes can tell apart
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
NOT_METRICS = ("kind", "split", "step", "sequences")
CURVES = ("loss", "gradient", "penalty", "rho", "rate", "distance", "share", "damping", "cg")
SHARES = ("right", "accuracy")  # metrics between 0 and 1
BUDGETS = {"gradients": "work", "seconds": "seconds"}  # a setting of a run, and what it says of itself

# kind of row, key, title, what it shows, label of the axis, options of _lines
TRAINING: list[tuple[str, str, str, str, str, Row]] = [
    ("train", "gradient", "Gradient norm", "of all parameters together, before clipping", "norm of the gradient", {"log": True, "smooth": True}),
    ("train", "penalty", "Penalty", "G, a function of the costates", "penalty G", {"log": None, "smooth": True, "none": "No penalty: plain backpropagation has none."}),
    ("train", "rho", "Penalty weight", "ρ in L + ρ G", "weight ρ", {"log": None, "none": "No penalty, and so no weight."}),
    ("train", "rate", "Step size", "of the optimiser", "step size", {"log": None}),
    ("train", "distance", "Distance of the direction from the gradient", "√(2 − 2 cos θ), θ the angle between them", "distance",
     {"rules": [{"y": 1, "label": "Galvan's condition for convergence needs less"}], "smooth": True}),
    ("train", "share", "Share of the move that was taken", "as the step rule or the line search judged it", "share", {"log": None}),
    ("train", "damping", "Damping", "of the model that conjugate gradients minimise", "damping", {"log": True}),
    ("train", "cg", "Conjugate gradient iterations", "of each step", "iterations", {}),
]  # fmt: skip
OF_SOME = ("rate", "distance", "share", "damping", "cg")  # curves that only some optimisers have
PROBED: list[tuple[str, str, str, str, str, Row]] = [
    ("probe", "decay", "Decay of the costates", "0: the signal arrives whole; below, it vanishes; above, it explodes",
     "log₁₀ ‖λ₀‖ / ‖λ_T‖", {"rules": [{"y": 0, "label": "neither vanishes nor explodes"}]}),
    ("probe", "radius", "Spectral radius", "the largest absolute eigenvalue of W", "spectral radius of W", {"rules": [{"y": 1, "label": "radius 1"}]}),
]  # fmt: skip


def write(folder: str | Path) -> Path:
    """Make report.html in a run folder, in a compare folder (one that holds compare.json) or beside a diagnostics.json."""
    check_path("folder", folder)
    folder = Path(folder)
    compared, diagnosed = ((folder / f).is_file() for f in ("compare.json", "diagnostics.json"))
    run = any((folder / f).is_file() for f in ("metrics.jsonl", "result.json", "environment.json"))
    if not (compared or run or diagnosed):
        raise StorageError(
            f"'{folder}' is neither a run folder (metrics.jsonl) nor a compare folder (compare.json). "
            "Give the folder that `coadjoint train` or `coadjoint compare` wrote."
        )
    page = _render((_compare_page if compared else _run_page if run else _diagnosis_page)(folder))
    files.replace(folder / "report.html", page.encode())
    return folder / "report.html"


def markdown(folder: str | Path) -> str:
    """The tables of a comparison in Markdown, with the command that made it and the time it took."""
    check_path("folder", folder)
    page = _compare_page(Path(folder))
    plain = lambda cell: " ".join((cell if isinstance(cell, str) else cell[0]).split()).replace("|", "\\|")
    line = lambda cells: f"| {' | '.join(map(plain, cells))} |"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", page["command"])), default=0))
    parts = [f"{fence}console\n{page['command']}\n{fence}"]
    parts += [f"{page['runs']}; {page['facts']['took']}."] if "took" in page["facts"] else []
    for section in page["sections"]:
        for table in section["tables"] if section["id"].startswith(("overview", "results")) else ():
            rows = [line(table["head"]), line("---" for _ in table["head"]), *map(line, table["rows"])]
            parts += [f"### {section['title']}"] if len(page["tasks"]) > 1 else []
            parts += ["\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _render(page: Row) -> str:
    """The template with its style and script inside, both named by hash in the page's security policy."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingError("the report page needs Jinja2: pip install jinja2") from error
    template, style, script = (
        Path(__file__).with_suffix(s).read_text(encoding="utf-8") for s in (".html", ".css", ".js")
    )
    figures = {f["id"]: f for section in page["sections"] for f in section["figures"] if not f["empty"]}
    data = json.dumps({"figures": figures, "clock": page["clock"]}, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # U+2028 and U+2029 are not ASCII: json has escaped them
        data = data.replace(character, f"\\u{ord(character):04x}")
    sha = lambda text: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    policy = f"default-src 'none'; script-src {sha(script)}; style-src {sha(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    trusted = {"style": Markup(style), "script": Markup(script), "data": Markup(data)}
    return engine.from_string(template).render(page, policy=policy, **trusted)


def clean(value: object) -> str:
    """Text that can be shown: characters that hide or reorder others are spelt out, and long text is cut."""
    text = "–" if value is None else str(value)
    cut = f"… ({len(text):,} characters)" if len(text) > TEXT else ""
    return UNSEEN.sub(lambda m: f"\\u{ord(m[0]):04x}", text[:TEXT]) + cut


def number(value: object) -> float:
    """A finite float, or NaN: for null, for "NaN", "Infinity" and "-Infinity", and for what is no number."""
    try:
        x = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        return math.nan
    return x if math.isfinite(x) else math.nan


def scan(path: Path, faults: list[str], word: str = "") -> Iterator[Row]:
    """The objects of a JSON-lines file, of the lines that hold `word`; what cannot be read adds a sentence to `faults`."""
    bad, n, line = [], 0, ""
    try:
        for n, content in enumerate(files.read_lines(path, LINE), 1):
            line = content.decode("utf-8", "replace")
            if word not in line or not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            else:
                bad.append(n)
    except StorageError as error:
        faults.append(f"{path.name} could not be read{f' beyond line {n}' if n else ''}: {_reason(path, error)}")
    if bad and bad[-1] == n and not line.endswith("\n"):
        bad.pop()
        faults.append(f"The last line of {path.name} was cut off, as by a crash; it is left out.")
    if bad:
        where = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        faults.append(f"{path.name}: {_count(len(bad), 'unreadable line')} left out ({where}).")


def _reason(path: Path, error: object) -> str:
    """What an error says of a file that was named already."""
    text = (clean(error).splitlines() or ["damaged"])[0]
    return text.removeprefix(str(path)).lstrip(": ").removeprefix("cannot be read: ")[:200]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a JSON-lines file, without a last line that a crash cut off."""
    check_path("path", path)
    return list(scan(Path(path), []))


def _read(path: Path, faults: list[str]) -> Row:
    """A mapping from a JSON or YAML file; {} where there is none, and a sentence in `faults` if it is damaged."""
    if not os.path.lexists(path):
        return {}
    try:
        content = files.read_regular(path, MOST)
        value = json.loads(content.decode()) if path.suffix == ".json" else settings.load(path, content).values
        if isinstance(value, dict):
            return value
        faults.append(f"{path.name} could not be read: it holds no mapping.")
    except (ValueError, RecursionError, CoadjointError) as error:
        faults.append(f"{path.name} could not be read: {_reason(path, error)}")
    return {}


def _judge_model(path: Path, faults: list[str]) -> None:
    """A sentence in `faults` if the model of a run is damaged: whoever reads the page may want to use it."""
    if not os.path.lexists(path):
        return
    try:
        door = runs.schemas()
        description = door.description_of(path, door.read_header(path))
        if description.get("sha256") is None:
            return  # of a version that wrote none
        with files.open_regular(path) as file:
            if not runs.unbroken(file, description["sha256"]):
                faults.append(f"{path.name} is damaged: it does not have the SHA-256 sum that it carries.")
    except StorageError as error:
        faults.append(f"{path.name} cannot be used: {_reason(path, error)}")
    except MissingError:
        return


def _dict(value: object) -> Row:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[Row]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


class _Store(defaultdict[tuple[str, ...], tuple[array, array]]):
    """Columns of steps and values, compact enough for long runs."""

    def __init__(self) -> None:
        super().__init__(lambda: (array("d"), array("d")))

    def put(self, row: Row, keys: Iterable[str], *name: str) -> None:
        step = number(row.get("step"))
        for key in keys:
            if key in row and step == step and ((*name, key) in self or len(self) < 200):
                for column, x in zip(self[(*name, key)], (step, number(row[key])), strict=True):
                    column.append(x)

    def curve(self, *key: str, name: str = "") -> Curve:
        """In the order of steps; of a step that was written twice, by a resumed run, the later value counts."""
        steps, values = (np.array(column)[::-1] for column in self.get(key, ((), ())))
        _, last = np.unique(steps, return_index=True)
        return name or key[-1], steps[last], values[last]


def thin(y: np.ndarray, most: int) -> np.ndarray:
    """Indices of about `most` points: both ends and, of each stretch, the least, the greatest and a gap if there is one."""
    n, finite = len(y), np.isfinite(y)
    if n <= most:
        return np.arange(n)
    keep = {0, n - 1}
    for a, b in itertools.pairwise(np.linspace(0, n, max(1, most // 3) + 1).astype(int)):
        here, gaps = np.flatnonzero(finite[a:b]) + a, np.flatnonzero(~finite[a:b]) + a
        keep |= {here[y[here].argmin()], here[y[here].argmax()]} if len(here) else set()
        keep |= set(gaps[:1])
    return np.array(sorted(keep))


def _numbers(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """For JSON: rounded, whole numbers without a point, null for what is not finite."""
    short = lambda v: int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.{digits}g}")
    return [short(v) if math.isfinite(v) else None for v in map(float, values)]


def _figure(kind: str, id: str, title: str, about: str, empty: str = "", notes: Iterable[str] = (), **rest: Any) -> Row:
    notes = [note for note in notes if note]
    return {"kind": kind, "id": id, "title": title, "about": about, "empty": empty, "notes": notes, **rest}


def _lines(
    id: str, title: str, about: str, label: str, curves: Sequence[Curve], log: bool | None = False, smooth: bool = False,
    colours: Sequence[int] = (), span: list[int] | None = None, none: str = "No values were recorded.", **rest: Any,
) -> Row:  # fmt: skip
    """Curves over steps. log=None: logarithmic if the values span three decades. smooth: long curves turn faint under their median."""
    every = np.concatenate([np.empty(0), *(y for _, _, y in curves)])
    finite = every[np.isfinite(every)]
    if not len(finite):
        return _figure("lines", id, title, about, none)
    low, high = finite.min(), finite.max()
    log = bool(high > 0 and (low > 0 and high / low > 1000 if log is None else log))
    drawn, series = 0, []
    for (name, step, value), colour in zip(curves, colours or itertools.count(), strict=False):
        value = np.where(value > 0, value, np.nan) if log else value
        at = thin(value, max(24, min(SERIES, FIGURE // len(curves))))
        drawn += len(at)
        faint = smooth and len(value) > 400
        one = {"name": clean(name), "colour": colour, "x": _numbers(step[at], 12), "y": _numbers(value[at])}
        series.append(one | {"faint": faint})
        if faint:
            parts = [p for p in np.array_split(np.arange(len(value)), 120) if np.isfinite(value[p]).any()]
            x, y = (step[p[len(p) // 2]] for p in parts), (np.nanmedian(value[p]) for p in parts)
            middle = {"x": _numbers(x, 12), "y": _numbers(y)}
            series.append(one | middle | {"name": f"{clean(name)}, running median"})
    total, gaps, zeros = len(every), len(every) - len(finite), int((finite <= 0).sum()) if log else 0
    notes = [
        f"{drawn:,} of {total:,} points drawn: the least and the greatest of each stretch." if drawn < total else "",
        f"{_count(gaps, 'value')} not finite, shown as gaps." if gaps else "",
        f"{_count(zeros, 'value')} not positive, left out of a logarithmic axis." if zeros else "",
    ]
    rest = {"x": "training step", "y": {"label": label, "log": log, "range": span}, "series": series, **rest}
    return _figure("lines", id, title, about, notes=notes, drawn=drawn, total=total, **rest)


def _heat(probes: list[tuple[float, np.ndarray, np.ndarray]], id: str, title: str, about: str, label: str) -> Row:
    """Values over time t (across) and training step (up); a cell of many values shows the greatest."""
    pairs = [(s, t[-n:], v[-n:]) for s, t, v in probes if (n := min(len(t), len(v)))]
    pairs = [(s, t[np.isfinite(t)], v[np.isfinite(t)]) for s, t, v in pairs]
    every = np.concatenate([np.empty(0), *(v for _, _, v in pairs)])
    if not np.isfinite(every).any():
        return _figure("heat", id, title, about, "No probes with these values were recorded.")
    times = np.unique(np.concatenate([t for _, t, _ in pairs]))
    starts = np.array([c[0] for c in np.array_split(times, min(COLUMNS, len(times)))])
    bands = np.array_split(np.arange(len(pairs)), min(ROWS, len(pairs)))
    cells = np.full((len(bands), len(starts)), -np.inf)
    for row, band in zip(cells, bands, strict=True):
        for _, t, v in (pairs[k] for k in band):
            good = np.isfinite(v)
            np.maximum.at(row, np.searchsorted(starts, t[good], side="right") - 1, v[good])
    gaps, few = int((~np.isfinite(every)).sum()), cells.size < len(every)
    notes = [
        f"{cells.size:,} cells drawn for {len(every):,} values: each shows its greatest." if few else "",
        f"{_count(gaps, 'value')} zero or not finite, left blank." if gaps else "",
    ]
    grid = {"t": _numbers(starts), "steps": _numbers((pairs[b[0]][0] for b in bands), 12)}
    span = _numbers(np.quantile(cells[np.isfinite(cells)], (0.01, 0.99)), 3)
    rest: Row = {**grid, "cells": [_numbers(row, 4) for row in cells], "span": span, "label": label}
    return _figure("heat", id, title, about, notes=notes, drawn=cells.size, total=len(every), **rest)


def _table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], none: str, text: Iterable[int] = (0, 1), most: int = 400, folded: bool = False
) -> Row:  # fmt: skip
    """Rows for the template; a cell is text or (text, link). Columns other than `text` hold numbers."""
    kept = list(itertools.islice(rows, most + 1))
    cells = [[c if isinstance(c, tuple) else clean(c) for c in row] for row in kept[:most]]
    note = f"The first {most:,} rows; there are more." if len(kept) > most else ""
    words = {"caption": caption, "head": [clean(h) for h in head], "none": none, "note": note}
    return {**words, "rows": cells, "text": set(text), "folded": folded}


def _section(id: str, title: str, lead: str = "", figures: Iterable[Row] = (), tables: Iterable[Row] = (), commands: Row | None = None, pairs: bool = False) -> Row:  # fmt: skip
    """Drawn figures first, then those that say why they are empty."""
    ordered = sorted(figures, key=lambda figure: bool(figure["empty"]))
    return {"id": id, "title": title, "lead": lead, "figures": ordered, "tables": tables, "commands": commands or {}, "pairs": pairs}  # fmt: skip


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _short(value: object, digits: int = 4) -> str:
    """A number for people: 12,000 or 0.9876 or −3.1e-07; – where there is none."""
    x = number(value)
    plain = f"{x:,.0f}" if (x == round(x) if x == x else False) or abs(x) >= 1000 else f"{x:.{digits}g}"
    return "–" if x != x else (plain if abs(x) < 1e9 else f"{x:.3g}").replace("-", "−", 1 if x < 0 else 0)


def _time(value: object) -> str:
    s = number(value)
    return "–" if s != s else f"{s:.3g} s" if s < 100 else f"{s / 60:.3g} min" if s < 6000 else f"{s / 3600:.3g} h"


def _flat(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and text."""
    if isinstance(value, dict) and (value or not depth) and depth < 8:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key), depth + 1)
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else clean(value)


def _describe(section: object) -> str:
    """{"name": "temporal-order", "length": 100} -> "temporal-order, length 100"."""
    if not isinstance(section, dict):
        return clean(section or "")
    words_of = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in section.items()}
    lead = next((k for k in ("name", "method", "kind", "cell", "path") if isinstance(words_of.get(k), str)), "")
    words = [
        k if v is True else f"{k} {v}" for k, v in words_of.items() if k != lead and isinstance(v, str | int | float)
    ]
    rest = [word for word in words if not word.endswith(" False")]
    return clean(", ".join(([words_of[lead]] if lead else []) + rest[:8]))


def _goal(text: object) -> tuple[str, float, str]:
    """ "right >= 1" -> ("right", 1.0, "right ≥ 1"); ("", nan, "") if there is none."""
    found = re.fullmatch(r"\s*(\S+)\s*[<>]=\s*([-+.\deE]+)\s*", str(text or ""))
    try:
        threshold = number(float(found[2])) if found else math.nan
    except ValueError:
        threshold = math.nan
    return found[1] if found else "", threshold, clean(text or "").replace(">=", "≥").replace("<=", "≤")


def _stem(metric: str) -> str:
    """right_0.2 and right_0.04 share a figure with right."""
    return re.sub(r"_[\d.]+$", "", metric)


def _outcome(result: Row, last: float) -> tuple[str, str, str]:
    """Tone, word, and what happened."""
    status, at, goal = result.get("status"), _short(result.get("step") or last), _goal(result.get("goal"))[2]
    why = f": {clean(result['reason'])}" if result.get("reason") else ""
    if result.get("success") is True:
        seconds = number(result.get("success_seconds"))
        when = _short(result.get("success_step") or last) + (f", after {_time(seconds)}" if seconds == seconds else "")
        after = "" if status in ("success", "finished") else f"; {clean(status)} at step {at}{why}"
        return "good", "Success", f"at step {when}" + (f": {goal}" if goal else "") + after
    missed = f", without reaching {goal}" if goal else ""
    told = {
        "success": ("good", "Success", f"at step {at}{why}"),
        "finished": ("calm", "Finished", f"{at} steps{missed}"),
        "early-stopped": ("calm", "Stopped early", f"at step {at}{missed}{why}"),
        "interrupted": ("warn", "Interrupted", f"at step {at}{why}"),
        "failed": ("bad", "Failed", f"at step {at}{why}"),
    }
    unknown = ("warn", "No result", f"the last recorded step is {at}; the run goes on, or ended without a word")
    return told.get(str(status), unknown)


@dataclass(frozen=True)
class _Run:
    """What a run folder holds; probes: step -> (t, log10 |lam_t|, log10 norms of the temporal components)."""

    config: Row
    environment: Row
    result: Row
    store: _Store
    probes: dict[float, list[np.ndarray]]
    faults: list[str]
    clipped: float  # share of the steps

    @property
    def last(self) -> float:
        return max(
            (self.store.curve("train", k)[1][-1] for k in CURVES if ("train", k) in self.store), default=math.nan
        )

    def held_out(self, stem: str) -> list[Curve]:
        """The curves of a metric and its variants, for each split."""
        keys = [key for key in self.store if key[0] == "held-out" and _stem(key[2]) == stem]
        return [self.store.curve(*key, name=f"{key[2]} ({key[1]})") for key in keys]


def _read_run(folder: Path) -> _Run:
    faults: list[str] = []
    config, environment, result = (
        _read(folder / f, faults) for f in ("config.yaml", "environment.json", "result.json")
    )
    store, skipped, clipped = _Store(), Counter[str](), 0
    probes: dict[float, list[np.ndarray]] = {}
    vector = lambda values: np.array([number(v) for v in values] if isinstance(values, list) else [])
    for row in scan(folder / "metrics.jsonl", faults):
        kind, step = row.get("kind"), number(row.get("step"))
        if kind == "train":
            store.put(row, CURVES, "train")
            clipped += row.get("clipped") is True
            skipped.update([clean(row["skipped"])] if row.get("skipped") else [])
        elif kind == "held-out":
            store.put(row, (k for k in row if k not in NOT_METRICS), "held-out", str(row.get("split", "")))
        elif kind == "probe" and step == step:
            probes[step] = [vector(row.get(key)) for key in ("t", "log10_costates", "temporal")]
            store.put(row, ("decay", "radius"), "probe")
            norms = _dict(row.get("gradients"))
            store.put(norms | {"step": step}, (k for k in norms if k != "step"), "norm")
    if os.path.lexists(folder / "clock.jsonl"):
        for row in scan(folder / "clock.jsonl", faults):
            store.put(row, ("seconds",), "clock")
    _judge_model(folder / "model.safetensors", faults)
    faults += [f"{_count(n, 'step')} skipped: {why}." for why, n in skipped.most_common(5)]
    trained = len(store.get(("train", "gradient"), ((),))[0])
    return _Run(config, environment, result, store, probes, faults, clipped / max(1, trained))


def _run_figures(run: _Run) -> tuple[list[Row], list[Row]]:
    """Training curves, and what the probes saw."""
    metric, threshold, goal = _goal(run.result.get("goal"))
    done = number(run.result.get("success_step"))
    succeeded = run.result.get("success") is True and done == done
    common: Row = {"marks": [{"x": done, "label": "success"}] if succeeded else [], "clock": True}

    def draw(kind: str, key: str, title: str, about: str, label: str, options: Row) -> Row:
        return _lines(key, title, about, label, [run.store.curve(kind, key)], **(common | options))

    def idle(kind: str, key: str) -> bool:
        """A penalty that is none, or what this optimiser does not have."""
        if key in OF_SOME:
            return (kind, key) not in run.store
        return key in ("penalty", "rho") and (kind, key) in run.store and not run.store.curve(kind, key)[2].any()

    def held_out(k: int, stem: str) -> Row:
        options: Row = {"span": [0, 1]} if stem in SHARES else {"log": None}
        if _stem(metric) == stem and threshold == threshold:
            options["rules"] = [{"y": threshold, "label": f"goal: {goal}"}]
        about, label = "of sequences that are not trained on", clean(stem) + ", share of answers" * (stem in SHARES)
        title = f"Held-out {clean(stem)}"
        return _lines(f"held-out-{k}", title, about, label, run.held_out(stem), **common, **options)

    def heat(k: int, *words: str) -> Row:
        return _heat([(s, run.probes[s][0], run.probes[s][k]) for s in sorted(run.probes)], *words)

    stems = dict.fromkeys(_stem(key[2]) for key in run.store if key[0] == "held-out")
    metrics = sorted(stems.keys() - {"loss"}, key=lambda stem: (stem != _stem(metric), stem))[:12]
    loss = [run.store.curve("train", "loss", name="training"), *run.held_out("loss")]
    norms = [run.store.curve(*key) for key in run.store if key[0] == "norm"]
    training = [
        _lines("loss", "Loss", "of each training batch, and of held-out sequences", "loss per sequence", loss, log=None, smooth=True, **common),
        *(held_out(k, stem) for k, stem in enumerate(metrics)),
        *(draw(*figure) for figure in TRAINING if not idle(*figure[:2])),
    ]  # fmt: skip
    inside = [
        heat(1, "costates", "Costates through time", "how much of the error signal reaches each moment", "log₁₀ ‖λₜ‖"),
        heat(2, "temporal", "Temporal components", "what each moment adds to the gradient", "log₁₀ norm of the component at t"),
        *(draw(*figure) for figure in PROBED),
        _lines("norms", "Gradient by parameter", "the norm for each of them", "norm of the gradient", norms, log=True, **common),
    ]  # fmt: skip
    return training, inside


def _cards(run: _Run) -> Row:
    """The key figures, without those that are not there."""
    result, metric = run.result, _goal(run.result.get("goal"))[0]
    splits = _dict(result.get("metrics")).items()
    final = [(name != metric, name, split, value) for split, of in splits for name, value in _dict(of).items()]
    ends: Callable[..., list[float]] = lambda *key: list(run.store.curve(*key)[2][[0, -1]]) if key in run.store else []
    change = lambda key: " → ".join(_short(v, 3) for v in ends("probe", key) if v == v)
    cards = {
        "steps": _short(result.get("step") or run.last),
        "time": _time(result.get("seconds") or [None, *ends("clock", "seconds")][-1]),
        **{clean(f"{name} ({split})"): _short(x) for _, name, split, x in sorted(final, key=lambda f: f[0])[:6]},
        "parameters": _short(result.get("parameters")),
        "best step": _short(result.get("best_step")),
        "decay, first → last": change("decay"),
        "spectral radius, first → last": change("radius"),
        "steps clipped": f"{run.clipped:.1%}" if run.clipped else "",
    }
    return {name: value for name, value in cards.items() if value not in ("", "–")}


def _run_tables(run: _Run) -> tuple[Row, Row]:
    """Held-out values at up to 40 steps, and examples."""
    stems = dict.fromkeys(_stem(key[2]) for key in run.store if key[0] == "held-out")
    values = {name: dict(zip(x, y, strict=True)) for stem in stems for name, x, y in run.held_out(stem)}
    grid = sorted({step for column in values.values() for step in column})
    grid = [grid[k] for k in np.unique(np.linspace(0, len(grid) - 1, min(40, len(grid))).astype(int))]
    held = ([_short(step), *(_short(column.get(step)) for column in values.values())] for step in grid)
    examples = _dicts(run.result.get("examples"))
    keys = list(dict.fromkeys(key for example in examples for key in example))[:8]
    mark = lambda v: ("✓ yes" if v else "✗ no") if isinstance(v, bool) else v
    shown = ([mark(example.get(key)) for key in keys] for example in examples)
    return (
        _table("Held-out values", ["step", *values], held, "Nothing was evaluated on held-out sequences.", text=(), folded=True),
        _table("Held-out sequences", keys, shown, "No examples were recorded.", text=range(8), most=50),
    )  # fmt: skip


def _run_page(folder: Path) -> Row:
    run, name = _read_run(folder), folder.resolve().name
    config, environment = run.config, run.environment
    (training, inside), (held_out, examples) = _run_figures(run), _run_tables(run)
    _, steps, seconds = run.store.curve("clock", "seconds")
    at = thin(seconds, 600)
    facts = {
        "method": _describe(config.get("gradient")),
        "network": _describe(config.get("network")),
        "optimiser": _describe(config.get("optimiser")),
        "seed": clean(environment.get("seed", "")),
        "started": clean(environment.get("started") or ""),
    }
    again = {
        "The command that made this run": clean(environment.get("command") or "not recorded"),
        "Go on from the last checkpoint, in the folder that holds this one": clean(f"coadjoint resume {shlex.quote(name)}"),
    }  # fmt: skip
    setup = [
        _table(
            "Configuration", ["setting", "value"], _flat(config), "No config.yaml: the run was started from Python."
        ),
        _table("Environment", ["what", "value"], _flat(environment), "There is no environment.json."),
    ]
    costates = "λₜ = ∂L/∂xₜ are the costates: the error signal at time t of a sequence."
    return {
        "kind": "run",
        "name": clean(name),
        "title": _describe(config.get("task") or config.get("data")) or clean(name),
        "outcome": _outcome(run.result, run.last),
        "facts": {k: v for k, v in facts.items() if v},
        "notices": run.faults,
        "cards": _cards(run),
        "clock": {"steps": _numbers(steps[at], 12), "seconds": _numbers(seconds[at])} if len(at) else None,
        "sections": [
            _section("training", "Training", figures=training, tables=[held_out]),
            _section("inside", "Inside the gradient", costates, inside),
            *_diagnoses(folder / "diagnostics", run.faults)[1],
            _section("examples", "Example predictions", tables=[examples]),
            _section("setup", "Set-up", tables=setup, pairs=True),
            _section("again", "Run it again", commands=again),
        ],
    }


def _drawn(chart: Row, k: int) -> Row:
    """A figure of diagnostics.json: curves, or the cells of a grid."""
    id, title, about, x, y = f"diagnostic-{k}", *(clean(chart.get(key) or "") for key in ("title", "about", "x", "y"))
    rows = lambda key, n: [r for r in chart[key] if isinstance(r, list) and len(r) == n][:60] if isinstance(chart.get(key), list) else []  # fmt: skip
    vector = lambda v: np.array([number(one) for one in v] if isinstance(v, list) else [])
    curves: list[Curve] = []
    for name, *both in rows("curves", 3):
        across, up = map(vector, both)
        n = min(len(across), len(up))
        at = np.isfinite(across[:n])
        curves.append((clean(name), across[:n][at], up[:n][at]))
    if not isinstance(chart.get("cells"), list):
        label = f"log₁₀ of the {y}" if chart.get("decades") is True else y
        rest: Row = {"x": x, "span": [0, 1] if chart.get("share") is True else None}
        rules = [{"y": at, "label": clean(label)} for value, label in rows("rules", 2) if (at := number(value)) == at]
        return _lines(id, title, about, label, curves, **rest, **({"rules": rules} if rules else {}))  # type: ignore[arg-type]
    _, across, up = curves[0] if curves else ("", np.empty(0), np.empty(0))
    cells = [row[: len(up)] for row in map(vector, chart["cells"][:ROWS]) if len(row) >= len(up)][: len(across)]
    if not any(np.isfinite(row).any() for row in cells):
        return _figure("heat", id, title, about, "No values were recorded.")
    grid = np.array(cells).T
    ends = _numbers(np.quantile(grid[np.isfinite(grid)], (0.01, 0.99)), 3)
    axes: Row = {
        "t": _numbers(across[: len(cells)]),
        "steps": _numbers(up),
        "x": x,
        "y": y,
        "label": clean(chart.get("label") or ""),
    }
    values = [_numbers(row, 4) for row in grid]
    return _figure("heat", id, title, about, cells=values, span=ends, drawn=grid.size, total=grid.size, **axes)


def _diagnoses(folder: Path, faults: list[str]) -> tuple[Row, list[Row]]:
    """What diagnostics.json says, and its section; none where there is no such file."""
    found = _read(folder / "diagnostics.json", faults)
    if not found:
        return {}, []
    about, table = _dict(found.get("about")), _dict(found.get("table"))
    texts = lambda v: [clean(one) for one in v][:60] if isinstance(v, list) else []
    heads = texts(table.get("heads"))
    rows = [row for r in table.get("rows") or () if len(row := texts(r)) == len(heads)] if heads else []
    words = {i for i, head in enumerate(heads) if head in ("figure", "unit", "what it says")}
    declined = list(_dict(found.get("declined")).items())
    tables = [_table("Figures", heads, rows, "No figures were recorded.", text=words)]
    if declined:
        tables.append(_table("Not for this network", ["diagnostic", "why"], declined, "", folded=True))
    lead = "; ".join(clean(about[key]) for key in ("weights", "sequences") if about.get(key))
    drawn = [_drawn(chart, k) for k, chart in enumerate(_dicts(found.get("charts"))[:40])]
    return found, [_section("diagnostics", "Diagnostics", lead, drawn, tables)]


def _diagnosis_page(folder: Path) -> Row:
    """A page of diagnostics alone."""
    faults: list[str] = []
    found, sections = _diagnoses(folder, faults)
    if not found:
        why = " ".join(faults)
        raise StorageError(
            f"'{folder / 'diagnostics.json'}' holds no diagnostics. {why} Run `coadjoint diagnose` again."
        )
    about = _dict(found.get("about"))
    facts = {"network": _describe(about.get("network")), "seed": clean(about.get("seed"))}
    table = sections[0]["tables"][0]
    single = table["head"][:3] == ["figure", "value", "unit"]
    command = clean(about.get("command") or "not recorded")
    return {
        "kind": "diagnosis",
        "name": clean(folder.resolve().name),
        "title": _describe(about.get("task")) or clean(folder.resolve().name),
        "outcome": ("calm", clean(about.get("sequences") or "Diagnostics"), clean(about.get("weights") or "")),
        "facts": facts,
        "notices": faults,
        "cards": {row[0]: f"{row[1]} {row[2]}" for row in table["rows"][:8]} if single else {},
        "clock": None,
        "sections": [
            *sections,
            _section("again", "Run it again", commands={"The command that made this page": command}),
        ],
    }


def _spread(values: Sequence[float], tell: Callable[[object], str] = _short) -> str:
    """Median (least to greatest)."""
    middle = tell(statistics.median(values) if values else None)
    return f"{middle} ({tell(min(values))} to {tell(max(values))})" if len(set(values)) > 1 else middle


def _run_folder(folder: Path, run: Row) -> Path | None:
    """The run's folder, if it lies within the compare folder."""
    try:
        path = (folder / str(run.get("folder") or "..")).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_dir() else None
    except (OSError, ValueError):
        return None


def _held_out(path: Path, metric: str, faults: list[str]) -> tuple[str, Curve]:
    """The held-out curve of a run: of `metric` or, if none is named, of the first that is not the loss."""
    store = _Store()
    for row in scan(path / "metrics.jsonl", faults, '"held-out"') if os.path.lexists(path / "metrics.jsonl") else ():
        if row.get("kind") == "held-out":
            store.put(row, (k for k in row if k not in NOT_METRICS), str(row.get("split", "")))
    metric = metric or next((key[1] for key in store if key[1] != "loss"), "loss" if store else "")
    splits = sorted((key[0] for key in store if key[1] == metric), key=lambda split: split != "test")
    return metric, store.curve(splits[0] if splits else "", metric)


def _won(runs: Iterable[Row]) -> list[Row]:
    return [run for run in runs if run.get("success") is True]


def _column(runs: Iterable[Row], key: str) -> list[float]:
    return [x for run in runs if (x := number(run.get(key))) == x]


def _share(name: str, runs: list[Row], longest: float) -> Curve:
    """Share of runs that have succeeded by a step: known as far as the row ran, or to the end if all have succeeded."""
    ends = sorted(_column(_won(runs), "steps"))
    known = longest if len(ends) == len(runs) else max(_column(runs, "steps"), default=0.0)
    share = np.arange(len(ends) + 1) / max(1, len(runs))
    return name, np.array([0.0, *ends, known]), np.array([*share, share[-1]])


def _dots(id: str, title: str, label: str, rows: list[str], points: list[tuple[int, Row, float]], lane: str, **rest: Any) -> Row:  # fmt: skip
    """A mark for each seed; those without a value stand in a lane of their own."""
    marks = [
        {"row": row, "x": x, "label": f"seed {clean(run.get('seed'))}", "open": run.get("success") is not True}
        for (row, run, _), x in zip(points, _numbers(value for _, _, value in points), strict=True)
    ]
    rest = {
        "rows": rows,
        "points": marks[:4000],
        "lane": lane,
        "x": label,
        "drawn": len(marks[:4000]),
        "total": len(marks),
        **rest,
    }
    return _figure(
        "dots", id, title, "one mark for each seed; filled: it succeeded", "" if marks else "No runs.", **rest
    )


@dataclass(frozen=True)
class _Method:
    """A row of a comparison: a method on a task, and the budgets of its runs."""

    name: str
    settings: Row
    runs: list[Row]
    budget: Row

    def within(self, budget: str) -> str:
        """How many of its runs succeeded within a budget."""
        most, used = number(self.budget.get(budget)), BUDGETS[budget]
        return f"{sum(x <= most for x in _column(_won(self.runs), used))} of {len(self.runs)}" if most == most else "–"


@dataclass(frozen=True)
class _Task:
    """A task of a comparison and its rows. `tail` tells its figures from those of other tasks."""

    name: str
    goal: str
    metric: str
    rows: list[_Method]
    tail: str

    @property
    def short(self) -> str:
        """ "addition" of "addition, 100 steps"."""
        return self.name.split(",")[0]

    @property
    def runs(self) -> list[tuple[int, Row]]:
        return [(k, run) for k, row in enumerate(self.rows) for run in row.runs]

    def score(self, runs: list[Row]) -> str:
        """ "2 of 3, 1 failed"; of a task that has no goal only how many failed."""
        crashed = lambda run: run.get("status") == "waiting" and bool(run.get("error"))
        lost = sum(run.get("status") == "failed" or crashed(run) for run in runs)
        won = f"{len(_won(runs))} of {len(runs)}" if self.goal else ""
        return ", ".join(filter(None, (won, f"{lost} failed" if lost else "")))

    def brief(self, name: str) -> str:
        """Success and median metric of a method, for the overview."""
        runs = [run for row in self.rows if row.name == name for run in row.runs]
        known = _column(runs, "metric")
        return " · ".join(filter(None, (self.score(runs), _short(statistics.median(known)) if known else "–")))


def _read_compare(folder: Path, faults: list[str]) -> tuple[Row, list[_Task]]:
    compare = _read(folder / "compare.json", faults)
    if not compare:
        why = " ".join(faults)
        raise StorageError(f"'{folder / 'compare.json'}' holds no comparison. {why} Run `coadjoint compare` again.")
    found: dict[str, _Task] = {}
    for entry in _dicts(compare.get("rows")) or [{}]:
        told = {key: entry.get(key, compare.get(key)) for key in ("task", "goal", "metric")}  # of the row, or of all
        name = clean(told["task"] or folder.resolve().name)
        metric = told["metric"] if isinstance(told["metric"], str) else _goal(told["goal"])[0]
        task = found.setdefault(
            name, _Task(name, str(told["goal"] or ""), metric, [], f"-{len(found)}" if found else "")
        )
        if entry:
            row = clean(entry.get("name") or "unnamed"), _dict(entry.get("settings")), _dicts(entry.get("runs"))
            task.rows.append(_Method(*row, _dict(entry.get("budget"))))
    return compare, list(found.values())


def _task_sections(folder: Path, task: _Task, title: str, faults: list[str]) -> list[Row]:
    """The table of a task, and its figures."""
    metric, threshold, goal = task.metric, *_goal(task.goal)[1:]
    curves, colours = [], []
    for k, run in task.runs:
        if path := _run_folder(folder, run):
            metric, (_, steps, values) = _held_out(path, metric, faults)
            curves.append((f"{task.rows[k].name}, seed {clean(run.get('seed'))}", steps, values))
            colours.append(k)
    names, measure, every = [row.name for row in task.rows], clean(metric or "metric"), [run for _, run in task.runs]
    known = list(dict.fromkeys(key for row in task.rows for key in row.settings))
    shown = [key for key in known if len({str(row.settings.get(key)) for row in task.rows}) > 1][:8]
    budgets = [key for key in BUDGETS if any(key in row.budget for row in task.rows)]
    counted = lambda row: [_spread(_column(_won(row.runs), "work"))] if budgets else []
    results = [
        [row.name, *(row.settings.get(key) for key in shown), task.score(row.runs) or "no goal", *(row.within(key) for key in budgets),
         _spread(_column(_won(row.runs), "steps")), *counted(row), _spread(_column(_won(row.runs), "seconds"), _time),
         _spread(_column(row.runs, "metric"))]
        for row in task.rows
    ]  # fmt: skip
    longest = max(_column(every, "steps"), default=0.0)
    rules: Row = (
        {"rules": [{"x": threshold, "y": threshold, "label": f"goal: {goal}"}]} if threshold == threshold else {}
    )
    span = {"span": [0, 1]} if _stem(metric) in SHARES else {"log": None}
    steps_of = [(k, run, number(run.get("steps")) if run.get("success") is True else math.nan) for k, run in task.runs]
    final_of = [(k, run, number(run.get("metric"))) for k, run in task.runs]
    many = f"{len(names)} rows are more than colours can tell apart: each run has a page of its own."
    few, none = len(names) <= APART, "The run folders hold no held-out values."
    success = [
        _dots(f"steps{task.tail}", "Steps to success, seed by seed", "steps to success", names, steps_of, "no success"),
        _lines(f"share{task.tail}", "Success over steps", "share of the seeds that have succeeded by then", "share of seeds",
               [_share(row.name, row.runs, longest) for row in task.rows if row.runs and few], span=[0, 1], stairs=True,
               none="No runs." if few else many),
        _lines(f"curves{task.tail}", f"Held-out {measure} of every run", "coloured by row of the table", measure, curves if few else [],
               colours=colours, rows=names, none=none if few else many, **span, **rules),
        _dots(f"final{task.tail}", f"Final {measure}, seed by seed", f"final {measure}", names, final_of, "no value", **rules),
    ]  # fmt: skip
    limits = {key: next((_short(row.budget[key]) for row in task.rows if key in row.budget), "") for key in budgets}
    head = ["name", *shown, "successes", *(f"in {most} {key}" for key, most in limits.items()), "steps to success",
            *(["gradients to success"] if budgets else []), "time to success", f"final {measure}"]  # fmt: skip
    lead = "Median, and range in brackets. Steps and time are those of the runs that succeeded."
    results_table = _table("Results", head, results, "This comparison holds no rows.", text=(0,))
    drawn = success if task.goal else success[2:]
    return [
        _section(f"results{task.tail}", title or "Side by side", lead, tables=[results_table]),
        _section(f"success{task.tail}", "" if title else "Success", figures=drawn),
    ]


def _compare_page(folder: Path) -> Row:
    faults: list[str] = []
    compare, tasks = _read_compare(folder, faults)
    several = len(tasks) > 1
    each, failures = [], []
    for task in tasks:
        for k, run in task.runs:
            path = _run_folder(folder, run)
            page = path / "report.html" if path else folder
            link = "./" + quote(page.relative_to(folder.resolve()).as_posix()) if page.is_file() else ""
            label = f"{task.name}: " * several + f"{task.rows[k].name}, seed {clean(run.get('seed'))}"
            told = _short(run.get("steps")), _time(run.get("seconds")), _short(run.get("metric"))
            each.append([(label, link) if link else label, run.get("status"), *told])
            if run.get("error") or run.get("status") == "failed":
                failures.append([label, run.get("status"), run.get("error") or "no reason was recorded"])
    names = list(dict.fromkeys(row.name for task in tasks for row in task.rows))
    matrix = ([name, *(task.brief(name) for task in tasks)] for name in names)
    about = "The runs that succeeded, where a task has a goal, and the median of its metric."
    overview = _table("All tasks", ["name", *(task.short for task in tasks)], matrix, "No rows.", text=(0,))
    rows_of = ((row.settings, row.name) for task in tasks for row in task.rows)
    settled = [*((value, key) for key, value in _dict(compare.get("tasks")).items()), *rows_of]
    pairs = dict.fromkeys(pair for chosen, name in settled if chosen for pair in _flat(chosen, clean(name)))
    tables = {
        "runs": [
            _table("Failures", ["run", "outcome", "reason"], failures, "No run failed.", text=range(3), most=200),
            _table("Every run", ["run", "outcome", "steps", "time", "final metric"], each, "No runs.", most=2000, folded=len(each) > 12),
        ],
        "setup": [
            _table("Settings", ["setting", "value"], pairs, "No settings were recorded.", folded=len(pairs) > 40),
            _table("Environment", ["what", "value"], _flat(_dict(compare.get("environment"))), "No environment was recorded."),
        ],
    }  # fmt: skip
    counted = [run for task in tasks if task.goal for _, run in task.runs]
    wins, command = len(_won(counted)), clean(compare.get("command") or "not recorded")
    tone = "good" if wins else "calm"
    scores = {task.name: task.score([run for _, run in task.runs]) or "no goal" for task in tasks}
    goals = {f"goal of {task.short}" if several else "goal": _goal(task.goal)[2] for task in tasks if task.goal}
    seconds, jobs = number(compare.get("seconds")), number(compare.get("jobs"))
    took = {"took": f"{_time(seconds)}, {_short(jobs)} runs at a time"} if seconds == seconds else {}
    sections = [
        *([_section("overview", "Overview", about, tables=[overview])] if several else []),
        *(one for task in tasks for one in _task_sections(folder, task, task.name if several else "", faults)),
        _section("runs", "Runs", tables=tables["runs"]),
        _section("setup", "Set-up", tables=tables["setup"], pairs=True),
        _section("again", "Run it again", commands={"The command that made this comparison": command}),
    ]
    return {
        "kind": "comparison",
        "name": clean(folder.resolve().name),
        "title": " · ".join(task.short for task in tasks) if several else tasks[0].name,
        "outcome": (tone, f"{wins} of {len(counted)}", "runs succeeded")
        if counted
        else ("calm", str(len(each)), "runs"),
        "facts": goals | took,
        "notices": [fault + f" ({n} runs)" * (n > 1) for fault, n in Counter(faults).most_common(20)],
        "cards": scores if several else {row.name: tasks[0].score(row.runs) or "no goal" for row in tasks[0].rows[:12]},
        "clock": None,
        "sections": sections,
        "command": command,
        "tasks": [task.name for task in tasks],
        "runs": _count(len(each), "run"),
    }
