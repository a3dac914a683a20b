"""The report page says what is in a folder, and survives whatever is in it.

Nothing that is read from a folder becomes markup.
"""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coadjoint.errors import CoadjointError, MissingError, StorageError
from coadjoint.training.report import comparison_page, pages, read, summary
from coadjoint.training.report import curves as curves_module
from coadjoint.training.report import text as text_module
from coadjoint.training.report.comparison import PAGE, Comparison
from coadjoint.training.report.parameter_names import words_for
from coadjoint.training.report.text import moment
from coadjoint.training.settings import dump, load

pytestmark = pytest.mark.slow

ENVIRONMENT = {
    "coadjoint": "0.2.0", "torch": "2.13.0", "numpy": "2.3.1", "python": "3.12.3",
    "platform": "Linux-6.8-x86_64", "processor": "x86_64",
    "threads": 1, "device": "cpu", "seed": 0, "revision": "88b5608",
    "started": "2026-11-15T07:36:00+00:00",
    "command": "coadjoint train --task temporal-order --length 100 --gradient penalised "
        "--weight 4 --seed 0",
}  # fmt: skip
CONFIG = """\
task: {name: temporal-order, length: 100}
network: {cell: elman, hidden: 64, activation: tanh, radius: 0.5}
gradient: {name: penalised, penalty: log-ratio, weight: 4.0}
optimiser: {name: adam, lr: 0.001, clip: 1.0}
training: {steps: 5000, batch: 32, evaluate: 100, seed: 0}
"""


def learning(steps, solved, seed):
    """Share of right answers by step: a quarter by chance, then a slope around 0.7 of `solved`,
    then everything; and the noise.
    """
    rng = np.random.default_rng(seed)
    s = np.arange(1, steps + 1)
    right = 0.25 + 0.75 / (1 + np.exp(-(s - 0.72 * solved) / (0.07 * solved)))
    return s, right, rng


