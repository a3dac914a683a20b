"""Benchmark: the time of one training gradient, ours and the peers', and its share of what the machine can do.

    the gradient   of a network, elman, lstm or gru: cross-entropy at the last step, 6 inputs, 4 classes, float32; plain, or
                   penalised by the log-ratio
                   of a module, nn.RNN, nn.LSTM or nn.GRU: 2 layers, bidirectional, the sum of the squared outputs; plain, or
                   double: of the squared gradient by the inputs
    ours           BPTT, Penalised and co.nn through the public names, on the engine that "auto" picks
    torch          torch.nn.RNN, LSTM, GRU; on a GPU that is cuDNN, with tf32 and without, which has no double gradient: that
                   is torch.nn's without cuDNN
    autograd       a Python loop of torch's fused cells, differentiated twice (penalised)
    jax            a compiled scan, its gradient (plain) and the gradient of its gradient (penalised)
    hessian-free   one step of co.hessian_free beside what it cannot do without: for each iteration of conjugate gradients a
                   tangent, an adjoint and their two weight products, and the gradient; elman, on a CPU

Everyone starts from the same weights, drawn so that costates stay inside float32, where peers keep them; gradients are
compared before anything is timed. Contenders take turns, so that a busy machine disturbs all alike, and medians count.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...cells import library
from ...errors import MissingError
from ...gradients.bptt import BPTT
from ...gradients.penalised import Penalised
from ...networks.initialisers import initialise
from ...networks.network import Network
from ...nn import modules
from ...objectives.batch import Batch
from ...sweeps.torch_internals import fused_cell
from .clock import INSIDE, best_time, tf32

Size = tuple[int, int, int]  # T, B, d
Run = Callable[[], Mapping[str, Any]]  # one gradient, by parameter name

INPUTS, OUTPUTS, RHO = 6, 4, 1.0
OURS = "ours"
METHODS = {"plain": BPTT(), "penalised": Penalised("log-ratio", RHO)}
PRODUCTS = {
    "plain": (2, 1),
    "penalised": (4, 2),
    "double": (4, 2),
}  # sweeps and weight products of one gradient
PRODUCTS["plain tf32"] = PRODUCTS["plain"]
LAYERS, DIRECTIONS = 2, 2  # of a module
SIZES: dict[str, tuple[Size, ...]] = {
    "cpu": ((100, 20, 50), (200, 64, 128), (200, 64, 512)),
    "cuda": ((200, 64, 128), (200, 64, 256), (784, 128, 128), (200, 64, 512), (200, 64, 1024)),
}
MODULES: dict[str, Any] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
FUSED = {"elman": "rnn_tanh_cell", "lstm": "lstm_cell", "gru": "gru_cell"}
START = {
    "elman": (1.0, None),
    "lstm": (0.2, "f"),
    "gru": (0.2, "u"),
}  # the radius of W; the gate that keeps the state, open


class NetworkProblem:
    """One cell at one size on one device: our network, the same weights in torch's module, a batch."""

    kinds: tuple[str, ...] = ("plain", "penalised")

    def __init__(self, cell: str, size: Size, device: str) -> None:
        self.cell, self.size, self.device = cell, size, device
        T, B, d = size
        draw = torch.Generator().manual_seed(0)
        self.net = Network(
            cell, inputs=INPUTS, hidden=d, outputs=OUTPUTS, output="softmax", dtype=torch.float32
        )
        radius, keeps = START[cell]
        initialise(self.net, "orthogonal", radius=radius, std=0.02)
        formula = library.named(cell)
        if keeps is not None:
            with torch.no_grad():
                self.net.get_parameter("b").chunk(len(formula.gates))[
                    formula.gates.index(keeps)
                ].fill_(4.0)
        self.net.to(device)
        self.u = torch.randn(T, B, INPUTS, generator=draw).to(device)
        self.y = torch.randint(0, OUTPUTS, (B,), generator=draw).to(device)
        self.n = len(formula.slots) * d

    @property
    def engine(self) -> str:
        return str(self.net.engine)

    def contenders(self, peer: str) -> dict[str, dict[str, Run]]:
        return {OURS: ours, **PEERS}[peer](self)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.net.named_parameters()}

    def torch_modules(self) -> tuple[nn.Module, nn.Linear, dict[str, Tensor]]:
        """torch's layer and readout with our weights, and their parameters under our names."""
        d, w = self.size[2], self.weights
        layer = MODULES[self.cell](INPUTS, d, device=self.device)
        head = nn.Linear(d, OUTPUTS, device=self.device)
        named = {
            "W": layer.weight_hh_l0, "R": layer.weight_ih_l0, "b": layer.bias_ih_l0, "V": head.weight, "b_o": head.bias,
        }  # fmt: skip
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(w[name])
            layer.bias_hh_l0.zero_()
            if "p.b_n" in w:
                layer.bias_hh_l0[2 * d :] = w["p.b_n"]
        return layer, head, named


