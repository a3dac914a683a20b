"""Compiled code only receives addresses of ordinary tensors that own the memory it will read.

Cases that would end the process if they went wrong run in a process of their own.
"""

from __future__ import annotations

import functools
import re
import tokenize

import pytest
import torch

import coadjoint as co
import warm
from coadjoint.sweeps.engines import eager, reference
from coadjoint.sweeps.engines.c import engine as c_engine
from coadjoint.sweeps.plan import Saved, SweepPlan
from coadjoint.sweeps.pointers import pointers
from coadjoint.sweeps.rows import Link, Rows
from paths import ROOT

pytestmark = pytest.mark.slow

SOURCES = ROOT / "src" / "coadjoint"
CPU, F32 = torch.device("cpu"), torch.float32


def address(y, entries=6, dtype=F32, device=CPU):
    return pointers(["W"], [y], [entries], [dtype], device)


def test_addresses_of_ordinary_tensors_are_taken():
    y = torch.arange(6.0).view(2, 3)
    assert address(y).addresses == [y.data_ptr()]
    assert address(torch.nn.Parameter(y)).addresses == [y.data_ptr()]
    assert address(y[1], 3).addresses == [y.data_ptr() + 12]
    assert address(None).addresses == [0]
    assert address(torch.empty(0), 0).addresses == [0]
    assert address(torch.ones(2, dtype=torch.int32), 2, torch.int32).owners[0].tolist() == [1, 1]


def test_lazy_tensors_are_computed_first():
    """Strides, negatives that are only marked, zeros that are stored nowhere, and subclasses that
    only add methods.
    """

    class Named(torch.Tensor):
        pass

    y = torch.randn(2, 3)
    z = torch.complex(torch.zeros(6), torch.ones(6))
    cases = {
        "transposed": (y.t(), y.t()),
        "expanded": (torch.ones(1, 3).expand(2, 3), torch.ones(2, 3)),
        "negative": (torch._neg_view(y), -y),
        "conjugate": (z.conj().imag, -torch.ones(6)),
        "zeros": (torch._efficientzerotensor((2, 3)), torch.zeros(2, 3)),
        "subclass": (y.as_subclass(Named), y),
    }
    for what, (given, expected) in cases.items():
        found = address(given)
        held = found.owners[0]
        assert held.is_contiguous(), what
        assert not held.is_neg(), what
        assert type(held) is torch.Tensor, what
        assert found.addresses == [held.data_ptr()] != [0], what
        assert torch.equal(held, expected.contiguous()), what
    one = (
        torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    )  # contiguous as it stands, and marked
    assert one.is_neg()
    assert address(one, 1).owners[0].tolist() == [-1]


def shrunk(size, *shape, turned=False):
    y = torch.zeros(shape)
    y = y.t() if turned else y
    y.untyped_storage().resize_(size)
    return y


def test_a_tensor_with_too_little_memory_is_refused():
    for size in (0, 4, 20, 23):
        with pytest.raises(
            co.InputError, match=r"W has shape \[2, 3\], but its memory was freed or is too small"
        ):
            address(shrunk(size, 2, 3))
        with pytest.raises(co.InputError, match="its memory was freed or is too small"):
            address(shrunk(size, 3, 2, turned=True))
    part = torch.zeros(9)[3:]
    assert address(part)
    part.untyped_storage().resize_(24)  # as many bytes as it has values, but not where it lies
    with pytest.raises(co.InputError, match="its memory was freed or is too small"):
        address(part)
    assert address(shrunk(24, 2, 3))


def test_tensors_that_the_loop_does_not_expect_are_refused():
    y = torch.zeros(2, 3)
    for given, error, said in (
        (
            y.double(),
            co.KindError,
            r"W is float64; expected float32. Convert it with .to\(torch.float32\).",
        ),
        (y.half(), co.KindError, "W is float16; expected float32"),
        (y.view(torch.int32), co.KindError, "W is int32; expected float32"),
        (y[:1], co.InputError, r"W has 3 values, shape \[1, 3\]; expected 6."),
        (torch.zeros(7), co.InputError, "W has 7 values"),
        (y.to("meta"), co.Unsupported, "W is on the device meta, where tensors have no values"),
        (y.to_sparse(), co.Unsupported, r"W is a tensor of layout sparse_coo.*\.to_dense\(\)"),
        (y.to_sparse_csr(), co.Unsupported, "W is a tensor of layout sparse_csr"),
        (y.to_mkldnn(), co.Unsupported, "W is a tensor of layout _mkldnn"),
    ):
        with pytest.raises(error, match=said):
            address(given)
    with pytest.raises(co.InputError, match="W is on cpu; expected it on cuda:0"):
        address(y, device=torch.device("cuda", 0))


