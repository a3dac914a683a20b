"""One cell at one size, with values for every array that a sweep may be given.

An engine is compared with the definition: its three loops, any sources, each row at its own
scale.
"""

from __future__ import annotations

import torch

import cases
import coadjoint as co
from coadjoint.cells import library
from coadjoint.sweeps.engines import reference
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.rows import Link, Rows, pow2
from compare import close


@co.cell(
    slots="h m", gates="a b", parameters={"k": 0.5, "s": 0.2}, reads=lambda x: co.tanh(x.h) * x.m
)
def mixed(z, v, x, p):
    """A user's cell: functions of parameters alone, a gate used apart, roots and quotients,
    functions near one.
    """
    m = co.exp(-p.k) * x.m + co.sigmoid(p.s) * co.tanh(z.a + v.a)
    near = co.expm1(-m * m) * co.log1p(x.h * x.h) / 4
    return co.sin(m) * co.sqrt(1 + x.h * x.h) / (2 + v.b * v.b + co.cos(z.b)) + near, m


CELLS = {
    "elman": co.cells.elman(), "lstm": co.cells.lstm, "gru": co.cells.gru,
    "leaky": co.cells.leaky(), "rate": co.cells.rate(),
    **cases.CELLS, "mixed": mixed,
}  # fmt: skip
NEWER = {name: library.named(name) for name in library.CELLS if name not in CELLS}
NEWER["lstm-1997-truncated"] = co.cells.lstm_1997(truncated=True)  # nothing goes back through its W
BARS = {torch.float32: 2e-5, torch.float64: 1e-12}
NAMES = (
    "s",
    "s_last",
    "sa",
    "link",
    "k_last",
)  # the sources of an adjoint sweep, as Problem holds them
ADJOINT = ("s", "s_last", "s sa", "s_last link", "s s_last sa link", "sa")
SCALED = (
    "s scaled",
    "s_last scaled",
    "s s_last scaled",
    "s_last k_last scaled",
    "s s_last k_last scaled",
)
TANGENT = ("g", "ga", "g ga link", "")
ONE = {
    "adjoint": ("s sa link", "s s_last k_last scaled"),
    "tangent": ("g ga link",),
}  # every source once


class Problem:
    """The numbers are rounded to `dtype`, so that the definition may take the same ones
    in float64.
    """

    def __init__(self, name, sizes, d, dtype=torch.float64, device="cpu", seed=7):
        cell, rows = (CELLS | NEWER)[name], Rows(sizes)
        g = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).to(device)

        G, S, B, N = len(cell.gates), len(cell.slots), rows.B, rows.N
        self.cell, self.rows, self.dtype, self.device = cell, rows, dtype, device
        self.W = randn(G * d, len(cell.read) * d) * 0.8 / d**0.5 if cell.read else None
        self.base, self.v = randn(N, G * d), randn(N, len(cell.v) * d) if cell.v else None
        self.x0, self.p = (
            randn(B, S * d),
            (0.3 + 0.4 * randn(len(cell.p) * d).abs()) if cell.p else None,
        )
        self.s, self.s_last, self.sa = randn(B + N, S * d), randn(B, S * d), randn(N, G * d)
        if B > 2:
            self.s_last[1] = 0  # a sample without a source of its own: its costate has no exponent
        self.factor = torch.tensor([1.0, 0.5, 0.0, 4.0], dtype=dtype, device=device)[
            torch.arange(N) % 4
        ][:, None]
        self.k_last = torch.tensor([-200, 3, 0, 150], dtype=torch.int32, device=device)[
            torch.arange(B) % 4
        ]

    def exact(self):
        """The same numbers, in float64 on the CPU."""
        other = object.__new__(Problem)

        def real(y):
            return y.to("cpu", torch.float64 if y.is_floating_point() else None)

        other.__dict__ = {
            n: real(y) if isinstance(y, torch.Tensor) else y for n, y in self.__dict__.items()
        }
        return other

    @property
    def link(self):
        return Link(self.rows, self.factor)

    def plan(self, engine):
        return SweepPlan(self.cell, self.rows, engine)

    def tape(self, engine):
        x, a, q = engine.forward(self.plan(engine), self.base, self.v, self.W, self.x0, self.p)
        return Saved(a, self.v, x, self.p, q)

    def adjoint(self, engine, tape, given):
        """(lam, delta, k or None); given: names of NAMES and "scaled", with spaces between."""
        s, s_last, sa, link, k_last = (
            getattr(self, n) if n in given.split() else None for n in NAMES
        )
        plan, scaled = self.plan(engine), "scaled" in given
        return engine.adjoint(plan, tape, self.W, s, s_last, sa, link, scaled, True, k_last=k_last)

    def tangent(self, engine, tape, given):
        """(mu, nu); given: of "g", "ga" and "link"."""
        sources = {"g": self.s, "ga": self.sa, "link": self.link}
        g, ga, link = (y if n in given.split() else None for n, y in sources.items())
        return engine.tangent(self.plan(engine), tape, self.W, g, ga, link)

    def against(self, engine, adjoint=(*ADJOINT, *SCALED), tangent=TANGENT, bar=None):
        """The engine's loops and those of the definition, with each of these sources."""
        true, bar = self.exact(), bar or BARS[self.dtype]
        ours, tape = self.tape(engine), true.tape(reference)
        close(ours.x, tape.x, bar, "x", rows=True, least=1e-30)
        if self.cell.needs_a:
            close(ours.a, tape.a, bar, "a", rows=True, least=1e-30)
        for given in adjoint:
            lam, delta, k = self.adjoint(engine, ours, given)
            lam_, delta_, k_ = true.adjoint(reference, tape, given)
            if "scaled" in given:
                apart = k.cpu() - k_
                assert (apart.abs() <= 24).all(), (
                    f"exponents with {given}: {int(apart.abs().max())} apart"
                )
                shift = pow2(apart[:, None], torch.float64)
                lam, delta = lam.cpu().double() * shift, delta.cpu().double() * shift[self.rows.B :]
            close(lam, lam_, bar, f"lam with {given}", rows=True, least=1e-30)
            close(delta, delta_, bar, f"delta with {given}", rows=True, least=1e-30)
        for given in tangent:
            for what, found, expected in zip(
                ("mu", "nu"),
                self.tangent(engine, ours, given),
                true.tangent(reference, tape, given),
                strict=True,
            ):
                close(
                    found,
                    expected,
                    bar,
                    f"{what} with {given or 'nothing'}",
                    rows=True,
                    least=1e-30,
                )
