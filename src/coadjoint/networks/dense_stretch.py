"""DenseStretch: dense layers of one width, swept over depth as a recurrence is over time.

The layers x_{i+1} = psi(W_i x_i + b_i) are an Elman network whose W changes at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..cells.activations import ACTIVATIONS
from ..cells.classic import elman
from ..sweeps import engines
from ..sweeps.affine import plus
from ..sweeps.functions import (
    Context,
    Gradients,
    Inputs,
    SweepFunction,
    is_transformed,
    with_quick_apply,
)
from ..sweeps.memory import empty
from ..sweeps.plan import SweepPlan
from ..sweeps.rows import Rows, uniform_rows
from ..sweeps.run import FormulaRun
from ..sweeps.torch_internals import has_hooks, own_parameters
from .maps import Dense, Tied
from .stretches import ScaledBlock

SWEPT = (Dense, Tied)  # Dense | Tied would be made anew for every layer


@dataclass(frozen=True, eq=False)
class DenseStretch:
    """L dense layers x_{i+1} = psi(W_i x_i + b_i) of one width n: the three loops over depth."""

    run: FormulaRun  # its states lie in rows [(L + 1) B, n]

    @property
    def rows(self) -> Rows:
        """Where the states lie; "steps" are layers here."""
        return self.run.plan.rows

    @property
    def last(self) -> Tensor:
        """The state after the last layer, [B, n].

        It is a tensor by itself: its gradient need not be padded to the rows of all.
        """
        return self.run.last

    @property
    def states(self) -> Sequence[Tensor]:
        """The states after each layer, [B, n]."""
        return (*self.rows.states(self.run.x)[1:-1], self.run.last)

    def __len__(self) -> int:
        return self.rows.T

    def costates(self, lam: Tensor, create_graph: bool) -> ScaledBlock:
        """The costates of all states, by one scaled adjoint sweep."""
        rows = self.rows
        with torch.set_grad_enabled(create_graph):
            found = self.run.costate(None, lam, None)
            mantissa = found.mantissa.view(rows.T + 1, rows.B, -1)
            return ScaledBlock(mantissa, found.exponent.view(rows.T + 1, rows.B))

    def pull(self, w: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Df_i(x_i)' w_i of each layer, all at once."""
        with torch.set_grad_enabled(create_graph):
            # The first B rows belong to the state before the first layer, and are not read.
            pulled = self.run.pull(torch.cat([w[0], *w]))
            return list(self.rows.steps(pulled))

    def push(self, v: Tensor) -> list[Tensor]:
        """The tangents of the states after each layer, by one tangent sweep."""
        mu = self.run.push(None, None, None, v)  # directions of base, side, W and the first state
        return list(self.rows.states(mu)[1:])


def end_of_stretch(
    maps: Sequence[nn.Module], begin: int, x: Tensor, are_written: bool = False
) -> int:
    """The end of the longest row of dense layers from `begin` on that one sweep can run.

    They have the width of x and one activation in common. `begin` itself if there is none.
    are_written: all maps are known to be written down, without hooks.
    """
    if x.dim() != 2:
        return begin
    width = x.shape[1]
    activation = getattr(maps[begin], "activation", None)
    if activation not in ACTIVATIONS:  # the functions that a cell's formula may use
        return begin
    end = begin
    for module in maps[begin:]:
        if not isinstance(module, SWEPT) or module.activation != activation:
            break
        if not module.inputs == module.outputs == width:
            break
        if not are_written and not is_plain_layer(module):
            break
        end += 1
    return end


def is_plain_layer(module: Dense | Tied) -> bool:
    """Whether a dense layer has no hooks, and `forward` as it was written."""
    # A subclass, or the user, may have replaced it.
    is_ours = type(module).forward is Dense.forward and "forward" not in vars(module)
    return is_ours and not has_hooks(module)


