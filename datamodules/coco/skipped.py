"""What a data set had to leave out: counted, by name, and said."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from pytorch_lightning.utilities import rank_zero_only

SHOWN = 5

Skipped = Mapping[str, Sequence[str]]  # reason -> names of the images or annotations


class SkippedWarning(UserWarning):
    """A part of the data was damaged or incomplete, and is not used."""


class DamagedError(ValueError):
    """What is wrong with an annotation file, or with an image or an annotation in it."""


@rank_zero_only
def report(what: str, skipped: Skipped) -> None:
    """One warning for each reason, with the count and the first names."""
    for reason, names in skipped.items():
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        warnings.warn(
            f"{what}: {len(names)} skipped, {reason}: {shown}", SkippedWarning, stacklevel=2
        )
