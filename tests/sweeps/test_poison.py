"""Arrays that the package allocates without values are NaN in tests until something is written."""

from __future__ import annotations

import torch

from coadjoint.sweeps import affine, memory
from coadjoint.sweeps.engines.c import engine as c_engine


def test_arrays_without_values_are_nan():
    like = torch.zeros(1)
    for shape in ((3, 2), (memory.SMALL, 1)):
        y = memory.empty(shape, like)
        assert y.isnan().all()
        y.zero_()
        del y
        assert memory.empty(shape, like).isnan().all()  # the same storage again, perhaps
    assert affine.empty is c_engine.empty is memory.empty


def test_arrays_that_torch_makes_for_the_package_are_nan():
    here = {"torch": torch, "like": torch.zeros(1), "__name__": "coadjoint.somewhere"}
    for made in ("torch.empty(3)", "torch.empty_like(like)", "like.new_empty(2, 2)"):
        assert eval(made, here).isnan().all()
    assert (eval("torch.empty(3, dtype=torch.int32)", here) == -77).all()
