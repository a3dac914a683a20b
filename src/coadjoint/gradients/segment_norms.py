"""What a penalty sees of costates that are computed in segments: their norms at all steps.

There are few of them, [T + 1, B], so the derivative of a penalty by ||lam_t|| is known for all
steps before the tangents are swept. States and entries of costates would take the memory that
segments save, and a penalty that reads them is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import Unsupported
from ..networks.network import Network
from ..objectives.state_parts import take
from ..sweeps.costates import Costates, norm, slot_columns
from ..sweeps.layout import Layout
from ..sweeps.rows import Rows


class AllSteps(NamedTuple):
    """Norms of all costates lam_t = mantissa_t 2^exponent_t, [T + 1, B] each."""

    size: Tensor  # 2-norms of the mantissas
    size_1: Tensor  # 1-norms of the mantissas
    exponent: Tensor


@dataclass(frozen=True)
class SeenEntries:
    """The entries of the costates whose norms are taken: all, or those of some slots.

    names    of the slots, in alphabetical order; () for all
    columns  their entries in the state; () for all
    """

    names: tuple[str, ...] = ()
    columns: Sequence[slice] = ()

    @staticmethod
    def of(net: Network, names: tuple[str, ...]) -> SeenEntries:
        """Those of the slots with these names, () for all."""
        if not names:
            return ALL_ENTRIES
        return SeenEntries(names, slot_columns(net.slot_names, names, net.hidden))

    def take(self, lam: Tensor) -> Tensor:
        """These entries of rows of costates."""
        return take(lam, self.columns) if self.names else lam


ALL_ENTRIES = SeenEntries()


class CostateNorms(Costates):
    """Costates of which only norms, log-norms, log-ratios and exponents are known.

    Args:
        trajectory: The run, without its states.
        name: The name of the penalty, for messages.
        at: The norms at all steps.
        loss: The loss of each sample, [B].
        seen: The entries of the costates whose norms they are.
    """

    name: str
    trajectory: TrajectoryWithoutStates  # type: ignore[assignment]
    seen: SeenEntries

    def __init__(
        self,
        trajectory: TrajectoryWithoutStates,
        name: str,
        at: AllSteps,
        loss: Tensor,
        seen: SeenEntries = ALL_ENTRIES,
    ) -> None:
        # Costates is frozen, and computes size, size_1 and exponent from its entries unless these
        # names are in the instance already.
        self.__dict__.update(trajectory=trajectory, name=name, loss=loss, seen=seen)
        self.__dict__.update(at._asdict())

    def part(self, names: tuple[str, ...]) -> CostateNorms:
        """These norms, if they are of the slots with these names; other parts are refused."""
        if names == self.seen.names:
            return self
        raise Unsupported(
            f"penalty '{self.name}' reads more than one part of the state. With segments all its "
            "terms must be on the same part, since only the norms of that part are kept."
        )

    @property
    def rows(self) -> Tensor:
        """Refuse to return the mantissas."""
        refuse_states(self.name, "the entries of the costates (lam, mantissa)")

    powers = rows  # refused too

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: whether the costate exists."""
        return self.trajectory.mask.to(self.size.device)

    @property
    def entry_counts(self) -> Sequence[int]:
        """The number of entries of each state x_0, ..., x_T that are seen: the same for all."""
        seen = sum(each.stop - each.start for each in self.seen.columns)
        return [seen or self.trajectory.network.n] * len(self.size)

    def squared_norms(self) -> Tensor:
        """||lam_t||^2, [T + 1, B], from the norms.

        Unlike those of Costates they are not smooth at a zero costate. That would matter only to a
        second derivative of the penalty, and here it is differentiated once.
        """
        return self.norms().square()

    def __repr__(self) -> str:
        return f"<CostateNorms, t = 0..{len(self.size) - 1}>"


class TrajectoryWithoutStates:
    """A run whose states are not kept; reading them raises an error that names the penalty."""

    def __init__(self, net: Network, layout: Layout, u: Tensor, name: str) -> None:
        """From the inputs u as step rows [N, inputs], and the name of the penalty."""
        self.network = net
        self.layout = layout
        self.u_rows = u
        self.lengths = layout.lengths
        self.mask = layout.mask
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        refuse_states(self._name, f"trajectory.{attribute}")


def refuse_states(name: str, what: str) -> NoReturn:
    """Raise the error for penalty `name`, which reads `what`."""
    raise Unsupported(
        f"penalty '{name}' reads {what}. With segments a penalty can only read norms(), "
        "squared_norms(), log_norms(), log_ratios() and exponent, because states and costates "
        "would take the memory that segments save. Use a penalty of these (log-ratio, variance, "
        "...), or leave out segments."
    )


class NormSlopes:
    """The derivatives of the objective by the norms of the mantissas, as state rows [B + N]."""

    def __init__(
        self,
        layout: Layout,
        of_size: Tensor | None,
        of_size_1: Tensor | None,
        seen: SeenEntries,
    ) -> None:
        """From [T + 1, B] by the 2-norms and by the 1-norms; None for norms it does not read.

        seen: the entries of the costates whose norms they are.
        """
        self.seen = seen
        self.of_size = state_rows(layout, of_size)
        self.of_size_1 = state_rows(layout, of_size_1)
        self.zero = of_size is None and of_size_1 is None

    def pull(self, lam: Tensor, rows: Rows, all_rows: Rows) -> Tensor:
        """Return dObjective/dmantissa of one segment, through the norms of the mantissas.

        The states that a segment begins with belong to the segment before it; their rows are zero
        unless they are x_0.

        Args:
            lam: The mantissas of the segment, state rows.
            rows: The rows of the segment.
            all_rows: The rows of the sequence.
        """
        first = all_rows.starts[rows.begin]  # step row of the sequence that the segment begins with

        def in_segment(slope: Tensor) -> Tensor:
            # The rows of the segment, from state rows of the sequence.
            if first == 0:
                return slope[: len(lam)]
            begin = all_rows.B + first
            return pad(slope[begin : begin + rows.N], (rows.B, 0))

        with torch.enable_grad():
            leaf = lam.detach().requires_grad_()
            entries = self.seen.take(leaf)
            norms = []
            norm_slopes = []  # the derivative of the objective by each of them
            if self.of_size is not None:
                norms.append(norm(entries))
                norm_slopes.append(in_segment(self.of_size))
            if self.of_size_1 is not None:
                norms.append(entries.abs().sum(-1))
                norm_slopes.append(in_segment(self.of_size_1))
            (of_lam,) = torch.autograd.grad(norms, leaf, norm_slopes)
        return of_lam


def state_rows(layout: Layout, y: Tensor | None) -> Tensor | None:
    """Return y [T + 1, B] as state rows [B + N], those of x_0 first; None for None."""
    if y is None:
        return None
    return torch.cat([layout.sort(y[0]), layout.flat(y[1:])])
