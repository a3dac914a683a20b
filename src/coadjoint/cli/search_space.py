"""The space of a search: which settings vary, and between which values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args, get_origin

from ..errors import ConfigError
from ..training.settings import parse_scalar
from . import flags as setting_flags
from . import schema
from .flags import KeyValues, SectionValues
from .key_types import KEY_TYPES
from .words import split_words

NONE = "none"  # the value of a setting that is left out in a trial
LOG_RATIO = 10  # a range whose ends have at least this ratio is searched on a logarithmic scale
VARY_EXAMPLE = "lr=1e-4..1e-1 hidden=16..128 cell=gru|lstm penalty=none|log-ratio"
# Settings that mean nothing unless another one is set.
DEPENDENT = {"weight": "penalty"}


class Suggests(Protocol):
    """A trial of Optuna, as far as the space needs it."""

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> object:
        """One of the choices."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """A number between the ends."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """A whole number between the ends."""


@dataclass(frozen=True)
class Range:
    """A setting that takes numbers from `low` to `high`."""

    section: str
    key: str
    low: float
    high: float
    is_whole: bool = False

    @property
    def is_log(self) -> bool:
        """Whether it is searched on a logarithmic scale."""
        return self.low > 0 and self.high / self.low >= LOG_RATIO

    def suggest(self, trial: Suggests) -> float:
        """The value of a trial."""
        if self.is_whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.is_log)
        value = trial.suggest_float(self.key, self.low, self.high, log=self.is_log)
        return float(f"{value:.4g}")  # so that the command that is printed repeats the trial

    def holds(self, value: object) -> bool:
        """Whether a value of the setting lies in the range."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high  # type: ignore[operator]

    def parameter(self, value: float) -> float:
        """A value of the setting as the study stores it."""
        return int(value) if self.is_whole else float(value)

    def text(self) -> str:
        """The range as --vary takes it: "lr=0.0001..0.1"."""
        return f"{self.key}={self.low:g}..{self.high:g}"


@dataclass(frozen=True)
class Alternatives:
    """A setting that takes one of several values, each as the command line has it."""

    section: str
    key: str
    texts: tuple[str, ...]

    def suggest(self, trial: Suggests) -> object:
        """The value of a trial; None if the setting is left out."""
        text = str(trial.suggest_categorical(self.label, self.texts))
        return None if text == NONE else setting_flags.parse_flag(self.section, self.key, text)

    @property
    def label(self) -> str:
        """The key as the command line has it: optimiser, not name."""
        return self.section if self.key == "name" else self.key

    def holds(self, value: object) -> bool:
        """Whether a value of the setting is one of the choices."""
        return self.parameter(value) in self.texts

    def parameter(self, value: object) -> str:
        """A value of the setting as the study stores it."""
        return NONE if value is None else str(value)

    def text(self) -> str:
        """The choice as --vary takes it: "cell=gru|lstm"."""
        return f"{self.label}={'|'.join(self.texts)}"


Dimension = Range | Alternatives


def label_of(dimension: Dimension) -> str:
    """The name of a dimension in a study."""
    return dimension.label if isinstance(dimension, Alternatives) else dimension.key


def parse_space(text: str) -> list[Dimension]:
    """The dimensions of a text such as VARY_EXAMPLE."""
    words = split_words(text, "--vary")
    if not words:
        raise ConfigError(f"--vary takes settings and their values, such as {VARY_EXAMPLE!r}.")
    dimensions = [parse_dimension(word) for word in words]
    names = [label_of(dimension) for dimension in dimensions]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--vary names '{name}' twice: give all of its values at once.")
    return dimensions


