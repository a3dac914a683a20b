"""The examples of users' own loops, in two real processes (gloo): the weights of one process."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from paths import SUPPORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="needs gloo",
    ),
]

EXACT = {
    "loop_fsdp": "torch",
    "loop_accelerate": "accelerate",
    "loop_lightning": "lightning",
    "lightning, static_graph": "lightning",
}


@functools.cache
def outcomes() -> dict[str, dict[str, Any]]:
    """What tests/support/own_loops.py writes; all loops share one launch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        place = Path(folder)
        for done in warm.launch(2, SUPPORT / "own_loops.py", out, cwd=place, env=environment):
            assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(out.read_text())


@pytest.mark.parametrize("name", EXACT)
def test_loops_in_two_processes_end_with_the_weights_of_one(name):
    pytest.importorskip(EXACT[name])
    found = outcomes()["found"]
    assert found["nothing learned"] > 1e-3
    assert found[name] < 1e-12


def test_accelerate_with_a_static_graph_is_refused():
    pytest.importorskip("accelerate")
    refusal = outcomes()["refused"]["accelerate, static_graph"]
    assert refusal.startswith("DistributedDataParallel(static_graph=True) mistakes")
    assert "inside the forward of the wrapped module" in refusal
