"""One step by torch's own functions: the values and derivatives of a sweep.

A CPU stands in for a GPU (fixture `place`): modules run cell by cell, and cells are functions whose
derivatives read the results that those of torch's kernels read.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

import coadjoint as co
from coadjoint.nn import cells, layers, one_step
from coadjoint.sweeps.torch_internals import tree_leaves
from compare import close

DOUBLE = {"dtype": torch.float64}
MODULES = {
    "RNN": {},
    "RNN relu": {"nonlinearity": "relu"},
    "LSTM": {},
    "GRU": {},
    "RNN two layers": {"num_layers": 2, "batch_first": True},
    "LSTM two layers": {"num_layers": 2, "batch_first": True, "bias": False},
    "GRU two layers": {"num_layers": 2, "bias": False},
    "LSTM both ways": {"num_layers": 2, "bidirectional": True},
    "GRU both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}
CELLS = {"RNNCell": {}, "RNNCell relu": {"nonlinearity": "relu"}, "LSTMCell": {}, "GRUCell": {}}


def make(name, library=co.nn, **more):
    """A module or cell with 3 inputs and 4 units."""
    torch.manual_seed(1)
    options = (MODULES | CELLS)[name] | more
    return getattr(library, name.split()[0])(3, 4, **options, **DOUBLE)


class ResultIsRead(torch.autograd.Function):
    """The value itself, and a derivative that reads it, as that of a kernel on a GPU may."""

    @staticmethod
    def forward(ctx, y):
        result = y.clone()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, bar):
        [result] = ctx.saved_tensors  # an error if it was changed
        return bar + 0 * result


def lstm_cell_of_a_gpu(u, states, *weights):
    """torch's function on a GPU: its derivative reads c'."""
    i, f, g, o = one_step_gates(u, states[0], *weights).chunk(4, 1)
    c = ResultIsRead.apply(f.sigmoid() * states[1] + i.sigmoid() * g.tanh())
    return o.sigmoid() * c.tanh(), c


def one_step_gates(u, h, W_ih, W_hh, b_ih=None, b_hh=None):
    """The gates of an LSTM."""
    return nn.functional.linear(u, W_ih, b_ih) + nn.functional.linear(h, W_hh, b_hh)


@pytest.fixture(params=["cpu", "gpu"])
def place(request, monkeypatch):
    """Where the step is taken; on a "gpu" torch's functions of whole layers are not called."""
    if request.param == "gpu":
        monkeypatch.setattr(one_step, "is_on_gpu", lambda y: True)
        monkeypatch.setattr(one_step, "LAYERS", {})
        monkeypatch.setitem(one_step.CELLS, "LSTM", lstm_cell_of_a_gpu)
    return request.param


def leaves_of(module, single):
    """The input and, for each slot, the state before, with gradients."""
    torch.manual_seed(2)
    slots = 2 if "LSTM" in type(module).__name__ else 1
    B = () if single else (2,)
    u, state = (*B, 3), (*B, 4)
    if isinstance(module, nn.RNNBase):
        u = (2, 1, 3) if module.batch_first and not single else (1, *u)
        state = (module.num_layers * (1 + module.bidirectional), *state)
    return [torch.randn(*shape, **DOUBLE).requires_grad_() for shape in (u, *[state] * slots)]


def call(module, leaves, with_states=True):
    """All tensors that a call returns, in their order."""
    u, *states = leaves
    hx = tuple(states) if len(states) > 1 else states[0]
    out = module(u, hx) if with_states else module(u)
    if isinstance(out, torch.Tensor):
        return [out]
    first, last = out
    return [first, last] if isinstance(last, torch.Tensor) else [first, *last]


def derivatives(module, leaves, with_states):
    """Outputs, gradients, and the gradient of a gradient's square."""
    outputs = call(module, leaves, with_states)
    variables = [*leaves, *module.parameters()]
    total = sum((i + 1) * (y**3).sum() for i, y in enumerate(outputs))
    first = torch.autograd.grad(total, variables, create_graph=True, allow_unused=True)
    square = sum(g.square().sum() for g in first if g is not None)
    second = torch.autograd.grad(square, variables, allow_unused=True)
    named = {f"output {i}": y for i, y in enumerate(outputs)}
    for order, gradients in (("first", first), ("second", second)):
        for i, (y, g) in enumerate(zip(variables, gradients, strict=True)):
            named[f"{order} {i}"] = torch.zeros_like(y) if g is None else g
    return named


@contextlib.contextmanager
def sweeps_counted(monkeypatch):
    """A list that has one entry for each sweep inside."""
    count = []
    with monkeypatch.context() as patch:
        for where in (cells, layers):
            usual = where.run_sweep
            patch.setattr(where, "run_sweep", lambda *a, f=usual: (count.append(0), f(*a))[1])
        yield count


