"""Comparisons on a Dask scheduler and workers that are killed, stopped, or speak TLS."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("distributed")
from dask_processes import (
    PATIENCE,
    DaskProcesses,
    eventually,
    has_begun,
    is_gone,
    kill,
    owner,
    parent,
    start_coadjoint,
)

pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are in /proc"),
]
SMALL = ["--length", "12", "--hidden", "4", "--batch", "2", "--tests", "8", "--confirm", "8"]
ENDLESS = 100_000_000  # steps, so that no run ends before something happens to it


def words(steps, *more):
    """A comparison of two runs of so many steps."""
    often = ["--every", "200", "--checkpoint", "200", "--probes", "2", "--lr", "1e-9"]
    return ["compare", "xor", *SMALL, *often, "--steps", str(steps), "-m", "a", *more]


def finish(process):
    """Wait for a command: its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    return process.returncode, out, err


def run_folders(folder, count=2):
    return [folder / "runs" / f"a-seed-{seed}" for seed in range(count)]


def status(run):
    return json.loads((run / "result.json").read_text())["status"]


def shorten(run):
    """Let a run end five steps after the one at which it was stopped."""
    steps = json.loads((run / "result.json").read_text())["step"] + 5
    text = (run / "config.yaml").read_text()
    assert text.count(f"steps: {ENDLESS}\n") == 1
    (run / "config.yaml").write_text(text.replace(f"steps: {ENDLESS}\n", f"steps: {steps}\n"))


def stop_all(runs, process):
    """Stop the process of every run that has a checkpoint, until all are stopped: their numbers."""
    stopped = {}

    def stop_more():
        for run in runs:
            if run not in stopped and any((run / "checkpoints").glob("step-*[1-9]00")):
                stopped[run] = owner(run)
                kill(stopped[run], signal.SIGSTOP)
        return len(stopped) == len(runs)

    eventually(stop_more, "runs with checkpoints", process)
    return [stopped[run] for run in runs]


def test_what_is_killed_is_resumed_elsewhere(tmp_path):
    """A worker is killed, whose run saves; then a worker together with its run.

    Both runs are stopped once they have a checkpoint, so that neither ends before it is killed.
    """
    steps = 3000
    near = start_coadjoint(tmp_path, *words(steps, "--seeds", "2", "--out", "near", "-q"))
    assert finish(near)[0] == 0
    runs = run_folders(tmp_path / "far")
    with DaskProcesses(tmp_path) as dask:
        dask.add_worker()
        dask.add_worker()
        there = ["--seeds", "2", "--out", "far", "--on", dask.address]
        process = start_coadjoint(tmp_path, *words(steps, *there))
        first, second = stop_all(runs, process)
        kill(parent(first))
        kill(first, signal.SIGCONT)
        eventually(lambda: is_gone(first), "the run whose worker was killed")
        dask.add_worker()
        kill(parent(second))
        kill(second)
        code, out, err = finish(process)
        assert (code, err) == (0, "")
        assert "2 of 2: a-seed-" in out
        assert "(127.0.0.1:" in out  # the address of a worker
        assert owner(runs[0]) != first
        assert owner(runs[1]) != second
    for name in ("model.safetensors", "metrics.jsonl"):
        for run, other in zip(runs, run_folders(tmp_path / "near"), strict=True):
            assert (run / name).read_bytes() == (other / name).read_bytes()


def test_a_worker_that_is_told_to_end_lets_its_run_save(tmp_path):
    """SIGTERM, as from a batch system; the run has no checkpoint of its own, however slow we are:
    none is due, and no validation finds better weights.
    """
    (run,) = run_folders(tmp_path / "cmp", 1)
    with DaskProcesses(tmp_path) as dask:
        dask.add_worker()
        there = ["--seeds", "1", "--out", "cmp", "--on", dask.address]
        there += ["--checkpoint", str(ENDLESS), "--every", str(ENDLESS)]
        process = start_coadjoint(tmp_path, *words(ENDLESS, *there))
        pid = eventually(lambda: has_begun(run), "the run", process)
        dask.add_worker()
        dask.workers["w1"].terminate()
        eventually(lambda: is_gone(pid), "the run whose worker ends")
        (saved,) = (run / "checkpoints").iterdir()
        saved_step = int(saved.name.removeprefix("step-"))
        assert saved_step > 0
        result = json.loads((run / "result.json").read_text())
        assert (result["status"], result["step"]) == ("interrupted", saved_step)
        elsewhere = "the run on the other worker"
        eventually(lambda: owner(run) != pid and has_begun(run), elsewhere, process)
        kill(process.pid, signal.SIGINT)
        assert finish(process)[0] == 75


