"""Networks by plain options, the same as those of settings files and flags.

    networks.make("lstm", inputs=2, outputs=1, hidden=64, layers=2, bidirectional=True)
    networks.make("elman", inputs=6, outputs=4, output="softmax", init="spectral", radius=0.9)
    networks.make("gru", inputs=10, outputs=11, readout="sequence")      an EncoderDecoder
    networks.make("reservoir", inputs=1, outputs=1, hidden=300)          only V and b_o are trained
    networks.make(chain="64x30", inputs=64, outputs=10)                  a Chain, without time

Every keyword has the name of the flag and of the key in a settings file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import AppliesTable, OptionError, choose, idle_options, nearest, refuse_options
from . import chain_factory
from .cell_choice import (
    RESERVOIR,
    cell_names,
    check_structure,
    is_reservoir,
    layer_cells,
    layer_units,
    options_of_cells,
)
from .chain import Chain
from .initialisers import INITIALISERS, initialise
from .network import Network
from .persistence import persist_
from .readout import SUMMARIES
from .seq2seq import EncoderDecoder
from .stack import Stack

READOUTS = ("last", "every", "sequence", *SUMMARIES)


def _initialisers_with(option: str) -> tuple[str, ...]:
    """The names of the initialisers that take this option."""
    return tuple(name for name, row in INITIALISERS.items() if option in row.options)


# Options that only do something with certain values of another option.
APPLIES: AppliesTable = {
    "radius": ("init", _initialisers_with("radius")),
    "inner": ("init", _initialisers_with("inner")),
    "std": ("init", _initialisers_with("std")),
    "attention_steps": ("readout", ("attention",)),
}


def make(
    cell: str | Sequence[str] | None = None,
    *,
    init: str | None = None,
    radius: float | None = None,
    inner: float | None = None,
    std: float | None = None,
    std_in: float | None = None,
    std_rec: float | None = None,
    std_out: float | None = None,
    forget_bias: float | None = None,
    gain: float | None = None,
    persistence: bool | Sequence[int] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> Network | Stack | EncoderDecoder | Chain:
    """A network by plain options, with weights drawn from a seed: the same call, the same bits.

    cell     a name of `cells.CELLS` or `cells.steps.STEPS`, "reservoir", or a list of names, one
             for each layer; "elman" by default
    init     a name of `initialisers.INITIALISERS`; default "torch", or "spectral" with a radius, or
             "sparse" for a reservoir. For a chain "orthogonal" (default), "gaussian" or "torch"
    radius, inner, std   options of the initialiser; APPLIES says of which
    std_in, std_rec, std_out, forget_bias   scales of R, W and V apart, and the bias of forget
             gates: as in `initialise`
    gain     of a chain's orthogonal and Gaussian weights, 1 by default
    persistence  with skip: begin as the forecast that everything stays as it is. A list names the
             input that each output repeats; True: the first ones. See `persist_`
    seed     of the weights, which are drawn on the CPU and then moved to `device`
    options  of `construct`: inputs=, outputs=, hidden=, readout=, layers=, ..., and the cell's own;
             of a chain those of `chain_factory.construct_chain`: chain=, autoencoder=, shape=, ...

    Example:
        >>> from coadjoint import networks
        >>> networks.make("lstm", inputs=2, outputs=1, hidden=8, layers=2).extra_repr()
        "[lstm, lstm], inputs=2, hidden=8, outputs=1, readout='last', ..."
        >>> networks.make(chain="64x30", inputs=64, outputs=10).extra_repr()
        "64x30, activation='tanh', inputs=64, outputs=10, output='identity'"
    """
    if chain_factory.is_chain(options):
        of_start: dict[str, object] = {
            "radius": radius,
            "inner": inner,
            "std": std,
            "init": init,
            "gain": gain,
        }
        of_start |= {"std_in": std_in, "std_rec": std_rec, "std_out": std_out}
        of_start |= {"forget_bias": forget_bias, "persistence": persistence}
        refuse_options(chain_factory.list_idle_options({"cell": cell, **of_start, **options}))
        refuse_without_sizes(options)
        chain = chain_factory.make_chain(init=init, gain=gain, seed=seed, **without_time(options))
        _freeze(chain, as_names(options.get("freeze")), ())
        return chain.to(device)
    if gain is not None:
        raise OptionError("$gain belongs to a $chain; a recurrent network has $radius.")
    refuse_without_sizes(options)
    cell = "elman" if cell is None else cell
    initialiser = initialiser_options(cell, init, radius, inner, std)
    conditional_options = {
        "radius": radius,
        "inner": inner,
        "std": std,
        "attention_steps": options.get("attention_steps"),
    }
    name = initialiser.pop("init")
    readout = options.get("readout", "last")
    refuse_options(list_idle_options(conditional_options, name, readout))
    net = construct(cell, **options)
    initialiser |= {"std_in": std_in, "std_rec": std_rec, "std_out": std_out}
    initialise(net, name, seed=seed, forget_bias=forget_bias, **initialiser)
    if persistence is not None and persistence is not False:
        persist_(net, None if persistence is True else persistence)
    return net.to(device)


def refuse_without_sizes(options: Mapping[str, Any]) -> None:
    """Refuse options without inputs or outputs; a chain may have the shape of a sample instead."""
    is_chain = chain_factory.is_chain(options)
    needed = ["inputs", "outputs"]
    if is_chain and options.get("shape") is not None:
        needed = ["outputs"]
    lacking = [name for name in needed if options.get(name) is None]
    if not lacking:
        return
    numbers = [key for key, value in options.items() if isinstance(value, int)]
    hint = ""
    for name in lacking:
        near = nearest(name, numbers, cutoff=0.8)
        if near is not None:
            hint += f" Did you mean ${name} where you wrote ${near}?"
    kind = "a chain" if is_chain else "a network"
    instead = ", or the $shape of a sample" if is_chain and lacking == ["inputs"] else ""
    listed = " and ".join(f"${name}" for name in lacking)
    raise OptionError(f"{kind} needs {listed}{instead}.{hint}")


def without_time(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `chain_factory.construct_chain` among those of a chain."""
    return {key: v for key, v in options.items() if key not in ("readout", "freeze")}


