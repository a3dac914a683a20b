"""networks.make builds in one call whatever the command line can build, bit for bit.

Settings that do not fit together are refused by the name of the keyword.
"""

import inspect

import pytest
import torch

import coadjoint as co
from coadjoint.cells import library, steps
from coadjoint.cli import build, flags
from coadjoint.errors import InputError, OptionError
from coadjoint.networks import cell_choice, chain_factory, factory
from coadjoint.training.network_section import RECURRENT_DEFAULTS, NetworkSection, Shape

XOR = {"inputs": 2, "outputs": 1, "output": "sigmoid"}
SORTING = {"inputs": 3, "outputs": 4, "readout": "sequence", "output": "softmax"}
NETWORKS = {
    "elman": {},
    "spectral": {"cell": "elman", "radius": 0.5},
    "gaussian": {"cell": "gru", "init": "gaussian", "std": 0.3, "x0": "learned", "bias": False},
    "ring": {"cell": "lru", "init": "ring", "inner": 0.9, "radius": 0.99, "skip": True},
    "options": {"cell": "antisymmetric-gated", "eps": 0.1, "gamma": 0.2, "freeze": "W"},
    "activation": {
        "cell": "rate",
        "noise": 0.1,
        "structure": "dale",
        "init": "spectral",
        "activation": "relu",
    },
    "tilted": {"cell": "lipschitz", "beta": -2.0, "readout": "tilted"},
    "attention": {"cell": "lipschitz", "beta": 0.6, "readout": "attention", "attention_steps": 4},
    "step": {"cell": "gated-feedback", "layers": 3, "unit": "lstm"},
    "reservoir": {"cell": "reservoir", "deep": [6, 5]},
    "reservoirs": {"cell": "reservoir", "layers": 2, "radius": 1.2},
    "stack": {
        "cell": ["lstm", "gru-before"],
        "residual": True,
        "dropout": 0.2,
        "readout": "tilted-tanh",
    },
    "both ways": {"cell": "elman", "layers": 2, "bidirectional": True, "deep": 5},
    "projected": {"cell": "elman", "hidden": [5, 3], "residual": True, "radius": 0.9},
    "dense": {"cell": ["gru", "lstm"], "dense": True, "bidirectional": True, "hidden": [3, 4]},
}


def from_settings(network, task="xor", **training):
    options = (
        {"name": task, "length": 12} if task == "xor" else {"name": task, "length": 4, "values": 3}
    )
    sections = {"task": options, "network": {"hidden": 4, **network}, "training": training}
    return build.build(flags.resolve(None, sections))


