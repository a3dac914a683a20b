"""NetworkSection: the options of a network in settings and model files, with their ranges.

This file loads without torch, because the command line takes its flags from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
SmallInt = Annotated[int, Field(ge=1, le=1000)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
PositiveUnitFloat = Annotated[float, Field(gt=0, le=1)]

CELL_OPTIONS = "Options of single cells"  # the panel of --help


def cell_option(description: str) -> Any:
    """A field for an option that only some cells have; None is the default of the cell.

    `coadjoint cells` lists which cells have it; --help shows it in a panel of its own.
    """
    return Field(None, description=description, json_schema_extra={"panel": CELL_OPTIONS})


class Section(BaseModel):
    """A section of config.yaml. Its fields are flags, and their descriptions the help texts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NetworkSection(Section):
    """The network and its initial weights."""

    chain: str | None = Field(
        None,
        description=(
            "without time: layers from the input to the readout, 64x30 or 'conv 8 3, tanh, pool 2, "
            "flatten, 64'; the readout is added"
        ),
    )
    autoencoder: PositiveInt | list[PositiveInt] | None = Field(
        None,
        description=(
            "without time: widths of an encoder, 32,8, whose decoder has the same weights; the "
            "input is the target"
        ),
    )
    cell: str | list[str] | None = Field(
        None,
        description=(
            "elman (default; gru if the answers are sequences), lstm, ...: see `coadjoint cells`; "
            "lstm,gru is a stack of both; reservoir trains only the readout"
        ),
    )
    hidden: PositiveInt | list[PositiveInt] | None = Field(
        None,
        description="units in each layer (default 64; your own data: by its kind, 256 for "
        "texts); 64,32: one number for each layer",
    )
    layers: SmallInt | None = Field(
        None,
        description="number of layers (1); for gated-feedback and unicornn-layers, its inner "
        "layers (2)",
    )
    bidirectional: bool | None = Field(None, description="read sequences in both directions")
    residual: bool | None = Field(
        None,
        description=(
            "add the input of each layer to its output, from the second layer on; through a "
            "trained matrix where their widths differ"
        ),
    )
    dense: bool | None = Field(
        None,
        description=(
            "each layer reads the inputs and the outputs of all layers below, and the readout "
            "those of all layers"
        ),
    )
    dropout: UnitFloat | None = Field(
        None,
        description=(
            "share of entries dropped in training: of the inputs (not in a chain), between layers "
            "and before the readout (0)"
        ),
    )
    activation: str | None = Field(
        None,
        description=(
            "tanh, sigmoid, relu, identity or softplus, for cells that leave it open; in a chain "
            "(tanh) also gelu, silu or elu"
        ),
    )
    structure: str | None = Field(
        None,
        description=(
            "structure of W: antisymmetric, orthogonal, cayley, diagonal, low-rank or dale; some "
            "cells have a fixed one, which free gives up after the start"
        ),
    )
    x0: Literal["zero", "learned"] | None = Field(None, description="initial state; default zero")
    bias: bool = Field(True, description="use the biases b and b_o")
    readout: str | None = Field(
        None,
        description=(
            "mean, tilted, tilted-tanh or attention: one answer from all time steps of a sequence; "
            "last (default, but for your own data): from the last one"
        ),
    )
    attention_steps: PositiveInt | None = Field(
        None, description="attention: number of biases b_t (1)"
    )
    deep: PositiveInt | list[PositiveInt] | None = Field(
        None, description="widths of hidden layers in the readout: 32 or 64,32"
    )
    skip: bool | None = Field(None, description="add D u to the readout")
    persistence: bool | None = Field(
        None,
        description="with --skip: begin with V = 0 and a D that repeats what is predicted, the "
        "forecast that nothing changes; with --lags: with the linear regression on what is read",
    )
    decoder: str | None = Field(
        None, description="sequences: cell of the decoder; by default the encoder's last"
    )
    attend: bool | None = Field(
        None,
        description=("sequences: let the decoder attend to all time steps of the input (default)"),
    )
    embedding: PositiveInt | None = Field(
        None, description="sequences: size of a token's embedding; by default the number of units"
    )
    freeze: str | list[str] | None = Field(
        None, description="parameters that are not trained: W,R,b,V,b_o,x0, ..."
    )
    engine: str | None = Field(
        None,
        description="auto, cpu, eager, cuda, scan, reference or autograd (default auto)",
    )
    init: str | None = Field(
        None,
        description=(
            "initial weights: torch, gaussian, spectral, sparse, orthogonal, identity, glorot, he, "
            "sigmoid, basic-tanh, smart-tanh, keras or ring; spectral by default with --radius; of "
            "a chain orthogonal (default), gaussian or torch"
        ),
    )
    radius: PositiveFloat | None = Field(
        None,
        description=(
            "initial spectral radius of W (1); for orthogonal and identity its gain, for ring the "
            "largest |L|"
        ),
    )
    gain: PositiveFloat | None = Field(
        None, description="chains: factor of orthogonal and gaussian initial weights (1)"
    )
    inner: NonNegativeFloat | None = Field(None, description="ring: smallest initial |L| (0)")
    std: PositiveFloat | None = Field(
        None, description="initial standard deviation of R and V (0.1)"
    )
    std_in: NonNegativeFloat | None = Field(
        None, description="draw R, the weights of the inputs, with this standard deviation"
    )
    std_rec: NonNegativeFloat | None = Field(
        None,
        description="draw W with this standard deviation; of a cell whose equations define W, its "
        "free matrix M",
    )
    std_out: NonNegativeFloat | None = Field(
        None, description="draw V, the weights of the readout, with this standard deviation"
    )
    forget_bias: FiniteFloat | None = Field(
        None,
        description="lstm, peephole, minlstm: initial bias of the forget gate (--init keras: 1)",
    )
    eps: PositiveFloat | None = cell_option(
        "antisymmetric, lipschitz, unicornn: step size; cornn: damping"
    )
    gamma: NonNegativeFloat | None = cell_option(
        "antisymmetric, lipschitz: subtracted from the diagonal of W; cornn: stiffness"
    )
    dt: PositiveFloat | None = cell_option("cornn: step size")
    alpha: NonNegativeFloat | None = cell_option(
        "scrn: decay of the slow state; unicornn: stiffness"
    )
    beta: FiniteFloat | None = cell_option(
        "lipschitz: share of the skew part of W; with --readout tilted, its sharpness"
    )
    k: PositiveInt | None = cell_option("inverse: time steps with W^-1, followed by as many with W")
    noise: NonNegativeFloat | None = cell_option(
        "rate: standard deviation of the noise at each time step, in training; autoencoders: of "
        "the noise on the inputs (0)"
    )
    truncated: bool | None = cell_option("lstm-1997: use the paper's truncated gradient")
    unit: str | None = cell_option("gated-feedback: tanh, gru or lstm")
    depth: SmallInt | None = cell_option("deep-transition: layers between two states")
    width: PositiveInt | None = cell_option("deep-transition: units in these layers")
    shortcut: bool | None = cell_option("deep-transition: the last layer also sees the state")


class Shaped(Protocol):
    """A task or a network: whatever has inputs and outputs."""

    inputs: int
    outputs: int
    readout: str


# What recurrent networks have if nothing is said; a chain has none of these.
RECURRENT_DEFAULTS: dict[str, Any] = {"hidden": 64, "x0": "zero", "engine": "auto"}


class Shape(Section):
    """The inputs and outputs a task needs from a network."""

    inputs: PositiveInt
    outputs: PositiveInt
    readout: Literal["last", "every", "sequence"]
    output: str
    shape: list[PositiveInt] | None = None  # of a sample without time

    @classmethod
    def of(cls, shaped: Shaped) -> Shape:
        """The shape of a task or a network."""
        values: dict[str, Any] = {key: getattr(shaped, key, None) for key in cls.model_fields}
        if values["shape"] is not None:
            values["shape"] = list(values["shape"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The values by name; sequences have no "shape"."""
        return self.model_dump(exclude_none=True)