def as_names(names: str | Sequence[str] | None) -> list[str]:
    """One name, several or none as a list."""
    return [names] if isinstance(names, str) else list(names or ())


def list_idle_options(given: Mapping[str, object], init: str, readout: str) -> list[str]:
    """A line for each option of APPLIES that does nothing with this initialiser and this readout.

    given  values by option; None is the same as not given
    """
    return idle_options(APPLIES, given, {"init": init, "readout": readout})


def initialiser_options(
    cell: str | Sequence[str] = "elman",
    init: str | None = None,
    radius: float | None = None,
    inner: float | None = None,
    std: float | None = None,
) -> dict[str, Any]:
    """The initialiser's name, under "init", and its options, with defaults where not given."""
    defaults: Mapping[str, str | float] = {"init": "torch" if radius is None else "spectral"}
    if is_reservoir(cell):
        defaults = RESERVOIR.initialiser
    name = choose("initialiser", defaults["init"] if init is None else init, INITIALISERS)
    chosen: dict[str, Any] = {"init": name}
    values = {"radius": radius, "inner": inner, "std": std}
    for option, default in INITIALISERS[name].options.items():
        value = values.get(option)
        chosen[option] = defaults.get(option, default) if value is None else value
    return chosen


def construct(
    cell: str | Sequence[str] = "elman",
    *,
    inputs: int,
    outputs: int,
    hidden: int | Sequence[int] = 64,
    readout: str = "last",
    output: str = "identity",
    layers: int | None = None,
    bidirectional: bool | None = None,
    residual: bool | None = None,
    dense: bool | None = None,
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
    **options: object,
) -> Network | Stack | EncoderDecoder:
    """The recurrent network of `make` before it is initialised: with its constructor's weights.

    A Network; a Stack with several layers or both directions; an EncoderDecoder if readout is
    "sequence".

    inputs, outputs, output, structure, x0, bias, deep, skip, dropout, engine, dtype
                     as in `Network`
    readout          "last", "every", "sequence", or a summary of all steps: "mean", "tilted",
                     "tilted-tanh", "attention"
    hidden           one number, or one for each layer, which makes as many layers
    layers           the number of layers; bidirectional, residual, dense: as in `Stack`
    attention_steps  readout "attention": the number of steps with their own bias
    decoder, attend, embedding   sequences: as decoder, attention and embedding in `EncoderDecoder`
    freeze           parameters that are not trained, by name or a part of it: "W", "p.leak"
    options          of the cells: activation=, eps=, ...; an option that no cell has is refused.
                     Options that are None count as not given.
    """
    names = cell_names(cell)
    is_sequence = choose("readout", readout, READOUTS) == "sequence"
    units, layers = layer_units(cell, hidden, layers, is_sequence)
    cells = layer_cells(cell, layers, {"residual": residual, "dense": dense})
    # Options with two meanings: beta is of a tilted readout or of a cell, layers of the network
    # or of a cell that has its layers inside.
    beta = options.pop("beta", None) if readout.startswith("tilted") else None
    named_cells = [*names, decoder] if decoder else names
    cell_settings = options_of_cells(named_cells, {**options, "layers": layers})
    of_sequences = {"decoder": decoder, "attend": attend, "embedding": embedding}
    _check_readout(is_sequence, names, cell_settings, {"skip": skip, **of_sequences})
    check_structure(cells, structure)
    if is_sequence and dropout and len(cells) == 1:
        raise OptionError(
            "$dropout acts between the layers of the encoder when the output is a sequence, but "
            "there is only one: give $layers."
        )
    is_stack = len(cells) > 1 or bool(bidirectional)
    optional: dict[str, object] = {"structure": structure, "deep": deep, "dropout": dropout}
    if is_stack or is_sequence:
        optional |= {"bidirectional": bidirectional, "residual": residual, "dense": dense}
    if is_sequence:
        optional |= {"decoder": decoder, "attention": attend, "embedding": embedding}
    else:
        optional |= {"steps": attention_steps, "skip": skip, "beta": beta}
        optional |= {"readout": readout, "output": output}
    arguments: dict[str, Any] = {
        "inputs": inputs,
        "outputs": outputs,
        "hidden": units,
        "x0": x0,
        "bias": bias,
        "engine": engine,
        "dtype": dtype,
        **cell_settings,
    }
    for option, value in optional.items():
        if value is not None:
            arguments[option] = value
    net: Network | Stack | EncoderDecoder
    if is_sequence:
        net = EncoderDecoder(cells, **arguments)
    elif is_stack:
        net = Stack(cells, **arguments)
    else:
        net = Network(cells[0], **arguments)
    _freeze(net, as_names(freeze), RESERVOIR.frozen if is_reservoir(cell) else ())
    return net


