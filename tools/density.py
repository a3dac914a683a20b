"""How densely the source is written, per 1,000 lines: a table by package.

    python tools/density.py [FOLDER]            the densities of every package under FOLDER
    python tools/density.py --sample 60 --seed 1   as many functions drawn at random, to be read

The densities are counts per 1,000 lines of Python of the constructs that make a line hard to
read when there are many: conditional expressions, comprehensions (generator expressions
included), assignments of a tuple to a tuple, lambdas; and of comments, which help. "long" is
the share of lines over 100 characters. "nested" counts conditional expressions inside another,
"named lambdas" lambdas that are assigned, "tall" comprehensions on more than one line and
"Any" the uses of typing.Any; those are absolute numbers.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "coadjoint"
LONGEST = 100
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PER_THOUSAND = ["conditionals", "comprehensions", "tuples", "lambdas", "comments"]
ABSOLUTE = ["nested", "named lambdas", "tall", "Any"]


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether `node` reads `a, b = c, d`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def count_node(node: ast.AST, counts: Counter[str]) -> None:
    """Add what `node` itself is to `counts`; its children are counted by the caller."""
    if isinstance(node, ast.IfExp):
        counts["conditionals"] += 1
        children = ast.walk(node)
        next(children)
        counts["nested"] += any(isinstance(child, ast.IfExp) for child in children)
    elif isinstance(node, COMPREHENSIONS):
        counts["comprehensions"] += 1
        counts["tall"] += node.end_lineno != node.lineno
    elif is_tuple_assignment(node):
        counts["tuples"] += 1
    elif isinstance(node, ast.Lambda):
        counts["lambdas"] += 1
    elif isinstance(node, ast.Name) and node.id == "Any":
        counts["Any"] += 1
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Lambda):
        counts["named lambdas"] += 1


def count(text: str) -> Counter[str]:
    """The counts of one file."""
    lines = text.splitlines()
    counts = Counter(lines=len(lines))
    counts["long"] = sum(len(line) > LONGEST for line in lines)
    for node in ast.walk(ast.parse(text)):
        count_node(node, counts)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        counts["comments"] += token.type == tokenize.COMMENT and is_remark(token.string)
    return counts


def is_remark(comment: str) -> bool:
    """Whether `comment` speaks to a reader rather than to the formatter or the type checker."""
    return not comment.startswith(("# fmt:", "# type:", "# noqa"))


def count_packages(folder: Path) -> dict[str, Counter[str]]:
    """The counts of each package directly under `folder`, files of its own under ".", and all."""
    packages: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        name = parts[0] if len(parts) > 1 else "."
        counts = count(path.read_text())
        packages.setdefault(name, Counter()).update(counts)
        total.update(counts)
    return {**packages, "total": total}


def write_table(packages: dict[str, Counter[str]]) -> str:
    """The table that is printed."""
    head = ["package", "lines", *PER_THOUSAND, "long", *ABSOLUTE]
    rows = [head]
    for name, counts in packages.items():
        lines = counts["lines"]
        row = [name, str(lines)]
        row += [f"{1000 * counts[key] / lines:.1f}" for key in PER_THOUSAND]
        row += [f"{100 * counts['long'] / lines:.1f}%"]
        row += [str(counts[key]) for key in ABSOLUTE]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    )


def functions(folder: Path) -> list[str]:
    """Every function of more than two lines under `folder`, as "file:line name" and its text."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            if node.end_lineno - node.lineno < 2:
                continue
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found.append(f"{path.relative_to(folder)}:{node.lineno} {node.name}\n\n{body}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCE)
    parser.add_argument("--sample", type=int, help="draw so many functions instead")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.sample is None:
        print(write_table(count_packages(arguments.folder)))
    else:
        drawn = random.Random(arguments.seed).sample(functions(arguments.folder), arguments.sample)
        print("\n".join(drawn))


if __name__ == "__main__":
    main()
