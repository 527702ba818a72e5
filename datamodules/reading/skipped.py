"""Warnings about the images and annotations that a data set leaves out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from pytorch_lightning.utilities import rank_zero_only

from datamodules.census import printable

SHOWN = 5  # names in a warning

Skipped = Mapping[str, Sequence[str]]  # reason -> names of the images or annotations


class SkippedWarning(UserWarning):
    """A part of the data is damaged or incomplete, and is not used."""


class DamagedError(ValueError):
    """An annotation file, or an image or annotation in it, cannot be used; says why."""


@rank_zero_only
def report(what: str, skipped: Skipped) -> None:
    """Warns once for each reason, with the count and the first names."""
    for reason, names in skipped.items():
        shown = ", ".join(map(printable, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
        warnings.warn(
            f"{what}: {len(names)} skipped, {reason}: {shown}", SkippedWarning, stacklevel=2
        )
