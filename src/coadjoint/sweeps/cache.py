"""Where generated code is kept: a folder that only its user can write to."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path


@functools.cache
def folder() -> Path:
    """$COADJOINT_CACHE, $XDG_CACHE_HOME/coadjoint or ~/.cache/coadjoint; one for this process alone if that is not the
    user's own or cannot be written to."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(os.environ.get("COADJOINT_CACHE") or Path(root) / "coadjoint")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="coadjoint-"))


def publish(path: Path, content: bytes) -> Path:
    """The file with this content, written whole or not at all."""
    if not (path.exists() and path.read_bytes() == content):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    return path
