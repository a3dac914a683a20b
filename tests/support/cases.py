"""The tables of networks, losses, penalties and options that are compared with the oracle."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import coadjoint as co
import oracles

ENGINES = ("reference", "eager", "cpu", "autograd")


@co.cell(slots="h s", gates="a b", parameters={"kappa": 0.5}, reads="h s")
def odd(z, v, x, p):
    """Two slots, two gates, z and v apart, a product, a cubic."""
    s = p.kappa * x.s + co.tanh(z.a + v.a)
    return co.tanh(s + 0.3 * x.h**3) * co.softplus(z.b * v.b), s


@co.cell(slots="h", parameters={"w": 0.9}, reads=None)
def diagonal(z, v, x, p):
    """No W at all."""
    return co.tanh(p.w * x.h + v)


@co.cell(slots="x y", parameters={"k": 0.5}, reads=lambda x: (co.tanh(x.x) * x.y, x.y))
def pair(z, v, x, p):
    """A read that is a formula of two slots."""
    return 0.6 * x.x + co.tanh(z + v), co.cos(x.x) * x.y / 2 + p.k * (z + v)


def user_activation(a):
    return co.tanh(a) * co.sigmoid(a) + 0.1 * a


def user_loss(y_hat, y):
    return (torch.log(torch.cosh(y_hat - y)) * (1 + y_hat**2)).sum(-1)


def no_target(y_hat):
    return (torch.sin(y_hat) + y_hat**2).sum(-1)


def user_penalty(lam):
    x = lam.trajectory.x
    return (lam.lam**2 + lam.lam**3 + x * lam.lam).sum((0, 2))


def refused(lam):
    """omega-published where there is no W to differentiate by; the oracle says nothing then."""
    with pytest.raises(co.Unsupported, match="differentiates with respect to W alone"):
        co.penalties.PENALTIES["omega-published"](lam)
    return 0 * lam.loss


CELLS = {"odd": odd, "diagonal": diagonal, "pair": pair}
MORE = {  # cells of the package with constants of their own: those of oracles.py
    "scrn": co.cells.scrn(0.6),
    "scrn-learned": co.cells.scrn(learned=True),
    "antisymmetric": co.cells.antisymmetric(0.4, 0.1),
    "antisymmetric-gated": co.cells.antisymmetric(0.4, 0.1, gated=True),
    "lipschitz": co.cells.lipschitz(0.3, 0.7, 0.1),
    "cornn": co.cells.cornn(0.5, 1.1, 0.7),
    "unicornn": co.cells.unicornn(0.8, 0.9),
    "inverse": co.cells.inverse(2),
    "lstm-1997-truncated": co.cells.lstm_1997(truncated=True),
}
MAKE = {  # modules of co.nn
    "tanh": co.nn.RNN,
    "relu": lambda *a, **k: co.nn.RNN(*a, nonlinearity="relu", **k),
    "lstm": co.nn.LSTM,
    "gru": co.nn.GRU,
}
ACTIVATIONS = {"sin": co.sin, "user": user_activation}
OUTPUTS = {"user": lambda a: a + 0.2 * a * a}
LOSSES = {"user": user_loss, "no-target": no_target}
FOLDED = {"cross-entropy": ("softmax", "identity"), "binary-cross-entropy": ("sigmoid", "identity")}


@dataclass(frozen=True)
class Case:
    """One configuration and its seed; the defaults are the plainest."""

    cell: str = "elman"
    activation: str = "tanh"
    loss: str = "squared"
    penalty: str = "none"
    engine: str = "reference"
    B: int = 2
    T: int = 3
    D: int = 2
    H: int = 3
    O: int = 2
    readout: str = "last"
    output: str = "identity"
    reduce: str = "sum"
    x0: str = "zero"  # zero | buffer | learned | given | given-one
    bias: bool = True
    sparse: bool = False  # a mask on W
    counted: str = "all"  # all | some (zeros in the loss mask) | weighted
    weighted: bool = False  # sample weights
    ragged: bool = False
    form: str = "tensor"  # tensor | strided | expanded | list | packed
    probabilities: bool = False  # cross-entropy with a distribution as the target
    frozen: tuple[str, ...] = ()  # parameters that do not require a gradient
    u_grad: bool = True
    dtype: torch.dtype = torch.float64
    switch: float = 2.0
    beta: float = 0.3
    tilt: float = 0.7  # beta of a tilted readout
    attended: int = 2  # b_t of an attention
    skip: bool = False  # D u in the readout
    rho: float = 0.3
    higher: bool = False  # second and third derivatives and forward mode too
    seed: int = 0

    def __str__(self):
        changed = [
            f"{k}={v}"
            for k, v in self.__dict__.items()
            if v != getattr(Case, k) or k in ("cell", "engine")
        ]
        return f"Case({', '.join(changed)})"

    @property
    def bar(self):
        """The largest relative error allowed."""
        return 1e-5 if self.dtype == torch.float32 else 1e-12 if self.T <= 64 else 1e-10


@dataclass
class Data:
    """The tensors of a case."""

    theta: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]  # what the case differentiates by: of theta, "u" and "given x0"
    u: torch.Tensor  # [T, B, D], made of the leaf "u"
    x0: torch.Tensor
    y: Any
    lengths: torch.Tensor
    loss_mask: torch.Tensor | None
    weight: torch.Tensor | None
    W_mask: torch.Tensor | None
    direction: torch.Tensor  # of the tangent penalty

    @staticmethod
    def of(case, dtype=torch.float64, oracle=True, nudge=0):
        """The case's numbers, rounded to its own type, held in `dtype`; for the oracle all of them
        require gradients.

        nudge: a seed; each number is changed in its last digit, to see how well conditioned the
        case is.
        """
        g, other = torch.Generator().manual_seed(case.seed), torch.Generator().manual_seed(nudge)
        _, _, slots, gates, reads, parameters = oracles.CELLS[case.cell]
        B, T, D, H, O = case.B, case.T, case.D, case.H, case.O

        def leaf(y, grad=True):
            y = y.to(case.dtype).to(dtype).clone()
            if nudge:
                y *= 1 + torch.finfo(case.dtype).eps * (
                    2 * torch.rand(y.shape, generator=other, dtype=dtype) - 1
                )
            return y.requires_grad_(grad)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        def rand(*shape):
            return torch.rand(*shape, generator=g, dtype=torch.float64)

        theta = {}
        rows, shown = oracles.ROWS.get(case.cell, gates) * H, oracles.SHOWS.get(case.cell, 1) * H
        if reads:
            W = randn(oracles.RAW_ROWS.get(case.cell, gates) * H, reads * H)
            W = (1.1 if T <= 7 else 0.95) * W / torch.linalg.matrix_norm(W, 2)
            if case.cell == "inverse":  # well conditioned
                W = torch.linalg.qr(W + torch.eye(H))[0] + 0.1 * W
            theta[oracles.RAW if case.cell in oracles.SHAPES else "W"] = W
        theta["R"] = 0.7 * randn(rows, D)
        if case.bias:
            theta |= {"b": 0.4 * randn(rows), "b_o": 0.4 * randn(O)}
            if case.activation == "relu":  # keep most units alive
                theta["b"] = theta["b"].abs() + 0.3
        theta["V"] = 0.7 * randn(O, shown) / H**0.5
        if case.skip:
            theta["D"] = 0.7 * randn(O, D)
        if case.readout == "attention":
            theta |= {"w_a": randn(shown) / H**0.5, "b_a": 0.5 * randn(case.attended)}
        if case.x0 == "learned":
            theta["x0"] = 0.5 * randn(slots * H)
        theta |= {f"p.{name}": 0.3 + 0.4 * rand(H) for name in parameters}
        if (
            case.cell == "exponential"
        ):  # some units silent: otherwise all costates would be of one norm
            theta["p.c"] = -theta["p.c"]
        theta = {name: leaf(y, oracle or name not in case.frozen) for name, y in theta.items()}
        leaves = {name: y for name, y in theta.items() if name not in case.frozen}

        x0 = 0.5 * randn(B, slots * H)
        given = case.x0 in ("given", "given-one")
        x0 = {"given": x0, "zero": 0 * x0[0]}.get(case.x0, x0[0])
        x0 = leaf(x0, oracle or given)
        if given:
            leaves["given x0"] = x0

        lengths = torch.full((B,), T)
        if case.ragged:
            lengths = torch.randint(1, T + 1, (B,), generator=g)
            lengths[int(torch.randint(B, (1,), generator=g))] = T
        beyond = torch.arange(T)[:, None] >= lengths
        u = randn(T, 1 if case.form == "expanded" else B, D)
        u = leaf(
            u if case.form == "expanded" else u.masked_fill(beyond[..., None], torch.nan),
            oracle or case.u_grad,
        )
        if case.u_grad:
            leaves["u"] = u
        u = u.expand(T, B, D)
        direction = leaf(randn(T, B, D), False)

        lead = (T, B) if case.readout == "every" else (B,)
        loss_mask = None
        if case.counted != "all":
            loss_mask = (rand(*lead) < 0.6).double()
            loss_mask = leaf(
                loss_mask * (0.5 + rand(*lead)) if case.counted == "weighted" else loss_mask, False
            )
        y = 1.2 * randn(*lead, O)
        if case.loss == "binary-cross-entropy":
            y = rand(*lead, O)
        if case.loss == "cross-entropy":
            y = torch.softmax(y, -1) if case.probabilities else torch.randint(O, lead, generator=g)
        hole = beyond if case.readout == "every" else torch.zeros(B, dtype=torch.bool)
        hole = hole if loss_mask is None else hole | (loss_mask == 0)
        y = leaf(y, False) if y.is_floating_point() else y
        y[hole] = torch.nan if y.is_floating_point() else -7
        weight = leaf(0.5 + rand(B), False) if case.weighted else None
        W_mask = leaf((rand(gates * H, reads * H) < 0.7).double(), False) if case.sparse else None
        y = None if case.loss in ("no-target", "values") else y
        return Data(theta, leaves, u, x0, y, lengths, loss_mask, weight, W_mask, direction)


def network(case, data):
    """The case's network, holding the data's own leaves as its parameters."""
    net = co.Network(
        (CELLS | MORE).get(case.cell, case.cell),
        inputs=case.D,
        hidden=case.H,
        outputs=case.O,
        activation=ACTIVATIONS.get(case.activation, case.activation)
        if case.cell in ("elman", "leaky", "rate")
        else None,
        readout=case.readout,
        output=OUTPUTS.get(case.output, case.output),
        bias=case.bias,
        mask=data.W_mask,
        x0=data.x0 if case.x0 == "buffer" else "learned" if case.x0 == "learned" else "zero",
        engine=case.engine,
        dtype=case.dtype,
        skip=case.skip,
        beta=case.tilt if case.readout.startswith("tilted") else None,
        steps=case.attended if case.readout == "attention" else None,
    )
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(data.theta[name]).requires_grad_(data.theta[name].requires_grad)
    return net


def batch(case, data):
    """The case's data as a user would hand it over."""
    u, lengths = data.u, data.lengths if case.ragged else None
    if case.form == "strided":
        u = u.transpose(0, 1).contiguous().transpose(0, 1)
    if case.form in ("list", "packed"):
        u, lengths = [data.u[:n, j] for j, n in enumerate(data.lengths.tolist())], None
        u = pack_sequence(u, enforce_sorted=False) if case.form == "packed" else u
    x0 = data.x0 if case.x0 in ("given", "given-one") else None
    return co.Batch(u, data.y, lengths, data.loss_mask, data.weight, x0, case.reduce)


