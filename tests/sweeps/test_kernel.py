"""The quick check: every loop, penalty and method equals plain loops that torch differentiates.

Cases are small and ragged, with x0 not zero. The mutation tool runs this file first, so it is meant
to fail on nearly any wrong term by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp

import coadjoint as co
from coadjoint.cells import formula, program
from coadjoint.objectives.penalties import PENALTIES
from coadjoint.sweeps import differentiable, pointwise
from coadjoint.sweeps.engines.eager import linear_loop
from coadjoint.sweeps.rows import Link
from compare import close

T, B, D, O, H = 4, 3, 2, 2, 3
LENGTHS = [2, 4, 3]
ENGINES = ("reference", "eager", "cpu", "autograd")
SWEPT = ("reference", "eager", "cpu")


@co.cell(
    slots="h c",
    gates="i j",
    parameters={"tau": 0.3, "beta": 0.8},
    reads=lambda x: (co.sin(x.h + x.c), x.h * x.c),
)
def odd(z, v, x, p):
    c = (1 - p.tau) * x.c + p.tau * co.tanh(z.i + v.i) / (1 + x.h**2)
    return co.atan(c + v.j * z.j) / (1 + co.exp(-p.beta * x.h)) - co.softplus(z.j), c


@co.cell(slots="h c", reads="c", parameters={"g": 0.7})
def second(z, v, x, p):
    return co.sigmoid(x.c * p.g + z + v), co.tanh(x.h - z - v)


@co.cell(slots="h c", reads="c h", gates="i")
def both(z, v, x, p):
    return co.cos(z.i + v.i) + x.c, co.tanh(x.h * (z.i + v.i))


@co.cell(slots="h c")
def twin(z, v, x, p):
    return co.tanh(z + v), co.sin(z + v)


@co.cell(slots="h", reads=None)
def gain(z, v, x, p):
    return v * x.h


@co.cell(slots="h", gates="a b", reads=None)
def mute(z, v, x, p):
    return co.tanh(v.a + x.h) * v.b


def _lstm(z, v, x, p):
    i, f, g, o = (a + b for a, b in zip(z, v, strict=True))
    c = torch.sigmoid(f) * x[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(z, v, x, p):
    r, u = torch.sigmoid(z[0] + v[0]), torch.sigmoid(z[1] + v[1])
    return ((1 - u) * torch.tanh(v[2] + r * (z[2] + p["b_n"])) + u * x[0],)


def _odd(z, v, x, p):
    c = (1 - p["tau"]) * x[1] + p["tau"] * torch.tanh(z[0] + v[0]) / (1 + x[0] ** 2)
    return torch.atan(c + v[1] * z[1]) / (
        1 + torch.exp(-p["beta"] * x[0])
    ) - torch.nn.functional.softplus(z[1]), c


class Hand(NamedTuple):
    """A cell written by hand for torch: f(z, v, x, p) -> slots, and r(x)."""

    cell: Any
    f: Callable[..., Any]
    r: Callable[..., Any] | None = lambda x: x[0]
    slots: int = 1
    gates: int = 1


HAND = {
    "elman": Hand("elman", lambda z, v, x, p: (torch.tanh(z[0] + v[0]),)),
    "leaky": Hand(
        "leaky", lambda z, v, x, p: ((1 - p["leak"]) * x[0] + p["leak"] * torch.tanh(z[0] + v[0]),)
    ),
    "rate": Hand(
        "rate",
        lambda z, v, x, p: ((1 - p["tau"]) * x[0] + p["tau"] * (z[0] + v[0]),),
        lambda x: torch.tanh(x[0]),
    ),
    "lstm": Hand("lstm", _lstm, slots=2, gates=4),
    "gru": Hand("gru", _gru, gates=3),
    "odd": Hand(odd, _odd, lambda x: torch.cat([torch.sin(x[0] + x[1]), x[0] * x[1]], -1), 2, 2),
    "second": Hand(
        second,
        lambda z, v, x, p: (
            torch.sigmoid(x[1] * p["g"] + z[0] + v[0]),
            torch.tanh(x[0] - z[0] - v[0]),
        ),
        lambda x: x[1],
        2,
    ),
    "both": Hand(
        both,
        lambda z, v, x, p: (torch.cos(z[0] + v[0]) + x[1], torch.tanh(x[0] * (z[0] + v[0]))),
        lambda x: torch.cat([x[1], x[0]], -1),
        2,
    ),
    "twin": Hand(
        twin, lambda z, v, x, p: (torch.tanh(z[0] + v[0]), torch.sin(z[0] + v[0])), slots=2
    ),
    "mute": Hand(mute, lambda z, v, x, p: (torch.tanh(v[0] + x[0]) * v[1],), None, gates=2),
}
CASES = [
    ("lstm", "last"), ("gru", "every"), ("odd", "last"), ("odd", "every"), ("elman", "last"),
    ("elman", "every"),
    ("rate", "every"), ("leaky", "last"), ("second", "every"), ("both", "last"), ("mute", "every"),
    ("mute", "last"), ("twin", "every"),
]  # fmt: skip


def network(name: str, engine: str = "cpu", readout: str = "last", **more: Any) -> co.Network:
    torch.manual_seed(7)
    net = co.Network(
        HAND[name].cell,
        inputs=D,
        hidden=H,
        outputs=O,
        engine=engine,
        readout=readout,
        dtype=torch.float64,
        **more,
    )
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.4 * torch.randn_like(p)).mul_(1.3)
    return net


def given(net: co.Network) -> dict[str, Tensor]:
    """Everything a run depends on, by name: the parameters, u and x0 (of each sample, not zero)."""
    g = torch.Generator().manual_seed(11)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {n: p.detach().clone() for n, p in net.named_parameters()} | {
        "u": draw(T, B, D),
        "x0": 0.7 * draw(B, H * net.slots),
    }


def targets(readout: str) -> Tensor:
    g = torch.Generator().manual_seed(13)
    return torch.randn(
        *((T, B, O) if readout == "every" else (B, O)), generator=g, dtype=torch.float64
    )


def states(
    name: str, P: dict[str, Tensor], lengths: Any, x0: Tensor | None = None, u: Tensor | None = None
) -> Any:
    """x_0 .. x_T by a plain loop; a sample that has ended stays where it is."""
    hand, n = HAND[name], torch.as_tensor(lengths)[:, None]
    u = P["u"] if u is None else u
    p = {k[2:]: v for k, v in P.items() if k.startswith("p.")}
    x = [P["x0"] * 1 if x0 is None else x0]
    for t in range(len(u)):
        parts = x[t].chunk(hand.slots, -1)
        v = (u[t] @ P["R"].T + P["b"]).chunk(hand.gates, -1)
        z = (
            (hand.r(parts) @ P["W"].T).chunk(hand.gates, -1)
            if hand.r is not None
            else [0 * y for y in v]
        )
        x.append(torch.where(t < n, torch.cat(hand.f(z, v, parts, p), -1), x[t]))
    return x


def read_out(P: dict[str, Tensor], x: Tensor) -> Tensor:
    return x[..., :H] @ P["V"].T + P["b_o"]


def loss_of(P: dict[str, Tensor], x: list[Tensor], lengths: Any, readout: str) -> Tensor:
    """Squared error, summed over outputs and steps, [B]."""
    if readout == "last":
        return (read_out(P, x[-1]) - targets("last")).square().sum(-1)
    each = (read_out(P, torch.stack(x[1:])) - targets("every")[: len(x) - 1]).square().sum(-1)
    return torch.where(torch.arange(len(x) - 1)[:, None] < torch.as_tensor(lengths), each, 0).sum(0)


def costates_of(x: list[Tensor], loss: Tensor, create: bool = True) -> Tensor:
    return torch.stack(torch.autograd.grad(loss.sum(), x, create_graph=create))


def per_sample(lam: Tensor, lengths: Any, G: Callable[[Tensor], Tensor]) -> Tensor:
    """G of lam_0 .. lam_{T_j} for each sample j."""
    return torch.stack([G(lam[: n + 1, j]) for j, n in enumerate(lengths)])


def _norm(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def _log_ratio(lam: Tensor) -> Tensor:
    log = _norm(lam[1:]).log()
    return (log[:-1] - log[1:]).square().mean()


def _variance(n: Tensor) -> Tensor:
    return (n - n.mean()).square().mean()


def omega_of(name: str, P: dict[str, Tensor], x: list[Tensor], lam: Tensor, lengths: Any) -> Tensor:
    """mean over t of (||J_t' lam_t||^2 / ||lam_t||^2 - 1)^2, step by step."""
    total = [torch.zeros(()) for _ in lengths]
    for t in range(1, len(x)):
        before = x[t - 1] * 1
        after = states(name, P, [1] * B, before, P["u"][t - 1 : t])[1]
        back = torch.autograd.grad((after * lam[t]).sum(), before, create_graph=True)[0]
        for j, n in enumerate(lengths):
            if t <= n:
                ratio = back[j].square().sum() / lam[t, j].square().sum()
                total[j] = total[j] + (ratio - 1).square() / n
    return torch.stack(total)


def objective(
    name: str, P: dict[str, Tensor], lengths: Any, readout: str, penalised: bool
) -> Tensor:
    x = states(name, P, lengths)
    loss = loss_of(P, x, lengths, readout)
    if not penalised:
        return loss.mean()
    lam = costates_of(x, loss)
    G = per_sample(
        lam, lengths, lambda lam: 0.3 * _log_ratio(lam) + 0.2 * _variance(_norm(lam[1:]))
    )
    return (loss + G + 0.1 * omega_of(name, P, x, lam, lengths)).mean()


class Ours(torch.nn.Module):
    def __init__(self, net: co.Network, lengths: Any, penalised: bool) -> None:
        super().__init__()
        self.net, self.lengths, self.penalised = net, lengths, penalised

    def forward(self, u: Tensor, x0: Tensor) -> Tensor:
        run, y = self.net(u, self.lengths, x0), targets(self.net.readout)
        if not self.penalised:
            return run.loss("squared", y).mean()
        lam = run.costates("squared", y)
        G = 0.3 * PENALTIES["log-ratio"] + 0.2 * PENALTIES["variance"] + 0.1 * PENALTIES["omega"]
        return (lam.loss + G(lam)).mean()


def ours(net: co.Network, lengths: Any, penalised: bool) -> Callable[[dict[str, Tensor]], Tensor]:
    module = Ours(net, lengths, penalised)
    return lambda P: functional_call(
        module, {f"net.{n}": v for n, v in P.items() if n not in ("u", "x0")}, (P["u"], P["x0"])
    )


def direction(P: dict[str, Tensor]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(17)
    return {n: torch.randn(v.shape, generator=g, dtype=v.dtype) for n, v in P.items()}


def gradient(
    f: Callable[[dict[str, Tensor]], Tensor], P: dict[str, Tensor], create: bool = False
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    P = {n: v.detach().clone().requires_grad_() for n, v in P.items()}
    value = f(P)
    grads = torch.autograd.grad(value, list(P.values()), create_graph=create, allow_unused=True)
    return (
        value,
        P,
        {
            n: torch.zeros_like(v) if g is None else g
            for (n, v), g in zip(P.items(), grads, strict=True)
        },
    )


def curvature(
    f: Callable[[dict[str, Tensor]], Tensor], P: dict[str, Tensor]
) -> tuple[dict[str, Tensor], ...]:
    """The gradient, and the Hessian times a direction, reverse over reverse."""
    _, P, g = gradient(f, P, create=True)
    along = sum((g[n] * d).sum() for n, d in direction(P).items())
    H = torch.autograd.grad(along, list(P.values()), allow_unused=True)
    return {n: v.detach() for n, v in g.items()}, {
        n: torch.zeros_like(v) if h is None else h for (n, v), h in zip(P.items(), H, strict=True)
    }


def forward_over_reverse(
    f: Callable[[dict[str, Tensor]], Tensor], P: dict[str, Tensor]
) -> dict[str, Tensor]:
    with forward_ad.dual_level():
        dual = {
            n: forward_ad.make_dual(P[n].clone().requires_grad_(), d)
            for n, d in direction(P).items()
        }
        grads = torch.autograd.grad(f(dual), list(dual.values()))
        return {n: forward_ad.unpack_dual(h).tangent for n, h in zip(P, grads, strict=True)}


@functools.cache
def truth(name: str, readout: str, penalised: bool = True, ragged: bool = True) -> Any:
    lengths = LENGTHS if ragged else [T] * B

    def f(P):
        return objective(name, P, lengths, readout, penalised)

    return curvature(f, given(network(name)))


def run_by_hand(
    name: str, readout: str, lengths: Any = LENGTHS
) -> tuple[dict[str, Tensor], list[Tensor], Tensor, Tensor]:
    P = {n: v.requires_grad_() for n, v in given(network(name)).items()}
    x = states(name, P, lengths)
    loss = loss_of(P, x, lengths, readout)
    return P, x, loss, costates_of(x, loss)


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "squared-norm": lambda lam: lam[1:].square().sum(-1).mean(),
    "variance": lambda lam: _variance(_norm(lam[1:])),
    "variance-l1": lambda lam: _variance(lam[1:].abs().sum(-1)),
    "log-ratio": _log_ratio,
    "ratio": lambda lam: (_norm(lam[1:-1]) / _norm(lam[2:]) - 1).square().mean(),
    "log-variance": lambda lam: _variance(_norm(lam[1:]).log()),
    "end-points": lambda lam: (_norm(lam[1]) - _norm(lam[-1])).square(),
    "share-variance": lambda lam: (
        (_norm(lam[1:]) / _norm(lam[1:]).sum() - 1 / (len(lam) - 1)).square().sum()
    ),
    "barrier": lambda lam: (
        torch.where(lam[-1].abs() < 6, (lam[-1].abs() / 6).log(), 0).square().sum()
    ),
}


def by_hand(
    name: str, readout: str, weight: Tensor, mask: Tensor | None, reduce: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of the samples, and the gradient of their weighted mean."""
    P, x, _, _ = run_by_hand(name, readout)
    lengths = torch.tensor(LENGTHS)
    if readout == "last":
        each = (read_out(P, x[-1]) - targets("last")).square().sum(-1)
        m = torch.ones(B, dtype=torch.float64) if mask is None else mask
        loss = each * m if reduce == "sum" else torch.where(m != 0, each, 0)
    else:
        each = (read_out(P, torch.stack(x[1:])) - targets("every")).square().sum(-1)
        m = torch.ones(T, B, dtype=torch.float64) if mask is None else mask
        m = torch.where(torch.arange(T)[:, None] < lengths, m, 0)
        loss = (m * each).sum(0) / (m.sum(0) if reduce == "mean" else 1)
    names = [n for n in P if n not in ("u", "x0")]
    return loss, dict(
        zip(names, torch.autograd.grad((weight * loss).mean(), [P[n] for n in names]), strict=True)
    )


def mask_of(readout: str) -> Tensor:
    m = torch.tensor([[1, 0.5, 0], [2, 1, 1], [0, 1, 0.25], [1, 0.75, 3]], dtype=torch.float64)
    return m if readout == "every" else torch.tensor([2.0, 0, 0.5], dtype=torch.float64)


C = formula.as_node
EXPRESSIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "softplus": (lambda a, b: co.softplus(a * b), lambda a, b: torch.nn.functional.softplus(a * b)),
    "relu": (lambda a, b: co.relu(a - b) ** 3, lambda a, b: torch.relu(a - b) ** 3),
    "log": (lambda a, b: co.log(2 + a * a) * b, lambda a, b: torch.log(2 + a * a) * b),
    "near one": (
        lambda a, b: co.expm1(a - b) * co.log1p(a * a * b * b),
        lambda a, b: torch.expm1(a - b) * torch.log1p(a * a * b * b),
    ),
    "sqrt": (lambda a, b: co.sqrt(1 + a**2) / b, lambda a, b: torch.sqrt(1 + a**2) / b),
    "sin cos": (
        lambda a, b: co.sin(a) * co.cos(b) - a,
        lambda a, b: torch.sin(a) * torch.cos(b) - a,
    ),
    "erf": (lambda a, b: -co.erf(a) * b, lambda a, b: -torch.erf(a) * b),
    "atan": (lambda a, b: co.atan(a - 2 * b) - (-b), lambda a, b: torch.atan(a - 2 * b) + b),
    "abs": (lambda a, b: co.abs(a) * b**2 + 3, lambda a, b: a.abs() * b**2 + 3),
    "sign step": (
        lambda a, b: (co.sign(a) + co.step(b)) * a,
        lambda a, b: (a.sign() + (b > 0)) * a,
    ),
    "powers": (
        lambda a, b: (2 + a**2) ** 1.5 * b**5 + b**-2 + b**0 + a**1,
        lambda a, b: (2 + a**2) ** 1.5 * b**5 + b**-2 + 1 + a,
    ),
    "signs": (
        lambda a, b: (
            (-a) * (-b) + a * (-co.sin(b)) - (-a + b) * -1 + (-a) + 2 * (3 * b) * (a * 0.5)
        ),
        lambda a, b: a * b - a * torch.sin(b) + (b - a) - a + 3 * b * a,
    ),
    "constants": (
        lambda a, b: (
            (
                0 * a
                + (0 - b) * (1 * a)
                + (a - a)
                + 0 / b
                + a / 1
                + (2 - 0) * a
                - 0
                + b * b
                + C(4) / C(2) * a
            )
            - (
                (C(3) - C(1))
                + (C(1) + C(2)) * a * C(2) * C(0.5)
                - C(4) ** 0.5
                + -C(2)
                + C(3) * C(2) * b
            )
        ),
        lambda a, b: 5 * a - a * b + b * b - (2 + 3 * a - 2 - 2 + 6 * b),
    ),
    "shared": (
        lambda a, b: (lambda s: s * s + s * b - s / (1 + s * s))(co.tanh(a + b)),
        lambda a, b: (lambda s: s * s + s * b - s / (1 + s * s))(torch.tanh(a + b)),
    ),
}


def test_programs_fuse_no_product_that_is_used_elsewhere() -> None:
    """Products that are outputs themselves, or are used twice, are not fused away; leaves and
    repeated outputs are copied.
    """
    a, b, c = (formula.symbol(n) for n in "abc")
    m = a * b
    for outputs in (
        [m, m + c],
        [m, m + c, c - m],
        [m + c],
        [c - m],
        [m - c, c],
        [m + c, m + c, a],
        [m + a * c],
        [m - a * c, 2 * b + m],
    ):
        at = dict(zip((a, b, c), torch.randn(3, 2, dtype=torch.float64), strict=True))
        written = [[torch.empty(2, dtype=torch.float64)] for _ in outputs]
        columns, scratch = (
            {n: [v] for n, v in at.items()},
            lambda: [torch.empty(2, dtype=torch.float64)],
        )
        program.Program(outputs, frozenset(at)).bind(columns, written, scratch)(0)
        for (w,), true in zip(written, formula.evaluate_nodes(outputs, at), strict=True):
            close(w, true, 1e-11)


LOSSES: dict[str, tuple[Any, Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "squared": ("squared", "sigmoid", lambda a, y: (torch.sigmoid(a) - y).square().sum(-1)),
    "absolute": ("absolute", "identity", lambda a, y: (a - y).abs().sum(-1)),
    "huber": (
        co.losses.huber(0.6), "tanh",
        lambda a,
        y: torch.nn.functional.huber_loss(torch.tanh(a), y, reduction="none", delta=0.6).sum(-1),
    ),
    "cross-entropy": ("cross-entropy", "softmax", lambda a,
        y: a.logsumexp(-1) - a.gather(-1, y.argmax(-1, True))[..., 0]),
    "probabilities": ("cross-entropy", "softmax", lambda a,
        y: -(y.softmax(-1) * a.log_softmax(-1)).sum(-1)),
    "binary": (
        "binary-cross-entropy", "sigmoid",
        lambda a,
        y: torch.nn.functional.binary_cross_entropy_with_logits(a, y.sigmoid(),
            reduction="none").sum(-1),
    ),
    "own output": ("squared", torch.sin, lambda a, y: (torch.sin(a) - y).square().sum(-1)),
    "own": (lambda y_hat, y: (y_hat * y).sum(-1).exp(), "softmax", lambda a,
        y: (a.softmax(-1) * y).sum(-1).exp()),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(request: pytest.FixtureRequest):
    """Arrays that are made empty hold NaN, so that one that is read before it is written shows.

    (Not where NaN is what a sweep looks for.)
    """
    torch.use_deterministic_algorithms("scale" not in request.node.name)
    yield
    torch.use_deterministic_algorithms(False)
    assert (torch.tensor(1e-310, dtype=torch.float64) * 1).item() > 0, "denormals are still flushed"


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_formulas_and_their_derivatives_equal_autograd(name: str) -> None:
    """Value, reverse, forward and mixed second derivatives of an expression, evaluated and as a
    program.
    """
    make, f = EXPRESSIONS[name]
    a, b = formula.symbol("a"), formula.symbol("b")
    da, db, s = formula.symbol("da"), formula.symbol("db"), formula.symbol("s")
    y = make(a, b)
    g = formula.pull([y], [s], [a, b])
    d = formula.push([y], {a: da, b: db})
    gd = formula.pull(d, [s], [a, b])
    dg = formula.push(g, {a: da, b: db})
    outputs = [formula.as_node(y), *g, *d, *gd, *dg]
    torch.manual_seed(5)
    at = dict(zip((a, b, da, db, s), torch.randn(5, 6, dtype=torch.float64), strict=True))
    A, B_, E, F, S = at.values()
    x = (A.clone().requires_grad_(), B_.clone().requires_grad_())
    value = f(*x)
    first = [
        0 * A if h is None else h
        for h in torch.autograd.grad((S * value).sum(), x, create_graph=True, allow_unused=True)
    ]
    along = sum(h * e for h, e in zip(first, (E, F), strict=True)) / S
    both = (
        torch.autograd.grad((along * S).sum(), x, allow_unused=True)
        if along.requires_grad
        else (0 * A, 0 * A)
    )
    both = [0 * A if h is None else h for h in both]
    true = [value, *first, along, *both, *both]
    plain = [
        torch.as_tensor(v, dtype=torch.float64).expand(6)
        for v in formula.evaluate_nodes(outputs, at)
    ]
    written = [[torch.empty(6, dtype=torch.float64)] for _ in outputs]
    program.Program(outputs, frozenset(at)).bind(
        {n: [v] for n, v in at.items()}, written, lambda: [torch.empty(6, dtype=torch.float64)]
    )(0)
    for i, (p, (w,), t) in enumerate(zip(plain, written, true, strict=True)):
        close(p, t.detach(), 1e-11, f"{name} {i}, evaluated")
        close(w, t.detach(), 1e-11, f"{name} {i}, as a program")


def test_cells_know_what_engines_rely_on() -> None:
    """What the engines rely on: which values are kept, which gates keep v apart, who reads what."""
    lstm, gru = co.cells.lstm, co.cells.gru
    assert [len(c.saved_nodes) for c in (lstm, gru, co.cells.elman(), odd, mute)] == [5, 3, 0, 4, 1]
    assert [c.side for c in (lstm, gru, odd, mute)] == [(), ("n",), ("j",), ("a", "b")]
    assert [c.read_slot for c in (lstm, gru, odd, second, both, mute)] == [
        0,
        0,
        None,
        1,
        None,
        None,
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_costates_equal_the_loops(name: str) -> None:
    """Values, costates, outputs; a target that is NaN in the padding."""
    loss, output, true = LOSSES[name]
    P, x, _, _ = run_by_hand("elman", "every")
    y, on = targets("every"), torch.arange(T)[:, None] < torch.tensor(LENGTHS)
    a = read_out(P, torch.stack(x[1:]))
    value = torch.where(on, true(a, y), 0).sum(0)
    given_y = {
        "cross-entropy": y.argmax(-1),
        "probabilities": y.softmax(-1),
        "binary": y.sigmoid(),
    }.get(name, y)
    if given_y.is_floating_point():
        given_y = torch.where(on[..., None], given_y, math.nan)
    for engine in SWEPT:
        net = network("elman", engine, "every", output=output)
        lam = net(P["u"].detach(), LENGTHS, P["x0"].detach()).costates(loss, given_y)
        close(lam.loss, value, 1e-11, "loss")
        close(lam.lam, costates_of(x, value), 1e-11, "lam")


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_norms_of_any_size_are_accurate(size: float) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    x[:, 1] = 0
    close(co.norm(size * x) / size, _norm(x), 1e-11)
    g = torch.autograd.grad(co.norm(y := (size * x).requires_grad_()).sum(), y)[0]
    close(g, x / _norm(x)[:, None], 1e-11)


def test_the_norm_and_its_derivatives_are_right_and_zero_at_zero() -> None:
    """||x|| and its derivatives, forward and reverse; all zero at x = 0."""
    x = torch.randn(2, 4, 3, dtype=torch.float64).requires_grad_()
    w = torch.randn(2, 4, dtype=torch.float64)
    e = torch.randn(2, 4, 3, dtype=torch.float64)
    for f in (
        lambda n: torch.autograd.grad((n(x) * w).sum(), x)[0],
        lambda n: grad(lambda x: (grad(lambda x: (n(x) * w).sum())(x) * e).sum())(x.detach()),
        lambda n: jvp(n, (x.detach(),), (e,))[1],
        lambda n: jvp(grad(lambda x: (n(x) * w).sum()), (x.detach(),), (e,))[1],
        lambda n: grad(lambda x: (jvp(n, (x,), (e,))[1] * w).sum())(x.detach()),
    ):
        close(f(co.norm), f(_norm), 1e-11)
    with torch.no_grad():
        x[0] = 0
    g = torch.autograd.grad(co.norm(x).sum(), x, create_graph=True)[0]
    h = torch.autograd.grad((g * e).sum(), x)[0]
    assert not g[0].any()
    assert not h[0].any()
    assert torch.isfinite(h).all()
    assert not jvp(co.norm, (x.detach(),), (e,))[1][0].any()


def test_penalties_can_be_added_weighed_and_scheduled() -> None:
    net = network("elman")
    lam = net(given(net)["u"], LENGTHS).costates("squared", targets("last"))
    a, b = PENALTIES["variance"], PENALTIES["ratio"]
    close((2 * a + b * 3)(lam), 2 * a(lam) + 3 * b(lam), 1e-11)
    assert co.penalties.penalty(a) is a
    last = torch.tensor(
        [0.0, 1, 5, 2, 3, 3, 8]
    )  # in units of the last digit: the mean cannot be told from a value
    value = co.penalties.masked_variance(
        1 + 2.0**-52 * last[:, None].double(), torch.ones(7, 1, dtype=torch.bool)
    )
    close(value * 2.0**104, last.double().var(correction=0)[None], 1e-11)
    assert [co.penalties.inverse_time(2.0, 0.5)(s) for s in (0, 2)] == [2.0, 1.0]
    assert [co.penalties.exponential(2.0, 0.5)(s) for s in (0, 2)] == [2.0, 0.5]
    assert [co.penalties.linear(1.0, 3.0, 4)(s) for s in (0, 1, 4, 9)] == [1.0, 1.5, 3.0, 3.0]


def test_the_penalised_method_equals_the_loops() -> None:
    weight = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    P, _, loss, lam = run_by_hand("gru", "every")
    G = per_sample(lam, LENGTHS, BY_HAND["variance"])
    names = [n for n in P if n not in ("u", "x0")]
    g = torch.autograd.grad((weight * (loss + 0.25 * G)).mean(), [P[n] for n in names])
    net = network("gru", readout="every")
    method = co.Penalised("variance", co.penalties.exponential(0.5, 0.5))
    batch = co.Batch(P["u"].detach(), targets("every"), LENGTHS, weight=weight, x0=P["x0"].detach())
    method(net, batch, "squared")
    e = method(net, batch, "squared")
    assert e.rho == 0.25
    close(e.gradient, dict(zip(names, g, strict=True)), 1e-11)
    close(e.penalties, G, 1e-11, "penalties")
    close(e.objective, (weight * (loss + 0.25 * G)).mean(), 1e-11, "objective")
    close(e.costates.lam[0], lam[0], 1e-11, "costates")
    e.write_grad(net)
    close(net.W.grad, e.gradient["W"], 1e-11)


def test_a_mask_on_W_and_a_fixed_start_equal_the_loops() -> None:
    """A mask on W; x0 as a tensor; both against the plain loop with W masked."""
    keep = torch.tensor([[1.0, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    start = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    net = network("elman", readout="every", mask=keep, x0=start)
    P = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()} | {
        "u": given(net)["u"]
    }
    x = states("elman", P | {"W": P["W"] * keep}, LENGTHS, start.expand(B, H))
    names = list(dict(net.named_parameters()))
    g = torch.autograd.grad(loss_of(P, x, LENGTHS, "every").mean(), [P[n] for n in names])
    e = co.BPTT()(net, co.Batch(P["u"].detach(), targets("every"), LENGTHS), "squared")
    close(e.gradient, dict(zip(names, g, strict=True)), 1e-11)
    temporal = e.temporal_components()
    close(sum(temporal.at(t + 1)["W"] for t in range(T)), e.gradient["W"], 1e-11)
    close(
        temporal.norms()["W"],
        torch.stack([temporal.at(t + 1)["W"].norm() for t in range(T)]),
        1e-11,
    )


def test_omega_published_equals_its_definition() -> None:
    """By W alone, states and costates constant; one sum over all steps and samples divided by their
    number, without the steps where ||lam_t / B||^2 < 1e-20.
    """
    P, x, _, lam = run_by_hand("rate", "every")
    fixed = {n: v.detach() for n, v in P.items()} | {"W": P["W"]}
    sizes = (
        torch.cat([_norm(lam[1 : n + 1, j].detach()) for j, n in enumerate(LENGTHS)]).sort().values
    )
    for small in (1.0, B * 1e-10 / float(sizes[3:5].mean())):
        terms = []
        for t in range(1, T + 1):
            before = x[t - 1].detach().requires_grad_()
            after = states("rate", fixed, [1] * B, before, fixed["u"][t - 1 : t])[1]
            back = torch.autograd.grad((after * lam[t].detach()).sum(), before, create_graph=True)[
                0
            ]
            for j, n in enumerate(LENGTHS):
                size = lam[t, j].detach().square().sum()
                if t <= n and float(size) * (small / B) ** 2 >= 1e-20:
                    terms.append((back[j].square().sum() / size - 1).square())
        true = torch.stack(terms).mean()
        for engine in SWEPT:
            net = network("rate", engine, "every")

            def loss(y_hat, y, small=small):
                return small * (y_hat - y).square().sum(-1)

            G = PENALTIES["omega-published"](
                net(fixed["u"], LENGTHS, fixed["x0"]).costates(loss, targets("every"))
            )
            close(G, true.expand(B), 1e-11, "value")
            grads = torch.autograd.grad(G.mean(), list(net.parameters()), allow_unused=True)
            for (name, _), g in zip(net.named_parameters(), grads, strict=True):
                assert (g is None or not g.any()) == (name != "W")
            close(grads[0], torch.autograd.grad(true, P["W"], retain_graph=True)[0], 1e-11, "by W")


def test_a_learned_start_and_a_stream_equal_the_loops() -> None:
    """x0 learned: its gradient by BPTT, RTRL, Truncated; a stream's gradients add up to BPTT's, and
    reset starts again.
    """
    net = network("odd", readout="every", x0="learned")
    P = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()} | {
        "u": given(net)["u"]
    }
    x = states("odd", P, [T] * B, P["x0"].expand(B, -1) * 1)
    names = list(dict(net.named_parameters()))
    g = torch.autograd.grad(loss_of(P, x, [T] * B, "every").mean(), [P[n] for n in names])
    true, y = dict(zip(names, g, strict=True)), targets("every")
    for method in (co.BPTT(), co.RTRL(), co.Truncated(1, T)):
        close(method(net, co.Batch(P["u"], y), "squared").gradient, true, 1e-11)
    stream = co.RTRL().stream(net, B)
    for _ in range(2):
        steps = [stream.step(P["u"][t], y[t], "squared").gradient for t in range(T)]
        close({n: sum(s[n] for s in steps) for n in names}, true, 1e-11)
        stream.reset()
    e = stream.step(P["u"][0], None, lambda y_hat: (y_hat - y[0]).square().sum(-1))
    close(e.gradient["V"], steps[0]["V"], 1e-11)
    close(e.costates.lam[1], e.trajectory.costates("squared", y[:1]).lam[1], 1e-11)
    single = co.RTRL().stream(net)
    close(
        single.step(P["u"][0, 0], None, lambda y_hat: y_hat.square().sum(-1)).losses,
        read_out(P, x[1][:1]).square().sum(-1),
        1e-11,
    )
    close(
        single.step(P["u"][1, 0], y[1, 0], "squared").losses,
        (read_out(P, x[2][:1]) - y[1, :1]).square().sum(-1),
        1e-11,
    )
    stream.reset([0, 2])
    close(stream.x[0], P["x0"], 1e-11)
    close(stream.x[1], x[1][1], 1e-11)


@pytest.mark.parametrize("name", ["lstm", "elman"])
def test_a_step_function_equals_the_formula(name: str) -> None:
    """A torch cell module runs as a step function and agrees with the formula."""
    torch.manual_seed(3)
    kind = torch.nn.LSTMCell if name == "lstm" else torch.nn.RNNCell
    cell, net = kind(D, H, dtype=torch.float64), network(name, readout="every")
    step = co.Network(cell, inputs=D, hidden=H, outputs=O, readout="every", dtype=torch.float64)
    with torch.no_grad():
        for a, b in (
            (net.W, cell.weight_hh),
            (net.R, cell.weight_ih),
            (net.V, step.V),
            (net.b_o, step.b_o),
        ):
            a.copy_(b)
        net.b.copy_(cell.bias_ih + cell.bias_hh)
    P = given(net)
    batch = co.Batch(P["u"], targets("every"), LENGTHS, x0=P["x0"])
    one, other = (co.Penalised("log-ratio")(n, batch, "squared") for n in (net, step))
    close(one.costates.lam, other.costates.lam, 1e-11)
    close(one.gradient["W"], other.gradient["step.weight_hh"], 1e-11)
    close(one.gradient["b"], other.gradient["step.bias_ih"], 1e-11)
    du = direction(P)["u"]
    close(one.trajectory.push(du), other.trajectory.push(du), 1e-11)
    close(
        co.RTRL()(step, batch, "squared").gradient["V"],
        co.BPTT()(net, batch, "squared").gradient["V"],
        1e-11,
    )


@pytest.mark.parametrize(
    ("name", "readout", "engine"),
    [
        ("lstm", "last", "cpu"),
        ("gru", "every", "cpu"),
        ("odd", "last", "reference"),
        ("odd", "every", "autograd"),
        ("lstm", "last", "autograd"),
    ],
)
def test_push_is_the_derivative_by_the_inputs(name: str, readout: str, engine: str) -> None:
    """DF(u) du, through tanh as output function, and its gradient by the parameters."""
    P, *_ = run_by_hand(name, readout)
    du, on = direction(P)["u"], torch.arange(T)[:, None] < torch.tensor(LENGTHS)

    def x(u):
        return torch.stack(states(name, P, LENGTHS, u=u))

    true = jvp(lambda u: torch.tanh(read_out(P, x(u))), (P["u"],), (du,))[1]
    true = torch.where(on[..., None], true[1:], 0) if readout == "every" else true[-1]
    net = network(name, engine, readout, output="tanh")
    found = net(P["u"], LENGTHS, P["x0"]).push(du)
    close(found, true, 1e-11, "push")
    parameters = dict(net.named_parameters())
    wanted = torch.autograd.grad(true.square().sum(), [P[n] for n in parameters])
    for g, h, n in zip(
        torch.autograd.grad(found.square().sum(), list(parameters.values())),
        wanted,
        parameters,
        strict=True,
    ):
        close(g, h, 1e-11, n)


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize(("name", "readout"), CASES)
@pytest.mark.sampled(3)
def test_penalised_gradients_and_curvature_equal_the_loops(
    name: str, readout: str, engine: str
) -> None:
    """L + log-ratio + variance + omega: its gradient by every parameter, u and x0, and its Hessian
    times a direction.
    """
    net = network(name, engine, readout)
    f, (g, Hd) = ours(net, LENGTHS, True), truth(name, readout)
    found = curvature(f, given(net))
    close(found[0], g, 1e-11)
    close(found[1], Hd, 1e-10)


def test_the_setting_for_denormals_is_kept() -> None:
    torch.set_flush_denormal(True)
    try:
        net = network("elman")
        net(given(net)["u"])
        assert (torch.tensor(1e-310, dtype=torch.float64) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_a_result_that_is_ignored_needs_no_cotangent() -> None:
    """An operation whose result the next one ignores gets no cotangent, and gives none."""
    x, y, w = (formula.symbol(n) for n in "xyw")
    first = pointwise.Pointwise((("x", (x,)),), (("y", (formula.sin(x),)),), (), frozenset())
    second = pointwise.Pointwise((("y", (y,)), ("w", (w,))), (("o", (2 * w,)),), (), frozenset())
    at = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    out = second((), first((), at)["y"], 3 * at)["o"]
    close(torch.autograd.grad(out.sum(), at)[0], torch.full_like(at, 6), 1e-11)


@pytest.mark.parametrize(
    "sources", ["g ga s s_last sa", "g s", "ga sa", "g s_last", "ga s", "g sa"]
)
@pytest.mark.parametrize("lengths", [LENGTHS, [T] * B])
@pytest.mark.parametrize("name", ["odd", "lstm", "mute"])
@pytest.mark.sampled(2)
def test_tangent_and_adjoint_are_transposes(name: str, lengths: list[int], sources: str) -> None:
    """<lam, g> + <del, ga> = <s, mu> + <sa, nu> for any sources and links; the engines agree,
    scaled or not.
    """
    found = []
    for engine in SWEPT:
        net = network(name, engine)
        P = given(net)
        run = net(P["u"], lengths, P["x0"]).run
        plan, tape, rows = run.plan, run.saved, run.plan.rows
        G = torch.Generator().manual_seed(19)
        like = {"g": tape.x, "ga": tape.a, "s": tape.x, "s_last": run.last, "sa": tape.a}
        y = {n: torch.randn(v.shape, generator=G, dtype=torch.float64) for n, v in like.items()}
        factor = torch.randn(rows.N, 1, generator=G, dtype=torch.float64)
        factor[: rows.sizes[0]], factor[-1] = 1, 0
        on = {n: v if n in sources.split() else None for n, v in y.items()}
        for link in (None, Link(rows, factor)):
            mu, nu = differentiable.tangent(plan, tape, run.W, on["g"], on["ga"], link)
            lam, delta = differentiable.adjoint(
                plan, tape, run.W, on["s"], on["s_last"], on["sa"], link
            )
            left = sum(
                (a * b).sum() for a, b in ((lam, on["g"]), (delta, on["ga"])) if b is not None
            )
            pairs = ((mu, on["s"]), (rows.last(mu), on["s_last"]), (nu, on["sa"]))
            close(left, sum((a * b).sum() for a, b in pairs if b is not None), 1e-11, "transpose")
            found.append((mu, nu, lam, delta))
            with torch.no_grad():
                short = plan.engine.adjoint(
                    plan, tape, run.W, on["s"], on["s_last"], on["sa"], link, False, False
                )
            close(short[0][:B], lam[:B], 1e-11, "lam_0, nothing kept")
            close(short[1], delta, 1e-11, "delta, nothing kept")
        if on["sa"] is None:
            m, k, drive = run.costate(on["s"], on["s_last"], None)
            d = drive()[0]
            found.append((m * 2.0 ** k[:, None], d * 2.0 ** k[rows.B :, None]))
    each = len(found) // len(SWEPT)
    for i, engine in enumerate(SWEPT):
        for one, other in zip(found[:each], found[i * each : (i + 1) * each], strict=True):
            for a, b in zip(one, other, strict=True):
                close(b, a, 1e-11, engine)
    if each == 3:
        close(found[2][0], found[0][2], 1e-11, "scaled")
        close(found[2][1], found[0][3], 1e-11, "scaled delta")


@pytest.mark.parametrize("engine", ENGINES)
def test_costates_that_are_masked_out_are_exactly_zero(engine: str) -> None:
    """A mask that leaves out every entry of a sample, or all but its first: costates that are
    exactly zero.
    """
    net = network("elman", engine, "every")
    P, mask = given(net), torch.ones(T, B)
    mask[:, 0], mask[2:, 1], mask[0, 2] = 0, 0, 0.5
    run = net(P["u"], x0=P["x0"])
    lam = run.costates("squared", targets("every"), mask=mask, reduce="mean")
    assert lam.zeros().tolist() == [T + 1, 2, 0]
    assert (lam.log_norms()[lam.norms() == 0] == -math.inf).all()
    x = states("elman", P, [T] * B, P["x0"].requires_grad_())
    each = (read_out(P, torch.stack(x[1:])) - targets("every")).square().sum(-1)
    close(lam.loss, (each * mask).sum(0) / torch.tensor([1, 2, 3.5]), 1e-11, "masked mean")
    true = costates_of(x, lam.loss.detach() * 0 + (each * mask).sum(0) / torch.tensor([1, 2, 3.5]))
    close(lam.lam, true, 1e-11, "lam")
    expected = {
        "log-ratio": [(_norm(true[1:3, 1]).log().diff()).square().sum(), _log_ratio(true[:, 2])],
        "log-variance": [_variance(_norm(true[1:3, 1]).log()), _variance(_norm(true[1:, 2]).log())],
        "ratio": [
            (_norm(true[1, 1]) / _norm(true[2, 1]) - 1).square(),
            BY_HAND["ratio"](true[:, 2]),
        ],
        "share-variance": [
            BY_HAND["share-variance"](true[:, 1]),
            BY_HAND["share-variance"](true[:, 2]),
        ],
        "variance": [BY_HAND["variance"](true[:, 1]), BY_HAND["variance"](true[:, 2])],
        "barrier": [0, BY_HAND["barrier"](true[:, 2])],
    }
    for G, values in expected.items():
        penalty = co.penalties.barrier(6.0) if G == "barrier" else PENALTIES[G]
        found = penalty(lam)
        close(found, torch.tensor([0.0, *values], dtype=torch.float64), 1e-11, G)
        for g in torch.autograd.grad(
            found.sum(), list(net.parameters()), retain_graph=True, allow_unused=True
        ):
            assert g is None or torch.isfinite(g).all()
    assert torch.isfinite(PENALTIES["omega"](lam)).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "readout"), [("odd", "every"), ("lstm", "last")])
def test_trajectories_and_costates_equal_the_loops(name: str, readout: str, engine: str) -> None:
    P, x, loss, lam = run_by_hand(name, readout)
    net, mask = (
        network(name, engine, readout),
        torch.arange(T + 1)[:, None] <= torch.tensor(LENGTHS),
    )
    on = mask[..., None]
    run = net(P["u"], torch.tensor(LENGTHS), P["x0"])
    close(run.x, torch.where(on, torch.stack(x), 0), 1e-11, "x")
    close(run.u, torch.where(on[1:], P["u"], 0), 1e-11, "u")
    close(run.state, x[-1], 1e-11, "state")
    assert torch.equal(run.mask, mask)
    assert run.lengths.tolist() == LENGTHS
    a = (
        torch.where(on[1:], read_out(P, torch.stack(x[1:])), 0)
        if readout == "every"
        else read_out(P, x[-1])
    )
    close(run.y_hat, a, 1e-11, "y_hat")
    close(run.loss("squared", targets(readout)), loss, 1e-11, "loss")
    for found in (
        run.costates("squared", targets(readout)),
        run.costates(run.loss("squared", targets(readout))),
    ):
        true = torch.where(on, lam, 0)
        close(found.lam, true, 1e-11, "lam")
        close(found.norms(), _norm(true), 1e-11, "norms")
        close(found.norms(1), true.abs().sum(-1), 1e-11, "1-norms")
        log = _norm(lam).log()
        close(found.log_norms()[mask], log[mask], 1e-11, "log norms")
        assert found.log_norms()[~mask].isnan().all()
        pairs = mask[1:]
        close(found.log_ratios()[pairs], (log[:-1] - log[1:])[pairs], 1e-11, "log ratios")
        assert found.log_ratios()[~pairs].isnan().all()
        assert found.zeros().tolist() == [0] * B
        top = found.mantissa.abs().amax(-1)[mask]
        assert float(top.min()) > 2.0**-40
        assert float(top.max()) < 2.0**40
    with torch.no_grad():
        close(
            net(P["u"], LENGTHS, P["x0"]).costates("squared", targets(readout)).lam,
            true,
            1e-11,
            "lam without a graph",
        )
    ragged = [P["u"][:n, j].detach() for j, n in enumerate(LENGTHS)]
    for u in (ragged, torch.nn.utils.rnn.pack_sequence(ragged, enforce_sorted=False)):
        close(net(u, x0=P["x0"]).x, run.x, 1e-11, "x of a list")


@pytest.mark.parametrize(("k1", "k2"), [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("readout", ["last", "every"])
def test_truncated_gradients_equal_windows_by_hand(readout: str, k1: int, k2: int) -> None:
    """Windows by hand, each sample from its own first step to its own last: the losses of steps
    fresh+1..end by a loop that starts from the detached x_begin.
    """
    P, x, _, _ = run_by_hand("gru", readout)
    names = [n for n in P if n not in ("u", "x0")]
    y, total = targets(readout), torch.zeros(())
    for j, length in enumerate(LENGTHS):
        fresh = 0
        for end in [*range(k1, length, k1), length]:
            begin = max(0, end - k2)
            run = states("gru", P, [end - begin] * B, x[begin].detach(), P["u"][begin:end])
            for t in range(fresh + 1, end + 1):
                if readout == "every" or t == length:
                    error = read_out(P, run[t - begin])[j] - (
                        y[t - 1, j] if readout == "every" else y[j]
                    )
                    total = total + error.square().sum() / B
            fresh = end
    g = dict(zip(names, torch.autograd.grad(total, [P[n] for n in names]), strict=True))
    batch = co.Batch(P["u"].detach(), y, LENGTHS, x0=P["x0"].detach())
    close(
        co.Truncated(k1, k2)(network("gru", readout=readout), batch, "squared").gradient, g, 1e-11
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("readout", ["last", "every"])
def test_all_methods_find_one_gradient(readout: str, reduce: str, masked: bool) -> None:
    """BPTT, RTRL, Truncated with k2 >= T and Penalised with weight 0: one gradient; weights, masks,
    ragged samples.
    """
    mask, weight = (
        mask_of(readout) if masked else None,
        torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64),
    )
    name = "gru" if masked else "odd"
    loss, g = by_hand(name, readout, weight, mask, reduce)
    P, net = given(network(name)), network(name, readout=readout)
    batch = co.Batch(P["u"], targets(readout), LENGTHS, mask, weight, P["x0"], reduce)
    for method in (co.BPTT(), co.RTRL(), co.Truncated(2, T), co.Penalised("variance", 0.0)):
        e = method(net, batch, "squared")
        close(e.losses, loss, 1e-11, "losses")
        close(e.loss, (weight * loss).mean(), 1e-11, "loss")
        close(e.gradient, g, 1e-11)
    close(
        torch.tensor(e.norm, dtype=torch.float64),
        torch.cat([h.flatten() for h in g.values()]).norm(),
        1e-11,
        "norm",
    )
    each = co.BPTT().per_sample(net, batch, "squared")
    close({n: h.mean(0) for n, h in each.items()}, g, 1e-11)
    temporal = co.BPTT()(net, batch, "squared").temporal_components()
    parts = [temporal.at(t + 1) for t in range(T)]
    norms = temporal.norms()
    for n in ("W", "R", "b"):
        close(sum(p[n] for p in parts), g[n], 1e-11, f"sum of grad_t by {n}")
        close(norms[n], torch.stack([p[n].norm() for p in parts]), 1e-11, f"norms of grad_t by {n}")
    close(
        norms["joint"],
        torch.stack([norms[n] for n in ("W", "R", "b")]).square().sum(0).sqrt(),
        1e-11,
        "joint",
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_lengths_and_both_sources_equal_the_loops(engine: str) -> None:
    """Samples of one length; a loss that reads the states and the output."""
    for name in ("elman", "second"):
        net = network(name, engine)
        found = curvature(ours(net, None, True), given(net))
        for one, other in zip(found, truth(name, "last", True, False), strict=True):
            close(one, other, 1e-10)
    for lengths in (LENGTHS, [T] * B):
        P, x, loss, _ = run_by_hand("lstm", "last", lengths)
        on = (torch.arange(T + 1)[:, None] <= torch.tensor(lengths))[..., None]
        more = torch.where(on, torch.stack(x).sin(), 0).sum((0, 2))
        lam = costates_of(x, loss + more)
        true = (lam[:3] ** 3).sum()
        net = network("lstm", engine)
        run = net(P["u"].detach(), lengths, P["x0"].detach())
        found = run.costates(
            run.loss("squared", targets("last")) + torch.where(on, run.x.sin(), 0).sum((0, 2))
        )
        close(found.lam[:3], lam[:3], 1e-11, "lam")
        g = torch.autograd.grad((found.lam[:3] ** 3).sum(), list(net.parameters()))
        for (n, _), h in zip(net.named_parameters(), g, strict=True):
            close(h, torch.autograd.grad(true, P[n], retain_graph=True)[0], 1e-11, n)


@pytest.mark.parametrize("engine", SWEPT)
@pytest.mark.parametrize(("name", "readout"), CASES)
@pytest.mark.sampled(3)
def test_forward_over_reverse_gives_hessian_products(name: str, readout: str, engine: str) -> None:
    """BPTT without a graph; the Hessian of L, and that of L + G, times a direction, in forward mode
    over the gradient.
    """
    net = network(name, engine, readout)
    P = given(net)
    for penalised in (False, True):
        f, (g, Hd) = ours(net, LENGTHS, penalised), truth(name, readout, penalised)
        if not penalised:
            close(gradient(f, P)[2], g, 1e-11)
        close(forward_over_reverse(f, P), Hd, 1e-10)


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("G", [*BY_HAND, "omega", "norm-stabiliser", "tangent", "output-variance"])
@pytest.mark.sampled(2)
def test_each_penalty_and_its_gradient_equal_the_loops(G: str, readout: str) -> None:
    """The value and the gradient of each penalty alone."""
    name = "rate"
    P, x, _, lam = run_by_hand(name, readout)
    lengths, v = torch.tensor(LENGTHS), direction(P)["u"]
    on = torch.arange(T)[:, None] < lengths
    if G in BY_HAND:
        true = per_sample(lam, LENGTHS, BY_HAND[G])
    elif G == "omega":
        true = omega_of(name, P, x, lam, LENGTHS)
    elif G == "norm-stabiliser":
        n = _norm(torch.stack(x))
        true = torch.where(on, (n[1:] - n[:-1]).square(), 0).sum(0) / lengths
    elif G == "tangent":
        mu = (
            jvp(lambda u: torch.stack(states(name, P, LENGTHS, u=u)), (P["u"],), (v,))[1][..., :H]
            @ P["V"].T
        )
        every = torch.where(on[..., None], (mu[1:] - 0.3).square(), 0).sum((0, 2)) / 2
        true = every if readout == "every" else (mu[-1] - 0.3).square().sum(-1) / 2
    else:
        each = [costates_of(x, read_out(P, x[-1])[:, k]) for k in range(O)]
        true = sum(per_sample(lam, LENGTHS, BY_HAND["variance"]) for lam in each) / O
    g = torch.autograd.grad(true.mean(), list(P.values()), allow_unused=True)
    expected = {
        n: torch.zeros_like(p) if h is None else h for (n, p), h in zip(P.items(), g, strict=True)
    }
    made = {"barrier": co.penalties.barrier(6.0), "tangent": co.penalties.tangent(v, 0.3)}
    for engine in ENGINES:
        net = network(name, engine, readout)

        def value(Q: dict[str, Tensor], net: co.Network = net) -> Tensor:
            with torch.no_grad():
                for n, p in net.named_parameters():
                    p.copy_(Q[n])
            run = net(Q["u"], LENGTHS, Q["x0"])
            return co.penalties.penalty(made.get(G, G))(run.costates("squared", targets(readout)))

        Q = {n: p.detach().clone().requires_grad_() for n, p in P.items()}
        found = value(Q)
        close(found, true, 1e-11, f"{G} on {engine}")
        by = {**dict(net.named_parameters()), "u": Q["u"], "x0": Q["x0"]}
        h = torch.autograd.grad(found.mean(), list(by.values()), allow_unused=True)
        close(
            {
                n: torch.zeros_like(p) if k is None else k
                for (n, p), k in zip(by.items(), h, strict=True)
            },
            expected,
            1e-11,
        )


@pytest.mark.parametrize(("name", "lengths", "chunk"), [("odd", LENGTHS, 1), ("lstm", [T] * B, 13)])
def test_many_chunks_and_blocks_change_nothing(
    name: str, lengths: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many chunks of steps and blocks of rows instead of one."""
    monkeypatch.setattr(pointwise, "BLOCK_ELEMENTS", chunk)
    monkeypatch.setattr(linear_loop, "BLOCK_ELEMENTS", chunk)
    net = network(name, "eager", "every")
    g, Hd = truth(name, "every", True, lengths is LENGTHS)
    found = curvature(ours(net, lengths, True), given(net))
    close(found[0], g, 1e-11)
    close(found[1], Hd, 1e-10)
    close(forward_over_reverse(ours(net, lengths, True), given(net)), Hd, 1e-10)


@pytest.mark.parametrize("lengths", [[T] * B, LENGTHS])
@pytest.mark.parametrize("engine", SWEPT)
@pytest.mark.parametrize("name", ["odd", "lstm"])
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_transforms_of_torch_func_nest_to_the_third_order(
    name: str, engine: str, lengths: list[int]
) -> None:
    """torch.func's transforms nested to the third order, on L: d, dd, d of the gradient, gradient
    of dd, dd of the gradient.
    """
    net = network(name, engine)
    P = given(net)
    E = direction(P)
    F = {n: d.flip(0) for n, d in E.items()}
    found = []
    for f in (ours(net, lengths, False), lambda P: objective(name, P, lengths, "last", False)):

        def d(P, f=f):
            return jvp(f, (P,), (E,))[1]

        def dd(P, d=d):
            return jvp(d, (P,), (F,))[1]

        def dg(P, f=f):
            return jvp(grad(f), (P,), (E,))[1]

        found.append([{"d": d(P), "dd": dd(P)}, dg(P), grad(dd)(P), jvp(dg, (P,), (F,))[1]])
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("gain", "engine"),
    [(g, e) for e in ("cpu", "eager") for g in (2.0**-9, -3.0, 2.0**9)]
    + [(2.0**-9, "reference"), (-3.0, "reference")],
)
@pytest.mark.parametrize("readout", ["last", "every", "masked"])
@pytest.mark.sampled(3)
def test_costates_far_outside_the_range_of_their_type_are_exact(
    readout: str, gain: float, dtype: torch.dtype, engine: str
) -> None:
    """lam_{t-1} = s_{t-1} + w lam_t far outside the range of the type, against fractions; ragged.

    "masked": read at every step, but only each sample's last counts.
    """
    steps = 150 if engine != "reference" else 40
    gains, V = ([gain], [1.5]) if readout != "every" else ([0.75, gain], [-1.5, 1.0])
    net = co.Network(
        "elman",
        activation="identity",
        inputs=1,
        hidden=len(V),
        outputs=1,
        engine=engine,
        dtype=dtype,
        readout="last" if readout == "last" else "every",
    )
    with torch.no_grad():
        for p in (net.R, net.b, net.b_o):
            p.zero_()
        net.W.copy_(torch.diag(torch.tensor(gains)))
        net.V.copy_(torch.tensor([V]))
    tol = 1e-11 if dtype == torch.float64 else 1e-5
    for n in ([steps, steps, 2 * steps // 3, 20], [steps] * 4):
        mask, y = None, torch.arange(1, steps + 1, dtype=dtype)[:, None, None].expand(-1, 4, 1)
        if readout == "last":
            y = torch.tensor(n, dtype=dtype)[:, None]
        if readout == "masked":
            mask = torch.arange(1, steps + 1)[:, None] == torch.tensor(n)
        lam = net(torch.zeros(steps, 4, 1, dtype=dtype), n).costates("squared", y, mask=mask)
        log = lam.log_norms()
        w = [Fraction(x) for x in torch.diag(net.W.detach()).tolist()]
        for j, end in enumerate(n):
            value, found = [Fraction(0)] * len(w), []
            for t in range(end, 0, -1):
                source = [-2 * t * Fraction(v) if readout == "every" or t == end else 0 for v in V]
                value = [s + g * v for s, g, v in zip(source, w, value, strict=True)]
                square = sum(v * v for v in value)
                found.append((math.log(square.numerator) - math.log(square.denominator)) / 2)
            close(
                log[1 : end + 1, j],
                torch.tensor(found[::-1], dtype=torch.float64),
                tol,
                f"sample {j}",
            )
        if readout != "every" and (
            abs(gain) < 1 or (dtype == torch.float64 and gain == -3)
        ):  # else refused
            G = PENALTIES["log-ratio"](lam)
            close(
                G,
                torch.full((4,), math.log(abs(gain)) ** 2, dtype=torch.float64).to(dtype),
                tol,
                "log-ratio",
            )
            g = torch.autograd.grad(G.mean(), net.W)[0]
            close(g, torch.full((1, 1), 2 * math.log(abs(gain)) / gain, dtype=dtype), tol, "by W")


@pytest.mark.parametrize("engine", SWEPT)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.sampled(2)
def test_each_sample_has_its_own_scale(dtype: torch.dtype, readout: str, engine: str) -> None:
    """Samples with gains and sources of their own: h' = u h, so that lam_{t-1} = s_{t-1} + u_t
    lam_t.
    """
    steps, B = 150 if engine != "reference" else 40, 12
    gains, sizes = [0.5, 2.0**9, -3.0, 2.0**-9] * 3, [-1, 2.0**-30, 2.0**20, 1] * 3
    net = co.Network(
        gain, inputs=1, hidden=1, outputs=1, engine=engine, readout=readout, bias=False, dtype=dtype
    )
    with torch.no_grad():
        net.R.fill_(1)
        net.V.fill_(1)
    u = torch.tensor(gains, dtype=dtype)[None, :, None].expand(steps, B, 1)
    y = torch.tensor(sizes, dtype=dtype)[:, None].expand(
        *((steps, B, 1) if readout == "every" else (B, 1))
    )
    for n in ([steps, 30, steps, 2 * steps // 3] * 3, [steps] * B):
        log = net(u, n).costates("squared", y).log_norms()
        for j, end in enumerate(n[:4]):
            value, found = Fraction(0), []
            for t in range(end, 0, -1):
                value = Fraction(gains[j]) * value + (
                    2 * Fraction(sizes[j]) if readout == "every" or t == end else 0
                )
                found.append(math.log(abs(value.numerator)) - math.log(value.denominator))
            tol = 1e-11 if dtype == torch.float64 else 1e-5
            close(
                log[1 : end + 1, j],
                torch.tensor(found[::-1], dtype=torch.float64),
                tol,
                f"sample {j}",
            )
