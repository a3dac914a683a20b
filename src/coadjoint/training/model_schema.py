"""The description in a model file: enough to build its network and to read data for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field, model_validator
from torch import Tensor

from ..errors import OptionError, StorageError, choose
from ..networks.chain_factory import is_chain
from ..networks.factory import construct_network
from ..networks.interface import Net
from ..networks.readout import SUMMARIES
from ..tasks.description import Description
from .json_types import JsonObject
from .network_section import NetworkSection, Shape
from .schema_checks import Count, Labels, check
from .schemas import check_data
from .tensor_header import Header, ModelMetadata, read_metadata

# How weights are initialised does not matter to a network whose weights are loaded.
INITIALISATION_KEYS = (
    "init", "radius", "inner", "std", "std_in", "std_rec", "std_out", "forget_bias", "gain",
    "persistence",
)  # fmt: skip


class ModelDescription(ModelMetadata):
    """The description of a model whose network can be built again."""

    model_config = ConfigDict(extra="forbid")
    network: NetworkSection
    shape: Shape
    precision: Literal[32, 64]
    data: Annotated[JsonObject | None, AfterValidator(check_data)] = None
    task: str | None = None
    settings: JsonObject = Field(default_factory=dict)
    classes: Labels | None = None
    window: Count | None = None

    @model_validator(mode="after")
    def data_fit_the_network(self) -> ModelDescription:
        """Refuse data whose columns and kind need another network."""
        if self.data is None:
            return self
        data = Description.of(self.data)
        needed: dict[str, object] = {
            "inputs": data.inputs,
            "outputs": data.outputs,
            "readout": data.at,
            "output": "softmax" if data.kind == "classify" else "identity",
        }
        if data.input_shape is not None:
            needed["shape"] = list(data.input_shape)
        for key, value in needed.items():
            actual = getattr(self.shape, key)
            if actual != value:
                raise ValueError(f"its data needs {key} {value!r}, but its network has {actual!r}")
        return self


def read_description(path: Path, header: Header) -> JsonObject:
    """The description in the header of a model file, checked."""
    description = read_metadata(path, header)
    if not {"network", "shape", "precision"} & set(description):
        raise StorageError(
            f"{path} does not say which network it belongs to: it was trained from Python. "
            "Build the network as then, and pass it: co.load(RUN, network=net); or load its "
            "tensors with safetensors."
        )
    return check(f"{path}: its description", description, ModelDescription)


def network_options(section: NetworkSection, shape: Shape, precision: int) -> JsonObject:
    """The keyword arguments of `networks.make` for a network of this section and shape.

    precision: 32 or 64 bits. Options that are None are left out: they have the defaults of `make`.
    """
    options = {key: value for key, value in section if value is not None}
    if is_chain(options):
        options.pop("noise", None)  # of the inputs: the task's
    # shape.readout says which steps the task wants answers at; an option `readout` says how one
    # answer is made from all time steps, and takes its place.
    if "readout" in options:
        choose("readout", options["readout"], ("last", *SUMMARIES))
        if shape.readout != "last":
            needed = "a sequence of answers" if shape.readout == "sequence" else "one at every step"
            raise OptionError(
                f"$readout {options['readout']} makes one answer for a sequence, but this task "
                f"needs {needed}."
            )
    dtype = torch.float64 if precision == 64 else torch.float32
    return {**shape.to_dict(), **options, "dtype": dtype}


def build_network(section: NetworkSection, shape: Shape, precision: int) -> Net:
    """A network of this section and shape, whose weights are still to be loaded."""
    options = network_options(section, shape, precision)
    for key in INITIALISATION_KEYS:
        options.pop(key, None)
    return construct_network(**options)


def outline_network(section: NetworkSection, shape: Shape, precision: int) -> dict[str, Tensor]:
    """The tensors of a network of this section and shape, by name, on the meta device.

    They have types and shapes but take no memory.
    """
    with torch.device("meta"):
        return dict(build_network(section, shape, precision).state_dict())
