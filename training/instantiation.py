"""Making the objects that a configuration describes by their ``_target_``."""

from __future__ import annotations

from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from training.moved import require_current_targets


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
