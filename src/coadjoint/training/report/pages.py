"""Report: a run folder, a folder of compared runs or of diagnostics -> one page of HTML that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ...errors import MissingError, StorageError, check_path
from .. import files
from .comparison import PAGE, Comparison, TaskRows, success_share, successful_runs
from .curves import json_numbers, thinned_indices
from .figures import chart_figure, dot_figure, line_figure, run_figures
from .read import (
    RunRecord,
    as_mapping,
    as_mappings,
    describe_outcome,
    folder_within,
    held_out_curve,
    read_mapping,
    read_run,
)
from .text import (
    SHARE_METRICS,
    Row,
    clean,
    duration,
    finite_or_nan,
    finite_values,
    metric_stem,
    parse_goal,
    plural,
    short_number,
)

MAX_COLOURS = 14  # curves that colours and dashes can tell apart


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
    page = _render((comparison_page if compared else _run_page if run else _diagnosis_page)(folder))
    files.replace(folder / "report.html", page.encode())
    return folder / "report.html"


def _render(page: Row) -> str:
    """The template with its style and script inside, both named by hash in the page's security policy."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingError("the report page needs Jinja2: pip install jinja2") from error
    template, style, script = (
        (Path(__file__).parent / f"page{s}").read_text(encoding="utf-8")
        for s in (".html", ".css", ".js")
    )
    figures = {
        f["id"]: f for section in page["sections"] for f in section["figures"] if not f["empty"]
    }
    data = json.dumps(
        {"figures": figures, "clock": page["clock"]}, separators=(",", ":"), allow_nan=False
    )
    for character in "<>&":  # U+2028 and U+2029 are not ASCII: json has escaped them
        data = data.replace(character, f"\\u{ord(character):04x}")
    sha = lambda text: (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
    policy = f"default-src 'none'; script-src {sha(script)}; style-src {sha(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    engine = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    trusted = {"style": Markup(style), "script": Markup(script), "data": Markup(data)}
    return engine.from_string(template).render(page, policy=policy, **trusted)


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


def _flatten(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and text."""
    if isinstance(value, dict) and (value or not depth) and depth < 8:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key), depth + 1)
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else clean(value)


def _describe_settings(section: object) -> str:
    """{"name": "temporal-order", "length": 100} -> "temporal-order, length 100"."""
    if not isinstance(section, dict):
        return clean(section or "")
    words_of = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in section.items()}
    lead = next(
        (k for k in ("name", "method", "kind", "cell", "path") if isinstance(words_of.get(k), str)),
        "",
    )
    words = [
        k if v is True else f"{k} {v}"
        for k, v in words_of.items()
        if k != lead and isinstance(v, str | int | float)
    ]
    rest = [word for word in words if not word.endswith(" False")]
    return clean(", ".join(([words_of[lead]] if lead else []) + rest[:8]))


def _cards(run: RunRecord) -> Row:
    """The key figures, without those that are not there."""
    result, metric = run.result, parse_goal(run.result.get("goal"))[0]
    splits = as_mapping(result.get("metrics")).items()
    final = [
        (name != metric, name, split, value)
        for split, of in splits
        for name, value in as_mapping(of).items()
    ]
    ends: Callable[..., list[float]] = lambda *key: (
        list(run.store.curve(*key)[2][[0, -1]]) if key in run.store else []
    )
    change = lambda key: " → ".join(short_number(v, 3) for v in ends("probe", key) if v == v)
    cards = {
        "steps": short_number(result.get("step") or run.last_step),
        "time": duration(result.get("seconds") or [None, *ends("clock", "seconds")][-1]),
        **{
            clean(f"{name} ({split})"): short_number(x)
            for _, name, split, x in sorted(final, key=lambda f: f[0])[:6]
        },
        "parameters": short_number(result.get("parameters")),
        "best step": short_number(result.get("best_step")),
        "decay, first → last": change("decay"),
        "spectral radius, first → last": change("radius"),
        "steps clipped": f"{run.clipped_share:.1%}" if run.clipped_share else "",
    }
    return {name: value for name, value in cards.items() if value not in ("", "–")}


def _run_tables(run: RunRecord) -> tuple[Row, Row]:
    """Held-out values at up to 40 steps, and examples."""
    stems = dict.fromkeys(metric_stem(key[2]) for key in run.store if key[0] == "held-out")
    values = {
        name: dict(zip(x, y, strict=True)) for stem in stems for name, x, y in run.held_out(stem)
    }
    grid = sorted({step for column in values.values() for step in column})
    grid = [
        grid[k] for k in np.unique(np.linspace(0, len(grid) - 1, min(40, len(grid))).astype(int))
    ]
    held = (
        [short_number(step), *(short_number(column.get(step)) for column in values.values())]
        for step in grid
    )
    examples = as_mappings(run.result.get("examples"))
    keys = list(dict.fromkeys(key for example in examples for key in example))[:8]
    mark = lambda v: ("✓ yes" if v else "✗ no") if isinstance(v, bool) else v
    shown = ([mark(example.get(key)) for key in keys] for example in examples)
    return (
        _table("Held-out values", ["step", *values], held, "Nothing was evaluated on held-out sequences.", text=(), folded=True),
        _table("Held-out sequences", keys, shown, "No examples were recorded.", text=range(8), most=50),
    )  # fmt: skip


def _run_page(folder: Path) -> Row:
    run, name = read_run(folder), folder.resolve().name
    config, environment = run.config, run.environment
    (training, inside), (held_out, examples) = run_figures(run), _run_tables(run)
    _, steps, seconds = run.store.curve("clock", "seconds")
    at = thinned_indices(seconds, 600)
    facts = {
        "method": _describe_settings(config.get("gradient")),
        "network": _describe_settings(config.get("network")),
        "optimiser": _describe_settings(config.get("optimiser")),
        "seed": clean(environment.get("seed", "")),
        "started": clean(environment.get("started") or ""),
    }
    again = {
        "The command that made this run": clean(environment.get("command") or "not recorded"),
        "Go on from the last checkpoint, in the folder that holds this one": clean(f"coadjoint resume {shlex.quote(name)}"),
    }  # fmt: skip
    setup = [
        _table(
            "Configuration",
            ["setting", "value"],
            _flatten(config),
            "No config.yaml: the run was started from Python.",
        ),
        _table(
            "Environment", ["what", "value"], _flatten(environment), "There is no environment.json."
        ),
    ]
    costates = "λₜ = ∂L/∂xₜ are the costates: the error signal at time t of a sequence."
    return {
        "kind": "run",
        "name": clean(name),
        "title": _describe_settings(config.get("task") or config.get("data")) or clean(name),
        "outcome": describe_outcome(run.result, run.last_step),
        "facts": {k: v for k, v in facts.items() if v},
        "notices": run.faults,
        "cards": _cards(run),
        "clock": {"steps": json_numbers(steps[at], 12), "seconds": json_numbers(seconds[at])}
        if len(at)
        else None,
        "sections": [
            _section("training", "Training", figures=training, tables=[held_out]),
            _section("inside", "Inside the gradient", costates, inside),
            *_diagnosis_sections(folder / "diagnostics", run.faults)[1],
            _section("examples", "Example predictions", tables=[examples]),
            _section("setup", "Set-up", tables=setup, pairs=True),
            _section("again", "Run it again", commands=again),
        ],
    }


def _diagnosis_sections(folder: Path, faults: list[str]) -> tuple[Row, list[Row]]:
    """What diagnostics.json says, and its section; none where there is no such file."""
    found = read_mapping(folder / "diagnostics.json", faults)
    if not found:
        return {}, []
    about, table = as_mapping(found.get("about")), as_mapping(found.get("table"))
    texts = lambda v: [clean(one) for one in v][:60] if isinstance(v, list) else []
    heads = texts(table.get("heads"))
    rows = (
        [row for r in table.get("rows") or () if len(row := texts(r)) == len(heads)]
        if heads
        else []
    )
    words = {i for i, head in enumerate(heads) if head in ("figure", "unit", "what it says")}
    declined = list(as_mapping(found.get("declined")).items())
    tables = [_table("Figures", heads, rows, "No figures were recorded.", text=words)]
    if declined:
        tables.append(
            _table("Not for this network", ["diagnostic", "why"], declined, "", folded=True)
        )
    lead = "; ".join(clean(about[key]) for key in ("weights", "sequences") if about.get(key))
    drawn = [
        chart_figure(chart, k) for k, chart in enumerate(as_mappings(found.get("charts"))[:40])
    ]
    return found, [_section("diagnostics", "Diagnostics", lead, drawn, tables)]


def _diagnosis_page(folder: Path) -> Row:
    """A page of diagnostics alone."""
    faults: list[str] = []
    found, sections = _diagnosis_sections(folder, faults)
    if not found:
        why = " ".join(faults)
        raise StorageError(
            f"'{folder / 'diagnostics.json'}' holds no diagnostics. {why} Run `coadjoint diagnose` again."
        )
    about = as_mapping(found.get("about"))
    facts = {"network": _describe_settings(about.get("network")), "seed": clean(about.get("seed"))}
    table = sections[0]["tables"][0]
    single = table["head"][:3] == ["figure", "value", "unit"]
    command = clean(about.get("command") or "not recorded")
    return {
        "kind": "diagnosis",
        "name": clean(folder.resolve().name),
        "title": _describe_settings(about.get("task")) or clean(folder.resolve().name),
        "outcome": (
            "calm",
            clean(about.get("sequences") or "Diagnostics"),
            clean(about.get("weights") or ""),
        ),
        "facts": facts,
        "notices": faults,
        "cards": {row[0]: f"{row[1]} {row[2]}" for row in table["rows"][:8]} if single else {},
        "clock": None,
        "sections": [
            *sections,
            _section(
                "again", "Run it again", commands={"The command that made this page": command}
            ),
        ],
    }


def _task_sections(folder: Path, task: TaskRows, title: str, faults: list[str]) -> list[Row]:
    """The table of a task, and its figures."""
    metric, threshold, goal = task.metric, *parse_goal(task.goal)[1:]
    curves, colours = [], []
    for k, run in task.runs:
        if path := folder_within(folder, run):
            metric, (_, steps, values) = held_out_curve(path, metric, faults)
            curves.append((f"{task.rows[k].name}, seed {clean(run.get('seed'))}", steps, values))
            colours.append(k)
    names, measure, every = (
        [row.name for row in task.rows],
        clean(metric or "metric"),
        [run for _, run in task.runs],
    )
    head, results = task.table(PAGE, metric)
    longest = max(finite_values(every, "steps"), default=0.0)
    rules: Row = (
        {"rules": [{"x": threshold, "y": threshold, "label": f"goal: {goal}"}]}
        if threshold == threshold
        else {}
    )
    span = {"span": [0, 1]} if metric_stem(metric) in SHARE_METRICS else {"log": None}
    steps_of = [
        (k, run, finite_or_nan(run.get("steps")) if run.get("success") is True else math.nan)
        for k, run in task.runs
    ]
    final_of = [(k, run, finite_or_nan(run.get("metric"))) for k, run in task.runs]
    many = (
        f"{len(names)} rows are more than colours can tell apart: each run has a page of its own."
    )
    few, none = len(names) <= MAX_COLOURS, "The run folders hold no held-out values."
    success = [
        dot_figure(f"steps{task.id_suffix}", "Steps to success, seed by seed", "steps to success", names, steps_of, "no success"),
        line_figure(f"share{task.id_suffix}", "Success over steps", "share of the seeds that have succeeded by then", "share of seeds",
               [success_share(row.name, row.runs, longest) for row in task.rows if row.runs and few], span=[0, 1], stairs=True,
               none="No runs." if few else many),
        line_figure(f"curves{task.id_suffix}", f"Held-out {measure} of every run", "coloured by row of the table", measure, curves if few else [],
               colours=colours, rows=names, none=none if few else many, **span, **rules),
        dot_figure(f"final{task.id_suffix}", f"Final {measure}, seed by seed", f"final {measure}", names, final_of, "no value", **rules),
    ]  # fmt: skip
    lead = "Median, and range in brackets. Steps and time are those of the runs that succeeded."
    results_table = _table("Results", head, results, "This comparison holds no rows.", text=(0,))
    drawn = success if task.goal else success[2:]
    return [
        _section(f"results{task.id_suffix}", title or "Side by side", lead, tables=[results_table]),
        _section(f"success{task.id_suffix}", "" if title else "Success", figures=drawn),
    ]


def comparison_page(folder: Path) -> Row:
    faults: list[str] = []
    comparison = Comparison.read(folder, faults)
    compare, tasks = comparison.about, comparison.tasks
    several = len(tasks) > 1
    each, failures = [], []
    for task in tasks:
        for k, run in task.runs:
            path = folder_within(folder, run)
            page = path / "report.html" if path else folder
            link = (
                "./" + quote(page.relative_to(folder.resolve()).as_posix())
                if page.is_file()
                else ""
            )
            label = (
                f"{task.name}: " * several + f"{task.rows[k].name}, seed {clean(run.get('seed'))}"
            )
            told = (
                short_number(run.get("steps")),
                duration(run.get("seconds")),
                short_number(run.get("metric")),
            )
            each.append([(label, link) if link else label, run.get("status"), *told])
            if run.get("error") or run.get("status") == "failed":
                failures.append(
                    [label, run.get("status"), run.get("error") or "no reason was recorded"]
                )
    names = list(dict.fromkeys(row.name for task in tasks for row in task.rows))
    matrix = ([name, *(task.summary_cell(name) for task in tasks)] for name in names)
    about = "The runs that succeeded, where a task has a goal, and the median of its metric."
    overview = _table(
        "All tasks", ["name", *(task.short_name for task in tasks)], matrix, "No rows.", text=(0,)
    )
    rows_of = ((row.settings, row.name) for task in tasks for row in task.rows)
    settled = [*((value, key) for key, value in as_mapping(compare.get("tasks")).items()), *rows_of]
    pairs = dict.fromkeys(
        pair for chosen, name in settled if chosen for pair in _flatten(chosen, clean(name))
    )
    tables = {
        "runs": [
            _table("Failures", ["run", "outcome", "reason"], failures, "No run failed.", text=range(3), most=200),
            _table("Every run", ["run", "outcome", "steps", "time", "final metric"], each, "No runs.", most=2000, folded=len(each) > 12),
        ],
        "setup": [
            _table("Settings", ["setting", "value"], pairs, "No settings were recorded.", folded=len(pairs) > 40),
            _table("Environment", ["what", "value"], _flatten(as_mapping(compare.get("environment"))), "No environment was recorded."),
        ],
    }  # fmt: skip
    counted = [run for task in tasks if task.goal for _, run in task.runs]
    wins, command = len(successful_runs(counted)), clean(compare.get("command") or "not recorded")
    tone = "good" if wins else "calm"
    scores = {task.name: task.score([run for _, run in task.runs]) for task in tasks}
    goals = {
        f"goal of {task.short_name}" if several else "goal": parse_goal(task.goal)[2]
        for task in tasks
        if task.goal
    }
    seconds, jobs = finite_or_nan(compare.get("seconds")), finite_or_nan(compare.get("jobs"))
    took = (
        {"took": f"{duration(seconds)}, {short_number(jobs)} runs at a time"}
        if seconds == seconds
        else {}
    )
    sections = [
        *([_section("overview", "Overview", about, tables=[overview])] if several else []),
        *(
            one
            for task in tasks
            for one in _task_sections(folder, task, task.name if several else "", faults)
        ),
        _section("runs", "Runs", tables=tables["runs"]),
        _section("setup", "Set-up", tables=tables["setup"], pairs=True),
        _section(
            "again", "Run it again", commands={"The command that made this comparison": command}
        ),
    ]
    return {
        "kind": "comparison",
        "name": clean(folder.resolve().name),
        "title": " · ".join(task.short_name for task in tasks) if several else tasks[0].name,
        "outcome": (tone, f"{wins} of {len(counted)}", "runs succeeded")
        if counted
        else ("calm", str(len(each)), "runs"),
        "facts": goals | took,
        "notices": [
            fault + f" ({n} runs)" * (n > 1) for fault, n in Counter(faults).most_common(20)
        ],
        "cards": scores
        if several
        else {row.name: tasks[0].score(row.runs) for row in tasks[0].rows[:12]},
        "clock": None,
        "sections": sections,
        "command": command,
        "tasks": [task.name for task in tasks],
        "runs": plural(len(each), "run"),
    }
