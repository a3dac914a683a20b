"""Structured W: parametrisations, outside the sweeps, of any cell's recurrent matrix.

    co.Network("elman", structure="orthogonal", ...)            by name
    co.Network("elman", structure=co.cells.structures.Skew(), ...)
    torch.nn.utils.parametrize.register_parametrization(net, "W", co.cells.structures.Signed(signs))

W [g d, k d] of a cell with g gates, reading k slots, is cut into blocks [d, d], and each has the structure. What is trained
is the raw parameter `parametrizations.W.original`; its gradient is the sweep's by W, pulled back by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, brief, choose, real, whole_number


def split_blocks(W: Tensor, d: int | None) -> Tensor:
    """[g d, k d] -> [g, k, d, d]; without d the blocks are as wide as W."""
    d = d or W.shape[1]
    if W.dim() != 2 or W.shape[0] % d or W.shape[1] % d:
        raise InputError(f"W has shape {list(W.shape)}; expected square blocks of {d}.")
    return W.unflatten(0, (-1, d)).unflatten(2, (-1, d)).transpose(1, 2)


def join_blocks(X: Tensor) -> Tensor:
    """The inverse of cut."""
    return X.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def identity_like(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


class Blocks(nn.Module):
    """The same map of M on each block; units: their size d, that of the columns if not given."""

    def __init__(self, units: int | None = None) -> None:
        super().__init__()
        self.units = units

    def weight_from(self, M: Tensor) -> Tensor:
        raise NotImplementedError

    def raw_from(self, W: Tensor) -> Tensor:
        """One M with weight_from(M) = W."""
        raise NotImplementedError

    def forward(self, M: Tensor) -> Tensor:
        return join_blocks(self.weight_from(split_blocks(M, self.units)))

    def right_inverse(self, W: Tensor) -> Tensor:
        return join_blocks(self.raw_from(split_blocks(W, self.units)))

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Where training begins: entries uniform on +-1/sqrt(d)."""
        bound = 1 / math.sqrt(self.units or M.shape[1])
        M.uniform_(-bound, bound, generator=generator)


class Skew(Blocks):
    """W = (1 - beta)(M + M') + beta (M - M') - gamma I; with beta = 1 antisymmetric but for the diagonal -gamma.

    Chang et al., ICLR (2019); Erichson et al., ICLR (2021)"""

    def __init__(self, beta: float = 1.0, gamma: float = 0.01, units: int | None = None) -> None:
        super().__init__(units)
        if not isinstance(beta, int | float) or not 0 <= beta <= 1:
            raise InputError(f"beta must lie between 0 and 1; got {brief(beta)}.")
        real("gamma", gamma)
        self.beta, self.gamma = beta, gamma

    def weight_from(self, M: Tensor) -> Tensor:
        skew = self.beta * (M - M.mT) - self.gamma * identity_like(M)
        return skew if self.beta == 1 else skew + (1 - self.beta) * (M + M.mT)

    def raw_from(self, W: Tensor) -> Tensor:
        """Exact for a W of this form; of any other, what the form cannot hold is left out."""
        W = W + self.gamma * identity_like(W)
        parts = ((W - W.mT, self.beta), (W + W.mT, 1 - self.beta))
        return torch.stack([part / (4 * share) for part, share in parts if share]).sum(0)


