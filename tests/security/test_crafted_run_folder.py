"""Bad contents of a run folder are refused in one line that names the file and the key.

A stranger, or a bad disk, may have put them there.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import run_folders
import torch
from run_folders import LAST, call, vouched
from safetensors import safe_open
from safetensors.torch import save_file

import coadjoint
from coadjoint.cli import build
from coadjoint.errors import StorageError
from coadjoint.training import files, json_rows, model_schema, storage
from coadjoint.training.predict import load_model
from sampling import later

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return run_folders.make(tmp_path_factory.mktemp("real"))


@pytest.fixture
def here(real, tmp_path, monkeypatch):
    """A copy of the real folders, to be harmed."""
    shutil.copytree(real, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def refused(words, code, *said):
    """The command ends with this exit code and one line, in which all of `said` stands."""
    found, err = call(*words.split())
    assert found == code, err
    assert err.count("\n") == 1, err
    for text in said:
        assert text in err, err


def put(path, *keys, value=...):
    """Put a value into a JSON file; take the key out if none is given."""
    content = json.loads(path.read_text())
    *way, last = keys
    inner = content
    for key in way:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(content))


DEEP = "[" * 100_000 + "]" * 100_000

STATE = [  # keys, the value in their place, what is said
    (("progress",), ..., "'progress' is missing"),
    (("progress",), [], "'progress' should be"),
    (("progress",), {}, "'progress.best' is missing"),
    (("progress", "best"), "x", "'progress.best' should be a number"),
    (("progress", "best_step"), 1.5, "'progress.best_step' should be"),
    (("progress", "waited"), None, "'progress.waited' should be"),
    (("progress", "evil"), 1, "'progress.evil' does not belong"),
    (("progress", "seconds"), "now", "'progress.seconds' should be"),
    (("optimiser",), [1], "'optimiser' should be"),
    (("optimiser",), {"0.step": 3}, "'0.step' is the value 3"),
    (("description",), 3, "'description' should be"),
    (("metrics",), None, "'metrics' should be"),
    (("metrics", "bytes"), -1, "'metrics.bytes' should be"),
    (("metrics", "bytes"), "9", "'metrics.bytes' should be"),
    (("metrics", "bytes"), 2**62, "metrics.jsonl does not begin with"),
    (("metrics", "sha256"), 5, "'metrics.sha256' should be"),
    (("clock",), ..., "'clock' is missing"),
    (("status",), "x", "'status' should be"),
    (("over",), "x", "'over' should be"),
    (("threads",), ..., "'threads' is missing"),
    (("torch",), 2, "'torch' should be"),
    (("method",), {"rho": 1.0}, "'method' should hold nothing"),
]


@pytest.mark.parametrize(("keys", "value", "said"), STATE, ids=[str(row[:2]) for row in STATE])
def test_a_crafted_state_of_a_run_is_refused(keys, value, said, here):
    put(here / "stopped" / LAST / "state.json", *keys, value=value)
    vouched(here / "stopped" / LAST)
    refused("resume stopped -q", 4, said)


STREAM = [
    (("figures",), 1, "'figures' should be"),
    (("figures", "names"), ["a", "a"], "'figures.names' should be different"),
    (("figures", "names"), ["a"], "its figures: 'marked' is float64"),
    (("figures", "window"), 10**9, "its figures: 'ring' is float64"),
    (("norms",), [1.0], "'norms.1' is missing"),
    (("items",), -1, "'items' should be"),
    (("rate",), "x", "'rate' should be"),
    (("stream",), None, "its place in the file"),
    (("stream", "before"), [1.0], "'stream.before' has 1 entries; expected 2"),
    (("stream", "scale"), {}, "'scale.t' is missing"),
    (("stream", "scale", "M"), [-1.0, 1.0], "'scale.M.0' should be"),
    (("stream", "counts"), [], "'stream.counts' has 0 entries; expected 1"),
    (("t",), "x", "'t' should be"),
    (("updates",), ..., "'updates' is missing"),
]


@pytest.mark.parametrize(("keys", "value", "said"), STREAM, ids=[str(row[:2]) for row in STREAM])
def test_a_crafted_state_of_a_stream_is_refused(keys, value, said, here):
    put(here / "stream" / LAST / "state.json", *keys, value=value)
    vouched(here / "stream" / LAST)
    refused("resume stream -q", 4, said)


RESULT = [
    (("status",), ...),
    (("status",), []),
    (("status",), "x"),
    (("step",), None),
    (("step",), "4"),
    (("step",), -1),
    (("seconds",), "x"),
    (("reason",), 5),
    (("metric",), ...),
    (("metrics",), []),
    (("metrics", "test"), 1),
    (("parameters",), 1.5),
]


@pytest.mark.parametrize(("keys", "value"), RESULT, ids=map(str, RESULT))
def test_a_crafted_result_of_a_run_is_refused(keys, value, here):
    put(here / "done" / "result.json", *keys, value=value)
    refused("resume done -q", 4, "done/result.json is damaged", f"'{'.'.join(keys)}'")


COMPARED = [
    (("goal",), ...),
    (("goal",), 1),
    (("success",), "x"),
    (("success_step",), ...),
    (("success_seconds",), "x"),
    (("work",), "x"),
    (("pictures",), "x"),
    *RESULT[:3],
]


@pytest.mark.parametrize(("keys", "value"), COMPARED, ids=map(str, COMPARED))
def test_a_crafted_result_is_not_compared(keys, value, here):
    put(here / "done" / "result.json", *keys, value=value)
    refused(
        "compare done stopped --out other -q",
        4,
        "done/result.json is damaged",
        f"'{'.'.join(keys)}'",
    )


def test_a_success_without_a_time_is_refused(here):
    put(here / "done" / "result.json", "success", value=True)
    refused("compare done stopped --out other -q", 4, "a success should have a success_step")


COMPARISON = [
    (("rows",), ..., "'rows' is missing"),
    (("rows",), 3, "'rows' should be"),
    (("rows", 0), "x", "'rows.0' should be"),
    (("rows", 0, "runs"), ..., "'rows.0.runs' is missing"),
    (("rows", 0, "runs", 0), [], "'rows.0.runs.0' should be"),
    (("rows", 0, "runs", 0, "folder"), 5, "'rows.0.runs.0.folder' should be"),
    (("rows", 0, "runs", 0, "folder"), ..., "'rows.0.runs.0.folder' is missing"),
    (("rows", 0, "metric"), [], "'rows.0.metric' should be"),
    (("rows", 0, "pace"), "x", "'rows.0.pace' should be"),
    (("rows", 0, "budget"), {"evil": 1}, "'rows.0.budget.evil"),
    (("rows", 0, "name"), None, "'rows.0.name' should be"),
    (("seconds",), "x", "'seconds' should be"),
]


@pytest.mark.parametrize(
    ("keys", "value", "said"), COMPARISON, ids=[str(row[:2]) for row in COMPARISON]
)
def test_a_crafted_comparison_is_refused(keys, value, said, here):
    put(here / "compared" / "compare.json", *keys, value=value)
    refused("resume compared -q", 4, "compared/compare.json is damaged", said)


ONLINE = [
    (("window",), ..., "'window' is missing"),
    (("window",), 0, "'window' should be"),
    (("window",), "3", "'window' should be"),
    (("classes",), ..., "'classes' is missing"),
    (("classes",), 5, "'classes' should be"),
    (("classes",), ["a", "a"], "'classes' should be different"),
]


@pytest.mark.parametrize(("keys", "value", "said"), ONLINE, ids=[str(row[:2]) for row in ONLINE])
def test_crafted_settings_of_a_stream_are_refused(keys, value, said, here):
    put(here / "stream" / "online.json", *keys, value=value)
    refused("resume stream -q", 4, "stream/online.json is damaged", said)


NESTED = [
    ("done/result.json", "resume done -q"),
    ("compared/compare.json", "resume compared -q"),
    ("stream/online.json", "resume stream -q"),
    (f"stopped/{LAST}/state.json", "resume stopped -q"),
]


@pytest.mark.parametrize(("name", "words"), NESTED, ids=[name for name, _ in NESTED])
def test_nesting_without_end_is_refused(name, words, here):
    (here / name).write_text(DEEP)
    if name.endswith("state.json"):
        vouched((here / name).parent)
    refused(words, 4, name, "nested more than 8 deep")


ROWS = [
    ("metrics", "[1]", "should be"),
    ("metrics", '{"kind": "evil", "step": 1}', "'kind' should be"),
    ("metrics", '{"kind": "train"}', "'step' is missing"),
    ("metrics", "{", "not JSON"),
    ("clock", '{"step": 1, "seconds": "x"}', "'seconds' should be"),
]


@pytest.mark.parametrize(("name", "row", "said"), ROWS)
def test_crafted_rows_that_a_checkpoint_vouches_for_are_refused(name, row, said, here):
    path, last = here / "stopped" / f"{name}.jsonl", here / "stopped" / LAST
    path.write_text(row + "\n")
    rows = json_rows.JsonRows(here / "other.jsonl")
    rows.written, content = len(row) + 1, path.read_bytes()
    rows.sum.update(content)
    put(last / "state.json", name, value=rows.position)
    rows.close()
    vouched(last)
    refused("resume stopped -q", 4, f"{name}.jsonl:1", said)


# tensors


def tensors_of(path):
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def harm_tensors(last, name, harm):
    tensors, metadata = tensors_of(last / name)
    harm(tensors)
    save_file(tensors, last / name, metadata)
    vouched(last)


def without(*names):
    def harm(tensors):
        for name in names:
            del tensors[name]

    return harm


def with_(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


TENSORS = [
    ("stopped", without("optimiser.0.exp_avg", "optimiser.2.step"), "it lacks 0.exp_avg, 2.step"),
    ("stopped", lambda t: [t.pop(n) for n in list(t) if n.startswith("optimiser.")], "and 9 more"),
    (
        "stopped",
        with_("optimiser.0.exp_avg", torch.zeros(2)),
        "'0.exp_avg' is float32 [2]; expected float32 [3, 3]",
    ),
    (
        "stopped",
        with_("optimiser.0.exp_avg", torch.zeros(3, 3).double()),
        "'0.exp_avg' is float64 [3, 3]",
    ),
    (
        "stopped",
        with_("optimiser.0.step", torch.tensor(-1.0)),
        "0.step is -1.0; expected a number of steps",
    ),
    ("stopped", with_("optimiser.x", torch.zeros(1)), "'x' does not belong"),
    ("stopped", with_("evil", torch.zeros(1)), "'evil' does not belong"),
    ("stopped", without("rng"), "it lacks rng"),
    ("stopped", with_("rng", torch.zeros(5, dtype=torch.uint8)), "'rng' is uint8 [5]"),
    ("stopped", lambda t: t["rng"].fill_(255), "random numbers are damaged"),
    ("stream", without("optimiser.0.exp_avg_sq"), "it lacks 0.exp_avg_sq"),
    ("stream", without("learner.S"), "its learner: it lacks S"),
    ("stream", with_("learner.x", torch.zeros(7)), "'x' is float32 [7]"),
    ("stream", without("figures.ring"), "its figures: it lacks ring"),
    ("stream", with_("held.W", torch.zeros(3)), "'W' does not belong"),
]


@pytest.mark.parametrize(
    ("run", "harm", "said"), TENSORS, ids=[f"{run}: {said}" for run, _, said in TENSORS]
)
def test_crafted_tensors_of_a_checkpoint_are_refused(run, harm, said, here):
    harm_tensors(here / run / LAST, "state.safetensors", harm)
    refused(f"resume {run} -q", 4, said)


def test_best_weights_are_demanded(here):
    """Where the best step is not that of the checkpoint, it holds the best weights itself."""
    put(here / "stopped" / LAST / "state.json", "progress", "best_step", value=2)
    vouched(here / "stopped" / LAST)
    refused("resume stopped -q", 4, "best weights: it lacks R, V, W, b, b_o")


def test_the_checkpoint_before_is_offered(here):
    harm_tensors(here / "stopped" / LAST, "state.safetensors", without("rng"))
    refused(
        "resume stopped -q",
        4,
        "The previous checkpoint, step-00000002, is intact. "
        "Resume from it with: coadjoint resume stopped --fallback",
    )
    code, err = call("resume", "stopped", "-q", "--fallback")
    assert code == 0, err


OPTIMISERS = [  # what these keep is of different kinds; the others keep what one of them does
    *("sgd", "momentum", "adam", "lbfgs", "hessian-free", "ridge"),
    *map(later, ("nesterov", "adagrad", "rmsprop", "adamw")),
]


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_checkpoint_must_hold_exactly_what_its_optimiser_keeps(name, here):
    """What a run has written is taken back; without any one of its tensors it is
    refused by name.
    """
    words = (
        f"train --train data.csv --id id --time t --target label --optimiser {name} --hidden "
        "3 --every 2 --batch 4 --probes 2 -q"
    )
    assert call(*words.split(), "--steps", "2", "--out", "run") == (0, "")
    shutil.copytree(here / "run", here / "again")
    assert call("resume", "run", "-q", "--steps", "3") == (0, "")
    last = here / "again" / "checkpoints" / "step-00000002"
    kept = {
        name for name in tensors_of(last / "state.safetensors")[0] if name.startswith("optimiser.")
    }
    kept.discard("optimiser.solution")  # of which a step may leave none
    assert bool(kept) == (name not in ("sgd", "hessian-free"))
    for gone in sorted(kept)[:3]:
        content = (last / "state.safetensors").read_bytes()
        harm_tensors(last, "state.safetensors", without(gone))
        refused("resume again -q --steps 3", 4, gone.removeprefix("optimiser."))
        (last / "state.safetensors").write_bytes(content)
        vouched(last)


# models


def redescribed(path, harm, sealed=False):
    """A model that says something else of itself; without a sum, as earlier versions wrote it, or
    with the right one.
    """
    tensors, metadata = tensors_of(path)
    description = json.loads(metadata["coadjoint"])
    description.pop("sha256", None)
    harm(description)
    if sealed:
        path.write_bytes(storage.pack_model(tensors, description))
    else:
        save_file(tensors, path, {"coadjoint": json.dumps(description)})


MODELS = [
    (lambda d: d.update(precision="x"), "'precision' should be 32 or 64; got 'x'"),
    (lambda d: d.update(precision=16), "'precision' should be 32 or 64; got 16"),
    (
        lambda d: d["data"].update(labels=["x", "x"]),
        "'data' is damaged: 'labels' is not valid",
    ),
    (
        lambda d: d["data"].update(labels=["x", "y", "z"]),
        "its data needs outputs 3, but its network has 2",
    ),
    (lambda d: d["data"].update(features=["a", "a"]), "'features' is not valid"),
    (
        lambda d: d["data"].update(features=["a"], mean=[0.0], std=[1.0]),
        "its data needs inputs 1",
    ),
    (lambda d: d["data"].update(at="every"), "its data needs readout 'every'"),
    (lambda d: d["data"]["reading"].update(sep=5), "'reading.sep' is not valid"),
    (lambda d: d["data"].update(kind=["x"]), "'kind' is not valid"),
    (
        lambda d: d["network"].update(hidden=10),
        "its 'R' is float32 [3, 2], but this network's is float32 [10, 2]",
    ),
]


@pytest.mark.parametrize(("harm", "said"), MODELS, ids=[said for _, said in MODELS])
@pytest.mark.parametrize("command", ["predict done data.csv", "diagnose done -q"])
def test_crafted_descriptions_of_models_are_refused(harm, said, command, here):
    redescribed(here / "done" / "model.safetensors", harm)
    refused(command, 4, "done/model.safetensors", said)


def test_no_network_is_built_before_its_tensors_are_counted(here, monkeypatch):
    """hidden: 19000 beside a small model: of its 361 million numbers not one is asked for."""
    path = here / "done" / "model.safetensors"
    tensors, _ = tensors_of(path)
    tensors["W"] = torch.zeros(140, 140)
    description = json.loads(tensors_of(path)[1]["coadjoint"])
    description.pop("sha256", None)
    description["network"]["hidden"] = 19000
    save_file(tensors, path, {"coadjoint": json.dumps(description)})
    assert path.stat().st_size < 90_000
    constructed, where = model_schema.build_network, []

    def noted(*arguments):
        where.append(torch.empty(0).device.type)
        assert where[-1] == "meta", "a network of 1.4 GB is built"
        return constructed(*arguments)

    monkeypatch.setattr(model_schema, "build_network", noted)
    refused(
        "predict done data.csv",
        4,
        "its 'R' is float32 [3, 2], but this network's is float32 [19000, 2]",
    )
    assert where == ["meta"]


@pytest.mark.parametrize("command", ["resume stopped -q", "diagnose stopped -q"])
def test_no_network_is_built_that_is_not_the_checkpoints(command, here, monkeypatch):
    """The same where config.yaml asks for it; and where state.json agrees with it."""
    config_file, last = here / "stopped" / "config.yaml", here / "stopped" / LAST
    config_file.write_text(config_file.read_text().replace("hidden: 3", "hidden: 19000"))
    monkeypatch.setattr(build, "network_of", lambda *_: pytest.fail("a network of 1.4 GB is built"))
    refused(command, 4, "19000")
    put(last / "state.json", "description", "network", "hidden", value=19000)
    vouched(last)
    refused(command, 4, "its 'R' is float32 [3, 2], but this network's is float32 [19000, 2]")


def predictions(folder):
    code, err = call("predict", "done", "data.csv", "--out", "p.csv", "--force")
    return code, err, (folder / "p.csv").read_text() if code == 0 else None


@pytest.mark.parametrize("run", ["done", "stream"])
def test_every_flipped_byte_of_a_model_is_noticed(run, here):
    """One bit of each byte, in turn; and all of them."""
    path = here / run / "model.safetensors"
    content = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one that is whole says nothing
        load_model(path)
        for i in range(len(content)):
            flip = 0xFF if i % 3 == 0 else 1 << i % 8
            path.write_bytes(content[:i] + bytes([content[i] ^ flip]) + content[i + 1 :])
            with pytest.raises(StorageError, match=r"model\.safetensors"):
                load_model(path)


def test_a_flipped_bit_of_a_weight_is_noticed_by_every_command(here):
    path = here / "done" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0x40]))
    for command in ("predict done data.csv", "diagnose done -q"):
        refused(
            command,
            4,
            "done/model.safetensors is damaged",
            "SHA-256",
            "`coadjoint resume` writes it again from its run",
        )
    code, err = call("report", "done")
    assert code == 0, err
    assert "model.safetensors is damaged: its content does not match its SHA-256 checksum." in (
        here / "done" / "report.html"
    ).read_text(encoding="utf-8")
    path.unlink()
    assert call("resume", "done", "-q") == (0, "")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "description", [None, {"note": "by hand"}], ids=["no description", "a note"]
)
def test_a_model_trained_from_python_has_a_sum_too(tmp_path, description):
    """It does not say what network it belongs to; its page does not complain, unless it
    is damaged.
    """
    net = coadjoint.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    task = coadjoint.tasks.TemporalOrder(10)
    short = {"steps": 1, "tests": 2, "confirm": 2, "probes": 2, "batch": 2}
    coadjoint.train(net, task, **short, folder=tmp_path / "run", description=description)
    path, page = tmp_path / "run" / "model.safetensors", tmp_path / "run" / "report.html"
    with pytest.raises(
        StorageError, match="does not say which network it belongs to: it was trained from Python"
    ):
        load_model(path)
    assert call("report", tmp_path / "run") == (0, "")
    assert "model.safetensors is damaged" not in page.read_text(encoding="utf-8")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert call("report", tmp_path / "run") == (0, "")
    assert "model.safetensors is damaged" in page.read_text(encoding="utf-8")


def test_a_model_without_a_sum_is_used_with_one_warning(here):
    code, err, sealed = predictions(here)
    assert (code, err) == (0, "")
    redescribed(here / "done" / "model.safetensors", lambda d: None)
    code, err, plain = predictions(here)
    assert (code, plain) == (0, sealed)
    assert err.count("\n") == 1
    assert "coadjoint: warning: done/model.safetensors has no SHA-256 checksum" in err
    with pytest.warns(UserWarning, match="has no SHA-256 checksum") as caught:
        load_model(here / "done" / "model.safetensors")
    assert len(caught) == 1


# without a single value, and with strides that torch cannot count
ENDLESS = b'{"a": {"dtype": "F32", "shape": [0, 4611686018427387904, 8], "data_offsets": [0, 0]}}'
HEADERS = [
    (b"", "does not fit into its 0 bytes"),
    (struct.pack("<Q", 2**60) + b"{}", "does not fit into its 10 bytes"),
    (struct.pack("<Q", 2) + b"[]", "its header is a list"),
    (struct.pack("<Q", 11) + b'{"a": "b"} ', "tensor 'a' is damaged"),
    (struct.pack("<Q", 2) + b"{}abc", "3 bytes follow its header"),
    (struct.pack("<Q", len(ENDLESS)) + ENDLESS, "has a shape that no tensor can have"),
]


@pytest.mark.parametrize(("content", "said"), HEADERS, ids=[said for _, said in HEADERS])
def test_crafted_headers_are_refused(content, said, here):
    (here / "done" / "model.safetensors").write_bytes(content)
    refused("predict done data.csv", 4, "done/model.safetensors", said)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1]},
    ],
)
def test_tensors_that_do_not_lie_in_the_file_are_refused(entry, here):
    header = json.dumps({"__metadata__": {"coadjoint": "{}"}, "W": entry}).encode()
    path = here / "done" / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    refused("predict done data.csv", 4, "done/model.safetensors", "W")


# files that are no files, or have no end

PLACES = [
    ("done/result.json", "resume done -q"),
    ("done/model.safetensors", "predict done data.csv"),
    ("done/model.safetensors", "diagnose done -q"),
    ("done/config.yaml", "resume done -q"),
    ("stopped/metrics.jsonl", "resume stopped -q"),
    ("stopped/clock.jsonl", "resume stopped -q"),
    (f"stopped/{LAST}/state.json", "resume stopped -q"),
    (f"stopped/{LAST}/state.safetensors", "resume stopped -q"),
    (f"stopped/{LAST}/model.safetensors", "resume stopped -q"),
    (f"stopped/{LAST}/{storage.MANIFEST}", "resume stopped -q"),
    ("stream/online.json", "resume stream -q"),
    ("compared/compare.json", "resume compared -q"),
]


def device(path):
    path.symlink_to(Path(os.sep) / "dev" / "zero")


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(20 << 30)


INSTEAD = {
    "a pipe": os.mkfifo,
    "an endless device": device,
    "a folder": os.mkdir,
    "a sparse file of 20 GB": sparse,
}


# rows are read as far as their checkpoint says, whatever follows
CASES = [
    (*place, what)
    for place in PLACES
    for what in INSTEAD
    if "jsonl" not in place[0] or "sparse" not in what
]


@pytest.mark.parametrize(
    ("name", "command", "what"), CASES, ids=[", ".join(case) for case in CASES]
)
@pytest.mark.sampled(2)
def test_pipes_and_devices_are_refused_without_waiting(name, command, what, here):
    (here / name).unlink()
    INSTEAD[what](here / name)
    refused(command, 4, Path(name).name)


@pytest.mark.parametrize("what", INSTEAD)
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "clock.jsonl", "result.json", "environment.json", "model.safetensors"]
)
@pytest.mark.sampled(2)
def test_a_page_is_made_of_what_can_be_read(name, what, here):
    """Also of rows that have no end: a line of them has."""
    path = here / "done" / name
    path.unlink()
    INSTEAD[what](path)
    code, err = call("report", "done")
    assert (code, err) == (0, "")
    page = (here / "done" / "report.html").read_text(encoding="utf-8")
    assert f"{name} could not be read" in page or f"{name} cannot be used" in page


def test_regular_files_alone_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"abc\nde")
    assert files.read_regular(tmp_path / "file", 6) == b"abc\nde"
    assert list(files.read_lines(tmp_path / "file", 4)) == [b"abc\n", b"de"]
    for call_, said in (
        (lambda: files.read_regular(tmp_path / "file", 5), "file has 6 bytes; expected at most 5."),
        (
            lambda: list(files.read_lines(tmp_path / "file", 3)),
            "file:1: the line has more than 3 bytes.",
        ),
        (lambda: files.read_regular(tmp_path, 5), "is a folder; expected a regular file."),
        (
            lambda: files.read_regular(tmp_path / "none", 5),
            "none cannot be read: No such file or directory.",
        ),
        (lambda: files.read_regular("a\0b", 5), "cannot be read: embedded null byte."),
    ):
        with pytest.raises(StorageError) as error:
            call_()
        assert said in str(error.value)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(StorageError, match=r"link is a link\. Replace it with the file itself\."):
        files.read_regular(tmp_path / "link", 100)


def test_a_model_behind_a_link_that_the_user_names_is_used(here):
    (here / "link").symlink_to(here / "done" / "model.safetensors")
    assert call("predict", "link", "data.csv") == (0, "")


WITHOUT_PYDANTIC = """
import sys
from pathlib import Path

sys.modules["pydantic"] = None
import coadjoint as co
from coadjoint.training import storage

small = {"steps": 2, "every": 2, "batch": 2, "tests": 2, "confirm": 2, "probes": 2}
net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
co.train(net, co.tasks.TemporalOrder(10), folder="written", **small)
(last,) = storage.list_checkpoints(Path("written"))
print(storage.is_intact(last))
try:
    storage.load(last)
except co.MissingError as error:
    print(error)
"""


def test_without_pydantic_a_folder_is_not_read(tmp_path):
    """One line says what is missing; what is written needs none."""
    environment = {**os.environ, "PYTHONPATH": str(Path(coadjoint.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYDANTIC],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "reading a run folder needs pydantic: pip install pydantic.",
    ]
