"""The slow truth: one sample at a time, plain torch operations in float64, and autograd.

Nothing here uses coadjoint: cells, output functions, losses and penalties are written again by
hand. Each sample has its own length; there is no padding and no mask of steps, and a step that does
not exist is never computed. Each x_t is one stacked node ([h, c] for an LSTM) that the next step
takes apart, so autograd.grad(loss, [x_0 .. x_T]) gives lam_t = dL/dx_t by the state handed to step
t + 1.
"""

import functools
import itertools
import math

import torch

# d: units; z = W r(x), v = R u + b: [gates d]; x: [slots d]; p: {name: [d]}
ACTIVATIONS = {
    "tanh": torch.tanh,
    "sigmoid": lambda a: 1 / (1 + torch.exp(-a)),
    "relu": lambda a: a * (a > 0),
    "identity": lambda a: a,
    "softplus": lambda a: torch.log1p(torch.exp(a)),
    "sin": torch.sin,
    "user": lambda a: torch.tanh(a) / (1 + torch.exp(-a)) + 0.1 * a,
}


def sigmoid(a):
    return 1 / (1 + torch.exp(-a))


def elman(z, v, x, p, sigma):
    return sigma(z + v)


def leaky(z, v, x, p, sigma):
    return (1 - p["leak"]) * x + p["leak"] * sigma(z + v)


def rate(z, v, x, p, sigma):
    return (1 - p["tau"]) * x + p["tau"] * (z + v)


def lstm(z, v, x, p, sigma):
    c = x.chunk(2)[1]
    i, f, g, o = (z + v).chunk(4)
    c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
    return torch.cat([sigmoid(o) * torch.tanh(c), c])


def peephole(z, v, x, p, sigma):
    c = x.chunk(2)[1]
    i, f, g, o = (z + v).chunk(4)
    new = sigmoid(f + p["pf"] * c) * c + sigmoid(i + p["pi"] * c) * torch.tanh(g)
    return torch.cat([sigmoid(o + p["po"] * new) * torch.tanh(new), new])


def gru(z, v, x, p, sigma):
    (zr, zu, zn), (vr, vu, vn) = z.chunk(3), v.chunk(3)
    keep = sigmoid(zu + vu)
    return (1 - keep) * torch.tanh(vn + sigmoid(zr + vr) * (zn + p["b_n"])) + keep * x


def odd(z, v, x, p, sigma):
    (za, zb), (va, vb), (h, s) = z.chunk(2), v.chunk(2), x.chunk(2)
    s = p["kappa"] * s + torch.tanh(za + va)
    return torch.cat([torch.tanh(s + 0.3 * h * h * h) * torch.log1p(torch.exp(zb * vb)), s])


def diagonal(z, v, x, p, sigma):
    return torch.tanh(p["w"] * x + v)


def pair(z, v, x, p, sigma):
    x1, x2 = x.chunk(2)
    return torch.cat([0.6 * x1 + torch.tanh(z + v), torch.cos(x1) * x2 / 2 + p["k"] * (z + v)])


def pair_read(x, sigma):
    x1, x2 = x.chunk(2)
    return torch.cat([torch.tanh(x1) * x2, x2])


# cells with structured weights, at constants of their own (cases.MORE makes the same); v is what
# ENTER made of it


def lstm_1997(z, v, x, p, sigma):
    c = x.chunk(2)[1]
    i, g, o = (z + v).chunk(3)
    c = c + sigmoid(i) * (4 * sigmoid(g) - 2)
    return torch.cat([sigmoid(o) * (2 * sigmoid(c) - 1), c])


def scrn(z, v, x, p, sigma):
    (v_h, into_s), s = v.chunk(2), x.chunk(2)[1]
    return torch.cat([sigmoid(z + v_h), slowness(p) * s + into_s])


def slowness(p):
    return sigmoid(p["beta"]) if "beta" in p else 0.6


def scrn_enters(v, W, p, t):
    """h also reads P times what enters s."""
    (v_h, v_s), P = v.chunk(2), W[:, len(W) :]
    into_s = (1 - slowness(p)) * v_s
    return torch.cat([v_h + P @ into_s, into_s])


