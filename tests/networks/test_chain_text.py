"""Chains by their text: what it means, what is refused, and the network that comes of it."""

import re

import pytest
import torch
from torch import nn

import coadjoint as co
from coadjoint.errors import CoadjointError, InputError, OptionError
from coadjoint.networks import chain_factory
from coadjoint.networks.chain_text import MOST_LAYERS, LayerText, parse_chain, widest, write_chain

TEXTS = {
    "64x30": [LayerText("dense", 64)] * 30,
    "64, 32": [LayerText("dense", 64), LayerText("dense", 32)],
    "8×2": [LayerText("dense", 8)] * 2,
    "conv 8 3,tanh , pool 2, flatten,64": [
        LayerText("conv", 8, 3),
        LayerText("activation", name="tanh"),
        LayerText("pool", 2),
        LayerText("flatten"),
        LayerText("dense", 64),
    ],
    "conv 8 3 stride 2 pad 1 summed": [LayerText("conv", 8, 3, 2, 1, True)],
    "conv 8 3 summed pad 0": [LayerText("conv", 8, 3, summed=True)],
    "residual 16x2, avgpool 3, dropout 0.25": [
        LayerText("residual", 16),
        LayerText("residual", 16),
        LayerText("avgpool", 3),
        LayerText("dropout", share=0.25),
    ],
    "layernorm, groupnorm 4, gelu": [
        LayerText("layernorm"),
        LayerText("groupnorm", 4),
        LayerText("activation", name="gelu"),
    ],
}


@pytest.mark.parametrize(("text", "layers"), TEXTS.items())
def test_a_text_is_its_layers_and_back(text, layers):
    assert parse_chain(text) == layers
    assert parse_chain(write_chain(layers)) == layers


def test_equal_dense_layers_are_counted_in_the_text():
    assert write_chain(parse_chain("64,64,64,tanh,tanh,residual 8,residual 8")) == (
        "64x3, tanh, tanh, residual 8x2"
    )
    assert widest(parse_chain("conv 12 3, 7, residual 9")) == 12
    assert widest(parse_chain("tanh")) == 1


MISTAKES = {
    "": "chain is empty",
    " ": "chain is empty",
    "64,": "layer 2 is empty",
    "tahn": "unknown layer 'tahn'; did you mean 'tanh'?",
    "64, zzz": "unknown layer 'zzz'; Known: 32, 32x6 (six of them), conv",
    "32*6": "'32*6' is written 32x6",
    "tanh, 32 x 6": "'32 x 6' is written 32x6",
    "32X6": "'32X6' is written 32x6",
    "64 tanh": "'tanh' after '64' has no meaning: separate layers by commas",
    "tanh 3": "'3' after 'tanh'",
    "0": "'0' in '0' must be a whole number from 1",
    "64x0": "'0' in '64x0' must be a whole number from 1 to 10,000",
    f"64x{MOST_LAYERS + 1}": "must be a whole number from",
    f"64x{MOST_LAYERS}, 64": "makes more than 10,000 layers",
    "99999999999999999999": "must be a whole number from",
    "-3": "unknown layer '-3'",
    "64.5": "unknown layer '64.5'",
    "conv 8": "'conv 8' needs a number of channels and the size of the filters: conv 8 3",
    "conv a 3": "'conv a 3' needs a number of channels",
    "conv 8 3 stride": "'' in 'conv 8 3 stride' must be a whole number from 1",
    "conv 8 3 stride 0": "'0' in 'conv 8 3 stride 0' must be a whole number from 1",
    "conv 8 3 pad x": "'x' in 'conv 8 3 pad x' must be a whole number from 0",
    "conv 8 3 dilated": "'dilated' in 'conv 8 3 dilated' is not an option of conv",
    "pool": "'pool' needs the side of its regions: pool 2",
    "pool 0": "'0' in 'pool 0' must be a whole number",
    "avgpool x": "'avgpool x' needs the side of its regions",
    "groupnorm": "'groupnorm' needs a number of groups",
    "flatten 3": "'3' after 'flatten'",
    "residual": "'residual' needs a number of units",
    "residual tanh": "'residual tanh' needs a number of units",
    "residual 8 8": "'8' after 'residual 8'",
    "dropout": "'dropout' needs the share to drop",
    "dropout 1": "'dropout 1' needs the share to drop, from 0 to below 1",
    "dropout nan": "needs the share to drop",
    "$64": "unknown layer '$64'",
}


