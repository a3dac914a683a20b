"""The modules of co.nn are torch.nn's, and can be differentiated twice.

Outputs, gradients and second derivatives are compared with torch.nn, with plain loops over
torch.nn's equations, and with the sample inputs that PyTorch ships for its own modules.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import unittest
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import coadjoint as co
import oracles
from coadjoint.nn import frame
from coadjoint.nn.rnn_module import RNNModule
from coadjoint.sweeps import affine
from coadjoint.sweeps import weights as sweep_weights
from coadjoint.sweeps.engines import load, opaque
from compare import close
from paths import SUPPORT

ENGINES = ("reference", "eager", "cpu", "autograd")
LAYERS = {"RNN": (nn.RNN, co.nn.RNN), "LSTM": (nn.LSTM, co.nn.LSTM), "GRU": (nn.GRU, co.nn.GRU)}
CELLS = {
    "RNNCell": (nn.RNNCell, co.nn.RNNCell),
    "LSTMCell": (nn.LSTMCell, co.nn.LSTMCell),
    "GRUCell": (nn.GRUCell, co.nn.GRUCell),
}
BOTH = LAYERS | CELLS
DOUBLE = {"dtype": torch.float64}


class Case(NamedTuple):
    """A module's arguments and what it is given.

    lengths: None for a tensor, else those of a packed sequence.
    """

    name: str
    options: dict[str, Any]
    sizes: tuple[int, int, int, int]  # T, B, inputs, units
    kind: str = "batched"  # or unbatched, sorted, unsorted, equal
    hx: bool = True

    def pair(self):
        """torch's module and ours, each drawn from the same seed."""
        made = []
        for cls in LAYERS[self.name]:
            torch.manual_seed(3)
            made.append(cls(*self.sizes[2:], **self.options, **DOUBLE))
        return made

    @property
    def batch_first(self):
        return self.options.get("batch_first", False)

    @property
    def lengths(self):
        T, B = self.sizes[:2]
        some = [1 + 7 * (j + 1) % T for j in range(B)]
        table = {"sorted": sorted(some, reverse=True), "unsorted": some, "equal": [T] * B}
        return table.get(self.kind)

    @property
    def packing(self):
        """A packed sequence of the places t B + j.

        What is packed by them, rather than by torch, has a forward mode.
        """
        T, B = self.sizes[:2]
        places = torch.arange(T * B).view(T, B)
        return pack_padded_sequence(places, self.lengths, enforce_sorted=self.kind == "sorted")

    def leaves(self):
        """u, h_0 (as "x0") and c_0 (as "given x0"), time first; the names are those of
        oracles.higher.
        """
        T, B, inputs, units = self.sizes
        g = torch.Generator().manual_seed(5)

        def rand(*shape):
            return torch.randn(*shape, generator=g, **DOUBLE).requires_grad_()

        found, D = {"u": rand(T, B, inputs)}, 1 + self.options.get("bidirectional", False)
        if self.hx:
            n = D * self.options.get("num_layers", 1)
            found["x0"] = rand(n, B, self.options.get("proj_size") or units)
            if self.name == "LSTM":
                found["given x0"] = rand(n, B, units)
        return found

    def given(self, leaves):
        """The arguments of the call, made of leaves."""
        u, states = leaves["u"], [leaves[n] for n in ("x0", "given x0") if n in leaves]
        if self.lengths is not None:
            rows, *packing = self.packing
            u = PackedSequence(u.flatten(0, 1)[rows], *packing)
        else:
            u = u.transpose(0, 1) if self.batch_first else u
        if self.kind == "unbatched":
            u, states = u.squeeze(0 if self.batch_first else 1), [y.squeeze(1) for y in states]
        return u, (None if not states else tuple(states) if self.name == "LSTM" else states[0])


def named(output, last):
    """What a module returns, by name."""
    last = last if isinstance(last, tuple) else (last,)
    return {"output": output, **dict(zip(("h_n", "c_n"), last, strict=False))}


def objective(values):
    """A scalar in which every entry counts differently."""
    w = oracles.directions(values, 9)
    return sum((w[n] * torch.sin(y)).sum() for n, y in values.items())


BARS = {"values": 1e-13, "first": 1e-12, "second": 1e-11}


def orders(values, leaves, second=True):
    """The values, the gradient of an objective by all leaves, and a product with its Hessian."""
    first, v = oracles.gradient(objective(values), leaves, second), oracles.directions(leaves, 1)
    return {
        "values": values,
        "first": {n: y.detach() for n, y in first.items()},
        "second": oracles.gradient(oracles.dot(first, v, leaves), leaves) if second else {},
    }


def ran(module, case, second):
    """-> what `orders` finds by the input, hx and all parameters; the output"""
    leaves = case.leaves()
    torch.manual_seed(7)
    output, last = module(*case.given(leaves))
    values = named(output.data if isinstance(output, PackedSequence) else output, last)
    return orders(values, leaves | dict(module.named_parameters()), second), output


def same(ours, theirs, case, second=True):
    """That two modules agree -> their outputs"""
    (found, output), (expected, their_output) = ran(ours, case, second), ran(theirs, case, second)
    for order, bar in BARS.items():
        close(found[order], expected[order], bar, f"{case}: {order}")
    return output, their_output


SIZES = [(6, 4, 3, 5), (1, 1, 1, 1), (5, 3, 1, 17), (3, 2, 9, 2), (4, 1, 2, 3)]
CROSS = {
    "num_layers": (1, 2, 3),
    "bidirectional": (False, True),
    "bias": (False, True),
    "batch_first": (False, True),
    "dropout": (0.0, 0.4),
}
KINDS = ("batched", "unbatched", "sorted", "unsorted", "equal")
PARITY = {
    "RNN, tanh": ("RNN", {"nonlinearity": "tanh"}),
    "RNN, relu": ("RNN", {"nonlinearity": "relu"}),
    "LSTM": ("LSTM", {}),
    "LSTM, projected": ("LSTM", {"proj_size": 2}),
    "GRU": ("GRU", {}),
}


def crossed(name, more, count):
    """`count` of all combinations of arguments, with sizes in turn."""
    every = list(itertools.product(*CROSS.values(), KINDS, (False, True)))
    chosen = random.Random(f"{name}{more}").sample(every, count)
    sizes = [s for s in SIZES if s[3] > more.get("proj_size", 0)]
    for i, (*values, kind, hx) in enumerate(chosen):
        options = dict(zip(CROSS, values, strict=True)) | more
        if options["num_layers"] == 1:
            options["dropout"] = 0.0  # torch warns that there it does nothing
        T, B, inputs, units = sizes[i % len(sizes)]
        yield Case(name, options, (T, 1 if kind == "unbatched" else B, inputs, units), kind, hx)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
def test_outputs_and_gradients_equal_torchs(name, record_property, thorough):
    count = 60 if thorough else 30
    for i, case in enumerate(crossed(*PARITY[name], count)):
        theirs, ours = case.pair()
        for n, y in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[n], y), f"{case}: {n} begins differently"
        output, expected = same(ours, theirs, case, second=i % 4 == 0)
        if isinstance(expected, PackedSequence):
            for n in ("batch_sizes", "sorted_indices", "unsorted_indices"):
                a, b = getattr(output, n), getattr(expected, n)
                assert a is b is None or torch.equal(a, b), f"{case}: {n}"
    record_property("cases", count)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_load_both_ways(name):
    case = Case(name, {"num_layers": 2, "bidirectional": True}, (4, 3, 3, 5))
    theirs, ours = case.pair()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    torch.manual_seed(11)
    ours.reset_parameters()
    theirs.load_state_dict(ours.state_dict())
    same(theirs, ours, case)
    theirs.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    same(ours, theirs, case)


