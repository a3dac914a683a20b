"""A structured W is the matrix that its structure promises, with the right gradient.

Gradients by the raw parameter are compared with autograd on plain torch, also for the cells that
bring a structure.
"""

import copy

import pytest
import torch
from torch.nn.utils import parametrize

import coadjoint as co
from coadjoint.cells.structures import (
    STRUCTURES,
    Diagonal,
    LowRank,
    Orthogonal,
    Signed,
    Skew,
    WithInverse,
)
from compare import close

F64 = torch.float64
T, B, I, D = 5, 3, 2, 4
I4 = torch.eye(D, dtype=F64)
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])


def blocks(W, of):
    """of each block [D, D] of W."""
    rows = [torch.cat([of(b) for b in row.split(D, 1)], 1) for row in W.split(D)]
    return torch.cat(rows)


def rank_one(L, N):
    """I + L N' of raw [g, k, D, 1]"""
    return torch.cat(
        [
            torch.cat([I4 + l @ n.T for l, n in zip(*row, strict=True)], 1)
            for row in zip(L, N, strict=True)
        ]
    )


def series(M):
    """exp(M - M') from exp(A / 32)"""
    A = (M - M.T) / 32
    term = out = I4
    for k in range(1, 16):
        term = term @ A / k
        out = out + term
    for _ in range(5):
        out = out @ out
    return out


def diagonal(w):
    return torch.cat([torch.cat([torch.diag(v) for v in row], 1) for row in w])


WRITTEN = {  # name: (how to ask for it, W of the raw parameters, by hand)
    "antisymmetric": ("antisymmetric", lambda M: blocks(M, lambda m: m - m.T - 0.01 * I4)),
    "skew": (
        Skew(0.7, 0.1, D),
        lambda M: blocks(M, lambda m: 0.3 * (m + m.T) + 0.7 * (m - m.T) - 0.1 * I4),
    ),
    "orthogonal": ("orthogonal", lambda M: blocks(M, series)),
    "cayley": (
        "cayley",
        lambda M: blocks(M, lambda m: torch.linalg.inv(I4 + m - m.T) @ (I4 - m + m.T)),
    ),
    "diagonal": ("diagonal", diagonal),
    "low-rank": ("low-rank", rank_one),
    "dale": ("dale", lambda M: blocks(M.abs(), lambda m: m * torch.tensor([1.0, 1, 1, -1]))),
    "signed": (Signed(SIGNS), lambda M: blocks(M.abs(), lambda m: m * SIGNS)),
}
CELLS = ["elman", "gru", "cornn"]  # one gate, three gates, two slots read


def make(structure, cell="elman", dtype=F64, **options):
    torch.manual_seed(3)
    options = {"inputs": I, "hidden": D, "outputs": 2, "engine": "cpu"} | options
    return co.Network(cell, structure=copy.deepcopy(structure), dtype=dtype, **options)


def raws(net):
    return {n: p for n, p in net.named_parameters() if n.startswith("parametrizations.W")}


def gradients(objective, leaves):
    """First derivatives and a product with the Hessian."""
    g = torch.autograd.grad(objective, leaves, create_graph=True)
    along = sum((y * torch.linspace(-1, 1, y.numel(), dtype=F64).view_as(y)).sum() for y in g)
    return [*g, *torch.autograd.grad(along, leaves)]


def objective(net, u):
    lam = net(u).costates(lambda y: (y**2).sum(-1))
    return (lam.loss + 0.3 * co.penalties.log_ratio(lam) + co.penalties.variance(lam)).mean()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", WRITTEN)
def test_gradients_by_the_raw_parameters_are_those_of_autograd(name, cell):
    """First and second order, of loss and penalties, against a plain network whose W is made by
    hand of the same leaves.
    """
    asked, by_hand = WRITTEN[name]
    net, plain = make(asked, cell), make(None, cell)
    u = torch.randn(T, B, I, dtype=F64, generator=torch.Generator().manual_seed(1))
    leaves = list(raws(net).values())
    with torch.no_grad():
        for y in leaves:
            y.copy_(torch.randn(y.shape, dtype=F64, generator=torch.Generator().manual_seed(2)) / 2)
        for n, p in plain.named_parameters():
            if n != "W":
                p.copy_(dict(net.named_parameters())[n])
    W = by_hand(*leaves)
    close(net.W, W, 1e-13)
    rest = {n: p for n, p in plain.named_parameters() if n != "W"}

    def of(u):  # functional_call would detach nothing, and takes W as it is made
        return torch.func.functional_call(plain, rest | {"W": W}, (u,))

    lam = of(u).costates(lambda y: (y**2).sum(-1))
    truth = (lam.loss + 0.3 * co.penalties.log_ratio(lam) + co.penalties.variance(lam)).mean()
    close(gradients(objective(net, u), leaves), gradients(truth, leaves), 1e-11)


