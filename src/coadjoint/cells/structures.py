"""Structured W: parametrisations, outside the sweeps, of any cell's recurrent matrix.

    co.Network("elman", structure="orthogonal", ...)            by name
    co.Network("elman", structure=co.cells.structures.Skew(), ...)
    torch.nn.utils.parametrize.register_parametrization(net, "W", co.cells.structures.Signed(signs))

W [g d, k d] of a cell with g gates that reads k slots is cut into blocks [d, d], and each block has
the structure. The parameter that is trained is the raw one, `parametrizations.W.original`; autograd
pulls the sweep's gradient by W back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, brief, choose, real, whole_number


def split_blocks(W: Tensor, d: int | None) -> Tensor:
    """W [g d, k d] of g gates and k slots as blocks [g, k, d, d]; d is W's width if None."""
    d = d or W.shape[1]
    if W.dim() != 2 or W.shape[0] % d or W.shape[1] % d:
        raise InputError(f"W has shape {list(W.shape)}; expected square blocks of {d}.")
    blocks: Tensor = W.unflatten(0, (-1, d)).unflatten(2, (-1, d))
    return blocks.transpose(1, 2)


def join_blocks(X: Tensor) -> Tensor:
    """Blocks [g, k, d, d] as one matrix [g d, k d]: the inverse of split_blocks."""
    return X.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def identity_like(X: Tensor) -> Tensor:
    """The identity matrix as wide as X [..., d], in its dtype and on its device."""
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