def test_addresses_of_wrappers_of_torch_func_are_refused():
    refusals = []

    def f(y):
        try:
            address(y)
        except co.Unsupported as error:
            refusals.append(str(error))
        return y.sum()

    y = torch.zeros(2, 3)
    torch.vmap(f)(torch.zeros(2, 2, 3))
    torch.func.grad(f)(y)
    torch.func.jvp(f, (y,), (y,))
    torch.func.functionalize(f)(y)
    assert len(refusals) == 4
    assert all(text.startswith("W is wrapped by a transform of torch.func;") for text in refusals)


@pytest.mark.parametrize("name", ["W", "base", "v", "p", "x0"])
def test_no_loop_reads_past_the_end(name):
    """Of weights of another shape or type, forward and backward, nothing is read."""
    cell, rows, d = co.cells.peephole, Rows([2, 2, 1]), 3
    G, S = len(cell.gates), len(cell.slots)
    given = {
        "base": torch.zeros(5, G * d), "v": None, "W": torch.zeros(G * d, d),
        "x0": torch.zeros(2, S * d),
        "p": torch.zeros(len(cell.p) * d),
    }  # fmt: skip
    plan = SweepPlan(cell, rows, c_engine)
    x, a, q = c_engine.forward(plan, *given.values())
    wrong = {"v": torch.zeros(4, d), "x0": torch.zeros(3, S * d)}.get(name)
    wrong = given[name][..., :-1].clone() if wrong is None else wrong
    with pytest.raises((co.InputError, RuntimeError)):
        c_engine.forward(plan, *(given | {name: wrong}).values())
    with pytest.raises((co.KindError, RuntimeError)):
        c_engine.forward(plan, *(given | {name: torch.zeros(5, 5, dtype=torch.complex64)}).values())
    tape = Saved(a, None, x, given["p"], q)
    short = {
        "W": (tape, wrong),
        "p": (tape._replace(p=wrong), given["W"]),
        "base": (tape._replace(a=wrong), given["W"]),
    }
    if name in short:
        with pytest.raises(co.InputError):
            c_engine.adjoint(plan, short[name][0], short[name][1], x, None, None, None, False, True)
        with pytest.raises(co.InputError):
            c_engine.tangent(plan, short[name][0], short[name][1], x, None, None)
    link = Link(rows, torch.ones(4, 1))
    with pytest.raises(co.InputError, match="link has 4 values"):
        c_engine.adjoint(plan, tape, given["W"], x, None, None, link, False, True)


def test_marks_are_seen_by_all_engines_alike():
    """A negative W that is only marked gives what the same numbers give."""
    torch.manual_seed(0)
    cell, rows = co.cells.elman(), Rows([2, 2])
    base, W, x0 = torch.randn(4, 3), torch.randn(3, 3), torch.randn(2, 3)
    for engine in (c_engine, eager, reference):
        plan = SweepPlan(cell, rows, engine)
        plain, marked = (
            engine.forward(plan, base, None, y, x0, None)[0] for y in (-W, torch._neg_view(W))
        )
        assert torch.equal(plain, marked), engine.__name__


def test_addresses_are_taken_in_one_place_only():
    """No other file asks for an address, but where one tells arrays apart or how they
    are aligned.
    """
    harmless = {
        "sweeps/affine.py": 1,
        "sweeps/engines/cuda/captured_function.py": 1,
        "sweeps/engines/cuda/repeatable.py": 1,
        "sweeps/engines/eager/views.py": 1,
        "sweeps/step_functions/tape.py": 1,
    }
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        with path.open("rb") as f:
            tokens = [t.string for t in tokenize.tokenize(f.readline) if t.type == tokenize.NAME]
        count = tokens.count("data_ptr")
        if count and path.name != "pointers.py":
            found[str(path.relative_to(SOURCES))] = count
    assert found == harmless
    for name in ("c/engine.py", "cuda/engine.py"):
        assert re.search(r"\bpointers\(", (SOURCES / "sweeps" / "engines" / name).read_text())


