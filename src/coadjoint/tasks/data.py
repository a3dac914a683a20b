"""Data: your own sequences or samples as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from ..errors import InputError, whole_number
from ..objectives.batch import Batch
from .ahead import AheadOptions, from_json, lag_list, level_list, notes_on_lags
from .class_weights import ClassWeight, class_weights, describe_weights, weigh_classes
from .cutting import count_copies, cut_into_chunks, cut_into_pieces, refuse_overlap, slide_windows
from .denoising import draw_noise, noisy_copies
from .description import (
    FORMAT_OPTIONS,
    ColumnNames,
    Description,
    JsonDict,
    Option,
    SampleDescription,
)
from .encoding import (
    align_categories,
    check_encoding_options,
    measure_encodings,
    notes_on_encodings,
    notes_on_words,
    refuse_unfit_words,
)
from .files.packed import table_stem
from .files.sheet import Options
from .filling import fill_gaps
from .frames import Given
from .judging import JudgedCollection, mask_missing_targets
from .memory import InMemory, Source, source_of
from .new_data import read_new
from .option_checks import (
    check_choice,
    check_noise,
    check_stride,
    check_window,
    refuse_options_of_time,
)
from .overview import Overview, make_overview, said_by_counts
from .prediction import Prediction
from .preparation import (
    check_target,
    choose_readout,
    column_names,
    encode_labels,
    kind_of,
    labels_in,
    notes_on_single_rows,
    read_all,
)
from .prepared import settle_reading
from .scaling import features_with_gaps, measure_scale, notes_on_constants
from .sets import digests_of, make_sets
from .shares import divide
from .stored_sets import StoredPieces
from .symbol_sets import SymbolPieces
from .symbols import read_symbols
from .task import Index, Samples, Sequences


class Data(JudgedCollection):
    """Sequences or samples from files: classification, regression, or the next step.

    kind "classify"  labels are the sorted words of the target column; softmax, cross-entropy
    kind "regress"   one output for each target, learned in units of its standard deviation and
                     scored in its own units
    kind "next"      u_1..u_{T-1} are inputs and u_2..u_T targets
    kind "reconstruct"  samples without time, as vectors, are inputs and targets: for autoencoders
    at "last"        one target for each sequence, that of its last row; "every": one for each row
    notes            what was chosen for the user: columns, rows left out, constant features
    noise            with kind "reconstruct", the standard deviation of the noise on the inputs, as
                     in `Denoising`
    overview         what was read: rows, features, classes, gaps, splits; `summary` is its text
    shares           of train, valid and test in the training file; beside a held-out file of train
                     and of the part without one; None if there is nothing to split
    """

    shares: tuple[float, ...] | None = None
    overview: Overview | None = None

    def __init__(
        self,
        sets: Mapping[str, Sequences | Samples],
        description: Description,
        notes: tuple[str, ...],
        name: str,
        noise: float = 0.0,
        metrics: ColumnNames = None,
        class_weight: ClassWeight = None,
    ) -> None:
        self.name = name
        self.notes = notes
        self.inputs = description.inputs
        self.shape = description.input_shape
        self.readout = description.at
        # The mean over steps, so that long sequences count no more than short ones.
        self.reduce = "mean" if self.readout == "every" else "sum"
        self.noise = noise
        super().__init__(sets, description, metrics)
        self.class_weights = class_weights(class_weight, description.labels, sets["train"])
        if self.class_weights is not None:
            self.notes = (*notes, describe_weights(description.labels, self.class_weights))

    def summary(self, width: int = 100) -> str:
        """Return what was read as a few lines of text; `overview.to_dict()` has it as JSON types.

        width: the characters of a line.
        """
        return "" if self.overview is None else self.overview.text(width)

    def cut_training(self, chunk: int) -> None:
        """Cut the training sequences into pieces of at most `chunk` steps, each with its targets.

        Only a network that answers at every step can be trained on them. Held-out sequences stay
        whole, and so does what is predicted later: the state is carried through it.
        """
        train = self.sets["train"]
        if not isinstance(train, Sequences) or train.y is None or self.readout != "every":
            raise InputError("only sequences with a target at every step can be cut.")
        self.uncut = train if self.uncut is None else self.uncut
        if isinstance(train.u, StoredPieces | SymbolPieces):
            self.sets["train"] = train.u.chunked(whole_number("chunk", chunk))
        else:
            self.sets["train"] = cut_into_chunks(train, chunk)
        self.size = len(self.sets["train"])

    def describe(self) -> JsonDict:
        """Return the description in plain JSON types; `Data.for_prediction` reads it back."""
        return asdict(self.description)

    @classmethod
    def read(
        cls,
        train: Source,
        *,
        valid: Source | None = None,
        test: Source | None = None,
        split: Sequence[float] | None = None,
        seed: int = 0,
        id: str | None = None,
        time: str | None = None,
        target: ColumnNames = None,
        features: ColumnNames = None,
        kind: str | None = None,
        at: str | None = None,
        window: int | None = None,
        standardise: bool = True,
        missing: str = "refuse",
        irregular: str = "refuse",
        categorical: ColumnNames = None,
        gaps: bool = False,
        dates: str | None = None,
        overlap: str = "refuse",
        sep: str | None = None,
        decimal: str = ".",
        thousands: str = "",
        header: bool = True,
        dtype: str = "float32",
        max_bytes: int = 4 << 30,
        rows: str = "steps",
        noise: float = 0.0,
        wide: bool = False,
        metrics: ColumnNames = None,
        class_weight: ClassWeight = None,
        horizon: int | None = None,
        strategy: str | None = None,
        known: ColumnNames = None,
        quantiles: float | Sequence[float] | None = None,
        stride: int | None = None,
        lags: int | str | Sequence[int] | None = None,
        text: bool | None = None,
    ) -> Data:
        """Read files (.csv .tsv .txt .parquet .pq .arrow .feather .npz .npy .ts) into a task.

        Tables in text may be compressed (.csv.gz, .csv.zst).

        train         the file of training sequences
        valid, test   files of held-out sequences
        split, seed   the shares of train, valid and test in `train`, and the seed of the split. By
                      default 0.8, 0.1, 0.1; beside a file `test` 0.8, 0.2, 0; beside a file `valid`
                      all is for training. A part with a file must have share 0. See `tasks.shares`
        window        the rows of the pieces that sequences are cut into; one long sequence is then
                      split in order of time
        standardise   scale inputs and real targets to mean 0 and standard deviation 1
        missing       "refuse" missing values, "drop" their rows, "ffill" them with the row before,
                      or "mask" them: zero, and another input is 1 there
        irregular     "refuse" or "allow" unequal time steps
        categorical   features that hold words, or "auto" for every one that does: an input for each
                      word
        gaps          whether the time since the row before is an input; allows unequal time steps
        overlap       "refuse" or "allow" sequences that are in two files
        dtype         "float32" or "float64"
        rows          "steps" of sequences; or "samples", for a network without time: a row of a
                      table is a sample, an .npz holds x (n, ...) and y, and a folder of images
                      with a sub-folder for each class is read too. Features, or the channels of
                      samples (channels, ...), are standardised each
        noise         with kind "reconstruct", which needs rows "samples" and no target: the
                      standard deviation of Gaussian noise on the inputs, in their units after
                      scaling
        wide          the tables have one row for each sequence, and a column for each time step of
                      its one feature; a shorter sequence ends in empty cells
        metrics       what to report besides the default metrics: names of tasks.metrics
        class_weight  weights of the classes in the loss of training: "balanced", "a=2,b=1" or a
                      dict; see tasks.class_weights. Held-out losses are without weights
        horizon, strategy, known, quantiles, lags    what kind "next" predicts: see tasks.ahead
        stride        the rows from one training window to the next (None: `window`)
        text          with kind "next", whether the files are texts whose next character is to be
                      predicted; None: if they are called .txt and hold no table

        The other arguments are those of tasks.files.sheet.Options.
        """
        given: JsonDict = dict(locals())  # every argument by its name
        paths = {"train": train, "valid": valid, "test": test}
        symbols = read_symbols(paths, given)
        if symbols is not None:
            data = cls(*symbols.parts, 0.0, metrics, class_weight)
            data.shares = symbols.shares
            data.overview = symbols.overview
            return data
        check_choice("irregular", irregular, ("refuse", "allow"))
        check_choice("overlap", overlap, ("refuse", "allow"))
        check_choice("dtype", dtype, ("float32", "float64"))
        settled_reading = settle_reading(train, kind, missing, irregular)
        if settled_reading is not None:
            kind, missing, irregular, stored = settled_reading
            wide = wide or bool(stored.get("wide"))
        asked = AheadOptions(
            column_names(target) if kind == "next" else None,
            horizon,
            strategy,
            column_names(known) or (),
            level_list(quantiles),
            lag_list(lags),
        )
        asked.check(kind)
        check_window(window, kind, asked.steps_at_once + 1)
        check_stride(stride, window)
        categorical = column_names(categorical) or ()
        check_encoding_options(categorical, gaps, kind, rows, wide)
        if gaps:
            irregular = "allow"
        if rows == "samples":
            refuse_options_of_time(
                time=time, at=at, window=window, kind=kind, missing=missing, irregular=irregular
            )
            time, at = "", "last"
        check_noise(noise, kind, missing)
        read_by = given if settled_reading is None else settled_reading.reading
        reading: JsonDict = {key: read_by.get(key) for key in FORMAT_OPTIONS}
        reading["missing"] = missing
        target = None if kind == "next" else column_names(target)
        features = asked.features(column_names(features))
        # To reconstruct, as to predict the next step, no target is read.
        reads = "next" if kind == "reconstruct" and rows == "samples" else kind
        options = Options(
            id,
            time,
            target,
            features,
            reads,
            at,
            max_bytes=max_bytes,
            rows=rows,
            categorical=categorical,
            wide=wide,
            ahead=asked.columns(),
            **reading,
        )
        sheets = align_categories(read_all(paths, options))
        first = sheets["train"]
        reading["dates"] = first.columns.get("dates", dates)  # as the column tells
        refuse_unfit_words(first, reads, categorical)
        if wide:
            reading |= {"wide": True, "steps": list(first.steps)}
        if kind is None:
            kind = kind_of(first)
        labels: list[str] = []
        if kind == "classify":
            labels = labels_in(first)
            sheets = {name: encode_labels(sheet, labels) for name, sheet in sheets.items()}
            first = sheets["train"]
        settled = asked.settle(first)
        at = choose_readout(sheets["train"], kind, at)
        check_target(sheets["train"], kind, labels)
        cuts = {}
        for name, sheet in sheets.items():
            filled = fill_gaps(sheet, kind, at, missing, irregular)
            cuts[name] = cut_into_pieces(filled, kind, at, window, missing, asked.steps_at_once)
        if overlap == "refuse":
            refuse_overlap(cuts)
        notes = [*first.notes, *notes_on_single_rows(first), *notes_on_lags(asked, first)]
        for name, cut in cuts.items():
            notes += cut.sheet.notes[len(sheets[name].notes) :]  # on gaps that were dealt with
            notes += cut.notes
        stratify = kind == "classify" and at == "last"
        division = divide(cuts, split, seed, stratify, at)
        parts = division.parts
        notes += division.notes
        copies = count_copies(parts)
        if copies:
            unit = first.unit
            notes.append(f"{copies} held-out {unit}s have the same inputs as a training {unit}")
        parts["train"] = slide_windows(parts["train"], window, stride)
        scale = measure_scale(first, parts["train"], kind, at, standardise)
        if settled:
            scale = from_json(settled).widen(scale, first.features)
        notes += notes_on_constants(scale.constant, first)
        encodings = measure_encodings(parts["train"], standardise, gaps)
        description = Description(
            kind=kind,
            at=at,
            features=list(first.features),
            targets=list(first.targets),
            labels=labels,
            mean=scale.mean,
            std=scale.std,
            target_mean=scale.target_mean,
            target_std=scale.target_std,
            masked=features_with_gaps(first, cuts) if missing == "mask" else [],
            named=first.has_names,
            columns={"id": first.columns.get("id", ""), "time": first.columns.get("time", "")},
            window=window,
            dtype=dtype,
            reading={**reading, "irregular": irregular},
            files=digests_of(paths, sheets),
            ahead=settled,
            **encodings._asdict(),
        )
        if first.shape is not None:
            description = SampleDescription(**vars(description), shape=list(first.shape))
        notes += notes_on_encodings(cuts["train"].sheet, description)
        for cut in cuts.values():
            notes += notes_on_words(cut.sheet, description)
        # What was read is looked at before inputs take its place in memory.
        overview = make_overview(sheets, cuts, parts, description, ())
        sets = make_sets(cuts, parts, description)
        if noise:
            sets = {name: noisy_copies(clean, noise, name) for name, clean in sets.items()}
        name = "data" if isinstance(train, InMemory) else table_stem(train)
        notes = list(dict.fromkeys(notes))
        data = cls(sets, description, tuple(notes), name, noise, metrics, class_weight)
        data.shares = division.shares
        said = said_by_counts(sheets, cuts)
        data.overview = replace(overview, notes=[note for note in data.notes if note not in said])
        return data

    @classmethod
    def of(
        cls,
        inputs: Given,
        targets: Given = None,
        *,
        valid: Given = None,
        test: Given = None,
        lengths: Given = None,
        ids: Given = None,
        times: Given = None,
        **options: Option,
    ) -> Data:
        """Make a task from arrays, lists, tensors or frames in memory.

        Example: 20 sequences of 12 steps and 2 features, in two classes.
            >>> import numpy as np
            >>> import coadjoint as co
            >>> inputs = np.random.default_rng(0).normal(size=(20, 12, 2))
            >>> labels = np.where(inputs.sum((1, 2)) > 0, "up", "down")
            >>> task = co.tasks.Data.of(inputs, labels, kind="classify")
            >>> task.inputs, task.description.labels, task.size
            (2, ['down', 'up'], 16)

        Args:
            inputs: [n, T, C] (sequences, steps, features), [n, T] for one feature, a list of
                [T_i, C] or [T_i], or [T] for one sequence; with rows="samples" [n, ...]. Or a
                frame of pandas, polars or pyarrow, or a dictionary of columns: a long table, with
                wide=True one with a row for each sequence. A path is read as `Data.read` does.
            targets: [n] or [n, k]; for each step [n, T], [n, T, k] or a list of [T_i] or [T_i, k].
                Classes may be words, whole numbers or truth values. Of a frame they are a column,
                or as many values as it has rows.
            valid: Held-out data: (inputs, targets), inputs alone, a frame or a path.
            test: The same for the test set.
            lengths: [n], the steps of each sequence, if inputs are padded or one after the other.
            ids: [n], names of the sequences. Of a frame, id= names the column.
            times: Numbers or dates: [T], [n, T] or a list of [T_i]. Of a frame, time= names the
                column.
            **options: Those of `Data.read`: kind, at, split, missing, ... Names of the features of
                arrays are features=["a", "b"].
        """
        beside = {"targets": targets, "lengths": lengths, "ids": ids, "times": times}
        return cls.read(
            source_of(inputs, "inputs", **beside),
            valid=None if valid is None else source_of(valid, "valid"),
            test=None if test is None else source_of(test, "test"),
            **options,
        )

    @staticmethod
    def for_prediction(
        description: JsonDict,
        path: Given,
        *,
        keep: ColumnNames | bool = None,
        whole: bool = False,
        lengths: Given = None,
        ids: Given = None,
        times: Given = None,
        **reading: Option,
    ) -> Prediction:
        """Read new sequences for a network whose data had this description.

        Columns are matched by name.

        Args:
            description: The description, by `describe`.
            path: A file, or arrays or a frame as in `Data.of`.
            keep: Columns of the file to copy beside the predictions; True for all.
            whole: Read each sequence as a whole where the network was trained on windows with one
                target each.
            **reading: Options that differ in this file: id, time, sep, decimal, thousands, header,
                dates, missing, irregular, max_bytes.
            lengths: Those of padded sequences, as in `Data.of`.
            ids: Names of the sequences in arrays.
            times: Times of the steps in arrays.
        """
        beside = {"lengths": lengths, "ids": ids, "times": times}
        source = source_of(path, "data", **beside)
        return read_new(description, source, keep=keep, whole=whole, **reading)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Return training batch number `step`, with class weights or noise if there are any."""
        batch = super().batch(step, size, seed)
        if self.class_weights is not None:
            return weigh_classes(batch, self.class_weights, self.readout == "every")
        return draw_noise(batch, self.noise, step, seed) if self.noise else batch

    def _batch_of(self, split: str, index: Index) -> Batch:
        """Return the sequences as a batch; missing targets (NaN, class -1) get weight 0."""
        batch = super()._batch_of(split, index)
        may_lack_targets = self.description.reading["missing"] == "mask"
        if self.description.symbols:  # those that training did not know are no targets
            may_lack_targets = bool((batch.y < 0).any())
        is_masked = self.readout == "every" and may_lack_targets
        return mask_missing_targets(batch) if is_masked else batch
