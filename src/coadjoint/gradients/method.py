"""Method: what gradient methods have in common.

All differentiate the mean over samples of per-sample values, so a gradient does not depend on how a batch is cut up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, brief, check_kind, whole_number
from ..networks.interface import Net, check_net, run_function
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .captured import CapturedGradients
from .evaluation import Evaluation, Gradient
from .segments import Segments


def one_layer(net: Net, what: str) -> Network:
    """The network, for a method that takes sequences apart; others refuse it."""
    net.refuse_if_indivisible(what)
    layer = net.one_layer
    assert layer is not None  # `whole` has refused all others
    return layer


def check_arguments(net: Any, batch: Any) -> None:
    """What a gradient is taken of."""
    check_net(net)
    check_kind("the batch", batch, Batch, "a co.Batch(u, y)")


class Method:
    """A way to a gradient: `method(net, batch, loss)` returns an Evaluation."""

    segments: Segments = None

    @functools.cached_property
    def captured(self) -> CapturedGradients:
        """Gradients that repeat, on a GPU."""
        return CapturedGradients()

    @functools.cached_property
    def state(self) -> dict[str, float]:
        """What the next gradient depends on beside its arguments and the step: to be saved with a run, and put back."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, here or in another process, begins with: recordings belong to this process and its networks."""
        return {name: value for name, value in self.__dict__.items() if name != "captured"}

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        return self.evaluate(net, batch, loss)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        raise NotImplementedError

    @torch.no_grad()
    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        """The objective alone, without its gradient."""
        check_arguments(net, batch)
        run = run_function(net)(batch)
        return float(batch.mean(run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)))

    def sweeps(self, net: Net, T: int) -> float:
        """Sweeps over a sequence of T steps that its gradient takes."""
        return 2

    def per_sample(self, net: Net, batch: Batch, loss: LossLike) -> Gradient:
        """The gradient of each sample's own objective, stacked: by parameter name, [B, ...]. Their mean is the gradient.

        One evaluation for each sample: a method's own definition, at B small sweeps."""
        check_arguments(net, batch)
        net.refuse_if_random("gradients of single samples")
        B, before = net.count_samples(batch), dict(self.state)
        found = [
            self.evaluate(net, batch.select([j], net.readout), loss).gradient for j in range(B)
        ]
        self.state.update(before)
        return {name: torch.stack([g[name] for g in found]) for name in found[0]}


def trained_parameters(net: Net) -> dict[str, nn.Parameter]:
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError(
            "every parameter of this network is frozen (requires_grad=False): there is no gradient to take."
        )
    return parameters


def differentiate(
    objective: Tensor, parameters: dict[str, nn.Parameter], keep: bool = False
) -> Gradient:
    """d objective / d parameters; zeros for parameters it does not reach. keep: the graph, for costates later."""
    grads = torch.autograd.grad(
        objective, list(parameters.values()), retain_graph=keep, allow_unused=True
    )
    return by_name(parameters, grads)


def by_name(parameters: dict[str, nn.Parameter], grads: Sequence[Tensor | None]) -> Gradient:
    """Gradients under their parameters' names; zeros for parameters that have none."""
    pairs = zip(parameters.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def check_streams(batch: Any) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise InputError(f"a stream needs at least one sample; got batch={brief(batch)}.")
    whole_number("batch", batch)
