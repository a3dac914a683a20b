"""What the last digit of float32 matters: how far a result moves when its inputs are rounded.

Where a computation is ill conditioned, float32 cannot give all digits, whatever computes it and on
whatever processor. So a result in float32 is compared with the one in float64 by what changes of
the inputs by half a unit of their last digit do to the latter: rounding inside the computation
does as much at each step.
"""

from __future__ import annotations

import torch

HALF_DIGIT = 2.0**-24  # of a float32, relative
DRAWS = 4
MOST = 10  # times what one rounding of all inputs does: four sweeps round several times in a step
ILL = 0.2  # of an array: where so much may be wrong, nothing is tested


def nudged(y, draw):
    """y in float64, its entries changed at random by up to half a digit; draw 0 changes nothing."""
    y = y.detach().double()
    if draw == 0:
        return y.clone()
    generator = torch.Generator().manual_seed(1000 * draw + y.numel())
    noise = 2 * torch.rand(y.shape, generator=generator, dtype=torch.float64) - 1
    return y * (1 + HALF_DIGIT * noise)


def size(y):
    return float(y.double().flatten().norm())


def as_exact_as_float32_allows(found, compute):
    """`found`, arrays in float32, are those of compute(0) up to rounding; an AssertionError if not.

    compute(draw) -> the arrays in float64, from inputs that are `nudged` by this draw.
    """
    truth = compute(0)
    moved = [compute(draw) for draw in range(1, DRAWS + 1)]
    for i, (y, true) in enumerate(zip(found, truth, strict=True)):
        rounded = max(size(arrays[i] - true) for arrays in moved) + HALF_DIGIT * size(true)
        assert MOST * rounded <= ILL * size(true), f"array {i} is too ill conditioned to be tested"
        error = size(y.double() - true)
        assert error <= MOST * rounded, f"array {i}: {error:.1e} > {MOST * rounded:.1e}"
