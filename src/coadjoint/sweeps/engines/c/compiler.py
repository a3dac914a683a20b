"""The system's C compiler, and a folder that keeps what compilers made.

A library is found again by its source, the compiler, the options and the processor it was made
for. The folder belongs to the user alone; a file in it is loaded only if its contents have the
digest that is part of its name.
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
    "-O3",  # with AVX2 some compilers need it for their fastest code
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Results must not depend on which products a compiler chooses to fuse with sums.
    "-ffp-contract=off",
    "-w",
)
TUNING_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
PROBE = """#include <math.h>
#include <pthread.h>
#include <stdint.h>
int answer(void) { return 42; }
"""
TIMEOUT = 300  # seconds for one library
BUILDING = "build-"  # how the names of folders begin in which something is being made
OLD_STYLE = re.compile("tmp[a-z0-9_]{8}")  # how earlier versions named them
DAY = 86_400  # seconds


class Compiler(NamedTuple):
    """A command that compiles C, and what tells it from another one of the same name."""

    command: tuple[str, ...]
    identity: str

    @staticmethod
    def find() -> Compiler | None:
        """$CC if it is set, else the first of the usual ones; None if there is none.

        The identity has the size and the time of the file: an updated compiler is another one.
        """
        try:
            from_environment = shlex.split(os.environ.get("CC", ""))
        except ValueError:  # an open quotation mark
            return None
        commands = [[name] for name in USUAL_COMPILERS]
        if from_environment:
            commands = [from_environment]
        for command in commands:
            path = shutil.which(command[0])
            if path is not None:
                file = os.stat(os.path.realpath(path))
                identity = f"{command} {path} {file.st_size} {file.st_mtime_ns}"
                return Compiler((path, *command[1:]), identity)
        return None


class CompilerSetup(NamedTuple):
    """A compiler that works here with its flags, or the reason why none does."""

    compiler: Compiler | None
    flags: tuple[str, ...]
    refusal: str | None


@functools.cache
def processor() -> str:
    """A text that tells kinds of processors apart, with the instructions they have.

    A library made with -march=native may fail on another kind.
    """
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        keys = ("model name", "flags", "Features", "CPU part", "isa")
        first_core = iter(f.readline, "\n")  # cores are separated by empty lines
        return "".join(line for line in first_core if line.startswith(keys))
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def cache_folder() -> Path:
    """The folder for compiled libraries: $COADJOINT_CACHE, else coadjoint in the user's cache.

    If others may write to it, or it cannot be made, a temporary folder takes its place.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    chosen = os.environ.get("COADJOINT_CACHE") or os.path.join(caches, "coadjoint")
    folder = Path(os.path.realpath(chosen))
    with contextlib.suppress(OSError):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        is_private = is_ours(folder) and all(is_safe_parent(path) for path in folder.parents)
        if is_private and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return _temporary_folder()


def is_ours(path: Path) -> bool:
    """Whether a file or folder belongs to this user, and nobody else may write to it."""
    status = path.lstat()
    right_kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    if not hasattr(os, "getuid"):  # Windows: a user's folders are closed to others
        return right_kind
    writable_by_others = status.st_mode & 0o022
    return right_kind and status.st_uid == os.getuid() and not writable_by_others


def is_safe_parent(path: Path) -> bool:
    """Whether only this user and root can replace what a folder above the libraries holds.

    Where all may write, as in /tmp, the sticky bit keeps them from files that are not theirs.
    """
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
    """Whether this user is the only member of a group; many systems make one for each user."""
    try:
        import grp
        import pwd
    except ImportError:  # not every system has groups
        return False
    try:
        group = grp.getgrgid(gid)
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    no_others = set(group.gr_mem) <= {user.pw_name}
    return group.gr_name == user.pw_name and gid == user.pw_gid and no_others


