"""Runs and costates of a Network as CUDA graphs, for training loops that users write themselves.

    run = net(u)
    lam = run.costates(loss, y)
    G = penalty(lam)
    (lam.loss + rho * G).mean().backward()

On a GPU the sweep of the run, the costates and the penalty are three functions that are captured
and replayed, each with its derivatives (sweeps/engines/cuda/captured_function.py). Everything else
is computed operation by operation. Gradient methods capture a gradient as a whole instead: they
call `net.run`, which replays nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps import engines
from ..sweeps.checks import answers_late, is_deferring_checks
from ..sweeps.costates import Costates, Measure, RecurrenceRun
from ..sweeps.engines.cuda.capture import Unrecordable
from ..sweeps.engines.cuda.captured_function import (
    CapturedFunctions,
    Ledger,
    is_parameter,
    weight_key,
)
from ..sweeps.engines.cuda.captured_stages import Results
from ..sweeps.engines.cuda.repeatable import function_key
from ..sweeps.layout import Layout
from ..sweeps.plan import Engine, Saved, SweepPlan
from ..sweeps.run import FormulaRun, RunView
from ..sweeps.torch_internals import (
    buffers_within,
    named_parameters,
    nothing_intervenes,
    with_parameters,
    wrapper_in_forward,
)
from .effective_weights import InputWeights
from .readout import EXTRA_PARAMETERS
from .trajectory import Trajectory

if TYPE_CHECKING:
    from .network import Network


# What a run depends on of its network, other than tensors: the cell, the engine, and so on.
NetworkKey = tuple[Hashable, ...]


class SweptTensors(NamedTuple):
    """The tensors of a run, as far as they are there."""

    x: Tensor
    a: Tensor
    last: Tensor
    q: Tensor | None
    v: Tensor | None
    p: Tensor | None
    W: Tensor | None
    R_base: Tensor
    R_side: Tensor | None

    @staticmethod
    def of(run: FormulaRun, input_weights: InputWeights) -> SweptTensors:
        """Those of this run, whose drive was made with these weights."""
        a, v, x, p, q = run.saved
        (R_base, _), side = input_weights
        R_side = None if side is None else side[0]
        return SweptTensors(x, a, run.last, q, v, p, run.W, R_base, R_side)

    def run(self, plan: SweepPlan) -> FormulaRun:
        """The run."""
        return FormulaRun(plan, Saved(self.a, self.v, self.x, self.p, self.q), self.W, self.last)

    @property
    def input_weights(self) -> InputWeights:
        """The weights that made the drive, without biases."""
        side = None if self.R_side is None else (self.R_side, None)
        return (self.R_base, None), side


@dataclass(frozen=True, eq=False)
class SweepMap:
    """(step rows u and maybe x0, weights) -> SweptTensors."""

    network: Network
    layout: Layout
    names: Sequence[str]  # of the weights

    def __call__(self, data: Sequence[Tensor], weights: Sequence[Tensor]) -> Results:
        """The sweep with these values in the place of the network's weights."""
        net = self.network
        names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
        if len(names) > len(named_parameters(net)):
            raise Unrecordable("two weights of the network are one tensor")
        with with_parameters(net, dict(zip(self.names, weights, strict=True))):
            start = data[1] if len(data) > 1 else net.initial_state(None, self.layout.rows.B)
            run, _, input_weights = net.sweep(self.layout, data[0], start)
        assert isinstance(run, FormulaRun)
        assert input_weights is not None
        return SweptTensors.of(run, input_weights)


@dataclass(frozen=True, eq=False)
class CostatesMap:
    """(tensors of a trajectory, weights) -> the loss, the mantissas and the exponents."""

    network: Network
    layout: Layout
    engine: Engine
    names: Sequence[str]  # of the data, then of the weights
    loss: LossLike
    reduce: str
    hold: str | None

    def __call__(self, data: Sequence[Tensor], weights: Sequence[Tensor]) -> Results:
        """The costates of a trajectory with these tensors."""
        named = dict(zip(self.names, (*data, *weights), strict=True))
        x = named["x"]
        last = named["last"]
        u_rows = named.get("u", x[:0])  # read by a skip D alone
        V = named["V"]
        b_o = named.get("b_o")
        extra = {name[6:]: y for name, y in named.items() if name.startswith("extra.")}
        saved = Saved(named["a"], named.get("v"), x, named.get("p"), named.get("q"))
        cell = self.network.cell
        assert cell is not None
        plan = SweepPlan(cell, self.layout.rows, self.engine)
        a_rows = self.network.read_states(self.layout, x, last, V, b_o, u_rows, extra)
        trajectory = Trajectory(
            layout=self.layout,
            run=FormulaRun(plan, saved, named.get("W"), last),
            hidden=self.network.hidden,
            slot_names=self.network.slot_names,
            network=self.network,
            u_rows=u_rows,
            a_rows=a_rows,
            V=V,
            b_o=b_o,
            extra=extra,
            input_weights=None,
        )
        y = named.get("y")
        lam = trajectory.costates(self.loss, y, reduce=self.reduce, hold=self.hold)
        return lam.loss, lam.rows, lam.powers


class NoRun(RunView):
    """In the place of the run of costates that are measured without one."""

    @property
    def x(self) -> Tensor:
        """Refused: there are no states."""
        raise self._refusal()

    @property
    def last(self) -> Tensor:
        """Refused: there are no states."""
        raise self._refusal()

    def pull(self, lam: Tensor) -> Tensor:
        """Refused: there are no states."""
        raise self._refusal()


