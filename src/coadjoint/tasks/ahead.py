"""Ahead: what a network of kind "next" predicts: which columns, how far, and which quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ConfigError, DataError, whole_number
from .description import MOST_LAG
from .files.sheet import Sheet, quote_names
from .option_checks import check_choice
from .season import lags_of_season

if TYPE_CHECKING:
    from .description import Description
    from .scaling import Scale

STRATEGIES = ("recursive", "direct")
MOST_AHEAD = 1000  # steps that are predicted at once
MOST_QUANTILES = 99


class Ahead(NamedTuple):
    """What is predicted at each row.

    predicted  k columns
    horizon    H, the steps that are predicted at once
    known      columns that are known in advance: inputs are their values in the next H rows
    quantiles  the levels of Q quantiles, ascending; () for the mean alone
    steps      how far forecasts go by default; None if that was not said
    lags       earlier rows, ascending, whose predicted columns are inputs too: 1 is the row before

    Outputs are those of step 1, then of step 2, ...; of a step those of the first column, then of
    the second, ...; and of a column its quantiles.
    """

    predicted: tuple[str, ...]
    horizon: int = 1
    known: tuple[str, ...] = ()
    quantiles: tuple[float, ...] = ()
    steps: int | None = None
    lags: tuple[int, ...] = ()

    @property
    def middle(self) -> int:
        """The number of the quantile nearest to the median, which is fed back."""
        if not self.quantiles:
            return 0
        return int(np.argmin(np.abs(np.array(self.quantiles) - 0.5)))

    @property
    def copies(self) -> int:
        """Q, the outputs of a column at a step."""
        return max(1, len(self.quantiles))

    @property
    def width(self) -> int:
        """The number of outputs, H k Q."""
        return self.horizon * len(self.predicted) * self.copies

    @property
    def output_names(self) -> list[str]:
        """A name for each output: "a", "a +2", "a +2 q0.9"."""
        names = []
        for h in range(1, self.horizon + 1):
            step = f" +{h}" if self.horizon > 1 else ""
            for name in self.predicted:
                levels = [f" q{level:g}" for level in self.quantiles] or [""]
                names += [name + step + level for level in levels]
        return names

    def arrange(self, a: np.ndarray) -> np.ndarray:
        """Return outputs [..., H k Q] as [..., H, k, Q]; quantiles that cross are sorted."""
        shaped = a.reshape(*a.shape[:-1], self.horizon, len(self.predicted), self.copies)
        return np.sort(shaped, -1) if self.quantiles else shaped

    def repair(self, a: np.ndarray) -> np.ndarray:
        """Return outputs with quantiles in their order, where they cross; NaN stays."""
        return self.arrange(a).reshape(a.shape) if self.quantiles else a

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return values [..., k] of columns as values of outputs, [..., H k Q]."""
        per_step = np.repeat(values, self.copies, -1)
        return np.concatenate([per_step] * self.horizon, -1)

    def targets_of(self, values: np.ndarray) -> np.ndarray:
        """Return the targets [T - H, H k Q] of a series [T, k]: the H rows after each row."""
        windows = np.lib.stride_tricks.sliding_window_view(values[1:], self.horizon, axis=0)
        per_step = windows.swapaxes(1, 2)  # [T - H, H, k]
        return np.repeat(per_step, self.copies, -1).reshape(len(windows), -1)

    def widen(self, scale: Scale, features: Sequence[str]) -> Scale:
        """Return a scale with the mean and deviation of each output."""
        columns = [features.index(name) for name in self.predicted]
        mean = self.spread(np.array(scale.mean)[columns])
        std = self.spread(np.array(scale.std)[columns])
        return scale._replace(target_mean=mean.tolist(), target_std=std.tolist())


def ahead_of(description: Description) -> Ahead:
    """Return what a network with this description, of kind "next", predicts."""
    if not description.ahead:
        return Ahead(tuple(description.numeric))
    return from_json(description.ahead)


def present_inputs(description: Description) -> list[int]:
    """Return the number of the input that holds the present value of each output of kind "next".

    Outputs are scaled as these inputs are, so to repeat them is the forecast "nothing changes".
    """
    ahead = ahead_of(description)
    places = [description.numeric.index(name) for name in ahead.predicted]
    return [int(place) for place in ahead.spread(np.array(places))]


def from_json(given: dict[str, Any]) -> Ahead:
    """Return what a description holds in plain types."""
    return Ahead(
        tuple(given["predicted"]),
        given["horizon"],
        tuple(given["known"]),
        tuple(given["quantiles"]),
        given["steps"],
        tuple(given.get("lags", ())),
    )


