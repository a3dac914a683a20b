"""How objects made of functions reach another process.

pickle, copy.deepcopy, multiprocessing, joblib and torch.save cannot pickle a function that is
defined inside a function, nor one whose name now belongs to the object made of it. Such an object
therefore travels as the call that made it, barrier(1e-3), or as the place where it is defined, the
name `gated` in the module mycells. The other process repeats the call or looks up the name. Run
folders and model files are read without pickle and hold none of this.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import InputError

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Reduced = str | tuple[Any, ...]  # what Python's __reduce_ex__ returns


class Portable:
    """An object made of functions that can be pickled.

    `_origin` holds the function that made it, and the arguments that function was called with.
    """

    _origin: tuple[Callable[..., object], tuple[object, ...], Mapping[str, object]] | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> Reduced:
        """What pickle stores: the call that made the object, or else where it is defined."""
        if self._origin is not None:
            return rebuild, self._origin
        place = place_of(self)
        if place is not None:
            return find_object, place
        return self._reduce_without_place(protocol)

    def _reduce_without_place(self, protocol: SupportsIndex) -> Reduced:
        """Pickle an object that cannot be looked up: attribute by attribute, as Python does."""
        return super().__reduce_ex__(protocol)

    @property
    def _function(self) -> Callable[..., object]:
        """The function that the object was made of."""
        raise NotImplementedError


def remember_origin(
    made: Made, make: Callable[..., object], *args: object, **options: object
) -> Made:
    """Note on `made` that make(*args, **options) makes another one like it, and return it."""
    object.__setattr__(made, "_origin", (make, args, options))  # most are frozen dataclasses
    return made


def remembers_origin(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """A decorator: the objects that `make` returns remember the call."""

    @functools.wraps(make)
    def make_and_remember(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        made = make(*args, **options)
        return remember_origin(made, make_and_remember, *args, **options)

    return make_and_remember


def cached_by_options(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """A decorator: the same options return the same object, however they are passed.

    What is compiled for a cell is kept with the cell, so equal cells should be one object.
    """
    signature = inspect.signature(make)
    known: dict[tuple[object, ...], Made] = {}

    @functools.wraps(make)
    def make_or_find(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        key = tuple(bound.arguments.values())  # every option by position, defaults included
        if key not in known:
            known[key] = remember_origin(make(*bound.args, **bound.kwargs), make_or_find, *key)
        return known[key]

    return make_or_find


def rebuild(
    make: Callable[..., object], args: tuple[object, ...], options: Mapping[str, object]
) -> object:
    """Make an object again, by the call that made it; pickle calls this in the other process."""
    return make(*args, **options)


def place_of(made: Portable) -> tuple[str, str] | None:
    """The module and the name in it under which `made` can be looked up; None if it cannot.

    The name is that of its function, as after @co.cell(); else any variable that holds `made`.
    """
    function = made._function
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", "")
    if module is None:
        return None
    if look_up(module, path) is made:
        return module, path
    # `object` stands for a module that is not imported: nothing in it is `made`
    for name, value in vars(sys.modules.get(module, object)).items():
        if value is made:
            return module, name
    return None


def look_up(module: str, path: str) -> object:
    """The object at `path` in a module that has been imported; None if it does not exist."""
    value: object = sys.modules.get(module)
    for name in path.split("."):  # "Class.attribute" has two parts
        value = getattr(value, name, None)
    return value


ADVICE = (
    "An object sent to another process by name must be at the top level of a module that both "
    "processes import."
)


def find_object(module: str, path: str) -> Portable:
    """The object named `path` in a module, which is imported; pickle calls this when it loads."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{module}.{path} cannot be found in this process: {error}. {ADVICE}"
        ) from None
    found = look_up(module, path)
    if not isinstance(found, Portable):
        raise InputError(
            f"{module}.{path} cannot be found in this process: {module} has no such object. "
            f"{ADVICE}"
        )
    return found


class PicklableModule(nn.Module):
    """A module that can be pickled even where its weights are parametrised.

    torch.nn.utils.parametrize gives a module a class made on the spot, which nobody can look up.
    Here the class that it had before is pickled, and is parametrised again.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Reduced:
        """What pickle stores: how to make an empty module of this class, and its attributes."""
        if not parametrize.is_parametrized(self):
            return super().__reduce_ex__(protocol)
        kind = parametrize.type_before_parametrizations(self)
        names = tuple(self.parametrizations)  # type: ignore[arg-type]
        return empty_module, (kind, names), dict(self.__dict__)


def empty_module(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module of class `kind` whose tensors `names` are parametrised, for pickle to fill.

    Parametrising gives it the class that torch makes on the spot. The empty parameter and the
    identity are placeholders.
    """
    module = kind.__new__(kind)
    nn.Module.__init__(module)  # not that of `kind`, which would draw parameters
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module


# Pickles made before 0.7.1 hold these names.
called = rebuild
found = find_object
bare = empty_module
