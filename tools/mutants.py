"""Do the tests notice a wrong term, sign, transpose, step, mask, path or scale?

A mutant is one rule applied at one place of the source's syntax tree. The mutated source is copied
to a temporary directory and the tests run against the copy: first the tests of the mutated file,
then, if it survives, others that ought to notice. A mutant is killed when a test fails or takes too
long (a fault may loop for ever). Time is processor time, so a busy machine kills nothing. The tests
that killed are run once more without a mutation; one that still fails has killed nothing.

    python tools/mutants.py            a sample of all files and rules; exit code 1 if one survives
    python tools/mutants.py --all      every mutant
    python tools/mutants.py --list     the mutants that would be run
    python tools/mutants.py --only ID  one of them
    python tools/mutants.py --count N  another sample size

The tables in tools/mutant_tables.py name files, functions and pieces of source. A row that no
longer fits the source is an error (exit code 2, and tests/house/test_mutants.py), because a stale
row hides what it was written to show.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mutant_tables as tables
from mutant_rules import RULES, Source, only_raises, places
from mutant_tables import row_of

PROJECT = Path(__file__).resolve().parent.parent
FAILED = "mutants: failed: "  # what a line begins with that names a test
COPIED = (
    "src",
    "tests",
    "tools",
    "docs",
    "examples",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
)


class Replaced(NamedTuple):
    """A file's text with one piece of it replaced."""

    before: str
    begin: int
    end: int
    by: str

    def __str__(self) -> str:
        return self.before[: self.begin] + self.by + self.before[self.end :]


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    rule: str
    name: str  # file.function.rule.number
    removed: str
    added: str
    text: Replaced = field(compare=False)  # the whole mutated file

    @property
    def diff(self) -> str:
        return f"  {self.file}:{self.line}\n    - {self.removed}\n    + {self.added}"

    @functools.cached_property
    def equivalent(self) -> tuple[str, str, str] | None:
        """The key in EQUIVALENT that this mutant falls under."""
        function = self.name.removesuffix(f".{self.rule}.{self.name.rsplit('.', 1)[1]}")
        for file, where, piece in tables.EQUIVALENT:
            here = self.file == file and (self.rule == where or function.endswith("." + where))
            if here and piece in f"{self.removed} -> {self.added}":
                return file, where, piece
        return None


def generate(root: Path) -> list[Mutant]:
    return [m for file in in_scope(root) for m in mutants_of(root, file)]


def in_scope(root: Path) -> list[str]:
    """The files that are mutated."""
    package = root / "coadjoint"
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    named = ("__init__.py", "__main__.py")
    return [
        file
        for file in files
        if Path(file).name not in named and row_of(tables.OUTSIDE, file) is None
    ]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """All of one file."""
    found: dict[tuple[str, int, int, str], Mutant] = {}
    numbers: Counter[str] = Counter()
    scope = tables.PARTS.get(file)
    source = Source(root / "coadjoint" / file)
    for place in places(source.tree, source):
        around = (*place.parents, place.node)
        owner = [p.name for p in around if isinstance(p, ast.FunctionDef | ast.ClassDef)]
        if scope is not None and not {".".join(owner[:i]) for i in (1, 2)} & scope:
            continue
        if isinstance(place.node, ast.If) and only_raises(place.node.body):
            continue
        for name, make in RULES.items():
            for target, new in make(place):
                (lo, hi), (first, last) = source.span(target), source.span(around[1])
                key, text = (file, lo, hi, new), source.text
                if key in found or not changes(
                    text[first:last], text[first:lo] + new + text[hi:last]
                ):
                    continue
                base = ".".join([file.removesuffix(".py").replace("/", "."), *owner, name])
                numbers[base] += 1
                begin, end = text.rfind("\n", 0, lo) + 1, text.find("\n", hi)

                def line(s):
                    return re.sub(r"\s+", " ", s).strip()

                found[key] = Mutant(
                    file,
                    target.lineno,  # type: ignore[attr-defined]
                    name,
                    f"{base}.{numbers[base]}",
                    line(text[begin:end]),
                    line(text[begin:lo] + new + text[hi:end]),
                    Replaced(text, lo, hi, new),
                )
    return list(found.values())


def changes(before: str, after: str) -> bool:
    """Is `after` a program, and another one?"""
    try:
        return ast.dump(ast.parse(after)) != dumped(before)
    except SyntaxError:
        return False


@functools.lru_cache(maxsize=4)
def dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


