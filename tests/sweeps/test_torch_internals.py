"""Each private name of torch still does what the package uses it for.

A version of torch that changes one fails here first.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from coadjoint.sweeps import torch_internals as internals


def test_autocast_is_noticed():
    assert not internals.autocast_is_on()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert internals.autocast_is_on()
        with torch.autocast("cpu", enabled=False):
            assert not internals.autocast_is_on()


def test_forward_mode_is_noticed():
    assert not internals.forward_mode_is_on()
    with forward_ad.dual_level():
        assert internals.forward_mode_is_on()
    assert not internals.forward_mode_is_on()


def test_forward_mode_is_kept_within_a_jvp():
    """torch switches it off there, and a direction would be lost."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, dx):
            y = forward_ad.make_dual(torch.ones(1), torch.ones(1))
            without = forward_ad.unpack_dual(3 * y).tangent
            with internals.forward_mode_within_jvp():
                within = forward_ad.unpack_dual(3 * y).tangent
            seen.append((without, within))
            return 2 * dx

    seen = []
    with forward_ad.dual_level():
        Double.apply(forward_ad.make_dual(torch.ones(1), torch.ones(1)))
    ((without, within),) = seen
    assert without is None
    assert within.item() == 3


def test_transforms_are_noticed():
    seen = []

    def f(x):
        seen.append(
            (
                internals.transforms_are_on(),
                internals.innermost_transform() is not None,
                internals.is_wrapped(x),
            )
        )
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    f(torch.ones(2))
    assert seen == [(True, True, True), (False, False, False)]


def test_batched_tensors_are_noticed():
    seen = []
    torch.vmap(lambda x: seen.append(internals.is_batched(x)) or x)(torch.ones(2, 3))
    assert seen == [True]
    assert not internals.is_batched(torch.ones(2))


def test_dead_wrappers_are_taken_off():
    """A tensor that a transform has left behind is taken out of its wrapper."""
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.ones(2))
    (found,) = internals.unwrap_dead_wrappers((left[0],))
    assert not internals.is_wrapped(found)
    assert found.tolist() == [1, 1]


FAKE = """
import torch
from coadjoint.sweeps import torch_internals as internals
y = torch.ones(2)
assert not internals.is_fake(y)
assert not internals.fake_mode_is_on()
assert not internals.proxy_mode_is_on()
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode() as mode:
    assert internals.fake_mode_is_on()
    fake = mode.from_tensor(y)
assert internals.is_fake(fake) and not internals.is_fake(y) and not internals.fake_mode_is_on()
from torch.fx.experimental.proxy_tensor import make_fx
seen = []
make_fx(lambda x: seen.append(internals.proxy_mode_is_on()) or x + 1)(y)
assert seen == [True]
"""


@pytest.mark.slow
def test_fake_and_proxy_modes_are_noticed():
    """In a process of its own, where FakeTensor has not been imported before."""
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_zero_tensors_are_noticed():
    assert internals.is_zero_everywhere(torch._efficientzerotensor((2,)))
    assert not internals.is_zero_everywhere(torch.zeros(2))


def test_a_backward_pass_is_told_from_a_forward_pass():
    seen = []
    y = torch.ones(2, requires_grad=True)
    y.register_hook(lambda g: seen.append(internals.backward_is_running()))
    assert not internals.backward_is_running()
    y.sum().backward()
    assert seen == [True]
    assert not internals.backward_is_running()


def test_versions_count_edits_in_place():
    y = torch.zeros(2)
    before = internals.change_count(y)
    y += 1
    assert internals.change_count(y) == before + 1


def test_holders_of_a_storage_are_counted():
    y = torch.zeros(4)
    storage = y.untyped_storage()
    alone = internals.holder_count(storage)
    view = y[1:]
    assert internals.holder_count(storage) == alone + 1
    assert internals.storage_address(view.untyped_storage()) == internals.storage_address(storage)
    assert internals.storage_address(torch.zeros(4).untyped_storage()) != internals.storage_address(
        storage
    )
    del view
    assert internals.holder_count(storage) == alone


def test_a_flat_vector_is_taken_apart_again():
    like = [torch.zeros(2, 3), torch.zeros(4)]
    found = internals.unflatten(torch.arange(10.0), like)
    assert [y.shape for y in found] == [y.shape for y in like]
    assert torch.cat([y.flatten() for y in found]).tolist() == list(range(10))


def test_nodes_that_a_backward_pass_goes_through_are_known():
    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            seen.append([internals.will_run(node) for node, _ in ctx.next_functions])
            return g, g

    seen = []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    middle = 2 * x
    out = Watch.apply(middle, 3 * y)
    torch.autograd.grad(out, middle, retain_graph=True)
    assert seen == [[True, False]]
    seen.clear()
    out.backward()
    assert seen == [[True, True]]


