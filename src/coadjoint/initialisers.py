"""Initialisers: where the weights of a network begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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


def sparse_(W: Tensor, radius: float, links: int = 15, generator: torch.Generator | None = None) -> Tensor:
    """`links` Gaussian entries in each row, the incoming connections of a unit, scaled to the spectral radius; all of them, where
    there are fewer columns."""
    spectral_(W, radius, generator)
    with torch.no_grad():
        places = torch.rand(W.shape, generator=generator, device=W.device).argsort(1)
        W[places >= links] = 0
        size = torch.linalg.eigvals(W.double()).abs().max().to(W.dtype)
        return W.mul_(radius / size) if size > 0 else W


def fan_(W: Tensor, gain: float, both: bool, generator: torch.Generator | None = None) -> Tensor:
    """N(0, gain / n), n the number of columns, or the mean of columns and rows."""
    n = sum(W.shape) / 2 if both else W.shape[1]
    return gaussian_(W, (gain / n) ** 0.5, generator)


@dataclass(frozen=True)
class Start:
    """A row of the table: what becomes of R and V, and of each gate of W; the options it takes and what they are if they are
    not given. A recipe that has its own numbers takes none."""

    text: str
    others: Callable[[Tensor, dict[str, float], torch.Generator], Tensor]
    W: Callable[[Tensor, dict[str, float], torch.Generator], Tensor] | None = None  # as the others
    options: Mapping[str, float] = field(default_factory=dict)


def normal(std: float | None = None) -> Callable[[Tensor, dict[str, float], torch.Generator], Tensor]:
    return lambda W, o, g: gaussian_(W, std or o["std"], g)


SCALED = {"radius": 1.0, "std": 0.1}
INITIALISERS: dict[str, Start] = {
    "torch": Start("uniform on +-1/sqrt(hidden), biases too; torch.nn's own", lambda W, o, g: W),
    "gaussian": Start("N(0, std^2), like R and V", normal(), None, {"std": 0.1}),
    "spectral": Start("Gaussian, scaled to the spectral radius", normal(), lambda W, o, g: spectral_(W, o["radius"], g), SCALED),
    "sparse": Start(
        "15 Gaussian links into each unit, scaled to the spectral radius", normal(),
        lambda W, o, g: sparse_(W, o["radius"], generator=g), SCALED,
    ),
    "orthogonal": Start("a random rotation times the radius", normal(), lambda W, o, g: orthogonal_(W, o["radius"], g), SCALED),
    "identity": Start("the identity times the radius", normal(), lambda W, o, g: identity_(W, o["radius"]), SCALED),
    "glorot": Start("N(0, 2 / (columns + rows)), like R and V", lambda W, o, g: fan_(W, 1.0, True, g)),
    "he": Start("N(0, 2 / columns), like R and V", lambda W, o, g: fan_(W, 2.0, False, g)),
    "sigmoid": Start("N(0, 0.01^2), like R and V; of Pascanu et al. (2013) for sigmoid units", normal(0.01)),
    "basic-tanh": Start("N(0, 0.1^2), like R and V; of Pascanu et al. (2013)", normal(0.1)),
    "smart-tanh": Start(
        "15 links into each unit, radius 0.95, R and V N(0, 0.01^2); of Pascanu et al. (2013)", normal(0.01),
        lambda W, o, g: sparse_(W, 0.95, generator=g),
    ),
}  # fmt: skip


def initialise(net: Network, name: str, *, seed: int = 0, **given: float) -> Network:
    """Begin a network anew: W, R and V by a name of the table, with its options (radius, std), biases 0.

    "torch" draws every parameter as the constructor does. Whatever the name, a structured W and per-unit parameters that are
    drawn begin where their definition says; other per-unit parameters and x0 stay as they are."""
    start = INITIALISERS[choose("initialiser", name, INITIALISERS)]
    generator = torch.Generator(device=net.V.device).manual_seed(seed)
    for what, value in given.items():
        if what not in start.options:
            raise InputError(f"initialiser '{name}' takes {' and '.join(start.options) or 'no options'}; got {what}.")
        if not 0 < value < float("inf"):
            raise InputError(f"{what} must be a positive number; got {value}.")
    options = {**start.options, **given}
    with torch.no_grad():
        for key, p in net.named_parameters():
            if name == "torch":
                if key in ("W", "R", "b", "V", "b_o"):
                    bound = net.hidden**-0.5
                    p.uniform_(-bound, bound, generator=generator)
            elif key in ("W", "R", "V"):
                start.others(p, options, generator)
            elif key in ("b", "b_o"):
                p.zero_()
        net.begin(generator)
        if start.W is not None:
            for W in blocks(net):
                start.W(W, options, generator)
    return net
