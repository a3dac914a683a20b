"""Kill runs with SIGKILL, resume them until they end, and compare them with an undisturbed run.

    python tools/crash.py [--kills 100] [--seed 0] [--jobs 2]

The files must be equal byte for byte. Runs are started from the command line. Some are killed after
a random time. The others kill themselves around the k-th call that changes the disk (before it,
after it, or with half of a file written), most of them inside a save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coadjoint.training import json_rows, storage

COMMON = "--probes 8 --batch 16"
RECURRENT = "--hidden 12"
FRESH = "--tests 100 --confirm 200"  # for tasks that draw their held-out sequences
CASES = {
    "elman adam": "temporal-order --length 20 --steps 500 --every 50 --checkpoint 35",
    "elman nesterov penalised": "temporal-order --length 15,25 --ragged --optimiser nesterov "
    "--lr 1e-2 --clip 1 --penalty log-ratio --weight 2 --weight-schedule linear --steps 250 "
    "--every 40 --checkpoint 17",
    "lstm nesterov accumulate": "addition --cell lstm --length 10,20 --ragged "
    "--optimiser nesterov --lr 3e-2 --accumulate 2 --steps 220 --every 25 --checkpoint 20",
    "lstm adam penalised": "addition --cell lstm --length 12 --penalty variance --weight 0.5 "
    "--weight-schedule inverse-time --weight-rate 0.01 --schedule cosine --steps 160 --every 20 "
    "--checkpoint 11",
    "gru adam finite": "digits --pixels 8 --cell gru --lr 3e-2 --patience 3 --schedule plateau "
    "--plateau 1 --warmup 10 --steps 400 --every 13 --checkpoint 23",
    "gru nesterov penalised accumulate": "temporal-order --cell gru --length 12 "
    "--optimiser nesterov --accumulate 2 --penalty log-ratio --steps 150 --every 30 "
    "--checkpoint 10",
    "chain isometry finite": "digits-flat --chain 12x8 --gain 0.5 --penalty isometry --pretrain 60 "
    "--pretrain-lr 3e-3 --weight-schedule pretrain --dropout 0.1 --schedule cosine --steps 200 "
    "--every 30 --checkpoint 17",
}  # fmt: skip
MOST = 5  # kills of one run


def words(case: str) -> list[str]:
    return [
        "train",
        *CASES[case].split(),
        *COMMON.split(),
        *(RECURRENT.split() if "chain" not in case else []),
        *(FRESH.split() if "finite" not in case else []),
    ]


# the run that kills itself


class Boundaries:
    """Counts what reaches the disk, and dies at the k-th boundary; counts inside saves alone if
    `scope` is "save".
    """

    def __init__(self, k: int, scope: str) -> None:
        self.left, self.scope, self.saving, self.met = k, scope, False, 0

    def pass_by(self) -> None:
        if self.scope == "save" and not self.saving:
            return
        self.met += 1
        if self.met == self.left:
            os.write(1, b"\ninside a save\n" if self.saving else b"\noutside a save\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.pass_by()
            result = call(*args, **options)
            self.pass_by()
            return result

        return wrapped

    def install(self) -> None:
        from coadjoint.training import files
        from coadjoint.training.run_folder import RunFolder

        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self.around(getattr(os, name)))
        create, save, write = files.open_new, RunFolder.save, json_rows.JsonRows.write

        class Half:
            """A file that can be caught with half of its content written."""

            def __init__(half, path: Path) -> None:
                half.file = create(path)

            def write(half, content: bytes) -> None:
                middle = len(content) // 2
                half.file.write(content[:middle])
                half.file.flush()
                self.pass_by()
                half.file.write(content[middle:])

            def __getattr__(half, name: str) -> Any:
                return getattr(half.file, name)

            def __enter__(half) -> Half:
                return half

            def __exit__(half, *_: object) -> None:
                half.file.close()

        def saving(folder: Any, *run: Any) -> None:
            self.saving = True
            save(folder, *run)
            self.saving = False

        def writing(rows: Any, given: Any) -> None:
            write(rows, given)
            if rows.written % 7 == 0:  # now and then a row is on the disk in half
                rows.file.flush()

        files.open_new = self.around(Half)  # type: ignore[assignment]
        RunFolder.save = saving  # type: ignore[method-assign]
        json_rows.JsonRows.write = writing  # type: ignore[method-assign]


def die(k: int, scope: str, command: list[str]) -> None:
    from coadjoint.cli.program import main

    boundaries = Boundaries(k, scope)
    boundaries.install()
    sys.argv = ["coadjoint", *command]
    main()


# the one that watches


@dataclass
class Tally:
    target: int
    kills: int = 0
    inside: int = 0
    runs: int = 0
    faults: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def enough(self) -> bool:
        return self.kills >= self.target and self.inside >= 0.3 * self.target

    def add(self, inside: bool) -> None:
        with self.lock:
            self.kills += 1
            self.inside += inside


def start(command: list[str], driver: list[str] | None = None) -> subprocess.Popen[str]:
    program = (
        [sys.executable, "-m", "coadjoint"]
        if driver is None
        else [sys.executable, __file__, *driver]
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        program + command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def ended(folder: Path) -> dict[str, Any]:
    """What must be the same bytes (the clock is not)."""
    last = storage.list_checkpoints(folder)[-1]
    result = json.loads((folder / "result.json").read_text())
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "metrics": (folder / "metrics.jsonl").read_bytes(),
        "checkpoint's weights": (last / "model.safetensors").read_bytes(),
        "checkpoint's state": (last / "state.safetensors").read_bytes(),
        "checkpoints": [p.name for p in storage.list_checkpoints(folder)],
        "result": {k: v for k, v in result.items() if "seconds" not in k},
    }


def reference(case: str, folder: Path) -> tuple[dict[str, Any], float]:
    begin = time.monotonic()
    process = start([*words(case), "--out", str(folder)])
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{case}: {output}")
    seconds = json.loads((folder / "result.json").read_text())["seconds"]
    print(
        f"{case}: {seconds:.1f} s of training, {time.monotonic() - begin:.1f} s in all", flush=True
    )
    return ended(folder), seconds


def stamp(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def disturb(
    folder: Path, command: list[str], how: str, draw: random.Random, seconds: float
) -> tuple[str, str]:
    """Run a command and kill it: by the clock, or at a boundary.

    "killed", "killed inside" or "ended", and its output.
    """
    if how != "clock":
        k = draw.randint(1, 120 if how == "save" else 60)
        process = start(command, ["die", str(k), how])
        output = process.communicate()[0]
    else:
        before = stamp(folder / "lock")
        process = start(command)
        early = draw.random() < 0.05  # while the program is still loading
        while process.poll() is None and not early and stamp(folder / "lock") == before:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0, seconds))
        process.kill()
        output = process.communicate()[0]
    if process.returncode == 0:
        return "ended", output
    if process.returncode != -signal.SIGKILL:
        return f"failed with {process.returncode}", output
    return (
        "killed inside"
        if output.endswith("inside a save\n") and "outside" not in output[-20:]
        else "killed"
    ), output


def survive(
    case: str, folder: Path, truth: dict[str, Any], seconds: float, tally: Tally, seed: int
) -> None:
    """Kill a run up to MOST times, let it end, and compare."""
    draw = random.Random(seed)
    history: list[str] = []

    def fault(what: str) -> None:
        tally.faults.append(f"{folder.name} ({case}; {', '.join(history)}): {what}")

    for _ in range(draw.randint(1, MOST) + 1):
        last = len(history) == MOST or tally.enough
        command = ["resume", str(folder)]
        if not (folder / "config.yaml").exists():
            command = [*words(case), "--out", str(folder)]
        how = draw.choices(["clock", "save", "any"], [0.45, 0.42, 0.13])[0]
        outcome, output = disturb(folder, command, how, draw, seconds) if not last else ("", "")
        if outcome.startswith("failed"):
            return fault(f"{outcome}: {output[-400:]}")
        if not outcome.startswith("killed"):
            break
        history.append(f"{how}{' inside' if 'inside' in outcome else ''}")
        tally.add("inside" in outcome)
        for path in storage.list_checkpoints(folder):
            if not storage.is_intact(path):
                return fault(f"{path.name} is not whole after a kill")
    if not (folder / "config.yaml").exists():
        command = [*words(case), "--out", str(folder)]
    else:
        command = ["resume", str(folder)]
    process = start(command)
    output = process.communicate()[0]
    if process.returncode:
        return fault(f"the last resume failed with {process.returncode}: {output[-400:]}")
    found = ended(folder)
    for what, value in truth.items():
        if found[what] != value:
            fault(f"{what} differs")
    tally.runs += 1
    print(
        f"{folder.name} ({case}): {', '.join(history) or 'no kill'}; {tally.kills} kills so far",
        flush=True,
    )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGKILL, resume, compare bytes")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    tally, begin = Tally(chosen.kills), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="crash-") as scratch,
        ThreadPoolExecutor(chosen.jobs) as pool,
    ):
        root = Path(scratch)
        names = list(CASES)
        truths = dict(
            zip(
                names,
                pool.map(lambda case: reference(case, root / case.replace(" ", "-")), names),
                strict=True,
            )
        )
        numbers = iter(range(10**6))

        def work(_: int) -> None:
            while not tally.enough and not tally.faults:
                n = next(numbers)
                case = names[n % len(names)]
                survive(case, root / f"run-{n}", *truths[case], tally, 1000 * chosen.seed + n)

        list(pool.map(work, range(chosen.jobs)))
    for line in tally.faults:
        print(f"FAULT {line}")
    verdict = (
        f"{len(tally.faults)} did not end bit-equal" if tally.faults else "all ended bit-equal"
    )
    seconds = time.monotonic() - begin
    print(
        f"{tally.kills} kills ({tally.inside} inside a save), {tally.runs} runs: {verdict}; "
        f"{seconds:.0f} s"
    )
    return 1 if tally.faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["die"]:
        die(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
