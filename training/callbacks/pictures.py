"""Pictures of inputs, targets and predictions: PNG files in the folder of the run, and at W&B.

B batch, S image size.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
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

SHOWN = 8  # images a picture
# The layout of captions, in pixels: the least height of a row, the width of the text, its size and
# the margin around it.
MIN_ROW, TEXT_WIDTH, FONT_SIZE, MARGIN = 96, 480, 14, 8
TEXT_COLUMNS = 64  # characters a line


class Pictures(pl.Callback, ABC):
    """Draws the first images of the first batch of each validation, one a row, to
    ``pictures/epoch_<number>.png``, and logs the file to W&B as ``val/pictures``.

    The data module's method `pixels` undoes the normalisation.
    """

    @abstractmethod
    def draw(self, pixels: Tensor, batch: Any, outputs: Any) -> Image.Image:
        """Returns the picture.

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
    """Draws image, target and prediction side by side. The model's validation step returns the
    predicted classes (B, S, S)."""

    def draw(self, pixels: Tensor, batch: Any, outputs: Any) -> Image.Image:
        labelled = (colours()[part[:SHOWN].long().cpu()] for part in (batch.labels, outputs))
        return Image.fromarray(torch.cat([pixels, *labelled], dim=2).flatten(0, 1).numpy())


class DetectionPictures(Pictures):
    """Draws the image with the annotated boxes and, beside it, with those found. The model's
    validation step returns what it found in each image.

    Args:
        min_score: the least probability of a box that is drawn.
    """

    def __init__(self, min_score: float = 0.3) -> None:
        self.min_score = min_score

    def draw(self, pixels: Tensor, batch: Any, outputs: Any) -> Image.Image:
        size = pixels.shape[1]
        picture = Image.new("RGB", (2 * size, size * len(pixels)))
        for i, image in enumerate(pixels):
            real, shown = batch.classes[i] >= 0, outputs[i].scores >= self.min_score
            for column, boxes, classes in (
                (0, batch.boxes[i][real], batch.classes[i][real]),
                (size, outputs[i].boxes[shown], outputs[i].classes[shown]),
            ):
                drawn = Image.fromarray(image.numpy())
                draw_boxes(drawn, boxes, classes)
                picture.paste(drawn, (column, i * size))
        return picture


class CaptionPictures(Pictures):
    """Draws the image, and beside it the model's caption and a reference. The model's validation
    step returns its captions."""

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


def draw_boxes(
    picture: Image.Image, boxes: Any, classes: Any, texts: Sequence[str] | None = None
) -> None:
    """Draws boxes into a picture, in the colours of their classes.

    Args:
        boxes: (n, 4): left, top, right and bottom in pixels.
        classes: (n,), from 0 on.
        texts: what is written into each box.
    """
    canvas = ImageDraw.Draw(picture)
    font = ImageFont.load_default(FONT_SIZE)
    for i, (box, label) in enumerate(zip(boxes.tolist(), classes.tolist(), strict=True)):
        colour = tuple(colours()[label + 1].tolist())  # the first colour is the background's
        corners = (*box[:2], *(max(0, end - 1) for end in box[2:]))  # the last pixels inside
        canvas.rectangle(_ordered(corners), outline=colour, width=max(1, picture.width // 200))
        if texts is not None:
            left, top = box[0] + MARGIN / 2, box[1]
            canvas.rectangle(canvas.textbbox((left, top), texts[i], font), fill="black")
            canvas.text((left, top), texts[i], colour, font)


def _ordered(corners: tuple[float, ...]) -> tuple[float, float, float, float]:
    """Returns the corners of a box that may be less than a pixel wide, as Pillow wants them."""
    left, top, right, bottom = corners
    return left, top, max(left, right), max(top, bottom)


def write(path: Path, picture: Image.Image) -> None:
    """Writes a picture as PNG.

    Raises:
        DiskError: it cannot be written.
    """
    with disk.replaced(path) as file:
        picture.save(file, format="png")


def colours() -> Tensor:
    """Returns the colour of each class, as PASCAL VOC defines them, (256, 3) uint8: 0, the
    background, is black; 255, ignored pixels, nearly white."""
    classes = np.arange(256)
    table = np.zeros((256, 3), int)
    for bit in range(8):  # three bits of the class a round, to the highest free bit of each channel
        for channel in range(3):
            table[:, channel] |= (classes >> (3 * bit + channel) & 1) << (7 - bit)
    return torch.from_numpy(table.astype(np.uint8))