def antisymmetric(z, v, x, p, sigma):
    return x + 0.4 * torch.tanh(z + v)


def antisymmetric_gated(z, v, x, p, sigma):
    v, g = v.chunk(2)
    return x + 0.4 * sigmoid(z + g) * torch.tanh(z + v)


def skew(M, beta, gamma):
    return (1 - beta) * (M + M.T) + beta * (M - M.T) - gamma * torch.eye(len(M), dtype=M.dtype)


def exponential(z, v, x, p, sigma):
    a = z + v
    size = abs(a) + p["c"]
    return torch.where(a > 0, 1.0, -1.0) * torch.where(size > 0, size, 0)


def exp_of(M):
    """The series."""
    A, total = M - M.T, torch.eye(len(M), dtype=M.dtype)
    term = total
    for k in range(1, 40):
        term = term @ A / k
        total = total + term
    return total


def lipschitz(z, v, x, p, sigma):
    a, w = z.chunk(2)
    return x + 0.3 * (a + torch.tanh(w + v))


def cornn(z, v, x, p, sigma):
    y, s = x.chunk(2)
    s = s + 0.5 * (torch.tanh(z + v) - 1.1 * y - 0.7 * s)
    return torch.cat([y + 0.5 * s, s])


def unicornn(z, v, x, p, sigma):
    y, s = x.chunk(2)
    dl = 0.8 * (0.5 + 0.5 * torch.tanh(p["c"] / 2))
    s = s - dl * (torch.tanh(p["w"] * y + v) + 0.9 * y)
    return torch.cat([y + dl * s, s])


def inverse(z, v, x, p, sigma):
    plain, turned = z.chunk(2)
    v, on = v.chunk(2)
    return torch.tanh(plain * on + turned * (1 - on) + v)


def inverse_enters(v, W, p, t):
    """t = 1, 2: the inverse; 3, 4: W; ..."""
    return torch.cat([v, torch.full_like(v, [0.0, 0.0, 1.0, 1.0][(t - 1) % 4])])


def mingru(z, v, x, p, sigma):
    g, h = v.chunk(2)
    return x + sigmoid(g) * (h - x)


def minlstm(z, v, x, p, sigma):
    f, i, h = v.chunk(3)
    f, i = sigmoid(f), sigmoid(i)
    return f / (f + i) * x + i / (f + i) * h


def lru(z, v, x, p, sigma):
    state, enters = (torch.complex(*y.chunk(2)) for y in (x, v))
    L = torch.exp(torch.complex(-torch.exp(p["nu"]), p["theta"]))
    new = L * state + torch.sqrt(1 - L.abs() ** 2) * enters
    return torch.cat([new.real, new.imag])