def construct_network(**options: Any) -> Network | Stack | EncoderDecoder | Chain:
    """The network of `make` before it is initialised: with the weights of its constructor.

    options  of `construct`, or of `chain_factory.construct_chain`
    """
    if not chain_factory.is_chain(options):
        return construct(**options)
    refuse_options(chain_factory.list_idle_options(options))
    chain = chain_factory.construct_chain(**without_time(options))
    _freeze(chain, as_names(options.get("freeze")), ())
    return chain


def parameters_by_name(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, W first; the raw matrix of a structured W is called W."""
    by_name: dict[str, nn.Parameter] = {}
    for key, parameter in net.named_parameters():
        # torch's key of such a matrix is parametrizations.W.original, or original0.
        name = key.replace("parametrizations.", "").partition(".original")[0]
        by_name[name] = parameter
    return dict(sorted(by_name.items(), key=lambda item: item[0] != "W"))


def _check_readout(
    is_sequence: bool,
    names: list[str],
    cell_settings: Mapping[str, object],
    given: Mapping[str, object],
) -> None:
    """Refuse options that do nothing with readout "sequence", or do something only with it.

    names          of the cells
    cell_settings  the options of the cells, by name
    given          the values of skip, decoder, attend and embedding; None if not given
    """
    if not is_sequence:
        for option in ("decoder", "attend", "embedding"):
            if given[option] is not None:
                raise OptionError(f"${option} does nothing unless the output is a sequence.")
        return
    if given["skip"] is not None:
        raise OptionError("$skip does nothing when the output is a sequence.")
    if names == ["reservoir"]:
        raise OptionError(
            "a reservoir is not trained, but a decoder must be: choose another $cell when the "
            "output is a sequence."
        )
    if "layers" in cell_settings:
        raise OptionError(f"{names[0]} has two layers in an encoder: leave out $layers.")


def _freeze(net: nn.Module, chosen: Sequence[str], fixed: Sequence[str]) -> None:
    """Exclude parameters from training, by their names or parts of them: W, p.leak, step.

    chosen  by the user; a name that no parameter has is refused
    fixed   by the kind of network; a name that no parameter has is passed over
    """
    for name in (*chosen, *fixed):
        # Entire parts between dots: "W" is found in "layers.0.W", but not in "W_a".
        parameters = [p for key, p in net.named_parameters() if f".{name}." in f".{key}."]
        if not parameters and name in chosen:
            escaped = name.replace("$", "$$")
            known = ", ".join(parameters_by_name(net))
            raise OptionError(
                f"$freeze: this network has no parameter '{escaped}'; it has {known}."
            )
        for parameter in parameters:
            parameter.requires_grad_(False)
