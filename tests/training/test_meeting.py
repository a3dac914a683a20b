"""Processes that do not find each other end with one line; the others share a word of their own."""

import threading
from datetime import timedelta

import pytest
import torch

from coadjoint.errors import LostProcess
from coadjoint.training import distributed
from coadjoint.training.meeting import meet

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)
LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LONG = timedelta(minutes=5)


def test_a_process_that_waits_in_vain_says_where(monkeypatch):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "MEETING_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(LostProcess, match=r"2 processes .* could not connect at 127\.0\.0\.1:0"):
        distributed.join()


def words_of(store, size):
    """The word that each of `size` processes, threads here, comes back with."""
    words = [None] * size

    def come(rank):
        words[rank] = meet(store, rank, size, LONG)

    # The leader comes last, so that the others wait for it.
    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return words


def test_the_processes_of_a_start_share_a_word_that_no_earlier_start_had():
    """torchrun keeps its store: the marks and answers of those that died are still there."""
    store = torch.distributed.HashStore()
    seen = []
    for size in (3, 3, 2, 4, 1):
        store.set("here 1", "a mark of a process that died before it was answered")
        words = words_of(store, size)
        assert len(set(words)) == 1
        seen.append(words[0])
    assert len(set(seen)) == len(seen)


def test_a_missing_process_is_named():
    store = torch.distributed.HashStore()
    with pytest.raises(RuntimeError, match="no sign of process 1, 2"):
        meet(store, 0, 3, timedelta(seconds=0.05))
    with pytest.raises(RuntimeError):
        meet(store, 1, 2, timedelta(seconds=0.05))
