"""Tasks: where sequences and samples come from, and how outputs are judged.

Example: sequences of 100 to 109 steps, and the loss of the best constant.

    >>> import coadjoint as co
    >>> task = co.tasks.make("addition", length=100)
    >>> batch = task.batch(step=0, size=32, seed=1)
    >>> list(batch.u.shape[1:]), list(batch.y.shape)  # u [T, B, inputs], y [B]
    ([32, 2], [32])
    >>> task.baseline()["loss"] == 1 / 24
    True

This package imports `objectives` and the packages before it. A task never sees a network.

task           Task: batches by (step, size, seed), held-out sets, scores; Collection: a finite set
generated      sequences without end, drawn anew for each batch
marked         the mean, product or difference of two marked entries of a long sequence
synthetic      symbols long past, to be recalled
transduction   answers that are sequences with their own length
denoising      samples restored from noisy copies, for autoencoders
digits, music  small sets of handwritten digits and of piano rolls
data           your own files, arrays or frames as a task
memory         arrays, lists and tensors in memory
frames         data frames in memory
option_checks  options that are refused before a file is read
preparation    labels and targets of a file
filling        its gaps: rows left out, or filled from the row before
cutting        its sequences cut into pieces and split into train, valid and test
ahead          what is predicted of the next steps: columns, how far, quantiles
future_rows    rows of the future, with what is known in advance
season         the season of series, and the earlier rows to read for it
judging        how the outputs for your own files are judged
metrics        metrics of a split, by name
baselines      what is reached without a network
linear         ridge and logistic regression, for baselines
class_weights  weights of classes in the loss of training
shares         how much of the training file is split off
scaling        pieces as the numbers that a network reads
encoding       words and gaps in time as inputs
description    what a network must know about the data it was trained on
overview       what was read from files, to be shown before training
new_data       reading new sequences for a trained network
prediction     new sequences for a trained network
stored_prediction    those of a prepared set, one batch at a time
chunks, array_chunks    tables and arrays in chunks of rows
preparing      tables that do not fit into memory, as arrays on disk
prepare_checks what of them is refused
prepared       such a set of arrays, as a file that was read
prepared_words, prepared_description    its words and labels by number; what describes it
array_files, stored_rows, stored_sets    arrays that grow, and are read, on disk; their sequences
blocks, row_blocks, running_moments, step_range, uneven, stored_gaps    many rows, some at a time
sets           the sets of all splits
symbols        sequences of symbols: the characters of a text, the words of a column
symbol_sets, symbol_baselines    their sets; the next symbol by counts
asked          the rows of a file that a prediction is asked for
files/         readers of your own files, at once or as a stream
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, choose
from .data import Data
from .denoising import Denoising, denoise
from .digits import DigitImages, Digits, FlatDigits, NoisyDigits
from .generated import Generated
from .marked import XOR, Addition, Multiplication
from .music import Music
from .synthetic import Copy, Memorisation, Permutation, TemporalOrder
from .task import Collection, Goal, Samples, Sequences, Task, rng
from .transduction import Reversal, Sorting, Transduction


@dataclass(frozen=True)
class Entry:
    """A task by name: what makes it, a line about it, and the options that its name implies.

    has_time  whether it is made of sequences; otherwise of samples, for a co.Chain
    """

    build: Callable[..., Task]
    about: str
    settled: dict[str, Any] = field(default_factory=dict)  # options that cannot be chosen
    has_time: bool = True


TASKS: dict[str, Entry] = {
    "addition": Entry(Addition, "the mean of two marked numbers in a long sequence"),
    "multiplication": Entry(Multiplication, "the product of two marked numbers"),
    "xor": Entry(XOR, "whether two marked bits differ"),
    "temporal-order": Entry(
        TemporalOrder, "which two symbols appeared among distractors, in order", {"symbols": 2}
    ),
    "temporal-order-3": Entry(
        TemporalOrder, ("which three symbols appeared, in order"), {"symbols": 3}
    ),
    "permutation": Entry(Permutation, "the first of a hundred symbols, recalled at the end"),
    "memorisation-5": Entry(
        Memorisation, "five bits repeated after a delay", {"values": 2, "positions": 5}
    ),
    "memorisation-20": Entry(
        Memorisation,
        ("ten symbols from an alphabet of five, repeated after a delay"),
        {"values": 5, "positions": 10},
    ),
    "copy": Entry(
        Copy, ("ten letters from an alphabet of eight, repeated after a delay, cued one step ahead")
    ),
    "reversal": Entry(Reversal, "the input letters in reverse order (an encoder-decoder)"),
    "sorting": Entry(Sorting, "the input letters in sorted order (an encoder-decoder)"),
    "digits": Entry(Digits, "handwritten digits, read by pixel or by row (scikit-learn)"),
    "digits-flat": Entry(
        FlatDigits, "handwritten digits, 64 pixels at once, without time", has_time=False
    ),
    "digits-image": Entry(
        DigitImages, "handwritten digits, images of 8 x 8 pixels, without time", has_time=False
    ),
    "digits-denoise": Entry(
        NoisyDigits, "the 64 pixels of a digit, restored from noisy ones", has_time=False
    ),
    "music": Entry(Music, "the next notes of a piano roll, from a MATLAB file at `path`"),
}


def options(name: str) -> dict[str, Any]:
    """Return the options of a task with their defaults; `...` marks one that must be given."""
    entry = TASKS[choose("task", name, TASKS)]
    defaults = {}
    for parameter in inspect.signature(entry.build).parameters.values():
        if parameter.name not in entry.settled:
            required = parameter.default is inspect.Parameter.empty
            defaults[parameter.name] = ... if required else parameter.default
    return defaults


def make(name: str, **chosen: Any) -> Task:
    """Make a task by name; options it does not have are refused.

    Example:
        >>> import coadjoint as co
        >>> task = co.tasks.make("addition", length=100)
        >>> list(task.batch(step=0, size=32, seed=1).u.shape[1:])  # [T, B, inputs]
        [32, 2]
    """
    known = options(name)
    for option in chosen:
        choose(f"option of task '{name}'", option, known)
    missing = [key for key, default in known.items() if default is ... and key not in chosen]
    if missing:
        raise InputError(f"task '{name}' needs {', '.join(missing)}: {TASKS[name].about}.")
    return TASKS[name].build(**TASKS[name].settled, **chosen)


__all__ = [
    "TASKS",
    "XOR",
    "Addition",
    "Collection",
    "Copy",
    "Data",
    "Denoising",
    "DigitImages",
    "Digits",
    "Entry",
    "FlatDigits",
    "Generated",
    "Goal",
    "Memorisation",
    "Multiplication",
    "Music",
    "NoisyDigits",
    "Permutation",
    "Reversal",
    "Samples",
    "Sequences",
    "Sorting",
    "Task",
    "TemporalOrder",
    "Transduction",
    "denoise",
    "make",
    "options",
    "rng",
]
