"""Train on a GPU with and without segments, and compare the memory that is stated and taken.

    PYTHONPATH=src python tools/gpu_memory.py [--device cuda] [--json memory.json]

It needs torch and numpy alone. By default an LSTM of 512 units is trained for 3 steps on sequences
of 2,000 steps in batches of 64, plain and penalised, in 1, 8 and 32 segments, with looks at
held-out data and probes of its costates, as `coadjoint train` has them. Stated is the peak of
`gradients.memory.predict_run`, taken is torch.cuda.max_memory_allocated less what was allocated
before. It fails (exit code 1) if a run takes more than is stated, or if more than 1.5 times as much
is stated as is taken; every case is run and printed first. On a CPU (--device cpu) it states what
it would, and trains, but measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import coadjoint as co
from coadjoint.gradients import memory

HIGHEST = 1.5  # times what is taken


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cell", default="lstm")
    parser.add_argument("--T", type=int, default=2000)
    parser.add_argument("--B", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument("--tests", type=int, default=64)
    parser.add_argument("--segments", default="none,8,32", help="none, numbers or auto")
    parser.add_argument("--methods", default="bptt,log-ratio", help="bptt, or names of penalties")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def segments_of(text: str) -> Any:
    """None, "auto" or a number."""
    if text == "none":
        return None
    return text if text == "auto" else int(text)


def method_of(name: str, segments: Any) -> Any:
    if name == "bptt":
        return co.BPTT(segments)
    return co.Penalised(name, 0.1, segments)


def measure(options: argparse.Namespace, name: str, text: str) -> dict[str, Any]:
    """Train in one way: what was stated, what was taken, and how long it took."""
    torch.manual_seed(0)
    on_gpu = options.device.startswith("cuda")
    task = co.tasks.TemporalOrder(options.T)
    method = method_of(name, segments_of(text))
    before = 0
    if on_gpu:
        gc.collect()
        torch.cuda.synchronize()
        # The workspace of matrix products, which stays, is to be counted for every case.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    net = co.Network(
        options.cell,
        inputs=task.inputs,
        hidden=options.hidden,
        outputs=task.outputs,
        output=task.output,
        device=options.device,
    )
    steps = len(task.batch(0, 1, seed=0).u)
    stated = memory.predict_run(net, steps, method, options.B, options.probes, options.tests)
    row: dict[str, Any] = {
        "method": name,
        "segments": text,
        "T": steps,
        "engine": str(net.engine),
        "stated": stated.peak,
        **{f"stated_{part}": value for part, value in stated._asdict().items()},
    }
    begin = time.perf_counter()
    co.train(
        net,
        task,
        gradient=method,
        steps=options.steps,
        every=options.steps,
        batch=options.B,
        tests=options.tests,
        confirm=options.tests,
        probes=options.probes,
        optimiser=co.optimisers.adam(1e-3),
    )
    row["seconds"] = time.perf_counter() - begin
    if on_gpu:
        torch.cuda.synchronize()
        row["taken"] = torch.cuda.max_memory_allocated() - before
        row["reserved"] = torch.cuda.max_memory_reserved()
    return row


def judge(row: dict[str, Any]) -> str:
    """ "ok", or what is wrong with a row."""
    if "error" in row:
        return "failed"
    if "taken" not in row:
        return "not measured"
    ratio = row["stated"] / row["taken"]
    row["ratio"] = ratio
    if ratio < 1:
        return "EXCEEDED"
    return "ok" if ratio <= HIGHEST else "TOO HIGH"


def megabytes(row: dict[str, Any], key: str) -> str:
    return f"{row[key] / 1e6:,.0f}" if key in row else "-"


HEADINGS = (
    ("stated", "stated"),
    ("taken", "taken"),
    ("reserved", "reserved"),
    ("stated_gradient", "gradient"),
    ("stated_look", "look"),
    ("stated_probe", "probe"),
)


def print_row(row: dict[str, Any]) -> None:
    columns = [f"{megabytes(row, key):>9}" for key, _ in HEADINGS]
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
    seconds = f"{row.get('seconds', 0):.1f}"
    print(
        f"{row['method']:<10} {row['segments']:>8} {''.join(columns)} {ratio:>6} {seconds:>8}  "
        f"{row['verdict']}",
        flush=True,
    )


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """The device and the versions."""
    found = {"torch": torch.__version__, "coadjoint": co.__version__, "device": options.device}
    if options.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(options.device)
        found |= {"gpu": properties.name, "total": properties.total_memory}
    return found


def main() -> int:
    options = parse_arguments()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no GPU that torch can use: try --device cpu", file=sys.stderr)
        return 2
    index = torch.device(options.device).index
    if options.device.startswith("cuda") and index is not None:
        torch.cuda.set_device(index)  # whose memory is measured
    machine = describe(options)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"{options.cell} of {options.hidden} units, T = {options.T}, B = {options.B}, "
        f"{options.probes} probes, {options.tests} tests, {options.steps} steps; MB"
    )
    headings = "".join(f"{heading:>9}" for _, heading in HEADINGS)
    print(f"{'method':<10} {'segments':>8} {headings} {'ratio':>6} {'seconds':>8}")
    rows = []
    for name in options.methods.split(","):
        for text in options.segments.split(","):
            try:
                row = measure(options, name, text)
            except Exception as error:  # the other cases are worth having
                traceback.print_exc()
                row = {
                    "method": name,
                    "segments": text,
                    "error": f"{type(error).__name__}: {error}",
                }
            row["verdict"] = judge(row)
            rows.append(row)
            print_row(row)
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        report = {"machine": machine, "settings": settings, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    found = Counter(row["verdict"] for row in rows)
    unmeasured = found["not measured"]
    print(f"{found['ok']} of {len(rows)} cases are as stated, {unmeasured} were not measured")
    return 0 if found["ok"] + unmeasured == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
