"""Models of finished runs, and their predictions for new sequences.

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

import numpy as np
import torch
from torch import Tensor

from ..errors import CoadjointError, ConfigError, DataError, StorageError, check_path, one_line
from ..networks.factory import cell_names
from ..networks.interface import Net
from ..tasks.data import Data
from ..tasks.description import PathLike
from ..tasks.prediction import Prediction
from . import model_schema, schemas, storage
from .files import read_regular, replacing
from .json_types import JsonObject
from .network_section import NetworkSection, Shape
from .restore import compare_tensors, load_weights
from .tensor_header import Header


def load_model(
    run: PathLike, warn: Callable[[str], None] = warnings.warn
) -> tuple[Net, JsonObject]:
    """The network of a run folder, or of a model.safetensors, and the description in that file.

        net, description = load_model("runs/data-1")
        net(u).y_hat

    The file may come from a stranger: nothing in it is executed, and no memory is allocated before
    its header was compared with the network that it describes. `warn` is called with a message if
    the file has no SHA-256 checksum. The network is in evaluation mode.
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
        reason = " ".join(str(error).split()).rstrip(".")  # on one line
        raise StorageError(
            f"{path}: the network it describes cannot be built: {reason[:200]}."
        ) from None
    compare_tensors(outline, header.outline, str(path))
    stated = description.get("sha256")
    if stated is None:
        warn(
            f"{path} has no SHA-256 checksum, because it was written before 0.6.1: a flipped bit "
            "in it would go unnoticed."
        )
    content = read_regular(path, header.file_bytes)
    if stated is not None and not storage.is_model_intact(io.BytesIO(content), stated):
        raise StorageError(
            f"{path} is damaged: its content does not match its SHA-256 checksum. "
            f"{model_schema.ModelDescription.advice}"
        )
    net = model_schema.build_network(section, shape, precision)
    load_weights(net, storage.unpack(content, path), str(path))
    return net.eval(), description


def model_file(run: Path) -> Path:
    """The model file of a run folder; of a link to a file, its target."""
    if not run.exists():
        raise StorageError(f"{run} does not exist. Name a run folder, or a model.safetensors.")
    if not run.is_dir():
        return run.resolve()
    path = run / "model.safetensors"
    if os.path.lexists(path):
        return path
    if (run / "config.yaml").exists():
        raise StorageError(
            f"{run} has not finished: there is no model yet. "
            f"Resume with: coadjoint resume {shlex.quote(str(run))}"
        )
    refuse_if_comparison(run)
    raise StorageError(f"{run} is not a run folder: it holds no model.safetensors.")


def refuse_if_comparison(folder: Path) -> None:
    """Refuse a folder that holds a comparison, naming one of its runs to use in its place."""
    if not os.path.lexists(folder / "compare.json"):
        return
    comparison = schemas.read(folder / "compare.json", schemas.ComparisonSchema)
    count = sum(len(row["runs"]) for row in comparison["rows"])
    runs = sorted(path.parent for path in folder.glob("runs/*/config.yaml"))
    example = f", such as {one_line(runs[0], 400)}" if runs else ""
    plural = "" if count == 1 else "s"
    raise StorageError(
        f"{folder} is a comparison of {count} run{plural}. Name one of its runs{example}."
    )


def refuse_if_larger_than_file(section: NetworkSection, shape: Shape, header: Header) -> None:
    """Refuse a network with more units than the file has numbers, or more parts than tensors.

    Each unit has at least one number and each part at least one tensor in the file. So a file
    that claims a huge network is refused before any of it is built.
    """
    widths = section.deep if isinstance(section.deep, list) else [section.deep]
    sizes = [
        section.hidden,
        section.layers,
        section.depth,
        section.width,
        section.attention_steps,
        section.embedding,
        shape.inputs,
        shape.outputs,
        *widths,
    ]
    parts = len(cell_names(section.cell or "elman"))  # the layers of a stack
    if section.deep:
        parts = max(parts, len(widths))
    largest = max(size or 1 for size in sizes)  # a size of None is a default
    if largest > header.element_count or parts > len(header.tensors):
        raise ConfigError("it is larger than the file")


def predict(
    run: PathLike,
    data: PathLike,
    out: PathLike,
    warn: Callable[[str], None] = warnings.warn,
    **reading: object,
) -> tuple[int, tuple[str, ...]]:
    """Write predictions for the file `data` to the file `out`, as CSV.

    run: a run that was trained on files, or its model.safetensors. warn: as in `load_model`.
    reading: how the file is read, as in `Data.for_prediction`. Returns the number of sequences, and
    notes on how they were read.
    """
    net, description = load_model(run, warn)
    if description.get("data") is None:
        raise DataError(
            f"{run} was trained on task '{description.get('task')}', not on files, so it cannot "
            "predict from a file."
        )
    prediction = Data.for_prediction(description["data"], data, **reading)

    def outputs() -> Iterator[Tensor]:
        """The pre-outputs a of one batch after another, so that a long file fits in memory."""
        with torch.no_grad():
            for _, batch in prediction.batches():
                yield net.run(net.move_batch(batch)).a

    write_predictions(prediction, out, outputs())
    return len(prediction), prediction.notes


def write_predictions(
    prediction: Prediction, path: PathLike, outputs: Iterable[Tensor | np.ndarray]
) -> None:
    """Write the rows of `prediction.rows(outputs)` as CSV. outputs: a of each batch, in order.

    The file appears complete or not at all; the file the sequences come from is never overwritten.
    """
    check_path("path", path)
    path = Path(path)
    if path.exists() and prediction.source.exists() and path.samefile(prediction.source):
        raise StorageError(
            f"{one_line(path, 400)} is the file the sequences were read from. "
            "Write the predictions to another file."
        )
    with replacing(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        csv.writer(text, lineterminator="\n").writerows(prediction.rows(outputs))
        text.flush()
        text.detach()  # `replacing` closes the file itself
