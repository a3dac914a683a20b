"""Cross-entropy of class numbers in C: its derivatives in float64, and what is left to torch."""

import pytest
import torch
from torch.nn import functional

from coadjoint.objectives import cross_entropy
from coadjoint.objectives.losses import LOSSES, entry_losses
from coadjoint.sweeps import engines

F64 = torch.float64
CLASSES = [1, 2, 4, 15, 16, 17, 40]  # up to 15 a lane holds a row, from 16 on a class


def loss(a, y):
    return entry_losses("cross-entropy", a, y, "softmax")


@pytest.fixture(autouse=True)
def compiled():
    if engines.device_refusal("cpu", "cpu") is not None:
        pytest.skip("no compiler")
    torch.manual_seed(0)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("entries", [1, 7, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_three_derivatives(classes, entries, dtype):
    a = (3 * torch.randn(entries, classes, dtype=dtype)).requires_grad_()
    y = torch.randint(0, classes, (entries,))
    v = torch.randn(2, entries, classes, dtype=dtype)
    g = torch.rand(entries, dtype=dtype)

    def derivatives(value, a, dtype):
        (slope,) = torch.autograd.grad(value, a, g.to(dtype), create_graph=True)
        (bend,) = torch.autograd.grad(slope, a, v[0].to(dtype), create_graph=True)
        (third,) = torch.autograd.grad(bend, a, v[1].to(dtype))
        return value, slope, bend, third

    found = derivatives(loss(a, y), a, dtype)
    exact = a.detach().double().requires_grad_()
    expected = derivatives(functional.cross_entropy(exact, y, reduction="none"), exact, F64)
    rounding = 50 * torch.finfo(dtype).eps
    for f, e in zip(found, expected, strict=True):
        size = max(1.0, e.detach().abs().max().item())
        torch.testing.assert_close(f.double(), e, rtol=rounding, atol=rounding * size)


@pytest.mark.parametrize("classes", CLASSES)
def test_a_row_has_the_same_bits_beside_other_rows(classes):
    a = torch.randn(37, classes)
    y = torch.randint(0, classes, (37,))
    whole = loss(a, y)
    for begin, end in ((0, 1), (5, 37), (8, 16), (36, 37)):
        assert torch.equal(loss(a[begin:end], y[begin:end]), whole[begin:end])


@pytest.mark.parametrize("classes", [3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_slopes_of_answers_that_are_nearly_certain_keep_their_digits(classes, dtype):
    a = torch.linspace(0, 1, classes, dtype=dtype)[None].repeat(2, 1)
    a[:, 0] = 30.0
    a.requires_grad_()
    y = torch.tensor([0, classes - 1])
    (slope,) = torch.autograd.grad(loss(a, y).sum(), a)
    p = torch.softmax(a.detach().double(), -1)
    others = p[0, 1:].sum()
    assert slope[0, 0].item() == pytest.approx(-others.item(), rel=1e-5 if dtype != F64 else 1e-12)
    assert slope[1, -1].item() == pytest.approx(p[1, -1].item() - 1, rel=1e-6)


def test_what_c_cannot_compute_is_left_to_torch():
    a = torch.randn(5, 3, dtype=F64)
    y = torch.tensor([0, 2, 1, 1, 0])
    point = cross_entropy.class_point(a, y)
    for other in (a.bfloat16(), a[None], a.to("meta")):
        assert cross_entropy.class_point(other, y) is None
    torch.testing.assert_close(point.value, functional.cross_entropy(a, y, reduction="none"))
    hessian = torch.func.hessian(lambda a: loss(a, y).sum())(a)
    leaf = a.clone().requires_grad_()
    expected = torch.autograd.functional.hessian(lambda a: loss(a, y).sum(), leaf)
    torch.testing.assert_close(hessian, expected)
    _, tangent = torch.func.jvp(lambda a: loss(a, y), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(tangent, torch.zeros(5, dtype=F64), rtol=0, atol=1e-15)
    traced = torch.compile(cross_entropy.class_loss, backend="eager", fullgraph=True)(a, y)
    torch.testing.assert_close(traced, point.value)


def test_slope_and_bend_of_the_loss_are_those_of_its_graph():
    known = LOSSES["cross-entropy"]
    a = torch.randn(6, 4, dtype=F64, requires_grad=True)
    y = torch.randint(0, 4, (6,))
    v = torch.randn(6, 4, dtype=F64)
    (slope,) = torch.autograd.grad(known(a, y, "softmax").sum(), a, create_graph=True)
    (bend,) = torch.autograd.grad(slope, a, v)
    assert torch.equal(known.slope(a, y), slope)
    torch.testing.assert_close(known.bend(a, y, v), bend, rtol=1e-13, atol=1e-14)
