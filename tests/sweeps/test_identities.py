"""Relations that hold whatever the numbers are; those without a tolerance hold bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import cases
import coadjoint as co
import oracles
from cases import ENGINES, Case, Data
from coadjoint.sweeps import differentiable
from coadjoint.sweeps import rows as rows_module
from compare import close, same_bits

CELLS = ("elman", "leaky", "rate", "lstm", "gru", "odd", "diagonal", "pair")
LOOPS = [(c, e) for c in CELLS for e in ("reference", "cpu")]
ALL = [(c, e) for c in CELLS for e in ENGINES]
on_loops = pytest.mark.parametrize(("cell", "engine"), LOOPS)
on_engines = pytest.mark.parametrize(("cell", "engine"), ALL)
BASE = {
    "B": 3,
    "T": 5,
    "D": 2,
    "H": 4,
    "x0": "learned",
    "ragged": True,
    "readout": "every",
    "seed": 11,
}
BAR = 1e-12


def prepared(cell, engine, **options):
    """-> (network, batch, name of the loss)"""
    case = Case(cell, **(BASE | {"engine": engine} | options))
    data = Data.of(case, case.dtype, oracle=False)
    return cases.network(case, data), cases.batch(case, data), case.loss


def penalised(net, batch, loss, G="squared-norm", rho=0.3):
    """The gradient of mean(L + rho G), by name."""
    run = net(batch.u, batch.lengths, batch.x0)
    lam = run.costates(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
    value = batch.mean(lam.loss + rho * co.penalties.penalty(G)(lam))
    return oracles.gradient(value, {n: p for n, p in net.named_parameters() if p.requires_grad})


def costates(net, batch, loss):
    return net(batch.u, batch.lengths, batch.x0).costates(
        loss, batch.y, mask=batch.mask, reduce=batch.reduce
    )


@on_loops
@pytest.mark.parametrize("linked", [False, True])
def test_adjoint_and_tangent_are_transposes(cell, engine, linked):
    """<lam, g> + <delta, ga> = <s, mu> + <sa, nu>"""
    net, batch, _ = prepared(cell, engine)
    run = net(batch.u, batch.lengths).run
    rows, tape = run.plan.rows, run.saved
    g = torch.Generator().manual_seed(0)

    def like(y):
        return torch.randn(y.shape, generator=g, dtype=y.dtype)

    s, sa, sources, ga = like(tape.x), like(tape.a), like(tape.x), like(tape.a)
    link = (
        rows_module.Link(rows, torch.randint(-2, 3, (rows.N, 1), generator=g).double())
        if linked
        else None
    )
    with torch.no_grad():
        lam, delta = differentiable.adjoint(run.plan, tape, run.W, s, None, sa, link)
        mu, nu = differentiable.tangent(run.plan, tape, run.W, sources, ga, link)
    left, right = (lam * sources).sum() + (delta * ga).sum(), (s * mu).sum() + (sa * nu).sum()
    assert abs(left - right) <= BAR * (lam.norm() * sources.norm() + delta.norm() * ga.norm())


@on_engines
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize(
    "options", [{}, {"counted": "weighted", "reduce": "mean", "weighted": True, "x0": "given"}]
)
@pytest.mark.slow
@pytest.mark.sampled(5)
def test_bptt_is_rtrl_is_untruncated(cell, engine, readout, options):
    net, batch, loss = prepared(cell, engine, readout=readout, **options)
    expected = co.BPTT()(net, batch, loss).gradient
    close(co.RTRL()(net, batch, loss).gradient, expected, BAR)
    for k1, k2 in ((1, 5), (2, 5), (5, 9)):
        close(co.Truncated(k1, k2)(net, batch, loss).gradient, expected, BAR)


@on_engines
@pytest.mark.sampled(2)
def test_truncation_gives_another_gradient(cell, engine):
    """The identity above would hold for a method that never cuts."""
    net, batch, loss = prepared(cell, engine)
    whole, cut = (m(net, batch, loss).gradient["R"] for m in (co.BPTT(), co.Truncated(1, 2)))
    assert (whole - cut).norm() > 1e-6 * whole.norm()


@on_engines
@pytest.mark.sampled(2)
def test_weight_zero_is_plain(cell, engine):
    net, batch, loss = prepared(cell, engine)
    plain, zero = co.BPTT()(net, batch, loss), co.Penalised("log-ratio", 0.0)(net, batch, loss)
    same_bits(zero.gradient, plain.gradient)
    same_bits(zero.losses, plain.losses)


@on_engines
@pytest.mark.sampled(2)
def test_penalty_without_a_gradient_is_plain(cell, engine):
    """G = 0 . lam'lam goes through all four sweeps and adds nothing."""
    net, batch, loss = prepared(cell, engine)

    def nothing(lam):
        return (lam.lam * lam.lam * 0).sum((0, 2))

    close(penalised(net, batch, loss, nothing), co.BPTT()(net, batch, loss).gradient, 1e-15)


