"""Small real run folders for tests that damage them, and the command line in this process."""

import contextlib
import io
import json
import os
import random
import shlex
import shutil
import sys
from pathlib import Path

import torch

from coadjoint.cli import program
from coadjoint.training import storage

CHECKPOINT = ("model.safetensors", "state.safetensors", "state.json", storage.MANIFEST)
LAST = "checkpoints/step-00000004"


def call(*words):
    """The command line in this process: its exit code, and what it complained about."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["coadjoint", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            program.main()
    except SystemExit as end:
        return end.code or 0, err.getvalue()
    finally:
        sys.argv = argv
        torch.set_num_threads(1)
    raise AssertionError("the command line did not end")


def data_files(folder):
    draw = random.Random(0)
    lines = ["id,t,a,b,label"]
    for i in range(12):
        lines += [
            f"s{i},{t},{draw.gauss(i % 2, 1):.3f},{draw.gauss(0, 1):.3f},{'xy'[i % 2]}"
            for t in range(4)
        ]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    rows = [
        f"{draw.gauss(0, 1):.3f},{draw.gauss(0, 1):.3f},{draw.gauss(0, 1):.3f}" for _ in range(8)
    ]
    (folder / "stream.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")


def longer(folder, to, steps):
    """A run that was stopped: what has ended, with more steps to take."""
    shutil.copytree(folder, to)
    config = to / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4\n", f"steps: {steps}\n"))
    assert f"steps: {steps}" in config.read_text()
    (to / "model.safetensors").unlink()
    result = json.loads((to / "result.json").read_text())
    (to / "result.json").write_text(
        json.dumps(result | {"status": "interrupted", "reason": "SIGTERM at step 4"})
    )


def make(here):
    """Folders of runs that ended and of runs that were stopped, and the data they were made of."""
    before = Path.cwd()
    os.chdir(here)
    try:
        data_files(here)
        small = shlex.split("--hidden 3 --steps 4 --every 2 --checkpoint 2 --batch 4 --probes 2 -q")
        learn = shlex.split("--train data.csv --id id --time t --target label --cell elman")
        assert call("train", *learn, *small, "--out", "done") == (0, "")
        stream = shlex.split(
            "stream.csv --target y --hidden 3 --steps 4 --every 2 --checkpoint 2 --window 3 -q"
        )
        assert call("online", *stream, "--out", "stream-done") == (0, "")
        longer(here / "done", here / "stopped", 6)
        longer(here / "stream-done", here / "stream", 6)
        shutil.copy(
            here / "stream-done" / "model.safetensors", here / "stream" / "model.safetensors"
        )
        shutil.rmtree(here / "stream-done")
        assert call("compare", "done", "stopped", "--out", "compared", "-q")[0] == 0
        for name in ("done", "stopped", "stream"):
            (here / name / "report.html").unlink(missing_ok=True)
    finally:
        os.chdir(before)
    return here


def vouched(last):
    """Let the manifest of a checkpoint vouch for what is in it now."""
    listed = {name: (last / name).read_bytes() for name in CHECKPOINT[:3]}
    (last / storage.MANIFEST).write_bytes(storage.make_manifest(listed))