class Orthogonal(Blocks):
    """W' W = I: W = exp(A), or by="cayley" (I + A)^-1 (I - A), of A = M - M'; found in float64, so that W stays orthogonal to
    the last digits of its own type.

    Lezcano-Casado & Martinez-Rubio, ICML (2019); Helfrich et al., ICML (2018)"""

    def __init__(self, by: str = "exp", units: int | None = None) -> None:
        super().__init__(units)
        self.by = choose("map onto the rotations", by, ("exp", "cayley"))

    def weight_from(self, M: Tensor) -> Tensor:
        A = (M - M.mT).double()
        W = (
            torch.matrix_exp(A)
            if self.by == "exp"
            else torch.linalg.solve(identity_like(A) + A, identity_like(A) - A)
        )
        return W.to(M.dtype)

    def raw_from(self, W: Tensor) -> Tensor:
        """Of a rotation without the eigenvalue -1."""
        X = W.double()
        try:
            if self.by == "exp":
                values, Q = torch.linalg.eig(X)
                A = torch.linalg.solve(Q, Q * values.log()[..., None, :], left=False).real
            else:
                A = torch.linalg.solve(identity_like(X) + X, identity_like(X) - X)
            M = ((A - A.mT) / 4).to(W.dtype)
            far = (self.weight_from(M) - W).abs().max()
            near = far.is_meta or bool(
                far <= math.sqrt(torch.finfo(W.dtype).eps)
            )  # a shape alone is not judged
        except RuntimeError:  # singular
            near = False
        if not near:
            raise InputError(
                "W is no rotation (orthogonal blocks of determinant 1, no eigenvalue -1), so no skew matrix gives it. "
                "Begin with initialisers.identity_, or assign the raw parameter."
            )
        return M

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Rotations of pairs of units: A has the blocks (0, s; -s, 0), s = -sqrt((1 - cos q)/(1 + cos q)), q uniform on
        0..pi/2.  Helfrich et al. (2018)"""
        blocks, where = split_blocks(M, self.units), None if generator is None else generator.device
        pairs = blocks.shape[-1] // 2
        q = (
            math.pi
            / 2
            * torch.rand(
                *blocks.shape[:2], pairs, generator=generator, dtype=torch.float64, device=where
            )
        )
        s = (-torch.sqrt((1 - q.cos()) / (1 + q.cos()))).to(M) / 2
        i = 2 * torch.arange(pairs, device=M.device)
        A = torch.zeros_like(blocks)
        A[..., i, i + 1], A[..., i + 1, i] = s, -s
        M.copy_(join_blocks(A))


class Diagonal(Blocks):
    """Each block is diagonal: units speak to themselves alone. The sweep still multiplies by the whole W; for speed write a
    cell with a per-unit parameter and reads=None."""

    def forward(self, w: Tensor) -> Tensor:
        return join_blocks(torch.diag_embed(w))

    def right_inverse(self, W: Tensor) -> Tensor:
        return torch.diagonal(split_blocks(W, self.units), dim1=-2, dim2=-1).clone()

    def begin(self, w: Tensor, generator: torch.Generator | None = None) -> None:
        w.uniform_(-1, 1, generator=generator)


class LowRank(nn.Module):
    """W = I + L N', L and N [d, rank] for each block; the raw parameters are original0 (L) and original1 (N)."""

    def __init__(self, rank: int = 1, units: int | None = None) -> None:
        super().__init__()
        whole_number("rank", rank)
        self.rank, self.units = rank, units

    def forward(self, L: Tensor, N: Tensor) -> Tensor:
        X = L @ N.mT
        return join_blocks(identity_like(X) + X)

    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest of this rank; where that is I, N is not 0, or neither L nor N would ever move."""
        X = split_blocks(W, self.units)
        U, S, Vh = torch.linalg.svd(X - identity_like(X), full_matrices=False)
        root, r = S.sqrt()[..., None, : self.rank], self.rank
        return U[..., :r] * root, Vh.mT[..., :r] * torch.where(root > 0, root, 1)

    def begin(self, L: Tensor, N: Tensor, generator: torch.Generator | None = None) -> None:
        bound = 1 / math.sqrt(L.shape[-2])
        for y in (L, N):
            y.uniform_(-bound, bound, generator=generator)


class WithInverse(nn.Module):
    """W = (M; M^-1), for a cell with two gates; M begins as a random rotation."""

    def __init__(self, units: int | None = None) -> None:
        super().__init__()

    def forward(self, M: Tensor) -> Tensor:
        return torch.cat([M, torch.linalg.inv(M)])

    def right_inverse(self, W: Tensor) -> Tensor:
        return W[: W.shape[1]].clone()

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        nn.init.orthogonal_(M, generator=generator)


class Signed(nn.Module):
    """Dale's law: column j of W has the sign signs[j] (+1 excitatory, -1 inhibitory): W = |M| diag(signs); the same signs for
    each slot that W reads."""

    signs: Tensor

    def __init__(self, signs: Tensor) -> None:
        super().__init__()
        plain = isinstance(signs, Tensor) and not signs.is_nested and signs.layout == torch.strided
        if not plain or signs.dim() != 1:
            raise InputError("signs must be a vector of +1 and -1, one for each unit.")
        known = torch.isin(
            signs, torch.tensor([-1, 1], dtype=signs.dtype, device=signs.device)
        ).all()
        if not known.is_meta and not known:  # a shape alone is not judged
            raise InputError("signs must be a vector of +1 and -1, one for each unit.")
        self.register_buffer("signs", signs)

    def forward(self, M: Tensor) -> Tensor:
        slots, odd = divmod(M.shape[1], len(self.signs))
        if odd:
            raise InputError(
                f"W has {M.shape[1]} columns; expected a multiple of the {len(self.signs)} signs."
            )
        return M.abs() * self.signs.to(M.dtype).repeat(slots)

    def right_inverse(self, W: Tensor) -> Tensor:
        return W.abs()


def dale(units: int, excitatory: float = 0.8) -> Signed:
    """The first 80% of the units are excitatory, the others inhibitory."""
    whole_number("units", units)
    count = round(real("excitatory", excitatory, 0, 1) * units)
    return Signed(torch.cat([torch.ones(count), -torch.ones(units - count)]))


STRUCTURES: dict[str, Callable[..., nn.Module]] = {  # units -> parametrisation
    "antisymmetric": Skew,
    "orthogonal": Orthogonal,
    "cayley": lambda units: Orthogonal("cayley", units),
    "diagonal": Diagonal,
    "low-rank": lambda units: LowRank(1, units),
    "dale": dale,
}


def structure(given: Any, units: int) -> nn.Module:
    """A parametrisation for blocks of so many units, by its name or as it is given."""
    if isinstance(given, nn.Module):
        return given
    if not isinstance(given, str):
        raise KindError(f"structure must be a name or a torch module; got {type(given).__name__}.")
    whole_number("units", units)
    return STRUCTURES[choose("structure", given, STRUCTURES)](units=units)
