"""What a configuration describes, made."""

from __future__ import annotations

from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig


def instantiate(config: DictConfig, **arguments: Any) -> Any:
    """As ``hydra.utils.instantiate``, with the errors of what is called in place of Hydra's own.

    Raises:
        MisconfigurationException: a value in `config` is not allowed: what was called said so with
            a ValueError.
    """
    try:
        return hydra.utils.instantiate(config, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):
            raise MisconfigurationException(str(error.__cause__)) from error
        raise error.__cause__ or error from None
