"""The tables of tools/mutants.py fit the source, and a row that does not fit is named.

The mutants themselves run in `make mutants`.
"""

import pytest

import mutants

SOURCE = mutants.PROJECT / "src"


def test_every_row_of_the_tables_fits_the_source():
    assert mutants.stale(SOURCE) == []


@pytest.mark.parametrize(
    ("table", "row", "words"),
    [
        (
            "EQUIVALENT",
            {("sweeps/rows.py", "skip-branch", "never written"): "why"},
            "('sweeps/rows.py', 'skip-branch',",
        ),
        (
            "EQUIVALENT",
            {("nowhere.py", "skip-branch", "x"): "why"},
            "EQUIVALENT: nowhere.py is not mutated",
        ),
        (
            "PARTS",
            {"sweeps/layout.py": {"Nothing"}},
            "PARTS of sweeps/layout.py: there is no Nothing",
        ),
        ("OUTSIDE", {"nowhere.py": "why"}, "OUTSIDE: there is no nowhere.py"),
        ("OUTSIDE", {"nowhere/": "why"}, "OUTSIDE: there is no nowhere/"),
        ("WEIGHT", {"cli/build.py": 2}, "WEIGHT: cli/build.py is not mutated"),
        (
            "TESTS",
            {"cli/build.py": (("cli/test_cli.py",), ())},
            "TESTS: cli/build.py is not mutated",
        ),
        ("TESTS", {"nn/": (("nn/test_nothing.py",), ())}, "there is no tests/nn/test_nothing.py"),
        ("WORDING", {"no_such_function"}, "nothing is called no_such_function"),
        ("PAIRS", {frozenset({"apples", "pears"})}, "apples pears are nowhere side by side"),
    ],
)
def test_a_row_that_does_not_fit_is_named(table, row, words, monkeypatch):
    monkeypatch.setattr(mutants.tables, "EQUIVALENT", {})
    monkeypatch.setattr(mutants.tables, table, getattr(mutants.tables, table) | row)
    (wrong,) = mutants.stale(SOURCE)
    assert words in wrong


def test_code_that_only_a_type_checker_reads_is_not_mutated(tmp_path):
    text = "if TYPE_CHECKING:\n    x = 1 + 2\nelse:\n    y = 3 + 4\nif a:\n    z()\n"
    (tmp_path / "coadjoint").mkdir()
    (tmp_path / "coadjoint" / "file.py").write_text(text)
    lines = {m.line for m in mutants.mutants_of(tmp_path, "file.py")}
    assert lines == {4, 5, 6}


def test_a_module_without_tests_is_noticed(monkeypatch):
    monkeypatch.setattr(mutants.tables, "EQUIVALENT", {})
    monkeypatch.setattr(
        mutants.tables,
        "TESTS",
        {f: row for f, row in mutants.tables.TESTS.items() if f != "diagnostics/"},
    )
    assert "TESTS: diagnostics/units.py has no tests" in mutants.stale(SOURCE)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        (
            "objectives/penalties.py",
            "/ B).square() >= 1e-20",
            "counts = (scale(size, lam.powers[B:])).square() >= 1e-20",
        ),  # of omega-published
        (
            "objectives/weights.py",
            "min(max(log_excess, -1.0), 1.0)",
            "clipped = min(log_excess, 1.0)",
        ),  # the lower clip of a steered weight
    ],
)
def test_mutants_that_once_survived_are_in_the_list(file, before, after):
    made = mutants.mutants_of(SOURCE, file)
    found = [m for m in made if before in m.removed and after in m.added]
    assert len(found) == 1
    assert str(found[0].text) != (SOURCE / "coadjoint" / file).read_text()
