"""The problems of the benchmark: one training gradient, as ours and as its peers compute it.

    the gradient   of a network (elman, lstm or gru): cross-entropy at the last step, 6 inputs,
                   4 classes, float32; plain, or penalised by the log-ratio
                   of a module (nn.RNN, nn.LSTM or nn.GRU): 2 layers, bidirectional, the sum of the
                   squared outputs; plain, or double: of the squared gradient by the inputs
    ours           BPTT, Penalised and co.nn, on the engine that "auto" picks
    torch          torch.nn.RNN, LSTM, GRU. On a GPU that is cuDNN, with and without tf32, which has
                   no double gradient
    autograd       a Python loop over torch's fused cells, differentiated twice (penalised). On a
                   GPU also torch.nn without cuDNN (double)
    jax            a compiled scan: its gradient (plain), the gradient of its gradient (penalised)
    flashrnn       FlashRNN's fused kernels in bfloat16, on a GPU (plain)
    hessian-free   one step of co.hessian_free, compared with its unavoidable parts: for each
                   iteration of conjugate gradients a tangent, an adjoint and their two weight
                   products, and the gradient; elman, on a CPU

Everyone starts from the same weights. They are drawn so that costates stay inside the range of
float32, because the peers keep them in it. Gradients are compared before anything is timed.
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
from ...gradients.method import Method
from ...gradients.penalised import Penalised
from ...networks.initialisers import initialise
from ...networks.network import Network
from ...nn import modules
from ...objectives.batch import Batch
from ...sweeps.torch_internals import fused_cell
from .clock import INSIDE, best_time, tf32
from .flashrnn_kernels import FLASHRNN, last_output, load_flashrnn

Size = tuple[int, int, int]  # T, B, d
Run = Callable[[], Mapping[str, object]]  # one gradient, by parameter name
Contenders = dict[str, dict[str, Run]]  # by name and kind of gradient
JAX = Any  # modules and arrays of JAX, which may not be installed

INPUTS = 6
OUTPUTS = 4
RHO = 1.0
OURS = "ours"
METHODS: dict[str, Method] = {"plain": BPTT(), "penalised": Penalised("log-ratio", RHO)}
# sweeps and weight products of one gradient
PRODUCTS = {"plain": (2, 1), "plain tf32": (2, 1), "penalised": (4, 2), "double": (4, 2)}
LAYERS = 2  # of a module
DIRECTIONS = 2
SIZES: dict[str, tuple[Size, ...]] = {
    "cpu": ((100, 20, 50), (200, 64, 128), (200, 64, 512)),
    "cuda": ((200, 64, 128), (200, 64, 256), (784, 128, 128), (200, 64, 512), (200, 64, 1024)),
}
MODULES = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
FORMULAS = {"nn.RNN": "elman", "nn.LSTM": "lstm", "nn.GRU": "gru"}
FUSED = {"elman": "rnn_tanh_cell", "lstm": "lstm_cell", "gru": "gru_cell"}
# the spectral radius of W, and the gate that keeps the state, whose bias opens it
START: dict[str, tuple[float, str | None]] = {
    "elman": (1.0, None),
    "lstm": (0.2, "f"),
    "gru": (0.2, "u"),
}
OPEN_GATE = 4.0
TINY = 1e-30  # keeps logarithms of the peers' costates finite


def size_text(size: Size) -> str:
    """A size as the command line writes it: "100x20x50"."""
    return "x".join(map(str, size))


class NetworkProblem:
    """One cell at one size on one device: our network, torch's module with its weights, a batch."""

    kinds: tuple[str, ...] = ("plain", "penalised")

    def __init__(self, cell: str, size: Size, device: str) -> None:
        """size: (T, B, d). The weights keep costates inside the range of float32: see START."""
        self.cell = cell
        self.size = size
        self.device = device
        T, B, d = size
        self.net = Network(
            cell, inputs=INPUTS, hidden=d, outputs=OUTPUTS, output="softmax", dtype=torch.float32
        )
        formula = library.named(cell)
        radius, keeping_gate = START[cell]
        initialise(self.net, "orthogonal", radius=radius, std=0.02)
        if keeping_gate is not None:
            biases = self.net.get_parameter("b").chunk(len(formula.gates))
            with torch.no_grad():
                biases[formula.gates.index(keeping_gate)].fill_(OPEN_GATE)
        self.net.to(device)
        generator = torch.Generator().manual_seed(0)
        self.u = torch.randn(T, B, INPUTS, generator=generator).to(device)
        self.y = torch.randint(0, OUTPUTS, (B,), generator=generator).to(device)
        self.n = len(formula.slots) * d  # entries of a state

    @property
    def engine(self) -> str:
        """The engine of our network."""
        return str(self.net.engine)

    def contenders(self, peer: str) -> Contenders:
        """The gradients of ours, or of a peer: {contender: {kind of gradient: its function}}."""
        if peer == OURS:
            return ours(self)
        return PEERS[peer](self)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights that everyone starts from, by name: W, R, b, V, b_o and those of the cell."""
        return {name: p.detach() for name, p in self.net.named_parameters()}

    def torch_modules(self) -> tuple[nn.RNNBase, nn.Linear, dict[str, Tensor]]:
        """A layer and a readout of torch with our weights, and their parameters under our names."""
        d = self.size[2]
        layer = MODULES[self.cell](INPUTS, d, device=self.device)
        head = nn.Linear(d, OUTPUTS, device=self.device)
        parameters: dict[str, Tensor] = {
            "W": layer.weight_hh_l0,
            "R": layer.weight_ih_l0,
            "b": layer.bias_ih_l0,
            "V": head.weight,
            "b_o": head.bias,
        }
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.weights[name])
            # torch has two biases; ours has the second one in the n gate of the gru alone
            layer.bias_hh_l0.zero_()
            if "p.b_n" in self.weights:
                layer.bias_hh_l0[2 * d :] = self.weights["p.b_n"]  # gates r, u, n: n is the last
        return layer, head, parameters


def gradient_by_name(value: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a scalar, by the names of the parameters."""
    gradients = torch.autograd.grad(value, list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def ours(p: NetworkProblem) -> Contenders:
    """Our plain and penalised gradients, by the public classes."""
    batch = Batch(p.u, p.y)

    def gradient(method: Method) -> dict[str, Tensor]:
        return method(p.net, batch, "cross-entropy").gradient

    runs: dict[str, Run] = {}
    for kind, method in METHODS.items():
        runs[kind] = functools.partial(gradient, method)
    return {OURS: runs}


def torch_nn(p: NetworkProblem) -> Contenders:
    """The plain gradient by torch.nn: on a GPU by cuDNN, with and without tf32."""
    layer, head, parameters = p.torch_modules()

    def plain() -> dict[str, Tensor]:
        loss = cross_entropy(head(layer(p.u)[0][-1]), p.y)
        return gradient_by_name(loss, parameters)

    def plain_with(allow_tf32: bool) -> dict[str, Tensor]:
        torch.backends.cudnn.allow_tf32 = allow_tf32
        return plain()

    if p.device == "cpu":
        return {"torch.nn": {"plain": plain}}
    return {
        "cuDNN tf32": {"plain": functools.partial(plain_with, True)},
        "cuDNN float32": {"plain": functools.partial(plain_with, False)},
    }


def autograd_loop(p: NetworkProblem) -> Contenders:
    """The penalised gradient by a loop over torch's fused cells, differentiated twice.

    The state of an lstm is one node [h, c], so that lam^c is the costate. The gradient of c as a
    node by itself would also hold its path through h of the same step.
    """
    layer, head, parameters = p.torch_modules()
    d = p.size[2]
    step = fused_cell(FUSED[p.cell])
    weights = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)

    def penalised() -> dict[str, Tensor]:
        x = p.u.new_zeros(len(p.y), p.n)
        states = []
        for u in p.u:
            if p.n > d:  # lstm: x = [h, c]
                x = torch.cat(step(u, x.split(d, 1), *weights), 1)
            else:
                x = step(u, x, *weights)
            states.append(x)
        losses = cross_entropy(head(x[:, :d]), p.y, reduction="none")
        lam = torch.stack(torch.autograd.grad(losses.sum(), states, create_graph=True))
        norms = lam.norm(dim=2) + TINY
        penalty = (norms[:-1] / norms[1:]).log().square().mean(0)
        return gradient_by_name((losses + RHO * penalty).mean(), parameters)

    return {"autograd loop": {"penalised": penalised}}