BEGIN = """
import contextlib, sys, warnings
import torch
import coadjoint as co
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
warnings.simplefilter("ignore")
torch.manual_seed(0)

def refused(what, call, said, kind=co.CoadjointError):
    try:
        call()
    except kind as error:
        text = str(error)
        assert said in text, (what, text)
        assert "\\n" not in text, (what, text)
    else:
        raise AssertionError(f"{what}: nothing was refused")
    print("refused", what, flush=True)
"""

FAKE = """
OPTIONS = {
    "plain": {}, "stacked": {"num_layers": 2, "bidirectional": True},
    "by steps": {"engine": "autograd"}, "normalised": {"layer_norm": True},
    "noisy": {"recurrent_dropout": 0.2, "zoneout": 0.1}, "large": {"hidden_size": 200},
}
for name in ("RNN", "LSTM", "GRU"):
    for what, options in OPTIONS.items():
        sizes = {"input_size": 3, "hidden_size": 5} | options
        shape = (40, 20, 3) if what == "large" else (4, 2, 3)
        with FakeTensorMode():
            module = getattr(co.nn, name)(**sizes)
            u = torch.randn(*shape, requires_grad=True)
            output, state = module(u)
            output.sum().backward()
        theirs = getattr(torch.nn, name)(
            3, sizes["hidden_size"], sizes.get("num_layers", 1),
            bidirectional=sizes.get("bidirectional", False),
        )
        expected = theirs(torch.zeros(shape))
        assert output.shape == expected[0].shape and isinstance(output, FakeTensor)
        h = state[0] if name == "LSTM" else state
        assert h.shape == (expected[1][0] if name == "LSTM" else expected[1]).shape
        for p in (u, *module.parameters()):
            assert isinstance(p.grad, FakeTensor) and p.grad.shape == p.shape
        print("works", name, what, flush=True)
    with FakeTensorMode():
        cell = getattr(co.nn, name + "Cell")(3, 5)
        y = cell(torch.randn(2, 3))
        assert (y[0] if name == "LSTM" else y).shape == (2, 5)
module, u = co.nn.RNN(3, 5), torch.randn(4, 2, 3)
with FakeTensorMode() as mode:
    fake = mode.from_tensor(u)
with FakeTensorMode(allow_non_fake_inputs=True):
    assert isinstance(module(u)[0], FakeTensor)
with mode:
    made = co.nn.RNN(3, 5)
assert isinstance(made(fake)[0], FakeTensor)  # outside the mode
for cell in ("elman", "lstm", "lru"):
    net = co.Network(cell, inputs=3, hidden=5, outputs=2)
    refused(cell + ", a fake input", lambda: net(fake),
            "u is a FakeTensor; expected an ordinary dense tensor.")
    with FakeTensorMode():
        refused(cell + ", all fake",
                lambda: co.Network(cell, inputs=3, hidden=5, outputs=2)(torch.zeros(4, 2, 3)),
                "u is a FakeTensor")
        refused(cell + ", real in the mode", lambda: net(u), "u is used under FakeTensorMode")
with mode:
    hollow = co.Network(inputs=3, hidden=5, outputs=2)
refused("fake weights", lambda: hollow(u), "the network's weight is a FakeTensor")
with mode:
    refused("a list", lambda: net([torch.zeros(3, 3), torch.zeros(2, 3)]),
            "sequence 0 of `u` is a FakeTensor")
    refused("a stack",
            lambda: co.Stack(["gru", "gru"], inputs=3, hidden=4, outputs=2)(torch.zeros(4, 2, 3)),
            "FakeTensor")
"""

