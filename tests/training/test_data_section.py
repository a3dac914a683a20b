"""data.json on the page of a run: it may be missing, damaged or a stranger's."""

import json

import pytest

from coadjoint.training.report.data_section import data_sections

LINES = [["data", "w.csv: 43 rows"], ["", "a hint"]]


def sections(folder, content):
    faults = []
    (folder / "data.json").write_text(content)
    return data_sections(folder, faults), faults


def test_the_lines_are_a_table(tmp_path):
    (section,), faults = sections(tmp_path, json.dumps({"lines": LINES, "classes": {"p": 3}}))
    assert faults == []
    (table,) = section.tables
    assert table.rows == LINES


def test_many_classes_have_a_folded_table(tmp_path):
    classes = {f"class {k}": 10 * k for k in range(200)}
    (section,), _ = sections(tmp_path, json.dumps({"lines": LINES, "classes": classes}))
    _, table = section.tables
    assert table.folded
    assert len(table.rows) == 200
    assert table.rows[3] == ["class 3", "30"]


def test_a_run_without_the_file_has_no_section(tmp_path):
    faults = []
    assert data_sections(tmp_path, faults) == []
    assert faults == []


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '"text"', "{}", '{"lines": 3, "classes": [1]}', '{"lines": [1, [], ["a"], null]}'],
)
def test_damage_is_no_error(content, tmp_path):
    (section,), faults = sections(tmp_path, content)
    assert all(table.rows == [] for table in section.tables)
    assert len(faults) == (content in ("{", "[]", '"text"'))


def test_what_it_holds_is_text(tmp_path):
    hostile = "\u202e<script>alert(1)</script>"
    (section,), _ = sections(tmp_path, json.dumps({"lines": [[hostile, {"a": [hostile]}]]}))
    (row,) = section.tables[0].rows
    assert all(isinstance(cell, str) for cell in row)  # which the template escapes
    assert "\u202e" not in "".join(row)
