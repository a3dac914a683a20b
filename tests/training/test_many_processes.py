"""One model on several processes of torchrun: the gradients of one process, the same bits on any
number of processes, one voice, and nothing lost when a process dies.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

import coadjoint as co
import sharing
import warm
from paths import SUPPORT
from sharing_ranks import BITS, COMMAND, REFUSED, SMALL, call
from torchrun import GRACE, said, start, wait_for_rows, worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="needs gloo",
    ),
]

# Three share the samples unevenly; two processes are met by the commands below as well.
SIZES = (pytest.param(2, marks=pytest.mark.thorough), 3)
RUNS = tuple(sharing.run_cases())


@functools.cache
def outcomes(size: int) -> tuple[dict, Path]:
    """What came of the cases on so many processes, and the folder they wrote to."""
    folder = Path(tempfile.mkdtemp())
    for done in warm.launch(size, SUPPORT / "sharing_ranks.py", folder, cwd=folder):
        assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "outcomes.json").read_text()), folder


@functools.cache
def alone(name: str) -> list:
    """The outcome of a run in this process alone."""
    return json.loads(json.dumps(sharing.outcome(name)))


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_one_process(size):
    for differences in outcomes(size)[0]["differences"]:
        assert {n: d for n, d in differences.items() if not isinstance(d, float) or d > 1e-12} == {}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BITS)
def test_bits_are_the_same_on_any_number_of_processes(size, name):
    assert outcomes(size)[0]["bits"][name] == sharing.gradient_bits(name)


@pytest.mark.parametrize("size", SIZES)
def test_large_rows_have_the_same_bits_by_segments(size):
    found = dict(outcomes(size)[0]["bits by segments"])
    assert found.pop("overflow") == sharing.overflow()
    assert found == {name: sharing.gradient_bits(name) for name in BITS}
    assert outcomes(size)[0]["exchange"] == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_different_batches_are_refused_by_all(size):
    words = "the processes were given different batches: each must draw the same one"
    for answers in outcomes(size)[0]["different batches"].values():
        assert len(answers) == size
        assert all(answer.startswith(f"InputError: {words}") for answer in answers)


@pytest.mark.parametrize("size", SIZES)
def test_an_overflow_in_one_process_reaches_all(size):
    assert outcomes(size)[0]["overflow"] == [sharing.overflow()] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RUNS)
def test_runs_end_in_the_same_weights_on_any_number_of_processes(size, name):
    assert outcomes(size)[0][name] == alone(name)


@pytest.mark.parametrize("size", SIZES)
def test_a_signal_to_one_process_saves_the_run_at_one_step(size):
    """It came while the batch of the seventh step was drawn, by rank 1 alone."""
    found, folder = outcomes(size)
    words = f"saved at step 7. Resume with: coadjoint resume {folder / 'stopped'}"
    assert found["stopped"] == f"Interrupted: Interrupted by SIGTERM; {words}"
    assert found["resumed"] == alone("adam")


@pytest.mark.parametrize("size", SIZES)
def test_a_saved_run_goes_on_with_one_process(size, tmp_path):
    folder = tmp_path / "run"
    task = sharing.Stopping(10)
    task.at = (0, 6)
    with pytest.raises(co.Interrupted):
        sharing.train("adam", task=task, folder=folder)
    with pytest.raises(co.StorageError, match="trained with shards=6; got shards=2"):
        sharing.train("adam", folder=folder, resume=True, shards=2)
    again = sharing.outcome("adam", folder=folder, resume=True)
    assert json.loads(json.dumps(again)) == outcomes(size)[0]["adam"]


@functools.cache
def trained_alone() -> Path:
    """The run of COMMAND, and then longer, in one process."""
    run = Path(tempfile.mkdtemp()) / "run"
    for words in (f"{COMMAND} --out {run}", f"resume {run} --steps 16"):
        call_alone(words)
    return run


def call_alone(words: str) -> None:
    code, _, complaint = call(words)
    assert (code, complaint) == (0, "")


@pytest.mark.parametrize("size", SIZES)
def test_the_command_line_trains_and_resumes(size):
    found, folder = outcomes(size)
    rank_0, *others = found["commands"]
    for name in ("train", "continued", "longer"):
        assert rank_0[name][0] == 0
        assert rank_0[name][2] == ""
        assert [other[name] for other in others] == [[0, "", ""]] * (size - 1)
    assert f"; {size} processes, 6 shards\n" in rank_0["train"][1]
    assert "has already ended (finished)" in rank_0["continued"][1]
    assert "Resuming" in rank_0["longer"][1]
    run = folder / "run"
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (run / name).read_bytes() == (trained_alone() / name).read_bytes()
    result = json.loads((run / "result.json").read_text())
    assert (result["processes"], result["shards"]) == (size, 6)
    about = json.loads((run / "environment.json").read_text())
    assert (about["processes"], about["shards"]) == (size, 6)
    assert "  shards: 6\n" in (run / "config.yaml").read_text()
    assert "processes" in (run / "report.html").read_text()


CODES = {"a folder in use": 4, "no such file": 3}
WORDS = {
    "a folder in use": "already holds a run",
    "fewer shards than processes": "this run has 1 shard, but torchrun started",
    "no such file": "nowhere.csv does not exist",
    "hessian-free": "optimiser 'hessian-free' needs all samples of a step in one process",
    "ridge": "optimiser 'ridge' needs all samples of a step in one process",
    "temporal": "direction 'temporal' needs the costates of all samples in one process",
    "omega-published": "penalty 'omega-published' is one value for the whole batch",
    "other settings": "--batch was 7 and is now 8",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_ends_all_processes_and_is_printed_once(size, name):
    found, folder = outcomes(size)
    rank_0, *others = (answers[name] for answers in found["commands"])
    code, out, err = rank_0
    assert code == CODES.get(name, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert WORDS[name] in err
    assert others == [[code, "", ""]] * (size - 1)
    assert not (folder / "new").exists()


# Refused before the processes are connected; test_errors_under_torchrun has what the others print.
EARLY = {
    "train temporal-order --stpes 3": "Did you mean --steps?",
    "compare addition --out new": "which only `train` and `resume` can share",
    f"{COMMAND} --continue": "--continue needs --out",
}


@pytest.mark.parametrize(("words", "complaint"), EARLY.items())
def test_rank_0_refuses_before_it_connects(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_ends_the_run_with_one_line(tmp_path):
    """Of two started by torchrun, rank 1 is killed; the same command then goes on, with three.

    All other cases are started without torchrun itself, which takes less time.
    """
    words = f"train temporal-order --steps 200 --every 40 --checkpoint 10 {SMALL} --shards 3"
    command = ["-m", "coadjoint", *words.split(), "--continue", "--out", "run"]
    process = start(2, *command, cwd=tmp_path)
    try:
        wait_for_rows(tmp_path / "run", 30, process)
        rank_1 = worker(process, 1)
        assert rank_1 is not None
        os.kill(rank_1, signal.SIGKILL)
        process.wait(timeout=GRACE)
    finally:
        process.kill()
    [line] = said(tmp_path)
    assert line.startswith("coadjoint: error: one of the 2 processes of this run has died")
    assert line.endswith("Resume with: coadjoint resume run")
    again = start(3, *command, cwd=tmp_path, name="again")
    try:
        assert again.wait(timeout=GRACE) == 0, (tmp_path / "again.err").read_text()
    finally:
        again.kill()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["processes"], result["shards"]) == (3, 3)
    call_alone(f"{words} --out {tmp_path / 'undisturbed'}")
    for name in ("metrics.jsonl", "model.safetensors"):
        undisturbed = tmp_path / "undisturbed" / name
        assert (tmp_path / "run" / name).read_bytes() == undisturbed.read_bytes()


def test_the_plan_of_a_run_refuses_what_needs_all_samples():
    net = co.Network("elman", inputs=6, hidden=2, outputs=4, output="softmax")
    task = co.tasks.TemporalOrder(10)
    with pytest.raises(co.InputError, match="optimiser 'hessian-free' needs all samples"):
        co.train(net, task, optimiser=co.optimisers.hessian_free(), shards=2)
    with pytest.raises(co.InputError, match="direction 'temporal' needs the costates"):
        co.train(net, task, optimiser=co.optimisers.sgd(0.1, direction="temporal"), shards=2)
    with pytest.raises(co.InputError, match="shared already"):
        co.train(net, task, gradient=co.Shared(co.BPTT()), shards=2)
    with pytest.raises(co.InputError, match="shards must be a whole number"):
        co.train(net, task, shards=0)


def test_one_shard_has_the_bits_of_none():
    found = [sharing.outcome("adam", shards=shards, **more) for shards, more in ALONE]
    assert found[0] == found[1] == found[2]


ALONE = ((None, {}), (1, {}), (1, {"distributed": True}))


@pytest.mark.parametrize(
    "learn",
    [
        lambda net, stream: co.online.learn(net, stream, learner=co.Shared(co.RTRL(), 2)),
    ],
)
def test_a_stream_is_learned_by_one_process(learn):
    net = co.Network("elman", inputs=1, hidden=2, outputs=1)
    with pytest.raises(co.InputError, match=r"learner must be RTRL\(\) or Truncated"):
        learn(net, iter(()))
