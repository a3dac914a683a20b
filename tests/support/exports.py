"""Networks and data to export, and what the network itself answers."""

import math

import numpy as np
import torch

import coadjoint as co
from coadjoint.cells.formula import apply_primitive
from coadjoint.networks.factory import construct_network
from coadjoint.tasks.data import Data

SIZES = ((3, 7, [7, 4, 1]), (2, 11, [9, 11]), (1, 1, [1]))  # samples, steps, lengths
STACK = {"layers": 2, "bidirectional": True, "x0": "learned", "hidden": 4}
OPTIONS = {  # what a network may have beside its cell, by a word for it
    "elman-sigmoid": {"cell": "elman", "activation": "sigmoid"},
    "elman-relu": {"cell": "elman", "activation": "relu", **STACK},
    "elman-identity": {"cell": "elman", "activation": "identity"},
    "elman-softplus": {"cell": "elman", "activation": "softplus"},
    "elman-orthogonal": {"cell": "elman", "structure": "orthogonal"},
    "rate-noise": {"cell": "rate", "noise": 0.3},
    "rate-dale": {"cell": "rate", "structure": "dale"},
    "inverse-3": {"cell": "inverse", "k": 3},
    "truncated": {"cell": "lstm-1997", "truncated": True},
    "deep-transition": {
        "cell": "deep-transition",
        "depth": 3,
        "width": 7,
        "shortcut": True,
        "activation": "relu",
    },
    "feedback-gru": {"cell": "gated-feedback", "layers": 3, "unit": "gru"},
    "feedback-lstm": {"cell": "gated-feedback", "unit": "lstm", "x0": "learned"},
    "gru-no-bias": {"cell": "gru", "bias": False},
    "lstm-no-bias": {"cell": "lstm", "bias": False},
    "mixed-residual": {"cell": ["lstm", "gru", "mingru"], "residual": True, "dropout": 0.5},
    "residual-every": {"cell": "cornn", **STACK, "residual": True, "readout": "every"},
    "projected": {"cell": ["lstm", "gru", "lru"], "hidden": [5, 3, 4], "residual": True},
    "projected-both": {"cell": "leaky", **STACK, "hidden": [3, 5], "residual": True},
    "dense-every": {"cell": ["gru", "elman", "lstm"], "dense": True, "readout": "every"},
    "dense-both": {"cell": "gru", **STACK, "hidden": [4, 3], "dense": True},
    "skip-every": {"cell": "lstm", "skip": True, "readout": "every"},
    "mean": {"cell": "gru", "readout": "mean", "bidirectional": True},
    "tilted": {"cell": "leaky", "readout": "tilted", "beta": -2.0},
    "tilted-tanh": {"cell": "elman", "readout": "tilted-tanh"},
    "attention": {"cell": "lstm", "readout": "attention", "attention_steps": 3, "deep": [6, 3]},
    "skip-last": {"cell": "peephole", "skip": True, "deep": [3], "output": "softmax"},
    "double": {"cell": "lru", "dtype": torch.float64, "layers": 2},
    "sigmoid": {"cell": "gru", "output": "sigmoid", "dtype": torch.float64},
}
IMAGES = (
    "conv 8 3 pad 1, tanh, pool 2, groupnorm 4, conv 4 2 stride 2 summed, gelu, flatten, 16, "
    "layernorm, silu, residual 16x2, residual 8, elu, dropout 0.2, softplus"
)
CHAINS = {
    "dense": ({"chain": "8x3", "output": "softmax"}, (5,)),
    "images": ({"chain": IMAGES, "activation": "relu"}, (2, 9, 7)),
    "grey": ({"chain": "conv 3 3, layernorm, avgpool 2, sigmoid"}, (8, 6)),
    "groups": ({"chain": "16, groupnorm 4, relu, 3", "bias": False}, (4,)),
}


def build(cell, **options):
    """A small network of odd sizes, none of whose weights is zero."""
    torch.manual_seed(0)
    # no compiled code, which every cell would need its own of
    options = {"hidden": 5, "inputs": 3, "outputs": 2, "engine": "autograd", **options}
    net = construct_network(cell=cell, **options).eval()
    with torch.no_grad():
        for p in net.parameters():
            p += 0.1 * torch.randn_like(p)
    return net


