"""Predicted masks as PNG files in the folder of the run, and a table of what they show."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import BasePredictionWriter

from training import disk
from training.callbacks.pictures import colours, write


class MaskWriter(BasePredictionWriter):
    """``masks/<name of the image>.png``: the value of a pixel is its class, and viewers show the
    colours of PASCAL VOC. ``masks.csv``: a row ``image,value,class,share`` for each class of an
    image, with its name and its share of the pixels.

    The model's predict step returns a mask (H, W) uint8 for each of the batch's names. The names of
    the classes are the data's `class_names`, or their values where it has none.

    Raises:
        DiskError: a file cannot be written; those before it are there.
    """

    def __init__(self) -> None:
        super().__init__("batch")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with disk.replaced(_table(trainer)) as file:
                file.write(b"image,value,class,share\n")
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
        palette = colours().flatten().tolist()
        data: Any = trainer.datamodule  # pyright: ignore
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        for name, mask in zip(batch.names, prediction, strict=True):
            values, counts = torch.unique(mask, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                label = data.class_names[value] if data.class_names else str(value)
                table.writerow([name, value, label, f"{count / mask.numel():.6f}"])
            image = Image.fromarray(mask.cpu().numpy())
            image.putpalette(palette)
            write(Path(trainer.default_root_dir) / "masks" / disk.file_name(name, ".png"), image)
        disk.append(_table(trainer), text.getvalue())


def _table(trainer: pl.Trainer) -> Path:
    return Path(trainer.default_root_dir) / "masks.csv"
