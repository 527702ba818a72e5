"""Predicted captions as lines of JSON in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BasePredictionWriter


class CaptionWriter(BasePredictionWriter):
    """``captions.jsonl``: a line ``{"image": <name of the image>, "caption": ...}`` for each.

    The model's predict step returns a caption for each of the batch's names.
    """

    def __init__(self) -> None:
        super().__init__("batch")

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
        with (Path(trainer.default_root_dir) / "captions.jsonl").open("a") as file:
            for name, caption in zip(batch.names, prediction, strict=True):
                file.write(json.dumps({"image": name, "caption": caption}) + "\n")