@pytest.mark.parametrize("name", PARITY)
def test_to_torch_and_back_is_the_same_module(name):
    name, more = PARITY[name]
    options = more | {
        "num_layers": 2,
        "bidirectional": True,
        "bias": False,
        "batch_first": True,
        "dropout": 0.25,
    }
    case = Case(name, options, (4, 3, 3, 5))
    theirs, _ = case.pair()
    theirs.weight_ih_l1.requires_grad_(False)
    theirs.eval()
    ours = LAYERS[name][1].from_torch(theirs, engine="eager")
    back = ours.to_torch()
    for made in (ours, back):
        assert repr(made).replace(", engine='eager'", "") == repr(theirs)
        assert not made.training
        assert made.weight_hh_l0.dtype == torch.float64
        assert [p.requires_grad for p in made.parameters()] == [
            p.requires_grad for p in theirs.parameters()
        ]
        all_equal = zip(made.parameters(), theirs.parameters(), strict=True)
        assert all(torch.equal(p, q) and p is not q for p, q in all_equal)
    assert type(back) is LAYERS[name][0]
    assert ours.engine == "eager"


def test_from_torch_takes_the_right_class_alone():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.LSTM; got GRU"):
        co.nn.LSTM.from_torch(nn.GRU(2, 3))
    with pytest.raises(NotImplementedError, match="no zoneout"):
        co.nn.GRU(2, 3, zoneout=0.1).to_torch()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RNN", (3, 5, 2, "relu", False, True, 0.5, True)),
        ("RNN", (3, 5, 2, "tanh")),
        ("LSTM", (3, 5, 2, False, True, 0.5, True, 2)),
        ("GRU", (3, 5, 2, False, True, 0.5, True)),
        ("LSTM", (3, 5, 1, True, False, 0.0, False, 0, "cpu", torch.float64)),
        ("GRU", (3, 5, 1, True, False, 0.0, False, 0, "cpu", torch.float64)),
        ("RNN", (3, 5, 1, "relu", True, False, 0.0, False, 0, "cpu", torch.float64)),
        ("RNNCell", (3, 5, False, "relu", "cpu", torch.float64)),
        ("LSTMCell", (3, 5, False, "cpu", torch.float64)),
        ("GRUCell", (3, 5, False, "cpu", torch.float64)),
    ],
)
def test_positional_arguments_mean_what_they_mean_in_torch(name, arguments):
    theirs, ours = (cls(*arguments) for cls in BOTH[name])
    assert repr(ours) == repr(theirs)
    shapes = [{n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (theirs, ours)]
    assert shapes[0] == shapes[1]
    assert getattr(ours, "nonlinearity", None) == getattr(theirs, "nonlinearity", None)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (3,)])
@pytest.mark.parametrize("hx", [True, False])
def test_cells_have_torchs_values_and_gradients(name, bias, shape, hx):
    pair, found = [], []
    for nonlinearity in ("tanh", "relu") if name == "RNNCell" else (None,):
        more = {} if nonlinearity is None else {"nonlinearity": nonlinearity}
        for cls in CELLS[name]:
            torch.manual_seed(2)
            pair.append(cls(shape[-1], 5, bias=bias, **more, **DOUBLE))
            u, h, c = (
                torch.randn(*s, **DOUBLE).requires_grad_() for s in [shape, *[(*shape[:-1], 5)] * 2]
            )
            states = (h, c) if name == "LSTMCell" else h
            y = pair[-1](u, states) if hx else pair[-1](u)
            values = named(*(y if name == "LSTMCell" else (y, ())))
            leaves = {"u": u, "h": h, "c": c} | dict(pair[-1].named_parameters())
            found.append(orders(values, leaves))
    for (theirs, ours), (order, bar) in itertools.product(
        zip(found[::2], found[1::2], strict=True), BARS.items()
    ):
        close(ours[order], theirs[order], bar, f"{name}: {order}")


sigmoid = oracles.sigmoid


def step(mode, w, u, h, c):
    """torch.nn's equations for one sample and one step -> (h', c')"""
    v, z = w["weight_ih"] @ u, w["weight_hh"] @ h
    if "bias_ih" in w:
        v, z = v + w["bias_ih"], z + w["bias_hh"]
    if mode == "GRU":
        (vr, vk, vn), (zr, zk, zn) = v.chunk(3), z.chunk(3)
        k = sigmoid(vk + zk)
        return (1 - k) * torch.tanh(vn + sigmoid(vr + zr) * zn) + k * h, c
    if mode == "LSTM":
        i, f, g, o = (v + z).chunk(4)
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        h = sigmoid(o) * torch.tanh(c)
        return (w["weight_hr"] @ h if "weight_hr" in w else h), c
    return oracles.ACTIVATIONS[mode[4:].lower()](v + z), c


def plain(module, theta, leaves, lengths):
    """A module's run by plain loops over samples and steps, from its parameters theta -> outputs by
    name, padded.
    """
    T, B = leaves["u"].shape[:2]
    D, slots = 1 + module.bidirectional, 2 if module.mode == "LSTM" else 1
    ends: list[Any] = []
    sequences = [[leaves["u"][t, j] for t in range(n)] for j, n in enumerate(lengths or [T] * B)]
    for layer in range(module.num_layers):
        halves = []
        for suffix in (f"_l{layer}", f"_l{layer}_reverse")[:D]:
            w = {n.removesuffix(suffix): y for n, y in theta.items() if n.endswith(suffix)}
            order = slice(None, None, -1 if suffix.endswith("reverse") else 1)
            read, end = [], []
            for j, sequence in enumerate(sequences):
                h = (
                    leaves["x0"][len(ends), j]
                    if "x0" in leaves
                    else w["weight_hh"].new_zeros(w["weight_hh"].shape[1])
                )
                c = (
                    leaves["given x0"][len(ends), j]
                    if "given x0" in leaves
                    else h.new_zeros(module.hidden_size)
                )
                states = []
                for u in sequence[order]:
                    h, c = step(module.mode, w, u, h, c)
                    states.append(h)
                read.append(states[order])
                end.append((h, c)[:slots])
            halves.append(read)
            ends.append([torch.stack(y) for y in zip(*end, strict=True)])
        sequences = [
            [torch.cat(y) for y in zip(*both, strict=True)] for both in zip(*halves, strict=True)
        ]
    output = oracles.padded([torch.stack(y) for y in sequences], max(map(len, sequences)))
    return named(output, tuple(torch.stack(y) for y in zip(*ends, strict=True)))


def padded_outputs(module, case, leaves):
    """As `plain` gives them."""
    output, last = module(*case.given(leaves))
    if case.lengths is not None:
        T, B = max(case.lengths), case.sizes[1]
        padded = output.data.new_zeros(T * B, output.data.shape[1])
        output = padded.index_add(0, case.packing.data, output.data).view(T, B, -1)
    elif case.batch_first:
        output = output.transpose(0, 1)
    return named(output, last)


