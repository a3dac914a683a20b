"""pydantic, or stand-ins for it.

What is written needs no pydantic, and neither does training without a folder. With the stand-ins the classes of
`schemas` can be declared all the same; to check something by them is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import MissingError


class MissingBaseModel:
    """Stands for a BaseModel."""

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        raise MissingError("reading a run folder needs pydantic: pip install pydantic.")


class NeverRaised(Exception):
    """Stands for a ValidationError: nothing is validated."""


def ignore_arguments(*_: Any, **__: Any) -> None:
    """Stands for what describes a field."""


def identity_decorator(**_: Any) -> Any:
    """Stands for a decorator."""
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
