"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import io
import os
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CoadjointError, ConfigError, DataError, StorageError
from .build_network import Shape, construct, names_of
from .flags import resolve
from .schema import Config, NetworkSection


# runs that exist
def read(folder: Path) -> Config:
    """The config a run was started with."""
    from ..training import files, settings

    path = folder / "config.yaml"
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a run folder{' (no such folder)' if not folder.exists() else ''}.")
    if not os.path.lexists(path):
        raise StorageError(f"{folder} holds no config.yaml: it is not a run made by `coadjoint train`.")
    return resolve(settings.load(path, files.read_regular(path, settings.BYTES)))


def outlined(n: NetworkSection, shape: Shape, precision: int) -> dict[str, Any]:
    """The tensors of the network of a section, by name: types and shapes without any memory behind them."""
    import torch

    with torch.device("meta"):
        return dict(construct(n, shape, precision).state_dict())


def within(n: NetworkSection, shape: Shape, header: Any) -> None:
    """Refuse a network of more parts or units than a file of tensors has tensors or numbers: it need not be laid out."""
    deep = n.deep if isinstance(n.deep, list) else [n.deep]
    sizes = (n.hidden, n.layers, n.depth, n.width, n.attention_steps, n.embedding, *deep, shape.inputs, shape.outputs)
    parts = max(len(names_of(n)), len(deep) if n.deep else 0)
    if max(size or 1 for size in sizes) > header.numbers or parts > len(header.tensors):
        raise ConfigError("it is larger than the file")


def load_model(path: Path, warn: Callable[[str], None] = warnings.warn) -> tuple[Any, dict[str, Any]]:
    """The network of a model.safetensors file, and its description. The file is a stranger's: nothing in it is run, and no
    memory is taken before its header was compared with the network that it describes. `warn` hears of a model that carries
    no SHA-256 sum."""
    from ..training import files, schemas, storage
    from ..training.restore import compare_tensors, fit
    from . import model_schema

    storage.safetensors()
    path = Path(path)
    header = schemas.read_header(path)
    description = model_schema.described(path, header)
    n = NetworkSection.model_validate(description["network"])
    shape = Shape.model_validate(description["shape"])
    try:
        within(n, shape, header)
        outline = outlined(n, shape, description["precision"])
    except (CoadjointError, RuntimeError, MemoryError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise StorageError(f"{path}: the network it describes cannot be built: {words[:200]}.") from None
    compare_tensors(outline, header.outline, str(path))
    if description.get("sha256") is None:
        warn(f"{path} carries no SHA-256 sum, as models before 0.6.1 do not: a flipped bit in it would not be noticed.")
    content = files.read_regular(path, header.size)
    if description.get("sha256") is not None and not storage.unbroken(io.BytesIO(content), description["sha256"]):
        raise StorageError(
            f"{path} is damaged: its bytes do not have the SHA-256 sum that it carries. {model_schema.Model.advice}"
        )
    net = construct(n, shape, description["precision"])
    fit(net, storage.unpack(content, path), str(path))
    return net.eval(), description


def predict(
    run: Path, data: Path, out: Path, warn: Callable[[str], None] = warnings.warn, **reading: Any
) -> tuple[int, tuple[str, ...]]:
    """Predictions of a trained run for the sequences of a file; how many, and what there is to say of them."""
    import torch

    from ..tasks.data import Data
    from ..training.predict import write_predictions

    path = run / "model.safetensors" if run.is_dir() else run.resolve()  # a link that was named is followed
    if not run.exists():
        raise StorageError(f"{run} does not exist. Name a run folder, or a model.safetensors.")
    if not os.path.lexists(path):
        config = run / "config.yaml"
        raise StorageError(
            f"{run} has not finished: there is no model yet. Go on with: coadjoint resume {shlex.quote(str(run))}"
            if config.exists()
            else f"{run} is not a run folder: it holds no model.safetensors."
        )
    net, description = load_model(path, warn)
    if description.get("data") is None:
        raise DataError(
            f"{run} was trained on task '{description.get('task')}', not on files: there is nothing to predict for a file."
        )
    new = Data.for_prediction(description["data"], data, **reading)

    def outputs() -> Any:
        with torch.no_grad():
            for _, b in new.batches():
                yield net.run(net.moved(b)).a

    write_predictions(new, out, outputs())
    return len(new), new.notes
