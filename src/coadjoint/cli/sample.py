"""`coadjoint sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from ..errors import escape_controls
from .outputs import FORCE, PRINTED, check_inputs, refuse_existing
from .program import app, print_escaped, warn, with_examples


@app.command()
@with_examples(
    'coadjoint sample runs/book --prime "the " --length 200',
    "coadjoint sample runs/book --temperature 0.7 --top-p 0.9 --count 3 --out samples.txt",
)
def sample(
    run: Path = typer.Argument(..., metavar="RUN", help="a run folder, or its model.safetensors"),
    prime: Optional[str] = typer.Option(
        None,
        "--prime",
        help="what the network reads first; words with commas between them, if it was trained on "
        "a column (default: a line feed, or the first symbol in sorted order if there is none)",
    ),
    length: int = typer.Option(200, "--length", help="symbols to write after the prime"),
    temperature: float = typer.Option(
        1.0, "--temperature", help="below 1: more probable symbols; 0: the most probable one"
    ),
    top_k: Optional[int] = typer.Option(
        None, "--top-k", help="draw from this many of the most probable symbols"
    ),
    top_p: Optional[float] = typer.Option(
        None,
        "--top-p",
        help="draw from the fewest most probable symbols that have this probability together",
    ),
    seed: int = typer.Option(0, "--seed", help="the same seed draws the same symbols"),
    count: int = typer.Option(1, "--count", help="how many samples, each from the prime on"),
    out: Optional[Path] = typer.Option(
        None, "--out", "-o", help="file to write, in UTF-8 (default: -, which prints)"
    ),
    force: bool = FORCE,
) -> None:
    """Let a network that was trained on symbols (--kind next) continue a text.

    It prints the prime and what follows; of several samples, with an empty line between them.
    """
    from ..models.model import load
    from ..training import files

    if out is not None and str(out) == PRINTED:
        out = None
    check_inputs(run)
    if out is not None:
        refuse_existing(out, force)
    model = load(run, warn)
    texts = model.sample(
        prime,
        length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        count=count,
    )
    text = "\n\n".join(texts)
    if out is None:
        print(escape_controls(text))
        return
    files.replace(out, f"{text}\n".encode())
    print_escaped(f"{count} sample{'s' * (count != 1)} -> {out}")