@pytest.mark.parametrize(
    "cell",
    ["antisymmetric", "antisymmetric-gated", "exponential", "lipschitz", "inverse", "scrn-learned"],
)
def test_methods_cope_with_parameters_of_another_name(cell):
    """BPTT and Penalised, at once and (where they may) in segments, against autograd through the
    definition.
    """
    u, y = torch.randn(9, B, I, dtype=F64), torch.randn(B, 2, dtype=F64)
    net = make(None, cell)
    truth = make(None, cell, engine="autograd")
    truth.load_state_dict(net.state_dict())
    batch = co.Batch(u, y, lengths=[9, 4, 7])
    segments = [None] if cell in ("inverse", "scrn-learned") else [None, 3]
    for cut in segments:
        for method in (lambda s: co.BPTT(s), lambda s: co.Penalised("log-ratio", 0.3, s)):
            found, expected = (
                method(cut)(net, batch, "squared").gradient,
                method(None)(truth, batch, "squared").gradient,
            )
            assert found.keys() == expected.keys() == dict(net.named_parameters()).keys()
            close(found, expected, 1e-11, str(cut))
    if len(segments) == 1:
        with pytest.raises(co.Unsupported, match="segments"):
            co.BPTT(3)(net, batch, "squared")
    e = co.BPTT()(net, batch, "squared")
    e.write_grad(net)
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_found_by_name(name):
    net = make(name, hidden=D)
    W = net.W
    assert raws(net)
    checks = {
        "antisymmetric": lambda: torch.allclose(W + W.T, -0.02 * I4),
        "orthogonal": lambda: (W.T @ W - I4).abs().max() < 1e-14,
        "cayley": lambda: (W.T @ W - I4).abs().max() < 1e-14,
        "diagonal": lambda: torch.equal(W, torch.diag(torch.diagonal(W))),
        "low-rank": lambda: torch.linalg.matrix_rank(W - I4) == 1,
        "dale": lambda: (W[:, :3] >= 0).all() and (W[:, 3:] <= 0).all(),
    }
    assert checks[name]()
    before = net.W.detach().clone()
    net.reset_parameters()
    assert not torch.equal(net.W, before), "drawn again"
    assert torch.equal(copy.deepcopy(net).W, net.W)
    other = make(name)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.W, net.W)

    def generator():
        return torch.Generator().manual_seed(5)

    net.draw_own_parameters(generator())
    other.draw_own_parameters(generator())
    assert torch.equal(other.W, net.W)


@pytest.mark.parametrize(
    "module",
    [
        Skew(units=D),
        Skew(0.6, 0.2, D),
        Orthogonal(units=D),
        Orthogonal("cayley", D),
        Diagonal(D),
        LowRank(2, D),
        WithInverse(),
    ],
)
def test_W_can_be_assigned_and_comes_back(module):
    """W can be assigned, and comes back."""
    torch.manual_seed(0)
    shape = {"Diagonal": (2, 1, D), "LowRank": (2, 1, D, 2)}.get(type(module).__name__, (2 * D, D))
    if isinstance(module, WithInverse):
        shape = (D, D)
    raw = [torch.randn(*shape, dtype=F64) / 3 for _ in range(1 + isinstance(module, LowRank))]
    W = module(*raw)
    back = module.right_inverse(W)
    assert torch.allclose(module(*back) if isinstance(back, tuple) else module(back), W, atol=1e-12)


