"""The Python and shell blocks of the README and the documentation run as pasted.

They print what the page says. The examples run too.
"""

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

import coadjoint as co
import warm
from paths import ROOT, put

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in the tests: one thread for each process
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# what docs/estimators.md prints is compared in tests/estimators, where figures may differ a little
PRINTED = [page for page in PAGES if page.name != "estimators.md"]

MARK = "-- end of block --"


def python_blocks(page):
    """[(code, what the `text` block below it says)]"""
    return re.findall(
        r"^```python\n(.*?)^```(?:\s*\n```text\n(.*?)^```)?", page.read_text(), re.M | re.S
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PRINTED, ids=lambda p: p.name)
def test_blocks_run_and_print_what_the_page_says(page, tmp_path):
    """All blocks of a page in one process, in order; a `text` block holds exactly what the one
    above it prints.
    """
    blocks = python_blocks(page)
    script = put(tmp_path, "page.py", "\n".join(f"{code}\nprint({MARK!r})" for code, _ in blocks))
    done = warm.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for (code, expected), found in zip(blocks, done.stdout.split(MARK + "\n"), strict=False):
        assert not expected or found == expected, code


def shell_blocks(page):
    """[(commands, what the `text` block right below says)]"""
    pattern = r"^```bash\n(.*?)^```\n(?:```text\n(.*?)^```)?"
    return re.findall(pattern, page.read_text(), re.M | re.S)


def without_numbers(text):
    """`text` with every number as #: losses and seconds differ from machine to machine.

    Columns are as wide as their numbers, so rows of spaces and of dashes count as one.
    """
    text = re.sub(r"\d[\d.,]*(e-?\d+)?", "#", text)
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", "  ", text))


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if shell_blocks(p)], ids=lambda p: p.name)
def test_shell_blocks_run_as_pasted(page, tmp_path):
    """All `bash` blocks of a page run in order in one folder that holds the examples alone, and
    print what the page says, numbers apart. `console` blocks are only shown.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for commands, expected in shell_blocks(page):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env={**ENVIRONMENT, "PATH": warm.path()},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        if expected:
            assert without_numbers(done.stdout) == without_numbers(expected)


def test_the_readme_has_at_most_130_lines_and_no_block_that_only_shows():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    kinds = re.findall(r"^```(\w+)$", text, re.M)
    assert set(kinds) == {"python", "bash", "text", "diff"}


def test_both_sides_of_the_readmes_diff_build_the_same_module():
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    modules = []
    for sign in "-+":
        (line,) = re.findall(rf"^\{sign} (.*)$", diff, re.M)
        scope = {"torch": torch, "co": co}
        exec(line, scope)  # the line stands in the README
        modules.append(scope["rnn"])
    shapes = [{name: w.shape for name, w in module.state_dict().items()} for module in modules]
    assert shapes[0] == shapes[1]
    assert type(modules[1]) is co.nn.LSTM


TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "RESULTS.md"]


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_links_of_a_page_exist(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link, anchor in re.findall(r"\]\((?!https://)([^)#]*)(?:#([^)]+))?\)", prose):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


SECTIONS_ON_A_CPU = ("benchmarks/sections.py", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["examples/own_cell.py"], "parameters of the cell: leak, tau, gain"),
        (["examples/reservoir.py"], "running free for 1000 steps"),
        (["examples/text.py", "20"], "unigram  4.12"),
        (["examples/temporal_order.py", "--steps", "20", "--length", "20"], "costates.png"),
        (["benchmarks/memory.py", "elman", "2000", "2", "16", "log-ratio", "auto"], "MB"),
        (
            [*SECTIONS_ON_A_CPU, "--sizes", "4x3x5", "--sections", "rows with a limit"],
            "| own-loop | gru | 4, 3, 5 |",
        ),
    ],
)
def test_examples_run(command, expected, tmp_path):
    done = warm.run(ROOT / command[0], *command[1:], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout


@pytest.mark.slow
def test_the_example_of_a_text_leaves_a_book_alone(tmp_path):
    """docs/text.md has its reader write another book.txt first."""
    book = put(tmp_path, "book.txt", "another text")
    done = warm.run(ROOT / "examples" / "text.py", "2", cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [*tmp_path.iterdir()] == [book]
    assert book.read_text() == "another text"


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
def test_the_example_refuses_in_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    script = str(ROOT / "examples/temporal_order.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
