"""Users' files are read exactly, or refused with the file, the row, the column and the way out."""

import gzip
import io
import os
import random
import re
import struct
import tracemalloc
import zipfile
from contextlib import closing
from datetime import datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coadjoint.errors import CoadjointError, ConfigError, DataError
from coadjoint.tasks.files import read
from coadjoint.tasks.files import text as text_module
from coadjoint.tasks.files.sheet import Options
from coadjoint.training import online
from paths import put, read_table
from work import counted

pytestmark = pytest.mark.slow

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def refused(path, words, **options):
    """The message, which is one line for one problem, and holds all words."""
    with pytest.raises(DataError) as caught:
        read(path, Options(**options))
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} not in {text!r}"
    assert caught.value.exit_code == 3
    assert text.isprintable() or "\n" in text
    return text


GOOD = "id,time,a,b,target\nx,0,1,2,up\nx,1,3,4,up\ny,0,5,6,down\ny,1,7,8.5,down\n"
QUOTED = '"id","time","a","b","target"\n' + "".join(
    ",".join(f'"{cell}"' for cell in line.split(",")) + "\n" for line in GOOD.split("\n")[1:-1]
)
NEXT = {"kind": "next"}

# name: the text of data.csv, options, words that the answer holds
TABLES = read_table(__file__, "bad_tables.json")
CSV = {name: tuple(row.values()) for name, row in TABLES.items()}
CSV |= {  # tables that are not text
    "UTF-16": ("a,b\n1,2\n".encode("utf-16"), NEXT, ["data.csv", "UTF-16", "UTF-8"]),
    "a program": (b"\x7fELF" + b"\0\0\0\1" * 30, NEXT, ["data.csv:1", "not a text file"]),
    "UTF-16 without a mark": ("a,b\n1,2\n".encode("utf-16-le"), NEXT, ["data.csv", "UTF-16"]),
    "latin-1": ("a,b\n1,2\ncaf\u00e9,2\n".encode("latin-1"), NEXT,
        ["data.csv:3", "0xe9", "latin-1", "UTF-8"]),
    "NUL": (b"a,b,ccccccccccccc\n1,2,3\n1,\0002,3\n", NEXT, ["data.csv:3", "NUL"]),
    "gzip": (gzip.compress(b"a,b\n1,2\n"), NEXT, ["data.csv", "gzip"]),
    "workbook": (b"PK\x03\x04" + b"." * 30 + b"xl/workbook.xml", NEXT, ["data.csv", ".xlsx"]),
    "Parquet": (b"PAR1....", NEXT, ["data.csv", "Parquet"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CSV)
def test_a_bad_table_is_refused_in_one_line(case, tmp_path):
    content, options, words = CSV[case]
    for name in {"target", "features"} & options.keys():
        options = options | {name: tuple(options[name])}
    text = refused(put(tmp_path, "data.csv", content), words, **options)
    assert "\n" not in text  # one problem, one line


def test_all_problems_of_a_file_are_listed_together(tmp_path):
    rows = "".join(f"{'?x' if i < 20 else 1},{'inf' if i == 3 else 2},\n" for i in range(50))
    text = refused(put(tmp_path, "data.csv", "a,b,c\n" + rows), [], kind="next")
    lines = text.split("\n")
    assert lines[0].endswith("data.csv: 22 problems, of which 7 are listed:")
    assert [ln.split("data.csv")[1].split(": ")[0] for ln in lines[1:7]] == [
        f":{i} column 'a'" for i in range(2, 7)
    ] + [":5 column 'b'"]
    assert "column 'c': every value is missing" in lines[7]
    wide = "".join(f"f{k}," for k in range(30)) + "z\n" + "x," * 30 + "1\n"
    assert (
        len(refused(put(tmp_path, "wide.csv", wide), ["30 problems"], kind="next").split("\n"))
        == 21
    )


def test_rows_in_any_order_are_no_problem_of_a_table_with_a_time_column(tmp_path):
    """They are sorted once the other problems are mended."""
    rows = "".join(f"{name},{t},Paris,,x\n" for t in range(1000) for name in "pq")
    path = put(tmp_path, "data.csv", "id,time,city,a,target\n" + rows)
    lines = refused(path, ["2 problems"]).split("\n")
    assert len(lines) == 3
    assert "2,000 of 2,000 cells hold words" in lines[1]
    assert "column 'a': every value is missing" in lines[2]
    words = refused(path, ["2,000 problems, of which 7 are listed"], time="").split("\n")
    assert "name the column that orders them with --time" in words[2]


def test_only_a_column_that_is_near_is_suggested(tmp_path):
    path = put(tmp_path, "data.csv", "regime,temp,target\n1,2,x\n")
    assert "mean" not in refused(path, ["no column 'time'"], time="time")
    refused(path, ["Did you mean 'temp'?"], time="tmep")


def test_paths_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    put(tmp_path, "train.csv", GOOD)
    refused(tmp_path / "trian.csv", ["trian.csv does not exist", "did you mean 'train.csv'"])
    refused(tmp_path / "nowhere" / "train.csv", ["does not exist", "folder"])
    refused(tmp_path, ["is a directory"])
    os.mkfifo(tmp_path / "pipe.csv")
    refused(tmp_path / "pipe.csv", ["pipe or a device"])
    refused(os.devnull, ["pipe or a device"])
    refused("a\0b.csv", ["cannot be opened"])
    refused("x" * 5000 + ".csv", ["cannot be opened"])
    refused(put(tmp_path, "data.docx", "a"), ["'.docx'", ".csv", ".npz"])
    refused(tmp_path / "train.csv", ["bytes", "--max-bytes"], max_bytes=10)

    def closed(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", closed)
    refused(tmp_path / "train.csv", ["permission denied"])


@pytest.mark.parametrize(
    "options",
    [{"sep": ",,"}, {"sep": '"'}, {"sep": "1"}, {"decimal": ";"},
        {"thousands": "."} | {"decimal": "."}, {"missing": "zero"}, {"kind": "guess"},
        {"at": "first"}, {"max_bytes": 0}],
)  # fmt: skip
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match="must be"):
        Options(**options)


def test_a_good_table_is_read(tmp_path):
    r = read(put(tmp_path, "data.csv", GOOD))
    assert (r.features, r.targets, r.ids, r.lengths.tolist()) == (
        ("a", "b"),
        ("target",),
        ["x", "y"],
        [2, 2],
    )
    assert r.u.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8.5]]
    assert r.y.tolist() == ["up", "up", "down", "down"]
    assert r.time.tolist() == [0, 1, 0, 1]
    assert r.place(3, "b").endswith("data.csv:5 column 'b'")
    assert "id column: 'id'" in r.notes


