"""Compiled products over rows: against numpy in float64, whatever is computed beside them."""

import numpy as np
import pytest
import torch

from coadjoint.cells import library
from coadjoint.sweeps import affine, chunks
from coadjoint.sweeps.engines.c import compiler, engine, row_products, threads
from coadjoint.sweeps.plan import SweepPlan
from coadjoint.sweeps.rows import Rows

pytestmark = pytest.mark.skipif(
    compiler.compiler_setup().refusal is not None, reason="needs a C compiler"
)
SHAPES = ((1, 1), (1, 5), (3, 5), (50, 6), (6, 50), (57, 50), (16, 48), (49, 7), (200, 9), (9, 97))
SIZES = ([5] * 9 + [2] * 8, [1] * 7, [8] * 700, [64] * 40 + [63] * 20 + [1] * 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])


@pytest.fixture(autouse=True)
def compiled_at_any_size(monkeypatch):
    monkeypatch.setattr(chunks, "COMPILED_FROM", 0)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def arrays(rows, n, m, dtype):
    """y [N, n], and r [N, m], which are some columns of a wider array."""
    return torch.randn(rows.N, n, dtype=dtype), torch.randn(rows.N, m + 5, dtype=dtype)[
        :, 3 : 3 + m
    ]


def assert_near(found, y, r, dtype):
    """Is found the sum of y_i r_i', as near as the sizes of its terms allow?"""
    y, r = y.double().numpy(), r.double().numpy()
    error = np.abs(found.double().numpy() - y.T @ r)
    bar = 4e-7 if dtype == torch.float32 else 1e-15
    assert (error <= bar * (np.abs(y).T @ np.abs(r))).all()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=["ragged", "short", "long", "long-ragged"])
def test_sums_of_products_and_of_rows(sizes, shape, dtype):
    rows = Rows(sizes)
    y, r = arrays(rows, *shape, dtype)
    assert chunks.compiled_products(rows, y, shape[1], (r,)) is row_products
    product, total = chunks.sum_products(rows, y, r), chunks.sum_rows(rows, y)
    assert product.shape == shape
    assert product.is_contiguous()
    assert product.dtype == total.dtype == dtype
    assert_near(product, y, r, dtype)
    assert_near(total[:, None], y, torch.ones(rows.N, 1), dtype)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_do_not_depend_on_what_is_summed_beside_them(shape, dtype):
    rows = Rows(SIZES[3])
    y, r = arrays(rows, *shape, dtype)
    other = torch.randn(rows.N, 13, dtype=dtype)
    alone = [chunks.sum_products(rows, y, r), chunks.sum_rows(rows, y)]
    for beside in ((r, None), (other, r, None), (other, other, r, None)):
        joined = chunks.sum_joined(rows, y, beside)
        assert all(map(torch.equal, joined[-2:], alone))
        assert all(part.is_contiguous() for part in joined)
    assert torch.equal(chunks.sum_products(rows, r, y), alone[0].t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_and_segments_leave_the_bits_alone(monkeypatch, shape):
    rows = Rows(SIZES[3])
    y, r = arrays(rows, *shape, torch.float32)
    M, b = torch.randn(shape[1], shape[0]), torch.randn(shape[1])

    def results():
        return [
            chunks.sum_products(rows, y, r),
            chunks.sum_rows(rows, y),
            *chunks.sum_joined(rows, y, (r, None)),
            row_products.affine_rows(y, M, b),
        ]

    expected = results()
    monkeypatch.setattr(threads, "WORK_PER_THREAD", 1)
    for count in (2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=count: n)
        assert all(map(torch.equal, results(), expected))
    cut = rows.chunk_steps
    assert cut < rows.T
    early, late = rows.part(0, cut), rows.part(cut, rows.T)
    of_product, of_rows = chunks.Sum(), chunks.Sum()
    for part, begin in ((late, early.N), (early, 0)):
        own = slice(begin, begin + part.N)
        of_product.add_product(part, y[own], r[own])
        of_rows.add_rows(part, y[own])
    assert torch.equal(of_product.total(), expected[0])
    assert torch.equal(of_rows.total(), expected[1])


def test_a_sum_may_begin_with_torch_and_go_on_compiled(monkeypatch):
    rows = Rows([4] * 10)
    y, r = arrays(rows, 5, 3, torch.float64)
    total = chunks.Sum()
    with torch.enable_grad():
        leaf = y.clone().requires_grad_()
        total.add_product(rows, leaf, r)
        assert total.value.requires_grad
    held = total.value.detach()
    before = held.clone()
    total.add_product(rows, y, r)
    assert torch.equal(held, before)
    assert_near(total.total(), torch.cat([y, y]), torch.cat([r, r]), torch.float64)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(1, 1), (6, 50), (50, 6), (37, 97), (300, 49)], ids=str)