@functools.cache
def source_of(path: Path) -> Source:
    """A file of the source, read once: `stale` may be asked many times."""
    return Source(path)


def stale(root: Path) -> list[str]:
    """Rows of the tables that no longer fit the source, each in a sentence."""
    package = root / "coadjoint"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    scope = in_scope(root)
    wrong = []
    for name in ("OUTSIDE", "PARTS", "TESTS", "WEIGHT"):
        for key in getattr(tables, name):
            if not any(
                file == key or (key.endswith("/") and file.startswith(key)) for file in files
            ):
                wrong.append(f"{name}: there is no {key}")
            elif name != "OUTSIDE" and not key.endswith("/") and key not in scope:
                wrong.append(f"{name}: {key} is not mutated")
    wrong += [f"TESTS: {file} has no tests" for file in scope if row_of(tables.TESTS, file) is None]
    here = {file: source_of(package / file) for file in scope}
    for file in {*tables.PARTS} & {*here}:
        names = set(defined(here[file].tree))
        wrong += [
            f"PARTS of {file}: there is no {part}" for part in sorted(tables.PARTS[file] - names)
        ]
    named = {test for stages in tables.TESTS.values() for stage in stages for test in stage}
    for test in sorted(named | {*tables.KERNEL, *tables.SLOW}):
        if not (PROJECT / "tests" / test).exists():
            wrong.append(f"TESTS: there is no tests/{test}")
    texts = "\n".join(source.text for source in here.values())
    words = {*re.findall(r"\w+", texts)}
    wrong += [f"WORDING: nothing is called {word}" for word in sorted(tables.WORDING - words)]
    for pair in sorted(" ".join(sorted(p)) for p in tables.PAIRS):
        a, b = map(re.escape, pair.split())
        if not re.search(rf"\b{a}, {b}\b|\b{b}, {a}\b", texts):
            wrong.append(f"PAIRS: {pair} are nowhere side by side")
    for file in sorted({file for file, _, _ in tables.EQUIVALENT}):
        if file not in here:
            wrong.append(f"EQUIVALENT: {file} is not mutated")
            continue
        used = {m.equivalent for m in mutants_of(root, file)}
        rows = [key for key in tables.EQUIVALENT if key[0] == file]
        wrong += [f"EQUIVALENT: no mutant falls under {key}" for key in rows if key not in used]
    return wrong


def defined(tree: ast.AST, outer: str = "") -> Iterator[str]:
    """The names of functions and classes, with those inside as class.method."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield outer + node.name
            yield from defined(node, f"{outer}{node.name}.")


def sample(mutants: list[Mutant], count: int) -> list[Mutant]:
    """A fixed choice, spread over files and, within each, over rules: by turns, in the order of a
    hash of the name.
    """

    def rank(m):
        return hashlib.sha256(m.name.encode()).hexdigest()

    groups: dict[str, dict[str, list[Mutant]]] = {}
    for m in sorted(mutants, key=rank):
        groups.setdefault(m.file, {}).setdefault(m.rule, []).append(m)
    turns = {file: _by_turns(list(rules.values())) for file, rules in groups.items()}
    chosen: list[Mutant] = []
    while len(chosen) < count and turns:
        for file in list(turns):
            for _ in range(tables.WEIGHT.get(file, 1)):
                m = next(turns[file], None)
                if m is None:
                    turns.pop(file, None)
                    break
                chosen.append(m)
    return chosen[:count]


def _by_turns(lists: list[list[Mutant]]) -> Iterator[Mutant]:
    for i in range(max(map(len, lists))):
        yield from (group[i] for group in lists if i < len(group))


class Failures:
    """A plugin of pytest that says what failed, by its whole name."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{FAILED}{report.nodeid}", flush=True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{FAILED}{report.nodeid}", flush=True)


def child(
    project: Path, root: Path, tests: Sequence[str], log: Path, seconds: int, all_of_them: bool
) -> None:
    """In a process of its own: tests of the project on the package below `root`; up to the first
    that fails, or all.
    """
    os.setpgrp()  # what the tests start ends with them
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.environ["PYTHONPATH"] = str(root)  # for the processes that tests start
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(project)
    sys.path.insert(0, str(root))
    try:
        import coadjoint
        import coadjoint.nn
        import coadjoint.training.loop  # and with it all that a mutant may break at import
    except Exception as e:
        print(f"{FAILED}import: {type(e).__name__}: {e}", flush=True)
        os._exit(1)
    if not Path(coadjoint.__file__).resolve().is_relative_to(root.resolve()):
        print(f"another package was imported: {coadjoint.__file__}", flush=True)
        os._exit(9)
    import pytest

    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=line",
        *([] if all_of_them else ["-x"]),
    ]
    code = pytest.main([*options, *(f"tests/{f}" for f in tests)], plugins=[Failures()])
    sys.stdout.flush()
    os._exit(int(code))


