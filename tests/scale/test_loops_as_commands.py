"""The examples of users' own loops, started by torchrun as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from paths import EXAMPLES, ROOT

pytestmark = pytest.mark.scale

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LOOPS = {"loop_fsdp": "torch", "loop_lightning": "lightning", "loop_accelerate": "accelerate"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_two_processes_shows_what_it_says(name, tmp_path):
    """Costates reach the first step, as in one process, and one process speaks."""
    pytest.importorskip(LOOPS[name])
    done = subprocess.run(
        [*TORCHRUN, EXAMPLES / f"{name}.py", "150"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (reach,) = re.findall(r"penalised: .* at the first step 10\^(-?\d+\.\d)", done.stdout)
    assert abs(float(reach)) < 2


def test_a_step_is_predicted_and_measured(tmp_path):
    """The benchmark of docs/scale.md runs, on a small problem."""
    out = tmp_path / "scale.json"
    command = [sys.executable, ROOT / "benchmarks" / "scale.py", "--quick", "--json", out]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2        4" in done.stdout
    assert out.read_text().count('"measured"') == 2
