"""Costates are right at any scale.

They are compared with closed forms of the linear network, also where they vanish, explode or are
exactly zero.
"""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch

import coadjoint as co

pytestmark = pytest.mark.slow

GAINS = [0.5, 0.9, 0.99, 1.01, 1.1, 2.0]
ROTATION = torch.linalg.qr(
    torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
)[0]
READ = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64)
BAR = {torch.float64: 1e-10, torch.float32: 1e-5}


def first_output(y_hat):
    return y_hat[:, 0]


def mean_log_norm(lam):
    return lam.log_norms()[1:].mean(0)


PENALTIES = {
    "mean": mean_log_norm,
    "ratio": co.penalties.log_ratio,
    "variance": co.penalties.log_variance,
}


def weights(gain, d, dtype):
    return (gain * ROTATION[:d, :d] if d > 1 else torch.tensor([[gain]])).to(dtype), READ[:d].to(
        dtype
    )


@functools.cache
def closed_form(gain, d, dtype, T):
    """lam_t = (W')^{T-t} v, v = V': log-norms t = 0..T, and values and gradients by W and v of the
    penalties.

    With q_j = (W')^j v and G = sum_j g_j log||q_j||:  dG/dW = sum_i q_i m_i',  dG/dv = m_{-1},
    m_{i-1} = g_i q_i / ||q_i||^2 + W m_i. Below, e_j = q_j / ||q_j|| and n_i = m_i ||q_i|| keep
    every number near one.
    """
    W, v = (y.double().numpy() for y in weights(gain, d, dtype))
    size = [np.linalg.norm(v)]
    e = [v / size[0]]
    for _ in range(T):
        q = W.T @ e[-1]
        size.append(math.sqrt(q @ q))
        e.append(q / size[-1])
    logs = np.cumsum(np.log(size))
    g, value = by_logs(logs[:T])  # j = 0..T-1 is t = T..1
    n, by_W = np.zeros((len(g), d)), np.zeros((len(g), d, d))
    for j in reversed(range(T)):
        by_W += e[j][:, None] * n[:, None, :]
        n = (g[:, j, None] * e[j] + n @ W.T) / size[j]
    return logs[::-1], value, dict(zip(PENALTIES, by_W, strict=True)), n[0]


def by_logs(l):
    """The penalties as functions of log-norms l_1, ..., l_T, and their slopes [3, T]."""
    T, away, steps = len(l), l - l.mean(), np.diff(l)
    slopes = [
        np.full(T, 1 / T),
        2 * away / T,
        -2 * np.diff(steps, prepend=0, append=0) / max(1, T - 1),
    ]
    return np.array([slopes[0], slopes[2], slopes[1]]), {
        "mean": l.mean(),
        "ratio": (steps**2).mean(),
        "variance": (away**2).mean(),
    }


def test_the_closed_form_agrees_with_fifty_digits():
    """The same sums by mpmath, which has no range: nothing is rescaled, and dG/dW is a central
    difference.
    """
    T, d, gain = 40, 3, 0.5
    with mpmath.workdps(50):
        W, v = (mpmath.matrix(y.tolist()) for y in weights(gain, d, torch.float64))

        def logs(W):
            q = [v]
            for _ in range(T):
                q.append(W.T * q[-1])
            return [mpmath.log(mpmath.norm(y)) for y in q]

        def ratio(W):
            l = logs(W)[:T]
            return sum((a - b) ** 2 for a, b in zip(l[1:], l[:-1], strict=True)) / (T - 1)

        ours, value, by_W, _ = closed_form(gain, d, torch.float64, T)
        np.testing.assert_allclose(ours, np.array(logs(W)[::-1], dtype=float), rtol=1e-14)
        assert abs(value["ratio"] - float(ratio(W))) < 1e-14
        for i in range(d):
            for j in range(d):
                h = mpmath.matrix(d, d)
                h[i, j] = mpmath.mpf(10) ** -20
                slope = float((ratio(W + h) - ratio(W - h)) / (2 * h[i, j]))
                assert abs(by_W["ratio"][i, j] - slope) < 1e-13


