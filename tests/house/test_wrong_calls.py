"""Every public call with a wrong argument raises one of our errors in one line.

Arguments of the wrong type or value never reach an error of another library.
"""

import math
import warnings

import numpy as np
import pytest
import torch

import coadjoint as co
from paths import DATA

T, B, I, D, O = 4, 2, 2, 3, 2


def sparse(*shape):
    return torch.ones(*shape).to_sparse()


def compressed(*shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ones(*shape).to_sparse_csr()


def nested(*shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(*shape[1:])] * shape[0])


class Odd:
    """Nothing that anything expects."""

    def __repr__(self):
        return "Odd()"


def series_task():
    return co.tasks.Data.of(np.sin(np.arange(40.0)), kind="next", window=5)


def series_net():
    return co.Network("elman", inputs=1, hidden=2, outputs=1, readout="every")


# what an argument may be, and values that none of its kind takes

WHOLE = (0, -1, 1.5, True, "x", [], Odd(), math.nan, 10**30)
SOME = WHOLE[:-1]  # torch would make 10**30 layers, one after the other
SEED = (-1, 1.5, "x", None, [], Odd(), 2**64)
REAL = ("x", None, [], Odd(), math.nan, math.inf, torch.ones(2))
NAME = ("no such name", "", 3, None, [], Odd(), b"x")
NAME_OR_NONE = tuple(value for value in NAME if value is not None)
KIND = ("x", 3, [], Odd())  # an object of one of our classes
NET = (None, "x", 3, [], Odd(), torch.nn.Linear(2, 2))
INPUT = (
    None,
    "x",
    3,
    1.5,
    Odd(),
    {},
    [],
    [[1.0]],
    sparse(T, B, I),
    nested(T, B, I),
    torch.ones(T, B, I, dtype=torch.complex64),
    torch.ones(T, B, I, dtype=torch.bool),
    torch.ones(T, B, I, device="meta"),
    np.ones((T, B, I)),
    torch.ones(T, B, I + 1),
    torch.tensor(1.0),
    torch.full((T, B, I), math.nan),
    torch.ones(T, B, I).half(),
)
TARGET = (
    "x",
    1.5,
    Odd(),
    {},
    [[1.0], [1.0, 2.0]],
    sparse(B, O),
    compressed(B, O),
    nested(B, O),
    torch.ones(B, O, dtype=torch.complex64),
    torch.ones(B, O, device="meta"),
    torch.ones(B + 1, O),
    torch.ones(B, O + 1),
    torch.tensor(1.0),
    torch.full((B, O), math.nan),
)
LENGTHS = (
    "x",
    3,
    1.5,
    Odd(),
    {},
    [1.0, 2.0],
    [T, "x"],
    [T, T, T],
    [0, T],
    sparse(B).long(),
    nested(B, 1),
)
MASK = (
    "x",
    3,
    1.5,
    Odd(),
    {},
    torch.ones(B + 1),
    torch.full((B,), math.nan),
    sparse(B),
    nested(B, 1),
    torch.ones(B, device="meta"),
)
STATE = (
    "x",
    3,
    1.5,
    Odd(),
    {},
    [0.0],
    torch.ones(D + 1),
    torch.full((D,), math.nan),
    sparse(D),
    nested(B, D),
    torch.ones(D).double(),
)
LOSS = ("no such loss", 3, None, [], Odd())
DTYPE = ("x", 3, [], Odd(), torch.int64, torch.float16, torch.complex64)
DEVICE = ("no such device", -7, [], Odd(), 1.5)
FOLDER = (3, 1.5, [], Odd())
SWITCH = ()  # anything is true or false


def net(cell="elman", readout="last", **options):
    torch.manual_seed(0)
    return co.Network(
        cell, **({"inputs": I, "hidden": D, "outputs": O, "readout": readout} | options)
    )


def u():
    return torch.linspace(-1, 1, T * B * I).reshape(T, B, I)


def y():
    return torch.ones(B, O)


def batch(**options):
    return co.Batch(u(), y(), **options)


def moved():
    """An output and the input it comes from."""
    x = torch.ones(3, requires_grad=True)
    return x**2, x


def evaluation():
    return co.BPTT()(net(), batch(), "squared")


def task():
    return co.tasks.XOR(10)


def xor_net():
    t = task()
    return co.Network(
        "elman", inputs=t.inputs, hidden=D, outputs=t.outputs, readout=t.readout, output=t.output
    )


def trajectory():
    return net()(u())


def costates():
    return trajectory().costates("squared", y())


class Few(co.tasks.Collection):
    """Four sequences."""

    name = "few"
    inputs, outputs = I, O

    def __init__(self):
        super().__init__({"train": co.tasks.Sequences([np.ones((T, I))] * 4, [0, 1, 0, 1])})


def recorded():
    """A tape, and losses that depend on what it recorded."""
    module = co.nn.RNN(I, D)
    with co.record(module) as tape:
        out, _ = module(u())
    return tape, out.square().sum((0, 2))


def recorded_penalty(G):
    tape, loss = recorded()
    return tape.penalty(G, loss)


def run_method(method):
    def call(network, u, y, loss, lengths=None, mask=None, weight=None, x0=None, reduce="sum"):
        return method(
            network,
            co.Batch(u, y, lengths=lengths, mask=mask, weight=weight, x0=x0, reduce=reduce),
            loss,
        )

    return call


