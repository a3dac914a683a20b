"""Sequences of symbols: what is read, what is predicted, and the baselines by hand."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import CoadjointError, ConfigError, DataError
from coadjoint.tasks import Data
from coadjoint.tasks.description import Description
from coadjoint.tasks.files.characters import holds_table
from coadjoint.tasks.symbol_baselines import NAMES, contexts_of
from coadjoint.training.advice import BASELINES

TEXT = "the cat sat on the mat\nand the hat sat on the bat; " * 8 + "ödipus\n"


def write(path, text):
    path.write_bytes(text.encode())
    return str(path)


def test_a_text_is_read_as_its_next_characters(tmp_path):
    data = Data.read(write(tmp_path / "book.txt", TEXT), kind="next", dtype="float64")
    d = data.description
    assert d.labels == sorted(set(TEXT))
    assert (d.kind, d.at, d.symbols, data.metric, data.lower) == (
        *("classify", "every", "character"),
        *("bits-per-character", True),
    )
    N = len(TEXT)
    valid = test = round(0.1 * N)
    ends = {"train": N - valid - test, "valid": N - test, "test": N}
    start = 0
    counts = Counter(TEXT[: ends["train"]])
    shares = np.array([counts[c] / ends["train"] for c in d.labels])
    for split, end in ends.items():
        batch = next(iter(data.held_out(split, 0)))
        part = TEXT[start:end]
        wanted = [d.labels.index(c) for c in part]
        assert batch.y[:, 0].tolist() == wanted[1:]
        one_hot = np.eye(len(d.labels))[wanted[:-1]] - shares
        np.testing.assert_allclose(batch.u[:, 0].numpy(), one_hot, atol=1e-15)
        start = end
    assert "is read as a text" in " ".join(data.summary().split())  # lines are wrapped


def test_the_metrics_are_those_of_the_definition(tmp_path):
    data = Data.read(write(tmp_path / "book.txt", TEXT), kind="next", dtype="float64")
    net = co.Network(
        "gru", inputs=data.inputs, hidden=3, outputs=data.outputs, readout="every", output="softmax"
    ).double()
    values = co.evaluate(net, data, "test")
    batch = next(iter(data.held_out("test", 0)))
    p = torch.softmax(net(batch.u).a[:, 0], -1).detach().numpy()
    y = batch.y[:, 0].tolist()
    nats = -math.fsum(math.log(p[t, k]) for t, k in enumerate(y)) / len(y)
    assert values["nats-per-character"] == pytest.approx(nats, rel=1e-9)
    assert values["bits-per-character"] == pytest.approx(nats / math.log(2), rel=1e-9)
    assert values["perplexity"] == pytest.approx(math.exp(nats), rel=1e-9)
    assert values["loss"] == pytest.approx(nats, rel=1e-9)


def smoothed(train, weight, context, symbol, vocabulary):
    """p(symbol | context) by counting in the text itself."""
    if context is None:
        return 1 / len(vocabulary)
    shorter = smoothed(train, weight, context[1:] if context else None, symbol, vocabulary)
    follows = hits = 0
    order = len(context)
    for t in range(max(order, 1), len(train)):
        if train[t - order : t] == context:
            follows += 1
            hits += train[t] == symbol
    return (hits + weight * shorter) / (follows + weight)


def test_baselines_are_counts_of_the_training_part(tmp_path):
    data = Data.read(write(tmp_path / "book.txt", TEXT), kind="next")
    N = len(TEXT)
    held = round(0.1 * N)
    train = TEXT[: N - 2 * held]
    test = TEXT[N - held :]
    vocabulary = sorted(set(TEXT))
    for baseline in data.baselines:
        order = NAMES.index(baseline.name)
        weight = float(baseline.about.split("smoothed by ")[1].rstrip(")"))
        bits = 0.0
        for t in range(1, len(test)):
            context = test[max(0, t - order) : t] if order else ""
            bits -= math.log2(smoothed(train, weight, context, test[t], vocabulary))
        found = baseline.metrics["test"]["bits-per-character"]
        assert found == pytest.approx(bits / (len(test) - 1), rel=1e-12), baseline.name
    assert [b.name for b in data.baselines] == ["trigram", "bigram", "unigram"]


def test_contexts_have_numbers_of_their_own():
    """Of 3 symbols, 3 standing for an unknown one: the two symbols up to each step."""
    codes = np.array([0, 0, 1, 0, 2, 1, 1, 2, 2, 0, 3, 1, 2, 3])
    found = contexts_of(codes, 2, 3)
    pairs = [tuple(codes[t - 1 : t + 1]) for t in range(1, len(codes))]
    is_known = [3 not in pair for pair in pairs]
    assert (found == -1).tolist() == [True, *(not known for known in is_known)]
    numbers = {}
    for pair, number in zip(pairs, found[1:].tolist(), strict=True):
        if number >= 0:
            assert numbers.setdefault(pair, number) == number
    assert len(set(numbers.values())) == len(numbers) == 9
    assert contexts_of(codes, 0, 3).tolist() == [0] * len(codes)


def test_chunks_hold_every_target_of_training_once(tmp_path):
    data = Data.read(write(tmp_path / "book.txt", TEXT), kind="next")
    whole = np.asarray(data.sets["train"].y[0])
    data.cut_training(7)
    chunks = data.sets["train"]
    assert np.concatenate(list(chunks.y)).tolist() == whole.tolist()
    assert chunks.steps().max() == 7
    assert [len(u) for u in chunks.u] == chunks.steps().tolist()
    assert data.baselines[0].metrics  # of the text as it was


def test_ends_of_lines_and_a_byte_order_mark_are_no_characters(tmp_path):
    plain = Data.read(write(tmp_path / "a.txt", TEXT), kind="next")
    other = tmp_path / "b.txt"
    other.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    packed = tmp_path / "c.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    for path in (other, packed):
        data = Data.read(str(path), kind="next")
        assert data.description.labels == plain.description.labels
        assert list(data.sets["test"].y[0]) == list(plain.sets["test"].y[0])


@pytest.mark.parametrize(
    ("content", "is_table"),
    [
        ("a,b\n1,2\n3,4\n", True),
        ("time value\n0 1\n1 3\n", True),
        ("value\n1\n2.5e3\n-3\n", True),
        ("a;b\n1;2\n", True),
        ("day\tx\n2020-01-01\t3\n", True),
        ("roses are red,\nviolets are blue,\n", False),
        ("a,b\nc,d\n", False),
        ("3.14159265358979\n", False),
        ("In 1984,\n\nthere were 2\n", False),
        ('he said "no,\nand left\n', False),
    ],
)
def test_a_txt_is_a_table_if_every_line_has_the_cells_of_the_first_and_a_number(
    tmp_path, content, is_table
):
    assert holds_table(write(tmp_path / "a.txt", content), 1 << 20) is is_table


def test_a_txt_that_is_a_table_is_read_as_one_and_options_decide(tmp_path):
    rows = "value\n" + "".join(f"{math.sin(t)}\n" for t in range(150))
    path = write(tmp_path / "series.txt", rows)
    assert Data.read(path, kind="next").description.features == ["value"]
    as_text = Data.read(path, kind="next", text=True)
    assert as_text.description.symbols == "character"
    text = write(tmp_path / "book.txt", TEXT)
    with pytest.raises(CoadjointError):
        Data.read(text, kind="next", text=False)
    with pytest.raises(ConfigError, match=r"^--sep does not go with a text of characters"):
        Data.read(text, kind="next", text=True, sep=";")
    with pytest.raises(ConfigError, match=r"^--text goes with --kind next"):
        Data.read(text, kind="classify", text=True)


def notes_table(path, songs=12):
    rng = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["song", "beat", "note"])
        for song in range(songs):
            for beat in range(20):
                out.writerow([f"s{song}", beat, "CDEFG"[(beat + rng.integers(2)) % 5]])
    return str(path)


def test_a_column_of_words_is_a_sequence_of_symbols(tmp_path):
    path = notes_table(tmp_path / "notes.csv")
    data = Data.read(path, kind="next", id="song", time="beat", target="note")
    d = data.description
    assert (d.symbols, d.labels, d.features) == ("symbol", list("CDEFG"), ["note"])
    assert len(data.sets["train"]) == 10
    assert all(len(u) == 19 for u in data.sets["train"].u)
    assert data.metric == "bits-per-symbol"
    assert [b.name for b in data.baselines] == ["trigram", "bigram", "unigram"]
    again = Data.read(path, kind="next", id="song", time="beat", features="note")
    assert again.description.labels == d.labels
    Description.of(data.describe())


def test_whole_numbers_are_symbols_if_they_are_called_categorical(tmp_path):
    path = tmp_path / "n.csv"
    path.write_text("x\n" + "".join(f"{[10, 9, 2][t % 3]}\n" for t in range(150)))
    data = Data.read(str(path), kind="next", target="x", categorical="x")
    assert data.description.labels == ["2", "9", "10"]
    assert Data.read(str(path), kind="next", target="x").description.kind == "next"


def test_unknown_symbols_are_read_and_are_no_targets(tmp_path):
    train = write(tmp_path / "a.txt", TEXT)
    test = write(tmp_path / "b.txt", "a mat that sat;\n€ato hat\n" * 2)
    data = Data.read(train, kind="next", test=test, dtype="float64")
    assert any("are not in the vocabulary: '€'." in note for note in data.notes)
    batch = next(iter(data.held_out("test", 0)))
    text = "a mat that sat;\n€ato hat\n" * 2
    known = set(TEXT)
    for t, (symbol, after) in enumerate(itertools.pairwise(text)):
        assert bool(batch.u[t, 0].any()) == (symbol in known)
        assert bool(batch.mask[t, 0]) == (after in known)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"aaaaaaaaaaaaaaaaaaaaaaaaaaaa", "holds one character only, 'a'"),
        (b"\xff\xfea\x00", "UTF-16"),
        (b"caf\xe9 " * 20, "is not UTF-8"),
        (b"ab", "has 2 characters, too few to split into 3 sets"),
        (b"\x7fELF" + b"\0\0\0\1" * 30, "a NUL byte"),
        ("".join(map(chr, range(0x4E00, 0x6000))).encode(), "at most 4,096"),
    ],
)
def test_texts_that_cannot_be_learned_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        Data.read(str(path), kind="next")
    assert "\n" not in str(raised.value)


def test_a_damaged_description_is_refused(tmp_path):
    data = Data.read(write(tmp_path / "book.txt", TEXT), kind="next")
    good = data.describe()
    for change in ({"symbols": "word"}, {"at": "last"}, {"labels": good["labels"][::-1]}):
        with pytest.raises(DataError, match="damaged"):
            Description.of(good | change)


def test_a_text_that_is_read_as_a_table_is_refused_with_the_flags_of_a_text(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("a line\n\nanother line\n", encoding="utf-8")
    with pytest.raises(DataError, match="If the file holds a text, not a table, pass --kind next"):
        Data.read(str(path), kind="classify", target="a line")


def test_advice_has_the_names_of_the_table():
    for name in NAMES:
        assert BASELINES[name] == f"{name} counts"


def test_symbols_that_are_counted_are_in_quotes(tmp_path):
    """A blank would be nothing."""
    data = Data.read(write(tmp_path / "t.txt", TEXT), kind="next")
    assert r"classes: '\n' (9), ' ' (" in data.summary()
