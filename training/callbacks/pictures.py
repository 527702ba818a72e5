"""Pictures of inputs, targets and predictions: PNG files in the folder of the run, and at W&B.

B batch, S image size.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
# The layout of columns of images, in pixels: the least side of one, and the height of a line of
# text.
MIN_SIDE, LINE = 192, 24
IGNORED = 255  # pixels that count in no loss; "unlabelled" in the legend


class Pictures(pl.Callback, ABC):
    """Draws the first images of the first batch of each validation, one a row, to
    ``pictures/epoch_<number>.png``, and logs the file to W&B as ``val/pictures``.

    The data module's method `pixels` undoes the normalisation.
    """

    @abstractmethod
    def draw(
        self, pixels: Tensor, batch: Any, outputs: Any, names: Sequence[str] | None
    ) -> Image.Image:
        """Returns the picture.

        Args:
            pixels: (B, S, S, 3) uint8, at most `SHOWN` images, the first of the batch.
            batch: the whole batch.
            outputs: of the model's validation step.
            names: of the classes, where the data has them.
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
        names = getattr(datamodule, "class_names", None)
        picture = self.draw(pixels, batch, outputs, names)
        if not disk.attempt(path, lambda: write(path, picture)):
            return
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("val/pictures", [str(path)], step=trainer.global_step)
                self.publish(logger, trainer.global_step, pixels.numpy(), batch, outputs, names)

    def publish(
        self, logger: WandbLogger, step: int, pixels: np.ndarray, batch: Any, outputs: Any,
        names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Logs what W&B shows in a way of its own; the arguments are as for `draw`."""
        return


class DenoisingPictures(Pictures):
    """Draws the noisy image, what the model made of it, and the image itself, side by side, under
    headings. The model's validation step returns the first two, (B, 3, S, S) uint8."""

    def draw(
        self, pixels: Tensor, batch: Any, outputs: Any, names: Sequence[str] | None
    ) -> Image.Image:
        noisy, denoised = (part[:SHOWN].movedim(1, -1).cpu() for part in outputs)
        return _draw_columns({"noisy": noisy, "denoised": denoised, "image": pixels})


class SegmentationPictures(Pictures):
    """Draws image, target and prediction side by side, under headings, and below them the colours
    of the classes that occur. The model's validation step returns the predicted classes (B, S, S).
    """

    def draw(
        self, pixels: Tensor, batch: Any, outputs: Any, names: Sequence[str] | None
    ) -> Image.Image:
        masks = [part[:SHOWN].long().cpu() for part in (batch.labels, outputs)]
        target, prediction = (colours()[mask] for mask in masks)
        images = _draw_columns({"image": pixels, "target": target, "prediction": prediction})
        legend = _legend(torch.stack(masks).unique().tolist(), names, images.width)
        picture = Image.new("RGB", (images.width, images.height + legend.height), "white")
        picture.paste(images)
        picture.paste(legend, (0, images.height))
        return picture

    def publish(
        self, logger: WandbLogger, step: int, pixels: np.ndarray, batch: Any, outputs: Any,
        names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Logs ``val/masks``, images on which W&B lays the masks, with the names of classes."""
        masks = []
        for target, found in zip(batch.labels[:SHOWN].cpu(), outputs[:SHOWN].cpu()):
            labels = torch.stack([target.long(), found.long()]).unique().tolist()
            classes = {label: _name(label, names) for label in labels}
            masks.append(
                {
                    kind: {"mask_data": mask.numpy().astype(np.uint8), "class_labels": classes}
                    for kind, mask in (("target", target), ("prediction", found))
                }
            )
        logger.log_image("val/masks", list(pixels), step=step, masks=masks)


class DetectionPictures(Pictures):
    """Draws the image with the annotated boxes and, beside it, with those found. The model's
    validation step returns what it found in each image.

    Args:
        min_score: the least probability of a box that is drawn.
    """

    def __init__(self, min_score: float = 0.3) -> None:
        self.min_score = min_score

    def draw(
        self, pixels: Tensor, batch: Any, outputs: Any, names: Sequence[str] | None
    ) -> Image.Image:
        size = pixels.shape[1]
        picture = Image.new("RGB", (2 * size, size * len(pixels)))
        for i, image in enumerate(pixels):
            for column, boxes in enumerate(self._of_image(i, batch, outputs).values()):
                drawn = Image.fromarray(image.numpy())
                texts = None if names is None else [names[int(label)] for label in boxes.classes]
                draw_boxes(drawn, boxes.boxes, boxes.classes, texts)
                picture.paste(drawn, (column * size, i * size))
        return picture

    def publish(
        self, logger: WandbLogger, step: int, pixels: np.ndarray, batch: Any, outputs: Any,
        names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Logs ``val/boxes``, images on which W&B lays the boxes, with the names of classes and the
        probabilities, by which it can hide some."""
        overlays = [
            {
                kind: _as_overlay(boxes, names)
                for kind, boxes in self._of_image(i, batch, outputs).items()
            }
            for i in range(len(pixels))
        ]
        logger.log_image("val/boxes", list(pixels), step=step, boxes=overlays)

    def _of_image(self, i: int, batch: Any, outputs: Any) -> dict[str, _Boxes]:
        """The annotated boxes of an image, and those found."""
        real, found = batch.classes[i] >= 0, outputs[i]
        shown = found.scores >= self.min_score
        return {
            "target": _Boxes(batch.boxes[i][real], batch.classes[i][real], None),
            "prediction": _Boxes(found.boxes[shown], found.classes[shown], found.scores[shown]),
        }


class _Boxes(NamedTuple):
    """Boxes of an image, (n, 4): left, top, right and bottom in its pixels; their classes, (n,);
    the probabilities of those found, (n,)."""

    boxes: Tensor
    classes: Tensor
    scores: Tensor | None


def _as_overlay(boxes: _Boxes, names: Sequence[str] | None) -> dict[str, Any]:
    """Boxes as ``wandb.Image`` takes them."""
    labels = boxes.classes.tolist()
    overlays: list[dict[str, Any]] = []
    for i, (box, label) in enumerate(zip(boxes.boxes.tolist(), labels, strict=True)):
        position = dict(zip(("minX", "minY", "maxX", "maxY"), box, strict=True))
        overlay = {"position": position, "domain": "pixel", "class_id": label}
        overlay["box_caption"] = _name(label, names)
        if boxes.scores is not None:
            overlay["scores"] = {"probability": float(boxes.scores[i])}
        overlays.append(overlay)
    classes = {label: _name(label, names) for label in sorted(set(labels))}
    return {"box_data": overlays, "class_labels": classes}


class CaptionPictures(Pictures):
    """Draws the image, and beside it the model's caption and a reference. The model's validation
    step returns its captions."""

    def draw(
        self, pixels: Tensor, batch: Any, outputs: Any, names: Sequence[str] | None
    ) -> Image.Image:
        size = max(pixels.shape[1], MIN_ROW)
        picture = Image.new("RGB", (size + TEXT_WIDTH, size * len(pixels)), "white")
        canvas = ImageDraw.Draw(picture)
        for i, image in enumerate(pixels):
            picture.paste(Image.fromarray(image.numpy()).resize((size, size)), (0, i * size))
            captions = (outputs[i], f"({batch.references[i][0]})")
            text = "\n".join(textwrap.fill(caption, TEXT_COLUMNS) for caption in captions)
            canvas.text((size + MARGIN, i * size + MARGIN), text, "black", _font())
        return picture

    def publish(
        self, logger: WandbLogger, step: int, pixels: np.ndarray, batch: Any, outputs: Any,
        names: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Logs ``val/captions``, a table with every image."""
        import wandb

        rows = [
            [wandb.Image(image), caption, " / ".join(references)]
            for image, caption, references in zip(pixels, outputs, batch.references)
        ]
        logger.log_table("val/captions", ["image", "caption", "references"], rows, step=step)


def _draw_columns(columns: Mapping[str, Tensor]) -> Image.Image:
    """Draws images (n, S, S, 3) uint8, a column for each heading, with sides of at least `MIN_SIDE`
    pixels."""
    rows = torch.cat(list(columns.values()), dim=2).flatten(0, 1)
    larger = -(-MIN_SIDE // next(iter(columns.values())).shape[1])
    images = Image.fromarray(rows.numpy().repeat(larger, 0).repeat(larger, 1))
    picture = Image.new("RGB", (images.width, LINE + images.height), "white")
    picture.paste(images, (0, LINE))
    for column, heading in enumerate(columns):
        _write_text(picture, column * images.width // len(columns), 0, heading)
    return picture


def _legend(labels: list[int], names: Sequence[str] | None, width: int) -> Image.Image:
    """Draws the colour and the name of each class, as many a line as fit."""
    texts = {label: _name(label, names) for label in labels}
    column = LINE + max(int(_font().getlength(text)) for text in texts.values()) + 2 * MARGIN
    columns = max(1, width // column)
    picture = Image.new("RGB", (width, LINE * -(-len(texts) // columns)), "white")
    for i, (label, text) in enumerate(texts.items()):
        x, y = i % columns * column, i // columns * LINE
        square = (x + MARGIN, y + MARGIN // 2, x + LINE, y + LINE - MARGIN // 2)
        colour = tuple(colours()[label].tolist())
        ImageDraw.Draw(picture).rectangle(square, fill=colour, outline="black")
        _write_text(picture, x + LINE, y, text)
    return picture


def _name(label: int, names: Sequence[str] | None) -> str:
    if label == IGNORED:
        return "unlabelled"
    return f"class {label}" if names is None else disk.plain(names[label])


def _write_text(picture: Image.Image, x: int, y: int, text: str) -> None:
    ImageDraw.Draw(picture).text((x + MARGIN, y + MARGIN // 2), text, "black", _font())


def _font() -> Any:
    return ImageFont.load_default(FONT_SIZE)


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
            text = disk.plain(texts[i])
            canvas.rectangle(canvas.textbbox((left, top), text, font), fill="black")
            canvas.text((left, top), text, colour, font)


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