@on_engines
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.slow
@pytest.mark.sampled(4)
def test_padding_is_not_read(cell, engine, loss):
    net, batch, _ = prepared(cell, engine, loss=loss, seed=12)
    beyond = torch.arange(5)[:, None] >= torch.as_tensor(batch.lengths)
    assert beyond.any()
    found = []
    for fill in (torch.nan, 0.0, 1e300, -torch.inf):
        y = batch.y.clone()
        y[beyond] = fill if y.is_floating_point() else 10**6
        filled = replace(batch, u=batch.u.detach().masked_fill(beyond[..., None], fill), y=y)
        lam = costates(net, filled, loss)
        found.append(
            penalised(net, filled, loss)
            | {"lam": lam.lam, "loss": lam.loss, "y_hat": lam.trajectory.y_hat}
        )
    for other in found[1:]:
        same_bits(other, found[0])


@on_engines
@pytest.mark.parametrize("k", [-40, -3, 1, 17, 60])
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.sampled(5)
def test_loss_times_a_power_of_two_moves_the_exponent_of_costates_alone(cell, engine, k, readout):
    """Costates move by the exponent alone."""
    net, batch, _ = prepared(cell, engine, readout=readout)

    def squared(y_hat, y):
        return (y_hat - y).square().sum(-1)

    one, scaled = (costates(net, batch, lambda *y, c=c: c * squared(*y)) for c in (1.0, 2.0**k))
    same_bits(scaled.mantissa, one.mantissa)
    same_bits(scaled.lam, one.lam * 2.0**k)
    there = one.size > 0
    assert torch.equal(scaled.exponent[there], one.exponent[there] + k)
    same_bits(scaled.log_ratios().nan_to_num(), one.log_ratios().nan_to_num())


@pytest.mark.slow
@on_engines
@pytest.mark.parametrize("G", ["squared-norm", "omega", "log-ratio"])
@pytest.mark.sampled(5)
def test_frozen_parameters_change_nothing_else(cell, engine, G):
    net, batch, loss = prepared(cell, engine)
    everything = penalised(net, batch, loss, G)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(False)
        found = penalised(net, batch, loss, G)
        assert name not in found
        same_bits(found, {n: y for n, y in everything.items() if n != name})
        parameter.requires_grad_(True)


@on_engines
@pytest.mark.sampled(2)
def test_repeated_runs_are_identical(cell, engine):
    net, batch, loss = prepared(cell, engine, H=9, B=5)
    first = penalised(net, batch, loss, "log-ratio")
    for _ in range(3):
        same_bits(penalised(net, batch, loss, "log-ratio"), first)


