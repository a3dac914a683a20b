"""Engine `scan` runs the three loops of linear recurrences in O(log T) operations.

It is compared with the definition and with plain autograd.
"""

import math
from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import coadjoint as co
import problems
from coadjoint.cells.cell import Cell
from coadjoint.sweeps import engines
from coadjoint.sweeps.engines import eager, reference, scan
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.rows import Rows
from compare import close
from problems import Problem
from sampling import one_in

pytestmark = pytest.mark.slow


@co.cell(slots="a b c", gates="i j", parameters={"k": 0.5}, reads=None)
def three(z, v, x, p):
    """Three slots, a gate used apart, links that are zero, constant, of p and of the step."""
    return (
        0.5 * x.a - p.k * x.b + z.i + v.i,
        x.a * co.sigmoid(z.j + v.j),
        0.9 * x.c + co.tanh(v.i) * x.a,
    )


@co.cell(slots="a b", parameters={"k": 0.5}, reads=None)
def apart(z, v, x, p):
    """Two slots that do not meet, the same at all steps."""
    return p.k * x.a + z + v, 0.75 * x.b + (z + v)


@co.cell(slots="h", gates="f h", reads=None)
def gated(z, v, x, p):
    """The link is given as it is."""
    return (z.f + v.f) * x.h + (z.h + v.h)


@co.cell(slots="h", reads=None)
def forgetful(z, v, x, p):
    """Nothing of the state stays, and no input comes in."""
    return 0.0 * x.h


LINEAR = {"mingru": co.cells.mingru, "minlstm": co.cells.minlstm, "lru": co.cells.lru}
CELLS = {**LINEAR, "three": three, "apart": apart, "gated": gated, "forgetful": forgetful}
SIZES = [[2], [3, 3], [1, 1, 1], [3] * 7, [1] * 64, [4, 4, 3, 1], [5, 5, 5, 2, 1, 1, 1]]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name, cell in CELLS.items():
        monkeypatch.setitem(problems.CELLS, name, cell)


# the three loops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "sizes", SIZES, ids=lambda s: f"T{len(s)} B{s[0]}{'' if s[0] == s[-1] else ' ragged'}"
)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.sampled(4)
def test_the_loops_are_those_of_the_definition(name, sizes, dtype):
    Problem(name, sizes, 5, dtype).against(scan)


@pytest.mark.parametrize("name", CELLS)
def test_one_unit_equals_the_definition(name):
    for sizes in ([1], [2] * 5, [3, 1, 1]):
        Problem(name, sizes, 1).against(scan)


@pytest.fixture
def quick_loop(monkeypatch):
    """The definition takes T^2 steps of Python to find its sources; engine 'eager' is the same
    loop.
    """
    monkeypatch.setattr(problems, "reference", eager)


@pytest.mark.parametrize(
    "sizes", [[1] * 1000, [3] * 1001, [3] * 400 + [1] * 600], ids=["1000", "1001", "ragged"]
)
@pytest.mark.parametrize("name", ["mingru", "lru", "three"])
@pytest.mark.sampled(3)
def test_long_sequences_equal_the_definition(name, sizes, quick_loop):
    Problem(name, sizes, 3).against(
        scan, ("s s_last sa link", "s s_last k_last scaled"), ("g ga link",), 1e-11
    )


@pytest.mark.parametrize("name", one_in(2, LINEAR))
def test_ten_thousand_steps_equal_the_loop(name, quick_loop):
    Problem(name, [1] * 10_000, 3).against(scan, ("s sa",), ("g ga",), 1e-10)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("sizes", [[3] * 6, [4, 3, 1, 1, 1]])
def test_adjoint_and_tangent_are_transposes(name, sizes):
    P = Problem(name, sizes, 3)
    tape = P.tape(scan)
    lam, delta, _ = P.adjoint(scan, tape, "s sa link")
    g, ga = torch.randn_like(P.s), torch.randn_like(P.sa)
    mu, nu = scan.tangent(P.plan(scan), tape, None, g, ga, P.link)
    left, right = (lam * g).sum() + (delta * ga).sum(), (P.s * mu).sum() + (P.sa * nu).sum()
    assert abs(left - right) < 1e-12 * (lam.abs().sum() + delta.abs().sum())


