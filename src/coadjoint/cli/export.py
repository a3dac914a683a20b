"""`coadjoint export`: the network of a run as a file that other programs run."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from ..errors import ConfigError
from .outputs import FORCE, check_inputs, check_outputs
from .program import app, print_escaped, warn, with_examples

NAME = "network"  # of the files, if none was given


@app.command()
@with_examples(
    "coadjoint export runs/waves --to onnx --out waves.onnx",
    "coadjoint export runs/waves --to torch --out waves.py",
)
def export(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    to: Optional[str] = typer.Option(
        None,
        "--to",
        metavar="FORMAT",
        help="onnx: one file for onnxruntime and others; torch: a .py and a .safetensors file that "
        "need torch alone (required)",
    ),
    out: Optional[Path] = typer.Option(
        None,
        "--out",
        "-o",
        help=f"the file to write (default: {NAME}.onnx, or {NAME}.py and {NAME}.safetensors)",
    ),
    force: bool = FORCE,
) -> None:
    """Write the network of a run for other programs, with its scaling and its labels.

    What is written reads columns in the units of your data. It is run, and compared with the
    network itself.
    """
    from ..models.export import export as write
    from ..models.export import files_of

    if to is None:
        raise ConfigError("Missing option '--to' (onnx or torch).")
    if out is None:
        out = Path(f"{NAME}.onnx" if to == "onnx" else f"{NAME}.py")
    check_inputs(run)
    for path in files_of(out, to):
        check_outputs({"--out": path}, force)
    exported = write(run, out, to, warn)
    for note in exported.notes:
        print_escaped(note)
    for check in exported.checks:
        steps = f" of {check.steps} steps" if check.steps else ""
        print_escaped(
            f"compared on {check.samples} samples{steps}: largest difference "
            f"{check.difference:.1e} of the largest output"
        )
    print_escaped(" ".join(map(str, exported.files)))
