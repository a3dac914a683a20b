"""Both ways in which engine `eager` makes a step give the same numbers, on any device.

The names of the engines that it replaced still work.
"""

from __future__ import annotations

import logging

import pytest
import torch

import coadjoint as co
from coadjoint.sweeps import engines
from coadjoint.sweeps.engines import REPLACED, eager, resolve
from coadjoint.sweeps.engines.eager import fused, in_place
from problems import CELLS, NEWER, ONE, Problem


@pytest.fixture
def once_more():
    """What has been said is forgotten, so that it is said again."""
    engines.warn_once.cache_clear()
    yield
    engines.warn_once.cache_clear()


@pytest.mark.parametrize("name", CELLS)
def test_fused_steps_equal_the_definition(name):
    """Every source, samples of unequal lengths.

    Tests have no GPU, so the loops of other devices run on the CPU.
    """
    Problem(name, [4, 3, 3, 1], 5).against(fused)


@pytest.mark.parametrize("name", NEWER)
def test_fused_steps_of_the_other_cells_equal_the_definition(name):
    Problem(name, [3, 2, 1], 4).against(fused, **ONE)


def test_the_device_decides():
    assert eager.refusal("cpu") is None
    assert eager.refusal("cuda") is None
    assert eager.loops_for(torch.zeros(1)) is in_place
    assert eager.loops_for(torch.zeros(1, device="meta")) is fused


@pytest.mark.parametrize("cell", ["elman", "lstm"])
def test_a_penalised_gradient_is_the_same_by_fused_steps(cell, monkeypatch):
    torch.manual_seed(0)
    net = co.Network(cell, inputs=2, hidden=5, outputs=2, engine="eager", dtype=torch.float64)
    batch = co.Batch(
        torch.randn(7, 3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    )
    method = co.Penalised("log-ratio", 0.3)
    expected = method(net, batch, "squared").gradient
    monkeypatch.setattr(eager, "loops_for", lambda like: fused)
    for name, found in method(net, batch, "squared").gradient.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("old", REPLACED)
def test_an_old_name_runs_its_replacement_and_warns_once(old, once_more, caplog):
    with caplog.at_level(logging.WARNING, "coadjoint"):
        assert resolve(old, co.cells.lstm, "cpu") == REPLACED[old] == "eager"
        net = co.Network("elman", inputs=1, hidden=2, outputs=1, engine=old)
        module = co.nn.GRU(1, 2, engine=old)
        assert (net.engine, module.engine) == ("eager", "eager")
        module.engine = old
    assert [r.message for r in caplog.records] == [
        f"engine '{old}' is deprecated: engine 'eager' runs in its place."
    ]
    assert old not in engines.ENGINES


@pytest.mark.slow
@pytest.mark.parametrize("old", REPLACED)
def test_a_run_folder_that_names_an_engine_of_the_past_is_resumed(
    old, once_more, coadjoint, caplog, tmp_path
):
    words = (
        "train addition --length 10 --hidden 3 --batch 4 --steps 6 --every 6 --checkpoint 3 "
        "--tests 10 --threads 1"
    )
    folder = tmp_path / "run"
    code, _, _ = coadjoint(*words.split(), "--engine", old, "--out", str(folder), "--quiet")
    assert code == 0
    for path in (folder / "config.yaml", *folder.glob("checkpoints/*/state.json")):
        assert old in path.read_text()
    engines.warn_once.cache_clear()
    caplog.clear()
    code, out, err = coadjoint("resume", str(folder), "--steps", "8")
    assert code == 0, err
    assert (
        f"engine '{old}' is deprecated: engine 'eager' runs in its place."
        in caplog.text + out + err
    )
    assert "finished at step 8" in out + err
