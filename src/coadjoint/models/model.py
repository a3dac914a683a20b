"""Model: a trained network with the description of its data; load: the model of a run folder.

model = co.load("runs/waves")
model.predict("new.csv")
model.predict(arrays)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import DataError, InputError, KindError, brief
from ..networks.interface import Net
from ..networks.sampling import Sampling
from ..tasks.ahead import ahead_of
from ..tasks.data import Data
from ..tasks.description import Description, JsonDict, Option, PathLike
from ..tasks.frames import Given
from ..tasks.memory import Source, source_of
from ..tasks.new_data import read_new
from ..tasks.prediction import Prediction
from ..training.generation import generate, join_symbols, split_prime
from ..training.predict import compute_outputs, load_best, with_note_on_windows
from ..training.report.text import plural
from .answers import Answers, arrange, decide, labels_of, probabilities
from .arguments import errors_name_arguments
from .continuing import check_network
from .evaluating import LEVEL, RESAMPLES, Assessment, assess
from .explaining import explain
from .explanation import Explanation
from .export import Exported, export_network, files_of, refuse_model
from .forecast import Forecast
from .forecasting import forecast_series
from .held_out_rows import held_out_rows
from .rolling import Rolling, roll
from .stepping import Row, StepAnswer, StepState, step
from .trained_on import note_on_training

USUAL_STEPS = 12  # of a forecast


class Model:
    """A trained network, with what it must know about its data: scales, labels, columns.

    network      in evaluation mode
    description  tasks.description.Description: kind, at, features, labels, scales, ...
    settings     those of training, as its config.yaml has them; {} if they are not known
    folder       the run folder that it was loaded from; None if there is none

    Data are a path, arrays or a frame, as in `tasks.Data.of`: [n, T, C], [n, T], a list of [T_i,
    C], samples [n, ...]; a frame of pandas, polars or pyarrow, or a dictionary of columns. Columns
    of tables are matched by name, those of arrays by position. Values are in their own units: they
    are scaled here as in training. Options `reading` say what differs in the data, as in
    `Data.for_prediction`: missing="drop", id="name", ..., and lengths, ids and times of arrays.

    Example:
        >>> import numpy as np, coadjoint as co
        >>> inputs = np.random.default_rng(0).normal(size=(20, 12, 2))
        >>> task = co.tasks.Data.of(inputs, inputs.sum(1), kind="regress", at="last")
        >>> net = co.Network("gru", inputs=2, hidden=4, outputs=2)
        >>> model = co.Model(net, task)
        >>> model.predict(inputs).shape
        (20, 2)
    """

    def __init__(
        self, network: Net, description: Description | Data | JsonDict, settings: Option = None
    ) -> None:
        """Make a model of a network and the task it was trained on, or its description."""
        if not isinstance(network, Net):
            raise KindError(f"network must be a network, such as co.Network; got {brief(network)}.")
        if isinstance(description, Data):
            description = description.description
        if not isinstance(description, Description):
            description = Description.of(description)
        expected = {
            "inputs": description.inputs,
            "outputs": description.outputs,
            "readout": description.at,
        }
        for name, value in expected.items():
            if getattr(network, name) != value:
                raise InputError(
                    f"the network has {name} {getattr(network, name)!r} and its data need "
                    f"{value!r}."
                )
        self.network = network.eval()
        self.description = description
        self.settings: JsonDict = dict(settings or {})
        self.folder: Path | None = None

    def __repr__(self) -> str:
        d = self.description
        what = "of sequences" if d.sample_shape is None else "of samples"
        features = plural(len(d.features), "feature")
        return f"Model({d.kind} at {d.at} {what}, {features}, {self.network!r})"

    @property
    def labels(self) -> list[str] | list[int]:
        """The classes in the order of the outputs: whole numbers if all are, else words."""
        return labels_of(self.description)

    @property
    def features(self) -> list[str]:
        """The columns that the network reads, in the order of arrays."""
        return list(self.description.features)

    def prepare(
        self,
        data: Given,
        *,
        whole: bool = False,
        lengths: Given = None,
        ids: Given = None,
        times: Given = None,
        **reading: Option,
    ) -> Prediction:
        """Read and scale data for the network.

        Args:
            data: A path, arrays or a frame.
            whole: Read each sequence as a whole where training had windows with one target each.
            lengths: [n], the steps of each sequence, if arrays are padded or one after the other.
            ids: [n], names of the sequences in arrays.
            times: Times of the steps in arrays: [T], [n, T] or a list of [T_i].
            **reading: Options that differ: id, time, sep, decimal, thousands, header, dates,
                missing, irregular, max_bytes.
        """
        beside = {"lengths": lengths, "ids": ids, "times": times}
        source = source_of(data, "data", **beside)
        return self._prepare(source, whole=whole, **reading)

    def _prepare(self, source: Source, **reading: Option) -> Prediction:
        """Return what `prepare` does, of a source."""
        with errors_name_arguments():
            prediction = read_new(self.description, source, **reading)
        return with_note_on_windows(self.network, prediction)

    def outputs(self, prediction: Prediction) -> Iterator[Tensor]:
        """Yield the pre-outputs a of one batch after another.

        They are [B, outputs], or at every step [T, B, outputs] with padding. The state is carried
        through each sequence; long ones run in parts.
        """
        return compute_outputs(self.network, prediction)

    def predict(self, data: Given, **options: Option) -> Answers:
        """Return labels, or numbers in their units.

        Of arrays: one for each sequence or sample, [n], or [n, k] for k numbers; at every step (and
        for each window, if training had windows with one target each) an array for each sequence,
        [n, T, ...] as one array if `data` is one. Of a frame or a file: one for each row that the
        table of predictions has, in its order, which with a target at every step are all rows. A
        label is None, and a number NaN, where a value is missing that missing="drop" leaves out.

        Args:
            data: A path, arrays or a frame.
            **options: Those of `prepare`.
        """
        return self._answer(data, options, self._decide)

    def predict_proba(self, data: Given, **options: Option) -> Answers:
        """Return the probability of each class, in the order of `labels`; else as `predict`."""
        if self.description.kind != "classify":
            raise InputError(
                f"a model of kind '{self.description.kind}' has no probabilities; use predict."
            )
        return self._answer(data, options, probabilities)

    def table(self, data: Given, **options: Option) -> dict[str, Sequence[object] | np.ndarray]:
        """Return the predictions as a dictionary of columns, those of `coadjoint predict`.

        They are row, step, id and time, as far as the data have them, prediction and the
        probabilities: `pandas.DataFrame(model.table(frame))`. Arguments are those of `predict`.
        """
        prediction = self.prepare(data, **options)
        return {column.name: column.values for column in prediction.table(self.outputs(prediction))}

    def export(self, path: PathLike, to: str = "onnx") -> Exported:
        """Write the network for other programs, with its scaling and its labels.

        Returns what was written, and how far its outputs are from those of the network.

        Args:
            path: The file to write; with to="torch" two files, path.py and path.safetensors.
            to: "onnx", or "torch" for Python code that needs torch alone.
        """
        if self.folder is not None:
            refuse_model(self.folder, files_of(path, to))
        return export_network(self.network, self.description, path, to)

    def forecast(
        self,
        data: Given,
        steps: int | None = None,
        level: float = 0.9,
        *,
        seed: int = 0,
        **options: Option,
    ) -> Forecast:
        """Continue each series by `steps` steps, with intervals that are to hold a share `level`.

        Needs a model of kind "next". Each step is fed back to predict the next; see
        `models.forecasting`.

        Args:
            data: A path, arrays or a frame.
            steps: How many steps; by default the --horizon of training, or 12.
            level: The share of values that the intervals are to hold, in (0, 1).
            seed: Of the paths whose quantiles are the intervals.
            **options: Those of `prepare`.
        """
        check_network(self.network, self.description)
        prediction = self.prepare(data, **options)
        held_out = held_out_rows(self.folder, prediction.cut.sheet, ahead_of(self.description))
        steps = self._steps(steps)
        return forecast_series(self.network, prediction, steps, level, seed, held_out)

    def roll(
        self,
        data: Given,
        steps: int | None,
        origins: int,
        level: float = 0.9,
        *,
        season: int | None = None,
        seed: int = 0,
        **options: Option,
    ) -> Rolling:
        """Forecast from the last `origins` possible rows of each series, and measure the errors.

        Beside the network stand forecasts without one: naive, seasonal naive, drift and AR.

        Args:
            data: A path, arrays or a frame.
            steps: The steps of each forecast; None is as in `forecast`.
            origins: How many rows of each series are forecast from.
            level: The share of values that the intervals are to hold.
            season: The rows of a season; None guesses it.
            seed: Of the intervals.
            **options: Those of `prepare`.
        """
        check_network(self.network, self.description)
        prediction = self.prepare(data, **options)
        held_out = held_out_rows(self.folder, prediction.cut.sheet, ahead_of(self.description))
        steps = self._steps(steps)
        return roll(self.network, prediction, steps, origins, level, seed, season, held_out)

    def _steps(self, steps: int | None) -> int:
        """Return how many steps to forecast."""
        return ahead_of(self.description).steps or USUAL_STEPS if steps is None else steps

    def evaluate(
        self,
        data: Given,
        targets: Given = None,
        *,
        resamples: int = RESAMPLES,
        level: float = LEVEL,
        seed: int = 0,
        **options: Option,
    ) -> Assessment:
        """Return all metrics on labelled data, of each class or target too, with intervals.

            model.evaluate(frame).metrics["accuracy"].low

        The first of its notes says so if these are the data of training.

        Args:
            data: A path, arrays or a frame.
            targets: Those of arrays; of a path or a frame they are columns, which `target` names if
                they are called otherwise than in training.
            resamples: Of the bootstrap for the intervals; 0 leaves them out.
            level: Of the intervals.
            seed: Of the resamples.
            **options: Those of `prepare`, and target.
        """
        options = dict(options)
        beside = {name: options.pop(name, None) for name in ("lengths", "ids", "times")}
        source = source_of(data, "data", targets=targets, **beside)
        prediction = self._prepare(source, labelled=True, in_parts=True, **options)
        a = prediction.collect(self.outputs(prediction))
        found = assess(prediction, a, resamples=resamples, level=level, seed=seed)
        note = note_on_training(prediction, self.settings)
        return found if note is None else replace(found, notes=(note, *found.notes))

    def sample(
        self,
        prime: str | Sequence[str] | None = None,
        length: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        count: int = 1,
    ) -> list[str]:
        """Return `count` texts that begin with the prime and go on as the network writes them.

        Needs a model of symbols: of a text, or of a column of words (kind "next"). Of words the
        texts have commas between them, and the prime may be a list.

        Args:
            prime: What the network reads first; None: a line feed, or the first symbol it knows.
            length: The symbols to write after it.
            temperature: Below 1 probable symbols become more so; 0 takes the most probable one.
            top_k: Draw from this many of the most probable symbols.
            top_p: Draw from the fewest of them that have this probability together.
            seed: Of the draws. Text i depends on the seed and on i, not on `count`.
            count: How many texts.
        """
        d = self.description
        sampling = Sampling(temperature, top_k, top_p)
        drawn = generate(self.network, d, prime, length, sampling, seed, count)
        first = [] if prime is None else split_prime(prime, d)
        return [join_symbols([*first, *symbols], d) for symbols in drawn]

    def step(
        self, row: Row, state: StepState | None = None, time: Given = None
    ) -> tuple[StepAnswer, StepState | None]:
        """Return (the answer to the rows so far, the state after this row).

            answer, state = model.step(first)
            answer, state = model.step(second, state)

        The value of the answer is that of `predict` for the rows so far, read as one sequence. A
        row that lacks a value is left out if training left such rows out: its value is None. With
        windows of training the state is carried on, as in `predict` with whole=True. Networks that
        read in both directions, or all rows at once, are refused.

        Args:
            row: The values of the features in their own units: a dictionary by name, a row of a
                frame, or as many values as there are features, in their order.
            state: That after the row before; None at the first row.
            time: Of this row, if the network reads the time since the row before; by default the
                time column of a dictionary.
        """
        return step(self.network, self.description, row, state, time)

    def explain(self, data: Given, **options: Option) -> Explanation:
        """Return which steps and columns the predictions come from.

        Args:
            data: A path, arrays or a frame.
            **options: method, baseline, output, quantity, step, limit and tolerance as in
                `models.explaining.explain`, and those of `prepare`.
        """
        return explain(self, data, **options)

    def _answer(
        self, data: Given, options: JsonDict, decide: Callable[[np.ndarray], np.ndarray]
    ) -> Answers:
        """Return what `decide` makes of pre-outputs [M, outputs], in the form of the data."""
        options = dict(options)
        beside = {name: options.pop(name, None) for name in ("lengths", "ids", "times")}
        source = source_of(data, "data", **beside)
        prediction = self._prepare(source, **options)
        a = prediction.spread(prediction.collect(self.outputs(prediction)))
        return arrange(decide(a), prediction, source)

    def _decide(self, a: np.ndarray) -> np.ndarray:
        """Return labels or numbers of pre-outputs [M, outputs]."""
        return decide(a, self.description)


def load(
    run: PathLike, warn: Callable[[str], None] = warnings.warn, network: Net | None = None
) -> Model:
    """Return the model of a run folder, or of a model.safetensors, with scales and labels.

    A run that has not finished is loaded with its best weights so far, and `warn` is told so. A run
    of a built-in task is refused: it has no data to describe. The file may come from a stranger:
    nothing in it is executed.

    Example: a run from Python, whose network must be built again.
        >>> import tempfile, numpy as np, coadjoint as co
        >>> inputs = np.random.default_rng(0).normal(size=(20, 12, 2))
        >>> task = co.tasks.Data.of(inputs, inputs[:, 0, 0] > 0, kind="classify")
        >>> net = co.Network("gru", inputs=2, hidden=4, outputs=2, output="softmax")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = co.train(net, task, steps=2, folder=f"{folder}/run")
        ...     model = co.load(f"{folder}/run", network=net)
        >>> model.predict(inputs[:3]).shape, model.labels
        ((3,), ['False', 'True'])

    Args:
        run: The folder of `coadjoint train`, or its model.safetensors.
        warn: Called with a message about a run that has not finished, or an old file.
        network: One to load the weights into, for a run of `co.train`, whose files describe its
            data but not its network.
    """
    net, description = load_best(run, warn, network)
    if description.get("data") is not None:
        model = Model(net, description["data"], description.get("settings"))
        model.folder = Path(run) if Path(run).is_dir() else None
        return model
    if description.get("task") is None:
        raise DataError(
            f"{run} was trained from Python and does not describe its data. Make the model from "
            "the task: co.Model(net, task)."
        )
    raise DataError(
        f"{run} was trained on task '{description['task']}', not on your own data, so it knows no "
        "columns or symbols. In Python, coadjoint.training.predict.load_model returns its network."
    )