def level_list(quantiles: float | Sequence[float] | None) -> tuple[float, ...]:
    """Return one level or several as a tuple, empty for None."""
    if quantiles is None:
        return ()
    return tuple(quantiles) if isinstance(quantiles, Sequence) else (quantiles,)


def lag_list(lags: int | str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return lags as an ascending tuple, empty for None and 0; None for "auto", a choice by season.

    Refused is what is no whole number.
    """
    if isinstance(lags, str):
        check_choice("lags", lags, ("auto",))
        return None
    given = lags if isinstance(lags, Sequence) else (lags or 0,)
    if tuple(given) == (0,):
        return ()
    checked = {whole_number("--lags", lag, most=MOST_LAG) for lag in given}
    return tuple(sorted(checked))


class AheadOptions(NamedTuple):
    """What was asked for, before the file is read; names are columns."""

    target: tuple[str, ...] | None
    horizon: int | None
    strategy: str | None
    known: tuple[str, ...]
    quantiles: tuple[float, ...]
    lags: tuple[int, ...] | None = ()  # None: those of a short series, by its season

    def check(self, kind: str | None) -> None:
        """Refuse options that do not belong together, and all of them if kind is not "next"."""
        asked = {
            "horizon": self.horizon,
            "strategy": self.strategy,
            "known": self.known or None,
            "quantiles": self.quantiles or None,
            "lags": self.lags or None,
        }
        for name, value in asked.items():
            if value is not None and kind != "next":
                raise ConfigError(f"--{name} is for forecasts: pass --kind next.")
        if self.horizon is not None:
            whole_number("--horizon", self.horizon, most=MOST_AHEAD)
        if self.strategy is not None:
            check_choice("strategy", self.strategy, STRATEGIES)
        if self.strategy == "direct" and self.horizon is None:
            raise ConfigError("--strategy direct predicts several steps at once: pass --horizon H.")
        levels = list(self.quantiles)
        if levels != sorted(set(levels)) or any(not 0 < level < 1 for level in levels):
            raise ConfigError(
                "--quantiles must be ascending levels between 0 and 1, such as 0.1,0.5,0.9; got "
                f"{','.join(map(str, levels))}."
            )
        if levels and (0.5 not in levels or len(levels) > MOST_QUANTILES):
            raise ConfigError("--quantiles must hold 0.5, which is the forecast itself.")

    @property
    def steps_at_once(self) -> int:
        """The steps that are predicted at once: one unless the strategy is direct."""
        is_direct = self.strategy != "recursive"
        return self.horizon if is_direct and self.horizon is not None else 1

    def features(self, features: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the features to read: those asked for, and what is predicted or known."""
        if features is None:
            return None
        return tuple(dict.fromkeys([*features, *(self.target or ()), *self.known]))

    def columns(self) -> tuple[tuple[str, str], ...]:
        """Return the columns that are predicted or known, each with its option."""
        predicted = [(name, "target") for name in self.target or ()]
        return (*predicted, *((name, "known") for name in self.known))

    def settle(self, first: Sheet) -> dict[str, Any]:
        """Return what is predicted, in plain types for a description; {} if nothing was asked for.

        first: the training file. Columns that it lacks, words to predict, and columns that are both
        known and predicted are refused.
        """
        lags = lags_of_season(first)[0] if self.lags is None else self.lags
        if self._replace(lags=lags) == AheadOptions(None, None, None, (), ()):
            return {}
        numbers = [name for name in first.features if name not in first.categories]
        predicted = self.target
        if predicted is None:
            predicted = tuple(name for name in numbers if name not in self.known)
        for flag, names, fit in (
            ("target", predicted, numbers),
            ("known", self.known, first.features),
        ):
            wrong = [name for name in names if name not in fit]
            if wrong:
                raise DataError(
                    f"{first.path}: --{flag} {quote_names(wrong)}: expected columns of numbers "
                    f"among {quote_names(fit)}."
                )
        both = set(predicted) & set(self.known)
        if both or not predicted:
            raise DataError(
                f"{first.path}: a column is either predicted or known in advance, and one must "
                f"be predicted. Both: {quote_names(sorted(both)) or 'none'}."
            )
        settled: dict[str, Any] = {
            "predicted": list(predicted),
            "horizon": self.steps_at_once,
            "known": list(self.known),
            "quantiles": list(self.quantiles),
            "steps": self.horizon,
        }
        return settled | ({"lags": list(lags)} if lags else {})


def notes_on_lags(asked: AheadOptions, first: Sheet) -> tuple[str, ...]:
    """Return a note on the lags that were chosen for the training file, if they were not given."""
    return lags_of_season(first)[1] if asked.lags is None else ()
