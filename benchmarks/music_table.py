"""The tables and the figure of the kept rows of benchmarks/music.py, beside published figures.

tables(rows)       the two means; Table 4.1 of Galvan (2016); the chosen settings, and how plain and
                   penalised networks compare; all settings that were compared
write(rows, page)  put them into a page, between its marks
draw(rows, path)   the curves of the networks of Table 4.1, as Figure 4.1 has them
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from music import SETS, UNITS, Row, Run, best_tuned, run_of

# Galvan (2016), Table 4.1: (train, validation) by hidden units.
GALVAN = {50: (6.44, 6.20), 100: (6.53, 6.10), 200: (6.58, 6.03), 300: (6.82, 6.21)}
# Pascanu, Mikolov and Bengio (2013), Table 1: test, SGD with clipping; the same with Omega.
PASCANU = {"Piano-midi": (7.53, 7.46), "Nottingham": (3.48, 3.36), "MuseData": (7.00, 6.97)}
RATES = {1e-3: "step size 1e-3, as printed", 0.1: "step size 0.1"}
METHODS = ("plain", "penalised")
SPLITS = ("train", "valid", "test")


def figures(row: Row, name: str) -> dict[str, float]:
    """The figures of a row by split: those of "nll" or "nll by piece"."""
    values = row[name]
    assert isinstance(values, dict)
    return values


def line(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [line(*cells), "|---" * len(cells) + "|"]


def tables(rows: list[Row]) -> dict[str, str]:
    """The Markdown of each table by its name."""
    made = {
        "means": means_table(rows),
        "published": published_table(rows),
        "final": final_table(rows),
        "methods": methods_table(rows),
        "tuning": tuning_table(rows),
    }
    return {name: "\n".join(lines) for name, lines in made.items()}


def write(rows: list[Row], page: Path) -> None:
    """Put each table between the marks that a page has for it."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables(rows).items():
        begin, end = f"<!-- music: {name} -->\n", "<!-- music: end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        if not after:
            raise SystemExit(f"{page} has no {begin.strip()} with {end} behind it.")
        text = f"{before}{begin}{table}\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def means_table(rows: list[Row]) -> list[str]:
    """By how much the mean over all steps is above that over pieces: the range over all splits."""
    lines = head("set", "runs", "mean over all steps - mean over pieces")
    for data in SETS:
        of_set = [row for row in rows if run_of(row).data == data]
        above = []
        for row in of_set:
            by_step, by_piece = figures(row, "nll"), figures(row, "nll by piece")
            above += [by_step[split] - by_piece[split] for split in SPLITS]
        if above:
            lines.append(line(data, len(of_set), f"{min(above):.2f} to {max(above):.2f}"))
    return lines


def table_rows(rows: list[Row]) -> dict[tuple[int, float], Row]:
    """The rows of part "table" by units and step size."""
    runs = [(run_of(row), row) for row in rows]
    return {(run.units, run.rate): row for run, row in runs if run.part == "table"}


def published_table(rows: list[Row]) -> list[str]:
    """Table 4.1: published and ours; the means over pieces, then those over all steps."""
    lines = head(
        "units", "", "epochs (best)", "train", "valid", "test", "over all steps: train, valid, test"
    )
    found = table_rows(rows)
    for units in UNITS:
        train, valid = GALVAN[units]
        lines.append(line(units, "published", "", f"{train:.2f}", f"{valid:.2f}", "", ""))
        for rate, name in RATES.items():
            row = found.get((units, rate))
            if row is None:
                continue
            by_piece, by_step = figures(row, "nll by piece"), figures(row, "nll")
            cells = [f"{by_piece[split]:.2f}" for split in SPLITS]
            pooled = ", ".join(f"{by_step[split]:.2f}" for split in SPLITS)
            epochs = f"{float(str(row['epochs'])):.0f} ({float(str(row['best epoch'])):.0f})"
            lines.append(line(units, name, epochs, *cells, pooled))
    return lines


def describe(run: Run) -> str:
    """What a setting changes: units, step size, and what is not left out."""
    words = [f"{run.units} units", f"{run.rate:g}"]
    if run.dropout:
        words.append(f"dropout {run.dropout:g}")
    if run.noise:
        words.append(f"weight noise {run.noise:g}")
    if run.penalty:
        falling = ", falling" if run.falls else ""
        words.append(f"`{run.penalty}` {run.weight:g}{falling}")
    return ", ".join(words)


def spread(values: list[float]) -> str:
    """The mean, and the range in brackets if there are several values."""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} - {max(values):.2f})"