@dataclass(frozen=True, eq=False)
class MeasureMap:
    """(mantissas, exponents, loss) -> G of the costates, [B]."""

    G: Measure
    layout: Layout
    hidden: int
    slot_names: tuple[str, ...]

    def __call__(self, data: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """G of costates without a run. There are no weights."""
        run = RecurrenceRun(self.layout, NoRun(), self.hidden, slot_names=self.slot_names)
        rows, powers, loss = data
        return [self.G(Costates(run, rows, powers, loss))]


def may_replay() -> bool:
    """Are gradients being taken, by torch's own backward, and outside of captures of others?"""
    return torch.is_grad_enabled() and nothing_intervenes() and not is_deferring_checks()


class CallRecordings(NamedTuple):
    """The recordings of a network, for one call of it."""

    recordings: Recordings
    network_key: NetworkKey


class Recordings:
    """What is captured of a network's runs. Copies of a network have recordings of their own."""

    def __init__(self) -> None:
        self.runs = CapturedFunctions("this run")
        self.costates = CapturedFunctions("the computation of these costates")
        self.penalties = CapturedFunctions("this penalty")

    def replay_sweep(
        self,
        network: Network,
        network_key: NetworkKey,
        layout: Layout,
        u: Tensor,
        x0: Tensor | None,
    ) -> tuple[FormulaRun, InputWeights] | None:
        """The sweep over step rows u from x0 [B, n] or the network's own; None: compute it."""
        named = {}
        for name, y in named_parameters(network):
            if name not in ("V", "b_o", *EXTRA_PARAMETERS) and not name.startswith("deep."):
                named[name] = y
        # Weights that are computed, or handed to a copy of the network by torch's DataParallel, lie
        # elsewhere at each call.
        if not named or not all(map(is_parameter, named.values())):
            return None
        engine = engines.load(str(network_key[1]))
        assert network.cell is not None
        assert engine is not None
        plan = SweepPlan(network.cell, layout.rows, engine)
        f = SweepMap(network, layout, tuple(named))
        buffers = map(weight_key, buffers_within(network))  # read where they lie
        key = (network_key, layout.rows.T, layout.rows.B, f.names, *buffers)
        data = [u] if x0 is None else [u, x0]
        ledger = Ledger(plan.checks, settles=True)
        results = self.runs.replay(key, f, data, list(named.values()), ledger)
        if results is None:
            return None
        swept = SweptTensors(*results)  # type: ignore[arg-type]  # None where a run has None
        return swept.run(plan), swept.input_weights

    def replay_costates(
        self,
        trajectory: Trajectory,
        loss: LossLike | Tensor,
        y: object,
        reduce: str,
        hold: str | None,
    ) -> Costates | None:
        """The costates of a trajectory that may be captured; None: compute them.

        A function of the user's is captured if it is known what it depends on.
        """
        run = trajectory.run
        if not isinstance(run, FormulaRun) or not run.x.requires_grad:
            return None
        if isinstance(loss, Tensor) or not isinstance(y, Tensor) or y.device != run.x.device:
            return None
        loss_key = function_key(loss)
        if loss_key is None or not may_replay():
            return None
        named = {"x": run.x, "last": run.last, "V": trajectory.V, "y": y}
        optional = {"a": run.saved.a, "v": run.saved.v, "p": run.saved.p, "q": run.saved.q}
        optional |= {"W": run.W, "b_o": trajectory.b_o}
        if "D" in trajectory.extra:
            optional["u"] = trajectory.u_rows
        for name, value in optional.items():
            if value is not None:
                named[name] = value
        for name, value in trajectory.extra.items():
            named[f"extra.{name}"] = value
        # Weights are read where they lie. What was computed from them lies elsewhere at each call.
        weights = {name: w for name, w in named.items() if is_parameter(w)}
        data = {name: w for name, w in named.items() if name not in weights}
        network = trajectory.network
        names = (*data, *weights)
        f = CostatesMap(network, trajectory.layout, run.plan.engine, names, loss, reduce, hold)
        key: tuple[object, ...] = (run.plan.engine, names, loss_key, reduce, hold)
        # The network may have been changed since the run: its key is found again.
        key += (network.graph_key(), trajectory.layout.rows.T, trajectory.layout.rows.B)
        ledger = Ledger(run.plan.checks, settles=False)
        results = self.costates.replay(key, f, list(data.values()), list(weights.values()), ledger)
        if results is None:
            return None
        value, rows, powers = results
        assert value is not None
        assert rows is not None
        assert powers is not None
        return Costates(trajectory, rows, powers, value, replay=self.replay_penalty)

    def replay_penalty(self, lam: Costates, G: Measure) -> Tensor:
        """The penalty G of costates, [B]; computed where it is not captured."""
        measure_key = function_key(G)
        if measure_key is None or not lam.rows.requires_grad or not may_replay():
            return G(lam)
        run = lam.trajectory
        f = MeasureMap(G, run.layout, run.hidden, run.slot_names)
        key = (measure_key, run.layout.rows.T, run.layout.rows.B)
        results = self.penalties.replay(key, f, [lam.rows, lam.powers, lam.loss], ())
        if results is None:
            return G(lam)
        (value,) = results
        assert value is not None
        return value


def recordings_of(network: Network, batch: Batch) -> CallRecordings | None:
    """The recordings to which a call of the network may add; None if it is not to be captured."""
    u = batch.u
    if not isinstance(u, Tensor) or not answers_late(u) or batch.lengths is not None:
        return None
    if not may_replay() or network.must_be_called() or wrapper_in_forward() is not None:
        return None
    network_key = network.graph_key()
    return None if network_key is None else CallRecordings(network.recordings, network_key)
