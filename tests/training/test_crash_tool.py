"""`make test-crash` in short: runs are killed, some inside a save, and end with the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parents[2] / "tools" / "crash.py"


def test_killed_runs_end_with_the_bits_of_an_undisturbed_one():
    command = [sys.executable, str(TOOL), "--kills", "2", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ended bit-equal" in done.stdout
