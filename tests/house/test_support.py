"""What the tests themselves rely on.

tests/support/compare.py accepts equal values and notices every kind of difference, last_digits.py
what rounding alone cannot do; tables are sampled.
"""

import math

import pytest
import torch

from compare import close, difference, same_bits
from last_digits import as_exact_as_float32_allows, nudged

F64 = torch.float64
ONE = torch.tensor([[1.0, 2.0, 2.0], [1e-9, 0.0, 0.0]], dtype=F64)
HOLE = torch.tensor([1.0, math.nan, math.inf], dtype=F64)


def off(y, row, column, by):
    """The same numbers, and one of them changed."""
    y = y.clone()
    y[row, column] += by
    return y


def test_close_accepts_what_is_close():
    close(ONE, ONE, 0)
    close({"a": [ONE], "b": HOLE}, {"a": [ONE], "b": HOLE}, 0)
    close(off(ONE, 0, 1, 1e-12), ONE, 1e-12)
    close(torch.zeros(0), torch.zeros(0), 0)
    close(torch.zeros(2), torch.zeros(2), 0)
    close(ONE.float(), ONE, 1e-6)  # the truth in float64
    close(torch.tensor([1e-3]), torch.tensor([0.0]), 1e-2, least=1)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (off(ONE, 0, 1, 3e-12), ONE),
        (torch.full((100,), 1 + 2e-12, dtype=F64), torch.ones(100, dtype=F64)),
        (
            off(torch.ones(100, 1, dtype=F64), 3, 0, 2e-12),
            torch.ones(100, 1, dtype=F64),
        ),  # by the norm it is close
        (HOLE.nan_to_num(1), HOLE),
        (-HOLE, HOLE),
        (torch.ones(2), torch.zeros(2)),
        (torch.tensor([math.nan]), torch.ones(1)),
        (ONE[:1], ONE),
        (ONE, ONE.float()),
        (None, ONE),
        ({"a": ONE}, {"b": ONE}),
        ([ONE], [ONE, ONE]),
    ],
    ids=[
        "entry",
        "all",
        "one of many",
        "NaN",
        "signs",
        "zero",
        "not finite",
        "shape",
        "type",
        "none",
        "names",
        "count",
    ],
)
def test_close_and_same_bits_notice_what_is_not(found, expected):
    with pytest.raises(AssertionError):
        close(found, expected, 1e-12)
    with pytest.raises(AssertionError):
        same_bits(found, expected)


def test_rows_have_their_own_scale():
    small = off(ONE, 1, 0, 1e-15)
    close(small, ONE, 1e-12)
    with pytest.raises(
        AssertionError, match=r"^lam: it is off by 1\.0e-06 \(relative, allowed is 1e-12\)"
    ):
        close(small, ONE, 1e-12, "lam", rows=True)
    assert difference(small, ONE, rows=True) == pytest.approx(1e-6)
    assert difference(2 * ONE, ONE) == 1


def test_same_bits_sees_every_bit():
    same_bits({"a": ONE}, {"a": ONE.clone()})
    for other in (off(ONE, 0, 0, 2**-52), ONE.float(), torch.where(ONE == 0, -0.0, ONE)):
        with pytest.raises(AssertionError, match="not the same"):
            same_bits([other], [ONE])
    with pytest.raises(AssertionError, match="not the same finite bits: it"):
        same_bits(HOLE, HOLE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(3))
def test_of_a_sampled_table_its_diagonals_run(row, column, thorough):
    assert thorough or (row + column) % 3 == 0


def ratio_of_differences(draw):
    """Of numbers of which two are close to each other: the first result is ill conditioned."""
    x = nudged(torch.tensor([1.0, 1.0001, 3.0]), draw)
    return [(x[1:2] - x[0:1]) * x[2], x[2:] ** 2]


def test_rounding_is_accepted_as_far_as_the_numbers_allow():
    ill, well = ratio_of_differences(0)
    as_exact_as_float32_allows([ill * (1 + 1e-4), well.float()], ratio_of_differences)


@pytest.mark.parametrize("factors", [(1 + 2e-2, 1), (1, 1 + 1e-5), (math.nan, 1)])
def test_what_rounding_cannot_do_is_noticed(factors):
    truth = ratio_of_differences(0)
    found = [y * factor for y, factor in zip(truth, factors, strict=True)]
    with pytest.raises(AssertionError):
        as_exact_as_float32_allows(found, ratio_of_differences)
