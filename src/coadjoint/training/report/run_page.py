"""The page of a run."""

from __future__ import annotations

from pathlib import Path, PurePath

import numpy as np

from ..metric_names import split_metric
from .answers import read_answers
from .baseline_table import baseline_tables
from .curves import json_numbers, thinned_indices
from .data_section import data_sections
from .diagnosis_page import read_diagnosis
from .page_parts import (
    Page,
    PageSection,
    Table,
    configuration_rows,
    describe_settings,
    flatten_settings,
    make_table,
)
from .picture_figure import picture_figures
from .prediction_section import prediction_cards, prediction_section
from .read import RunRecord, as_mapping, as_mappings, describe_outcome, read_run
from .run_again import again_section
from .run_figures import RunFigures
from .sample_section import sample_sections
from .text import NO_VALUE, Row, clean, duration, moment, parse_goal, short_number, shown_metric
from .wording import list_layers

MAX_METRIC_CARDS = 6
MAX_TABLE_STEPS = 40
MAX_EXAMPLE_KEYS = 8
CLOCK_POINTS = 600
METHODS = {"bptt": "plain backpropagation"}  # methods whose name says too little


def run_page(folder: Path) -> Page:
    """The page of a run folder."""
    run = read_run(folder)
    name = folder.resolve().name
    figures = RunFigures(run)
    diagnosis = read_diagnosis(folder / "diagnostics", run.faults)
    facts = {
        "method": describe_method(run),
        "network": describe_settings(run.config.get("network")),
        "optimiser": describe_settings(run.config.get("optimiser")),
        "figures": describe_weights(run.result),
        "seed": clean(run.environment.get("seed", "")),
        "started": moment(run.environment.get("started") or ""),
    }
    tables = [*final_tables(run), *baseline_tables(run), held_out_table(run)]
    pictures = picture_figures(run)
    answers = read_answers(folder, run.faults)
    diagnoses = [diagnosis.section] if diagnosis is not None else []
    sections = [
        PageSection("training", "Training", figures=figures.training(), tables=tables),
        *sample_sections(folder, run.faults),
        *prediction_section(answers, run.words.unit),
        PageSection("inside", "Inside the gradient", describe_inside(run), figures.inside()),
        *diagnoses,
        PageSection(
            "examples", "Example predictions", "", pictures, [example_table(run, bool(pictures))]
        ),
        *data_sections(folder, run.faults),
        PageSection("setup", "Setup", tables=setup_tables(run), pairs=True),
        again_section(run, folder),
    ]
    return Page(
        kind="run",
        name=clean(name),
        title=describe_run(run.config) or clean(name),
        outcome=describe_outcome(run.result, run.last_step),
        facts={key: value for key, value in facts.items() if value},
        notices=run.faults,
        cards=cards(run, prediction_cards(answers)),
        sections=sections,
        clock=clock_data(run),
    )


def describe_inside(run: RunRecord) -> str:
    """What costates are, and of a chain the kinds of its layers."""
    return f"{run.words.lead} {list_layers(run.layers)}".rstrip()


def describe_method(run: RunRecord) -> str:
    """The method and its settings; backpropagation through a chain is not through time."""
    text = describe_settings(run.config.get("gradient"))
    return METHODS.get(text, text) if run.words.axis else text


def describe_run(config: Row) -> str:
    """Task, network and method: "xor, length 50 · elman, 64 units · penalised, log-ratio"."""
    method = as_mapping(config.get("gradient"))
    method_name = str(method.get("method") or method.get("name") or "")
    held = f"{method['hold']} held" if method.get("hold") else ""
    parts = [
        describe_data(as_mapping(config.get("data"))) or describe_settings(config.get("task")),
        describe_network(as_mapping(config.get("network"))),
        _join(METHODS.get(method_name, method_name), method.get("penalty"), held),
    ]
    return " · ".join(part for part in parts if part)


def describe_network(network: Row) -> str:
    """The kind of network and its size: "elman, 64 units", "chain 64x30", "autoencoder 32, 8"."""
    hidden = network.get("hidden")
    words = [network.get("cell"), f"{_join(hidden)} units" if hidden else ""]
    for key in ("chain", "autoencoder"):
        if network.get(key):
            words.append(f"{key} {_join(network[key])}")
    return _join(*words)