def write_run(
    folder,
    steps=5000,
    solved=4300,
    every=100,
    length=100,
    seed=0,
    probes=True,
    penalised=True,
    status="success",
):
    """A run folder as training leaves it: costates that vanish at first and are carried through
    later.
    """
    folder.mkdir(parents=True, exist_ok=True)
    s, right, rng = learning(steps, solved, seed)
    rows, clock, t = [], [], np.arange(length + 1)
    for k in range(steps):
        share = (right[k] - 0.25) / 0.75
        norm = 10 ** (rng.normal(-0.5 + 0.9 * math.sin(k / 400) * share + share, 0.25))
        row = {
            "kind": "train",
            "step": int(s[k]),
            "loss": max(1e-4, 1.386 * (1 - share) * rng.normal(1, 0.03) + 0.01 * rng.random()),
            "gradient": norm,
            "rate": 1e-3 * min(1, (k + 1) / 200),
        }
        if penalised:
            row |= {
                "penalty": 0.5 * math.exp(-k / 600) * rng.lognormal(0, 0.2)
                + 0.004 * rng.lognormal(0, 0.4),
                "rho": 4.0 * 0.5 ** (k // 1500),
            }
        if norm > 1:
            row["clipped"] = True
        if k in (1711, 1712):
            row |= {"loss": "NaN", "gradient": "Infinity", "skipped": "the gradient was not finite"}
        rows.append(row)
        if (k + 1) % every == 0 or k + 1 == steps:
            p = float(np.clip(right[k] + rng.normal(0, 0.008), 0, 1)) if s[k] < solved else 1.0
            rows.append(
                {
                    "kind": "held-out",
                    "split": "test",
                    "step": int(s[k]),
                    "sequences": 1000,
                    "loss": 1.386 * (1 - p) / 0.75 + 0.003,
                    "right": p,
                }
            )
            clock.append({"step": int(s[k]), "seconds": round(0.0092 * (k + 1), 2)})
            if probes:
                slope = -0.16 * math.exp(-k / 500) - 0.012 * (1 - share) + 0.002 * math.sin(k / 300)
                wave = 0.25 * np.sin(t / 9 + k / 700) * min(1, k / 900)
                costates = (
                    slope * (length - t) + wave - 0.6 - share + rng.normal(0, 0.05, length + 1)
                )
                rows.append(
                    {
                        "kind": "probe",
                        "step": int(s[k]),
                        "t": t.tolist(),
                        "log10_costates": costates.tolist(),
                        "temporal": (costates[1:] - 0.4 + 0.1 * wave[1:]).tolist(),
                        "radius": 0.5 + 0.62 * (1 - math.exp(-k / 900)),
                        "decay": float(costates[0] - costates[-1]),
                        "gradients": {
                            n: norm * f * rng.lognormal(0, 0.15)
                            for n, f in (
                                ("W", 0.8),
                                ("R", 0.3),
                                ("b", 0.09),
                                ("V", 0.45),
                                ("b_o", 0.02),
                            )
                        },
                    }
                )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "clock.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clock))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | {"seed": seed}))
    success = status == "success"
    result = {
        "status": status, "step": steps, "seconds": 0.0092 * steps, "reason": "",
        "success": success, "success_step": solved if success else None,
        "success_seconds": 0.0092 * solved if success else None, "goal": "right >= 1",
        "metrics": {"test": {"loss": 0.0031, "right": 1.0 if success else 0.262}},
        "parameters": 4804, "best_step": None,
        "examples": [{"id": str(i), "target": "XYYX"[i % 4],
            "prediction": "XYYY"[i % 4] if i == 3 else "XYYX"[i % 4], "right": i != 3,
            "note": "symbols at t = 12 and t = 57"} for i in range(8)],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_compare(folder, seeds=6, steps=3000, **run):
    """A compare folder: two rows that solve the task in most seeds, and one that stays
    at chance.
    """
    rows, rng = [], np.random.default_rng(1)
    for name, median, row_settings in (
        ("penalised", 1300, {"radius": 0.5, "lr": 0.001, "weight": 2.0}),
        ("penalised, weight 6", 1900, {"radius": 0.5, "lr": 0.001, "weight": 6.0}),
        ("plain", math.inf, {"radius": 0.5, "lr": 0.001, "weight": 0.0}),
        ("plain from radius 1.1", 2500, {"radius": 1.1, "lr": 0.0001, "weight": 0.0}),
    ):
        runs = []
        for seed in range(seeds):
            solved = int(median * rng.lognormal(0, 0.28)) if median < math.inf else 10**9
            ok, broken = solved < steps, name == "plain" and seed == 4
            status = "failed" if broken else "success" if ok else "finished"
            path = f"runs/{re.sub('[^a-z0-9]+', '-', name)}-seed-{seed}"
            write_run(
                folder / path,
                steps=solved if ok else steps // 4 if broken else steps,
                solved=solved,
                seed=seed,
                probes=False,
                status=status,
                **run,
            )
            if seed % 2 == 0:
                (folder / path / "report.html").write_text("<!doctype html><title>a run</title>")
            runs.append(
                {
                    "seed": seed,
                    "folder": path,
                    "status": status,
                    "success": ok,
                    "steps": solved if ok else steps // 4 if broken else steps,
                    "seconds": 0.01 * min(solved, steps),
                    "metric": None if broken else 1.0 if ok else float(0.25 + 0.01 * rng.random()),
                    "error": "the loss was not finite at step 750" if broken else None,
                }
            )
        rows.append({"name": name, "settings": row_settings, "runs": runs})
    page = {
        "command": "coadjoint compare compare.yaml --seeds 6",
        "task": "temporal-order, length 100",
        "goal": "right >= 1",
        "rows": rows,
        "environment": ENVIRONMENT,
    }
    (folder / "compare.json").write_text(json.dumps(page))
    return folder


SMALL = {"steps": 3, "solved": 2, "every": 1, "length": 4}


class Page(HTMLParser):
    """The elements of a page with their attributes, its text, and the data of its figures."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.texts, self.attributes, self.inside, self.blocks = [], [], [], [], {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.data = json.loads(self.blocks["script", "application/json"])
        self.figures = self.data["figures"]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, tuple(name for name, _ in attributes)))
        self.attributes += attributes
        self.inside = [tag, dict(attributes).get("type")]

    def handle_endtag(self, tag):
        self.inside = []

    def handle_data(self, data):
        if self.inside and self.inside[0] in ("script", "style"):
            self.blocks[tuple(self.inside)] = self.blocks.get(tuple(self.inside), "") + data
        else:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def page_of(folder):
    return Page(pages.write(folder))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "long")


@pytest.fixture(scope="module")
def compare_folder(tmp_path_factory):
    return write_compare(tmp_path_factory.mktemp("compare"))


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_the_page_of_a_run_shows_its_settings_and_results(run_folder):
    page = page_of(run_folder)
    for words in (
        "temporal-order, length 100 · elman, 64 units · penalised, log-ratio",
        "Success at step 4,300, after 39.6 s: accuracy ≥ 1",
        "penalised, penalty log-ratio, weight 4.0",
        "4,804",
        "2 steps skipped: the gradient was not finite.",
        "coadjoint train --task temporal-order",
        "The run reached its goal: there is nothing left to resume.",
        "optimiser.clip 1.0",
        "symbols at t = 12 and t = 57",
        "✗ no",
    ):
        assert words in page.text, words
    kinds = {name: figure["kind"] for name, figure in page.figures.items()}
    curves = [
        "loss",
        "held-out-0",
        "gradient",
        "penalty",
        "rho",
        "rate",
        "decay",
        "radius",
        "norms",
    ]
    assert kinds == dict.fromkeys(curves, "lines") | {"costates": "heat", "temporal": "heat"}
    assert page.figures["gradient"]["y"]["log"]
    assert page.figures["norms"]["y"]["log"]
    assert page.figures["held-out-0"]["rules"] == [{"y": 1, "label": "goal: accuracy ≥ 1"}]
    assert page.figures["radius"]["rules"][0]["y"] == 1
    assert page.data["clock"]["steps"][:2] == [100, 200]
    assert [s["name"] for s in page.figures["norms"]["series"]] == ["W", "R", "b", "V", "b_o"]


def test_a_page_needs_nothing_else(run_folder, compare_folder):
    for folder in (run_folder, compare_folder):
        page = page_of(folder)
        assert len(page.source.encode()) < 2_000_000
        names = {name for name, _ in page.attributes}
        assert not names & {"style", "src"}
        assert not [name for name in names if name.startswith("on")]
        assert "http:" not in page.source.replace("http://www.w3.org/2000/svg", "")
        assert "https:" not in page.source
        policy = next(v for n, v in page.attributes if n == "content" and "default-src" in v)
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for block, directive in ((("script", None), "script-src"), (("style", None), "style-src")):
            digest = base64.b64encode(hashlib.sha256(page.blocks[block].encode()).digest()).decode()
            assert f"{directive} 'sha256-{digest}'" in policy


def test_the_same_folder_gives_the_same_page(run_folder):
    assert page_of(run_folder).source == page_of(run_folder).source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "finished", "success": False},
            "Finished 3 steps, without reaching accuracy ≥ 1"),
        ({"status": "finished", "success": False, "goal": None}, "Finished 3 steps method"),
        ({"status": "early-stopped", "success": False, "reason": "no progress"},
            "Stopped early at step 3, without reaching accuracy ≥ 1: no progress"),
        ({"status": "interrupted", "success": False, "reason": "by the user"},
            "Interrupted at step 3: by the user"),
        ({"status": "failed", "success": False, "reason": "disk full"},
            "Failed at step 3: disk full"),
        ({"status": "interrupted", "success": True, "success_step": 2, "success_seconds": 7200},
            "Success at step 2, after 2 h: accuracy ≥ 1; interrupted at step 3"),
        ({"status": 7, "success": None}, "No result the last recorded step is 3"),
    ],
)  # fmt: skip
def test_every_outcome_is_said(tmp_path, change, words):
    write_run(tmp_path, **SMALL)
    edit(tmp_path / "result.json", lambda result: result.update(change))
    assert words in page_of(tmp_path).text


def test_a_run_that_is_not_finished_has_a_page(tmp_path):
    write_run(tmp_path, **SMALL)
    for name in ("result.json", "config.yaml", "environment.json", "clock.jsonl"):
        (tmp_path / name).unlink()
    page = page_of(tmp_path)
    for words in (
        "No result the last recorded step is 3",
        "No config.yaml",
        "no environment.json",
        "No examples were recorded",
        "not recorded",
    ):
        assert words in page.text, words
    assert page.data["clock"] is None
    assert page.figures["loss"]["series"][0]["x"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "words", "drawn"),
    [
        ('{"kind":"train","step":1,"loss":1}\n{"kind":"tr',
            "The last line of metrics.jsonl was cut off", [1]),
        ('{"kind":"train","step":1,"loss":1}\nzzz\n[1]\n{"kind":"train","step":2,"loss":1}\n',
            "2 unreadable lines left out (2, 3)", [1, 2]),
        ('{"kind":"train","step":1,"loss":1}\n' + "[" * 9999 + "\n",
            "1 unreadable line left out (2)", [1]),
        ('{"kind":"train","step":1,"loss":1}\n{"kind":"train","step":2,"loss":"NaN"}\n',
            "1 value not finite, shown as gaps", [1, 2]),
        ('{"kind":"train","step":1,"loss":1}\n{"kind":"train","step":2,"loss":"-Infinity"}\n',
            "1 value not finite, shown as gaps", [1, 2]),
        ("", "No values were recorded.", None),
        ("\x00\xff" * 50, "metrics.jsonl was cut off", None),
    ],
)  # fmt: skip
def test_damaged_metrics_are_noted_and_left_out(tmp_path, text, words, drawn):
    (tmp_path / "metrics.jsonl").write_text(text)
    page = page_of(tmp_path)
    assert words in page.text
    assert ("unreadable" in page.text) == ("unreadable" in words)
    assert (page.figures["loss"]["series"][0]["x"] if "loss" in page.figures else None) == drawn


def test_gaps_are_null(tmp_path):
    rows = [{"kind": "train", "step": k, "loss": "NaN" if k == 2 else k} for k in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert page_of(tmp_path).figures["loss"]["series"][0]["y"] == [1, None, 3, 4]


def test_a_resumed_run_counts_the_later_value(tmp_path):
    rows = [
        {"kind": "train", "step": k, "loss": loss}
        for k, loss in ((1, 5), (2, 6), (3, 7), (2, 8), (3, 9))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    series = page_of(tmp_path).figures["loss"]["series"][0]
    assert (series["x"], series["y"]) == ([1, 2, 3], [5, 8, 9])


@pytest.mark.parametrize("name", ["result.json", "environment.json", "config.yaml"])
@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "", "[" * 9999, "a: &x [1]\nb: *x"])
def test_damaged_files_cost_only_themselves(tmp_path, name, text):
    write_run(tmp_path, **SMALL)
    (tmp_path / name).write_text(text)
    page = page_of(tmp_path)
    assert len(page.figures) == 11
    assert f"{name} could not be read" in page.text or (name, text) == ("config.yaml", "")


def test_a_run_without_probes_and_penalty_has_a_page(tmp_path):
    page = page_of(write_run(tmp_path, **SMALL, probes=False, penalised=False))
    assert set(page.figures) == {"loss", "held-out-0", "gradient", "rate"}
    assert page.text.count("No probes with these values were recorded.") == 2
    assert "No penalty: plain backpropagation has none." in page.text


def test_what_says_nothing_has_no_figure(tmp_path):
    """Components that a network has not, and a learning rate that is always the same."""
    write_run(tmp_path, **SMALL)
    rows = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    names = [f"layers.levels.{k}.{way}.{name}" for k in (0, 1) for way in (0, 1) for name in "Wb"]
    for row in rows:
        row.update(rate=0.01, temporal=None, gradients=dict.fromkeys([*names, "p.b_n", "V"], 1.0))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = page_of(tmp_path)
    assert not {"rate", "temporal"} & set(page.figures)
    assert "costates" in page.figures
    assert [series["name"] for series in page.figures["norms"]["series"]] == [
        *(f"layer {k} {way}, {name}" for k in (1, 2) for way in ("forward", "backward")
          for name in "Wb"),
        "b_n", "V",
    ]  # fmt: skip
    assert "2026-11-15 07:36 UTC" in page.text
    assert "2026-11-15T07:36" not in page.text


def test_parameters_have_names_in_words():
    names = ["layers.levels.0.0.R", "layers.P.1.0.weight", "step.read.weight", "b_o"]
    assert list(words_for(names).values()) == [
        "layer 1, R", "layer 2, projection", "step.read.weight", "b_o",
    ]  # fmt: skip
    names = ["encoder.levels.0.0.p.b_n", "encoder.levels.0.1.W", "decoder.p.b_n", "E.weight"]
    assert list(words_for(names).values()) == [
        "encoder layer 1 forward, b_n", "encoder layer 1 backward, W", "decoder, b_n", "E.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("2026-11-19T20:38:23+0000", "2026-11-19 20:38 UTC"),
        ("2026-11-19T20:38:23+0200", "2026-11-19 20:38 UTC+02:00"),
        ("yesterday", "yesterday"),
        (None, "–"),
    ],
)
def test_times_are_for_people(written, shown):
    assert moment(written) == shown


def test_probes_of_unequal_lengths_and_blanks_are_drawn(tmp_path):
    """Temporal components begin at t = 1; a zero costate is null; lengths vary."""
    rows = [
        {"kind": "probe", "step": 10, "t": [0, 1, 2], "log10_costates": [-3, None, -1],
            "temporal": [-2.5, -1.5], "radius": None, "gradients": {"W": 0}},
        {"kind": "probe", "step": 50, "t": [0, 1], "log10_costates": [-4, "-Infinity"],
            "temporal": None, "gradients": None},
        {"kind": "probe", "step": 60, "t": None, "log10_costates": [1, 2], "temporal": "?",
            "gradients": {"W": 0.5}},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = page_of(tmp_path)
    costates, temporal = page.figures["costates"], page.figures["temporal"]
    assert (costates["steps"], costates["t"], costates["cells"]) == (
        [10, 50],
        [0, 1, 2],
        [[-3, None, -1], [-4, None, None]],
    )
    assert (temporal["steps"], temporal["t"], temporal["cells"]) == ([10], [1, 2], [[-2.5, -1.5]])
    assert "2 values zero or not finite, left blank." in page.text
    assert page.figures["norms"]["series"][0]["y"] == [None, 0.5]
    assert "1 value not positive, left out of a logarithmic axis." in page.text


def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path):
    n, t = 60_000, list(range(1000))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for k in range(1, n + 1):
            loss = 5e5 if k == 41_234 else 1 + 1e-6 * k
            file.write(
                f'{{"kind":"train","step":{k},"loss":{loss},'
                f'"gradient":{0.1 + k % 7},"rate":0.001}}\n'
            )
        for k in range(300):
            lam = [9.0 if (k, i) == (77, 555) else -i * 0.01 for i in t]
            file.write(
                json.dumps(
                    {
                        "kind": "probe",
                        "step": 200 * (k + 1),
                        "t": t,
                        "log10_costates": lam,
                        "temporal": lam[1:],
                        "gradients": {f"W{i}": 1 + k for i in range(90)},
                    }
                )
                + "\n"
            )
    page = page_of(tmp_path)
    loss = page.figures["loss"]
    assert len(page.source.encode()) < 2_000_000
    assert 5e5 in loss["series"][0]["y"]
    assert loss["series"][0]["x"][0] == 1
    assert loss["series"][0]["x"][-1] == n
    assert loss["total"] == n
    assert f"{loss['drawn']:,} of 60,000 points drawn" in page.text
    assert loss["drawn"] == len(loss["series"][0]["x"]) <= curves_module.MAX_SERIES_POINTS + 2
    assert max(max(row) for row in page.figures["costates"]["cells"]) == 9.0
    assert "24,000 cells drawn for 300,000 values" in page.text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), st.integers(3, 90))
def test_thinning_keeps_the_extremes_and_the_order(values, most):
    y = np.array(values, dtype=float)
    at = curves_module.thinned_indices(y, most)
    assert list(at) == sorted(set(at))
    assert len(at) <= most + 2
    if len(y) <= most:
        assert len(at) == len(y)
    else:
        assert {0, len(y) - 1} <= set(at)
        assert np.isnan(y[at]).any() == np.isnan(y).any()
        if np.isfinite(y).any():
            assert np.nanmin(y[at]) == np.nanmin(y)
            assert np.nanmax(y[at]) == np.nanmax(y)


def test_thinning_keeps_a_lone_gap():
    y = np.sin(np.arange(5000.0))
    y[3210] = math.nan
    assert 3210 in curves_module.thinned_indices(y, 300)


def test_rows_are_read_without_blank_and_broken_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n{"a":')
    assert read.read_rows(path) == [{"a": 1}, {"a": 2}]
    assert read.read_rows(tmp_path / "none.jsonl") == []


def test_the_page_of_a_comparison_counts_its_runs(compare_folder):
    page = page_of(compare_folder)
    data = json.loads((compare_folder / "compare.json").read_text())
    for row in data["rows"]:
        steps = [run["steps"] for run in row["runs"] if run["success"]]
        assert f"{len(steps)} of {len(row['runs'])}" in page.text
        if steps:
            assert (
                f"{statistics.median(steps):,.0f} ({min(steps):,} to {max(steps):,})" in page.text
            )
    assert "plain, seed 4 failed the loss was not finite at step 750" in page.text
    share = {series["name"]: series for series in page.figures["share"]["series"]}
    plain, first = share["plain"], share["penalised"]
    assert (plain["y"], plain["x"]) == ([0, 0], [0, 3000])
    ends = sorted(run["steps"] for run in data["rows"][0]["runs"])
    assert first["x"] == [0, *ends, 3000]
    assert first["y"] == pytest.approx([*(k / 6 for k in range(7)), 1], abs=1e-4)
    assert len(page.figures["curves"]["series"]) == 24
    assert [p["x"] for p in page.figures["steps"]["points"] if p["row"] == 2] == [None] * 6
    assert all(p["open"] for p in page.figures["final"]["points"] if p["row"] == 2)
    links = {
        value for name, value in page.attributes if name == "href" and not value.startswith("#")
    }
    assert links == {
        f"./{run['folder']}/report.html"
        for row in data["rows"]
        for run in row["runs"]
        if run["seed"] % 2 == 0
    }


def write_tasks(folder, methods=("plain cell=gru", "penalised cell=gru")):
    """A comparison of three tasks: one that is learned, one that fails with one seed of two, one
    without a goal.
    """
    rows = []
    for task, metric, goal, values in (
        ("xor, 12 steps", "right", "right >= 1", (1.0, 1.0)),
        ("addition, 20 steps", "right_0.2", "right_0.2 >= 0.99", (0.5, None)),
        ("digits", "accuracy", None, (0.25, 0.75)),
    ):
        for name in methods:
            runs = [
                {
                    "seed": k,
                    "folder": f"runs/{task[:3]}-{k}",
                    "status": "failed" if v is None else "success" if v == 1 else "finished",
                    "success": v == 1,
                    "steps": 100 * (k + 1),
                    "seconds": 2,
                    "metric": v,
                    "error": "why" if v is None else None,
                }
                for k, v in enumerate(values)
            ]
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "goal": goal,
                    "name": name,
                    "settings": {"cell": "gru"},
                    "runs": runs,
                }
            )
    held_out = {
        "kind": "held-out",
        "split": "test",
        "step": 100,
        "right": 1.0,
        "right_0.2": 0.5,
        "accuracy": 0.25,
    }
    for run in {run["folder"] for row in rows for run in row["runs"]}:
        (folder / run).mkdir(parents=True)
        (folder / run / "metrics.jsonl").write_text(json.dumps(held_out) + "\n")
    data = {
        "command": "coadjoint compare xor | `x`",
        "tasks": {"digits": {"steps": 7}},
        "rows": rows,
        "seconds": 61.0,
        "jobs": 4,
    }
    (folder / "compare.json").write_text(json.dumps(data))
    return folder


def test_the_page_of_several_tasks_has_a_table_of_all(tmp_path):
    page = page_of(write_tasks(tmp_path))
    for words in (
        "xor · addition · digits",
        "4 of 8 runs succeeded",
        "goal of addition accuracy (within 0.2) ≥ 0.99",
        "took 61 s, 4 runs at a time",
        "name xor addition digits plain cell=gru 2 of 2 · 1 0 of 2, 1 failed · 0.5 0.5 penalised "
        "cell=gru",
        "addition, 20 steps: plain cell=gru, seed 1 failed why",
        "digits.steps 7",
        "0.5 (0.25 to 0.75)",
    ):
        assert words in page.text, words
    kinds = {name: figure["kind"] for name, figure in page.figures.items()}
    assert kinds == {
        f"{name}{tail}": kind
        for tail in ("", "-1", "-2")
        for name, kind in (
            ("steps", "dots"),
            ("share", "lines"),
            ("curves", "lines"),
            ("final", "dots"),
        )
        if tail != "-2" or name not in ("steps", "share")  # digits: no goal, no success
    }
    assert page.figures["curves-1"]["series"][0]["y"] == [0.5]
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_more_rows_than_colours_can_tell_apart_have_no_curves(tmp_path):
    page = page_of(
        write_tasks(tmp_path, [f"plain cell={k}" for k in range(comparison_page.MAX_COLOURS + 1)])
    )
    assert set(page.figures) == {"steps", "final", "steps-1", "final-1", "final-2"}
    assert "15 rows are too many to tell apart by colour" in page.text


def test_the_tables_can_be_written_in_markdown(tmp_path, compare_folder):
    text = summary.markdown(write_tasks(tmp_path))
    assert text.startswith(
        "```console\ncoadjoint compare xor | `x`\n```\n\n12 runs; 61 s, 4 runs at a time.\n"
    )
    assert (
        "| name | xor | addition | digits |\n| --- | --- | --- | --- |\n| plain cell=gru | 2 of 2 "
        "· 1 |" in text
    )
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### Overview",
        "### xor, 12 steps",
        "### addition, 20 steps",
        "### digits",
    ]
    edit(tmp_path / "compare.json", lambda data: data["rows"][0].update(name="a|b\nc"))
    assert "| a\\|b c | 2 of 2 |" in summary.markdown(tmp_path)
    one = summary.markdown(compare_folder)
    assert "#" not in one
    assert one.count("| penalised | 0.5 | 0.001 | 2.0 |") == 1


@pytest.mark.parametrize(
    "folder",
    ["../outside", "..", ".", "", None, 7, "javascript:alert(1)", "runs/none", "a\0b", "x" * 5000],
)
def test_links_stay_inside(tmp_path, folder):
    inside = tmp_path / "inside"
    inside.mkdir()
    write_run(tmp_path / "outside", **SMALL)
    pages.write(tmp_path / "outside")
    run = {
        "seed": 0,
        "folder": folder,
        "status": "success",
        "success": True,
        "steps": 3,
        "seconds": 1,
        "metric": 1,
    }
    (inside / "compare.json").write_text(json.dumps({"rows": [{"name": "a", "runs": [run]}]}))
    page = page_of(inside)
    assert [
        value for name, value in page.attributes if name == "href" and not value.startswith("#")
    ] == []
    assert "curves" not in page.figures


@pytest.mark.parametrize(
    "data",
    [
        {"rows": []},
        {"rows": None},
        {"rows": [{"name": None, "runs": [{}]}]},
        {"task": "t", "rows": [{"runs": "?"}, 4]},
    ],
)
def test_sparse_comparisons_have_a_page(tmp_path, data):
    (tmp_path / "compare.json").write_text(json.dumps(data))
    assert "The run folders hold no held-out values." in page_of(tmp_path).text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["NaN", "success", "train", "right >= 1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ROW = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["train", "held-out", "probe"]),
        "step": st.integers(0, 9) | JSON,
        **dict.fromkeys(
            (
                "split",
                "loss",
                "gradient",
                "right",
                "t",
                "log10_costates",
                "temporal",
                "radius",
                "gradients",
                "decay",
                "skipped",
            ),
            JSON,
        ),
        "axis": st.just("layer i") | JSON,
    },
)
RESULT = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            "status",
            "step",
            "seconds",
            "reason",
            "success",
            "success_step",
            "goal",
            "metrics",
            "examples",
            "pictures",
        ),
        JSON,
    ),
)
RUN = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("seed", "folder", "status", "success", "steps", "seconds", "metric", "error"), JSON
    ),
)
COMPARE = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("command", "task", "goal", "metric", "tasks", "seconds", "jobs", "environment"), JSON
        ),
        "rows": JSON
        | st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "task": JSON,
                    "goal": JSON,
                    "metric": JSON,
                    "name": JSON,
                    "settings": JSON,
                    "runs": st.lists(RUN, max_size=3),
                },
            ),
            max_size=3,
        ),
    },
)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(ROW, max_size=6), result=RESULT, environment=JSON)
def test_any_run_folder_makes_a_page(tmp_path, rows, result, environment):
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    page_of(tmp_path)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=COMPARE)
def test_any_comparison_makes_a_page_or_a_refusal(tmp_path, data):
    (tmp_path / "compare.json").write_text(json.dumps(data))
    try:
        page_of(tmp_path)
    except CoadjointError:
        assert not data


PAYLOADS = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "<svg onload=alert(1)><!--",
    "\"'`><b a='",
    "a\u202eb\u2066c\u2028d\u200fe",
]
KEY = object()  # stands for a key that is renamed to the payload
FIELDS = [
    *(("result.json", field) for field in (
        ("status",), ("reason",), ("goal",), ("metrics", "test", KEY), ("metrics", KEY),
        ("examples", 0, KEY), ("examples", 0, "id"),
        ("examples", 0, "target"), ("examples", 0, "prediction"), ("examples", 0, "right"),
        ("examples", 0, "note"))),
    *(("environment.json", (field,)) for field in (*ENVIRONMENT, KEY)),
    *(("config.yaml", field) for field in (
        ("task", "name"), ("task", KEY), ("network", "cell"), ("gradient", "name"),
        ("gradient", "penalty"), ("optimiser", "name"), ("training", KEY), ("training", "steps"),
        (KEY,))),
    *(("metrics.jsonl", field) for field in (("held-out", KEY), ("held-out", "split"),
        ("probe", "gradients", KEY), ("train", "skipped"))),
    *(("compare.json", field) for field in (
        ("command",), ("task",), ("goal",), ("rows", 0, "task"), ("rows", 0, "metric"),
        ("rows", 0, "goal"), ("tasks",), ("rows", 0, "name"), ("rows", 0, "settings", KEY),
        ("rows", 0, "settings", "lr"),
        ("rows", 0, "runs", 0, "seed"), ("rows", 0, "runs", 0, "folder"),
        ("rows", 0, "runs", 0, "status"), ("rows", 0, "runs", 0, "error"),
        ("environment", "device"), ("environment", KEY))),
    ("run of compare.json", ("held-out", KEY)),
]  # fmt: skip
NOT_SHOWN = {("compare.json", ("tasks",)), ("compare.json", ("rows", 0, "runs", 0, "folder"))}


def put(data, path, word):
    """Set data[path] to the word; KEY renames the last key of the mapping there."""
    for step in path[:-1]:
        data = data[step]
    if path[-1] is KEY:
        data[word] = data.pop(
            [key for key in data if key not in ("kind", "step", "split", "sequences")][-1]
        )
    else:
        data[path[-1]] = word


def plant(folder, file, path, word):
    """A small run or compare folder with the word in one field."""
    if file.endswith("compare.json"):
        run = {
            "seed": 0,
            "folder": "runs/a",
            "status": "failed",
            "success": False,
            "steps": 3,
            "seconds": 1.0,
            "metric": 0.5,
            "error": "why",
        }
        rows = [
            {"name": "a", "settings": {"lr": 0.1, "weight": 2}, "runs": [run]},
            {"name": "b", "settings": {"lr": 0.2, "weight": 2}, "runs": []},
        ]
        data = {
            "command": "c",
            "task": "t",
            "goal": None,
            "rows": rows,
            "environment": dict(ENVIRONMENT),
        }
        write_run(folder / "runs/a", **SMALL)
        if file == "compare.json":
            put(data, path, word)
        (folder / "compare.json").write_text(json.dumps(data))
        folder, file = folder / "runs/a", "metrics.jsonl" if file != "compare.json" else ""
    else:
        write_run(folder, **SMALL, status="failed" if path == ("reason",) else "success")
    if file == "metrics.jsonl":
        rows = read.read_rows(folder / file)
        for row in rows:
            if row["kind"] == path[0]:
                put(row, path[1:], word)
        (folder / file).write_text("\n".join(map(json.dumps, rows)))
    elif file == "config.yaml":
        mapping = load(folder / file).values
        put(mapping, path, word)
        dump(mapping, folder / file)
    elif file:
        edit(folder / file, lambda data: put(data, path, word))


def test_the_table_of_fields_is_large_enough():
    assert len(FIELDS) >= 31


@pytest.mark.parametrize(
    ("file", "path"),
    FIELDS,
    ids=lambda v: v if isinstance(v, str) else ".".join("KEY" if p is KEY else str(p) for p in v),
)
def test_nothing_read_becomes_markup(tmp_path, file, path, thorough):
    """The elements of a page with a hostile word are those of the same page with a harmless one.

    Where the run is not thorough, every field meets half of the words, in turn.
    """
    plant(tmp_path / "good", file, path, "harmless")
    expected = page_of(tmp_path / "good")
    assert ((file, path) in NOT_SHOWN) == (
        "harmless" not in expected.text + json.dumps(expected.data)
    )
    turn = FIELDS.index((file, path)) % 2
    for k, payload in enumerate(PAYLOADS if thorough else PAYLOADS[turn::2]):
        plant(tmp_path / str(k), file, path, payload)
        page = page_of(tmp_path / str(k))
        assert page.elements == expected.elements
        assert all(
            value.startswith(("#", "./")) for name, value in page.attributes if name == "href"
        )
        assert not text_module.INVISIBLE.search(page.source)
        assert page.source.count("<script") == 2
        if (file, path) not in NOT_SHOWN:
            shown = text_module.clean(payload)
            assert " ".join(shown.split()) in page.text or shown in json.dumps(
                page.data, ensure_ascii=False
            ).replace('\\"', '"').replace("\\\\", "\\")


@pytest.mark.parametrize("name", ["a b & <i>", "it's; rm -rf"])
def test_names_of_folders_are_quoted(tmp_path, name):
    text = page_of(write_run(tmp_path / name, **SMALL, status="interrupted")).text
    assert f"coadjoint resume {shlex.quote(name)}" in text


def test_long_text_is_cut():
    assert text_module.clean("x" * 5000) == "x" * text_module.MAX_TEXT + "… (5,000 characters)"


def test_folders_without_a_run_are_refused(tmp_path, monkeypatch):
    with pytest.raises(
        StorageError, match=r"neither a run folder \(metrics.jsonl\) nor a compare folder"
    ):
        pages.write(tmp_path / "none")
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(StorageError, match="holds no comparison"):
        pages.write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["compare.json"]
    (tmp_path / "compare.json").write_text('{"rows": []}')
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingError, match="pip install jinja2"):
        pages.write(tmp_path)


def test_a_page_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    write_run(tmp_path, **SMALL)
    before = pages.write(tmp_path).read_bytes()
    edit(tmp_path / "result.json", lambda result: result.update(parameters=123456))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match="No space left"):
            pages.write(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert b"123,456" in pages.write(tmp_path).read_bytes()


def linear(colour):
    """ "#rrggbb" as linear light, by the sRGB transfer curve."""
    v = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(np.dot(linear(colour), (0.2126, 0.7152, 0.0722)))


# What protan, deutan and tritan eyes make of linear light (Machado, Oliveira and Fernandes 2009).
EYES = {
    "usual": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip


def lab(light):
    """CIE Lab of linear sRGB."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x = np.clip(light, 0, 1) @ to_xyz.T / (0.9505, 1, 1.089)
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("ground", ["light", "dark"])
def test_colours_differ_to_all_eyes(eyes, ground):
    style = Path(pages.__file__).with_name("page.css").read_text()
    curves = re.findall(r"--c\d: (#[0-9a-f]{6})", style)[7 * (ground == "dark") :][:7]
    seen = [lab(EYES[eyes] @ linear(colour)) for colour in curves]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 12


def test_colours_stand_out_from_their_ground():
    """The ramp rises in luminance, and curves stand out from their ground, in the light and in the
    dark.
    """
    script, style = (
        Path(pages.__file__).with_name(f"page{s}").read_text() for s in (".js", ".css")
    )
    ramp = [
        luminance(c) for c in re.findall("#[0-9a-f]{6}", re.search(r"RAMP = \[(.*?)\]", script)[1])
    ]
    assert len(ramp) >= 5
    assert all(b - a > 0.01 for a, b in itertools.pairwise(ramp))
    grounds = re.findall(r"--card: (#[0-9a-f]{6})", style)[:2]
    curves = re.findall(r"--c\d: (#[0-9a-f]{6})", style)[:14]
    for k, colour in enumerate(curves):
        low, high = sorted((luminance(colour), luminance(grounds[k // 7])))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_results_without_a_goal_under_other_budgets_and_interrupted_are_said():
    run = {
        "success": True,
        "status": "success",
        "steps": 5,
        "work": 9,
        "seconds": 100.0,
        "metric": 1.0,
    }
    stopped = {**run, "success": False, "status": "interrupted"}
    about = {"task": "xor", "metric": "right", "goal": "right >= 1", "settings": {"lr": 1}}
    rows = [
        {**about, "name": "a", "runs": [run, stopped], "budget": {"gradients": 8}},
        {**about, "name": "b", "runs": [run], "budget": {"gradients": 10}},
        {
            "task": "copy",
            "metric": "nll",
            "goal": None,
            "name": "a",
            "runs": [stopped, {**run, "status": "finished"}],
        },
    ]
    tables = Comparison.of({"rows": rows}).tables(PAGE)
    (heads, (a, b)), (heads_of_copy, (copied,)) = tables.values()
    assert heads[1:4] == ["successes", "in 8 gradients", "in 10 gradients"]
    assert (a[1:4], b[1:4]) == (["1 of 2", "0 of 2", "–"], ["1 of 1", "–", "1 of 1"])
    assert a[4:] == ["5", "9", "1.67 min", "1"]
    assert heads_of_copy == ["name", "runs", "time", "final nll"]
    assert copied == ["a", "1 of 2 ended", "1.67 min", "1"]


def test_the_largest_numbers_are_not_rounded_to_infinity():
    assert curves_module.json_numbers([1.79769e308, -1.79769e308, math.inf]) == [
        1.79769e308, -1.79769e308, None]  # fmt: skip
    assert curves_module.json_numbers([1.79765e308]) == [1.79765e308]
