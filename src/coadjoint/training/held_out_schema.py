"""Schema of held_out.json, which `held_out.collect_held_out` makes."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from .optional_pydantic import Field, model_validator
from .schema_checks import Count, Finite, NonNegative, Schema

MOST_CLASSES = 2000
MOST_OUTPUTS = 1000
MOST_TEXT = 100  # characters of a label, a name, an id or a time
MAX_HELD_OUT_BYTES = 20_000_000

Text = Annotated[str, Field(max_length=MOST_TEXT)]
Column = list[Finite | None]
Share = Annotated[float, Field(ge=0, le=1)]


class OutputErrors(Schema):
    """The errors of one output, as `held_out.measure_errors` says."""

    count: Count
    mae: NonNegative | None = None
    rmse: NonNegative | None = None
    mean: Finite | None = None
    r2: Finite | None = None


class KeptAnswers(Schema):
    """Targets and predictions by output: those of one sequence after another.

    lengths: the targets of each sequence. first: the row of its series at which they begin.
    """

    ids: list[Text]
    series: list[Text]
    first: list[Count]
    lengths: list[Count]
    times: list[Text]
    true: list[Column]
    predicted: list[Column]
    probability: list[Share]

    @model_validator(mode="after")
    def columns_fit(self) -> KeptAnswers:
        """Refuse columns that have not as many entries as there are sequences, or targets."""
        n = len(self.ids)
        targets = sum(self.lengths)
        are_named = len(self.lengths) == n
        for names in (self.series, self.first):
            are_named = are_named and len(names) in (0, n)
        are_full = len(self.true) == len(self.predicted) > 0
        for column in (*self.true, *self.predicted):
            are_full = are_full and len(column) == targets
        for values in (self.times, self.probability):
            are_full = are_full and len(values) in (0, targets)
        if not are_named or not are_full:
            raise ValueError("the columns should have an entry for each sequence, or target")
        return self


class HeldOutSplit(Schema):
    """What the network says about one held-out set."""

    sequences: Count
    targets: Count
    confusion: list[list[Count]]
    uncounted: Count
    errors: list[OutputErrors]
    kept: KeptAnswers


class HeldOutSchema(Schema):
    """held_out.json."""

    advice: ClassVar[str] = "Delete it: the page then does without."
    format: Literal[1]
    step: Count
    kind: Literal["classify", "regress", "next", "reconstruct"]
    at: Literal["last", "every"]
    labels: Annotated[list[Text], Field(max_length=MOST_CLASSES)]
    outputs: Annotated[list[Text], Field(max_length=MOST_OUTPUTS)]
    splits: dict[Text, HeldOutSplit]

    @model_validator(mode="after")
    def classes_and_outputs_are_known(self) -> HeldOutSchema:
        """Refuse classes without a label, counted twice, and columns without a name."""
        K = len(self.labels)
        if (K > 0) != (self.kind == "classify"):
            raise ValueError("there should be labels of classes, and of nothing else")
        width = 1 if K else len(self.outputs)
        for split in self.splits.values():
            pairs = sorted(row[:2] for row in split.confusion)
            for row in split.confusion:
                if len(row) != 3 or max(row[:2]) >= K:
                    raise ValueError("confusion should have rows of two classes and a count")
            if any(one == other for one, other in pairwise(pairs)):
                raise ValueError("confusion should count each pair of classes once")
            if len(split.kept.true) != width or len(split.errors) != (0 if K else width):
                raise ValueError("there should be a column for each output")
            if K and any(not is_class(x, K) for x in classes_in(split.kept)):
                raise ValueError("true and predicted should be numbers of classes")
        return self


def classes_in(kept: KeptAnswers) -> list[float | None]:
    """All classes that were kept, true ones and predicted ones."""
    return [*kept.true[0], *kept.predicted[0]]


def is_class(value: float | None, classes: int) -> bool:
    """Whether a value is the number of a class, or missing."""
    return value is None or (value == int(value) and 0 <= value < classes)