def describe_data(data: Row) -> str:
    """The file of the training data and what is predicted: "sensors.csv, regress, target load"."""
    target = data.get("target")
    file = PurePath(str(data.get("train") or "")).name
    return _join(file, data.get("kind"), f"target {_join(target)}" if target else "")


def _join(*words: object) -> str:
    """The words that are there, with commas: also those of a list."""
    texts: list[object] = []
    for word in words:
        texts += word if isinstance(word, list) else [word]
    return clean(", ".join(str(text) for text in texts if text))


def clock_data(run: RunRecord) -> Row | None:
    """Steps and the seconds since the run began, for the page's script; None if not recorded."""
    curve = run.store.curve("clock", "seconds")
    indices = thinned_indices(curve.values, CLOCK_POINTS)
    if not len(indices):
        return None
    return {
        "steps": json_numbers(curve.steps[indices], 12),
        "seconds": json_numbers(curve.values[indices]),
    }


def cards(run: RunRecord, of_predictions: dict[str, str]) -> dict[str, str]:
    """The key figures of a run, {name: text}, without those that are missing.

    of_predictions: those that were computed from its held-out predictions. A run without a result
    has its steps and its time from what was recorded last.
    """
    result = run.result
    clock = run.store.curve("clock", "seconds").values
    last_seconds = clock[-1] if len(clock) else None
    texts = {
        "steps": short_number(result.get("step") or run.last_step),
        "time": duration(result.get("seconds") or last_seconds),
        **metric_cards(run),
        **of_predictions,
        "parameters": short_number(result.get("parameters")),
        f"best step, by {chosen_by(result)}": short_number(result.get("best_step")),
        f"decay of the costates, {run.words.decay_ratio}, first → last": first_and_last(
            run, "decay"
        ),
        "spectral radius, first → last": first_and_last(run, "radius"),
        "steps clipped": f"{run.clipped_share:.1%}" if run.clipped_share else "",
    }
    return {name: text for name, text in texts.items() if text not in ("", NO_VALUE)}


def metric_cards(run: RunRecord) -> dict[str, str]:
    """The final metrics on the test set, the metric of the goal first; that on "valid", too.

    Without a test set, those on every split.
    """
    headline = parse_goal(run.result.get("goal"))[0] or run.result.get("metric")
    splits = as_mapping(run.result.get("metrics"))
    test = as_mapping(splits.get("test"))
    if test:
        valid = as_mapping(splits.get("valid"))
        of_valid = {name: value for name, value in valid.items() if name == headline}
        splits = {"valid": of_valid, "test": test}
    final = []
    for split, metrics in splits.items():
        for name, value in as_mapping(metrics).items():
            final.append((name, split, value))
    final.sort(key=lambda metric: metric[0] != headline)
    texts = {}
    for name, split, value in final[:MAX_METRIC_CARDS]:
        texts[f"{clean(split)} {_metric_name(run, name)}"] = short_number(value)
    return texts


def chosen_by(result: Row) -> str:
    """The split and the metric that chose the best step: "valid accuracy"."""
    split = "valid" if as_mapping(result.get("metrics")).get("valid") else "test"
    metric = result.get("selected_by") or result.get("metric")
    return clean(split_metric(split, metric) if isinstance(metric, str) else split)


def describe_weights(result: Row) -> str:
    """The step that the final figures belong to: "at the best step (22), by valid accuracy".

    "" for a run without final figures.
    """
    if not as_mapping(result.get("metrics")):
        return ""
    best = short_number(result.get("best_step"))
    if best != NO_VALUE:
        return f"at the best step ({best}), by {chosen_by(result)}"
    return f"at the last step ({short_number(result.get('step'))})"


def _metric_name(run: RunRecord, metric: str) -> str:
    """The metric in words, with its unit if it is not what one would expect."""
    if metric != "loss":
        return shown_metric(metric)
    words = ["loss"]
    if run.loss_over_steps:
        words.append(run.loss_over_steps)
    if run.has_scaled_loss:
        words.append("standardised units")
    return ", ".join(words)