def penalty(case, data):
    if case.penalty == "tangent":
        return co.penalties.tangent(data.direction, case.beta)
    if case.penalty == "barrier":
        return co.penalties.barrier(case.switch)
    if case.penalty == "omega-published" and not oracles.CELLS[case.cell][4]:
        return refused
    if case.penalty == "none":
        return lambda lam: 0 * lam.loss
    return co.penalties.penalty({"user": user_penalty}.get(case.penalty, case.penalty))


FULL = [
    *(("elman", a) for a in oracles.ACTIVATIONS),
    ("leaky", "tanh"), ("leaky", "softplus"), ("rate", "tanh"), ("rate", "sigmoid"),
    ("lstm", "tanh"), ("gru", "tanh"), ("odd", "tanh"), ("peephole", "tanh"),
]  # fmt: skip
NEWER = (
    "lstm-1997", "scrn", "scrn-learned", "antisymmetric", "antisymmetric-gated", "exponential",
    "lipschitz", "cornn", "unicornn",
    "inverse", "mingru", "minlstm", "lru", "lstm-1997-truncated",
)  # fmt: skip
NO_GRADIENT = (
    "lstm-1997-truncated",
)  # what comes back is no derivative: second ones are not symmetric
VARIANTS = [*FULL, *((cell, "tanh") for cell in NEWER)]
CROSS_LOSSES = ("squared", "cross-entropy", "binary-cross-entropy", "absolute", "huber", "user")
PENALTIES = (*co.penalties.PENALTIES, "user", "none")
SETTINGS = (  # one for each seed: sizes incl. T = 1, d = 1, B = 1, readouts and initial states
    {},
    {"B": 2, "T": 3, "D": 2, "H": 3, "readout": "every", "x0": "learned"},
    {"B": 1, "T": 4, "D": 1, "H": 2, "readout": "last", "x0": "given", "reduce": "mean"},
    {"B": 3, "T": 1, "D": 2, "H": 3, "readout": "every", "x0": "given"},
    {"B": 2, "T": 3, "D": 1, "H": 1, "readout": "every", "x0": "buffer", "reduce": "mean"},
)
RAGGED = (  # the same for the newer cells, of samples that differ in length, with every readout
    {"B": 3, "T": 4, "D": 2, "H": 3, "ragged": True, "x0": "given"},
    {
        "B": 2,
        "T": 3,
        "D": 2,
        "H": 3,
        "readout": "every",
        "x0": "learned",
        "ragged": True,
        "skip": True,
    },
    {"B": 2, "T": 5, "D": 1, "H": 2, "readout": "tilted", "x0": "given", "reduce": "mean"},
    {
        "B": 3,
        "T": 3,
        "D": 2,
        "H": 3,
        "readout": "attention",
        "x0": "buffer",
        "ragged": True,
        "skip": True,
    },
    {"B": 2, "T": 4, "D": 1, "H": 1, "readout": "tilted-tanh", "x0": "learned", "ragged": True},
)
STRIDE = 19  # one case in so many is differentiated further; prime to the lengths of the tables