def test_nothing_given_is_overwritten_or_handed_back():
    for name in CELLS:
        P = Problem(name, [3] * 5, 4)
        before = {n: y.clone() for n, y in vars(P).items() if isinstance(y, torch.Tensor)}
        tape = P.tape(scan)
        taped = [None if y is None else y.clone() for y in tape]
        found = [*tape]
        for given in (*problems.ADJOINT, *problems.SCALED):
            found += P.adjoint(scan, tape, given)
        for given in problems.TANGENT:
            found += P.tangent(scan, tape, given)
        assert all(torch.equal(getattr(P, n), y) for n, y in before.items())
        assert all(y is None or torch.equal(y, z) for y, z in zip(tape, taped, strict=True))
        handed = {
            y.untyped_storage().data_ptr()
            for n, y in vars(P).items()
            if n in before and n not in ("v", "p")
        }
        assert not handed & {y.untyped_storage().data_ptr() for y in found if y is not None}


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", ["s", "s_last scaled", "s link"])
@pytest.mark.parametrize("name", ["mingru", "lru", "three"])
def test_the_operations_grow_with_log_T(name, given):
    counts = []
    for T in (63, 255, 1023):  # T + 1 states
        P = Problem(name, [1] * T, 2)
        tape = P.tape(scan)
        with Count() as made:
            P.adjoint(scan, tape, given)
        counts.append(made.count)
    assert (
        0 < counts[2] - counts[1] <= counts[1] - counts[0] + 2
    )  # pointwise operations are taken in pieces


@pytest.mark.parametrize("name", CELLS)
def test_no_value_is_read_on_the_host(name):
    """On a device without values every sweep goes through: so it can be recorded as a
    CUDA graph.
    """
    P = Problem(name, [2] * 9, 5)
    vars(P).update({n: y.to("meta") for n, y in vars(P).items() if isinstance(y, torch.Tensor)})
    tape = P.tape(scan)
    for given in (*problems.ADJOINT, *problems.SCALED):
        lam, delta, _ = P.adjoint(scan, tape, given)
        assert (lam.shape, delta.shape) == (tape.x.shape, tape.a.shape)
    for given in problems.TANGENT:
        P.tangent(scan, tape, given)


# scale


def test_costates_of_any_size_are_exact_in_float32():
    """Gates of exactly one half: lam_t = 2^(t - T) s_last, to the bit, and k says the rest."""
    T, d = 10_000, 3
    rows, cell = Rows([2] * T), co.cells.mingru
    base = torch.cat([torch.zeros(2 * T, d), torch.randn(2 * T, d)], 1)
    plan = SweepPlan(cell, rows, scan)
    x, a, q = scan.forward(plan, base, None, None, torch.zeros(2, d), None)
    s_last = torch.tensor([[0.75, -3.0, 1e-3], [0.0, 1.0, -1e-20]])
    lam, _, k = scan.adjoint(
        plan, Saved(a, None, x, None, q), None, None, s_last, None, None, True, True
    )
    lam, k = lam.view(T + 1, 2, d), k.view(T + 1, 2)
    assert k.dtype == torch.int32
    top = lam.abs().amax(2)
    assert ((top >= 0.5) & (top < 1)).all()
    for t in (0, 1, 5000, 9999, 10_000):
        for b in range(2):
            for i in range(d):
                found = Fraction(lam[t, b, i].item()) * Fraction(2) ** int(k[t, b])
                assert found == Fraction(s_last[b, i].item()) / 2 ** (T - t)


def test_gates_near_one_half_are_accurate_in_float32():
    """lam_t = s_last prod A, each unit for itself: from logarithms in float64."""
    T, d = 10_000, 3
    P = Problem("mingru", [1] * T, d, torch.float32)
    P.base[:, :d] *= 0.3
    lam, _, k = P.adjoint(scan, P.tape(scan), "s_last scaled")
    assert k[0] < -9000
    logs = torch.log2(torch.sigmoid(-P.base[:, :d].double()))  # of A_1 .. A_T
    after = torch.cat([logs.flip(0).cumsum(0).flip(0), torch.zeros(1, d)])  # of A_{t+1} .. A_T
    size = torch.log2(P.s_last.abs().double()) + after - k[:, None]
    close(lam, P.s_last.sign() * torch.exp2(size), 1e-4, "lam", rows=True, least=1e-30)


