"""Checking values against the annotations of what is called with them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from training.configuration.errors import MisconfigurationException

NUMBERS = (int, float, bool)
# What no text and no number is, and becomes nowhere.
NO_TEXT = (*NUMBERS, type(None), timedelta)
TENSOR = "<class 'torch.Tensor'>"  # nor this one, in words: torch takes a second to import
NO_NUMBER = (str, type(None), timedelta, dict, list)
ANYTHING = (Any, object, inspect.Parameter.empty)


def check_kinds(name: str, called: Any, values: Mapping[str, Any]) -> None:
    """Checks numbers, texts and nulls among the arguments of a call; all else is left to the call.

    Args:
        name: of the call in the configuration.
        called: a class or a function. What has no annotation, or one that cannot be read, takes
            any value.

    Raises:
        MisconfigurationException: text stands where a number belongs, a number where text does, or
            null where there must be a value.
    """
    try:
        hints = typing.get_type_hints(called.__init__ if inspect.isclass(called) else called)
        parameters = inspect.signature(called).parameters
    except (AttributeError, NameError, TypeError, ValueError):
        return
    for key, value in values.items():
        if key not in parameters or (isinstance(value, str) and "${" in value):
            continue
        allowed = _members(hints.get(key, Any))
        if any(kind in ANYTHING for kind in allowed) or value == parameters[key].default:
            continue
        if value is None:
            fits = type(None) in allowed
        elif isinstance(value, str):
            fits = value in allowed or any(
                kind not in NO_TEXT and repr(kind) != TENSOR
                for kind in allowed
                if not isinstance(kind, str)
            )
        else:
            fits = not isinstance(value, NUMBERS) or any(
                kind not in NO_NUMBER for kind in allowed if not isinstance(kind, str)
            )
        if not fits:
            raise MisconfigurationException(
                f"{name}.{key}: expected {_described(allowed)}, got {value!r}"
            )


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type, and the words of a Literal."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in parts for member in _members(part))
    return parts if origin is typing.Literal else (origin or annotation,)


def _described(allowed: tuple[Any, ...]) -> str:
    words = [
        word
        for kinds, word in (
            ((int, float), "a number"), ((bool,), "true or false"), ((str,), "text"),
            ((type(None),), "null"),
        )
        if set(kinds) & set(allowed)
    ]  # fmt: skip
    words += [repr(kind) for kind in allowed if isinstance(kind, str)]
    return " or ".join(words) or "another kind of value"