def engine_of(case, turn):
    """Engines in turn; a step function hides the W that omega-published differentiates by."""
    engines = ENGINES[:3] if case.penalty == "omega-published" else ENGINES
    return engines[turn % len(engines)]


def cross(cell, activation, loss):
    """Groups of cases that share their data and their oracle: one group for each seed, one case for
    each penalty.
    """
    v, l = VARIANTS.index((cell, activation)), CROSS_LOSSES.index(loss)
    for seed, setting in enumerate(RAGGED if cell in NEWER else SETTINGS):
        base = Case(cell, activation, loss, seed=1000 * v + 100 * l + 10 + seed, **setting)
        base = replace(
            base, weighted=loss in ("absolute", "huber")
        )  # slopes of +-1 would cancel between samples
        if loss in FOLDED:
            base = replace(base, output=FOLDED[loss][seed % 2], probabilities=seed % 2 == 1)
        group = []
        for i, name in enumerate(PENALTIES):
            case = replace(base, penalty=name, higher=(i + 5 * l + 3 * seed + 7 * v) % STRIDE == 0)
            group.append(replace(case, engine=engine_of(case, i + l + seed)))
        yield group


CROSS = list(itertools.product(FULL, CROSS_LOSSES))
CROSS += [
    (variant, CROSS_LOSSES[i % len(CROSS_LOSSES)])
    for i, variant in enumerate(VARIANTS[len(FULL) :])
]
CROSS_CASES = len(SETTINGS) * len(PENALTIES)  # in each entry of CROSS


