"""Config: what a file or a flag may say, what is refused and in which words, and what comes of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from coadjoint import config, gradients, settings
from coadjoint.errors import CoadjointError, ConfigError, MissingError

TASK = {"task": {"name": "xor", "length": 12}, "network": {"hidden": 4}}
WHOLE = "a whole number from 1 to 2147483647"


def refusal(function, *arguments):
    with pytest.raises(ConfigError) as error:
        function(*arguments)
    return str(error.value).splitlines()


FILES = [
    ("optimiser:\n  lr: -1.0", "run.yaml:2: optimiser.lr: must be a number greater than 0; got -1.0."),
    ("optimiser:\n  lr: true", "run.yaml:2: optimiser.lr: must be a number greater than 0; got true."),
    ("optimiser:\n  lr: [1, 2]", "run.yaml:2: optimiser.lr: must be a number greater than 0; got [1, 2]."),
    ("network:\n  cell: false", "run.yaml:2: network.cell: must be text; got false. Write it in quotes."),
    ("network:\n  hidden: '4'", f"run.yaml:2: network.hidden: must be {WHOLE}; got '4'."),
    ("network:\n  bias: 1", "run.yaml:2: network.bias: must be true or false; got 1."),
    ("task:\n  length: [1, 2, 3]", f"run.yaml:2: task.length: must be {WHOLE} or two of them; got [1, 2, 3]."),
    ("task:\n  length: {a: 1}", f"run.yaml:2: task.length: must be {WHOLE} or two of them; got {{'a': 1}}."),
    ("task:\n  curriculum: [a, b]", f"run.yaml:2: task.curriculum: must be two values, each {WHOLE}; got ['a', 'b']."),
    ("task:\n  rule: loos", "run.yaml:2: task.rule: must be loose or strict; got 'loos'. Did you mean 'loose'?"),
    ("training:\n  precision: 16", "run.yaml:2: training.precision: must be 32 or 64; got 16."),
    (
        "training:\n  seed: -1",
        "run.yaml:2: training.seed: must be a whole number from 0 to 9223372036854775807; got -1.",
    ),
    ("data:\n  target: [1]", "run.yaml:2: data.target: must be text or a list of texts; got [1]."),
    ("network:\n  lr: 3", "run.yaml:2: network.lr: 'lr' belongs in section [optimiser], not [network]."),
    ("lr: 3", "run.yaml:1: lr: 'lr' belongs in section [optimiser]."),
    (
        "optimizer: {lr: 1}",
        "run.yaml:1: optimizer: unknown section 'optimizer'; did you mean 'optimiser'? "
        "Known: task, data, network, gradient, optimiser, training.",
    ),
]


@pytest.mark.parametrize(("text", "line"), FILES, ids=[t for t, _ in FILES])
def test_refusal_of_a_file(text, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    assert refusal(config.resolve, settings.load("run.yaml")) == [line]


def test_an_unknown_key_and_a_section_that_is_none_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("training = 5\n[optimiser]\nlearning = 1\nbetaz = 2\n")
    lines = sorted(refusal(config.resolve, settings.load("run.toml")))
    assert len(lines) == 3
    assert any("unknown key 'betaz'; did you mean 'betas'?" in line for line in lines)
    assert any(line.startswith("run.toml:1: training: a section of keys is expected; got 5.") for line in lines)


FLAGS = [
    ("optimiser", "lr", "0", "--lr: must be a number greater than 0; got 0."),
    ("optimiser", "lr", "", "--lr: must be a number greater than 0; got ''."),
    ("optimiser", "lr", "nan", "--lr: must be a number greater than 0; got 'nan'."),
    ("optimiser", "lr", "1e999", "--lr: must be a number greater than 0; got '1e999'."),
    ("optimiser", "betas", "0.9", "--betas: must be two values, each a number from 0 to 1; got 0.9."),
    ("training", "seed", "012", "--seed: must be a whole number from 0 to 9223372036854775807; got '012'."),
    ("training", "threads", "9999", "--threads: must be a whole number from 1 to 1024; got 9999."),
    ("training", "device", "gpu", "--device: must be cpu, cuda or auto; got 'gpu'. Did you mean 'cpu'?"),
    ("data", "split", ".5,.5", "--split: must be three values, each a number from 0 to 1; got [0.5, 0.5]."),
]


@pytest.mark.parametrize(("section", "key", "text", "line"), FLAGS)
def test_refusal_of_a_flag(section, key, text, line):
    assert refusal(config.resolve, None, {section: {key: config.from_flag(section, key, text)}}) == [line]


def test_flags_come_on_top_of_a_file(tmp_path):
    (tmp_path / "a.json").write_text('{"optimiser": {"lr": 0.1, "name": "sgd"}, "task": {"length": [10, 20]}}')
    c = config.resolve(
        settings.load(tmp_path / "a.json"), {"optimiser": {"lr": config.from_flag("optimiser", "lr", "1e-2")}}
    )
    assert (c.optimiser.lr, c.optimiser.name, c.task.length) == (0.01, "sgd", (10, 20))


def test_lists_of_columns():
    assert config.from_flag("data", "target", "a,b") == ["a", "b"]
    assert config.from_flag("data", "target", "12") == "12"
    assert config.from_flag("data", "sep", ",") == ","


IDLE = [
    ({"optimiser": {"momentum": 0.9}}, "--momentum does nothing with --optimiser adam: it belongs to momentum, nesterov, rmsprop."),
    ({"optimiser": {"name": "sgd", "betas": [0.9, 0.99]}}, "--betas does nothing with --optimiser sgd: it belongs to adam, adamw, adamax, nadam, radam."),
    ({"optimiser": {"decay": 0.5}}, "--decay does nothing with --schedule constant: it belongs to exponential, plateau."),
    ({"optimiser": {"schedule": "cosine", "plateau": 3}}, "--plateau does nothing with --schedule cosine: it belongs to plateau."),
    ({"optimiser": {"schedule": "plateau", "end": 0.1}}, "--end does nothing with --schedule plateau: it belongs to linear, cosine."),
    ({"network": {"std": 0.1}}, "--std does nothing with --init torch: it belongs to gaussian, spectral, sparse, orthogonal, identity."),
    ({"network": {"init": "gaussian", "radius": 1.0}}, "--radius does nothing with --init gaussian: it belongs to spectral, sparse, orthogonal, identity."),
    ({"gradient": {"weight": 2.0}}, "--weight does nothing with --method bptt: it belongs to penalised."),
    ({"gradient": {"weight_rate": 2.0}}, "--weight-rate does nothing with --weight-schedule constant: it belongs to inverse-time, exponential."),
    ({"gradient": {"penalty": "variance", "weight_end": 1.0}}, "--weight-end does nothing with --weight-schedule constant: it belongs to linear."),
    ({"gradient": {"weight_schedule": "constant"}}, "--weight-schedule does nothing with --method bptt: it belongs to penalised."),
    ({"gradient": {"method": "rtrl", "penalty": "variance"}}, "--penalty does nothing with --method rtrl: it belongs to penalised."),
    ({"gradient": {"k1": 3}}, "--k1 does nothing with --method bptt: it belongs to truncated."),
    ({"task": {"rule": "strict"}}, "--rule does nothing with task 'xor'; its options: length, ragged, curriculum."),
    ({"task": {"pixels": 1}}, "--pixels does nothing with task 'xor'; its options: length, ragged, curriculum."),
    ({"data": {"kind": "next"}}, "--kind belongs to your own data (--train FILE), not to task 'xor'."),
    ({"training": {"epochs": 3}}, "--epochs counts passes over a finite set, and this task is generated without end: use --steps."),
    ({"gradient": {"method": "penalised"}}, None),
    ({"gradient": {"method": "truncated"}}, "--method truncated needs --k1, and --k2 if losses are pulled back further."),
    ({"gradient": {"penalty": "variance", "weight_schedule": "exponential"}}, "--weight-schedule exponential needs --weight-rate."),
    ({"gradient": {"penalty": "variance", "weight_schedule": "exponential", "weight_rate": 2.0}}, None),
]  # fmt: skip


def merged(changes):
    return {name: {**TASK.get(name, {}), **changes.get(name, {})} for name in config.SECTIONS}


@pytest.mark.parametrize(("changes", "line"), IDLE, ids=[str(c) for c, _ in IDLE])
def test_what_does_nothing_is_refused(changes, line):
    lines = refusal(config.build, config.resolve(None, merged(changes)))
    assert len(lines) == 1
    assert line is None or lines == [line]


FINITE = [
    ({"tests": 5}, "--tests does nothing with a finite set"),
    ({"confirm": 5}, "--confirm does nothing with a finite set"),
    ({"epochs": 5, "steps": 5}, "--steps and --epochs say the same thing twice"),
    ({"patience": 5}, "--patience needs a validation set"),
]


@pytest.mark.parametrize(("training", "line"), FINITE)
def test_what_does_not_go_with_a_finite_set_is_refused(training, line):
    class Finite:
        size, splits = 10, ("test",)

    (found,) = refusal(config.finite, config.resolve(None, {"training": training}), Finite)
    assert found.startswith(line)


def test_a_penalty_that_declines_the_network_is_refused_before_a_run():
    changes = {"network": {"engine": "autograd"}, "gradient": {"penalty": "omega-published"}}
    with pytest.raises(CoadjointError, match="omega-published"):
        config.build(config.resolve(None, merged(changes)))


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MissingError, match="Use --device cpu") as error:
        config.build(config.resolve(None, merged({"training": {"device": "cuda"}})))
    assert error.value.exit_code == 7


def test_a_weight_of_zero_is_plain_unless_it_grows():
    of = lambda **g: config.gradient_of(config.resolve(None, {"gradient": {"penalty": "variance", **g}}), 10)
    assert isinstance(of(weight=0), gradients.BPTT)
    assert isinstance(of(), gradients.Penalised)
    assert isinstance(of(weight=0, weight_schedule="linear", weight_end=2), gradients.Penalised)


WHOLES = [
    {},
    {"gradient": {"penalty": "log-ratio"}, "network": {"radius": 0.5}},
    {
        "gradient": {"method": "truncated", "k1": 3},
        "optimiser": {"name": "momentum", "momentum": 0.5, "schedule": "cosine"},
    },
    {"task": {"length": [10, 20], "ragged": True}, "training": {"clip": 1e-5, "precision": 64}},
]


@pytest.mark.parametrize("changes", WHOLES)
def test_a_resolved_config_reads_back_and_means_the_same(changes, tmp_path):
    job = config.build(config.resolve(None, merged(changes)))
    settings.dump(config.plain(job.config), tmp_path / "config.yaml")
    back = config.resolve(settings.load(tmp_path / "config.yaml"))
    assert back == job.config
    again = config.build(back)
    assert again.config == job.config
    assert again.arguments["description"] == job.arguments["description"]


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)
KEYS = st.sampled_from(sorted(config.HOMES)) | st.text(max_size=5)
FOUND = st.dictionaries(
    st.sampled_from(sorted(config.SECTIONS)) | st.text(max_size=5),
    LEAVES | st.dictionaries(KEYS, LEAVES, max_size=3),
    max_size=3,
)


@examples(max_examples=200, deadline=None)
@given(FOUND)
def test_only_our_errors_escape(values):
    try:
        config.resolve(settings.Settings(values, "run.yaml", {}))
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
        config.resolve(None, {section: {key: 1}})
    assert meant in str(error.value)
