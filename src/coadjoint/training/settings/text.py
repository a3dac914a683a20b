"""From a path to text: regular files of UTF-8, of bounded size."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from ...errors import nearest, said
from .notes import Notes, name_of


def read_bytes(path: Any, max_bytes: int, notes: Notes) -> bytes:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                return file.read(max_bytes + 1)
        kind = "a directory. Name a file in it" if stat.S_ISDIR(mode) else "a pipe or device. Name a regular file"
        reason = f"is {kind}."
    except (FileNotFoundError, NotADirectoryError):
        reason = f"does not exist. {nearest_path(Path(path))}"
    except PermissionError:
        reason = "no permission to read it. Change its mode or owner."
    except (OSError, ValueError) as e:
        reason = f"cannot be read ({said(e)}). Check the name."
    raise notes.stop(None, reason)


def nearest_path(path: Path) -> str:
    """A hint for the first part of a path that is not there."""
    while path.parent != path and not path.parent.is_dir():
        path = path.parent
    with contextlib.suppress(OSError):
        near = nearest(path.name, os.listdir(path.parent))
        if near:
            return f"Did you mean {name_of(path.parent / near)}?"
    return "Check the name and the folder."


def decode(raw: Any, max_bytes: int, notes: Notes) -> str:
    if len(raw) > max_bytes:
        raise notes.stop(None, f"is larger than {max_bytes:,} bytes, the most that is read.")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise notes.stop(None, "is UTF-16 text. Save it as UTF-8.")
    if b"\0" in raw:
        raise notes.stop(
            raw.count(b"\n", 0, raw.index(0)) + 1, "holds NUL bytes: UTF-16, or no text. Save it as UTF-8."
        )
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise notes.stop(line, f"byte 0x{raw[e.start]:02x} is not UTF-8 (latin-1?). Save it as UTF-8.") from None