def linear(gain, d, dtype, engine="cpu"):
    net = co.Network(
        "elman",
        inputs=1,
        hidden=d,
        outputs=1,
        activation="identity",
        bias=False,
        dtype=dtype,
        engine=engine,
    )
    W, v = weights(gain, d, dtype)
    with torch.no_grad():
        net.W.copy_(W)
        net.V.copy_(v[None])
    return net


def distance(ours, truth):
    return np.linalg.norm(np.asarray(ours.detach(), dtype=float) - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize(
    ("engine", "d", "gain", "T"),
    [("cpu", d, g, 10_000) for d in (1, 3) for g in GAINS]
    + [("reference", 3, g, 400) for g in GAINS],
)
@pytest.mark.sampled(3)
def test_linear_network_is_matrix_powers(engine, d, gain, T, dtype):
    net = linear(gain, d, dtype, engine)
    logs, value, by_W, by_v = closed_form(gain, d, dtype, T)
    lam = net(torch.zeros(T, 1, 1, dtype=dtype)).costates(first_output)
    found = lam.log_norms()[:, 0].detach()
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, logs, rtol=BAR[dtype], atol=BAR[dtype])
    for name, penalty in PENALTIES.items():
        G = penalty(lam)[0]
        gW, gV = torch.autograd.grad(G, [net.W, net.V], retain_graph=True)
        assert abs(float(G.detach()) - value[name]) <= BAR[dtype] * abs(value[name]), name
        of_W, of_V = (
            running_sum_error(T, lam.mantissa[-1, 0, 0]) if name == "mean" and d == 1 else (0, 0)
        )
        assert distance(gW, by_W[name]) < BAR[dtype] + of_W, name
        if (
            name == "mean"
        ):  # the others do not change with the scale of V: their gradient by it is rounding
            assert distance(gV[0], by_v) < BAR[dtype] + of_V


def running_sum_error(T, mantissa):
    """How far a running sum of T equal terms is off, summed up and at its end: with one unit the
    mean of log-norms is nothing else, and where every rounding has the same sign (gains that are
    powers of two) no float32 recurrence can be better.
    """
    term = (1 / (T * mantissa)).detach().abs()
    total = torch.zeros_like(term)
    sums = []
    for _ in range(T):
        total = total + term
        sums.append(float(total))
    return abs(sum(sums) / (float(term) * T * (T + 1) / 2) - 1), abs(
        sums[-1] / (float(term) * T) - 1
    )