def run_dense(
    layers: Sequence[nn.Module],
    x: Tensor,
    weights_and_biases: tuple[list[Tensor], list[Tensor | None]] | None = None,
) -> DenseStretch:
    """Run dense layers of one width as an Elman network over depth, with a W for each step.

    weights_and_biases: of the layers, if they are at hand.
    """
    if weights_and_biases is None:
        weights_and_biases = find_weights(layers)
    weights, found_biases = weights_and_biases
    biases: list[Tensor] = []
    for W, b in zip(weights, found_biases, strict=True):
        biases.append(W.new_zeros(len(W)) if b is None else b)
    activation = layers[0].activation  # the same for all
    assert isinstance(activation, str)
    cell = elman(activation)
    engine = engines.load(engines.resolve("auto", cell, x.device.type, x.dtype))
    assert engine is not None
    plan = SweepPlan(cell, uniform_rows(len(layers), len(x)), engine, checked=False)
    parameters = (*weights, *biases)
    if is_transformed():  # Stacked has no derivative in forward mode; torch's own operations do
        W, same_W, base = stack_layers(len(x), parameters)
    elif torch.is_grad_enabled():
        W, same_W, base = Stacked.apply(len(x), *parameters)
    else:
        W = torch.stack(weights, out=empty((len(weights), *weights[0].shape), x))
        same_W = W
        base = torch.stack(biases)
        if not getattr(engine, "takes_biases", False):
            base = base.repeat_interleave(len(x), 0)
    run = FormulaRun.run(plan, base, None, W, x, None)
    return DenseStretch(run if same_W is W else replace(run, W=same_W))


def find_weights(layers: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The matrices of dense layers, and their biases or None."""
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    for layer in layers:
        assert isinstance(layer, SWEPT)
        W, b = matrix_and_bias(layer)
        weights.append(W)
        biases.append(b)
    return weights, biases


def matrix_and_bias(layer: Dense | Tied) -> tuple[Tensor, Tensor | None]:
    """The matrix of a layer, and its bias or None."""
    if type(layer) is Dense:  # quicker: a chain may have hundreds of layers
        parameters = own_parameters(layer)
        if tuple(parameters) == ("W", "b"):
            W, b = parameters.values()
            assert W is not None
            return W, b
    return layer.effective()[:2]


class StackedContext(Context):
    """The context of Stacked."""

    B: int


@with_quick_apply
class Stacked(SweepFunction):
    """apply(B, *weights [n, n], *biases [n]) -> (W, W, base) of L dense layers, as stack_layers.

    This is one node of torch's graph, instead of views of every parameter.
    """

    @staticmethod
    def forward(B: int, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weights one after the other, twice, and the biases, each B times."""
        W, _, base = stack_layers(B, parameters)
        return W, W.detach(), base

    @staticmethod
    def setup_context(
        ctx: StackedContext, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Keep the number of samples."""
        ctx.B = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: StackedContext, gW: Tensor | None, gW_too: Tensor | None, gbase: Tensor | None
    ) -> Gradients:
        """The gradient by each weight, and by each bias, summed over samples."""
        L = len(ctx.needs_input_grad) // 2
        by_weight: Gradients = [None] * L
        by_bias: Gradients = [None] * L
        total = sum_in_used_memory(gW, gW_too)
        if total is not None:
            by_weight = total.unbind(0)
        if gbase is not None:
            by_bias = gbase.view(L, ctx.B, -1).sum(1).unbind(0)
        return None, *by_weight, *by_bias


def stack_layers(B: int, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """W [L, n, n] twice and base [L B, n] of L dense layers: all weights, then all biases.

    base repeats the bias of each layer for its B samples. One W is for the states and one for the
    costates, so that Stacked is given both of their gradients.
    """
    L = len(parameters) // 2
    biases = torch.stack(parameters[L:])
    base = biases[:, None].expand(-1, B, -1).flatten(0, 1)
    W = torch.stack(parameters[:L])
    return W, W, base


def sum_in_used_memory(y: Tensor | None, z: Tensor | None) -> Tensor | None:
    """The sum y + z, None counting as zero, in memory that was used before."""
    if y is None or z is None or torch.is_grad_enabled():
        return plus(y, z)
    return torch.add(y, z, out=empty(y.shape, y))