DIALECTS = {
    "byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), "data.csv", {}),
    "Windows lines": (GOOD.replace("\n", "\r\n"), "data.csv", {}),
    "blank end": (GOOD + "\n\n", "data.csv", {}),
    "no last newline": (GOOD.rstrip(), "data.csv", {}),
    "spaces": (GOOD.replace(",", " , "), "data.csv", {}),
    "quotes": (QUOTED, "data.csv", {}),
    "tabs": (GOOD.replace(",", "\t"), "data.tsv", {}),
    "decimal comma": (GOOD.replace(",", ";").replace("8.5", "8,5"), "data.csv",
        {"sep": ";", "decimal": ","}),
    "grouping": (GOOD.replace("8.5", '"0,008.5"').replace("0,008.5", "8.5"), "data.csv",
        {"thousands": ","}),
    "plus and exponents": (GOOD.replace("8.5", "+.85e1"), "data.csv", {}),
    "no header": (GOOD.split("\n", 1)[1], "data.csv",
        {"header": False, "id": "c1", "time": "c2", "target": ("c5",)}),
    "moved columns": ("target,b,a,time,id\nup,2,1,0,x\nup,4,3,1,x\ndown,6,5,0,y\ndown,8.5,7,1,y\n",
        "data.csv", {"features": ("a", "b")}),
}  # fmt: skip


@pytest.mark.parametrize("case", DIALECTS)
def test_dialects_read_alike(case, tmp_path):
    content, name, options = DIALECTS[case]
    r, plain = (
        read(put(tmp_path, name, content), Options(**options)),
        read(put(tmp_path, "plain.csv", GOOD)),
    )
    assert np.array_equal(r.u, plain.u)
    assert r.y.tolist() == plain.y.tolist()
    assert (r.ids, r.lengths.tolist(), r.time.tolist()) == (
        plain.ids,
        plain.lengths.tolist(),
        plain.time.tolist(),
    )


def test_grouped_digits_are_read(tmp_path):
    r = read(put(tmp_path, "d.csv", 'a,b\n"1,234,567.5",12\n'), Options(kind="next", thousands=","))
    assert r.u.tolist() == [[1234567.5, 12]]
    r = read(
        put(tmp_path, "e.csv", "a;b\n1.234,5;12\n"),
        Options(kind="next", sep=";", decimal=",", thousands="."),
    )
    assert r.u.tolist() == [[1234.5, 12]]


def test_large_numbers_that_are_exact_are_read(tmp_path):
    r = read(
        put(tmp_path, "d.csv", "a,b\n9007199254740992,1e20\n-9007199254740994,1\n"),
        Options(kind="next"),
    )
    assert r.u.tolist() == [[2.0**53, 1e20], [-(2.0**53) - 2, 1]]


def test_lines_count_newlines_in_quotes(tmp_path):
    refused(
        put(tmp_path, "d.csv", 'id,a\n"x\ny",1\nz,2\nz,oops\n'), ["d.csv:5 column 'a'"], kind="next"
    )


