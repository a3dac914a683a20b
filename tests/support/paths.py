"""Paths of the project's folders, and how a test writes a file."""

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
