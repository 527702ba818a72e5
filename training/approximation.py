"""Replacing the layers of a run's model by approximate ones, as its configuration says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
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
        MisconfigurationException: that refuses an argument, a multiplier cannot be compiled, or no
            layer takes it.
    """
    options: Any = OmegaConf.to_container(approx, resolve=True)
    multiplier, _ = options.pop("multiplier"), options.pop("energies", None)
    if multiplier is None:
        return None
    try:
        done = convert(model, multiplier, **options)
    except (BuildError, TypeError, ValueError) as error:
        raise MisconfigurationException(f"approx: {' '.join(str(error).split())}") from error
    if not done.replaced:
        why = "; ".join(f"{name}: {reason}" for name, reason in done.left.items())
        raise MisconfigurationException(f"approx.multiplier: no layer takes it. {why}")
    return done


def find_files(multiplier: Any) -> Any:
    """Returns what ``approx.multiplier`` says, with whole paths in place of names of files, so that
    it says the same in another folder."""
    if isinstance(multiplier, Mapping):
        return {pattern: find_files(each) for pattern, each in multiplier.items()}
    is_file = isinstance(multiplier, str) and Path(multiplier).suffix and Path(multiplier).is_file()
    return os.path.abspath(multiplier) if is_file else multiplier
