"""The deep network of the benchmark: its gradient over layers, ours and as torch computes it.

mlp        T tanh layers of d units from d inputs, and a readout of 10 classes: cross-entropy,
           float32; plain, or penalised by the log-ratio over depth
ours       co.Chain.mlp, by BP and Penalised
torch      nn.Linear and tanh, layer by layer (plain)
autograd   the same, differentiated twice (penalised)
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...cells.classic import elman
from ...gradients.method import Method
from ...networks.chain import Chain
from ...objectives.batch import Batch
from ...sweeps import engines
from .problems import METHODS, OURS, RHO, TINY, Contenders, Run, Size, gradient_by_name

MLP = "mlp"
CLASSES = 10
MLP_SIZES: tuple[Size, ...] = ((30, 64, 64),)  # layers, samples, units


class MlpProblem:
    """A deep network at one size on one device: our chain, torch's layers with its weights."""

    kinds: tuple[str, ...] = ("plain", "penalised")

    def __init__(self, cell: str, size: Size, device: str) -> None:
        """cell: "mlp"; size: (layers, samples, units). Orthogonal weights keep costates alive."""
        T, B, d = size
        self.device = device
        self.chain = Chain.mlp(
            d, [d] * T, CLASSES, output="softmax", seed=0, dtype=torch.float32, device=device
        )
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(B, d, generator=generator).to(device)
        self.y = torch.randint(0, CLASSES, (B,), generator=generator).to(device)

    @property
    def engine(self) -> str:
        """The engine that sweeps over the layers."""
        return str(engines.resolve("auto", elman("tanh"), self.device))

    def contenders(self, peer: str) -> Contenders:
        """The gradients of ours, or of a peer; JAX has none here."""
        if peer == OURS:
            return {OURS: self._our_runs()}
        if peer == "torch":
            plain = functools.partial(self.plain, *self.torch_layers())
            return {"torch.nn": {"plain": plain}}
        if peer == "autograd":
            double = functools.partial(self.double, *self.torch_layers())
            return {"autograd loop": {"penalised": double}}
        return {}

    def _our_runs(self) -> dict[str, Run]:
        """Our gradients by the public classes, {kind: its function}."""
        batch = Batch(self.x, self.y)

        def gradient(method: Method) -> dict[str, Tensor]:
            return method(self.chain, batch, "cross-entropy").gradient

        runs: dict[str, Run] = {}
        for kind, method in METHODS.items():
            runs[kind] = functools.partial(gradient, method)
        return runs

    def torch_layers(self) -> tuple[list[nn.Linear], dict[str, Tensor]]:
        """Layers of torch with our weights, and their parameters under our names."""
        ours = dict(self.chain.named_parameters())
        layers: list[nn.Linear] = []
        parameters: dict[str, Tensor] = {}
        for i in range(len(self.chain)):
            W = ours[f"maps.{i}.W"]
            layer = nn.Linear(W.shape[1], W.shape[0], device=self.device)
            with torch.no_grad():
                layer.weight.copy_(W)
                layer.bias.copy_(ours[f"maps.{i}.b"])
            layers.append(layer)
            parameters[f"maps.{i}.W"] = layer.weight
            parameters[f"maps.{i}.b"] = layer.bias
        return layers, parameters

    def plain(self, layers: list[nn.Linear], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the mean loss by torch."""
        x = self.x
        for layer in layers[:-1]:
            x = torch.tanh(layer(x))
        return gradient_by_name(cross_entropy(layers[-1](x), self.y), parameters)

    def double(self, layers: list[nn.Linear], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The penalised gradient: torch's costates of x_1, ..., x_L, differentiated again."""
        states = [self.x]
        for layer in layers[:-1]:
            states.append(torch.tanh(layer(states[-1])))
        states.append(layers[-1](states[-1]))
        losses = cross_entropy(states[-1], self.y, reduction="none")
        lam = torch.autograd.grad(losses.sum(), states[1:], create_graph=True)
        norms = torch.stack([y.norm(dim=1) for y in lam]) + TINY
        penalty = (norms[:-1] / norms[1:]).log().square().mean(0)
        return gradient_by_name((losses + RHO * penalty).mean(), parameters)