def critics(values, leaves):
    """The gradient penalty of a critic, by the inputs and by the initial states."""
    first = oracles.gradient(objective(values), leaves, True)
    return sum(
        (y.square().sum().sqrt() - 1) ** 2 for n, y in first.items() if n in ("u", "x0", "given x0")
    )


def higher_order(values, leaves, third=True):
    """H v along inputs, initial states and parameters, third derivatives, and the gradient of a
    gradient penalty
    """
    found = oracles.higher(objective(values), leaves, third)
    return found | {
        f"penalty/{n}": y for n, y in oracles.gradient(critics(values, leaves), leaves).items()
    }


SECOND = {
    "RNN": Case("RNN", {}, (4, 3, 2, 3)),
    "RNN, one of each": Case("RNN", {"bias": False}, (1, 1, 1, 1)),
    "RNN, relu, 2 layers": Case(
        "RNN", {"nonlinearity": "relu", "num_layers": 2, "bidirectional": True}, (4, 3, 2, 3)
    ),
    "RNN, packed": Case(
        "RNN", {"num_layers": 2, "bidirectional": True, "bias": False}, (5, 4, 2, 3), "unsorted"
    ),
    "LSTM, 2 layers": Case("LSTM", {"num_layers": 2, "bidirectional": True}, (4, 3, 2, 3)),
    "LSTM, packed": Case("LSTM", {"num_layers": 2, "bidirectional": True}, (5, 4, 2, 3), "sorted"),
    "LSTM, no bias": Case("LSTM", {"bias": False}, (4, 3, 1, 5), "unsorted", hx=False),
    "LSTM, projected": Case(
        "LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 2}, (4, 3, 2, 3)
    ),
    "LSTM, projected, packed": Case(
        "LSTM", {"proj_size": 1, "bias": False}, (5, 4, 2, 3), "unsorted"
    ),
    "GRU, 2 layers": Case("GRU", {"num_layers": 2, "bidirectional": True}, (4, 3, 2, 3)),
    "GRU, packed": Case("GRU", {"num_layers": 2, "bidirectional": True}, (5, 4, 2, 3), "equal"),
    "GRU, no bias": Case(
        "GRU", {"num_layers": 2, "bias": False}, (4, 3, 1, 5), "unsorted", hx=False
    ),
}


@functools.cache
def truth(name):
    case = SECOND[name]
    leaves, theirs = case.leaves(), case.pair()[0]
    theta = dict(theirs.named_parameters())
    values = plain(theirs, theta, leaves, case.lengths)
    return values | higher_order(values, leaves | theta)


@pytest.mark.parametrize("name", SECOND)
def test_the_plain_loops_are_torchs(name):
    """So that agreement with them is agreement with torch."""
    case = SECOND[name]
    theirs, leaves = case.pair()[0], case.leaves()
    with torch.no_grad():
        close(
            plain(theirs, dict(theirs.named_parameters()), leaves, case.lengths),
            padded_outputs(theirs, case, leaves),
            1e-13,
            name,
        )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SECOND)
@pytest.mark.sampled(3)
def test_second_and_third_derivatives_equal_the_loops(name, engine, record_property):
    case = SECOND[name]
    ours, leaves = case.pair()[1], case.leaves()
    ours.engine = engine
    values = padded_outputs(ours, case, leaves)
    third = engine in ("reference", "cpu")
    found = values | higher_order(values, leaves | dict(ours.named_parameters()), third)
    expected = {n: y for n, y in truth(name).items() if third or not n.startswith("third")}
    close(found, expected, 1e-10, f"{case} {engine}")
    record_property("cases", 1)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_second_and_third_derivatives_of_cells_equal_the_loops(name, bias):
    for more in (
        ({"nonlinearity": "tanh"}, {"nonlinearity": "relu"}) if name == "RNNCell" else ({},)
    ):
        torch.manual_seed(1)
        cell = CELLS[name][1](2, 3, bias=bias, **more, **DOUBLE)
        leaves = {"u": torch.randn(4, 2, **DOUBLE), "x0": torch.randn(4, 3, **DOUBLE)}
        leaves |= {"given x0": torch.randn(4, 3, **DOUBLE)} if name == "LSTMCell" else {}
        leaves = {n: y.requires_grad_() for n, y in leaves.items()} | dict(cell.named_parameters())
        hx = (leaves["x0"], leaves["given x0"]) if name == "LSTMCell" else leaves["x0"]
        y = cell(leaves["u"], hx)
        values = named(*y) if name == "LSTMCell" else {"output": y}
        mode = name[:-4] + ("_" + cell.nonlinearity.upper() if more else "")
        rows = [
            step(
                mode,
                leaves,
                *(leaves[n][j] if n in leaves else None for n in ("u", "x0", "given x0")),
            )
            for j in range(4)
        ]
        expected = (
            dict(zip(values, map(torch.stack, zip(*rows, strict=True)), strict=False))
            if name == "LSTMCell"
            else {"output": torch.stack([h for h, _ in rows])}
        )
        found = values | higher_order(values, leaves)
        close(found, expected | higher_order(expected, leaves), 1e-10, f"{name} {more}")


def as_function(module, names):
    """A function of the input, the states and the parameters, for gradcheck."""

    def f(*arguments):
        theta, (u, *states) = (
            dict(zip(names, arguments[: len(names)], strict=True)),
            arguments[len(names) :],
        )
        hx = tuple(states) if len(states) > 1 else states[0] if states else None
        found = torch.func.functional_call(module, theta, (u, hx))
        return tuple(
            y
            for y in torch.utils._pytree.tree_leaves(found)
            if isinstance(y, torch.Tensor) and y.requires_grad
        )

    return f


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.sampled(2)
def test_modules_pass_gradgradcheck(name, engine):
    name, more = PARITY[name]
    case = Case(name, more, (3, 2, 1, 3))
    ours = case.pair()[1]
    ours.engine = engine
    names, leaves = zip(*ours.named_parameters(), strict=True)
    inputs = (*leaves, *case.leaves().values())
    assert torch.autograd.gradgradcheck(as_function(ours, names), inputs, fast_mode=True)


@pytest.fixture(scope="module")
def database():
    """PyTorch's samples of its own modules, by name.

    Their file asks for expecttest, as the base of a class not used here, and freezes the flags of
    torch.backends; neither is left behind.
    """
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:
            patch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=unittest.TestCase))
        from torch.testing._internal import common_modules

        setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    return {
        info.module_cls.__name__: (info, common_modules.ModuleErrorEnum)
        for info in common_modules.module_db
    }


def samples(info, **more):
    """[(what it is, the sample)], in training and not, with packed sequences where
    there are some
    """
    for training, packed in ((True, True), (False, False)):
        torch.manual_seed(13)
        settings = {
            "device": "cpu",
            "dtype": torch.float64,
            "requires_grad": True,
            "training": training,
        }
        found = info.module_inputs_func(info, **settings, with_packed_sequence=packed)
        for i, sample in enumerate(found):
            made = sample.constructor_input
            yield (
                f"{info.name} {i}: {made.args} {made.kwargs}, {training=}, {packed=}",
                training,
                sample,
            )


def tensors(found):
    """All tensors of a nest that can be differentiated."""
    flat = torch.utils._pytree.tree_leaves(found)
    flat = [y.data if isinstance(y, PackedSequence) else y for y in flat]
    return [y for y in flat if isinstance(y, torch.Tensor) and y.is_floating_point()]


