"""Tables as data frames write them: words, dates, shuffled rows, samples without --chain."""

import csv
import random
from pathlib import Path

import pytest

SMALL = ["--steps", "2", "--every", "2", "--probes", "2", "--batch", "4", "--quiet"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_weather(name="weather.csv", day="{0:02d}.03.2024", sky=("sun", "rain", "fog")):
    """Thirty days of weather in no order."""
    rows = [(day.format(k + 1), k * k % 11, sky[k % len(sky)], k % 2 == 0) for k in range(30)]
    random.Random(0).shuffle(rows)
    with Path(name).open("w", newline="") as file:
        csv.writer(file).writerows([("date", "temperature", "sky", "wet"), *rows])


def test_words_dates_and_shuffled_rows_are_learned_from_and_predicted(coadjoint):
    write_weather()
    asked = ["--kind", "next", "--window", "5", "--hidden", "4", *SMALL, "--out", "run"]
    code, _, err = coadjoint("train", "--train", "weather.csv", *asked)
    assert code == 3
    assert err.count("column 'sky'") == 1
    assert "--categorical sky" in err
    assert "--features temperature,wet" in err
    code, _, err = coadjoint("train", "--train", "weather.csv", *asked, "--categorical", "sky")
    assert (code, err) == (0, "")
    write_weather("new.csv", sky=("hail", "sun"))
    code, out, err = coadjoint("predict", "run", "new.csv", "--out", "out.csv")
    assert (code, err) == (0, "")
    assert "rows are sorted by time ('date')" in out
    assert "'hail'" in out
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert set(rows[0]) >= {"date", "prediction temperature", "prediction wet"}
    assert "prediction sky" not in rows[0]


def test_dates_that_tell_neither_day_nor_month_need_a_flag(coadjoint):
    Path("d.csv").write_text("date,a\n01/02/2024,1\n01/03/2024,2\n01/04/2024,4\n")
    asked = ["train", "--train", "d.csv", "--kind", "next", "--split", "1,0,0", *SMALL]
    code, _, err = coadjoint(*asked)
    assert code == 3
    assert "--dates day-first or --dates month-first" in err
    assert coadjoint(*asked, "--dates", "month-first")[0] == 0


def test_a_table_of_samples_without_a_chain_is_told_of_it(coadjoint):
    rows = "".join(f"{k},{k * k % 5},{'ab'[k % 2]}\n" for k in range(30))
    Path("d.csv").write_text("x,y,target\n" + rows)
    code, _, err = coadjoint("train", "--train", "d.csv", *SMALL)
    assert code == 3
    for word in ("30 rows are one sequence", "--chain 64x2", "--at every", "--kind next"):
        assert word in err
    code, _, err = coadjoint("train", "--train", "d.csv", "--at", "last", *SMALL)
    assert code == 3
    assert "if each row is a sample of its own, pass --chain" in err
    assert coadjoint("train", "--train", "d.csv", "--chain", "4", *SMALL)[0] == 0


def test_whole_numbers_as_labels_name_both_ways_out(coadjoint):
    Path("d.csv").write_text("x,target\n" + "".join(f"{k},{k % 3}\n" for k in range(30)))
    code, _, err = coadjoint("train", "--train", "d.csv", "--chain", "4", *SMALL)
    assert code == 3
    assert len(err.splitlines()) == 1
    assert "3 different numbers (0, 1, 2)" in err
    for kind in ("classify", "regress"):
        assert f"--kind {kind}" in err
        asked = ["train", "--train", "d.csv", "--chain", "4", "--kind", kind, *SMALL]
        assert coadjoint(*asked)[0] == 0


def test_gaps_in_time_are_an_input(coadjoint):
    days = (1, 2, 3, 6, 7, 9, 10, 13, 14, 15)
    rows = "".join(f"2024-01-{day:02d},{day % 4}\n" for day in days)
    Path("d.csv").write_text("date,a\n" + rows)
    asked = ["train", "--train", "d.csv", "--kind", "next", "--split", "1,0,0", *SMALL]
    code, _, err = coadjoint(*asked)
    assert code == 3
    assert "--gaps" in err
    assert coadjoint(*asked, "--gaps", "--out", "run")[0] == 0
    assert coadjoint("predict", "run", "d.csv", "--out", "out.csv")[0] == 0