@pytest.mark.parametrize(("text", "words"), MISTAKES.items())
def test_a_mistake_is_refused_in_one_line_with_its_word(text, words):
    with pytest.raises(OptionError, match=re.escape(words)) as error:
        parse_chain(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def make(chain, shape=(1, 8, 8), outputs=10, **options):
    return co.networks.make(chain=chain, shape=shape, outputs=outputs, **options)


SHAPES = {
    "64x2": [(64,), (64,), (64,), (10,)],
    "conv 4 3, relu, pool 2": [(4, 6, 6), (4, 6, 6), (4, 3, 3), (36,), (10,)],
    "conv 4 3 stride 2 pad 1 summed, avgpool 3, flatten, 5": [
        (4, 4, 4), (4, 1, 1), (4,), (5,), (10,)
    ],
    "conv 4 3, groupnorm 2, layernorm, dropout 0.5": [
        (4, 6, 6), (4, 6, 6), (4, 6, 6), (4, 6, 6), (144,), (10,)
    ],
    "flatten, residual 64, residual 8": [(64,), (64,), (8,), (10,)],
}  # fmt: skip


@pytest.mark.parametrize(("text", "shapes"), SHAPES.items())
def test_shapes_are_inferred_from_that_of_the_input(text, shapes):
    net = make(text).eval()
    states = net(torch.randn(3, 1, 8, 8)).states
    assert [tuple(x.shape[1:]) for x in states[1:]] == shapes
    assert (net.inputs, net.outputs, net.shape) == (64, 10, (1, 8, 8))


def test_what_the_text_leaves_out_is_noted():
    assert make("flatten, 8").notes == ()
    assert make("8").notes == ("chain: flatten was added before '8', from [1, 8, 8] to [64]",)
    assert make("conv 2 3").notes == (
        "chain: flatten was added before the readout, from [2, 6, 6] to [72]",
    )
    net = make("conv 2 3", shape=(8, 8))
    assert "one channel" in net.notes[0]
    assert net(torch.zeros(1, 8, 8)).a.shape == (1, 10)


UNFIT = {
    ("conv 8 3", (64,)): "'conv 8 3' cannot read the state before it, [64]: it reads images "
    "[channels, rows, columns]. Give their shape, or choose a task of images, such as digits-image",
    ("conv 8 9", (1, 8, 8)): "[1, 8, 8]: its filters are larger than the image",
    ("pool 9", (1, 8, 8)): "its regions are larger than the image",
    ("64, pool 2", (1, 8, 8)): "'pool 2' cannot read the state before it, [64]",
    ("groupnorm 3", (4, 2, 2)): "4 channels do not make 3 equal groups",
}


@pytest.mark.parametrize(("text", "shape", "words"), [(*key, w) for key, w in UNFIT.items()])
def test_a_layer_that_cannot_read_its_input_is_refused_by_name(text, shape, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        make(text, shape)


def test_a_chain_by_its_text_is_the_one_of_its_class():
    """The same weights, bit for bit, as of `Chain.mlp`."""
    ours = make("16x3", (8,), activation="relu", gain=0.5, seed=3, output="softmax")
    theirs = co.Chain.mlp(8, [16] * 3, 10, activation="relu", gain=0.5, seed=3, output="softmax")
    assert ours.output == "softmax"
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(p, theirs.state_dict()[k]) for k, p in ours.state_dict().items())
    x = torch.randn(4, 8)
    assert torch.equal(ours(x).a, theirs(x).a)


def test_an_autoencoder_by_its_widths_is_tied():
    ours = co.networks.make(autoencoder=[6, 2], inputs=8, outputs=8, seed=1)
    theirs = co.Chain.autoencoder(8, [6, 2], seed=1)
    assert all(torch.equal(p, theirs.state_dict()[k]) for k, p in ours.state_dict().items())
    assert ours.maps[0].W is ours.maps[3].W
    assert (
        co.networks.make(autoencoder=3, inputs=8, outputs=8)
        .extra_repr()
        .startswith("autoencoder 3,")
    )
    with pytest.raises(OptionError, match=r"returns what it reads, 8 numbers, but .* needs 3"):
        co.networks.make(autoencoder=[6, 2], inputs=8, outputs=3)
    with pytest.raises(OptionError, match="at least one layer"):
        co.networks.make(autoencoder=[], inputs=8, outputs=8)


def test_starts_are_drawn_from_the_seed_alone():
    for init in ("orthogonal", "gaussian", "torch"):
        options = {"init": init, "gain": None if init == "torch" else 2.0}
        torch.manual_seed(0)
        first = make("8x2", (8,), seed=1, **options)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        again = make("8x2", (8,), seed=1, **options)
        other = make("8x2", (8,), seed=2, **options)
        torch.manual_seed(0)
        assert torch.equal(torch.get_rng_state(), state)  # torch's generator is left alone
        assert torch.equal(first.maps[1].W, again.maps[1].W)
        assert not torch.equal(first.maps[1].W, other.maps[1].W)
    W = make("8x2", (8,), gain=0.5).maps[0].W.detach()
    torch.testing.assert_close(W @ W.T, 0.25 * torch.eye(8))


def test_norms_begin_as_torch_has_them_and_dropout_is_before_dense_layers():
    net = make("8, layernorm, 8", (8,), dropout=0.1)
    assert [type(f) for f in net.maps] == [
        co.maps.Dense, nn.LayerNorm, nn.Dropout, co.maps.Dense, nn.Dropout, co.maps.Dense
    ]  # fmt: skip
    assert (net.maps[1].weight == 1).all()
    assert not net.maps[0].b.any()
    assert make("8", (8,), bias=False).maps[0].b is None
    assert make("8", (8,), dtype=torch.float64, activation="gelu").maps[0].W.dtype == torch.float64


def test_parameters_are_frozen_by_name():
    net = make("8x2", (8,), freeze="maps.0")
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True, True, True]
    with pytest.raises(OptionError, match="no parameter 'x'"):
        make("8x2", (8,), freeze="x")


