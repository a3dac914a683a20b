"""What a recording depends on beside tensors: a replay repeats operations, and runs no Python.

may_record           does nothing around a call change what it computes or keeps?
function_key         what a function depends on beside its arguments
weights_are_repeatable   are computed weights functions of their parameters alone?
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import types
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from ...checks import answers_late
from ...functions import is_transformed
from ...torch_internals import (
    parametrisations_within,
    saved_tensor_hooks_are_on,
    weights_are_cached,
)
from .capture import is_recording

# Modules whose functions compute the same each time, or draw at random as CUDA graphs do.
KNOWN_PACKAGES = ("builtins", "coadjoint", "math", "operator", "torch")
STRUCTURES = "coadjoint.cells.structures"
TORCH_PARAMETRISATIONS = "torch.nn.utils.parametrizations"
PLAIN_TYPES = (
    type(None), bool, int, float, complex, str, bytes,
    enum.Enum, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


def may_record() -> bool:
    """Is there nothing around this call that a recording would not repeat?

    Not inside transforms of torch.func and other recordings; nor where hooks see what autograd
    keeps, as in torch.utils.checkpoint: they would see that of the rehearsals, too. In
    parametrize.cached() weights are computed before the call.
    """
    if is_transformed() or is_recording() or torch.cuda.is_current_stream_capturing():
        return False
    return not saved_tensor_hooks_are_on() and not weights_are_cached()


class UnknownDependence(Exception):
    """A function depends on something that may change without a sign of it."""


def function_key(f: object) -> Hashable | None:
    """What a function depends on beside its arguments; None if that cannot be told.

    The key of a function written in Python is its code with the values of its free variables,
    defaults and globals, and theirs in turn. A tensor counts as its place in memory: a recording
    reads it there. Modules of torch, methods and objects of the user's have no key.
    """
    try:
        return value_key(f, ())
    except UnknownDependence:
        return None


def value_key(value: object, seen: tuple[int, ...]) -> Hashable:
    """The key of a value of any type. seen: the ids of the functions whose keys contain it."""
    if isinstance(value, PLAIN_TYPES):
        return type(value), value  # the type, too: 1 == 1.0 == True
    if isinstance(value, Tensor):
        if not answers_late(value):  # one number on the CPU would become a constant of the graph
            raise UnknownDependence
        return (value.data_ptr(), value.shape, value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value), *(value_key(y, seen) for y in value)
    if isinstance(value, set | frozenset):
        return frozenset(value_key(y, seen) for y in value)
    if isinstance(value, dict):
        return tuple((value_key(name, seen), value_key(y, seen)) for name, y in value.items())
    if isinstance(value, functools.partial):
        return value_key((value.func, value.args, value.keywords), seen)
    if isinstance(value, types.FunctionType):
        return python_function_key(value, seen)
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | type):
        if not is_known(value):
            raise UnknownDependence
        return value
    is_frozen = dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[union-attr]
    if is_frozen and is_known(type(value)):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]  # type: ignore[arg-type]
        return type(value), *(value_key(y, seen) for y in fields)
    raise UnknownDependence


def is_known(value: types.ModuleType | types.BuiltinFunctionType | type) -> bool:
    """Does this module, built-in function or class belong to a package that is known?"""
    name: str | None
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, type) or value.__self__ is None:
        name = value.__module__
    else:
        # A function of a module has the module as `__self__`, a method such as random.random its
        # object, which may change.
        owner = value.__self__
        return isinstance(owner, types.ModuleType | type) and is_known(owner)
    return name is not None and name.partition(".")[0] in KNOWN_PACKAGES


def python_function_key(f: types.FunctionType, seen: tuple[int, ...]) -> Hashable:
    """The key of a function that is written in Python."""
    if id(f) in seen:  # it calls itself
        return seen.index(id(f))
    seen = (*seen, id(f))
    try:
        parts: list[object] = [cell.cell_contents for cell in f.__closure__ or ()]
    except ValueError:  # a free variable without a value
        raise UnknownDependence from None
    parts += [f.__defaults__, f.__kwdefaults__]
    if (f.__module__ or "").partition(".")[0] not in KNOWN_PACKAGES:
        names = global_names(f.__code__)
        parts += [f.__globals__[name] for name in names if name in f.__globals__]
    return f.__code__, *(value_key(part, seen) for part in parts)


@functools.lru_cache(maxsize=256)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that code reads; UnknownDependence if it imports, or writes to any."""
    return tuple(dict.fromkeys(find_global_names(code)))


def find_global_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals that code reads, and the functions inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            raise UnknownDependence
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from find_global_names(constant)


def weights_are_repeatable(net: nn.Module) -> bool:
    """Are the weights that parametrisations compute functions of their parameters alone?

    Those of the package are, and those of torch that keep no buffers while they are trained.
    Others may draw at random, or keep a state that each call changes.
    """
    for parametrisations in parametrisations_within(net):
        for chain in parametrisations.values():
            if not all(map(is_repeatable_parametrisation, chain.children())):
                return False
    return True


def is_repeatable_parametrisation(parametrisation: nn.Module) -> bool:
    """Does this parametrisation compute the same of the same parameters, at each call?"""
    home = type(parametrisation).__module__
    if home == TORCH_PARAMETRISATIONS:
        return not (parametrisation.training and any(True for _ in parametrisation.buffers()))
    return home == STRUCTURES
