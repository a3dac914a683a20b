"""Chains by plain options: the layers of a text, or an autoencoder, with shapes inferred.

networks.make(chain="64x30", inputs=64, outputs=10, output="softmax", gain=0.5)
networks.make(chain="conv 8 3, tanh, pool 2, 64", shape=(1, 8, 8), outputs=10)
networks.make(autoencoder=[32, 8], inputs=64, outputs=64)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from ..errors import InputError, OptionError, check_seed, choose, nearest
from .chain import Chain
from .chain_text import LayerText, parse_chain, quoted, write_chain
from .maps import Activation, AvgPool, Conv, Dense, Flatten, MaxPool, Residual, Tied, draw_weights
from .maps.elementwise import ELEMENTWISE
from .maps.starts import STARTS
from .start_scales import refuse_infinite

Size = tuple[int, ...]  # the shape of one sample
NORMS = (nn.LayerNorm, nn.GroupNorm)  # their weights are no matrices, and begin with 1
# The options of a chain; all others belong to recurrent networks.
CHAIN_OPTIONS = (
    "chain",
    "autoencoder",
    "shape",
    "inputs",
    "outputs",
    "output",
    "activation",
    "bias",
    "dropout",
    "gain",
    "init",
    "freeze",
    "dtype",
)
DEFAULT_START = "orthogonal"


def is_chain(given: Mapping[str, object]) -> bool:
    """Whether options are those of a chain: it is named by its layers or as an autoencoder."""
    return given.get("chain") is not None or given.get("autoencoder") is not None


def start_options(init: str | None = None, gain: float | None = None) -> dict[str, object]:
    """The start of a chain, under "init", and its gain, with defaults where not given."""
    start = choose("start", DEFAULT_START if init is None else init, STARTS)
    if start == "torch":
        return {"init": start, "gain": gain}
    return {"init": start, "gain": 1.0 if gain is None else gain}


def list_idle_options(given: Mapping[str, object]) -> list[str]:
    """A line for each given option that a chain does not have; None counts as not given."""
    lines = []
    if given.get("chain") is not None and given.get("autoencoder") is not None:
        lines.append("$chain and $autoencoder both name the layers: give one of them.")
    for option, value in given.items():
        if value is None or option in CHAIN_OPTIONS or (option, value) == ("readout", "last"):
            continue
        meant = nearest(option, CHAIN_OPTIONS, cutoff=0.8)  # no option of a cell is as near
        if meant is not None:
            lines.append(f"a chain has no ${option}; did you mean ${meant}?")
        else:
            lines.append(f"${option} does nothing in a chain: it belongs to recurrent networks.")
    if given.get("init") == "torch" and given.get("gain") is not None:
        lines.append("$gain does nothing with $init torch: it belongs to orthogonal, gaussian.")
    return lines


def construct_chain(
    *,
    outputs: int,
    inputs: int | None = None,
    shape: Sequence[int] | None = None,
    chain: str | None = None,
    autoencoder: int | Sequence[int] | None = None,
    activation: str | None = None,
    output: str = "identity",
    bias: bool = True,
    dropout: float | None = None,
    dtype: torch.dtype | None = None,
) -> Chain:
    """A chain of these layers before its weights are drawn.

    outputs      the width of the linear readout, which is always added
    inputs       the entries of a vector; shape: of a sample of any shape, in place of inputs
    chain        the layers, as `chain_text.parse_chain` reads them
    autoencoder  the widths of the encoder instead; the decoder is tied to it
    activation   of dense layers and residual blocks, "tanh" by default
    bias         whether maps have a b
    dropout      the share of entries dropped in training before each dense layer but the first
    """
    sizes = sample_shape(inputs, shape)
    psi = choose("activation", activation or "tanh", ELEMENTWISE)
    builder = ChainBuilder(sizes, psi, bias, dropout or 0.0, dtype)
    if autoencoder is not None:
        widths = [autoencoder] if isinstance(autoencoder, int) else list(autoencoder)
        builder.add_autoencoder(widths, outputs)
        words = f"autoencoder {', '.join(map(str, widths))}"
    else:
        layers = parse_chain(str(chain))
        for layer in layers:
            builder.add(layer)
        builder.add_readout(outputs)
        words = write_chain(layers)
    net = Chain(*builder.maps, output=output, shape=sizes)
    net.outputs = outputs
    net.text = f"{words}, activation='{psi}'"
    net.notes = tuple(builder.notes)
    return net


def make_chain(*, init: str | None, gain: float | None, seed: int, **options: object) -> Chain:
    """A chain by plain options, with weights drawn from a seed.

    init, gain  as start and gain in `maps.draw_weights`; options: of `construct_chain`
    """
    start = start_options(init, gain)
    # The constructors of maps draw from torch's own generator, which stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(check_seed(seed))
        net = construct_chain(**options)  # type: ignore[arg-type]
    drawn = [module for module in net.maps if not isinstance(module, NORMS)]
    draw_weights(drawn, str(start["init"]), float(start["gain"] or 1.0), seed)  # type: ignore[arg-type]
    refuse_infinite(net, "$gain")
    return net


def sample_shape(inputs: int | None, shape: Sequence[int] | None) -> Size:
    """The shape of one sample, which `inputs` gives for vectors."""
    if shape is None:
        if inputs is None:
            raise OptionError("a chain needs $inputs, or the $shape of a sample.")
        return (int(inputs),)
    sizes = tuple(int(length) for length in shape)
    if not sizes or min(sizes) < 1:
        raise InputError(f"the shape of a sample has lengths of at least 1; got {list(sizes)}.")
    if inputs is not None and math.prod(sizes) != inputs:
        raise OptionError(f"$shape {list(sizes)} does not have $inputs {inputs} entries.")
    return sizes


class ChainBuilder:
    """Builds maps one after the other, and keeps the shape of the state behind the last of them.

    maps   so far
    shape  of a sample behind them
    notes  what was added to what the text says
    """

    def __init__(
        self, shape: Size, activation: str, bias: bool, dropout: float, dtype: torch.dtype | None
    ) -> None:
        self.shape = shape
        self.activation = activation
        self.bias = bias
        self.dropout = dropout
        self.dtype = dtype
        self.maps: list[nn.Module] = []
        self.notes: list[str] = []

    def add(self, layer: LayerText) -> None:
        """Add a layer; one that cannot read the state there is refused by its words."""
        if layer.kind in ("dense", "residual"):
            self.add_dense(layer)
        elif layer.kind == "conv":
            self.add_convolution(layer)
        elif layer.kind in ("pool", "avgpool"):
            self.add_pool(layer)
        elif layer.kind == "flatten":
            self.flatten()
        elif layer.kind == "dropout":
            self.maps.append(nn.Dropout(layer.share))
        elif layer.kind == "layernorm":
            self.maps.append(nn.LayerNorm(list(self.shape), dtype=self.dtype))
        elif layer.kind == "groupnorm":
            self.add_group_norm(layer)
        else:
            self.maps.append(Activation(layer.name))

    def add_dense(self, layer: LayerText) -> None:
        """A dense layer, or a residual block around one; an image is flattened first."""
        self.flatten_before(f"'{layer.text}'")
        self.drop()
        (width,) = self.shape
        dense = Dense(width, layer.size, self.activation, self.bias, dtype=self.dtype)
        if layer.kind == "dense":
            self.maps.append(dense)
        elif width == layer.size:
            self.maps.append(Residual(dense))
        else:
            block = Residual(dense, projection="linear", inputs=width, outputs=layer.size)
            self.maps.append(block)
        self.shape = (layer.size,)

    def add_convolution(self, layer: LayerText) -> None:
        """A convolution without activation; an image without channels gets one."""
        self.add_channel()
        channels, *sides = self.image(layer)
        conv = Conv(
            channels,
            layer.size,
            layer.filter,
            layer.stride,
            layer.pad,
            bias=self.bias,
            summed=layer.summed,
            dtype=self.dtype,
        )
        after = [(side + 2 * layer.pad - layer.filter) // layer.stride + 1 for side in sides]
        if min(after) < 1:
            self.refuse(layer, "its filters are larger than the image")
        self.maps.append(conv)
        self.shape = (layer.size, *after)

    def add_pool(self, layer: LayerText) -> None:
        """Max or average pooling over disjoint regions."""
        channels, *sides = self.image(layer)
        after = [side // layer.size for side in sides]
        if min(after) < 1:
            self.refuse(layer, "its regions are larger than the image")
        self.maps.append(MaxPool(layer.size) if layer.kind == "pool" else AvgPool(layer.size))
        self.shape = (channels, *after)

    def add_group_norm(self, layer: LayerText) -> None:
        """Normalisation over groups of channels, or of the entries of a vector."""
        channels = self.shape[0]
        if channels % layer.size:
            self.refuse(layer, f"{channels} channels do not make {layer.size} equal groups")
        self.maps.append(nn.GroupNorm(layer.size, channels, dtype=self.dtype))

    def add_channel(self) -> None:
        """Make images [rows, columns] images of one channel."""
        if len(self.shape) == 2 and not self.maps:
            self.notes.append("chain: the images have no channels, so they are read as one channel")
            self.maps.append(nn.Unflatten(1, (1, self.shape[0])))
            self.shape = (1, *self.shape)

    def image(self, layer: LayerText) -> Size:
        """The shape of the state, which must be that of an image."""
        if len(self.shape) == 1 and not self.maps:
            self.refuse(
                layer,
                "it reads images [channels, rows, columns]. Give their shape, or choose a task of "
                "images, such as digits-image",
            )
        if len(self.shape) != 3:
            self.refuse(layer, "it reads images [channels, rows, columns]")
        return self.shape

    def drop(self) -> None:
        """Dropout before a dense layer, unless that is the first map."""
        if self.dropout and self.maps:
            self.maps.append(nn.Dropout(self.dropout))

    def flatten(self) -> None:
        """Make the state a vector; nothing is added if it is one."""
        if len(self.shape) > 1:
            self.maps.append(Flatten())
            self.shape = (math.prod(self.shape),)

    def flatten_before(self, what: str) -> None:
        """Make the state a vector, with a note that says before what."""
        if len(self.shape) > 1:
            self.notes.append(
                f"chain: flatten was added before {what}, from {list(self.shape)} to "
                f"[{math.prod(self.shape)}]"
            )
            self.flatten()

    def add_readout(self, outputs: int) -> None:
        """The linear readout."""
        self.flatten_before("the readout")
        self.drop()
        (width,) = self.shape
        self.maps.append(Dense(width, outputs, "identity", self.bias, dtype=self.dtype))

    def add_autoencoder(self, widths: Sequence[int], outputs: int) -> None:
        """An encoder of these widths and a decoder with its weights, transposed."""
        if not widths:
            raise OptionError("$autoencoder needs the width of at least one layer: 32,8.")
        self.flatten_before("the encoder")
        (inputs,) = self.shape
        if inputs != outputs:
            raise OptionError(
                f"$autoencoder returns what it reads, {inputs} numbers, but this task needs "
                f"{outputs}: leave it out, or choose a task such as digits-denoise."
            )
        encoder: list[Dense] = []
        before = inputs
        for width in widths:
            self.drop()
            encoder.append(Dense(before, width, self.activation, self.bias, dtype=self.dtype))
            self.maps.append(encoder[-1])
            before = width
        for layer in reversed(encoder):
            psi = "identity" if layer is encoder[0] else self.activation
            self.drop()
            self.maps.append(Tied(layer, activation=psi, bias=self.bias))

    def refuse(self, layer: LayerText, reason: str) -> NoReturn:
        """Refuse a layer; the reason is the end of a sentence about it."""
        raise OptionError(
            f"$chain: '{quoted(layer.text)}' cannot read the state before it, "
            f"{list(self.shape)}: {reason}."
        )
