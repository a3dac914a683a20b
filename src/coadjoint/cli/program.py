"""The program: the app, what every command shares, and errors in one line."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import typer

from .. import __version__
from ..errors import CoadjointError, MissingError, escape_controls, escape_undecodable

app = typer.Typer(
    name="coadjoint",
    help="Train recurrent networks by backpropagation, plain or penalised, and look at what their gradients do.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
USAGE_ERROR: Any = typer.BadParameter.mro()[2]  # the parent of every complaint about arguments
RUN = typer.Argument(..., help="a run folder")
OUT = typer.Option(None, "--out", "-o", help="the folder to write; runs/TASK-1, -2, ... by default")
QUIET = typer.Option(False, "--quiet", "-q", help="print errors only")


def _version(value: bool) -> None:
    if value:
        print(f"coadjoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version"
    ),
    debug: bool = typer.Option(False, "--debug", help="show the whole traceback of an error"),
) -> None:
    if debug:
        os.environ["COADJOINT_DEBUG"] = "1"


def next_free_folder(name: str) -> Path:
    """runs/NAME-1, or the next number that is not taken."""
    n = 1
    while (path := Path("runs") / f"{name}-{n}").exists():
        n += 1
    return path


def command_line() -> str:
    """As it was typed, in text that can be written: names of files need not be UTF-8."""
    return escape_undecodable(shlex.join(["coadjoint", *sys.argv[1:]]))


def final_status(run: Path, steps: int) -> str | None:
    """How the run ended, if it cannot go on."""
    from ..training import schemas

    path = run / "result.json"
    if not os.path.lexists(path):
        return None
    result = schemas.read(path, schemas.ResultSchema)
    over = result["status"] in ("success", "early-stopped") or (
        result["status"] == "finished" and result["step"] >= steps
    )
    return str(result["status"]) if over and (run / "model.safetensors").exists() else None


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their longest cell; a terminal narrower than that folds cells, at words, the widest column first."""
    widths = [max(len(escape_controls(r[i])) for r in [heads, *rows]) for i in range(len(heads))]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - 2 * (len(heads) - 1)
        while sum(widths) > room and max(widths) > 12:
            widths[widths.index(max(widths))] -= 1
    for row in [heads, ["-" * w for w in widths], *rows]:
        folded = [
            textwrap.wrap(escape_controls(c), w) or [""] for c, w in zip(row, widths, strict=True)
        ]
        for line in itertools.zip_longest(*folded, fillvalue=""):
            print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def main() -> None:
    """The entry point: errors in one line, each kind with its exit code."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except USAGE_ERROR as error:
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
        if (
            isinstance(error, MemoryError)
            or "allocate memory" in str(error)
            or "out of memory" in str(error)
        ):
            reading = sys.argv[1:2] in (["resume"], ["replay"], ["predict"], ["report"])
            advice = (
                "This folder asks for more than there is here."
                if reading
                else "Lower --hidden, --batch or --length."
            )
            fail(f"not enough memory. {advice}", MissingError.exit_code)
        words = " ".join(str(error).split())[:200]
        fail(
            f"a fault of coadjoint: {type(error).__name__}: {words}. `coadjoint --debug ...` shows where.",
            1,
        )


def warn(message: str) -> None:
    """What the user should know of, though the command goes on."""
    print(escape_controls(f"coadjoint: warning: {message}"), file=sys.stderr)


def fail(message: str, code: int) -> None:
    print(
        escape_controls(f"coadjoint: {'stopped' if code == 75 else 'error'}: {message}"),
        file=sys.stderr,
    )
    sys.exit(code)
