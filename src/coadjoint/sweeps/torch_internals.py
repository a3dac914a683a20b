"""Every private name of torch that the package uses, one small function each.

torch promises nothing about these names. Each was seen to do what it is used for in torch 2.13, and
tests/sweeps/test_torch_internals.py checks that it still does, so that a new version of torch fails
there first. No other file may use a private name (tests/house/test_layers.py).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",  # a context that sees every operation below autograd
    "tree_leaves",  # the leaves of nested lists, tuples and dictionaries
    "unwrap_dead_wrappers",  # arguments without the wrappers of a torch.func transform that ended
]

Method = TypeVar("Method", bound=Callable[..., object])
FAKE = torch._C._TorchDispatchModeKey.FAKE
PROXY = torch._C._TorchDispatchModeKey.PROXY


# modes


class OperationMode(TorchDispatchMode):
    """A TorchDispatchMode that does not load torch.compile's machinery when it is first used."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the method is left as it is, since no compiled code runs inside."""
        return False


def autocast_is_on() -> bool:
    """Is torch.autocast on, for any device?"""
    return torch._C._is_any_autocast_enabled()


class _ForwardModeTurn:
    """Whose turn it is to use forward mode: one thread's at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one thread may nest its own
        self.thread: int | None = None  # the thread that holds the lock


_turn = _ForwardModeTurn()


@contextmanager
def forward_mode() -> Iterator[None]:
    """A context for every torch.func.jvp of the package: one thread at a time is inside.

    torch has one stack of forward-mode levels for all threads. Of two jvps at once, the second uses
    the level of the first; when the first ends, torch raises an error in the second or takes its
    tangent for zero. The result can be differentiated outside: a backward pass needs no level.
    """
    with _turn.lock:
        outer = _turn.thread
        _turn.thread = threading.get_ident()
        try:
            yield
        finally:
            _turn.thread = outer


def forward_mode_is_on() -> bool:
    """Are we inside forward_ad.dual_level()? One that another thread's jvp opened does not count.

    A level that another thread opened outside of `forward_mode` counts: torch does not tell whose
    it is.
    """
    if forward_ad._current_level < 0:
        return False
    thread = _turn.thread
    if thread is not None:
        return thread == threading.get_ident()
    return forward_ad._current_level >= 0  # again: another thread's may have ended meanwhile


def forward_mode_within_jvp() -> AbstractContextManager[None]:
    """Forward mode switched on again inside a Function's jvp, where torch has switched it off."""
    return forward_ad._set_fwd_grad_enabled(True)


def transforms_are_on() -> bool:
    """Is a torch.func transform under way? Then a Function must be applied by torch's `apply`."""
    return torch._C._are_functorch_transforms_active()


def innermost_transform() -> object | None:
    """The transform of torch.func that sees an operation first; None outside of all of them."""
    return torch._C._functorch.peek_interpreter_stack()


def fake_mode_is_on() -> bool:
    """Is FakeTensorMode on, under which tensors have shapes and no values?"""
    return torch._C._get_dispatch_mode(FAKE) is not None


def proxy_mode_is_on() -> bool:
    """Are make_fx or torch.export writing operations down?"""
    return torch._C._get_dispatch_mode(PROXY) is not None


def nothing_intervenes() -> bool:
    """Do operations just compute: no tracing, compiling, autocast, transform, mode, direction?

    One that computes something else sees each operation, or sweeps as one operator.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


# tensors


def saved_tensor_hooks_are_on() -> bool:
    """Do hooks see what autograd keeps, as inside torch.utils.checkpoint and save_on_cpu?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def weights_are_cached() -> bool:
    """Are we inside torch.nn.utils.parametrize.cached()?"""
    return bool(parametrize._cache_enabled)


def is_batched(y: Tensor) -> bool:
    """Is y a tensor of torch.vmap?"""
    return torch._C._functorch.is_batchedtensor(y)


