"""Models of finished runs, and their predictions for new sequences.

net, description = load_model("runs/data-1")
count, notes = predict("runs/data-1", "new.csv", "predictions.csv")
"""

from __future__ import annotations

import functools
import io
import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CoadjointError, ConfigError, DataError, StorageError, check_path, one_line
from ..networks.cell_choice import cell_names
from ..networks.chain_text import WEIGHTED, parse_chain
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..tasks.description import ColumnNames, Option, PathLike
from ..tasks.memory import source_of
from ..tasks.new_data import read_new
from ..tasks.prediction import Prediction
from . import model_schema, schemas, storage
from .files import read_regular
from .json_types import JsonObject
from .network_section import NetworkSection, Shape
from .prediction_files import check_output_name, write_predictions
from .restore import compare_tensors, load_weights, select_part
from .tensor_header import Header, read_metadata

__all__ = ["load_best", "load_model", "predict", "predict_file", "write_predictions"]

TABLES = (".csv", ".tsv", ".parquet", ".npz", ".npy")  # that may be named in place of a run
STEPS_AT_ONCE = 1 << 14  # of one long sequence


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
    return load_file(model_file(Path(run)), warn)


def load_file(
    path: Path, warn: Callable[[str], None], network: Net | None = None
) -> tuple[Net, JsonObject]:
    """The network of a model file, built from its description or given, and the description."""
    storage.import_safetensors()
    header = schemas.read_header(path)
    build, description = open_network(path, header, network)
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
    net = build()
    load_weights(net, storage.unpack(content, path), str(path))
    return net.eval(), description


def open_network(
    path: Path, header: Header, network: Net | None
) -> tuple[Callable[[], Net], JsonObject]:
    """(what returns the network for the weights of a model file, the description in the file).

    network: one that was built elsewhere; None builds the one that the file describes. A header
    with other tensors than those of the network is refused.
    """
    if network is None:
        description = model_schema.read_description(path, header)
        return prepare_network(path, header, description), description
    compare_tensors(network.state_dict(), header.outline, str(path))
    given = network

    def build() -> Net:
        return given

    return build, read_metadata(path, header)


def prepare_network(path: Path, header: Header, description: JsonObject) -> Callable[[], Net]:
    """What builds the network that a model file describes, once its header has been compared.

    Nothing of the network's size is allocated before. A header with other tensors is refused.
    """
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
    return functools.partial(model_schema.build_network, section, shape, precision)


def load_best(
    run: PathLike, warn: Callable[[str], None] = warnings.warn, network: Net | None = None
) -> tuple[Net, JsonObject]:
    """Do what `load_model` does; of a run that has not finished, load its best weights so far.

    `warn` is told which those are. They are in its latest checkpoint that is intact. network: one
    to load the weights into, for a run that was trained from Python and does not describe it.
    """
    check_path("run", run)
    checkpoints = find_weights(Path(run))
    if isinstance(checkpoints, Path):
        return load_file(checkpoints, warn, network)
    storage.import_safetensors()
    faults = []
    for path in reversed(checkpoints):
        try:
            saved = storage.load(path)
            break
        except StorageError as error:
            faults.append(str(error))
    else:
        raise StorageError(f"{faults[0]} {run} has no other checkpoint that is intact.")
    model = path / "model.safetensors"
    header = schemas.read_header(model)
    build, description = open_network(model, header, network)
    net = build()
    best, weights = best_weights(saved)
    load_weights(net, weights, str(path))
    which = f"its best weights so far, those of step {best:,}"
    if best is None:
        which = f"the weights of its latest checkpoint, at step {saved.step:,}"
    warn(
        f"{run} has not finished: it is used with {which}. Finish it with: coadjoint resume "
        f"{shlex.quote(str(run))}"
    )
    return net.eval(), description


def find_weights(run: Path) -> Path | list[Path]:
    """The model file of a run; of one that has not finished, its checkpoints, the oldest first."""
    has_model = not run.is_dir() or os.path.lexists(run / "model.safetensors")
    checkpoints = [] if has_model else storage.list_checkpoints(run)
    return checkpoints or model_file(run)


def best_weights(saved: storage.Checkpoint) -> tuple[int | None, dict[str, Tensor]]:
    """(the step of the best weights, the weights) in a checkpoint; the last if none were chosen."""
    progress = saved.state.get("progress")
    best = progress.get("best_step") if isinstance(progress, dict) else None
    if best is None or best == saved.step:
        return best, saved.model
    weights = select_part("best", saved.tensors)
    return (best, weights) if weights else (None, saved.model)


