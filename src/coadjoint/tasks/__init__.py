"""Tasks: where sequences come from, and how outputs are judged.

This package imports `objectives` and what is above it; a task never sees a network.

task           Task: batches as a function of (step, size, seed), held-out sets, scores; Collection: a finite set
synthetic      sequences whose answer depends on steps long past
transduction   answers that are sequences of their own
digits, music  small sets of handwritten digits and of piano rolls
data           users' own files as a task
preparation    from what a file holds to sequences: labels coded, gaps filled, cut, split and scaled
description    what a network must know of the data it was trained on
prediction     new sequences for a trained network
files/         readers of users' own files, whole or as a stream
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, choose
from .digits import Digits
from .music import Music
from .synthetic import (
    XOR,
    Addition,
    Copy,
    Generated,
    Memorisation,
    Multiplication,
    Permutation,
    TemporalOrder,
)
from .task import Collection, Goal, Sequences, Task, rng
from .transduction import Reversal, Sorting, Transduction


@dataclass(frozen=True)
class Entry:
    """A task by name: what makes it, what it is, and the options that its name settles."""

    build: Callable[..., Task]
    about: str
    settled: dict[str, Any] = field(default_factory=dict)


TASKS: dict[str, Entry] = {
    "addition": Entry(Addition, "the mean of two marked numbers of a long sequence"),
    "multiplication": Entry(Multiplication, "the product of two marked numbers"),
    "xor": Entry(XOR, "whether two marked bits differ"),
    "temporal-order": Entry(TemporalOrder, "which two symbols came among distractors, in order", {"symbols": 2}),
    "temporal-order-3": Entry(TemporalOrder, "which three symbols came, in order", {"symbols": 3}),
    "permutation": Entry(Permutation, "the first of a hundred symbols, asked for at the end"),
    "memorisation-5": Entry(Memorisation, "five bits repeated after a delay", {"values": 2, "positions": 5}),
    "memorisation-20": Entry(Memorisation, "ten of five symbols repeated after a delay", {"values": 5, "positions": 10}),
    "copy": Entry(Copy, "ten of eight letters repeated after a delay, cued one step ahead"),
    "reversal": Entry(Reversal, "letters written from the last to the first (an encoder-decoder)"),
    "sorting": Entry(Sorting, "letters written in order, each as often as it came (an encoder-decoder)"),
    "digits": Entry(Digits, "handwritten digits, read by pixel or by row (scikit-learn)"),
    "music": Entry(Music, "the next notes of a piano roll, from a MATLAB file at `path`"),
}  # fmt: skip


def options(name: str) -> dict[str, Any]:
    """The options of a task with their defaults; `...` stands for one that must be given."""
    entry = TASKS[choose("task", name, TASKS)]
    given = {
        p.name: p.default
        for p in inspect.signature(entry.build).parameters.values()
        if p.name not in entry.settled
    }
    return {key: ... if value is inspect.Parameter.empty else value for key, value in given.items()}


def make(name: str, **chosen: Any) -> Task:
    """The task of this name with these options."""
    known = options(name)
    for option in chosen:
        choose(f"option of task '{name}'", option, known)
    if missing := [
        option for option, default in known.items() if default is ... and option not in chosen
    ]:
        raise InputError(f"task '{name}' needs {', '.join(missing)}: {TASKS[name].about}.")
    return TASKS[name].build(**TASKS[name].settled, **chosen)


__all__ = [
    "TASKS", "XOR", "Addition", "Collection", "Copy", "Digits", "Entry", "Generated", "Goal", "Memorisation",
    "Multiplication", "Music", "Permutation", "Reversal", "Sequences", "Sorting", "Task", "TemporalOrder", "Transduction", "make",
    "options", "rng",
]  # fmt: skip
