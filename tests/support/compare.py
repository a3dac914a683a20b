"""Compare values with expected ones, to a relative tolerance or bit for bit.

Both functions take a tensor, or a dict or a sequence of such values.
"""

from __future__ import annotations

import torch


def close(found, expected, tolerance, what="", rows=False, least=0.0):
    """Assert |found - expected| <= tolerance max(|expected|, least) for each tensor, where |y| is
    the norm, and again where it is the largest entry.

    rows: instead, the largest entry of each row (the last axis). Names and shapes must be the same,
    and so must the places of NaN and of infinities, and types unless float64 is expected."""
    wrong = [
        f"{name or 'it'} is off by {apart:.1e}"
        for name, apart in differences(found, expected, rows, least)
        if not apart <= tolerance
    ]
    assert not wrong, f"{what}: {', '.join(wrong)} (relative, allowed is {tolerance:.0e})"


def difference(found, expected, rows=False, least=0.0):
    """The smallest tolerance at which `close` holds."""
    return max((apart for _, apart in differences(found, expected, rows, least)), default=0.0)


def same_bits(found, expected):
    """Assert that names, types, shapes and every bit are the same, and every number finite."""
    wrong = []
    for name, a, b in pairs(found, expected):
        if not (a.dtype == b.dtype and torch.isfinite(b).all() and torch.equal(bits(a), bits(b))):
            wrong.append(name or "it")
    assert not wrong, f"not the same finite bits: {', '.join(wrong)}"


def differences(found, expected, rows, least):
    """(name, relative difference) of each tensor; infinite where NaN or infinities are
    elsewhere.
    """
    sizes = (
        [lambda y: y.abs().amax(-1)]
        if rows
        else [torch.linalg.vector_norm, lambda y: y.abs().max()]
    )
    for name, a, b in pairs(found, expected):
        a, b = (y.detach().cpu().double() for y in (a, b))
        if not b.numel():
            continue
        if not all(
            torch.equal(kind(a), kind(b)) for kind in (torch.isnan, torch.isposinf, torch.isneginf)
        ):
            yield name, float("inf")
            continue
        a, b = (y.nan_to_num(0, 0, 0) for y in (a, b))
        for size in sizes:
            apart = size(a - b)
            yield name, float(torch.where(apart == 0, 0.0, apart / size(b).clamp_min(least)).max())


def pairs(found, expected, name=""):
    """(name, tensor found, tensor expected), after a look at names, shapes and types."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (
            f"{name}: {sorted(found)}, expected {sorted(expected)}"
        )
        for key in expected:
            yield from pairs(found[key], expected[key], f"{name} {key}".strip())
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (
            f"{name}: {len(found)} tensors, expected {len(expected)}"
        )
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            yield from pairs(a, b, f"{name} {i}".strip())
    else:
        assert isinstance(found, torch.Tensor), f"{name}: {found!r} is not a tensor"
        assert found.shape == expected.shape, (
            f"{name}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
        )
        same_type = found.dtype == expected.dtype or expected.dtype == torch.float64
        assert same_type, f"{name}: {found.dtype}, expected {expected.dtype}"
        yield name, found, expected


def bits(y):
    """The numbers as integers, so that 0 differs from -0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    y = y.detach().contiguous()
    return y.view(kinds[y.element_size()]) if y.element_size() in kinds else torch.view_as_real(y)


def equal(a, b):
    """Whether two dicts hold equal tensors under the same names."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
