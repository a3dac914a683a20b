"""How the processes of a run find each other, and only each other.

torchrun keeps its store when it restarts processes that have died, and with it the addresses that
these had left there. So the processes of one start agree on a word that no earlier start had, and
use keys that begin with it:

    process r   leaves a new mark of its own                         here r -> mark
    process 0   answers each mark that it finds                      word for mark -> word
    process r   reads the answer to its own mark, and confirms it    word, r -> yes
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import LostProcess, error_text
from . import launched

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MEETING_TIMEOUT = timedelta(minutes=5)  # torchrun starts the processes of a run at once
BETWEEN_LOOKS = 0.01  # seconds


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Wait until the processes of this start are all there; the word that they alone share.

    A RuntimeError if one of them does not come in time.
    """
    if rank > 0:
        return _ask_for_word(store, rank, timeout)
    word = uuid.uuid4().hex
    missing = list(range(1, size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            # A mark may be one of an earlier start: its answer is read by nobody.
            if store.check([f"here {other}"]):
                mark = bytes(store.get(f"here {other}")).decode()
                store.set(f"word for {mark}", word)
        missing = [other for other in missing if not store.check([f"{word}, {other}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"no sign of process {', '.join(map(str, missing))}")
        time.sleep(BETWEEN_LOOKS)
    return word


def _ask_for_word(store: Store, rank: int, timeout: timedelta) -> str:
    """The word that process 0 gives to this one."""
    mark = uuid.uuid4().hex
    store.set(f"here {rank}", mark)
    store.wait([f"word for {mark}"], timeout)
    word = bytes(store.get(f"word for {mark}")).decode()
    store.set(f"{word}, {rank}", "yes")
    return word


@contextlib.contextmanager
def noticing_absence() -> Iterator[None]:
    """Inside, what torch raises when processes do not find each other becomes a LostProcess."""
    try:
        yield
    except RuntimeError as error:
        place = ""
        if launched.is_launched():
            place = f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostProcess(
            f"the {launched.size()} processes of this run could not connect{place} "
            f"({error_text(error)}): start all of them within {MEETING_TIMEOUT.seconds // 60} "
            "minutes, with an address and a port that all machines can reach."
        ) from None
