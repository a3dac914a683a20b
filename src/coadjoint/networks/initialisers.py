"""Initialisers: how the weights of a network are drawn.

spectral_, gaussian_, orthogonal_, identity_, rotation_, sparse_   fill one matrix
initialise                                                         draws a network, by name

Example:
    >>> import torch, coadjoint as co
    >>> W = co.initialisers.identity_(torch.empty(2, 2), 0.5)
    >>> W.tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    >>> net = co.Network("elman", inputs=1, hidden=2, outputs=1)
    >>> _ = co.initialisers.initialise(net, "identity", radius=0.5)
    >>> torch.equal(net.W, W)
    True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cells.cell import Uniform
from ..cells.linear import ring
from ..cells.structures import split_blocks
from ..errors import (
    InputError,
    OptionError,
    Unsupported,
    check_kind,
    check_seed,
    choose,
    real,
    whole_number,
)
from ..sweeps.layout import check_dense
from .interface import Net, check_net
from .recurrence import Recurrence
from .start_scales import check_scales, glorot_uniform_, keras_, scale_


def spectral_(W: Tensor, radius: float, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian entries, scaled so that the largest |eigenvalue| of the square matrix W is `radius`.

    Below 1, the costates of a tanh network vanish; above, they may explode.
    """
    if check_dense("W", W).dim() != 2 or W.shape[0] != W.shape[1]:
        raise InputError(
            f"only a square matrix has a spectral radius; got shape {list(W.shape)}. For a gated "
            "cell scale the block of one gate."
        )
    real("radius", radius, 0, above=True)
    check_generator(generator)
    with torch.no_grad():
        W.normal_(generator=generator)
        return W.mul_(radius / spectral_radius(W))


def check_generator(generator: object) -> None:
    """Refuse anything but a torch.Generator or None."""
    check_kind("generator", generator, (torch.Generator, type(None)), "a torch.Generator")


def spectral_radius(W: Tensor) -> Tensor:
    """The largest |eigenvalue| of a square matrix, computed in double precision."""
    eigenvalues: Tensor = torch.linalg.eigvals(W.double())
    return eigenvalues.abs().max().to(W.dtype)


