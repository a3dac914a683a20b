"""A run keeps what its best weights predict for held-out data, and the page draws it."""

import copy
import json

import numpy as np
import pytest
import torch
from held_out_folders import LONG_LABEL, classes, numbers, write_answers
from test_report import PAYLOADS, SMALL, page_of, write_run

import coadjoint as co
from coadjoint.tasks.data import Data
from coadjoint.tasks.task import Collection, Samples
from coadjoint.training import held_out, schemas
from coadjoint.training.report import answers as answers_module
from coadjoint.training.report import confusion as confusion_module
from coadjoint.training.report import text as text_module

ROWS = 24  # of the series in `write_series`


def write_series(path, gaps=()):
    """A series of two features with dates; gaps: rows without a value."""
    lines = ["date,x,y"]
    for k in range(ROWS):
        x = "" if k in gaps else f"{np.sin(k):.6f}"
        lines.append(f"2024-01-{k + 1:02d},{x},{k}")
    path.write_text("\n".join(lines))
    return path


def network_for(task):
    torch.manual_seed(0)
    sizes = {"inputs": task.inputs, "outputs": task.outputs, "hidden": 3}
    return co.Network("elman", **sizes, output=task.output, readout=task.readout)


def collect(task, step=7):
    """held_out.json of an untrained network, as it comes back from the file."""
    net = network_for(task)
    found = held_out.collect_held_out(net, task, step, 1000)
    return net, schemas.check("held_out.json", json.loads(json.dumps(found)), schemas.HeldOutSchema)


def test_forecasts_are_kept_with_their_rows_times_and_units(tmp_path):
    path = write_series(tmp_path / "s.csv")
    options = {"kind": "next", "window": 6, "split": (0.5, 0.25, 0.25)}
    task = Data.read(path, time="date", **options)
    net, found = collect(task)
    assert (found["kind"], found["at"], found["step"]) == ("next", "every", 7)
    assert found["outputs"] == ["x", "y"]
    kept = found["splits"]["test"]["kept"]
    assert (kept["ids"], kept["series"], kept["first"]) == (["all[18:24]"], ["all"], [19])
    assert kept["times"] == [f"2024-01-{k:02d}" for k in range(20, 25)]
    assert kept["true"][1] == [19, 20, 21, 22, 23]  # in the units of the file
    (batch,) = task.held_out("test", 0)
    mean, std = task.description.target_scale()
    expected = net.run(batch).a[:, 0].detach().numpy() * std + mean
    assert np.allclose(np.array(kept["predicted"]).T, expected, rtol=1e-5)
    errors = found["splits"]["test"]["errors"][1]
    residual = np.arange(19, 24) - expected[:, 1]
    assert errors["count"] == 5
    assert errors["mae"] == pytest.approx(np.abs(residual).mean(), rel=1e-5)
    assert errors["mean"] == pytest.approx(residual.mean(), rel=1e-5)


def test_columns_of_words_are_not_predicted(tmp_path):
    lines = ["x,city"]
    lines += [f"{np.sin(k):.6f},{('Rome', 'Oslo')[k % 2]}" for k in range(ROWS)]
    (tmp_path / "s.csv").write_text("\n".join(lines))
    task = Data.read(tmp_path / "s.csv", kind="next", window=6, categorical="city")
    _, found = collect(task)
    assert found["outputs"] == ["x"]


def test_missing_targets_are_not_judged(tmp_path):
    path = write_series(tmp_path / "s.csv", gaps=(20,))
    task = Data.read(
        path, time="date", kind="next", window=6, split=(0.5, 0.25, 0.25), missing="mask"
    )
    _, found = collect(task)
    split = found["splits"]["test"]
    assert split["kept"]["true"][0][1] is None
    assert split["errors"][0]["count"] == 4


def write_classes(path, n=12, steps=3):
    """Sequences of some classes, the labels not in the order of the file."""
    lines = ["id,x,label"]
    for i in range(n):
        lines += [f"bird {i},{np.cos(i * t)},{'robin' if i % 3 else 'wren'}" for t in range(steps)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("at", ["last", "every"])
def test_confusions_count_every_target(tmp_path, at):
    task = Data.read(write_classes(tmp_path / "c.csv"), kind="classify", at=at)
    net, found = collect(task)
    split = found["splits"]["valid"]
    assert found["labels"] == ["robin", "wren"]
    (batch,) = task.held_out("valid", 0)
    predicted = net.run(batch).a.argmax(-1)
    expected = {}
    for i, j in zip(batch.y.flatten().tolist(), predicted.flatten().tolist(), strict=True):
        expected[i, j] = expected.get((i, j), 0) + 1
    assert {(i, j): n for i, j, n in split["confusion"]} == expected
    assert split["targets"] == batch.y.numel()
    assert set(split["kept"]["ids"]) <= {f"bird {i}" for i in range(12)}
    assert min(split["kept"]["probability"]) >= 0.5  # of the likelier of two classes


def test_examples_have_the_names_and_times_of_the_file(tmp_path):
    from coadjoint.training.validation import collect_examples

    task = Data.read(write_series(tmp_path / "s.csv"), time="date", kind="next", window=6)
    (example,) = collect_examples(network_for(task), task, 0)
    assert example["id"] == "all[18:24]"
    assert example["time"] == "2024-01-24"
    birds = Data.read(write_classes(tmp_path / "c.csv"), kind="classify", at="last")
    for example in collect_examples(network_for(birds), birds, 0):
        assert example["id"].startswith("bird ")
    generated = co.tasks.TemporalOrder(10)
    names = [row["id"] for row in collect_examples(network_for(generated), generated, 0, 3)]
    assert names == ["0", "1", "2"]


def test_many_targets_are_cut_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "MOST_VALUES", 6)
    task = Data.read(
        write_series(tmp_path / "s.csv"), time="date", kind="next", window=6, split=(0.5, 0, 0.5)
    )
    _, found = collect(task)
    split = found["splits"]["test"]
    assert split["kept"]["lengths"] == [1, 1]  # the last steps of each
    assert split["kept"]["first"] == [17, 23]
    assert split["targets"] == split["errors"][0]["count"] == 10
    text = page_of(write_answers(tmp_path / "run", found)).text
    assert "test: 2 of 10 targets drawn; the tables count all." in text


