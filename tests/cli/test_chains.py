"""Networks without time on the command line: settings, training, resuming, predictions."""

import csv
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.cli import build, chains, compared_runs
from coadjoint.cli import flags as setting_flags
from coadjoint.errors import CoadjointError
from coadjoint.networks import chain_factory
from coadjoint.objectives.batch import Batch
from coadjoint.training import display, loop, settings, storage
from coadjoint.training.predict import load_model
from coadjoint.training.run_folder import RunFolder

SMALL = ["--steps", "4", "--every", "2", "--probes", "4", "--batch", "3", "--quiet"]
FLAT = ["train", "digits-flat", *SMALL]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def config(name="digits-flat", gradient=None, training=None, task=None, **network):
    values = {
        "task": {"name": name, **(task or {})},
        "network": network,
        "gradient": gradient or {},
        "training": {"batch": 4, "probes": 4, **(training or {})},
    }
    return setting_flags.resolve(None, values)


NETWORKS = {
    "dense": {"chain": "8x3", "activation": "relu", "gain": 0.5, "init": "gaussian"},
    "dropped": {"chain": "8x3", "dropout": 0.2, "bias": False},
    "frozen": {"chain": "8, residual 8x2", "freeze": ["maps.0.W"], "init": "torch"},
    "image": {"chain": "conv 2 3 pad 1, tanh, layernorm, pool 2, 8"},
    "autoencoder": {"autoencoder": [6, 3], "noise": 0.1},
    "default": {},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_settings_survive_their_file_and_the_model_its_own(name):
    """config.yaml makes the same network again, and so does the model file."""
    task = "digits-image" if name == "image" else "digits-flat"
    job = build.build(config(task, training={"steps": 3, "every": 3}, **NETWORKS[name]))
    settings.dump(setting_flags.to_plain_dict(job.config), Path("config.yaml"))
    again = build.build(setting_flags.resolve(settings.load(Path("config.yaml"))))
    assert again.config == job.config
    loop.train(job.network, job.task, **job.arguments, folder=RunFolder(Path("run")))
    net, description = load_model("run")
    x = torch.randn(5, *job.task.shape)
    assert torch.equal(net(x).a, job.network.eval()(x).a)
    assert net.extra_repr() == job.network.extra_repr()
    assert [p.requires_grad for p in net.parameters()] == [
        p.requires_grad for p in job.network.parameters()
    ]
    assert description["shape"]["shape"] == list(job.task.shape)
    assert description["network"].get("hidden") is None


def test_a_recurrent_network_keeps_its_settings():
    job = build.build(config("xor", task={"length": 12}))
    assert setting_flags.to_plain_dict(job.config)["network"] == {
        "cell": "elman", "hidden": 64, "x0": "zero", "bias": True, "engine": "auto",
        "init": "torch",
    }  # fmt: skip
    assert "shape" not in job.arguments["description"]["shape"]


@pytest.mark.parametrize(
    ("task", "network"),
    [
        ("digits-flat", {"chain": "64x2"}),
        ("digits-image", {"chain": "conv 8 3, tanh, pool 2, flatten, 64"}),
        ("digits-denoise", {"autoencoder": [32, 8]}),
    ],
)
def test_a_task_without_time_has_a_default_chain(task, network):
    found = build.build(config(task)).config.network
    assert {key: getattr(found, key) for key in network} == network
    assert (found.cell, found.hidden, found.init, found.gain) == (None, None, "orthogonal", 1.0)


REFUSED = [
    ("addition --chain 64x3", "--chain has no time steps, but task 'addition' is made of"),
    ("addition --autoencoder 3", "task 'addition' is made of sequences; an autoencoder"),
    ("digits-flat --cell lstm", "task 'digits-flat' has no time steps, so --cell does nothing"),
    ("digits-flat --hidden 3", "--hidden does nothing in a chain"),
    ("digits-flat --chain 8 --cell gru", "--cell does nothing in a chain"),
    ("digits-flat --chain tahn", "--chain 'tahn': unknown layer 'tahn'; did you mean 'tanh'?"),
    ("digits-flat --chain 32*6", "--chain '32*6': '32*6' is written 32x6."),
    ("digits-flat --chain 64,conv", "'conv' needs a number of channels"),
    ("digits-flat --chain 64,pool", "'pool' needs the side of its regions"),
    ("digits-flat --noise 0.1", "--noise does nothing in a --chain; it belongs to an"),
    ("digits-flat --gain 2 --init torch", "--gain does nothing with --init torch"),
    ("digits-flat --init he", "unknown start 'he'"),
    ("digits-flat --activation step", "unknown activation 'step'"),
    ("addition --gain 2", "--gain belongs to a --chain"),
    ("digits-flat --autoencoder 3 --chain 8", "--chain and --autoencoder both name the layers"),
    ("--train x.csv --autoencoder 3 --kind classify", "--kind classify does nothing with an"),
    ("digits-flat --segments 2", "a chain has no time steps"),
    ("digits-flat --method rtrl", "a chain has no time steps"),
    ("digits-flat --penalty log-ratio --penalty-on top", "--penalty-on chooses among recurrent"),
    (
        "digits-flat --length 3",
        "--length has no effect on task 'digits-flat', which has no options.",
    ),
    ("digits-flat --easiest 0.5,3 --easiest-by length", "--easiest-by length has no effect"),
    ("digits-flat --pretrain-lr 0.1", "--pretrain-lr needs --pretrain"),
    ("digits-flat --penalty isometry --pretrain-lr 0.1", "--pretrain-lr needs --pretrain"),
    (
        "digits-flat --penalty isometry --weight-schedule pretrain",
        "--weight-schedule pretrain needs --pretrain",
    ),
    (
        "digits-flat --penalty isometry --weight-schedule pretrain --pretrain 3 --weight 0",
        "--weight 0 turns the penalty off",
    ),
]


@pytest.mark.parametrize(("words", "text"), REFUSED, ids=[w for w, _ in REFUSED])
def test_what_does_not_fit_is_refused_in_one_line(coadjoint, here, words, text):
    code, out, err = coadjoint("train", *words.split())
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1
    assert not list(here.iterdir())


def rows(folder, kind="train"):
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def test_pretraining_has_its_own_step_size_and_weight(coadjoint):
    words = "--chain 6x4 --gain 0.5 --penalty isometry --pretrain 2 --pretrain-lr 0.01 --lr 0.002"
    code, _, err = coadjoint(
        *FLAT, *words.split(), "--weight-schedule", "pretrain", "--weight", "3", "--out", "run"
    )
    assert (code, err) == (0, "")
    assert [row["rho"] for row in rows("run")] == [3, 3, 0, 0]
    assert [row["rate"] for row in rows("run")] == pytest.approx([0.01, 0.01, 0.002, 0.002])
    # recurrent networks have it too
    words = "--length 12 --penalty log-ratio --pretrain 2 --pretrain-lr 0.1 --hidden 4 --tests 8"
    code, _, err = coadjoint("train", "xor", *SMALL, *words.split(), "--out", "xor")
    assert (code, err) == (0, "")
    assert [row["rate"] for row in rows("xor")] == pytest.approx([0.1, 0.1, 0.001, 0.001])


RESUMED = {
    "isometry": "--chain 6x4 --gain 0.5 --penalty isometry --pretrain 3 --pretrain-lr 1e-2",
    "dropout": "--chain 6x3 --dropout 0.3 --penalty log-ratio --optimiser nesterov",
    "denoising": "--autoencoder 8,3 --noise 0.2",
    "steered": "--chain 6x3 --penalty log-ratio --weight-target 0.01 --weight-gain 0.5",
    "norms": "--chain 8,layernorm,gelu,8 --schedule cosine --weight-noise 0.01",
}


class Stop(display.Silent):
    """Interrupts the run in its third step."""

    def step(self, step, row):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("words", RESUMED.values(), ids=RESUMED)
def test_an_interrupted_run_is_resumed_bit_for_bit(coadjoint, words, monkeypatch):
    run = [*FLAT, *words.split(), "--checkpoint", "2"]
    run[run.index("--steps") + 1] = "6"
    assert coadjoint(*run, "--out", "whole")[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr("coadjoint.training.trainer.make_display", lambda *_: Stop())
        assert coadjoint(*run, "--out", "part")[0] not in (0, 2)
    assert len(rows("part")) < 6
    assert coadjoint("resume", "part", "--quiet")[0] == 0
    for name in ("metrics.jsonl", "model.safetensors"):
        assert Path("part", name).read_bytes() == Path("whole", name).read_bytes()
    last, other = (storage.list_checkpoints(Path(name))[-1] for name in ("part", "whole"))
    assert (last / "state.safetensors").read_bytes() == (other / "state.safetensors").read_bytes()


def test_a_changed_chain_cannot_be_resumed(coadjoint):
    assert coadjoint(*FLAT, "--chain", "6x2", "--out", "run")[0] == 0
    path = Path("run/config.yaml")
    path.write_text(path.read_text().replace("6x2", "6x3"))
    code, _, err = coadjoint("resume", "run", "--steps", "8")
    assert code == 4
    assert "network.chain has changed since the run began ('6x2' then, '6x3' now)" in err


def write_table():
    draw = np.random.default_rng(0)
    lines = ["a,b,c,label"]
    for x in draw.normal(size=(40, 3)):
        lines.append(",".join(f"{v:.5f}" for v in x) + (",yes" if x[0] > 0 else ",no"))
    Path("table.csv").write_text("\n".join(lines) + "\n")
    return "table.csv", ["--target", "label", "--chain", "5x2"]


def write_arrays():
    draw = np.random.default_rng(1)
    np.savez("arrays.npz", x=draw.normal(size=(40, 2, 6, 6)), y=draw.integers(0, 3, 40))
    return "arrays.npz", ["--kind", "classify", "--chain", "conv 3 3, tanh, pool 2, 5"]


def write_images():
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(2)
    for label in ("left", "right"):
        Path("images", label).mkdir(parents=True)
        for number in range(10):
            pixels = draw.integers(0, 255, (6, 5), dtype=np.uint8)
            image.fromarray(pixels).save(Path("images", label, f"{number}.png"))
    return "images", []


@pytest.mark.parametrize("write", [write_table, write_arrays, write_images])
def test_predictions_are_the_outputs_of_the_network(coadjoint, write):
    data, words = write()
    code, _, err = coadjoint("train", "--train", data, *SMALL, *words, "--out", "run")
    assert (code, err) == (0, "")
    code, out, err = coadjoint("predict", "run", data, "--out", "out.csv")
    assert (code, err) == (0, "")
    found = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert out.splitlines()[-1] == f"{len(found)} samples -> out.csv"
    net, description = load_model("run")
    prediction = co.tasks.data.Data.for_prediction(description["data"], data)
    (batch,) = [batch for _, batch in prediction.batches()]
    p = torch.softmax(net(batch.u).a, 1)
    labels = description["data"]["labels"]
    assert [row["prediction"] for row in found] == [labels[k] for k in p.argmax(1)]
    for k, label in enumerate(labels):
        values = torch.tensor([float(row[f"probability {label}"]) for row in found])
        torch.testing.assert_close(values, p[:, k].detach())


@pytest.mark.parametrize("words", ["--autoencoder 2 --noise 0.1", "--kind reconstruct"])
def test_an_autoencoder_predicts_its_inputs(coadjoint, words):
    data, _ = write_table()
    flags = ["--features", "a,b,c", *words.split()]
    code, _, err = coadjoint("train", "--train", data, *SMALL, *flags, "--out", "run")
    assert (code, err) == (0, "")
    assert coadjoint("predict", "run", data, "--out", "out.csv")[0] == 0
    found = list(csv.reader(Path("out.csv").read_text().splitlines()))
    assert found[0] == ["row", "prediction a", "prediction b", "prediction c"]
    net, description = load_model("run")
    assert isinstance(net.maps[-1], co.maps.Tied)
    d = description["data"]
    prediction = co.tasks.data.Data.for_prediction(d, data)
    (batch,) = [batch for _, batch in prediction.batches()]
    ours = net(batch.u).a.detach() * torch.tensor(d["std"]) + torch.tensor(d["mean"])
    theirs = torch.tensor([[float(v) for v in row[1:]] for row in found[1:]])
    torch.testing.assert_close(theirs, ours)


def test_a_chain_is_examined_and_compared(coadjoint):
    code, out, err = coadjoint(
        "diagnose", "digits-flat", "--chain", "6x4", "--samples", "7", "--only", "decay"
    )
    assert (code, err) == (0, "")
    assert "6x4, activation='tanh', inputs=64, outputs=10" in out
    assert "7 held-out samples" in out
    assert "per layer" in out
    code, out, err = coadjoint(
        "compare", "digits-image", "--steps", "2", "--seeds", "1", "--jobs", "1", "--out", "both",
        "-m", "dense chain=6x2", "-m", "cnn chain='conv 2 3, tanh, pool 2'",
    )  # fmt: skip
    assert code == 0
    assert Path("both/runs/cnn-seed-0/model.safetensors").exists()
    chain = settings.load(Path("both/runs/cnn-seed-0/config.yaml")).values["network"]["chain"]
    assert chain == "conv 2 3, tanh, pool 2"


def test_words_of_a_method_are_kept_together_by_quotes():
    (variant,) = compared_runs.parse_variants("deep chain='conv 8 3, tanh, 64' lr=0.1")
    assert variant.values == {
        "network": {"chain": "conv 8 3, tanh, 64"},
        "optimiser": {"lr": 0.1},
    }
    (variant,) = compared_runs.parse_variants(r"own train=a\b.csv")
    assert variant.values == {"data": {"train": r"a\b.csv"}}
    with pytest.raises(CoadjointError, match="a quotation mark is not closed"):
        compared_runs.parse_variants("deep chain='conv 8")


def test_a_model_that_claims_a_huge_chain_is_refused(coadjoint):
    assert coadjoint(*FLAT, "--chain", "6x2", "--out", "run")[0] == 0
    path = Path("run/model.safetensors")
    content = path.read_bytes()
    for text in ("900000", "6,6,6,6,6,6,6,6"):  # 6x2 and the readout have six tensors
        header = content.replace(b'6x2\\"', text.encode() + b'\\"')
        length = int.from_bytes(content[:8], "little") + len(text) - 3
        path.write_bytes(length.to_bytes(8, "little") + header[8:])
        code, _, err = coadjoint("predict", "run", "x.csv")
        assert code == 4
        assert "it is larger than the file" in err


def test_threads_follow_the_widest_layer():
    def widest(**network):
        return chains.widest_layer(config(**network))

    assert widest(chain="300x2, 5") == 300
    assert widest(autoencoder=[6, 40]) == 40
    assert widest(autoencoder=7) == 7
    assert widest(hidden=500) == 500
    assert widest() == 64


def test_much_memory_is_noted():
    job = build.build(config(chain="64x2"))
    assert job.notes == ()
    notes = build.memory_notes(
        job.network,
        Batch(torch.zeros(1, 64), axis=0),
        job.config.training.model_copy(update={"batch": 10**6}),
        co.BPTT(),
        job.task,
    )
    assert notes == ["a gradient takes about 3.23 GB of memory; a smaller --batch takes less"]


def test_every_option_of_a_chain_is_a_key():
    own = {"shape", "inputs", "outputs", "output", "dtype"}
    known = set(chain_factory.CHAIN_OPTIONS) - own
    assert known <= set(setting_flags.SECTIONS["network"].model_fields)
