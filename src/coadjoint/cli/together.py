"""`train` and `resume` under torchrun: rank 0 speaks and decides, the others follow."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import typer

from ..errors import CoadjointError, ConfigError
from ..training import launched
from .program import fail
from .schema import Config

if TYPE_CHECKING:
    from ..training.distributed import Group

T = TypeVar("T")


class Processes:
    """The processes of a command; without torchrun there is one, and nothing is sent."""

    def __init__(self, group: Group | None = None) -> None:
        """group: None without torchrun."""
        self.group = group
        self.size = 1 if group is None else group.size
        self.leads = group is None or group.rank == 0

    def word(self, value: T) -> T:
        """Rank 0's value, on every process."""
        return value if self.group is None else self.group.word(value)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error of one process is raised by all at the end."""
        return contextlib.nullcontext() if self.group is None else self.group.together()

    def shards_of(self, config: Config) -> int | None:
        """The shards of a new run: as many as there are processes, unless the config says it.

        None without torchrun. More processes than shards are refused.
        """
        shards = config.training.shards
        if shards is None and self.group is not None:
            return self.size
        self.refuse_if_too_many(config)
        return shards

    def refuse_if_too_many(self, config: Config) -> None:
        """Refuse more processes than the run has shards."""
        shards = config.training.shards or 1
        if self.size > shards:
            raise ConfigError(
                f"this run has {shards} shard{'s' if shards > 1 else ''}, but torchrun started "
                f"{self.size} processes: start at most {shards}, or begin a new run with --shards."
            )


@contextlib.contextmanager
def joined_processes() -> Iterator[Processes]:
    """Inside, the processes are connected; an error that all of them meet is printed once."""
    if not launched.is_launched():
        yield Processes()
        return
    from ..gradients.processes import NOTICED
    from ..training.distributed import joined

    def end(number: int, frame: object) -> None:
        """The handler of SIGTERM outside a run: end, unless there is something left to say."""
        if not NOTICED:
            sys.exit(128 + number)

    # torchrun sends it as soon as one process has died, when another is about to say so.
    signal.signal(signal.SIGTERM, end)
    with joined() as group:
        try:
            yield Processes(group)
        except CoadjointError as error:
            if group.speaks(error):
                try:
                    fail(str(error), error.exit_code)
                finally:
                    group.has_spoken()
            group.wait_for_speaker()
            raise typer.Exit(error.exit_code) from None