METHOD = {
    "network": (net, NET),
    "u": (u, INPUT),
    "y": (y, TARGET),
    "loss": ("squared", LOSS),
    "lengths": (None, LENGTHS),
    "mask": (None, MASK),
    "weight": (None, MASK),
    "x0": (None, STATE),
    "reduce": ("sum", NAME),
}
RECURRENT = {
    "input_size": (I, WHOLE),
    "hidden_size": (D, (*WHOLE, 10**9)),
    "num_layers": (1, SOME),
    "bias": (True, SWITCH),
    "batch_first": (False, SWITCH),
    "dropout": (0.0, (*REAL, -0.5, 2.0)),
    "bidirectional": (False, SWITCH),
    "engine": ("auto", NAME),
    "init": ("torch", NAME),
    "recurrent_dropout": (0.0, (*REAL, -0.5, 2.0)),
    "zoneout": (0.0, ("x", None, Odd(), -0.5, 2.0)),
    "layer_norm": (False, SWITCH),
    "dtype": (None, DTYPE),
    "device": (None, DEVICE),
}
TRAIN = {
    "net": (xor_net, NET),
    "task": (task, KIND),
    "gradient": (None, KIND),
    "optimiser": (None, KIND),
    "steps": (1, WHOLE),
    "batch": (2, WHOLE),
    "accumulate": (1, WHOLE),
    "clip": (None, ("x", -1.0, 0, [], math.nan)),
    "clip_value": (None, ("x", -1.0, 0, [], math.nan)),
    "clip_mean": (None, ("x", -1.0, 0, [], math.nan)),
    "weight_noise": (0.0, (*REAL, -1.0)),
    "easiest": (None, KIND),
    "gradients": (None, ("x", -1, 0, [], math.nan)),
    "seconds": (None, ("x", -1, 0, [], math.nan)),
    "seed": (0, SEED),
    "every": (1, WHOLE),
    "tests": (4, WHOLE),
    "confirm": (4, WHOLE),
    "probes": (2, WHOLE),
    "patience": (None, WHOLE),
    "select": (None, (3, "x", [], Odd())),
    "nonfinite": ("stop", NAME),
    "folder": (None, FOLDER),
    "checkpoint": (1, WHOLE),
    "keep": (1, WHOLE),
    "resume": (False, (True,)),
    "display": (False, ("x", None, 3, [], Odd())),
    "loggers": ((), ("x", None, 3, print, [3], ["x"])),
    "description": (None, ("x", 3, [])),
    "command": (None, (3, [], Odd())),
}
STREAM = [(torch.ones(I), torch.ones(O))] * 3
LEARN = {
    "net": (lambda: net(readout="every"), NET),
    "stream": (
        STREAM,
        (
            None,
            3,
            1.5,
            "x",
            "abc",
            [],
            [3],
            [1.0, 2.0],
            ["x"],
            ["ab"],
            [(torch.ones(I),)],
            [(torch.ones(I), torch.ones(O), 3)],
            [torch.ones(2, 3)],
            [(None, torch.ones(O))],
            [("x", torch.ones(O))],
            [(torch.ones(I), "x")],
            [(torch.ones(I + 1), torch.ones(O))],
            [(torch.ones(I), torch.ones(O + 1))],
            [(sparse(I), torch.ones(O))],
            [(torch.ones(I), sparse(O))],
            [(nested(2, I), torch.ones(O))],
            [(torch.full((I,), math.nan), torch.ones(O))],
            [{}],
            [Odd()],
            Odd(),
            [(torch.ones(I), None)],
            [(torch.ones(I), {})],
            {1: 2},
        ),
    ),
    "loss": ("squared", LOSS),
    "learner": (None, KIND),
    "optimiser": (None, KIND),
    "clip": (None, ("x", -1.0, 0, [], math.nan)),
    "steps": (None, WHOLE),
    "batch": (1, (*WHOLE, 2)),
    "every": (1, WHOLE),
    "window": (2, WHOLE),
    "score": (None, ("x", 3, lambda a: 3, lambda a: {"x": "y"})),
    "seed": (0, SEED),
    "folder": (None, FOLDER),
    "checkpoint": (1, WHOLE),
    "keep": (1, WHOLE),
    "resume": (False, (True,)),
    "display": (False, ("x", None, 3, [], Odd())),
    "description": (None, ("x", 3, [])),
    "command": (None, (3, [], Odd())),
}
NETWORK = {
    "cell": ("elman", ("no such cell", "", 3, None, [], Odd())),
    "inputs": (I, WHOLE),
    "hidden": (D, (*WHOLE, 10**9, 10**12)),
    "outputs": (O, (*WHOLE, 10**12)),
    "activation": (None, ("no such name", "", 3, [], Odd())),
    "readout": ("last", NAME),
    "output": ("identity", ("no such name", 3, None, [], Odd())),
    "x0": (
        "zero",
        (
            "x",
            3,
            None,
            [],
            Odd(),
            torch.ones(D + 1),
            sparse(D),
            nested(1, D),
            torch.full((D,), math.nan),
        ),
    ),
    "bias": (True, SWITCH),
    "mask": (None, ("x", 3, [], Odd(), torch.ones(D, D + 1), sparse(D, D), nested(D, D))),
    "structure": (None, ("no such name", 3, [], Odd())),
    "skip": (False, SWITCH),
    "beta": (None, ("x", [], Odd(), math.nan)),
    "steps": (None, WHOLE),
    "deep": ((), ("x", 0, -1, 1.5, [0], ["x"], Odd(), [10**12])),
    "dropout": (0.0, (*REAL, -0.5, 1.0, 2.0)),
    "engine": ("auto", NAME),
    "slots": (None, WHOLE),
    "dtype": (None, DTYPE),
    "device": (None, DEVICE),
}

EXTRAS = (
    "engine",
    "init",
    "recurrent_dropout",
    "zoneout",
    "layer_norm",
    "forget_bias",
)  # what torch.nn does not have
UNMADE = (  # calls of which the table has no good one: they take files, or other networks
    "Tape.costates",
    "report.save",
    "diagnostics.plot",
    "diagnostics.paths",
    "online.read",
    "tasks.Music",
    "tasks.Digits",
    "report.write",
    "report.markdown",
    "report.read_rows",
)

