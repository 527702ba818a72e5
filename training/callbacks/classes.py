"""Predicted classes as a CSV file in the folder of the run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BasePredictionWriter

from training import disk


class ClassWriter(BasePredictionWriter):
    """``classes.csv``: a row ``image,class,probability`` for each image, then a column with the
    probability of every class, under its name.

    The model's predict step returns probabilities (B, K) of the batch's names. The names of the
    classes are the data's `class_names`, or 0 ... K - 1 where it has none.

    Raises:
        DiskError: the rows of a batch cannot be written; those before it are there.
    """

    def __init__(self) -> None:
        super().__init__("batch")
        self._begun = False

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = False
        if trainer.is_global_zero:
            with disk.replaced(_path(trainer)):
                pass  # removes the rows of an earlier prediction in this folder
        trainer.strategy.barrier()

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if not batch.names:
            return
        rows = prediction.tolist()
        data: Any = trainer.datamodule  # pyright: ignore
        names = data.class_names or [str(label) for label in range(len(rows[0]))]
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        if not self._begun:
            table.writerow(["image", "class", "probability", *names])
            self._begun = True
        for image, row in zip(batch.names, rows, strict=True):
            best = max(row)
            table.writerow([image, names[row.index(best)], best, *row])
        disk.append(_path(trainer), text.getvalue())


def _path(trainer: pl.Trainer) -> Path:
    return Path(trainer.default_root_dir) / "classes.csv"