def is_wrapped(y: Tensor) -> bool:
    """Is y wrapped by a transform of torch.func?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(y)


def is_fake(y: Tensor) -> bool:
    """Is y a FakeTensor?"""
    # torch 2.13 imports their module itself. Where it is not imported, there are none.
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(y, module.FakeTensor)


def is_zero_everywhere(y: Tensor) -> bool:
    """Is y a zero of forward mode, which is stored nowhere?"""
    return y._is_zerotensor()


def change_count(y: Tensor) -> int:
    """How many times y has been changed in place."""
    return y._version


def storage_address(storage: UntypedStorage) -> int:
    """The address of torch's record of the storage, the same for all tensors on it."""
    return int(storage._cdata)


def holder_count(storage: UntypedStorage) -> int:
    """How many tensors, views and graphs hold the storage; its Python object counts as one."""
    return torch._C._storage_Use_Count(storage._cdata)


def unflatten(flat: Tensor, like: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """A flat array as views with the shapes of `like`, one after the other."""
    return tuple(torch._utils._unflatten_dense_tensors(flat, like))


def current_stream_address(device: torch.device) -> int:
    """CUDA's name of the current stream on a device; to make torch's object of it takes longer."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(targets, sources)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """||y|| of each tensor in float64, in one call."""
    return list(torch._foreach_norm(tensors, 2, torch.float64))


def scale_all(tensors: list[Tensor], factor: float) -> list[Tensor]:
    """Each tensor times a factor, in one call."""
    return list(torch._foreach_mul(tensors, factor))


# autograd


def backward_is_running() -> bool:
    """Are we inside a backward pass, called by torch's engine in this thread?"""
    return torch._C._current_graph_task_id() != -1


def will_run(node: Node) -> bool:
    """Inside a backward pass: does it lead through this node?

    Raises a RuntimeError for a leaf among the inputs of torch.autograd.grad.
    """
    return torch._C._will_engine_execute_node(node)


# modules


def with_parameters(module: nn.Module, given: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """A context inside which the module's parameters of these names are the `given` tensors."""
    return _reparametrize_module(module, dict(given))


def child_modules(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """The modules directly inside, with names; one with two names comes twice."""
    return list(module._modules.items())


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What module.named_parameters() lists, in a third of its time: many gradients ask for it."""
    if type(module).named_parameters is not nn.Module.named_parameters:  # wrappers have their own
        return list(module.named_parameters())
    found: dict[int, tuple[str, nn.Parameter]] = {}
    visited: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, inner = waiting.pop()
        if id(inner) in visited:
            continue
        visited.add(id(inner))
        for name, p in inner._parameters.items():
            if p is not None and id(p) not in found:  # a shared one has its first name
                found[id(p)] = (prefix + name, p)
        for name in reversed(inner._modules):  # the first child is the next to be visited
            child = inner._modules[name]
            if child is not None:
                waiting.append((f"{prefix}{name}.", child))
    return list(found.values())


def modules_within(module: nn.Module) -> list[nn.Module]:
    """A module and all those inside it, each once; many calls ask for them."""
    found = [module]
    visited = {id(module)}
    for inner in found:  # which grows
        for child in inner._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                found.append(child)
    return found


def parametrisations_within(module: nn.Module) -> list[nn.ModuleDict]:
    """Those of a module and the modules inside it, by the weight."""
    found = [inner._modules.get("parametrizations") for inner in modules_within(module)]
    return [y for y in found if isinstance(y, nn.ModuleDict)]


def buffers_within(module: nn.Module) -> list[Tensor]:
    """Those of a module and the modules inside it."""
    found = [y for inner in modules_within(module) for y in inner._buffers.values()]
    return [y for y in found if y is not None]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of the module itself by name; to read module.name takes longer."""
    return module._parameters


def is_plain_parameter(p: nn.Parameter | None) -> bool:
    """Is it an ordinary parameter, without hooks that would change its gradient, or None?"""
    return p is None or (type(p) is nn.Parameter and not p._backward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Was the module given to torch.compile, or compiled in place (module.compile())?"""
    if module._compiled_call_impl is not None:
        return True
    # torch._dynamo is slow to import; where nobody has imported it, nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_hooks(module: nn.Module) -> bool:
    """Does torch do something around a call of this module: hooks, or compiled code?"""
    return has_own_hooks(module) or has_global_hooks()


def has_own_hooks(module: nn.Module) -> bool:
    """Does this module have hooks of its own, or compiled code? Asked of many maps at each run."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def has_global_hooks() -> bool:
    """Are there hooks around the calls of all modules?"""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def exclude_from_compile(method: Method) -> Method:
    """Decorate a method that torch.compile must not trace."""
    # torch.compiler.disable would import all of torch.compile, which takes seconds.
    return cast(Method, torch._disable_dynamo(method))  # type: ignore[attr-defined]


def fused_cell(name: str) -> Callable[..., Any]:
    """The function behind torch.nn.LSTMCell ('lstm_cell'), GRU ('gru'), and so on."""
    function: Callable[..., Any] = getattr(torch._VF, name)
    return function


# optimisers


def compiler_is_loaded() -> bool:
    """Has anybody imported torch.compile, which takes seconds?"""
    return "torch._dynamo" in sys.modules


@contextmanager
def optimisers_without_compiler() -> Iterator[None]:
    """A context in which a torch optimiser is made, read and filled without torch.compile.

    These methods are marked as not to be traced, and the first call of each imports torch.compile
    for that. Nothing is traced here, so they are called as they are.
    """
    not_traced = "__dynamo_disable"  # the attribute that holds what is called instead
    marked = []
    if not compiler_is_loaded():
        for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
            plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if plain is not None and not hasattr(plain, not_traced):
                setattr(plain, not_traced, plain)
                marked.append(plain)
    try:
        yield
    finally:
        for plain in marked:
            delattr(plain, not_traced)


def is_watched(optimiser: torch.optim.Optimizer) -> bool:
    """Does anybody look on at the optimiser's steps: a hook, a profiler, a `step` of its own?"""
    return bool(
        "step" in vars(optimiser)
        or torch._C._autograd._profiler_enabled()
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimiser._optimizer_step_pre_hooks
        or optimiser._optimizer_step_post_hooks
    )


def bare_step(optimiser: torch.optim.Optimizer) -> Callable[..., object]:
    """The function optimiser.step without its wrappers, to be called where gradients are off."""
    step: Callable[..., object] = inspect.unwrap(type(optimiser).step)
    return step


def take_step(
    optimiser: torch.optim.Optimizer, closure: Callable[[], float | Tensor] | None = None
) -> None:
    """optimiser.step(closure), without importing torch.compile if nobody else has.

    The wrapper around `step` imports it to tell it where a graph ends. What else it does is done
    here: gradients are off. Hooks and profilers are served by the wrapper itself.
    """
    wrapped = type(optimiser).step
    plain = bare_step(optimiser)
    if plain is wrapped or compiler_is_loaded() or is_watched(optimiser):
        optimiser.step(closure)  # type: ignore[arg-type]  # a closure may return a tensor
        return
    with torch.set_grad_enabled(bool(optimiser.defaults.get("differentiable"))):
        plain(optimiser, closure)


# wrappers that spread a module over processes


class WrapperModule(nn.Module):
    """The part of DistributedDataParallel that is read here."""

    module: nn.Module
    static_graph: bool


def wrapper_in_forward() -> WrapperModule | None:
    """The DistributedDataParallel whose forward is under way, or None."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def sharded_modules() -> list[tuple[nn.Module, object]]:
    """The modules that fully_shard has sharded, and the state that it keeps of each."""
    # Slow to import; where nobody has imported it, nothing is sharded.
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    pairs = list(_module_state_mapping.items())
    return [(module, state()) for module, state in pairs if isinstance(module, FSDPModule)]


def is_idle(state: object) -> bool:
    """Is the sharded module with this state of fully_shard outside forward and backward?"""
    training_state = getattr(state, "_training_state", None)  # without it: idle
    return getattr(training_state, "name", "IDLE") == "IDLE"


def is_shard_of_flat_weights(y: Tensor | None) -> bool:
    """Is y this process's share of the flat weights of a FullyShardedDataParallel (FSDP1)?"""
    if y is None or not getattr(y, "_is_flat_param", False):
        return False
    # During the forward y holds the weights of all processes; otherwise it is smaller.
    full_size = getattr(y, "_unpadded_unsharded_size", None)
    return full_size is None or y.numel() < full_size.numel()