# name: (what is called, {argument: (a good value or what makes one, wrong values)})
CALLS = {
    "BPTT": (co.BPTT, {"segments": (None, (0, -1, 1.5, "x", [], Odd()))}),
    "BP": (co.BP, {"segments": (None, (0, -1, 1.5, "x", [], Odd()))}),
    "Truncated": (co.Truncated, {"k1": (1, (*WHOLE, None)), "k2": (2, (*WHOLE, None))}),
    "Shared": (
        co.Shared,
        {
            "method": (co.BPTT, (None, *KIND)),
            "shards": (None, (0, -1, 1.5, "x", [], Odd())),
        },
    ),
    "Penalised": (
        co.Penalised,
        {
            "G": ("log-ratio", ("no such penalty", "", 3, None, [], Odd())),
            "weight": (1.0, (*REAL, -1.0, -1)),
            "segments": (None, (0, -1, 1.5, "x", [], Odd())),
            "pretrain": (0, (-1, 1.5, "x", None, [])),
            "hold": (None, ("state", "", 3, [], Odd())),
        },
    ),
    "Network": (co.Network, NETWORK),
    "Network of a step function": (
        lambda **given: co.Network(torch.nn.RNNCell(I, D), inputs=I, hidden=D, outputs=O, **given),
        {"slots": (1, WHOLE), "readout": ("last", NAME)},
    ),
    "Stack": (
        co.Stack,
        {
            "cells": (["elman", "gru"], ("no such cell", 3, None, [], Odd(), [3], ["x"])),
            "hidden": (D, (*WHOLE, [D], ["x", D], [10**12, D])),
            **{
                name: NETWORK[name]
                for name in (
                    "inputs",
                    "outputs",
                    "readout",
                    "output",
                    "dropout",
                    "engine",
                    "dtype",
                    "device",
                    "deep",
                    "activation",
                )
            },
            "x0": ("zero", ("x", 3, None, [])),
            "structure": (None, ("no such name", 3, [])),
            "bidirectional": (False, SWITCH),
            "residual": (False, SWITCH),
            "dense": (False, SWITCH),
        },
    ),
    "EncoderDecoder": (
        co.EncoderDecoder,
        {
            "cell": ("gru", ("no such cell", 3, None, [], Odd())),
            "decoder": (None, ("no such cell", 3, [], Odd())),
            "layers": (1, WHOLE),
            "embedding": (None, WHOLE),
            "attention": (True, SWITCH),
            **{
                name: NETWORK[name]
                for name in (
                    "inputs",
                    "hidden",
                    "outputs",
                    "dropout",
                    "deep",
                    "engine",
                    "dtype",
                    "device",
                )
            },
        },
    ),
    "Reservoir": (
        co.Reservoir,
        {
            "inputs": (I, WHOLE),
            "hidden": (D, (*WHOLE, 10**12)),
            "outputs": (O, (*WHOLE, 10**12)),
            "radius": (0.9, (*REAL, -1.0)),
            "leak": (1.0, (*REAL, -1.0, 2.0)),
            "density": (0.5, (*REAL, -1.0, 2.0)),
            "input_scale": (1.0, REAL),
            "bias_scale": (0.0, REAL),
            "activation": ("tanh", ("no such name", 3, [], Odd())),
            "readout": ("every", NAME),
            "washout": (0, (-1, 1.5, "x", None, [])),
            "ridge": (1e-8, (*REAL, -1.0)),
            "expansion": ("linear", NAME),
            "seed": (0, SEED),
            "dtype": (None, DTYPE),
            "device": (None, DEVICE),
        },
    ),
    "Network.forward": (
        lambda u, lengths, x0: net()(u, lengths, x0),
        {"u": (u, INPUT), "lengths": (None, LENGTHS), "x0": (None, STATE)},
    ),
    "Stack.forward": (
        lambda u, lengths, x0: co.Stack(["elman"], inputs=I, hidden=D, outputs=O)(u, lengths, x0),
        {"u": (u, INPUT), "lengths": (None, LENGTHS), "x0": (None, STATE)},
    ),
    "EncoderDecoder.forward": (
        lambda u, lengths: co.EncoderDecoder(inputs=I, hidden=D, outputs=O)(u, lengths),
        {"u": (u, INPUT), "lengths": (None, LENGTHS)},
    ),
    "Reservoir.forward": (
        lambda u, lengths, x0: co.Reservoir(I, D, O)(u, lengths, x0),
        {"u": (u, INPUT), "lengths": (None, LENGTHS), "x0": (None, STATE)},
    ),
    "Reservoir.fit": (
        lambda u, y, lengths: co.Reservoir(I, D, O).fit(u, y, lengths),
        {
            "u": (u, INPUT),
            "y": (
                lambda: torch.ones(T, B, O),
                (
                    "x",
                    3,
                    Odd(),
                    {},
                    torch.ones(B, O),
                    sparse(T, B, O),
                    nested(T, B, O),
                    torch.full((T, B, O), math.nan),
                ),
            ),
            "lengths": (None, LENGTHS),
        },
    ),
    "Reservoir.generate": (
        lambda u, steps: (
            co.Reservoir(I, D, I).fit(torch.ones(T, B, I), torch.ones(T, B, I)).generate(u, steps)
        ),
        {"u": (u, INPUT), "steps": (2, (*WHOLE, None))},
    ),
    "Trajectory.loss": (
        lambda loss, y, mask, reduce: trajectory().loss(loss, y, mask=mask, reduce=reduce),
        {
            "loss": ("squared", LOSS),
            "y": (y, TARGET),
            "mask": (None, MASK),
            "reduce": ("sum", NAME),
        },
    ),
    "Trajectory.costates": (
        lambda loss, y, mask, reduce: trajectory().costates(loss, y, mask=mask, reduce=reduce),
        {
            "loss": ("squared", (*LOSS, sparse(B), nested(B, 1))),
            "y": (y, TARGET),
            "mask": (None, MASK),
            "reduce": ("sum", NAME),
        },
    ),
    "Trajectory.push": (
        lambda du: trajectory().push(du),
        {"du": (u, (None, "x", 3, [], Odd(), torch.ones(T, B), sparse(T, B, I), nested(T, B, I)))},
    ),
    "Costates.norms": (lambda p: costates().norms(p), {"p": (2, (0, 3, "x", None, [], Odd()))}),
    "Batch.select": (
        lambda index, readout: batch().select(index, readout),
        {"index": ([0], ("x", None, [5], [-9], Odd(), [1.5])), "readout": ("last", NAME)},
    ),
    "Batch.to": (
        lambda dtype, device: batch().to(dtype, device),
        {"dtype": (torch.float64, ("x", 3, [], Odd())), "device": ("cpu", DEVICE)},
    ),
    **{
        f"{type(method).__name__}(...)": (run_method(method), METHOD)
        for method in (co.BPTT(), co.RTRL(), co.Truncated(1, 2), co.Penalised("log-ratio", 0.1))
    },
    "Shared(...)": (run_method(co.Shared(co.BPTT(), 2)), METHOD),
    "BPTT(segments)(...)": (run_method(co.BPTT(segments=2)), METHOD),
    "Penalised(segments)(...)": (run_method(co.Penalised("variance", 0.1, segments=2)), METHOD),
    "Method.per_sample": (
        lambda network, loss: co.BPTT().per_sample(network, batch(), loss),
        {"network": (net, NET), "loss": ("squared", LOSS)},
    ),
    "Method of a batch": (
        lambda batch: co.BPTT()(net(), batch, "squared"),
        {"batch": (batch, NET)},
    ),
    "Evaluation.write_grad": (
        lambda network: evaluation().write_grad(network),
        {"network": (net, NET)},
    ),
    "Temporal.at": (lambda t: evaluation().temporal_components().at(t), {"t": (1, (*WHOLE, None))}),
    "Temporal.weighted": (
        lambda w: evaluation().temporal_components().weighted(w),
        {
            "w": (
                lambda: torch.ones(T),
                ("x", None, 3, [], Odd(), torch.ones(T + 1), sparse(T), nested(T, 1)),
            )
        },
    ),
    "RTRL.stream": (
        lambda network, batch, x0: co.RTRL().stream(network, batch, x0),
        {"network": (net, NET), "batch": (2, (*WHOLE, None)), "x0": (None, STATE)},
    ),
    "Truncated.stream": (
        lambda network, batch, x0: co.Truncated(1, 2).stream(network, batch, x0),
        {
            "network": (lambda: net(readout="every"), NET),
            "batch": (2, (*WHOLE, None)),
            "x0": (None, STATE),
        },
    ),
    "Stream.step": (
        lambda u, y, loss: co.RTRL().stream(net(), B).step(u, y, loss),
        {
            "u": (
                lambda: torch.ones(B, I),
                (
                    None,
                    "x",
                    3,
                    [],
                    Odd(),
                    sparse(B, I),
                    nested(B, I),
                    torch.ones(B),
                    torch.ones(B, I).half(),
                    torch.ones(B, I, device="meta"),
                ),
            ),
            "y": (y, TARGET[:-1]),
            "loss": ("squared", LOSS),
        },
    ),
    "Stream.reset": (
        lambda rows: co.RTRL().stream(net(), B).reset(rows),
        {"rows": ([0], ("x", [5], [-1], [1.5], Odd(), {}))},
    ),
    "Windows.take": (
        lambda u, y, loss: co.Truncated(1, 2).stream(net(readout="every"), B).take(u, y, loss),
        {
            "u": (
                lambda: torch.ones(B, I),
                (None, "x", 3, [], Odd(), sparse(B, I), nested(B, I), torch.ones(B)),
            ),
            "y": (y, TARGET),
            "loss": ("squared", LOSS),
        },
    ),
    "record": (
        co.record,
        {"module": (lambda: co.nn.RNN(I, D), (None, "x", 3, [], Odd(), torch.ones(2)))},
    ),
    "nn.RNN": (co.nn.RNN, {**RECURRENT, "nonlinearity": ("tanh", NAME)}),
    "nn.LSTM": (co.nn.LSTM, {**RECURRENT, "forget_bias": (None, ("x", [], Odd(), math.nan))}),
    "nn.GRU": (co.nn.GRU, RECURRENT),
    **{
        f"nn.{name}.forward": (
            lambda input, hx, name=name: getattr(co.nn, name)(I, D)(input, hx),
            {
                "input": (u, tuple(v for v in INPUT)),
                "hx": (
                    None,
                    ("x", 3, Odd(), {}, torch.ones(1, B, D + 1), sparse(1, B, D), nested(1, B, D)),
                ),
            },
        )
        for name in ("RNN", "LSTM", "GRU")
    },
    **{
        f"nn.{name}": (
            getattr(co.nn, name),
            {
                "input_size": (I, WHOLE),
                "hidden_size": (D, (*WHOLE, 10**9)),
                "dtype": (None, DTYPE),
                "device": (None, DEVICE),
            },
        )
        for name in ("RNNCell", "LSTMCell", "GRUCell")
    },
    **{
        f"nn.{name}.forward": (
            lambda input, name=name: getattr(co.nn, name)(I, D)(input),
            {
                "input": (
                    lambda: torch.ones(B, I),
                    (
                        None,
                        "x",
                        3,
                        [],
                        Odd(),
                        sparse(B, I),
                        nested(B, I),
                        torch.ones(B, I + 1),
                        torch.ones(B, I).half(),
                        torch.ones(T, B, I),
                    ),
                )
            },
        )
        for name in ("RNNCell", "LSTMCell", "GRUCell")
    },
    "nn.replace": (
        co.nn.replace,
        {"model": (lambda: torch.nn.RNN(I, D), (None, "x", 3, [], Odd()))},
    ),
    **{
        f"penalties.{name}": (
            penalty,
            {"lam": (costates, (None, "x", 3, [], Odd(), torch.ones(T, B, D)))},
        )
        for name, penalty in sorted(co.penalties.PENALTIES.items())
    },
    "penalties.barrier": (co.penalties.barrier, {"switch": (1e-5, (*REAL, -1.0, 0))}),
    "penalties.tangent": (
        lambda v: co.Penalised(co.penalties.tangent(v), 0.1)(net(), batch(), "squared"),
        {"v": (u, ("x", 3, [], Odd(), sparse(T, B, I), nested(T, B, I), torch.ones(3)))},
    ),
    "penalties.tangent of drawn directions": (
        lambda beta, K: co.Penalised(co.penalties.tangent(None, beta, K), 0.1)(
            net(), batch(), "squared"
        ),
        {"beta": (0.5, ("x", None, [], Odd(), torch.ones(7))), "K": (2, ("x", 0, -1, 1.5, None))},
    ),
    "penalties.tangent_loss": (
        co.penalties.tangent_loss,
        {"change": (torch.ones(3, 2), (None, "x", 3, Odd(), torch.tensor(1.0)))},
    ),
    "penalties.output_change": (
        lambda v: co.penalties.output_change(*moved(), v),
        {"v": (torch.ones(3), (None, "x", 3, Odd(), torch.ones(4)))},
    ),
    "penalties.shifts": (
        co.penalties.shifts,
        {"x": (torch.ones(2, 9), (None, "x", 3, Odd(), torch.ones(2, 8), torch.ones(3)))},
    ),
    "Penalty.per": (
        lambda unit: co.penalties.PENALTIES["variance"].per(unit),
        {"unit": ("sqrt n", (None, "x", 3, [], Odd()))},
    ),
    "penalties.of_output": (
        co.penalties.of_output,
        {"G": ("variance", ("no such penalty", 3, None, [], Odd()))},
    ),
    "penalties.inverse_time": (
        co.penalties.inverse_time,
        {"start": (1.0, (*REAL, -1.0)), "rate": (1.0, (*REAL, -1.0))},
    ),
    "penalties.exponential": (
        co.penalties.exponential,
        {"start": (1.0, (*REAL, -1.0)), "decay": (0.9, (*REAL, -1.0))},
    ),
    "penalties.linear": (
        co.penalties.linear,
        {"start": (1.0, (*REAL, -1.0)), "end": (0.0, (*REAL, -1.0)), "steps": (5, (*WHOLE, None))},
    ),
    "penalties.Steered": (
        co.penalties.Steered,
        {
            "start": (1.0, (*REAL, -1.0)),
            "target": (0.1, REAL),
            "gain": (0.01, (*REAL, -1.0)),
            "low": (1e-4, (*REAL, -1.0)),
            "high": (1e4, ("x", None, [], Odd(), math.nan, -1.0)),
        },
    ),
    "Penalty.on": (
        lambda what: co.penalties.PENALTIES["variance"].on(what),
        {"what": ("top", ("no such", 3, [], Odd()))},
    ),
    "losses.huber": (co.losses.huber, {"delta": (1.0, (*REAL, -1.0, 0))}),
    "losses.pinball": (co.losses.pinball, {"quantiles": ([0.5], ([], [0], [1.5], ["a"]))}),
    "optimisers.optimiser": (
        co.optimisers.optimiser,
        {
            "name": ("adam", NAME),
            "lr": (1e-3, ("x", [], Odd(), math.nan, -1.0)),
            "schedule": (None, KIND),
            "direction": ("steepest", NAME),
            "rule": (None, KIND),
            "weight_decay": (0.0, ("x", [], Odd(), -1.0, math.nan)),
        },
    ),
    **{
        f"optimisers.{name}": (
            lambda lr, name=name: getattr(co.optimisers, name)(lr),
            {"lr": (1e-3, ("x", [], Odd(), math.nan, -1.0, math.inf))},
        )
        for name in ("sgd", "adam", "momentum", "nesterov", "rmsprop", "adagrad")
        if hasattr(co.optimisers, name)
    },
    "optimisers.hessian_free": (
        co.optimisers.hessian_free,
        {
            "damping": (1.0, (*REAL, -1.0)),
            "structural": (0.1, (*REAL, -1.0)),
            "cg": (5, (*WHOLE, None)),
        },
    ),
    "optimisers.hessian_free.step": (
        lambda network, batch, loss: co.optimisers.hessian_free(cg=2).step(network, batch, loss),
        {"network": (net, NET), "batch": (batch, NET), "loss": ("squared", LOSS)},
    ),
    "optimisers.constant": (co.optimisers.constant, {"warmup": (0, (-1, 1.5, "x", None, []))}),
    "optimisers.exponential": (
        co.optimisers.exponential,
        {"decay": (0.9, (*REAL, -1.0)), "warmup": (0, (-1, 1.5, "x", None, []))},
    ),
    "optimisers.inverse_time": (co.optimisers.inverse_time, {"decay": (0.9, (*REAL, -1.0))}),
    "optimisers.linear": (co.optimisers.linear, {"end": (0.0, (*REAL, -1.0))}),
    "optimisers.cosine": (co.optimisers.cosine, {"end": (0.0, (*REAL, -1.0))}),
    "optimisers.plateau": (
        co.optimisers.plateau,
        {"decay": (0.5, (*REAL, -1.0)), "patience": (5, (*WHOLE, None))},
    ),
    "diagnostics.evaluate": (
        co.diagnostics.evaluate,
        {
            "net": (xor_net, NET),
            "task": (task, KIND),
            "samples": (2, (*WHOLE, None)),
            "seed": (0, SEED),
        },
    ),
    "diagnostics.examine": (
        lambda e, names: co.diagnostics.examine(e, names),
        {"e": (evaluation, KIND), "names": (["decay"], ("x", 3, ["x"], [3], Odd()))},
    ),
    **{
        f"diagnostics.{name}": (
            lambda e, name=name: co.diagnostics.DIAGNOSTICS[name](e),
            {"e": (evaluation, (None, *KIND))},
        )
        for name in co.diagnostics.DIAGNOSTICS
    },
    "diagnostics.jacobians": (
        lambda samples: co.diagnostics.jacobians(evaluation(), samples),
        {"samples": (2, (*WHOLE, None))},
    ),
    "diagnostics.singular_values": (
        lambda samples, points, end: co.diagnostics.singular_values(
            evaluation(), samples, points, end
        ),
        {
            "samples": (2, (*WHOLE, None)),
            "points": (3, (*WHOLE, None)),
            "end": (None, WHOLE),
        },
    ),
    "diagnostics.lyapunov": (
        lambda samples, end: co.diagnostics.lyapunov(evaluation(), samples, end),
        {"samples": (2, (*WHOLE, None)), "end": (None, WHOLE)},
    ),
    "diagnostics.bounds": (
        lambda samples: co.diagnostics.bounds(evaluation(), samples),
        {"samples": (2, (*WHOLE, None))},
    ),
    "diagnostics.saturation": (
        lambda flat: co.diagnostics.saturation(evaluation(), flat),
        {"flat": (0.05, (*REAL, -1.0))},
    ),
    "diagnostics.along": (
        lambda steps: co.diagnostics.along(evaluation(), steps),
        {"steps": (None, ("x", 3, Odd(), ["x"]))},
    ),
    "diagnostics.landscape": (
        lambda seed, points, reach, layer: co.diagnostics.landscape(
            evaluation(), seed, points, reach, layer
        ),
        {
            "seed": (0, SEED),
            "points": (3, (*WHOLE, None)),
            "reach": (1.0, (*REAL, -1.0)),
            "layer": (None, WHOLE),
        },
    ),
    "report.save": (
        lambda folder, found: co.report.save(folder, found),
        {"folder": (None, (3, 1.5, [], Odd())), "found": (None, KIND)},
    ),
    "diagnostics.plot": (
        co.diagnostics.plot,
        {"found": (lambda: co.diagnostics.decay(evaluation()), (None, *KIND))},
    ),
    "curvature.Curvature": (
        co.curvature.Curvature,
        {"net": (net, NET), "batch": (batch, NET), "loss": ("squared", LOSS)},
    ),
    **{
        f"Curvature.{name}": (
            lambda v, name=name: getattr(co.curvature.Curvature(net(), batch(), "squared"), name)(
                v
            ),
            {
                "v": (
                    lambda: torch.ones(sum(p.numel() for p in net().parameters())),
                    (
                        None,
                        "x",
                        3,
                        [],
                        Odd(),
                        torch.ones(2),
                        sparse(32),
                        nested(32, 1),
                        torch.ones(32).double(),
                    ),
                )
            },
        )
        for name in ("gauss_newton", "structural", "product", "hessian")
    },
    "Curvature.diagonal": (
        lambda probes, seed: co.curvature.Curvature(net(), batch(), "squared").diagonal(
            probes, seed
        ),
        {"probes": (1, (*WHOLE, None)), "seed": (0, SEED)},
    ),
    "curvature.conjugate_gradients": (
        co.curvature.conjugate_gradients,
        {
            "A": (lambda: lambda v: v, ("x", 3, None, Odd())),
            "b": (lambda: torch.ones(3), ("x", 3, None, [], Odd(), sparse(3), nested(3, 1))),
            "most": (3, (*WHOLE, None)),
            "progress": (1e-3, REAL),
            "keep": (1.3, REAL),
        },
    ),
    "segments.predict": (
        co.gradients.memory.predict,
        {
            "net": (net, NET),
            "T": (T, (*WHOLE, None)),
            "B": (B, (*WHOLE, None)),
            "method": (co.BPTT, (None, *KIND)),
        },
    ),
    "curriculum.Easiest": (
        co.training.curriculum.Easiest,
        {
            "start": (0.5, (*REAL, -1.0, 0.0, 2.0)),
            "steps": (5, (*WHOLE, None)),
            "by": ("loss", ("no such", 3, None, [], Odd())),
        },
    ),
    "initialisers.initialise": (
        co.initialisers.initialise,
        {
            "net": (net, NET),
            "name": ("orthogonal", NAME),
            "seed": (0, SEED),
            "radius": (1.0, ("x", None, [], Odd(), math.nan)),
        },
    ),
    "initialisers.spectral_": (
        co.initialisers.spectral_,
        {
            "W": (
                lambda: torch.ones(D, D),
                (None, "x", 3, [], Odd(), torch.ones(2, 3), sparse(D, D), nested(D, D)),
            ),
            "radius": (1.0, (*REAL, -1.0)),
            "generator": (None, ("x", 3, Odd())),
        },
    ),
    "initialisers.gaussian_": (
        co.initialisers.gaussian_,
        {
            "W": (lambda: torch.ones(D, D), (None, "x", 3, [], Odd(), sparse(D, D), nested(D, D))),
            "std": (1.0, (*REAL, -1.0)),
        },
    ),
    "initialisers.orthogonal_": (
        co.initialisers.orthogonal_,
        {
            "W": (lambda: torch.ones(D, D), (None, "x", 3, [], Odd(), sparse(D, D), nested(D, D))),
            "gain": (1.0, REAL),
        },
    ),
    "initialisers.identity_": (
        co.initialisers.identity_,
        {
            "W": (
                lambda: torch.ones(D, D),
                (None, "x", 3, [], Odd(), torch.ones(3), sparse(D, D), nested(D, D)),
            ),
            "gain": (1.0, REAL),
        },
    ),
    "initialisers.rotation_": (
        co.initialisers.rotation_,
        {
            "W": (
                lambda: torch.ones(D, D),
                (None, "x", 3, [], Odd(), torch.ones(2, 3), sparse(D, D), nested(D, D)),
            )
        },
    ),
    "initialisers.sparse_": (
        co.initialisers.sparse_,
        {
            "W": (
                lambda: torch.ones(D, D),
                (None, "x", 3, [], Odd(), torch.ones(2, 3), sparse(D, D), nested(D, D)),
            ),
            "radius": (1.0, (*REAL, -1.0)),
            "links": (2, (*WHOLE, None)),
        },
    ),
    "parametrisations.dale": (
        co.cells.structures.dale,
        {"units": (D, (*WHOLE, None)), "excitatory": (0.8, (*REAL, -1.0, 2.0))},
    ),
    "parametrisations.LowRank": (co.cells.structures.LowRank, {"rank": (1, (*WHOLE, None))}),
    "parametrisations.Orthogonal": (co.cells.structures.Orthogonal, {"by": ("exp", NAME)}),
    "parametrisations.Skew": (
        co.cells.structures.Skew,
        {"beta": (1.0, REAL), "gamma": (0.01, REAL)},
    ),
    "parametrisations.structure": (
        co.cells.structures.structure,
        {"given": ("orthogonal", ("no such", 3, None, [], Odd())), "units": (D, (*WHOLE, None))},
    ),
    "ridge.Ridge": (co.networks.ridge.Ridge, {"net": (net, NET), "alpha": (1e-6, (*REAL, -1.0))}),
    "ridge.Ridge.add": (
        lambda batch: co.networks.ridge.Ridge(net()).add(batch),
        {"batch": (batch, NET)},
    ),
    "cells.named": (
        co.cells.named,
        {"name": ("elman", NAME), "activation": ("tanh", ("no such", 3, [], Odd()))},
    ),
    **{
        f"cells.{name}": (
            lambda value, name=name, option=option: co.cells.named(name, **{option: value}),
            {"value": (good, ("x", None, [], Odd(), math.nan))},
        )
        for name, option, good in (
            ("scrn", "alpha", 0.9),
            ("antisymmetric", "eps", 0.1),
            ("lipschitz", "beta", 0.5),
            ("cornn", "dt", 0.1),
            ("unicornn", "eps", 0.1),
            ("inverse", "k", 1),
            ("rate", "noise", 0.1),
        )
    },
    "cells.options": (co.cells.options, {"name": ("elman", NAME)}),
    "steps.named": (
        co.cells.steps.named,
        {"name": ("gru-before", NAME), "inputs": (I, WHOLE), "hidden": (D, WHOLE)},
    ),
    "steps.options": (co.cells.steps.options, {"name": ("gru-before", NAME)}),
    "steps.DeepTransition": (
        co.cells.steps.DeepTransition,
        {
            "inputs": (I, WHOLE),
            "hidden": (D, (*WHOLE, 10**9)),
            "depth": (2, WHOLE),
            "width": (None, WHOLE),
            "activation": ("tanh", NAME),
            "dtype": (None, DTYPE),
        },
    ),
    "steps.GatedFeedback": (
        co.cells.steps.GatedFeedback,
        {
            "inputs": (I, WHOLE),
            "hidden": (D, (*WHOLE, 10**9)),
            "layers": (2, WHOLE),
            "unit": ("tanh", NAME),
        },
    ),
    "cell": (
        co.cell,
        {
            "slots": ("h", (3, None, [], "", "h h", "2")),
            "gates": (None, (3, [], "i i", "2")),
            "parameters": (None, ("x", 3, [], {"a b": 1.0}, {"a": "x"}, {3: 1.0})),
            "given": ("", (3, None, [])),
            "inputs": ("", (3, None, [])),
            "shows": ("", (3, None, [], "z")),
        },
    ),
    "norm": (co.norm, {"x": (lambda: torch.ones(3), (None, "x", 3, [], Odd(), nested(2, 2)))}),
    **{
        name: (getattr(co, name), {"a": (lambda: torch.ones(2), ("x", None, [], Odd()))})
        for name in (
            "abs",
            "atan",
            "cos",
            "erf",
            "exp",
            "held",
            "log",
            "relu",
            "sigmoid",
            "sign",
            "sin",
            "softplus",
            "sqrt",
            "step",
            "tanh",
            "expm1",
            "log1p",
        )
    },
    "train": (co.train, TRAIN),
    "load": (
        lambda run: co.load(run, warn=lambda message: None),
        {"run": (DATA / "folders-0.6.1" / "data", ("runs/missing", None, 3, [], Odd()))},
    ),
    "Model": (
        co.Model,
        {
            "network": (series_net, NET),
            "description": (series_task, (None, "x", 3, [], Odd(), {})),
        },
    ),
    "evaluate": (
        co.evaluate,
        {
            "net": (xor_net, NET),
            "task": (task, KIND),
            "split": ("test", NAME),
            "seed": (0, SEED),
            "n": (4, (*WHOLE, None)),
        },
    ),
    "online.learn": (co.online.learn, LEARN),
    "online.read": (
        co.online.read,
        {
            "path": (None, ("no such file.csv", "x.zip", 3, None, [], Odd(), b"x.csv")),
            "kind": ("next", ("no such", 3, [], Odd())),
            "target": (None, (3, [3], Odd())),
            "missing": ("refuse", NAME),
            "dtype": (torch.float32, DTYPE),
            "sep": (None, (3, [], "", "ab")),
            "decimal": (".", (3, None, "x")),
            "thousands": ("", (3, None, "x")),
        },
    ),
    **{
        f"tasks.{name}": (
            getattr(co.tasks, name),
            {
                "length": (
                    20,
                    ("x", None, 0, -1, 1.5, [], Odd(), (5,), (9, 2), ("a", "b"), math.nan, 10**30),
                ),
                "curriculum": (None, ("x", 3, (1,), Odd(), ("a", "b"))),
            },
        )
        for name in (
            "XOR",
            "Addition",
            "Multiplication",
            "TemporalOrder",
            "Permutation",
            "Memorisation",
            "Copy",
        )
    },
    **{
        f"tasks.{name}": (
            getattr(co.tasks, name),
            {
                "length": (5, ("x", None, 0, -1, 1.5, [], Odd(), (9, 2))),
                "values": (4, (*WHOLE, None)),
            },
        )
        for name in ("Reversal", "Sorting")
    },
    "tasks.Copy(values)": (
        co.tasks.Copy,
        {"length": (20, ()), "values": (8, (*WHOLE, None)), "positions": (3, (*WHOLE, None))},
    ),
    "tasks.TemporalOrder(symbols)": (
        co.tasks.TemporalOrder,
        {"length": (20, ()), "symbols": (2, (*WHOLE, None))},
    ),
    "tasks.Addition(rule)": (
        co.tasks.Addition,
        {"length": (20, ()), "rule": ("loose", NAME_OR_NONE)},
    ),
    "tasks.Digits": (co.tasks.Digits, {"pixels": (8, (*WHOLE, None))}),
    "tasks.Music": (co.tasks.Music, {"path": (None, ("no such file.mat", 3, None, [], Odd()))}),
    "tasks.make": (
        co.tasks.make,
        {"name": ("xor", NAME), "length": (20, ("x", None, 0, [], Odd()))},
    ),
    "tasks.options": (co.tasks.options, {"name": ("xor", NAME)}),
    "tasks.rng": (co.tasks.rng, {"seed": (0, SEED)}),
    "Task.batch": (
        lambda step, size, seed: task().batch(step, size, seed),
        {"step": (0, (-1, 1.5, "x", None)), "size": (2, (*WHOLE, None)), "seed": (0, SEED)},
    ),
    "Task.held_out": (
        lambda split, seed, n: list(task().held_out(split, seed, 0, n)),
        {"split": ("test", NAME), "seed": (0, SEED), "n": (2, (*WHOLE, None))},
    ),
    "report.write": (co.report.write, {"folder": (None, ("no such folder", 3, None, [], Odd()))}),
    "report.markdown": (
        co.report.markdown,
        {"folder": (None, ("no such folder", 3, None, [], Odd()))},
    ),
    "report.read_rows": (co.report.read_rows, {"path": (None, (3, None, [], Odd()))}),
    "Tape.costates": (
        lambda loss: recorded()[0].costates(loss if loss is not None else recorded()[1]),
        {"loss": (None, ("x", 3, [], Odd(), torch.ones(B), torch.ones(B + 1), torch.tensor(1.0)))},
    ),
    "Tape.penalty": (
        lambda G: recorded_penalty(G),
        {"G": ("variance", ("no such penalty", 3, None, [], Odd()))},
    ),
    "Penalty *": (lambda weight: co.penalties.variance * weight, {"weight": (2.0, REAL)}),
    "Penalty +": (
        lambda other: co.penalties.variance + other,
        {"other": ("ratio", ("no such penalty", 3, None, [], Odd()))},
    ),
    "penalties.log_decay": (
        co.penalties.log_decay,
        {"lam": (costates, (None, "x", 3, [], Odd(), torch.ones(T, B, D)))},
    ),
    "directions.Galvan": (co.optimisers.Galvan, {"c": (1.0, (*REAL, -1.0))}),
    "directions.Armijo": (
        co.optimisers.Armijo,
        {"c": (1e-4, (*REAL, -1.0)), "shrink": (0.5, (*REAL, -1.0)), "most": (40, (*WHOLE, None))},
    ),
    "directions.Wolfe": (
        co.optimisers.Wolfe,
        {"c1": (1e-4, (*REAL, -1.0)), "c2": (0.9, (*REAL, -1.0)), "most": (25, (*WHOLE, None))},
    ),
    "parametrisations.Signed": (
        co.cells.structures.Signed,
        {
            "signs": (
                lambda: torch.ones(D),
                (None, "x", 3, [], Odd(), torch.zeros(D), sparse(D), nested(D, 1)),
            )
        },
    ),
    "Easiest.choose": (
        lambda step, batch, seed: co.training.curriculum.Easiest(0.5, 5).choose(
            xor_net(), task(), step, batch, seed
        ),
        {"step": (0, (-1, 1.5, "x", None)), "batch": (2, (*WHOLE, None)), "seed": (0, SEED)},
    ),
    "Reservoir.predict": (
        lambda u, x0: (
            co.Reservoir(I, D, O).fit(torch.ones(T, B, I), torch.ones(T, B, O)).predict(u, None, x0)
        ),
        {"u": (u, INPUT), "x0": (None, STATE)},
    ),
    "Reservoir.solve": (
        lambda ridge: (
            co.Reservoir(I, D, O).fit(torch.ones(T, B, I), torch.ones(T, B, O)).solve(ridge)
        ),
        {"ridge": (1e-8, ("x", [], Odd(), math.nan, -1.0))},
    ),
    "EncoderDecoder.loss": (
        lambda y: co.EncoderDecoder(inputs=I, hidden=D, outputs=3)(u()).loss("cross-entropy", y),
        {
            "y": (
                lambda: torch.tensor([[0, 1], [2, 2]]),
                ("x", 3, 1.5, Odd(), {}, sparse(2, 2), nested(2, 2), torch.ones(2, 2)),
            )
        },
    ),
    "tasks.Collection.batch": (
        lambda step, size, seed: Few().batch(step, size, seed),
        {"step": (0, (-1, 1.5, "x", None)), "size": (2, (*WHOLE, None)), "seed": (0, SEED)},
    ),
    "Schedule": (
        lambda schedule: co.Penalised("variance", schedule)(net(), batch(), "squared"),
        {
            "schedule": (
                lambda: co.penalties.linear(1.0, 0.0, 5),
                (
                    lambda step: -1.0,
                    lambda step: math.nan,
                    lambda step: 1e60,
                    lambda step: "x",
                    lambda step: None,
                ),
            )
        },
    ),
}

