"""Every loss equals its formula written by hand, also at large arguments and with masks."""

import math

import numpy as np
import pytest
import torch

import build
import coadjoint as co
from coadjoint.objectives.losses import LOSSES, OUTPUTS, entry_losses

F64 = torch.float64
N, K = 6, 3


def data(seed=0):
    rng = torch.Generator().manual_seed(seed)
    a = 2 * torch.randn(N, K, dtype=F64, generator=rng)
    return a, torch.rand(N, K, dtype=F64, generator=rng), torch.randint(K, (N,), generator=rng)


def softmax(a):
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def huber(e, delta):
    return np.where(np.abs(e) <= delta, e * e / 2, delta * (np.abs(e) - delta / 2)).sum(-1)


A, Y, C = data()
P = Y / Y.sum(-1, keepdim=True)
SIGMOID = 1 / (1 + np.exp(-A.numpy()))
TABLE = [
    ("squared", "identity", Y, ((A - Y).numpy() ** 2).sum(-1)),
    ("squared", "sigmoid", Y, ((SIGMOID - Y.numpy()) ** 2).sum(-1)),
    ("half-squared", "identity", Y, ((A - Y).numpy() ** 2).sum(-1) / 2),
    ("half-squared", "tanh", Y, ((np.tanh(A.numpy()) - Y.numpy()) ** 2).sum(-1) / 2),
    ("absolute", "identity", Y, np.abs((A - Y).numpy()).sum(-1)),
    ("absolute", "tanh", Y, np.abs(np.tanh(A.numpy()) - Y.numpy()).sum(-1)),
    ("huber", "identity", Y, huber((A - Y).numpy(), 1.0)),
    (co.losses.huber(0.3), "identity", Y, huber((A - Y).numpy(), 0.3)),
    ("cross-entropy", "softmax", C, -np.log(softmax(A.numpy())[np.arange(N), C.numpy()])),
    ("cross-entropy", "identity", C, -np.log(softmax(A.numpy())[np.arange(N), C.numpy()])),
    ("cross-entropy", "softmax", P, -(P.numpy() * np.log(softmax(A.numpy()))).sum(-1)),
    (
        "binary-cross-entropy",
        "sigmoid",
        Y,
        -(Y.numpy() * np.log(SIGMOID) + (1 - Y.numpy()) * np.log(1 - SIGMOID)).sum(-1),
    ),
    (lambda y_hat, y: (y_hat * y).sum(-1), "tanh", Y, (np.tanh(A.numpy()) * Y.numpy()).sum(-1)),
]


@pytest.mark.parametrize(("loss", "output", "y", "truth"), TABLE)
def test_losses_equal_their_formulas(loss, output, y, truth):
    np.testing.assert_allclose(entry_losses(loss, A, y, output), truth, rtol=1e-13)


@pytest.mark.parametrize(("loss", "output", "y", "truth"), TABLE)
def test_losses_have_two_derivatives(loss, output, y, truth):
    def f(a):
        return entry_losses(loss, a, y, output)

    a = A.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, a)
    assert torch.autograd.gradgradcheck(f, a)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["f32", "f64"])
@pytest.mark.parametrize(
    ("loss", "output", "y"),
    [
        ("cross-entropy", "softmax", torch.tensor([0, 1, 2, 0, 1])),
        ("cross-entropy", "identity", torch.eye(3)[[0, 1, 2, 0, 1]]),
        ("binary-cross-entropy", "sigmoid", torch.tensor([[0.0, 1, 0.5]]).expand(5, 3)),
        ("squared", "sigmoid", torch.zeros(5, 3)),
        ("squared", "softmax", torch.zeros(5, 3)),
        ("squared", "tanh", torch.ones(5, 3)),
        ("huber", "identity", torch.zeros(5, 3)),
        ("absolute", "identity", torch.zeros(5, 3)),
    ],
)
def test_losses_and_two_derivatives_are_finite_at_logits_of_ten_thousand(loss, output, y, dtype):
    a = torch.tensor(
        [[1e4, -1e4, 0], [-1e4, 1e4, 1e4], [50, -50, 100], [0, 0, 0], [-1e4, -1e4, -1e4]],
        dtype=dtype,
        requires_grad=True,
    )
    value = entry_losses(loss, a, y.to(dtype) if y.is_floating_point() else y, output)
    (g,) = torch.autograd.grad(value.sum(), a, create_graph=True)
    (h,) = torch.autograd.grad((g * torch.randn_like(g)).sum(), a, allow_unused=True)
    assert torch.isfinite(value).all()
    assert torch.isfinite(g).all()
    assert h is None or torch.isfinite(h).all()


