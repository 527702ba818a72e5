"""Predicted masks as PNG files in the folder of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from PIL import Image
from pytorch_lightning.callbacks import BasePredictionWriter

from training.callbacks.pictures import colours, write


class MaskWriter(BasePredictionWriter):
    """``masks/<name of the image>.png``: the value of a pixel is its class, and viewers show the
    colours of PASCAL VOC.

    The model's predict step returns a mask (H, W) uint8 for each of the batch's names.

    Raises:
        DiskError: a mask cannot be written; those before it are there.
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
        palette = colours().flatten().tolist()
        for name, mask in zip(batch.names, prediction, strict=True):
            image = Image.fromarray(mask.cpu().numpy())
            image.putpalette(palette)
            write(Path(trainer.default_root_dir) / "masks" / f"{name}.png", image)
