"""The command line: a thin door. Flags and files become a Config, a Config becomes a library call."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, TextIO

import typer

from . import __version__
from .display import safe
from .errors import CoadjointError, ConfigError, MissingError


class Absent:
    """In place of the config where its package is not installed: commands that need none still run."""

    SECTIONS: Mapping[str, Any] = {}
    ONLINE: Mapping[str, Any] = {}
    ONLINE_TEXTS: Mapping[Any, str] = {}

    def __getattr__(self, name: str) -> Any:
        raise MissingError("this command needs pydantic, which is not installed: pip install pydantic.")


try:
    from . import config as configs
except ModuleNotFoundError as error:
    if error.name != "pydantic":
        raise
    configs = Absent()  # type: ignore[assignment]

app = typer.Typer(
    name="coadjoint",
    help="Train recurrent networks by backpropagation, plain or penalised, and look at what their gradients do.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
USAGE: Any = typer.BadParameter.mro()[2]  # the parent of every complaint about arguments
RUN = typer.Argument(..., help="a run folder")
OUT = typer.Option(None, "--out", "-o", help="the folder to write; runs/TASK-1, -2, ... by default")
QUIET = typer.Option(False, "--quiet", "-q", help="print errors only")


def _version(value: bool) -> None:
    if value:
        print(f"coadjoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
    debug: bool = typer.Option(False, "--debug", help="show the whole traceback of an error"),
) -> None:
    if debug:
        os.environ["COADJOINT_DEBUG"] = "1"


def configured(
    function: Callable[..., None],
    only: Mapping[str, Sequence[str]] | None = None,
    texts: Mapping[tuple[str, str], str] | None = None,
) -> Callable[..., None]:
    """Give a command one flag for each key of the config, or for those in `only`, explained by `texts` where it has a text. It
    receives them as `flags`, {section: {key: value}}."""
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "flags"]
    taken = {word for p in own for word in getattr(p.default, "param_decls", None) or ()}
    extra: list[inspect.Parameter] = []
    keys: dict[str, tuple[str, str]] = {}
    for section, model in configs.SECTIONS.items():
        for key, field in model.model_fields.items():
            if (section, key) == ("task", "name") or (only is not None and key not in only.get(section, ())):
                continue
            if (flag := configs.flag(section, key)) in taken:
                continue
            name, kinds = f"{section}__{key}", configs.KINDS[section, key]
            boolean = bool in kinds
            choices = configs.choices(kinds)
            words = f": {', '.join(map(str, choices))}" if choices else ""
            default = "" if boolean or field.default is None else f" ({field.default})"
            text = str in kinds or any(isinstance(value, str) for value in choices)
            option = typer.Option(
                None, f"{flag}/--no-{flag[2:]}" if boolean else flag,
                help=(texts or {}).get((section, key), f"{field.description}{words}{default}"),
                metavar="" if boolean else "TEXT" if text else "NUMBER", show_default=False,
                rich_help_panel=configs.panel(field) or str(model.__doc__).rstrip("."),
            )  # fmt: skip
            kind = Optional[bool] if boolean else Optional[str]
            extra.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind))
            keys[name] = section, key

    def command(**given: Any) -> None:
        flags: dict[str, dict[str, Any]] = {}
        for name, (section, key) in keys.items():
            value = given.pop(name)
            if value is not None:
                value = value if isinstance(value, bool) else configs.from_flag(section, key, value)
                flags.setdefault(section, {})[key] = value
        function(flags=flags, **given)

    hints = {p.name: p.annotation for p in [*own, *extra]}
    command.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *extra]])  # type: ignore[attr-defined]
    command.__annotations__ = inspect.get_annotations(function, eval_str=True) | {
        k: v for k, v in hints.items() if not isinstance(v, str)
    }
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def free(name: str) -> Path:
    """runs/NAME-1, or the next number that is not taken."""
    n = 1
    while (path := Path("runs") / f"{name}-{n}").exists():
        n += 1
    return path


def resolved(task: str | None, file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> configs.Config:
    from . import settings

    merged = {name: dict(section) for name, section in flags.items()}
    if task is not None:
        merged.setdefault("task", {})["name"] = task
    return configs.resolve(settings.load(file) if file else None, merged)


def carry_out(job: configs.Job, folder: Path, quiet: bool, **more: Any) -> None:
    """Train, say how it went, write the page."""
    from . import report, training
    from .errors import NumericalError

    loggers = [tensorboard(folder)] if job.config.training.tensorboard else []
    try:
        result = training.train(
            job.network, job.task, **job.arguments, folder=folder, display=not quiet, loggers=loggers, command=command_line(), **more
        )  # fmt: skip
    except (NumericalError, training.Interrupted):
        report.write(folder)
        raise
    page = report.write(folder)
    if quiet:
        return
    if result.skipped:
        print(f"{result.skipped} of {result.step} steps were not finite and left out")
    for split, values in result.metrics.items():
        print(safe(f"{split}: " + "  ".join(f"{k} {v:.6g}" for k, v in values.items())))
    goal = f" ({job.task.goal})" if job.task.goal else ""
    won = f"; success{goal} at step {result.success_step}" if result.success else f"; no success{goal}" if goal else ""
    outcome = {
        "success": f"success{goal} at step {result.success_step}, {result.success_seconds or 0:.0f} s",
        "early-stopped": f"stopped early at step {result.step}; the best step is {result.best_step}",
        "finished": f"finished at step {result.step}, {result.seconds:.0f} s{won}",
    }[result.status]
    print(safe(f"{outcome}\nrun:    {folder}\nreport: {page}"))


def tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    from . import files

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingError("--tensorboard needs its package: pip install 'coadjoint[tensorboard]'.") from None
    writer: Any = None

    def log(row: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            files.inner(folder / "tensorboard")
            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=row["step"])
        kind = row.get("split", row["kind"])
        for key, value in row.items():
            if isinstance(value, float):
                writer.add_scalar(f"{kind}/{key}", value, row["step"])
        for key, value in row.get("gradients", {}).items():
            writer.add_scalar(f"gradient/{key}", value, row["step"])
        writer.flush()

    return log


def command_line() -> str:
    """As it was typed, in text that can be written: names of files need not be UTF-8."""
    return shlex.join(["coadjoint", *sys.argv[1:]]).encode(errors="backslashreplace").decode()


@app.command()
@configured
def train(
    task: Optional[str] = typer.Argument(None, help="a built-in task (`coadjoint tasks`); or --train FILE"),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="a .toml, .yaml or .json file; flags come on top"
    ),
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Train a network on a task or on your own data, in a run folder that survives crashes and ends in a page.

    \b
    coadjoint train temporal-order --length 50 --penalty log-ratio --clip 1
    coadjoint train addition --cell lstm --length 50,60 --ragged --schedule cosine
    coadjoint train --train data.csv --id series --target label --patience 10
    """
    from . import runs, settings
    from .errors import StorageError

    job = configs.build(resolved(task, config, flags))
    folder = out or free(job.config.task.name or Path(str(job.config.data.train)).stem)
    runs.create(folder, 0)
    lock = runs.Lock(folder)  # of two that begin at once in one folder, the second finds the first one's config
    try:
        if (folder / "config.yaml").exists():
            raise StorageError(
                f"{folder} already holds a run. Go on with it: coadjoint resume {shlex.quote(str(folder))}; or choose another --out."
            )
        settings.dump(configs.plain(job.config), folder / "config.yaml")
    finally:
        lock.release()
    if not quiet:
        for note in job.notes:
            print(safe(note))
        count, trained = (
            sum(p.numel() for p in job.network.parameters() if p.requires_grad or every) for every in (True, False)
        )
        of_them = "" if trained == count else f", {trained:,} of them trained"
        print(safe(f"{job.network.extra_repr()}\n{count:,} parameters{of_them}; run folder {folder}"))
        if hasattr(job.task, "baseline"):
            figures = "  ".join(f"{name} {value:.4g}" for name, value in job.task.baseline().items())
            print(safe(f"remembering nothing gives: {figures}"))
    carry_out(job, folder, quiet)


