"""Initialisers: where the weights of a network begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cells import library
from ..cells.cell import Uniform
from ..cells.structures import split_blocks
from ..errors import InputError, Unsupported, check_kind, check_seed, choose, real, whole_number
from ..sweeps.layout import check_dense
from .interface import Net as AnyNet
from .interface import check_net
from .recurrence import Recurrence


def spectral_(W: Tensor, radius: float, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian entries, scaled so that the largest |eigenvalue| of the square matrix W is `radius`.

    Below 1, the costates of a tanh network vanish; above, they may explode."""
    if check_dense("W", W).dim() != 2 or W.shape[0] != W.shape[1]:
        raise InputError(
            f"a spectral radius belongs to a square matrix; got {list(W.shape)}. For a gated cell scale the block of one gate."
        )
    real("radius", radius, 0, above=True)
    check_generator(generator)
    with torch.no_grad():
        W.normal_(generator=generator)
        return W.mul_(radius / spectral_radius(W))


def check_generator(generator: Any) -> None:
    check_kind("generator", generator, (torch.Generator, type(None)), "a torch.Generator")


def spectral_radius(W: Tensor) -> Tensor:
    """The largest |eigenvalue|."""
    return torch.linalg.eigvals(W.double()).abs().max().to(W.dtype)


