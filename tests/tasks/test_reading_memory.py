"""How much memory readers take: at most three times the data, as float32, beyond the baseline."""

import subprocess
import sys

import numpy as np
import pytest

T, C = 100, 24  # steps, features
PARTS = 6 << 20  # bytes: what is being read or looked at
# Sequences by the files that hold them. What is read at a time weighs more in a text, whose set is
# larger for that.
SEQUENCES = {("d.parquet", "d.arrow", "d.npz", "d.npy"): 900, ("d.csv",): 2700}
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


def write(folder, name, n):
    """A file with n sequences."""
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
    columns |= {f"f{j}": u[:, j] for j in range(C)}
    table = arrow.table({**columns, "target": np.repeat(labels, T)})
    writers = {
        ".csv": pyarrow.csv.write_csv,
        ".parquet": pyarrow.parquet.write_table,
        ".arrow": pyarrow.feather.write_feather,
    }
    writers[path.suffix](table, str(path))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("names", "n"), SEQUENCES.items())
def test_readers_take_three_times_the_data(names, n, tmp_path):
    paths = []
    for name in names:
        paths += [str(write(tmp_path, name, 40)), str(write(tmp_path, name, n))]
    command = [sys.executable, "-c", CHILD, *paths]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = dict(zip(names, map(int, child.stdout.split()), strict=True))
    most = 3 * n * T * C * 4 + PARTS
    assert all(figure < most for figure in figures.values()), (figures, most)
