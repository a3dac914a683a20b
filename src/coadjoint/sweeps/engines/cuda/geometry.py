"""How a network lies on the chip: which part of W each block keeps, and each thread of a block.

A group of `parts` blocks owns some samples, and each block `units` of their units with the rows of
W that belong to them. A block's part of W is an inner x outer matrix: inner entries are summed
over, outer ones are the block's own. Its threads share it out in tiles, kept in registers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....cells.cell import Cell

WEIGHTS = 512  # bytes of W that a thread keeps in registers
SHARED = 180 << 10  # bytes of W in shared memory, where that keeps a network on one multiprocessor
WARPS = 8  # of a block
ROWS = 4  # samples of an item, twice as many for cells of several gates
TENSOR_WEIGHTS = (128, 192, 256, 320, 384)  # the same for tensor cores: the fewest that fit
TENSOR_REGISTERS = 120  # of W, its sums and its factors, beside which a step has room for its own
# The same with ENTRY_REGISTERS for each further entry of an item that a thread computes.
ENTRY_REGISTERS = 20
STEP_REGISTERS = 160
TRAFFIC = 14 << 20  # bytes that all blocks read per step; above it one product per step is faster
# Microseconds on an H200, fitted to steps of 256 to 1,024 units and 64 to 512 samples.
# With tensor cores (tensor_time):
TENSOR_STEP = 0.4
TENSOR_BACK = 4.8  # of an adjoint step, beside that
TENSOR_BACK_ITEM = 1.5  # of each further item of an adjoint step
TENSOR_INSTRUCTION = 0.0024  # of a warp
TENSOR_READ = 0.26  # of a million bytes that all blocks read
TENSOR_READ_BACK = 0.43  # the same in an adjoint step
TENSOR_SUM = 0.19  # of a thousand sums that a block adds up
CLUSTER_SUM = 0.14  # of a thousand sums that it gives to its cluster
TENSOR_UNEVEN = 1.5  # factor for units that fill no vectors, or not all blocks
# With one product per step (product_time):
PRODUCT_STEP = 12.0
PRODUCT_BACK = 6.0  # of an adjoint step, beside that
PRODUCT_RATE = 32e6  # operations in a microsecond
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

    @property
    def macros(self) -> dict[str, int]:
        """What product.cuh is told of it."""
        return dict(vars(self))


@dataclass(frozen=True)
class TensorTile:
    """Which part of W a warp has for tensor cores: MT x 16 outer entries, CHUNKS x 16 inner ones.

    The warps of a block lie as WC x WK over outer and inner entries.
    """

    MT: int
    CHUNKS: int
    WC: int
    WK: int

    @property
    def macros(self) -> dict[str, int]:
        """What tensor_product.cuh is told of it."""
        return dict(vars(self))


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
    tensor: int = 0  # bytes of W that a thread keeps in registers for tensor cores; 0: without
    cluster: int = 1  # parts that share out the inner entries of W; a divisor of `parts`
    columns: int = 1  # warps that share out the outer entries, with tensor cores: WC


@functools.cache
def choose_plain(
    cell: Cell, d: int, B: int, size: int, processors: int, limit: int
) -> Geometry | None:
    """The geometry for multiply-adds with the fewest parts that fits; None if none does.

    Fewer parts mean fewer blocks that wait for each other's values. The batch is spread over as
    many groups as the chip has room for; -(-a // b) is a / b rounded up.

    d: units; B: samples; size: bytes of a number; processors: multiprocessors of the chip;
    limit: bytes of shared memory that a block may have.
    """
    if not cell.read:  # no W: every sample is a group of one block
        return Geometry(d, 1, B, 1, 1, min(WARPS, -(-d // 32)))
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
        g = Geometry(units, needed_parts, groups, rows, blocks, WARPS)
        # W must fit for the forward and the tangent loop, and W' for the adjoint.
        if all(fits(cell, d, g, size, limit, backwards) for backwards in (False, True)):
            return g
    return None


def fits(cell: Cell, d: int, g: Geometry, size: int, limit: int, backwards: bool) -> bool:
    """Whether W fits, or W' if backwards; limit: bytes of shared memory that a block may have."""
    placement = place_weights(cell, d, g, size, backwards)
    return placement is not None and placement.shared <= limit


def traffic(cell: Cell, d: int, B: int, g: Geometry, size: int, backwards: bool) -> int:
    """Bytes that all blocks read of each other at a step: all values that W multiplies, each.

    In a cluster, each a part of them.
    """
    if g.parts == 1:
        return 0
    values = d // g.cluster * len(cell.gates if backwards else cell.read)
    return B * g.parts * values * size


def tensor_geometries(
    cell: Cell,
    d: int,
    B: int,
    processors: int,
    limit: int,
    backwards: bool,
    clusters: Sequence[tuple[int, int]],
) -> Iterator[Geometry]:
    """The geometries for tensor cores that fit, in float32.

    For each number of parts, as many groups as the chip has room for, and items of 8 to 32 samples.
    With clusters, for each of their sizes.
    """
    for cluster, count in ((1, processors), *clusters):
        if cluster > 1 and d % (4 * cluster):  # values are read four at a time
            continue
        for parts in range(cluster, min(d, cluster * count) + 1, cluster):
            units = -(-d // parts)
            if parts != -(-d // units):  # the last parts would be without units
                continue
            most_groups = min(-(-B // 8), cluster * count // parts)
            yield from geometries_of_parts(
                cell, d, B, limit, backwards, units, parts, most_groups, cluster
            )


def geometries_of_parts(
    cell: Cell,
    d: int,
    B: int,
    limit: int,
    backwards: bool,
    units: int,
    parts: int,
    most_groups: int,
    cluster: int,
) -> Iterator[Geometry]:
    """The geometries for tensor cores with so many parts that fit, with items of 8 to 32 samples.

    units: of a part; most_groups: for which the chip has room; cluster: parts of a cluster.
    """
    samples = -(-B // most_groups)  # of a group
    for rows in (8, 16, 24, 32):
        blocks = -(-samples // rows)
        groups = -(-B // (rows * blocks))
        for columns, kept in itertools.product(_divisors(WARPS), TENSOR_WEIGHTS):
            g = Geometry(units, parts, groups, rows, blocks, WARPS, kept, cluster, columns)
            if fits(cell, d, g, 4, limit, backwards):
                yield g


def tensor_time(cell: Cell, d: int, B: int, backwards: bool, g: Geometry) -> float:
    """About how long a step takes with tensor cores, in microseconds."""
    placement = place_weights(cell, d, g, 4, backwards)
    assert placement is not None
    assert isinstance(placement.shape, TensorTile)
    shape = placement.shape
    # For each chunk a warp splits the values of its samples, for each tile its part of W, and for
    # each tile of 8 samples it multiplies both.
    samples = g.rows // 8
    instructions = shape.CHUNKS * (12 * samples + shape.MT * (24 + 32 * samples))
    item = instructions * TENSOR_INSTRUCTION
    thousands = g.rows * placement.outer / 1000
    item += thousands * shape.WK * TENSOR_SUM
    if g.cluster > 1:
        item += thousands * CLUSTER_SUM
    time = TENSOR_STEP + item * g.blocks
    if backwards:
        time += TENSOR_BACK + TENSOR_BACK_ITEM * (g.blocks - 1)
    read = TENSOR_READ_BACK if backwards else TENSOR_READ
    time += traffic(cell, d, B, g, 4, backwards) * read / 1e6
    is_even = d % g.units == 0 and g.units % 4 == 0
    return time if is_even else time * TENSOR_UNEVEN


def product_time(cell: Cell, d: int, B: int, backwards: bool) -> float:
    """About how long a step takes with one product by a library, in microseconds."""
    operations = 2 * B * d * d * len(cell.gates) * len(cell.read)
    return PRODUCT_STEP + PRODUCT_BACK * backwards + operations / PRODUCT_RATE


@functools.cache
def choose_geometry(
    cell: Cell,
    d: int,
    B: int,
    size: int,
    processors: int,
    limit: int = LIMIT,
    backwards: bool = False,
    clusters: tuple[tuple[int, int], ...] = (),
) -> Geometry | None:
    """How a network lies on the chip; None where one product for each step is faster.

    Tensor cores multiply where multiply-adds would take a step in several items, each of which
    waits for other blocks.

    d: units; B: samples; size: bytes of a number; processors: multiprocessors of the chip;
    limit: bytes of shared memory that a block may have; backwards: for the adjoint loop;
    clusters: (size, how many the chip has room for), for each size of clusters.
    """
    plain = choose_plain(cell, d, B, size, processors, limit)
    waits = plain is None or min(plain.parts, plain.blocks) > 1
    if size == 4 and cell.read and waits:
        time = functools.partial(tensor_time, cell, d, B, backwards)
        candidates = tensor_geometries(cell, d, B, processors, limit, backwards, clusters)
        best = min(candidates, key=time, default=None)
        if best is not None:
            return best if time(best) < product_time(cell, d, B, backwards) else None
    if plain is None or traffic(cell, d, B, plain, size, backwards) > TRAFFIC:
        return None
    return plain


class WeightPlacement(NamedTuple):
    """Where a block keeps its part of W: a tile for each thread, or for each warp."""

    shape: Tile | TensorTile
    keep: int  # inner entries, or chunks, of the tile in registers; the others: shared memory
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
    # Entries that the product sums over, and sums that the block computes: each of a cluster has a
    # part of the former, and computes its part of all sums of the cluster.
    inner = len(cell.read) * (d // g.cluster)
    outer = len(cell.gates) * g.units * g.cluster
    if backwards:
        inner = len(cell.gates) * (d // g.cluster)
        outer = len(cell.read) * g.units * g.cluster
    if not cell.read:
        outer = 0  # no product: sums of it would take room that many units do not leave
    if g.tensor:
        return place_for_tensor_cores(inner, outer, g)
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
    return WeightPlacement(shape, keep, inner, max(1, outer), size * values + integers(g))


def integers(g: Geometry) -> int:
    """Bytes of shared memory for integers, and 16 for alignment.

    The largest exponents of lam of four items and of the whole group, and the exponents of the
    group's samples.
    """
    return 4 * (5 * g.rows + g.rows * g.blocks) + 16


def place_for_tensor_cores(inner: int, outer: int, g: Geometry) -> WeightPlacement | None:
    """Where a block keeps its part of W for tensor cores, in float32; None if it does not fit.

    inner, outer: the block's sums are over `inner` entries, and there are `outer` of them.
    """
    samples = g.rows // 8
    WC = g.columns
    WK = g.warps // WC
    shape = TensorTile(-(-outer // (16 * WC)), -(-inner // (16 * WK)), WC, WK)
    most = g.tensor // 4 // (8 * shape.MT)  # chunks that a thread keeps in registers
    if most == 0:
        return None
    keep = min(shape.CHUNKS, most)
    registers = 8 * shape.MT * keep + (4 * shape.MT + 8) * samples
    entries = -(-g.rows * g.units // (32 * g.warps))  # of an item, for each thread
    if registers > TENSOR_REGISTERS:
        return None
    if registers + ENTRY_REGISTERS * (entries - 1) > STEP_REGISTERS:
        return None
    # As in tensor_product.cuh: IP, MORE and SUMS; and, in exchange.cuh, SHARES.
    values = g.rows * (16 * shape.CHUNKS * WK + 16)
    values += (shape.CHUNKS - keep) * shape.MT * 8 * 32 * g.warps
    values += WK * g.rows * (16 * shape.MT * WC + 4)
    if g.cluster > 1:
        values += 2 * g.rows * outer
    return WeightPlacement(shape, keep, inner, outer, 4 * values + integers(g))