def test_rare_confusions_are_counted_together(monkeypatch):
    monkeypatch.setattr(held_out, "MOST_PAIRS", 1)
    true = np.array([0, 0, 0, 1, 1, 2.0])
    predicted = np.array([0, 1, 1, 1, 0, 0.0])
    found = held_out.count_confusions(true, predicted)
    assert found == {"confusion": [[0, 0, 1], [1, 1, 1], [0, 1, 2]], "uncounted": 2}


class Letters(Collection):
    """A finite task of two classes without names."""

    name = "letters"
    outputs = 2
    output = "softmax"


def test_built_in_tasks_keep_classes_or_nothing():
    letters = Letters({"train": Samples(np.zeros((3, 1)), np.zeros(3))})
    assert held_out.TargetNames.of(letters).labels == ["0", "1"]
    assert held_out.TargetNames.of(co.tasks.TemporalOrder(10)) is None


# the page


def test_balanced_accuracy_precision_and_recall():
    counts = np.array([[8, 2, 0], [0, 1, 0], [0, 0, 0]])
    confusion = confusion_module.Confusion(["a", "b", "c"], counts)
    assert confusion.balanced_accuracy == pytest.approx((0.8 + 1) / 2)  # c has no targets
    assert confusion.precision[:2] == pytest.approx([1, 1 / 3])
    assert np.isnan(confusion.precision[2])
    assert confusion.class_table("").rows[1] == ["b", "0.333", "1", "0.5", "1", "3"]


def test_the_page_of_a_classifier(tmp_path):
    page = page_of(write_answers(tmp_path, classes()))
    for words in (
        "test balanced accuracy",
        "Confusion matrix, test predicted class true class class 0 class 1 class 2 class 3 recall",
        "Classes, test class precision recall F1 support predicted class 0",
        "Surest mistakes, test id true class prediction probability bird",
        "What the weights of step 3 say about data they were not trained on: test, 200 sequences",
    ):
        assert words in page.text, words
    assert "Most common confusions" not in page.text
    assert "goal" not in page.text


@pytest.mark.parametrize(("K", "has_matrix"), [(2, True), (10, True), (40, True), (61, False)])
def test_many_classes_stay_readable(tmp_path, K, has_matrix):
    labels = [LONG_LABEL.format(k) for k in range(K)]
    page = page_of(write_answers(tmp_path, classes(K, labels=labels)))
    assert ("Confusion matrix, test" in page.text) == has_matrix
    assert (f"{K} classes are too many for a confusion matrix" in page.text) != has_matrix
    assert ("Most common confusions, test" in page.text) == (K > 6)
    if has_matrix:
        assert "…01…" in page.text
        assert ("title", labels[1]) in page.attributes  # in full when pointed at


def test_labels_are_shortened_so_that_they_differ():
    short = confusion_module.short_labels
    assert short(["a", "b"]) == ["a", "b"]
    assert short([LONG_LABEL.format(3), LONG_LABEL.format(14)]) == ["…03…", "…14…"]
    alike = short(["x" * 30 + "1" + "y" * 30, "z" * 40, "x" * 30 + "2" + "y" * 30])
    assert alike[0] != alike[2]
    assert max(map(len, alike)) <= confusion_module.SHORT_LABEL
    assert short(["long " * 10, "long " * 11])[0] == "…–"


def test_classes_of_every_step_are_counted_step_by_step(tmp_path):
    page = page_of(write_answers(tmp_path, classes(at="every")))
    assert "Confusion matrix, test, counted step by step" in page.text
    assert "50 sequences with 200 targets" in page.text
    assert page.figures["step-accuracy"]["series"][0]["x"] == [0, 1, 2, 3]
    assert "Surest mistakes, test id row true class" in page.text