def jax_scan(p: NetworkProblem) -> Contenders:
    """The plain and the penalised gradient by a compiled scan.

    Costates are the gradient by a shift that is added to each state, at shift 0. The inputs are
    multiplied inside the scan or before it. Which is faster depends on the size, so both are tried
    and the faster one competes.
    """
    jax = load_jax(p.device)
    jnp = jax.numpy
    T, B, d = p.size
    cell = jax_cell(jax, p.cell, d)

    def place(tensor: Tensor) -> JAX:
        return jax.device_put(tensor.cpu().numpy(), jax.devices(p.device)[0])

    def losses(w: JAX, u: JAX, y: JAX, shift: JAX, inside: bool) -> JAX:
        """The cross-entropies, [B]; shift: added to the states, [T, B, n], or None."""

        def multiply_inputs(u: JAX) -> JAX:
            return u @ w["R"].T + w["b"]

        def step(x: JAX, inputs_and_shift: JAX) -> tuple[JAX, None]:
            v, shift_t = inputs_and_shift
            if inside:  # v is still u_t
                v = multiply_inputs(v)
            x = cell(w, x[:, :d] @ w["W"].T, v, x)
            if shift_t is not None:
                x = x + shift_t
            return x, None

        start = jnp.zeros((B, p.n), u.dtype)
        x, _ = jax.lax.scan(step, start, (u if inside else multiply_inputs(u), shift))
        logs = jax.nn.log_softmax(x[:, :d] @ w["V"].T + w["b_o"])
        return -jnp.take_along_axis(logs, y[:, None], 1)[:, 0]

    def plain(w: JAX, u: JAX, y: JAX, inside: bool) -> JAX:
        return losses(w, u, y, None, inside).mean()

    def penalised(w: JAX, u: JAX, y: JAX, inside: bool) -> JAX:
        def total(shift: JAX) -> tuple[JAX, JAX]:
            values = losses(w, u, y, shift, inside)
            return values.sum(), values

        lam, values = jax.grad(total, has_aux=True)(jnp.zeros((T, B, p.n), u.dtype))
        norms = jnp.sqrt((lam**2).sum(2)) + TINY
        penalty = (jnp.log(norms[:-1] / norms[1:]) ** 2).mean(0)
        return (values + RHO * penalty).mean()

    weights = {name: place(w) for name, w in p.weights.items()}
    u = place(p.u)
    y = place(p.y)

    def compiled(objective: Callable[..., JAX], inside: bool) -> Run:
        gradient = jax.jit(jax.grad(functools.partial(objective, inside=inside)))
        return lambda: jax.block_until_ready(gradient(weights, u, y))

    def faster(objective: Callable[..., JAX]) -> Run:
        runs = [compiled(objective, inside) for inside in INSIDE]
        return min(runs, key=lambda run: best_time(run, p.device, 1))

    return {"JAX scan": {"plain": faster(plain), "penalised": faster(penalised)}}