def test_a_W_that_no_structure_holds_is_refused():
    mirror = torch.diag(torch.tensor([1.0, 1, 1, -1], dtype=F64))
    for by in ("exp", "cayley"):
        for W in (mirror, 2 * I4, torch.diag(torch.tensor([1.0, 1, -1, -1], dtype=F64))):
            with pytest.raises(co.InputError, match="not a rotation"):
                Orthogonal(by).right_inverse(W)
    net = make(None)
    with torch.no_grad():
        co.initialisers.identity_(net.W)
    parametrize.register_parametrization(net, "W", Orthogonal())
    assert torch.equal(net.W, I4)
    for structure, words in (
        ("orthogonl", "did you mean 'orthogonal'"),
        (3, "a name or a torch module; got int"),
    ):
        with pytest.raises(co.CoadjointError, match=words):
            make(structure)
    with pytest.raises(co.InputError, match="cell 'mingru' has no W"):
        make("orthogonal", "mingru")
    with pytest.raises(co.InputError, match="a multiple of the 4 signs"):
        Signed(SIGNS)(torch.zeros(4, 6))
    with pytest.raises(co.InputError, match="square blocks of 3"):
        Skew(units=3)(torch.zeros(4, 4))
    with pytest.raises(co.InputError, match="a step function holds its own"):
        make("orthogonal", lambda u, h: h)
    for wrong in (lambda: Skew(2.0), lambda: LowRank(0), lambda: Orthogonal("qr")):
        with pytest.raises(co.InputError, match=r"beta must|rank must|unknown map"):
            wrong()


class Halved(torch.nn.Module):
    """A user's own, without a beginning and without an inverse."""

    def forward(self, M):
        return M / 2


def test_a_parametrisation_of_the_user_is_used():
    net = make(Halved())
    (raw,) = raws(net).values()
    assert torch.equal(net.W, raw / 2)
    assert float(raw.abs().max()) <= D**-0.5
    e = co.BPTT()(
        net, co.Batch(torch.randn(T, B, I, dtype=F64), torch.zeros(B, 2, dtype=F64)), "squared"
    )
    plain = make(None)
    with torch.no_grad():
        for n, p in plain.named_parameters():
            p.copy_(net.W if n == "W" else dict(net.named_parameters())[n])
    expected = co.BPTT()(plain, e.batch, "squared").gradient["W"] / 2
    close(e.gradient["parametrizations.W.original"], expected, 1e-13)


@pytest.mark.slow
def test_exponential_stays_orthogonal():
    """float32, 1,000 steps of Adam at a step size that moves A far from where it began."""
    torch.manual_seed(0)
    d = 24
    net = co.Network("exponential", inputs=2, hidden=d, outputs=1)
    start = net.W.detach().clone()
    assert float((start.T @ start - torch.eye(d)).norm()) < 1e-5
    optimiser, method = torch.optim.Adam(net.parameters(), lr=1e-2), co.BPTT()
    u, y = torch.randn(6, 4, 2), torch.randn(4, 1)
    for _ in range(1000):
        method(net, co.Batch(u, y), "squared").write_grad(net)
        optimiser.step()
    W = net.W.detach()
    assert float((W.T @ W - torch.eye(d)).norm()) < 1e-5
    assert float((W - start).norm()) > 0.5, "it moved"


def test_cayley_initialisation_has_the_published_angles():
    """Angles of the rotations of exp(A): A's blocks have s = -sqrt((1 - cos q)/(1 + cos q)) =
    -tan(q/2) on 0..pi/2.
    """
    torch.manual_seed(0)
    net = co.Network("exponential", inputs=1, hidden=401, outputs=1, dtype=F64)
    M = dict(net.named_parameters())["parametrizations.W.original"]
    A = M - M.T
    s = torch.diagonal(A, 1)[::2]
    assert len(s) == 200
    assert (A != 0).sum() == 400
    q = -2 * torch.atan(s)
    assert q.min() >= 0
    assert q.max() <= torch.pi / 2
    assert float(q.mean()) == pytest.approx(torch.pi / 4, abs=0.1)


def test_the_angles_of_a_cayley_initialisation_are_uniform():
    """Ten thousand blocks of one pair each: no angle is further from its place than
    chance allows.
    """
    M = torch.empty(20_000, 2, dtype=F64)
    Orthogonal("cayley", 2).begin(M, torch.Generator().manual_seed(0))
    A = M.unflatten(0, (-1, 2))
    q = -2 * torch.atan(A[:, 0, 1] - A[:, 1, 0])
    even = torch.linspace(0, torch.pi / 2, len(q), dtype=F64)
    assert float((q.sort().values - even).abs().max()) < 0.03
