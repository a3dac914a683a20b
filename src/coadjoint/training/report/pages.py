"""Write the report: one HTML page of a run, comparison, search or diagnosis, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from ...errors import MissingError, StorageError, check_path
from .. import files
from .comparison_page import comparison_page
from .diagnosis_page import diagnosis_page
from .page_parts import Page
from .run_page import run_page
from .study_page import study_page

RUN_FILES = ("metrics.jsonl", "result.json", "environment.json")


def write(folder: str | Path) -> Path:
    """Write report.html into a run folder, a compare folder or a folder with diagnostics.json.

    Returns its path. A folder that holds none of these is refused.
    """
    check_path("folder", folder)
    folder = Path(folder)
    report = folder / "report.html"
    files.replace(report, render(read_page(folder)).encode())
    return report


def read_page(folder: Path) -> Page:
    """The page of a folder, by the files that it holds.

    A run folder may hold diagnostics as well, so they are looked for last.
    """
    if (folder / "compare.json").is_file():
        return comparison_page(folder)
    if (folder / "tune.json").is_file():
        return study_page(folder)
    if any((folder / name).is_file() for name in RUN_FILES):
        return run_page(folder)
    if (folder / "diagnostics.json").is_file():
        return diagnosis_page(folder)
    raise StorageError(
        f"'{folder}' is neither a run folder (metrics.jsonl) nor a compare folder (compare.json). "
        "Give the folder that `coadjoint train` or `coadjoint compare` wrote."
    )


def render(page: Page) -> str:
    """The template with its style and script inside.

    The page's security policy names both by their hashes, so that nothing else can run.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingError("the report page needs Jinja2: pip install jinja2") from error
    template = read_asset("page.html")
    style = read_asset("page.css")
    script = read_asset("page.js")
    policy = (
        f"default-src 'none'; script-src {content_hash(script)}; "
        f"style-src {content_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    engine = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Markup is inserted as it is; everything else, which may be a stranger's text, is escaped
    trusted = {
        "style": Markup(style),
        "script": Markup(script),
        "data": Markup(script_data(page)),
    }
    return engine.from_string(template).render(vars(page), policy=policy, **trusted)


def read_asset(name: str) -> str:
    """The text of a file beside this one: page.html, page.css or page.js."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """The hash by which a security policy names a script or a style: 'sha256-...', quoted."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def script_data(page: Page) -> str:
    """What the script draws, as JSON that is safe inside a script element."""
    figures = {}
    for section in page.sections:
        for figure in section.ordered_figures:
            if not figure.empty:
                figures[figure.id] = figure.script_data()
    data = json.dumps(
        {"figures": figures, "clock": page.clock}, separators=(",", ":"), allow_nan=False
    )
    # "</script>" in a name would end the element. U+2028 and U+2029, which end a line of a script,
    # are not ASCII: json has escaped them
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data
