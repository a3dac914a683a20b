"""What C computes once for each sample: against torch's own operations in float64."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from coadjoint.sweeps import engines
from coadjoint.sweeps.engines.c import per_sample
from coadjoint.sweeps.norms import norm
from coadjoint.sweeps.rows import scale

F64 = torch.float64


@pytest.fixture(autouse=True)
def without_gradients():
    if engines.device_refusal("cpu", "cpu") is not None:
        pytest.skip("no compiler")
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("classes", [1, 2, 10, 33])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_cross_entropy_with_slope_and_bend(classes, scale):
    a = scale * torch.randn(7, classes, dtype=F64)
    y = torch.randint(0, classes, (7,))
    v = torch.randn(7, classes, dtype=F64)
    point = per_sample.cross_entropy(a, y)
    with torch.enable_grad():
        leaf = a.clone().requires_grad_()
        value = cross_entropy(leaf, y, reduction="none")
        (slope,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        (bend,) = torch.autograd.grad(slope, leaf, v)
    torch.testing.assert_close(point.value, value.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(point.slope, slope.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(point.bend(v), bend, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_slope_of_a_nearly_correct_answer_keeps_its_digits(dtype):
    a = torch.tensor([[40.0, 0.0, 1.0]], dtype=dtype)
    slope = per_sample.cross_entropy(a, torch.tensor([0])).slope[0]
    others = torch.exp(torch.tensor([-40.0, -39.0], dtype=F64))
    expected = torch.tensor([-others.sum(), *others], dtype=F64).to(dtype)
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=0)


def test_outputs_of_ten_thousand_and_infinity_stay_finite():
    a = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], dtype=F64)
    point = per_sample.cross_entropy(a, torch.tensor([0, 0]))
    assert point.value.tolist() == [0, 2e4]
    assert point.slope.tolist() == [[0, 0], [-1, 1]]
    unknown = per_sample.cross_entropy(torch.tensor([[torch.nan, 1.0]]), torch.tensor([1]))
    assert unknown.value.isnan().all()


@pytest.mark.parametrize("T", [0, 1, 2, 9])
@pytest.mark.parametrize("first", [0, 1])
def test_log_ratios_and_their_slope(T, first):
    size = torch.rand(T + 1, 5, dtype=F64) + 0.1
    k = torch.randint(-300, 300, (T + 1, 5), dtype=torch.int32)
    value, slope = per_sample.log_ratios(size, k, first)
    with torch.enable_grad():
        leaf = size.clone().requires_grad_()
        norms = leaf.log() + k * torch.tensor(2.0, dtype=F64).log()
        r = (norms[:-1] - norms[1:])[first:]
        expected = r.square().sum(0) / max(len(r), 1)
        (by_size,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, by_size, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("n", [1, 3, 16, 37, 64])
def test_norms_of_rows(n, dtype):
    y = torch.randn(3, 5, n).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    expected = y.double().norm(dim=-1).to(dtype)
    torch.testing.assert_close(per_sample.row_norms(y), expected, rtol=tolerance, atol=0)
    assert torch.equal(per_sample.row_norms(y[1:2]), per_sample.row_norms(y)[1:2])
    y[1, 2] = 2.0**-100 if dtype == torch.float32 else 2.0**-600  # its squares are zero
    y[2, 0] = 1 / y[1, 2]  # and these infinite
    expected[1, 2] = y[1, 2].sum() / n**0.5
    expected[2, 0] = y[2, 0].sum() / n**0.5
    y[0, 0, 0] = torch.nan
    y[0, 1] = 0
    y[0, 2, -1] = torch.inf
    expected[0, :3] = torch.tensor([torch.nan, 0, torch.inf])
    in_c = per_sample.row_norms(y)
    torch.testing.assert_close(in_c, expected, rtol=tolerance, atol=0, equal_nan=True)
    assert torch.equal(norm(y)[1:], in_c[1:])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("n", [1, 5, 16, 33])
def test_gradients_by_norms(n, dtype):
    tiny = torch.finfo(dtype).tiny
    y = torch.randn(6, n, dtype=dtype)
    y[1] *= tiny**0.5
    y[2] *= 40 * tiny
    y[3] = 0
    y[4] = tiny / 4 / n**0.5  # its norm is below the normal range
    size = norm(y)
    g = torch.randn(6, dtype=dtype) * 2.0**20
    found = per_sample.norm_gradient(y, size, g)
    expected = (y / size[:, None]).double() * g.double()[:, None]
    expected[3:5] = 0
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rows_times_powers_of_two(dtype):
    y = torch.randn(7, 19, dtype=dtype)
    k = torch.tensor([0, 1, -1, 40, -140, 130, -2000], dtype=torch.int32)
    assert torch.equal(per_sample.scale_rows(y, k), scale(y, k[:, None]))


def test_nothing_is_computed_where_gradients_are_asked_for():
    with torch.enable_grad():
        assert per_sample.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)) is None
        assert per_sample.row_norms(torch.zeros(2, 3)) is None
    assert per_sample.cross_entropy(torch.zeros(2, 3).half(), torch.zeros(2).long()) is None
    assert per_sample.row_norms(torch.zeros(())) is None
    assert per_sample.row_norms(torch.zeros(2, 0)) is None