@pytest.mark.slow
def test_pytorchs_samples_are_there(database):
    counts = {name: len(list(samples(database[name][0]))) for name in BOTH}
    assert all(counts[name] >= 48 for name in LAYERS), counts
    assert all(counts[name] >= 4 for name in CELLS), counts


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_pytorchs_samples_give_equal_outputs(database, name, record_property):
    info, count = database[name][0], 0
    for what, training, sample in samples(info):
        made, call = sample.constructor_input, sample.forward_input
        theirs, ours = (
            cls(*made.args, **made.kwargs, **DOUBLE).train(training) for cls in BOTH[name]
        )
        ours.load_state_dict(theirs.state_dict())
        inputs, found = tensors((call.args, call.kwargs)), []
        for module in (theirs, ours):
            output = module(*call.args, **call.kwargs)
            values = {f"output {i}": y for i, y in enumerate(tensors(output))}
            leaves = {f"input {i}": y for i, y in enumerate(inputs)} | dict(
                module.named_parameters()
            )
            found.append(orders(values, leaves))
        for order, bar in BARS.items():
            close(found[1][order], found[0][order], bar, f"{what}: {order}")
        if sample.reference_fn is not None and not isinstance(call.args[0], PackedSequence):
            expected = tensors(sample.reference_fn(ours, *call.args, **call.kwargs))
            for i, y in enumerate(expected):
                close(
                    found[1]["values"][f"output {i}"].detach(),
                    y.detach(),
                    1e-12,
                    f"{what}: reference {i}",
                )
        count += 1
    record_property("cases", count)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_pytorchs_samples_differentiate_twice(database, name):
    """By finite differences, as PyTorch asks of its own on a CPU; some of the samples, for they
    take long.
    """
    for what, training, sample in itertools.islice(samples(database[name][0]), 1, None, 25):
        made, call = sample.constructor_input, sample.forward_input
        ours = BOTH[name][1](*made.args, **made.kwargs, **DOUBLE).train(training)
        packed = isinstance(call.args[0], PackedSequence)
        names, theta = zip(*ours.named_parameters(), strict=True)
        inputs = tensors((call.args, call.kwargs))

        def f(*y, ours=ours, call=call, packed=packed, names=names):
            weights, (u, *states) = dict(zip(names, y, strict=False)), y[len(names) :]
            u = PackedSequence(u, call.args[0].batch_sizes) if packed else u
            hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
            return tuple(
                y
                for y in tensors(torch.func.functional_call(ours, weights, (u, hx)))
                if y.requires_grad
            )

        assert torch.autograd.gradgradcheck(f, (*theta, *inputs), fast_mode=True), what


@pytest.mark.parametrize("name", BOTH)
def test_pytorchs_error_samples_are_errors_here_too(database, name):
    info, stage = database[name]
    found = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    assert found
    for case in found:
        made, call = (
            case.module_error_input.constructor_input,
            case.module_error_input.forward_input,
        )
        if case.error_on == stage.CONSTRUCTION_ERROR:
            with pytest.raises(case.error_type, match=case.error_regex):
                BOTH[name][1](*made.args, **made.kwargs)
        else:
            ours = BOTH[name][1](*made.args, **made.kwargs)
            with pytest.raises(case.error_type, match=case.error_regex):
                ours(*call.args, **call.kwargs)


