"""Four processes, and two machines: two launches of torchrun that meet on the loopback address."""

from __future__ import annotations

import json
import os
import signal
import socket
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
]

TRAIN = f"train temporal-order --cell gru --penalty log-ratio --checkpoint 10 --every 20 {SMALL}"
FILES = ("metrics.jsonl", "model.safetensors")


def train_alone(words: str, folder: Path) -> None:
    code, _, complaint = call(f"{words} --out {folder} --quiet")
    assert (code, complaint) == (0, "")


def assert_same(one: Path, other: Path) -> None:
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_four_processes_make_four_shards(tmp_path):
    words = f"{TRAIN} --steps 60"
    process = start(4, "-m", "coadjoint", *words.split(), "--out", "run", cwd=tmp_path)
    assert process.wait(timeout=GRACE) == 0
    assert "4 processes, 4 shards" in (tmp_path / "torchrun.out").read_text()
    assert said(tmp_path) == []
    train_alone(f"{words} --shards 4", tmp_path / "alone")
    assert_same(tmp_path / "run", tmp_path / "alone")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_machines_train_one_model(tmp_path):
    """The second machine sees no folder of the first: it has a working folder of its own."""
    words = f"{TRAIN} --steps 60"
    meeting = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()}"
    machines = []
    for rank in range(2):
        home = tmp_path / f"machine-{rank}"
        home.mkdir()
        command = ("-m", "coadjoint", *words.split(), "--out", "run")
        machines.append(start(1, *command, cwd=home, nodes=f"{meeting} --node-rank {rank}"))
    try:
        assert [machine.wait(timeout=GRACE) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
    assert not (tmp_path / "machine-1" / "run").exists()
    assert "2 processes, 2 shards" in (tmp_path / "machine-0" / "torchrun.out").read_text()
    assert (tmp_path / "machine-1" / "torchrun.out").read_text() == ""
    train_alone(f"{words} --shards 2", tmp_path / "alone")
    assert_same(tmp_path / "machine-0" / "run", tmp_path / "alone")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_the_run(sent, tmp_path):
    words = f"{TRAIN} --steps 100000 --out run"
    process = start(3, "-m", "coadjoint", *words.split(), cwd=tmp_path)
    wait_for_rows(tmp_path / "run", 20, process)
    process.send_signal(sent)
    process.wait(timeout=GRACE)
    [line] = said(tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert f"saved at step {result['step']:,}. Resume with: coadjoint resume run" in line
    steps = result["step"] + 5
    resumed = start(2, "-m", "coadjoint", *f"resume run --steps {steps}".split(), cwd=tmp_path)
    assert resumed.wait(timeout=GRACE) == 0
    train_alone(f"{TRAIN} --steps {steps} --shards 3", tmp_path / "alone")
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_restart_by_torchrun_ends_in_the_same_bits(killed, tmp_path):
    """torchrun starts all processes again when one has died; --continue goes on."""
    words = f"{TRAIN} --steps 200 --shards 2 --continue"
    command = ("-m", "coadjoint", *words.split(), "--out", "run")
    process = start(2, *command, cwd=tmp_path, nodes="--standalone --max-restarts 2")
    try:
        for rows in (30, 120):
            wait_for_rows(tmp_path / "run", rows, process)
            victim = worker(process, killed)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
        assert process.wait(timeout=GRACE) == 0, (tmp_path / "torchrun.err").read_text()[-2000:]
    finally:
        process.kill()
    train_alone(f"{TRAIN} --steps 200 --shards 2", tmp_path / "alone")
    assert_same(tmp_path / "run", tmp_path / "alone")