def parse_dimension(word: str) -> Dimension:
    """The dimension of 'key=low..high' or 'key=a|b|c'."""
    name, sign, text = word.partition("=")
    key = name.replace("-", "_")
    section = schema.SECTION_OF.get(key)
    if name == "optimiser":  # whose key in the config is [optimiser] name
        section = "optimiser"
        key = "name"
    if section is None:
        raise ConfigError(f"--vary: {setting_flags.explain_unknown_setting(key)}")
    if not sign or not text:
        raise ConfigError(
            f"--vary {name}: give its values, as in '{name}=a|b' or '{name}=1e-3..1e-1'."
        )
    if ".." in text:
        return parse_range(section, key, text)
    values = tuple(dict.fromkeys(text.split("|")))
    for value in values:
        if value != NONE:  # the check of the config says what was expected
            value = setting_flags.parse_flag(section, key, value)  # type: ignore[assignment]
            setting_flags.resolve(None, {section: {key: value}})
    return Alternatives(section, key, values)


def parse_range(section: str, key: str, text: str) -> Range:
    """The dimension of 'low..high'; both ends must be values that the setting takes."""
    ends = []
    for part in text.split("..", 1):
        try:
            end = parse_scalar(part.strip())
        except ValueError:
            end = None
        if isinstance(end, bool) or not isinstance(end, int | float):
            raise ConfigError(
                f"--vary {key}={text}: a range has two numbers, as in '{key}=1e-3..1e-1'; got "
                f"{part!r}."
            )
        setting_flags.resolve(None, {section: {key: end}})
        ends.append(end)
    low, high = ends
    if low >= high:
        raise ConfigError(f"--vary {key}={text}: the first number must be the smaller one.")
    return Range(section, key, low, high, takes_whole_numbers(section, key))


def takes_whole_numbers(section: str, key: str) -> bool:
    """Whether a setting takes whole numbers only."""
    types = KEY_TYPES[section, key]
    numbers = [get_args(t)[0] if get_origin(t) is not None else t for t in types]
    return int in numbers and float not in numbers


def default_space(given: SectionValues, has_time: bool) -> list[Dimension]:
    """What is searched without --vary: step size, cell, width, clipping, dropout, penalty.

    Settings that were given are left as they are. has_time: the data is made of sequences.
    """
    space: list[Dimension] = [Range("optimiser", "lr", 3e-4, 3e-2)]
    if has_time:
        space += [
            Alternatives("network", "cell", ("elman", "gru", "lstm")),
            Range("network", "hidden", 16, 128, is_whole=True),
        ]
    penalties = ("none", "log-ratio") if has_time else ("none", "log-ratio", "isometry")
    space += [
        Range("training", "clip", 0.1, 10.0),
        Range("network", "dropout", 0.0, 0.5),
        Alternatives("gradient", "penalty", penalties),
        Range("gradient", "weight", 1e-3, 1.0),
    ]
    return [d for d in space if d.key not in given.get(d.section, {})]


def suggest(space: Iterable[Dimension], trial: Suggests, given: SectionValues) -> SectionValues:
    """The settings of a trial, by section; a setting that needs another is left out without it."""
    values: SectionValues = {}
    for dimension in sorted(space, key=lambda d: d.key in DEPENDENT):
        needed = DEPENDENT.get(dimension.key)
        if needed is not None and find(needed, values, given) is None:
            continue
        value = dimension.suggest(trial)
        if value is not None:
            values.setdefault(dimension.section, {})[dimension.key] = value
    return values


def find(key: str, *sources: SectionValues) -> object:
    """The value of a key in the first source that has it; None if none does."""
    section = schema.SECTION_OF[key]
    for source in sources:
        value = source.get(section, {}).get(key)
        if value is not None:
            return value
    return None


def parameters_of(space: Iterable[Dimension], config: schema.Config) -> KeyValues:
    """The settings of a config as parameters of a trial, as far as they lie in the space."""
    parameters: KeyValues = {}
    for dimension in space:
        value = getattr(getattr(config, dimension.section), dimension.key)
        needed = DEPENDENT.get(dimension.key)
        is_idle = needed is not None and getattr(config.gradient, needed) is None
        if dimension.holds(value) and not is_idle:
            parameters[label_of(dimension)] = dimension.parameter(value)
    return parameters


def merge(*layers: SectionValues) -> SectionValues:
    """Settings by section, where later layers take precedence."""
    merged: SectionValues = {}
    for name, layer in itertools.product(schema.SECTIONS, layers):
        if name in layer:
            merged.setdefault(name, {}).update(layer[name])
    return merged