@pytest.mark.parametrize("with_states", [True, False], ids=["hx", "zeros"])
@pytest.mark.parametrize("single", [False, True], ids=["samples", "one sample"])
@pytest.mark.parametrize("name", [*MODULES, *CELLS])
def test_values_and_two_derivatives_are_those_of_a_sweep(
    name, single, with_states, place, monkeypatch
):
    module = make(name)
    by_sweep = copy.deepcopy(module)
    by_sweep._engine = "eager"
    leaves = leaves_of(module, single)
    with sweeps_counted(monkeypatch) as count:
        found = derivatives(module, leaves, with_states)
        assert not count
        expected = derivatives(by_sweep, leaves, with_states)
        assert count
    close(found, expected, 1e-12, name)
    with torch.no_grad():
        without = call(module, leaves, with_states)
        theirs = make(name, nn)
        theirs.load_state_dict(module.state_dict())
        torchs = call(theirs, leaves, with_states)
    for i, (y, y_of_torch) in enumerate(zip(without, torchs, strict=True)):
        close(y, found[f"output {i}"].detach(), 1e-14, name)
        assert y.shape == y_of_torch.shape
        assert y.is_contiguous() == y_of_torch.is_contiguous()


@pytest.mark.parametrize("name", ["RNN", "LSTM two layers", "GRU", *CELLS])
def test_loops_of_single_steps_pass_gradgradcheck(name):
    module = make(name)
    u, *states = leaves_of(module, single=False)

    def f(u, W, *states):
        weights = {key: W for key in dict(module.named_parameters()) if key.startswith("weight_hh")}
        with_W = torch.func.functional_call
        for _ in range(3):
            out = with_W(module, weights, (u, states if len(states) > 1 else states[0]))
            last = out[1] if name in MODULES else out
            states = (last,) if isinstance(last, torch.Tensor) else last
        return states[0]

    W = next(p for key, p in module.named_parameters() if key.startswith("weight_hh"))
    W = W.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(f, (u, W, *states))
    assert torch.autograd.gradgradcheck(f, (u, W, *states))


@pytest.mark.parametrize("name", MODULES)
def test_outputs_of_one_step_can_be_edited_in_place(name, place):
    found = []
    for library in (nn, co.nn):
        module = make(name, library)
        leaves = leaves_of(module, single=False)
        outputs = call(module, leaves)
        for y in outputs:
            y *= 2
            y[0] = 0
        gradients = torch.autograd.grad(sum(y.sum() for y in outputs), leaves)
        found.append([*outputs, *gradients])
    close(found[1], found[0], 1e-13, name)


@pytest.mark.parametrize("name", ["RNN two layers", "LSTM two layers", "GRU two layers"])
def test_dropout_between_layers_draws_as_torchs(name, place):
    found = []
    for library in (nn, co.nn):
        module = make(name, library, dropout=0.5)
        torch.manual_seed(3)
        found.append(call(module, leaves_of(module, single=False)))
        assert not torch.equal(found[-1][0], call(module.eval(), leaves_of(module, False))[0])
    close(found[1], found[0], 1e-13, "dropout")


@pytest.mark.parametrize("name", ["RNN", "LSTM two layers", "GRU"])
def test_a_recorded_loop_has_the_costates_of_one_call(name):
    """Single steps are recorded as sweeps: their costates are those of all steps in one call."""
    module = make(name, batch_first=False)
    _, *states = leaves_of(module, single=False)
    hx = tuple(states) if len(states) > 1 else states[0]
    u = torch.randn(4, 2, 3, **DOUBLE)
    with co.record(module) as whole:
        output, _ = module(u, hx)
    lam = whole.costates(output[-1].square().sum(-1))
    with co.record(module) as loop:
        for t in range(4):
            step_output, hx = module(u[t : t + 1], hx)
    loss = step_output[0].square().sum(-1)
    by_step = loop.costates(loss)
    for layer in range(module.num_layers):
        [at_once] = lam.select(layer=layer)
        for t, one in enumerate(by_step.select(layer=layer)):
            close(one.lam[1], at_once.lam[t + 1], 1e-12, f"step {t}")
    # The same loop without a tape ends in the same loss and gradient.
    recorded = torch.autograd.grad(loss.sum(), list(module.parameters()))
    hx = tuple(states) if len(states) > 1 else states[0]
    for t in range(4):
        step_output, hx = module(u[t : t + 1], hx)
    plain = torch.autograd.grad(step_output.square().sum(), list(module.parameters()))
    close(plain, recorded, 1e-12, "gradient")


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward mode": forward_ad.dual_level,
    "recording": lambda: co.record(co.nn.GRU(2, 2)),
}


