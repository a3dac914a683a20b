"""Generation of symbols: from Python and the command line, on the page, and exact resumption."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

import coadjoint as co
from coadjoint.errors import ConfigError, InputError, Unsupported
from coadjoint.networks.sampling import Sampling
from coadjoint.training.report import pages

TEXT = "the cat sat on the mat\nand the hat sat on the bat; " * 12


def run(folder, *words, code=0):
    """Run the program in a folder; its output, or of a failure its error."""
    done = subprocess.run(
        [sys.executable, "-m", "coadjoint", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained network with large weights, whose answers differ, and its folder."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    task = co.tasks.Data.read(str(folder / "book.txt"), kind="next", dtype="float64")
    torch.manual_seed(0)
    net = co.Network(
        "gru",
        inputs=task.inputs,
        hidden=6,
        outputs=task.outputs,
        readout="every",
        output="softmax",
        dtype=torch.float64,
    )
    with torch.no_grad():
        for p in net.parameters():
            p *= 3
    return co.Model(net, task)


def by_hand(model, prime, length, sampling, seed, number):
    """A sample drawn symbol by symbol: the whole text so far is read again at each of them."""
    d = model.description
    shares = np.array(d.shares["character"])
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))
    text = prime
    for _ in range(length):
        rows = np.eye(len(d.labels))[[d.labels.index(c) for c in text]] - shares
        a = model.network(torch.from_numpy(rows)[:, None]).a[-1, 0].detach()
        p = sampling.probabilities(a).numpy()
        total = np.cumsum(p)
        text += d.labels[int((total <= generator.random() * total[-1]).sum())]
    return text


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.4, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0}]
)
def test_samples_are_those_of_a_loop_by_hand(model, options):
    drawn = model.sample("the ", 25, seed=3, count=2, **options)
    for number, text in enumerate(drawn):
        assert text == by_hand(model, "the ", 25, Sampling(**options), 3, number)
    assert model.sample("the ", 25, seed=3, count=1, **options) == drawn[:1]
    assert model.sample("the ", 10, seed=3, **options)[0] == drawn[0][:14]


@pytest.mark.parametrize("shortcut", [{}, {"residual": True}, {"dense": True}])
def test_samples_of_a_stack_are_those_of_a_loop_by_hand(model, shortcut):
    """The state of every layer is carried from symbol to symbol."""
    torch.manual_seed(2)
    d = model.description
    sizes = {"inputs": len(d.labels), "hidden": [5, 3], "outputs": len(d.labels)}
    net = co.Stack(["lstm", "gru"], readout="every", output="softmax", **sizes, **shortcut).double()
    with torch.no_grad():
        for p in net.parameters():
            p *= 3
    of_stack = co.Model(net, d)
    (drawn,) = of_stack.sample("the ", 25, seed=5, top_p=0.9)
    assert drawn == by_hand(of_stack, "the ", 25, Sampling(top_p=0.9), 5, 0)


def test_without_a_prime_a_text_begins_after_a_line_feed(model):
    assert model.sample(None, 12)[0] == model.sample("\n", 12)[0][1:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prime": "thé €"}, "never saw: 'é', '€'"),
        ({"prime": ""}, "prime must hold at least one character"),
        ({"length": 0}, "length must be a whole number, at least 1"),
        ({"count": 0}, "count must be a whole number, at least 1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"top_k": 0}, "top_k must be"),
        ({"top_p": 2.0}, "top_p must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_wrong_wishes_are_refused_in_one_line(model, given, message):
    with pytest.raises(InputError, match=message) as raised:
        model.sample(**given)
    assert "\n" not in str(raised.value)


def stand_in_for_a_run(monkeypatch, model):
    """Let the command line find this model in any folder."""
    monkeypatch.setattr("coadjoint.cli.sample.check_inputs", lambda run: None)
    monkeypatch.setattr("coadjoint.models.model.load", lambda run, warn: model)


@pytest.mark.parametrize(
    "words", ["--top-p 2", "--top-p=0", "--top-k 0", "--temperature -1", "--length 0", "--seed -1"]
)
def test_messages_name_the_option_that_was_given(model, coadjoint, monkeypatch, words):
    stand_in_for_a_run(monkeypatch, model)
    code, _, err = coadjoint("sample", "run", *words.split())
    assert code == 2
    option = words.replace("=", " ").split()[0]
    assert err.startswith(f"coadjoint: error: {option} must be ")


def test_words_with_commas_can_be_read_back(tmp_path):
    """Words of a column are written as a row of a CSV file, and read as one."""
    words = ["A,B", "C", 'say "D"'] * 8
    with open(tmp_path / "words.csv", "w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows([["word"], *([word] for word in words)])
    source = str(tmp_path / "words.csv")
    task = co.tasks.Data.read(source, kind="next", target="word", split=(1, 0, 0), dtype="float64")
    net = co.Network("gru", inputs=3, hidden=4, outputs=3, readout="every", output="softmax")
    model = co.Model(net.double(), task)
    prime = '"A,B", C'
    (text,) = model.sample(prime, 12, seed=1)
    found = next(csv.reader([text]))
    assert found[:2] == ["A,B", "C"]
    assert set(found) == set(words)
    assert model.sample(found[:2], 12, seed=1) == [text]


def test_other_models_are_refused(model):
    inputs = np.random.default_rng(0).normal(size=(20, 12, 2))
    task = co.tasks.Data.of(inputs, kind="next")
    other = co.Model(co.Network("gru", inputs=2, hidden=3, outputs=2, readout="every"), task)
    with pytest.raises(InputError, match="only a model of symbols"):
        other.sample("a")
    with pytest.raises(InputError, match=r"coadjoint sample, or model\.sample"):
        model.forecast("book.txt")
    sizes = {"inputs": model.network.inputs, "outputs": model.network.outputs}
    both = co.Stack(
        ["gru"], hidden=3, readout="every", output="softmax", bidirectional=True, **sizes
    )
    with pytest.raises(Unsupported, match="no state to go on from"):
        co.Model(both, model.description).sample("the ")


def test_words_have_commas_between_them(tmp_path):
    path = tmp_path / "notes.csv"
    rows = "".join(f"{'CDE'[t % 3]}4\n" for t in range(150))
    path.write_text("note\n" + rows)
    task = co.tasks.Data.read(str(path), kind="next", target="note")
    net = co.Network("gru", inputs=3, hidden=3, outputs=3, readout="every", output="softmax")
    model = co.Model(net, task)
    text = model.sample("C4,D4", 4, seed=1)[0]
    assert text == model.sample(["C4", "D4"], 4, seed=1)[0]
    words = text.split(",")
    assert words[:2] == ["C4", "D4"]
    assert len(words) == 6
    assert set(words) <= {"C4", "D4", "E4"}


def test_a_column_of_words_is_evaluated_by_what_follows(tmp_path):
    """As predicted row by row, at every row that another of its sequence follows."""
    path = tmp_path / "notes.csv"
    rows = [(song, "CDEF"[(t * t + song) % 4]) for song in range(12) for t in range(11)]
    path.write_text("song,note\n" + "".join(f"{song},{note}\n" for song, note in rows))
    task = co.tasks.Data.read(str(path), kind="next", id="song", target="note", dtype="float64")
    torch.manual_seed(0)
    sizes = {"inputs": task.inputs, "outputs": task.outputs, "dtype": torch.float64}
    net = co.Network("gru", hidden=3, readout="every", output="softmax", **sizes)
    model = co.Model(net, task)
    nats = []
    for song in range(12):
        own = [note for number, note in rows if number == song]
        state = None
        for note, following in itertools.pairwise(own):
            answer, state = model.step(note, state)
            nats.append(-math.log(answer.probabilities[model.labels.index(following)]))
    for given in ({}, {"target": "note"}):
        found = model.evaluate(path, resamples=0, **given).metrics
        assert found["nats-per-symbol"].value == pytest.approx(sum(nats) / len(nats), rel=1e-9)
    with pytest.raises(ConfigError, match=r"target does nothing here: .* the next symbol"):
        model.evaluate(path, target="song")


def test_a_text_is_stepped_through_blanks_included(model):
    state = None
    for symbol in "the cat":
        answer, state = model.step(symbol, state)
    assert answer.value in model.labels
    assert answer.probabilities.sum() == pytest.approx(1)


def test_a_network_that_reads_the_next_symbol_is_not_trained_to_predict_it(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    both = ["--train", "book.txt", "--kind", "next", "--bidirectional", "--out", "both"]
    error = run(tmp_path, "train", *both, code=2)
    assert "--bidirectional reads the next character too, which is the answer" in error
    assert not (tmp_path / "both").exists()
    (tmp_path / "x.csv").write_text("x\n" + "1\n2\n3\n" * 50)
    both = ["--train", "x.csv", "--kind", "next", "--bidirectional", "--out", "both"]
    assert "reads the next row too" in run(tmp_path, "train", *both, code=2)
    assert not (tmp_path / "both").exists()


def test_a_file_is_replaced_with_force_alone(model, tmp_path, coadjoint, monkeypatch):
    stand_in_for_a_run(monkeypatch, model)
    out = tmp_path / "s.txt"
    out.write_text("mine", encoding="utf-8")
    words = ("sample", "run", "--length", "3", "--out", str(out))
    code, _, err = coadjoint(*words)
    assert code == 2
    assert "exists. Pass another --out, or --force to replace it." in " ".join(err.split())
    assert out.read_text(encoding="utf-8") == "mine"
    for more in ((), ("--force",)):
        code, _, err = coadjoint("sample", "run", "--out", str(tmp_path), *more)
        assert code == 2
        assert "is a folder: pass the name of a file to --out." in " ".join(err.split())
    assert coadjoint(*words, "--force")[0] == 0
    assert len(out.read_text(encoding="utf-8")) == 4  # a line feed ends it


@pytest.mark.thorough
def test_the_commands_train_resume_and_sample_a_text(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    small = ["--train", "book.txt", "--kind", "next", "--hidden", "8", "--threads", "1"]
    said = run(tmp_path, "train", *small, "--steps", "24", "--out", "whole")
    assert "valid bits-per-character" in said
    for name in ("trigram", "bigram", "unigram"):
        assert name in said
    run(tmp_path, "train", *small, "--steps", "10", "--schedule", "constant", "--out", "part")
    run(tmp_path, "resume", "part", "--steps", "20")
    run(tmp_path, "train", *small, "--steps", "20", "--schedule", "constant", "--out", "once")
    weights = [(tmp_path / name / "model.safetensors") for name in ("part", "once")]
    one, other = (safetensors.torch.load_file(path) for path in weights)
    assert all(torch.equal(one[name], other[name]) for name in one)
    whole = run(tmp_path, "sample", "whole", "--prime", "the ", "--length", "30")
    assert whole.startswith("the ")
    assert len(whole.rstrip("\n")) <= 34
    again = run(tmp_path, "sample", "whole", "--prime", "the ", "--length", "30", "--count", "2")
    assert again.startswith(whole.rstrip("\n"))
    run(tmp_path, "sample", "whole", "--length", "5", "--out", "s.txt")
    assert (tmp_path / "s.txt").read_text(encoding="utf-8")
    error = run(tmp_path, "sample", "whole", "--length", "5", "--out", "none/s.txt", code=4)
    assert "its folder does not exist. Create it" in error
    error = run(tmp_path, "sample", "whole", "--prime", "€", code=2)
    assert "never saw" in error
    page = (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    assert "A sample" in page
    assert "bits-per-character" in page
    samples = json.loads((tmp_path / "whole" / "sample.json").read_text(encoding="utf-8"))
    assert [len(s["text"]) for s in samples["samples"]] == [400, 400]
    figures = run(tmp_path, "evaluate", "whole", "book.txt")
    assert "bits-per-character" in figures


@pytest.mark.thorough
def test_a_damaged_sample_leaves_a_page_with_a_notice(tmp_path):
    folder = tmp_path / "run"
    task = co.tasks.make("addition", length=10)
    plain = co.networks.make("elman", inputs=task.inputs, outputs=task.outputs, hidden=4)
    co.train(plain, task, steps=2, tests=10, confirm=10, folder=folder)
    assert not (folder / "sample.json").exists()
    (folder / "sample.json").write_text("{", encoding="utf-8")
    assert "sample.json could not be read" in pages.write(folder).read_text(encoding="utf-8")
    (folder / "sample.json").write_text('{"samples": [{"text": "<b>\\u202e"}]}', encoding="utf-8")
    page = pages.write(folder).read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page
    assert "\u202e" not in page
