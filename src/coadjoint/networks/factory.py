"""Networks by plain options: what a settings file or a flag can say, Python says in one call.

    networks.make("lstm", inputs=2, outputs=1, hidden=64, layers=2, bidirectional=True)
    networks.make("elman", inputs=6, outputs=4, output="softmax", init="spectral", radius=0.9)
    networks.make("gru", inputs=10, outputs=11, readout="sequence")      an EncoderDecoder
    networks.make("reservoir", inputs=1, outputs=1, hidden=300)          only V and b_o are trained

Every keyword has the name of the key in a settings file and of the flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cells import library, steps
from ..errors import AppliesTable, OptionError, choose, idle_options, refuse_options
from .initialisers import INITIALISERS, initialise
from .network import Network
from .readout import SUMMARIES
from .seq2seq import EncoderDecoder
from .stack import Stack


@dataclass(frozen=True)
class Preset:
    """A cell's name that stands for another one whose parameters stay where they begin."""

    cell: str
    start: Mapping[str, Any]
    frozen: tuple[str, ...]
    text: str
    paper: str


RESERVOIR = Preset(
    cell="leaky",
    start={"init": "sparse", "radius": 0.9},
    frozen=("W", "R", "b", "p.leak"),
    text=(
        "W, R, b and leak are fixed: W sparse, of spectral radius 0.9 if nothing else is asked for. Only the readout is\n"
        "trained: by the gradient, or in closed form with optimiser ridge."
    ),
    paper="Jaeger, GMD report 148 (2001)",
)
READOUTS = ("last", "every", "sequence", *SUMMARIES)
CELL_NAMES = (*library.CELLS, *steps.STEPS, "reservoir")
APART = ("learned", "gated")  # options with a cell of their own: scrn-learned, antisymmetric-gated


def _starts_with(option: str) -> tuple[str, ...]:
    return tuple(name for name, row in INITIALISERS.items() if option in row.options)


# Options that do something with some values of another option alone.
APPLIES: AppliesTable = {
    "radius": ("init", _starts_with("radius")),
    "inner": ("init", _starts_with("inner")),
    "std": ("init", _starts_with("std")),
    "attention_steps": ("readout", ("attention",)),
}


