"""Reports: a run, comparison or diagnosis folder as one offline HTML page, or as Markdown.

read       what folders hold, however damaged
text       text and numbers made safe to show
curves     curves of many points made small
comparison methods on tasks, and the table that terminal, page and Markdown share
figures    figures of runs, and what draws those of comparisons (pages) and diagnoses (diagnostics)
pages      the page itself; page.html, page.css and page.js beside it
summary    the same in short, as Markdown
diagnoses  diagnoses written to a folder
"""

from __future__ import annotations

from .diagnoses import save
from .pages import write
from .read import read_rows
from .summary import markdown

__all__ = ["markdown", "read_rows", "save", "write"]
