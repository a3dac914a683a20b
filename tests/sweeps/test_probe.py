"""Engine 'auto' runs 'eager' where compiled loops are clearly slower, by an answer that is kept."""

from __future__ import annotations

import time

import pytest
import torch

import coadjoint as co
from coadjoint.cli.bench import tables
from coadjoint.sweeps import engines
from coadjoint.sweeps.engines.c import compiler, engine, probe

pytestmark = pytest.mark.skipif(
    engine.refusal("cpu") is not None, reason="engine 'cpu' has no compiler here"
)
CACHED = (
    compiler.cache_folder,
    compiler.compiler_setup,
    probe.kept_speed,
    engines.slowness,
    engines.warn_once,
)


@pytest.fixture
def forget(monkeypatch, tmp_path):
    """A function that forgets what this process knows; its cache is a folder of the test."""
    monkeypatch.setenv("COADJOINT_CACHE", str(tmp_path))

    def forget():
        for function in CACHED:
            function.cache_clear()

    forget()
    yield forget
    monkeypatch.undo()
    forget()


def choice(dtype=torch.float32):
    return engines.resolve("auto", co.cells.CELLS["gru"], "cpu", dtype)


def slow_forward(monkeypatch, seconds):
    """Make the compiled forward loop slow."""
    forward = engine.forward

    def slow(*args):
        time.sleep(seconds)
        return forward(*args)

    monkeypatch.setattr(engine, "forward", slow)


def test_a_slow_loop_is_passed_over_and_the_answer_kept(forget, monkeypatch, tmp_path, caplog):
    with monkeypatch.context() as patch:
        slow_forward(patch, 0.05)
        assert choice() == "eager"
        assert "engine 'cpu' is slow here" in choice().why
        assert "measured once" in caplog.text
        (kept,) = tmp_path.glob("*.json")
        net = co.Network(inputs=2, hidden=3, outputs=1)
        assert net.engine == "eager"
        # asked for by name it runs all the same
        assert co.Network(inputs=2, hidden=3, outputs=1, engine="cpu").engine == "cpu"
        assert any("where engine 'eager' takes" in line for line in explained())
    forget()
    assert choice() == "eager"  # the loop is fast now, but the machine has its answer
    kept.unlink()
    forget()
    assert choice() == "cpu"


def explained():
    return tables.explain_engines(["cpu"], ["elman"])


def test_types_have_answers_of_their_own(forget, monkeypatch, tmp_path):
    speeds = {torch.float32: probe.Speed(1.6, 1.0), torch.float64: probe.Speed(1.4, 1.0)}
    monkeypatch.setattr(probe, "measure", speeds.__getitem__)
    assert choice() == "eager"
    assert choice(torch.float64) == "cpu"  # slower, but not clearly
    assert co.Network(inputs=2, hidden=3, outputs=1, dtype=torch.float64).engine == "cpu"
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_an_answer_that_is_damaged_or_cannot_be_kept(forget, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "measure", lambda _: probe.Speed(9.0, 1.0))
    assert choice() == "eager"
    (kept,) = tmp_path.glob("*.json")
    kept.write_text("{}")
    monkeypatch.setattr(probe, "measure", lambda _: probe.Speed(0.5, 1.0))
    forget()
    assert choice() == "cpu"  # measured again
    forget()
    monkeypatch.setattr(compiler, "cache_is_temporary", lambda: True)
    monkeypatch.setattr(probe, "measure", lambda _: pytest.fail("measured"))
    assert choice() == "cpu"


def test_a_measurement_under_torch_modes(forget):
    with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        speed = probe.kept_speed(torch.float32)
    assert speed is not None
    assert min(speed) > 0
