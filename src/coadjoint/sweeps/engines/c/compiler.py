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
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ....errors import MissingError, error_text

USUAL_COMPILERS = ("cc", "gcc", "clang")
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
TUNING_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
PROBE = "#include <math.h>\n#include <pthread.h>\n#include <stdint.h>\nint answer(void) { return 42; }\n"
TIMEOUT = 300  # seconds for one library
BUILDING = "build-"  # how the names of folders begin in which something is being made
OLD_STYLE = re.compile("tmp[a-z0-9_]{8}")  # and how they were called once
DAY = 86_400  # seconds


class Compiler(NamedTuple):
    command: tuple[str, ...]
    identity: str

    @staticmethod
    def find() -> Compiler | None:
        """$CC if it is set, else the first of the usual ones."""
        try:
            asked = shlex.split(os.environ.get("CC", ""))
        except ValueError:  # an open quotation mark
            return None
        for command in [asked] if asked else [[name] for name in USUAL_COMPILERS]:
            path = shutil.which(command[0])
            if path is not None:
                real = os.stat(os.path.realpath(path))
                return Compiler(
                    (path, *command[1:]), f"{command} {path} {real.st_size} {real.st_mtime_ns}"
                )
        return None


class CompilerSetup(NamedTuple):
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
def cache_folder() -> Path:
    """Where libraries are kept: $COADJOINT_CACHE, else the user's cache; a temporary folder where that is not ours alone."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = Path(
        os.path.realpath(os.environ.get("COADJOINT_CACHE") or os.path.join(home, "coadjoint"))
    )
    with contextlib.suppress(OSError):
        for missing in reversed([path for path in (wanted, *wanted.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        private_place = is_ours(wanted) and all(is_safe_parent(path) for path in wanted.parents)
        if private_place and os.access(wanted, os.W_OK | os.X_OK):
            return wanted
    return _temporary_folder()


def is_ours(path: Path) -> bool:
    """Does it belong to this user, with nobody else allowed to write to it?"""
    status = path.lstat()
    kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    if not hasattr(os, "getuid"):  # Windows: a user's own folders are closed to others
        return kind
    return kind and status.st_uid == os.getuid() and not status.st_mode & 0o022


def is_safe_parent(path: Path) -> bool:
    """Can nobody but this user and root put something else in place of what a folder above the
    libraries holds? Where all may write, as in /tmp, the sticky bit keeps them from what is not theirs."""
    status = path.lstat()
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.getuid()):
        return False
    if status.st_mode & stat.S_ISVTX:
        return True
    if status.st_mode & stat.S_IWOTH:
        return False
    return not status.st_mode & stat.S_IWGRP or is_private_group(status.st_gid)


def is_private_group(gid: int) -> bool:
    """Is it a group of this user alone, as many systems make one for each?"""
    try:
        import grp
        import pwd
    except ImportError:  # not every system has groups
        return False
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return (
        group.gr_name == user.pw_name and gid == user.pw_gid and set(group.gr_mem) <= {user.pw_name}
    )


def _temporary_folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="coadjoint-")
    _held.append(made)  # removed when the process ends
    return Path(made.name)


_held: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def compiler_setup() -> CompilerSetup:
    """The compiler, tried once on a source of one line; the answer is kept on disk like any other library."""
    compiler = Compiler.find()
    if compiler is None:
        tried = os.environ.get("CC") or ", ".join(USUAL_COMPILERS)
        return CompilerSetup(None, (), f"needs a C compiler, and none was found (tried {tried})")
    error = ""
    for tuned in TUNING_FLAGS:
        flags = (*FLAGS, *tuned)
        try:
            if _library(compiler, flags, PROBE).answer() == 42:
                return CompilerSetup(compiler, flags, None)
        except (OSError, AttributeError) as e:
            error = error or str(e)
    why = f"needs a C compiler, and {' '.join(compiler.command)} does not work"
    return CompilerSetup(None, (), f"{why}: {error}" if error else why)


def library(source: str) -> ctypes.CDLL:
    """The source, compiled and loaded."""
    compiler, flags, refusal = compiler_setup()
    if compiler is None:
        raise MissingError(f"this {refusal}.")
    try:
        return _library(compiler, flags, source)
    except OSError as e:
        raise MissingError(
            f"{' '.join(compiler.command)} could not compile a cell: {error_text(e)}. Use engine='eager'."
        ) from None


def _library(compiler: Compiler, flags: tuple[str, ...], source: str) -> ctypes.CDLL:
    def make(out: Path) -> None:
        text = out.with_suffix(".c")
        text.write_text(source)
        _run([*compiler.command, *flags, str(text), "-o", str(out), "-lm"])

    return ctypes.CDLL(
        str(cached_file("\0".join((source, compiler.identity, *flags, processor())), ".so", make))
    )


def cached_file(recipe: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """The file that `make(path)` makes of the recipe: found again if it is there and whole, else made. One that is damaged
    or somebody else's is removed."""
    key = _digest(recipe.encode())
    for path in cache_folder().glob(f"{key}-*{suffix}"):
        with contextlib.suppress(OSError):
            if is_ours(path) and path.stem == f"{key}-{_digest(path.read_bytes())}":
                return path
            path.unlink()
    with (
        _building(cache_folder()),
        tempfile.TemporaryDirectory(prefix=BUILDING, dir=cache_folder()) as place,
    ):
        out = Path(place, f"cell{suffix}")
        make(out)
        out.chmod(0o700)
        return out.replace(cache_folder() / f"{key}-{_digest(out.read_bytes())}{suffix}")


@contextlib.contextmanager
def _building(cache: Path) -> Iterator[None]:
    """Inside, something is made in the cache. What others were making when they were killed is removed
    first, if nobody else is making anything: those who do share a lock, and the kernel frees it with
    the process. A system without such locks keeps what was left."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # others are at work; or a disk without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(cache)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(cache: Path) -> None:
    """Folders in which processes were compiling when they were killed."""
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            old = OLD_STYLE.fullmatch(path.name) and status.st_mtime < time.time() - DAY
            if (old or path.name.startswith(BUILDING)) and stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _run(command: list[str]) -> None:
    """Raises OSError with the compiler's first line of complaint."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {TIMEOUT} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise OSError(
            next(
                (y for y in lines if "error" in y),
                lines[0] if lines else f"it ended with {done.returncode}",
            )
        )
