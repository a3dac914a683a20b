"""`coadjoint diagnose`: how gradients behave inside the network of a run or for a task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

import typer

from ..errors import ConfigError
from . import build
from . import flags as setting_flags
from .build_task import task_of
from .flags import KeyValues, SectionValues, config_from_command, with_setting_flags
from .past import refuse_if_other_network
from .program import (
    CONFIG,
    QUIET,
    app,
    command_line,
    next_free_folder,
    print_escaped,
    print_table,
    warn,
    with_examples,
)
from .schema import Config

if TYPE_CHECKING:
    from ..diagnostics.examination import Compared, Examination
    from ..networks.interface import Net
    from ..tasks.task import Task


class Subject(NamedTuple):
    """A network to examine, the task that it is examined on, and which weights it has, in words."""

    network: Net
    task: Task
    config: Config
    weights: str


@app.command()
@with_setting_flags
@with_examples(
    "coadjoint diagnose runs/xor-1",
    "coadjoint diagnose temporal-order --length 100 --cell lstm",
    "coadjoint diagnose temporal-order --radius 0.8,1.0,1.2 --only temporal",
)
def diagnose(
    what: Optional[str] = typer.Argument(
        None,
        help="a run folder; or a built-in task (or --train FILE), to examine an untrained network",
    ),
    radius: Optional[str] = typer.Option(
        None,
        "--radius",
        help="initial spectral radius of W; several values, a,b,c, are plotted side by side",
    ),
    samples: int = typer.Option(
        100, "--samples", min=1, help="number of held-out sequences or samples"
    ),
    only: Optional[str] = typer.Option(
        None, "--only", help="run these diagnostics only: temporal,decay,lyapunov, ..."
    ),
    config: Optional[Path] = CONFIG,
    out: Optional[Path] = typer.Option(
        None,
        "--out",
        "-o",
        help="folder to write (default: RUN/diagnostics, or runs/diagnose-TASK-1, -2, ...)",
    ),
    quiet: bool = QUIET,
    *,
    flags: SectionValues,
) -> None:
    """Show how gradients behave inside a network: a table, plots, arrays and a report."""
    from ..diagnostics import examination
    from ..errors import choose
    from ..training.report import diagnoses, pages

    names = None
    if only:
        names = [choose("diagnostic", n.strip(), examination.DIAGNOSTICS) for n in only.split(",")]
    run = None
    if what is not None and Path(what).is_dir():
        run = Path(what)
        if config or radius or any(flags.values()):
            raise ConfigError(
                "a run is examined as it is: leave out --config, --radius and other settings."
            )
        subjects = {"": load_run_network(run)}
    else:
        subjects = untrained_networks(what, radius, config, flags)
    first = next(iter(subjects.values()))
    folder = out or default_folder(run, first.config)
    refuse_if_other_files(folder)
    if len(subjects) > 1 and names is None:
        # A landscape is a picture of one network.
        names = [n for n in examination.DIAGNOSTICS if n != "landscape"]
    examinations = {}
    for label, subject in subjects.items():
        seed = subject.config.training.seed
        evaluation = examination.evaluate(subject.network, subject.task, samples, seed)
        examinations[label] = examination.examine(evaluation, names)
    if len(examinations) > 1:
        findings: examination.Compared | examination.Examination
        findings = examination.Compared(examinations)
    else:
        findings = next(iter(examinations.values()))
    number = len(evaluation.losses)  # the same for every subject; a finite set may hold fewer
    unit = "sequence" if first.task.shape is None else "sample"
    count = f"{number:,} held-out {unit}{'' if number == 1 else 's'}"
    about = describe_subjects(subjects, count)
    diagnoses.save(folder, findings, about)
    # In a run folder, diagnostics are a section of the run's page; elsewhere they have their own.
    page = pages.write(folder if out or run is None else run)
    if not quiet:
        print_escaped(f"{subject.network.extra_repr()}\n{about['weights']}; {count}\n")
        print_findings(findings, first.network)
        print_escaped(f"\nfolder: {folder}\nreport: {page}")


def untrained_networks(
    what: str | None, radius: str | None, config: Path | None, flags: SectionValues
) -> dict[str, Subject]:
    """The initial network of a config, or one for each spectral radius "a,b,c".

    what: the name of a built-in task, if any. Keys: "radius a", ...; "radius " where none is given.
    """
    subjects = {}
    values = radius.split(",") if radius else [""]
    for value in values:
        network = dict(flags.get("network", {}))
        if radius:
            network["radius"] = setting_flags.parse_flag("network", "radius", value.strip())
        job = build.build(config_from_command(what, config, flags | {"network": network}))
        weights = "weights before training"
        subjects[f"radius {value}"] = Subject(job.network, job.task, job.config, weights)
    return subjects


def default_folder(run: Path | None, config: Config) -> Path:
    """RUN/diagnostics, or runs/diagnose-TASK-1 (-2, ...) for an untrained network: run is None."""
    from ..training import files

    if run is None:
        return next_free_folder(f"diagnose-{config.task.name or 'data'}")
    folder = run / "diagnostics"
    files.is_real_folder(folder)  # refuses a link
    return folder


def refuse_if_other_files(folder: Path) -> None:
    """Refuse a folder that holds anything but earlier diagnostics."""
    from ..errors import StorageError

    is_used = folder.is_dir() and any(folder.iterdir())
    if is_used and not (folder / "diagnostics.json").is_file():
        raise StorageError(f"{folder} exists and is not empty: choose another --out.")


def describe_subjects(subjects: dict[str, Subject], count: str) -> KeyValues:
    """What the report says about the networks and the data; count: the sequences, in words."""
    from ..training.layer_names import name_layers

    # Several subjects differ in their spectral radius alone: the rest is that of any of them.
    *_, last = subjects.values()
    settings = setting_flags.to_plain_dict(last.config)
    weights = last.weights
    if len(subjects) > 1:
        radii = [label.removeprefix("radius ") for label in subjects]
        weights += f", spectral radius {', '.join(radii)}"
        settings["network"].pop("radius")
    return {
        "task": settings.get("task") or settings.get("data"),
        "network": settings.get("network"),
        "layers": name_layers(last.network),
        "weights": weights,
        "sequences": count,
        "seed": last.config.training.seed,
        "command": command_line(),
    }


def print_findings(found: Examination | Compared, network: Net) -> None:
    """Print the table of an examination, and why some diagnostics were left out.

    network: one that was examined.
    """
    from ..diagnostics.finding import NEEDS_ONE_LAYER

    print_table(*found.table())
    by_reason: dict[str, list[str]] = {}
    for name, why in found.declined.items():
        reason = why.partition(": ")[2] or why  # without the diagnostic's name in front
        by_reason.setdefault(reason, []).append(name)
    for why, names in by_reason.items():
        text = f"left out: {', '.join(names)}: {why}"
        if why.startswith(NEEDS_ONE_LAYER):
            text = f"left out: {', '.join(names)}. {explain_one_layer(network, names)}"
        print_escaped(text)


def explain_one_layer(network: Net, names: Sequence[str]) -> str:
    """Why a network of several parts has not these diagnostics, and how to train one that has."""
    from ..networks.stack import Stack

    needs = "They need one recurrent layer"
    if not isinstance(network, Stack):
        return f"{needs}, and this network has several parts."
    flags = ["--no-bidirectional"] if network.layers.bidirectional else []
    if len(network.layers.by_layer) > 1:
        flags.append("--layers 1")
    text = f"{needs}; train with {' '.join(flags)} to see them"
    is_elman = all(layer.name == "elman" for layer in network.layers)
    conditions = []
    if "bounds" in names and not is_elman:
        conditions.append("bounds with --cell elman alone")
    if "paths" in names:
        conditions.append("paths with --cell elman --activation relu alone")
    return f"{text} ({', '.join(conditions)})." if conditions else f"{text}."


def load_run_network(run: Path) -> Subject:
    """The network of a run with the weights of its model, or else of its last checkpoint.

    A run has a model once it has ended.
    """
    from ..errors import StorageError
    from ..training import restore, storage
    from ..training.predict import load_model

    if os.path.lexists(run / "online.json"):
        raise StorageError(
            f"{run} learned from a stream, so there are no held-out sequences to examine it on."
        )
    config = setting_flags.read_run_config(run)
    task = task_of(config, has_begun=True)
    if os.path.lexists(run / "model.safetensors"):
        net, _ = load_model(run, warn)
        return Subject(net, task, config, "weights after training")
    refuse_if_other_network(config, task, storage.read_outline(run))
    saved = storage.load_latest(run)
    if saved is None:
        raise StorageError(f"{run} holds no weights yet: neither a model nor a checkpoint.")
    net = build.network_of(config, task, "cpu")
    restore.load_weights(net, saved.model, str(run))
    return Subject(net, task, config, f"weights at step {saved.step:,}")
