"""The Triton kernels against the definition, without a GPU: under Triton's interpreter, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coadjoint.sweeps import triton

HERE = Path(__file__).parent
installed = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton, which comes with torch for GPUs, is not installed",
)

MODES = ["on chip", "blocks", "too large", "too large, few samples", "a root", "the other cells"]


@installed
@pytest.mark.parametrize("mode", MODES)
def test_against_the_definition(mode, tmp_path):
    """Where W and the states stay on the chip, where the states wait in memory, and where W is read at every step."""
    env = os.environ | {"TRITON_INTERPRET": "1", "COADJOINT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py"), mode], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert mode in done.stdout


@installed
def test_refusal_without_a_gpu():
    assert (
        triton.refusal("cpu")
        == "runs on a GPU, and the data is on cpu. Use engine='auto' or move the network with .to('cuda')."
    )
    assert triton.refusal("cuda") is None


def test_refusal_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton.refusal("cuda") == "needs the package triton, and it is not installed. Use engine='auto'."
