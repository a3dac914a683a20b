"""Every private name of torch that the package uses, one small function each.

torch promises nothing about these names. Each was seen to do what it is used for in torch 2.13, and
tests/sweeps/test_torch_internals.py checks that it still does, so that a new version of torch fails there first.
No other file may use a private name (tests/house/test_layers.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",  # a context that sees every operation below autograd
    "tree_leaves",  # the leaves of nested lists, tuples and dictionaries
    "unwrap_dead_wrappers",  # arguments without what a transform of torch.func that has ended left around them
]

FAKE = torch._C._TorchDispatchModeKey.FAKE
PROXY = torch._C._TorchDispatchModeKey.PROXY
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# modes


def autocast_is_on() -> bool:
    """Is torch.autocast on, for any device?"""
    return torch._C._is_any_autocast_enabled()


def forward_mode_is_on() -> bool:
    """Are we inside forward_ad.dual_level()?"""
    return forward_ad._current_level >= 0


def forward_mode_within_jvp() -> AbstractContextManager[Any]:
    """Forward mode switched on again inside a Function's jvp, where torch has switched it off."""
    return forward_ad._set_fwd_grad_enabled(True)


def transforms_are_on() -> bool:
    """Is a transform of torch.func under way? Then a Function must be applied by torch's own `apply`."""
    return torch._C._are_functorch_transforms_active()


def innermost_transform() -> Any:
    """The transform of torch.func that sees an operation first; None outside of all of them."""
    return torch._C._functorch.peek_interpreter_stack()


def fake_mode_is_on() -> bool:
    """Is FakeTensorMode on, under which tensors have shapes and no values?"""
    return torch._C._get_dispatch_mode(FAKE) is not None


def proxy_mode_is_on() -> bool:
    """Does make_fx or torch.export write operations down?"""
    return torch._C._get_dispatch_mode(PROXY) is not None


# tensors


def is_batched(y: Tensor) -> bool:
    """Is y one of torch.vmap's?"""
    return torch._C._functorch.is_batchedtensor(y)


def is_wrapped(y: Tensor) -> bool:
    """Is y wrapped by a transform of torch.func?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(y)


def is_fake(y: Tensor) -> bool:
    """Is y a FakeTensor? Their module is slow to import; where nobody has, there are none."""
    module: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(y, module.FakeTensor)


def is_zero_everywhere(y: Tensor) -> bool:
    """Is y what forward mode calls zero, which is stored nowhere?"""
    return y._is_zerotensor()


def change_count(y: Tensor) -> int:
    """How many times y has been changed in place."""
    return y._version


def storage_address(storage: UntypedStorage) -> int:
    """Where torch keeps its record of the storage: the same for all tensors on it, as long as one lives."""
    return storage._cdata


def holder_count(storage: UntypedStorage) -> int:
    """How many tensors, views, graphs and Python objects hold the storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def unflatten(flat: Tensor, like: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """A flat array as views with the shapes of `like`, one after the other."""
    return torch._utils._unflatten_dense_tensors(flat, like)


# autograd


def will_run(node: Any) -> bool:
    """Inside a backward pass: does it lead through this node? An error for a leaf that torch.autograd.grad was asked for."""
    return torch._C._will_engine_execute_node(node)


# modules


def with_parameters(module: nn.Module, given: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
    """Inside, the module's parameters of these names are other tensors."""
    return _reparametrize_module(module, dict(given))


def child_modules(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """The modules right inside by all their names; named_children() leaves out the second name of one."""
    return list(module._modules.items())


def has_parameter(module: nn.Module, name: str) -> bool:
    """Is there a parameter of that name that is not made from another by a parametrisation?"""
    return isinstance(module._parameters.get(name), nn.Parameter)


def is_compiled(module: nn.Module) -> bool:
    """Was the module given to torch.compile, or has it a compiled call of its own (module.compile())?"""
    if module._compiled_call_impl is not None:
        return True
    dynamo: Any = sys.modules.get(
        "torch._dynamo"
    )  # slow to import; where nobody has, nothing is compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_hooks(module: nn.Module) -> bool:
    """Has torch something to do around a call of this module: hooks, or what torch.compile made of it?"""
    own = any(getattr(module, name) for name in HOOKS)
    everywhere = any(getattr(torch_module, name) for name in GLOBAL_HOOKS)
    return own or everywhere or module._compiled_call_impl is not None


def exclude_from_compile(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: torch.compile does not look into the method. torch.compiler.disable would import all of torch.compile,
    which takes a second."""
    return torch._disable_dynamo(method)


def load_compiler() -> None:
    """Import torch.compile, which torch.optim's first use does otherwise."""
    importlib.import_module("torch._dynamo")


def fused_cell(name: str) -> Callable[..., Any]:
    """The function behind torch.nn.LSTMCell ('lstm_cell'), GRUCell, RNNCell."""
    return getattr(torch._VF, name)


# wrappers that spread a module over processes


def wrapper_in_forward() -> Any:
    """The DistributedDataParallel whose forward is under way, or None."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def sharded_modules() -> list[tuple[nn.Module, Any]]:
    """The modules that fully_shard has sharded, and the state that it keeps of each."""
    if (
        "torch.distributed.fsdp" not in sys.modules
    ):  # slow to import; where nobody has, nothing is sharded
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    return [
        (module, state())
        for module, state in list(_module_state_mapping.items())
        if isinstance(module, FSDPModule)
    ]


def is_idle(state: Any) -> bool:
    """Is the module that fully_shard keeps this state of neither in its forward nor in its backward?"""
    training_state = getattr(state, "_training_state", None)
    return getattr(training_state, "name", "IDLE") == "IDLE"


def is_shard_of_flat_weights(y: Any) -> bool:
    """Is y the flat array of a FullyShardedDataParallel (FSDP1), and only this process's share of it?"""
    if not getattr(y, "_is_flat_param", False):
        return False
    whole = getattr(y, "_unpadded_unsharded_size", None)
    return whole is None or y.numel() < whole.numel()
