"""Replacing the layers of a run's model by approximate ones, as its configuration says."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from torch import nn

from hoconv.approx import Conversion, convert
from hoconv.jit import BuildError
from training.configuration.errors import MisconfigurationException


def approximate(model: nn.Module, approx: Any) -> Conversion | None:
    """Converts a model in place; returns what was replaced, None where nothing is to be.

    Args:
        model: as the start-up table names its layers.
        approx: ``multiplier``, null for none, and other arguments of
            :func:`hoconv.approx.convert`; ``energies`` are of what it costs, not of this.

    Raises:
        MisconfigurationException: that refuses an argument, or a multiplier cannot be compiled.
    """
    options: Any = OmegaConf.to_container(approx, resolve=True)
    multiplier, _ = options.pop("multiplier"), options.pop("energies", None)
    if multiplier is None:
        return None
    try:
        return convert(model, multiplier, **options)
    except (BuildError, TypeError, ValueError) as error:
        raise MisconfigurationException(f"approx: {' '.join(str(error).split())}") from error