@pytest.mark.parametrize("engine", ENGINES)
def test_linear_cell_is_matrix_powers(engine):
    """x_T = W^T x_0 + sum_t W^{T-t} (R u_t + b),  lam_t = (W^{T-t})' V' dL/da"""
    net, batch, loss = prepared(
        "elman", engine, activation="identity", readout="last", ragged=False
    )
    W, R, b, V, b_o, x0 = (getattr(net, n).detach() for n in ("W", "R", "b", "V", "b_o", "x0"))

    def power(n):
        return torch.linalg.matrix_power(W, n)

    x = x0 @ power(5).T + sum(
        (batch.u.detach()[t - 1] @ R.T + b) @ power(5 - t).T for t in range(1, 6)
    )
    e = 2 * (x @ V.T + b_o - batch.y)
    lam = costates(net, batch, loss)
    close(lam.trajectory.state, x, BAR)
    close(
        {str(t): lam.lam[t] for t in range(6)},
        {str(t): e @ V @ power(5 - t) for t in range(6)},
        BAR,
    )


@on_engines
@pytest.mark.parametrize("G", [None, "log-ratio", "omega"])
@pytest.mark.slow
@pytest.mark.sampled(3)
def test_hessian_is_symmetric(cell, engine, G):
    net, batch, loss = prepared(cell, engine, form="strided", B=2, T=3, H=3)
    lam = costates(net, batch, loss)
    value = batch.mean(lam.loss if G is None else lam.loss + co.penalties.penalty(G)(lam))
    assert oracles.asymmetry(value, dict(net.named_parameters())) <= BAR


