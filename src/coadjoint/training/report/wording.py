"""The words of a page for what its network runs through: time steps, or layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

MAX_LISTED = 30  # layers of different kinds in a sentence
LARGEST_DECAY = "−2: it is 100 times smaller there; 2: 100 times larger"


class FigureWords(NamedTuple):
    """Title, description and label of a figure."""

    title: str
    about: str
    label: str


@dataclass(frozen=True)
class PageWords:
    """How a page speaks of the states of a network and of what it reads."""

    unit: str  # what the network reads one of: "sequence"
    axis: str  # of heatmaps, where it is not time
    lead: str  # of the section with the costates
    costates: FigureWords
    components: FigureWords
    decay: FigureWords
    decay_ratio: str
    penalty: str

    @property
    def units(self) -> str:
        """The plural of `unit`."""
        return f"{self.unit}s"


def list_layers(names: Sequence[str]) -> str:
    """The layers in a sentence, equal ones together: "Layers: 0 input; 1 to 30 dense 64 tanh."."""
    parts = []
    first = 0
    for name, equal in groupby(names):
        last = first + len(list(equal)) - 1
        parts.append(f"{first} {name}" if first == last else f"{first} to {last} {name}")
        first = last + 1
    if len(parts) > MAX_LISTED:
        parts = [*parts[:MAX_LISTED], "…"]
    return f"Layers: {'; '.join(parts)}." if parts else ""


TIME_WORDS = PageWords(
    unit="sequence",
    axis="",
    lead="The costates λₜ = ∂L/∂xₜ are the error signal at time t of a sequence.",
    costates=FigureWords(
        "Costates through time",
        "how much of the error signal reaches each time step",
        "log₁₀ ‖λₜ‖",
    ),
    components=FigureWords(
        "Temporal components",
        "contribution of each time step to the gradient",
        "log₁₀ norm of the component at t",
    ),
    decay=FigureWords(
        "Decay of the costates",
        "log₁₀ of a ratio. 0: the error signal reaches the start of the sequence unchanged; "
        + LARGEST_DECAY,
        "log₁₀ (‖λ₀‖ / ‖λ_T‖)",
    ),
    decay_ratio="log₁₀ ‖λ₀‖/‖λ_T‖",
    penalty="G, a function of the costates",
)
DEPTH_WORDS = PageWords(
    unit="sample",
    axis="layer",
    lead=(
        "The costates λᵢ = ∂L/∂xᵢ are the error signal at layer i of the chain: x₀ is the input, "
        "map 0 leads to x₁, and the last layer x_L is the output."
    ),
    costates=FigureWords(
        "Costates through depth", "how much of the error signal reaches each layer", "log₁₀ ‖λᵢ‖"
    ),
    components=FigureWords(
        "Gradient by layer",
        "norm for all parameters of the map that leads to a layer",
        "log₁₀ norm of the gradient",
    ),
    decay=FigureWords(
        "Decay of the costates through depth",
        "log₁₀ of a ratio. 0: the error signal reaches the input unchanged; " + LARGEST_DECAY,
        "log₁₀ (‖λ₀‖ / ‖λ_L‖)",
    ),
    decay_ratio="log₁₀ ‖λ₀‖/‖λ_L‖",
    penalty="G in L + ρ G",
)
