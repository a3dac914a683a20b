"""The import graph of src/coadjoint: imports, cycles, and imports against the order of packages.

    python tools/imports.py                           packages, cycles, deferred imports
    python tools/imports.py --draw docs/imports.svg   the graph of the packages as a drawing

An import at module level is a "top" edge, one inside a function a "deferred" edge, one under
TYPE_CHECKING a "typing" edge.
"""

from __future__ import annotations

import argparse
import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "coadjoint"
ORDER = (  # each package imports only from those before it
    "errors",
    "cells",
    "sweeps",
    "objectives",
    "networks",
    "nn",
    "gradients",
    "optimisers",
    "tasks",
    "diagnostics",
    "classics",
    "training",
    "models",
    "estimators",
    "cli",
)
WIDER_FROM = (8, 32, 96)  # imported names from which an arc of the drawing is wider


@dataclass(frozen=True)
class Edge:
    """One imported name."""

    source: str  # module names inside the package, such as "sweeps.rows"; "" is the package itself
    target: str
    name: str
    kind: str  # "top", "deferred" or "typing"
    line: int


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


@functools.cache
def edges() -> list[Edge]:
    """Every import of the package's own modules."""
    known = modules()
    found: list[Edge] = []
    for name, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += _edges_of(name, path, tree, known)
    return found


def _edges_of(name: str, path: Path, tree: ast.Module, known: dict[str, Path]) -> Iterator[Edge]:
    here = name.split(".") if name else []
    package = here if path.name == "__init__.py" else here[:-1]
    for node, kind in _imports(tree, "top"):
        for target, imported in _targets(node, package):
            full = f"{target}.{imported}" if target else imported
            module = full if full in known else target
            while module not in known:
                module = module.rpartition(".")[0]
            if module != name:
                yield Edge(name, module, imported, kind, node.lineno)


def _imports(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Every import statement below a node, with its kind."""
    for child in ast.iter_child_nodes(node):
        below = kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            below = "deferred"
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            below = "typing"
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        else:
            yield from _imports(child, below)


def _targets(node: ast.Import | ast.ImportFrom, package: list[str]) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported from our own package, whether by a relative or an absolute
    path.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            first, _, rest = alias.name.partition(".")
            if first == ROOT.name:
                module, _, name = rest.rpartition(".")
                yield module, name
        return
    if node.level:
        above = package[: len(package) - (node.level - 1)]
        module = ".".join([*above, *([node.module] if node.module else [])])
    elif node.module and node.module.partition(".")[0] == ROOT.name:
        module = node.module.partition(".")[2]
    else:
        return
    for alias in node.names:
        yield module, alias.name


def package_of(module: str) -> str:
    return module.partition(".")[0]


def against_the_order(found: list[Edge]) -> list[Edge]:
    """Imports of a package that comes later, in whichever way they are made."""
    wrong = []
    for edge in found:
        source = package_of(edge.source)
        target = package_of(edge.target)
        if source in ("", "__main__") or target == "":
            continue
        if ORDER.index(target) > ORDER.index(source):
            wrong.append(edge)
    return wrong


def cycles(found: list[Edge], kinds: tuple[str, ...]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    graph: dict[str, set[str]] = defaultdict(set)
    for edge in found:
        if edge.kind in kinds and edge.source and edge.target:
            graph[edge.source].add(edge.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            groups.append(stack[at:])
            del stack[at:]

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return [sorted(group) for group in groups if len(group) > 1]


def draw(found: list[Edge]) -> str:
    """The packages as an SVG: each in its place in the order, an arc to every package it imports.

    The more names it imports, the wider the arc.
    """
    there = [
        name
        for name in ORDER
        if any(package_of(e.source) == name for e in found) or name == "errors"
    ]
    height, left, wide = 44, 190, 640
    shares: dict[tuple[str, str], int] = defaultdict(int)
    for edge in found:
        pair = (package_of(edge.source), package_of(edge.target))
        if pair[0] in there and pair[1] in there and pair[0] != pair[1]:
            shares[pair] += 1
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height * len(there) + 20}" '
        'font-family="sans-serif" font-size="15">',
        f'<rect width="{wide}" height="{height * len(there) + 20}" fill="#ffffff"/>',
    ]
    middle = {name: 10 + height * i + height / 2 for i, name in enumerate(there)}
    for (source, target), count in sorted(shares.items()):
        y1, y2 = middle[source], middle[target]
        reach = left + 30 + 0.75 * (y1 - y2)
        # In few classes, so that the drawing stays the same where a name more is imported.
        width = 1 + 2 * sum(count > bound for bound in WIDER_FROM)
        lines.append(
            f'<path d="M {left} {y1} C {reach} {y1}, {reach} {y2}, {left} {y2}" fill="none" '
            'stroke="#4a6fa5" '
            f'stroke-opacity="0.35" stroke-width="{width}"><title>{source} imports {target}'
            "</title></path>"
        )
    for name in there:
        y = middle[name]
        lines.append(
            f'<rect x="20" y="{y - 16}" width="{left - 20}" height="32" rx="6" fill="#eef2f8" '
            'stroke="#4a6fa5"/>'
        )
        lines.append(
            f'<text x="{(left + 20) / 2}" y="{y + 5}" text-anchor="middle" '
            f'fill="#1d2b45">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--draw", type=Path, help="write the graph of the packages to this SVG file"
    )
    given = parser.parse_args()
    found = edges()
    if given.draw:
        given.draw.write_text(draw(found), encoding="utf-8")
        return
    known = modules()
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in known.items()
    }
    for package in ORDER:
        own = [name for name in known if package_of(name) == package]
        if own:
            print(f"{package:12} {len(own):3} modules {sum(lines[name] for name in own):6} lines")
    print(f"total {sum(lines.values())} lines")
    print("cycles:", cycles(found, ("top",)) or "none")
    print("cycles, deferred imports included:", cycles(found, ("top", "deferred")) or "none")
    for edge in against_the_order(found):
        print(f"against the order: {edge.source}:{edge.line} imports {edge.name} of {edge.target}")
    for edge in found:
        if edge.kind == "deferred" and package_of(edge.source) != "cli":
            print(f"deferred: {edge.source}:{edge.line} imports {edge.name} of {edge.target}")


if __name__ == "__main__":
    main()
