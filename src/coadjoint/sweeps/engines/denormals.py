"""Denormal numbers as zeros.

Vanishing costates are made of them, and some CPUs take many times longer for them than for zeros (a
Zen 4 does not).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """Denormal numbers count as zero inside; the caller's setting is restored at the end.

    torch has no function that returns the setting, so it is found out: 1e-310, which is denormal,
    becomes zero in a product if it is on.
    """
    was_on = (torch.tensor(1e-310, dtype=torch.float64) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_on)
