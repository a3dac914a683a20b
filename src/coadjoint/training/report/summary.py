"""The tables of a comparison as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import check_path
from .comparison import Comparison
from .comparison_page import command_of, comparison_page
from .page_parts import Cell, Table
from .text import plural


def markdown(folder: str | Path) -> str:
    """The tables of a comparison in Markdown, after its command and the time it took."""
    check_path("folder", folder)
    folder = Path(folder)
    page = comparison_page(folder)
    comparison = Comparison.read(folder, [])
    command = command_of(comparison)
    fence = code_fence(command)
    parts = [f"{fence}console\n{command}\n{fence}"]
    if "took" in page.facts:
        runs = sum(len(task.runs) for task in comparison.tasks)
        parts.append(f"{plural(runs, 'run')}; {page.facts['took']}.")
    for section in page.sections:  # of figures, runs and setup only the page tells
        if not section.id.startswith(("overview", "results")):
            continue
        for table in section.tables:
            if len(comparison.tasks) > 1:
                parts.append(f"### {section.title}")
            parts.append(markdown_table(table))
    return "\n\n".join(parts) + "\n"


def code_fence(text: str) -> str:
    """Backticks that end no sooner than the text does: one more than it holds in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)


def markdown_table(table: Table) -> str:
    """A table of the page in Markdown, without its links."""
    rule = ["---"] * len(table.head)
    lines = [markdown_line(table.head), markdown_line(rule), *map(markdown_line, table.rows)]
    return "\n".join(lines)


def markdown_line(cells: Iterable[Cell]) -> str:
    """One row of a table in Markdown; line breaks and bars in cells would end them."""
    texts = []
    for cell in cells:
        text = cell if isinstance(cell, str) else cell[0]
        texts.append(" ".join(text.split()).replace("|", "\\|"))
    return f"| {' | '.join(texts)} |"
