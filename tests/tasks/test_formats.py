"""Files as pandas and NumPy write them: an index, compressed text, Arrow, X and y, wide tables."""

import gzip
import io
import struct
import sys

import numpy as np
import pytest

from coadjoint.errors import CoadjointError, ConfigError, DataError, MissingError
from coadjoint.tasks.data import Data
from coadjoint.tasks.files import packed, read
from coadjoint.tasks.files.arrow import ArrowRows
from coadjoint.tasks.files.kept import read_columns
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.files.source import load_file
from coadjoint.tasks.files.stream import File
from paths import put

TABLE = "id,a,target\nx,1,up\nx,2,up\ny,3,down\ny,4.5,down\n"
NEXT = {"kind": "next"}


def as_index(text, start=0, name="", step=1):
    """The table with an index before its columns."""
    head, *rows = text.splitlines()
    lines = [f"{name},{head}"] + [f"{start + step * i},{row}" for i, row in enumerate(rows)]
    return "\n".join(lines) + "\n"


def assert_same(sheet, other):
    """The two sheets hold the same sequences."""
    assert sheet.features == other.features
    assert sheet.ids == other.ids
    assert sheet.u.tobytes() == other.u.tobytes()
    assert sheet.lengths.tolist() == other.lengths.tolist()
    assert list(sheet.y) == list(other.y)


