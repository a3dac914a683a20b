"""The tables of tools/mutants.py fit the source, and what does not fit is named. The mutants themselves: `make mutants`."""

import pytest

import mutants

SOURCE = mutants.PROJECT / "src"


def test_every_row_of_the_tables_fits_the_source():
    assert mutants.stale(SOURCE) == []


@pytest.mark.parametrize(
    ("table", "row", "words"),
    [
        ("EQUIVALENT", {("losses.py", "skip-branch", "never written"): "why"}, "('losses.py', 'skip-branch', 'never"),
        ("EQUIVALENT", {("nowhere.py", "skip-branch", "x"): "why"}, "EQUIVALENT: nowhere.py is not in SCOPE"),
        ("SCOPE", {"layout.py": {"Nothing"}}, "SCOPE of layout.py: there is no Nothing"),
        ("SCOPE", {"nowhere.py": None}, "there is no nowhere.py"),
        ("OUTSIDE", {"penalties.py": "why"}, "penalties.py is in both SCOPE and OUTSIDE"),
        ("TESTS", {"cli.py": (("test_cli.py",), ())}, "TESTS: cli.py is not in SCOPE"),
        ("TESTS", {"nn.py": (("test_nothing.py",), ())}, "there is no test_nothing.py"),
        ("WORDING", {"no_such_function"}, "nothing is called no_such_function"),
        ("PAIRS", {frozenset({"apples", "pears"})}, "apples pears are nowhere side by side"),
    ],
)
def test_a_row_that_does_not_fit_is_named(table, row, words, monkeypatch):
    if table != "EQUIVALENT":
        monkeypatch.setattr(mutants, "EQUIVALENT", {})
    kept = {} if table == "EQUIVALENT" else getattr(mutants, table)
    monkeypatch.setattr(mutants, table, kept | row)
    (wrong,) = mutants.stale(SOURCE)
    assert words in wrong


def test_a_new_module_is_noticed(monkeypatch):
    monkeypatch.setattr(mutants, "EQUIVALENT", {})
    monkeypatch.setattr(mutants, "OUTSIDE", {f: why for f, why in mutants.OUTSIDE.items() if f != "cli.py"})
    assert mutants.stale(SOURCE) == ["cli.py is neither in SCOPE nor in OUTSIDE"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/ rows.B).square() >= 1e-20", "on = (scale(size, k[rows.B :])).square() >= 1e-20"),  # of omega-published
        ("min(max(off, -1.0), 1.0)", "self.gain * min(off, 1.0)"),  # the lower clip of a steered weight
    ],
)
def test_what_once_survived_is_among_the_mutants(before, after):
    made = mutants.mutants_of(SOURCE, "penalties.py")
    found = [m for m in made if before in m.removed and after in m.added]
    assert len(found) == 1
    assert str(found[0].text) != (SOURCE / "coadjoint" / "penalties.py").read_text()
