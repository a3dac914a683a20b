"""The Triton engine under Triton's interpreter, against the definition: a process of its own (see test_triton.py), because
Triton decides when it is imported. Arguments: names of MODES."""

from __future__ import annotations

import sys

import torch
import triton.runtime.interpreter as interpreter
from triton import knobs

from coadjoint.sweeps import triton
from problems import ADJOINT, CELLS, NEWER, ONE, SCALED, TANGENT, Problem, poisoned

F32, F64 = torch.float32, torch.float64
SOME = {"adjoint": ("s sa", "s_last link", "s s_last k_last scaled"), "tangent": ("g ga link",)}
EVERY = {"adjoint": (*ADJOINT, *SCALED), "tangent": TANGENT}
FEW = [2, 1]  # samples of each step
MODES = {  # settings of the engine, [(cell, samples of each step, d, dtype, sources)]
    "on chip": ({}, [
        *((name, FEW, 3, F64, SOME) for name in CELLS if name != "mixed"), ("mixed", FEW, 3, F32, SOME),
        ("elman", [1], 1, F32, SOME), ("lstm", [2], 33, F32, SOME), ("pair", FEW, 5, F32, EVERY),
    ]),
    "blocks": ({"ROWS": 1}, [
        ("elman", [3, 2], 5, F64, SOME), ("lstm", [5, 5], 3, F32, SOME), ("odd", [3, 1], 1, F32, SOME),
        ("rate", [2, 2], 31, F32, SOME), ("lstm-1997-truncated", [3, 2], 5, F64, ONE),
    ]),
    "too large": ({"ROWS": 1, "ON_CHIP": 16}, [
        ("leaky", [3, 3], 5, F64, SOME), ("lstm", [3, 2], 31, F32, SOME), ("rate", [2, 1], 70, F32, SOME),
        ("pair", [3, 1], 5, F32, SOME), ("lstm-1997-truncated", [3, 2], 5, F32, ONE),
    ]),
    "too large, few samples": ({"ON_CHIP": 16}, [("leaky", FEW, 5, F64, SOME)]),
    "a root": ({}, [("mixed", FEW, 3, F64, SOME)]),
    "the other cells": ({}, [(name, FEW, 3, (F32, F64)[i % 2], ONE) for i, name in enumerate(NEWER)]),
}  # fmt: skip


def patch() -> None:
    """numpy 2.4 makes no int of an array of one entry; the interpreter asks it to."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def holds(mode: str, g) -> bool:
    """Does the network lie on the chip as the mode says?"""
    resident, whole = not mode.startswith("too large"), mode in ("on chip", "a root", "the other cells")
    return g.shape.resident == resident and (g.shape.blocks == 1) == whole


def main() -> None:
    assert knobs.runtime.interpret, "expected TRITON_INTERPRET=1"
    patch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for mode in sys.argv[1:]:
        settings, table = MODES[mode]
        for name, value in settings.items():
            setattr(triton, name, value)
        triton.geometry.cache_clear()
        for name, sizes, d, dtype, given in table:
            case = f"{mode}: {name}, samples {sizes}, d = {d}, {str(dtype)[6:]}"
            problem = Problem(name, sizes, d, dtype)
            g = triton.geometry(problem.cell, d, problem.rows.B, dtype, problem.rows.uniform, 1)
            if problem.cell.read:
                assert holds(mode, g), f"{case} lies otherwise: {g}"
            try:
                with poisoned(triton.Launch):
                    problem.against(triton, **given)
            except AssertionError as error:
                raise SystemExit(f"{case}: {error}") from None
            print(case, flush=True)


if __name__ == "__main__":
    main()
