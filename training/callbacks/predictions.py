"""Predictions as files in the folder of the run.

A model's predict step returns a prediction for each of the batch's `names`. `class_names` of the
data says what the classes are called; where it is None, numbers do.

B batch, K classes, H height, W width.
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import BasePredictionWriter
from torch import Tensor

from training import disk
from training.callbacks.pictures import colours, draw_boxes, write


class _TextWriter(BasePredictionWriter, ABC):
    """Writes a text file, a part for each batch, in place of that of an earlier prediction.

    Raises:
        DiskError: a file cannot be written; those before it, and the parts of batches, are there.
    """

    file: str

    def __init__(self) -> None:
        super().__init__("batch")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with disk.replaced(_folder(trainer) / self.file):
                pass
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
        if batch.names:
            path = _folder(trainer) / self.file
            names = getattr(trainer.datamodule, "class_names", None)  # pyright: ignore
            disk.append(path, self.text(batch.names, prediction, names, path))

    @abstractmethod
    def text(
        self, images: Sequence[str], predictions: Any, names: Sequence[str] | None, path: Path
    ) -> str:
        """Returns what is added to the file at `path` for the images of a batch."""


class CaptionWriter(_TextWriter):
    """``captions.jsonl``: a line ``{"image": <name of the image>, "caption": ...}`` for each.

    The predictions are captions.
    """

    file = "captions.jsonl"

    def text(
        self, images: Sequence[str], predictions: Any, names: Sequence[str] | None, path: Path
    ) -> str:
        return "".join(
            json.dumps({"image": disk.plain(image), "caption": caption}) + "\n"
            for image, caption in zip(images, predictions, strict=True)
        )


class ClassWriter(_TextWriter):
    """``classes.csv``: a row ``image,class,probability`` for each image, then a column with the
    probability of every class, under its name.

    The predictions are probabilities (B, K).
    """

    file = "classes.csv"

    def text(
        self, images: Sequence[str], predictions: Any, names: Sequence[str] | None, path: Path
    ) -> str:
        names = names or [str(label) for label in range(predictions.shape[1])]
        rows = _heading(path, "image", "class", "probability", *names)
        for image, row in zip(images, predictions.tolist(), strict=True):
            best = max(row)
            rows.append([image, names[row.index(best)], best, *row])
        return _csv(rows)


class MaskWriter(_TextWriter):
    """``masks/<name of the image>.png``: the value of a pixel is its class, and viewers show the
    colours of PASCAL VOC. ``masks.csv``: a row ``image,value,class,share`` for each class of an
    image, with its name and its share of the pixels.

    The predictions are masks (H, W) uint8.
    """

    file = "masks.csv"

    def text(
        self, images: Sequence[str], predictions: Any, names: Sequence[str] | None, path: Path
    ) -> str:
        rows = _heading(path, "image", "value", "class", "share")
        palette = colours().flatten().tolist()
        for image, mask in zip(images, predictions, strict=True):
            values, counts = torch.unique(mask, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                label = names[value] if names else str(value)
                rows.append([image, value, label, f"{count / mask.numel():.6f}"])
            picture = Image.fromarray(mask.cpu().numpy())
            picture.putpalette(palette)
            write(path.parent / "masks" / disk.file_name(image, ".png"), picture)
        return _csv(rows)


class BoxWriter(BasePredictionWriter):
    """``boxes/<name of the image>.png``: the image with its boxes, and ``detections.json``: all
    boxes as COCO's results (https://cocodataset.org/#format-results), which `COCO.loadRes` of
    pycocotools reads. ``image_id`` is the id in the annotation file, or of the images of a folder
    the name of the file; ``category_id`` is that of the annotation file of the training.

    The predictions are boxes, scores and classes; the model's `category_ids` has the id of each
    class. The data's `read` returns an image.

    Args:
        min_score: the least probability of a box that is drawn.

    Raises:
        DiskError: a file cannot be written; those before it are there.
    """

    def __init__(self, min_score: float = 0.3) -> None:
        super().__init__("batch")
        self.min_score = min_score
        self._results: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._results = []

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        ids = pl_module.category_ids
        data: Any = trainer.datamodule  # pyright: ignore
        names = data.class_names or [str(number) for number in ids]
        for name, image_id, found in zip(batch.names, batch.ids, prediction, strict=True):
            image_id = disk.plain(image_id) if isinstance(image_id, str) else image_id
            columns = (values.tolist() for values in found)
            for box, score, label in zip(*columns, strict=True):
                self._results.append(
                    {"image_id": image_id, "category_id": ids[label], "bbox": box, "score": score}
                )
            path = _folder(trainer) / "boxes" / disk.file_name(name, ".png")
            write(path, self._draw(data.read(name), found, names))

    def _draw(self, image: Tensor, found: Any, names: Sequence[str]) -> Image.Image:
        picture = Image.fromarray(image.movedim(0, -1).contiguous().numpy())
        shown = found.scores >= self.min_score
        boxes, classes, scores = found.boxes[shown], found.classes[shown], found.scores[shown]
        boxes[:, 2:] += boxes[:, :2]
        texts = [f"{names[c]} {score:.2f}" for c, score in zip(classes, scores, strict=True)]
        draw_boxes(picture, boxes, classes, texts)
        return picture

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        results = self._results
        if trainer.world_size > 1:
            parts: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, results)
            results = [each for part in parts for each in part]
        if trainer.is_global_zero:
            with disk.replaced(_folder(trainer) / "detections.json") as file:
                file.write(json.dumps(results).encode())


def _folder(trainer: pl.Trainer) -> Path:
    return Path(trainer.default_root_dir)


def _heading(path: Path, *columns: str) -> list[Any]:
    """Returns the first rows of what is added to a table: its columns, where it is empty."""
    return [] if path.stat().st_size else [columns]


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
