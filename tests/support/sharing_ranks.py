"""The cases of `sharing` on the processes of torchrun; rank 0 writes what came of them.

    torchrun --nproc-per-node 2 tests/support/sharing_ranks.py FOLDER

FOLDER/outcomes.json has them by name; of each process if they may differ.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import coadjoint as co
import sharing
from coadjoint.cli import program
from coadjoint.gradients import processes
from coadjoint.training.distributed import Group, joined

STEPS = "--steps 12 --every 4 --checkpoint 5"
SMALL = "--length 10 --hidden 4 --batch 7 --tests 20 --confirm 30 --probes 4"
COMMAND = f"train temporal-order {STEPS} {SMALL} --penalty log-ratio --clip 1 --shards 6"
# Command lines that are refused, each once.
REFUSED = {
    "a folder in use": f"{COMMAND} --out {{folder}}/run",
    "fewer shards than processes": f"{COMMAND} --shards 1 --out {{folder}}/new",
    "no such file": "train --train nowhere.csv --out {folder}/new",
    "hessian-free": "train temporal-order --optimiser hessian-free --out {folder}/new",
    "ridge": "train temporal-order --optimiser ridge --freeze W,R,b --out {folder}/new",
    "temporal": "train temporal-order --direction temporal --out {folder}/new",
    "omega-published": "train temporal-order --penalty omega-published --out {folder}/new",
    "other settings": f"{COMMAND} --batch 8 --out {{folder}}/run --continue",
}


def call(words: str) -> tuple[object, str, str]:
    """Run a command line in this process -> its exit code, what it printed and complained of."""
    out = io.StringIO()
    err = io.StringIO()
    sys.argv = ["coadjoint", *shlex.split(words)]
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program.main()
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def gradients(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in sharing.gradient_cases().items():
        steps = 4 if name == "steered" else 1
        try:
            found[name] = sharing.largest_difference(case, None, steps)
        except co.CoadjointError as error:
            found[name] = str(error)
    return {
        "differences": group.gather(found),
        "overflow": group.gather(sharing.overflow()),
        "bits": {name: sharing.gradient_bits(name) for name in BITS},
        "bits by segments": bits_by_segments(),
        "exchange": group.gather(sharing.exchange_errors()),
        "different batches": {
            str(shards): group.gather(sharing.different_batches(shards))
            for shards in (None, sharing.SHARDS)
        },
    }


def bits_by_segments() -> dict[str, str]:
    """The same gradients, as if their rows were large."""
    usual = processes.LARGE_ROW
    processes.LARGE_ROW = 0
    found = {name: sharing.gradient_bits(name) for name in BITS}
    overflow = sharing.overflow()
    processes.LARGE_ROW = usual
    return found | {"overflow": overflow}


BITS = ("lstm every B=7 weighted log-ratio", "one sample", "chain penalised", "stack")


def runs(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sharing.run_cases():
        found[name] = sharing.outcome(name, distributed=True)
    task = sharing.Stopping(10)
    task.at = (1, 6)
    place = folder / "stopped"
    arguments = {"distributed": True, "folder": place}
    found["stopped"] = sharing.refusal(lambda: sharing.train("adam", task=task, **arguments))
    found["resumed"] = sharing.outcome("adam", resume=True, **arguments)
    return found


def commands(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["train"] = call(f"{COMMAND} --out {folder}/run")
    found["continued"] = call(f"{COMMAND} --out {folder}/run --continue")
    found["longer"] = call(f"resume {folder}/run --steps 16")
    for name, words in REFUSED.items():
        found[name] = call(words.format(folder=folder))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined() as group:
        outcomes = gradients(group)
    outcomes |= runs(folder)
    answers = commands(folder)
    with joined() as group:
        outcomes["commands"] = group.gather(answers)
        if group.rank == 0:
            (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