class Blocks(nn.Module):
    """The same map M -> W on each block.

    units  the size d of a block; by default the number of columns of W
    """

    def __init__(self, units: int | None = None) -> None:
        super().__init__()
        self.units = units

    def weight_from(self, M: Tensor) -> Tensor:
        """W of the raw M, block by block: [g, k, d, d] -> [g, k, d, d]."""
        raise NotImplementedError

    def raw_from(self, W: Tensor) -> Tensor:
        """Some raw M with weight_from(M) = W, block by block: [g, k, d, d] -> [g, k, d, d]."""
        raise NotImplementedError

    def forward(self, M: Tensor) -> Tensor:
        """W [g d, k d] of the raw parameter M; torch.nn.utils.parametrize calls it."""
        return join_blocks(self.weight_from(split_blocks(M, self.units)))

    def right_inverse(self, W: Tensor) -> Tensor:
        """The raw M of W; torch.nn.utils.parametrize calls it when net.W is assigned."""
        return join_blocks(self.raw_from(split_blocks(W, self.units)))

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw the initial M: entries uniform on +-1/sqrt(d)."""
        bound = 1 / math.sqrt(self.units or M.shape[1])
        M.uniform_(-bound, bound, generator=generator)


class Skew(Blocks):
    """W = (1 - beta)(M + M') + beta (M - M') - gamma I.

    With beta = 1, W is antisymmetric except for the diagonal -gamma.

    Chang et al., ICLR (2019); Erichson et al., ICLR (2021)
    """

    def __init__(self, beta: float = 1.0, gamma: float = 0.01, units: int | None = None) -> None:
        super().__init__(units)
        if not isinstance(beta, int | float) or not 0 <= beta <= 1:
            raise InputError(f"beta must lie between 0 and 1; got {brief(beta)}.")
        real("gamma", gamma)
        self.beta = beta
        self.gamma = gamma

    def weight_from(self, M: Tensor) -> Tensor:
        """(1 - beta)(M + M') + beta (M - M') - gamma I, block by block."""
        skew = self.beta * (M - M.mT) - self.gamma * identity_like(M)
        if self.beta == 1:  # the symmetric part is zero
            return skew
        return skew + (1 - self.beta) * (M + M.mT)

    def raw_from(self, W: Tensor) -> Tensor:
        """M = (X - X') / (4 beta) + (X + X') / (4 (1 - beta)), X = W + gamma I.

        X - X' is 2 beta (M - M') and X + X' is 2 (1 - beta)(M + M'). Where beta is 1 or 0, one of
        the two is missing from W's form; M leaves it out, and W loses it.
        """
        X = W + self.gamma * identity_like(W)
        parts = ((X - X.mT, self.beta), (X + X.mT, 1 - self.beta))
        return torch.stack([part / (4 * factor) for part, factor in parts if factor]).sum(0)


class Orthogonal(Blocks):
    """W' W = I: W = exp(A), or by="cayley" (I + A)^-1 (I - A), of A = M - M'.

    W is computed in float64, so that it stays orthogonal to the last digits of its own dtype.

    Lezcano-Casado & Martinez-Rubio, ICML (2019); Helfrich et al., ICML (2018)
    """

    def __init__(self, by: str = "exp", units: int | None = None) -> None:
        super().__init__(units)
        self.by = choose("map onto the rotations", by, ("exp", "cayley"))

    def weight_from(self, M: Tensor) -> Tensor:
        """The rotation exp(A), or (I + A)^-1 (I - A) by Cayley's map, of A = M - M'."""
        A = (M - M.mT).double()
        if self.by == "exp":
            W = torch.matrix_exp(A)
        else:
            W = torch.linalg.solve(identity_like(A) + A, identity_like(A) - A)
        return W.to(M.dtype)

    def raw_from(self, W: Tensor) -> Tensor:
        """M of a rotation without the eigenvalue -1; other matrices are refused."""
        try:
            A = self._skew_from(W.double())
            # (A - A') / 2 is skew to the last digit; M - M' = A for M = A / 2
            M = ((A - A.mT) / 4).to(W.dtype)
            # A matrix that is no rotation does not come back. Half of the digits tell.
            error = (self.weight_from(M) - W).abs().max()
            tolerance = math.sqrt(torch.finfo(W.dtype).eps)
            # A meta tensor is a shape without numbers: there is nothing to compare.
            is_rotation = error.is_meta or bool(error <= tolerance)
        except RuntimeError:  # a singular matrix
            is_rotation = False
        if not is_rotation:
            raise InputError(
                "W is not a rotation (orthogonal blocks of determinant 1 without the eigenvalue "
                "-1), so no skew matrix produces it. Start with initialisers.identity_, or "
                "assign the raw parameter."
            )
        return M

    def _skew_from(self, W: Tensor) -> Tensor:
        """A of the rotation W: its logarithm, or Cayley's map, which is its own inverse."""
        if self.by == "exp":  # log W = Q diag(log values) Q^-1
            values, Q = torch.linalg.eig(W)
            logarithm: Tensor = torch.linalg.solve(Q, Q * values.log()[..., None, :], left=False)
            return logarithm.real
        A: Tensor = torch.linalg.solve(identity_like(W) + W, identity_like(W) - W)
        return A

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw rotations of pairs of units.

        A has the blocks (0, s; -s, 0), s = -sqrt((1 - cos q)/(1 + cos q)), q uniform on 0..pi/2.
        Helfrich et al. (2018)
        """
        blocks = split_blocks(M, self.units)
        device = None if generator is None else generator.device
        pairs = blocks.shape[-1] // 2
        shape = (*blocks.shape[:2], pairs)
        fraction = torch.rand(*shape, generator=generator, dtype=torch.float64, device=device)
        q = math.pi / 2 * fraction
        half_s = (-torch.sqrt((1 - q.cos()) / (1 + q.cos()))).to(M) / 2
        i = 2 * torch.arange(pairs, device=M.device)
        half_A = torch.zeros_like(blocks)
        half_A[..., i, i + 1] = half_s
        half_A[..., i + 1, i] = -half_s
        M.copy_(join_blocks(half_A))  # A = M - M' is 2 M for a skew M


class Diagonal(Blocks):
    """Diagonal blocks: each unit is connected to itself alone.

    The sweep still multiplies by all of W; for speed write a cell with a per-unit parameter and
    reads=None.
    """

    def forward(self, w: Tensor) -> Tensor:
        """W [g d, k d] whose blocks have the diagonals w [g, k, d]."""
        return join_blocks(torch.diag_embed(w))

    def right_inverse(self, W: Tensor) -> Tensor:
        """The diagonals of W's blocks, [g, k, d]; the rest of W is dropped."""
        return torch.diagonal(split_blocks(W, self.units), dim1=-2, dim2=-1).clone()

    def begin(self, w: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw the diagonals uniformly on -1..1."""
        w.uniform_(-1, 1, generator=generator)


class LowRank(nn.Module):
    """W = I + L N', L and N [d, rank] for each block.

    The raw parameters are original0 (L) and original1 (N).
    """

    def __init__(self, rank: int = 1, units: int | None = None) -> None:
        super().__init__()
        whole_number("rank", rank)
        self.rank = rank
        self.units = units

    def forward(self, L: Tensor, N: Tensor) -> Tensor:
        """W [g d, k d] with the blocks I + L N', of L and N [g, k, d, rank]."""
        X = L @ N.mT
        return join_blocks(identity_like(X) + X)

    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """L and N, by the singular values: L N' is the matrix of this rank nearest to W - I.

        Where a singular value is 0, L is 0 but N is not: if both were, neither would ever move, as
        the gradient of each is proportional to the other.
        """
        X = split_blocks(W, self.units)
        U, S, Vh = torch.linalg.svd(X - identity_like(X), full_matrices=False)
        r = self.rank
        root = S.sqrt()[..., None, :r]  # U S V' = (U sqrt(S)) (V sqrt(S))'
        return U[..., :r] * root, Vh.mT[..., :r] * torch.where(root > 0, root, 1)

    def begin(self, L: Tensor, N: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw the entries of L and N uniformly on +-1/sqrt(d)."""
        bound = 1 / math.sqrt(L.shape[-2])
        for raw in (L, N):
            raw.uniform_(-bound, bound, generator=generator)


class OwnStructure(Protocol):
    """What every structure of a cell in this package can do."""

    def right_inverse(self, W: Tensor) -> Tensor:
        """A raw parameter of W."""

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw the raw parameter."""

    def forward(self, M: Tensor) -> Tensor:
        """W of the raw parameter."""


class Free(nn.Module):
    """W = M, which begins as the structure of a cell draws W, and is then trained without it."""

    def __init__(self, own: Callable[..., nn.Module] | None, name: str, units: int) -> None:
        super().__init__()
        if own is None:
            raise InputError(
                f"structure 'free' trains W without the structure that its cell has, but cell "
                f"'{name}' has none: leave it out."
            )
        self.own = own(units=units)

    def forward(self, M: Tensor) -> Tensor:
        """M itself."""
        return M

    def right_inverse(self, W: Tensor) -> Tensor:
        """W itself."""
        return W.clone()

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw a W of the cell's structure."""
        rows, columns = M.shape
        identity = torch.eye(columns, dtype=M.dtype, device=M.device)
        # Every structure of a cell contains the identity, whose raw parameter has the right shape.
        own = cast(OwnStructure, self.own)
        raw = torch.empty_like(own.right_inverse(identity.repeat(rows // columns, 1)))
        own.begin(raw, generator=generator)
        M.copy_(own.forward(raw))


class WithInverse(nn.Module):
    """W = (M; M^-1), for a cell with two gates; M begins as a random rotation."""

    def __init__(self, units: int | None = None) -> None:
        super().__init__()  # `units` is what every structure is given; M itself has the size

    def forward(self, M: Tensor) -> Tensor:
        """M [d, d] above its inverse, [2 d, d]."""
        return torch.cat([M, torch.linalg.inv(M)])

    def right_inverse(self, W: Tensor) -> Tensor:
        """M, the upper half of W [2 d, d]."""
        return W[: W.shape[1]].clone()

    def begin(self, M: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw a random orthogonal M."""
        nn.init.orthogonal_(M, generator=generator)


class Signed(nn.Module):
    """Dale's law, W = |M| diag(signs): column j of W has the sign signs[j].

    signs  +1 (excitatory) or -1 (inhibitory) for each unit, the same for each slot that W reads
    """

    signs: Tensor

    def __init__(self, signs: Tensor) -> None:
        super().__init__()
        # Sparse and nested tensors fail in torch.isin below.
        is_dense = (
            isinstance(signs, Tensor) and not signs.is_nested and signs.layout == torch.strided
        )
        if not is_dense or signs.dim() != 1:
            raise InputError("signs must be a vector of +1 and -1, one for each unit.")
        known = torch.tensor([-1, 1], dtype=signs.dtype, device=signs.device)
        are_signs = torch.isin(signs, known).all()
        # A meta tensor is a shape without numbers: there is nothing to check.
        if not are_signs.is_meta and not are_signs:
            raise InputError("signs must be a vector of +1 and -1, one for each unit.")
        self.register_buffer("signs", signs)

    def forward(self, M: Tensor) -> Tensor:
        """W = |M| diag(signs), the signs repeated for each slot that W reads."""
        slots, rest = divmod(M.shape[1], len(self.signs))
        if rest:
            raise InputError(
                f"W has {M.shape[1]} columns; expected a multiple of the {len(self.signs)} signs."
            )
        return M.abs() * self.signs.to(M.dtype).repeat(slots)

    def right_inverse(self, W: Tensor) -> Tensor:
        """A raw M of W, |W|; signs of W other than `signs` are lost."""
        return W.abs()


def dale(units: int, excitatory: float = 0.8) -> Signed:
    """Dale's law for `units` units; the share `excitatory` of them, which come first, has +1."""
    whole_number("units", units)
    count = round(real("excitatory", excitatory, 0, 1) * units)
    return Signed(torch.cat([torch.ones(count), -torch.ones(units - count)]))


FREE = "free"  # without the structure of the cell: only together with a cell that has one
STRUCTURES: dict[str, Callable[..., nn.Module]] = {  # units -> parametrisation
    "antisymmetric": Skew,
    "orthogonal": Orthogonal,
    "cayley": lambda units: Orthogonal("cayley", units),
    "diagonal": Diagonal,
    "low-rank": lambda units: LowRank(1, units),
    "dale": dale,
}


def structure(given: str | nn.Module, units: int) -> nn.Module:
    """The parametrisation of W for blocks of `units` units, by name; a module is returned as is."""
    if isinstance(given, nn.Module):
        return given
    if not isinstance(given, str):
        raise KindError(f"structure must be a name or a torch module; got {type(given).__name__}.")
    whole_number("units", units)
    return STRUCTURES[choose("structure", given, STRUCTURES)](units=units)
