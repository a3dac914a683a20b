"""The program: the app, what every command shares, and errors as one line each."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import (
    CoadjointError,
    ConfigError,
    DataError,
    InputError,
    MissingError,
    escape_controls,
    escape_undecodable,
    hide_passwords,
    nearest,
)
from ..training import launched

Command = TypeVar("Command", bound=Callable[..., None])
INTERRUPTED = 130  # the exit code after Ctrl-C, as if ended by SIGINT: 128 + 2
PATIENCE = 10.0  # seconds that a process of torchrun waits for rank 0 to print an error


def hide_types_of_switches(parameters: Iterable[Any]) -> None:
    """Take the type out of the help of options that take no value: --quiet, not --quiet <bool>."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""


class Commands(TyperGroup):
    """The program as typer builds it, with a shorter help. Contexts and commands are typer's."""

    def get_params(self, ctx: Any) -> Any:
        """The options of the program itself, with --help."""
        parameters = super().get_params(ctx)
        hide_types_of_switches(parameters)
        return parameters

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None if there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            hide_types_of_switches(command.get_params(ctx))
        return command


app = typer.Typer(
    name="coadjoint",
    cls=Commands,
    help="Train recurrent networks by plain or penalised backpropagation, and inspect their "
    "gradients.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The parent of every error about arguments, which typer does not export.
USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.mro()[2]
RUN = typer.Argument(..., metavar="RUN", help="a run folder")
OUT = typer.Option(None, "--out", "-o", help="folder to write (default: a new one in runs/)")
QUIET = typer.Option(False, "--quiet", "-q", help="print errors only")
CONFIG = typer.Option(
    None, "--config", "-c", help="a .toml, .yaml or .json file; flags take precedence"
)
ON = typer.Option(
    None,
    "--on",
    metavar="ADDRESS",
    help="train on the workers of a Dask scheduler, tcp://HOST:8786 or tls://HOST:8786, which see "
    "the same folders",
)
TLS_CA_FILE = typer.Option(None, "--tls-ca-file", help="--on tls://: the certificate authority")
TLS_CERT = typer.Option(None, "--tls-cert", help="--on tls://: your certificate")
TLS_KEY = typer.Option(None, "--tls-key", help="--on tls://: its key")

SHARED_COMMANDS = ("train", "resume")  # those that torchrun may start
NARROWEST_COLUMN = 12  # characters; a table on a narrow terminal is not folded further
READING_COMMANDS = (
    "resume",
    "replay",
    "predict",
    "evaluate",
    "report",
)  # their sizes come from a folder


def _print_version(value: bool) -> None:
    """Print the version and end, if --version was given; typer calls this for every command."""
    if value:
        print(f"coadjoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="print the version"
    ),
    debug: bool = typer.Option(False, "--debug", help="show the full traceback of an error"),
    *,
    context: typer.Context,
) -> None:
    """The flags of the program itself, before any command."""
    if launched.size() > 1 and context.invoked_subcommand not in SHARED_COMMANDS:
        raise ConfigError(
            f"torchrun started {launched.size()} processes, which only `train` and `resume` can "
            "share: run this command without torchrun."
        )
    if debug:
        os.environ["COADJOINT_DEBUG"] = "1"  # read by `main`, which has no arguments


def with_examples(*lines: str) -> Callable[[Command], Command]:
    """Add example command lines to the help of a command."""

    def decorate(function: Command) -> Command:
        # typer's help is the docstring; a line \b keeps it from joining the lines that follow.
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = "\n".join([text, "", "\b", *lines])
        return function

    return decorate


