"""`coadjoint diagnose`: what gradients do inside a run or a task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

import typer

from ..errors import ConfigError, escape_controls
from . import build, schema
from . import flags as setting_flags
from .flags import config_from_command, with_setting_flags
from .program import QUIET, app, command_line, next_free_folder, print_table, warn


@app.command()
@with_setting_flags
def diagnose(
    what: Optional[str] = typer.Argument(
        None,
        help="a run folder; or a built-in task (or --train FILE), for a network before its training",
    ),
    radius: Optional[str] = typer.Option(
        None,
        "--radius",
        help="spectral radius of W to begin with; several, a,b,c, are drawn side by side",
    ),
    samples: int = typer.Option(100, "--samples", min=1, help="held-out sequences to look at"),
    only: Optional[str] = typer.Option(
        None, "--only", help="some of them: temporal,decay,lyapunov, ..."
    ),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="a .toml, .yaml or .json file; flags come on top"
    ),
    out: Optional[Path] = typer.Option(
        None,
        "--out",
        "-o",
        help="the folder to write; RUN/diagnostics, or runs/diagnose-TASK-1, -2, ... by default",
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
    from ..diagnostics import examination
    from ..errors import StorageError, choose
    from ..training import files
    from ..training.report import diagnoses, pages

    names = (
        [choose("diagnostic", n.strip(), examination.DIAGNOSTICS) for n in only.split(",")]
        if only
        else None
    )
    run = Path(what) if what is not None and Path(what).is_dir() else None
    jobs: dict[str, tuple[Any, Any, schema.Config]] = {}  # network, task, config
    weights = "weights before training"
    if run is not None:
        if config or radius or any(flags.values()):
            raise ConfigError(
                "a run is looked at as it is: leave out --config, --radius and settings."
            )
        *found_there, weights = load_run_network(run)
        jobs[""] = tuple(found_there)
    for value in () if run else radius.split(",") if radius else [None]:
        chosen = (
            {}
            if value is None
            else {"radius": setting_flags.parse_flag("network", "radius", value.strip())}
        )
        job = build.build(
            config_from_command(
                what, config, flags | {"network": flags.get("network", {}) | chosen}
            )
        )
        jobs[f"radius {value}"] = job.network, job.task, job.config
    net, task, settled = next(iter(jobs.values()))
    folder = out or (
        run / "diagnostics" if run else next_free_folder(f"diagnose-{settled.task.name or 'data'}")
    )
    if run and not out:
        files.is_real_folder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "diagnostics.json").is_file():
        raise StorageError(f"{folder} exists and is not empty: choose another --out.")
    if len(jobs) > 1 and names is None:
        names = [n for n in examination.DIAGNOSTICS if n != "landscape"]  # a picture of one network
    each = {}
    for name, (net, task, settled) in jobs.items():
        e = examination.evaluate(net, task, samples, settled.training.seed)
        each[name] = examination.examine(e, names)
    found = examination.Compared(each) if len(each) > 1 else next(iter(each.values()))
    settings = setting_flags.to_plain_dict(settled)
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
    diagnoses.save(folder, found, about)
    page = pages.write(folder if out or not run else run)
    if quiet:
        return
    print(escape_controls(f"{net.extra_repr()}\n{weights}; {count}\n"))
    print_table(*found.table())
    declined: dict[str, list[str]] = {}
    for name, why in found.declined.items():
        declined.setdefault(why.partition(": ")[2], []).append(name)
    for why, without in declined.items():
        print(escape_controls(f"not {', '.join(without)}: {why}"))
    print(escape_controls(f"\nfolder: {folder}\npage:   {page}"))


def load_run_network(run: Path) -> tuple[Any, Any, Any, str]:
    """The network of a run, its task and config, and which weights these are: the model's or the last checkpoint's."""
    from ..errors import StorageError
    from ..training import restore, storage
    from ..training.predict import load_model

    if os.path.lexists(run / "online.json"):
        raise StorageError(
            f"{run} learned from a stream, which has no held-out sequences to look at."
        )
    settled = setting_flags.read_run_config(run)
    task = build.task_of(settled)
    if os.path.lexists(run / "model.safetensors"):
        return load_model(run, warn)[0], task, settled, "weights after training"
    build.refuse_if_other_network(settled, task, storage.read_outline(run))
    saved = storage.load_latest(run)
    if saved is None:
        raise StorageError(f"{run} holds no weights yet: neither a model nor a checkpoint.")
    net = build.network_of(settled, task, "cpu")
    restore.load_weights(net, saved.model, str(run))
    return net, task, settled, f"weights at step {saved.step:,}"
