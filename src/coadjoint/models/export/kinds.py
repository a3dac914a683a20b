"""Which networks can be exported."""

from __future__ import annotations

from typing import NoReturn

from ...errors import Unsupported
from ...networks.interface import Net


def refuse(net: Net) -> NoReturn:
    """Refuse a network of a kind that cannot be exported."""
    raise Unsupported(
        f"{type(net).__name__}: networks whose answers are sequences cannot be exported, as they "
        "write one token after the other. Networks with one answer for a sequence, a step or a "
        "sample can be."
    )
