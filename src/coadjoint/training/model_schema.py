"""What a model file says of itself: enough to build its network again, and to read data for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ..errors import OptionError, StorageError, choose
from ..networks.factory import construct
from ..networks.readout import SUMMARIES
from ..tasks.description import Description
from .network_section import NetworkSection, Shape
from .schemas import Count, Header, Labels, ModelMetadata, check, check_data, read_metadata


class ModelDescription(ModelMetadata):
    """What it says if its network can be built from it."""

    model_config = ConfigDict(extra="forbid")
    network: NetworkSection
    shape: Shape
    precision: Literal[32, 64]
    data: Annotated[dict[str, Any] | None, AfterValidator(check_data)] = None
    task: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    classes: Labels | None = None
    window: Count | None = None

    @model_validator(mode="after")
    def data_fit_the_network(self) -> ModelDescription:
        if self.data is None:
            return self
        d = Description.of(self.data)
        inputs = len(d.features) + len(d.masked)
        outputs = len(d.labels) if d.kind == "classify" else len(d.target_std)
        output = "softmax" if d.kind == "classify" else "identity"
        asked = {"inputs": inputs, "outputs": outputs, "readout": d.at, "output": output}
        for key, value in asked.items():
            if getattr(self.shape, key) != value:
                raise ValueError(
                    f"its data ask for {key} {value!r}, and its network has {getattr(self.shape, key)!r}"
                )
        return self


def read_description(path: Path, header: Header) -> dict[str, Any]:
    """What a model file says of itself, checked."""
    description = read_metadata(path, header)
    if not {"network", "shape", "precision"} & set(description):
        raise StorageError(
            f"{path} does not say what network it belongs to: it was trained from Python. Load its tensors with safetensors."
        )
    return check(f"{path}: its description", description, ModelDescription)


# where the weights began: no part of a network whose weights are there
INITIALISATION_KEYS = ("init", "radius", "inner", "std")


def network_options(section: NetworkSection, shape: Shape, precision: int) -> dict[str, Any]:
    """The keywords of `networks.make` for a network of this section and shape."""
    options = {key: value for key, value in section if value is not None}
    if "readout" in options:
        choose("readout", options["readout"], SUMMARIES)
        if shape.readout != "last":
            asked = (
                "a sequence is asked for"
                if shape.readout == "sequence"
                else "one is asked for at every step"
            )
            raise OptionError(
                f"$readout {options['readout']} gives one answer for a sequence, and here {asked}."
            )
    dtype = torch.float64 if precision == 64 else torch.float32
    return {**shape.model_dump(), **options, "dtype": dtype}


def build_network(section: NetworkSection, shape: Shape, precision: int) -> Any:
    """The network of a section and shape; its weights are not yet set."""
    options = network_options(section, shape, precision)
    return construct(
        **{key: value for key, value in options.items() if key not in INITIALISATION_KEYS}
    )


def outline_network(section: NetworkSection, shape: Shape, precision: int) -> dict[str, Any]:
    """The tensors of such a network by name: types and shapes without any memory behind them."""
    with torch.device("meta"):
        return dict(build_network(section, shape, precision).state_dict())
