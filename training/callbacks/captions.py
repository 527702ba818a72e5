"""Predicted captions as lines of JSON in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BasePredictionWriter

from training import disk


class CaptionWriter(BasePredictionWriter):
    """``captions.jsonl``: a line ``{"image": <name of the image>, "caption": ...}`` for each.

    The model's predict step returns a caption for each of the batch's names.

    Raises:
        DiskError: the captions of a batch cannot be written; those before it are there.
    """

    def __init__(self) -> None:
        super().__init__("batch")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with disk.replaced(_path(trainer)):
                pass  # removes the captions of an earlier prediction in this folder
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
        lines = (
            json.dumps({"image": disk.plain(name), "caption": caption})
            for name, caption in zip(batch.names, prediction, strict=True)
        )
        disk.append(_path(trainer), "".join(f"{line}\n" for line in lines))


def _path(trainer: pl.Trainer) -> Path:
    return Path(trainer.default_root_dir) / "captions.jsonl"