def gaussian_(W: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Independent entries N(0, std^2)."""
    check_dense("W", W)
    real("std", std, 0)
    check_generator(generator)
    with torch.no_grad():
        return W.normal_(0.0, std, generator=generator)


def orthogonal_(W: Tensor, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """W' W = gain^2 I: a random orthogonal matrix times gain."""
    check_dense("W", W)
    real("gain", gain)
    check_generator(generator)
    nn.init.orthogonal_(W, gain, generator)
    return W


def identity_(W: Tensor, gain: float = 1.0) -> Tensor:
    """W = gain I. With relu units this is the IRNN of Le et al. (2015)."""
    if check_dense("W", W).dim() != 2:
        raise InputError(f"an identity must be a matrix; got shape {list(W.shape)}.")
    real("gain", gain)
    with torch.no_grad():
        return W.copy_(gain * torch.eye(*W.shape, dtype=W.dtype, device=W.device))


def rotation_(W: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A random orthogonal W of determinant 1."""
    if check_dense("W", W).dim() != 2 or W.shape[0] != W.shape[1]:
        raise InputError(f"a rotation must be a square matrix; got shape {list(W.shape)}.")
    orthogonal_(W, 1.0, generator)
    with torch.no_grad():  # determinant -1 becomes 1 when one row changes its sign
        W[0] *= torch.linalg.det(W.double()).sign().to(W.dtype)
    return W


def sparse_(
    W: Tensor, radius: float, links: int = 15, generator: torch.Generator | None = None
) -> Tensor:
    """`links` Gaussian entries in each row, scaled to the spectral radius; the others are zero.

    A row holds the incoming connections of a unit; all of them are drawn if W has fewer columns.
    15 links are those of Martens (2010).
    """
    whole_number("links", links)
    spectral_(W, radius, generator)
    with torch.no_grad():
        # A random permutation of 0, 1, ... in each row, of which the first `links` stay.
        rank = torch.rand(W.shape, generator=generator, device=W.device).argsort(1)
        W[rank >= links] = 0
        sparse_radius = spectral_radius(W)
        # Without a cycle among the links, all eigenvalues are zero and cannot be scaled.
        return W.mul_(radius / sparse_radius) if sparse_radius > 0 else W


def fan_(W: Tensor, gain: float, both: bool, generator: torch.Generator | None = None) -> Tensor:
    """Entries N(0, gain / n), n the number of columns, or if both, the mean of columns and rows.

    Glorot's variance 2 / (columns + rows) is gain 1 with both; He's is gain 2 without.
    """
    n = sum(W.shape) / 2 if both else W.shape[1]
    return gaussian_(W, (gain / n) ** 0.5, generator)


AnyNet = TypeVar("AnyNet", bound=Net)
Options = Mapping[str, float]
Draw = Callable[[Tensor, Options, torch.Generator], Tensor]  # fills a matrix and returns it


@dataclass(frozen=True)
class Initialiser:
    """A row of the table: how matrices are drawn, and which options that takes."""

    text: str
    draw: Draw  # for all matrices
    draw_W: Draw | None = None  # for each square block of W, if different
    options: Options = field(default_factory=dict)  # with their defaults
    draw_structured: Draw | None = None  # in place of draw_W, if W has a structure
    keeps_radius: bool = False  # a structured W need only have the spectral radius, not the entries
    is_keras: bool = False  # what is no matrix of Glorot's is drawn by `keras_`
    is_ring: bool = False  # |L| of a complex diagonal lies between the options inner and radius


def gaussian_with(std: float) -> Draw:
    """Entries N(0, std^2) for a fixed std."""
    return lambda W, options, generator: gaussian_(W, std, generator)


def gaussian_by_option(W: Tensor, options: Options, generator: torch.Generator) -> Tensor:
    """Entries N(0, std^2), std an option."""
    return gaussian_(W, options["std"], generator)


def sparse_by_option(W: Tensor, options: Options, generator: torch.Generator) -> Tensor:
    """15 links into each unit, scaled to the option radius."""
    return sparse_(W, options["radius"], generator=generator)


RADIUS_AND_STD = {"radius": 1.0, "std": 0.1}
INITIALISERS: dict[str, Initialiser] = {
    "torch": Initialiser(
        "uniform on +-1/sqrt(hidden), biases too, as in torch.nn",
        lambda W, options, generator: W,
    ),
    "gaussian": Initialiser("N(0, std^2), like R and V", gaussian_by_option, options={"std": 0.1}),
    "spectral": Initialiser(
        "Gaussian, scaled to the spectral radius",
        gaussian_by_option,
        lambda W, options, generator: spectral_(W, options["radius"], generator),
        RADIUS_AND_STD,
        keeps_radius=True,
    ),
    "sparse": Initialiser(
        "15 Gaussian links into each unit, scaled to the spectral radius",
        gaussian_by_option,
        sparse_by_option,
        RADIUS_AND_STD,
        keeps_radius=True,
    ),
    "orthogonal": Initialiser(
        "a random rotation times the radius",
        gaussian_by_option,
        lambda W, options, generator: orthogonal_(W, options["radius"], generator),
        RADIUS_AND_STD,
        lambda W, options, generator: rotation_(W, generator).mul_(options["radius"]),
    ),
    "identity": Initialiser(
        "the identity times the radius",
        gaussian_by_option,
        lambda W, options, generator: identity_(W, options["radius"]),
        RADIUS_AND_STD,
    ),
    "glorot": Initialiser(
        "N(0, 2 / (columns + rows)), like R and V",
        lambda W, options, generator: fan_(W, 1.0, True, generator),
    ),
    "he": Initialiser(
        "N(0, 2 / columns), like R and V",
        lambda W, options, generator: fan_(W, 2.0, False, generator),
    ),
    "sigmoid": Initialiser(
        "N(0, 0.01^2), like R and V; from Pascanu et al. (2013), for sigmoid units",
        gaussian_with(0.01),
    ),
    "basic-tanh": Initialiser(
        "N(0, 0.1^2), like R and V; from Pascanu et al. (2013)", gaussian_with(0.1)
    ),
    "smart-tanh": Initialiser(
        "15 links into each unit, radius 0.95, R and V N(0, 0.01^2); from Pascanu et al. (2013)",
        gaussian_with(0.01),
        lambda W, options, generator: sparse_(W, 0.95, generator=generator),
        keeps_radius=True,
    ),
    "keras": Initialiser(
        "as in Keras: orthogonal over all gates; R and V uniform by Glorot; forget bias 1",
        lambda W, options, generator: glorot_uniform_(W, generator),
        is_keras=True,
    ),
    "ring": Initialiser(
        "lru: |L|^2 uniform between inner^2 and radius^2; R and V N(0, 1 / columns)",
        lambda W, options, generator: fan_(W, 1.0, False, generator),
        options={"inner": 0.0, "radius": 1.0},
        is_ring=True,
    ),
}


def initialise(
    net: AnyNet,
    name: str,
    *,
    seed: int = 0,
    std_in: float | None = None,
    std_rec: float | None = None,
    std_out: float | None = None,
    forget_bias: float | None = None,
    **given: float,
) -> AnyNet:
    """Draw the weights of a network by a name of INITIALISERS and its options (radius, std).

    Matrices are drawn, W block by block if the name has a rule for it; biases become 0. "torch"
    draws every parameter as the constructor does. Random per-unit parameters are always drawn as
    their definitions say, and so is a structured W, unless the name has a rule for W that the
    structure can represent. Other per-unit parameters and x0 stay as they are.

    std_in, std_rec, std_out  draw R, W (of a structured one its raw M) and V from N(0, std^2)
        instead; std_rec is refused where the name has a rule for W
    forget_bias  the initial bias of forget gates
    given  values of the initialiser's options, in place of their defaults
    """
    scales = check_scales(
        {"std_in": std_in, "std_rec": std_rec, "std_out": std_out, "forget_bias": forget_bias}
    )
    initialiser = INITIALISERS[choose("initialiser", name, INITIALISERS)]
    check_net(net)
    if std_rec is not None and initialiser.draw_W is not None:
        raise OptionError(f"$std_rec draws W, and so does $init {name}: choose one of them.")
    generator = torch.Generator(device=net.like.device).manual_seed(check_seed(seed))
    for option, value in given.items():
        if option not in initialiser.options:
            known = " and ".join(initialiser.options) or "no options"
            raise InputError(f"initialiser '{name}' takes {known}; got {option}.")
        real(option, value, 0, above=option != "inner")  # only inner may be zero
    options = {**initialiser.options, **given}
    recurrences = {path: m for path, m in net.named_modules() if isinstance(m, Recurrence)}
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            *path_of_owner, leaf = key.split(".")
            # Per-unit parameters (p) and a structured W are drawn below, by their recurrence.
            if leaf == "x0" or "p" in path_of_owner or "parametrizations" in path_of_owner:
                continue
            owner = net.get_submodule(".".join(path_of_owner))
            if name == "torch" and isinstance(owner, nn.Embedding):
                parameter.normal_(generator=generator)
            elif name == "torch" or leaf == "w_a":  # w_a is a vector, but not a bias
                bound = constructor_width(net, recurrences, key) ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            elif parameter.dim() == 2:
                initialiser.draw(parameter, options, generator)
            else:
                parameter.zero_()
        for recurrence in recurrences.values():
            recurrence.draw_own_parameters(generator)
            if initialiser.is_ring:
                ring_(recurrence, options["inner"], options["radius"], generator)
            if initialiser.draw_W is not None:
                place_blocks(recurrence, name, initialiser, options, generator)
        if initialiser.is_keras:
            keras_(net, recurrences.values(), generator)
        scale_(net, recurrences.values(), scales, generator)
    return net


def constructor_width(net: Net, recurrences: Mapping[str, Recurrence], key: str) -> int:
    """The width n by which the constructor draws a parameter from +-1/sqrt(n).

    The inputs of a linear map, the units of a recurrence, or the entries that the readout reads.
    recurrences: by their path in the network. key: that of the parameter, "layers.0.W".
    """
    path = key.rpartition(".")[0]
    module = net.get_submodule(path)
    # A linear map inside a step function is drawn by the units of its recurrence.
    if isinstance(module, nn.Linear) and "step" not in path.split("."):
        return module.in_features
    for recurrence_path, recurrence in recurrences.items():
        if key.startswith(recurrence_path):
            return recurrence.hidden
    return net.readout_width


ALTERNATIVES = "Use init 'torch', 'gaussian', 'glorot' or 'he'"


def square_blocks(W: Tensor, d: int) -> list[Tensor]:
    """The blocks [d, d] of W, as views that can be written to."""
    return [block for blocks_of_gate in split_blocks(W, d) for block in blocks_of_gate]


def place_blocks(
    recurrence: Recurrence,
    name: str,
    initialiser: Initialiser,
    options: Options,
    generator: torch.Generator,
) -> None:
    """Draw each square block of W, or each matrix that a step function lists, by draw_W.

    name  of the initialiser, for messages
    """
    assert initialiser.draw_W is not None
    if recurrence.cell is None:
        blocks: list[Tensor] = []
        list_blocks = getattr(recurrence.step, "blocks", None)  # steps of this package have it
        if list_blocks is not None:
            blocks = list_blocks()
        if not blocks or any(W.shape[0] != W.shape[1] for W in blocks):
            raise Unsupported(
                f"init '{name}' needs square matrices, which this step does not have. "
                f"{ALTERNATIVES}."
            )
    elif recurrence.W is None:
        or_ring = ", or 'ring'" if ring_parameters(recurrence) else ""
        raise Unsupported(
            f"init '{name}' draws W, but cell '{recurrence.cell.name}' has no W. "
            f"{ALTERNATIVES}{or_ring}."
        )
    elif parametrize.is_parametrized(recurrence, "W"):
        place_structured(recurrence, name, initialiser, options, generator)
        return
    else:
        blocks = square_blocks(recurrence.W, recurrence.hidden)
    for W in blocks:
        initialiser.draw_W(W, options, generator)


def place_structured(
    recurrence: Recurrence,
    name: str,
    initialiser: Initialiser,
    options: Options,
    generator: torch.Generator,
) -> None:
    """Draw a W and assign it to a structured one; refused if the structure cannot represent it.

    If the initialiser only fixes the spectral radius, the structure need only keep the zeros of
    the drawn W; its blocks are then scaled to the radius.
    """
    d = recurrence.hidden
    assert recurrence.W is not None
    draw = initialiser.draw_structured or initialiser.draw_W
    assert draw is not None
    drawn = torch.empty_like(recurrence.W)
    for W in square_blocks(drawn, d):
        draw(W, options, generator)
    try:
        represented = _assign_structured(recurrence, drawn)
        if initialiser.keeps_radius and torch.equal(represented != 0, drawn != 0):
            scaled = represented.clone()
            blocks = zip(square_blocks(scaled, d), square_blocks(drawn, d), strict=True)
            for W, drawn_block in blocks:
                W.mul_(spectral_radius(drawn_block) / spectral_radius(W))
            represented = _assign_structured(recurrence, scaled)
            drawn = scaled
        fits = _is_near(represented, drawn)
    except InputError:  # the structure refuses such a W
        fits = False
    if not fits:
        raise Unsupported(
            f"init '{name}' draws a W that its structure cannot represent. {ALTERNATIVES}: they "
            "leave W as its structure draws it."
        )


def _assign_structured(recurrence: Recurrence, value: Tensor) -> Tensor:
    """Assign a structured W, and return W as its structure represents it."""
    # torch's parametrisations take a plain tensor and invert it into their raw parameter.
    setattr(recurrence, "W", value)  # noqa: B010
    assert recurrence.W is not None
    return recurrence.W


def _is_near(x: Tensor, y: Tensor) -> bool:
    """Whether x and y agree to half of their digits, relative to the largest entry of y."""
    tolerance = torch.finfo(x.dtype).eps ** 0.5
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


def ring_(recurrence: Recurrence, inner: float, radius: float, generator: torch.Generator) -> None:
    """Draw the units of a cell with a complex diagonal L, uniformly in the area of a ring.

    inner, radius  the bounds of |L|; the area inside a circle grows with |L|^2
    """
    if not inner < radius <= 1:
        raise InputError(
            f"a ring needs inner < radius <= 1; got inner {inner} and radius {radius}."
        )
    names = ring_parameters(recurrence)
    if not names:
        raise Unsupported(
            f"init 'ring' belongs to cells with a complex diagonal, such as lru. {ALTERNATIVES}."
        )
    for name in names:
        # |L|^2 is uniform; `ring` turns it into the parameter that is stored.
        draw = Uniform(inner**2, radius**2, ring)
        recurrence.p[name].copy_(draw(recurrence.hidden, generator))


def ring_parameters(recurrence: Recurrence) -> list[str]:
    """The names of the cell's per-unit parameters that are drawn on a ring; [] if it has none."""
    if recurrence.cell is None:
        return []
    names: list[str] = []
    for name, initial in recurrence.cell.parameters.items():
        if isinstance(initial, Uniform) and initial.of is ring:
            names.append(name)
    return names
