"""Networks of runs that exist, and their predictions for new sequences.

net, description = load_model("runs/data-1")
count, notes = predict("runs/data-1", "new.csv", "predictions.csv")
"""

from __future__ import annotations

import csv
import io
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CoadjointError, ConfigError, DataError, StorageError, check_path, one_line
from ..networks.factory import cell_names
from ..tasks.data import Data
from ..tasks.description import PathLike
from ..tasks.prediction import Prediction
from . import model_schema, schemas, storage
from .files import read_regular, replacing
from .network_section import NetworkSection, Shape
from .restore import compare_tensors, load_weights


def load_model(
    run: PathLike, warn: Callable[[str], None] = warnings.warn
) -> tuple[Any, dict[str, Any]]:
    """The network of a run folder, or of its model.safetensors, and what the file says of itself.

    The file may be a stranger's: nothing in it is run, and no memory is taken before its header was
    compared with the network that it describes. `warn` hears of a model that carries no SHA-256 sum.
    The network is in evaluation mode.

    >>> net, description = load_model("runs/data-1")
    >>> net(u).y_hat
    """
    check_path("run", run)
    path = model_file(Path(run))
    storage.import_safetensors()
    header = schemas.read_header(path)
    description = model_schema.read_description(path, header)
    section = NetworkSection.model_validate(description["network"])
    shape = Shape.model_validate(description["shape"])
    precision = description["precision"]
    try:
        refuse_if_larger_than_file(section, shape, header)
        outline = model_schema.outline_network(section, shape, precision)
    except (CoadjointError, RuntimeError, MemoryError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise StorageError(
            f"{path}: the network it describes cannot be built: {words[:200]}."
        ) from None
    compare_tensors(outline, header.outline, str(path))
    if description.get("sha256") is None:
        warn(
            f"{path} carries no SHA-256 sum, as models before 0.6.1 do not: a flipped bit in it would not be noticed."
        )
    content = read_regular(path, header.file_bytes)
    if description.get("sha256") is not None and not storage.is_model_intact(
        io.BytesIO(content), description["sha256"]
    ):
        raise StorageError(
            f"{path} is damaged: its bytes do not have the SHA-256 sum that it carries. {model_schema.ModelDescription.advice}"
        )
    net = model_schema.build_network(section, shape, precision)
    load_weights(net, storage.unpack(content, path), str(path))
    return net.eval(), description


def model_file(run: Path) -> Path:
    """The model of a run folder; or the file that is named, behind a link if it is one."""
    if not run.exists():
        raise StorageError(f"{run} does not exist. Name a run folder, or a model.safetensors.")
    if not run.is_dir():
        return run.resolve()
    path = run / "model.safetensors"
    if not os.path.lexists(path):
        config = run / "config.yaml"
        raise StorageError(
            f"{run} has not finished: there is no model yet. Go on with: coadjoint resume {shlex.quote(str(run))}"
            if config.exists()
            else f"{run} is not a run folder: it holds no model.safetensors."
        )
    return path


def refuse_if_larger_than_file(section: NetworkSection, shape: Shape, header: Any) -> None:
    """Refuse a network of more parts or units than a file has tensors or numbers, unbuilt."""
    deep = section.deep if isinstance(section.deep, list) else [section.deep]
    sizes = (
        *(
            section.hidden,
            section.layers,
            section.depth,
            section.width,
            section.attention_steps,
            section.embedding,
        ),
        *(*deep, shape.inputs, shape.outputs),
    )
    parts = max(len(cell_names(section.cell or "elman")), len(deep) if section.deep else 0)
    if max(size or 1 for size in sizes) > header.element_count or parts > len(header.tensors):
        raise ConfigError("it is larger than the file")


def predict(
    run: PathLike,
    data: PathLike,
    out: PathLike,
    warn: Callable[[str], None] = warnings.warn,
    **reading: Any,
) -> tuple[int, tuple[str, ...]]:
    """Predictions of a run that was trained on files, for another file, written to `out` as CSV.

    reading: how the file is read, as in `Data.for_prediction`. Returns the number of sequences, and
    notes on how they were read."""
    net, description = load_model(run, warn)
    if description.get("data") is None:
        raise DataError(
            f"{run} was trained on task '{description.get('task')}', not on files: there is nothing to predict for a file."
        )
    new = Data.for_prediction(description["data"], data, **reading)

    def outputs() -> Iterator[Tensor]:
        with torch.no_grad():
            for _, batch in new.batches():
                yield net.run(net.move_batch(batch)).a

    write_predictions(new, out, outputs())
    return len(new), new.notes


def write_predictions(
    prediction: Prediction, path: PathLike, outputs: Iterable[Tensor | np.ndarray]
) -> None:
    """Predictions as CSV: the rows of `prediction.rows(outputs)`.

    The file appears whole or not at all; the input is never written over."""
    check_path("path", path)
    path = Path(path)
    if path.exists() and prediction.source.exists() and path.samefile(prediction.source):
        raise StorageError(
            f"{one_line(path, 400)} is the file the sequences were read from. Write the predictions elsewhere."
        )
    with replacing(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        csv.writer(text, lineterminator="\n").writerows(prediction.rows(outputs))
        text.flush()
        text.detach()