@app.command()
def resume(
    run: Path = RUN,
    steps: Optional[int] = typer.Option(None, "--steps", help="go on up to this step instead"),
    fallback: bool = typer.Option(False, "--fallback", help="use the previous checkpoint if the last one is damaged"),
    jobs: Optional[int] = typer.Option(None, "--jobs", "-j", help="processes (of a comparison)"),
    quiet: bool = QUIET,
) -> None:
    """Go on with a run, or with a comparison, where it stopped: bit for bit as if it had not."""
    from . import report, runs, settings

    if os.path.lexists(run / "compare.json"):
        if steps is not None or fallback:
            raise ConfigError("--steps and --fallback belong to a run, not to a comparison.")
        return compared(run, jobs, quiet)
    if jobs is not None:
        raise ConfigError("--jobs belongs to a comparison, not to a run.")
    if os.path.lexists(run / "online.json"):
        return stream_on(run, steps, fallback, quiet)
    config = configs.read(run)
    if steps is not None:
        config = configs.resolve(
            None, {**configs.plain(config), "training": {**configs.plain(config)["training"], "steps": steps}}
        )
    job = configs.build(config, runs.glimpse(run))
    ended = finished(run, job.arguments["steps"])
    if ended is not None:
        if not (run / "report.html").exists():
            report.write(run)
        longer = f" To train longer: coadjoint resume {run} --steps N" if ended == "finished" else ""
        if not quiet:
            print(safe(f"{run} has ended already ({ended}).{longer}"))
        return None
    if steps is not None:
        runs.Lock(run).release()
        settings.dump(configs.plain(job.config), run / "config.yaml")
    carry_out(job, run, quiet, resume=True, fallback=fallback)
    return None


