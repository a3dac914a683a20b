"""Where the trials of a study are recorded: SQLite or a journal file, or a PostgreSQL server.

Files are for workers that see the same file; a server is for workers on many machines. The password
of a server is never part of what is shown or stored: see `StoragePlace.shown`.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CoadjointError, ConfigError, MissingError, StorageError, hide_passwords
from ..training import files

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

EXAMPLES = "postgresql+psycopg://user@host/db, sqlite:///FILE or journal:FILE"
SCHEMES = ("postgresql+psycopg", "postgresql", "postgres")
CONNECT_SECONDS = 15  # to wait for a server that does not answer
LOCKED_SECONDS = 120  # to wait for other workers that write to an SQLite file
GRACE = 6  # heartbeats that a worker may miss before its trial is taken from it
# Parts of a server's message, and what to do about them; the first that fits is told.
ADVICE = {
    "authentication": "Check the user and the password: in the URL, PGPASSWORD or ~/.pgpass.",
    "password": "Give it in the URL, in PGPASSWORD or in ~/.pgpass.",
    "does not exist": "Create it: createdb NAME, createuser NAME.",
    "refused": "Check the host and the port.",
    "permission denied": "The user must be allowed to create tables there.",
}


def import_optuna() -> Any:
    """The package optuna, quiet; MissingError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise MissingError(
            "coadjoint tune needs the package optuna: pip install 'coadjoint[tune]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", module="optuna.importance")  # of few trials
    return optuna


@dataclass(frozen=True)
class StoragePlace:
    """A place for the record of a study.

    kind    "sqlite", "journal", or "server"
    url     as SQLAlchemy takes it, with a password if it was given; of a journal, its path
    """

    kind: Literal["sqlite", "journal", "server"]
    url: str

    @property
    def shown(self) -> str:
        """The place as messages, files and pages name it: without a password."""
        return hide_passwords(self.url)

    @property
    def path(self) -> Path | None:
        """The file of the record; None on a server."""
        if self.kind == "server":
            return None
        return Path(self.url.removeprefix("sqlite:///"))

    def open(self, heartbeat: int) -> BaseStorage:
        """Optuna's storage in this place, whose tables or file are created if they are missing.

        heartbeat: seconds between two signs of life of a worker; only a server takes them.
        """
        optuna = import_optuna()
        path = self.path
        if path is not None and path.is_symlink():
            raise StorageError(f"{path} is {files.LINK_REFUSED}")
        with self.errors():
            if self.kind == "journal":
                from optuna.storages.journal import JournalFileBackend

                backend = JournalFileBackend(self.url)
                journal: BaseStorage = optuna.storages.JournalStorage(backend)
                return journal
            if self.kind == "sqlite":
                wait = {"connect_args": {"timeout": LOCKED_SECONDS}}
                file: BaseStorage = optuna.storages.RDBStorage(self.url, engine_kwargs=wait)
                return file
            import_psycopg()
            connection = {
                "connect_args": {"connect_timeout": CONNECT_SECONDS},
                "pool_pre_ping": True,  # the server may have been restarted since
                "max_overflow": -1,  # each job has a thread and a heartbeat
            }
            return optuna.storages.RDBStorage(  # type: ignore[no-any-return]
                self.url,
                engine_kwargs=connection,
                heartbeat_interval=heartbeat,
                grace_period=GRACE * heartbeat,
            )

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Inside, an error of the storage becomes a StorageError of one line, without passwords."""
        try:
            yield
        except CoadjointError:
            raise
        except Exception as error:  # of SQLAlchemy, Optuna or psycopg, which need not be there
            first = find_storage_error(error)
            if first is None:
                raise
            raise StorageError(f"{self.shown} cannot be used: {explain(first)}") from None


def parse_storage(text: str | None, folder: Path) -> StoragePlace:
    """The place that --storage names; None: study.db in the folder of the study.

    "journal:" without a name is a journal in that folder.
    """
    if text is None:
        return StoragePlace("sqlite", f"sqlite:///{folder / 'study.db'}")
    scheme, sign, rest = text.partition(":")
    if scheme == "journal":
        return StoragePlace("journal", rest or str(folder / "study.journal"))
    if scheme == "sqlite" and text.startswith("sqlite:///") and len(text) > len("sqlite:///"):
        return StoragePlace("sqlite", text)
    if scheme not in SCHEMES or not rest.startswith("//"):
        # Without "//" it cannot be told where a password is.
        got = hide_passwords(text) if rest.startswith("//") else f"{scheme}{sign}..."
        raise ConfigError(f"--storage must be {EXAMPLES}; got {got!r}.")
    if re.search(r"\s", text):
        raise ConfigError(
            "--storage must be a URL without spaces: in a password, write a space as %20."
        )
    refuse_bad_url(text)
    return StoragePlace("server", f"{SCHEMES[0]}:{rest}")


def refuse_bad_url(text: str) -> None:
    """Refuse a URL of a server that cannot be one; the message says nothing of the password."""
    import_optuna()
    import sqlalchemy

    try:
        url = sqlalchemy.engine.make_url(text)
    except (ValueError, sqlalchemy.exc.ArgumentError):
        raise ConfigError(
            f"--storage must be {EXAMPLES}; got {hide_passwords(text)!r}, whose port or host "
            "cannot be read. Write : / @ # % in a password as %3A %2F %40 %23 %25."
        ) from None
    if not url.database:
        raise ConfigError(
            f"--storage must name a database, as in {EXAMPLES.split(',')[0]}; got "
            f"{hide_passwords(text)!r}."
        )


def import_psycopg() -> None:
    """MissingError if the package for PostgreSQL is not installed."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingError(
            "--storage postgresql+psycopg://... needs the package psycopg: "
            "pip install 'coadjoint[tune]'."
        ) from None


def find_storage_error(error: BaseException | None) -> BaseException | None:
    """The error of a storage that led to this one, which may be it; None if there is none.

    Optuna fails once more, in another way, when it cannot record that a trial has failed.
    """
    while error is not None and not is_storage_error(error):
        error = error.__cause__ or error.__context__
    return error


def is_storage_error(error: BaseException) -> bool:
    """Whether an error comes from a storage, not from what was done with it."""
    packages = ("sqlalchemy", "psycopg", "sqlite3", "alembic")
    module = type(error).__module__.partition(".")[0]
    is_internal = type(error).__name__ == "StorageInternalError"
    return module in packages or is_internal or isinstance(error, OSError)


def explain(error: BaseException) -> str:
    """What a storage says, as one line with advice."""
    cause = error
    inner: BaseException | None = error
    while inner is not None:
        cause = inner
        inner = getattr(cause, "orig", None) or cause.__cause__
    lines = [line.strip() for line in hide_passwords(str(cause)).splitlines() if line.strip()]
    # A server's message has a line for each sentence, and they need not end in a full stop.
    said = " ".join(line if line.endswith(("?", ".", ":")) else f"{line}." for line in lines)
    sentence = said[:300]
    for part, advice in ADVICE.items():
        if part in said:
            return f"{sentence} {advice}"
    return sentence
