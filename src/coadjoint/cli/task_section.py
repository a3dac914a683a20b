"""The section of a config that chooses a built-in task and its options."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..training.network_section import PositiveInt, PositiveUnitFloat, Section


class TaskSection(Section):
    """A built-in task."""

    name: str | None = Field(None, description="a built-in task; `coadjoint tasks` lists them")
    length: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="time steps per sequence, or a range: low,high"
    )
    ragged: bool | None = Field(
        None, description="draw the length of each sequence in a batch separately"
    )
    curriculum: tuple[PositiveInt, PositiveInt] | None = Field(
        None,
        description=(
            "start,steps: grow the sequence length from start to its full value over this many "
            "training steps"
        ),
    )
    easiest: tuple[PositiveUnitFloat, PositiveInt] | None = Field(
        None,
        description=(
            "start,steps: train on the easiest share of the drawn sequences; the share grows "
            "from start to 1 over this many training steps"
        ),
    )
    easiest_by: Literal["loss", "length"] | None = Field(
        None, description="with --easiest: rank by current loss (default) or sequence length"
    )
    rule: Literal["loose", "strict"] | None = Field(
        None,
        description="addition, multiplication: accept errors up to 0.2 or 0.04 (default: the "
        "--variant's)",
    )
    variant: Literal["pascanu", "galvan"] | None = Field(
        None,
        description="addition, multiplication, temporal-order: whose definition (default: pascanu)",
    )
    pixels: Literal[1, 8] | None = Field(None, description="digits: pixels per time step")
    permuted: bool | None = Field(None, description="digits: read pixels in a fixed random order")
    path: str | None = Field(None, description="music: the MATLAB file to read")
    values: PositiveInt | None = Field(
        None, description="copy, reversal, sorting: size of the alphabet"
    )
    positions: PositiveInt | None = Field(None, description="copy: number of letters to repeat")
    chunk: PositiveInt | None = Field(
        None,
        description=(
            "music, your own data: cut training sequences into chunks of this many time steps"
        ),
    )
