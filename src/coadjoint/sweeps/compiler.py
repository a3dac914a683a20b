"""The system's C compiler, and a folder that keeps what compilers made.

A library is found again by its source, the compiler, the options and the processor it was made for. The folder belongs
to the user alone; a file in it is loaded only if its contents have the digest that its name tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import MissingError

USUAL = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-w",
)
TUNED = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
PROBE = "#include <math.h>\n#include <pthread.h>\n#include <stdint.h>\nint answer(void) { return 42; }\n"
PATIENCE = 300  # seconds for one library


class Compiler(NamedTuple):
    command: tuple[str, ...]
    identity: str

    @staticmethod
    def found() -> Compiler | None:
        """$CC if it is set, else the first of the usual ones."""
        try:
            asked = shlex.split(os.environ.get("CC", ""))
        except ValueError:  # an open quotation mark
            return None
        for command in [asked] if asked else [[name] for name in USUAL]:
            path = shutil.which(command[0])
            if path is not None:
                real = os.stat(os.path.realpath(path))
                return Compiler((path, *command[1:]), f"{command} {path} {real.st_size} {real.st_mtime_ns}")
        return None


class Built(NamedTuple):
    """A compiler that works here, or why there is none."""

    compiler: Compiler | None
    flags: tuple[str, ...]
    refusal: str | None


@functools.cache
def processor() -> str:
    """Which instructions there are: a library made with -march=native runs on no other processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        keys = ("model name", "flags", "Features", "CPU part", "isa")
        return "".join(line for line in iter(f.readline, "\n") if line.startswith(keys))
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def folder() -> Path:
    """Where libraries are kept: $COADJOINT_CACHE, else the user's cache; a temporary folder where that is not ours alone."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = Path(os.environ.get("COADJOINT_CACHE") or os.path.join(home, "coadjoint"))
    with contextlib.suppress(OSError):
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ours(wanted) and os.access(wanted, os.W_OK | os.X_OK):
            return wanted
    return _temporary()


def ours(path: Path) -> bool:
    """Does it belong to this user, with nobody else allowed to write to it?"""
    status = path.lstat()
    kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return kind and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _temporary() -> Path:
    made = tempfile.TemporaryDirectory(prefix="coadjoint-")
    _held.append(made)  # removed when the process ends
    return Path(made.name)


_held: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def built() -> Built:
    """The compiler, tried once on a source of one line; the answer is kept on disk like any other library."""
    compiler = Compiler.found()
    if compiler is None:
        tried = os.environ.get("CC") or ", ".join(USUAL)
        return Built(None, (), f"needs a C compiler, and none was found (tried {tried})")
    error = ""
    for tuned in TUNED:
        flags = (*FLAGS, *tuned)
        try:
            if _library(compiler, flags, PROBE).answer() == 42:
                return Built(compiler, flags, None)
        except (OSError, AttributeError) as e:
            error = error or str(e)
    why = f"needs a C compiler, and {' '.join(compiler.command)} does not work"
    return Built(None, (), f"{why}: {error}" if error else why)


def library(source: str) -> ctypes.CDLL:
    """The source, compiled and loaded."""
    compiler, flags, refusal = built()
    if compiler is None:
        raise MissingError(f"this {refusal}.")
    try:
        return _library(compiler, flags, source)
    except OSError as e:
        raise MissingError(f"{' '.join(compiler.command)} could not compile a cell: {e}. Use engine='eager'.") from None


def _library(compiler: Compiler, flags: tuple[str, ...], source: str) -> ctypes.CDLL:
    def make(out: Path) -> None:
        text = out.with_suffix(".c")
        text.write_text(source)
        _run([*compiler.command, *flags, str(text), "-o", str(out), "-lm"])

    return ctypes.CDLL(str(kept("\0".join((source, compiler.identity, *flags, processor())), ".so", make)))


def kept(recipe: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """The file that `make(path)` makes of the recipe: found again if it is there and whole, else made. One that is damaged
    or somebody else's is removed."""
    key = _digest(recipe.encode())
    for path in folder().glob(f"{key}-*{suffix}"):
        with contextlib.suppress(OSError):
            if ours(path) and path.stem == f"{key}-{_digest(path.read_bytes())}":
                return path
            path.unlink()
    with tempfile.TemporaryDirectory(dir=folder()) as place:
        out = Path(place, f"cell{suffix}")
        make(out)
        out.chmod(0o700)
        return out.replace(folder() / f"{key}-{_digest(out.read_bytes())}{suffix}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _run(command: list[str]) -> None:
    """Raises OSError with the compiler's first line of complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {PATIENCE} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise OSError(
            next((y for y in lines if "error" in y), lines[0] if lines else f"it ended with {done.returncode}")
        )