CASES = {  # one of each, for what does not depend on the arguments
    "RNN": Case("RNN", {"num_layers": 2, "bidirectional": True}, (4, 3, 2, 3)),
    "LSTM": Case("LSTM", {"num_layers": 2, "bidirectional": True}, (4, 3, 2, 3)),
    "LSTM, projected": Case("LSTM", {"num_layers": 2, "proj_size": 2}, (4, 3, 2, 3)),
    "GRU": Case("GRU", {"num_layers": 2, "batch_first": True}, (4, 3, 2, 3)),
    "GRU, packed": Case("GRU", {"bidirectional": True}, (5, 4, 2, 3), "unsorted"),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def call_of(module, case):
    """-> (values by name, leaves by name)"""
    leaves = case.leaves()
    return padded_outputs(module, case, leaves), leaves | dict(module.named_parameters())


def gradients(values, leaves):
    return oracles.gradient(objective(values), leaves)


def first_order(values, leaves):
    return values | gradients(values, leaves)


@each
def test_copies_run_and_train_alike(case):
    theirs, ours = case.pair()
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    loaded = type(ours)(*case.sizes[2:], **case.options, **DOUBLE)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for made in (
        copy.deepcopy(ours),
        loaded,
        pickle.loads(pickle.dumps(ours)),
        ours.float().double(),
    ):
        assert made.engine == ours.engine
        if made is not ours:
            same(made, theirs, case)
    first = copy.deepcopy(ours)
    with torch.no_grad():
        first.weight_hh_l0.zero_()
    assert ours.weight_hh_l0.any()


@each
def test_other_dtypes_and_devices_work(case):
    theirs, ours = (m.float() for m in case.pair())
    leaves = {n: y.detach().float() for n, y in case.leaves().items()}
    close(padded_outputs(ours, case, leaves), padded_outputs(theirs, case, leaves), 1e-5, "float32")
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    empty = type(ours)(*case.sizes[2:], **case.options, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in empty.parameters()} == {("meta", torch.float64)}
    empty.to_empty(device="cpu").load_state_dict(theirs.double().state_dict())
    same(empty, theirs, case)


@each
def test_views_may_be_inputs(case):
    theirs, ours = case.pair()
    leaves = {
        n: torch.stack([y, y + 1], -1).detach().requires_grad_() for n, y in case.leaves().items()
    }
    parts = {n: y[..., 0] for n, y in leaves.items()}
    assert not any(y.is_contiguous() for y in parts.values())
    found = [
        orders(padded_outputs(m, case, parts), leaves | dict(m.named_parameters()))
        for m in (theirs, ours)
    ]
    for order, bar in BARS.items():
        close(found[1][order], found[0][order], bar, order)


def test_the_name_of_a_module_says_what_it_is():
    made = co.nn.LSTM(3, 5, num_layers=2, engine="eager", zoneout=0.1, forget_bias=1.0)
    assert (
        repr(made)
        == "LSTM(3, 5, num_layers=2, zoneout=(0.1, 0.1), forget_bias=1.0, engine='eager')"
    )
    assert repr(co.nn.LSTM(3, 5, proj_size=2)) == "LSTM(3, 5, proj_size=2)"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@each
@pytest.mark.sampled(2)
def test_forward_mode_gives_the_directional_derivative(case, engine):
    ours = case.pair()[1]
    ours.engine = engine
    leaves = case.leaves() | dict(ours.named_parameters())
    names = [n for n, _ in ours.named_parameters()]

    def f(leaves):
        with torch.nn.utils.stateless._reparametrize_module(ours, {n: leaves[n] for n in names}):
            return padded_outputs(ours, case, leaves)

    v = oracles.directions(leaves, 1)
    still = {n: y.detach() for n, y in leaves.items()}
    values, found = torch.func.jvp(f, (still,), (v,))
    true = plain(ours, dict(ours.named_parameters()), leaves, case.lengths)
    close(values, {n: y.detach() for n, y in true.items()}, 1e-12, "values")
    close(found, oracles.along(true, leaves, v), 1e-11, "jvp")
    gradient, Hv = torch.func.jvp(torch.func.grad(lambda y: objective(f(y))), (still,), (v,))
    first = oracles.gradient(objective(true), leaves, True)
    close(gradient, {n: y.detach() for n, y in first.items()}, 1e-11, "grad")
    close(Hv, oracles.gradient(oracles.dot(first, v, leaves), leaves), 1e-10, "jvp of grad")


@each
def test_functional_call_uses_the_weights_it_is_given(case):
    _, ours = case.pair()
    leaves, theta = case.leaves(), {n: (p + 0.1).detach() for n, p in ours.named_parameters()}
    u, hx = case.given(leaves)

    def f(theta):
        output, last = torch.func.functional_call(ours, theta, (u, hx))
        return objective(named(output.data if isinstance(output, PackedSequence) else output, last))

    found = torch.func.grad(f)(theta)
    with torch.no_grad():
        for n, p in ours.named_parameters():
            p.copy_(theta[n])
    close(
        found,
        oracles.gradient(f(dict(ours.named_parameters())), dict(ours.named_parameters())),
        1e-12,
        "gradient",
    )


@each
def test_hooks_see_what_torchs_see(case):
    seen = []
    for module in case.pair():
        here: list[Any] = []
        module.register_forward_pre_hook(lambda m, given, here=here: here.append(given))
        module.register_forward_hook(lambda m, given, found, here=here: here.append(found))
        values, leaves = call_of(module, case)
        gradients(values, leaves)
        seen.append([y.detach() for y in tensors(here)])
    assert len(seen[0]) > 3
    for ours, theirs in zip(seen[1], seen[0], strict=True):
        close(ours, theirs, 1e-13, "hooks")


@pytest.mark.parametrize("name", LAYERS)
def test_full_backward_hooks_see_what_torchs_see(name):
    case, seen = Case(name, {}, (4, 3, 2, 3), hx=False), []
    for module in case.pair():
        here: list[Any] = []
        module.register_full_backward_hook(
            lambda m, below, above, here=here: here.append((below, above))
        )
        module.register_full_backward_pre_hook(lambda m, above, here=here: here.append(above))
        module.weight_hh_l0.register_hook(lambda g, here=here: here.append(g))
        output, _ = module(case.leaves()["u"])
        (output.sin() * torch.arange(output.numel(), **DOUBLE).view(output.shape)).sum().backward()
        seen.append(tensors(here))
    assert len(seen[0]) > 3
    for ours, theirs in zip(seen[1], seen[0], strict=True):
        close(ours, theirs, 1e-12, "gradients in hooks")


@each
@pytest.mark.parametrize(
    "trained", ["weight_hh_l0", "bias", "weight_ih", "nothing", "nothing and no input"]
)
def test_a_subset_of_parameters_can_be_trained(case, trained):
    found = []
    for module in case.pair():
        for n, p in module.named_parameters():
            p.requires_grad_(n.startswith(trained))
        leaves = {
            n: y.detach().requires_grad_(trained == "nothing") for n, y in case.leaves().items()
        }
        values = padded_outputs(module, case, leaves)
        if trained == "nothing and no input":
            assert not any(y.requires_grad for y in values.values())
            continue
        objective(values).backward()
        every = leaves | dict(module.named_parameters())
        found.append({n: y.grad for n, y in every.items() if y.grad is not None})
        assert found[-1].keys() == {n for n, y in every.items() if y.requires_grad}
    if found:
        close(found[1], found[0], 1e-12, trained)


@each
def test_two_calls_before_a_backward_keep_their_gradients(case):
    found = []
    for module in case.pair():
        leaves = case.leaves()
        values = [
            padded_outputs(module, case, {n: y + k for n, y in leaves.items()}) for k in (0, 1, 0)
        ]
        total = objective(values[0]) * objective(values[1]) + objective(values[2])
        found.append(oracles.gradient(total, leaves | dict(module.named_parameters())))
    close(found[1], found[0], 1e-12, "gradient")


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_can_be_used_twice_in_one_graph(name):
    found = []
    for module in Case(name, {}, (4, 3, 5, 5)).pair():
        u = Case(name, {}, (4, 3, 5, 5)).leaves()["u"]
        first, last = module(u)
        output, last = module(first, last)
        found.append(orders(named(output, last), {"u": u} | dict(module.named_parameters())))
    for order, bar in BARS.items():
        close(found[1][order], found[0][order], bar, order)


@each
def test_without_gradients_the_outputs_are_the_same(case):
    theirs, ours = case.pair()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found, expected = (
                padded_outputs(ours, case, case.leaves()),
                padded_outputs(theirs, case, case.leaves()),
            )
            close(found, expected, 1e-13, context.__name__)
            assert not any(y.requires_grad for y in found.values())
            assert all(
                y.is_inference() == (context is torch.inference_mode) for y in found.values()
            )


def test_dropout_is_for_training():
    theirs, ours = Case("GRU", {"num_layers": 3, "dropout": 0.5}, (4, 3, 2, 8)).pair()
    u = torch.randn(4, 3, 2, **DOUBLE)
    assert not torch.equal(ours(u)[0], ours(u)[0])
    ours.eval(), theirs.eval()
    assert torch.equal(ours(u)[0], ours(u)[0])
    close(ours(u)[0], theirs(u)[0], 1e-13, "eval")
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        co.nn.GRU(2, 3, dropout=0.5)


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, {}) for name in BOTH] + [("LSTM", {"proj_size": 2}), ("GRU", {"engine": "autograd"})],
)
@pytest.mark.parametrize("half", [False, True])
def test_autocast_computes_in_float32(name, more, half):
    """All but two things that are torch's: the gradient by an input in bfloat16 is in bfloat16, and
    a derivative asked for inside runs torch's own products in bfloat16.

    Those are in second derivatives, and in the first where there is a projection or engine
    "autograd". Outside, where torch would have backwards called, everything is in float32.
    """
    torch.manual_seed(0)
    module, layers = BOTH[name][1](3, 5, **more), (1,) if name in LAYERS else ()
    u = torch.randn((4, 2, 3) if layers else (2, 3)).bfloat16().float()
    h, c = torch.randn(*layers, 2, more.get("proj_size", 5)), torch.randn(*layers, 2, 5)
    hx = (h, c) if "LSTM" in name else h
    theta = tuple(module.parameters())

    def first(u):
        output = tensors(module(u, hx))
        return output, torch.autograd.grad(output[0].square().sum(), theta, create_graph=True)

    def second(slopes):
        return torch.autograd.grad(sum(g.square().sum() for g in slopes), theta)

    values, slopes = first(u)
    bends = second(slopes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, its_slopes = first(given := u.bfloat16().requires_grad_() if half else u)
        its_bends = second(its_slopes)
        outside = tensors(module(given, hx))
    found = {
        "values": (inside, values, 1e-6),
        "slopes inside": (its_slopes, slopes, 1e-2 if more else 1e-6),
        "bends inside": (its_bends, bends, 1e-2),
        "slopes outside": (
            its := torch.autograd.grad(outside[0].square().sum(), theta, create_graph=True),
            slopes,
            1e-6,
        ),
        "bends outside": (second(its), bends, 1e-6),
    }
    for what, (ours, expected, bar) in found.items():
        for y, true in zip(ours, expected, strict=True):
            close(y, true, bar, what)
    if half:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = tensors(module(given, hx))[0]
        assert torch.autograd.grad(output.sum(), given)[0].dtype == torch.bfloat16


def test_autocast_can_be_around_a_model():
    torch.manual_seed(0)
    before, rnn, after = nn.Linear(3, 4), co.nn.GRU(4, 5, num_layers=2), nn.Linear(5, 1)
    u = torch.randn(6, 2, 3, requires_grad=True)
    exact = after(rnn(before(u))[0]).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = after(rnn(before(u))[0])
    assert rounded.dtype == torch.bfloat16
    a, b = (torch.autograd.grad(y, u, create_graph=True)[0] for y in (exact, rounded.float().sum()))
    close(b, a, 0.05, "gradient")
    a, b = (torch.autograd.grad(y.square().sum(), rnn.weight_hh_l0)[0] for y in (a, b))
    close(b, a, 0.1, "second derivative")


@each
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(case, reentrant):
    ours, leaves = case.pair()[1], case.leaves()
    ours.dropout = 0.3

    def run(*y):
        return tuple(padded_outputs(ours, case, dict(zip(leaves, y, strict=True))).values())

    every, found = leaves | dict(ours.named_parameters()), []
    for wrapped in (run, functools.partial(checkpoint, run, use_reentrant=reentrant)):
        torch.manual_seed(4)
        values = dict(enumerate(wrapped(*leaves.values())))
        total = objective({str(n): y for n, y in values.items()})
        if reentrant:
            for y in every.values():
                y.grad = None
            total.backward()
            found.append({n: y.grad for n, y in every.items()})
        else:
            first = oracles.gradient(total, every, True)
            v = oracles.directions(every, 1)
            second = oracles.gradient(oracles.dot(first, v, every), every)
            found.append(
                {n: y.detach() for n, y in first.items()}
                | {f"H v {n}": y for n, y in second.items()}
            )
    close(found[1], found[0], 1e-13, f"{reentrant=}")


def in_parallel(rank, folder, model, u, y):
    """One of two processes: the gradient by half of the batch."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    wrapped, half = nn.parallel.DistributedDataParallel(model), slice(rank * 2, rank * 2 + 2)
    (wrapped(u[:, half]) - y[half]).square().mean().backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in model.named_parameters()}, f"{folder}/gradient.pt")
    torch.distributed.barrier()
    os._exit(0)  # at times the destructor of a process group waits for its own thread


class Small(nn.Module):
    """A model with a recurrence inside."""

    def __init__(self, cls=None):
        super().__init__()
        self.before, self.after = nn.Linear(3, 4, **DOUBLE), nn.Linear(10, 1, **DOUBLE)
        self.rnn = (cls or co.nn.LSTM)(4, 5, num_layers=2, bidirectional=True, **DOUBLE)

    def forward(self, u):
        return self.after(self.rnn(self.before(u))[0].mean(0))[:, 0]


@pytest.mark.slow
@pytest.mark.thorough
def test_distributed_data_parallel_averages_gradients(tmp_path):
    torch.manual_seed(0)
    model, u, y = Small(), torch.randn(5, 4, 3, **DOUBLE), torch.randn(4, **DOUBLE)
    start = torch.multiprocessing.get_context("spawn").Process
    workers = [
        start(target=in_parallel, args=(rank, str(tmp_path), model, u, y)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0, 0]
    (model(u) - y).square().mean().backward()
    found = torch.load(tmp_path / "gradient.pt", weights_only=True)
    close(found, {n: p.grad for n, p in model.named_parameters()}, 1e-12, "gradient")


@each
def test_outputs_can_be_edited_in_place(case):
    found = []
    for module in case.pair():
        leaves = case.leaves()
        output, last = module(*case.given(leaves))
        values = named(output.data if isinstance(output, PackedSequence) else output, last)
        for y in values.values():
            y += 1
            y[0] = 0
            torch.nn.functional.relu_(y)
        found.append(first_order(values, leaves | dict(module.named_parameters())))
    close(found[1], found[0], 1e-12, "edited")


@each
def test_outputs_lie_in_memory_as_torchs(case):
    found = []
    for module in case.pair():
        output, last = module(*case.given(case.leaves()))
        found.append([(y.stride(), y.is_contiguous()) for y in tensors(named(output.data, last))])
    assert found[0] == found[1]


@each
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_edits_between_forward_and_backward_are_noticed(case, engine):
    """What a derivative reads may not change before it is taken; or else it must not matter."""
    for name in ("u", "x0", "weight_ih_l0", "weight_hh_l0", "bias_hh_l0", "weight_hr_l0"):
        ours = case.pair()[1]
        ours.engine = engine
        leaves, theta = case.leaves(), dict(ours.named_parameters())
        if name not in leaves | theta:
            continue
        seen = {n: y * 1 for n, y in leaves.items()}
        values = padded_outputs(ours, case, seen)
        before = gradients(values, leaves | theta)
        with torch.no_grad():
            (seen | theta)[name].add_(1)
        try:
            after = gradients(values, leaves | theta)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
        else:
            close(after, before, 1e-13, f"{name} edited")


@pytest.mark.parametrize("name", BOTH)
def test_an_empty_batch_is_handled_as_torch_does(name):
    more = {"num_layers": 2, "bidirectional": True} if name in LAYERS else {}
    found = []
    for cls in BOTH[name]:
        module = cls(3, 5, **more, **DOUBLE)
        u = torch.zeros((4, 0, 3) if name in LAYERS else (0, 3), **DOUBLE, requires_grad=True)
        y = tensors(module(u))
        sum(v.sum() for v in y).backward()
        found.append([v.shape for v in y])
        assert u.grad is not None
        assert u.grad.shape == u.shape
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    assert found[0] == found[1]


def test_no_steps_at_all_are_handled_as_torch_does():
    for name in LAYERS:
        with pytest.raises(ValueError, match="Expected sequence length to be larger than 0"):
            BOTH[name][1](3, 5)(torch.zeros(0, 2, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("engine", ENGINES)
@each
@pytest.mark.sampled(3)
def test_a_number_that_is_not_finite_stays_in_its_sample(case, engine, value):
    found, j = [], 1
    for module in case.pair():
        if isinstance(module, RNNModule):
            module.engine = engine
        leaves = case.leaves()
        with torch.no_grad():
            leaves["u"][0, j, 0] = value
        values = padded_outputs(module, case, leaves)
        found.append(values | {"by u": oracles.gradient(objective(values), leaves)["u"]})
    clean = call_of(case.pair()[1], case)[0]
    close(found[1], found[0], 1e-12, f"{value}")
    for n, y in found[1].items():
        others = torch.arange(y.shape[1]) != j
        assert y[:, others].isfinite().all(), f"{n}: other samples are touched"
        if n in clean:
            close(y[:, others], clean[n][:, others], 1e-13, f"{n}: other samples")
    if value != value:
        assert found[1]["output"].isnan().any()


@pytest.mark.parametrize("name", BOTH)
def test_a_subclass_is_what_it_was(name):
    theirs, ours = BOTH[name]
    torch.manual_seed(0)
    made = type("Mine", (ours,), {})(3, 5)
    u = torch.randn((4, 2, 3) if name in LAYERS else (2, 3))
    plain = theirs(3, 5)
    plain.load_state_dict(made.state_dict())
    for y, expected in zip(tensors(made(u)), tensors(plain(u)), strict=True):
        close(y, expected, 1e-5, name)


def test_vmap_is_refused():
    u, grad, vmap, call = (
        torch.randn(4, 2, 3),
        torch.func.grad,
        torch.vmap,
        torch.func.functional_call,
    )
    for cls, given in (
        (co.nn.LSTM, u),
        (co.nn.GRU, u),
        (co.nn.RNN, u),
        (co.nn.GRUCell, u[0]),
        (co.nn.LSTMCell, u[0]),
    ):
        module = cls(3, 5)
        theta = {n: p.detach() for n, p in module.named_parameters()}

        def value(theta, given, m=module):
            return sum(y.sum() for y in tensors(call(m, theta, (given,))))

        many = {n: torch.stack([p, p]) for n, p in theta.items()}
        for f in (
            lambda given=given, theta=theta, value=value: vmap(value, (None, 0))(
                theta, torch.stack([given, given])
            ),
            lambda given=given, many=many, value=value: vmap(value, (0, None))(many, given),
            lambda given=given, theta=theta, value=value: vmap(grad(value), (None, -2))(
                theta, given
            ),
            lambda given=given, m=module: torch.func.jacrev(lambda y: tensors(m(y))[0].sum(-1))(
                given
            ),
        ):
            with pytest.raises(
                NotImplementedError, match=r"torch\.vmap over a recurrence is not supported"
            ):
                f()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BOTH)
def test_half_precision_weights_are_refused(name, dtype):
    theirs, ours = BOTH[name]
    u = torch.zeros((4, 2, 3) if name in LAYERS else (2, 3), dtype=dtype)
    tries = [lambda: ours(3, 5).to(dtype)(u), lambda: ours(3, 5, dtype=dtype)(u)]
    tries += [lambda: ours.from_torch(theirs(3, 5, dtype=dtype))] if name in LAYERS else []
    for attempt in tries:
        with pytest.raises(
            NotImplementedError, match=r"the weights are b?float16.*torch\.autocast"
        ):
            attempt()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["weight_norm", "orthogonal", "spectral_norm"])
@pytest.mark.parametrize("name", LAYERS)
def test_parametrised_weights_have_the_right_gradients(name, way, engine):
    case = Case(name, {}, (4, 3, 2, 3))
    ours, leaves = case.pair()[1], case.leaves()
    ours.engine = engine
    more = {
        "orthogonal": {"orthogonal_map": "cayley"}
        if name == "RNN"
        else {"orthogonal_map": "matrix_exp"}
    }
    getattr(torch.nn.utils.parametrizations, way)(ours, "weight_hh_l0", **more.get(way, {}))
    ours.eval()  # spectral_norm iterates in training
    found = []
    every = leaves | dict(ours.named_parameters())
    assert any("parametrizations" in n for n in every)
    for run in (padded_outputs(ours, case, leaves), None):
        W = {
            n: getattr(ours, n)
            for n in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        }
        values = run or plain(ours, W, leaves, case.lengths)
        found.append(orders(values, every))
    for order, bar in {"values": 1e-12, "first": 1e-11, "second": 1e-10}.items():
        close(found[0][order], found[1][order], bar, order)


@pytest.mark.parametrize("name", LAYERS)
def test_an_engine_that_cannot_run_here_is_refused(name):
    with pytest.raises(NotImplementedError, match="engine 'cuda' "):
        LAYERS[name][1](2, 3, engine="cuda")
    with pytest.raises(ValueError, match="unknown engine 'cpp'"):
        LAYERS[name][1](2, 3, engine="cpp")


@pytest.mark.parametrize("name", LAYERS)
def test_the_engine_that_runs_is_the_one_that_is_named(name, monkeypatch):
    calls = []
    for engine in ENGINES[:-1]:
        loaded = load(engine)

        def forward(*a, f=loaded.forward, e=engine):
            return (calls.append(e), f(*a))[1]

        monkeypatch.setattr(loaded, "forward", forward)
    for engine in ENGINES:
        module = LAYERS[name][1](2, 3, engine=engine)
        assert module.engine == engine
        assert module.engine.why == "requested by name"
        calls.clear()
        module(torch.zeros(4, 2, 2))
        assert calls == ([] if engine == "autograd" else [engine])
    module = LAYERS[name][1](2, 3)
    assert module.engine in ("cpu", "eager")
    assert module.engine.why.startswith("the cell is a formula and the data is on cpu")
    module.engine = "reference"
    assert (module.engine, module.engine.why) == ("reference", "requested by name")
    with pytest.raises(NotImplementedError, match="layer_norm=True is not one"):
        LAYERS[name][1](2, 3, engine="cpu", layer_norm=True)
    assert LAYERS[name][1](2, 3, layer_norm=True).engine == "autograd"


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_derivatives_that_are_not_needed_are_not_computed(kind, monkeypatch):
    """A gradient by the inputs alone makes no weight products; whatever is asked for has the same
    bits.
    """
    torch.manual_seed(0)
    module = getattr(co.nn, kind)(3, 4, num_layers=2, bidirectional=True, **DOUBLE)
    u = torch.randn(5, 2, 3, **DOUBLE, requires_grad=True)

    def value():
        return module(u)[0].square().sum()

    every = [u, *module.parameters()]
    whole = torch.autograd.grad(value(), every)
    for y, g in zip(every, whole, strict=True):
        assert torch.equal(torch.autograd.grad(value(), y)[0], g)
    kept = value()
    assert torch.equal(torch.autograd.grad(kept, u, retain_graph=True)[0], whole[0])
    assert all(map(torch.equal, torch.autograd.grad(kept, every[1:]), whole[1:]))
    calls, usual = [], affine.sum_products
    for module_of in (affine, sweep_weights):
        monkeypatch.setattr(
            module_of, "sum_products", lambda *args: (calls.append(0), usual(*args))[1]
        )
    torch.autograd.grad(value(), u, create_graph=True)
    assert not calls
    torch.autograd.grad(value(), every)
    assert len(calls) == 8


def test_replace_changes_what_can_be_and_nothing_else():
    torch.manual_seed(0)
    model = Small(nn.GRU)
    u = torch.randn(5, 4, 3, **DOUBLE)
    model.rnn.weight_ih_l1.requires_grad_(False)
    model.eval()
    expected, parameters = model(u), dict(model.named_parameters())
    assert co.nn.replace(model, engine="eager") is model
    assert type(model.rnn) is co.nn.GRU
    assert model.rnn.engine == "eager"
    assert not model.rnn.training
    close(model(u), expected, 1e-12, "output")
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in parameters.items()
    }
    assert type(co.nn.replace(nn.LSTM(2, 3))) is co.nn.LSTM
    twice = nn.LSTM(2, 2)
    tied = co.nn.replace(nn.ModuleDict({"a": twice, "b": twice, "c": nn.Sequential(twice)}))
    assert type(tied["a"]) is co.nn.LSTM
    assert tied["a"] is tied["b"] is tied["c"][0]
    already = co.nn.RNN(2, 3)
    assert co.nn.replace(nn.Sequential(already))[0] is already


def test_replace_keeps_optimisers_ties_hooks_and_strangers():
    class Own(nn.LSTM):
        """Somebody's module with a forward of its own."""

    first, second, own, seen = nn.RNN(3, 3), nn.RNN(3, 3), Own(2, 3), []
    second.weight_hh_l0 = first.weight_hh_l0
    first.register_forward_hook(lambda module, *_: seen.append(type(module)))
    model = nn.ModuleList([first, second, own])
    before = [p.detach().clone() for p in model.parameters()]
    step = torch.optim.SGD(model.parameters(), 0.1)
    co.nn.replace(model)
    assert model[2] is own
    assert model[0].weight_hh_l0 is model[1].weight_hh_l0
    model[1](model[0](torch.randn(4, 2, 3))[0])[0].sum().backward()
    step.step()
    changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert changed == [True] * 7 + [False] * 4  # those of the stranger took no part
    assert seen == [co.nn.RNN]


IMPORTING = """
import json, sys, torch, numpy
sys.path.insert(0, sys.argv[1])
from work import counted
started, found = [], []
def hook(event, _):
    if event.startswith(("subprocess", "os.fork", "os.exec")):
        started.append(event)
sys.addaudithook(hook)
for name in ("coadjoint", "coadjoint.nn"):
    before = set(sys.modules)
    with counted() as work:
        __import__(name)
    found.append([work.count, sorted(set(sys.modules) - before), started])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_importing_is_little_work():
    """After torch: modules of this package alone, no compiler or other process, and a bounded
    number of calls.
    """
    command = [sys.executable, "-c", IMPORTING, str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for most, (calls, modules, started) in zip((2_000, 100_000), found, strict=True):
        assert calls < most
        assert {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) == {
            "coadjoint"
        }
        assert started == []


@pytest.fixture
def compiled():
    """torch.compile, from the start."""
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


def compiler():
    """Whether torch.compile's default backend works here."""
    return sys.platform == "linux" and shutil.which("g++") is not None


def trained(model, module, u, steps=2):
    """The parameters after steps of descent and the losses on the way; `model` is `module`, or what
    it was compiled to.
    """
    optimiser, losses = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9), []
    for k in range(steps):
        torch.manual_seed(k)
        optimiser.zero_grad()
        loss = objective({str(i): y for i, y in enumerate(tensors(model(u)))})
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return {n: p.detach().clone() for n, p in module.named_parameters()} | {
        "losses": torch.stack(losses)
    }