def make(
    cell: str | Sequence[str] = "elman",
    *,
    init: str | None = None,
    radius: float | None = None,
    inner: float | None = None,
    std: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> Network | Stack | EncoderDecoder:
    """A network by plain options. Its weights are drawn from the seed: the same call gives the same bits.

    cell     a name of `cells.CELLS` or `cells.steps.STEPS`, "reservoir", or a list of names, one
             for each layer
    init     a name of `initialisers.INITIALISERS`; if not given, "torch", or "spectral" with a
             radius, or "sparse" for a reservoir
    radius, inner, std   options of the start; APPLIES says of which
    seed     of the start; the weights are drawn on the CPU and then moved to `device`
    options  of `construct`: inputs=, outputs=, hidden=, readout=, layers=, ..., and the cell's own

    >>> networks.make("lstm", inputs=2, outputs=1, hidden=8, layers=2).extra_repr()
    "[lstm, lstm], inputs=2, outputs=1, readout='last'"
    """
    begin = initialiser_options(cell, init, radius, inner, std)
    given = {
        "radius": radius,
        "inner": inner,
        "std": std,
        "attention_steps": options.get("attention_steps"),
    }
    refuse_options(list_idle_options(given, begin["init"], options.get("readout", "last")))
    net = construct(cell, **options)
    initialise(net, begin.pop("init"), seed=seed, **begin)
    return net.to(device)


def list_idle_options(given: Mapping[str, Any], init: str, readout: str) -> list[str]:
    """A line for each option that does nothing with this start and this readout."""
    return idle_options(APPLIES, given, {"init": init, "readout": readout})


def initialiser_options(
    cell: str | Sequence[str] = "elman",
    init: str | None = None,
    radius: float | None = None,
    inner: float | None = None,
    std: float | None = None,
) -> dict[str, Any]:
    """Where the weights begin: init and its options, with the defaults of what applies."""
    own: Mapping[str, Any] = {"init": "torch" if radius is None else "spectral"}
    if is_reservoir(cell):
        own = RESERVOIR.start
    name = choose("initialiser", own["init"] if init is None else init, INITIALISERS)
    found: dict[str, Any] = {"init": name}
    given = {"radius": radius, "inner": inner, "std": std}
    for option, default in INITIALISERS[name].options.items():
        value = given.get(option)
        found[option] = own.get(option, default) if value is None else value
    return found


def construct(
    cell: str | Sequence[str] = "elman",
    *,
    inputs: int,
    outputs: int,
    hidden: int = 64,
    readout: str = "last",
    output: str = "identity",
    layers: int | None = None,
    bidirectional: bool | None = None,
    residual: bool | None = None,
    dropout: float | None = None,
    structure: str | None = None,
    x0: str = "zero",
    bias: bool = True,
    attention_steps: int | None = None,
    deep: int | Sequence[int] | None = None,
    skip: bool | None = None,
    decoder: str | None = None,
    attend: bool | None = None,
    embedding: int | None = None,
    freeze: str | Sequence[str] | None = None,
    engine: str = "auto",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Network | Stack | EncoderDecoder:
    """The network that `make` begins: its weights are those of its constructor.

    A Network; a Stack with several layers or both directions; an EncoderDecoder where readout is
    "sequence".

    inputs, outputs, hidden, output, structure, x0, bias, deep, skip, dropout, engine, dtype
                     as in `Network`
    readout          "last", "every", "sequence", or a summary of all steps: "tilted",
                     "tilted-tanh", "attention"
    layers           of the cell; bidirectional, residual: as in `Stack`
    attention_steps  readout "attention": how many steps have a bias of their own
    decoder, attend, embedding   sequences: as decoder, attention and embedding in `EncoderDecoder`
    freeze           parameters that are not trained, by name or a part of it: "W", "p.leak"
    options          of the cells: activation=, eps=, ...; what no cell has is refused. Those that
                     are None count as not given
    """
    names = cell_names(cell)
    kinds = _layer_cells(cell, layers, residual)
    sequence = choose("readout", readout, READOUTS) == "sequence"
    beta = options.pop("beta", None) if readout.startswith("tilted") else None
    own = _own_options([*names, *([decoder] if decoder else [])], options | {"layers": layers})
    _check_answer(
        sequence,
        names,
        own,
        {"skip": skip, "decoder": decoder, "attend": attend, "embedding": embedding},
    )
    for kind in kinds:
        if (
            structure is not None
            and kind in library.CELLS
            and library.named(kind).structure is not None
        ):
            raise OptionError(
                f"$structure does nothing with cell '{kind}': its equations say what W is."
            )
    if sequence and dropout and len(kinds) == 1:
        raise OptionError(
            "$dropout acts between the layers of the encoder where the answer is a sequence, and there is one: give $layers."
        )
    several = len(kinds) > 1 or bool(bidirectional) or sequence
    more: dict[str, Any] = {"structure": structure, "deep": deep, "dropout": dropout}
    if several:
        more |= {"bidirectional": bidirectional, "residual": residual}
    if sequence:
        more |= {"decoder": decoder, "attention": attend, "embedding": embedding}
    else:
        more |= {
            "steps": attention_steps,
            "skip": skip,
            "beta": beta,
            "readout": readout,
            "output": output,
        }
    given: dict[str, Any] = {
        "inputs": inputs,
        "outputs": outputs,
        "hidden": hidden,
        "x0": x0,
        "bias": bias,
        "engine": engine,
        "dtype": dtype,
        **own,
        **{key: value for key, value in more.items() if value is not None},
    }
    net: Network | Stack | EncoderDecoder
    if sequence:
        net = EncoderDecoder(kinds, **given)
    elif several:
        net = Stack(kinds, **given)
    else:
        net = Network(kinds[0], **given)
    _freeze(net, [freeze] if isinstance(freeze, str) else list(freeze or ()), is_reservoir(cell))
    return net


def cell_names(cell: str | Sequence[str]) -> list[str]:
    return [cell] if isinstance(cell, str) else list(cell)


def is_reservoir(cell: str | Sequence[str]) -> bool:
    return cell_names(cell) == ["reservoir"]


def cell_options(cell: str) -> dict[str, Any]:
    """The options of a cell and what they are if they are not given."""
    choose("cell", cell, CELL_NAMES)
    if cell in steps.STEPS:
        return steps.options(cell)
    found = library.options(RESERVOIR.cell if cell == "reservoir" else cell)
    return {key: value for key, value in found.items() if key not in APART}


def parameters_by_name(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by the names they are known by, W first: of a structured W, its raw matrix."""
    plain = lambda key: key.replace("parametrizations.", "").partition(".original")[0]
    found = {plain(key): p for key, p in net.named_parameters()}
    return dict(sorted(found.items(), key=lambda item: item[0] != "W"))


def _layer_cells(cell: str | Sequence[str], layers: int | None, residual: bool | None) -> list[str]:
    """The cell of each layer, as the library calls it."""
    names = cell_names(cell)
    for name in names:
        choose("cell", name, CELL_NAMES)
    if not names:
        raise OptionError("$cell names no cell: `coadjoint cells` lists them.")
    if not isinstance(cell, str) and layers is not None:
        raise OptionError(
            f"$cell {','.join(names)} has a layer for each name: leave out $layers, or name one cell."
        )
    if "reservoir" in names and len(names) > 1:
        raise OptionError("a reservoir is not mixed with other cells; $layers 2 makes two of it.")
    kinds = [RESERVOIR.cell if name == "reservoir" else name for name in names]
    if "layers" not in cell_options(names[0]):  # gated-feedback has its layers inside
        kinds *= layers or 1
    if residual and len(kinds) == 1:
        raise OptionError(
            "$residual acts between layers, and there is one: give $layers or a list of cells."
        )
    return kinds


def _own_options(names: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the cells among those given; what no cell has is refused."""
    known = {key for name in names for key in cell_options(name)}
    elsewhere = set() if "layers" in known else {"layers"}  # the stack's
    found = {
        key: value for key, value in given.items() if value is not None and key not in elsewhere
    }
    for key in found:
        if key not in known:
            has = ", ".join(sorted(known)) or "none"
            whose = (
                f"cell '{names[0]}'; its" if len(names) == 1 else f"cells {', '.join(names)}; their"
            )
            raise OptionError(f"${key} does nothing with {whose} options: {has}.")
    return found


def _check_answer(
    sequence: bool, names: list[str], own: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Refuse what does not go with an answer that is a sequence, or that is none."""
    for key in ("skip",) if sequence else ("decoder", "attend", "embedding"):
        if given[key] is not None:
            answer = "a sequence" if sequence else "no sequence"
            raise OptionError(f"${key} does nothing where the answer is {answer}.")
    if sequence and names == ["reservoir"]:
        raise OptionError(
            "a reservoir is fixed, and a decoder has to learn: choose another $cell where the answer is a sequence."
        )
    if sequence and "layers" in own:
        raise OptionError("gated-feedback has its own two layers in an encoder: leave out $layers.")


def _freeze(net: nn.Module, chosen: list[str], reservoir: bool) -> None:
    """Take parameters out of training, by their names or parts of them: W, p.leak, step."""
    for name in (*chosen, *(RESERVOIR.frozen if reservoir else ())):
        found = [p for key, p in net.named_parameters() if f".{name}." in f".{key}."]
        if not found and name in chosen:
            asked = name.replace("$", "$$")
            raise OptionError(
                f"$freeze: this network has no parameter '{asked}'; it has {', '.join(parameters_by_name(net))}."
            )
        for p in found:
            p.requires_grad_(False)
