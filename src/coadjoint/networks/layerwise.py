"""Layerwise: the gradient of a chain by layer, what each map contributes to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError, brief
from ..sweeps.layout import check_dense
from ..sweeps.rows import scale
from .maps.products import pull_parameters

if TYPE_CHECKING:
    from ..objectives.batch import Batch
    from .chain_run import ChainCostates, ChainRun

Gradient = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Layerwise:
    """The terms grad_i of the gradient of the mean loss, for the maps i = 1..L.

    grad_i has the parameters of map i, by their names in the chain. Their sum over i is the
    gradient; a parameter that several maps share, as tied weights do, is in several terms.

    run       the run of the chain
    lam       its costates
    batch     what it ran over; weights of samples count as in the gradient
    """

    run: ChainRun
    lam: ChainCostates
    batch: Batch

    @functools.cached_property
    def scaled(self) -> tuple[list[Gradient], list[int]]:
        """grad_i 2^{-m_i} and m_1..m_L, m_i the largest exponent of a sample's costate lam_i.

        The scaled terms neither underflow nor overflow, however far the costates decay.
        """
        net = self.run.network
        net.refuse_if_random("components by layer")
        shares = self.batch.weights(self.lam.loss[None]) / len(self.lam.loss)
        terms: list[Gradient] = []
        exponents: list[int] = []
        names_by_map = net.parameter_names()
        for i, module in enumerate(net.maps, start=1):
            k = self.lam.exponent[i]
            m = int(k.max())
            mantissa = self.lam.mantissa_at(i).detach()
            entry_axes = (1,) * (mantissa.dim() - 1)
            w = scale(mantissa, (k - m).reshape(-1, *entry_axes)) * shares.reshape(-1, *entry_axes)
            found: Gradient = {}
            if any(p.requires_grad for p in module.parameters()):
                found = pull_parameters(module, self.run.x[i - 1].detach(), w)
            names = names_by_map[i - 1]
            terms.append({names[name]: g.detach().double() for name, g in found.items()})
            exponents.append(m)
        return terms, exponents

    def without_exponents(self) -> tuple[ScaledTerms, list[int]]:
        """Return the terms grad_i 2^{-m_i}, and m_1..m_L; see `scaled`."""
        terms, exponents = self.scaled
        return ScaledTerms(terms), exponents

    def norms(self) -> dict[str, Tensor]:
        """Compute ||grad_i|| of all parameters of map i jointly, [L] float64, under "joint"."""
        terms, exponents = self.without_exponents()
        sizes = terms.norms()["joint"].cpu()
        return {"joint": scale(sizes, torch.tensor(exponents))}

    def at(self, i: int) -> Gradient:
        """Compute grad_i, i = 1..L, by parameter name."""
        L = len(self.run.network.maps)
        if not isinstance(i, int) or isinstance(i, bool) or not 1 <= i <= L:
            raise InputError(f"i must lie in 1..{L}; got {brief(i)}.")
        terms, exponents = self.scaled
        m = torch.tensor(exponents[i - 1])
        return {name: scale(g, m.to(g.device)) for name, g in terms[i - 1].items()}

    def weighted(self, w: Tensor) -> Gradient:
        """Compute sum_i w_i grad_i by parameter name, with weights w [L]."""
        L = len(self.run.network.maps)
        if tuple(check_dense("w", w).shape) != (L,):
            raise InputError(
                f"w has shape {list(w.shape)}; expected one weight for each layer, [{L}]."
            )
        return sum_terms([self.at(i) for i in range(1, L + 1)], w)


@dataclass(frozen=True, eq=False)
class ScaledTerms:
    """Terms of a gradient, one for each layer, in units of their own."""

    terms: Sequence[Gradient]

    def norms(self) -> dict[str, Tensor]:
        """The norms of the terms, of all their parameters jointly, [L] float64, under "joint"."""
        sizes: list[Tensor] = []
        for term in self.terms:
            squares = [g.square().sum() for g in term.values()]
            sizes.append(torch.stack(squares).sum().sqrt() if squares else torch.zeros(()).double())
        like = sizes[-1]
        return {"joint": torch.stack([size.to(like.device) for size in sizes])}

    def weighted(self, w: Tensor) -> Gradient:
        """The sum of w_i term_i by parameter name, with weights w [L]."""
        return sum_terms(self.terms, w)


def sum_terms(terms: Sequence[Gradient], w: Tensor) -> Gradient:
    """Return sum_i w_i term_i; a parameter may be missing in some of the terms."""
    total: Gradient = {}
    for term, weight in zip(terms, w.double(), strict=True):
        for name, g in term.items():
            part = weight.to(g.device) * g
            total[name] = total[name] + part if name in total else part
    return total