def test_a_stop_saves_the_runs_and_the_same_command_goes_on(tmp_path):
    runs = run_folders(tmp_path / "cmp")
    with DaskProcesses(tmp_path) as dask:
        dask.add_worker()
        dask.add_worker()
        there = ["--seeds", "2", "--out", "cmp", "--on", dask.address, "--continue"]
        process = start_coadjoint(tmp_path, *words(ENDLESS, *there))
        for run in runs:
            eventually(lambda run=run: has_begun(run), run.name, process)
        kill(process.pid, signal.SIGINT)
        code, _, err = finish(process)
        assert (code, err.count("\n")) == (75, 1)
        assert f"coadjoint resume cmp --on {dask.address}" in err
        assert [status(run) for run in runs] == ["interrupted"] * 2
        for run in runs:
            shorten(run)
        code, _, err = finish(start_coadjoint(tmp_path, *words(ENDLESS, *there)))
        assert (code, err) == (0, "")
        assert [status(run) for run in runs] == ["finished"] * 2


def test_without_its_scheduler_a_comparison_ends_and_its_run_saves(tmp_path):
    (run,) = run_folders(tmp_path / "cmp", 1)
    with DaskProcesses(tmp_path) as dask:
        dask.add_worker()
        there = ["--seeds", "1", "--out", "cmp", "--on", dask.address]
        process = start_coadjoint(tmp_path, *words(ENDLESS, *there))
        pid = eventually(lambda: has_begun(run), "the run", process)
        dask.scheduler.kill()
        code, _, err = finish(process)
        assert (code, err.count("\n")) == (75, 1)
        assert f"The Dask scheduler at {dask.address} is gone" in err
        eventually(lambda: is_gone(pid), "the run whose worker has no scheduler")
        assert status(run) == "interrupted"


def test_a_run_goes_on_when_its_comparison_is_killed(tmp_path):
    """Another comparison waits for its folder, and does not train it twice."""
    (run,) = run_folders(tmp_path / "cmp", 1)
    with DaskProcesses(tmp_path) as dask:
        dask.add_worker()
        dask.add_worker()
        there = ["--seeds", "1", "--out", "cmp", "--on", dask.address, "--continue"]
        process = start_coadjoint(tmp_path, *words(1200, *there))
        pid = eventually(lambda: has_begun(run), "the run", process)
        process.kill()
        process.communicate()
        code, _, err = finish(start_coadjoint(tmp_path, *words(1200, *there)))
        assert (code, err) == (0, "")
        assert status(run) in ("finished", "success")
        assert owner(run) == pid


def make_certificates(folder):
    """A certificate authority and a certificate with its key, as docs/scale.md makes them."""
    commands = [
        "req -x509 -newkey rsa:3072 -nodes -days 365 -subj /CN=our-authority "
        "-keyout ca-key.pem -out ca.pem",
        "req -newkey rsa:3072 -nodes -subj /CN=our-cluster -keyout key.pem -out request.pem",
        "x509 -req -in request.pem -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 365 "
        "-out cert.pem",
    ]
    folder.mkdir()
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    files = {"--tls-ca-file": "ca.pem", "--tls-cert": "cert.pem", "--tls-key": "key.pem"}
    return [word for flag, name in files.items() for word in (flag, str(folder / name))]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_lets_in_who_has_a_certificate(tmp_path):
    flags = make_certificates(tmp_path / "ours")
    others = make_certificates(tmp_path / "theirs")
    with DaskProcesses(tmp_path, *flags) as dask:
        dask.add_worker()
        assert dask.address.startswith("tls://")
        there = words(5, "--seeds", "1", "--on", dask.address)
        code, _, err = finish(start_coadjoint(tmp_path, *there, *flags, "--out", "cmp"))
        assert (code, err) == (0, "")
        code, _, err = finish(start_coadjoint(tmp_path, *there, *others, "--out", "other"))
        assert (code, err.count("\n")) == (7, 1)
        plain = dask.address.replace("tls://", "tcp://")
        there = words(5, "--seeds", "1", "--on", plain, "--out", "other")
        code, _, err = finish(start_coadjoint(tmp_path, *there))
        assert (code, err.count("\n")) == (7, 1)
        assert not (tmp_path / "other").exists()
