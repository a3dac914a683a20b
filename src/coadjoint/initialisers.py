"""Initialisers: where the weights of a network begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .errors import InputError, Unsupported, choose
from .network import Network


def spectral_(W: Tensor, radius: float, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian entries, scaled so that the largest |eigenvalue| of the square matrix W is `radius`.

    Below 1, the costates of a tanh network vanish; above, they may explode."""
    if W.dim() != 2 or W.shape[0] != W.shape[1]:
        raise InputError(
            f"a spectral radius belongs to a square matrix; got {list(W.shape)}. For a gated cell scale the block of one gate."
        )
    if not radius > 0:
        raise InputError(f"radius must be positive; got {radius}.")
    with torch.no_grad():
        W.normal_(generator=generator)
        W.mul_(radius / torch.linalg.eigvals(W.double()).abs().max().to(W.dtype))
    return W


def gaussian_(W: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Independent entries N(0, std^2)."""
    with torch.no_grad():
        return W.normal_(0.0, std, generator=generator)


def orthogonal_(W: Tensor, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """W' W = gain^2 I: a random rotation."""
    nn.init.orthogonal_(W, gain, generator)
    return W


def identity_(W: Tensor, gain: float = 1.0) -> Tensor:
    """W = gain I.  With relu units, the IRNN of Le et al. (2015)"""
    with torch.no_grad():
        return W.copy_(gain * torch.eye(*W.shape, dtype=W.dtype, device=W.device))


def blocks(net: Network) -> Iterator[Tensor]:
    """The square parts of W, one for each gate."""
    W = net.get_parameter("W") if "W" in dict(net.named_parameters()) else None
    if W is None or W.shape[1] != net.hidden:
        raise Unsupported(
            "this initialiser scales a square W, and this network has none. Use init 'torch' or 'gaussian'."
        )
    yield from W.split(net.hidden)


Rule = Callable[[Tensor, float, torch.Generator], Tensor]
INITIALISERS: dict[str, tuple[str, Rule | None]] = {  # name: (what W becomes, for each gate)
    "torch": ("uniform on +-1/sqrt(hidden), all parameters; torch.nn's own", None),
    "gaussian": ("N(0, std^2), like R and V", None),
    "spectral": ("Gaussian, scaled to the spectral radius", lambda W, radius, g: spectral_(W, radius, g)),
    "orthogonal": ("a random rotation times the radius", lambda W, radius, g: orthogonal_(W, radius, g)),
    "identity": ("the identity times the radius", lambda W, radius, g: identity_(W, radius)),
}


def initialise(net: Network, name: str, *, radius: float = 1.0, std: float = 0.1, seed: int = 0) -> Network:
    """Begin a network anew: W by its name in the table, R and V with entries N(0, std^2), biases 0.

    "torch" draws every parameter as the constructor does. Whatever the name, a structured W and per-unit parameters that are
    drawn begin where their definition says; other per-unit parameters and x0 stay as they are."""
    rule = INITIALISERS[choose("initialiser", name, INITIALISERS)][1]
    generator = torch.Generator(device=net.V.device).manual_seed(seed)
    for what, value in (("radius", radius), ("std", std)):
        if not 0 < value < float("inf"):
            raise InputError(f"{what} must be a positive number; got {value}.")
    with torch.no_grad():
        for key, p in net.named_parameters():
            if name == "torch":
                if key in ("W", "R", "b", "V", "b_o"):
                    bound = net.hidden**-0.5
                    p.uniform_(-bound, bound, generator=generator)
            elif key in ("W", "R", "V"):
                gaussian_(p, std, generator)
            elif key in ("b", "b_o"):
                p.zero_()
        net.begin(generator)
        if rule is not None:
            for W in blocks(net):
                rule(W, radius, generator)
    return net