class Work(NamedTuple):
    """What is to be tested: a mutant, or a name for the source as it is."""

    what: Any
    stages: Sequence[Sequence[str]]  # tests; the next stage is for what survives one
    seconds: float  # of the processor, for each
    taken: float = 0.0


@dataclass
class Run:
    """One test run under way."""

    work: Work
    process: Any
    log: Path
    folder: tempfile.TemporaryDirectory[str]
    deadline: float  # far beyond the processor's time: for tests that wait for ever
    began: float


class Runner:
    """Runs tests in forked processes, so that torch and pytest are loaded once."""

    def __init__(self, project: Path, jobs: int) -> None:
        import pytest  # noqa: F401
        import torch

        torch.set_num_threads(1)
        x = torch.zeros(2)
        torch.func.jvp(
            torch.tanh, (x,), (x,)
        )  # loads what forward mode needs; no backward before a fork
        assert "coadjoint" not in sys.modules
        self.project, self.jobs = project, jobs

    def start(self, work: Work) -> Run:
        folder = tempfile.TemporaryDirectory()
        root, log = Path(folder.name) / "src", Path(folder.name) / "log"
        shutil.copytree(self.project / "src", root, ignore=shutil.ignore_patterns("__pycache__"))
        if isinstance(work.what, Mutant):
            (root / "coadjoint" / work.what.file).write_text(str(work.what.text))
        all_of_them = not isinstance(work.what, Mutant)
        arguments = (self.project, root, work.stages[0], log, math.ceil(work.seconds), all_of_them)
        process = multiprocessing.get_context("fork").Process(target=child, args=arguments)
        process.start()
        now = time.perf_counter()
        return Run(work, process, log, folder, now + 30 * work.seconds, now)

    def run(self, work: Sequence[Work]) -> Iterator[tuple[Any, str, str, float]]:
        """-> (what, killed | timeout | survived, by what, seconds taken), as they end."""
        todo = list(reversed(work))
        running: list[Run] = []
        try:
            while todo or running:
                while todo and len(running) < self.jobs:
                    running.append(self.start(todo.pop()))
                multiprocessing.connection.wait([r.process.sentinel for r in running], timeout=1)
                for r in [
                    r
                    for r in running
                    if not r.process.is_alive() or time.perf_counter() > r.deadline
                ]:
                    running.remove(r)
                    outcome, by = self.end(r)
                    taken = r.work.taken + time.perf_counter() - r.began
                    if outcome == "survived" and r.work.stages[1:]:
                        todo.append(r.work._replace(stages=r.work.stages[1:], taken=taken))
                    else:
                        yield r.work.what, outcome, by, taken
        finally:
            for r in running:
                end_group(r.process)

    def end(self, r: Run) -> tuple[str, str]:
        late = r.process.is_alive()
        if late:
            end_group(r.process)
        r.process.join()
        code = r.process.exitcode
        text = r.log.read_text() if r.log.exists() else ""
        r.folder.cleanup()
        if late or code == -signal.SIGXCPU:
            return "timeout", "ran out of time"
        if code in (4, 5, 9):
            raise RuntimeError(f"the tests could not be run: {text[-500:]}")
        found = re.findall(rf"^{FAILED}(?:tests/)?(.+)$", text, re.M)
        by = "\n".join(found) if found else f"exit code {code}"
        return ("killed", by) if code else ("survived", "")