def build_formula(name):
    """A network whose cell is a formula with this function, also of a parameter alone."""
    shift = 1.0 if name in ("log", "sqrt") else 0.0

    @co.cell(slots="h s", parameters={"k": 0.7})
    def formula(z, v, x, p):
        value = apply_primitive(name, 0.9 * torch.tanh(z + v) + shift)
        return 0.5 * x.s - value * apply_primitive(name, p.k), x.h / (2 + x.s**2) ** 1.5

    torch.manual_seed(0)
    # no compiled code, for a cell that is used once
    return co.Network(
        formula, inputs=3, hidden=5, outputs=2, readout="every", engine="autograd"
    ).eval()


def build_chain(name):
    """A chain of CHAINS, and the shape of its samples."""
    torch.manual_seed(0)
    options, shape = CHAINS[name]
    return construct_network(shape=shape, outputs=3, **options).eval(), shape


def sequences(net, samples, steps):
    """Random sequences [B, T, inputs], in numbers that are the same in float32 and float64."""
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, steps, net.inputs, generator=generator).numpy()


def answers(net, x, lengths):
    """What the network answers, [B, ...] or [B, T, ...], in float64."""
    u = torch.from_numpy(x).to(net.like.dtype).transpose(0, 1)
    with torch.no_grad():
        y = net(u, lengths=torch.tensor(lengths)).y_hat.double().numpy()
    return y.swapaxes(0, 1) if net.readout == "every" else y


def distance(net, found, expected, lengths):
    """The largest difference, relative to the largest answer; the steps after the end are NaN."""
    apart = np.abs(found - expected)
    if net.readout == "every":
        has_step = np.arange(expected.shape[1]) < np.array(lengths)[:, None]
        assert np.isnan(found[~has_step]).all()
        apart = apart[has_step]
    return apart.max() / np.abs(expected).max()


def rows_of_words(count=12, seed=0):
    """A table of sequences with numbers far from 0, words, missing values and uneven times."""
    generator = np.random.default_rng(seed)
    lines = ["id,time,a,b,city,label,load"]
    words = ["Rome", "Oslo", '"Li""ma"']
    labels = ["down", '"\'); raise SystemExit\\n"'.replace('"', '""')]
    for i in range(count):
        time = 0
        for _ in range(3 + i % 5):
            time += int(generator.integers(1, 5))
            a, b = generator.normal([1e6, 0], [1, 1e-3])
            missing = generator.random() < 0.2
            word = words[generator.integers(3)]
            label = f'"{labels[i % 2]}"'
            text = "" if missing else f"{b:.6f}"
            lines.append(f"s{i},{time},{a:.3f},{text},{word},{label},{1e4 + 3 * b:.5f}")
    return "\n".join(lines) + "\n"


def read_words(path, **options):
    """The table of `rows_of_words` as training data, and its columns as an export reads them.

    Returns the data and a list of [T_i, columns] for the sequences in the order of the file.
    """
    text = rows_of_words()
    path.write_text(text)
    reading = {"features": ["a", "b", "city"], "categorical": "city", "missing": "mask"}
    data = Data.read(path, gaps=True, split=(1, 0, 0), **reading, **options)
    columns = data.description.categories["city"]
    found = {}
    before = {}
    for line in text.splitlines()[1:]:
        name, time, a, b, rest = line.split(",", 4)
        word = rest.split(",")[0].strip('"').replace('""', '"')
        gap = float(time) - before[name] if name in before else math.nan
        before[name] = float(time)
        row = [float(a), float(b) if b else math.nan, columns.index(word), gap]
        found.setdefault(name, []).append(row)
    return data, [np.array(rows) for rows in found.values()]


def pad(rows):
    """Sequences as one array [B, T, columns], with numbers that nothing may read, and lengths."""
    lengths = np.array(list(map(len, rows)))
    x = np.full((len(rows), lengths.max(), rows[0].shape[1]), 1e30)
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    return x, lengths


def build_forecaster(**options):
    """A model of kind "next" that reads earlier rows, with a gap in a column, and its sequences."""
    rows = np.random.default_rng(5).normal(size=(3, 20, 2)).cumsum(1) + 50
    rows[:, 4, 1] = np.nan
    reading = {"kind": "next", "missing": "mask", "split": (1, 0, 0)}
    data = Data.of(rows, **reading, **options)
    sizes = {"inputs": data.inputs, "outputs": data.outputs}
    return co.Model(build("gru", readout="every", skip=True, **sizes), data), rows


LAGS = ({"lags": 1}, {"lags": (2, 25)}, {"lags": 7, "target": "u1", "horizon": 2})