COMPILED = {
    "RNN, eager": ("eager", lambda: co.nn.RNN(3, 5, nonlinearity="relu", **DOUBLE)),
    "LSTM, eager": (
        "eager",
        lambda: co.nn.LSTM(3, 5, 2, dropout=0.4, bidirectional=True, proj_size=2, **DOUBLE),
    ),
    "GRU in a model": ("aot_eager", lambda: Small(lambda *a, num_layers, **k: co.nn.GRU(*a, **k))),
    "RNN": ("aot_eager", lambda: co.nn.RNN(3, 5, bias=False, batch_first=True, **DOUBLE)),
    "LSTM, dropout": ("aot_eager", lambda: co.nn.LSTM(3, 5, 2, dropout=0.4, **DOUBLE)),
    "GRUCell": ("aot_eager", lambda: co.nn.GRUCell(3, 5, **DOUBLE)),
    "GRU, inductor": ("inductor", lambda: co.nn.GRU(3, 5, **DOUBLE)),
}
# The others hold each kind of module and each backend; each of them takes a second.
COMPILED_LATER = ("GRU in a model", "RNN", "LSTM, dropout")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n in COMPILED_LATER)) for n in COMPILED],
)
def test_compiled_training_is_training(name, compiled):
    backend, make = COMPILED[name]
    if backend == "inductor" and not compiler():
        pytest.skip("torch.compile finds no C++ compiler")
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    u = torch.randn((2, 3) if name == "GRUCell" else (4, 2, 3), **DOUBLE)
    found = trained(compiled(other, backend=backend, fullgraph=True), other, u)
    close(found, trained(model, model, u), 1e-12, name)
    assert not torch.equal(found["losses"][0], found["losses"][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param("eager", marks=pytest.mark.thorough), "aot_eager"]
)
def test_compiled_models_take_other_shapes(backend, compiled):
    torch.manual_seed(0)
    module = co.nn.GRU(3, 5, **DOUBLE)
    fast = compiled(module, backend=backend)
    for T, B in ((4, 2), (7, 3), (2, 5), (1, 1)):
        u = torch.randn(T, B, 3, **DOUBLE, requires_grad=True)
        found = [
            first_order(dict(zip(("output", "h_n"), m(u), strict=True)), {"u": u})
            for m in (fast, module)
        ]
        close(*found, 1e-12, f"{T=} {B=}")