STATES = (
    None,
    "x",
    3,
    [],
    Odd(),
    sparse(B, I),
    nested(B, I),
    torch.ones(B, I, dtype=torch.complex64),
    torch.ones(B, I, dtype=torch.bool),
    torch.ones(B, I, device="meta"),
    np.ones((B, I)),
    torch.ones(B, I + 1),
    torch.tensor(1.0),
    torch.ones(B, I).half(),
)
MAP = ("x", 3, None, [], Odd())
SIZE = (*WHOLE, (1, 2, 3), (1, "x"), (0, 1))


def state():
    return torch.ones(B, I)


def dense():
    return co.maps.Dense(I, O)


def product_of(f, product, *directions):
    """A product of a map, with its arguments."""
    values = {"x": (state, STATES), "v": (state, STATES), "w": (y, STATES)}

    def call(**given):
        return getattr(co.maps, product)(f, **given)

    return call, {name: values[name] for name in ("x", *directions)}


MAPS = {
    "maps.Dense": (
        co.maps.Dense,
        {
            "inputs": (I, (*WHOLE, 10**12)),
            "outputs": (O, (*WHOLE, 10**12)),
            "activation": ("tanh", NAME),
            "bias": (True, SWITCH),
            "dtype": (None, DTYPE),
            "device": (None, DEVICE),
        },
    ),
    "maps.Tied": (
        co.maps.Tied,
        {
            "f": (dense, (*MAP, torch.nn.Tanh())),
            "tau": ("transpose", (*NAME, torch.tanh, lambda W: W + 1, lambda W: 3)),
            "activation": (None, ("x", "", 3, [], Odd())),
            "bias": (True, SWITCH),
            "tau_adjoint": (None, ("x", 3, [3], Odd(), torch.tanh, lambda W: 3)),
        },
    ),
    "maps.Conv": (
        co.maps.Conv,
        {
            "channels_in": (I, (*WHOLE, 10**12)),
            "channels_out": (O, (*WHOLE, 10**12)),
            "size": (3, SIZE),
            "stride": (1, SIZE),
            "padding": (0, (*WHOLE[1:], (1, 2, 3))),
            "activation": ("tanh", NAME),
            "bias": (True, SWITCH),
            "summed": (False, SWITCH),
            "dtype": (None, DTYPE),
            "device": (None, DEVICE),
        },
    ),
    "maps.MaxPool": (co.maps.MaxPool, {"size": (2, SIZE), "ties": ("first", NAME)}),
    "maps.AvgPool": (co.maps.AvgPool, {"size": (2, SIZE)}),
    "maps.Activation": (co.maps.Activation, {"name": ("tanh", NAME)}),
    "maps.Residual": (
        lambda f, **given: co.maps.Residual(f, **given),
        {
            "f": (dense, MAP),
            "projection": ("linear", ("x", "", 3, [], Odd(), None)),
            "inputs": (I, WHOLE),
            "outputs": (O, WHOLE),
        },
    ),
    "maps.Composed": (lambda f: co.maps.Composed(f), {"f": (dense, MAP)}),
}
for shape_free in (co.maps.Softmax(), co.maps.LogSoftmax(), co.maps.Flatten()):
    name = f"maps.{type(shape_free).__name__}"
    MAPS[name] = (shape_free, {"x": (state, (*STATES[:9], torch.tensor(1.0)))})
