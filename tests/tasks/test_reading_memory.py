"""How much memory readers take beyond the baseline: at most three times the features, as float32.

A table has ids, times and labels besides, which weigh more where there are few features: then it is
at most twice all of its columns.
"""

import subprocess
import sys

import numpy as np
import pytest

T = 100  # steps
PARTS = 6 << 20  # bytes: what is being read or looked at
FEATURE = 4  # bytes of a number
BESIDE = 8 + 8 + 8  # of an id, a time and a label
# (files, sequences, features). What is read at a time weighs more in a text, whose set is larger
# for that. The last two are sets of 8,000 sequences, as docs/scale.md has them.
CASES = [
    (("d.parquet", "d.arrow", "d.npz", "d.npy"), 900, 24),
    (("d.csv",), 2700, 24),
    (("d.parquet",), 8000, 8),
    (("d.parquet",), 8000, 2),
]
CHILD = """
import sys
from coadjoint.tasks.data import Data

def figure(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

for small, large in zip(sys.argv[1::2], sys.argv[2::2]):
    kind = "next" if small.endswith(".npy") else "classify"
    for _ in range(2):  # what is loaded or kept once is no matter of the data
        Data.read(small, kind=kind).batch(0, 4, 0)
    before = figure("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    data = Data.read(large, kind=kind)
    data.batch(0, 4, 0)
    print(figure("VmHWM") - before)
    del data
"""


def write(folder, name, n, C):
    """A file with n sequences of C features."""
    draw = np.random.default_rng(n)
    u = draw.standard_normal((n * T, C), dtype=np.float32)
    labels = np.arange(n) % 2
    path = folder / f"{n}-{name}"
    if name.endswith(".npz"):
        np.savez(path, u=u.reshape(n, T, C), y=labels)
    elif name.endswith(".npy"):
        np.save(path, u.reshape(n, T, C))
    else:
        write_table(path, u, labels, n)
    return path


def write_table(path, u, labels, n):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet

    columns = {"id": np.repeat(np.arange(n), T), "time": np.tile(np.arange(T), n)}
    columns |= {f"f{j}": u[:, j] for j in range(u.shape[1])}
    table = arrow.table({**columns, "target": np.repeat(labels, T)})
    writers = {
        ".csv": pyarrow.csv.write_csv,
        ".parquet": pyarrow.parquet.write_table,
        ".arrow": pyarrow.feather.write_feather,
    }
    writers[path.suffix](table, str(path))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("names", "n", "C"), CASES)
def test_readers_take_three_times_the_features_or_twice_the_table(names, n, C, tmp_path):
    paths = []
    for name in names:
        paths += [str(write(tmp_path, name, 40, C)), str(write(tmp_path, name, n, C))]
    command = [sys.executable, "-c", CHILD, *paths]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = dict(zip(names, map(int, child.stdout.split()), strict=True))
    most = 3 * n * T * C * FEATURE + PARTS
    if C < 8:
        most = 2 * n * T * (C * FEATURE + BESIDE)
    assert all(figure < most for figure in figures.values()), (figures, most)