def finished(run: Path, steps: int) -> str | None:
    """How the run ended, if it cannot go on."""
    from . import schemas

    path = run / "result.json"
    if not os.path.lexists(path):
        return None
    result = schemas.read(path, schemas.Result)
    over = result["status"] in ("success", "early-stopped") or (
        result["status"] == "finished" and result["step"] >= steps
    )
    return str(result["status"]) if over and (run / "model.safetensors").exists() else None


@app.command()
@functools.partial(configured, only={**configs.ONLINE, "gradient": ("k1", "k2")}, texts=configs.ONLINE_TEXTS)
def online(
    data: str = typer.Argument(
        ..., help="a .csv, .tsv, .txt (also .gz), .npy or .parquet file; - for what is piped in"
    ),
    learner: Optional[str] = typer.Option(
        None, "--learner", help="rtrl: an update at every step (default); truncated: one every --k1 steps"
    ),
    classes: Optional[str] = typer.Option(
        None, "--classes", help="the labels of --kind classify, a,b,c; without it a first pass over the file finds them"
    ),
    window: int = typer.Option(1000, "--window", min=1, help="steps that the moving averages go over"),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="a .toml, .yaml or .json file; flags come on top"
    ),
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Learn from a stream, row by row: each is predicted first and then learned from, in memory that does not grow.

    \b
    coadjoint online sensors.csv --target load --hidden 30
    coadjoint online sensors.csv --kind next --learner truncated --k1 10 --k2 50
    zcat log.csv.gz | coadjoint online - --kind next --cell gru
    """
    from . import files, runs, settings
    from .errors import StorageError, choose

    if learner is not None:
        flags.setdefault("gradient", {})["method"] = choose("learner", learner, ("rtrl", "truncated"))
    flags.setdefault("data", {})["train"] = data
    labels = None if classes is None else [label.strip() for label in classes.split(",")]
    job = configs.streamed(resolved(None, config, flags), labels, window)
    folder = out or free(job.stream.name)
    runs.create(folder, 0)
    lock = runs.Lock(folder)
    try:
        if (folder / "config.yaml").exists():
            raise StorageError(
                f"{folder} already holds a run. Go on with it: coadjoint resume {shlex.quote(str(folder))}; or choose another --out."
            )
        files.replace(folder / "online.json", runs.dumps({"classes": labels, "window": window}, indent=1))
        settings.dump(job.plain, folder / "config.yaml")
    finally:
        lock.release()
    if not quiet:
        for note in job.stream.notes:
            print(safe(note))
        count = sum(p.numel() for p in job.network.parameters())
        print(safe(f"{job.network.extra_repr()}\n{count:,} parameters; run folder {folder}"))
    follow(job, folder, quiet)


def follow(job: configs.Online, folder: Path, quiet: bool, **more: Any) -> None:
    """Learn a stream to its end, say how it went, write the page."""
    from . import online as learning
    from . import report, training
    from .errors import DataError, NumericalError

    try:
        result = learning.learn(
            job.network, job.stream, **job.arguments, folder=folder, display=not quiet, command=command_line(), **more
        )
    except (NumericalError, DataError, training.Interrupted):
        report.write(folder)
        raise
    page = report.write(folder)
    if quiet:
        return
    last = min(result.step, job.arguments["window"])
    for split, values in (("all steps", result.so_far), (f"last {last} steps", result.recent)):
        print(safe(f"{split}: " + "  ".join(f"{k} {v:.6g}" for k, v in values.items())))
    how = "the stream ended" if result.status == "ended" else "finished"
    print(safe(f"{how} at step {result.step}, {result.updates} updates, {result.seconds:.0f} s"))
    print(safe(f"run:    {folder}\nreport: {page}"))


def stream_on(run: Path, steps: int | None, fallback: bool, quiet: bool) -> None:
    """Go on with a run of `coadjoint online`."""
    from . import runs, schemas, settings

    own = schemas.read(run / "online.json", schemas.OnlineSettings)
    config = configs.read(run)
    if steps is not None:
        training = config.training.model_copy(update={"steps": steps})
        config = config.model_copy(update={"training": training})
    if (ended := finished(run, steps or 0)) is not None:
        if not quiet:
            more = f"To go on, if its stream does: coadjoint resume {run} --steps N"
            print(safe(f"{run} has ended already ({ended}). {more}"))
        return
    job = configs.streamed(config, own["classes"], own["window"], runs.glimpse(run))
    if steps is not None:
        runs.Lock(run).release()
        settings.dump(job.plain, run / "config.yaml")
    follow(job, run, quiet, resume=True, fallback=fallback)


@app.command()
def replay(run: Path = RUN) -> None:
    """Compute again the step at which a run met a number that is not finite, and say where it arose."""
    from . import runs, training
    from .errors import NumericalError, StorageError

    found = runs.saved(run, "replay")
    if not found:
        raise StorageError(f"{run} holds no replay: no step of it was refused.")
    job = configs.build(configs.read(run), runs.glimpse(run, "replay"))
    saved = runs.load(found[-1])
    arguments = {**job.arguments, "nonfinite": "stop"}
    try:
        loss = training.again(job.network, job.task, saved, arguments).loss
    except NumericalError as error:
        print(safe(f"step {saved.step + 1}: {error}"))
        raise typer.Exit(NumericalError.exit_code) from None
    print(f"step {saved.step + 1}: loss {loss:.6g}, finite here. The run refused it: {safe(saved.state['reason'])}")


@app.command()
@configured
def compare(
    what: Optional[list[str]] = typer.Argument(
        None,
        help="tasks, each with settings of its own: 'addition length=100'; or the folders of runs that are there already",
    ),
    method: list[str] = typer.Option(
        [],
        "--method",
        "-m",
        help="a row: 'NAME key=value key=a|b ...'; alternatives make more rows, cell=all one for each cell",
    ),
    seeds: int = typer.Option(3, "--seeds", help="runs of each row: seed, seed + 1, ..."),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="processes at a time; one for each CPU core by default"
    ),
    config: Optional[Path] = typer.Option(None, "--config", "-c", help="common settings from a file"),
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Train the same tasks under several settings and seeds, in parallel; a table for each task, one page.

    \b
    coadjoint compare xor --length 20 -m plain -m 'clipped clip=1 lr=1e-3|1e-2'
    coadjoint compare xor -m plain -m 'penalised penalty=log-ratio weight=1|2'
    coadjoint compare 'addition length=50' 'digits steps=2000' -m 'plain cell=all'
    coadjoint compare runs/xor-1 runs/xor-2
    """
    from . import compare as comparing
    from . import report
    from .errors import StorageError

    what = what or []
    folders = [text for text in what if Path(text).is_dir()]
    if folders and len(folders) < len(what):
        other = next(text for text in what if text not in folders)
        raise StorageError(
            f"{folders[0]} is a folder and {other!r} is none: compare takes tasks, or the folders of runs, not both."
        )
    if folders:
        if method or config or any(flags.values()):
            raise ConfigError(
                "runs that are there already are compared as they are: leave out --method, --config and settings."
            )
        folder = out or free("compare")
        found = comparing.existing([Path(p) for p in what], folder, command_line())
        page = report.write(folder)
        if not quiet:
            show(found)
            print(safe(f"report: {page}"))
        return
    cores_of(jobs)
    if not method:
        raise ConfigError("what to compare? Give rows with --method 'NAME key=value ...', or the folders of runs.")
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1; got {seeds}.")
    base = configs.plain(resolved(None, config, flags))
    first = base.get("training", {}).get("seed", 0)
    tasks = {"on": [task for text in what for task in comparing.tasks(text)]} if what else {}
    folder = out or free("-".join(["compare", *(text.split()[0] for text in what[:3])] if what else ["compare-data"]))
    rows = [row for text in method for row in comparing.variants(text)]
    comparing.start(base, rows, range(first, first + seeds), folder, command_line(), **tasks)
    compared(folder, jobs, quiet)