def ours(p: NetworkProblem) -> dict[str, dict[str, Run]]:
    batch = Batch(p.u, p.y)
    take = lambda method: lambda: method(p.net, batch, "cross-entropy").gradient
    return {OURS: {kind: take(method) for kind, method in METHODS.items()}}


def torch_nn(p: NetworkProblem) -> dict[str, dict[str, Run]]:
    layer, head, named = p.torch_modules()

    def plain() -> dict[str, Tensor]:
        loss = cross_entropy(head(layer(p.u)[0][-1]), p.y)
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    def with_tf32(on: bool) -> Run:
        def run() -> dict[str, Tensor]:
            torch.backends.cudnn.allow_tf32 = on
            return plain()

        return run

    if p.device == "cpu":
        return {"torch.nn": {"plain": plain}}
    return {"cuDNN tf32": {"plain": with_tf32(True)}, "cuDNN": {"plain": with_tf32(False)}}


def autograd_loop(p: NetworkProblem) -> dict[str, dict[str, Run]]:
    """The state is one node [h, c], so that lam^c is the costate and not the path through h."""
    layer, head, named = p.torch_modules()
    d, step = p.size[2], fused_cell(FUSED[p.cell])
    weights: Any = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)

    def penalised() -> dict[str, Tensor]:
        x, states = p.u.new_zeros(len(p.y), p.n), []
        for u in p.u:
            x = torch.cat(step(u, x.split(d, 1), *weights), 1) if p.n > d else step(u, x, *weights)
            states.append(x)
        losses = cross_entropy(head(x[:, :d]), p.y, reduction="none")
        lam = torch.stack(torch.autograd.grad(losses.sum(), states, create_graph=True))
        norms = lam.norm(dim=2) + 1e-30
        penalty = (norms[:-1] / norms[1:]).log().square().mean(0)
        objective = (losses + RHO * penalty).mean()
        return dict(zip(named, torch.autograd.grad(objective, list(named.values())), strict=True))

    return {"autograd loop": {"penalised": penalised}}


def jax_scan(p: NetworkProblem) -> dict[str, dict[str, Run]]:
    """Costates are the gradient by a shift of each state. The inputs are multiplied inside the scan or before it: which
    is faster depends on the size, so both are tried and the faster one competes."""
    jax = load_jax(p.device)
    jnp, (T, B, d) = jax.numpy, p.size
    place = lambda y: jax.device_put(y.cpu().numpy(), jax.devices(p.device)[0])
    weights, u, y = {name: place(w) for name, w in p.weights.items()}, place(p.u), place(p.y)
    sigmoid, tanh = jax.nn.sigmoid, jnp.tanh

    def elman(w: Any, z: Any, v: Any, x: Any) -> Any:
        return tanh(z + v)

    def lstm(w: Any, z: Any, v: Any, x: Any) -> Any:
        i, f, g, o = jnp.split(z + v, 4, 1)
        c = sigmoid(f) * x[:, d:] + sigmoid(i) * tanh(g)
        return jnp.concatenate([sigmoid(o) * tanh(c), c], 1)

    def gru(w: Any, z: Any, v: Any, x: Any) -> Any:
        r, k = jnp.split(sigmoid(z[:, : 2 * d] + v[:, : 2 * d]), 2, 1)
        return (1 - k) * tanh(v[:, 2 * d :] + r * (z[:, 2 * d :] + w["p.b_n"])) + k * x

    f = {"elman": elman, "lstm": lstm, "gru": gru}[p.cell]

    def losses(w: Any, u: Any, y: Any, shift: Any, inside: bool) -> Any:
        drive = lambda u: u @ w["R"].T + w["b"]

        def step(x: Any, at: Any) -> tuple[Any, None]:
            x = f(w, x[:, :d] @ w["W"].T, drive(at[0]) if inside else at[0], x)
            return (x if at[1] is None else x + at[1]), None

        x, _ = jax.lax.scan(step, jnp.zeros((B, p.n), u.dtype), (u if inside else drive(u), shift))
        logs = jax.nn.log_softmax(x[:, :d] @ w["V"].T + w["b_o"])
        return -jnp.take_along_axis(logs, y[:, None], 1)[:, 0]

    def plain(w: Any, u: Any, y: Any, inside: bool) -> Any:
        return losses(w, u, y, None, inside).mean()

    def penalised(w: Any, u: Any, y: Any, inside: bool) -> Any:
        def total(shift: Any) -> tuple[Any, Any]:
            values = losses(w, u, y, shift, inside)
            return values.sum(), values

        lam, values = jax.grad(total, has_aux=True)(jnp.zeros((T, B, p.n), u.dtype))
        norms = jnp.sqrt((lam**2).sum(2)) + 1e-30
        return (values + RHO * (jnp.log(norms[:-1] / norms[1:]) ** 2).mean(0)).mean()

    def run(objective: Any, inside: bool) -> Run:
        gradient = jax.jit(jax.grad(functools.partial(objective, inside=inside)))
        return lambda: jax.block_until_ready(gradient(weights, u, y))

    fastest = lambda objective: min(
        (run(objective, inside) for inside in INSIDE), key=lambda r: best_time(r, p.device, 1)
    )
    return {"JAX scan": {"plain": fastest(plain), "penalised": fastest(penalised)}}


