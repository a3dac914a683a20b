"""What a data-parallel step costs: predicted from a few measurements, then measured (gloo, CPUs).

    python benchmarks/scale.py                          LSTM 512, T = 100, B = 64; Elman 128
    python benchmarks/scale.py --processes 1,2,4,8,16 --measure 1,2,4 --json scale.json
    python benchmarks/scale.py --quick                  a small Elman network, 1 and 2 processes

It needs torch and numpy alone, and starts its own processes, each with one thread. From one process
it takes the time of a gradient by the number of samples, from two the latency and bandwidth of an
all-reduce, and from one process on every core how much they slow each other down. `scale_model.py`
predicts the step of any number of processes from these. "measured" is a loop of the benchmark's own
with a plain all-reduce; "co.Shared" is a step as `coadjoint train` makes it under torchrun, with a
shard for each process. Times are minima over repeats. Other work on the machine hardly changes the
predictions, since gradients are timed by the processor time they take; but it spoils what is
measured: the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scale_model import ITEM, Machine, break_even, fit, predict

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
SIZES = [1 << k for k in (10, 14, 18, 20, 22, 24)]  # bytes
LSTM = {"name": "lstm 512", "cell": "lstm", "hidden": 512, "T": 100, "B": 64, "method": "bptt"}
ELMAN = {
    "name": "elman 128",
    "cell": "elman",
    "hidden": 128,
    "T": 100,
    "B": 64,
    "method": "log-ratio",
}
SMALL = {
    "name": "elman 16",
    "cell": "elman",
    "hidden": 16,
    "T": 20,
    "B": 8,
    "method": "log-ratio",
}
# Seconds of a message, and bytes in a second, as one may expect of them.
NETWORKS = {
    "1 Gbit Ethernet": (1e-4, 1.2e8),
    "10 Gbit Ethernet": (5e-5, 1.2e9),
    "100 Gbit InfiniBand": (5e-6, 1.2e10),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--processes", default="1,2,4,8,16", help="numbers that are predicted")
    parser.add_argument(
        "--measure", help="numbers that are measured (default: those up to 4, or up to the cores)"
    )
    parser.add_argument("--cores", type=int, default=usable_cores(), help="of this machine")
    parser.add_argument(
        "--budget", type=float, default=4.0, help="seconds for each measured number"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that all is measured; the least counts"
    )
    parser.add_argument("--quick", action="store_true", help="a small problem, 1 and 2 processes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the processes are told."""
    predicted = sorted({1, *map(int, options.processes.split(","))})
    problems = [LSTM, ELMAN]
    if options.quick:
        predicted = [1, 2]
        problems = [SMALL]
    measured = [P for P in predicted if max(4, options.cores) >= P]
    if options.measure:
        measured = sorted({1, *map(int, options.measure.split(","))})
    return {
        "shared": False,
        "predicted": sorted({*predicted, *measured}),
        "measured": measured,
        "cores": options.cores,
        "budget": 0.2 if options.quick else options.budget,
        "rounds": 1 if options.quick else options.rounds,
        "sizes": SIZES[:4] if options.quick else SIZES,
        "problems": problems,
    }


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """All that is measured; steps by co.Shared by processes that are as many as its shards."""
    report = run_processes(settings, max(2, *settings["measured"]))
    report["exchange"] = {}
    for problem in report["problems"]:
        problem["shared_seconds"] = {}
    for P in settings["measured"]:
        if P > 1:
            found = run_processes({**settings, "shared": True}, P)
            report["exchange"][str(P)] = found["exchange"]
            for problem, seconds in zip(report["problems"], found["steps"], strict=True):
                problem["shared_seconds"][str(P)] = seconds
    return report