RAW = "parametrizations.W.original"
SHAPES = {  # W of its raw parameter
    "antisymmetric": lambda M: skew(M, 1, 0.1),
    "antisymmetric-gated": lambda M: skew(M, 1, 0.1),
    "exponential": exp_of,
    "lipschitz": lambda M: torch.cat([skew(block, 0.7, 0.1) for block in M.split(M.shape[1])]),
    "inverse": lambda M: torch.cat([M, torch.linalg.solve(M, torch.eye(len(M), dtype=M.dtype))]),
}
RAW_ROWS = {"inverse": 1}  # blocks of the raw parameter where W has more
ROWS = {
    "scrn": 2,
    "scrn-learned": 2,
    "antisymmetric-gated": 2,
    "lipschitz": 1,
    "inverse": 1,
}  # of R, where it has not one for each gate
SHOWS = {"scrn": 2, "scrn-learned": 2, "lru": 2}  # slots that the readout reads
ENTER = {"scrn": scrn_enters, "scrn-learned": scrn_enters, "inverse": inverse_enters}
CELLS = {  # name: step, read, slots, gates, reads, parameters
    "elman": (elman, lambda x, s: x, 1, 1, 1, ()),
    "leaky": (leaky, lambda x, s: x, 1, 1, 1, ("leak",)),
    "rate": (rate, lambda x, s: s(x), 1, 1, 1, ("tau",)),
    "lstm": (lstm, lambda x, s: x.chunk(2)[0], 2, 4, 1, ()),
    "gru": (gru, lambda x, s: x, 1, 3, 1, ("b_n",)),
    "peephole": (peephole, lambda x, s: x.chunk(2)[0], 2, 4, 1, ("pi", "pf", "po")),
    "odd": (odd, lambda x, s: x, 2, 2, 2, ("kappa",)),
    "diagonal": (diagonal, None, 1, 1, 0, ("w",)),
    "pair": (pair, pair_read, 2, 1, 2, ("k",)),
    "lstm-1997": (lstm_1997, lambda x, s: x.chunk(2)[0], 2, 3, 1, ()),
    "lstm-1997-truncated": (lstm_1997, lambda x, s: x.chunk(2)[0].detach(), 2, 3, 1, ()),
    "scrn": (scrn, lambda x, s: x, 2, 1, 2, ()),
    "scrn-learned": (scrn, lambda x, s: x, 2, 1, 2, ("beta",)),
    "antisymmetric": (antisymmetric, lambda x, s: x, 1, 1, 1, ()),
    "antisymmetric-gated": (antisymmetric_gated, lambda x, s: x, 1, 1, 1, ()),
    "exponential": (exponential, lambda x, s: x, 1, 1, 1, ("c",)),
    "lipschitz": (lipschitz, lambda x, s: x, 1, 2, 1, ()),
    "cornn": (cornn, lambda x, s: x, 2, 1, 2, ()),
    "unicornn": (unicornn, None, 2, 1, 0, ("w", "c")),
    "inverse": (inverse, lambda x, s: x, 1, 2, 1, ()),
    "mingru": (mingru, None, 1, 2, 0, ()),
    "minlstm": (minlstm, None, 1, 3, 0, ()),
    "lru": (lru, None, 2, 2, 0, ("nu", "theta")),
}


def weight(cell, theta, mask):
    """W as z = W r(x) has it."""
    if cell in SHAPES:
        W = SHAPES[cell](theta[RAW])
        return W if mask is None else W * mask
    W = theta.get("W")
    return W if W is None or mask is None else W * mask


def slowed(cell, W, p):
    """SCRN: P s' = P alpha s + ..., so z reads P alpha."""
    if not cell.startswith("scrn"):
        return W
    return torch.cat([W[:, : len(W)], W[:, len(W) :] * slowness(p)], 1)


def mean_over_steps(h, theta, case):
    return sum(h) / len(h)


def tilted(h, theta, case):
    return torch.log(sum(torch.exp(case.tilt * y) for y in h) / len(h)) / case.tilt


def tilted_tanh(h, theta, case):
    """log tanh(m), in a form that keeps its digits where tanh(m) is nearly 1, and of which nothing
    is infinite where exp(m) is.
    """
    m = sum(torch.exp(case.tilt * y) for y in h) / len(h)
    e = torch.exp(-2 * m)
    return torch.where(m < 1, torch.log(torch.tanh(m)), torch.log1p(-2 * e / (1 + e))) / case.tilt


def attention(h, theta, case):
    b = theta["b_a"]
    e = [torch.exp(torch.tanh(theta["w_a"] @ y + b[min(t, len(b) - 1)])) for t, y in enumerate(h)]
    return sum(w * y for w, y in zip(e, h, strict=True)) / sum(e)


SUMMARIES = {
    "mean": mean_over_steps,
    "tilted": tilted,
    "tilted-tanh": tilted_tanh,
    "attention": attention,
}

OUTPUTS = {
    "identity": lambda a: a,
    "sigmoid": sigmoid,
    "softmax": lambda a: torch.exp(a) / torch.exp(a).sum(),
    "tanh": torch.tanh,
    "user": lambda a: a + 0.2 * a * a,
}


def log_sum_exp(a):
    return torch.log(torch.exp(a).sum())


def cross_entropy(a, y_hat, y):
    return (y * (log_sum_exp(a) - a)).sum() if y.is_floating_point() else log_sum_exp(a) - a[y]


