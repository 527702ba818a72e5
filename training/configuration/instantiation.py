"""Making the objects that a configuration describes by their ``_target_``."""

from __future__ import annotations

from typing import Any, TypeVar

import hydra.utils
from hydra.errors import InstantiationException
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from training.configuration.moved import require_current_targets

Kind = TypeVar("Kind")


def instantiate(config: DictConfig, **arguments: Any) -> Any:
    """Does what ``hydra.utils.instantiate`` does, but raises the errors of the called code itself,
    and gives it plain lists and dicts, which ``save_hyperparameters`` may put into checkpoints.

    Raises:
        MisconfigurationException: a value in `config` is not allowed, for which the called code
            raised a ValueError; or there is nothing of the name of a ``_target_``.
    """
    require_current_targets(config)
    try:
        return hydra.utils.instantiate(config, _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) or str(error).startswith("Error locating target"):
            raise MisconfigurationException(" ".join(str(cause).split())) from error
        raise cause or error from None


def instantiate_as(
    kind: type[Kind], name: str, config: Any, expected: str, **arguments: Any
) -> Kind:
    """As :func:`instantiate`, for an entry of a group of the configuration.

    Raises:
        MisconfigurationException: also where it is not an object of `kind`; the message has its
            `name` and what was `expected`.
    """
    described = OmegaConf.is_dict(config) and "_target_" in config
    made = instantiate(config, **arguments) if described else None
    if not isinstance(made, kind):
        raise MisconfigurationException(f"{name}: expected {expected}; got {config}")
    return made