_temporary_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _temporary_folder() -> Path:
    """A new private folder, removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="coadjoint-")
    _temporary_folders.append(folder)
    return Path(folder.name)


def cache_is_temporary() -> bool:
    """Whether what is kept in the cache is gone when this process ends."""
    return str(cache_folder()) in [folder.name for folder in _temporary_folders]


@functools.cache
def compiler_setup() -> CompilerSetup:
    """The compiler and the first TUNING_FLAGS that work, or the reason why none does.

    Each is tried on PROBE, whose function returns 42; that library is kept on disk like any other.
    """
    compiler = Compiler.find()
    if compiler is None:
        tried = os.environ.get("CC") or ", ".join(USUAL_COMPILERS)
        refusal = f"needs a C compiler, but none was found (tried {tried})"
        return CompilerSetup(None, (), refusal)
    first_error = ""
    for tuning in TUNING_FLAGS:
        flags = (*FLAGS, *tuning)
        try:
            if _library(compiler, flags, PROBE).answer() == 42:
                return CompilerSetup(compiler, flags, None)
        except (OSError, AttributeError) as error:  # not compiled or loaded, or without `answer`
            first_error = first_error or str(error)
    refusal = f"needs a C compiler, but {' '.join(compiler.command)} does not work"
    if first_error:
        refusal = f"{refusal}: {first_error}"
    return CompilerSetup(None, (), refusal)


def library(source: str) -> ctypes.CDLL:
    """Compile and load a source, or load the library made of it before."""
    compiler, flags, refusal = compiler_setup()
    if compiler is None:
        raise MissingError(f"this {refusal}.")
    try:
        return _library(compiler, flags, source)
    except OSError as error:
        command = " ".join(compiler.command)
        raise MissingError(
            f"{command} could not compile a cell: {error_text(error)}. Use engine='eager'."
        ) from None


def _library(compiler: Compiler, flags: tuple[str, ...], source: str) -> ctypes.CDLL:
    """Compile and load a source, or load the library in the cache; OSError if that fails."""

    def make(out: Path) -> None:
        """Compile the source to the file `out`."""
        text = out.with_suffix(".c")
        text.write_text(source)
        _run([*compiler.command, *flags, str(text), "-o", str(out), "-lm"])

    recipe = "\0".join((source, compiler.identity, *flags, processor()))
    return ctypes.CDLL(str(cached_file(recipe, ".so", make)))


def cached_file(recipe: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """The file that make(path) writes for a recipe, from the cache if it is there and intact.

    recipe: a text with all that the contents depend on. The file is named by the digests of recipe
    and contents; one that is damaged, or belongs to someone else, is removed and made again.
    """
    key = _digest(recipe.encode())
    folder = cache_folder()
    for path in sorted(folder.glob(f"{key}-*{suffix}")):  # all processes take the same
        with contextlib.suppress(OSError):
            if is_ours(path) and path.stem == f"{key}-{_digest(path.read_bytes())}":
                return path
            path.unlink()
    with _building(folder), tempfile.TemporaryDirectory(prefix=BUILDING, dir=folder) as place:
        out = Path(place, f"cell{suffix}")
        make(out)
        out.chmod(0o700)
        # Renaming is atomic: no process ever sees a file that is half written.
        return out.replace(folder / f"{key}-{_digest(out.read_bytes())}{suffix}")


@contextlib.contextmanager
def _building(cache: Path) -> Iterator[None]:
    """Hold the cache's lock while something is made in it.

    Processes that build share the lock, and the kernel frees it when one is killed. So a process
    that gets the lock alone knows that nobody is building, and removes what was left unfinished.
    A system without locks keeps it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # others are building; or a disk without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(cache)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(cache: Path) -> None:
    """Remove the folders in which processes were compiling when they were killed.

    The caller holds the cache's lock alone, so nobody is compiling in any of them now.
    """
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            # Earlier versions of this package took no lock. One may be compiling right now, so
            # their folders, known by their names, go only when they are a day old.
            is_old = OLD_STYLE.fullmatch(path.name) and status.st_mtime < time.time() - DAY
            if (is_old or path.name.startswith(BUILDING)) and stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path)


def _digest(data: bytes) -> str:
    """The first 128 bits of SHA-256 in hexadecimal: enough, and a short name."""
    return hashlib.sha256(data).hexdigest()[:32]


def _run(command: list[str]) -> None:
    """Run the compiler; raise OSError with its first error, or else with its first line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {TIMEOUT} s") from None
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    complaint = [*errors, *lines, f"it ended with {done.returncode}"]
    raise OSError(complaint[0])
