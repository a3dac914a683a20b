"""How many threads share the work of a compiled loop."""

from __future__ import annotations

import torch

WORK_PER_THREAD = 10_000_000  # operations; a thread is not started for fewer
# The same with W by step, which every thread must pack for itself, between products of torch's
# whose threads are still awake.
WORK_PER_THREAD_BY_STEP = 100_000_000
MOST_THREADS = 64  # as in vectors.h


def thread_count(work: int, most: int = MOST_THREADS, by_step: bool = False) -> int:
    """How many threads share `work` operations, at most `most` (one for each row, say).

    by_step: is W another one at every step?
    """
    per_thread = WORK_PER_THREAD_BY_STEP if by_step else WORK_PER_THREAD
    return max(1, min(torch.get_num_threads(), MOST_THREADS, most, work // per_thread))
