"""Penalty: a function of costates with a name, and PENALTIES, the penalties by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cells.transport import Portable, remembers_origin
from ..errors import InputError, KindError, Unsupported, brief, choose, real
from ..sweeps.costates import BaseCostates
from .layered import PARTS as PARTS
from .layered import LayeredCostates, PlacedRun
from .root_mean_squares import LayeredRootMeanSquares, RootMeanSquares
from .state_parts import part_of_each, slot_names


@dataclass(frozen=True)
class Penalty(Portable):
    """A function of Costates with a name, which can be added and multiplied by numbers.

    name   how it is called in messages and tables
    value  the function, Costates -> [B]
    joint  whether it takes the costates of several layers together; otherwise its value is the mean
           over layers
    draws  whether it draws random directions, which are others at each training step
    reads_run_only  whether it reads costates and their run by the names that these have (norms,
           states, pull, push), but neither weights nor torch's graph beside them; a gradient that
           does without that graph is faster
    mixes_samples  whether the value of a sample depends on the other samples of its batch
    with_slope  its value together with its slope by the norms of mantissas (lam.size), Costates ->
           ([B], [L + 1, B]), if it depends on nothing else; for costates of which none is zero
    part   the slots of the state whose costates it takes, in alphabetical order; () for all
    reads_mantissas_only  whether it reads mantissas, exponents and the loss of its costates, and
           neither their run nor anything that may change from call to call; it may be captured
    reads_costates  whether its derivative goes through the costates of the loss that it is given;
           only then does Penalised(hold="source") make a difference

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> G = co.Penalty("first", lambda lam: lam.norms()[1])
        >>> 2 * G
        <penalty 2 first>
        >>> net = co.Network("elman", inputs=1, hidden=2, outputs=1)
        >>> G(net(torch.zeros(3, 4, 1)).costates("squared", torch.ones(4))).shape
        torch.Size([4])
    """

    _class_docstring = __doc__  # the field __doc__ would hide it
    name: str
    value: Callable[[BaseCostates], Tensor]
    __doc__: str | None = None
    joint: bool = False
    draws: bool = False
    reads_run_only: bool = False
    mixes_samples: bool = False
    with_slope: Callable[[BaseCostates], tuple[Tensor, Tensor]] | None = None
    part: tuple[str, ...] = ()
    reads_costates: bool = True
    reads_mantissas_only: bool = False

    def __call__(self, lam: BaseCostates | Sequence[BaseCostates] | LayeredCostates) -> Tensor:
        """The penalty of each sample, [B].

        For the costates of several layers (co.Stack, co.record) it is the mean over layers, unless
        the penalty is `joint` and takes them together.
        """
        if isinstance(lam, BaseCostates):
            return lam.measure(self.value) if self.reads_mantissas_only else self.value(lam)
        layers = layers_of(lam)
        if layers is None:
            raise KindError(
                f"a penalty takes Costates, or those of several layers; got {brief(lam)}."
            )
        if not layers:
            raise InputError("there are no costates to penalise.")
        if self.joint:
            return self.value(lam)  # type: ignore[arg-type]
        return functools.reduce(torch.add, map(self.value, layers)) / len(layers)

    def _like_this(self, name: str, value: Callable[..., Tensor]) -> Penalty:
        """A joint penalty that draws and reads what this one does."""
        return Penalty(
            name,
            value,
            joint=True,
            draws=self.draws,
            reads_run_only=self.reads_run_only,
            mixes_samples=self.mixes_samples,
            part=self.part,
            reads_costates=self.reads_costates,
            reads_mantissas_only=self.reads_mantissas_only,
        )

    @property
    def _function(self) -> Callable[..., object]:
        """The function that the penalty was made of; a pickle looks the penalty up where it is."""
        return self.value

    @remembers_origin
    def on(
        self,
        what: str | None = None,
        *,
        part: str | Sequence[str] | None = None,
        **where: object,
    ) -> Penalty:
        """The same penalty on some of the costates.

        on(layer=0), on(direction="forward"), ...  the layers with these properties
        on("top")     the last layer; of an encoder-decoder, the decoder
        on("whole")   the states of all layers as one
        on(part="h")  of an lstm: dL/dh alone, without dL/dc; any slots of the cell, by name

        For a network of one layer, each choice of layers is that layer. Of a part, J_t' lam_t is
        that part of it, and a direction r_t has entries in the part alone.
        """
        names = self._check_part(part)
        if what is not None:
            choose("layers", what, ("top", "whole"))
        for name in where:
            choose("part of a stack", name, PARTS)
        words = [what] if what else []
        words += [f"{name}={value!r}" for name, value in where.items()]
        words += names

        def value(lam: BaseCostates | LayeredCostates) -> Tensor:
            """The penalty on the chosen layers; of a network of one layer, on that layer."""
            chosen: BaseCostates | LayeredCostates = lam
            if not isinstance(chosen, BaseCostates):
                chosen = chosen.select(**where) if where else chosen
                chosen = top_layer(chosen) if what == "top" else chosen
                chosen = chosen.joined() if what == "whole" else chosen
            return self(part_of_each(chosen, names) if names else chosen)

        chosen_by_name = self._like_this(f"{self.name} on {', '.join(words)}", value)
        return replace(chosen_by_name, part=names) if names else chosen_by_name

    def _check_part(self, part: str | Sequence[str] | None) -> tuple[str, ...]:
        """The names of the slots in alphabetical order, () for None; refused if it has no parts."""
        if part is None:
            return ()
        if self.name in WITHOUT_NORMS:
            raise Unsupported(
                f"penalty '{self.name}' cannot be taken of a part of the state: it "
                f"{WITHOUT_NORMS[self.name]}."
            )
        if self.part:
            raise InputError(f"penalty '{self.name}' is on a part of the state already.")
        return slot_names(part)

    @remembers_origin
    def per(self, unit: str = "sqrt n") -> Penalty:
        """The same penalty of lam_i / sqrt(n_i), n_i the number of entries of state i.

        Norms become root mean squares, so that layers of different widths can be compared: without
        it, a costate that is handed to a wider layer reads as one that grows. Over time all n_i are
        the same, and only constants change.
        """
        choose("unit", unit, ("sqrt n",))
        if self.name in WITHOUT_NORMS:
            raise Unsupported(
                f"penalty '{self.name}' cannot be taken per {unit}: it {WITHOUT_NORMS[self.name]}."
            )

        def value(lam: BaseCostates | LayeredCostates) -> Tensor:
            """The penalty on lam_i / sqrt(n_i)."""
            if isinstance(lam, BaseCostates):
                return self(RootMeanSquares(lam))
            if isinstance(lam, list | tuple):
                return self([RootMeanSquares(layer) for layer in lam])
            return self(LayeredRootMeanSquares(lam))

        return self._like_this(f"{self.name} per {unit}", value)

    @remembers_origin
    def __add__(self, other: PenaltyLike) -> Penalty:
        """The sum; it is joint, so that each term chooses its own layers."""
        right = penalty(other)
        name = f"{self.name} + {right.name}"
        return Penalty(
            name,
            lambda lam: self(lam) + right(lam),
            joint=True,
            draws=self.draws or right.draws,
            reads_run_only=self.reads_run_only and right.reads_run_only,
            mixes_samples=self.mixes_samples or right.mixes_samples,
            part=self.part if self.part == right.part else (),
            reads_costates=self.reads_costates or right.reads_costates,
            reads_mantissas_only=self.reads_mantissas_only and right.reads_mantissas_only,
        )

    __radd__ = __add__

    @remembers_origin
    def __mul__(self, weight: float) -> Penalty:
        """The multiple of the penalty; it is joint, so that the penalty chooses its own layers.

        The factor may be negative, for a difference of penalties, or a scalar tensor.
        """
        if not isinstance(weight, Tensor) or weight.dim():
            real("a penalty's factor", weight)
        name = f"{weight:g} {self.name}"
        product = self._like_this(name, lambda lam: weight * self(lam))
        if not isinstance(weight, Tensor):
            return product
        return replace(product, reads_run_only=False, reads_mantissas_only=False)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<penalty {self.name}>"


# Penalties that do not depend on norms of states or costates, and why.
WITHOUT_NORMS = {
    "omega-published": "is that of published code, for one W shared by all steps; use 'omega'",
    "tangent": "has no norms of states",
}
Penalty.__doc__ = Penalty._class_docstring
PenaltyLike = str | Penalty | Callable[[BaseCostates], Tensor]
PENALTIES: dict[str, Penalty] = {}


def register(
    name: str, reads_mantissas_only: bool = True
) -> Callable[[Callable[[BaseCostates], Tensor]], Penalty]:
    """A decorator that makes a penalty of a function and enters it into PENALTIES as `name`."""

    def enter(value: Callable[[BaseCostates], Tensor]) -> Penalty:
        PENALTIES[name] = Penalty(
            name,
            value,
            value.__doc__,
            reads_run_only=True,
            reads_mantissas_only=reads_mantissas_only,
        )
        return PENALTIES[name]

    return enter


def penalty(G: PenaltyLike) -> Penalty:
    """A penalty from a name, a Penalty or any callable of Costates.

    Example:
        >>> import coadjoint as co
        >>> co.penalties.penalty("log-ratio")
        <penalty log-ratio>
    """
    if isinstance(G, Penalty):
        return G
    if isinstance(G, str):
        return PENALTIES[choose("penalty", G, PENALTIES)]
    if callable(G):
        return Penalty(getattr(G, "__name__", "penalty"), G)
    raise KindError(
        f"a penalty is a name, a Penalty or a function of Costates; got {type(G).__name__}."
    )


def layers_of(lam: object) -> Sequence[BaseCostates] | None:
    """The costates of each layer: of a list, or of Costates of one or several; else None."""
    layers = lam if isinstance(lam, list | tuple) else getattr(lam, "layers", None)
    if layers is None or not all(isinstance(layer, BaseCostates) for layer in layers):
        return None
    return layers


def refuse_costates(maker: str, argument: object) -> None:
    """Refuse costates given to a function that makes a penalty, as if it were one itself."""
    if layers_of(argument):
        raise KindError(
            f"co.penalties.{maker} makes a penalty: call co.penalties.{maker}()(lam); got "
            f"{brief(argument)}."
        )


def top_layer(lam: LayeredCostates) -> LayeredCostates:
    """The costates of the last layer of the last module, in both directions if it has two.

    A module that was called more than once has costates for each call: those of the last are taken.
    """
    last = placed_run(lam.layers[-1])
    of_last_call = lam.select(module=last.module, call=last.call)
    top = max(placed_run(layer).layer for layer in of_last_call.layers)
    return of_last_call.select(layer=top)


def placed_run(lam: BaseCostates) -> PlacedRun:
    """The run of the layer that these costates belong to, which knows its module and number."""
    run: object = lam.trajectory
    assert isinstance(run, PlacedRun)
    return run