def test_a_leaf_that_was_asked_for_is_an_error():
    """The engine has no node to execute there; functions.needed_inputs takes the error
    for a yes.
    """

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            ((node, _),) = ctx.next_functions
            with pytest.raises(RuntimeError):
                internals.will_run(node)
            return g

    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(Watch.apply(x), x)


def test_parameters_can_be_replaced_for_a_while():
    module = nn.Linear(2, 1)
    own = module.weight
    other = torch.full((1, 2), 3.0)
    with internals.with_parameters(module, {"weight": other}):
        assert module.weight is other
        assert torch.equal(module(torch.ones(1, 2)), 6 + module.bias[None])
    assert module.weight is own


def test_children_are_found_by_all_their_names():
    inner = nn.Linear(1, 1)
    module = nn.ModuleDict({"a": inner, "b": inner})
    assert internals.child_modules(module) == [("a", inner), ("b", inner)]
    assert len(list(module.named_children())) == 1


def test_parameters_are_named_as_torch_names_them():
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.Linear(2, 3, bias=False), shared)
    module = nn.ModuleDict({"first": inner, "second": nn.Sequential(shared, nn.Linear(2, 2))})
    module["second"][1].weight = shared.weight
    module.register_parameter("own", nn.Parameter(torch.zeros(1)))
    ours = internals.named_parameters(module)
    theirs = list(module.named_parameters())
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert all(p is q for (_, p), (_, q) in zip(ours, theirs, strict=True))

    class Named(nn.Linear):
        def named_parameters(self, *args, **options):
            yield "other", self.weight

    assert [name for name, _ in internals.named_parameters(Named(2, 2))] == ["other"]


def test_modules_and_buffers_within_a_module_are_those_that_torch_lists():
    shared = nn.BatchNorm1d(2)
    module = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared, nn.BatchNorm1d(3))})
    module["second"].register_buffer("own", torch.zeros(1))
    module["second"].register_buffer("none", None)
    module["second"].register_module("no module", None)
    found = internals.modules_within(module)
    assert found[0] is module
    assert {id(inner) for inner in found} == {id(inner) for inner in module.modules()}
    assert len(found) == len(list(module.modules()))
    buffers = internals.buffers_within(module)
    assert {id(y) for y in buffers} == {id(y) for y in module.buffers()}
    assert len(buffers) == len(list(module.buffers())) == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
def test_streams_are_told_apart():
    device = torch.device("cuda", torch.cuda.current_device())
    usual = internals.current_stream_address(device)
    assert usual == torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert internals.current_stream_address(device) != usual


def test_parameters_of_a_module_itself_are_known():
    module = nn.Linear(2, 2, bias=False)
    assert list(internals.own_parameters(module)) == ["weight", "bias"]
    assert internals.own_parameters(module)["weight"] is module.weight
    assert internals.is_plain_parameter(module.weight)
    assert internals.is_plain_parameter(None)
    handle = module.weight.register_hook(lambda g: g)
    assert not internals.is_plain_parameter(module.weight)
    handle.remove()
    assert internals.is_plain_parameter(module.weight)
    assert not internals.is_plain_parameter(module.weight.detach())


def test_parameters_that_are_made_from_others_are_not_a_modules_own():
    module = nn.Linear(2, 2)
    assert "weight" in internals.own_parameters(module)
    nn.utils.parametrizations.orthogonal(module)
    assert "weight" not in internals.own_parameters(module)


COMPILED = """
import torch
from coadjoint.sweeps import torch_internals as internals
module = torch.nn.Linear(1, 1)
assert not internals.is_compiled(module)
assert internals.is_compiled(torch.compile(module, backend="eager"))
assert not internals.is_compiled(module)
module.compile(backend="eager")
assert internals.is_compiled(module)

seen = []
class Two(torch.nn.Module):
    def forward(self, x):
        return self.apart(x) + 1
    @internals.exclude_from_compile
    def apart(self, x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return 2 * x
assert torch.compile(Two(), backend="eager")(torch.ones(1)).item() == 3
assert seen == [False]
"""


@pytest.mark.slow
def test_compiled_modules_are_noticed():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_does_not_load_the_compiler():
    code = (
        "import sys; from coadjoint.sweeps import torch_internals; assert 'torch._dynamo' not "
        "in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "kind"), [("gru_cell", nn.GRUCell), ("rnn_tanh_cell", nn.RNNCell)]
)
def test_fused_cells_equal_torchs_modules(name, kind):
    cell, u, h = kind(2, 3), torch.randn(4, 2), torch.randn(4, 3)
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    assert torch.equal(internals.fused_cell(name)(u, h, *weights), cell(u, h))