def same_bits(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def same_gradient(a, b, batch, loss):
    found = []
    for net in (a, b):
        torch.manual_seed(0)  # of dropout and noise
        found.append(co.BPTT()(net, batch, loss).gradient)
    return list(found[0]) == list(found[1]) and all(
        torch.equal(g, found[1][key]) for key, g in found[0].items()
    )


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_one_call_builds_the_network_of_the_settings(network, precision):
    job = from_settings(network, seed=7, precision=precision)
    dtype = torch.float64 if precision == 64 else torch.float32
    net = co.networks.make(**XOR | {"hidden": 4} | network, seed=7, dtype=dtype)
    assert net.extra_repr() == job.network.extra_repr()
    assert same_bits(net, job.network)
    assert [p.requires_grad for p in net.parameters()] == [
        p.requires_grad for p in job.network.parameters()
    ]
    assert same_gradient(net, job.network, job.task.batch(0, 3, 0).to(dtype, "cpu"), job.task.loss)


@pytest.mark.parametrize(
    "network",
    [
        {},
        {"cell": "lstm", "layers": 2, "dropout": 0.1},
        {"cell": "gru", "decoder": "elman", "attend": False},
    ],
    ids=["default", "layers", "decoder"],
)
def test_one_call_builds_an_encoder_and_decoder(network):
    job = from_settings(network, "sorting")
    net = co.networks.make(**SORTING | {"cell": "gru"} | network, hidden=4)
    assert isinstance(net, co.EncoderDecoder)
    assert same_bits(net, job.network)
    assert same_gradient(net, job.network, job.task.batch(0, 3, 0), job.task.loss)


def test_every_key_of_the_settings_is_a_keyword():
    """With the defaults of the settings; what is not in a signature is an option of some cell."""
    taken = {
        **inspect.signature(chain_factory.construct_chain).parameters,
        **inspect.signature(factory.construct).parameters,
        **inspect.signature(factory.make).parameters,
    }
    of_cells = {key for name in cell_choice.CELL_NAMES for key in cell_choice.cell_options(name)}
    for key, field in NetworkSection.model_fields.items():
        assert key in taken or key in of_cells
        default = RECURRENT_DEFAULTS.get(key, field.default)
        if key in taken and default is not None:
            assert taken[key].default == default
    own = {"seed", "device", "dtype", "options", *Shape.model_fields}
    assert set(taken) - own <= set(NetworkSection.model_fields)


def test_the_same_call_gives_the_same_bits_and_another_seed_others():
    a, b, c = (
        co.networks.make("lstm", inputs=2, outputs=1, hidden=3, seed=seed) for seed in (1, 1, 2)
    )
    assert same_bits(a, b)
    assert not same_bits(a, c)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": 0.1}, "eps does nothing with cell 'elman'; its options: activation."),
        ({"std": 0.1},
            "std does nothing with init torch: it belongs to gaussian, spectral, sparse, "
            "orthogonal, identity."),
        ({"attention_steps": 3},
            "attention_steps does nothing with readout last: it belongs to attention."),
        ({"residual": True},
            "residual acts between layers, but there is only one: give layers or a list of cells."),
        ({"dense": True},
            "dense acts between layers, but there is only one: give layers or a list of cells."),
        ({"residual": True, "dense": True, "layers": 2},
            "residual adds the output of the layer below, dense puts it beside the layer's own: "
            "choose one."),
        ({"hidden": [3, 4], "layers": 3},
            "hidden 3,4 has 2 numbers, but the network has 3 layers: give one number, or one for "
            "each layer."),
        ({"hidden": [3, 4], "cell": ["gru"]},
            "hidden 3,4 has 2 numbers, but the network has 1 layer: give one number, or one for "
            "each layer."),
        ({"hidden": [3, 4], "outputs": 3, "readout": "sequence"},
            "hidden 3,4: when the output is a sequence, an encoder and its decoder have one number "
            "of units."),
        ({"hidden": [3, 4], "cell": "gated-feedback"},
            "hidden 3,4: the layers inside gated-feedback have the same units."),
        ({"cell": "unicornn-layers", "layers": 2, "dense": True},
            "dense acts between layers, but those of unicornn-layers are inside the cell: leave "
            "out dense."),
        ({"cell": []}, "cell is empty: `coadjoint cells` lists the names."),
        ({"cell": ["lstm"], "layers": 2},
            "cell lstm makes one layer for each name: leave out layers, or name one cell."),
        ({"decoder": "gru"}, "decoder does nothing unless the output is a sequence."),
        ({"skip": True, "readout": "sequence", "outputs": 3},
            "skip does nothing when the output is a sequence."),
        ({"freeze": "$V"}, "freeze: this network has no parameter '$V'; it has W, R, b, V, b_o."),
    ],
)  # fmt: skip
def test_a_keyword_without_effect_is_refused_by_name(options, words):
    with pytest.raises(OptionError) as error:
        co.networks.make(**{"inputs": 2, "outputs": 1, "hidden": 3} | options)
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a network needs inputs and outputs."),
        ({"inputs": 2}, "a network needs outputs."),
        ({"input": 2, "outputs": 1},
            "a network needs inputs. Did you mean inputs where you wrote input?"),
        ({"inputs": 2, "output": 1},
            "a network needs outputs. Did you mean outputs where you wrote output?"),
        ({"chain": "8", "input": 2, "outputs": 1},
            "a chain has no input; did you mean inputs?"),
        ({"chain": "8", "inputs": 2}, "a chain needs outputs."),
        ({"chain": "8", "shape": (2,)}, "a chain needs outputs."),
        ({"chain": "8", "outputs": 2}, "a chain needs inputs, or the shape of a sample."),
    ],
)  # fmt: skip
def test_a_network_without_sizes_is_refused_with_the_name_that_was_meant(options, words):
    with pytest.raises(OptionError) as error:
        co.networks.make(**options)
    assert str(error.value) == words


def test_no_option_of_a_recurrent_network_is_taken_for_a_misspelled_one_of_a_chain():
    names = {option for cell in cell_choice.CELL_NAMES for option in cell_choice.cell_options(cell)}
    names |= set(inspect.signature(factory.construct).parameters)
    for name in names - set(chain_factory.CHAIN_OPTIONS):
        (line,) = chain_factory.list_idle_options({name: "x"})
        assert "belongs to recurrent networks" in line


def test_a_refusal_can_be_spelled_otherwise():
    error = OptionError("$weight_rate does nothing with $method bptt, and costs 5$$.")
    assert str(error) == "weight_rate does nothing with method bptt, and costs 5$."
    assert error.text_with(str.upper) == "WEIGHT_RATE does nothing with METHOD bptt, and costs 5$."


@pytest.mark.parametrize(
    "options", [{"cell": "elmann"}, {"init": "spectrall"}, {"readout": "lasst"}]
)
def test_a_wrong_name_is_answered_with_the_nearest(options):
    with pytest.raises(InputError, match=r"did you mean '(elman|spectral|last)'"):
        co.networks.make(**{"inputs": 2, "outputs": 1, "hidden": 3} | options)


@pytest.mark.parametrize("name", [*library.CELLS, *steps.STEPS, "reservoir"])
def test_about_says_what_a_cell_has(name):
    found = co.networks.about(name, hidden=5, inputs=3)
    net = co.networks.make(name, inputs=3, outputs=1, hidden=5)
    assert found.parameters.keys() == factory.parameters_by_name(net).keys() - {"V", "b_o"}
    assert "torch" in found.initialisers
    assert [engine for engine, why in found.engines.items() if why is None]
    if name != "reservoir":
        alone = co.cells.about(name)
        assert (found.equations, found.paper, found.state) == (
            alone.equations,
            alone.paper,
            alone.state,
        )
        assert found.equations
        assert found.options.items() <= alone.options.items()
