"""Read what run folders hold, however damaged: each fault becomes a sentence on the page."""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...errors import CoadjointError, MissingError, StorageError, check_path
from .. import files, schemas, settings, storage
from ..metric_names import metric_stem, split_metric
from .curves import TRAINING_KEYS, ColumnPair, Curve, CurveStore
from .text import (
    Row,
    clean,
    duration,
    finite_or_nan,
    parse_goal,
    plural,
    short_number,
)
from .wording import DEPTH_WORDS, TIME_WORDS, PageWords

MAX_FILE_BYTES = 200_000_000  # of a file that is read at once
MAX_LINE_BYTES = 4 << 20  # of a line of a file that is read line by line
NOT_METRICS = ("kind", "split", "step", "sequences")
PROBED = ("t", "log10_costates", "temporal")
MAP_PARAMETER = re.compile(r"maps\.(\d{1,4})\.(.+)")
MAX_LAYER_NORMS = 20_000  # parameters of maps: a damaged file must not fill the memory
MAX_LAYER_NAMES = 2000
MAX_LAYER_NAME = 60  # characters
MAX_NORM_CURVES = 8  # of a chain: with more parameters they are kept by layer


LayerNorms = dict[str, dict[int, ColumnPair]]


def scan_rows(path: Path, faults: list[str], word: str = "") -> Iterator[Row]:
    """The objects of a JSON-lines file, from the lines that contain `word`; "" takes all.

    Other lines are not parsed, which saves time. Lines that cannot be read add a sentence to
    `faults`.
    """
    bad = []  # numbers of the lines that cannot be read
    n = 0
    line = ""
    try:
        for n, content in enumerate(files.read_lines(path, MAX_LINE_BYTES), 1):
            line = content.decode("utf-8", "replace")
            if word not in line or not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            else:
                bad.append(n)
    except StorageError as error:
        where = f" beyond line {n}" if n else ""
        faults.append(f"{path.name} could not be read{where}: {_reason(path, error)}")
    # whole lines end with a newline: a last one without it was being written
    cut_off = bool(bad) and bad[-1] == n and not line.endswith("\n")
    if cut_off:
        bad.pop()
        faults.append(
            f"The last line of {path.name} was cut off, probably by a crash; it is left out."
        )
    if bad:
        where = ", ".join(map(str, bad[:5]))
        if len(bad) > 5:
            where += ", …"
        faults.append(f"{path.name}: {plural(len(bad), 'unreadable line')} left out ({where}).")


def _reason(path: Path, error: object) -> str:
    """The first line of an error, without the name of the file, which the page says already."""
    lines = clean(error).splitlines() or ["damaged"]
    reason = lines[0].removeprefix(str(path)).lstrip(": ")
    return reason.removeprefix("cannot be read: ")[:200]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a JSON-lines file, such as metrics.jsonl, without lines that cannot be read.

    A crash may have cut off the last one.
    """
    check_path("path", path)
    return list(scan_rows(Path(path), []))


def read_mapping(path: Path, faults: list[str]) -> Row:
    """A mapping from a JSON or YAML file, or {} without one; damage adds a sentence to `faults`."""
    if not os.path.lexists(path):
        return {}
    try:
        content = files.read_regular(path, MAX_FILE_BYTES)
        if path.suffix == ".json":
            value = json.loads(content.decode())
        else:
            value = settings.load(path, content).values
    except (ValueError, RecursionError, CoadjointError) as error:
        faults.append(f"{path.name} could not be read: {_reason(path, error)}")
        return {}
    if not isinstance(value, dict):
        faults.append(f"{path.name} could not be read: it does not hold a mapping.")
        return {}
    return value


def _check_model(path: Path, faults: list[str]) -> None:
    """Add a sentence to `faults` if the run's model is damaged, as a reader may want to use it."""
    if not os.path.lexists(path):
        return
    try:
        description = schemas.read_metadata(path, schemas.read_header(path))
        expected = description.get("sha256")
        if expected is None:  # early versions wrote no sum
            return
        with files.open_regular(path) as file:
            if not storage.is_model_intact(file, expected):
                faults.append(
                    f"{path.name} is damaged: its content does not match its SHA-256 checksum."
                )
    except StorageError as error:
        faults.append(f"{path.name} cannot be used: {_reason(path, error)}")
    except MissingError:  # without the package that reads models there is nothing to check
        return


def as_mapping(value: object) -> Row:
    """The value if it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}


def as_mappings(value: object) -> list[Row]:
    """The mappings of a list, or [] if the value is no list."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]


def layers_in(found: Row) -> list[str]:
    """The names of layers under "layers", as safe text; [] without a list of texts."""
    names = found.get("layers")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return [clean(name)[:MAX_LAYER_NAME] for name in names[:MAX_LAYER_NAMES]]


def as_vector(value: object) -> np.ndarray:
    """The numbers of a list, NaN for what is not a finite number; empty if it is no list."""
    if not isinstance(value, list):
        return np.array([])
    return np.array(list(map(finite_or_nan, value)))