def end_group(process: Any) -> None:
    """A process that is alive, and those it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description="mutation tests of coadjoint's derivatives")
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample")
    parser.add_argument("--count", type=int, default=280, help="size of the sample")
    parser.add_argument(
        "--only",
        action="append",
        metavar="ID",
        help="these mutants alone (an ID or the beginning of one)",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a file's own tests alone, without the others that ought to notice",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="the processor's time for the tests of one mutant",
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # the project as it is now, whatever happens to it meanwhile
        for part in COPIED:
            if (PROJECT / part).is_dir():
                shutil.copytree(
                    PROJECT / part,
                    Path(folder) / part,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy(PROJECT / part, folder)
        return mutate(Path(folder), options)


def mutate(project: Path, options: argparse.Namespace) -> int:
    wrong = stale(project / "src")
    if wrong:
        print(
            "these rows of the tables no longer fit the source; mend or remove them:",
            *wrong,
            sep="\n  ",
        )
        return 2
    everything = generate(project / "src")
    if options.only:
        chosen = [
            m for m in everything if any(m.name == o or m.name.startswith(o) for o in options.only)
        ]
    else:
        chosen = everything if options.all else sample(everything, options.count)
    if options.list:
        for m in chosen:
            print(f"{m.name}{'  (equivalent)' if m.equivalent else ''}\n{m.diff}")
        print(
            f"{len(chosen)} of {len(everything)} mutants; by rule: "
            f"{dict(Counter(m.rule for m in chosen))}"
        )
        return 0
    same = [m for m in chosen if m.equivalent]
    began, runner = time.perf_counter(), Runner(project, options.jobs)
    ((_, outcome, by, _),) = runner.run([Work("nothing", [tables.KERNEL], options.seconds)])
    if outcome != "survived":
        print(f"{tables.KERNEL} fails without a mutation: {by}")
        return 2
    work = []
    for m in chosen:
        own, others = row_of(tables.TESTS, m.file)
        stages = [own] if options.quick or not others else [own, others]
        if not m.equivalent:
            work.append(Work(m, stages, options.seconds))
    results = {m: (outcome, by) for m, outcome, by, _ in shown(runner.run(work), len(work))}
    innocent = unmoved(runner, results, options.seconds)
    for m, (_, by) in results.items():
        if by in innocent:
            print(f"{by} fails without a mutation, and killed {m.name}")
    return max(report(results, same, time.perf_counter() - began), 2 if innocent else 0)


def unmoved(runner: Runner, results: dict[Mutant, tuple[str, str]], seconds: float) -> set[str]:
    """Of the tests that killed a mutant, those that fail without one as well."""
    by_file: dict[str, list[str]] = {}
    for _, by in results.values():
        if "::" in by and by not in by_file.setdefault(by.split("::")[0], []):
            by_file[by.split("::")[0]].append(by)
    work = [Work(file, [tests], seconds) for file, tests in by_file.items()]
    failed: set[str] = set()
    for file, outcome, by, _ in runner.run(work):
        if outcome != "survived":
            known = set(by.split("\n")) & set(by_file[file])
            failed |= known or set(by_file[file])
    return failed


def report(results: dict[Mutant, tuple[str, str]], same: list[Mutant], seconds: float) -> int:
    survivors = sorted(
        (m for m, (o, _) in results.items() if o == "survived"), key=lambda m: (m.file, m.line)
    )
    for m in survivors:
        print(f"survived  {m.name}\n{m.diff}")
    for m in same:
        print(f"equivalent  {m.name}: {tables.EQUIVALENT[m.equivalent]}\n{m.diff}")
    rules = Counter(m.rule for m in results)
    alive = Counter(m.rule for m in survivors)
    print(
        "killed by rule: " + ", ".join(f"{r} {n - alive[r]}/{n}" for r, n in sorted(rules.items()))
    )
    late = sum(o == "timeout" for o, _ in results.values())
    print(
        f"{len(results) + len(same)} mutants, {len(results) - len(survivors)} killed"
        + (f" ({late} of them by running out of time)" if late else "")
        + f", {len(survivors)} survived, {len(same)} equivalent, in {seconds:.0f} s"
    )
    return 1 if survivors else 0


def shown(
    results: Iterator[tuple[Any, str, str, float]], total: int
) -> Iterator[tuple[Any, str, str, float]]:
    """Results as they come: with a bar on a terminal, a line each otherwise."""
    if not sys.stdout.isatty():
        for i, (m, outcome, by, taken) in enumerate(results, 1):
            print(f"{i}/{total}  {outcome:8} {taken:4.0f} s  {m.name}  {by}", flush=True)
            yield m, outcome, by, taken
        return
    from rich.progress import Progress

    with Progress(auto_refresh=False) as bar:  # no second thread in a process that forks
        task, survived = bar.add_task("mutants", total=total), 0
        for result in results:
            survived += result[1] == "survived"
            bar.update(task, advance=1, description=f"mutants, {survived} survived", refresh=True)
            yield result


if __name__ == "__main__":
    sys.exit(main())
