"""Dates as people write them, and rows in order of time."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coadjoint.errors import ConfigError, DataError
from coadjoint.tasks.files import Options, read
from coadjoint.tasks.files.dates import is_date, months_of, parse_dates
from paths import put

NEXT = Options(kind="next")
FORMS = {
    "2024-01-31": datetime(2024, 1, 31),
    "2024/1/31": datetime(2024, 1, 31),
    "2024.01.31": datetime(2024, 1, 31),
    "2024-01-31 12:30": datetime(2024, 1, 31, 12, 30),
    "2024-01-31T12:30:05.25": datetime(2024, 1, 31, 12, 30, 5, 250000),
    "2024-01-31T12:30:05.123456789": datetime(2024, 1, 31, 12, 30, 5, 123456),
    "2024-01-31T12:30Z": datetime(2024, 1, 31, 12, 30),
    "2024-01-31 12:30 UTC": datetime(2024, 1, 31, 12, 30),
    "2024-01-31T12:30+02": datetime(2024, 1, 31, 10, 30),
    "2024-01-31 12:30:00-05:30": datetime(2024, 1, 31, 18, 0),
    "20240131T123005Z": datetime(2024, 1, 31, 12, 30, 5),
    "31.01.2024": datetime(2024, 1, 31),
    "31-1-2024 05:00": datetime(2024, 1, 31, 5),
    "01/31/2024 1:30 PM": datetime(2024, 1, 31, 13, 30),
    "1/31/2024, 12:30 a.m.": datetime(2024, 1, 31, 0, 30),
    "31 Jan 2024": datetime(2024, 1, 31),
    "31-January-2024": datetime(2024, 1, 31),
    "Jan 31 2024": datetime(2024, 1, 31),
    "September 3, 2024 23:59": datetime(2024, 9, 3, 23, 59),
    "2024-02": datetime(2024, 2, 1),
    "Feb 2024": datetime(2024, 2, 1),
    "2024Q3": datetime(2024, 7, 1),
    "2024-Q4": datetime(2024, 10, 1),
}


@pytest.mark.parametrize("text", FORMS)
def test_a_date_is_read_in_its_form(text):
    assert is_date(text)
    dates = parse_dates([text, "", text])
    expected = FORMS[text].replace(tzinfo=UTC).timestamp() * 1e6
    assert dates.time[0] == dates.time[2] == round(expected)
    assert dates.wrong == [(1, "the time is missing. Fill it in.")]


@pytest.mark.parametrize(
    "text", ["", "noon", "2024", "20240131", "2024.01", "1.5", "31.01.24", "12:30", "Foo 2024"]
)
def test_other_texts_are_no_dates(text):
    assert not is_date(text)


@pytest.mark.parametrize(
    "text", ["2024-02-30", "31.04.2024", "2024-01-01 25:00", "1/31/2024 13:00 PM"]
)
def test_a_day_or_hour_that_does_not_exist_is_refused(text):
    assert "is not a valid date" in parse_dates([text]).wrong[0][1]


def test_the_column_or_the_user_tells_day_from_month():
    cells = ["01/02/2024", "13/02/2024"]
    assert parse_dates(cells).order == "day-first"
    assert parse_dates(["01/02/2024", "02/13/2024"]).order == "month-first"
    assert parse_dates(["2024-01-02"], "day-first").order == ""
    first, _ = parse_dates(cells).time
    (asked,) = parse_dates(cells[:1], "day-first").time
    (other,) = parse_dates(cells[:1], "month-first").time
    assert first == asked != other
    with pytest.raises(ConfigError, match="--dates must be day-first or month-first"):
        Options(dates="year-first")


def test_offsets_may_change_within_a_column_as_in_summer():
    times = parse_dates(["2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00"]).time
    assert np.diff(times) == 3600e6


@pytest.mark.parametrize(
    "days", [("01", "01", "01", "01"), ("31", "29", "31", "30"), ("15", "15", "15", "15")]
)
def test_months_are_even_steps(tmp_path, days):
    rows = "".join(f"2024-{k + 1:02d}-{day},{k}\n" for k, day in enumerate(days))
    sheet = read(put(tmp_path, "d.csv", "date,a\n" + rows), NEXT)
    assert sheet.columns["time"] == "date"
    assert sheet.describe_uneven_step() is None
    late = put(tmp_path, "e.csv", "date,a\n" + rows + f"2024-07-{days[0]},1\n")
    assert "e.csv:6" in read(late, NEXT).describe_uneven_step()
    assert months_of(np.array([0, 86_400_000_000])) is None


@pytest.mark.parametrize("name", ["date", "Date", "datetime", "DateTime", "date_time", "ds"])
def test_a_column_of_dates_with_a_usual_name_is_the_time(tmp_path, name):
    sheet = read(put(tmp_path, "d.csv", f"{name},a\n2024-01-01,1\n2024-01-02,2\n"), NEXT)
    assert (sheet.columns["time"], sheet.features) == (name, ("a",))
    assert f"time column: '{name}'" in sheet.notes
    # Numbers under such a name are an input, as they were before 0.9.0.
    sheet = read(put(tmp_path, "n.csv", f"{name},a\n1,1\n2,2\n"), NEXT)
    assert sheet.features == (name, "a")


def test_dates_in_parquet_are_the_time_as_text_or_as_dates(tmp_path):
    for cells in (["31.01.2024", "01.02.2024"], [datetime(2024, 1, 31), datetime(2024, 2, 1)]):
        pq.write_table(pa.table({"date": cells, "a": [1, 2]}), tmp_path / "d.parquet")
        sheet = read(tmp_path / "d.parquet", NEXT)
        assert sheet.time.tolist() == [1706659200000000, 1706745600000000]
        assert sheet.has_dates


def test_an_index_of_dates_without_a_name_is_the_time(tmp_path):
    sheet = read(put(tmp_path, "d.csv", ",a\n2024-01-01,1\n2024-01-02,2\n"), NEXT)
    assert (sheet.columns["time"], sheet.features) == ("Unnamed: 0", ("a",))
    days = [datetime(2024, 1, 31), datetime(2024, 2, 1)]
    pq.write_table(pa.table({"a": [1, 2], "__index_level_0__": days}), tmp_path / "d.parquet")
    sheet = read(tmp_path / "d.parquet", NEXT)
    assert (sheet.columns["time"], sheet.features) == ("__index_level_0__", ("a",))


def test_shuffled_rows_are_sorted_by_id_and_time(tmp_path):
    rows = [f"{i},{t},{10 * i + t},w{t}" for i in (2, 1) for t in range(5)]
    in_order = read(put(tmp_path, "d.csv", "\n".join(["id,time,a,b", *rows])), words())
    rows = [rows[k] for k in np.random.default_rng(0).permutation(10)]
    shuffled = read(put(tmp_path, "e.csv", "\n".join(["id,time,a,b", *rows])), words())
    assert sorted(in_order.ids) == sorted(shuffled.ids)
    order = [in_order.ids.index(name) for name in shuffled.ids]
    picked = np.concatenate([np.arange(5) + 5 * k for k in order])
    np.testing.assert_array_equal(shuffled.u, in_order.u[picked])
    assert shuffled.stamps == [in_order.stamps[k] for k in picked]
    # Each row still knows its line in the file.
    lines = (tmp_path / "e.csv").read_text().splitlines()
    for row, line in enumerate(shuffled.lines):
        assert lines[line - 1].split(",")[2] == f"{shuffled.u[row, 0]:.0f}"
    assert any("rows are sorted by id and time ('time')" in note for note in shuffled.notes)
    assert not any("sorted" in note for note in in_order.notes)


def words():
    return Options(kind="next", categorical=("b",))


def test_two_rows_of_one_time_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"d.csv:4 .* the same as in .*d.csv:2, .* --id"):
        read(put(tmp_path, "d.csv", "time,a\n2,1\n1,2\n2,3\n"), NEXT)
    with pytest.raises(DataError, match=r"Remove one of the rows.$"):
        read(put(tmp_path, "d.csv", "id,time,a\nx,2,1\nx,1,2\nx,2,3\n"), NEXT)
