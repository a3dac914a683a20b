"""The cells that come with the package by name: CELLS, their options, and `named`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from ..errors import InputError, KindError, choose, real
from .activations import Activation
from .cell import Cell
from .classic import elman, gru, leaky, lstm, lstm_1997, peephole, rate, scrn
from .conservative import antisymmetric, cornn, exponential, inverse, lipschitz, unicornn
from .linear import lru, mingru, minlstm

CELLS: dict[str, Cell | Callable[..., Cell]] = {  # a cell, or a function of its options
    "elman": elman,
    "leaky": leaky,
    "rate": rate,
    "lstm": lstm,
    "lstm-1997": lstm_1997,
    "peephole": peephole,
    "gru": gru,
    "scrn": scrn,
    "scrn-learned": functools.partial(scrn, learned=True),
    "antisymmetric": antisymmetric,
    "antisymmetric-gated": functools.partial(antisymmetric, gated=True),
    "exponential": exponential,
    "lipschitz": lipschitz,
    "cornn": cornn,
    "unicornn": unicornn,
    "inverse": inverse,
    "mingru": mingru,
    "minlstm": minlstm,
    "lru": lru,
}


def options(name: str) -> dict[str, object]:
    """The options of a cell and their defaults.

    Example:
        >>> from coadjoint import cells
        >>> cells.options("unicornn")
        {'eps': 0.03, 'alpha': 0.9, 'activation': 'tanh'}
    """
    make = CELLS[choose("cell", name, CELLS)]
    if isinstance(make, Cell):
        return {}
    # "scrn-learned" is scrn with an option that is set already
    set_already = make.keywords if isinstance(make, functools.partial) else {}
    arguments = inspect.signature(make).parameters
    return {key: arguments[key].default for key in arguments if key not in set_already}


# Cells whose equations name their activations.
FIXED_ACTIVATION = tuple(name for name in CELLS if "activation" not in options(name))

# Options of networks with several layers, which a cell does not have.
OF_STACKS = {"layers", "num_layers", "bidirectional", "residual", "dense"}


def named(name: str, activation: Activation | None = None, **given: object) -> Cell:
    """The cell of that name.

    activation  for cells whose equations leave it open; None takes the cell's default
    given       other options of the cell, as `options(name)` lists them

    Example:
        >>> from coadjoint import cells
        >>> cells.named("leaky", "relu")
        <cell leaky: slots h>
    """
    known = options(name)
    if name in FIXED_ACTIVATION and activation is not None:
        raise InputError(
            f"the equations of cell '{name}' fix its activations; leave out "
            f"activation={activation!r}."
        )
    unknown = [option for option in given if option not in known]
    if unknown:
        has = ", ".join(option for option in known if option != "activation") or "none"
        hint = ""
        if OF_STACKS & set(unknown):
            hint = f" For several layers: co.Stack(['{name}', '{name}'], ...)."
        raise KindError(
            f"cell '{name}' has no option {', '.join(unknown)}; its options: {has}.{hint}"
        )
    for option, value in given.items():
        if isinstance(known[option], float):
            real(f"option {option} of cell '{name}'", value)
    if activation is not None:
        given["activation"] = activation
    make = CELLS[name]
    if isinstance(make, Cell):
        return make
    try:
        return make(**given)
    except TypeError as error:
        # Cells are kept in a dictionary by their options, so a list, say, cannot be one.
        if "unhashable" in str(error):
            raise KindError(
                f"activation must be a name or a function; got {type(activation).__name__}."
            ) from error
        raise
