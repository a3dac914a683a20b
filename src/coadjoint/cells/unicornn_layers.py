"""UnICORNN of several layers as one recurrence, whose readout reads the states of all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import real
from .parameters import ParameterOptions
from .step_type import Step, new_parameter


class OscillatorLayer(nn.Module):
    """One layer: R, b read the layer below, or u; w and c have a number for each unit."""

    def __init__(self, below: int, hidden: int, bias: bool, make: ParameterOptions) -> None:
        # `below` is the width of the layer below, `make` the dtype and device of parameters.
        super().__init__()
        self.R = new_parameter(hidden, below, **make)
        self.b = new_parameter(hidden, **make) if bias else None
        self.w = new_parameter(hidden, **make)
        self.c = new_parameter(hidden, **make)

    def forward(
        self, below: Tensor, y: Tensor, z: Tensor, eps: float, alpha: float
    ) -> tuple[Tensor, Tensor]:
        """The new y and z, from the layer below and the layer's own y and z."""
        e = eps * torch.sigmoid(self.c)
        z = z - e * (torch.tanh(linear(below, self.R, self.b) + self.w * y) + alpha * y)
        return y + e * z, z


class UnICORNNLayers(Step):
    """UnICORNN of several layers as one recurrence.

    z'_j = z_j - e_j (tanh(w_j y_j + R_j y'_{j-1} + b_j) + alpha y_j)     y'_0 = u
    y'_j = y_j + e_j z'_j,  e_j = eps sigmoid(c_j)

    The state is (y_1, z_1, ..., y_L, z_L), and the readout reads all of it. lam_t is the costate of
    that state: what y'_j of one step adds to the layer above in the same step is inside the step. A
    Stack of cell "unicornn" computes the same states, but its readout reads the top layer's y. w is
    drawn from 0..1 and c from +-0.1; with init "keras" R is uniform on +-sqrt(6/columns), b 0.

    Rusch & Mishra, ICML (2021); the readout is that of published code of Johnston & Patel.
    """

    state = "2 layers"
    shows_all = True

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        layers: int = 2,
        eps: float = 0.03,
        alpha: float = 0.9,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inputs, hidden, layers=layers)
        self.eps = real("eps", eps, 0, above=True)
        self.alpha = real("alpha", alpha, 0)
        self.layers = layers
        self.slots = 2 * layers
        make: ParameterOptions = {"dtype": dtype, "device": device}
        self.levels = nn.ModuleList()
        for below in (inputs, *[hidden] * (layers - 1)):  # the width that each layer reads
            self.levels.append(OscillatorLayer(below, hidden, bias, make))
        self.reset_parameters()

    @property
    def slot_names(self) -> tuple[str, ...]:
        """y1 z1 y2 z2, and so on."""
        return tuple(f"{slot}{j}" for j in range(1, self.layers + 1) for slot in "yz")

    def reset_parameters(self) -> None:
        """Draw R and b uniformly from +-1/sqrt(hidden), w and c as the class says."""
        super().reset_parameters()
        self.draw_units(None)

    def begin_as_published(self, generator: torch.Generator | None) -> None:
        """Draw R uniformly from +-sqrt(6/columns), w and c as the class says; b = 0."""
        with torch.no_grad():
            for level in self.levels:
                assert isinstance(level, OscillatorLayer)
                bound = (6 / level.R.shape[1]) ** 0.5
                level.R.uniform_(-bound, bound, generator=generator)
                if level.b is not None:
                    level.b.zero_()
        self.draw_units(generator)

    def draw_units(self, generator: torch.Generator | None) -> None:
        """Draw w and c, which every initialiser leaves to the step."""
        with torch.no_grad():
            for level in self.levels:
                assert isinstance(level, OscillatorLayer)
                level.w.uniform_(0, 1, generator=generator)
                level.c.uniform_(-0.1, 0.1, generator=generator)

    def blocks(self) -> list[Tensor]:
        """None: no matrix leads from one state to the next."""
        return []

    def extra_repr(self) -> str:
        """The sizes and the constants of the equations, for torch's repr."""
        own = f"layers={self.layers}, eps={self.eps:g}, alpha={self.alpha:g}"
        return f"{super().extra_repr()}, {own}"

    def forward(self, u: Tensor, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        """The new state [B, 2 layers hidden], by the equations of the class."""
        parts = self.state_parts(x)
        below = u
        new: list[Tensor] = []
        for level, y, z in zip(self.levels, parts[::2], parts[1::2], strict=True):
            below, z_next = level(below, y, z, self.eps, self.alpha)
            new += [below, z_next]
        return torch.cat(new, -1)