def compared(folder: Path, jobs: int | None, quiet: bool) -> None:
    """Run a comparison to its end, print its tables, write the page."""
    from . import compare as comparing
    from . import report

    with ticking(quiet) as tick:
        found = comparing.run(folder, cores_of(jobs), tick)
    page = report.write(folder)
    if not quiet:
        show(found)
        print(safe(f"runs:   {folder / 'runs'}\nreport: {page}"))


def cores_of(jobs: int | None) -> int:
    """Processes at a time: as many as asked for, or one for each core."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1; got {jobs}.")
    return jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class ticking:
    """What is done, a line each; on a terminal a bar below them."""

    def __init__(self, quiet: bool, name: str = "runs", to: TextIO | None = None) -> None:
        self.quiet, self.name, self.to = quiet, name, to or sys.stdout
        self.bar: Any = None

    def __enter__(self) -> Callable[[float, int, str | None], None]:
        if self.to.isatty() and not self.quiet:
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(file=self.to))
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=None)
        return self.tick

    def tick(self, done: float, total: int, what: str | None) -> None:
        line = safe(what if self.bar is not None else f"{done:g} of {total}: {what}")
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)
            if what:
                self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif what and not self.quiet:
            print(line, flush=True, file=self.to)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def show(found: dict[str, Any]) -> None:
    """The tables of a comparison, one for each task."""
    from .compare import tables

    told = tables(found)
    for task, (heads, rows) in told.items():
        if len(told) > 1:
            print(safe(f"\n{task}\n"))
        print_table(heads, rows)


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their longest cell; a terminal narrower than that folds cells, at words, the widest column first."""
    widths = [max(len(safe(r[i])) for r in [heads, *rows]) for i in range(len(heads))]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - 2 * (len(heads) - 1)
        while sum(widths) > room and max(widths) > 12:
            widths[widths.index(max(widths))] -= 1
    for row in [heads, ["-" * w for w in widths], *rows]:
        folded = [textwrap.wrap(safe(c), w) or [""] for c, w in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*folded, fillvalue=""):
            print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


@app.command()
def predict(
    run: Path = typer.Argument(..., help="a run folder, or its model.safetensors"),
    data: Path = typer.Argument(
        ..., help="a file of sequences, shaped like the training file; a target column is not needed"
    ),
    out: Path = typer.Option(Path("predictions.csv"), "--out", "-o", help="the file to write"),
) -> None:
    """Predict for new sequences with a run that was trained on your own data."""
    count, notes = configs.predict(run, data, out, warn)
    for note in notes:
        print(safe(note))
    print(safe(f"{count} sequences -> {out}"))


@app.command()
def report(
    folder: Path = typer.Argument(..., help="a run folder or a comparison"),
    markdown: Optional[Path] = typer.Option(None, "--markdown", help="also write a comparison's tables to this file"),
) -> None:
    """Write report.html of a run or a comparison anew: one file, to look at offline."""
    from . import files
    from . import report as pages

    print(safe(pages.write(folder)))
    if markdown is not None:
        files.replace(markdown, pages.markdown(folder))
        print(safe(markdown))


@app.command()
@configured
def diagnose(
    what: Optional[str] = typer.Argument(
        None, help="a run folder; or a built-in task (or --train FILE), for a network before its training"
    ),
    radius: Optional[str] = typer.Option(
        None, "--radius", help="spectral radius of W to begin with; several, a,b,c, are drawn side by side"
    ),
    samples: int = typer.Option(100, "--samples", min=1, help="held-out sequences to look at"),
    only: Optional[str] = typer.Option(None, "--only", help="some of them: temporal,decay,lyapunov, ..."),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="a .toml, .yaml or .json file; flags come on top"
    ),
    out: Optional[Path] = typer.Option(
        None, "--out", "-o", help="the folder to write; RUN/diagnostics, or runs/diagnose-TASK-1, -2, ... by default"
    ),
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Look at what the gradient does inside a network: figures, plots, arrays and a page.

    \b
    coadjoint diagnose runs/xor-1
    coadjoint diagnose temporal-order --length 100 --cell lstm
    coadjoint diagnose temporal-order --radius 0.8,1.0,1.2 --only temporal
    """
    from . import diagnostics, files, report
    from .errors import StorageError, choose

    names = [choose("diagnostic", n.strip(), diagnostics.DIAGNOSTICS) for n in only.split(",")] if only else None
    run = Path(what) if what is not None and Path(what).is_dir() else None
    jobs: dict[str, tuple[Any, Any, configs.Config]] = {}  # network, task, config
    weights = "weights before training"
    if run is not None:
        if config or radius or any(flags.values()):
            raise ConfigError("a run is looked at as it is: leave out --config, --radius and settings.")
        *found_there, weights = weights_of(run)
        jobs[""] = tuple(found_there)
    for value in () if run else radius.split(",") if radius else [None]:
        chosen = {} if value is None else {"radius": configs.from_flag("network", "radius", value.strip())}
        job = configs.build(resolved(what, config, flags | {"network": flags.get("network", {}) | chosen}))
        jobs[f"radius {value}"] = job.network, job.task, job.config
    net, task, settled = next(iter(jobs.values()))
    folder = out or (run / "diagnostics" if run else free(f"diagnose-{settled.task.name or 'data'}"))
    if run and not out:
        files.inner(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "diagnostics.json").is_file():
        raise StorageError(f"{folder} exists and is not empty: choose another --out.")
    if len(jobs) > 1 and names is None:
        names = [n for n in diagnostics.DIAGNOSTICS if n != "landscape"]  # a picture of one network
    each = {}
    for name, (net, task, settled) in jobs.items():
        e = diagnostics.evaluate(net, task, samples, settled.training.seed)
        each[name] = diagnostics.examine(e, names)
    found = diagnostics.Compared(each) if len(each) > 1 else next(iter(each.values()))
    settings = configs.plain(settled)
    count = f"{len(e.losses):,} held-out sequence{'s' * (len(e.losses) != 1)}"
    if len(jobs) > 1:
        weights += f", spectral radius {', '.join(name.removeprefix('radius ') for name in jobs)}"
        settings["network"].pop("radius")
    about = {
        "task": settings.get("task") or settings.get("data"),
        "network": settings.get("network"),
        "weights": weights,
    }
    about |= {"sequences": count, "seed": settled.training.seed, "command": command_line()}
    diagnostics.save(folder, found, about)
    page = report.write(folder if out or not run else run)
    if quiet:
        return
    print(safe(f"{net.extra_repr()}\n{weights}; {count}\n"))
    print_table(*found.table())
    declined: dict[str, list[str]] = {}
    for name, why in found.declined.items():
        declined.setdefault(why.partition(": ")[2], []).append(name)
    for why, without in declined.items():
        print(safe(f"not {', '.join(without)}: {why}"))
    print(safe(f"\nfolder: {folder}\npage:   {page}"))


def weights_of(run: Path) -> tuple[Any, Any, Any, str]:
    """The network of a run, its task and config, and which weights these are: the model's or the last checkpoint's."""
    from . import runs, training
    from .errors import StorageError

    if os.path.lexists(run / "online.json"):
        raise StorageError(f"{run} learned from a stream, which has no held-out sequences to look at.")
    settled = configs.read(run)
    task = configs.task_of(settled)
    if os.path.lexists(run / "model.safetensors"):
        return configs.load_model(run / "model.safetensors", warn)[0], task, settled, "weights after training"
    configs.belongs(settled, task, runs.glimpse(run))
    saved = runs.latest(run)
    if saved is None:
        raise StorageError(f"{run} holds no weights yet: neither a model nor a checkpoint.")
    net = configs.network_of(settled, task, "cpu")
    training.fit(net, saved.model, str(run))
    return net, task, settled, f"weights at step {saved.step:,}"


@app.command()
def tasks() -> None:
    """List the built-in tasks with their options."""
    from .tasks import TASKS, options

    tell = lambda key, default: key.upper() if default is ... else f"{key}={default}" if default is not None else key
    rows = [
        [name, entry.about, ", ".join(tell(k, v) for k, v in options(name).items())] for name, entry in TASKS.items()
    ]
    print_table(["task", "what it asks", "options"], rows)


@app.command("cells")
def list_cells(
    name: Optional[str] = typer.Argument(None, help="one of them: everything about it"),
    hidden: int = typer.Option(64, "--hidden", min=1, max=10_000, help="units, for the shapes of its parameters"),
    inputs: int = typer.Option(1, "--inputs", min=1, max=10_000, help="inputs, likewise"),
) -> None:
    """List the cells with their equations, options, parameters, engines, state entries of a unit and papers."""
    if name is not None:
        return print_cell(name, hidden, inputs)
    rows = []
    for cell in configs.cell_names():
        about = configs.about(cell)
        given = [f"{n}={v}" if v is not None else n for n, v in about.options.items()]
        declining = [engine for engine, why in about.engines.items() if why]
        engines = ", ".join(e for e in about.engines if e not in declining)
        if len(declining) < len(about.engines) / 2:
            engines = f"all but {', '.join(declining)}" if declining else "all"
        parameters = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", n) for n in about.parameters)
        equations = " ".join(about.equations.split())
        rows.append([cell, equations, ", ".join(given), " ".join(parameters), engines, about.state, about.paper])
    print_table(["cell", "equations", "options", "parameters", "engines", "state", "paper"], rows)
    return None


def print_cell(name: str, hidden: int, inputs: int) -> None:
    """Everything about a cell, part by part."""
    about = configs.about(name, hidden, inputs)
    options = {configs.flag("network", key): value for key, value in about.options.items()}
    reasons = dict.fromkeys(why for why in about.engines.values() if why)
    having = lambda why: ", ".join(engine for engine, found in about.engines.items() if found == why)
    parts = {
        "": about.equations.splitlines(),
        "paper": [about.paper or "none"],
        "entries of the state for each unit": [about.state],
        "options, and what they are if they are not given": aligned(options) or ["none"],
        f"parameters, --hidden {hidden} --inputs {inputs}": aligned(
            {n: list(shape) for n, shape in about.parameters.items()}
        ),
        "engines": [
            having(None),
            *(f"not {having(why)}, which {why.partition('. Use')[0]}" for why in reasons),
        ],
        "starts, --init": [", ".join(about.starts)],
    }
    print(safe(name))
    for title, lines in parts.items():
        print(f"\n{title}" if title else "")
        for line in lines:
            print(safe(f"    {line}".rstrip()))


def aligned(table: Mapping[str, Any]) -> list[str]:
    """A line for each entry, its values below each other."""
    wide = max(map(len, table), default=0)
    words = {"None": "as many as --hidden", "True": "yes", "False": "no"}
    return [f"{key.ljust(wide)}  {words.get(str(value), value)}" for key, value in table.items()]


DEMO: dict[str, dict[str, Any]] = {
    "task": {"name": "temporal-order", "length": 50},
    "network": {"hidden": 64, "init": "spectral", "radius": 0.5},
    "optimiser": {"lr": 2e-3},
    "training": {"steps": 4000, "every": 100},
}
DEMO_ROWS = ("plain", "clipped clip=1", "penalised clip=1 penalty=log-ratio weight=2")


@app.command()
def demo(
    out: Optional[Path] = OUT,
    jobs: Optional[int] = typer.Option(None, "--jobs", "-j", help="processes at a time"),
    quiet: bool = QUIET,
) -> None:
    """Temporal order from a vanishing start, by three methods: about a minute, offline, and a page at the end."""
    from . import compare as comparing

    cores_of(jobs)
    folder = out or free("demo")
    if not quiet:
        print("Temporal order, 50 steps: 64 tanh units, spectral radius 0.5, at most 4,000 steps of Adam")
    comparing.start(DEMO, [row for text in DEMO_ROWS for row in comparing.variants(text)], [0], folder, command_line())
    compared(folder, jobs, quiet)


@app.command()
def bench(
    device: Optional[str] = typer.Option(None, "--device", help="cpu (default) or cuda"),
    cells: Optional[str] = typer.Option(None, "--cells", help="elman,lstm,gru,nn.RNN,nn.LSTM,nn.GRU,hessian-free"),
    sizes: Optional[str] = typer.Option(None, "--sizes", help="steps x samples x units: 100x20x50,200x64x128"),
    peers: Optional[str] = typer.Option(None, "--peers", help="torch,autograd,jax; or none"),
    repeat: Optional[int] = typer.Option(None, "--repeat", help="rounds; the median counts"),
    threads: Optional[int] = typer.Option(None, "--threads", help="threads of a CPU, each on its core (1)"),
    quick: bool = typer.Option(False, "--quick", help="the smallest size, three rounds"),
    explain: bool = typer.Option(False, "--explain", help="say which engines run here and why; measure nothing"),
    json: Optional[str] = typer.Option(
        None, "--json", metavar="PATH", help="write all figures to a file; - for stdout, without the table"
    ),
    write: Optional[Path] = typer.Option(None, "--write", help="put the table into this page, in the device's section"),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="the results alone, no lines on the way"),
) -> None:
    """Time plain, penalised and double gradients against torch.nn, autograd and JAX, and against what this machine can do.

    \b
    coadjoint bench
    coadjoint bench --device cuda --json bench.json
    coadjoint bench --cells lstm --sizes 300x32x100 --peers torch
    coadjoint bench --explain
    """
    from . import bench as benchmark
    from . import files
    from .errors import StorageError

    if threads is not None and device == "cuda":
        raise ConfigError("--threads belongs to --device cpu.")
    asked: dict[str, Any] = {"device": device or "cpu", "repeat": repeat, "threads": threads}
    asked |= {key: benchmark.read_names(text) for key, text in (("cells", cells), ("peers", peers)) if text is not None}
    asked["sizes"] = benchmark.read_sizes(sizes) if sizes is not None else None
    if quick:
        asked["sizes"] = asked["sizes"] or benchmark.SIZES.get(asked["device"], ())[:1]
        asked["repeat"] = asked["repeat"] or 3
    given = {key: value for key, value in asked.items() if value is not None}
    if explain:
        names = given.get("cells", tuple(benchmark.MODULES))
        for line in benchmark.explain([device] if device else list(benchmark.SIZES), names, given.get("sizes", ())):
            print(safe(line))
        return
    options = benchmark.Options(**given)
    for path in (Path(json or "-"), write or Path("-")):
        if not path.parent.is_dir():
            raise StorageError(f"{path} cannot be written: there is no such folder. Make it, or choose another place.")
    with ticking(quiet, "bench", sys.stderr) as tick:
        result = benchmark.run(options, tick)
    if json == "-":
        print(result.json(), end="")
    elif result.rows or result.steps:
        print(safe(f"{result.where()}\n"))
        if result.rows:
            print_table(*result.table())
            print()
        for note in result.notes():
            print(safe(note))
    if json is not None and json != "-":
        files.replace(json, result.json())
    if result.interrupted:
        fail("interrupted.", 130)
    if write is not None:
        benchmark.write(write, result)


def main() -> None:
    """The entry point: errors in one line, each kind with its exit code."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except USAGE as error:
        fail(error.format_message(), 2)
    except CoadjointError as error:
        if os.environ.get("COADJOINT_DEBUG"):
            raise
        fail(str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if os.environ.get("COADJOINT_DEBUG"):
            raise
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
            reading = sys.argv[1:2] in (["resume"], ["replay"], ["predict"], ["report"])
            advice = (
                "This folder asks for more than there is here." if reading else "Lower --hidden, --batch or --length."
            )
            fail(f"not enough memory. {advice}", MissingError.exit_code)
        words = " ".join(str(error).split())[:200]
        fail(f"a fault of coadjoint: {type(error).__name__}: {words}. `coadjoint --debug ...` shows where.", 1)


def warn(message: str) -> None:
    """What the user should know of, though the command goes on."""
    print(safe(f"coadjoint: warning: {message}"), file=sys.stderr)


def fail(message: str, code: int) -> None:
    print(safe(f"coadjoint: {'stopped' if code == 75 else 'error'}: {message}"), file=sys.stderr)
    sys.exit(code)
