"""A set four times larger than the memory that a command may still take: prepared, trained on,
predicted.
"""

import subprocess
import sys

import numpy as np
import pytest

LIMIT = 150 << 20  # bytes of address space, beyond what the program has after a small run
C, T, FILES = 64, 100, 4  # a held-out batch has up to 100,000 steps
CHILD = """
import os
import resource
import sys

os.environ["OMP_NUM_THREADS"] = "1"
from coadjoint.cli import main

small, large, limit = sys.argv[1:4]
words = sys.argv[4:]

def run(which):
    sys.argv = ["coadjoint", *(word.replace("SET", which) for word in words)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise

run(small)  # libraries, threads and their memory are there before the limit
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + int(limit)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
run(large)
"""

pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux"),
]


def write_tables(folder, sequences, files):
    """Parquet files whose columns have 32 bits."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir()
    draw = np.random.default_rng(0)
    for k in range(files):
        names = [f"m{k}-{i:05d}" for i in range(sequences)]
        columns = {"id": np.repeat(names, T), "time": np.tile(np.arange(T), sequences)}
        for j in range(C):
            columns[f"f{j}"] = draw.standard_normal(sequences * T, dtype=np.float32)
        columns["label"] = np.repeat(np.array(["calm", "busy"])[np.arange(sequences) % 2], T)
        parquet.write_table(
            arrow.table(columns), folder / f"{k}.parquet", row_group_size=8192, compression="none"
        )


def run_limited(folder, *words):
    """Run a command on the small set, then on the large one under the limit."""
    command = [sys.executable, "-c", CHILD, "small", "large", str(LIMIT), *map(str, words)]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


def test_a_set_four_times_the_limit_is_prepared_trained_on_and_predicted(tmp_path):
    each = 1 + 4 * LIMIT // (FILES * C * T * 4)
    write_tables(tmp_path / "small", 200, 2)  # more than one chunk of rows
    write_tables(tmp_path / "large", each, FILES)
    run_limited(tmp_path, "prepare", "SET", "--out", "SET.co", "--target", "label", "--quiet")
    assert (tmp_path / "large.co" / "u.npy").stat().st_size > 4 * LIMIT
    network = ["--cell", "gru", "--no-bidirectional", "--hidden", 4, "--batch", 4, "--every", 2]
    split = ["--split", "0.98,0.01,0.01", "--quiet"]
    run_limited(
        tmp_path, "train", "--train", "SET.co", "--steps", 2, "--out", "run-SET", *network, *split
    )
    run_limited(tmp_path, "resume", "run-SET", "--steps", 4, "--quiet")
    assert (tmp_path / "run-large" / "model.safetensors").exists()
    run_limited(tmp_path, "predict", "run-SET", "SET.co", "--out", "SET.csv")
    with (tmp_path / "large.csv").open() as file:
        assert sum(1 for _ in file) == 1 + FILES * each
    # An answer for each row: there are more of them than the limit has room for.
    every = [*network, "--at", "every", "--chunk", T, "--out", "every-SET"]
    run_limited(tmp_path, "train", "--train", "SET.co", "--steps", 2, *every, *split)
    run_limited(tmp_path, "predict", "every-SET", "SET.co", "--out", "rows-SET.csv")
    with (tmp_path / "rows-large.csv").open() as file:
        assert sum(1 for _ in file) == 1 + FILES * each * T
    run_limited(tmp_path, "predict", "every-SET", "SET.co", "--out", "rows-SET.parquet")
    from pyarrow import parquet

    written = parquet.ParquetFile(tmp_path / "rows-large.parquet").metadata
    assert written.num_rows == FILES * each * T
    assert written.row_group(0).num_rows < 100_000
