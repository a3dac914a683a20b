"""Method: what all gradient methods have in common.

Every method differentiates the mean over samples of per-sample values, so the gradient does not
depend on how a batch is cut into smaller ones.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..errors import InputError, brief, check_kind, whole_number
from ..networks.interface import Net, check_net, run_function
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.draws import drawing
from ..objectives.losses import LossLike
from ..sweeps.torch_internals import named_parameters
from .captured import CapturedGradients
from .evaluation import Evaluation, Gradient, name_gradients
from .segments import Segments


def require_one_layer(net: Net, what: str) -> Network:
    """Return `net` as a single recurrent layer, or refuse it.

    Args:
        net: The network.
        what: The method that takes sequences apart, for the message.
    """
    net.refuse_if_indivisible(what)
    layer = net.one_layer
    assert layer is not None  # the line above refuses every other network
    return layer


def check_arguments(net: Net, batch: Batch) -> Batch:
    """Refuse anything but a network and a Batch; return the batch as the network reads it."""
    check_net(net)
    check_kind("the batch", batch, Batch, "a co.Batch(u, y)")
    # A wrapper such as DistributedDataParallel holds the network as its `module`.
    inner: Net = net if isinstance(net, Net) else net.module
    return inner.read_batch(batch)


class Method:
    """A way to compute a gradient: `method(net, batch, loss)` returns an Evaluation."""

    segments: Segments = None  # a method that sweeps in segments sets this

    @functools.cached_property
    def captured(self) -> CapturedGradients:
        """The gradients of this method that are replayed as CUDA graphs."""
        return CapturedGradients()

    @functools.cached_property
    def state(self) -> dict[str, float]:
        """Numbers that the next gradient depends on besides its arguments and the step.

        It is saved with a run and restored when the run is resumed.
        """
        return {}

    @property
    def summed_state(self) -> tuple[str, ...]:
        """The names in `state` whose values are sums over the samples of a step."""
        return ()

    def begin_step(self) -> None:
        """Bring `state` up to the present step, before its first gradient; here there is none."""

    def __getstate__(self) -> dict[str, object]:
        """Return what is copied or pickled: all but the CUDA graphs, which stay in this process."""
        return {name: value for name, value in self.__dict__.items() if name != "captured"}

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient, as `evaluate` does; Penalised also counts a step."""
        return self.evaluate(net, batch, loss)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient of the objective for one batch."""
        raise NotImplementedError

    @torch.no_grad()
    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        """Compute the objective without its gradient."""
        batch = check_arguments(net, batch)
        run = run_function(net)(batch)
        return float(batch.mean(run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)))

    def sweeps(self, net: Net, T: int) -> float:
        """Return how many sweeps over a sequence of T steps one gradient costs."""
        return 2

    def per_sample(self, net: Net, batch: Batch, loss: LossLike) -> Gradient:
        """Compute the gradient of each sample's own objective, [B, ...] by parameter name.

        The gradient of the batch is their mean. Each sample is evaluated by itself, so this costs
        B evaluations, and it is correct for every method.
        """
        batch = check_arguments(net, batch)
        net.refuse_if_random("gradients of single samples")
        state_before = dict(self.state)  # restored below: this is no step of a training run
        gradients = []
        for j in range(net.count_samples(batch)):
            sample = batch.select([j], net.readout)
            with drawing(sample=j):
                gradients.append(self.evaluate(net, sample, loss).gradient)
        self.state.update(state_before)
        return {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}


def trained_parameters(net: Net) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name; a network without any is refused."""
    parameters = {name: p for name, p in named_parameters(net) if p.requires_grad}
    if not parameters:
        raise InputError(
            "every parameter of this network is frozen (requires_grad=False), so it has no "
            "gradient. Set requires_grad=True for some of them."
        )
    return parameters


def differentiate(
    objective: Tensor, parameters: dict[str, nn.Parameter], keep: bool = False
) -> Gradient:
    """Compute d objective / d parameters; zeros for parameters that the objective does not reach.

    Args:
        objective: A scalar with its graph.
        parameters: The parameters by name.
        keep: Keep the graph, so that costates can be pulled through it later.
    """
    leaves = list(parameters.values())
    grads = torch.autograd.grad(objective, leaves, retain_graph=keep, allow_unused=True)
    return name_gradients(parameters, grads)


def name_by_id(parameters: dict[str, nn.Parameter], gradient: dict[int, Tensor]) -> Gradient:
    """A gradient by the id of each parameter, under their names; zeros for what is missing."""
    return name_gradients(parameters, [gradient.get(id(p)) for p in parameters.values()])


def check_stream_count(batch: object) -> None:
    """Refuse a number of streams that is not a positive whole number."""
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise InputError(f"a stream needs at least one sample; got batch={brief(batch)}.")
    whole_number("batch", batch)  # refuses numbers that are too large
