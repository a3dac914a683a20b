"""Prepared sets of arrays: the same numbers as from the .npz and .npy files themselves."""

import numpy as np
import pytest

from coadjoint.errors import ConfigError, DataError
from coadjoint.tasks import array_chunks
from coadjoint.tasks.data import Data
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.prepared import open_prepared
from coadjoint.tasks.preparing import prepare
from same_sets import assert_same

N, T, C = 11, 6, 3
DRAW = np.random.default_rng(0)
U = DRAW.normal(size=(N, T, C))
LENGTHS = 2 + np.arange(N) % (T - 1)
ROWS = DRAW.normal(size=(int(LENGTHS.sum()), C)).astype(np.float32)
WORDS = np.array(["up", "down"])[np.arange(N) % 2]
WITH_GAPS = np.where(DRAW.random(U.shape) < 0.1, np.nan, U)
FILES = {  # the arrays, how they are read, how training goes on
    "classes of sequences": ({"u": U, "y": WORDS}, {}, {}),
    "padded": ({"u": U, "lengths": LENGTHS, "y": np.arange(N) % 3.0}, {"kind": "classify"}, {}),
    "ragged": ({"u": ROWS, "lengths": LENGTHS, "y": WORDS.astype("S")}, {}, {}),
    "names": ({"u": U, "y": WORDS, "ids": np.arange(N) * 7}, {}, {}),
    "one feature": ({"X": U[..., 0].astype(np.int16), "y": WORDS}, {}, {}),
    "each step": (
        {"X": U, "lengths": LENGTHS, "y": U[..., 0] ** 2},
        {"kind": "regress", "at": "every"},
        {"at": "every"},
    ),
    "several": ({"u": U, "y": DRAW.normal(size=(N, T, 2))}, {"kind": "regress"}, {"at": "every"}),
    "some targets": ({"u": U, "y": DRAW.normal(size=(N, 2))}, {"kind": "regress"}, {}),
    "next": ({"u": U, "y": WORDS}, {"kind": "next"}, {"window": 4}),
    "large": ({"u": np.where(U > 0, 2**53, 1).astype(np.int64), "y": WORDS}, {}, {}),
}


@pytest.fixture(params=[7, 1000], ids=["small chunks", "one chunk"])
def rows_per_chunk(request, monkeypatch):
    monkeypatch.setattr(array_chunks, "ROWS_PER_CHUNK", request.param)


def save(folder, arrays, name="d.npz", write=np.savez):
    write(folder / name, **arrays)
    return folder / name


def prepared(folder, *paths, name="d.co", **options):
    out = folder / name
    out.mkdir()
    prepare(paths, out, Options(**options))
    return out


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", FILES)
def test_a_prepared_set_has_the_bits_of_its_arrays(tmp_path, kind, write):
    arrays, reading, training = FILES[kind]
    path = save(tmp_path, arrays, write=write)
    out = prepared(tmp_path, path, **reading)
    a = Data.read(path, **reading | training)
    b = Data.read(out, **training)
    assert_same(a, b)
    for key in ("features", "targets", "named", "columns"):
        assert getattr(a.description, key) == getattr(b.description, key), key
    is_small = arrays.get("u", arrays.get("X")).dtype.itemsize <= 4
    assert np.load(out / "u.npy").dtype == (np.float32 if is_small else np.float64)


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("missing", ["drop", "ffill", "mask"])
def test_gaps_are_dealt_with_as_in_the_arrays(tmp_path, missing):
    u = WITH_GAPS.copy()
    u[:, 0] = U[:, 0]  # there is something to carry forward
    path = save(tmp_path, {"u": u, "y": WORDS})
    out = prepared(tmp_path, path, missing=missing)
    assert_same(Data.read(path, missing=missing), Data.read(out))


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("shape", [(N, T, C), (N, T), (N * T,)])
def test_inputs_alone(tmp_path, shape):
    np.save(tmp_path / "u.npy", np.resize(U, shape))
    out = prepared(tmp_path, tmp_path / "u.npy", kind="next")
    window = {"window": 5} if len(shape) == 1 else {}
    assert_same(Data.read(tmp_path / "u.npy", kind="next", **window), Data.read(out, **window))


