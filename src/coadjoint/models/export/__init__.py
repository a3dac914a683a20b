"""Networks as files that other programs run: ONNX, or Python that needs torch alone.

onnx           the graph of a network, its inputs and outputs
onnx_writer    operations as nodes of that graph
torch_code     a network as a Python file and a file of tensors
torch_writer, torch_lines, torch_template    operations as lines of Python, and the rest of the file
recurrent, formulas    recurrent networks as operations; one step of a cell
chains         chains of maps as operations
units          from the user's columns to inputs, and from outputs to the user's units
writer         the operations themselves, whatever the format
check          exported networks compared with ours
kinds          what is refused
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ... import __version__
from ...errors import InputError, NumericalError, check_path, choose
from ...networks.interface import Net
from ...tasks.description import Description, PathLike
from ...training import files, storage
from ...training.predict import load_best
from ...training.prediction_files import refuse_source
from .check import ExportCheck, compare
from .onnx import describe_columns, onnx_bytes
from .torch_code import torch_code

__all__ = [
    "FORMATS",
    "ExportCheck",
    "Exported",
    "export",
    "export_network",
    "files_of",
    "refuse_model",
]

FORMATS = ("onnx", "torch")
TOLERANCE = {"onnx": 1e-5, "torch": 1e-6}  # relative
PLAINLY_WRONG = 1e-2  # beyond what rounding makes of a network, also of a chaotic one


@dataclass(frozen=True)
class Exported:
    """What `export` has written.

    files   the files
    checks  comparisons with the network itself; none if nothing could run the file
    notes   what the user should know
    """

    files: tuple[Path, ...]
    checks: tuple[ExportCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """The largest relative difference found; None without a comparison."""
        return max((check.difference for check in self.checks), default=None)


def export(
    run: PathLike,
    path: PathLike,
    to: str = "onnx",
    warn: Callable[[str], None] = warnings.warn,
) -> Exported:
    """Write the network of a run folder, or of a model.safetensors, for other programs.

    path: the file; with to="torch" two files, path.py and path.safetensors. to: "onnx" or
    "torch". warn: as in `co.load`. What is written is run, if it can be, and compared with the
    network itself. Refused: networks whose answers are sequences, and to write over the model.
    """
    check_path("run", run)
    refuse_model(run, files_of(path, to))
    net, description = load_best(run, warn)
    given = description.get("data")
    data = None if given is None else Description.of(given)
    return export_network(net, data, path, to)


def refuse_model(run: PathLike, written: tuple[Path, ...]) -> None:
    """Refuse to write over the model of a run folder, or over the model.safetensors given."""
    place = Path(run)
    model = place / "model.safetensors" if place.is_dir() else place
    for file in written:
        refuse_source(file, model, "the network was", "what is exported")


def files_of(path: PathLike, to: str) -> tuple[Path, ...]:
    """The files that an export writes: of "torch" PATH.py and PATH.safetensors."""
    check_path("path", path)
    path = Path(path)
    if choose("format", to, FORMATS) == "onnx":
        return (path,)
    if not path.name:
        raise InputError(f"{path} is a folder: name a file, such as {path / 'network.py'}.")
    base = path.with_suffix("") if path.suffix in (".py", ".safetensors") else path
    return (base.with_name(base.name + ".py"), base.with_name(base.name + ".safetensors"))


def export_network(
    net: Net, data: Description | None, path: PathLike, to: str = "onnx"
) -> Exported:
    """Write a network in evaluation mode; arguments as in `export`.

    data: what it knows about its data; None: it reads and returns numbers as they are.
    """
    check_path("path", path)
    choose("format", to, FORMATS)
    write = write_onnx if to == "onnx" else write_torch
    exported = write(net, data, Path(path))
    difference = exported.difference
    if difference is not None and difference > TOLERANCE[to]:
        note = (
            f"outputs differ by {difference:.1e} of the largest, more than {TOLERANCE[to]:.0e}: "
            "this network amplifies rounding errors."
        )
        return Exported(exported.files, exported.checks, (*exported.notes, note))
    return exported


def write_onnx(net: Net, data: Description | None, path: Path) -> Exported:
    """Write an ONNX file, and run it if onnxruntime is installed."""
    content = onnx_bytes(net, data, describe_columns(net, data))
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError:
        files.replace(path, content)
        note = "onnxruntime is not installed: the file was not run. pip install onnxruntime"
        return Exported((path,), (), (note,))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = session.get_outputs()[-1].name

    def answer(x: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
        given = {"x": x.astype(np.float64 if data is not None else np.float32)}
        if lengths is not None:
            given["lengths"] = lengths.astype(np.int64)
        return np.asarray(session.run([name], given)[0], dtype=np.float64)

    checks = compare(net, data, answer)
    refuse_if_wrong(checks, "onnxruntime")
    files.replace(path, content)
    return Exported((path,), tuple(checks))


def write_torch(net: Net, data: Description | None, path: Path) -> Exported:
    """Write a Python file and its tensors, and run it."""
    paths = files_of(path, "torch")
    code, tensors = torch_code(net, data, __version__)
    content = storage.pack(tensors)
    network = load_written(code, content)

    def answer(x: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
        # numbers, also of a classification: as it is without labels
        run = getattr(network, "predict_proba", None) or network.predict
        arguments = (x,) if lengths is None else (x, lengths)
        assert callable(run)
        answers: torch.Tensor = run(*arguments)
        return answers.numpy()

    checks = compare(net, data, answer)
    refuse_if_wrong(checks, "torch")
    files.replace(paths[0], code)
    files.replace(paths[1], content)
    return Exported(paths, tuple(checks))


def load_written(code: str, content: bytes) -> nn.Module:
    """The network of generated code, from files in a folder that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exported.py"
        path.write_text(code, encoding="ascii")
        path.with_suffix(".safetensors").write_bytes(content)
        spec = importlib.util.spec_from_file_location("exported", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        network: nn.Module = module.load()
    return network


def refuse_if_wrong(checks: list[ExportCheck], program: str) -> None:
    """Refuse to write a file whose outputs are plainly not those of the network."""
    worst = max(check.difference for check in checks)
    if worst > PLAINLY_WRONG:
        raise NumericalError(
            f"the exported network, run by {program}, differs by {worst:.1e} of the largest "
            "output, so it was not written. Please report this."
        )
