"""A set that is four times larger than the memory that training may still take."""

import json
import subprocess
import sys

import numpy as np
import pytest

from coadjoint.tasks.array_files import ArrayWriter
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.preparing import prepare

LIMIT = 24 << 20  # bytes of address space, beyond what the program has before it trains
C, T = 256, 32
CHILD = """
import resource
import sys

import numpy as np

import coadjoint as co
from coadjoint.tasks.data import Data

small, large, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])

def run(path):
    data = Data.read(path, split=(0.98, 0.01, 0.01))  # held-out batches are small, too
    net = co.Network("gru", inputs=data.inputs, hidden=4, outputs=2, output="softmax")
    co.train(net, data, steps=3, every=3, batch=4, tests=16)
    return net

run(small)  # libraries, threads and compiled code are there before the limit
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + limit
resource.setrlimit(resource.RLIMIT_AS, (most, most))
net = run(large)
print(sum(float(p.detach().abs().sum()) for p in net.parameters()))
try:  # the limit is one: a map of the array alone is beyond it
    np.load(large + "/u.npy", mmap_mode="r")
except OSError:
    print("refused")
"""


def write(folder, n):
    """A small prepared set."""
    draw = np.random.default_rng(n)
    rows = [",".join(["id", *(f"f{j}" for j in range(C)), "target"])]
    for i in range(n):
        for values in draw.normal(size=(T, C)).round(2).tolist():
            rows.append(",".join(map(str, [i, *values, "ab"[i % 2]])))
    (folder / "small.csv").write_text("\n".join(rows) + "\n")
    out = folder / "small.co"
    out.mkdir()
    prepare([folder / "small.csv"], out, Options(kind="classify"))
    return out


def enlarge(small, n):
    """A set with n sequences, written without a table."""
    out = small.with_name("large.co")
    out.mkdir()
    draw = np.random.default_rng(0)
    about = json.loads((small / "description.json").read_text())
    del about["sha256"]  # it is that of the small set
    ids = "".join(f"{i:06d}" for i in range(n)).encode()
    arrays = {
        "u": (draw.standard_normal((n * T, C), dtype=np.float32)),
        "y": np.repeat(np.arange(n, dtype=np.int32) % 2, T)[:, None],
        "starts": np.arange(n + 1) * T,
        "ids": np.frombuffer(ids, np.uint8),
        "id_ends": 6 * np.arange(1, n + 1),
        "hashes": draw.integers(0, 256, (n, 16), dtype=np.uint8),
    }
    about |= {"rows": n * T, "sequences": n, "arrays": {}}
    for name, values in arrays.items():
        array = ArrayWriter(out / f"{name}.npy", values.dtype, (*values.shape, None)[1])
        array.append(values)
        about["arrays"][name] = array.close()
    (out / "description.json").write_text(json.dumps(about))
    return out


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")
def test_a_set_four_times_the_limit_of_address_space_trains(tmp_path):
    small = write(tmp_path, 8)
    large = enlarge(small, 1 + 4 * LIMIT // (T * C * 4))
    assert (large / "u.npy").stat().st_size > 4 * LIMIT
    command = [sys.executable, "-c", CHILD, str(small), str(large), str(LIMIT)]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    total, mapping = child.stdout.split()
    assert float(total) > 0
    assert mapping == "refused"
