"""co.train takes a chain made in Python, whatever its maps, and resumes it bit for bit."""

import os
import pickle
import signal

import numpy as np
import pytest
import torch
from torch import nn

import coadjoint as co
from build import weights
from coadjoint.errors import InputError, OptionError
from coadjoint.optimisers import schedules
from coadjoint.tasks import Samples
from coadjoint.tasks.denoising import Denoising, denoise
from coadjoint.training import display, json_rows, plan, trainer
from compare import equal

QUICK = {"batch": 8, "every": 4, "probes": 4, "steps": 8, "checkpoint": 3}


def user_model():
    """A user's own layers, with what draws at random."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 12), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(12), nn.Linear(12, 10)
    )


CHAINS = {
    "mlp": lambda: co.Chain.mlp(64, [12] * 4, 10, output="softmax", seed=0),
    "user": lambda: co.Chain(user_model(), output="softmax"),
}


def isometry():
    weight = co.penalties.pretrain(1.0, 3)
    return co.Penalised("isometry", weight, pretrain=3)


class Stop(display.Silent):
    """Interrupts the run in its fifth step."""

    def step(self, step, row):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("method", [co.BP, isometry], ids=["plain", "isometry"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_trained_and_resumed_bit_for_bit(name, method, tmp_path):
    task = co.tasks.make("digits-flat")
    rate = co.optimisers.pretraining(3.0, 3, co.optimisers.cosine())

    def train(folder, **options):
        optimiser = co.optimisers.adam(1e-3, rate)
        given = QUICK | {"gradient": method(), "optimiser": optimiser, "folder": folder} | options
        return co.train(CHAINS[name](), task, **given)

    whole = train(tmp_path / "whole")
    with pytest.raises(co.Interrupted):
        train(tmp_path / "run", display=Stop())
    again = train(tmp_path / "run", resume=True)
    assert equal(weights(again.network), weights(whole.network))
    files = [tmp_path / folder / "metrics.jsonl" for folder in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    steps = [row for row in whole.rows if row["kind"] == "train"]
    assert [row["rate"] for row in steps[:3]] == pytest.approx([3e-3] * 3)
    assert steps[3]["rate"] == pytest.approx(1e-3 * co.optimisers.cosine()(3, 8))
    probes = [row for row in whole.rows if row["kind"] == "probe"]
    assert probes[0]["axis"] == "layer i"
    assert len(probes[0]["temporal"]) == len(whole.network)  # without dropout, as all of the probe


def test_images_reach_a_chain_of_convolutions():
    net = co.Chain.cnn((1, 8, 8), [4], 10, output="softmax", seed=0)
    result = co.train(net, co.tasks.make("digits-image"), **QUICK)
    assert result.step == 8
    own = co.Chain(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10), output="softmax"
    )
    assert own.inputs == 0  # its maps do not say
    assert co.train(own, co.tasks.make("digits-image"), **QUICK).step == 8


def test_a_network_and_a_task_must_agree_on_time():
    flat = co.tasks.make("digits-flat")
    for net, task, words in (
        (CHAINS["mlp"](), co.tasks.make("xor", length=12), "a Chain has no time steps"),
        (co.Network(inputs=64, outputs=10, output="softmax", hidden=2), flat, "use a co.Chain"),
        (CHAINS["mlp"](), co.tasks.make("digits-image"), r"\[1, 8, 8\]; this chain reads \[64\]"),
        (co.Chain.mlp(64, [3], 10), flat, "output='softmax'"),
        (co.Chain(nn.Linear(32, 10), output="softmax"), flat, "inputs=64"),
    ):
        with pytest.raises(InputError, match=words):
            trainer.Training(net, task, plan.TrainingPlan())


def test_a_schedule_of_pretraining_is_another_share_first():
    after = co.optimisers.plateau(0.5, 3, warmup=4)
    schedule = co.optimisers.pretraining(2.0, 6, after)
    assert (schedule.name, schedule.patience, schedule.decay) == ("plateau", 3, 0.5)
    assert [schedule(step, 9) for step in range(8)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 1.0, 1.0]
    again = pickle.loads(pickle.dumps(schedule))
    assert [again(step, 9) for step in range(8)] == [schedule(step, 9) for step in range(8)]
    assert co.optimisers.pretraining(2.0, 1)(5, 9) == 1
    with pytest.raises(InputError, match="share"):
        schedules.pretraining(0.0, 3)
    made = co.optimisers.make("adam", lr=0.1, pretrain=3, pretrain_lr=0.3)
    assert made.lr * made.schedule(0, 9) == pytest.approx(0.3)
    assert co.optimisers.make("adam", pretrain=3).schedule(0, 9) == 1
    with pytest.raises(OptionError, match="pretrain_lr needs pretrain"):
        co.optimisers.make("adam", pretrain_lr=0.3)
    with pytest.raises(OptionError, match="pretrain_lr does nothing with optimiser hessian-free"):
        co.optimisers.make("hessian-free", pretrain=3, pretrain_lr=0.3)


def test_a_weight_for_pretraining_ends_with_it():
    method = co.gradients.make(
        penalty="isometry", weight=2.0, weight_schedule="pretrain", pretrain=3
    )
    assert [method.rho(step) for step in range(5)] == [2, 2, 2, 0, 0]
    assert pickle.loads(pickle.dumps(method.weight))(3) == 0
    net, batch = CHAINS["mlp"](), co.tasks.make("digits-flat").batch(0, 8, 0)
    method.step = 3  # the gradient of the loss alone, bit for bit
    plain = co.BP().evaluate(net, batch, "cross-entropy").gradient
    assert equal(method.evaluate(net, batch, "cross-entropy").gradient, plain)


def test_any_task_without_time_can_be_restored():
    images = co.tasks.make("digits-image")
    task = denoise(images, 0.25)
    assert (task.name, task.noise, task.shape, task.outputs) == ("digits-denoise", 0.25, (64,), 64)

    class Ramps(co.tasks.Collection):
        name, inputs, outputs, shape = "ramps", 6, 2, (2, 3)

    ramps = Ramps({"train": Samples(np.arange(24.0).reshape(4, 2, 3), np.zeros(4))})
    clean = denoise(ramps)
    assert type(clean) is Denoising
    batch = clean.batch(0, 4, 0)
    assert torch.equal(batch.u, batch.y)
    assert batch.u.shape == (4, 6)
    with pytest.raises(InputError, match="made of sequences"):
        denoise(co.tasks.make("xor", length=12))


def test_rows_of_a_chain_are_plain_json(tmp_path):
    co.train(CHAINS["mlp"](), co.tasks.make("digits-flat"), **QUICK, folder=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()
    assert all(json_rows.parse_row(line, "metrics.jsonl") for line in lines)
