"""Modules under torch.compile have the right gradients, and every parameter owns its gradient.

Changing a gradient or an output in place changes nothing else.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves

import coadjoint as co
from coadjoint.nn import frame
from coadjoint.sweeps import memory
from coadjoint.sweeps.engines import opaque

pytestmark = pytest.mark.slow

DOUBLE = {"dtype": torch.float64}
MODULES = {
    "RNN": lambda: co.nn.RNN(3, 5, **DOUBLE),
    "RNN, relu": lambda: co.nn.RNN(
        3, 4, 2, nonlinearity="relu", bias=False, batch_first=True, **DOUBLE
    ),
    "RNN of one unit": lambda: co.nn.RNN(3, 1, **DOUBLE),
    "LSTM": lambda: co.nn.LSTM(3, 5, batch_first=True, **DOUBLE),
    "LSTM, projected": lambda: co.nn.LSTM(3, 5, 2, bidirectional=True, proj_size=2, **DOUBLE),
    "LSTM, peepholes": lambda: co.nn.LSTM(3, 5, peephole=True, **DOUBLE),
    "GRU": lambda: co.nn.GRU(3, 5, bidirectional=True, **DOUBLE),
    "GRU, zoneout": lambda: co.nn.GRU(3, 5, zoneout=0.3, **DOUBLE).eval(),
    "RNNCell": lambda: co.nn.RNNCell(3, 5, **DOUBLE),
    "LSTMCell": lambda: co.nn.LSTMCell(3, 5, **DOUBLE),
    "GRUCell": lambda: co.nn.GRUCell(3, 5, bias=False, **DOUBLE),
}
BACKENDS = [*((name, "aot_eager") for name in MODULES), ("RNN", "inductor")]
# each takes seconds
BACKENDS += [
    pytest.param(name, "inductor", marks=pytest.mark.thorough)
    for name in ("LSTM, peepholes", "RNNCell")
]


def made(name):
    torch.manual_seed(0)
    module = MODULES[name]()
    return module, torch.randn(*(() if name.endswith("Cell") else (4,)), 2, 3, **DOUBLE)


def compiler(backend):
    return backend != "inductor" or (sys.platform == "linux" and shutil.which("g++") is not None)


def shared(tensors):
    """The pairs of them that lie in one storage."""
    where = {name: y.untyped_storage().data_ptr() for name, y in tensors.items() if y.numel()}
    return [(a, b) for a, b in itertools.combinations(where, 2) if where[a] == where[b]]


def unowned(parameters, gradients):
    """The pairs of gradients, or of a gradient and a parameter, that lie in one storage."""
    gradients = {f"gradient of {name}": g for name, g in zip(parameters, gradients, strict=True)}
    return shared(gradients | parameters)


def objective(outputs):
    """Of the sums of the outputs: it keeps none of their values, so that they may be changed before
    a backward pass.
    """
    return sum((k + 1) * y.sum(0).sum() for k, y in enumerate(outputs))


def handled(f, module, u):
    """What is left after everything that a training loop may do with outputs and gradients, by
    name.
    """
    found = {}
    outputs = tree_leaves(f(u))
    loss = objective(outputs)
    found |= {f"output {k}": y.detach().clone() for k, y in enumerate(outputs)}
    with torch.no_grad():
        outputs[0].zero_()
    found |= {f"output {k} beside another": y.detach().clone() for k, y in enumerate(outputs)}
    with torch.no_grad():
        for y in outputs:
            y.fill_(3.0)
    loss.backward()
    names = dict(module.named_parameters())
    found |= {f"{name}, outputs changed": p.grad.clone() for name, p in names.items()}
    for k, p in enumerate(names.values()):
        p.grad.mul_(k + 2).add_(1)
    found |= {f"{name}, changed": p.grad.clone() for name, p in names.items()}
    objective(tree_leaves(f(u))).backward()
    found |= {f"{name}, added to": p.grad.clone() for name, p in names.items()}
    found["norm"] = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    found |= {f"{name}, clipped": p.grad.clone() for name, p in names.items()}
    return found


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
@pytest.mark.sampled(2)
def test_compiled_gradients_may_be_changed_in_place(name, backend):
    if not compiler(backend):
        pytest.skip("torch.compile finds no C++ compiler")
    module, u = made(name)
    twin = copy.deepcopy(module)
    torch._dynamo.reset()
    fast = torch.compile(twin, backend=backend, fullgraph=True)
    found, expected = handled(fast, twin, u), handled(module, module, u)
    assert found.keys() == expected.keys()
    for what, y in expected.items():
        gap = (found[what] - y).abs().max().item()
        assert gap <= 1e-12 * y.abs().max().item(), f"{what} is off by {gap}"
    parameters = dict(twin.named_parameters())
    assert not unowned(parameters, [p.grad for p in parameters.values()])
    outputs = tree_leaves(fast(u))
    assert not shared({f"output {k}": y for k, y in enumerate(outputs)} | {"input": u} | parameters)
    grads = torch.autograd.grad(objective(outputs), list(parameters.values()))
    assert not unowned(parameters, grads)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_a_module_share_no_memory(name):
    module, u = made(name)
    parameters = dict(module.named_parameters())

    def value():
        return objective(tree_leaves(module(u)))

    for grads in (
        torch.autograd.grad(value(), list(parameters.values())),
        torch.autograd.grad(value(), list(parameters.values()), create_graph=True),
    ):
        assert not unowned(parameters, grads)
    value().backward()
    assert not unowned(parameters, [p.grad for p in parameters.values()])


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru", "peephole", "lru", "unicornn"])
def test_gradients_of_a_network_share_no_memory(cell):
    torch.manual_seed(0)
    net = co.Network(
        cell, inputs=3, hidden=4, outputs=2, readout="every", skip=True, x0="learned", **DOUBLE
    )
    batch = co.Batch(torch.randn(4, 2, 3, **DOUBLE), torch.randn(4, 2, 2, **DOUBLE))
    parameters = dict(net.named_parameters())
    for method in (co.BPTT(), co.Penalised("log-ratio", 0.1)):
        found = method(net, batch, "squared").gradient
        assert not unowned(parameters, [found[name] for name in parameters])
    lam = net(batch.u).costates("squared", batch.y)
    (lam.loss + co.penalties.log_ratio(lam)).mean().backward()
    assert not unowned(parameters, [p.grad for p in parameters.values()])


CELLS = ("RNN_TANH", "LSTM", "GRU", "LSTM peephole", "GRU dropout zoneout")


def sizes_of(cell, d):
    return (
        len(cell.gates) * d,
        len(cell.slots) * d,
        len(cell.v) * d,
        len(cell.read) * d,
        len(cell.p) * d,
    )


def arguments(name, engine, T, B, d):
    """What the operators `sweep` and `sweep_back` are given, but for what the first leaves to the
    second.
    """
    frame.find_formula(
        *name.split()[:1], *(word in name for word in ("peephole", "dropout", "zoneout"))
    )
    cell = opaque.CELLS_BY_NAME[name]
    gates, slots, side, reads, own = sizes_of(cell, d)
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, **DOUBLE)

    base, W, x0 = randn(T * B, gates), randn(gates, reads) / d, randn(B, slots)
    return (
        base,
        randn(T * B, side) if side else None,
        W,
        x0,
        randn(own) if own else None,
        name,
        engine,
    )


@pytest.mark.parametrize("engine", ["reference", "eager", "cpu"])
@pytest.mark.parametrize("name", CELLS)
def test_operators_return_memory_of_their_own(name, engine):
    """Their outputs share none with each other nor with what they were given: at one step, at
    several, and where arrays are so large that they are used again.
    """
    for T, B, d in ((1, 1, 1), (1, 2, 3), (3, 2, 3), (2, memory.SMALL // 64, 4)):
        given = arguments(name, engine, T, B, d)
        outputs = opaque.sweep(*given)
        back = opaque.sweep_back(torch.ones_like(outputs[0]), *given[:5], *outputs, *given[5:])
        tensors = {f"given {k}": y for k, y in enumerate(given) if isinstance(y, torch.Tensor)}
        tensors |= {f"sweep {k}": y for k, y in enumerate(outputs)} | {
            f"back {k}": y for k, y in enumerate(back)
        }
        assert not shared(tensors)


@pytest.mark.parametrize("name", ["RNN_TANH", "GRU dropout zoneout"])
def test_operators_follow_torchs_rules(name):
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = arguments(name, "cpu", 3, 2, 3)
    torch.library.opcheck(opaque.sweep, given, test_utils=rules)
    outputs = opaque.sweep(*given)
    back = (torch.ones_like(outputs[0]), *given[:5], *outputs, *given[5:])
    torch.library.opcheck(opaque.sweep_back, back, test_utils=rules)
    torch.library.opcheck(opaque.with_own_gradient, (torch.randn(3, 4).t(),), test_utils=rules)


def test_an_input_on_which_nothing_depends_has_a_gradient_of_zeros():
    """A compiled program was promised a gradient of the input's shape."""
    y = torch.ones(2, 3)
    assert torch.equal(opaque.gradient_or_zeros(None, y, y), torch.zeros(2, 3))
    assert opaque.gradient_or_zeros(None, None, y).shape == (0,)
    assert opaque.gradient_or_zeros(y, y, y) is y


def test_own_can_be_differentiated_again():
    y = torch.randn(3, **DOUBLE, requires_grad=True)
    torch.autograd.gradcheck(lambda y: opaque.with_own_gradient(y).sin(), y)
    torch.autograd.gradgradcheck(lambda y: opaque.with_own_gradient(y).sin(), y)