def run_processes(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Start so many processes and wait for what rank 0 has measured."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCE), before)))
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        script = str(HERE / "scale_processes.py")
        command = [*torchrun, "--nproc-per-node", str(count), script, str(out)]
        done = subprocess.run(
            [*command, json.dumps(settings)], env=environment, text=True, capture_output=True
        )
        if done.returncode != 0 or not out.exists():
            sys.exit(f"the processes failed:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def by_number(table: dict[str, float]) -> dict[int, float]:
    """A table whose keys were numbers before they were JSON."""
    return {int(key): value for key, value in table.items()}


def compare(problem: dict[str, Any], machine: Machine, counts: list[int]) -> list[dict[str, Any]]:
    """A row for each number of processes: predicted parts, and what was measured."""
    gradients = by_number(problem["gradient_seconds"])
    steps = by_number(problem["step_seconds"])
    shared = by_number(problem["shared_seconds"])
    rows = []
    for P in counts:
        guess = predict(machine, gradients, problem["B"], problem["parameters"], P)
        rows.append(
            {
                "processes": P,
                "samples": -(-problem["B"] // P),
                "compute": guess.compute,
                "all_reduce": guess.communicate,
                "predicted": guess.step,
                "measured": steps.get(P),
                "shared": shared.get(P),
            }
        )
    return rows


def print_collectives(collectives: dict[str, dict[str, float]], machine: Machine) -> None:
    print("\nTwo processes: all-reduce and all-gather of each process's vector")
    print(f"{'bytes':>10} {'all-reduce ms':>14} {'all-gather ms':>14}")
    for size, seconds in collectives["all-reduce"].items():
        gather = collectives["all-gather"][size]
        print(f"{int(size):>10,} {1e3 * seconds:>14.3f} {1e3 * gather:>14.3f}")
    print(
        f"latency {1e6 * machine.latency:.0f} us a message, "
        f"bandwidth {machine.bandwidth / 1e9:.2f} GB/s"
    )


def print_exchange(exchange: dict[str, dict[str, dict[str, float]]]) -> None:
    for P, found in exchange.items():
        print(f"\n{P} processes add up {P} rows in order: each sent to all, or by segments")
        print(f"{'bytes':>10} {'gathered ms':>14} {'segments ms':>14}")
        for size, seconds in found["gathered"].items():
            segments = found["by segments"][size]
            print(f"{int(size):>10,} {1e3 * seconds:>14.3f} {1e3 * segments:>14.3f}")


def print_problem(problem: dict[str, Any], machine: Machine, rows: list[dict[str, Any]]) -> None:
    moved = ITEM * problem["parameters"]
    print(
        f"\n{problem['name']}, T = {problem['T']}, B = {problem['B']}, {problem['method']}, engine "
        f"{problem['engine']}: {problem['parameters']:,} parameters, {moved / 1e6:.2f} MB a step"
    )
    shares = by_number(problem["gradient_seconds"])
    told = ", ".join(f"{n}: {1e3 * seconds:.1f}" for n, seconds in sorted(shares.items()))
    print(f"a gradient on one core, ms by samples: {told}")
    print(
        f"on {machine.cores} cores at once {machine.crowding:.2f} times as long; a step of one "
        f"process with {machine.cores} threads: {1e3 * problem['threads_seconds']:.1f} ms"
    )
    print(
        f"{'processes':>9} {'samples':>8} {'compute':>9} {'all-red.':>9} {'predicted':>10} "
        f"{'measured':>9} {'ratio':>6} {'speed-up':>9} {'co.Shared':>10}   (ms)"
    )
    alone = rows[0]["measured"]
    for row in rows:
        line = f"{row['processes']:>9} {row['samples']:>8}"
        for key, width in (("compute", 9), ("all_reduce", 9), ("predicted", 10)):
            line += f" {1e3 * row[key]:>{width}.2f}"
        measured = row["measured"]
        if measured is not None:
            line += f" {1e3 * measured:>9.2f} {row['predicted'] / measured:>6.2f}"
            line += f" {alone / measured:>9.2f}"
        if row["shared"] is not None:
            line += f" {1e3 * row['shared']:>10.2f}"
        print(line)


def print_networks(problem: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """How many machines pay, one process and one core of this kind on each."""
    gradients = by_number(problem["gradient_seconds"])
    found = {}
    print(f"{problem['name']}, one process on each machine:")
    links = {"this loopback": (machine.latency, machine.bandwidth), **NETWORKS}
    for name, (latency, bandwidth) in links.items():
        over = Machine(1, latency, bandwidth)
        best, efficient = break_even(over, gradients, problem["B"], problem["parameters"])
        found[name] = {"fastest": best, "half_efficient": efficient}
        print(f"  {name:<20} fastest with {best:>3}, at least 50% efficient up to {efficient:>3}")
    return found


def main() -> None:
    begin = time.perf_counter()
    options = parse_arguments()
    settings = settings_of(options)
    report = measure(settings)
    latency, bandwidth = fit(by_number(report["collectives"]["all-reduce"]))
    print(
        f"{settings['cores']} cores, {platform.machine()}, torch {report['torch']}, "
        f"Python {platform.python_version()}; minima over repeats"
    )
    print_collectives(report["collectives"], Machine(settings["cores"], latency, bandwidth))
    print_exchange(report["exchange"])
    report["latency"] = latency
    report["bandwidth"] = bandwidth
    report["cores"] = settings["cores"]
    for problem in report["problems"]:
        machine = Machine(settings["cores"], latency, bandwidth, problem["crowding"])
        problem["rows"] = compare(problem, machine, settings["predicted"])
        print_problem(problem, machine, problem["rows"])
    print()
    for problem in report["problems"]:
        machine = Machine(settings["cores"], latency, bandwidth, problem["crowding"])
        problem["networks"] = print_networks(problem, machine)
    report["seconds"] = time.perf_counter() - begin
    print(f"\n{report['seconds']:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        return
    print(json.dumps(report))


if __name__ == "__main__":
    main()
