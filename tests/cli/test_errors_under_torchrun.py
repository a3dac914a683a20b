"""What every process of torchrun refuses before they are connected is printed once, by rank 0."""

import sys

import pytest
import torch

from coadjoint.cli import program
from torchrun import GRACE, said, start

COMPLAINT = "coadjoint: error: No such option: --hiden. Did you mean --hidden?"
# Rank 0 comes to the error seconds after the others.
LATE = 'if [ "$RANK" = 0 ]; then sleep 2; fi; exec "$@"'


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_an_error_is_printed_although_rank_0_is_late(tmp_path):
    command = [sys.executable, "-m", "coadjoint", "train", "addition", "--hiden", "4"]
    process = start(2, "--no-python", "sh", "-c", LATE, "sh", *command, cwd=tmp_path)
    assert process.wait(timeout=GRACE) != 0
    assert said(tmp_path) == [COMPLAINT]


def test_a_process_that_is_not_ended_prints_its_error(monkeypatch, capsys):
    launch = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "PATIENCE", 0.0)
    with pytest.raises(SystemExit) as end:
        program.fail_once("no such file.", 4)
    assert end.value.code == 4
    assert capsys.readouterr().err == "coadjoint: error: process 3: no such file.\n"
