"""What a config file or a flag may say, what is refused and in which words, and what it builds."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import coadjoint as co
from coadjoint.cells import library, steps
from coadjoint.cli import build, build_online, build_task, schema
from coadjoint.cli import flags as setting_flags
from coadjoint.errors import CoadjointError, ConfigError, MissingError, StorageError
from coadjoint.gradients import bptt, penalised
from coadjoint.networks import initialisers
from coadjoint.training import loop, settings
from coadjoint.training.model_schema import build_network
from coadjoint.training.network_section import CELL_OPTIONS, Shape
from coadjoint.training.predict import load_model
from paths import read_table

TASK = {"task": {"name": "xor", "length": 12}, "network": {"hidden": 4}}
WHOLE = "a positive whole number"


def refusal(function, *arguments):
    with pytest.raises(ConfigError) as error:
        function(*arguments)
    return str(error.value).splitlines()


FILES = [
    (
        "optimiser:\n  lr: -1.0",
        "run.yaml:2: optimiser.lr: must be a number greater than 0; got -1.0.",
    ),
    (
        "optimiser:\n  lr: true",
        "run.yaml:2: optimiser.lr: must be a number greater than 0; got true.",
    ),
    (
        "optimiser:\n  lr: [1, 2]",
        "run.yaml:2: optimiser.lr: must be a number greater than 0; got [1, 2].",
    ),
    (
        "network:\n  cell: false",
        "run.yaml:2: network.cell: must be text or a list of strings; got false. "
        "Write it in quotes.",
    ),
    (
        "network:\n  hidden: '4'",
        f"run.yaml:2: network.hidden: must be {WHOLE} or a list of them; got '4'.",
    ),
    ("network:\n  bias: 1", "run.yaml:2: network.bias: must be true or false; got 1."),
    (
        "task:\n  length: [1, 2, 3]",
        f"run.yaml:2: task.length: must be {WHOLE} or two of them; got [1, 2, 3].",
    ),
    (
        "task:\n  length: {a: 1}",
        f"run.yaml:2: task.length: must be {WHOLE} or two of them; got {{'a': 1}}.",
    ),
    (
        "task:\n  curriculum: [a, b]",
        f"run.yaml:2: task.curriculum: must be two values, each {WHOLE}; got ['a', 'b'].",
    ),
    (
        "task:\n  rule: loos",
        "run.yaml:2: task.rule: must be loose or strict; got 'loos'. Did you mean 'loose'?",
    ),
    ("training:\n  precision: 16", "run.yaml:2: training.precision: must be 32 or 64; got 16."),
    (
        "training:\n  seed: -1",
        "run.yaml:2: training.seed: must be a whole number of at least 0; got -1.",
    ),
    (
        "data:\n  target: [1]",
        "run.yaml:2: data.target: must be text or a list of strings; got [1].",
    ),
    (
        "network:\n  lr: 3",
        "run.yaml:2: network.lr: 'lr' belongs in section [optimiser], not [network].",
    ),
    ("lr: 3", "run.yaml:1: lr: 'lr' belongs in section [optimiser]."),
    (
        "optimizer: {lr: 1}",
        "run.yaml:1: optimizer: unknown section 'optimizer'; did you mean 'optimiser'? "
        "Known: task, data, network, gradient, optimiser, training.",
    ),
]


@pytest.mark.parametrize(("text", "line"), FILES, ids=[t for t, _ in FILES])
def test_a_bad_file_is_refused_in_one_line(text, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    assert refusal(setting_flags.resolve, settings.load("run.yaml")) == [line]


def test_unknown_keys_and_sections_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("training = 5\n[optimiser]\nlearning = 1\nbetaz = 2\n")
    lines = sorted(refusal(setting_flags.resolve, settings.load("run.toml")))
    assert len(lines) == 3
    assert any("unknown key 'betaz'; did you mean 'betas'?" in line for line in lines)
    assert any(
        line.startswith("run.toml:1: training: must be a section of keys; got 5.") for line in lines
    )


FLAGS = [
    ("optimiser", "lr", "0", "--lr: must be a number greater than 0; got 0."),
    (
        "optimiser",
        "lr",
        "1e39",
        "--lr: must be a number greater than 0; got 1e+39. It is too large.",
    ),
    ("optimiser", "lr", "", "--lr: must be a number greater than 0; got ''."),
    ("optimiser", "lr", "nan", "--lr: must be a number greater than 0; got 'nan'."),
    ("optimiser", "lr", "1e999", "--lr: must be a number greater than 0; got '1e999'."),
    (
        "optimiser",
        "betas",
        "0.9",
        "--betas: must be two values, each a number from 0 to 1; got 0.9.",
    ),
    (
        "training",
        "seed",
        "012",
        "--seed: must be a whole number of at least 0; got '012'.",
    ),
    ("training", "threads", "9999", "--threads: must be a whole number from 1 to 1024; got 9999."),
    (
        "training",
        "device",
        "gpu",
        "--device: must be cpu, cuda or auto; got 'gpu'. Did you mean 'cpu'?",
    ),
    (
        "task",
        "easiest",
        "0,5",
        "--easiest: must be two values, a number greater than 0 and at most 1 and a positive "
        "whole number; got [0, 5].",
    ),
    (
        "data",
        "split",
        ".5",
        "--split: must be three values, each a number from 0 to 1 or two values, each a number "
        "from 0 to 1; got 0.5.",
    ),
]


@pytest.mark.parametrize(("section", "key", "text", "line"), FLAGS)
def test_a_bad_flag_is_refused_in_one_line(section, key, text, line):
    assert refusal(
        setting_flags.resolve, None, {section: {key: setting_flags.parse_flag(section, key, text)}}
    ) == [line]


def test_flags_come_on_top_of_a_file(tmp_path):
    (tmp_path / "a.json").write_text(
        '{"optimiser": {"lr": 0.1, "name": "sgd"}, "task": {"length": [10, 20]}}'
    )
    c = setting_flags.resolve(
        settings.load(tmp_path / "a.json"),
        {"optimiser": {"lr": setting_flags.parse_flag("optimiser", "lr", "1e-2")}},
    )
    assert (c.optimiser.lr, c.optimiser.name, c.task.length) == (0.01, "sgd", (10, 20))


def test_a_flag_splits_lists_of_columns():
    assert setting_flags.parse_flag("data", "target", "a,b") == ["a", "b"]
    assert setting_flags.parse_flag("data", "target", "12") == "12"
    assert setting_flags.parse_flag("data", "sep", ",") == ","


# settings, and the line that refuses them; null: any one line
IDLE = [tuple(row.values()) for row in read_table(__file__, "idle_settings.json")]


def merged(changes):
    return {name: {**TASK.get(name, {}), **changes.get(name, {})} for name in schema.SECTIONS}


@pytest.mark.parametrize(("changes", "line"), IDLE, ids=[str(c) for c, _ in IDLE])
def test_a_setting_without_effect_is_refused(changes, line):
    lines = refusal(build.build, setting_flags.resolve(None, merged(changes)))
    assert len(lines) == 1
    assert line is None or lines == [line]


FINITE = [
    ({"tests": 5}, "--tests has no effect on a finite set"),
    ({"confirm": 5}, "--confirm has no effect on a finite set"),
    ({"epochs": 5, "steps": 5}, "--steps and --epochs both limit the run"),
    ({"patience": 5}, "--patience needs a validation set"),
    ({"select": "loss"}, "--select needs a validation set"),
]


@pytest.mark.parametrize(("training", "line"), FINITE)
def test_settings_that_do_not_fit_a_finite_set_are_refused(training, line):
    class Finite:
        size, splits = 10, ("test",)

    (found,) = refusal(
        build_task.check_size_settings, setting_flags.resolve(None, {"training": training}), Finite
    )
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"network": {"engine": "autograd"}, "gradient": {"penalty": "omega-published"}},
            "omega-published",
        ),
        ({"network": {"dropout": 1.0}}, "from 0 to below 1; got 1.0"),
        ({"optimiser": {"name": "ridge"}, "network": {"deep": 5}}, "solves only V h . b_o"),
        (
            {"optimiser": {"name": "hessian-free"}, "network": {"layers": 2}},
            "curvature is that of a co.Network",
        ),
        (
            {"optimiser": {"direction": "temporal"}, "network": {"structure": "orthogonal"}},
            "needs W as a parameter",
        ),
        (
            {"network": {"dropout": 0.1}, "gradient": {"segments": 2}},
            "sweeps in segments: with dropout=0.1 every run",
        ),
        (
            {"gradient": {"method": "truncated", "k1": 2}, "network": {"dropout": 0.1}},
            "backpropagation: with dropout=0.1",
        ),
        (
            {"gradient": {"penalty": "variance", "weight_target": 0.1, "weight": 0.0}},
            "start of a steered weight",
        ),
    ],
)
def test_combinations_that_a_part_declines_are_refused_before_a_run(changes, words):
    with pytest.raises(CoadjointError, match=words):
        build.build(setting_flags.resolve(None, merged(changes)))


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MissingError, match="Use --device cpu") as error:
        build.build(setting_flags.resolve(None, merged({"training": {"device": "cuda"}})))
    assert error.value.exit_code == 7


def test_a_weight_of_zero_is_plain_unless_it_grows():
    def given(g):
        return {"gradient": {"penalty": "variance", **g}, "training": {"steps": 10}}

    def of(**g):
        return build.gradient_of(setting_flags.resolve(None, given(g)))

    assert isinstance(of(weight=0), bptt.BPTT)
    assert isinstance(of(), penalised.Penalised)
    assert isinstance(of(weight=0, weight_schedule="linear", weight_end=2), penalised.Penalised)


WHOLES = [
    {},
    {"gradient": {"penalty": "log-ratio"}, "network": {"radius": 0.5}},
    {
        "gradient": {"method": "truncated", "k1": 3},
        "optimiser": {"name": "momentum", "momentum": 0.5, "schedule": "cosine"},
    },
    {"task": {"length": [10, 20], "ragged": True}, "training": {"clip": 1e-5, "precision": 64}},
    {"optimiser": {"name": "hessian-free", "cg": 5}, "training": {"seconds": 1.5, "gradients": 7}},
    {"optimiser": {"name": "lbfgs"}, "task": {"easiest": [0.5, 3]}},
    {
        "optimiser": {
            "name": "sgd",
            "direction": "temporal",
            "step_rule": "galvan",
            "threshold": 2.0,
        }
    },
    {"optimiser": {"name": "ridge", "ridge": 0.1}, "network": {"cell": "reservoir"}},
]


@pytest.mark.parametrize("changes", WHOLES)
def test_a_resolved_config_reads_back_and_means_the_same(changes, tmp_path):
    job = build.build(setting_flags.resolve(None, merged(changes)))
    settings.dump(setting_flags.to_plain_dict(job.config), tmp_path / "config.yaml")
    back = setting_flags.resolve(settings.load(tmp_path / "config.yaml"))
    assert back == job.config
    again = build.build(back)
    assert again.config == job.config
    assert again.arguments["description"] == job.arguments["description"]


def test_a_stream_keeps_the_settings_of_earlier_versions(tmp_path):
    """Its description holds no step size that was not given: folders of 0.6 are compared with it
    when they are resumed.
    """
    (tmp_path / "s.csv").write_text("a,b\n" + "1.0,2.0\n" * 5)
    sections = {
        "data": {"train": str(tmp_path / "s.csv"), "kind": "next"},
        "network": {"hidden": 3},
    }
    job = build_online.build_stream_job(setting_flags.resolve(None, sections), None, 10)
    assert job.settings["optimiser"] == {"name": "adam", "schedule": "constant", "warmup": 0}
    assert job.settings["gradient"] == {"method": "rtrl"}
    assert job.arguments["description"]["settings"]["optimiser"] == job.settings["optimiser"]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=3)
)
KEYS = st.sampled_from(sorted(schema.SECTION_OF)) | st.text(max_size=5)
FOUND = st.dictionaries(
    st.sampled_from(sorted(schema.SECTIONS)) | st.text(max_size=5),
    LEAVES | st.dictionaries(KEYS, LEAVES, max_size=3),
    max_size=3,
)


@pytest.mark.slow
@examples(max_examples=200, deadline=None)
@given(FOUND)
def test_only_our_errors_escape(values):
    try:
        setting_flags.resolve(settings.Settings(values, "run.yaml", {}))
    except CoadjointError as error:
        lines = str(error).splitlines()
        assert lines
        assert all(line.startswith("run.yaml: ") for line in lines if not line.startswith("..."))


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("optimiser", "leraning_rate", "did you mean 'lr'?"),
        ("network", "learning_rate", "did you mean 'lr' of section [optimiser]?"),
        ("network", "hidden_size", "did you mean 'hidden'?"),
        ("training", "batch_sise", "did you mean 'batch'?"),
    ],
)
def test_names_of_other_libraries_are_understood(section, key, meant):
    with pytest.raises(ConfigError) as error:
        setting_flags.resolve(None, {section: {key: 1}})
    assert meant in str(error.value)


# networks


def built(**network):
    """A run of two steps that has not begun."""
    short = {"steps": 2, "every": 2, "tests": 4, "confirm": 4, "probes": 2, "batch": 3}
    return build.build(setting_flags.resolve(None, merged({"network": network, "training": short})))


def job_of(tmp_path=None, **network):
    """A run of two steps, and its result."""
    job = built(**network)
    before = {key: p.detach().clone() for key, p in job.network.named_parameters()}
    result = loop.train(
        job.network, job.task, **job.arguments, folder=tmp_path and tmp_path / "run"
    )
    return job, before, result


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*library.CELLS, *steps.STEPS, "reservoir"])
def test_every_cell_with_every_start_trains_or_is_refused(cell, thorough):
    """Where the run is not thorough, each is built, and every fourth is trained, in turn."""
    trained, refused = [], {}
    turn = len(cell)
    for i, init in enumerate(initialisers.INITIALISERS):
        try:
            if thorough or (i + turn) % 4 == 0:
                assert job_of(cell=cell, init=init)[2].step == 2
            else:
                built(cell=cell, init=init)
            trained.append(init)
        except CoadjointError as error:
            refused[init] = str(error)
    assert all(
        line.startswith(f"init '{init}' ") and "\n" not in line for init, line in refused.items()
    )
    assert {"torch", "gaussian", "glorot", "he"} <= set(trained)
    assert ("ring" in trained) == (cell == "lru")
    assert trained == co.networks.about(cell).initialisers


NETWORKS = {
    "antisymmetric": {"cell": "antisymmetric-gated", "eps": 0.1, "gamma": 0.2},
    "cornn": {"cell": "cornn", "dt": 0.1, "eps": 2, "gamma": 1.5, "x0": "learned"},
    "scrn": {"cell": "scrn-learned", "alpha": 0.5, "skip": True},
    "inverse": {"cell": "inverse", "k": 3, "activation": "relu"},
    "rate": {"cell": "rate", "noise": 0.1, "structure": "dale", "init": "spectral"},
    "lstm-1997": {"cell": "lstm-1997", "truncated": True},
    "lipschitz": {"cell": "lipschitz", "beta": 0.6, "readout": "attention", "attention_steps": 4},
    "tilted": {"cell": "lipschitz", "beta": -2.0, "readout": "tilted"},
    "lru": {"cell": "lru", "init": "ring", "inner": 0.9, "radius": 0.99, "skip": True},
    "gated-feedback": {"cell": "gated-feedback", "layers": 3, "unit": "lstm", "bias": False},
    "deep-transition": {"cell": "deep-transition", "depth": 3, "width": 5, "shortcut": True,
        "activation": "sigmoid"},
    "reservoir": {"cell": "reservoir", "deep": [6, 5]},
    "frozen": {"cell": "lstm", "freeze": ["W", "b_o"], "structure": "low-rank", "deep": 3},
    "stack": {"cell": ["lstm", "gru-before", "rate"], "noise": 0.1, "residual": True,
        "dropout": 0.2, "readout": "tilted-tanh"},
    "both ways": {"cell": "elman", "layers": 2, "bidirectional": True, "deep": 5, "x0": "learned"},
    "reservoirs": {"cell": "reservoir", "layers": 2},
    "projected": {"cell": ["gru", "elman"], "hidden": [5, 3], "residual": True},
    "dense": {"cell": "gru", "hidden": [3, 2, 4], "dense": True, "bidirectional": True},
}  # fmt: skip


SIZES = {"inputs": 2, "outputs": 1, "hidden": 4, "output": "sigmoid", "dtype": torch.float64}
BY_HAND = {
    "antisymmetric": lambda: co.Network("antisymmetric", gated=True, eps=0.1, gamma=0.2, **SIZES),
    "cornn": lambda: co.Network(co.cells.cornn(0.1, 1.5, 2), x0="learned", **SIZES),
    "scrn": lambda: co.Network(co.cells.scrn(0.5, True), skip=True, **SIZES),
    "inverse": lambda: co.Network(co.cells.inverse(3, "relu"), **SIZES),
    "rate": lambda: co.Network(
        co.cells.rate(noise=0.1), structure=co.cells.structures.dale(4), **SIZES
    ),
    "lstm-1997": lambda: co.Network("lstm-1997", truncated=True, **SIZES),
    "lipschitz": lambda: co.Network(
        co.cells.lipschitz(beta=0.6), readout="attention", steps=4, **SIZES
    ),
    "tilted": lambda: co.Network(co.cells.lipschitz(), readout="tilted", beta=-2.0, **SIZES),
    "lru": lambda: co.Network(co.cells.lru, skip=True, **SIZES),
    "gated-feedback": lambda: co.Network(
        steps.GatedFeedback(2, 4, layers=3, unit="lstm", bias=False, dtype=torch.float64),
        bias=False,
        **SIZES,
    ),
    "deep-transition": lambda: co.Network(
        steps.DeepTransition(
            2, 4, depth=3, width=5, shortcut=True, activation="sigmoid", dtype=torch.float64
        ),
        **SIZES,
    ),
    "reservoir": lambda: co.Network("leaky", deep=(6, 5), **SIZES),
    "frozen": lambda: co.Network("lstm", structure="low-rank", deep=(3,), **SIZES),
    "stack": lambda: co.Stack(
        ["lstm", "gru-before", co.cells.rate(noise=0.1)],
        residual=True,
        dropout=0.2,
        readout="tilted-tanh",
        **SIZES,
    ),
    "both ways": lambda: co.Stack(
        ["elman", "elman"], bidirectional=True, deep=5, x0="learned", **SIZES
    ),
    "reservoirs": lambda: co.Stack(["leaky", "leaky"], **SIZES),
    "projected": lambda: co.Stack(["gru", "elman"], residual=True, **{**SIZES, "hidden": [5, 3]}),
    "dense": lambda: co.Stack(
        ["gru"] * 3, dense=True, bidirectional=True, **{**SIZES, "hidden": [3, 2, 4]}
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_section_says_what_the_library_would(name):
    """The same outputs and gradients, in training, as of a network made by hand with the same
    weights.
    """
    shape = Shape(inputs=2, outputs=1, readout="last", output="sigmoid")
    ours, theirs = (
        build_network(schema.NetworkSection(**{"hidden": 4} | NETWORKS[name]), shape, 64),
        BY_HAND[name](),
    )
    theirs.load_state_dict(ours.state_dict())
    batch = co.Batch(
        torch.randn(9, 5, 2, dtype=torch.float64),
        torch.rand(5, 1, dtype=torch.float64),
        lengths=[9, 7, 7, 2, 1],
    )
    found = []
    for net in (ours, theirs):
        torch.manual_seed(0)
        found.append(co.BPTT()(net, batch, "squared"))
    assert torch.equal(found[0].losses, found[1].losses)
    assert found[0].gradient
    assert all(torch.equal(g, found[1].gradient[key]) for key, g in found[0].gradient.items())


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_model_of_any_kind_is_loaded_as_it_was_saved(network, tmp_path):
    job, _, _ = job_of(tmp_path, **network)
    net, description = load_model(tmp_path / "run" / "model.safetensors")
    u = torch.randn(7, 3, job.task.inputs)
    assert torch.equal(net(u).a, job.network.eval()(u).a)
    assert net.extra_repr() == job.network.extra_repr()
    assert [p.requires_grad for p in net.parameters()] == [
        p.requires_grad for p in job.network.parameters()
    ]
    assert not net.training
    assert {key: description["network"][key] for key in network} == network


@pytest.mark.parametrize(
    ("network", "moved"),
    [
        ({"cell": "reservoir"}, {"V", "b_o"}),
        ({"cell": ["reservoir"]}, {"V", "b_o"}),
        ({"cell": "reservoir", "deep": 3}, {"V", "b_o", "deep.0.weight", "deep.0.bias"}),
        ({"cell": "leaky", "freeze": "leak"}, {"W", "R", "b", "V", "b_o"}),
        ({"cell": "leaky", "freeze": ["p", "R"]}, {"W", "b", "V", "b_o"}),
        ({"cell": "antisymmetric", "freeze": "W"}, {"R", "b", "V", "b_o"}),
        ({"cell": "gru-before", "freeze": ["step.W", "V"]}, {"step.R", "step.b", "b_o"}),
        ({"cell": "elman", "x0": "learned", "freeze": ["x0", "b"]}, {"W", "R", "V", "b_o"}),
    ],
)
def test_frozen_parameters_do_not_move(network, moved):
    job, before, _ = job_of(**network)
    assert {
        key for key, p in job.network.named_parameters() if not torch.equal(p, before[key])
    } == moved


def test_a_reservoir_begins_sparse_within_the_unit_circle():
    job, _, _ = job_of(cell="reservoir", hidden=40)
    W = job.network.W.detach()
    assert ((W != 0).sum(1) == 15).all()
    assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(0.9, rel=1e-5)
    assert (job.config.network.init, job.config.network.radius, job.config.network.std) == (
        "sparse",
        0.9,
        0.1,
    )
    wide, _, _ = job_of(cell="reservoir", hidden=40, radius=1.2)
    assert float(torch.linalg.eigvals(wide.network.W).abs().max()) == pytest.approx(1.2, rel=1e-5)


def test_every_option_of_every_cell_is_a_key():
    """But those that have a cell of their own."""
    apart = {"learned", "gated"}
    known = {key for name in library.CELLS for key in library.options(name)}
    known |= {key for name in steps.STEPS for key in steps.options(name)}
    assert known - apart <= set(schema.NetworkSection.model_fields)
    keys = {
        k
        for k, f in schema.NetworkSection.model_fields.items()
        if setting_flags.help_panel(f) == CELL_OPTIONS
    }
    assert keys <= known


DAMAGED = [
    (lambda d: d.pop("network"), "its description is damaged: 'network' is missing"),
    (lambda d: d.update(network=[1]),
        "its description is damaged: 'network' should be a valid dictionary"),
    (lambda d: d["network"].update(hidden="4"),
        "its description is damaged: 'network.hidden' should be a valid integer; got '4'"),
    (lambda d: d["network"].update(evil="x"),
        "its description is damaged: 'network.evil' does not belong to it"),
    (lambda d: d["network"].update(eps="a"),
        "its description is damaged: 'network.eps' should be a valid number; got 'a'"),
    (lambda d: d["shape"].update(mask=1),
        "its description is damaged: 'shape.mask' does not belong to it"),
    (lambda d: d["shape"].update(readout="never"),
        "its description is damaged: 'shape.readout' should be 'last', 'every' or 'sequence'; got "
        "'never'"),
    (lambda d: d["shape"].update(output="os.system"),
        "cannot be built: unknown output function 'os.system'"),
    (lambda d: d["network"].update(cell="os.system"), "cannot be built: unknown cell 'os.system'"),
    (lambda d: d["network"].update(cell="rate", eps=0.1),
        "cannot be built: eps does nothing with cell 'rate'"),
    (lambda d: d["network"].update(hidden=2**31 - 1),
        "cannot be built: it is larger than the file"),
    (lambda d: d["network"].update(cell="deep-transition", width=2**31 - 1),
        "cannot be built: it is larger than the file"),
    (lambda d: d["network"].update(deep=[1, 2**31 - 1]),
        "cannot be built: it is larger than the file"),
    (lambda d: d["network"].update(freeze=["x"]),
        "cannot be built: freeze: this network has no parameter 'x'"),
    (lambda d: d["network"].update(structure="dale"),
        "belongs to another network: its 'W' is float32 [4, 4]"),
    (lambda d: d["network"].update(hidden=5), "belongs to another network: its 'R' is"),
    (lambda d: d.update(precision="x"),
        "its description is damaged: 'precision' should be 32 or 64; got 'x'"),
    (lambda d: d.update(precision=16),
        "its description is damaged: 'precision' should be 32 or 64; got 16"),
    (lambda d: d.pop("precision"), "its description is damaged: 'precision' is missing"),
    (lambda d: d.update(evil=1), "its description is damaged: 'evil' does not belong to it"),
    (lambda d: d.update(task=1),
        "its description is damaged: 'task' should be a valid string; got 1"),
    (lambda d: d["network"].update(cell=["elman"] * 50),
        "cannot be built: it is larger than the file"),
    (lambda d: d["network"].update(deep=[1] * 50), "cannot be built: it is larger than the file"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "line"), DAMAGED, ids=[line for _, line in DAMAGED])
def test_a_damaged_model_gets_one_line(harm, line, tmp_path):
    job_of(tmp_path, cell="elman")
    path = tmp_path / "run" / "model.safetensors"
    with safe_open(str(path), framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        description = json.loads(file.metadata()["coadjoint"])
    description.pop("sha256")
    harm(description)
    save_file(weights, path, {"coadjoint": json.dumps(description)})
    with pytest.raises(StorageError) as error:
        load_model(path)
    assert line in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
