"""Diagnoses written to a folder: numbers, arrays and charts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ...diagnostics.examination import DIAGNOSTICS, Compared, Examination, plot
from ...errors import MissingError, check_kind, check_path
from .. import files, json_rows


def save(
    folder: str | Path, found: Examination | Compared, about: Mapping[str, object] | None = None
) -> None:
    """Write a diagnosis to a folder.

    diagnostics.json holds the numbers and the charts (`co.report.write(folder)` makes a page of
    it), diagnostics.npz all arrays, without pickle. If matplotlib is installed, each chart is also
    written as a PNG. about: what the page says of the network and its data.
    """
    check_path("folder", folder)
    check_kind("found", found, (Examination, Compared), "the result of co.diagnostics.examine")
    folder = Path(folder)
    charts = found.charts()
    with files.storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(folder)
    heads, rows = found.table()
    content = {
        "format": 1,
        "about": dict(about or {}),
        "table": {"heads": heads, "rows": rows},
        "declined": found.declined,
        "charts": [{"id": name, **asdict(chart)} for name, chart in charts.items()],
    }
    files.replace(folder / "diagnostics.json", json_rows.dumps(content, indent=1))
    with files.replacing(folder / "diagnostics.npz") as file:
        np.savez_compressed(file, **found.arrays())  # type: ignore[arg-type]
    with files.storage_errors(folder):
        for name in DIAGNOSTICS:  # charts of an earlier diagnosis
            (folder / f"{name}.png").unlink(missing_ok=True)
    with contextlib.suppress(MissingError):  # without matplotlib there are no PNGs
        for name, chart in charts.items():
            with files.replacing(folder / f"{name}.png") as file:
                plot(chart).savefig(file, format="png", dpi=120)