def huber(a, y_hat, y):
    total = 0
    for e in y_hat - y:
        total = total + (0.5 * e * e if abs(e) <= 1 else abs(e) - 0.5)
    return total


LOSSES = {
    "squared": lambda a, y_hat, y: ((y_hat - y) ** 2).sum(),
    "half-squared": lambda a, y_hat, y: ((y_hat - y) ** 2).sum() / 2,
    "absolute": lambda a, y_hat, y: (y_hat - y).abs().sum(),
    "huber": huber,
    "cross-entropy": cross_entropy,
    "binary-cross-entropy": lambda a, y_hat, y: (torch.log1p(torch.exp(a)) - a * y).sum(),
    "user": lambda a, y_hat, y: (torch.log(torch.cosh(y_hat - y)) * (1 + y_hat**2)).sum(),
    "no-target": lambda a, y_hat, y: (torch.sin(y_hat) + y_hat**2).sum(),
    "values": lambda a, y_hat, y: (torch.sin(y_hat) + y_hat**2).sum(),
}


def norm(x):
    """||x||; at zero the value and all derivatives are zero."""
    return (x * x).sum().sqrt() if bool((x != 0).any()) else (0 * x).sum()


def variance(n):
    m = sum(n) / len(n)
    return sum((a - m) ** 2 for a in n) / len(n)