def test_blocks_join_up(tmp_path, monkeypatch):
    text = "id,time,a\n" + "".join(f"s{i // 7},{i % 7},{i / 8}\n" for i in range(70))
    whole = read(put(tmp_path, "d.csv", text), Options(kind="next"))
    for size in (2, 3, 70, 71):
        monkeypatch.setattr(text_module, "ROWS_PER_BLOCK", size)
        parts = read(tmp_path / "d.csv", Options(kind="next"))
        assert np.array_equal(parts.u, whole.u)
        assert np.array_equal(parts.lines, np.arange(2, 72))
        assert parts.lengths.tolist() == [7] * 10


def test_time_stamps_are_read(tmp_path):
    rows = ["2024-03-31T00:30:00.250000", "2024-03-31 01:30:00.25", "2024-03-31T02:30:00.25"]
    for zone in ("", "Z", "+02:00", "-0330"):
        r = read(
            put(tmp_path, "d.csv", "time,a\n" + "".join(f"{t}{zone},1\n" for t in rows)),
            Options(kind="next"),
        )
        offset = {"": 0, "Z": 0, "+02:00": 2, "-0330": -3.5}[zone]
        t0 = datetime(
            2024, 3, 31, 0, 30, 0, 250000, tzinfo=timezone(timedelta(hours=offset))
        ).timestamp()
        assert r.time.tolist() == [round((t0 + 3600 * k) * 1e6) for k in range(3)]
        assert r.describe_uneven_step() is None


def test_uneven_steps_are_noticed(tmp_path):
    r = read(
        put(tmp_path, "d.csv", "id,time,a\nx,0,1\nx,1,1\nx,2,1\ny,5,1\ny,6,1\ny,8,1\n"),
        Options(kind="next"),
    )
    assert (
        "d.csv:7 column 'time': the time step is 2 and the usual one is 1"
        in r.describe_uneven_step()
    )
    assert "--irregular allow" in r.describe_uneven_step()
    r = read(
        put(tmp_path, "e.csv", "time,a\n2024-01-01,1\n2024-01-02,1\n2024-01-04,1\n2024-01-05,1\n"),
        Options(kind="next"),
    )
    assert "e.csv:4" in r.describe_uneven_step()
    assert "is 2 d and" in r.describe_uneven_step()
    r = read(
        put(tmp_path, "f.csv", "time,a\n" + "".join(f"{k * 0.1:.17g},1\n" for k in range(50))),
        Options(kind="next"),
    )
    assert r.describe_uneven_step() is None


def test_a_row_takes_a_few_calls(tmp_path):
    """However many rows there are."""
    rng, calls = np.random.default_rng(0), []
    for n in (5_000, 20_000):
        rows = "\n".join(
            f"s{i // 1000},{i % 1000},{x:.6f},{y:.4f}"
            for i, (x, y) in enumerate(rng.normal(size=(n, 2)))
        )
        path = put(tmp_path, f"{n}.csv", "id,time,a,b\n" + rows)
        with counted() as work:
            r = read(path, Options(kind="next"))
        calls.append(work.count)
        assert r.u.shape == (n, 2)
        assert len(r.ids) == n // 1000
    assert calls[0] < 12 * 5_000
    assert calls[1] < 4.2 * calls[0]


def parquet(folder, columns, name="d.parquet"):
    path = folder / name
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_reads_as_the_table_does(tmp_path):
    label = pa.array(["up", "up", "down", "down"]).dictionary_encode()
    path = parquet(
        tmp_path,
        {
            "id": ["x", "x", "y", "y"],
            "time": [0, 1, 0, 1],
            "a": [1, 3, 5, 7],
            "b": pa.array([2, 4, 6, 8.5], pa.float32()),
            "target": label,
        },
    )
    r, plain = read(path), read(put(tmp_path, "plain.csv", GOOD))
    assert np.array_equal(r.u, plain.u)
    assert r.y.tolist() == plain.y.tolist()
    assert (r.ids, r.time.tolist(), r.stamps) == (plain.ids, plain.time.tolist(), plain.stamps)
    assert r.place(2, "a").endswith("d.parquet row 3 column 'a'")