def final_tables(run: RunRecord) -> list[Table]:
    """A table of the final metrics, with a column for each split; none for a single split."""
    splits = {}
    for split, metrics in as_mapping(run.result.get("metrics")).items():
        if as_mapping(metrics):
            splits[split] = metrics
    if len(splits) < 2:
        return []
    names: Row = {}  # in the order of their first appearance
    for metrics in splits.values():
        names |= metrics
    rows = []
    for name in names:
        values = [short_number(metrics.get(name)) for metrics in splits.values()]
        rows.append([_metric_name(run, name), *values])
    caption = f"Final values, {describe_weights(run.result)}"
    return [make_table(caption, ["metric", *splits], rows, "", text=(0,))]


def first_and_last(run: RunRecord, key: str) -> str:
    """The first and the last value of a probed curve: "-3.2 → -0.1".

    If one of them is not finite, the other alone.
    """
    values = run.store.curve("probe", key).values
    if not len(values):
        return ""
    first = short_number(values[0], 3)
    last = short_number(values[-1], 3)
    if NO_VALUE in (first, last):
        return last if first == NO_VALUE else first
    return f"{first} → {last}"


def held_out_table(run: RunRecord) -> Table:
    """Held-out values, a column for each metric and split, at up to 40 evenly chosen steps."""
    columns = {}  # {curve: {step: value}}
    for stem in run.held_out_stems():
        for curve in run.held_out(stem):
            columns[curve.name] = dict(zip(curve.steps, curve.values, strict=True))
    steps = sorted(set().union(*columns.values()))
    chosen = np.linspace(0, len(steps) - 1, min(MAX_TABLE_STEPS, len(steps))).astype(int)
    rows = []
    for k in np.unique(chosen):
        step = steps[k]
        values = [short_number(column.get(step)) for column in columns.values()]
        rows.append([short_number(step), *values])
    none = f"Nothing was evaluated on held-out {run.words.units}."
    return make_table("Held-out values", ["step", *columns], rows, none, text=(), folded=True)


def example_table(run: RunRecord, is_drawn: bool) -> Table:
    """Held-out sequences, or samples, and what the network predicts for them.

    is_drawn: they are drawn as pictures, so that the table is folded.
    """
    examples = as_mappings(run.result.get("examples"))
    all_keys: Row = {}  # in the order of their first appearance
    for example in examples:
        all_keys |= example
    keys = list(all_keys)[:MAX_EXAMPLE_KEYS]
    rows = []
    for example in examples:
        rows.append([_mark(example.get(key)) for key in keys])
    none = "No examples were recorded."
    text = range(MAX_EXAMPLE_KEYS)
    heads = ["correct" if key == "right" else key for key in keys]
    caption = example_caption(run)
    if is_drawn:
        caption += " as text"
    return make_table(caption, heads, rows, none, text, most=50, folded=is_drawn)


def example_caption(run: RunRecord) -> str:
    """What the examples are: "Sequences of the test set"; of a run that does not say, held-out."""
    splits = as_mapping(run.result.get("metrics"))
    units = run.words.units
    for split, name in (("test", "test"), ("valid", "validation"), ("train", "training")):
        if split in splits:
            return f"{units[:1].upper()}{units[1:]} of the {name} set"
    return f"Held-out {units}"


def _mark(value: object) -> object:
    """A tick or a cross for a boolean; anything else as it is."""
    if not isinstance(value, bool):
        return value
    return "✓ yes" if value else "✗ no"


def setup_tables(run: RunRecord) -> list[Table]:
    """The tables of the configuration and of the environment: versions, device and so on."""
    config = configuration_rows(run.config)
    environment = []
    for name, text in flatten_settings(run.environment):
        environment.append((name, moment(text) if name == "started" else text))
    no_config = "No config.yaml: the run was started from Python."
    no_environment = "The folder has no environment.json."
    return [
        make_table("Configuration", ["setting", "value"], config, no_config),
        make_table("Environment", ["what", "value"], environment, no_environment),
    ]