class Sample:
    """The run of one sample, its loss and its costates; x, lam: t = 0..T, a, y_hat: t = 1..T (or
    the last alone).

    number  of the sample in its batch
    perm    the order of the hidden units; None: that of the network
    """

    number, perm = 0, None

    def __init__(self, case, data, j, perm=None):
        d = case.H
        self.number, self.perm = j, perm
        step, read, slots, _, reads, _ = CELLS[case.cell]
        sigma = ACTIVATIONS[case.activation]
        theta = data.theta if perm is None else permuted(data.theta, perm)
        self.theta, self.data, self.case, self.j = theta, data, case, j
        self.p = {name[2:]: value for name, value in theta.items() if name.startswith("p.")}
        mask = (
            data.W_mask
            if perm is None or data.W_mask is None
            else permuted({"W": data.W_mask}, perm)["W"]
        )
        trained = weight(case.cell, theta, mask)
        self.W = slowed(case.cell, trained, self.p)
        enter = ENTER.get(case.cell, lambda v, W, p, t: v)
        self.step, self.read, self.sigma = step, read, sigma
        self.T = int(data.lengths[j])
        start = theta.get("x0", data.x0)
        if perm is not None and "x0" not in theta:
            start = start.unflatten(-1, (slots, d))[..., perm].flatten(-2)
        self.x = [start[j] if start.dim() == 2 else start.clone()]
        self.z, self.v = [], []
        self.u = [data.u[t, j] for t in range(self.T)]
        for t, u in enumerate(self.u):
            self.v.append(enter(theta["R"] @ u + (theta.get("b", 0)), trained, self.p, t + 1))
            r = read(self.x[t], sigma) if reads else None
            self.z.append(self.W @ r if reads else u.new_zeros(d))
            self.x.append(step(self.z[t], self.v[t], self.x[t], self.p, sigma))
        self.a = self.read_out(self.x)
        self.y_hat = [OUTPUTS[case.output](a) for a in self.a]
        self.loss = self.total_loss(self.a)
        self.lam = self.by_states(self.loss)

    def read_out(self, x):
        """The pre-outputs of states x_0 .. x_T."""
        case, theta = self.case, self.theta
        read_at = range(1, self.T + 1) if case.readout == "every" else [self.T]
        bias, shown = theta.get("b_o", 0), SHOWS.get(case.cell, 1) * case.H
        if case.readout in SUMMARIES:
            h = [SUMMARIES[case.readout]([y[:shown] for y in x[1:]], theta, case)]
        else:
            h = [x[t][:shown] for t in read_at]
        a = [theta["V"] @ y + bias for y in h]
        if "D" in theta:
            a = [b + theta["D"] @ self.u[t - 1] for b, t in zip(a, read_at, strict=True)]
        return a

    def hold_sources(self):
        """Costates of the same values whose sources, the loss's direct slopes, are constants."""
        x = [y.detach().requires_grad_() for y in self.x]
        value = self.total_loss(self.read_out(x))
        found = [None] * len(x)
        if value.requires_grad:
            found = torch.autograd.grad(value, x, allow_unused=True)
        sources = [torch.zeros_like(y) if g is None else g for y, g in zip(x, found, strict=True)]
        lam = [sources[-1]]
        for t in reversed(range(self.T)):
            lam.append(sources[t] + self.pull(t + 1, lam[-1]))
        self.lam = lam[::-1]

    def total_loss(self, pre_outputs):
        case, data, j = self.case, self.data, self.j
        total, weight = data.u.new_zeros(()), 0.0
        for i, a in enumerate(pre_outputs):
            y_hat = OUTPUTS[case.output](a)
            where = (i, j) if case.readout == "every" else (j,)
            w = 1.0 if data.loss_mask is None else float(data.loss_mask[where])
            if w != 0:
                total = total + w * LOSSES[case.loss](
                    a, y_hat, None if data.y is None else data.y[where]
                )
            weight += w
        return total / weight if case.reduce == "mean" and weight != 0 else total

    def by_states(self, value):
        """d value / dx_t, t = 0..T, differentiable."""
        if not value.requires_grad:
            return [torch.zeros_like(x) for x in self.x]
        found = torch.autograd.grad(value, self.x, create_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(self.x, found, strict=True)]

    def back(self, t):
        """J_t' lam_t, through step t alone, differentiable."""
        if not self.lam[t].requires_grad and not self.lam[t].any():
            return torch.zeros_like(self.x[t - 1])
        return self.pull(t, self.lam[t])

    def pull(self, t, w):
        """J_t' w, through step t alone, differentiable."""
        found = torch.autograd.grad(
            self.x[t], self.x[t - 1], w, create_graph=True, allow_unused=True
        )
        return torch.zeros_like(self.x[t - 1]) if found[0] is None else found[0]

    def back_by_W(self, t):
        """J_t' lam_t where nothing but W is a variable."""
        z, v, x = (
            y.detach().requires_grad_() for y in (self.z[t - 1], self.v[t - 1], self.x[t - 1])
        )
        p = {name: value.detach() for name, value in self.p.items()}
        lam = self.lam[t].detach()
        delta, of_x = torch.autograd.grad(
            self.step(z, v, x, p, self.sigma), [z, x], lam, allow_unused=True
        )
        r = self.read(x, self.sigma)
        if not r.requires_grad:
            return of_x
        through = torch.autograd.grad(r, x, self.W.T @ delta, create_graph=True)[0]
        return through if of_x is None else through + of_x

    def norms(self, of=norm):
        return [of(lam) for lam in self.lam[1:]]

    def pairs(self):
        """(||lam_t||, ||lam_{t+1}||), t = 1..T-1, where neither is zero."""
        n = self.norms()
        return [(a, b) for a, b in itertools.pairwise(n) if a > 0 and b > 0]

    def push(self, direction):
        """DF(u) v as the derivative by w of <d<w, y_hat>/du, v>."""
        y_hat = torch.cat(self.y_hat)
        w = torch.ones_like(y_hat, requires_grad=True)
        back = torch.autograd.grad((w * y_hat).sum(), self.u, create_graph=True)
        along = sum((g * dv).sum() for g, dv in zip(back, direction, strict=True))
        return torch.autograd.grad(along, w, create_graph=True)[0]


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else torch.zeros(())


def logs(s):
    return [torch.log(n) for n in s.norms() if n > 0]


def shares(s):
    n = s.norms()
    total = sum(n)
    return sum((a / total - 1 / s.T) ** 2 for a in n) if total > 0 else total * 0


def barrier(s):
    switch = s.case.switch
    inside = [v for v in s.lam[-1] if 0 < abs(v) < switch]
    return sum((torch.log(v.abs() / switch) ** 2 for v in inside), torch.zeros(()))