def test_several_files_go_on_counting(tmp_path):
    one = save(tmp_path, {"u": U, "y": WORDS})
    other = save(tmp_path, {"u": U[:5] + 1, "y": WORDS[:5]}, "e.npz")
    out = prepared(tmp_path, one, other)
    both = save(tmp_path, {"u": np.concatenate([U, U[:5] + 1]), "y": [*WORDS, *WORDS[:5]]}, "f.npz")
    assert_same(Data.read(both), Data.read(out))
    assert [s["first"] for s in open_prepared(out).about["sources"]] == [0, N * T]


@pytest.mark.slow
def test_a_model_of_prepared_arrays_reads_arrays(tmp_path, coadjoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, {"u": U, "y": WORDS})
    save(tmp_path, {"u": U[:4] + 1}, "new.npz")
    assert coadjoint("prepare", "d.npz", "--out", "d.co")[0] == 0
    small = "--cell elman --hidden 2 --steps 2 --quiet --batch 4"
    assert coadjoint("train", "--train", "d.co", "--out", "run", *small.split())[0] == 0
    code, out, _ = coadjoint("predict", "run", "new.npz", "--out", "-")
    assert code == 0
    assert len(out.splitlines()) == 5
    assert coadjoint("predict", "run", "d.co", "--out", "a.csv")[0] == 0


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"u": np.asfortranarray(U), "y": WORDS}, {}, "Write numpy.ascontiguousarray of it"),
        ({"u": U}, {}, "holds inputs only"),
        ({"u": U, "y": WORDS[:3]}, {}, "expected y to begin with 11"),
        ({"u": U[..., 0], "y": WORDS}, {}, r"write u\[:, :, None\]"),
        ({"u": U, "y": np.arange(N)}, {}, "--kind"),
        ({"u": U, "y": U[..., 0]}, {"kind": "regress"}, "--at every or --at last"),
        ({"u": WITH_GAPS, "y": WORDS}, {}, r"u\[\d+, \d, \d\] column 'u\d': \d+ of \d+ values"),
        ({"u": np.where(U > 2, np.inf, U), "y": WORDS}, {}, r"u\[\d+, \d, \d\].* is infinite"),
        (
            {"u": np.where(U > 1, 2**53 + 1, 1).astype(np.int64), "y": WORDS},
            {},
            r"u\[\d+, \d, \d\] column",
        ),
        ({"u": U, "y": WORDS}, {"features": ("u0",)}, "leave out --features"),
        ({"u": U, "y": WORDS, "ids": np.zeros(N, int)}, {}, "expected 11 different ones"),
        ({"u": U, "y": WORDS, "lengths": LENGTHS + T}, {}, r"expected 1\.\.6"),
    ],
)
def test_what_is_refused(tmp_path, arrays, options, message):
    path = save(tmp_path, arrays)
    with pytest.raises((DataError, ConfigError), match=message):
        prepared(tmp_path, path, **options)


def test_files_of_another_form_are_refused(tmp_path):
    one = save(tmp_path, {"u": U, "y": WORDS})
    narrow = save(tmp_path, {"u": U[..., :2], "y": WORDS}, "e.npz")
    (tmp_path / "t.csv").write_text("id,u0,label\na,1,up\nb,2,down\n")
    with pytest.raises(DataError, match=r"e.npz has 2 features and 1 targets; d.npz"):
        prepared(tmp_path, one, narrow)
    with pytest.raises(DataError, match=r"t.csv holds a table and d.npz, the first file, arrays"):
        prepared(tmp_path, one, tmp_path / "t.csv", name="e.co")
    with pytest.raises(DataError, match=r"d.npz holds arrays and t.csv, the first file, a table"):
        prepared(tmp_path, tmp_path / "t.csv", one, name="f.co")
    with pytest.raises(ConfigError, match="for a table, pass it to train"):
        prepared(tmp_path, tmp_path / "t.csv", name="g.co", at="last")


def test_a_damaged_archive_is_named(tmp_path):
    path = save(tmp_path, {"u": U, "y": WORDS})
    data = bytearray(path.read_bytes())
    place = data.index(U.tobytes()) + 5
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="array 'u' is damaged: Bad CRC-32"):
        prepared(tmp_path, path)
