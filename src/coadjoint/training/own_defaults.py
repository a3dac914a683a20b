"""Defaults for your own data: what benchmarks/own_data.py found to hold across many sets.

Only keys that nobody gave are filled in, and only where they go with what was given: a cell of your
own keeps its readout and step size, an optimiser of your own its settings. docs/own-data.md has the
study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..networks.chain_text import parse_chain
from ..tasks.data import Data

SectionValues = dict[str, dict[str, Any]]  # values by key, by section

LEAST_EPOCHS = 10
MOST_ROWS = (
    8_000_000  # time steps of all batches together, unless the least number of steps is more
)
WARMUP_SHARE = 0.05  # of the steps
CLIP = 1.0
VALIDATIONS = 40  # in a run
PATIENCE = 20  # validations: half a run, as the step size of a cosine falls late
LARGEST_BATCH = 128
MOST_STEPS_PER_EPOCH = 150  # beyond which the batch is doubled
MOST_SHORT_ROWS = 256  # of a short series, in its training part
FEW_SEQUENCES = 32  # training sequences; fewer are cut into chunks where they are long
GATED = ("gru", "lstm")
# The keys of [network] beside which the defaults were tried; with another one they stay away.
TRIED = ("cell", "hidden", "bidirectional", "readout", "layers", "dropout", "init", "skip")
LENGTHS = ("steps", "epochs", "gradients", "seconds")  # how long to train


class Sections(Protocol):
    """The settings of a run by section, with the attributes of the keys in config.yaml."""

    @property
    def network(self) -> Any:
        """chain, cell, hidden."""

    @property
    def gradient(self) -> Any:
        """method, segments."""

    @property
    def training(self) -> Any:
        """batch, accumulate, epochs, steps."""


@dataclass(frozen=True)
class OwnDefaults:
    """Defaults for one sort of data.

    network       keys of [network]
    lr, batch     step size; sequences per step in a small set
    weight_decay  of adamw; None for adam
    epochs        of training, but no fewer steps than `least_steps` and, unless LEAST_EPOCHS are
                  more, at most `most_steps`
    chunk         steps of the parts into which a few long training sequences are cut
    """

    network: Mapping[str, Any]
    lr: float | None
    batch: int
    weight_decay: float | None = None
    least_steps: int = 800
    most_steps: int = 2000
    epochs: int = 200
    chunk: int = 32


ONE_ANSWER = OwnDefaults(
    {"cell": "gru", "hidden": 64, "bidirectional": True, "readout": "mean"},
    lr=1e-2,
    batch=16,
    least_steps=2000,
    most_steps=6000,
    epochs=600,
)
EVERY_STEP = OwnDefaults({"cell": "gru", "hidden": 128}, lr=3e-3, batch=32, weight_decay=0.01)
NEXT_STEP = OwnDefaults(
    {"cell": "gru", "hidden": 128, "skip": True, "persistence": True},
    lr=3e-3,
    batch=32,
    weight_decay=0.01,
)
# A short series, whose earlier rows are inputs: benchmarks/forecasts.py chose it.
SHORT_SERIES = OwnDefaults(
    {"cell": "gru", "hidden": 8, "skip": True, "persistence": True},
    lr=3e-4,
    batch=32,
    weight_decay=0.01,
    least_steps=300,
)
# Symbols, such as the characters of a text: the longer chunks are, the more they can learn from.
NEXT_SYMBOL = OwnDefaults(
    {"cell": "gru", "hidden": 256}, lr=3e-3, batch=32, weight_decay=0.01, chunk=100
)
SEASONAL_SERIES = replace(NEXT_STEP, least_steps=300)  # a long one, with such inputs
DENSE_LAYERS = OwnDefaults({"activation": "relu", "dropout": 0.2}, lr=1e-2, batch=16)
OTHER_LAYERS = OwnDefaults({}, lr=None, batch=16)
OTHER_CELL = OwnDefaults({}, lr=None, batch=16)


@dataclass
class Filled:
    """The values that were filled in, by section, and what is said about them."""

    values: SectionValues = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, section: str, **keys: object) -> None:
        """Add values to a section."""
        self.values.setdefault(section, {}).update(keys)


def fill(config: Sections, given: SectionValues, task: Data) -> Filled:
    """The defaults of a new run on your own data.

    given: the keys that somebody has set, before any were resolved. The training sequences of
    `task` are cut here if chunks of them are the default.
    """
    filled = Filled()
    defaults = choose_defaults(config, given, task)
    ahead = task.description.ahead
    lags = ahead.get("lags")
    if lags and "lags" not in given.get("data", {}):
        filled.put("data", lags=list(lags))
    if task.description.symbols == "character":
        filled.put("data", text=True)
    fill_network(filled, defaults, given)
    fill_chunk(filled, defaults, given, task)
    fill_training(filled, defaults, config, given, task)
    fill_optimiser(filled, defaults, given)
    fill_warmup(filled, given, steps_of(filled, config, task))
    describe(filled, config, bool(lags) and not ahead["quantiles"])
    return filled


def choose_defaults(config: Sections, given: SectionValues, task: Data) -> OwnDefaults:
    """The defaults for this sort of data and network."""
    network = given.get("network", {})
    if task.shape is not None:
        return DENSE_LAYERS if has_plain_layers(config) else OTHER_LAYERS
    others = [key for key in network if key not in TRIED and key != "persistence"]
    if others or network.get("cell", "gru") not in GATED:
        return OTHER_CELL
    if not reads_whole_sequences(config) or not takes_stacks(given):
        return OTHER_CELL
    if task.readout != "every":
        return ONE_ANSWER
    if task.description.symbols:
        return NEXT_SYMBOL
    ahead = task.description.ahead
    if ahead.get("lags") and not ahead["quantiles"]:
        is_short = task.sets["train"].steps().sum() <= MOST_SHORT_ROWS
        return SHORT_SERIES if is_short else SEASONAL_SERIES
    if task.description.kind != "next":
        return EVERY_STEP
    # Forecasts of other columns than all begin so if these were named, others as they always did.
    is_named = given.get("data", {}).get("target") is not None
    return NEXT_STEP if is_named or not ahead else EVERY_STEP


def reads_lags(data: Mapping[str, object], cell: object) -> bool:
    """Whether earlier rows may be inputs by default: forecasts of one step, nothing else asked for.

    data: the keys of this section that were given; cell: None if none was. Whether the series is
    short is seen when it is read: see `tasks.season`.
    """
    is_direct = "horizon" in data and data.get("strategy") != "recursive"
    asked = {"lags", "window", "known", "quantiles", "target", "wide", "missing", "gaps"}
    is_plain = cell in (None, *GATED) and not is_direct and not asked & set(data)
    return data.get("kind") == "next" and is_plain


def reads_whole_sequences(config: Sections) -> bool:
    """Whether the gradient method takes stacks and readouts of all steps."""
    gradient = config.gradient
    return gradient.method in (None, "bptt", "penalised") and gradient.segments is None


def takes_stacks(given: SectionValues) -> bool:
    """Whether the optimiser takes stacks, as which networks of both directions count."""
    optimiser = given.get("optimiser", {})
    direction = optimiser.get("direction") or "steepest"
    return optimiser.get("name") != "hessian-free" and direction == "steepest"


def has_plain_layers(config: Sections) -> bool:
    """Whether the chain is made of dense layers alone, for a label or a number."""
    if config.network.chain is None:
        return False
    return all(layer.kind == "dense" for layer in parse_chain(config.network.chain))


def fill_network(filled: Filled, defaults: OwnDefaults, given: SectionValues) -> None:
    """The keys of [network] that were not given."""
    network = given.get("network", {})
    wanted = {key: value for key, value in defaults.network.items() if key not in network}
    if network.get("skip") is False:
        wanted.pop("persistence", None)
    if has_own_step(given):  # dropout makes each evaluation another function
        wanted.pop("dropout", None)
    filled.put("network", **wanted)


def fill_chunk(filled: Filled, defaults: OwnDefaults, given: SectionValues, task: Data) -> None:
    """Chunks of a few long training sequences, where each step has its target."""
    if "window" in given.get("data", {}) or "chunk" in given.get("task", {}):
        return
    steps = task.sets["train"].steps()
    if task.shape is not None or task.readout != "every" or len(steps) >= FEW_SEQUENCES:
        return
    chunk = min(defaults.chunk, int(steps.mean()) // 4)
    if chunk >= 2:
        filled.put("task", chunk=chunk)
        task.cut_training(chunk)


def fill_training(
    filled: Filled, defaults: OwnDefaults, config: Sections, given: SectionValues, task: Data
) -> None:
    """The batch, how long to train, when to validate, when to stop, and clipping."""
    training = given.get("training", {})
    count = len(task.sets["train"])
    batch = training.get("batch")
    if batch is None:
        batch = defaults.batch
        while count > batch * MOST_STEPS_PER_EPOCH and batch < LARGEST_BATCH:
            batch *= 2
        filled.put("training", batch=batch)
    if not has_own_step(given) and not any(key.startswith("clip") for key in training):
        filled.put("training", clip=CLIP)
    if any(key in training for key in LENGTHS):
        return
    rows = batch * config.training.accumulate * float(task.sets["train"].steps().mean())
    per_epoch = task.steps_per_epoch(batch * config.training.accumulate)
    steps = min(defaults.epochs * per_epoch, defaults.most_steps, int(MOST_ROWS / rows))
    epochs = max(LEAST_EPOCHS, math.ceil(max(defaults.least_steps, steps) / per_epoch))
    every = math.ceil(epochs / VALIDATIONS)
    filled.put("training", steps=epochs * per_epoch)
    if "every" not in training:
        filled.put("training", every=every * per_epoch)
    length = f"{epochs} epoch{'s' * (epochs != 1)} ({epochs * per_epoch:,} steps)"
    if "patience" not in training and "valid" in task.splits:
        filled.put("training", patience=PATIENCE)
        length = f"at most {length}; stops after {PATIENCE} validations without improvement"
    filled.notes.append(length)


def has_own_step(given: SectionValues) -> bool:
    """Whether an optimiser, or a rule for its step, was given that the study did not try."""
    optimiser = given.get("optimiser", {})
    is_other = optimiser.get("name", "adam") not in ("adam", "adamw")
    return is_other or "step_rule" in optimiser or "direction" in optimiser


def fill_optimiser(filled: Filled, defaults: OwnDefaults, given: SectionValues) -> None:
    """The step size and its schedule, and weight decay."""
    if has_own_step(given):
        return
    optimiser = given.get("optimiser", {})
    training = given.get("training", {})
    if defaults.lr is not None and "lr" not in optimiser:
        filled.put("optimiser", lr=defaults.lr)
    if defaults.weight_decay is not None and not {"name", "weight_decay"} & set(optimiser):
        filled.put("optimiser", name="adamw", weight_decay=defaults.weight_decay)
    # A schedule needs to know the last step, which a budget does not say.
    has_steps = not {"gradients", "seconds"} & set(training) or "steps" in training
    if has_steps and not {"schedule", "decay", "end", "plateau"} & set(optimiser):
        filled.put("optimiser", schedule="cosine")


def steps_of(filled: Filled, config: Sections, task: Data) -> int:
    """How many steps the run has, as given or as filled in; 0 if only a budget ends it."""
    training = config.training
    filled_in = filled.values.get("training", {})
    batch = int(filled_in.get("batch") or training.batch or 1) * training.accumulate
    epochs = training.epochs or 0
    return int(filled_in.get("steps") or training.steps or epochs * task.steps_per_epoch(batch))


def fill_warmup(filled: Filled, given: SectionValues, steps: int) -> None:
    """The steps over which the step size grows, where its schedule is ours."""
    is_ours = "schedule" in filled.values.get("optimiser", {})
    if is_ours and "warmup" not in given.get("optimiser", {}):
        filled.put("optimiser", warmup=round(WARMUP_SHARE * steps))


def describe(filled: Filled, config: Sections, begins_linear: bool) -> None:
    """A line on what was filled in, before the one on the length of the run.

    begins_linear: whether --persistence is the start of `linear_start.begin_linear_`.
    """
    network = filled.values.get("network", {})
    training = filled.values.get("training", {})
    optimiser = filled.values.get("optimiser", {})
    parts = []
    if "cell" in network or "hidden" in network:
        cell = network.get("cell", config.network.cell)
        hidden = network.get("hidden", config.network.hidden)
        units = " and ".join(map(str, hidden)) if isinstance(hidden, list) else hidden
        parts.append(f"{cell} of {units} units")
    if network.get("bidirectional"):
        parts.append("both directions")
    if "readout" in network:
        parts.append("mean over steps")
    if network.get("persistence"):
        start = "of a linear regression" if begins_linear else "that nothing changes"
        parts.append(f"begins with the forecast {start}")
    for key in ("activation", "dropout"):
        if key in network:
            parts.append(f"{key} {network[key]}")
    if "lr" in optimiser:
        parts.append(f"lr {optimiser['lr']:g}")
    if "schedule" in optimiser:
        parts.append("cosine")
    if "weight_decay" in optimiser:
        parts.append(f"weight decay {optimiser['weight_decay']:g}")
    if "batch" in training:
        parts.append(f"batch {training['batch']}")
    if "clip" in training:
        parts.append(f"clip {training['clip']:g}")
    if "chunk" in filled.values.get("task", {}):
        parts.append(f"training in chunks of {filled.values['task']['chunk']} steps")
    if parts:
        filled.notes.insert(0, f"defaults for your data: {', '.join(parts)}")
