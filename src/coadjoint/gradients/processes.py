"""The processes that share a gradient: who they are, and what they tell each other.

Without a process group of torch.distributed there is one process, and nothing is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LostProcess

LARGE_ROW = 1 << 19  # bytes from which on rows are exchanged by segments; see docs/scale.md


def is_group_there() -> bool:
    """Whether torch.distributed has a process group."""
    return dist.is_available() and dist.is_initialized()


def process_count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if is_group_there() else 1


def process_number() -> int:
    """The number of this process, 0..process_count() - 1."""
    return dist.get_rank() if is_group_there() else 0


T = TypeVar("T")
NOTICED: list[str] = []  # what was raised about processes that are gone


@contextlib.contextmanager
def noticing_deaths() -> Iterator[None]:
    """Inside, what torch raises when another process is gone becomes a LostProcess."""
    try:
        yield
    except RuntimeError as error:
        NOTICED.append(str(error))
        # torch has one kind of error for a closed connection, a timeout and its own mistakes.
        raise LostProcess(
            f"one of the {process_count()} processes of this run has died, or could not be "
            "reached, so the run has ended."
        ) from error


def add_up(values: Tensor) -> Tensor:
    """The sum of `values` over all processes, on all of them."""
    if process_count() == 1:
        return values
    total = to_sent(values)
    with noticing_deaths():
        dist.all_reduce(total)
    return total.to(values.device)


def add_up_and_tell(values: Tensor, told: float) -> tuple[Tensor, list[float]]:
    """The sum of `values` over all processes, and what each of them told, by one all-reduce.

    Every process writes into a place of its own, so what is told is exact.
    """
    if process_count() == 1:
        return values, [told]
    places = values.new_zeros(process_count())
    places[process_number()] = told
    total = add_up(torch.cat([values, places]))
    return total[: len(values)], total[len(values) :].tolist()


def sum_rows(rows: Tensor, count: int, notes: int) -> tuple[Tensor, Tensor]:
    """The sum [width] of the rows of all processes in their order, and their last entries.

    rows   [k, width], those of this process; see `own_shards` for their numbers in 0..count - 1
    notes  how many entries at the end of each row every process reads, [count, notes]

    The bits do not depend on the number of processes, nor on how rows are sent: each entry is added
    up in the order of the rows. Every process sends its k rows to the P - 1 others, or, if they are
    large and it is less, by segments: (P - 1) / P (k + 1) rows.
    """
    P = process_count()
    k = -(-count // P)  # of every process, rounded up: all must send as many
    size = rows.shape[1] * rows.element_size()
    if P > 1 and size >= LARGE_ROW and P * k > k + 1:
        return sum_by_segments(rows, count, notes)
    gathered = gather_rows(rows, count)
    return sum_in_order(gathered.unbind()), gathered[:, -notes:]


def sum_in_order(rows: Sequence[Tensor]) -> Tensor:
    """The sum of rows, from the first to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def gather_rows(rows: Tensor, count: int) -> Tensor:
    """The rows of all processes, [count, width], on all of them.

    Row k is that of process k mod P, its (k div P)-th one: see `own_shards`.
    """
    P = process_count()
    if P == 1:
        return rows
    most = -(-count // P)
    sent = to_sent(rows)
    padded = sent.new_zeros(most, rows.shape[1])
    padded[: len(rows)] = sent
    received = padded.new_empty(P * most, rows.shape[1])
    with noticing_deaths():
        dist.all_gather(list(received.chunk(P)), padded)
    order = [k % P * most + k // P for k in range(count)]
    return received[order].to(rows.device)


def sum_by_segments(rows: Tensor, count: int, notes: int) -> tuple[Tensor, Tensor]:
    """What `sum_rows` returns: each process adds up one segment of all rows and sends the sum.

    Notes travel with each segment, so that they need no message of their own.
    """
    P = process_count()
    most = -(-count // P)
    width = rows.shape[1]
    segment = -(-width // P)
    own = to_sent(rows)
    sent = own.new_zeros(P, most, segment + notes)
    for p in range(P):
        part = own[:, p * segment : (p + 1) * segment]  # shorter, or empty, at the end
        sent[p, : len(own), : part.shape[1]] = part
    sent[:, : len(own), segment:] = own[:, width - notes :]
    received = torch.empty_like(sent)
    with noticing_deaths():
        dist.all_to_all_single(received, sent)
    in_order = [received[k % P, k // P] for k in range(count)]
    total = sum_in_order([row[:segment] for row in in_order])
    whole = total.new_empty(P * segment)
    with noticing_deaths():
        dist.all_gather(list(whole.chunk(P)), total)
    told = torch.stack([row[segment:] for row in in_order])
    return whole[:width].to(rows.device), told.to(rows.device)


def own_shards(count: int) -> range:
    """The numbers of the shards, of 0..count - 1, that this process evaluates."""
    return range(process_number(), count, process_count())


def to_sent(values: Tensor) -> Tensor:
    """The values where they can be sent from: gloo sends from the CPU alone."""
    if values.is_cuda and "nccl" not in str(dist.get_backend_config()):
        return values.cpu()
    return values.clone()


def gather_objects(value: T) -> list[T]:
    """The values of all processes, in their order, on all of them."""
    P = process_count()
    values = [value] * P  # to be overwritten, but for a process that is alone
    if P == 1:
        return values
    with noticing_deaths():
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def drawing_by(number: int) -> Iterator[None]:
    """Inside, torch's random numbers are those of this seed; afterwards they go on as before."""
    before = torch.get_rng_state()
    torch.manual_seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(before)