def model_file(run: Path) -> Path:
    """The model file of a run folder; of a link to a file, its target."""
    if not run.exists():
        raise StorageError(f"{run} does not exist. Name a run folder, or a model.safetensors.")
    if not run.is_dir():
        if run.suffix.lower() in TABLES:
            raise StorageError(
                f"{run} is a table, not a run. First name a run folder, or a model.safetensors."
            )
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
    if section.chain is not None or section.autoencoder is not None:
        refuse_if_chain_is_larger(section, shape, header)
        return
    widths = section.deep if isinstance(section.deep, list) else [section.deep]
    units = section.hidden if isinstance(section.hidden, list) else [section.hidden]
    sizes = [
        *units,
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
    parts = max(parts, len(units))
    largest = max(size or 1 for size in sizes)  # a size of None is a default
    if largest > header.element_count or parts > len(header.tensors):
        raise ConfigError("it is larger than the file")


def refuse_if_chain_is_larger(section: NetworkSection, shape: Shape, header: Header) -> None:
    """Refuse a chain with more units than the file has numbers, or more weights than tensors."""
    if section.chain is not None:
        layers = parse_chain(section.chain)
        sizes = [layer.size for layer in layers if layer.kind in WEIGHTED]
    else:
        widths = section.autoencoder
        sizes = list(widths) if isinstance(widths, list) else [widths or 1]
    largest = max([*sizes, shape.outputs])  # inputs may be pooled before a weight reads them
    if largest > header.element_count or len(sizes) > len(header.tensors):
        raise ConfigError("it is larger than the file")


def predict(
    run: PathLike,
    data: PathLike,
    out: PathLike,
    warn: Callable[[str], None] = warnings.warn,
    *,
    keep: ColumnNames | bool = None,
    whole: bool = False,
    **reading: Option,
) -> tuple[int, tuple[str, ...]]:
    """Write predictions for the file `data` to the file `out`, in the format that its name says.

    run: a run that was trained on files, or its model.safetensors. out: .csv, .tsv (also .gz),
    .parquet, .feather, .arrow, .json or .jsonl; "-" for CSV on standard output. warn: as in
    `load_model`. keep, whole, reading: which columns are copied, and how the file is read, as in
    `Data.for_prediction`. Returns the number of sequences (of windows, if each has a prediction),
    or of samples without time, and notes on how they were read.
    """
    prediction = predict_file(run, data, out, warn, keep=keep, whole=whole, **reading)
    return len(prediction), prediction.notes


def predict_file(
    run: PathLike,
    data: PathLike,
    out: PathLike,
    warn: Callable[[str], None] = warnings.warn,
    *,
    keep: ColumnNames | bool = None,
    whole: bool = False,
    **reading: Option,
) -> Prediction:
    """Do what `predict` does, and return the sequences or samples of the file `data`."""
    check_path("out", out)
    check_output_name(out)
    net, description = load_best(run, warn)
    if description.get("data") is None:
        raise DataError(
            f"{run} was trained on task '{description.get('task')}', not on files, so it cannot "
            "predict from a file."
        )
    source = source_of(data, "data")
    prediction = read_new(
        description["data"], source, keep=keep, whole=whole, in_parts=True, **reading
    )
    prediction = with_note_on_windows(net, prediction)
    write_predictions(prediction, out, compute_outputs(net, prediction))
    return prediction


def with_note_on_windows(net: Net, prediction: Prediction) -> Prediction:
    """The prediction, with a note if the network reads at once what was cut in training."""
    window = prediction.description.window
    longest = max(prediction.cut.sheet.lengths)
    is_cut = window is not None and prediction.description.at == "last"
    if window is None or window >= longest or is_cut or net.carries_state:
        return prediction
    return prediction.with_note(
        "this network has no state to carry from row to row: it reads each sequence at once, "
        f"not in the windows of {window} rows of training"
    )


def compute_outputs(net: Net, prediction: Prediction) -> Iterator[Tensor]:
    """The pre-outputs a of one batch after another, so that a long file fits in memory."""
    with torch.no_grad():
        for _, batch in prediction.batches():
            yield run_in_parts(net, net.move_batch(batch))
            del batch  # before the next one is made


def run_in_parts(net: Net, batch: Batch, steps: int = STEPS_AT_ONCE) -> Tensor:
    """The pre-outputs a of a batch, [B, outputs] or [T, B, outputs].

    A single long sequence runs in parts of `steps` time steps, each from the last state of the one
    before, so that its states need not all be in memory. Networks that do not carry their state
    read it at once.
    """
    u = batch.u
    is_long = batch.axis != 0 and u.shape[1] == 1 and len(u) > steps
    if not is_long or not net.carries_state:
        return net.run(batch).a
    parts = []
    state = batch.x0
    for begin in range(0, len(u), steps):
        run = net.run(Batch(u[begin : begin + steps], x0=state))
        state = run.state  # type: ignore[attr-defined]  # networks that carry it show it
        parts.append(run.a)
    return torch.cat(parts) if net.readout == "every" else parts[-1]
