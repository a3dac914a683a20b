"""How a run is made again or continued: commands, and the folder in which they work."""

from __future__ import annotations

import itertools
import math
import shlex
from pathlib import Path, PurePath

from .page_parts import PageSection
from .read import RunRecord
from .text import clean, finite_or_nan

OUT_FLAGS = ("-o", "--out")
RUN_COMMANDS = ("train", "online")  # they write runs/NAME without OUT_FLAGS
COMPLETE = {
    "success": "The run reached its goal: there is nothing left to resume.",
    "early-stopped": "The run stopped early: there is nothing left to resume.",
}


def again_section(run: RunRecord, folder: Path) -> PageSection:
    """The command that made a run, and the one that continues it if there is something left."""
    command = run.environment.get("command")
    commands = {"The command that made this run": clean(command or "not recorded")}
    lead = COMPLETE.get(str(run.result.get("status")), "")
    if not lead:
        commands |= _continuing_commands(run, folder)
    return PageSection("again", "Run it again", lead, commands=commands)


def _continuing_commands(run: RunRecord, folder: Path) -> dict[str, str]:
    """{what the command does, and where: the command} that continues a run.

    A run that has taken all its steps continues only with a larger number of steps.
    """
    is_stream = "updates" in run.result
    is_finished = run.result.get("status") == "finished"
    step = finite_or_nan(run.result.get("step"))
    more_steps = "N" if math.isnan(step) else str(2 * int(step))
    what = "Resume from the last checkpoint"
    if is_finished and is_stream:
        what = "Continue if the stream has more rows"
    elif is_finished:
        what = "Train longer, here to twice the steps"
    if not (folder / "config.yaml").is_file():
        function = "online.learn" if is_stream else "train"
        steps = f"steps={more_steps}, " if is_finished else ""
        call = f"co.{function}(..., {steps}folder={folder.resolve().name!r}, resume=True)"
        return {f"{what}, from Python, with the other arguments as before": clean(call)}
    made_by = str(run.environment.get("command") or "")
    place, path = standing_place(made_by, folder.resolve())
    if starting_folder(made_by, folder.resolve()) is not None:
        place += "; from another one, name the run folder by its whole path"
    steps = f" --steps {more_steps}" if is_finished else ""
    return {f"{what} ({clean(place)})": clean(f"coadjoint resume {shlex.quote(path)}{steps}")}


def standing_place(command: str, folder: Path) -> tuple[str, str]:
    """Where `coadjoint resume` works, and the path of the run folder from there.

    The files of a run's data are named from the place where its command was run, so this is the
    place, as long as the run folder is still where the command wrote it; else the folder above.
    """
    path = _written_folder(command, folder.name)
    tail = tuple(part for part in PurePath(path).parts if part != "..")
    if tail and folder.parts[-len(tail) :] == tail:
        return "from the folder in which that command was run", path
    return f"from the folder that holds {folder.name}", folder.name


def starting_folder(command: str, folder: Path) -> Path | None:
    """The folder in which the command that wrote a run was run; None if nothing tells.

    folder: the run folder, as a whole path.
    """
    written = PurePath(_written_folder(command, folder.name))
    parts = written.parts
    if not parts or ".." in parts or written.is_absolute():
        return None
    return folder.parents[len(parts) - 1] if folder.parts[-len(parts) :] == parts else None


def _written_folder(command: str, name: str) -> str:
    """The run folder that a command wrote, as it named it; "" if the command does not tell.

    name: of the run folder, which the command chose itself unless it was told.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that do not match
        return ""
    if len(words) < 2 or words[1] not in RUN_COMMANDS:
        return ""
    for word, following in itertools.pairwise(words):
        if word in OUT_FLAGS:
            return following
    for word in words:
        if word.startswith("--out="):
            return word.removeprefix("--out=")
    return f"runs/{name}"