OF_RECURRENT = {
    "cell": "lstm", "hidden": 3, "layers": 2, "readout": "every", "bidirectional": True,
    "structure": "orthogonal", "x0": "learned", "radius": 0.9, "engine": "cpu", "eps": 0.1,
    "residual": True, "attend": True, "std": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), OF_RECURRENT.items())
def test_an_option_of_recurrent_networks_is_refused_by_name(option, value):
    with pytest.raises(OptionError) as error:
        make("8", (8,), **{option: value})
    assert str(error.value) == (
        f"{option} does nothing in a chain: it belongs to recurrent networks."
    )


def test_other_options_that_do_nothing_are_refused():
    for options, words in (
        ({"autoencoder": [3]}, "chain and autoencoder both name the layers"),
        ({"gain": 2.0, "init": "torch"}, "gain does nothing with init torch"),
        ({"inputs": 9}, "shape [8] does not have inputs 9 entries"),
    ):
        with pytest.raises(OptionError, match=re.escape(words)):
            make("8", (8,), **options)
    with pytest.raises(OptionError, match="gain belongs to a chain"):
        co.networks.make("elman", inputs=1, outputs=1, gain=2.0)
    with pytest.raises(OptionError, match="needs inputs, or the shape"):
        co.networks.make(chain="8", outputs=1)
    with pytest.raises(InputError, match="unknown start 'he'"):
        make("8", (8,), init="he")
    with pytest.raises(CoadjointError, match="unknown activation 'step'"):
        make("8", (8,), activation="step")
    with pytest.raises(InputError, match="at least 1"):
        make("8", (0, 8))
    assert chain_factory.start_options() == {"init": "orthogonal", "gain": 1.0}
