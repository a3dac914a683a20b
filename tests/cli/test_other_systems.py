"""Everything works on a system without what only POSIX has.

Train, interrupt, resume, predict, report and compare run while a `sitecustomize` hides the POSIX
modules and functions, in the command line and in every process that it starts.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import coadjoint
from coadjoint.cli import workers
from coadjoint.training import files
from work import until

LACKING = """
import importlib.abc, os, signal, sys

LACKS = {"fcntl", "grp", "pwd", "resource", "termios"}

class Lacking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in LACKS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in LACKS:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Lacking())
for name in (
    "fork", "getuid", "geteuid", "getppid", "pread", "sched_getaffinity",
    "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK",
):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL"):
    delattr(signal, name)
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs the command line in a folder, on such a system."""
    place = tmp_path / "lacking"
    place.mkdir()
    (place / "sitecustomize.py").write_text(LACKING)
    source = Path(coadjoint.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{source}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:only soft file lock is available")
    monkeypatch.chdir(tmp_path)

    def start(*words):
        command = [sys.executable, "-m", "coadjoint", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def call(*words):
        process = start(*words)
        out, err = process.communicate(timeout=600)
        assert (process.returncode, err) == (0, ""), err
        return out

    call.start = start
    return call


def test_the_system_lacks_what_the_next_test_does_without(elsewhere):
    """What the next test takes for granted."""
    tried = (
        "import os, signal; print([hasattr(os, 'fork'), hasattr(signal, 'SIGHUP')]); import fcntl"
    )
    done = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True)
    assert done.stdout == "[False, False]\n"
    assert "No module named 'fcntl'" in done.stderr


@pytest.mark.thorough
def test_a_run_is_trained_interrupted_resumed_and_used(elsewhere, tmp_path):
    rows = [f"s{i},{t},{(i * 7 + t) % 5},{'xy'[i % 2]}" for i in range(12) for t in range(4)]
    (tmp_path / "data.csv").write_text("\n".join(["id,t,a,label", *rows]) + "\n")
    small = ["--hidden", "3", "--every", "5", "--checkpoint", "5", "--batch", "4", "--probes", "2"]
    own = ["--train", "data.csv", "--id", "id", "--time", "t", "--target", "label"]

    # a run that would take hours is interrupted, and goes on for a few steps
    process = elsewhere.start("train", *own, *small, "--steps", "100000000", "--out", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, process)
    second = elsewhere.start("resume", "run")
    assert "is in use by pid" in second.communicate(timeout=600)[1]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 75, err
    assert "Resume with: coadjoint resume run" in err
    step = json.loads((tmp_path / "run" / "result.json").read_text())["step"]
    assert "finished at step" in elsewhere("resume", "run", "--steps", str(step + 5))

    assert "12 sequences" in elsewhere("predict", "run", "data.csv", "--out", "said.csv")
    assert len((tmp_path / "said.csv").read_text().splitlines()) == 13
    elsewhere("report", "run")
    assert "</html>" in (tmp_path / "run" / "report.html").read_text()

    few = [*small, "--steps", "5", "--tests", "8", "--confirm", "8"]
    out = elsewhere(
        "compare",
        "xor length=10",
        "-m",
        "a",
        "--seeds",
        "2",
        "--jobs",
        "2",
        *few,
        "--out",
        "compared",
    )
    assert "2 of 2" in out
    found = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert [r["status"] for r in found["rows"][0]["runs"]] == ["finished", "finished"]


def test_processes_begin_anew_where_forks_are_unsafe(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert workers.process_context.__wrapped__().get_start_method() == "spawn"


def test_folders_that_cannot_be_opened_are_not_synced(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a folder was opened"))
    files.sync_folder(tmp_path)
