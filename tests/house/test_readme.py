"""The README's and the documentation's Python blocks run as pasted, and the examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run_and_print_what_the_page_says(page, tmp_path):
    """All blocks of a page in one process, in order; a `text` block holds exactly what the one above it prints."""
    blocks = re.findall(r"^```python\n(.*?)^```(?:\s*\n```text\n(.*?)^```)?", page.read_text(), re.M | re.S)
    script, mark = tmp_path / "page.py", "-- end of block --"
    script.write_text("\n".join(f"{code}\nprint({mark!r})" for code, _ in blocks))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout.split(mark + "\n")
    for (code, expected), found in zip(blocks, printed, strict=False):
        assert not expected or found == expected, code


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if "```bash\n" in p.read_text()], ids=lambda p: p.name)
def test_shell_blocks_run_as_pasted(page, tmp_path):
    """All `bash` blocks of a page, in order, in one empty folder; `console` blocks are only shown."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_links_of_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert all((ROOT / link).exists() for link in links), links


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["examples/own_cell.py"], "parameters of the cell: leak, tau, gain"),
        (["examples/reservoir.py"], "running free for 1000 steps"),
        (["examples/temporal_order.py", "--steps", "100", "--length", "20"], "costates.png"),
        (["benchmarks/memory.py", "elman", "2000", "2", "16", "log-ratio", "auto"], "MB"),
    ],
)
def test_examples_run(command, expected, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--length", "5"], "the length of task 'temporal-order' must be a whole number, at least 10; got 5"),
        (["--steps", "0"], "steps must be a whole number, at least 1; got 0"),
        (["--radius", "-1"], "radius must be a finite number, above 0; got -1"),
    ],
)
def test_the_example_refuses_in_one_line(arguments, words, tmp_path):
    command = [sys.executable, ROOT / "examples/temporal_order.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
