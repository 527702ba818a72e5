"""Checking what a configuration would call, before it is called."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from training.configuration.errors import MisconfigurationException
from training.configuration.kinds import check_kinds

# Keys beside a `_target_` that are no arguments.
HYDRAS_OWN = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")


def check_targets(config: DictConfig, arguments: Mapping[str, Any]) -> None:
    """Checks every ``_target_`` within a configuration.

    Args:
        arguments: further ones, of the outermost.

    Raises:
        MisconfigurationException: it names nothing that can be called, or does not take the
            arguments beside it.
        Exception: of a module that it names, which cannot be imported.
    """
    root = config._get_full_key("") or "config"
    for name, node in _described(root, OmegaConf.to_container(config)):
        _check_call(name, node, arguments if name == root else {})


def _described(name: str, value: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields the dicts with a ``_target_`` in a value, itself included, and their names."""
    if isinstance(value, dict) and "_target_" in value:
        yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from _described(f"{name}.{key}", item)


def _check_call(name: str, node: dict[Any, Any], arguments: Mapping[str, Any]) -> None:
    """Raises where a ``_target_`` does not take its arguments, and `arguments` beside them."""
    target = node["_target_"]
    if "${" in target:  # what that is, is known later
        return
    found = locate(name, target)
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # of C
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    takes = [
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    given = [key for key in node if key not in HYDRAS_OWN]
    for key in given:
        if key not in takes and inspect.Parameter.VAR_KEYWORD not in kinds:
            close = difflib.get_close_matches(str(key), takes, 1)
            known = close or takes or ["no arguments"]
            raise MisconfigurationException(
                f"{name}.{key}: {target} has no such argument; it takes {', '.join(known)}"
            )
    needed = [n for n in takes if parameters[n].default is inspect.Parameter.empty]
    missing = [n for n in needed if n not in given and n not in arguments]
    if missing and not node.get("_partial_") and "_args_" not in node:
        raise MisconfigurationException(f"{name}: {target} needs {', '.join(missing)}")
    check_kinds(name, found, {key: node[key] for key in given})


def locate(name: str, target: str) -> Any:
    """Returns what a ``_target_`` names.

    Raises:
        MisconfigurationException: there is no such thing, or it cannot be called.
        Exception: of a module of that name, which cannot be imported.
    """
    parts = target.split(".")
    found: Any = _module(parts[0])
    if found is None:
        raise MisconfigurationException(
            f"{name}._target_: there is no module {parts[0]!r}, of {target!r}; install it, or put "
            "its folder on PYTHONPATH"
        )
    for i, part in enumerate(parts[1:], 1):
        owner = found
        found = getattr(owner, part, None)
        if found is None and inspect.ismodule(owner):
            found = _module(".".join(parts[: i + 1]))
        if found is None:
            close = difflib.get_close_matches(part, dir(owner), 1)
            raise MisconfigurationException(
                f"{name}._target_: {'.'.join(parts[:i])} has no {part!r}"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    if not callable(found):
        kind = "a module" if inspect.ismodule(found) else f"a {type(found).__name__}"
        raise MisconfigurationException(
            f"{name}._target_: expected a class or a function, got {target}, {kind}"
        )
    return found


def _module(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # something that the module imports
            raise
        return None
