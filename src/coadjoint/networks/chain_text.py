"""Chains as text: "64x30", or "conv 8 3, tanh, pool 2, flatten, 64".

Layers are separated by commas:

    64                   a dense layer of 64 units, with the activation of the chain
    64x30                thirty of them
    residual 64          x + f(x), with a dense layer f of 64 units; residual 64x10 is ten of them
    conv 8 3             a convolution to 8 channels with filters of 3 x 3; then, if wanted,
                         stride 2, pad 1, and summed for one filter on the sum of the channels
    tanh, relu, ...      an activation by itself
    pool 2, avgpool 2    the largest entry, or the mean, of regions of 2 x 2
    flatten              an image as a vector
    dropout 0.1          entries that are dropped in training
    layernorm            normalised over all entries of a sample
    groupnorm 4          normalised over each of 4 groups of channels

The linear readout is not in the text: every chain ends with one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NoReturn

from ..errors import OptionError, nearest, one_line
from .maps.elementwise import ELEMENTWISE

MOST_LAYERS = 10_000
MOST_UNITS = 2**31 - 1
WEIGHTED = ("dense", "residual", "conv")  # layers with units or channels of their own
NUMBER = re.compile(r"[0-9]+")
DENSE = re.compile(r"([0-9]+)(?:[x×]([0-9]+))?")
NEARLY_DENSE = re.compile(r"([0-9]+) ?[*xX×] ?([0-9]+)")  # "32*6" and "32 x 6", meant as 32x6


@dataclass(frozen=True)
class LayerText:
    """A layer of a chain, as its text has it.

    kind     "dense", "residual", "conv", "pool", "avgpool", "flatten", "dropout", "layernorm",
             "groupnorm", or "activation"
    size     units, channels, or the side of a region; the number of groups
    filter, stride, pad, summed   of a convolution
    share    of dropout
    name     of an activation
    """

    kind: str
    size: int = 0
    filter: int = 0
    stride: int = 1
    pad: int = 0
    summed: bool = False
    share: float = 0.0
    name: str = ""

    @property
    def text(self) -> str:
        """The words of this layer."""
        if self.kind == "activation":
            return self.name
        if self.kind == "dense":
            return str(self.size)
        words = [self.kind]
        if self.size:
            words.append(str(self.size))
        if self.kind == "conv":
            words.append(str(self.filter))
        if self.stride != 1:
            words.append(f"stride {self.stride}")
        if self.pad:
            words.append(f"pad {self.pad}")
        if self.summed:
            words.append("summed")
        if self.kind == "dropout":
            words.append(f"{self.share:g}")
        return " ".join(words)


def parse_chain(text: str) -> list[LayerText]:
    """The layers of a text; what cannot be read is refused by its words.

    Example:
        >>> from coadjoint.networks.chain_text import parse_chain, write_chain
        >>> [layer.text for layer in parse_chain("conv 8 3, tanh, 64x2")]
        ['conv 8 3', 'tanh', '64', '64']
        >>> write_chain(parse_chain("64,64, 64 ,tanh"))
        '64x3, tanh'
    """
    if not isinstance(text, str) or not text.strip():
        raise OptionError("$chain is empty; expected layers such as 64x30 or 'conv 8 3, tanh, 64'.")
    layers: list[LayerText] = []
    for number, part in enumerate(text.split(","), start=1):
        words = part.split()
        if not words:
            refuse(text, f"layer {number} is empty: leave out the comma")
        layers += parse_layer(text, words)
        if len(layers) > MOST_LAYERS:
            refuse(text, f"'{quoted(part)}' makes more than {MOST_LAYERS:,} layers")
    return layers


def write_chain(layers: Sequence[LayerText]) -> str:
    """The text of layers; equal dense layers in a row are written as 64x30."""
    parts = []
    for layer, equal in groupby(layers):
        count = len(list(equal))
        if layer.kind in ("dense", "residual"):
            parts.append(layer.text if count == 1 else f"{layer.text}x{count}")
        else:
            parts += [layer.text] * count
    return ", ".join(parts)


def widest(layers: Sequence[LayerText]) -> int:
    """The largest number of units or channels in a layer; 1 if none has any."""
    return max((layer.size for layer in layers if layer.kind in WEIGHTED), default=1)


def parse_layer(text: str, words: list[str]) -> list[LayerText]:
    """The layers of the words between two commas. text: all of it, for an error."""
    word, *rest = words
    product = NEARLY_DENSE.fullmatch(" ".join(words))
    if product and (rest or not DENSE.fullmatch(word)):
        written = quoted(" ".join(words))
        refuse(text, f"'{written}' is written {quoted(product[1])}x{quoted(product[2])}")
    if DENSE.fullmatch(word):
        refuse_rest(text, words, 1)
        return parse_dense(text, "dense", word)
    if word in ELEMENTWISE:
        refuse_rest(text, words, 1)
        return [LayerText("activation", name=word)]
    if word not in PARSERS:
        known = [*PARSERS, *ELEMENTWISE]
        near = nearest(word, known)
        hint = f"did you mean '{near}'? " if near else ""
        names = ", ".join(known)
        refuse(
            text, f"unknown layer '{quoted(word)}'; {hint}Known: 32, 32x6 (six of them), {names}"
        )
    return PARSERS[word](text, words, rest)


def parse_dense(text: str, kind: str, word: str) -> list[LayerText]:
    """Dense layers or residual blocks of one width: "64", or "64x30" for thirty of them."""
    match = DENSE.fullmatch(word)
    if match is None:
        refuse(text, f"'{kind} {quoted(word)}' needs a number of units: {kind} 64, or {kind} 64x10")
    units = whole_number(text, word, match[1])
    count = 1 if match[2] is None else whole_number(text, word, match[2], MOST_LAYERS)
    return [LayerText(kind, units)] * count


def parse_residual(text: str, words: list[str], rest: list[str]) -> list[LayerText]:
    """Read "residual N" or "residual NxM"."""
    if not rest:
        refuse(text, "'residual' needs a number of units: residual 64")
    refuse_rest(text, words, 2)
    return parse_dense(text, "residual", rest[0])


def parse_conv(text: str, words: list[str], rest: list[str]) -> list[LayerText]:
    """Read "conv CHANNELS SIZE [stride S] [pad P] [summed]"."""
    where = quoted(" ".join(words))
    if len(rest) < 2 or not all(NUMBER.fullmatch(word) for word in rest[:2]):
        refuse(
            text,
            f"'{where}' needs a number of channels and the size of the filters: conv 8 3",
        )
    channels = whole_number(text, where, rest[0])
    size = whole_number(text, where, rest[1])
    options = {"stride": 1, "pad": 0}
    summed = False
    left = iter(rest[2:])
    for word in left:
        if word == "summed":
            summed = True
        elif word in ("stride", "pad"):
            number = next(left, "")
            options[word] = whole_number(text, where, number, least=int(word == "stride"))
        else:
            refuse(
                text,
                f"'{quoted(word)}' in '{where}' is not an option of conv: stride S, pad P, summed",
            )
    return [LayerText("conv", channels, size, options["stride"], options["pad"], summed)]


def parse_pool(text: str, words: list[str], rest: list[str]) -> list[LayerText]:
    """Read "pool N", "avgpool N" or "groupnorm G"."""
    kind = words[0]
    noun = "a number of groups" if kind == "groupnorm" else "the side of its regions"
    if not rest or not NUMBER.fullmatch(rest[0]):
        refuse(text, f"'{quoted(' '.join(words))}' needs {noun}: {kind} 2")
    refuse_rest(text, words, 2)
    return [LayerText(kind, whole_number(text, " ".join(words), rest[0]))]


def parse_plain(text: str, words: list[str], rest: list[str]) -> list[LayerText]:
    """Read "flatten" or "layernorm"."""
    refuse_rest(text, words, 1)
    return [LayerText(words[0])]


def parse_dropout(text: str, words: list[str], rest: list[str]) -> list[LayerText]:
    """Read "dropout P", with 0 <= P < 1."""
    try:
        share = float(rest[0]) if rest else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        refuse(
            text,
            f"'{quoted(' '.join(words))}' needs the share to drop, from 0 to below 1: dropout 0.1",
        )
    refuse_rest(text, words, 2)
    return [LayerText("dropout", share=share)]


PARSERS: dict[str, Callable[[str, list[str], list[str]], list[LayerText]]] = {
    "conv": parse_conv,
    "pool": parse_pool,
    "avgpool": parse_pool,
    "flatten": parse_plain,
    "residual": parse_residual,
    "dropout": parse_dropout,
    "layernorm": parse_plain,
    "groupnorm": parse_pool,
}


def whole_number(text: str, where: str, word: str, most: int = MOST_UNITS, least: int = 1) -> int:
    """A word as a whole number in least..most. where: the words that it stands in."""
    number = int(word[:11]) if NUMBER.fullmatch(word) else -1  # 11 digits exceed any limit
    if not least <= number <= most:
        refuse(
            text,
            f"'{quoted(word)}' in '{quoted(where)}' must be a whole number from {least} to "
            f"{most:,}",
        )
    return number


def refuse_rest(text: str, words: list[str], expected: int) -> None:
    """Refuse words after the first `expected` ones."""
    if len(words) > expected:
        layer = " ".join(words[:expected])
        refuse(
            text,
            f"'{quoted(words[expected])}' after '{quoted(layer)}' has no meaning: separate layers "
            "by commas",
        )


def quoted(words: str) -> str:
    """Words of the user for an OptionError, on one line, with their dollar signs kept."""
    return one_line(words).replace("$", "$$")


def refuse(text: str, reason: str) -> NoReturn:
    """Refuse a text for this reason."""
    whole = quoted(text)
    raise OptionError(f"$chain '{whole}': {reason}.")
