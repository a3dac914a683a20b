"""Rows that a prediction is asked for keep the numbers and the order of their file."""

import numpy as np
import pytest

from coadjoint.tasks.asked import find_asked_rows
from coadjoint.tasks.cutting import cut_for_prediction
from coadjoint.tasks.files.kept import Column, with_types
from coadjoint.tasks.files.sheet import Sheet, number_rows
from coadjoint.tasks.filling import fill_for_prediction

NAN = float("nan")


def sheet(u, lengths, rows=None, **more):
    """A sheet of one feature, whose sequences are called a, b, ..."""
    values = np.array(u, dtype=float)[:, None]
    return Sheet(
        "d.csv",
        "",
        ("u",),
        values,
        np.array(lengths),
        list("abcdef"[: len(lengths)]),
        lambda line, column: f"d.csv:{line}",
        np.arange(len(values)),
        rows=None if rows is None else np.array(rows),
        columns={"id": "who", "time": ""},
        **more,
    )


def test_lines_in_any_order_give_the_numbers_of_rows():
    assert number_rows(np.array([9, 2, 3, 7])).tolist() == [3, 0, 1, 2]
    assert number_rows(np.array([2, 2, 5])).tolist() == [0, 0, 1]  # steps of a wide table


def test_rows_of_a_sheet_survive_what_is_left_out():
    whole = sheet([1, 2, 3, 4, 5], [2, 3], [4, 1, 0, 3, 2])
    part = whole.take(np.array([True, False, True, False, True]))
    assert part.input_rows.tolist() == [4, 0, 2]
    arrays = sheet([1, 2, 3, 4, 5], [2, 3])
    assert arrays.take_whole(np.array([False, True])).input_rows.tolist() == [1, 1, 1]


def test_rows_that_were_sorted_come_in_the_order_of_the_file():
    # Rows 4, 1 of the file are sequence a, and rows 0, 3, 2 are b; row 3 lacks its value.
    whole = sheet([1, 2, 3, NAN, 5], [2, 3], [4, 1, 0, 3, 2])
    filled, kept = fill_for_prediction(whole, "drop", "refuse")
    cut = cut_for_prediction(filled, "every", 2)
    asked = find_asked_rows(whole, kept, cut, "every")
    assert asked.row.tolist() == [0, 1, 2, 3, 4]
    assert asked.ids == ["b", "a", "b", "b", "a"]
    assert asked.step is None
    # The rows that are read are 4, 1, 0, 2.
    assert asked.place.tolist() == [4, 1, 0, 2]
    last = find_asked_rows(whole, kept, cut_for_prediction(filled, "last", None), "last")
    assert (last.row.tolist(), last.ids, last.place.tolist()) == ([1, 2], ["a", "b"], [0, 1])


@pytest.mark.parametrize(("window", "ends"), [(None, [7]), (3, [3, 6, 7]), (7, [7]), (9, [7])])
def test_windows_end_with_the_sequence(window, ends):
    cut = cut_for_prediction(sheet(range(7), [7]), "last", window)
    assert [piece.stop for piece in cut.pieces] == ends
    widths = {piece.stop - piece.start for piece in cut.pieces}
    assert widths == {min(window or 7, 7)}
    assert bool(cut.notes) == (len(ends) > 1)


def test_steps_of_arrays_are_numbered():
    whole = sheet([1, 2, NAN, 4], [3, 1])
    filled, kept = fill_for_prediction(whole, "ffill", "refuse")
    assert filled.u[:, 0].tolist() == [1, 2, 2, 4]
    asked = find_asked_rows(whole, kept, cut_for_prediction(filled, "every", None), "every")
    assert asked.row.tolist() == [0, 0, 0, 1]
    assert asked.step.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "-2", ""], [1, -2, None]),
        (["1", " 2.5", "1e3"], [1.0, 2.5, 1000.0]),
        (["007", "8"], ["007", "8"]),
        (["1", "x"], ["1", "x"]),
        (["-", "1"], ["-", "1"]),
        (["", None], ["", None]),
        ([None, "3"], [None, 3]),
        ([True, None], [True, None]),
    ],
)
def test_texts_that_are_numbers_get_their_type(cells, values):
    typed = with_types(Column("c", cells)).values
    assert list(typed) == values
    assert list(map(type, typed)) == list(map(type, values))