OTHERS = """
from torch.testing._internal.distributed.fake_pg import FakeStore
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

u = torch.randn(4, 2, 3)
def changed(kind, change, names):
    module = getattr(co.nn, kind)(3, 6)
    for name in names:
        setattr(module, name, Parameter(change(getattr(module, name).detach())))
    return module

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for placement in (Shard(0), Replicate()):
    spread = lambda y: distribute_tensor(y, mesh, [placement])
    for kind in ("RNN", "LSTM", "GRU"):
        for name in ("weight_hh_l0", "weight_ih_l0", "bias_hh_l0"):
            module = changed(kind, spread, [name])
            refused(f"DTensor {placement} {kind} {name}", lambda: module(u),
                    f"{name} is a DTensor; sweeps read memory")
    cell = changed("LSTMCell", spread, ["weight_hh"])
    refused("DTensor in a cell", lambda: cell(u[0]), "weight_hh is a DTensor")
    refused("DTensor input", lambda: co.nn.RNN(3, 6)(spread(u)), "the input is a DTensor")
    net = co.Network(inputs=3, hidden=6, outputs=2)
    refused("DTensor u", lambda: net(spread(u)), "u is a DTensor")
    net.W = Parameter(spread(net.W.detach()))
    refused("DTensor W", lambda: net(u), "W is a DTensor")

def shrink(y):
    y = y.clone()
    y.untyped_storage().resize_(0)
    return y

class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        assert f is torch.ops.aten.detach.default, f"{f} was called on a tensor that has no memory"
        return torch.Tensor._make_wrapper_subclass(cls, args[0].shape)

for what, change, said in (
    ("freed", shrink, "W has shape [6, 6], but its memory was freed"),
    ("sparse", lambda y: y.to_sparse(), "W is a tensor of layout sparse_coo"),
    ("meta", lambda y: y.to("meta"), "W is on the device meta"),
    ("double", lambda y: y.double(), "W is float64; expected float32"),
    ("half", lambda y: y.half(), "W is float16; expected float32"),
    ("smaller", lambda y: y[:1, :1].clone(), "W has 1 values, shape [1, 1]; expected 36."),
    ("empty", lambda y: y[:0].clone(), "W has 0 values"),
    ("wrapped", lambda y: torch.Tensor._make_wrapper_subclass(Wrapped, y.shape),
     "weight_hh_l1 is a Wrapped"),
):
    module = co.nn.RNN(3, 6, 2)
    module.weight_hh_l1 = Parameter(change(module.weight_hh_l1.detach()), requires_grad=False)
    refused(what, lambda: module(u), said)
    net = co.Network(inputs=3, hidden=6, outputs=2)
    net.W = Parameter(change(net.W.detach()), requires_grad=False)
    refused(what + " in a network", lambda: net(u), said.replace("weight_hh_l1", "W"))

module, net = co.nn.GRU(3, 6), co.Network(inputs=3, hidden=6, outputs=2)
jagged = torch.nested.nested_tensor([u[:, 0], u[:2, 1]], layout=torch.jagged)
for what, given in (("sparse", u.to_sparse()), ("jagged", jagged)):
    refused(what + " input", lambda: module(given), "the input is a")
    refused(what + " u", lambda: net(given), "u is a")
refused("a network on meta",
        lambda: co.Network(inputs=3, hidden=6, outputs=2, device="meta")(u.to("meta")),
        "on the device meta")
assert co.nn.GRU(3, 6, device="meta")(u.to("meta"))[0].shape == (4, 2, 6)
for run in (module, lambda u: net(u).y_hat):
    refused("vmap", lambda: torch.vmap(run)(torch.stack([u, u])),
            "torch.vmap over a recurrence is not supported")

freed = torch.randn(4, 2, 3)
freed.untyped_storage().resize_(0)
for what, run in (("a network", net), ("a module", module)):
    refused(f"{what} with freed input", lambda: run(freed), "was freed")

W = net.W.detach().clone()
f = lambda W: torch.func.functional_call(net, {"W": W}, (u,)).y_hat.sum()
leaf = W.clone().requires_grad_()
slope = torch.autograd.grad(f(leaf), leaf)[0]
assert torch.allclose(torch.func.grad(f)(W), slope)
along = torch.func.jvp(f, (W,), (torch.ones_like(W),))[1]
assert torch.allclose(along, slope.sum(), rtol=1e-4)

saved = co.nn.LSTM(3, 6)  # tensors that a hook returns in place of saved ones are checked as well
unpack = lambda y: y.double() if y.dim() == 2 else y
with torch.autograd.graph.saved_tensors_hooks(lambda y: y, unpack):
    refused("saved in another type", lambda: saved(u)[0].sum().backward(), "float",
            (co.CoadjointError, RuntimeError))
"""


@pytest.mark.parametrize("body", [FAKE, OTHERS], ids=["fake tensors", "all others"])
def test_no_tensor_ends_the_process(body, tmp_path):
    done = warm.run("-c", BEGIN + body, cwd=tmp_path)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"


def first_of(module, u):
    return module(u)[0]


def test_tracing_sees_a_sweep_as_one_operator():
    """Not as the writing of memory, which a trace would leave out."""
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.manual_seed(0)
    u, v = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    for module in (co.nn.RNN(3, 5), co.nn.LSTM(3, 5, bidirectional=True)):
        traced = make_fx(functools.partial(first_of, module))(u)
        assert "torch.ops.coadjoint.sweep" in traced.code
        torch.testing.assert_close(traced(v), module(v)[0], rtol=1e-6, atol=1e-6)
