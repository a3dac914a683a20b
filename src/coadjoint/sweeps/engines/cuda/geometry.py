"""How a network lies on the chip: which part of W each block keeps, and each thread of it in registers."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from ....cells.cell import Cell

WEIGHTS = 512  # bytes of W that a thread keeps in registers
SHARED = (
    180 << 10
)  # bytes of W that shared memory may hold, where that keeps a network on one multiprocessor
WARPS = 8
ROWS = 4  # samples of an item, twice as many for cells of several gates
TRAFFIC = (
    14 << 20
)  # bytes that the blocks of all groups read at a step, above which a product for each step is quicker


# how it lies on the chip
@dataclass(frozen=True)
class Tile:
    """Which part of W a thread has: KC inner entries times CC outer ones, over LC x LK lanes and WC x WK warps."""

    KC: int
    CC: int
    LC: int
    LK: int
    WC: int
    WK: int


@functools.cache
def cheapest_tile(inner: int, outer: int, rows: int, warps: int, weights: int) -> Tile | None:
    """The cheapest tile that covers W's part; None if no tile of at most `weights` entries a thread does."""
    best: tuple[float, Tile] | None = None
    for LC, WC, CC in itertools.product(
        (1, 2, 4, 8, 16, 32), _divisors(warps), (1, 2, 3, 4, 6, 8, 12, 16)
    ):
        LK, WK = 32 // LC, warps // WC
        if outer > LC * WC * CC or (CC > 1 and outer <= LC * WC * (CC - 1)):
            continue
        KC = 4 * -(-inner // (4 * LK * WK))
        if weights < KC * CC:
            continue
        fma, moved = KC * CC * warps / 4, KC * warps + (LK.bit_length() - 1) * CC * warps
        cost = rows * (max(fma, moved) + min(fma, moved) / 4) + rows * WK * outer / 32
        if best is None or cost < best[0]:
            best = cost, Tile(KC, CC, LC, LK, WC, WK)
    return None if best is None else best[1]


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


@dataclass(frozen=True)
class Geometry:
    """How a network lies on the chip: `parts` blocks of a group hold `units` units each."""

    units: int
    parts: int
    groups: int
    rows: int  # samples of an item
    blocks: int  # items of a step
    warps: int


LIMIT = 227 << 10  # bytes of shared memory that a block may have on a Hopper GPU


@functools.cache
def choose_geometry(
    cell: Cell, d: int, B: int, size: int, processors: int, limit: int = LIMIT, warps: int = WARPS
) -> Geometry | None:
    """The fewest parts that fit, on so many multiprocessors with so much shared memory; None if none do."""
    G, NR = len(cell.gates), len(cell.read)
    if not NR:
        return Geometry(d, 1, B, 1, 1, min(warps, -(-d // 32)))
    for parts in range(1, min(d, processors) + 1):
        units = -(-d // parts)
        needed = -(-d // units)
        total = -(-B // min(B, max(1, processors // needed)))
        blocks = -(-total // (ROWS if G < 3 else 2 * ROWS))
        rows = -(-total // blocks)
        g = Geometry(units, needed, -(-B // (rows * blocks)), rows, blocks, warps)
        both = [place_weights(cell, d, g, size, backwards) for backwards in (False, True)]
        if all(h is not None and h.shared <= limit for h in both):
            return g
    return None


class WeightPlacement(NamedTuple):
    """Where a block keeps W: a tile for each thread, its first `keep` inner entries in registers."""

    shape: Tile
    keep: int
    inner: int
    outer: int
    shared: int  # bytes of shared memory, with what W multiplies and the sums


@functools.cache
def place_weights(
    cell: Cell, d: int, g: Geometry, size: int, backwards: bool
) -> WeightPlacement | None:
    """None if the registers do not hold it."""
    G, NR = len(cell.gates), len(cell.read)
    inner, outer = (G * d, NR * g.units) if backwards else (NR * d, G * g.units)
    most = WEIGHTS // size + (SHARED // (32 * g.warps * size) if g.parts == 1 else 0)
    shape = (
        cheapest_tile(inner, outer, ROWS, g.warps, most) if NR else Tile(4, 1, 32, 1, g.warps, 1)
    )
    if shape is None:
        return None
    keep = min(shape.KC, WEIGHTS // size // shape.CC // 4 * 4)
    vectors = (
        g.rows * shape.WK * (shape.LK * shape.KC + max(1, outer))
        + (shape.KC - keep) * shape.CC * 32 * g.warps
    )
    shared = size * vectors + 4 * (5 * g.rows + g.rows * g.blocks) + 16
    return WeightPlacement(shape, keep, inner, max(1, outer), shared)
