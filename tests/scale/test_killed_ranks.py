"""Processes of torchrun are killed at random instants; the same command is given again until the
run ends, on any number of processes. It must end in the bits of an undisturbed run.

A kill counts if the rank was alive; those of ranks that are starting are counted by themselves.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
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

KILLS = 5  # of ranks of a run that have taken a step; and one of a rank that is starting
SHARDS = 4
CASES = {
    "elman adam": "--steps 400 --every 50 --checkpoint 3 --clip 1",
    "gru penalised": "--cell gru --penalty log-ratio --steps 400 --every 40 --checkpoint 4",
    "steered": "--penalty log-ratio --weight-target 0.01 --accumulate 2 --steps 300 --every 60 "
    "--checkpoint 3",
    "dropout": "--layers 2 --dropout 0.2 --optimiser nesterov --steps 400 --every 50 "
    "--checkpoint 5",
    "lbfgs": "--optimiser lbfgs --steps 150 --every 25 --checkpoint 2",
    "armijo": "--optimiser sgd --lr 0.5 --step-rule armijo --schedule plateau --plateau 1 "
    "--steps 400 --every 20 --checkpoint 3",
}
MOST_PROCESSES = {"elman adam": 4}  # of a start; 3 otherwise
RESUMED = ("gru penalised",)  # by `coadjoint resume`, and not by the same command with --continue
LATEST = 0.6  # of the steps: so that a run does not end before the kill


def rows_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def instants(steps: int, chance: random.Random) -> list[int | None]:
    """The steps after which ranks are killed, in order; None for one that is starting."""
    chosen: list[int | None] = []
    chosen += sorted(chance.sample(range(1, int(LATEST * steps)), KILLS))
    chosen.insert(chance.randrange(KILLS + 1), None)
    return chosen


def wait_for_rank(process: subprocess.Popen[str], rank: int) -> int:
    """Wait until the process of a rank exists."""
    deadline = time.monotonic() + GRACE
    while process.poll() is None and time.monotonic() < deadline:
        found = worker(process, rank)
        if found is not None:
            return found
        time.sleep(0.01)
    pytest.fail("torchrun has started no rank")


@pytest.mark.parametrize("case", CASES)
def test_killed_runs_end_in_the_bits_of_an_undisturbed_one(case, tmp_path):
    chance = random.Random(case)
    words = f"train temporal-order {CASES[case]} {SMALL} --shards {SHARDS} --continue --quiet"
    run = tmp_path / "run"
    command = [*words.split(), "--out", run]
    resume = ["resume", run, "--quiet"] if case in RESUMED else command
    steps = int(words.split("--steps ")[1].split()[0])
    strikes = Counter()
    for kill, instant in enumerate(instants(steps, chance)):
        size = chance.choice((2, 2, MOST_PROCESSES.get(case, 3)))
        rank = chance.randrange(size)
        name = f"start-{kill}"
        before = rows_in(run)
        given = resume if before else command  # before the first row there may be no run
        process = start(size, "-m", "coadjoint", *given, cwd=tmp_path, name=name)
        try:
            victim = wait_for_rank(process, rank)
            if instant is None:
                time.sleep(0.5 * chance.random())
            else:
                # Rows that are new are of this start: all ranks have taken these steps.
                wait_for_rows(run, max(before + 1, instant), process)
                time.sleep(0.02 * chance.random())
            assert worker(process, rank) == victim, "it lives"
            has_stepped = rows_in(run) > before
            os.kill(victim, signal.SIGKILL)
            assert process.wait(timeout=GRACE) != 0
        finally:
            process.kill()
        errors = (tmp_path / f"{name}.err").read_text(errors="replace")
        assert re.search(rf"exitcode\s*: -9\D+{victim}\b", errors), errors[-2000:]
        assert not (run / "result.json").exists()
        strikes["running" if has_stepped else "starting"] += 1
        lines = said(tmp_path, name)
        # Before the processes have met, torchrun's own table is all there is.
        assert len(lines) == 1 if has_stepped else len(lines) <= 1, lines
        assert "bug" not in "".join(lines)
    assert strikes == {"running": KILLS, "starting": 1}
    last = start(chance.choice((1, 2)), "-m", "coadjoint", *resume, cwd=tmp_path, name="last")
    assert last.wait(timeout=GRACE) == 0, (tmp_path / "last.err").read_text()[-2000:]
    undisturbed = tmp_path / "undisturbed"
    code, _, complaint = call(f"{words} --out {undisturbed}")
    assert (code, complaint) == (0, "")
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (run / file).read_bytes() == (undisturbed / file).read_bytes()
