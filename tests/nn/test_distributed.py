"""co.record works under distributed wrappers, or refuses in one sentence.

Two real processes (gloo) train a wrapped model; its gradients must be those of a single process.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import warm
from paths import EXAMPLES, SUPPORT
from ranks import NETWORKS, OUTPUTS, PLACES, WORLD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="needs gloo",
    ),
]

FORWARD = ("inside", "self", "outputs-inside")
STATIC = (
    r"^DistributedDataParallel\(static_graph=True\) .* inside the forward of the wrapped "
    r"module, or leave out"
)
SHARDED = (
    r"^(rnn|enter|the module) is inside a module that fully_shard has sharded, .* inside the "
    r"forward of one sharded"
)
BETWEEN = (
    r"^a module between the recorded one and the loss is sharded by fully_shard separately, "
    r".* inside the forward"
)
FLAT = (
    r"^the loss depends on weights that FullyShardedDataParallel has sharded, .* inside the "
    r"forward of one sharded"
)
HIDDEN = (
    r"^(Distr|fully).* returns a run, in which it finds none: wrap a module that calls the "
    r"Network"
)


def expectation(wrapper: str, place: str) -> str | None:
    """What a case is refused with; None if it is exact."""
    if place == "network" and wrapper.startswith(("ddp-static", "sharded")):
        return HIDDEN
    if place == "network-inside":
        return None
    if wrapper.startswith("ddp-static"):
        return None if place in (*FORWARD, "later") else STATIC
    if wrapper.startswith("ddp"):
        return None
    if wrapper.startswith("flat"):
        return None if place in FORWARD else FLAT
    if wrapper == "sharded-rnn" or place not in FORWARD:
        return SHARDED
    return BETWEEN if wrapper == "sharded-readout" else None


def cases(places: tuple[str, ...], *wrappers: str) -> list[str]:
    return [f"{wrapper}/{place}" for wrapper, place in itertools.product(wrappers, places)]


GROUPS = {
    "ddp": [
        *cases((*PLACES, *NETWORKS), "ddp", "ddp-unused", "ddp-static"),
        *cases(("around", "inside"), "ddp-views", "ddp-no-sync", "ddp-static-unused"),
        *cases(OUTPUTS, "ddp", "ddp-static"),
    ],
    "sharded": [  # it may end a process: apart
        *cases((*PLACES, *NETWORKS), "sharded", "sharded-freed"),
        *cases(
            ("around", "inside"),
            "sharded-kept",
            "sharded-rnn",
            "sharded-readout",
            "sharded-encoder",
        ),
        *cases(("around", "inner", "inside", "begun"), "flat"),
        *cases(("around", "inside"), "flat-grad"),
        *cases(OUTPUTS, "sharded", "flat"),
        "flat-alone/around",
    ],
}


def in_two_processes(script: Path, *arguments: str) -> list[str]:
    """Run `script RANK STORE OUT arguments` in two processes -> what each wrote to OUT."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"out{rank}" for rank in range(WORLD)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

        def process(rank: int) -> subprocess.CompletedProcess[str]:
            words = (script, rank, f"{folder}/store", outs[rank], *arguments)
            return warm.run(*words, cwd=Path(folder), env=environment)

        with ThreadPoolExecutor(WORLD) as pool:
            processes = list(pool.map(process, range(WORLD)))
        for done in processes:
            assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
        return [out.read_text() for out in outs]


@functools.cache
def outcomes(group: str) -> list[dict[str, float | str]] | str:
    """What became of the cases of a group in each process, or what the processes died of."""
    try:
        return [json.loads(text) for text in in_two_processes(SUPPORT / "ranks.py", *GROUPS[group])]
    except (AssertionError, TimeoutError) as failure:
        return str(failure)


@pytest.mark.parametrize(
    ("group", "case"),
    [(group, case) for group in GROUPS for case in GROUPS[group]],
)
def test_wrapped_models_are_exact_or_refused(group, case):
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


def test_shares_of_unequal_size_are_weighed(tmp_path):
    """The example's weights are those of one process with the factor it shows, and not without."""
    script = EXAMPLES / "loop_ddp.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = warm.run(script, "3", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    scaled, unscaled = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert scaled < 1e-12
    assert unscaled > 1e-5
    assert not list(tmp_path.iterdir())