def omega(s):
    kept = [
        (norm(s.back(t)), norm(s.lam[t])) for t in range(1, s.T + 1) if bool((s.lam[t] != 0).any())
    ]
    return mean(((b / n) ** 2 - 1) ** 2 for b, n in kept)


def omega_norms(s):
    """Galvan (2016), (2.18): a sum, of norms that are not squared."""
    kept = [t for t in range(1, s.T + 1) if bool((s.lam[t] != 0).any())]
    terms = [(norm(s.back(t)) / norm(s.lam[t]) - 1) ** 2 for t in kept]
    return sum(terms, torch.zeros(()))


def stabiliser(s):
    h = [norm(x[: s.case.H]) for x in s.x]
    return mean((h[t] - h[t - 1]) ** 2 for t in range(1, s.T + 1))


def output_variance(s):
    return mean(variance([norm(lam) for lam in s.by_states(y)[1:]]) for y in s.y_hat[-1])


def tangent(s):
    return ((s.push(s.data.direction[: s.T, s.j]) - s.case.beta) ** 2).sum() / 2


def splitmix(z):
    """The generator of Steele, Lea & Flood (2014) on Python's integers."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@functools.cache
def drawn_signs(n, state, sample, step=0, seed=0):
    """The signs of a penalty that draws, for the n entries of one state of one sample."""
    key = splitmix(splitmix(splitmix(splitmix(seed) + step) + sample) + state)
    words = [splitmix(key + i) for i in range(-(-n // 64))]
    return [2 * (words[k // 64] >> k % 64 & 1) - 1 for k in range(n)]


def isometry(s):
    logs = []
    for t in range(1, s.T + 1):
        r = torch.tensor(drawn_signs(len(s.x[t]), t, s.number), dtype=s.x[t].dtype)
        if s.perm is not None:
            r = r.unflatten(0, (-1, len(s.perm)))[:, s.perm].flatten()
        back = s.pull(t, r)
        if bool((back != 0).any()):
            logs.append(torch.log(norm(back)) - math.log(len(r)) / 2)
    return mean(y**2 for y in logs)


PENALTIES = {
    "none": lambda s: 0 * s.loss,
    "squared-norm": lambda s: mean(n**2 for n in s.norms()),
    "variance": lambda s: variance(s.norms()),
    "variance-l1": lambda s: variance(s.norms(lambda v: v.abs().sum())),
    "log-ratio": lambda s: mean(torch.log(a / b) ** 2 for a, b in s.pairs()),
    "ratio": lambda s: mean((a / b - 1) ** 2 for a, b in s.pairs()),
    "log-variance": lambda s: variance(logs(s)) if logs(s) else 0 * s.loss,
    "end-points": lambda s: (norm(s.lam[1]) - norm(s.lam[-1])) ** 2,
    "share-variance": shares,
    "barrier": barrier,
    "omega": omega,
    "omega-norms": omega_norms,
    "norm-stabiliser": stabiliser,
    "output-variance": output_variance,
    "isometry": isometry,
    "tangent": tangent,
    "user": lambda s: sum(
        (lam**2 + lam**3 + x * lam).sum() for x, lam in zip(s.x, s.lam, strict=True)
    ),
}


def omega_published(samples):
    """One value for the batch."""
    B = len(samples)
    steps = [
        (s, t)
        for s in samples
        for t in range(1, s.T + 1)
        if (s.lam[t].detach() / B).square().sum() >= 1e-20
    ]
    return mean(
        (norm(s.back_by_W(t)) ** 2 / (s.lam[t].detach() ** 2).sum() - 1) ** 2 for s, t in steps
    )


class Truth:
    """All samples of a case."""

    def __init__(self, case, data, perm=None):
        self.case, self.data, self.perm = case, data, perm
        self.samples = [Sample(case, data, j, perm) for j in range(case.B)]
        self.loss = torch.stack([s.loss for s in self.samples])

    def penalty(self, name):
        if name == "omega-published" and self.samples[0].W is None:
            return 0 * self.loss
        if name == "omega-published":
            return omega_published(self.samples).expand(self.case.B)
        return torch.stack([PENALTIES[name](s).to(self.loss.dtype) for s in self.samples])

    def mean(self, values):
        return (values if self.data.weight is None else values * self.data.weight).mean()

    def y_hat(self):
        if self.case.readout != "every":
            return torch.stack([s.y_hat[0] for s in self.samples])
        return padded([torch.stack(s.y_hat) for s in self.samples], self.case.T)

    def lam(self):
        """[T + 1, B, n], units in their first order."""
        lam = padded([torch.stack(s.lam) for s in self.samples], self.case.T + 1)
        if self.perm is None:
            return lam
        inverse, slots = torch.argsort(self.perm), CELLS[self.case.cell][2]
        return lam.unflatten(-1, (slots, self.case.H))[..., inverse].flatten(-2)

    def gradient(self, value):
        return gradient(value, self.data.leaves)


def padded(sequences, T):
    return torch.stack([torch.cat([y, y.new_zeros(T - len(y), y.shape[1])]) for y in sequences], 1)


def gradient(value, leaves, create_graph=False):
    """d value / d leaves by name; zeros where it does not reach. The graph is kept."""
    if not value.requires_grad or not leaves:
        return {n: torch.zeros_like(y) for n, y in leaves.items()}
    found = torch.autograd.grad(
        value, list(leaves.values()), None, True, create_graph, allow_unused=True
    )
    return {
        n: torch.zeros_like(y) if g is None else g
        for (n, y), g in zip(leaves.items(), found, strict=True)
    }


def permuted(theta, perm):
    """The same network with its hidden units in another order."""
    d = len(perm)

    def rows(y):
        return y.unflatten(0, (-1, d))[:, perm].flatten(0, 1)

    of = {"W": lambda y: rows(rows(y).T).T, "V": lambda y: rows(y.T).T}
    of |= {RAW: of["W"], **dict.fromkeys(("R", "b", "x0", "w_a"), rows)}
    return {
        name: (rows if name.startswith("p.") else of.get(name, lambda y: y))(y)
        for name, y in theta.items()
    }


def directions(leaves, seed):
    """A random direction for each leaf; it depends on the leaf's name and shape alone."""
    out = {}
    for name, y in leaves.items():
        g = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        out[name] = torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)
    return out