def test_compiled_models_take_packed_sequences(compiled):
    torch.manual_seed(0)
    module = co.nn.LSTM(3, 5, bidirectional=True, **DOUBLE)

    def model(u, lengths):
        packed = pack_padded_sequence(u * 2, lengths, enforce_sorted=False)
        output, (h, c) = module(packed)
        return output.data.sin(), h + 1, c

    u, lengths = torch.randn(4, 3, 3, **DOUBLE, requires_grad=True), torch.tensor([2, 4, 3])
    found = []
    for f in (compiled(model, backend="aot_eager"), model):
        values = dict(zip(("output", "h", "c"), f(u, lengths), strict=True))
        found.append(first_order(values, {"u": u} | dict(module.named_parameters())))
    close(*found, 1e-12, "packed")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_refuse_a_second_derivative(backend, compiled):
    """With a sentence.

    Where one does come through, as for what lies above the recurrence, it is right.
    """
    torch.manual_seed(0)
    model, u = (
        Small(lambda *a, num_layers, **k: co.nn.GRU(*a, **k)),
        torch.randn(4, 2, 3, **DOUBLE, requires_grad=True),
    )
    fast, refusals = compiled(model, backend=backend, fullgraph=True), 0
    parts = {
        "u": u,
        "before": model.before.weight,
        "rnn": model.rnn.weight_hh_l0,
        "after": model.after.weight,
    }
    for first, second in itertools.product(parts.values(), repeat=2):

        def twice(f, first=first, second=second):
            slope = torch.autograd.grad(f(u).square().sum(), first, create_graph=True)[0]
            return torch.autograd.grad(slope.square().sum(), second)[0]

        try:
            found = twice(fast)
        except RuntimeError as error:
            refused = (
                "a compiled recurrence can be differentiated only once"
                "|does not currently support double backward"
            )
            if not re.search(refused, str(error)):
                raise
            refusals += 1
        else:
            assert first is parts["after"]
            close(found, twice(model), 1e-10, "second derivative")
    assert refusals >= 12


def test_a_module_is_compiled_before_it_has_run(compiled, monkeypatch):
    monkeypatch.setattr(frame, "FORMULAS", {"GRU": dataclasses.replace(frame.FORMULAS["GRU"])})
    monkeypatch.setattr(opaque, "CELLS_BY_NAME", {})
    module = co.nn.GRU(3, 5)
    compiled(module, backend="eager", fullgraph=True)(torch.zeros(4, 2, 3))


def test_inside_a_compiled_program_other_parts_may_break_the_graph(compiled):
    torch.manual_seed(0)
    for more in ({"layer_norm": True}, {"engine": "autograd"}):
        module, u = co.nn.GRU(3, 5, **more, **DOUBLE), torch.randn(4, 2, 3, **DOUBLE)
        close(compiled(module, backend="eager")(u)[0], module(u)[0], 1e-13, more)