@pytest.mark.parametrize("name", ["minlstm", "lru"])
def test_costates_far_below_the_range_of_float32_are_kept(name):
    """Against the definition in float64, row by row at its own scale."""
    T = 2000
    P = Problem(name, [1] * T, 3, torch.float32)
    if name == "lru":
        P.p = torch.cat(
            [torch.full((3,), -0.5), torch.tensor([0.3, 1.1, 2.0])]
        )  # |L| = exp(-exp(-0.5)), about 0.55
    _, _, k = P.adjoint(scan, P.tape(scan), "s_last scaled")
    assert k[0] < -1500
    P.against(scan, ("s_last scaled",), (), 2e-4)


def test_matrices_keep_slots_that_decay_at_their_own_pace():
    """The slot whose costate is zero stays, the other halves at every step: it is 2^-3000 of what
    could be there.
    """

    @co.cell(slots="a b", parameters={"one": 1.0, "half": 0.5}, reads=None)
    def pace(z, v, x, p):
        return p.one * x.a + (z + v), p.half * x.b + (z + v)

    T = 3000
    plan = SweepPlan(pace, Rows([1] * T), scan)
    p = torch.tensor([1.0, 0.5])
    x, a, q = scan.forward(plan, torch.zeros(T, 1), None, None, torch.zeros(1, 2), p)
    s_last = torch.tensor([[0.0, 1.0]])
    lam, _, k = scan.adjoint(
        plan, Saved(a, None, x, p, q), None, None, s_last, None, None, True, True
    )
    assert torch.equal(k, torch.arange(1 - T, 2, dtype=torch.int32))
    assert torch.equal(lam, torch.tensor([[0.0, 0.5]]).expand(T + 1, 2))


def gates(name, f, T, d=3, dtype=torch.float32, B=2):
    """A problem of `gated` with links f [T] for all units."""
    P = Problem(name, [B] * T, d, dtype)
    P.base[:, :d] = torch.as_tensor(f, dtype=dtype).repeat_interleave(B)[:, None]
    return P


def test_growth_a_cut_and_small_sources_are_kept_apart():
    """Costates grow to 2^1585, a dead gate cuts them off, and what comes after is of its own size
    again.
    """
    T = 1200
    f = torch.full((T,), 3.0, dtype=torch.float64)
    f[150] = 0
    P = gates("gated", f, T)
    P.s = torch.zeros_like(P.s)
    P.s[-2:], P.s[200:206] = 1, 1e-30
    P.x0, P.base[:, 3:] = P.x0 * 0, 0
    tape, true = P.tape(scan), P.exact()
    lam, _, k = P.adjoint(scan, tape, "s scaled")
    lam_, _, k_ = true.adjoint(reference, true.tape(reference), "s scaled")
    assert k.max() > 1500
    assert (k - k_).abs().max() <= 1
    assert (lam[:100] != 0).all()
    close(
        lam.double() * 2.0 ** (k - k_).double()[:, None], lam_, 2e-4, "lam", rows=True, least=1e-30
    )


@pytest.mark.parametrize("f", [0.0, 1.0])
def test_dead_and_open_gates_are_exact(f):
    """A link of 0 cuts and a link of 1 passes on, to the bit; a row of zeros keeps its exponent."""
    T = 37
    links = torch.ones(T)
    links[20] = f
    P = gates("gated", links, T)
    P.base[:, 3:] = 0
    x = P.tape(scan).x.view(T + 1, 2, 3)
    assert torch.equal(x, torch.where(torch.arange(T + 1)[:, None, None] > 20, f * P.x0, P.x0))
    for given in ("s_last", "s_last scaled", "s_last k_last scaled"):
        lam, delta, k = P.adjoint(scan, P.tape(scan), given)
        lam_, delta_, k_ = P.adjoint(reference, P.tape(reference), given)
        assert torch.equal(lam, lam_)
        assert torch.equal(delta, delta_)
        assert k is None or torch.equal(k, k_)


