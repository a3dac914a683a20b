"""Sequences of symbols written by a network that reads its own output: texts, for example.

The network reads a prime, draws the next symbol from its answer, reads that, and so on; its state
is carried from symbol to symbol.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, NumericalError, Unsupported, brief, whole_number
from ..networks.interface import Net
from ..networks.judge import evaluation_mode
from ..networks.sampling import Sampling, TokenDraws
from ..objectives.batch import Batch
from ..tasks.data import Data
from ..tasks.description import Description, Option
from ..tasks.files.characters import show_symbols
from ..tasks.symbol_sets import input_rows
from ..tasks.task import Task
from . import files
from .json_rows import dumps

SHOWN_LENGTH = 400  # symbols of a sample on the page of a run
SHOWN_TEMPERATURES = (1.0, 0.5)


def refuse_other_models(net: Net, description: Description) -> None:
    """Refuse models that predict no next symbol, and networks without a state to go on from."""
    if not description.symbols:
        raise InputError(
            "only a model of symbols can be sampled from: train with --kind next on a text, or on "
            "a column of words."
        )
    if not net.carries_state:
        raise Unsupported(
            "this network reads sequences backwards or all steps at once, so there is no state to "
            "go on from. Train without --bidirectional, and with the plain readout."
        )


def split_prime(prime: str | Sequence[str] | None, description: Description) -> list[str]:
    """Return the symbols of a prime; None is the first symbol of the vocabulary, or a line feed.

    A prime of words is a list of them, or a text with commas between them; a word that holds a
    comma itself stands in double quotes, as in a CSV file. Symbols that the training file does not
    hold are refused.
    """
    d = description
    if prime is None:
        return ["\n" if "\n" in d.labels else d.labels[0]]
    symbols = list(prime)
    if isinstance(prime, str) and d.symbols != "character":
        cells = next(csv.reader([prime], skipinitialspace=True), [])
        symbols = [word.strip() for word in cells]
    if not symbols:
        raise InputError(f"prime must hold at least one {d.symbols}; got {brief(prime)}.")
    unknown = sorted({str(word) for word in symbols} - set(d.labels))
    if unknown:
        raise InputError(
            f"the prime holds {d.symbols}s that the run never saw: {show_symbols(unknown)}. Leave "
            f"them out; it knows {len(d.labels)}: {show_symbols(d.labels, 8)}."
        )
    return symbols


def join_symbols(symbols: Sequence[str], description: Description) -> str:
    """Return symbols as one text; words have commas between them, as a row of a CSV file."""
    if description.symbols == "character":
        return "".join(symbols)
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(symbols)
    return row.getvalue()


def generate(
    net: Net,
    description: Description,
    prime: str | Sequence[str] | None,
    length: int,
    sampling: Sampling,
    seed: int,
    count: int,
) -> list[list[str]]:
    """Return `count` continuations of a prime by `length` symbols, without the prime.

    Continuation i depends on the seed and on i, and not on `count`.

    Args:
        net: A network that carries its state.
        description: That of its data.
        prime: What it reads first: see `split_prime`.
        length: How many symbols it writes.
        sampling: How they are drawn.
        seed: Of the draws.
        count: How many continuations.
    """
    refuse_other_models(net, description)
    whole_number("length", length)
    whole_number("count", count)
    place = {word: k for k, word in enumerate(description.labels)}
    read = [place[word] for word in split_prime(prime, description)]
    draws = TokenDraws(sampling, seed, count)
    rows = torch.from_numpy(input_rows(description))
    everyone = torch.arange(count)
    tokens = torch.tensor(read)[:, None].expand(-1, count)  # [T, count]
    written: list[Tensor] = []
    state = None
    with torch.no_grad(), evaluation_mode(net):
        while len(written) < length:
            run: Option = net.run(net.move_batch(Batch(rows[tokens], x0=state)))
            state = run.state
            a = run.a[-1].double().cpu()
            if not torch.isfinite(a).all():
                raise NumericalError(
                    "the outputs are not finite: fed by itself, the network diverges."
                )
            written.append(draws.draw(a, everyone))
            tokens = written[-1][None]
    numbers = np.array(torch.stack(written, 1).tolist())
    return [[description.labels[k] for k in row] for row in numbers]


def write_samples(folder: Path, net: Net, task: Task) -> None:
    """Write sample.json into a run folder, for its page; a task without symbols has none."""
    if not isinstance(task, Data) or not task.description.symbols or not net.carries_state:
        return
    d = task.description
    prime = split_prime(None, d)
    samples = []
    for temperature in SHOWN_TEMPERATURES:
        try:
            drawn = generate(net, d, None, SHOWN_LENGTH, Sampling(temperature), 0, 1)[0]
        except NumericalError:
            return
        text = join_symbols(drawn, d)
        samples.append({"temperature": temperature, "prime": join_symbols(prime, d), "text": text})
    content = {"format": 1, "seed": 0, "unit": d.symbols, "samples": samples}
    files.replace(folder / "sample.json", dumps(content, separators=(",", ":")))
