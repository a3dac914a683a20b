"""The tables of a comparison as Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import check_path
from .pages import comparison_page


def markdown(folder: str | Path) -> str:
    """The tables of a comparison in Markdown, with the command that made it and the time it took."""
    check_path("folder", folder)
    page = comparison_page(Path(folder))
    plain = lambda cell: " ".join((cell if isinstance(cell, str) else cell[0]).split()).replace(
        "|", "\\|"
    )
    line = lambda cells: f"| {' | '.join(map(plain, cells))} |"
    fence = "`" * max(
        3, 1 + max((len(run) for run in re.findall("`+", page["command"])), default=0)
    )
    parts = [f"{fence}console\n{page['command']}\n{fence}"]
    parts += [f"{page['runs']}; {page['facts']['took']}."] if "took" in page["facts"] else []
    for section in page["sections"]:
        for table in section["tables"] if section["id"].startswith(("overview", "results")) else ():
            rows = [
                line(table["head"]),
                line("---" for _ in table["head"]),
                *map(line, table["rows"]),
            ]
            parts += [f"### {section['title']}"] if len(page["tasks"]) > 1 else []
            parts += ["\n".join(rows)]
    return "\n\n".join(parts) + "\n"
