"""The Python and shell blocks of the README and the documentation run as pasted.

They print what the page says. The examples run too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in the tests: one thread for each process
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


MARK = "-- end of block --"
FORKS = """
import os, runpy, sys, traceback
import numpy, torch, coadjoint
for script in sys.argv[1:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    for file, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{script}.{name}", os.O_WRONLY | os.O_CREAT), file)
    os.chdir(os.path.dirname(script))
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    with open(f"{script}.code", "w") as file:
        file.write(str(code))
    os._exit(code)
"""


def python_blocks(page):
    """[(code, what the `text` block below it says)]"""
    return re.findall(
        r"^```python\n(.*?)^```(?:\s*\n```text\n(.*?)^```)?", page.read_text(), re.M | re.S
    )


@pytest.fixture(scope="module")
def pages_run(tmp_path_factory):
    """{page: its script, which has run}: each in a process of its own, forked from one that has
    imported torch.
    """
    scripts = {}
    for page in PAGES:
        scripts[page] = tmp_path_factory.mktemp(page.stem) / "page.py"
        scripts[page].write_text(
            "\n".join(f"{code}\nprint({MARK!r})" for code, _ in python_blocks(page))
        )
    subprocess.run([sys.executable, "-c", FORKS, *scripts.values()], env=ENVIRONMENT, check=True)
    return scripts


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run_and_print_what_the_page_says(page, pages_run):
    """All blocks of a page in one process, in order; a `text` block holds exactly what the one
    above it prints.
    """

    def said(name):
        return Path(f"{pages_run[page]}.{name}").read_text()

    assert said("code") == "0", said("err")[-2000:]
    for (code, expected), found in zip(
        python_blocks(page), said("out").split(MARK + "\n"), strict=False
    ):
        assert not expected or found == expected, code


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```bash\n" in p.read_text()], ids=lambda p: p.name
)
def test_shell_blocks_run_as_pasted(page, tmp_path):
    """All `bash` blocks of a page, in order, in one empty folder; `console` blocks are
    only shown.
    """
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": path},
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
        [sys.executable, ROOT / command[0], *command[1:]],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--length", "5"],
            "the length of task 'temporal-order' must be a whole number, at least 10; got 5",
        ),
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
