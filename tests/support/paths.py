"""Paths of the project's folders, and how a test reads its tables and writes a file."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
TOOLS = ROOT / "tools"
DATA = TESTS / "data"
EXAMPLES = ROOT / "examples"


def put(folder, name, content):
    """Write text or bytes to a file, and return its path."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read_table(test, name):
    """The rows of data/name beside the file of a test: its cases, where there are many."""
    return json.loads((Path(test).parent / "data" / name).read_text(encoding="utf-8"))
