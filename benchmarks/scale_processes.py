"""One of the processes that benchmarks/scale.py starts by torchrun: it measures, rank 0 writes.

    python -m torch.distributed.run --standalone --nproc-per-node 4 scale_processes.py OUT SETTINGS

SETTINGS and the file OUT are JSON; see `scale.py`. All times are minima over repeats of the slowest
process.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import coadjoint as co
from coadjoint.gradients import processes

METHODS: dict[str, Callable[[], Any]] = {
    "bptt": co.BPTT,
    "log-ratio": lambda: co.Penalised("log-ratio", 0.1),
}
RATE = 1e-3  # of plain gradient descent, so that a step is a whole one


class Team:
    """The first P processes, which work while the others wait."""

    def __init__(self, P: int) -> None:
        """All processes call this, in the same order."""
        self.P = P
        self.group = dist.new_group(list(range(P)))
        self.works = dist.get_rank() < P

    def seconds(
        self,
        work: Callable[[], object],
        repeats: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> float:
        """The least time of `work`, that of the slowest process; 0 in processes that wait.

        clock: time.process_time leaves out the time in which others have the core.
        """
        if not self.works:
            return 0.0
        best = float("inf")
        for _ in range(repeats):
            if self.P > 1:
                dist.barrier(self.group)
            begin = clock()
            work()
            slowest = torch.tensor([clock() - begin], dtype=torch.float64)
            if self.P > 1:
                dist.all_reduce(slowest, dist.ReduceOp.MAX, self.group)
            best = min(best, float(slowest))
        return best


class Problem:
    """A network, a batch and a gradient method."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.name = settings["name"]
        self.T = settings["T"]
        self.B = settings["B"]
        hidden = settings["hidden"]
        self.net = co.Network(
            settings["cell"], inputs=16, hidden=hidden, outputs=10, output="softmax"
        )
        self.u = torch.randn(self.T, self.B, 16)
        self.y = torch.randint(0, 10, (self.B,))
        self.method = METHODS[settings["method"]]()
        self.parameters = sum(p.numel() for p in self.net.parameters())

    def share(self, rank: int, P: int) -> co.Batch:
        """The samples of one of P processes."""
        return co.Batch(self.u[:, rank::P].contiguous(), self.y[rank::P].contiguous())

    def gradient(self, batch: co.Batch) -> Tensor:
        """The gradient of a share, in one vector, weighted by its number of samples."""
        gradient = self.method(self.net, batch, "cross-entropy").gradient
        n = len(batch.y)
        return torch.cat([g.flatten() for g in gradient.values()]) * (n / self.B)

    def shared_step(self, method: co.Shared) -> None:
        """One step as `coadjoint train` makes it: every process has the whole batch."""
        batch = co.Batch(self.u, self.y)
        gradient = method(self.net, batch, "cross-entropy").gradient
        self.move(torch.cat([g.flatten() for g in gradient.values()]))

    @torch.no_grad()
    def move(self, gradient: Tensor) -> None:
        """A step along the gradient of the whole batch."""
        begin = 0
        for p in self.net.parameters():
            p -= RATE * gradient[begin : begin + p.numel()].view_as(p)
            begin += p.numel()

    def step(self, batch: co.Batch, team: Team) -> None:
        """One step of training: a gradient, one all-reduce, one move."""
        gradient = self.gradient(batch)
        if team.P > 1:
            dist.all_reduce(gradient, group=team.group)
        self.move(gradient)


def repeats_for(seconds: float, budget: float) -> int:
    """How often work of so many seconds is repeated."""
    return max(2, min(100, int(budget / max(seconds, 1e-6))))


def warm_up(team: Team, work: Callable[[], object]) -> float:
    """About how long `work` takes, once it is compiled and its memory is in use."""
    team.seconds(work, 1)
    return team.seconds(work, 1)


