"""The number of samples in each set of the data, shown before a fit or a test."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from datamodules.census import describe
from datamodules.images import DataNotFoundError
from training import console


class Census(pl.Callback):
    """Prints a line for each set of the data, and stops where nothing that counts is in one that
    the run uses: each loss or score of it would be no number.

    Data without a method ``census()`` (:mod:`datamodules.census`) is passed over.

    Raises:
        DataNotFoundError: when the fit or the test starts.
    """

    def __init__(self) -> None:
        self._done = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule  # pyright: ignore
        if self._done or stage not in ("fit", "test") or not hasattr(data, "census"):
            return
        self._done = True
        limits = {"val": trainer.limit_val_batches, "test": trainer.limit_test_batches}
        used = {
            name: counts
            for name, counts in data.census().items()
            if limits.get(name) != 0 and (stage == "fit" or name == stage)
        }
        said = {id(counts): (name, counts) for name, counts in reversed(used.items())}
        for name, counts in reversed(said.values()):  # a set that has two names once
            line = describe(name, counts)
            console.stdout().print(line, soft_wrap=True, markup=False, highlight=False)
        for name, counts in used.items():
            if not counts.counted:
                every = describe(name, counts._replace(missing=()))
                raise DataNotFoundError(f"nothing counts in the data of {every}; {counts.fix}")