@pytest.mark.parametrize("name", ["LSTM", pytest.param("GRU", marks=pytest.mark.thorough)])
def test_what_is_unusual_is_swept(name, monkeypatch):
    u = torch.randn(1, 2, 3)
    module = getattr(co.nn, name)(3, 4)
    with sweeps_counted(monkeypatch) as count:

        def sweeps_of(f):
            count.clear()
            f()
            return len(count)

        assert sweeps_of(lambda: module(u)) == 0
        assert sweeps_of(lambda: module(torch.cat([u, u]))) == 1
        for enter in CONTEXTS.values():
            with enter():
                assert sweeps_of(lambda: module(u)) == 1
        assert sweeps_of(lambda: torch.func.grad(lambda y: module(y)[0].sum())(u)) == 1
        for options in ({"engine": "eager"}, {"zoneout": 0.1}, {"recurrent_dropout": 0.1}):
            other = getattr(co.nn, name)(3, 4, **options)
            assert sweeps_of(lambda: other(u)) == 1  # noqa: B023
        parametrizations.orthogonal(module, "weight_hh_l0")
        assert sweeps_of(lambda: module(u)) == 1
    if name == "LSTM":
        assert co.nn.LSTM(3, 4, proj_size=2)(u)[0].shape == (1, 2, 2)
        assert co.nn.LSTM(3, 4, peephole=True)(u)[0].shape == (1, 2, 4)


def test_refusals_of_one_step_are_those_of_a_sweep():
    u, h = torch.randn(1, 2, 3), torch.zeros(1, 2, 4)
    module, cell = co.nn.GRU(3, 4), co.nn.GRUCell(3, 4)
    freed = torch.randn(1, 2, 3)
    freed.untyped_storage().resize_(0)
    for given, said in (
        ((u.to_sparse(),), "sparse"),
        ((freed,), "was freed"),
        ((u.double(),), "dtype|type"),
        ((u, h.double()), "hx is float64"),
        ((u, h[:, :1]), "Expected hidden size"),
        ((u, (h, h)), "hx must be a tensor"),
        ((u[..., :2],), "input.size"),
        ((torch.vmap, u), "tensor"),
    ):
        with pytest.raises((co.CoadjointError, RuntimeError, ValueError), match=said):
            module(*given)
    for given, said in (
        ((u[0], h[0, :1]), "Input batch size 2 doesn't match hidden0"),
        ((u[0, :, :2],), "inconsistent input_size"),
        ((u[0].double(),), "convert with"),
        ((u,), "1D or 2D"),
    ):
        with pytest.raises((co.CoadjointError, RuntimeError, ValueError), match=said):
            cell(*given)
    with pytest.raises(NotImplementedError, match=r"torch\.vmap over a recurrence"):
        torch.vmap(module)(torch.stack([u, u]))
    assert module(torch.zeros(1, 0, 3))[0].shape == (1, 0, 4)
    assert cell(torch.zeros(0, 3)).shape == (0, 4)
    with torch.no_grad():
        module.weight_hh_l0.untyped_storage().resize_(0)
    assert one_step.step_of_layers(module, module._weight_names, u, None) is None


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"])
def test_new_states_may_be_changed_before_a_backward_pass(name, place):
    module = getattr(co.nn, name)(3, 4, dtype=torch.float64)
    u = torch.randn(*(() if name.endswith("Cell") else (1,)), 2, 3, dtype=torch.float64)
    gradients = []
    for change in (False, True):
        module.zero_grad()
        outputs = tree_leaves(module(u))
        loss = sum((k + 1) * y.sum() for k, y in enumerate(outputs))
        if change:
            with torch.no_grad():
                for y in outputs:
                    y.fill_(3)
        loss.backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    for kept, changed in zip(*gradients, strict=True):
        assert torch.equal(kept, changed)


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"])
def test_outputs_share_no_memory(name, place):
    module = getattr(co.nn, name)(3, 4)
    u = torch.randn(*(() if name.endswith("Cell") else (1,)), 2, 3)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            outputs = tree_leaves(module(u))
        assert len({y.untyped_storage().data_ptr() for y in outputs}) == len(outputs)


def test_other_devices_are_left_to_sweeps():
    u, h = torch.randn(1, 2, 3), torch.zeros(1, 2, 4)
    elsewhere = torch.zeros(1, 2, 4, device="meta")
    module = co.nn.GRU(3, 4)
    names = module._weight_names
    assert one_step.step_of_layers(module, names, u, h) is not None
    assert one_step.step_of_layers(module, names, u, elsewhere) is None
    assert one_step.step_of_layers(module, names, u.to("meta"), None) is None
    on_meta = co.nn.GRU(3, 4, device="meta")
    assert one_step.step_of_layers(on_meta, names, u.to("meta"), elsewhere) is None
    with pytest.raises(co.InputError, match="on meta"):
        module(u, elsewhere)
