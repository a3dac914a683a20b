"""Initial weights of maps: orthogonal, Gaussian, or torch's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...errors import check_seed, choose, real

STARTS = ("orthogonal", "gaussian", "torch")


def draw_weights(
    maps: Iterable[nn.Module], start: str = "orthogonal", gain: float = 1.0, seed: int | None = None
) -> None:
    """Draw the weights of maps and set their biases to zero.

    start  "orthogonal": rows or columns of W are orthogonal and of length gain
           "gaussian": entries of variance gain^2 / n, n the number of inputs of a unit
           "torch": the weights stay as the maps' constructors have drawn them
    gain   of all weights but those of the last map, the readout, which has 1
    seed   None: torch's own generator

    A filter bank [channels, ...] counts as a matrix with a row for each channel. Weights that
    belong to several maps are drawn once.

    Example:
        >>> import torch, coadjoint as co
        >>> f = co.maps.Dense(3, 3)
        >>> co.maps.draw_weights([f], "orthogonal", seed=0)
        >>> torch.allclose(f.W @ f.W.T, torch.eye(3), atol=1e-6)
        True
    """
    choose("start", start, STARTS)
    real("gain", gain, 0, above=True)
    if start == "torch":
        return
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(check_seed(seed))
    maps = list(maps)
    drawn: set[int] = set()
    for module in maps:
        own_gain = 1.0 if module is maps[-1] else gain
        for parameter in module.parameters():
            if id(parameter) not in drawn:
                drawn.add(id(parameter))
                draw_parameter(parameter, start, own_gain, generator)


@torch.no_grad()
def draw_parameter(
    parameter: Tensor, start: str, gain: float, generator: torch.Generator | None
) -> None:
    """Draw one weight array on the CPU, so that a seed gives the same bits on every device."""
    if parameter.dim() < 2:
        parameter.zero_()
        return
    matrix = torch.empty(len(parameter), parameter[0].numel(), dtype=parameter.dtype)
    if start == "orthogonal":
        nn.init.orthogonal_(matrix, gain, generator=generator)
    else:
        nn.init.normal_(matrix, std=gain / matrix.shape[1] ** 0.5, generator=generator)
    parameter.copy_(matrix.view(parameter.shape))
