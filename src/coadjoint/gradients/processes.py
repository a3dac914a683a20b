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


def add_up_and_tell(values: Tensor, told: float) -> tuple[Tensor, list[float]]:
    """The sum of `values` over all processes, and what each of them told, by one all-reduce.

    Every process writes into a place of its own, so what is told is exact.
    """
    P = process_count()
    if P == 1:
        return values, [told]
    places = values.new_zeros(P)
    places[process_number()] = told
    total = to_sent(torch.cat([values, places]))
    with noticing_deaths():
        dist.all_reduce(total)
    return total[:-P].to(values.device), total[-P:].tolist()


def sum_rows(rows: Tensor, count: int, notes: int) -> tuple[Tensor, Tensor]:
    """The sum [width] of the rows of all processes in their order, and the end of each row.

    rows   [k, width], those of this process; see `own_shards` for their numbers in 0..count - 1
    notes  how many entries at the end of each row every process reads, [count, notes]

    The bits do not depend on the number of processes, nor on how rows are sent: each entry is added
    up in the order of the rows. With k rows each, P processes send (P - 1) k rows each, or, if rows
    are large, (P - 1) / P (k + 1) by segments.
    """
    is_large = rows.shape[1] * rows.element_size() >= LARGE_ROW
    if process_count() > 1 and is_large:
        return sum_by_segments(rows, count, notes)
    return gather_and_sum(rows, count, notes)


def gather_and_sum(rows: Tensor, count: int, notes: int) -> tuple[Tensor, Tensor]:
    """What `sum_rows` returns: each process is sent all rows and adds them up."""
    P = process_count()
    in_order = list(rows)
    if P > 1:
        sent = rows_to_send(rows, count)
        received = sent.new_empty(P, *sent.shape)
        with noticing_deaths():
            dist.all_gather(list(received), sent)
        in_order = [received[k % P, k // P] for k in range(count)]
    told = torch.stack([row[-notes:] for row in in_order])
    return sum_in_order(in_order).to(rows.device), told.to(rows.device)


def sum_by_segments(rows: Tensor, count: int, notes: int) -> tuple[Tensor, Tensor]:
    """What `sum_rows` returns: each process adds up one segment of all rows and sends the sum.

    Notes travel with each segment, so that they need no message of their own.
    """
    P = process_count()
    width = rows.shape[1]
    segment = -(-width // P)
    own = rows_to_send(rows, count)
    sent = own.new_zeros(P, len(own), segment + notes)
    for p in range(P):
        part = own[:, p * segment : (p + 1) * segment]  # shorter, or empty, at the end
        sent[p, :, : part.shape[1]] = part
    sent[:, :, segment:] = own[:, width - notes :]
    received = torch.empty_like(sent)
    with noticing_deaths():
        dist.all_to_all_single(received, sent)
    in_order = [received[k % P, k // P] for k in range(count)]
    total = sum_in_order([row[:segment] for row in in_order])
    whole = total.new_empty(P, segment)
    with noticing_deaths():
        dist.all_gather(list(whole), total)
    told = torch.stack([row[segment:] for row in in_order])
    return whole.view(-1)[:width].to(rows.device), told.to(rows.device)


def sum_in_order(rows: Sequence[Tensor]) -> Tensor:
    """The sum of rows, from the first to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def rows_to_send(rows: Tensor, count: int) -> Tensor:
    """The rows of this process, filled up with zeros: all processes must send as many."""
    most = -(-count // process_count())
    missing = rows.new_zeros(most - len(rows), rows.shape[1])
    return to_sent(torch.cat([rows, missing]) if len(missing) else rows)


def own_shards(count: int) -> range:
    """The numbers of the shards, of 0..count - 1, that this process evaluates."""
    return range(process_number(), count, process_count())


def to_sent(values: Tensor) -> Tensor:
    """The values where they can be sent from: gloo sends from the CPU alone."""
    if values.is_cuda and "nccl" not in str(dist.get_backend_config()):
        return values.cpu()
    return values


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
