"""What users do in loops of their own: costates with a penalty, and a gradient penalty."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...nn import modules
from ...objectives import penalties
from ...objectives.batch import Batch
from .goals import GRADIENT_PENALTY, LIMITS, OWN_LOOP, Contest, Contests, Pair
from .problems import (
    FORMULAS,
    INPUTS,
    METHODS,
    MODULES,
    RHO,
    NetworkProblem,
    Run,
    Size,
    gradient_by_name,
)


def own_loop(cell: str, size: Size, device: str, peers: tuple[str, ...]) -> Contests:
    """A penalised gradient by the user's own backward(), against co.Penalised.

    Both are of the same network, batch and penalty. peers: not needed, both runs are ours.
    """
    problem = NetworkProblem(cell, size, device)
    net = problem.net
    batch = Batch(problem.u, problem.y)
    parameters = dict(net.named_parameters())

    def by_backward() -> dict[str, Tensor | None]:
        net.zero_grad(set_to_none=True)
        lam = net(problem.u).costates("cross-entropy", problem.y)
        (lam.loss + RHO * penalties.log_ratio(lam)).mean().backward()
        return {name: p.grad for name, p in parameters.items()}

    def by_method() -> Mapping[str, object]:
        return METHODS["penalised"](net, batch, "cross-entropy").gradient

    ours = "penalised, own loop"
    peer = "co.Penalised"
    runs: dict[str, Run] = {ours: by_backward, peer: by_method}
    pair = Pair(ours, peer, LIMITS[OWN_LOOP], same=True)
    yield Contest(cell, size, problem.engine, runs, (pair,))


class Critic(nn.Module):
    """A recurrent layer, and a linear score of its last output."""

    def __init__(self, layer: nn.Module, head: nn.Linear) -> None:
        """layer: of co.nn or torch.nn; head: from its units to one score."""
        super().__init__()
        self.layer = layer
        self.head = head

    def forward(self, u: Tensor) -> Tensor:
        """The score of each sample, [B, 1]; u: [T, B, inputs]."""
        score: Tensor = self.head(self.layer(u)[0][-1])
        return score


def gradient_penalty(cell: str, size: Size, device: str, peers: tuple[str, ...]) -> Contests:
    """The gradient of mean (||d score / du|| - 1)^2, as in WGAN-GP, against our plain gradient.

    With peer "torch" also against torch.nn's: without cuDNN and oneDNN, which have no second
    derivative. cell: "nn.RNN", "nn.LSTM" or "nn.GRU", with one layer.
    """
    T, B, d = size
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(T, B, INPUTS, generator=generator).to(device)
    torch_layer = MODULES[FORMULAS[cell]](INPUTS, d, device=device)
    head = nn.Linear(d, 1, device=device)
    layer = getattr(modules, cell.removeprefix("nn.")).from_torch(torch_layer)
    ours = Critic(layer, head)

    def plain(critic: Critic) -> dict[str, Tensor]:
        return gradient_by_name(critic(u).mean(), dict(critic.named_parameters()))

    def penalised(critic: Critic) -> dict[str, Tensor]:
        x = u.clone().requires_grad_()
        slope = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
        penalty = (slope.norm(dim=(0, 2)) - 1).square().mean()
        named = dict(critic.named_parameters())
        del named["head.bias"]  # slopes do not depend on it
        return gradient_by_name(penalty, named)

    def without_cudnn() -> dict[str, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oneDNN's switch warns about other processors
            with (
                torch.backends.cudnn.flags(enabled=False),
                torch.backends.mkldnn.flags(enabled=False),
            ):
                return penalised(Critic(torch_layer, head))

    name = "gradient penalty"
    # each run has a module of its own: on a GPU its calls are captured separately
    runs: dict[str, Run] = {
        name: functools.partial(penalised, ours),
        "our plain gradient": functools.partial(plain, copy.deepcopy(ours)),
    }
    pairs = [Pair(name, "our plain gradient", LIMITS[GRADIENT_PENALTY])]
    if "torch" in peers:
        peer = "torch.nn without cuDNN" if device == "cuda" else "torch.nn"
        runs[peer] = without_cudnn
        pairs.append(Pair(name, peer, same=True))
    yield Contest(cell, size, str(layer.engine), runs, tuple(pairs))
