"""NetworkSection: the options of a network as settings and model files have them, with their ranges.

This file loads without torch: the command line takes its flags from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
SmallInt = Annotated[int, Field(ge=1, le=1000)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
PositiveUnitFloat = Annotated[float, Field(gt=0, le=1)]

CELL_OPTIONS = "Options of single cells"


def cell_option(text: str) -> Any:
    """A key that belongs to some cells: `coadjoint cells` says to which, and what it is if it is not given."""
    return Field(None, description=text, json_schema_extra={"panel": CELL_OPTIONS})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NetworkSection(Section):
    """The network and where it begins."""

    cell: str | list[str] | None = Field(
        None,
        description="elman (default; gru where the answer is a sequence), lstm, ...: `coadjoint cells` lists them; lstm,gru: a layer of each; reservoir: fixed, only the readout is trained",
    )
    hidden: PositiveInt = Field(64, description="units, of each layer")
    layers: SmallInt | None = Field(
        None, description="so many layers of the cell (1; gated-feedback: of its own, 2)"
    )
    bidirectional: bool | None = Field(
        None, description="each layer reads a sequence in both directions"
    )
    residual: bool | None = Field(
        None, description="a layer adds to what it receives, from the second on"
    )
    dropout: UnitFloat | None = Field(
        None,
        description="share of what is dropped in training: of inputs, between layers, before the readout (0)",
    )
    activation: str | None = Field(
        None, description="tanh, sigmoid, relu, identity, softplus, where a cell leaves it open"
    )
    structure: str | None = Field(
        None,
        description="of W: antisymmetric, orthogonal, cayley, diagonal, low-rank, dale; some cells have their own",
    )
    x0: Literal["zero", "learned"] = Field("zero", description="the initial state")
    bias: bool = Field(True, description="b and b_o")
    readout: str | None = Field(
        None,
        description="tilted, tilted-tanh, attention: read all steps, where a task asks for one answer; the last if not given",
    )
    attention_steps: PositiveInt | None = Field(
        None, description="attention: so many steps have a bias of their own (1)"
    )
    deep: PositiveInt | list[PositiveInt] | None = Field(
        None, description="hidden layers of the readout, by their widths: 32 or 64,32"
    )
    skip: bool | None = Field(None, description="add D u to the readout")
    decoder: str | None = Field(
        None, description="sequences: the decoder's cell; the encoder's last if not given"
    )
    attend: bool | None = Field(
        None, description="sequences: the decoder looks at all steps of the input (default)"
    )
    embedding: PositiveInt | None = Field(
        None, description="sequences: entries of a token's embedding (the units)"
    )
    freeze: str | list[str] | None = Field(
        None, description="parameters that are not trained: W,R,b,V,b_o,x0, ..."
    )
    engine: str = Field("auto", description="auto, cpu, eager, cuda, scan, reference, autograd")
    init: str | None = Field(
        None,
        description="torch, gaussian, spectral, sparse, orthogonal, identity, glorot, he, sigmoid, basic-tanh, smart-tanh, ring; spectral if --radius is given",
    )
    radius: PositiveFloat | None = Field(
        None,
        description="spectral radius of W to begin with (1); orthogonal, identity: its gain; ring: the largest |L|",
    )
    inner: NonNegativeFloat | None = Field(
        None, description="ring: the smallest |L| to begin with (0)"
    )
    std: PositiveFloat | None = Field(
        None, description="standard deviation of R and V to begin with (0.1)"
    )
    eps: PositiveFloat | None = cell_option(
        "antisymmetric, lipschitz, unicornn: size of a step; cornn: damping"
    )
    gamma: NonNegativeFloat | None = cell_option(
        "antisymmetric, lipschitz: what is taken off the diagonal of W; cornn: stiffness"
    )
    dt: PositiveFloat | None = cell_option("cornn: size of a step")
    alpha: NonNegativeFloat | None = cell_option(
        "scrn: decay of the slow state; unicornn: stiffness"
    )
    beta: FiniteFloat | None = cell_option(
        "lipschitz: share of the skew part of W; with --readout tilted its sharpness instead"
    )
    k: PositiveInt | None = cell_option("inverse: steps with W^-1, then as many with W")
    noise: NonNegativeFloat | None = cell_option(
        "rate: standard deviation of the noise of a step, in training"
    )
    truncated: bool | None = cell_option("lstm-1997: the truncated gradient of the paper")
    unit: str | None = cell_option("gated-feedback: tanh, gru, lstm")
    depth: SmallInt | None = cell_option("deep-transition: layers between one state and the next")
    width: PositiveInt | None = cell_option("deep-transition: units of those layers")
    shortcut: bool | None = cell_option("deep-transition: the last layer also sees the state")


class Shape(Section):
    """What a task asks of a network."""

    inputs: PositiveInt
    outputs: PositiveInt
    readout: Literal["last", "every", "sequence"]
    output: str

    @classmethod
    def of(cls, task: Any) -> Shape:
        """What a task says of it, or a network."""
        return cls(**{key: getattr(task, key) for key in cls.model_fields})