def agree(value: object) -> Any:
    """What rank 0 has, in every process."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def measure_collectives(team: Team, sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Seconds of an all-reduce and an all-gather of so many bytes, by their sizes."""
    found: dict[str, dict[int, float]] = {"all-reduce": {}, "all-gather": {}}
    for size in sizes:
        vector = torch.ones(size // 4)
        parts = [torch.empty_like(vector) for _ in range(team.P)]

        def reduce(vector: Tensor = vector) -> None:
            dist.all_reduce(vector, group=team.group)

        def gather(vector: Tensor = vector, parts: list[Tensor] = parts) -> None:
            dist.all_gather(parts, vector, group=team.group)

        repeats = 30 if size < 1 << 22 else 10
        found["all-reduce"][size] = team.seconds(reduce, repeats)
        found["all-gather"][size] = team.seconds(gather, repeats)
    return found


def measure_gradients(
    problem: Problem, team: Team, counts: Sequence[int], budget: float
) -> dict[int, float]:
    """Seconds of a gradient by the number of samples, in one process with one thread."""
    found: dict[int, float] = {}
    for P in counts:
        batch = problem.share(0, P)

        def work(batch: co.Batch = batch) -> None:
            problem.gradient(batch)

        repeats = repeats_for(warm_up(team, work), budget)
        found[len(batch.y)] = team.seconds(work, repeats, time.process_time)
    return found


def measure_steps(problem: Problem, teams: dict[int, Team], budget: float) -> dict[int, float]:
    """Seconds of a whole step by the number of processes."""
    found: dict[int, float] = {}
    for P, team in teams.items():
        rank = dist.get_rank()
        batch = problem.share(rank % P, P)

        def work(batch: co.Batch = batch, team: Team = team) -> None:
            problem.step(batch, team)

        guess = warm_up(team, work)
        found[P] = team.seconds(work, agree(repeats_for(guess, budget)))
        dist.barrier()
    return found


def measure_shared(settings: dict[str, Any]) -> list[float]:
    """Seconds of a step by co.Shared on all processes, with a shard for each, by problems."""
    P = dist.get_world_size()
    team = Team(P)
    budget = settings["budget"]
    found = []
    for options in settings["problems"]:
        problem = Problem(options)
        method = co.Shared(problem.method, shards=P)

        def work(problem: Problem = problem, method: co.Shared = method) -> None:
            problem.shared_step(method)

        guess = warm_up(team, work)
        found.append(team.seconds(work, agree(repeats_for(guess, budget))))
    return found


def measure_exchange(sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Seconds in which the rows of P shards are added up, by both ways that co.Shared has."""
    P = dist.get_world_size()
    team = Team(P)
    ways = {"gathered": processes.gather_and_sum, "by segments": processes.sum_by_segments}
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    for size in sizes:
        rows = torch.ones(1, size // 4)
        for name, way in ways.items():

            def work(way: Callable[..., object] = way, rows: Tensor = rows) -> None:
                way(rows, P, 3)

            warm_up(team, work)
            found[name][size] = team.seconds(work, 30 if size < 1 << 22 else 10)
    return found


def together(problem: Problem, team: Team, alone: float, budget: float) -> float:
    """Seconds of a gradient while all cores compute one; alone: seconds of one on its own."""
    batch = problem.share(0, team.P)

    def work() -> None:
        problem.gradient(batch)

    found = team.seconds(work, repeats_for(alone, budget), time.process_time)
    dist.barrier()
    return found


def with_threads(problem: Problem, team: Team, threads: int, budget: float) -> float:
    """Seconds of a step of one process that has all cores."""
    torch.set_num_threads(threads)
    batch = problem.share(0, 1)

    def work() -> None:
        problem.step(batch, team)

    best = team.seconds(work, repeats_for(warm_up(team, work), budget))
    torch.set_num_threads(1)
    dist.barrier()
    return best


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Everything, in the order of the settings; of use in rank 0."""
    world = dist.get_world_size()
    cores = settings["cores"]
    teams = {P: Team(P) for P in settings["measured"]}
    full = Team(min(cores, world))
    pair = Team(min(2, world))
    report: dict[str, Any] = {"problems": []}
    report["collectives"] = {}
    if pair.P == 2 and pair.works:
        report["collectives"] = measure_collectives(pair, settings["sizes"])
    dist.barrier()
    for options in settings["problems"]:
        report["problems"].append(measure_problem(options, settings, teams, full))
    return report


def least(tables: Sequence[dict[int, float]]) -> dict[int, float]:
    """The least of each entry of several tables."""
    return {key: min(table[key] for table in tables) for key in tables[0]}


def measure_problem(
    options: dict[str, Any], settings: dict[str, Any], teams: dict[int, Team], full: Team
) -> dict[str, Any]:
    """Measure one problem, in rounds: a machine that is busy now may be free a little later."""
    cores = settings["cores"]
    budget = settings["budget"] / settings["rounds"]
    alone = teams[1]
    problem = Problem(options)
    rounds: list[dict[str, Any]] = []
    for _ in range(settings["rounds"]):
        counts = sorted({*settings["predicted"], full.P})
        gradients = measure_gradients(problem, alone, counts, budget)
        dist.barrier()
        samples = len(problem.share(0, full.P).y)
        rounds.append(
            {
                "gradients": gradients,
                "together": together(problem, full, agree(gradients.get(samples)), budget),
                "threads": with_threads(problem, alone, cores, budget),
                "steps": measure_steps(problem, teams, budget),
            }
        )
    gradients = least([found["gradients"] for found in rounds])
    slowest = min(found["together"] for found in rounds)
    crowding = 1.0
    if dist.get_rank() == 0:
        crowding = max(1.0, slowest / gradients[samples])
    return {
        **options,
        "parameters": problem.parameters,
        "engine": str(problem.net.engine),
        "gradient_seconds": gradients,
        "crowding": crowding,
        "threads_seconds": min(found["threads"] for found in rounds),
        "step_seconds": least([found["steps"] for found in rounds]),
    }


def main(out: str, settings: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    told = json.loads(settings)
    if told["shared"]:
        report = {"steps": measure_shared(told), "exchange": measure_exchange(told["sizes"])}
    else:
        report = measure(told)
    if dist.get_rank() == 0:
        report["torch"] = torch.__version__
        Path(out).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], sys.argv[2])
