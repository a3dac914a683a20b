"""Processes of torchrun are killed at random instants; the same command is given again until the
run ends, on any number of processes. It must end in the bits of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from sharing_ranks import SMALL, call
from torchrun import GRACE, said, start, wait_for_rows, worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.scale,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="needs gloo",
    ),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks by /proc"),
]

KILLS = 5  # of a run
SHARDS = 4
CASES = {
    "elman adam": "--steps 140 --every 20 --checkpoint 3 --clip 1",
    "gru penalised": "--cell gru --penalty log-ratio --steps 120 --every 15 --checkpoint 4",
    "steered": "--penalty log-ratio --weight-target 0.01 --accumulate 2 --steps 120 --every 30 "
    "--checkpoint 3",
    "dropout": "--layers 2 --dropout 0.2 --optimiser nesterov --steps 120 --every 20 "
    "--checkpoint 5",
    "lbfgs": "--optimiser lbfgs --steps 60 --every 10 --checkpoint 2",
    "armijo": "--optimiser sgd --lr 0.5 --step-rule armijo --schedule plateau --plateau 1 "
    "--steps 140 --every 10 --checkpoint 3",
}


def rows_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


@pytest.mark.parametrize("case", CASES)
def test_killed_runs_end_in_the_bits_of_an_undisturbed_one(case, tmp_path):
    chance = random.Random(case)
    words = f"train temporal-order {CASES[case]} {SMALL} --shards {SHARDS} --continue --quiet"
    run = tmp_path / "run"
    for kill in range(KILLS):
        size = chance.choice((2, 2, 3))
        name = f"start-{kill}"
        command = [*words.split(), "--out", run]
        process = start(size, "-m", "coadjoint", *command, cwd=tmp_path, name=name)
        try:
            if chance.random() < 0.85:  # else as the processes start
                wait_for_rows(run, rows_in(run) + chance.randrange(1, 25), process)
            time.sleep(0.05 * chance.random())
            victim = worker(process, chance.randrange(size))
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            process.wait(timeout=GRACE)
        finally:
            process.kill()
        lines = said(tmp_path, name)
        assert len(lines) <= 1, lines
        assert "bug" not in "".join(lines)
    last = start(chance.choice((1, 2)), "-m", "coadjoint", *command, cwd=tmp_path, name="last")
    assert last.wait(timeout=GRACE) == 0, (tmp_path / "last.err").read_text()[-2000:]
    undisturbed = tmp_path / "undisturbed"
    code, _, complaint = call(f"{words} --out {undisturbed}")
    assert (code, complaint) == (0, "")
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (run / file).read_bytes() == (undisturbed / file).read_bytes()