def test_operations_are_seen_below_autograd():
    class Count(internals.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    seen = []
    with Count():
        torch.ones(2) + 1
    assert "aten.add.Tensor" in seen
    assert internals.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]


def test_names_of_wrappers_exist():
    """What they do in several processes is in tests/nn/test_distributed.py."""
    from torch.distributed._composable_state import _module_state_mapping

    assert hasattr(_module_state_mapping, "items")
    assert hasattr(nn.parallel.DistributedDataParallel, "_active_ddp_module")
    assert internals.wrapper_in_forward() is None
    assert internals.sharded_modules() == []
    assert internals.is_idle(object())
    assert not internals.is_shard_of_flat_weights(torch.zeros(2))
    assert not internals.is_shard_of_flat_weights(None)
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    assert TrainingState.IDLE.name == "IDLE"


def test_hooks_around_a_call_are_noticed():
    """Whatever torch would do around a call of a module is seen: hooks of the module, of all
    modules, a compiled call.
    """
    register = (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )
    module = nn.Linear(1, 1)
    assert not internals.has_hooks(module)
    for name in register:
        handle = getattr(module, name)(lambda *_: None)
        assert internals.has_hooks(module), name
        handle.remove()
        assert not internals.has_hooks(module), name
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert internals.has_hooks(module)
    handle.remove()
    assert not internals.has_hooks(module)
    module.compile(backend="eager")
    assert internals.has_hooks(module)


def test_what_intervenes_is_noticed():
    assert internals.nothing_intervenes()
    seen = []
    torch.func.grad(lambda x: (seen.append(internals.nothing_intervenes()), x.sum())[1])(
        torch.ones(2)
    )
    torch.jit.trace(
        lambda x: (seen.append(internals.nothing_intervenes()), x)[1],
        torch.ones(2),
        check_trace=False,
    )
    for context in (
        torch.autocast("cpu", dtype=torch.bfloat16),
        forward_ad.dual_level(),
        FakeTensorMode(),
    ):
        with context:
            seen.append(internals.nothing_intervenes())
    assert seen == [False] * 5
    assert internals.nothing_intervenes()


STEPS = """
import torch
from coadjoint.optimisers.recipes import OPTIMISERS
from coadjoint.optimisers.states import put_state, state_of
from coadjoint.sweeps import torch_internals as internals

def begin(name):
    p = torch.nn.Parameter(torch.linspace(-1, 2, 5))
    with internals.optimisers_without_compiler():
        recipe = OPTIMISERS[name]
        return p, recipe.make([p], lr=0.1, **recipe.defaults)

def closure(p):
    def value():
        p.grad = 2 * p.detach()
        return float(p.detach().square().sum())
    return value

def moved(name, step):
    p, optimiser = begin(name)
    for _ in range(3):
        p.grad = 2 * p.detach()
        step(optimiser, closure(p)) if name == "lbfgs" else step(optimiser)
        assert torch.is_grad_enabled()
        put_state(optimiser, state_of(optimiser))
    return p.detach()

def marked():
    methods = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
    plain = [getattr(torch.optim.Optimizer, method).__wrapped__ for method in methods]
    return [each for each in plain if getattr(each, "__dynamo_disable", None) is each]

with internals.optimisers_without_compiler():
    with internals.optimisers_without_compiler():
        assert len(marked()) == 4
    assert len(marked()) == 4
usual_zero_grad = torch.optim.Optimizer.zero_grad
torch.optim.Optimizer.zero_grad = lambda self: None  # somebody's own
with internals.optimisers_without_compiler():
    pass
torch.optim.Optimizer.zero_grad = usual_zero_grad
names = [name for name in OPTIMISERS if name not in ("hessian-free", "ridge")]
ours = {name: moved(name, internals.take_step) for name in names}
assert not internals.compiler_is_loaded()

calls = []  # hooks are served
_, watched = begin("sgd")
watched.register_step_post_hook(lambda *given: calls.append(1))
internals.take_step(watched)
assert calls == [1]
assert internals.compiler_is_loaded()

assert not marked()  # what was marked is so no longer
with internals.optimisers_without_compiler():
    assert not marked()  # nothing is gained where the compiler is loaded
for name, p in ours.items():
    def usual(optimiser, *given):
        optimiser.step(*given)
    assert torch.equal(p, moved(name, usual)), name
"""


@pytest.mark.slow
def test_optimisers_step_without_the_compiler_and_to_the_same_bits():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_operation_mode_is_not_wrapped():
    """A wrapped one would import torch._dynamo, which takes seconds, when it is first used."""
    seen = []

    class Names(internals.OperationMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names():
        torch.ones(2) + 1
    assert seen == ["ones", "add"]
    assert Names.__torch_dispatch__.__module__ == __name__
    assert not hasattr(Names.__torch_dispatch__, "__wrapped__")