def test_affine_rows(shape, transposed, dtype):
    n, m = shape
    y = torch.randn(531, n + 2, dtype=dtype)[:, 1 : 1 + n]
    M = torch.randn(n, m, dtype=dtype).t() if transposed else torch.randn(m, n, dtype=dtype)
    b = torch.randn(m, dtype=dtype)
    for bias in (b, None):
        found = row_products.affine_rows(y, M, bias).double().numpy()
        yd, Md = y.double().numpy(), M.double().numpy()
        bd = 0 if bias is None else bias.double().numpy()
        bar = 2e-6 if dtype == torch.float32 else 1e-14
        size = np.abs(yd) @ np.abs(Md.T) + np.abs(bd)
        assert (np.abs(found - (yd @ Md.T + bd)) <= bar * size).all()


UNUSUAL = {
    "same rows": lambda: torch.randn(1, 3).expand(7, 3),
    "same columns": lambda: torch.randn(7, 1).expand(7, 3),
    "same numbers": lambda: torch.randn(1, 1).expand(7, 3),
    "columns": lambda: torch.randn(3, 7).t(),
    "negative": lambda: torch.randn(7, 3, dtype=torch.complex64).conj().imag,
    "every other": lambda: torch.randn(14, 3)[::2],
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_arrays_that_do_not_lie_row_after_row(make):
    y, r = make(), make()
    for first, second in ((y, r), (y, torch.randn(7, 2)), (torch.randn(7, 2), r)):
        expected = first.double().t() @ second.double()
        for found in (
            chunks.sum_products(None, first, second),
            chunks.sum_joined(None, first, (second, None))[0],
        ):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        total = chunks.sum_rows(None, first)
        torch.testing.assert_close(total, first.sum(0), rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_where_it_is():
    y, r = torch.ones(600, 20), torch.ones(600, 3)
    y[300, 7] = torch.nan
    r[599, 1] = torch.inf
    found = chunks.sum_products(None, y, r)
    assert found[7].isnan().all()
    assert found[:7, 1].isposinf().all()
    assert (found[:7, 0] == 600).all()
    assert chunks.sum_rows(None, y).isnan().nonzero().tolist() == [[7]]


def test_small_or_unusual_sums_are_left_to_torch(monkeypatch):
    y, r = torch.randn(100, 50), torch.randn(100, 50)
    assert chunks.compiled_products(None, y, 50, (r,)) is row_products
    with torch.enable_grad():
        assert chunks.compiled_products(None, y, 50, (r,)) is None
    assert chunks.compiled_products(None, y.bfloat16(), 50, (r,)) is None
    assert chunks.compiled_products(None, y, 50, (r.double(),)) is None
    assert chunks.compiled_products(None, y.to("meta"), 50, (r,)) is None
    assert affine.compiled_affine(None, y, torch.randn(6, 50), None) is None  # few columns
    monkeypatch.setattr(chunks, "COMPILED_FROM", 250_001)
    assert chunks.compiled_products(None, y, 50, (r,)) is None
    whole = Rows([10] * 20)
    assert chunks.compiled_products(whole.part(0, 10), y, 50, (r,)) is row_products


@DTYPES
@pytest.mark.parametrize("sizes", SIZES[:2], ids=["ragged", "short"])
@pytest.mark.parametrize("name", ["elman", "lstm", "gru", "leaky", "cornn", "mingru", "lru"])
def test_a_forward_sweep_from_inputs_has_the_bits_of_one_from_their_products(
    monkeypatch, name, sizes, dtype
):
    cell, rows, d, inputs = library.named(name), Rows(sizes), 19, 6
    plan = SweepPlan(cell, rows, engine)

    def draw(*shape):
        return 0.5 * torch.randn(*shape, dtype=dtype)

    u, R, b = draw(rows.N, inputs), draw(len(cell.gates) * d, inputs), draw(len(cell.gates) * d)
    v = draw(rows.N, len(cell.side) * d) if cell.side else None
    W = draw(len(cell.gates) * d, len(cell.read) * d) / d if cell.read else None
    x0, p = draw(rows.B, len(cell.slots) * d), draw(len(cell.p) * d).abs() if cell.p else None
    monkeypatch.setattr(threads, "WORK_PER_THREAD", 1)
    for bias in (b, None):
        base = row_products.affine_rows(u, R, bias)
        x, a, q = engine.forward(plan, base, v, W, x0, p)
        for count in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda n=count: n)
            found_x, found_a, found_q = engine.forward_from_inputs(plan, u, R, bias, v, W, x0, p)
            assert torch.equal(found_x, x)
            if cell.needs_a:  # otherwise nobody reads it
                assert torch.equal(found_a, a)
            if q is not None:
                assert torch.equal(found_q, q)