def test_losses_have_their_known_values_at_the_ends():
    a = torch.tensor([[1e4, -1e4]], dtype=F64)
    assert entry_losses("cross-entropy", a, torch.tensor([0]), "softmax").item() == 0.0
    assert entry_losses("cross-entropy", a, torch.tensor([1]), "softmax").item() == 2e4
    wrong = torch.tensor([[0.0, 1.0]], dtype=F64)
    assert entry_losses("binary-cross-entropy", a, wrong, "sigmoid").item() == 2e4
    assert entry_losses("binary-cross-entropy", a, 1 - wrong, "sigmoid").item() == 0.0


def test_slope_of_the_absolute_error_at_zero_is_zero():
    a = torch.zeros(1, 1, dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(
        entry_losses("absolute", a, torch.zeros(1, 1, dtype=F64), "identity").sum(), a
    )
    assert g.item() == 0.0


def test_one_output_takes_targets_without_the_last_axis():
    a = torch.randn(4, 1, dtype=F64)
    y = torch.randn(4, dtype=F64)
    assert torch.equal(
        entry_losses("squared", a, y, "identity"),
        entry_losses("squared", a, y[:, None], "identity"),
    )


# inside a network: masks, reductions, lengths

T, B, O = 5, 3, 2


def network(readout="every", **options):
    net = build.network(inputs=2, hidden=3, outputs=O, readout=readout, **options)
    return net, torch.randn(T, B, 2, dtype=F64), torch.randn(T, B, O, dtype=F64)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("lengths", [None, [2, 5, 4]])
@pytest.mark.parametrize("masked", [False, True])
def test_per_step_loss_is_reduced_over_the_samples_own_steps(reduce, lengths, masked):
    net, u, y = network()
    weight = torch.tensor([[1, 0, 2], [0.5, 0, 1], [1, 0, 0], [1, 0, 0.1], [3, 0, 1]], dtype=F64)
    mask = weight if masked else None
    if masked:
        y = torch.where(weight[..., None] == 0, math.nan, y)  # what does not count is not read
    run = net(u, lengths)
    ours = run.loss("squared", y, mask=mask, reduce=reduce)
    for j, n in enumerate(lengths or [T] * B):
        w = (weight if masked else torch.ones_like(weight))[:n, j]
        e = ((run.y_hat[:n, j] - y[:n, j]) ** 2).sum(-1)
        total = sum(w[t] * e[t] for t in range(n) if w[t] != 0) + torch.zeros((), dtype=F64)
        truth = total / w.sum() if reduce == "mean" and w.sum() != 0 else total
        assert float((ours[j] - truth).detach().abs()) <= 1e-13 * max(1.0, float(truth.detach()))
    lam = net(u, lengths).costates("squared", y, mask=mask, reduce=reduce)
    assert torch.isfinite(lam.rows).all()


def test_a_mask_weighs_samples_with_readout_last():
    net, u, y = network("last")
    run = net(u)
    plain = run.loss("squared", y[0])
    weighted = run.loss("squared", y[0], mask=torch.tensor([1.0, 0.0, 2.5], dtype=F64))
    assert torch.allclose(weighted, plain * torch.tensor([1.0, 0.0, 2.5], dtype=F64))
    lam = net(u).costates("squared", y[0], mask=torch.tensor([1.0, 0.0, 2.5], dtype=F64))
    assert lam.zeros().tolist() == [0, T + 1, 0]
    boolean = run.loss("squared", y[0], mask=torch.tensor([True, False, True]))
    assert torch.allclose(boolean, plain * torch.tensor([1.0, 0.0, 1.0], dtype=F64))


def test_user_loss_sees_only_entries_that_count():
    net, u, y = network()
    seen = []

    def loss(y_hat, target):
        seen.append((y_hat.shape, target.shape))
        return (y_hat - target).abs().sum(-1)

    net(u, [2, 5, 4]).loss(loss, y)
    net(u).loss(lambda y_hat: seen.append((y_hat.shape, None)) or y_hat.sum(-1))
    assert seen == [((11, O), (11, O)), ((15, O), None)]


def test_class_targets_are_taken_at_every_step():
    net, u, _ = network(output="softmax")
    y = torch.randint(O, (T, B))
    run = net(u, [2, 5, 4])
    truth = torch.nn.functional.cross_entropy(run.a.transpose(1, 2), y, reduction="none")
    truth = torch.where(run.mask[1:], truth, 0).sum(0)
    assert torch.allclose(run.loss("cross-entropy", y), truth, rtol=1e-13)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_named_loss_runs_penalised(loss):
    output = {"cross-entropy": "softmax", "binary-cross-entropy": "sigmoid"}.get(loss, "identity")
    net, u, y = network("last", output=output)
    y = torch.tensor([0, 1, 0]) if loss == "cross-entropy" else torch.rand(B, O, dtype=F64)
    e = co.Penalised("log-ratio", 0.1)(net, co.Batch(u, y), loss)
    assert all(torch.isfinite(g).all() for g in e.gradient.values())
    assert sorted(OUTPUTS) == ["identity", "sigmoid", "softmax", "tanh"]


@pytest.mark.parametrize("method", [co.BPTT(), co.RTRL(), co.Truncated(2, 3)])
@pytest.mark.parametrize("engine", ["reference", "eager", "cpu", "autograd"])
def test_half_the_square_has_the_costate_v_transposed_times_the_error(method, engine):
    """Caterini (2017), (5.5): dJ/dy_hat = y_hat - y; costates and gradients are half of squared's.

    `variance`, quadratic in the costates, is a quarter.
    """
    net, u, y = network("last", engine=engine)
    y = torch.rand(B, O, dtype=F64)
    run = net(u)
    half, whole = (run.costates(name, y) for name in ("half-squared", "squared"))
    assert torch.allclose(half.lam[-1], (run.y_hat - y) @ net.V, rtol=1e-13)
    assert torch.allclose(2 * half.lam, whole.lam, rtol=1e-13)
    assert torch.allclose(2 * half.loss, whole.loss, rtol=1e-13)
    assert torch.allclose(4 * co.penalties.variance(half), co.penalties.variance(whole), rtol=1e-12)
    found, twice = (method(net, co.Batch(u, y), name) for name in ("half-squared", "squared"))
    for name, g in found.gradient.items():
        assert torch.allclose(2 * g, twice.gradient[name], rtol=1e-12, atol=1e-15), name


QUADRATIC = ("variance", "variance-l1", "squared-norm", "end-points")
OF_RATIOS = ("log-ratio", "ratio", "log-variance", "share-variance", "omega", "omega-norms")
WITHOUT_LOSS = ("isometry", "norm-stabiliser", "output-variance", "tangent")


@pytest.mark.parametrize("readout", ["last", "every"])
def test_what_half_the_square_does_to_each_penalty(readout):
    """docs/conventions.md: a quarter of the first four, and the same of those of ratios."""
    net, u, y = network(readout)
    y = torch.rand((T, B, O) if readout == "every" else (B, O), dtype=F64)
    half, whole = (net(u).costates(name, y) for name in ("half-squared", "squared"))
    factors = dict.fromkeys(QUADRATIC, 1 / 4)
    for name, factor in (factors | dict.fromkeys(OF_RATIOS, 1.0)).items():
        G = co.penalties.penalty(name)
        assert G(whole).min() > 0
        assert torch.allclose(G(half), factor * G(whole), rtol=1e-12, atol=0), name


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("name", [*QUADRATIC, *OF_RATIOS, *WITHOUT_LOSS, "omega-published"])
def test_what_half_the_square_does_to_the_weight_of_each_penalty(name, readout):
    """docs/conventions.md: twice the weight of the first four and half of the others' has half of
    the gradient, so the same minimum.
    """
    net, u, y = network(readout)
    y = torch.rand((T, B, O) if readout == "every" else (B, O), dtype=F64)
    batch = co.Batch(u, y)
    rho = 0.3
    factor = 2 if name in QUADRATIC else 1 / 2
    half = co.Penalised(name, factor * rho)(net, batch, "half-squared")
    whole = co.Penalised(name, rho)(net, batch, "squared")
    plain = co.BPTT()(net, batch, "squared")
    assert abs(whole.objective - whole.loss) > 1e-6
    assert not torch.allclose(whole.gradient["W"], plain.gradient["W"], rtol=1e-6)
    for weight, g in whole.gradient.items():
        assert torch.allclose(2 * half.gradient[weight], g, rtol=1e-12, atol=1e-14), weight


def test_a_target_that_is_not_a_number_is_refused():
    y = torch.tensor([[0.5], [math.nan]])
    with pytest.raises(co.InputError, match=r"targets must lie in 0\.\.1; got nan"):
        co.losses.binary_cross_entropy(torch.zeros(2, 1), y, "sigmoid")
