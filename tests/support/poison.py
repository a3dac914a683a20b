"""Fill arrays that the package allocates without values: floats with NaN, integers with -77.

`sweeps.memory.empty` reuses storages, with whatever the last sweep left in them. A loop that
forgets a row would then be right in a fresh process and wrong in the next call. Poisoned, it always
fails.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch.utils._device import _device_constructors

from coadjoint.sweeps import memory
from coadjoint.sweeps.pointers import is_traced

MOST = 2**24  # numbers; tests that ask for too much memory are not to wait for it


def fill(y):
    if not 0 < y.numel() <= MOST or y.is_meta or is_traced(y):
        return y
    with torch.no_grad():
        return y.fill_(torch.nan if y.is_floating_point() or y.is_complex() else -77)


def where_the_package_asks(make):
    """The same function, whose arrays are filled if a module of the package has called it."""

    @functools.wraps(make)
    def made(*args, **options):
        y = make(*args, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return fill(y) if caller.startswith("coadjoint.") else y

    return made


def install():
    """For the rest of the process."""
    plain = memory.empty

    @functools.wraps(plain)
    def empty(shape, like):
        return fill(plain(shape, like))

    for name, module in list(
        sys.modules.items()
    ):  # modules that are imported later find the new one
        if name.startswith("coadjoint.") and getattr(module, "empty", None) is plain:
            module.empty = empty
    # `with torch.device("meta")` knows functions by identity: it is to remember torch's own
    _device_constructors()
    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(holder, name, where_the_package_asks(getattr(holder, name)))