def describe_outcome(result: Row, last_step: float) -> tuple[str, str, str]:
    """Tone, headline and details of how a run ended, from the content of result.json.

    The tone is "good", "calm", "warn" or "bad". last_step: the last one in metrics.jsonl, for a
    run without a result. A run that reached its goal is a success, however it went on.
    """
    status = result.get("status")
    step = short_number(result.get("step") or last_step)
    goal = parse_goal(result.get("goal"))[2]
    reason = f": {clean(result['reason'])}" if result.get("reason") else ""
    if result.get("success") is True:
        details = "at step " + short_number(result.get("success_step") or last_step)
        seconds = finite_or_nan(result.get("success_seconds"))
        if not math.isnan(seconds):
            details += f", after {duration(seconds)}"
        if goal:
            details += f": {goal}"
        if status not in ("success", "finished"):
            details += f"; {clean(status)} at step {step}{reason}"
        return "good", "Success", details
    missed = f", without reaching {goal}" if goal else ""
    match status:
        case "success":  # of a file that does not say "success": true
            return "good", "Success", f"at step {step}{reason}"
        case "finished":
            return "calm", "Finished", f"{step} steps{missed}"
        case "early-stopped":
            return "calm", "Stopped early", f"at step {step}{missed}{reason}"
        case "interrupted":
            return "warn", "Interrupted", f"at step {step}{reason}"
        case "failed":
            return "bad", "Failed", f"at step {step}{reason}"
        case "pruned":  # by a search for settings
            return "calm", "Pruned", f"at step {step}{reason}"
    details = f"the last recorded step is {step}; the run is still running, or it was killed"
    return "warn", "No result", details


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder.

    probes: step -> [t, log10 ||lam_t||, log10 norms of the temporal components]; of a chain, layers
    i in place of times t. layer_norms: those of the gradient of a deep chain, by parameter and
    layer: {"W": {layer: (steps, norms)}}.
    """

    config: Row
    environment: Row
    result: Row
    store: CurveStore
    probes: dict[float, list[np.ndarray]]
    faults: list[str]
    clipped_share: float  # of the steps
    layer_norms: LayerNorms = field(default_factory=dict)
    has_layers: bool = False  # whether probes are those of a chain

    @property
    def words(self) -> PageWords:
        """How the page speaks of this network: a chain has layers and samples, others time."""
        network = as_mapping(self.config.get("network"))
        is_chain = self.has_layers or bool(network.get("chain") or network.get("autoencoder"))
        return DEPTH_WORDS if is_chain else TIME_WORDS

    @property
    def layers(self) -> list[str]:
        """The layers of a chain in words, the input first; [] if they were not recorded."""
        return layers_in(self.result)

    @property
    def last_step(self) -> float:
        """The last step in any training curve; NaN if there is none."""
        steps = []
        for key in TRAINING_KEYS:
            if ("train", key) in self.store:
                steps.append(self.store.curve("train", key).steps[-1])
        return max(steps, default=math.nan)

    @property
    def has_scaled_loss(self) -> bool:
        """Whether the loss is one of standardised targets: of numbers in the user's own data.

        The errors mse and mae are scaled back to the units of the data.
        """
        data = as_mapping(self.config.get("data"))
        is_scaled = bool(data) and data.get("standardise") is not False
        return is_scaled and "mse" in self.held_out_stems()

    @property
    def loss_over_steps(self) -> str:
        """How the loss of a sequence is made of its time steps, if that was chosen; else ""."""
        reduce = as_mapping(self.config.get("training")).get("reduce")
        return f"{reduce} over time steps" if reduce in ("mean", "sum") else ""

    def held_out_stems(self) -> list[str]:
        """The held-out metrics, without their tolerances: "right" for "right_0.2"."""
        # keys of the store are ("held-out", split, metric)
        stems = [metric_stem(key[2]) for key in self.store if key[0] == "held-out"]
        return list(dict.fromkeys(stems))

    def held_out_title(self, stem: str) -> str:
        """The title of the figure of a metric, with its split: "Valid accuracy".

        "Held-out accuracy" where there are several, as in the figure's legend.
        """
        keys = [key for key in self.store if key[0] == "held-out" and metric_stem(key[2]) == stem]
        splits = dict.fromkeys(key[1] for key in keys)
        split = next(iter(splits)) if len(splits) == 1 else "held-out"
        title = clean(split_metric(split or "held-out", stem))
        return title[:1].upper() + title[1:]

    def held_out(self, stem: str) -> list[Curve]:
        """The curves of a metric at every tolerance and on every split.

        stem: the metric without its tolerance.
        """
        curves = []
        for key in self.store:
            if key[0] == "held-out" and metric_stem(key[2]) == stem:
                _, split, metric = key
                name = clean(split_metric(split, metric))
                curves.append(self.store.curve(*key, name=name))
        return curves


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; every fault becomes a sentence in the `faults` of the record."""
    faults: list[str] = []
    config = read_mapping(folder / "config.yaml", faults)
    environment = read_mapping(folder / "environment.json", faults)
    result = read_mapping(folder / "result.json", faults)
    store = CurveStore()
    probes: dict[float, list[np.ndarray]] = {}
    skipped = Counter[str]()
    clipped = 0
    layer_norms: LayerNorms = {}
    has_layers = False
    for row in scan_rows(folder / "metrics.jsonl", faults):
        kind = row.get("kind")
        step = finite_or_nan(row.get("step"))
        if kind == "train":
            store.put(row, TRAINING_KEYS, "train")
            clipped += row.get("clipped") is True
            if row.get("skipped"):
                skipped[clean(row["skipped"])] += 1
        elif kind == "held-out":
            _put_metrics(store, row, "held-out")
        elif kind == "probe" and not math.isnan(step):
            probes[step] = [as_vector(row.get(key)) for key in PROBED]
            store.put(row, ("decay", "radius"), "probe")
            norms = as_mapping(row.get("gradients"))
            if is_of_layers(row):
                has_layers = True
                if len(norms) > MAX_NORM_CURVES:
                    norms = take_layer_norms(layer_norms, step, norms)
            names = [name for name in norms if name != "step"]  # a key that rows need themselves
            store.put(norms | {"step": step}, names, "norm")
    if os.path.lexists(folder / "clock.jsonl"):
        for row in scan_rows(folder / "clock.jsonl", faults):
            store.put(row, ("seconds",), "clock")
    _check_model(folder / "model.safetensors", faults)
    faults += [f"{plural(n, 'step')} skipped: {why}." for why, n in skipped.most_common(5)]
    # steps that a resumed run wrote again are counted again, as in `clipped`
    trained_steps, *_ = store.get(("train", "gradient"), ((),))
    clipped_share = clipped / max(1, len(trained_steps))
    return RunRecord(
        config,
        environment,
        result,
        store,
        probes,
        faults,
        clipped_share,
        layer_norms,
        has_layers,
    )


