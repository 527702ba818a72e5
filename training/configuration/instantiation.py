"""Making the objects that a configuration describes by their ``_target_``."""

from __future__ import annotations

from typing import Any, TypeVar

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from training.configuration.errors import MisconfigurationException
from training.configuration.targets import check_targets

Kind = TypeVar("Kind")


def instantiate(config: DictConfig, **arguments: Any) -> Any:
    """Does what ``hydra.utils.instantiate`` does, but raises the errors of the called code itself,
    and gives it plain lists and dicts, which ``save_hyperparameters`` may put into checkpoints.

    Raises:
        MisconfigurationException: a ``_target_`` names nothing that can be called, or does not take
            the arguments beside it; or a value is not allowed, for which the called code raised a
            ValueError.
    """
    check_targets(config, arguments)
    try:
        return hydra.utils.instantiate(config, _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError):
            raise MisconfigurationException(" ".join(str(cause).split())) from error
        raise cause or error from None


def entries(group: str, described: Any) -> dict[str, Any]:
    """Returns the entries by name of a group of which a run has several, without those of null.

    Raises:
        MisconfigurationException: an entry has no name.
    """
    found = {name: each for name, each in (described or {}).items() if each is not None}
    if "_target_" in found:
        raise MisconfigurationException(
            f"{group}: expected a name for each entry, such as "
            f"{{mine: {{_target_: {found['_target_']}}}}}; got a _target_ without one"
        )
    return found


def instantiate_as(
    kind: type[Kind], name: str, config: Any, expected: str, /, **arguments: Any
) -> Kind:
    """As :func:`instantiate`, for an entry of a group of the configuration.

    Raises:
        MisconfigurationException: also where it is not an object of `kind`; the message has its
            `name` and what was `expected`.
    """
    if not OmegaConf.is_dict(config) or "_target_" not in config:
        raise MisconfigurationException(f"{name}: expected {expected}; got {config}")
    made = instantiate(config, **arguments)
    if not isinstance(made, kind):
        raise MisconfigurationException(f"{name}: expected {expected}; got {config._target_}")
    return made