def tanh_network(gain, hidden, T, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    net = co.Network("elman", inputs=2, hidden=hidden, outputs=1, dtype=torch.float64)
    with torch.no_grad():
        net.W.copy_(
            gain
            * torch.linalg.qr(torch.randn(hidden, hidden, dtype=torch.float64, generator=rng))[0]
        )
        for p in (net.R, net.b, net.V, net.b_o):
            p.copy_(0.3 * torch.randn(p.shape, dtype=torch.float64, generator=rng))
        for p in net.parameters():
            p.copy_(p.float())
    u = torch.randn(T, 1, 2, dtype=torch.float64, generator=rng).float()
    return net.to(dtype), u.to(dtype)


def rescaled_loop(W, net, u):
    """log||lam_t|| for the loss y_hat[0], by a loop that divides by the size at each step; W may be
    complex.
    """
    R, b, V = (y.detach().double().numpy() for y in (net.R, net.b, net.V))
    x, states = np.zeros(len(W)), []
    for u_t in u[:, 0].double().numpy():
        x = np.tanh(W @ x + R @ u_t + b)
        states.append(x)
    lam, log, logs = V[0].astype(W.dtype), 0.0, []
    for x in reversed(states):
        size = np.sqrt(np.sum(lam * lam))
        log, lam = log + np.log(size), lam / size
        logs.insert(0, log)
        lam = W.T @ ((1 - x * x) * lam)
    return np.array([log + np.log(np.sqrt(np.sum(lam * lam))), *logs])


def test_a_tanh_network_keeps_costates_below_2_to_the_minus_3000():
    net, u = tanh_network(0.35, 4, 2000)
    lam = net(u).costates(first_output)
    W = net.W.detach().numpy()
    truth = rescaled_loop(W, net, u)
    assert truth[0] < -3000 * math.log(2)
    np.testing.assert_allclose(lam.log_norms()[:, 0].detach(), truth, rtol=1e-12)
    assert float(lam.lam[0].detach().abs().max()) == 0.0
    D = np.random.default_rng(0).standard_normal(W.shape)
    for penalty, of_logs in (
        (mean_log_norm, lambda l: l[1:].mean()),
        (co.penalties.log_ratio, mean_squared_step),
    ):
        (gW,) = torch.autograd.grad(penalty(lam).sum(), net.W, retain_graph=True)
        slope = (
            of_logs(rescaled_loop(W + 1e-30j * D, net, u)).imag / 1e-30
        )  # complex step: no subtraction
        assert abs(float((gW.numpy() * D).sum()) - slope) < 1e-10 * abs(slope)


def mean_squared_step(logs):
    return (np.diff(logs[1:]) ** 2).mean()


@pytest.mark.parametrize("gain", [0.35, 1.3])
def test_float32_has_the_log_norms_and_gradients_of_float64(gain):
    """As near as the weights' own last digit leaves them: at gain 1.3 it moves the gradient by
    1e-4.
    """

    def found(dtype, nudge=0):
        net, u = tanh_network(gain, 4, 300, dtype)
        if nudge:
            up = torch.randn(4, 4, generator=torch.Generator().manual_seed(nudge)).sign()
            with torch.no_grad():
                net.W.mul_(1 + torch.finfo(torch.float32).eps * up)
        lam = net(u).costates(first_output)
        (gW,) = torch.autograd.grad(co.penalties.log_ratio(lam).sum(), net.W)
        return lam.log_norms().detach(), gW.double()

    (logs64, g64), (logs32, g32) = found(torch.float64), found(torch.float32)
    moved = max(
        float((found(torch.float64, seed)[1] - g64).norm() / g64.norm()) for seed in (1, 2, 3)
    )
    assert ((logs32 - logs64).abs() <= 1e-5 * logs64.abs().clamp(min=1)).all()
    assert float((g32 - g64).norm() / g64.norm()) < (1e-5 if gain < 1 else max(1e-5, moved))


@pytest.mark.parametrize("gain", [0.5, 0.95])
def test_ratios_keep_their_digits_at_any_length(gain):
    ratios = []
    for dtype in BAR:
        net, u = tanh_network(gain, 5, 10_000, dtype)
        with torch.no_grad():
            ratios.append(net(0.1 * u).costates(first_output).log_ratios())
    assert ratios[1].dtype == torch.float64
    assert float((ratios[0] - ratios[1]).abs().max()) < 1e-5


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_overflow_of_the_state_names_the_step(engine):
    net = linear(2.0, 1, torch.float32, engine)
    with pytest.raises(
        co.NumericalError, match=r"the state is outside the range of float32 at t = 128 of 140"
    ):
        net(torch.zeros(140, 1, 1), x0=torch.ones(1))


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_second_adjoint_that_no_number_holds_names_the_step(engine):
    """Costates vanish, and the loss is declared (with slope zero) at step 5 too: its second
    derivative there is asked for at 2^-k, k the exponent of a costate of 0.4^1200.
    """
    T = 600
    net = co.Network(
        "elman",
        inputs=1,
        hidden=1,
        outputs=1,
        readout="every",
        dtype=torch.float64,
        engine=engine,
        bias=False,
    )
    with torch.no_grad():
        net.W.fill_(0.2)
    y = torch.zeros(T, 1, 1, dtype=torch.float64)
    mask = torch.zeros(T, 1, dtype=torch.float64)
    mask[4] = mask[-1] = 1
    u = torch.zeros(T, 1, 1, dtype=torch.float64)
    u[-1] = 1
    lam = net(u).costates("squared", y, mask=mask)
    assert float(lam.log_norms()[5].detach()) < -900
    with pytest.raises(
        co.NumericalError,
        match=r"second adjoint is outside the range of float64 at t = 5: .*2\^1[0-9]{3}",
    ):
        mean_log_norm(lam).sum().backward()


def test_costate_overflow_is_not_an_error_but_its_gradient_at_true_scale_is():
    net = linear(2.0, 1, torch.float32)
    run = net(torch.zeros(300, 1, 1), x0=torch.zeros(1, 1, requires_grad=True))
    assert math.isclose(
        float(run.costates(first_output).log_norms()[0]),
        300 * math.log(2) + math.log(0.7),
        rel_tol=1e-6,
    )
    with pytest.raises(
        co.NumericalError,
        match=r"gradient with respect to the state is outside the range of float32",
    ):
        run.y_hat.sum().backward()


@pytest.mark.parametrize("at", [1, 7, 149, 200])
@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_one_large_source_among_small_costates_leaves_them_their_scale(at, engine):
    """A per-step loss counts 1e30 times more at one step: later costates keep their digits, earlier
    ones its scale.
    """
    T, logs = 200, {}
    for dtype in BAR:
        net, u = tanh_network(0.4, 3, T, dtype)
        net.readout, net.engine = "every", engine if dtype == torch.float32 else "cpu"
        mask = torch.zeros(T, 1, dtype=dtype)
        mask[-1], mask[at - 1] = 1, 1e30
        with torch.no_grad():
            logs[dtype] = net(u).costates(first_output, mask=mask).log_norms()
    assert float(logs[torch.float32][at]) > 60
    np.testing.assert_allclose(logs[torch.float32], logs[torch.float64], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(b, t) for b in (-40, -12, -11, 11, 12, 40) for t in BAR]
    + [(b, torch.float64) for b in (-200, -60, 60, 200)],
)
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_costates_may_change_by_many_bits_a_step(bits, dtype, engine):
    """A block of steps shares an exponent; past some 7 (float64: 50) bits a step it must be done
    again, shorter.
    """
    T, gain = 150, 2.0**bits
    net = linear(gain, 3, dtype, engine)
    lam = net(torch.zeros(T, 2, 1, dtype=dtype)).costates(first_output)
    logs, _, by_W, _ = closed_form(gain, 3, dtype, T)
    np.testing.assert_allclose(lam.log_norms()[:, 1].detach(), logs, rtol=BAR[dtype])
    assert (lam.size > 0).all()
    (gW,) = torch.autograd.grad(co.penalties.log_variance(lam).sum(), net.W)
    assert distance(gW / 2, by_W["variance"]) < BAR[dtype]


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("argument", [-20.0, -40.0, -50.0, -80.0])
def test_saturated_sigmoid_units_are_accurate_in_float32(argument, engine):
    """Slopes of 2^-29 to 2^-115 at every step: costates shrink by that many bits, their log-norms
    and ratios stay.
    """
    found = {}
    for dtype in BAR:
        net = co.Network(
            "elman",
            inputs=1,
            hidden=1,
            outputs=1,
            activation="sigmoid",
            bias=False,
            dtype=dtype,
            engine=engine,
        )
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(1)
        lam = net(torch.full((4, 1, 1), argument, dtype=dtype)).costates(first_output)
        (gW,) = torch.autograd.grad(co.penalties.log_ratio(lam).sum(), net.W)
        found[dtype] = lam.log_norms().detach(), gW
    np.testing.assert_allclose(
        found[torch.float32][0], found[torch.float64][0], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(found[torch.float32][1], found[torch.float64][1], rtol=1e-5)


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_samples_of_very_different_scale_share_a_batch(engine):
    """Sample 1's loss is 1e-25 of sample 0's and it is shorter: both keep their digits
    in float32.
    """
    net, u = tanh_network(0.3, 3, 60, torch.float32)
    net.engine = engine
    u = torch.cat([u, u.flip(0)], 1)
    with torch.no_grad():
        both = (
            net(u, lengths=[60, 41])
            .costates(lambda y: y[:, 0] * torch.tensor([1.0, 1e-25]))
            .log_norms()
        )
        alone = net(u[:41, 1:]).costates(lambda y: y[:, 0] * 1e-25).log_norms()
    np.testing.assert_allclose(both[:42, 1], alone[:, 0], rtol=1e-6)
    assert both[42:, 1].isnan().all()


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_costates_that_are_exactly_zero_are_counted_and_left_out(engine):
    """relu units, all dead at step 6 of sample 0: nothing before it is seen by the loss."""
    T = 10
    net = co.Network(
        "elman",
        inputs=1,
        hidden=4,
        outputs=1,
        activation="relu",
        dtype=torch.float64,
        engine=engine,
    )
    with torch.no_grad():
        for p in net.parameters():
            p.abs_()
    u = torch.ones(T, 2, 1, dtype=torch.float64)
    u[5, 0] = -1e6
    lam = net(u).costates(first_output)
    assert lam.zeros().tolist() == [6, 0]
    logs = lam.log_norms().detach()
    assert torch.isneginf(logs[:6, 0]).all()
    assert torch.isfinite(logs[6:, 0]).all()
    assert lam.log_ratios().detach()[:, 0].isnan().tolist() == [True] * 6 + [False] * 4
    np.testing.assert_allclose(
        co.penalties.log_variance(lam).detach(),
        [logs[6:, 0].var(correction=0), logs[1:, 1].var(correction=0)],
        rtol=1e-12,
    )
    for name, penalty in co.penalties.PENALTIES.items():
        if name == "omega-published" and engine == "autograd":
            continue
        grads = torch.autograd.grad(
            penalty(lam).sum(), [net.W, net.R], retain_graph=True, allow_unused=True
        )
        assert torch.isfinite(penalty(lam)).all(), name
        assert all(g is None or torch.isfinite(g).all() for g in grads), name


def test_loss_that_is_flat_everywhere_has_zero_costates_and_penalties():
    net, u = tanh_network(0.5, 3, 5)
    lam = net(u).costates(lambda y: 0 * y[:, 0])
    assert lam.zeros().tolist() == [6]
    for name, penalty in co.penalties.PENALTIES.items():
        value = penalty(lam)
        # those that do not read the loss's costates have values
        other = ("norm-stabiliser", "output-variance", "isometry", "tangent")
        assert name in other or value.tolist() == [0.0], name
        gradient = torch.autograd.grad(value.sum(), net.W, allow_unused=True, retain_graph=True)[0]
        assert gradient is None or torch.isfinite(gradient).all(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_norm_at_zero_has_value_slope_and_curvature_zero(dtype):
    small, least = math.sqrt(torch.finfo(dtype).smallest_normal), torch.finfo(dtype).tiny
    x = torch.tensor(
        [[0, 0], [3, 4], [2 * small, 0], [0, -2 * small], [least, 0]],
        dtype=dtype,
        requires_grad=True,
    )
    n = co.norm(x)
    (g,) = torch.autograd.grad(n.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g[:2].pow(2).sum() + g[:2].sum(), x)
    assert n.tolist()[0] == 0.0
    assert g[0].tolist() == [0.0, 0.0]
    assert h[0].tolist() == [0.0, 0.0]
    assert torch.isfinite(g).all()
    assert torch.isfinite(h).all()
    np.testing.assert_allclose(g[1:4].detach(), [[0.6, 0.8], [1, 0], [0, -1]], rtol=1e-6)


def test_norm_is_twice_differentiable_in_both_modes():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(co.norm, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(co.norm, x)


@pytest.mark.parametrize("T", [7, 100, 1000])
@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4, 1e-5])
def test_variance_is_accurate_in_float32_when_norms_are_nearly_equal(spread, T):
    rng = torch.Generator().manual_seed(T)
    values = (1 + spread * torch.randn(T, 40, generator=rng, dtype=torch.float64)).float()
    truth = values.double().var(0, correction=0)
    found = co.penalties.masked_variance(values, torch.ones(T, 40, dtype=torch.bool)).double()
    assert float(((found - truth) / truth).abs().max()) < 1e-5
