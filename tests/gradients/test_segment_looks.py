"""Looks in segments find what looks at once find, in the memory that is predicted for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import coadjoint as co
from coadjoint.gradients import memory
from coadjoint.gradients.segment_looks import run_in_segments
from coadjoint.sweeps.engines import eager
from coadjoint.sweeps.engines.eager import fused
from coadjoint.training import validation
from coadjoint.training.looks import Looks
from paths import TOOLS


def problem(cell, readout, T, B, hidden, engine="auto", ragged=False):
    torch.manual_seed(0)
    net = co.Network(
        cell, inputs=2, hidden=hidden, outputs=3, readout=readout, engine=engine
    ).double()
    shape = (T, B, 3) if readout == "every" else (B, 3)
    lengths = torch.linspace(T // 3, T, B).long() if ragged else None
    weight = torch.rand(B).double() if ragged else None
    u = torch.randn(T, B, 2).double()
    return net, co.Batch(u, torch.randn(shape).double(), lengths, weight=weight, reduce="mean")


class Squared:
    """As much of a task as a probe reads."""

    loss = "squared"


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_looks_in_segments_see_the_same(cell, readout, ragged):
    net, batch = problem(cell, readout, 200, 64, 4, ragged=ragged)
    with torch.no_grad():
        whole = net.run(batch)
        cut = run_in_segments(net, batch, "squared", 5)
        assert torch.equal(cut.a, whole.a)
        assert torch.equal(cut.lengths, whole.lengths)
        losses = [run.loss("squared", batch.y, reduce="mean") for run in (whole, cut)]
    assert torch.equal(*losses)
    expected = validation.probe_gradient(net, batch, Squared)
    found = validation.probe_gradient(net, batch, Squared, segments=5)
    assert found.keys() == expected.keys()
    assert found["gradients"] == pytest.approx(expected["gradients"], rel=1e-12)
    for name in ("t", "log10_costates", "temporal", "decay"):
        assert found[name] == pytest.approx(expected[name], abs=1e-12), name


def test_held_out_data_is_looked_at_in_parts():
    task = co.tasks.Addition((30, 60), ragged=True)
    torch.manual_seed(0)
    net = co.Network("gru", inputs=2, hidden=5, outputs=1).double()
    seen = []
    run = net.run
    expected = validation.evaluate(net, task, "test", n=70)
    net.run = lambda batch: seen.append(batch) or run(batch)
    found = validation.evaluate(net, task, "test", n=70, looks=Looks(3, 16))
    assert not seen  # the whole is never run
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_run_in_segments_looks_in_segments(monkeypatch):
    task = co.tasks.TemporalOrder(30)
    net = co.Network("elman", inputs=6, hidden=4, outputs=4, output="softmax")

    def refuse(*_):
        raise AssertionError("a whole run")

    monkeypatch.setattr(co.Network, "run", refuse)
    result = co.train(
        net, task, gradient=co.BPTT(segments=2), steps=2, every=1, batch=8, tests=20, probes=4
    )
    assert result.step == 2


METHODS = {
    "bptt": lambda segments: co.BPTT(segments),
    "log-ratio": lambda segments: co.Penalised("log-ratio", 0.1, segments),
}


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "segments"), [("elman", None), ("lstm", 3)])
def test_memory_on_a_gpu_is_stated_and_respected(cell, segments, monkeypatch):
    """By the loops that a GPU runs where W does not stay on the chip, on a CPU."""
    T, B, hidden = 192, 64, 24
    net, batch = problem(cell, "last", T, B, hidden, engine="eager")
    net, batch = net.float(), batch.to(torch.float32, "cpu")
    monkeypatch.setattr(eager, "loops_for", lambda like: fused)
    monkeypatch.setattr(memory, "is_on_accelerator", lambda net: True)
    entries = hidden * (len(net.cell.gates) + len(net.cell.slots))
    constant = memory.ACCELERATOR_BYTES + 8 * memory.ROWS_PER_CHUNK * entries

    def peak(work):
        work()  # what is kept for later
        with memory.PeakBytes() as counted:
            work()
        return counted.most

    def look():
        with torch.no_grad():
            Looks(segments).run(net, batch, "squared")

    checks = {
        "look": (memory.predict_look(net, T, B, segments), look),
        "probe": (
            memory.predict_probe(net, T, B, segments),
            lambda: validation.probe_gradient(net, batch, Squared, segments=segments),
        ),
    }
    for name, make in METHODS.items():
        method = make(segments)
        stated = memory.predict(net, T, B, method)
        checks[name] = (stated, lambda method=method: method(net, batch, "squared"))
    ratios = {name: (stated - constant) / peak(work) for name, (stated, work) in checks.items()}
    assert all(0.9 < ratio < 1.5 for ratio in ratios.values()), ratios


@pytest.mark.slow
def test_the_measurement_on_a_gpu_claims_nothing_without_one():
    """The cases are stated and trained on a CPU, and none passes as measured."""
    words = "--device cpu --T 20 --B 2 --hidden 4 --probes 2 --tests 2 --segments none,2"
    command = [sys.executable, TOOLS / "gpu_memory.py", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "0 of 4 cases are as stated, 4 were not measured"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_measurement_says_that_there_is_no_gpu():
    done = subprocess.run([sys.executable, TOOLS / "gpu_memory.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
