"""Every public name has an example, and every example of a docstring prints what it says.

Examples are complete: each imports what it uses, so that a reader can paste it.
"""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import coadjoint as co
from paths import ROOT

SOURCE = ROOT / "src"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def modules_with_examples() -> list[str]:
    paths = sorted((SOURCE / "coadjoint").rglob("*.py"))
    return [module_name(path) for path in paths if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_their_docstrings_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", co.__all__)
def test_every_public_name_has_an_example(name):
    assert ">>> " in (getattr(co, name).__doc__ or "")
