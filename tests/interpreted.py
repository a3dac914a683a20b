"""The Triton engine under Triton's interpreter, against the definition: a process of its own (see test_triton.py), because
Triton decides when it is imported. Arguments: names of MODES."""

from __future__ import annotations

import sys

import torch
import triton.runtime.interpreter as interpreter
from triton import knobs

from coadjoint.sweeps import triton
from problems import ADJOINT, CELLS, SCALED, TANGENT, Problem, poisoned

F32, F64 = torch.float32, torch.float64
SOME = {"adjoint": ("s sa", "s_last link", "s s_last k_last scaled"), "tangent": ("g ga link",)}
EVERY = {"adjoint": (*ADJOINT, *SCALED), "tangent": TANGENT}
UNIFORM, RAGGED = [4] * 3, [5, 4, 4, 2]
MODES = {  # settings of the engine, [(cell, samples of each step, d, dtype, sources)]
    "on chip": ({}, [
        *((name, sizes, d, dtype, SOME) for name in CELLS for sizes, d, dtype in (([3], 3, F64), (RAGGED, 5, F32))),
        ("elman", [1], 1, F32, EVERY), ("lstm", [2] * 2, 33, F32, SOME), ("pair", RAGGED, 5, F64, EVERY),
    ]),
    "blocks": ({"ROWS": 1}, [
        *((name, RAGGED, 5, F32, SOME) for name in CELLS),
        ("lstm", [7] * 3, 3, F64, SOME), ("odd", [8, 7, 7, 5, 1], 5, F32, EVERY),
    ]),
    "too large": ({"ON_CHIP": 16}, [
        *((name, UNIFORM, 5, F64, SOME) for name in CELLS),
        ("lstm", RAGGED, 31, F32, SOME), ("rate", [2, 1], 70, F32, SOME), ("gru", RAGGED, 5, F32, EVERY),
    ]),
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
    return {"on chip": g.shape.on_chip, "blocks": not g.shape.on_chip, "too large": not g.shape.resident}[mode]


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
            if problem.cell.read and problem.rows.B > 1:
                assert holds(mode, g), f"{case} lies otherwise: {g}"
            try:
                with poisoned(triton.Launch):
                    problem.against(triton, **given)
            except AssertionError as error:
                raise SystemExit(f"{case}: {error}") from None
            print(case, flush=True)


if __name__ == "__main__":
    main()