@pytest.mark.parametrize("name", ["mingru", "minlstm"])
@pytest.mark.parametrize("size", [30.0, 200.0, 2000.0])
def test_saturated_gates_equal_the_definition(name, size):
    P = Problem(name, [2] * 50, 3)
    P.base[:, :3] = size * torch.sign(P.base[:, :3])
    if name == "minlstm":
        P.base[:, 3:6] = 0.1 * P.base[:, 3:6].abs()
    P.against(scan)


def test_a_quiet_unit_does_not_spoil_the_second_adjoint():
    """Unit 1 never forgets and no loss reads it: in units of the others' costates its links grow by
    2 at every step.
    """
    T, B, d = 600, 2, 3
    net = co.Network(co.cells.mingru, inputs=2, hidden=d, outputs=1, dtype=torch.float32)
    with torch.no_grad():
        net.R[:d] = 0
        net.b[:d] = torch.tensor([0.0, -40.0, 0.1])
        net.V[:, 1] = 0
    batch = co.Batch(
        torch.randn(T, B, 2, generator=torch.Generator().manual_seed(0)), torch.ones(B, 1)
    )
    found = {}
    for engine in ("reference", "scan"):
        net.engine = engine
        found[engine] = co.Penalised("log-ratio", 1.0)(net, batch, "squared").gradient
    for name, g in found["reference"].items():
        assert torch.isfinite(found["scan"][name]).all()
        torch.testing.assert_close(
            found["scan"][name], g, rtol=1e-4, atol=1e-5 * float(g.abs().max())
        )


def bare(dtype=torch.float32, engine="scan"):
    """A network of one unit whose inputs are the link and what is added."""
    net = co.Network(gated, inputs=2, hidden=1, outputs=1, dtype=dtype, engine=engine)
    with torch.no_grad():
        net.R.copy_(torch.eye(2))
        net.b.zero_()
    return net


@pytest.mark.parametrize("lengths", [None, [200, 120]])
@pytest.mark.parametrize("engine", ["reference", "scan"])
def test_a_number_that_leaves_the_range_is_an_error_that_names_the_step(engine, lengths):
    """x_104 is too large, and the scan goes round it: what comes after it is in range again."""
    u = torch.tensor([1.0, 0.0]).repeat(200, 2, 1)
    u[103, 1, 1], u[104, :, 0] = 2e38, 1e-20
    x0 = torch.tensor([[0.0], [2e38]])
    with pytest.raises(
        co.NumericalError, match=r"the state is outside the range of float32 at t = 104 of 200"
    ):
        bare(engine=engine)(u, lengths, x0)
    assert torch.isfinite(
        bare(torch.float64, engine)(u.double(), lengths, x0.double()).x[-1, 0]
    ).all()


def test_a_sample_that_has_ended_does_not_grow_on():
    @co.cell(slots="h", parameters={"k": 3.0}, reads=None)
    def growing(z, v, x, p):
        return p.k * x.h + (z + v)

    net = co.Network(
        growing, inputs=1, hidden=1, outputs=1, dtype=torch.float32, engine="scan", bias=False
    )
    x = net(torch.zeros(70, 2, 1), [70, 5], torch.tensor([[0.0], [1e10]])).x
    assert float(x[5, 1, 0].detach()) == pytest.approx(1e10 * 3**5)


# what stands on the engine


def by_hand(name, theta, u, x):
    """One step, written again."""
    pre = theta["R"] @ u + theta["b"]
    d = len(theta["b"]) // {"mingru": 2, "minlstm": 3, "lru": 2}[name]
    if name == "mingru":
        g = 1 / (1 + torch.exp(-pre[:d]))
        return x + g * (pre[d:] - x)
    if name == "minlstm":
        f, i = (1 / (1 + torch.exp(-a)) for a in (pre[:d], pre[d : 2 * d]))
        return f / (f + i) * x + i / (f + i) * pre[2 * d :]
    L = torch.exp(torch.complex(-torch.exp(theta["p.nu"]), theta["p.theta"]))
    y = L * torch.complex(x[:d], x[d:]) + torch.sqrt(1 - L.abs() ** 2) * torch.complex(
        pre[:d], pre[d:]
    )
    return torch.cat([y.real, y.imag])