def is_of_layers(probe: Row) -> bool:
    """Whether a row of kind "probe" is that of a chain: its states are layers, not times."""
    return str(probe.get("axis") or "").startswith(DEPTH_WORDS.axis)


def take_layer_norms(layer_norms: LayerNorms, step: float, norms: Row) -> Row:
    """Add the norms of maps, "maps.3.W", to `layer_norms`; return the others.

    Map k leads to layer k + 1. Parameters of a map with the same last name count together. A
    resumed run may write a step twice: the later value is later in the columns.
    """
    others = {}
    joint: dict[tuple[str, int], float] = {}
    for name, norm in norms.items():
        match = MAP_PARAMETER.fullmatch(name)
        if match is None:
            others[name] = norm
            continue
        place = (clean(match[2].rpartition(".")[2]), int(match[1]) + 1)
        joint[place] = math.hypot(joint.get(place, 0.0), finite_or_nan(norm))
    known = sum(map(len, layer_norms.values()))
    for (letter, layer), norm in joint.items():
        columns = layer_norms.setdefault(letter, {})
        if layer not in columns:
            known += 1
            if known > MAX_LAYER_NORMS:
                break
            columns[layer] = (array("d"), array("d"))
        steps, values = columns[layer]
        steps.append(step)
        values.append(norm)
    return others


def _put_metrics(store: CurveStore, row: Row, *prefix: str) -> None:
    """Store the metrics of a held-out row under (*prefix, split, metric)."""
    metrics = [key for key in row if key not in NOT_METRICS]
    store.put(row, metrics, *prefix, str(row.get("split", "")))


def folder_within(folder: Path, run: Row) -> Path | None:
    """The run's folder, if it lies within the compare folder; None otherwise.

    compare.json may be a stranger's: what it names is never followed elsewhere.
    """
    try:  # ".." is outside: a run without a folder has none
        path = (folder / str(run.get("folder") or "..")).resolve()
        inside = path.is_relative_to(folder.resolve()) and path.is_dir()
    except (OSError, ValueError):
        return None
    return path if inside else None


def held_out_curve(path: Path, metric: str, faults: list[str]) -> tuple[str, Curve]:
    """The name of a metric and its held-out curve in a run, on the validation set if there is one.

    Else the curve is that of the test set, or of the first split that has the metric; if none has,
    it is empty.

    path: the run's folder. metric: "" takes the first one that is not the loss. What cannot be read
    adds a sentence to `faults`.
    """
    store = CurveStore()
    if os.path.lexists(path / "metrics.jsonl"):
        # Only lines with the word are parsed, for speed; a row of another kind may have it, too.
        for row in scan_rows(path / "metrics.jsonl", faults, '"held-out"'):
            if row.get("kind") == "held-out":
                _put_metrics(store, row)  # by (split, metric)
    if not metric and store:
        metric = next((name for _, name in store if name != "loss"), "loss")
    splits = [split for split, name in store if name == metric]
    for split in ("valid", "test", *splits):
        if split in splits:
            return metric, store.curve(split, metric)
    return metric, store.curve("test", metric)
