"""ChainRun: the run of a Chain over a batch, its outputs and its costates.

x_{i+1} = f_i(x_i),  i = 0..L-1;   a = x_L,   y_hat = phi(a);   lam_i = dL/dx_i,  i = 0..L
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import InputError, KindError, Unsupported
from ..objectives import losses
from ..objectives.losses import LossLike
from ..sweeps.costates import Axis, BaseCostates, stack_padded
from ..sweeps.layout import Layout, tensor_of
from ..sweeps.norms import keep_where_zero, norm
from ..sweeps.rows import scale, uniform_rows
from .chain_loss import losses_and_slopes
from .interface import holds_source
from .judge import Judge, check_loss_values
from .layers import refuse_transforms
from .layerwise import Layerwise
from .stretches import ScaledBlock, Stretch, normalise

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from ..objectives.batch import Batch
    from .chain import Chain

DEPTH = Axis(
    symbol="i",
    label="layer i",
    step="layer",
    place="layer",
    number="layer",
    through="through depth",
    backwards="towards the input",
)


class Evaluated(Protocol):
    """What a gradient method returns, as far as it is read here."""

    @property
    def costates(self) -> object:
        """The costates of the run."""

    @property
    def batch(self) -> Batch:
        """The batch that was run."""


@dataclass(frozen=True, eq=False)
class ChainRun:
    """One run of a Chain over B samples.

    input     x_0, [B, ...]
    x         the states x_0 (the input), x_1, ..., x_L: x[i] is [B, ...], of any shape
    a         x_L, the pre-outputs; y_hat = phi(a)

    `costates` and `push` go through the graph of this run, so that what the maps have drawn, such
    as dropout masks, is the same everywhere.

    Example:
        Two layers that halve their input, x_2 = x_0 / 4, have lam_i = (1/2)^(2 - i) for L = x_2:

        >>> import torch, coadjoint as co
        >>> halve = [torch.nn.Linear(1, 1, bias=False).requires_grad_(False) for _ in range(2)]
        >>> _ = [f.weight.fill_(0.5) for f in halve]
        >>> run = co.Chain(*halve)(torch.ones(1, 1))
        >>> [x.item() for x in run.x]
        [1.0, 0.5, 0.25]
        >>> lam = run.costates(lambda y_hat: y_hat[:, 0])
        >>> [lam.at(i).item() for i in range(3)]
        [0.25, 0.5, 1.0]
    """

    network: Chain
    batch: Batch
    input: Tensor
    stretches: Sequence[Stretch]
    generators: list[Tensor] | None = None  # states of the random generators before the run

    def __repr__(self) -> str:
        return f"<ChainRun of {len(self.input)} samples, {len(self.x) - 1} maps>"

    @functools.cached_property
    def x(self) -> Sequence[Tensor]:
        """The states x_0, ..., x_L, each [B, ...]."""
        states = [self.input]
        for stretch in self.stretches:
            states += stretch.states
        return states

    @property
    def states(self) -> Sequence[Tensor]:
        """x_0, ..., x_L, each [B, ...]."""
        return self.x

    @property
    def u(self) -> Tensor:
        """The input x_0, [B, ...]; runs over time call theirs u as well."""
        return self.x[0]

    @property
    def a(self) -> Tensor:
        """The pre-outputs x_L, [B, ...]."""
        return self.stretches[-1].last

    @functools.cached_property
    def y_hat(self) -> Tensor:
        """The outputs phi(a), shaped like a."""
        phi = losses.output_function(self.network.output)
        return phi(self.a.flatten(1)).view(self.a.shape)

    def loss(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor:
        """The loss of each sample, [B].

        loss    a name, a Loss, a function of (y_hat, y), or values [B] computed from this run
        y       class numbers [B], or targets shaped like a
        mask    weights of the samples' losses, [B]; 0 leaves one out, whatever y holds there
        reduce  makes no difference here: a sample has one output
        """
        return self._loss_and_slope(loss, y, mask, reduce)[0]

    def _loss_and_slope(
        self, loss: LossLike | Tensor, y: ArrayLike | None, mask: Tensor | None, reduce: str
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of each sample, [B], and its slope by a, shaped like a, if that is known."""
        if isinstance(loss, Tensor):
            return check_loss_values(loss, len(self.a)), None
        value, slope = losses_and_slopes(self.judge(loss, y, mask, reduce), self.a_rows)
        return value, None if slope is None else slope.view(self.a.shape)

    @property
    def layout(self) -> Layout:
        """Where the outputs lie in rows: one for each sample."""
        return Layout(uniform_rows(1, len(self.a)), None)

    @property
    def a_rows(self) -> Tensor:
        """The pre-outputs in rows, [B, outputs]."""
        return self.a.flatten(1)

    def judge(
        self, loss: LossLike, y: ArrayLike | None, mask: ArrayLike | None, reduce: str
    ) -> Judge:
        """The loss as a function of `a_rows`; arguments as in `loss`."""
        a = self.a_rows
        if y is not None:
            y = tensor_of("the target y", y, a)
            if y.shape == self.a.shape:  # an image as the target of an image
                y = y.flatten(1)
        return Judge.of(self.network, self.layout, loss, y, mask, reduce, a)

    def costates(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
        hold: str | None = None,
    ) -> ChainCostates:
        """lam_i = dL/dx_i, i = 0..L, of each sample's own loss; arguments as in `loss`.

        lam.at(0) is the gradient by the input. Differentiable, for penalties, unless gradients are
        switched off. With hold="source", lam_L = dL/da is a constant in their derivatives.
        """
        held = holds_source(hold)
        refuse_transforms()
        create_graph = torch.is_grad_enabled()
        run = self if isinstance(loss, Tensor) else self.with_graph()
        with torch.enable_grad():
            value, top = run._loss_and_slope(loss, y, mask, reduce)
            if top is None:
                top = run._loss_gradient(value, create_graph and not held)
            if held:
                top = top.detach()
            pulls: list[Callable[[Tensor], ScaledBlock]] = []
            for stretch in run.stretches:
                pulls.append(functools.partial(stretch.costates, create_graph=create_graph))
            blocks = run.costate_blocks(*normalise(top), pulls)
        lam = ChainCostates(run, blocks, value)
        return lam if create_graph else lam.detach()

    def _loss_gradient(self, value: Tensor, create_graph: bool) -> Tensor:
        """The gradient of each sample's loss by its own pre-outputs a."""
        if value.requires_grad:
            (g,) = torch.autograd.grad(
                value,
                self.a,
                torch.ones_like(value),
                create_graph=create_graph,
                retain_graph=True,
                allow_unused=True,
            )
            if g is not None:
                return g
        raise InputError(
            "the loss does not depend on this run's outputs, or gradients were off when it was "
            "computed (torch.no_grad): there are no costates."
        )

    def costate_blocks(
        self, mantissa: Tensor, k: Tensor, pulls: Sequence[Callable[[Tensor], ScaledBlock]]
    ) -> list[ScaledBlock]:
        """The costates of all states, by stretches, the first stretch first.

        mantissa, k: of lam_L. pulls: for each stretch, its `costates`. It receives a mantissa of
        order one, and its exponents count from there.
        """
        blocks = [ScaledBlock(mantissa.flatten(1)[None], k[None])]
        for i, stretch in reversed(list(enumerate(self.stretches))):
            block = pulls[i](mantissa)
            block = block._replace(exponent=block.exponent + k)
            if len(block.mantissa) > len(stretch):  # its last row is the first of the block above
                block = join_above(block, blocks)
            blocks.append(block)
            if i > 0:
                k = block.exponent[0]
                mantissa = block.mantissa[0].view(self.stretches[i - 1].last.shape)
        return blocks[::-1]

    def with_graph(self) -> ChainRun:
        """This run; if it was made without gradients, the same run again with its graph.

        The maps then draw the same random numbers as before, such as dropout masks.
        """
        if self.a.requires_grad:
            return self
        with torch.enable_grad():
            again = self.network.repeat(self)
        if not torch.equal(again.a.detach(), self.a):
            raise Unsupported(
                "running this chain twice on the same input gave two results, so that costates "
                "cannot be computed afterwards. Make the run with gradients on (without "
                "torch.no_grad), or call chain.eval()."
            )
        return again

    def pull(self, w: Sequence[Tensor], create_graph: bool | None = None) -> list[Tensor]:
        """Df_i(x_{i-1})' w_i for i = 1..L; w_i is shaped like x_i, and its result like x_{i-1}.

        create_graph: the result can be differentiated again; by default if gradients are on.
        """
        if create_graph is None:
            create_graph = torch.is_grad_enabled()
        run = self.with_graph()
        pulled: list[Tensor] = []
        with torch.enable_grad():
            for stretch in run.stretches:
                done = len(pulled)
                pulled += stretch.pull(w[done : done + len(stretch)], create_graph)
        return pulled if create_graph else [y.detach() for y in pulled]

    def push_states(self, dx: Tensor) -> list[Tensor]:
        """The changes of x_1, ..., x_L for a change dx [B, ...] of the input."""
        dx = tensor_of("the direction dx", dx, self.input)
        if not dx.is_floating_point():
            raise KindError(f"the direction dx must hold real numbers; got {dx.dtype}.")
        if dx.shape != self.input.shape:
            raise InputError(
                f"a direction of the input has its shape, {list(self.input.shape)}; "
                f"got {list(dx.shape)}."
            )
        is_needed = torch.is_grad_enabled()
        run = self.with_graph()
        changes: list[Tensor] = []
        with torch.enable_grad():
            v = dx
            for stretch in run.stretches:
                changes += stretch.push(v)
                v = changes[-1]
        return changes if is_needed else [y.detach() for y in changes]

    def push(self, dx: Tensor) -> Tensor:
        """DF(x) dx, the change of y_hat for a change dx of the input, shaped like y_hat."""
        da = self.push_states(dx)[-1].flatten(1)
        if self.network.output == "identity":
            return da.view(self.a.shape)
        is_needed = torch.is_grad_enabled()
        phi = losses.output_function(self.network.output)
        with torch.enable_grad():
            a = self.with_graph().a.flatten(1)
            w = torch.zeros_like(a).requires_grad_()
            (pulled,) = torch.autograd.grad(phi(a), a, w, create_graph=True)
            (change,) = torch.autograd.grad(pulled, w, da, create_graph=is_needed)
        return change.view(self.a.shape)

    def components(self, evaluation: Evaluated) -> Layerwise:
        """The gradient of an evaluation of this run, by layer."""
        lam = evaluation.costates
        assert isinstance(lam, ChainCostates)
        return Layerwise(self, lam, evaluation.batch)


