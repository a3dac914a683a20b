"""`coadjoint export`: the network of a run as a file that other programs run."""

from __future__ import annotations

from pathlib import Path

import typer

from .outputs import FORCE, check_outputs
from .program import app, print_escaped, warn, with_examples


@app.command()
@with_examples(
    "coadjoint export runs/waves --to onnx --out waves.onnx",
    "coadjoint export runs/waves --to torch --out waves.py",
)
def export(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    to: str = typer.Option(
        ...,
        "--to",
        metavar="FORMAT",
        help="onnx: one file for onnxruntime and others; torch: a .py and a .safetensors file that "
        "need torch alone",
    ),
    out: Path = typer.Option(..., "--out", "-o", help="the file to write"),
    force: bool = FORCE,
) -> None:
    """Write the network of a run for other programs, with its scaling and its labels.

    What is written reads columns in the units of your data. It is run, and compared with the
    network itself.
    """
    from ..models.export import export as write
    from ..models.export import files_of

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
