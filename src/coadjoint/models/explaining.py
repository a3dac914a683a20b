"""Explain the predictions of a network for a file: which steps and columns they come from.

found = co.load("runs/waves").explain("new.csv")
print(found.summary())
found.attributions[0]  # [T, columns] of the first sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import (
    DataError,
    InputError,
    KindError,
    brief,
    check_kind,
    choose,
    one_line,
    real,
    whole_number,
)
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..tasks.ahead import ahead_of
from ..tasks.description import Description
from ..tasks.prediction import Prediction, entry_names
from .attribution import (
    METHODS,
    QUANTITIES,
    Attribution,
    Differentiator,
    Quantity,
    at_steps,
    attribute,
)
from .explanation import Explained, Explanation

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class HasNetwork(Protocol):
    """A model: a network, and how data are read and scaled for it."""

    network: Net

    def prepare(self, data: Any, **options: Any) -> Prediction:
        """Read and scale data for the network."""


BASELINES = ("mean", "zero", "first")
SAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class Wish:
    """What is to be explained, and how; the fields are the arguments of `explain`."""

    method: str = "integrated-gradients"
    baseline: str | ArrayLike = "mean"
    output: str | None = None
    quantity: str | None = None
    step: int | None = None
    limit: int | None = None
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        choose("method", self.method, METHODS)
        if isinstance(self.baseline, str):
            choose("baseline", self.baseline, BASELINES)
        if self.output is not None:
            check_kind("output", self.output, str, "the name of a class, a target or a feature")
        if self.quantity is not None:
            choose("quantity", self.quantity, QUANTITIES)
        if self.step is not None and (isinstance(self.step, bool) or type(self.step) is not int):
            raise KindError(f"step must be a whole number; got {brief(self.step)}.")
        if self.limit is not None:
            whole_number("limit", self.limit)
        real("tolerance", self.tolerance, 0, above=True)


def explain(
    model: HasNetwork,
    data: object,
    *,
    method: str = "integrated-gradients",
    baseline: str | ArrayLike = "mean",
    output: str | None = None,
    quantity: str | None = None,
    step: int | None = None,
    limit: int | None = None,
    tolerance: float = 1e-4,
    **options: object,
) -> Explanation:
    """Explain what a trained network says about sequences or samples.

    Args:
        model: The model, by `co.load`.
        data: A path, arrays or a frame.
        method: "integrated-gradients", whose attributions add up to the change of the output from
            the baseline to the input; or "gradient-x-input", one gradient, exact for linear
            networks.
        baseline: The inputs without content, from which the change of an output is explained:
            "mean" (the mean of training, zero in scaled inputs), "zero" (numbers that are 0, no
            word), "first" (each sequence's first row at every step), or scaled inputs of a step or
            sample as an array.
        output: The class to explain, by default the predicted one of each sequence; or one of
            several targets or features, by default the first.
        quantity: Of a class: "log-odds" (log p / (1 - p), the default), "probability" p or "logit",
            the network's pre-output. Numbers are explained in their units.
        step: With one output for each step: the step to explain, from 0, or from -1 backwards. By
            default the last.
        limit: Explain at most so many sequences or samples, the first of the data.
        tolerance: Points are added to integrated gradients until |sum of attributions - change of
            the output| is below this share of the sum of |attributions|.
        **options: Those of `Model.prepare`.
    """
    wish = Wish(method, baseline, output, quantity, step, limit, tolerance)
    return explain_prediction(model.network, model.prepare(data, **options), wish)


def explain_prediction(net: Net, prediction: Prediction, wish: Wish | None = None) -> Explanation:
    """Explain the outputs of a network for sequences or samples that were read for it."""
    wish = wish or Wish()
    d = prediction.description
    names = output_names(d)
    number = choose_output(d, names, wish.output)
    kind = choose_quantity(d, wish.quantity)
    if wish.step is not None and d.at != "every":
        raise InputError(
            "step is for networks with an output at every step; this one has one output for each "
            f"{prediction.unit}. Leave it out."
        )
    differentiator = Differentiator(net)
    mean, std = (None, None) if d.labels else d.target_scale()
    found: list[Explained] = []
    for first, batch in some_batches(prediction, wish.limit):
        batch = differentiator.read(batch)
        pre_outputs = differentiator.pre_outputs(batch)
        steps = steps_to_explain(prediction, first, batch, wish.step)
        if number is None:  # the class that is predicted
            output = at_steps(pre_outputs, steps).argmax(1)
        else:
            output = torch.full((len(batch.sizes),), number, device=pre_outputs.device)
        quantity = Quantity(kind, output, steps)
        if mean is not None and std is not None and number is not None:
            quantity = quantity._replace(scale=float(std[number]), offset=float(mean[number]))
        start = baseline_inputs(d, batch, wish.baseline)
        result = attribute(differentiator, batch, start, quantity, wish.method, wish.tolerance)
        chosen = [names[k] for k in output.tolist()]
        found += list(split_samples(prediction, first, result, chosen, steps))
    if not found:
        raise DataError(
            f"{one_line(prediction.source, 400)}: no {prediction.unit} has a row without missing "
            "values, so there is nothing to explain."
        )
    notes = list(prediction.notes)
    if len(found) < len(prediction):
        notes.append(
            f"the first {len(found):,} of {len(prediction):,} {prediction.unit}s are explained"
        )
    if number is not None and wish.output is None and len(names) > 1:
        notes.append(
            f"explained is '{one_line(names[number])}', the first of {len(names)} outputs; "
            "name another with --output"
        )
    return Explanation(
        method=wish.method,
        baseline=wish.baseline if isinstance(wish.baseline, str) else "given",
        quantity=kind,
        columns=column_names(d),
        samples=found,
        unit=prediction.unit,
        source=prediction.source,
        notes=tuple(notes),
        by_layer=d.input_shape is not None,
        predicted=number is None,
        at_every=d.at == "every",
        tolerance=wish.tolerance,
        id_name=prediction.cut.sheet.id_column,
        time_name=prediction.cut.sheet.columns.get("time", ""),
    )


def output_names(description: Description) -> list[str]:
    """The names of the outputs: classes, targets, features, or the entries of a sample."""
    if description.kind == "classify":
        return description.labels
    if description.kind == "next":
        return ahead_of(description).output_names
    if description.kind == "reconstruct":
        return entry_names(description)
    return description.targets or ["target"]


def choose_output(description: Description, names: list[str], wanted: str | None) -> int | None:
    """The number of the output to explain; None for the class that is predicted.

    An autoencoder's must be named: none of its outputs comes before the others.
    """
    if wanted is not None:
        if wanted not in names:
            what = "class" if description.labels else "output"
            choose(what, wanted, names[:50])
        return names.index(wanted)
    if description.labels:
        return None
    if description.kind == "reconstruct":
        raise InputError(
            f"an autoencoder has an output for each of {len(names)} inputs: name the one to "
            f"explain with --output, such as --output '{one_line(names[0])}'."
        )
    return 0


def choose_quantity(description: Description, wanted: str | None) -> str:
    """What is explained of the output: one of QUANTITIES for a class, else "value"."""
    if description.labels:
        return wanted or QUANTITIES[0]
    if wanted is not None:
        raise InputError(
            f"quantity '{wanted}' is for classes; this network predicts numbers, which are "
            "explained in their units. Leave it out."
        )
    return "value"


def some_batches(prediction: Prediction, limit: int | None) -> Iterator[tuple[int, Batch]]:
    """The batches of a prediction with the number of their first sample, up to a limit."""
    some = prediction
    if limit is not None and limit < len(prediction):
        some = replace(
            prediction, cut=replace(prediction.cut, pieces=prediction.cut.pieces[:limit])
        )
    first = 0
    for ids, batch in some.batches(SAMPLES_AT_ONCE):
        yield first, batch
        first += len(ids)


def steps_to_explain(
    prediction: Prediction, first: int, batch: Batch, step: int | None
) -> Tensor | None:
    """The step of each sequence whose output is explained, [B]; None for one output each.

    first: the number of the first sequence of the batch. A sequence without such a step is refused.
    """
    if prediction.description.at != "every":
        return None
    wanted = -1 if step is None else step
    sizes = batch.sizes
    steps = torch.full_like(sizes, wanted)
    if wanted < 0:
        steps = sizes + wanted
    outside = torch.nonzero((steps < 0) | (steps >= sizes))
    if len(outside):
        j = int(outside[0])
        raise InputError(
            f"sequence '{one_line(prediction.cut.name(first + j))}' has {int(sizes[j])} steps; "
            f"step {wanted} is not one of them."
        )
    return steps.to(batch.u.device)


def baseline_inputs(description: Description, batch: Batch, baseline: str | ArrayLike) -> Tensor:
    """The scaled inputs at which attributions begin, shaped like those of the batch."""
    u: Tensor = batch.u
    if not isinstance(baseline, str):
        try:
            given = torch.as_tensor(np.asarray(baseline, dtype=np.float64)).to(u)
            return given.expand_as(u).clone()
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                "baseline must be one of mean, zero and first, or the scaled inputs of a step or "
                f"sample, {list(u.shape[1 + (batch.axis != 0) :])}; got {brief(baseline)}."
            ) from None
    if baseline == "mean":
        return torch.zeros_like(u)
    has_time = description.input_shape is None
    if baseline == "first":
        if not has_time:
            raise InputError(
                "baseline 'first' is each sequence's first row; samples have no time. Use 'mean' "
                "or 'zero'."
            )
        return u[:1].expand_as(u).clone()
    zero = torch.as_tensor(zero_inputs(description)).to(u)
    if has_time:
        return zero.expand_as(u).clone()
    places = (description.sample_shape or ())[1:]
    sample = zero.reshape(-1, *(1 for _ in places)).expand(-1, *places)
    return sample.reshape(description.input_shape or ()).expand_as(u).clone()


def zero_inputs(description: Description) -> np.ndarray:
    """The scaled inputs [width] of a row whose numbers are 0, that holds no word and no gap."""
    numbers = []
    scales = zip(description.features, description.mean, description.std, strict=True)
    for name, mean, std in scales:
        if name not in description.categories:
            numbers.append(-mean / std)
    masks = [0.0 for _ in description.masked]
    words: list[float] = []
    for name in description.categories:
        words += description.shares[name]
    gap = description.gap
    gaps = [-gap["mean"] / gap["std"]] if gap else []
    return np.array([*numbers, *masks, *(-share for share in words), *gaps])


def column_names(description: Description) -> list[str]:
    """The columns of the file that the inputs are made from, each once, in order."""
    return list(dict.fromkeys(description.input_columns))


def sum_columns(values: np.ndarray, description: Description) -> np.ndarray:
    """Add up the inputs that come from one column: marks of missing values, words, gaps.

    values: [T, inputs], or of a sample without time its inputs. Returns [T, columns], or
    [columns, ...].
    """
    has_time = description.input_shape is None
    if not has_time:
        places = (description.sample_shape or ())[1:]
        values = values.reshape(description.width, *places)
    names = column_names(description)
    place = [names.index(column) for column in description.input_columns]
    columns_first = values.T if has_time else values
    summed = np.zeros((len(names), *columns_first.shape[1:]))
    np.add.at(summed, place, columns_first)
    return summed.T if has_time else summed


def split_samples(
    prediction: Prediction,
    first: int,
    result: Attribution,
    outputs: list[str],
    steps: Tensor | None,
) -> Iterator[Explained]:
    """What was found for each sample of a batch; first: the number of its first sample."""
    d = prediction.description
    sheet = prediction.cut.sheet
    has_time = d.input_shape is None
    gaps = result.gap.tolist()
    relative = result.relative_gap.tolist()
    entries = result.entries.movedim(result.sample_axis, 0).cpu().numpy()
    for j, output in enumerate(outputs):
        sequence, start, stop = prediction.cut.pieces[first + j]
        length = stop - start
        of_sample = entries[j][:length] if has_time else entries[j]
        costates = result.costates[:, j].cpu().numpy()
        rows = slice(start, stop) if has_time else slice(start, start + 1)
        stamps = None if sheet.stamps is None else sheet.stamps[rows]
        yield Explained(
            name=prediction.cut.name(first + j),
            id=sheet.ids[sequence],
            output=output,
            step=None if steps is None else int(steps[j]),
            value=float(result.value[j]),
            baseline=float(result.baseline[j]),
            gap=gaps[j],
            relative_gap=relative[j],
            nodes=int(result.nodes[j]),
            attributions=sum_columns(of_sample, d),
            costates=costates[: length + 1] if has_time else costates,
            rows=sheet.input_rows[rows],
            first_step=start - int(sheet.starts[sequence]) if has_time else 0,
            times=stamps,
        )
