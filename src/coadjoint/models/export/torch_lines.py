"""Lines: assignments of a generated method, with what is read once written where it is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LONGEST_INLINE = 56  # characters of an expression inside another one
WIDTH = 90  # of a line, without the eight spaces before it
WORD = re.compile(r"<\d+>|[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Assignment:
    """targets = expression.

    targets   the variables, one or several; one that is called <7> has no name yet
    hint      how the name of such a variable begins, if it gets one
    is_infix  whether the expression needs brackets inside another one
    """

    targets: tuple[str, ...]
    expression: str
    hint: str = ""
    is_infix: bool = False


def write_lines(
    lines: Sequence[Assignment], results: Sequence[str], unique: Callable[[str], str]
) -> list[str]:
    """The text of the lines that `results` need, and the results themselves as the last entries.

    A variable without a name that is read once is written where it is read. unique: makes names.
    """
    live, uses = count_reads(lines, results)
    inlined: dict[str, str] = {}
    bracketed: set[str] = set()
    written: list[str] = []

    def fill(text: str) -> str:
        """The text with what stands for variables without a name."""
        return re.sub(r"<\d+>", lambda found: replacement(text, found), text)

    def replacement(text: str, found: re.Match[str]) -> str:
        token = found.group()
        before = text[: found.start()]
        after = text[found.end() :]
        is_alone = before.endswith(("(", "[", ", ")) or not before
        is_alone = is_alone and (after.startswith((")", "]", ",")) or not after)
        inner = inlined[token]
        return f"({inner})" if token in bracketed and not is_alone else inner

    for line in lines:
        if not any(target in live for target in line.targets):
            continue
        expression = fill(line.expression)
        targets = line.targets
        if targets[0].startswith("<"):
            if uses[targets[0]] == 1 and len(expression) <= LONGEST_INLINE:
                inlined[targets[0]] = expression
                if line.is_infix:
                    bracketed.add(targets[0])
                continue
            inlined[targets[0]] = unique(line.hint)
            targets = (inlined[targets[0]],)
        written += fold(f"{', '.join(targets)} = {expression}")
    return [*written, *map(fill, results)]


def count_reads(
    lines: Sequence[Assignment], results: Sequence[str]
) -> tuple[set[str], Counter[str]]:
    """The variables that `results` need, and how often each is read."""
    uses: Counter[str] = Counter()
    for result in results:
        uses.update(WORD.findall(result))
    live: set[str] = set()
    for line in reversed(lines):
        if any(uses[target] for target in line.targets):
            live.update(line.targets)
            uses.update(WORD.findall(line.expression))
    return live, uses


def fold(text: str) -> list[str]:
    """A long call with its arguments on a line of their own."""
    begin = text.find("(")
    if len(text) <= WIDTH or begin < 0 or not text.endswith(")"):
        return [text]
    return [text[: begin + 1], f"    {text[begin + 1 : -1]}", ")"]