PRODUCTS = {
    "push": "v",
    "pull": "w",
    "pull_parameters": "w",
    "bend": "vw",
    "bend_parameters": "vw",
}
for product, directions in PRODUCTS.items():
    MAPS[f"maps.{product}"] = product_of(dense(), product, *directions)
    by_torch = torch.nn.Sequential(dense())
    MAPS[f"maps.{product} by torch"] = product_of(by_torch, product, *directions)
CALLS |= MAPS

WIDTHS = (None, "x", 3, [0], [1.5], ["x"], [None], Odd())
CHAIN_OPTIONS = {
    "activation": ("tanh", NAME),
    "output": ("identity", ("no such name", 3, None, [], Odd())),
    "start": ("orthogonal", NAME),
    "gain": (1.0, (*REAL, -1.0, 0.0)),
    "seed": (None, (-1, 1.5, "x", [], Odd(), 2**64)),
    "dtype": (None, DTYPE),
    "device": (None, DEVICE),
}


def chain(**options):
    torch.manual_seed(0)
    return co.Chain(co.maps.Dense(I, D), co.maps.Dense(D, O, "identity"), **options)


def run_chain(method):
    def call(network, u, y, loss, mask=None, weight=None):
        return method(network, co.Batch(u, y, mask=mask, weight=weight, axis=0), loss)

    return call, {
        "network": (chain, NET),
        "u": (state, (*STATES[1:10], *STATES[11:13])),
        "y": (y, TARGET),
        "loss": ("squared", LOSS),
        "mask": (None, MASK),
        "weight": (None, MASK),
    }


