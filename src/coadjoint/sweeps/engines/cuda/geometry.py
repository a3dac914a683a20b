"""How a network lies on the chip: which part of W each block keeps, and each thread of a block.

A group of `parts` blocks owns some samples, and each block `units` of their units with the rows of
W that belong to them. A block's part of W is an inner x outer matrix: inner entries are summed
over, outer ones are the block's own. Its threads share it out in tiles, kept in registers.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from ....cells.cell import Cell

WEIGHTS = 512  # bytes of W that a thread keeps in registers
SHARED = 180 << 10  # bytes of W in shared memory, where that keeps a network on one multiprocessor
WARPS = 8  # of a block
ROWS = 4  # samples of an item, twice as many for cells of several gates
TRAFFIC = 14 << 20  # bytes that all blocks read per step; above it one product per step is faster
LIMIT = 227 << 10  # bytes of shared memory that a block may have on a Hopper GPU


@dataclass(frozen=True)
class Tile:
    """Which part of W a thread has: KC inner entries times CC outer ones.

    The 32 lanes of a warp lie as LC x LK over outer and inner entries, the warps as WC x WK.
    """

    KC: int
    CC: int
    LC: int
    LK: int
    WC: int
    WK: int


@functools.cache
def cheapest_tile(inner: int, outer: int, rows: int, warps: int, weights: int) -> Tile | None:
    """The cheapest tile that covers a block's part of W, inner x outer; None if none does.

    A thread has KC x CC entries, over inner x outer; the 32 lanes of a warp lie as LK x LC, the
    warps as WK x WC. rows: samples that are multiplied at once. weights: the most entries of W
    that a thread may have. The cost is an estimate of the time of one product, in arbitrary units.
    """
    cheapest: Tile | None = None
    lowest_cost = 0.0
    lane_columns = (1, 2, 4, 8, 16, 32)
    columns_per_thread = (1, 2, 3, 4, 6, 8, 12, 16)
    for LC, WC, CC in itertools.product(lane_columns, _divisors(warps), columns_per_thread):
        LK = 32 // LC  # a warp has 32 lanes
        WK = warps // WC
        is_too_small = outer > LC * WC * CC
        has_idle_columns = CC > 1 and outer <= LC * WC * (CC - 1)
        if is_too_small or has_idle_columns:
            continue
        KC = 4 * -(-inner // (4 * LK * WK))  # a multiple of 4: values are read four at a time
        if weights < KC * CC:
            continue
        # A thread's multiply-adds and the values it moves overlap in part; sums over WK follow.
        # A multiprocessor runs four warps at a time.
        multiply_adds = KC * CC * warps / 4
        moves = KC * warps + (LK.bit_length() - 1) * CC * warps  # reads, and log2 LK shuffles
        overlapped = max(multiply_adds, moves) + min(multiply_adds, moves) / 4
        cost = rows * overlapped + rows * WK * outer / 32
        if cheapest is None or cost < lowest_cost:
            cheapest = Tile(KC, CC, LC, LK, WC, WK)
            lowest_cost = cost
    return cheapest


def _divisors(n: int) -> list[int]:
    """The divisors of n, in rising order."""
    return [i for i in range(1, n + 1) if n % i == 0]


@dataclass(frozen=True)
class Geometry:
    """How a network lies on the chip."""

    units: int  # of a block
    parts: int  # blocks of a group
    groups: int
    rows: int  # samples of an item
    blocks: int  # items of a step
    warps: int


@functools.cache
def choose_geometry(
    cell: Cell, d: int, B: int, size: int, processors: int, limit: int = LIMIT, warps: int = WARPS
) -> Geometry | None:
    """The geometry with the fewest parts that fits; None if none does.

    Fewer parts mean fewer blocks that wait for each other's values. The batch is spread over as
    many groups as the chip has room for; -(-a // b) is a / b rounded up.

    d: units; B: samples; size: bytes of a number; processors: multiprocessors of the chip;
    limit: bytes of shared memory that a block may have; warps: of a block.
    """
    if not cell.read:  # no W: every sample is a group of one block
        return Geometry(d, 1, B, 1, 1, min(warps, -(-d // 32)))
    # Samples of an item, at most.
    most_rows = ROWS if len(cell.gates) < 3 else 2 * ROWS
    for parts in range(1, min(d, processors) + 1):
        units = -(-d // parts)
        needed_parts = -(-d // units)  # rounding up may leave the last parts without units
        most_groups = min(B, max(1, processors // needed_parts))
        samples = -(-B // most_groups)  # of a group
        blocks = -(-samples // most_rows)  # items that they are cut into
        rows = -(-samples // blocks)  # samples of an item
        groups = -(-B // (rows * blocks))
        g = Geometry(units, needed_parts, groups, rows, blocks, warps)
        # W must fit for the forward and the tangent loop, and W' for the adjoint.
        ahead = place_weights(cell, d, g, size, False)
        back = place_weights(cell, d, g, size, True)
        if ahead is None or back is None:
            continue
        if ahead.shared <= limit and back.shared <= limit:
            return g
    return None


class WeightPlacement(NamedTuple):
    """Where a block keeps its part of W: a tile for each thread."""

    shape: Tile
    keep: int  # inner entries of the tile in registers; the others are in shared memory
    inner: int
    outer: int
    shared: int  # bytes of shared memory, with the values that W multiplies and the sums


@functools.cache
def place_weights(
    cell: Cell, d: int, g: Geometry, size: int, backwards: bool
) -> WeightPlacement | None:
    """Where a block keeps its part of W, or of W' if backwards; None if it does not fit.

    d: units of the network; g: how it lies on the chip; size: bytes of a number.
    """
    inner = len(cell.read) * d  # entries that the product sums over
    outer = len(cell.gates) * g.units  # sums that the block computes
    if backwards:
        inner = len(cell.gates) * d
        outer = len(cell.read) * g.units
    if not cell.read:
        outer = 0  # no product: sums of it would take room that many units do not leave
    most = WEIGHTS // size  # entries of W that a thread may have
    if g.parts == 1:
        most += SHARED // (32 * g.warps * size)  # its share of the shared memory
    shape: Tile | None = Tile(4, 1, 32, 1, g.warps, 1)  # without W: the smallest there is
    if cell.read:
        shape = cheapest_tile(inner, outer, ROWS, g.warps, most)
    if shape is None:
        return None
    keep = min(shape.KC, WEIGHTS // size // shape.CC // 4 * 4)  # a multiple of 4, as KC is
    # What W multiplies and the sums of each WK, for each sample; then the weights not in registers.
    values = g.rows * shape.WK * (shape.LK * shape.KC + max(1, outer))
    values += (shape.KC - keep) * shape.CC * 32 * g.warps
    # Beside the values, as integers: the largest exponents of lam of four items and of the whole
    # group, and the exponents of the group's samples; 16 bytes for alignment.
    shared = size * values + 4 * (5 * g.rows + g.rows * g.blocks) + 16
    return WeightPlacement(shape, keep, inner, max(1, outer), shared)
