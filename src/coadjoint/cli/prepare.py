"""`coadjoint prepare`: tables that do not fit into memory, as arrays on disk for `train`."""

from __future__ import annotations

import functools
import glob
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError, DataError, one_line
from .flags import SectionValues, given_values, resolve, with_setting_flags
from .program import QUIET, app, print_escaped, with_examples
from .progress import ProgressReporter
from .schema import READING_KEYS

if TYPE_CHECKING:
    from ..tasks.description import JsonDict

PREPARE_KEYS = (
    *READING_KEYS,
    "kind",
    "target",
    "features",
    "categorical",
    "gaps",
    "wide",
    "window",
    "at",
)
ARRAYS = (".npz", ".npy")
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".arrow", ".feather", ".gz", ".zst")
LARGEST = 1 << 62  # bytes of a table, by default: it is read in parts
TEXTS = {
    ("data", "at"): "arrays alone: whether y (n, k) of an .npz has a value for each step, or k for "
    "each sequence",
    ("data", "window"): "not here: pass it to train, which cuts the prepared sequences",
    ("data", "gaps"): "the same as --irregular allow: pass --gaps to train, too",
    ("data", "max_bytes"): "largest size of a file in bytes, unpacked (default: no limit)",
}


@app.command()
@functools.partial(with_setting_flags, only={"data": PREPARE_KEYS}, texts=TEXTS)
@with_examples(
    "coadjoint prepare big.parquet --kind classify --out big.co",
    "coadjoint prepare 'parts/*.parquet' --target label --out big.co",
    "coadjoint train --train big.co",
)
def prepare(
    tables: list[str] = typer.Argument(
        ..., metavar="TABLE...", help="tables, patterns such as 'parts/*.csv', or folders of them"
    ),
    out: Optional[Path] = typer.Option(None, "--out", "-o", help="the folder to write, name.co"),
    force: bool = typer.Option(False, "--force", help="replace a prepared set of this name"),
    check: bool = typer.Option(
        False, "--check", help="write nothing: TABLE is a prepared set, compare its digests"
    ),
    quiet: bool = QUIET,
    *,
    flags: SectionValues,
) -> None:
    """Read tables once, in parts, into a folder that `train` reads batch by batch.

    The rows of a sequence must follow one another in one file, in order of time.
    """
    if check:
        check_sets(tables, quiet)
        return
    from ..tasks.files.sheet import Options
    from ..tasks.preparation import column_names
    from ..tasks.preparing import prepare as write

    if out is None:
        raise ConfigError("--out names the folder to write: --out data.co.")
    given = given_values(resolve(None, flags).data)
    given["categorical"] = column_names(given.get("categorical")) or ()
    if given.pop("window", None):
        raise ConfigError("--window cuts sequences at training: pass it to coadjoint train.")
    given["wide"] = bool(given.get("wide"))
    irregular = given.pop("irregular", None) or "refuse"
    if given.pop("gaps", None):  # they are measured at training
        irregular = "allow"
    for name in ("target", "features"):
        given[name] = column_names(given.get(name))
    options = Options(**{"max_bytes": LARGEST, **given})
    paths = find_tables(tables)
    refuse_existing(out, force)
    sizes = [os.path.getsize(path) for path in paths]
    with ProgressReporter(quiet, "files") as report:

        def progress(number: int, share: float) -> None:
            """Show how far the tables are read, by their bytes."""
            read = sum(sizes[:number]) + share * sizes[number]
            report(read / max(1, sum(sizes)) * len(paths), len(paths), None)

        def fill(folder: Path) -> JsonDict:
            return write(paths, folder, options, irregular, progress)

        about = write_folder(out, force, fill)
    if quiet:
        return
    for note in about["notes"]:
        print_escaped(str(note))
    count = about["sequences"]
    rows = f"{about['rows']:,} row{'s' * (about['rows'] != 1)}"
    print_escaped(f"{rows} in {count:,} sequence{'s' * (count != 1)} -> {out}")


def write_folder(out: Path, force: bool, fill: Callable[[Path], JsonDict]) -> JsonDict:
    """Fill a folder beside `out` and rename it at the end, so that nothing is left half-written.

    A folder of a run that was killed is called .NAME.XXXX.part and can be removed.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(".part", f".{out.name}.", out.parent))
    except OSError as error:
        raise DataError(f"{one_line(out.parent, 4096)} cannot be written: {error}.") from None
    try:
        about = fill(part)
        os.chmod(part, 0o777 & ~current_umask())
        if force and out.exists():
            old = Path(tempfile.mkdtemp(".old", f".{out.name}.", out.parent))
            os.rename(out, old / out.name)
            os.rename(part, out)
            shutil.rmtree(old)
        else:
            os.rename(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return about


def current_umask() -> int:
    """The mask of the modes of new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def refuse_existing(out: Path, force: bool) -> None:
    """Refuse a folder that exists, unless it is a prepared set and --force was given."""
    from ..tasks.prepared import DESCRIPTION

    if not os.path.lexists(out):
        return
    name = one_line(out, 4096)
    if not force:
        raise ConfigError(f"{name} exists. Pass another --out, or --force to replace it.")
    if not (out / DESCRIPTION).is_file() or out.is_symlink():
        raise ConfigError(f"{name} is no prepared set: --force does not replace it.")


def find_tables(names: list[str]) -> list[Path]:
    """The tables that names, patterns and folders stand for, sorted within each."""
    from ..tasks.prepared import is_prepared

    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if is_prepared(path):
            raise ConfigError(
                f"{one_line(name, 4096)} is a prepared set already: pass it to train, or add "
                "--check to compare its digests."
            )
        if path.is_dir():
            files = sorted(path.iterdir())
            tables = [p for p in files if p.suffix.lower() in SUFFIXES]
            found = tables or [p for p in files if p.suffix.lower() in ARRAYS]
        elif not path.exists() and glob.has_magic(name):
            found = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        else:
            found = [path]
        if not found:
            raise DataError(f"{one_line(name, 4096)}: there is no table there.")
        paths += found
    twice = [path for path in paths if paths.count(path) > 1] if len(paths) < 10_000 else []
    if twice:
        raise ConfigError(f"{one_line(twice[0], 4096)} is named twice.")
    for path in paths:
        if not path.exists():
            from ..tasks.files.source import open_file

            open_file(path)  # its message suggests another name
    return paths


def check_sets(names: list[str], quiet: bool) -> None:
    """Compare the arrays of prepared sets with their digests."""
    from ..tasks.prepared import is_prepared, open_prepared

    for name in names:
        if not is_prepared(name):
            raise ConfigError(f"{one_line(name, 4096)} is no prepared set.")
        open_prepared(name).check_digests()
        if not quiet:
            print_escaped(f"{name}: every array has its digest")
