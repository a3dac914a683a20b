"""Paths of the project's folders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
TOOLS = ROOT / "tools"
DATA = TESTS / "data"
EXAMPLES = ROOT / "examples"
