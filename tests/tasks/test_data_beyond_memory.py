"""A set that is four times larger than the memory that training may still take."""

import subprocess
import sys

import numpy as np
import pytest

from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.preparing import prepare

LIMIT = 24 << 20  # bytes of address space, beyond what the program has before it trains
C, T = 64, 400
CHILD = """
import resource
import sys

import coadjoint as co
from coadjoint.tasks.data import Data

small, large, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])

def run(path):
    data = Data.read(path)
    net = co.Network("gru", inputs=data.inputs, hidden=4, outputs=2, output="softmax")
    co.train(net, data, steps=3, every=3, batch=4)
    return net

run(small)  # libraries, threads and compiled code are there before the limit
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + limit
resource.setrlimit(resource.RLIMIT_AS, (most, most))
if sys.argv[4] == "map":
    import numpy as np
    np.load(large + "/u.npy", mmap_mode="r")
net = run(large)
print(sum(float(p.detach().abs().sum()) for p in net.parameters()))
"""


def write(folder, name, n):
    """A prepared set with n sequences."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    draw = np.random.default_rng(n)
    columns = {"id": np.repeat(np.arange(n), T)}
    columns |= {f"f{j}": draw.standard_normal(n * T, dtype=np.float32) for j in range(C)}
    columns["target"] = np.repeat(np.arange(n) % 2, T)
    pyarrow.parquet.write_table(arrow.table(columns), folder / f"{name}.parquet")
    out = folder / f"{name}.co"
    out.mkdir()
    prepare([folder / f"{name}.parquet"], out, Options(kind="classify"))
    return out


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")
def test_a_set_four_times_the_limit_of_address_space_trains(tmp_path):
    small = write(tmp_path, "small", 8)
    large = write(tmp_path, "large", 1 + 4 * LIMIT // (T * C * 4))
    assert (large / "u.npy").stat().st_size > 4 * LIMIT
    command = [sys.executable, "-c", CHILD, str(small), str(large), str(LIMIT)]
    child = subprocess.run([*command, "read"], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) > 0
    # The limit is one: a map of the array alone is beyond it.
    mapped = subprocess.run([*command, "map"], capture_output=True, text=True)
    assert mapped.returncode != 0
    assert "Cannot allocate memory" in mapped.stderr
