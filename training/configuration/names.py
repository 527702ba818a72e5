"""The names in a command line's overrides: composing the configuration once, before Hydra does."""

from __future__ import annotations

import difflib
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from training.configuration.errors import MisconfigurationException


def check_names(overrides: Iterable[str], conf: Path, own: Sequence[Path]) -> None:
    """Composes the configuration, with the first values of a sweep.

    Hydra's own message takes five lines, and advises to add the key that was misspelt.

    Args:
        conf: the folder of the configuration.
        own: further folders, of the user.

    Raises:
        MisconfigurationException: an override cannot be parsed, or sets a key that does not exist.
    """
    try:
        single = [*_single(OverridesParser.create().parse_overrides([*overrides]))]
        if own:  # --config-dir is no override
            single = [each for each in single if not each.startswith("hydra.searchpath=")]
            paths = (str(folder.resolve()).replace("'", r"\'") for folder in own)
            entries = ", ".join(f"'file://{path}'" for path in paths)
            single.append(f"hydra.searchpath=[{entries}]")
        with (
            warnings.catch_warnings(action="ignore"),  # Hydra warns again
            hydra.initialize_config_dir(str(conf), version_base="1.3"),
        ):
            hydra.compose("config", single)
    except ConfigCompositionException as error:
        cause = error.__cause__
        if not isinstance(cause, ConfigAttributeError | ConfigKeyError):
            raise MisconfigurationException(_line(error)) from error
        raise MisconfigurationException(_advice(cause)) from error
    except OverrideParseException as error:
        name, _, value = error.override.partition("=")
        raise MisconfigurationException(
            f"{name}: {value} is no value in Hydra's grammar; if it is a text, such as a path with "
            f"= or ü in it, put it in quotes within quotes: "
            + shlex.quote(as_override(name, value.strip("\"'")))
        ) from error
    except HydraException as error:
        raise MisconfigurationException(_line(error)) from error


def first_values(arguments: Iterable[str]) -> dict[str, Any]:
    """Returns the value of each override of a command line, the first of a sweep; nothing where one
    cannot be parsed."""
    overrides = [argument for argument in arguments if is_override(argument)]
    parse = OverridesParser.create().parse_overrides
    try:
        single = parse([*_single(parse(overrides))])
    except HydraException:
        return {}
    return {each.key_or_group: each.value() for each in single}


def as_override(name: str, value: str) -> str:
    """Returns an override that sets a text, in quotes where Hydra's grammar needs them."""
    plain = f"{name}={value}"
    try:
        if OverridesParser.create().parse_override(plain).value() == value:
            return plain
    except HydraException:
        pass
    return '{}="{}"'.format(name, value.replace('"', r"\""))


def is_override(argument: str) -> bool:
    return re.match(r"~|[^-].*=", argument) is not None


def _single(overrides: Iterable[Override]) -> Iterator[str]:
    """The overrides of one job."""
    for override in overrides:
        if not override.is_sweep_override():
            yield override.input_line or ""
        elif override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            continue  # of files, which there are
        elif override.is_discrete_sweep():
            yield f"{override.get_key_element()}={next(override.sweep_string_iterator())}"
        else:
            yield f"{override.get_key_element()}=0"  # of an interval


def _advice(error: ConfigAttributeError | ConfigKeyError) -> str:
    siblings = map(str, error.parent_node) if OmegaConf.is_dict(error.parent_node) else ()
    known = [name for name in siblings if not name.startswith("_")]
    inside = str(error.full_key).removesuffix(str(error.key))
    names = difflib.get_close_matches(str(error.key), known, 2) or known
    choices = [" or ".join(inside + name for name in names)] if names else []
    choices.append(f"+{error.full_key}=... to add it")
    return f"{error.full_key}: there is no such key; use {', or '.join(choices)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