def next_free_folder(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist yet."""
    for number in itertools.count(1):
        path = Path("runs") / f"{name}-{number}"
        if not path.exists():
            break
    return path


def command_line() -> str:
    """The command as it was typed, without passwords, in valid UTF-8: file names need not be."""
    return hide_passwords(escape_undecodable(shlex.join(["coadjoint", *sys.argv[1:]])))


def final_status(run: Path, steps: int) -> str | None:
    """How a run ended, if it is complete and has no step left up to `steps`; None otherwise.

    A run that succeeded or stopped early has no step left, however many were asked for.
    """
    from ..training import schemas

    path = run / "result.json"
    if not os.path.lexists(path):
        return None
    result = schemas.read(path, schemas.ResultSchema)
    status = str(result["status"])
    if status == "pruned":  # by `coadjoint tune`; such a run has no model
        return status
    if status not in ("success", "early-stopped", "finished"):
        return None
    if status == "finished" and result["step"] < steps:
        return None
    if not (run / "model.safetensors").exists():
        return None
    return status


def print_escaped(text: object) -> None:
    """Print text that may come from outside, with its control sequences spelled out."""
    print(escape_controls(text))


def format_figures(values: Mapping[str, float], digits: int = 6) -> str:
    """Named numbers on one line, with significant digits: "loss 0.693147  accuracy 0.5"."""
    from ..training.metric_names import metric_label

    return "  ".join(f"{metric_label(k)} {value:.{digits}g}" for k, value in values.items())


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Print a table whose columns are as wide as their longest cells.

    A terminal narrower than that folds cells at words, in the widest column first.
    """
    widths = [max(len(escape_controls(r[i])) for r in [heads, *rows]) for i in range(len(heads))]
    if sys.stdout.isatty():
        gaps = 2 * (len(heads) - 1)  # two spaces between columns
        room = shutil.get_terminal_size().columns - gaps
        while sum(widths) > room and max(widths) > NARROWEST_COLUMN:
            widths[widths.index(max(widths))] -= 1
    rule = ["-" * width for width in widths]
    for row in [heads, rule, *rows]:
        folded = []  # for each cell, its lines
        for cell, width in zip(row, widths, strict=True):
            folded.append(textwrap.wrap(escape_controls(cell), width) or [""])
        for line in itertools.zip_longest(*folded, fillvalue=""):
            padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            print("  ".join(padded).rstrip())


class CtrlC(KeyboardInterrupt):
    """Ctrl-C before a run catches signals itself.

    Python ends a program by the signal, whatever its exit code, once a plain KeyboardInterrupt has
    left code that was evaluated, as libraries do while they are imported.
    """


@contextlib.contextmanager
def noting_interruption() -> Iterator[list[int]]:
    """Inside, Ctrl-C raises CtrlC, and is noted in the list that is yielded.

    A library that it reaches while it is being imported may raise another error in its place.
    """
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        raise CtrlC

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield caught  # ignored, or of use to somebody else
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Run the program. An error is one line on stderr, and each kind has its exit code."""
    with noting_interruption() as caught:
        run_app(caught)


def run_app(caught: Sequence[int]) -> None:
    """Do what `main` does; caught: whether Ctrl-C came, see `noting_interruption`."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer takes Ctrl-C for itself, and says nothing
            fail_interrupted()
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except USAGE_ERROR as error:
        message = explain_usage_error(error)
        if not message:  # of `coadjoint` alone, whose help has been printed
            sys.exit(2)
        fail_once(message, 2)
    except CoadjointError as error:
        if os.environ.get("COADJOINT_DEBUG"):
            raise
        fail_once(name_option(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        fail_interrupted()
    except BrokenPipeError:
        # Python writes to stdout once more as it ends; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as if ended by SIGPIPE: 128 + 13
    except Exception as error:
        if os.environ.get("COADJOINT_DEBUG"):
            raise
        if caught:
            fail_interrupted()
        if is_out_of_memory(error):
            advice = "Lower --hidden, --batch or --length."
            if sys.argv[1:2] and sys.argv[1] in READING_COMMANDS:
                advice = "This run needs more memory than this machine has."
            fail(f"not enough memory. {advice}", MissingError.exit_code)
        text = " ".join(str(error).split())[:200]
        fail(
            f"a bug in coadjoint: {type(error).__name__}: {text}. `coadjoint --debug ...` shows "
            "where.",
            1,
        )


def explain_usage_error(error: typer.BadParameter) -> str:
    """What is wrong with the arguments; of an unknown option, also which one may be meant."""
    given = getattr(error, "option_name", None)
    # Other errors about options know the option, too, but not what else it could have been.
    if error.ctx is None or not isinstance(given, str) or not hasattr(error, "possibilities"):
        return error.format_message()
    known = []
    for parameter in error.ctx.command.get_params(error.ctx):
        known += [option for option in parameter.opts if option.startswith("--")]
    near = name_elsewhere(given, known) or nearest(given, known, 0.7)
    hint = f" Did you mean {near}?" if near else ""
    if not near:
        words = ["coadjoint", error.ctx.info_name] if error.ctx.parent else ["coadjoint"]
        hint = f" `{' '.join(map(str, words))} --help` lists the options."
    return f"No such option: {given}.{hint}"


def name_option(error: CoadjointError) -> str:
    """The text of an error; an argument that it begins with is named as the option given for it.

    "top_p must be ..." becomes "--top-p must be ..." if that option is on the command line. Errors
    about data that have two texts have flags in one of them.
    """
    text = getattr(error, "with_flags", None) or str(error)
    found = re.match(r"(\w+) must ", text)
    if found is None or not isinstance(error, InputError) or isinstance(error, DataError):
        return text
    option = f"--{found[1].replace('_', '-')}"
    is_given = any(word.partition("=")[0] == option for word in sys.argv)
    return option + text[found.end(1) :] if is_given else text


def name_elsewhere(option: str, known: Sequence[str]) -> str | None:
    """The option for what other libraries call so: --lr for --learning-rate; None if unknown."""
    try:
        from .schema import NAMES_ELSEWHERE
    except ModuleNotFoundError:  # some commands run without pydantic
        return None
    key = nearest(option.removeprefix("--").replace("-", "_"), NAMES_ELSEWHERE, 0.8)
    if key is None:
        return None
    name = f"--{NAMES_ELSEWHERE[key]}"
    return name if name in known else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error, of Python or of torch, says that memory ran out."""
    text = str(error)
    by_torch = "allocate memory" in text or "out of memory" in text
    return by_torch or isinstance(error, MemoryError)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print(escape_controls(f"coadjoint: warning: {message}"), file=sys.stderr)


def fail_interrupted(message: str = "Interrupted.") -> NoReturn:
    """Say on stderr that Ctrl-C ended the program, and exit."""
    if launched.rank() > 0:  # rank 0 is interrupted, too, and says so
        sys.exit(INTERRUPTED)
    fail(message, INTERRUPTED)


def fail_once(message: str, code: int) -> NoReturn:
    """As `fail`, but of the processes of torchrun rank 0 alone prints what all of them meet.

    The others wait until torchrun ends them, as it does once rank 0 has ended. If they ended first,
    it would end rank 0, which may not have printed anything yet. A process that is still there
    after PATIENCE seconds met the error alone, and prints it.
    """
    rank = launched.rank()
    if rank > 0:
        time.sleep(PATIENCE)
        message = f"process {rank}: {message}"
    fail(message, code)


def fail(message: str, code: int) -> NoReturn:
    """Print an error to stderr and exit. Code 75: the run was saved and can be resumed."""
    kind = "" if code in (75, INTERRUPTED) else "error: "
    print(escape_controls(f"coadjoint: {kind}{hide_passwords(message)}"), file=sys.stderr)
    sys.exit(code)