def by_autograd(name, theta, u, lengths, y):
    """Loss of the readout at the last step, costates, and loss + mean over t of squared log-ratios,
    by torch alone.
    """
    losses, values, costates = [], [], []
    for b, T in enumerate(lengths):
        x = [theta["x0"]]
        for t in range(T):
            x.append(by_hand(name, theta, u[t, b], x[-1]))
        V = theta["V"]
        loss = ((V @ x[-1][: V.shape[1]] + theta["b_o"] - y[b]) ** 2).sum()
        lam = torch.stack(torch.autograd.grad(loss, x, create_graph=True))
        log = torch.log(lam.norm(dim=1))[1:]
        losses.append(loss)
        costates.append(lam)
        values.append(loss + 0.3 * ((log[:-1] - log[1:]) ** 2).mean())
    return torch.stack(losses), torch.stack(values), costates


def setup(name, engine="scan", T=7, B=3, d=3, dtype=torch.float64):
    torch.manual_seed(5)
    net = co.Network(
        LINEAR[name], inputs=2, hidden=d, outputs=2, x0="learned", engine=engine, dtype=dtype
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64))
    u = torch.randn(T, B, 2, dtype=torch.float64).to(dtype).requires_grad_()
    return net, u, torch.randn(B, 2, dtype=torch.float64).to(dtype)


def derivatives(value, leaves):
    """First derivatives, and those of their product with a fixed direction."""
    first = torch.autograd.grad(value, leaves, create_graph=True)
    way = sum(
        (g * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view(g.shape)).sum() for g in first
    )
    return [*first, *torch.autograd.grad(way, leaves, retain_graph=True)]


@pytest.mark.parametrize("lengths", [[7, 7, 7], [4, 7, 2]], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_costates_and_penalty_equal_autograd(name, lengths):
    net, u, y = setup(name)
    theta = dict(net.named_parameters())
    leaves = [*theta.values(), u]
    losses, values, costates = by_autograd(name, theta, u, lengths, y)
    true = [*derivatives(losses.sum(), leaves), *derivatives(values.sum(), leaves)]
    for engine in ("scan", "reference"):
        net.engine = engine
        lam = net(u, lengths=None if lengths[0] == lengths[2] else lengths).costates("squared", y)
        for b, T in enumerate(lengths):
            torch.testing.assert_close(lam.lam[: T + 1, b], costates[b], rtol=1e-11, atol=1e-13)
        total = lam.loss + 0.3 * co.penalties.log_ratio(lam)
        found = [*derivatives(lam.loss.sum(), leaves), *derivatives(total.sum(), leaves)]
        for ours, expected in zip(found, true, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("penalty", ["log-ratio", "variance", "omega", "barrier", "share-variance"])
@pytest.mark.parametrize("name", LINEAR)
def test_penalised_gradients_equal_those_of_the_definition(name, penalty):
    net, u, y = setup(name, T=33)
    batch, found = co.Batch(u.detach(), y, [33, 20, 1]), {}
    for engine in ("reference", "scan"):
        net.engine = engine
        found[engine] = co.Penalised(penalty, 0.5)(net, batch, "squared").gradient
    for n, g in found["reference"].items():
        torch.testing.assert_close(
            found["scan"][n], g, rtol=1e-10, atol=1e-12 * max(1.0, float(g.abs().max()))
        )


@pytest.mark.parametrize("name", LINEAR)
def test_forward_mode_equals_the_definition(name):
    net, u, _ = setup(name)

    def run(u):
        return net(u).y_hat

    v = torch.randn_like(u)
    value, along = torch.func.jvp(run, (u.detach(),), (v,))
    net.engine = "reference"
    value_, along_ = torch.func.jvp(run, (u.detach(),), (v,))
    torch.testing.assert_close(value, value_, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(along, along_, rtol=1e-12, atol=1e-13)


def test_padding_beyond_the_end_of_a_sample_changes_nothing():
    net, u, y = setup("mingru")
    lengths = [4, 7, 2]
    gone = torch.arange(7)[:, None] >= torch.tensor(lengths)
    found = []
    for filler in (0.0, torch.nan):
        data = u.detach().masked_fill(gone[..., None], filler)
        found.append(
            co.Penalised("log-ratio", 0.5)(net, co.Batch(data, y, lengths), "squared").gradient
        )
    assert all(torch.equal(found[0][n], g) for n, g in found[1].items())


def test_a_sequence_can_be_swept_in_segments():
    """A sequence swept in parts hands its costate, with its exponent, from part to part."""
    net, u, y = setup("mingru", T=96, dtype=torch.float32)
    batch = co.Batch(u.detach(), y)
    whole = co.Penalised("log-ratio", 0.5)(net, batch, "squared").gradient
    parts = co.Penalised("log-ratio", 0.5, segments=3)(net, batch, "squared").gradient
    for n, g in whole.items():
        torch.testing.assert_close(parts[n], g, rtol=1e-4, atol=1e-5)


def test_lru_learns_to_remember():
    """The first input of a sequence of noise, ten steps later."""
    torch.manual_seed(0)
    net = co.Network(co.cells.lru, inputs=1, hidden=16, outputs=1, engine="scan")
    with torch.no_grad():
        net.p["nu"].uniform_(-4, -1)
        net.p["theta"].uniform_(0, math.pi)
    adam, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    for _ in range(400):
        u = torch.randn(10, 64, 1)
        loss = net(u).loss("squared", u[0])
        adam.zero_grad()
        loss.mean().backward()
        adam.step()
        losses.append(float(loss.detach().mean()))
    assert sum(losses[:5]) / 5 > 0.7
    assert sum(losses[-20:]) / 20 < 0.05


# which cells


@co.cell(slots="h", reads=None)
def stepping(z, v, x, p):
    """Linear for its slope, not for its values."""
    return 0.5 * x.h + co.sign(x.h) + z + v


@co.cell(slots="h", reads=None)
def squared(z, v, x, p):
    return x.h * x.h + z + v


@co.cell(slots="h", gates="a b", reads=None)
def below(z, v, x, p):
    return (z.a + v.a) / (1 + x.h)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            co.cells.elman(),
            "engine 'scan' is for recurrences without W, but cell 'elman' has one. Use "
            "engine='auto'",
        ),
        (co.cells.elman("identity"), "without W, but cell 'elman' has one"),
        (co.cells.lstm, "without W, but cell 'lstm' has one"),
        (stepping, "is for steps that are linear in the state, but that of cell 'stepping' is not"),
        (squared, "that of cell 'squared' is not"),
        (below, "that of cell 'below' is not"),
    ],
    ids=lambda y: y.name if isinstance(y, Cell) else "",
)
def test_other_cells_are_declined_with_a_sentence(cell, words):
    with pytest.raises(co.Unsupported, match=words):
        co.Network(cell, inputs=1, hidden=2, outputs=1, engine="scan")
    assert co.Network(cell, inputs=1, hidden=2, outputs=1).engine != "scan"