PARQUET = {
    "nested": ({"a": [[1.0], [2.0]], "b": [1, 2]}, NEXT, ["column 'a'", "list"]),
    "struct": ({"a": [{"x": 1}, {"x": 2}], "b": [1, 2]}, NEXT, ["column 'a'", "struct"]),
    "decimal": ({"a": [Decimal("1.5"), Decimal("2.5")]}, NEXT, ["column 'a'", "decimal"]),
    "words as feature": ({"a": ["x", "y"]}, NEXT, ["column 'a'", "string"]),
    "missing": ({"a": [1.0, None, 3.0]}, NEXT, ["row 2 column 'a'", "1 of 3 values are missing"]),
    "inf": ({"a": [1.0, np.inf]}, NEXT, ["row 2 column 'a'", "infinite"]),
    "beyond 2^53": ({"a": [1, 2**53 + 1]}, NEXT,
        ["row 2 column 'a'", "cannot be represented exactly"]),
    "no rows": ({"a": pa.array([], pa.float64())}, NEXT, ["no rows"]),
    "numbers as target": ({"a": [1, 2], "target": [0, 1]}, {},
        ["column 'target'", "--kind classify"]),
    "time missing": ({"time": [1, None], "a": [1, 2]}, NEXT, ["row 2 column 'time'", "missing"]),
    "time twice": ({"time": [datetime(2024, 1, 2), datetime(2024, 1, 2)], "a": [1, 2]}, NEXT,
        ["row 2 column 'time'", "is the same", "--id"]),
    "bomb": ({"a": pa.array(np.zeros(5_000_000))}, NEXT, ["5,000,000 rows", "100:1"]),
    "target absent": ({"a": [1, 2], "targte": ["x", "y"]}, {"target": ("target",)},
        ["'target'", "'targte'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PARQUET)
def test_bad_parquet_is_refused(case, tmp_path):
    columns, options, words = PARQUET[case]
    refused(parquet(tmp_path, columns), ["d.parquet", *words], **options)


def test_damaged_parquet_is_refused(tmp_path):
    refused(put(tmp_path, "d.parquet", "a,b\n1,2\n"), ["not Parquet", "PAR1"])
    whole = parquet(tmp_path, {"a": np.arange(1000.0)}).read_bytes()
    refused(
        put(tmp_path, "e.parquet", whole[: len(whole) // 2]), ["e.parquet", "damaged"], kind="next"
    )


def npz(folder, name="d.npz", compress=False, **arrays):
    (np.savez_compressed if compress else np.savez)(folder / name, **arrays)
    return folder / name


U = np.arange(24.0).reshape(2, 4, 3)


def test_arrays_are_read(tmp_path):
    y = np.array(["up", "down"])
    padded = read(npz(tmp_path, u=U, y=y, lengths=np.array([4, 2])))
    ragged = read(
        npz(tmp_path, "e.npz", u=np.concatenate([U[0], U[1, :2]]), y=y, lengths=np.array([4, 2]))
    )
    for r in (padded, ragged):
        assert np.array_equal(r.u, np.concatenate([U[0], U[1, :2]]))
        assert (r.lengths.tolist(), r.y.tolist(), r.y_per, r.has_names) == (
            [4, 2],
            ["up", "down"],
            "sequence",
            False,
        )
    assert padded.place(5, "u1").endswith("u[1, 1, 1] column 'u1'")
    assert ragged.place(5, "u1").endswith("u[5, 1] column 'u1'")
    every = read(npz(tmp_path, "f.npz", u=U, y=U[:, :, 0]), Options(kind="regress", at="every"))
    assert np.array_equal(every.y[:, 0], U[:, :, 0].ravel())
    assert every.y_per == "step"
    several = read(npz(tmp_path, "g.npz", u=U, y=U[:, 0]), Options(kind="regress"))
    assert (several.y_per, several.y.shape) == ("sequence", (2, 3))


@pytest.mark.parametrize(
    "form",
    [
        lambda u: u.astype(">f8"),
        np.asfortranarray,
        lambda u: u.astype(np.int16),
        lambda u: u.astype(np.float16),
    ],
)
def test_byte_orders_layouts_and_types_read_alike(form, tmp_path):
    np.save(tmp_path / "d.npy", form(U))
    r = read(tmp_path / "d.npy", Options(kind="next"))
    assert np.array_equal(r.u.reshape(U.shape), U)
    assert r.u.dtype == np.dtype("float64")


def test_npy_of_one_feature_is_read(tmp_path):
    np.save(tmp_path / "d.npy", U[..., 0])
    assert np.array_equal(read(tmp_path / "d.npy", Options(kind="next")).u[:, 0], U[..., 0].ravel())


NPY = {
    "objects": (np.array([[1, None]], dtype=object), ["Python objects; not loaded"]),
    "complex": (np.zeros((2, 2), complex), ["complex128", "expected float"]),
    "text": (np.array([["a"]]), ["<U1", "expected float"]),
    "structured": (np.zeros((2, 2), [("a", float)]), ["'a'", "expected float"]),
    "dates": (np.zeros((2, 2), "datetime64[s]"), ["datetime64", "expected float"]),
    "no dimension": (np.array(1.0), ["0 dimensions", "sequences, steps, features"]),
    "five dimensions": (np.zeros((1,) * 5), ["5 dimensions", "(n, T, C)"]),
    "empty": (np.zeros((0, 3, 2)), ["is empty"]),
    "inf": (np.array([[1, np.inf]]), ["u[0, 1, 0]", "infinite"]),
    "missing": (np.array([[1, np.nan]]), ["u[0, 1, 0]", "1 of 2 values are missing", "--missing"]),
    "beyond 2^53": (np.array([[1, 2**53 + 1]]), ["u[0, 1, 0]", "cannot be represented exactly"]),
}


@pytest.mark.parametrize("case", NPY)
def test_bad_npy_is_refused(case, tmp_path):
    array, words = NPY[case]
    np.save(tmp_path / "d.npy", array, allow_pickle=True)
    refused(tmp_path / "d.npy", ["d.npy", *words], kind="next")


def header(shape, descr="<f8"):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def test_headers_are_judged_before_memory_is_taken(tmp_path):
    refused(
        put(tmp_path, "d.npy", header((10**6, 10**6)) + b"\0" * 64),
        ["8,000,000,000,000 bytes", "the file has 64"],
        kind="next",
    )
    refused(
        put(tmp_path, "d.npy", header((2, 4)) + b"\0" * 63),
        ["64 bytes", "the file has 63", "cut off"],
        kind="next",
    )
    refused(
        put(tmp_path, "d.npy", header((2, 4)) + b"\0" * 65),
        ["64 bytes", "the file has 65"],
        kind="next",
    )
    refused(put(tmp_path, "d.npy", header((-2, -4)) + b"\0" * 64), ["shape"], kind="next")
    refused(
        put(tmp_path, "d.npy", b"\x93NUMPY\x01\x00\xff\xff{"), ["not a NumPy array"], kind="next"
    )
    refused(put(tmp_path, "d.npy", b"not an array at all"), ["not a NumPy array"], kind="next")
    bomb = npz(tmp_path, compress=True, u=np.zeros((1, 4_000_000, 1)))
    refused(bomb, ["32,000,128 bytes", "100:1"], kind="next")
    refused(bomb, ["32,000,128 bytes", "--max-bytes"], kind="next", max_bytes=1 << 20)


NPZ = {
    "no u": ({"z": U}, {}, ["holds z", "u (n, T, C)"]),
    "two dimensions": ({"u": U[0]}, NEXT,
        ["(4, 3)", "sequences first, then steps, then features", "u[:, :, None]"]),
    "no y": ({"u": U}, {}, ["inputs only", "--kind next"]),
    "axes swapped": ({"u": U, "y": np.arange(4)}, {"kind": "classify"},
        ["y' has shape (4,)", "2 sequences", "transpose(1, 0, 2)"]),
    "y of another length": ({"u": U, "y": np.arange(5)}, {"kind": "classify"},
        ["y' has shape (5,)", "begin with 2"]),
    "numbers as y": ({"u": U, "y": np.arange(2)}, {},
        ["array 'y' holds numbers", "--kind classify"]),
    "words to regress": ({"u": U, "y": np.array(["a", "b"])}, {"kind": "regress"},
        ["'y'", "needs numbers"]),
    "steps or targets": ({"u": U, "y": U[:, :, 0]}, {"kind": "regress"},
        ["--at every or --at last"]),
    "length 0": ({"u": U, "lengths": np.array([4, 0])}, NEXT, ["lengths[1]", "length 0", "1..4"]),
    "length beyond T": ({"u": U, "lengths": np.array([4, 5])}, NEXT,
        ["lengths[1]", "length 5", "1..4"]),
    "lengths of others": ({"u": U, "lengths": np.array([4, 4, 4])}, NEXT,
        ["3 entries", "2 sequences"]),
    "lengths do not add up": ({"u": U[0], "lengths": np.array([2, 1])}, NEXT,
        ["add up to 3", "4 rows"]),
    "real lengths": ({"u": U, "lengths": np.array([4.0, 2.0])}, NEXT, ["'lengths'", "integer"]),
    "ids twice": ({"u": U, "ids": np.array(["a", "a"])}, NEXT, ["'ids'", "expected 2 different"]),
    "infinite target": ({"u": U, "y": np.array([1.0, np.inf])}, {"kind": "regress"},
        ["d.npz y0 of sequence 1: the target is infinite"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NPZ)
def test_bad_npz_is_refused(case, tmp_path):
    arrays, options, words = NPZ[case]
    refused(npz(tmp_path, **arrays), ["d.npz", *words], **options)


def test_arrays_that_do_not_fit_are_refused_before_they_are_read(tmp_path):
    values = U.copy()
    values[0, 0, 0] = np.inf
    text = refused(
        npz(tmp_path, u=values, ids=np.array(["a", "a"])), ["'ids' has 2 entries"], kind="next"
    )
    assert "\n" not in text
    assert "infinite" in refused(npz(tmp_path, u=values, ids=np.array(["a", "b"])), [], kind="next")


def test_strange_archives_are_refused(tmp_path):
    refused(put(tmp_path, "d.npz", b"PK\x03\x04 nothing"), ["d.npz", "zip"])
    refused(put(tmp_path, "d.npz", b"PAR1 nothing"), ["holds Parquet"])
    whole = bytearray(npz(tmp_path, u=U).read_bytes())
    whole[whole.index(b"NUMPY") + 200] ^= 1
    refused(put(tmp_path, "e.npz", bytes(whole)), ["'u' is damaged"], kind="next")
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as z:
        z.writestr("u.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate"):
            z.writestr("u.npy", b"")
    refused(tmp_path / "f.npz", ["twice"], kind="next")


TS = """# a comment
@problemName Toy
@timestamps false
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down
@data
1,2,3:4,5,6:up
7,?:9,10.5:down
"""


def test_ts_files_are_read(tmp_path):
    r = read(put(tmp_path, "d.ts", TS), Options(missing="mask"))
    assert (r.lengths.tolist(), r.y.tolist(), r.features) == (
        [3, 2],
        ["up", "down"],
        ("dim0", "dim1"),
    )
    assert np.array_equal(r.u, [[1, 4], [2, 5], [3, 6], [7, 9], [np.nan, 10.5]], equal_nan=True)
    refused(tmp_path / "d.ts", ["d.ts:10 column 'dim0' value 2", "missing"])
    text = (
        TS.replace("@classLabel true up down", "@targetLabel true")
        .replace(":up", ":1.5")
        .replace(":down", ":-2")
    )
    assert read(put(tmp_path, "e.ts", text), Options(missing="mask")).y.tolist() == [[1.5], [-2]]
    plain = "@problemName x\n@univariate true\n@classLabel false\n@data\n1,2,3\n4,5,6\n"
    assert read(put(tmp_path, "f.ts", plain), Options(kind="next")).u[:, 0].tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


BAD_TS = {
    "stamps": (
        TS.replace("@timestamps false", "@timestamps true"),
        ["d.ts:3", "@timestamps true", "regular"],
    ),
    "no data": (TS.split("@data")[0], ["no @data"]),
    "no cases": (TS.split("@data")[0] + "@data\n", ["no sequences"]),
    "unknown tag": (TS.replace("@problemName", "@problem"), ["d.ts:2", "'@problem'"]),
    "tag twice": (
        TS.replace("@data", "@dimensions 2\n@data"),
        ["d.ts:8", "appears twice (first at line 5)"],
    ),
    "no tag": ("1,2,3:up\n" + TS, ["d.ts:1", "expected a tag"]),
    "dimensions": (
        TS.replace("7,?:", ""),
        ["d.ts:10", "expected 2 dimensions and a label", "got 1"],
    ),
    "unequal dimensions": (TS.replace("4,5,6", "4,5"), ["d.ts:9", "have 3, 2 values"]),
    "word": (
        TS.replace("1,2,3", "1,two,3"),
        ["d.ts:9 dimension 0 value 2", '"two" is not a number'],
    ),
    "label": (TS.replace(":down\n", ":left\n"), ["d.ts:10", "label 'left'", "'up', 'down'"]),
    "odd count": (TS.replace("@dimensions 2", "@dimensions two"), ["d.ts:5", "'two'"]),
    "no label": (TS.replace("@classLabel true up down\n", ""), ["no target", "--kind next"]),
}


@pytest.mark.parametrize("case", BAD_TS)
def test_bad_ts_is_refused(case, tmp_path):
    text, words = BAD_TS[case]
    refused(put(tmp_path, "d.ts", text), ["d.ts", *words], missing="mask")


def test_ts_of_another_kind_is_refused(tmp_path):
    refused(
        put(tmp_path, "d.ts", TS),
        ["--kind classify", "not for --kind regress"],
        kind="regress",
    )


def seeds(tmp):
    """A valid file of each kind, to be mangled."""
    label = pa.array(["up", "down"]).dictionary_encode()
    return {
        ".csv": GOOD.encode(),
        ".ts": TS.encode(),
        ".npz": npz(tmp, u=U, y=np.array(["a", "b"]), lengths=np.array([4, 2])).read_bytes(),
        ".npy": (np.save(tmp / "d.npy", U), (tmp / "d.npy").read_bytes())[1],
        ".parquet": parquet(tmp, {"id": ["x", "y"], "a": [1.0, 2.0], "target": label}).read_bytes(),
        ".csv.gz": gzip.compress(GOOD.encode()),
        ".csv.zst": pa.compress(GOOD.encode(), "zstd", asbytes=True),
        ".arrow": arrow(pa.table({"id": ["x", "y"], "a": [1.0, 2.0], "target": label})),
    }


def arrow(table):
    """A table as a file in Arrow's format, compressed."""
    sink = pa.BufferOutputStream()
    how = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(sink, table.schema, options=how) as file:
        file.write_table(table)
    return sink.getvalue().to_pybytes()


pieces = st.sampled_from(
    [
        b",",
        b";",
        b'"',
        b"\n",
        b"\r",
        b":",
        b"@data\n",
        b"1",
        b"-",
        b"e",
        b"nan",
        b"inf",
        b"x",
        b"\0",
        b"\xff",
        b"2024-01-01",
        b"T",
        b"+01:00",
        "\u0663".encode(),
        b"99999999999999999999",
        b"(",
        b"'",
        b"{",
        b" ",
    ]
)
options = st.builds(
    Options,
    kind=st.sampled_from([None, "classify", "regress", "next"]),
    missing=st.sampled_from(["refuse", "mask"]),
    header=st.booleans(),
    thousands=st.sampled_from(["", ","]),
    wide=st.sampled_from([False, False, True]),
)
SUFFIXES = [".csv", ".ts", ".npz", ".npy", ".parquet", ".csv.gz", ".csv.zst", ".arrow"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_only_our_errors_escape(suffix, tmp_path):
    valid = seeds(tmp_path)[suffix]
    path = tmp_path / f"fuzz{suffix}"

    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.data(), options)
    def mangle(data, how):
        content = bytearray(valid)
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(content)))
            cut = data.draw(st.integers(0, 6))
            content[at : at + cut] = data.draw(pieces | st.binary(max_size=6))
        if data.draw(st.booleans()) and suffix in (".csv", ".ts"):
            content = b"".join(data.draw(st.lists(pieces, max_size=40)))
        path.write_bytes(bytes(content))
        try:
            r = read(path, how)
        except CoadjointError:
            return
        assert len(r.u) == r.lengths.sum() == len(r.lines)
        assert (r.lengths > 0).all()
        assert not np.isinf(r.u).any()

    mangle()


@given(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_written_numbers_come_back_bit_for_bit(tmp_path, rows):
    text = io.StringIO()
    text.write("a,b,c\n" + "".join(",".join(map(repr, row)) + "\n" for row in rows))
    r = read(put(tmp_path, "d.csv", text.getvalue()), Options(kind="next"))
    assert r.u.tobytes() == np.array(rows).tobytes()


# damaged headers, from a file of which only its first or its last bytes say what it is

SCRAPS = (
    b"'",
    b"(",
    b")",
    b"{",
    b"}",
    b"[",
    b",",
    b":",
    b"\\",
    b'"',
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"9" * 30,
    b"-1",
    b"1e9",
    b"L",
    b"#",
    b"None",
    b"True",
    b"<f8",
    b"|O",
    b"|V3",
    b"<U9",
    b"<M8[s]",
    b"99999999999",
    b" " * 200,
    b"PAR1",
    b"PK\x03\x04",
    b"@data",
    b"inf",
    b"?",
)
HEAD = 200  # bytes
FOOT = 700  # bytes: of a Parquet file, whose description stands at its end


def damaged(dice, content):
    """The content with one to four pieces of it changed, lost or put in."""
    content = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(content) + 1)
        scrap = dice.choice(SCRAPS)
        put_in_or_over = [(0, scrap), (len(scrap), scrap), (1, bytes([dice.randrange(256)]))]
        taken_out = [(dice.randint(1, 6), b""), (len(content), b"")]
        length, instead = dice.choice(put_in_or_over + taken_out)
        content[at : at + length] = instead
    return bytes(content)


def with_damage(dice, suffix, content):
    at_end = suffix == ".parquet" and dice.random() < 0.7
    if at_end:
        return content[:-FOOT] + damaged(dice, content[-FOOT:])
    return damaged(dice, content[:HEAD]) + content[HEAD:]


def headers(tmp):
    """A valid file of each kind."""
    table = GOOD.replace("up", "1").replace("down", "2").encode()
    rows = io.BytesIO()
    np.save(rows, np.arange(12.0).reshape(6, 2))
    return seeds(tmp) | {
        ".rows.npy": rows.getvalue(),
        ".csv": table,
        ".csv.gz": gzip.compress(table),
    }


def streamed(path, kind):
    with closing(online.read(path, kind=kind)) as stream:
        for _ in stream:
            pass


@pytest.mark.parametrize(
    "suffix", [".csv", ".csv.gz", ".ts", ".npz", ".npy", ".rows.npy", ".parquet"]
)
def test_a_damaged_header_ends_in_one_of_our_errors(suffix, tmp_path):
    valid, path = headers(tmp_path)[suffix], tmp_path / f"damaged{suffix}"
    refusals = []
    for seed in range(150):
        dice = random.Random(f"{suffix} {seed}")
        path.write_bytes(with_damage(dice, suffix, valid))
        kind = dice.choice([None, "next", "classify", "regress"])
        for reading in (
            lambda kind=kind: read(path, Options(kind=kind)),
            lambda kind=kind: streamed(path, kind),
        ):
            try:
                reading()
            except CoadjointError as error:
                refusals.append(str(error))
    assert len(refusals) > 50
    assert not [text for text in refusals if re.search(r"[a-z]\.\.(?!\.)|\?\.( |$)", text)]


def test_a_header_that_ends_too_soon_is_no_array(tmp_path):
    """A bracket that opens and never closes: what reads Python's tokens gives up in its own way."""
    whole = io.BytesIO()
    np.save(whole, np.ones((4, 2)))
    path = put(tmp_path, "rows.npy", whole.getvalue().replace(b"{'descr'", b"{('escr'"))
    for reading in (
        lambda: read(path, Options(kind="next")),
        lambda: online.read(path, kind="next"),
    ):
        with pytest.raises(
            DataError, match=r"rows\.npy is not a NumPy array: .*\. Write it with numpy\.save"
        ):
            reading()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (np.array([[1, "a"]], dtype=object), "Python objects; not loaded"),
        (np.ones((2, 2), complex), r"dtype complex128 and shape \(2, 2\)"),
        (np.ones((2, 2, 2)), r"shape \(2, 2, 2\); expected numbers \[rows, columns\]"),
        (np.ones((0, 2)), r"shape \(0, 2\)"),
    ],
)
def test_some_arrays_cannot_be_streamed(content, words, tmp_path):
    np.save(tmp_path / "rows.npy", content)
    with pytest.raises(DataError, match=words):
        online.read(tmp_path / "rows.npy", kind="next")


def test_an_archive_or_a_short_file_is_no_stream_of_rows(tmp_path):
    archive = io.BytesIO()
    np.savez(archive, u=np.ones(3))
    with pytest.raises(DataError, match="is not a NumPy array"):
        online.read(put(tmp_path, "rows.npy", archive.getvalue()), kind="next")
    whole = io.BytesIO()
    np.save(whole, np.ones((4, 2)))
    with pytest.raises(
        DataError, match=r"the header says shape \(4, 2\) of float64, 64 bytes, but the file has 60"
    ):
        online.read(put(tmp_path, "rows.npy", whole.getvalue()[:-4]), kind="next")


def test_text_alone_is_streamed_from_a_packed_file(tmp_path):
    np.save(tmp_path / "rows.npy", np.ones((4, 2)))
    packed = gzip.compress((tmp_path / "rows.npy").read_bytes())
    with pytest.raises(DataError, match=r"rows\.npy\.gz: cannot stream files named '\.gz'"):
        online.read(put(tmp_path, "rows.npy.gz", packed), kind="next")
    text = put(tmp_path, "rows.csv.gz", gzip.compress(b"a\n1\n2\n"))
    with closing(online.read(text, kind="next", standardise=False)) as stream:
        assert [y.tolist() for _, y in stream] == [[2.0]]


@pytest.mark.parametrize(
    "order", [np.ascontiguousarray, np.asfortranarray, lambda u: u.astype(">f4"), lambda u: u[:, 0]]
)
def test_rows_of_an_array_are_streamed_in_their_order(order, tmp_path):
    u = order(np.arange(12.0).reshape(6, 2))
    np.save(tmp_path / "rows.npy", u)
    with closing(online.read(tmp_path / "rows.npy", kind="next", standardise=False)) as stream:
        found = [y.tolist() for _, y in stream]
    assert found == u.reshape(6, -1)[1:].tolist()


def test_no_message_ends_in_two_full_stops(tmp_path):
    cut = put(tmp_path, "cut.parquet", b"PAR1 and no more")
    put(tmp_path, "co2.csv", GOOD)
    for reading in (lambda: read(cut), lambda: online.read(cut)):
        with pytest.raises(
            DataError, match=r"not a parquet file\. Write the Parquet file again\.$"
        ):
            reading()
    with pytest.raises(DataError, match=r"does not exist; did you mean 'co2\.csv'\?$"):
        read(tmp_path / "CO3.csv")
    with pytest.raises(DataError, match=r"zzzzzzzzzzzz\.csv does not exist\.$"):
        read(tmp_path / "zzzzzzzzzzzz.csv")


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_stream_has_the_rows_of_a_table_however_its_parts_fall(ends, tmp_path, monkeypatch):
    lines = ["id,a", *(f'"s\u00e9{i // 5}",{i / 8}' for i in range(40))]
    path = put(tmp_path, "d.csv", ends.join(lines).encode())
    whole = read(path, Options(kind="next"))
    for size in (7, 8, 9, 64, 1 << 20):
        monkeypatch.setattr(text_module, "open_file", lambda path, size=size: Dripping(path, size))
        with closing(text_module.TextRows.open(str(path), Options(kind="next"))) as rows:
            found = list(rows)
        assert [line for line, _ in found] == whole.lines.tolist()
        assert [float(cells[1]) for _, cells in found] == whole.u[:, 0].tolist()
        assert {cells[0] for _, cells in found} == set(whole.ids)


class Dripping(io.FileIO):
    """A file that gives a few bytes at a time, as a pipe may."""

    def __init__(self, path, size):
        super().__init__(path)
        self.size = size

    def read1(self, _):
        return self.read(self.size)


def test_a_stream_of_text_holds_a_part_of_its_file_at_most(tmp_path):
    path = put(tmp_path, "d.csv", b"a,b\n" + b"1.25,2.5\n" * 200_000)
    tracemalloc.start()
    try:
        with closing(text_module.TextRows.open(str(path), Options(kind="next"))) as rows:
            for line, _ in rows:
                if line == 100_000:
                    break
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < path.stat().st_size / 2


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".parquet"])
def test_a_stream_refuses_what_a_double_cannot_hold(suffix, tmp_path):
    path = tmp_path / f"d{suffix}"
    values = np.array([[1, 2], [3, 2**53 + 1]])
    if suffix == ".npy":
        np.save(path, values)
    elif suffix == ".parquet":
        pq.write_table(pa.table({"c1": values[:, 0], "c2": values[:, 1]}), path)
    else:
        path.write_text(f"c1,c2\n1,2\n3,{2**53 + 1}\n")
    with pytest.raises(
        DataError, match=r"(:3| row 2) column 'c2': .9007199254740993. cannot be represented"
    ):
        streamed(path, "next")
