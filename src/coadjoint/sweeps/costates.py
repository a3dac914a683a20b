"""Costates: lam_i = dL/dx_i of each sample's own loss, as mantissas and powers of two.

BaseCostates   of any network whose states follow one another: by time steps, or by layers of
               different widths
Costates       of a recurrence: states of one width, lying in rows
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, Unsupported, brief
from .layout import HasLayout, Layout
from .norms import is_within_range, keep_where_zero, norm
from .rows import scale
from .run import SweepRun

__all__ = [
    "TIME",
    "Axis",
    "BaseCostates",
    "Costates",
    "RecurrenceRun",
    "keep_where_zero",
    "norm",
    "stack_padded",
]


Measure = Callable[["BaseCostates"], Tensor]
Replay = Callable[["Costates", Measure], Tensor]


class Axis(NamedTuple):
    """The words for the axis along which the states of a run follow one another.

    Charts and messages use them: a network over time says "time step", a deep one "layer".
    """

    symbol: str = "t"  # the number of one state
    label: str = "time t"  # of a chart's axis
    step: str = "step"  # from one state to the next
    place: str = "moment"  # where one state is
    number: str = "time step"  # what `symbol` counts
    through: str = "through time"
    backwards: str = "towards the past"


TIME = Axis()


@dataclass(frozen=True, eq=False)
class RecurrenceRun(HasLayout):
    """One run of a recurrence over a batch.

    x [T+1, B, n], state [B, n] (each sample's last), lengths [B], mask [T+1, B]. Padding is zero.
    n is the number of units times the slots of the cell, whose names are `slot_names`; () where
    they have none.
    """

    layout: Layout
    run: SweepRun
    hidden: int
    slot_names: tuple[str, ...] = field(default=(), kw_only=True)

    @functools.cached_property
    def x(self) -> Tensor:
        """The states x_0, ..., x_T: [T + 1, B, n]."""
        return self.layout.padded_states(self.run.x)

    @property
    def states(self) -> Tensor:
        """x_0, ..., x_T: [T + 1, B, n]."""
        return self.x

    @functools.cached_property
    def state(self) -> Tensor:
        """Each sample's last state, [B, n]."""
        return self.layout.unsort(self.run.last)

    @property
    def visible_states(self) -> Tensor:
        """The first slot of x, the part that others read, [T + 1, B, hidden]."""
        return self.x[..., : self.hidden]

    def slot_columns(self, names: Sequence[str]) -> list[slice]:
        """The entries of the slots with these names, in the order of the state."""
        return slot_columns(self.slot_names, names, self.hidden)


def slot_columns(slots: Sequence[str], names: Sequence[str], d: int) -> list[slice]:
    """The entries of the named slots in a state of `slots`, d entries each; others are refused."""
    for name in names:
        if name not in slots:
            known = ", ".join(slots) or "none with a name"
            raise InputError(f"this state has no part '{name}'; its parts: {known}.")
    return [slice(i * d, (i + 1) * d) for i, slot in enumerate(slots) if slot in names]


class StatesRun(Protocol):
    """A run with states that follow one another."""

    @property
    def states(self) -> Tensor | Sequence[Tensor]:
        """The states [B, ...], one after the other; widths may differ."""


def check_power(p: object) -> None:
    """Refuse norms other than 1 and 2."""
    if p not in (1, 2) or isinstance(p, bool):
        raise InputError(f"norms must have p = 1 or p = 2; got p = {brief(p)}.")


class BaseCostates(ABC):
    """lam_i = mantissa_i 2^{exponent_i}, i = 0..L, of each sample's own loss.

    Costates shrink or grow exponentially with L - i, so they are kept as a mantissa of order one
    and a power of two: log-norms and ratios are exact where lam itself would be 0 or inf. Exponents
    are constants under differentiation.

    A kind of network supplies loss, trajectory, exponent, mantissa_at(i) and detach(), and
    `pull_mantissas` if its maps have a transpose. Everything else follows.
    """

    loss: Tensor  # [B]
    trajectory: StatesRun  # the run they belong to
    axis: Axis = TIME
    first: int = 1  # where penalties begin: lam_0 is that of the input or the initial state
    sweep: SweepRun | None = None  # the recurrence's run, if the network is one

    @property
    @abstractmethod
    def exponent(self) -> Tensor:
        """The powers of two, [L + 1, B], integers."""

    @abstractmethod
    def mantissa_at(self, i: int) -> Tensor:
        """The mantissa of lam_i, [B, ...]."""

    @abstractmethod
    def detach(self) -> BaseCostates:
        """The same costates without their graph."""

    def pull_mantissas(self) -> Tensor:
        """J_i' mantissa_i, i = 1..L, J_i = dx_i/dx_{i-1}: [L, B, n], zero-padded to one width."""
        raise Unsupported(
            "this penalty needs the Jacobians of single steps, which this network does not provide."
        )

    def pull_directions(self, w: Tensor) -> Tensor:
        """J_i' w_i, i = 1..L, of any directions w [L, B, n] of the states: [L, B, n].

        Both are zero-padded to one width; entries of w beyond a state's own are not read.
        """
        raise Unsupported(
            "this penalty needs the Jacobians of single steps, which this network does not provide."
        )

    @property
    def entry_counts(self) -> Sequence[int]:
        """The number of entries of each state x_0, ..., x_L."""
        return [mantissa.shape[1] for mantissa in self._mantissas()]

    def at(self, i: int) -> Tensor:
        """lam_i at true scale, [B, ...]: 0 or inf where it leaves the range of its type."""
        mantissa = self.mantissa_at(i)
        entry_axes = mantissa.dim() - 1  # a sample's entries have one exponent in common
        return scale(mantissa, self.exponent[i].reshape(-1, *(1,) * entry_axes))

    def of(self, other: BaseCostates) -> BaseCostates:
        """Other costates of the same run in the coordinates of these: here, as they are."""
        return other

    @property
    def layers(self) -> Sequence[BaseCostates]:
        """The costates of each layer; of a network with one layer, these."""
        return (self,)

    def measure(self, G: Measure) -> Tensor:
        """G of these costates, [B], for a G that reads mantissas, exponents and loss alone."""
        return G(self)

    def forwards(self) -> BaseCostates:
        """The costates of the layers that read forwards, joined: here, all of them."""
        return self

    @property
    def uniform(self) -> bool:
        """Do all samples have the same number of costates?"""
        return True

    @property
    def mask(self) -> Tensor:
        """[L + 1, B]: does the costate exist?"""
        return torch.ones(self.exponent.shape, dtype=torch.bool, device=self.loss.device)

    @property
    def last(self) -> Tensor:
        """[B]: the number of each sample's last costate."""
        L = len(self.exponent) - 1
        B = self.exponent.shape[1]
        return torch.full((B,), L, device=self.loss.device)

    def last_mantissa(self) -> Tensor:
        """[B, n]: the mantissa of each sample's last costate."""
        return self.mantissa_at(len(self.exponent) - 1).flatten(1)

    @property
    def visible_states(self) -> Tensor:
        """The part of the states that others read, [L + 1, B, n], zero-padded to one width."""
        return stack_padded([x.flatten(1) for x in self.trajectory.states])

    def _mantissas(self) -> list[Tensor]:
        """mantissa_i, i = 0..L, each [B, n_i]."""
        return [self.mantissa_at(i).flatten(1) for i in range(len(self.exponent))]

    @functools.cached_property
    def size(self) -> Tensor:
        """The norms of the mantissas, [L + 1, B]."""
        return torch.stack([norm(mantissa) for mantissa in self._mantissas()])

    @functools.cached_property
    def complete(self) -> bool:
        """Do all costates exist, and is none zero? False on a GPU, so as not to wait for it."""
        return self.uniform and not self.size.is_cuda and is_within_range(self.size.detach(), 0)

    @functools.cached_property
    def nonzero(self) -> Tensor:
        """[L + 1, B]: does the costate exist and differ from zero?"""
        return self.mask & (self.size.detach() > 0)

    def zeros(self) -> Tensor:
        """[B]: how many costates of a sample are exactly zero; logarithmic penalties skip them."""
        return (self.mask & ~self.nonzero).sum(0)

    @functools.cached_property
    def size_1(self) -> Tensor:
        """The 1-norms of the mantissas, [L + 1, B]."""
        return torch.stack([mantissa.abs().sum(1) for mantissa in self._mantissas()])

    def norms(self, p: int = 2) -> Tensor:
        """||lam_i||_p at true scale, p = 1 or 2, [L + 1, B]; 0 where there is no costate."""
        check_power(p)
        return scale(self.size if p == 2 else self.size_1, self.exponent)

    def squared_norms(self) -> Tensor:
        """||lam_i||^2 at true scale, [L + 1, B]; 0 where there is no costate.

        Unlike norms(), they are smooth at a zero costate.
        """
        value = self.norms().square()
        return value if self.complete else value + self.squares_at_zero()

    def squares_at_zero(self) -> Tensor:
        """[L + 1, B]: the squared norms of those costates that are zero, and 0 for the others.

        All are 0; what counts is their second derivatives, which size^2 lacks where size is 0.
        """
        squares = []
        for i, mantissa in enumerate(self._mantissas()):
            zeros = scale(keep_where_zero(mantissa, self.size[i]), self.exponent[i][:, None])
            squares.append(zeros.square().sum(-1))
        return torch.stack(squares)

    def log_norms(self) -> Tensor:
        """The log-norms log ||lam_i||, [L + 1, B] float64.

        -inf for a costate of zero, NaN where no costate exists.
        """
        value = self._log_size() + self.exponent.double() * math.log(2)
        value = torch.where(self.nonzero, value, -math.inf)
        return torch.where(self.mask, value, math.nan)

    def log_ratios(self) -> Tensor:
        """The log-ratios log ||lam_i|| - log ||lam_{i+1}||, [L, B] float64.

        NaN where one of the two is zero or missing.

        Taken from mantissas and differences of exponents, so that they keep their digits at any L.
        """
        log = self._log_size()
        k = self.exponent
        value = torch.add(log[:-1] - log[1:], k[:-1] - k[1:], alpha=math.log(2))
        if self.complete:
            return value
        return torch.where(self.nonzero[:-1] & self.nonzero[1:], value, math.nan)

    def _log_size(self) -> Tensor:
        """The logarithms of `size`; 0 for a costate that is zero or missing."""
        size = self.size if self.complete else torch.where(self.nonzero, self.size, 1)
        return torch.log(size.double())


def stack_padded(parts: Sequence[Tensor]) -> Tensor:
    """[B, n_i] each -> [L, B, n], n the largest n_i, padded with zeros, which keep the norms."""
    n = max(part.shape[1] for part in parts)
    return torch.stack([pad(part, (0, n - part.shape[1])) for part in parts])


@dataclass(frozen=True, eq=False)
class Costates(BaseCostates):
    """lam_t = mantissa_t 2^{exponent_t}, t = 0..T, of a recurrence.

    `run.costates(loss, y)` returns one; a penalty takes one. Of x_t = w x_{t-1} + u_t with the loss
    (x_T - y)^2 / 2 they are lam_t = w^{T-t} (x_T - y):

    >>> import math, torch
    >>> import coadjoint as co
    >>> net = co.Network(co.cells.elman("identity"), inputs=1, hidden=1, outputs=1)
    >>> for name, value in {"W": 0.5, "R": 1.0, "b": 0.0, "V": 1.0, "b_o": 0.0}.items():
    ...     _ = net.get_parameter(name).data.fill_(value)
    >>> u = torch.tensor([1.0, 0.0, 0.0])[:, None, None]  # [T, B, inputs]
    >>> lam = net(u).costates("squared", torch.zeros(1, 1))
    >>> lam.lam.shape  # [T + 1, B, n]
    torch.Size([4, 1, 1])
    >>> ratios = lam.log_ratios()  # log ||lam_t|| - log ||lam_{t+1}|| = log w
    >>> bool(torch.allclose(ratios, torch.full((3, 1), math.log(0.5)).double()))
    True
    """

    trajectory: RecurrenceRun
    rows: Tensor  # mantissas [B + N, n]
    powers: Tensor  # exponents [B + N]
    loss: Tensor  # [B]
    # G of these costates where that may be captured and replayed; None where it may not
    replay: Replay | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        rows = self.trajectory.layout.rows
        loss = self.loss.mean().item()
        return (
            f"<Costates of {rows.B} samples, t = 0..{rows.T}, {self.rows.shape[1]} entries; "
            f"mean loss {loss:.4g}>"
        )

    def detach(self) -> Costates:
        """The same costates without their graph."""
        return Costates(self.trajectory, self.rows.detach(), self.powers, self.loss.detach())

    @property
    def sweep(self) -> SweepRun:  # type: ignore[override]
        """The run of the recurrence."""
        return self.trajectory.run

    @functools.cached_property
    def mantissa(self) -> Tensor:
        """The mantissas, [T + 1, B, n]."""
        return self.trajectory.layout.padded_states(self.rows)

    def mantissa_at(self, i: int) -> Tensor:
        """The mantissa of lam_i, [B, n]."""
        return self.mantissa[i]

    @functools.cached_property
    def exponent(self) -> Tensor:
        """The powers of two, [T + 1, B], integers."""
        return self.trajectory.layout.padded_states(self.powers)

    @functools.cached_property
    def lam(self) -> Tensor:
        """The costates at true scale, [T + 1, B, n]: 0 or inf outside the range of the type."""
        return scale(self.mantissa, self.exponent[..., None])

    @property
    def uniform(self) -> bool:
        """Do all samples have the same length?"""
        return self.trajectory.layout.rows.uniform

    def measure(self, G: Measure) -> Tensor:
        """G of these costates, [B], for a G that reads mantissas, exponents and loss alone."""
        return G(self) if self.replay is None else self.replay(self, G)

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: does the costate exist?"""
        rows = self.trajectory.layout.rows
        if rows.uniform:  # made on the device, so that nothing is copied to it
            return torch.ones(rows.T + 1, rows.B, dtype=torch.bool, device=self.rows.device)
        return self.trajectory.mask.to(self.rows.device)

    @property
    def last(self) -> Tensor:
        """[B]: the time step of each sample's last costate, its length."""
        if self.uniform:  # made on the device, so that nothing is copied to it
            rows = self.trajectory.layout.rows
            return torch.full((rows.B,), rows.T, device=self.loss.device)
        return self.trajectory.lengths.to(self.loss.device)

    def last_mantissa(self) -> Tensor:
        """[B, n]: the mantissa of each sample's last costate."""
        last_step = self.last[None, :, None].expand(1, -1, self.mantissa.shape[2])
        return self.mantissa.gather(0, last_step)[0]

    @property
    def visible_states(self) -> Tensor:
        """The first slot of the states, [T + 1, B, hidden]."""
        return self.trajectory.visible_states

    @functools.cached_property
    def size(self) -> Tensor:
        """The norms of the mantissas, [T + 1, B]."""
        return norm(self.mantissa)

    @functools.cached_property
    def size_1(self) -> Tensor:
        """The 1-norms of the mantissas, [T + 1, B]."""
        return self.mantissa.abs().sum(-1)

    def squares_at_zero(self) -> Tensor:
        """[T + 1, B]: the squared norms of those costates that are zero, and 0 for the others.

        All are 0; what counts is their second derivatives, which size^2 lacks where size is 0.
        """
        zeros = scale(keep_where_zero(self.mantissa, self.size), self.exponent[..., None])
        return zeros.square().sum(-1)

    def pull_mantissas(self) -> Tensor:
        """J_t' mantissa_t, t = 1..T, J_t = dx_t/dx_{t-1}: [T, B, n]."""
        return self.trajectory.layout.padded(self.trajectory.run.pull(self.rows))

    def pull_directions(self, w: Tensor) -> Tensor:
        """J_t' w_t, t = 1..T, of any directions w [T, B, n] of the states: [T, B, n]."""
        layout = self.trajectory.layout
        # The first B rows belong to x_0, which has no step before it, and are not read.
        rows = pad(layout.flat(w), (0, 0, layout.rows.B, 0))
        return layout.padded(self.trajectory.run.pull(rows))

    @property
    def entry_counts(self) -> Sequence[int]:
        """The number of entries of each state x_0, ..., x_T: n for all of them."""
        return [self.rows.shape[1]] * len(self.exponent)
