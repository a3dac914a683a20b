"""pydantic, or stand-ins if it is not installed.

Writing a run folder needs no pydantic, and neither does training without a folder. With the
stand-ins the classes of `schemas` can still be declared; checking a value by them raises
MissingError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ..errors import MissingError

F = TypeVar("F", bound=Callable[..., object])


class MissingBaseModel:
    """In place of BaseModel."""

    @classmethod
    def model_validate(cls, value: object) -> NoReturn:
        """Refuse to check anything: that needs pydantic."""
        raise MissingError("reading a run folder needs pydantic: pip install pydantic.")


class NeverRaised(Exception):
    """In place of ValidationError: nothing is validated."""


def ignore_arguments(*_: object, **__: object) -> None:
    """In place of Field, ConfigDict and AfterValidator: accepts whatever they take."""


def identity_decorator(**_: object) -> Callable[[F], F]:
    """In place of model_validator: a decorator that leaves the function as it is."""
    return lambda function: function


if TYPE_CHECKING:
    from pydantic import (
        AfterValidator,
        BaseModel,
        ConfigDict,
        Field,
        ValidationError,
        model_validator,
    )
else:
    try:
        from pydantic import (
            AfterValidator,
            BaseModel,
            ConfigDict,
            Field,
            ValidationError,
            model_validator,
        )
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        BaseModel, ValidationError, model_validator = (
            MissingBaseModel,
            NeverRaised,
            identity_decorator,
        )
        AfterValidator = ConfigDict = Field = ignore_arguments

__all__ = [
    "AfterValidator",
    "BaseModel",
    "ConfigDict",
    "Field",
    "ValidationError",
    "model_validator",
]
