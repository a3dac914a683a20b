"""Names of parameters in words: "layer 1 backward, b_n" for "layers.levels.0.1.p.b_n"."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Of a stack, or of the encoder of an EncoderDecoder: layer, direction, and the parameter.
OF_LAYER = re.compile(r"(?:layers|(?P<encoder>encoder))\.levels\.(\d+)\.(\d+)\.(.+)")
PROJECTION = re.compile(r"(?:layers|(?P<encoder>encoder))\.P\.(\d+)\.(\d+)\.(?:weight|bias)")
DIRECTIONS = ("forward", "backward")


def words_for(names: Iterable[str]) -> dict[str, str]:
    """The words for the parameters of one network, by their names.

    Directions are told apart where there are two. Names that need no words stay as they are.
    """
    names = list(names)
    matches = [OF_LAYER.fullmatch(name) for name in names]
    has_two = any(match and match[3] == "1" for match in matches)
    words = {}
    for name, match in zip(names, matches, strict=True):
        projection = PROJECTION.fullmatch(name)
        if match is not None:
            words[name] = f"{place_of(match, has_two)}, {without_section(match[4])}"
        elif projection is not None:
            words[name] = f"{place_of(projection, has_two)}, projection"
        elif name.startswith("decoder."):
            words[name] = f"decoder, {without_section(name.removeprefix('decoder.'))}"
        else:
            words[name] = without_section(name)
    return words


def place_of(match: re.Match[str], has_two: bool) -> str:
    """The layer of a parameter, from 1, and its direction if there are two."""
    layer, direction = int(match[2]), int(match[3])
    text = f"layer {layer + 1}"
    if match["encoder"]:
        text = f"encoder {text}"
    if has_two and direction < len(DIRECTIONS):
        text += f" {DIRECTIONS[direction]}"
    return text


def without_section(name: str) -> str:
    """The name of a parameter of a cell, which are together in "p"."""
    return name.removeprefix("p.")