@on_engines
@pytest.mark.sampled(2)
def test_forward_mode_does_not_need_gradients(cell, engine):
    """The change of costates and loss along u is the same when parameters are frozen; refused, if
    it cannot be had.
    """
    net, batch, loss = prepared(cell, engine, u_grad=False)
    du = torch.randn(batch.u.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for grad in (True, False):
        net.requires_grad_(grad)
        with forward_ad.dual_level():
            try:
                lam = costates(net, replace(batch, u=forward_ad.make_dual(batch.u, du)), loss)
            except co.Unsupported:
                continue
            changes = {
                "lam": forward_ad.unpack_dual(lam.lam).tangent,
                "loss": forward_ad.unpack_dual(lam.loss).tangent,
            }
        assert None not in changes.values()
        found.append(changes)
    for other in found[1:]:
        close(other, found[0], BAR)


@on_engines
@pytest.mark.sampled(2)
def test_sample_alone_is_sample_in_batch(cell, engine):
    net, batch, loss = prepared(cell, engine)
    lam = costates(net, batch, loss)
    G = co.penalties.log_ratio(lam)
    for j, n in enumerate(batch.lengths.tolist()):
        alone = replace(batch, u=batch.u[:n, j : j + 1], y=batch.y[:n, j : j + 1], lengths=None)
        one = costates(net, alone, loss)
        close(
            {str(t): one.lam[t, 0] for t in range(n + 1)},
            {str(t): lam.lam[t, j] for t in range(n + 1)},
            BAR,
        )
        close(one.loss[0], lam.loss[j], BAR)
        close(co.penalties.log_ratio(one)[0], G[j], BAR)


@on_engines
@pytest.mark.parametrize("method", [co.BPTT(), co.Penalised("log-ratio", 0.3)])
@pytest.mark.slow
@pytest.mark.sampled(4)
def test_split_batches_average_to_the_full_batch(cell, engine, method):
    net, batch, loss = prepared(cell, engine, B=6, ragged=False)
    parts = [
        replace(batch, u=batch.u[:, j], y=batch.y[:, j])
        for j in (slice(0, 1), slice(1, 3), slice(3, 6))
    ]
    found = [method(net, part, loss).gradient for part in parts]
    whole = method(net, batch, loss).gradient
    close(
        {n: sum(w * g[n] for w, g in zip((1, 2, 3), found, strict=True)) / 6 for n in whole},
        whole,
        BAR,
    )
    stacked = method.per_sample(net, batch, loss)
    close({n: y.mean(0) for n, y in stacked.items()}, whole, BAR)


@on_engines
@pytest.mark.sampled(2)
def test_state_carried_over_is_one_long_call(cell, engine):
    net, batch, _ = prepared(cell, engine, ragged=False, T=7)
    long, first = net(batch.u), net(batch.u[:4])
    second = net(batch.u[4:], x0=first.state)
    close(torch.cat([first.x, second.x[1:]]), long.x, BAR)
    theta = dict(net.named_parameters())
    value = first.y_hat.square().sum() + second.y_hat.square().sum()
    close(oracles.gradient(value, theta), oracles.gradient(long.y_hat.square().sum(), theta), BAR)


@pytest.mark.parametrize(
    ("name", "make"),
    [("elman", torch.nn.RNNCell), ("lstm", torch.nn.LSTMCell), ("gru", torch.nn.GRUCell)],
)
def test_torch_cells_are_our_cells(name, make):
    """A step function has the same outputs, costates and penalised gradient as the formula."""
    net, batch, loss = prepared(name, "cpu", x0="given")
    module = make(2, 4, dtype=torch.float64)
    other = co.Network(module, inputs=2, hidden=4, outputs=2, readout="every", dtype=torch.float64)
    with torch.no_grad():
        for ours, theirs in zip(
            (net.W, net.R, net.b), ("weight_hh", "weight_ih", "bias_ih"), strict=True
        ):
            getattr(module, theirs).copy_(ours)
        module.bias_hh.zero_()
        if name == "gru":
            module.bias_hh[8:] = net.p["b_n"]
        other.V.copy_(net.V), other.b_o.copy_(net.b_o)
    close(costates(other, batch, loss).lam, costates(net, batch, loss).lam, BAR)
    found, expected = penalised(other, batch, loss, "omega"), penalised(net, batch, loss, "omega")
    pairs = {
        "W": "step.weight_hh",
        "R": "step.weight_ih",
        "b": "step.bias_ih",
        "V": "V",
        "b_o": "b_o",
    }
    close({n: found[m] for n, m in pairs.items()}, {n: expected[n] for n in pairs}, BAR)


@pytest.fixture
def nan_memory():
    """Fresh memory holds NaN, so an entry that is read but was never written cannot pass."""
    torch.use_deterministic_algorithms(True)
    before, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("G", ["log-ratio", "omega", "norm-stabiliser"])
@pytest.mark.slow
@pytest.mark.sampled(4)
def test_nothing_unwritten_is_read(cell, ragged, readout, G, nan_memory):
    found = {}
    for engine in ENGINES:
        net, batch, loss = prepared(cell, engine, ragged=ragged, readout=readout)
        found[engine] = penalised(net, batch, loss, G) | {
            "plain": co.BPTT()(net, batch, loss).gradient["R"]
        }
        assert all(torch.isfinite(y).all() for y in found[engine].values())
    close(found["reference"], found["autograd"], BAR)
    close(found["cpu"], found["autograd"], BAR)


def test_table_is_large_enough():
    """The count of compared gradients that the suite promises, and every cell x penalty
    x engine.
    """
    cross = [
        case
        for variant, loss in cases.CROSS
        for group in cases.cross(*variant, loss)
        for case in group
    ]
    drawn = [cases.drawn(i) for i in range(cases.RANDOM)]
    assert len(cross) + len(drawn) == cases.TOTAL >= 9500
    assert len(set(cross + drawn)) == cases.TOTAL
    met = {(c.cell, c.penalty, c.engine) for c in cross}
    missing = {
        (cell, penalty, engine)
        for cell, _ in cases.VARIANTS
        for penalty in cases.PENALTIES
        for engine in ENGINES
        if (penalty, engine) != ("omega-published", "autograd")
    } - met
    assert not missing
    assert set(co.penalties.PENALTIES) <= set(cases.PENALTIES)
    assert set(co.losses.LOSSES) <= {c.loss for c in cross + drawn}
    assert set(co.cells.CELLS) <= {cell for cell, _ in cases.VARIANTS}
    assert sum(c.higher for c in cross + drawn) >= 450