def jax_cell(jax: JAX, name: str, d: int) -> Callable[[JAX, JAX, JAX, JAX], JAX]:
    """x_t = f(w, z, v, x_{t-1}) in JAX, with z = W h_{t-1} and v = R u_t + b.

    w: all weights, by name. x is h, or [h, c] for the lstm. The equations are torch's.
    """
    jnp = jax.numpy
    sigmoid = jax.nn.sigmoid
    tanh = jnp.tanh

    def elman(w: JAX, z: JAX, v: JAX, x: JAX) -> JAX:
        return tanh(z + v)

    def lstm(w: JAX, z: JAX, v: JAX, x: JAX) -> JAX:
        i, f, g, o = jnp.split(z + v, 4, 1)
        c = sigmoid(f) * x[:, d:] + sigmoid(i) * tanh(g)
        return jnp.concatenate([sigmoid(o) * tanh(c), c], 1)

    def gru(w: JAX, z: JAX, v: JAX, x: JAX) -> JAX:
        reset, keep = jnp.split(sigmoid(z[:, : 2 * d] + v[:, : 2 * d]), 2, 1)
        new = tanh(v[:, 2 * d :] + reset * (z[:, 2 * d :] + w["p.b_n"]))
        return (1 - keep) * new + keep * x

    return {"elman": elman, "lstm": lstm, "gru": gru}[name]


def flashrnn(p: NetworkProblem) -> Contenders:
    """The plain gradient by FlashRNN's kernels; they are compiled here, which may fail."""
    kernel = load_flashrnn(p.device)
    parameters = {name: w.clone().requires_grad_() for name, w in p.weights.items()}

    def plain() -> dict[str, Tensor]:
        h = last_output(kernel, p.cell, p.u, parameters)
        logits = h @ parameters["V"].T + parameters["b_o"]
        return gradient_by_name(cross_entropy(logits, p.y), parameters)

    return {"FlashRNN bf16": {"plain": plain}}


