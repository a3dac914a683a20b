"""The source stays in order.

Imports point only to packages that come earlier in the list, no file is too long to read, and only
one file uses private names of torch.
"""

from __future__ import annotations

import ast
import re

import imports
from paths import ROOT

LONGEST = 450  # lines of a file


def test_every_package_has_a_place_in_the_order():
    found = {imports.package_of(name) for name in imports.modules()} - {"", "__main__"}
    assert sorted(found - set(imports.ORDER)) == []


def test_imports_point_to_earlier_packages():
    wrong = imports.against_the_order(imports.edges())
    assert [f"{e.source}:{e.line} imports {e.name} of {e.target}" for e in wrong] == []


def test_modules_do_not_import_each_other_in_circles():
    found = imports.edges()
    assert imports.cycles(found, ("top",)) == []
    assert imports.cycles(found, ("top", "deferred")) == []


def test_imports_are_deferred_in_the_command_line_alone():
    """Elsewhere only optional packages are imported inside functions."""
    found = [
        e for e in imports.edges() if e.kind == "deferred" and imports.package_of(e.source) != "cli"
    ]
    assert [f"{e.source}:{e.line} imports {e.name} of {e.target}" for e in found if e.target] == []


def test_the_package_imports_itself_by_relative_paths():
    wrong = []
    for name, path in imports.modules().items():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"\s*(from|import) coadjoint\b", line):
                wrong.append(f"{name}:{number}")
    assert wrong == []


def test_no_file_is_longer_than_can_be_read():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in imports.modules().items()
    }
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_)\w"  # torch._C, torch.utils._pytree
    r"|\bfrom torch[\w.]* import .*\b_\w"
    r"|\bforward_ad\._"
    r"|\._(cdata|version|modules|parameters|buffers|compiled_call_impl|is_zerotensor)\b"
    r"|\"_(active_ddp_module|training_state|is_flat_param|unpadded_unsharded_size)\""
)


def test_private_names_of_torch_are_in_one_file():
    """torch changes them without notice: sweeps/torch_internals.py has a function and a test for
    each.
    """
    wrong = []
    for name, path in imports.modules().items():
        if name == "sweeps.torch_internals":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if PRIVATE.search(line):
                wrong.append(f"{name}:{number}: {line.strip()}")
    assert wrong == []


def test_every_jvp_waits_for_other_threads():
    """torch has one stack of forward-mode levels for all threads."""
    wrong = []
    for name, path in imports.modules().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            alone = "with forward_mode():" not in lines[number - 1]
            if re.search(r"\bfunc\.(jvp|jacfwd|hessian|linearize)\(", line) and alone:
                wrong.append(f"{name}:{number + 1}: {line.strip()}")
    assert wrong == []


def test_a_package_says_what_its_modules_hold():
    """The listing of the folder and the docstring of `__init__` tell the same."""
    wrong = []
    for name in imports.modules():
        package, _, module = name.rpartition(".")
        if not package:
            continue
        told = ast.get_docstring(
            ast.parse((imports.ROOT / package.replace(".", "/") / "__init__.py").read_text())
        )
        if not re.search(rf"\b{module}\b", told or ""):
            wrong.append(name)
    assert wrong == []


def test_the_drawing_of_the_packages_is_that_of_the_source():
    drawn = (ROOT / "docs" / "imports.svg").read_text(encoding="utf-8")
    assert drawn == imports.draw(imports.edges()), "python tools/imports.py --draw docs/imports.svg"
