"""How objects that are made of functions reach another process: pickle, copy.deepcopy, multiprocessing, joblib, torch.save.

A function inside a function cannot be pickled, and a function whose name now belongs to the object made of it neither. So
such an object travels as the call that made it, barrier(1e-3), or as the place where it stands, mycells.py's `gated`. The
other process makes or finds its own. Files of this library hold none of this: they are read without pickle.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import InputError

Given = ParamSpec("Given")
Made = TypeVar("Made")


class Portable:
    """An object made of functions. `_origin`: the function that made it and what that was given."""

    _origin: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._origin is not None:
            return rebuild, self._origin
        place = place_of(self)
        if place is not None:
            return find_object, place
        return self._reduce_without_place(protocol)

    def _reduce_without_place(self, protocol: Any) -> Any:
        """What stands for an object that nobody can look up: its own parts, each pickled as it can."""
        return super().__reduce_ex__(protocol)

    @property
    def _function(self) -> Callable[..., Any]:
        """The function that it was made of."""
        raise NotImplementedError


def remember_origin(made: Made, make: Callable[..., Any], *args: Any, **options: Any) -> Made:
    """`made`, which knows from now on that make(*args, **options) makes another one like it."""
    object.__setattr__(made, "_origin", (make, args, options))  # most are frozen
    return made


def remembers_origin(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """What `make` makes remembers it."""

    @functools.wraps(make)
    def of(*args: Given.args, **options: Given.kwargs) -> Made:
        return remember_origin(make(*args, **options), of, *args, **options)

    return of


def rebuild(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return make(*args, **options)


def place_of(made: Portable) -> tuple[str, str] | None:
    """The module, and the name in it, under which `made` itself is found; None if there is none."""
    function = made._function
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", "")
    if module is None:
        return None
    if look_up(module, path) is made:
        return module, path
    for name, value in vars(sys.modules.get(module, object)).items():
        if value is made:
            return module, name
    return None


def look_up(module: str, path: str) -> Any:
    """What stands at `path` in a module that has been imported; None if nothing does."""
    here: Any = sys.modules.get(module)
    for name in path.split("."):
        here = getattr(here, name, None)
    return here


def find_object(module: str, path: str) -> Any:
    """What `place_of` has found, in this process."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{module}.{path} cannot be found in this process: {error}. {ADVICE}"
        ) from None
    here = look_up(module, path)
    if not isinstance(here, Portable):
        raise InputError(
            f"{module}.{path} cannot be found in this process: {module} has no such object. {ADVICE}"
        )
    return here


ADVICE = (
    "What goes to another process by its name stands at the top level of a module that both import."
)


class PicklableModule(nn.Module):
    """A module that can be pickled where its weights have a structure (torch.nn.utils.parametrize), too.

    torch gives such a module a class made on the spot, which nobody can look up. Here the class it had before is named, and
    given its parametrisations again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not parametrize.is_parametrized(self):
            return super().__reduce_ex__(protocol)
        kind = parametrize.type_before_parametrizations(self)
        names = tuple(self.parametrizations)  # type: ignore[arg-type]
        return empty_module, (kind, names), dict(self.__dict__)


def empty_module(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module of that kind whose tensors of those names are parametrised, and which holds nothing else yet."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module


# Pickles made before 0.7.1 hold these names.
called = rebuild
found = find_object
bare = empty_module