CALLS |= {
    "Chain": (
        lambda f, **options: co.Chain(f, **options),
        {
            "f": (dense, MAP),
            "output": CHAIN_OPTIONS["output"],
            "shape": (None, ("x", 3, Odd(), ["x"], [0], [1.5])),
        },
    ),
    "Chain.mlp": (
        co.Chain.mlp,
        {
            "inputs": (I, WHOLE),
            "widths": ([D, D], WIDTHS),
            "outputs": (O, WHOLE),
            "bias": (True, SWITCH),
            **CHAIN_OPTIONS,
        },
    ),
    "Chain.cnn": (
        co.Chain.cnn,
        {
            "shape": ((1, 8, 8), (None, "x", 3, [1, 8], [1, 0, 8], [1, "x", 8], Odd(), [1, 2, 8])),
            "channels": ([2], (*WIDTHS, [2] * 9)),
            "outputs": (O, WHOLE),
            "size": (3, WHOLE),
            "pool": (2, WHOLE),
            "widths": ([D], WIDTHS),
            **CHAIN_OPTIONS,
        },
    ),
    "Chain.autoencoder": (
        co.Chain.autoencoder,
        {
            "inputs": (I, WHOLE),
            "widths": ([D], (*WIDTHS, [])),
            "tied": (True, SWITCH),
            **CHAIN_OPTIONS,
        },
    ),
    "Chain()": (
        lambda x: chain()(x),
        {"x": (state, (*STATES[:10], *STATES[11:13]))},
    ),
    "Chain().costates": (
        lambda **given: chain()(state()).costates(**given),
        {"loss": ("squared", LOSS), "y": (y, TARGET), "mask": (None, MASK)},
    ),
    "Chain().push": (
        lambda dx: chain()(state()).push(dx),
        {"dx": (state, (*STATES[:10], *STATES[11:13]))},
    ),
    "BP on a chain": run_chain(co.BP()),
    "Penalised on a chain": run_chain(co.Penalised("log-ratio", 0.1)),
}

