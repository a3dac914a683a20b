"""What was read from the user's own files, on the page of a run."""

from __future__ import annotations

import os
from pathlib import Path

from .page_parts import PageSection, Table, make_table
from .read import as_mapping, read_mapping
from .text import short_number

MOST_LINES = 60
CLASSES_IN_LINES = 12  # more than these are shortened in the lines, and have a table


def data_sections(folder: Path, faults: list[str]) -> list[PageSection]:
    """The section on the data of a run; none if the run has no data.json.

    faults: gets a sentence if the file is damaged.
    """
    path = folder / "data.json"
    if not os.path.lexists(path):
        return []
    overview = read_mapping(path, faults)
    lines = overview.get("lines")
    rows = []
    for line in lines if isinstance(lines, list) else ():
        if isinstance(line, list) and len(line) == 2:
            rows.append(line)
    tables = [make_table("What was read", ["what", "value"], rows, "Nothing.", most=MOST_LINES)]
    return [PageSection("data", "Data", tables=[*tables, *class_tables(overview)])]


def class_tables(overview: dict[str, object]) -> list[Table]:
    """A folded table of the classes and their counts, if the lines do not show all of them."""
    classes = as_mapping(overview.get("classes"))
    if len(classes) <= CLASSES_IN_LINES:
        return []
    rows = [(label, short_number(count)) for label, count in classes.items()]
    return [make_table("Classes", ["class", "count"], rows, "", text=(0,), folded=True)]
