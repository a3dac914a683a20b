"""The source is written to be read: its densities stay within the limits set for the project.

`python tools/density.py` prints the figures by package. Line length, docstrings and assigned
lambdas are ruff's business; what ruff has no rule for is checked here.
"""

import ast

import pytest

import density

SOURCES = sorted(density.SOURCE.rglob("*.py"))
LIMITS = {"conditionals": 20, "comprehensions": 25, "tuples": 12}


@pytest.fixture(scope="module")
def total():
    return density.count_packages(density.SOURCE)["total"]


@pytest.mark.parametrize("construct", LIMITS)
def test_dense_constructs_stay_rare(total, construct):
    assert 1000 * total[construct] / total["lines"] <= LIMITS[construct]


def test_no_conditional_stands_inside_another(total):
    assert total["nested"] == 0


def test_a_comprehension_fits_on_one_line(total):
    assert total["tall"] == 0


def test_a_lambda_is_an_argument_and_has_no_name(total):
    assert total["named lambdas"] == 0


def test_long_lines_are_rare(total):
    assert total["long"] <= 0.01 * total["lines"]


def test_any_is_used_only_where_nothing_better_is_true(total):
    assert total["Any"] <= 150


def test_no_class_name_is_defined_twice():
    places = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(density.SOURCE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice
