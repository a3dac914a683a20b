"""`coadjoint resume` and `replay`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Optional

import typer

from ..errors import ConfigError, escape_controls
from ..training import launched
from . import build
from . import flags as setting_flags
from .compare import HERE, Where, run_comparison
from .interruption import told_when_interrupted
from .online import resume_stream
from .program import (
    ON,
    QUIET,
    RUN,
    TLS_CA_FILE,
    TLS_CERT,
    TLS_KEY,
    app,
    print_escaped,
)
from .together import joined_processes
from .train import resume_run
from .tune import resume_study


@app.command()
def resume(
    run: Path = typer.Argument(..., metavar="RUN", help="the folder of a run or a comparison"),
    steps: Optional[int] = typer.Option(
        None, "--steps", help="new number of training steps in total"
    ),
    fallback: bool = typer.Option(
        False, "--fallback", help="use the previous checkpoint if the last one is damaged"
    ),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="comparison, search: number of parallel processes"
    ),
    trials: Optional[int] = typer.Option(
        None, "--trials", help="search: new number of trials in total"
    ),
    minutes: Optional[float] = typer.Option(
        None, "--minutes", help="search: time for what is left"
    ),
    on: Optional[str] = ON,
    tls_ca_file: Optional[Path] = TLS_CA_FILE,
    tls_cert: Optional[Path] = TLS_CERT,
    tls_key: Optional[Path] = TLS_KEY,
    storage: Optional[str] = typer.Option(
        None, "--storage", help="search: where its trials are recorded, if not in its folder"
    ),
    force: bool = typer.Option(False, "--force", help="resume a run that a search has pruned"),
    quiet: bool = QUIET,
) -> None:
    """Resume a run, a comparison or a search.

    The result of a run matches an uninterrupted one bit for bit.
    """
    refuse_if_shared(run)
    where = Where(on, tls_ca_file, tls_cert, tls_key)
    if where != HERE and not os.path.lexists(run / "compare.json"):
        raise ConfigError("--on applies to a comparison.")
    if os.path.lexists(run / "tune.json"):
        if steps is not None or fallback:
            raise ConfigError("--steps and --fallback apply to a run, not to a search.")
        resume_study(run, trials, minutes, jobs, quiet, storage)
        return
    if trials is not None or minutes is not None or storage is not None:
        raise ConfigError(
            "--trials, --minutes and --storage apply to a search by `coadjoint tune`."
        )
    if os.path.lexists(run / "compare.json"):
        if steps is not None or fallback:
            raise ConfigError("--steps and --fallback apply to a run, not to a comparison.")
        if not quiet:
            print_escaped(f"Resuming {run}, a comparison.")
        run_comparison(run, jobs, quiet, where=where)
        return
    if jobs is not None:
        raise ConfigError("--jobs applies to a comparison, not to a run.")
    if os.path.lexists(run / "online.json"):
        resume_stream(run, steps, fallback, quiet)
        return
    with told_when_interrupted(run), joined_processes() as processes:
        with processes.together():
            is_forced = processes.leads and refuse_if_pruned(run, force)
        resume_run(run, processes, quiet, steps, fallback, is_forced)


def refuse_if_shared(run: Path) -> None:
    """Refuse to let the processes of torchrun share anything but a training run."""
    for name in ("tune.json", "compare.json", "online.json"):
        if launched.size() > 1 and os.path.lexists(run / name):
            raise ConfigError(
                f"{run} is not a run of `coadjoint train`, which several processes can share: "
                "resume it without torchrun."
            )


def refuse_if_pruned(run: Path, force: bool) -> bool:
    """Refuse to resume a run that a search has pruned, unless that is wanted.

    Returns whether the run was pruned.
    """
    from .outcomes import read_status

    is_pruned = read_status(run) == "pruned"
    if is_pruned and not force:
        raise ConfigError(
            f"{run} was pruned by `coadjoint tune`: others were better. To train it all the same: "
            f"coadjoint resume {shlex.quote(str(run))} --force"
        )
    return is_pruned


@app.command()
def replay(run: Path = RUN) -> None:
    """Repeat the step that produced a non-finite number, and report where it first occurred."""
    from ..errors import NumericalError, StorageError
    from ..training import loop, storage

    replays = storage.list_checkpoints(run, "replay")  # oldest first
    if not replays:
        raise StorageError(f"{run} has nothing to replay: no step was rejected.")
    config = setting_flags.read_run_config(run)
    job = build.build(config, storage.read_outline(run, "replay"), has_begun=True)
    saved = storage.load(replays[-1])
    arguments = {**job.arguments, "nonfinite": "stop"}  # raise the error, whatever the run did
    try:
        loss = loop.recompute_step(job.network, job.task, saved, arguments).loss
    except NumericalError as error:
        print_escaped(f"step {saved.step + 1}: {error}")
        raise typer.Exit(NumericalError.exit_code) from None
    reason = escape_controls(saved.state["reason"])
    print(
        f"step {saved.step + 1}: loss {loss:.6g}, which is finite on this machine. The run "
        f"rejected it: {reason}"
    )