PEERS: dict[str, Callable[[NetworkProblem], dict[str, dict[str, Run]]]] = {
    "torch": torch_nn,
    "autograd": autograd_loop,
    "jax": jax_scan,
}


class ModuleProblem:
    """A module at one size on one device: ours, and torch's with the same weights. On a GPU cuDNN may round to tf32, by
    default, and torch.mm, of which ours are made, may not: both are measured both ways."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        T, B, d = size
        draw = torch.Generator().manual_seed(0)
        self.device, self.u = (
            device,
            torch.randn(T, B, INPUTS, generator=draw).to(device).requires_grad_(),
        )
        make = getattr(nn, name.removeprefix("nn."))
        self.torch_module = make(
            INPUTS, d, num_layers=LAYERS, bidirectional=DIRECTIONS == 2, device=device
        )
        self.ours = getattr(modules, make.__name__).from_torch(self.torch_module)
        self.kinds = ("plain", "double") if device == "cpu" else ("plain", "plain tf32", "double")

    @property
    def engine(self) -> str:
        return str(self.ours.engine)

    def plain(self, module: nn.Module) -> dict[str, Tensor]:
        return self.gradient(module, module(self.u)[0].square().sum())

    def double(self, module: nn.Module) -> dict[str, Tensor]:
        by_u = torch.autograd.grad(module(self.u)[0].square().sum(), self.u, create_graph=True)[0]
        return self.gradient(module, by_u.square().sum())

    def gradient(self, module: nn.Module, value: Tensor) -> dict[str, Tensor]:
        named = {"u": self.u, **dict(module.named_parameters())}
        return dict(
            zip(
                named,
                torch.autograd.grad(value, list(named.values()), allow_unused=True),
                strict=True,
            )
        )

    def double_without_cudnn(self) -> dict[str, Tensor]:
        """cuDNN and oneDNN have no second derivative."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oneDNN's switch speaks of other processors
            with (
                torch.backends.cudnn.flags(enabled=False),
                torch.backends.mkldnn.flags(enabled=False),
            ):
                return self.double(self.torch_module)

    def plain_in_tf32(self, module: nn.Module) -> dict[str, Tensor]:
        with tf32(True):
            return self.plain(module)

    def contenders(self, peer: str) -> dict[str, dict[str, Run]]:
        on_gpu = self.device == "cuda"
        if peer == OURS:
            ours, rounded, twice = (
                self.ours,
                copy.deepcopy(self.ours),
                copy.deepcopy(self.ours),
            )  # each is recorded apart
            found: dict[str, Run] = {
                "plain": lambda: self.plain(ours),
                "double": lambda: self.double(twice),
            }
            return {
                OURS: found
                | ({"plain tf32": lambda: self.plain_in_tf32(rounded)} if on_gpu else {})
            }
        if peer != "torch":
            return {}
        plain: Run = lambda: self.plain(self.torch_module)
        if not on_gpu:
            return {"torch.nn": {"plain": plain, "double": self.double_without_cudnn}}
        less: Run = lambda: self.plain_in_tf32(self.torch_module)
        return {
            "cuDNN tf32": {"plain": less, "plain tf32": less},
            "cuDNN": {"plain": plain},
            "torch.nn without cuDNN": {"double": self.double_without_cudnn},
        }


SUBJECTS: dict[str, type[NetworkProblem] | type[ModuleProblem]] = {
    **dict.fromkeys(MODULES, NetworkProblem),
    **dict.fromkeys(("nn.RNN", "nn.LSTM", "nn.GRU"), ModuleProblem),
}
FORMULAS = {"nn.RNN": "elman", "nn.LSTM": "lstm", "nn.GRU": "gru"}


def load_jax(device: str) -> Any:
    """JAX for one device: on a CPU with one thread (these words count before its first import), on a GPU without taking
    all memory."""
    if device == "cpu" and torch.get_num_threads() == 1:
        single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        if single not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
    except ImportError:
        raise MissingError("jax is not installed: pip install 'coadjoint[bench]'.") from None
    try:
        jax.devices(device)
    except RuntimeError:
        raise MissingError(f"jax {jax.__version__} finds no device '{device}'.") from None
    return jax