def dot(a, b, names):
    return sum((a[n] * b[n]).sum() for n in names)


def higher(value, leaves, third):
    """Hessian-vector products along each block of leaves, {"H.theta/W": ...}, and the derivative of
    w'Hv by everything.
    """
    start = [n for n in leaves if n in ("x0", "given x0")]
    theta = [n for n in leaves if n not in ("u", "x0", "given x0")]
    first, v, w, out = (
        gradient(value, leaves, True),
        directions(leaves, 1),
        directions(leaves, 2),
        {},
    )
    for block, names in {"theta": theta, "u": [n for n in leaves if n == "u"], "x0": start}.items():
        if names:
            out |= {f"H.{block}/{n}": y for n, y in gradient(dot(first, v, names), leaves).items()}
    if third:
        Hv = gradient(dot(first, v, leaves), leaves, True)
        out |= {f"third/{n}": y for n, y in gradient(dot(Hv, w, leaves), leaves).items()}
    return out


def along(values, leaves, v):
    """The change of each value along the direction v, by two reverse sweeps: d/dw of <d<w,
    value>/dleaves, v>.
    """
    out = {}
    for name, y in values.items():
        w = torch.ones_like(y, requires_grad=True)
        g = gradient((w * y).sum(), leaves, True)
        out[name] = gradient(dot(g, v, leaves), {"w": w})["w"]
    return out


def asymmetry(value, leaves):
    """|u'Hv - v'Hu| relative to ||u|| ||Hv||."""
    first, v, w = gradient(value, leaves, True), directions(leaves, 3), directions(leaves, 4)
    Hv, Hw = (gradient(dot(first, direction, leaves), leaves) for direction in (v, w))
    size = math.sqrt(float(dot(Hv, Hv, leaves) * dot(w, w, leaves)))
    return abs(float(dot(Hv, w, leaves) - dot(Hw, v, leaves))) / size if size else 0.0