class TestIndex:
    @pytest.mark.parametrize(
        "text",
        [
            as_index(TABLE),
            as_index(TABLE, start=1),
            as_index(TABLE, name="Unnamed: 0"),
            as_index(TABLE).replace(",id", "id", 1),  # R writes no name, not even an empty one
        ],
    )
    def test_is_left_out_with_a_note(self, text, tmp_path):
        sheet = read(put(tmp_path, "d.csv", text), Options())
        assert_same(sheet, read(put(tmp_path, "plain.csv", TABLE), Options()))
        assert "counts the rows, like an index: it is left out" in sheet.notes[0]

    def test_that_stops_counting_is_refused(self, tmp_path):
        text = "\n".join([",a", *(f"{i},{i}" for i in range(150)), "7,1", ""])
        with pytest.raises(DataError, match=r'd.csv:152: .* counts the rows up to here.*"7"'):
            read(put(tmp_path, "d.csv", text), Options(**NEXT))

    def test_that_does_not_count_is_refused_with_the_ways_out(self, tmp_path):
        path = put(tmp_path, "d.csv", ",a\n1700,5\n1701,11\n")
        with pytest.raises(DataError, match=r"column 1 has no name.*--time or --id 'Unnamed: 0'"):
            read(path, Options(**NEXT))
        sheet = read(path, Options(time="Unnamed: 0", **NEXT))
        assert sheet.time.tolist() == [1700, 1701]
        assert sheet.features == ("a",)

    def test_of_a_held_out_file_may_be_any(self, tmp_path):
        other = as_index("id,a,target\nv,7,up\nw,8,down\n", start=90, step=3)
        data = Data.read(
            put(tmp_path, "d.csv", as_index(TABLE)), test=put(tmp_path, "e.csv", other)
        )
        assert data.description.features == ["a"]
        prediction = Data.for_prediction(data.describe(), tmp_path / "e.csv")
        assert len(prediction) == 2

    def test_of_a_stream_is_left_out(self, tmp_path):
        stream = File(put(tmp_path, "d.csv", as_index("a,b\n1,2\n3,4\n5,7\n")), kind="next")
        assert stream.roles.features == ("a", "b")
        assert "like an index" in stream.notes[0]
        assert len(list(stream)) == 2
        stream.close()

    def test_of_a_typed_file_is_left_out(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        table = pa.table({"a": [1.0, 2.0], "__index_level_0__": [7, 3]})
        pq.write_table(table, tmp_path / "d.parquet")
        sheet = read(tmp_path / "d.parquet", Options(**NEXT))
        assert sheet.features == ("a",)
        assert "--time __index_level_0__" in sheet.notes[0]


def zstd(content):
    pa = pytest.importorskip("pyarrow")
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


PACKERS = {".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACKERS)
class TestCompressedText:
    def test_reads_as_the_text(self, suffix, tmp_path):
        pack = PACKERS[suffix]
        plain = read(put(tmp_path, "d.csv", TABLE), Options())
        assert_same(read(put(tmp_path, f"d.csv{suffix}", pack(TABLE.encode())), Options()), plain)
        tabs = TABLE.replace(",", "\t").encode()
        assert_same(read(put(tmp_path, f"d.tsv{suffix}", pack(tabs)), Options()), plain)
        lines = TABLE.encode().splitlines(keepends=True)
        parts = pack(b"".join(lines[:2])) + pack(b"".join(lines[2:]))  # one after the other
        assert_same(read(put(tmp_path, f"e.csv{suffix}", parts), Options()), plain)
        data = Data.read(tmp_path / f"d.csv{suffix}", split=(1, 0, 0))
        assert data.name == "d"

    def test_a_bomb_is_refused_before_it_fills_the_memory(self, suffix, tmp_path):
        row = b"1," + b"0" * 1020 + b"2\n"  # long, as rows take longer to read than bytes
        bomb = PACKERS[suffix](b"a,b\n" + row * (1 << 15))  # 32 MiB
        path = put(tmp_path, f"d.csv{suffix}", bomb)
        with pytest.raises(DataError, match="more than 100 times its"):
            read(path, Options(**NEXT))
        with pytest.raises(DataError, match=r"more than 1,000,000 bytes once unpacked"):
            read(path, Options(max_bytes=1_000_000, **NEXT))

    def test_damage_is_refused(self, suffix, tmp_path):
        whole = PACKERS[suffix](TABLE.encode() * 50)
        with pytest.raises(DataError, match="incomplete or damaged"):
            read(put(tmp_path, f"d.csv{suffix}", whole[: len(whole) // 2]), Options())
        with pytest.raises(DataError, match="is not compressed with"):
            read(put(tmp_path, f"d.csv{suffix}", TABLE), Options())
        with pytest.raises(DataError, match="empty once unpacked"):
            read(put(tmp_path, f"d.csv{suffix}", PACKERS[suffix](b"")), Options())


def test_zstandard_is_optional(monkeypatch, tmp_path):
    path = put(tmp_path, "d.csv.zst", zstd(TABLE.encode()))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingError, match=r"coadjoint\[data\]"):
        read(path, Options())


def test_the_package_zstandard_unpacks_frames_one_after_the_other(monkeypatch):
    """A stand-in for the package: a frame is its length and its bytes."""

    class Unpacker:
        def __init__(self):
            self.held = b""
            self.eof = False
            self.unused_data = b""

        def decompress(self, data):
            self.held += data
            size = self.held[0]
            if len(self.held) <= size:
                return b""
            self.eof = True
            self.unused_data = self.held[size + 1 :]
            return self.held[1 : size + 1]

    class Package:
        class ZstdDecompressor:
            def decompressobj(self):
                return Unpacker()

    monkeypatch.setitem(sys.modules, "zstandard", Package)
    monkeypatch.setattr(packed, "BYTES_FED", 4)
    frames = b"\x05abcde\x02fg\x06hijklm"
    assert b"".join(packed.parts_by_zstandard(io.BytesIO(frames))) == b"abcdefghijklm"
    with pytest.raises(EOFError, match="end too early"):
        list(packed.parts_by_zstandard(io.BytesIO(frames[:-1])))


@pytest.mark.parametrize(
    ("name", "suffix", "stem"),
    [
        ("a/d.csv.gz", ".csv", "d"),
        ("d.TSV.ZST", ".tsv", "d"),
        ("d.v2.csv", ".csv", "d.v2"),
        ("d.npz", ".npz", "d"),
        ("d.npy.gz", ".gz", "d.npy"),
        ("d", "", "d"),
    ],
)
def test_names_of_tables(name, suffix, stem):
    assert packed.table_suffix(name) == suffix
    assert packed.table_stem(name) == stem


class TestArrow:
    def write(self, path, columns, stream=False, compression=None, batch=None):
        pa = pytest.importorskip("pyarrow")
        table = pa.table(columns)
        options = pa.ipc.IpcWriteOptions(compression=compression)
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, make(file, table.schema, options=options) as out:
            out.write_table(table, max_chunksize=batch)
        return path

    def columns(self):
        pa = pytest.importorskip("pyarrow")
        return {
            "id": ["x", "x", "y", "y"],
            "a": [1.0, 2.0, 3.0, 4.5],
            "target": pa.array(["up", "up", "down", "down"]).dictionary_encode(),
        }

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
    def test_reads_as_the_text(self, stream, compression, tmp_path):
        name = "d.arrow" if stream else "d.feather"
        path = self.write(tmp_path / name, self.columns(), stream, compression, batch=3)
        assert_same(read(path, Options()), read(put(tmp_path, "d.csv", TABLE), Options()))

    def test_a_bomb_is_refused_before_it_is_unpacked(self, tmp_path):
        zeros = np.zeros(1 << 22)
        path = self.write(tmp_path / "d.arrow", {"a": zeros}, compression="zstd")
        with pytest.raises(
            DataError, match=r"4,194,304 rows, .* bytes unpacked from .* over 100:1"
        ):
            read(path, Options(**NEXT))
        path = self.write(tmp_path / "d.arrow", {"a": zeros[:1000]})
        with pytest.raises(DataError, match="more than the limit of 5,000"):
            read(
                path,
                Options(max_bytes=5_000, **NEXT),
            )

    def test_a_claimed_size_counts_and_not_the_true_one(self, tmp_path):
        """The first eight bytes of a compressed buffer claim its size once unpacked."""
        path = self.write(tmp_path / "d.arrow", {"a": np.arange(64.0)}, compression="zstd")
        content = path.read_bytes()
        claim = struct.pack("<q", 64 * 8)
        assert content.count(claim) == 1
        path.write_bytes(content.replace(claim, struct.pack("<q", 1 << 33)))
        with pytest.raises(DataError, match="8,589,934,592 bytes unpacked, more than the limit"):
            read(path, Options(**NEXT))

    def test_damage_and_other_formats_are_refused(self, tmp_path):
        path = self.write(tmp_path / "d.arrow", self.columns())
        content = path.read_bytes()
        with pytest.raises(DataError, match=r"incomplete or damaged.*Arrow file again"):
            read(put(tmp_path, "e.arrow", content[: len(content) // 2]), Options())
        with pytest.raises(DataError, match=r"named .arrow or .feather but is not Arrow"):
            read(put(tmp_path, "e.arrow", TABLE), Options())
        with pytest.raises(DataError, match="Feather file of version 1"):
            read(put(tmp_path, "e.feather", b"FEA1 and more"), Options())
        with pytest.raises(DataError, match=r"Name it .arrow"):
            read(put(tmp_path, "e.csv", content), Options())

    def test_rows_one_by_one(self, tmp_path):
        path = self.write(tmp_path / "d.arrow", self.columns(), batch=3)
        rows = ArrowRows(load_file(path, 1 << 20), 1 << 20)
        assert list(rows)[::3] == [(1, ["x", 1.0, "up"]), (4, ["y", 4.5, "down"])]

    def test_samples_without_time(self, tmp_path):
        path = self.write(tmp_path / "d.feather", {"a": [1.0, 2.0], "target": ["u", "v"]})
        assert read(path, Options(rows="samples")).shape == (1,)


U = np.arange(24.0).reshape(2, 4, 3)
LABELS = np.array(["up", "down"])


class TestArrays:
    def save(self, path, **arrays):
        np.savez(path, **arrays)
        return path

    def test_one_series(self, tmp_path):
        np.save(tmp_path / "d.npy", np.arange(7))
        sheet = read(tmp_path / "d.npy", Options(**NEXT))
        assert sheet.u[:, 0].tolist() == list(range(7))
        assert sheet.lengths.tolist() == [7]
        assert sheet.layout == "[7]: the steps of one sequence"

    @pytest.mark.parametrize("names", [("X", "y"), ("x", "y"), ("X", "Y"), ("X_train", "y_train")])
    def test_other_names_of_the_inputs(self, names, tmp_path):
        arrays = dict(zip(names, (U, LABELS), strict=True))
        path = self.save(tmp_path / "d.npz", **arrays, X_test=U)
        sheet = read(path, Options())
        assert_same(sheet, read(self.save(tmp_path / "e.npz", u=U, y=LABELS), Options()))
        assert sheet.layout == f"{names[0]} [2, 4, 3]: sequences, steps, features"
        assert sheet.notes == ("array 'X_test' is left out",)
        samples = read(path, Options(rows="samples"))
        assert samples.shape == (1, 4, 3)
        assert samples.layout == f"{names[0]} [2, 4, 3]: samples, height, width"

    def test_one_feature(self, tmp_path):
        sheet = read(self.save(tmp_path / "d.npz", X=U[:, :, 0], y=LABELS), Options())
        assert sheet.lengths.tolist() == [4, 4]
        assert sheet.u[:, 0].tolist() == U[:, :, 0].ravel().tolist()

    def test_one_sequence_with_a_target_in_each_row(self, tmp_path):
        path = self.save(tmp_path / "d.npz", X=U[0], y=np.arange(4.0))
        sheet = read(path, Options(kind="regress", at="every"))
        assert sheet.lengths.tolist() == [4]
        assert sheet.u.tolist() == U[0].tolist()
        assert sheet.layout == "X [4, 3]: steps, features"

    def test_two_candidates_are_refused(self, tmp_path):
        with pytest.raises(DataError, match="holds X and x: which are the inputs"):
            read(self.save(tmp_path / "d.npz", X=U, x=U, y=LABELS), Options())
        # A name that is expected wins over the others.
        sheet = read(self.save(tmp_path / "e.npz", u=U, X=U, y=LABELS), Options())
        assert sheet.notes == ("array 'X' is left out",)

    @pytest.mark.parametrize(
        "y", [np.array([b"up", b"down"]), np.array([3, 5], np.uint8), np.array([3.0, 5.0])]
    )
    def test_labels_of_any_type(self, y, tmp_path):
        sheet = read(self.save(tmp_path / "d.npz", X=U, y=y), Options(kind="classify"))
        assert list(sheet.y) in (["up", "down"], ["3", "5"])

    def test_objects_are_never_loaded(self, tmp_path):
        path = self.save(tmp_path / "d.npz", X=U, y=LABELS.astype(object))
        with pytest.raises(DataError, match=r"Python objects; not loaded.*astype\(str\)"):
            read(path, Options())
        path = self.save(tmp_path / "d.npz", X=U, y=np.array([b"\xff", b"a"]))
        with pytest.raises(DataError, match="not UTF-8"):
            read(path, Options())


WIDE = "name,t2,t0,t1,age,label\np,3,1,2,70,up\nq,,4,5,71,down\nr,8,6,7,72,up\n"
WIDE_OPTIONS = {"id": "name", "wide": True}


class TestWide:
    def test_a_row_is_a_sequence(self, tmp_path):
        sheet = read(put(tmp_path, "d.csv", WIDE), Options(**WIDE_OPTIONS))
        assert sheet.u[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert sheet.lengths.tolist() == [3, 2, 3]
        assert sheet.ids == ["p", "q", "r"]
        assert list(sheet.y) == ["up", "down", "up"]
        assert sheet.steps == ("t0", "t1", "t2")
        assert "in the order of their numbers" in " ".join(sheet.notes)
        assert "not called like steps: 'age'" in " ".join(sheet.notes)

    def test_a_gap_inside_has_its_place(self, tmp_path):
        path = put(tmp_path, "d.csv", WIDE.replace("p,3,1,2", "p,3,1,"))
        with pytest.raises(DataError, match=r"d.csv:2 column 't1': 1 of 8 values are missing"):
            read(path, Options(**WIDE_OPTIONS))
        data = Data.read(path, **WIDE_OPTIONS, missing="ffill", split=(1, 0, 0))
        assert data.overview.gaps.values_filled == 1

    def test_numbers_as_names_and_no_names(self, tmp_path):
        path = put(tmp_path, "d.csv", "0,1,2\n1,2,3\n4,5,6\n")
        assert read(path, Options(wide=True, **NEXT)).lengths.tolist() == [3, 3]
        path = put(tmp_path, "d.tsv", "a\t1\t2\nb\t4\t5\n")
        options = Options(wide=True, header=False, target=("c1",))
        assert list(read(path, options).y) == ["a", "b"]

    def test_dates_as_names(self, tmp_path):
        path = put(tmp_path, "d.csv", "2024-01-31,2024-02-01\n1,2\n3,4\n")
        assert read(path, Options(wide=True, **NEXT)).u[:, 0].tolist() == [1, 2, 3, 4]

    @pytest.mark.parametrize("head", ["a1,a2,b1,b2", "s1_t1,s2_t1,s1_t2,s2_t2"])
    def test_several_features_are_refused(self, head, tmp_path):
        path = put(tmp_path, "d.csv", f"{head}\n1,2,3,4\n5,6,7,8\n")
        with pytest.raises(DataError, match=r"look like several features.*--features"):
            read(path, Options(wide=True, **NEXT))
        chosen = tuple(head.split(",")[:2])
        assert read(path, Options(wide=True, features=chosen, **NEXT)).steps == chosen

    def test_what_does_not_fit_is_refused(self, tmp_path):
        path = put(tmp_path, "d.csv", WIDE)
        with pytest.raises(ConfigError, match="each row is a sample already"):
            read(path, Options(wide=True, rows="samples"))
        with pytest.raises(ConfigError, match="--time names a column"):
            read(path, Options(wide=True, time="age"))
        with pytest.raises(ConfigError, match="--categorical names features of words"):
            read(path, Options(wide=True, categorical=("t1",)))
        np.save(tmp_path / "d.npy", np.zeros((2, 3)))
        with pytest.raises(DataError, match="--wide reads tables"):
            read(tmp_path / "d.npy", Options(wide=True, **NEXT))
        with pytest.raises(DataError, match=r"d.csv:3 column 't0': the row has no value"):
            read(put(tmp_path, "d.csv", WIDE.replace("q,,4,5", "q,,,")), Options(**WIDE_OPTIONS))
        with pytest.raises(DataError, match=r"id 'p' appears again.*needs no --wide"):
            read(put(tmp_path, "d.csv", WIDE.replace("q,", "p,")), Options(**WIDE_OPTIONS))

    def test_other_files_are_read_like_the_training_file(self, tmp_path):
        path = put(tmp_path, "d.csv", WIDE)
        data = Data.read(path, **WIDE_OPTIONS, split=(1, 0, 0))
        described = data.describe()
        assert described["reading"]["steps"] == ["t0", "t1", "t2"]

        def lengths(head, row):
            new = put(tmp_path, "new.csv", f"{head}\n{row}\n")
            return Data.for_prediction(described, new).cut.sheet.lengths.tolist()

        assert lengths("name,t0,t1,t2", "z,1,2,3") == [3]
        assert lengths("name,t0,t1", "z,1,2") == [2]  # shorter
        assert lengths("name,t0,t1,t2,t3,note", "z,1,2,3,4,") == [4]  # longer
        with pytest.raises(DataError, match="columns 't1' are missing"):
            lengths("name,t0,t2", "z,1,3")

    def test_typed_files_and_held_out_ones(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        feather = pytest.importorskip("pyarrow.feather")
        path = put(tmp_path, "d.csv", WIDE)
        plain = read(path, Options(**WIDE_OPTIONS))
        columns = {
            "name": ["p", "q", "r"],
            "t0": [1, 4, 6],
            "t1": [2, 5, 7],
            "t2": [3, None, 8],
            "label": ["up", "down", "up"],
        }
        feather.write_feather(pa.table(columns), str(tmp_path / "d.feather"))
        assert_same(read(tmp_path / "d.feather", Options(**WIDE_OPTIONS)), plain)
        other = put(tmp_path, "e.csv", "name,t0,t1,label\nv,9,9,up\nw,8,9,down\n")
        data = Data.read(path, test=other, **WIDE_OPTIONS)
        assert data.overview.files["test"].lengths == [2, 2, 2]

    def test_a_description_from_a_stranger_is_checked(self, tmp_path):
        data = Data.read(put(tmp_path, "d.csv", WIDE), **WIDE_OPTIONS, split=(1, 0, 0))
        for bad in ({"wide": "yes"}, {"steps": "t0"}, {"steps": ["t0", "t0"]}, {"steps": [1]}):
            described = data.describe()
            described["reading"] |= bad
            with pytest.raises(CoadjointError, match="damaged"):
                Data.for_prediction(described, tmp_path / "d.csv")


def test_columns_are_kept_of_every_table(tmp_path):
    pa = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(pa.table({"a": [1.5, 2.5], "b": ["x", "y"]}), str(tmp_path / "d.feather"))
    path = put(tmp_path, "d.csv.gz", gzip.compress(as_index("a,b\n1.5,x\n2.5,y\n").encode()))
    for file in (path, tmp_path / "d.feather"):
        (column,) = read_columns(file, Options(use="predict"), ["b"])
        assert list(column.values) == ["x", "y"]


def test_compressed_files_hold_no_more_than_their_text(tmp_path):
    """Numbers survive the way through gzip bit for bit."""
    values = np.random.default_rng(0).normal(size=(20, 2))
    text = io.StringIO()
    text.write("a,b\n" + "".join(f"{a!r},{b!r}\n" for a, b in values.tolist()))
    path = put(tmp_path, "d.csv.gz", gzip.compress(text.getvalue().encode()))
    assert read(path, Options(**NEXT)).u.tobytes() == values.tobytes()
