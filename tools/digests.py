"""Digests of gradients and of one training run, to prove that a change of the code changed no bit.

    python tools/digests.py                     a line per case: name and SHA-256
    python tools/digests.py --write FILE.json   the cases as numbers, which `make test` compares

Bits differ between processors and compilers: compare two runs on one machine. The numbers written
to the file agree between machines to rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import coadjoint as co

T, B, INPUTS, HIDDEN, OUTPUTS = 9, 4, 3, 5, 2
LENGTHS = [9, 4, 7, 1]
METHODS = {
    "bptt": lambda: co.BPTT(),
    "penalised": lambda: co.Penalised("log-ratio", 0.3),
    "variance": lambda: co.Penalised("variance", 0.2),
    "truncated": lambda: co.Truncated(2, 4),
    "rtrl": lambda: co.RTRL(),
}
CASES = [  # cell, engine, method
    *(
        ("elman", engine, method)
        for engine in ("reference", "eager", "cpu", "autograd")
        for method in METHODS
    ),
    *(
        (cell, engine, "penalised")
        for cell in ("lstm", "gru")
        for engine in ("reference", "eager", "cpu", "autograd")
    ),
    *(
        (cell, "cpu", "penalised")
        for cell in ("leaky", "rate", "peephole", "scrn", "antisymmetric", "cornn")
    ),
    *((cell, engine, "penalised") for cell in ("lru", "mingru") for engine in ("cpu", "scan")),
    ("lstm", "cpu", "truncated"),
    ("gru", "cpu", "rtrl"),
]
assert len(CASES) == 40


def wave(shape: torch.Size | tuple[int, ...], shift: float) -> torch.Tensor:
    """Numbers of order one that depend on no random generator."""
    count = math.prod(shape)
    return torch.sin(1.7 * torch.arange(count, dtype=torch.float64) + shift).reshape(shape)


def gradient(cell: str, engine: str, method: str) -> dict[str, torch.Tensor]:
    """Losses, penalties and the gradient of one case, by name."""
    sizes = {"inputs": INPUTS, "hidden": HIDDEN, "outputs": OUTPUTS}
    readout = "every" if method in ("truncated", "rtrl") else "last"
    net = co.Network(cell, **sizes, readout=readout, engine=engine, dtype=torch.float64)
    with torch.no_grad():
        for i, (_, p) in enumerate(sorted(net.named_parameters())):
            p.copy_(0.4 * wave(p.shape, i))
    u = wave((T, B, INPUTS), 0.3)
    y = wave((T, B, OUTPUTS) if readout == "every" else (B, OUTPUTS), 0.7)
    batch = co.Batch(u, y, lengths=LENGTHS)
    e = METHODS[method]()(net, batch, "squared")
    return {"losses": e.losses, "penalties": e.penalties, **dict(sorted(e.gradient.items()))}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, y in tensors.items():
        found.update(name.encode())
        found.update(y.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def projections(y: torch.Tensor) -> list[float]:
    """A few numbers that move when any entry does: the norm, and products with two
    fixed vectors.
    """
    flat = y.detach().double().reshape(-1)
    return [
        float(flat.norm()),
        float(flat @ wave(flat.shape, 0.1)),
        float(flat @ wave(flat.shape, 1.3)),
    ]


def run_folder() -> dict[str, str]:
    """The digests of a short training run's files."""
    words = (
        "addition --length 12 --hidden 8 --batch 8 --steps 40 --every 10 --checkpoint 20 "
        "--tests 50 --seed 3"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [sys.executable, "-m", "coadjoint", "train", *words.split()]
        command += ["--penalty", "log-ratio", "--threads", "1", "--out", str(folder), "--quiet"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        names = ("metrics.jsonl", "model.safetensors")
        return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="write the cases as numbers to this JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {" ".join(case): gradient(*case) for case in CASES}
    if given.write:
        numbers = {
            case: {n: projections(y) for n, y in parts.items()} for case, parts in found.items()
        }
        given.write.write_text(json.dumps(numbers, indent=1) + "\n")
        return
    for case, parts in found.items():
        print(f"{digest(parts)}  {case}")
    for name, value in run_folder().items():
        print(f"{value}  {name}")


if __name__ == "__main__":
    main()
