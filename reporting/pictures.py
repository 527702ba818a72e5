"""Pictures of what a segmentation model sees: PNG files in the folder of the run, and W&B.

B batch, S image size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from reporting.console import tolerated

SHOWN = 8  # images


class SegmentationPictures(pl.Callback):
    """At each validation the first images of the first batch, one a row: the image, the truth, the
    prediction; in ``pictures/epoch_<number>.png``, and for W&B as ``val/pictures``.

    The model's validation step returns the predicted classes (B, S, S), and the data module's
    `pixels` turns normalised images back.
    """

    @rank_zero_only
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx or trainer.sanity_checking:
            return
        images, labels = (part[:SHOWN] for part in batch)
        datamodule: Any = trainer.datamodule  # pyright: ignore
        columns = [
            datamodule.pixels(images).movedim(1, -1),
            colours()[labels.long().cpu()],
            colours()[outputs[:SHOWN].cpu()],
        ]
        grid = torch.cat([column.cpu() for column in columns], dim=2).flatten(0, 1)
        path = Path(trainer.default_root_dir) / "pictures" / f"epoch_{trainer.current_epoch:04}.png"
        with tolerated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(grid.numpy()).save(path)
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    logger.log_image("val/pictures", [str(path)], step=trainer.global_step)


def colours() -> Tensor:
    """(256, 3) uint8: a colour for each class as PASCAL VOC gives them out; 0, the background, is
    black, and 255, the pixels that count in nothing, nearly white."""
    classes = np.arange(256)
    table = np.zeros((256, 3), int)
    for bit in range(8):  # the bits of a class, three at a time, from the highest of each colour
        for channel in range(3):
            table[:, channel] |= (classes >> (3 * bit + channel) & 1) << (7 - bit)
    return torch.from_numpy(table.astype(np.uint8))