def join_above(block: ScaledBlock, blocks: list[ScaledBlock]) -> ScaledBlock:
    """The block without what the one above it holds already; a block of one row gives way."""
    if len(blocks[-1].mantissa) == 1:
        blocks.pop()
        return block
    return block.without_last()


class ChainCostates(BaseCostates):
    """lam_i = mantissa_i 2^{exponent_i}, i = 0..L, of a chain; lam_0 = dL/dinput.

    `run.costates(loss, y)` of a co.ChainRun returns one; a penalty takes one. States may have any
    shapes; norms are over all entries of a sample.
    """

    axis = DEPTH

    def __init__(self, trajectory: ChainRun, blocks: Sequence[ScaledBlock], loss: Tensor) -> None:
        self.trajectory: ChainRun = trajectory
        self.blocks = blocks  # consecutive states with as many entries, the input first
        self.loss = loss

    def __repr__(self) -> str:
        L, B = self.exponent.shape
        return f"<ChainCostates of {B} samples, i = 0..{L - 1}; mean loss {self.loss.mean():.4g}>"

    def detach(self) -> ChainCostates:
        """The same costates without their graph."""
        blocks = [ScaledBlock(block.mantissa.detach(), block.exponent) for block in self.blocks]
        return ChainCostates(self.trajectory, blocks, self.loss.detach())

    @functools.cached_property
    def exponent(self) -> Tensor:
        """The powers of two, [L + 1, B], integers."""
        return torch.cat([block.exponent for block in self.blocks])

    def mantissa_at(self, i: int) -> Tensor:
        """The mantissa of lam_i, shaped like x_i, [B, ...]."""
        L = len(self.trajectory.x) - 1
        if not -L - 1 <= i <= L:
            raise IndexError(f"costates of this chain are lam_0 .. lam_{L}; got {i}.")
        x = self.trajectory.x[i]
        return self._mantissas()[i].view(x.shape)

    def _mantissas(self) -> list[Tensor]:
        """mantissa_i, i = 0..L, each [B, n_i]."""
        mantissas: list[Tensor] = []
        for block in self.blocks:
            mantissas += block.mantissa.unbind(0)
        return mantissas

    @functools.cached_property
    def size(self) -> Tensor:
        """The norms of the mantissas, [L + 1, B]."""
        sizes: list[Tensor] = []
        for block in self.blocks:
            sizes.append(norm(block.mantissa) if block.size is None else block.size)
        return torch.cat(sizes)

    @functools.cached_property
    def size_1(self) -> Tensor:
        """The 1-norms of the mantissas, [L + 1, B]."""
        return torch.cat([block.mantissa.abs().sum(-1) for block in self.blocks])

    def squares_at_zero(self) -> Tensor:
        """[L + 1, B]: the squared norms of those costates that are zero, and 0 for the others.

        All are 0; what counts is their second derivatives, which size^2 lacks where size is 0.
        """
        squares: list[Tensor] = []
        sizes = self.size.split([len(block.mantissa) for block in self.blocks])
        for block, size in zip(self.blocks, sizes, strict=True):
            zeros = scale(keep_where_zero(block.mantissa, size), block.exponent[..., None])
            squares.append(zeros.square().sum(-1))
        return torch.cat(squares)

    def pull_mantissas(self) -> Tensor:
        """Df_i' mantissa_i, i = 1..L: [L, B, n], zero-padded to one width."""
        run = self.trajectory
        w = [self.mantissa_at(i) for i in range(1, len(run.x))]
        return stack_padded([y.flatten(1) for y in run.pull(w)])

    @property
    def entry_counts(self) -> Sequence[int]:
        """The number of entries of each state x_0, ..., x_L."""
        return [x[0].numel() for x in self.trajectory.x]

    def pull_directions(self, w: Tensor) -> Tensor:
        """Df_i' w_i, i = 1..L, of any directions w [L, B, n] of the states: [L, B, n]."""
        run = self.trajectory
        directions: list[Tensor] = []
        for x, w_i, n in zip(run.x[1:], w, self.entry_counts[1:], strict=True):
            directions.append(w_i[:, :n].reshape(x.shape))
        return stack_padded([y.flatten(1) for y in run.pull(directions)])