def final_table(rows: list[Row]) -> list[str]:
    """The chosen setting of each set and method: the run that chose it, and those of `final`."""
    lines = head("set", "method", "setting", "seed", "epochs", *SPLITS, "published test")
    for data in SETS:
        for k, method in enumerate(METHODS):
            published = f"{PASCANU[data][k]:.2f}" if data in PASCANU else "none"
            chosen = best_tuned(rows, data, method)
            if chosen is None:
                lines.append(line(data, method, "not run", *[""] * 5, published))
                continue
            setting = describe(run_of(chosen))
            reported = final_rows(rows, chosen)
            for kept in (part for part in ([chosen], reported) if part):
                cells = final_cells(kept)
                lines.append(line(data, method, setting, *cells, published))
    return lines


def final_cells(kept: list[Row]) -> list[str]:
    """Seeds, epochs and figures of runs with one setting; a star for those that the time ended."""
    seeds = sorted(run_of(row).seed for row in kept)
    names = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    epochs = statistics.median(float(str(row["epochs"])) for row in kept)
    mark = "*" if any(row["status"] == "time" for row in kept) else ""
    values = [spread([figures(row, "nll")[split] for row in kept]) for split in SPLITS]
    return [names, f"{epochs:.0f}{mark}", *values]


def final_rows(rows: list[Row], chosen: Row) -> list[Row]:
    """The runs with other seeds of the chosen setting."""
    setting = run_of(chosen)
    found = []
    for row in rows:
        run = run_of(row)
        if run == replace(setting, part="final", seed=run.seed):
            found.append(row)
    return found


def methods_table(rows: list[Row]) -> list[str]:
    """How many settings each method was given, and the ranges of the chosen one's seeds."""
    lines = head(
        "set", "method", "settings", "best epochs", "valid, seed 0", "valid, others", "test, others"
    )
    for data in SETS:
        for method in METHODS:
            tuned = [run for run in map(run_of, rows) if run.part == "tune"]
            settings = sum((run.data, run.method) == (data, method) for run in tuned)
            chosen = best_tuned(rows, data, method)
            if chosen is None:
                continue
            others = final_rows(rows, chosen)
            epochs = sorted(round(float(str(row["best epoch"]))) for row in others)
            names = f"{', '.join(map(str, epochs))} of {run_of(chosen).epochs}"
            own = f"{figures(chosen, 'nll')['valid']:.4f}"
            ranges = [limits(others, split) for split in ("valid", "test")]
            lines.append(line(data, method, settings, names, own, *ranges))
    return lines


def limits(rows: list[Row], split: str) -> str:
    """The least and the largest of the rows' means over all steps."""
    values = [figures(row, "nll")[split] for row in rows]
    return f"{min(values):.4f} - {max(values):.4f}" if values else ""


def tuning_table(rows: list[Row]) -> list[str]:
    """Validation of every setting that was compared, one column for each set."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        run = run_of(row)
        if run.part != "tune":
            continue
        mark = "*" if row["status"] == "time" else ""
        found.setdefault(describe(run), {})[run.data] = f"{figures(row, 'nll')['valid']:.2f}{mark}"
    lines = head("setting", *SETS)
    for setting in sorted(found, key=lambda text: ("`" in text, text)):
        lines.append(line(setting, *(found[setting].get(data, "") for data in SETS)))
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """One panel for each number of units: training and validation by epoch, published values."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "coadjoint", "font.size": 9})
    found = table_rows(rows)
    figure, panels = plt.subplots(1, len(UNITS), figsize=(11, 3.2), sharey=True)
    for panel, units in zip(panels, UNITS, strict=True):
        for rate, colour in zip(RATES, ("tab:blue", "tab:orange"), strict=True):
            row = found.get((units, rate))
            if row is not None:
                draw_curves(panel, row, rate, colour)
        train, valid = GALVAN[units]
        panel.axhline(train, color="grey", linewidth=1, linestyle="--", label="published train")
        panel.axhline(valid, color="grey", linewidth=1, label="published valid")
        panel.set(title=f"{units} units", xlabel="epoch", xscale="log", ylim=(5.8, 14))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("nats per step, mean over pieces")
    panels[-1].legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # matplotlib leaves blanks at the ends of lines
    lines = [text.rstrip() for text in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_curves(panel, row: Row, rate: float, colour: str) -> None:  # type: ignore[no-untyped-def]
    """Training (dashed) and validation of one run, with a star at the epoch of the tables."""
    curve = row["curve"]
    assert isinstance(curve, dict)
    valid = curve["valid by piece"]
    epochs = range(1, len(valid) + 1)
    panel.plot(epochs, curve["train"], "--", color=colour, linewidth=1, label=f"train, {rate:g}")
    panel.plot(epochs, valid, color=colour, linewidth=1, label=f"valid, {rate:g}")
    best = round(float(str(row["best epoch"])))  # by the mean over all steps
    panel.plot([best], [valid[best - 1]], "*", color=colour)