def gaussian_(W: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Independent entries N(0, std^2)."""
    check_dense("W", W)
    real("std", std, 0)
    check_generator(generator)
    with torch.no_grad():
        return W.normal_(0.0, std, generator=generator)


def orthogonal_(W: Tensor, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """W' W = gain^2 I: a random rotation."""
    check_dense("W", W)
    real("gain", gain)
    check_generator(generator)
    nn.init.orthogonal_(W, gain, generator)
    return W


def identity_(W: Tensor, gain: float = 1.0) -> Tensor:
    """W = gain I.  With relu units, the IRNN of Le et al. (2015)"""
    if check_dense("W", W).dim() != 2:
        raise InputError(f"the identity is a matrix; got shape {list(W.shape)}.")
    real("gain", gain)
    with torch.no_grad():
        return W.copy_(gain * torch.eye(*W.shape, dtype=W.dtype, device=W.device))


def rotation_(W: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A random orthogonal W of determinant 1."""
    if check_dense("W", W).dim() != 2 or W.shape[0] != W.shape[1]:
        raise InputError(f"a rotation is a square matrix; got shape {list(W.shape)}.")
    orthogonal_(W, 1.0, generator)
    with torch.no_grad():
        W[0] *= torch.linalg.det(W.double()).sign().to(W.dtype)
    return W


def sparse_(
    W: Tensor, radius: float, links: int = 15, generator: torch.Generator | None = None
) -> Tensor:
    """`links` Gaussian entries in each row, the incoming connections of a unit, scaled to the spectral radius; all of them, where
    there are fewer columns."""
    whole_number("links", links)
    spectral_(W, radius, generator)
    with torch.no_grad():
        places = torch.rand(W.shape, generator=generator, device=W.device).argsort(1)
        W[places >= links] = 0
        found = spectral_radius(W)
        return W.mul_(radius / found) if found > 0 else W


def fan_(W: Tensor, gain: float, both: bool, generator: torch.Generator | None = None) -> Tensor:
    """N(0, gain / n), n the number of columns, or the mean of columns and rows."""
    n = sum(W.shape) / 2 if both else W.shape[1]
    return gaussian_(W, (gain / n) ** 0.5, generator)


Net = TypeVar("Net", bound=AnyNet)
Draw = Callable[[Tensor, dict[str, float], torch.Generator], Tensor]


@dataclass(frozen=True)
class Initialiser:
    """A row of the table: what becomes of matrices, and of each square block of W; the options it takes and what they are if
    they are not given. A recipe that has its own numbers takes none."""

    text: str
    others: Draw
    W: Draw | None = None  # as the others
    options: Mapping[str, float] = field(default_factory=dict)
    within: Draw | None = None  # in place of W, where W has a structure
    scaled: bool = False  # of a structured W the spectral radius is kept, not the entries
    ring: bool = False  # |L| of a complex diagonal cell lies between the options inner and radius


def normal(std: float | None = None) -> Draw:
    return lambda W, o, g: gaussian_(W, std or o["std"], g)


SCALED = {"radius": 1.0, "std": 0.1}
INITIALISERS: dict[str, Initialiser] = {
    "torch": Initialiser("uniform on +-1/sqrt(hidden), biases too; torch.nn's own", lambda W, o, g: W),
    "gaussian": Initialiser("N(0, std^2), like R and V", normal(), None, {"std": 0.1}),
    "spectral": Initialiser(
        "Gaussian, scaled to the spectral radius", normal(), lambda W, o, g: spectral_(W, o["radius"], g), SCALED, scaled=True,
    ),
    "sparse": Initialiser(
        "15 Gaussian links into each unit, scaled to the spectral radius", normal(),
        lambda W, o, g: sparse_(W, o["radius"], generator=g), SCALED, scaled=True,
    ),
    "orthogonal": Initialiser(
        "a random rotation times the radius", normal(), lambda W, o, g: orthogonal_(W, o["radius"], g), SCALED,
        lambda W, o, g: rotation_(W, g).mul_(o["radius"]),
    ),
    "identity": Initialiser("the identity times the radius", normal(), lambda W, o, g: identity_(W, o["radius"]), SCALED),
    "glorot": Initialiser("N(0, 2 / (columns + rows)), like R and V", lambda W, o, g: fan_(W, 1.0, True, g)),
    "he": Initialiser("N(0, 2 / columns), like R and V", lambda W, o, g: fan_(W, 2.0, False, g)),
    "sigmoid": Initialiser("N(0, 0.01^2), like R and V; of Pascanu et al. (2013) for sigmoid units", normal(0.01)),
    "basic-tanh": Initialiser("N(0, 0.1^2), like R and V; of Pascanu et al. (2013)", normal(0.1)),
    "smart-tanh": Initialiser(
        "15 links into each unit, radius 0.95, R and V N(0, 0.01^2); of Pascanu et al. (2013)", normal(0.01),
        lambda W, o, g: sparse_(W, 0.95, generator=g), scaled=True,
    ),
    "ring": Initialiser(
        "lru: |L|^2 uniform between inner^2 and radius^2; R and V N(0, 1 / columns)", lambda W, o, g: fan_(W, 1.0, False, g),
        options={"inner": 0.0, "radius": 1.0}, ring=True,
    ),
}  # fmt: skip


def initialise(net: Net, name: str, *, seed: int = 0, **given: float) -> Net:
    """Begin a network anew by a name of the table, with its options (radius, std): its matrices, W block by block where the
    name says so; biases 0. seed: 0 or above, as everywhere.

    "torch" draws every parameter as the constructor does. Whatever the name, per-unit parameters that are drawn begin where
    their definition says, and so does a structured W, unless the name places W and the structure can hold what it asks for;
    other per-unit parameters and x0 stay as they are."""
    start = INITIALISERS[choose("initialiser", name, INITIALISERS)]
    check_net(net)
    generator = torch.Generator(device=net.like.device).manual_seed(check_seed(seed))
    for what, value in given.items():
        if what not in start.options:
            raise InputError(
                f"initialiser '{name}' takes {' and '.join(start.options) or 'no options'}; got {what}."
            )
        real(what, value, 0, above=what != "inner")
    options = {**start.options, **given}
    layers = {key: m for key, m in net.named_modules() if isinstance(m, Recurrence)}
    with torch.no_grad():
        for key, p in net.named_parameters():
            *path, leaf = key.split(".")
            if leaf == "x0" or "p" in path or "parametrizations" in path:
                continue
            if name == "torch" and isinstance(net.get_submodule(".".join(path)), nn.Embedding):
                p.normal_(generator=generator)
            elif name == "torch" or leaf == "w_a":
                bound = constructor_width(net, layers, key) ** -0.5
                p.uniform_(-bound, bound, generator=generator)
            elif p.dim() == 2:
                start.others(p, options, generator)
            else:
                p.zero_()
        for layer in layers.values():
            layer.draw_own_parameters(generator)
            if start.ring:
                ring_(layer, options["inner"], options["radius"], generator)
            if start.W is not None:
                place(layer, name, start, options, generator)
    return net


def constructor_width(net: AnyNet, layers: Mapping[str, Recurrence], key: str) -> int:
    """How many units the constructor draws a parameter for: a linear map's inputs, a layer's own, or what the readout reads."""
    path = key.rpartition(".")[0]
    module = net.get_submodule(path)
    if isinstance(module, nn.Linear) and "step" not in path.split("."):
        return module.in_features
    within = [layer.hidden for path, layer in layers.items() if key.startswith(path)]
    return within[0] if within else net.readout_width


PLAIN = "Use init 'torch', 'gaussian', 'glorot' or 'he'."


def square_blocks(W: Tensor, d: int) -> list[Tensor]:
    """The blocks [d, d] of W, to be written to."""
    return [block for gate in split_blocks(W, d) for block in gate]


def place(
    net: Recurrence,
    name: str,
    start: Initialiser,
    options: dict[str, float],
    generator: torch.Generator,
) -> None:
    """The square blocks of W where the name says."""
    assert start.W is not None
    if net.cell is None:
        found = net.step.blocks() if hasattr(net.step, "blocks") else []
        if not found or any(W.shape[0] != W.shape[1] for W in found):
            raise Unsupported(
                f"init '{name}' places square matrices, and those of this step are not. {PLAIN}"
            )
    elif net.W is None:
        more = f"{PLAIN[:-1]}, or 'ring'." if ring_parameters(net) else PLAIN
        raise Unsupported(f"init '{name}' places W, and cell '{net.cell.name}' has none. {more}")
    elif parametrize.is_parametrized(net, "W"):
        return within(net, name, start, options, generator)
    else:
        found = square_blocks(net.W, net.hidden)
    for W in found:
        start.W(W, options, generator)
    return None


def within(
    net: Recurrence,
    name: str,
    start: Initialiser,
    options: dict[str, float],
    generator: torch.Generator,
) -> None:
    """A structured W: what is drawn must be held by the structure, or, of a name that scales W, its size and its zeros."""
    near = lambda x, y: bool((x - y).abs().max() <= torch.finfo(x.dtype).eps ** 0.5 * y.abs().max())
    drawn = torch.empty_like(net.W)  # type: ignore[arg-type]
    for W in square_blocks(drawn, net.hidden):
        (start.within or start.W)(W, options, generator)  # type: ignore[misc]
    try:
        net.W = drawn  # type: ignore[assignment]
        held: Any = net.W
        if start.scaled and torch.equal(held != 0, drawn != 0):
            held = held.clone()
            for W, goal in zip(
                square_blocks(held, net.hidden), square_blocks(drawn, net.hidden), strict=True
            ):
                W.mul_(spectral_radius(goal) / spectral_radius(W))
            net.W, drawn = held, held
        fits = near(net.W, drawn)
    except InputError:
        fits = False
    if not fits:
        raise Unsupported(
            f"init '{name}' asks for a W that its structure cannot hold. {PLAIN[:-1]}: they leave W where its structure begins."
        )


def ring_(net: Recurrence, inner: float, radius: float, generator: torch.Generator) -> None:
    """|L| of the units of a complex diagonal cell: uniform in area between two circles."""
    if not inner < radius <= 1:
        raise InputError(
            f"a ring needs inner < radius <= 1; got inner {inner} and radius {radius}."
        )
    if not ring_parameters(net):
        raise Unsupported(
            f"init 'ring' belongs to cells with a complex diagonal, such as lru. {PLAIN}"
        )
    for n in ring_parameters(net):
        net.p[n].copy_(Uniform(inner**2, radius**2, library.ring)(net.hidden, generator))


def ring_parameters(net: Recurrence) -> list[str]:
    """The per-unit parameters that begin on a ring."""
    table = {} if net.cell is None else net.cell.parameters
    return [
        n
        for n, initial in table.items()
        if isinstance(initial, Uniform) and initial.of is library.ring
    ]
