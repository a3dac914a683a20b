"""The repository of Johnston & Patel in torch: its ten layers, four penalties and their gradient.

Written from its description: vectors are rows, so that z = x W + u R + b, and weights lie as Keras
stores them, [from, to]. The loss is the mean over the batch; adjoints are its derivatives by
the tensors that hold the states. Derivatives are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]
INPUTS, UNITS, OUTPUTS, STEPS = 2, 5, 3, 6
BETA = 1.3
SWITCH = 2  # steps between W and its inverse


def simple(w: Weights, u: Tensor) -> list[Tensor]:
    """The basic layer."""
    x = w["x0"].expand(len(u), -1)
    states = []
    for t in range(u.shape[1]):
        x = torch.tanh(u[:, t] @ w["R"] + x @ w["W"] + w["bias"])
        states.append(x)
    return states


def tilted(w: Weights, u: Tensor) -> list[Tensor]:
    """The basic layer, and one more "state": log tanh mean exp over the steps."""
    states = simple(w, u)
    mean = torch.stack(states, 1).mul(BETA).exp().mean(1)
    return [*states, torch.log(torch.tanh(mean)) / BETA]


def inverse(w: Weights, u: Tensor) -> list[Tensor]:
    """The basic layer with W^-1 for SWITCH steps, then W, and so on."""
    x = w["x0"].expand(len(u), -1)
    states = []
    inverted = False
    for t in range(u.shape[1]):
        if t % SWITCH == 0:
            inverted = not inverted
        matrix = torch.linalg.inv(w["W"]) if inverted else w["W"]
        x = torch.tanh(u[:, t] @ w["R"] + x @ matrix + w["bias"])
        states.append(x)
    return states


def antisymmetric(w: Weights, u: Tensor) -> list[Tensor]:
    """An Euler step of length 0.01; the input matrix is called V."""
    x = w["x0"].expand(len(u), -1)
    states = []
    M = w["W"] - w["W"].T - 0.01 * torch.eye(UNITS, dtype=u.dtype)
    for t in range(u.shape[1]):
        x = x + 0.01 * torch.tanh(u[:, t] @ w["V"] + x @ M + w["bias"])
        states.append(x)
    return states


def exponential(w: Weights, u: Tensor) -> list[Tensor]:
    """Modrelu of a product with B, which is trained freely; the input matrix is called T."""
    x = w["h0"].expand(len(u), -1)
    states = []
    for t in range(u.shape[1]):
        a = u[:, t] @ w["T"] + x @ w["B"]
        x = torch.sign(a) * torch.relu(a.abs() + w["c"])
        states.append(x)
    return states


def lipschitz(w: Weights, u: Tensor) -> list[Tensor]:
    """An Euler step of length 0.03, beta 0.75, both gammas 0.001; the input matrix is called U."""

    def composed(M: Tensor) -> Tensor:
        return 0.25 * (M + M.T) + 0.75 * (M - M.T) - 0.001 * torch.eye(UNITS, dtype=u.dtype)

    x = w["x0"].expand(len(u), -1)
    states = []
    for t in range(u.shape[1]):
        inner = torch.tanh(u[:, t] @ w["U"] + x @ composed(w["M_W"]) + w["bias"])
        x = x + 0.03 * (x @ composed(w["M_A"]) + inner)
        states.append(x)
    return states


def lstm(w: Weights, u: Tensor) -> list[Tensor]:
    """Keras' LSTMCell, gates i, f, c, o; only h counts as a state."""
    h = u.new_zeros(len(u), UNITS)
    c = u.new_zeros(len(u), UNITS)
    states = []
    for t in range(u.shape[1]):
        z = u[:, t] @ w["kernel"] + h @ w["recurrent"] + w["bias"]
        i, f, new, o = z.split(UNITS, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(new)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return states


def gru(w: Weights, u: Tensor) -> list[Tensor]:
    """Keras' GRUCell with reset_after, gates z, r, h, and two biases."""
    h = u.new_zeros(len(u), UNITS)
    states = []
    for t in range(u.shape[1]):
        z_in, r_in, n_in = (u[:, t] @ w["kernel"] + w["bias"][0]).split(UNITS, 1)
        z_h, r_h, n_h = (h @ w["recurrent"] + w["bias"][1]).split(UNITS, 1)
        z = torch.sigmoid(z_in + z_h)
        new = torch.tanh(n_in + torch.sigmoid(r_in + r_h) * n_h)
        h = z * h + (1 - z) * new
        states.append(h)
    return states


def unicornn(w: Weights, u: Tensor) -> list[Tensor]:
    """Two layers; the state is y1, z1, y2, z2 side by side, and all of it is read."""
    state = u.new_zeros(len(u), 4 * UNITS)
    states = []
    for t in range(u.shape[1]):
        below = u[:, t]
        new = []
        for layer, (y, z) in enumerate([state.split(UNITS, 1)[:2], state.split(UNITS, 1)[2:]], 1):
            length = 0.03 * (0.5 + 0.5 * torch.tanh(w[f"c{layer}"] / 2))
            inner = torch.tanh(below @ w[f"V{layer}"] + w[f"w{layer}"] * y + w[f"b{layer}"])
            z = z - length * (inner + 0.9 * y)
            below = y + length * z
            new += [below, z]
        state = torch.cat(new, 1)
        states.append(state)
    return states


def last(w: Weights, states: list[Tensor]) -> Tensor:
    """What the dense layer reads: the last "state"."""
    return states[-1]


def attended(w: Weights, states: list[Tensor]) -> Tensor:
    """The context vector of temporal attention."""
    x = torch.stack(states, 1)
    alpha = torch.softmax(torch.tanh(x @ w["attention"] + w["attention_bias"])[..., 0], 1)
    return (x * alpha[..., None]).sum(1)


# The penalties: sums over steps of the adjoints [B, n], mean over the batch.


def scaled_variance(adjoints: list[Tensor], p: int) -> Tensor:
    """Sum of squared distances of the norms from their mean."""
    norms = torch.stack([torch.linalg.vector_norm(each, p, 1) for each in adjoints])
    return (norms - norms.mean(0)).square().sum(0).mean()


def pascanu(adjoints: list[Tensor]) -> Tensor:
    """Sum of squared distances of the ratios from 1."""
    norms = [each.norm(dim=1) for each in adjoints]
    ratios = [norms[t] / norms[t + 1] for t in range(len(norms) - 1)]
    return sum(((ratio - 1) ** 2 for ratio in ratios), torch.zeros(())).mean()


def input_output(adjoints: list[Tensor]) -> Tensor:
    """Squared difference of the first and the last norm."""
    return ((adjoints[0].norm(dim=1) - adjoints[-1].norm(dim=1)) ** 2).mean()


# name there -> the function, our name, and our weight for one there, by steps T and samples B
PENALTIES: dict[
    str, tuple[Callable[[list[Tensor]], Tensor], str, Callable[[int, int], float]]
] = {
    "scaled variance L2": (
        lambda adjoints: scaled_variance(adjoints, 2), "variance", lambda T, B: T / B**2),
    "scaled variance L1": (
        lambda adjoints: scaled_variance(adjoints, 1), "variance-l1", lambda T, B: T / B**2),
    "Pascanu": (pascanu, "ratio", lambda T, B: T - 1),
    "input-output": (input_output, "end-points", lambda T, B: 1 / B**2),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A layer of the repository, and the same in ours.

    states    (weights, u [B, T, p]) -> the list of states
    shapes    of its weights
    ours      the options of networks.make
    convert   its weights -> ours, by name
    read      what the dense layer reads
    part      of our state that its adjoints cover
    """

    states: Callable[[Weights, Tensor], list[Tensor]]
    shapes: dict[str, tuple[int, ...]]
    ours: dict[str, object]
    convert: Callable[[Weights], Weights]
    read: Callable[[Weights, list[Tensor]], Tensor] = last
    part: str | None = None

    def draw(self, generator: torch.Generator) -> Weights:
        """Weights of a size that lets every term count."""
        width = 4 * UNITS if self.states is unicornn else UNITS
        shapes = {**self.shapes, "dense": (width, OUTPUTS), "dense_bias": (OUTPUTS,)}
        weights: Weights = {}
        for name, shape in shapes.items():
            weights[name] = 0.6 * torch.randn(*shape, dtype=torch.float64, generator=generator)
        if "W" in weights:  # far from singular, for its inverse
            weights["W"] = torch.linalg.qr(weights["W"]).Q * 1.1
        return {name: weight.requires_grad_() for name, weight in weights.items()}

    def converted(self, w: Weights) -> Weights:
        """All of our weights, with those of the readout."""
        return {**self.convert(w), "V": w["dense"].T, "b_o": w["dense_bias"]}

    def loss(self, w: Weights, u: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The mean loss, and the states."""
        states = self.states(w, u)
        a = self.read(w, states) @ w["dense"] + w["dense_bias"]
        return torch.nn.functional.cross_entropy(a, y), states


def of_simple(w: Weights) -> Weights:
    """R, W, b and x0 of the basic layer."""
    return {"R": w["R"].T, "W": w["W"].T, "b": w["bias"], "x0": w["x0"]}


def of_gru(w: Weights) -> Weights:
    """Keras orders z, r, h; ours is r, u = z, n = h. Biases of z and r are added up."""

    def reordered(x: Tensor) -> Tensor:
        z, r, n = x.split(UNITS)
        return torch.cat([r, z, n])

    own, recurrent = w["bias"]
    inside = torch.cat([recurrent[: 2 * UNITS], torch.zeros(UNITS, dtype=own.dtype)])
    return {
        "R": reordered(w["kernel"].T),
        "W": reordered(w["recurrent"].T),
        "b": reordered(own + inside),
        "p.b_n": recurrent[2 * UNITS :],
    }


def of_unicornn(w: Weights) -> Weights:
    """The weights of both layers."""
    ours: Weights = {}
    for layer in (1, 2):
        path = f"step.levels.{layer - 1}"
        ours[f"{path}.R"] = w[f"V{layer}"].T
        for name in "bwc":
            ours[f"{path}.{name}"] = w[f"{name}{layer}"]
    return ours


RAW = "parametrizations.W.original"
SIMPLE = {"R": (INPUTS, UNITS), "W": (UNITS, UNITS), "bias": (UNITS,), "x0": (UNITS,)}
LAYERS: dict[str, Layer] = {
    "rnn": Layer(simple, SIMPLE, {"cell": "elman", "x0": "learned"}, of_simple),
    "tiltedrnn": Layer(
        tilted,
        SIMPLE,
        {"cell": "elman", "x0": "learned", "readout": "tilted-tanh", "beta": BETA},
        of_simple,
    ),
    "inversernn": Layer(
        inverse,
        SIMPLE,
        {"cell": "inverse", "k": SWITCH, "x0": "learned"},
        lambda w: {"R": w["R"].T, RAW: w["W"].T, "b": w["bias"], "x0": w["x0"]},
    ),
    "antisymmetric": Layer(
        antisymmetric,
        {"V": (INPUTS, UNITS), "W": (UNITS, UNITS), "bias": (UNITS,), "x0": (UNITS,)},
        {"cell": "antisymmetric", "x0": "learned"},
        lambda w: {"R": w["V"].T, RAW: w["W"].T, "b": w["bias"], "x0": w["x0"]},
    ),
    "exponential": Layer(
        exponential,
        {"T": (INPUTS, UNITS), "B": (UNITS, UNITS), "c": (UNITS,), "h0": (UNITS,)},
        {"cell": "exponential", "structure": "free", "x0": "learned", "freeze": "b"},
        lambda w: {"R": w["T"].T, RAW: w["B"].T, "p.c": w["c"], "x0": w["h0"]},
    ),
    "lipschitz": Layer(
        lipschitz,
        {
            "M_A": (UNITS, UNITS),
            "M_W": (UNITS, UNITS),
            "U": (INPUTS, UNITS),
            "bias": (UNITS,),
            "x0": (UNITS,),
        },
        {"cell": "lipschitz", "x0": "learned"},
        lambda w: {
            "R": w["U"].T,
            RAW: torch.cat([w["M_A"].T, w["M_W"].T]),
            "b": w["bias"],
            "x0": w["x0"],
        },
    ),
    "lstm": Layer(
        lstm,
        {"kernel": (INPUTS, 4 * UNITS), "recurrent": (UNITS, 4 * UNITS), "bias": (4 * UNITS,)},
        {"cell": "lstm"},
        lambda w: {"R": w["kernel"].T, "W": w["recurrent"].T, "b": w["bias"]},
        part="h",
    ),
    "gru": Layer(
        gru,
        {"kernel": (INPUTS, 3 * UNITS), "recurrent": (UNITS, 3 * UNITS), "bias": (2, 3 * UNITS)},
        {"cell": "gru"},
        of_gru,
    ),
    "unicornn": Layer(
        unicornn,
        {
            **{f"V{layer}": (width, UNITS) for layer, width in ((1, INPUTS), (2, UNITS))},
            **{f"{name}{layer}": (UNITS,) for layer in (1, 2) for name in "bwc"},
        },
        {"cell": "unicornn-layers", "layers": 2},
        of_unicornn,
    ),
    "temporalattention": Layer(
        simple,
        {**SIMPLE, "attention": (UNITS, 1), "attention_bias": (STEPS, 1)},
        {"cell": "elman", "x0": "learned", "readout": "attention", "attention_steps": STEPS},
        lambda w: {
            **of_simple(w),
            "w_a": w["attention"][:, 0],
            "b_a": w["attention_bias"][:, 0],
        },
        read=attended,
    ),
}
