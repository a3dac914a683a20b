"""Processes that do not find each other end with one line."""

from datetime import timedelta

import pytest
import torch

from coadjoint.errors import LostProcess
from coadjoint.training import distributed

LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_process_that_waits_in_vain_says_where(monkeypatch):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "MEETING_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(LostProcess, match=r"2 processes .* could not connect at 127\.0\.0\.1:0"):
        distributed.join()
