"""Schemas: what each file of a run folder must hold, and the one door through which these files are read.

A run folder may come from a stranger, or from a disk that has lost a bit. Nothing is taken from its files before they were
looked at here: by their kind and size before they are read, by name, type and range afterwards. What does not hold is one
line that names the file and the key. Keys that a file has beyond these are left alone: a later version may have written them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ..errors import StorageError
from ..tasks.description import Description
from ..training.schemas import Count, Header, Labels, Sealed, check, description_of, of_data
from .build_network import Shape
from .schema import NetworkSection


class Model(Sealed):
    """What it says if its network can be built from it."""

    model_config = ConfigDict(extra="forbid")
    network: NetworkSection
    shape: Shape
    precision: Literal[32, 64]
    data: Annotated[dict[str, Any] | None, AfterValidator(of_data)] = None
    task: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    classes: Labels | None = None
    window: Count | None = None

    @model_validator(mode="after")
    def data_fit_the_network(self) -> Model:
        if self.data is None:
            return self
        d = Description.of(self.data)
        inputs = len(d.features) + len(d.masked)
        outputs = len(d.labels) if d.kind == "classify" else len(d.target_std)
        output = "softmax" if d.kind == "classify" else "identity"
        asked = {"inputs": inputs, "outputs": outputs, "readout": d.at, "output": output}
        for key, value in asked.items():
            if getattr(self.shape, key) != value:
                raise ValueError(f"its data ask for {key} {value!r}, and its network has {getattr(self.shape, key)!r}")
        return self


def described(path: Path, header: Header) -> dict[str, Any]:
    """What a model file says of itself, checked."""
    description = description_of(path, header)
    if not {"network", "shape", "precision"} & set(description):
        raise StorageError(
            f"{path} does not say what network it belongs to: it was trained from Python. Load its tensors with safetensors."
        )
    return check(f"{path}: its description", description, Model)