@pytest.mark.parametrize("name", CELLS)
def test_linear_cells_are_taken(name):
    assert scan.cell_refusal(CELLS[name]) is None
    choice = engines.resolve("scan", CELLS[name], "cpu")
    assert (choice, choice.why) == ("scan", "requested by name")


def test_it_is_chosen_on_a_gpu_for_the_cells_it_takes(monkeypatch, caplog):
    """On a GPU, for the cells it takes; a CPU has the quicker loops."""
    choice = engines.resolve("auto", co.cells.mingru, "cuda")
    assert (choice, choice.why) == ("scan", "the cell is a formula and the data is on cuda")
    assert engines.resolve("auto", co.cells.lru, "cpu") in ("cpu", "eager")
    monkeypatch.setattr(engines, "device_refusal", lambda name, device: None)
    choice = engines.resolve("auto", co.cells.lstm, "cuda")
    assert choice == "cuda"
    declined = (
        "engine 'scan' is for recurrences without W, but cell 'lstm' has one. Use engine='auto'."
    )
    assert choice.why == f"the cell is a formula and the data is on cuda; {declined}"
    assert not caplog.text  # nothing is missing


def test_a_missing_engine_is_named_before_a_declined_cell(monkeypatch, caplog):
    engines.warn_once.cache_clear()
    monkeypatch.setattr(
        engines, "device_refusal", lambda name, device: "is missing." if name == "cuda" else None
    )
    choice = engines.resolve("auto", co.cells.lstm, "cuda")
    assert (choice, choice.why) == (
        "eager",
        "the cell is a formula and the data is on cuda; engine 'cuda' is missing.",
    )
    assert "using engine 'eager': engine 'cuda' is missing." in caplog.text