def test_the_page_of_a_regression(tmp_path):
    page = page_of(write_answers(tmp_path, numbers(("load", "heat"))))
    assert "Prediction against true value: heat" in page.text
    assert "Errors in the units of the data target set count rmse mae mean residual R²" in page.text
    assert "Largest errors, test id target true value prediction residual row" in page.text
    drawn = page.figures["against-0"]
    assert drawn["diagonal"]
    assert [series["name"] for series in drawn["series"]] == ["test", "valid"]
    assert drawn["series"][0]["names"][:2] == ["row 0", "row 1"]
    histogram = page.figures["histogram-1"]
    assert sum(histogram["series"][0]["counts"]) == 60
    assert page.figures["residuals-0"]["rules"][0]["y"] == 0


def test_the_page_of_a_forecast(tmp_path):
    page = page_of(write_answers(tmp_path, numbers(("load",), kind="next")))
    assert "The series and its forecasts the last 60 rows of it in the test set" in page.text
    drawn = page.figures["series-0"]
    assert [series["name"] for series in drawn["series"]] == ["true", "forecast"]
    assert drawn["stamps"][0] == "2020-01-01"  # without its midnight
    assert drawn["stamps_from"] == drawn["series"][0]["x"][0] == 1
    assert drawn["series"][0]["y"][10] is None  # between two windows
    assert "Gaps: rows without a forecast, such as the first of each window." in page.text
    answers = numbers(("load",), kind="next")
    for split in answers["splits"].values():
        split["kept"]["series"] = ["north"] * 6
    page = page_of(write_answers(tmp_path / "named", answers))
    assert "The series and its forecasts the last 60 rows of north in the test set" in page.text
    assert page.figures["against-0"]["series"][0]["names"][0] == "all[0:11] · 2020-01-01"


def test_many_outputs_have_figures_of_the_first(tmp_path):
    page = page_of(write_answers(tmp_path, numbers([f"target {k}" for k in range(7)])))
    assert "The first 4 of 7 outputs are drawn." in page.text
    assert "against-3" in page.figures
    assert "against-4" not in page.figures


def test_a_run_without_answers_has_a_page(tmp_path):
    assert "Held-out predictions" not in page_of(write_run(tmp_path, **SMALL)).text


def damage(**changes):
    """Answers with other values; "kept" changes those of the test set."""
    answers = copy.deepcopy(classes())
    split = answers["splits"]["test"]
    split["kept"] |= changes.pop("kept", {})
    split |= changes.pop("split", {})
    return answers | changes


@pytest.mark.parametrize(
    "answers",
    [
        {},
        damage(format=2),
        damage(labels=["a"]),
        damage(labels=[]),
        damage(labels=["x" * 101] * 4),
        damage(kind="regress"),
        damage(kept={"lengths": [1]}),
        damage(kept={"true": [[0.5] * 200]}),
        damage(kept={"true": [[9] * 200]}),
        damage(kept={"predicted": []}),
        damage(kept={"times": ["now"]}),
        damage(kept={"probability": [2.0] * 200}),
        damage(split={"confusion": [[0, 4, 1]]}),
        damage(split={"confusion": [[0, 1]]}),
        damage(split={"confusion": [[0, 1, 2], [0, 1, 3]]}),
        damage(split={"targets": -1}),
        damage(splits=[]),
    ],
)
def test_damaged_answers_are_noted_and_not_drawn(tmp_path, answers):
    text = page_of(write_answers(tmp_path, answers)).text
    assert "held_out.json is damaged: " in text
    assert "Delete it: the page then does without." in text
    assert "Confusion matrix" not in text


def test_an_endless_file_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(schemas, "MAX_HELD_OUT_BYTES", 100)
    faults = []
    assert answers_module.read_answers(write_answers(tmp_path, classes()), faults) is None
    assert "expected at most 100" in faults[0]


def test_splits_without_targets_are_left_out(tmp_path):
    answers = classes()
    answers["splits"] = {"test": answers["splits"]["test"] | {"targets": 0, "confusion": []}}
    assert "Held-out predictions" not in page_of(write_answers(tmp_path, answers)).text


def plant(word):
    """Answers with a word in every text."""
    word = word[:100]
    answers = classes(labels=[word, *(f"{word[:90]}{k}" for k in range(3))])
    split = answers["splits"]["valid"]
    n = len(split["kept"]["ids"])
    split["kept"] |= {"ids": [word] * n, "series": [word] * n, "first": [0] * n}
    split["kept"]["times"] = [word] * n
    answers["splits"] = {word: split}
    return answers


@pytest.mark.slow
def test_words_in_answers_become_no_markup(tmp_path):
    expected = page_of(write_answers(tmp_path / "good", plant("harmless")))
    for k, payload in enumerate(PAYLOADS):
        page = page_of(write_answers(tmp_path / str(k), plant(payload)))
        assert page.elements == expected.elements
        assert not text_module.INVISIBLE.search(page.source)
        series = numbers((payload[:100],), kind="next")
        series["splits"]["valid"]["kept"]["times"] = [payload[:100]] * 60
        drawn = page_of(write_answers(tmp_path / f"series {k}", series))
        assert drawn.source.count("<script") == 2
        assert not text_module.INVISIBLE.search(drawn.source)