CASES = [(call, argument) for call, (_, arguments) in CALLS.items() for argument in arguments]


def made(good):
    """A good value, made anew where calls may change it."""
    return good() if callable(good) else good


def told(call, arguments):
    """How a call ends: None, or the error that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(**arguments)
        except Exception as error:
            return error
    return None


def wrong_calls(name, argument):
    """Each wrong value of an argument, and how the call with it ends."""
    call, arguments = CALLS[name]
    for value in arguments[argument][1]:
        good = {other: made(kept) for other, (kept, _) in arguments.items() if other != argument}
        yield value, told(call, {**good, argument: value}), good


def said_well(error):
    return "\n" not in str(error) and str(error).endswith((".", "?", ")", "]"))


OURS = [
    (name, argument)
    for name, argument in CASES
    if not name.startswith("nn.") or name == "nn.replace"
]


@pytest.mark.parametrize(("name", "argument"), OURS)
def test_a_wrong_argument_is_refused_in_one_line(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = []
    for value, error, _ in wrong_calls(name, argument):
        if not isinstance(error, co.CoadjointError) or not said_well(error):
            faults.append((value, error))
    assert not faults
    assert not list(tmp_path.iterdir())


OF_TORCH = [case for case in CASES if case not in OURS]


@pytest.mark.parametrize(("name", "argument"), OF_TORCH)
def test_a_module_of_torch_refuses_as_torch_does_or_in_one_line(name, argument):
    """co.nn stands in for torch.nn: what torch.nn refuses ends in an error that the same `except`
    catches.
    """
    _, module, *forward = name.split(".")
    theirs = getattr(torch.nn, module)
    faults = []
    for value, error, good in wrong_calls(name, argument):
        if isinstance(error, co.CoadjointError) and said_well(error):
            continue
        arguments = {**good, argument: value}
        known = {word: y for word, y in arguments.items() if word not in EXTRAS}
        of_torch = told(theirs(I, D) if forward else theirs, known)
        if type(error) is not type(of_torch):
            faults.append((value, error, of_torch))
    assert not faults


@pytest.mark.parametrize("name", [name for name, (_, given) in CALLS.items() if name not in UNMADE])
def test_good_arguments_are_taken(name):
    """Else a refusal of wrong ones would say nothing."""
    call, arguments = CALLS[name]
    assert told(call, {argument: made(good) for argument, (good, _) in arguments.items()}) is None


RECORDS = (
    "Cell",
    "ChainRun",
    "Evaluation",
    "DecoderRun",
    "Recorded",
    "StackRun",
    "Result",
    "Trajectory",
    "Costates",
)  # made by the calls above


def test_every_public_name_is_called_wrongly():
    called = {name.split("(")[0].split(".")[0].split(" ")[0] for name in CALLS}
    public = [name for name in co.__all__ if callable(getattr(co, name))]
    errors = [
        name
        for name in public
        if isinstance(getattr(co, name), type) and issubclass(getattr(co, name), Exception)
    ]
    assert {*public} - {*errors} - {*RECORDS} <= called
