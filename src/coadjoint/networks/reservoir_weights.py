"""The fixed weights of a reservoir: sparse random matrices with a given spectral radius.

A sparse matrix has the same number of entries in each row. It is stored as sources [d, links], the
columns of these entries, and weights [d, links].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .network import Network

MAX_DENSE = 500  # up to this size all eigenvalues are computed; beyond, only the largest


def draw_reservoir(
    net: Network,
    radius: float,
    leak: float,
    links: int,
    input_scale: float,
    bias_scale: float,
    seed: int,
) -> None:
    """Draw W, R and b of a leaky network and freeze them and its leak; its readout becomes zero.

    links counts the incoming connections of a unit; other arguments as in Reservoir. All are
    drawn in double precision on the CPU: a seed determines them for every type and device.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw_uniform(name: str, scale: float) -> Tensor:
        """Values uniform on +-scale in the shape of a parameter."""
        shape = net.get_parameter(name).shape
        return scale * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)

    sources, weights = draw_links(net.hidden, links, generator)
    weights *= radius / sparse_radius(sources, weights)
    W = torch.zeros(net.hidden, net.hidden, dtype=torch.float64).scatter_(1, sources, weights)
    values = {
        "W": W,
        "R": draw_uniform("R", input_scale),
        "b": draw_uniform("b", bias_scale),
        "p.leak": torch.full((net.hidden,), leak, dtype=torch.float64),
    }
    with torch.no_grad():
        for name, value in values.items():
            net.get_parameter(name).copy_(value).requires_grad_(False)
        net.V.zero_()
        net.get_parameter("b_o").zero_()


def draw_links(hidden: int, links: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(sources, weights), [hidden, links] each: the units that each unit reads, and how strongly.

    Sources are different units in a row, perhaps the unit itself; weights are uniform on +-1.
    """
    rows = [torch.randperm(hidden, generator=generator)[:links] for _ in range(hidden)]
    weights = 2 * torch.rand(hidden, links, generator=generator, dtype=torch.float64) - 1
    return torch.stack(rows), weights


def sparse_radius(sources: Tensor, weights: Tensor) -> float:
    """The largest |eigenvalue| of the matrix with weights[i, k] in row i, column sources[i, k]."""
    d = len(sources)
    columns = sources.numpy()
    values = weights.numpy()
    if d > MAX_DENSE:
        radius = krylov_radius(lambda x: (values * x[columns]).sum(1), d)
        if radius is not None:  # otherwise it did not converge
            return radius
    W = np.zeros((d, d))
    np.put_along_axis(W, columns, values, 1)
    return float(np.abs(np.linalg.eigvals(W)).max())


def krylov_radius(
    times: Callable[[np.ndarray], np.ndarray], d: int, size: int = 120, keep: int = 40
) -> float | None:
    """The largest |eigenvalue| of a real matrix A [d, d] given by its products x -> A x.

    None if it did not converge. Arnoldi's recurrence A Q_m = Q_m H + q h' is restarted from the
    invariant subspace of H with the `keep` largest eigenvalues: Stewart, A Krylov-Schur algorithm
    for large eigenproblems, SIAM J. Matrix Anal. 23 (2001).

    size  the number of basis vectors before a restart
    keep  those that survive it: many, for the eigenvalues of a random matrix crowd at the edge
    """
    Q = np.zeros((size + 1, d))  # the basis, one vector in each row
    H = np.zeros((size + 1, size))  # its last row is h
    begin = 0
    Q[0] = np.random.default_rng(0).standard_normal(d)
    Q[0] /= np.linalg.norm(Q[0])
    for _ in range(200):  # restarts, after which we give up
        if not _extend_basis(times, Q, H, begin):
            return None  # an invariant subspace, which need not contain the largest eigenvalue
        values, vectors = np.linalg.eig(H[:size])
        order = np.argsort(-np.abs(values))
        largest = order[0]
        # |A v - value v| of the unit vector v = Q' vectors[:, i] is |h . vectors[:, i]|.
        if abs(H[size] @ vectors[:, largest]) <= 1e-12 * abs(values[largest]):
            return float(abs(values[largest]))
        # A real basis of the subspace that is kept. imag >= 0: one of each conjugate pair.
        kept: list[np.ndarray] = []
        for i in order[values[order].imag >= 0]:
            kept.append(vectors[:, i].real)
            if values[i].imag != 0:  # of a conjugate pair, the real and the imaginary part
                kept.append(vectors[:, i].imag)
            if len(kept) >= keep:
                break
        begin = len(kept)
        # In its orthonormal basis P: Q <- P' Q, followed by q; H <- P' H P; h <- P' h.
        P = np.linalg.qr(np.stack(kept, 1))[0]
        Q[: begin + 1] = np.concatenate([P.T @ Q[:size], Q[size:]])
        head = P.T @ H[:size] @ P
        h = H[size] @ P
        H[:] = 0
        H[:begin, :begin] = head
        H[begin, :begin] = h
    return None


def _extend_basis(
    times: Callable[[np.ndarray], np.ndarray], Q: np.ndarray, H: np.ndarray, begin: int
) -> bool:
    """Arnoldi's steps: fill the rows of Q after `begin` and the columns of H from `begin` on.

    Each new vector is A q_m (`times`) minus its parts along q_0..q_m, which are column m of H.
    False if nothing but rounding is left of one: the basis then spans an invariant subspace.
    """
    for m in range(begin, H.shape[1]):
        q = times(Q[m])
        for _ in range(2):  # after one pass of Gram-Schmidt, q is not orthogonal enough
            along_basis = Q[: m + 1] @ q
            q -= along_basis @ Q[: m + 1]
            H[: m + 1, m] += along_basis
        H[m + 1, m] = np.linalg.norm(q)
        if H[m + 1, m] <= 1e-13 * np.abs(H).max():
            return False
        Q[m + 1] = q / H[m + 1, m]
    return True