def drawn(i):
    """Random case number i, over all options at once; from number LATER on, of the newer cells and
    readouts.
    """
    r, later = random.Random(i), i >= LATER

    def pick(*options):
        return r.choice(options)

    def often(common, *rare):
        return r.choice([common] * len(rare) + list(rare))

    every = [*FULL, ("diagonal", "tanh"), ("pair", "tanh")]
    cell, activation = (
        r.choice(every) if not later or r.random() < 0.2 else (r.choice(NEWER), "tanh")
    )
    loss = r.choice([*CROSS_LOSSES, "no-target", "values"])
    if loss == "squared" and i % 2:  # in turn, so that no other case changes
        loss = "half-squared"
    # omega-norms takes every other turn of omega, so that it changes no other case
    names = [p for p in PENALTIES if p != "omega-norms"]
    name = r.choice([p for p in names if p != "omega-published" or oracles.CELLS[cell][4]])
    if name == "omega" and i % 2:
        name = "omega-norms"
    kind = r.random()
    sizes = {
        "B": pick(1, 2, 3, 5),
        "T": pick(1, 2, 3, 5, 7),
        "D": pick(1, 3),
        "H": pick(1, 2, 5, 8),
    }
    if kind < 0.015:
        sizes = {"B": pick(1, 2), "T": pick(64, 65, 80), "D": 2, "H": pick(3, 7)}
    elif kind < 0.05:
        sizes = {"B": 17, "T": pick(2, 3, 7), "D": 2, "H": pick(2, 5)}
    elif kind < 0.08:
        sizes = {"B": pick(2, 3), "T": pick(2, 7), "D": 3, "H": pick(31, 32, 33)}
    outputs = {
        "cross-entropy": FOLDED["cross-entropy"],
        "binary-cross-entropy": FOLDED["binary-cross-entropy"],
    }
    if cell == "exponential":  # one unit does not rotate
        sizes["H"] = max(2, sizes["H"])
    readout = pick("last", "every", *(oracles.SUMMARIES if later else ()))
    if (
        readout == "attention" and sizes["T"] == 1
    ) or cell == "exponential":  # where all shares, or norms of costates, are one
        readout = "every"
    ragged = sizes["B"] > 1 and sizes["T"] > 1 and r.random() < 0.5
    form = pick("tensor", "strided", "list", "packed", *(() if ragged else ("expanded",)))
    x0, bias = pick("zero", "buffer", "learned", "given", "given-one"), r.random() < 0.7
    W = oracles.RAW if cell in oracles.SHAPES else "W"
    names = [
        *([W] if oracles.CELLS[cell][4] else []),
        "V",
        *(f"p.{q}" for q in oracles.CELLS[cell][5]),
    ]
    names += [*(["b", "b_o"] if bias else []), *(["x0"] if x0 == "learned" else [])]
    names += (
        ["R"] if loss != "values" else []
    )  # values come with their graph: some of it must reach the states
    output = r.choice(outputs.get(loss, ("identity", "tanh", "sigmoid", "softmax", "user")))
    if output == "softmax" and loss in (
        "absolute",
        "huber",
    ):  # slopes of +-1 cancel: probabilities sum to one
        output = "tanh"
    case = Case(
        cell,
        activation,
        loss,
        name,
        **sizes,
        O=pick(2, 3) if "softmax" in (output, *outputs.get(loss, ())) else pick(1, 2, 3),
        readout=readout,
        output=output,
        reduce=pick("sum", "mean"),
        x0=x0,
        bias=bias,
        sparse=bool(oracles.CELLS[cell][4]) and sizes["H"] > 1 and r.random() < 0.3,
        counted=often("all", "some", "weighted") if loss != "values" else "all",
        weighted=r.random() < 0.3 or loss in ("absolute", "huber"),
        ragged=ragged,
        form=form,
        probabilities=r.random() < 0.5,
        frozen=tuple(r.sample(names, r.randrange(1, len(names)))) if r.random() < 0.25 else (),
        u_grad=r.random() < 0.8,
        dtype=torch.float32 if sizes["H"] > 1 and r.random() < 0.1 else torch.float64,
        rho=pick(0.1, 0.3, 1.0),
        seed=10**6 + i,
    )
    if later:
        case = replace(
            case, skip=r.random() < 0.2, tilt=pick(-1.3, 0.7, 2.0), attended=pick(2, 3, 4)
        )
    small = case.B * case.T * case.H < 100 and case.dtype == torch.float64
    return replace(case, engine=engine_of(case, i), higher=small and i % STRIDE == 0)


LATER = 2900
RANDOM = LATER + 400
CHUNK = 100  # random cases in one test
TOTAL = len(CROSS) * CROSS_CASES + RANDOM
