"""The slow truth for stacks of layers: one sample at a time, plain torch operations in float64.

Nothing here uses coadjoint: of a module only the numbers that describe it are read. Each sample has
its own length. Each x_t is one node ([h, c] for an LSTM, [m, c] where h = W_hr m is projected) that
the next step takes apart, so autograd.grad(loss, [x_0 .. x_T]) gives lam_t = dL/dx_t by the state
handed to step t + 1. In the direction "reverse" time begins at the end of the sequence.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import oracles
from oracles import norm, sigmoid


def normalised(y):
    e = y - y.mean()
    return e / torch.sqrt((e * e).mean() + 1e-5)


class Direction(oracles.Sample):
    """The steps of one layer in one direction, x: t = 0..T; inputs u in the order of
    its own time.
    """

    def __init__(self, module, w, suffix, u, start, noise):
        self.mode, self.d, self.suffix = module.mode, module.hidden_size, suffix
        self.case = SimpleNamespace(H=module.hidden_size, switch=1e-5)
        self.w = lambda name: w.get(name + suffix)
        self.u, self.noise, self.T = u, noise, len(u)
        self.projected = self.w("weight_hr") is not None
        slots = 2 if self.mode == "LSTM" else 1
        self.h_0 = (
            start[0]
            if start
            else u[0].new_zeros(len(self.w("weight_hr")) if self.projected else self.d)
        )
        first = torch.zeros_like(self.h_0[:1]).expand(self.d) if self.projected else self.h_0
        rest = list(start[1:]) or [u[0].new_zeros(self.d)] * (slots - 1)
        x_0 = torch.cat([first, *rest])
        self.x = [x_0 if x_0.requires_grad else x_0.requires_grad_()]
        for t in range(self.T):
            self.x.append(self.finish(t, self.x[t], self.said(t, self.x[t])))

    def h(self, t, x):
        """What is shown of a state."""
        if not self.projected:
            return x[: self.d]
        return self.w("weight_hr") @ x[: self.d] + (self.h_0 if t == 0 else 0)

    def said(self, t, x):
        """W_hh h"""
        return self.w("weight_hh") @ (self.h(t, x) * self.noise.get("m", 1.0))

    def finish(self, t, x, b):
        """x_{t+1} from x_t and b = W_hh h"""
        d, w, a = self.d, self.w, self.w("weight_ih") @ self.u[t]
        if w("gain_ih") is not None:
            parts = [2 * d, d] if self.mode == "GRU" else [len(a)]
            a, b = (
                torch.cat([normalised(part) for part in y.split(parts)]) * w(gain)
                for y, gain in ((a, "gain_ih"), (b, "gain_hh"))
            )
        if w("bias_ih") is not None:
            a, b = a + w("bias_ih"), b + w("bias_hh")
        new = getattr(self, self.mode)(a, b, x)
        if "k" in self.noise:
            new = [
                k[t] * old + (1 - k[t]) * y
                for k, old, y in zip(self.noise["k"], x.split(d), new, strict=True)
            ]
        return torch.cat(new)

    def RNN_TANH(self, a, b, x):
        return [torch.tanh(a + b)]

    def RNN_RELU(self, a, b, x):
        return [(a + b) * (a + b > 0)]

    def GRU(self, a, b, x):
        (ar, az, an), (br, bz, bn) = a.chunk(3), b.chunk(3)
        z = sigmoid(az + bz)
        return [(1 - z) * torch.tanh(an + sigmoid(ar + br) * bn) + z * x]

    def LSTM(self, a, b, x):
        (i, f, g, o), c, w = (a + b).chunk(4), x[self.d :], self.w
        if w("weight_pi") is not None:
            i, f = i + w("weight_pi") * c, f + w("weight_pf") * c
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        if w("weight_po") is not None:
            o = o + w("weight_po") * c
        seen = normalised(c) * w("gain_c") + w("shift_c") if w("gain_c") is not None else c
        return [sigmoid(o) * torch.tanh(seen), c]

    def back_by_W(self, t):
        """J_t' lam_t where nothing but W (and a projection, which is a part of it) is a
        variable.
        """
        x, b = (
            y.detach().requires_grad_() for y in (self.x[t - 1], self.said(t - 1, self.x[t - 1]))
        )
        lam = self.lam[t].detach()
        delta, of_x = torch.autograd.grad(self.finish(t - 1, x, b), [b, x], lam, allow_unused=True)
        through = torch.autograd.grad(self.said(t - 1, x), x, delta, create_graph=True)[0]
        return through if of_x is None else through + of_x


class Stack:
    """All layers over one sample.

    directions: {(layer, direction): Direction}; output [T, .], h_n and c_n [layers, .].
    """

    def __init__(self, module, w, u, start=(), noise=None, drops=None):
        D = 1 + module.bidirectional
        self.directions, h_n, c_n = {}, [], []
        for layer in range(module.num_layers):
            heads = []
            for direction in range(D):
                suffix, here = (
                    f"_l{layer}" + "_reverse" * direction,
                    [y[layer * D + direction] for y in start],
                )
                own = u.flip(0) if direction else u
                run = Direction(
                    module, w, suffix, own, here, (noise or {}).get((layer, direction), {})
                )
                self.directions[layer, direction] = run
                h = torch.stack([run.h(t + 1, x) for t, x in enumerate(run.x[1:])])
                heads.append(h.flip(0) if direction else h)
                h_n.append(h[-1])
                c_n.append(run.x[-1][run.d :])
            u = torch.cat(heads, 1)
            if drops is not None and layer + 1 < module.num_layers:
                u = u * drops[layer]
        self.output, self.h_n, self.c_n = u, torch.stack(h_n), torch.stack(c_n)


LOSSES = {  # of one sample: output [T, .], h_n [layers, .], c_n [layers, .]
    "output": lambda y, h, c: (torch.sin(y) + y * y).sum() + (y[-1] ** 3).sum(),
    "last": lambda y, h, c: ((y[-1] - 0.3) ** 2).sum(),
    "first": lambda y, h, c: ((y[0] - 0.3) ** 2).sum(),
    "half": lambda y, h, c: (
        torch.cosh(y[:, : y.shape[1] // 2])
    ).sum(),  # of two directions, the forward one
    "h_n": lambda y, h, c: (
        torch.sin(h) * (1 + torch.arange(len(h), dtype=h.dtype))[:, None]
    ).sum(),
    "lowest h_n": lambda y, h, c: torch.sin(h[0] + 0.2).sum(),
    "c_n": lambda y, h, c: (
        torch.sin(c) * torch.arange(1, 1 + len(c), dtype=c.dtype)[:, None]
    ).sum(),
    "all": lambda y, h, c: torch.sin(y).sum() * h[0].sum() + (c * c).sum() + (h[-1] ** 2).sum(),
}


class Truth:
    """All samples.

    u: their sequences; start: [h_0] or [h_0, c_0], each [layers, B, .]; order: the samples as rows
    have them. seed: of what a module in training draws; zoneout and recurrent_dropout are read of
    the module, eval too.
    """

    def __init__(self, module, w, u, start=(), loss="output", order=None, seed=None):
        self.w, self.u, self.start, B = w, u, start, len(u)
        self.drawn(module, [len(y) for y in u], range(B) if order is None else order, seed)

        def of(j):
            return [y[:, j] for y in start]

        noise = [{at: mine[j] for at, mine in self.noise.items()} for j in range(B)]
        self.stacks = [
            Stack(
                module,
                w,
                u[j],
                of(j),
                noise[j],
                None if self.drops is None else [y[j] for y in self.drops],
            )
            for j in range(B)
        ]
        self.loss = torch.stack([LOSSES[loss](s.output, s.h_n, s.c_n) for s in self.stacks])
        self.at = list(self.stacks[0].directions)
        for j, s in enumerate(self.stacks):
            for run in s.directions.values():
                run.number = j
        for s, value in zip(self.stacks, self.loss, strict=True):
            runs = list(s.directions.values())
            nodes = [x for run in runs for x in run.x]
            found = iter(torch.autograd.grad(value, nodes, create_graph=True, allow_unused=True))
            for run in runs:
                run.lam = [torch.zeros_like(x) if (g := next(found)) is None else g for x in run.x]
                run.loss = value

    def drawn(self, module, lengths, order, seed):
        """The masks of a call, in the order in which a module draws them: rows are steps of
        samples, time first.
        """
        if seed is not None:
            torch.manual_seed(seed)
        rows = [(t, j) for t in range(max(lengths)) for j in order if t < lengths[j]]
        like = next(iter(self.w.values()))
        D, d, B = 1 + module.bidirectional, module.hidden_size, len(lengths)
        H = module.proj_size or d

        def by_sample(y):
            return [
                torch.stack([y[i] for i, (_, k) in enumerate(rows) if k == j]) for j in range(B)
            ]

        zoneout, recurrent = (
            getattr(module, "zoneout", (0.0,)),
            getattr(module, "recurrent_dropout", 0.0),
        )
        self.noise, self.drops = {}, [] if module.dropout and module.training else None
        for layer in range(module.num_layers):
            for direction in range(D):
                mine = [{} for _ in range(B)]
                if max(zoneout) > 0:
                    full = [like.new_full((len(rows), d), p) for p in zoneout]
                    ks = [by_sample(torch.bernoulli(k) if module.training else k) for k in full]
                    for j in range(B):
                        mine[j]["k"] = [k[j] for k in ks]
                if recurrent and module.training:
                    m = dropout(like.new_ones(B, d), recurrent)
                    for place, j in enumerate(order):
                        mine[j]["m"] = m[place]
                self.noise[layer, direction] = mine
            if self.drops is not None and layer + 1 < module.num_layers:
                self.drops.append(
                    by_sample(dropout(like.new_ones(len(rows), D * H), module.dropout))
                )

    def lam(self, at):
        """[T + 1, B, n]; padding is zero."""
        T = max(s.directions[at].T for s in self.stacks)
        return oracles.padded([torch.stack(s.directions[at].lam) for s in self.stacks], T + 1)

    def norms(self, at):
        """[T + 1, B], NaN where there is no costate."""
        runs = [s.directions[at] for s in self.stacks]
        T = max(run.T for run in runs)
        rows = [torch.stack([norm(v) for v in run.lam]).detach() for run in runs]
        return torch.stack(
            [torch.cat([y, y.new_full((T + 1 - len(y),), math.nan)]) for y in rows], 1
        )

    def penalty(self, name):
        """[B]: the mean over layers and directions."""
        if name == "omega-published":
            each = [
                oracles.omega_published([s.directions[at] for s in self.stacks]) for at in self.at
            ]
            return (sum(each) / len(each)).expand(len(self.u))
        value = oracles.PENALTIES[name]
        return torch.stack(
            [
                sum(value(run) for run in s.directions.values()) / len(s.directions)
                for s in self.stacks
            ]
        )

    @property
    def leaves(self):
        """Weights, inputs and initial states by name."""
        named = {f"u{j}": y for j, y in enumerate(self.u)} | {
            f"start{i}": y for i, y in enumerate(self.start)
        }
        return {n: y for n, y in (self.w | named).items() if y.requires_grad}

    def gradient(self, value, create_graph=False):
        return oracles.gradient(value, self.leaves, create_graph)


def leaves(module, lengths, given=False, seed=0):
    """(w, u, start): the weights of a module and data for it, as leaves in float64."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    w = {n: p.detach().double().clone().requires_grad_() for n, p in module.named_parameters()}
    u = [randn(n, module.input_size).requires_grad_() for n in lengths]
    L, H, d = (
        module.num_layers * (1 + module.bidirectional),
        module.proj_size or module.hidden_size,
        module.hidden_size,
    )
    sizes = (H, d) if module.mode == "LSTM" else (H,)
    start = [(0.5 * randn(L, len(lengths), n)).requires_grad_() for n in sizes] if given else []
    return w, u, start


def called(module, u, start=(), packed=True, **more):
    """The module on the same data -> ([output of each sample], h_n, c_n, what else
    record needs).
    """
    hx = (tuple(start) if len(start) > 1 else start[0]) if start else None
    dense = 0 if module.batch_first else 1
    out, last = module(
        pack_sequence(u, enforce_sorted=False) if packed else torch.stack(u, dense), hx
    )
    h_n, c_n = last if isinstance(last, tuple) else (last, last[..., :0])
    if packed:
        out = pad_packed_sequence(out)[0]
    elif module.batch_first:
        out = out.transpose(0, 1)
    return [out[: len(y), j] for j, y in enumerate(u)], h_n, c_n


def loss_of(name, outputs, h_n, c_n):
    """[B], of what `called` returns."""
    return torch.stack([LOSSES[name](y, h_n[:, j], c_n[:, j]) for j, y in enumerate(outputs)])


def apart(found, expected, floor=0.0):
    """The largest difference, relative to the largest entry of each last axis."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    top = expected.detach().abs().amax(-1, keepdim=True).clamp_min(max(floor, 1e-300))
    return ((found.detach() - expected.detach()).abs() / top).max().item()
