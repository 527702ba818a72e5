"""Pictures of what a model sees and says: PNG files in the folder of the run, and W&B.

B batch, S image size.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image, ImageDraw, ImageFont
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from training import disk

SHOWN = 8  # images
# Of captions: the least height of a row, the width of the text, and its size, in pixels; letters a
# line.
MIN_ROW, TEXT_WIDTH, FONT_SIZE, MARGIN, TEXT_COLUMNS = 96, 480, 14, 8, 64


class Pictures(pl.Callback, ABC):
    """At each validation the first images of the first batch, one a row; in
    ``pictures/epoch_<number>.png``, and for W&B as ``val/pictures``.

    The data module's `pixels` turns normalised images back.
    """

    @abstractmethod
    def draw(self, pixels: Tensor, batch: Any, outputs: Any) -> Image.Image:
        """The picture.

        Args:
            pixels: (B, S, S, 3) uint8, at most `SHOWN` images, the first of the batch.
            batch: the whole batch.
            outputs: of the model's validation step.
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
        datamodule: Any = trainer.datamodule  # pyright: ignore
        pixels = datamodule.pixels(batch.images[:SHOWN]).movedim(1, -1).cpu()
        path = Path(trainer.default_root_dir) / "pictures" / f"epoch_{trainer.current_epoch:04}.png"
        picture = self.draw(pixels, batch, outputs)
        if not disk.attempt(path, lambda: write(path, picture)):
            return
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("val/pictures", [str(path)], step=trainer.global_step)


class SegmentationPictures(Pictures):
    """The image, the truth, the prediction: the model's validation step returns the predicted
    classes (B, S, S)."""

    def draw(self, pixels: Tensor, batch: Any, outputs: Any) -> Image.Image:
        labelled = (colours()[part[:SHOWN].long().cpu()] for part in (batch.labels, outputs))
        return Image.fromarray(torch.cat([pixels, *labelled], dim=2).flatten(0, 1).numpy())


class CaptionPictures(Pictures):
    """The image, and beside it the caption of the model and one that a person wrote: the model's
    validation step returns its captions."""

    def draw(self, pixels: Tensor, batch: Any, outputs: Any) -> Image.Image:
        size = max(pixels.shape[1], MIN_ROW)
        picture = Image.new("RGB", (size + TEXT_WIDTH, size * len(pixels)), "white")
        canvas = ImageDraw.Draw(picture)
        font = ImageFont.load_default(FONT_SIZE)
        for i, image in enumerate(pixels):
            picture.paste(Image.fromarray(image.numpy()).resize((size, size)), (0, i * size))
            captions = (outputs[i], f"({batch.references[i][0]})")
            text = "\n".join(textwrap.fill(caption, TEXT_COLUMNS) for caption in captions)
            canvas.text((size + MARGIN, i * size + MARGIN), text, "black", font)
        return picture


def write(path: Path, picture: Image.Image) -> None:
    """As PNG.

    Raises:
        DiskError: it cannot be written.
    """
    with disk.replaced(path) as file:
        picture.save(file, format="png")


def colours() -> Tensor:
    """(256, 3) uint8: a colour for each class as PASCAL VOC gives them out; 0, the background, is
    black, and 255, the pixels that count in nothing, nearly white."""
    classes = np.arange(256)
    table = np.zeros((256, 3), int)
    for bit in range(8):  # the bits of a class, three at a time, from the highest of each colour
        for channel in range(3):
            table[:, channel] |= (classes >> (3 * bit + channel) & 1) << (7 - bit)
    return torch.from_numpy(table.astype(np.uint8))
