"""co.record in two real processes (gloo): a wrapper gives the gradients of one process, or is refused in a sentence."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ranks import PLACES, WORLD

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)

HERE = Path(__file__).parent
FORWARD = ("inside", "self")
STATIC = r"^DistributedDataParallel\(static_graph=True\) .* inside the forward of the wrapped module, or leave out"
SHARDED = r"^(rnn|the module) is inside a module that fully_shard has sharded, .* inside the forward of one sharded"
BETWEEN = r"^a module between the recorded one and the loss is sharded by fully_shard on its own, .* inside the forward"


def expectation(wrapper: str, place: str) -> str | None:
    """What a case is refused with; None if it is exact."""
    if wrapper.startswith("ddp-static"):
        return None if place in (*FORWARD, "later") else STATIC
    if wrapper.startswith("ddp"):
        return None
    if wrapper == "sharded-rnn" or place not in FORWARD:
        return SHARDED
    return BETWEEN if wrapper == "sharded-readout" else None


DDP = [f"{w}/{p}" for w, p in itertools.product(("ddp", "ddp-unused", "ddp-views"), PLACES)]
STATICS = [f"{w}/{p}" for w, p in itertools.product(("ddp-static", "ddp-static-unused"), PLACES)]
SHARDS = [
    f"{w}/{p}"
    for w, p in itertools.product(
        ("sharded", "sharded-freed", "sharded-kept", "sharded-rnn", "sharded-readout", "sharded-encoder"), PLACES
    )
]
GROUPS = {"ddp": tuple(DDP + STATICS), "sharded": tuple(SHARDS)}  # what is sharded may end a process: apart


def in_two_processes(script: Path, *arguments: str) -> list[str]:
    """Run `script RANK STORE OUT arguments` in two processes -> what each wrote to OUT."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"out{rank}" for rank in range(WORLD)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), f"{folder}/store", out, *arguments],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            errors = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, error in zip(processes, errors, strict=True):
            assert process.returncode == 0, f"exit code {process.returncode}: {error[-2000:]}"
        return [out.read_text() for out in outs]


@functools.cache
def outcomes(group: str) -> list[dict[str, float | str]] | str:
    """What became of the cases of a group in each process, or what the processes died of."""
    try:
        return [json.loads(text) for text in in_two_processes(HERE / "ranks.py", *GROUPS[group])]
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        return str(failure)


@pytest.mark.parametrize(("group", "case"), [(group, case) for group, cases in GROUPS.items() for case in cases])
def test_exact_or_refused(group, case):
    expected = expectation(*case.split("/"))
    results = outcomes(group)
    assert not isinstance(results, str), results
    for found in results:
        if expected is None:
            assert isinstance(found[case], float), found[case]
            assert found[case] < 1e-12
        else:
            assert isinstance(found[case], str), f"accepted, and off by {found[case]}"
            assert re.match(expected, found[case])
            assert found[case].count(". ") == 0  # one sentence