PEERS: dict[str, Callable[[NetworkProblem], Contenders]] = {
    "torch": torch_nn,
    "autograd": autograd_loop,
    "jax": jax_scan,
    FLASHRNN: flashrnn,
}


class ModuleProblem:
    """A module at one size on one device: ours, and torch's with the same weights.

    On a GPU cuDNN may round to tf32 by default. Ours is made of torch.mm, which may not. Both are
    measured both ways.
    """

    def __init__(self, name: str, size: Size, device: str) -> None:
        """name: "nn.RNN", "nn.LSTM" or "nn.GRU"; size: (T, B, d)."""
        T, B, d = size
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.u = torch.randn(T, B, INPUTS, generator=generator).to(device).requires_grad_()
        self.torch_module: nn.RNNBase = MODULES[FORMULAS[name]](
            INPUTS, d, num_layers=LAYERS, bidirectional=DIRECTIONS == 2, device=device
        )
        self.ours = getattr(modules, name.removeprefix("nn.")).from_torch(self.torch_module)
        # The gradients that are measured; the methods below compute them.
        self.kinds = ("plain", "double") if device == "cpu" else ("plain", "plain tf32", "double")

    @property
    def engine(self) -> str:
        """The engine of our module."""
        return str(self.ours.engine)

    def plain(self, module: nn.Module) -> dict[str, Tensor]:
        """The gradient of the sum of squared outputs, by the inputs and the parameters."""
        return self.gradient(module, module(self.u)[0].square().sum())

    def plain_in_tf32(self, module: nn.Module) -> dict[str, Tensor]:
        """The plain gradient, its products rounded to tf32."""
        with tf32(True):
            return self.plain(module)

    def double(self, module: nn.Module) -> dict[str, Tensor]:
        """The gradient of ||dL/du||^2, where L is the sum of squared outputs."""
        value = module(self.u)[0].square().sum()
        by_u = torch.autograd.grad(value, self.u, create_graph=True)[0]
        return self.gradient(module, by_u.square().sum())

    def double_without_cudnn(self) -> dict[str, Tensor]:
        """The double gradient of torch.nn: cuDNN and oneDNN have no second derivative."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oneDNN's switch warns about other processors
            with (
                torch.backends.cudnn.flags(enabled=False),
                torch.backends.mkldnn.flags(enabled=False),
            ):
                return self.double(self.torch_module)

    def gradient(self, module: nn.Module, value: Tensor) -> dict[str, Tensor]:
        """The gradient of a scalar by the inputs and the parameters; None for those not in it."""
        named = {"u": self.u, **dict(module.named_parameters())}
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        return dict(zip(named, gradients, strict=True))

    def contenders(self, peer: str) -> Contenders:
        """The gradients of ours, or of torch.nn; the other peers have no modules."""
        if peer == OURS:
            return {OURS: self._our_runs()}
        if peer == "autograd" and self.device == "cuda":
            return {"torch.nn without cuDNN": {"double": self.double_without_cudnn}}
        if peer != "torch":
            return {}
        plain = functools.partial(self.plain, self.torch_module)
        if self.device == "cpu":
            return {"torch.nn": {"plain": plain, "double": self.double_without_cudnn}}
        in_tf32 = functools.partial(self.plain_in_tf32, self.torch_module)
        # tf32 is cuDNN's default, so it also competes with our plain gradient in float32
        return {
            "cuDNN tf32": {"plain": in_tf32, "plain tf32": in_tf32},
            "cuDNN float32": {"plain": plain},
        }

    def _our_runs(self) -> dict[str, Run]:
        """Our gradients, {kind: its function}."""
        # each run has a module of its own: on a GPU its calls are captured separately
        runs: dict[str, Run] = {
            "plain": functools.partial(self.plain, self.ours),
            "double": functools.partial(self.double, copy.deepcopy(self.ours)),
        }
        if self.device == "cuda":
            runs["plain tf32"] = functools.partial(self.plain_in_tf32, copy.deepcopy(self.ours))
        return runs


def load_jax(device: str) -> JAX:
    """JAX for one device, refused if it is not installed or does not find the device.

    On a CPU it gets one thread if torch has one, on a GPU it does not take all memory. Both are
    environment variables that count only before its first import.
    """
    if device == "cpu" and torch.get_num_threads() == 1:
        single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        flags = os.environ.get("XLA_FLAGS", "")
        if single not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {single}".strip()
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
